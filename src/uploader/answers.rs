//! What the uploader does when an object has ended: answers, deletions, and the removal of what is left.
//!
//! What may go is decided in custody.rs.

use std::io;
use std::sync::Arc;
use std::time::Instant;

use super::{Asked, BucketIndex, Cut, Event, Holding, RETRY_DELAY_MAX, RETRY_DELAY_MIN, Sent, Uploader};
use crate::checkpoint::{Request, RequestId};
use crate::error::{PersistError, RegisterError};
use crate::handle::ChangelogHandle;
use crate::manifest::CompletedObject;
use crate::piece::Piece;
use crate::types::LogId;

impl Uploader {
    /// Answers those whose time is over.
    pub(super) fn expire(&mut self, now: Instant) {
        let expired: Vec<RequestId> =
            self.asked.iter().filter(|(_, asked)| asked.deadline <= now).map(|(id, _)| *id).collect();
        if expired.is_empty() {
            return;
        }
        self.tidy = true;
        for id in &expired {
            self.checkpoints.forget(*id);
            if let Some(Asked { resolver, last, .. }) = self.asked.remove(id) {
                let waited = self.parts.options.persist_timeout;
                // Who waited behind the object of others waited for what made it fail.
                let last = last.or_else(|| self.last_failure.clone());
                resolver.resolve(Err(PersistError::Timeout { waited, last }));
            }
        }
        let finishing = self.finishing.iter_mut().map(|finishing| &mut finishing.cut);
        for cut in self.due.iter_mut().chain(&mut self.cut).chain(finishing) {
            cut.requests.retain(|(id, _)| !expired.contains(id));
        }
        self.sent.retain(|sent| !expired.contains(&sent.id));
        self.due.take_if(|due: &mut Cut| due.requests.is_empty());
    }

    /// Removes what uploads have left behind, of which it is time.
    pub(super) fn sweep(&mut self, now: Instant) {
        let (due, later) = std::mem::take(&mut self.sweeps).into_iter().partition(|(at, _)| *at <= now);
        self.sweeps = later;
        let due: Vec<(Instant, String)> = due;
        for (_, object) in due {
            let mut keep = Vec::new();
            for holding in &self.parts.custody.holdings {
                // Its commit may be recorded in another directory, whose logs may need it. A bucket may be open by another
                // URL than the pieces were written by: names alone count.
                holding.ledger.read(|state| {
                    let pieces = state.objects().get(&object).into_iter().flat_map(|object| &object.pieces);
                    keep.extend(pieces.map(|piece| piece.object.clone()));
                });
            }
            let (sender, name) = (self.parts.sender.clone(), object.clone());
            self.parts.driver.sweep(&name, &keep, move |outcome| {
                let _ = sender.send(Event::Swept { object, outcome });
            });
        }
    }

    /// Nothing is left of an upload in the buckets that are open now.
    pub(super) fn swept(&mut self, object: &str) {
        let named = |holding: &Holding| {
            holding.ledger.read(|state| state.uploads().get(object).map(|upload| upload.buckets.clone()))
        };
        let buckets = self.parts.custody.holdings.iter().filter_map(named).flatten();
        match buckets.into_iter().find(|bucket| self.bucket(bucket).is_none()) {
            None => self.parts.custody.settled(object),
            Some(bucket) => tracing::warn!(
                object,
                bucket = &*bucket,
                "an upload may have left something in a bucket that is not open now; it stays"
            ),
        }
    }

    pub(super) fn bucket(&self, url: &str) -> Option<BucketIndex> {
        self.parts.buckets.iter().position(|bucket| **bucket == *url).map(BucketIndex)
    }

    pub(super) fn answer_all(&mut self, requests: Vec<(RequestId, Request)>, error: &PersistError) {
        self.tidy = true;
        for (id, _) in requests {
            if let Some(Asked { resolver, .. }) = self.asked.remove(&id) {
                resolver.resolve(Err(error.clone()));
            }
        }
    }

    /// All blocks of these requests have left the queue, into objects with numbers up to `last`.
    pub(super) fn sent(&mut self, requests: Vec<(RequestId, Request)>, last: u64) {
        self.sent.extend(requests.into_iter().map(|(id, request)| Sent { id, request, last }));
    }

    /// Answers who has all in complete objects. Those of whose objects one failed join the next object, once the others are
    /// known.
    pub(super) fn answer_sent(&mut self, now: Instant) {
        for Sent { id, request, last } in std::mem::take(&mut self.sent) {
            let ledger = &self.parts.custody.holdings[request.device].ledger;
            let is_lost = self.lost.get(&request.log).is_some_and(|from| *from < request.to);
            if is_lost || ledger.covers(&request) {
                self.answer(id, &request, now);
            } else if self.finishing.iter().any(|finishing| finishing.number <= last) {
                self.sent.push(Sent { id, request, last });
            } else if self.first_pending(request.device) < request.end.unwrap_or(0) {
                let again_at = self.retry_at.unwrap_or(now + RETRY_DELAY_MIN);
                self.checkpoints.ask_again(id, request, again_at);
            } else {
                // Nothing is on its way that could mend it: the answer says what is missing.
                self.answer(id, &request, now);
            }
        }
    }

    /// Gives the handle, if the directory has durably recorded what it names.
    fn answer(&mut self, id: RequestId, request: &Request, now: Instant) {
        let ledger = &self.parts.custody.holdings[request.device].ledger;
        let recorded = || {
            ledger.settle().map_err(|source| PersistError::Manifest {
                object: format!("of log {}", request.log),
                source: Arc::new(source),
            })
        };
        let handle = match self.lost.get(&request.log) {
            Some(&from) if from < request.to => Err(PersistError::Lost { log: request.log, from }),
            _ => recorded().and_then(|()| ledger.handle(request)),
        };
        if handle.is_ok() {
            let seconds = now.saturating_duration_since(request.asked_at).as_secs_f64();
            metrics::histogram!("tidelog_persist_seconds").record(seconds);
        }
        if let Some(Asked { resolver, .. }) = self.asked.remove(&id) {
            resolver.resolve(handle);
        }
    }

    /// Hands the objects of these handles over, after the truncations that were asked for before.
    pub(super) fn hand_over(
        &mut self,
        holder: &str,
        handles: &[ChangelogHandle],
        now: Instant,
    ) -> Result<(), RegisterError> {
        // What these truncations let go of stays until it is handed over, or not.
        self.parts.custody.pin(handles)?;
        self.tidy_up(now);
        let outcome = self.parts.custody.hand_over(holder, handles);
        self.parts.custody.unpin();
        self.tidy = true;
        outcome
    }

    /// Carries out truncations and what follows from them.
    pub(super) fn tidy_up(&mut self, now: Instant) {
        let in_flight = |log: LogId| {
            let finishing = self.finishing.iter().map(|finishing| &finishing.cut);
            let cuts = self.due.iter().chain(&self.cut).chain(finishing);
            let sent = self.sent.iter().map(|sent| &sent.request);
            let requests = cuts.flat_map(|cut| &cut.requests).map(|(_, request)| request).chain(sent);
            requests.filter(|request| request.log == log).map(|request| request.from).min()
        };
        let needed_from = |log: LogId| match (self.checkpoints.needed_from(log), in_flight(log)) {
            (Some(waiting), Some(flying)) => Some(waiting.min(flying)),
            (waiting, flying) => waiting.or(flying),
        };
        for object in self.parts.custody.tidy(needed_from) {
            match object.pieces.iter().find(|piece| self.bucket(&piece.bucket).is_none()) {
                Some(piece) => tracing::warn!(
                    object = object.object,
                    bucket = &*piece.bucket,
                    "an object that nobody needs is in a bucket that is not open now; it stays"
                ),
                None => self.doom(&object),
            }
        }
        self.drop_unneeded();
        if self.settle_recorded().is_err() {
            self.tidy_at.get_or_insert(now + RETRY_DELAY_MAX);
        }
        self.settle_front();
    }

    /// Has the files of a completed object deleted.
    fn doom(&mut self, object: &CompletedObject) {
        let file = |piece: &Piece| Some((self.bucket(&piece.bucket)?, piece.object.clone()));
        let mut files: Vec<(BucketIndex, String)> = object.pieces.iter().filter_map(file).collect();
        files.sort_unstable();
        files.dedup();
        self.deletions.add(&object.object, files);
    }

    /// Begins the deletions that may begin now.
    pub(super) fn delete(&mut self, now: Instant) {
        while let Some(file) = self.deletions.next(now) {
            let sender = self.parts.sender.clone();
            let (bucket, name) = (file.bucket, file.name.clone());
            self.parts.driver.delete(bucket, &name, move |outcome| {
                let _ = sender.send(Event::Deleted { file, outcome });
            });
        }
    }

    /// Settles the blocks that are through, of each device whose records that say so are durable.
    ///
    /// # Errors
    /// What the file system says of another device.
    pub(super) fn settle_recorded(&mut self) -> io::Result<()> {
        let mut outcome = Ok(());
        for device in 0..self.unrecorded.len() {
            let Holding { ledger, directory, .. } = &self.parts.custody.holdings[device];
            if let Err(error) = ledger.settle() {
                tracing::warn!(%error, directory = %directory.display(),
                    "a manifest cannot be written; what is not needed stays until it can");
                outcome = Err(error);
            } else if std::mem::take(&mut self.unrecorded[device]) {
                self.parts.custody.settle(device, self.first_pending(device));
            } else {
                self.parts.custody.release_segments(device);
            }
        }
        outcome
    }

    /// Drops blocks of which nothing is needed from the front.
    pub(super) fn settle_front(&mut self) {
        for device in 0..self.parts.queue.devices() {
            let custody = &self.parts.custody;
            let dropped = self.parts.queue.drop_front(device, |block| custody.needs(block));
            if dropped && !self.unrecorded[device] {
                self.parts.custody.settle(device, self.first_pending(device));
            }
        }
    }

    /// The number of a device's first block that is not through: it waits, or is in an object that is not complete.
    pub(super) fn first_pending(&self, device: usize) -> u64 {
        let finishing = self.finishing.iter().map(|finishing| &finishing.blocks);
        let blocks = self.object.iter().map(|object| &object.blocks).chain(finishing).flatten();
        let numbers = blocks.filter(|block| block.device == device).map(|block| block.number);
        numbers.fold(self.parts.queue.first_number(device), u64::min)
    }
}
