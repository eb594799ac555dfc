//! The uploader: blocks into parts, parts into objects, objects into answers to `persist_durably`.
//!
//! [`Uploader::step`] does all that can be done at a given time; its thread is a short loop around it, and a simulation
//! calls it directly. Who asked for what, and when an object is cut, is decided in checkpoint.rs; the order of bytes in a
//! part by the assembler; what may go afterwards in custody.rs; how bytes reach the bucket in the upload crate.
//!
//! Invariants:
//! 1. Each device's blocks go into objects in the order of their numbers, each into one object that becomes complete.
//! 2. One object is open at a time, and at most one more waits for its commit; none is opened before that is settled.
//! 3. A request is answered with a handle only after the objects that it names are proven and recorded durably.
//! 4. A failed object gives its blocks back; those who asked for it get an error, nobody else notices.

mod answers;
mod object;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender};
use tidelog_io::disk::Durability;
use tidelog_upload::{Driver, Resolver, StoreError};

use crate::assemble::Assembler;
use crate::checkpoint::{Checkpoints, Cut, Decision, Request, RequestId};
use crate::custody::Custody;
use crate::error::PersistError;
use crate::handle::ChangelogHandle;
use crate::options::Options;
use crate::queue::{LocalBlock, Queue};
use crate::retention::SegmentUse;
use crate::types::{LogId, SequenceNumber};
use object::{Finishing, OpenObject};

/// How long to wait after a failure before uploading, or deleting, again what nobody waits for.
const RETRY_DELAY: Duration = Duration::from_secs(2);

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
    WriterOpened,
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
    /// A part of the object with this token was taken, or not.
    PartDone {
        token: u64,
        outcome: Result<(), StoreError>,
    },
    /// The object with this token is proven, with this size in bytes, or not.
    Completed {
        token: u64,
        outcome: Result<u64, StoreError>,
    },
    /// A completed object was deleted, or not.
    Deleted {
        object: String,
        outcome: Result<(), StoreError>,
    },
    /// What an upload left behind was removed, or not.
    Cleaned {
        object: String,
        outcome: Result<(), StoreError>,
    },
    /// Answer when no request waits.
    Quiesce {
        resolver: Resolver<()>,
    },
    /// Stop.
    Exit,
}

/// What an uploader needs.
pub(crate) struct UploaderParts {
    pub options: Arc<Options>,
    /// The bucket's URL, as it stands in handles.
    pub bucket: Arc<str>,
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
    resolvers: HashMap<RequestId, PersistResolver>,
    writers_open: usize,
    /// Decided on, and waiting for blocks.
    due: Option<Cut>,
    /// What the open object is cut for.
    cut: Option<Cut>,
    object: Option<OpenObject>,
    finishing: Option<Finishing>,
    assembler: Assembler,
    objects_made: u64,
    /// For each device, the end of the blocks that are through, but by records that are not durable yet.
    unrecorded: Vec<Option<u64>>,
    /// Objects that failed uploads may have left behind, and whose removal failed.
    unclean: Vec<String>,
    /// No upload that nobody waits for before this time.
    retry_at: Option<Instant>,
    tidy: bool,
    /// Logs that end before the changes that were appended to them, and where.
    lost: HashMap<LogId, SequenceNumber>,
    quiesce: Vec<Resolver<()>>,
    exit: bool,
}

impl Uploader {
    pub fn new(parts: UploaderParts) -> Uploader {
        Uploader {
            checkpoints: Checkpoints::new(parts.options.batch_delay, parts.queue.devices()),
            resolvers: HashMap::new(),
            writers_open: 0,
            due: None,
            cut: None,
            object: None,
            finishing: None,
            assembler: Assembler::new(),
            objects_made: 0,
            unrecorded: vec![None; parts.queue.devices()],
            unclean: Vec::new(),
            retry_at: None,
            tidy: true,
            lost: HashMap::new(),
            quiesce: Vec::new(),
            exit: false,
            parts,
        }
    }

    /// Steps until told to exit. The body of the uploader's thread.
    pub fn run(mut self) {
        self.sweep();
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
        while let Ok(event) = self.parts.events.try_recv() {
            self.take(event, now);
        }
        if self.exit {
            return None;
        }
        if std::mem::take(&mut self.tidy) {
            self.tidy_up(now);
        }
        self.settle_front();
        let mut deadline = None;
        while self.advance(now, &mut deadline) {}
        if std::mem::take(&mut self.tidy) {
            self.tidy_up(now);
        }
        if self.idle() {
            self.quiesce.drain(..).for_each(|resolver| resolver.resolve(()));
        }
        deadline
    }

    fn idle(&self) -> bool {
        self.resolvers.is_empty() && self.finishing.is_none() && self.cut.is_none() && self.due.is_none()
    }

    fn take(&mut self, event: Event, now: Instant) {
        match event {
            Event::Blocks(blocks) => blocks.into_iter().for_each(|block| self.take_block(block)),
            Event::Persist { id, request, resolver } => {
                self.parts.custody.asked(request.log, request.to);
                self.resolvers.insert(id, resolver);
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
            Event::WriterOpened => self.writers_open += 1,
            Event::WriterClosed { device, log, synced } => {
                self.writers_open -= 1;
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
            Event::PartDone { token, outcome } => self.part_done(token, outcome),
            Event::Completed { token, outcome } => self.completed(token, outcome, now),
            Event::Deleted { object, outcome } => {
                self.parts.custody.deleted(&object, outcome.is_ok());
                if let Err(error) = outcome {
                    tracing::warn!(%error, "an object that nobody needs could not be deleted; it is tried again later");
                    metrics::counter!("tidelog_delete_failures_total").increment(1);
                    self.retry_at = Some(now + RETRY_DELAY);
                } else {
                    self.tidy = true;
                }
            }
            Event::Cleaned { object, outcome } => match outcome {
                Ok(()) => self.settled(&object),
                Err(error) => {
                    tracing::warn!(%error, "an unfinished upload could not be removed; it is tried again later");
                    metrics::counter!("tidelog_delete_failures_total").increment(1);
                    self.unclean.push(object);
                    self.retry_at.get_or_insert(now + RETRY_DELAY);
                }
            },
            Event::Quiesce { resolver } => self.quiesce.push(resolver),
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
        if let Some(place) = &block.place {
            let retention = &mut self.parts.custody.holdings[block.device].retention;
            retention.block(place.segment, place.epoch, block.number);
        }
        self.parts.queue.push(block);
    }

    /// One thing that can be done now; whether there was one.
    fn advance(&mut self, now: Instant, deadline: &mut Option<Instant>) -> bool {
        if self.retry_at.is_some_and(|retry_at| retry_at <= now) {
            self.retry_at = None;
            self.tidy = true;
            std::mem::take(&mut self.unclean).into_iter().for_each(|object| self.clean(object));
        }
        *deadline = self.retry_at;
        if self.object.as_ref().is_some_and(|object| object.failure.is_some()) {
            self.fail_object(now);
            return true;
        }
        if self.due.is_none() {
            match self.checkpoints.decide(now, self.writers_open) {
                Decision::Idle => {}
                Decision::Wait(until) => {
                    *deadline = Some(deadline.map_or(until, |deadline| deadline.min(until)))
                }
                Decision::Cut(cut) => self.due = Some(cut),
            }
        }
        if self.finishing.is_some() {
            return false;
        }
        if self.object.as_ref().is_some_and(|object| !object.footer.fits(RUNS_PER_PART_MAX)) {
            let nobody = Cut { ends: vec![None; self.parts.queue.devices()], requests: Vec::new() };
            self.finish(nobody, None, now);
            return true;
        }
        if self.cut.is_none() {
            self.cut = self.next_cut();
        }
        match self.cut.take() {
            Some(cut) => self.follow(cut, now),
            None => self.put_early(now),
        }
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
        if self.retry_at.is_some() || !self.parts.custody.is_pressed() {
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

    fn parts_in_flight(&self) -> usize {
        self.object.as_ref().map_or(0, |object| object.parts_in_flight)
    }

    /// Sends a part ahead of its checkpoint. Whether it did.
    fn put_early(&mut self, now: Instant) -> bool {
        if !self.parts.options.preemptive_upload
            || self.retry_at.is_some()
            || self.parts.queue.bytes() < self.parts.options.part_bytes
            || self.parts_in_flight() >= self.parts.options.parts_in_flight()
        {
            return false;
        }
        self.settle_front();
        let part_bytes = self.parts.options.part_bytes;
        let mut ends = self.parts.queue.whole_ends();
        self.leave_out_others(&mut ends);
        let Some(blocks) = self.parts.queue.take(part_bytes, &ends) else { return false };
        match self.assemble(blocks) {
            Ok(None) => true,
            Ok(Some(part)) => {
                self.put(vec![part]);
                true
            }
            Err(error) => {
                tracing::error!(%error, "a part could not be assembled");
                self.retry_at = Some(now + RETRY_DELAY);
                false
            }
        }
    }

    /// Brings the object of a cut one part further, and to its end with the last one. Whether anything was done.
    fn follow(&mut self, cut: Cut, now: Instant) -> bool {
        if self.parts_in_flight() >= self.parts.options.parts_in_flight() {
            self.cut = Some(cut);
            return false;
        }
        let assembled = match self.parts.queue.take(self.parts.options.part_bytes, &cut.ends) {
            Some(blocks) => self.assemble(blocks),
            None => Ok(None),
        };
        let part = match assembled {
            Ok(part) => part,
            Err(error) => {
                tracing::error!(%error, "a checkpoint could not be assembled");
                self.answer_all(cut.requests, &error);
                self.retry_at = Some(now + RETRY_DELAY);
                return true;
            }
        };
        let more = self.parts.queue.holds_below(&cut.ends);
        match (part, more) {
            (Some(part), true) => {
                self.put(vec![part]);
                self.cut = Some(cut);
            }
            (None, true) => self.cut = Some(cut),
            (None, false) if self.object.is_none() => self.nothing_new(cut, now),
            (part, false) => self.finish(cut, part, now),
        }
        true
    }

    /// Nothing is to be sent: what was asked for is in objects already.
    fn nothing_new(&mut self, cut: Cut, now: Instant) {
        self.tidy = true;
        self.answer(cut.requests, "of an earlier checkpoint", now);
    }
}
