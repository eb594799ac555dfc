//! What the tests of the driver share: callbacks, a clock, and a bucket with traps.
#![allow(dead_code)] // each test file uses its part

mod hooked;

use std::future::{pending, poll_fn};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Poll, Waker};
use std::time::{Duration, Instant};

use bytes::Bytes;
use tidelog_upload::bucket::BucketIndex;
use tidelog_upload::multipart::Placement;
use tidelog_upload::sim::SimStore;
use tidelog_upload::store::{ListedObject, Marker, Page};
use tidelog_upload::{
    BoxFuture, Driver, HedgeOptions, Lane, ObjectUpload, Operation, Pending, Store, StoreError,
    UploadOptions, Wire, channel,
};

use hooked::{Hook, Hooked};

pub type Outcome<T> = Pending<Result<T, StoreError>>;

pub const HOME: BucketIndex = BucketIndex(0);

/// A callback and what it will have heard.
pub fn answer<T: Send + 'static>() -> (impl FnOnce(T) + Send + 'static, Pending<T>) {
    let (resolver, pending) = channel();
    (move |outcome| resolver.resolve(outcome), pending)
}

pub fn put(upload: &mut ObjectUpload, bytes: &'static str) -> Outcome<()> {
    let (done, outcome) = answer();
    upload.put(vec![bytes.into()], done);
    outcome
}

/// What an object came to, and whether something may be left of it.
pub fn finish(upload: ObjectUpload, last: &'static str) -> (Outcome<Placement>, Pending<bool>) {
    let (done, placement) = answer();
    let (settled, leftovers) = answer();
    upload.finish(vec![last.into()], done, settled);
    (placement, leftovers)
}

/// Options under which a few bytes are an object of several parts.
pub fn small_parts() -> UploadOptions {
    let mut options = UploadOptions::default();
    options.hedging = HedgeOptions::off();
    options.put_bytes_max = 4;
    options.part_bytes = 4;
    options.hedging.backoff_start = Duration::from_millis(1);
    options
}

/// A clock that is moved by hand.
#[derive(Clone)]
pub struct Time {
    start: Instant,
    passed_ms: Arc<AtomicU64>,
}

impl Time {
    pub fn new() -> Time {
        Time { start: Instant::now(), passed_ms: Arc::default() }
    }

    /// Moves the time forward to `to`.
    pub fn reach(&self, to: Instant) {
        let ms = to.saturating_duration_since(self.start).as_nanos().div_ceil(1_000_000);
        self.passed_ms.fetch_max(ms as u64, Ordering::Relaxed);
    }

    /// How long it has run.
    pub fn passed(&self) -> Duration {
        self.now() - self.start
    }

    pub fn now(&self) -> Instant {
        self.start + Duration::from_millis(self.passed_ms.load(Ordering::Relaxed))
    }
}

pub fn inline(stores: Vec<Arc<dyn Store>>, options: UploadOptions) -> (Driver, Time) {
    let time = Time::new();
    let reading = time.clone();
    (Driver::inline(stores, options, Arc::new(move || reading.now())).unwrap(), time)
}

/// The bytes of a placement.
pub fn placed(stores: &[SimStore], placement: &Placement) -> Vec<u8> {
    let mut bytes = Vec::new();
    for piece in &placement.pieces {
        let object = &stores[piece.bucket.0].objects()[&piece.name];
        bytes.extend_from_slice(&object[piece.offset as usize..(piece.offset + piece.bytes) as usize]);
    }
    assert_eq!(bytes.len() as u64, placement.bytes);
    bytes
}

/// Lets an inline driver go on, and the time with it, until `is_over`.
pub fn run_until(driver: &Driver, time: &Time, mut is_over: impl FnMut() -> bool) {
    for _ in 0..100_000 {
        let next = driver.tick(time.now());
        if is_over() {
            return;
        }
        time.reach(next.expect("nothing is waited for, and it is not over"));
    }
    panic!("it does not end");
}

/// The outcome of a callback, while an inline driver goes on.
pub fn outcome<T>(driver: &Driver, time: &Time, mut pending: Pending<T>) -> T {
    let mut value = None;
    run_until(driver, time, || {
        value = pending.wait_timeout(Duration::ZERO);
        value.is_some()
    });
    value.unwrap().expect("a callback was dropped uncalled")
}

/// What becomes of a request that falls into a trap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trap {
    /// It never ends.
    Never,
    /// Nor does this one, and the store panics when it is given up.
    NeverAndBomb,
    /// It waits until the gate is opened.
    Gate,
    /// The store panics.
    Panic,
    /// It fails so, and nothing was done.
    Fail,
    /// A read brings a byte less.
    Truncate,
}

type Choice = Box<dyn FnMut(Operation, &str, Lane) -> Option<Trap> + Send>;

/// A bucket whose requests fall into traps.
pub type Trapped = Hooked<Traps>;

#[derive(Clone)]
pub struct Traps {
    pub inner: SimStore,
    shared: Arc<Shared>,
}

struct Shared {
    choice: Mutex<Choice>,
    gate: Mutex<(bool, Vec<Waker>)>,
    taken_bytes: Mutex<Option<u64>>,
    page_objects: Mutex<usize>,
    retired: AtomicU64,
    under_way: AtomicU64,
}

/// A request that the store is busy with.
struct UnderWay<'a> {
    count: &'a AtomicU64,
    bomb: bool,
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        self.count.fetch_sub(1, Ordering::Relaxed);
        assert!(!self.bomb, "a bomb");
    }
}

impl Trapped {
    /// `choice` decides for each request as it is first polled.
    pub fn new(
        inner: SimStore,
        choice: impl FnMut(Operation, &str, Lane) -> Option<Trap> + Send + 'static,
    ) -> Trapped {
        let shared = Shared {
            choice: Mutex::new(Box::new(choice)),
            gate: Mutex::default(),
            taken_bytes: Mutex::default(),
            page_objects: Mutex::new(usize::MAX),
            retired: AtomicU64::new(0),
            under_way: AtomicU64::new(0),
        };
        Hooked(Traps { inner, shared: Arc::new(shared) })
    }
}

impl Traps {
    /// Says of the connections of further requests that they have taken so much.
    pub fn take(&self, bytes: u64) {
        *self.shared.taken_bytes.lock().unwrap() = Some(bytes);
    }

    /// Says listings in pages of so many objects from now on.
    pub fn cut_pages(&self, objects: usize) {
        *self.shared.page_objects.lock().unwrap() = objects;
    }

    /// How many connections were to be closed.
    pub fn retired(&self) -> u64 {
        self.shared.retired.load(Ordering::Relaxed)
    }

    /// How many requests have begun, and neither ended nor were given up.
    pub fn under_way(&self) -> u64 {
        self.shared.under_way.load(Ordering::Relaxed)
    }

    /// Lets through whoever waits at the gate.
    pub fn open_gate(&self) {
        let mut gate = self.shared.gate.lock().unwrap();
        gate.0 = true;
        let wakers = std::mem::take(&mut gate.1);
        drop(gate);
        wakers.into_iter().for_each(Waker::wake);
    }
}

impl std::fmt::Debug for Traps {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.inner.fmt(f)
    }
}

impl Hook for Traps {
    fn inner(&self) -> &dyn Store {
        &self.inner
    }

    fn pass<'a, T: Send + 'a>(
        &'a self,
        operation: Operation,
        name: &'a str,
        lane: Lane,
        request: BoxFuture<'a, Result<T, StoreError>>,
    ) -> BoxFuture<'a, Result<T, StoreError>> {
        Box::pin(async move {
            let trap = (self.shared.choice.lock().unwrap())(operation, name, lane);
            let count = &self.shared.under_way;
            count.fetch_add(1, Ordering::Relaxed);
            let _under_way = UnderWay { count, bomb: trap == Some(Trap::NeverAndBomb) };
            match trap {
                None | Some(Trap::Truncate) => request.await,
                Some(Trap::Never | Trap::NeverAndBomb) => pending().await,
                Some(Trap::Panic) => panic!("a trap"),
                Some(Trap::Fail) => {
                    Err(StoreError::failed(operation, self.inner.url(), name, false, "a trap"))
                }
                Some(Trap::Gate) => {
                    poll_fn(|context| {
                        let mut gate = self.shared.gate.lock().unwrap();
                        if gate.0 {
                            return Poll::Ready(());
                        }
                        gate.1.push(context.waker().clone());
                        Poll::Pending
                    })
                    .await;
                    request.await
                }
            }
        })
    }

    fn get<'a>(&'a self, name: &'a str, range: Range<u64>) -> BoxFuture<'a, Result<Bytes, StoreError>> {
        Box::pin(async move {
            let trap = (self.shared.choice.lock().unwrap())(Operation::Get, name, Lane::Primary);
            let bytes = match trap {
                Some(Trap::Never) => pending().await,
                _ => self.inner.get(name, range).await?,
            };
            Ok(if trap == Some(Trap::Truncate) { bytes.slice(..bytes.len() - 1) } else { bytes })
        })
    }

    fn list_page<'a>(
        &'a self,
        prefix: &'a str,
        from: Option<&'a Marker>,
    ) -> BoxFuture<'a, Result<Page<ListedObject>, StoreError>> {
        Box::pin(async move {
            let all = self.pass(Operation::List, prefix, Lane::Primary, self.inner.list(prefix)).await?;
            let begin: usize = from.map_or(0, |(begin, _)| begin.parse().unwrap());
            let end = all.len().min(begin.saturating_add(*self.shared.page_objects.lock().unwrap()));
            let next = (end < all.len()).then(|| (end.to_string(), None));
            Ok(Page { found: all[begin..end].to_vec(), next })
        })
    }

    fn connect(&self, wire: &Wire) {
        if let Some(bytes) = *self.shared.taken_bytes.lock().unwrap() {
            wire.took(bytes);
        }
        let shared = Arc::clone(&self.shared);
        wire.on_retire(move || {
            shared.retired.fetch_add(1, Ordering::Relaxed);
        });
    }
}
