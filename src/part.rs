//! The part: runs of changesets, and the directories that find them.
//!
//! Owns the layout of one log's run, that is of its changesets, and of its key-group directory, and their verified
//! decoding. How changes come into this order is in assemble.rs; which runs a part has, and where their directories
//! stand, is in footer.rs; where a part lives only the handle knows. The byte layout is in docs/format.md.

use crate::types::{ChangeKind, KeyGroup, LogId, SequenceNumber};
use crate::varint;
use bytes::Bytes;
use lz4_flex::block::{CompressTable, compress_into_with_table, decompress_into, get_maximum_output_size};
use std::borrow::Cow;
use std::ops::Range;
use twox_hash::XxHash3_64;

/// Payloads above this many bytes are never compressed, so that a reader may refuse whatever claims to unpack to more.
pub const PACKED_PAYLOAD_BYTES_MAX: usize = 64 << 20;
/// The size in bytes of the checksum that a changeset starts and a directory ends with.
pub const CHECKSUM_BYTES: usize = 8;
/// How many group keys there are: metadata, and each key group.
pub(crate) const GROUP_KEYS: usize = 1 + (1 << 16);
/// Takes the place of a group key in the identity of a directory.
const DIRECTORY_KEY: u32 = u32::MAX;

/// How the changesets of a part are compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Compression {
    /// As they are.
    #[default]
    None,
    /// Each on its own by LZ4, where that makes it smaller.
    Lz4,
}

/// What identifies a part. The checksums of its pieces cover it, so that a piece of another object or part is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartId {
    /// The token of the object that the part was made for.
    pub token: u64,
    /// The part's index in that object.
    pub index: u32,
}

/// One log's changesets in a part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// The log.
    pub log: LogId,
    /// The lowest sequence number in the run.
    pub first: SequenceNumber,
    /// The end of the run's sequence numbers, exclusive. What the log holds of those from `first` on is there: a compaction
    /// leaves some of them out.
    pub end: SequenceNumber,
    /// Where the run starts in the part, in bytes.
    pub offset: u64,
    /// The length in bytes of its directory, which stands [behind the parts](crate::footer::Footer::directories).
    pub directory_len: u32,
    /// The length of the run in bytes.
    pub len: u64,
}

/// Why bytes are not the piece of a part that was looked for.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PartError {
    /// The bytes are not those that were written, or belong to another part.
    #[error("the checksum of the {0} does not match: damaged, cut short, or of another part")]
    Checksum(&'static str),
    /// The checksum matches, the contents make no sense.
    #[error("the {0} contradicts itself: {1}")]
    Corrupt(&'static str, &'static str),
}

/// One changeset in a [`Directory`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DirectoryEntry {
    /// The key group; `None` for metadata.
    pub group: Option<KeyGroup>,
    /// Where the changeset stands in the run, in bytes.
    pub range: Range<u64>,
}

/// A run's verified key-group directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Directory {
    entries: Vec<DirectoryEntry>,
}

impl Directory {
    /// Verifies the directory of `run`; `bytes` are those that the footer says.
    ///
    /// # Errors
    /// [`PartError`] unless these are exactly the bytes of this run's directory.
    pub fn decode(bytes: &[u8], part: PartId, run: &Run) -> Result<Directory, PartError> {
        const WHAT: &str = "key-group directory";
        let (mut body, checksum) =
            bytes.split_last_chunk::<CHECKSUM_BYTES>().ok_or(PartError::Checksum(WHAT))?;
        let seed = identity(part, run.log, DIRECTORY_KEY);
        if XxHash3_64::oneshot_with_seed(seed, body) != u64::from_le_bytes(*checksum) {
            return Err(PartError::Checksum(WHAT));
        }
        let corrupt = |what| PartError::Corrupt(WHAT, what);
        let count = varint::take(&mut body)
            .filter(|count| *count <= GROUP_KEYS as u64 && *count <= body.len() as u64 / 2)
            .ok_or(corrupt("an impossible number of entries"))?;
        let mut entries = Vec::with_capacity(count as usize);
        let mut due_key = 0;
        let mut at = 0u64;
        for _ in 0..count {
            let key = varint::take(&mut body)
                .and_then(|delta| delta.checked_add(due_key))
                .filter(|key| *key < GROUP_KEYS as u64)
                .ok_or(corrupt("a key group out of range"))?;
            due_key = key + 1;
            let end = varint::take(&mut body)
                .and_then(|len| len.checked_add(at))
                .filter(|end| *end <= run.len)
                .ok_or(corrupt("a changeset longer than the run"))?;
            let group = key.checked_sub(1).map(|group| KeyGroup(group as u16));
            entries.push(DirectoryEntry { group, range: at..end });
            at = end;
        }
        if !body.is_empty() || at != run.len || bytes.len() as u64 != u64::from(run.directory_len) {
            return Err(corrupt("its changesets do not fill the run"));
        }
        Ok(Directory { entries })
    }

    /// The changesets in their order in the run: metadata first, then by key group.
    #[must_use]
    pub fn entries(&self) -> &[DirectoryEntry] {
        &self.entries
    }
}

/// The verified changes of one log and one key group inside one part.
#[derive(Clone, Debug)]
pub struct Changeset {
    records: Bytes,
    count: u64,
    numbers: Range<u64>,
}

impl Changeset {
    /// Verifies and unpacks the changeset of `log` and `group` (`None` for metadata); `bytes` are exactly its range.
    ///
    /// # Errors
    /// [`PartError`] unless these are exactly the bytes of that changeset.
    pub fn decode(
        bytes: Bytes,
        part: PartId,
        log: LogId,
        group: Option<KeyGroup>,
        compression: Compression,
    ) -> Result<Changeset, PartError> {
        let Verified { records, count, numbers } = verify(&bytes, part, log, group, compression, |_, _| {})?;
        let records = match records {
            RecordBytes::Stored(range) => bytes.slice(range),
            RecordBytes::Unpacked(records) => records,
        };
        Ok(Changeset { records, count, numbers })
    }

    /// That every change has one of the numbers of the run that the changeset is in.
    ///
    /// # Errors
    /// [`PartError::Corrupt`] if one has not: no checksum covers a run's numbers together with its changesets.
    pub(crate) fn check_numbers(&self, run: Range<SequenceNumber>) -> Result<(), PartError> {
        check_numbers(&self.numbers, run)
    }

    /// How many changes there are.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.count
    }

    /// The changes in the order of their sequence numbers.
    #[must_use]
    pub fn records(&self) -> Records<'_> {
        Records { rest: &self.records, due: 0 }
    }

    /// The changes in the order of their sequence numbers, each as a slice of the changeset's memory, not copied.
    #[must_use]
    pub fn into_records(self) -> IntoRecords {
        IntoRecords { records: self.records, at: 0, due: 0 }
    }
}

/// Where the records of a verified changeset are.
#[derive(Debug)]
pub(crate) enum RecordBytes {
    /// In its bytes.
    Stored(Range<usize>),
    /// In memory of their own.
    Unpacked(Bytes),
}

/// What is known of a changeset once it was verified.
#[derive(Debug)]
pub(crate) struct Verified {
    pub records: RecordBytes,
    pub count: u64,
    /// From its first number to the end of its last; they go up. Empty without a change.
    pub numbers: Range<u64>,
}

/// As [`Changeset::check_numbers`].
pub(crate) fn check_numbers(numbers: &Range<u64>, run: Range<SequenceNumber>) -> Result<(), PartError> {
    if !numbers.is_empty() && (numbers.start < run.start.0 || numbers.end > run.end.0) {
        return Err(PartError::Corrupt("changeset", "a change whose number is not in its run"));
    }
    Ok(())
}

/// As [`Changeset::decode`], of bytes that somebody else has. Visits each change with its sequence number and where its
/// value stands in the records; what was visited counts only if the result is Ok.
pub(crate) fn verify(
    bytes: &[u8],
    part: PartId,
    log: LogId,
    group: Option<KeyGroup>,
    compression: Compression,
    mut visit: impl FnMut(SequenceNumber, Range<usize>),
) -> Result<Verified, PartError> {
    const WHAT: &str = "changeset";
    let (checksum, stored) = bytes.split_first_chunk::<CHECKSUM_BYTES>().ok_or(PartError::Checksum(WHAT))?;
    let key = group.map_or(0, |group| u32::from(group.0) + 1);
    if XxHash3_64::oneshot_with_seed(identity(part, log, key), stored) != u64::from_le_bytes(*checksum) {
        return Err(PartError::Checksum(WHAT));
    }
    let corrupt = |what| PartError::Corrupt(WHAT, what);
    let payload = match compression {
        Compression::None => Cow::Borrowed(stored),
        Compression::Lz4 => unpack(stored).ok_or(corrupt("it does not unpack to what it says"))?,
    };
    let mut records = &payload[..];
    let count = varint::take(&mut records).ok_or(corrupt("no count"))?;
    let len = records.len();
    // Walked here once, so that nothing of a malformed changeset is ever handed out.
    let (mut rest, mut due, mut found, mut first) = (records, 0, 0, 0);
    while !rest.is_empty() {
        let (number, value) = take_record(&mut rest, &mut due).ok_or(corrupt("a malformed record"))?;
        if found == 0 {
            first = number.0;
        }
        let end = len - rest.len();
        visit(number, end - value.len()..end);
        found += 1;
    }
    if found != count {
        return Err(corrupt("another number of records than it says"));
    }
    let records = match payload {
        Cow::Borrowed(_) => RecordBytes::Stored(bytes.len() - len..bytes.len()),
        Cow::Owned(payload) => {
            let start = payload.len() - len;
            RecordBytes::Unpacked(Bytes::from(payload).slice(start..))
        }
    };
    Ok(Verified { records, count, numbers: first..due })
}

/// Iterator of [`Changeset::records`].
#[derive(Clone, Debug, Default)]
pub struct Records<'a> {
    rest: &'a [u8],
    due: u64,
}

impl<'a> Iterator for Records<'a> {
    type Item = (SequenceNumber, &'a [u8]);

    #[inline]
    fn next(&mut self) -> Option<Self::Item> {
        take_record(&mut self.rest, &mut self.due)
    }
}

/// Iterator of [`Changeset::into_records`].
#[derive(Clone, Debug, Default)]
pub struct IntoRecords {
    records: Bytes,
    at: usize,
    due: u64,
}

impl Iterator for IntoRecords {
    type Item = (SequenceNumber, Bytes);

    fn next(&mut self) -> Option<Self::Item> {
        let mut rest = &self.records[self.at..];
        let (sequence, value) = take_record(&mut rest, &mut self.due)?;
        let end = self.records.len() - rest.len();
        let value = end - value.len()..end;
        self.at = end;
        Some((sequence, self.records.slice(value)))
    }
}

/// The group key of a change: 0 for metadata, 1 + key group for data. Changesets stand in this order.
#[inline]
pub(crate) fn group_key(kind: ChangeKind, key_group: u16) -> u32 {
    match kind {
        ChangeKind::Metadata => 0,
        ChangeKind::Data => 1 + u32::from(key_group),
    }
}

/// The length in bytes of the directory of changesets with these group keys, ascending, and lengths.
pub(crate) fn directory_len(changesets: impl ExactSizeIterator<Item = (u32, u64)>) -> usize {
    let mut len = varint::len(changesets.len() as u64) + CHECKSUM_BYTES;
    let mut due_key = 0;
    for (key, changeset_len) in changesets {
        len += varint::len(u64::from(key - due_key)) + varint::len(changeset_len);
        due_key = key + 1;
    }
    len
}

/// Appends the directory of changesets with these group keys, ascending, and lengths.
pub(crate) fn put_directory(
    out: &mut Vec<u8>,
    part: PartId,
    log: LogId,
    changesets: impl ExactSizeIterator<Item = (u32, u64)>,
) {
    let start = out.len();
    varint::put(out, changesets.len() as u64);
    let mut due_key = 0;
    for (key, changeset_len) in changesets {
        varint::put(out, u64::from(key - due_key));
        varint::put(out, changeset_len);
        due_key = key + 1;
    }
    let checksum = XxHash3_64::oneshot_with_seed(identity(part, log, DIRECTORY_KEY), &out[start..]);
    out.extend_from_slice(&checksum.to_le_bytes());
}

/// Writes the checksum of a changeset into its first bytes.
pub(crate) fn seal_changeset(changeset: &mut [u8], part: PartId, log: LogId, group_key: u32) {
    let checksum =
        XxHash3_64::oneshot_with_seed(identity(part, log, group_key), &changeset[CHECKSUM_BYTES..]);
    put_checksum(changeset, checksum);
}

/// Computes the checksum of a changeset, given what follows it.
pub(crate) fn changeset_hasher(part: PartId, log: LogId, group_key: u32) -> XxHash3_64 {
    XxHash3_64::with_seed(identity(part, log, group_key))
}

/// Writes a computed checksum into the first bytes of its changeset.
pub(crate) fn put_checksum(changeset: &mut [u8], checksum: u64) {
    *changeset.first_chunk_mut().expect("a changeset starts with its checksum") = checksum.to_le_bytes();
}

/// Compresses changesets. Keeps its table between them.
#[derive(Default)]
pub(crate) struct Packer {
    table: CompressTable,
}

impl Packer {
    /// Appends the changeset with this payload, compressed where that makes it smaller.
    pub(crate) fn put_changeset(
        &mut self,
        out: &mut Vec<u8>,
        payload: &[u8],
        part: PartId,
        log: LogId,
        group_key: u32,
    ) {
        let start = out.len();
        out.extend_from_slice(&[0; CHECKSUM_BYTES]);
        if !self.put_packed(out, payload) {
            out.truncate(start + CHECKSUM_BYTES);
            varint::put(out, 0);
            out.extend_from_slice(payload);
        }
        seal_changeset(&mut out[start..], part, log, group_key);
    }

    fn put_packed(&mut self, out: &mut Vec<u8>, payload: &[u8]) -> bool {
        if payload.len() > PACKED_PAYLOAD_BYTES_MAX {
            return false;
        }
        varint::put(out, payload.len() as u64);
        let start = out.len();
        out.resize(start + get_maximum_output_size(payload.len()), 0);
        match compress_into_with_table(payload, &mut out[start..], &mut self.table) {
            Ok(len) if len + varint::len(payload.len() as u64) <= payload.len() => {
                out.truncate(start + len);
                true
            }
            _ => false,
        }
    }
}

/// The payload of a changeset of a compressed part. Allocates at most [`PACKED_PAYLOAD_BYTES_MAX`], and no more than
/// LZ4 can make of the bytes that are there.
fn unpack(stored: &[u8]) -> Option<Cow<'_, [u8]>> {
    const RATIO_MAX: usize = 255;
    let mut packed = stored;
    let payload_len = usize::try_from(varint::take(&mut packed)?).ok()?;
    if payload_len == 0 {
        return Some(Cow::Borrowed(packed));
    }
    if payload_len > PACKED_PAYLOAD_BYTES_MAX || payload_len / RATIO_MAX > packed.len() {
        return None;
    }
    let mut payload = vec![0; payload_len];
    match decompress_into(packed, &mut payload) {
        Ok(len) if len == payload_len => Some(Cow::Owned(payload)),
        _ => None,
    }
}

/// Takes one record off the front: a varint with the distance to the number that was due, a varint with the length,
/// the value.
#[inline]
fn take_record<'a>(rest: &mut &'a [u8], due: &mut u64) -> Option<(SequenceNumber, &'a [u8])> {
    let mut bytes = *rest;
    let (distance, len) = varint::take_pair(&mut bytes)?;
    let sequence = distance.checked_add(*due)?;
    let len = usize::try_from(len).ok()?;
    let (value, behind) = bytes.split_at_checked(len)?;
    *due = sequence.checked_add(1)?;
    *rest = behind;
    Some((SequenceNumber(sequence), value))
}

/// Seeds the checksums of the pieces of a part: a piece under another identity does not verify.
#[inline]
fn identity(part: PartId, log: LogId, key: u32) -> u64 {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&part.token.to_le_bytes());
    bytes[8..12].copy_from_slice(&part.index.to_le_bytes());
    bytes[12..16].copy_from_slice(&key.to_le_bytes());
    bytes[16..].copy_from_slice(&log.0.to_le_bytes());
    XxHash3_64::oneshot(&bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const PART: PartId = PartId { token: 42, index: 1 };
    const LOG: LogId = LogId(0xabc);

    fn run(directory_len: usize, len: u64) -> Run {
        let (first, end) = (SequenceNumber(0), SequenceNumber(1));
        Run { log: LOG, first, end, offset: 0, directory_len: directory_len as u32, len }
    }

    /// A directory of any body, under a right checksum.
    fn sealed_directory(body: &[u8]) -> Vec<u8> {
        let checksum = XxHash3_64::oneshot_with_seed(identity(PART, LOG, DIRECTORY_KEY), body);
        [body, &checksum.to_le_bytes()].concat()
    }

    /// A changeset of metadata with anything stored, under a right checksum.
    fn sealed_changeset(stored: &[u8]) -> Bytes {
        let mut bytes = [&[0; CHECKSUM_BYTES], stored].concat();
        seal_changeset(&mut bytes, PART, LOG, 0);
        bytes.into()
    }

    fn changeset(stored: &[u8], compression: Compression) -> Result<Changeset, PartError> {
        Changeset::decode(sealed_changeset(stored), PART, LOG, None, compression)
    }

    fn numbers(values: &[u64]) -> Vec<u8> {
        let mut out = Vec::new();
        values.iter().for_each(|value| varint::put(&mut out, *value));
        out
    }

    fn corrupt<T: std::fmt::Debug>(result: Result<T, PartError>) {
        assert!(matches!(result, Err(PartError::Corrupt(..))), "{result:?}");
    }

    proptest! {
        #[test]
        fn directories_round_trip(changesets in proptest::collection::btree_map(0..GROUP_KEYS as u32, 9..1u64 << 40, 0..300)) {
            let mut bytes = Vec::new();
            put_directory(&mut bytes, PART, LOG, changesets.iter().map(|(key, len)| (*key, *len)));
            prop_assert_eq!(bytes.len(), directory_len(changesets.iter().map(|(key, len)| (*key, *len))));
            let run = run(bytes.len(), changesets.values().sum::<u64>());
            let directory = Directory::decode(&bytes, PART, &run).unwrap();
            let mut at = 0;
            prop_assert_eq!(directory.entries().len(), changesets.len());
            for (entry, (key, len)) in directory.entries().iter().zip(&changesets) {
                prop_assert_eq!(entry.group.map_or(0, |group| u32::from(group.0) + 1), *key);
                prop_assert_eq!(&entry.range, &(at..at + len));
                at += len;
            }
        }

        #[test]
        fn packed_changesets_round_trip(values in proptest::collection::vec(
            proptest::collection::vec(0..4u8, 0..100), 0..200)) {
            let mut payload = numbers(&[values.len() as u64]);
            for value in &values {
                payload.extend(numbers(&[3, value.len() as u64]));
                payload.extend(value);
            }
            let mut packer = Packer::default();
            let mut bytes = Vec::new();
            packer.put_changeset(&mut bytes, &payload, PART, LOG, 0);
            prop_assert!(bytes.len() <= payload.len() + CHECKSUM_BYTES + 1);
            let changeset = Changeset::decode(bytes.into(), PART, LOG, None, Compression::Lz4).unwrap();
            prop_assert!(changeset.records().map(|(_, value)| value).eq(&values));
        }

        #[test]
        fn sealed_nonsense_does_not_panic(body in proptest::collection::vec(any::<u8>(), 0..300), len: u64) {
            let _ = Directory::decode(&sealed_directory(&body), PART, &run(body.len() + 8, len));
            for compression in [Compression::None, Compression::Lz4] {
                if let Ok(changeset) = changeset(&body, compression) {
                    prop_assert_eq!(changeset.records().count() as u64, changeset.count());
                }
            }
        }

        #[test]
        fn bytes_without_their_checksum_are_refused(body in proptest::collection::vec(any::<u8>(), 0..300)) {
            prop_assert!(Directory::decode(&body, PART, &run(body.len(), 1 << 20)).is_err());
            prop_assert!(Changeset::decode(body.into(), PART, LOG, None, Compression::None).is_err());
        }
    }

    #[test]
    fn directories_that_do_not_fill_the_run_are_refused() {
        let body = numbers(&[2, 0, 100, 4, 50]);
        let bytes = sealed_directory(&body);
        let whole = run(bytes.len(), 150);
        let directory = Directory::decode(&bytes, PART, &whole).unwrap();
        assert_eq!(directory.entries()[1].group, Some(KeyGroup(4)));
        corrupt(Directory::decode(&bytes, PART, &Run { len: whole.len + 1, ..whole }));
        corrupt(Directory::decode(&bytes, PART, &Run { len: whole.len - 1, ..whole }));
        corrupt(Directory::decode(&bytes, PART, &Run { directory_len: whole.directory_len - 1, ..whole }));
        for numbers_of_body in [
            &[1 << 60][..],             // a count that nothing could hold
            &[2, 0, 150],               // fewer entries than it says
            &[1, 65_537, 150],          // no such key group
            &[2, 65_536, 100, 0, 50],   // nor such a second one
            &[2, u64::MAX, 100, 4, 50], // nor one that wraps
            &[2, 0, u64::MAX, 4, 151],  // lengths that wrap
            &[2, 0, 100, 4, 50, 0],     // bytes behind
        ] {
            let bytes = sealed_directory(&numbers(numbers_of_body));
            corrupt(Directory::decode(&bytes, PART, &run(bytes.len(), 150)));
        }
    }

    #[test]
    fn changesets_that_contradict_themselves_are_refused() {
        assert_eq!(changeset(&numbers(&[1, 5, 0]), Compression::None).unwrap().count(), 1);
        for stored in [
            &[][..],
            &[2, 5, 0],
            &[0, 5, 0],
            &[1, 5, 1],
            &[1, u64::MAX, 0],
            &[2, u64::MAX - 1, 0, 0, 0],
            &[1, 5, u64::MAX],
        ] {
            corrupt(changeset(&numbers(stored), Compression::None));
        }
    }

    #[test]
    fn bombs_are_refused_before_memory_is_taken() {
        let zeros = lz4_flex::block::compress(&vec![0; 1 << 20]);
        // It is what it says, but no changeset: a million zeros are no count.
        corrupt(changeset(&[&numbers(&[1 << 20])[..], &zeros].concat(), Compression::Lz4));
        for claimed in [1, (1 << 20) - 1, (1 << 20) + 1, 1 << 26, (1 << 26) + 1, 1 << 40, u64::MAX] {
            let stored = [&numbers(&[claimed])[..], &zeros].concat();
            assert!(unpack(&stored).is_none(), "{claimed}");
            corrupt(changeset(&stored, Compression::Lz4));
        }
        assert_eq!(unpack(&[&numbers(&[1 << 20])[..], &zeros].concat()).unwrap().len(), 1 << 20);
    }

    #[test]
    fn a_piece_under_another_identity_is_refused() {
        let bytes = sealed_changeset(&numbers(&[1, 5, 0]));
        let decode = |part, log, group| Changeset::decode(bytes.clone(), part, log, group, Compression::None);
        assert!(decode(PART, LOG, None).is_ok());
        assert!(decode(PartId { token: 43, ..PART }, LOG, None).is_err());
        assert!(decode(PartId { index: 2, ..PART }, LOG, None).is_err());
        assert!(decode(PART, LogId(0xabd), None).is_err());
        assert!(decode(PART, LOG, Some(KeyGroup(0))).is_err());
    }
}
