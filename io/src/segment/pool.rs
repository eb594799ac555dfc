//! The files of a directory's segments: which exist, which are free, and making the next one ready ahead of its use.
//!
//! Creating a file writes all of it and the journal waits for the device, so both may run on a helper thread. Writing
//! blocks is not done here.

use std::collections::BTreeMap;
use std::io;
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use super::{Journal, KnownSegment, SegmentConfig, segment_name};
use crate::disk::{Files, WakeFn};

/// How many requests are refused at once after the file system said that it is full, before it is asked again. A
/// release asks at once.
const FULL_REFUSALS: u32 = 64;

/// How many attempts in a row may fail, for other reasons than missing space, before the directory counts as broken.
const FAILURES_MAX: u32 = 2;

/// Whether a segment can be had.
pub(super) enum Readiness {
    /// [`Pool::take_spare`] has one.
    Ready,
    /// The helper thread is at it, and calls the waker when it is done.
    Preparing,
    /// Neither budget nor space for one.
    NoSegment,
    /// Attempts keep failing.
    Broken(io::Error),
}

/// The segment files of one directory.
///
/// Invariants:
/// 1. Epochs only grow, and a segment is taken only under an epoch whose record the journal has reported durable.
/// 2. At most one segment is ready or being made ready.
/// 3. A file goes from `Used` to `Free` only by release; `Bad`, `Lost` and `Unremoved` ones are never written again.
pub(super) struct Pool {
    jobs: Jobs,
    helper: Option<Helper>,
    wake: Option<WakeFn>,
    states: BTreeMap<u32, State>,
    segments_max: u32,
    segment_bytes: u64,
    next_epoch: u64,
    spare: Option<(u32, u64)>,
    preparing: Option<Preparing>,
    failures: u32,
    failure: Option<io::Error>,
    refusals_left: u32,
    /// Somebody was told that segments cannot be made ready; said anew once one was.
    warned: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Free,
    /// In use, ready or being made ready. The epoch of what was found at open is not known here.
    Used(Option<u64>),
    /// In use, and never to be written again.
    Bad(u64),
    /// Takes its share of the budget until it is removed, if ever.
    Lost,
    /// As `Lost`, and could not be removed: that is tried again when there is no other segment.
    Unremoved,
}

struct Preparing {
    segment: u32,
    epoch: u64,
    /// Released before it was ready.
    released: bool,
}

impl Pool {
    pub(super) fn new(
        files: Arc<dyn Files>,
        journal: Box<dyn Journal>,
        config: &SegmentConfig,
        known: Vec<KnownSegment>,
        next_epoch: u64,
        wake: WakeFn,
    ) -> Self {
        let states = known
            .into_iter()
            .map(|known| (known.segment, if known.in_use { State::Used(None) } else { State::Free }))
            .collect();
        Self {
            jobs: Jobs { files, journal: Arc::new(Mutex::new(journal)) },
            helper: None,
            wake: config.background.then_some(wake),
            states,
            segments_max: config.segments_max,
            segment_bytes: config.segment_bytes,
            next_epoch,
            spare: None,
            preparing: None,
            failures: 0,
            failure: None,
            refusals_left: 0,
            warned: false,
        }
    }

    pub(super) fn spare(&self) -> Option<(u32, u64)> {
        self.spare
    }

    /// Segments that take their share of the budget and cannot be taken now.
    pub(super) fn in_use(&self) -> usize {
        self.states.values().filter(|state| **state != State::Free).count()
    }

    pub(super) fn is_preparing(&self) -> bool {
        self.preparing.is_some()
    }

    /// Takes the segment that is ready: acquired in the journal, its file in existence.
    pub(super) fn take_spare(&mut self) -> Option<(u32, u64)> {
        self.spare.take()
    }

    /// Starts making a segment ready before it is needed, unless that has just failed.
    pub(super) fn anticipate(&mut self) {
        let idle = self.spare.is_none() && self.preparing.is_none();
        if idle && self.failures == 0 && self.refusals_left == 0 {
            self.prepare();
        }
    }

    /// Makes a segment ready because one is needed now.
    pub(super) fn require(&mut self) -> Readiness {
        loop {
            self.collect();
            if self.spare.is_some() {
                return Readiness::Ready;
            }
            if self.preparing.is_some() {
                return Readiness::Preparing;
            }
            if self.failures >= FAILURES_MAX {
                let failure = self.failure.take();
                return Readiness::Broken(
                    failure.unwrap_or_else(|| io::Error::other("no segment can be made ready")),
                );
            }
            if self.refusals_left > 0 {
                self.refusals_left -= 1;
                return Readiness::NoSegment;
            }
            if !self.prepare() {
                self.remove_again();
                return Readiness::NoSegment;
            }
        }
    }

    /// Tries to remove the file of a segment that could not be removed.
    fn remove_again(&mut self) {
        let unremoved = self.states.iter().find(|(_, state)| **state == State::Unremoved);
        if let Some(segment) = unremoved.map(|(segment, _)| *segment) {
            self.refusals_left = FULL_REFUSALS;
            self.states.insert(segment, State::Lost);
            self.run(Job::Remove { segment });
        }
    }

    /// Takes in what the helper thread has finished.
    pub(super) fn collect(&mut self) {
        while let Some(helper) = &self.helper {
            match helper.outcomes.try_recv() {
                Ok(outcome) => self.finish(outcome),
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) => {
                    self.helper = None;
                    if let Some(Preparing { segment, .. }) = self.preparing.take() {
                        self.states.insert(segment, State::Free);
                        self.failures = FAILURES_MAX;
                        self.failure =
                            Some(io::Error::other("the thread that makes segments ready has panicked"));
                    }
                }
            }
        }
    }

    /// Says that the segment just taken could be opened.
    pub(super) fn opened(&mut self) {
        self.failures = 0;
        self.warned = false;
        self.failure = None;
    }

    /// Gives back a segment that was taken and could not be opened. It holds nothing.
    pub(super) fn not_opened(&mut self, segment: u32, epoch: u64, error: io::Error) {
        self.states.insert(segment, State::Free);
        let noted = self.jobs.journal(|journal| {
            journal.unused(segment, epoch);
            Ok(())
        });
        debug_assert!(noted.is_ok(), "a journal that panicked acquires no segment");
        self.failed(segment, error);
    }

    /// Keeps a segment from ever being written again: it is removed on release.
    pub(super) fn quarantine(&mut self, segment: u32, epoch: u64) {
        debug_assert_eq!(self.states.get(&segment), Some(&State::Used(Some(epoch))));
        self.states.insert(segment, State::Bad(epoch));
    }

    /// Frees a segment of which nothing is needed any more, and which is not written to. Says whether it was in use
    /// under that epoch.
    pub(super) fn release(&mut self, segment: u32, epoch: u64) -> bool {
        let next = match self.states.get(&segment) {
            Some(State::Used(used)) if used.is_none_or(|used| used == epoch) => State::Free,
            Some(State::Bad(used)) if *used == epoch => State::Lost,
            _ => return false,
        };
        self.refusals_left = 0;
        if self.spare == Some((segment, epoch)) {
            self.spare = None;
        }
        match &mut self.preparing {
            Some(preparing) if preparing.segment == segment => preparing.released = true,
            _ => {
                self.states.insert(segment, next);
                if next == State::Lost {
                    self.run(Job::Remove { segment });
                }
            }
        }
        true
    }

    /// Records that blocks from `number` on count only if they are written from now on.
    pub(super) fn cut(&mut self, number: u64) -> io::Result<()> {
        // What is ready or being made ready holds no block yet and may take the blocks to be written again.
        let ahead =
            self.spare.map(|(_, epoch)| epoch).or(self.preparing.as_ref().map(|preparing| preparing.epoch));
        self.jobs.journal(|journal| journal.cut(ahead.unwrap_or(self.next_epoch), number))
    }

    /// Returns whether there was a file to try, or budget for one.
    fn prepare(&mut self) -> bool {
        debug_assert!(self.spare.is_none() && self.preparing.is_none());
        let free = self.states.iter().find(|(_, state)| **state == State::Free).map(|(segment, _)| *segment);
        let create = free.is_none();
        if create && self.states.len() >= self.segments_max as usize {
            return false;
        }
        let Some(segment) =
            free.or_else(|| (1..=u32::MAX).find(|segment| !self.states.contains_key(segment)))
        else {
            return false;
        };
        let epoch = self.next_epoch;
        self.next_epoch = epoch.checked_add(1).expect("epochs do not run out");
        self.states.insert(segment, State::Used(Some(epoch)));
        self.preparing = Some(Preparing { segment, epoch, released: false });
        self.run(Job::Prepare { segment, epoch, create_bytes: create.then_some(self.segment_bytes) });
        true
    }

    fn run(&mut self, job: Job) {
        if let Some(wake) = &self.wake {
            if self.helper.is_none() {
                match Helper::start(self.jobs.clone(), wake.clone()) {
                    Ok(helper) => self.helper = Some(helper),
                    Err(error) => {
                        tracing::warn!(%error, "no thread to make segments ready: the spiller does it")
                    }
                }
            }
            if let Some(helper) = &self.helper {
                // If the thread has panicked, `collect` finds out.
                let _ = helper.jobs.as_ref().map(|jobs| jobs.send(job));
                return;
            }
        }
        let outcome = self.jobs.run(job);
        self.finish(outcome);
    }

    fn finish(&mut self, outcome: Outcome) {
        match outcome {
            Outcome::Prepared { segment, epoch, exists, result } => {
                let preparing = self.preparing.take().expect("one segment at a time is made ready");
                assert_eq!((preparing.segment, preparing.epoch), (segment, epoch));
                match result {
                    Ok(()) if preparing.released => {
                        self.states.insert(segment, State::Free);
                    }
                    Ok(()) => self.spare = Some((segment, epoch)),
                    // Nobody said at open what it holds: it is left alone.
                    Err(error) if !exists && error.kind() == io::ErrorKind::AlreadyExists => {
                        tracing::warn!(segment, "an unknown file has the name of a segment: skipped");
                        self.states.insert(segment, State::Lost);
                    }
                    Err(error) => {
                        if exists {
                            self.states.insert(segment, State::Free);
                        } else {
                            self.states.remove(&segment);
                        }
                        self.failed(segment, error);
                    }
                }
            }
            Outcome::Removed { segment, result: Ok(()) } => {
                self.states.remove(&segment);
                self.refusals_left = 0;
            }
            // It still takes its share of the budget, and counts as free when the directory is opened next.
            Outcome::Removed { segment, result: Err(error) } => {
                tracing::warn!(segment, %error, "a quarantined segment file could not be removed");
                self.states.insert(segment, State::Unremoved);
            }
        }
    }

    fn failed(&mut self, segment: u32, error: io::Error) {
        if !std::mem::replace(&mut self.warned, true) {
            tracing::warn!(segment, %error, "a segment could not be made ready, and is tried again; until then what is \
                appended waits: free space in the directory, or give segments fewer bytes");
        }
        metrics::counter!("tidelog_segment_prepare_failures_total").increment(1);
        if matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded) {
            self.refusals_left = FULL_REFUSALS;
        } else {
            self.failures += 1;
            self.failure = Some(error);
        }
    }
}

/// What may take long, and the thread for it.
#[derive(Clone)]
struct Jobs {
    files: Arc<dyn Files>,
    journal: Arc<Mutex<Box<dyn Journal>>>,
}

enum Job {
    Prepare { segment: u32, epoch: u64, create_bytes: Option<u64> },
    Remove { segment: u32 },
}

enum Outcome {
    Prepared { segment: u32, epoch: u64, exists: bool, result: io::Result<()> },
    Removed { segment: u32, result: io::Result<()> },
}

impl Jobs {
    fn run(&self, job: Job) -> Outcome {
        match job {
            Job::Prepare { segment, epoch, create_bytes } => {
                let created = create_bytes.map(|len| self.files.create(&segment_name(segment), len));
                let kind = if created.is_some() { "created" } else { "recycled" };
                if let Some(Err(error)) = created {
                    return Outcome::Prepared { segment, epoch, exists: false, result: Err(error) };
                }
                let result = self.journal(|journal| journal.acquired(segment, epoch));
                metrics::counter!("tidelog_segments_acquired_total", "kind" => kind).increment(1);
                Outcome::Prepared { segment, epoch, exists: true, result }
            }
            Job::Remove { segment } => {
                let result = match self.files.remove(&segment_name(segment)) {
                    // An attempt that failed had removed it.
                    Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
                    result => result,
                };
                Outcome::Removed { segment, result }
            }
        }
    }

    fn journal(&self, record: impl FnOnce(&mut dyn Journal) -> io::Result<()>) -> io::Result<()> {
        let mut journal = self.journal.lock().map_err(|_| io::Error::other("the journal has panicked"))?;
        record(&mut **journal)
    }
}

struct Helper {
    /// `None` only while the thread is told to end.
    jobs: Option<Sender<Job>>,
    outcomes: Receiver<Outcome>,
    thread: Option<JoinHandle<()>>,
}

impl Helper {
    fn start(jobs: Jobs, wake: WakeFn) -> io::Result<Self> {
        let (job_sender, job_receiver) = channel();
        let (outcome_sender, outcome_receiver) = channel();
        let mut outcomes = Outcomes { sender: Some(outcome_sender), wake };
        let thread = std::thread::Builder::new().name("tidelog-segment".into()).spawn(move || {
            for job in job_receiver {
                outcomes.send(jobs.run(job));
            }
        })?;
        Ok(Self { jobs: Some(job_sender), outcomes: outcome_receiver, thread: Some(thread) })
    }
}

impl Drop for Helper {
    /// Waits for the job under way: at most the creation of a file.
    fn drop(&mut self) {
        drop(self.jobs.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

struct Outcomes {
    sender: Option<Sender<Outcome>>,
    wake: WakeFn,
}

impl Outcomes {
    fn send(&mut self, outcome: Outcome) {
        // Nobody receives it only when the segments are being dropped.
        let _ = self.sender.as_ref().map(|sender| sender.send(outcome));
        (self.wake)();
    }
}

impl Drop for Outcomes {
    /// Also runs when a job panics: disconnects, then wakes who waits for the outcome.
    fn drop(&mut self) {
        self.sender = None;
        (self.wake)();
    }
}
