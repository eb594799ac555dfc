//! What uploads must not do to others: make them wait, take their memory, send or leave what nobody needs.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Barrier, Mutex};
use std::time::Duration;

use metrics::{
    Counter, CounterFn, Gauge, GaugeFn, Histogram, Key, KeyName, Metadata, Recorder, SharedString, Unit,
};
use tidelog::{
    ChangelogReader, ChangelogWriter, Compression, KeyGroup, KeyGroupRange, PersistError, Restore,
    SequenceNumber,
};
use tidelog_io::sim::{Fault as DiskFault, SimRng, SimWorld};
use tidelog_upload::sim::Fault;
use tidelog_upload::{Operation, Store};

use crate::machine::{Machine, SECOND, ZERO, writer};

#[test]
fn appends_and_syncs_do_not_wait_for_uploads() {
    let machine = Machine::new(2);
    let changelog = machine.open(machine.options());
    let mut writer = writer(&changelog, "log");
    machine.stores.iter().for_each(|store| store.hold());
    // Twice what uploads may hold in memory, and half of the local budget.
    let mut appended: Vec<Vec<u8>> = (0..500u64).map(|change| change.to_le_bytes().repeat(128)).collect();
    for (change, value) in appended.iter().enumerate() {
        machine.append(&changelog, &mut writer, change as u64, value);
    }
    let synced = writer.sync();
    let persist = writer.persist_durably(ZERO);
    machine.pass(&changelog, SECOND);
    synced.wait_timeout(Duration::ZERO).expect("in time").unwrap();
    assert!(machine.stores.iter().any(|store| store.holds()));
    let persist = persist.wait_timeout(Duration::ZERO).expect_err("no bucket answers");
    machine.stores.iter().for_each(|store| store.release());
    let handle = machine.within(&changelog, 60 * SECOND, persist).expect("they answer again").unwrap();
    let mut values = machine.values(&handle);
    values.sort();
    appended.sort();
    assert!(values == appended);
}

/// Group commit: what writers sync at one time goes to the disk together.
#[test]
fn writers_that_sync_together_share_one_write() {
    let machine = Machine::new(1);
    let changelog = machine.open(machine.options());
    let mut writers: Vec<_> = (0..24).map(|number| writer(&changelog, &format!("log-{number}"))).collect();
    let writes_before = machine.worlds[0].stats().writes;
    // Each on a thread of its own, all at once: as far as there are lanes, each has one.
    let all_there = Barrier::new(writers.len());
    let append = |writer: &mut ChangelogWriter| {
        writer.append(KeyGroup(1), &[7; 100]).unwrap();
        all_there.wait();
        writer.sync()
    };
    let synced: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = writers.iter_mut().map(|writer| scope.spawn(|| append(writer))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    machine.pass(&changelog, SECOND);
    for synced in synced {
        synced.wait_timeout(Duration::ZERO).expect("in time").unwrap();
    }
    assert_eq!(machine.worlds[0].stats().writes - writes_before, 1);
}

#[test]
fn who_leaves_or_is_too_late_keeps_nobody_waiting_who_shares_the_object() {
    let machine = Machine::new(1);
    let changelog = machine.open(machine.options().persist_timeout(5 * SECOND).batch_delay(4 * SECOND));
    let [mut leaving, mut late, mut patient] =
        ["leaving", "late", "patient"].map(|name| writer(&changelog, name));
    for writer in [&mut leaving, &mut late, &mut patient] {
        writer.append(KeyGroup(1), b"one").unwrap();
    }
    machine.stores[0].hold();
    drop(leaving.persist_durably(ZERO));
    let late = late.persist_durably(ZERO);
    machine.pass(&changelog, 2 * SECOND);
    // Now all have asked, and the object is on its way.
    let patient = patient.persist_durably(ZERO);
    machine.pass(&changelog, SECOND);
    leaving.close();
    assert!(machine.stores[0].holds());
    let late = machine.within(&changelog, 3 * SECOND, late).expect("its time is over");
    assert!(matches!(late, Err(PersistError::Timeout { .. })), "{late:?}");
    machine.stores[0].release();
    let handle = machine.within(&changelog, SECOND, patient).expect("in time").unwrap();
    assert_eq!(machine.values(&handle), [b"one".to_vec()]);
    assert_eq!(machine.objects().len(), 1);
}

/// Intake is shut then: nobody can join those who have asked.
#[test]
fn a_close_does_not_wait_for_writers_that_cannot_ask_any_more() {
    let machine = Machine::new(1);
    let changelog = machine.open(machine.options().batch_delay(100 * SECOND));
    let [mut asks, _silent] = ["asks", "silent"].map(|name| writer(&changelog, name));
    asks.append(KeyGroup(1), b"one").unwrap();
    let persist = asks.persist_durably(ZERO);
    machine.pass(&changelog, SECOND);
    let persist = persist.wait_timeout(Duration::ZERO).expect_err("the other one may still ask");
    changelog.close(2 * SECOND).unwrap();
    assert!(machine.micros.load(Ordering::Relaxed) < 50_000_000, "it did not wait");
    let handle = persist.wait_timeout(Duration::ZERO).expect("answered before the close").unwrap();
    assert_eq!(machine.values(&handle), [b"one".to_vec()]);
}

#[test]
fn truncation_alone_makes_room() {
    let machine = Machine::new(1);
    let changelog = machine.open(machine.options().preemptive_upload(false));
    let mut writer = writer(&changelog, "log");
    machine.stores[0].hold();
    // Five times the local budget.
    for _ in 0..50 {
        for change in 0..100 {
            machine.append(&changelog, &mut writer, change, &[7; 1000]);
        }
        writer.truncate(writer.next_sequence_number()).unwrap();
    }
    assert!(!machine.stores[0].holds(), "nothing was sent");
}

#[test]
fn an_object_that_a_broken_directory_should_have_recorded_is_removed() {
    let mut machine = Machine::new(1);
    machine.worlds.push(SimWorld::new(8));
    let changelog = machine.open(machine.options());
    let mut writers = ["first", "second"].map(|name| writer(&changelog, name));
    for writer in &mut writers {
        writer.append(KeyGroup(1), b"one").unwrap();
    }
    machine.stores[0].hold();
    let persists = writers.each_mut().map(|writer| writer.persist_durably(ZERO));
    machine.pass(&changelog, SECOND / 10);
    assert!(machine.stores[0].holds(), "one object for both is on its way");
    machine.worlds[1].inject(DiskFault::EngineBreaks, 0);
    let synced = writers.each_mut().map(|writer| {
        writer.append(KeyGroup(1), b"two").unwrap();
        writer.sync()
    });
    machine.pass(&changelog, SECOND / 10);
    let broken = synced.map(|synced| synced.wait_timeout(Duration::ZERO).expect("in time").is_err());
    assert_eq!(broken, [false, true]);
    machine.stores[0].release();
    let named: BTreeSet<String> = persists
        .into_iter()
        .filter_map(|persist| machine.within(&changelog, 10 * SECOND, persist).expect("in time").ok())
        .flat_map(|handle| handle.objects().map(|(_, object)| object.to_owned()).collect::<Vec<_>>())
        .collect();
    assert!(!named.is_empty());
    machine.pass(&changelog, 30 * SECOND);
    assert_eq!(machine.objects().into_iter().collect::<BTreeSet<_>>(), named);
}

#[test]
fn changes_that_were_truncated_are_not_sent() {
    let machine = Machine::new(1);
    let changelog = machine.open(machine.options().preemptive_upload(false));
    let mut writer = writer(&changelog, "log");
    let append = |writer: &mut ChangelogWriter, changes: u64| {
        for change in 0..changes {
            machine.append(&changelog, writer, change, &[7; 1000]);
        }
    };
    append(&mut writer, 40);
    writer.truncate(SequenceNumber(40)).unwrap();
    let handle = machine.within(&changelog, SECOND, writer.persist_durably(SequenceNumber(40)));
    assert_eq!(handle.expect("in time").unwrap().extents(), []);
    assert_eq!((machine.objects(), machine.stores[0].inner.stats().bytes_put), (Vec::new(), 0));
    append(&mut writer, 40);
    writer.truncate(SequenceNumber(79)).unwrap();
    let handle = machine.within(&changelog, SECOND, writer.persist_durably(SequenceNumber(79)));
    assert_eq!(machine.values(&handle.expect("in time").unwrap()), [vec![7; 1000]]);
    let sent = machine.stores[0].inner.stats().bytes_put;
    assert!((1000..2000).contains(&sent), "{sent}");
}

#[test]
fn what_is_sent_ahead_and_truncated_meanwhile_is_given_up() {
    let machine = Machine::new(1);
    let changelog = machine.open(machine.options());
    let mut writer = writer(&changelog, "log");
    for change in 0..100u64 {
        machine.append(&changelog, &mut writer, change, &[7; 1000]);
    }
    machine.pass(&changelog, SECOND);
    assert_ne!(machine.stores[0].inner.stats().bytes_put, 0, "parts go ahead of the checkpoint");
    writer.truncate(SequenceNumber(100)).unwrap();
    machine.pass(&changelog, SECOND);
    assert_eq!((machine.objects(), machine.stores[0].inner.open_uploads()), (Vec::new(), Vec::new()));
    let handle = machine.within(&changelog, SECOND, writer.persist_durably(SequenceNumber(100)));
    assert_eq!(handle.expect("in time").unwrap().extents(), []);
}

#[test]
fn a_reader_of_few_key_groups_reads_little_of_an_object() {
    let machine = Machine::new(1);
    let changelog = machine.open(machine.options());
    let mut writer = writer(&changelog, "log");
    for change in 0..320u64 {
        machine.append(&changelog, &mut writer, change % 32, &[change as u8; 1000]);
    }
    let handle =
        machine.within(&changelog, 10 * SECOND, writer.persist_durably(ZERO)).expect("in time").unwrap();
    let store = &machine.stores[0].inner;
    let (_, object) = handle.objects().next().unwrap();
    let whole = store.objects()[object].len() as u64;
    let read_before = store.stats().bytes_got;
    let key_groups = KeyGroupRange::new(5, 5).unwrap();
    let stores = vec![Arc::clone(&machine.stores[0]) as Arc<dyn Store>];
    let reader = ChangelogReader::open_simulated(&[handle], key_groups, stores).unwrap();
    assert_eq!(reader.map(|change| change.unwrap().key_group).collect::<Vec<_>>(), [Some(KeyGroup(5)); 10]);
    let read = store.stats().bytes_got - read_before;
    assert!(read < whole / 10, "{read} of {whole} bytes");
}

/// Each changeset is compressed on its own, so what is read for one does not grow with those before it.
#[test]
fn the_key_groups_of_a_compressed_object_are_read_once_each() {
    let machine = Machine::new(1);
    let changelog = machine
        .open(machine.options().memory_bytes(4 << 20).part_bytes(512 << 10).compression(Compression::Lz4));
    let mut writer = writer(&changelog, "log");
    let mut random = SimRng::new(5);
    for change in 0..320u64 {
        // Half of it can be compressed.
        let mut value = vec![0; 1000];
        value[..500]
            .chunks_mut(8)
            .for_each(|word| word.copy_from_slice(&random.next_u64().to_le_bytes()[..word.len()]));
        machine.append(&changelog, &mut writer, change % 32, &value);
    }
    let handle =
        machine.within(&changelog, 10 * SECOND, writer.persist_durably(ZERO)).expect("in time").unwrap();
    let store = &machine.stores[0].inner;
    let (_, object) = handle.objects().next().unwrap();
    let whole = store.objects()[object].len() as u64;
    assert!(whole < 320 * 600, "{whole} bytes are not compressed");
    let stores = vec![Arc::clone(&machine.stores[0]) as Arc<dyn Store>];
    let restore = Restore::open_simulated(&[handle], stores).unwrap();
    let read_before = store.stats().bytes_got;
    for group in 0..32 {
        let reader = restore.reader(KeyGroupRange::new(group, group).unwrap()).unwrap();
        assert_eq!(reader.map(Result::unwrap).count(), 10);
    }
    let read = store.stats().bytes_got - read_before;
    assert!(read < whole + whole / 10, "{read} bytes of {whole}");
}

#[test]
fn uploads_keep_to_their_share_of_the_memory() {
    const MEMORY: usize = 1 << 20;
    let told = Told::default();
    metrics::with_local_recorder(&told, || {
        let machine = Machine::new(2);
        let changelog = machine.open(machine.options().memory_bytes(MEMORY));
        let mut writer = writer(&changelog, "log");
        machine.stores.iter().for_each(|store| store.hold());
        for change in 0..600u64 {
            machine.append(&changelog, &mut writer, change, &change.to_le_bytes().repeat(128));
        }
        let persist = writer.persist_durably(ZERO);
        machine.pass(&changelog, SECOND);
        machine.stores.iter().for_each(|store| store.release());
        machine.within(&changelog, 300 * SECOND, persist).expect("they answer again").unwrap();
        // A quarter of all is for uploads.
        let held_max = told.value("tidelog_upload_memory_bytes").1;
        assert!(held_max > 0.0 && held_max <= (MEMORY / 4) as f64, "{held_max}");
    });
    assert_eq!(told.value("tidelog_upload_memory_bytes").0, 0.0);
}

#[test]
fn what_cannot_be_removed_is_counted_and_removed_later() {
    let told = Told::default();
    metrics::with_local_recorder(&told, || {
        let machine = Machine::new(1);
        let changelog = machine.open(machine.options());
        let mut writer = writer(&changelog, "log");
        writer.append(KeyGroup(1), b"one").unwrap();
        let store = &machine.stores[0].inner;
        store.fail_next(Operation::Put, Fault::Late);
        let handle = machine.within(&changelog, 60 * SECOND, writer.persist_durably(ZERO));
        let handle = handle.expect("the second one is not late").unwrap();
        store.settle();
        let named: Vec<String> = handle.objects().map(|(_, object)| object.to_owned()).collect();
        assert_ne!(machine.objects(), named, "the late one is there");
        store.set_dead(true);
        machine.pass(&changelog, 60 * SECOND);
        assert!(told.value("tidelog_delete_failures_total").0 > 0.0);
        store.heal();
        machine.pass(&changelog, 60 * SECOND);
        assert_eq!(machine.objects(), named);
    });
}

/// What was told of counters and gauges: the value, and the largest one.
#[derive(Default)]
struct Told(Mutex<BTreeMap<String, Arc<Value>>>);

#[derive(Default)]
struct Value(Mutex<(f64, f64)>);

impl Told {
    fn of(&self, key: &str) -> Arc<Value> {
        Arc::clone(self.0.lock().unwrap().entry(key.to_owned()).or_default())
    }

    fn value(&self, key: &str) -> (f64, f64) {
        *self.of(key).0.lock().unwrap()
    }
}

impl Value {
    fn change(&self, change: impl FnOnce(f64) -> f64) {
        let mut value = self.0.lock().unwrap();
        value.0 = change(value.0);
        value.1 = value.1.max(value.0);
    }
}

impl CounterFn for Value {
    fn increment(&self, by: u64) {
        self.change(|value| value + by as f64);
    }

    fn absolute(&self, to: u64) {
        self.change(|_| to as f64);
    }
}

impl GaugeFn for Value {
    fn increment(&self, by: f64) {
        self.change(|value| value + by);
    }

    fn decrement(&self, by: f64) {
        self.change(|value| value - by);
    }

    fn set(&self, to: f64) {
        self.change(|_| to);
    }
}

impl Recorder for Told {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        Counter::from_arc(self.of(key.name()))
    }

    fn register_gauge(&self, key: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::from_arc(self.of(key.name()))
    }

    fn register_histogram(&self, _: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::noop()
    }
}
