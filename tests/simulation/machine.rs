//! The simulated machine: directories, bucket, clock and metrics, and how it dies. No expectation lives here.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bytes::Bytes;
use metrics::{
    Counter, CounterFn, Gauge, GaugeFn, Histogram, Key, KeyName, Metadata, Recorder, SharedString, Unit,
};
use tidelog::{Changelog, Compression, Durability, OpenError, Options, Seams};
use tidelog_io::sim::{Crash, Fault, SimRng, SimWorld};
use tidelog_upload::sim::SimStore;
use tidelog_upload::{BoxFuture, ObjectSink, Operation, Store, StoreError, StoreErrorKind};

/// Everything that a history may vary about the machine. All of it is tiny, so that each history wraps and recycles.
#[derive(Clone, Debug)]
pub struct Shape {
    pub directories: usize,
    pub block_bytes: usize,
    pub blocks_per_segment: u64,
    pub segments: u64,
    pub writes_in_flight: usize,
    pub memory_bytes: usize,
    pub part_bytes: usize,
    pub value_bytes_max: usize,
    pub compression: Compression,
    pub preemptive: bool,
    pub batch_delay: Duration,
    pub linger: Duration,
}

impl Shape {
    pub const LANE_BYTES: usize = 64 << 10;

    pub fn smallest() -> Shape {
        Shape {
            directories: 1,
            block_bytes: 8 << 10,
            blocks_per_segment: 4,
            segments: 6,
            writes_in_flight: 4,
            memory_bytes: 256 << 10,
            part_bytes: 16 << 10,
            value_bytes_max: 24 << 10,
            compression: Compression::None,
            preemptive: true,
            batch_delay: Duration::from_millis(5),
            linger: Duration::from_millis(10),
        }
    }

    pub fn random(rng: &mut SimRng) -> Shape {
        let block_bytes = [8 << 10, 8 << 10, 12 << 10][rng.below(3) as usize];
        let directories = 1 + usize::from(rng.chance(250));
        Shape {
            directories,
            block_bytes,
            blocks_per_segment: 2 + rng.below(5),
            segments: 6 + rng.below(10),
            writes_in_flight: 1 + rng.below(6) as usize,
            memory_bytes: (256 << 10) * directories * (1 + rng.below(2) as usize),
            part_bytes: block_bytes * (2 + rng.below(3) as usize),
            value_bytes_max: (12 << 10) + rng.below(36 << 10) as usize,
            compression: if rng.chance(300) { Compression::Lz4 } else { Compression::None },
            preemptive: rng.chance(700),
            batch_delay: Duration::from_millis(rng.below(3) * 5),
            linger: Duration::from_millis(2 + rng.below(20)),
        }
    }

    pub fn segments_max(&self) -> u64 {
        self.segments
    }

    fn options(&self) -> Options {
        let segment_bytes = self.block_bytes as u64 * self.blocks_per_segment;
        let mut options = Options::new("sim://", "/sim/0")
            .lane_bytes(Shape::LANE_BYTES)
            .append_wait_max(Duration::ZERO)
            .linger(self.linger)
            .block_bytes(self.block_bytes)
            .writes_in_flight(self.writes_in_flight)
            .segment_bytes(segment_bytes)
            .local_bytes(segment_bytes * self.segments)
            .memory_bytes(self.memory_bytes)
            .part_bytes(self.part_bytes)
            .value_bytes_max(self.value_bytes_max)
            .compression(self.compression)
            .preemptive_upload(self.preemptive)
            .batch_delay(self.batch_delay);
        for directory in 1..self.directories {
            options = options.add_directory(format!("/sim/{directory}"));
        }
        options
    }
}

/// Bugs planted under the changelog, to see that the oracles can fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Plant {
    /// The bucket loses an object after it has proven its commit.
    LoseObject,
    /// The bucket keeps a deleted object.
    KeepDeleted,
    /// The bucket changes a byte of an object.
    RotObject,
    /// The disk calls writes durable that are not.
    ForgetWrites,
    /// The disk reports writes as done and stores them nowhere.
    LoseWrites,
}

/// A machine that survives the processes on it.
pub struct Machine {
    pub shape: Shape,
    pub worlds: Vec<SimWorld>,
    pub store: SimStore,
    pub bucket: Bucket,
    pub readings: Arc<Readings>,
    plant: Option<Plant>,
    random: SimRng,
    started_at: Instant,
    micros: Arc<AtomicU64>,
}

impl Machine {
    pub fn new(seed: u64, shape: Shape, plant: Option<Plant>) -> Machine {
        let mut random = SimRng::new(seed);
        let worlds: Vec<SimWorld> =
            (0..shape.directories).map(|_| SimWorld::new(random.next_u64())).collect();
        let store = SimStore::new(random.next_u64());
        let bucket = Bucket { store: store.clone(), worlds: worlds.clone(), plant, verbose: false };
        Machine {
            shape,
            worlds,
            store,
            bucket,
            readings: Arc::default(),
            plant,
            random,
            started_at: Instant::now(),
            micros: Arc::default(),
        }
    }

    pub fn open(&mut self) -> Result<Changelog, OpenError> {
        self.readings.sick.lock().unwrap().clear();
        let durability = match self.plant {
            Some(Plant::ForgetWrites) => Durability::Process,
            _ => Durability::Power,
        };
        let depth = self.shape.writes_in_flight;
        let directories = self
            .worlds
            .iter()
            .map(|world| (world.files(), Box::new(world.disk(depth, durability)) as Box<_>))
            .collect();
        let (started_at, micros) = (self.started_at, Arc::clone(&self.micros));
        let mut random = SimRng::new(self.random.next_u64());
        let seams = Seams {
            directories,
            store: Arc::new(self.bucket.clone()),
            // It passes by being looked at, so that whoever waits for it by steps sees it pass.
            clock: Arc::new(move || {
                started_at + Duration::from_micros(micros.fetch_add(10, Ordering::Relaxed))
            }),
            random: Box::new(move || random.next_u64()),
        };
        Changelog::open_simulated(self.shape.options(), seams)
    }

    pub fn pass(&self, time: Duration) {
        self.micros.fetch_add(time.as_micros() as u64, Ordering::Relaxed);
    }

    pub fn now(&self) -> u64 {
        self.micros.load(Ordering::Relaxed)
    }

    /// Whether a scheduled crash has struck.
    pub fn is_down(&self) -> bool {
        self.worlds.iter().any(SimWorld::is_down)
    }

    /// Ends the process, or the power; what `process` holds is dropped while the machine is dead.
    pub fn crash<T>(&mut self, crash: Crash, process: T) {
        self.store.crash();
        for world in &self.worlds {
            let seed = self.random.next_u64();
            match crash {
                Crash::Process => world.kill(seed),
                Crash::Power => world.power_cut(seed),
            }
        }
        drop(process);
        self.store.restart();
    }

    /// Directories that the open changelog has given up.
    pub fn is_sick(&self) -> bool {
        !self.readings.sick.lock().unwrap().is_empty()
    }

    /// Whether an engine broke, with what it was writing.
    pub fn engine_broke(&self) -> bool {
        self.worlds.iter().any(|world| world.stats().faults.contains_key(&Fault::EngineBreaks))
    }

    /// Faults of the disk that struck so far.
    pub fn disk_faults(&self) -> u64 {
        self.worlds.iter().map(|world| world.stats().faults.values().sum::<u64>()).sum()
    }

    /// Faults of the bucket that struck so far.
    pub fn store_faults(&self) -> u64 {
        self.store.stats().faults.values().sum()
    }

    /// What the bucket holds now, for reading without faults.
    pub fn contents(&self) -> Contents {
        Contents { url: self.store.url().to_owned(), objects: Arc::new(self.store.objects()) }
    }

    /// No crash is scheduled any more.
    pub fn call_crash_off(&self) {
        self.worlds.iter().for_each(|world| world.crash_at(u64::MAX / 2, Crash::Process));
    }

    pub fn heal(&self) {
        self.store.heal();
        for world in &self.worlds {
            world.clear_faults();
            world.set_capacity_bytes(None);
            world.hold(false);
            if self.plant == Some(Plant::LoseWrites) {
                world.set_fault(Fault::LostWrite, 20);
            }
        }
    }
}

/// What the changelog counted.
#[derive(Debug, Default)]
pub struct Readings {
    pub counters: Mutex<BTreeMap<String, u64>>,
    pub sick: Mutex<BTreeSet<String>>,
}

/// Gives [`Readings`] what the `metrics` facade is told on this thread.
pub struct Meter(pub Arc<Readings>);

struct Count(Arc<Readings>, String);

struct Sick(Arc<Readings>, String);

impl CounterFn for Count {
    fn increment(&self, value: u64) {
        *self.0.counters.lock().unwrap().entry(self.1.clone()).or_default() += value;
    }

    fn absolute(&self, value: u64) {
        self.0.counters.lock().unwrap().insert(self.1.clone(), value);
    }
}

impl GaugeFn for Sick {
    fn increment(&self, _: f64) {}

    fn decrement(&self, _: f64) {}

    fn set(&self, value: f64) {
        if value > 0.0 {
            self.0.sick.lock().unwrap().insert(self.1.clone());
        }
    }
}

impl Recorder for Meter {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        let labels: Vec<&str> = key.labels().map(|label| label.value()).collect();
        let name = [&[key.name()], labels.as_slice()].concat().join(" ");
        Counter::from_arc(Arc::new(Count(Arc::clone(&self.0), name)))
    }

    fn register_gauge(&self, key: &Key, _: &Metadata<'_>) -> Gauge {
        if key.name() != "tidelog_local_tier_failed" {
            return Gauge::noop();
        }
        let directory = key.labels().map(|label| label.value().to_owned()).collect();
        Gauge::from_arc(Arc::new(Sick(Arc::clone(&self.0), directory)))
    }

    fn register_histogram(&self, _: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::noop()
    }
}

/// The simulated bucket as a process sees it that may be dead since a moment ago: when a directory's scheduled crash has
/// struck, the process does nothing more to the bucket either.
#[derive(Clone)]
pub struct Bucket {
    store: SimStore,
    worlds: Vec<SimWorld>,
    plant: Option<Plant>,
    /// Tells what it is asked.
    pub verbose: bool,
}

impl Bucket {
    fn tell<T>(
        &self,
        operation: Operation,
        name: &str,
        outcome: Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        if self.verbose {
            eprintln!("{:>9} {operation} {name}: {}", "", if outcome.is_ok() { "ok" } else { "error" });
        }
        outcome
    }

    fn look(&self) {
        if self.worlds.iter().any(SimWorld::is_down) {
            self.store.crash();
        }
    }
}

impl fmt::Debug for Bucket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.store.fmt(f)
    }
}

impl Store for Bucket {
    fn begin<'a>(&'a self, name: &'a str) -> BoxFuture<'a, Result<Box<dyn ObjectSink>, StoreError>> {
        Box::pin(async move {
            self.look();
            let sink = self.tell(Operation::Begin, name, self.store.begin(name).await)?;
            Ok(Box::new(BucketSink { bucket: self.clone(), name: name.to_owned(), sink })
                as Box<dyn ObjectSink>)
        })
    }

    fn get<'a>(&'a self, name: &'a str, range: Range<u64>) -> BoxFuture<'a, Result<Bytes, StoreError>> {
        self.look();
        self.store.get(name, range)
    }

    fn size<'a>(&'a self, name: &'a str) -> BoxFuture<'a, Result<u64, StoreError>> {
        self.look();
        self.store.size(name)
    }

    fn delete<'a>(&'a self, name: &'a str) -> BoxFuture<'a, Result<(), StoreError>> {
        Box::pin(async move {
            self.look();
            let kept = self.store.objects().get(name).cloned();
            self.tell(Operation::Delete, name, self.store.delete(name).await)?;
            if self.plant == Some(Plant::KeepDeleted) && kept.is_some() {
                self.store.tamper(name, kept);
            }
            Ok(())
        })
    }

    fn list<'a>(&'a self, prefix: &'a str) -> BoxFuture<'a, Result<Vec<(String, u64)>, StoreError>> {
        self.look();
        self.store.list(prefix)
    }

    fn url(&self) -> &str {
        self.store.url()
    }
}

/// What a bucket held at some time. Nothing can be changed in it.
#[derive(Clone, Debug)]
pub struct Contents {
    url: String,
    objects: Arc<BTreeMap<String, Bytes>>,
}

impl Contents {
    fn error<T>(&self, operation: Operation, name: &str, kind: StoreErrorKind) -> Result<T, StoreError> {
        Err(StoreError::new(operation, &self.url, name, kind))
    }

    fn object(&self, operation: Operation, name: &str) -> Result<Bytes, StoreError> {
        match self.objects.get(name) {
            Some(object) => Ok(object.clone()),
            None => self.error(operation, name, StoreErrorKind::NotFound),
        }
    }
}

impl Store for Contents {
    fn begin<'a>(&'a self, name: &'a str) -> BoxFuture<'a, Result<Box<dyn ObjectSink>, StoreError>> {
        Box::pin(async move { self.error(Operation::Begin, name, StoreErrorKind::Failed) })
    }

    fn get<'a>(&'a self, name: &'a str, range: Range<u64>) -> BoxFuture<'a, Result<Bytes, StoreError>> {
        Box::pin(async move {
            let object = self.object(Operation::Get, name)?;
            let (Range { start, end }, size) = (range, object.len() as u64);
            if start > end || end > size {
                return self.error(Operation::Get, name, StoreErrorKind::OutOfRange { start, end, size });
            }
            Ok(object.slice(start as usize..end as usize))
        })
    }

    fn size<'a>(&'a self, name: &'a str) -> BoxFuture<'a, Result<u64, StoreError>> {
        Box::pin(async move { Ok(self.object(Operation::Size, name)?.len() as u64) })
    }

    fn delete<'a>(&'a self, name: &'a str) -> BoxFuture<'a, Result<(), StoreError>> {
        Box::pin(async move { self.error(Operation::Delete, name, StoreErrorKind::Failed) })
    }

    fn list<'a>(&'a self, prefix: &'a str) -> BoxFuture<'a, Result<Vec<(String, u64)>, StoreError>> {
        Box::pin(async move { self.error(Operation::List, prefix, StoreErrorKind::Failed) })
    }

    fn url(&self) -> &str {
        &self.url
    }
}

struct BucketSink {
    bucket: Bucket,
    name: String,
    sink: Box<dyn ObjectSink>,
}

impl ObjectSink for BucketSink {
    fn put(&mut self, part: Vec<Bytes>) -> BoxFuture<'_, Result<(), StoreError>> {
        self.bucket.look();
        self.sink.put(part)
    }

    fn complete(self: Box<Self>) -> BoxFuture<'static, Result<u64, StoreError>> {
        let BucketSink { bucket, name, sink } = *self;
        Box::pin(async move {
            bucket.look();
            let size = bucket.tell(Operation::Complete, &name, sink.complete().await)?;
            match bucket.plant {
                Some(Plant::LoseObject) => bucket.store.tamper(&name, None),
                Some(Plant::RotObject) => {
                    let mut bytes = bucket.store.objects()[&name].to_vec();
                    let at = bytes.len() / 3;
                    bytes[at] ^= 4;
                    bucket.store.tamper(&name, Some(bytes.into()));
                }
                _ => {}
            }
            Ok(size)
        })
    }

    fn abort(self: Box<Self>) -> BoxFuture<'static, Result<(), StoreError>> {
        self.bucket.look();
        self.sink.abort()
    }
}
