//! The outcome of an object, and what has to be cleared after it.
#![forbid(unsafe_code)]

use std::mem;

use super::*;
use crate::store::Outcome;

/// How much is cleared at once of one object: these requests are not counted on the connections of uploads.
const CLEARING_MAX: usize = 8;

/// Something that must not stay in a bucket.
#[derive(Debug)]
pub(super) struct Garbage {
    bucket: BucketIndex,
    name: String,
    what: What,
    failures: u32,
    retry_at: Option<Instant>,
    in_flight: bool,
}

#[derive(Clone, Debug)]
enum What {
    Object,
    Upload(UploadId),
    /// An upload that may have become an object: never aborted before that is known.
    Uncertain,
}

impl ObjectMachine {
    /// Notes an object, or an upload, that must not stay.
    pub(super) fn discard(&mut self, bucket: BucketIndex, name: String, upload: Option<UploadId>) {
        let what = upload.map_or(What::Object, What::Upload);
        self.add_garbage(bucket, name, what);
    }

    fn add_garbage(&mut self, bucket: BucketIndex, name: String, what: What) {
        let key = self.garbage.last_key_value().map_or(0, |(last, _)| last + 1);
        let garbage = Garbage { bucket, name, what, failures: 0, retry_at: None, in_flight: false };
        self.garbage.insert(key, garbage);
        self.changed = true;
    }

    /// Finishes the object if all of its units are committed.
    pub(super) fn finish_if_whole(&mut self, cx: &mut Context) {
        if self.phase != Phase::Writing || !self.last {
            return;
        }
        let Some(placement) = self.placement() else { return };
        let used = |bucket: BucketIndex, name: &str| {
            placement.pieces.iter().any(|piece| piece.bucket == bucket && piece.name == name)
        };
        let sides = self.units.iter_mut().filter_map(|unit| unit.side.take());
        let unused: Vec<_> = sides.filter(|(bucket, name)| !used(*bucket, name)).collect();
        for upload in &mut self.uploads {
            upload.cleared = upload.state == State::Committed && used(upload.bucket, &upload.name);
        }
        for (bucket, name) in unused {
            self.discard(bucket, name, None);
        }
        self.finish(Ok(placement), cx);
    }

    /// Where all bytes are, once all of them are committed.
    fn placement(&self) -> Option<Placement> {
        // Where a committed upload holds a unit.
        let mut places: Vec<Option<(usize, u64)>> = vec![None; self.units.len()];
        for (index, upload) in self.uploads.iter().enumerate() {
            if upload.state != State::Committed {
                continue;
            }
            let mut done: Vec<_> = upload.done().collect();
            done.sort_by_key(|(_, number)| *number);
            let mut offset = 0;
            for (unit, _) in done {
                places[unit].get_or_insert((index, offset));
                offset += self.units[unit].bytes;
            }
        }
        let mut pieces: Vec<Piece> = Vec::new();
        for (unit, place) in self.units.iter().zip(places) {
            let (bucket, name, offset) = match (place, &unit.side) {
                (Some((upload, offset)), _) => {
                    let upload = &self.uploads[upload];
                    (upload.bucket, &upload.name, offset)
                }
                (None, Some((bucket, name))) => (*bucket, name, 0),
                (None, None) => return None,
            };
            match pieces.last_mut() {
                Some(last)
                    if last.bucket == bucket && last.name == *name && last.offset + last.bytes == offset =>
                {
                    last.bytes += unit.bytes;
                }
                _ => pieces.push(Piece { bucket, name: name.clone(), offset, bytes: unit.bytes }),
            }
        }
        let bytes = pieces.iter().map(|piece| piece.bytes).sum();
        assert_eq!(bytes, self.bytes, "the pieces are the object");
        Some(Placement { bytes, pieces })
    }

    /// Tells the outcome, and begins to clear what is left.
    pub(super) fn finish(&mut self, result: Result<Placement, StoreError>, cx: &mut Context) {
        if self.phase != Phase::Writing {
            return;
        }
        self.phase = Phase::Settling;
        self.changed = true;
        for at in 0..self.uploads.len() {
            if self.uploads[at].state != State::Committed {
                self.abandon(at, cx);
            }
        }
        // PUTs of direct uploads and side objects of committed ones.
        let flying: Vec<_> =
            self.attempts.iter().filter(|(_, a)| a.unit.is_some()).map(|(id, _)| *id).collect();
        for id in flying {
            self.cancel(id, cx);
        }
        let failed = result.is_err();
        cx.actions.push(Action::Finished(result));
        for unit in 0..self.units.len() {
            self.release(unit, cx);
            if failed && let Some((bucket, name)) = self.units[unit].side.take() {
                self.discard(bucket, name, None);
            }
        }
    }

    /// Clears what is left, and says when nothing is under way any more.
    pub(super) fn settle(&mut self, cx: &mut Context) {
        for at in 0..self.uploads.len() {
            let upload = &self.uploads[at];
            if upload.cleared || self.attempts.values().any(|a| a.upload == at && a.garbage.is_none()) {
                continue;
            }
            self.uploads[at].cleared = true;
            let upload = &self.uploads[at];
            let (bucket, name) = (upload.bucket, upload.name.clone());
            match (upload.state, upload.id.clone()) {
                (State::Committed, _) => self.discard(bucket, name, None),
                (_, Some(_)) if upload.uncertain => self.add_garbage(bucket, name, What::Uncertain),
                (_, id @ Some(_)) => self.discard(bucket, name, id),
                (_, None) => {}
            }
        }
        let oldest: Vec<_> = self.garbage.keys().copied().take(CLEARING_MAX).collect();
        for key in oldest {
            let Garbage { retry_at, in_flight, .. } = self.garbage[&key];
            if in_flight || self.waits(retry_at, cx) {
                continue;
            }
            let Some(garbage) = self.garbage.get_mut(&key) else { continue };
            garbage.in_flight = true;
            let request = match garbage.what.clone() {
                What::Object => Request::Delete,
                What::Upload(upload) => Request::Abort { upload },
                What::Uncertain => Request::Head,
            };
            let (bucket, name) = (garbage.bucket, garbage.name.clone());
            let attempt = Attempt::new(bucket, name, request, Work::Control, usize::MAX, cx.now);
            self.start(Attempt { garbage: Some(key), ..attempt }, cx);
        }
        if self.attempts.is_empty() && self.garbage.is_empty() {
            self.phase = Phase::Settled;
            self.wake = None;
            cx.actions.push(Action::Settled { leftovers: self.leftovers });
        }
    }

    /// A request that clears something ended.
    pub(super) fn cleared(
        &mut self,
        attempt: Attempt,
        outcome: Result<Answer, StoreError>,
        cx: &mut Context,
    ) {
        let Some(key) = attempt.garbage else { return };
        let Some(garbage) = self.garbage.get_mut(&key) else { return };
        garbage.in_flight = false;
        let error = match (&garbage.what, outcome) {
            // What was committed after all is an object now.
            (What::Uncertain, Ok(_)) => {
                garbage.what = What::Object;
                return;
            }
            (_, Ok(_)) => {
                self.garbage.remove(&key);
                return;
            }
            (_, Err(error)) => error,
        };
        let nothing = matches!(error.kind(), StoreErrorKind::NoSuchUpload | StoreErrorKind::NotFound);
        if nothing && !matches!(garbage.what, What::Uncertain) {
            self.garbage.remove(&key);
            return;
        }
        garbage.failures += 1;
        let given_up = garbage.failures >= cx.policy.options().request_attempts.max(1)
            || (!error.is_retryable() && !nothing && error.outcome() == Outcome::NotApplied);
        if !given_up {
            garbage.retry_at = Some(cx.now + cx.policy.backoff(garbage.failures));
            return;
        }
        self.leftovers = true;
        let (bucket, what) = (garbage.bucket, mem::discriminant(&garbage.what));
        self.garbage.remove(&key);
        if !nothing {
            // What the bucket does not do for this one it will not do for the next ones either.
            self.garbage.retain(|_, other| {
                other.in_flight || other.bucket != bucket || mem::discriminant(&other.what) != what
            });
        }
    }
}
