//! The spiller: drains the lanes of one device into blocks, and blocks into segments.
//!
//! [`Spiller::step`] does all that can be done at a given time and says when it wants to be called again; its thread is a
//! short loop around it, and a simulation calls it directly. It does not sort and does not look into values. What becomes
//! of a durable block is the uploader's business, which segment is written and what happens when a write fails that of the
//! segments. Here is what happens while all is well; requests, large values and a device out of service have files of
//! their own.
//!
//! Invariants:
//! 1. The changes of a log enter blocks in the order of their numbers: a lane is not drained past a hand-over marker until
//!    the lane that the writer came from is drained to the marker's position. Markers only point to what was appended
//!    before them, so the detours end.
//! 2. A large value's fragments stand together: no other frame comes between them, and no block is sealed for a request
//!    in their middle.
//! 3. A number is durable for a log only when its block, and all blocks before it, are.

mod gauges;
mod large;
mod requests;
mod sick;

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use bytes::Bytes;
use crossbeam_channel::Sender;
use tidelog_io::aligned::{AlignedBuf, Arena};
use tidelog_io::ring::Consumer;
use tidelog_io::segment::{BlockPlace, DurableBlock, Health, RefusedReason, Segments};

use self::gauges::Gauges;
use self::large::LargeValue;
use self::requests::{Answer, Flush};
use self::sick::Sick;
use crate::block::{BlockBuilder, TABLE_ENTRY_BYTES};
use crate::device::{Budget, Device, Log, SideValue, SpillRequest};
use crate::ledger::Ledger;
use crate::queue::{BlockRange, Held, LocalBlock};
use crate::record::{FRAME_HEADER_BYTES, FrameKind, Header, MARKER_BYTES};
use crate::types::{ChangeKind, SequenceNumber};
use crate::uploader::Event;

/// Less than this in every lane lets the spiller sleep; a producer that crosses a multiple of it wakes it.
const WORTH_WAKING_BYTES: u64 = 64 << 10;
/// How much of a lane is copied into a block at once: little enough to be in a near cache when it is walked and hashed.
const CHUNK_BYTES: usize = 32 << 10;
/// So many blocks wait at most until the uploader is told, while there is more to do: waking it has its price.
const OUTBOX_BLOCKS: usize = 32;
/// An idle spiller rests so long, also where no block lingers.
const REST_MIN: Duration = Duration::from_millis(1);
/// A change is cut into fragments if it does not fit the rest of a block and has at least this share of a whole one: a
/// shorter one goes into the next block.
const LONG_FRACTION: usize = 8;

/// What the caller of a step should know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Step {
    /// There may be more to do at once.
    pub again: bool,
    /// There is something to do at this time, whatever else happens.
    pub deadline: Option<Instant>,
    /// The spiller is done for good.
    pub exit: bool,
}

/// What a spiller needs.
pub(crate) struct SpillerParts {
    pub device: Arc<Device>,
    pub directory: std::path::PathBuf,
    pub arena: Arena,
    pub segments: Segments,
    pub ledger: Arc<Ledger>,
    pub events: Sender<Event>,
    pub upload_budget: Arc<Budget>,
    pub linger: Duration,
    /// After so many blocks in a row whose last change goes on in the next one, a block ends with a change.
    pub chain_blocks_max: usize,
}

/// The spiller of one device.
pub(crate) struct Spiller {
    parts: SpillerParts,
    lanes: Vec<Consumer>,
    /// The lane that was drained last.
    turn: usize,
    /// By slot.
    logs: Vec<Option<SlotState>>,
    builder: BlockBuilder,
    open: Option<OpenBlock>,
    /// Counts opened blocks, so that a slot's state can tell whether its table entry is of the open one.
    opened: u64,
    large: Option<LargeValue>,
    /// How many of the last finished blocks go on in the next one.
    chained: usize,
    /// Finished and not submitted yet.
    ready: VecDeque<FinishedBlock>,
    /// Submitted and not durable yet.
    submitted: VecDeque<(u64, FinishedInfo)>,
    requests: Vec<SpillRequest>,
    flushes: Vec<Flush>,
    /// Answers owed once all blocks below a number are durable.
    syncs: Vec<(u64, Answer)>,
    /// Once the device is out of service.
    sick: Option<Sick>,
    /// The uploader was told that no block will be written before it makes room.
    stalled: bool,
    durable: Vec<DurableBlock>,
    /// Blocks that the uploader has not been told of.
    outbox: Vec<LocalBlock>,
    gauges: Gauges,
    exit: bool,
}

struct SlotState {
    log: Arc<Log>,
    next: u64,
    /// The value of `Spiller::opened` when `entry` was added.
    opened: u64,
    entry: usize,
}

struct OpenBlock {
    buffer: AlignedBuf,
    opened_at: Instant,
}

struct FinishedInfo {
    continues: bool,
    ends: Vec<(Arc<Log>, BlockRange)>,
}

struct FinishedBlock {
    buffer: AlignedBuf,
    len: usize,
    info: FinishedInfo,
}

/// How far a lane was drained.
enum Drained {
    /// As far as wanted.
    Wholly,
    /// No block to put more into.
    NoRoom,
    /// Another lane comes first, up to this position.
    After(usize, u64),
}

impl Spiller {
    pub fn new(parts: SpillerParts) -> Spiller {
        let builder = BlockBuilder::new(parts.arena.block_bytes());
        Spiller {
            gauges: Gauges::new(&parts.directory),
            parts,
            lanes: Vec::new(),
            turn: 0,
            logs: Vec::new(),
            builder,
            open: None,
            opened: 0,
            large: None,
            chained: 0,
            ready: VecDeque::new(),
            submitted: VecDeque::new(),
            requests: Vec::new(),
            flushes: Vec::new(),
            syncs: Vec::new(),
            sick: None,
            stalled: false,
            durable: Vec::new(),
            outbox: Vec::new(),
            exit: false,
        }
    }

    /// Steps until told to exit. The body of the spiller's thread.
    pub fn run(mut self) {
        loop {
            let step = self.step(Instant::now());
            if step.exit {
                return;
            }
            if step.again {
                continue;
            }
            let until = step.deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            let timeout = rest(until, self.parts.linger);
            let bell = Arc::clone(&self.parts.device.bell);
            if bell.doze(|| self.may_sleep()) {
                self.collect(timeout);
                bell.awake();
            }
        }
    }

    /// Does what can be done at `now`.
    pub fn step(&mut self, now: Instant) -> Step {
        self.take_requests();
        let mut again = self.collect(Duration::ZERO);
        if self.sick.is_some() && self.parts.arena.available() > 0 {
            self.relax();
        }
        self.submit_ready();
        self.adopt_lanes();
        again |= self.drain_lanes(now);
        self.serve_requests();
        let lingered = |open: &OpenBlock| now.saturating_duration_since(open.opened_at) >= self.parts.linger;
        if self.large.is_none() && self.open.as_ref().is_some_and(lingered) {
            self.finish_block();
        }
        self.submit_ready();
        let deadline = self.open.as_ref().map(|open| open.opened_at + self.parts.linger);
        if self.exit {
            // Buffers and files belong to the disk until their writes are over.
            self.parts.segments.drain(&mut self.durable);
            self.forward_durable();
        }
        if !again || self.exit || self.outbox.len() >= OUTBOX_BLOCKS {
            self.post();
        }
        if self.exit || self.gauges.are_due(now) {
            self.tell_levels();
        }
        Step { again, deadline, exit: self.exit }
    }

    fn tell_levels(&self) {
        let waiting = |lane: &Consumer| lane.lane().committed() - lane.position();
        self.gauges.lanes.set(self.lanes.iter().map(waiting).sum::<u64>() as f64);
        let arena = &self.parts.arena;
        self.gauges.blocks.set(((arena.blocks() - arena.available()) * arena.block_bytes()) as f64);
        self.gauges.segments.set(self.parts.segments.bytes_in_use() as f64);
    }

    /// Makes room in all lanes without looking at what they hold. Only for benches.
    pub fn discard_lanes(&mut self) {
        self.adopt_lanes();
        for lane in &mut self.lanes {
            while let bytes @ 1.. = lane.peek().len() {
                lane.release(bytes);
            }
        }
    }

    fn adopt_lanes(&mut self) {
        for lane in self.parts.device.lanes_from(self.lanes.len()) {
            self.lanes.push(lane.consumer().expect("the spiller is the only consumer of its lanes"));
        }
    }

    fn may_sleep(&self) -> bool {
        let blocked = self.open.is_none() && self.parts.arena.available() == 0 || !self.ready.is_empty();
        let quiet = |lane: &Consumer| lane.lane().committed() - lane.position() < WORTH_WAKING_BYTES;
        !self.parts.device.has_work() && (blocked || self.lanes.iter().all(quiet))
    }

    /// Takes what became durable, waiting for it up to `timeout`. Whether there was anything.
    fn collect(&mut self, timeout: Duration) -> bool {
        self.parts.segments.poll(timeout, &mut self.durable);
        let any = !self.durable.is_empty();
        self.forward_durable();
        for (segment, epoch) in self.parts.segments.take_empty() {
            self.tell(Event::EmptyUse { device: self.parts.device.index, segment, epoch });
        }
        if self.sick.is_none()
            && let Health::Sick(error) = self.parts.segments.health()
        {
            self.fall_sick(error);
        }
        any
    }

    fn forward_durable(&mut self) {
        if self.durable.is_empty() {
            return;
        }
        for block in std::mem::take(&mut self.durable) {
            let DurableBlock { place, buffer, len } = block;
            let (number, info) = self.submitted.pop_front().expect("only submitted blocks become durable");
            assert_eq!(number, place.number, "blocks become durable in the order of their numbers");
            for (log, range) in &info.ends {
                log.set_durable(range.end.0);
            }
            metrics::counter!("tidelog_spill_bytes_total").increment(len as u64);
            let charge = self.parts.upload_budget.charge(self.parts.arena.block_bytes());
            let held = charge.map(|charge| Held::charged(buffer.into_bytes(len), charge));
            self.send(number, Some(place), len, held, info);
        }
        let watermark = self.parts.segments.watermark();
        let (met, open) = self.syncs.drain(..).partition(|(end, _)| *end <= watermark);
        self.syncs = open;
        met.into_iter().for_each(|(_, answer): (u64, Answer)| answer.give(Ok(())));
    }

    fn send(
        &mut self,
        number: u64,
        place: Option<BlockPlace>,
        len: usize,
        held: Option<Held>,
        info: FinishedInfo,
    ) {
        let ranges = info.ends.into_iter().map(|(_, range)| range).collect();
        let device = self.parts.device.index;
        let block = LocalBlock { device, number, place, len, held, continues: info.continues, ranges };
        self.outbox.push(block);
    }

    /// Tells the uploader something, after what it must know before.
    fn tell(&mut self, event: Event) {
        self.post();
        let _ = self.parts.events.send(event);
    }

    /// Hands the blocks that became durable to the uploader.
    fn post(&mut self) {
        if !self.outbox.is_empty() {
            // The uploader is gone only when the changelog is, and then nobody waits for it.
            let _ = self.parts.events.send(Event::Blocks(std::mem::take(&mut self.outbox)));
        }
    }

    /// Drains every lane to where it stood at the beginning. Whether there was anything to drain.
    fn drain_lanes(&mut self, now: Instant) -> bool {
        let mut any = false;
        let mut detours: Vec<(usize, u64)> = Vec::new();
        for _ in 0..self.lanes.len() {
            // Each lane has its turn, also when there is room for one only: a lane that always came last would starve.
            self.turn = (self.turn + 1) % self.lanes.len();
            let index = self.turn;
            let limit = self.lanes[index].lane().committed();
            any |= self.lanes[index].position() < limit || self.large.is_some();
            detours.push((index, limit));
            while let Some(&(index, limit)) = detours.last() {
                match self.drain_lane(index, limit, now) {
                    Drained::Wholly => {
                        detours.pop();
                    }
                    Drained::NoRoom => {
                        self.submit_ready();
                        if !self.ready.is_empty() || self.parts.arena.available() == 0 {
                            if self.sick.is_some() {
                                self.press();
                            }
                            return false;
                        }
                    }
                    Drained::After(lane, position) => detours.push((lane, position)),
                }
            }
        }
        any
    }

    /// Tells the uploader that only it can make room.
    fn press(&mut self) {
        if !self.parts.device.pressed.swap(true, Ordering::AcqRel) {
            metrics::counter!("tidelog_local_high_water_total").increment(1);
            self.tell(Event::HighWater);
        }
    }

    /// There is room again.
    fn relax(&mut self) {
        self.stalled = false;
        self.parts.device.pressed.store(false, Ordering::Release);
    }

    /// The segments have no room for a block.
    fn stall(&mut self) {
        self.press();
        // With nothing on its way the uploader knows every block, and the next one begins another use of a segment.
        if self.submitted.is_empty() && !self.stalled {
            self.stalled = true;
            self.tell(Event::Stalled { device: self.parts.device.index });
        }
    }

    fn drain_lane(&mut self, index: usize, limit: u64, now: Instant) -> Drained {
        loop {
            if self.large.is_some() && !self.write_large(now) {
                return Drained::NoRoom;
            }
            if self.lanes[index].position() >= limit {
                return Drained::Wholly;
            }
            if !self.open_block(now) {
                return Drained::NoRoom;
            }
            let (taken, stop) = self.copy_run(index, limit);
            match stop {
                Stop::RunEnd if taken == 0 => return Drained::Wholly,
                Stop::RunEnd => self.lanes[index].release(taken),
                Stop::BlockFull => {
                    self.lanes[index].release(taken);
                    self.finish_block();
                }
                Stop::Side { header, key } => {
                    self.lanes[index].release(taken + header.frame_len());
                    let value = self.parts.device.take_side(key).expect("a side frame owns its value");
                    self.large = Some(LargeValue::new(header, value));
                }
                Stop::Long { header, value } => {
                    self.lanes[index].release(taken + header.frame_len());
                    self.large = Some(LargeValue::new(header, value));
                }
                Stop::Moved { header, lane, position, next } => {
                    self.lanes[index].release(taken);
                    if self.lanes[lane].position() < position {
                        return Drained::After(lane, position);
                    }
                    let state = slot_state(&mut self.logs, &self.parts.device, header.slot());
                    assert_eq!(state.next, next, "a log goes on where it stopped on the other lane");
                    self.lanes[index].release(header.frame_len());
                }
            }
        }
    }

    /// Copies whole changes from a lane into the open block, up to `limit`, and counts them; says how many bytes of the
    /// lane that took and why it stopped.
    fn copy_run(&mut self, index: usize, limit: u64) -> (usize, Stop) {
        let Spiller { parts, lanes, logs, builder, open, opened, .. } = self;
        let consumer = &mut lanes[index];
        // Looking may skip the rest of a lap, which moves the position.
        consumer.peek();
        let wanted = usize::try_from(limit - consumer.position()).unwrap_or(usize::MAX);
        let run = consumer.peek();
        let run = &run[..run.len().min(wanted)];
        let Some(first) = Header::read(run) else { return (0, Stop::RunEnd) };
        // Copied before it is looked at: headers one behind the other in lines that another core wrote would each cost a
        // miss that the next one waits for, where a copy fetches many lines at a time. It leaves the source in the cache.
        let mut room = builder.room();
        let chunk = CHUNK_BYTES.max(first.frame_len()).min(run.len());
        let buffer = &mut open.as_mut().expect("a block is open").buffer;
        let copied = builder.copy(buffer, &run[..chunk]);
        let frames = &run[..copied];
        let mut at = 0;
        // Changes of one log mostly come in a row: count them here, and in the table when another one comes.
        let mut slot = u32::MAX;
        let mut count = 0;
        let mut stop = Stop::RunEnd;
        while let Some(header) = Header::read(&frames[at..]) {
            let len = header.frame_len();
            let end = at + len;
            // One look at most frames: a whole change of the same log as the one before, and all of it is here.
            if header.is_change() && header.slot() == slot && end <= copied.min(room) {
                count += 1;
                at = end;
                // Often as long, too: then the processor need not know one header to look for the next.
                while at + len <= copied.min(room)
                    && Header::read(&frames[at..]).is_some_and(|next| next.is_like(header))
                {
                    count += 1;
                    at += len;
                }
                continue;
            }
            let value = &run[at + FRAME_HEADER_BYTES..];
            if !header.is_change() {
                stop = Stop::special(header.kind(), header, value);
                break;
            }
            if end > room {
                stop = Stop::full(header, value, builder);
                break;
            }
            if end > copied {
                break;
            }
            flush_count(logs, builder, slot, std::mem::take(&mut count));
            slot = u32::MAX;
            let state = slot_state(logs, &parts.device, header.slot());
            if state.opened != *opened {
                if end + TABLE_ENTRY_BYTES > room {
                    stop = Stop::full(header, value, builder);
                    break;
                }
                room -= TABLE_ENTRY_BYTES;
                state.opened = *opened;
                state.entry = builder.add_entry(header.slot(), state.log.id, SequenceNumber(state.next));
            }
            slot = header.slot();
            count = 1;
            at = end;
        }
        flush_count(logs, builder, slot, count);
        builder.take(&run[..at]);
        (at, stop)
    }

    /// Makes sure that a block is open. `false` if there is no buffer for one, or enough blocks wait already.
    fn open_block(&mut self, now: Instant) -> bool {
        if self.open.is_some() {
            return true;
        }
        if self.ready.len() > 1 {
            return false;
        }
        let Some(buffer) = self.parts.arena.try_take() else { return false };
        self.open = Some(OpenBlock { buffer, opened_at: now });
        self.opened += 1;
        true
    }

    /// Finishes the open block, if it holds anything.
    fn finish_block(&mut self) {
        if self.builder.is_empty() {
            // Entries without frames cannot be: an entry is added with its first frame.
            return;
        }
        let Some(OpenBlock { mut buffer, .. }) = self.open.take() else { return };
        let log_of =
            |slot: u32| Arc::clone(&self.logs[slot as usize].as_ref().expect("it has frames here").log);
        let ends = self.builder.entries().iter().map(|entry| {
            let end = SequenceNumber(entry.first.0 + u64::from(entry.count));
            (log_of(entry.slot), BlockRange { log: entry.log, first: entry.first, end })
        });
        let continues = self.large.as_ref().is_some_and(|large| large.started);
        self.chained = if continues { self.chained + 1 } else { 0 };
        let info = FinishedInfo { continues, ends: ends.collect() };
        let len = self.builder.finish(&mut buffer, continues);
        self.ready.push_back(FinishedBlock { buffer, len, info });
    }

    /// The number that the next block to be finished will have.
    fn next_number(&self) -> u64 {
        let submitted = match &self.sick {
            Some(sick) => sick.next_number,
            None => self.parts.segments.next_number(),
        };
        submitted + self.ready.len() as u64
    }

    fn submit_ready(&mut self) {
        while let Some(FinishedBlock { buffer, len, info }) = self.ready.pop_front() {
            if self.sick.is_some() {
                self.send_from_memory(buffer, len, info);
                continue;
            }
            match self.parts.segments.submit(buffer, len) {
                Ok(number) => {
                    self.submitted.push_back((number, info));
                    if self.parts.device.pressed.load(Ordering::Relaxed) {
                        self.relax();
                    }
                }
                Err(refused) => {
                    self.ready.push_front(FinishedBlock { buffer: refused.buffer, len, info });
                    if matches!(refused.reason, RefusedReason::NoSegment) {
                        self.stall();
                    }
                    return;
                }
            }
        }
    }
}

impl Drop for Spiller {
    fn drop(&mut self) {
        self.parts.device.end();
    }
}

/// How long the spiller rests at most: what is not worth waking it is looked for after that.
fn rest(until: Option<Duration>, linger: Duration) -> Duration {
    let longest = linger.max(REST_MIN);
    until.unwrap_or(longest).min(longest)
}

/// Why copying from a lane stopped.
enum Stop {
    /// Nothing more in this run.
    RunEnd,
    BlockFull,
    /// A change that does not fit the rest of the block, and is too long to leave that rest empty.
    Long {
        header: Header,
        value: SideValue,
    },
    Side {
        header: Header,
        key: u64,
    },
    Moved {
        header: Header,
        lane: usize,
        position: u64,
        next: u64,
    },
}

impl Stop {
    #[cold]
    fn full(header: Header, value: &[u8], builder: &BlockBuilder) -> Stop {
        if header.frame_len() < builder.capacity_bytes() / LONG_FRACTION {
            return Stop::BlockFull;
        }
        let kind = match header.kind() {
            Some(FrameKind::Metadata) => ChangeKind::Metadata,
            _ => ChangeKind::Data,
        };
        let bytes = Bytes::copy_from_slice(&value[..header.value_len()]);
        Stop::Long { header, value: SideValue { kind, bytes, _charge: None } }
    }

    #[cold]
    fn special(kind: Option<FrameKind>, header: Header, value: &[u8]) -> Stop {
        let u64_at =
            |at: usize| u64::from_le_bytes(*value[at..].first_chunk().expect("lanes hold whole frames"));
        match kind {
            Some(FrameKind::Side) => Stop::Side { header, key: u64_at(0) },
            Some(FrameKind::Moved) => {
                debug_assert_eq!(header.value_len(), MARKER_BYTES);
                let lane = (u64_at(0) & u64::from(u32::MAX)) as usize;
                Stop::Moved { header, lane, position: u64_at(8), next: u64_at(16) }
            }
            _ => unreachable!("writers put no such frame into a lane: {header:?}"),
        }
    }
}

/// What the spiller knows of the log in `slot`, asking the device the first time.
#[inline]
fn slot_state<'a>(logs: &'a mut Vec<Option<SlotState>>, device: &Device, slot: u32) -> &'a mut SlotState {
    let index = slot as usize;
    if logs.len() <= index {
        logs.resize_with(index + 1, || None);
    }
    logs[index].get_or_insert_with(|| {
        let log = device.slot(slot).expect("a slot is free only when no frame names it");
        SlotState { log, next: 0, opened: 0, entry: 0 }
    })
}

fn flush_count(logs: &mut [Option<SlotState>], builder: &mut BlockBuilder, slot: u32, count: u32) {
    if count > 0
        && let Some(Some(state)) = logs.get_mut(slot as usize)
    {
        builder.add_count(state.entry, count);
        state.next += u64::from(count);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_idle_spiller_rests_also_where_no_block_lingers() {
        let millis = Duration::from_millis;
        assert_eq!(rest(None, millis(10)), millis(10));
        assert_eq!(rest(Some(millis(3)), millis(10)), millis(3));
        assert_eq!(rest(Some(millis(30)), millis(10)), millis(10));
        assert_eq!(rest(None, Duration::ZERO), REST_MIN);
        assert_eq!(rest(Some(Duration::ZERO), millis(10)), Duration::ZERO, "a block is due");
    }
}
