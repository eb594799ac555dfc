//! What a local directory still holds after its last use ended, by a crash or not.
//!
//! Reads the segments in use, block by block, and finds where the durable blocks end. Changes nothing: the cut that makes
//! the end final is recorded by who opens the directory. Which logs exist, and what objects hold of them, the manifest
//! tells.
//!
//! Blocks are numbered densely over the segments in the order of their epochs. The first that is missing or bad ends the
//! log, if it was still in flight; each block says below which number all were durable when it was written, and a bad
//! block below any such watermark is damage, not an end.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::Path;

use bytes::Bytes;
use tidelog_io::directory::MANIFEST_NAME;
use tidelog_io::disk::Files;
use tidelog_io::segment::{BlockPlace, parse_segment_name, segment_name};

use crate::block::{self, BLOCK_ALIGN_BYTES, Block, BlockBuilder, BlockError, Expected};
use crate::error::OpenError;
use crate::local::index::whole_from;
use crate::manifest::ManifestState;
use crate::queue::{BlockRange, Held, LocalBlock};
use crate::record::{FrameKind, Header};
use crate::retention::SegmentUse;
use crate::types::{LogId, SequenceNumber};

/// How much is read at once, in bytes.
const WINDOW_BYTES: usize = 1 << 20;

/// What was found in a directory.
#[derive(Debug)]
pub(crate) struct Recovered {
    /// All durable blocks in the segments in use, in order.
    pub blocks: Vec<LocalBlock>,
    /// For each of them, the log whose change of the block before goes on in it.
    pub resumes: Vec<Option<LogId>>,
    /// The number of the next block.
    pub next_number: u64,
    /// For each log with changes in those blocks, what they hold of it.
    pub ranges: BTreeMap<LogId, (SequenceNumber, SequenceNumber)>,
    /// The segments in use, in the order of epochs.
    pub uses: Vec<SegmentUse>,
}

/// Where and why reading stopped.
#[derive(Debug)]
struct Bad {
    segment: u32,
    offset: u64,
    error: BlockError,
    /// The number that the bad block must have had, where a later one in its segment tells.
    number: Option<u64>,
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
    let mut recovered = Recovered {
        blocks: Vec::new(),
        resumes: Vec::new(),
        next_number: 0,
        ranges: BTreeMap::new(),
        uses: Vec::new(),
    };
    let mut expected: Option<u64> = None;
    let mut watermark = 0;
    let mut bad: Option<Bad> = None;
    // A use without blocks, and nothing known of the blocks before it.
    let mut empty: Option<u32> = None;
    for (epoch, segment) in segments {
        let scan =
            Scan { device, directory, files, directory_id, segment, epoch, limit: state.number_limit(epoch) };
        let found = scan.run()?;
        watermark = watermark.max(found.watermark);
        check_sealed(directory, segment, state.sealed(segment), &found)?;
        let mut blocks = expected.unwrap_or(0)..expected.unwrap_or(0);
        for (block, resumes) in found.blocks {
            if bad.is_some() {
                break;
            }
            if let (Some(segment), Some(number), None) = (empty, block.number.checked_sub(1), expected) {
                // Each use gets a block before the next one begins: at least the last of that one was in flight.
                bad = Some(Bad { segment, offset: 0, error: BlockError::NotABlock, number: Some(number) });
                break;
            }
            let due = *expected.get_or_insert(block.number);
            if block.number != due {
                let offset = block.place.map_or(0, |place| place.offset);
                let error = BlockError::Misplaced { what: "number", expected: due, found: block.number };
                bad = Some(Bad { segment, offset, error, number: Some(due) });
                break;
            }
            if blocks.is_empty() {
                blocks.start = due;
            }
            expected = Some(due + 1);
            blocks.end = due + 1;
            recovered.blocks.push(block);
            recovered.resumes.push(resumes);
        }
        if let Some(mut end_of_scan) = found.bad
            && bad.is_none()
        {
            // An untouched rest is how every segment ends; what follows tells whether it is the end of all.
            end_of_scan.number = end_of_scan.number.or(expected);
            let is_rest = matches!(end_of_scan.error, BlockError::NotABlock | BlockError::Misplaced { .. });
            // What does not count may be torn: it was written again elsewhere, or its process died.
            let counts =
                scan.limit.is_none_or(|limit| end_of_scan.number.is_some_and(|number| number < limit));
            if counts && (!is_rest || found.later) {
                bad = Some(end_of_scan);
            }
        }
        if blocks.is_empty() && scan.limit.is_none() && state.sealed(segment).is_none() {
            empty.get_or_insert(segment);
        }
        recovered.uses.push(SegmentUse { segment, epoch, blocks });
    }
    let first_bad = bad.as_ref().and_then(|bad| bad.number);
    let end = expected.or(first_bad).unwrap_or(0).max(state.next_number());
    let lost = match &bad {
        Some(bad) => bad.number.unwrap_or(end) < watermark,
        None => false,
    };
    if let (true, Some(bad)) = (lost, bad) {
        let (directory, segment) = (directory.to_owned(), segment_name(bad.segment));
        return Err(OpenError::Damaged { directory, segment, offset: bad.offset, source: bad.error });
    }
    if end < watermark {
        return Err(missing(directory, &recovered, end, watermark));
    }
    recovered.next_number = end;
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

/// A use that was ended cleanly holds what it held then.
fn check_sealed(
    directory: &Path,
    segment: u32,
    sealed: Option<std::ops::Range<u64>>,
    found: &Found,
) -> Result<(), OpenError> {
    let Some(sealed) = sealed else { return Ok(()) };
    let numbers = found.blocks.iter().map(|(block, _)| block.number);
    if numbers.eq(sealed.clone()) {
        return Ok(());
    }
    let (offset, source) = match &found.bad {
        Some(bad) => (bad.offset, bad.error.clone()),
        None => {
            let offset =
                found.blocks.last().and_then(|(block, _)| Some(block.place?.offset + block.len as u64));
            let (have, needed) = (found.blocks.len(), (sealed.end - sealed.start) as usize);
            (offset.unwrap_or(0), BlockError::Truncated { needed, have })
        }
    };
    Err(OpenError::Damaged {
        directory: directory.to_owned(),
        segment: segment_name(segment),
        offset,
        source,
    })
}

/// Blocks that were durable are gone without a trace of a bad one: a segment was cut short or replaced.
fn missing(directory: &Path, recovered: &Recovered, end: u64, watermark: u64) -> OpenError {
    let last = recovered.blocks.last();
    let segment = last.and_then(|block| block.place).map_or(0, |place| place.segment);
    let offset = last.and_then(|block| Some(block.place?.offset + block.len as u64)).unwrap_or(0);
    OpenError::Damaged {
        directory: directory.to_owned(),
        segment: segment_name(segment),
        offset,
        source: BlockError::Misplaced { what: "number", expected: watermark.saturating_sub(1), found: end },
    }
}

struct Scan<'a> {
    device: usize,
    directory: &'a Path,
    files: &'a dyn Files,
    directory_id: u64,
    segment: u32,
    epoch: u64,
    /// Blocks from this number on do not count.
    limit: Option<u64>,
}

struct Found {
    blocks: Vec<(LocalBlock, Option<LogId>)>,
    /// The highest watermark in any valid block of this use.
    watermark: u64,
    /// Where the run of valid blocks ended; `None` at the end of the file.
    bad: Option<Bad>,
    /// Whether valid blocks of this use stand behind that.
    later: bool,
}

impl Scan<'_> {
    fn run(&self) -> Result<Found, OpenError> {
        let mut found = Found { blocks: Vec::new(), watermark: 0, bad: None, later: false };
        let mut window = Window { scan: self, start: 0, bytes: Vec::new() };
        let mut offset = 0;
        let mut index = 0;
        loop {
            let bytes = window.at(offset, BLOCK_ALIGN_BYTES)?;
            if bytes.is_empty() {
                break;
            }
            let needed = Block::peek_len(bytes).unwrap_or(BLOCK_ALIGN_BYTES);
            let bytes = window.at(offset, needed)?;
            let following = found.bad.is_none();
            let decoded = if following {
                let (directory, segment, epoch) = (self.directory_id, self.segment, self.epoch);
                Block::decode(
                    bytes,
                    Some(&Expected { directory, segment, epoch, index, offset, number: None }),
                )
            } else {
                self.decode_stray(bytes, offset)
            };
            match decoded {
                Ok(block) => {
                    let place = block.header().place;
                    if self.limit.is_some_and(|limit| place.number >= limit) {
                        // Written again elsewhere: neither it nor what follows here counts.
                        break;
                    }
                    found.watermark = found.watermark.max(place.watermark);
                    let len = block.header().len;
                    if let Some(bad) = &mut found.bad {
                        found.later = true;
                        let behind = u64::from(place.index.saturating_sub(index));
                        bad.number = bad.number.or(place.number.checked_sub(behind));
                    } else {
                        found.blocks.push((local_block(self.device, &block, place), resumed_log(&block)));
                        index += 1;
                    }
                    offset += len as u64;
                }
                // Only a newer program can say what this is.
                Err(source @ BlockError::NewerVersion { .. }) if following => {
                    let (directory, segment) = (self.directory.to_owned(), segment_name(self.segment));
                    return Err(OpenError::Damaged { directory, segment, offset, source });
                }
                Err(error) => {
                    if following {
                        found.bad = Some(Bad { segment: self.segment, offset, error, number: None });
                    }
                    offset += BLOCK_ALIGN_BYTES as u64;
                }
            }
        }
        Ok(found)
    }

    /// A block of this use behind a bad one, where its index is not known.
    fn decode_stray<'a>(&self, bytes: &'a [u8], offset: u64) -> Result<Block<'a>, BlockError> {
        let block = Block::decode(bytes, None)?;
        let place = block.header().place;
        let own = (place.directory, place.segment, place.epoch, place.offset)
            == (self.directory_id, self.segment, self.epoch, offset);
        if own { Ok(block) } else { Err(BlockError::NotABlock) }
    }
}

/// Reads a file forward in large pieces.
struct Window<'a> {
    scan: &'a Scan<'a>,
    start: u64,
    bytes: Vec<u8>,
}

impl Window<'_> {
    /// The bytes from `offset` on: at least `len`, fewer only at the end of the file.
    fn at(&mut self, offset: u64, len: usize) -> Result<&[u8], OpenError> {
        let skip = usize::try_from(offset.saturating_sub(self.start)).unwrap_or(usize::MAX);
        if offset < self.start || skip.saturating_add(len) > self.bytes.len() {
            self.bytes.resize(len.max(WINDOW_BYTES), 0);
            let name = segment_name(self.scan.segment);
            let read = self
                .scan
                .files
                .read_at(&name, offset, &mut self.bytes)
                .map_err(|source| self.error(&name, source))?;
            self.bytes.truncate(read);
            self.start = offset;
            return Ok(&self.bytes);
        }
        Ok(&self.bytes[skip..])
    }

    fn error(&self, name: &str, source: io::Error) -> OpenError {
        let directory = self.scan.directory;
        match source.kind() {
            io::ErrorKind::NotFound => {
                OpenError::SegmentMissing { directory: directory.to_owned(), segment: name.to_owned() }
            }
            _ => OpenError::Io { action: format!("reading {name} in {}", directory.display()), source },
        }
    }
}

fn local_block(device: usize, block: &Block<'_>, place: BlockPlace) -> LocalBlock {
    let ranges = block.logs().map(|entry| BlockRange {
        log: entry.log,
        first: entry.first,
        end: SequenceNumber(entry.first.0 + u64::from(entry.count)),
    });
    LocalBlock {
        device,
        number: place.number,
        place: Some(place),
        len: block.header().len,
        held: None,
        continues: block.header().continues,
        ranges: ranges.collect(),
    }
}

/// The log whose change of the block before goes on in this one.
fn resumed_log(block: &Block<'_>) -> Option<LogId> {
    let header = Header::read(block.frame_bytes())?;
    let resumes = matches!(header.kind(), Some(FrameKind::FragmentMiddle | FrameKind::FragmentLast));
    let entry = block.logs().find(|entry| resumes && entry.slot == header.slot())?;
    Some(entry.log)
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
