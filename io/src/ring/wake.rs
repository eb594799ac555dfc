//! Who waits for whom: the consumer that sleeps until there is work, and those who wait until a lane has room.
//!
//! Owns the two flags and their wakers. When to look at them is said in `ring.rs`.
//!
//! Both are the same argument. Each side stores its own fact (published data, a new head; “I sleep”, “I wait”), then a
//! SeqCst fence, then loads the other's. The fences have one order, and the side whose fence is second sees what the
//! other stored, so not both can miss each other.
#![forbid(unsafe_code)]

use std::fmt;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::{Arc, PoisonError};
use std::task::Waker;

use super::sync::{AtomicBool, Mutex, fence};
use crate::disk::WakeFn;

/// Wakes a consumer thread, and only if it sleeps. One bell serves all lanes of a consumer.
///
/// The consumer's part: [`doze`](Bell::doze) before it sleeps, which asks once more whether there is nothing to do;
/// [`awake`](Bell::awake) after. The producers' part: publish, then [`ring`](Bell::ring).
pub struct Bell {
    sleeping: AtomicBool,
    wake: WakeFn,
}

impl Bell {
    /// A bell that calls `wake`, from any thread, at most once per sleep.
    #[must_use]
    pub fn new(wake: WakeFn) -> Arc<Self> {
        Arc::new(Self { sleeping: AtomicBool::new(false), wake })
    }

    /// Wakes the consumer if it sleeps, or is about to without having seen what this thread published before the call.
    pub fn ring(&self) {
        fence(SeqCst);
        if self.sleeping.load(Relaxed) && self.sleeping.swap(false, Relaxed) {
            (self.wake)();
        }
    }

    /// Announces that the consumer is about to sleep. `idle` looks whether there is really nothing to do; what it does
    /// not see yet will ring. Returns whether the consumer may sleep; it then owes a call of [`awake`](Bell::awake).
    pub fn doze(&self, idle: impl FnOnce() -> bool) -> bool {
        // A swap where a store would do: loom puts a store that meets the swap in `ring` in either order.
        self.sleeping.swap(true, Relaxed);
        fence(SeqCst);
        let idle = idle();
        if !idle {
            self.awake();
        }
        idle
    }

    /// Announces that the consumer is awake, so that nobody needs to wake it.
    pub fn awake(&self) {
        self.sleeping.store(false, Relaxed);
    }
}

impl fmt::Debug for Bell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Bell").field("sleeping", &self.sleeping.load(Relaxed)).finish_non_exhaustive()
    }
}

/// Those who wait for room in one lane.
///
/// Invariant: `wanted` is set exactly when `wakers` is not empty; both change under the lock.
pub(super) struct RoomWaiters {
    wanted: AtomicBool,
    wakers: Mutex<Vec<Waker>>,
}

impl RoomWaiters {
    pub(super) fn new() -> Self {
        Self { wanted: AtomicBool::new(false), wakers: Mutex::new(Vec::new()) }
    }

    /// Registers a waker. A caller that looks at the lane's head after this sees all that was released before a
    /// [`wake`](RoomWaiters::wake) that missed the waker.
    pub(super) fn wait(&self, waker: &Waker) {
        let waker = waker.clone();
        {
            let mut wakers = self.wakers.lock().unwrap_or_else(PoisonError::into_inner);
            if !wakers.iter().any(|known| known.will_wake(&waker)) {
                wakers.push(waker);
            }
            self.wanted.store(true, Relaxed);
        }
        fence(SeqCst);
    }

    /// Wakes all who wait, after a new head has been stored. Costs a fence when nobody does.
    pub(super) fn wake(&self) {
        fence(SeqCst);
        if self.wanted.load(Relaxed) {
            self.wake_all();
        }
    }

    #[cold]
    fn wake_all(&self) {
        let wakers = {
            let mut wakers = self.wakers.lock().unwrap_or_else(PoisonError::into_inner);
            self.wanted.store(false, Relaxed);
            std::mem::take(&mut *wakers)
        };
        wakers.into_iter().for_each(Waker::wake);
    }
}
