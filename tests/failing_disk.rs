//! Disks that fail. An engine that breaks takes what it was writing with it: that is reported as lost, and all else goes on
//! from memory. A disk that was full goes on with all of its room.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tidelog::{
    Changelog, ChangelogReader, CreateError, KeyGroup, KeyGroupRange, Options, PersistError, Seams,
    SequenceNumber, SyncError,
};
use tidelog_io::directory::{Manifest, RESERVE_NAME};
use tidelog_io::disk::Durability;
use tidelog_io::sim::{Fault, SimRng, SimWorld};
use tidelog_upload::sim::SimStore;

const ZERO: SequenceNumber = SequenceNumber::ZERO;

/// Steps until the future resolves.
macro_rules! resolved {
    ($changelog:expr, $future:expr) => {{
        let mut future = $future;
        let mut steps = 0;
        loop {
            $changelog.step();
            future = match future.wait_timeout(Duration::ZERO) {
                Ok(answer) => break answer,
                Err(future) => future,
            };
            steps += 1;
            assert!(steps < 5000, "never answered");
        }
    }};
}

fn options() -> Options {
    Options::new("sim://bucket", "/sim").block_bytes(8 << 10).writes_in_flight(1).value_bytes_max(64 << 10)
}

/// On the disk of `world`, with at most one write in flight. Each look at the clock takes a while, so that nothing is
/// waited for in vain.
fn open(world: &SimWorld, options: Options) -> (Changelog, Arc<SimStore>) {
    let store = Arc::new(SimStore::new(3));
    (open_with(world, options, &store), store)
}

fn open_with(world: &SimWorld, options: Options, store: &Arc<SimStore>) -> Changelog {
    let start = Instant::now();
    let mut random = SimRng::new(1);
    let ticks = AtomicU64::new(0);
    let seams = Seams {
        directories: vec![(world.files(), Box::new(world.disk(1, Durability::Power)))],
        stores: vec![store.clone()],
        clock: Arc::new(move || start + Duration::from_millis(5 * ticks.fetch_add(1, Ordering::Relaxed))),
        random: Box::new(move || random.next_u64()),
    };
    Changelog::open_simulated(options, seams).unwrap()
}

#[test]
fn what_was_in_flight_is_lost_and_all_else_goes_on_from_memory() {
    let world = SimWorld::new(7);
    let (changelog, store) = open(&world, options().segment_bytes(64 << 10).local_bytes(1 << 20));
    let [mut broken, mut whole] =
        ["broken", "whole"].map(|name| changelog.create_writer(name, KeyGroupRange::ALL).unwrap());
    broken.append(KeyGroup(0), b"durable").unwrap();
    resolved!(changelog, broken.sync()).unwrap();
    resolved!(changelog, broken.persist_durably(ZERO)).unwrap();

    world.hold(true);
    broken.append(KeyGroup(0), b"in flight").unwrap();
    let in_flight = broken.sync();
    changelog.step();
    // These share a block, and one of them a fragment, that waits for the one in flight.
    broken.append(KeyGroup(0), b"behind it").unwrap();
    whole.append(KeyGroup(0), b"held").unwrap();
    broken.append(KeyGroup(0), &[7; 20_000]).unwrap();
    whole.append(KeyGroup(0), &[8; 20_000]).unwrap();
    let held = whole.sync();
    let lost = broken.persist_durably(ZERO);
    changelog.step();
    world.inject(Fault::EngineBreaks, 0);
    assert!(matches!(resolved!(changelog, in_flight), Err(SyncError::LocalTierFailed { .. })));
    assert!(matches!(resolved!(changelog, held), Err(SyncError::LocalTierFailed { .. })));
    let log = broken.log();
    let expect_lost = |answer| match answer {
        Err(PersistError::Lost { log: of, from }) => assert_eq!((of, from), (log, SequenceNumber(1))),
        other => panic!("{other:?}"),
    };
    expect_lost(resolved!(changelog, lost));
    broken.append(KeyGroup(0), b"in vain").unwrap();
    expect_lost(resolved!(changelog, broken.persist_durably(SequenceNumber(2))));

    whole.append(KeyGroup(0), b"afterwards").unwrap();
    let handle = resolved!(changelog, whole.persist_durably(ZERO)).unwrap();
    let mut later = changelog.create_writer("later", KeyGroupRange::ALL).unwrap();
    later.append(KeyGroup(0), b"new").unwrap();
    let later = resolved!(changelog, later.persist_durably(ZERO)).unwrap();
    let reader = ChangelogReader::open_simulated(&[handle, later], KeyGroupRange::ALL, vec![store]).unwrap();
    let values: Vec<_> = reader.map(|change| change.unwrap().value.to_vec()).collect();
    let mut expected = vec![b"held".to_vec(), vec![8; 20_000], b"afterwards".to_vec(), b"new".to_vec()];
    assert_eq!(values.len(), expected.len());
    expected.retain(|value| !values.contains(value));
    assert!(expected.is_empty(), "missing: {expected:?}");
}

/// Also if the beginning of a change that is lost is on the disk.
#[test]
fn an_engine_may_break_in_the_middle_of_a_change() {
    let mut lost_in_the_middle = 0;
    for skip in 0.. {
        let world = SimWorld::new(7);
        let (changelog, store) = open(&world, options().segment_bytes(64 << 10).local_bytes(1 << 20));
        let [mut broken, mut whole] =
            ["broken", "whole"].map(|name| changelog.create_writer(name, KeyGroupRange::ALL).unwrap());
        whole.append(KeyGroup(0), b"before").unwrap();
        broken.append(KeyGroup(0), b"whole").unwrap();
        broken.append(KeyGroup(0), &[7; 30_000]).unwrap();
        broken.append(KeyGroup(0), b"behind").unwrap();
        let mut behind = changelog.create_writer("behind", KeyGroupRange::ALL).unwrap();
        behind.append(KeyGroup(0), b"behind").unwrap();
        world.inject(Fault::EngineBreaks, skip);
        let synced = resolved!(changelog, broken.sync());
        let handles: Vec<_> = [&mut broken, &mut whole, &mut behind]
            .into_iter()
            .filter_map(|writer| match resolved!(changelog, writer.persist_durably(ZERO)) {
                Ok(handle) => Some(handle),
                Err(PersistError::Lost { log, .. }) if log == writer.log() => None,
                Err(error) => panic!("the engine broke after {skip} waits: {error}"),
            })
            .collect();
        lost_in_the_middle += usize::from(synced.is_err() && handles.len() == 2);
        let logs = handles.len();
        let reader =
            ChangelogReader::open_simulated(&handles, KeyGroupRange::ALL, vec![store.clone()]).unwrap();
        let logs_read: BTreeSet<_> = reader.map(|change| change.unwrap().log).collect();
        assert_eq!(logs_read.len(), logs);
        if !world.stats().faults.contains_key(&Fault::EngineBreaks) {
            assert!(synced.is_ok() && logs == 3);
            break;
        }
    }
    assert!(lost_in_the_middle > 0, "no change was cut");
}

/// The end of a segment's use that could not be recorded is not forgotten.
#[test]
fn a_disk_that_was_full_goes_on_with_all_segments() {
    const BLOCKS: u64 = 12;
    let world = SimWorld::new(7);
    let options = options().segment_bytes(16 << 10).local_bytes(96 << 10).preemptive_upload(false);
    let (changelog, _) = open(&world, options);
    let mut writer = changelog.create_writer("truncated", KeyGroupRange::ALL).unwrap();
    for _ in 0..BLOCKS {
        writer.append(KeyGroup(0), &[7; 6_000]).unwrap();
        resolved!(changelog, writer.sync()).unwrap();
    }
    world.set_capacity_bytes(Some(0));
    writer.append(KeyGroup(0), &[7; 6_000]).unwrap();
    let synced = writer.sync();
    let step = || (0..100).for_each(|_| _ = changelog.step());
    step();
    writer.truncate(SequenceNumber(BLOCKS)).unwrap();
    step();
    world.set_capacity_bytes(None);
    assert_eq!(resolved!(changelog, synced).unwrap(), SequenceNumber(BLOCKS + 1));
    for _ in 1..BLOCKS {
        writer.append(KeyGroup(0), &[7; 6_000]).unwrap();
        resolved!(changelog, writer.sync()).unwrap();
    }
}

/// A job that tries again until the disk is well leaves no trace of its attempts.
#[test]
fn writers_that_could_not_be_made_are_not_in_the_manifest_afterwards() {
    let world = SimWorld::new(7);
    let (changelog, _) = open(&world, options().segment_bytes(64 << 10).local_bytes(1 << 20));
    world.set_fault(Fault::FilesError, 1000);
    for _ in 0..5 {
        let error = changelog.create_writer("log", KeyGroupRange::ALL).unwrap_err();
        assert!(matches!(error, CreateError::Manifest(_)), "{error}");
    }
    world.clear_faults();
    let mut writer = changelog.create_writer("log", KeyGroupRange::ALL).unwrap();
    writer.append(KeyGroup(0), b"x").unwrap();
    resolved!(changelog, writer.sync()).unwrap();
    let records = Manifest::inspect(&*world.files()).unwrap().records;
    // The tag of a log that was created.
    assert_eq!(records.iter().filter(|record| record[0] == 5).count(), 1);
}

/// The next open knows only what the manifest knows: what stands in a segment whose use is not recorded is lost to it.
#[test]
fn nothing_is_durable_in_a_segment_before_its_use_is_recorded() {
    const USED: u64 = 40;
    let world = SimWorld::new(7);
    let options = || options().segment_bytes(16 << 10).local_bytes(96 << 10);
    let (changelog, store) = open(&world, options());
    let mut writer = changelog.create_writer("log", KeyGroupRange::ALL).unwrap();
    // Long enough that all segments are there, and have been used again.
    for number in 0..USED {
        writer.append(KeyGroup(0), &[number as u8; 6_000]).unwrap();
        resolved!(changelog, writer.sync()).unwrap();
        if number % 4 == 3 {
            resolved!(changelog, writer.persist_durably(SequenceNumber(number - 3))).unwrap();
            writer.truncate(SequenceNumber(number + 1)).unwrap();
        }
    }
    // Nothing can be recorded any more, and nothing has to be created.
    world.set_capacity_bytes(Some(0));
    let mut durable = USED;
    while writer.append(KeyGroup(0), &[durable as u8; 6_000]).is_ok() {
        let synced = writer.sync();
        (0..200).for_each(|_| _ = changelog.step());
        match synced.wait_timeout(Duration::ZERO) {
            Ok(Ok(number)) => durable = number.0,
            _ => break,
        }
        assert!(durable < USED + 12, "there is no room for that many");
    }
    world.power_cut(1);
    drop((writer, changelog));
    world.set_capacity_bytes(None);
    let changelog = open_with(&world, options(), &store);
    let found = changelog.recovered().iter().find(|found| found.name() == "log");
    let end = found.map_or(USED, |found| found.end().0);
    assert!(end >= durable, "{durable} changes were durable, {end} are there");
    let values = found.into_iter().flat_map(|found| found.read(KeyGroupRange::ALL).unwrap());
    let values: Vec<u8> = values.map(|change| change.unwrap().value[0]).collect();
    assert!(values.iter().copied().eq((end - values.len() as u64..end).map(|number| number as u8)));
}

/// An object whose record could not be written is an unfinished upload to the next open, which removes it.
#[test]
fn no_handle_names_an_object_that_a_sick_directory_does_not_know() {
    let mut refused = 0;
    let mut recorded_late = 0;
    for (room_bytes, heals) in (0..600).step_by(40).flat_map(|room| [(room, false), (room, true)]) {
        let world = SimWorld::new(7);
        let options = || {
            let options = options().segment_bytes(64 << 10).local_bytes(1 << 20).preemptive_upload(false);
            options.persist_timeout(Duration::from_secs(2))
        };
        let (changelog, store) = open(&world, options());
        let mut writer = changelog.create_writer("log", KeyGroupRange::ALL).unwrap();
        writer.append(KeyGroup(0), b"one").unwrap();
        resolved!(changelog, writer.sync()).unwrap();
        // Somebody else has taken what was kept for the manifest.
        world.files().remove(RESERVE_NAME).unwrap();
        let used: u64 = world.files().list().unwrap().iter().map(|(_, bytes)| bytes).sum();
        world.set_capacity_bytes(Some(used + room_bytes));
        let first = resolved!(changelog, writer.persist_durably(ZERO));
        let unknown = first.is_err() && !store.objects().is_empty();
        world.inject(Fault::WriteError, 0);
        writer.append(KeyGroup(0), b"two").unwrap();
        let synced = writer.sync();
        (0..200).for_each(|_| _ = changelog.step());
        // It may also wait for room.
        let is_sick = matches!(synced.wait_timeout(Duration::ZERO), Ok(Err(_)));
        if heals {
            world.set_capacity_bytes(None);
        }
        let second = resolved!(changelog, writer.persist_durably(ZERO));
        if unknown && is_sick {
            refused += usize::from(second.is_err());
            recorded_late += usize::from(second.is_ok());
            assert_eq!(second.is_ok(), heals, "{room_bytes} bytes of room: {second:?}");
        }

        world.kill(1);
        drop((writer, changelog));
        world.set_capacity_bytes(None);
        let changelog = open_with(&world, options(), &store);
        (0..100).for_each(|_| _ = changelog.step());
        for handle in [first, second].into_iter().flatten() {
            let expected = handle.to().0 as usize;
            let reader =
                ChangelogReader::open_simulated(&[handle], KeyGroupRange::ALL, vec![store.clone()]).unwrap();
            assert_eq!(reader.map(Result::unwrap).count(), expected, "{room_bytes} bytes of room");
        }
    }
    assert!(refused > 0 && recorded_late > 0, "{refused} refused, {recorded_late} recorded late");
}

/// What one directory has, to the next open: the numbers and values of a log.
fn found(changelog: &Changelog, name: &str) -> Vec<(u64, Vec<u8>)> {
    let log = changelog.recovered().iter().find(|log| log.name() == name).expect("the log is there");
    let changes = log.read(KeyGroupRange::ALL).unwrap().map(Result::unwrap);
    changes.map(|change| (change.number.0, change.value.to_vec())).collect()
}

fn expected(values: &[&[u8]]) -> Vec<(u64, Vec<u8>)> {
    (0..).zip(values.iter().map(|value| value.to_vec())).collect()
}

fn segments(world: &SimWorld) -> BTreeSet<String> {
    let files = world.files().list().unwrap().into_iter().map(|(name, _)| name);
    files.filter(|name| name.starts_with("segment-")).collect()
}

/// Nothing is kept longer than it is needed, and nothing sent before it is asked for.
fn unkept() -> Options {
    let options = options().segment_bytes(16 << 10).local_bytes(256 << 10).local_retention_bytes(0);
    options.preemptive_upload(false)
}

/// A segment to which a write failed is removed when it is released. The manifest must not name it then.
#[test]
fn a_segment_file_stays_until_its_release_is_durable() {
    let world = SimWorld::new(7);
    let (changelog, store) = open(&world, unkept());
    let mut writer = changelog.create_writer("log", KeyGroupRange::ALL).unwrap();
    writer.append(KeyGroup(0), b"one").unwrap();
    resolved!(changelog, writer.sync()).unwrap();
    world.inject(Fault::WriteError, 0);
    writer.append(KeyGroup(0), b"two").unwrap();
    resolved!(changelog, writer.sync()).unwrap();
    let before = segments(&world);
    // Nothing can be recorded any more, and nothing is kept for that.
    world.files().remove(RESERVE_NAME).unwrap();
    world.set_capacity_bytes(Some(0));
    writer.truncate(SequenceNumber(1)).unwrap();
    (0..200).for_each(|_| _ = changelog.step());
    assert!(segments(&world).is_superset(&before));
    world.kill(1);
    drop((writer, changelog));
    world.set_capacity_bytes(None);
    let changelog = open_with(&world, unkept(), &store);
    assert_eq!(found(&changelog, "log"), expected(&[b"one", b"two"]));
}

#[test]
fn a_directory_out_of_service_keeps_the_segments_that_its_manifest_names() {
    let world = SimWorld::new(7);
    let (changelog, store) = open(&world, unkept());
    let [mut writer, mut broken] =
        ["log", "broken"].map(|name| changelog.create_writer(name, KeyGroupRange::ALL).unwrap());
    writer.append(KeyGroup(0), b"one").unwrap();
    resolved!(changelog, writer.sync()).unwrap();
    world.inject(Fault::WriteError, 0);
    writer.append(KeyGroup(0), b"two").unwrap();
    resolved!(changelog, writer.sync()).unwrap();
    let before = segments(&world);
    world.hold(true);
    broken.append(KeyGroup(0), b"in flight").unwrap();
    let synced = broken.sync();
    changelog.step();
    world.inject(Fault::EngineBreaks, 0);
    assert!(resolved!(changelog, synced).is_err());
    resolved!(changelog, writer.persist_durably(ZERO)).unwrap();
    writer.truncate(SequenceNumber(2)).unwrap();
    (0..200).for_each(|_| _ = changelog.step());
    assert!(segments(&world).is_superset(&before), "what the next open looks for");
    world.kill(1);
    world.hold(false);
    drop((writer, broken, changelog));
    let changelog = open_with(&world, unkept(), &store);
    assert_eq!(found(&changelog, "log"), expected(&[b"one", b"two"]));
}
