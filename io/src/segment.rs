//! Segments: where blocks go on a local device, and the watermark below which all of them are durable.
//!
//! Owns the pool of segment files, their recycling by epoch, the numbering of blocks, the order in which they become
//! durable, and what happens when a write fails. What is in a block is the caller's: it gives a function that seals a
//! block for its place. Which segment may be reused, and the durable record of it, are the caller's too.
#![forbid(unsafe_code)]

mod pool;
mod reader;
#[cfg(test)]
mod tests;
mod types;

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use crate::aligned::AlignedBuf;
use crate::disk::{Completion, Disk, FileSlot, Files, WakeFn, Write};
use pool::{Pool, Readiness};
pub use reader::SegmentReader;
pub use types::{
    BlockPlace, DurableBlock, Health, Journal, KnownSegment, Refused, RefusedReason, SealFn, SegmentConfig,
};

/// How long [`Segments::poll`] sleeps at most when the engine is gone, and with it the waker.
const BROKEN_SLEEP_MAX: Duration = Duration::from_millis(10);

/// The segments of one directory, driven by one thread.
///
/// Invariants:
/// 1. Numbers are dense; block `watermark + i` is entry `i`. Every entry keeps its bytes in memory, or the disk does.
/// 2. The watermark moves past a block only when its write was reported durable, at the place reported.
/// 3. A segment is written only after the journal recorded its epoch, and by one use at a time.
/// 4. After a failed write nothing is submitted until all in flight has come home; then every block from the watermark
///    on is written again under a greater epoch, after the journal recorded the cut.
///
/// ```
/// # use std::sync::Arc;
/// # use std::time::Duration;
/// # use tidelog_io::{aligned::AlignedBuf, disk::{Disk, Files}, segment::*};
/// # fn run(disk: Box<dyn Disk>, files: Arc<dyn Files>, journal: Box<dyn Journal>) -> std::io::Result<()> {
/// let config = SegmentConfig { directory: 7, segment_bytes: 1 << 20, segments_max: 4, background: false };
/// let seal: SealFn = Box::new(|block, place| block[..8].copy_from_slice(&place.number.to_le_bytes()));
/// let mut segments = Segments::new(disk, files, journal, seal, config, Vec::new(), 1, 0);
/// let number = segments.submit(AlignedBuf::alone(4096)?, 4096).expect("room for a block");
/// let mut durable = Vec::new();
/// while segments.watermark() <= number {
///     segments.poll(Duration::from_millis(10), &mut durable);
/// }
/// assert_eq!(durable[0].place.number, number);
/// # Ok(())
/// # }
/// ```
pub struct Segments {
    disk: Box<dyn Disk>,
    pool: Pool,
    seal: SealFn,
    directory: u64,
    segment_bytes: u64,
    /// The blocks from the watermark on. The last `queued` of them wait to be written again.
    entries: VecDeque<Entry>,
    queued: usize,
    watermark: u64,
    next_number: u64,
    in_flight: usize,
    open: Option<Use>,
    /// Not open any more, with blocks that the watermark has not passed.
    closing: Vec<Use>,
    empty: Vec<(u32, u64)>,
    phase: Phase,
    /// Where the watermark stood when a write failed last.
    failed_at: Option<u64>,
    /// Why blocks that are to be written again still wait.
    blocked: RefusedReason,
    lost: Vec<(u64, AlignedBuf, usize)>,
    completions: Vec<Completion>,
}

enum Phase {
    Running,
    /// Waits for all in flight, then writes again what is not durable, or, if `doomed`, falls sick.
    Settling {
        error: io::Error,
        doomed: bool,
    },
    Sick {
        error: Arc<io::Error>,
        /// The engine is gone, so it cannot be waited on.
        broken: bool,
    },
}

struct Entry {
    len: usize,
    state: EntryState,
}

enum EntryState {
    Queued(AlignedBuf),
    Writing(BlockPlace),
    Written(BlockPlace, AlignedBuf),
    Failed(AlignedBuf),
}

/// One use of a segment, from its first block until the watermark has passed its last.
struct Use {
    segment: u32,
    epoch: u64,
    file: FileSlot,
    first_number: u64,
    end_number: u64,
    blocks: u32,
    len_bytes: u64,
    failed: bool,
    released: bool,
}

impl Segments {
    /// Takes over a directory. `known` are the segment files in it, the open one of an earlier run among those in use:
    /// it is never continued. `next_epoch` is above every epoch ever journaled, `next_number` above every block's
    /// number found.
    ///
    /// # Panics
    /// If `segment_bytes` is zero or no multiple of 4096.
    #[allow(clippy::too_many_arguments)]
    pub fn new(
        disk: Box<dyn Disk>,
        files: Arc<dyn Files>,
        journal: Box<dyn Journal>,
        seal: SealFn,
        config: SegmentConfig,
        known: Vec<KnownSegment>,
        next_epoch: u64,
        next_number: u64,
    ) -> Self {
        let segment_bytes = config.segment_bytes;
        assert!(segment_bytes > 0 && segment_bytes.is_multiple_of(4096), "segment_bytes is {segment_bytes}");
        let pool = Pool::new(files, journal, &config, known, next_epoch, disk.waker());
        Self {
            disk,
            pool,
            seal,
            directory: config.directory,
            segment_bytes,
            entries: VecDeque::new(),
            queued: 0,
            watermark: next_number,
            next_number,
            in_flight: 0,
            open: None,
            closing: Vec::new(),
            empty: Vec::new(),
            phase: Phase::Running,
            failed_at: None,
            blocked: RefusedReason::Preparing,
            lost: Vec::new(),
            completions: Vec::new(),
        }
    }

    /// The number of the next block taken.
    pub fn next_number(&self) -> u64 {
        self.next_number
    }

    /// All blocks with smaller numbers are durable.
    pub fn watermark(&self) -> u64 {
        self.watermark
    }

    /// Writes now in flight.
    pub fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Bytes of the segment files that hold, or may come to hold, blocks that are needed.
    pub fn bytes_in_use(&self) -> u64 {
        self.pool.in_use() as u64 * self.segment_bytes
    }

    /// Ends a [`poll`](Self::poll) early, or the next one if none is under way.
    pub fn waker(&self) -> WakeFn {
        self.disk.waker()
    }

    /// Starts making the first segment ready before there is a block for it.
    pub fn prepare(&mut self) {
        if self.open.is_none() && matches!(self.phase, Phase::Running) {
            self.pool.anticipate();
        }
    }

    /// Seals the block in the first `len` bytes of `buffer` for its place and starts writing it. Returns its number.
    /// Never waits for the device, except, without `background`, to make a segment ready.
    ///
    /// # Errors
    /// The buffer comes back with the reason when it is not the moment, see [`RefusedReason`].
    ///
    /// # Panics
    /// If `len` is zero, no multiple of 4096, or more than the buffer or a segment holds.
    pub fn submit(&mut self, buffer: AlignedBuf, len: usize) -> Result<u64, Refused> {
        assert!(len > 0 && len.is_multiple_of(4096) && len <= buffer.len(), "block of {len} bytes");
        assert!(
            len as u64 <= self.segment_bytes,
            "block of {len} bytes for a segment of {}",
            self.segment_bytes
        );
        if let Some(reason) = self.refusal() {
            return Err(Refused { reason, buffer });
        }
        let number = self.next_number;
        match self.launch(number, buffer, len) {
            Ok(place) => {
                self.entries.push_back(Entry { len, state: EntryState::Writing(place) });
                self.next_number += 1;
                debug_assert_eq!(self.watermark + self.entries.len() as u64, self.next_number);
                Ok(number)
            }
            Err((reason, buffer)) => Err(Refused { reason, buffer }),
        }
    }

    /// Adds the blocks that have become durable, in the order of their numbers, each once. Waits at most `timeout` if
    /// nothing has completed; a wake-up ends the wait.
    pub fn poll(&mut self, timeout: Duration, durable: &mut Vec<DurableBlock>) {
        self.pool.collect();
        let before = (self.watermark, matches!(self.phase, Phase::Sick { .. }));
        self.go_on(durable);
        let changed = before != (self.watermark, matches!(self.phase, Phase::Sick { .. }));
        let timeout = if changed { Duration::ZERO } else { timeout };
        let mut completions = std::mem::take(&mut self.completions);
        let waited = if matches!(self.phase, Phase::Sick { broken: true, .. }) {
            std::thread::sleep(timeout.min(BROKEN_SLEEP_MAX));
            Ok(())
        } else {
            self.disk.wait(timeout, &mut completions)
        };
        for completion in completions.drain(..) {
            self.complete(completion);
        }
        self.completions = completions;
        if let Err(error) = waited {
            self.pass(durable);
            self.fall_sick(error, true);
        }
        self.pool.collect();
        self.go_on(durable);
    }

    /// Polls until all blocks taken are durable, or as many as can be without a release.
    pub fn drain(&mut self, durable: &mut Vec<DurableBlock>) {
        loop {
            self.poll(Duration::ZERO, durable);
            let stuck = self.in_flight == 0
                && !self.pool.is_preparing()
                && matches!(self.phase, Phase::Running)
                && matches!(self.blocked, RefusedReason::NoSegment);
            if self.entries.is_empty() || stuck {
                return;
            }
            self.poll(Duration::from_millis(100), durable);
        }
    }

    /// Lets the file of a segment be used again: nothing of it is needed under this epoch, and the caller has made that
    /// durable. The open segment is closed first. A quarantined file is removed instead.
    pub fn release(&mut self, segment: u32, epoch: u64) {
        if self.open_segment() == Some((segment, epoch)) {
            self.seal_open_segment();
        }
        // While blocks are in flight the file may not be written by another use.
        if let Some(used) =
            self.closing.iter_mut().find(|used| (used.segment, used.epoch) == (segment, epoch))
        {
            used.released = true;
            return;
        }
        self.empty.retain(|empty| *empty != (segment, epoch));
        let known = self.pool.release(segment, epoch);
        debug_assert!(known, "segment {segment} is not in use under epoch {epoch}");
    }

    /// The segment that takes the next block, and its epoch.
    pub fn open_segment(&self) -> Option<(u32, u64)> {
        self.open.as_ref().map(|open| (open.segment, open.epoch))
    }

    /// The segment that was made ready for when the open one is full, and its epoch: journaled as acquired, it holds no
    /// block. Releasing it is allowed, but only makes another one necessary.
    pub fn spare_segment(&self) -> Option<(u32, u64)> {
        self.pool.spare()
    }

    /// Ends the open segment, so that it can be released once its blocks are not needed. The next block opens another.
    pub fn seal_open_segment(&mut self) {
        if let Some(open) = self.open.take() {
            self.closing.push(open);
            self.retire();
        }
    }

    /// Acquired segments that ended without a durable block, because a write failed: no [`DurableBlock`] will name
    /// them. The caller releases them.
    pub fn take_empty(&mut self) -> Vec<(u32, u64)> {
        std::mem::take(&mut self.empty)
    }

    /// Whether the device takes blocks. Sick is for ever, and said only when nothing is in flight any more.
    pub fn health(&self) -> Health {
        match &self.phase {
            Phase::Sick { error, .. } => Health::Sick(error.clone()),
            _ => Health::Healthy,
        }
    }

    /// When sick: the blocks that never became durable, in the order of their numbers, with their lengths in bytes. If
    /// the engine itself broke, those it held are not among them.
    pub fn take_lost(&mut self) -> Vec<(u64, AlignedBuf, usize)> {
        std::mem::take(&mut self.lost)
    }

    /// Why a new block cannot be taken at this moment, before its place is looked for.
    fn refusal(&mut self) -> Option<RefusedReason> {
        if matches!(self.phase, Phase::Running) && self.queued > 0 {
            self.rewrite();
        }
        match &self.phase {
            Phase::Sick { error, .. } => Some(RefusedReason::Sick(error.clone())),
            Phase::Settling { .. } => Some(RefusedReason::Preparing),
            Phase::Running => (self.queued > 0).then(|| self.blocked.clone()),
        }
    }

    /// Seals a block for the next place and hands it to the disk.
    fn launch(
        &mut self,
        number: u64,
        mut buffer: AlignedBuf,
        len: usize,
    ) -> Result<BlockPlace, (RefusedReason, AlignedBuf)> {
        if self.in_flight >= self.disk.depth() {
            return Err((RefusedReason::Depth, buffer));
        }
        if self.open.as_ref().is_some_and(|open| open.len_bytes + len as u64 > self.segment_bytes) {
            self.seal_open_segment();
        }
        if self.open.is_none()
            && let Err(reason) = self.open_next(number)
        {
            return Err((reason, buffer));
        }
        let open = self.open.as_mut().expect("a segment was opened");
        let place = BlockPlace {
            directory: self.directory,
            segment: open.segment,
            epoch: open.epoch,
            index: open.blocks,
            offset: open.len_bytes,
            number,
            watermark: self.watermark,
        };
        (self.seal)(&mut buffer[..len], &place);
        let write = Write { token: number, file: open.file, offset: place.offset, buffer, len };
        if let Err(write) = self.disk.submit(write) {
            return Err((RefusedReason::Depth, write.buffer));
        }
        assert_eq!(open.end_number, number, "blocks are placed in the order of their numbers");
        open.end_number = number + 1;
        open.blocks += 1;
        open.len_bytes += len as u64;
        self.in_flight += 1;
        if open.len_bytes >= self.segment_bytes / 2 {
            self.pool.anticipate();
        }
        Ok(place)
    }

    fn open_next(&mut self, first_number: u64) -> Result<(), RefusedReason> {
        loop {
            match self.pool.require() {
                Readiness::Ready => {}
                Readiness::Preparing => return Err(RefusedReason::Preparing),
                Readiness::NoSegment => return Err(RefusedReason::NoSegment),
                Readiness::Broken(error) => {
                    self.phase = Phase::Settling { error, doomed: true };
                    return Err(RefusedReason::Preparing);
                }
            }
            let (segment, epoch) = self.pool.take_spare().expect("a segment is ready");
            match self.disk.open(&segment_name(segment)) {
                Ok(file) => {
                    self.pool.opened();
                    self.open = Some(Use {
                        segment,
                        epoch,
                        file,
                        first_number,
                        end_number: first_number,
                        blocks: 0,
                        len_bytes: 0,
                        failed: false,
                        released: false,
                    });
                    return Ok(());
                }
                Err(error) => self.pool.not_opened(segment, epoch, error),
            }
        }
    }

    fn complete(&mut self, completion: Completion) {
        let Completion { token: number, buffer, result } = completion;
        if matches!(self.phase, Phase::Sick { .. }) {
            return;
        }
        self.in_flight -= 1;
        let entry = number.checked_sub(self.watermark).and_then(|index| self.entries.get_mut(index as usize));
        let entry = entry.expect("only blocks from the watermark on are in flight");
        let EntryState::Writing(place) = entry.state else { panic!("block {number} completed twice") };
        let Err(error) = result else {
            entry.state = EntryState::Written(place, buffer);
            return;
        };
        entry.state = EntryState::Failed(buffer);
        let mut uses = self.closing.iter_mut().chain(&mut self.open);
        let used =
            uses.find(|used| used.epoch == place.epoch).expect("a use lasts until the watermark passed it");
        used.failed = true;
        tracing::warn!(segment = place.segment, offset = place.offset, block = number, %error, "a write failed");
        metrics::counter!("tidelog_write_failures_total").increment(1);
        if matches!(self.phase, Phase::Running) {
            self.phase = Phase::Settling { error, doomed: false };
        }
    }

    /// Does all that can be done without waiting.
    fn go_on(&mut self, durable: &mut Vec<DurableBlock>) {
        self.pass(durable);
        loop {
            match &self.phase {
                Phase::Settling { .. } if self.in_flight == 0 => self.settle(),
                Phase::Running if self.queued > 0 => {
                    self.rewrite();
                    if matches!(self.phase, Phase::Running) {
                        return;
                    }
                }
                _ => return,
            }
        }
    }

    /// Moves the watermark past all that is durable without a gap.
    fn pass(&mut self, durable: &mut Vec<DurableBlock>) {
        let before = self.watermark;
        while let Some(Entry { state: EntryState::Written(..), .. }) = self.entries.front()
            && let Some(Entry { len, state: EntryState::Written(place, buffer) }) = self.entries.pop_front()
        {
            assert_eq!(place.number, self.watermark, "blocks are durable in the order of their numbers");
            self.watermark += 1;
            durable.push(DurableBlock { place, buffer, len });
        }
        if self.watermark > before {
            self.retire();
        }
    }

    /// Lets go of the closed segments whose blocks are all durable.
    fn retire(&mut self) {
        let watermark = self.watermark;
        for used in self.closing.extract_if(.., |used| used.end_number <= watermark) {
            self.disk.close(used.file);
            if used.released {
                self.pool.release(used.segment, used.epoch);
            } else if used.blocks == 0 {
                self.empty.push((used.segment, used.epoch));
            }
        }
    }

    /// Nothing is in flight and a write has failed: quarantines its segment and queues every block that is not durable.
    fn settle(&mut self) {
        debug_assert_eq!(self.in_flight, 0);
        let Phase::Settling { error, doomed } = std::mem::replace(&mut self.phase, Phase::Running) else {
            unreachable!("called only when settling")
        };
        if doomed || self.failed_at == Some(self.watermark) {
            self.fall_sick(error, false);
            return;
        }
        self.failed_at = Some(self.watermark);
        self.close_all();
        if let Err(error) = self.pool.cut(self.watermark) {
            self.fall_sick(error, false);
            return;
        }
        for entry in &mut self.entries {
            entry.state = match std::mem::replace(&mut entry.state, EntryState::Writing(NOWHERE)) {
                EntryState::Queued(buffer) | EntryState::Written(_, buffer) | EntryState::Failed(buffer) => {
                    EntryState::Queued(buffer)
                }
                EntryState::Writing(_) => panic!("a block is in flight"),
            };
        }
        self.queued = self.entries.len();
        self.blocked = RefusedReason::Preparing;
    }

    fn close_all(&mut self) {
        for used in self.closing.drain(..).chain(self.open.take()) {
            self.disk.close(used.file);
            if used.failed {
                tracing::warn!(segment = used.segment, epoch = used.epoch, "segment quarantined");
                metrics::counter!("tidelog_segments_quarantined_total").increment(1);
                self.pool.quarantine(used.segment, used.epoch);
            }
            if used.released {
                self.pool.release(used.segment, used.epoch);
            } else if used.first_number >= self.watermark {
                self.empty.push((used.segment, used.epoch));
            }
        }
    }

    /// Writes queued blocks again, as many as can be now.
    fn rewrite(&mut self) {
        while self.queued > 0 {
            let index = self.entries.len() - self.queued;
            let number = self.watermark + index as u64;
            let len = self.entries[index].len;
            let state = std::mem::replace(&mut self.entries[index].state, EntryState::Writing(NOWHERE));
            let EntryState::Queued(buffer) = state else { panic!("block {number} is not queued") };
            match self.launch(number, buffer, len) {
                Ok(place) => {
                    self.entries[index].state = EntryState::Writing(place);
                    self.queued -= 1;
                }
                Err((reason, buffer)) => {
                    self.entries[index].state = EntryState::Queued(buffer);
                    self.blocked = reason;
                    return;
                }
            }
        }
    }

    /// Gives up on the device. What is not durable is lost to it, and handed back.
    fn fall_sick(&mut self, error: io::Error, broken: bool) {
        if matches!(self.phase, Phase::Sick { .. }) {
            return;
        }
        tracing::error!(%error, blocks = self.entries.len(), "local directory {} is sick", self.directory);
        metrics::counter!("tidelog_sick_directories_total").increment(1);
        self.phase = Phase::Sick { error: Arc::new(error), broken };
        if !broken {
            self.close_all();
        }
        for (number, entry) in (self.watermark..).zip(self.entries.drain(..)) {
            match entry.state {
                EntryState::Queued(buffer) | EntryState::Written(_, buffer) | EntryState::Failed(buffer) => {
                    self.lost.push((number, buffer, entry.len));
                }
                EntryState::Writing(_) => debug_assert!(broken, "a block is in flight"),
            }
        }
        self.queued = 0;
        self.in_flight = 0;
    }
}

/// Stands in while an entry's buffer is elsewhere.
const NOWHERE: BlockPlace =
    BlockPlace { directory: 0, segment: 0, epoch: 0, index: 0, offset: 0, number: 0, watermark: 0 };

/// Name of a segment's file.
pub fn segment_name(segment: u32) -> String {
    format!("segment-{segment:08}")
}

/// The segment whose file has this name.
pub fn parse_segment_name(name: &str) -> Option<u32> {
    let segment = name.strip_prefix("segment-")?.parse().ok()?;
    (segment_name(segment) == name).then_some(segment)
}
