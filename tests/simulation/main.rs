//! Whole histories of a changelog in one thread: simulated disks, simulated bucket, virtual time, crashes.
//!
//! `TIDELOG_HISTORIES` says how many random histories to run, `TIDELOG_FIRST_SEED` which is the first. `TIDELOG_SEED` runs
//! one of them, and tells what happens in it. Everything in a history follows from its seed. `TIDELOG_CHECKPOINTS` is the
//! length of the long life.

#[path = "../common/allocator.rs"]
mod allocator;
mod bucket;
mod crash_points;
mod history;
#[path = "../../upload/tests/common/hooked.rs"]
mod hooked;
mod long_life;
mod machine;
mod model;
mod random;
mod rot;

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};

use machine::Plant;
use tidelog_io::sim::Crash;

/// How many random histories are run if nothing else is said.
const HISTORIES: u64 = 1_000;
/// How long the long life is if nothing else is said.
const CHECKPOINTS: u64 = 10_000;
/// Seeds beyond those that found a mistake once: run in any case. A change of what histories are made of makes others of
/// them.
const PAST_FAILURES: [u64; 6] = [1493, 1636, 2030, 4578, 5149, 13_446];
/// Fewer histories need not have seen every fault.
const HISTORIES_TO_SEE_ALL: u64 = 1_000;
/// Within so many seeds a planted bug must be found.
const SEEDS_TO_FIND_A_PLANT: u64 = 200;

/// What at least one of a hundred histories must go through.
const SEEN: [&str; 35] = [
    "bucket fault abort",
    "bucket fault complete",
    "bucket fault create",
    "bucket fault delete",
    "bucket fault get",
    "bucket fault list",
    "bucket fault list_uploads",
    "bucket fault put",
    "bucket fault put_part",
    "bytes read from both",
    "bytes read locally",
    "disk fault BitFlip",
    "disk fault CreateNoSpace",
    "disk fault EngineBreaks",
    "disk fault FilesError",
    "disk fault LostWrite",
    "disk fault MisdirectedWrite",
    "disk fault ReadError",
    "disk fault ShortWrite",
    "disk fault StuckWrite",
    "disk fault WriteError",
    "hand over: StillNeeded",
    "hand over: ok",
    "objects overlap",
    "opened on a full disk",
    "register: HandedOver",
    "register: NotOwned",
    "register: ok",
    "release: ok",
    "tidelog_local_high_water_total",
    "tidelog_local_retention_lost_total",
    "tidelog_objects_let_go_total",
    "tidelog_segments_acquired_total recycled",
    "tidelog_segments_quarantined_total",
    "tidelog_sick_directories_total",
];

fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name} must be a number, it is {text:?}")))
}

#[test]
fn random_histories() {
    if let Some(seed) = number("TIDELOG_SEED") {
        random::run(seed, None, true);
        return;
    }
    let first = number("TIDELOG_FIRST_SEED").unwrap_or(0);
    let histories = number("TIDELOG_HISTORIES").unwrap_or(HISTORIES);
    let mut in_how_many: BTreeMap<String, u64> = BTreeMap::new();
    let mut failed = Vec::new();
    for seed in (first..first + histories).chain(PAST_FAILURES) {
        match catch_unwind(|| random::run(seed, None, false)) {
            Ok(coverage) => {
                for what in coverage.seen {
                    *in_how_many.entry(what).or_default() += 1;
                }
            }
            Err(_) => {
                eprintln!("history {seed} failed: TIDELOG_SEED={seed} replays it");
                failed.push(seed);
            }
        }
    }
    println!("of {histories} histories, so many had: {in_how_many:#?}");
    assert!(failed.is_empty(), "{} of {histories} histories failed: {failed:?}", failed.len());
    if histories >= HISTORIES_TO_SEE_ALL {
        for what in SEEN {
            let seen = in_how_many.get(what).copied().unwrap_or(0);
            assert!(seen * 100 >= histories, "only {seen} of {histories} histories had: {what}");
        }
    }
}

#[test]
fn a_history_follows_from_its_seed() {
    for seed in 0..20 {
        assert_eq!(random::run(seed, None, false), random::run(seed, None, false), "history {seed}");
    }
}

#[test]
fn a_long_life_leaves_nothing_behind() {
    long_life::run(1, number("TIDELOG_CHECKPOINTS").unwrap_or(CHECKPOINTS));
}

#[test]
fn every_crash_point() {
    for crash in [Crash::Process, Crash::Power] {
        for skip in 0.. {
            let ran = catch_unwind(|| crash_points::run(skip, crash, None));
            match ran {
                Ok(true) => {}
                Ok(false) => {
                    assert!(skip > 50, "the history is too short to be worth it: {skip} operations");
                    break;
                }
                Err(_) => panic!("the history does not survive {crash:?} at disk operation {skip}"),
            }
        }
    }
}

/// The oracles can fail.
#[test]
fn planted_bugs_are_found() {
    for plant in
        [Plant::LoseObject, Plant::KeepDeleted, Plant::RotObject, Plant::ForgetWrites, Plant::LoseWrites]
    {
        let found =
            |seed: &u64| catch_unwind(AssertUnwindSafe(|| random::run(*seed, Some(plant), false))).is_err();
        let seed = (0..SEEDS_TO_FIND_A_PLANT).find(found);
        println!("{plant:?} is found by history {seed:?}");
        assert!(seed.is_some(), "{plant:?} was not found in {SEEDS_TO_FIND_A_PLANT} histories");
    }
}
