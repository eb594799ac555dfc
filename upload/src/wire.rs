//! What is known of the connection that a body goes out on: how much of it the connection took, and how to have it closed.
//!
//! The store tells it, the driver asks. What is made of it is decided by the machine of the object.
#![forbid(unsafe_code)]

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The store has not told.
const UNKNOWN: u64 = u64::MAX;

/// The connection of one request with a body. Clones are the same.
///
/// A store that knows neither of the two things leaves it alone: its requests are found out to be late by their age only,
/// and its connections stay open.
#[derive(Clone)]
pub struct Wire(Arc<State>);

struct State {
    taken_bytes: AtomicU64,
    closer: Mutex<Option<Closer>>,
}

type Closer = Box<dyn FnOnce() + Send>;

impl Wire {
    /// For the store: the connection has taken the first so many bytes of the body. 0 from the start on, so that silence
    /// means that a store cannot tell.
    ///
    /// Taken is not acknowledged by the other side, which TCP_INFO could tell: some of it waits in the buffers of this
    /// machine. It serves as well for bodies larger than these are: a connection that stalls takes no more than its
    /// buffers hold, and one that is slow no more than that ahead of what it sends.
    pub fn took(&self, bytes: u64) {
        self.0.taken_bytes.store(bytes, Relaxed);
    }

    /// For the store: how to have the connection closed as soon as no request is on it. Called at most once, from any
    /// thread, also after the request's end. It must not block, nor panic.
    pub fn on_retire(&self, closer: impl FnOnce() + Send + 'static) {
        let replaced = self.closer().replace(Box::new(closer));
        drop(replaced);
    }

    /// How many bytes of the body the connection has taken, if that is told.
    #[must_use]
    pub fn taken_bytes(&self) -> Option<u64> {
        Some(self.0.taken_bytes.load(Relaxed)).filter(|bytes| *bytes != UNKNOWN)
    }

    /// Has the connection closed, if the store can, as soon as no request is on it.
    pub fn retire(&self) {
        let closer = self.closer().take();
        if let Some(closer) = closer {
            closer();
        }
    }

    fn closer(&self) -> MutexGuard<'_, Option<Closer>> {
        // Nothing that can panic runs under this lock.
        self.0.closer.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Default for Wire {
    fn default() -> Wire {
        Wire(Arc::new(State { taken_bytes: AtomicU64::new(UNKNOWN), closer: Mutex::default() }))
    }
}

impl fmt::Debug for Wire {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Wire").field("taken_bytes", &self.taken_bytes()).finish_non_exhaustive()
    }
}
