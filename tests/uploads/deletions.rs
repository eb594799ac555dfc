//! That what cannot be deleted, or is much, holds nobody up.

use std::sync::atomic::Ordering;
use std::time::Duration;

use tidelog::{Changelog, ChangelogWriter, KeyGroup};

use crate::machine::{Machine, SECOND, writer};

/// Of one bucket.
const AT_A_TIME: u64 = 16;
const SOON: Duration = Duration::from_millis(100);

fn keep(machine: &Machine, keeps: bool) {
    machine.stores.iter().for_each(|store| store.keeps.store(keeps, Ordering::Relaxed));
}

/// The deletions that were asked for since this was asked last.
fn asked(machine: &Machine) -> u64 {
    machine.stores.iter().map(|store| store.deletions.swap(0, Ordering::Relaxed)).sum()
}

/// A writer with so many objects.
fn fill(machine: &Machine, changelog: &Changelog, objects: u64) -> ChangelogWriter {
    let mut writer = writer(changelog, "log");
    for _ in 0..objects {
        let from = writer.append(KeyGroup(1), b"one").unwrap();
        machine.within(changelog, SECOND, writer.persist_durably(from)).expect("in time").unwrap();
    }
    writer
}

#[test]
fn a_deletion_that_fails_does_not_keep_parts_from_going_ahead() {
    let machine = Machine::new(1);
    let changelog = machine.open(machine.options());
    let mut writer = fill(&machine, &changelog, 1);
    keep(&machine, true);
    writer.truncate(writer.next_sequence_number()).unwrap();
    machine.pass(&changelog, SOON);
    assert_eq!(asked(&machine), 1);
    let sent = || machine.stores[0].inner.stats().bytes_put;
    let before = sent();
    for change in 0..200 {
        machine.append(&changelog, &mut writer, change, &[7; 1000]);
    }
    machine.pass(&changelog, SECOND);
    assert!(sent() - before > 100_000, "{} bytes were sent ahead", sent() - before);
}

#[test]
fn a_deletion_that_fails_does_not_keep_a_full_disk_full() {
    let machine = Machine::new(1);
    let changelog = machine.open(machine.options().preemptive_upload(false).local_bytes(128 << 10));
    let mut writer = fill(&machine, &changelog, 1);
    keep(&machine, true);
    writer.truncate(writer.next_sequence_number()).unwrap();
    machine.pass(&changelog, SOON);
    assert_eq!(asked(&machine), 1);
    let before = machine.micros.load(Ordering::Relaxed);
    // Four times the local budget.
    for change in 0..500 {
        machine.append(&changelog, &mut writer, change, &[7; 1000]);
    }
    let took = Duration::from_micros(machine.micros.load(Ordering::Relaxed) - before);
    assert!(took < 4 * SECOND, "{took:?}");
}

#[test]
fn a_few_objects_are_deleted_at_a_time() {
    let machine = Machine::new(1);
    let changelog = machine.open(machine.options());
    for at_open in [false, true] {
        let writer = fill(&machine, &changelog, 40);
        assert_eq!(machine.objects().len(), 40);
        if at_open {
            keep(&machine, true);
            writer.truncate_and_close();
            changelog.close(SECOND).unwrap();
            keep(&machine, false);
            asked(&machine);
            machine.stores[0].hold();
            let changelog = machine.open(machine.options());
            machine.pass(&changelog, SOON);
            assert_eq!(asked(&machine), AT_A_TIME);
            machine.stores[0].release();
            machine.pass(&changelog, SECOND);
            assert_eq!((asked(&machine), machine.objects().len()), (40 - AT_A_TIME, 0));
            return;
        }
        machine.stores[0].hold();
        writer.truncate_and_close();
        machine.pass(&changelog, SOON);
        assert_eq!(asked(&machine), AT_A_TIME);
        machine.stores[0].release();
        machine.pass(&changelog, SECOND);
        assert_eq!((asked(&machine), machine.objects().len()), (40 - AT_A_TIME, 0));
    }
}

#[test]
fn where_deletions_are_denied_few_are_asked_for_and_all_are_gone_once_they_are_not() {
    let machine = Machine::new(1);
    let changelog = machine.open(machine.options());
    let writer = fill(&machine, &changelog, 40);
    keep(&machine, true);
    writer.truncate_and_close();
    machine.pass(&changelog, 60 * SECOND);
    let tried = asked(&machine);
    assert!((AT_A_TIME + 1..=4 * AT_A_TIME).contains(&tried), "{tried} deletions in a minute");
    assert_eq!(machine.objects().len(), 40);
    keep(&machine, false);
    machine.pass(&changelog, 40 * SECOND);
    assert_eq!((asked(&machine), machine.objects().len()), (40, 0));
}

/// The deletion is nobody's business here: it is never asked for.
#[test]
fn a_close_does_not_wait_for_what_is_in_a_bucket_that_is_not_open() {
    let mut machine = Machine::new(2);
    let changelog = machine.open(machine.options());
    let writer = fill(&machine, &changelog, 1);
    keep(&machine, true);
    writer.truncate_and_close();
    changelog.close(SECOND).unwrap();
    keep(&machine, false);
    let (mut stores, away): (Vec<_>, Vec<_>) =
        std::mem::take(&mut machine.stores).into_iter().partition(|store| store.inner.objects().is_empty());
    machine.stores.append(&mut stores);
    assert_eq!((machine.stores.len(), away.len()), (1, 1));
    let changelog = machine.open(machine.options());
    machine.pass(&changelog, SOON);
    let before = machine.micros.load(Ordering::Relaxed);
    changelog.close(3600 * SECOND).unwrap();
    // As long as a wait lasts here, a thousand of its steps do not.
    let took = machine.micros.load(Ordering::Relaxed) - before;
    assert!(took < 50_000, "it took {took} µs");
    assert_eq!(away[0].inner.objects().len(), 1, "it stays");
}
