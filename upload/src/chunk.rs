//! Cuts the bytes of an object into chunks that every configured bucket takes as parts.
//!
//! Which chunk goes where is not decided here. An object that turns out small is one chunk, for one PUT.
//!
//! Invariants:
//! 1. Every chunk but the last has at least `part_bytes_min` and at most `part_bytes_max` of each bucket, and where one
//!    bucket wants equal parts all but the last have the same size; the last has at most as many as the others, or up to
//!    `put_bytes_max` if it is the only one.
//! 2. There are at most `parts_max` chunks; bytes that would need more are refused.
//! 3. The concatenation of the chunks is what was pushed; slices are split, never copied.
#![forbid(unsafe_code)]

use std::collections::VecDeque;

use bytes::Bytes;

use crate::options::UploadOptions;
use crate::store::{Capabilities, Parts};

/// Sizes of chunks that all buckets take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkSizes {
    put_bytes_max: u64,
    bytes_start: u64,
    bytes_max: u64,
    chunks_max: u32,
    /// Whether chunks must not grow.
    equal: bool,
}

/// Why no size of chunk suits all buckets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "no part size suits all buckets: one needs at least {min_bytes} bytes, another takes at most {max_bytes}; \
     configure only buckets that go together"
)]
pub struct ChunkSizesError {
    /// The largest least part size in bytes.
    pub min_bytes: u64,
    /// The smallest largest part size in bytes.
    pub max_bytes: u64,
}

/// The object has become larger than the stores take.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("an object of these buckets has at most {bytes_max} bytes; end it earlier")]
pub struct ObjectTooLarge {
    /// What an object may have, in bytes.
    pub bytes_max: u64,
}

impl ChunkSizes {
    /// The sizes for objects that may go to any of these buckets.
    ///
    /// # Errors
    /// If the buckets contradict each other.
    pub fn new<'a>(
        options: &UploadOptions,
        buckets: impl IntoIterator<Item = &'a Capabilities>,
    ) -> Result<ChunkSizes, ChunkSizesError> {
        let (mut min_bytes, mut max_bytes, mut chunks_max, mut equal) = (1, u64::MAX, u32::MAX, false);
        for row in buckets {
            max_bytes = max_bytes.min(row.part_bytes_max);
            if row.parts != Parts::None {
                min_bytes = min_bytes.max(row.part_bytes_min);
                chunks_max = chunks_max.min(row.parts_max);
                equal |= row.equal_parts;
            }
        }
        if min_bytes > max_bytes {
            return Err(ChunkSizesError { min_bytes, max_bytes });
        }
        Ok(ChunkSizes {
            put_bytes_max: options.put_bytes_max.min(max_bytes),
            bytes_start: options.part_bytes.clamp(min_bytes, max_bytes),
            bytes_max: max_bytes,
            chunks_max: chunks_max.max(1),
            equal,
        })
    }

    /// The most bytes that an object may have.
    #[must_use]
    pub fn object_bytes_max(&self) -> u64 {
        let (mut bytes, mut left) = (0_u64, self.chunks_max);
        // Sizes stay the same for many chunks: count them in runs.
        while left > 0 {
            let size = self.bytes_at(bytes);
            let run = if size == self.bytes_max || self.equal { left } else { 1 };
            bytes = bytes.saturating_add(size.saturating_mul(u64::from(run)));
            left -= run;
        }
        bytes
    }

    /// The size of a chunk that starts at `offset`: about a thousandth of what went before, so that 10,000 parts
    /// suffice for any object (1,000 × (1 + ln(5 TiB / 8 GiB)) = 7,500).
    fn bytes_at(&self, offset: u64) -> u64 {
        if self.equal {
            return self.bytes_start;
        }
        let share = u64::from(self.chunks_max / 10).max(1);
        (offset / share).next_multiple_of(1 << 20).clamp(self.bytes_start, self.bytes_max)
    }
}

/// Cuts one object.
#[derive(Debug)]
pub struct Chunker {
    sizes: ChunkSizes,
    held: VecDeque<Bytes>,
    held_bytes: u64,
    /// What the chunks handed out so far have.
    cut_bytes: u64,
    chunks: u32,
}

impl Chunker {
    /// For one object.
    #[must_use]
    pub fn new(sizes: ChunkSizes) -> Chunker {
        Chunker { sizes, held: VecDeque::new(), held_bytes: 0, cut_bytes: 0, chunks: 0 }
    }

    /// Takes more bytes.
    pub fn push(&mut self, slices: Vec<Bytes>) {
        self.held_bytes += slices.iter().map(|slice| slice.len() as u64).sum::<u64>();
        self.held.extend(slices.into_iter().filter(|slice| !slice.is_empty()));
    }

    /// The bytes pushed and not yet in a chunk.
    #[must_use]
    pub fn held_bytes(&self) -> u64 {
        self.held_bytes
    }

    /// The next full chunk, if there is one and it is not the last.
    ///
    /// # Errors
    /// If the object is too large.
    pub fn full(&mut self) -> Result<Option<Vec<Bytes>>, ObjectTooLarge> {
        let bytes = self.sizes.bytes_at(self.cut_bytes);
        // Something is always held back: the last chunk must be known as such, and a small object goes in one PUT.
        let hold = if self.chunks == 0 { self.sizes.put_bytes_max.max(bytes) } else { bytes };
        if self.held_bytes <= hold {
            return Ok(None);
        }
        if self.chunks + 1 >= self.sizes.chunks_max {
            return Err(ObjectTooLarge { bytes_max: self.sizes.object_bytes_max() });
        }
        Ok(Some(self.cut(bytes)))
    }

    /// The last chunk, after [`full`](Chunker::full) has none: empty only if the object is.
    #[must_use]
    pub fn last(mut self) -> Vec<Bytes> {
        let bytes = self.held_bytes;
        self.cut(bytes)
    }

    fn cut(&mut self, bytes: u64) -> Vec<Bytes> {
        let mut left = bytes;
        let mut slices = Vec::new();
        while left > 0 {
            let Some(mut slice) = self.held.pop_front() else { break };
            let len = slice.len() as u64;
            if len > left {
                // `left` is below the length of a slice, so it fits.
                let head = slice.split_to(usize::try_from(left).unwrap_or(usize::MAX));
                self.held.push_front(slice);
                slices.push(head);
                break;
            }
            left -= len;
            slices.push(slice);
        }
        self.held_bytes -= bytes;
        self.cut_bytes += bytes;
        self.chunks += 1;
        slices
    }
}
