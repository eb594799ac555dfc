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

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use crossbeam_channel::{Receiver, RecvTimeoutError, Sender};
use tidelog_io::disk::Durability;
use tidelog_upload::{Driver, ObjectUpload, Resolver, StoreError};

use crate::assemble::Assembler;
use crate::checkpoint::{Checkpoints, Cut, Decision, Request, RequestId};
use crate::custody::{Custody, Holding};
use crate::error::PersistError;
use crate::footer::Footer;
use crate::handle::ChangelogHandle;
use crate::manifest::{CompletedObject, LogRange, ManifestRecord};
use crate::options::Options;
use crate::part::PartId;
use crate::queue::{LocalBlock, Queue};
use crate::retention::SegmentUse;
use crate::types::{LogId, SequenceNumber};

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
    pub bucket: String,
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

struct OpenObject {
    name: String,
    token: u64,
    /// It holds changes of directories out of service, and of no others.
    detached: bool,
    upload: ObjectUpload,
    footer: Footer,
    /// What it holds, to be given back should it fail.
    blocks: Vec<LocalBlock>,
    ranges: BTreeMap<LogId, (usize, Vec<LogRange>)>,
    parts_in_flight: usize,
    failure: Option<StoreError>,
}

struct Finishing {
    cut: Cut,
    name: String,
    token: u64,
    detached: bool,
    footer: Footer,
    object_bytes: u64,
    footer_range: std::ops::Range<u64>,
    blocks: Vec<LocalBlock>,
    ranges: BTreeMap<LogId, (usize, Vec<LogRange>)>,
    started_at: Instant,
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

    /// Removes what earlier uses of the directories left behind in the bucket.
    pub fn sweep(&mut self) {
        let holdings = &self.parts.custody.holdings;
        let uploads: Vec<(String, String)> = holdings
            .iter()
            .flat_map(|holding| {
                holding.ledger.read(|state| {
                    let uploads = state.uploads().iter();
                    uploads
                        .map(|(object, upload)| (object.clone(), upload.bucket.clone()))
                        .collect::<Vec<_>>()
                })
            })
            .collect();
        for (object, bucket) in uploads {
            let proves =
                |holding: &Holding| holding.ledger.read(|state| state.objects().contains_key(&object));
            if self.parts.custody.holdings.iter().any(proves) {
                // Its commit is recorded in another directory, whose logs may need it.
                self.abandon(object);
            } else if bucket == self.parts.bucket {
                self.clean(object);
            } else {
                tracing::warn!(
                    object,
                    bucket,
                    "an unfinished upload is in a bucket that is not open now; it stays"
                );
            }
        }
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
                Ok(()) => self.abandon(object),
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

    /// Sorts blocks into the next part of the open object, opening one if there is none. `None` if nothing in them is
    /// needed. Blocks that cannot be read or make no sense are given back.
    fn assemble(&mut self, mut blocks: Vec<LocalBlock>) -> Result<Option<Bytes>, PersistError> {
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
        let opened =
            ManifestRecord::UploadOpened { bucket: self.parts.bucket.clone(), object: name.clone(), token };
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
    fn put(&mut self, part: Vec<Bytes>) {
        let object = self.object.as_mut().expect("a part belongs to an object");
        object.parts_in_flight += 1;
        let (token, sender) = (object.token, self.parts.sender.clone());
        object.upload.put(part, move |outcome| {
            let _ = sender.send(Event::PartDone { token, outcome });
        });
    }

    fn part_done(&mut self, token: u64, outcome: Result<(), StoreError>) {
        if let Some(object) = self.object.as_mut().filter(|object| object.token == token) {
            object.parts_in_flight -= 1;
            if let Err(error) = outcome {
                object.failure.get_or_insert(error);
            }
        }
    }

    /// Sends the last part with the footer, and asks for the commit.
    fn finish(&mut self, cut: Cut, part: Option<Bytes>, now: Instant) {
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

    fn completed(&mut self, token: u64, outcome: Result<u64, StoreError>, now: Instant) {
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
        for (device, end) in ends.iter().enumerate() {
            let own: Vec<LogRange> = ranges
                .values()
                .filter(|(at, _)| *at == device)
                .flat_map(|(_, ranges)| ranges)
                .copied()
                .collect();
            let object = CompletedObject {
                bucket: self.parts.bucket.clone(),
                object: name.clone(),
                token,
                object_bytes,
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

    /// Nothing is to be sent: what was asked for is in objects already.
    fn nothing_new(&mut self, cut: Cut, now: Instant) {
        self.tidy = true;
        self.answer(cut.requests, "of an earlier checkpoint", now);
    }

    /// The open object failed: whoever waits for it is told, and its blocks wait for the next one.
    fn fail_object(&mut self, now: Instant) {
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

    /// Removes what an upload may have left behind.
    fn clean(&mut self, object: String) {
        let sender = self.parts.sender.clone();
        let name = object.clone();
        self.parts.driver.delete(&name, move |outcome| {
            let _ = sender.send(Event::Cleaned { object, outcome });
        });
    }

    fn abandon(&mut self, object: String) {
        for device in 0..self.parts.queue.devices() {
            let open = self.parts.custody.holdings[device]
                .ledger
                .read(|state| state.uploads().contains_key(&object));
            if open {
                self.parts
                    .custody
                    .record(device, vec![ManifestRecord::UploadAbandoned { object: object.clone() }]);
            }
        }
    }

    fn answer_all(&mut self, requests: Vec<(RequestId, Request)>, error: &PersistError) {
        self.tidy = true;
        for (id, _) in requests {
            if let Some(resolver) = self.resolvers.remove(&id) {
                resolver.resolve(Err(error.clone()));
            }
        }
    }

    /// Gives the handles, to those whose directory has durably recorded what they name.
    fn answer(&mut self, requests: Vec<(RequestId, Request)>, object: &str, now: Instant) {
        for (id, request) in requests {
            let ledger = &self.parts.custody.holdings[request.device].ledger;
            let recorded = ledger.settle().map_err(|source| PersistError::Manifest {
                object: object.to_owned(),
                source: Arc::new(source),
            });
            let whole = match self.lost.get(&request.log) {
                Some(&from) if from < request.to => Err(PersistError::Lost { log: request.log, from }),
                _ => recorded,
            };
            let handle = whole.and_then(|()| ledger.handle(&request));
            if handle.is_ok() {
                let seconds = now.saturating_duration_since(request.asked_at).as_secs_f64();
                metrics::histogram!("tidelog_persist_seconds").record(seconds);
            }
            if let Some(resolver) = self.resolvers.remove(&id) {
                resolver.resolve(handle);
            }
        }
    }

    /// Carries out truncations and what follows from them.
    fn tidy_up(&mut self, now: Instant) {
        let in_flight = |log: LogId| {
            let finishing = self.finishing.iter().map(|finishing| &finishing.cut);
            let cuts = self.due.iter().chain(&self.cut).chain(finishing);
            let requests = cuts.flat_map(|cut| &cut.requests).filter(|(_, request)| request.log == log);
            requests.map(|(_, request)| request.from).min()
        };
        let needed_from = |log: LogId| match (self.checkpoints.needed_from(log), in_flight(log)) {
            (Some(waiting), Some(flying)) => Some(waiting.min(flying)),
            (waiting, flying) => waiting.or(flying),
        };
        for object in self.parts.custody.tidy(needed_from) {
            if object.bucket != self.parts.bucket {
                tracing::warn!(
                    object = object.object,
                    bucket = object.bucket,
                    "an object that nobody needs is in a bucket that is not open now; it stays"
                );
                continue;
            }
            let sender = self.parts.sender.clone();
            let name = object.object.clone();
            self.parts.driver.delete(&name, move |outcome| {
                let _ = sender.send(Event::Deleted { object: object.object, outcome });
            });
        }
        if self.settle_recorded().is_err() {
            self.retry_at.get_or_insert(now + RETRY_DELAY);
        }
        self.settle_front();
    }

    /// Settles the blocks that are through, once the records that say so are durable.
    ///
    /// # Errors
    /// What the file system says.
    fn settle_recorded(&mut self) -> io::Result<()> {
        self.parts.custody.settle_ledgers().inspect_err(|error| {
            tracing::warn!(%error, "a manifest cannot be written; what is not needed stays until it can");
        })?;
        for device in 0..self.unrecorded.len() {
            if let Some(end) = self.unrecorded[device].take() {
                self.parts.custody.settle(device, end);
            }
        }
        Ok(())
    }

    /// Drops blocks of which nothing is needed from the front, while no object holds earlier ones.
    fn settle_front(&mut self) {
        if self.object.is_some() || self.finishing.is_some() {
            return;
        }
        for device in 0..self.parts.queue.devices() {
            if self.unrecorded[device].is_some() {
                continue;
            }
            let custody = &self.parts.custody;
            let settled = self.parts.queue.drop_front(device, |block| custody.needs(block));
            if let Some(number) = settled {
                self.parts.custody.settle(device, number);
            }
        }
    }
}
