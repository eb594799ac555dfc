//! Where the driver's tasks run: on tokio, or in turn on the calling thread. What they do is not known here.
//!
//! Every task ends at the shutdown at the latest: its future is dropped, and whatever it owed is answered by that drop.
#![forbid(unsafe_code)]

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::future::Future;
use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll, Wake, Waker};

use tokio::runtime::Handle;

use crate::store::BoxFuture;

/// Runs tasks.
#[derive(Debug)]
pub(super) struct Executor {
    kind: Kind,
    shutdown: Arc<Shutdown>,
}

#[derive(Debug)]
enum Kind {
    Tokio(Handle),
    Inline(Arc<Inline>),
}

impl Executor {
    pub(super) fn tokio(handle: Handle) -> Executor {
        Executor { kind: Kind::Tokio(handle), shutdown: Arc::default() }
    }

    /// An executor whose tasks run in the order in which they became ready, during [`run`](Executor::run).
    pub(super) fn inline() -> Executor {
        Executor { kind: Kind::Inline(Arc::default()), shutdown: Arc::default() }
    }

    pub(super) fn is_inline(&self) -> bool {
        matches!(self.kind, Kind::Inline(_))
    }

    /// Runs the future, or drops it if this or the runtime is shut down.
    pub(super) fn spawn(&self, future: impl Future<Output = ()> + Send + 'static) {
        let task = Cancellable {
            id: self.shutdown.next_id.fetch_add(1, Relaxed),
            shutdown: Arc::clone(&self.shutdown),
            future: Some(Box::pin(future)),
        };
        match &self.kind {
            Kind::Tokio(handle) => drop(handle.spawn(task)),
            Kind::Inline(inline) => inline.spawn(Box::pin(task)),
        }
    }

    /// Runs the inline tasks that can go on, until none can. A nested call, or one from another thread meanwhile, leaves
    /// that to the first.
    pub(super) fn run(&self) {
        if let Kind::Inline(inline) = &self.kind {
            inline.run();
        }
    }

    /// Ends all tasks, soon.
    pub(super) fn close(&self) {
        self.shutdown.close();
        self.run();
    }

    /// How many tasks would be told of a shutdown.
    #[cfg(test)]
    pub(super) fn tasks_known(&self) -> usize {
        self.shutdown.lock().wakers.len()
    }
}

/// Tasks of a single thread.
#[derive(Default)]
struct Inline(Mutex<InlineState>);

#[derive(Default)]
struct InlineState {
    next_id: u64,
    tasks: HashMap<u64, BoxFuture<'static, ()>>,
    ready: VecDeque<u64>,
    running: bool,
}

impl Inline {
    fn lock(&self) -> MutexGuard<'_, InlineState> {
        // Nothing that can panic runs under this lock.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn spawn(&self, future: BoxFuture<'static, ()>) {
        let mut state = self.lock();
        let id = state.next_id;
        state.next_id += 1;
        state.tasks.insert(id, future);
        state.ready.push_back(id);
    }

    fn run(self: &Arc<Self>) {
        let mut state = self.lock();
        if mem::replace(&mut state.running, true) {
            return;
        }
        while let Some(id) = state.ready.pop_front() {
            let Some(mut task) = state.tasks.remove(&id) else { continue };
            drop(state);
            let waker = Waker::from(Arc::new(InlineWake { id, inline: Arc::downgrade(self) }));
            let polled =
                catch_unwind(AssertUnwindSafe(|| task.as_mut().poll(&mut Context::from_waker(&waker))));
            match polled {
                Ok(Poll::Pending) => drop(self.lock().tasks.insert(id, task)),
                Ok(Poll::Ready(())) => drop(task),
                Err(_) => {
                    tracing::error!("a task of the upload driver panicked");
                    drop(task);
                }
            }
            state = self.lock();
        }
        state.running = false;
    }
}

impl fmt::Debug for Inline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Inline").field("tasks", &self.lock().tasks.len()).finish_non_exhaustive()
    }
}

struct InlineWake {
    id: u64,
    inline: Weak<Inline>,
}

impl Wake for InlineWake {
    fn wake(self: Arc<Self>) {
        let Some(inline) = self.inline.upgrade() else { return };
        let mut state = inline.lock();
        if !state.ready.contains(&self.id) {
            state.ready.push_back(self.id);
        }
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

/// A task that ends early at the shutdown, by dropping its future.
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
