//! One suite for every store: the contract of `Store` and `ObjectSink`, on a local directory, in memory and simulated,
//! each without a runtime and on tokio's threads. What only local directories promise stands at the end.

use std::env;
use std::fs;
use std::future::Future;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use bytes::Bytes;
use tempfile::TempDir;
use tidelog_upload::driver::block_on;
use tidelog_upload::sim::{Chances, Fault, SimStore};
use tidelog_upload::{ObjectSink, Operation, Store, StoreError, StoreErrorKind, open_store};

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

    fn write(&self, name: &str, parts: &[&[u8]]) -> Result<u64, StoreError> {
        self.run(async {
            let mut sink = self.store.begin(name).await?;
            for part in parts {
                sink.put(slices(part)).await?;
            }
            sink.complete().await
        })
    }

    fn get(&self, name: &str, start: u64, end: u64) -> Result<Bytes, StoreError> {
        self.run(self.store.get(name, start..end))
    }

    fn list(&self, prefix: &str) -> Vec<(String, u64)> {
        self.run(self.store.list(prefix)).unwrap()
    }

    /// All files under the directory, temporary ones too.
    fn files(&self) -> Vec<PathBuf> {
        self.directory.as_ref().map_or_else(Vec::new, |directory| files_below(directory.path()))
    }
}

fn each_store(test: impl Fn(&Case)) {
    for on_tokio in [false, true] {
        for what in ["file", "memory", "sim"] {
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
                "memory" => open_store("memory://").unwrap(),
                _ => Arc::new(SimStore::new(7)),
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

/// A part in several slices, one of them empty.
fn slices(part: &[u8]) -> Vec<Bytes> {
    let (left, right) = part.split_at(part.len() / 3);
    vec![Bytes::copy_from_slice(left), Bytes::new(), Bytes::copy_from_slice(right)]
}

#[test]
fn an_object_is_the_concatenation_of_its_parts() {
    each_store(|case| {
        let big = vec![7u8; 3 << 20];
        assert_eq!(case.write("a/b/c", &[b"one", b"", &big, b"three"]).unwrap(), 8 + (3 << 20));
        assert_eq!(case.run(case.store.size("a/b/c")).unwrap(), 8 + (3 << 20));
        let all = case.get("a/b/c", 0, 8 + (3 << 20)).unwrap();
        assert_eq!(&all[..3], b"one");
        assert!(all[3..3 + big.len()] == big[..]);
        assert_eq!(&all[3 + big.len()..], b"three");
        assert_eq!(case.write("empty", &[]).unwrap(), 0);
        assert_eq!(case.run(case.store.size("empty")).unwrap(), 0);
        assert_eq!(case.get("empty", 0, 0).unwrap(), Bytes::new());
    });
}

#[test]
fn nothing_is_visible_before_complete() {
    each_store(|case| {
        let mut sink = case.run(case.store.begin("a/b")).unwrap();
        case.run(sink.put(slices(b"bytes"))).unwrap();
        assert!(case.run(case.store.size("a/b")).unwrap_err().is_not_found());
        assert!(case.get("a/b", 0, 5).unwrap_err().is_not_found());
        assert!(case.get("a/b", 0, 0).unwrap_err().is_not_found());
        assert_eq!(case.list(""), []);
        assert_eq!(case.run(sink.complete()).unwrap(), 5);
        assert_eq!(case.list(""), [("a/b".to_owned(), 5)]);
        assert_eq!(case.get("a/b", 0, 5).unwrap(), "bytes");
    });
}

#[test]
fn after_an_abort_nothing_is_left() {
    each_store(|case| {
        for parts in 0..3 {
            let mut sink = case.run(case.store.begin("a/b")).unwrap();
            for _ in 0..parts {
                case.run(sink.put(slices(b"bytes"))).unwrap();
            }
            case.run(sink.abort()).unwrap();
            assert!(case.run(case.store.size("a/b")).unwrap_err().is_not_found());
            assert_eq!(case.list(""), []);
            assert_eq!(case.files(), [] as [PathBuf; 0]);
        }
    });
}

#[test]
fn delete_removes_what_an_unfinished_upload_left() {
    each_store(|case| {
        let mut sink = case.run(case.store.begin("a/b")).unwrap();
        case.run(sink.put(slices(b"bytes"))).unwrap();
        // As a process that dies leaves it: nobody completes, aborts or drops it.
        std::mem::forget(sink);
        assert_eq!(case.files().len(), usize::from(case.what == "file"));
        case.run(case.store.delete("a/b")).unwrap();
        assert_eq!(case.files(), [] as [PathBuf; 0]);
        assert_eq!(case.list(""), []);
    });
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
            assert!(case.run(case.store.size("a/b")).unwrap_err().is_not_found());
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
                case.run(case.store.begin(name)).map(drop).unwrap_err(),
                case.get(name, 0, 1).map(drop).unwrap_err(),
                case.run(case.store.size(name)).map(drop).unwrap_err(),
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
        let mut one = case.run(case.store.begin("f/one")).unwrap();
        let mut two = case.run(case.store.begin("f/two")).unwrap();
        case.run(one.put(slices(b"1"))).unwrap();
        case.run(two.put(slices(b"22"))).unwrap();
        case.run(one.put(slices(b"111"))).unwrap();
        case.run(two.abort()).unwrap();
        assert_eq!(case.run(one.complete()).unwrap(), 4);
        assert_eq!(case.get("f/one", 0, 4).unwrap(), "1111");
        assert_eq!(case.list(""), [("f/one".to_owned(), 4)]);
    });
}

#[test]
fn a_bucket_opened_again_by_its_url_is_the_same() {
    let directory = TempDir::new().unwrap();
    let deep = directory.path().join("not there yet/and deeper");
    for url in [format!("file://{}/", deep.display()), "memory://shared-by-name".to_owned()] {
        let store = open_store(&url).unwrap();
        let mut sink = block_on(store.begin("a")).unwrap();
        block_on(sink.put(slices(b"bytes"))).unwrap();
        block_on(sink.complete()).unwrap();
        let again = open_store(store.url()).unwrap();
        assert_eq!(again.url(), store.url());
        assert_eq!(block_on(again.get("a", 0..5)).unwrap(), "bytes");
    }
    assert_eq!(fs::read(deep.join("a")).unwrap(), b"bytes");
    let private = open_store("memory://").unwrap();
    assert!(block_on(private.size("a")).unwrap_err().is_not_found());
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
        "s3://bucket",
        "",
        "x",
        &below_a_file,
    ] {
        let error = open_store(url).unwrap_err();
        assert_eq!((error.operation(), error.object()), (Operation::Open, ""));
        assert!(!error.is_retryable(), "{error}");
        assert!(error.to_string().contains(url));
    }
    let error = open_store("s3://bucket").unwrap_err();
    assert!(error.to_string().contains("file:///"), "{error}");
    let error = open_store(&url_of(file.path())).unwrap_err();
    assert_eq!(*error.kind(), StoreErrorKind::Failed);
}

#[test]
fn an_object_of_another_size_is_not_claimed() {
    let directory = TempDir::new().unwrap();
    let store = open_store(&url_of(directory.path())).unwrap();
    let mut sink = block_on(store.begin("a")).unwrap();
    block_on(sink.put(slices(b"bytes"))).unwrap();
    // Somebody else cuts the temporary file.
    let staged = files_below(directory.path()).remove(0);
    fs::write(&staged, b"byt").unwrap();
    let error = block_on(sink.complete()).unwrap_err();
    assert_eq!(*error.kind(), StoreErrorKind::WrongSize { expected: 5, found: 3 });
}

#[test]
fn a_commit_that_fails_is_an_error_and_leaves_nothing_claimed() {
    let directory = TempDir::new().unwrap();
    let store = open_store(&url_of(directory.path())).unwrap();
    let mut sink = block_on(store.begin("a/b")).unwrap();
    block_on(sink.put(slices(b"bytes"))).unwrap();
    // The rename cannot succeed: a folder stands where the object should.
    fs::create_dir_all(directory.path().join("a/b/c")).unwrap();
    let error = block_on(sink.complete()).unwrap_err();
    assert_eq!((error.operation(), error.object()), (Operation::Complete, "a/b"));
    assert!(block_on(store.size("a/b")).unwrap_err().is_not_found());
}

#[test]
fn simulated_faults_happen_before_or_after() {
    let store = SimStore::new(1);
    store.fail_next(Operation::Begin, Fault::Before);
    let error = block_on(store.begin("a")).map(drop).unwrap_err();
    assert!(error.is_retryable());
    assert_eq!(store.open_uploads(), [] as [&str; 0]);

    let sink = block_on(store.begin("a")).unwrap();
    store.fail_next(Operation::Complete, Fault::After);
    block_on(sink.complete()).unwrap_err();
    assert_eq!(block_on(store.size("a")).unwrap(), 0);

    let mut sink = block_on(store.begin("b")).unwrap();
    store.fail_next(Operation::Put, Fault::After);
    block_on(sink.put(slices(b"x"))).unwrap_err();
    // The first failure stays: the upload cannot be completed as if nothing had happened.
    assert_eq!(*block_on(sink.put(slices(b"x"))).unwrap_err().kind(), StoreErrorKind::Latched);
    assert_eq!(*block_on(sink.complete()).unwrap_err().kind(), StoreErrorKind::Latched);
    assert!(block_on(store.size("b")).unwrap_err().is_not_found());
    assert_eq!(store.stats().calls(Operation::Put), 2);
    assert_eq!(store.stats().bytes_put, 1);
}

#[test]
fn a_simulated_crash_ends_uploads_and_keeps_objects() {
    let store = SimStore::new(1);
    let old = block_on(store.begin("kept")).unwrap();
    block_on(old.complete()).unwrap();
    let mut lost: Box<dyn ObjectSink> = block_on(store.begin("lost")).unwrap();
    store.fail_next(Operation::Put, Fault::CrashAfter);
    block_on(lost.put(slices(b"x"))).unwrap_err();
    assert!(store.is_crashed());
    block_on(store.size("kept")).unwrap_err();
    store.restart();
    assert_eq!(block_on(store.size("kept")).unwrap(), 0);
    block_on(lost.complete()).unwrap_err();
    assert!(block_on(store.size("lost")).unwrap_err().is_not_found());
    assert_eq!(store.open_uploads(), [] as [&str; 0]);
}

#[test]
fn simulated_chances_follow_the_seed() {
    let outcomes = |seed| -> Vec<bool> {
        let store = SimStore::new(seed);
        store.set_chances(Operation::Delete, Chances { before: 0.3, after: 0.2 });
        (0..1000).map(|_| block_on(store.delete("x")).is_ok()).collect()
    };
    assert_eq!(outcomes(5), outcomes(5));
    assert_ne!(outcomes(5), outcomes(6));
    let ok = outcomes(5).into_iter().filter(|ok| *ok).count();
    assert!((400..600).contains(&ok), "{ok} of 1000 at one half");
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
        let mut sink = block_on(store.begin(name)).unwrap();
        block_on(sink.put(slices(b"bytes"))).unwrap();
        block_on(sink.complete()).unwrap();
    };
    let store = open_store(&url_of(&root)).unwrap();
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
