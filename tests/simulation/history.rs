//! One history: what is done to a changelog, step by step, with the model beside it. What is done when is decided by its
//! callers.

macro_rules! say {
    ($history:expr, $($arg:tt)*) => {
        if $history.verbose {
            eprintln!("{:>9} {}", $history.machine.now(), format_args!($($arg)*));
        }
    };
}

mod end;
mod found;
mod holds;

use std::collections::BTreeSet;
use std::time::Duration;

use bytes::Bytes;
use tidelog::{
    AppendError, Changelog, ChangelogWriter, CloseError, CreateError, KeyGroup, KeyGroupRange, OpenError,
    PersistError, PersistFuture, RecoveredLog, SequenceNumber, SyncError, SyncFuture,
};
use tidelog_io::directory::{MANIFEST_NAME, RESERVE_NAME};
use tidelog_io::segment::segment_name;
use tidelog_io::sim::{Crash, SimRng};
use tidelog_upload::sim::SimStore;

use crate::machine::Machine;
use crate::model::{Appended, Log, Model, random_range};
use crate::rot;
use found::{Found, Reading};
use holds::Holds;

/// Tells that blocks were let go of.
const LOST: &str = "tidelog_local_retention_lost_total";
/// Of a thousand opens, before how many a block that nobody needs rots.
const ROT_PER_MILLE: u16 = 150;
/// Longer than the changelog waits before it tries again.
const RETRY_MICROS: u64 = 2_500_000;
const OPEN_ATTEMPTS_MAX: usize = 20;

pub struct Live {
    pub writer: ChangelogWriter,
    pub log: usize,
}

enum Wait {
    Sync { future: SyncFuture, log: usize, to: u64 },
    Durable { future: SyncFuture, log: usize, to: u64 },
    Persist { future: PersistFuture, log: usize, from: u64, to: u64 },
}

/// The history is over before its end, for a reason that is no mistake.
#[derive(Debug)]
pub struct Over;

pub struct History {
    pub machine: Machine,
    pub model: Model,
    pub rng: SimRng,
    pub live: Vec<Live>,
    pub found: Vec<Found>,
    pub verbose: bool,
    /// Writes may be lost without a word.
    pub silent_faults: bool,
    /// The kind of the crash that is scheduled.
    pub planned_crash: Crash,
    changelog: Option<Changelog>,
    waits: Vec<Wait>,
    readings: Vec<Reading>,
    /// Objects that a changelog without a local disk left behind: only their handles know them.
    orphans: BTreeSet<(String, String)>,
    orphan_uploads: BTreeSet<String>,
    empty_strays: bool,
    /// Until then the disks being full may show.
    full_until: u64,
    /// Room for manifests was kept when the disks became full, after so many faults: all the same they can be opened.
    reserved_at: Option<u64>,
    held: bool,
    sick: bool,
    /// A block that nobody needs has rotted.
    rotten: bool,
    holds: Holds,
    logs_made: u64,
    /// Of the changelog that is open.
    writers_made: usize,
    /// From now on directories stay as they are.
    ends: bool,
    trace: u64,
}

impl History {
    pub fn new(machine: Machine, rng: SimRng, verbose: bool) -> History {
        History {
            machine,
            model: Model::default(),
            rng,
            live: Vec::new(),
            found: Vec::new(),
            verbose,
            silent_faults: false,
            planned_crash: Crash::Process,
            changelog: None,
            waits: Vec::new(),
            readings: Vec::new(),
            orphans: BTreeSet::new(),
            orphan_uploads: BTreeSet::new(),
            empty_strays: false,
            full_until: 0,
            reserved_at: None,
            held: false,
            sick: false,
            rotten: false,
            holds: Holds::default(),
            logs_made: 0,
            writers_made: 0,
            ends: false,
            trace: 0,
        }
    }

    /// A number that differs, most probably, if anything went otherwise.
    pub fn trace(&self) -> u64 {
        self.trace
    }

    fn note(&mut self, word: u64) {
        self.trace = (self.trace ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
    }

    /// Opens, again and again while injected faults keep it from opening.
    pub fn open(&mut self) -> Result<(), Over> {
        for attempt in 0..OPEN_ATTEMPTS_MAX {
            self.rot();
            let faults = self.machine.disk_faults();
            match self.machine.open() {
                // It dies before it could be used.
                Ok(changelog) if self.machine.is_down() => {
                    self.machine.crash(self.planned_crash, changelog);
                }
                Ok(changelog) => {
                    if self.may_be_full() && self.is_reserved() {
                        self.machine.readings.count("opened on a full disk");
                    }
                    say!(self, "opened, {} logs", changelog.recovered().len());
                    self.sick = false;
                    self.model.lenient = self.silent_faults;
                    self.writers_made = 0;
                    self.model.recover(changelog.recovered(), &self.machine.present, self.empty_strays);
                    let index = |log: &RecoveredLog| self.model.find(log.log());
                    let found =
                        changelog.recovered().iter().filter_map(|log| Some((log.clone(), index(log)?)));
                    self.found =
                        found.map(|(recovered, log)| Found { recovered, log, discarded: false }).collect();
                    self.note(self.found.len() as u64);
                    self.changelog = Some(changelog);
                    for index in 0..self.model.logs.len() {
                        self.check_objects_exist(index);
                    }
                    self.recover_holders();
                    self.check_holders();
                    let explained = self.rotten || self.silent_faults || self.machine.reads_failed();
                    assert!(
                        explained || !self.machine.readings.has(LOST),
                        "blocks were let go of for no reason"
                    );
                    return Ok(());
                }
                Err(error) => {
                    say!(self, "open failed: {error}");
                    if self.silent_faults {
                        return Err(Over);
                    }
                    // Without a segment there has to be room for one.
                    let full = self.may_be_full()
                        && (!self.is_reserved() || matches!(error, OpenError::NoRoom { .. }));
                    let explained = self.machine.is_down() || self.machine.disk_faults() > faults || full;
                    assert!(explained, "open failed for no reason: {error}");
                    self.machine.crash(self.planned_crash, ());
                    if attempt >= 2 {
                        self.heal();
                    }
                }
            }
        }
        panic!("the changelog cannot be opened on a healthy machine");
    }

    /// Lets a block rot that is only kept for local restores: nobody may notice.
    fn rot(&mut self) {
        if self.silent_faults || !self.rng.chance(ROT_PER_MILLE) {
            return;
        }
        for world in &self.machine.present {
            if let Some(what) = rot::flip(&self.machine.worlds[*world], &mut self.rng) {
                self.rotten = true;
                say!(self, "rot: {what}");
            }
        }
    }

    /// Every object that a handle of the log still needs is there.
    fn check_objects_exist(&self, index: usize) {
        let log = &self.model.logs[index];
        let objects = self.machine.objects();
        for handle in &log.handles {
            if self.silent_faults {
                // What overwrites the manifest's end makes a proven object an unfinished upload.
                continue;
            }
            for extent in handle.extents().iter().filter(|extent| extent.end.0 > log.truncated) {
                for piece in &extent.pieces {
                    let size = objects.get(&(piece.bucket.to_string(), piece.object.clone()));
                    assert!(
                        size.is_some_and(|size| piece.offset + piece.bytes <= *size),
                        "{piece:?} of {size:?} bytes is needed for {}..{} of log {} (truncated {})",
                        extent.first,
                        extent.end,
                        log.id,
                        log.truncated
                    );
                }
            }
        }
    }

    /// Lets a little time pass and everybody work.
    pub fn step(&mut self) -> Result<(), Over> {
        let micros = self.rng.below(4_000);
        self.machine.pass(Duration::from_micros(micros));
        self.step_now()
    }

    fn step_now(&mut self) -> Result<(), Over> {
        let Some(changelog) = &self.changelog else { return Ok(()) };
        changelog.step();
        self.look();
        self.poll();
        if self.machine.is_down() { self.crash(self.planned_crash) } else { Ok(()) }
    }

    /// What can be seen of a machine that is up.
    fn look(&mut self) {
        if self.machine.is_down() {
            return;
        }
        if !self.sick && self.machine.is_sick() {
            say!(self, "the local directory is sick");
            assert!(self.machine.disk_faults() > 0 || self.may_be_full(), "sick for no reason");
            self.sick = true;
            self.holds.ever_sick = true;
        }
        self.check_budget();
    }

    fn check_budget(&self) {
        let max = self.machine.shape.segments_max() as u32;
        for world in &self.machine.worlds {
            for segment in max + 1..max + 3 {
                assert!(world.contents(&segment_name(segment)).is_none(), "more than {max} segment files");
            }
        }
    }

    /// The machine dies and comes up again.
    pub fn crash(&mut self, crash: Crash) -> Result<(), Over> {
        say!(self, "crash: {crash:?}");
        self.end_session();
        self.waits.clear();
        let process = (
            self.changelog.take(),
            std::mem::take(&mut self.live),
            std::mem::take(&mut self.found),
            std::mem::take(&mut self.readings),
        );
        for log in &mut self.model.logs {
            log.control = None;
        }
        self.machine.crash(crash, process);
        self.change_directories();
        self.open()
    }

    fn change_directories(&mut self) {
        if self.ends {
            return;
        }
        if let Some(what) = self.machine.change_directories(&mut self.rng) {
            say!(self, "{what}");
            // Whoever is there cannot know whether those that are not need it.
            self.orphans.extend(self.machine.objects().into_keys());
            self.orphan_uploads.extend(self.machine.open_uploads());
        }
    }

    fn end_session(&mut self) {
        self.holds.ever_sick |= self.sick;
        if self.sick {
            self.machine.stores.iter().for_each(SimStore::settle);
            self.orphans.extend(self.machine.objects().into_keys());
            self.orphan_uploads.extend(self.machine.open_uploads());
        }
    }

    /// Closes the changelog with the writers still there or not, and opens it again.
    pub fn close(&mut self, drop_writers: bool) -> Result<(), Over> {
        say!(self, "close, dropping the writers before: {drop_writers}");
        self.finish_readings();
        // Closing waits for the writes in flight.
        self.machine.worlds.iter().for_each(|world| world.hold(false));
        if drop_writers {
            while !self.live.is_empty() {
                self.close_writer(0);
            }
        }
        let open_logs: Vec<usize> = self.live.iter().map(|live| live.log).collect();
        let Some(changelog) = self.changelog.take() else { return Ok(()) };
        let closed = changelog.close(Duration::ZERO);
        self.poll();
        // Of a dead machine every disk fails; one whose engine broke may have failed before.
        self.sick |= self.machine.is_sick() && (!self.machine.is_down() || self.machine.engine_broke());
        self.end_session();
        match closed {
            Ok(()) => {
                for log in open_logs {
                    let log = &mut self.model.logs[log];
                    log.synced = log.next();
                }
            }
            Err(error) => {
                say!(self, "close failed: {error}");
                let faults = self.machine.disk_faults() + self.machine.store_faults();
                let local = matches!(error, CloseError::Local(_));
                let slow = self.machine.slow.is_on();
                let explained =
                    faults > 0 || slow || self.may_be_full() || self.held || self.machine.is_down();
                assert!(
                    explained && (!local || self.machine.is_sick()),
                    "close failed for no reason: {error}"
                );
            }
        }
        self.crash(self.planned_crash)
    }

    pub fn heal(&mut self) {
        say!(self, "heal");
        self.machine.heal();
        self.full_until = self.full_until.min(self.machine.now() + RETRY_MICROS);
        self.held = false;
    }

    pub fn limit_capacity(&mut self, bytes: u64) {
        say!(self, "at most {bytes} bytes on the disks");
        self.machine.worlds.iter().for_each(|world| world.set_capacity_bytes(Some(bytes)));
        self.full_until = u64::MAX;
        self.reserved_at = None;
    }

    /// So many bytes more fit on the disks, at most.
    pub fn fill_up(&mut self, bytes: u64) {
        say!(self, "at most {bytes} bytes more on the disks");
        let mut reserved = true;
        for world in &self.machine.worlds {
            let len = |name: &str| world.contents(name).map_or(0, |contents| contents.len() as u64);
            let names = [MANIFEST_NAME, RESERVE_NAME].map(String::from);
            let segments = 1..=self.machine.shape.segments_max() as u32;
            let used: u64 = segments.map(segment_name).chain(names).map(|name| len(&name)).sum();
            world.set_capacity_bytes(Some(used + bytes));
            reserved &= len(RESERVE_NAME) >= 2 * len(MANIFEST_NAME);
        }
        self.full_until = u64::MAX;
        self.reserved_at = reserved.then(|| self.machine.disk_faults());
    }

    fn is_reserved(&self) -> bool {
        self.reserved_at == Some(self.machine.disk_faults())
    }

    /// No write comes to an end until the machine is healed.
    pub fn hold(&mut self, world: usize) {
        say!(self, "the disk hangs");
        self.machine.worlds[world].hold(true);
        self.held = true;
    }

    fn may_be_full(&self) -> bool {
        self.machine.now() <= self.full_until
    }

    fn poll(&mut self) {
        for wait in std::mem::take(&mut self.waits) {
            match wait {
                Wait::Sync { future, log, to } => match future.wait_timeout(Duration::ZERO) {
                    Ok(outcome) => self.synced(log, to, true, outcome),
                    Err(future) => self.waits.push(Wait::Sync { future, log, to }),
                },
                Wait::Durable { future, log, to } => match future.wait_timeout(Duration::ZERO) {
                    Ok(outcome) => self.synced(log, to, false, outcome),
                    Err(future) => self.waits.push(Wait::Durable { future, log, to }),
                },
                Wait::Persist { future, log, from, to } => match future.wait_timeout(Duration::ZERO) {
                    Ok(outcome) => self.persisted(log, from, to, outcome),
                    Err(future) => self.waits.push(Wait::Persist { future, log, from, to }),
                },
            }
        }
    }

    fn synced(&mut self, log: usize, to: u64, by_sync: bool, outcome: Result<SequenceNumber, SyncError>) {
        self.note(to << 1 | u64::from(outcome.is_ok()));
        // A dead process tells nobody anything.
        if self.machine.is_down() {
            return;
        }
        say!(self, "log {log}: durable to {to} (sync: {by_sync}): {outcome:?}");
        match outcome {
            Ok(number) => {
                assert!(number.0 >= to, "synced to {number} instead of {to}");
                let open = self.live.iter().any(|live| live.log == log);
                let log = &mut self.model.logs[log];
                if by_sync {
                    log.synced = log.synced.max(to);
                } else if open {
                    log.durable = log.durable.max(to);
                }
            }
            Err(SyncError::LocalTierFailed { .. }) => {
                assert!(self.machine.is_sick(), "sync failed on a healthy device");
            }
            Err(error) => assert!(self.changelog.is_none(), "sync failed for no reason: {error}"),
        }
    }

    fn persisted(
        &mut self,
        index: usize,
        from: u64,
        to: u64,
        outcome: Result<tidelog::ChangelogHandle, PersistError>,
    ) {
        self.note(to << 2 | u64::from(outcome.is_ok()));
        if self.machine.is_down() {
            return;
        }
        let full = self.may_be_full();
        let log = &mut self.model.logs[index];
        let handle = match outcome {
            Ok(handle) => handle,
            Err(error) => {
                say!(self, "log {index}: persist {from}..{to} failed: {error}");
                let disk = self.machine.disk_faults() > 0 || full;
                let explained = match &error {
                    PersistError::OutOfRange { .. } => from < log.truncated && !self.found.is_empty(),
                    PersistError::Manifest { .. } => disk,
                    PersistError::ReadBack { .. } => self.silent_faults || self.machine.reads_failed(),
                    PersistError::Lost { log: of, from } => {
                        *of == log.id && from.0 < to && from.0 >= log.synced && self.machine.engine_broke()
                    }
                    PersistError::Released { log: of, from: gone, to: end, object } => {
                        let inside = from <= gone.0 && gone < end && end.0 <= to;
                        *of == log.id && inside && self.holds.is_let_go(*of, object)
                    }
                    PersistError::Closed => self.changelog.is_none(),
                    _ => false,
                };
                assert!(explained, "persist {from}..{to} of log {} failed for no reason: {error}", log.id);
                return;
            }
        };
        assert_eq!(handle.log(), log.id);
        assert_eq!((handle.from().0, handle.to().0), (from, to));
        assert_eq!((handle.name(), handle.key_groups()), (log.name.as_str(), log.key_groups));
        if !self.machine.is_sick() {
            log.persisted = log.persisted.max(to);
        }
        let extents = handle.extents().len();
        say!(self, "log {index}: persisted {from}..{to} in {extents} objects");
        self.note(extents as u64);
        assert!(!self.holds.is_gone(&handle), "a handle of log {index} names what the registry has deleted");
        self.model.check_handle(index, &handle, &self.machine.contents(), &mut self.rng);
        self.model.logs[index].handles.push(handle);
    }

    pub fn create_writer(&mut self) {
        let Some(changelog) = &self.changelog else { return };
        let name = format!("log-{}", self.logs_made);
        self.logs_made += 1;
        let key_groups = random_range(&mut self.rng, KeyGroupRange::new(0, 40).expect("a range"));
        let faults = self.machine.disk_faults();
        // They are dealt out in turn.
        let world = self.machine.present[self.writers_made % self.machine.present.len()];
        self.writers_made += 1;
        match changelog.create_writer(name.clone(), key_groups) {
            Ok(writer) => {
                let log = self.model.add(Log {
                    id: writer.log(),
                    name,
                    key_groups,
                    world,
                    changes: Vec::new(),
                    synced: 0,
                    persisted: 0,
                    durable: 0,
                    truncated: 0,
                    confirmed: 0,
                    handles: Vec::new(),
                    control: Some(writer.control()),
                });
                say!(self, "log {log}: created as {} for {key_groups:?}", writer.log());
                self.live.push(Live { writer, log });
            }
            Err(error) => {
                say!(self, "create failed: {error}");
                self.empty_strays = true;
                let struck = self.machine.disk_faults() > faults || self.machine.is_down();
                assert!(
                    matches!(error, CreateError::Manifest(_)) && (struck || self.may_be_full()),
                    "create failed for no reason: {error}"
                );
            }
        }
    }

    /// Appends one change of `len` bytes in some way. Whether there was room.
    pub fn append(&mut self, live: usize, len: usize, way: Way) -> bool {
        let value = random_value(&mut self.rng, len);
        let Live { writer, log } = &mut self.live[live];
        let log = *log;
        let range = writer.key_groups();
        let key_group = range.first().0 + self.rng.below(range.len() as u64) as u16;
        let number = writer.next_sequence_number();
        let group = KeyGroup(key_group);
        let appended = match way {
            Way::Append => writer.append(group, &value),
            Way::Try => writer.try_append(group, &value),
            Way::With => writer.append_with(group, len, |slice| slice.copy_from_slice(&value)),
            Way::Metadata => writer.append_metadata(&value),
            Way::OtherThread => self.append_elsewhere(live, group, &value),
        };
        self.note(len as u64);
        match appended {
            Ok(appended) => {
                assert_eq!(appended, number);
                let key_group = (way != Way::Metadata).then_some(key_group);
                self.model.logs[log].changes.push(Appended { key_group, value });
                assert_eq!(self.live[live].writer.next_sequence_number().0, number.0 + 1);
                true
            }
            Err(error) => {
                assert!(matches!(error, AppendError::Full { .. }), "append of {len} bytes: {error}");
                assert_eq!(self.live[live].writer.next_sequence_number(), number);
                false
            }
        }
    }

    /// The writer moves to another thread and back.
    fn append_elsewhere(
        &mut self,
        live: usize,
        group: KeyGroup,
        value: &Bytes,
    ) -> Result<SequenceNumber, AppendError> {
        let Live { mut writer, log } = self.live.swap_remove(live);
        let value = value.clone();
        let thread = std::thread::spawn(move || {
            let appended = writer.append(group, &value);
            (writer, appended)
        });
        let (writer, appended) = thread.join().expect("an append does not panic");
        self.live.push(Live { writer, log });
        let last = self.live.len() - 1;
        self.live.swap(live, last);
        appended
    }

    pub fn sync(&mut self, live: usize) {
        let Live { writer, log } = &self.live[live];
        let (future, log, to) = (writer.sync(), *log, writer.next_sequence_number().0);
        self.waits.push(Wait::Sync { future, log, to });
    }

    pub fn when_durable(&mut self, live: usize) {
        let Live { writer, log } = &self.live[live];
        let to = self.rng.below(writer.next_sequence_number().0 + 1);
        let (future, log) = (writer.when_durable(SequenceNumber(to)), *log);
        self.waits.push(Wait::Durable { future, log, to });
    }

    /// Persists from a number that is still held: mostly the last confirmed one.
    pub fn persist(&mut self, live: usize) {
        let Live { writer, log } = &mut self.live[live];
        let index = *log;
        let log = &self.model.logs[index];
        let to = writer.next_sequence_number().0;
        let from = random_from(&mut self.rng, log, to);
        let future = writer.persist_durably(SequenceNumber(from));
        say!(self, "log {index}: persist {from}..{to}");
        self.waits.push(Wait::Persist { future, log: index, from, to });
    }

    pub fn confirm(&mut self, index: usize) {
        let Some(control) = self.model.logs[index].control.clone() else { return };
        let log = &mut self.model.logs[index];
        let to = self.rng.below(log.next() + 1);
        control.confirm(SequenceNumber(to)).expect("it was appended");
        log.confirmed = log.confirmed.max(to);
    }

    pub fn reset(&mut self, index: usize) {
        let Some(control) = self.model.logs[index].control.clone() else { return };
        let to = self.rng.below(self.model.logs[index].next() + 1);
        let from = self.rng.below(to + 1);
        control.reset(SequenceNumber(from), SequenceNumber(to)).expect("it was appended");
    }

    pub fn truncate(&mut self, index: usize, to: u64) {
        let Some(control) = self.model.logs[index].control.clone() else { return };
        say!(self, "log {index}: truncate to {to}");
        control.truncate(SequenceNumber(to)).expect("it was appended");
        let log = &mut self.model.logs[index];
        log.truncated = log.truncated.max(to);
    }

    pub fn close_writer(&mut self, live: usize) {
        let Live { writer, log } = self.live.swap_remove(live);
        say!(self, "log {log}: close at {}", writer.next_sequence_number());
        self.model.logs[log].durable = 0;
        writer.close();
    }

    pub fn truncate_and_close(&mut self, live: usize) {
        let Live { writer, log } = self.live.swap_remove(live);
        say!(self, "log {log}: truncate and close at {}", writer.next_sequence_number());
        self.model.logs[log].truncated = writer.next_sequence_number().0;
        self.model.logs[log].durable = 0;
        writer.truncate_and_close();
    }

    pub fn check_some_handles(&mut self, index: usize) {
        self.check_holders();
        self.model.check_handles(index, &self.machine.contents(), &mut self.rng);
    }
}

/// How a change is appended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    Append,
    Try,
    With,
    Metadata,
    OtherThread,
}

fn random_from(rng: &mut SimRng, log: &Log, to: u64) -> u64 {
    let from = match rng.below(4) {
        0 => log.truncated,
        1 => log.truncated + rng.below(to.saturating_sub(log.truncated) + 1),
        _ => log.confirmed,
    };
    from.clamp(log.truncated.min(to), to)
}

fn random_value(rng: &mut SimRng, len: usize) -> Bytes {
    // Compressible, and different everywhere.
    let mut value = vec![0; len];
    let period = 1 + rng.below(64) as usize;
    for chunk in value.chunks_mut(8 * period) {
        let word = rng.next_u64().to_le_bytes();
        let head = chunk.len().min(8);
        chunk[..head].copy_from_slice(&word[..head]);
    }
    Bytes::from(value)
}
