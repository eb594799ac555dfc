//! Of several directories one is lost, replaced or left out: what its logs have in objects stays there.

mod common;

use std::fs;
use std::path::Path;
use std::time::Duration;

use common::{eventually, objects, options, read};
use tidelog::{Changelog, ChangelogHandle, KeyGroup, KeyGroupRange, Options, RegisterError, SequenceNumber};

const ZERO: SequenceNumber = SequenceNumber::ZERO;
const WAIT: Duration = Duration::from_secs(20);

/// A persist waits for that of the other log, however slow the machine is.
fn both(dir: &Path) -> Options {
    options(dir).add_directory(dir.join("second")).batch_delay(WAIT)
}

fn open(options: Options) -> Changelog {
    Changelog::open(options).expect("its directories are fine")
}

/// Two logs, of one directory each, with so many changes; all that they have is in one object.
fn checkpoint(dir: &Path, counts: [u8; 2]) -> [ChangelogHandle; 2] {
    let changelog = open(both(dir));
    let mut writers = ["a", "b"].map(|name| changelog.create_writer(name, KeyGroupRange::ALL).unwrap());
    for (writer, count) in writers.iter_mut().zip(counts) {
        for value in 0..count {
            writer.append(KeyGroup(u16::from(value)), &[value]).unwrap();
        }
    }
    let persists = writers.each_mut().map(|writer| writer.persist_durably(ZERO));
    let handles = persists.map(|persist| persist.wait().unwrap());
    for (writer, handle) in writers.iter().zip(&handles) {
        writer.confirm(handle.to()).unwrap();
    }
    drop(writers);
    changelog.close(WAIT).unwrap();
    assert_eq!(objects(dir).len(), 1);
    handles
}

fn is_whole(handle: &ChangelogHandle) -> bool {
    let content = read(std::slice::from_ref(handle), KeyGroupRange::ALL);
    content.values().map(|changes| changes.len() as u64).sum::<u64>() == handle.to().0
}

/// All that goes has gone when this returns.
fn discard(changelog: Changelog, name: &str) {
    changelog.recovered().iter().filter(|log| log.name() == name).for_each(|log| log.discard());
    changelog.close(WAIT).unwrap();
}

#[test]
fn a_checkpoint_outlives_a_directory_that_was_lost() {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path();
    let [_, of_b] = checkpoint(dir, [3, 5]);
    fs::remove_dir_all(dir.join("second")).unwrap();
    // The instance of the first log has a snapshot now, that of the second one goes on from its handle.
    discard(open(both(dir)), "a");
    assert!(is_whole(&of_b));
    let changelog = open(both(dir));
    assert_eq!(changelog.recovered().len(), 0);
    let refused = changelog.register("checkpoint", std::slice::from_ref(&of_b));
    assert!(matches!(refused, Err(RegisterError::NotOwned { .. })), "{refused:?}");
    drop(changelog);
    assert!(is_whole(&of_b));
}

#[test]
fn what_a_directory_that_was_left_out_needs_is_there_when_it_is_back_and_goes_then() {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path();
    let [_, of_b] = checkpoint(dir, [3, 5]);
    discard(open(options(dir)), "a");
    let changelog = open(both(dir));
    let b = &changelog.recovered()[0];
    assert_eq!((b.name(), changelog.recovered().len()), ("b", 1));
    assert_eq!(b.persist_durably(ZERO).wait().unwrap(), of_b);
    assert!(is_whole(&of_b));
    changelog.register("checkpoint", std::slice::from_ref(&of_b)).unwrap();
    changelog.release("checkpoint").unwrap();
    discard(changelog, "b");
    assert_eq!(objects(dir), [""; 0], "it is owned again");
}

/// The first directory records the uploads of all.
#[test]
fn an_object_with_changes_of_a_directory_that_was_left_out_alone_stays() {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path();
    let [_, of_b] = checkpoint(dir, [0, 5]);
    for _ in 0..2 {
        let changelog = open(options(dir));
        changelog.close(WAIT).unwrap();
        assert!(is_whole(&of_b));
    }
    discard(open(both(dir)), "b");
    assert_eq!(objects(dir), [""; 0]);
}

/// Both have let go of it: each without the other.
#[test]
fn an_object_that_each_directory_lets_go_of_alone_is_left_to_a_sweep() {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path();
    checkpoint(dir, [3, 5]);
    discard(open(options(dir)), "a");
    let bucket = format!("file://{}", dir.join("bucket").display());
    discard(open(Options::new(bucket, dir.join("second")).segment_bytes(2 << 20).local_bytes(16 << 20)), "b");
    let changelog = open(both(dir));
    assert_eq!(changelog.recovered().len(), 0);
    changelog.close(WAIT).unwrap();
    assert_eq!(objects(dir).len(), 1);
}

#[test]
fn holders_keep_such_an_object_known_and_a_registry_does_not_get_it() {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path();
    let handles = checkpoint(dir, [3, 5]);
    let changelog = open(options(dir));
    let refused = changelog.hand_over("registry", &handles);
    assert!(matches!(refused, Err(RegisterError::NotOwned { .. })), "{refused:?}");
    changelog.register("checkpoint", &handles).unwrap();
    discard(changelog, "a");
    let changelog = open(options(dir));
    assert_eq!(changelog.holders(), ["checkpoint"]);
    // It is held, so that another holder may take it.
    changelog.register("savepoint", &handles).unwrap();
    for holder in changelog.holders() {
        changelog.release(&holder).unwrap();
    }
    let let_go = || changelog.register("late", &handles).is_err();
    eventually("it is let go of", let_go);
    changelog.close(WAIT).unwrap();
    assert!(handles.iter().all(is_whole));
    discard(open(both(dir)), "b");
    assert_eq!(objects(dir), [""; 0]);
}

#[test]
fn what_was_handed_over_may_be_handed_over_again_without_a_directory() {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path();
    let handles = checkpoint(dir, [3, 5]);
    let changelog = open(both(dir));
    changelog.hand_over("first", &handles).unwrap();
    drop(changelog);
    let changelog = open(options(dir));
    changelog.hand_over("second", &handles).unwrap();
    discard(changelog, "a");
    assert!(handles.iter().all(is_whole));
}
