//! Writers and their lanes: threads, large values, closures, limits; and the verbs of a log's life.

mod common;

use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc;
use std::time::Duration;

use common::{collect, eventually, objects, open, options, read};
use tidelog::{
    AppendError, Changelog, ChangelogWriter, ControlError, KeyGroup, KeyGroupRange, OpenError, PersistError,
    SequenceNumber,
};

const ZERO: SequenceNumber = SequenceNumber::ZERO;

fn value(number: u64, len: usize) -> Vec<u8> {
    (0..len as u64).map(|at| (number.wrapping_mul(31).wrapping_add(at * 7) >> 1) as u8).collect()
}

#[test]
fn a_log_stays_in_order_while_its_writer_moves_between_threads() {
    let dir = tempfile::tempdir().unwrap();
    let changelog = open(dir.path());
    let mut writer = changelog.create_writer("moving", KeyGroupRange::new(0, 3).unwrap()).unwrap();
    // Other writers keep the lanes of both threads busy, so that a marker is not the first frame in its lane.
    let (to_other, other_in) = mpsc::channel::<(ChangelogWriter, u64)>();
    let (to_main, main_in) = mpsc::channel::<(ChangelogWriter, u64)>();
    let mut noise = changelog.create_writer("noise", KeyGroupRange::ALL).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut noise = changelog.create_writer("more noise", KeyGroupRange::ALL).unwrap();
            for (mut writer, number) in other_in {
                noise.append(KeyGroup(9), &[7; 3000]).unwrap();
                writer.append(KeyGroup((number % 4) as u16), &value(number, 100)).unwrap();
                to_main.send((writer, number + 1)).unwrap();
            }
            drop(to_main);
        });
        let mut number = 0;
        for _ in 0..500 {
            noise.append(KeyGroup(8), &[8; 5000]).unwrap();
            writer.append(KeyGroup((number % 4) as u16), &value(number, 100)).unwrap();
            to_other.send((writer, number + 1)).unwrap();
            (writer, number) = main_in.recv().unwrap();
        }
        drop(to_other);
        let handle = writer.persist_durably(ZERO).wait().unwrap();
        let content = read(&[handle], KeyGroupRange::ALL);
        for key_group in 0..4 {
            let expected: Vec<_> =
                (0..1000).filter(|n| n % 4 == key_group).map(|n| (n, value(n, 100))).collect();
            assert_eq!(content[&(writer.log(), Some(key_group as u16))], expected);
        }
    });
}

#[test]
fn threads_that_end_give_their_lanes_back() {
    let dir = tempfile::tempdir().unwrap();
    // A memory budget with room for four lanes.
    let changelog = Changelog::open(
        options(dir.path()).lane_bytes(1 << 20).memory_bytes(32 << 20).value_bytes_max(1 << 20),
    )
    .unwrap();
    let mut writer = changelog.create_writer("passed on", KeyGroupRange::ALL).unwrap();
    for number in 0..40 {
        writer = std::thread::scope(|scope| {
            scope
                .spawn(move || {
                    assert_eq!(writer.append(KeyGroup(0), &value(number, 64)), Ok(SequenceNumber(number)));
                    writer
                })
                .join()
                .unwrap()
        });
    }
    let handle = writer.persist_durably(ZERO).wait().unwrap();
    let expected: Vec<_> = (0..40).map(|n| (n, value(n, 64))).collect();
    assert_eq!(read(&[handle], KeyGroupRange::ALL)[&(writer.log(), Some(0))], expected);
}

#[test]
fn more_threads_than_lanes_share_one() {
    let dir = tempfile::tempdir().unwrap();
    let changelog = Changelog::open(
        options(dir.path()).lane_bytes(4 << 20).memory_bytes(32 << 20).value_bytes_max(1 << 20),
    )
    .unwrap();
    let barrier = std::sync::Barrier::new(8);
    let handles: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..8)
            .map(|_| {
                scope.spawn(|| {
                    let mut writer = changelog.create_writer("crowd", KeyGroupRange::ALL).unwrap();
                    barrier.wait();
                    for number in 0..2000 {
                        writer.append(KeyGroup(5), &value(number, 200)).unwrap();
                        if number % 100 == 0 {
                            writer.append_with(KeyGroup(6), 4, |slice| slice.fill(3)).unwrap();
                        }
                    }
                    barrier.wait();
                    writer.persist_durably(ZERO).wait().unwrap()
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let content = read(&handles, KeyGroupRange::ALL);
    for handle in &handles {
        let values: Vec<_> =
            content[&(handle.log(), Some(5))].iter().map(|(_, value)| value.clone()).collect();
        assert_eq!(values, (0..2000).map(|n| value(n, 200)).collect::<Vec<_>>());
        assert_eq!(content[&(handle.log(), Some(6))].len(), 20);
    }
}

#[test]
fn an_append_while_the_thread_is_torn_down_is_not_lost() {
    thread_local! {
        static LAST: RefCell<Option<Box<dyn FnOnce()>>> = const { RefCell::new(None) };
        static TRIGGER: RefCell<Option<Trigger>> = const { RefCell::new(None) };
    }
    struct Trigger;
    impl Drop for Trigger {
        fn drop(&mut self) {
            if let Ok(Some(last)) = LAST.try_with(|last| last.borrow_mut().take()) {
                last();
            }
        }
    }
    let dir = tempfile::tempdir().unwrap();
    let changelog = open(dir.path());
    for order in [false, true] {
        let mut writer = changelog.create_writer("dying", KeyGroupRange::ALL).unwrap();
        let (sender, receiver) = mpsc::channel();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                // Destructors run in the reverse order of first use: once before the lane's, once after.
                LAST.with(|_| ());
                if order {
                    TRIGGER.with(|trigger| *trigger.borrow_mut() = Some(Trigger));
                }
                writer.append(KeyGroup(0), b"alive").unwrap();
                TRIGGER.with(|trigger| *trigger.borrow_mut() = Some(Trigger));
                let last = Box::new(move || {
                    writer.append(KeyGroup(0), b"dying").unwrap();
                    writer.append(KeyGroup(0), b"dying still").unwrap();
                    sender.send(writer).unwrap();
                });
                LAST.with(|slot| *slot.borrow_mut() = Some(last));
            });
        });
        let mut writer = receiver.recv().expect("the destructor ran");
        writer.append(KeyGroup(0), b"elsewhere").unwrap();
        let handle = writer.persist_durably(ZERO).wait().unwrap();
        let values: Vec<_> = read(&[handle], KeyGroupRange::ALL)[&(writer.log(), Some(0))]
            .iter()
            .map(|(_, value)| String::from_utf8(value.clone()).unwrap())
            .collect();
        assert_eq!(values, ["alive", "dying", "dying still", "elsewhere"]);
    }
}

#[test]
fn values_of_every_size_come_back() {
    let dir = tempfile::tempdir().unwrap();
    let max = 5 << 20;
    let changelog =
        Changelog::open(options(dir.path()).lane_bytes(1 << 20).value_bytes_max(max).local_bytes(64 << 20))
            .unwrap();
    let mut writer = changelog.create_writer("sizes", KeyGroupRange::new(0, 9).unwrap()).unwrap();
    let eighth = (1 << 20) / 8;
    let sizes = [
        0,
        1,
        7,
        8,
        9,
        15,
        16,
        17,
        255,
        4096,
        32 << 10,
        64 << 10,
        100_000,
        eighth - 9,
        eighth - 8,
        eighth - 7,
        eighth,
        (256 << 10) - 128,
        256 << 10,
        1 << 20,
        3_000_001,
        max,
    ];
    for (number, len) in sizes.into_iter().enumerate() {
        let bytes = value(number as u64, len);
        match number % 3 {
            0 => writer.append(KeyGroup(number as u16 % 10), &bytes),
            1 => writer.append_with(KeyGroup(number as u16 % 10), len, |slice| slice.copy_from_slice(&bytes)),
            _ => writer.append_metadata(&bytes),
        }
        .unwrap();
    }
    assert_eq!(
        writer.append(KeyGroup(0), &vec![0; max + 1]),
        Err(AppendError::TooLarge { len: max + 1, max })
    );
    assert_eq!(
        writer.append_with(KeyGroup(0), max + 1, |_| panic!("must not be called")),
        Err(AppendError::TooLarge { len: max + 1, max })
    );
    let handle = writer.persist_durably(ZERO).wait().unwrap();
    let log = writer.log();
    drop(writer);
    changelog.close(Duration::from_secs(20)).unwrap();
    let content = read(std::slice::from_ref(&handle), KeyGroupRange::ALL);
    for (number, len) in sizes.into_iter().enumerate() {
        let group = (number % 3 != 2).then_some(number as u16 % 10);
        let found = content[&(log, group)].iter().find(|(at, _)| *at == number as u64).unwrap();
        assert!(found.1 == value(number as u64, len), "value {number} of {len} bytes");
    }
    // The same from the local blocks alone.
    let changelog =
        Changelog::open(options(dir.path()).lane_bytes(1 << 20).value_bytes_max(max).local_bytes(64 << 20))
            .unwrap();
    let recovered = changelog.recovered().iter().find(|found| found.log() == log).unwrap();
    assert_eq!(recovered.end(), SequenceNumber(sizes.len() as u64));
    assert_eq!(collect(recovered.read(KeyGroupRange::ALL).unwrap()), content);
}

#[test]
fn a_closure_that_panics_appends_nothing_and_poisons_its_writer_only() {
    let dir = tempfile::tempdir().unwrap();
    let changelog = open(dir.path());
    let mut writer = changelog.create_writer("careless", KeyGroupRange::ALL).unwrap();
    let mut other = changelog.create_writer("careful", KeyGroupRange::ALL).unwrap();
    writer.append(KeyGroup(0), b"before").unwrap();
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        let _ = writer.append_with(KeyGroup(0), 100, |slice| {
            slice.fill(1);
            panic!("half-way");
        });
    }));
    assert!(panicked.is_err());
    assert_eq!(writer.next_sequence_number(), SequenceNumber(1));
    assert_eq!(writer.append(KeyGroup(0), b"after"), Err(AppendError::Poisoned));
    other.append(KeyGroup(0), b"fine").unwrap();
    let handles = [writer.persist_durably(ZERO).wait().unwrap(), other.persist_durably(ZERO).wait().unwrap()];
    let content = read(&handles, KeyGroupRange::ALL);
    assert_eq!(content[&(writer.log(), Some(0))], [(0, b"before".to_vec())]);
    assert_eq!(content[&(other.log(), Some(0))], [(0, b"fine".to_vec())]);
}

#[test]
fn an_append_within_a_closure_is_refused_not_deadlocked() {
    let dir = tempfile::tempdir().unwrap();
    let changelog = open(dir.path());
    let mut outer = changelog.create_writer("outer", KeyGroupRange::ALL).unwrap();
    let mut inner = changelog.create_writer("inner", KeyGroupRange::ALL).unwrap();
    let mut seen = None;
    outer.append_with(KeyGroup(0), 8, |_| seen = Some(inner.append(KeyGroup(0), b"nested"))).unwrap();
    assert_eq!(seen, Some(Err(AppendError::Nested)));
    assert_eq!(inner.append(KeyGroup(0), b"later"), Ok(ZERO));
}

#[test]
fn bad_input_is_refused_before_anything_changes() {
    let dir = tempfile::tempdir().unwrap();
    let changelog = open(dir.path());
    let range = KeyGroupRange::new(10, 19).unwrap();
    let mut writer = changelog.create_writer("strict", range).unwrap();
    for key_group in [KeyGroup(9), KeyGroup(20)] {
        let error = AppendError::KeyGroupOutOfRange { key_group, range };
        assert_eq!(writer.append(key_group, b"x"), Err(error));
        assert_eq!(writer.try_append(key_group, b"x"), Err(error));
        assert_eq!(writer.append_with(key_group, 1, |_| ()), Err(error));
        assert!(error.to_string().contains("10-19"), "{error}");
    }
    writer.append(KeyGroup(10), b"x").unwrap();
    let next = SequenceNumber(1);
    let log = writer.log();
    let beyond = SequenceNumber(2);
    assert_eq!(writer.truncate(beyond), Err(ControlError::Beyond { log, to: beyond, next }));
    assert_eq!(writer.confirm(beyond), Err(ControlError::Beyond { log, to: beyond, next }));
    assert_eq!(writer.reset(next, ZERO), Err(ControlError::UpsideDown { from: next, to: ZERO }));
    assert!(matches!(
        writer.persist_durably(beyond).wait(),
        Err(PersistError::OutOfRange { from, .. }) if from == beyond
    ));
    writer.truncate(next).unwrap();
    assert!(matches!(writer.persist_durably(ZERO).wait(), Err(PersistError::OutOfRange { .. })));
    assert!(changelog.create_writer("x".repeat(2000), range).is_err());
    match Changelog::open(options(dir.path())) {
        Err(OpenError::Directory(error)) => assert!(error.to_string().contains("in use"), "{error}"),
        other => panic!("a second opener must be refused, got {other:?}"),
    }
}

#[test]
fn writers_of_one_checkpoint_share_one_object() {
    let dir = tempfile::tempdir().unwrap();
    let options =
        options(dir.path()).add_directory(dir.path().join("second")).batch_delay(Duration::from_secs(5));
    let changelog = Changelog::open(options).unwrap();
    let mut writers: Vec<_> = (0..64)
        .map(|n| changelog.create_writer(format!("writer {n}"), KeyGroupRange::new(n, n).unwrap()).unwrap())
        .collect();
    for round in 1..=3 {
        for (n, writer) in writers.iter_mut().enumerate() {
            for number in 0..20 {
                writer.append(KeyGroup(n as u16), &value(number, 50)).unwrap();
            }
        }
        let pending: Vec<_> = writers.iter_mut().map(|writer| writer.persist_durably(ZERO)).collect();
        let handles: Vec<_> = pending.into_iter().map(|pending| pending.wait().unwrap()).collect();
        assert_eq!(objects(dir.path()).len(), round, "one object for all writers of both directories");
        assert_eq!(handles[5].extents().len(), round, "earlier objects are referred to");
        let content = read(&handles, KeyGroupRange::ALL);
        assert_eq!(content.len(), 64);
        assert!(content.values().all(|changes| changes.len() == 20 * round));
    }
}

#[test]
fn nothing_new_makes_no_object() {
    let dir = tempfile::tempdir().unwrap();
    let changelog = open(dir.path());
    let mut writer = changelog.create_writer("quiet", KeyGroupRange::ALL).unwrap();
    let empty = writer.persist_durably(ZERO).wait().unwrap();
    assert!(empty.extents().is_empty());
    assert_eq!(objects(dir.path()).len(), 0);
    writer.append(KeyGroup(1), b"one").unwrap();
    let first = writer.persist_durably(ZERO).wait().unwrap();
    let again = writer.persist_durably(ZERO).wait().unwrap();
    assert_eq!(first, again);
    assert_eq!(objects(dir.path()).len(), 1);
    // Declined or not: the next persist refers to the same changes.
    writer.reset(ZERO, SequenceNumber(1)).unwrap();
    writer.append(KeyGroup(1), b"two").unwrap();
    let both = writer.persist_durably(ZERO).wait().unwrap();
    assert_eq!(read(&[both], KeyGroupRange::ALL)[&(writer.log(), Some(1))].len(), 2);
}

#[test]
fn an_object_goes_when_the_last_log_in_it_is_truncated() {
    for directories in 1..=2 {
        an_object_of_two_logs_goes(directories);
    }
}

fn an_object_of_two_logs_goes(directories: usize) {
    let dir = tempfile::tempdir().unwrap();
    // On a slow machine too, one object is made of both persists.
    let mut options = options(dir.path()).batch_delay(Duration::from_secs(5));
    for directory in 1..directories {
        options = options.add_directory(dir.path().join(directory.to_string()));
    }
    let changelog = Changelog::open(options).unwrap();
    let mut one = changelog.create_writer("one", KeyGroupRange::ALL).unwrap();
    let mut two = changelog.create_writer("two", KeyGroupRange::ALL).unwrap();
    one.append(KeyGroup(1), b"a").unwrap();
    two.append(KeyGroup(2), b"b").unwrap();
    let pending = (one.persist_durably(ZERO), two.persist_durably(ZERO));
    pending.0.wait().unwrap();
    let handle = pending.1.wait().unwrap();
    assert_eq!(objects(dir.path()).len(), 1);
    one.truncate_and_close();
    // A round trip through the uploader, so that the truncation was carried out.
    two.append(KeyGroup(2), b"c").unwrap();
    two.persist_durably(ZERO).wait().unwrap();
    assert_eq!(objects(dir.path()).len(), 2);
    assert_eq!(read(&[handle], KeyGroupRange::ALL)[&(two.log(), Some(2))], [(0, b"b".to_vec())]);
    two.truncate(SequenceNumber(1)).unwrap();
    eventually("the first object is deleted", || objects(dir.path()).len() == 1);
    let control = two.control();
    drop(two);
    control.truncate(SequenceNumber(2)).unwrap();
    eventually("the second object is deleted", || objects(dir.path()).is_empty());
    control.truncate(SequenceNumber(2)).unwrap();
}

#[test]
fn a_persist_that_was_asked_for_finishes_after_its_writer_is_gone() {
    let dir = tempfile::tempdir().unwrap();
    let changelog = open(dir.path());
    let mut writer = changelog.create_writer("leaving", KeyGroupRange::ALL).unwrap();
    writer.append(KeyGroup(1), b"last words").unwrap();
    let log = writer.log();
    let pending = writer.persist_durably(ZERO);
    writer.close();
    let handle = pending.wait().unwrap();
    assert_eq!(read(&[handle], KeyGroupRange::ALL)[&(log, Some(1))], [(0, b"last words".to_vec())]);
}

#[test]
fn metadata_is_read_first_over_all_handles() {
    let dir = tempfile::tempdir().unwrap();
    let changelog = open(dir.path());
    let mut handles = Vec::new();
    for name in ["first", "second"] {
        let mut writer = changelog.create_writer(name, KeyGroupRange::ALL).unwrap();
        writer.append(KeyGroup(1), b"data before").unwrap();
        writer.append_metadata(b"registration").unwrap();
        writer.append(KeyGroup(0), b"data after").unwrap();
        handles.push(writer.persist_durably(ZERO).wait().unwrap());
    }
    let changes: Vec<_> = tidelog::ChangelogReader::open(&handles, KeyGroupRange::new(1, 1).unwrap())
        .unwrap()
        .map(Result::unwrap)
        .collect();
    let groups: Vec<_> = changes.iter().map(|change| change.key_group.map(|group| group.0)).collect();
    assert_eq!(groups, [None, None, Some(1), Some(1)]);
}

#[test]
fn closing_waits_for_the_deletion_of_what_nobody_needs() {
    let dir = tempfile::tempdir().unwrap();
    let changelog = open(dir.path());
    let mut writer = changelog.create_writer("many", KeyGroupRange::ALL).unwrap();
    for number in 0..40 {
        writer.append(KeyGroup(1), b"one").unwrap();
        writer.persist_durably(SequenceNumber(number)).wait().unwrap();
    }
    assert_eq!(objects(dir.path()).len(), 40);
    writer.truncate_and_close();
    changelog.close(Duration::from_secs(30)).unwrap();
    assert_eq!(objects(dir.path()), [""; 0]);
}

#[test]
fn closing_refuses_appends_and_keeps_what_was_synced() {
    let dir = tempfile::tempdir().unwrap();
    let changelog = open(dir.path());
    let mut writer = changelog.create_writer("kept", KeyGroupRange::ALL).unwrap();
    writer.append(KeyGroup(3), b"kept").unwrap();
    let log = writer.log();
    changelog.close(Duration::from_secs(20)).unwrap();
    assert_eq!(writer.append(KeyGroup(3), b"late"), Err(AppendError::Closed));
    assert!(writer.sync().wait().is_err());
    assert!(matches!(writer.persist_durably(ZERO).wait(), Err(PersistError::Closed)));
    drop(writer);
    let changelog = open(dir.path());
    let recovered = &changelog.recovered()[0];
    assert_eq!((recovered.log(), recovered.name(), recovered.end()), (log, "kept", SequenceNumber(1)));
    let handle = recovered.persist_durably(ZERO).wait().unwrap();
    let content = collect(recovered.read(KeyGroupRange::ALL).unwrap());
    assert_eq!(content[&(log, Some(3))], [(0, b"kept".to_vec())]);
    assert_eq!(read(&[handle], KeyGroupRange::ALL), content);
    recovered.discard();
    eventually("its object is deleted", || objects(dir.path()).is_empty());
    changelog.close(Duration::from_secs(20)).unwrap();
    assert!(open(dir.path()).recovered().is_empty());
}

#[test]
fn futures_need_no_particular_executor() {
    let dir = tempfile::tempdir().unwrap();
    let changelog = open(dir.path());
    let mut writer = changelog.create_writer("async", KeyGroupRange::ALL).unwrap();
    let handle = tidelog_upload::block_on(async {
        writer.room(100).await.unwrap();
        writer.try_append(KeyGroup(1), &[1; 100]).unwrap();
        assert_eq!(writer.sync().await.unwrap(), SequenceNumber(1));
        assert!(matches!(writer.room(1 << 30).await, Err(AppendError::TooLarge { .. })));
        assert_eq!(writer.when_durable(SequenceNumber(1)).await.unwrap(), SequenceNumber(1));
        writer.persist_durably(ZERO).await.unwrap()
    });
    assert_eq!(writer.durable_sequence_number(), SequenceNumber(1));
    assert_eq!(handle.to(), SequenceNumber(1));
    // A dropped future leaves no mess.
    writer.append(KeyGroup(1), b"x").unwrap();
    drop(writer.persist_durably(ZERO));
    drop(writer.sync());
    let handle = writer.persist_durably(ZERO).wait().unwrap();
    assert_eq!(read(&[handle], KeyGroupRange::ALL)[&(writer.log(), Some(1))].len(), 2);
}
