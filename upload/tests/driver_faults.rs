//! The driver among stores that hang, panic, cut short and fail: every call is answered, nobody waits for a stranger's
//! request, and memory is counted once.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use tidelog_upload::bucket::{BucketHealth, Health};
use tidelog_upload::multipart::Placement;
use tidelog_upload::sim::SimStore;
use tidelog_upload::{
    Capabilities, Driver, HedgeOptions, Lane, Operation, Parts, Pending, Runtime, Store, StoreError,
    StoreErrorKind, UploadOptions,
};

use common::{
    HOME, Outcome, Time, Trap, Trapped, answer, finish, inline, outcome, placed, put, run_until, small_parts,
};

/// Everything that was asked of a driver, and not yet answered.
struct Calls {
    puts: Vec<Outcome<()>>,
    ends: Vec<(Outcome<Placement>, Pending<bool>)>,
    read: Outcome<bytes::Bytes>,
    swept: Outcome<()>,
}

impl Calls {
    /// A bit of everything.
    fn all(driver: &Driver) -> Calls {
        let mut upload = driver.upload("a", None);
        let mut puts: Vec<_> = ["1234", "5678", "90ab"].map(|part| put(&mut upload, part)).into();
        let end = finish(upload, "cd");
        let small = finish(driver.upload("b", None), "x");
        let mut dropped = driver.upload("c", None);
        puts.push(put(&mut dropped, "123456789"));
        drop(dropped);
        let (done, read) = answer();
        driver.get(HOME, "b", 0..1, done);
        let (done, swept) = answer();
        driver.sweep("d", &[], done);
        Calls { puts, ends: vec![end, small], read, swept }
    }

    /// Waits for every answer. Returns how many were successes.
    fn answered(self) -> usize {
        let mut successes = 0;
        let mut count = |is_ok: bool| successes += usize::from(is_ok);
        for outcome in self.puts {
            count(outcome.wait().unwrap().is_ok());
        }
        for (placement, leftovers) in self.ends {
            count(placement.wait().unwrap().is_ok());
            leftovers.wait().unwrap();
        }
        count(self.read.wait().unwrap().is_ok());
        count(self.swept.wait().unwrap().is_ok());
        successes
    }
}

/// A store whose request number `stuck` never ends, and how many it has seen.
fn stuck_at(stuck: u64) -> (Trapped, Arc<AtomicU64>) {
    let seen = Arc::new(AtomicU64::new(0));
    let counting = Arc::clone(&seen);
    let trap = move |_: Operation, _: &str, _: Lane| {
        (counting.fetch_add(1, Ordering::AcqRel) == stuck).then_some(Trap::Never)
    };
    (Trapped::new(SimStore::new(1), trap), seen)
}

#[test]
fn a_shutdown_at_any_request_answers_everything() {
    for is_inline in [true, false] {
        for stuck in 0.. {
            let (store, seen) = stuck_at(stuck);
            let stores: Vec<Arc<dyn Store>> = vec![Arc::new(store)];
            let driver = if is_inline {
                inline(stores, small_parts()).0
            } else {
                Driver::start(stores, Runtime::Own { threads: 1 }, small_parts()).unwrap()
            };
            let calls = Calls::all(&driver);
            if !is_inline && stuck < 8 {
                // Fewer are not made in any order of events.
                while seen.load(Ordering::Acquire) <= stuck {
                    thread::yield_now();
                }
            }
            driver.shutdown();
            let successes = calls.answered();
            if is_inline && seen.load(Ordering::Acquire) <= stuck {
                // Nothing was stuck: all but the put of the dropped object succeeded.
                assert_eq!(successes, 7);
                assert!(stuck > 10);
                break;
            }
            if !is_inline && stuck == 12 {
                break;
            }
        }
    }
}

#[test]
fn what_comes_after_a_shutdown_is_answered_too() {
    let host = tokio::runtime::Builder::new_multi_thread().worker_threads(1).build().unwrap();
    for runtime in [Runtime::Own { threads: 1 }, Runtime::Handle(host.handle().clone())] {
        let stores: Vec<Arc<dyn Store>> = vec![Arc::new(SimStore::new(1))];
        let driver = Driver::start(stores, runtime, small_parts()).unwrap();
        let mut upload = driver.upload("a", None);
        driver.shutdown();
        let late = put(&mut upload, "late");
        assert_eq!(*late.wait().unwrap().unwrap_err().kind(), StoreErrorKind::ShutDown);
        drop(upload);
        assert_eq!(Calls::all(&driver).answered(), 0);
    }
    // At once where nobody has to notice first, and while the upload is still there.
    let (driver, _) = inline(vec![Arc::new(SimStore::new(1))], small_parts());
    let mut upload = driver.upload("a", None);
    driver.shutdown();
    let mut late = put(&mut upload, "late");
    let outcome = late.wait_timeout(Duration::ZERO).expect("an answer").unwrap();
    assert_eq!(*outcome.unwrap_err().kind(), StoreErrorKind::ShutDown);
    // The caller's runtime is not ours to end.
    assert_eq!(host.block_on(async { host.spawn(async { 7 }).await.unwrap() }), 7);
}

#[test]
fn uploads_that_outlive_their_driver_are_answered() {
    let stores: Vec<Arc<dyn Store>> = vec![Arc::new(SimStore::new(1))];
    let driver = Driver::start(stores, Runtime::Own { threads: 1 }, small_parts()).unwrap();
    let mut upload = driver.upload("a", None);
    drop(driver);
    let late = put(&mut upload, "x");
    assert_eq!(*late.wait().unwrap().unwrap_err().kind(), StoreErrorKind::ShutDown);
    let (placement, leftovers) = finish(upload, "y");
    assert_eq!(*placement.wait().unwrap().unwrap_err().kind(), StoreErrorKind::ShutDown);
    // Nobody knows.
    assert!(leftovers.wait().unwrap());
}

#[test]
fn drivers_that_come_and_go_leave_no_thread() {
    const CYCLES: usize = 60;
    let threads = || std::fs::read_dir("/proc/self/task").unwrap().count();
    let cycle = || {
        let (store, seen) = stuck_at(0);
        let driver =
            Driver::start(vec![Arc::new(store)], Runtime::Own { threads: 2 }, small_parts()).unwrap();
        let stuck = finish(driver.upload("a", None), "x");
        while seen.load(Ordering::Acquire) == 0 {
            thread::yield_now();
        }
        drop(driver);
        stuck.0.wait().unwrap().unwrap_err();
    };
    cycle();
    let before = threads();
    for _ in 0..CYCLES {
        cycle();
    }
    // Other tests of this process start some meanwhile, and threads end a little after they were told to.
    let mut left = threads();
    for _ in 0..1000 {
        if left < before + CYCLES / 2 {
            return;
        }
        thread::sleep(Duration::from_millis(10));
        left = threads();
    }
    panic!("{before} threads before, {left} after");
}

#[test]
fn hung_uploads_keep_no_other_from_starting_and_end_at_their_deadlines() {
    let store = Trapped::new(SimStore::new(1), |operation, name, _| {
        (operation == Operation::Put && name.starts_with("stuck")).then_some(Trap::Never)
    });
    let mut options = small_parts();
    options.connections = Some(2);
    let (driver, time) = inline(vec![Arc::new(store.clone())], options);
    let deadline = Duration::from_secs(120);
    let stuck: Vec<_> = (0..5)
        .map(|number| finish(driver.upload(&format!("stuck/{number}"), Some(time.now() + deadline)), "x"))
        .collect();
    let (placement, _) = finish(driver.upload("good", Some(time.now() + deadline)), "y");
    outcome(&driver, &time, placement).unwrap();
    assert_eq!(time.passed(), Duration::ZERO);
    for (placement, leftovers) in stuck {
        let error = outcome(&driver, &time, placement).unwrap_err();
        assert!(matches!(error.kind(), StoreErrorKind::Deadline(_)), "{error}");
        outcome(&driver, &time, leftovers);
    }
    assert!(time.passed() < deadline * 2, "{:?}", time.passed());
    assert_eq!(driver.stats().bytes_in_memory, 0);
}

#[test]
fn connections_that_one_object_frees_are_used_by_another_at_once() {
    let hangs = AtomicBool::new(true);
    let store = Trapped::new(SimStore::new(1), move |operation, name, _| match (operation, name) {
        (Operation::PutPart, "first") => Some(Trap::Gate),
        (Operation::PutPart, _) => hangs.swap(false, Ordering::Relaxed).then_some(Trap::Never),
        _ => None,
    });
    let mut options = small_parts();
    options.connections = Some(2);
    let (driver, time) = inline(vec![Arc::new(store.clone())], options);
    let ends = ["first", "second"].map(|name| {
        let mut upload = driver.upload(name, None);
        drop(put(&mut upload, "12345678"));
        finish(upload, "9")
    });
    assert_eq!(store.inner.stats().calls(Operation::PutPart), 0);
    store.open_gate();
    driver.tick(time.now());
    // Three of the first one, and all of the second one but the part that hangs.
    assert_eq!(store.inner.stats().calls(Operation::PutPart), 3 + 2);
    drop(ends);
}

#[test]
fn an_object_that_nobody_gave_a_deadline_has_one_from_its_last_byte_on() {
    let store = Trapped::new(SimStore::new(1), |operation, _, _| {
        (operation == Operation::Put).then_some(Trap::Never)
    });
    let (driver, time) = inline(vec![Arc::new(store)], small_parts());
    let mut upload = driver.upload("a", None);
    drop(put(&mut upload, "x"));
    let waiting = Duration::from_secs(10_000);
    time.reach(time.now() + waiting);
    driver.tick(time.now());
    let (placement, leftovers) = finish(upload, "y");
    let error = outcome(&driver, &time, placement).unwrap_err();
    assert!(matches!(error.kind(), StoreErrorKind::Deadline(_)), "{error}");
    assert_eq!(time.passed(), waiting + driver.options().object_timeout);
    outcome(&driver, &time, leftovers);
}

#[test]
fn a_read_that_never_ends_is_given_up_and_asked_again() {
    let tries = AtomicUsize::new(0);
    let store = Trapped::new(SimStore::new(1), move |operation, _, _| {
        (operation == Operation::Get && tries.fetch_add(1, Ordering::Relaxed) < 2).then_some(Trap::Never)
    });
    let (driver, time) = inline(vec![Arc::new(store)], small_parts());
    let (placement, _) = finish(driver.upload("a", None), "abcd");
    outcome(&driver, &time, placement).unwrap();
    let (done, read) = answer();
    driver.get(HOME, "a", 1..3, done);
    // These come; in flight is what goes.
    assert_eq!(driver.stats().bytes_in_flight, 0);
    assert_eq!(outcome(&driver, &time, read).unwrap(), "bc");
    assert_eq!(driver.stats().retries, 2);
    // The second limit was longer than the first.
    assert!(time.passed() >= Duration::from_secs(30), "{:?}", time.passed());
}

#[test]
fn bytes_that_are_missing_are_an_error() {
    let store = Trapped::new(SimStore::new(1), |operation, _, _| {
        (operation == Operation::Get).then_some(Trap::Truncate)
    });
    let (driver, time) = inline(vec![Arc::new(store)], small_parts());
    let (placement, _) = finish(driver.upload("a", None), "abcd");
    outcome(&driver, &time, placement).unwrap();
    let (done, read) = answer();
    driver.get(HOME, "a", 0..4, done);
    let error = outcome(&driver, &time, read).unwrap_err();
    assert_eq!(*error.kind(), StoreErrorKind::Interrupted);
    assert!(error.to_string().contains("3 of 4 bytes came"), "{error}");
    assert_eq!(driver.stats().retries, u64::from(driver.options().request_attempts) - 1);
}

#[test]
fn a_store_that_panics_is_a_failed_request() {
    for operation in [Operation::Put, Operation::Create, Operation::PutPart, Operation::Complete] {
        let panicked = AtomicUsize::new(0);
        let store = Trapped::new(SimStore::new(1), move |asked, _, _| {
            (asked == operation && panicked.fetch_add(1, Ordering::Relaxed) == 0).then_some(Trap::Panic)
        });
        let (driver, time) = inline(vec![Arc::new(store.clone())], small_parts());
        let mut upload = driver.upload("a", None);
        let parts: &[&str] = if operation == Operation::Put { &[] } else { &["1234", "5678"] };
        let puts: Vec<_> = parts.iter().map(|part| put(&mut upload, part)).collect();
        let (placement, leftovers) = finish(upload, "9");
        let placement = outcome(&driver, &time, placement).unwrap();
        outcome(&driver, &time, leftovers);
        for done in puts {
            outcome(&driver, &time, done).unwrap();
        }
        assert_eq!(placed(&[store.0.inner], &placement).len(), parts.len() * 4 + 1);
        assert!(driver.stats().failures > 0);
    }
}

#[test]
fn a_dropped_upload_leaves_nothing() {
    for parts in 0..5 {
        let store = SimStore::new(1);
        let (driver, time) = inline(vec![Arc::new(store.clone())], small_parts());
        let mut upload = driver.upload("a", None);
        let puts: Vec<_> = (0..parts).map(|_| put(&mut upload, "12345")).collect();
        drop(upload);
        for done in puts {
            let _ = outcome(&driver, &time, done);
        }
        run_until(&driver, &time, || store.open_uploads().is_empty());
        assert!(store.objects().is_empty());
        assert_eq!(driver.stats().bytes_in_memory, 0);
        if parts == 0 {
            assert_eq!(driver.stats().requests, 0);
        }
    }
}

#[test]
fn a_store_with_one_writer_gets_its_parts_one_by_one_in_order() {
    let row = Capabilities {
        parts: Parts::Sequential,
        sparse: false,
        resend_part: false,
        list_parts: false,
        ..SimStore::new(1).capabilities().clone()
    };
    let store = SimStore::with_capabilities(1, row);
    let (driver, time) = inline(vec![Arc::new(store.clone())], small_parts());
    let mut upload = driver.upload("a", None);
    for part in ["12345", "678", "9abcdef", "gh"] {
        upload.put(vec![part.into()], |outcome| outcome.unwrap());
    }
    let (placement, _) = finish(upload, "i");
    let placement = outcome(&driver, &time, placement).unwrap();
    assert_eq!(placed(&[store], &placement), b"123456789abcdefghi");
    assert_eq!(driver.stats().failures, 0);
}

/// Two buckets, the first chosen for objects by the machine having a trap for parts of first attempts, and hedging on.
fn hedging(trap: Trap, hedge: Option<Trap>) -> (Driver, Time, Vec<Trapped>) {
    let stores: Vec<_> = (0..2)
        .map(|seed| {
            let trap = move |operation: Operation, _: &str, lane: Lane| match (operation, lane) {
                (Operation::PutPart, Lane::Primary) => Some(trap),
                (Operation::Put | Operation::PutPart, Lane::Hedge) => hedge,
                _ => None,
            };
            Trapped::new(SimStore::new(seed), trap)
        })
        .collect();
    let mut options = small_parts();
    options.hedging = HedgeOptions::default();
    options.connections = Some(3);
    let shared = stores.iter().map(|store| Arc::new(store.clone()) as Arc<dyn Store>).collect();
    let (driver, time) = inline(shared, options);
    (driver, time, stores)
}

#[test]
fn bytes_that_are_raced_are_in_memory_once() {
    let (driver, time, stores) = hedging(Trap::Never, None);
    let mut upload = driver.upload("a", None);
    let first = put(&mut upload, "12345678");
    upload.wanted(None);
    let (placement, leftovers) = finish(upload, "9");
    let placement = outcome(&driver, &time, placement).unwrap();
    assert_eq!(outcome(&driver, &time, first).ok(), Some(()));
    assert!(!outcome(&driver, &time, leftovers));
    let inner: Vec<_> = stores.iter().map(|store| store.inner.clone()).collect();
    assert_eq!(placed(&inner, &placement), b"123456789");
    let stats = driver.stats();
    assert!(stats.hedges >= 3, "{stats:?}");
    assert_eq!((stats.bytes_in_memory_max, stats.bytes_in_memory, stats.bytes_in_flight), (9, 0, 0));
    assert!(inner.iter().all(|store| store.open_uploads().is_empty()));
}

#[test]
fn a_failed_hedge_leaves_the_first_attempt_alone() {
    let (driver, time, stores) = hedging(Trap::Gate, Some(Trap::Fail));
    let mut upload = driver.upload("a", None);
    let first = put(&mut upload, "12345678");
    upload.wanted(None);
    let (placement, _) = finish(upload, "9");
    run_until(&driver, &time, || driver.stats().hedges > 0 && driver.stats().failures > 0);
    for store in &stores {
        store.open_gate();
    }
    let placement = outcome(&driver, &time, placement).unwrap();
    outcome(&driver, &time, first).unwrap();
    // All parts are the first attempts: one object in one bucket.
    assert_eq!((placement.pieces.len(), placement.bytes), (1, 9));
    assert_eq!(driver.stats().cancelled, 0);
}

#[test]
fn an_object_that_has_failed_refuses_more_and_says_why() {
    let store = Trapped::new(SimStore::new(1), |operation, _, _| {
        (operation == Operation::Create).then_some(Trap::Fail)
    });
    let (driver, time) = inline(vec![Arc::new(store.clone())], small_parts());
    let mut upload = driver.upload("a", Some(time.now() + Duration::from_secs(5)));
    let first = put(&mut upload, "123456789");
    let why = outcome(&driver, &time, first).unwrap_err();
    assert!(why.to_string().contains("a trap"), "{why}");
    let late = put(&mut upload, "late");
    assert_eq!(outcome(&driver, &time, late).unwrap_err().to_string(), why.to_string());
    let (placement, _) = finish(upload, "later");
    let error: StoreError = outcome(&driver, &time, placement).unwrap_err();
    assert_eq!(error.to_string(), why.to_string());
    assert_eq!(store.inner.stats().calls(Operation::PutPart), 0);
    assert_eq!(driver.stats().bytes_in_memory, 0);
}

#[test]
fn a_failed_object_lets_go_of_its_bytes_at_once() {
    let store = Trapped::new(SimStore::new(1), |operation, _, _| {
        (operation == Operation::Create).then_some(Trap::Fail)
    });
    let (driver, time) = inline(vec![Arc::new(store)], small_parts());
    let mut upload = driver.upload("a", None);
    // Of these some are in a part, and some wait for more.
    let memory = Arc::new(*b"123456");
    let (done, outcome_of_put) = answer();
    upload.put(vec![bytes::Bytes::from_owner(SharedBytes(Arc::clone(&memory)))], done);
    outcome(&driver, &time, outcome_of_put).unwrap_err();
    assert_eq!(Arc::strong_count(&memory), 1);
    drop(upload);
}

/// Memory of which it can be told when it is let go.
struct SharedBytes(Arc<[u8; 6]>);

impl AsRef<[u8]> for SharedBytes {
    fn as_ref(&self) -> &[u8] {
        &*self.0
    }
}

#[test]
fn what_a_store_was_doing_is_dropped_when_it_is_given_up_even_if_that_panics() {
    for trap in [Trap::Never, Trap::NeverAndBomb] {
        let tries = AtomicUsize::new(0);
        let store = Trapped::new(SimStore::new(1), move |operation, _, _| {
            (operation == Operation::Put && tries.fetch_add(1, Ordering::Relaxed) < 2).then_some(trap)
        });
        let (driver, time) = inline(vec![Arc::new(store.clone())], small_parts());
        let (placement, leftovers) = finish(driver.upload("a", None), "x");
        assert_eq!(store.under_way(), 1);
        assert_eq!(outcome(&driver, &time, placement).unwrap().bytes, 1);
        outcome(&driver, &time, leftovers);
        assert_eq!(store.under_way(), 0);
        assert_eq!(driver.stats().bytes_in_flight, 0);
    }
}

#[test]
fn an_object_larger_than_the_stores_take_is_refused() {
    let row = Capabilities { parts_max: 3, ..SimStore::new(1).capabilities().clone() };
    let row = Capabilities { part_bytes_max: 4, ..row };
    let store = SimStore::with_capabilities(1, row);
    let (driver, time) = inline(vec![Arc::new(store.clone())], small_parts());
    assert_eq!(driver.object_bytes_max(), 12);
    let mut upload = driver.upload("a", None);
    let fits = put(&mut upload, "123456789abc");
    let over = put(&mut upload, "de");
    let error = outcome(&driver, &time, over).unwrap_err();
    assert!(!error.is_retryable() && error.to_string().contains("at most 12 bytes"), "{error}");
    outcome(&driver, &time, fits).unwrap_err();
    let (placement, leftovers) = finish(upload, "");
    outcome(&driver, &time, placement).unwrap_err();
    outcome(&driver, &time, leftovers);
    assert!(store.open_uploads().is_empty() && store.objects().is_empty());
}

#[test]
fn a_caller_that_keeps_to_the_budget_never_waits_for_itself() {
    let mut options = UploadOptions::default();
    options.budget_bytes = 64;
    let store = SimStore::new(1);
    let (driver, time) = inline(vec![Arc::new(store.clone())], options);
    let mut upload = driver.upload("a", None);
    let held = Arc::new(AtomicU64::new(0));
    for _ in 0..40 {
        run_until(&driver, &time, || held.load(Ordering::Relaxed) + 16 <= 64);
        held.fetch_add(16, Ordering::Relaxed);
        let held = Arc::clone(&held);
        upload.put(vec!["0123456789abcdef".into()], move |outcome| {
            outcome.unwrap();
            held.fetch_sub(16, Ordering::Relaxed);
        });
    }
    let (placement, _) = finish(upload, "");
    assert_eq!(outcome(&driver, &time, placement).unwrap().bytes, 640);
    let stats = driver.stats();
    assert!(stats.bytes_in_memory_max <= 64, "{stats:?}");
    assert_eq!((stats.bytes_in_memory, held.load(Ordering::Relaxed)), (0, 0));
}

#[test]
fn each_page_of_a_listing_has_attempts_of_its_own() {
    let asked = Arc::new(AtomicU64::new(0));
    let counting = Arc::clone(&asked);
    // Every second request for a page hangs.
    let store = Trapped::new(SimStore::new(1), move |operation, _, _| {
        let hangs = operation == Operation::List && counting.fetch_add(1, Ordering::Relaxed) % 2 == 1;
        hangs.then_some(Trap::Never)
    });
    store.cut_pages(2);
    let mut options = small_parts();
    options.request_attempts = 2;
    let (driver, time) = inline(vec![Arc::new(store)], options);
    for name in ["a", "b", "c", "d", "e", "f", "g"] {
        let (placement, _) = finish(driver.upload(name, None), "x");
        outcome(&driver, &time, placement).unwrap();
    }
    let (done, listed) = answer();
    driver.list(HOME, "", done);
    let listed = outcome(&driver, &time, listed).unwrap();
    assert_eq!(listed.iter().map(|object| &*object.name).collect::<String>(), "abcdefg");
    // Four pages, of which three were asked for twice.
    assert_eq!(asked.load(Ordering::Relaxed), 7);
}

#[test]
fn a_long_listing_makes_no_other_request_wait_longer() {
    let store = Trapped::new(SimStore::new(1), |operation, _, _| match operation {
        Operation::List => Some(Trap::Gate),
        Operation::Head => Some(Trap::Never),
        _ => None,
    });
    let mut options = small_parts();
    options.request_attempts = 1;
    let (driver, time) = inline(vec![Arc::new(store.clone())], options);
    let (done, listed) = answer();
    driver.list(HOME, "", done);
    driver.tick(time.now());
    time.reach(time.now() + Duration::from_secs(9));
    store.open_gate();
    outcome(&driver, &time, listed).unwrap();
    let before = time.passed();
    let (done, head) = answer();
    driver.head(HOME, "a", done);
    outcome(&driver, &time, head).unwrap_err();
    assert_eq!(time.passed() - before, Duration::from_secs(10));
}

#[test]
fn canaries_bring_a_bucket_back() {
    bring_back(None);
}

#[test]
fn canaries_that_may_not_be_removed_bring_a_bucket_back_every_time() {
    bring_back(Some(Trap::Fail));
}

/// What becomes of the removal of canaries is up to `removal`.
fn bring_back(removal: Option<Trap>) {
    // Which bucket is sick, and how many canaries it was sent.
    let sick = Arc::new(AtomicUsize::new(usize::MAX));
    let canaries = Arc::new(AtomicU64::new(0));
    let stores: Vec<_> = (0..2)
        .map(|bucket| {
            let (sick, canaries) = (Arc::clone(&sick), Arc::clone(&canaries));
            Trapped::new(SimStore::new(bucket as u64), move |operation, name, _| {
                if operation == Operation::Put && name.starts_with("canary") {
                    canaries.fetch_add(1, Ordering::Relaxed);
                }
                match operation {
                    Operation::Put if sick.load(Ordering::Relaxed) == bucket => Some(Trap::Never),
                    Operation::Delete if name.starts_with("canary") => removal,
                    _ => None,
                }
            })
        })
        .collect();
    let mut options = small_parts();
    options.hedging = HedgeOptions::default();
    let shared = stores.iter().map(|store| Arc::new(store.clone()) as Arc<dyn Store>).collect();
    let (driver, time) = inline(shared, options);
    let number = AtomicU64::new(0);
    let upload = || {
        let name = number.fetch_add(1, Ordering::Relaxed).to_string();
        let mut upload = driver.upload(&name, None);
        upload.wanted(None);
        let (placement, leftovers) = finish(upload, "x");
        let placement = outcome(&driver, &time, placement).unwrap();
        outcome(&driver, &time, leftovers);
        placement.pieces[0].bucket
    };
    for _ in 0..2 {
        let home = upload();
        sick.store(home.0, Ordering::Relaxed);
        // It is found to be sick, left alone, and looked at in the background without any upload.
        while driver.tick(time.now()).is_none() {
            upload();
            time.reach(time.now() + Duration::from_secs(600));
        }
        let sent = canaries.load(Ordering::Relaxed);
        run_until(&driver, &time, || canaries.load(Ordering::Relaxed) > sent + 1);
        assert_ne!(upload(), home);
        sick.store(usize::MAX, Ordering::Relaxed);
        let sent = canaries.load(Ordering::Relaxed);
        run_until(&driver, &time, || canaries.load(Ordering::Relaxed) > sent);
        assert_eq!(upload(), home);
    }
    let is_canary = |name: &String| name.starts_with("canary");
    let left = stores.iter().filter(|store| store.inner.objects().keys().any(is_canary)).count();
    assert_eq!(left, usize::from(removal.is_some()));
}

#[test]
fn a_bucket_that_does_not_answer_keeps_no_canary_from_flying() {
    let canaries = Arc::new(AtomicU64::new(0));
    let counting = Arc::clone(&canaries);
    let dead = Trapped::new(SimStore::new(0), move |operation, name, _| {
        if operation == Operation::Put && name.starts_with("canary") {
            counting.fetch_add(1, Ordering::Relaxed);
        }
        Some(Trap::Never)
    });
    let mut options = small_parts();
    options.hedging = HedgeOptions::default();
    let (driver, time) = inline(vec![Arc::new(dead), Arc::new(SimStore::new(1))], options);
    let bad = BucketHealth { good: 0.0, bad: 9.0 };
    driver.merge_health(&[Health { buckets: vec![bad, BucketHealth::default()] }]);
    // The time between them is that of the policy alone: 15 s, 30 s, 60 s.
    let mut passed = Duration::ZERO;
    for (sent, pause) in [(1, 15), (2, 30), (3, 60)] {
        run_until(&driver, &time, || canaries.load(Ordering::Relaxed) == sent);
        assert!(time.passed() - passed < Duration::from_secs(pause + 5), "{:?}", time.passed());
        passed = time.passed();
    }
}

#[test]
fn an_inline_driver_does_the_same_every_time() {
    let history = || {
        let (driver, time, stores) = hedging(Trap::Never, None);
        let uploads: Vec<_> = (0..8)
            .map(|number| {
                let mut upload = driver.upload(&format!("a/{number}"), None);
                drop(put(&mut upload, "12345678"));
                upload.wanted(None);
                finish(upload, "9").0
            })
            .collect();
        let placements: Vec<_> =
            uploads.into_iter().map(|placement| outcome(&driver, &time, placement).unwrap()).collect();
        (placements, time.passed(), stores.iter().map(|store| store.inner.stats()).collect::<Vec<_>>())
    };
    assert_eq!(history(), history());
}
