//! One object being written: a task that owns its machine and its bytes, and an inbox through which the caller and the
//! requests speak to it.
//!
//! Invariants:
//! 1. Every callback is called once: with its outcome, or, when the task is dropped, with
//!    [`ShutDown`](StoreErrorKind::ShutDown).
//! 2. The bytes of a put are counted until all its chunks are released and no request holds them.
//! 3. Events reach the machine in the order in which they came into the inbox; actions are carried out in the machine's.
#![forbid(unsafe_code)]

mod call;
mod held;
mod inbox;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::mem;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use bytes::Bytes;
use tracing::Instrument;

use self::call::{body_of, call, chunks_of, operation_of};
use self::held::{Charge, Chunk};
pub(super) use self::inbox::Inbox;
use self::inbox::{Input, Waiting, Wake};
use super::answer::Answer;
use super::attempt::Cancel;
use super::{Core, What};
use crate::bucket::BucketIndex;
use crate::chunk::Chunker;
use crate::multipart::{Action, AttemptId, Event, ObjectMachine, Placement, Request};
use crate::store::{Body, Lane, Operation, StoreError, StoreErrorKind};
use crate::wire::Wire;

/// An object being written, see [`Driver::upload`](super::Driver::upload). Dropping it aborts the upload.
#[derive(Debug)]
pub struct ObjectUpload {
    core: Arc<Core>,
    inbox: Arc<Inbox>,
    name: String,
    /// Finished or aborted: nothing left for the drop to do.
    ended: bool,
}

impl ObjectUpload {
    /// The name of the object.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Appends the concatenation of `bytes` to the object. Never waits. `done` is called when these bytes are not in
    /// memory any more: with `Ok` they are in a bucket or where the object's outcome does not need them, with an error
    /// the object has failed.
    pub fn put(&mut self, bytes: Vec<Bytes>, done: impl FnOnce(Result<(), StoreError>) + Send + 'static) {
        let answer = self.core.answer(BucketIndex(0), Operation::Put, &self.name, done);
        let charge = Charge::new(&self.core, &bytes, Some(answer));
        self.send(Input::Put(bytes, charge));
    }

    /// Says that a persist waits for the object, until `deadline` at most: from here on what is late is raced, and without
    /// a commit by then the object fails.
    pub fn wanted(&mut self, deadline: Option<Instant>) {
        self.send(Input::Step(Event::Wanted { deadline }));
    }

    /// Appends the last bytes and commits the object. `done` hears where it is once that is proven, or why there is none;
    /// after that, when nothing of it is under way any more, `settled` hears whether something beside the placement may
    /// be left in the buckets, under names that start with the object's.
    pub fn finish(
        mut self,
        last: Vec<Bytes>,
        done: impl FnOnce(Result<Placement, StoreError>) + Send + 'static,
        settled: impl FnOnce(bool) + Send + 'static,
    ) {
        self.ended = true;
        let charge = Charge::new(&self.core, &last, None);
        let done = self.core.answer(BucketIndex(0), Operation::Complete, &self.name, done);
        self.send(Input::Finish { last, charge, done, settled: Answer::new(true, settled) });
    }

    /// Gives the object up. `settled` hears, when nothing of it is under way any more, whether something may be left.
    pub fn abort(mut self, settled: impl FnOnce(bool) + Send + 'static) {
        self.ended = true;
        self.send(Input::Abort(Some(Answer::new(true, settled))));
    }

    fn send(&self, input: Input) {
        self.inbox.push(input);
        self.core.executor.run();
    }
}

impl Drop for ObjectUpload {
    fn drop(&mut self) {
        if !self.ended {
            self.send(Input::Abort(None));
        }
    }
}

/// Starts the task of an object.
pub(super) fn start(core: &Arc<Core>, name: &str, deadline: Option<Instant>) -> ObjectUpload {
    let inbox = Arc::new(Inbox::default());
    let machine = {
        let now = core.timers.now();
        ObjectMachine::new(name.to_owned(), deadline, now)
    };
    let number = core.uploads_begun.fetch_add(1, Relaxed);
    core.uploads().insert(number, Arc::clone(&inbox));
    let span = tracing::debug_span!("object", name);
    let object = Object {
        core: Arc::clone(core),
        number,
        inbox: Arc::clone(&inbox),
        name: name.to_owned(),
        span: span.clone(),
        machine,
        actions: Vec::new(),
        chunker: Some(Chunker::new(core.sizes)),
        uncut: VecDeque::new(),
        chunks: HashMap::new(),
        chunks_cut: 0,
        requests: BTreeMap::new(),
        failure: None,
        outcome: None,
        leftovers: None,
        done: None,
        settled: None,
        orphaned: false,
    };
    core.executor.spawn(object.run().instrument(span));
    ObjectUpload { core: Arc::clone(core), inbox, name: name.to_owned(), ended: false }
}

/// A request of an object, seen from outside.
#[derive(Clone, Default)]
struct Underway {
    cancel: Cancel,
    wire: Wire,
}

/// The task of an object.
struct Object {
    core: Arc<Core>,
    number: u64,
    inbox: Arc<Inbox>,
    name: String,
    span: tracing::Span,
    machine: ObjectMachine,
    /// Empty between steps; kept for its memory.
    actions: Vec<Action>,
    /// `None` after the last chunk.
    chunker: Option<Chunker>,
    /// What of the puts is not in a chunk yet, in bytes.
    uncut: VecDeque<(Arc<Charge>, u64)>,
    /// The chunks not released.
    chunks: HashMap<u32, Arc<Chunk>>,
    chunks_cut: u32,
    /// Those whose end the machine has not heard of.
    requests: BTreeMap<AttemptId, Underway>,
    /// What ended the object on this side of the machine.
    failure: Option<StoreError>,
    outcome: Option<Result<Placement, StoreError>>,
    leftovers: Option<bool>,
    done: Option<Answer<Result<Placement, StoreError>>>,
    settled: Option<Answer<bool>>,
    /// Whether the caller is gone: it has finished or aborted the object.
    orphaned: bool,
}

impl Object {
    async fn run(mut self) {
        loop {
            while let Some(input) = self.inbox.pop() {
                self.take(input);
            }
            if self.orphaned && self.leftovers.is_some() {
                return;
            }
            let sleep = self.machine.deadline().map(|deadline| self.core.timers.sleep_until(deadline));
            if let Wake::Time = (Waiting { inbox: &self.inbox, sleep }).await {
                self.step(Event::Tick);
            }
        }
    }

    fn take(&mut self, input: Input) {
        match input {
            Input::Put(bytes, charge) => self.put(bytes, charge),
            Input::Finish { last, charge, done, settled } => {
                self.orphaned = true;
                self.done = Some(done);
                self.settled = Some(settled);
                self.put(last, charge);
                if self.failed().is_none()
                    && let Some(chunker) = self.chunker.take()
                {
                    self.chunk(chunker.last(), true);
                }
                self.tell();
            }
            Input::Abort(settled) => {
                self.orphaned = true;
                self.settled = settled;
                self.step(Event::Abort);
                self.tell();
            }
            Input::Step(event) => {
                let ended = match &event {
                    Event::Ended { attempt, .. } => Some(*attempt),
                    _ => None,
                };
                self.step(event);
                if let Some(attempt) = ended {
                    self.requests.remove(&attempt);
                }
            }
        }
    }

    fn put(&mut self, bytes: Vec<Bytes>, charge: Arc<Charge>) {
        if let Some(error) = self.failed() {
            charge.fail(error);
            return;
        }
        let Some(chunker) = &mut self.chunker else { return };
        chunker.push(bytes);
        let len = charge.bytes;
        self.uncut.push_back((charge, len));
        while self.failed().is_none()
            && let Some(chunker) = &mut self.chunker
        {
            match chunker.full() {
                Ok(Some(slices)) => self.chunk(slices, false),
                Ok(None) => break,
                Err(cause) => {
                    let url = self.core.stores[0].url();
                    self.failure = Some(StoreError::failed(Operation::Put, url, &self.name, false, cause));
                    self.step(Event::Abort);
                }
            }
        }
    }

    /// Why the object cannot succeed any more.
    fn failed(&self) -> Option<&StoreError> {
        self.failure.as_ref().or(self.outcome.as_ref().and_then(|outcome| outcome.as_ref().err()))
    }

    /// Takes the next chunk of the object.
    fn chunk(&mut self, slices: Vec<Bytes>, last: bool) {
        let body = Body::new(slices);
        let bytes = body.len();
        let mut shares = Vec::new();
        let mut left = bytes;
        while let Some((charge, uncut)) = self.uncut.front_mut() {
            let share = left.min(*uncut);
            *uncut -= share;
            left -= share;
            shares.push((Arc::clone(charge), share));
            if *uncut > 0 {
                break;
            }
            self.uncut.pop_front();
        }
        let span = tracing::debug_span!(parent: &self.span, "part", index = self.chunks_cut, bytes);
        self.chunks.insert(self.chunks_cut, Arc::new(Chunk { body, shares, span }));
        self.chunks_cut += 1;
        self.step(Event::Chunk { bytes, last });
    }

    /// Lets the machine take an event, and does what it says.
    fn step(&mut self, event: Event) {
        let mut actions = mem::take(&mut self.actions);
        let now = self.core.timers.now();
        let connections_freed = {
            let mut policy = self.core.policy();
            if self.core.options.heeds_progress() {
                for (attempt, request) in &self.requests {
                    if let Some(acknowledged) = request.wire.taken_bytes() {
                        let progress = Event::Progress { attempt: *attempt, acknowledged };
                        self.machine.step(progress, now, &mut policy, &mut actions);
                    }
                }
            }
            self.machine.step(event, now, &mut policy, &mut actions);
            policy.connections_freed()
        };
        self.core.policy_changed();
        if connections_freed {
            self.tick_others();
        }
        for action in actions.drain(..) {
            self.act(action);
        }
        self.actions = actions;
    }

    fn act(&mut self, action: Action) {
        match action {
            Action::Start { attempt, bucket, name, request, lane, timeout } => {
                self.start(attempt, bucket, name, request, lane, timeout);
            }
            Action::Cancel { attempt } => {
                if let Some(request) = self.requests.get(&attempt) {
                    request.cancel.cancel();
                }
            }
            Action::Retire { attempt } => {
                if let Some(request) = self.requests.get(&attempt) {
                    request.wire.retire();
                }
            }
            Action::Stored { .. } => {}
            Action::Release { chunk } => {
                if let Some(chunk) = self.chunks.remove(&chunk) {
                    chunk.release();
                }
            }
            Action::Finished(outcome) => {
                let outcome = outcome.map_err(|error| self.failure.take().unwrap_or(error));
                if let Ok(placement) = &outcome {
                    self.core.counters.objects.fetch_add(1, Relaxed);
                    tracing::debug!(bytes = placement.bytes, pieces = placement.pieces.len(), "complete");
                }
                self.outcome = Some(outcome);
                self.let_go();
                self.tell();
            }
            Action::Settled { leftovers } => {
                self.leftovers = Some(leftovers);
                self.tell();
            }
        }
    }

    /// Lets go of all bytes: the outcome is known.
    fn let_go(&mut self) {
        let chunks = mem::take(&mut self.chunks);
        let uncut = mem::take(&mut self.uncut);
        match self.failed() {
            Some(error) => {
                for (charge, _) in chunks.values().flat_map(|chunk| &chunk.shares).chain(&uncut) {
                    charge.fail(error);
                }
            }
            None => {
                for chunk in chunks.values() {
                    chunk.release();
                }
            }
        }
        self.chunker = None;
    }

    /// Answers whoever can be answered.
    fn tell(&mut self) {
        let Some(outcome) = &self.outcome else { return };
        if let Some(done) = self.done.take() {
            done.give(outcome.clone());
        }
        if let Some(leftovers) = self.leftovers
            && let Some(settled) = self.settled.take()
        {
            settled.give(leftovers);
        }
    }

    fn start(
        &mut self,
        attempt: AttemptId,
        bucket: BucketIndex,
        name: String,
        request: Request,
        lane: Lane,
        timeout: Duration,
    ) {
        let core = Arc::clone(&self.core);
        let inbox = Arc::clone(&self.inbox);
        let Underway { cancel, wire } = self.requests.entry(attempt).or_default().clone();
        let held: Option<Vec<Arc<Chunk>>> =
            chunks_of(&request).map(|chunk| self.chunks.get(&chunk).map(Arc::clone)).collect();
        let operation = operation_of(&request);
        let Some(held) = held else {
            let what = What::control(bucket, operation, &name);
            tracing::error!(object = self.name, "bytes that were let go are to be sent");
            let outcome = Err(core.error(what, StoreErrorKind::Latched));
            return inbox.push(Input::Step(Event::Ended { attempt, outcome }));
        };
        let parent = match &held[..] {
            [part] => &part.span,
            _ => &self.span,
        };
        let span = tracing::debug_span!(
            parent: parent,
            "request",
            bucket = core.labels[bucket.0].as_ref(),
            %operation,
            name,
            attempt = attempt.0,
            ?lane,
        );
        let task = async move {
            let body = body_of(&held).with_wire(wire);
            let what = What { bucket, operation, name: &name, bytes: body.len() };
            let future = call(Arc::clone(core.store(bucket)), name.clone(), request, body, lane);
            let outcome = core.attempt(what, lane, timeout, cancel, future).await;
            if let Err(error) = &outcome {
                tracing::debug!(%error, "failed");
            }
            // The bytes may be counted up to here.
            drop(held);
            inbox.push(Input::Step(Event::Ended { attempt, outcome }));
        };
        self.core.executor.spawn(task.instrument(span));
    }

    /// Lets the other objects look for free connections.
    fn tick_others(&self) {
        let others: Vec<_> = self
            .core
            .uploads()
            .iter()
            .filter(|(number, _)| **number != self.number)
            .map(|(_, inbox)| Arc::clone(inbox))
            .collect();
        for inbox in others {
            inbox.tick();
        }
    }
}

impl Drop for Object {
    fn drop(&mut self) {
        self.core.uploads().remove(&self.number);
        self.inbox.close();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Instant;

    use crate::driver::Driver;
    use crate::options::UploadOptions;
    use crate::sim::SimStore;
    use crate::store::Store;

    #[test]
    fn nothing_is_remembered_of_objects_that_ended() {
        let stores: Vec<Arc<dyn Store>> = vec![Arc::new(SimStore::new(1))];
        let driver = Driver::inline(stores, UploadOptions::default(), Arc::new(Instant::now)).unwrap();
        let tasks = driver.core.executor.tasks_known();
        for number in 0..10 {
            let mut upload = driver.upload(&number.to_string(), None);
            upload.put(vec!["bytes".into()], |outcome| outcome.unwrap());
            assert!(driver.core.uploads().len() == 1 && driver.core.executor.tasks_known() > tasks);
            if number % 2 == 0 {
                upload.finish(Vec::new(), |outcome| drop(outcome.unwrap()), |leftovers| assert!(!leftovers));
            } else {
                drop(upload);
            }
        }
        assert!(driver.core.uploads().is_empty());
        assert_eq!(driver.core.executor.tasks_known(), tasks);
    }
}
