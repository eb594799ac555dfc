//! What becomes of persists when buckets fail, are slow, refuse, or are gone; in virtual time.

mod dead;
mod deletions;
mod directories;
mod guards;
mod health;
#[path = "../../upload/tests/common/hooked.rs"]
mod hooked;
mod machine;
mod overlap;

use std::sync::atomic::Ordering;
use std::time::Duration;

use tidelog::{Changelog, KeyGroup, PersistError};
use tidelog_upload::sim::Chances;
use tidelog_upload::{Body, Lane, Operation, Store, StoreErrorKind, UploadOptions, block_on};

use machine::{Machine, SECOND, ZERO, writer};

#[test]
fn a_persist_outlives_the_failure_of_its_object() {
    let machine = Machine::new(1);
    let changelog = machine.open(machine.options());
    let [mut first, mut second] = ["first", "second"].map(|name| writer(&changelog, name));
    first.append(KeyGroup(1), b"one").unwrap();
    machine.stores[0].inner.set_dead(true);
    let failing = first.persist_durably(ZERO);
    machine.pass(&changelog, 20 * SECOND);
    let failing = failing.wait_timeout(Duration::ZERO).expect_err("the bucket is dead");
    second.append(KeyGroup(2), b"two").unwrap();
    let second = second.persist_durably(ZERO);
    machine.stores[0].inner.heal();
    let handles = [failing, second]
        .map(|future| machine.within(&changelog, 60 * SECOND, future).expect("it is back").unwrap());
    assert_eq!(machine.values(&handles[0]), [b"one".to_vec()]);
    assert_eq!(machine.values(&handles[1]), [b"two".to_vec()]);
}

#[test]
fn an_object_that_cannot_become_complete_is_followed_by_another_for_the_same_persist() {
    let machine = Machine::new(1);
    let changelog = machine.open(machine.options());
    let mut writer = writer(&changelog, "log");
    // More than is kept until the commit: nobody could send all of it again.
    for change in 0..300u64 {
        machine.append(&changelog, &mut writer, change, &change.to_le_bytes().repeat(128));
    }
    machine.stores[0].forget.store(true, Ordering::Relaxed);
    let handle = machine.within(&changelog, 10 * SECOND, writer.persist_durably(ZERO));
    let handle = handle.expect("soon").unwrap();
    assert!(!machine.stores[0].forget.load(Ordering::Relaxed));
    assert_eq!(machine.values(&handle).len(), 300);
}

#[test]
fn persists_behind_an_object_of_others_say_what_made_it_fail() {
    let machine = Machine::new(1);
    let changelog = machine.open(machine.options().persist_timeout(5 * SECOND));
    let mut writer = writer(&changelog, "log");
    *machine.stores[0].deny_as.lock().unwrap() = StoreErrorKind::Unreachable;
    machine.stores[0].deny.store(true, Ordering::Relaxed);
    let mut futures = Vec::new();
    for _ in 0..8 {
        writer.append(KeyGroup(1), b"one").unwrap();
        futures.push(writer.persist_durably(ZERO));
        machine.pass(&changelog, SECOND);
    }
    for future in futures {
        let Some(Err(error)) = machine.within(&changelog, 10 * SECOND, future) else { panic!("no bucket") };
        let PersistError::Timeout { last: Some(_), .. } = &error else { panic!("{error:?}") };
        assert!(error.to_string().contains("mend that"), "{error}");
    }
}

#[test]
fn a_persist_ends_at_its_deadline_and_says_why() {
    let machine = Machine::new(1);
    let changelog = machine.open(machine.options().persist_timeout(5 * SECOND));
    let mut writer = writer(&changelog, "log");
    writer.append(KeyGroup(1), b"one").unwrap();
    machine.stores[0].inner.set_dead(true);
    let future = writer.persist_durably(ZERO);
    match machine.within(&changelog, 6 * SECOND, future) {
        Some(Err(error @ PersistError::Timeout { .. })) => {
            let text = error.to_string();
            assert!(text.contains("5s") && text.contains("persist again"), "{text}");
        }
        other => panic!("{other:?}"),
    }
    // It was only that: nothing is lost, and the next one succeeds.
    machine.stores[0].inner.heal();
    let future = writer.persist_durably(ZERO);
    let handle = machine.within(&changelog, 60 * SECOND, future).expect("in time").unwrap();
    assert_eq!(machine.values(&handle), [b"one".to_vec()]);
}

#[test]
fn what_does_not_pass_by_itself_is_told_at_once_and_only_to_those_who_asked() {
    let machine = Machine::new(1);
    let changelog = machine.open(machine.options());
    let [mut denied, mut later] = ["denied", "later"].map(|name| writer(&changelog, name));
    denied.append(KeyGroup(1), b"one").unwrap();
    machine.stores[0].deny.store(true, Ordering::Relaxed);
    for kind in [StoreErrorKind::Denied, StoreErrorKind::Misconfigured] {
        *machine.stores[0].deny_as.lock().unwrap() = kind.clone();
        match machine.within(&changelog, SECOND, denied.persist_durably(ZERO)) {
            Some(Err(PersistError::Upload { source, .. })) => assert_eq!(*source.kind(), kind),
            other => panic!("{other:?}"),
        }
    }
    machine.stores[0].deny.store(false, Ordering::Relaxed);
    later.append(KeyGroup(1), b"two").unwrap();
    let handle =
        machine.within(&changelog, 10 * SECOND, later.persist_durably(ZERO)).expect("in time").unwrap();
    assert_eq!(machine.values(&handle), [b"two".to_vec()]);
    let handle =
        machine.within(&changelog, 10 * SECOND, denied.persist_durably(ZERO)).expect("in time").unwrap();
    assert_eq!(machine.values(&handle), [b"one".to_vec()]);
}

/// What they are to persist is in no block: that has to wait for an upload that makes room for it.
#[test]
fn on_a_full_disk_those_who_wait_are_told_too_what_does_not_pass_by_itself() {
    let machine = Machine::new(1);
    let changelog = machine.open(machine.options());
    let mut writer = writer(&changelog, "log");
    machine.stores[0].deny.store(true, Ordering::Relaxed);
    let (mut appended, mut refused) = (Vec::new(), 0);
    while refused < 20 {
        let value = (appended.len() as u64).to_le_bytes().repeat(128);
        if writer.try_append(KeyGroup(1), &value).is_ok() {
            (refused, _) = (0, appended.push(value));
        } else {
            refused += 1;
            machine.pass(&changelog, SECOND);
        }
    }
    for _ in 0..2 {
        // Attempts to make room go on, with pauses of up to eight seconds.
        match machine.within(&changelog, 10 * SECOND, writer.persist_durably(ZERO)) {
            Some(Err(PersistError::Upload { source, .. })) => {
                assert_eq!(*source.kind(), StoreErrorKind::Denied);
            }
            other => panic!("{other:?}"),
        }
    }
    machine.stores[0].deny.store(false, Ordering::Relaxed);
    let handle = machine.within(&changelog, 60 * SECOND, writer.persist_durably(ZERO));
    assert!(machine.values(&handle.expect("in time").unwrap()) == appended);
}

#[test]
fn with_one_bucket_of_two_dead_persists_go_on_and_nothing_stays_behind() {
    for dead in 0..2 {
        let machine = Machine::new(2);
        let changelog = machine.open(machine.options());
        let mut writer = writer(&changelog, "log");
        machine.stores[dead].inner.set_dead(true);
        for round in 0u64..5 {
            for change in 0u64..40 {
                machine.append(
                    &changelog,
                    &mut writer,
                    change,
                    &(round * 40 + change).to_le_bytes().repeat(200),
                );
            }
            let handle = machine.within(&changelog, 10 * SECOND, writer.persist_durably(ZERO));
            let handle = handle.expect("the other bucket works").unwrap();
            let elsewhere = machine.stores[dead].url();
            assert!(handle.objects().all(|(bucket, _)| bucket != elsewhere), "{handle:?}");
            assert_eq!(machine.values(&handle).len() as u64, (round + 1) * 40);
        }
        machine.stores[dead].inner.heal();
        writer.truncate_and_close();
        machine.pass(&changelog, 60 * SECOND);
        assert_eq!(machine.objects(), [""; 0]);
        assert!(machine.stores.iter().all(|store| store.inner.open_uploads().is_empty()));
    }
}

#[test]
fn requests_that_come_late_leave_nothing_behind() {
    let machine = Machine::new(2);
    let changelog = machine.open(machine.options());
    let mut writer = writer(&changelog, "log");
    for operation in [Operation::Put, Operation::Create, Operation::PutPart, Operation::Complete] {
        let chances = Chances { late: 0.3, after: 0.2, ..Chances::default() };
        machine.stores.iter().for_each(|store| store.inner.set_chances(operation, chances));
    }
    for round in 0..10u64 {
        for change in 0..40u64 {
            machine.append(&changelog, &mut writer, change, &(round * 40 + change).to_le_bytes().repeat(300));
        }
        let handle = machine.within(&changelog, 60 * SECOND, writer.persist_durably(ZERO));
        let handle = handle.expect("most requests succeed").unwrap();
        assert_eq!(machine.values(&handle).len() as u64, (round + 1) * 40);
    }
    machine.stores.iter().for_each(|store| store.inner.heal());
    machine.stores.iter().for_each(|store| store.inner.settle());
    machine.pass(&changelog, 30 * SECOND);
    let handle = machine.within(&changelog, SECOND, writer.persist_durably(ZERO)).expect("in time").unwrap();
    let named: Vec<String> = handle.objects().map(|(_, object)| object.to_owned()).collect();
    let strays: Vec<String> =
        machine.objects().into_iter().filter(|object| !named.contains(object)).collect();
    assert_eq!(strays, [""; 0]);
    writer.truncate_and_close();
    machine.pass(&changelog, 30 * SECOND);
    assert_eq!(machine.objects(), [""; 0]);
}

#[test]
fn a_bucket_that_is_not_configured_any_more_keeps_what_it_has() {
    let mut machine = Machine::new(2);
    let changelog = machine.open(machine.options());
    let mut writer = writer(&changelog, "log");
    writer.append(KeyGroup(1), b"one").unwrap();
    machine.stores[0].inner.set_dead(true);
    let handle =
        machine.within(&changelog, 30 * SECOND, writer.persist_durably(ZERO)).expect("in time").unwrap();
    drop(writer);
    drop(changelog);
    machine.stores[0].inner.heal();
    let gone = machine.stores.pop().expect("two buckets");
    let changelog = machine.open(machine.options());
    machine.pass(&changelog, 30 * SECOND);
    for log in changelog.recovered() {
        log.discard();
    }
    machine.pass(&changelog, 30 * SECOND);
    drop(changelog);
    let objects: Vec<String> = gone.inner.objects().into_keys().collect();
    assert_eq!(objects, handle.objects().map(|(_, object)| object.to_owned()).collect::<Vec<_>>());
    // It is there again, and what nobody needs goes.
    machine.stores.push(gone);
    let changelog = machine.open(machine.options());
    machine.pass(&changelog, 30 * SECOND);
    assert_eq!(machine.objects(), [""; 0]);
}

#[test]
fn what_a_crash_leaves_in_any_bucket_is_swept_at_the_next_open() {
    for crash_after in 0..12 {
        let machine = Machine::new(2);
        let changelog = machine.open(machine.options());
        let mut writer = writer(&changelog, "log");
        for change in 0..60u64 {
            machine.append(&changelog, &mut writer, change, &change.to_le_bytes().repeat(200));
        }
        let synced = writer.sync();
        machine.pass(&changelog, SECOND / 10);
        assert!(synced.wait_timeout(Duration::ZERO).is_ok());
        // The process dies in the middle of its upload.
        machine.stores.iter().for_each(|store| store.die_after(crash_after));
        drop(writer.persist_durably(ZERO));
        machine.pass(&changelog, SECOND);
        machine.worlds[0].kill(1);
        drop(writer);
        drop(changelog);
        machine.stores.iter().for_each(|store| store.revive());
        let changelog = machine.open(machine.options());
        machine.pass(&changelog, 30 * SECOND);
        let named: Vec<String> = changelog
            .recovered()
            .iter()
            .filter_map(|log| {
                let future = log.persist_durably(log.start());
                machine.within(&changelog, 30 * SECOND, future)?.ok()
            })
            .flat_map(|handle| handle.objects().map(|(_, object)| object.to_owned()).collect::<Vec<_>>())
            .collect();
        machine.pass(&changelog, 30 * SECOND);
        let mut objects = machine.objects();
        objects.retain(|object| !named.contains(object));
        assert_eq!(objects, [""; 0], "died after {crash_after} requests");
        let uploads: Vec<String> =
            machine.stores.iter().flat_map(|store| store.inner.open_uploads()).collect();
        assert_eq!(uploads, [""; 0], "died after {crash_after} requests");
    }
}

#[test]
fn what_a_crash_left_is_swept_at_once_and_what_arrives_late_ten_seconds_later() {
    let machine = Machine::new(1);
    let changelog = machine.open(machine.options());
    let mut writer = writer(&changelog, "log");
    writer.append(KeyGroup(1), b"one").unwrap();
    machine.stores[0].die_after(1);
    drop(writer.persist_durably(ZERO));
    machine.pass(&changelog, SECOND);
    machine.worlds[0].kill(1);
    drop((writer, changelog));
    machine.stores[0].revive();
    let left = machine.objects();
    assert_eq!(left.len(), 1, "{left:?}");
    // A process that does not live for long clears what it finds.
    let changelog = machine.open(machine.options());
    machine.pass(&changelog, SECOND / 10);
    assert_eq!(machine.objects(), [""; 0]);
    let late = Body::new(vec![bytes::Bytes::from_static(b"late")]);
    block_on(machine.stores[0].inner.put(&left[0], late, Lane::Primary)).unwrap();
    machine.pass(&changelog, 5 * SECOND);
    assert_eq!(machine.objects(), left);
    machine.pass(&changelog, 6 * SECOND);
    assert_eq!(machine.objects(), [""; 0]);
    // Now it is settled, and not looked for again.
    let asked = |machine: &Machine| machine.stores[0].inner.stats().calls(Operation::List);
    let before = asked(&machine);
    machine.pass(&changelog, 60 * SECOND);
    assert_eq!(asked(&machine), before);
}

#[test]
fn nothing_stays_open_for_a_day_when_nobody_asks_for_a_checkpoint() {
    let machine = Machine::new(1);
    let options = machine.options().uploads(small_parts());
    let changelog = machine.open(options);
    let mut writer = writer(&changelog, "log");
    for change in 0..200u64 {
        machine.append(&changelog, &mut writer, change, &change.to_le_bytes().repeat(50));
    }
    machine.pass(&changelog, SECOND);
    let bucket = &machine.stores[0].inner;
    assert_eq!((bucket.open_uploads().len(), bucket.objects().len()), (1, 0));
    let deadline = changelog.step().expect("somebody has to look at it again");
    let in_half_a_day = machine.started_at + 12 * 3600 * SECOND + 2 * SECOND;
    assert!(deadline < in_half_a_day, "{:?}", deadline - machine.started_at);
    machine.micros.fetch_add(12 * 3600 * 1_000_000, Ordering::Relaxed);
    machine.pass(&changelog, SECOND);
    assert_eq!((bucket.open_uploads().len(), bucket.objects().len()), (0, 1));
    let handle = machine.within(&changelog, SECOND, writer.persist_durably(ZERO)).expect("in time").unwrap();
    assert_eq!(machine.values(&handle).len(), 200);
}

/// What nobody needs is deleted by whoever has the directories next, if it could not be before the end.
#[test]
fn closing_waits_for_deletions_that_end_and_leaves_the_others_to_the_next_open() {
    let machine = Machine::new(2);
    let fill = |changelog: &Changelog| {
        for log in ["first", "second", "third"] {
            let mut writer = writer(changelog, log);
            writer.append(KeyGroup(1), b"one").unwrap();
            machine.within(changelog, SECOND, writer.persist_durably(ZERO)).expect("in time").unwrap();
            // It is carried out by nobody before the close.
            writer.truncate_and_close();
        }
    };
    let changelog = machine.open(machine.options());
    fill(&changelog);
    let there = machine.objects().len();
    assert!(there > 0);
    changelog.close(Duration::ZERO).unwrap();
    assert_eq!(machine.objects(), [""; 0], "{there} objects were there");

    for failure in ["hang", "die", "deny"] {
        let changelog = machine.open(machine.options());
        fill(&changelog);
        let left = machine.objects();
        for store in &machine.stores {
            match failure {
                "hang" => store.hold(),
                "die" => store.inner.set_dead(true),
                _ => store.deny.store(true, Ordering::Relaxed),
            }
        }
        changelog.close(Duration::ZERO).expect("that is no reason to fail");
        assert!(!left.is_empty() && machine.objects() == left, "{failure}");
        for store in &machine.stores {
            store.release();
            store.inner.heal();
            store.deny.store(false, Ordering::Relaxed);
        }
        let changelog = machine.open(machine.options());
        machine.pass(&changelog, SECOND);
        assert_eq!(machine.objects(), [""; 0], "{failure}");
        assert!(changelog.recovered().is_empty());
        changelog.close(Duration::ZERO).unwrap();
    }
}

/// Under which a few bytes are an object of several parts.
fn small_parts() -> UploadOptions {
    let mut options = UploadOptions::default();
    options.put_bytes_max = 16 << 10;
    options.part_bytes = 16 << 10;
    options
}

#[test]
fn names_carry_prefix_and_hash() {
    let machine = Machine::new(1);
    let changelog = machine.open(machine.options().name_prefix("jobs/a").hash_prefix(true).group("g"));
    let mut writer = writer(&changelog, "log");
    writer.append(KeyGroup(1), b"one").unwrap();
    let handle = machine.within(&changelog, SECOND, writer.persist_durably(ZERO)).expect("in time").unwrap();
    let (_, object) = handle.objects().next().unwrap();
    let parts: Vec<&str> = object.split('/').collect();
    assert_eq!((parts[0], parts[1], parts[2].len(), parts[3]), ("jobs", "a", 2, "g"), "{object}");
}
