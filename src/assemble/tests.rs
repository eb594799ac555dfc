//! Tests of the assembler, of parts and of footers together: what is appended is what is read, damage is noticed.

use super::*;
use crate::block::tests::seal_damaged;
use crate::block::{BLOCK_HEADER_BYTES, BlockBuilder, BlockPlace, TABLE_ENTRY_BYTES, seal};
use crate::footer::Footer;
use crate::part::{Changeset, Directory, PartError};
use crate::record::{FRAGMENT_LEAD_BYTES, fragment_lead};
use crate::tail::Tail;
use crate::types::{ChangeKind, KeyGroup};
use bytes::Bytes;
use proptest::prelude::*;
use std::collections::BTreeMap;

const PART: PartId = PartId { token: 0x0123_4567_89ab_cdef, index: 3 };
type Contents = BTreeMap<(LogId, Option<KeyGroup>), Vec<(u64, Vec<u8>)>>;

#[derive(Clone, Debug)]
pub(crate) struct Change {
    pub(crate) log: usize,
    pub(crate) group: Option<u16>,
    pub(crate) value: Vec<u8>,
}

pub(crate) fn log_id(log: usize) -> LogId {
    // Not in the order of the slots.
    LogId(u128::from_be_bytes([log as u8 ^ 0x55; 16]))
}

/// A small spiller: blocks of one page, values that do not fit go in fragments.
pub(crate) struct Spill {
    builder: BlockBuilder,
    buffer: Vec<u8>,
    blocks: Vec<Vec<u8>>,
    next: BTreeMap<usize, u64>,
}

impl Spill {
    fn new(first: u64) -> Spill {
        let next = (0..256).map(|log| (log, first)).collect();
        Spill { builder: BlockBuilder::new(4096), buffer: vec![0xee; 4096], blocks: Vec::new(), next }
    }

    fn entry(&mut self, log: usize) -> usize {
        let known = self.builder.entries().iter().position(|entry| entry.slot == log as u32);
        known.unwrap_or_else(|| {
            self.builder.add_entry(log as u32, log_id(log), SequenceNumber(self.next[&log]))
        })
    }

    fn frame(&mut self, kind: FrameKind, log: usize, key_group: u16, lead: &[u8], value: &[u8]) {
        let len = lead.len() + value.len();
        let mut frame = Header::new(kind, key_group, log as u32, len).0.to_le_bytes().to_vec();
        frame.extend(lead);
        frame.extend(value);
        frame.resize(crate::record::frame_len(len), 0);
        let entry = self.entry(log);
        self.builder.push_frames(&mut self.buffer, &frame);
        if !matches!(kind, FrameKind::FragmentFirst | FrameKind::FragmentMiddle) {
            self.builder.add_count(entry, 1);
            *self.next.get_mut(&log).unwrap() += 1;
        }
    }

    fn append(&mut self, change: &Change) {
        let key_group = change.group.unwrap_or(0);
        let len = crate::record::frame_len(change.value.len());
        let (kind, change_kind) = match change.group {
            Some(_) => (FrameKind::Data, ChangeKind::Data),
            None => (FrameKind::Metadata, ChangeKind::Metadata),
        };
        if len <= 1000 {
            if !self.builder.fits(len, true) {
                self.finish(false);
            }
            return self.frame(kind, change.log, key_group, &[], &change.value);
        }
        let mut rest = &change.value[..];
        let mut first = true;
        loop {
            let least = 32 + TABLE_ENTRY_BYTES;
            if self.builder.room() < least {
                self.finish(!first);
            }
            let lead = if first { FRAGMENT_LEAD_BYTES } else { 0 };
            let room = (self.builder.room() - TABLE_ENTRY_BYTES - 8 - lead) & !7;
            let (value, behind) = rest.split_at(rest.len().min(room));
            let kind = match (first, behind.is_empty()) {
                (true, _) => FrameKind::FragmentFirst,
                (_, true) => FrameKind::FragmentLast,
                _ => FrameKind::FragmentMiddle,
            };
            let lead_bytes = fragment_lead(change_kind, change.value.len() as u64);
            self.frame(kind, change.log, key_group, &lead_bytes[..lead], value);
            rest = behind;
            first = false;
            if kind == FrameKind::FragmentLast {
                break;
            }
        }
    }

    fn finish(&mut self, continues: bool) {
        let len = self.builder.finish(&mut self.buffer, continues);
        let number = self.blocks.len() as u64;
        let place = BlockPlace {
            directory: 1,
            segment: 2,
            epoch: 3,
            index: number as u32,
            offset: number * 4096,
            number,
            watermark: 0,
        };
        seal(&mut self.buffer[..len], &place);
        self.blocks.push(self.buffer[..len].to_vec());
    }

    fn done(mut self) -> Vec<Vec<u8>> {
        if !self.builder.is_empty() {
            self.finish(false);
        }
        self.blocks
    }
}

pub(crate) fn decoded(blocks: &[Vec<u8>]) -> impl Iterator<Item = Result<Block<'_>, BlockError>> {
    blocks.iter().map(|block| Block::decode(block, None))
}

pub(crate) fn spill(changes: &[Change]) -> Vec<Vec<u8>> {
    let mut spill = Spill::new(0);
    changes.iter().for_each(|change| spill.append(change));
    spill.done()
}

/// Reads everything back the way a reader does: footer, directories, changesets.
fn read(object: &[u8], token: u64, index: u32) -> Result<Contents, Box<dyn std::error::Error>> {
    let footer_range = Footer::locate(object, object.len() as u64)?;
    let footer = Footer::decode(&object[footer_range.start as usize..], Some(token))?;
    read_parts(object, &footer, |_| PartId { token, index })
}

fn read_parts(
    object: &[u8],
    footer: &Footer,
    id: impl Fn(u32) -> PartId,
) -> Result<Contents, Box<dyn std::error::Error>> {
    let mut contents = Contents::new();
    for (index, run, directory) in footer.runs() {
        let part = &footer.parts()[index as usize];
        let directory = &object[directory.start as usize..directory.end as usize];
        let bytes = &object[(part.offset + run.offset) as usize..][..run.len as usize];
        read_run(directory, bytes, id(index), run, part.compression, &mut contents)?;
    }
    Ok(contents)
}

fn read_run(
    directory: &[u8],
    bytes: &[u8],
    part: PartId,
    run: &Run,
    compression: Compression,
    contents: &mut Contents,
) -> Result<(), PartError> {
    let bytes = Bytes::copy_from_slice(bytes);
    let directory = Directory::decode(directory, part, run)?;
    for entry in directory.entries() {
        let range = entry.range.start as usize..entry.range.end as usize;
        let changeset = Changeset::decode(bytes.slice(range), part, run.log, entry.group, compression)?;
        let records = contents.entry((run.log, entry.group)).or_default();
        let before = records.len();
        records.extend(changeset.records().map(|(sequence, value)| (sequence.0, value.to_vec())));
        assert_eq!((records.len() - before) as u64, changeset.count());
        for (record, (sequence, value)) in records[before..].iter().zip(changeset.into_records()) {
            assert_eq!((record.0, &record.1[..]), (sequence.0, &value[..]));
        }
    }
    Ok(())
}

fn object(part: &Part, compression: Compression) -> Vec<u8> {
    let mut tail = Tail::new(PART.token);
    tail.push(compression, part.runs.clone(), &part.directories);
    [&part.bytes[..], &tail.encode().0].concat()
}

fn model(changes: &[Change], keep_from: impl Fn(LogId) -> u64) -> Contents {
    let mut next = BTreeMap::<usize, u64>::new();
    let mut contents = Contents::new();
    for change in changes {
        let next = next.entry(change.log).or_default();
        if *next >= keep_from(log_id(change.log)) {
            let key = (log_id(change.log), change.group.map(KeyGroup));
            contents.entry(key).or_default().push((*next, change.value.clone()));
        }
        *next += 1;
    }
    contents
}

pub(crate) fn any_change() -> impl Strategy<Value = Change> {
    let group = prop_oneof![
        1 => Just(None),
        6 => (0..6u16).prop_map(Some),
        2 => any::<u16>().prop_map(Some),
        1 => Just(Some(u16::MAX)),
    ];
    let len = prop_oneof![10 => 0..40usize, 5 => 40..300usize, 1 => 900..9000usize];
    (0..5usize, group, len, any::<u8>()).prop_map(|(log, group, len, seed)| {
        let value = (0..len).map(|i| (i as u8 / 4).wrapping_mul(seed) ^ seed).collect();
        Change { log, group, value }
    })
}

proptest! {
    #[test]
    fn what_was_appended_is_what_is_read(
        rounds in proptest::collection::vec(proptest::collection::vec(any_change(), 0..120), 1..3),
        keep_from in 0..30u64,
    ) {
        // One assembler for all, so that nothing of a round may leak into the next.
        let mut assembler = Assembler::new();
        for changes in &rounds {
            let blocks = spill(changes);
            for compression in [Compression::None, Compression::Lz4] {
                let keep = |log: LogId| if log.0 & 1 == 0 { keep_from } else { 0 };
                let kept = &mut |log| from(keep(log));
                assembler.reuse(vec![0xee; 1 << 20].into());
                let part = assembler.assemble(decoded(&blocks), kept, PART, compression).unwrap();
                let fresh = Assembler::new().assemble(decoded(&blocks), kept, PART, compression).unwrap();
                prop_assert!(part == fresh, "what was in the memory is in the part");
                let contents = read(&object(&part, compression), PART.token, PART.index).unwrap();
                let wanted = model(changes, keep);
                prop_assert_eq!(&contents, &wanted);
                for run in &part.runs {
                    let numbers: Vec<u64> = wanted
                        .iter()
                        .filter(|((log, _), _)| *log == run.log)
                        .flat_map(|(_, records)| records.iter().map(|record| record.0))
                        .collect();
                    prop_assert_eq!(numbers.iter().min().copied(), Some(run.first.0));
                    prop_assert_eq!(numbers.iter().max().map(|last| last + 1), Some(run.end.0));
                }
                let logs: std::collections::BTreeSet<LogId> = wanted.keys().map(|key| key.0).collect();
                prop_assert!(logs.into_iter().eq(part.runs.iter().map(|run| run.log)));
            }
        }
    }
}

/// All changes from `first` on are kept.
fn from(first: u64) -> Range<SequenceNumber> {
    SequenceNumber(first)..SequenceNumber(u64::MAX)
}

fn small(log: usize, group: u16, value: &[u8]) -> Change {
    Change { log, group: Some(group), value: value.to_vec() }
}

fn assemble(blocks: &[Vec<u8>], keep_from: u64) -> Result<Part, BlockError> {
    Assembler::new().assemble(decoded(blocks), &mut |_| from(keep_from), PART, Compression::None)
}

/// Longer ones are hashed while they grow, a few stretches of blocks each.
#[test]
fn changesets_of_all_lengths_have_right_checksums() {
    let mut changes = Vec::new();
    for index in 0..9000_usize {
        let value: Vec<u8> = (0..index % 300).map(|at| (at * index) as u8).collect();
        // A few long changesets, one that just comes to be hashed early, and many short ones.
        changes.push(small(index % 3, (index / 3 % 2) as u16, &value));
        if index < 130 {
            changes.push(small(1, 7, &[index as u8; 125]));
        }
        changes.push(small(0, 1000 + (index % 500) as u16, &value[..value.len() / 8]));
        if index % 1000 == 0 {
            changes.push(small(2, 1, &vec![index as u8; 30_000]));
        }
    }
    let blocks = spill(&changes);
    let part =
        Assembler::new().assemble(decoded(&blocks), &mut |_| from(0), PART, Compression::None).unwrap();
    assert!(part.bytes.len() > 2 * scatter::HASH_EVERY_BYTES);
    let contents = read(&object(&part, Compression::None), PART.token, PART.index).unwrap();
    assert_eq!(contents, model(&changes, |_| 0));
}

#[test]
fn numbers_far_from_zero_survive() {
    let mut assembler = Assembler::new();
    for first in [1 << 40, u64::MAX - 5, u64::from(u32::MAX) - 1, 1 << 33] {
        let mut spill = Spill::new(first);
        for value in [b"a", b"b", b"c"] {
            spill.append(&small(0, 7, value));
            spill.append(&small(1, 9, value));
        }
        let blocks = spill.done();
        let keep_from = &mut |_| from(first + 1);
        let part = assembler.assemble(decoded(&blocks), keep_from, PART, Compression::None).unwrap();
        let contents = read(&object(&part, Compression::None), PART.token, PART.index).unwrap();
        let wanted = vec![(first + 1, b"b".to_vec()), (first + 2, b"c".to_vec())];
        assert_eq!(contents[&(log_id(0), Some(KeyGroup(7)))], wanted);
        assert_eq!(contents[&(log_id(1), Some(KeyGroup(9)))], wanted);
    }
}

/// Blocks with one frame after another of log, kind and key group, each of four bytes, under right checksums.
pub(crate) fn frames(frames: &[(usize, FrameKind, u16)], continues: bool) -> Vec<Vec<u8>> {
    let mut spill = Spill::new(0);
    for (log, kind, key_group) in frames {
        let lead = fragment_lead(ChangeKind::Data, 8);
        let lead_len = if *kind == FrameKind::FragmentFirst { lead.len() } else { 0 };
        spill.frame(*kind, *log, *key_group, &lead[..lead_len], b"abcd");
    }
    spill.finish(continues);
    spill.blocks
}

/// Orders of frames that contradict each other, and whether the block says that its last change goes on.
pub(crate) fn impossible_frames() -> Vec<Vec<Vec<u8>>> {
    use FrameKind::{Data, FragmentFirst as First, FragmentLast as Last, FragmentMiddle as Middle, Metadata};
    vec![
        frames(&[(0, First, 1), (1, Last, 1)], false),
        frames(&[(0, First, 1), (0, Last, 2)], false),
        frames(&[(0, First, 1), (0, First, 1)], true),
        frames(&[(0, First, 1), (1, First, 1)], true),
        frames(&[(0, First, 1), (0, Data, 1), (0, Last, 1)], false),
        frames(&[(0, First, 1), (1, Metadata, 0), (0, Last, 1)], false),
        frames(&[(0, First, 1), (0, Middle, 1), (0, Last, 1)], false),
        frames(&[(0, Data, 1), (0, First, 1)], false),
        frames(&[(0, First, 1), (0, Last, 1)], true),
    ]
}

#[test]
fn fragments_that_contradict_each_other_are_refused() {
    let good = frames(&[(0, FrameKind::FragmentFirst, 1), (0, FrameKind::FragmentLast, 1)], false);
    assert!(assemble(&good, 0).is_ok());
    for (index, blocks) in impossible_frames().into_iter().enumerate() {
        let result = assemble(&blocks, 0);
        assert!(matches!(result, Err(BlockError::Corrupt(_))), "{index}: {result:?}");
    }
}

#[test]
fn a_hole_between_blocks_is_an_error_unless_nobody_wants_what_is_in_it() {
    let changes: Vec<Change> = (0..40).map(|_| small(0, 1, &[7; 250])).collect();
    let mut blocks = spill(&changes);
    let in_first = Block::decode(&blocks[0], None).unwrap().logs().next().unwrap().count;
    let in_second = Block::decode(&blocks[1], None).unwrap().logs().next().unwrap().count;
    blocks.remove(1);
    let end = u64::from(in_first + in_second);
    assert!(assemble(&blocks, end).is_ok());
    let gap =
        BlockError::Gap { log: log_id(0), expected: SequenceNumber(end - 1), found: SequenceNumber(end) };
    assert_eq!(assemble(&blocks, end - 1), Err(gap));
    let twice = [blocks[0].clone(), blocks[0].clone()];
    assert!(matches!(assemble(&twice, 1000), Err(BlockError::Gap { .. })));
}

#[test]
fn a_change_cut_by_the_ends_is_an_error_unless_nobody_wants_it() {
    let changes = [small(0, 1, b"small"), small(0, 1, &[3; 9000]), small(0, 2, b"behind")];
    let blocks = spill(&changes);
    assert!(assemble(&blocks, 0).is_ok());
    for cut in 1..blocks.len() {
        assert_eq!(assemble(&blocks[..cut], 0), Err(BlockError::Unfinished));
        assert!(matches!(assemble(&blocks[cut..], 0), Err(BlockError::Corrupt(_))));
        assert!(assemble(&blocks[..cut], 2).unwrap().runs.is_empty());
        let rest = assemble(&blocks[cut..], 2).unwrap();
        assert_eq!((rest.runs[0].first.0, rest.runs[0].end.0), (2, 3));
    }
}

#[test]
fn a_lost_change_may_end_after_any_of_its_fragments() {
    let blocks = spill(&[small(0, 1, b"small"), small(0, 1, &[3; 9000])]);
    let behind = spill(&[small(1, 1, b"another log")]);
    assert!(blocks.len() > 2);
    for cut in 1..blocks.len() {
        let blocks = [&blocks[..cut], &behind].concat();
        assert!(matches!(assemble(&blocks, 0), Err(BlockError::Corrupt(_))));
        let kept = &mut |log| SequenceNumber(0)..SequenceNumber(if log == log_id(0) { 1 } else { u64::MAX });
        let part = Assembler::new().assemble(decoded(&blocks), kept, PART, Compression::None).unwrap();
        let contents = read(&object(&part, Compression::None), PART.token, PART.index).unwrap();
        assert_eq!(contents, model(&[small(0, 1, b"small"), small(1, 1, b"another log")], |_| 0));
        let ends: Vec<u64> = part.runs.iter().map(|run| run.end.0).collect();
        assert_eq!(ends, [1, 1]);
    }
}

#[test]
fn no_blocks_make_an_empty_part() {
    let part = assemble(&[], 0).unwrap();
    assert_eq!(part, Part { bytes: Vec::new().into(), directories: Vec::new(), runs: Vec::new() });
}

/// Every single-bit flip and every truncation of an object is detected by whoever reads all of it.
#[test]
fn any_damage_to_an_object_is_detected() {
    let changes: Vec<Change> = (0..60u8)
        .map(|i| Change {
            log: usize::from(i % 3),
            group: i.checked_rem(7).filter(|group| *group > 0).map(u16::from),
            value: vec![i; usize::from(i % 30)],
        })
        .collect();
    let blocks = spill(&changes);
    let whole = model(&changes, |_| 0);
    for compression in [Compression::None, Compression::Lz4] {
        let part = Assembler::new().assemble(decoded(&blocks), &mut |_| from(0), PART, compression).unwrap();
        let object = object(&part, compression);
        assert_eq!(read(&object, PART.token, PART.index).unwrap(), whole);
        assert!(read(&object, PART.token ^ 1, PART.index).is_err(), "another object");
        assert!(read(&object, PART.token, PART.index + 1).is_err(), "another part");
        for bit in 0..object.len() * 8 {
            let mut damaged = object.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert!(read(&damaged, PART.token, PART.index).is_err(), "bit {bit}");
        }
        for len in 0..object.len() {
            assert!(read(&object[..len], PART.token, PART.index).is_err(), "cut to {len}");
        }
    }
}

/// Valid checksums do not protect from frames that nobody would write.
#[test]
fn frames_that_contradict_the_table_are_errors_or_harmless() {
    let changes = [small(0, 1, b"one"), small(1, 2, &[5; 1500]), small(0, 1, b"two")];
    let block = &spill(&changes)[0];
    let header = *Block::decode(block, None).unwrap().header();
    let frames = BLOCK_HEADER_BYTES..BLOCK_HEADER_BYTES + header.frames_len + 64;
    let mut refused = 0;
    for bit in frames.start * 8..frames.end * 8 {
        let mut damaged = block.clone();
        damaged[bit / 8] ^= 1 << (bit % 8);
        seal_damaged(&mut damaged);
        let Ok(block) = Block::decode(&damaged, None) else { continue };
        let keep = &mut |_| from(0);
        match Assembler::new().assemble([Ok::<_, BlockError>(block)], keep, PART, Compression::None) {
            Ok(part) => drop(read(&object(&part, Compression::None), PART.token, PART.index).unwrap()),
            Err(_) => refused += 1,
        }
    }
    assert!(refused > 100, "most flips in headers and the table are noticed: {refused}");
}

/// Never change the file: objects of version 1 must be readable for ever. Part 0 is not compressed, part 1 is.
#[test]
fn the_fixture_is_read_for_ever() {
    let object = include_bytes!("../../tests/fixtures/object-v1.bin");
    let range = Footer::locate(object, object.len() as u64).unwrap();
    let footer = Footer::decode(&object[range.start as usize..], Some(PART.token)).unwrap();
    assert_eq!(footer.start(), range.start);
    let contents = read_parts(object, &footer, |index| footer.part_id(index)).unwrap();
    let changes = fixture_changes();
    assert_eq!(contents, model(&changes, |_| 0));
    let compressions: Vec<Compression> = footer.parts().iter().map(|part| part.compression).collect();
    assert_eq!(compressions, [Compression::None, Compression::Lz4]);
    // What one LZ4 makes of the same bytes another need not.
    let id = footer.part_id(0);
    let blocks = spill(&changes[..4]);
    let part = Assembler::new().assemble(decoded(&blocks), &mut |_| from(0), id, Compression::None).unwrap();
    assert_eq!(part.bytes[..], object[..part.bytes.len()]);
    assert_eq!(footer.encode(), object[range.start as usize..]);
}

/// Never change the file: objects of version 2 must be readable for ever. Its first part is a copy of part 0 of the object of
/// version 1, its second one its own.
#[test]
fn the_fixture_of_version_2_is_read_for_ever() {
    let object = include_bytes!("../../tests/fixtures/object-v2.bin");
    let range = Footer::locate(object, object.len() as u64).unwrap();
    let footer = Footer::decode(&object[range.start as usize..], Some(0x2222)).unwrap();
    assert_eq!(
        (footer.part_id(0), footer.part_id(1)),
        (PartId { index: 0, ..PART }, PartId { token: 0x2222, index: 1 })
    );
    let contents = read_parts(object, &footer, |index| footer.part_id(index)).unwrap();
    assert_eq!(contents, model(&fixture_changes(), |_| 0));
    assert_eq!(object[..], object_of_version_2()[..]);
}

/// What the fixture of version 2 was made of.
fn object_of_version_2() -> Vec<u8> {
    let original = include_bytes!("../../tests/fixtures/object-v1.bin");
    let range = Footer::locate(original, original.len() as u64).unwrap();
    let first = Footer::decode(&original[range.start as usize..], None).unwrap();
    let copied = &first.parts()[0];
    let directories = first.runs().filter(|(part, ..)| *part == 0);
    let directories = directories.map(|(_, _, range)| &original[range.start as usize..range.end as usize]);
    let mut tail = Tail::new(0x2222);
    let directories = Vec::from_iter(directories).concat();
    tail.push_copy(copied.compression, copied.runs.clone(), &directories, first.part_id(0));
    let blocks = spill(&fixture_changes());
    let kept = &mut |log| {
        let run = copied.runs.iter().find(|run| run.log == log);
        run.map_or(SequenceNumber(0), |run| run.end)..SequenceNumber(u64::MAX)
    };
    let id = tail.footer().part_id(1);
    let part = Assembler::new().assemble(decoded(&blocks), kept, id, Compression::None).unwrap();
    tail.push(Compression::None, part.runs, &part.directories);
    [&original[..copied.len as usize], &part.bytes, &tail.encode().0].concat()
}

fn fixture_changes() -> Vec<Change> {
    vec![
        small(0, 5, b"first"),
        Change { log: 1, group: None, value: b"a registration".to_vec() },
        small(0, 65_535, b""),
        small(0, 5, b"second"),
        small(1, 0, &[b'x'; 300]),
        small(0, 6, b"incompressible"),
    ]
}
