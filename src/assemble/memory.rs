//! The memory of a part: in huge pages where it has any.
//!
//! An assembler writes to as many places of a part at once as it has key groups, and a connection reads all of it twice. In
//! pages of 4 KiB that is more than a processor's table of pages holds, and its prefetchers stop at each page.

use std::fmt;
use std::ops::{Deref, DerefMut};

use tidelog_io::aligned::{AlignedBuf, BLOCK_ALIGNMENT_BYTES};

/// From here on there are huge pages in it.
const HUGE_BYTES: usize = 2 << 20;

/// By how much a length is rounded up: a little more than asked for serves most parts to come.
const STEP_BYTES: usize = 256 << 10;
const _: () = assert!(STEP_BYTES.is_multiple_of(BLOCK_ALIGNMENT_BYTES));

/// Bytes of a part, in memory that can be used again for another one.
pub struct Memory {
    store: Store,
    len: usize,
}

enum Store {
    Heap(Vec<u8>),
    Pages(AlignedBuf),
}

impl Memory {
    /// Memory for so many bytes.
    pub(crate) fn new(len: usize) -> Memory {
        let capacity = len.next_multiple_of(STEP_BYTES);
        // The system zeroes it, not a loop. Where it refuses a mapping, memory of the heap serves.
        let pages = if len < HUGE_BYTES { None } else { AlignedBuf::alone(capacity).ok() };
        let store = pages.map_or_else(|| Store::Heap(vec![0; capacity]), Store::Pages);
        Memory { store, len }
    }

    /// How many bytes it has room for.
    pub(crate) fn capacity(&self) -> usize {
        self.whole().len()
    }

    /// Whether it is a mapping of its own, which the system makes anew each time.
    pub(crate) fn is_mapped(&self) -> bool {
        matches!(self.store, Store::Pages(_))
    }

    /// Makes it as long as said. What is in it does not change, and is not looked at.
    ///
    /// # Panics
    /// If there is no room for that.
    pub(super) fn set_len(&mut self, len: usize) {
        assert!(len <= self.capacity(), "{len} bytes in memory for {}", self.capacity());
        self.len = len;
    }

    fn whole(&self) -> &[u8] {
        match &self.store {
            Store::Heap(bytes) => bytes,
            Store::Pages(buffer) => buffer,
        }
    }
}

impl From<Vec<u8>> for Memory {
    fn from(bytes: Vec<u8>) -> Memory {
        Memory { len: bytes.len(), store: Store::Heap(bytes) }
    }
}

impl Default for Memory {
    /// Room for nothing.
    fn default() -> Memory {
        Vec::new().into()
    }
}

impl Deref for Memory {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        &self.whole()[..self.len]
    }
}

impl DerefMut for Memory {
    #[inline]
    fn deref_mut(&mut self) -> &mut [u8] {
        match &mut self.store {
            Store::Heap(bytes) => &mut bytes[..self.len],
            Store::Pages(buffer) => &mut buffer[..self.len],
        }
    }
}

impl AsRef<[u8]> for Memory {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl PartialEq for Memory {
    /// Compares the bytes.
    fn eq(&self, other: &Memory) -> bool {
        **self == **other
    }
}

impl Eq for Memory {}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Memory").field("len", &self.len).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_ones_are_in_huge_pages_and_take_no_more_than_they_need() {
        for (len, capacity) in [(0, 0), (1, STEP_BYTES), (HUGE_BYTES - 1, HUGE_BYTES)] {
            let memory = Memory::new(len);
            assert!(matches!(memory.store, Store::Heap(_)), "{len}");
            assert_eq!((memory.len(), memory.capacity()), (len, capacity));
        }
        let memory = Memory::new(HUGE_BYTES + 1);
        let Store::Pages(buffer) = &memory.store else { panic!("pages") };
        assert!(buffer.as_ptr().addr().is_multiple_of(HUGE_BYTES));
        assert_eq!((memory.len(), memory.capacity()), (HUGE_BYTES + 1, HUGE_BYTES + STEP_BYTES));
    }

    #[test]
    fn a_length_changes_and_bytes_stay() {
        let mut memory = Memory::new(HUGE_BYTES);
        memory.fill(7);
        memory.set_len(3);
        assert_eq!(memory, vec![7; 3].into());
        memory.set_len(HUGE_BYTES);
        assert!(memory.iter().all(|&byte| byte == 7));
    }
}
