//! Waits for a future on a thread that has nothing else to do.
#![forbid(unsafe_code)]

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

/// Runs a future on this thread and returns what it resolves to. Must not be called on an executor's thread.
pub fn block_on<F: Future>(future: F) -> F::Output {
    block_on_until(future, None).expect("without a deadline it is awaited to its end")
}

/// As [`block_on`], but gives up, and drops the future, after `timeout`.
pub fn block_on_timeout<F: Future>(future: F, timeout: Duration) -> Option<F::Output> {
    block_on_until(future, Instant::now().checked_add(timeout))
}

fn block_on_until<F: Future>(future: F, deadline: Option<Instant>) -> Option<F::Output> {
    struct Unpark {
        thread: Thread,
        /// Says for which of two nested calls a token is meant.
        woken: AtomicBool,
    }
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.woken.store(true, Ordering::Release);
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
        while !unpark.woken.swap(false, Ordering::Acquire) {
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
