//! The uploader: blocks into parts, parts into objects, objects into answers to `persist_durably`.
//!
//! [`Uploader::step`] does all that can be done at a given time; its thread is a short loop around it, and a simulation
//! calls it directly. Who asked for what, and when an object is cut, is decided in checkpoint.rs; the order of bytes in a
//! part by the assembler; what may go afterwards in custody.rs; how bytes reach the bucket in the upload crate.
//!
//! Invariants:
//! 1. Each block goes into one object that becomes complete. A device's go in the order of their numbers, but for those of
//!    a failed object, which go into a later one.
//! 2. One object is open at a time, and a few more wait for their commits, in any order.
//! 3. A request is answered with a handle only after the objects that it names are proven and recorded durably.
//! 4. A failed object gives its blocks back, and those who asked for it join the next one, until their time is over; only
//!    an error that does not pass by itself is told at once, and only to them, and to those who wait for the room on a full
//!    disk that it was to make.
//! 5. Bytes handed to the driver and not let go by it are at most seven eighths of its budget and a part: the driver always
//!    lets go of enough of that by itself.

mod answers;
mod buffers;
mod deletions;
mod object;

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender};
use tidelog_io::disk::Durability;
use tidelog_upload::bucket::BucketIndex;
use tidelog_upload::multipart::Placement;
use tidelog_upload::{Driver, Parts, Resolver, StoreError};

use crate::assemble::Assembler;
use crate::checkpoint::{Checkpoints, Cut, Decision, Request, RequestId};
use crate::custody::{Custody, Holding};
use crate::error::{PersistError, RegisterError, ReleaseError};
use crate::handle::ChangelogHandle;
use crate::options::Options;
use crate::queue::{LocalBlock, Queue, Scratch};
use crate::retention::SegmentUse;
use crate::types::{LogId, SequenceNumber};
use buffers::PartBuffers;
use deletions::{Deletions, DoomedFile};
pub(crate) use object::{CANARY, canary_name, name_hash, object_name};
use object::{Finishing, OpenObject};

/// The pause after a failed object, doubled with each that fails after it.
const RETRY_DELAY_MIN: Duration = Duration::from_millis(250);
/// The longest pause after a failed object; also the one before another attempt to record something.
const RETRY_DELAY_MAX: Duration = Duration::from_secs(8);
/// How long after an object has ended what it may have left is removed: requests given up may still arrive.
const SWEEP_DELAY: Duration = Duration::from_secs(10);
/// How long an object gets parts without anybody asking for a checkpoint. A [`Sweeper`](crate::Sweeper) takes what is much
/// older for what a dead changelog left.
pub(crate) const OBJECT_OPEN_MAX: Duration = Duration::from_secs(12 * 3600);
/// Objects that wait for their commits. More would only queue up behind a store that is too slow, each with its last part in
/// memory.
const FINISHING_MAX: usize = 4;
/// Bytes of an object at most, in budgets of the driver: the chunks of larger ones would outgrow it.
const OBJECT_BUDGETS_MAX: u64 = 100;

/// An object ends when a part with this many logs might make its footer too long to be read.
const RUNS_PER_PART_MAX: usize = 1 << 17;

/// The answer to a persist request.
pub(crate) type PersistResolver = Resolver<Result<ChangelogHandle, PersistError>>;

/// What the uploader is told.
#[derive(Debug)]
pub(crate) enum Event {
    /// Blocks that are durable, or will never be more than in memory.
    Blocks(Vec<LocalBlock>),
    /// Somebody asked for a checkpoint.
    Persist {
        id: RequestId,
        request: Request,
        resolver: PersistResolver,
    },
    /// All that a request needs is in blocks of `device` below `end`.
    Marked {
        request: RequestId,
        device: usize,
        end: u64,
    },
    /// The local directory is full: only uploading makes room.
    HighWater,
    /// Nothing of a device is on its way, and no use of a segment gets another block.
    Stalled {
        device: usize,
    },
    /// A use of a segment ended without a block that counts.
    EmptyUse {
        device: usize,
        segment: u32,
        epoch: u64,
    },
    /// The changes of these logs from these numbers on are lost.
    Lost {
        logs: Vec<(LogId, SequenceNumber)>,
    },
    /// Somebody stopped reading local blocks.
    ReaderGone {
        device: usize,
    },
    WriterOpened {
        log: LogId,
    },
    WriterClosed {
        device: usize,
        log: LogId,
        synced: SequenceNumber,
    },
    Truncate {
        device: usize,
        log: LogId,
        to: SequenceNumber,
    },
    Confirm {
        device: usize,
        log: LogId,
        to: SequenceNumber,
    },
    /// Nothing of a recovered log is needed.
    Discard {
        device: usize,
        log: LogId,
        end: SequenceNumber,
    },
    /// Somebody needs the objects of these handles; with `hand_over` they are the engine's registry's from now on.
    Register {
        holder: String,
        handles: Vec<ChangelogHandle>,
        hand_over: bool,
        resolver: Resolver<Result<(), RegisterError>>,
    },
    /// Nobody needs what this holder has for its sake.
    Release {
        holder: String,
        resolver: Resolver<Result<(), ReleaseError>>,
    },
    /// So many bytes of the object with this token are not in memory any more.
    PartDone {
        token: u64,
        bytes: u64,
        outcome: Result<(), StoreError>,
    },
    /// The object with this token is proven, and where its bytes are, or not.
    Completed {
        token: u64,
        outcome: Result<Placement, StoreError>,
    },
    /// Nothing of the object's upload is under way any more.
    Settled {
        object: String,
        leftovers: bool,
    },
    /// A file of a completed object was deleted, or not.
    Deleted {
        file: DoomedFile,
        outcome: Result<(), StoreError>,
    },
    /// What an upload left behind was removed, or not.
    Swept {
        object: String,
        outcome: Result<(), StoreError>,
    },
    /// No writer asks any more. Answer when no request waits, and with `deletions` when no deletion is under way, either.
    Quiesce {
        deletions: bool,
        resolver: Resolver<()>,
    },
    /// Stop.
    Exit,
}

/// What an uploader needs.
pub(crate) struct UploaderParts {
    pub options: Arc<Options>,
    /// The buckets' URLs, as they stand in handles.
    pub buckets: Vec<Arc<str>>,
    pub driver: Arc<Driver>,
    pub queue: Queue,
    pub custody: Custody,
    pub events: Receiver<Event>,
    pub sender: Sender<Event>,
    /// Random numbers, for tokens.
    pub random: Box<dyn FnMut() -> u64 + Send>,
}

/// The uploader of one changelog.
pub(crate) struct Uploader {
    parts: UploaderParts,
    checkpoints: Checkpoints,
    asked: BTreeMap<RequestId, Asked>,
    /// The logs of the writers that are open.
    writers: BTreeSet<LogId>,
    /// Decided on, and waiting for blocks.
    due: Option<Cut>,
    /// What the open object is cut for.
    cut: Option<Cut>,
    /// The span of that, if somebody asked for it.
    checkpoint: tracing::Span,
    object: Option<OpenObject>,
    /// Oldest first.
    finishing: VecDeque<Finishing>,
    /// Requests whose changes are all in objects that are complete, on their way, or failed.
    sent: Vec<Sent>,
    assembler: Assembler,
    scratch: Scratch,
    buffers: PartBuffers,
    objects_made: u64,
    /// An object of this many bytes gets no further part.
    object_bytes_max: u64,
    /// Bytes that the driver has and has not let go.
    bytes_out: u64,
    /// Objects that failed since one became complete.
    failures: u32,
    /// Why the last of them did.
    last_failure: Option<Arc<PersistError>>,
    /// When something changes by itself: requests that wait for others, or for another attempt.
    decide_at: Option<Instant>,
    /// For each device, whether blocks are through, but by records that are not durable yet.
    unrecorded: Vec<bool>,
    /// Objects that are complete, were not recorded, and are not settled.
    unwanted: BTreeSet<String>,
    /// Uploads that may have left something behind, and when that is to be removed.
    sweeps: Vec<(Instant, String)>,
    /// Uploads of an earlier use of the directories, before their first sweep.
    inherited: BTreeSet<String>,
    /// No upload that nobody waits for before this time.
    retry_at: Option<Instant>,
    deletions: Deletions,
    tidy: bool,
    /// What could not be recorded is tried again then. It holds no upload up.
    tidy_at: Option<Instant>,
    /// Logs that end before the changes that were appended to them, and where.
    lost: HashMap<LogId, SequenceNumber>,
    quiesce: Vec<(bool, Resolver<()>)>,
    exit: bool,
}

/// A request all of whose blocks have left the queue once.
struct Sent {
    id: RequestId,
    request: Request,
    /// The number of the last object that may hold any of them.
    last: u64,
}

/// A request that is not answered.
struct Asked {
    resolver: PersistResolver,
    deadline: Instant,
    /// Why the last object for it failed.
    last: Option<Arc<PersistError>>,
}

impl Uploader {
    pub fn new(parts: UploaderParts, now: Instant) -> Uploader {
        let holdings = parts.custody.holdings.iter();
        let unsettled = |holding: &Holding| {
            holding.ledger.read(|state| state.uploads().keys().cloned().collect::<Vec<String>>())
        };
        let inherited: BTreeSet<String> = holdings.flat_map(unsettled).collect();
        Uploader {
            sweeps: inherited.iter().map(|object| (now, object.clone())).collect(),
            inherited,
            checkpoints: Checkpoints::new(parts.options.batch_delay, parts.queue.devices()),
            asked: BTreeMap::new(),
            unwanted: BTreeSet::new(),
            writers: BTreeSet::new(),
            due: None,
            cut: None,
            checkpoint: tracing::Span::none(),
            object: None,
            finishing: VecDeque::new(),
            sent: Vec::new(),
            assembler: Assembler::new(),
            scratch: Scratch::default(),
            buffers: PartBuffers::default(),
            objects_made: 0,
            object_bytes_max: object_bytes_max(&parts.driver),
            bytes_out: 0,
            failures: 0,
            last_failure: None,
            decide_at: None,
            unrecorded: vec![false; parts.queue.devices()],
            retry_at: None,
            deletions: Deletions::new(parts.buckets.len()),
            tidy: true,
            tidy_at: None,
            lost: HashMap::new(),
            quiesce: Vec::new(),
            exit: false,
            parts,
        }
    }

    /// Steps until told to exit. The body of the uploader's thread.
    pub fn run(mut self) {
        let mut deadline = self.step(Instant::now());
        while !self.exit {
            let first = match deadline {
                Some(deadline) => self.parts.events.recv_deadline(deadline),
                None => self.parts.events.recv().map_err(|_| RecvTimeoutError::Disconnected),
            };
            match first {
                Ok(event) => self.take(event, Instant::now()),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
            deadline = self.step(Instant::now());
        }
    }

    /// Does what can be done at `now`; says when there is more to do, whatever happens.
    pub fn step(&mut self, now: Instant) -> Option<Instant> {
        while !self.exit
            && let Ok(event) = self.parts.events.try_recv()
        {
            self.take(event, now);
        }
        if self.exit {
            return None;
        }
        if std::mem::take(&mut self.tidy) {
            self.tidy_up(now);
        }
        self.expire(now);
        self.sweep(now);
        self.settle_front();
        while self.advance(now) {}
        if std::mem::take(&mut self.tidy) {
            self.tidy_up(now);
        }
        if self.parts.custody.owes_segments() {
            self.tidy_at.get_or_insert(now + RETRY_DELAY_MAX);
        }
        self.delete(now);
        if self.idle() {
            let deleting = self.deletions.are_under_way();
            let met = self.quiesce.extract_if(.., |(deletions, _)| !(*deletions && deleting));
            met.for_each(|(_, resolver)| resolver.resolve(()));
        }
        let expiry = self.asked.values().map(|asked| asked.deadline).min();
        let sweep = self.sweeps.iter().map(|(at, _)| *at).min();
        let object = self.object.as_ref().filter(|_| self.finishing.len() < FINISHING_MAX);
        let stale = object.map(|object| object.opened_at + OBJECT_OPEN_MAX);
        let trim = self.buffers.trim(now);
        let delete = self.deletions.again_at(now);
        [self.retry_at, self.tidy_at, delete, self.decide_at, expiry, sweep, stale, trim]
            .into_iter()
            .flatten()
            .min()
    }

    fn idle(&self) -> bool {
        self.asked.is_empty() && self.finishing.is_empty() && self.cut.is_none() && self.due.is_none()
    }

    fn take(&mut self, event: Event, now: Instant) {
        match event {
            Event::Blocks(blocks) => blocks.into_iter().for_each(|block| self.take_block(block)),
            Event::Persist { id, request, resolver } => {
                self.parts.custody.asked(request.log, request.to);
                let deadline = request.asked_at + self.parts.options.persist_timeout;
                self.asked.insert(id, Asked { resolver, deadline, last: None });
                self.checkpoints.ask(id, request);
            }
            Event::Marked { request, device, end } => {
                debug_assert!(device < self.parts.queue.devices());
                self.checkpoints.mark(request, end);
            }
            Event::HighWater => self.tidy = true,
            Event::Stalled { device } => self.parts.custody.stalled(device),
            Event::EmptyUse { device, segment, epoch } => {
                let empty = SegmentUse { segment, epoch, blocks: 0..0 };
                self.parts.custody.holdings[device].retention.found(empty);
            }
            Event::Lost { logs } => self.lost.extend(logs),
            Event::ReaderGone { device } => self.parts.custody.release_segments(device),
            Event::WriterOpened { log } => {
                self.writers.insert(log);
            }
            Event::WriterClosed { device, log, synced } => {
                self.writers.remove(&log);
                self.parts.custody.close(device, log, synced);
                self.tidy = true;
            }
            Event::Truncate { device, log, to } => {
                self.parts.custody.truncate(device, log, to);
                self.tidy = true;
            }
            Event::Confirm { device, log, to } => self.parts.custody.confirm(device, log, to),
            Event::Discard { device, log, end } => {
                self.parts.custody.truncate(device, log, end);
                self.parts.custody.close(device, log, SequenceNumber::ZERO);
                self.tidy = true;
            }
            Event::Register { holder, handles, hand_over: false, resolver } => {
                resolver.resolve(self.parts.custody.register(&holder, &handles));
            }
            Event::Register { holder, handles, hand_over: true, resolver } => {
                resolver.resolve(self.hand_over(&holder, &handles, now));
            }
            Event::Release { holder, resolver } => {
                resolver.resolve(self.parts.custody.release(&holder));
                self.tidy = true;
            }
            Event::PartDone { token, bytes, outcome } => self.part_done(token, bytes, outcome),
            Event::Completed { token, outcome } => self.completed(token, outcome, now),
            Event::Settled { object, leftovers } => {
                if self.unwanted.remove(&object) || leftovers {
                    self.sweeps.push((now + SWEEP_DELAY, object));
                } else {
                    self.parts.custody.settled(&object);
                }
            }
            Event::Deleted { file, outcome } => {
                if let Err(error) = &outcome {
                    tracing::warn!(%error, "an object that nobody needs could not be deleted; it is tried again later");
                    metrics::counter!("tidelog_delete_failures_total").increment(1);
                }
                if let Some(object) = self.deletions.ended(file, outcome.is_ok(), now) {
                    self.parts.custody.deleted(&object);
                    self.tidy = true;
                }
            }
            Event::Swept { object, outcome } => {
                let inherited = self.inherited.remove(&object);
                match outcome {
                    // What the process before had sent may still arrive.
                    Ok(()) if inherited => self.sweeps.push((now + SWEEP_DELAY, object)),
                    Ok(()) => self.swept(&object),
                    Err(error) => {
                        tracing::warn!(%error, "what an upload left could not be removed; it is tried again later");
                        metrics::counter!("tidelog_delete_failures_total").increment(1);
                        self.sweeps.push((now + SWEEP_DELAY, object));
                    }
                }
            }
            Event::Quiesce { deletions, resolver } => {
                // Intake is shut: nobody can join those who have asked.
                self.writers.clear();
                self.quiesce.push((deletions, resolver));
            }
            Event::Exit => {
                // Without it a power cut may still take what was written.
                if self.parts.options.durability == Durability::Power {
                    self.parts.custody.seal_segments();
                }
                self.exit = true;
            }
        }
    }

    fn take_block(&mut self, block: LocalBlock) {
        self.parts.custody.holdings[block.device].take_block(&block);
        self.parts.queue.push(block);
    }

    /// One thing that can be done now; whether there was one.
    fn advance(&mut self, now: Instant) -> bool {
        self.retry_at.take_if(|retry_at| *retry_at <= now);
        if self.tidy_at.take_if(|tidy_at| *tidy_at <= now).is_some() {
            self.tidy = true;
        }
        if self.object.as_ref().is_some_and(|object| object.failure.is_some()) {
            self.fail_object(now);
            return true;
        }
        if self.due.is_none() {
            self.decide_at = None;
            match self.checkpoints.decide(now, &self.writers) {
                Decision::Idle => {}
                Decision::Wait(until) => self.decide_at = Some(until),
                Decision::Cut(cut) => self.due = Some(cut),
            }
        }
        if self.finishing.len() >= FINISHING_MAX {
            return false;
        }
        if self.object.as_ref().is_some_and(|object| self.is_full(object, now) || self.is_passed(object)) {
            let nobody = Cut { ends: vec![None; self.parts.queue.devices()], requests: Vec::new() };
            self.finish(nobody, None, tracing::Span::none(), now);
            return true;
        }
        if self.cut.is_none() {
            self.cut = self.next_cut();
            self.checkpoint = self.cut.as_ref().map_or_else(tracing::Span::none, checkpoint_span);
        }
        let entered = self.checkpoint.clone().entered();
        let done = match self.cut.take() {
            Some(cut) => self.follow(cut, now),
            None => self.put_early(now),
        };
        drop(entered);
        if self.cut.is_none() {
            self.checkpoint = tracing::Span::none();
        }
        done
    }

    /// What to cut an object for now.
    fn next_cut(&mut self) -> Option<Cut> {
        let queue = &self.parts.queue;
        if let Some(due) = self.due.take_if(|due| queue.has_come(&due.ends)) {
            let custody = &self.parts.custody;
            let detached = match (&self.object, due.requests.first()) {
                (Some(object), _) => object.detached,
                (None, Some((_, request))) => custody.is_detached(request.device),
                (None, None) => false,
            };
            let (cut, rest) = due.split(|device| custody.is_detached(device) == detached);
            self.due = (!rest.requests.is_empty()).then_some(rest);
            return Some(cut);
        }
        // One at a time: the next one is for what has come until this one has made its room.
        if self.retry_at.is_some() || !self.finishing.is_empty() || !self.parts.custody.is_pressed() {
            return None;
        }
        // Nobody else makes room; what is due may wait for a block that waits for it.
        let mut ends = self.parts.queue.whole_ends();
        self.leave_out_others(&mut ends);
        let any = self.object.is_some() || ends.iter().any(Option::is_some);
        any.then_some(Cut { ends, requests: Vec::new() })
    }

    /// Clears the ends of devices whose blocks must not go into the open object, or the next one: what a directory out of
    /// service does not record, no other one may remember, and remove when it needs it no longer itself.
    fn leave_out_others(&self, ends: &mut [Option<u64>]) {
        let custody = &self.parts.custody;
        let has_blocks = |device: &usize| ends[*device].is_some();
        let first = custody.pressed().find(has_blocks).or_else(|| (0..ends.len()).find(has_blocks));
        let detached = match &self.object {
            Some(object) => object.detached,
            None => first.is_some_and(|device| custody.is_detached(device)),
        };
        for (device, end) in ends.iter_mut().enumerate() {
            *end = end.filter(|_| custody.is_detached(device) == detached);
        }
    }

    /// Whether the driver may be given another part.
    fn has_room(&self) -> bool {
        let budget = self.parts.driver.options().budget_bytes;
        self.bytes_out <= budget - budget / 8
    }

    /// Whether an object should end before another part.
    fn is_full(&self, object: &OpenObject, now: Instant) -> bool {
        now.saturating_duration_since(object.opened_at) >= OBJECT_OPEN_MAX
            || !object.tail.fits(RUNS_PER_PART_MAX)
            || object.tail.footer().parts_len() >= self.object_bytes_max
    }

    /// Whether earlier blocks than the object's came back to the queue: within an object they stand in their order.
    fn is_passed(&self, object: &OpenObject) -> bool {
        (0..self.parts.queue.devices()).any(|device| {
            let last = object.blocks.iter().rev().find(|block| block.device == device);
            last.is_some_and(|last| self.parts.queue.first_number(device) < last.number)
        })
    }

    /// Until when somebody waits for an object that holds what these requests need.
    fn wanted_until<'a>(
        &self,
        requests: impl IntoIterator<Item = &'a (RequestId, Request)>,
    ) -> Option<Instant> {
        requests.into_iter().filter_map(|(id, _)| self.asked.get(id).map(|asked| asked.deadline)).max()
    }

    /// Sends a part ahead of its checkpoint. Whether it did.
    fn put_early(&mut self, now: Instant) -> bool {
        if !self.parts.options.preemptive_upload
            || self.retry_at.is_some()
            || self.parts.queue.bytes() < self.parts.options.part_bytes
            || !self.has_room()
        {
            return false;
        }
        self.settle_front();
        let part_bytes = self.parts.options.part_bytes;
        let mut ends = self.parts.queue.whole_ends();
        self.leave_out_others(&mut ends);
        let Some(blocks) = self.parts.queue.take(part_bytes, &ends) else { return false };
        match self.assemble(blocks, now) {
            Ok(None) => true,
            Ok(Some(part)) => {
                self.put(part);
                true
            }
            Err(error) => {
                tracing::error!(%error, "a part could not be assembled");
                self.retry_at = Some(now + RETRY_DELAY_MAX);
                false
            }
        }
    }

    /// Brings the object of a cut one part further, and to its end with the last one. Whether anything was done.
    fn follow(&mut self, cut: Cut, now: Instant) -> bool {
        if !self.has_room() {
            self.cut = Some(cut);
            return false;
        }
        let assembled = match self.parts.queue.take(self.parts.options.part_bytes, &cut.ends) {
            Some(blocks) => self.assemble(blocks, now),
            None => Ok(None),
        };
        let part = match assembled {
            Ok(part) => part,
            Err(error) => {
                tracing::error!(%error, "a checkpoint could not be assembled");
                self.answer_all(cut.requests, &error);
                self.retry_at = Some(now + RETRY_DELAY_MAX);
                return true;
            }
        };
        let more = self.parts.queue.holds_below(&cut.ends);
        match (part, more) {
            (Some(part), true) => {
                self.want(&cut.requests);
                self.put(part);
                self.cut = Some(cut);
            }
            (None, true) => self.cut = Some(cut),
            (None, false) if self.object.is_none() => self.nothing_new(cut, now),
            (part, false) => self.finish(cut, part, self.checkpoint.clone(), now),
        }
        true
    }

    /// Nothing is to be sent: what was asked for is in earlier objects.
    fn nothing_new(&mut self, cut: Cut, now: Instant) {
        self.tidy = true;
        self.sent(cut.requests, self.objects_made);
        self.answer_sent(now);
    }
}

/// From the cut to the answers, or to the failure of the object. `object` is its name.
fn checkpoint_span(cut: &Cut) -> tracing::Span {
    match cut.requests.len() {
        // To make room only.
        0 => tracing::Span::none(),
        requests => tracing::debug_span!("checkpoint", requests, object = tracing::field::Empty),
    }
}

/// When an object is to end: what comes after that is one part, whose size is not known to the byte, and the footer.
pub(crate) fn object_bytes_max(driver: &Driver) -> u64 {
    let budget = driver.options().budget_bytes;
    let whole = driver.stores().iter().any(|store| store.capabilities().parts == Parts::None);
    // Where an object goes in one request, the driver has all of it until then.
    let held = if whole { budget / 2 } else { OBJECT_BUDGETS_MAX * budget };
    driver.object_bytes_max().saturating_sub(2 * budget).min(held)
}
