//! An engine with a thread for each operator instance and one for the coordinator.
//!
//! It lives through a crash in the same directory: the state comes back from a snapshot and from handles, its changes go on
//! in new logs, and the old ones are discarded once a newer snapshot holds what they hold. One checkpoint is declined.

#[path = "embed_job/mod.rs"]
mod embed_job;

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;
use std::time::Duration;

use tidelog::{
    Changelog, ChangelogHandle, ChangelogWriter, KeyGroup, KeyGroupRange, Options, PersistFuture,
    SequenceNumber, WriterControl,
};

use embed_job::{BARRIER_EVERY, Result, State, apply, change, expected, key_group, key_groups, record};

const INSTANCES: u16 = 2;
/// Checkpoints whose number is a multiple of this begin with a snapshot.
const SNAPSHOT_EVERY: u64 = 3;
/// The coordinator declines this one, as if an instance had not answered in time.
const DECLINED: u64 = 2;

/// What a checkpoint stores of an instance. Its state is the snapshot and then the changes of the handles, in their order.
#[derive(Clone, Default)]
struct InstanceCheckpoint {
    snapshot: Option<PathBuf>,
    handles: Vec<ChangelogHandle>,
}

/// What a checkpoint stores.
#[derive(Default)]
struct Checkpoint {
    /// The records before this position are in the state.
    position: u64,
    instances: Vec<InstanceCheckpoint>,
}

/// What an instance tells the coordinator at a barrier.
struct Report {
    checkpoint: u64,
    instance: u16,
    /// The state so far, but for the changes of the log: its snapshot, and the handles of earlier logs.
    base: InstanceCheckpoint,
    /// The log's changes from this number on are not in the snapshot.
    from: SequenceNumber,
    to: SequenceNumber,
    persist: PersistFuture,
}

/// An operator instance.
struct Instance {
    number: u16,
    key_groups: KeyGroupRange,
    dir: PathBuf,
    writer: ChangelogWriter,
    state: State,
    base: InstanceCheckpoint,
    from: SequenceNumber,
}

impl Instance {
    /// Reads the source from `start` to `until`.
    fn run(mut self, start: u64, until: u64, coordinator: &Sender<Report>) -> Result<State> {
        for position in start..until {
            if position > start && position.is_multiple_of(BARRIER_EVERY) {
                let report = self.barrier(position / BARRIER_EVERY)?;
                coordinator.send(report)?;
            }
            let (key, amount) = record(position);
            let group = key_group(key);
            if self.key_groups.contains(group) {
                let sum = self.state.entry(key).or_default();
                *sum += amount;
                let value = change(key, *sum);
                self.append(group, &value)?;
            }
        }
        Ok(self.state)
    }

    /// Waits for as long as disk and bucket are behind. The engine's own backpressure does the rest: the source is not read.
    fn append(&mut self, group: KeyGroup, value: &[u8]) -> Result<()> {
        loop {
            match self.writer.append(group, value) {
                Ok(_) => return Ok(()),
                Err(error) if error.is_retryable() => eprintln!("{}: {error}", self.writer.name()),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// The barrier of a checkpoint: nothing is waited for here, the next record follows at once.
    fn barrier(&mut self, checkpoint: u64) -> Result<Report> {
        if checkpoint.is_multiple_of(SNAPSHOT_EVERY) {
            // A real engine copies its state in the background; what counts is the number that the copy belongs to.
            let snapshot = self.dir.join(format!("snapshot-{checkpoint}-{}", self.number));
            write_snapshot(&snapshot, &self.state)?;
            self.base = InstanceCheckpoint { snapshot: Some(snapshot), handles: Vec::new() };
            self.from = self.writer.next_sequence_number();
        }
        Ok(Report {
            checkpoint,
            instance: self.number,
            base: self.base.clone(),
            from: self.from,
            to: self.writer.next_sequence_number(),
            persist: self.writer.persist_durably(self.from),
        })
    }
}

/// Collects the reports of all instances, and decides. Ends when no instance is left.
fn coordinate(
    dir: &Path,
    reports: &Receiver<Report>,
    controls: &[WriterControl],
    changelog: &Changelog,
) -> Result<()> {
    let mut waiting: BTreeMap<u64, Vec<Report>> = BTreeMap::new();
    while let Ok(report) = reports.recv() {
        let checkpoint = report.checkpoint;
        let all = waiting.entry(checkpoint).or_default();
        all.push(report);
        if all.len() < usize::from(INSTANCES) {
            continue;
        }
        let mut all = waiting.remove(&checkpoint).unwrap_or_default();
        all.sort_by_key(|report| report.instance);
        let mut stored = Checkpoint { position: checkpoint * BARRIER_EVERY, instances: Vec::new() };
        let mut ranges = Vec::new();
        let mut declined = checkpoint == DECLINED;
        for Report { instance, mut base, from, to, persist, .. } in all {
            ranges.push((&controls[usize::from(instance)], from, to));
            match persist.wait() {
                Ok(handle) => base.handles.push(handle),
                // All is still held, and the next checkpoint has it.
                Err(error) if error.is_retryable() => {
                    eprintln!("checkpoint {checkpoint} is declined: {error}");
                    declined = true;
                }
                Err(error) => return Err(error.into()),
            }
            stored.instances.push(base);
        }
        if declined {
            for (control, from, to) in ranges {
                control.reset(from, to)?;
            }
            continue;
        }
        // The checkpoint is complete when this is on stable storage, and not before.
        store(dir, &stored)?;
        for (control, from, to) in ranges {
            control.confirm(to)?;
            // This engine keeps one checkpoint: nobody needs what is below its first number.
            control.truncate(from)?;
        }
        // Logs of earlier runs go once no handle of the checkpoint names them.
        let handles = || stored.instances.iter().flat_map(|instance| &instance.handles);
        for log in changelog.recovered() {
            if handles().all(|handle| handle.log() != log.log()) {
                log.discard();
            }
        }
    }
    Ok(())
}

fn open(dir: &Path, local: &str) -> Result<Changelog> {
    let bucket = format!("file://{}", dir.join("bucket").display());
    // Small, for an example: a directory for production has gigabytes.
    let options = Options::new(bucket, dir.join(local)).segment_bytes(1 << 20).local_bytes(16 << 20);
    Ok(Changelog::open(options)?)
}

/// Runs the job until a position, from the last checkpoint on. Gives the states as they were restored and at the end, and
/// the changelog.
fn run_job(dir: &Path, until: u64) -> Result<(Vec<State>, Vec<State>, Changelog)> {
    let changelog = open(dir, "local")?;
    for log in changelog.recovered() {
        println!("left by an earlier run: {}, changes {} to {}", log.name(), log.start(), log.end());
    }
    let checkpoint = load(dir)?;
    let (sender, reports) = mpsc::channel();
    let mut restored = Vec::new();
    let mut instances = Vec::new();
    for number in 0..INSTANCES {
        let key_groups = key_groups(number, INSTANCES);
        let base = checkpoint.instances.get(usize::from(number)).cloned().unwrap_or_default();
        let state = restore(&changelog, &base, key_groups)?;
        restored.push(state.clone());
        let writer = changelog.create_writer(format!("sums-{number}"), key_groups)?;
        instances.push(Instance {
            number,
            key_groups,
            dir: dir.to_owned(),
            writer,
            state,
            base,
            from: SequenceNumber::ZERO,
        });
    }
    let controls: Vec<WriterControl> = instances.iter().map(|instance| instance.writer.control()).collect();
    let position = checkpoint.position;
    let states: Result<Vec<State>> = thread::scope(|scope| {
        let threads: Vec<_> = instances
            .into_iter()
            .map(|instance| {
                let sender = sender.clone();
                scope.spawn(move || instance.run(position, until, &sender))
            })
            .collect();
        drop(sender);
        coordinate(dir, &reports, &controls, &changelog)?;
        threads.into_iter().map(|thread| thread.join().map_err(|_| "an instance panicked")?).collect()
    });
    Ok((restored, states?, changelog))
}

/// The state that a checkpoint stores of an instance.
fn restore(changelog: &Changelog, stored: &InstanceCheckpoint, key_groups: KeyGroupRange) -> Result<State> {
    let mut state = match &stored.snapshot {
        Some(snapshot) => read_snapshot(snapshot)?,
        None => State::new(),
    };
    // Local blocks first, where this directory still holds them; the rest from the bucket.
    for change in changelog.restore(&stored.handles)?.reader(key_groups)? {
        apply(&mut state, &change?.value)?;
    }
    Ok(state)
}

/// Stores a checkpoint in place of the last one. The handles are lines of JSON, which `tidelog read` understands too.
fn store(dir: &Path, checkpoint: &Checkpoint) -> Result<()> {
    let mut text = format!("position {}\n", checkpoint.position);
    for (number, InstanceCheckpoint { snapshot, handles }) in checkpoint.instances.iter().enumerate() {
        text += &format!("instance {number}\n");
        if let Some(snapshot) = snapshot {
            text += &format!("snapshot {}\n", snapshot.display());
        }
        for handle in handles {
            text += &format!("handle {}\n", handle.to_json());
        }
    }
    let new = dir.join("checkpoint.new");
    let mut file = File::create(&new)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()?;
    fs::rename(new, dir.join("checkpoint"))?;
    File::open(dir)?.sync_all()?;
    Ok(())
}

/// The last checkpoint; an empty one if there is none.
fn load(dir: &Path) -> Result<Checkpoint> {
    let mut checkpoint = Checkpoint::default();
    let path = dir.join("checkpoint");
    let text = if path.exists() { fs::read_to_string(path)? } else { String::new() };
    for line in text.lines() {
        let instance = checkpoint.instances.last_mut().ok_or("no instance yet");
        match line.split_once(' ') {
            Some(("position", position)) => checkpoint.position = position.parse()?,
            Some(("instance", _)) => checkpoint.instances.push(InstanceCheckpoint::default()),
            Some(("snapshot", path)) => instance?.snapshot = Some(path.into()),
            Some(("handle", json)) => instance?.handles.push(ChangelogHandle::from_json(json)?),
            _ => return Err(format!("not a line of a checkpoint: {line}").into()),
        }
    }
    Ok(checkpoint)
}

fn write_snapshot(path: &Path, state: &State) -> Result<()> {
    let mut file = File::create(path)?;
    for (key, sum) in state {
        file.write_all(&change(*key, *sum))?;
    }
    Ok(file.sync_all()?)
}

fn read_snapshot(path: &Path) -> Result<State> {
    let mut state = State::new();
    for entry in fs::read(path)?.chunks_exact(16) {
        let (key, sum) = entry.split_at(8);
        state.insert(u64::from_le_bytes(key.try_into()?), i64::from_le_bytes(sum.try_into()?));
    }
    Ok(state)
}

/// Crashes between two checkpoints, twice, and compares the state with what it has to be.
pub fn run(dir: &Path) -> Result<()> {
    let mut position = 0;
    // The last run ends right behind a barrier.
    for (run, until) in (1..).zip([BARRIER_EVERY * 5 - 1, BARRIER_EVERY * 6 - 1, BARRIER_EVERY * 8 + 1]) {
        let (restored, states, changelog) = run_job(dir, until)?;
        for (number, (restored, state)) in (0..).zip(restored.iter().zip(&states)) {
            let key_groups = key_groups(number, INSTANCES);
            assert_eq!(*restored, expected(key_groups, position), "as at the last checkpoint");
            assert_eq!(*state, expected(key_groups, until), "as if nothing had happened");
        }
        println!("went on from {position} to {until}");
        position = until / BARRIER_EVERY * BARRIER_EVERY;
        if run < 3 {
            // The crash: nothing is closed.
            drop(changelog);
        } else {
            changelog.close(Duration::from_secs(30))?;
        }
    }
    // What was truncated is gone. What the last checkpoint needs is in the bucket: a new directory has none of it.
    let stored = load(dir)?;
    assert_eq!(stored.position, position);
    let changelog = open(dir, "elsewhere")?;
    for (number, instance) in (0..).zip(&stored.instances) {
        let key_groups = key_groups(number, INSTANCES);
        assert_eq!(restore(&changelog, instance, key_groups)?, expected(key_groups, position));
    }
    Ok(())
}

fn main() -> Result<()> {
    let dir = tempfile::tempdir()?;
    run(dir.path())
}
