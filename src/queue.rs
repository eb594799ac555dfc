//! Blocks that no object holds yet, in the order of their numbers, device by device.
//!
//! Owns the queue between spillers and uploader, and how a block's bytes are had: from memory, or read back and verified.
//! Which blocks go into which object is decided by the uploader.
//!
//! Invariants:
//! 1. The blocks of a device stand in the order of their numbers. What lies between two neighbours is in objects that
//!    are on their way, or complete.
//! 2. Blocks are taken from the front, and never so that a change is split.
//! 3. A part has no gaps: of each log it gets changes that follow each other.

use std::collections::{BTreeSet, VecDeque};
use std::path::PathBuf;
use std::sync::Arc;

use bytes::Bytes;
use tidelog_io::aligned::AlignedBuf;
use tidelog_io::disk::Files;
use tidelog_io::segment::{BlockPlace, segment_name};

use crate::block::{Block, BlockError, Expected};
use crate::device::Charge;
use crate::error::PersistError;
use crate::types::{LogId, SequenceNumber};

/// By how much [`Scratch`] grows.
const SCRATCH_STEP_BYTES: usize = 2 << 20;

/// The changes of one log in one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BlockRange {
    pub log: LogId,
    pub first: SequenceNumber,
    pub end: SequenceNumber,
}

/// A block on its way to the uploader.
#[derive(Debug)]
pub(crate) struct LocalBlock {
    pub device: usize,
    pub number: u64,
    /// Where it can be read back from; `None` if it is in memory alone.
    pub place: Option<BlockPlace>,
    pub len: usize,
    /// Its bytes, if the memory budget allowed to keep them.
    pub held: Option<Held>,
    /// Its last change goes on in the next block.
    pub continues: bool,
    pub ranges: Vec<BlockRange>,
}

/// A block's bytes in memory, and what they are charged to.
#[derive(Debug)]
pub(crate) struct Held {
    pub bytes: Bytes,
    _charge: Option<Charge>,
}

impl Held {
    /// Bytes that are charged to a budget.
    pub fn charged(bytes: Bytes, charge: Charge) -> Held {
        Held { bytes, _charge: Some(charge) }
    }

    /// Bytes that no budget counts.
    pub fn uncharged(bytes: Bytes) -> Held {
        Held { bytes, _charge: None }
    }
}

/// What the queue knows of one device.
pub(crate) struct Source {
    pub files: Arc<dyn Files>,
    pub directory: PathBuf,
    /// At first those found at recovery.
    pub blocks: VecDeque<LocalBlock>,
    /// Numbers of such blocks of which a part is in an object already, behind changes that are in none: each goes into a
    /// part of its own.
    pub apart: BTreeSet<u64>,
    /// The number of the next block.
    pub next_number: u64,
}

impl Source {
    /// Whether the block at `index` must not be in one part with the one before it.
    fn breaks_before(&self, index: usize) -> bool {
        let (before, number) = (self.blocks[index - 1].number, self.blocks[index].number);
        number != before + 1 || self.apart.contains(&before) || self.apart.contains(&number)
    }
}

/// Blocks on their way into objects.
pub(crate) struct Queue {
    devices: Vec<Source>,
    bytes: usize,
}

impl Queue {
    pub fn new(devices: Vec<Source>) -> Queue {
        let bytes = devices.iter().flat_map(|source| &source.blocks).map(|block| block.len).sum();
        Queue { devices, bytes }
    }

    /// The bytes of all blocks in the queue.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    pub fn devices(&self) -> usize {
        self.devices.len()
    }

    /// A block came.
    pub fn push(&mut self, block: LocalBlock) {
        let source = &mut self.devices[block.device];
        debug_assert_eq!(block.number, source.next_number, "blocks come in the order of their numbers");
        source.next_number = block.number + 1;
        self.bytes += block.len;
        source.blocks.push_back(block);
    }

    /// Whether all blocks below `ends` have come.
    pub fn has_come(&self, ends: &[Option<u64>]) -> bool {
        ends.iter().zip(&self.devices).all(|(end, source)| end.is_none_or(|end| end <= source.next_number))
    }

    /// Whether a block below `ends` is in the queue.
    pub fn holds_below(&self, ends: &[Option<u64>]) -> bool {
        ends.iter().zip(&self.devices).any(|(end, source)| {
            end.is_some_and(|end| source.blocks.front().is_some_and(|block| block.number < end))
        })
    }

    /// For each device, the end of the blocks that can be taken without splitting a change; `None` if there are none.
    pub fn whole_ends(&self) -> Vec<Option<u64>> {
        let whole_end = |source: &Source| {
            source.blocks.iter().rev().find(|block| !block.continues).map(|block| block.number + 1)
        };
        self.devices.iter().map(whole_end).collect()
    }

    /// The number of the first block of a device, or that of the next one to come.
    pub fn first_number(&self, device: usize) -> u64 {
        let source = &self.devices[device];
        source.blocks.front().map_or(source.next_number, |block| block.number)
    }

    /// Drops blocks off the front of a device while nothing in them is needed; whether there were any.
    pub fn drop_front(&mut self, device: usize, needed: impl Fn(&LocalBlock) -> bool) -> bool {
        let blocks = &mut self.devices[device].blocks;
        let dropped = blocks.iter().position(needed).unwrap_or(blocks.len());
        self.bytes -= blocks.drain(..dropped).map(|block| block.len).sum::<usize>();
        dropped > 0
    }

    /// Takes a part's worth of blocks off the front, below `ends`, without splitting a change and without a gap. `None` if
    /// there are none.
    pub fn take(&mut self, part_bytes: usize, ends: &[Option<u64>]) -> Option<Vec<LocalBlock>> {
        let mut taken = Vec::new();
        let mut bytes = 0;
        for (device, source) in self.devices.iter().enumerate() {
            let end = ends[device].unwrap_or(0);
            let mut whole = 0;
            let mut device_bytes = 0;
            let mut whole_bytes = 0;
            for (count, block) in source.blocks.iter().take_while(|block| block.number < end).enumerate() {
                let is_cut = whole > 0 && whole == count && source.breaks_before(count);
                if bytes + whole_bytes >= part_bytes || is_cut {
                    break;
                }
                device_bytes += block.len;
                if !block.continues {
                    (whole, whole_bytes) = (count + 1, device_bytes);
                }
            }
            bytes += whole_bytes;
            taken.push(whole);
        }
        if bytes == 0 {
            return None;
        }
        self.bytes -= bytes;
        let fronts = self.devices.iter_mut().zip(taken);
        Some(fronts.flat_map(|(source, count)| source.blocks.drain(..count).collect::<Vec<_>>()).collect())
    }

    /// Puts blocks back to where they came from.
    pub fn give_back(&mut self, blocks: Vec<LocalBlock>) {
        for block in blocks {
            self.bytes += block.len;
            self.devices[block.device].blocks.push_back(block);
        }
        for source in &mut self.devices {
            // Objects on their way may hold earlier ones and later ones.
            source.blocks.make_contiguous().sort_by_key(|block| block.number);
        }
    }

    /// The bytes of blocks, from memory or, by way of `scratch`, from the disk: blocks side by side in one read, past the
    /// page cache where that can be, since nobody reads them again.
    pub fn load<'a>(
        &self,
        blocks: &'a [LocalBlock],
        scratch: &'a mut Scratch,
    ) -> Result<Vec<&'a [u8]>, PersistError> {
        let on_disk = |block: &&LocalBlock| block.held.is_none();
        let mut free = scratch.get(blocks.iter().filter(on_disk).map(|block| block.len).sum())?;
        let mut loaded = Vec::with_capacity(blocks.len());
        for run in blocks.chunk_by(side_by_side) {
            if let Some(held) = &run[0].held {
                loaded.push(&held.bytes[..]);
                continue;
            }
            let (bytes, rest) =
                std::mem::take(&mut free).split_at_mut(run.iter().map(|block| block.len).sum());
            free = rest;
            self.read_back(&run[0], bytes)?;
            let mut bytes = &*bytes;
            for block in run {
                let (block, rest) = bytes.split_at(block.len);
                loaded.push(block);
                bytes = rest;
            }
        }
        Ok(loaded)
    }

    /// Reads what begins with a block.
    fn read_back(&self, first: &LocalBlock, bytes: &mut [u8]) -> Result<(), PersistError> {
        let place = first.place.as_ref().expect("a block is in memory or on the disk");
        let source = &self.devices[first.device];
        let name = segment_name(place.segment);
        let reason = match source.files.read_at(&name, place.offset, bytes) {
            Ok(read) if read == bytes.len() => return Ok(()),
            Ok(read) => format!("{read} of {} bytes", bytes.len()),
            Err(error) => error.to_string(),
        };
        let directory = source.directory.display();
        let what =
            format!("block {} at byte {} of {name} in {directory}: {reason}", first.number, place.offset);
        Err(PersistError::ReadBack { what })
    }

    /// Verifies blocks one by one, each against the place it should come from.
    pub fn decode<'a>(
        &self,
        blocks: &[LocalBlock],
        loaded: &[&'a [u8]],
    ) -> impl Iterator<Item = Result<Block<'a>, PersistError>> {
        let decode = |(block, bytes): (&LocalBlock, &&'a [u8])| {
            let expected = block.place.as_ref().map(Expected::from);
            Block::decode(bytes, expected.as_ref()).map_err(|error| {
                let directory = self.devices[block.device].directory.display();
                let place = block.place.map_or_else(
                    || "memory".to_owned(),
                    |place| {
                        format!("{} in {directory} at byte {}", segment_name(place.segment), place.offset)
                    },
                );
                PersistError::ReadBack { what: format!("block {} from {place}: {error}", block.number) }
            })
        };
        blocks.iter().zip(loaded).map(decode)
    }
}

/// Blocks that are sound one by one and make no sense together.
impl From<BlockError> for PersistError {
    fn from(error: BlockError) -> PersistError {
        PersistError::ReadBack { what: error.to_string() }
    }
}

/// Whether both are read back, and `next` stands right behind `block`.
fn side_by_side(block: &LocalBlock, next: &LocalBlock) -> bool {
    let (None, None, Some(place), Some(behind)) = (&block.held, &next.held, &block.place, &next.place) else {
        return false;
    };
    block.device == next.device
        && place.segment == behind.segment
        && place.offset + block.len as u64 == behind.offset
}

/// Memory that blocks are read back into, aligned for reads past the page cache. It is kept, since zeroing it for each part
/// costs as much as reading.
#[derive(Default)]
pub(crate) struct Scratch(Option<AlignedBuf>);

impl Scratch {
    fn get(&mut self, len: usize) -> Result<&mut [u8], PersistError> {
        if self.0.as_ref().map_or(0, |buffer| buffer.len()) < len {
            let buffer = AlignedBuf::alone(len.next_multiple_of(SCRATCH_STEP_BYTES)).map_err(|error| {
                PersistError::ReadBack { what: format!("{len} bytes of memory for it: {error}") }
            })?;
            self.0 = Some(buffer);
        }
        Ok(self.0.as_mut().map_or(&mut [], |buffer| &mut buffer[..len]))
    }
}
