//! Writers that are killed at random times lose nothing that they acknowledged.
//!
//! `tidelog write` reads real records and is killed by SIGKILL: while it recovers, appends, syncs, takes checkpoints or
//! closes. The oracle is what that process acknowledged and which handles it gave out. Each cycle starts on what the
//! last one left, so that recovery is recovered from, too. `TIDELOG_KILLS` is the number of cycles (10), `TIDELOG_SEED`
//! repeats their random choices.

mod common;

use std::collections::BTreeMap;
use std::io::Write;
use std::os::unix::process::ExitStatusExt;
use std::process::Stdio;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use common::{FLIGHTS, Home, flights, stderr, stdout, succeeds, tidelog_with};

struct Random(u64);

impl Random {
    /// SplitMix64.
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }
}

fn number_of(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{name} is a number")))
}

const KEY: [&str; 4] = ["--key", "field:12", "--separator", ","];

#[test]
fn nothing_acknowledged_is_lost() {
    let cycles = number_of("TIDELOG_KILLS").unwrap_or(10);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos() as u64;
    let seed = number_of("TIDELOG_SEED").unwrap_or(now);
    println!("TIDELOG_SEED={seed}");
    let mut random = Random(seed);
    let home = Home::new();
    // For each log, how many records were promised of it.
    let mut promised: BTreeMap<String, u64> = BTreeMap::new();
    let (mut killed, mut acknowledged_sum) = (0, 0);
    for cycle in 0..cycles {
        let acknowledged = write_and_kill(&home, &mut random, cycle, &mut killed);
        acknowledged_sum += acknowledged;
        let logs = logs_in(&home);
        let new: Vec<&String> = logs.keys().filter(|log| !promised.contains_key(*log)).collect();
        assert!(new.len() <= 1, "cycle {cycle} made one log at most: {new:?}");
        for (log, &promised) in &promised {
            // One that never held anything may be forgotten.
            let held = logs.get(log).copied().unwrap_or(0);
            assert!(held >= promised, "cycle {cycle}: log {log} held {promised} records, now {held}");
        }
        match new.first() {
            Some(log) => {
                let held = logs[*log];
                assert!(held >= acknowledged, "cycle {cycle}: {acknowledged} acknowledged, {held} there");
                check_local(&home, log, held);
                // Once seen, they are durable: recovery promises them anew.
                promised.insert((*log).clone(), held);
            }
            None => assert_eq!(acknowledged, 0, "cycle {cycle}: the log is gone"),
        }
    }
    println!("{killed} of {cycles} killed, {acknowledged_sum} records acknowledged");
    assert!(cycles < 10 || killed > 0, "nothing was killed: the times do not fit this machine");

    // Everything that has no handle yet gets one; then all handles together stand for every record, once.
    let file = home.text("handles.jsonl");
    succeeds(home.write(&["--recover", "persist", "--handles", &file], ""));
    check_handles(&home, &promised);
    let verified = tidelog_with(&["verify", &home.text("local"), &file]);
    assert_eq!(verified.status.code(), Some(0), "{}{}", stdout(&verified), stderr(&verified));
}

/// Runs a writer on the flights and kills it; gives how many records it acknowledged.
fn write_and_kill(home: &Home, random: &mut Random, cycle: u64, killed: &mut u64) -> u64 {
    let acks = home.text(&format!("acks-{cycle}"));
    let sync_every = (1 + random.below(400)).to_string();
    let checkpoint_every = (100 + random.below(6000)).to_string();
    let recover = ["persist", "keep"][random.below(2) as usize];
    let mut command = home.write_command();
    command.args(KEY).args(["--acks", &acks, "--sync-every", &sync_every, "--recover", recover]);
    command.args(["--checkpoint-every", &checkpoint_every, "--handles", &home.text("handles.jsonl")]);
    let mut child =
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let mut input = child.stdin.take().unwrap();
    let at_once = 1 + random.below(300) as usize;
    let pause = Duration::from_micros(random.below(3000));
    let feeder = std::thread::spawn(move || {
        for records in flights().chunks(at_once) {
            let mut bytes = records.join("\n");
            bytes.push('\n');
            // An error says that the writer is gone, as it should be at some time.
            if input.write_all(bytes.as_bytes()).is_err() {
                return;
            }
            std::thread::sleep(pause);
        }
    });
    std::thread::sleep(Duration::from_micros(random.below(400_000)));
    // One that ended by itself cannot be killed any more.
    let _ = child.kill();
    let output = child.wait_with_output().unwrap();
    feeder.join().unwrap();
    let text = std::fs::read_to_string(&acks).unwrap_or_default();
    let acknowledged = text.lines().last().map_or(0, |line| line.parse().unwrap());
    match output.status.signal() {
        Some(signal) => {
            assert_eq!(signal, 9, "{}", stderr(&output));
            *killed += 1;
        }
        None => {
            assert!(output.status.success(), "{}", stderr(&output));
            assert_eq!(acknowledged, flights().len() as u64);
        }
    }
    acknowledged
}

/// The logs in the directory, with the ends of their numbers.
fn logs_in(home: &Home) -> BTreeMap<String, u64> {
    let local = home.text("local");
    if !home.path("local").join("MANIFEST").exists() {
        return BTreeMap::new();
    }
    let output = succeeds(tidelog_with(&["inspect", "--json", &local]));
    let reports: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let logs = reports[0]["logs"].as_array().unwrap();
    let of = |log: &serde_json::Value| (log["log"].as_str().unwrap().to_owned(), log["to"].as_u64().unwrap());
    logs.iter().map(of).collect()
}

/// What the directory holds of a log is the first `held` records of the source, each once.
fn check_local(home: &Home, log: &str, held: u64) {
    let local = home.text("local");
    let read = stdout(&succeeds(tidelog_with(&["read", "--dir", &local, "--log", log, "--with-meta"])));
    let mut seen = vec![false; held as usize];
    for line in read.lines() {
        let (_, number, _, record) = fields(line);
        assert_eq!(record, flights()[number], "record {number} of log {log}");
        assert!(!std::mem::replace(&mut seen[number], true), "record {number} of log {log} came twice");
    }
    assert_eq!(seen.iter().position(|seen| !seen), None, "log {log} has a hole");
}

/// The handles, read as two halves of the key groups, give every promised record once, in order per key group.
fn check_handles(home: &Home, promised: &BTreeMap<String, u64>) {
    let file = home.text("handles.jsonl");
    let mut seen: BTreeMap<String, Vec<bool>> = BTreeMap::new();
    for half in ["0-63", "64-127"] {
        let read = stdout(&succeeds(tidelog_with(&["read", "--key-groups", half, "--with-meta", &file])));
        let mut last: BTreeMap<(String, String), usize> = BTreeMap::new();
        for line in read.lines() {
            let (log, number, group, record) = fields(line);
            assert_eq!(record, flights()[number], "record {number} of log {log}");
            let before = last.insert((log.to_owned(), group.to_owned()), number);
            assert!(before.is_none_or(|before| before < number), "key group {group} is out of order");
            let seen = seen.entry(log.to_owned()).or_insert_with(|| vec![false; flights().len()]);
            assert!(!std::mem::replace(&mut seen[number], true), "record {number} of log {log} came twice");
        }
    }
    for (log, &promised) in promised {
        let none = Vec::new();
        let seen = seen.get(log).unwrap_or(&none);
        let held = seen.iter().position(|seen| !seen).unwrap_or(seen.len());
        assert!(held as u64 >= promised, "{promised} of log {log} were promised, {held} are in handles");
        assert!(seen[held..].iter().all(|seen| !seen), "log {log} has a hole at {held}");
    }
}

fn fields(line: &str) -> (&str, usize, &str, &str) {
    let fields: Vec<&str> = line.splitn(4, '\t').collect();
    (fields[0], fields[1].parse().unwrap(), fields[2], fields[3])
}

#[test]
fn the_source_is_what_its_readme_says() {
    assert_eq!(flights().len(), 27_004);
    assert_eq!(FLIGHTS.len(), 2_481_337);
    assert!(flights().iter().all(|record| record.starts_with("2013,1,") && record.split(',').count() == 19));
}
