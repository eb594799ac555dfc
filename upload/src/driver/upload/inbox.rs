//! How the caller and the requests of an object speak to its task.
#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::fmt;
use std::future::Future;
use std::mem;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use bytes::Bytes;

use super::held::Charge;
use crate::driver::answer::Answer;
use crate::driver::timers::Sleep;
use crate::multipart::{Event, Placement};
use crate::store::StoreError;

/// What the task of an object is told.
pub(super) enum Input {
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
pub(in crate::driver) struct Inbox(Mutex<InboxState>);

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

    pub(super) fn push(&self, input: Input) {
        self.change(|state| state.inputs.push_back(input));
    }

    /// Says that connections have become free.
    pub(super) fn tick(&self) {
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

    pub(super) fn pop(&self) -> Option<Input> {
        let mut state = self.lock();
        if mem::take(&mut state.tick) {
            return Some(Input::Step(Event::Tick));
        }
        state.inputs.pop_front()
    }

    pub(super) fn close(&self) {
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

impl fmt::Debug for Inbox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Inbox").field("inputs", &self.lock().inputs.len()).finish_non_exhaustive()
    }
}

/// Until there is an input, or until the time, if any.
pub(super) struct Waiting<'a> {
    pub(super) inbox: &'a Inbox,
    pub(super) sleep: Option<Sleep>,
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

pub(super) enum Wake {
    Input,
    Time,
}
