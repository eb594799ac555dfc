//! The simulated machine: directories, buckets, clock and metrics, and how it dies. No expectation lives here.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use metrics::{
    Counter, CounterFn, Gauge, GaugeFn, Histogram, Key, KeyName, Metadata, Recorder, SharedString, Unit,
};
use tidelog::{Changelog, Compression, Durability, OpenError, Options, Seams};
use tidelog_io::sim::{Crash, Fault, SimRng, SimWorld};
use tidelog_upload::sim::SimStore;
use tidelog_upload::{Capabilities, HedgeOptions, Parts, Store, UploadOptions};

use crate::bucket::{Bucket, Contents, Slow};
use crate::hooked::Hooked;

/// What the network has lost sight of has arrived by then.
const LATE_MICROS_MAX: u64 = 4_000_000;
/// Of a thousand restarts with several directories, at how many one of them is not there.
const AWAY_PER_MILLE: u16 = 250;

/// Everything that a history may vary about the machine. All of it is tiny, so that each history wraps and recycles.
#[derive(Clone, Debug)]
pub struct Shape {
    pub directories: usize,
    /// What each bucket takes.
    pub buckets: Vec<Capabilities>,
    pub hedging: bool,
    pub block_bytes: usize,
    pub blocks_per_segment: u64,
    pub segments: u64,
    /// How many of them are kept for local restores.
    pub retained: u64,
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
            buckets: vec![like_aws()],
            hedging: true,
            block_bytes: 8 << 10,
            blocks_per_segment: 4,
            segments: 6,
            retained: 2,
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
            buckets: (0..1 + rng.below(3)).map(|_| any_bucket(rng)).collect(),
            hedging: rng.chance(700),
            block_bytes,
            blocks_per_segment: 2 + rng.below(5),
            segments: 6 + rng.below(10),
            retained: rng.below(8),
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

    fn options(&self, directories: usize) -> Options {
        let segment_bytes = self.block_bytes as u64 * self.blocks_per_segment;
        let mut uploads = UploadOptions::default();
        if !self.hedging {
            uploads.hedging = HedgeOptions::off();
        }
        let mut options = Options::new("sim://0", "/sim/0")
            .uploads(uploads)
            .lane_bytes(Shape::LANE_BYTES)
            .append_wait_max(Duration::ZERO)
            .linger(self.linger)
            .block_bytes(self.block_bytes)
            .writes_in_flight(self.writes_in_flight)
            .segment_bytes(segment_bytes)
            .local_bytes(segment_bytes * self.segments)
            .local_retention_bytes(segment_bytes * self.retained)
            .memory_bytes(self.memory_bytes)
            .part_bytes(self.part_bytes)
            .value_bytes_max(self.value_bytes_max)
            .compression(self.compression)
            .preemptive_upload(self.preemptive)
            .batch_delay(self.batch_delay);
        for bucket in 1..self.buckets.len() {
            options = options.add_bucket(format!("sim://{bucket}"));
        }
        for directory in 1..directories {
            options = options.add_directory(format!("/sim/{directory}"));
        }
        options
    }
}

fn like_aws() -> Capabilities {
    SimStore::new(0).capabilities().clone()
}

/// A bucket with some of the limits that stores have, so that histories meet all ways to write an object.
fn any_bucket(rng: &mut SimRng) -> Capabilities {
    let mut row = like_aws();
    row.resend_part = rng.chance(500);
    match rng.below(6) {
        // As a local directory: one writer and a rename.
        0 => {
            (row.parts, row.sparse, row.resend_part, row.list_parts) =
                (Parts::Sequential, false, false, false)
        }
        1 => row.parts = Parts::None,
        2 => row.sparse = false,
        3 => row.equal_parts = true,
        _ => {}
    }
    row
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
    /// All directories that there ever were.
    pub worlds: Vec<SimWorld>,
    /// Those that are not lost.
    directories: Vec<usize>,
    /// Those that are opened.
    pub present: Vec<usize>,
    /// One was lost or left out once.
    pub ever_away: bool,
    pub stores: Vec<SimStore>,
    pub readings: Arc<Readings>,
    pub slow: Arc<Slow>,
    plant: Option<Plant>,
    random: SimRng,
    /// Tells what the buckets are asked.
    pub verbose: bool,
    deaths: u64,
    dead: bool,
    started_at: Instant,
    micros: Arc<AtomicU64>,
}

impl Machine {
    pub fn new(seed: u64, shape: Shape, plant: Option<Plant>) -> Machine {
        let mut random = SimRng::new(seed);
        let worlds: Vec<SimWorld> =
            (0..shape.directories).map(|_| SimWorld::new(random.next_u64())).collect();
        let store = |row: &Capabilities| SimStore::with_capabilities(random.next_u64(), row.clone());
        let stores = shape.buckets.iter().map(store).collect();
        Machine {
            directories: (0..worlds.len()).collect(),
            present: (0..worlds.len()).collect(),
            ever_away: false,
            shape,
            worlds,
            stores,
            verbose: false,
            deaths: 0,
            dead: false,
            readings: Arc::default(),
            slow: Arc::default(),
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
        let present = self.present.iter().map(|world| &self.worlds[*world]);
        let directories =
            present.map(|world| (world.files(), Box::new(world.disk(depth, durability)) as Box<_>)).collect();
        let bucket = |store: &SimStore| {
            let (store, worlds, slow) = (store.clone(), self.worlds.clone(), Arc::clone(&self.slow));
            Arc::new(Hooked(Bucket { store, worlds, plant: self.plant, slow, verbose: self.verbose }))
                as Arc<dyn Store>
        };
        let stores = self.stores.iter().map(bucket).collect();
        let (started_at, micros) = (self.started_at, Arc::clone(&self.micros));
        let mut random = SimRng::new(self.random.next_u64());
        let seams = Seams {
            directories,
            stores,
            // It passes by being looked at, so that whoever waits for it by steps sees it pass.
            clock: Arc::new(move || {
                started_at + Duration::from_micros(micros.fetch_add(10, Ordering::Relaxed))
            }),
            random: Box::new(move || random.next_u64()),
        };
        Changelog::open_simulated(self.shape.options(self.present.len()), seams)
    }

    /// Of several directories one is lost, and replaced by an empty one; or left out at the next open; or nothing happens,
    /// and what was left out is back. What was done, if something was.
    pub fn change_directories(&mut self, rng: &mut SimRng) -> Option<String> {
        self.present = self.directories.clone();
        if self.present.len() < 2 || !rng.chance(AWAY_PER_MILLE) {
            return None;
        }
        self.ever_away = true;
        let slot = rng.below(self.present.len() as u64) as usize;
        let world = self.present[slot];
        if rng.chance(500) {
            self.present.remove(slot);
            return Some(format!("directory {world} is left out"));
        }
        self.directories[slot] = self.worlds.len();
        self.present[slot] = self.worlds.len();
        self.worlds.push(SimWorld::new(self.random.next_u64()));
        Some(format!("directory {world} is lost, and replaced by {}", self.present[slot]))
    }

    /// Whether a directory that is not lost is not opened.
    pub fn is_away(&self) -> bool {
        self.present != self.directories
    }

    pub fn pass(&self, time: Duration) {
        let time = time.as_micros() as u64;
        let before = self.micros.fetch_add(time, Ordering::Relaxed);
        self.slow.pass(before + time);
        if before / LATE_MICROS_MAX != (before + time) / LATE_MICROS_MAX {
            self.stores.iter().for_each(SimStore::settle);
        }
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
        self.stores.iter().for_each(SimStore::crash);
        for world in &self.worlds {
            let seed = self.random.next_u64();
            match crash {
                Crash::Process => world.kill(seed),
                Crash::Power => world.power_cut(seed),
            }
        }
        drop(process);
        for store in &self.stores {
            store.settle();
            store.restart();
        }
    }

    /// Directories that the open changelog has given up.
    pub fn is_sick(&self) -> bool {
        !self.readings.sick.lock().unwrap().is_empty()
    }

    /// Whether an engine broke, with what it was writing.
    pub fn engine_broke(&self) -> bool {
        self.worlds.iter().any(|world| world.stats().faults.contains_key(&Fault::EngineBreaks))
    }

    /// Whether something could not be read from a disk.
    pub fn reads_failed(&self) -> bool {
        self.worlds.iter().any(|world| world.stats().faults.contains_key(&Fault::ReadError))
    }

    /// Faults of the disk that struck so far.
    pub fn disk_faults(&self) -> u64 {
        self.worlds.iter().map(|world| world.stats().faults.values().sum::<u64>()).sum()
    }

    /// A bucket is not to be reached until the machine is healed.
    pub fn kill_bucket(&mut self, index: usize) {
        self.stores[index].set_dead(true);
        self.dead = true;
        self.deaths += 1;
    }

    /// Whether a bucket cannot be reached.
    pub fn is_bucket_dead(&self) -> bool {
        self.dead
    }

    /// Faults of the buckets that struck so far.
    pub fn store_faults(&self) -> u64 {
        let faults = |store: &SimStore| store.stats().faults.values().sum::<u64>();
        self.deaths + self.stores.iter().map(faults).sum::<u64>()
    }

    /// What the buckets hold now, for reading without faults.
    pub fn contents(&self) -> Vec<Contents> {
        self.stores.iter().map(Contents::of).collect()
    }

    /// All objects, by bucket and name, with their lengths in bytes.
    pub fn objects(&self) -> BTreeMap<(String, String), u64> {
        let objects = |store: &SimStore| {
            let url = store.url().to_owned();
            store.objects().into_iter().map(move |(name, bytes)| ((url.clone(), name), bytes.len() as u64))
        };
        self.stores.iter().flat_map(objects).collect()
    }

    /// Somebody else deletes a file.
    pub fn delete_object(&self, bucket: &str, name: &str) {
        let store = self.stores.iter().find(|store| store.url() == bucket);
        store.expect("a bucket of this machine").tamper(name, None);
    }

    /// The names of uploads that are neither complete nor aborted.
    pub fn open_uploads(&self) -> Vec<String> {
        self.stores.iter().flat_map(SimStore::open_uploads).collect()
    }

    /// No crash is scheduled any more.
    pub fn call_crash_off(&self) {
        self.worlds.iter().for_each(|world| world.crash_at(u64::MAX / 2, Crash::Process));
    }

    pub fn heal(&mut self) {
        self.dead = false;
        self.slow.set(0, 0);
        for store in &self.stores {
            store.heal();
            store.settle();
        }
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

impl Readings {
    pub fn count(&self, what: &str) {
        *self.counters.lock().unwrap().entry(what.to_owned()).or_default() += 1;
    }

    /// Whether it was counted.
    pub fn has(&self, what: &str) -> bool {
        self.counters.lock().unwrap().get(what).is_some_and(|count| *count > 0)
    }

    /// Notes where a reader has read.
    pub fn read_locally(&self, local_bytes: u64, bytes: u64) {
        for (what, bytes) in [("locally", local_bytes), ("from both", local_bytes.min(bytes))] {
            if bytes > 0 {
                *self.counters.lock().unwrap().entry(format!("bytes read {what}")).or_default() += bytes;
            }
        }
    }
}

/// Gives [`Readings`] what the `metrics` facade is told on this thread.
pub struct Meter(pub Arc<Readings>);

struct Count(Arc<Readings>, String);

struct Sick(Arc<Readings>, String);

/// Two objects that wait for their commits at once.
struct Overlap(Arc<Readings>);

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

impl GaugeFn for Overlap {
    fn increment(&self, _: f64) {}

    fn decrement(&self, _: f64) {}

    fn set(&self, value: f64) {
        if value > 1.0 {
            *self.0.counters.lock().unwrap().entry("objects overlap".to_owned()).or_default() += 1;
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
        match key.name() {
            "tidelog_local_tier_failed" => {
                let directory = key.labels().map(|label| label.value().to_owned()).collect();
                Gauge::from_arc(Arc::new(Sick(Arc::clone(&self.0), directory)))
            }
            "tidelog_objects_committing" => Gauge::from_arc(Arc::new(Overlap(Arc::clone(&self.0)))),
            _ => Gauge::noop(),
        }
    }

    fn register_histogram(&self, _: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::noop()
    }
}
