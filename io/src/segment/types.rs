//! What goes into [`Segments`](super::Segments) and comes out of it. No behaviour lives here.

use std::io;
use std::sync::Arc;

use crate::aligned::AlignedBuf;
#[cfg(doc)]
use crate::segment::Segments;

/// Where a block belongs: sealed into the block, so that a stale or misplaced one is told from the right one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlockPlace {
    /// Id of the local directory.
    pub directory: u64,
    /// The segment file.
    pub segment: u32,
    /// Which use of the segment file: grows with every use of any file of the directory.
    pub epoch: u64,
    /// How many blocks stand before it in this use of the segment.
    pub index: u32,
    /// Offset in the segment file in bytes.
    pub offset: u64,
    /// Number of the block: dense over the device, kept when the block is written again elsewhere.
    pub number: u64,
    /// All blocks with smaller numbers than this were durable when the block was submitted.
    pub watermark: u64,
}

/// The durable record of what blocks alone cannot tell.
///
/// When a method returns an error its record may or may not be durable; it is then called again with a greater epoch,
/// perhaps for the same segment.
pub trait Journal: Send {
    /// Records, durably, that `segment` is used from now on under `epoch`. The first block of that use is written only
    /// after it returned `Ok`.
    ///
    /// # Errors
    /// Whatever keeps the record from being durable.
    fn acquired(&mut self, segment: u32, epoch: u64) -> io::Result<()>;

    /// The use recorded last could not begin, and holds nothing: it ends with the next record at the latest.
    fn unused(&mut self, segment: u32, epoch: u64) {
        let _ = (segment, epoch);
    }

    /// Records, durably, that of all blocks under epochs below `epoch_below` only those with numbers below `number`
    /// count: the others are written again under greater epochs.
    ///
    /// # Errors
    /// Whatever keeps the record from being durable.
    fn cut(&mut self, epoch_below: u64, number: u64) -> io::Result<()>;
}

/// Writes a block's place and its checksum into it. Called once for every submission of the block.
pub type SealFn = Box<dyn FnMut(&mut [u8], &BlockPlace) + Send>;

/// How [`Segments`] use a directory.
#[derive(Clone, Debug)]
pub struct SegmentConfig {
    /// Id of the directory, sealed into every block.
    pub directory: u64,
    /// Length of a segment file in bytes, a multiple of 4096, at least as long as the longest block.
    pub segment_bytes: u64,
    /// How many segment files there may be: the budget of the directory.
    pub segments_max: u32,
    /// Whether new segments are made ready by a thread of their own, so that [`Segments::submit`] never waits for them.
    pub background: bool,
}

/// A segment file found at open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KnownSegment {
    /// The file.
    pub segment: u32,
    /// Whether it holds blocks that may still be needed; it is then reused only after [`Segments::release`].
    pub in_use: bool,
}

/// A block that is durable, as are all before it.
#[derive(Debug)]
pub struct DurableBlock {
    /// Where it is.
    pub place: BlockPlace,
    /// What was submitted, sealed for that place.
    pub buffer: AlignedBuf,
    /// Length of the block in the buffer, in bytes.
    pub len: usize,
}

/// Why a block was not taken.
#[derive(Clone, Debug)]
pub enum RefusedReason {
    /// As many writes are in flight as the disk takes: poll, then submit again.
    Depth,
    /// The budget of the directory or the space of its file system is used up: release a segment first.
    NoSegment,
    /// A segment is being made ready, or blocks are being written again after a failure: poll, then submit again.
    Preparing,
    /// The device failed repeatedly; nothing is written to it any more.
    Sick(Arc<io::Error>),
}

/// A block that was not taken: it comes back.
#[derive(Debug)]
pub struct Refused {
    /// Why.
    pub reason: RefusedReason,
    /// The block, untouched.
    pub buffer: AlignedBuf,
}

/// Whether the device can be used.
#[derive(Clone, Debug)]
pub enum Health {
    /// It takes blocks.
    Healthy,
    /// It failed repeatedly and takes none any more.
    Sick(Arc<io::Error>),
}
