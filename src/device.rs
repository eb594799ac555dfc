//! What writers and the spiller of one local directory share: lanes, logs, large values, requests.
//!
//! Nothing here is touched by an append that finds room in its lane, but the flags `intake`, which are only read. Threads
//! find their lane through a weak reference in thread-local storage; the device owns it, and takes it back when the
//! thread ends.

use std::cell::RefCell;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use tidelog_io::ring::{Bell, Lane};
use tidelog_upload::Resolver;

use crate::checkpoint::RequestId;
use crate::error::SyncError;
use crate::types::{ChangeKind, KeyGroupRange, LogId, SequenceNumber};

/// Logs of one device that may be open at once: a frame's header has 20 bits for the slot.
pub(crate) const SLOTS_MAX: usize = 1 << 20;

/// Locks, also after a panic elsewhere: every critical section here leaves its data consistent at each step.
pub(crate) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One open log, shared by its writer, its controls, the spiller and the uploader.
#[derive(Debug)]
pub(crate) struct Log {
    pub id: LogId,
    pub name: String,
    pub key_groups: KeyGroupRange,
    /// Index of its device in the changelog.
    pub device: usize,
    /// Its slot on that device.
    pub slot: u32,
    /// The next sequence number. Only the writer stores it.
    pub next: AtomicU64,
    /// A sync was asked for up to here. Only the writer stores it.
    pub synced: AtomicU64,
    /// All changes below are on the local disk.
    durable: AtomicU64,
    waiters: Mutex<Waiters>,
    pub control: Mutex<Control>,
}

/// Who waits for numbers of a log to be durable.
#[derive(Debug, Default)]
struct Waiters {
    waiting: Vec<(u64, Resolver<Result<SequenceNumber, SyncError>>)>,
    /// Nothing more of the log will become durable.
    failure: Option<SyncError>,
}

/// What the owner of a log said about its changes.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Control {
    pub truncated: SequenceNumber,
    pub confirmed: SequenceNumber,
    pub closed: bool,
}

impl Log {
    pub fn new(id: LogId, name: String, key_groups: KeyGroupRange, device: usize, slot: u32) -> Log {
        Log {
            id,
            name,
            key_groups,
            device,
            slot,
            next: AtomicU64::new(0),
            synced: AtomicU64::new(0),
            durable: AtomicU64::new(0),
            waiters: Mutex::default(),
            control: Mutex::new(Control::default()),
        }
    }

    pub fn next(&self) -> SequenceNumber {
        SequenceNumber(self.next.load(Ordering::Acquire))
    }

    pub fn durable(&self) -> SequenceNumber {
        SequenceNumber(self.durable.load(Ordering::Acquire))
    }

    /// The spiller has seen all changes below `end` on the disk.
    pub fn set_durable(&self, end: u64) {
        debug_assert!(self.durable.load(Ordering::Relaxed) <= end);
        self.durable.store(end, Ordering::Release);
        let ready: Vec<_> = {
            let mut waiters = lock(&self.waiters);
            let (ready, rest) = waiters.waiting.drain(..).partition(|(wanted, _)| *wanted <= end);
            waiters.waiting = rest;
            ready
        };
        for (_, resolver) in ready {
            resolver.resolve(Ok(SequenceNumber(end)));
        }
    }

    /// Resolves when all changes below `wanted` are on the disk.
    pub fn when_durable(
        &self,
        wanted: SequenceNumber,
        resolver: Resolver<Result<SequenceNumber, SyncError>>,
    ) {
        let mut waiters = lock(&self.waiters);
        let durable = self.durable();
        let answer = match &waiters.failure {
            _ if durable >= wanted => Ok(durable),
            Some(failure) => Err(failure.clone()),
            None => {
                waiters.waiting.push((wanted.0, resolver));
                return;
            }
        };
        drop(waiters);
        resolver.resolve(answer);
    }

    /// Nothing more of this log will become durable.
    pub fn fail_waiters(&self, error: &SyncError) {
        let waiting = {
            let mut waiters = lock(&self.waiters);
            waiters.failure.get_or_insert_with(|| error.clone());
            std::mem::take(&mut waiters.waiting)
        };
        for (_, resolver) in waiting {
            resolver.resolve(Err(error.clone()));
        }
    }
}

/// A bound on bytes that several threads charge. What does not fit waits.
#[derive(Debug)]
pub(crate) struct Budget {
    used: AtomicUsize,
    max: usize,
    waiting: Mutex<Vec<Waker>>,
}

impl Budget {
    pub fn new(max: usize) -> Arc<Budget> {
        Arc::new(Budget { used: AtomicUsize::new(0), max, waiting: Mutex::new(Vec::new()) })
    }

    /// Charges `bytes`, or nothing if they do not fit.
    pub fn charge(self: &Arc<Self>, bytes: usize) -> Option<Charge> {
        let fits = |used: usize| used.checked_add(bytes).filter(|sum| *sum <= self.max);
        self.used.fetch_update(Ordering::AcqRel, Ordering::Acquire, fits).ok()?;
        Some(Charge { budget: Arc::clone(self), bytes })
    }

    /// Ready when `bytes` would fit; registers the waker otherwise.
    pub fn poll_room(&self, bytes: usize, context: &mut Context<'_>) -> Poll<()> {
        let fits = || self.used.load(Ordering::Acquire).saturating_add(bytes) <= self.max;
        if fits() {
            return Poll::Ready(());
        }
        let mut waiting = lock(&self.waiting);
        // Checked again under the lock: a charge given back takes it after it has lowered `used`.
        if fits() {
            return Poll::Ready(());
        }
        if !waiting.iter().any(|known| known.will_wake(context.waker())) {
            waiting.push(context.waker().clone());
        }
        Poll::Pending
    }

    /// Has all who wait look again.
    fn wake_waiting(&self) {
        let waiting = std::mem::take(&mut *lock(&self.waiting));
        waiting.into_iter().for_each(Waker::wake);
    }
}

/// Bytes charged to a budget until dropped.
#[derive(Debug)]
pub(crate) struct Charge {
    budget: Arc<Budget>,
    bytes: usize,
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.budget.used.fetch_sub(self.bytes, Ordering::AcqRel);
        self.budget.wake_waiting();
    }
}

/// A value too large for a lane, on its way to the spiller.
#[derive(Debug)]
pub(crate) struct SideValue {
    pub kind: ChangeKind,
    pub bytes: Bytes,
    /// What it is charged to, until the spiller is through with it.
    pub _charge: Option<Charge>,
}

/// What the spiller is asked besides draining lanes. A position is met when the lane is drained up to it.
#[derive(Debug)]
pub(crate) enum SpillRequest {
    /// Resolve when all that the lane held at this position is on the disk.
    Sync {
        lane: u32,
        position: u64,
        to: SequenceNumber,
        resolver: Resolver<Result<SequenceNumber, SyncError>>,
    },
    /// Tell the uploader at which block a persist request ends.
    Mark { lane: u32, position: u64, request: RequestId },
    /// The writer of this slot is gone; the slot is free once its lane is drained to this position.
    CloseLog { lane: u32, position: u64, slot: u32 },
    /// This use of a segment has ended, durably.
    Release { segment: u32, epoch: u64 },
    /// Drain everything, put it on the disk, and say so.
    Flush { resolver: Resolver<Result<(), SyncError>> },
    /// Stop, once the writes in flight are over.
    Exit,
}

/// A lane of this device, as a writer uses it.
#[derive(Clone, Debug)]
pub(crate) struct LaneRef {
    pub lane: Arc<Lane>,
    pub index: u32,
}

/// The index of the lane that threads without one of their own share, under a lock.
pub(crate) const SHARED_LANE: u32 = 0;

/// No append is accepted any more.
const INTAKE_CLOSED: u8 = 1;
/// The objects have as many bytes as they may.
const INTAKE_OVER_QUOTA: u8 = 2;

/// What writers and the spiller of one local directory share.
pub(crate) struct Device {
    pub index: usize,
    /// Unique in this process, so that thread-local storage can tell devices of several changelogs apart.
    key: u64,
    pub bell: Arc<Bell>,
    /// Why no append is accepted: 0 as long as they are.
    intake: AtomicU8,
    /// The spiller waits for room that only uploads make.
    pub pressed: AtomicBool,
    lanes: Mutex<Vec<Arc<Lane>>>,
    lanes_max: usize,
    lane_bytes: usize,
    /// Held around each use of the shared lane.
    pub shared_lane: Mutex<()>,
    slots: Mutex<Slots>,
    side: Mutex<SideTable>,
    pub side_budget: Arc<Budget>,
    /// `None` once the spiller has ended.
    inbox: Mutex<Option<Vec<SpillRequest>>>,
    /// Whether the inbox holds anything, so that the spiller looks without locking.
    has_requests: AtomicBool,
}

#[derive(Debug, Default)]
struct Slots {
    logs: Vec<Option<Arc<Log>>>,
    free: Vec<u32>,
    /// Nothing becomes durable here any more.
    failure: Option<SyncError>,
}

#[derive(Debug, Default)]
struct SideTable {
    values: std::collections::HashMap<u64, SideValue>,
    next: u64,
}

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Device").field("index", &self.index).finish_non_exhaustive()
    }
}

impl Device {
    pub fn new(
        index: usize,
        bell: Arc<Bell>,
        lane_bytes: usize,
        lanes_max: usize,
        side_budget: Arc<Budget>,
    ) -> io::Result<Device> {
        static KEYS: AtomicU64 = AtomicU64::new(0);
        let shared = Lane::new(lane_bytes, Arc::clone(&bell))?;
        Ok(Device {
            index,
            key: KEYS.fetch_add(1, Ordering::Relaxed),
            bell,
            intake: AtomicU8::new(0),
            pressed: AtomicBool::new(false),
            lanes: Mutex::new(vec![shared]),
            lanes_max,
            lane_bytes,
            shared_lane: Mutex::new(()),
            slots: Mutex::default(),
            side: Mutex::default(),
            side_budget,
            inbox: Mutex::new(Some(Vec::new())),
            has_requests: AtomicBool::new(false),
        })
    }

    /// Whether appends are accepted.
    #[inline]
    pub fn takes_in(&self) -> bool {
        self.intake.load(Ordering::Relaxed) == 0
    }

    /// Whether nothing is accepted any more.
    pub fn is_closed(&self) -> bool {
        self.intake.load(Ordering::Acquire) & INTAKE_CLOSED != 0
    }

    /// Accepts nothing any more.
    pub fn close(&self) {
        self.intake.fetch_or(INTAKE_CLOSED, Ordering::Release);
    }

    /// Refuses appends, or accepts them again, because of the bytes of objects.
    pub fn set_over_quota(&self, over: bool) {
        if over {
            self.intake.fetch_or(INTAKE_OVER_QUOTA, Ordering::Release);
        } else {
            self.intake.fetch_and(!INTAKE_OVER_QUOTA, Ordering::Release);
        }
    }

    /// The calling thread's lane: its own if there may be one, else the shared one, which the thread must use under its
    /// lock, claiming and disowning it each time.
    pub fn current_lane(&self) -> io::Result<LaneRef> {
        let cached = LANES.try_with(|lanes| lanes.borrow().find(self.key));
        match cached {
            Ok(Some(lane)) => Ok(lane),
            Ok(None) => self.adopt_lane(),
            // The thread is ending and its storage is gone.
            Err(_) => Ok(self.lane(SHARED_LANE)),
        }
    }

    /// Gives the calling thread a lane of its own, from the pool or new.
    fn adopt_lane(&self) -> io::Result<LaneRef> {
        let mut lanes = lock(&self.lanes);
        let pooled = lanes.iter().enumerate().skip(1).find(|(_, lane)| lane.try_claim());
        let lane_ref = match pooled {
            Some((index, lane)) => LaneRef { lane: Arc::clone(lane), index: index as u32 },
            None if lanes.len() <= self.lanes_max => {
                let lane = Lane::new(self.lane_bytes, Arc::clone(&self.bell))?;
                assert!(lane.try_claim(), "a new lane belongs to nobody");
                lanes.push(Arc::clone(&lane));
                LaneRef { lane, index: (lanes.len() - 1) as u32 }
            }
            None => return Ok(LaneRef { lane: Arc::clone(&lanes[0]), index: SHARED_LANE }),
        };
        drop(lanes);
        let entry =
            CachedLane { device: self.key, lane: Arc::downgrade(&lane_ref.lane), index: lane_ref.index };
        let cache = |lanes: &RefCell<ThreadLanes>| {
            let cached = &mut lanes.borrow_mut().0;
            cached.retain(|cached| cached.lane.strong_count() > 0);
            cached.push(entry);
        };
        if LANES.try_with(cache).is_err() {
            // The thread began to end in between: nobody would take the lane back.
            lane_ref.lane.disown();
            return Ok(self.lane(SHARED_LANE));
        }
        Ok(lane_ref)
    }

    /// A lane by its index.
    pub fn lane(&self, index: u32) -> LaneRef {
        LaneRef { lane: Arc::clone(&lock(&self.lanes)[index as usize]), index }
    }

    /// All lanes from index `known` on.
    pub fn lanes_from(&self, known: usize) -> Vec<Arc<Lane>> {
        lock(&self.lanes).get(known..).unwrap_or_default().to_vec()
    }

    /// Whether any lane holds changes that are not drained, or a request waits. Asked by the spiller before it sleeps.
    pub fn has_work(&self) -> bool {
        self.has_requests.load(Ordering::Acquire)
    }

    /// Puts a request before the spiller and wakes it. Once that has ended, the request is given up.
    pub fn request(&self, request: SpillRequest) {
        let mut inbox = lock(&self.inbox);
        let Some(requests) = &mut *inbox else { return };
        requests.push(request);
        self.has_requests.store(true, Ordering::Release);
        drop(inbox);
        self.bell.ring();
    }

    /// Takes the requests that wait.
    pub fn take_requests(&self) -> Vec<SpillRequest> {
        if !self.has_requests.load(Ordering::Acquire) {
            return Vec::new();
        }
        let mut inbox = lock(&self.inbox);
        self.has_requests.store(false, Ordering::Release);
        inbox.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// The spiller has ended, however that was: nobody may wait for it in vain.
    pub fn end(&self) {
        self.close();
        self.fail(&SyncError::Closed);
        let given_up = lock(&self.inbox).take();
        drop(given_up);
        // Who waits for room looks after it has said so whether it is closed.
        self.lanes_from(0).iter().for_each(|lane| lane.wake_waiting());
        self.side_budget.wake_waiting();
    }

    /// Takes a slot for a new log, made by `make` from the slot's number; `None` if there is none left.
    pub fn open_slot(&self, make: impl FnOnce(u32) -> Log) -> Option<Arc<Log>> {
        let mut slots = lock(&self.slots);
        let slot = match slots.free.pop() {
            Some(slot) => slot,
            None if slots.logs.len() < SLOTS_MAX => {
                slots.logs.push(None);
                (slots.logs.len() - 1) as u32
            }
            None => return None,
        };
        let log = Arc::new(make(slot));
        if let Some(failure) = &slots.failure {
            log.fail_waiters(failure);
        }
        slots.logs[slot as usize] = Some(Arc::clone(&log));
        Some(log)
    }

    /// Nothing of any log becomes durable any more.
    pub fn fail(&self, failure: &SyncError) {
        lock(&self.slots).failure.get_or_insert_with(|| failure.clone());
        self.logs().iter().for_each(|log| log.fail_waiters(failure));
    }

    /// The log in a slot.
    pub fn slot(&self, slot: u32) -> Option<Arc<Log>> {
        lock(&self.slots).logs.get(slot as usize)?.clone()
    }

    /// All open logs.
    pub fn logs(&self) -> Vec<Arc<Log>> {
        lock(&self.slots).logs.iter().flatten().cloned().collect()
    }

    /// Frees a slot, once nothing in any lane refers to it.
    pub fn free_slot(&self, slot: u32) {
        let mut slots = lock(&self.slots);
        if slots.logs.get_mut(slot as usize).and_then(Option::take).is_some() {
            slots.free.push(slot);
        }
    }

    /// Keeps a large value for the spiller; returns the key that goes into the lane.
    pub fn put_side(&self, value: SideValue) -> u64 {
        let mut side = lock(&self.side);
        let key = side.next;
        side.next += 1;
        side.values.insert(key, value);
        key
    }

    /// Takes a large value out again.
    pub fn take_side(&self, key: u64) -> Option<SideValue> {
        lock(&self.side).values.remove(&key)
    }
}

/// The lanes of the running thread, one for each device that it appended to.
struct ThreadLanes(Vec<CachedLane>);

struct CachedLane {
    device: u64,
    lane: Weak<Lane>,
    index: u32,
}

thread_local! {
    static LANES: RefCell<ThreadLanes> = const { RefCell::new(ThreadLanes(Vec::new())) };
}

impl ThreadLanes {
    fn find(&self, device: u64) -> Option<LaneRef> {
        let cached = self.0.iter().find(|cached| cached.device == device)?;
        Some(LaneRef { lane: cached.lane.upgrade()?, index: cached.index })
    }
}

impl Drop for ThreadLanes {
    fn drop(&mut self) {
        for cached in &self.0 {
            if let Some(lane) = cached.lane.upgrade() {
                lane.disown();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_asks_again_and_again_for_room_is_known_once() {
        let budget = Budget::new(10);
        let _all = budget.charge(10).expect("it is empty");
        let mut context = Context::from_waker(Waker::noop());
        for _ in 0..100 {
            assert!(budget.poll_room(1, &mut context).is_pending());
        }
        assert_eq!(lock(&budget.waiting).len(), 1);
    }
}
