//! The driver's promises: one outcome per call, bytes in their place, a drop aborts, a shutdown waits for nothing and
//! leaves no caller without an answer.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use tidelog_upload::sim::{Fault, SimStore};
use tidelog_upload::{
    Body, Driver, DriverError, Lane, Operation, Runtime, Store, StoreErrorKind, UploadOptions, Watch,
    block_on,
};

use common::{HOME, answer, finish, inline, placed, put, small_parts};

/// A driver without threads and one with, over the same kind of store.
fn each_driver(test: impl Fn(&Driver, &SimStore)) {
    for is_inline in [true, false] {
        let store = SimStore::new(3);
        let stores: Vec<Arc<dyn Store>> = vec![Arc::new(store.clone())];
        let driver = if is_inline {
            inline(stores, small_parts()).0
        } else {
            Driver::start(stores, Runtime::Own { threads: 2 }, small_parts()).unwrap()
        };
        println!("{}", if is_inline { "inline" } else { "own runtime" });
        test(&driver, &store);
    }
}

#[test]
fn an_object_in_parts_is_what_was_put_and_each_call_is_answered() {
    each_driver(|driver, store| {
        let mut upload = driver.upload("a", None);
        let puts: Vec<_> = ["one ", "two ", "", "three "].map(|part| put(&mut upload, part)).into();
        let (placement, leftovers) = finish(upload, "four");
        let placement = placement.wait().unwrap().unwrap();
        assert_eq!(placed(std::slice::from_ref(store), &placement), b"one two three four");
        assert!(!leftovers.wait().unwrap());
        for outcome in puts {
            outcome.wait().unwrap().unwrap();
        }
        assert!(store.open_uploads().is_empty());
        assert!(store.stats().calls(Operation::PutPart) >= 4);
        let stats = driver.stats();
        assert_eq!((stats.bytes_put, stats.objects, stats.failures), (18, 1, 0));
        assert_eq!((stats.bytes_in_memory, stats.bytes_in_flight), (0, 0));
        assert!(stats.bytes_in_memory_max >= 4);
    });
}

#[test]
fn a_small_object_is_one_request() {
    each_driver(|driver, store| {
        let mut upload = driver.upload("a", None);
        let first = put(&mut upload, "ab");
        assert_eq!(store.stats().calls(Operation::Put), 0);
        let (placement, _) = finish(upload, "cd");
        assert_eq!(placed(std::slice::from_ref(store), &placement.wait().unwrap().unwrap()), b"abcd");
        first.wait().unwrap().unwrap();
        let stats = store.stats();
        assert_eq!((stats.calls(Operation::Put), stats.calls(Operation::Create)), (1, 0));
    });
}

#[test]
fn requests_that_stand_alone() {
    each_driver(|driver, _| {
        let (placement, _) = finish(driver.upload("a", None), "one two three");
        placement.wait().unwrap().unwrap();
        let (done, outcome) = answer();
        driver.get(HOME, "a", 4..7, done);
        assert_eq!(outcome.wait().unwrap().unwrap(), "two");
        let (done, outcome) = answer();
        driver.head(HOME, "a", done);
        assert_eq!(outcome.wait().unwrap().unwrap().bytes, 13);
        let (done, outcome) = answer();
        driver.list(HOME, "", done);
        let listed = outcome.wait().unwrap().unwrap();
        assert_eq!((listed.len(), listed[0].name.as_str(), listed[0].bytes), (1, "a", 13));
        let (done, outcome) = answer();
        driver.delete(HOME, "a", done);
        outcome.wait().unwrap().unwrap();
        let (done, outcome) = answer();
        driver.get(HOME, "a", 0..1, done);
        assert!(outcome.wait().unwrap().unwrap_err().is_not_found());
        assert_eq!((driver.stats().bytes_got, driver.stats().retries), (3, 0));
    });
}

/// What it was shown.
#[derive(Default)]
struct Seen(Vec<Vec<u8>>);

impl Watch for Seen {
    fn see(&mut self, bytes: &[u8]) {
        self.0.push(bytes.to_vec());
    }
}

#[test]
fn a_watched_read_begins_anew_with_each_attempt() {
    each_driver(|driver, store| {
        finish(driver.upload("a", None), "abcdef").0.wait().unwrap().unwrap();
        store.fail_next(Operation::Get, Fault::After);
        let attempts = Arc::new(AtomicUsize::new(0));
        let watch = {
            let attempts = Arc::clone(&attempts);
            move || {
                attempts.fetch_add(1, Ordering::Relaxed);
                Seen::default()
            }
        };
        let (done, outcome) = answer();
        driver.get_watched(HOME, "a", 1..5, watch, done);
        let (bytes, seen) = outcome.wait().unwrap().unwrap();
        assert_eq!((&bytes[..], seen.0), (&b"bcde"[..], vec![b"bc".to_vec(), b"bcde".to_vec()]));
        assert_eq!((attempts.load(Ordering::Relaxed), driver.stats().retries), (2, 1));
    });
}

#[test]
fn a_read_is_asked_again_after_a_refusal_and_not_for_ever() {
    each_driver(|driver, store| {
        finish(driver.upload("a", None), "abcd").0.wait().unwrap().unwrap();
        store.fail_next(Operation::Get, Fault::Throttled);
        store.fail_next(Operation::Get, Fault::Before);
        let (done, outcome) = answer();
        driver.get(HOME, "a", 1..3, done);
        assert_eq!(outcome.wait().unwrap().unwrap(), "bc");
        assert_eq!(driver.stats().retries, 2);
        for _ in 0..driver.options().request_attempts {
            store.fail_next(Operation::Get, Fault::Throttled);
        }
        let (done, outcome) = answer();
        driver.get(HOME, "a", 1..3, done);
        assert_eq!(*outcome.wait().unwrap().unwrap_err().kind(), StoreErrorKind::Throttled);
    });
}

#[test]
fn a_current_thread_runtime_no_bucket_and_options_that_cannot_work_are_refused() {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let handle = Runtime::Handle(runtime.handle().clone());
    let stores: Vec<Arc<dyn Store>> = vec![Arc::new(SimStore::new(1))];
    let error = Driver::start(stores, handle, UploadOptions::default()).unwrap_err();
    assert!(matches!(error, DriverError::CurrentThreadRuntime));
    let error = Driver::start(Vec::new(), Runtime::Own { threads: 1 }, UploadOptions::default());
    assert!(matches!(error.unwrap_err(), DriverError::NoBucket));
    let mut options = UploadOptions::default();
    options.hedging.slow_connection = f64::NAN;
    let stores: Vec<Arc<dyn Store>> = vec![Arc::new(SimStore::new(1))];
    let error = Driver::start(stores, Runtime::Own { threads: 1 }, options).unwrap_err();
    assert!(matches!(&error, DriverError::Option(error) if error.option == "slow_connection"), "{error}");
}

#[test]
fn a_callback_may_start_further_operations() {
    each_driver(|driver, store| {
        let mut second = driver.upload("second", None);
        let (done, size) = answer();
        let mut first = driver.upload("first", None);
        first.put(vec!["1".into()], move |outcome| {
            outcome.unwrap();
            second.put(vec!["22".into()], |outcome| outcome.unwrap());
            second.finish(Vec::new(), done, |_| {});
        });
        assert_eq!(finish(first, "").0.wait().unwrap().unwrap().bytes, 1);
        assert_eq!(size.wait().unwrap().unwrap().bytes, 2);
        assert_eq!(store.objects().len(), 2);
    });
}

#[test]
fn a_sweep_keeps_what_it_is_told_to() {
    let stores = [SimStore::new(1), SimStore::new(2)];
    let shared: Vec<Arc<dyn Store>> =
        stores.iter().map(|store| Arc::new(store.clone()) as Arc<dyn Store>).collect();
    let (driver, _) = inline(shared, small_parts());
    for store in &stores {
        for name in ["g/1", "g/1.00002.1", "g/1.w1", "g/10", "g/2"] {
            let body = Body::new(vec![Bytes::from_static(b"x")]);
            block_on(store.put(name, body, Lane::Primary)).unwrap();
        }
        block_on(store.create("g/1")).unwrap();
        block_on(store.create("g/10")).unwrap();
    }
    let (done, outcome) = answer();
    driver.sweep("g/1", &["g/1".to_owned(), "g/1.00002.1".to_owned()], done);
    outcome.wait().unwrap().unwrap();
    let names = |store: &SimStore| store.objects().into_keys().collect::<Vec<_>>();
    for store in &stores {
        assert_eq!(names(store), ["g/1", "g/1.00002.1", "g/10", "g/2"]);
        assert_eq!(store.open_uploads(), ["g/10"]);
    }
}

#[test]
fn a_sweep_goes_on_after_a_failure_and_tells_it() {
    let store = SimStore::new(1);
    let (driver, _) = inline(vec![Arc::new(store.clone())], small_parts());
    finish(driver.upload("a", None), "x").0.wait().unwrap().unwrap();
    for _ in 0..driver.options().request_attempts {
        store.fail_next(Operation::ListUploads, Fault::Throttled);
    }
    let (done, outcome) = answer();
    driver.sweep("a", &[], done);
    let error = outcome.wait().unwrap().unwrap_err();
    assert_eq!((error.operation(), error.kind()), (Operation::ListUploads, &StoreErrorKind::Throttled));
    assert!(store.objects().is_empty());
}

#[test]
fn panicking_callbacks_keep_nobody_from_being_answered() {
    each_driver(|driver, _| {
        let mut upload = driver.upload("a", None);
        upload.put(vec!["1234".into()], |_| panic!("in a put's callback"));
        let second = put(&mut upload, "5678");
        let (settled, leftovers) = answer();
        upload.finish(vec!["9".into()], |_| panic!("in the object's callback"), settled);
        second.wait().unwrap().unwrap();
        assert!(!leftovers.wait().unwrap());
        assert_eq!(driver.stats().objects, 1);
    });
}

#[cfg(feature = "local")]
#[test]
fn local_files_by_threads_of_its_own_and_by_a_callers_runtime() {
    let host = tokio::runtime::Builder::new_multi_thread().worker_threads(1).build().unwrap();
    for runtime in [Runtime::Own { threads: 2 }, Runtime::Handle(host.handle().clone())] {
        let directory = tempfile::TempDir::new().unwrap();
        let store = tidelog_upload::open_store(&format!("file://{}", directory.path().display())).unwrap();
        let mut options = small_parts();
        options.put_bytes_max = 100_000;
        options.part_bytes = 100_000;
        let driver = Driver::start(vec![store], runtime, options).unwrap();
        let uploads: Vec<_> = (0..8)
            .map(|number| {
                let mut upload = driver.upload(&format!("f/{number}"), None);
                for _ in 0..3 {
                    upload.put(vec![Bytes::from(vec![number; 100_000])], |outcome| outcome.unwrap());
                }
                finish(upload, "end").0
            })
            .collect();
        for placement in uploads {
            assert_eq!(placement.wait().unwrap().unwrap().bytes, 300_003);
        }
        let (done, outcome) = answer();
        driver.get(HOME, "f/5", 299_999..300_003, done);
        assert_eq!(outcome.wait().unwrap().unwrap(), &b"\x05end"[..]);
    }
}
