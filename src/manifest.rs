//! What blocks alone cannot tell about a local directory: its manifest's records, and the state that they add up to.
//!
//! Pure. The file that holds the records, its framing and its checksums belong to `io/src/directory.rs`; what may be
//! released or deleted, and when, is decided in `retention.rs` and only recorded here.
//!
//! A record is applied to the live state first and appended to the file only if the state took it, so that a manifest
//! never holds a record that its own replay refuses. A record must be durable before what it announces is done.
//!
//! A record is a tag byte and its fields: integers without a width are LEB128, fixed ones little-endian, a text is its
//! length and its UTF-8. Tags are never used again; a record with an unknown tag comes from a newer program.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::fields::{FieldError, FieldReader, put_text, put_varint};
use crate::handle::{BUCKET_BYTES_MAX, LOG_NAME_BYTES_MAX, OBJECT_NAME_BYTES_MAX};
use crate::{KeyGroupRange, LogId, SequenceNumber};

/// The most ranges in one [`ManifestRecord::ObjectCompleted`], so that a record stays far below the manifest file's
/// limit of 1 MiB. An object with more takes several records; see [`ManifestRecord::completed`].
pub const RANGES_PER_RECORD_MAX: usize = 1 << 14;

const RANGE_BYTES_MIN: usize = 18;

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
    /// The URL of its bucket.
    pub bucket: String,
    /// Its name, which contains a unique token and so is never used twice, in any bucket.
    pub object: String,
    /// The token that its checksums are bound to.
    pub token: u64,
    /// Its length in bytes.
    pub object_bytes: u64,
    /// Where its footer is, in bytes.
    pub footer: Range<u64>,
    /// A block number of this directory: every change in blocks below it is in this object, in an earlier one, or
    /// truncated.
    pub blocks_end: u64,
    /// The changes of this directory's logs in it. A log may have several ranges; none overlaps another object's.
    pub ranges: Vec<LogRange>,
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
    /// Blocks in segments of epochs below `epoch_below` count only if their number is below `number`.
    Cut {
        /// The first epoch that the cut does not concern.
        epoch_below: u64,
        /// The first block number that does not count.
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
    /// An object may exist, wholly or in part, from here on.
    UploadOpened {
        /// The URL of its bucket.
        bucket: String,
        /// Its name.
        object: String,
        /// Its token.
        token: u64,
    },
    /// An object's commit is proven.
    ObjectCompleted(CompletedObject),
    /// An upload was given up and nothing is left of it.
    UploadAbandoned {
        /// The name of its object.
        object: String,
    },
    /// A completed object that no log needs was deleted, or is no longer this directory's to delete.
    ObjectDeleted {
        /// Its name.
        object: String,
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
const TAG_UPLOAD_ABANDONED: u8 = 12;
const TAG_OBJECT_DELETED: u8 = 13;

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

    /// The record as bytes. Only records that [`ManifestState::apply`] took are sure to decode.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(64);
        match self {
            ManifestRecord::Opened { session, next_epoch, next_number } => {
                out.push(TAG_OPENED);
                out.extend_from_slice(&session.to_le_bytes());
                put_varint(&mut out, *next_epoch);
                put_varint(&mut out, *next_number);
            }
            ManifestRecord::SegmentAcquired { segment, epoch } => {
                put_segment(&mut out, TAG_SEGMENT_ACQUIRED, *segment, *epoch);
            }
            ManifestRecord::SegmentReleased { segment, epoch } => {
                put_segment(&mut out, TAG_SEGMENT_RELEASED, *segment, *epoch);
            }
            ManifestRecord::Cut { epoch_below, number } => {
                out.push(TAG_CUT);
                put_varint(&mut out, *epoch_below);
                put_varint(&mut out, *number);
            }
            ManifestRecord::LogCreated { log, name, key_groups } => {
                put_log(&mut out, TAG_LOG_CREATED, *log);
                put_text(&mut out, name);
                put_varint(&mut out, u64::from(key_groups.first().0));
                put_varint(&mut out, u64::from(key_groups.last().0));
            }
            ManifestRecord::LogTruncated { log, to } => {
                put_log(&mut out, TAG_LOG_TRUNCATED, *log);
                put_varint(&mut out, to.0);
            }
            ManifestRecord::LogConfirmed { log, to } => {
                put_log(&mut out, TAG_LOG_CONFIRMED, *log);
                put_varint(&mut out, to.0);
            }
            ManifestRecord::LogClosed { log } => put_log(&mut out, TAG_LOG_CLOSED, *log),
            ManifestRecord::LogForgotten { log } => put_log(&mut out, TAG_LOG_FORGOTTEN, *log),
            ManifestRecord::UploadOpened { bucket, object, token } => {
                out.push(TAG_UPLOAD_OPENED);
                put_text(&mut out, bucket);
                put_text(&mut out, object);
                out.extend_from_slice(&token.to_le_bytes());
            }
            ManifestRecord::ObjectCompleted(completed) => {
                out.push(TAG_OBJECT_COMPLETED);
                put_completed(&mut out, completed);
            }
            ManifestRecord::UploadAbandoned { object } => {
                out.push(TAG_UPLOAD_ABANDONED);
                put_text(&mut out, object);
            }
            ManifestRecord::ObjectDeleted { object } => {
                out.push(TAG_OBJECT_DELETED);
                put_text(&mut out, object);
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
        let record = match reader.u8("kind")? {
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
            TAG_UPLOAD_OPENED => ManifestRecord::UploadOpened {
                bucket: reader.text(BUCKET_BYTES_MAX, "bucket")?.to_owned(),
                object: read_object(&mut reader)?,
                token: reader.u64("token")?,
            },
            TAG_OBJECT_COMPLETED => ManifestRecord::ObjectCompleted(read_completed(&mut reader)?),
            TAG_UPLOAD_ABANDONED => ManifestRecord::UploadAbandoned { object: read_object(&mut reader)? },
            TAG_OBJECT_DELETED => ManifestRecord::ObjectDeleted { object: read_object(&mut reader)? },
            0 => return Err(ManifestError::Invalid("kind")),
            tag => return Err(ManifestError::NewerRecord { tag }),
        };
        if reader.left_bytes() > 0 { Err(ManifestError::Invalid("length")) } else { Ok(record) }
    }
}

fn put_segment(out: &mut Vec<u8>, tag: u8, segment: u32, epoch: u64) {
    out.push(tag);
    put_varint(out, u64::from(segment));
    put_varint(out, epoch);
}

fn put_log(out: &mut Vec<u8>, tag: u8, log: LogId) {
    out.push(tag);
    out.extend_from_slice(&log.0.to_le_bytes());
}

fn put_completed(out: &mut Vec<u8>, completed: &CompletedObject) {
    put_text(out, &completed.bucket);
    put_text(out, &completed.object);
    out.extend_from_slice(&completed.token.to_le_bytes());
    put_varint(out, completed.object_bytes);
    put_varint(out, completed.footer.start);
    put_varint(out, completed.footer.end.wrapping_sub(completed.footer.start));
    put_varint(out, completed.blocks_end);
    put_varint(out, completed.ranges.len() as u64);
    for range in &completed.ranges {
        out.extend_from_slice(&range.log.0.to_le_bytes());
        put_varint(out, range.first.0);
        put_varint(out, range.end.0.wrapping_sub(range.first.0));
    }
}

fn read_completed(reader: &mut FieldReader<'_>) -> Result<CompletedObject, ManifestError> {
    let bucket = reader.text(BUCKET_BYTES_MAX, "bucket")?.to_owned();
    let object = read_object(reader)?;
    let token = reader.u64("token")?;
    let object_bytes = reader.varint("object length")?;
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
    Ok(CompletedObject { bucket, object, token, object_bytes, footer, blocks_end, ranges })
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

impl From<FieldError> for ManifestError {
    fn from(error: FieldError) -> ManifestError {
        match error {
            FieldError::Short(what) => ManifestError::Truncated(what),
            FieldError::Bad(what) => ManifestError::Invalid(what),
        }
    }
}

/// What is known of one log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogState {
    /// Its name.
    pub name: String,
    /// Its key groups.
    pub key_groups: KeyGroupRange,
    /// The first change that is needed.
    pub truncated: SequenceNumber,
    /// The end of what a complete checkpoint holds.
    pub confirmed: SequenceNumber,
    /// Whether it gets no more changes.
    pub closed: bool,
    /// Where its changes are in objects that are still needed for them: sorted, not overlapping. There are gaps where
    /// an object is not complete yet.
    pub extents: Vec<LogExtent>,
}

/// The changes `[first, end)` of a log in one object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogExtent {
    /// The first change, inclusive.
    pub first: SequenceNumber,
    /// The end, exclusive.
    pub end: SequenceNumber,
    /// The name of the object.
    pub object: String,
}

/// An upload that is neither complete nor known to be gone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpenUpload {
    /// The URL of its bucket.
    pub bucket: String,
    /// Its token.
    pub token: u64,
}

/// What a directory's records add up to.
///
/// Invariants:
/// 1. a segment is in use at most once; every epoch in use is below `next_epoch` and unique;
/// 2. cuts are sorted by both their fields, and each concerns a segment in use;
/// 3. the extents of a log and the ranges of the objects are the same set, without those that were truncated;
/// 4. an object is open or complete, never both;
/// 5. replaying [`snapshot`](Self::snapshot) gives an equal state.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ManifestState {
    session: u64,
    next_epoch: u64,
    next_number: u64,
    segments: BTreeMap<u32, u64>,
    cuts: Vec<Cut>,
    logs: BTreeMap<LogId, LogState>,
    uploads: BTreeMap<String, OpenUpload>,
    objects: BTreeMap<String, CompletedObject>,
}

/// Blocks of epochs below `epoch_below` count only if their number is below `number`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    /// The first epoch that the cut does not concern.
    pub epoch_below: u64,
    /// The first block number that does not count.
    pub number: u64,
}

impl ManifestState {
    /// The state that `records` add up to.
    ///
    /// # Errors
    /// The first record that does not decode or contradicts the ones before it.
    pub fn replay<'a>(records: impl IntoIterator<Item = &'a [u8]>) -> Result<ManifestState, ManifestError> {
        let mut state = ManifestState::default();
        for record in records {
            state.apply(ManifestRecord::decode(record)?)?;
        }
        Ok(state)
    }

    /// Adds a record.
    ///
    /// # Errors
    /// [`ManifestError::Inconsistent`] or [`ManifestError::Invalid`]; the state is unchanged then.
    pub fn apply(&mut self, record: ManifestRecord) -> Result<(), ManifestError> {
        match self.check(&record) {
            Ok(()) => {
                self.take(record);
                Ok(())
            }
            Err(Refusal::Invalid(what)) => Err(ManifestError::Invalid(what)),
            Err(Refusal::Inconsistent(reason)) => {
                let mut record = format!("{record:?}");
                if let Some((end, _)) = record.char_indices().nth(400) {
                    record.truncate(end);
                    record.push('…');
                }
                Err(ManifestError::Inconsistent { record, reason })
            }
        }
    }

    /// The fewest records that add up to this state, for a manifest that is written anew.
    #[must_use]
    pub fn snapshot(&self) -> Vec<ManifestRecord> {
        let mut records = Vec::new();
        let mut segments: Vec<_> = self.segments.iter().map(|(&segment, &epoch)| (epoch, segment)).collect();
        segments.sort_unstable();
        records.extend(
            segments.into_iter().map(|(epoch, segment)| ManifestRecord::SegmentAcquired { segment, epoch }),
        );
        records.extend(
            self.cuts.iter().map(|&Cut { epoch_below, number }| ManifestRecord::Cut { epoch_below, number }),
        );
        // After the segments: it raises the epoch above theirs.
        records.push(ManifestRecord::Opened {
            session: self.session,
            next_epoch: self.next_epoch,
            next_number: self.next_number,
        });
        for (&log, state) in &self.logs {
            let LogState { name, key_groups, truncated, confirmed, closed, extents: _ } = state;
            records.push(ManifestRecord::LogCreated { log, name: name.clone(), key_groups: *key_groups });
            if *truncated > SequenceNumber::ZERO {
                records.push(ManifestRecord::LogTruncated { log, to: *truncated });
            }
            if *confirmed > SequenceNumber::ZERO {
                records.push(ManifestRecord::LogConfirmed { log, to: *confirmed });
            }
            if *closed {
                records.push(ManifestRecord::LogClosed { log });
            }
        }
        for object in self.objects.values() {
            records.extend(ManifestRecord::completed(object.clone()));
        }
        for (object, OpenUpload { bucket, token }) in &self.uploads {
            let (bucket, object, token) = (bucket.clone(), object.clone(), *token);
            records.push(ManifestRecord::UploadOpened { bucket, object, token });
        }
        records
    }

    /// The latest use of the directory; 0 if it was never opened.
    #[must_use]
    pub fn session(&self) -> u64 {
        self.session
    }

    /// The lowest epoch that a segment may be given.
    #[must_use]
    pub fn next_epoch(&self) -> u64 {
        self.next_epoch
    }

    /// A lower bound of the next block's number; the blocks themselves may say more.
    #[must_use]
    pub fn next_number(&self) -> u64 {
        self.next_number
    }

    /// The segments in use, and the epoch of that use.
    #[must_use]
    pub fn segments(&self) -> &BTreeMap<u32, u64> {
        &self.segments
    }

    /// The cuts that concern segments in use.
    #[must_use]
    pub fn cuts(&self) -> &[Cut] {
        &self.cuts
    }

    /// The first block number that does not count in a segment of `epoch`, if there is one.
    #[must_use]
    pub fn number_limit(&self, epoch: u64) -> Option<u64> {
        // Cuts are sorted by both fields, so the first that concerns the epoch is the strictest.
        self.cuts.iter().find(|cut| epoch < cut.epoch_below).map(|cut| cut.number)
    }

    /// All logs that are not forgotten.
    #[must_use]
    pub fn logs(&self) -> &BTreeMap<LogId, LogState> {
        &self.logs
    }

    /// The uploads that are neither complete nor abandoned, by the name of their object.
    #[must_use]
    pub fn uploads(&self) -> &BTreeMap<String, OpenUpload> {
        &self.uploads
    }

    /// The completed objects that are not deleted, by name. Their ranges are only those that a log still needs.
    #[must_use]
    pub fn objects(&self) -> &BTreeMap<String, CompletedObject> {
        &self.objects
    }

    /// The completed objects that no log needs: to be deleted.
    pub fn unreferenced_objects(&self) -> impl Iterator<Item = &CompletedObject> {
        self.objects.values().filter(|object| object.ranges.is_empty())
    }

    fn check(&self, record: &ManifestRecord) -> Result<(), Refusal> {
        match record {
            ManifestRecord::Opened { next_epoch, next_number, .. } => {
                ensure(*next_epoch >= self.next_epoch, "epochs only grow")?;
                ensure(*next_number >= self.next_number, "block numbers only grow")
            }
            ManifestRecord::SegmentAcquired { segment, epoch } => {
                ensure(!self.segments.contains_key(segment), "the segment is in use")?;
                ensure(*epoch >= self.next_epoch && *epoch < u64::MAX, "epochs only grow")
            }
            ManifestRecord::SegmentReleased { segment, epoch } => {
                ensure(self.segments.get(segment) == Some(epoch), "the segment is not in use with that epoch")
            }
            ManifestRecord::Cut { epoch_below, number } => {
                let last = self.cuts.last();
                ensure(last.is_none_or(|last| *epoch_below >= last.epoch_below), "cuts only go up")?;
                ensure(last.is_none_or(|last| *number >= last.number), "cuts only go up")
            }
            ManifestRecord::LogCreated { log, name, .. } => {
                valid(name.len() <= LOG_NAME_BYTES_MAX, "name")?;
                ensure(!self.logs.contains_key(log), "the log exists")
            }
            ManifestRecord::LogTruncated { log, to } => {
                ensure(*to >= self.log(log)?.truncated, "more was truncated before")
            }
            ManifestRecord::LogConfirmed { log, to } => {
                ensure(*to >= self.log(log)?.confirmed, "more was confirmed before")
            }
            ManifestRecord::LogClosed { log } => ensure(!self.log(log)?.closed, "the log is closed"),
            ManifestRecord::LogForgotten { log } => {
                ensure(self.log(log)?.extents.is_empty(), "objects still hold changes of the log")
            }
            ManifestRecord::UploadOpened { bucket, object, .. } => {
                check_object_name(bucket, object)?;
                ensure(!self.uploads.contains_key(object), "the upload is open")?;
                ensure(!self.objects.contains_key(object), "the object is complete")
            }
            ManifestRecord::ObjectCompleted(completed) => self.check_completed(completed),
            ManifestRecord::UploadAbandoned { object } => {
                ensure(self.uploads.contains_key(object), "the upload is not open")
            }
            ManifestRecord::ObjectDeleted { object } => {
                let known = self.objects.get(object);
                ensure(known.is_some(), "there is no such object")?;
                ensure(known.is_some_and(|known| known.ranges.is_empty()), "a log still needs the object")
            }
        }
    }

    fn check_completed(&self, completed: &CompletedObject) -> Result<(), Refusal> {
        let CompletedObject { bucket, object, token, object_bytes, footer, blocks_end, ranges } = completed;
        check_object_name(bucket, object)?;
        valid(!footer.is_empty() && footer.end <= *object_bytes, "footer")?;
        valid(ranges.len() <= RANGES_PER_RECORD_MAX, "number of ranges")?;
        if let Some(upload) = self.uploads.get(object) {
            ensure((&upload.bucket, &upload.token) == (bucket, token), "the upload was opened otherwise")?;
        }
        if let Some(known) = self.objects.get(object) {
            let same = (&known.bucket, &known.token, &known.object_bytes, &known.footer, &known.blocks_end)
                == (bucket, token, object_bytes, footer, blocks_end);
            ensure(same, "the object was completed otherwise")?;
        }
        let mut sorted = ranges.clone();
        sorted.sort_unstable();
        for range in &sorted {
            valid(range.first < range.end, "range")?;
            let log = self.log(&range.log)?;
            let next = log.extents.partition_point(|extent| extent.end <= range.first);
            let free = log.extents.get(next).is_none_or(|extent| extent.first >= range.end);
            ensure(free, "another object holds these changes")?;
        }
        let apart = |pair: &[LogRange]| pair[0].log != pair[1].log || pair[0].end <= pair[1].first;
        ensure(sorted.windows(2).all(apart), "its ranges overlap")
    }

    fn log(&self, log: &LogId) -> Result<&LogState, Refusal> {
        self.logs.get(log).ok_or(Refusal::Inconsistent("there is no such log"))
    }

    /// Adds a record that was checked.
    fn take(&mut self, record: ManifestRecord) {
        match record {
            ManifestRecord::Opened { session, next_epoch, next_number } => {
                (self.session, self.next_epoch, self.next_number) = (session, next_epoch, next_number);
            }
            ManifestRecord::SegmentAcquired { segment, epoch } => {
                self.segments.insert(segment, epoch);
                self.next_epoch = epoch + 1;
            }
            ManifestRecord::SegmentReleased { segment, .. } => {
                self.segments.remove(&segment);
                self.drop_spent_cuts();
            }
            ManifestRecord::Cut { epoch_below, number } => {
                let cut = Cut { epoch_below, number };
                // Of two cuts for the same epochs the earlier is the stricter.
                if self.cuts.last().is_none_or(|last| last.epoch_below < epoch_below) {
                    self.cuts.push(cut);
                }
                self.next_epoch = self.next_epoch.max(epoch_below);
                self.next_number = self.next_number.max(number);
                self.drop_spent_cuts();
            }
            ManifestRecord::LogCreated { log, name, key_groups } => {
                let (truncated, confirmed) = (SequenceNumber::ZERO, SequenceNumber::ZERO);
                let state =
                    LogState { name, key_groups, truncated, confirmed, closed: false, extents: Vec::new() };
                self.logs.insert(log, state);
            }
            ManifestRecord::LogTruncated { log, to } => self.truncate(log, to),
            ManifestRecord::LogConfirmed { log, to } => self.log_mut(log).confirmed = to,
            ManifestRecord::LogClosed { log } => self.log_mut(log).closed = true,
            ManifestRecord::LogForgotten { log } => {
                self.logs.remove(&log);
            }
            ManifestRecord::UploadOpened { bucket, object, token } => {
                self.uploads.insert(object, OpenUpload { bucket, token });
            }
            ManifestRecord::ObjectCompleted(completed) => self.complete(completed),
            ManifestRecord::UploadAbandoned { object } => {
                self.uploads.remove(&object);
            }
            ManifestRecord::ObjectDeleted { object } => {
                self.objects.remove(&object);
            }
        }
    }

    fn drop_spent_cuts(&mut self) {
        let oldest = self.segments.values().min().copied();
        self.cuts.retain(|cut| oldest.is_some_and(|oldest| oldest < cut.epoch_below));
    }

    fn truncate(&mut self, log: LogId, to: SequenceNumber) {
        let state = self.log_mut(log);
        state.truncated = to;
        let spent = state.extents.partition_point(|extent| extent.end <= to);
        let spent: Vec<LogExtent> = state.extents.drain(..spent).collect();
        for extent in spent {
            let object = self.objects.get_mut(&extent.object).expect("invariant 3");
            object.ranges.retain(|range| (range.log, range.first) != (log, extent.first));
        }
    }

    fn complete(&mut self, mut completed: CompletedObject) {
        self.uploads.remove(&completed.object);
        completed.ranges.retain(|range| range.end > self.logs[&range.log].truncated);
        for range in &completed.ranges {
            let extents = &mut self.log_mut(range.log).extents;
            let index = extents.partition_point(|extent| extent.end <= range.first);
            let object = completed.object.clone();
            extents.insert(index, LogExtent { first: range.first, end: range.end, object });
        }
        match self.objects.get_mut(&completed.object) {
            Some(known) => {
                known.ranges.append(&mut completed.ranges);
                known.ranges.sort_unstable();
            }
            None => {
                completed.ranges.sort_unstable();
                self.objects.insert(completed.object.clone(), completed);
            }
        }
    }

    fn log_mut(&mut self, log: LogId) -> &mut LogState {
        self.logs.get_mut(&log).expect("checked before")
    }
}

enum Refusal {
    Invalid(&'static str),
    Inconsistent(&'static str),
}

fn valid(holds: bool, what: &'static str) -> Result<(), Refusal> {
    if holds { Ok(()) } else { Err(Refusal::Invalid(what)) }
}

fn ensure(holds: bool, reason: &'static str) -> Result<(), Refusal> {
    if holds { Ok(()) } else { Err(Refusal::Inconsistent(reason)) }
}

fn check_object_name(bucket: &str, object: &str) -> Result<(), Refusal> {
    valid(!bucket.is_empty() && bucket.len() <= BUCKET_BYTES_MAX, "bucket")?;
    valid(!object.is_empty() && object.len() <= OBJECT_NAME_BYTES_MAX, "object name")
}
