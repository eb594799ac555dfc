//! The huge-page arena: one mapping, cut into equal buffers that io can hand to the kernel.
//!
//! Owns where the memory comes from, its alignment, and that a buffer comes back exactly once. What is in a buffer, and
//! who may hold how many, is decided elsewhere. `Mapping` is also the memory of the lanes in `ring.rs`.

use std::fmt;
use std::io;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::slice;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

/// Alignment of every block, in bytes: what O_DIRECT asks for on every device that we know of.
pub const BLOCK_ALIGNMENT_BYTES: usize = 4096;

const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Private anonymous memory, zeroed and already faulted in.
///
/// A mapping of 2 MiB or more starts on a 2 MiB boundary and asks for huge pages; a smaller one starts on a page. A
/// forked child does not inherit it. Both are best effort: a kernel that refuses them still gives memory.
///
/// Invariants: `base..base + len_bytes` is mapped readable and writable, and initialised, until drop; nothing else
/// unmaps it.
pub(crate) struct Mapping {
    base: NonNull<u8>,
    len_bytes: usize,
}

// SAFETY: the mapping is plain memory that belongs to the process, not to a thread. `Mapping` itself never reads or
// writes it after creation; who may do so is the business of its users.
unsafe impl Send for Mapping {}
// SAFETY: as above: a shared `Mapping` gives out its address only.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps at least `len_bytes` (not 0).
    pub(crate) fn new(len_bytes: usize) -> io::Result<Self> {
        let huge = len_bytes >= HUGE_PAGE_BYTES;
        let page_bytes = rustix::param::page_size().max(BLOCK_ALIGNMENT_BYTES);
        let unit_bytes = if huge { HUGE_PAGE_BYTES.max(page_bytes) } else { page_bytes };
        let len_bytes = len_bytes
            .max(1)
            .checked_next_multiple_of(page_bytes)
            .filter(|&len| len <= isize::MAX as usize)
            .ok_or_else(|| invalid(format!("{len_bytes} bytes are more than can be mapped; ask for less")))?;

        let base = if huge { map_aligned(len_bytes, unit_bytes)? } else { map(len_bytes)? };
        let mapping = Self { base, len_bytes };
        if huge {
            mapping.advise(Advice::LinuxHugepage, "huge pages");
        }
        mapping.advise(Advice::LinuxDontFork, "keeping it from forked children");
        // Moves the page faults from the first append or write to the opening. The kernel has zeroed all pages.
        for page in (0..len_bytes).step_by(page_bytes) {
            // SAFETY: the range is mapped, writable and, so far, known to us alone.
            unsafe { mapping.base.as_ptr().add(page).write_volatile(0) };
        }
        Ok(mapping)
    }

    pub(crate) fn base(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    fn advise(&self, advice: Advice, what: &str) {
        // SAFETY: the range is a mapping of ours, and neither advice changes what is in it or whether it is mapped.
        if let Err(error) = unsafe { madvise(self.base.as_ptr().cast(), self.len_bytes, advice) } {
            tracing::debug!(%error, len_bytes = self.len_bytes, "the kernel refused {what} for a buffer");
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: this is the range that was mapped, whole, and the owner of the last handle is dropping it: no pointer
        // into it is used after this.
        let unmapped = unsafe { munmap(self.base.as_ptr().cast(), self.len_bytes) };
        debug_assert!(unmapped.is_ok(), "munmap of our own mapping: {unmapped:?}");
    }
}

fn map(len_bytes: usize) -> io::Result<NonNull<u8>> {
    // SAFETY: without MAP_FIXED the kernel chooses a free range, so no existing memory is touched.
    let base = unsafe {
        mmap_anonymous(std::ptr::null_mut(), len_bytes, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE)
    }?;
    NonNull::new(base.cast()).ok_or_else(|| io::Error::other("the kernel mapped memory at address 0"))
}

/// Maps more than needed and gives back what stands out on both sides.
fn map_aligned(len_bytes: usize, align_bytes: usize) -> io::Result<NonNull<u8>> {
    let wide_bytes = len_bytes
        .checked_add(align_bytes)
        .ok_or_else(|| invalid("too many bytes to map; ask for less".into()))?;
    let wide = map(wide_bytes)?;
    let head_bytes = wide.as_ptr().align_offset(align_bytes);
    assert!(head_bytes < align_bytes, "an alignment of bytes is always possible");
    let tail_bytes = align_bytes - head_bytes;
    // SAFETY: head_bytes < align_bytes = wide_bytes - len_bytes, so base and base + len_bytes are inside the mapping.
    let (base, tail) = unsafe { (wide.add(head_bytes), wide.add(head_bytes + len_bytes)) };
    for (start, bytes) in [(wide, head_bytes), (tail, tail_bytes)] {
        if bytes > 0 {
            // SAFETY: this part of the fresh mapping lies outside base..base + len_bytes and nobody knows of it. Should
            // the kernel refuse, the part stays reserved but untouched: addresses are lost, no memory.
            let _ = unsafe { munmap(start.as_ptr().cast(), bytes) };
        }
    }
    Ok(base)
}

fn invalid(message: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, message)
}

/// A fixed number of equal blocks of memory for I/O. A clone is another handle to the same blocks.
///
/// ```
/// let arena = tidelog_io::aligned::Arena::new(4096, 2)?;
/// let mut buffer = arena.try_take().unwrap();
/// buffer[..5].copy_from_slice(b"hello");
/// assert_eq!(arena.available(), 1);
/// drop(buffer);
/// assert_eq!(arena.available(), 2);
/// # std::io::Result::Ok(())
/// ```
#[derive(Clone)]
pub struct Arena {
    shared: Arc<Shared>,
}

/// Invariant: an index is either in `free` or in exactly one [`AlignedBuf`].
struct Shared {
    mapping: Mapping,
    block_bytes: usize,
    blocks: usize,
    free: Mutex<Vec<u32>>,
}

impl Shared {
    fn free(&self) -> MutexGuard<'_, Vec<u32>> {
        // Nothing that runs under this lock leaves the list half changed, so a poisoned one is as good.
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Arena {
    /// Maps `blocks` blocks of `block_bytes` bytes each and faults them in.
    ///
    /// The first block starts on a 2 MiB boundary if the arena is at least that large, and on a 4096-byte boundary
    /// always.
    ///
    /// # Errors
    /// `InvalidInput` if `block_bytes` is not a positive multiple of 4096, or `blocks` is 0 or above `u32::MAX`, or the
    /// product overflows; else what the kernel says about the memory.
    pub fn new(block_bytes: usize, blocks: usize) -> io::Result<Self> {
        if block_bytes == 0 || !block_bytes.is_multiple_of(BLOCK_ALIGNMENT_BYTES) {
            return Err(invalid(format!("a block of {block_bytes} bytes: use a positive multiple of 4096")));
        }
        let count = u32::try_from(blocks).ok().filter(|&count| count > 0);
        let (Some(count), Some(len_bytes)) = (count, block_bytes.checked_mul(blocks)) else {
            return Err(invalid(format!(
                "an arena of {blocks} blocks of {block_bytes} bytes: use 1 or more, but less"
            )));
        };
        let mapping = Mapping::new(len_bytes)?;
        // Taken from the end, so that the first buffers are those with the lowest addresses.
        let free = Mutex::new((0..count).rev().collect());
        Ok(Self { shared: Arc::new(Shared { mapping, block_bytes, blocks, free }) })
    }

    /// Takes a block, or `None` if all are out. Its content is whatever its last user left there.
    #[must_use]
    pub fn try_take(&self) -> Option<AlignedBuf> {
        let index = self.shared.free().pop()?;
        Some(AlignedBuf { arena: self.clone(), index })
    }

    /// How many blocks could be taken now.
    #[must_use]
    pub fn available(&self) -> usize {
        self.shared.free().len()
    }

    /// How many blocks there are, taken or not.
    #[must_use]
    pub fn blocks(&self) -> usize {
        self.shared.blocks
    }

    /// The size of a block in bytes.
    #[must_use]
    pub fn block_bytes(&self) -> usize {
        self.shared.block_bytes
    }

    /// Address and length in bytes of all blocks together, for registration with the kernel.
    ///
    /// The memory stays mapped while any handle to the arena or any of its buffers lives.
    #[must_use]
    pub fn region(&self) -> (*const u8, usize) {
        (self.shared.mapping.base(), self.shared.block_bytes * self.shared.blocks)
    }
}

impl fmt::Debug for Arena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Arena")
            .field("base", &self.shared.mapping.base())
            .field("block_bytes", &self.shared.block_bytes)
            .field("blocks", &self.shared.blocks)
            .field("available", &self.available())
            .finish()
    }
}

/// One block of an [`Arena`], owned: it returns itself when dropped, and keeps the arena's memory mapped.
pub struct AlignedBuf {
    arena: Arena,
    index: u32,
}

impl AlignedBuf {
    /// A zeroed buffer that belongs to no larger arena, of `len` bytes, a positive multiple of 4096.
    ///
    /// # Errors
    /// As [`Arena::new`].
    pub fn alone(len: usize) -> io::Result<Self> {
        let arena = Arena::new(len, 1)?;
        arena.try_take().ok_or_else(|| io::Error::other("a new arena had no free block"))
    }

    /// Which block of its arena this is, from 0.
    #[must_use]
    pub fn index(&self) -> usize {
        self.index as usize
    }

    /// The arena that it returns to.
    #[must_use]
    pub fn arena(&self) -> &Arena {
        &self.arena
    }

    /// The first `len` bytes as shared immutable bytes, without a copy; the block returns to its arena when the last
    /// clone is dropped.
    ///
    /// # Panics
    /// If `len` is more than the buffer's length.
    #[must_use]
    pub fn into_bytes(self, len: usize) -> Bytes {
        assert!(len <= self.len(), "{len} bytes of a buffer of {} bytes", self.len());
        Bytes::from_owner(Prefix { buffer: self, len })
    }

    fn start(&self) -> *mut u8 {
        let shared = &self.arena.shared;
        // SAFETY: index < blocks, and blocks * block_bytes does not overflow and is inside the mapping (`Arena::new`).
        unsafe { shared.mapping.base().add(self.index as usize * shared.block_bytes) }
    }
}

impl Deref for AlignedBuf {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the block is mapped and initialised as long as `self.arena` lives, and this `AlignedBuf` is the only
        // one with its index, so `&self` excludes any writer.
        unsafe { slice::from_raw_parts(self.start(), self.arena.shared.block_bytes) }
    }
}

impl DerefMut for AlignedBuf {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and `&mut self` excludes any other access through this, the only owner of the block.
        unsafe { slice::from_raw_parts_mut(self.start(), self.arena.shared.block_bytes) }
    }
}

impl Drop for AlignedBuf {
    fn drop(&mut self) {
        // The list has had room for every index since it was made, so this never allocates.
        self.arena.shared.free().push(self.index);
    }
}

impl fmt::Debug for AlignedBuf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AlignedBuf").field("address", &self.start()).field("len", &self.len()).finish()
    }
}

struct Prefix {
    buffer: AlignedBuf,
    len: usize,
}

impl AsRef<[u8]> for Prefix {
    fn as_ref(&self) -> &[u8] {
        &self.buffer[..self.len]
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_zeroed_aligned_and_apart() {
        let arena = Arena::new(256 << 10, 9).unwrap();
        let (base, len) = arena.region();
        assert_eq!((base as usize % HUGE_PAGE_BYTES, len), (0, 9 * (256 << 10)));
        let mut taken: Vec<_> = std::iter::from_fn(|| arena.try_take()).collect();
        assert_eq!(taken.len(), 9);
        for buffer in &mut taken {
            assert!(buffer.iter().all(|&byte| byte == 0));
            assert_eq!(buffer.as_ptr() as usize, base as usize + buffer.index() * (256 << 10));
            let mark = u8::try_from(buffer.index()).unwrap() + 1;
            buffer.fill(mark);
        }
        for buffer in &taken {
            assert!(buffer.iter().all(|&byte| usize::from(byte) == buffer.index() + 1));
        }
    }

    #[test]
    fn a_mapping_is_no_longer_than_its_pages() {
        let (page, huge) = (rustix::param::page_size(), HUGE_PAGE_BYTES);
        for (asked, len) in [(1, page), (huge - 1, huge), (huge + 1, huge + page), (2 * huge, 2 * huge)] {
            let mapping = Mapping::new(asked).unwrap();
            assert_eq!(mapping.len_bytes, len);
            assert!(len < huge || mapping.base().addr().is_multiple_of(huge));
        }
    }

    #[test]
    fn exhausted_arena_gives_again_what_came_back() {
        let arena = Arena::new(4096, 2).unwrap();
        let (first, second) = (arena.try_take().unwrap(), arena.try_take().unwrap());
        assert!(arena.try_take().is_none());
        let index = second.index();
        drop(second);
        assert_eq!(arena.available(), 1);
        assert_eq!(arena.try_take().unwrap().index(), index);
        drop(first);
        assert_eq!((arena.available(), arena.blocks(), arena.block_bytes()), (2, 2, 4096));
    }

    #[test]
    fn buffer_outlives_every_handle() {
        let arena = Arena::new(8192, 3).unwrap();
        let mut buffer = arena.try_take().unwrap();
        drop(arena);
        buffer.fill(7);
        assert_eq!(buffer.iter().map(|&byte| u64::from(byte)).sum::<u64>(), 7 * 8192);
        assert_eq!(buffer.arena().available(), 2);
    }

    #[test]
    fn bytes_return_the_block_with_their_last_clone() {
        let arena = Arena::new(4096, 1).unwrap();
        let mut buffer = arena.try_take().unwrap();
        buffer[..4].copy_from_slice(b"tide");
        let address = buffer.as_ptr();
        let bytes = buffer.into_bytes(4);
        assert_eq!((&bytes[..], bytes.as_ptr()), (&b"tide"[..], address));
        let rest = bytes.slice(2..);
        drop(bytes);
        assert!(arena.try_take().is_none());
        assert_eq!(&rest[..], b"de");
        drop(rest);
        assert_eq!(arena.available(), 1);
    }

    #[test]
    #[should_panic(expected = "4097 bytes of a buffer of 4096 bytes")]
    fn more_bytes_than_the_buffer_has() {
        let _ = AlignedBuf::alone(4096).unwrap().into_bytes(4097);
    }

    #[test]
    fn sizes_that_cannot_be() {
        for (block_bytes, blocks) in [(0, 1), (4095, 1), (4096, 0), (4096, usize::MAX), (1 << 62, 4)] {
            let error = Arena::new(block_bytes, blocks).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "{block_bytes} × {blocks}: {error}");
        }
        assert_eq!(AlignedBuf::alone(12288).unwrap().len(), 12288);
    }

    #[test]
    fn one_owner_at_a_time_over_threads() {
        let arena = Arena::new(4096, 3).unwrap();
        std::thread::scope(|scope| {
            for mark in 1..=4u8 {
                let arena = arena.clone();
                scope.spawn(move || {
                    for _ in 0..2000 {
                        if let Some(mut buffer) = arena.try_take() {
                            buffer[..64].fill(mark);
                            assert!(buffer[..64].iter().all(|&byte| byte == mark));
                        }
                    }
                });
            }
        });
        assert_eq!(arena.available(), 3);
    }

    #[test]
    fn debug_shows_no_content() {
        let mut buffer = AlignedBuf::alone(4096).unwrap();
        buffer[..6].copy_from_slice(b"secret");
        let text = format!("{buffer:?}");
        assert_eq!(text, format!("AlignedBuf {{ address: {:?}, len: 4096 }}", buffer.as_ptr()));
    }
}
