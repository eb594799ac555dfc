//! Uploads from their Create to a proven commit: lost answers, missing parts, and races of whole uploads.
#![forbid(unsafe_code)]

use super::*;
use crate::bucket::Verdict;
use crate::store::Outcome;

/// Looks at an object before a Complete of unknown outcome is taken for lost, if the time has passed as well.
const POLLS_MIN: u32 = 3;

/// How long a Complete may still be under way in the store after its end without an answer.
const COMPLETE_ECHO: Duration = Duration::from_secs(2);

/// Repairs of one upload before all of it is sent afresh.
const REPAIRS_MAX: u32 = 3;

impl ObjectMachine {
    /// Sends the control request that an upload is waiting for, or races the upload if it is late.
    pub(super) fn advance_control(&mut self, at: usize, cx: &mut Context) {
        if self.give_up_if_stuck(at, cx) {
            return;
        }
        let upload = &self.uploads[at];
        if upload.busy.is_some() {
            return self.race_upload(at, cx);
        }
        let retry_at = upload.retry_at;
        if self.waits(retry_at, cx) {
            return self.race_upload(at, cx);
        }
        let upload = &self.uploads[at];
        let id = upload.id.clone();
        let (request, work) = match (upload.state, id) {
            (State::Opening, _) => (Request::Create, Work::Control),
            (State::Completing, Some(id)) => {
                let parts = upload.parts();
                let work = Work::Complete(parts.len());
                (Request::Complete { upload: id, parts }, work)
            }
            (State::Unproven, _) => (Request::Head, Work::Control),
            (State::Repairing, Some(id)) => (Request::ListParts { upload: id }, Work::Control),
            _ => return,
        };
        let attempt = Attempt::new(upload.bucket, upload.name.clone(), request, work, at, cx.now);
        let busy = self.start(attempt, cx);
        let upload = &mut self.uploads[at];
        upload.busy = Some(busy);
        upload.since.get_or_insert(cx.now);
        self.race_upload(at, cx);
    }

    /// Begins another upload of the same units when this one opens or completes too slowly.
    fn race_upload(&mut self, at: usize, cx: &mut Context) {
        let upload = &self.uploads[at];
        let options = &cx.policy.options().hedging;
        let Some(since) = upload.since else { return };
        if !options.enabled
            || !self.wanted
            || upload.raced.is_some()
            || upload.rules.parts == Parts::Sequential
            || self.is_replacement(at)
        {
            return;
        }
        let (work, cost) = match upload.state {
            State::Opening => (Work::Control, 1),
            _ => (Work::Complete(upload.done().count()), upload.done().count().max(1)),
        };
        let delay = cx.policy.delay(upload.bucket, work);
        let due = upload.race_at.map_or(since + delay, |at| at.max(since + delay));
        if self.waits(Some(due), cx)
            || !self.may_be_sent_again(at, cx)
            || self.other_buckets(at, cx).next().is_none()
        {
            return;
        }
        let age = cx.now.saturating_duration_since(since);
        let grant = if cx.policy.all_refuse() || self.upload_bucket(at, cx).is_none() {
            None
        } else {
            cx.policy.grant(age, delay, cost)
        };
        match grant {
            Some(grant) => {
                self.uploads[at].raced = Some(grant);
                self.send_whole_again(at, cx);
            }
            // Nobody tells of a token, or of a bucket that takes data again.
            None => {
                let again = cx.now + (delay / 2).max(Duration::from_millis(1));
                self.uploads[at].race_at = Some(again);
                self.wake_at(Some(again));
            }
        }
    }

    /// Gives up an upload that hangs in a bucket that opened, if its bytes are not here to be sent elsewhere: the object
    /// fails, and the next one takes them, from where its owner has them, to a bucket that takes data. Not before it has
    /// waited for as long as for a stall: to send all again costs more than a short outage.
    fn give_up_if_stuck(&mut self, at: usize, cx: &mut Context) -> bool {
        const LOOK_AGAIN: Duration = Duration::from_secs(1);
        let upload = &self.uploads[at];
        let since = match upload.state {
            // What is left of it goes elsewhere by itself.
            State::Open if upload.rules.sparse => None,
            State::Open => upload.unresolved().filter_map(|slot| slot.since).min(),
            _ => upload.since,
        };
        let due = since.and_then(|since| since.checked_add(cx.policy.options().hedging.stall_timeout));
        let bucket = upload.bucket;
        if !cx.policy.options().hedging.enabled || due.is_none() || self.waits(due, cx) || self.has_bytes(at)
        {
            return false;
        }
        let mut not = self.excluded.clone();
        not.push(bucket);
        if !self.is_open(bucket, cx) || cx.policy.alternate(&not, cx.now).is_none() {
            self.wake_at(Some(cx.now + LOOK_AGAIN));
            return false;
        }
        let took = cx.now.saturating_duration_since(self.begun);
        self.error = Some(self.late_error(took, cx));
        self.replace(at, cx);
        true
    }

    /// Whether all bytes of an upload are still here.
    pub(super) fn has_bytes(&self, at: usize) -> bool {
        let mut slots = self.uploads[at].slots.iter();
        slots.all(|slot| slot.state == SlotState::Elsewhere || !self.units[slot.unit].released)
    }

    /// Whether another upload of the same units can be begun, now.
    pub(super) fn can_be_sent_again(&mut self, at: usize, cx: &mut Context) -> bool {
        self.may_be_sent_again(at, cx) && self.upload_bucket(at, cx).is_some()
    }

    /// Whether another upload of the same units can be begun if there is where to: there were not too many, and their
    /// bytes are still here.
    fn may_be_sent_again(&self, at: usize, cx: &Context) -> bool {
        let upload = &self.uploads[at];
        upload.races < cx.policy.options().hedging.hedges_max
            && (upload.state == State::Opening || self.last)
            && self.has_bytes(at)
    }

    /// Another bucket that takes uploads.
    pub(super) fn upload_bucket(&mut self, at: usize, cx: &mut Context) -> Option<BucketIndex> {
        let mut not = self.excluded.clone();
        not.push(self.uploads[at].bucket);
        loop {
            let bucket = cx.policy.alternate(&not, cx.now)?;
            if cx.rules(bucket).parts != Parts::None {
                return Some(bucket);
            }
            not.push(bucket);
        }
    }

    /// Where an upload that was given up begins anew: elsewhere if possible, else there again, unless that was refused
    /// for good.
    fn heir_bucket(&mut self, at: usize, cx: &mut Context) -> Option<BucketIndex> {
        let old = Some(self.uploads[at].bucket).filter(|bucket| !self.excluded.contains(bucket));
        let open = old.or_else(|| self.other_buckets(at, cx).next());
        self.upload_bucket(at, cx).or(open)
    }

    /// Other buckets that might take uploads, if they take data.
    fn other_buckets(&self, at: usize, cx: &Context) -> impl Iterator<Item = BucketIndex> {
        let buckets = (0..cx.policy.buckets().len()).map(BucketIndex);
        buckets.filter(move |bucket| {
            *bucket != self.uploads[at].bucket
                && !self.excluded.contains(bucket)
                && cx.rules(*bucket).parts != Parts::None
        })
    }

    /// Begins a second upload of the units of one, in another bucket. The first to be committed wins.
    pub(super) fn send_whole_again(&mut self, at: usize, cx: &mut Context) {
        if let Some(bucket) = self.upload_bucket(at, cx) {
            self.uploads[at].races += 1;
            self.copy_upload(at, bucket, cx);
        }
    }

    fn copy_upload(&mut self, at: usize, bucket: BucketIndex, cx: &mut Context) -> usize {
        let group = self.uploads[at].group;
        let mut copy = self.new_upload(bucket, group, false, cx);
        let needed = self.uploads[at].slots.iter().filter(|slot| slot.state != SlotState::Elsewhere);
        copy.slots = needed.map(|slot| Slot::new(slot.unit)).collect();
        let index = self.uploads.len();
        self.uploads.push(copy);
        if self.uploads[self.current].group == group {
            self.current = index;
        }
        self.changed = true;
        index
    }

    /// Gives an upload up. Its units go into a new one, unless another one of its group has them.
    pub(super) fn replace(&mut self, at: usize, cx: &mut Context) {
        if self.uploads[at].state == State::Abandoned {
            return;
        }
        let group = self.uploads[at].group;
        let lost = !self.has_bytes(at);
        self.abandon(at, cx);
        let heir = self.uploads.iter().position(|u| u.group == group && u.state != State::Abandoned);
        if let Some(heir) = heir {
            // If this one was its race, there may be another.
            self.race_over(heir, cx);
            if self.uploads[self.current].group == group {
                self.current = heir;
            }
            return self.release_stored(cx);
        }
        let Some(bucket) = self.heir_bucket(at, cx).filter(|_| !lost) else {
            let error = self.error.clone().unwrap_or_else(|| {
                StoreError::new(Operation::Complete, "", &self.name, StoreErrorKind::NoSuchUpload)
            });
            return self.finish(Err(error), cx);
        };
        let pause = cx.policy.backoff(self.uploads.len() as u32);
        // The first one is replaced at once: most often its bucket is all that was wrong.
        let at_once = self.uploads.iter().filter(|upload| upload.state == State::Abandoned).count() < 2;
        let new = self.copy_upload(at, bucket, cx);
        if !at_once {
            self.uploads[new].retry_at = Some(cx.now + pause);
        }
    }

    /// Gives an upload up: its parts are cancelled, its Create or Complete comes to its end.
    pub(super) fn abandon(&mut self, at: usize, cx: &mut Context) {
        self.uploads[at].state = State::Abandoned;
        self.changed = true;
        self.race_over(at, cx);
        let mut cancelled = Vec::new();
        for (id, attempt) in &self.attempts {
            let outlives = matches!(attempt.request, Request::Create | Request::Complete { .. });
            if attempt.upload == at && attempt.garbage.is_none() && !outlives {
                cancelled.push(*id);
            }
        }
        for id in cancelled {
            self.cancel(id, cx);
        }
    }

    pub(super) fn is_replacement(&self, at: usize) -> bool {
        let group = self.uploads[at].group;
        self.uploads[..at].iter().any(|upload| upload.group == group && upload.state != State::Abandoned)
    }

    /// All is sent that the upload is to hold: commit it, or drop it if it holds nothing.
    pub(super) fn complete_if_ready(&mut self, at: usize, cx: &mut Context) {
        if self.uploads[at].state != State::Open || self.give_up_if_stuck(at, cx) {
            return;
        }
        let upload = &self.uploads[at];
        let more = !self.last && self.current == at;
        if more || upload.unresolved().next().is_some() {
            return;
        }
        // The losers' parts must not arrive during or after the Complete.
        let flying =
            self.attempts.values().any(|a| a.upload == at && matches!(a.request, Request::Part { .. }));
        if flying || (!self.last && self.attempts.values().any(|a| a.upload == at)) {
            return;
        }
        if upload.done().count() == 0 {
            return self.abandon(at, cx);
        }
        let unsettled = upload.unsettled;
        let upload = &mut self.uploads[at];
        upload.state = if unsettled { State::Repairing } else { State::Completing };
        upload.restart();
        self.advance_control(at, cx);
    }

    /// A control request ended.
    pub(super) fn control_ended(
        &mut self,
        id: AttemptId,
        attempt: Attempt,
        outcome: Result<Answer, StoreError>,
        cx: &mut Context,
    ) {
        let at = attempt.upload;
        let upload = &mut self.uploads[at];
        if upload.busy == Some(id) {
            upload.busy = None;
        }
        let took = cx.now.saturating_duration_since(attempt.started);
        if outcome.is_ok() && !attempt.cancelled {
            cx.policy.learn(attempt.bucket, attempt.work, took);
        }
        match (&attempt.request, outcome) {
            (Request::Create, outcome) => self.created(at, outcome, cx),
            (Request::Complete { parts, .. }, outcome) => self.completed(at, parts.len(), outcome, cx),
            (Request::Head, outcome) => self.looked(at, outcome, cx),
            (Request::ListParts { .. }, outcome) => self.listed(at, outcome, cx),
            _ => {}
        }
    }

    fn created(&mut self, at: usize, outcome: Result<Answer, StoreError>, cx: &mut Context) {
        match outcome {
            Ok(Answer::Created(id)) => {
                let upload = &mut self.uploads[at];
                upload.id = Some(id);
                if upload.state != State::Opening {
                    return;
                }
                upload.state = State::Open;
                upload.restart();
                self.race_over(at, cx);
                // Of uploads that were raced to be opened, the first one does.
                let group = self.uploads[at].group;
                for other in 0..self.uploads.len() {
                    let late = &self.uploads[other];
                    if late.group == group && other != at && late.state == State::Opening {
                        let (lost, since) = (late.bucket, late.since);
                        self.abandon(other, cx);
                        if other < at && lost != self.uploads[at].bucket {
                            let age = cx.now.saturating_duration_since(since.unwrap_or(cx.now));
                            cx.policy.learn_loss(lost, Work::Control, age);
                            cx.policy.judge(lost, Verdict::Lost, cx.now);
                            cx.policy.count_won();
                        }
                    }
                }
                if self.uploads[self.current].state == State::Abandoned {
                    self.current = at;
                }
                self.release_stored(cx);
            }
            Ok(_) => self.control_failed(at, &self.odd_answer(at, Operation::Create), cx),
            Err(error) => {
                // It may have been begun under an id that nobody here will ever know.
                self.leftovers |= error.outcome() == Outcome::Unknown;
                let first = self.uploads[at].failures == 0;
                self.control_failed(at, &error, cx);
                let upload = &self.uploads[at];
                if first
                    && self.phase == Phase::Writing
                    && upload.state == State::Opening
                    && cx.policy.options().hedging.enabled
                    && !cx.policy.all_refuse()
                    && self.upload_bucket(at, cx).is_some()
                {
                    self.replace(at, cx);
                }
            }
        }
    }

    fn completed(&mut self, at: usize, parts: usize, outcome: Result<Answer, StoreError>, cx: &mut Context) {
        let abandoned = self.uploads[at].state == State::Abandoned;
        match outcome {
            Ok(Answer::Tag(tag)) if parts_of(&tag).is_none_or(|count| count == parts) => self.commit(at, cx),
            // A tag of another number of parts is no proof: the object itself must tell.
            Ok(_) => {
                self.uploads[at].uncertain = true;
                self.look(at, false, cx);
            }
            Err(error) => {
                let upload = &mut self.uploads[at];
                let bucket = upload.bucket;
                upload.uncertain |= error.outcome() == Outcome::Unknown;
                match error.kind() {
                    StoreErrorKind::NoSuchUpload => {
                        upload.uncertain = true;
                        self.look(at, true, cx);
                    }
                    // The name is this object's alone: an earlier Complete may have taken effect after all.
                    StoreErrorKind::Exists => {
                        upload.uncertain = true;
                        self.look(at, false, cx);
                    }
                    _ if error.outcome() == Outcome::Unknown => {
                        self.judge_error(bucket, &error, cx);
                        self.look(at, false, cx);
                    }
                    StoreErrorKind::InvalidPart if !abandoned => {
                        if upload.rules.list_parts && upload.repairs < REPAIRS_MAX {
                            upload.repairs += 1;
                            upload.state = State::Repairing;
                            upload.restart();
                        } else {
                            self.replace(at, cx);
                        }
                    }
                    _ => self.control_failed(at, &error, cx),
                }
            }
        }
    }

    /// The upload's object is proven. The others of its group are not needed any more.
    fn commit(&mut self, at: usize, cx: &mut Context) {
        let upload = &mut self.uploads[at];
        upload.uncertain = false;
        let abandoned = upload.state == State::Abandoned;
        upload.state = State::Committed;
        self.changed = true;
        if abandoned || self.phase != Phase::Writing {
            return;
        }
        cx.policy.judge(self.uploads[at].bucket, Verdict::Good, cx.now);
        let (group, bucket, race) =
            (self.uploads[at].group, self.uploads[at].bucket, self.is_replacement(at));
        if race {
            cx.policy.count_won();
        }
        for other in 0..self.uploads.len() {
            let late = &self.uploads[other];
            if other == at || late.group != group || matches!(late.state, State::Abandoned | State::Committed)
            {
                continue;
            }
            let lost = late.bucket;
            self.abandon(other, cx);
            if other < at && lost != bucket {
                cx.policy.judge(lost, Verdict::Lost, cx.now);
            }
        }
        self.race_over(at, cx);
    }

    fn race_over(&mut self, at: usize, cx: &mut Context) {
        if let Some(grant) = self.uploads[at].raced.take() {
            cx.policy.give_back(grant);
        }
    }

    /// Finds out by the object itself whether the Complete took effect.
    fn look(&mut self, at: usize, gone: bool, cx: &mut Context) {
        let upload = &mut self.uploads[at];
        if upload.state == State::Abandoned {
            return;
        }
        self.changed = true;
        upload.gone |= gone;
        if upload.state != State::Unproven {
            upload.state = State::Unproven;
            let since = upload.since;
            upload.restart();
            // It is late from the Complete on.
            upload.since = since.or(Some(cx.now));
            upload.unproven_since = Some(cx.now);
            upload.polls = 0;
        }
    }

    fn looked(&mut self, at: usize, outcome: Result<Answer, StoreError>, cx: &mut Context) {
        let upload = &mut self.uploads[at];
        if upload.state != State::Unproven {
            return;
        }
        let bytes: u64 = upload.done().map(|(unit, _)| self.units[unit].bytes).sum();
        match outcome {
            // The name holds a token that nobody else has: size and name together are the evidence.
            Ok(Answer::Object(object)) if object.bytes == bytes => self.commit(at, cx),
            Ok(Answer::Object(object)) => {
                let kind = StoreErrorKind::WrongSize { expected: bytes, found: object.bytes };
                let url = &cx.policy.buckets()[upload.bucket.0].url;
                self.error = Some(StoreError::new(Operation::Complete, url, &upload.name, kind));
                self.replace(at, cx);
            }
            Ok(_) => self.control_failed(at, &self.odd_answer(at, Operation::Head), cx),
            Err(error) if error.is_not_found() => {
                upload.polls += 1;
                let pause = cx.policy.backoff(upload.polls);
                let upload = &mut self.uploads[at];
                let waited = upload.unproven_since.is_some_and(|since| cx.now >= since + COMPLETE_ECHO);
                if upload.gone {
                    // Neither upload nor object: the bytes are lost there.
                    upload.uncertain = false;
                    self.replace(at, cx);
                } else if upload.polls < POLLS_MIN || !waited {
                    upload.retry_at = Some(cx.now + pause);
                } else {
                    // The Complete never arrived, or failed: what is left of the upload says how to go on.
                    upload.state = if upload.rules.list_parts { State::Repairing } else { State::Completing };
                    let since = upload.since;
                    upload.restart();
                    upload.since = since;
                }
            }
            Err(error) => self.control_failed(at, &error, cx),
        }
    }

    fn listed(&mut self, at: usize, outcome: Result<Answer, StoreError>, cx: &mut Context) {
        if self.uploads[at].state != State::Repairing {
            return;
        }
        match outcome {
            Ok(Answer::Parts(parts)) => self.repair(at, &parts, cx),
            Ok(_) => self.control_failed(at, &self.odd_answer(at, Operation::ListParts), cx),
            Err(error) if *error.kind() == StoreErrorKind::NoSuchUpload => {
                self.uploads[at].uncertain = true;
                self.look(at, true, cx);
            }
            Err(error) => self.control_failed(at, &error, cx),
        }
    }

    /// Believes the store about what it has, and sends what it lacks.
    fn repair(&mut self, at: usize, listed: &[ListedPart], cx: &mut Context) {
        let by_number: BTreeMap<u32, &ListedPart> = listed.iter().map(|part| (part.number, part)).collect();
        let mut missing = Vec::new();
        let upload = &mut self.uploads[at];
        let mut mended = upload.unsettled;
        upload.unsettled = false;
        for (index, slot) in upload.slots.iter_mut().enumerate() {
            let SlotState::Done { number, tag } = &mut slot.state else { continue };
            let bytes = self.units[slot.unit].bytes;
            match by_number.get(number).filter(|part| part.bytes == bytes) {
                Some(part) if part.tag == *tag => {}
                Some(part) => {
                    *tag = part.tag.clone();
                    mended = true;
                }
                None => missing.push(index),
            }
        }
        // All is there as named, and the store had refused it: it will again.
        if missing.is_empty() && !mended && upload.repairs > 1 {
            return self.replace(at, cx);
        }
        let released = missing.iter().any(|index| self.units[upload.slots[*index].unit].released);
        if !missing.is_empty() && (!upload.rules.sparse || released) {
            return self.replace(at, cx);
        }
        for index in missing {
            let unit = upload.slots[index].unit;
            upload.slots[index] = Slot::new(unit);
            upload.resolved = upload.resolved.min(index);
        }
        upload.state = State::Open;
        upload.restart();
        self.changed = true;
    }

    /// Tries a control request again later, or gives the upload up.
    fn control_failed(&mut self, at: usize, error: &StoreError, cx: &mut Context) {
        let bucket = self.uploads[at].bucket;
        let fatal = self.judge_error(bucket, error, cx);
        if self.phase != Phase::Writing || self.uploads[at].state == State::Abandoned {
            return;
        }
        if fatal {
            if !self.fail_if_nowhere_left(error, cx) {
                self.replace(at, cx);
            }
            return;
        }
        self.uploads[at].failures += 1;
        let pause = cx.policy.backoff(self.uploads[at].failures);
        self.uploads[at].retry_at = Some(cx.now + pause);
    }

    fn odd_answer(&self, at: usize, operation: Operation) -> StoreError {
        StoreError::new(operation, "", &self.uploads[at].name, StoreErrorKind::Interrupted)
    }
}

impl Upload {
    /// The units that it holds, with their part numbers.
    pub(super) fn done(&self) -> impl Iterator<Item = (usize, u32)> {
        self.slots.iter().filter_map(|slot| match slot.state {
            SlotState::Done { number, .. } => Some((slot.unit, number)),
            _ => None,
        })
    }

    fn unresolved(&self) -> impl Iterator<Item = &Slot> {
        self.slots[self.resolved..].iter().filter(|slot| !slot.is_resolved())
    }

    /// What a Complete names, by number.
    fn parts(&self) -> Vec<UploadedPart> {
        let done = self.slots.iter().filter_map(|slot| match &slot.state {
            SlotState::Done { number, tag } => Some(UploadedPart { number: *number, tag: tag.clone() }),
            _ => None,
        });
        let mut parts: Vec<_> = done.collect();
        parts.sort_by_key(|part| part.number);
        parts
    }

    /// A new state begins.
    fn restart(&mut self) {
        self.retry_at = None;
        self.failures = 0;
        self.since = None;
        self.races = 0;
        self.race_at = None;
    }
}

/// The number of parts that a tag tells of, as S3 writes it: `<hash>-<parts>`.
fn parts_of(tag: &EntityTag) -> Option<usize> {
    let (hash, count) = tag.0.rsplit_once('-')?;
    let is_hash = hash.len() == 32 && hash.bytes().all(|byte| byte.is_ascii_hexdigit());
    if is_hash { count.parse().ok() } else { None }
}
