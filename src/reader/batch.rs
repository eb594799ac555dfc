//! `ChangeBatch`: verified changes, and where they stand in memory.
//!
//! Changesets are walked once, by whoever verifies them, while their bytes are in its cache: from header to header, each
//! found by the length of the value before it, a walk waits for every miss. What it finds is a list of slots; who goes
//! over that later waits for none. A [`Builder`] does that; the bytes need not all be there yet. Changes of local blocks
//! were sorted one by one, and are kept as they are.

use std::ops::Range;

use bytes::Bytes;

use super::objects::PartRun;
use crate::part::{self, PartError, RecordBytes, Run, Verified};
use crate::types::{KeyGroup, LogId, SequenceNumber};

/// One change, as it was appended. The value is `Bytes` where the change is kept, and a slice of its batch where it is
/// only looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Change<V = Bytes> {
    /// The log that it belongs to.
    pub log: LogId,
    /// Its number in that log.
    pub number: SequenceNumber,
    /// Its key group; `None` for metadata.
    pub key_group: Option<KeyGroup>,
    /// Its value.
    pub value: V,
}

/// Some thousand changes of one log, all verified: see [`ChangelogReader::next_batch`](crate::ChangelogReader::next_batch).
///
/// [`iter`](Self::iter) gives each value as a slice: nothing is copied, and no reference counted. Iterating over the batch
/// itself gives values that may be kept; each then keeps its neighbours in memory, up to some MiB.
#[derive(Clone, Debug)]
pub struct ChangeBatch {
    log: LogId,
    changesets: Vec<Slots>,
    slots: Vec<Slot>,
    changes: Vec<Change>,
}

/// The wanted changes of a changeset.
#[derive(Clone, Debug)]
struct Slots {
    key_group: Option<KeyGroup>,
    bytes: Bytes,
    /// Where its slots end.
    end: usize,
}

/// A change in the bytes of its changeset.
#[derive(Clone, Copy, Debug)]
struct Slot {
    number: SequenceNumber,
    start: usize,
    len: usize,
}

impl ChangeBatch {
    /// Changes of one log, one by one.
    pub(super) fn of_changes(log: LogId, changes: Vec<Change>) -> ChangeBatch {
        ChangeBatch { log, changesets: Vec::new(), slots: Vec::new(), changes }
    }

    /// The log of all the changes.
    #[must_use]
    pub fn log(&self) -> LogId {
        self.log
    }

    /// How many changes there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.slots.len() + self.changes.len()
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The changes in their order, by key group and number; nothing is copied.
    pub fn iter(&self) -> impl Iterator<Item = Change<&[u8]>> + Clone {
        let mut start = 0;
        let of_changesets = self.changesets.iter().flat_map(move |changeset| {
            let slots = &self.slots[std::mem::replace(&mut start, changeset.end)..changeset.end];
            slots.iter().map(move |slot| Change {
                log: self.log,
                number: slot.number,
                key_group: changeset.key_group,
                value: &changeset.bytes[slot.start..slot.start + slot.len],
            })
        });
        of_changesets.chain(self.changes.iter().map(|change| Change {
            log: change.log,
            number: change.number,
            key_group: change.key_group,
            value: &change.value[..],
        }))
    }
}

/// Gives values that may be kept.
impl IntoIterator for ChangeBatch {
    type Item = Change;
    type IntoIter = ChangeBatchIntoIter;

    fn into_iter(self) -> ChangeBatchIntoIter {
        ChangeBatchIntoIter {
            log: self.log,
            changesets: self.changesets.into_iter(),
            changeset: None,
            at: 0,
            slots: self.slots,
            changes: self.changes.into_iter(),
        }
    }
}

/// Iterator over a [`ChangeBatch`] that gives values to keep.
#[derive(Clone, Debug)]
pub struct ChangeBatchIntoIter {
    log: LogId,
    changesets: std::vec::IntoIter<Slots>,
    changeset: Option<Slots>,
    /// The next slot.
    at: usize,
    slots: Vec<Slot>,
    changes: std::vec::IntoIter<Change>,
}

impl Iterator for ChangeBatchIntoIter {
    type Item = Change;

    fn next(&mut self) -> Option<Change> {
        loop {
            match &self.changeset {
                Some(Slots { key_group, bytes, end }) if self.at < *end => {
                    let Slot { number, start, len } = self.slots[self.at];
                    self.at += 1;
                    let value = bytes.slice(start..start + len);
                    return Some(Change { log: self.log, number, key_group: *key_group, value });
                }
                _ => match self.changesets.next() {
                    Some(changeset) => self.changeset = Some(changeset),
                    None => return self.changes.next(),
                },
            }
        }
    }
}

/// A batch whose changesets are verified one by one, out of bytes that may be on their way still.
#[derive(Debug)]
pub(super) struct Builder {
    log: LogId,
    /// Of each changeset its key group, its records, and where its slots end.
    changesets: Vec<(Option<KeyGroup>, RecordBytes, usize)>,
    slots: Vec<Slot>,
}

impl Builder {
    /// A batch of nothing, for `changesets` changesets of a log.
    pub fn new(log: LogId, changesets: usize) -> Builder {
        Builder { log, changesets: Vec::with_capacity(changesets), slots: Vec::new() }
    }

    /// Verifies the changeset of a run that stands `at` these bytes, and adds the changes with wanted numbers. After an error
    /// the batch is of no use.
    pub fn add(
        &mut self,
        bytes: &[u8],
        at: Range<usize>,
        run: &PartRun,
        key_group: Option<KeyGroup>,
        wanted: &Range<SequenceNumber>,
    ) -> Result<(), PartError> {
        let slots = &mut self.slots;
        let visit = |number, value: Range<usize>| {
            if wanted.contains(&number) {
                slots.push(Slot { number, start: value.start, len: value.len() });
            }
        };
        let start = at.start;
        let changeset = bytes.get(at).unwrap_or_default();
        let PartRun { part, compression, run: Run { first, end, .. }, .. } = *run;
        let verified = part::verify(changeset, part, self.log, key_group, compression, visit)?;
        part::check_numbers(&verified.numbers, first..end)?;
        let Verified { mut records, .. } = verified;
        if let RecordBytes::Stored(range) = &mut records {
            *range = start + range.start..start + range.end;
        }
        self.changesets.push((key_group, records, self.slots.len()));
        Ok(())
    }

    /// How many changesets were added.
    pub fn changesets(&self) -> usize {
        self.changesets.len()
    }

    /// The batch, with the bytes that the changesets were added from.
    pub fn finish(self, bytes: impl Fn(Range<usize>) -> Bytes) -> ChangeBatch {
        let changesets = self.changesets.into_iter().map(|(key_group, records, end)| {
            let bytes = match records {
                RecordBytes::Stored(range) => bytes(range),
                RecordBytes::Unpacked(records) => records,
            };
            Slots { key_group, bytes, end }
        });
        ChangeBatch {
            log: self.log,
            changesets: changesets.collect(),
            slots: self.slots,
            changes: Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::part::{Compression, PartId, seal_changeset};
    use crate::varint;

    const LOG: LogId = LogId(7);

    const PART: PartId = PartId { token: 1, index: 2 };

    /// A changeset with these numbers, each the value of itself.
    fn changeset(group: u16, numbers: &[u64]) -> Bytes {
        let mut bytes = vec![0; crate::part::CHECKSUM_BYTES];
        varint::put(&mut bytes, numbers.len() as u64);
        let mut due = 0;
        for number in numbers {
            varint::put(&mut bytes, number - due);
            varint::put(&mut bytes, 8);
            bytes.extend(number.to_le_bytes());
            due = number + 1;
        }
        seal_changeset(&mut bytes, PART, LOG, 1 + u32::from(group));
        bytes.into()
    }

    /// A run with these numbers.
    fn run(first: u64, end: u64) -> PartRun {
        let (first, end) = (SequenceNumber(first), SequenceNumber(end));
        let run = Run { log: LOG, first, end, offset: 0, directory_len: 0, len: 0 };
        PartRun { index: 2, part: PART, offset: 0, directory: 0..0, compression: Compression::None, run }
    }

    fn found(batch: &ChangeBatch) -> Vec<(u16, u64)> {
        let seen = Vec::from_iter(batch.iter().map(|change| {
            assert_eq!((change.log, change.value), (LOG, &change.number.0.to_le_bytes()[..]));
            (change.key_group.unwrap().0, change.number.0)
        }));
        let kept = batch.clone().into_iter().map(|change| {
            assert_eq!((change.log, &change.value[..]), (LOG, &change.number.0.to_le_bytes()[..]));
            (change.key_group.unwrap().0, change.number.0)
        });
        assert_eq!(Vec::from_iter(kept), seen);
        assert_eq!((batch.len(), batch.is_empty()), (seen.len(), seen.is_empty()));
        seen
    }

    #[test]
    fn only_wanted_numbers_of_changesets_count() {
        let changesets =
            [(3, changeset(3, &[10, 12, 19])), (5, changeset(5, &[])), (6, changeset(6, &[11, 20]))];
        let batch = |first, end| {
            let wanted = SequenceNumber(first)..SequenceNumber(end);
            let mut builder = Builder::new(LOG, 3);
            let mut bytes = Vec::new();
            for (group, changeset) in &changesets {
                let at = bytes.len()..bytes.len() + changeset.len();
                bytes.extend_from_slice(changeset);
                builder.add(&bytes, at, &run(10, 21), Some(KeyGroup(*group)), &wanted).unwrap();
            }
            let bytes = Bytes::from(bytes);
            found(&builder.finish(|range| bytes.slice(range)))
        };
        let all = [(3, 10), (3, 12), (3, 19), (6, 11), (6, 20)];
        assert_eq!(batch(0, 100), all);
        assert_eq!(batch(10, 21), all);
        assert_eq!(batch(10, 20), all[..4]);
        assert_eq!(batch(11, 100), all[1..]);
        assert_eq!(batch(13, 20), [(3, 19)]);
        assert_eq!(batch(13, 19), []);
        assert_eq!(found(&Builder::new(LOG, 0).finish(|_| Bytes::new())), []);
    }

    #[test]
    fn numbers_that_are_not_in_the_run_are_refused() {
        let add = |numbers: &[u64], first, end| {
            let wanted = SequenceNumber(0)..SequenceNumber(100);
            let bytes = changeset(3, numbers);
            let at = 0..bytes.len();
            Builder::new(LOG, 1).add(&bytes, at, &run(first, end), Some(KeyGroup(3)), &wanted)
        };
        assert_eq!(add(&[10, 12, 19], 10, 20), Ok(()));
        assert_eq!(add(&[], 10, 20), Ok(()));
        assert!(matches!(add(&[10, 12, 19], 11, 20), Err(PartError::Corrupt(..))));
        assert!(matches!(add(&[10, 12, 19], 10, 19), Err(PartError::Corrupt(..))));
    }

    #[test]
    fn changes_of_local_blocks_are_as_they_are() {
        let change = |number: u64| {
            let (key_group, number) = (Some(KeyGroup(number as u16 / 10)), SequenceNumber(number));
            Change { log: LOG, number, key_group, value: Bytes::copy_from_slice(&number.0.to_le_bytes()) }
        };
        let batch = ChangeBatch::of_changes(LOG, [25, 29, 31].map(change).to_vec());
        assert_eq!(found(&batch), [(2, 25), (2, 29), (3, 31)]);
    }
}
