//! That one of several directories which cannot go on does not keep the others from it.

use std::time::Duration;

use tidelog::{Changelog, ChangelogHandle, ChangelogWriter, KeyGroup, PersistError, RegisterError};
use tidelog_io::directory::RESERVE_NAME;
use tidelog_io::sim::{Fault, SimWorld};

use crate::machine::{Machine, SECOND, ZERO, writer};

fn machine() -> Machine {
    let mut machine = Machine::new(1);
    machine.worlds.push(SimWorld::new(8));
    machine
}

/// Somebody else has taken all room of the first directory's file system, and what was kept for its manifest.
fn fill_up(machine: &Machine) {
    let _ = machine.worlds[0].files().remove(RESERVE_NAME);
    machine.worlds[0].set_capacity_bytes(Some(0));
}

/// Four times the local budget of `writer`, with a checkpoint now and then.
fn go_on(machine: &Machine, changelog: &Changelog, writer: &mut ChangelogWriter) -> ChangelogHandle {
    let mut last = None;
    for _ in 0..20 {
        let from = writer.next_sequence_number();
        for change in 0..50 {
            machine.append(changelog, writer, change, &[7; 1000]);
        }
        let persist = machine.within(changelog, SECOND, writer.persist_durably(from));
        last = Some(persist.expect("in time").expect("it is not its directory"));
        writer.truncate(from).unwrap();
    }
    last.unwrap()
}

#[test]
fn a_directory_whose_manifest_cannot_be_written_stops_no_other_one() {
    for preemptive in [false, true] {
        let machine = machine();
        let options = || machine.options().local_bytes(256 << 10).preemptive_upload(preemptive);
        let changelog = machine.open(options());
        let [mut full, mut other] = ["full", "other"].map(|name| writer(&changelog, name));
        full.append(KeyGroup(1), b"one").unwrap();
        let synced = full.sync();
        machine.pass(&changelog, SECOND);
        synced.wait_timeout(Duration::ZERO).expect("in time").unwrap();
        fill_up(&machine);

        let handle = go_on(&machine, &changelog, &mut other);
        changelog.register("chk", std::slice::from_ref(&handle)).unwrap();
        changelog.release("chk").unwrap();
        let outcome = machine.within(&changelog, 10 * SECOND, full.persist_durably(ZERO)).expect("in time");
        assert!(matches!(outcome, Err(PersistError::Manifest { .. })), "{outcome:?}");
        let other_handle = go_on(&machine, &changelog, &mut other);

        machine.worlds[0].set_capacity_bytes(None);
        let handle = machine.within(&changelog, 20 * SECOND, full.persist_durably(ZERO)).expect("in time");
        let handle = handle.unwrap();
        assert_eq!(machine.values(&handle), [b"one".to_vec()]);
        assert_eq!(machine.values(&other_handle).len(), 50);
        full.truncate_and_close();
        other.truncate_and_close();
        machine.pass(&changelog, 60 * SECOND);
        assert_eq!(machine.objects(), [""; 0]);
        assert!(machine.stores[0].inner.open_uploads().is_empty());
        changelog.close(SECOND).unwrap();
        // What could not be recorded at first removes nothing later.
        let changelog = machine.open(options());
        let mut writer = writer(&changelog, "next");
        writer.append(KeyGroup(1), b"two").unwrap();
        let handle =
            machine.within(&changelog, SECOND, writer.persist_durably(ZERO)).expect("in time").unwrap();
        machine.pass(&changelog, 60 * SECOND);
        assert_eq!(machine.values(&handle), [b"two".to_vec()]);
    }
}

/// A holder that the full one has to know is another matter.
#[test]
fn what_a_directory_that_cannot_record_it_has_to_know_is_not_ok() {
    let machine = machine();
    let changelog = machine.open(machine.options());
    let mut full = writer(&changelog, "full");
    full.append(KeyGroup(1), b"one").unwrap();
    let handle = machine.within(&changelog, SECOND, full.persist_durably(ZERO)).expect("in time").unwrap();
    let handles = std::slice::from_ref(&handle);
    changelog.register("before", handles).unwrap();
    fill_up(&machine);
    for _ in 0..2 {
        let refused = changelog.register("chk", handles);
        assert!(matches!(refused, Err(RegisterError::Manifest(_))), "{refused:?}");
        changelog.release("before").unwrap_err();
    }
    machine.worlds[0].set_capacity_bytes(None);
    changelog.register("chk", handles).unwrap();
    changelog.release("before").unwrap();
}

#[test]
fn new_writers_go_to_directories_that_can_take_them() {
    for broken in [false, true] {
        let machine = machine();
        let changelog = machine.open(machine.options());
        let mut first = writer(&changelog, "first");
        first.append(KeyGroup(1), b"one").unwrap();
        if broken {
            machine.worlds[0].inject(Fault::EngineBreaks, 0);
            drop(first.sync());
            machine.pass(&changelog, SECOND);
        } else {
            fill_up(&machine);
        }
        let mut writers: Vec<_> = (0..4).map(|number| writer(&changelog, &format!("log-{number}"))).collect();
        for writer in &mut writers {
            writer.append(KeyGroup(1), b"two").unwrap();
            let synced = writer.sync();
            machine.pass(&changelog, SECOND);
            synced.wait_timeout(Duration::ZERO).expect("in time").unwrap();
        }
    }
}
