//! Checkpoints that are asked for before earlier ones are complete.

use std::collections::BTreeSet;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tidelog::{ChangelogHandle, KeyGroup, Options, PersistError, PersistFuture, SequenceNumber};
use tidelog_io::sim::SimWorld;
use tidelog_upload::{HedgeOptions, UploadOptions};

use crate::machine::{Machine, SECOND, ZERO, writer};

/// Objects of one request, none of them raced.
fn options(machine: &Machine) -> Options {
    let mut uploads = UploadOptions::default();
    uploads.hedging = HedgeOptions::off();
    machine.options().uploads(uploads)
}

fn pending(future: PersistFuture) -> PersistFuture {
    future.wait_timeout(Duration::ZERO).expect_err("its changes are not in complete objects")
}

fn extents(handle: &ChangelogHandle) -> Vec<(u64, u64)> {
    handle.extents().iter().map(|extent| (extent.first.0, extent.end.0)).collect()
}

#[test]
fn a_commit_that_hangs_delays_nobody_but_those_who_need_it() {
    let machine = Machine::new(1);
    let changelog = machine.open(options(&machine));
    let [mut first, mut second] = ["first", "second"].map(|name| writer(&changelog, name));
    first.append(KeyGroup(1), b"one").unwrap();
    machine.stores[0].hold();
    let hangs = first.persist_durably(ZERO);
    machine.pass(&changelog, SECOND / 10);
    assert!(machine.stores[0].holds());
    machine.stores[0].hold_no_more();
    first.append(KeyGroup(1), b"two").unwrap();
    second.append(KeyGroup(2), b"other").unwrap();
    let needs_it = first.persist_durably(ZERO);
    let part_of_it = first.persist_durably(SequenceNumber(1));
    let free = machine.within(&changelog, SECOND, second.persist_durably(ZERO)).expect("it is another log");
    assert_eq!(machine.values(&free.unwrap()), [b"other".to_vec()]);
    let new_alone = machine.within(&changelog, SECOND, part_of_it).expect("all of it is complete").unwrap();
    assert_eq!(machine.values(&new_alone), [b"two".to_vec()]);
    let (hangs, needs_it) = (pending(hangs), pending(needs_it));
    machine.stores[0].release();
    let [hangs, needs_it] =
        [hangs, needs_it].map(|future| machine.within(&changelog, SECOND, future).expect("in time").unwrap());
    assert_eq!(machine.values(&hangs), [b"one".to_vec()]);
    assert_eq!(extents(&needs_it), [(0, 1), (1, 2)]);
    assert_eq!(machine.values(&needs_it), [b"one".to_vec(), b"two".to_vec()]);
    assert_eq!(machine.objects().len(), 2, "nothing was sent twice");
}

#[test]
fn parts_go_out_while_a_commit_hangs() {
    let machine = Machine::new(1);
    let mut uploads = UploadOptions::default();
    uploads.hedging = HedgeOptions::off();
    uploads.put_bytes_max = 16 << 10;
    uploads.part_bytes = 16 << 10;
    let changelog = machine.open(machine.options().uploads(uploads));
    let mut writer = writer(&changelog, "log");
    writer.append(KeyGroup(1), b"one").unwrap();
    machine.stores[0].hold();
    let hangs = writer.persist_durably(ZERO);
    machine.pass(&changelog, SECOND / 10);
    machine.stores[0].hold_no_more();
    for change in 0..200u64 {
        machine.append(&changelog, &mut writer, change, &change.to_le_bytes().repeat(50));
    }
    machine.pass(&changelog, SECOND / 10);
    let bucket = &machine.stores[0].inner;
    assert_eq!((bucket.open_uploads().len(), bucket.objects().len()), (1, 0));
    machine.stores[0].release();
    machine.within(&changelog, SECOND, hangs).expect("in time").unwrap();
    let handle = machine.within(&changelog, SECOND, writer.persist_durably(ZERO)).expect("in time").unwrap();
    assert_eq!(machine.values(&handle).len(), 201);
}

#[test]
fn a_full_disk_is_made_room_on_by_one_object_at_a_time() {
    let mut machine = Machine::new(1);
    machine.worlds.push(SimWorld::new(8));
    let changelog = machine.open(options(&machine).preemptive_upload(false).local_bytes(128 << 10));
    let [mut full, mut other] = ["full", "other"].map(|name| writer(&changelog, name));
    machine.stores[0].hold();
    for _ in 0..100 {
        while full.try_append(KeyGroup(1), &[7; 1000]).is_ok() {}
        machine.pass(&changelog, SECOND / 10);
    }
    // Blocks come all the time, from another disk.
    for _ in 0..10 {
        other.append(KeyGroup(1), b"one").unwrap();
        machine.pass(&changelog, SECOND / 10);
    }
    let names = machine.stores[0].names.lock().unwrap().clone();
    assert_eq!(names.len(), 1, "{names:?}");
    machine.stores[0].release();
    machine.append(&changelog, &mut full, 1, &[7; 1000]);
}

#[test]
fn one_that_fails_in_the_middle_is_made_up_for_by_the_oldest_that_waits() {
    let machine = Machine::new(1);
    let changelog = machine.open(options(&machine));
    let mut writer = writer(&changelog, "log");
    let mut persists = Vec::new();
    for (round, value) in [b"one", b"two", b"six"].into_iter().enumerate() {
        writer.append(KeyGroup(1), value).unwrap();
        match round {
            1 => machine.stores[0].hold(),
            _ => machine.stores[0].hold_no_more(),
        }
        persists.push(writer.persist_durably(ZERO));
        machine.pass(&changelog, SECOND / 10);
    }
    let [first, middle, last] = persists.try_into().expect("three");
    first.wait_timeout(Duration::ZERO).expect("in time").unwrap();
    let last = pending(last);
    machine.stores[0].deny.store(true, Ordering::Relaxed);
    machine.stores[0].release();
    match machine.within(&changelog, SECOND, middle) {
        Some(Err(PersistError::Upload { .. })) => {}
        other => panic!("{other:?}"),
    }
    machine.stores[0].deny.store(false, Ordering::Relaxed);
    // What has come since goes with what came back; between them is what the last one sent.
    writer.append(KeyGroup(1), b"ten").unwrap();
    let later = writer.persist_durably(ZERO);
    let handle = machine.within(&changelog, 5 * SECOND, last).expect("nobody denied it anything").unwrap();
    assert_eq!(extents(&handle), [(0, 1), (1, 2), (2, 3)]);
    assert_eq!(machine.values(&handle), [b"one".to_vec(), b"two".to_vec(), b"six".to_vec()]);
    let handle = machine.within(&changelog, 5 * SECOND, later).expect("in time").unwrap();
    let values: Vec<Vec<u8>> = [b"one", b"two", b"six", b"ten"].map(|value| value.to_vec()).into();
    assert_eq!(machine.values(&handle), values);
    machine.pass(&changelog, 30 * SECOND);
    let objects: BTreeSet<String> = handle.objects().map(|(_, object)| object.to_owned()).collect();
    assert_eq!(machine.objects().into_iter().collect::<BTreeSet<_>>(), objects);
    assert!(objects.len() <= 4, "nothing was sent twice");
}

#[test]
fn after_a_crash_between_two_commits_nothing_is_missing_and_nothing_twice() {
    let machine = Machine::new(1);
    let changelog = machine.open(options(&machine));
    let mut writer = writer(&changelog, "log");
    let mut values = Vec::new();
    let mut append = |writer: &mut tidelog::ChangelogWriter| {
        for _ in 0..10 {
            let value = (values.len() as u64).to_le_bytes().repeat(40);
            machine.append(&changelog, writer, 1, &value);
            values.push(value);
        }
    };
    append(&mut writer);
    machine.stores[0].hold();
    let hangs = writer.persist_durably(ZERO);
    machine.pass(&changelog, SECOND / 10);
    machine.stores[0].hold_no_more();
    append(&mut writer);
    let ahead = writer.persist_durably(SequenceNumber(10));
    let ahead = machine.within(&changelog, SECOND, ahead).expect("it does not need the other").unwrap();
    append(&mut writer);
    let synced = writer.sync();
    machine.pass(&changelog, SECOND / 10);
    synced.wait_timeout(Duration::ZERO).expect("in time").unwrap();
    drop(pending(hangs));
    machine.worlds[0].kill(1);
    drop(writer);
    drop(changelog);
    machine.stores[0].release();
    machine.stores[0].revive();
    let changelog = machine.open(options(&machine));
    let log = &changelog.recovered()[0];
    assert_eq!((log.start().0, log.end().0), (0, 30));
    let handle =
        machine.within(&changelog, 30 * SECOND, log.persist_durably(ZERO)).expect("in time").unwrap();
    assert_eq!(machine.values(&handle), values);
    let kept = extents(&ahead)[0];
    assert!(extents(&handle).contains(&kept), "what was complete is referred to: {:?}", extents(&handle));
}

#[test]
fn a_writer_that_closes_releases_the_others_of_its_checkpoint() {
    let machine = Machine::new(1);
    let changelog = machine.open(options(&machine).batch_delay(3600 * SECOND));
    let [mut asks, mut asked_and_closed, closes, mut late] =
        ["asks", "asked and closed", "closes", "late"].map(|name| writer(&changelog, name));
    for writer in [&mut asks, &mut asked_and_closed, &mut late] {
        writer.append(KeyGroup(1), b"one").unwrap();
    }
    let asks = asks.persist_durably(ZERO);
    let other = asked_and_closed.persist_durably(ZERO);
    asked_and_closed.close();
    machine.pass(&changelog, SECOND);
    // Two have not asked, and the one that closed stands for none of them.
    let (asks, other) = (pending(asks), pending(other));
    drop(closes);
    machine.pass(&changelog, SECOND);
    let (asks, other) = (pending(asks), pending(other));
    let late = late.persist_durably(ZERO);
    for future in [asks, other, late] {
        let handle = machine.within(&changelog, SECOND, future).expect("nobody is waited for").unwrap();
        assert_eq!(machine.values(&handle), [b"one".to_vec()]);
    }
    assert_eq!(machine.objects().len(), 1);
}
