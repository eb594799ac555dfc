//! Random histories: which operations and faults a history has, and in which order, all by its seed.

use std::collections::BTreeSet;
use std::time::Duration;

use tidelog_io::sim::{Crash, Fault, SimRng};
use tidelog_upload::Operation;
use tidelog_upload::sim::Chances;

use crate::history::{History, Over, Way};
use crate::machine::{Machine, Meter, Plant, Shape};

/// What a history went through.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Coverage {
    pub seen: BTreeSet<String>,
    pub trace: u64,
}

/// What is done, each with a weight of its own in each history: some never, so that others are seen alone.
const ACTIONS: [(Action, u64); 26] = [
    (Action::Create, 6),
    (Action::Small, 40),
    (Action::Burst, 20),
    (Action::Large, 10),
    (Action::Metadata, 6),
    (Action::OtherThread, 4),
    (Action::Sync, 12),
    (Action::WhenDurable, 4),
    (Action::Persist, 16),
    (Action::Confirm, 6),
    (Action::Reset, 3),
    (Action::Truncate, 8),
    (Action::Close, 3),
    (Action::TruncateAndClose, 2),
    (Action::PersistFound, 4),
    (Action::TruncateFound, 3),
    (Action::DiscardFound, 4),
    (Action::ReadFound, 5),
    (Action::Restore, 6),
    (Action::CheckHandles, 3),
    (Action::Register, 8),
    (Action::HandOver, 3),
    (Action::Release, 5),
    (Action::Faults, 8),
    (Action::Crash, 3),
    (Action::Steps, 50),
];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Action {
    Create,
    Small,
    Burst,
    Large,
    Metadata,
    OtherThread,
    Sync,
    WhenDurable,
    Persist,
    Confirm,
    Reset,
    Truncate,
    Close,
    TruncateAndClose,
    PersistFound,
    TruncateFound,
    DiscardFound,
    ReadFound,
    Restore,
    CheckHandles,
    Register,
    HandOver,
    Release,
    Faults,
    Crash,
    Steps,
}

/// The requests that buckets may fail at any time.
const CHANGES: [Operation; 10] = [
    Operation::Put,
    Operation::Create,
    Operation::PutPart,
    Operation::ListParts,
    Operation::Complete,
    Operation::Abort,
    Operation::ListUploads,
    Operation::Head,
    Operation::Delete,
    Operation::List,
];

const WRITERS_MAX: u64 = 6;

/// Runs one history from its seed.
pub fn run(seed: u64, plant: Option<Plant>, verbose: bool) -> Coverage {
    let mut rng = SimRng::new(seed ^ 0x7469_6465_6c6f);
    let shape = Shape::random(&mut rng);
    let mut machine = Machine::new(rng.next_u64(), shape, plant);
    machine.verbose = verbose;
    let readings = machine.readings.clone();
    let meter = Meter(readings.clone());
    let _guard = metrics::set_default_local_recorder(&meter);
    if verbose {
        eprintln!("{:?}", machine.shape);
    }
    let mut history = History::new(machine, rng, verbose);
    history.silent_faults = history.rng.chance(150);
    let _ = play(&mut history);
    let mut seen = BTreeSet::new();
    for world in &history.machine.worlds {
        let stats = world.stats();
        seen.extend(stats.faults.keys().map(|fault| format!("disk fault {fault:?}")));
    }
    for store in &history.machine.stores {
        seen.extend(store.stats().faults.keys().map(|operation| format!("bucket fault {operation}")));
    }
    // Counters without labels are told of at 0.
    let counters = readings.counters.lock().unwrap();
    seen.extend(counters.iter().filter(|(_, count)| **count > 0).map(|(what, _)| what.clone()));
    seen.extend(history.outcomes().iter().cloned());
    Coverage { seen, trace: history.trace() }
}

fn play(history: &mut History) -> Result<(), Over> {
    let weights: Vec<(Action, u64)> = ACTIONS
        .iter()
        .map(|&(action, weight)| (action, if history.rng.chance(200) { 0 } else { weight }))
        .collect();
    let faulty = Faulty::random(&mut history.rng);
    let total: u64 = weights.iter().map(|(_, weight)| weight).sum();
    history.machine.heal();
    history.open()?;
    if history.rng.chance(500) {
        faulty.change(history);
    }
    history.create_writer();
    let actions = 40 + history.rng.below(260);
    for _ in 0..actions {
        let mut drawn = history.rng.below(total.max(1));
        let drawn = weights.iter().find(|(_, weight)| {
            let here = drawn < *weight;
            drawn = drawn.saturating_sub(*weight);
            here
        });
        let Some(&(action, _)) = drawn else { break };
        act(history, action, &faulty)?;
        if history.machine.is_down() {
            history.crash(history.planned_crash)?;
        }
    }
    history.finish()
}

fn act(history: &mut History, action: Action, faulty: &Faulty) -> Result<(), Over> {
    let live = history.rng.below(history.live.len() as u64) as usize;
    let found = history.rng.below(history.found.len() as u64) as usize;
    let log = history.rng.below(history.model.logs.len() as u64) as usize;
    let (any_live, any_found) = (!history.live.is_empty(), !history.found.is_empty());
    let any_log = !history.model.logs.is_empty();
    match action {
        Action::Create if (history.live.len() as u64) < WRITERS_MAX => history.create_writer(),
        Action::Small if any_live => {
            let way = [Way::Append, Way::Try, Way::With][history.rng.below(3) as usize];
            let len = history.rng.below(300) as usize;
            history.append(live, len, way);
        }
        Action::Burst if any_live => {
            let len_max = [40, 400, 3000][history.rng.below(3) as usize];
            for _ in 0..history.rng.below(60) {
                let len = history.rng.below(len_max) as usize;
                let live = history.rng.below(history.live.len() as u64) as usize;
                if !history.append(live, len, Way::Append) {
                    break;
                }
            }
        }
        Action::Large if any_live => {
            let way = [Way::Append, Way::With][history.rng.below(2) as usize];
            let max = history.machine.shape.value_bytes_max as u64;
            let len = history.rng.below(max + 1) as usize;
            history.append(live, len, way);
        }
        Action::Metadata if any_live => {
            let len = history.rng.below(200) as usize;
            history.append(live, len, Way::Metadata);
        }
        Action::OtherThread if any_live => {
            let len = history.rng.below(2000) as usize;
            history.append(live, len, Way::OtherThread);
        }
        Action::Sync if any_live => history.sync(live),
        Action::WhenDurable if any_live => history.when_durable(live),
        Action::Persist if any_live => history.persist(live),
        Action::Confirm if any_log => history.confirm(log),
        Action::Reset if any_log => history.reset(log),
        Action::Truncate if any_log => {
            let (truncated, next) = (history.model.logs[log].truncated, history.model.logs[log].next());
            let to = truncated + history.rng.below(next.saturating_sub(truncated) + 1);
            history.truncate(log, to);
        }
        Action::Close if any_live => history.close_writer(live),
        Action::TruncateAndClose if any_live => history.truncate_and_close(live),
        Action::PersistFound if any_found => history.persist_found(found),
        Action::TruncateFound if any_found => history.truncate_found(found),
        Action::DiscardFound if any_found => history.discard_found(found),
        Action::ReadFound if any_found => {
            if history.rng.chance(300) {
                history.finish_readings();
            }
            if faulty.bucket && history.rng.chance(200) {
                let fault = tidelog_upload::sim::Fault::Before;
                history.machine.stores.iter().for_each(|store| store.fail_next(Operation::Get, fault));
            }
            let keep = history.rng.chance(300);
            history.read_found(found, keep);
        }
        Action::Restore if any_log => {
            let keep = history.rng.chance(300);
            history.restore(log, keep);
        }
        Action::CheckHandles if any_log => history.check_some_handles(log),
        Action::Register => {
            if any_live && history.rng.chance(400) {
                // What the handle names may be on its way out.
                let log = history.live[live].log;
                for _ in 0..history.rng.below(12) {
                    history.step()?;
                }
                let next = history.model.logs[log].next();
                history.truncate(log, next);
                for _ in 0..history.rng.below(4) {
                    if faulty.bucket {
                        let fault = tidelog_upload::sim::Fault::After;
                        history
                            .machine
                            .stores
                            .iter()
                            .for_each(|store| store.fail_next(Operation::Delete, fault));
                    }
                    history.step()?;
                }
                history.register_of(log);
            }
            let count = 1 + history.rng.below(4) as usize;
            history.register(count);
        }
        Action::HandOver => history.hand_over(),
        Action::Release => history.release_some(),
        Action::Faults => faulty.change(history),
        Action::Crash => return crash(history, faulty),
        Action::Steps => {
            if history.rng.chance(20) {
                // Nothing happens for so long that leftovers of uploads are due.
                history.machine.pass(Duration::from_secs(11));
            }
            for _ in 0..history.rng.below(12) {
                history.step()?;
            }
        }
        _ => {}
    }
    Ok(())
}

fn crash(history: &mut History, faulty: &Faulty) -> Result<(), Over> {
    let kind = if history.rng.chance(500) { Crash::Process } else { Crash::Power };
    history.planned_crash = kind;
    match history.rng.below(if faulty.crashes { 5 } else { 1 }) {
        0 => {
            let drop_writers = history.rng.chance(500);
            history.close(drop_writers)
        }
        1 | 2 => {
            let world = history.rng.below(history.machine.worlds.len() as u64) as usize;
            let skip = history.rng.below(30);
            history.machine.worlds[world].crash_at(skip, kind);
            Ok(())
        }
        _ => history.crash(kind),
    }
}

/// Which faults a history may have.
struct Faulty {
    disk: bool,
    bucket: bool,
    capacity: bool,
    held: bool,
    crashes: bool,
}

impl Faulty {
    fn random(rng: &mut SimRng) -> Faulty {
        Faulty {
            disk: rng.chance(500),
            bucket: rng.chance(500),
            capacity: rng.chance(200),
            held: rng.chance(300),
            crashes: rng.chance(700),
        }
    }

    /// Makes things worse, or better.
    fn change(&self, history: &mut History) {
        if history.rng.chance(250) {
            history.heal();
            return;
        }
        let world = history.rng.below(history.machine.worlds.len() as u64) as usize;
        let index = world;
        let world = history.machine.worlds[index].clone();
        let mut faults = Vec::new();
        if self.disk {
            faults.extend([
                (Fault::WriteError, 60),
                (Fault::ShortWrite, 300),
                (Fault::StuckWrite, 40),
                (Fault::CreateNoSpace, 400),
                (Fault::FilesError, 80),
                (Fault::ReadError, 60),
                (Fault::EngineBreaks, 4),
            ]);
        }
        if history.silent_faults {
            faults.extend([(Fault::LostWrite, 60), (Fault::MisdirectedWrite, 60), (Fault::BitFlip, 60)]);
        }
        for (fault, max) in faults {
            if history.rng.chance(500) {
                let per_mille = 1 + history.rng.below(max) as u16;
                world.set_fault(fault, per_mille);
            }
        }
        if self.bucket {
            let index = history.rng.below(history.machine.stores.len() as u64) as usize;
            let store = history.machine.stores[index].clone();
            if history.rng.chance(100) {
                history.machine.kill_bucket(index);
            }
            if history.rng.chance(300) {
                let (per_mille, seed) = (200 + history.rng.below(800) as u16, history.rng.next_u64());
                history.machine.slow.set(per_mille, seed);
            }
            for operation in CHANGES {
                // What is seldom asked must fail often to be seen failing.
                let seldom = matches!(
                    operation,
                    Operation::Abort | Operation::Complete | Operation::Head | Operation::ListParts
                );
                if history.rng.chance(if seldom { 900 } else { 400 }) {
                    let mut chance = || history.rng.below(250) as f64 / 1000.0;
                    let (before, after, late, throttled) = (chance(), chance(), chance(), chance());
                    store.set_chances(operation, Chances { before, after, late, throttled });
                }
            }
        }
        if self.capacity && history.rng.chance(500) {
            let shape = &history.machine.shape;
            let segment = shape.block_bytes as u64 * shape.blocks_per_segment;
            if history.rng.chance(500) {
                let room = if history.rng.chance(500) { 1 << 10 } else { segment };
                let bytes = history.rng.below(room);
                history.fill_up(bytes);
            } else {
                let bytes = (128 << 10) + segment * history.rng.below(shape.segments + 1);
                history.limit_capacity(bytes);
            }
        }
        if self.held && history.rng.chance(400) {
            history.hold(index);
        }
    }
}
