//! One object of the uploader, from its first block to its record in the ledgers.
//!
//! Which blocks go into it, and when it is cut, is decided in uploader.rs; the order of bytes in a part by the assembler.
use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use tidelog_upload::{ObjectUpload, StoreError};

use super::{Event, RETRY_DELAY, Uploader};
use crate::checkpoint::{Cut, Request, RequestId};
use crate::error::PersistError;
use crate::footer::Footer;
use crate::manifest::{CompletedObject, LogRange, ManifestRecord};
use crate::part::PartId;
use crate::piece::Piece;
use crate::queue::LocalBlock;
use crate::types::LogId;

/// An object that gets parts.
pub(super) struct OpenObject {
    pub(super) name: String,
    pub(super) token: u64,
    /// It holds changes of directories out of service, and of no others.
    pub(super) detached: bool,
    pub(super) upload: ObjectUpload,
    pub(super) footer: Footer,
    /// What it holds, to be given back should it fail.
    pub(super) blocks: Vec<LocalBlock>,
    pub(super) ranges: BTreeMap<LogId, (usize, Vec<LogRange>)>,
    pub(super) parts_in_flight: usize,
    pub(super) failure: Option<StoreError>,
}

/// An object that waits for its commit.
pub(super) struct Finishing {
    pub(super) cut: Cut,
    pub(super) name: String,
    pub(super) token: u64,
    pub(super) detached: bool,
    pub(super) footer: Footer,
    pub(super) object_bytes: u64,
    pub(super) footer_range: std::ops::Range<u64>,
    pub(super) blocks: Vec<LocalBlock>,
    pub(super) ranges: BTreeMap<LogId, (usize, Vec<LogRange>)>,
    pub(super) started_at: Instant,
}

impl Uploader {
    /// Sorts blocks into the next part of the open object, opening one if there is none. `None` if nothing in them is
    /// needed. Blocks that cannot be read or make no sense are given back.
    pub(super) fn assemble(&mut self, mut blocks: Vec<LocalBlock>) -> Result<Option<Bytes>, PersistError> {
        let token = match &self.object {
            Some(object) => object.token,
            None => (self.parts.random)(),
        };
        let index = self.object.as_ref().map_or(0, |object| object.footer.parts().len() as u32);
        let compression = self.parts.options.compression;
        let queue = &self.parts.queue;
        let part = queue.load(&blocks).and_then(|loaded| {
            let decoded = queue.decode(&blocks, &loaded)?;
            let device_of = |log: LogId| {
                let holds = |block: &&LocalBlock| block.ranges.iter().any(|range| range.log == log);
                blocks.iter().find(holds).map_or(0, |block| block.device)
            };
            let custody = &self.parts.custody;
            let mut keep_from = |log: LogId| custody.keep_from(device_of(log), log);
            let part_id = PartId { token, index };
            let part = self
                .assembler
                .assemble(&decoded, &mut keep_from, part_id, compression)
                .map_err(|error| PersistError::ReadBack { what: error.to_string() })?;
            let ranges: Vec<(usize, LogRange)> = part
                .runs
                .iter()
                .map(|run| (device_of(run.log), LogRange { log: run.log, first: run.first, end: run.end }))
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
            for block in &blocks {
                let unrecorded = &mut self.unrecorded[block.device];
                *unrecorded = (*unrecorded).max(Some(block.number + 1));
            }
            // What fails is tried again.
            let _ = self.settle_recorded();
            return Ok(None);
        }
        if self.object.is_none()
            && let Err(error) = self.open_object(token, blocks[0].device)
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
        object.footer.push(compression, part.runs);
        Ok(Some(Bytes::from(part.bytes)))
    }

    /// Opens an object that begins with blocks of `device`.
    fn open_object(&mut self, token: u64, device: usize) -> Result<(), PersistError> {
        let name = format!("{}/{:08}-{token:016x}", self.parts.options.group, self.objects_made);
        self.objects_made += 1;
        let buckets = vec![Arc::clone(&self.parts.bucket)];
        let opened = ManifestRecord::UploadOpened { buckets, object: name.clone(), token };
        let custody = &self.parts.custody;
        let detached = custody.is_detached(device);
        let keepers = 0..custody.holdings.len();
        let keeper = keepers.into_iter().find(|&keeper| custody.is_detached(keeper) == detached);
        let ledger = &custody.holdings[keeper.unwrap_or(device)].ledger;
        ledger
            .record(vec![opened])
            .map_err(|source| PersistError::Manifest { object: name.clone(), source: Arc::new(source) })?;
        self.object = Some(OpenObject {
            upload: self.parts.driver.upload(&name),
            name,
            token,
            detached,
            footer: Footer::new(token),
            blocks: Vec::new(),
            ranges: BTreeMap::new(),
            parts_in_flight: 0,
            failure: None,
        });
        Ok(())
    }

    /// Hands a part over. How that ended is told by an event.
    pub(super) fn put(&mut self, part: Vec<Bytes>) {
        let object = self.object.as_mut().expect("a part belongs to an object");
        object.parts_in_flight += 1;
        let (token, sender) = (object.token, self.parts.sender.clone());
        object.upload.put(part, move |outcome| {
            let _ = sender.send(Event::PartDone { token, outcome });
        });
    }

    pub(super) fn part_done(&mut self, token: u64, outcome: Result<(), StoreError>) {
        if let Some(object) = self.object.as_mut().filter(|object| object.token == token) {
            object.parts_in_flight -= 1;
            if let Err(error) = outcome {
                object.failure.get_or_insert(error);
            }
        }
    }

    /// Sends the last part with the footer, and asks for the commit.
    pub(super) fn finish(&mut self, cut: Cut, part: Option<Bytes>, now: Instant) {
        let object = self.object.as_mut().expect("there is something to finish");
        let footer = Bytes::from(object.footer.encode());
        let start = object.footer.parts_len();
        let footer_range = start..start + footer.len() as u64;
        let tail = part.into_iter().chain([footer]).collect();
        self.put(tail);
        let Some(OpenObject { name, token, detached, upload, footer, blocks, ranges, .. }) =
            self.object.take()
        else {
            unreachable!("it was there");
        };
        let sender = self.parts.sender.clone();
        upload.complete(move |outcome| {
            let _ = sender.send(Event::Completed { token, outcome });
        });
        let object_bytes = footer_range.end;
        self.finishing = Some(Finishing {
            cut,
            name,
            token,
            detached,
            footer,
            object_bytes,
            footer_range,
            blocks,
            ranges,
            started_at: now,
        });
    }

    pub(super) fn completed(&mut self, token: u64, outcome: Result<u64, StoreError>, now: Instant) {
        let Some(finishing) = self.finishing.take_if(|finishing| finishing.token == token) else { return };
        self.tidy = true;
        let error = match outcome {
            Ok(_) if self.is_doomed(&finishing) => {
                let source = Arc::new(io::Error::other("the local directory went out of service meanwhile"));
                PersistError::Manifest { object: finishing.name.clone(), source }
            }
            Ok(size) if size == finishing.object_bytes => return self.commit(finishing, now),
            Ok(size) => PersistError::ReadBack {
                what: format!(
                    "object {} has {size} bytes instead of {}",
                    finishing.name, finishing.object_bytes
                ),
            },
            Err(error) => PersistError::Upload { object: finishing.name.clone(), source: Arc::new(error) },
        };
        self.fail(finishing.name, finishing.blocks, finishing.cut.requests, &error, now);
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
    fn commit(&mut self, finishing: Finishing, now: Instant) {
        let Finishing {
            cut,
            name,
            token,
            footer,
            object_bytes,
            footer_range,
            blocks,
            ranges,
            started_at,
            ..
        } = finishing;
        let mut ends: Vec<Option<u64>> = vec![None; self.parts.queue.devices()];
        for block in &blocks {
            let end = &mut ends[block.device];
            *end = (*end).max(Some(block.number + 1));
        }
        let bucket = Arc::clone(&self.parts.bucket);
        let piece = Piece { bucket, object: name.clone(), offset: 0, bytes: object_bytes };
        for (device, end) in ends.iter().enumerate() {
            let own: Vec<LogRange> = ranges
                .values()
                .filter(|(at, _)| *at == device)
                .flat_map(|(_, ranges)| ranges)
                .copied()
                .collect();
            let object = CompletedObject {
                object: name.clone(),
                token,
                pieces: vec![piece.clone()],
                footer: footer_range.clone(),
                blocks_end: end.unwrap_or(self.parts.custody.holdings[device].retention.settled()),
                ranges: Vec::new(),
            };
            if let Err(error) = self.parts.custody.complete(device, &object, &own) {
                // The ledger knows the object, and makes that durable with its next record: it is neither lost nor sent
                // again. But until then no handle of this directory may name it, and its blocks stay.
                tracing::warn!(%error, object = name, "a complete object could not be recorded");
                self.retry_at = Some(now + RETRY_DELAY);
            }
        }
        self.settled(&name);
        for (unrecorded, end) in self.unrecorded.iter_mut().zip(ends) {
            *unrecorded = (*unrecorded).max(end);
        }
        // What fails is tried again.
        let _ = self.settle_recorded();
        metrics::counter!("tidelog_objects_completed_total").increment(1);
        metrics::histogram!("tidelog_object_finish_seconds")
            .record(now.duration_since(started_at).as_secs_f64());
        tracing::debug!(object = name, bytes = object_bytes, parts = footer.parts().len(), "object complete");
        self.answer(cut.requests, &name, now);
    }

    /// The open object failed: whoever waits for it is told, and its blocks wait for the next one.
    pub(super) fn fail_object(&mut self, now: Instant) {
        let Some(object) = self.object.take() else { return };
        let OpenObject { name, upload, blocks, failure, .. } = object;
        drop(upload);
        let requests = self.cut.take().map_or_else(Vec::new, |cut| cut.requests);
        let Some(source) = failure else { unreachable!("an object fails by a part") };
        tracing::warn!(error = %source, "an upload failed; its changes go into the next object");
        let error = PersistError::Upload { object: name.clone(), source: Arc::new(source) };
        self.fail(name, blocks, requests, &error, now);
    }

    fn fail(
        &mut self,
        name: String,
        blocks: Vec<LocalBlock>,
        requests: Vec<(RequestId, Request)>,
        error: &PersistError,
        now: Instant,
    ) {
        metrics::counter!("tidelog_objects_failed_total").increment(1);
        self.parts.queue.give_back(blocks);
        self.clean(name);
        self.retry_at = Some(now + RETRY_DELAY);
        self.answer_all(requests, error);
    }
}
