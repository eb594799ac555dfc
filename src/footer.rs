//! The footer: what ends an object and tells which runs its parts hold.
//!
//! Owns the layout of the footer and of the trailer that makes an object readable without its handle, and where the
//! directories of runs stand. What is in a run and in its directory is part.rs's; both come together in tail.rs. The byte
//! layout is in docs/format.md.

use crate::part::{Compression, PartId, Run};
use crate::types::{LogId, SequenceNumber};
use crate::varint;
use std::collections::BTreeMap;
use std::ops::Range;
use twox_hash::XxHash3_64;

/// The newest version of the object format that this code reads. It is written only where it is needed: where a part was
/// copied from another object. Footers of other objects have version 1.
pub const FOOTER_VERSION: u32 = 2;
/// The size in bytes of the trailer: the last bytes of an object, from which the footer is found.
pub const TRAILER_BYTES: usize = 32;
/// The largest footer that is ever decoded, in bytes.
pub const FOOTER_BYTES_MAX: u64 = 64 << 20;

/// The most parts that an object has.
pub const PARTS_MAX: usize = 1 << 16;

const MAGIC: [u8; 8] = *b"tlogOBJ\n";
/// Offsets of the trailer's fields in bytes.
mod at {
    pub const FOOTER_LEN: usize = 0;
    pub const VERSION: usize = 8;
    pub const ZERO: usize = 12;
    pub const CHECKSUM: usize = 16;
    pub const MAGIC: usize = 24;
}
const _: () = assert!(at::MAGIC + MAGIC.len() == TRAILER_BYTES);
/// A log's id, in the table of logs.
const LOG_BYTES: usize = 16;
/// A run has five varints, a part two, and one more and a token if it was copied.
const RUN_BYTES: Range<usize> = 5..5 * varint::VARINT_BYTES_MAX;
const PART_BYTES: Range<usize> = 2..TOKEN_BYTES + 3 * varint::VARINT_BYTES_MAX;
const TOKEN_BYTES: usize = 8;
/// Beside the compression of a part in version 2: its origin follows.
const COPIED: u64 = 2;

/// Why bytes are not the footer that was looked for.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FooterError {
    /// The last bytes are not those of an object of tidelog, or the object was cut short.
    #[error("no object of tidelog ends here: it is another program's, or its end is missing or damaged")]
    NotAnObject,
    /// Written by a newer tidelog.
    #[error(
        "the object has format version {found}, this tidelog knows up to {known}: read it with a newer one"
    )]
    NewerVersion {
        /// The object's version.
        found: u32,
        /// The newest version that this code reads.
        known: u32,
    },
    /// The bytes are not those that were written.
    #[error("the footer's checksum does not match its bytes: the object is damaged")]
    Checksum,
    /// The footer of another object.
    #[error("the footer belongs to the object with token {found:016x}, expected {expected:016x}")]
    Misplaced {
        /// The token of the object that was looked for.
        expected: u64,
        /// The token in the footer.
        found: u64,
    },
    /// The checksum matches, the contents make no sense.
    #[error("the footer contradicts itself: {0}")]
    Corrupt(&'static str),
}

/// One part in the footer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PartEntry {
    /// The sum of the lengths of the parts before it, in bytes: where it starts in an object that holds all parts.
    pub offset: u64,
    /// The length of the part in bytes; for the last part without the footer.
    pub len: u64,
    /// How its changesets are compressed.
    pub compression: Compression,
    /// The part of another object that it is a copy of: its checksums are bound to that.
    pub origin: Option<PartId>,
    /// Its runs, sorted by log, back to back from the part's start.
    pub runs: Vec<Run>,
}

/// What an object holds.
///
/// 1. A part's runs are sorted by log and back to back, from the part's start to its end.
/// 2. A log's runs go up in sequence numbers from part to part.
/// 3. At most [`PARTS_MAX`] parts.
/// 4. Behind the parts stand the directories of all runs, by log, those of a log in the order of its runs; then the footer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Footer {
    token: u64,
    parts: Vec<PartEntry>,
    runs: usize,
    /// What the directories of each log take, in bytes.
    directories: BTreeMap<LogId, u64>,
}

impl Footer {
    /// The footer of an object with no parts yet.
    #[must_use]
    pub fn new(token: u64) -> Footer {
        Footer { token, parts: Vec::new(), runs: 0, directories: BTreeMap::new() }
    }

    /// Whether one more part, with this many runs, leaves the footer readable. If not, the object must end before it.
    #[must_use]
    pub fn fits(&self, runs: usize) -> bool {
        let runs = (self.runs.saturating_add(runs) as u64).saturating_mul((LOG_BYTES + RUN_BYTES.end) as u64);
        let parts = (self.parts.len() as u64 + 1) * PART_BYTES.end as u64;
        self.parts.len() < PARTS_MAX && runs.saturating_add(parts + 100) <= FOOTER_BYTES_MAX
    }

    /// Adds the next part, with its runs; it may be a copy of the part `origin` of another object.
    ///
    /// # Panics
    /// If the part does not [fit](Footer::fits), or if its runs are not sorted by log and back to back.
    pub(crate) fn push_part(&mut self, compression: Compression, runs: Vec<Run>, origin: Option<PartId>) {
        assert!(self.fits(runs.len()), "an object ends before its footer grows too long to be read");
        let mut len = 0;
        for (index, run) in runs.iter().enumerate() {
            assert!(run.offset == len && run.first < run.end, "runs are not empty and stand back to back");
            assert!(index == 0 || runs[index - 1].log < run.log, "runs are sorted by log");
            len += run.len;
            *self.directories.entry(run.log).or_default() += u64::from(run.directory_len);
        }
        self.runs += runs.len();
        self.parts.push(PartEntry { offset: self.parts_len(), len, compression, origin, runs });
    }

    /// The object's token.
    #[must_use]
    pub fn token(&self) -> u64 {
        self.token
    }

    /// The parts in order.
    #[must_use]
    pub fn parts(&self) -> &[PartEntry] {
        &self.parts
    }

    /// What the checksums of the pieces of part `index` cover.
    #[must_use]
    pub fn part_id(&self, index: u32) -> PartId {
        let origin = self.parts.get(index as usize).and_then(|part| part.origin);
        origin.unwrap_or(PartId { token: self.token, index })
    }

    /// The length of all parts in bytes: where the directories start in an object that holds all of them.
    #[must_use]
    pub fn parts_len(&self) -> u64 {
        self.parts.last().map_or(0, |part| part.offset + part.len)
    }

    /// The length of all directories in bytes.
    #[must_use]
    pub fn directories_len(&self) -> u64 {
        self.directories.values().sum()
    }

    /// Where the footer itself starts in the object.
    #[must_use]
    pub fn start(&self) -> u64 {
        self.parts_len() + self.directories_len()
    }

    /// Where the directories of a log's runs are in the object, back to back in the order of the runs; empty if it has none.
    #[must_use]
    pub fn directories(&self, log: LogId) -> Range<u64> {
        let start = self.parts_len() + self.directories.range(..log).map(|(_, len)| len).sum::<u64>();
        start..start + self.directories.get(&log).copied().unwrap_or(0)
    }

    /// The runs of a log, part by part: the part's index, the run, and where in the object its directory is.
    pub fn runs_of(&self, log: LogId) -> impl Iterator<Item = (u32, &Run, Range<u64>)> {
        let mut next = self.directories(log).start;
        (0..).zip(&self.parts).filter_map(move |(index, part)| {
            let at = part.runs.binary_search_by_key(&log, |run| run.log).ok()?;
            let start = next;
            next += u64::from(part.runs[at].directory_len);
            Some((index, &part.runs[at], start..next))
        })
    }

    /// All runs, part by part: the part's index, the run, and where in the object its directory is.
    pub fn runs(&self) -> impl Iterator<Item = (u32, &Run, Range<u64>)> {
        let mut end = self.parts_len();
        let start_of = |(log, len): (&LogId, &u64)| {
            let start = end;
            end += len;
            (*log, start)
        };
        let mut next: BTreeMap<LogId, u64> = self.directories.iter().map(start_of).collect();
        (0..).zip(&self.parts).flat_map(move |(index, part)| {
            let mut runs = Vec::with_capacity(part.runs.len());
            for run in &part.runs {
                let next = next.get_mut(&run.log).expect("every log has directories");
                let start = *next;
                *next += u64::from(run.directory_len);
                runs.push((index, run, start..*next));
            }
            runs
        })
    }

    /// The least version that can say what it says.
    fn version(&self) -> u32 {
        if self.parts.iter().any(|part| part.origin.is_some()) { FOOTER_VERSION } else { 1 }
    }

    /// The footer's bytes, trailer included: the end of the last part.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut logs: Vec<LogId> =
            self.parts.iter().flat_map(|part| part.runs.iter().map(|run| run.log)).collect();
        logs.sort_unstable();
        logs.dedup();
        let mut out = self.token.to_le_bytes().to_vec();
        varint::put(&mut out, logs.len() as u64);
        for log in &logs {
            out.extend_from_slice(&log.0.to_le_bytes());
        }
        varint::put(&mut out, self.parts.len() as u64);
        for part in &self.parts {
            let copied = part.origin.map_or(0, |_| COPIED);
            varint::put(&mut out, compression_code(part.compression) | copied);
            if let Some(PartId { token, index }) = part.origin {
                out.extend_from_slice(&token.to_le_bytes());
                varint::put(&mut out, index.into());
            }
            varint::put(&mut out, part.runs.len() as u64);
            let mut due = 0;
            for run in &part.runs {
                let index = logs.binary_search(&run.log).expect("collected from the runs");
                varint::put(&mut out, (index - due) as u64);
                due = index + 1;
                varint::put(&mut out, run.first.0);
                varint::put(&mut out, run.end.0 - run.first.0);
                varint::put(&mut out, run.directory_len.into());
                varint::put(&mut out, run.len);
            }
        }
        let footer_len = (out.len() + TRAILER_BYTES) as u64;
        out.extend_from_slice(&footer_len.to_le_bytes());
        out.extend_from_slice(&self.version().to_le_bytes());
        out.extend_from_slice(&[0; at::CHECKSUM - at::ZERO]);
        let checksum = XxHash3_64::oneshot(&out);
        out.extend_from_slice(&checksum.to_le_bytes());
        out.extend_from_slice(&MAGIC);
        out
    }

    /// Where the footer of an object of `object_len` bytes stands, from the object's last bytes, at least
    /// [`TRAILER_BYTES`] of them. Plausible, not verified: within the object and at most [`FOOTER_BYTES_MAX`].
    ///
    /// # Errors
    /// [`FooterError::NotAnObject`], [`FooterError::NewerVersion`], [`FooterError::Corrupt`].
    pub fn locate(last_bytes: &[u8], object_len: u64) -> Result<Range<u64>, FooterError> {
        let (_, trailer) = last_bytes.split_last_chunk::<TRAILER_BYTES>().ok_or(FooterError::NotAnObject)?;
        if trailer[at::MAGIC..] != MAGIC {
            return Err(FooterError::NotAnObject);
        }
        let version = u32::from_le_bytes(chunk(trailer, at::VERSION));
        if version > FOOTER_VERSION {
            return Err(FooterError::NewerVersion { found: version, known: FOOTER_VERSION });
        }
        let footer_len = u64::from_le_bytes(chunk(trailer, at::FOOTER_LEN));
        if version == 0 || footer_len < TRAILER_BYTES as u64 || footer_len > FOOTER_BYTES_MAX {
            return Err(FooterError::Corrupt("an impossible version or length"));
        }
        let start = object_len
            .checked_sub(footer_len)
            .ok_or(FooterError::Corrupt("a footer longer than its object"))?;
        Ok(start..object_len)
    }

    /// Verifies a footer; `bytes` are exactly those that [`locate`](Footer::locate) or a handle named. `token`, where
    /// it is known, must be the object's.
    ///
    /// # Errors
    /// [`FooterError`] unless these are exactly the bytes of a footer, and of that object.
    pub fn decode(bytes: &[u8], token: Option<u64>) -> Result<Footer, FooterError> {
        let len = bytes.len() as u64;
        if Self::locate(bytes, len)? != (0..len) {
            return Err(FooterError::Corrupt("its length is another"));
        }
        let (body, trailer) =
            bytes.split_last_chunk::<TRAILER_BYTES>().expect("its length was looked at to locate it");
        let covered = &bytes[..body.len() + at::CHECKSUM];
        if XxHash3_64::oneshot(covered) != u64::from_le_bytes(chunk(trailer, at::CHECKSUM)) {
            return Err(FooterError::Checksum);
        }
        if trailer[at::ZERO..at::CHECKSUM] != [0; at::CHECKSUM - at::ZERO] {
            return Err(FooterError::Corrupt("bits that no version knows"));
        }
        let version = u32::from_le_bytes(chunk(trailer, at::VERSION));
        let footer = decode_body(body, version)?;
        if footer.version() != version {
            return Err(FooterError::Corrupt("another version than it needs"));
        }
        match token {
            Some(expected) if expected != footer.token => {
                Err(FooterError::Misplaced { expected, found: footer.token })
            }
            _ => Ok(footer),
        }
    }
}

fn decode_body(body: &[u8], version: u32) -> Result<Footer, FooterError> {
    let (token, mut rest) = body.split_first_chunk().ok_or(FooterError::Corrupt("no token"))?;
    let rest = &mut rest;
    let logs_len = take_count(rest, LOG_BYTES, "more logs than bytes")?;
    let (logs, behind) = rest.split_at(logs_len * LOG_BYTES);
    *rest = behind;
    let logs: Vec<LogId> =
        logs.as_chunks::<LOG_BYTES>().0.iter().map(|id| LogId(u128::from_le_bytes(*id))).collect();
    if !logs.is_sorted_by(|a, b| a < b) {
        return Err(FooterError::Corrupt("logs out of order"));
    }
    let parts_len = take_count(rest, PART_BYTES.start, "more parts than bytes")?;
    if parts_len > PARTS_MAX {
        return Err(FooterError::Corrupt("too many parts"));
    }
    let mut footer = Footer::new(u64::from_le_bytes(*token));
    footer.parts.reserve_exact(parts_len);
    let mut ends = vec![SequenceNumber::ZERO; logs.len()];
    let mut directories = vec![0; logs.len()];
    for _ in 0..parts_len {
        let code = take(rest)?;
        let origin = if version > 1 && code & COPIED != 0 { Some(take_origin(rest)?) } else { None };
        let compression = compression_of(if origin.is_some() { code & !COPIED } else { code })?;
        let runs_len = take_count(rest, RUN_BYTES.start, "more runs than bytes")?;
        let mut runs = Vec::with_capacity(runs_len);
        let (mut due, mut offset) = (0, 0u64);
        for _ in 0..runs_len {
            let index = take(rest)?
                .checked_add(due)
                .filter(|index| *index < logs.len() as u64)
                .ok_or(FooterError::Corrupt("a run of a log that it does not name"))?;
            due = index + 1;
            let run = take_run(rest, logs[index as usize], offset)?;
            if run.first < std::mem::replace(&mut ends[index as usize], run.end) {
                return Err(FooterError::Corrupt("runs of a log out of order"));
            }
            offset =
                offset.checked_add(run.len).ok_or(FooterError::Corrupt("a part of more than 2^64 bytes"))?;
            // At most 4 GiB each, and not more of them than the footer has bytes.
            directories[index as usize] += u64::from(run.directory_len);
            runs.push(run);
        }
        if footer.parts_len().checked_add(offset).is_none() {
            return Err(FooterError::Corrupt("parts of more than 2^64 bytes"));
        }
        footer.runs += runs_len;
        footer.parts.push(PartEntry { offset: footer.parts_len(), len: offset, compression, origin, runs });
    }
    footer.directories = logs.into_iter().zip(directories).collect();
    if footer.parts_len().checked_add(footer.directories_len()).is_none() {
        return Err(FooterError::Corrupt("an object of more than 2^64 bytes"));
    }
    if !rest.is_empty() {
        return Err(FooterError::Corrupt("bytes behind the last part"));
    }
    // No run ends at zero.
    if ends.contains(&SequenceNumber::ZERO) {
        return Err(FooterError::Corrupt("a log that no part has"));
    }
    Ok(footer)
}

fn take_origin(rest: &mut &[u8]) -> Result<PartId, FooterError> {
    let (token, behind) = rest.split_first_chunk().ok_or(FooterError::Corrupt("an origin is cut short"))?;
    *rest = behind;
    let index = u32::try_from(take(rest)?)
        .ok()
        .filter(|index| (*index as usize) < PARTS_MAX)
        .ok_or(FooterError::Corrupt("an origin that no object has"))?;
    Ok(PartId { token: u64::from_le_bytes(*token), index })
}

fn take_run(rest: &mut &[u8], log: LogId, offset: u64) -> Result<Run, FooterError> {
    let first = take(rest)?;
    let end = take(rest)?
        .checked_add(first)
        .filter(|end| *end > first)
        .ok_or(FooterError::Corrupt("an impossible range of sequence numbers"))?;
    let directory_len =
        u32::try_from(take(rest)?).map_err(|_| FooterError::Corrupt("a directory of more than 4 GiB"))?;
    let len = take(rest)?;
    Ok(Run { log, first: SequenceNumber(first), end: SequenceNumber(end), offset, directory_len, len })
}

fn take(rest: &mut &[u8]) -> Result<u64, FooterError> {
    varint::take(rest).ok_or(FooterError::Corrupt("a number is cut short"))
}

/// A count of items of at least `item_bytes_min` bytes each, for which enough bytes are left.
fn take_count(rest: &mut &[u8], item_bytes_min: usize, what: &'static str) -> Result<usize, FooterError> {
    let count = take(rest)?;
    if count > (rest.len() / item_bytes_min) as u64 {
        return Err(FooterError::Corrupt(what));
    }
    Ok(count as usize)
}

fn compression_code(compression: Compression) -> u64 {
    match compression {
        Compression::None => 0,
        Compression::Lz4 => 1,
    }
}

fn compression_of(code: u64) -> Result<Compression, FooterError> {
    match code {
        0 => Ok(Compression::None),
        1 => Ok(Compression::Lz4),
        _ => Err(FooterError::Corrupt("a compression that its version does not know")),
    }
}

fn chunk<const N: usize>(trailer: &[u8; TRAILER_BYTES], at: usize) -> [u8; N] {
    *trailer[at..].first_chunk().expect("inside the trailer")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn run(log: u128, first: u64, end: u64, offset: u64, directory_len: u32, len: u64) -> Run {
        let (first, end) = (SequenceNumber(first), SequenceNumber(end));
        Run { log: LogId(log), first, end, offset, directory_len, len }
    }

    fn small() -> Footer {
        let mut footer = Footer::new(0xfeed);
        let runs = vec![run(1, 0, 7, 0, 20, 100), run(9, 1 << 40, 1 << 41, 100, 30, 5000)];
        footer.push_part(Compression::None, runs, None);
        footer.push_part(Compression::Lz4, vec![run(9, 1 << 41, u64::MAX, 0, 40, 1 << 50)], None);
        footer.push_part(Compression::None, vec![], None);
        footer
    }

    /// A footer of any body, under a right trailer of version 1.
    fn sealed(body: &[u8]) -> Vec<u8> {
        sealed_as(1, body)
    }

    fn sealed_as(version: u32, body: &[u8]) -> Vec<u8> {
        let mut out = body.to_vec();
        out.extend((body.len() as u64 + TRAILER_BYTES as u64).to_le_bytes());
        out.extend(version.to_le_bytes());
        out.extend([0; 4]);
        out.extend(XxHash3_64::oneshot(&out).to_le_bytes());
        out.extend(MAGIC);
        out
    }

    fn body(logs: &[u128], numbers: &[u64]) -> Vec<u8> {
        let mut out = 7u64.to_le_bytes().to_vec();
        varint::put(&mut out, logs.len() as u64);
        logs.iter().for_each(|log| out.extend(log.to_le_bytes()));
        numbers.iter().for_each(|number| varint::put(&mut out, *number));
        out
    }

    proptest! {
        #[test]
        fn footers_round_trip(
            token: u64,
            parts in proptest::collection::vec((any::<bool>(), proptest::option::of((any::<u64>(), 0..100u32)),
                proptest::collection::btree_map(
                0..20u128, (1..1u64 << 40, 8..1000u32, 0..1u64 << 40), 0..10)), 0..20),
        ) {
            let mut footer = Footer::new(token);
            let mut next = [0; 20];
            for (packed, origin, runs) in parts {
                let mut offset = 0;
                let runs = runs.into_iter().map(|(log, (count, directory_len, more))| {
                    let first = next[log as usize];
                    next[log as usize] += count;
                    let len = u64::from(directory_len) + more;
                    offset += len;
                    run(log << 100, first, first + count, offset - len, directory_len, len)
                });
                let runs = runs.collect();
                let compression = if packed { Compression::Lz4 } else { Compression::None };
                let index = footer.parts().len() as u32;
                let expected = match origin {
                    Some((token, index)) => {
                        footer.push_part(compression, runs, Some(PartId { token, index }));
                        PartId { token, index }
                    }
                    None => {
                        footer.push_part(compression, runs, None);
                        PartId { token, index }
                    }
                };
                prop_assert_eq!(footer.part_id(index), expected);
            }
            let bytes = footer.encode();
            let object_len = footer.start() + bytes.len() as u64;
            prop_assert_eq!(Footer::locate(&bytes, object_len), Ok(footer.start()..object_len));
            prop_assert_eq!(Footer::decode(&bytes, Some(token)), Ok(footer));
        }

        #[test]
        fn arbitrary_bytes_are_refused(mut bytes in proptest::collection::vec(any::<u8>(), 0..200), magic: bool) {
            if magic && bytes.len() >= TRAILER_BYTES {
                let (len, start) = (bytes.len(), bytes.len() - TRAILER_BYTES);
                bytes[start..start + 8].copy_from_slice(&(len as u64).to_le_bytes());
                bytes[start + 8..start + 16].copy_from_slice(&[1, 0, 0, 0, 0, 0, 0, 0]);
                bytes[len - 8..].copy_from_slice(&MAGIC);
            }
            prop_assert!(Footer::decode(&bytes, None).is_err());
        }

        /// What decodes is what would be written, so there is one encoding of a footer, and nothing is read into it.
        #[test]
        fn sealed_nonsense_does_not_panic(numbers in proptest::collection::vec(
            prop_oneof![8 => 0..4u64, 1 => any::<u64>()], 0..30), version in 1..3u32) {
            let bytes = sealed_as(version, &body(&[1, 2], &numbers));
            if let Ok(footer) = Footer::decode(&bytes, None) {
                prop_assert_eq!(footer.encode(), bytes);
            }
        }
    }

    #[test]
    fn directories_stand_by_log_behind_the_parts() {
        let footer = small();
        let parts_len = 5100 + (1 << 50);
        assert_eq!((footer.parts_len(), footer.directories_len()), (parts_len, 90));
        assert_eq!(footer.start(), parts_len + 90);
        let (of_1, of_9) = (parts_len..parts_len + 20, parts_len + 20..parts_len + 90);
        assert_eq!([1, 9].map(|log| footer.directories(LogId(log))), [of_1.clone(), of_9.clone()]);
        assert!([0, 5, 10].iter().all(|log| footer.directories(LogId(*log)).is_empty()));
        let decoded = Footer::decode(&footer.encode(), None).unwrap();
        let runs = decoded.runs().map(|(part, run, directory)| (part, run.log.0, directory));
        let (first, second) = (of_9.start..of_9.start + 30, of_9.start + 30..of_9.end);
        let all = [(0, 1, of_1), (0, 9, first), (1, 9, second)];
        assert_eq!(Vec::from_iter(runs), all);
        let of_log = |log| {
            let runs = decoded.runs_of(LogId(log));
            Vec::from_iter(runs.map(|(part, run, directory)| (part, run.log.0, directory)))
        };
        assert_eq!((of_log(1), of_log(9), of_log(5)), (all[..1].to_vec(), all[1..].to_vec(), vec![]));
    }

    #[test]
    fn every_flipped_bit_and_every_truncation_is_detected() {
        let bytes = small().encode();
        assert_eq!(Footer::decode(&bytes, Some(0xfeed)), Ok(small()));
        for bit in 0..bytes.len() * 8 {
            let mut damaged = bytes.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert!(Footer::decode(&damaged, None).is_err(), "bit {bit}");
        }
        for len in 0..bytes.len() {
            assert!(Footer::decode(&bytes[..len], None).is_err(), "cut to {len}");
            assert!(Footer::decode(&bytes[len + 1..], None).is_err(), "from {}", len + 1);
        }
    }

    #[test]
    fn foreign_newer_and_other_objects_are_told_apart() {
        let bytes = small().encode();
        assert_eq!(Footer::locate(b"%PDF-1.7", 8), Err(FooterError::NotAnObject));
        assert_eq!(Footer::locate(&[0; 64], 64), Err(FooterError::NotAnObject));
        let misplaced = FooterError::Misplaced { expected: 1, found: 0xfeed };
        assert_eq!(Footer::decode(&bytes, Some(1)), Err(misplaced));
        let mut newer = bytes.clone();
        let version = newer.len() - TRAILER_BYTES + at::VERSION;
        newer[version] = 3;
        let expected = FooterError::NewerVersion { found: 3, known: 2 };
        assert_eq!(Footer::locate(&newer, 1 << 30), Err(expected.clone()));
        assert_eq!(Footer::decode(&newer, None), Err(expected));
        assert!(matches!(Footer::locate(&bytes, bytes.len() as u64 - 1), Err(FooterError::Corrupt(_))));
    }

    #[test]
    fn footers_that_contradict_themselves_are_refused() {
        let good = [1, 0, 2, 0, 5, 1, 10, 100, 0, 6, 1, 10, 100];
        let footer = Footer::decode(&sealed(&body(&[1, 2], &good)), None).unwrap();
        assert_eq!(footer.parts()[0].runs[1], run(2, 6, 7, 100, 10, 100));
        for (logs, numbers) in [
            (&[2, 1][..], &good[..]),                                        // logs out of order
            (&[1, 1], &good),                                                // a log twice
            (&[1], &good),                                                   // a run of no log
            (&[1, 2], &[1 << 40]),                                           // more parts than bytes
            (&[1, 2], &[1, 0, 1 << 40]),                                     // more runs than bytes
            (&[1, 2], &[1, 2, 0]),                                           // an unknown compression
            (&[1, 2], &[1, 0, 1, u64::MAX, 5, 1, 10, 100]),                  // an index out of range
            (&[1, 2], &[1, 0, 1, 0, 5, 0, 10, 100]),                         // an empty range
            (&[1, 2], &[1, 0, 1, 0, 5, u64::MAX, 10, 100]),                  // a range that wraps
            (&[1, 2], &[1, 0, 1, 0, 5, 1, 1 << 32, 1 << 33]),                // a directory of 4 GiB
            (&[1, 2], &[1, 0, 2, 0, 5, 1, 9, 1 << 63, 0, 5, 1, 9, 1 << 63]), // lengths that wrap
            (&[1, 2], &[2, 0, 1, 0, 5, 1, 9, 1 << 63, 0, 1, 0, 6, 1, 9, 1 << 63]), // over parts too
            (&[1], &[1, 0, 1, 0, 5, 1, 9, u64::MAX - 8]),                    // with their directories
            (&[1, 2], &[2, 0, 1, 0, 5, 2, 9, 99, 0, 1, 0, 6, 1, 9, 99]),     // a number in two parts
            (&[1], &[1, 0, 1, 0, 5, 1, 10, 100, 0]),                         // bytes behind
            (&[1, 2], &[1, 0, 1, 0, 5, 1, 10, 100]),                         // a log without a run
        ] {
            let result = Footer::decode(&sealed(&body(logs, numbers)), None);
            assert!(matches!(result, Err(FooterError::Corrupt(_))), "{logs:?} {numbers:?}: {result:?}");
        }
        assert!(matches!(Footer::decode(&sealed(&[0; 7]), None), Err(FooterError::Corrupt(_))));
    }

    #[test]
    fn origins_are_of_version_2_only_and_no_other_footer_is() {
        // One part without compression, a copy of part 3 of an object whose token is eight bytes of three numbers.
        let head = body(&[1], &[1, 2]);
        let tail = [vec![9; 8], body(&[], &[3, 1, 0, 5, 1, 10, 100])[9..].to_vec()].concat();
        let copied = [head, tail].concat();
        let footer = Footer::decode(&sealed_as(2, &copied), None).unwrap();
        let origin = PartId { token: 0x0909_0909_0909_0909, index: 3 };
        assert_eq!((footer.part_id(0), footer.part_id(1).index), (origin, 1));
        assert_eq!(footer.encode(), sealed_as(2, &copied));
        let corrupt = |bytes: &[u8]| {
            let result = Footer::decode(bytes, None);
            assert!(matches!(result, Err(FooterError::Corrupt(_))), "{result:?}");
        };
        corrupt(&sealed(&copied));
        corrupt(&sealed_as(2, &body(&[1, 2], &[1, 0, 2, 0, 5, 1, 10, 100, 0, 6, 1, 10, 100])));
        corrupt(&sealed_as(2, &body(&[1], &[1, 4, 0])));
        let cut = copied.len() - 7;
        corrupt(&sealed_as(2, &copied[..cut]));
        let far = [body(&[1], &[1, 2]), vec![9; 8], body(&[], &[1 << 16, 0])[9..].to_vec()].concat();
        corrupt(&sealed_as(2, &far));
    }

    #[test]
    fn the_longest_encoding_is_what_the_bound_assumes() {
        let longest = run(1, 1 << 60, (1 << 60) + (1 << 58), 0, u32::MAX, 1 << 60);
        let mut footer = Footer::new(0);
        let empty_len = footer.encode().len();
        let origin = PartId { token: u64::MAX, index: PARTS_MAX as u32 - 1 };
        footer.push_part(Compression::Lz4, vec![longest], Some(origin));
        let bound = LOG_BYTES + RUN_BYTES.end + PART_BYTES.end;
        assert!(footer.encode().len() - empty_len <= bound);
        let runs_max = FOOTER_BYTES_MAX as usize / (LOG_BYTES + RUN_BYTES.end);
        assert!(footer.fits(runs_max - 10) && !footer.fits(runs_max) && !footer.fits(usize::MAX));
    }
}
