//! What the integration tests share.
#![allow(dead_code)]

use std::collections::BTreeMap;
use std::path::Path;

use tidelog::{Changelog, ChangelogHandle, ChangelogReader, KeyGroupRange, LogId, Options, Restore};

/// Small segments, so that opening is quick and files are recycled.
pub fn options(dir: &Path) -> Options {
    let bucket = format!("file://{}", dir.join("bucket").display());
    Options::new(bucket, dir.join("local")).segment_bytes(2 << 20).local_bytes(16 << 20)
}

pub fn range(first: u16, last: u16) -> KeyGroupRange {
    KeyGroupRange::new(first, last).expect("the first is not behind the last")
}

pub fn open(dir: &Path) -> Changelog {
    Changelog::open(options(dir)).expect("the directory is fine")
}

/// All changes of the handles: by log and key group (`None` for metadata), numbers with values, in the order read.
pub type Content = BTreeMap<(LogId, Option<u16>), Vec<(u64, Vec<u8>)>>;

/// With `ALL`: whatever the handles are for.
pub fn read(handles: &[ChangelogHandle], key_groups: KeyGroupRange) -> Content {
    let restore = Restore::open(handles).expect("the bucket is there");
    collect(match key_groups {
        KeyGroupRange::ALL => restore.reader_of_all(),
        key_groups => restore.reader(key_groups).expect("the handles are for them"),
    })
}

pub fn collect(reader: ChangelogReader) -> Content {
    let mut content = Content::new();
    for change in reader {
        let change = change.expect("every change is intact");
        let key = (change.log, change.key_group.map(|key_group| key_group.0));
        content.entry(key).or_default().push((change.number.0, change.value.to_vec()));
    }
    content
}

/// Names of the objects in the bucket.
pub fn objects(dir: &Path) -> Vec<String> {
    fn walk(dir: &Path, names: &mut Vec<String>) {
        for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
            if entry.path().is_dir() {
                walk(&entry.path(), names);
            } else {
                names.push(entry.file_name().to_string_lossy().into_owned());
            }
        }
    }
    let mut names = Vec::new();
    walk(&dir.join("bucket"), &mut names);
    names.sort();
    names
}

/// Waits for something that another thread brings about.
pub fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    for _ in 0..2000 {
        if holds() {
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    panic!("never happened: {what}");
}
