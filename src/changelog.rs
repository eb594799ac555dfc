//! `Changelog`: opens local directories and a bucket, recovers what was there, makes writers, closes.
//!
//! Owns the threads and how they are wired. What each does is in spill.rs and uploader.rs; what a directory held is found
//! by recovery.rs.

mod holds;
mod restore;
mod site;
#[cfg(test)]
mod tests;
mod wiring;

use std::fmt;
use std::io::{self, Read};
use std::path::Path;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::Sender;
use tidelog_io::aligned::Arena;
use tidelog_io::directory::Directory;
use tidelog_io::disk::{Disk, EngineInfo, Files};
use tidelog_io::engine;
use tidelog_upload::{Abandoned, Driver, Pending, Runtime, Store};

use self::site::{OpenSite, check_room};
use self::wiring::build;
use crate::custody::Readers;
use crate::device::{Device, LaneRef, Log, SLOTS_MAX, SpillRequest, lock};
use crate::error::{CloseError, ControlError, CreateError, Forked, OpenError, SyncError};
use crate::handle::LOG_NAME_BYTES_MAX;
use crate::health::BucketHealth;
use crate::ledger::Ledger;
use crate::local::index::LocalIndex;
use crate::manifest::ManifestRecord;
use crate::options::{OptionError, Options, UploadRuntime, check_places, resolved};
use crate::reader::LocalSite;
use crate::recovered::RecoveredLog;
use crate::spill::Spiller;
use crate::types::{KeyGroupRange, LogId, SequenceNumber};
use crate::uploader::{Event, Uploader};
use crate::writer::ChangelogWriter;

/// How many steps of a simulated machine stand for waiting.
const STEPS_MAX: usize = 10_000;
/// Threads for uploads of tidelog's own runtime.
const UPLOAD_THREADS: usize = 2;

/// An open changelog: local directories, a bucket, and the threads between them.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let dir = tempfile::tempdir()?;
/// # let bucket = format!("file://{}", dir.path().join("bucket").display());
/// use std::time::Duration;
/// use tidelog::{Changelog, KeyGroup, KeyGroupRange, Options};
///
/// let options = Options::new(bucket, dir.path().join("local")).segment_bytes(1 << 20).local_bytes(4 << 20);
/// let changelog = Changelog::open(options.clone())?;
/// let mut writer = changelog.create_writer("counts", KeyGroupRange::ALL)?;
/// writer.append(KeyGroup(1), b"one")?;
/// writer.sync().wait()?;
/// drop(writer);
/// changelog.close(Duration::from_secs(10))?;
///
/// let changelog = Changelog::open(options)?;
/// assert_eq!(changelog.recovered()[0].end().0, 1);
/// # Ok(()) }
/// ```
///
/// Dropping it stops intake and waits for the local writes in flight, never for the network.
///
/// It belongs to the process that opened it. In a child by fork, verbs are refused with [`Forked`](crate::Forked), and drops
/// do nothing. Only [`append`](ChangelogWriter::append) does not look, since it would cost each of them: lanes are memory
/// that a child does not get, so an append there is a fault (SIGSEGV) that ends the child. A future from before the fork
/// never resolves there.
pub struct Changelog {
    core: Arc<Core>,
    recovered: Vec<RecoveredLog>,
    engine: Mutex<Engine>,
    /// Locks on the directories, released last.
    _directories: Vec<Directory>,
}

/// What runs the spillers and the uploader.
enum Engine {
    Threads {
        spillers: Vec<JoinHandle<()>>,
        uploader: Option<JoinHandle<()>>,
    },
    /// A simulation calls [`Changelog::step`].
    Manual {
        spillers: Vec<Spiller>,
        uploader: Box<Uploader>,
    },
}

/// What a changelog shares with its writers.
pub(crate) struct Core {
    pub options: Arc<Options>,
    pub buckets: Vec<Arc<str>>,
    pub driver: Arc<Driver>,
    pub devices: Vec<Arc<Device>>,
    pub sites: Vec<Site>,
    /// The next persist request.
    pub requests: AtomicU64,
    events: Sender<Event>,
    clock: Clock,
    random: Mutex<Random>,
    next_device: AtomicUsize,
    /// The process that has the threads.
    owner: u32,
}

/// What is fixed about one local directory.
pub(crate) struct Site {
    pub local: Arc<LocalSite>,
    pub index: Arc<Mutex<LocalIndex>>,
    pub ledger: Arc<Ledger>,
    pub engine: EngineInfo,
    pub readers: Arc<Readers>,
}

/// Tells the time: monotonic.
pub type Clock = Arc<dyn Fn() -> Instant + Send + Sync>;

/// Gives random numbers.
pub type Random = Box<dyn FnMut() -> u64 + Send>;

/// Stands for the machine in simulations.
#[doc(hidden)]
pub struct Seams {
    /// One for each directory of the options, in their order.
    pub directories: Vec<(Arc<dyn Files>, Box<dyn Disk>)>,
    /// One for each bucket.
    pub stores: Vec<Arc<dyn Store>>,
    pub clock: Clock,
    pub random: Random,
}

impl fmt::Debug for Core {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Core").field("buckets", &self.buckets).finish_non_exhaustive()
    }
}

impl fmt::Debug for Changelog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Changelog").field("buckets", &self.core.buckets).finish_non_exhaustive()
    }
}

impl Core {
    pub fn now(&self) -> Instant {
        (self.clock)()
    }

    /// Tells the uploader. It is gone only when the changelog is, and then nobody waits for it.
    pub fn send(&self, event: Event) {
        if self.check_owner().is_ok() {
            let _ = self.events.send(event);
        }
    }

    /// Refuses a child by fork. To be asked before any lock is taken: who held it may not exist here.
    pub fn check_owner(&self) -> Result<(), Forked> {
        if std::process::id() == self.owner { Ok(()) } else { Err(Forked { opener: self.owner }) }
    }

    fn random_u64(&self) -> u64 {
        lock(&self.random)()
    }

    pub fn confirm(&self, log: &Log, to: SequenceNumber) -> Result<(), ControlError> {
        self.check_owner()?;
        let mut control = lock(&log.control);
        check_beyond(log, to)?;
        if to > control.confirmed {
            control.confirmed = to;
            self.send(Event::Confirm { device: log.device, log: log.id, to });
        }
        Ok(())
    }

    pub fn reset(&self, log: &Log, from: SequenceNumber, to: SequenceNumber) -> Result<(), ControlError> {
        self.check_owner()?;
        check_beyond(log, to)?;
        if from > to {
            return Err(ControlError::UpsideDown { from, to });
        }
        // Nothing is dropped but by truncation: the declined changes are where they were, and the next persist refers to
        // them.
        metrics::counter!("tidelog_checkpoints_declined_total").increment(1);
        Ok(())
    }

    pub fn truncate(&self, log: &Log, to: SequenceNumber) -> Result<(), ControlError> {
        self.check_owner()?;
        let mut control = lock(&log.control);
        check_beyond(log, to)?;
        if to > control.truncated {
            control.truncated = to;
            self.send(Event::Truncate { device: log.device, log: log.id, to });
        }
        Ok(())
    }

    /// The writer of `log` is gone; `lane` is where it appended last.
    pub fn close_log(&self, log: &Log, device: &Device, lane: &LaneRef) {
        if self.check_owner().is_err() {
            return;
        }
        let mut control = lock(&log.control);
        if std::mem::replace(&mut control.closed, true) {
            return;
        }
        let synced = SequenceNumber(log.synced.load(Ordering::Acquire));
        self.send(Event::WriterClosed { device: log.device, log: log.id, synced });
        drop(control);
        let position = lane.lane.committed();
        device.request(SpillRequest::CloseLog { lane: lane.index, position, slot: log.slot });
    }
}

fn check_beyond(log: &Log, to: SequenceNumber) -> Result<(), ControlError> {
    let next = log.next();
    if to > next { Err(ControlError::Beyond { log: log.id, to, next }) } else { Ok(()) }
}

impl Changelog {
    /// Opens a changelog, and recovers what its directories hold. Blocks: directories are locked and read, a first segment
    /// may have to be written. To be opened with all its directories: objects that have changes of others are not deleted, and
    /// a warning says so.
    ///
    /// # Errors
    /// See [`OpenError`]. Nothing that is needed is lost then; it says what may have been changed.
    pub fn open(options: Options) -> Result<Changelog, OpenError> {
        options.check()?;
        let urls = options.buckets.iter().map(|bucket| tidelog_upload::bucket_url(bucket));
        check_places(&options, &urls.collect::<Result<Vec<_>, _>>()?, resolved)?;
        let stores = options.buckets.iter().map(|bucket| tidelog_upload::open_or_create_store(bucket));
        let stores = stores.collect::<Result<Vec<_>, _>>()?;
        check_memory(&options, &stores)?;
        let runtime = match &options.runtime {
            UploadRuntime::Own => Runtime::Own { threads: UPLOAD_THREADS },
            UploadRuntime::Handle(handle) => Runtime::Handle(handle.clone()),
        };
        let driver = Driver::start(stores, runtime, options.upload_options())?;
        let directories =
            options.directories.iter().map(Directory::open).collect::<Result<Vec<Directory>, _>>()?;
        for (path, directory) in options.directories.iter().zip(&directories) {
            check_room(path, &*directory.files(), &options)?;
        }
        let mut random = system_random()?;
        let mut sites = Vec::new();
        for (path, directory) in options.directories.iter().zip(&directories) {
            let disk = |arena: &Arena| {
                engine::open_best(
                    path,
                    options.durability,
                    options.writes_in_flight,
                    Some(arena),
                    options.engine,
                )
                .map_err(|source| failed(format!("opening {} for direct writes", path.display()), source))
            };
            let files = directory.files();
            sites.push(OpenSite::open(sites.len(), path.clone(), files, disk, &options, &mut random)?);
        }
        let clock: Clock = Arc::new(Instant::now);
        let (core, recovered, spillers, uploader) =
            build(options, Arc::new(driver), sites, clock, random, true)?;
        let engine = Mutex::new(Engine::Threads { spillers: Vec::new(), uploader: None });
        let changelog = Changelog { core, recovered, engine, _directories: directories };
        // If one of them cannot be started, dropping it stops the others.
        changelog.start(spillers, uploader)?;
        Ok(changelog)
    }

    fn start(&self, spillers: Vec<Spiller>, uploader: Uploader) -> Result<(), OpenError> {
        let start = |name: String, body: Box<dyn FnOnce() + Send>| {
            std::thread::Builder::new()
                .name(name)
                .spawn(body)
                .map_err(|source| failed("starting a thread", source))
        };
        if let Engine::Threads { spillers: running, uploader: upload } = &mut *lock(&self.engine) {
            for (index, spiller) in spillers.into_iter().enumerate() {
                running.push(start(format!("tidelog-spill-{index}"), Box::new(move || spiller.run()))?);
            }
            *upload = Some(start("tidelog-assemble".to_owned(), Box::new(move || uploader.run()))?);
        }
        Ok(())
    }

    /// Opens a changelog on a simulated machine, without threads: [`step`](Self::step) does the work.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    #[doc(hidden)]
    pub fn open_simulated(options: Options, seams: Seams) -> Result<Changelog, OpenError> {
        options.check()?;
        let Seams { directories, stores, clock, mut random } = seams;
        let urls: Vec<String> = stores.iter().map(|store| store.url().to_owned()).collect();
        check_places(&options, &urls, Path::to_owned)?;
        check_memory(&options, &stores)?;
        for (path, (files, _)) in options.directories.iter().zip(&directories) {
            check_room(path, &**files, &options)?;
        }
        let driver = Driver::inline(stores, options.upload_options(), Arc::clone(&clock))?;
        let mut sites = Vec::new();
        for (path, (files, disk)) in options.directories.iter().zip(directories) {
            let disk = |_: &Arena| Ok(disk);
            sites.push(OpenSite::open(sites.len(), path.clone(), files, disk, &options, &mut random)?);
        }
        let (core, recovered, spillers, uploader) =
            build(options, Arc::new(driver), sites, clock, random, false)?;
        let engine = Engine::Manual { spillers, uploader: Box::new(uploader) };
        Ok(Changelog { core, recovered, engine: Mutex::new(engine), _directories: Vec::new() })
    }

    /// Does what spillers and uploader can do now. For simulations.
    #[doc(hidden)]
    pub fn step(&self) -> Option<Instant> {
        let now = self.core.now();
        match &mut *lock(&self.engine) {
            Engine::Threads { .. } => None,
            Engine::Manual { spillers, uploader } => {
                let deadlines: Vec<Option<Instant>> =
                    spillers.iter_mut().map(|spiller| spiller.step(now).deadline).collect();
                self.core.driver.tick(now);
                let uploader = uploader.step(now);
                // What the uploader began may wait for a time.
                deadlines.into_iter().chain([uploader, self.core.driver.tick(now)]).flatten().min()
            }
        }
    }

    /// Throws away what was appended, unread, in the place of the spillers: for benches that measure appends alone, on a
    /// simulated machine. The logs have holes afterwards, so nothing may be spilled any more.
    #[doc(hidden)]
    pub fn discard_appended(&self) {
        if let Engine::Manual { spillers, .. } = &mut *lock(&self.engine) {
            spillers.iter_mut().for_each(Spiller::discard_lanes);
        }
    }

    /// Makes a writer, and with it a log. Its id is new, also where the name was used before. Directories take turns; one
    /// that is out of service, or whose manifest cannot be written, is left out while there are others.
    ///
    /// # Errors
    /// See [`CreateError`]; nothing was made then.
    pub fn create_writer(
        &self,
        name: impl Into<String>,
        key_groups: KeyGroupRange,
    ) -> Result<ChangelogWriter, CreateError> {
        self.core.check_owner()?;
        let name = name.into();
        if name.len() > LOG_NAME_BYTES_MAX {
            return Err(CreateError::NameTooLong { len: name.len() });
        }
        let core = &self.core;
        let turn = core.next_device.fetch_add(1, Ordering::Relaxed);
        let open = |index: &usize| !core.devices[*index].is_closed();
        let is_in_service = |index: &usize| !core.sites[*index].ledger.is_detached();
        let turns =
            (0..core.devices.len()).map(|index| (turn % core.devices.len() + index) % core.devices.len());
        let (in_service, others): (Vec<usize>, Vec<usize>) = turns.filter(open).partition(is_in_service);
        let mut outcome = Err(CreateError::Closed);
        for index in if in_service.is_empty() { others } else { in_service } {
            outcome = self.create_in(index, name.clone(), key_groups);
            if outcome.is_ok() {
                break;
            }
        }
        outcome
    }

    /// Makes a writer whose changes go to this directory.
    fn create_in(
        &self,
        index: usize,
        name: String,
        key_groups: KeyGroupRange,
    ) -> Result<ChangelogWriter, CreateError> {
        let core = &self.core;
        let device = &core.devices[index];
        let lane = device.current_lane().map_err(CreateError::Lane)?;
        let id = LogId(u128::from(core.random_u64()) << 64 | u128::from(core.random_u64()));
        let created = ManifestRecord::LogCreated { log: id, name: name.clone(), key_groups };
        let log = device
            .open_slot(|slot| Log::new(id, name, key_groups, index, slot))
            .ok_or(CreateError::TooManyLogs { max: SLOTS_MAX })?;
        let ledger = &core.sites[index].ledger;
        if let Err(source) = ledger.record(vec![created]) {
            // The ledger has taken it all the same, and would write it with the next success.
            ledger.note(ManifestRecord::LogForgotten { log: id });
            device.free_slot(log.slot);
            return Err(CreateError::Manifest(source));
        }
        core.send(Event::WriterOpened { log: id });
        Ok(ChangelogWriter::new(Arc::clone(core), Arc::clone(device), log, lane))
    }

    /// The logs of which earlier uses of the directories left changes behind. They are read-only: read them, persist them,
    /// truncate or discard them.
    #[must_use]
    pub fn recovered(&self) -> &[RecoveredLog] {
        &self.recovered
    }

    /// The URLs of the buckets, as they stand in handles.
    pub fn buckets(&self) -> impl Iterator<Item = &str> {
        self.core.buckets.iter().map(|bucket| &**bucket)
    }

    /// What this changelog has lately seen of its buckets, for others. Cheap; never blocks on the network. Empty in a child by
    /// fork. See [`BucketHealth`].
    #[must_use]
    pub fn bucket_health(&self) -> BucketHealth {
        if self.core.check_owner().is_err() {
            return BucketHealth::default();
        }
        BucketHealth::of(&self.core.buckets, &self.core.driver.health())
    }

    /// Learns what others have lately seen of the same buckets, known by their URLs; what is said of other ones is ignored.
    /// Of three requests or more: where over 60 % went badly, no data goes there until a tiny object that this changelog
    /// writes by itself comes through, 15 seconds later at the earliest; where over 30 % did, no object begins there for 30
    /// seconds, and twice as long each time that is said again afterwards, up to 8 minutes. So that is what a wrong value
    /// costs, and at most all buckets but one. Does nothing in a child by fork. See [`BucketHealth`].
    pub fn learn_bucket_health(&self, health: &BucketHealth) {
        if self.core.check_owner().is_ok() {
            self.core.driver.merge_health(&[health.about(&self.core.buckets)]);
        }
    }

    /// What writes each local directory: io_uring, or what took its place, and why.
    #[must_use]
    pub fn engines(&self) -> Vec<EngineInfo> {
        self.core.sites.iter().map(|site| site.engine.clone()).collect()
    }

    /// Stops intake, puts what was appended on the local disk, finishes the persists that were asked for, and waits for the
    /// deletions of objects that nobody needs any more: all that for at most `timeout`.
    ///
    /// After a deletion that fails its bucket is asked for no other one for eight seconds or more, which this does not wait
    /// for, and one that is not over in time is no error, nor is one of a bucket that is not open: the manifest keeps the
    /// object until it is known to be gone, and the next open of the directories deletes it. So it does with what requests
    /// that were given up may have left, which is looked for ten seconds after the end of their object, or at the next open
    /// and ten seconds later. Where there is no next open, as after a job that ended, `tidelog sweep` finds both.
    ///
    /// # Errors
    /// [`CloseError`] says what is not durable. The changelog is closed all the same; what is durable is recovered at the
    /// next open.
    pub fn close(self, timeout: Duration) -> Result<(), CloseError> {
        self.core.check_owner().map_err(SyncError::from)?;
        let started_at = Instant::now();
        for device in &self.core.devices {
            device.close();
        }
        let mut result = Ok(());
        let mut flushes = Vec::new();
        for device in &self.core.devices {
            let (resolver, pending) = tidelog_upload::channel();
            device.request(SpillRequest::Flush { resolver });
            flushes.push(pending);
        }
        let left = || timeout.saturating_sub(started_at.elapsed());
        for mut flush in flushes {
            match self.wait(&mut flush, left()) {
                Some(Ok(Ok(()))) => {}
                Some(Ok(Err(error))) => result = Err(CloseError::Local(error)),
                Some(Err(_)) => result = Err(CloseError::Local(SyncError::Closed)),
                None => result = Err(self.not_durable(started_at.elapsed())),
            }
        }
        let quiesce = |deletions| {
            let (resolver, mut pending) = tidelog_upload::channel();
            self.core.send(Event::Quiesce { deletions, resolver });
            self.wait(&mut pending, left()).is_some()
        };
        if !quiesce(false) && result.is_ok() {
            result = Err(CloseError::Persists { waited: started_at.elapsed() });
        }
        if !quiesce(true) {
            tracing::info!(
                "objects are still being deleted; the next open of the directories goes on with that"
            );
        }
        self.stop();
        for site in &self.core.sites {
            if let Err(error) = site.ledger.seal()
                && result.is_ok()
            {
                result = Err(CloseError::Manifest(Arc::new(error)));
            }
        }
        result
    }

    /// Waits for an answer, doing the work that leads to it where there are no threads.
    fn wait<T>(&self, pending: &mut Pending<T>, timeout: Duration) -> Option<Result<T, Abandoned>> {
        if matches!(*lock(&self.engine), Engine::Threads { .. }) {
            return pending.wait_timeout(timeout);
        }
        (0..STEPS_MAX).find_map(|_| {
            self.step();
            pending.wait_timeout(Duration::ZERO)
        })
    }

    fn not_durable(&self, waited: Duration) -> CloseError {
        let logs = self.core.devices.iter().flat_map(|device| device.logs());
        let behind = logs.filter(|log| log.durable() < log.next());
        CloseError::Timeout { waited, logs: behind.map(|log| (log.id, log.durable())).collect() }
    }

    fn stop(&self) {
        for device in &self.core.devices {
            device.close();
            device.request(SpillRequest::Exit);
        }
        // The uploader goes last: it has to hear of every block that became durable. A thread that panicked has said so.
        match &mut *lock(&self.engine) {
            Engine::Threads { spillers, uploader } => {
                spillers.drain(..).for_each(|thread| drop(thread.join()));
                self.core.send(Event::Exit);
                uploader.take().into_iter().for_each(|thread| drop(thread.join()));
            }
            Engine::Manual { spillers, uploader } => {
                let now = self.core.now();
                // Once: what is sealed then must stay as it is.
                for mut spiller in spillers.drain(..) {
                    spiller.step(now);
                }
                self.core.send(Event::Exit);
                uploader.step(now);
            }
        }
        self.core.driver.shutdown();
    }
}

impl Drop for Changelog {
    fn drop(&mut self) {
        if self.core.check_owner().is_ok() {
            return self.stop();
        }
        // The handles are of threads that do not exist in this process, and must not be waited for, nor let go.
        let none = Engine::Threads { spillers: Vec::new(), uploader: None };
        std::mem::forget(std::mem::replace(&mut self.engine, Mutex::new(none)));
    }
}

/// Whether the share of uploads has room for parts of the least size that the buckets take, so that none waits for ever.
fn check_memory(options: &Options, stores: &[Arc<dyn Store>]) -> Result<(), OptionError> {
    let parts = stores.iter().map(|store| store.capabilities().part_bytes_min);
    let needed = 16 * parts.max().unwrap_or(0);
    if options.memory_bytes as u64 >= needed {
        return Ok(());
    }
    Err(OptionError {
        option: "memory_bytes",
        value: options.memory_bytes.to_string(),
        remedy: format!("at least {needed} for the smallest parts that these buckets take"),
    })
}

fn failed(action: impl Into<String>, source: io::Error) -> OpenError {
    OpenError::Io { action: action.into(), source }
}

/// Random numbers of the operating system.
fn system_random() -> Result<Random, OpenError> {
    let path = "/dev/urandom";
    let mut file = std::fs::File::open(path).map_err(|source| failed(format!("opening {path}"), source))?;
    let mut seed = [0; 8];
    file.read_exact(&mut seed).map_err(|source| failed(format!("reading {path}"), source))?;
    let mut fallback = splitmix(u64::from_le_bytes(seed));
    Ok(Box::new(move || {
        let mut bytes = [0; 8];
        // Ids must be unique, not secret: a device that stopped giving bytes does not stop a writer.
        if file.read_exact(&mut bytes).is_ok() { u64::from_le_bytes(bytes) } else { fallback() }
    }))
}

/// SplitMix64 (Steele, Lea and Flood, 2014): a full period from any seed.
fn splitmix(mut state: u64) -> impl FnMut() -> u64 + Send {
    move || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}
