//! What happens at the limits: a full disk, a bucket that fails, a budget used up, a directory without io_uring.

mod common;
#[path = "common/small_disk.rs"]
mod small_disk;

use std::time::{Duration, Instant};

use common::{eventually, objects, options, read};
use small_disk::SmallDisk;
use tidelog::{
    AppendError, Changelog, EngineChoice, KeyGroup, KeyGroupRange, OpenError, Options, PersistError,
    SequenceNumber,
};

const ZERO: SequenceNumber = SequenceNumber::ZERO;

fn filled(number: u64) -> [u8; 1000] {
    let mut value = [number as u8; 1000];
    value[..8].copy_from_slice(&number.to_le_bytes());
    value
}

#[test]
fn a_full_disk_makes_room_by_uploading() {
    let Some(disk) = SmallDisk::mount(12) else { return };
    let dir = tempfile::tempdir().unwrap();
    // The budget is larger than the disk: the file system has the last word.
    let bucket = format!("file://{}", dir.path().join("bucket").display());
    let options =
        Options::new(bucket, disk.path().join("local")).preemptive_upload(false).segment_bytes(2 << 20);
    let changelog = Changelog::open(options.local_bytes(1 << 30)).unwrap();
    let mut writer = changelog.create_writer("much", KeyGroupRange::ALL).unwrap();
    let count = 40_000;
    for number in 0..count {
        writer.append(KeyGroup((number % 7) as u16), &filled(number)).unwrap();
    }
    writer.sync().wait().unwrap();
    assert!(!objects(dir.path()).is_empty(), "40 MB cannot be on a disk of 12 MiB");
    let handle = writer.persist_durably(ZERO).wait().unwrap();
    let content = read(&[handle], KeyGroupRange::new(3, 3).unwrap());
    let expected: Vec<_> =
        (0..count).filter(|number| number % 7 == 3).map(|number| (number, filled(number).to_vec())).collect();
    assert!(content[&(writer.log(), Some(3))] == expected);
}

#[test]
fn a_disk_too_full_for_the_first_segment_is_refused_at_open() {
    let Some(disk) = SmallDisk::mount(6) else { return };
    let dir = tempfile::tempdir().unwrap();
    let local = disk.path().join("local");
    let bucket = format!("file://{}", dir.path().join("bucket").display());
    let open = || {
        let options = Options::new(&bucket, &local).segment_bytes(2 << 20).local_bytes(4 << 20);
        Changelog::open(options.add_directory(dir.path().join("other")))
    };
    std::fs::write(disk.path().join("other"), vec![1; 5 << 20]).unwrap();
    match open() {
        Err(OpenError::NoRoom { directory, needed_bytes, free_bytes }) => {
            assert_eq!((&directory, needed_bytes), (&local, 2 << 20));
            assert!((1..2 << 20).contains(&free_bytes), "{free_bytes}");
        }
        other => panic!("{other:?}"),
    }
    assert!(!local.join("MANIFEST").exists() && !dir.path().join("other/MANIFEST").exists());
    std::fs::remove_file(disk.path().join("other")).unwrap();
    let changelog = open().unwrap();
    // One writer for each directory.
    let mut writers =
        ["first", "second"].map(|name| changelog.create_writer(name, KeyGroupRange::ALL).unwrap());
    for writer in &mut writers {
        writer.append(KeyGroup(0), b"x").unwrap();
        writer.sync().wait().unwrap();
    }
    drop((writers, changelog));
    assert!(local.join("segment-00000001").exists());
    // With a segment to begin with, uploads make room.
    std::fs::write(disk.path().join("other"), vec![1; (4 << 20) - (256 << 10)]).unwrap();
    open().unwrap();
}

/// Who can do nothing but open, read and truncate makes room that way.
#[test]
fn a_disk_without_a_byte_left_is_opened_read_and_truncated_and_goes_on() {
    let Some(disk) = SmallDisk::mount(12) else { return };
    let dir = tempfile::tempdir().unwrap();
    let local = disk.path().join("local");
    // A file where the folder of objects should be: nothing goes out.
    let bucket = dir.path().join("bucket");
    std::fs::create_dir(&bucket).unwrap();
    std::fs::write(bucket.join("g"), b"in the way").unwrap();
    let open = || {
        let options = Options::new(format!("file://{}", bucket.display()), &local).group("g");
        let options = options.segment_bytes(2 << 20).local_bytes(1 << 30).value_bytes_max(64 << 10);
        Changelog::open(options.append_wait_max(Duration::from_millis(100)))
    };
    let changelog = open().unwrap();
    let mut writer = changelog.create_writer("much", KeyGroupRange::ALL).unwrap();
    let mut appended = 0u64;
    while writer.append(KeyGroup(0), &filled(appended)).is_ok() {
        appended += 1;
        if appended.is_multiple_of(1000) {
            drop(writer.sync());
        }
    }
    let log = writer.log();
    drop((writer, changelog));

    for round in 0..3 {
        // Whatever is left is somebody else's.
        let file = std::fs::File::create(disk.path().join(format!("other-{round}"))).unwrap();
        for bytes in [64 << 10, 4096, 1] {
            while std::io::Write::write_all(&mut &file, &vec![1; bytes]).is_ok() {}
        }
        let changelog = open().expect("room was kept for that");
        let found =
            changelog.recovered().iter().find(|found| found.log() == log).expect("it is there").clone();
        let (start, end) = (found.start().0, found.end().0);
        assert!(start == round * 1000 && end > 6000, "{start} to {end}");
        let values = found.read(KeyGroupRange::ALL).unwrap().map(|change| change.unwrap().value);
        assert!(values.eq((start..end).map(|number| filled(number).to_vec())));
        // Segments without a change that is needed are there for new ones.
        found.truncate(SequenceNumber(if round == 2 { end } else { (round + 1) * 1000 }));
        if round == 2 {
            let mut writer = changelog.create_writer("new", KeyGroupRange::ALL).unwrap();
            let started_at = Instant::now();
            while writer.append(KeyGroup(0), &filled(0)).is_err() {
                assert!(started_at.elapsed() < Duration::from_secs(30), "truncation makes room");
            }
            writer.sync().wait().unwrap();
        }
        let _ = changelog.close(Duration::from_secs(10));
    }
}

#[test]
fn a_bucket_that_fails_costs_its_checkpoint_only() {
    let dir = tempfile::tempdir().unwrap();
    let changelog = Changelog::open(options(dir.path())).unwrap();
    let mut writer = changelog.create_writer("patient", KeyGroupRange::ALL).unwrap();
    writer.append(KeyGroup(1), b"one").unwrap();
    let first = writer.persist_durably(ZERO).wait().unwrap();
    // A file where the folder of objects was.
    let bucket = dir.path().join("bucket");
    let aside = dir.path().join("aside");
    std::fs::rename(&bucket, &aside).unwrap();
    std::fs::write(&bucket, b"in the way").unwrap();
    writer.append(KeyGroup(1), b"two").unwrap();
    match writer.persist_durably(ZERO).wait() {
        Err(error @ PersistError::Upload { .. }) => {
            assert!(error.to_string().contains("persist again"), "{error}")
        }
        other => panic!("{other:?}"),
    }
    // Nothing new is asked of the bucket for what it holds already.
    assert_eq!(first.to(), SequenceNumber(1));
    std::fs::remove_file(&bucket).unwrap();
    std::fs::rename(&aside, &bucket).unwrap();
    writer.append(KeyGroup(1), b"three").unwrap();
    let handle = writer.persist_durably(ZERO).wait().unwrap();
    let values: Vec<_> = read(&[handle], KeyGroupRange::ALL)[&(writer.log(), Some(1))]
        .iter()
        .map(|(_, value)| value.clone())
        .collect();
    assert_eq!(values, [b"one".to_vec(), b"two".to_vec(), b"three".to_vec()]);
    eventually("what the failed upload left is removed", || objects(dir.path()).len() == 2);
}

#[test]
fn at_the_local_budget_appends_wait_and_then_say_full() {
    let dir = tempfile::tempdir().unwrap();
    let options = options(dir.path()).local_bytes(4 << 20).append_wait_max(Duration::from_millis(50));
    let changelog = Changelog::open(options).unwrap();
    let mut writer = changelog.create_writer("blocked", KeyGroupRange::ALL).unwrap();
    let bucket = dir.path().join("bucket");
    let _ = std::fs::remove_dir_all(&bucket);
    std::fs::write(&bucket, b"in the way").unwrap();
    let mut appended = 0u64;
    let full = loop {
        match writer.append(KeyGroup(0), &filled(appended)) {
            Ok(number) => assert_eq!(number, SequenceNumber(appended)),
            Err(error) => break error,
        }
        appended += 1;
        assert!(appended < 100_000, "4 MiB of disk cannot take this");
    };
    assert_eq!(full, AppendError::Full { waited: Duration::from_millis(50) });
    assert!(full.is_retryable());
    assert_eq!(writer.next_sequence_number(), SequenceNumber(appended), "nothing was appended");
    assert_eq!(writer.try_append(KeyGroup(0), &filled(0)), Err(AppendError::Full { waited: Duration::ZERO }));
    std::fs::remove_file(&bucket).unwrap();
    std::fs::create_dir(&bucket).unwrap();
    // The bucket works again: what is held goes out, and appends go on.
    let started_at = Instant::now();
    while writer.append(KeyGroup(0), &filled(appended)).is_err() {
        assert!(started_at.elapsed() < Duration::from_secs(30), "uploads make room");
    }
    let handle = writer.persist_durably(ZERO).wait().unwrap();
    let content = read(&[handle], KeyGroupRange::ALL);
    let expected: Vec<_> = (0..=appended).map(|number| (number, filled(number).to_vec())).collect();
    assert!(content[&(writer.log(), Some(0))] == expected);
}

#[test]
fn without_io_uring_threads_do_the_writes() {
    let dir = tempfile::tempdir().unwrap();
    let changelog = Changelog::open(options(dir.path()).engine(EngineChoice::Pwritev2)).unwrap();
    assert_eq!(changelog.engines()[0].engine, "pwritev2");
    let mut writer = changelog.create_writer("fallback", KeyGroupRange::ALL).unwrap();
    for number in 0..5000 {
        writer.append(KeyGroup(0), &filled(number)).unwrap();
    }
    writer.sync().wait().unwrap();
    let handle = writer.persist_durably(ZERO).wait().unwrap();
    assert_eq!(read(&[handle], KeyGroupRange::ALL)[&(writer.log(), Some(0))].len(), 5000);
}

#[test]
fn opening_and_closing_leaves_nothing_behind() {
    let threads = || std::fs::read_dir("/proc/self/task").unwrap().count();
    let files = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let dir = tempfile::tempdir().unwrap();
    let round = || {
        let changelog = Changelog::open(options(dir.path())).unwrap();
        let mut writer = changelog.create_writer("again", KeyGroupRange::ALL).unwrap();
        writer.append(KeyGroup(0), b"x").unwrap();
        writer.persist_durably(ZERO).wait().unwrap();
        writer.truncate_and_close();
        changelog.close(Duration::from_secs(20)).unwrap();
    };
    round();
    // Other tests of this process come and go: it must be possible to see no more than at first.
    let (threads_before, files_before) = (threads(), files());
    for _ in 0..20 {
        round();
    }
    eventually("threads end", || threads() <= threads_before + 8);
    eventually("files are closed", || files() <= files_before + 24);
}
