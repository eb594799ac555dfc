//! The block: a self-describing, checksummed run of frames in append order, the unit of local writes.
//!
//! Owns the layout, its building in a caller's buffer, sealing and verified decoding. When a block is sealed, where it
//! goes and what becomes of it is the spiller's and the segments' business. The byte layout is in docs/format.md.

use std::hash::Hasher;

use crate::record::{FRAME_ALIGN_BYTES, FRAME_HEADER_BYTES, Frames, Header, SLOTS_MAX, frame_len};
use crate::types::{LogId, SequenceNumber};
pub use tidelog_io::segment::BlockPlace;
use twox_hash::XxHash3_64;

/// The version of the block format that this code writes, and the newest it reads.
pub const BLOCK_VERSION: u16 = 1;
/// The size of a block's header in bytes. The frames follow it.
pub const BLOCK_HEADER_BYTES: usize = 128;
/// The size of one entry of the log table in bytes.
pub const TABLE_ENTRY_BYTES: usize = 32;
/// Blocks are padded with zeros to a multiple of this many bytes.
pub const BLOCK_ALIGN_BYTES: usize = 4096;
/// The largest block that is ever decoded, in bytes.
pub const BLOCK_BYTES_MAX: usize = 64 << 20;

const MAGIC: [u8; 8] = *b"tlogBLK\n";
const FLAG_CONTINUES: u16 = 1;
const FLAGS_KNOWN: u16 = FLAG_CONTINUES;

/// Offsets of the header's fields in bytes.
mod at {
    pub const MAGIC: usize = 0;
    pub const VERSION: usize = 8;
    pub const FLAGS: usize = 10;
    pub const ZERO_A: usize = 12;
    pub const DIRECTORY: usize = 16;
    pub const EPOCH: usize = 24;
    pub const SEGMENT: usize = 32;
    pub const INDEX: usize = 36;
    pub const OFFSET: usize = 40;
    pub const NUMBER: usize = 48;
    pub const WATERMARK: usize = 56;
    pub const FRAMES_LEN: usize = 64;
    pub const ENTRIES: usize = 68;
    pub const TOTAL_LEN: usize = 72;
    pub const ZERO_B: usize = 76;
    pub const BODY_CHECKSUM: usize = 112;
    pub const CHECKSUM: usize = 120;
}

const _: () = assert!(at::CHECKSUM + 8 == BLOCK_HEADER_BYTES);
const _: () = assert!(
    BLOCK_HEADER_BYTES.is_multiple_of(FRAME_ALIGN_BYTES)
        && TABLE_ENTRY_BYTES.is_multiple_of(FRAME_ALIGN_BYTES)
);

/// Why bytes are not the block that was looked for.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BlockError {
    /// Nothing was ever written here, or not by tidelog.
    #[error("no block of tidelog starts here")]
    NotABlock,
    /// Written by a newer tidelog.
    #[error(
        "the block has format version {found}, this tidelog knows up to {known}: read it with a newer one"
    )]
    NewerVersion {
        /// The block's version.
        found: u16,
        /// The newest version that this code reads.
        known: u16,
    },
    /// The block is longer than the bytes at hand.
    #[error("the block takes {needed} bytes, only {have} are there")]
    Truncated {
        /// The block's length in bytes.
        needed: usize,
        /// The bytes at hand.
        have: usize,
    },
    /// The bytes are not those that were sealed.
    #[error("the block's checksum does not match its bytes: a torn write or a damaged disk")]
    Checksum,
    /// A valid block, but not of this place: left over from an earlier use of the segment, or misdirected.
    #[error("the block belongs elsewhere: its {what} is {found}, expected {expected}")]
    Misplaced {
        /// The field that differs.
        what: &'static str,
        /// What belongs here.
        expected: u64,
        /// What the block says.
        found: u64,
    },
    /// The checksum matches, the contents make no sense.
    #[error("the block's contents contradict each other: {0}")]
    Corrupt(&'static str),
    /// Blocks that do not follow each other were handed over as if they did.
    #[error("log {log} goes on at change {found} where {expected} was due")]
    Gap {
        /// The log with the hole.
        log: LogId,
        /// The number that was due.
        expected: SequenceNumber,
        /// The number that came.
        found: SequenceNumber,
    },
    /// A change begins in the last block and does not end there.
    #[error("the last block ends in the middle of a change: add the blocks with the rest of it")]
    Unfinished,
}

/// What a block says of one log that has frames in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogEntry {
    /// The log's slot on the device when the block was built.
    pub slot: u32,
    /// The log.
    pub log: LogId,
    /// The number of the change that the log's first frame in the block belongs to.
    pub first: SequenceNumber,
    /// How many changes have their last frame in this block. The log's next block starts at `first + count`.
    pub count: u32,
}

impl LogEntry {
    fn write(&self, out: &mut [u8]) {
        out[0..4].copy_from_slice(&self.slot.to_le_bytes());
        out[4..8].copy_from_slice(&self.count.to_le_bytes());
        out[8..24].copy_from_slice(&self.log.0.to_le_bytes());
        out[24..32].copy_from_slice(&self.first.0.to_le_bytes());
    }

    fn read(bytes: &[u8]) -> LogEntry {
        LogEntry {
            slot: get_u32(bytes, 0),
            count: get_u32(bytes, 4),
            log: LogId(u128::from_le_bytes(*bytes[8..].first_chunk().expect("an entry has 32 bytes"))),
            first: SequenceNumber(get_u64(bytes, 24)),
        }
    }
}

/// Builds one block after another, each in a buffer of the caller.
///
/// 1. `BLOCK_HEADER_BYTES + frames + table ≤ capacity` at all times, so that [`finish`](BlockBuilder::finish) has room.
/// 2. The same buffer is passed to every call between two `finish`.
/// 3. `body` has hashed the frames so far, each run while it is in a cache.
pub struct BlockBuilder {
    capacity_bytes: usize,
    frames_end: usize,
    body: XxHash3_64,
    entries: Vec<LogEntry>,
}

impl BlockBuilder {
    /// A builder of blocks of at most `capacity_bytes`.
    ///
    /// # Panics
    /// If `capacity_bytes` is no positive multiple of [`BLOCK_ALIGN_BYTES`] or exceeds [`BLOCK_BYTES_MAX`].
    #[must_use]
    pub fn new(capacity_bytes: usize) -> BlockBuilder {
        assert!(
            capacity_bytes > 0
                && capacity_bytes.is_multiple_of(BLOCK_ALIGN_BYTES)
                && capacity_bytes <= BLOCK_BYTES_MAX,
            "a block has a whole number of pages, at most {BLOCK_BYTES_MAX} bytes"
        );
        BlockBuilder {
            capacity_bytes,
            frames_end: BLOCK_HEADER_BYTES,
            body: XxHash3_64::new(),
            entries: Vec::new(),
        }
    }

    /// The most that a block takes, in bytes.
    #[must_use]
    #[inline]
    pub fn capacity_bytes(&self) -> usize {
        self.capacity_bytes
    }

    /// Whether the block holds no frames.
    #[must_use]
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.frames_end == BLOCK_HEADER_BYTES
    }

    /// How many bytes of frames the block holds.
    #[must_use]
    #[inline]
    pub fn frames_len(&self) -> usize {
        self.frames_end - BLOCK_HEADER_BYTES
    }

    /// How many bytes of frames still fit, given the table's present entries.
    #[must_use]
    #[inline]
    pub fn room(&self) -> usize {
        self.capacity_bytes - self.frames_end - self.entries.len() * TABLE_ENTRY_BYTES
    }

    /// Whether `frame_bytes` more of frames fit, together with a new entry of the table if `new_entry`.
    #[must_use]
    #[inline]
    pub fn fits(&self, frame_bytes: usize, new_entry: bool) -> bool {
        frame_bytes + if new_entry { TABLE_ENTRY_BYTES } else { 0 } <= self.room()
    }

    /// The entries so far, in the order in which they were added.
    #[must_use]
    #[inline]
    pub fn entries(&self) -> &[LogEntry] {
        &self.entries
    }

    /// Adds `log`, whose first frame in this block belongs to change `first`. Returns the entry's index, good until
    /// the block is finished.
    ///
    /// # Panics
    /// If there is no room for it.
    pub fn add_entry(&mut self, slot: u32, log: LogId, first: SequenceNumber) -> usize {
        assert!(self.fits(0, true), "no room for another log");
        debug_assert!(slot < SLOTS_MAX);
        debug_assert!(self.entries.iter().all(|entry| entry.slot != slot), "a slot means one log in a block");
        self.entries.push(LogEntry { slot, log, first, count: 0 });
        self.entries.len() - 1
    }

    /// Counts `changes` more that have their last frame in this block.
    ///
    /// # Panics
    /// If there is no such entry.
    #[inline]
    pub fn add_count(&mut self, entry: usize, changes: u32) {
        self.entries[entry].count += changes;
    }

    /// Copies as much of `frames` as there is [`room`](Self::room) for behind those that are there. It belongs to the block
    /// only once it is [taken](Self::take). Returns how much that was, in bytes.
    ///
    /// # Panics
    /// If the buffer is smaller than the capacity.
    #[inline]
    pub fn copy(&self, buffer: &mut [u8], frames: &[u8]) -> usize {
        let len = frames.len().min(self.room());
        buffer[self.frames_end..][..len].copy_from_slice(&frames[..len]);
        len
    }

    /// Takes `frames` into the block: whole frames, padding included, the first bytes of those last
    /// [copied](Self::copy).
    ///
    /// # Panics
    /// If they do not fit, or their length is no multiple of [`FRAME_ALIGN_BYTES`].
    #[inline]
    pub fn take(&mut self, frames: &[u8]) {
        let len = frames.len();
        assert!(len <= self.room() && len.is_multiple_of(FRAME_ALIGN_BYTES), "frames must fit and be whole");
        self.body.write(frames);
        self.frames_end += len;
    }

    /// Copies and takes `frames`, which are whole frames.
    ///
    /// # Panics
    /// If they do not fit.
    pub fn push_frames(&mut self, buffer: &mut [u8], frames: &[u8]) {
        self.copy(buffer, frames);
        self.take(frames);
    }

    /// Adds the frame of `header`, whose value is `lead` and then `value`.
    ///
    /// # Panics
    /// If it does not fit, or the header states another length.
    pub fn push_value(&mut self, buffer: &mut [u8], header: Header, lead: &[u8], value: &[u8]) {
        assert_eq!(header.value_len(), lead.len() + value.len(), "the header states the value's length");
        let len = frame_len(header.value_len());
        assert!(len <= self.room(), "frames must fit");
        let padding = &[0; FRAME_ALIGN_BYTES][..len - FRAME_HEADER_BYTES - header.value_len()];
        for bytes in [&header.0.to_le_bytes()[..], lead, value, padding] {
            self.copy(buffer, bytes);
            self.body.write(bytes);
            self.frames_end += bytes.len();
        }
    }

    /// Writes what the block knows of itself and returns its length in bytes, padding included. What is missing until
    /// [`seal`]: the place and the checksum. `continues` says that the last frame is a fragment and not the change's
    /// last. The builder is empty afterwards.
    ///
    /// # Panics
    /// If the buffer is smaller than the capacity.
    pub fn finish(&mut self, buffer: &mut [u8], continues: bool) -> usize {
        let table_start = self.frames_end;
        let table_end = table_start + self.entries.len() * TABLE_ENTRY_BYTES;
        let total_len = table_end.next_multiple_of(BLOCK_ALIGN_BYTES);
        let block = &mut buffer[..total_len];
        for (entry, out) in self.entries.iter().zip(block[table_start..].chunks_exact_mut(TABLE_ENTRY_BYTES))
        {
            entry.write(out);
        }
        block[table_end..].fill(0);
        block[..BLOCK_HEADER_BYTES].fill(0);
        block[at::MAGIC..][..8].copy_from_slice(&MAGIC);
        put_u16(block, at::VERSION, BLOCK_VERSION);
        put_u16(block, at::FLAGS, if continues { FLAG_CONTINUES } else { 0 });
        put_u32(block, at::FRAMES_LEN, u32_len(self.frames_len()));
        put_u32(block, at::ENTRIES, u32_len(self.entries.len()));
        put_u32(block, at::TOTAL_LEN, u32_len(total_len));
        let mut body = std::mem::replace(&mut self.body, XxHash3_64::new());
        body.write(&block[table_start..]);
        put_u64(block, at::BODY_CHECKSUM, body.finish());
        self.frames_end = BLOCK_HEADER_BYTES;
        self.entries.clear();
        total_len
    }
}

/// Writes the place and the checksum into a finished block of exactly its length. Looks at its header only, and may be
/// called again with another place.
///
/// # Panics
/// If `block` is shorter than a header.
pub fn seal(block: &mut [u8], place: &BlockPlace) {
    debug_assert_eq!(Block::peek_len(block), Ok(block.len()));
    put_u64(block, at::DIRECTORY, place.directory);
    put_u64(block, at::EPOCH, place.epoch);
    put_u32(block, at::SEGMENT, place.segment);
    put_u32(block, at::INDEX, place.index);
    put_u64(block, at::OFFSET, place.offset);
    put_u64(block, at::NUMBER, place.number);
    put_u64(block, at::WATERMARK, place.watermark);
    let checksum = checksum(block);
    put_u64(block, at::CHECKSUM, checksum);
}

/// What a reader knows beforehand of the block that should stand in a place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Expected {
    /// The id of the device's directory.
    pub directory: u64,
    /// The segment file.
    pub segment: u32,
    /// The use of the segment file.
    pub epoch: u64,
    /// The block's index in its segment.
    pub index: u32,
    /// The block's offset in its segment, in bytes.
    pub offset: u64,
    /// The block's number, where it is known.
    pub number: Option<u64>,
}

impl From<&BlockPlace> for Expected {
    fn from(place: &BlockPlace) -> Expected {
        let BlockPlace { directory, segment, epoch, index, offset, number, .. } = *place;
        Expected { directory, segment, epoch, index, offset, number: Some(number) }
    }
}

/// The fixed part of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockHeader {
    /// Where the block belongs.
    pub place: BlockPlace,
    /// Whether the last frame is a fragment of a change that goes on in the next block.
    pub continues: bool,
    /// The length of the frames in bytes.
    pub frames_len: usize,
    /// How many logs have frames in the block.
    pub logs: usize,
    /// The length of the whole block in bytes, padding included.
    pub len: usize,
}

/// A verified block.
#[derive(Clone, Copy, Debug)]
pub struct Block<'a> {
    header: BlockHeader,
    frames: &'a [u8],
    table: &'a [u8],
}

impl<'a> Block<'a> {
    /// The length in bytes of the block that starts with `bytes`, at least [`BLOCK_HEADER_BYTES`] of them. Plausible,
    /// not verified: a multiple of [`BLOCK_ALIGN_BYTES`] and at most [`BLOCK_BYTES_MAX`].
    ///
    /// # Errors
    /// [`NotABlock`](BlockError::NotABlock), [`NewerVersion`](BlockError::NewerVersion),
    /// [`Truncated`](BlockError::Truncated), [`Corrupt`](BlockError::Corrupt).
    pub fn peek_len(bytes: &[u8]) -> Result<usize, BlockError> {
        if bytes.get(..MAGIC.len()) != Some(&MAGIC[..]) {
            return Err(BlockError::NotABlock);
        }
        if bytes.len() < BLOCK_HEADER_BYTES {
            return Err(BlockError::Truncated { needed: BLOCK_HEADER_BYTES, have: bytes.len() });
        }
        let version = get_u16(bytes, at::VERSION);
        if version > BLOCK_VERSION {
            return Err(BlockError::NewerVersion { found: version, known: BLOCK_VERSION });
        }
        let len = get_u32(bytes, at::TOTAL_LEN) as usize;
        if version == 0 || len == 0 || !len.is_multiple_of(BLOCK_ALIGN_BYTES) || len > BLOCK_BYTES_MAX {
            return Err(BlockError::Corrupt("an impossible version or length"));
        }
        Ok(len)
    }

    /// Verifies the block at the start of `bytes`, which may go on behind it, and that it is the one expected there.
    ///
    /// # Errors
    /// Any [`BlockError`] but [`Gap`](BlockError::Gap) and [`Unfinished`](BlockError::Unfinished). The place is only
    /// looked at, and [`Misplaced`](BlockError::Misplaced) only returned, once the checksum was found right.
    pub fn decode(bytes: &'a [u8], expected: Option<&Expected>) -> Result<Block<'a>, BlockError> {
        let len = Self::peek_len(bytes)?;
        let have = bytes.len();
        let block = bytes.get(..len).ok_or(BlockError::Truncated { needed: len, have })?;
        if get_u64(block, at::CHECKSUM) != checksum(block)
            || get_u64(block, at::BODY_CHECKSUM) != XxHash3_64::oneshot(&block[BLOCK_HEADER_BYTES..])
        {
            return Err(BlockError::Checksum);
        }
        let header = BlockHeader {
            place: BlockPlace {
                directory: get_u64(block, at::DIRECTORY),
                segment: get_u32(block, at::SEGMENT),
                epoch: get_u64(block, at::EPOCH),
                index: get_u32(block, at::INDEX),
                offset: get_u64(block, at::OFFSET),
                number: get_u64(block, at::NUMBER),
                watermark: get_u64(block, at::WATERMARK),
            },
            continues: get_u16(block, at::FLAGS) & FLAG_CONTINUES != 0,
            frames_len: get_u32(block, at::FRAMES_LEN) as usize,
            logs: get_u32(block, at::ENTRIES) as usize,
            len,
        };
        if let Some(expected) = expected {
            check_place(&header.place, expected)?;
        }
        let zeros_hold = get_u32(block, at::ZERO_A) == 0 && is_zero(&block[at::ZERO_B..at::BODY_CHECKSUM]);
        if get_u16(block, at::FLAGS) & !FLAGS_KNOWN != 0 || !zeros_hold {
            return Err(BlockError::Corrupt("bits that version 1 does not know"));
        }
        let (frames, rest) = block[BLOCK_HEADER_BYTES..]
            .split_at_checked(header.frames_len)
            .ok_or(BlockError::Corrupt("frames longer than the block"))?;
        let (table, padding) = header
            .logs
            .checked_mul(TABLE_ENTRY_BYTES)
            .and_then(|table_len| rest.split_at_checked(table_len))
            .ok_or(BlockError::Corrupt("a log table longer than the block"))?;
        if padding.len() >= BLOCK_ALIGN_BYTES || !is_zero(padding) {
            return Err(BlockError::Corrupt("bytes in the padding"));
        }
        let block = Block { header, frames, table };
        for entry in block.logs() {
            // No number is the last that there is, so that the one behind it is a number too.
            if entry.slot >= SLOTS_MAX || entry.first.0.checked_add(u64::from(entry.count) + 1).is_none() {
                return Err(BlockError::Corrupt("an entry of the log table is out of range"));
            }
        }
        if header.place.number == u64::MAX {
            return Err(BlockError::Corrupt("no block follows a block of its number"));
        }
        Ok(block)
    }

    /// The fixed part.
    #[must_use]
    pub fn header(&self) -> &BlockHeader {
        &self.header
    }

    /// The logs with frames in this block.
    pub fn logs(&self) -> impl ExactSizeIterator<Item = LogEntry> + Clone + use<'a> {
        self.table.chunks_exact(TABLE_ENTRY_BYTES).map(LogEntry::read)
    }

    /// The frames in append order. Their checksum was verified, their structure is as they are walked.
    #[must_use]
    pub fn frames(&self) -> Frames<'a> {
        Frames::new(self.frames)
    }

    /// The bytes of all frames.
    #[must_use]
    pub fn frame_bytes(&self) -> &'a [u8] {
        self.frames
    }
}

/// Covers the header, and by the body's checksum in it the rest.
fn checksum(block: &[u8]) -> u64 {
    XxHash3_64::oneshot(&block[..at::CHECKSUM])
}

fn check_place(place: &BlockPlace, expected: &Expected) -> Result<(), BlockError> {
    let pairs = [
        ("directory", expected.directory, place.directory),
        ("segment", expected.segment.into(), place.segment.into()),
        ("epoch", expected.epoch, place.epoch),
        ("index", expected.index.into(), place.index.into()),
        ("offset", expected.offset, place.offset),
        ("number", expected.number.unwrap_or(place.number), place.number),
    ];
    match pairs.into_iter().find(|(_, expected, found)| expected != found) {
        Some((what, expected, found)) => Err(BlockError::Misplaced { what, expected, found }),
        None => Ok(()),
    }
}

fn is_zero(bytes: &[u8]) -> bool {
    bytes.iter().all(|byte| *byte == 0)
}

fn u32_len(len: usize) -> u32 {
    u32::try_from(len).expect("blocks are smaller than 64 MiB")
}

const _: () = assert!(BLOCK_BYTES_MAX < u32::MAX as usize && FRAME_HEADER_BYTES == 8);

fn put_u16(bytes: &mut [u8], at: usize, value: u16) {
    bytes[at..at + 2].copy_from_slice(&value.to_le_bytes());
}

fn put_u32(bytes: &mut [u8], at: usize, value: u32) {
    bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
}

fn put_u64(bytes: &mut [u8], at: usize, value: u64) {
    bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
}

fn get_u16(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(*bytes[at..].first_chunk().expect("inside the header"))
}

fn get_u32(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(*bytes[at..].first_chunk().expect("inside the header"))
}

fn get_u64(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(*bytes[at..].first_chunk().expect("inside the header"))
}

#[cfg(test)]
pub(crate) mod tests;
