//! One attempt of one request: within a time limit, to be given up from outside, and with a panic of the store kept from
//! everybody else. Whether there is another one is decided elsewhere.
#![forbid(unsafe_code)]

use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use super::timers::{Sleep, Timers};
use crate::store::{BoxFuture, StoreError, StoreErrorKind};

/// The other side of an [`Attempt`]: gives it up.
#[derive(Clone, Debug, Default)]
pub(super) struct Cancel(Arc<Mutex<CancelState>>);

#[derive(Debug, Default)]
struct CancelState {
    cancelled: bool,
    waker: Option<Waker>,
}

impl Cancel {
    pub(super) fn cancel(&self) {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        state.cancelled = true;
        let waker = state.waker.take();
        drop(state);
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    fn is_cancelled(&self, waker: &Waker) -> bool {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let replaced = state.waker.replace(waker.clone());
        let cancelled = state.cancelled;
        drop(state);
        drop(replaced);
        cancelled
    }
}

/// Why there is no answer.
#[derive(Debug)]
pub(super) enum Failure {
    /// The store said so.
    Store(StoreError),
    /// Given up: after so long, by its owner, or by a panic of the store.
    GivenUp(StoreErrorKind),
}

/// A request under way. When it resolves, the store's future is dropped, with its connection if it had not ended.
pub(super) struct Attempt<T> {
    future: Option<BoxFuture<'static, Result<T, StoreError>>>,
    limit: Sleep,
    timeout: Duration,
    cancel: Cancel,
}

impl<T> Attempt<T> {
    pub(super) fn new(
        timers: &Arc<Timers>,
        timeout: Duration,
        cancel: Cancel,
        future: BoxFuture<'static, Result<T, StoreError>>,
    ) -> Attempt<T> {
        let limit = timers.sleep_until(timers.after(timeout));
        Attempt { future: Some(future), limit, timeout, cancel }
    }
}

impl<T> Future for Attempt<T> {
    type Output = Result<T, Failure>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        // First, so that what was given up before its start is never sent.
        let outcome = if self.cancel.is_cancelled(context.waker()) {
            Err(Failure::GivenUp(StoreErrorKind::Cancelled))
        } else {
            let Some(future) = &mut self.future else { return Poll::Pending };
            match catch_unwind(AssertUnwindSafe(|| future.as_mut().poll(context))) {
                Ok(Poll::Ready(outcome)) => outcome.map_err(Failure::Store),
                Ok(Poll::Pending) => {
                    if Pin::new(&mut self.limit).poll(context).is_pending() {
                        return Poll::Pending;
                    }
                    Err(Failure::GivenUp(StoreErrorKind::TimedOut(self.timeout)))
                }
                Err(_) => {
                    tracing::error!("a store panicked in a request");
                    Err(Failure::GivenUp(StoreErrorKind::Interrupted))
                }
            }
        };
        if let Some(future) = self.future.take() {
            // Foreign code once more.
            let _ = catch_unwind(AssertUnwindSafe(|| drop(future)));
        }
        Poll::Ready(outcome)
    }
}

impl<T> Unpin for Attempt<T> {}
