//! What a directory holds can be read without opening it for writing, and whatever it lost comes from objects.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use tidelog::block::Block;
use tidelog::{
    Changelog, ChangelogReader, Durability, KeyGroup, KeyGroupRange, LocalLogs, OpenError, Options,
    SequenceNumber,
};

fn options(home: &Path) -> Options {
    let bucket = format!("file://{}", home.join("bucket").display());
    Options::new(bucket, home.join("local")).segment_bytes(1 << 20).local_bytes(4 << 20)
}

/// Each number with its value; the same number twice fails.
fn values(reader: ChangelogReader) -> BTreeMap<u64, String> {
    let mut values = BTreeMap::new();
    for change in reader {
        let change = change.unwrap();
        let value = String::from_utf8(change.value.to_vec()).unwrap();
        assert_eq!(values.insert(change.number.0, value), None, "{}", change.number);
    }
    values
}

fn files(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut files = BTreeMap::new();
    for entry in std::fs::read_dir(dir).unwrap() {
        let entry = entry.unwrap();
        let name = entry.file_name().into_string().unwrap();
        if name != "LOCK" {
            files.insert(name, std::fs::read(entry.path()).unwrap());
        }
    }
    files
}

#[test]
fn looking_changes_nothing_and_keeps_others_out() {
    let home = tempfile::tempdir().unwrap();
    let local = home.path().join("local");
    assert!(matches!(LocalLogs::open(&local), Err(OpenError::Io { .. })));
    assert!(!local.exists(), "looking makes no directory");
    std::fs::create_dir(&local).unwrap();
    assert!(matches!(LocalLogs::open(&local), Err(OpenError::Manifest { .. })));
    assert_eq!(std::fs::read_dir(&local).unwrap().count(), 0, "looking makes no file");

    let changelog = Changelog::open(options(home.path())).unwrap();
    let mut writer = changelog.create_writer("log", KeyGroupRange::ALL).unwrap();
    for (group, value) in ["zero", "one", "two"].into_iter().enumerate() {
        writer.append(KeyGroup(group as u16), value.as_bytes()).unwrap();
    }
    writer.sync().wait().unwrap();
    assert!(matches!(LocalLogs::open(&local), Err(OpenError::Directory(_))));
    drop((writer, changelog));

    let before = files(&local);
    let logs = LocalLogs::open(&local).unwrap();
    let [log] = logs.logs() else { panic!("{logs:?}") };
    assert_eq!((log.name(), log.start().0, log.end().0, log.confirmed().0), ("log", 0, 3, 0));
    let reader = log.read(KeyGroupRange::new(1, 2).unwrap()).unwrap();
    drop(logs);
    // The reader alone keeps the directory.
    assert!(matches!(Changelog::open(options(home.path())), Err(OpenError::Directory(_))));
    assert_eq!(values(reader), BTreeMap::from([(1, "one".to_owned()), (2, "two".to_owned())]));
    assert!(files(&local) == before, "looking changes no file");
    Changelog::open(options(home.path())).unwrap();
}

#[test]
fn what_the_disk_lost_after_its_object_was_complete_comes_from_the_object() {
    let home = tempfile::tempdir().unwrap();
    let local = home.path().join("local");
    let changelog = Changelog::open(options(home.path()).durability(Durability::Process)).unwrap();
    let mut writer = changelog.create_writer("log", KeyGroupRange::ALL).unwrap();
    for value in ["zero", "one"] {
        writer.append(KeyGroup(7), value.as_bytes()).unwrap();
        writer.sync().wait().unwrap();
    }
    writer.persist_durably(SequenceNumber::ZERO).wait().unwrap();
    drop(writer);
    changelog.close(Duration::from_secs(10)).unwrap();

    // A power cut takes the second block, which nobody had promised to survive one.
    let segment = local.join("segment-00000001");
    let mut bytes = std::fs::read(&segment).unwrap();
    let first = Block::peek_len(&bytes).unwrap();
    let second = Block::peek_len(&bytes[first..]).unwrap();
    bytes[first..first + second].fill(0);
    std::fs::write(&segment, bytes).unwrap();

    let all = BTreeMap::from([(0, "zero".to_owned()), (1, "one".to_owned())]);
    let logs = LocalLogs::open(&local).unwrap();
    assert_eq!(logs.logs()[0].end(), SequenceNumber(2));
    assert_eq!(values(logs.logs()[0].read(KeyGroupRange::ALL).unwrap()), all);
    drop(logs);
    let changelog = Changelog::open(options(home.path())).unwrap();
    assert_eq!(values(changelog.recovered()[0].read(KeyGroupRange::ALL).unwrap()), all);
}

#[test]
fn a_recovered_log_remembers_that_it_was_confirmed() {
    let home = tempfile::tempdir().unwrap();
    let changelog = Changelog::open(options(home.path())).unwrap();
    let mut writer = changelog.create_writer("log", KeyGroupRange::ALL).unwrap();
    writer.append(KeyGroup(7), b"zero").unwrap();
    writer.sync().wait().unwrap();
    drop((writer, changelog));
    let changelog = Changelog::open(options(home.path())).unwrap();
    let log = &changelog.recovered()[0];
    assert_eq!(log.confirmed(), SequenceNumber(0));
    let handle = log.persist_durably(log.start()).wait().unwrap();
    log.confirm(handle.to());
    changelog.close(Duration::from_secs(10)).unwrap();
    let changelog = Changelog::open(options(home.path())).unwrap();
    assert_eq!(changelog.recovered()[0].confirmed(), SequenceNumber(1));
}
