//! Runs the operations of a [`Store`] for callers that are not async, and tells them by callback how each ended.
//!
//! Which object is written when, how many bytes may be in flight and what a failure means is the caller's business;
//! retries and time limits are not here either. The queue of an upload is bounded by its caller, who counts the bytes it
//! put until `done` is called for them.
//!
//! Callbacks run on the driver's threads (with [`Driver::inline`], on the calling thread, before the call returns), with
//! none of the driver's locks held, exactly once each, also after a shutdown. They must not block or panic.
//!
//! Counters: `tidelog_store_requests_total` by `operation` and `outcome` (`ok`, `error`), `tidelog_store_bytes_total` by
//! `direction` (`put`, `get`).
#![forbid(unsafe_code)]

use std::collections::{HashMap, VecDeque};
use std::future::Future;
use std::io;
use std::mem;
use std::ops::Range;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio::runtime::{Handle, RuntimeFlavor};

pub use crate::pending::{Abandoned, Pending, Resolver, channel};
use crate::store::{BoxFuture, ObjectSink, Operation, Store, StoreError, StoreErrorKind};

/// The most threads of an own runtime that may block in a local file system at a time.
const BLOCKING_THREADS_MAX: usize = 64;

/// Where a driver runs.
#[derive(Clone, Debug)]
pub enum Runtime {
    /// On a small runtime of its own, with this many threads (at least one).
    Own {
        /// Number of worker threads.
        threads: usize,
    },
    /// On the caller's multi-thread runtime.
    Handle(Handle),
}

/// Why a driver could not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DriverError {
    /// The handle belongs to a current-thread runtime, where a task that waits for an upload would wait for itself.
    #[error(
        "uploads cannot run on a current-thread tokio runtime: they would deadlock with the task that waits for them; \
         pass the handle of a multi-thread runtime, or let tidelog start its own"
    )]
    CurrentThreadRuntime,
    /// The threads could not be started.
    #[error("the threads for uploads could not be started; check the limits on threads and memory")]
    Start(#[source] io::Error),
}

/// What a driver has done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DriverStats {
    /// Operations that ended, with success or without.
    pub requests: u64,
    /// Operations that ended without success.
    pub failures: u64,
    /// Bytes in parts that the store has taken.
    pub bytes_put: u64,
    /// Bytes read.
    pub bytes_got: u64,
    /// Objects proven complete.
    pub objects: u64,
}

/// Runs the operations of one store.
///
/// ```
/// use tidelog_upload::{Driver, Runtime, channel, open_store};
///
/// let driver = Driver::start(open_store("memory://")?, Runtime::Own { threads: 1 })?;
/// let mut upload = driver.upload("checkpoints/1");
/// upload.put(vec!["some ".into(), "bytes".into()], |_| {});
/// let (resolver, size) = channel();
/// upload.complete(|outcome| resolver.resolve(outcome));
/// assert_eq!(size.wait()??, 10);
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Driver {
    core: Arc<Core>,
    /// The own runtime, until the shutdown.
    runtime: Mutex<Option<tokio::runtime::Runtime>>,
}

impl Driver {
    /// A driver on a runtime.
    ///
    /// # Errors
    /// A current-thread handle, or threads that cannot be started.
    pub fn start(store: Arc<dyn Store>, runtime: Runtime) -> Result<Driver, DriverError> {
        let (own, handle) = match runtime {
            Runtime::Own { threads } => {
                let own = tokio::runtime::Builder::new_multi_thread()
                    .worker_threads(threads.max(1))
                    .max_blocking_threads(BLOCKING_THREADS_MAX)
                    .thread_name("tidelog-upload")
                    .build()
                    .map_err(DriverError::Start)?;
                let handle = own.handle().clone();
                (Some(own), handle)
            }
            Runtime::Handle(handle) if handle.runtime_flavor() == RuntimeFlavor::CurrentThread => {
                return Err(DriverError::CurrentThreadRuntime);
            }
            Runtime::Handle(handle) => (None, handle),
        };
        Ok(Driver { core: Core::new(store, Executor::Tokio(handle)), runtime: Mutex::new(own) })
    }

    /// A driver without threads: every operation runs on the calling thread and has ended, its callback called, when the
    /// call returns. For simulations in one thread and for tools.
    #[must_use]
    pub fn inline(store: Arc<dyn Store>) -> Driver {
        Driver { core: Core::new(store, Executor::Inline), runtime: Mutex::new(None) }
    }

    /// The store.
    #[must_use]
    pub fn store(&self) -> &Arc<dyn Store> {
        &self.core.store
    }

    /// What was done so far.
    #[must_use]
    pub fn stats(&self) -> DriverStats {
        let counters = &self.core.counters;
        DriverStats {
            requests: counters.requests.load(Relaxed),
            failures: counters.failures.load(Relaxed),
            bytes_put: counters.bytes_put.load(Relaxed),
            bytes_got: counters.bytes_got.load(Relaxed),
            objects: counters.objects.load(Relaxed),
        }
    }

    /// An object to be written. The store hears of it with the first part.
    #[must_use = "dropping an upload aborts it"]
    pub fn upload(&self, name: &str) -> ObjectUpload {
        ObjectUpload {
            shared: Arc::new(UploadShared {
                core: Arc::clone(&self.core),
                name: name.to_owned(),
                state: Mutex::new(UploadState { queue: VecDeque::new(), idle: Some(Progress::default()) }),
            }),
            settled: false,
        }
    }

    /// Reads a range of an object, see [`Store::get`].
    pub fn get(
        &self,
        name: &str,
        range: Range<u64>,
        done: impl FnOnce(Result<Bytes, StoreError>) + Send + 'static,
    ) {
        self.run(Operation::Get, name, done, move |store, name| {
            Box::pin(async move { store.get(&name, range).await })
        });
    }

    /// The size of an object in bytes, see [`Store::size`].
    pub fn size(&self, name: &str, done: impl FnOnce(Result<u64, StoreError>) + Send + 'static) {
        self.run(Operation::Size, name, done, |store, name| Box::pin(async move { store.size(&name).await }));
    }

    /// Deletes an object, see [`Store::delete`].
    pub fn delete(&self, name: &str, done: impl FnOnce(Result<(), StoreError>) + Send + 'static) {
        self.run(Operation::Delete, name, done, |store, name| {
            Box::pin(async move { store.delete(&name).await })
        });
    }

    /// The objects whose names start with `prefix`, see [`Store::list`].
    pub fn list(
        &self,
        prefix: &str,
        done: impl FnOnce(Result<Vec<(String, u64)>, StoreError>) + Send + 'static,
    ) {
        self.run(Operation::List, prefix, done, |store, prefix| {
            Box::pin(async move { store.list(&prefix).await })
        });
    }

    /// Gives up whatever has not ended: its callbacks are called with [`StoreErrorKind::ShutDown`], soon, from another
    /// thread. Waits for nothing. A caller that wants its uploads finished waits for them first. Also done on drop.
    pub fn shutdown(&self) {
        self.core.shutdown.close();
        let own = self.runtime.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(own) = own {
            own.shutdown_background();
        }
    }

    /// Runs one operation that stands alone.
    fn run<T: Weight + Send + 'static>(
        &self,
        operation: Operation,
        name: &str,
        done: impl FnOnce(Result<T, StoreError>) + Send + 'static,
        start: impl FnOnce(Arc<dyn Store>, String) -> BoxFuture<'static, Result<T, StoreError>>,
    ) {
        let core = &self.core;
        let answer = Answer::new(core, operation, name, done);
        let future = start(Arc::clone(&core.store), name.to_owned());
        let counting = Arc::clone(core);
        core.spawn(async move {
            let outcome = future.await;
            counting.count(operation, &outcome);
            if let Ok(value) = &outcome {
                counting.count_got(value.weight());
            }
            answer.give(outcome);
        });
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        self.shutdown();
    }
}

/// An object being written, see [`Driver::upload`]. Operations run in the order of the calls, one at a time; the first
/// failure is the outcome of everything after it. Dropping it aborts the upload.
#[derive(Debug)]
pub struct ObjectUpload {
    shared: Arc<UploadShared>,
    /// Completed or aborted: nothing left for the drop to do.
    settled: bool,
}

impl ObjectUpload {
    /// The name of the object.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.shared.name
    }

    /// Adds a part: the concatenation of `part`. Never waits.
    pub fn put(&mut self, part: Vec<Bytes>, done: impl FnOnce(Result<(), StoreError>) + Send + 'static) {
        let answer = Answer::new(&self.shared.core, Operation::Put, &self.shared.name, done);
        self.shared.push(Command::Put(part, answer));
    }

    /// Commits the object after all parts, and proves it; the outcome is its size in bytes, see
    /// [`ObjectSink::complete`]. After an earlier failure the upload is aborted instead, and the outcome is that failure.
    pub fn complete(mut self, done: impl FnOnce(Result<u64, StoreError>) + Send + 'static) {
        self.settled = true;
        let answer = Answer::new(&self.shared.core, Operation::Complete, &self.shared.name, done);
        self.shared.push(Command::Complete(answer));
    }

    /// Gives the object up: parts that wait are dropped ([`StoreErrorKind::Aborted`]), the one on its way is awaited,
    /// and what was written is removed.
    pub fn abort(mut self, done: impl FnOnce(Result<(), StoreError>) + Send + 'static) {
        self.settled = true;
        let answer = Answer::new(&self.shared.core, Operation::Abort, &self.shared.name, done);
        self.shared.abort(Some(answer));
    }
}

impl Drop for ObjectUpload {
    fn drop(&mut self) {
        if !self.settled {
            self.shared.abort(None);
        }
    }
}

/// Runs a future on this thread and returns what it resolves to. Must not be called on an executor's thread.
pub fn block_on<F: Future>(future: F) -> F::Output {
    block_on_until(future, None).expect("without a deadline it is awaited to its end")
}

/// As [`block_on`], but gives up, and drops the future, after `timeout`.
pub fn block_on_timeout<F: Future>(future: F, timeout: Duration) -> Option<F::Output> {
    block_on_until(future, Some(Instant::now() + timeout))
}

fn block_on_until<F: Future>(future: F, deadline: Option<Instant>) -> Option<F::Output> {
    struct Unpark {
        thread: Thread,
        /// Says for which of two nested calls a token is meant.
        woken: AtomicBool,
    }
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.woken.store(true, std::sync::atomic::Ordering::Release);
            self.thread.unpark();
        }
    }

    let mut future = pin!(future);
    let unpark = Arc::new(Unpark { thread: thread::current(), woken: AtomicBool::new(false) });
    let waker = Waker::from(Arc::clone(&unpark));
    let mut context = Context::from_waker(&waker);
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut context) {
            return Some(output);
        }
        while !unpark.woken.swap(false, std::sync::atomic::Ordering::Acquire) {
            match deadline {
                None => thread::park(),
                Some(deadline) => {
                    let left =
                        deadline.checked_duration_since(Instant::now()).filter(|left| !left.is_zero())?;
                    thread::park_timeout(left);
                }
            }
        }
    }
}

#[derive(Debug)]
enum Executor {
    Tokio(Handle),
    Inline,
}

/// What a driver shares with its uploads.
#[derive(Debug)]
struct Core {
    store: Arc<dyn Store>,
    executor: Executor,
    shutdown: Arc<Shutdown>,
    counters: Counters,
}

#[derive(Debug, Default)]
struct Counters {
    requests: AtomicU64,
    failures: AtomicU64,
    bytes_put: AtomicU64,
    bytes_got: AtomicU64,
    objects: AtomicU64,
}

impl Core {
    fn new(store: Arc<dyn Store>, executor: Executor) -> Arc<Core> {
        Arc::new(Core { store, executor, shutdown: Arc::default(), counters: Counters::default() })
    }

    /// Runs the future, or drops it if the driver or the runtime is shut down.
    fn spawn(&self, future: impl Future<Output = ()> + Send + 'static) {
        let task = Cancellable {
            id: self.shutdown.next_id.fetch_add(1, Relaxed),
            shutdown: Arc::clone(&self.shutdown),
            future: Some(Box::pin(future)),
        };
        match &self.executor {
            Executor::Tokio(handle) => drop(handle.spawn(task)),
            Executor::Inline => block_on(task),
        }
    }

    fn count<T>(&self, operation: Operation, outcome: &Result<T, StoreError>) {
        self.counters.requests.fetch_add(1, Relaxed);
        let word = match outcome {
            Ok(_) => "ok",
            Err(_) => {
                self.counters.failures.fetch_add(1, Relaxed);
                "error"
            }
        };
        metrics::counter!("tidelog_store_requests_total", "operation" => operation.name(), "outcome" => word)
            .increment(1);
    }

    fn count_got(&self, bytes: u64) {
        if bytes > 0 {
            self.counters.bytes_got.fetch_add(bytes, Relaxed);
            metrics::counter!("tidelog_store_bytes_total", "direction" => "get").increment(bytes);
        }
    }

    fn count_put(&self, bytes: u64) {
        self.counters.bytes_put.fetch_add(bytes, Relaxed);
        metrics::counter!("tidelog_store_bytes_total", "direction" => "put").increment(bytes);
    }
}

/// How many bytes an answer brought.
trait Weight {
    fn weight(&self) -> u64 {
        0
    }
}

impl Weight for Bytes {
    fn weight(&self) -> u64 {
        self.len() as u64
    }
}

impl Weight for u64 {}
impl Weight for () {}
impl Weight for Vec<(String, u64)> {}

type Done<T> = Box<dyn FnOnce(Result<T, StoreError>) + Send>;

/// A callback that is called exactly once: if nobody answers, its drop says that the driver was shut down.
struct Answer<T> {
    core: Arc<Core>,
    operation: Operation,
    name: String,
    done: Option<Done<T>>,
}

impl<T> Answer<T> {
    fn new(
        core: &Arc<Core>,
        operation: Operation,
        name: &str,
        done: impl FnOnce(Result<T, StoreError>) + Send + 'static,
    ) -> Answer<T> {
        Answer { core: Arc::clone(core), operation, name: name.to_owned(), done: Some(Box::new(done)) }
    }

    fn give(mut self, outcome: Result<T, StoreError>) {
        if let Some(done) = self.done.take() {
            done(outcome);
        }
    }

    fn fail(self, kind: StoreErrorKind) {
        let error = self.error(kind);
        self.give(Err(error));
    }

    fn error(&self, kind: StoreErrorKind) -> StoreError {
        StoreError::new(self.operation, self.core.store.url(), &self.name, kind)
    }
}

impl<T> Drop for Answer<T> {
    fn drop(&mut self) {
        if let Some(done) = self.done.take() {
            done(Err(self.error(StoreErrorKind::ShutDown)));
        }
    }
}

impl<T> std::fmt::Debug for Answer<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Answer({} {})", self.operation, self.name)
    }
}

#[derive(Debug)]
enum Command {
    Put(Vec<Bytes>, Answer<()>),
    Complete(Answer<u64>),
    Abort(Option<Answer<()>>),
}

#[derive(Debug)]
struct UploadShared {
    core: Arc<Core>,
    name: String,
    state: Mutex<UploadState>,
}

#[derive(Debug)]
struct UploadState {
    queue: VecDeque<Command>,
    /// `None` while a [`Turn`] has it, of which there is at most one.
    idle: Option<Progress>,
}

/// How far an upload is.
#[derive(Default)]
struct Progress {
    sink: Option<Box<dyn ObjectSink>>,
    /// The first failure.
    failure: Option<StoreError>,
}

impl std::fmt::Debug for Progress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Progress")
            .field("begun", &self.sink.is_some())
            .field("failure", &self.failure)
            .finish()
    }
}

impl UploadShared {
    fn lock(&self) -> MutexGuard<'_, UploadState> {
        // Nothing that can panic runs under this lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(self: &Arc<Self>, command: Command) {
        let mut state = self.lock();
        state.queue.push_back(command);
        let turn = self.take_turn(&mut state);
        drop(state);
        self.start(turn);
    }

    fn abort(self: &Arc<Self>, answer: Option<Answer<()>>) {
        let mut state = self.lock();
        let given_up = mem::take(&mut state.queue);
        let nothing_begun = state.idle.as_ref().is_some_and(|progress| progress.sink.is_none());
        // With nothing begun there is nothing to do but to answer.
        let (turn, answer) = if nothing_begun {
            (None, answer)
        } else {
            state.queue.push_back(Command::Abort(answer));
            (self.take_turn(&mut state), None)
        };
        drop(state);
        for command in given_up {
            match command {
                Command::Put(part, answer) => {
                    drop(part);
                    answer.fail(StoreErrorKind::Aborted);
                }
                Command::Complete(answer) => answer.fail(StoreErrorKind::Aborted),
                Command::Abort(answer) => drop(answer),
            }
        }
        if let Some(answer) = answer {
            answer.give(Ok(()));
        }
        self.start(turn);
    }

    fn take_turn(self: &Arc<Self>, state: &mut UploadState) -> Option<Turn> {
        let progress = state.idle.take()?;
        Some(Turn { shared: Arc::clone(self), progress: Some(progress) })
    }

    fn start(&self, turn: Option<Turn>) {
        if let Some(turn) = turn {
            self.core.spawn(turn.run());
        }
    }
}

/// The right to work on an upload's queue. It is made before its task, so that a task that is dropped unpolled gives the
/// right back too, and answers for what is queued.
struct Turn {
    shared: Arc<UploadShared>,
    /// `None` once given back.
    progress: Option<Progress>,
}

impl Turn {
    async fn run(mut self) {
        while let Some(command) = self.next() {
            let Some(progress) = &mut self.progress else { return };
            let core = &self.shared.core;
            let name = &self.shared.name;
            match command {
                Command::Put(part, answer) => answer.give(progress.put(core, name, part).await),
                Command::Complete(answer) => answer.give(progress.complete(core, name).await),
                Command::Abort(answer) => {
                    let outcome = progress.abort(core, name).await;
                    if let Some(answer) = answer {
                        answer.give(outcome);
                    }
                }
            }
        }
    }

    /// The next command, or `None` and the right is given back, here or, after a shutdown, by the drop.
    fn next(&mut self) -> Option<Command> {
        // A store that never waits would otherwise go on after the shutdown, within one poll.
        if self.shared.core.shutdown.lock().closed {
            return None;
        }
        let mut state = self.shared.lock();
        let command = state.queue.pop_front();
        if command.is_none() {
            state.idle = self.progress.take();
        }
        command
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let Some(mut progress) = self.progress.take() else { return };
        let sink = progress.sink.take();
        progress.failure.get_or_insert_with(|| {
            StoreError::new(
                Operation::Put,
                self.shared.core.store.url(),
                &self.shared.name,
                StoreErrorKind::ShutDown,
            )
        });
        let mut state = self.shared.lock();
        state.idle = Some(progress);
        let queue = mem::take(&mut state.queue);
        drop(state);
        // Foreign code, not under the lock. The drops of the commands answer them.
        drop(sink);
        drop(queue);
    }
}

impl Progress {
    async fn put(&mut self, core: &Core, name: &str, part: Vec<Bytes>) -> Result<(), StoreError> {
        let bytes: u64 = part.iter().map(|slice| slice.len() as u64).sum();
        let sink = self.begun(core, name).await?;
        let outcome = sink.put(part).await;
        core.count(Operation::Put, &outcome);
        match &outcome {
            Ok(()) => core.count_put(bytes),
            Err(error) => self.failure = Some(error.clone()),
        }
        outcome
    }

    async fn complete(&mut self, core: &Core, name: &str) -> Result<u64, StoreError> {
        if let Err(error) = self.begun(core, name).await {
            // The failure is what the caller has to know; leftovers are told of by the log.
            let _ = self.abort(core, name).await;
            return Err(error);
        }
        let Some(sink) = self.sink.take() else { unreachable!("begun says that there is a sink") };
        let outcome = sink.complete().await;
        core.count(Operation::Complete, &outcome);
        match &outcome {
            Ok(_) => {
                core.counters.objects.fetch_add(1, Relaxed);
            }
            Err(error) => self.failure = Some(error.clone()),
        }
        outcome
    }

    async fn abort(&mut self, core: &Core, name: &str) -> Result<(), StoreError> {
        let Some(sink) = self.sink.take() else { return Ok(()) };
        self.failure.get_or_insert_with(|| {
            StoreError::new(Operation::Put, core.store.url(), name, StoreErrorKind::Aborted)
        });
        let outcome = sink.abort().await;
        core.count(Operation::Abort, &outcome);
        if let Err(error) = &outcome {
            tracing::warn!(%error, "an upload could not be aborted; what it wrote is left until it is deleted");
        }
        outcome
    }

    /// The sink, begun if it was not; the first failure if there was one.
    async fn begun(&mut self, core: &Core, name: &str) -> Result<&mut Box<dyn ObjectSink>, StoreError> {
        if let Some(failure) = &self.failure {
            return Err(failure.clone());
        }
        if self.sink.is_none() {
            let outcome = core.store.begin(name).await;
            core.count(Operation::Begin, &outcome);
            match outcome {
                Ok(sink) => self.sink = Some(sink),
                Err(error) => {
                    self.failure = Some(error.clone());
                    return Err(error);
                }
            }
        }
        let Some(sink) = &mut self.sink else { unreachable!("set above") };
        Ok(sink)
    }
}

/// Tells running tasks that they are to end.
#[derive(Debug, Default)]
struct Shutdown {
    next_id: AtomicU64,
    state: Mutex<ShutdownState>,
}

#[derive(Debug, Default)]
struct ShutdownState {
    closed: bool,
    wakers: HashMap<u64, Waker>,
}

impl Shutdown {
    fn lock(&self) -> MutexGuard<'_, ShutdownState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn close(&self) {
        let mut state = self.lock();
        state.closed = true;
        let wakers = mem::take(&mut state.wakers);
        drop(state);
        for waker in wakers.into_values() {
            waker.wake();
        }
    }

    /// Whether the task may go on; if so, it is woken at the shutdown.
    fn register(&self, id: u64, waker: &Waker) -> bool {
        let mut state = self.lock();
        if state.closed {
            return false;
        }
        let replaced = match state.wakers.get(&id) {
            Some(known) if known.will_wake(waker) => None,
            _ => state.wakers.insert(id, waker.clone()),
        };
        drop(state);
        drop(replaced);
        true
    }

    fn forget(&self, id: u64) {
        let waker = self.lock().wakers.remove(&id);
        drop(waker);
    }
}

/// A task that ends early at the shutdown, by dropping its future, whose answers then say so.
struct Cancellable {
    id: u64,
    shutdown: Arc<Shutdown>,
    future: Option<BoxFuture<'static, ()>>,
}

impl Future for Cancellable {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        if !self.shutdown.register(self.id, context.waker()) {
            drop(self.future.take());
            return Poll::Ready(());
        }
        match &mut self.future {
            Some(future) => future.as_mut().poll(context),
            None => Poll::Ready(()),
        }
    }
}

impl Drop for Cancellable {
    fn drop(&mut self) {
        self.shutdown.forget(self.id);
    }
}
