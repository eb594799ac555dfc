//! Compaction: readers get the same changes from fewer objects, whatever the histories were, and nothing is left of one that
//! fails.

mod common;
#[path = "../upload/tests/common/hooked.rs"]
mod hooked;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use hooked::{Hook, Hooked};
use tidelog::{
    Change, ChangeKey, Changelog, ChangelogHandle, ChangelogReader, CompactError, Compactor, Compression,
    Extent, HandlesError, KeyGroup, KeyGroupRange, Options, Piece, ReadError, SequenceNumber, Sweeper,
};
use tidelog_io::sim::SimRng;
use tidelog_upload::sim::{Chances, SimStore};
use tidelog_upload::{BoxFuture, Capabilities, Lane, Operation, Store, StoreError, StoreErrorKind};

const GROUPS: u16 = 16;
const ALL: KeyGroupRange = KeyGroupRange::new(0, GROUPS - 1).unwrap();

fn options(dir: &Path, bucket: &str) -> Options {
    Options::new(bucket, dir.join("local"))
        .segment_bytes(1 << 20)
        .local_bytes(16 << 20)
        .block_bytes(8 << 10)
        .part_bytes(16 << 10)
}

fn file_bucket(dir: &Path) -> String {
    format!("file://{}", dir.join("bucket").display())
}

/// Some writers append, persist and truncate at random, many checkpoints long; the last handle of each. A value of data begins
/// with a byte that tells what it is: 0 has no key, 1 gives the key in the next byte a value, 2 deletes it.
fn history(options: Options, random: &mut SimRng, writers: usize, checkpoints: u64) -> Vec<ChangelogHandle> {
    dense_history(options, random, writers, checkpoints, 40)
}

/// With up to so many times two changes for each writer and checkpoint.
fn dense_history(
    options: Options,
    random: &mut SimRng,
    writers: usize,
    checkpoints: u64,
    changes: u64,
) -> Vec<ChangelogHandle> {
    let changelog = Changelog::open(options).unwrap();
    let mut logs: Vec<_> = (0..writers)
        .map(|index| (changelog.create_writer(format!("log {index}"), ALL).unwrap(), SequenceNumber::ZERO))
        .collect();
    let mut handles = vec![None; writers];
    for _ in 0..checkpoints {
        let mut persists = Vec::new();
        for (writer, from) in &mut logs {
            // Now and then a log has nothing new, or does not take part.
            for _ in 0..random.below(3) * random.below(changes) {
                let mut value = vec![random.below(3) as u8, random.below(30) as u8];
                value.extend((0..random.below(100)).map(|_| random.below(16) as u8));
                match random.below(40) {
                    0 => writer.append_metadata(&value).unwrap(),
                    _ => writer.append(KeyGroup(random.below(GROUPS.into()) as u16), &value).unwrap(),
                };
            }
            if random.below(500) == 0 {
                let large = vec![0; 50_000];
                writer.append(KeyGroup(3), &large).unwrap();
            }
            if random.below(10) == 0 {
                let held = writer.next_sequence_number().0 - from.0;
                *from = SequenceNumber(from.0 + random.below(held / 2 + 1));
                writer.truncate(*from).unwrap();
            }
            persists.push(writer.persist_durably(*from));
            // May be in the same object, and is not of the handle.
            for _ in 0..random.below(4) {
                let value = [random.below(3) as u8, random.below(30) as u8];
                writer.append(KeyGroup(random.below(GROUPS.into()) as u16), &value).unwrap();
            }
        }
        for (handle, persist) in handles.iter_mut().zip(persists) {
            *handle = Some(persist.wait().unwrap());
        }
    }
    handles.into_iter().flatten().collect()
}

fn compactor(bucket: &str) -> Compactor {
    Compactor::open(bucket).unwrap().part_bytes(16 << 10).group("compacted")
}

/// What a reader of these key groups gets; metadata comes first.
fn read(handles: &[ChangelogHandle], key_groups: KeyGroupRange) -> common::Content {
    let reader = ChangelogReader::open(handles, key_groups).unwrap();
    let changes: Vec<Change> = reader.collect::<Result<_, _>>().expect("every change is intact");
    assert!(changes.is_sorted_by_key(|change| change.key_group.is_some()), "metadata first");
    let mut content = common::Content::new();
    for Change { log, number, key_group, value } in changes {
        content.entry((log, key_group.map(|group| group.0))).or_default().push((number.0, value.to_vec()));
    }
    content
}

fn requests(handles: &[ChangelogHandle], key_groups: KeyGroupRange) -> u64 {
    let mut reader = ChangelogReader::open(handles, key_groups).unwrap();
    reader.by_ref().for_each(|change| drop(change.unwrap()));
    reader.stats().requests
}

fn files(handles: &[ChangelogHandle]) -> BTreeSet<String> {
    handles.iter().flat_map(ChangelogHandle::objects).map(|(_, name)| name.to_owned()).collect()
}

fn file_bytes(dir: &Path, names: &BTreeSet<String>) -> u64 {
    names.iter().map(|name| std::fs::metadata(dir.join("bucket").join(name)).unwrap().len()).sum()
}

fn groups(range: Range<u16>) -> KeyGroupRange {
    KeyGroupRange::new(range.start, range.end - 1).unwrap()
}

#[test]
fn readers_get_the_same_from_fewer_objects() {
    for seed in 42..54 {
        let random = &mut SimRng::new(seed);
        let dir = tempfile::tempdir().unwrap();
        let bucket = file_bucket(dir.path());
        let compression = [Compression::None, Compression::Lz4][seed as usize % 2];
        let options = options(dir.path(), &bucket).compression(compression).hash_prefix(seed % 3 == 0);
        let writers = 1 + random.below(4) as usize;
        let old = history(options, random, writers, 60);
        let wanted = match random.below(3) {
            0 => ALL,
            _ => {
                let first = random.below(GROUPS.into()) as u16;
                groups(first..first + 1 + random.below(u64::from(GROUPS - first)) as u16)
            }
        };
        let mut compactor = compactor(&bucket);
        let plan = compactor.plan(&old, wanted).unwrap();
        assert_eq!(plan.objects, files(&old).len() as u64, "seed {seed}");
        assert!(plan.objects > 10 && plan.is_worthwhile(), "seed {seed}: {plan:?}");
        let made = compactor.compact(&old, wanted).unwrap();
        assert!(made.leftovers.is_empty());
        let new = made.handles;

        assert_eq!(new.len(), old.len());
        for (new, old) in new.iter().zip(&old) {
            assert_eq!((new.log(), new.name(), new.key_groups()), (old.log(), old.name(), wanted));
            assert_eq!((new.from(), new.to()), (old.from(), old.to()));
            assert_eq!(&ChangelogHandle::from_bytes(&new.to_bytes()).unwrap(), new);
        }
        let middle = wanted.first().0 + (wanted.len() / 2) as u16;
        let parts = [groups(wanted.first().0..middle + 1), groups(middle..wanted.last().0 + 1), wanted];
        let mut changes = 0;
        for part in parts {
            let content = read(&old, part);
            assert_eq!(read(&new, part), content, "seed {seed}, {part}");
            changes = content.values().map(Vec::len).sum();
        }
        assert!(changes > 0);
        let stats = made.stats;
        assert_eq!((stats.changes, stats.superseded), (changes as u64, 0));
        // All logs share it.
        assert_eq!((files(&new).len(), stats.objects), (1, 1), "seed {seed}");
        let bytes = file_bytes(dir.path(), &files(&new));
        assert_eq!(bytes, stats.bytes_written);
        assert!(bytes < file_bytes(dir.path(), &files(&old)), "seed {seed}");
        assert_eq!(stats.runs, plan.runs_after, "seed {seed}: {stats:?}, {plan:?}");
        assert!(requests(&new, wanted) * 5 < requests(&old, wanted), "seed {seed}");

        // What is compact already stays as it is, and can be compacted all the same.
        let again = compactor.plan(&new, wanted).unwrap();
        assert!(!again.is_worthwhile(), "seed {seed}: {again:?}");
        let newer = compactor.compact(&new, wanted).unwrap().handles;
        assert_eq!(read(&newer, wanted), read(&old, wanted));
    }
}

#[test]
fn handles_without_changes_or_wanted_groups() {
    let dir = tempfile::tempdir().unwrap();
    let bucket = file_bucket(dir.path());
    let changelog = Changelog::open(options(dir.path(), &bucket)).unwrap();
    let persist = |range: KeyGroupRange, changes: u16| {
        let mut writer = changelog.create_writer("log", range).unwrap();
        for number in 0..changes {
            writer.append(range.first(), &number.to_le_bytes()).unwrap();
        }
        writer.persist_durably(SequenceNumber::ZERO).wait().unwrap()
    };
    let old = [persist(groups(8..12), 3), persist(groups(0..4), 2), persist(groups(8..9), 0)];
    let mut compactor = compactor(&bucket);
    let new = compactor.compact(&old, groups(8..11)).unwrap().handles;
    // In the order of the old ones, whatever that of the logs' ids is.
    let logs: Vec<_> =
        new.iter().map(|handle| (handle.log(), handle.key_groups(), handle.is_empty())).collect();
    assert_eq!(logs, [(old[0].log(), groups(8..11), false), (old[2].log(), groups(8..9), true)]);
    assert_eq!(read(&new[..1], groups(8..11)), read(&old[..1], groups(8..11)));
    assert_eq!(files(&new[1..]).len(), 0);

    // A range of which nothing is left: the handle covers its numbers all the same.
    let none = compactor.compact(&old[..1], groups(10..11)).unwrap();
    assert_eq!((none.stats.changes, none.handles[0].to()), (0, SequenceNumber(3)));
    assert!(read(&none.handles, groups(10..11)).is_empty());

    let nothing = compactor.compact(&old[2..], None).unwrap();
    assert_eq!((nothing.stats.objects, nothing.handles.len()), (0, 1));
    assert!(compactor.compact(&[], ALL).unwrap().handles.is_empty());
    for of_nothing in [&old[2..], &[]] {
        assert!(!compactor.plan(of_nothing, None).unwrap().is_worthwhile());
    }
    // As readers do.
    let before = common::objects(dir.path());
    for (wanted, missing) in [
        (groups(6..11), vec![groups(6..8)]),
        (groups(0..14), vec![groups(4..8), groups(12..14)]),
        (groups(5..7), vec![groups(5..7)]),
    ] {
        let refused = HandlesError::NotCovered { missing };
        assert!(matches!(compactor.compact(&old, wanted), Err(CompactError::Handles(why)) if why == refused));
        assert!(matches!(compactor.plan(&old, wanted), Err(CompactError::Handles(why)) if why == refused));
        let read = ChangelogReader::open(&old, wanted).map(drop);
        assert!(matches!(read, Err(ReadError::Handles(why)) if why == refused));
    }
    assert_eq!(common::objects(dir.path()), before);
    let all = compactor.compact(&old, None).unwrap().handles;
    assert_eq!(
        all.iter().map(ChangelogHandle::key_groups).collect::<Vec<_>>(),
        [8..12, 0..4, 8..9].map(groups)
    );
    let twice = compactor.compact(&[old[0].clone(), old[0].clone()], ALL);
    let Err(CompactError::Handles(HandlesError::Overlap { log, .. })) = twice else { panic!("{twice:?}") };
    assert_eq!(log, old[0].log());
    let least = Compactor::open(&bucket).unwrap().part_bytes(16 << 10).memory_bytes(64 << 10);
    assert_eq!(least.group("least").compact(&old, None).unwrap().handles.len(), 3);
}

#[test]
fn options_that_cannot_work_are_named_as_the_compactor_names_them() {
    let compactor = || Compactor::open("memory://").unwrap();
    for (option, mut bad) in [
        ("prefix", compactor().prefix("../x")),
        ("group", compactor().group("a/b")),
        ("timeout", compactor().timeout(Duration::ZERO)),
        ("part_bytes", compactor().part_bytes((16 << 10) - 1)),
        ("part_bytes", compactor().part_bytes((1 << 30) + 1).memory_bytes(8 << 30)),
        ("memory_bytes", compactor().memory_bytes((32 << 20) - 1)),
    ] {
        let Err(CompactError::Option(error)) = bad.compact(&[], None) else { panic!("{option} is taken") };
        assert_eq!(error.option, option);
        // It has none of these.
        let said = error.to_string();
        assert!(!["block", "lane", "director", "persist"].iter().any(|word| said.contains(word)), "{said}");
    }
}

#[test]
fn a_bucket_that_is_not_there_is_not_made() {
    let dir = tempfile::tempdir().unwrap();
    let home = dir.path().join("home");
    let old = history(options(&home, &file_bucket(&home)), &mut SimRng::new(3), 1, 3);
    std::fs::rename(home.join("bucket"), home.join("away")).unwrap();
    let read = || {
        let first =
            ChangelogReader::open(&old, ALL).and_then(|mut reader| reader.next().expect("it has changes"));
        first.unwrap_err().to_string()
    };
    let errors = [
        Compactor::open(&file_bucket(&home)).unwrap_err().to_string(),
        Compactor::open("memory://").unwrap().compact(&old, None).unwrap_err().to_string(),
        read(),
        Sweeper::open(&file_bucket(&home)).unwrap_err().to_string(),
    ];
    let why = format!("there is no directory {}", home.join("bucket").display());
    assert!(errors.iter().all(|error| error.contains(&why)), "{errors:?}");
    assert!(!home.join("bucket").exists());
    std::fs::write(home.join("bucket"), "").unwrap();
    let error = read();
    assert!(error.contains("is not a directory"), "{error}");
}

/// As long as it fits into a part, a log is in one.
#[test]
fn small_logs_are_not_divided() {
    let dir = tempfile::tempdir().unwrap();
    let bucket = file_bucket(dir.path());
    let changelog = Changelog::open(options(dir.path(), &bucket)).unwrap();
    let mut writers: Vec<_> = (0..7).map(|_| changelog.create_writer("log", ALL).unwrap()).collect();
    let mut handles = Vec::new();
    for _ in 0..8 {
        for writer in &mut writers {
            writer.append(KeyGroup(1), &[7; 800]).unwrap();
        }
        let persists: Vec<_> =
            writers.iter_mut().map(|writer| writer.persist_durably(SequenceNumber::ZERO)).collect();
        handles = persists.into_iter().map(|persist| persist.wait().unwrap()).collect();
    }
    let mut compactor = compactor(&bucket);
    let plan = compactor.plan(&handles, ALL).unwrap();
    let stats = compactor.compact(&handles, ALL).unwrap().stats;
    // Two of about 6.5 KB go into a part of 16 KiB.
    assert_eq!((plan.runs, plan.runs_after, stats.runs, stats.parts), (56, 7, 7, 4));
}

/// A handle for each checkpoint's changes alone: together they are the log.
#[test]
fn handles_of_a_log_that_follow_each_other_become_one() {
    let dir = tempfile::tempdir().unwrap();
    let bucket = file_bucket(dir.path());
    let changelog = Changelog::open(options(dir.path(), &bucket)).unwrap();
    let mut writers = ["a", "b"].map(|name| changelog.create_writer(name, ALL).unwrap());
    let mut handles = Vec::new();
    for checkpoint in 0..10u8 {
        for writer in &mut writers {
            let from = writer.next_sequence_number();
            for group in 0..checkpoint.into() {
                writer.append(KeyGroup(group), &[checkpoint; 10]).unwrap();
            }
            handles.push(writer.persist_durably(from).wait().unwrap());
        }
    }
    let mut compactor = compactor(&bucket);
    // The first two are empty.
    handles.swap(2, 17);
    let made = compactor.compact(&handles, ALL).unwrap().handles;
    let ranges: Vec<_> = made.iter().map(|handle| (handle.name(), handle.from().0, handle.to().0)).collect();
    assert_eq!(ranges, [("a", 0, 45), ("b", 0, 45)]);
    let mut in_order = handles.clone();
    in_order.sort_by_key(|handle| (handle.log(), handle.from()));
    assert_eq!(read(&made, ALL), read(&in_order, ALL));

    let gap = handles.iter().filter(|handle| handle.from().0 != 3).cloned().collect::<Vec<_>>();
    let error = compactor.compact(&gap, ALL).unwrap_err();
    let CompactError::Handles(HandlesError::Gap { from, to, .. }) = error else { panic!("{error}") };
    assert_eq!((from.0, to.0), (3, 6));
}

fn key_of(change: &Change) -> ChangeKey {
    assert!(change.key_group.is_some(), "metadata has no key");
    match change.value[0] {
        0 => ChangeKey::None,
        1 => ChangeKey::Upsert(1..2),
        _ => ChangeKey::Tombstone(1..2),
    }
}

#[test]
fn last_values_win() {
    for seed in 100..106 {
        let random = &mut SimRng::new(seed);
        let dir = tempfile::tempdir().unwrap();
        let bucket = file_bucket(dir.path());
        let old = dense_history(options(dir.path(), &bucket), random, 3, 50, 300);
        let wanted = groups(2..GROUPS);
        // The model: what is read, less what a later change of its key makes needless.
        let mut expected = read(&old, wanted);
        let mut dropped = 0;
        for ((log, group), changes) in &mut expected {
            if group.is_none() {
                continue;
            }
            let from = old.iter().find(|handle| handle.log() == *log).unwrap().from();
            let last: BTreeMap<u8, u64> = changes
                .iter()
                .filter(|(_, value)| value[0] != 0)
                .map(|(number, value)| (value[1], *number))
                .collect();
            let before = changes.len();
            changes.retain(|(number, value)| match value[0] {
                0 => true,
                1 => last[&value[1]] == *number,
                _ => last[&value[1]] == *number && from > SequenceNumber::ZERO,
            });
            dropped += before - changes.len();
        }
        expected.retain(|_, changes| !changes.is_empty());
        // Once with all keys of a log in memory, once with those of a key group or two.
        let mut requests = 0;
        for memory in [256 << 20, 256 << 10] {
            let mut compactor = compactor(&bucket).memory_bytes(memory).last_value_by(key_of);
            let made = compactor.compact(&old, wanted).unwrap();
            assert_eq!(read(&made.handles, wanted), expected, "seed {seed}, memory {memory}");
            assert_eq!(made.stats.superseded, dropped as u64);
            assert!(made.stats.requests > requests + requests / 4, "seed {seed}: {:?}", made.stats);
            requests = made.stats.requests;
            assert!(dropped > 100, "seed {seed}: {dropped}");
            for (new, old) in made.handles.iter().zip(&old) {
                assert_eq!((new.from(), new.to()), (old.from(), old.to()));
            }
        }
    }
}

#[test]
fn a_key_that_is_not_in_its_value_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let bucket = file_bucket(dir.path());
    let old = history(options(dir.path(), &bucket), &mut SimRng::new(5), 1, 5);
    let mut compactor =
        compactor(&bucket).last_value_by(|change| ChangeKey::Upsert(1..change.value.len() + 1));
    let error = compactor.compact(&old, ALL).unwrap_err();
    assert!(matches!(error, CompactError::Key { .. }), "{error}");
}

/// A bucket that stops working after some requests.
#[derive(Debug)]
struct Mortal {
    inner: Arc<dyn Store>,
    calls_left: AtomicI64,
    /// Whether it is silent then, as far as writes are concerned. Otherwise it refuses everything.
    silent: bool,
    /// So many reads on, one has a flipped bit on its way.
    damages: AtomicI64,
}

impl Mortal {
    fn new(inner: Arc<dyn Store>, calls: i64) -> Mortal {
        Mortal { inner, calls_left: AtomicI64::new(calls), silent: false, damages: AtomicI64::new(-1) }
    }
}

impl Hook for Mortal {
    fn inner(&self) -> &dyn Store {
        &*self.inner
    }

    fn pass<'a, T: Send + 'a>(
        &'a self,
        operation: Operation,
        name: &'a str,
        _: Lane,
        request: BoxFuture<'a, Result<T, StoreError>>,
    ) -> BoxFuture<'a, Result<T, StoreError>> {
        if self.calls_left.fetch_sub(1, Ordering::Relaxed) > 0 {
            return request;
        }
        if self.silent {
            let writes = matches!(operation, Operation::Put | Operation::PutPart | Operation::Create);
            return if writes { Box::pin(std::future::pending()) } else { request };
        }
        let error = StoreError::new(operation, self.inner.url(), name, StoreErrorKind::Denied);
        Box::pin(async move { Err(error) })
    }

    fn get<'a>(&'a self, name: &'a str, range: Range<u64>) -> BoxFuture<'a, Result<Bytes, StoreError>> {
        let damages = self.damages.fetch_sub(1, Ordering::Relaxed) == 0;
        let got = self.inner.get(name, range);
        let read = Box::pin(async move {
            let mut bytes = got.await?.to_vec();
            bytes[0] ^= u8::from(damages);
            Ok(bytes.into())
        });
        self.pass(Operation::Get, name, Lane::Primary, read)
    }
}

/// What is left of a compaction that dies with its bucket: the old handles, and what a sweep finds.
#[test]
fn a_bucket_that_fails_leaves_the_old_handles_and_nothing_that_a_sweep_does_not_find() {
    let dir = tempfile::tempdir().unwrap();
    let bucket = file_bucket(dir.path());
    let options = options(dir.path(), &bucket).group("compacted");
    let old = history(options, &mut SimRng::new(7), 2, 40);
    let content = read(&old, ALL);
    // Of objects that the logs do not need any more.
    let objects = || common::objects(dir.path());
    let before = objects();
    let (mut failed, mut named) = (0, 0);
    for calls in (0..1000).step_by(9) {
        // Small parts of an upload, so that there are several of them.
        let inner = tidelog_upload::open_store(&bucket).unwrap();
        let store = Arc::new(Hooked(Mortal::new(inner, calls)));
        let mut compactor = Compactor::with_store(Arc::clone(&store) as Arc<dyn Store>)
            .part_bytes(16 << 10)
            .memory_bytes(256 << 10)
            .timeout(Duration::from_secs(20))
            .group("compacted");
        let outcome = compactor.compact(&old, ALL);
        assert_eq!(read(&old, ALL), content, "after {calls} calls");
        let Err(error) = outcome else { break };
        failed += 1;
        if let CompactError::Leftovers { objects: names, .. } = &error {
            named += 1;
            assert_eq!(names.len(), 1, "{error}");
        }
        let mut sweeper =
            Sweeper::open(&bucket).unwrap().group("compacted").min_age(Duration::ZERO).live_handles(&old);
        sweeper = sweeper.directory(dir.path().join("local")).unwrap();
        let later = SystemTime::now() + Duration::from_secs(3 * 24 * 3600);
        for stray in sweeper.plan(later).unwrap().strays {
            assert!(matches!(error, CompactError::Leftovers { .. }), "{error} without a word of {stray:?}");
            sweeper.remove(&stray).unwrap();
        }
        assert_eq!(objects(), before, "after {calls} calls");
    }
    assert!(failed > 5 && named > 0, "{failed} failed, {named} of them named what they left");
}

#[test]
fn what_was_damaged_on_its_way_is_read_again() {
    let dir = tempfile::tempdir().unwrap();
    let bucket = file_bucket(dir.path());
    let old = history(options(dir.path(), &bucket), &mut SimRng::new(13), 2, 10);
    let content = read(&old, ALL);
    let footers = files(&old).len() as i64;
    for read_at in [0, 1, 5] {
        let inner = tidelog_upload::open_store(&bucket).unwrap();
        let damages = AtomicI64::new(footers + read_at);
        let store = Arc::new(Hooked(Mortal { damages, ..Mortal::new(inner, 1 << 40) }));
        let mut compactor = Compactor::with_store(Arc::clone(&store) as Arc<dyn Store>);
        let made = compactor.compact(&old, ALL).unwrap();
        assert!(store.damages.load(Ordering::Relaxed) < 0, "something was damaged");
        assert_eq!(read(&made.handles, ALL), content);
    }
}

/// Whether it takes no part, or no last one.
#[test]
fn a_bucket_that_does_not_answer_is_not_waited_for_for_ever() {
    for (memory, checkpoints) in [(256 << 10, 100), (64 << 20, 3)] {
        let dir = tempfile::tempdir().unwrap();
        let bucket = file_bucket(dir.path());
        let old = history(options(dir.path(), &bucket), &mut SimRng::new(11), 3, checkpoints);
        let before = common::objects(dir.path());
        let inner = tidelog_upload::open_store(&bucket).unwrap();
        let store = Hooked(Mortal { silent: true, ..Mortal::new(inner, 0) });
        let mut compactor = Compactor::with_store(Arc::new(store))
            .part_bytes(16 << 10)
            .memory_bytes(memory)
            .timeout(Duration::from_millis(300));
        let error = compactor.compact(&old, ALL).unwrap_err();
        match memory {
            0x40000 => assert!(matches!(error, CompactError::Stalled { .. }), "{error}"),
            _ => assert!(matches!(error, CompactError::Upload { .. }), "{error}"),
        }
        assert_eq!(common::objects(dir.path()), before);
    }
}

/// The same handles, with their objects in a simulated bucket.
fn simulated(dir: &Path, handles: &[ChangelogHandle], store: &SimStore) -> Vec<ChangelogHandle> {
    for name in files(handles) {
        let bytes = std::fs::read(dir.join("bucket").join(&name)).unwrap();
        store.tamper(&name, Some(bytes.into()));
    }
    let moved = |extent: &Extent| {
        let bucket: Arc<str> = store.url().into();
        let pieces = extent
            .pieces
            .iter()
            .map(|piece| Piece { bucket: Arc::clone(&bucket), ..piece.clone() })
            .collect();
        Extent { pieces, ..extent.clone() }
    };
    let move_handle = |handle: &ChangelogHandle| {
        let extents = handle.extents().iter().map(moved).collect();
        let (log, name, groups) = (handle.log(), handle.name(), handle.key_groups());
        ChangelogHandle::new(log, name, groups, handle.from(), handle.to(), extents).unwrap()
    };
    handles.iter().map(move_handle).collect()
}

fn read_simulated(handles: &[ChangelogHandle], store: &SimStore) -> common::Content {
    let stores: Vec<Arc<dyn Store>> = vec![Arc::new(store.clone())];
    let groups = || handles.iter().map(ChangelogHandle::key_groups);
    let first = groups().map(|groups| groups.first().0).min().unwrap();
    let last = groups().map(|groups| groups.last().0).max().unwrap();
    let covered = KeyGroupRange::new(first, last).unwrap();
    common::collect(ChangelogReader::open_simulated(handles, covered, stores).unwrap())
}

#[test]
fn requests_that_fail_now_and_then_are_made_again() {
    for seed in 200..206 {
        let dir = tempfile::tempdir().unwrap();
        let files_old = history(options(dir.path(), &file_bucket(dir.path())), &mut SimRng::new(seed), 2, 30);
        let store = SimStore::new(seed);
        let old = simulated(dir.path(), &files_old, &store);
        let before: BTreeSet<String> = store.objects().into_keys().collect();
        let chances = Chances { before: 0.05, after: 0.05, late: 0.0, throttled: 0.05 };
        let (get, put) = (Operation::Get, Operation::Put);
        for operation in [get, put, Operation::PutPart, Operation::CopyPart, Operation::Create] {
            store.set_chances(operation, chances);
        }
        store.set_chances(Operation::Complete, Chances { before: 0.3, after: 0.3, ..Chances::default() });
        let mut compactor = Compactor::with_store(Arc::new(store.clone()))
            .part_bytes(16 << 10)
            .memory_bytes(256 << 10)
            .timeout(Duration::from_secs(60));
        let outcome = compactor.compact(&old, ALL);
        let faults: u64 = store.stats().faults.values().sum();
        assert!(faults > 3, "seed {seed}");
        store.heal();
        let after: BTreeSet<String> = store.objects().into_keys().collect();
        assert!(store.open_uploads().is_empty(), "seed {seed}");
        match outcome {
            Ok(made) => {
                assert_eq!(read_simulated(&made.handles, &store), read_simulated(&old, &store));
                assert!(made.leftovers.is_empty() && after.is_subset(&(&before | &files(&made.handles))));
                assert!(made.stats.parts > 1, "{:?}", made.stats);
            }
            Err(error) => {
                assert_eq!(after, before, "seed {seed}: {error}");
            }
        }
        assert_eq!(read_simulated(&old, &store), common::read(&files_old, ALL));
    }
}

/// A bucket that copies, as S3 does: parts of some size, but the last.
fn copying_store(seed: u64) -> SimStore {
    let row = SimStore::new(seed).capabilities().clone();
    SimStore::with_capabilities(seed, Capabilities { part_bytes_min: 5000, ..row })
}

#[test]
fn whole_parts_are_copied_by_the_bucket() {
    for seed in 300..308 {
        let random = &mut SimRng::new(seed);
        let dir = tempfile::tempdir().unwrap();
        let compression = [Compression::None, Compression::Lz4][seed as usize % 2];
        let options = options(dir.path(), &file_bucket(dir.path())).compression(compression);
        let files_old = dense_history(options, random, 1 + (seed % 3) as usize, 12, 900);
        let store = copying_store(seed);
        let old = simulated(dir.path(), &files_old, &store);
        let content = read_simulated(&old, &store);
        let mut compactor = Compactor::with_store(Arc::new(store.clone())).part_bytes(16 << 10);
        drop(store.take_stats());
        let made = compactor.compact(&old, ALL).unwrap();
        let (stats, asked) = (made.stats, store.take_stats());
        assert_eq!(read_simulated(&made.handles, &store), content, "seed {seed}");
        assert!(stats.bytes_copied > stats.bytes_written / 4, "seed {seed}: {stats:?}");
        // Neither read nor sent, but for what small parts between copies take of them.
        assert!(stats.bytes_read < stats.bytes_written, "seed {seed}: {stats:?}");
        assert!(asked.bytes_put + stats.bytes_copied / 2 < stats.bytes_written, "seed {seed}: {stats:?}");
        assert!(store.open_uploads().is_empty());
        let name = made.handles[0].extents()[0].object().to_owned();
        assert_eq!(store.objects()[&name].len() as u64, stats.bytes_written);

        // Copies of copies, alone: what they were copied from is gone.
        files(&old).iter().for_each(|old| store.tamper(old, None));
        let again = compactor.compact(&made.handles, ALL).unwrap();
        assert!(again.stats.bytes_copied >= stats.bytes_copied, "seed {seed}: {:?}", again.stats);
        store.tamper(&name, None);
        assert_eq!(read_simulated(&again.handles, &store), content, "seed {seed}");

        // Which changes are the last of their keys is known of no part.
        let store_again = Arc::new(store.clone());
        let mut latest = Compactor::with_store(store_again).part_bytes(16 << 10).last_value_by(key_of);
        let latest = latest.compact(&again.handles, ALL).unwrap().stats;
        assert!(latest.bytes_copied == 0 && latest.superseded > 0);

        // Whatever is left out cannot be in a copy.
        let some = compactor.compact(&again.handles, groups(1..GROUPS)).unwrap();
        assert_eq!(some.stats.bytes_copied, 0);
        let mut expected = content.clone();
        expected.retain(|(_, group), _| *group != Some(0));
        assert_eq!(read_simulated(&some.handles, &store), expected, "seed {seed}");

        // A copy is verified when it is read.
        let name = again.handles[0].extents()[0].object().to_owned();
        let mut damaged = store.objects()[&name].to_vec();
        damaged[10_000] ^= 1;
        store.tamper(&name, Some(damaged.into()));
        let stores: Vec<Arc<dyn Store>> = vec![Arc::new(store.clone())];
        let mut reader = ChangelogReader::open_simulated(&again.handles, ALL, stores).unwrap();
        assert!(reader.any(|change| change.is_err()), "seed {seed}");
    }
}

/// Key groups that a handle is not for are not copied, whatever it says of its objects; ranges that were compacted apart are.
#[test]
fn parts_with_other_key_groups_are_not_copied() {
    for seed in 320..324 {
        let random = &mut SimRng::new(seed);
        let dir = tempfile::tempdir().unwrap();
        let options = options(dir.path(), &file_bucket(dir.path()));
        let files_old = dense_history(options, random, 1 + (seed % 2) as usize, 12, 900);
        let store = copying_store(seed);
        let old = simulated(dir.path(), &files_old, &store);
        let content = read_simulated(&old, &store);
        let mut compactor = Compactor::with_store(Arc::new(store.clone())).part_bytes(16 << 10);
        let mut halves = Vec::new();
        for half in [groups(0..8), groups(8..GROUPS)] {
            let limited: Vec<_> = old.iter().filter_map(|handle| handle.limited_to(half)).collect();
            let made = compactor.compact(&limited, None).unwrap();
            assert_eq!(made.stats.bytes_copied, 0, "seed {seed}");
            // Nothing else is in the new objects.
            let all = made.handles.iter().map(|handle| {
                let (log, extents) = (handle.log(), handle.extents().to_vec());
                ChangelogHandle::new(log, "log", ALL, handle.from(), handle.to(), extents).unwrap()
            });
            let mut expected = content.clone();
            expected.retain(|(_, group), _| group.is_none_or(|group| half.contains(KeyGroup(group))));
            assert_eq!(read_simulated(&Vec::from_iter(all), &store), expected, "seed {seed}");
            halves.extend(made.handles);
        }
        // Both halves of a log take the same parts, and neither takes all of any.
        let both: Vec<_> = [groups(0..8), groups(8..GROUPS)]
            .iter()
            .flat_map(|half| old.iter().filter_map(|handle| handle.limited_to(*half)))
            .collect();
        for set in [&both, &halves] {
            let made = compactor.compact(set, None).unwrap();
            assert_eq!(made.handles.len(), 2 * old.len());
            assert_eq!(
                made.stats.bytes_copied > 0,
                std::ptr::eq(set, &halves),
                "seed {seed}: {:?}",
                made.stats
            );
            assert_eq!(read_simulated(&made.handles, &store), content, "seed {seed}");
        }
    }
}

/// Nor are those that several handles of a log take, wherever their key groups are.
#[test]
fn parts_that_two_ranges_of_a_log_take_are_rewritten() {
    let dir = tempfile::tempdir().unwrap();
    let changelog = Changelog::open(options(dir.path(), &file_bucket(dir.path()))).unwrap();
    let mut writer = changelog.create_writer("log", ALL).unwrap();
    for number in 0..60u8 {
        writer.append(KeyGroup(1), &[number; 1000]).unwrap();
    }
    let handle = writer.persist_durably(SequenceNumber::ZERO).wait().unwrap();
    let store = copying_store(78);
    let old = simulated(dir.path(), &[handle], &store).remove(0);
    let content = read_simulated(std::slice::from_ref(&old), &store);
    let mut compactor = Compactor::with_store(Arc::new(store.clone())).part_bytes(16 << 10);
    let mut copied = |set: &[ChangelogHandle]| {
        let made = compactor.compact(set, None).unwrap();
        assert_eq!(read_simulated(&made.handles, &store), content);
        (made.stats.bytes_copied, made.handles)
    };
    let [first, second] = [groups(0..8), groups(8..GROUPS)].map(|half| old.limited_to(half).unwrap());
    assert!(copied(std::slice::from_ref(&first)).0 > 0, "all is in its key groups");
    let (bytes, compacted) = copied(&[first.clone(), second.clone()]);
    assert_eq!(bytes, 0);
    // One of them takes some of a part.
    let middle = SequenceNumber(5);
    let part = |from: SequenceNumber, to: SequenceNumber, of: &ChangelogHandle| {
        let clip = |extent: &Extent| {
            let (first, end) = (extent.first.max(from), extent.end.min(to));
            (first < end).then(|| Extent { first, end, ..extent.clone() })
        };
        let extents = of.extents().iter().filter_map(clip).collect();
        ChangelogHandle::new(of.log(), of.name(), of.key_groups(), from, to, extents).unwrap()
    };
    let rest = part(middle, old.to(), &compacted[1]);
    let (bytes, _) = copied(&[first, part(old.from(), middle, &second), rest]);
    assert!(bytes > 0);
}

/// The changes of a part that the handle does not take are not copied with it.
#[test]
fn parts_that_are_truncated_are_not_copied() {
    let dir = tempfile::tempdir().unwrap();
    let bucket = file_bucket(dir.path());
    let changelog = Changelog::open(options(dir.path(), &bucket)).unwrap();
    let mut writer = changelog.create_writer("log", ALL).unwrap();
    for number in 0..60u64 {
        writer.append(KeyGroup((number % 16) as u16), &[number as u8; 1000]).unwrap();
    }
    writer.sync().wait().unwrap();
    let mut bytes_copied = Vec::new();
    for from in [0, 1, 59] {
        writer.truncate(SequenceNumber(from)).unwrap();
        let handle = writer.persist_durably(SequenceNumber(from)).wait().unwrap();
        let store = copying_store(from);
        let old = simulated(dir.path(), &[handle], &store);
        let mut compactor = Compactor::with_store(Arc::new(store.clone())).part_bytes(16 << 10);
        let made = compactor.compact(&old, ALL).unwrap();
        assert_eq!(read_simulated(&made.handles, &store), read_simulated(&old, &store));
        bytes_copied.push(made.stats.bytes_copied);
    }
    assert!(bytes_copied[0] > bytes_copied[1] && bytes_copied[1] > 0, "{bytes_copied:?}");
    assert_eq!(bytes_copied[2], 0);

    // Nor are those that are not in one piece.
    let mut writer = changelog.create_writer("other", ALL).unwrap();
    for number in 0..60u8 {
        writer.append(KeyGroup(1), &[number; 1000]).unwrap();
    }
    let handle = writer.persist_durably(SequenceNumber::ZERO).wait().unwrap();
    let extents = handle.extents().iter().map(|extent| {
        let cut = |piece: &Piece| -> Vec<Piece> {
            (0..piece.bytes)
                .step_by(7000)
                .map(|at| Piece {
                    offset: piece.offset + at,
                    bytes: (piece.bytes - at).min(7000),
                    ..piece.clone()
                })
                .collect()
        };
        Extent { pieces: extent.pieces.iter().flat_map(cut).collect(), ..extent.clone() }
    });
    let (log, name, to) = (handle.log(), handle.name(), handle.to());
    let cut = ChangelogHandle::new(log, name, ALL, handle.from(), to, extents.collect()).unwrap();
    let copied = |handle: &ChangelogHandle| {
        let store = copying_store(77);
        let old = simulated(dir.path(), std::slice::from_ref(handle), &store);
        let mut compactor = Compactor::with_store(Arc::new(store.clone())).part_bytes(16 << 10);
        let made = compactor.compact(&old, ALL).unwrap();
        assert_eq!(read_simulated(&made.handles, &store), read_simulated(&old, &store));
        made.stats.bytes_copied
    };
    assert!(copied(&handle) > 0);
    assert_eq!(copied(&cut), 0);
}

/// A flipped bit anywhere in what is needed is found before anything is made of it.
#[test]
fn damage_is_not_copied() {
    let dir = tempfile::tempdir().unwrap();
    let files_old = history(options(dir.path(), &file_bucket(dir.path())), &mut SimRng::new(9), 1, 3);
    let store = SimStore::new(9);
    let old = simulated(dir.path(), &files_old, &store);
    let before = store.objects();
    let name = old[0].extents().last().unwrap().object();
    let intact = before[name].clone();
    let mut compactor = Compactor::with_store(Arc::new(store.clone())).part_bytes(16 << 10);
    for byte in (0..intact.len()).step_by(intact.len() / 20) {
        let mut damaged = intact.to_vec();
        damaged[byte] ^= 0x10;
        store.tamper(name, Some(damaged.into()));
        let error = compactor.compact(&old, ALL).unwrap_err();
        assert!(matches!(error, CompactError::Read(_)), "byte {byte}: {error}");
        store.tamper(name, Some(intact.clone()));
        assert_eq!(store.objects(), before);
    }
    compactor.compact(&old, ALL).unwrap();
}
