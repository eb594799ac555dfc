//! Runs uploads and requests on the stores for callers that are not async, and tells them by callback how each ended.
//!
//! What is sent where and when is decided by [`ObjectMachine`](crate::multipart::ObjectMachine) and
//! [`Policy`]; this carries it out: requests, their time limits and ends, timers, the bytes until
//! nobody needs them. Which object is written when, and how many bytes may wait, is the business of the caller, who counts
//! the bytes that were put until `done` is called for them.
//!
//! Callbacks run on the driver's threads (with [`Driver::inline`], on the calling thread), with none of the driver's locks
//! held, exactly once each, also after a shutdown. They must not block. Their panics and the stores' are caught and logged.
#![forbid(unsafe_code)]

mod answer;
mod attempt;
mod block_on;
mod canary;
mod compose;
mod executor;
mod requests;
mod timers;
mod trouble;
mod upload;

use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::mem;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use ::metrics::SharedString;
use tokio::runtime::{Handle, RuntimeFlavor};

use self::answer::Answer;
use self::attempt::{Attempt, Cancel, Failure};
pub use self::block_on::{block_on, block_on_timeout};
pub use self::compose::{Composed, Composition};
use self::executor::Executor;
use self::requests::Observed;
pub use self::timers::Clock;
use self::timers::Timers;
use self::trouble::Troubles;
use self::upload::Inbox;
pub use self::upload::ObjectUpload;
use crate::bucket::{Bucket, BucketIndex};
use crate::chunk::{ChunkSizes, ChunkSizesError};
use crate::hedge::{Breaker, Health, Policy, PolicyStats};
use crate::metrics;
use crate::options::{UploadOptionError, UploadOptions};
use crate::store::{BoxFuture, Lane, Operation, Store, StoreError, StoreErrorKind};

/// The most threads of an own runtime that may block in a local file system at a time.
const BLOCKING_THREADS_MAX: usize = 64;

/// Where a driver runs.
#[derive(Clone, Debug)]
pub enum Runtime {
    /// On a small runtime of its own, with this many threads (at least one).
    Own {
        /// Number of worker threads.
        threads: usize,
    },
    /// On the caller's multi-thread runtime. Stores that use the network need its I/O and its timers enabled.
    Handle(Handle),
}

/// Why a driver could not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DriverError {
    /// There is no store to run on.
    #[error("uploads need at least one bucket; configure one")]
    NoBucket,
    /// The stores do not go together.
    #[error(transparent)]
    ChunkSizes(#[from] ChunkSizesError),
    /// A value of the options cannot work.
    #[error(transparent)]
    Option(#[from] UploadOptionError),
    /// The handle belongs to a current-thread runtime, where a task that waits for an upload would wait for itself.
    #[error(
        "uploads cannot run on a current-thread tokio runtime: they would deadlock with the task that waits for them; \
         pass the handle of a multi-thread runtime, or let tidelog start its own"
    )]
    CurrentThreadRuntime,
    /// The threads could not be started.
    #[error("the threads for uploads could not be started; check the limits on threads and memory")]
    Start(#[source] io::Error),
}

/// What a driver has done so far, and holds now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DriverStats {
    /// Requests that ended, with success or without.
    pub requests: u64,
    /// Requests that ended without success; cancelled ones are not counted here.
    pub failures: u64,
    /// Requests given up because another one won.
    pub cancelled: u64,
    /// Races begun against late requests.
    pub hedges: u64,
    /// Races that were first.
    pub hedges_won: u64,
    /// Requests asked again by the driver itself.
    pub retries: u64,
    /// Bytes in objects and parts that a store has taken.
    pub bytes_put: u64,
    /// Bytes read.
    pub bytes_got: u64,
    /// Objects proven complete.
    pub objects: u64,
    /// Bytes of objects held in memory now.
    pub bytes_in_memory: u64,
    /// The most that ever were.
    pub bytes_in_memory_max: u64,
    /// Bytes of bodies under way now: what is sent twice counts twice.
    pub bytes_in_flight: u64,
}

/// Runs uploads and requests on a list of stores, its buckets.
///
/// ```
/// use tidelog_upload::bucket::BucketIndex;
/// use tidelog_upload::{Driver, Runtime, UploadOptions, channel, open_store};
///
/// let stores = vec![open_store("memory://")?];
/// let driver = Driver::start(stores, Runtime::Own { threads: 1 }, UploadOptions::default())?;
/// let mut upload = driver.upload("checkpoints/1", None);
/// upload.put(vec!["some ".into()], |_| {});
/// let (resolver, placement) = channel();
/// upload.finish(vec!["bytes".into()], |outcome| resolver.resolve(outcome), |_leftovers| {});
/// let placement = placement.wait()??;
/// assert_eq!(placement.bytes, 10);
/// assert_eq!(placement.pieces[0].bucket, BucketIndex(0));
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Driver {
    core: Arc<Core>,
    /// The own runtime, until the shutdown.
    runtime: Mutex<Option<tokio::runtime::Runtime>>,
}

impl Driver {
    /// A driver on a runtime, with one thread more for its timers.
    ///
    /// # Errors
    /// No store, stores without a common size of parts, a current-thread handle, or threads that cannot be started.
    pub fn start(
        stores: Vec<Arc<dyn Store>>,
        runtime: Runtime,
        options: UploadOptions,
    ) -> Result<Driver, DriverError> {
        let (own, handle) = match runtime {
            Runtime::Own { threads } => {
                let own = tokio::runtime::Builder::new_multi_thread()
                    .worker_threads(threads.max(1))
                    .max_blocking_threads(BLOCKING_THREADS_MAX)
                    .thread_name("tidelog-upload")
                    .enable_all()
                    .build()
                    .map_err(DriverError::Start)?;
                let handle = own.handle().clone();
                (Some(own), handle)
            }
            Runtime::Handle(handle) if handle.runtime_flavor() == RuntimeFlavor::CurrentThread => {
                return Err(DriverError::CurrentThreadRuntime);
            }
            Runtime::Handle(handle) => (None, handle),
        };
        let seed = RandomState::new().hash_one(0);
        let prepared = Prepared::new(stores, options, seed)?;
        let timers = Timers::threaded().map_err(DriverError::Start)?;
        let core = prepared.core(Executor::tokio(handle), timers);
        Ok(Driver { core, runtime: Mutex::new(own) })
    }

    /// A driver without threads, in the time of `clock`: whatever can be done is done on the calling thread, its callbacks
    /// called, when a call returns; what waits for a time goes on in [`tick`](Driver::tick). The same calls on the same
    /// stores have the same outcome. For simulations in one thread and for tools; the stores' futures must not need a
    /// runtime.
    ///
    /// # Errors
    /// No store, or stores without a common size of parts.
    pub fn inline(
        stores: Vec<Arc<dyn Store>>,
        options: UploadOptions,
        clock: Clock,
    ) -> Result<Driver, DriverError> {
        // FNV-1a of the URLs: another world, other dice.
        let seed = stores
            .iter()
            .flat_map(|store| store.url().bytes())
            .fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
                (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
            });
        let core = Prepared::new(stores, options, seed)?.core(Executor::inline(), Timers::manual(clock));
        Ok(Driver { core, runtime: Mutex::new(None) })
    }

    /// Lets an [inline](Driver::inline) driver do what waited for a time up to `now`, which its clock has reached, and
    /// says when it wants to be called next. On other drivers it does nothing.
    pub fn tick(&self, now: Instant) -> Option<Instant> {
        if !self.core.executor.is_inline() {
            return None;
        }
        self.core.timers.fire(now);
        self.core.executor.run();
        self.core.timers.next()
    }

    /// The stores, in the order of their [`BucketIndex`].
    #[must_use]
    pub fn stores(&self) -> &[Arc<dyn Store>] {
        &self.core.stores
    }

    /// The options, with sizes made to fit the budget.
    #[must_use]
    pub fn options(&self) -> &UploadOptions {
        &self.core.options
    }

    /// The most bytes that an object may have.
    #[must_use]
    pub fn object_bytes_max(&self) -> u64 {
        self.core.sizes.object_bytes_max()
    }

    /// What was done so far.
    #[must_use]
    pub fn stats(&self) -> DriverStats {
        let counters = &self.core.counters;
        let races = self.core.policy().stats();
        DriverStats {
            requests: counters.requests.load(Relaxed),
            failures: counters.failures.load(Relaxed),
            cancelled: counters.cancelled.load(Relaxed),
            hedges: races.hedges,
            hedges_won: races.hedges_won,
            retries: counters.retries.load(Relaxed),
            bytes_put: counters.bytes_put.load(Relaxed),
            bytes_got: counters.bytes_got.load(Relaxed),
            objects: counters.objects.load(Relaxed),
            bytes_in_memory: counters.memory.load(Relaxed),
            bytes_in_memory_max: counters.memory_max.load(Relaxed),
            bytes_in_flight: counters.in_flight.load(Relaxed),
        }
    }

    /// What this node has learned about the buckets, for others.
    #[must_use]
    pub fn health(&self) -> Health {
        self.core.policy().health(self.core.timers.now())
    }

    /// Takes over what other nodes have learned about the same buckets.
    pub fn merge_health(&self, others: &[Health]) {
        self.core.policy().merge(others, self.core.timers.now());
        self.core.policy_changed();
    }

    /// How the tiny objects are called that show whether a bucket works again. They are written one at a time and removed at
    /// once; a crash may leave one, which the next one with that name takes along. Said once, before anything is written:
    /// else their name is `canary`.
    pub fn name_canaries(&self, name: String) {
        let _ = self.core.canary_name.set(name);
    }

    /// An object to be written, that fails when it is not complete by `deadline`. No store hears of it before its bytes
    /// are there. `name` must be unique for ever: of what the writing may leave behind, all names start with it.
    #[must_use = "dropping an upload aborts it"]
    pub fn upload(&self, name: &str, deadline: Option<Instant>) -> ObjectUpload {
        upload::start(&self.core, name, deadline)
    }

    /// Gives up whatever has not ended: its callbacks are called with [`StoreErrorKind::ShutDown`], soon, from another
    /// thread (with [`inline`](Driver::inline), before the call returns). Waits for nothing. A caller that wants its
    /// uploads finished waits for them first. Also done on drop.
    pub fn shutdown(&self) {
        self.core.executor.close();
        self.core.timers.close();
        let own = self.runtime.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(own) = own {
            own.shutdown_background();
        }
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        self.shutdown();
    }
}

/// All of a [`Core`] but where it runs: what can be refused before threads are started.
struct Prepared {
    stores: Vec<Arc<dyn Store>>,
    options: UploadOptions,
    sizes: ChunkSizes,
    policy: Policy,
    seed: u64,
}

impl Prepared {
    fn new(stores: Vec<Arc<dyn Store>>, options: UploadOptions, seed: u64) -> Result<Prepared, DriverError> {
        if stores.is_empty() {
            return Err(DriverError::NoBucket);
        }
        options.check()?;
        let options = within_budget(options);
        let sizes = ChunkSizes::new(&options, stores.iter().map(|store| store.capabilities()))?;
        let buckets = stores
            .iter()
            .map(|store| Bucket { url: store.url().into(), capabilities: store.capabilities().clone() })
            .collect();
        let policy = Policy::new(options.clone(), buckets, seed);
        Ok(Prepared { stores, options, sizes, policy, seed })
    }

    fn core(self, executor: Executor, timers: Arc<Timers>) -> Arc<Core> {
        metrics::describe();
        let told = Told { stats: PolicyStats::default(), open: vec![false; self.stores.len()] };
        let core = Arc::new(Core {
            labels: self.stores.iter().map(|store| metrics::bucket_label(store.url())).collect(),
            observed: Observed::new(self.stores.len()),
            troubles: Troubles::new(self.stores.len()),
            stores: self.stores,
            options: self.options,
            sizes: self.sizes,
            policy: Mutex::new(self.policy),
            executor,
            timers,
            random: Mutex::new(self.seed),
            counters: Counters::default(),
            uploads_begun: AtomicU64::new(0),
            uploads: Mutex::default(),
            canaries: canary::Alarm::default(),
            canary_name: OnceLock::new(),
            told: Mutex::new(told),
        });
        canary::start(&core);
        core
    }
}

/// A caller that puts no more than the budget must always get some of it back before the object ends: what is held back
/// for a single PUT, what is kept until the commit, and a part or two have room in it together.
fn within_budget(mut options: UploadOptions) -> UploadOptions {
    let budget = options.budget_bytes;
    options.put_bytes_max = options.put_bytes_max.min(budget / 8);
    options.part_bytes = options.part_bytes.min(budget / 8);
    options.retain_bytes_max = options.retain_bytes_max.min(budget / 2);
    options
}

/// What a driver shares with its tasks.
#[derive(Debug)]
struct Core {
    stores: Vec<Arc<dyn Store>>,
    /// Their names in metrics.
    labels: Vec<SharedString>,
    options: UploadOptions,
    sizes: ChunkSizes,
    policy: Mutex<Policy>,
    executor: Executor,
    timers: Arc<Timers>,
    observed: Observed,
    troubles: Troubles,
    random: Mutex<u64>,
    counters: Counters,
    /// The uploads under way, by number in the order of their beginning.
    uploads_begun: AtomicU64,
    uploads: Mutex<BTreeMap<u64, Arc<Inbox>>>,
    canaries: canary::Alarm,
    canary_name: OnceLock<String>,
    told: Mutex<Told>,
}

/// What metrics have said of the policy.
#[derive(Debug)]
struct Told {
    stats: PolicyStats,
    /// By bucket, whether its breaker is open.
    open: Vec<bool>,
}

#[derive(Debug, Default)]
struct Counters {
    requests: AtomicU64,
    failures: AtomicU64,
    cancelled: AtomicU64,
    retries: AtomicU64,
    bytes_put: AtomicU64,
    bytes_got: AtomicU64,
    objects: AtomicU64,
    memory: AtomicU64,
    memory_max: AtomicU64,
    in_flight: AtomicU64,
}

impl Counters {
    /// So many bytes more are in memory.
    fn hold(&self, bytes: u64) {
        let held = self.memory.fetch_add(bytes, Relaxed) + bytes;
        self.memory_max.fetch_max(held, Relaxed);
    }
}

/// What is asked of a bucket, for its error and its metrics.
#[derive(Clone, Copy, Debug)]
struct What<'a> {
    bucket: BucketIndex,
    operation: Operation,
    name: &'a str,
    /// Of the body that is sent or wanted.
    bytes: u64,
}

impl<'a> What<'a> {
    /// A request without a body.
    fn control(bucket: BucketIndex, operation: Operation, name: &'a str) -> What<'a> {
        What { bucket, operation, name, bytes: 0 }
    }
}

impl Core {
    fn store(&self, bucket: BucketIndex) -> &Arc<dyn Store> {
        &self.stores[bucket.0]
    }

    fn error(&self, what: What<'_>, kind: StoreErrorKind) -> StoreError {
        StoreError::new(what.operation, self.store(what.bucket).url(), what.name, kind)
    }

    /// A callback that hears of the shutdown if of nothing else.
    fn answer<T>(
        &self,
        bucket: BucketIndex,
        operation: Operation,
        name: &str,
        done: impl FnOnce(Result<T, StoreError>) + Send + 'static,
    ) -> Answer<Result<T, StoreError>> {
        let error = self.error(What::control(bucket, operation, name), StoreErrorKind::ShutDown);
        Answer::new(Err(error), done)
    }

    /// Makes one attempt of a request, and counts it.
    async fn attempt<T>(
        &self,
        what: What<'_>,
        lane: Lane,
        timeout: Duration,
        cancel: Cancel,
        future: BoxFuture<'static, Result<T, StoreError>>,
    ) -> Result<T, StoreError> {
        let sends = matches!(what.operation, Operation::Put | Operation::PutPart);
        let in_flight = InFlight::new(self, lane, if sends { what.bytes } else { 0 });
        let started = self.timers.now();
        let outcome =
            Attempt::new(&self.timers, timeout, cancel, future).await.map_err(|failure| match failure {
                Failure::Store(error) => error,
                Failure::GivenUp(kind) => self.error(what, kind),
            });
        drop(in_flight);
        self.count(what, &outcome, started);
        self.warn(what, sends, &outcome, started);
        outcome
    }

    /// Says when the requests to a bucket keep failing, and when they succeed again; and when one of several buckets refuses
    /// objects, of which no error tells as long as another one takes them.
    fn warn<T>(&self, what: What<'_>, sends: bool, outcome: &Result<T, StoreError>, started: Instant) {
        let now = self.timers.now();
        match outcome {
            Ok(_) => {
                if let Some(long) = self.troubles.succeeded(what.bucket, sends, now) {
                    let bucket = self.store(what.bucket).url();
                    tracing::info!("requests to bucket {bucket} succeed again, after {}s", long.as_secs());
                }
            }
            Err(error) if error.is_retryable() => {
                if let Some(long) = self.troubles.failed(what.bucket, sends, started, now) {
                    tracing::warn!(
                        "requests to a bucket have failed for {}s; they are tried again until the time of what needs them \
                         is over (for a checkpoint: persist_timeout): {error}",
                        long.as_secs()
                    );
                }
            }
            Err(error) => {
                let refused = matches!(
                    error.kind(),
                    StoreErrorKind::NoSuchBucket | StoreErrorKind::Denied | StoreErrorKind::Misconfigured
                );
                let writes = matches!(
                    what.operation,
                    Operation::Put | Operation::Create | Operation::PutPart | Operation::Complete
                );
                if self.stores.len() > 1 && refused && writes && self.troubles.refused(what.bucket, now) {
                    tracing::warn!("one of the buckets refuses objects, they go to the others: {error}");
                }
            }
        }
    }

    fn count<T>(&self, what: What<'_>, outcome: &Result<T, StoreError>, started: Instant) {
        let counters = &self.counters;
        counters.requests.fetch_add(1, Relaxed);
        match (outcome, what.operation) {
            (Ok(_), Operation::Put | Operation::PutPart) => {
                counters.bytes_put.fetch_add(what.bytes, Relaxed);
            }
            (Ok(_), Operation::Get) => {
                counters.bytes_got.fetch_add(what.bytes, Relaxed);
            }
            (Ok(_), _) => {}
            (Err(error), _) if *error.kind() == StoreErrorKind::Cancelled => {
                counters.cancelled.fetch_add(1, Relaxed);
            }
            (Err(_), _) => {
                counters.failures.fetch_add(1, Relaxed);
            }
        }
        let took = self.timers.now().saturating_duration_since(started);
        let label = &self.labels[what.bucket.0];
        metrics::request(label, what.operation, metrics::outcome_label(outcome), what.bytes, took);
    }

    fn retries(&self, bucket: BucketIndex, operation: Operation) {
        self.counters.retries.fetch_add(1, Relaxed);
        metrics::retry(&self.labels[bucket.0], operation);
    }

    fn policy(&self) -> MutexGuard<'_, Policy> {
        self.policy.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// After every change of the policy, with its lock released: tells what is to be known of it.
    fn policy_changed(&self) {
        let now = self.timers.now();
        // Held from before the look at the policy: who looked later must not be followed by who looked earlier.
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        let (deadline, stats, open) = {
            let policy = self.policy();
            let open: Vec<_> = (0..self.stores.len())
                .map(|bucket| policy.breaker(BucketIndex(bucket), now) == Breaker::Open)
                .collect();
            (policy.deadline(), policy.stats(), open)
        };
        self.canaries.set(deadline);
        let before = mem::replace(&mut *told, Told { stats, open });
        for (event, before, now) in [
            ("issued", before.stats.hedges, stats.hedges),
            ("won", before.stats.hedges_won, stats.hedges_won),
            ("denied", before.stats.hedges_denied, stats.hedges_denied),
        ] {
            metrics::hedges(event, now - before);
        }
        for ((label, before), now) in self.labels.iter().zip(before.open).zip(&told.open) {
            if before != *now {
                metrics::breaker(label, *now);
            }
        }
    }

    fn uploads(&self) -> MutexGuard<'_, BTreeMap<u64, Arc<Inbox>>> {
        self.uploads.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A random number in [0, 1), by splitmix64.
    fn random(&self) -> f64 {
        (self.random_u64() >> 11) as f64 / (1_u64 << 53) as f64
    }

    fn random_u64(&self) -> u64 {
        let mut state = self.random.lock().unwrap_or_else(PoisonError::into_inner);
        *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = *state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

/// A body under way.
struct InFlight<'a> {
    core: &'a Core,
    lane: Lane,
    bytes: u64,
}

impl<'a> InFlight<'a> {
    fn new(core: &'a Core, lane: Lane, bytes: u64) -> InFlight<'a> {
        core.counters.in_flight.fetch_add(bytes, Relaxed);
        metrics::in_flight(lane, bytes as i64);
        InFlight { core, lane, bytes }
    }
}

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        self.core.counters.in_flight.fetch_sub(self.bytes, Relaxed);
        metrics::in_flight(self.lane, -(self.bytes as i64));
    }
}
