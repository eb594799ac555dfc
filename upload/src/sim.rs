//! A bucket in memory that fails as it is told to: by chance from a seed, or at the next call of a kind.
//!
//! Nothing here takes time, and an object whose commit was reported is never lost. The same seed and the same calls give
//! the same outcomes.
#![forbid(unsafe_code)]

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::{Bytes, BytesMut};

use crate::store::{BoxFuture, ObjectSink, Operation, Store, StoreError, StoreErrorKind, check_name};

/// How an operation fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fault {
    /// Nothing happened, and that is what the caller hears: an error that may be retried.
    Before,
    /// It happened, and the caller hears an error: the response was lost.
    After,
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
}

/// What the store was asked for since it was made, failed or not.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SimStats {
    /// Calls of each kind.
    pub calls: BTreeMap<Operation, u64>,
    /// Faults injected, of each kind of call; operations refused during a crash are not counted.
    pub faults: BTreeMap<Operation, u64>,
    /// Bytes in parts taken.
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
/// use std::sync::Arc;
/// use tidelog_upload::sim::{Fault, SimStore};
/// use tidelog_upload::{Driver, Operation, channel};
///
/// let store = SimStore::new(1);
/// let driver = Driver::inline(Arc::new(store.clone()));
/// store.fail_next(Operation::Complete, Fault::After);
/// let mut upload = driver.upload("a");
/// upload.put(vec!["bytes".into()], |_| {});
/// upload.complete(|outcome| assert!(outcome.is_err()));
/// // The object is there all the same: the outcome was unknown.
/// assert_eq!(store.objects().len(), 1);
/// ```
#[derive(Clone)]
pub struct SimStore {
    shared: Arc<Shared>,
}

impl SimStore {
    /// An empty bucket without faults.
    #[must_use]
    pub fn new(seed: u64) -> SimStore {
        let world = World {
            random: seed,
            objects: BTreeMap::new(),
            uploads: HashMap::new(),
            next_upload: 0,
            chances: HashMap::new(),
            planned: HashMap::new(),
            crashed: false,
            stats: SimStats::default(),
        };
        SimStore { shared: Arc::new(Shared { url: format!("sim://{seed}"), world: Mutex::new(world) }) }
    }

    /// How likely each further call of an operation is to fail.
    ///
    /// # Panics
    /// If the chances are not from 0 to 1 or add up to more than 1.
    pub fn set_chances(&self, operation: Operation, chances: Chances) {
        let Chances { before, after } = chances;
        assert!(before >= 0.0 && after >= 0.0 && before + after <= 1.0, "{chances:?}");
        self.shared.lock().chances.insert(operation, chances);
    }

    /// Fails the next call of an operation for which nothing was planned yet. Calls while crashed do not count.
    pub fn fail_next(&self, operation: Operation, fault: Fault) {
        self.shared.lock().planned.entry(operation).or_default().push_back(fault);
    }

    /// Ends all chances and plans.
    pub fn heal(&self) {
        let mut world = self.shared.lock();
        world.chances.clear();
        world.planned.clear();
    }

    /// The process that uses the bucket dies: objects stay, uploads that are not complete vanish, and every operation
    /// fails until [`restart`](SimStore::restart). Sinks from before stay dead for ever.
    pub fn crash(&self) {
        self.shared.lock().crash();
    }

    /// The process is back.
    pub fn restart(&self) {
        self.shared.lock().crashed = false;
    }

    /// Whether it is dead.
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
        self.shared.lock().objects.clone()
    }

    /// The names of uploads neither complete nor aborted, sorted, for oracles.
    #[must_use]
    pub fn open_uploads(&self) -> Vec<String> {
        let mut names: Vec<_> =
            self.shared.lock().uploads.values().map(|upload| upload.name.clone()).collect();
        names.sort_unstable();
        names
    }

    /// Puts other bytes in the place of an object, for tests of damage. `None` removes it.
    pub fn tamper(&self, name: &str, bytes: Option<Bytes>) {
        let mut world = self.shared.lock();
        match bytes {
            Some(bytes) => world.objects.insert(name.to_owned(), bytes),
            None => world.objects.remove(name),
        };
    }
}

impl fmt::Debug for SimStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("SimStore").field(&self.shared.url).finish()
    }
}

impl Store for SimStore {
    fn begin<'a>(&'a self, name: &'a str) -> BoxFuture<'a, Result<Box<dyn ObjectSink>, StoreError>> {
        Box::pin(async move {
            self.shared.checked(Operation::Begin, name, |world| {
                let id = world.next_upload;
                world.next_upload += 1;
                world
                    .uploads
                    .insert(id, Upload { name: name.to_owned(), parts: Vec::new(), bytes: 0, broken: false });
                let sink = Sink { shared: Arc::clone(&self.shared), id, name: name.to_owned() };
                Ok(Box::new(sink) as Box<dyn ObjectSink>)
            })
        })
    }

    fn get<'a>(&'a self, name: &'a str, range: Range<u64>) -> BoxFuture<'a, Result<Bytes, StoreError>> {
        Box::pin(async move {
            self.shared.checked(Operation::Get, name, |world| {
                let object = world.objects.get(name).ok_or(StoreErrorKind::NotFound)?;
                let Range { start, end } = range;
                let size = object.len() as u64;
                if start > end || end > size {
                    return Err(StoreErrorKind::OutOfRange { start, end, size });
                }
                // Both fit: they are at most the length of a slice.
                let bytes = object.slice(start as usize..end as usize);
                world.stats.bytes_got += end - start;
                world.stats.gets.push((name.to_owned(), start, end - start));
                Ok(bytes)
            })
        })
    }

    fn size<'a>(&'a self, name: &'a str) -> BoxFuture<'a, Result<u64, StoreError>> {
        Box::pin(async move {
            self.shared.checked(Operation::Size, name, |world| {
                let object = world.objects.get(name).ok_or(StoreErrorKind::NotFound)?;
                Ok(object.len() as u64)
            })
        })
    }

    fn delete<'a>(&'a self, name: &'a str) -> BoxFuture<'a, Result<(), StoreError>> {
        Box::pin(async move {
            self.shared.checked(Operation::Delete, name, |world| {
                world.objects.remove(name);
                world.uploads.retain(|_, upload| upload.name != name);
                Ok(())
            })
        })
    }

    fn list<'a>(&'a self, prefix: &'a str) -> BoxFuture<'a, Result<Vec<(String, u64)>, StoreError>> {
        Box::pin(async move {
            if let Some((folder, _)) = prefix.rsplit_once('/') {
                check_name(folder).map_err(|why| {
                    self.shared.error(Operation::List, prefix, StoreErrorKind::InvalidName(why))
                })?;
            }
            self.shared.call(Operation::List, prefix, |world| {
                Ok(world
                    .objects
                    .range(prefix.to_owned()..)
                    .take_while(|(name, _)| name.starts_with(prefix))
                    .map(|(name, bytes)| (name.clone(), bytes.len() as u64))
                    .collect())
            })
        })
    }

    fn url(&self) -> &str {
        &self.shared.url
    }
}

struct Sink {
    shared: Arc<Shared>,
    id: u64,
    name: String,
}

impl ObjectSink for Sink {
    fn put(&mut self, part: Vec<Bytes>) -> BoxFuture<'_, Result<(), StoreError>> {
        Box::pin(async move {
            let id = self.id;
            let outcome = self.shared.call(Operation::Put, &self.name, |world| {
                let upload = world.uploads.get_mut(&id).ok_or(StoreErrorKind::Latched)?;
                if upload.broken {
                    return Err(StoreErrorKind::Latched);
                }
                let bytes: usize = part.iter().map(Bytes::len).sum();
                upload.bytes += bytes;
                upload.parts.extend(part);
                world.stats.bytes_put += bytes as u64;
                Ok(())
            });
            if outcome.is_err()
                && let Some(upload) = self.shared.lock().uploads.get_mut(&id)
            {
                upload.broken = true;
            }
            outcome
        })
    }

    fn complete(self: Box<Self>) -> BoxFuture<'static, Result<u64, StoreError>> {
        Box::pin(async move {
            self.shared.call(Operation::Complete, &self.name, |world| {
                let upload = world.uploads.remove(&self.id).ok_or(StoreErrorKind::Latched)?;
                if upload.broken {
                    return Err(StoreErrorKind::Latched);
                }
                let mut object = BytesMut::with_capacity(upload.bytes);
                for slice in &upload.parts {
                    object.extend_from_slice(slice);
                }
                let size = object.len() as u64;
                world.objects.insert(upload.name, object.freeze());
                Ok(size)
            })
        })
    }

    fn abort(self: Box<Self>) -> BoxFuture<'static, Result<(), StoreError>> {
        Box::pin(async move {
            self.shared.call(Operation::Abort, &self.name, |world| {
                world.uploads.remove(&self.id);
                Ok(())
            })
        })
    }
}

struct Shared {
    url: String,
    world: Mutex<World>,
}

struct World {
    /// State of the random numbers.
    random: u64,
    objects: BTreeMap<String, Bytes>,
    uploads: HashMap<u64, Upload>,
    /// Never used again, so that a sink from before a crash finds nothing.
    next_upload: u64,
    chances: HashMap<Operation, Chances>,
    planned: HashMap<Operation, VecDeque<Fault>>,
    crashed: bool,
    stats: SimStats,
}

struct Upload {
    name: String,
    parts: Vec<Bytes>,
    bytes: usize,
    /// A part failed.
    broken: bool,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, World> {
        self.world.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn error(&self, operation: Operation, name: &str, kind: StoreErrorKind) -> StoreError {
        StoreError::new(operation, &self.url, name, kind)
    }

    fn checked<T>(
        &self,
        operation: Operation,
        name: &str,
        effect: impl FnOnce(&mut World) -> Result<T, StoreErrorKind>,
    ) -> Result<T, StoreError> {
        check_name(name).map_err(|why| self.error(operation, name, StoreErrorKind::InvalidName(why)))?;
        self.call(operation, name, effect)
    }

    fn call<T>(
        &self,
        operation: Operation,
        name: &str,
        effect: impl FnOnce(&mut World) -> Result<T, StoreErrorKind>,
    ) -> Result<T, StoreError> {
        let failed = |why: &str| StoreError::failed(operation, &self.url, name, true, why);
        let mut world = self.lock();
        *world.stats.calls.entry(operation).or_default() += 1;
        if world.crashed {
            return Err(failed("simulated: the process is dead"));
        }
        let Some(fault) = world.draw(operation) else {
            return effect(&mut world).map_err(|kind| self.error(operation, name, kind));
        };
        *world.stats.faults.entry(operation).or_default() += 1;
        match fault {
            Fault::Before => Err(failed("simulated: the request failed")),
            Fault::After => {
                // What would have failed anyway fails as it would have.
                effect(&mut world).map_err(|kind| self.error(operation, name, kind))?;
                Err(failed("simulated: the response was lost"))
            }
            Fault::CrashBefore => {
                world.crash();
                Err(failed("simulated: the process died before the request"))
            }
            Fault::CrashAfter => {
                // The outcome is lost with the process.
                let _ = effect(&mut world);
                world.crash();
                Err(failed("simulated: the process died after the request"))
            }
        }
    }
}

impl World {
    fn crash(&mut self) {
        self.crashed = true;
        self.uploads.clear();
    }

    fn draw(&mut self, operation: Operation) -> Option<Fault> {
        if let Some(fault) = self.planned.get_mut(&operation).and_then(VecDeque::pop_front) {
            return Some(fault);
        }
        let Chances { before, after } = *self.chances.get(&operation)?;
        let drawn = self.next_fraction();
        if drawn < before {
            Some(Fault::Before)
        } else if drawn < before + after {
            Some(Fault::After)
        } else {
            None
        }
    }

    /// The next random number in [0, 1), by splitmix64.
    fn next_fraction(&mut self) -> f64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.random;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^= z >> 31;
        (z >> 11) as f64 / (1u64 << 53) as f64
    }
}
