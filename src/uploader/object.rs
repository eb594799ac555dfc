//! One object of the uploader, from its first block to its record in the ledgers.
//!
//! Which blocks go into it, and when it is cut, is decided in uploader.rs; the order of bytes in a part by the assembler.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use tidelog_upload::multipart::Placement;
use tidelog_upload::{ObjectUpload, Operation, StoreError, StoreErrorKind};
use twox_hash::XxHash3_64;

use super::{Event, RETRY_DELAY_MAX, RETRY_DELAY_MIN, Uploader};
use crate::checkpoint::{Cut, Request, RequestId};
use crate::error::PersistError;
use crate::manifest::{CompletedObject, LogRange};
use crate::options::{Options, UploadRuntime};
use crate::part::PartId;
use crate::piece::{self, Piece};
use crate::queue::LocalBlock;
use crate::tail::Tail;
use crate::types::{LogId, SequenceNumber};

/// The driver gets parts in slices of this share of its budget.
const PUTS_PER_BUDGET: u64 = 32;

/// An object that gets parts.
pub(super) struct OpenObject {
    /// Grows from object to object.
    pub(super) number: u64,
    pub(super) name: String,
    pub(super) token: u64,
    /// It holds changes of directories out of service, and of no others.
    pub(super) detached: bool,
    pub(super) upload: ObjectUpload,
    pub(super) tail: Tail,
    /// What it holds, to be given back should it fail.
    pub(super) blocks: Vec<LocalBlock>,
    pub(super) ranges: BTreeMap<LogId, (usize, Vec<LogRange>)>,
    /// Whether the driver was told that somebody waits for it.
    pub(super) wanted: bool,
    pub(super) failure: Option<StoreError>,
    pub(super) opened_at: Instant,
}

/// An object that waits for its commit.
pub(super) struct Finishing {
    /// Grows from object to object.
    pub(super) number: u64,
    pub(super) cut: Cut,
    pub(super) name: String,
    pub(super) token: u64,
    pub(super) detached: bool,
    pub(super) parts: usize,
    /// Of the last put, which the driver has until the end.
    pub(super) tail_bytes: u64,
    pub(super) object_bytes: u64,
    pub(super) footer_range: std::ops::Range<u64>,
    pub(super) blocks: Vec<LocalBlock>,
    pub(super) ranges: BTreeMap<LogId, (usize, Vec<LogRange>)>,
    pub(super) started_at: Instant,
    /// Of the checkpoint that waits for it, if one does.
    pub(super) span: tracing::Span,
}

impl Uploader {
    /// Sorts blocks into the next part of the open object, opening one if there is none. `None` if nothing in them is
    /// needed. Blocks that cannot be read or make no sense are given back.
    pub(super) fn assemble(
        &mut self,
        mut blocks: Vec<LocalBlock>,
        now: Instant,
    ) -> Result<Option<Bytes>, PersistError> {
        let token = match &self.object {
            Some(object) => object.token,
            None => (self.parts.random)(),
        };
        let index = self.object.as_ref().map_or(0, |object| object.tail.footer().parts().len() as u32);
        let compression = self.parts.options.compression;
        if let Some(memory) = self.buffers.take(blocks.iter().map(|block| block.len).sum()) {
            self.assembler.reuse(memory);
        }
        let queue = &self.parts.queue;
        let part = queue.load(&blocks, &mut self.scratch).and_then(|loaded| {
            let decoded = queue.decode(&blocks, &loaded);
            // Of each log the device, and the first of its changes here.
            let mut starts: HashMap<LogId, (usize, SequenceNumber)> = HashMap::new();
            for block in &blocks {
                for range in &block.ranges {
                    let (_, first) = starts.entry(range.log).or_insert((block.device, range.first));
                    *first = range.first.min(*first);
                }
            }
            let start_of = |log: LogId| starts.get(&log).copied().unwrap_or_default();
            let custody = &self.parts.custody;
            let lost = |log: LogId| self.lost.get(&log).copied().unwrap_or(SequenceNumber(u64::MAX));
            let mut kept = |log: LogId| {
                let (device, first) = start_of(log);
                let kept = custody.kept(device, log, first);
                kept.start..kept.end.min(lost(log))
            };
            let part_id = PartId { token, index };
            let part = self.assembler.assemble(decoded, &mut kept, part_id, compression)?;
            let ranges: Vec<(usize, LogRange)> = part
                .runs
                .iter()
                .map(|run| (start_of(run.log).0, LogRange { log: run.log, first: run.first, end: run.end }))
                .collect();
            Ok((part, ranges))
        });
        let (part, ranges) = match part {
            Ok(part) => part,
            Err(error) => {
                self.parts.queue.give_back(blocks);
                return Err(error);
            }
        };
        if part.runs.is_empty() && self.object.is_none() {
            blocks.iter().for_each(|block| self.unrecorded[block.device] = true);
            // What fails is tried again.
            let _ = self.settle_recorded();
            return Ok(None);
        }
        if self.object.is_none()
            && let Err(error) = self.open_object(token, blocks[0].device, now)
        {
            self.parts.queue.give_back(blocks);
            return Err(error);
        }
        let object = self.object.as_mut().expect("just opened");
        for block in &mut blocks {
            // What can be read back need not stay in memory.
            if block.place.is_some() {
                block.held = None;
            }
        }
        object.blocks.append(&mut blocks);
        if part.runs.is_empty() {
            return Ok(None);
        }
        for (device, range) in ranges {
            let (_, ranges) = object.ranges.entry(range.log).or_insert((device, Vec::new()));
            match ranges.last_mut() {
                Some(last) if last.end == range.first => last.end = range.end,
                _ => ranges.push(range),
            }
        }
        object.tail.push(compression, part.runs, &part.directories);
        Ok(Some(self.buffers.lend(part.bytes)))
    }

    /// Opens an object that begins with blocks of `device`.
    fn open_object(&mut self, token: u64, device: usize, now: Instant) -> Result<(), PersistError> {
        let number = self.objects_made;
        let name = object_name(&self.parts.options, number, token);
        self.objects_made += 1;
        let custody = &self.parts.custody;
        let detached = custody.is_detached(device);
        custody
            .open_upload(device, &name, token, &self.parts.buckets)
            .map_err(|source| PersistError::Manifest { object: name.clone(), source: Arc::new(source) })?;
        self.object = Some(OpenObject {
            number,
            upload: self.parts.driver.upload(&name, None),
            name,
            token,
            detached,
            tail: Tail::new(token),
            blocks: Vec::new(),
            ranges: BTreeMap::new(),
            wanted: false,
            failure: None,
            opened_at: now,
        });
        Ok(())
    }

    /// Hands a part over. How that ended is told by an event.
    pub(super) fn put(&mut self, part: Bytes) {
        let object = self.object.as_mut().expect("a part belongs to an object");
        // What is put together is counted until all of it is let go: little at a time is let go early.
        let slice_bytes = (self.parts.driver.options().budget_bytes / PUTS_PER_BUDGET).max(1) as usize;
        let mut part = part;
        while !part.is_empty() {
            let slice = part.split_to(slice_bytes.min(part.len()));
            let bytes = slice.len() as u64;
            self.bytes_out += bytes;
            let (token, sender) = (object.token, self.parts.sender.clone());
            object.upload.put(vec![slice], move |outcome| {
                let _ = sender.send(Event::PartDone { token, bytes, outcome });
            });
        }
    }

    pub(super) fn part_done(&mut self, token: u64, bytes: u64, outcome: Result<(), StoreError>) {
        self.bytes_out -= bytes;
        if let Some(object) = self.object.as_mut().filter(|object| object.token == token)
            && let Err(error) = outcome
        {
            object.failure.get_or_insert(error);
        }
    }

    /// Says that these wait for the open object. It fails at the first time that is said; who waits longer waits for the
    /// next one then.
    pub(super) fn want(&mut self, requests: &[(RequestId, Request)]) {
        let others = self.cut.iter().chain(&self.due).flat_map(|cut| &cut.requests);
        let until = self.wanted_until(others.chain(requests));
        if let Some(object) = self.object.as_mut()
            && until.is_some()
            && !object.wanted
        {
            object.wanted = true;
            object.upload.wanted(until);
        }
    }

    /// Sends the last part with the footer, and asks for the commit.
    pub(super) fn finish(&mut self, cut: Cut, part: Option<Bytes>, span: tracing::Span, now: Instant) {
        self.want(&cut.requests);
        let object = self.object.take().expect("there is something to finish");
        let OpenObject { number, name, token, detached, upload, tail, blocks, ranges, .. } = object;
        span.record("object", &name);
        let parts = tail.footer().parts().len();
        let (encoded, footer_range) = tail.encode();
        let last: Vec<Bytes> = part.into_iter().chain([encoded.into()]).collect();
        let tail_bytes = len_of(&last);
        self.bytes_out += tail_bytes;
        let (sender, settled) = (self.parts.sender.clone(), self.parts.sender.clone());
        let object = name.clone();
        upload.finish(
            last,
            move |outcome| {
                let _ = sender.send(Event::Completed { token, outcome });
            },
            move |leftovers| {
                let _ = settled.send(Event::Settled { object, leftovers });
            },
        );
        let object_bytes = footer_range.end;
        self.finishing.push_back(Finishing {
            number,
            cut,
            name,
            token,
            detached,
            parts,
            tail_bytes,
            object_bytes,
            footer_range,
            blocks,
            ranges,
            started_at: now,
            span,
        });
        self.tell_committing();
    }

    fn tell_committing(&self) {
        metrics::gauge!("tidelog_objects_committing").set(self.finishing.len() as f64);
    }

    pub(super) fn completed(&mut self, token: u64, outcome: Result<Placement, StoreError>, now: Instant) {
        let Some(index) = self.finishing.iter().position(|finishing| finishing.token == token) else {
            return;
        };
        let finishing = self.finishing.remove(index).expect("it was just seen");
        self.tell_committing();
        let _entered = finishing.span.clone().entered();
        self.tidy = true;
        self.bytes_out -= finishing.tail_bytes;
        let object = finishing.name.clone();
        let exists = outcome.is_ok();
        let failure = match outcome {
            Ok(_) if self.is_doomed(&finishing) => out_of_service(object),
            Ok(placement) if placement.bytes != finishing.object_bytes => {
                let (expected, found) = (finishing.object_bytes, placement.bytes);
                let pieces = self.pieces(placement);
                let kind = StoreErrorKind::WrongSize { expected, found };
                let error = StoreError::new(Operation::Complete, bucket_of(&pieces), &object, kind);
                Failure::upload(object, error)
            }
            Ok(placement) => {
                let pieces = self.pieces(placement);
                match piece::check(&pieces) {
                    Ok(_) => return self.commit(finishing, pieces, now),
                    Err(what) => {
                        let (bucket, what) = (bucket_of(&pieces), format!("the {what} is out of bounds"));
                        let error = StoreError::failed(Operation::Complete, bucket, &object, true, what);
                        Failure::upload(object, error)
                    }
                }
            }
            Err(error) => self.failure(object, error),
        };
        if exists {
            self.unwanted.insert(finishing.name);
        }
        self.fail(finishing.blocks, finishing.cut.requests, failure, now);
    }

    fn pieces(&self, placement: Placement) -> Vec<Piece> {
        let piece = |piece: tidelog_upload::multipart::Piece| Piece {
            bucket: Arc::clone(&self.parts.buckets[piece.bucket.0]),
            object: piece.name,
            offset: piece.offset,
            bytes: piece.bytes,
        };
        placement.pieces.into_iter().map(piece).collect()
    }

    /// Whether a directory went out of service that would have to record the object, or that would remove it at the next
    /// open.
    fn is_doomed(&self, finishing: &Finishing) -> bool {
        let custody = &self.parts.custody;
        let unrecorded = |&(device, _): &(usize, Vec<LogRange>)| custody.is_detached(device);
        custody.holdings.iter().any(|holding| holding.ledger.dooms(&finishing.name))
            || !finishing.detached && finishing.ranges.values().any(unrecorded)
    }

    /// Records a proven object, and answers who waited for it.
    ///
    /// A directory may go out of service meanwhile. Its changes go into the next object, as if they were not in this one: its
    /// file will not say so, and who only knows of the others' changes may delete it.
    fn commit(&mut self, finishing: Finishing, pieces: Vec<Piece>, now: Instant) {
        let Finishing {
            number,
            cut,
            name,
            token,
            detached,
            parts,
            object_bytes,
            footer_range,
            blocks,
            ranges,
            started_at,
            ..
        } = finishing;
        let custody = &self.parts.custody;
        let mut devices: Vec<usize> = (0..self.parts.queue.devices()).collect();
        // First who began the upload: without its record the object is removed at the next open.
        devices.sort_by_key(|device| !custody.has_upload(*device, &name));
        let mut lost = Vec::new();
        for (index, device) in devices.into_iter().enumerate() {
            let own: Vec<LogRange> = ranges
                .values()
                .filter(|(at, _)| *at == device)
                .flat_map(|(_, ranges)| ranges)
                .copied()
                .collect();
            let object = CompletedObject {
                object: name.clone(),
                token,
                pieces: pieces.clone(),
                footer: footer_range.clone(),
                blocks_end: self.first_pending(device),
                ranges: Vec::new(),
                others: self
                    .parts
                    .custody
                    .others(device, |other| ranges.values().any(|(at, _)| *at == other)),
            };
            match self.parts.custody.complete(device, &object, &own, detached) {
                Ok(true) => {}
                Ok(false) if index == 0 => {
                    self.unwanted.insert(name.clone());
                    return self.fail(blocks, cut.requests, out_of_service(name), now);
                }
                Ok(false) => lost.push(device),
                // The ledger knows the object, and makes that durable with its next record: it is neither lost nor sent
                // again. But until then no handle of this directory may name it, and its blocks stay.
                Err(error) => {
                    tracing::warn!(%error, object = name, "a complete object could not be recorded");
                }
            }
        }
        self.failures = 0;
        self.last_failure = None;
        let (lost_blocks, blocks): (Vec<LocalBlock>, Vec<LocalBlock>) =
            blocks.into_iter().partition(|block| lost.contains(&block.device));
        let (lost_requests, requests): (Vec<_>, Vec<_>) =
            cut.requests.into_iter().partition(|(_, request)| lost.contains(&request.device));
        blocks.iter().for_each(|block| self.unrecorded[block.device] = true);
        // What fails is tried again.
        let _ = self.settle_recorded();
        metrics::counter!("tidelog_objects_completed_total").increment(1);
        metrics::histogram!("tidelog_object_finish_seconds")
            .record(now.duration_since(started_at).as_secs_f64());
        tracing::debug!(object = name, bytes = object_bytes, parts, pieces = pieces.len(), "object complete");
        self.sent(requests, number);
        if lost.is_empty() {
            self.answer_sent(now);
        } else {
            self.fail(lost_blocks, lost_requests, out_of_service(name), now);
        }
    }

    /// The open object failed: its blocks wait for the next one, and so does who waits for it.
    pub(super) fn fail_object(&mut self, now: Instant) {
        let Some(object) = self.object.take() else { return };
        let OpenObject { name, upload, blocks, failure, .. } = object;
        self.abort(name.clone(), upload);
        let requests = self.cut.take().map_or_else(Vec::new, |cut| cut.requests);
        let Some(source) = failure else { unreachable!("an object fails by a part") };
        let failure = self.failure(name, source);
        self.fail(blocks, requests, failure, now);
    }

    /// Gives the open object up if nobody waits for it and nothing in it is needed any more.
    pub(super) fn drop_unneeded(&mut self) {
        let custody = &self.parts.custody;
        let unneeded = |object: &OpenObject| !object.blocks.iter().any(|block| custody.needs(block));
        if self.cut.is_some() || !self.object.as_ref().is_some_and(unneeded) {
            return;
        }
        let Some(OpenObject { name, upload, blocks, .. }) = self.object.take() else { return };
        self.abort(name, upload);
        self.parts.queue.give_back(blocks);
    }

    /// Why an object failed, of what its upload said.
    fn failure(&self, object: String, source: StoreError) -> Failure {
        match (source.kind(), &self.parts.options.runtime) {
            // The driver is shut down after this uploader has ended: here it is its runtime.
            (StoreErrorKind::ShutDown, UploadRuntime::Handle(_)) => {
                Failure { error: PersistError::RuntimeEnded, permanent: true }
            }
            (StoreErrorKind::ShutDown, UploadRuntime::Own) => {
                Failure { error: PersistError::Closed, permanent: true }
            }
            _ => Failure::upload(object, source),
        }
    }

    fn abort(&self, object: String, upload: ObjectUpload) {
        let sender = self.parts.sender.clone();
        upload.abort(move |leftovers| {
            let _ = sender.send(Event::Settled { object, leftovers });
        });
    }

    fn fail(
        &mut self,
        blocks: Vec<LocalBlock>,
        requests: Vec<(RequestId, Request)>,
        failure: Failure,
        now: Instant,
    ) {
        let Failure { error, permanent } = failure;
        tracing::warn!(%error, "an upload failed; its changes go into the next object");
        metrics::counter!("tidelog_objects_failed_total").increment(1);
        self.parts.queue.give_back(blocks);
        let pause = RETRY_DELAY_MAX.min(RETRY_DELAY_MIN * (1 << self.failures.min(16)));
        self.failures += 1;
        self.last_failure = Some(Arc::new(error.clone()));
        // So that nodes which failed together do not come back together.
        let share = ((self.parts.random)() >> 11) as f64 / (1u64 << 53) as f64;
        let again_at = now + pause.mul_f64(0.5 + share / 2.0);
        self.retry_at = Some(again_at);
        if permanent {
            // What these need waits for the room that the object was to make.
            let pressed: Vec<usize> = self.parts.custody.pressed().collect();
            let stuck = self.checkpoints.take_unmarked(|device| pressed.contains(&device));
            self.answer_all(requests, &error);
            self.answer_all(stuck, &error);
        } else {
            let error = Arc::new(error);
            for (id, request) in requests {
                if let Some(asked) = self.asked.get_mut(&id) {
                    asked.last = Some(Arc::clone(&error));
                    self.checkpoints.ask_again(id, request, again_at);
                }
            }
        }
        // Some may wait for what this one was to hold.
        self.answer_sent(now);
    }
}

/// Why an object failed.
struct Failure {
    error: PersistError,
    /// Another object would fail alike, until somebody does something.
    permanent: bool,
}

impl Failure {
    fn passing(error: PersistError) -> Failure {
        Failure { error, permanent: false }
    }

    fn upload(object: String, source: StoreError) -> Failure {
        let permanent = match source.kind() {
            StoreErrorKind::Denied
            | StoreErrorKind::NoSuchBucket
            | StoreErrorKind::Credentials
            | StoreErrorKind::Misconfigured
            | StoreErrorKind::ClockSkew
            | StoreErrorKind::InvalidName(_)
            | StoreErrorKind::InvalidUrl(_)
            | StoreErrorKind::UnsupportedScheme { .. }
            | StoreErrorKind::SchemeNotBuilt { .. }
            | StoreErrorKind::Unsupported => true,
            StoreErrorKind::Failed => !source.is_retryable(),
            // All others are about one upload, or about the moment.
            _ => false,
        };
        Failure { error: PersistError::Upload { object, source: Arc::new(source) }, permanent }
    }
}

fn out_of_service(object: String) -> Failure {
    let source = Arc::new(io::Error::other("the local directory went out of service meanwhile"));
    Failure::passing(PersistError::Manifest { object, source })
}

/// The bucket of the first piece.
fn bucket_of(pieces: &[Piece]) -> &str {
    pieces.first().map_or("", |piece| &*piece.bucket)
}

fn len_of(slices: &[Bytes]) -> u64 {
    slices.iter().map(|slice| slice.len() as u64).sum()
}

/// `[prefix/][hh/]group/number-token`: unique for ever by its token.
pub(crate) fn object_name(options: &Options, number: u64, token: u64) -> String {
    let name = format!("{}/{number:08}-{token:016x}", options.group);
    let mut path = String::new();
    if !options.name_prefix.is_empty() {
        path.push_str(&options.name_prefix);
        path.push('/');
    }
    if options.hash_prefix {
        path.push_str(&name_hash(&name));
        path.push('/');
    }
    path + &name
}

/// How the names of canaries begin, in the folder of the group.
pub(crate) const CANARY: &str = "canary-";

/// `[prefix/]group/canary-owner`: where objects are, so that who may write those may write it.
pub(crate) fn canary_name(options: &Options, owner: u64) -> String {
    let prefix = &options.name_prefix;
    let slash = if prefix.is_empty() { "" } else { "/" };
    format!("{prefix}{slash}{}/{CANARY}{owner:016x}", options.group)
}

/// Two hexadecimal characters that spread names `group/number-token`.
pub(crate) fn name_hash(name: &str) -> String {
    format!("{:02x}", XxHash3_64::oneshot(name.as_bytes()) as u8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn canaries_fly_where_objects_are() {
        let options = Options::new("memory://", "/d").group("orders");
        assert_eq!(canary_name(&options, 0x5f), "orders/canary-000000000000005f");
        let options = options.name_prefix("team/flink").hash_prefix(true);
        assert_eq!(canary_name(&options, 0x5f), "team/flink/orders/canary-000000000000005f");
    }

    #[test]
    fn names_are_made_of_prefix_hash_group_number_and_token() {
        let options = Options::new("memory://", "/d").group("orders");
        assert_eq!(object_name(&options, 7, 0x5f), "orders/00000007-000000000000005f");
        let options = options.name_prefix("team/flink").hash_prefix(true);
        let name = object_name(&options, 7, 0x5f);
        let hash =
            name.strip_prefix("team/flink/").unwrap().strip_suffix("/orders/00000007-000000000000005f");
        assert!(hash.is_some_and(|hash| u8::from_str_radix(hash, 16).is_ok() && hash.len() == 2), "{name}");
        let hashes: std::collections::BTreeSet<String> =
            (0..64).map(|token| object_name(&options, 7, token)[11..13].to_owned()).collect();
        assert!(hashes.len() > 32, "{hashes:?}");
    }
}
