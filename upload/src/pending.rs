//! A value that another thread will deliver: a future for any executor that can also be waited for without one.
//!
//! Who resolves it, and from which thread, is the business of its users.
#![forbid(unsafe_code)]

use std::fmt;
use std::future::Future;
use std::mem;
use std::pin::Pin;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

/// A promise and the means to keep it.
///
/// ```
/// let (resolver, pending) = tidelog_upload::channel();
/// std::thread::spawn(move || resolver.resolve(7));
/// assert_eq!(pending.wait(), Ok(7));
/// ```
pub fn channel<T>() -> (Resolver<T>, Pending<T>) {
    let shared = Arc::new(Shared { state: Mutex::new(State::Waiting(None)), resolved: Condvar::new() });
    (Resolver { shared: Some(Arc::clone(&shared)) }, Pending { shared })
}

/// The value will never come: whoever was to deliver it is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the operation was given up before it had a result")]
pub struct Abandoned;

/// A value to come. Dropping it cancels only the notification.
#[must_use = "nothing is learnt from a pending value that is not awaited"]
pub struct Pending<T> {
    shared: Arc<Shared<T>>,
}

impl<T> Pending<T> {
    /// Blocks the thread until the value is there. Not for use on an executor's thread: await it there.
    ///
    /// # Errors
    /// [`Abandoned`] if the resolver was dropped, or the value was taken before.
    pub fn wait(self) -> Result<T, Abandoned> {
        let mut state = self.shared.lock();
        loop {
            match state.take() {
                Some(outcome) => return outcome,
                None => state = self.shared.resolved.wait(state).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }

    /// Blocks the thread until the value is there or `timeout` is over; `None` then. May be called again.
    ///
    /// # Errors
    /// As [`wait`](Pending::wait).
    pub fn wait_timeout(&mut self, timeout: Duration) -> Option<Result<T, Abandoned>> {
        let deadline = Instant::now().checked_add(timeout);
        let mut state = self.shared.lock();
        loop {
            if let Some(outcome) = state.take() {
                return Some(outcome);
            }
            let left = match deadline {
                Some(deadline) => {
                    deadline.checked_duration_since(Instant::now()).filter(|left| !left.is_zero())?
                }
                None => timeout,
            };
            state = self.shared.resolved.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl<T> Future for Pending<T> {
    type Output = Result<T, Abandoned>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let mut state = self.shared.lock();
        if let Some(outcome) = state.take() {
            return Poll::Ready(outcome);
        }
        let State::Waiting(waker) = &mut *state else { unreachable!("an outcome was taken above") };
        let replaced = match waker {
            Some(waker) if waker.will_wake(context.waker()) => None,
            _ => waker.replace(context.waker().clone()),
        };
        // A waker's drop is foreign code: not under the lock.
        drop(state);
        drop(replaced);
        Poll::Pending
    }
}

impl<T> fmt::Debug for Pending<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pending").finish_non_exhaustive()
    }
}

/// Delivers the value of a [`Pending`]. Dropped without it, the waiting side learns that it was [`Abandoned`].
pub struct Resolver<T> {
    /// `None` once resolved.
    shared: Option<Arc<Shared<T>>>,
}

impl<T> Resolver<T> {
    /// Delivers the value and wakes who waits, on this thread, with no lock held.
    pub fn resolve(mut self, value: T) {
        if let Some(shared) = self.shared.take() {
            shared.settle(State::Resolved(value));
        }
    }
}

impl<T> Drop for Resolver<T> {
    fn drop(&mut self) {
        if let Some(shared) = self.shared.take() {
            shared.settle(State::Over);
        }
    }
}

impl<T> fmt::Debug for Resolver<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Resolver").finish_non_exhaustive()
    }
}

struct Shared<T> {
    state: Mutex<State<T>>,
    resolved: Condvar,
}

impl<T> Shared<T> {
    fn lock(&self) -> MutexGuard<'_, State<T>> {
        // Nothing that can panic runs under this lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn settle(&self, outcome: State<T>) {
        let before = mem::replace(&mut *self.lock(), outcome);
        self.resolved.notify_all();
        if let State::Waiting(Some(waker)) = before {
            waker.wake();
        }
    }
}

enum State<T> {
    Waiting(Option<Waker>),
    Resolved(T),
    /// Taken, or never to come.
    Over,
}

impl<T> State<T> {
    /// The outcome if there is one; it can be had once.
    fn take(&mut self) -> Option<Result<T, Abandoned>> {
        if let State::Waiting(_) = self {
            return None;
        }
        Some(match mem::replace(self, State::Over) {
            State::Resolved(value) => Ok(value),
            State::Over | State::Waiting(_) => Err(Abandoned),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::Wake;
    use std::thread;

    use super::*;

    #[test]
    fn a_value_arrives_by_wait_and_by_poll() {
        let (resolver, pending) = channel();
        let thread = thread::spawn(move || pending.wait());
        resolver.resolve(7);
        assert_eq!(thread.join().unwrap(), Ok(7));

        let (resolver, pending) = channel();
        resolver.resolve(8);
        assert_eq!(crate::driver::block_on(pending), Ok(8));
    }

    #[test]
    fn a_dropped_resolver_is_told() {
        let (resolver, pending) = channel::<u8>();
        let thread = thread::spawn(move || pending.wait());
        drop(resolver);
        assert_eq!(thread.join().unwrap(), Err(Abandoned));
    }

    #[test]
    fn a_timeout_leaves_the_value_to_come() {
        let (resolver, mut pending) = channel();
        assert_eq!(pending.wait_timeout(Duration::ZERO), None);
        assert_eq!(pending.wait_timeout(Duration::from_millis(1)), None);
        resolver.resolve(9);
        assert_eq!(pending.wait_timeout(Duration::MAX), Some(Ok(9)));
        assert_eq!(pending.wait_timeout(Duration::MAX), Some(Err(Abandoned)));
    }

    #[test]
    fn the_waker_is_called_once_and_without_the_lock() {
        struct Probe {
            woken: AtomicUsize,
            shared: Arc<Shared<u8>>,
        }
        impl Wake for Probe {
            fn wake(self: Arc<Self>) {
                assert!(self.shared.state.try_lock().is_ok(), "woken under the lock");
                self.woken.fetch_add(1, Ordering::Relaxed);
            }
        }
        let (resolver, mut pending) = channel::<u8>();
        let probe = Arc::new(Probe { woken: AtomicUsize::new(0), shared: Arc::clone(&pending.shared) });
        let waker = Waker::from(Arc::clone(&probe));
        let mut context = Context::from_waker(&waker);
        assert!(Pin::new(&mut pending).poll(&mut context).is_pending());
        assert!(Pin::new(&mut pending).poll(&mut context).is_pending());
        resolver.resolve(1);
        assert_eq!(probe.woken.load(Ordering::Relaxed), 1);
        assert_eq!(Pin::new(&mut pending).poll(&mut context), Poll::Ready(Ok(1)));
    }
}
