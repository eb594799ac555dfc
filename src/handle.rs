//! What a checkpoint stores of a log: which changes, and in which objects they are.
//!
//! Owns the handle's checks and its two encodings, bytes and JSON. It reads no object and knows nothing of what is
//! inside one: parts and footers belong to `part.rs` and `footer.rs`.
//!
//! Bytes, version 1: magic (8), version u32, body length u32, body, xxh3-64 of all before it. All little-endian. Body:
//! log id u128, name, first and last key group, from, length, number of buckets, their URLs, number of extents; then
//! per extent: bucket index, object name, object length, footer offset, footer length, token u64, number of changes.
//! Integers without a width are LEB128; a text is its length and its UTF-8. The extents' first numbers follow from
//! `from`, because extents are contiguous.
//!
//! JSON carries the same fields and the checksum of the byte form, so it may be reformatted but not edited.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt::Write as _;
use std::ops::Range;

use serde_json::{Map, Value};
use xxhash_rust::xxh3::xxh3_64;

use crate::fields::{FieldError, FieldReader, put_text, put_varint};
use crate::{KeyGroupRange, LogId, SequenceNumber};

/// The bytes at the start of an encoded handle.
pub const HANDLE_MAGIC: [u8; 8] = *b"tidehnd\0";
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

const JSON_FORMAT: &str = "tidelog-handle";
const JSON_BYTES_MAX: usize = 8 * HANDLE_BYTES_MAX;
const HEAD_BYTES: usize = 16;
const CHECKSUM_BYTES: usize = 8;
/// What the fields of an extent take at least.
const EXTENT_BYTES_MIN: usize = 15;
/// The largest integer that every JSON reader keeps exactly.
const JSON_INTEGER_MAX: u64 = (1 << 53) - 1;

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
        let checksum = xxh3_64(&bytes);
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

    /// The handle as one line of JSON, for people and for tools in other languages.
    ///
    /// Integers above 2^53 - 1 are strings of decimal digits; the log id, tokens and the checksum are hexadecimal
    /// strings.
    #[must_use]
    pub fn to_json(&self) -> String {
        let mut json = format!(
            r#"{{"format":"{JSON_FORMAT}","version":{HANDLE_VERSION},"log":"{}","name":{},"key_groups":[{},{}],"from":{},"to":{},"extents":["#,
            self.log,
            json_text(&self.name),
            self.key_groups.first(),
            self.key_groups.last(),
            json_integer(self.from.0),
            json_integer(self.to.0),
        );
        for (index, extent) in self.extents.iter().enumerate() {
            let comma = if index == 0 { "" } else { "," };
            write!(
                json,
                r#"{comma}{{"bucket":{},"object":{},"object_bytes":{},"footer":[{},{}],"token":"{:016x}","first":{},"end":{}}}"#,
                json_text(&extent.bucket),
                json_text(&extent.object),
                json_integer(extent.object_bytes),
                json_integer(extent.footer.start),
                json_integer(extent.footer.end),
                extent.token,
                json_integer(extent.first.0),
                json_integer(extent.end.0),
            )
            .expect("writing to a string succeeds");
        }
        write!(json, r#"],"checksum":"{:016x}"}}"#, self.checksum()).expect("writing to a string succeeds");
        json
    }

    /// Reads what [`to_json`](Self::to_json) wrote, whatever its white space and order of fields.
    ///
    /// # Errors
    /// As for [`from_bytes`](Self::from_bytes); a JSON handle with any value changed is refused.
    pub fn from_json(text: &str) -> Result<ChangelogHandle, HandleError> {
        if text.len() > JSON_BYTES_MAX {
            return Err(invalid("the JSON is too long for a handle"));
        }
        let fields: Map<String, Value> = match serde_json::from_str(text) {
            Ok(Value::Object(fields)) => fields,
            Err(error) if error.is_eof() && text.trim_start().starts_with('{') => {
                return Err(HandleError::Truncated);
            }
            Err(error) if text.contains(JSON_FORMAT) => {
                return Err(invalid(format!("its JSON is malformed: {error}")));
            }
            Ok(_) | Err(_) => return Err(HandleError::NotAHandle),
        };
        if fields.get("format").and_then(Value::as_str) != Some(JSON_FORMAT) {
            return Err(HandleError::NotAHandle);
        }
        check_version(get_integer(&fields, "version")?.try_into().unwrap_or(u32::MAX))?;
        check_names(
            &fields,
            &["format", "version", "log", "name", "key_groups", "from", "to", "extents", "checksum"],
        )?;
        let log = get_text(&fields, "log")?;
        let log = get_hexadecimal(log, 32).map(LogId).ok_or_else(|| bad_json("log"))?;
        let [first, last] = get_pair(&fields, "key_groups")?;
        let key_groups = u16::try_from(first)
            .ok()
            .zip(u16::try_from(last).ok())
            .and_then(|(first, last)| KeyGroupRange::new(first, last))
            .ok_or_else(|| bad_json("key_groups"))?;
        let extents = get(&fields, "extents")?.as_array().ok_or_else(|| bad_json("extents"))?;
        let handle = ChangelogHandle {
            log,
            name: get_text(&fields, "name")?.to_owned(),
            key_groups,
            from: SequenceNumber(get_integer(&fields, "from")?),
            to: SequenceNumber(get_integer(&fields, "to")?),
            extents: extents.iter().map(read_json_extent).collect::<Result<_, _>>()?,
        };
        let checksum = get_text(&fields, "checksum")?;
        let checksum = get_hexadecimal(checksum, 16).ok_or_else(|| bad_json("checksum"))?;
        // An edit is told as such, not as whatever contradiction it made.
        if checksum != u128::from(handle.checksum()) {
            return Err(HandleError::Checksum);
        }
        handle.check()?;
        Ok(handle)
    }

    fn put_body(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.log.0.to_le_bytes());
        put_text(out, &self.name);
        put_varint(out, u64::from(self.key_groups.first().0));
        put_varint(out, u64::from(self.key_groups.last().0));
        put_varint(out, self.from.0);
        // Wrapping: a JSON handle is encoded for its checksum before its numbers are checked.
        put_varint(out, self.to.0.wrapping_sub(self.from.0));
        let mut indexes: HashMap<&str, u64> = HashMap::new();
        let mut buckets: Vec<&str> = Vec::new();
        for extent in &self.extents {
            if let Entry::Vacant(entry) = indexes.entry(&extent.bucket) {
                entry.insert(buckets.len() as u64);
                buckets.push(&extent.bucket);
            }
        }
        put_varint(out, buckets.len() as u64);
        for bucket in buckets {
            put_text(out, bucket);
        }
        put_varint(out, self.extents.len() as u64);
        for extent in &self.extents {
            put_varint(out, indexes[extent.bucket.as_str()]);
            put_text(out, &extent.object);
            put_varint(out, extent.object_bytes);
            put_varint(out, extent.footer.start);
            put_varint(out, extent.footer.end.wrapping_sub(extent.footer.start));
            out.extend_from_slice(&extent.token.to_le_bytes());
            put_varint(out, extent.end.0.wrapping_sub(extent.first.0));
        }
    }

    fn checksum(&self) -> u64 {
        let bytes = self.to_bytes();
        xxh3_64(&bytes[..bytes.len() - CHECKSUM_BYTES])
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
    if xxh3_64(&bytes[..HEAD_BYTES + body_bytes]) != checksum {
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

fn json_text(text: &str) -> Value {
    Value::String(text.to_owned())
}

fn json_integer(value: u64) -> Value {
    if value <= JSON_INTEGER_MAX { Value::from(value) } else { Value::String(value.to_string()) }
}

fn bad_json(field: &str) -> HandleError {
    invalid(format!("its JSON field \"{field}\" is missing or malformed"))
}

fn get<'a>(fields: &'a Map<String, Value>, field: &str) -> Result<&'a Value, HandleError> {
    fields.get(field).ok_or_else(|| bad_json(field))
}

fn get_text<'a>(fields: &'a Map<String, Value>, field: &str) -> Result<&'a str, HandleError> {
    get(fields, field)?.as_str().ok_or_else(|| bad_json(field))
}

fn get_integer(fields: &Map<String, Value>, field: &str) -> Result<u64, HandleError> {
    integer(get(fields, field)?).ok_or_else(|| bad_json(field))
}

fn get_pair(fields: &Map<String, Value>, field: &str) -> Result<[u64; 2], HandleError> {
    match get(fields, field)?.as_array().map(Vec::as_slice) {
        Some([first, second]) => integer(first).zip(integer(second)).map(Into::into),
        _ => None,
    }
    .ok_or_else(|| bad_json(field))
}

fn integer(value: &Value) -> Option<u64> {
    match value {
        Value::String(digits) if digits.bytes().all(|byte| byte.is_ascii_digit()) => digits.parse().ok(),
        value => value.as_u64(),
    }
}

fn get_hexadecimal(text: &str, digits: usize) -> Option<u128> {
    let plain = text.len() == digits && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    if plain { u128::from_str_radix(text, 16).ok() } else { None }
}

/// Refuses fields that this version does not have: they would not be covered by the checksum.
fn check_names(fields: &Map<String, Value>, known: &[&str]) -> Result<(), HandleError> {
    match fields.keys().find(|field| !known.contains(&field.as_str())) {
        Some(field) => Err(invalid(format!("its JSON field \"{field}\" is unknown"))),
        None => Ok(()),
    }
}

fn read_json_extent(value: &Value) -> Result<Extent, HandleError> {
    let fields = value.as_object().ok_or_else(|| bad_json("extents"))?;
    check_names(fields, &["bucket", "object", "object_bytes", "footer", "token", "first", "end"])?;
    let [footer_start, footer_end] = get_pair(fields, "footer")?;
    let token = get_hexadecimal(get_text(fields, "token")?, 16).ok_or_else(|| bad_json("token"))?;
    Ok(Extent {
        bucket: get_text(fields, "bucket")?.to_owned(),
        object: get_text(fields, "object")?.to_owned(),
        object_bytes: get_integer(fields, "object_bytes")?,
        footer: footer_start..footer_end,
        token: token as u64,
        first: SequenceNumber(get_integer(fields, "first")?),
        end: SequenceNumber(get_integer(fields, "end")?),
    })
}
