//! Where data goes, as options say it: places that cannot work are refused before anything is made, and what is missing later
//! is named.

mod common;

use std::path::Path;
use std::time::Duration;

use common::{eventually, objects, options};
use tidelog::{
    Changelog, ChangelogHandle, CompactError, Compactor, KeyGroup, KeyGroupRange, OpenError, Options,
    PersistError, ReadError, Restore, SequenceNumber, UploadRuntime,
};

const ZERO: SequenceNumber = SequenceNumber::ZERO;

fn refused(options: Options) -> &'static str {
    match Changelog::open(options) {
        Err(OpenError::Option(error)) => error.option,
        other => panic!("{:?}", other.map(drop)),
    }
}

fn persist(options: Options, key_groups: KeyGroupRange) -> ChangelogHandle {
    let changelog = Changelog::open(options).unwrap();
    let mut writer = changelog.create_writer("counts", key_groups).unwrap();
    writer.append(key_groups.first(), b"one").unwrap();
    writer.persist_durably(ZERO).wait().unwrap()
}

#[test]
fn a_bucket_whose_url_no_handle_takes_is_refused_and_not_made() {
    let dir = tempfile::tempdir().unwrap();
    let long = (0..15).fold(dir.path().to_owned(), |path, _| path.join("x".repeat(200)));
    let url = format!("file://{}", long.display());
    assert_eq!(refused(Options::new(&url, dir.path().join("local"))), "bucket");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "nothing is made");
    assert!(matches!(Compactor::open(&url), Err(CompactError::Option(error)) if error.option == "bucket"));
}

#[test]
fn a_bucket_is_one_however_it_is_spelled() {
    let dir = tempfile::tempdir().unwrap();
    let home = dir.path().display();
    std::fs::create_dir(dir.path().join("bucket")).unwrap();
    std::os::unix::fs::symlink(dir.path().join("bucket"), dir.path().join("link")).unwrap();
    for spelled in [
        format!("file://{home}/bucket/"),
        format!("file:///{home}/bucket"),
        format!("file://{home}/./bucket"),
        format!("file://{home}/x/../bucket"),
        format!("file://{home}/link"),
    ] {
        assert_eq!(refused(options(dir.path()).add_bucket(&spelled)), "add_bucket", "{spelled}");
    }
    let handle = persist(
        Options::new(format!("file:///{home}/x/../bucket//"), dir.path().join("local"))
            .segment_bytes(1 << 20)
            .local_bytes(4 << 20),
        KeyGroupRange::ALL,
    );
    assert_eq!(handle.objects().next().unwrap().0, format!("file://{home}/bucket"));
}

#[test]
fn a_bucket_is_apart_from_the_local_directories() {
    let dir = tempfile::tempdir().unwrap();
    let url = |path: &str| format!("file://{}", dir.path().join(path).display());
    for (bucket, local) in [("a", "a"), ("a/b", "a"), ("a", "a/b")] {
        assert_eq!(refused(Options::new(url(bucket), dir.path().join(local))), "bucket");
    }
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "nothing is made");
}

#[test]
fn a_runtime_that_ended_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let on_runtime = options(dir.path()).runtime(UploadRuntime::Handle(runtime.handle().clone()));
    let changelog = Changelog::open(on_runtime).unwrap();
    let mut writer = changelog.create_writer("counts", KeyGroupRange::ALL).unwrap();
    writer.append(KeyGroup(1), b"one").unwrap();
    runtime.shutdown_background();
    let error = writer.persist_durably(ZERO).wait().unwrap_err();
    assert!(matches!(error, PersistError::RuntimeEnded), "{error}");
    assert!(!error.is_retryable() && error.to_string().contains("runtime"), "{error}");
    // Nothing is lost: the next open finds what was on the local disk.
    writer.sync().wait().unwrap();
    drop(writer);
    changelog.close(Duration::from_secs(10)).unwrap();
    let changelog = Changelog::open(options(dir.path())).unwrap();
    assert_eq!(changelog.recovered()[0].persist_durably(ZERO).wait().unwrap().to().0, 1);
}

/// Of several buckets one may be dead: that is a matter of what is in it.
#[test]
fn a_bucket_that_is_gone_fails_the_reads_of_what_is_in_it() {
    let dir = tempfile::tempdir().unwrap();
    let range = |first, last| KeyGroupRange::new(KeyGroup(first).0, KeyGroup(last).0).unwrap();
    let of = |name: &str, key_groups| {
        let home = dir.path().join(name);
        persist(options(&home), key_groups)
    };
    let handles = [of("one", range(0, 63)), of("two", range(64, 127))];
    std::fs::rename(dir.path().join("two/bucket"), dir.path().join("away")).unwrap();
    let restore = Restore::open(&handles).unwrap();
    assert_eq!(restore.reader(range(0, 63)).unwrap().map(Result::unwrap).count(), 1);
    let failed = restore.reader(range(0, 127)).unwrap().find_map(Result::err);
    assert!(
        matches!(&failed, Some(ReadError::Store(error)) if error.bucket().ends_with("two/bucket")),
        "{failed:?}"
    );
    assert!(!dir.path().join("two/bucket").exists(), "nothing is made in its place");
    std::fs::rename(dir.path().join("away"), dir.path().join("two/bucket")).unwrap();
    assert_eq!(restore.reader(range(0, 127)).unwrap().map(Result::unwrap).count(), 2);
}

fn recovered_of(home: &Path) -> Changelog {
    let changelog = Changelog::open(options(home)).unwrap();
    let mut writer = changelog.create_writer("counts", KeyGroupRange::ALL).unwrap();
    for _ in 0..10 {
        writer.append(KeyGroup(1), b"one").unwrap();
    }
    writer.persist_durably(ZERO).wait().unwrap();
    drop((writer, changelog));
    Changelog::open(options(home)).unwrap()
}

/// Whether or not the local disk still has it.
#[test]
fn what_was_let_go_of_is_not_read() {
    for discard in [true, false] {
        let dir = tempfile::tempdir().unwrap();
        let changelog = recovered_of(dir.path());
        let log = changelog.recovered()[0].clone();
        assert_eq!(log.read(KeyGroupRange::ALL).unwrap().count(), 10);
        let start = if discard { 10 } else { 4 };
        if discard {
            log.discard()
        } else {
            log.truncate(SequenceNumber(4))
        }
        eventually("a read is refused", || match log.read(KeyGroupRange::ALL) {
            Ok(_) => false,
            Err(ReadError::Truncated { start: found, .. }) => found.0 == start,
            Err(error) => panic!("{error}"),
        });
    }
}

/// An object may hold changes behind the last persist; they are dropped with their writer, and so is what only they need.
#[test]
fn what_a_closed_writer_never_persisted_keeps_no_object() {
    let dir = tempfile::tempdir().unwrap();
    let changelog = Changelog::open(options(dir.path()).batch_delay(Duration::from_millis(200))).unwrap();
    let mut writer = changelog.create_writer("counts", KeyGroupRange::ALL).unwrap();
    let mut other = changelog.create_writer("other", KeyGroupRange::ALL).unwrap();
    writer.append(KeyGroup(1), b"persisted").unwrap();
    let handle = writer.persist_durably(ZERO);
    writer.append(KeyGroup(1), b"only in the object").unwrap();
    // The object is cut behind that one.
    other.append(KeyGroup(1), b"one").unwrap();
    let of_other = other.persist_durably(ZERO);
    let handle = handle.wait().unwrap();
    assert_eq!((handle.to().0, of_other.wait().unwrap().to().0), (1, 1));
    other.truncate_and_close();
    writer.truncate(handle.to()).unwrap();
    writer.close();
    eventually("the object goes", || objects(dir.path()).is_empty());
    drop(changelog);
    assert!(Changelog::open(options(dir.path())).unwrap().recovered().is_empty());
}
