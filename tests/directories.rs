//! Directories of so many key groups that one object cannot have them all: it ends, and another one begins. A file of its
//! own, since it takes its time.

mod common;

use std::fs;
use std::path::Path;

use common::options;
use tidelog::footer::Footer;
use tidelog::tail::DIRECTORIES_BYTES_MAX;
use tidelog::{Changelog, ChangelogHandle, Compactor, KeyGroup, KeyGroupRange, Restore, SequenceNumber};

/// A frame has 8 bytes, so in each part every key group has about one change, for which its directory has two bytes.
const CHANGES: u64 = DIRECTORIES_BYTES_MAX / 2 * 9 / 8;
const PART_BYTES: usize = 512 << 10;

/// What the directories of each object of the handle take, by its footer.
fn directories(home: &Path, handle: &ChangelogHandle) -> Vec<u64> {
    let footer = |(_, object): (&str, &str)| {
        let bytes = fs::read(home.join("bucket").join(object)).unwrap();
        let range = Footer::locate(&bytes, bytes.len() as u64).unwrap();
        Footer::decode(&bytes[range.start as usize..], None).unwrap().directories_len()
    };
    handle.objects().map(footer).collect()
}

fn group_of(number: u64) -> KeyGroup {
    KeyGroup(number as u16)
}

/// Each change once, those of a key group in order.
fn check(handle: &ChangelogHandle) {
    let mut reader = Restore::open(std::slice::from_ref(handle)).unwrap().reader(KeyGroupRange::ALL).unwrap();
    let mut due: Vec<u64> = (0..1 << 16).collect();
    while let Some(batch) = tidelog_upload::block_on(reader.next_batch()).unwrap() {
        for change in batch.iter() {
            let group = change.key_group.unwrap();
            let due = &mut due[usize::from(group.0)];
            assert_eq!((change.number.0, group), (*due, group_of(*due)));
            *due += 1 << 16;
        }
    }
    assert!(due.iter().all(|due| *due >= CHANGES && *due < CHANGES + (1 << 16)));
}

#[test]
fn an_object_ends_before_its_directories_are_too_much() {
    let home = tempfile::tempdir().unwrap();
    let options = options(home.path()).segment_bytes(16 << 20).local_bytes(512 << 20).part_bytes(PART_BYTES);
    let changelog = Changelog::open(options).unwrap();
    let mut writer = changelog.create_writer("wide", KeyGroupRange::ALL).unwrap();
    for number in 0..CHANGES {
        writer.append(group_of(number), b"").unwrap();
    }
    let handle = writer.persist_durably(SequenceNumber::ZERO).wait().unwrap();
    // One part more may be in it.
    let full = DIRECTORIES_BYTES_MAX..DIRECTORIES_BYTES_MAX + PART_BYTES as u64;
    let of_objects = directories(home.path(), &handle);
    assert!(
        matches!(of_objects[..], [first, second] if full.contains(&first) && second < first),
        "{of_objects:?}"
    );
    check(&handle);
    // A log goes on from there as from any other object.
    assert_eq!(writer.persist_durably(SequenceNumber::ZERO).wait().unwrap(), handle);

    let bucket = format!("file://{}", home.path().join("bucket").display());
    let mut compactor = Compactor::open(&bucket).unwrap().part_bytes(PART_BYTES).group("compacted");
    let made = compactor.compact(std::slice::from_ref(&handle), None).unwrap();
    let of_objects = directories(home.path(), &made.handles[0]);
    assert!(
        matches!(of_objects[..], [first, second] if full.contains(&first) && second < first),
        "{of_objects:?}"
    );
    check(&made.handles[0]);
}
