//! One short history that dies at each of its disk operations.

use tidelog_io::sim::{Crash, SimRng};

use crate::history::{History, Over, Way};
use crate::machine::{Machine, Meter, Plant, Shape};

/// Runs the history, which dies at disk operation `skip`. Whether it came to that.
pub fn run(skip: u64, crash: Crash, plant: Option<Plant>) -> bool {
    let machine = Machine::new(7, Shape::smallest(), plant);
    let meter = Meter(machine.readings.clone());
    let _guard = metrics::set_default_local_recorder(&meter);
    let mut history = History::new(machine, SimRng::new(11), false);
    history.planned_crash = crash;
    history.machine.worlds[0].crash_at(skip, crash);
    play(&mut history).expect("no fault is silent");
    let crashes = history.machine.worlds[0].stats().crashes;
    history.finish().expect("no fault is silent");
    crashes > 0
}

fn play(history: &mut History) -> Result<(), Over> {
    history.open()?;
    for round in 0..4 {
        history.create_writer();
        steps(history, 1)?;
        for live in 0..history.live.len() {
            for change in 0..12 {
                history.append(live, 150 * change, Way::Append);
            }
            history.append(live, 20 << 10, Way::Append);
            history.append(live, 30, Way::Metadata);
            history.sync(live);
        }
        steps(history, 8)?;
        for live in 0..history.live.len() {
            history.persist(live);
        }
        steps(history, 12)?;
        // The checkpoint before it goes when this one is complete.
        history.register_all(round);
        if round > 0 {
            history.release(round - 1);
        }
        steps(history, 1)?;
        for log in 0..history.model.logs.len() {
            let to = history.model.logs[log].next() * round / 4;
            history.truncate(log, to);
        }
        steps(history, 2)?;
        if round == 2 && !history.live.is_empty() {
            history.close_writer(0);
        }
        for found in 0..history.found.len() {
            history.read_found(found, false);
            history.persist_found(found);
        }
        steps(history, 6)?;
    }
    Ok(())
}

fn steps(history: &mut History, count: usize) -> Result<(), Over> {
    (0..count).try_for_each(|_| history.step())
}
