//! The assembler: sorts the changes of a part's worth of blocks by log, key group and sequence number.
//!
//! A counting sort in two walks over the frames: the first counts bytes and changes per (log, key group), which gives
//! every changeset its place; the second writes each change behind its predecessor there. It knows nothing of uploads;
//! what changesets and directories look like is part.rs's.
//!
//! A part does not fit into a core's own cache, so bytes are looked at while they are there for another reason: a block is
//! counted when it was just verified, and long changesets are hashed while they grow.

mod memory;
mod scatter;

pub use self::memory::Memory;
use self::scatter::{GROWING_BYTES_MIN, Growing, Plan, scatter};
use crate::block::{Block, BlockError};
use crate::part::{self, Compression, PartId, Run};
use crate::record::{FRAME_HEADER_BYTES, FrameKind, Header, split_fragment_lead};
use crate::types::{LogId, SequenceNumber};
use crate::varint;
use std::collections::HashMap;
use std::hash::Hasher as _;
use std::ops::Range;

/// An assembled part.
#[derive(Debug, PartialEq, Eq)]
pub struct Part {
    /// The part's bytes: its runs back to back. Empty if no change was to be kept.
    pub bytes: Memory,
    /// The directories of its runs, back to back, for the [tail](crate::tail::Tail) of its object.
    pub directories: Vec<u8>,
    /// What stands where in `bytes`, sorted by log.
    pub runs: Vec<Run>,
}

/// Assembles one part after another and keeps its scratch memory between them.
#[derive(Default)]
pub struct Assembler {
    /// Per slot of the block at hand: 1 + index into `logs`, or 0.
    slots: Vec<u32>,
    logs: Vec<Log>,
    by_id: HashMap<LogId, u32>,
    /// Pages of cells of all logs, back to back.
    cells: Vec<Cell>,
    /// What the first walk found out about each frame, for the second.
    plan: Vec<Step>,
    /// In the order of the plan: the deltas that do not fit into a step.
    large_deltas: Vec<u64>,
    changesets: Vec<Span>,
    packer: part::Packer,
    /// Memory for the next part before compression.
    spare: Memory,
}

impl std::fmt::Debug for Assembler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Assembler").finish_non_exhaustive()
    }
}

impl Assembler {
    /// An assembler without scratch memory yet.
    #[must_use]
    pub fn new() -> Assembler {
        Assembler::default()
    }

    /// Sorts the changes of `blocks`, which follow each other on one device, into a part. Each block is taken when the one
    /// before it was looked at; an error in place of one ends it.
    ///
    /// `kept` is asked once per log for the numbers to keep; that log's other changes are left out. No change that is kept
    /// may be split across the ends of `blocks`. Of one beyond the range, the rest may be missing.
    ///
    /// # Errors
    /// [`BlockError::Corrupt`] if a block's frames contradict its table, [`BlockError::Gap`] if changes are missing
    /// between blocks, [`BlockError::Unfinished`] if a change goes on behind the last block.
    pub fn assemble<'a, E: From<BlockError>>(
        &mut self,
        blocks: impl IntoIterator<Item = Result<Block<'a>, E>>,
        kept: &mut dyn FnMut(LogId) -> Range<SequenceNumber>,
        part: PartId,
        compression: Compression,
    ) -> Result<Part, E> {
        self.reset();
        let blocks = self.count(blocks, kept)?;
        let (mut runs, raw_len) = self.place();
        let mut bytes = self.memory(raw_len + SLACK_BYTES);
        let mut growing = match compression {
            Compression::None => self.growing(&runs, part),
            Compression::Lz4 => Vec::new(),
        };
        self.scatter(&blocks, &mut bytes, &mut growing);
        bytes.set_len(raw_len);
        match compression {
            Compression::None => {
                let directories = self.seal(&mut bytes, &runs, part, growing);
                Ok(Part { bytes, directories, runs })
            }
            Compression::Lz4 => {
                let (packed, directories) = self.pack(&bytes, &mut runs, part);
                self.spare = bytes;
                Ok(Part { bytes: packed.into(), directories, runs })
            }
        }
    }

    /// Offers memory for the next part: of an earlier one, as a rule. What is in it is not looked at.
    pub fn reuse(&mut self, memory: Memory) {
        if memory.capacity() > self.spare.capacity() {
            self.spare = memory;
        }
    }

    fn memory(&mut self, len: usize) -> Memory {
        let mut memory = std::mem::take(&mut self.spare);
        if memory.capacity() < len {
            // First what is too small, so that there are never both.
            drop(memory);
            memory = Memory::new(len);
        }
        memory.set_len(len);
        memory
    }

    fn reset(&mut self) {
        // An earlier call may have failed half-way through a block.
        self.slots.fill(0);
        self.logs.clear();
        self.by_id.clear();
        self.cells.clear();
        self.plan.clear();
        self.large_deltas.clear();
        self.changesets.clear();
    }

    /// The first walk: checks everything, counts, and leaves a plan for each frame. Returns the blocks.
    fn count<'a, E: From<BlockError>>(
        &mut self,
        blocks: impl IntoIterator<Item = Result<Block<'a>, E>>,
        kept: &mut dyn FnMut(LogId) -> Range<SequenceNumber>,
    ) -> Result<Vec<Block<'a>>, E> {
        let mut open = None;
        let mut counted = Vec::new();
        for block in blocks {
            let block = block?;
            self.enter(&block, kept)?;
            self.count_block(&block, &mut open)?;
            self.leave(&block)?;
            if block.header().continues != open.is_some() {
                return Err(
                    BlockError::Corrupt("its flag does not say whether the last change goes on").into()
                );
            }
            // Nothing says that there is more of a change that was lost.
            open.take_if(|open: &mut Open| self.logs[open.log as usize].is_lost());
            counted.push(block);
        }
        match open {
            Some(Open { step: Step { cell: SKIP, .. }, .. }) | None => Ok(counted),
            Some(_) => Err(BlockError::Unfinished.into()),
        }
    }

    /// Learns which log each slot of the block means, and that each goes on where it stopped.
    fn enter(
        &mut self,
        block: &Block<'_>,
        kept: &mut dyn FnMut(LogId) -> Range<SequenceNumber>,
    ) -> Result<(), BlockError> {
        for entry in block.logs() {
            let logs = &mut self.logs;
            let index = *self.by_id.entry(entry.log).or_insert_with(|| {
                logs.push(Log::new(entry.log, entry.first.0, kept(entry.log)));
                logs.len() as u32 - 1
            });
            let log = &mut self.logs[index as usize];
            // Blocks without a change to keep may have been left out.
            let due = log.next.max(log.keep_from.min(entry.first.0));
            if entry.first.0 != due {
                let (expected, found) = (SequenceNumber(due), entry.first);
                return Err(BlockError::Gap { log: entry.log, expected, found });
            }
            log.next = due;
            let slot = entry.slot as usize;
            if self.slots.len() <= slot {
                self.slots.resize(slot + 1, 0);
            }
            if self.slots[slot] != 0 {
                return Err(BlockError::Corrupt("two logs in one slot"));
            }
            self.slots[slot] = index + 1;
        }
        Ok(())
    }

    fn leave(&mut self, block: &Block<'_>) -> Result<(), BlockError> {
        for entry in block.logs() {
            let index = std::mem::take(&mut self.slots[entry.slot as usize]) - 1;
            if self.logs[index as usize].next != entry.first.0 + u64::from(entry.count) {
                return Err(BlockError::Corrupt("the log table miscounts"));
            }
        }
        Ok(())
    }

    #[inline]
    fn count_block(&mut self, block: &Block<'_>, open: &mut Option<Open>) -> Result<(), BlockError> {
        let mut rest = block.frame_bytes();
        while let Some(header) = Header::read(rest) {
            let (frame, behind) = rest
                .split_at_checked(header.frame_len())
                .ok_or(BlockError::Corrupt("a frame is cut short"))?;
            rest = behind;
            let slot = self.slots.get(header.slot() as usize).copied().unwrap_or(0);
            let Some(index) = slot.checked_sub(1) else {
                return Err(BlockError::Corrupt("a frame of a log that is not in the table"));
            };
            let step = match header.kind() {
                Some(FrameKind::Data) if open.is_none() => {
                    self.count_change(index, u32::from(header.key_group()) + 1, header.value_len() as u64)
                }
                Some(FrameKind::Metadata) if open.is_none() => {
                    self.count_change(index, 0, header.value_len() as u64)
                }
                Some(FrameKind::FragmentFirst | FrameKind::FragmentMiddle | FrameKind::FragmentLast) => {
                    self.count_fragment(index, header, frame, open)?
                }
                Some(FrameKind::Data | FrameKind::Metadata) => {
                    return Err(BlockError::Corrupt("a frame between the fragments of a change"));
                }
                Some(FrameKind::Side | FrameKind::Moved) | None => {
                    return Err(BlockError::Corrupt("a frame of a kind that no block holds"));
                }
            };
            self.plan.push(step);
        }
        if rest.is_empty() { Ok(()) } else { Err(BlockError::Corrupt("a frame is cut short")) }
    }

    /// Counts a whole change of `len` bytes.
    #[inline]
    fn count_change(&mut self, log: u32, group_key: u32, len: u64) -> Step {
        let step = self.begin_change(log, group_key, len);
        self.end_change(log);
        if step.cell != SKIP {
            self.cells[step.cell as usize].at += len;
        }
        step
    }

    /// Counts what stands before the bytes of a change, unless it is left out.
    #[inline]
    fn begin_change(&mut self, log: u32, group_key: u32, len: u64) -> Step {
        let log = &mut self.logs[log as usize];
        let sequence = log.next;
        if log.leaves_out(sequence) {
            return Step { cell: SKIP, delta: 0 };
        }
        let page = &mut log.pages[(group_key / PAGE_CELLS) as usize];
        if *page == NO_PAGE {
            *page = self.cells.len() as u32;
            self.cells.resize(self.cells.len() + PAGE_CELLS as usize, Cell::default());
        }
        let index = *page + group_key % PAGE_CELLS;
        let cell = &mut self.cells[index as usize];
        let delta = sequence.wrapping_sub(cell.next);
        cell.next = sequence.wrapping_add(1);
        cell.count += 1;
        cell.at += (varint::len(delta) + varint::len(len)) as u64;
        if delta >= u64::from(LARGE_DELTA) {
            self.large_deltas.push(delta);
            return Step { cell: index, delta: LARGE_DELTA };
        }
        Step { cell: index, delta: delta as u32 }
    }

    /// Wraps only in a block with more changes than its table says, which [`leave`](Assembler::leave) refuses.
    #[inline]
    fn end_change(&mut self, log: u32) {
        let log = &mut self.logs[log as usize];
        log.next = log.next.wrapping_add(1);
    }

    fn count_fragment(
        &mut self,
        log: u32,
        header: Header,
        frame: &[u8],
        open: &mut Option<Open>,
    ) -> Result<Step, BlockError> {
        let mut value = &frame[FRAME_HEADER_BYTES..FRAME_HEADER_BYTES + header.value_len()];
        let state = match (header.kind(), open.take()) {
            (Some(FrameKind::FragmentFirst), None) => {
                let (kind, total_len, bytes) =
                    split_fragment_lead(value).ok_or(BlockError::Corrupt("a malformed first fragment"))?;
                value = bytes;
                let group_key = part::group_key(kind, header.key_group());
                let step = self.begin_change(log, group_key, total_len);
                Open { log, key_group: header.key_group(), left: total_len, step }
            }
            (Some(FrameKind::FragmentFirst), Some(_)) => {
                return Err(BlockError::Corrupt("a frame between the fragments of a change"));
            }
            (_, Some(state)) if state.log == log && state.key_group == header.key_group() => state,
            (_, Some(_)) => return Err(BlockError::Corrupt("a frame between the fragments of a change")),
            // The rest of a change that is left out: the block with its beginning may be gone.
            (_, None) if self.logs[log as usize].leaves_out(self.logs[log as usize].next) => {
                Open { log, key_group: header.key_group(), left: 0, step: Step { cell: SKIP, delta: 0 } }
            }
            (_, None) => return Err(BlockError::Corrupt("a change without its beginning")),
        };
        let mut left = state.left;
        if state.step.cell != SKIP {
            let len = value.len() as u64;
            self.cells[state.step.cell as usize].at += len;
            left = left.checked_sub(len).ok_or(BlockError::Corrupt("fragments longer than their change"))?;
        }
        if header.kind() == Some(FrameKind::FragmentLast) {
            if left != 0 && state.step.cell != SKIP {
                return Err(BlockError::Corrupt("fragments shorter than their change"));
            }
            self.end_change(log);
        } else {
            *open = Some(Open { left, ..state });
        }
        Ok(state.step)
    }

    /// Gives every changeset its place in a part without compression, and every cell its cursor. Returns the runs and
    /// the part's length in bytes.
    fn place(&mut self) -> (Vec<Run>, usize) {
        let mut order: Vec<u32> = (0..self.logs.len() as u32).collect();
        order.sort_unstable_by_key(|log| self.logs[*log as usize].id);
        let mut runs = Vec::with_capacity(order.len());
        let mut offset = 0;
        for index in order {
            let log = &self.logs[index as usize];
            let (first, end) = (log.start.max(log.keep_from), log.next.min(log.keep_to));
            if first >= end {
                continue;
            }
            let spans_start = self.changesets.len();
            for (page, base) in log.pages.iter().enumerate().filter(|(_, base)| **base != NO_PAGE) {
                for (cell_index, cell) in (*base..).zip(&self.cells[*base as usize..][..PAGE_CELLS as usize])
                {
                    if cell.count > 0 {
                        let group_key = page as u32 * PAGE_CELLS + (cell_index - base);
                        let head_len = part::CHECKSUM_BYTES + varint::len(cell.count);
                        let len = head_len as u64 + cell.at;
                        self.changesets.push(Span { group_key, cell: cell_index, start: 0, len });
                    }
                }
            }
            let spans = &mut self.changesets[spans_start..];
            let directory_len = part::directory_len(spans.iter().map(|span| (span.group_key, span.len)));
            let mut at = offset;
            for span in spans {
                let cell = &mut self.cells[span.cell as usize];
                span.start = at;
                cell.at = at + (part::CHECKSUM_BYTES + varint::len(cell.count)) as u64;
                at += span.len;
            }
            runs.push(Run {
                log: log.id,
                first: SequenceNumber(first),
                end: SequenceNumber(end),
                offset,
                directory_len: directory_len as u32,
                len: at - offset,
            });
            offset = at;
        }
        (runs, offset as usize)
    }

    /// The changesets that are hashed while they grow: those of which a stretch of blocks has enough.
    fn growing(&self, runs: &[Run], part: PartId) -> Vec<Growing> {
        let mut runs = runs.iter();
        let mut run = runs.next();
        let mut growing = Vec::new();
        for span in &self.changesets {
            while run.is_some_and(|run| span.start >= run.offset + run.len) {
                run = runs.next();
            }
            let log = run.expect("a changeset is in a run").log;
            if span.len >= GROWING_BYTES_MIN {
                let hash = part::changeset_hasher(part, log, span.group_key);
                let at = span.start as usize + part::CHECKSUM_BYTES;
                growing.push(Growing { cell: span.cell, hash, at });
            }
        }
        growing
    }

    /// The second walk: writes what stands before the changes of each changeset, and them.
    fn scatter(&mut self, blocks: &[Block<'_>], out: &mut [u8], growing: &mut [Growing]) {
        for span in &self.changesets {
            let count = self.cells[span.cell as usize].count;
            varint::write(out, span.start as usize + part::CHECKSUM_BYTES, count);
        }
        let plan = Plan { steps: &self.plan, large_deltas: &self.large_deltas };
        scatter(blocks, plan, &mut self.cells, out, growing);
    }

    /// Writes the checksums of an uncompressed part. Returns its directories.
    fn seal(&self, bytes: &mut [u8], runs: &[Run], part: PartId, growing: Vec<Growing>) -> Vec<u8> {
        let mut spans = &self.changesets[..];
        let mut growing = growing.into_iter().peekable();
        let mut directories = Vec::new();
        for run in runs {
            let run_end = run.offset + run.len;
            let (own, others) = spans.split_at(spans.partition_point(|span| span.start < run_end));
            spans = others;
            let lens = own.iter().map(|span| (span.group_key, span.len));
            part::put_directory(&mut directories, part, run.log, lens);
            for span in own {
                let changeset = &mut bytes[span.start as usize..][..span.len as usize];
                match growing.next_if(|growing| growing.cell == span.cell) {
                    Some(growing) => part::put_checksum(changeset, growing.hash.finish()),
                    None => part::seal_changeset(changeset, part, run.log, span.group_key),
                }
            }
        }
        directories
    }

    /// Compresses the changesets of an uncompressed, unsealed part into a part of its own, and corrects the runs. Returns its
    /// directories too.
    fn pack(&mut self, raw: &[u8], runs: &mut [Run], part: PartId) -> (Vec<u8>, Vec<u8>) {
        let mut out = Vec::with_capacity(raw.len());
        let mut directories = Vec::new();
        let mut spans = &mut self.changesets[..];
        for run in runs {
            let run_end = run.offset + run.len;
            let own_len = spans.partition_point(|span| span.start < run_end);
            let own;
            (own, spans) = spans.split_at_mut(own_len);
            run.offset = out.len() as u64;
            for span in own.iter_mut() {
                let start = out.len();
                let payload = &raw[span.start as usize..][..span.len as usize][part::CHECKSUM_BYTES..];
                self.packer.put_changeset(&mut out, payload, part, run.log, span.group_key);
                span.len = (out.len() - start) as u64;
            }
            run.len = out.len() as u64 - run.offset;
            let start = directories.len();
            let lens = own.iter().map(|span| (span.group_key, span.len));
            part::put_directory(&mut directories, part, run.log, lens);
            run.directory_len = (directories.len() - start) as u32;
        }
        (out, directories)
    }
}

/// Cells are allocated in pages, so that a log pays only for the neighbourhoods of key groups that it touches.
const PAGE_CELLS: u32 = 128;
const PAGES: usize = part::GROUP_KEYS.div_ceil(PAGE_CELLS as usize);
const NO_PAGE: u32 = u32::MAX;
/// The cell of a change that is left out.
const SKIP: u32 = u32::MAX;
/// The delta is in `large_deltas`.
const LARGE_DELTA: u32 = u32::MAX;
/// The second walk writes up to this many bytes past the end of the last changeset.
const SLACK_BYTES: usize = 16;

/// One log in the part at hand.
struct Log {
    id: LogId,
    keep_from: u64,
    /// Changes from here on are lost.
    keep_to: u64,
    start: u64,
    next: u64,
    /// Where each page of cells starts in `cells`, or [`NO_PAGE`].
    pages: Box<[u32; PAGES]>,
}

impl Log {
    fn new(id: LogId, start: u64, kept: Range<SequenceNumber>) -> Log {
        let (keep_from, keep_to) = (kept.start.0, kept.end.0);
        Log { id, keep_from, keep_to, start, next: start, pages: Box::new([NO_PAGE; PAGES]) }
    }

    #[inline]
    fn leaves_out(&self, sequence: u64) -> bool {
        sequence < self.keep_from || sequence >= self.keep_to
    }

    /// Whether its next change is.
    fn is_lost(&self) -> bool {
        self.next >= self.keep_to
    }
}

/// The changes of one log and one key group.
#[derive(Clone, Copy, Default)]
struct Cell {
    /// First the bytes of all records, then the cursor.
    at: u64,
    /// The number that the next record would have with a delta of zero.
    next: u64,
    count: u64,
}

#[derive(Clone, Copy)]
struct Step {
    cell: u32,
    delta: u32,
}

/// A change in fragments whose last one was not yet seen.
#[derive(Clone, Copy)]
struct Open {
    log: u32,
    key_group: u16,
    left: u64,
    step: Step,
}

/// Where a changeset stands in a part.
struct Span {
    group_key: u32,
    cell: u32,
    start: u64,
    len: u64,
}

#[cfg(test)]
pub(crate) mod tests;
