//! Restores: any number of writers into any number of readers, from objects and from what the local disk still holds.

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use common::{eventually, options, range};
use tidelog::{
    Change, Changelog, ChangelogHandle, ChangelogReader, ChangelogWriter, Extent, HandlesError, KeyGroup,
    KeyGroupRange, LogId, Options, ReadError, ReadStats, Restore, SequenceNumber,
};
use tidelog_io::sim::SimRng;

const ZERO: SequenceNumber = SequenceNumber::ZERO;
const KEY_GROUPS: u16 = 96;

/// Cuts all key groups into `parts` ranges.
fn cut(parts: u16) -> Vec<KeyGroupRange> {
    let at = |part: u16| part * KEY_GROUPS / parts;
    (0..parts).map(|part| range(at(part), at(part + 1) - 1)).collect()
}

/// What was appended: for each log in the order of creation, each change with its key group.
#[derive(Default)]
struct Model(Vec<LogModel>);

type LogModel = (LogId, KeyGroupRange, Vec<(Option<u16>, Vec<u8>)>);

/// Of each key group, log and number of each change, and its value.
type ByGroup<'a> = BTreeMap<Option<u16>, Vec<(LogId, u64, &'a [u8])>>;

impl Model {
    fn writer(&mut self, changelog: &Changelog, key_groups: KeyGroupRange) -> ChangelogWriter {
        let writer = changelog.create_writer("state", key_groups).unwrap();
        self.0.push((writer.log(), key_groups, Vec::new()));
        writer
    }

    fn append(&mut self, writer: &mut ChangelogWriter, random: &mut SimRng) {
        let groups = writer.key_groups();
        // Some are longer than a block.
        let len = if random.below(100) == 0 { random.below(600_000) } else { random.below(300) };
        let salt = random.below(251);
        let value: Vec<u8> = (0..len).map(|at| (at * 7 + salt) as u8).collect();
        let group = match random.below(40) {
            0 => {
                writer.append_metadata(&value).unwrap();
                None
            }
            _ => {
                let group = groups.first().0 + random.below(groups.len() as u64) as u16;
                writer.append(KeyGroup(group), &value).unwrap();
                Some(group)
            }
        };
        self.0.iter_mut().find(|log| log.0 == writer.log()).unwrap().2.push((group, value));
    }

    /// Holds what was read of a range of key groups, from the changes `from..to` of each log, against what was appended.
    fn check(&self, read: &[Change], key_groups: KeyGroupRange, from: usize) {
        let first_data = read.iter().position(|change| change.key_group.is_some()).unwrap_or(read.len());
        assert!(read[first_data..].iter().all(|change| change.key_group.is_some()), "metadata comes first");
        let mut found = ByGroup::new();
        for change in read {
            let group = change.key_group.map(|group| group.0);
            found.entry(group).or_default().push((change.log, change.number.0, &change.value));
        }
        let mut expected = ByGroup::new();
        for (log, groups, changes) in &self.0 {
            for (number, (group, value)) in changes.iter().enumerate().skip(from) {
                let here = groups.intersection(key_groups).is_some();
                if here && group.is_none_or(|group| key_groups.contains(KeyGroup(group))) {
                    expected.entry(*group).or_default().push((*log, number as u64, value));
                }
            }
        }
        assert!(found == expected, "each change once, log by log, in the order of numbers, in {key_groups}");
    }
}

fn all(reader: &mut ChangelogReader) -> Vec<Change> {
    reader.map(Result::unwrap).collect()
}

/// Several handles of several writers, one after another, and what they stand for.
fn written(changelog: &Changelog, writers: u16, checkpoints: usize) -> (Model, Vec<ChangelogHandle>) {
    let mut random = SimRng::new(u64::from(writers));
    let mut model = Model::default();
    let mut open: Vec<ChangelogWriter> =
        cut(writers).into_iter().map(|groups| model.writer(changelog, groups)).collect();
    let mut handles = Vec::new();
    for _ in 0..checkpoints {
        let from: Vec<SequenceNumber> = open.iter().map(ChangelogWriter::next_sequence_number).collect();
        for _ in 0..400 * open.len() {
            let writer = random.below(open.len() as u64) as usize;
            model.append(&mut open[writer], &mut random);
        }
        let persists: Vec<_> =
            open.iter_mut().zip(from).map(|(writer, from)| writer.persist_durably(from)).collect();
        handles.extend(persists.into_iter().map(|persist| persist.wait().unwrap()));
    }
    (model, handles)
}

fn small(home: &Path) -> Options {
    options(home).part_bytes(1 << 20).local_bytes(48 << 20)
}

#[test]
fn any_number_of_writers_becomes_any_number_of_readers() {
    for writers in [1, 2, 3, 5] {
        let home = tempfile::tempdir().unwrap();
        let changelog = Changelog::open(small(home.path())).unwrap();
        let (model, mut handles) = written(&changelog, writers, 3);
        // The first handles say the order of logs; those of one log may come in any order.
        let rest = handles.split_off(usize::from(writers));
        handles.extend(rest.into_iter().rev());
        for readers in [1, 2, 3, 4, 7] {
            let restore = Restore::open(&handles).unwrap();
            for key_groups in cut(readers) {
                model.check(&all(&mut restore.reader(key_groups).unwrap()), key_groups, 0);
            }
            let whole = range(0, KEY_GROUPS - 1);
            model.check(&all(&mut restore.reader_of_all()), whole, 0);
            model.check(&all(&mut changelog.restore(&handles).unwrap().reader(whole).unwrap()), whole, 0);
        }
    }
}

/// More footers and directories than are asked for ahead, and each is there as soon as it is asked for.
#[test]
fn objects_of_many_parts_are_read_to_their_ends() {
    let home = tempfile::tempdir().unwrap();
    let options = small(home.path()).block_bytes(8 << 10).part_bytes(16 << 10);
    let changelog = Changelog::open(options).unwrap();
    let mut model = Model::default();
    let mut writer = model.writer(&changelog, range(0, KEY_GROUPS - 1));
    let mut handles = Vec::new();
    for checkpoint in 0..40 {
        let from = writer.next_sequence_number();
        // The last one has some hundred parts; none has metadata, so that there is nothing to be read between them at first.
        for number in 0..if checkpoint == 39 { 20_000 } else { 20 } {
            let group = (number % u64::from(KEY_GROUPS)) as u16;
            writer.append(KeyGroup(group), &[number as u8; 200]).unwrap();
            model.0[0].2.push((Some(group), vec![number as u8; 200]));
        }
        handles.push(writer.persist_durably(from).wait().unwrap());
    }
    for key_groups in cut(1).into_iter().chain(cut(3)) {
        let store = tidelog_upload::open_store(&format!("file://{}", home.path().join("bucket").display()));
        let reader = ChangelogReader::open_simulated(&handles, key_groups, vec![store.unwrap()]);
        model.check(&all(&mut reader.unwrap()), key_groups, 0);
        model.check(&all(&mut ChangelogReader::open(&handles, key_groups).unwrap()), key_groups, 0);
    }
}

#[test]
fn footers_and_directories_are_fetched_once_for_all_readers() {
    let home = tempfile::tempdir().unwrap();
    let changelog = Changelog::open(small(home.path())).unwrap();
    let (model, handles) = written(&changelog, 3, 2);
    let alone: ReadStats = {
        let mut reader = ChangelogReader::open(&handles, range(0, KEY_GROUPS - 1)).unwrap();
        all(&mut reader);
        reader.stats()
    };
    let restore = Restore::open(&handles).unwrap();
    let readers: Vec<_> =
        cut(6).into_iter().map(|groups| (groups, restore.reader(groups).unwrap())).collect();
    // All at the same time.
    let stats: Vec<ReadStats> = std::thread::scope(|scope| {
        let model = &model;
        let read = |(key_groups, mut reader): (KeyGroupRange, ChangelogReader)| {
            scope.spawn(move || {
                model.check(&all(&mut reader), key_groups, 0);
                reader.stats()
            })
        };
        let threads: Vec<_> = readers.into_iter().map(read).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    // Metadata is read by every reader of its log: by two of them here.
    let metadata: u64 =
        model.0.iter().flat_map(|log| &log.2).filter(|(group, _)| group.is_none()).map(|_| 1).sum();
    assert!(metadata > 0);
    let bytes: u64 = stats.iter().map(|stats| stats.bytes).sum();
    let again: u64 = handles.len() as u64 * 2 * 1024 + metadata_bytes(&model);
    assert!(
        bytes <= alone.bytes + again,
        "{bytes} bytes by six readers, {} by one, {again} of metadata again",
        alone.bytes
    );
    // A second reader of the same key groups asks for changesets only: directories came with the footers.
    let mut second = restore.reader(range(0, 15)).unwrap();
    model.check(&all(&mut second), range(0, 15), 0);
    let mut fresh = ChangelogReader::open(&handles, range(0, 15)).unwrap();
    model.check(&all(&mut fresh), range(0, 15), 0);
    let (second, fresh) = (second.stats(), fresh.stats());
    let objects = 2;
    assert_eq!(second.requests + objects, fresh.requests, "{second:?} after others, {fresh:?} alone");
    let asked_by_all: u64 = stats.iter().map(|stats| stats.requests).sum();
    assert!(asked_by_all > 0);
}

/// Of two logs in several parts, each with so many key groups that their directories do not come with the footer.
#[test]
fn the_directories_of_a_log_take_one_request() {
    const GROUPS: u16 = 8_000;
    let home = tempfile::tempdir().unwrap();
    let changelog = Changelog::open(small(home.path())).unwrap();
    let mut writers = ["one", "two"].map(|name| changelog.create_writer(name, range(0, GROUPS - 1)).unwrap());
    for writer in &mut writers {
        for change in 0..4 * GROUPS {
            writer.append(KeyGroup(change % GROUPS), &[change as u8; 100]).unwrap();
        }
    }
    let handles = writers.map(|mut writer| writer.persist_durably(ZERO).wait().unwrap());
    let objects: BTreeSet<&str> =
        handles.iter().flat_map(ChangelogHandle::extents).map(Extent::object).collect();
    let restore = Restore::open(&handles).unwrap();
    let read = |groups| {
        let mut reader = restore.reader(groups).unwrap();
        let changes = all(&mut reader).len() as u64;
        (changes, reader.stats().requests)
    };
    let (changes, requests) = read(range(0, 0));
    assert_eq!(changes, 8);
    // Once the directories are here, there are only the changesets.
    let (changes, ranges) = read(range(1, 1));
    assert_eq!(changes, 8);
    assert!(ranges >= 6, "each log is in several parts: {ranges}");
    assert!(
        requests <= ranges + objects.len() as u64 + handles.len() as u64 * objects.len() as u64,
        "{requests} requests for {} footers and {ranges} ranges",
        objects.len()
    );
}

/// An engine that persists from where it was has many handles of a log, often in one object.
#[test]
fn what_several_handles_have_in_an_object_is_fetched_once() {
    let home = tempfile::tempdir().unwrap();
    let changelog = Changelog::open(small(home.path()).batch_delay(Duration::from_millis(300))).unwrap();
    let mut model = Model::default();
    let mut writer = model.writer(&changelog, range(0, KEY_GROUPS - 1));
    let mut random = SimRng::new(1);
    let persists = Vec::from_iter((0..20).map(|_| {
        let from = writer.next_sequence_number();
        (0..100).for_each(|_| model.append(&mut writer, &mut random));
        writer.persist_durably(from)
    }));
    let handles = Vec::from_iter(persists.into_iter().map(|persist| persist.wait().unwrap()));
    let whole = writer.persist_durably(ZERO).wait().unwrap();
    let objects = BTreeSet::from_iter(handles.iter().flat_map(ChangelogHandle::extents).map(Extent::object));
    assert!(objects.len() < 10, "they share objects: {objects:?}");
    let read = |handles: &[ChangelogHandle]| {
        let mut reader = ChangelogReader::open(handles, range(0, KEY_GROUPS - 1)).unwrap();
        model.check(&all(&mut reader), range(0, KEY_GROUPS - 1), 0);
        reader.stats()
    };
    assert_eq!(read(&handles), read(&[whole]));
}

fn metadata_bytes(model: &Model) -> u64 {
    let metadata = model.0.iter().flat_map(|log| &log.2).filter(|(group, _)| group.is_none());
    metadata.map(|(_, value)| value.len() as u64 + 32).sum()
}

#[test]
fn handles_that_do_not_go_together_are_refused_before_anything_is_read() {
    let home = tempfile::tempdir().unwrap();
    let changelog = Changelog::open(small(home.path())).unwrap();
    let (_, handles) = written(&changelog, 2, 2);
    let missing = Restore::open(&handles[1..2]).unwrap().reader(range(0, 95)).unwrap_err();
    assert!(
        matches!(&missing, ReadError::Handles(HandlesError::NotCovered { missing }) if *missing == [range(0, 47)]),
        "{missing}"
    );
    assert!(missing.to_string().contains("0-47"), "{missing}");
    let twice = [handles[0].clone(), handles[0].clone()];
    assert!(matches!(Restore::open(&twice), Err(ReadError::Handles(HandlesError::Overlap { .. }))));
    assert!(matches!(changelog.restore(&twice), Err(ReadError::Handles(HandlesError::Overlap { .. }))));
    // The first checkpoint of each log is left out, which nobody but the engine could notice.
    assert!(Restore::open(&handles[2..]).is_ok());
    assert_eq!(Restore::open(&[]).unwrap().reader(KeyGroupRange::ALL).unwrap().count(), 0);
}

/// Nothing in the bucket can be read any more.
fn empty_bucket(home: &Path) {
    fs::rename(home.join("bucket"), home.join("gone")).unwrap();
    fs::create_dir(home.join("bucket")).unwrap();
}

fn refill_bucket(home: &Path) {
    fs::remove_dir_all(home.join("bucket")).unwrap();
    fs::rename(home.join("gone"), home.join("bucket")).unwrap();
}

fn check_restore(
    changelog: &Changelog,
    handles: &[ChangelogHandle],
    model: &Model,
    readers: u16,
) -> ReadStats {
    let restore = changelog.restore(handles).unwrap();
    let mut sum = ReadStats::default();
    for key_groups in cut(readers) {
        let mut reader = restore.reader(key_groups).unwrap();
        model.check(&all(&mut reader), key_groups, 0);
        let stats = reader.stats();
        sum.requests += stats.requests;
        sum.bytes += stats.bytes;
        sum.local_bytes += stats.local_bytes;
    }
    sum
}

/// How often local blocks were said to be unreadable, while a function runs on this thread.
fn local_failures(of: impl FnOnce()) -> u64 {
    let failures = LocalFailures::default();
    metrics::with_local_recorder(&failures, of);
    failures.0.load(Ordering::Relaxed)
}

#[derive(Default)]
struct LocalFailures(Arc<AtomicU64>);

impl metrics::Recorder for LocalFailures {
    fn describe_counter(&self, _: metrics::KeyName, _: Option<metrics::Unit>, _: metrics::SharedString) {}
    fn describe_gauge(&self, _: metrics::KeyName, _: Option<metrics::Unit>, _: metrics::SharedString) {}
    fn describe_histogram(&self, _: metrics::KeyName, _: Option<metrics::Unit>, _: metrics::SharedString) {}

    fn register_counter(&self, key: &metrics::Key, _: &metrics::Metadata<'_>) -> metrics::Counter {
        match key.name() {
            "tidelog_local_read_failures_total" => metrics::Counter::from_arc(Arc::clone(&self.0)),
            _ => metrics::Counter::noop(),
        }
    }

    fn register_gauge(&self, _: &metrics::Key, _: &metrics::Metadata<'_>) -> metrics::Gauge {
        metrics::Gauge::noop()
    }

    fn register_histogram(&self, _: &metrics::Key, _: &metrics::Metadata<'_>) -> metrics::Histogram {
        metrics::Histogram::noop()
    }
}

#[test]
fn what_the_local_disk_holds_is_read_from_there() {
    let home = tempfile::tempdir().unwrap();
    let changelog = Changelog::open(small(home.path()).local_retention_bytes(40 << 20)).unwrap();
    let (model, handles) = written(&changelog, 2, 3);
    // Of logs whose writers are open, or were in this process.
    empty_bucket(home.path());
    let stats = check_restore(&changelog, &handles, &model, 3);
    assert_eq!((stats.requests, stats.bytes), (0, 0));
    assert!(stats.local_bytes > 1 << 20, "{stats:?}");
    changelog.close(Duration::from_secs(20)).unwrap();
    // And of recovered ones.
    let changelog = Changelog::open(small(home.path()).local_retention_bytes(40 << 20)).unwrap();
    let stats = check_restore(&changelog, &handles, &model, 3);
    assert_eq!((stats.requests, stats.bytes), (0, 0));
    changelog.close(Duration::from_secs(20)).unwrap();
    // Without the directory, from the bucket alone.
    refill_bucket(home.path());
    fs::remove_dir_all(home.path().join("local")).unwrap();
    let changelog = Changelog::open(small(home.path())).unwrap();
    let stats = check_restore(&changelog, &handles, &model, 3);
    assert_eq!(stats.local_bytes, 0);
    assert!(stats.bytes > 1 << 20, "{stats:?}");
}

#[test]
fn metadata_is_looked_for_in_local_blocks_by_one_reader() {
    let home = tempfile::tempdir().unwrap();
    let changelog = Changelog::open(small(home.path()).local_retention_bytes(40 << 20)).unwrap();
    let mut writer = changelog.create_writer("data", range(0, KEY_GROUPS - 1)).unwrap();
    for change in 0..5_000 {
        writer.append(KeyGroup(change % KEY_GROUPS), &[7; 1000]).unwrap();
    }
    let persist = |writer: &mut ChangelogWriter| writer.persist_durably(ZERO).wait().unwrap();
    let read = |handle: ChangelogHandle, readers| {
        let restore = changelog.restore(&[handle]).unwrap();
        let (mut metadata, mut bytes) = (0, 0);
        for key_groups in cut(readers) {
            let mut reader = restore.reader(key_groups).unwrap();
            metadata += all(&mut reader).iter().filter(|change| change.key_group.is_none()).count();
            assert_eq!(reader.stats().bytes, 0);
            bytes += reader.stats().local_bytes;
        }
        (metadata, bytes)
    };
    let handle = persist(&mut writer);
    let (_, twice) = read(handle.clone(), 1);
    assert!(twice > 10_000_000, "{twice}");
    assert_eq!(read(handle.clone(), 2), (0, twice / 2 * 3), "once more for each reader, not twice");
    assert_eq!(read(handle, 6), (0, twice / 2 * 7));
    // Where there is some, all of them find it.
    writer.append_metadata(b"metadata").unwrap();
    let (metadata, bytes) = read(persist(&mut writer), 6);
    assert_eq!(metadata, 6);
    assert!(bytes > twice / 2 * 7, "{bytes}");
}

#[test]
fn without_retention_settled_segments_are_released() {
    let home = tempfile::tempdir().unwrap();
    let changelog = Changelog::open(small(home.path()).local_retention_bytes(0)).unwrap();
    let (model, handles) = written(&changelog, 2, 3);
    // Each log reads it twice: once for metadata.
    let newest = 2 * 2 * (2 << 20);
    eventually("all but the newest segment are released", || {
        check_restore(&changelog, &handles, &model, 1).local_bytes <= newest
    });
    assert!(check_restore(&changelog, &handles, &model, 1).bytes > 1 << 20);
}

fn segments(home: &Path) -> Vec<std::path::PathBuf> {
    let entries = fs::read_dir(home.join("local")).unwrap().map(|entry| entry.unwrap().path());
    let mut segments: Vec<_> =
        entries.filter(|path| path.file_name().unwrap().to_string_lossy().starts_with("segment-")).collect();
    segments.sort();
    segments
}

#[test]
fn what_is_damaged_or_gone_locally_is_read_from_objects() {
    let home = tempfile::tempdir().unwrap();
    let changelog = Changelog::open(small(home.path()).local_retention_bytes(40 << 20)).unwrap();
    let (model, handles) = written(&changelog, 2, 3);
    let whole = check_restore(&changelog, &handles, &model, 2);
    assert_eq!(whole.bytes, 0);
    // A bit of some block flips.
    let segments = segments(home.path());
    assert!(segments.len() > 2, "{segments:?}");
    let good = fs::read(&segments[0]).unwrap();
    let mut bad = good.clone();
    bad[700_000] ^= 4;
    fs::write(&segments[0], &bad).unwrap();
    let failures = local_failures(|| {
        let damaged = check_restore(&changelog, &handles, &model, 2);
        assert!(damaged.bytes > 0 && damaged.local_bytes > 0, "{damaged:?}");
    });
    assert!((1..=2).contains(&failures), "{failures} times, for each log whose changes are in the block");
    // A block of another place, whole in itself, stands where one was.
    let len = tidelog::block::Block::peek_len(&good).unwrap();
    let next = tidelog::block::Block::peek_len(&good[len..]).unwrap();
    assert_eq!(len, next, "full blocks are of one length");
    let mut swapped = good.clone();
    swapped[..len].copy_from_slice(&good[len..2 * len]);
    fs::write(&segments[0], &swapped).unwrap();
    let misplaced = check_restore(&changelog, &handles, &model, 2);
    assert!(misplaced.bytes > 0 && misplaced.local_bytes > 0, "{misplaced:?}");
    // A file is cut short, another one is gone.
    fs::write(&segments[0], &good[..len + 100]).unwrap();
    fs::rename(&segments[1], home.path().join("aside")).unwrap();
    let gone = check_restore(&changelog, &handles, &model, 2);
    assert!(gone.bytes > 0 && gone.local_bytes < misplaced.local_bytes, "{gone:?}");
    // A reader that was opened before does not mind either.
    fs::write(&segments[0], &good).unwrap();
    fs::rename(home.path().join("aside"), &segments[1]).unwrap();
    let restore = changelog.restore(&handles).unwrap();
    let mut reader = restore.reader(range(0, 95)).unwrap();
    let first = reader.next().unwrap().unwrap();
    for segment in &segments {
        fs::rename(segment, segment.with_extension("aside")).unwrap();
    }
    let mut read = vec![first];
    read.extend(all(&mut reader));
    model.check(&read, range(0, 95), 0);
    assert!(reader.stats().bytes > 0);
    for segment in &segments {
        fs::rename(segment.with_extension("aside"), segment).unwrap();
    }
    assert_eq!(check_restore(&changelog, &handles, &model, 2), whole);
}

#[test]
fn what_is_kept_makes_room_for_appends_at_once() {
    let home = tempfile::tempdir().unwrap();
    let small = || small(home.path()).local_bytes(16 << 20).local_retention_bytes(16 << 20);
    let changelog = Changelog::open(small().append_wait_max(Duration::from_secs(30))).unwrap();
    let (model, handles) = written(&changelog, 2, 2);
    let restore = changelog.restore(&handles).unwrap();
    let mut begun = restore.reader(range(0, 47)).unwrap();
    let mut read = vec![begun.next().unwrap().unwrap()];
    // Four times the budget, while a restore is under way, which keeps nobody waiting.
    let mut writer = changelog.create_writer("much", range(0, 9)).unwrap();
    for _ in 0..64 {
        for _ in 0..1_000 {
            writer.append(KeyGroup(3), &[7; 1000]).unwrap();
        }
        writer.truncate(writer.next_sequence_number()).unwrap();
    }
    // Nothing is wrong when what was looked up is not there any more.
    assert_eq!(local_failures(|| read.extend(all(&mut begun))), 0);
    assert!(begun.stats().bytes > 0, "{:?}", begun.stats());
    let mut half = Model::default();
    half.0.extend(model.0.iter().filter(|log| log.1 == range(0, 47)).cloned());
    half.check(&read, range(0, 47), 0);
    // Its segments were used again: all comes from the bucket.
    let stats = check_restore(&changelog, &handles, &model, 2);
    assert_eq!(stats.local_bytes, 0, "{stats:?}");
    assert!(stats.bytes > 0);
}

#[test]
fn what_is_truncated_is_not_kept() {
    let home = tempfile::tempdir().unwrap();
    let changelog = Changelog::open(small(home.path()).local_retention_bytes(40 << 20)).unwrap();
    let mut writer = changelog.create_writer("spent", range(0, 9)).unwrap();
    for _ in 0..20_000 {
        writer.append(KeyGroup(3), &[7; 1000]).unwrap();
    }
    let handle = writer.persist_durably(ZERO).wait().unwrap();
    let restored = || {
        let mut reader =
            changelog.restore(std::slice::from_ref(&handle)).unwrap().reader(range(0, 9)).unwrap();
        let _ = reader.by_ref().take_while(Result::is_ok).count();
        reader.stats()
    };
    let stats = restored();
    assert!(stats.local_bytes > 20_000_000 && stats.bytes == 0, "{stats:?}");
    writer.truncate(handle.to()).unwrap();
    eventually("what nobody needs is released", || restored().local_bytes <= 2 * (2 << 20));
}

#[test]
fn what_only_the_local_disk_holds_stays_while_it_is_read() {
    let home = tempfile::tempdir().unwrap();
    let open = || {
        let options = small(home.path()).local_bytes(24 << 20).local_retention_bytes(0);
        Changelog::open(options.append_wait_max(Duration::ZERO)).unwrap()
    };
    let changelog = open();
    let mut model = Model::default();
    let mut writer = model.writer(&changelog, range(0, 9));
    for number in 0..12_000u64 {
        let value = number.to_le_bytes().repeat(125);
        while writer.append(KeyGroup(3), &value).is_err() {
            std::thread::yield_now();
        }
        model.0[0].2.push((Some(3), value));
    }
    writer.sync().wait().unwrap();
    drop((writer, changelog));
    let changelog = open();
    let [log] = changelog.recovered() else { panic!("{:?}", changelog.recovered()) };
    let mut reader = log.read(range(0, 9)).unwrap();
    let mut read = vec![reader.next().unwrap().unwrap()];
    // All of it is in objects now, and appends want the room.
    log.persist_durably(log.start()).wait().unwrap();
    let mut writer = changelog.create_writer("much", range(0, 9)).unwrap();
    let mut refused = 0;
    while refused < 50 {
        match writer.append(KeyGroup(3), &[7; 1000]) {
            Ok(number) => {
                assert!(number.0 < 30_000, "the log that is read is not in the way");
                writer.truncate(SequenceNumber(number.0)).unwrap();
            }
            Err(_) => {
                refused += 1;
                std::thread::sleep(Duration::from_millis(10));
            }
        }
    }
    read.extend(all(&mut reader));
    model.check(&read, range(0, 9), 0);
    drop(reader);
    eventually("there is room again", || writer.append(KeyGroup(3), &[7; 1000]).is_ok());
}

#[test]
fn a_future_that_is_dropped_loses_no_change() {
    use std::future::Future;
    use std::task::{Context, Waker};

    let home = tempfile::tempdir().unwrap();
    let changelog = Changelog::open(small(home.path())).unwrap();
    let (model, handles) = written(&changelog, 2, 2);
    let mut reader = ChangelogReader::open(&handles, range(0, 95)).unwrap();
    let mut read = Vec::new();
    let mut dropped = 0;
    loop {
        let mut context = Context::from_waker(Waker::noop());
        match std::pin::pin!(reader.next_batch()).poll(&mut context) {
            std::task::Poll::Pending => {
                dropped += 1;
                std::thread::yield_now();
            }
            std::task::Poll::Ready(batch) => match batch.unwrap() {
                Some(batch) => read.extend(batch),
                None => break,
            },
        }
    }
    assert!(dropped > 0);
    model.check(&read, range(0, 95), 0);
}
