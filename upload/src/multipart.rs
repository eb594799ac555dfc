//! The state machine of one object: how chunks of bytes become one committed object, or one with side objects.
//!
//! Pure: [`ObjectMachine::step`] takes an event and the time, and appends what is to be done. Who runs the requests, and
//! where the bytes are, is known to the driver; which bucket is healthy, when a request is late and whether it may be
//! raced to [`Policy`]. What the bytes mean is nobody's business here.
//!
//! The bytes of an object are cut into chunks; what is sent as one is a *unit*: a chunk, or all of them where the home
//! bucket takes no parts. Each unit has a *slot* in an *upload*. An upload is a multipart upload, or *direct*: its units are
//! PUTs. Where part numbers may have gaps, and in direct uploads, a late unit is raced by a side object in another bucket,
//! and the upload becomes complete without it. Elsewhere the whole upload is raced by another one of its *group*: uploads
//! that hold the same units, of which one suffices.
//!
//! Invariants:
//! 1. One winner per chunk; every other attempt is cancelled and settled before a Complete is sent.
//! 2. One Complete at a time; complete xor abort: no abort after a Complete was sent until its outcome is known.
//! 3. A part number is not sent again while an earlier attempt may live, unless the capability row allows it and a listing
//!    settles it.
//! 4. [`Action::Finished`] with `Ok` only for objects whose commit is proven.
//! 5. After [`Action::Settled`] nothing of the object is under way.
#![forbid(unsafe_code)]

mod attempts;
mod completing;
mod messages;
mod settling;

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::{Duration, Instant};

pub use messages::{Action, Answer, AttemptId, Event, Piece, Placement, Request};

use crate::bucket::BucketIndex;
use crate::hedge::{Grant, Policy, Work};
use crate::store::{
    Capabilities, EntityTag, Lane, ListedPart, Operation, Parts, StoreError, StoreErrorKind, UploadId,
    UploadedPart,
};

/// One object being written. See the head of this file.
#[derive(Debug)]
pub struct ObjectMachine {
    name: String,
    begun: Instant,
    fails_at: Option<Instant>,
    chunks: Vec<u64>,
    units: Vec<Unit>,
    bytes: u64,
    /// No chunk follows.
    last: bool,
    /// A persist waits.
    wanted: bool,
    uploads: Vec<Upload>,
    /// Where new units go.
    current: usize,
    attempts: BTreeMap<AttemptId, Attempt>,
    attempts_begun: u64,
    names_given: u64,
    /// Buckets that refused this object for good.
    excluded: Vec<BucketIndex>,
    /// Where credentials or the clock were wrong, the first attempt that began after this was known.
    trials: BTreeMap<BucketIndex, AttemptId>,
    error: Option<StoreError>,
    phase: Phase,
    garbage: BTreeMap<usize, settling::Garbage>,
    leftovers: bool,
    wake: Option<Instant>,
    /// Something changed that other parts of the object may have waited for.
    changed: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Writing,
    /// The outcome is told; what is still under way or left behind is being cleared.
    Settling,
    Settled,
}

/// What is sent as one.
#[derive(Debug)]
struct Unit {
    chunks: Range<u32>,
    bytes: u64,
    /// The object that holds it, if it was won by a PUT.
    side: Option<(BucketIndex, String)>,
    stored: bool,
    released: bool,
}

#[derive(Debug)]
struct Upload {
    bucket: BucketIndex,
    name: String,
    group: usize,
    rules: Rules,
    id: Option<UploadId>,
    state: State,
    /// Sorted by unit.
    slots: Vec<Slot>,
    /// All slots before this one are resolved.
    resolved: usize,
    number_next: u32,
    number_last: u32,
    /// The control request in flight.
    busy: Option<AttemptId>,
    /// When the next control request may be sent.
    retry_at: Option<Instant>,
    failures: u32,
    /// When the present state began to wait for the store.
    since: Option<Instant>,
    /// Another upload was begun because this one is late.
    raced: Option<Grant>,
    /// How many were, in the present state.
    races: u32,
    race_at: Option<Instant>,
    /// A Complete was sent whose outcome is unknown.
    uncertain: bool,
    /// Since when the object is looked for.
    unproven_since: Option<Instant>,
    /// The store does not know the upload any more.
    gone: bool,
    polls: u32,
    repairs: u32,
    /// A number was sent twice: a listing must say what the store has.
    unsettled: bool,
    /// Its remains are taken care of.
    cleared: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Units are PUTs.
    Direct,
    /// Create is to be sent, or was.
    Opening,
    /// Parts are sent.
    Open,
    /// Complete is to be sent, or was.
    Completing,
    /// Whether the Complete took effect is to be found out.
    Unproven,
    /// What parts the store has is to be found out.
    Repairing,
    Committed,
    /// Not used any more.
    Abandoned,
}

/// What an upload's bucket allows.
#[derive(Clone, Copy, Debug)]
struct Rules {
    parts: Parts,
    sparse: bool,
    resend_part: bool,
    list_parts: bool,
    parts_max: u32,
}

#[derive(Debug)]
struct Slot {
    unit: usize,
    state: SlotState,
    attempts: u32,
    failures: u32,
    /// When its next attempt may begin, or, while one is in flight, move.
    retry_at: Option<Instant>,
    /// When its first attempt began, and D then.
    since: Option<Instant>,
    delay: Duration,
    hedges: u32,
    look_at: Option<Instant>,
    /// The next attempt goes to another bucket.
    elsewhere: bool,
    /// It has left a bucket that opened.
    moved: bool,
    /// The part number of an attempt that did nothing, for the next one.
    number: Option<u32>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum SlotState {
    Waiting,
    /// Attempts are in flight.
    Flying,
    /// Taken as this part.
    Done {
        number: u32,
        tag: EntityTag,
    },
    /// Won by a side object or another upload.
    Elsewhere,
}

/// A request in flight.
#[derive(Debug)]
struct Attempt {
    bucket: BucketIndex,
    name: String,
    request: Request,
    work: Work,
    upload: usize,
    /// The unit it sends.
    unit: Option<usize>,
    started: Instant,
    /// The connections it is counted on.
    lane: Option<Lane>,
    /// What a race was allowed by.
    grant: Option<Grant>,
    race: bool,
    acknowledged: u64,
    cancelled: bool,
    /// The entry of the garbage that it clears.
    garbage: Option<usize>,
}

impl ObjectMachine {
    /// An object of this name, that fails when it is not committed before `deadline`; without one, when it takes longer
    /// than [`object_timeout`](crate::options::UploadOptions::object_timeout) from its last chunk on. Time counts from
    /// `now`.
    #[must_use]
    pub fn new(name: String, deadline: Option<Instant>, now: Instant) -> ObjectMachine {
        ObjectMachine {
            name,
            begun: now,
            fails_at: deadline,
            chunks: Vec::new(),
            units: Vec::new(),
            bytes: 0,
            last: false,
            wanted: false,
            uploads: Vec::new(),
            current: 0,
            attempts: BTreeMap::new(),
            attempts_begun: 0,
            names_given: 0,
            excluded: Vec::new(),
            trials: BTreeMap::new(),
            error: None,
            phase: Phase::Writing,
            garbage: BTreeMap::new(),
            leftovers: false,
            wake: None,
            changed: false,
        }
    }

    /// Takes an event and appends what is to be done, in order. `policy` is the one that all objects of the driver share.
    ///
    /// # Panics
    /// If a chunk follows the last one.
    pub fn step(&mut self, event: Event, now: Instant, policy: &mut Policy, actions: &mut Vec<Action>) {
        let mut cx = Context { now, policy, actions };
        match event {
            Event::Chunk { bytes, last } => self.chunk(bytes, last, &mut cx),
            Event::Wanted { deadline } => {
                self.wanted = true;
                self.fails_at = match (self.fails_at, deadline) {
                    (Some(a), Some(b)) => Some(a.min(b)),
                    (a, b) => a.or(b),
                };
            }
            Event::Progress { attempt, acknowledged } => {
                if let Some(attempt) = self.attempts.get_mut(&attempt) {
                    let further = acknowledged.saturating_sub(attempt.acknowledged);
                    cx.policy.progressed(attempt.bucket, further, now);
                    attempt.acknowledged = attempt.acknowledged.max(acknowledged);
                }
                // Reports on other requests may follow, and only together they tell which of them is late.
                return;
            }
            Event::Ended { attempt, outcome } => self.ended(attempt, outcome, &mut cx),
            Event::Abort => {
                if self.phase == Phase::Writing {
                    let error = StoreError::new(Operation::Put, "", &self.name, StoreErrorKind::Aborted);
                    self.finish(Err(error), &mut cx);
                }
            }
            Event::Tick => {}
        }
        self.advance(&mut cx);
    }

    /// When the next [`Event::Tick`] is due, at the latest.
    #[must_use]
    pub fn deadline(&self) -> Option<Instant> {
        self.wake
    }

    fn chunk(&mut self, bytes: u64, last: bool, cx: &mut Context) {
        assert!(!self.last, "a chunk after the last one");
        if self.phase != Phase::Writing {
            return;
        }
        let retained = self.retained(cx);
        let chunk = self.chunks.len() as u32;
        self.chunks.push(bytes);
        self.bytes += bytes;
        self.last = last;
        if last && self.fails_at.is_none() {
            self.fails_at = cx.now.checked_add(cx.policy.options().object_timeout);
        }
        if self.uploads.is_empty() {
            let bucket = cx.policy.home(&[], cx.now);
            let rules = cx.rules(bucket);
            let direct = rules.parts == Parts::None || (last && chunk == 0);
            let upload = self.new_upload(bucket, 0, direct, cx);
            self.uploads.push(upload);
        }
        let upload = &self.uploads[self.current];
        if upload.state == State::Direct {
            // One request for all of it, once it is known how much that is.
            if last {
                self.add_unit(0..chunk + 1, self.bytes);
            }
        } else {
            self.add_unit(chunk..chunk + 1, bytes);
        }
        if retained {
            self.release_stored(cx);
        }
    }

    /// A unit in every upload of the group that takes new ones.
    fn add_unit(&mut self, chunks: Range<u32>, bytes: u64) {
        let unit = self.units.len();
        self.units.push(Unit { chunks, bytes, side: None, stored: false, released: false });
        let group = self.uploads[self.current].group;
        for upload in &mut self.uploads {
            if upload.group == group && upload.state != State::Abandoned {
                upload.slots.push(Slot::new(unit));
            }
        }
    }

    /// Whether all bytes are kept until the commit.
    fn retained(&self, cx: &Context) -> bool {
        self.bytes <= cx.policy.options().retain_bytes_max
    }

    /// Lets go of all stored units that no upload may have to send, if not all bytes are kept.
    fn release_stored(&mut self, cx: &mut Context) {
        if !self.retained(cx) {
            for unit in 0..self.units.len() {
                if self.units[unit].stored && !self.is_needed(unit) {
                    self.release(unit, cx);
                }
            }
        }
    }

    fn is_needed(&self, unit: usize) -> bool {
        let live = self.uploads.iter().filter(|u| !matches!(u.state, State::Committed | State::Abandoned));
        live.filter_map(|upload| upload.slot(unit)).any(|slot| !slot.is_resolved())
    }

    fn release(&mut self, unit: usize, cx: &mut Context) {
        let unit = &mut self.units[unit];
        if !unit.released {
            unit.released = true;
            cx.actions.extend(unit.chunks.clone().map(|chunk| Action::Release { chunk }));
        }
    }

    /// The unit is at its place, as far as is known.
    fn stored(&mut self, unit: usize, cx: &mut Context) {
        let keep = self.retained(cx) || self.is_needed(unit);
        let state = &mut self.units[unit];
        if !state.stored {
            state.stored = true;
            cx.actions.extend(state.chunks.clone().map(|chunk| Action::Stored { chunk }));
        }
        if !keep {
            self.release(unit, cx);
        }
    }

    fn new_upload(&mut self, bucket: BucketIndex, group: usize, direct: bool, cx: &Context) -> Upload {
        let rules = cx.rules(bucket);
        let name = self.whole_name();
        Upload {
            bucket,
            name,
            group,
            rules,
            id: None,
            state: if direct { State::Direct } else { State::Opening },
            slots: Vec::new(),
            resolved: 0,
            number_next: 1,
            number_last: rules.parts_max,
            busy: None,
            retry_at: None,
            failures: 0,
            since: None,
            raced: None,
            races: 0,
            race_at: None,
            uncertain: false,
            unproven_since: None,
            gone: false,
            polls: 0,
            repairs: 0,
            unsettled: false,
            cleared: false,
        }
    }

    /// A name for the whole object that was not used in any bucket: two of them may be one that has two URLs, and nobody
    /// may mistake a winner for what a loser has left.
    fn whole_name(&mut self) -> String {
        self.names_given += 1;
        match self.names_given {
            1 => self.name.clone(),
            given => format!("{}.w{}", self.name, given - 1),
        }
    }

    fn start(&mut self, attempt: Attempt, cx: &mut Context) -> AttemptId {
        let id = AttemptId(self.attempts_begun);
        self.attempts_begun += 1;
        cx.actions.push(Action::Start {
            attempt: id,
            bucket: attempt.bucket,
            name: attempt.name.clone(),
            request: attempt.request.clone(),
            lane: if attempt.race { Lane::Hedge } else { Lane::Primary },
            timeout: cx.policy.timeout(attempt.bucket, attempt.work),
        });
        self.attempts.insert(id, attempt);
        id
    }

    fn cancel(&mut self, id: AttemptId, cx: &mut Context) {
        if let Some(attempt) = self.attempts.get_mut(&id)
            && !attempt.cancelled
        {
            attempt.cancelled = true;
            cx.actions.push(Action::Cancel { attempt: id });
        }
    }

    fn ended(&mut self, id: AttemptId, outcome: Result<Answer, StoreError>, cx: &mut Context) {
        let Some(attempt) = self.attempts.remove(&id) else { return };
        self.changed = true;
        if let Some(lane) = attempt.lane {
            cx.policy.disconnect(lane);
        }
        if let Some(grant) = attempt.grant {
            cx.policy.give_back(grant);
        }
        if let Err(error) = &outcome
            && !attempt.cancelled
        {
            self.error = Some(error.clone());
        }
        if attempt.garbage.is_some() {
            return self.cleared(attempt, outcome, cx);
        }
        if !attempt.cancelled {
            if let Err(error) = &outcome
                && let StoreErrorKind::TimedOut(_) = error.kind()
            {
                cx.policy.learn_timeout(attempt.bucket, attempt.started, cx.now);
            }
            self.try_credentials(id, attempt.bucket, &outcome);
        }
        match attempt.request {
            Request::Put { .. } | Request::Part { .. } => self.data_ended(id, attempt, outcome, cx),
            _ => self.control_ended(id, attempt, outcome, cx),
        }
    }

    /// Does all that can be done now, and finds out when there will be more.
    fn advance(&mut self, cx: &mut Context) {
        if self.phase == Phase::Writing && self.fails_at.is_some_and(|deadline| deadline <= cx.now) {
            let took = cx.now.saturating_duration_since(self.begun);
            self.finish(Err(self.late_error(took, cx)), cx);
        }
        loop {
            self.changed = false;
            self.wake = None;
            if self.phase == Phase::Writing {
                self.wake_at(self.fails_at);
                let mut upload = 0;
                while upload < self.uploads.len() && self.phase == Phase::Writing {
                    self.advance_upload(upload, cx);
                    upload += 1;
                }
                self.finish_if_whole(cx);
            }
            if self.phase == Phase::Settling {
                self.settle(cx);
            }
            if !self.changed {
                break;
            }
        }
    }

    fn advance_upload(&mut self, upload: usize, cx: &mut Context) {
        match self.uploads[upload].state {
            State::Direct | State::Open => self.advance_slots(upload, cx),
            State::Opening => {
                self.leave_bad_bucket(upload, cx);
                self.advance_control(upload, cx);
            }
            State::Completing | State::Unproven | State::Repairing => self.advance_control(upload, cx),
            State::Committed | State::Abandoned => {}
        }
    }

    fn wake_at(&mut self, at: Option<Instant>) {
        self.wake = match (self.wake, at) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        };
    }

    /// Whether `at` is still to come; then it is waited for.
    fn waits(&mut self, at: Option<Instant>, cx: &Context) -> bool {
        let waits = at.is_some_and(|at| at > cx.now);
        if waits {
            self.wake_at(at);
        }
        waits
    }

    fn late_error(&self, took: Duration, cx: &Context) -> StoreError {
        let kind = StoreErrorKind::Deadline(took);
        if let Some(error) = &self.error {
            return StoreError::caused(error.operation(), error.bucket(), &self.name, kind, error.clone());
        }
        match self.attempts.values().find(|attempt| !attempt.cancelled) {
            Some(attempt) => {
                let bucket = &cx.policy.buckets()[attempt.bucket.0].url;
                StoreError::caused(Operation::Put, bucket, &self.name, kind, "the bucket has not answered")
            }
            None => StoreError::new(Operation::Put, "", &self.name, kind),
        }
    }
}

/// What a step works with.
struct Context<'a> {
    now: Instant,
    policy: &'a mut Policy,
    actions: &'a mut Vec<Action>,
}

impl Context<'_> {
    fn rules(&self, bucket: BucketIndex) -> Rules {
        let Capabilities { parts, sparse, resend_part, list_parts, parts_max, .. } =
            self.policy.buckets()[bucket.0].capabilities;
        Rules { parts, sparse: sparse && parts == Parts::Parallel, resend_part, list_parts, parts_max }
    }
}

impl Upload {
    fn slot(&self, unit: usize) -> Option<&Slot> {
        self.slots.binary_search_by_key(&unit, |slot| slot.unit).ok().map(|at| &self.slots[at])
    }

    fn slot_mut(&mut self, unit: usize) -> Option<&mut Slot> {
        self.slots.binary_search_by_key(&unit, |slot| slot.unit).ok().map(|at| &mut self.slots[at])
    }

    /// The part number of a slot's next attempt, or `None` if all are used up.
    fn number(&mut self, slot: usize, is_last: bool) -> Option<u32> {
        if !self.rules.sparse {
            // No gaps: a number is sent again only when nothing of it can have arrived, or the store allows it.
            return Some(slot as u32 + 1);
        }
        let known = self.slots[slot].number.take();
        if known.is_some() || self.number_next > self.number_last {
            return known;
        }
        // The last part alone may be small, so it stays the last one whatever is sent again.
        let (number, step) = if is_last { (&mut self.number_last, -1) } else { (&mut self.number_next, 1) };
        let new = *number;
        *number = new.saturating_add_signed(step);
        Some(new)
    }

    /// Whether a unit may be won by a side object.
    fn takes_side_objects(&self) -> bool {
        self.state == State::Direct || self.rules.sparse
    }
}

impl Attempt {
    fn new(
        bucket: BucketIndex,
        name: String,
        request: Request,
        work: Work,
        upload: usize,
        now: Instant,
    ) -> Attempt {
        Attempt {
            bucket,
            name,
            request,
            work,
            upload,
            unit: None,
            started: now,
            lane: None,
            grant: None,
            race: false,
            acknowledged: 0,
            cancelled: false,
            garbage: None,
        }
    }
}

impl Slot {
    fn new(unit: usize) -> Slot {
        Slot {
            unit,
            state: SlotState::Waiting,
            attempts: 0,
            failures: 0,
            retry_at: None,
            since: None,
            delay: Duration::ZERO,
            hedges: 0,
            look_at: None,
            elsewhere: false,
            moved: false,
            number: None,
        }
    }

    fn is_resolved(&self) -> bool {
        matches!(self.state, SlotState::Done { .. } | SlotState::Elsewhere)
    }
}
