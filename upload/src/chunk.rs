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
    /// What a bucket without parts takes in one request.
    whole_bytes_max: u64,
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
        let mut whole_bytes_max = u64::MAX;
        for row in buckets {
            max_bytes = max_bytes.min(row.part_bytes_max);
            if row.parts == Parts::None {
                whole_bytes_max = whole_bytes_max.min(row.part_bytes_max);
            } else {
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
            // A tenth of the numbers is left for parts that are sent again.
            chunks_max: (chunks_max - chunks_max / 10).max(1),
            whole_bytes_max,
            equal,
        })
    }

    /// The most bytes that an object may have.
    #[must_use]
    pub fn object_bytes_max(&self) -> u64 {
        let (mut bytes, mut left) = (0_u64, self.chunks_max);
        // Sizes stay the same for many chunks: count them in runs.
        while left > 0 && bytes < self.whole_bytes_max {
            let size = self.bytes_at(bytes);
            let same_until = size.saturating_mul(self.share()).saturating_add(1);
            let run = if size == self.bytes_max || self.equal {
                left
            } else {
                let chunks = same_until.saturating_sub(bytes).div_ceil(size).max(1);
                u32::try_from(chunks).unwrap_or(left).min(left)
            };
            bytes = bytes.saturating_add(size.saturating_mul(u64::from(run)));
            left -= run;
        }
        bytes.min(self.whole_bytes_max)
    }

    fn share(&self) -> u64 {
        u64::from(self.chunks_max / 10).max(1)
    }

    /// The size of a chunk that starts at `offset`: a tenth of the number of chunks suffices for what went before, so
    /// that 9,000 do for any object: 900 × (1 + ln(5 TiB / (900 × 8 MiB))) = 6,800.
    fn bytes_at(&self, offset: u64) -> u64 {
        if self.equal {
            return self.bytes_start;
        }
        let bytes = offset / self.share();
        if bytes <= self.bytes_start {
            return self.bytes_start;
        }
        bytes.next_multiple_of(1 << 20).min(self.bytes_max)
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

#[cfg(test)]
mod tests {
    use super::*;

    fn row() -> Capabilities {
        Capabilities {
            parts: Parts::Parallel,
            part_bytes_min: 4,
            part_bytes_max: 1 << 30,
            parts_max: 100,
            equal_parts: false,
            sparse: true,
            copy_part: false,
            resend_part: false,
            list_parts: true,
            list_uploads: true,
            conditional_put: false,
        }
    }

    fn options(put_bytes_max: u64, part_bytes: u64) -> UploadOptions {
        UploadOptions { put_bytes_max, part_bytes, ..UploadOptions::default() }
    }

    fn sizes(rows: &[Capabilities]) -> ChunkSizes {
        ChunkSizes::new(&options(12, 8), rows).expect("sizes")
    }

    /// Pushes bytes in pieces of these lengths and returns the chunks.
    fn cut(sizes: ChunkSizes, pieces: impl IntoIterator<Item = usize>) -> Vec<Vec<u8>> {
        let mut chunker = Chunker::new(sizes);
        let (mut chunks, mut next) = (Vec::new(), 0_u8);
        let join = |slices: Vec<Bytes>| slices.iter().flat_map(|slice| slice.to_vec()).collect::<Vec<u8>>();
        for piece in pieces {
            let bytes: Vec<u8> = (0..piece)
                .map(|_| {
                    next = next.wrapping_add(1);
                    next
                })
                .collect();
            chunker.push(vec![Bytes::new(), bytes.into()]);
            while let Some(chunk) = chunker.full().expect("room") {
                chunks.push(join(chunk));
            }
        }
        chunks.push(join(chunker.last()));
        let all: Vec<u8> = chunks.concat();
        assert!(all.iter().zip(1_usize..).all(|(byte, nth)| *byte == nth as u8), "in order, none lost");
        chunks
    }

    fn lengths(chunks: &[Vec<u8>]) -> Vec<usize> {
        chunks.iter().map(Vec::len).collect()
    }

    #[test]
    fn what_ends_small_is_one_chunk_and_pieces_are_merged_to_full_ones() {
        assert_eq!(lengths(&cut(sizes(&[row()]), [])), [0]);
        assert_eq!(lengths(&cut(sizes(&[row()]), [5, 7])), [12]);
        assert_eq!(lengths(&cut(sizes(&[row()]), [5, 8])), [8, 5]);
        assert_eq!(lengths(&cut(sizes(&[row()]), [1; 33])), [8, 8, 8, 8, 1]);
        assert_eq!(lengths(&cut(sizes(&[row()]), [32])), [8, 8, 8, 8]);
    }

    #[test]
    fn chunks_keep_to_every_bucket_whatever_the_pieces() {
        let strict = Capabilities { part_bytes_min: 10, equal_parts: true, ..row() };
        for pieces in [vec![3; 50], vec![1, 90, 2, 17, 40], vec![150]] {
            let lengths = lengths(&cut(sizes(&[row(), strict.clone()]), pieces));
            let (last, others) = lengths.split_last().expect("a last one");
            assert!(others.iter().all(|len| *len == 10) && *last <= 10, "{lengths:?}");
        }
        let small = Capabilities { part_bytes_max: 6, ..row() };
        assert!(lengths(&cut(sizes(std::slice::from_ref(&small)), [50])).iter().all(|len| *len <= 6));
        let error = ChunkSizes::new(&options(12, 8), &[small, strict]).expect_err("no size");
        assert_eq!((error.min_bytes, error.max_bytes), (10, 6));
    }

    #[test]
    fn chunks_grow_so_that_the_largest_object_fits_its_parts() {
        let s3 =
            Capabilities { part_bytes_min: 5 << 20, part_bytes_max: 5 << 30, parts_max: 10_000, ..row() };
        let sizes = ChunkSizes::new(&UploadOptions::default(), std::slice::from_ref(&s3)).expect("sizes");
        assert_eq!((sizes.bytes_at(0), sizes.bytes_at(8 << 30)), (8 << 20, 10 << 20));
        assert!(sizes.object_bytes_max() > 5 << 40, "{}", sizes.object_bytes_max());
        let equal = Capabilities { equal_parts: true, ..s3 };
        let sizes = ChunkSizes::new(&UploadOptions::default(), &[equal]).expect("sizes");
        assert_eq!(sizes.bytes_at(1 << 40), 8 << 20);
        assert_eq!(sizes.object_bytes_max(), 9_000 * (8 << 20));
    }

    #[test]
    fn an_object_of_too_many_parts_is_refused() {
        let few = Capabilities { parts_max: 3, equal_parts: true, ..row() };
        let mut chunker = Chunker::new(sizes(&[few]));
        chunker.push(vec![Bytes::from(vec![0; 24])]);
        assert!(chunker.full().expect("room").is_some() && chunker.full().expect("room").is_some());
        assert_eq!(chunker.full(), Ok(None));
        chunker.push(vec![Bytes::from_static(b"x")]);
        assert_eq!(chunker.full(), Err(ObjectTooLarge { bytes_max: 24 }));
    }
}
