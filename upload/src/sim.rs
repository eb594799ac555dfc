//! A bucket in memory that fails as it is told to: by chance from a seed, or at the next call of a kind.
//!
//! Uploads in parts, numbers and tags behave as on S3, within the bucket's capability row. Nothing here takes time, and an
//! object whose commit was reported is never lost. The same seed and the same calls give the same outcomes. How long
//! requests take, and what slow or sick buckets do to a checkpoint, is modelled in [`network`] and [`world`].
#![forbid(unsafe_code)]

pub mod network;
mod state;
#[cfg(test)]
mod tests;
pub mod world;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use bytes::Bytes;

use self::state::Contents;
use crate::store::{
    Body, BoxFuture, Capabilities, EntityTag, Lane, ListedObject, ListedPart, ListedUpload, Operation, Parts,
    Store, StoreError, StoreErrorKind, UploadId, UploadRef, UploadedPart, Watch, check_name,
};

/// How an operation fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fault {
    /// The connection broke before anything happened: the caller does not know, and nothing did.
    Before,
    /// It happened, and the response was lost.
    After,
    /// The caller hears nothing in time, and a few calls later it happens all the same. Reads are merely lost.
    Late,
    /// The store asks to slow down; nothing happened.
    Throttled,
    /// The process dies before it happens, see [`SimStore::crash`].
    CrashBefore,
    /// The process dies after it happened.
    CrashAfter,
}

/// How likely an operation is to fail, each from 0 to 1.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Chances {
    /// Of [`Fault::Before`].
    pub before: f64,
    /// Of [`Fault::After`].
    pub after: f64,
    /// Of [`Fault::Late`].
    pub late: f64,
    /// Of [`Fault::Throttled`].
    pub throttled: f64,
}

/// What the store was asked for since it was made, failed or not.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SimStats {
    /// Calls of each kind.
    pub calls: BTreeMap<Operation, u64>,
    /// Faults injected, of each kind of call; operations refused during a crash are not counted.
    pub faults: BTreeMap<Operation, u64>,
    /// Bytes in objects and parts taken.
    pub bytes_put: u64,
    /// Bytes read.
    pub bytes_got: u64,
    /// Ranges read: name, first byte, length in bytes.
    pub gets: Vec<(String, u64, u64)>,
}

impl SimStats {
    /// How often an operation was called.
    #[must_use]
    pub fn calls(&self, operation: Operation) -> u64 {
        self.calls.get(&operation).copied().unwrap_or(0)
    }
}

/// A simulated bucket. Clones are the same bucket.
///
/// ```
/// use tidelog_upload::Operation;
/// use tidelog_upload::sim::{Fault, SimStore};
/// use tidelog_upload::store::{Body, Lane, Store};
/// # fn now<T>(future: impl Future<Output = T>) -> T {
/// #     let mut context = std::task::Context::from_waker(std::task::Waker::noop());
/// #     match std::pin::pin!(future).poll(&mut context) {
/// #         std::task::Poll::Ready(outcome) => outcome,
/// #         std::task::Poll::Pending => unreachable!(),
/// #     }
/// # }
///
/// let store = SimStore::new(1);
/// store.fail_next(Operation::Put, Fault::After);
/// let body = Body::new(vec!["bytes".into()]);
/// // Nothing here ever waits: a future is ready when it is first polled.
/// assert!(now(store.put("a", body, Lane::Primary)).is_err());
/// // The object is there all the same: the outcome was unknown.
/// assert_eq!(store.objects()["a"], "bytes");
/// ```
#[derive(Clone)]
pub struct SimStore {
    shared: Arc<Shared>,
}

impl SimStore {
    /// An empty bucket without faults, that takes what AWS takes, with parts of any size. Its URL is made of the seed.
    #[must_use]
    pub fn new(seed: u64) -> SimStore {
        SimStore::with_capabilities(
            seed,
            Capabilities {
                parts: Parts::Parallel,
                part_bytes_min: 1,
                part_bytes_max: 5 << 30,
                parts_max: 10_000,
                equal_parts: false,
                sparse: true,
                copy_part: true,
                resend_part: true,
                list_parts: true,
                list_uploads: true,
                conditional_put: true,
            },
        )
    }

    /// An empty bucket without faults that takes what the row says and refuses everything else. Where a part number may
    /// not be sent again, a part that was is good for nothing.
    #[must_use]
    pub fn with_capabilities(seed: u64, capabilities: Capabilities) -> SimStore {
        let sim = Sim {
            random: seed,
            contents: Contents::default(),
            chances: HashMap::new(),
            planned: HashMap::new(),
            late: Vec::new(),
            calls: 0,
            crashed: false,
            dead: false,
            stats: SimStats::default(),
        };
        let url = format!("sim://{seed}");
        SimStore { shared: Arc::new(Shared { url, capabilities, sim: Mutex::new(sim) }) }
    }

    /// How likely each further call of an operation is to fail.
    ///
    /// # Panics
    /// If the chances are not from 0 to 1 or add up to more than 1.
    pub fn set_chances(&self, operation: Operation, chances: Chances) {
        let Chances { before, after, late, throttled } = chances;
        let each = [before, after, late, throttled];
        assert!(each.iter().all(|chance| *chance >= 0.0) && each.iter().sum::<f64>() <= 1.0, "{chances:?}");
        self.shared.lock().chances.insert(operation, chances);
    }

    /// Fails the next call of an operation for which nothing was planned yet. Calls while crashed or dead do not count.
    pub fn fail_next(&self, operation: Operation, fault: Fault) {
        self.shared.lock().planned.entry(operation).or_default().push_back(fault);
    }

    /// Whether the bucket can be reached: while it is dead, every request is interrupted before it happens.
    pub fn set_dead(&self, dead: bool) {
        self.shared.lock().dead = dead;
    }

    /// What the bucket gives as the time of objects and uploads from here on; the epoch until then.
    pub fn set_time(&self, now: SystemTime) {
        self.shared.lock().contents.now = now;
    }

    /// Ends all chances, plans and death. What is late stays so.
    pub fn heal(&self) {
        let mut sim = self.shared.lock();
        sim.chances.clear();
        sim.planned.clear();
        sim.dead = false;
    }

    /// Lets everything happen that is late.
    pub fn settle(&self) {
        self.shared.lock().settle(&self.shared.capabilities, u64::MAX);
    }

    /// The process that uses the bucket dies: every operation fails until [`restart`](SimStore::restart). The bucket keeps
    /// what it has, unfinished uploads too, and what is late still happens.
    pub fn crash(&self) {
        self.shared.lock().crashed = true;
    }

    /// The process is back.
    pub fn restart(&self) {
        self.shared.lock().crashed = false;
    }

    /// Whether the process is dead.
    #[must_use]
    pub fn is_crashed(&self) -> bool {
        self.shared.lock().crashed
    }

    /// Everything asked so far.
    #[must_use]
    pub fn stats(&self) -> SimStats {
        self.shared.lock().stats.clone()
    }

    /// Everything asked since the last call of this, which then counts from zero.
    #[must_use]
    pub fn take_stats(&self) -> SimStats {
        std::mem::take(&mut self.shared.lock().stats)
    }

    /// All objects, for oracles; no operation and no fault.
    #[must_use]
    pub fn objects(&self) -> BTreeMap<String, Bytes> {
        self.shared.lock().contents.objects()
    }

    /// The names of uploads neither complete nor aborted, sorted, for oracles.
    #[must_use]
    pub fn open_uploads(&self) -> Vec<String> {
        self.shared.lock().contents.open_uploads()
    }

    /// Puts other bytes in the place of an object, for tests of damage. `None` removes it.
    pub fn tamper(&self, name: &str, bytes: Option<Bytes>) {
        self.shared.lock().contents.tamper(name, bytes);
    }
}

impl fmt::Debug for SimStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("SimStore").field(&self.shared.url).finish()
    }
}

impl Store for SimStore {
    fn url(&self) -> &str {
        &self.shared.url
    }

    fn capabilities(&self) -> &Capabilities {
        &self.shared.capabilities
    }

    fn put<'a>(&'a self, name: &'a str, body: Body, _: Lane) -> BoxFuture<'a, Result<EntityTag, StoreError>> {
        let named = name.to_owned();
        self.write(Operation::Put, name, move |row, sim| {
            let bytes = body.len();
            let tag = sim.contents.put(row, &named, &body)?;
            sim.stats.bytes_put += bytes;
            Ok(tag)
        })
    }

    fn create<'a>(&'a self, name: &'a str) -> BoxFuture<'a, Result<UploadId, StoreError>> {
        let named = name.to_owned();
        self.write(Operation::Create, name, move |row, sim| sim.contents.create(row, &named))
    }

    fn put_part<'a>(
        &'a self,
        upload: UploadRef<'a>,
        number: u32,
        body: Body,
        _: Lane,
    ) -> BoxFuture<'a, Result<EntityTag, StoreError>> {
        let (named, id) = (upload.name.to_owned(), upload.id.clone());
        self.write(Operation::PutPart, upload.name, move |row, sim| {
            let bytes = body.len();
            let tag = sim.contents.put_part(row, &named, &id, number, &body)?;
            sim.stats.bytes_put += bytes;
            Ok(tag)
        })
    }

    fn copy_part<'a>(
        &'a self,
        upload: UploadRef<'a>,
        number: u32,
        from: &'a str,
        range: Range<u64>,
    ) -> BoxFuture<'a, Result<EntityTag, StoreError>> {
        let (named, id, from) = (upload.name.to_owned(), upload.id.clone(), from.to_owned());
        self.write(Operation::CopyPart, upload.name, move |row, sim| {
            sim.contents.copy_part(row, (&named, &id), number, &from, range)
        })
    }

    fn list_parts<'a>(&'a self, upload: UploadRef<'a>) -> BoxFuture<'a, Result<Vec<ListedPart>, StoreError>> {
        self.read(Operation::ListParts, upload.name, move |row, sim| {
            sim.contents.list_parts(row, upload.name, upload.id)
        })
    }

    fn complete<'a>(
        &'a self,
        upload: UploadRef<'a>,
        parts: &'a [UploadedPart],
    ) -> BoxFuture<'a, Result<EntityTag, StoreError>> {
        let (named, id, parts) = (upload.name.to_owned(), upload.id.clone(), parts.to_vec());
        self.write(Operation::Complete, upload.name, move |row, sim| {
            sim.contents.complete(row, &named, &id, &parts)
        })
    }

    fn abort<'a>(&'a self, upload: UploadRef<'a>) -> BoxFuture<'a, Result<(), StoreError>> {
        let (named, id) = (upload.name.to_owned(), upload.id.clone());
        self.write(Operation::Abort, upload.name, move |_, sim| {
            sim.contents.abort(&named, &id);
            Ok(())
        })
    }

    fn list_uploads<'a>(&'a self, prefix: &'a str) -> BoxFuture<'a, Result<Vec<ListedUpload>, StoreError>> {
        self.read(Operation::ListUploads, prefix, move |row, sim| sim.contents.list_uploads(row, prefix))
    }

    fn get<'a>(&'a self, name: &'a str, range: Range<u64>) -> BoxFuture<'a, Result<Bytes, StoreError>> {
        self.read(Operation::Get, name, move |_, sim| {
            let Range { start, end } = range;
            let bytes = sim.contents.get(name, range)?;
            sim.stats.bytes_got += end - start;
            sim.stats.gets.push((name.to_owned(), start, end - start));
            Ok(bytes)
        })
    }

    /// They come in two pieces.
    fn get_watched<'a>(
        &'a self,
        name: &'a str,
        range: Range<u64>,
        watch: &'a mut dyn Watch,
    ) -> BoxFuture<'a, Result<Bytes, StoreError>> {
        Box::pin(async move {
            let bytes = self.get(name, range).await?;
            watch.see(&bytes[..bytes.len() / 2]);
            watch.see(&bytes);
            Ok(bytes)
        })
    }

    fn head<'a>(&'a self, name: &'a str) -> BoxFuture<'a, Result<ListedObject, StoreError>> {
        self.read(Operation::Head, name, move |_, sim| sim.contents.head(name))
    }

    fn delete<'a>(&'a self, name: &'a str) -> BoxFuture<'a, Result<(), StoreError>> {
        let named = name.to_owned();
        self.write(Operation::Delete, name, move |_, sim| {
            sim.contents.delete(&named);
            Ok(())
        })
    }

    fn list<'a>(&'a self, prefix: &'a str) -> BoxFuture<'a, Result<Vec<ListedObject>, StoreError>> {
        self.read(Operation::List, prefix, move |_, sim| Ok(sim.contents.list(prefix)))
    }
}

/// The most calls between a request that is late and its effect.
const LATE_CALLS_MAX: u64 = 16;

/// What a caller that waits for a late answer is told that it waited.
const LATE_TIMEOUT: Duration = Duration::from_secs(10);

type Effect = Box<dyn FnOnce(&Capabilities, &mut Sim) + Send>;

struct Shared {
    url: String,
    capabilities: Capabilities,
    sim: Mutex<Sim>,
}

struct Sim {
    /// State of the random numbers.
    random: u64,
    contents: Contents,
    chances: HashMap<Operation, Chances>,
    planned: HashMap<Operation, VecDeque<Fault>>,
    /// What is yet to happen, and before which call.
    late: Vec<(u64, Effect)>,
    calls: u64,
    crashed: bool,
    dead: bool,
    stats: SimStats,
}

impl SimStore {
    /// A request that changes the bucket.
    fn write<'a, T: 'a>(
        &'a self,
        operation: Operation,
        name: &'a str,
        effect: impl FnOnce(&Capabilities, &mut Sim) -> Result<T, StoreErrorKind> + Send + 'static,
    ) -> BoxFuture<'a, Result<T, StoreError>> {
        Box::pin(async move {
            let (row, mut sim) = self.shared.arrive(operation, name)?;
            let outcome = match sim.draw(operation) {
                None => effect(row, &mut sim),
                Some(Fault::After) => effect(row, &mut sim).and(Err(StoreErrorKind::Interrupted)),
                Some(Fault::Late) => {
                    let due = sim.calls + 1 + sim.next_u64() % LATE_CALLS_MAX;
                    // What comes of it is never known to anybody.
                    sim.late.push((due, Box::new(|row, sim| drop(effect(row, sim)))));
                    Err(StoreErrorKind::TimedOut(LATE_TIMEOUT))
                }
                Some(Fault::CrashAfter) => {
                    // The outcome is lost with the process.
                    drop(effect(row, &mut sim));
                    sim.crashed = true;
                    Err(StoreErrorKind::Interrupted)
                }
                Some(fault) => Err(sim.nothing_happened(fault)),
            };
            drop(sim);
            outcome.map_err(|kind| self.shared.error(operation, name, kind))
        })
    }

    /// A request that changes nothing.
    fn read<'a, T: 'a>(
        &'a self,
        operation: Operation,
        name: &'a str,
        effect: impl FnOnce(&Capabilities, &mut Sim) -> Result<T, StoreErrorKind> + Send + 'a,
    ) -> BoxFuture<'a, Result<T, StoreError>> {
        Box::pin(async move {
            let (row, mut sim) = self.shared.arrive(operation, name)?;
            let outcome = match sim.draw(operation) {
                None => effect(row, &mut sim),
                // What would have failed anyway fails as it would have.
                Some(Fault::After) => effect(row, &mut sim).and(Err(StoreErrorKind::Interrupted)),
                Some(fault) => Err(sim.nothing_happened(fault)),
            };
            drop(sim);
            outcome.map_err(|kind| self.shared.error(operation, name, kind))
        })
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Sim> {
        self.sim.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn error(&self, operation: Operation, name: &str, kind: StoreErrorKind) -> StoreError {
        StoreError::new(operation, &self.url, name, kind)
    }

    /// Counts a call and checks what can be checked before a fault is drawn.
    fn arrive(
        &self,
        operation: Operation,
        name: &str,
    ) -> Result<(&Capabilities, MutexGuard<'_, Sim>), StoreError> {
        let checked = match operation {
            // Only the folders of a prefix are names.
            Operation::List | Operation::ListUploads => {
                name.rsplit_once('/').map_or(Ok(()), |(folder, _)| check_name(folder))
            }
            _ => check_name(name),
        };
        checked.map_err(|why| self.error(operation, name, StoreErrorKind::InvalidName(why)))?;
        let mut sim = self.lock();
        sim.calls += 1;
        let now = sim.calls;
        sim.settle(&self.capabilities, now);
        *sim.stats.calls.entry(operation).or_default() += 1;
        if sim.crashed || sim.dead {
            let why =
                if sim.crashed { "simulated: the process is dead" } else { "simulated: the bucket is dead" };
            let kind = StoreErrorKind::Interrupted;
            return Err(StoreError::caused(operation, &self.url, name, kind, why));
        }
        Ok((&self.capabilities, sim))
    }
}

impl Sim {
    /// Lets everything happen that is due by a call.
    fn settle(&mut self, row: &Capabilities, call: u64) {
        if self.late.iter().any(|(due, _)| *due <= call) {
            let (due, later) = std::mem::take(&mut self.late).into_iter().partition(|(due, _)| *due <= call);
            self.late = later;
            let due: Vec<(u64, Effect)> = due;
            due.into_iter().for_each(|(_, effect)| effect(row, self));
        }
    }

    /// What the caller hears of a fault that leaves the bucket as it was.
    fn nothing_happened(&mut self, fault: Fault) -> StoreErrorKind {
        match fault {
            Fault::Throttled => return StoreErrorKind::Throttled,
            Fault::Late => return StoreErrorKind::TimedOut(LATE_TIMEOUT),
            Fault::CrashBefore | Fault::CrashAfter => self.crashed = true,
            Fault::Before | Fault::After => {}
        }
        StoreErrorKind::Interrupted
    }

    fn draw(&mut self, operation: Operation) -> Option<Fault> {
        let fault = self.draw_fault(operation)?;
        *self.stats.faults.entry(operation).or_default() += 1;
        Some(fault)
    }

    fn draw_fault(&mut self, operation: Operation) -> Option<Fault> {
        if let Some(fault) = self.planned.get_mut(&operation).and_then(VecDeque::pop_front) {
            return Some(fault);
        }
        let Chances { before, after, late, throttled } = *self.chances.get(&operation)?;
        let mut drawn = (self.next_u64() >> 11) as f64 / (1u64 << 53) as f64;
        for (chance, fault) in [
            (before, Fault::Before),
            (after, Fault::After),
            (late, Fault::Late),
            (throttled, Fault::Throttled),
        ] {
            if drawn < chance {
                return Some(fault);
            }
            drawn -= chance;
        }
        None
    }

    /// The next random number, by splitmix64.
    fn next_u64(&mut self) -> u64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.random;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}
