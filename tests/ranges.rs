//! Logs whose handles are for several ranges of key groups, as compactors make them that take a range each: together they are
//! the log for readers and for further compactions, and if one is missing, or there twice, that is said.

mod common;

use std::collections::BTreeSet;
use std::path::Path;

use common::range;
use tidelog::{
    Change, ChangeKey, Changelog, ChangelogHandle, ChangelogReader, ChangelogWriter, CompactError, Compactor,
    HandlesError, KeyGroup, KeyGroupRange, Options, ReadError, Restore, SequenceNumber,
};
use tidelog_io::sim::SimRng;

const GROUPS: u16 = 16;
const ALL: KeyGroupRange = KeyGroupRange::new(0, GROUPS - 1).unwrap();

/// Cuts all key groups into some ranges.
fn cut(random: &mut SimRng) -> Vec<KeyGroupRange> {
    let cuts = (0..random.below(4)).map(|_| 1 + random.below(u64::from(GROUPS) - 1) as u16);
    let ends: BTreeSet<u16> = cuts.chain([0, GROUPS]).collect();
    ends.iter().zip(ends.iter().skip(1)).map(|(first, end)| range(*first, end - 1)).collect()
}

fn shuffle<T>(random: &mut SimRng, items: &mut [T]) {
    (1..items.len()).rev().for_each(|at| items.swap(at, random.below(at as u64 + 1) as usize));
}

fn options(home: &Path) -> Options {
    common::options(home).block_bytes(8 << 10).part_bytes(16 << 10)
}

fn compactor(home: &Path) -> Compactor {
    let bucket = format!("file://{}", home.join("bucket").display());
    Compactor::open(&bucket).unwrap().part_bytes(16 << 10).group("compacted")
}

/// Writers, and what they appended.
struct Logs {
    writers: Vec<ChangelogWriter>,
    appended: common::Content,
}

impl Logs {
    fn new(changelog: &Changelog) -> Logs {
        let writer = |groups| changelog.create_writer("state", groups).unwrap();
        Logs { writers: [ALL, range(3, 11), range(0, 7)].map(writer).into(), appended: Default::default() }
    }

    /// A handle of each writer, of what is appended before it.
    fn checkpoint(&mut self, random: &mut SimRng, changes: u64) -> Vec<ChangelogHandle> {
        let mut persists = Vec::new();
        for writer in &mut self.writers {
            let from = writer.next_sequence_number();
            for _ in 0..random.below(changes) {
                let mut value = vec![random.below(3) as u8, random.below(30) as u8];
                value.extend((0..random.below(100)).map(|_| random.below(16) as u8));
                let groups = writer.key_groups();
                let (group, number) = match random.below(20) {
                    0 => (None, writer.append_metadata(&value).unwrap()),
                    _ => {
                        let group = groups.first().0 + random.below(groups.len() as u64) as u16;
                        (Some(group), writer.append(KeyGroup(group), &value).unwrap())
                    }
                };
                self.appended.entry((writer.log(), group)).or_default().push((number.0, value));
            }
            persists.push(writer.persist_durably(from));
        }
        persists.into_iter().map(|persist| persist.wait().unwrap()).collect()
    }

    /// What readers of these key groups are to get.
    fn of(&self, key_groups: KeyGroupRange) -> common::Content {
        let mut expected = self.appended.clone();
        expected.retain(|(log, group), _| {
            let writer = self.writers.iter().find(|writer| writer.log() == *log).unwrap();
            writer.key_groups().intersection(key_groups).is_some()
                && group.is_none_or(|group| key_groups.contains(KeyGroup(group)))
        });
        expected
    }

    /// Holds what a restore gives against what was appended.
    fn check(&self, restore: &Restore, readers: &[KeyGroupRange]) {
        for key_groups in readers {
            let read = common::collect(restore.reader(*key_groups).unwrap());
            assert!(read == self.of(*key_groups), "each change once, in order, in {key_groups}");
        }
        assert!(common::collect(restore.reader_of_all()) == self.appended);
    }
}

/// A range of the handles: compacted, or as it is.
fn part_of(
    home: &Path,
    handles: &[ChangelogHandle],
    key_groups: KeyGroupRange,
    compact: bool,
) -> Vec<ChangelogHandle> {
    if compact {
        return compactor(home).compact(handles, key_groups).unwrap().handles;
    }
    handles.iter().filter_map(|handle| handle.limited_to(key_groups)).collect()
}

#[test]
fn ranges_that_are_compacted_apart_are_the_logs_together() {
    for seed in 1..=10u64 {
        let random = &mut SimRng::new(seed);
        let home = tempfile::tempdir().unwrap();
        let changelog = Changelog::open(options(home.path())).unwrap();
        let mut logs = Logs::new(&changelog);
        let mut handles = Vec::new();
        for round in 0..4 {
            for _ in 0..1 + random.below(4) {
                handles.extend(logs.checkpoint(random, 120));
            }
            // Each range by a compactor of its own, but for those that are left as they are.
            let left = random.below(4);
            let ranges = cut(random);
            let mut parts: Vec<_> = std::thread::scope(|scope| {
                let (home, handles) = (home.path(), &handles);
                let part =
                    |(at, range)| scope.spawn(move || part_of(home, handles, range, at as u64 != left));
                let parts: Vec<_> = ranges.iter().copied().enumerate().map(part).collect();
                parts.into_iter().flat_map(|part| part.join().unwrap()).collect()
            });
            shuffle(random, &mut parts);
            handles = parts;
            let readers: Vec<_> = [ALL].into_iter().chain(ranges).chain(cut(random)).collect();
            logs.check(&Restore::open(&handles).unwrap(), &readers);
            logs.check(&changelog.restore(&handles).unwrap(), &readers);
            handles.iter().for_each(|handle| {
                assert_eq!(
                    &ChangelogHandle::from_bytes(&handle.to_bytes()).unwrap(),
                    handle,
                    "round {round}"
                );
            });
        }
        // All at once: each range stays one handle of its log.
        let before = common::objects(home.path()).len();
        let mut all = compactor(home.path());
        let plan = all.plan(&handles, None).unwrap();
        let made = all.compact(&handles, None).unwrap();
        logs.check(&Restore::open(&made.handles).unwrap(), &[ALL, range(2, 9)]);
        assert_eq!(made.stats.objects, plan.objects_after, "seed {seed}");
        assert_eq!((common::objects(home.path()).len() - before) as u64, made.stats.objects);
        let ranges: BTreeSet<_> =
            made.handles.iter().map(|handle| (handle.log(), handle.key_groups().first())).collect();
        assert_eq!(ranges.len(), made.handles.len(), "one for each log and range");
        assert!(made.handles.len() <= handles.len());

        // With last values only, it is as if nothing had been compacted before.
        let key_of = |change: &Change| match change.value[0] {
            0 => ChangeKey::None,
            1 => ChangeKey::Upsert(1..2),
            _ => ChangeKey::Tombstone(1..2),
        };
        let latest = compactor(home.path()).last_value_by(key_of).compact(&handles, None).unwrap();
        let mut expected = logs.appended.clone();
        for ((_, group), changes) in expected.iter_mut().filter(|((_, group), _)| group.is_some()) {
            let later = |number: u64, key: u8, changes: &[(u64, Vec<u8>)]| {
                changes.iter().any(|(other, value)| *other > number && value[0] != 0 && value[1] == key)
            };
            let all = changes.clone();
            changes.retain(|(number, value)| match value[0] {
                0 => true,
                1 => !later(*number, value[1], &all),
                _ => false,
            });
            assert!(group.is_some());
        }
        expected.retain(|_, changes| !changes.is_empty());
        assert!(latest.stats.superseded > 0);
        assert!(common::collect(Restore::open(&latest.handles).unwrap().reader_of_all()) == expected);
    }
}

#[test]
fn a_range_that_is_missing_or_there_twice_is_named() {
    let home = tempfile::tempdir().unwrap();
    let changelog = Changelog::open(options(home.path())).unwrap();
    let mut logs = Logs::new(&changelog);
    let random = &mut SimRng::new(7);
    let old: Vec<_> = (0..3).flat_map(|_| logs.checkpoint(random, 100)).collect();
    let thirds = [range(0, 5), range(6, 9), range(10, 15)];
    let [first, second, third] = thirds.map(|range| part_of(home.path(), &old, range, true));
    let set = |parts: &[&[ChangelogHandle]]| parts.concat();
    logs.check(&Restore::open(&set(&[&third, &first, &second])).unwrap(), &thirds);

    let refused = |handles: &[ChangelogHandle], wanted: KeyGroupRange| {
        let read = match ChangelogReader::open(handles, wanted).map(drop) {
            Err(ReadError::Handles(why)) => why,
            other => panic!("{other:?}"),
        };
        match compactor(home.path()).compact(handles, wanted) {
            Err(CompactError::Handles(why)) => assert_eq!(why, read, "a compactor says the same"),
            other => panic!("{other:?}"),
        }
        read
    };
    // A range of all logs is lost: at the end, or in the middle.
    let missing = refused(&set(&[&first, &second]), ALL);
    assert_eq!(missing, HandlesError::NotCovered { missing: vec![range(10, 15)] });
    // One of a log, of which other logs have key groups.
    let of_first_log = |handle: &&ChangelogHandle| handle.log() == old[0].log();
    let others: Vec<_> = second.iter().filter(|handle| !of_first_log(handle)).cloned().collect();
    let without = set(&[&first, &others, &third]);
    let missing = refused(&without, range(0, 9));
    assert!(
        matches!(&missing, HandlesError::Between { log, missing, .. }
            if *log == old[0].log() && *missing == [range(6, 9)]),
        "{missing:?}"
    );
    // Those that ask for others are not concerned.
    logs.check_some(&without, &[range(0, 5), range(10, 15)]);

    // One of the old handles goes on where only some of the ranges end.
    let newer = logs.checkpoint(random, 100);
    let gap = refused(&set(&[&newer, &first]), range(0, 5));
    assert!(
        matches!(&gap, HandlesError::Gap { key_groups, from, .. } if *key_groups == range(6, 15) && from.0 == 0)
    );
    let twice = refused(&set(&[&old, &second]), ALL);
    assert!(
        matches!(&twice, HandlesError::Overlap { key_groups, .. } if *key_groups == range(6, 9)),
        "{twice:?}"
    );
    let again = part_of(home.path(), &old, range(9, 12), true);
    let twice = refused(&set(&[&first, &second, &third, &again]), ALL);
    assert!(
        matches!(&twice, HandlesError::Overlap { key_groups, .. } if *key_groups == range(9, 9)),
        "{twice:?}"
    );
    // Ranges of another checkpoint end elsewhere.
    let later: Vec<_> = old.iter().chain(&newer).cloned().collect();
    let later = part_of(home.path(), &later, range(6, 9), true);
    let gap = refused(&set(&[&first, &later, &third]), ALL);
    assert!(
        matches!(&gap, HandlesError::Gap { key_groups, to, .. }
        if *key_groups == range(0, 5) && *to == later[0].to()),
        "{gap:?}"
    );
    let rest: Vec<_> = [range(0, 5), range(10, 15)]
        .into_iter()
        .flat_map(|range| part_of(home.path(), &newer, range, false))
        .collect();
    logs.check(&Restore::open(&set(&[&first, &later, &third, &rest])).unwrap(), &thirds);
}

impl Logs {
    fn check_some(&self, handles: &[ChangelogHandle], readers: &[KeyGroupRange]) {
        let restore = Restore::open(handles).unwrap();
        for key_groups in readers {
            let read = common::collect(restore.reader(*key_groups).unwrap());
            assert!(read == self.of(*key_groups), "{key_groups}");
        }
    }
}

/// What is in the objects of other ranges is not fetched, not even for metadata.
#[test]
fn a_reader_of_a_range_reads_the_objects_of_that_range() {
    let home = tempfile::tempdir().unwrap();
    let changelog = Changelog::open(options(home.path())).unwrap();
    let mut logs = Logs::new(&changelog);
    let random = &mut SimRng::new(11);
    let old: Vec<_> = (0..4).flat_map(|_| logs.checkpoint(random, 200)).collect();
    let halves = [range(0, 7), range(8, 15)].map(|range| part_of(home.path(), &old, range, true));
    let objects: BTreeSet<_> = halves[0].iter().flat_map(ChangelogHandle::objects).collect();
    for (_, object) in objects {
        std::fs::remove_file(home.path().join("bucket").join(object)).unwrap();
    }
    logs.check_some(&halves.concat(), &[range(8, 15), range(10, 11)]);
    let mut broken = Restore::open(&halves.concat()).unwrap().reader(range(7, 8)).unwrap();
    assert!(broken.any(|change| change.is_err()));
    assert!(old[0].limited_to(range(16, 20)).is_none());
    assert_eq!(old[0].limited_to(ALL).as_ref(), Some(&old[0]));
    assert_eq!(old[0].from(), SequenceNumber::ZERO);
}
