//! What the local directory and memory promise as buckets, without a runtime and on tokio's threads. What only local
//! directories promise, of power cuts and of uploads whose process died, stands at the end.
#![cfg(feature = "local")]

use std::env;
use std::fs;
use std::future::Future;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::process::Command;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};

use bytes::Bytes;
use tempfile::TempDir;
use tidelog_upload::{
    Body, EntityTag, Lane, Operation, Outcome, Store, StoreError, StoreErrorKind, UploadId, UploadRef,
    UploadedPart, open_or_create_store, open_store,
};

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

fn block_on<T>(future: impl Future<Output = T>) -> T {
    let mut future = pin!(future);
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    loop {
        match future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(value) => return value,
            Poll::Pending => thread::park(),
        }
    }
}

/// An upload under way, as the driver keeps it.
struct Upload {
    name: String,
    id: UploadId,
    parts: Vec<UploadedPart>,
}

impl Upload {
    async fn begin(store: &dyn Store, name: &str) -> Result<Upload, StoreError> {
        let id = store.create(name).await?;
        Ok(Upload { name: name.to_owned(), id, parts: Vec::new() })
    }

    async fn put(&mut self, store: &dyn Store, part: &[u8]) -> Result<(), StoreError> {
        let number = self.parts.len() as u32 + 1;
        let tag = store.put_part(self.reference(), number, body(part), Lane::Primary).await?;
        self.parts.push(UploadedPart { number, tag });
        Ok(())
    }

    async fn complete(&self, store: &dyn Store) -> Result<EntityTag, StoreError> {
        store.complete(self.reference(), &self.parts).await
    }

    fn reference(&self) -> UploadRef<'_> {
        UploadRef { name: &self.name, id: &self.id }
    }
}

/// A store to test, and how to run its futures.
struct Case {
    what: &'static str,
    store: Arc<dyn Store>,
    runtime: Option<tokio::runtime::Runtime>,
    /// Where the objects are files.
    directory: Option<TempDir>,
}

impl Case {
    fn run<T: Send>(&self, future: impl Future<Output = T> + Send) -> T {
        match &self.runtime {
            Some(runtime) => runtime.block_on(future),
            None => block_on(future),
        }
    }

    /// An object in parts; the size that the store says it has.
    fn write(&self, name: &str, parts: &[&[u8]]) -> Result<u64, StoreError> {
        self.run(async {
            let mut upload = Upload::begin(&*self.store, name).await?;
            for part in parts {
                upload.put(&*self.store, part).await?;
            }
            upload.complete(&*self.store).await?;
            Ok(self.store.head(name).await?.bytes)
        })
    }

    fn begin(&self, name: &str) -> Upload {
        self.run(Upload::begin(&*self.store, name)).unwrap()
    }

    fn put(&self, upload: &mut Upload, part: &[u8]) -> Result<(), StoreError> {
        self.run(upload.put(&*self.store, part))
    }

    fn complete(&self, upload: &Upload) -> Result<EntityTag, StoreError> {
        self.run(upload.complete(&*self.store))
    }

    fn size(&self, name: &str) -> Result<u64, StoreError> {
        self.run(self.store.head(name)).map(|object| object.bytes)
    }

    fn get(&self, name: &str, start: u64, end: u64) -> Result<Bytes, StoreError> {
        self.run(self.store.get(name, start..end))
    }

    fn list(&self, prefix: &str) -> Vec<(String, u64)> {
        let found = self.run(self.store.list(prefix)).unwrap();
        found.into_iter().map(|object| (object.name, object.bytes)).collect()
    }

    fn uploads(&self, prefix: &str) -> Vec<String> {
        let found = self.run(self.store.list_uploads(prefix)).unwrap();
        found.into_iter().map(|upload| upload.name).collect()
    }

    /// All files under the directory, temporary ones too.
    fn files(&self) -> Vec<PathBuf> {
        self.directory.as_ref().map_or_else(Vec::new, |directory| files_below(directory.path()))
    }
}

fn each_store(test: impl Fn(&Case)) {
    for on_tokio in [false, true] {
        for what in ["file", "memory"] {
            let runtime = on_tokio
                .then(|| tokio::runtime::Builder::new_multi_thread().worker_threads(1).build().unwrap());
            let mut directory = None;
            let store: Arc<dyn Store> = match what {
                "file" => {
                    let made = TempDir::new().unwrap();
                    let store = open_store(&url_of(made.path())).unwrap();
                    directory = Some(made);
                    store
                }
                _ => open_store("memory://").unwrap(),
            };
            println!("{what}, {}", if on_tokio { "on tokio" } else { "inline" });
            test(&Case { what, store, runtime, directory });
        }
    }
}

fn url_of(path: &Path) -> String {
    format!("file://{}", path.display())
}

fn files_below(path: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(path).unwrap() {
        let entry = entry.unwrap();
        if entry.file_type().unwrap().is_dir() {
            found.extend(files_below(&entry.path()));
        } else {
            found.push(entry.path());
        }
    }
    found
}

/// A body in several slices, one of them empty.
fn body(part: &[u8]) -> Body {
    let (left, right) = part.split_at(part.len() / 3);
    Body::new(vec![Bytes::copy_from_slice(left), Bytes::new(), Bytes::copy_from_slice(right)])
}

#[test]
fn an_object_is_the_concatenation_of_its_parts() {
    each_store(|case| {
        let big = vec![7u8; 3 << 20];
        assert_eq!(case.write("a/b/c", &[b"one", b"", &big, b"three"]).unwrap(), 8 + (3 << 20));
        let all = case.get("a/b/c", 0, 8 + (3 << 20)).unwrap();
        assert_eq!(&all[..3], b"one");
        assert!(all[3..3 + big.len()] == big[..]);
        assert_eq!(&all[3 + big.len()..], b"three");
        assert_eq!(case.write("empty", &[]).unwrap(), 0);
        assert_eq!(case.get("empty", 0, 0).unwrap(), Bytes::new());
    });
}

#[test]
fn a_put_is_a_whole_object() {
    each_store(|case| {
        for (name, bytes) in [("a/b", b"bytes".as_slice()), ("empty", b"")] {
            case.run(case.store.put(name, body(bytes), Lane::Primary)).unwrap();
            assert_eq!(case.size(name).unwrap(), bytes.len() as u64);
            assert_eq!(case.get(name, 0, bytes.len() as u64).unwrap(), bytes);
        }
        assert_eq!(case.uploads(""), [] as [&str; 0]);
        assert_eq!(case.files().len(), if case.what == "file" { 2 } else { 0 });
    });
}

#[test]
fn nothing_is_visible_before_complete() {
    each_store(|case| {
        let mut upload = case.begin("a/b");
        case.put(&mut upload, b"bytes").unwrap();
        assert!(case.size("a/b").unwrap_err().is_not_found());
        assert!(case.get("a/b", 0, 5).unwrap_err().is_not_found());
        assert!(case.get("a/b", 0, 0).unwrap_err().is_not_found());
        assert_eq!(case.list(""), []);
        assert_eq!(case.uploads("a/"), ["a/b"]);
        case.complete(&upload).unwrap();
        assert_eq!(case.uploads(""), [] as [&str; 0]);
        assert_eq!(case.list(""), [("a/b".to_owned(), 5)]);
        assert_eq!(case.get("a/b", 0, 5).unwrap(), "bytes");
    });
}

#[test]
fn after_an_abort_nothing_is_left() {
    each_store(|case| {
        for parts in 0..3 {
            let mut upload = case.begin("a/b");
            for _ in 0..parts {
                case.put(&mut upload, b"bytes").unwrap();
            }
            for _ in 0..2 {
                case.run(case.store.abort(upload.reference())).unwrap();
            }
            assert!(case.size("a/b").unwrap_err().is_not_found());
            assert_eq!(case.list(""), []);
            assert_eq!(case.uploads(""), [] as [&str; 0]);
            assert_eq!(case.files(), [] as [PathBuf; 0]);
            let error = case.put(&mut upload, b"late").unwrap_err();
            assert_eq!(*error.kind(), StoreErrorKind::NoSuchUpload);
            assert_eq!(*case.complete(&upload).unwrap_err().kind(), StoreErrorKind::NoSuchUpload);
        }
    });
}

#[test]
fn parts_come_in_order_and_complete_names_them_all() {
    each_store(|case| {
        let mut upload = case.begin("a");
        case.put(&mut upload, b"one").unwrap();
        let two = case.store.put_part(upload.reference(), 3, body(b"three"), Lane::Primary);
        assert_eq!(*case.run(two).unwrap_err().kind(), StoreErrorKind::InvalidPart);
        case.put(&mut upload, b"two").unwrap();
        let all = upload.parts.clone();
        for wrong in [&all[..1], &all[1..], &[all[1].clone(), all[0].clone()], &[]] {
            let error = case.run(case.store.complete(upload.reference(), wrong)).unwrap_err();
            assert_eq!(*error.kind(), StoreErrorKind::InvalidPart);
        }
        let other = UploadRef { name: "b", id: &upload.id };
        let error = case.run(case.store.complete(other, &all)).unwrap_err();
        assert_eq!(*error.kind(), StoreErrorKind::NoSuchUpload);
        case.complete(&upload).unwrap();
        assert_eq!(case.get("a", 0, 6).unwrap(), "onetwo");
        assert_eq!(*case.complete(&upload).unwrap_err().kind(), StoreErrorKind::NoSuchUpload);
    });
}

#[test]
fn a_part_given_up_ends_its_upload() {
    let directory = TempDir::new().unwrap();
    let store = open_store(&url_of(directory.path())).unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).build().unwrap();
    runtime.block_on(async {
        let mut upload = Upload::begin(&*store, "a").await.unwrap();
        upload.put(&*store, b"one").await.unwrap();
        {
            let part = store.put_part(upload.reference(), 2, body(b"two"), Lane::Primary);
            let mut part = pin!(part);
            // The write has been handed to another thread: its end comes later, if at all.
            let _ = part.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        }
        let again = upload.put(&*store, b"two").await;
        let ended = upload.complete(&*store).await;
        // Unless the write was faster than the look at it, the upload is over: nobody knows what the file has.
        match again {
            Err(error) if *error.kind() == StoreErrorKind::Latched => {
                assert_eq!(*ended.unwrap_err().kind(), StoreErrorKind::Latched);
            }
            Err(error) => assert_eq!(*error.kind(), StoreErrorKind::InvalidPart),
            Ok(()) => panic!("a part was written twice"),
        }
        store.abort(upload.reference()).await.unwrap();
    });
    drop(runtime);
    assert_eq!(files_below(directory.path()), [] as [PathBuf; 0]);
}

#[test]
fn what_a_dead_process_left_is_listed_and_removed() {
    for by_abort in [false, true] {
        let directory = TempDir::new().unwrap();
        let url = url_of(directory.path());
        let dead = open_store(&url).unwrap();
        let mut upload = block_on(Upload::begin(&*dead, "x/a/b")).unwrap();
        block_on(upload.put(&*dead, b"bytes")).unwrap();
        block_on(Upload::begin(&*dead, "x/other")).unwrap();
        // As a process that dies leaves it: nobody completes, aborts or drops it.
        std::mem::forget(dead);
        assert_eq!(files_below(directory.path()).len(), 2);

        let store = open_store(&url).unwrap();
        let found = block_on(store.list_uploads("x/a")).unwrap();
        assert_eq!(found.iter().map(|upload| &*upload.name).collect::<Vec<_>>(), ["x/a/b"]);
        assert!(found[0].created.is_some());
        assert_eq!(block_on(store.list_uploads("")).unwrap().len(), 2);
        assert_eq!(block_on(store.list_uploads("x/a/b/c")).unwrap(), []);
        if by_abort {
            block_on(store.abort(UploadRef { name: "x/a/b", id: &found[0].id })).unwrap();
        } else {
            block_on(store.delete("x/a/b")).unwrap();
        }
        assert_eq!(files_below(directory.path()), [directory.path().join("x/other#1")]);
        assert_eq!(block_on(store.list("")).unwrap(), []);
    }
}

#[test]
fn of_dead_uploads_of_one_object_each_is_removed_by_its_id() {
    let directory = TempDir::new().unwrap();
    let url = url_of(directory.path());
    let dead = open_store(&url).unwrap();
    for _ in 0..3 {
        block_on(Upload::begin(&*dead, "a")).unwrap();
    }
    std::mem::forget(dead);

    let store = open_store(&url).unwrap();
    // None of ours.
    for name in ["a#", "a#03", "a#x"] {
        fs::write(directory.path().join(name), "").unwrap();
    }
    let ids = || -> Vec<_> {
        block_on(store.list_uploads("")).unwrap().into_iter().map(|upload| upload.id).collect()
    };
    let [first, second, third] = &ids()[..] else { panic!("three of them") };
    let abort = |id: &UploadId| block_on(store.abort(UploadRef { name: "a", id })).unwrap();
    abort(first);
    assert_eq!(ids(), [second.clone(), third.clone()]);
    abort(third);
    abort(third);
    assert_eq!(ids(), std::slice::from_ref(second));
    abort(second);
    assert_eq!(ids(), []);
    assert_eq!(files_below(directory.path()).len(), 3);
}

#[test]
fn deletion_may_be_repeated() {
    each_store(|case| {
        case.run(case.store.delete("never/was")).unwrap();
        case.write("a/b", &[b"bytes"]).unwrap();
        case.write("a/c", &[b"other"]).unwrap();
        // A folder of objects is not an object.
        case.run(case.store.delete("a")).unwrap();
        case.run(case.store.delete("a/b/c")).unwrap();
        assert_eq!(case.list("").len(), 2);
        for _ in 0..2 {
            case.run(case.store.delete("a/b")).unwrap();
            assert!(case.size("a/b").unwrap_err().is_not_found());
            assert!(case.get("a/b", 0, 1).unwrap_err().is_not_found());
        }
        assert_eq!(case.list(""), [("a/c".to_owned(), 5)]);
    });
}

#[test]
fn ranges_are_exact_or_an_error() {
    each_store(|case| {
        let bytes: Vec<u8> = (0..100).collect();
        case.write("x", &[&bytes[..33], &bytes[33..]]).unwrap();
        for start in 0..=100u64 {
            for end in [start, start + 1, (start + 100) / 2, 100] {
                if start <= end && end <= 100 {
                    let expected = &bytes[start as usize..end as usize];
                    assert_eq!(case.get("x", start, end).unwrap(), expected, "{start}..{end}");
                }
            }
        }
        for (start, end) in [
            (0, 101),
            (99, 101),
            (100, 101),
            (101, 101),
            (101, 102),
            (5, 4),
            (0, u64::MAX),
            (u64::MAX, u64::MAX),
        ] {
            let error = case.get("x", start, end).unwrap_err();
            assert_eq!(*error.kind(), StoreErrorKind::OutOfRange { start, end, size: 100 }, "{start}..{end}");
            assert!(!error.is_retryable());
        }
    });
}

#[test]
fn lists_by_any_prefix_in_order() {
    each_store(|case| {
        for name in ["b/2", "a/1", "a/11", "a/1.x", "ab/1", "ä/ö ü%20?", "c"] {
            case.write(name, &[name.as_bytes()]).unwrap();
        }
        let names = |prefix: &str| -> Vec<String> {
            case.list(prefix)
                .into_iter()
                .map(|(name, size)| {
                    assert_eq!(size, name.len() as u64);
                    name
                })
                .collect()
        };
        assert_eq!(names(""), ["a/1", "a/1.x", "a/11", "ab/1", "b/2", "c", "ä/ö ü%20?"]);
        assert_eq!(names("a"), ["a/1", "a/1.x", "a/11", "ab/1"]);
        assert_eq!(names("a/"), ["a/1", "a/1.x", "a/11"]);
        assert_eq!(names("a/11"), ["a/11"]);
        assert_eq!(names("c/"), [] as [&str; 0]);
        assert_eq!(names("nothing/here"), [] as [&str; 0]);
        assert_eq!(names("ä/ö ü%"), ["ä/ö ü%20?"]);
        assert_eq!(case.get("ä/ö ü%20?", 0, 2).unwrap(), "ä");
    });
}

#[test]
fn bad_names_are_refused_by_every_operation() {
    each_store(|case| {
        let outside = case.directory.as_ref().map(|directory| directory.path().with_extension("outside"));
        for name in ["", "/abs", "../up", "a/../../up", "a//b", "a/", "nul\0", "line\n", "a#1", "a\\b", "."] {
            let errors = [
                case.run(case.store.create(name)).map(drop).unwrap_err(),
                case.run(case.store.put(name, body(b"x"), Lane::Primary)).map(drop).unwrap_err(),
                case.get(name, 0, 1).map(drop).unwrap_err(),
                case.size(name).map(drop).unwrap_err(),
                case.run(case.store.delete(name)).unwrap_err(),
            ];
            for error in errors {
                assert!(matches!(error.kind(), StoreErrorKind::InvalidName(_)), "{name:?}: {error}");
                assert!(!error.is_retryable());
                assert_eq!(error.object(), name);
                assert_eq!(error.bucket(), case.store.url());
            }
        }
        let listing = case.run(case.store.list("../")).unwrap_err();
        assert!(matches!(listing.kind(), StoreErrorKind::InvalidName(_)), "{listing}");
        assert!(case.files().is_empty());
        assert!(outside.is_none_or(|outside| !outside.exists()));
    });
}

#[test]
fn two_objects_at_a_time_do_not_meet() {
    each_store(|case| {
        let (mut one, mut two) = (case.begin("f/one"), case.begin("f/two"));
        case.put(&mut one, b"1").unwrap();
        case.put(&mut two, b"22").unwrap();
        case.put(&mut one, b"111").unwrap();
        case.run(case.store.abort(two.reference())).unwrap();
        case.complete(&one).unwrap();
        assert_eq!(case.get("f/one", 0, 4).unwrap(), "1111");
        assert_eq!(case.list(""), [("f/one".to_owned(), 4)]);
    });
}

#[test]
fn a_bucket_opened_again_by_its_url_is_the_same() {
    let directory = TempDir::new().unwrap();
    let deep = directory.path().join("not there yet/and deeper");
    for url in [format!("file://{}/", deep.display()), "memory://shared-by-name".to_owned()] {
        let store = open_or_create_store(&url).unwrap();
        block_on(store.put("a", body(b"bytes"), Lane::Primary)).unwrap();
        let again = open_store(store.url()).unwrap();
        assert_eq!(again.url(), store.url());
        assert_eq!(block_on(again.get("a", 0..5)).unwrap(), "bytes");
    }
    assert_eq!(fs::read(deep.join("a")).unwrap(), b"bytes");
    let private = open_store("memory://").unwrap();
    assert!(block_on(private.head("a")).unwrap_err().is_not_found());
}

#[test]
fn urls_that_name_no_bucket_are_refused() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let below_a_file = format!("{}/x", url_of(file.path()));
    for url in [
        "file://relative/path",
        "file:/x",
        "file:///x?y",
        "file:///x#y",
        "ftp://bucket",
        "",
        "x",
        &below_a_file,
    ] {
        let error = open_store(url).unwrap_err();
        assert_eq!((error.operation(), error.object()), (Operation::Open, ""));
        assert!(!error.is_retryable(), "{error}");
        assert!(error.to_string().contains(url));
    }
    let error = open_store("ftp://bucket").unwrap_err();
    assert!(error.to_string().contains("file:///"), "{error}");
    for open in [open_store, open_or_create_store] {
        for url in [&url_of(file.path()), &below_a_file] {
            let error = open(url).unwrap_err();
            assert_eq!(*error.kind(), StoreErrorKind::NoSuchBucket);
            let why = format!("{} is not a directory", file.path().display());
            assert!(error.to_string().ends_with(&why), "{error}");
        }
    }
}

#[test]
fn a_directory_that_is_not_there_is_made_by_who_says_so_and_never_again() {
    let home = TempDir::new().unwrap();
    let path = home.path().join("not/mounted");
    let why = format!("there is no directory {}", path.display());
    let refused = |error: StoreError| {
        assert_eq!(*error.kind(), StoreErrorKind::NoSuchBucket, "{error}");
        assert!(!error.is_retryable() && error.to_string().ends_with(&why), "{error}");
    };
    refused(open_store(&url_of(&path)).unwrap_err());
    assert!(!home.path().join("not").exists());

    let store = open_or_create_store(&url_of(&path)).unwrap();
    block_on(store.put("a/b", body(b"bytes"), Lane::Primary)).unwrap();
    let mut upload = block_on(Upload::begin(&*store, "a/c")).unwrap();
    block_on(upload.put(&*store, b"bytes")).unwrap();
    let away = home.path().join("away");
    fs::rename(&path, &away).unwrap();
    refused(block_on(store.put("a/d", body(b"bytes"), Lane::Primary)).unwrap_err());
    refused(block_on(store.create("a/d")).unwrap_err());
    refused(block_on(store.get("a/b", 0..5)).unwrap_err());
    refused(block_on(store.get("a/b", 0..0)).unwrap_err());
    refused(block_on(store.head("a/b")).unwrap_err());
    refused(block_on(store.list("")).unwrap_err());
    refused(block_on(store.list_uploads("a/")).unwrap_err());
    refused(block_on(store.delete("a/b")).unwrap_err());
    assert_eq!(block_on(upload.complete(&*store)).unwrap_err().outcome(), Outcome::Unknown);
    refused(block_on(store.abort(upload.reference())).unwrap_err());
    assert!(!path.exists());
    // A mount point with nothing mounted.
    fs::create_dir(&path).unwrap();
    let error = block_on(store.get("a/b", 0..5)).unwrap_err();
    assert!(error.is_not_found() && error.to_string().contains("mounted?"), "{error}");

    fs::remove_dir(&path).unwrap();
    fs::rename(&away, &path).unwrap();
    assert_eq!(block_on(store.get("a/b", 0..5)).unwrap(), "bytes");
    let error = block_on(store.get("a/x", 0..5)).unwrap_err();
    assert!(error.is_not_found() && !error.to_string().contains("mounted?"), "{error}");
}

#[test]
fn an_object_of_another_size_is_not_claimed() {
    let directory = TempDir::new().unwrap();
    let store = open_store(&url_of(directory.path())).unwrap();
    let mut upload = block_on(Upload::begin(&*store, "a")).unwrap();
    block_on(upload.put(&*store, b"bytes")).unwrap();
    // Somebody else cuts the temporary file.
    let staged = files_below(directory.path()).remove(0);
    fs::write(&staged, b"byt").unwrap();
    let error = block_on(upload.complete(&*store)).unwrap_err();
    assert_eq!(*error.kind(), StoreErrorKind::WrongSize { expected: 5, found: 3 });
}

#[test]
fn a_commit_that_fails_is_an_error_and_leaves_nothing_claimed() {
    let directory = TempDir::new().unwrap();
    let store = open_store(&url_of(directory.path())).unwrap();
    let mut upload = block_on(Upload::begin(&*store, "a/b")).unwrap();
    block_on(upload.put(&*store, b"bytes")).unwrap();
    // The rename cannot succeed: a folder stands where the object should.
    fs::create_dir_all(directory.path().join("a/b/c")).unwrap();
    let error = block_on(upload.complete(&*store)).unwrap_err();
    assert_eq!((error.operation(), error.object()), (Operation::Complete, "a/b"));
    assert!(block_on(store.head("a/b")).unwrap_err().is_not_found());
}

/// What `file://` promises of power cuts, as far as system calls show it: everything that an answer rests on was synced
/// before the answer. The test runs itself under strace; where that cannot be, it says so and checks nothing, unless
/// `TIDELOG_STRACE=required`.
#[test]
fn local_commits_and_deletions_are_synced_before_ok() {
    const ROLE: &str = "TIDELOG_TRACED_DIRECTORY";
    if let Some(directory) = env::var_os(ROLE) {
        return traced(Path::new(&directory));
    }
    let works = Command::new("strace")
        .args(["-o", "/dev/null", "true"])
        .status()
        .is_ok_and(|status| status.success());
    if !works {
        assert!(
            env::var_os("TIDELOG_STRACE").is_none_or(|value| value != "required"),
            "strace does not work here"
        );
        eprintln!("skipped: strace is missing or may not trace");
        return;
    }
    let directory = TempDir::new().unwrap();
    // strace prints resolved paths.
    let base = fs::canonicalize(directory.path()).unwrap();
    let log = base.join("log");
    let status = Command::new("strace")
        .args([
            "-f",
            "-y",
            "-qq",
            "-s",
            "4096",
            "-e",
            "trace=fsync,fdatasync,rename,renameat,renameat2,unlink,unlinkat,mkdir",
        ])
        .arg("-o")
        .arg(&log)
        .arg(env::current_exe().unwrap())
        .args(["--exact", "local_commits_and_deletions_are_synced_before_ok", "--test-threads=1"])
        .env(ROLE, &base)
        .status()
        .unwrap();
    assert!(status.success());

    let text = fs::read_to_string(&log).unwrap();
    let root = base.join("new/bucket").display().to_string();
    // The first successful call after a line whose text has all of `what`.
    let position = |what: &[String], after: usize| -> usize {
        let fits = |line: &str| line.ends_with("= 0") && what.iter().all(|part| line.contains(part));
        let found = text.lines().enumerate().skip(after).find(|(_, line)| fits(line));
        found.unwrap_or_else(|| panic!("no {what:?} after line {after} of\n{text}")).0
    };
    let sync = |path: &str| vec!["sync(".to_owned(), format!("<{path}>)")];
    let marker = |name: &str| vec![format!("mkdir(\"{}\"", base.join(name).display())];

    let opened = position(&marker("opened"), 0);
    assert!(position(&sync(&base.display().to_string()), 0) < opened);
    assert!(position(&sync(&base.join("new").display().to_string()), 0) < opened);

    let completed = position(&marker("completed"), opened);
    let renamed = position(&["rename".to_owned(), format!("\"{root}/a/b/object\")")], opened);
    assert!(position(&sync(&format!("{root}/a/b/object#1")), opened) < renamed);
    let folder = position(&sync(&format!("{root}/a/b")), renamed);
    assert!(folder < completed);
    assert!(position(&sync(&format!("{root}/a")), opened) < completed);
    assert!(position(&sync(&root), opened) < completed);

    // Folders that somebody else made are synced all the same.
    let foreign = position(&marker("foreign"), completed);
    let begun = position(&[format!("mkdir(\"{root}/x/y\"")], completed);
    assert!(position(&sync(&format!("{root}/x/y")), begun) < foreign);
    assert!(position(&sync(&format!("{root}/x")), begun) < foreign);
    assert!(position(&sync(&root), begun) < foreign);

    let deleted = position(&marker("deleted"), foreign);
    let unlinked = position(&[format!("unlink(\"{root}/a/b/object\")")], foreign);
    assert!(position(&sync(&format!("{root}/a/b")), unlinked) < deleted);

    // A deletion that finds nothing syncs too: the one before may have failed to.
    let repeated = position(&marker("repeated"), deleted);
    assert!(position(&sync(&format!("{root}/a/b")), deleted) < repeated);
}

/// The traced half: each step ends with a folder that marks it in the trace.
fn traced(base: &Path) {
    let mark = |name: &str| fs::create_dir(base.join(name)).unwrap();
    let root = base.join("new/bucket");
    let write = |store: &Arc<dyn Store>, name: &str| {
        if name.starts_with('x') {
            block_on(store.put(name, body(b"bytes"), Lane::Primary)).unwrap();
            return;
        }
        let mut upload = block_on(Upload::begin(&**store, name)).unwrap();
        block_on(upload.put(&**store, b"bytes")).unwrap();
        block_on(upload.complete(&**store)).unwrap();
    };
    let store = open_or_create_store(&url_of(&root)).unwrap();
    mark("opened");
    write(&store, "a/b/object");
    mark("completed");
    fs::create_dir(root.join("x")).unwrap();
    fs::create_dir(root.join("x/y")).unwrap();
    write(&store, "x/y/object");
    mark("foreign");
    block_on(store.delete("a/b/object")).unwrap();
    mark("deleted");
    block_on(store.delete("a/b/object")).unwrap();
    mark("repeated");
}
