//! The driver's promises: order, one outcome per call, the first failure stays, a drop aborts, a shutdown waits for nothing
//! and leaves no caller without an answer.

use std::future::pending;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use bytes::Bytes;
use tempfile::TempDir;
use tidelog_upload::sim::{Fault, SimStore};
use tidelog_upload::{
    BoxFuture, Driver, DriverError, ObjectSink, ObjectUpload, Operation, Pending, Runtime, Store, StoreError,
    StoreErrorKind, channel, open_store,
};

type Outcome<T> = Pending<Result<T, StoreError>>;

/// A callback and what it will have heard.
fn answer<T: Send + 'static>() -> (impl FnOnce(Result<T, StoreError>) + Send + 'static, Outcome<T>) {
    let (resolver, pending) = channel();
    (move |outcome| resolver.resolve(outcome), pending)
}

fn put(upload: &mut ObjectUpload, bytes: &'static str) -> Outcome<()> {
    let (done, outcome) = answer();
    upload.put(vec![bytes.into()], done);
    outcome
}

fn complete(upload: ObjectUpload) -> Outcome<u64> {
    let (done, outcome) = answer();
    upload.complete(done);
    outcome
}

/// A driver without threads and one with, over the same kind of store.
fn each_driver(test: impl Fn(&Driver, &SimStore)) {
    for inline in [true, false] {
        let store = SimStore::new(3);
        let shared: Arc<dyn Store> = Arc::new(store.clone());
        let driver = if inline {
            Driver::inline(shared)
        } else {
            Driver::start(shared, Runtime::Own { threads: 2 }).unwrap()
        };
        println!("{}", if inline { "inline" } else { "own runtime" });
        test(&driver, &store);
    }
}

#[test]
fn parts_are_put_in_order_and_each_call_is_answered() {
    each_driver(|driver, store| {
        let mut upload = driver.upload("a");
        let puts: Vec<_> = ["one ", "two ", "three"].map(|part| put(&mut upload, part)).into();
        assert_eq!(complete(upload).wait().unwrap().unwrap(), 13);
        for outcome in puts {
            outcome.wait().unwrap().unwrap();
        }
        assert_eq!(store.objects()["a"], "one two three");

        let (done, outcome) = answer();
        driver.get("a", 4..7, done);
        assert_eq!(outcome.wait().unwrap().unwrap(), "two");
        let (done, outcome) = answer();
        driver.size("a", done);
        assert_eq!(outcome.wait().unwrap().unwrap(), 13);
        let (done, outcome) = answer();
        driver.list("", done);
        assert_eq!(outcome.wait().unwrap().unwrap(), [("a".to_owned(), 13)]);
        let (done, outcome) = answer();
        driver.delete("a", done);
        outcome.wait().unwrap().unwrap();
        assert!(store.objects().is_empty());

        let stats = driver.stats();
        assert_eq!((stats.bytes_put, stats.bytes_got, stats.objects, stats.failures), (13, 3, 1, 0));
        assert_eq!(stats.requests, 1 + 3 + 1 + 4);
    });
}

#[test]
fn the_first_failure_is_the_outcome_of_all_that_follows() {
    for (operation, good_puts) in [(Operation::Begin, 0), (Operation::Put, 1)] {
        each_driver(|driver, store| {
            let mut upload = driver.upload("a");
            for _ in 0..good_puts {
                put(&mut upload, "good").wait().unwrap().unwrap();
            }
            store.fail_next(operation, Fault::Before);
            let failed = put(&mut upload, "bad").wait().unwrap().unwrap_err();
            assert_eq!((failed.operation(), failed.is_retryable()), (operation, true));
            let later = put(&mut upload, "late").wait().unwrap().unwrap_err();
            assert_eq!(later.to_string(), failed.to_string());
            let end = complete(upload).wait().unwrap().unwrap_err();
            assert_eq!(end.to_string(), failed.to_string());
            assert!(store.objects().is_empty());
            assert!(store.open_uploads().is_empty(), "the failed upload was not aborted");
            assert_eq!(driver.stats().objects, 0);
        });
    }
}

#[test]
fn an_unproven_commit_is_an_error() {
    each_driver(|driver, store| {
        let mut upload = driver.upload("a");
        put(&mut upload, "x").wait().unwrap().unwrap();
        store.fail_next(Operation::Complete, Fault::After);
        let error = complete(upload).wait().unwrap().unwrap_err();
        assert_eq!(error.operation(), Operation::Complete);
        assert_eq!(driver.stats().objects, 0);
        // Nothing aborts what may be committed.
        assert_eq!(store.stats().calls(Operation::Abort), 0);
    });
}

#[test]
fn a_dropped_upload_is_aborted_and_one_that_sent_nothing_costs_nothing() {
    each_driver(|driver, store| {
        let mut upload = driver.upload("a");
        put(&mut upload, "x").wait().unwrap().unwrap();
        assert_eq!(store.open_uploads(), ["a"]);
        drop(upload);
        // On a driver with threads the abort runs later.
        while !store.open_uploads().is_empty() {
            thread::yield_now();
        }
        assert!(store.objects().is_empty());

        let before = store.stats();
        drop(driver.upload("b"));
        let (done, outcome) = answer();
        driver.upload("c").abort(done);
        outcome.wait().unwrap().unwrap();
        assert_eq!(store.stats().calls(Operation::Begin), before.calls(Operation::Begin));
    });
}

#[test]
fn an_abort_answers_the_parts_that_wait() {
    let store = Arc::new(Stuck::default());
    let driver = Driver::start(Arc::clone(&store) as Arc<dyn Store>, Runtime::Own { threads: 1 }).unwrap();
    let mut upload = driver.upload("a");
    let mut stuck = put(&mut upload, "stuck");
    store.wait_for_puts(1);
    let waiting = put(&mut upload, "waiting");
    let (done, aborted) = answer();
    upload.abort(done);
    assert_eq!(*waiting.wait().unwrap().unwrap_err().kind(), StoreErrorKind::Aborted);
    // The part on its way is not cut off by the abort; only the shutdown does that.
    assert!(stuck.wait_timeout(std::time::Duration::ZERO).is_none());
    driver.shutdown();
    assert_eq!(*stuck.wait().unwrap().unwrap_err().kind(), StoreErrorKind::ShutDown);
    assert_eq!(*aborted.wait().unwrap().unwrap_err().kind(), StoreErrorKind::ShutDown);
}

#[test]
fn a_shutdown_waits_for_nothing_and_answers_everything() {
    let host = tokio::runtime::Builder::new_multi_thread().worker_threads(1).build().unwrap();
    for runtime in [Runtime::Own { threads: 1 }, Runtime::Handle(host.handle().clone())] {
        let store = Arc::new(Stuck::default());
        let driver = Driver::start(Arc::clone(&store) as Arc<dyn Store>, runtime).unwrap();
        let mut upload = driver.upload("a");
        let puts = [put(&mut upload, "stuck"), put(&mut upload, "waiting")];
        let mut other = driver.upload("b");
        let committing = put(&mut other, "stuck");
        let end = complete(other);
        let (done, read) = answer();
        driver.get("a", 0..1, done);
        store.wait_for_puts(2);
        driver.shutdown();
        for outcome in puts.into_iter().chain([committing]) {
            assert_eq!(*outcome.wait().unwrap().unwrap_err().kind(), StoreErrorKind::ShutDown);
        }
        assert_eq!(*end.wait().unwrap().unwrap_err().kind(), StoreErrorKind::ShutDown);
        assert_eq!(*read.wait().unwrap().unwrap_err().kind(), StoreErrorKind::ShutDown);
        // And what comes later.
        assert_eq!(*put(&mut upload, "late").wait().unwrap().unwrap_err().kind(), StoreErrorKind::ShutDown);
        assert_eq!(*complete(upload).wait().unwrap().unwrap_err().kind(), StoreErrorKind::ShutDown);
        let (done, outcome) = answer();
        driver.delete("a", done);
        assert_eq!(*outcome.wait().unwrap().unwrap_err().kind(), StoreErrorKind::ShutDown);
    }
    // The caller's runtime is not ours to end.
    assert_eq!(host.block_on(async { host.spawn(async { 7 }).await.unwrap() }), 7);
}

#[test]
fn uploads_that_outlive_their_driver_are_answered() {
    let driver = Driver::start(Arc::new(SimStore::new(1)), Runtime::Own { threads: 1 }).unwrap();
    let mut upload = driver.upload("a");
    put(&mut upload, "x").wait().unwrap().unwrap();
    drop(driver);
    assert_eq!(*put(&mut upload, "y").wait().unwrap().unwrap_err().kind(), StoreErrorKind::ShutDown);
    drop(upload);
}

#[test]
fn a_current_thread_runtime_is_refused() {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let handle = Runtime::Handle(runtime.handle().clone());
    let error = Driver::start(Arc::new(SimStore::new(1)), handle).unwrap_err();
    assert!(matches!(error, DriverError::CurrentThreadRuntime));
}

#[test]
fn a_callback_may_start_further_operations() {
    each_driver(|driver, store| {
        let mut second = driver.upload("second");
        let (done, size) = answer();
        let mut first = driver.upload("first");
        first.put(vec!["1".into()], move |outcome| {
            outcome.unwrap();
            second.put(vec!["22".into()], |outcome| outcome.unwrap());
            second.complete(done);
        });
        assert_eq!(size.wait().unwrap().unwrap(), 2);
        assert_eq!(complete(first).wait().unwrap().unwrap(), 1);
        assert_eq!(store.objects().len(), 2);
    });
}

#[test]
fn local_files_by_threads_and_by_a_callers_runtime() {
    let host = tokio::runtime::Builder::new_multi_thread().worker_threads(1).build().unwrap();
    for runtime in [Runtime::Own { threads: 2 }, Runtime::Handle(host.handle().clone())] {
        let directory = TempDir::new().unwrap();
        let store = open_store(&format!("file://{}", directory.path().display())).unwrap();
        let driver = Driver::start(store, runtime).unwrap();
        let uploads: Vec<_> = (0..8)
            .map(|number| {
                let mut upload = driver.upload(&format!("f/{number}"));
                for _ in 0..3 {
                    upload.put(vec![Bytes::from(vec![number; 100_000])], |outcome| outcome.unwrap());
                }
                complete(upload)
            })
            .collect();
        for upload in uploads {
            assert_eq!(upload.wait().unwrap().unwrap(), 300_000);
        }
        let (done, outcome) = answer();
        driver.get("f/5", 299_999..300_000, done);
        assert_eq!(outcome.wait().unwrap().unwrap(), &[5][..]);
    }
}

/// A store whose parts and reads never end.
#[derive(Debug, Default)]
struct Stuck {
    puts: Arc<AtomicUsize>,
}

impl Stuck {
    fn wait_for_puts(&self, count: usize) {
        while self.puts.load(Ordering::Acquire) < count {
            thread::yield_now();
        }
    }
}

struct StuckSink(Arc<AtomicUsize>);

impl ObjectSink for StuckSink {
    fn put(&mut self, _part: Vec<Bytes>) -> BoxFuture<'_, Result<(), StoreError>> {
        self.0.fetch_add(1, Ordering::Release);
        Box::pin(pending())
    }

    fn complete(self: Box<Self>) -> BoxFuture<'static, Result<u64, StoreError>> {
        Box::pin(pending())
    }

    fn abort(self: Box<Self>) -> BoxFuture<'static, Result<(), StoreError>> {
        Box::pin(pending())
    }
}

impl Store for Stuck {
    fn begin<'a>(&'a self, _name: &'a str) -> BoxFuture<'a, Result<Box<dyn ObjectSink>, StoreError>> {
        let sink: Box<dyn ObjectSink> = Box::new(StuckSink(Arc::clone(&self.puts)));
        Box::pin(async move { Ok(sink) })
    }

    fn get<'a>(&'a self, _name: &'a str, _range: Range<u64>) -> BoxFuture<'a, Result<Bytes, StoreError>> {
        Box::pin(pending())
    }

    fn size<'a>(&'a self, _name: &'a str) -> BoxFuture<'a, Result<u64, StoreError>> {
        Box::pin(pending())
    }

    fn delete<'a>(&'a self, _name: &'a str) -> BoxFuture<'a, Result<(), StoreError>> {
        Box::pin(pending())
    }

    fn list<'a>(&'a self, _prefix: &'a str) -> BoxFuture<'a, Result<Vec<(String, u64)>, StoreError>> {
        Box::pin(pending())
    }

    fn url(&self) -> &str {
        "stuck://"
    }
}
