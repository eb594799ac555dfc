//! The job: a source, workers, and the coordinator of their checkpoints.
//!
//! A checkpoint: the source sends a barrier to all workers; each asks its log to persist; when all handles are there, one
//! file with the offset, the snapshots and the handles makes the checkpoint complete. Only then may anything go that the
//! checkpoint before it needed: changes below a snapshot are truncated, logs of earlier runs that are not named any more
//! discarded, snapshots removed.
//!
//! A restart takes the newest complete checkpoint, and as many threads as it likes: each restores its key groups from
//! whatever parts hold them, and begins a log of its own. Until its first snapshot is in a complete checkpoint, its
//! checkpoints name the restored parts too.

pub mod checkpoint;
pub mod source;
pub mod state;
pub mod worker;

use std::fmt;
use std::path::PathBuf;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

use tidelog::{Changelog, KeyGroupRange, Options, SequenceNumber};

use checkpoint::{Checkpoint, Folder, Part};
use source::Source;
use state::{State, ranges};
use worker::{Ack, Reply, Worker, restore};

/// Why the job cannot go on. A restart may.
pub type Failure = Box<dyn std::error::Error + Send + Sync>;

/// Batches of bids that wait for a worker, at most.
const INBOX_BATCHES: usize = 16;
/// The job gives up after so many failed checkpoints in a row.
const FAILED_MAX: u32 = 10;
const CLOSE_TIMEOUT: Duration = Duration::from_secs(60);

/// What a run is to do.
#[derive(Clone, Debug)]
pub struct Config {
    /// The bucket, the local directory, and how they are used.
    pub options: Options,
    /// The folder of checkpoints and snapshots.
    pub checkpoints: PathBuf,
    /// Worker threads, from 1.
    pub threads: u16,
    /// How many events there are.
    pub events: u64,
    /// Events a second at most.
    pub rate: Option<u64>,
    /// From the end of a checkpoint to the next barrier.
    pub checkpoint_pause: Duration,
    /// Each worker writes a snapshot every so many checkpoints.
    pub materialize_every: u64,
    /// Of a hundred checkpoints, so many are declined after all was persisted, as if a part of the job without a log had
    /// failed.
    pub declined_percent: u64,
    /// For which ones.
    pub seed: u64,
}

/// What a run tells as it goes.
#[derive(Debug)]
pub enum Report {
    /// The state is as it was at this checkpoint; 0 if there was none.
    Restored { checkpoint: u64, offset: u64, parts: usize, aggregates: usize, digest: u64 },
    /// Logs of earlier runs were discarded, and so many are still needed.
    Discarded { logs: usize, kept: usize },
    /// A worker found no room for a change, and waits.
    Full { key_groups: KeyGroupRange },
    /// A checkpoint ended.
    Checkpoint { id: u64, offset: u64, snapshots: usize, outcome: Outcome, took: Duration },
    /// All events are in the state and in a complete checkpoint.
    Done { offset: u64, aggregates: usize, digest: u64 },
}

/// How a checkpoint ended.
#[derive(Debug)]
pub enum Outcome {
    Complete,
    Declined,
    Failed(String),
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Report::Restored { checkpoint, offset, parts, aggregates, digest } => write!(
                f,
                "restored checkpoint={checkpoint} offset={offset} parts={parts} aggregates={aggregates} digest={digest:016x}"
            ),
            Report::Discarded { logs, kept } => write!(f, "discarded logs={logs} kept={kept}"),
            Report::Full { key_groups } => write!(f, "full key_groups={key_groups}"),
            Report::Checkpoint { id, offset, snapshots, outcome, took } => {
                let took = took.as_millis();
                match outcome {
                    Outcome::Complete => f.write_str("complete"),
                    Outcome::Declined => f.write_str("declined"),
                    Outcome::Failed(_) => f.write_str("failed"),
                }?;
                write!(f, " checkpoint={id} offset={offset} snapshots={snapshots} ms={took}")?;
                if let Outcome::Failed(why) = outcome { write!(f, " because={why}") } else { Ok(()) }
            }
            Report::Done { offset, aggregates, digest } => {
                write!(f, "done offset={offset} aggregates={aggregates} digest={digest:016x}")
            }
        }
    }
}

/// Runs the job from its newest checkpoint to the end of the events.
///
/// # Errors
/// Whatever keeps it from going on. Nothing that a complete checkpoint needs is lost then.
pub fn run(config: &Config, report: &(dyn Fn(Report) + Sync)) -> Result<(), Failure> {
    let folder = Folder::open(&config.checkpoints)?;
    let newest = folder.newest()?.unwrap_or_default();
    folder.remove_all_but(&newest)?;
    let changelog = Changelog::open(config.options.clone())?;
    let ranges = ranges(config.threads);
    let restored = restore_all(&newest, &ranges, &folder, report)?;
    let mut coordinator = Coordinator {
        config,
        report,
        folder: &folder,
        changelog: &changelog,
        discarded: vec![false; changelog.recovered().len()],
        next_id: newest.id + 1,
        failed: 0,
    };
    coordinator.release_recovered(&newest);
    let state = thread::scope(|scope| {
        let (reply, replies) = mpsc::channel();
        let (barriers, wanted) = mpsc::channel();
        let (mut workers, mut threads) = (Vec::new(), Vec::new());
        for (turn, (range, (state, parts))) in (0..).zip(ranges.iter().zip(restored)) {
            let worker = Worker {
                state,
                restored: parts,
                snapshot: None,
                from: SequenceNumber::ZERO,
                writer: changelog.create_writer(format!("bids-{range}"), *range)?,
                materialize_every: config.materialize_every,
                turn,
                folder: &folder,
                report,
                replies: reply.clone(),
            };
            let (input, inbox) = mpsc::sync_channel(INBOX_BATCHES);
            workers.push((range.last().0 + 1, input));
            threads.push(scope.spawn(|| worker.run(inbox)));
        }
        let (offset, end) = (newest.offset, config.events.max(newest.offset));
        let source = Source { offset, end, rate: config.rate, workers, barriers: wanted, replies: reply };
        scope.spawn(|| source.run());
        // The source ends when the coordinator does, and with it the workers.
        coordinator.run(barriers, replies, end)?;
        let mut all = State::default();
        threads.into_iter().for_each(|thread| all.merge(thread.join().expect("a worker does not panic")));
        Ok::<State, Failure>(all)
    })?;
    changelog.close(CLOSE_TIMEOUT)?;
    let (aggregates, digest) = (state.len(), state.digest());
    report(Report::Done { offset: config.events.max(newest.offset), aggregates, digest });
    Ok(())
}

/// The state of each range, and the parts that it came from.
fn restore_all(
    checkpoint: &Checkpoint,
    ranges: &[KeyGroupRange],
    folder: &Folder,
    report: &(dyn Fn(Report) + Sync),
) -> Result<Vec<(State, Vec<Part>)>, Failure> {
    let restored = thread::scope(|scope| {
        let start = |range| scope.spawn(move || restore(&checkpoint.parts, range, folder));
        let threads: Vec<_> = ranges.iter().copied().map(start).collect();
        let ended = threads.into_iter().map(|thread| thread.join().expect("a restore does not panic"));
        ended.collect::<Result<Vec<_>, Failure>>()
    })?;
    let mut all = State::default();
    restored.iter().for_each(|(state, _)| all.merge(state.clone()));
    report(Report::Restored {
        checkpoint: checkpoint.id,
        offset: checkpoint.offset,
        parts: checkpoint.parts.len(),
        aggregates: all.len(),
        digest: all.digest(),
    });
    Ok(restored)
}

/// Decides when there is a checkpoint, and whether it is complete.
struct Coordinator<'a> {
    config: &'a Config,
    report: &'a (dyn Fn(Report) + Sync),
    folder: &'a Folder,
    changelog: &'a Changelog,
    /// Which recovered logs are discarded.
    discarded: Vec<bool>,
    next_id: u64,
    /// Failed checkpoints in a row.
    failed: u32,
}

impl Coordinator<'_> {
    /// One checkpoint after the other, until one with all events is complete.
    fn run(&mut self, barriers: Sender<u64>, replies: Receiver<Reply>, end: u64) -> Result<(), Failure> {
        loop {
            match replies.recv_timeout(self.config.checkpoint_pause) {
                Ok(Reply::Failed(failure)) => return Err(failure),
                // The last checkpoint need not wait.
                Ok(Reply::Ended) | Err(RecvTimeoutError::Timeout) => {}
                Ok(Reply::Offset(_) | Reply::Ack(_)) => unreachable!("nobody asked for a checkpoint"),
                Err(RecvTimeoutError::Disconnected) => return Err("the source is gone".into()),
            }
            let offset = self.checkpoint(&barriers, &replies)?;
            if offset == Some(end) {
                return Ok(());
            }
        }
    }

    /// Gives the offset if the checkpoint is complete.
    fn checkpoint(
        &mut self,
        barriers: &Sender<u64>,
        replies: &Receiver<Reply>,
    ) -> Result<Option<u64>, Failure> {
        let (id, started_at) = (self.next_id, Instant::now());
        self.next_id += 1;
        barriers.send(id)?;
        let (mut offset, mut acks) = (None, Vec::new());
        while offset.is_none() || acks.len() < usize::from(self.config.threads) {
            match replies.recv()? {
                Reply::Offset(at) => offset = Some(at),
                Reply::Ack(ack) => acks.push(ack),
                Reply::Ended => {}
                Reply::Failed(failure) => return Err(failure),
            }
        }
        let offset = offset.expect("the loop ends with one");
        acks.sort_by_key(|ack| ack.key_groups.first());
        let (mut parts, mut shares, mut outcome) = (Vec::new(), Vec::new(), Outcome::Complete);
        for Ack { restored, key_groups, snapshot, from, persist, control } in acks {
            match persist.wait() {
                Ok(handle) => {
                    shares.push((control, from, handle.to()));
                    parts.extend(restored);
                    parts.push(Part { key_groups, snapshot, handle });
                }
                Err(error) => outcome = Outcome::Failed(error.to_string()),
            }
        }
        let checkpoint = Checkpoint { id, offset, parts };
        let snapshots = checkpoint.parts.iter().filter(|part| part.snapshot.is_some()).count();
        if matches!(outcome, Outcome::Complete)
            && chance(self.config.seed ^ id) < self.config.declined_percent
        {
            outcome = Outcome::Declined;
        }
        if matches!(outcome, Outcome::Complete) {
            self.folder.complete(&checkpoint)?;
            for (control, from, to) in shares {
                control.confirm(to)?;
                control.truncate(from)?;
            }
            self.release_recovered(&checkpoint);
            self.folder.remove_all_but(&checkpoint)?;
        } else {
            for (control, from, to) in shares {
                control.reset(from, to)?;
            }
        }
        self.failed = if matches!(outcome, Outcome::Failed(_)) { self.failed + 1 } else { 0 };
        let complete = matches!(outcome, Outcome::Complete).then_some(offset);
        let took = started_at.elapsed();
        (self.report)(Report::Checkpoint { id, offset, snapshots, outcome, took });
        if self.failed == FAILED_MAX {
            return Err(format!("{FAILED_MAX} checkpoints failed in a row").into());
        }
        Ok(complete)
    }

    /// Lets go of what earlier runs left and `checkpoint`, the newest complete one, does not need.
    fn release_recovered(&mut self, checkpoint: &Checkpoint) {
        let (mut logs, mut kept) = (0, 0);
        for (log, discarded) in self.changelog.recovered().iter().zip(&mut self.discarded) {
            match checkpoint.needs(log.log()) {
                // The run that completed the checkpoint may have been killed before it said so.
                Some((from, to)) => {
                    log.confirm(to);
                    log.truncate(from);
                    kept += 1;
                }
                None if !*discarded => {
                    log.discard();
                    *discarded = true;
                    logs += 1;
                }
                None => {}
            }
        }
        if logs > 0 {
            (self.report)(Report::Discarded { logs, kept });
        }
    }
}

/// A number below 100 that looks random, the same one for the same seed: SplitMix64.
fn chance(seed: u64) -> u64 {
    let mut z = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (z ^ (z >> 31)) % 100
}
