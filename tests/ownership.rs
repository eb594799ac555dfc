//! Who owns an object: logs, holders, an engine's registry. What somebody needs stays, what nobody needs goes, once.

mod common;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use metrics::{Counter, Gauge, GaugeFn, Histogram, Key, KeyName, Metadata, Recorder, SharedString, Unit};
use tidelog::manifest::ManifestState;
use tidelog::{
    AppendError, Changelog, ChangelogHandle, ChangelogReader, ChangelogWriter, Durability, KeyGroup,
    KeyGroupRange, LogId, Options, PersistError, ReadError, RegisterError, ReleaseError, Seams,
    SequenceNumber,
};
use tidelog_io::directory::Manifest;
use tidelog_io::sim::{Fault, SimRng, SimWorld};
use tidelog_upload::Operation;
use tidelog_upload::sim::{Chances, SimStore};

const ZERO: SequenceNumber = SequenceNumber::ZERO;

/// Directories, a bucket and a clock that survive the processes on them.
struct Machine {
    worlds: Vec<SimWorld>,
    store: Arc<SimStore>,
    started_at: Instant,
    micros: Arc<AtomicU64>,
    opened: AtomicU64,
}

impl Machine {
    fn new(directories: u64) -> Machine {
        Machine {
            worlds: (0..directories).map(|seed| SimWorld::new(7 + seed)).collect(),
            store: Arc::new(SimStore::new(3)),
            started_at: Instant::now(),
            micros: Arc::default(),
            opened: AtomicU64::new(1),
        }
    }

    fn options() -> Options {
        Options::new("sim://0", "/sim/0")
            .block_bytes(8 << 10)
            .writes_in_flight(2)
            .segment_bytes(64 << 10)
            .local_bytes(512 << 10)
            .value_bytes_max(32 << 10)
            .append_wait_max(Duration::ZERO)
    }

    fn open(&self) -> Changelog {
        self.open_with(Machine::options())
    }

    fn open_with(&self, mut options: Options) -> Changelog {
        for directory in 1..self.worlds.len() {
            options = options.add_directory(format!("/sim/{directory}"));
        }
        let (started_at, micros) = (self.started_at, Arc::clone(&self.micros));
        let mut random = SimRng::new(self.opened.fetch_add(1, Ordering::Relaxed));
        let directory =
            |world: &SimWorld| (world.files(), Box::new(world.disk(2, Durability::Power)) as Box<_>);
        let seams = Seams {
            directories: self.worlds.iter().map(directory).collect(),
            stores: vec![self.store.clone()],
            clock: Arc::new(move || {
                started_at + Duration::from_micros(micros.fetch_add(10, Ordering::Relaxed))
            }),
            random: Box::new(move || random.next_u64()),
        };
        Changelog::open_simulated(options, seams).unwrap()
    }

    /// Lets so many seconds pass.
    fn pass(&self, changelog: &Changelog, seconds: u64) {
        for _ in 0..seconds * 20 {
            self.micros.fetch_add(50_000, Ordering::Relaxed);
            changelog.step();
        }
    }

    /// The power goes, and comes back.
    fn crash<T>(&self, process: T) {
        self.store.crash();
        for (seed, world) in self.worlds.iter().enumerate() {
            world.power_cut(seed as u64);
        }
        drop(process);
        self.store.settle();
        self.store.restart();
    }

    fn objects(&self) -> Vec<String> {
        self.store.objects().into_keys().collect()
    }

    fn persist(&self, changelog: &Changelog, writer: &mut ChangelogWriter, from: u64) -> ChangelogHandle {
        self.try_persist(changelog, writer, from).unwrap()
    }

    fn try_persist(
        &self,
        changelog: &Changelog,
        writer: &mut ChangelogWriter,
        from: u64,
    ) -> Result<ChangelogHandle, PersistError> {
        let mut future = writer.persist_durably(SequenceNumber(from));
        for _ in 0..10_000 {
            changelog.step();
            future = match future.wait_timeout(Duration::ZERO) {
                Ok(outcome) => return outcome,
                Err(future) => future,
            };
        }
        panic!("never answered");
    }

    fn read(&self, handle: &ChangelogHandle) -> Vec<Vec<u8>> {
        let handles = std::slice::from_ref(handle);
        let reader =
            ChangelogReader::open_simulated(handles, KeyGroupRange::ALL, vec![self.store.clone()]).unwrap();
        reader.map(|change| change.unwrap().value.to_vec()).collect()
    }
}

fn writer(changelog: &Changelog, name: &str) -> ChangelogWriter {
    changelog.create_writer(name, KeyGroupRange::ALL).unwrap()
}

fn append(writer: &mut ChangelogWriter, values: &[&[u8]]) {
    for value in values {
        writer.append(KeyGroup(1), value).unwrap();
    }
}

fn truncate_all(writer: &ChangelogWriter) {
    writer.truncate(writer.next_sequence_number()).unwrap();
}

#[test]
fn a_registered_checkpoint_is_restored_after_its_logs_are_truncated_and_gone() {
    let machine = Machine::new(1);
    let changelog = machine.open();
    let mut writer = writer(&changelog, "log");
    append(&mut writer, &[b"one", b"two"]);
    let first = machine.persist(&changelog, &mut writer, 0);
    append(&mut writer, &[b"three"]);
    let second = machine.persist(&changelog, &mut writer, 0);
    // Asked for before, and not carried out yet: the holder comes first.
    truncate_all(&writer);
    changelog.register("chk-2", std::slice::from_ref(&second)).unwrap();
    changelog.register("chk-2", &[first.clone(), second.clone()]).unwrap();
    writer.truncate_and_close();
    machine.pass(&changelog, 30);
    assert_eq!(changelog.holders(), ["chk-2"]);
    assert_eq!(machine.objects().len(), 2);
    assert_eq!(machine.read(&second), [&b"one"[..], b"two", b"three"]);

    machine.crash(changelog);
    let changelog = machine.open();
    assert!(changelog.recovered().is_empty(), "the log was forgotten");
    machine.pass(&changelog, 30);
    assert_eq!(changelog.holders(), ["chk-2"]);
    assert_eq!(machine.read(&second), [&b"one"[..], b"two", b"three"]);
    // What only a holder needs can be taken by another one.
    changelog.register("savepoint", std::slice::from_ref(&first)).unwrap();
    changelog.release("chk-2").unwrap();
    machine.pass(&changelog, 30);
    assert_eq!(machine.objects().len(), 1);
    assert_eq!(machine.read(&first), [&b"one"[..], b"two"]);

    // Released, and not deleted yet.
    changelog.release("savepoint").unwrap();
    machine.store.set_chances(Operation::Delete, Chances { before: 1.0, ..Chances::default() });
    machine.crash(changelog);
    machine.store.heal();
    let changelog = machine.open();
    assert_eq!(changelog.holders(), [""; 0]);
    machine.pass(&changelog, 30);
    assert_eq!(machine.objects(), [""; 0]);
    changelog.release("chk-2").unwrap();
}

#[test]
fn the_last_of_logs_and_holders_that_lets_go_has_the_object_deleted_once() {
    let machine = Machine::new(1);
    let changelog = machine.open();
    let (mut a, mut b) = (writer(&changelog, "a"), writer(&changelog, "b"));
    append(&mut a, &[b"a"]);
    append(&mut b, &[b"b"]);
    let asked = a.persist_durably(ZERO);
    let of_b = machine.persist(&changelog, &mut b, 0);
    let of_a = asked.wait_timeout(Duration::ZERO).expect("they share the object").unwrap();
    assert!(of_a.objects().eq(of_b.objects()));
    for holder in ["chk-1", "chk-2"] {
        changelog.register(holder, &[of_a.clone(), of_b.clone()]).unwrap();
    }
    let _ = machine.store.take_stats();
    changelog.release("chk-1").unwrap();
    truncate_all(&a);
    machine.pass(&changelog, 10);
    changelog.release("chk-2").unwrap();
    machine.pass(&changelog, 10);
    assert_eq!(machine.objects().len(), 1, "a log still needs it");
    changelog.register("chk-3", &[of_b]).unwrap();
    truncate_all(&b);
    machine.pass(&changelog, 10);
    assert_eq!(machine.read(&of_a), [b"a"]);
    assert_eq!(machine.store.stats().calls(Operation::Delete), 0);
    changelog.release("chk-3").unwrap();
    machine.pass(&changelog, 10);
    assert_eq!(machine.objects(), [""; 0]);
    assert_eq!(machine.store.stats().calls(Operation::Delete), 1);
}

#[test]
fn what_is_being_deleted_or_belongs_to_others_is_refused_and_then_nothing_is_taken() {
    let (machine, elsewhere) = (Machine::new(1), Machine::new(1));
    let changelog = machine.open();
    let other = elsewhere.open();
    let mut log = writer(&changelog, "log");
    append(&mut log, &[b"old"]);
    let old = machine.persist(&changelog, &mut log, 0);
    append(&mut log, &[b"new"]);
    let new = machine.persist(&changelog, &mut log, 1);
    let mut foreign = writer(&other, "foreign");
    append(&mut foreign, &[b"foreign"]);
    let foreign = elsewhere.persist(&other, &mut foreign, 0);

    // The deletion was tried, and who knows how it went.
    machine.store.set_chances(Operation::Delete, Chances { after: 1.0, ..Chances::default() });
    log.truncate(SequenceNumber(1)).unwrap();
    machine.pass(&changelog, 1);
    for bad in [&old, &foreign] {
        let (bucket, object) = bad.objects().next().unwrap();
        for refused in [
            changelog.register("chk", &[new.clone(), bad.clone()]),
            changelog.hand_over("chk", &[new.clone(), bad.clone()]),
        ] {
            match refused {
                Err(RegisterError::NotOwned { bucket: of, object: named }) => {
                    assert_eq!((&*of, &*named), (bucket, object));
                }
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(changelog.holders(), [""; 0]);
    }
    for name in [String::new(), "x".repeat(257)] {
        let refused = changelog.register(&name, std::slice::from_ref(&new));
        assert!(matches!(refused, Err(RegisterError::HolderName { len }) if len == name.len()));
    }
    changelog.register(&"x".repeat(256), std::slice::from_ref(&new)).unwrap();
    let forge = |log, change: u64| {
        let mut extents = new.extents().to_vec();
        extents[0].token ^= change;
        ChangelogHandle::new(log, new.name(), new.key_groups(), new.from(), new.to(), extents).unwrap()
    };
    // So many logs of one object are too much for a directory.
    let many: Vec<ChangelogHandle> = (0..(1 << 19) as u128).map(|log| forge(LogId(log), 0)).collect();
    let many = [&many[..], std::slice::from_ref(&new)].concat();
    match changelog.hand_over("many", &many) {
        Err(RegisterError::TooMany { held: 1, more, .. }) => assert_eq!(more, many.len()),
        other => panic!("{other:?}"),
    }
    drop(many);
    // An object that is described otherwise is another one.
    let forged = forge(new.log(), 1);
    assert!(matches!(changelog.register("chk", &[forged]), Err(RegisterError::NotOwned { .. })));
    changelog.register("nothing", &[]).unwrap();
    assert_eq!(changelog.holders().len(), 1, "who has nothing is not remembered");
}

#[test]
fn what_was_handed_over_is_referred_to_while_a_holder_has_it_and_never_deleted_here() {
    let machine = Machine::new(2);
    let changelog = machine.open();
    // On one directory each.
    let (mut a, mut b) = (writer(&changelog, "a"), writer(&changelog, "b"));
    append(&mut a, &[b"a0", b"a1"]);
    append(&mut b, &[b"b0"]);
    let asked = a.persist_durably(ZERO);
    let of_b = machine.persist(&changelog, &mut b, 0);
    let of_a = asked.wait_timeout(Duration::ZERO).expect("they share the object").unwrap();
    let names: Vec<String> = of_a.objects().map(|(_, object)| object.to_owned()).collect();

    match changelog.hand_over("chk-1", std::slice::from_ref(&of_a)) {
        Err(RegisterError::StillNeeded { object, logs, .. }) => {
            assert_eq!((object, logs), (names[0].clone(), vec![b.log()]));
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(changelog.holders(), [""; 0]);
    changelog.hand_over("chk-1", &[of_a.clone(), of_b.clone()]).unwrap();
    let refused = changelog.register("own", std::slice::from_ref(&of_a));
    assert!(matches!(refused, Err(RegisterError::HandedOver { object, .. }) if object == names[0]));

    // The next checkpoint refers to it, and has it too.
    append(&mut a, &[b"a2"]);
    let next = machine.persist(&changelog, &mut a, 0);
    changelog.hand_over("chk-2", std::slice::from_ref(&next)).unwrap();
    machine.crash((changelog, a, b));
    let changelog = machine.open();
    assert_eq!(changelog.holders(), ["chk-1", "chk-2"]);
    changelog.release("chk-1").unwrap();
    let found = |log| changelog.recovered().iter().find(|found| found.log() == log).unwrap();
    let persisted = |log, from| {
        let mut future = found(log).persist_durably(SequenceNumber(from));
        for _ in 0..1000 {
            machine.pass(&changelog, 1);
            future = match future.wait_timeout(Duration::ZERO) {
                Ok(outcome) => return outcome,
                Err(future) => future,
            };
        }
        panic!("never answered");
    };
    assert!(persisted(of_a.log(), 0).unwrap().objects().any(|(_, object)| object == names[0]));
    let gone = |log, outcome| match outcome {
        Err(PersistError::Released { log: of, from, to, object }) => {
            assert_eq!((of, object == names[0]), (log, from < SequenceNumber(2)));
            (from.0, to.0)
        }
        other => panic!("{other:?}"),
    };
    assert_eq!(gone(of_b.log(), persisted(of_b.log(), 0)), (0, 1), "only chk-1 had it for that log");
    // The registry deletes it when the last of its checkpoints goes.
    changelog.release("chk-2").unwrap();
    let _ = machine.store.take_stats();
    assert_eq!(gone(of_a.log(), persisted(of_a.log(), 0)), (0, 3), "all that chk-2 named");
    assert_eq!(gone(of_a.log(), persisted(of_a.log(), 1)), (1, 3));
    assert_eq!(gone(next.log(), persisted(next.log(), 2)), (2, 3));
    for refused in [changelog.hand_over("chk-3", &[of_a]), changelog.register("chk-3", &[next])] {
        assert!(matches!(refused, Err(RegisterError::NotOwned { .. })), "{refused:?}");
    }
    changelog.recovered().iter().for_each(tidelog::RecoveredLog::discard);
    machine.pass(&changelog, 60);
    assert_eq!(machine.store.stats().calls(Operation::Delete), 0);
    assert_eq!(machine.objects().len(), 2);
    changelog.close(Duration::ZERO).unwrap();
    let changelog = machine.open();
    machine.pass(&changelog, 60);
    assert_eq!((machine.objects().len(), changelog.recovered().len()), (2, 0));
    changelog.close(Duration::ZERO).unwrap();
    for world in &machine.worlds {
        let records = Manifest::inspect(&*world.files()).unwrap().records;
        let state = ManifestState::replay(records.iter().map(Vec::as_slice)).unwrap();
        assert!(state.objects().is_empty() && state.holders().is_empty(), "they are forgotten");
    }
}

#[test]
fn what_was_truncated_a_moment_ago_can_still_be_handed_over() {
    let machine = Machine::new(1);
    let changelog = machine.open();
    let mut log = writer(&changelog, "log");
    append(&mut log, &[b"one"]);
    let handle = machine.persist(&changelog, &mut log, 0);
    truncate_all(&log);
    changelog.hand_over("chk-1", std::slice::from_ref(&handle)).unwrap();
    machine.pass(&changelog, 30);
    assert_eq!(machine.read(&handle), [b"one"]);
    // What was refused is let go of again.
    append(&mut log, &[b"two"]);
    let second = machine.persist(&changelog, &mut log, 1);
    let mut other = writer(&changelog, "other");
    append(&mut other, &[b"other"]);
    let asked = other.persist_durably(ZERO);
    append(&mut log, &[b"three"]);
    let third = machine.persist(&changelog, &mut log, 2);
    drop(asked);
    let refused = changelog.hand_over("chk-2", &[second.clone(), third]);
    assert!(matches!(refused, Err(RegisterError::StillNeeded { .. })), "{refused:?}");
    log.truncate(SequenceNumber(2)).unwrap();
    machine.pass(&changelog, 10);
    assert!(matches!(changelog.register("chk-2", &[second]), Err(RegisterError::NotOwned { .. })));
    assert_eq!(machine.objects().len(), 2, "the registry's, and the one that two logs need");
}

#[test]
fn a_log_goes_on_above_what_its_registry_let_go_of() {
    let machine = Machine::new(1);
    let changelog = machine.open();
    let (mut log, mut idle) = (writer(&changelog, "log"), writer(&changelog, "idle"));
    append(&mut log, &[b"old"]);
    append(&mut idle, &[b"idle"]);
    let asked = idle.persist_durably(ZERO);
    let old = machine.persist(&changelog, &mut log, 0);
    drop(asked);
    // Truncations that were asked for before count: nobody else needs the object.
    truncate_all(&idle);
    changelog.hand_over("chk-1", std::slice::from_ref(&old)).unwrap();
    truncate_all(&log);
    changelog.hand_over("chk-1b", &[old]).unwrap();
    for holder in ["chk-1", "chk-1b"] {
        changelog.release(holder).unwrap();
    }
    machine.pass(&changelog, 20);
    for name in machine.objects() {
        machine.store.tamper(&name, None);
    }
    append(&mut log, &[b"new"]);
    let new = machine.persist(&changelog, &mut log, 1);
    assert_eq!(machine.read(&new), [b"new"]);
    changelog.close(Duration::ZERO).unwrap();
}

/// What cannot be read of a recovered log is named for what it is.
#[test]
fn a_recovered_log_says_whether_its_changes_were_truncated_or_released() {
    let machine = Machine::new(1);
    let changelog = machine.open();
    let mut log = writer(&changelog, "log");
    let value = [7; 4000];
    for _ in 0..40 {
        append(&mut log, &[&value]);
        changelog.step();
    }
    let old = machine.persist(&changelog, &mut log, 0);
    changelog.hand_over("chk-1", std::slice::from_ref(&old)).unwrap();
    for _ in 0..20 {
        append(&mut log, &[&value]);
        changelog.step();
    }
    machine.persist(&changelog, &mut log, 40);
    // Other changes take the place of what objects have.
    let mut other = writer(&changelog, "other");
    for number in 0..200 {
        append(&mut other, &[&value]);
        machine.persist(&changelog, &mut other, number);
        truncate_all(&other);
    }
    let id = log.log();
    changelog.close(Duration::ZERO).unwrap();
    drop((log, other));

    let changelog = machine.open();
    let found = |log| changelog.recovered().iter().find(|found| found.log() == log).unwrap();
    let read = || found(id).read(KeyGroupRange::ALL);
    assert_eq!(read().unwrap().map(Result::unwrap).count(), 60);
    changelog.release("chk-1").unwrap();
    match read() {
        Err(error @ ReadError::Released { .. }) => {
            let text = error.to_string();
            let ReadError::Released { log, from, to, object } = error else { unreachable!() };
            assert_eq!((log, from, to), (id, ZERO, SequenceNumber(40)));
            assert!(old.objects().any(|(_, named)| *named == object));
            assert!(text.contains("persist the log from 40") && !text.contains("truncated"), "{text}");
        }
        other => panic!("{other:?}"),
    }
    // What the error says can be done.
    let above = found(id).persist_durably(SequenceNumber(40));
    machine.pass(&changelog, 1);
    let above = above.wait_timeout(Duration::ZERO).expect("in time").unwrap();
    assert_eq!(machine.read(&above).len(), 20);

    found(id).truncate(SequenceNumber(50));
    machine.pass(&changelog, 1);
    match read() {
        Err(ReadError::Truncated { log, from, start }) => {
            assert_eq!((log, from, start), (id, ZERO, SequenceNumber(50)));
        }
        other => panic!("{other:?}"),
    }
    found(id).discard();
    machine.pass(&changelog, 1);
    match read() {
        Err(ReadError::Truncated { start, .. }) => assert_eq!(start, SequenceNumber(60)),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_hold_that_could_not_be_recorded_is_an_error_until_it_is() {
    let machine = Machine::new(1);
    let changelog = machine.open();
    let mut log = writer(&changelog, "log");
    append(&mut log, &[b"one"]);
    let handle = machine.persist(&changelog, &mut log, 0);
    let handles = std::slice::from_ref(&handle);
    machine.worlds[0].set_fault(Fault::FilesError, 1000);
    assert!(matches!(changelog.register("chk", handles), Err(RegisterError::Manifest(_))));
    assert!(matches!(changelog.register("chk", handles), Err(RegisterError::Manifest(_))), "it is not yet");
    machine.worlds[0].clear_faults();
    changelog.register("chk", handles).unwrap();
    truncate_all(&log);
    machine.pass(&changelog, 10);
    machine.crash((changelog, log));
    let changelog = machine.open();
    assert_eq!(changelog.holders(), ["chk"]);
    machine.worlds[0].set_fault(Fault::FilesError, 1000);
    assert!(matches!(changelog.release("chk"), Err(ReleaseError::Manifest(_))));
    assert!(matches!(changelog.release("chk"), Err(ReleaseError::Manifest(_))), "it is not yet");
    machine.pass(&changelog, 30);
    assert_eq!(machine.read(&handle), [b"one"], "what may come back is not deleted");
    machine.worlds[0].clear_faults();
    changelog.release("chk").unwrap();
    machine.pass(&changelog, 30);
    assert_eq!(machine.objects(), [""; 0]);
}

#[test]
fn what_one_directory_alone_has_recorded_keeps_the_object() {
    for hand_over in [false, true] {
        let machine = Machine::new(2);
        let changelog = machine.open();
        // On one directory each.
        let (mut a, mut b) = (writer(&changelog, "a"), writer(&changelog, "b"));
        append(&mut a, &[b"a"]);
        append(&mut b, &[b"b"]);
        let asked = a.persist_durably(ZERO);
        let of_b = machine.persist(&changelog, &mut b, 0);
        let of_a = asked.wait_timeout(Duration::ZERO).expect("they share the object").unwrap();
        let handles = [of_a.clone(), of_b];
        machine.worlds[1].set_capacity_bytes(Some(0));
        let outcome = match hand_over {
            false => changelog.register("chk", &handles),
            true => changelog.hand_over("chk", &handles),
        };
        assert!(matches!(outcome, Err(RegisterError::Manifest(_))), "{outcome:?}");
        machine.crash((changelog, a, b));
        machine.worlds[1].set_capacity_bytes(None);
        let changelog = machine.open();
        assert_eq!(changelog.holders(), ["chk"]);
        changelog.recovered().iter().for_each(tidelog::RecoveredLog::discard);
        machine.pass(&changelog, 30);
        assert_eq!(machine.read(&of_a), [b"a"]);
        changelog.release("chk").unwrap();
        machine.pass(&changelog, 30);
        // What was handed over without an answer may be nobody's.
        assert!(hand_over || machine.objects().is_empty());
    }
}

#[test]
fn a_directory_out_of_service_takes_no_holder_and_forgets_none() {
    let machine = Machine::new(1);
    let changelog = machine.open();
    let mut log = writer(&changelog, "log");
    append(&mut log, &[b"one"]);
    let before = machine.persist(&changelog, &mut log, 0);
    for holder in ["chk-0", "chk-1"] {
        changelog.register(holder, std::slice::from_ref(&before)).unwrap();
    }

    machine.worlds[0].set_capacity_bytes(Some(0));
    assert!(matches!(changelog.release("chk-0"), Err(ReleaseError::Manifest(_))));
    machine.worlds[0].inject(Fault::EngineBreaks, 0);
    append(&mut log, &[b"in flight"]);
    drop(log.sync());
    machine.pass(&changelog, 1);
    machine.worlds[0].set_capacity_bytes(None);
    let mut late = writer(&changelog, "late");
    append(&mut late, &[b"late"]);
    let after = machine.persist(&changelog, &mut late, 0);
    for handle in [&before, &after] {
        let handles = std::slice::from_ref(handle);
        for refused in [changelog.register("chk-2", handles), changelog.hand_over("chk-2", handles)] {
            assert!(matches!(refused, Err(RegisterError::OutOfService { .. })), "{refused:?}");
        }
    }
    for holder in ["chk-0", "chk-1", "chk-1"] {
        assert!(matches!(changelog.release(holder), Err(ReleaseError::OutOfService { .. })), "{holder}");
    }
    assert_eq!(changelog.holders(), [""; 0]);
    log.truncate_and_close();
    machine.pass(&changelog, 30);
    machine.crash((changelog, late));
    machine.worlds[0].clear_faults();
    let changelog = machine.open();
    assert_eq!(changelog.holders(), ["chk-0", "chk-1"]);
    assert_eq!(machine.read(&before), [b"one"]);
    changelog.release("chk-0").unwrap();
    changelog.recovered().iter().for_each(tidelog::RecoveredLog::discard);
    machine.pass(&changelog, 10);
    assert_eq!(machine.read(&before), [b"one"]);
    changelog.release("chk-1").unwrap();
    machine.pass(&changelog, 10);
    assert!(!machine.objects().iter().any(|name| before.objects().any(|(_, object)| object == name)));
}

/// The last value of each gauge without a label but the directory.
#[derive(Clone, Default)]
struct Gauges(Arc<Mutex<BTreeMap<String, f64>>>);

impl Gauges {
    fn get(&self, name: &str) -> f64 {
        self.0.lock().unwrap()[name]
    }
}

struct One(Gauges, String);

impl GaugeFn for One {
    fn increment(&self, _: f64) {}

    fn decrement(&self, _: f64) {}

    fn set(&self, value: f64) {
        self.0.0.lock().unwrap().insert(self.1.clone(), value);
    }
}

impl Recorder for Gauges {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn register_counter(&self, _: &Key, _: &Metadata<'_>) -> Counter {
        Counter::noop()
    }

    fn register_gauge(&self, key: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::from_arc(Arc::new(One(self.clone(), key.name().to_owned())))
    }

    fn register_histogram(&self, _: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::noop()
    }
}

/// Remembers warnings about the quota.
#[derive(Clone, Default)]
struct Warnings(Arc<Mutex<Vec<String>>>);

impl tracing::field::Visit for Warnings {
    fn record_debug(&mut self, field: &tracing::field::Field, value: &dyn std::fmt::Debug) {
        if let Some(last) = self.0.lock().unwrap().last_mut() {
            last.push_str(&format!("{}={value:?} ", field.name()));
        }
    }
}

impl tracing::Subscriber for Warnings {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        *metadata.level() <= tracing::Level::WARN && metadata.target().contains("quota")
    }

    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }

    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}

    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}

    fn event(&self, event: &tracing::Event<'_>) {
        self.0.lock().unwrap().push(String::new());
        event.record(&mut self.clone());
    }

    fn enter(&self, _: &tracing::span::Id) {}

    fn exit(&self, _: &tracing::span::Id) {}
}

#[test]
fn at_the_quota_appends_are_refused_and_persists_go_on_until_truncations_make_room() {
    let (gauges, warnings) = (Gauges::default(), Warnings::default());
    let _recorder = metrics::set_default_local_recorder(&gauges);
    let _subscriber = tracing::subscriber::set_default(warnings.clone());
    let machine = Machine::new(2);
    let max = 40_000;
    let options = || Machine::options().object_bytes_max(max);
    let changelog = machine.open_with(options());
    let (mut small, mut large) = (writer(&changelog, "small"), writer(&changelog, "large"));
    append(&mut small, &[&[1; 2_000]]);
    machine.persist(&changelog, &mut small, 0);
    let mut handle = None;
    for filled in 1..=3 {
        append(&mut large, &[&[filled; 10_000]]);
        handle = Some(machine.persist(&changelog, &mut large, 0));
        machine.pass(&changelog, 1);
        let alarms = gauges.get("tidelog_quota_alarm");
        assert_eq!(alarms, f64::from(u8::from(filled == 3)), "32 kB of 40 kB at the third");
        assert_eq!(gauges.get("tidelog_owned_objects"), f64::from(filled) + 1.0);
    }
    let told = warnings.0.lock().unwrap().clone();
    assert_eq!(told.len(), 1, "{told:?}");
    let large_first = told[0].find("large (").unwrap() < told[0].find("small (").unwrap();
    assert!(large_first && told[0].contains("truncate") && told[0].contains("max=40000"), "{told:?}");
    // What is appended before the limit is reached is persisted after it.
    append(&mut small, &[&[2; 9_000]]);
    append(&mut large, &[&[4; 9_000]]);
    let both = machine.persist(&changelog, &mut small, 0);
    machine.pass(&changelog, 1);
    assert!(gauges.get("tidelog_owned_object_bytes") >= max as f64);
    let refused = AppendError::ObjectQuota { max };
    assert!(refused.is_retryable() && refused.to_string().contains("truncate"));
    for writer in [&mut small, &mut large] {
        assert_eq!(writer.append(KeyGroup(1), b"x"), Err(refused));
        assert_eq!(writer.try_append(KeyGroup(1), b"x"), Err(refused));
        assert_eq!(writer.append_metadata(b"x"), Err(refused));
        assert_eq!(writer.append_with(KeyGroup(1), 1, |_| {}), Err(refused));
    }
    let last = machine.persist(&changelog, &mut large, 0);
    assert_eq!(last.to(), large.next_sequence_number());

    // A holder keeps it over the limit, over a restart as well.
    changelog.register("chk", &[handle.unwrap(), both, last]).unwrap();
    truncate_all(&large);
    machine.pass(&changelog, 10);
    assert_eq!(large.append(KeyGroup(1), b"x"), Err(refused));
    assert_eq!(warnings.0.lock().unwrap().len(), 1, "one for each time that it gets there");
    machine.crash((changelog, small, large));
    let changelog = machine.open_with(options());
    let mut writer = writer(&changelog, "later");
    assert_eq!(writer.append(KeyGroup(1), b"x"), Err(refused));
    changelog.release("chk").unwrap();
    changelog.recovered().iter().for_each(tidelog::RecoveredLog::discard);
    machine.pass(&changelog, 30);
    append(&mut writer, &[b"x"]);
    for name in ["tidelog_owned_object_bytes", "tidelog_owned_objects", "tidelog_quota_alarm"] {
        assert_eq!(gauges.get(name), 0.0, "{name}");
    }
    // What was handed over is not counted.
    append(&mut writer, &[&[5; 10_000]]);
    let handle = machine.persist(&changelog, &mut writer, 0);
    changelog.hand_over("registry", &[handle]).unwrap();
    machine.pass(&changelog, 1);
    assert_eq!(gauges.get("tidelog_owned_objects"), 0.0);
    changelog.close(Duration::ZERO).unwrap();
    assert_eq!(writer.append(KeyGroup(1), b"x"), Err(AppendError::Closed));
}

#[test]
fn the_verbs_block_until_the_uploader_has_answered() {
    let dir = tempfile::tempdir().unwrap();
    let changelog = common::open(dir.path());
    let mut log = writer(&changelog, "log");
    append(&mut log, &[b"one"]);
    let handle = log.persist_durably(ZERO).wait().unwrap();
    std::thread::scope(|scope| {
        for holder in 0..4 {
            let (changelog, handle) = (&changelog, &handle);
            scope.spawn(move || {
                for round in 0..20 {
                    let holder = format!("{holder}-{round}");
                    changelog.register(&holder, std::slice::from_ref(handle)).unwrap();
                    assert!(changelog.holders().contains(&holder));
                    if round > 0 {
                        changelog.release(&holder).unwrap();
                        assert!(!changelog.holders().contains(&holder));
                    }
                }
            });
        }
    });
    drop((log, changelog));
    let changelog = common::open(dir.path());
    changelog.recovered().iter().for_each(tidelog::RecoveredLog::discard);
    assert_eq!(changelog.holders(), ["0-0", "1-0", "2-0", "3-0"]);
    assert_eq!(common::read(std::slice::from_ref(&handle), KeyGroupRange::ALL).len(), 1);
    for holder in changelog.holders() {
        assert_eq!(common::objects(dir.path()).len(), 1);
        changelog.release(&holder).unwrap();
    }
    common::eventually("the object is deleted", || common::objects(dir.path()).is_empty());
}
