//! `Unpack`: the changesets of a range of an object, verified while its bytes come.
//!
//! A changeset is looked at as soon as it is there, by the thread that received it: later, with the whole range, it would
//! have left that thread's cache. How a changeset is verified is known to part.rs, what becomes of it to batch.rs.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use tidelog_upload::Watch;

use super::batch::{Builder, ChangeBatch};
use super::objects::{ObjectSource, PartRun, Unread};
use crate::part::{Directory, DirectoryEntry};

/// Neighbouring changesets of one run.
#[derive(Clone, Debug)]
pub(super) struct EntryRange {
    pub run: PartRun,
    pub directory: Arc<Directory>,
    pub entries: Range<usize>,
    /// It was damaged before.
    pub again: bool,
}

impl EntryRange {
    fn entries(&self) -> &[DirectoryEntry] {
        &self.directory.entries()[self.entries.clone()]
    }

    /// Where they stand in the run, in bytes.
    fn in_run(&self) -> Range<u64> {
        let entries = self.entries();
        let start = entries.first().map_or(0, |entry| entry.range.start);
        start..entries.last().map_or(start, |entry| entry.range.end)
    }

    /// Where they stand in the object, in bytes.
    pub fn bytes(&self) -> Range<u64> {
        let Range { start, end } = self.in_run();
        self.run.offset + start..self.run.offset + end
    }
}

/// Verifies the changesets of a range, in their order.
pub(super) struct Unpack {
    source: Arc<ObjectSource>,
    range: EntryRange,
    batch: Builder,
    /// Why no more are looked at.
    failed: Option<Unread>,
}

impl Unpack {
    pub fn new(source: Arc<ObjectSource>, range: EntryRange) -> Unpack {
        let batch = Builder::new(source.log, range.entries.len());
        Unpack { source, range, batch, failed: None }
    }

    /// The changes, once all bytes of the range are there.
    pub fn finish(mut self, bytes: &Bytes) -> Result<ChangeBatch, Unread> {
        self.advance(bytes, true);
        match self.failed {
            Some(unread) => Err(unread),
            None => Ok(self.batch.finish(|range| bytes.slice(range))),
        }
    }

    /// Looks at the changesets that were not yet looked at, up to the first that goes on behind the bytes unless these are
    /// `all`.
    fn advance(&mut self, bytes: &[u8], all: bool) {
        let Unpack { source, range, batch, failed } = self;
        let (run, wanted, start) = (&range.run, source.wanted(), range.in_run().start);
        for entry in &range.entries()[batch.changesets()..] {
            let at = (entry.range.start - start) as usize..(entry.range.end - start) as usize;
            if failed.is_some() || (at.end > bytes.len() && !all) {
                return;
            }
            if let Err(error) = batch.add(bytes, at, run, entry.group, &wanted) {
                *failed = Some(Unread::Changeset(entry.range.clone(), error));
            }
        }
    }
}

impl Watch for Unpack {
    fn see(&mut self, bytes: &[u8]) {
        self.advance(bytes, false);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::handle::Extent;
    use crate::part::{self, Compression, PartId, Run};
    use crate::types::{KeyGroup, KeyGroupRange, LogId, SequenceNumber};
    use crate::varint;

    const LOG: LogId = LogId(7);
    const PART: PartId = PartId { token: 1, index: 2 };

    /// A run of three changesets with three changes each, of which the last two are read; and the bytes of these.
    fn range() -> (Arc<ObjectSource>, EntryRange, Bytes) {
        let (mut bytes, mut lens) = (Vec::new(), Vec::new());
        for group in 0..3 {
            let mut changeset = vec![0; part::CHECKSUM_BYTES];
            varint::put(&mut changeset, 3);
            for value in [&b"one"[..], b"", b"three"] {
                varint::put(&mut changeset, 2);
                varint::put(&mut changeset, value.len() as u64);
                changeset.extend(value);
            }
            part::seal_changeset(&mut changeset, PART, LOG, 1 + group);
            lens.push((1 + group, changeset.len() as u64));
            bytes.extend(changeset);
        }
        let mut directory = Vec::new();
        part::put_directory(&mut directory, PART, LOG, lens.iter().copied());
        let (first, end) = (SequenceNumber(0), SequenceNumber(100));
        let (len, directory_len) = (bytes.len() as u64, directory.len() as u32);
        let run = Run { log: LOG, first, end, offset: 0, directory_len, len };
        let directory = Arc::new(Directory::decode(&directory, PART, &run).unwrap());
        let (offset, compression) = (1000, Compression::None);
        let run = PartRun { index: 2, part: PART, offset, directory: 0..0, compression, run };
        let range = EntryRange { run, directory, entries: 1..3, again: false };
        let extent = Extent { pieces: Vec::new(), footer: 0..0, token: 1, first, end };
        let bytes = Bytes::from(bytes).slice(lens[0].1 as usize..);
        assert_eq!(range.bytes(), 1000 + lens[0].1..1000 + len);
        (Arc::new(ObjectSource { log: LOG, key_groups: KeyGroupRange::ALL, extent }), range, bytes)
    }

    #[test]
    fn changesets_are_verified_as_soon_as_they_are_there() {
        let (source, range, bytes) = range();
        let each = bytes.len() / 2;
        for first in 0..=bytes.len() {
            for second in first..=bytes.len() {
                let mut unpack = Unpack::new(Arc::clone(&source), range.clone());
                for cut in [first, second] {
                    unpack.see(&bytes[..cut]);
                    assert_eq!(unpack.batch.changesets(), cut / each);
                }
                let batch = unpack.finish(&bytes).unwrap();
                let found = Vec::from_iter(batch.iter().map(|change| {
                    (change.key_group.unwrap(), change.number.0, std::str::from_utf8(change.value).unwrap())
                }));
                let of = |group| [2, 5, 8].map(|number| (KeyGroup(group), number));
                let values = ["one", "", "three", "one", "", "three"];
                let expected = [of(1), of(2)].concat().into_iter().zip(values);
                assert_eq!(
                    found,
                    Vec::from_iter(expected.map(|((group, number), value)| (group, number, value)))
                );
            }
        }
    }

    #[test]
    fn damage_names_its_changeset_whatever_came_before() {
        let (source, range, bytes) = range();
        let each = bytes.len() / 2;
        for at in 0..bytes.len() {
            let mut damaged = bytes.to_vec();
            damaged[at] ^= 4;
            let damaged = Bytes::from(damaged);
            for cut in 0..=bytes.len() {
                let mut unpack = Unpack::new(Arc::clone(&source), range.clone());
                unpack.see(&damaged[..cut]);
                let Err(Unread::Changeset(found, _)) = unpack.finish(&damaged) else {
                    panic!("byte {at} was damaged")
                };
                assert_eq!(found, range.entries()[at / each].range);
            }
        }
        // So is what did not come.
        let unpack = Unpack::new(source, range);
        assert!(matches!(unpack.finish(&bytes.slice(..bytes.len() - 1)), Err(Unread::Changeset(..))));
    }
}
