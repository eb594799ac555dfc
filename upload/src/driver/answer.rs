//! A callback that is called exactly once.
#![forbid(unsafe_code)]

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, PoisonError};

/// Calls back with a value: the one given, or, if it is dropped before, the one that it was made with.
///
/// The mutex is never contended: it only lets an answer that nobody but its owner calls be shared.
pub(super) struct Answer<T>(Mutex<Option<Inner<T>>>);

struct Inner<T> {
    done: Box<dyn FnOnce(T) + Send>,
    otherwise: T,
}

impl<T> Answer<T> {
    pub(super) fn new(otherwise: T, done: impl FnOnce(T) + Send + 'static) -> Answer<T> {
        Answer(Mutex::new(Some(Inner { done: Box::new(done), otherwise })))
    }

    /// Calls back.
    pub(super) fn give(mut self, value: T) {
        if let Some(Inner { done, .. }) = self.take() {
            call(done, value);
        }
    }

    fn take(&mut self) -> Option<Inner<T>> {
        self.0.get_mut().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl<T> Drop for Answer<T> {
    fn drop(&mut self) {
        if let Some(Inner { done, otherwise }) = self.take() {
            call(done, otherwise);
        }
    }
}

/// A panic of the callback stays there: what is called next must be called.
fn call<T>(done: Box<dyn FnOnce(T) + Send>, value: T) {
    if catch_unwind(AssertUnwindSafe(|| done(value))).is_err() {
        tracing::error!("a callback of the upload driver panicked");
    }
}

impl<T> fmt::Debug for Answer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Answer")
    }
}
