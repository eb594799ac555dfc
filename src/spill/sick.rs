//! The spiller of a device that is out of service: blocks go to the uploader from memory.
//!
//! An engine that broke keeps the buffers of its writes in flight. What they hold is lost, and what comes behind it in its
//! logs is of no use without it: such a log ends where the loss begins. The uploader is told, and blocks keep their
//! numbers, so that nothing that others wait for is missing.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::sync::Arc;

use tidelog_io::aligned::AlignedBuf;
use tidelog_io::segment::BlockPlace;

use super::{FinishedInfo, Spiller};
use crate::block::{self, BLOCK_ALIGN_BYTES, Block, BlockBuilder};
use crate::error::SyncError;
use crate::queue::{BlockRange, Held, LocalBlock};
use crate::record::{FrameKind, Header};
use crate::types::{LogId, SequenceNumber};
use crate::uploader::Event;

/// What follows from the failure of the device.
pub(super) struct Sick {
    error: Arc<io::Error>,
    /// The number of the next block.
    pub(super) next_number: u64,
    /// Logs of which changes are lost, and the first of them: nothing from there on goes to the uploader.
    lost: Lost,
}

type Lost = BTreeMap<LogId, SequenceNumber>;

impl Spiller {
    /// The device is out of service: what is in memory goes to the uploader from there.
    pub(super) fn fall_sick(&mut self, error: Arc<io::Error>) {
        tracing::error!(%error, directory = %self.parts.directory.display(),
            "the local directory is out of service; changes are held in memory only, persists go on from there");
        metrics::gauge!("tidelog_local_tier_failed", "directory" => self.parts.directory.display().to_string()).set(1.0);
        self.parts.ledger.detach();
        let submitted = std::mem::take(&mut self.submitted);
        let mut held: HashMap<u64, (AlignedBuf, usize)> = self
            .parts
            .segments
            .take_lost()
            .into_iter()
            .map(|(number, buffer, len)| (number, (buffer, len)))
            .collect();
        let mut lost = Lost::new();
        for (_, info) in submitted.iter().filter(|(number, _)| !held.contains_key(number)) {
            for (_, range) in &info.ends {
                lost.entry(range.log).or_insert(range.first);
            }
        }
        if !lost.is_empty() {
            tracing::error!(logs = lost.len(), directory = %self.parts.directory.display(),
                "changes that were being written are lost with the engine");
            metrics::counter!("tidelog_logs_lost_total").increment(lost.len() as u64);
            // Ahead of the blocks: no persist that needs them may succeed.
            self.tell(Event::Lost { logs: lost.iter().map(|(log, from)| (*log, *from)).collect() });
        }
        let next_number = self.parts.segments.next_number();
        debug_assert_eq!(self.parts.segments.watermark() + submitted.len() as u64, next_number);
        self.sick = Some(Sick { error, next_number, lost });
        for (number, info) in submitted {
            self.send_held(number, held.remove(&number), info);
        }
        let Some(failure) = self.failure() else { return };
        for (_, answer) in self.syncs.drain(..) {
            answer.give(Err(failure.clone()));
        }
        self.parts.device.fail(&failure);
    }

    pub(super) fn failure(&self) -> Option<SyncError> {
        let sick = self.sick.as_ref()?;
        Some(SyncError::LocalTierFailed {
            directory: self.parts.directory.clone(),
            source: Arc::clone(&sick.error),
        })
    }

    pub(super) fn send_from_memory(&mut self, mut buffer: AlignedBuf, len: usize, info: FinishedInfo) {
        let Some(sick) = &mut self.sick else { return };
        let number = sick.next_number;
        sick.next_number += 1;
        block::seal(&mut buffer[..len], &nowhere(number));
        self.send_held(number, Some((buffer, len)), info);
    }

    /// Sends what is left of a block; one of which nothing is left goes empty.
    fn send_held(&mut self, number: u64, held: Option<(AlignedBuf, usize)>, info: FinishedInfo) {
        let (Some(failure), Some(Sick { lost, .. })) = (self.failure(), &self.sick) else { return };
        // What is in this block will not become durable, nor what comes after it. Its logs may be closed already.
        info.ends.iter().for_each(|(log, _)| log.fail_waiters(&failure));
        // The change behind a range may have begun in its block.
        let ends_here = |range: &BlockRange| lost.get(&range.log).is_some_and(|from| *from <= range.end);
        if let Some((buffer, len)) = held {
            if !info.ends.iter().any(|(_, range)| ends_here(range)) {
                return self.send(number, None, len, Some(Held::uncharged(buffer.into_bytes(len))), info);
            }
            match without(&buffer[..len], lost, number) {
                Some(rest) => return self.send_rest(number, rest),
                None => tracing::error!(number, "a block in memory contradicts itself: it is left out"),
            }
        }
        let mut buffer = vec![0; BLOCK_ALIGN_BYTES];
        let len = BlockBuilder::new(buffer.len()).finish(&mut buffer, false);
        block::seal(&mut buffer[..len], &nowhere(number));
        self.send_rest(number, Rest { bytes: buffer, continues: false, ranges: Vec::new() });
    }

    fn send_rest(&mut self, number: u64, rest: Rest) {
        let Rest { bytes, continues, ranges } = rest;
        let device = self.parts.device.index;
        let (len, held) = (bytes.len(), Some(Held::uncharged(bytes.into())));
        self.outbox.push(LocalBlock { device, number, place: None, len, held, continues, ranges });
    }
}

/// The place of a block that is in memory alone.
fn nowhere(number: u64) -> BlockPlace {
    BlockPlace { directory: 0, segment: u32::MAX, epoch: 0, index: 0, offset: 0, number, watermark: 0 }
}

/// A block made of another one.
struct Rest {
    bytes: Vec<u8>,
    continues: bool,
    ranges: Vec<BlockRange>,
}

/// A log in the block at hand.
struct Cursor {
    log: LogId,
    next: u64,
    /// Its entry in the new block.
    entry: Option<usize>,
}

/// A block without the changes that are lost, and without the beginnings of such. `None` if it is none of ours.
fn without(bytes: &[u8], lost: &Lost, number: u64) -> Option<Rest> {
    let block = Block::decode(bytes, None).ok()?;
    let mut builder = BlockBuilder::new(block.header().len);
    let mut buffer = vec![0; block.header().len];
    let cursor = |log, next| Cursor { log, next, entry: None };
    let mut cursors: HashMap<u32, Cursor> =
        block.logs().map(|entry| (entry.slot, cursor(entry.log, entry.first.0))).collect();
    let mut frames = block.frame_bytes();
    let mut continues = false;
    while let Some(header) = Header::read(frames) {
        let (frame, rest) = frames.split_at_checked(header.frame_len())?;
        frames = rest;
        let cursor = cursors.get_mut(&header.slot())?;
        let is_kept = lost.get(&cursor.log).is_none_or(|from| cursor.next < from.0);
        let is_last = !matches!(header.kind(), Some(FrameKind::FragmentFirst | FrameKind::FragmentMiddle));
        if is_kept {
            let first = SequenceNumber(cursor.next);
            let entry =
                *cursor.entry.get_or_insert_with(|| builder.add_entry(header.slot(), cursor.log, first));
            builder.push_frames(&mut buffer, frame);
            builder.add_count(entry, u32::from(is_last));
        }
        // The fragments of a change are all kept, or none is.
        continues = is_kept && !is_last;
        cursor.next += u64::from(is_last);
    }
    let ranges = builder.entries().iter().map(|entry| {
        let end = SequenceNumber(entry.first.0 + u64::from(entry.count));
        BlockRange { log: entry.log, first: entry.first, end }
    });
    let ranges = ranges.collect();
    let len = builder.finish(&mut buffer, continues);
    buffer.truncate(len);
    block::seal(&mut buffer, &nowhere(number));
    Some(Rest { bytes: buffer, continues, ranges })
}
