//! Counts what is allocated, so that a target can hold a decoder to a bound.

#[path = "../../tests/common/allocator.rs"]
mod allocator;

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use allocator::Telling;

/// Bytes that are allocated now.
static HELD: AtomicUsize = AtomicUsize::new(0);
/// The most of them since it was last reset.
static PEAK: AtomicUsize = AtomicUsize::new(0);

#[global_allocator]
static ALLOCATOR: Telling = Telling(|taken, given_back| {
    // Where one is copied into the other, both are there meanwhile.
    let held = HELD.fetch_add(taken, Relaxed) + taken;
    PEAK.fetch_max(held, Relaxed);
    HELD.fetch_sub(given_back, Relaxed);
});

/// Panics if `work` has more than `bytes_max` allocated at any time, beside what was before.
pub fn within<T>(bytes_max: usize, work: impl FnOnce() -> T) -> T {
    let before = HELD.load(Relaxed);
    PEAK.store(before, Relaxed);
    let result = work();
    let peak = PEAK.load(Relaxed).saturating_sub(before);
    assert!(peak <= bytes_max, "{peak} bytes of memory were taken, at most {bytes_max} are allowed");
    result
}
