//! What blocks alone cannot tell about a local directory: the records of its manifest.
//!
//! Pure. What the records add up to is in `manifest/state.rs`. The file that holds the records, its framing and its
//! checksums belong to `io/src/directory.rs`; what may be released or deleted, and when, is decided in `retention.rs`
//! and only recorded here.
//!
//! A record is applied to the live state first and appended to the file only if the state took it, so that a manifest
//! never holds a record that its own replay refuses. A record must be durable before what it announces is done.
//!
//! The files of an object are named after it: its name, or its name and a suffix. So whatever an upload may have left behind,
//! in any of the buckets noted when it was opened, begins with the name in that record.
//!
//! A record is a tag byte and its fields: integers without a width are those of `varint.rs`, fixed ones little-endian, a text is its
//! length and its UTF-8. Tags are never used again; a record with an unknown tag comes from a newer program.

mod state;

use std::ops::Range;
use std::sync::Arc;

pub use state::{Cut, Held, LogExtent, LogState, ManifestState, OpenUpload};

use crate::fields::{FieldError, FieldReader, put_text};
use crate::handle::LOG_NAME_BYTES_MAX;
use crate::piece::{self, BUCKET_BYTES_MAX, OBJECT_NAME_BYTES_MAX, PIECES_MAX, Piece};
use crate::{KeyGroupRange, LogId, SequenceNumber, varint};

/// The most ranges in one [`ManifestRecord::ObjectCompleted`], so that a record stays far below the manifest file's
/// limit of 1 MiB. An object with more takes several records; see [`ManifestRecord::completed`].
pub const RANGES_PER_RECORD_MAX: usize = 1 << 13;
/// The most buckets in which files of one object may be.
pub const BUCKETS_MAX: usize = 64;
/// The longest suffix that tells the files of an object apart, in bytes.
pub const SUFFIX_BYTES_MAX: usize = 16;
/// The longest name of a holder, in bytes.
pub const HOLDER_BYTES_MAX: usize = 256;
/// The most objects that the holders of one directory have, so that its manifest stays far below the file's limit of 1 GiB.
/// An object counts once for each holder, and for each log that the holder has it for.
pub const HOLDS_MAX: usize = 1 << 19;
/// The most logs in one [`ManifestRecord::ObjectHeld`].
pub const LOGS_PER_RECORD_MAX: usize = 1 << 13;
/// The most directories of one changelog, beside the one that a manifest is of.
pub const OTHERS_MAX: usize = 1 << 12;

const RANGE_BYTES_MIN: usize = 18;
const PIECE_BYTES_MIN: usize = 4;
const LOG_BYTES: usize = 16;
const DIRECTORY_BYTES: usize = 8;

/// The changes `[first, end)` of one log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LogRange {
    /// The log.
    pub log: LogId,
    /// The first change, inclusive.
    pub first: SequenceNumber,
    /// The end, exclusive.
    pub end: SequenceNumber,
}

/// An object whose commit is proven, as far as one directory's logs are concerned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CompletedObject {
    /// Its name, which contains a unique token and so is never used twice, in any bucket.
    pub object: String,
    /// The token that its checksums are bound to.
    pub token: u64,
    /// Where its bytes are.
    pub pieces: Vec<Piece>,
    /// Where its footer is, in bytes.
    pub footer: Range<u64>,
    /// A block number of this directory: every change in blocks below it is in this object, in another complete one,
    /// truncated, or dropped with its log.
    pub blocks_end: u64,
    /// The changes of this directory's logs in it. A log may have several ranges; none overlaps another object's.
    pub ranges: Vec<LogRange>,
    /// The ids of the other directories whose logs had changes in it, ascending: without one of them nobody can say that
    /// the object is not needed. Empty in records from before this was noted.
    pub others: Vec<u64>,
}

impl CompletedObject {
    /// Its length in bytes.
    #[must_use]
    pub fn object_bytes(&self) -> u64 {
        piece::total_bytes(&self.pieces)
    }
}

/// One fact about a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ManifestRecord {
    /// The directory was opened for writing. Segment epochs and block numbers from here on are at least these.
    Opened {
        /// Random, to tell this use of the directory from others.
        session: u64,
        /// The lowest epoch that this use may give to a segment.
        next_epoch: u64,
        /// The lowest number that this use may give to a block.
        next_number: u64,
    },
    /// A segment file was taken into use.
    SegmentAcquired {
        /// The segment.
        segment: u32,
        /// This use of it; epochs only grow.
        epoch: u64,
    },
    /// Nothing in a segment is needed any more: its file may be used again.
    SegmentReleased {
        /// The segment.
        segment: u32,
        /// The use that ended.
        epoch: u64,
    },
    /// This use of a segment holds exactly these blocks, all of them durable: none is to come.
    SegmentSealed {
        /// The segment.
        segment: u32,
        /// The use.
        epoch: u64,
        /// The numbers of its blocks.
        blocks: Range<u64>,
    },
    /// Blocks in segments of epochs below `epoch_below` count only if their number is below `number`.
    Cut {
        /// The first epoch that the cut does not concern.
        epoch_below: u64,
        /// The first block number that does not count.
        number: u64,
    },
    /// Every change in blocks below this number is in a complete object, or truncated.
    BlocksSettled {
        /// The number.
        number: u64,
    },
    /// A log exists.
    LogCreated {
        /// The log.
        log: LogId,
        /// Its name.
        name: String,
        /// Its key groups.
        key_groups: KeyGroupRange,
    },
    /// The changes of a log below `to` are not needed any more.
    LogTruncated {
        /// The log.
        log: LogId,
        /// The first change that is needed.
        to: SequenceNumber,
    },
    /// A checkpoint that holds the changes of a log below `to` is complete.
    LogConfirmed {
        /// The log.
        log: LogId,
        /// The end of what is confirmed, exclusive.
        to: SequenceNumber,
    },
    /// A log gets no more changes.
    LogClosed {
        /// The log.
        log: LogId,
    },
    /// Nothing of a log is left, neither in segments nor in objects.
    LogForgotten {
        /// The log.
        log: LogId,
    },
    /// Files of an object may exist, in these buckets, from here on.
    UploadOpened {
        /// The URLs of the buckets.
        buckets: Vec<Arc<str>>,
        /// Its name.
        object: String,
        /// Its token.
        token: u64,
        /// The ids of the other directories that were open, ascending: one of them may know that the object is complete.
        /// Empty in records from before this was noted.
        others: Vec<u64>,
    },
    /// An object's commit is proven.
    ObjectCompleted(CompletedObject),
    /// Nothing is left of an upload, in any bucket, but the pieces of its object, if that is complete.
    UploadSettled {
        /// The name of its object.
        object: String,
    },
    /// A completed object that nobody needs was deleted; or one that was handed over, or let go of, needs no remembering any
    /// more.
    ObjectDeleted {
        /// Its name.
        object: String,
    },
    /// A holder needs an object, beside those that it holds already.
    ObjectHeld {
        /// The holder.
        holder: String,
        /// The name of the object.
        object: String,
        /// The logs for which the holder has a handle that names the object: what counts once that is handed over. Added to
        /// those that the holder has it for already.
        logs: Vec<LogId>,
    },
    /// A completed object is an engine's registry's to delete. A log may refer to it only while a holder has it for that
    /// log.
    ObjectHandedOver {
        /// The name of the object.
        object: String,
    },
    /// A holder needs nothing any more.
    HolderReleased {
        /// The holder.
        holder: String,
    },
}

/// Why a record was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ManifestError {
    /// The record's kind is unknown.
    #[error("the manifest has a record of kind {tag}, which this program does not know: use a newer tidelog")]
    NewerRecord {
        /// The kind's tag.
        tag: u8,
    },
    /// The record's bytes end too early.
    #[error(
        "a manifest record ends inside its {0}: the directory was damaged or written by a faulty program"
    )]
    Truncated(&'static str),
    /// A field of the record is out of bounds.
    #[error("a manifest record has an invalid {0}: the directory was damaged or written by a faulty program")]
    Invalid(&'static str),
    /// The record contradicts the ones before it.
    #[error("manifest record {record} contradicts the ones before it: {reason}")]
    Inconsistent {
        /// The record, readable.
        record: String,
        /// What it contradicts.
        reason: &'static str,
    },
}

const TAG_OPENED: u8 = 1;
const TAG_SEGMENT_ACQUIRED: u8 = 2;
const TAG_SEGMENT_RELEASED: u8 = 3;
const TAG_CUT: u8 = 4;
const TAG_LOG_CREATED: u8 = 5;
const TAG_LOG_TRUNCATED: u8 = 6;
const TAG_LOG_CONFIRMED: u8 = 7;
const TAG_LOG_CLOSED: u8 = 8;
const TAG_LOG_FORGOTTEN: u8 = 9;
const TAG_UPLOAD_OPENED: u8 = 10;
const TAG_OBJECT_COMPLETED: u8 = 11;
const TAG_UPLOAD_SETTLED: u8 = 12;
const TAG_OBJECT_DELETED: u8 = 13;
const TAG_SEGMENT_SEALED: u8 = 14;
const TAG_OBJECT_HELD: u8 = 15;
const TAG_OBJECT_HANDED_OVER: u8 = 16;
const TAG_HOLDER_RELEASED: u8 = 17;
const TAG_BLOCKS_SETTLED: u8 = 18;
const TAG_SHARED_UPLOAD_OPENED: u8 = 19;
const TAG_SHARED_OBJECT_COMPLETED: u8 = 20;

impl ManifestRecord {
    /// The records that say that `object` is complete: one, or several if it has very many ranges.
    ///
    /// Should only some of them survive a crash, the others' changes are unknown to be in the object and are sent
    /// again.
    pub fn completed(mut object: CompletedObject) -> Vec<ManifestRecord> {
        let ranges = std::mem::take(&mut object.ranges);
        if ranges.is_empty() {
            return vec![ManifestRecord::ObjectCompleted(object)];
        }
        ranges
            .chunks(RANGES_PER_RECORD_MAX)
            .map(|ranges| {
                ManifestRecord::ObjectCompleted(CompletedObject { ranges: ranges.to_vec(), ..object.clone() })
            })
            .collect()
    }

    /// The records that say that `holder` has `object` for `logs`: one, or several if there are very many logs.
    pub fn held(holder: &str, object: &str, logs: &[LogId]) -> Vec<ManifestRecord> {
        let held = |logs: &[LogId]| ManifestRecord::ObjectHeld {
            holder: holder.to_owned(),
            object: object.to_owned(),
            logs: logs.to_vec(),
        };
        if logs.is_empty() { vec![held(logs)] } else { logs.chunks(LOGS_PER_RECORD_MAX).map(held).collect() }
    }

    /// The record as bytes. Only records that [`ManifestState::apply`] took are sure to decode.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(64);
        match self {
            ManifestRecord::Opened { session, next_epoch, next_number } => {
                out.push(TAG_OPENED);
                out.extend_from_slice(&session.to_le_bytes());
                varint::put(&mut out, *next_epoch);
                varint::put(&mut out, *next_number);
            }
            ManifestRecord::SegmentAcquired { segment, epoch } => {
                put_segment(&mut out, TAG_SEGMENT_ACQUIRED, *segment, *epoch);
            }
            ManifestRecord::SegmentReleased { segment, epoch } => {
                put_segment(&mut out, TAG_SEGMENT_RELEASED, *segment, *epoch);
            }
            ManifestRecord::SegmentSealed { segment, epoch, blocks } => {
                put_segment(&mut out, TAG_SEGMENT_SEALED, *segment, *epoch);
                varint::put(&mut out, blocks.start);
                varint::put(&mut out, blocks.end.wrapping_sub(blocks.start));
            }
            ManifestRecord::Cut { epoch_below, number } => {
                out.push(TAG_CUT);
                varint::put(&mut out, *epoch_below);
                varint::put(&mut out, *number);
            }
            ManifestRecord::BlocksSettled { number } => {
                out.push(TAG_BLOCKS_SETTLED);
                varint::put(&mut out, *number);
            }
            ManifestRecord::LogCreated { log, name, key_groups } => {
                put_log(&mut out, TAG_LOG_CREATED, *log);
                put_text(&mut out, name);
                varint::put(&mut out, u64::from(key_groups.first().0));
                varint::put(&mut out, u64::from(key_groups.last().0));
            }
            ManifestRecord::LogTruncated { log, to } => {
                put_log(&mut out, TAG_LOG_TRUNCATED, *log);
                varint::put(&mut out, to.0);
            }
            ManifestRecord::LogConfirmed { log, to } => {
                put_log(&mut out, TAG_LOG_CONFIRMED, *log);
                varint::put(&mut out, to.0);
            }
            ManifestRecord::LogClosed { log } => put_log(&mut out, TAG_LOG_CLOSED, *log),
            ManifestRecord::LogForgotten { log } => put_log(&mut out, TAG_LOG_FORGOTTEN, *log),
            ManifestRecord::UploadOpened { buckets, object, token, others } => {
                out.push(if others.is_empty() { TAG_UPLOAD_OPENED } else { TAG_SHARED_UPLOAD_OPENED });
                varint::put(&mut out, buckets.len() as u64);
                buckets.iter().for_each(|bucket| put_text(&mut out, bucket));
                put_text(&mut out, object);
                out.extend_from_slice(&token.to_le_bytes());
                put_others(&mut out, others);
            }
            ManifestRecord::ObjectCompleted(completed) => {
                let is_shared = !completed.others.is_empty();
                out.push(if is_shared { TAG_SHARED_OBJECT_COMPLETED } else { TAG_OBJECT_COMPLETED });
                put_completed(&mut out, completed);
                put_others(&mut out, &completed.others);
            }
            ManifestRecord::UploadSettled { object } => {
                out.push(TAG_UPLOAD_SETTLED);
                put_text(&mut out, object);
            }
            ManifestRecord::ObjectDeleted { object } => {
                out.push(TAG_OBJECT_DELETED);
                put_text(&mut out, object);
            }
            ManifestRecord::ObjectHeld { holder, object, logs } => {
                out.push(TAG_OBJECT_HELD);
                put_text(&mut out, holder);
                put_text(&mut out, object);
                varint::put(&mut out, logs.len() as u64);
                logs.iter().for_each(|log| out.extend_from_slice(&log.0.to_le_bytes()));
            }
            ManifestRecord::ObjectHandedOver { object } => {
                out.push(TAG_OBJECT_HANDED_OVER);
                put_text(&mut out, object);
            }
            ManifestRecord::HolderReleased { holder } => {
                out.push(TAG_HOLDER_RELEASED);
                put_text(&mut out, holder);
            }
        }
        out
    }

    /// Reads what [`encode`](Self::encode) wrote.
    ///
    /// # Errors
    /// [`ManifestError::NewerRecord`], [`ManifestError::Truncated`] or [`ManifestError::Invalid`].
    pub fn decode(bytes: &[u8]) -> Result<ManifestRecord, ManifestError> {
        let mut reader = FieldReader::new(bytes);
        let tag = reader.u8("kind")?;
        let record = match tag {
            TAG_OPENED => ManifestRecord::Opened {
                session: reader.u64("session")?,
                next_epoch: reader.varint("epoch")?,
                next_number: reader.varint("block number")?,
            },
            TAG_SEGMENT_ACQUIRED => ManifestRecord::SegmentAcquired {
                segment: read_segment(&mut reader)?,
                epoch: reader.varint("epoch")?,
            },
            TAG_SEGMENT_RELEASED => ManifestRecord::SegmentReleased {
                segment: read_segment(&mut reader)?,
                epoch: reader.varint("epoch")?,
            },
            TAG_CUT => ManifestRecord::Cut {
                epoch_below: reader.varint("epoch")?,
                number: reader.varint("block number")?,
            },
            TAG_LOG_CREATED => {
                let log = read_log(&mut reader)?;
                let name = reader.text(LOG_NAME_BYTES_MAX, "name")?.to_owned();
                let first = reader.varint_up_to(u64::from(u16::MAX), "key group")? as u16;
                let last = reader.varint_up_to(u64::from(u16::MAX), "key group")? as u16;
                let key_groups =
                    KeyGroupRange::new(first, last).ok_or(ManifestError::Invalid("key-group range"))?;
                ManifestRecord::LogCreated { log, name, key_groups }
            }
            TAG_LOG_TRUNCATED => ManifestRecord::LogTruncated {
                log: read_log(&mut reader)?,
                to: read_sequence_number(&mut reader)?,
            },
            TAG_LOG_CONFIRMED => ManifestRecord::LogConfirmed {
                log: read_log(&mut reader)?,
                to: read_sequence_number(&mut reader)?,
            },
            TAG_LOG_CLOSED => ManifestRecord::LogClosed { log: read_log(&mut reader)? },
            TAG_LOG_FORGOTTEN => ManifestRecord::LogForgotten { log: read_log(&mut reader)? },
            TAG_UPLOAD_OPENED | TAG_SHARED_UPLOAD_OPENED => ManifestRecord::UploadOpened {
                buckets: read_buckets(&mut reader)?,
                object: read_object(&mut reader)?,
                token: reader.u64("token")?,
                others: read_others(&mut reader, tag == TAG_SHARED_UPLOAD_OPENED)?,
            },
            TAG_OBJECT_COMPLETED | TAG_SHARED_OBJECT_COMPLETED => {
                let object = read_completed(&mut reader)?;
                let others = read_others(&mut reader, tag == TAG_SHARED_OBJECT_COMPLETED)?;
                ManifestRecord::ObjectCompleted(CompletedObject { others, ..object })
            }
            TAG_UPLOAD_SETTLED => ManifestRecord::UploadSettled { object: read_object(&mut reader)? },
            TAG_OBJECT_DELETED => ManifestRecord::ObjectDeleted { object: read_object(&mut reader)? },
            TAG_SEGMENT_SEALED => {
                let segment = read_segment(&mut reader)?;
                let epoch = reader.varint("epoch")?;
                let start = reader.varint("block number")?;
                let end = start.checked_add(reader.varint("number of blocks")?);
                let blocks = start..end.ok_or(ManifestError::Invalid("number of blocks"))?;
                ManifestRecord::SegmentSealed { segment, epoch, blocks }
            }
            TAG_OBJECT_HELD => {
                let holder = read_holder(&mut reader)?;
                let object = read_object(&mut reader)?;
                let count = reader.count(LOGS_PER_RECORD_MAX, LOG_BYTES, "number of logs")?;
                let logs = (0..count).map(|_| read_log(&mut reader)).collect::<Result<_, _>>()?;
                ManifestRecord::ObjectHeld { holder, object, logs }
            }
            TAG_OBJECT_HANDED_OVER => ManifestRecord::ObjectHandedOver { object: read_object(&mut reader)? },
            TAG_HOLDER_RELEASED => ManifestRecord::HolderReleased { holder: read_holder(&mut reader)? },
            TAG_BLOCKS_SETTLED => ManifestRecord::BlocksSettled { number: reader.varint("block number")? },
            0 => return Err(ManifestError::Invalid("kind")),
            tag => return Err(ManifestError::NewerRecord { tag }),
        };
        if reader.left_bytes() > 0 { Err(ManifestError::Invalid("length")) } else { Ok(record) }
    }
}

fn put_segment(out: &mut Vec<u8>, tag: u8, segment: u32, epoch: u64) {
    out.push(tag);
    varint::put(out, u64::from(segment));
    varint::put(out, epoch);
}

fn put_log(out: &mut Vec<u8>, tag: u8, log: LogId) {
    out.push(tag);
    out.extend_from_slice(&log.0.to_le_bytes());
}

fn put_completed(out: &mut Vec<u8>, completed: &CompletedObject) {
    put_text(out, &completed.object);
    out.extend_from_slice(&completed.token.to_le_bytes());
    put_pieces(out, &completed.object, &completed.pieces);
    varint::put(out, completed.footer.start);
    varint::put(out, completed.footer.end.wrapping_sub(completed.footer.start));
    varint::put(out, completed.blocks_end);
    varint::put(out, completed.ranges.len() as u64);
    for range in &completed.ranges {
        out.extend_from_slice(&range.log.0.to_le_bytes());
        varint::put(out, range.first.0);
        varint::put(out, range.end.0.wrapping_sub(range.first.0));
    }
}

fn read_completed(reader: &mut FieldReader<'_>) -> Result<CompletedObject, ManifestError> {
    let object = read_object(reader)?;
    let token = reader.u64("token")?;
    let pieces = read_pieces(reader, &object)?;
    let footer_offset = reader.varint("footer offset")?;
    let footer_end = footer_offset.checked_add(reader.varint("footer length")?);
    let footer = footer_offset..footer_end.ok_or(ManifestError::Invalid("footer length"))?;
    let blocks_end = reader.varint("block number")?;
    let count = reader.count(RANGES_PER_RECORD_MAX, RANGE_BYTES_MIN, "number of ranges")?;
    let mut ranges = Vec::with_capacity(count);
    for _ in 0..count {
        let log = read_log(reader)?;
        let first = read_sequence_number(reader)?;
        let end = first.0.checked_add(reader.varint("range")?).ok_or(ManifestError::Invalid("range"))?;
        ranges.push(LogRange { log, first, end: SequenceNumber(end) });
    }
    Ok(CompletedObject { object, token, pieces, footer, blocks_end, ranges, others: Vec::new() })
}

/// None are not written: their record has another tag.
fn put_others(out: &mut Vec<u8>, others: &[u64]) {
    if !others.is_empty() {
        varint::put(out, others.len() as u64);
        others.iter().for_each(|directory| out.extend_from_slice(&directory.to_le_bytes()));
    }
}

fn read_others(reader: &mut FieldReader<'_>, is_shared: bool) -> Result<Vec<u64>, ManifestError> {
    if !is_shared {
        return Ok(Vec::new());
    }
    match reader.count(OTHERS_MAX, DIRECTORY_BYTES, "number of directories")? {
        0 => Err(ManifestError::Invalid("number of directories")),
        count => Ok((0..count).map(|_| reader.u64("directory")).collect::<Result<_, _>>()?),
    }
}

/// A bucket is written where it is first named, and is a number from then on; of a name, only what follows the object's.
fn put_pieces(out: &mut Vec<u8>, object: &str, pieces: &[Piece]) {
    varint::put(out, pieces.len() as u64);
    let mut buckets: Vec<&str> = Vec::new();
    for piece in pieces {
        let known = buckets.iter().position(|bucket| *bucket == &*piece.bucket);
        varint::put(out, known.unwrap_or(buckets.len()) as u64);
        if known.is_none() {
            put_text(out, &piece.bucket);
            buckets.push(&piece.bucket);
        }
        put_text(out, piece.object.strip_prefix(object).unwrap_or(&piece.object));
        varint::put(out, piece.offset);
        varint::put(out, piece.bytes);
    }
}

fn read_pieces(reader: &mut FieldReader<'_>, object: &str) -> Result<Vec<Piece>, ManifestError> {
    let count = reader.count(PIECES_MAX, PIECE_BYTES_MIN, "number of pieces")?;
    let mut pieces = Vec::with_capacity(count);
    let mut buckets: Vec<Arc<str>> = Vec::new();
    for _ in 0..count {
        let index = reader.varint_up_to(buckets.len().min(BUCKETS_MAX - 1) as u64, "bucket")? as usize;
        if index == buckets.len() {
            let bucket = reader.text(BUCKET_BYTES_MAX, "bucket")?;
            if buckets.iter().any(|known| **known == *bucket) {
                return Err(ManifestError::Invalid("bucket"));
            }
            buckets.push(bucket.into());
        }
        let suffix = reader.text(SUFFIX_BYTES_MAX, "object name")?;
        pieces.push(Piece {
            bucket: Arc::clone(&buckets[index]),
            object: [object, suffix].concat(),
            offset: reader.varint("offset of a piece")?,
            bytes: reader.varint("length of a piece")?,
        });
    }
    Ok(pieces)
}

fn read_buckets(reader: &mut FieldReader<'_>) -> Result<Vec<Arc<str>>, FieldError> {
    let count = reader.count(BUCKETS_MAX, 1, "number of buckets")?;
    (0..count).map(|_| reader.text(BUCKET_BYTES_MAX, "bucket").map(Arc::from)).collect()
}

fn read_segment(reader: &mut FieldReader<'_>) -> Result<u32, FieldError> {
    reader.varint_up_to(u64::from(u32::MAX), "segment").map(|segment| segment as u32)
}

fn read_log(reader: &mut FieldReader<'_>) -> Result<LogId, FieldError> {
    reader.u128("log").map(LogId)
}

fn read_sequence_number(reader: &mut FieldReader<'_>) -> Result<SequenceNumber, FieldError> {
    reader.varint("sequence number").map(SequenceNumber)
}

fn read_object(reader: &mut FieldReader<'_>) -> Result<String, FieldError> {
    reader.text(OBJECT_NAME_BYTES_MAX, "object name").map(str::to_owned)
}

fn read_holder(reader: &mut FieldReader<'_>) -> Result<String, FieldError> {
    reader.text(HOLDER_BYTES_MAX, "holder").map(str::to_owned)
}

impl From<FieldError> for ManifestError {
    fn from(error: FieldError) -> ManifestError {
        match error {
            FieldError::Short(what) => ManifestError::Truncated(what),
            FieldError::Bad(what) => ManifestError::Invalid(what),
        }
    }
}

#[cfg(test)]
mod tests;
