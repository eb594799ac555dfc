//! What becomes of persists when buckets fail, are slow, refuse, or are gone; in virtual time.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bytes::Bytes;
use tidelog::{
    Changelog, ChangelogHandle, ChangelogReader, ChangelogWriter, Durability, KeyGroup, KeyGroupRange,
    Options, PersistError, PersistFuture, Seams, SequenceNumber,
};
use tidelog_io::sim::{SimRng, SimWorld};
use tidelog_upload::sim::{Chances, Fault, SimStore};
use tidelog_upload::{
    Body, BoxFuture, Capabilities, EntityTag, Lane, ListedObject, ListedPart, ListedUpload, Operation, Store,
    StoreError, StoreErrorKind, UploadId, UploadRef, UploadedPart,
};

const ZERO: SequenceNumber = SequenceNumber::ZERO;

/// A machine whose time passes by steps.
struct Machine {
    world: SimWorld,
    stores: Vec<Arc<Refusing>>,
    started_at: Instant,
    micros: Arc<AtomicU64>,
}

impl Machine {
    fn new(buckets: u64) -> Machine {
        let stores = (0..buckets).map(|seed| Arc::new(Refusing::new(SimStore::new(seed)))).collect();
        Machine { world: SimWorld::new(7), stores, started_at: Instant::now(), micros: Arc::default() }
    }

    fn options(&self) -> Options {
        let options = Options::new("sim://0", "/sim")
            .block_bytes(8 << 10)
            .segment_bytes(64 << 10)
            .local_bytes(1 << 20)
            .part_bytes(32 << 10)
            .value_bytes_max(64 << 10)
            .memory_bytes(1 << 20)
            .lane_bytes(64 << 10);
        (1..self.stores.len()).fold(options, |options, bucket| options.add_bucket(format!("sim://{bucket}")))
    }

    fn open(&self, options: Options) -> Changelog {
        let (started_at, micros) = (self.started_at, Arc::clone(&self.micros));
        let mut random = SimRng::new(self.micros.load(Ordering::Relaxed) + 1);
        let seams = Seams {
            directories: vec![(self.world.files(), Box::new(self.world.disk(4, Durability::Power)))],
            stores: self.stores.iter().map(|store| Arc::clone(store) as Arc<dyn Store>).collect(),
            clock: Arc::new(move || {
                started_at + Duration::from_micros(micros.fetch_add(10, Ordering::Relaxed))
            }),
            random: Box::new(move || random.next_u64()),
        };
        Changelog::open_simulated(options, seams).unwrap()
    }

    /// Lets time pass, and everybody work, in steps of 10 ms.
    fn pass(&self, changelog: &Changelog, time: Duration) {
        for _ in 0..time.as_millis() / 10 {
            self.micros.fetch_add(10_000, Ordering::Relaxed);
            changelog.step();
        }
    }

    /// What a future resolves to within a time.
    fn within(
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
    fn append(&self, changelog: &Changelog, writer: &mut ChangelogWriter, key: u64, value: &[u8]) {
        for _ in 0..1_000 {
            if writer.try_append(KeyGroup(key as u16), value).is_ok() {
                return;
            }
            self.pass(changelog, Duration::from_millis(10));
        }
        panic!("no room");
    }

    fn objects(&self) -> Vec<String> {
        self.stores.iter().flat_map(|store| store.inner.objects().into_keys()).collect()
    }

    fn values(&self, handle: &ChangelogHandle) -> Vec<Vec<u8>> {
        let stores = self.stores.iter().map(|store| Arc::clone(store) as Arc<dyn Store>).collect();
        let reader =
            ChangelogReader::open_simulated(std::slice::from_ref(handle), KeyGroupRange::ALL, stores);
        reader.unwrap().map(|change| change.unwrap().value.to_vec()).collect()
    }
}

fn writer(changelog: &Changelog, name: &str) -> ChangelogWriter {
    changelog.create_writer(name, KeyGroupRange::ALL).unwrap()
}

const SECOND: Duration = Duration::from_secs(1);

#[test]
fn a_persist_outlives_the_failure_of_its_object() {
    let machine = Machine::new(1);
    let changelog = machine.open(machine.options());
    let [mut first, mut second] = ["first", "second"].map(|name| writer(&changelog, name));
    first.append(KeyGroup(1), b"one").unwrap();
    machine.stores[0].inner.set_dead(true);
    let failing = first.persist_durably(ZERO);
    machine.pass(&changelog, 20 * SECOND);
    let failing = failing.wait_timeout(Duration::ZERO).expect_err("the bucket is dead");
    second.append(KeyGroup(2), b"two").unwrap();
    let second = second.persist_durably(ZERO);
    machine.stores[0].inner.heal();
    let handles = [failing, second]
        .map(|future| machine.within(&changelog, 60 * SECOND, future).expect("it is back").unwrap());
    assert_eq!(machine.values(&handles[0]), [b"one".to_vec()]);
    assert_eq!(machine.values(&handles[1]), [b"two".to_vec()]);
}

#[test]
fn a_persist_ends_at_its_deadline_and_says_why() {
    let machine = Machine::new(1);
    let changelog = machine.open(machine.options().persist_timeout(5 * SECOND));
    let mut writer = writer(&changelog, "log");
    writer.append(KeyGroup(1), b"one").unwrap();
    machine.stores[0].inner.set_dead(true);
    let future = writer.persist_durably(ZERO);
    match machine.within(&changelog, 6 * SECOND, future) {
        Some(Err(error @ PersistError::Timeout { .. })) => {
            let text = error.to_string();
            assert!(text.contains("5s") && text.contains("persist again"), "{text}");
        }
        other => panic!("{other:?}"),
    }
    // It was only that: nothing is lost, and the next one succeeds.
    machine.stores[0].inner.heal();
    let future = writer.persist_durably(ZERO);
    let handle = machine.within(&changelog, 60 * SECOND, future).expect("in time").unwrap();
    assert_eq!(machine.values(&handle), [b"one".to_vec()]);
}

#[test]
fn what_does_not_pass_by_itself_is_told_at_once_and_only_to_those_who_asked() {
    let machine = Machine::new(1);
    let changelog = machine.open(machine.options());
    let [mut denied, mut later] = ["denied", "later"].map(|name| writer(&changelog, name));
    denied.append(KeyGroup(1), b"one").unwrap();
    machine.stores[0].deny.store(true, Ordering::Relaxed);
    let future = denied.persist_durably(ZERO);
    match machine.within(&changelog, SECOND, future) {
        Some(Err(PersistError::Upload { source, .. })) => assert_eq!(*source.kind(), StoreErrorKind::Denied),
        other => panic!("{other:?}"),
    }
    machine.stores[0].deny.store(false, Ordering::Relaxed);
    later.append(KeyGroup(1), b"two").unwrap();
    let handle =
        machine.within(&changelog, 10 * SECOND, later.persist_durably(ZERO)).expect("in time").unwrap();
    assert_eq!(machine.values(&handle), [b"two".to_vec()]);
    let handle =
        machine.within(&changelog, 10 * SECOND, denied.persist_durably(ZERO)).expect("in time").unwrap();
    assert_eq!(machine.values(&handle), [b"one".to_vec()]);
}

#[test]
fn with_one_bucket_of_two_dead_persists_go_on_and_nothing_stays_behind() {
    for dead in 0..2 {
        let machine = Machine::new(2);
        let changelog = machine.open(machine.options());
        let mut writer = writer(&changelog, "log");
        machine.stores[dead].inner.set_dead(true);
        for round in 0u64..5 {
            for change in 0u64..40 {
                machine.append(
                    &changelog,
                    &mut writer,
                    change,
                    &(round * 40 + change).to_le_bytes().repeat(200),
                );
            }
            let handle = machine.within(&changelog, 10 * SECOND, writer.persist_durably(ZERO));
            let handle = handle.expect("the other bucket works").unwrap();
            let elsewhere = machine.stores[dead].url();
            assert!(handle.objects().all(|(bucket, _)| bucket != elsewhere), "{handle:?}");
            assert_eq!(machine.values(&handle).len() as u64, (round + 1) * 40);
        }
        machine.stores[dead].inner.heal();
        writer.truncate_and_close();
        machine.pass(&changelog, 60 * SECOND);
        assert_eq!(machine.objects(), [""; 0]);
        assert!(machine.stores.iter().all(|store| store.inner.open_uploads().is_empty()));
    }
}

#[test]
fn requests_that_come_late_leave_nothing_behind() {
    let machine = Machine::new(2);
    let changelog = machine.open(machine.options());
    let mut writer = writer(&changelog, "log");
    for operation in [Operation::Put, Operation::Create, Operation::PutPart, Operation::Complete] {
        let chances = Chances { late: 0.3, after: 0.2, ..Chances::default() };
        machine.stores.iter().for_each(|store| store.inner.set_chances(operation, chances));
    }
    for round in 0..10u64 {
        for change in 0..40u64 {
            machine.append(&changelog, &mut writer, change, &(round * 40 + change).to_le_bytes().repeat(300));
        }
        let handle = machine.within(&changelog, 60 * SECOND, writer.persist_durably(ZERO));
        let handle = handle.expect("most requests succeed").unwrap();
        assert_eq!(machine.values(&handle).len() as u64, (round + 1) * 40);
    }
    machine.stores.iter().for_each(|store| store.inner.heal());
    machine.stores.iter().for_each(|store| store.inner.settle());
    machine.pass(&changelog, 30 * SECOND);
    let handle = machine.within(&changelog, SECOND, writer.persist_durably(ZERO)).expect("in time").unwrap();
    let named: Vec<String> = handle.objects().map(|(_, object)| object.to_owned()).collect();
    let strays: Vec<String> =
        machine.objects().into_iter().filter(|object| !named.contains(object)).collect();
    assert_eq!(strays, [""; 0]);
    writer.truncate_and_close();
    machine.pass(&changelog, 30 * SECOND);
    assert_eq!(machine.objects(), [""; 0]);
}

#[test]
fn a_bucket_that_is_not_configured_any_more_keeps_what_it_has() {
    let mut machine = Machine::new(2);
    let changelog = machine.open(machine.options());
    let mut writer = writer(&changelog, "log");
    writer.append(KeyGroup(1), b"one").unwrap();
    machine.stores[0].inner.set_dead(true);
    let handle =
        machine.within(&changelog, 30 * SECOND, writer.persist_durably(ZERO)).expect("in time").unwrap();
    drop(writer);
    drop(changelog);
    machine.stores[0].inner.heal();
    let gone = machine.stores.pop().expect("two buckets");
    let changelog = machine.open(machine.options());
    machine.pass(&changelog, 30 * SECOND);
    for log in changelog.recovered() {
        log.discard();
    }
    machine.pass(&changelog, 30 * SECOND);
    drop(changelog);
    let objects: Vec<String> = gone.inner.objects().into_keys().collect();
    assert_eq!(objects, handle.objects().map(|(_, object)| object.to_owned()).collect::<Vec<_>>());
    // It is there again, and what nobody needs goes.
    machine.stores.push(gone);
    let changelog = machine.open(machine.options());
    machine.pass(&changelog, 30 * SECOND);
    assert_eq!(machine.objects(), [""; 0]);
}

#[test]
fn what_a_crash_leaves_in_any_bucket_is_swept_at_the_next_open() {
    for crash_after in 0..12 {
        let machine = Machine::new(2);
        let changelog = machine.open(machine.options());
        let mut writer = writer(&changelog, "log");
        for change in 0..60u64 {
            machine.append(&changelog, &mut writer, change, &change.to_le_bytes().repeat(200));
        }
        let synced = writer.sync();
        machine.pass(&changelog, SECOND / 10);
        assert!(synced.wait_timeout(Duration::ZERO).is_ok());
        // The process dies in the middle of its upload.
        machine.stores.iter().for_each(|store| store.die_after(crash_after));
        drop(writer.persist_durably(ZERO));
        machine.pass(&changelog, SECOND);
        machine.world.kill(1);
        drop(writer);
        drop(changelog);
        machine.stores.iter().for_each(|store| store.revive());
        let changelog = machine.open(machine.options());
        machine.pass(&changelog, 30 * SECOND);
        let named: Vec<String> = changelog
            .recovered()
            .iter()
            .filter_map(|log| {
                let future = log.persist_durably(log.start());
                machine.within(&changelog, 30 * SECOND, future)?.ok()
            })
            .flat_map(|handle| handle.objects().map(|(_, object)| object.to_owned()).collect::<Vec<_>>())
            .collect();
        machine.pass(&changelog, 30 * SECOND);
        let mut objects = machine.objects();
        objects.retain(|object| !named.contains(object));
        assert_eq!(objects, [""; 0], "died after {crash_after} requests");
        let uploads: Vec<String> =
            machine.stores.iter().flat_map(|store| store.inner.open_uploads()).collect();
        assert_eq!(uploads, [""; 0], "died after {crash_after} requests");
    }
}

#[test]
fn names_carry_prefix_and_hash() {
    let machine = Machine::new(1);
    let changelog = machine.open(machine.options().name_prefix("jobs/a").hash_prefix(true).group("g"));
    let mut writer = writer(&changelog, "log");
    writer.append(KeyGroup(1), b"one").unwrap();
    let handle = machine.within(&changelog, SECOND, writer.persist_durably(ZERO)).expect("in time").unwrap();
    let (_, object) = handle.objects().next().unwrap();
    let parts: Vec<&str> = object.split('/').collect();
    assert_eq!((parts[0], parts[1], parts[2].len(), parts[3]), ("jobs", "a", 2, "g"), "{object}");
}

/// A bucket that denies, or whose user dies after a number of requests.
#[derive(Debug)]
struct Refusing {
    inner: SimStore,
    deny: AtomicBool,
    left: Mutex<Option<u64>>,
}

impl Refusing {
    fn new(inner: SimStore) -> Refusing {
        Refusing { inner, deny: AtomicBool::new(false), left: Mutex::new(None) }
    }

    fn die_after(&self, requests: u64) {
        *self.left.lock().unwrap() = Some(requests);
    }

    fn revive(&self) {
        *self.left.lock().unwrap() = None;
        self.inner.settle();
        self.inner.restart();
    }

    fn check(&self, operation: Operation, name: &str) -> Result<(), StoreError> {
        if let Some(left) = &mut *self.left.lock().unwrap() {
            *left = left.saturating_sub(1);
            if *left == 0 && !self.inner.is_crashed() {
                self.inner.fail_next(operation, Fault::CrashAfter);
            }
        }
        match self.deny.load(Ordering::Relaxed) {
            true => Err(StoreError::new(operation, self.inner.url(), name, StoreErrorKind::Denied)),
            false => Ok(()),
        }
    }
}

impl Store for Refusing {
    fn url(&self) -> &str {
        self.inner.url()
    }

    fn capabilities(&self) -> &Capabilities {
        self.inner.capabilities()
    }

    fn put<'a>(
        &'a self,
        name: &'a str,
        body: Body,
        lane: Lane,
    ) -> BoxFuture<'a, Result<EntityTag, StoreError>> {
        Box::pin(async move {
            self.check(Operation::Put, name)?;
            self.inner.put(name, body, lane).await
        })
    }

    fn create<'a>(&'a self, name: &'a str) -> BoxFuture<'a, Result<UploadId, StoreError>> {
        Box::pin(async move {
            self.check(Operation::Create, name)?;
            self.inner.create(name).await
        })
    }

    fn put_part<'a>(
        &'a self,
        upload: UploadRef<'a>,
        number: u32,
        body: Body,
        lane: Lane,
    ) -> BoxFuture<'a, Result<EntityTag, StoreError>> {
        Box::pin(async move {
            self.check(Operation::PutPart, upload.name)?;
            self.inner.put_part(upload, number, body, lane).await
        })
    }

    fn list_parts<'a>(&'a self, upload: UploadRef<'a>) -> BoxFuture<'a, Result<Vec<ListedPart>, StoreError>> {
        self.inner.list_parts(upload)
    }

    fn complete<'a>(
        &'a self,
        upload: UploadRef<'a>,
        parts: &'a [UploadedPart],
    ) -> BoxFuture<'a, Result<EntityTag, StoreError>> {
        Box::pin(async move {
            self.check(Operation::Complete, upload.name)?;
            self.inner.complete(upload, parts).await
        })
    }

    fn abort<'a>(&'a self, upload: UploadRef<'a>) -> BoxFuture<'a, Result<(), StoreError>> {
        self.inner.abort(upload)
    }

    fn list_uploads<'a>(&'a self, prefix: &'a str) -> BoxFuture<'a, Result<Vec<ListedUpload>, StoreError>> {
        self.inner.list_uploads(prefix)
    }

    fn get<'a>(&'a self, name: &'a str, range: Range<u64>) -> BoxFuture<'a, Result<Bytes, StoreError>> {
        self.inner.get(name, range)
    }

    fn head<'a>(&'a self, name: &'a str) -> BoxFuture<'a, Result<ListedObject, StoreError>> {
        self.inner.head(name)
    }

    fn delete<'a>(&'a self, name: &'a str) -> BoxFuture<'a, Result<(), StoreError>> {
        self.inner.delete(name)
    }

    fn list<'a>(&'a self, prefix: &'a str) -> BoxFuture<'a, Result<Vec<ListedObject>, StoreError>> {
        self.inner.list(prefix)
    }
}
