//! What stands in one use of a segment: blocks from its start on, and where and how they end.
//!
//! A bad block is where they end, unless a good one behind it shows that nobody needs it. How uses follow each other, and
//! whether an end is damage, is decided in recovery.rs.

use std::io;
use std::path::Path;

use tidelog_io::disk::Files;
use tidelog_io::segment::{BlockPlace, segment_name};

use crate::block::{BLOCK_ALIGN_BYTES, Block, BlockError, Expected};
use crate::error::OpenError;
use crate::queue::{BlockRange, LocalBlock};
use crate::record::{FrameKind, Header};
use crate::types::{LogId, SequenceNumber};

/// How much is read at once, in bytes.
const WINDOW_BYTES: usize = 1 << 20;

/// Where and why reading stopped.
#[derive(Debug)]
pub(super) struct Bad {
    pub error: OpenError,
    /// The number that the bad block must have had, where a later one in its segment tells.
    pub number: Option<u64>,
    /// What a segment that is not full looks like behind its last block.
    pub is_rest: bool,
    /// Not even a torn write looks like that.
    pub is_certain: bool,
}

impl Bad {
    /// What is in the place of a block.
    pub fn block(
        directory: &Path,
        segment: u32,
        offset: u64,
        source: BlockError,
        number: Option<u64>,
    ) -> Bad {
        let is_rest = matches!(source, BlockError::NotABlock | BlockError::Misplaced { .. });
        let (directory, segment) = (directory.to_owned(), segment_name(segment));
        let error = OpenError::Damaged { directory, segment, offset, source };
        Bad { error, number, is_rest, is_certain: false }
    }
}

/// A use of a segment, to be read.
pub(super) struct Scan<'a> {
    pub device: usize,
    pub directory: &'a Path,
    pub files: &'a dyn Files,
    pub directory_id: u64,
    pub segment: u32,
    pub epoch: u64,
    /// Blocks from this number on do not count.
    pub limit: Option<u64>,
    /// Nobody needs the blocks below this number.
    pub settled: u64,
}

/// What was read.
pub(super) struct Found {
    /// A run of valid blocks, and for each the log whose change of the block before goes on in it. From the start of the
    /// segment on, unless something before it is `damaged`.
    pub blocks: Vec<(LocalBlock, Option<LogId>)>,
    /// What is bad before the run, where all blocks are settled.
    pub damaged: Option<Bad>,
    /// The highest watermark in any valid block of this use.
    pub watermark: u64,
    /// Where the run ended; `None` at the end of the file.
    pub bad: Option<Bad>,
    /// Whether valid blocks of this use stand behind that.
    pub later: bool,
}

impl Scan<'_> {
    /// Reads it.
    ///
    /// What cannot be read is bad.
    pub fn run(&self) -> Found {
        let mut found = Found { blocks: Vec::new(), damaged: None, watermark: 0, bad: None, later: false };
        let mut window = Window { scan: self, start: 0, bytes: Vec::new() };
        let mut offset = 0;
        let mut index = 0;
        loop {
            let bytes = match window.block_at(offset) {
                Ok([]) => break,
                Ok(bytes) => bytes,
                Err(error) => {
                    found.bad = Some(Bad { error, number: None, is_rest: false, is_certain: true });
                    break;
                }
            };
            let following = found.bad.is_none();
            let decoded = if following {
                let (directory, segment, epoch) = (self.directory_id, self.segment, self.epoch);
                Block::decode(
                    bytes,
                    Some(&Expected { directory, segment, epoch, index, offset, number: None }),
                )
            } else {
                self.decode_stray(bytes, offset)
            };
            match decoded {
                Ok(block) => {
                    let place = block.header().place;
                    if self.limit.is_some_and(|limit| place.number >= limit) {
                        // Written again elsewhere: neither it nor what follows here counts.
                        break;
                    }
                    found.watermark = found.watermark.max(place.watermark);
                    if place.number <= self.settled
                        && let Some(bad) = found.bad.take()
                    {
                        // What is bad had a lower number: nobody needs it, and what is good before it is of no use alone.
                        found.damaged = Some(bad);
                        found.blocks.clear();
                        found.later = false;
                        index = place.index;
                    }
                    if let Some(bad) = &mut found.bad {
                        found.later = true;
                        let behind = u64::from(place.index.saturating_sub(index));
                        bad.number = bad.number.or(place.number.checked_sub(behind));
                    } else {
                        found.blocks.push((local_block(self.device, &block, place), resumed_log(&block)));
                        index += 1;
                    }
                    offset += block.header().len as u64;
                }
                Err(source) => {
                    if following {
                        // What a newer program wrote is no torn write, and only that can say what it is.
                        let is_certain = matches!(source, BlockError::NewerVersion { .. });
                        let bad = Bad::block(self.directory, self.segment, offset, source, None);
                        found.bad = Some(Bad { is_certain, ..bad });
                    }
                    offset += BLOCK_ALIGN_BYTES as u64;
                }
            }
        }
        found
    }

    /// A block of this use behind a bad one, where its index is not known.
    fn decode_stray<'a>(&self, bytes: &'a [u8], offset: u64) -> Result<Block<'a>, BlockError> {
        let block = Block::decode(bytes, None)?;
        let place = block.header().place;
        let own = (place.directory, place.segment, place.epoch, place.offset)
            == (self.directory_id, self.segment, self.epoch, offset);
        if own { Ok(block) } else { Err(BlockError::NotABlock) }
    }
}

/// Reads a file forward in large pieces.
struct Window<'a> {
    scan: &'a Scan<'a>,
    start: u64,
    bytes: Vec<u8>,
}

impl Window<'_> {
    /// The bytes from `offset` on: all of the block that begins there, if one does; none at the end of the file.
    fn block_at(&mut self, offset: u64) -> Result<&[u8], OpenError> {
        let bytes = self.at(offset, BLOCK_ALIGN_BYTES)?;
        if bytes.is_empty() {
            return Ok(&[]);
        }
        let needed = Block::peek_len(bytes).unwrap_or(BLOCK_ALIGN_BYTES);
        self.at(offset, needed)
    }

    /// The bytes from `offset` on: at least `len`, fewer only at the end of the file.
    fn at(&mut self, offset: u64, len: usize) -> Result<&[u8], OpenError> {
        let skip = usize::try_from(offset.saturating_sub(self.start)).unwrap_or(usize::MAX);
        if offset < self.start || skip.saturating_add(len) > self.bytes.len() {
            self.bytes.resize(len.max(WINDOW_BYTES), 0);
            let name = segment_name(self.scan.segment);
            let read = self
                .scan
                .files
                .read_at(&name, offset, &mut self.bytes)
                .map_err(|source| self.error(&name, source))?;
            self.bytes.truncate(read);
            self.start = offset;
            return Ok(&self.bytes);
        }
        Ok(&self.bytes[skip..])
    }

    fn error(&self, name: &str, source: io::Error) -> OpenError {
        let directory = self.scan.directory;
        match source.kind() {
            io::ErrorKind::NotFound => {
                OpenError::SegmentMissing { directory: directory.to_owned(), segment: name.to_owned() }
            }
            _ => OpenError::Io { action: format!("reading {name} in {}", directory.display()), source },
        }
    }
}

fn local_block(device: usize, block: &Block<'_>, place: BlockPlace) -> LocalBlock {
    let ranges = block.logs().map(|entry| BlockRange {
        log: entry.log,
        first: entry.first,
        end: SequenceNumber(entry.first.0 + u64::from(entry.count)),
    });
    LocalBlock {
        device,
        number: place.number,
        place: Some(place),
        len: block.header().len,
        held: None,
        continues: block.header().continues,
        ranges: ranges.collect(),
    }
}

/// The log whose change of the block before goes on in this one.
fn resumed_log(block: &Block<'_>) -> Option<LogId> {
    let header = Header::read(block.frame_bytes())?;
    let resumes = matches!(header.kind(), Some(FrameKind::FragmentMiddle | FrameKind::FragmentLast));
    let entry = block.logs().find(|entry| resumes && entry.slot == header.slot())?;
    Some(entry.log)
}
