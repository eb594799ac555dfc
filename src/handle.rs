//! What a checkpoint stores of a log: which changes, and in which objects they are.
//!
//! Owns the handle's checks and its two encodings, bytes and JSON. It reads no object and knows nothing of what is
//! inside one: parts and footers belong to `part.rs` and `footer.rs`.
//!
//! Bytes, version 1: magic (8), version u32, body length u32, body, xxh3-64 of all before it. All little-endian. Body:
//! log id u128, name, first and last key group, from, length, number of buckets, their URLs, number of extents; then
//! per extent: number of pieces, per piece bucket index, object name, offset, length; footer offset, footer length,
//! token u64, number of changes. Integers without a width are those of `varint.rs`; a text is its length and its UTF-8.
//! The extents' first numbers follow from `from`, because extents are contiguous.
//!
//! The JSON form is in `handle/json.rs`; which handles go together is checked in `handle/set.rs`.

mod json;
mod set;

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::ops::{Range, RangeInclusive};
use std::sync::Arc;

use twox_hash::XxHash3_64;

use crate::fields::{FieldError, FieldReader, put_text};
use crate::piece::{self, BUCKET_BYTES_MAX, OBJECT_NAME_BYTES_MAX, PIECES_MAX, Piece};
use crate::{KeyGroupRange, LogId, SequenceNumber, varint};
pub use set::HandlesError;
pub(crate) use set::{Chain, Column, Coverage, OfLog, by_log};

/// The bytes at the start of an encoded handle.
pub const HANDLE_MAGIC: [u8; 8] = *b"tlogHDL\n";
/// The version of the handle's encodings that this program writes, and the newest that it reads.
pub const HANDLE_VERSION: u32 = 1;
/// The longest name of a log, in bytes.
pub const LOG_NAME_BYTES_MAX: usize = 1024;
/// The most extents that a handle lists.
pub const EXTENTS_MAX: usize = 1 << 16;
/// The most pieces that a handle lists, over all its extents.
pub const HANDLE_PIECES_MAX: usize = 1 << 18;
/// The longest encoded handle, in bytes.
pub const HANDLE_BYTES_MAX: usize = 16 << 20;

const HEAD_BYTES: usize = 16;
const CHECKSUM_BYTES: usize = 8;
/// What the fields of an extent take at least.
const EXTENT_BYTES_MIN: usize = 17;
/// What the fields of a piece take at least.
const PIECE_BYTES_MIN: usize = 5;

/// Where a run of a log's changes is: one object, and the sequence numbers that it holds for the handle.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Where the object's bytes are: their concatenation is the object. Usually one.
    pub pieces: Vec<Piece>,
    /// Where the footer is in the object, in bytes.
    pub footer: Range<u64>,
    /// The token that the object's checksums are bound to.
    pub token: u64,
    /// The first change that the handle takes from this object.
    pub first: SequenceNumber,
    /// The end of the changes that the handle takes from this object, exclusive.
    pub end: SequenceNumber,
}

impl Extent {
    /// What a reader asks for first: the footer, and a little of what stands before it in the same piece, which is most
    /// often all of the directories: more of them for a larger object, and never as much as takes longer than a request.
    pub(crate) fn end_of_object(&self) -> Range<u64> {
        const DIRECTORIES_BYTES: RangeInclusive<u64> = 16 << 10..=256 << 10;
        let Range { start, end } = self.footer;
        let directories = (start >> 13).clamp(*DIRECTORIES_BYTES.start(), *DIRECTORIES_BYTES.end());
        start.saturating_sub(directories).max(piece::start_of(&self.pieces, start))..end
    }

    /// The length of the object in bytes: the sum over its pieces.
    #[must_use]
    pub fn object_bytes(&self) -> u64 {
        piece::total_bytes(&self.pieces)
    }

    /// The name of the first piece's file, which begins with the object's name; all others do too.
    #[must_use]
    pub fn object(&self) -> &str {
        self.pieces.first().map_or("", |piece| &piece.object)
    }
}

/// A proof that the changes `[from, to)` of a log are in objects, and where: what a checkpoint stores.
///
/// Invariants, checked by [`ChangelogHandle::new`] and by both decoders:
/// 1. `from <= to`, and the extents are sorted, not empty, contiguous, and cover exactly `[from, to)`;
/// 2. every extent has pieces, none of them empty, and its footer is not empty and lies inside of them;
/// 3. extents that name the same file agree on the pieces, the footer and the token of the object;
/// 4. texts and counts are inside the limits of this module.
///
/// ```
/// use tidelog::{ChangelogHandle, Extent, KeyGroupRange, LogId, Piece, SequenceNumber};
///
/// let bucket = "file:///checkpoints".into();
/// let extent = Extent {
///     pieces: vec![Piece { bucket, object: "orders/00000007-5f".into(), offset: 0, bytes: 4096 }],
///     footer: 3000..4096,
///     token: 0x5f,
///     first: SequenceNumber(10),
///     end: SequenceNumber(90),
/// };
/// let range = KeyGroupRange::new(0, 127).unwrap();
/// let handle = ChangelogHandle::new(
///     LogId(7), "orders", range, SequenceNumber(10), SequenceNumber(90), vec![extent])?;
/// assert_eq!(ChangelogHandle::from_bytes(&handle.to_bytes())?, handle);
/// assert_eq!(ChangelogHandle::from_json(&handle.to_json())?, handle);
/// # Ok::<(), tidelog::HandleError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChangelogHandle {
    log: LogId,
    name: String,
    key_groups: KeyGroupRange,
    from: SequenceNumber,
    to: SequenceNumber,
    extents: Vec<Extent>,
}

/// Extents that follow each other, with those that go on in the same object as one.
pub(crate) fn joined<'a>(extents: impl Iterator<Item = &'a Extent>) -> Vec<Extent> {
    let mut joined: Vec<Extent> = Vec::new();
    for extent in extents {
        match joined.last_mut() {
            Some(last)
                if last.end == extent.first
                    && (last.token, &last.footer, &last.pieces)
                        == (extent.token, &extent.footer, &extent.pieces) =>
            {
                last.end = extent.end;
            }
            _ => joined.push(extent.clone()),
        }
    }
    joined
}

/// Why a handle was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HandleError {
    /// The input is something else.
    #[error("this is not a tidelog handle: give the bytes or the JSON that a persist returned")]
    NotAHandle,
    /// A newer tidelog wrote it.
    #[error("the handle has format version {found}, this program knows up to {known}: use a newer tidelog")]
    NewerVersion {
        /// The version in the handle.
        found: u32,
        /// The newest version that this program reads.
        known: u32,
    },
    /// The end is missing.
    #[error("the handle is cut off: give all of it")]
    Truncated,
    /// The contents are not what was written.
    #[error("the handle does not match its checksum, it was damaged or edited: use an unchanged copy")]
    Checksum,
    /// The contents contradict themselves.
    #[error("the handle is invalid: {0}")]
    Invalid(String),
}

impl ChangelogHandle {
    /// Makes a handle of `extents`, which must be in order and cover exactly `[from, to)`.
    ///
    /// # Errors
    /// [`HandleError::Invalid`] names the invariant that does not hold.
    pub fn new(
        log: LogId,
        name: impl Into<String>,
        key_groups: KeyGroupRange,
        from: SequenceNumber,
        to: SequenceNumber,
        extents: Vec<Extent>,
    ) -> Result<ChangelogHandle, HandleError> {
        let handle = ChangelogHandle { log, name: name.into(), key_groups, from, to, extents };
        handle.check()?;
        Ok(handle)
    }

    /// The log that the changes belong to.
    #[must_use]
    pub fn log(&self) -> LogId {
        self.log
    }

    /// The name that the log was created with.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The key groups of the log.
    #[must_use]
    pub fn key_groups(&self) -> KeyGroupRange {
        self.key_groups
    }

    /// The first change, inclusive.
    #[must_use]
    pub fn from(&self) -> SequenceNumber {
        self.from
    }

    /// The end of the changes, exclusive.
    #[must_use]
    pub fn to(&self) -> SequenceNumber {
        self.to
    }

    /// Whether the handle holds no change.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.from == self.to
    }

    /// Where the changes are, in order of sequence numbers.
    #[must_use]
    pub fn extents(&self) -> &[Extent] {
        &self.extents
    }

    /// The files that must exist for this handle to be read, as (bucket, object), each once, in order of first use.
    ///
    /// This is what a registry of shared checkpoint files keeps.
    pub fn objects(&self) -> impl Iterator<Item = (&str, &str)> {
        let mut seen = std::collections::HashSet::new();
        self.extents
            .iter()
            .flat_map(|extent| &extent.pieces)
            .map(|piece| (&*piece.bucket, piece.object.as_str()))
            .filter(move |key| seen.insert(*key))
    }

    /// The same handle for the wanted ones of its key groups; `None` if it is for none of them. Its objects stay what they
    /// are: what else is in them is not read by it.
    ///
    /// With it, handles of other key groups go together with this one. Where some ranges of a checkpoint were compacted and
    /// one is still to be, its handles are those that were made, and the old one limited to the range that is left:
    ///
    /// ```
    /// # use tidelog::{ChangelogHandle, KeyGroupRange, LogId, Restore, SequenceNumber};
    /// # let (from, to) = (SequenceNumber(3), SequenceNumber(3));
    /// # let of = |groups| ChangelogHandle::new(LogId(7), "orders", groups, from, to, Vec::new());
    /// # let old = of(KeyGroupRange::new(0, 127).unwrap())?;
    /// # let compacted = of(KeyGroupRange::new(0, 63).unwrap())?;
    /// let rest = old.limited_to(KeyGroupRange::new(64, 127).unwrap()).unwrap();
    /// let restore = Restore::open(&[compacted, rest])?;
    /// # restore.reader(KeyGroupRange::new(0, 127).unwrap())?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn limited_to(&self, key_groups: KeyGroupRange) -> Option<ChangelogHandle> {
        let key_groups = self.key_groups.intersection(key_groups)?;
        Some(ChangelogHandle { key_groups, ..self.clone() })
    }

    /// The handle as bytes, in the current version.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut body = Vec::with_capacity(64 + self.name.len() + self.extents.len() * 96);
        self.put_body(&mut body);
        let mut bytes = Vec::with_capacity(HEAD_BYTES + body.len() + CHECKSUM_BYTES);
        bytes.extend_from_slice(&HANDLE_MAGIC);
        bytes.extend_from_slice(&HANDLE_VERSION.to_le_bytes());
        bytes.extend_from_slice(&(body.len() as u32).to_le_bytes());
        bytes.extend_from_slice(&body);
        let checksum = XxHash3_64::oneshot(&bytes);
        bytes.extend_from_slice(&checksum.to_le_bytes());
        bytes
    }

    /// Reads what [`to_bytes`](Self::to_bytes) wrote, in this version or an earlier one.
    ///
    /// # Errors
    /// Every change of the bytes is found and named; see [`HandleError`].
    pub fn from_bytes(bytes: &[u8]) -> Result<ChangelogHandle, HandleError> {
        let body = checked_body(bytes)?;
        let mut reader = FieldReader::new(body);
        let handle = read_body(&mut reader)?;
        if reader.left_bytes() > 0 {
            return Err(invalid("there are bytes after its last field"));
        }
        handle.check()?;
        Ok(handle)
    }

    fn put_body(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.log.0.to_le_bytes());
        put_text(out, &self.name);
        varint::put(out, u64::from(self.key_groups.first().0));
        varint::put(out, u64::from(self.key_groups.last().0));
        varint::put(out, self.from.0);
        // Wrapping: a JSON handle is encoded for its checksum before its numbers are checked.
        varint::put(out, self.to.0.wrapping_sub(self.from.0));
        let mut indexes: HashMap<&str, u64> = HashMap::new();
        let mut buckets: Vec<&str> = Vec::new();
        for piece in self.extents.iter().flat_map(|extent| &extent.pieces) {
            if let Entry::Vacant(entry) = indexes.entry(&piece.bucket) {
                entry.insert(buckets.len() as u64);
                buckets.push(&piece.bucket);
            }
        }
        varint::put(out, buckets.len() as u64);
        for bucket in buckets {
            put_text(out, bucket);
        }
        varint::put(out, self.extents.len() as u64);
        for extent in &self.extents {
            varint::put(out, extent.pieces.len() as u64);
            for Piece { bucket, object, offset, bytes } in &extent.pieces {
                varint::put(out, indexes[&**bucket]);
                put_text(out, object);
                varint::put(out, *offset);
                varint::put(out, *bytes);
            }
            varint::put(out, extent.footer.start);
            varint::put(out, extent.footer.end.wrapping_sub(extent.footer.start));
            out.extend_from_slice(&extent.token.to_le_bytes());
            varint::put(out, extent.end.0.wrapping_sub(extent.first.0));
        }
    }

    fn checksum(&self) -> u64 {
        let bytes = self.to_bytes();
        XxHash3_64::oneshot(&bytes[..bytes.len() - CHECKSUM_BYTES])
    }

    fn check(&self) -> Result<(), HandleError> {
        if self.name.len() > LOG_NAME_BYTES_MAX {
            return Err(invalid(format!("the log's name is longer than {LOG_NAME_BYTES_MAX} bytes")));
        }
        if self.from > self.to {
            return Err(invalid(format!("it begins at {} and ends before that, at {}", self.from, self.to)));
        }
        if self.extents.len() > EXTENTS_MAX {
            return Err(invalid(format!("it has more than {EXTENTS_MAX} extents")));
        }
        let mut next = self.from;
        let mut objects: HashMap<(&str, &str), &Extent> = HashMap::with_capacity(self.extents.len());
        let mut pieces = 0;
        for extent in &self.extents {
            let named = || format!("object {}", extent.object());
            pieces += extent.pieces.len();
            if pieces > HANDLE_PIECES_MAX {
                return Err(invalid(format!("it has more than {HANDLE_PIECES_MAX} pieces")));
            }
            let object_bytes = piece::check(&extent.pieces)
                .map_err(|what| invalid(format!("the {what} of {} is out of bounds", named())))?;
            if extent.first != next {
                return Err(invalid(format!("{} begins at {}, expected {next}", named(), extent.first)));
            }
            if extent.first >= extent.end {
                return Err(invalid(format!("{} holds no change", named())));
            }
            if extent.footer.is_empty() || extent.footer.end > object_bytes {
                return Err(invalid(format!("the footer of {} is not inside it", named())));
            }
            let files: Vec<&Extent> = extent
                .pieces
                .iter()
                .map(|piece| *objects.entry((&piece.bucket, &piece.object)).or_insert(extent))
                .collect();
            // Either all files are new, or all belong to the extent that named the first one, which is then the same.
            let known = files[0];
            let same =
                (&known.pieces, &known.footer, known.token) == (&extent.pieces, &extent.footer, extent.token);
            if !same || files.iter().any(|file| !std::ptr::eq(*file, known)) {
                return Err(invalid(format!("{} is described in two ways", named())));
            }
            next = extent.end;
        }
        if next != self.to {
            return Err(invalid(format!("its extents end at {next}, expected {}", self.to)));
        }
        let len_bytes = self.to_bytes().len();
        if len_bytes > HANDLE_BYTES_MAX {
            return Err(invalid(format!("it takes {len_bytes} bytes, more than {HANDLE_BYTES_MAX}")));
        }
        Ok(())
    }
}

fn invalid(what: impl Into<String>) -> HandleError {
    HandleError::Invalid(what.into())
}

fn check_version(found: u32) -> Result<(), HandleError> {
    match found {
        0 => Err(invalid("its format version is 0")),
        1..=HANDLE_VERSION => Ok(()),
        found => Err(HandleError::NewerVersion { found, known: HANDLE_VERSION }),
    }
}

/// The body, once magic, version, length and checksum have been found right.
fn checked_body(bytes: &[u8]) -> Result<&[u8], HandleError> {
    let Some(rest) = bytes.strip_prefix(&HANDLE_MAGIC) else {
        let cut_off = !bytes.is_empty() && HANDLE_MAGIC.starts_with(bytes);
        return Err(if cut_off { HandleError::Truncated } else { HandleError::NotAHandle });
    };
    let mut reader = FieldReader::new(rest);
    check_version(reader.u32("version")?)?;
    let body_bytes = reader.u32("length")? as usize;
    if body_bytes > HANDLE_BYTES_MAX {
        return Err(invalid(format!(
            "it says that it is {body_bytes} bytes long, more than {HANDLE_BYTES_MAX}"
        )));
    }
    let body = reader.bytes(body_bytes, "body")?;
    let checksum = reader.u64("checksum")?;
    if reader.left_bytes() > 0 {
        return Err(invalid("there are bytes after its end"));
    }
    if XxHash3_64::oneshot(&bytes[..HEAD_BYTES + body_bytes]) != checksum {
        return Err(HandleError::Checksum);
    }
    Ok(body)
}

fn read_body(reader: &mut FieldReader<'_>) -> Result<ChangelogHandle, HandleError> {
    let log = LogId(reader.u128("log")?);
    let name = reader.text(LOG_NAME_BYTES_MAX, "name")?.to_owned();
    let first = reader.varint_up_to(u64::from(u16::MAX), "first key group")? as u16;
    let last = reader.varint_up_to(u64::from(u16::MAX), "last key group")? as u16;
    let key_groups =
        KeyGroupRange::new(first, last).ok_or_else(|| invalid("its range of key groups is empty"))?;
    let from = SequenceNumber(reader.varint("from")?);
    let to = add(from.0, reader.varint("to")?).map(SequenceNumber)?;
    let count = reader.count(EXTENTS_MAX, 1, "number of buckets")?;
    let mut buckets = Buckets { urls: Vec::with_capacity(count), named: 0 };
    for _ in 0..count {
        buckets.urls.push(Arc::from(reader.text(BUCKET_BYTES_MAX, "bucket")?));
    }
    let count = reader.count(EXTENTS_MAX, EXTENT_BYTES_MIN, "number of extents")?;
    let mut extents = Vec::with_capacity(count);
    let mut next = from;
    let mut pieces_read = 0;
    for _ in 0..count {
        let pieces = read_pieces(reader, &mut buckets, HANDLE_PIECES_MAX - pieces_read)?;
        pieces_read += pieces.len();
        let footer_offset = reader.varint("footer offset")?;
        let footer = footer_offset..add(footer_offset, reader.varint("footer length")?)?;
        let token = reader.u64("token")?;
        let end = add(next.0, reader.varint("number of changes")?).map(SequenceNumber)?;
        extents.push(Extent { pieces, footer, token, first: next, end });
        next = end;
    }
    let unique: HashSet<&str> = buckets.urls.iter().map(|url| &**url).collect();
    if buckets.named < buckets.urls.len() || unique.len() < buckets.urls.len() {
        return Err(invalid("it lists a bucket twice, or one that no piece names"));
    }
    Ok(ChangelogHandle { log, name, key_groups, from, to, extents })
}

/// The buckets that a handle lists, in the order in which its pieces first name them: so a handle has one encoding.
struct Buckets {
    urls: Vec<Arc<str>>,
    /// How many of them pieces have named.
    named: usize,
}

impl Buckets {
    fn get(&mut self, index: u64) -> Result<Arc<str>, HandleError> {
        let index = usize::try_from(index).ok().filter(|index| *index <= self.named);
        let url = index.and_then(|index| self.urls.get(index));
        let url =
            url.ok_or_else(|| invalid("a piece names a bucket that is not listed, or before its turn"))?;
        self.named = self.named.max(index.map_or(0, |index| index + 1));
        Ok(Arc::clone(url))
    }
}

fn read_pieces(
    reader: &mut FieldReader<'_>,
    buckets: &mut Buckets,
    max: usize,
) -> Result<Vec<Piece>, HandleError> {
    let count = reader.count(max.min(PIECES_MAX), PIECE_BYTES_MIN, "number of pieces")?;
    let mut pieces = Vec::with_capacity(count);
    for _ in 0..count {
        pieces.push(Piece {
            bucket: buckets.get(reader.varint("bucket index")?)?,
            object: reader.text(OBJECT_NAME_BYTES_MAX, "object name")?.to_owned(),
            offset: reader.varint("offset of a piece")?,
            bytes: reader.varint("length of a piece")?,
        });
    }
    Ok(pieces)
}

fn add(start: u64, len: u64) -> Result<u64, HandleError> {
    start.checked_add(len).ok_or_else(|| invalid("one of its ranges ends above 2^64"))
}

impl From<FieldError> for HandleError {
    fn from(error: FieldError) -> HandleError {
        match error {
            FieldError::Short(_) => HandleError::Truncated,
            FieldError::Bad(what) => invalid(format!("its {what} is out of bounds")),
        }
    }
}

#[cfg(test)]
mod tests;
