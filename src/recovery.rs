//! What a local directory still holds after its last use ended, by a crash or not.
//!
//! Reads the segments in use, block by block, and finds where the durable blocks end. Changes nothing: the cut that makes
//! the end final is recorded by who opens the directory. Which logs exist, and what objects hold of them, the manifest
//! tells.
//!
//! Blocks are numbered densely over the segments in the order of their epochs. The first that is missing or bad ends the
//! log, if it was still in flight; each block says below which number all were durable when it was written, and a bad
//! block below any such watermark is damage, not an end.
//!
//! Nobody needs a block that the manifest says is settled: it is only kept for local restores. Where one of them is damaged,
//! it is let go of with all before it, so that the numbers of what is left have no hole, and end where new ones begin.

mod scan;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::Path;

use bytes::Bytes;
use tidelog_io::directory::MANIFEST_NAME;
use tidelog_io::disk::Files;
use tidelog_io::segment::{parse_segment_name, segment_name};

use self::scan::{Bad, Found, Scan};
use crate::block::{self, BLOCK_ALIGN_BYTES, Block, BlockBuilder, BlockError};
use crate::error::OpenError;
use crate::local::index::whole_from;
use crate::manifest::ManifestState;
use crate::queue::{Held, LocalBlock};
use crate::record::{FrameKind, Header};
use crate::retention::SegmentUse;
use crate::types::{LogId, SequenceNumber};

/// What was found in a directory.
#[derive(Debug, Default)]
pub(crate) struct Recovered {
    /// All durable blocks in the segments in use, in order, but for those that were let go of.
    pub blocks: Vec<LocalBlock>,
    /// For each of them, the log whose change of the block before goes on in it.
    pub resumes: Vec<Option<LogId>>,
    /// The number of the next block.
    pub next_number: u64,
    /// For each log with changes in those blocks, what they hold of it.
    pub ranges: BTreeMap<LogId, (SequenceNumber, SequenceNumber)>,
    /// The segments in use, in the order of epochs, but for those that were let go of.
    pub uses: Vec<SegmentUse>,
    /// Segments in use that nobody needs, by number and epoch: something there is damaged, or behind it.
    pub let_go: Vec<(u32, u64)>,
    /// For which damage that was, or blocks of `uses` were left out.
    pub damage: Option<OpenError>,
}

impl Recovered {
    /// Leaves out all blocks and uses so far: they are settled, and what comes next does not follow them.
    fn leave_out(&mut self, damage: OpenError) {
        self.blocks.clear();
        self.resumes.clear();
        self.let_go.extend(self.uses.drain(..).map(|used| (used.segment, used.epoch)));
        self.damage = Some(damage);
    }

    /// Says what was let go of, if anything was.
    pub fn warn_of_damage(&self, directory: &Path) {
        if let Some(error) = &self.damage {
            tracing::warn!(%error, directory = %directory.display(), segments = self.let_go.len(),
                "blocks that were only kept for local restores are damaged, and let go of: restores read from objects what \
                 stood there. Nothing is lost; if it happens again, replace the disk");
        }
    }
}

/// Whether a directory has a manifest. One with segments must have.
pub(crate) fn has_manifest(directory: &Path, files: &dyn Files) -> Result<bool, OpenError> {
    let names = files.list().map_err(|source| OpenError::Io {
        action: format!("listing files in {}", directory.display()),
        source,
    })?;
    if names.iter().any(|(name, _)| name == MANIFEST_NAME) {
        return Ok(true);
    }
    match names.into_iter().find(|(name, _)| parse_segment_name(name).is_some()) {
        Some((segment, _)) => Err(OpenError::ManifestMissing { directory: directory.to_owned(), segment }),
        None => Ok(false),
    }
}

/// Reads what `state` says is in use.
pub(crate) fn recover(
    device: usize,
    directory: &Path,
    files: &dyn Files,
    directory_id: u64,
    state: &ManifestState,
) -> Result<Recovered, OpenError> {
    check_uses(directory, files, directory_id, state)?;
    let mut segments: Vec<(u64, u32)> =
        state.segments().iter().map(|(&segment, &epoch)| (epoch, segment)).collect();
    segments.sort_unstable();
    let settled = state.settled();
    let mut recovered = Recovered::default();
    let mut expected: Option<u64> = None;
    let mut watermark = 0;
    let mut bad: Option<Bad> = None;
    // A use without blocks, and nothing known of the blocks before it.
    let mut empty: Option<u32> = None;
    for (epoch, segment) in segments {
        let limit = state.number_limit(epoch);
        let scan = Scan { device, directory, files, directory_id, segment, epoch, limit, settled };
        let mut found = scan.run();
        watermark = watermark.max(found.watermark);
        let sealed = state.sealed(segment);
        if let Some(sealed) = sealed.clone()
            && let Err(damage) = check_sealed(directory, segment, &sealed, &mut found)
        {
            if sealed.end > settled || expected.is_some_and(|due| due > sealed.start) {
                return Err(damage);
            }
            recovered.leave_out(damage);
            recovered.let_go.push((segment, epoch));
            (expected, bad, empty) = (Some(sealed.end), None, None);
            continue;
        }
        let mut blocks = expected.unwrap_or(0)..expected.unwrap_or(0);
        let mut trouble = found.damaged;
        for (block, resumes) in found.blocks {
            let number = block.number;
            trouble = bad.take().or(trouble).or_else(|| match (expected, empty) {
                (Some(due), _) if due != number => {
                    let offset = block.place.map_or(0, |place| place.offset);
                    let source = BlockError::Misplaced { what: "number", expected: due, found: number };
                    Some(Bad::block(directory, segment, offset, source, Some(due)))
                }
                // Each use gets a block before the next one begins: at least the last of that one was in flight.
                (None, Some(empty)) if number > 0 => {
                    Some(Bad::block(directory, empty, 0, BlockError::NotABlock, Some(number - 1)))
                }
                _ => None,
            });
            if let Some(trouble) = trouble.take() {
                if number > settled || expected.is_some_and(|due| due > number) {
                    bad = Some(trouble);
                    break;
                }
                // All that may be missing before this block is settled.
                recovered.leave_out(trouble.error);
                (expected, empty) = (None, None);
            }
            if expected.is_none() || blocks.is_empty() {
                blocks.start = number;
            }
            expected = Some(number + 1);
            blocks.end = number + 1;
            recovered.blocks.push(block);
            recovered.resumes.push(resumes);
        }
        if let Some(mut end_of_scan) = found.bad
            && bad.is_none()
        {
            // An untouched rest is how every segment ends; what follows tells whether it is the end of all.
            end_of_scan.number = end_of_scan.number.or(expected);
            // What does not count may be torn: it was written again elsewhere, or its process died.
            let counts =
                scan.limit.is_none_or(|limit| end_of_scan.number.is_some_and(|number| number < limit));
            if end_of_scan.is_certain || (counts && (!end_of_scan.is_rest || found.later)) {
                bad = Some(end_of_scan);
            }
        }
        if blocks.is_empty() && scan.limit.is_none() && sealed.is_none() {
            empty.get_or_insert(segment);
        }
        // As it was sealed, also where some of it was left out: it is sealed so again.
        recovered.uses.push(SegmentUse { segment, epoch, blocks: sealed.unwrap_or(blocks) });
    }
    let first_bad = bad.as_ref().and_then(|bad| bad.number);
    let end = expected.or(first_bad).unwrap_or(0).max(state.next_number());
    let is_lost =
        |bad: &mut Bad| bad.is_certain || (watermark > settled && bad.number.unwrap_or(end) < watermark);
    if let Some(bad) = bad.take_if(is_lost) {
        return Err(bad.error);
    }
    if watermark > settled && end < watermark {
        return Err(missing(directory, &recovered, end, watermark));
    }
    if let Some(end) = expected.filter(|end| *end < settled && !recovered.blocks.is_empty()) {
        // New blocks are not to have the numbers of settled ones, nor to come behind a hole.
        let damage = bad.map_or_else(|| missing(directory, &recovered, end, settled), |bad| bad.error);
        recovered.leave_out(damage);
    }
    recovered.next_number = end.max(settled);
    trim_unfinished(directory, files, &mut recovered)?;
    check_logs(directory, state, &mut recovered)?;
    Ok(recovered)
}

/// A use of a segment is recorded before its first block is written, so a block of a later use than any known shows that
/// the manifest has lost its end: what looks like a torn append was damaged afterwards.
fn check_uses(
    directory: &Path,
    files: &dyn Files,
    directory_id: u64,
    state: &ManifestState,
) -> Result<(), OpenError> {
    let io = |name: &str, source| OpenError::Io {
        action: format!("reading {name} in {}", directory.display()),
        source,
    };
    for (name, _) in files.list().map_err(|source| io("the names", source))? {
        if parse_segment_name(&name).is_none_or(|segment| state.segments().contains_key(&segment)) {
            continue;
        }
        let mut bytes = vec![0; BLOCK_ALIGN_BYTES];
        let read = files.read_at(&name, 0, &mut bytes).map_err(|source| io(&name, source))?;
        let Ok(len) = Block::peek_len(&bytes[..read]) else { continue };
        bytes.resize(len, 0);
        let read = files.read_at(&name, 0, &mut bytes).map_err(|source| io(&name, source))?;
        let place = Block::decode(&bytes[..read], None).map(|block| block.header().place);
        if place.is_ok_and(|place| place.directory == directory_id && place.epoch >= state.next_epoch()) {
            return Err(OpenError::ManifestBehind { directory: directory.to_owned(), segment: name });
        }
    }
    Ok(())
}

/// A use that was ended cleanly holds what it held then, but for blocks that nobody needs.
fn check_sealed(
    directory: &Path,
    segment: u32,
    sealed: &Range<u64>,
    found: &mut Found,
) -> Result<(), OpenError> {
    let numbers = || found.blocks.iter().map(|(block, _)| block.number);
    let start = numbers().next().filter(|_| found.damaged.is_some()).unwrap_or(sealed.start);
    if numbers().eq(start..sealed.end) && sealed.start <= start {
        return Ok(());
    }
    let bad = found.bad.take().or(found.damaged.take());
    Err(bad.map_or_else(
        || {
            let last = found.blocks.last();
            let offset = last.and_then(|(block, _)| Some(block.place?.offset + block.len as u64));
            let (have, needed) = (found.blocks.len(), (sealed.end - sealed.start) as usize);
            let source = BlockError::Truncated { needed, have };
            Bad::block(directory, segment, offset.unwrap_or(0), source, None).error
        },
        |bad| bad.error,
    ))
}

/// Blocks that were durable are gone without a trace of a bad one: a segment was cut short or replaced.
fn missing(directory: &Path, recovered: &Recovered, end: u64, watermark: u64) -> OpenError {
    let last = recovered.blocks.last();
    let segment = last.and_then(|block| block.place).map_or(0, |place| place.segment);
    let offset = last.and_then(|block| Some(block.place?.offset + block.len as u64)).unwrap_or(0);
    let source = BlockError::Misplaced { what: "number", expected: watermark.saturating_sub(1), found: end };
    Bad::block(directory, segment, offset, source, None).error
}

/// Takes large changes whose ends are missing out of the blocks: the process died before they were written, and they were
/// never acknowledged.
fn trim_unfinished(directory: &Path, files: &dyn Files, recovered: &mut Recovered) -> Result<(), OpenError> {
    for end in 1..=recovered.blocks.len() {
        // Where another use of the directory went on, nothing of the change comes any more.
        let goes_on = recovered.resumes.get(end).copied().flatten().is_some();
        if recovered.blocks[end - 1].continues && !goes_on {
            trim_last(directory, files, &mut recovered.blocks[..end])?;
        }
    }
    Ok(())
}

/// Takes the unfinished change at the end of the last block out of the blocks. What is left of them stays in memory.
fn trim_last(directory: &Path, files: &dyn Files, blocks: &mut [LocalBlock]) -> Result<(), OpenError> {
    for block in blocks.iter_mut().rev() {
        let Some(place) = block.place.filter(|_| block.continues) else { return Ok(()) };
        let name = segment_name(place.segment);
        let io =
            |source| OpenError::Io { action: format!("reading {name} in {}", directory.display()), source };
        let mut bytes = vec![0; block.len];
        let read = files.read_at(&name, place.offset, &mut bytes).map_err(io)?;
        let damaged = |source| OpenError::Damaged {
            directory: directory.to_owned(),
            segment: name.clone(),
            offset: place.offset,
            source,
        };
        let (kept, began_here) = trim(&bytes[..read]).map_err(damaged)?;
        block.len = kept.len();
        block.held = Some(Held::uncharged(Bytes::from(kept)));
        block.place = None;
        block.continues = false;
        if began_here {
            return Ok(());
        }
    }
    Ok(())
}

/// A block without the fragments at its end, and whether their change began in it.
fn trim(bytes: &[u8]) -> Result<(Vec<u8>, bool), BlockError> {
    let block = Block::decode(bytes, None)?;
    let frames = block.frame_bytes();
    let (mut at, mut keep, mut began_here) = (0, 0, false);
    while let Some(header) = Header::read(&frames[at..]) {
        at += header.frame_len();
        if at > frames.len() {
            return Err(BlockError::Corrupt("a frame is cut short"));
        }
        match header.kind() {
            Some(FrameKind::FragmentFirst) => began_here = true,
            Some(FrameKind::FragmentMiddle) => {}
            _ => (keep, began_here) = (at, false),
        }
    }
    let mut builder = BlockBuilder::new(block.header().len);
    let mut buffer = vec![0; block.header().len];
    let mut slots = BTreeSet::new();
    for entry in block.logs() {
        if !slots.insert(entry.slot) {
            return Err(BlockError::Corrupt("two logs in one slot"));
        }
        let index = builder.add_entry(entry.slot, entry.log, entry.first);
        builder.add_count(index, entry.count);
    }
    builder.push_frames(&mut buffer, &frames[..keep]);
    let len = builder.finish(&mut buffer, false);
    buffer.truncate(len);
    block::seal(&mut buffer, &block.header().place);
    Ok((buffer, began_here))
}

/// Checks that what is left of each log is whole, and notes it.
fn check_logs(directory: &Path, state: &ManifestState, recovered: &mut Recovered) -> Result<(), OpenError> {
    let blocks = recovered.blocks.iter().zip(&recovered.resumes);
    for (range, resumes) in
        blocks.flat_map(|(block, resumes)| block.ranges.iter().map(move |range| (range, *resumes)))
    {
        let Some(log) = state.logs().get(&range.log) else { continue };
        let covered = log.covered();
        let begun = whole_from(range, resumes);
        match recovered.ranges.get_mut(&range.log) {
            // Nothing but the middle of a change: it ends in the next block, or was never finished.
            None if begun > range.end => {}
            Some((_, end)) if *end == range.first || *end == begun => *end = range.end.max(*end),
            // What objects hold or truncation dropped may be missing here.
            _ if covered >= begun => {
                recovered.ranges.insert(range.log, (begun, range.end.max(begun)));
            }
            // What was neither synced nor persisted when a log was closed is dropped, block by block.
            None if log.closed => {}
            known => {
                let directory = directory.to_owned();
                let expected = known.map_or(covered, |(_, end)| covered.max(*end));
                return Err(OpenError::Hole { directory, log: range.log, expected, found: begun });
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::block::tests::seal_damaged;
    use crate::block::{BLOCK_HEADER_BYTES, TABLE_ENTRY_BYTES};

    #[test]
    fn a_block_that_contradicts_itself_is_not_built_again() {
        let mut builder = BlockBuilder::new(BLOCK_ALIGN_BYTES);
        let mut bytes = vec![0; BLOCK_ALIGN_BYTES];
        builder.add_entry(1, LogId(1), SequenceNumber(0));
        builder.add_entry(2, LogId(2), SequenceNumber(0));
        builder.push_value(&mut bytes, Header::new(FrameKind::FragmentFirst, 0, 1, 8), &[8; 8], &[]);
        builder.finish(&mut bytes, true);
        seal_damaged(&mut bytes);
        assert!(trim(&bytes).is_ok());
        let slot = BLOCK_HEADER_BYTES + 16 + TABLE_ENTRY_BYTES;
        assert_eq!(bytes[slot], 2);
        bytes[slot] = 1;
        seal_damaged(&mut bytes);
        assert_eq!(trim(&bytes).unwrap_err(), BlockError::Corrupt("two logs in one slot"));
    }
}
