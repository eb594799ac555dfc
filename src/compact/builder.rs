//! Builds parts of changes that come log by log and run by run. Pure.
//!
//! The assembler sorts what comes in the order of appends; here it comes sorted by key group already, one run after the
//! other, and what follows in the same key group is put behind what is there. The bytes of a part are part.rs's matter.

use std::collections::BTreeMap;

use crate::part::{self, CHECKSUM_BYTES, Changeset, Compression, Packer, PartId, Run};
use crate::types::{LogId, SequenceNumber};
use crate::varint;

/// Collects changes and makes a part of them.
///
/// 1. Logs come in ascending order, each in one piece; of a log the ranges of numbers follow each other.
/// 2. Of a log and a key group, changes come in the order of their numbers.
#[derive(Default)]
pub(super) struct PartBuilder {
    runs: Vec<OpenRun>,
    bytes: usize,
    packed: bool,
    packer: Packer,
}

/// A log's changes in the part to come.
struct OpenRun {
    log: LogId,
    first: SequenceNumber,
    end: SequenceNumber,
    /// By group key.
    groups: BTreeMap<u32, Group>,
}

/// Records as they stand in a changeset.
#[derive(Default)]
struct Group {
    records: Vec<u8>,
    count: u64,
    /// The number that the next record would have with a delta of zero.
    due: u64,
}

/// A part.
pub(super) struct Built {
    pub(super) bytes: Vec<u8>,
    /// The directories of its runs, back to back.
    pub(super) directories: Vec<u8>,
    pub(super) runs: Vec<Run>,
    pub(super) compression: Compression,
}

impl PartBuilder {
    pub(super) fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    /// The bytes of all records.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// How many logs there are.
    pub(super) fn runs(&self) -> usize {
        self.runs.len()
    }

    /// Goes on with the changes `first` to `end` of a log, some or all of which follow. A part is compressed if anything in
    /// it was.
    pub(super) fn begin(
        &mut self,
        log: LogId,
        first: SequenceNumber,
        end: SequenceNumber,
        compression: Compression,
    ) {
        assert!(first < end, "a run is not empty");
        self.packed |= compression == Compression::Lz4;
        match self.runs.last_mut() {
            Some(run) if run.log == log => {
                assert!(run.end == first, "the ranges of a log follow each other");
                run.end = end;
            }
            last => {
                assert!(last.is_none_or(|run| run.log < log), "logs come in ascending order");
                self.runs.push(OpenRun { log, first, end, groups: BTreeMap::new() });
            }
        }
    }

    /// Appends the changes of a changeset of the last log whose numbers are to be kept, and says how many were.
    pub(super) fn push(
        &mut self,
        group_key: u32,
        changeset: &Changeset,
        mut keep: impl FnMut(SequenceNumber) -> bool,
    ) -> u64 {
        let run = self.runs.last_mut().expect("a log was begun");
        let mut records = changeset.records().filter(|(number, _)| keep(*number)).peekable();
        if records.peek().is_none() {
            return 0;
        }
        let group = run.groups.entry(group_key).or_default();
        let (bytes_before, count_before) = (group.records.len(), group.count);
        for (number, value) in records {
            assert!((run.first..run.end).contains(&number) && number.0 >= group.due, "changes are in order");
            varint::put(&mut group.records, number.0 - group.due);
            varint::put(&mut group.records, value.len() as u64);
            group.records.extend_from_slice(value);
            group.due = number.0 + 1;
            group.count += 1;
        }
        self.bytes += group.records.len() - bytes_before;
        group.count - count_before
    }

    /// The part of all that came since the last one.
    pub(super) fn build(&mut self, part: PartId) -> Built {
        let compression = if std::mem::take(&mut self.packed) { Compression::Lz4 } else { Compression::None };
        let mut bytes = Vec::with_capacity(std::mem::take(&mut self.bytes));
        let mut runs = Vec::with_capacity(self.runs.len());
        let (mut directories, mut lens) = (Vec::new(), Vec::new());
        for OpenRun { log, first, end, groups } in self.runs.drain(..) {
            lens.clear();
            let offset = bytes.len() as u64;
            for (group_key, group) in groups {
                let start = bytes.len();
                put_changeset(&mut self.packer, &mut bytes, group, compression, (part, log, group_key));
                lens.push((group_key, (bytes.len() - start) as u64));
            }
            let start = directories.len();
            part::put_directory(&mut directories, part, log, lens.iter().copied());
            let directory_len = (directories.len() - start) as u32;
            let len = bytes.len() as u64 - offset;
            runs.push(Run { log, first, end, offset, directory_len, len });
        }
        Built { bytes, directories, runs, compression }
    }
}

fn put_changeset(
    packer: &mut Packer,
    out: &mut Vec<u8>,
    group: Group,
    compression: Compression,
    (part, log, group_key): (PartId, LogId, u32),
) {
    match compression {
        Compression::None => {
            let start = out.len();
            out.extend_from_slice(&[0; CHECKSUM_BYTES]);
            varint::put(out, group.count);
            out.extend_from_slice(&group.records);
            part::seal_changeset(&mut out[start..], part, log, group_key);
        }
        Compression::Lz4 => {
            let mut payload = Vec::with_capacity(varint::VARINT_BYTES_MAX + group.records.len());
            varint::put(&mut payload, group.count);
            payload.extend_from_slice(&group.records);
            packer.put_changeset(out, &payload, part, log, group_key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::part::Directory;
    use crate::types::KeyGroup;
    use bytes::Bytes;

    const PART: PartId = PartId { token: 7, index: 2 };

    /// The part's changes, verified: log, group, number, value.
    fn read(built: &Built) -> Vec<(u128, Option<u16>, u64, Vec<u8>)> {
        let mut all = Vec::new();
        let mut directories = &built.directories[..];
        for run in &built.runs {
            let bytes = &built.bytes[run.offset as usize..][..run.len as usize];
            let (directory, behind) = directories.split_at(run.directory_len as usize);
            directories = behind;
            let directory = Directory::decode(directory, PART, run).unwrap();
            for entry in directory.entries() {
                let bytes =
                    Bytes::copy_from_slice(&bytes[entry.range.start as usize..entry.range.end as usize]);
                let changeset =
                    Changeset::decode(bytes, PART, run.log, entry.group, built.compression).unwrap();
                let group = entry.group.map(|group| group.0);
                all.extend(
                    changeset.records().map(|(number, value)| (run.log.0, group, number.0, value.to_vec())),
                );
            }
        }
        all
    }

    fn changeset(group: Option<KeyGroup>, changes: &[(u64, &[u8])]) -> Changeset {
        let mut out = Vec::new();
        let mut records = Group::default();
        for (number, value) in changes {
            varint::put(&mut records.records, number - records.due);
            varint::put(&mut records.records, value.len() as u64);
            records.records.extend_from_slice(value);
            records.due = number + 1;
            records.count += 1;
        }
        let key = group.map_or(0, |group| u32::from(group.0) + 1);
        put_changeset(&mut Packer::default(), &mut out, records, Compression::None, (PART, LogId(0), key));
        Changeset::decode(out.into(), PART, LogId(0), group, Compression::None).unwrap()
    }

    #[test]
    fn runs_of_a_log_become_one_and_what_is_left_out_leaves_holes() {
        for compression in [Compression::None, Compression::Lz4] {
            let mut builder = PartBuilder::default();
            let group = Some(KeyGroup(4));
            builder.begin(LogId(1), SequenceNumber(10), SequenceNumber(20), Compression::None);
            let kept =
                builder.push(5, &changeset(group, &[(8, b"x"), (10, b"ten"), (12, b"")]), |n| n.0 >= 10);
            assert_eq!(kept, 2);
            assert_eq!(builder.push(0, &changeset(None, &[(11, b"columns")]), |_| true), 1);
            builder.begin(LogId(1), SequenceNumber(20), SequenceNumber(30), compression);
            assert_eq!(builder.push(5, &changeset(group, &[(25, &[b'x'; 200])]), |_| true), 1);
            assert_eq!(builder.push(9, &changeset(Some(KeyGroup(8)), &[(21, b"gone")]), |_| false), 0);
            builder.begin(LogId(3), SequenceNumber(0), SequenceNumber(1), Compression::None);
            let built = builder.build(PART);
            assert!(builder.is_empty() && builder.bytes() == 0);
            assert_eq!(built.compression, compression);
            let ranges: Vec<_> = built.runs.iter().map(|run| (run.log.0, run.first.0, run.end.0)).collect();
            // The second log has a run of its own, though nothing of it is left.
            assert_eq!(ranges, [(1, 10, 30), (3, 0, 1)]);
            let expected = [
                (1, None, 11, b"columns".to_vec()),
                (1, Some(4), 10, b"ten".to_vec()),
                (1, Some(4), 12, Vec::new()),
                (1, Some(4), 25, vec![b'x'; 200]),
            ];
            assert_eq!(read(&built), expected);
        }
    }
}
