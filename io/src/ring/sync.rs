//! What differs under loom: atomics and cells that it watches, threads that it runs, and memory that is cheap to make.
//!
//! Owns no protocol; `ring.rs` and `ring/wake.rs` are the same code under both.
#![forbid(unsafe_code)]

use std::sync::atomic::AtomicU64 as TokenCounter;

pub(super) use platform::{AtomicBool, AtomicU64, Memory, Mutex, UnsafeCell, fence, token, token_if_any};

/// Nobody's token.
pub(super) const NOBODY: u64 = 0;

/// What a thread has before it first claims a lane. Differs from [`NOBODY`], so that it owns nothing.
const NO_TOKEN: u64 = u64::MAX;

static NEXT_TOKEN: TokenCounter = TokenCounter::new(NOBODY + 1);

#[cfg(not(loom))]
mod platform {
    pub(in crate::ring) use std::sync::Mutex;
    pub(in crate::ring) use std::sync::atomic::{AtomicBool, AtomicU64, fence};

    use std::cell::Cell;
    use std::io;
    use std::sync::atomic::Ordering::Relaxed;

    use crate::aligned::Mapping;

    thread_local! {
        // Needs no destructor, so that it can be read while the thread is torn down.
        static TOKEN: Cell<u64> = const { Cell::new(super::NO_TOKEN) };
    }

    /// The calling thread's token, or one that no lane has as its owner.
    #[inline(always)]
    pub(in crate::ring) fn token_if_any() -> u64 {
        TOKEN.get()
    }

    /// The calling thread's token: no other thread ever had it or will.
    pub(in crate::ring) fn token() -> u64 {
        if TOKEN.get() == super::NO_TOKEN {
            TOKEN.set(super::NEXT_TOKEN.fetch_add(1, Relaxed));
        }
        TOKEN.get()
    }

    pub(in crate::ring) struct UnsafeCell<T>(std::cell::UnsafeCell<T>);

    impl<T> UnsafeCell<T> {
        pub(in crate::ring) fn new(value: T) -> Self {
            Self(std::cell::UnsafeCell::new(value))
        }

        #[inline(always)]
        pub(in crate::ring) fn with_mut<R>(&self, f: impl FnOnce(*mut T) -> R) -> R {
            f(self.0.get())
        }
    }

    pub(in crate::ring) struct Memory(Mapping);

    impl Memory {
        pub(in crate::ring) fn new(len_bytes: usize) -> io::Result<Self> {
            Mapping::new(len_bytes).map(Self)
        }

        #[inline(always)]
        pub(in crate::ring) fn at(&self, offset: u64) -> *mut u8 {
            self.0.base().wrapping_add(offset as usize)
        }

        #[inline(always)]
        pub(in crate::ring) fn will_write(&self, _offset: u64, _bytes: u64) {}

        #[inline(always)]
        pub(in crate::ring) fn will_read(&self, _offset: u64, _bytes: u64) {}
    }
}

#[cfg(loom)]
mod platform {
    pub(in crate::ring) use loom::cell::UnsafeCell;
    pub(in crate::ring) use loom::sync::Mutex;
    pub(in crate::ring) use loom::sync::atomic::{AtomicBool, AtomicU64, fence};

    use std::cell::Cell;
    use std::io;
    use std::sync::atomic::Ordering::Relaxed;

    loom::thread_local! {
        static TOKEN: Cell<u64> = Cell::new(super::NO_TOKEN);
    }

    pub(in crate::ring) fn token_if_any() -> u64 {
        TOKEN.with(Cell::get)
    }

    pub(in crate::ring) fn token() -> u64 {
        TOKEN.with(|token| {
            if token.get() == super::NO_TOKEN {
                token.set(super::NEXT_TOKEN.fetch_add(1, Relaxed));
            }
            token.get()
        })
    }

    /// Plain words, each with a cell by which loom sees who touches it.
    pub(in crate::ring) struct Memory {
        words: Box<[std::cell::UnsafeCell<u64>]>,
        watch: Box<[UnsafeCell<()>]>,
    }

    impl Memory {
        pub(in crate::ring) fn new(len_bytes: usize) -> io::Result<Self> {
            let words = (0..len_bytes / 8).map(|_| std::cell::UnsafeCell::new(0)).collect();
            let watch = (0..len_bytes / 8).map(|_| UnsafeCell::new(())).collect();
            Ok(Self { words, watch })
        }

        pub(in crate::ring) fn at(&self, offset: u64) -> *mut u8 {
            self.words.as_ptr().cast_mut().cast::<u8>().wrapping_add(offset as usize)
        }

        pub(in crate::ring) fn will_write(&self, offset: u64, bytes: u64) {
            self.watched(offset, bytes).iter().for_each(|cell| cell.with_mut(|_| ()));
        }

        pub(in crate::ring) fn will_read(&self, offset: u64, bytes: u64) {
            self.watched(offset, bytes).iter().for_each(|cell| cell.with(|_| ()));
        }

        fn watched(&self, offset: u64, bytes: u64) -> &[UnsafeCell<()>] {
            &self.watch[(offset / 8) as usize..((offset + bytes) / 8) as usize]
        }
    }
}
