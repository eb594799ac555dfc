//! What a checkpoint stores of a log: which changes, and in which objects they are.
//!
//! Owns the handle's checks and its two encodings, bytes and JSON. It reads no object and knows nothing of what is
//! inside one: parts and footers belong to `part.rs` and `footer.rs`.
//!
//! Bytes, version 1: magic (8), version u32, body length u32, body, xxh3-64 of all before it. All little-endian. Body:
//! log id u128, name, first and last key group, from, length, number of buckets, their URLs, number of extents; then
//! per extent: bucket index, object name, object length, footer offset, footer length, token u64, number of changes.
//! Integers without a width are those of `varint.rs`; a text is its length and its UTF-8. The extents' first numbers follow from
//! `from`, because extents are contiguous.
//!
//! The JSON form is in `handle/json.rs`.

mod json;

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ops::Range;

use twox_hash::XxHash3_64;

use crate::fields::{FieldError, FieldReader, put_text};
use crate::{KeyGroupRange, LogId, SequenceNumber, varint};

/// The bytes at the start of an encoded handle.
pub const HANDLE_MAGIC: [u8; 8] = *b"tlogHDL\n";
/// The version of the handle's encodings that this program writes, and the newest that it reads.
pub const HANDLE_VERSION: u32 = 1;
/// The longest name of a log, in bytes.
pub const LOG_NAME_BYTES_MAX: usize = 1024;
/// The longest URL of a bucket, in bytes.
pub const BUCKET_BYTES_MAX: usize = 2048;
/// The longest name of an object, in bytes: the limit of S3.
pub const OBJECT_NAME_BYTES_MAX: usize = 1024;
/// The most extents that a handle lists.
pub const EXTENTS_MAX: usize = 1 << 16;
/// The longest encoded handle, in bytes.
pub const HANDLE_BYTES_MAX: usize = 16 << 20;

const HEAD_BYTES: usize = 16;
const CHECKSUM_BYTES: usize = 8;
/// What the fields of an extent take at least.
const EXTENT_BYTES_MIN: usize = 15;

/// Where a run of a log's changes is: one object, and the sequence numbers that it holds for the handle.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Extent {
    /// The URL of the bucket, as it was given to the changelog.
    pub bucket: String,
    /// The name of the object in the bucket.
    pub object: String,
    /// The length of the object in bytes.
    pub object_bytes: u64,
    /// Where the footer is in the object, in bytes.
    pub footer: Range<u64>,
    /// The token that the object's checksums are bound to.
    pub token: u64,
    /// The first change that the handle takes from this object.
    pub first: SequenceNumber,
    /// The end of the changes that the handle takes from this object, exclusive.
    pub end: SequenceNumber,
}

/// A proof that the changes `[from, to)` of a log are in objects, and where: what a checkpoint stores.
///
/// Invariants, checked by [`ChangelogHandle::new`] and by both decoders:
/// 1. `from <= to`, and the extents are sorted, not empty, contiguous, and cover exactly `[from, to)`;
/// 2. every extent's footer is not empty and lies inside its object;
/// 3. extents that name the same object agree on its length, footer and token;
/// 4. texts and counts are inside the limits of this module.
///
/// ```
/// use tidelog::{ChangelogHandle, Extent, KeyGroupRange, LogId, SequenceNumber};
///
/// let extent = Extent {
///     bucket: "file:///checkpoints".into(),
///     object: "orders/000007-5f".into(),
///     object_bytes: 4096,
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

    /// The objects that must exist for this handle to be read, as (bucket, object), each once, in order of first use.
    ///
    /// This is what a registry of shared checkpoint files keeps.
    pub fn objects(&self) -> impl Iterator<Item = (&str, &str)> {
        let mut seen = std::collections::HashSet::new();
        self.extents
            .iter()
            .map(|extent| (extent.bucket.as_str(), extent.object.as_str()))
            .filter(move |key| seen.insert(*key))
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
        for extent in &self.extents {
            if let Entry::Vacant(entry) = indexes.entry(&extent.bucket) {
                entry.insert(buckets.len() as u64);
                buckets.push(&extent.bucket);
            }
        }
        varint::put(out, buckets.len() as u64);
        for bucket in buckets {
            put_text(out, bucket);
        }
        varint::put(out, self.extents.len() as u64);
        for extent in &self.extents {
            varint::put(out, indexes[extent.bucket.as_str()]);
            put_text(out, &extent.object);
            varint::put(out, extent.object_bytes);
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
        for extent in &self.extents {
            let named = || format!("object {} in {}", extent.object, extent.bucket);
            if extent.bucket.is_empty() || extent.bucket.len() > BUCKET_BYTES_MAX {
                return Err(invalid(format!(
                    "a bucket's URL is empty or longer than {BUCKET_BYTES_MAX} bytes"
                )));
            }
            if extent.object.is_empty() || extent.object.len() > OBJECT_NAME_BYTES_MAX {
                return Err(invalid(format!(
                    "an object's name is empty or longer than {OBJECT_NAME_BYTES_MAX} bytes"
                )));
            }
            if extent.first != next {
                return Err(invalid(format!("{} begins at {}, expected {next}", named(), extent.first)));
            }
            if extent.first >= extent.end {
                return Err(invalid(format!("{} holds no change", named())));
            }
            if extent.footer.is_empty() || extent.footer.end > extent.object_bytes {
                return Err(invalid(format!("the footer of {} is not inside it", named())));
            }
            let known = objects.entry((&extent.bucket, &extent.object)).or_insert(extent);
            if (known.object_bytes, &known.footer, known.token)
                != (extent.object_bytes, &extent.footer, extent.token)
            {
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
    let mut buckets = Vec::with_capacity(count);
    for _ in 0..count {
        buckets.push(reader.text(BUCKET_BYTES_MAX, "bucket")?);
    }
    let count = reader.count(EXTENTS_MAX, EXTENT_BYTES_MIN, "number of extents")?;
    let mut extents = Vec::with_capacity(count);
    let mut next = from;
    for _ in 0..count {
        let bucket =
            usize::try_from(reader.varint("bucket index")?).ok().and_then(|index| buckets.get(index));
        let bucket =
            (*bucket.ok_or_else(|| invalid("an extent names a bucket that is not listed"))?).to_owned();
        let object = reader.text(OBJECT_NAME_BYTES_MAX, "object name")?.to_owned();
        let object_bytes = reader.varint("object length")?;
        let footer_offset = reader.varint("footer offset")?;
        let footer = footer_offset..add(footer_offset, reader.varint("footer length")?)?;
        let token = reader.u64("token")?;
        let end = add(next.0, reader.varint("number of changes")?).map(SequenceNumber)?;
        extents.push(Extent { bucket, object, object_bytes, footer, token, first: next, end });
        next = end;
    }
    Ok(ChangelogHandle { log, name, key_groups, from, to, extents })
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
mod tests {
    use proptest::prelude::*;

    use super::*;

    pub(super) fn extent(object: &str, first: u64, end: u64) -> Extent {
        Extent {
            bucket: "file:///var/lib/checkpoints".into(),
            object: object.into(),
            object_bytes: 1 << 20,
            footer: (1 << 20) - 900..1 << 20,
            token: 0xfeed_0123_4567_89ab,
            first: SequenceNumber(first),
            end: SequenceNumber(end),
        }
    }

    fn make(from: u64, to: u64, extents: Vec<Extent>) -> Result<ChangelogHandle, HandleError> {
        let key_groups = KeyGroupRange::new(0, 127).unwrap();
        ChangelogHandle::new(
            LogId(0xabc << 64),
            "orders",
            key_groups,
            SequenceNumber(from),
            SequenceNumber(to),
            extents,
        )
    }

    /// The handle in tests/fixtures/handle-v1.bin and handle-v1.json. Never change it.
    pub(super) fn fixture() -> ChangelogHandle {
        let mut hedge = extent("orders/000002-b", 400, 1_000);
        hedge.bucket = "file:///mnt/second".into();
        hedge.object_bytes = u64::MAX;
        let extents = vec![
            extent("orders/000001-a", 100, 400),
            hedge,
            extent("orders/000001-a", 1_000, 1_001),
            extent("orders/000003-ü\"", 1_001, 1 << 60),
        ];
        make(100, 1 << 60, extents).unwrap()
    }

    #[track_caller]
    pub(super) fn assert_invalid(result: Result<ChangelogHandle, HandleError>, reason: &str) {
        match result {
            Err(HandleError::Invalid(what)) => assert!(what.contains(reason), "{what}"),
            other => panic!("expected an invalid handle ({reason}), got {other:?}"),
        }
    }

    #[test]
    fn fixtures_decode_for_ever() {
        let bytes = include_bytes!("../tests/fixtures/handle-v1.bin");
        assert_eq!(ChangelogHandle::from_bytes(bytes), Ok(fixture()));
        let json = include_str!("../tests/fixtures/handle-v1.json");
        assert_eq!(ChangelogHandle::from_json(json), Ok(fixture()));
        if HANDLE_VERSION == 1 {
            assert_eq!(fixture().to_bytes(), bytes);
            assert_eq!(fixture().to_json(), json.trim_end());
        }
    }

    #[test]
    fn what_contradicts_itself_is_refused() {
        assert!(make(5, 5, vec![]).unwrap().is_empty());
        assert_invalid(make(6, 5, vec![]), "ends before");
        assert_invalid(make(5, 6, vec![]), "extents end at 5, expected 6");
        assert_invalid(make(0, 5, vec![extent("a", 1, 5)]), "begins at 1, expected 0");
        assert_invalid(make(0, 5, vec![extent("a", 0, 4)]), "end at 4, expected 5");
        assert_invalid(make(0, 5, vec![extent("a", 0, 6)]), "end at 6, expected 5");
        assert_invalid(make(0, 5, vec![extent("a", 0, 3), extent("b", 4, 5)]), "begins at 4, expected 3");
        assert_invalid(make(0, 5, vec![extent("a", 0, 0), extent("b", 0, 5)]), "holds no change");
        assert_invalid(make(0, 5, vec![extent("", 0, 5)]), "name is empty");
        assert_invalid(make(0, 5, vec![extent(&"x".repeat(1025), 0, 5)]), "longer than 1024");
        let bad_footer = |footer| vec![Extent { footer, ..extent("a", 0, 5) }];
        assert_invalid(make(0, 5, bad_footer(7..7)), "footer");
        assert_invalid(make(0, 5, bad_footer(7..(1 << 20) + 1)), "footer");
        let other = Extent { token: 1, ..extent("a", 3, 5) };
        assert_invalid(make(0, 5, vec![extent("a", 0, 3), other]), "described in two ways");
        let many = (0..=EXTENTS_MAX as u64).map(|at| extent("a", at, at + 1)).collect();
        assert_invalid(make(0, EXTENTS_MAX as u64 + 1, many), "more than 65536 extents");
        let long = (0..20_000).map(|at| extent(&format!("{at:01000}"), at, at + 1)).collect();
        assert_invalid(make(0, 20_000, long), "more than 16777216");
    }

    #[test]
    fn every_object_is_listed_once() {
        let handle = fixture();
        let objects: Vec<_> = handle.objects().map(|(_, object)| object).collect();
        assert_eq!(objects, ["orders/000001-a", "orders/000002-b", "orders/000003-ü\""]);
    }

    #[test]
    fn every_bit_flip_and_truncation_of_the_bytes_is_detected() {
        let bytes = fixture().to_bytes();
        for len in 0..bytes.len() {
            let expected = if len == 0 { HandleError::NotAHandle } else { HandleError::Truncated };
            assert_eq!(ChangelogHandle::from_bytes(&bytes[..len]), Err(expected), "cut at {len}");
        }
        for bit in 0..bytes.len() * 8 {
            let mut flipped = bytes.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(ChangelogHandle::from_bytes(&flipped).is_err(), "bit {bit}");
        }
        assert_invalid(ChangelogHandle::from_bytes(&[&bytes[..], &[0]].concat()), "after its end");
    }

    #[test]
    fn foreign_and_newer_input_is_named() {
        for foreign in [&b""[..], b"not a handle at all", &[0; 100]] {
            assert_eq!(ChangelogHandle::from_bytes(foreign), Err(HandleError::NotAHandle));
        }
        for foreign in ["", "hello", "[1]", "{}", "null", r#"{"format":"x"}"#] {
            assert_eq!(ChangelogHandle::from_json(foreign), Err(HandleError::NotAHandle), "{foreign}");
        }
        let newer = HandleError::NewerVersion { found: 7, known: HANDLE_VERSION };
        let mut bytes = fixture().to_bytes();
        bytes[8] = 7;
        assert_eq!(ChangelogHandle::from_bytes(&bytes), Err(newer.clone()));
        let json = fixture().to_json().replace(r#""version":1"#, r#""version":7"#);
        assert_eq!(ChangelogHandle::from_json(&json), Err(newer));
    }

    proptest! {
        #[test]
        fn handles_come_back_from_both_forms(
            name in "\\PC{0,40}",
            from in prop_oneof![Just(0), any::<u32>().prop_map(u64::from), 1u64 << 53..1 << 62],
            lens in proptest::collection::vec((1u64..1 << 40, 0u8..4, any::<u64>()), 0..20),
        ) {
            let mut next = from;
            let mut extents = Vec::new();
            for (index, (len, bucket, token)) in lens.into_iter().enumerate() {
                let mut extent = extent(&format!("o-{index}"), next, next + len);
                extent.bucket = format!("s3://b{bucket}");
                extent.token = token;
                next += len;
                extents.push(extent);
            }
            let handle = ChangelogHandle::new(
                LogId(u128::from(from) << 60), name, KeyGroupRange::ALL, SequenceNumber(from), SequenceNumber(next),
                extents,
            ).unwrap();
            prop_assert_eq!(ChangelogHandle::from_bytes(&handle.to_bytes()), Ok(handle.clone()));
            prop_assert_eq!(ChangelogHandle::from_json(&handle.to_json()), Ok(handle));
        }

        /// A right checksum over wrong contents: what a decoder meets after a fault in another program.
        #[test]
        fn arbitrary_bodies_are_refused_or_consistent(body in proptest::collection::vec(any::<u8>(), 0..200)) {
            let mut bytes = HANDLE_MAGIC.to_vec();
            bytes.extend_from_slice(&HANDLE_VERSION.to_le_bytes());
            bytes.extend_from_slice(&(body.len() as u32).to_le_bytes());
            bytes.extend_from_slice(&body);
            let checksum = XxHash3_64::oneshot(&bytes);
            bytes.extend_from_slice(&checksum.to_le_bytes());
            if let Ok(handle) = ChangelogHandle::from_bytes(&bytes) {
                prop_assert_eq!(handle.check(), Ok(()));
            }
        }
    }
}
