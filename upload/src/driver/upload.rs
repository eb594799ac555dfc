//! One object being written: a task that owns its machine and its bytes, and an inbox through which the caller and the
//! requests speak to it.
//!
//! Invariants:
//! 1. Every callback is called once: with its outcome, or, when the task is dropped, with
//!    [`ShutDown`](StoreErrorKind::ShutDown).
//! 2. The bytes of a put are counted until all its chunks are released and no request holds them.
//! 3. Events reach the machine in the order in which they came into the inbox; actions are carried out in the machine's.
#![forbid(unsafe_code)]

use std::collections::{HashMap, VecDeque};
use std::future::Future;
use std::mem;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use bytes::Bytes;
use tracing::Instrument;

use super::answer::Answer;
use super::attempt::Cancel;
use super::timers::Sleep;
use super::{Core, What};
use crate::bucket::BucketIndex;
use crate::chunk::Chunker;
use crate::metrics;
use crate::multipart::{self, Action, AttemptId, Event, ObjectMachine, Placement, Request};
use crate::store::{Body, BoxFuture, Lane, Operation, Store, StoreError, StoreErrorKind, UploadRef};

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
        ObjectMachine::new(name.to_owned(), deadline, now, &mut core.policy())
    };
    let number = core.random_u64();
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
        requests: HashMap::new(),
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

/// What the task of an object is told.
enum Input {
    Put(Vec<Bytes>, Arc<Charge>),
    Finish {
        last: Vec<Bytes>,
        charge: Arc<Charge>,
        done: Answer<Result<Placement, StoreError>>,
        settled: Answer<bool>,
    },
    Abort(Option<Answer<bool>>),
    Step(Event),
}

/// What the task of an object has yet to hear.
#[derive(Default)]
pub(super) struct Inbox(Mutex<InboxState>);

#[derive(Default)]
struct InboxState {
    inputs: VecDeque<Input>,
    /// Whether time or connections are to be looked at.
    tick: bool,
    waker: Option<Waker>,
    closed: bool,
}

impl Inbox {
    fn lock(&self) -> MutexGuard<'_, InboxState> {
        // Nothing that can panic runs under this lock.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, input: Input) {
        self.change(|state| state.inputs.push_back(input));
    }

    /// Says that connections have become free.
    fn tick(&self) {
        self.change(|state| state.tick = true);
    }

    fn change(&self, change: impl FnOnce(&mut InboxState)) {
        let mut state = self.lock();
        if state.closed {
            // What `change` owns is dropped after the lock.
            drop(state);
            return;
        }
        change(&mut state);
        let waker = state.waker.take();
        drop(state);
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    fn pop(&self) -> Option<Input> {
        let mut state = self.lock();
        if mem::take(&mut state.tick) {
            return Some(Input::Step(Event::Tick));
        }
        state.inputs.pop_front()
    }

    fn close(&self) {
        let mut state = self.lock();
        state.closed = true;
        let unheard = mem::take(&mut state.inputs);
        let waker = state.waker.take();
        drop(state);
        // Foreign code: the drops answer.
        drop(unheard);
        drop(waker);
    }
}

impl std::fmt::Debug for Inbox {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Inbox").field("inputs", &self.lock().inputs.len()).finish_non_exhaustive()
    }
}

/// Until there is an input, or until the time, if any.
struct Waiting<'a> {
    inbox: &'a Inbox,
    sleep: Option<Sleep>,
}

impl Future for Waiting<'_> {
    type Output = Wake;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Wake> {
        let mut state = self.inbox.lock();
        if state.tick || !state.inputs.is_empty() {
            return Poll::Ready(Wake::Input);
        }
        let replaced = state.waker.replace(context.waker().clone());
        drop(state);
        drop(replaced);
        match &mut self.sleep {
            Some(sleep) => Pin::new(sleep).poll(context).map(|()| Wake::Time),
            None => Poll::Pending,
        }
    }
}

enum Wake {
    Input,
    Time,
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
    requests: HashMap<AttemptId, Running>,
    /// What ended the object on this side of the machine.
    failure: Option<StoreError>,
    outcome: Option<Result<Placement, StoreError>>,
    leftovers: Option<bool>,
    done: Option<Answer<Result<Placement, StoreError>>>,
    settled: Option<Answer<bool>>,
    /// Whether the caller is gone: it has finished or aborted the object.
    orphaned: bool,
}

/// A request under way.
struct Running {
    cancel: Cancel,
    lane: Lane,
}

impl Object {
    async fn run(mut self) {
        loop {
            while let Some(input) = self.inbox.pop() {
                // Stores that never wait would otherwise go on after the shutdown, within one poll.
                if self.core.executor.is_closed() {
                    return;
                }
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
                    Event::Ended { attempt, outcome } => {
                        let running = self.requests.remove(attempt);
                        if outcome.is_ok() && running.is_some_and(|running| running.lane == Lane::Hedge) {
                            metrics::hedges("won", 1);
                        }
                        true
                    }
                    _ => false,
                };
                self.step(event);
                if ended {
                    self.tick_others();
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
        self.chunks.insert(self.chunks_cut, Arc::new(Chunk { body, shares }));
        self.chunks_cut += 1;
        self.step(Event::Chunk { bytes, last });
    }

    /// Lets the machine take an event, and does what it says.
    fn step(&mut self, event: Event) {
        let mut actions = mem::take(&mut self.actions);
        let now = self.core.timers.now();
        self.machine.step(event, now, &mut self.core.policy(), &mut actions);
        self.core.policy_changed();
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
                if let Some(running) = self.requests.get(&attempt) {
                    running.cancel.cancel();
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
        let cancel = Cancel::default();
        self.requests.insert(attempt, Running { cancel: cancel.clone(), lane });
        if lane == Lane::Hedge {
            core.counters.hedges.fetch_add(1, Relaxed);
            metrics::hedges("issued", 1);
        }
        let held: Option<Vec<Arc<Chunk>>> =
            chunks_of(&request).map(|chunk| self.chunks.get(&chunk).map(Arc::clone)).collect();
        let operation = operation_of(&request);
        let Some(held) = held else {
            let what = What::control(bucket, operation, &name);
            tracing::error!(object = self.name, "bytes that were let go are to be sent");
            let outcome = Err(core.error(what, StoreErrorKind::Latched));
            return inbox.push(Input::Step(Event::Ended { attempt, outcome }));
        };
        let span = tracing::debug_span!(
            parent: &self.span,
            "request",
            bucket = core.labels[bucket.0].as_ref(),
            %operation,
            name,
            attempt = attempt.0,
            ?lane,
        );
        let task = async move {
            let body = body_of(&held);
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
        for running in self.requests.values() {
            running.cancel.cancel();
        }
    }
}

/// Bytes of the object that are sent together.
struct Chunk {
    body: Body,
    /// The puts that they came from, and how many bytes of each.
    shares: Vec<(Arc<Charge>, u64)>,
}

impl Chunk {
    fn release(&self) {
        for (charge, share) in &self.shares {
            charge.released.fetch_add(*share, Relaxed);
        }
    }
}

/// The bytes of one put, counted until this is dropped, which answers the put.
#[derive(Debug)]
struct Charge {
    core: Arc<Core>,
    bytes: u64,
    released: AtomicU64,
    failure: OnceLock<StoreError>,
    answer: Option<Answer<Result<(), StoreError>>>,
}

impl Charge {
    fn new(
        core: &Arc<Core>,
        slices: &[Bytes],
        answer: Option<Answer<Result<(), StoreError>>>,
    ) -> Arc<Charge> {
        let bytes = slices.iter().map(|slice| slice.len() as u64).sum();
        core.counters.hold(bytes);
        metrics::memory(bytes as i64);
        Arc::new(Charge {
            core: Arc::clone(core),
            bytes,
            released: AtomicU64::new(0),
            failure: OnceLock::new(),
            answer,
        })
    }

    fn fail(&self, error: &StoreError) {
        let _ = self.failure.set(error.clone());
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.core.counters.memory.fetch_sub(self.bytes, Relaxed);
        metrics::memory(-(self.bytes as i64));
        let Some(answer) = self.answer.take() else { return };
        match self.failure.take() {
            Some(error) => answer.give(Err(error)),
            None if *self.released.get_mut() == self.bytes => answer.give(Ok(())),
            // Cut off by the shutdown, which the answer says by its own drop.
            None => {}
        }
    }
}

fn chunks_of(request: &Request) -> std::ops::Range<u32> {
    match request {
        Request::Put { chunks } => chunks.clone(),
        Request::Part { chunk, .. } => *chunk..chunk.saturating_add(1),
        _ => 0..0,
    }
}

fn operation_of(request: &Request) -> Operation {
    match request {
        Request::Put { .. } => Operation::Put,
        Request::Create => Operation::Create,
        Request::Part { .. } => Operation::PutPart,
        Request::Complete { .. } => Operation::Complete,
        Request::ListParts { .. } => Operation::ListParts,
        Request::Abort { .. } => Operation::Abort,
        Request::Head => Operation::Head,
        Request::Delete => Operation::Delete,
    }
}

fn body_of(chunks: &[Arc<Chunk>]) -> Body {
    match chunks {
        [chunk] => chunk.body.clone(),
        _ => Body::new(chunks.iter().flat_map(|chunk| chunk.body.slices()).cloned().collect()),
    }
}

/// The request as a call of the store.
fn call(
    store: Arc<dyn Store>,
    name: String,
    request: Request,
    body: Body,
    lane: Lane,
) -> BoxFuture<'static, Result<multipart::Answer, StoreError>> {
    use multipart::Answer;
    Box::pin(async move {
        let reference = |id| UploadRef { name: &name, id };
        match &request {
            Request::Put { .. } => store.put(&name, body, lane).await.map(Answer::Tag),
            Request::Create => store.create(&name).await.map(Answer::Created),
            Request::Part { upload, number, .. } => {
                store.put_part(reference(upload), *number, body, lane).await.map(Answer::Tag)
            }
            Request::Complete { upload, parts } => {
                store.complete(reference(upload), parts).await.map(Answer::Tag)
            }
            Request::ListParts { upload } => store.list_parts(reference(upload)).await.map(Answer::Parts),
            Request::Abort { upload } => store.abort(reference(upload)).await.map(|()| Answer::Done),
            Request::Head => store.head(&name).await.map(Answer::Object),
            Request::Delete => store.delete(&name).await.map(|()| Answer::Done),
        }
    })
}
