//! When a task goes on by itself: deadlines of one clock, kept apart from the executor's so that real and virtual time run
//! the same code, and a caller's runtime needs no timers.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::fmt;
use std::future::Future;
use std::io;
use std::mem;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::task::{Context, Poll, Waker};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

/// Longer than anybody waits.
const FAR: Duration = Duration::from_secs(365 * 24 * 3600);

/// The time, real or virtual.
pub type Clock = Arc<dyn Fn() -> Instant + Send + Sync>;

/// The tasks that wait for a time.
pub(super) struct Timers {
    clock: Clock,
    /// Fires them, if a thread does.
    thread: OnceLock<Thread>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    next_id: u64,
    waiting: BTreeMap<(Instant, u64), Waker>,
    closed: bool,
}

impl Timers {
    /// Timers that somebody [fires](Timers::fire).
    pub(super) fn manual(clock: Clock) -> Arc<Timers> {
        Arc::new(Timers { clock, thread: OnceLock::new(), state: Mutex::default() })
    }

    /// Timers of the real time, fired by a thread of their own until they are [closed](Timers::close).
    pub(super) fn threaded() -> io::Result<Arc<Timers>> {
        let timers = Timers::manual(Arc::new(Instant::now));
        let runner = Arc::clone(&timers);
        let thread = thread::Builder::new().name("tidelog-upload-timer".to_owned()).spawn(move || {
            while !runner.lock().closed {
                match runner.fire(Instant::now()) {
                    Some(next) => thread::park_timeout(next.saturating_duration_since(Instant::now())),
                    None => thread::park(),
                }
            }
        })?;
        let _ = timers.thread.set(thread.thread().clone());
        // One that came before the thread was known did not wake it.
        thread.thread().unpark();
        Ok(timers)
    }

    pub(super) fn now(&self) -> Instant {
        (self.clock)()
    }

    /// The time after `span`, or one that is far enough away.
    pub(super) fn after(&self, span: Duration) -> Instant {
        let now = self.now();
        now.checked_add(span).unwrap_or_else(|| now + FAR)
    }

    /// Wakes the tasks whose time has come, and says when the next one's will.
    pub(super) fn fire(&self, now: Instant) -> Option<Instant> {
        let mut state = self.lock();
        let later = state.waiting.split_off(&(now, u64::MAX));
        let due = mem::replace(&mut state.waiting, later);
        let next = state.next();
        drop(state);
        for waker in due.into_values() {
            waker.wake();
        }
        next
    }

    /// The first time that a task waits for.
    pub(super) fn next(&self) -> Option<Instant> {
        self.lock().next()
    }

    /// Ends the thread. Nothing fires any more.
    pub(super) fn close(&self) {
        let mut state = self.lock();
        state.closed = true;
        let waiting = mem::take(&mut state.waiting);
        drop(state);
        // A waker's drop may be that of its task.
        drop(waiting);
        self.unpark();
    }

    pub(super) fn sleep_until(self: &Arc<Self>, deadline: Instant) -> Sleep {
        Sleep { timers: Arc::clone(self), deadline, id: None }
    }

    fn unpark(&self) {
        if let Some(thread) = self.thread.get() {
            thread.unpark();
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn next(&self) -> Option<Instant> {
        self.waiting.first_key_value().map(|((deadline, _), _)| *deadline)
    }
}

impl fmt::Debug for Timers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Timers").field("waiting", &self.lock().waiting.len()).finish_non_exhaustive()
    }
}

/// Ends at a time.
#[derive(Debug)]
pub(super) struct Sleep {
    timers: Arc<Timers>,
    deadline: Instant,
    id: Option<u64>,
}

impl Future for Sleep {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        if self.timers.now() >= self.deadline {
            return Poll::Ready(());
        }
        let timers = Arc::clone(&self.timers);
        let mut state = timers.lock();
        if state.closed {
            return Poll::Pending;
        }
        let id = *self.id.get_or_insert_with(|| {
            state.next_id += 1;
            state.next_id
        });
        let is_first = state.next().is_none_or(|next| self.deadline < next);
        let replaced = state.waiting.insert((self.deadline, id), context.waker().clone());
        drop(state);
        drop(replaced);
        if is_first {
            timers.unpark();
        }
        Poll::Pending
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        if let Some(id) = self.id {
            let waker = self.timers.lock().waiting.remove(&(self.deadline, id));
            drop(waker);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_virtual_clock_fires_in_order_and_says_what_is_next() {
        let start = Instant::now();
        let time = Arc::new(Mutex::new(start));
        let reading = Arc::clone(&time);
        let timers = Timers::manual(Arc::new(move || *reading.lock().unwrap()));
        let mut context = Context::from_waker(Waker::noop());
        let after = |ms| start + Duration::from_millis(ms);
        let mut early = timers.sleep_until(after(10));
        let mut late = timers.sleep_until(after(20));
        let mut dropped = timers.sleep_until(after(5));
        for sleep in [&mut late, &mut early, &mut dropped] {
            assert!(Pin::new(sleep).poll(&mut context).is_pending());
        }
        assert_eq!(timers.next(), Some(after(5)));
        drop(dropped);
        assert_eq!(timers.fire(start), Some(after(10)));
        *time.lock().unwrap() = after(10);
        assert_eq!(timers.fire(after(10)), Some(after(20)));
        assert!(Pin::new(&mut early).poll(&mut context).is_ready());
        assert!(Pin::new(&mut late).poll(&mut context).is_pending());
    }

    #[test]
    fn a_thread_fires_an_earlier_deadline_that_came_later() {
        let timers = Timers::threaded().unwrap();
        let mut far = timers.sleep_until(Instant::now() + Duration::from_secs(3600));
        assert!(Pin::new(&mut far).poll(&mut Context::from_waker(Waker::noop())).is_pending());
        super::super::block_on(timers.sleep_until(Instant::now() + Duration::from_millis(5)));
        timers.close();
        assert_eq!(timers.next(), None);
        let mut late = timers.sleep_until(Instant::now() + Duration::from_secs(3600));
        assert!(Pin::new(&mut late).poll(&mut Context::from_waker(Waker::noop())).is_pending());
        assert_eq!(timers.next(), None, "nobody would ever wake it");
    }

    #[test]
    fn closing_wakes_a_thread_that_has_nothing_to_wait_for() {
        let timers = Timers::threaded().unwrap();
        // It parks soon, if it has not.
        thread::sleep(Duration::from_millis(20));
        timers.close();
        for _ in 0..5_000 {
            // The thread has the other one.
            if Arc::strong_count(&timers) == 1 {
                return;
            }
            thread::sleep(Duration::from_millis(1));
        }
        panic!("the thread is still there");
    }
}
