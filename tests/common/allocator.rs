//! The system's allocator, and somebody who hears of what is taken from it and given back. For one file of a test's
//! program: the allocator is the process's.

use std::alloc::{GlobalAlloc, Layout, System};

/// Tells its function how many bytes are taken, and how many are given back by the same call. The function must not
/// allocate, and not panic; a thread that ends may still call it when its thread-local storage is gone.
pub struct Telling(pub fn(usize, usize));

// SAFETY: every call goes to the system's allocator unchanged. What is told neither allocates nor panics.
unsafe impl GlobalAlloc for Telling {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        (self.0)(layout.size(), 0);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        (self.0)(layout.size(), 0);
        // SAFETY: the caller's promise.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        (self.0)(new_size, layout.size());
        // SAFETY: the caller's promise.
        unsafe { System.realloc(block, layout, new_size) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        (self.0)(0, layout.size());
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(block, layout) }
    }
}
