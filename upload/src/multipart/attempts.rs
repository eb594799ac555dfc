//! Units on their way: first attempts, races, moves, refusals and failures of PUTs and parts.
#![forbid(unsafe_code)]

use super::*;
use crate::bucket::{Breaker, Verdict};
use crate::store::Outcome;

impl ObjectMachine {
    /// Starts what may be started of an upload's units, and races what is late.
    pub(super) fn advance_slots(&mut self, at: usize, cx: &mut Context) {
        self.leave_bad_bucket(at, cx);
        let upload = &self.uploads[at];
        if !matches!(upload.state, State::Direct | State::Open) {
            return;
        }
        let resolved = upload.slots[upload.resolved..].iter().take_while(|slot| slot.is_resolved()).count();
        let first = upload.resolved + resolved;
        self.uploads[at].resolved = first;
        let sequential = self.uploads[at].rules.parts == Parts::Sequential;
        let mut connections = true;
        for index in first..self.uploads[at].slots.len() {
            match self.uploads[at].slots[index].state {
                SlotState::Waiting => {
                    connections = connections && self.first_attempt(at, index, cx);
                    // The next one comes when this one is there.
                    if sequential {
                        break;
                    }
                }
                SlotState::Flying => {
                    if sequential {
                        break;
                    }
                    self.race_slot(at, index, cx);
                }
                SlotState::Done { .. } | SlotState::Elsewhere => {}
            }
            // A race may have replaced the upload.
            if !matches!(self.uploads[at].state, State::Direct | State::Open) {
                return;
            }
        }
        self.complete_if_ready(at, cx);
    }

    /// Starts an attempt of a unit that has none. Says whether there was a connection.
    fn first_attempt(&mut self, at: usize, index: usize, cx: &mut Context) -> bool {
        let retry_at = self.uploads[at].slots[index].retry_at;
        if self.waits(retry_at, cx) {
            return true;
        }
        let upload = &self.uploads[at];
        let slot = &upload.slots[index];
        let (unit, home) = (slot.unit, upload.bucket);
        let excluded = self.excluded.contains(&home);
        let elsewhere = slot.elsewhere || excluded || self.is_open(home, cx);
        let target = if !elsewhere || !upload.takes_side_objects() {
            None
        } else {
            let found = self.side_bucket(at, unit, cx);
            found.or_else(|| excluded.then(|| cx.policy.home(&self.excluded, cx.now)))
        };
        let has_none = self.attempts.values().all(|attempt| attempt.lane != Some(Lane::Primary));
        if !cx.policy.connect(Lane::Primary, has_none) {
            return false;
        }
        if self.uploads[at].slots[index].attempts == 0 && !self.is_replacement(at) {
            cx.policy.earn();
        }
        match target {
            Some(bucket) => self.send_side(at, index, bucket, None, false, cx),
            None => self.send_home(at, index, cx),
        }
        true
    }

    /// A first attempt in the upload's own bucket.
    fn send_home(&mut self, at: usize, index: usize, cx: &mut Context) {
        let upload = &mut self.uploads[at];
        let unit = upload.slots[index].unit;
        let bytes = self.units[unit].bytes;
        let chunks = self.units[unit].chunks.clone();
        let request = match upload.id.clone() {
            None => Request::Put { chunks },
            Some(id) => {
                let is_last = self.last && unit + 1 == self.units.len();
                match upload.number(index, is_last) {
                    Some(number) => Request::Part { upload: id, number, chunk: chunks.start },
                    // All of them are used up.
                    None => {
                        let bucket = self.side_bucket(at, unit, cx).unwrap_or(self.uploads[at].bucket);
                        return self.send_side(at, index, bucket, None, false, cx);
                    }
                }
            }
        };
        let (bucket, name) = (self.uploads[at].bucket, self.uploads[at].name.clone());
        self.send(at, index, bucket, name, request, bytes, None, false, cx);
    }

    /// The unit as an object of its own.
    fn send_side(
        &mut self,
        at: usize,
        index: usize,
        bucket: BucketIndex,
        grant: Option<Grant>,
        race: bool,
        cx: &mut Context,
    ) {
        let unit = self.uploads[at].slots[index].unit;
        let Unit { chunks, bytes, .. } = &self.units[unit];
        let (chunks, bytes) = (chunks.clone(), *bytes);
        let name = if self.uploads[at].state == State::Direct {
            self.whole_name()
        } else {
            format!("{}.{:05}.{}", self.name, chunks.start, self.attempts_begun)
        };
        self.send(at, index, bucket, name, Request::Put { chunks }, bytes, grant, race, cx);
    }

    #[allow(clippy::too_many_arguments)]
    fn send(
        &mut self,
        at: usize,
        index: usize,
        bucket: BucketIndex,
        name: String,
        request: Request,
        bytes: u64,
        grant: Option<Grant>,
        race: bool,
        cx: &mut Context,
    ) {
        let home = self.uploads[at].bucket;
        let slot = &mut self.uploads[at].slots[index];
        let work = Work::Data(bytes);
        if slot.since.is_none() {
            slot.since = Some(cx.now);
            slot.delay = cx.policy.delay(home, work);
        }
        slot.attempts += 1;
        slot.state = SlotState::Flying;
        let unit = Some(slot.unit);
        let lane = Some(if race { Lane::Hedge } else { Lane::Primary });
        let attempt =
            Attempt { unit, lane, grant, race, ..Attempt::new(bucket, name, request, work, at, cx.now) };
        self.start(attempt, cx);
        self.changed = true;
    }

    /// Races a unit in flight if it is late and that is allowed; else finds out when to look again.
    fn race_slot(&mut self, at: usize, index: usize, cx: &mut Context) {
        let options = &cx.policy.options().hedging;
        let (enabled, hedges_max, second) =
            (options.enabled, options.hedges_max, options.second_chance_delays);
        let side = self.uploads[at].takes_side_objects();
        if !enabled || !self.wanted || self.is_replacement(at) || (!side && self.uploads[at].raced.is_some())
        {
            return;
        }
        let home = self.uploads[at].bucket;
        let slot = &self.uploads[at].slots[index];
        let (Some(since), delay) = (slot.since, slot.delay) else { return };
        if slot.hedges >= hedges_max {
            return;
        }
        let unit = slot.unit;
        let bytes = self.units[unit].bytes;
        // Each attempt gets its D, whenever it began: D, 2 D and 3 D from the first one's start, later where a race had to
        // wait, earlier where one was refused or the attempt before it was found to lag.
        let newest = self.flying(unit).map(|attempt| attempt.started).max().unwrap_or(since);
        let mut due = newest + delay;
        if let Some(check) = self.lagging(unit, bytes, delay, cx) {
            due = due.min(check);
        }
        let due = slot_due(due, self.uploads[at].slots[index].look_at);
        if self.waits(Some(due), cx) {
            return;
        }
        let age = cx.now.saturating_duration_since(since);
        let again = look_again(delay, cx.now);
        let telling = self.flying(unit).filter(|attempt| cx.policy.progress_seen(attempt.bucket));
        let acknowledged = telling.map(|attempt| attempt.acknowledged).max();
        let look_at = if cx.policy.all_refuse() || cx.policy.interface_busy(acknowledged, age, cx.now) {
            Some(again)
        } else if side {
            match self.side_bucket(at, unit, cx).or_else(|| self.only_bucket(home, cx)) {
                None => Some(again),
                Some(_) if !cx.policy.connect(Lane::Hedge, false) => Some(again),
                Some(bucket) => match cx.policy.grant(age, delay, 1) {
                    None => {
                        cx.policy.disconnect(Lane::Hedge);
                        let second = since + delay.mul_f64(second);
                        Some(if second > cx.now { second } else { again })
                    }
                    Some(grant) => {
                        self.uploads[at].slots[index].hedges += 1;
                        self.send_side(at, index, bucket, Some(grant), true, cx);
                        None
                    }
                },
            }
        } else if !self.can_be_sent_again(at, cx) {
            Some(again)
        } else {
            let parts = self.uploads[at].slots.len();
            match cx.policy.grant(age, delay, parts) {
                None => Some(again),
                Some(grant) => {
                    self.uploads[at].raced = Some(grant);
                    self.send_whole_again(at, cx);
                    None
                }
            }
        };
        self.uploads[at].slots[index].look_at = look_at;
        self.wake_at(look_at);
    }

    /// When to look whether a unit is late because its newest attempt has come less far than it should have, or now, if it
    /// is and no other one promises to end soon.
    ///
    /// The first look is when all of the body should be on its way: at its pace until then, a slow one shows. The second is
    /// when even a slow one should have sent half, for what stopped in between. An attempt that has sent nothing waits for
    /// the second: its connection may still be opening.
    fn lagging(&self, unit: usize, bytes: u64, delay: Duration, cx: &Context) -> Option<Instant> {
        const MARGIN: Duration = Duration::from_millis(10);
        let newest = self.flying(unit).max_by_key(|attempt| attempt.started)?;
        let options = &cx.policy.options().hedging;
        let sending = |attempt: &Attempt| cx.policy.sending(attempt.bucket, bytes);
        // Of a small body nothing is acknowledged before all of it is.
        if !options.progress_check
            || !cx.policy.progress_seen(newest.bucket)
            || sending(newest) < options.delay_min
        {
            return None;
        }
        let patience = |attempt: &Attempt| sending(attempt).mul_f64(1.6) + MARGIN;
        let promises = |attempt: &Attempt| {
            let age = cx.now.saturating_duration_since(attempt.started);
            let (sent, left) = (attempt.acknowledged, bytes.saturating_sub(attempt.acknowledged));
            // What was sent long ago hangs in the store.
            if left == 0 || !cx.policy.progress_seen(attempt.bucket) {
                age < delay
            } else if sent == 0 {
                age < patience(attempt)
            } else {
                age.mul_f64(left as f64 / sent as f64) <= patience(attempt)
            }
        };
        let first = newest.started + sending(newest) + MARGIN;
        let second = newest.started + patience(newest);
        if first > cx.now {
            return Some(first);
        }
        if !self.flying(unit).any(promises) {
            return Some(cx.now);
        }
        (second > cx.now).then_some(second)
    }

    /// Attempts of a unit that may still win.
    fn flying(&self, unit: usize) -> impl Iterator<Item = &Attempt> {
        self.attempts.values().filter(move |attempt| attempt.unit == Some(unit) && !attempt.cancelled)
    }

    /// Another bucket than the upload's, and than those where the unit is being sent.
    fn side_bucket(&self, at: usize, unit: usize, cx: &mut Context) -> Option<BucketIndex> {
        let mut not: Vec<_> = self.excluded.clone();
        not.push(self.uploads[at].bucket);
        let without = not.len();
        not.extend(self.flying(unit).map(|attempt| attempt.bucket));
        let found = cx.policy.alternate(&not, cx.now);
        found.or_else(|| cx.policy.alternate(&not[..without], cx.now))
    }

    /// With a single bucket, a race goes there too, on another connection.
    fn only_bucket(&self, home: BucketIndex, cx: &Context) -> Option<BucketIndex> {
        (cx.policy.buckets().len() == 1 && !self.excluded.contains(&home)).then_some(home)
    }

    pub(super) fn is_open(&self, bucket: BucketIndex, cx: &Context) -> bool {
        cx.policy.options().hedging.enabled && cx.policy.breaker(bucket, cx.now) == Breaker::Open
    }

    /// Takes units away from a bucket that opened or refused for good.
    pub(super) fn leave_bad_bucket(&mut self, at: usize, cx: &mut Context) {
        let bucket = self.uploads[at].bucket;
        let excluded = self.excluded.contains(&bucket);
        if !excluded && !self.is_open(bucket, cx) {
            return;
        }
        let gaps = self.uploads[at].takes_side_objects();
        if excluded && !gaps {
            return self.replace(at, cx);
        }
        let mut not = self.excluded.clone();
        not.push(bucket);
        let opening = self.uploads[at].state == State::Opening;
        // It leaves as a whole, or not at all.
        let whole = opening || !gaps;
        if whole && !self.has_bytes(at) {
            return;
        }
        let other = if whole { self.upload_bucket(at, cx) } else { cx.policy.alternate(&not, cx.now) };
        if other.is_none() {
            // Nobody tells when one takes data again.
            let delay = cx.policy.delay(bucket, Work::Data(0));
            return self.wake_at(Some(look_again(delay, cx.now)));
        }
        if opening {
            return self.replace(at, cx);
        }
        let leaving = self.leaving(at, cx);
        if !gaps {
            if !leaving.is_empty() {
                self.replace(at, cx);
            }
            return;
        }
        let target = self.move_target(at, leaving.len(), &not, cx);
        for index in leaving {
            let slot = &mut self.uploads[at].slots[index];
            let (unit, waiting) = (slot.unit, slot.state == SlotState::Waiting);
            match target {
                Some(target) => {
                    slot.moved = true;
                    self.changed = true;
                    if waiting {
                        slot.state = SlotState::Elsewhere;
                    }
                    let slots = &mut self.uploads[target].slots;
                    let place = slots.partition_point(|slot| slot.unit < unit);
                    if slots.get(place).is_none_or(|slot| slot.unit != unit) {
                        slots.insert(place, Slot::new(unit));
                        let resolved = &mut self.uploads[target].resolved;
                        *resolved = place.min(*resolved);
                    }
                }
                // Its next attempt will avoid the bucket.
                None if waiting => {}
                None => {
                    let again = look_again(slot.delay, cx.now);
                    if let Some(bucket) = self.side_bucket(at, unit, cx)
                        && cx.policy.connect(Lane::Hedge, false)
                    {
                        self.uploads[at].slots[index].moved = true;
                        self.send_side(at, index, bucket, None, true, cx);
                    } else {
                        self.uploads[at].slots[index].retry_at = Some(again);
                        self.wake_at(Some(again));
                    }
                }
            }
        }
    }

    /// What would still be sent to an upload's bucket, and what has been on its way there, and nowhere else, for so long that
    /// it had better be elsewhere.
    fn leaving(&mut self, at: usize, cx: &Context) -> Vec<usize> {
        let bucket = self.uploads[at].bucket;
        let move_after = cx.policy.options().hedging.move_after;
        let mut leaving = Vec::new();
        for index in self.uploads[at].resolved..self.uploads[at].slots.len() {
            let slot = &self.uploads[at].slots[index];
            if slot.moved || slot.is_resolved() {
                continue;
            }
            if slot.state == SlotState::Flying {
                let bytes = self.units[slot.unit].bytes;
                let old = cx.policy.expected(bucket, Work::Data(bytes)).mul_f64(move_after);
                let here = self.flying(slot.unit).find(|attempt| attempt.bucket == bucket);
                let elsewhere = self.flying(slot.unit).any(|attempt| attempt.bucket != bucket);
                let Some(started) = here.map(|attempt| attempt.started).filter(|_| !elsewhere) else {
                    continue;
                };
                let (retry_at, old) = (slot.retry_at, started + old);
                if self.waits(retry_at.max(Some(old)), cx) {
                    continue;
                }
            }
            leaving.push(index);
        }
        leaving
    }

    /// The upload that takes the units of one whose bucket went bad: one already begun, or a new one if it is worth it.
    fn move_target(
        &mut self,
        at: usize,
        units: usize,
        not: &[BucketIndex],
        cx: &mut Context,
    ) -> Option<usize> {
        const UNITS_MIN: usize = 3;
        if self.uploads[at].state == State::Direct {
            return None;
        }
        let current = &self.uploads[self.current];
        if self.current != at
            && current.rules.sparse
            && matches!(current.state, State::Opening | State::Open)
            && !not.contains(&current.bucket)
            && cx.policy.breaker(current.bucket, cx.now) != Breaker::Open
        {
            return Some(self.current);
        }
        if units < UNITS_MIN && self.last {
            return None;
        }
        let mut not = not.to_vec();
        let bucket = loop {
            let bucket = cx.policy.alternate(&not, cx.now)?;
            if cx.rules(bucket).sparse {
                break bucket;
            }
            not.push(bucket);
        };
        let group = self.uploads.len();
        let upload = self.new_upload(bucket, group, false, cx);
        self.uploads.push(upload);
        self.current = group;
        Some(group)
    }

    /// A PUT or a part ended.
    pub(super) fn data_ended(
        &mut self,
        id: AttemptId,
        attempt: Attempt,
        outcome: Result<Answer, StoreError>,
        cx: &mut Context,
    ) {
        let Some(unit) = attempt.unit else { return };
        let took = cx.now.saturating_duration_since(attempt.started);
        match outcome {
            Ok(Answer::Tag(tag)) => {
                if !attempt.cancelled {
                    let bytes = self.units[unit].bytes;
                    cx.policy.sent(bytes.saturating_sub(attempt.acknowledged), cx.now);
                    cx.policy.judge(attempt.bucket, Verdict::Good, cx.now);
                    let expected = cx.policy.expected(attempt.bucket, attempt.work);
                    let slow = expected.mul_f64(cx.policy.options().hedging.slow_connection);
                    if took > slow.max(cx.policy.delay(attempt.bucket, attempt.work)) {
                        cx.actions.push(Action::Retire { attempt: id });
                    }
                    if attempt.race {
                        cx.policy.count_won();
                    } else {
                        cx.policy.learn(attempt.bucket, attempt.work, took);
                    }
                }
                match attempt.request.clone() {
                    Request::Part { number, .. } => self.part_taken(attempt, unit, number, tag, cx),
                    _ => self.put_taken(attempt, unit, cx),
                }
            }
            // A store that answers something else to a PUT has not said that it took it.
            Ok(_) => self.data_failed(
                &attempt,
                unit,
                &StoreError::new(Operation::Put, "", &attempt.name, StoreErrorKind::Interrupted),
                cx,
            ),
            Err(error) => self.data_failed(&attempt, unit, &error, cx),
        }
    }

    fn part_taken(&mut self, attempt: Attempt, unit: usize, number: u32, tag: EntityTag, cx: &mut Context) {
        let upload = &mut self.uploads[attempt.upload];
        let Some(slot) = upload.slot_mut(unit) else { return };
        if slot.is_resolved() || attempt.cancelled {
            return;
        }
        slot.state = SlotState::Done { number, tag };
        let group = upload.group;
        for other in 0..self.uploads.len() {
            if self.uploads[other].group != group {
                self.leave_elsewhere(other, unit);
            }
        }
        self.stored(unit, cx);
        let losers = self.losers(unit, |loser, machine| {
            let upload = &machine.uploads[loser.upload];
            loser.upload == attempt.upload || (upload.group != group && upload.takes_side_objects())
        });
        self.lose(losers, &attempt, cx);
    }

    fn put_taken(&mut self, attempt: Attempt, unit: usize, cx: &mut Context) {
        let resolved = self.uploads[attempt.upload].slot(unit).is_none_or(Slot::is_resolved);
        if self.phase != Phase::Writing || resolved || self.units[unit].side.is_some() {
            return self.discard(attempt.bucket, attempt.name, None);
        }
        self.units[unit].side = Some((attempt.bucket, attempt.name.clone()));
        for other in 0..self.uploads.len() {
            self.leave_elsewhere(other, unit);
        }
        self.stored(unit, cx);
        let losers = self.losers(unit, |loser, machine| machine.uploads[loser.upload].takes_side_objects());
        self.lose(losers, &attempt, cx);
    }

    /// A unit is not needed in an upload that can do without it.
    fn leave_elsewhere(&mut self, at: usize, unit: usize) {
        let upload = &mut self.uploads[at];
        if upload.takes_side_objects()
            && let Some(slot) = upload.slot_mut(unit)
            && !slot.is_resolved()
        {
            slot.state = SlotState::Elsewhere;
        }
    }

    fn losers(&self, unit: usize, which: impl Fn(&Attempt, &ObjectMachine) -> bool) -> Vec<AttemptId> {
        let flying = self.attempts.iter().filter(|(_, a)| a.unit == Some(unit) && !a.cancelled);
        flying.filter(|(_, attempt)| which(attempt, self)).map(|(id, _)| *id).collect()
    }

    /// Cancels attempts; those that were older than the winner say something of their bucket.
    fn lose(&mut self, losers: Vec<AttemptId>, winner: &Attempt, cx: &mut Context) {
        for id in losers {
            let loser = &self.attempts[&id];
            if loser.bucket != winner.bucket && loser.started < winner.started {
                let age = cx.now.saturating_duration_since(loser.started);
                if !loser.race {
                    cx.policy.learn_loss(loser.bucket, loser.work, age);
                }
                cx.policy.judge(loser.bucket, Verdict::Lost, cx.now);
            }
            self.cancel(id, cx);
        }
    }

    fn data_failed(&mut self, attempt: &Attempt, unit: usize, error: &StoreError, cx: &mut Context) {
        let unknown = error.outcome() == Outcome::Unknown;
        if unknown && matches!(attempt.request, Request::Put { .. }) {
            // It may yet appear; the name is never used again.
            self.leftovers = true;
            self.discard(attempt.bucket, attempt.name.clone(), None);
        }
        if attempt.cancelled {
            return;
        }
        let fatal = self.judge_error(attempt.bucket, error, cx);
        if self.phase != Phase::Writing {
            return;
        }
        let at = attempt.upload;
        if let Request::Part { number, .. } = attempt.request {
            let gone = *error.kind() == StoreErrorKind::NoSuchUpload;
            let spoiled =
                !self.uploads[at].rules.sparse && (fatal || (unknown && !self.uploads[at].rules.resend_part));
            if gone || spoiled {
                return self.replace(at, cx);
            }
            if unknown && !self.uploads[at].rules.sparse {
                self.uploads[at].unsettled = true;
            }
            if !unknown && let Some(slot) = self.uploads[at].slot_mut(unit) {
                slot.number = Some(number);
            }
        }
        if fatal && self.fail_if_nowhere_left(error, cx) {
            return;
        }
        let alone = self.flying(unit).all(|other| other.upload != at);
        if attempt.race && !alone {
            return;
        }
        let is_first_of_others = !cx.policy.all_refuse() && cx.policy.buckets().len() > 1;
        let pause = cx.policy.backoff(self.failures_of(at, unit) + 1);
        let enabled = cx.policy.options().hedging.enabled;
        let upload = &mut self.uploads[at];
        let side = upload.takes_side_objects();
        // A direct upload's name may have been taken; `whole_name` gives it a new one.
        let fresh_name = upload.state == State::Direct && attempt.name == upload.name;
        let not_applied = !unknown && *error.kind() != StoreErrorKind::Exists;
        let bucket = upload.bucket;
        let Some(slot) = upload.slot_mut(unit) else { return };
        if slot.is_resolved() {
            return;
        }
        slot.failures += 1;
        if alone {
            slot.state = SlotState::Waiting;
            let at_once = enabled && side && is_first_of_others && slot.failures == 1;
            slot.elsewhere =
                side && (at_once || (attempt.bucket == bucket && slot.failures.is_multiple_of(3)));
            slot.retry_at = if at_once { None } else { Some(cx.now + pause) };
        }
        if fresh_name && !not_applied {
            let name = self.whole_name();
            self.uploads[at].name = name;
        }
    }

    fn failures_of(&self, at: usize, unit: usize) -> u32 {
        self.uploads[at].slot(unit).map_or(0, |slot| slot.failures)
    }

    /// What an error says of its bucket. Whether it will not go away by itself: then the object avoids the bucket.
    pub(super) fn judge_error(&mut self, bucket: BucketIndex, error: &StoreError, cx: &mut Context) -> bool {
        let verdict = match error.kind() {
            StoreErrorKind::Throttled => Verdict::Refused,
            // These say something of one upload or name, nothing of the bucket.
            StoreErrorKind::NoSuchUpload
            | StoreErrorKind::InvalidPart
            | StoreErrorKind::InProgress
            | StoreErrorKind::NotFound
            | StoreErrorKind::Exists => return false,
            _ => Verdict::Failed,
        };
        cx.policy.judge(bucket, verdict, cx.now);
        let fatal = match error.kind() {
            // As `try_credentials` found.
            StoreErrorKind::Credentials | StoreErrorKind::ClockSkew => self.excluded.contains(&bucket),
            _ => !error.is_retryable(),
        };
        if fatal && !self.excluded.contains(&bucket) {
            self.excluded.push(bucket);
        }
        fatal
    }

    /// Gives wrong credentials, or a wrong clock, one more trial. The store has renewed or set them once already, and what
    /// was under way when that failed fails along with it; but what begins after that, and fails, will go on failing.
    pub(super) fn try_credentials(
        &mut self,
        id: AttemptId,
        bucket: BucketIndex,
        outcome: &Result<Answer, StoreError>,
    ) {
        let wrong = outcome.as_ref().is_err_and(|error| {
            matches!(error.kind(), StoreErrorKind::Credentials | StoreErrorKind::ClockSkew)
        });
        let trial = self.trials.get(&bucket).copied();
        let tried = trial.is_some_and(|trial| id >= trial);
        if outcome.is_ok() && tried {
            self.trials.remove(&bucket);
        } else if wrong && tried && !self.excluded.contains(&bucket) {
            self.excluded.push(bucket);
        } else if wrong && trial.is_none() {
            self.trials.insert(bucket, AttemptId(self.attempts_begun));
        }
    }

    /// Fails the object if every bucket has refused it for good.
    pub(super) fn fail_if_nowhere_left(&mut self, error: &StoreError, cx: &mut Context) -> bool {
        let nowhere = self.excluded.len() >= cx.policy.buckets().len();
        if nowhere {
            self.finish(Err(error.clone()), cx);
        }
        nowhere
    }
}

/// When to look again for what nobody tells of.
fn look_again(delay: Duration, now: Instant) -> Instant {
    now + (delay / 2).max(Duration::from_millis(1))
}

fn slot_due(due: Instant, look_at: Option<Instant>) -> Instant {
    look_at.map_or(due, |look_at| look_at.max(due))
}
