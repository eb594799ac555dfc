//! A machine in one thread and virtual time, and buckets that fail as they are told to.

use std::collections::BTreeSet;
use std::future::poll_fn;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Poll, Waker};
use std::time::{Duration, Instant};

use tidelog::{
    Changelog, ChangelogHandle, ChangelogReader, ChangelogWriter, Durability, KeyGroup, KeyGroupRange,
    Options, PersistError, PersistFuture, Seams, SequenceNumber,
};
use tidelog_io::sim::{SimRng, SimWorld};
use tidelog_upload::sim::{Fault, SimStore};
use tidelog_upload::{BoxFuture, Lane, Operation, Store, StoreError, StoreErrorKind};

use crate::hooked::{Hook, Hooked};

pub const ZERO: SequenceNumber = SequenceNumber::ZERO;
pub const SECOND: Duration = Duration::from_secs(1);

/// A machine whose time passes by steps.
pub struct Machine {
    /// The disks, one for each directory.
    pub worlds: Vec<SimWorld>,
    pub stores: Vec<Arc<Refusing>>,
    pub started_at: Instant,
    pub micros: Arc<AtomicU64>,
}

impl Machine {
    pub fn new(buckets: u64) -> Machine {
        let stores = (0..buckets).map(|seed| Arc::new(Hooked(Refuses::new(SimStore::new(seed))))).collect();
        let worlds = vec![SimWorld::new(7)];
        Machine { worlds, stores, started_at: Instant::now(), micros: Arc::default() }
    }

    pub fn options(&self) -> Options {
        let options = Options::new("sim://0", "/sim")
            .block_bytes(8 << 10)
            .segment_bytes(64 << 10)
            .local_bytes(1 << 20)
            .part_bytes(32 << 10)
            .value_bytes_max(64 << 10)
            .memory_bytes(1 << 20)
            .lane_bytes(64 << 10);
        let options = (1..self.worlds.len())
            .fold(options, |options, disk| options.add_directory(format!("/sim{disk}")));
        (1..self.stores.len()).fold(options, |options, bucket| options.add_bucket(format!("sim://{bucket}")))
    }

    pub fn open(&self, options: Options) -> Changelog {
        let (started_at, micros) = (self.started_at, Arc::clone(&self.micros));
        let mut random = SimRng::new(self.micros.load(Ordering::Relaxed) + 1);
        let seams = Seams {
            directories: self
                .worlds
                .iter()
                .map(|world| (world.files(), Box::new(world.disk(4, Durability::Power)) as Box<_>))
                .collect(),
            stores: self.stores.iter().map(|store| Arc::clone(store) as Arc<dyn Store>).collect(),
            clock: Arc::new(move || {
                started_at + Duration::from_micros(micros.fetch_add(10, Ordering::Relaxed))
            }),
            random: Box::new(move || random.next_u64()),
        };
        Changelog::open_simulated(options, seams).unwrap()
    }

    /// Lets time pass, and everybody work, in steps of 10 ms.
    pub fn pass(&self, changelog: &Changelog, time: Duration) {
        for _ in 0..time.as_millis() / 10 {
            self.micros.fetch_add(10_000, Ordering::Relaxed);
            changelog.step();
        }
    }

    /// What a future resolves to within a time.
    pub fn within(
        &self,
        changelog: &Changelog,
        time: Duration,
        mut future: PersistFuture,
    ) -> Option<Result<ChangelogHandle, PersistError>> {
        for _ in 0..time.as_millis() / 10 {
            self.pass(changelog, Duration::from_millis(10));
            match future.wait_timeout(Duration::ZERO) {
                Ok(outcome) => return Some(outcome),
                Err(again) => future = again,
            }
        }
        None
    }

    /// Appends as soon as there is room.
    pub fn append(&self, changelog: &Changelog, writer: &mut ChangelogWriter, key: u64, value: &[u8]) {
        for _ in 0..1_000 {
            if writer.try_append(KeyGroup(key as u16), value).is_ok() {
                return;
            }
            self.pass(changelog, Duration::from_millis(10));
        }
        panic!("no room");
    }

    pub fn objects(&self) -> Vec<String> {
        self.stores.iter().flat_map(|store| store.inner.objects().into_keys()).collect()
    }

    pub fn values(&self, handle: &ChangelogHandle) -> Vec<Vec<u8>> {
        let stores = self.stores.iter().map(|store| Arc::clone(store) as Arc<dyn Store>).collect();
        let reader =
            ChangelogReader::open_simulated(std::slice::from_ref(handle), KeyGroupRange::ALL, stores);
        reader.unwrap().map(|change| change.unwrap().value.to_vec()).collect()
    }
}

pub fn writer(changelog: &Changelog, name: &str) -> ChangelogWriter {
    changelog.create_writer(name, KeyGroupRange::ALL).unwrap()
}

/// A bucket that denies, forgets, lets wait, or whose user dies after a number of requests.
pub type Refusing = Hooked<Refuses>;

#[derive(Debug)]
pub struct Refuses {
    pub inner: SimStore,
    pub deny: AtomicBool,
    /// Denies deletions only.
    pub keeps: AtomicBool,
    /// How many deletions it was asked for.
    pub deletions: AtomicU64,
    /// How it denies.
    pub deny_as: Mutex<StoreErrorKind>,
    /// Its next Complete finds that the upload is not there any more.
    pub forget: AtomicBool,
    /// Whether what is sent to it waits, and who does.
    held: Mutex<(bool, Vec<Waker>)>,
    /// The names that were asked for something.
    pub names: Mutex<BTreeSet<String>>,
    left: Mutex<Option<u64>>,
}

impl Refuses {
    fn new(inner: SimStore) -> Refuses {
        Refuses {
            inner,
            deny: AtomicBool::new(false),
            keeps: AtomicBool::new(false),
            deletions: AtomicU64::new(0),
            deny_as: Mutex::new(StoreErrorKind::Denied),
            forget: AtomicBool::new(false),
            held: Mutex::default(),
            names: Mutex::default(),
            left: Mutex::new(None),
        }
    }

    pub fn die_after(&self, requests: u64) {
        *self.left.lock().unwrap() = Some(requests);
    }

    pub fn revive(&self) {
        *self.left.lock().unwrap() = None;
        self.inner.settle();
        self.inner.restart();
    }

    /// What is sent to it waits, until it is released.
    pub fn hold(&self) {
        self.held.lock().unwrap().0 = true;
    }

    /// What is sent to it from now on does not wait; what waits goes on waiting.
    pub fn hold_no_more(&self) {
        self.held.lock().unwrap().0 = false;
    }

    /// Whether something waits.
    pub fn holds(&self) -> bool {
        !self.held.lock().unwrap().1.is_empty()
    }

    pub fn release(&self) {
        let (_, waiting) = std::mem::take(&mut *self.held.lock().unwrap());
        waiting.into_iter().for_each(Waker::wake);
    }

    async fn check(&self, operation: Operation, name: &str) -> Result<(), StoreError> {
        self.names.lock().unwrap().insert(name.to_owned());
        let deletes = operation == Operation::Delete;
        self.deletions.fetch_add(deletes.into(), Ordering::Relaxed);
        poll_fn(|context| {
            let mut held = self.held.lock().unwrap();
            if held.0 {
                held.1.push(context.waker().clone());
                return Poll::Pending;
            }
            Poll::Ready(())
        })
        .await;
        if operation == Operation::Complete && self.forget.swap(false, Ordering::Relaxed) {
            return Err(StoreError::new(operation, self.inner.url(), name, StoreErrorKind::NoSuchUpload));
        }
        if let Some(left) = &mut *self.left.lock().unwrap() {
            *left = left.saturating_sub(1);
            if *left == 0 && !self.inner.is_crashed() {
                self.inner.fail_next(operation, Fault::CrashAfter);
            }
        }
        match self.deny.load(Ordering::Relaxed) || deletes && self.keeps.load(Ordering::Relaxed) {
            true => {
                let kind = self.deny_as.lock().unwrap().clone();
                Err(StoreError::new(operation, self.inner.url(), name, kind))
            }
            false => Ok(()),
        }
    }
}

impl Hook for Refuses {
    fn inner(&self) -> &dyn Store {
        &self.inner
    }

    fn pass<'a, T: Send + 'a>(
        &'a self,
        operation: Operation,
        name: &'a str,
        _: Lane,
        request: BoxFuture<'a, Result<T, StoreError>>,
    ) -> BoxFuture<'a, Result<T, StoreError>> {
        use Operation::{Complete, Create, Delete, Get, Put, PutPart};
        Box::pin(async move {
            if matches!(operation, Put | Create | PutPart | Complete | Get | Delete) {
                self.check(operation, name).await?;
            }
            request.await
        })
    }
}
