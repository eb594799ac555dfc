//! The load: threads that append as fast as they can, and what they saw.
//!
//! A thread counts every append and times one of 64; syncs and checkpoints are asked for by it and waited for elsewhere,
//! so that waiting holds no append up. The load ends when its time is over, whatever finds no room or gets no answer: what
//! was asked for then has a while more.

use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use tidelog::{
    AppendError, Changelog, ChangelogWriter, KeyGroup, KeyGroupRange, PersistFuture, SequenceNumber,
    SyncFuture, WriterControl,
};
use tidelog_upload::block_on_timeout;

use super::histogram::Histogram;
use crate::{Every, Failure};

/// One append of so many is timed.
const TIMED_OF: u64 = 64;
const KEY_GROUPS: u16 = 128;
/// How long answers are waited for after the end.
const GRACE: Duration = Duration::from_secs(60);
/// And if a checkpoint has failed: then nothing may make the room that a sync or another checkpoint waits for.
const GRACE_AFTER_FAILURE: Duration = Duration::from_secs(10);
/// How often a waiter looks whether it has waited for long enough.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// What to do.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    pub threads: u32,
    pub record_bytes: usize,
    pub time: Duration,
    pub checkpoint_every: Every,
    pub sync_every: Duration,
}

/// What was seen.
#[derive(Debug, Default)]
pub struct Outcome {
    pub elapsed: Duration,
    pub records: u64,
    /// Of them, on the local disk when the time was over.
    pub durable: u64,
    /// Of them, in objects when the time was over.
    pub persisted: u64,
    pub append: Histogram,
    pub sync: Histogram,
    pub persist: Histogram,
    pub failed_persists: u64,
    /// Without an answer when they were not waited for any more.
    pub late_persists: u64,
    pub last_failure: Option<String>,
    pub samples: Vec<Sample>,
}

/// How far it was at some time.
#[derive(Clone, Copy, Debug)]
pub struct Sample {
    pub at: Duration,
    pub records: u64,
    pub persisted: u64,
}

/// What a thread tells while it runs. Aligned, so that the counters of two threads do not share a cache line.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Counters {
    records: AtomicU64,
    persisted: AtomicU64,
    persist_under_way: AtomicBool,
}

/// Runs the plan; `tell` hears of every sample.
pub fn run(changelog: &Changelog, plan: Plan, mut tell: impl FnMut(&Sample)) -> Result<Outcome, Failure> {
    let all = KeyGroupRange::new(0, KEY_GROUPS - 1).expect("in order");
    let writers = (0..plan.threads)
        .map(|index| changelog.create_writer(format!("bench-{index}"), all).map_err(Failure::new))
        .collect::<Result<Vec<ChangelogWriter>, Failure>>()?;
    let counters: Vec<Counters> = writers.iter().map(|_| Counters::default()).collect();
    let stop = AtomicBool::new(false);
    let end = End::default();
    let sum = |of: fn(&Counters) -> &AtomicU64| -> u64 {
        counters.iter().map(|counters| of(counters).load(Ordering::Relaxed)).sum()
    };
    let mut outcome = Outcome::default();
    let begun_at = Instant::now();
    let result = std::thread::scope(|scope| {
        let mut appenders = Vec::new();
        let mut waiters = Vec::new();
        for (writer, counters) in writers.into_iter().zip(&counters) {
            let (syncs, sync_queue) = channel();
            let (persists, persist_queue) = channel();
            let control = writer.control();
            let (stop, end) = (&stop, &end);
            waiters.push(scope.spawn(move || wait_for_syncs(&sync_queue, end)));
            waiters.push(scope.spawn(move || wait_for_persists(&persist_queue, &control, counters, end)));
            let appender = Appender { writer, plan, counters, syncs, persists, begun_at };
            appenders.push(scope.spawn(move || appender.run(stop)));
        }
        let interval = (plan.time / 200).max(Duration::from_millis(50));
        while begun_at.elapsed() < plan.time && !appenders.iter().any(|appender| appender.is_finished()) {
            std::thread::sleep(interval.min(plan.time.saturating_sub(begun_at.elapsed())));
            let sample = Sample {
                at: begun_at.elapsed(),
                records: sum(|counters| &counters.records),
                persisted: sum(|counters| &counters.persisted),
            };
            outcome.samples.push(sample);
            tell(&sample);
        }
        stop.store(true, Ordering::Relaxed);
        end.came();
        outcome.elapsed = begun_at.elapsed();
        outcome.persisted = sum(|counters| &counters.persisted);
        let mut failure = None;
        for appender in appenders {
            match appender.join().expect("an appender does not panic") {
                Ok((append, durable)) => {
                    outcome.append.merge(&append);
                    outcome.durable += durable;
                }
                Err(error) => failure = Some(error),
            }
        }
        outcome.records = sum(|counters| &counters.records);
        for waiter in waiters {
            let waited = waiter.join().expect("a waiter does not panic");
            outcome.sync.merge(&waited.sync);
            outcome.persist.merge(&waited.persist);
            outcome.failed_persists += waited.failed;
            outcome.late_persists += waited.late;
            // What a checkpoint says is worth more than what a sync does.
            if waited.failed > 0 || outcome.last_failure.is_none() {
                outcome.last_failure = waited.last_failure.or(outcome.last_failure.take());
            }
        }
        failure.map_or(Ok(()), Err)
    });
    result.map(|()| outcome)
}

struct Appender<'a> {
    writer: ChangelogWriter,
    plan: Plan,
    counters: &'a Counters,
    syncs: Sender<(Instant, SyncFuture)>,
    persists: Sender<(Instant, PersistFuture)>,
    begun_at: Instant,
}

impl Appender<'_> {
    fn run(mut self, stop: &AtomicBool) -> Result<(Histogram, u64), Failure> {
        let mut histogram = Histogram::default();
        // Not zeros, so that no layer below has an easy time.
        let value: Vec<u8> =
            (0..self.plan.record_bytes as u32).map(|at| (at.wrapping_mul(0x9e37_79b1) >> 24) as u8).collect();
        let mut group = 0;
        let mut records = 0;
        let mut checkpoint_at = self.begun_at;
        let mut checkpoint_records = 0;
        let mut sync_at = self.begun_at;
        // Before the disk can be full: a checkpoint asked for later may never come to its upload, and to what the buckets say.
        let mut is_first = true;
        'load: while !stop.load(Ordering::Relaxed) {
            for _ in 1..TIMED_OF {
                if !self.append(group, &value, stop)? {
                    break 'load;
                }
                group = (group + 1) % KEY_GROUPS;
            }
            let before = Instant::now();
            if !self.append(group, &value, stop)? {
                break 'load;
            }
            let now = Instant::now();
            histogram.record(now - before);
            group = (group + 1) % KEY_GROUPS;
            records += TIMED_OF;
            self.counters.records.store(records, Ordering::Relaxed);
            if now - sync_at >= self.plan.sync_every {
                sync_at = now;
                // A waiter that is gone has failed, and says so when it is joined.
                let _ = self.syncs.send((Instant::now(), self.writer.sync()));
            }
            let due = match self.plan.checkpoint_every {
                Every::Records(every) => records - checkpoint_records >= every,
                Every::Time(every) => now - checkpoint_at >= every,
            };
            if (due || is_first) && !self.counters.persist_under_way.swap(true, Ordering::Acquire) {
                is_first = false;
                // By the clock, so that all threads ask together.
                checkpoint_at = match self.plan.checkpoint_every {
                    Every::Time(every) => {
                        self.begun_at
                            + every
                                * ((now - self.begun_at).as_nanos() / every.as_nanos())
                                    .try_into()
                                    .unwrap_or(u32::MAX)
                    }
                    Every::Records(_) => now,
                };
                checkpoint_records = records;
                let from = SequenceNumber(self.counters.persisted.load(Ordering::Relaxed));
                let _ = self.persists.send((Instant::now(), self.writer.persist_durably(from)));
            }
        }
        Ok((histogram, self.writer.durable_sequence_number().0))
    }

    /// Appends as soon as there is room; `false` if the time was over before.
    fn append(&mut self, group: u16, value: &[u8], stop: &AtomicBool) -> Result<bool, Failure> {
        loop {
            match self.writer.append(KeyGroup(group), value) {
                Ok(_) => return Ok(true),
                Err(AppendError::Full { .. }) if stop.load(Ordering::Relaxed) => return Ok(false),
                Err(AppendError::Full { .. }) => {}
                Err(error) => return Err(Failure::new(error)),
            }
        }
    }
}

/// When the load ended, and whether a checkpoint had failed: how long answers are still waited for.
#[derive(Debug, Default)]
struct End {
    at: OnceLock<Instant>,
    failed: AtomicBool,
}

impl End {
    fn came(&self) {
        self.at.get_or_init(Instant::now);
    }

    /// Waits for an answer; `None` if it is not waited for any more.
    fn wait<F: Future + Unpin>(&self, mut future: F) -> Option<F::Output> {
        loop {
            if let Some(answer) = block_on_timeout(&mut future, LOOK_EVERY) {
                return Some(answer);
            }
            if self.is_long_ago(Instant::now()) {
                return None;
            }
        }
    }

    fn is_long_ago(&self, now: Instant) -> bool {
        let grace = if self.failed.load(Ordering::Relaxed) { GRACE_AFTER_FAILURE } else { GRACE };
        self.at.get().is_some_and(|at| now.saturating_duration_since(*at) >= grace)
    }
}

/// What a waiter saw.
#[derive(Default)]
struct Waited {
    sync: Histogram,
    persist: Histogram,
    failed: u64,
    late: u64,
    last_failure: Option<String>,
}

fn wait_for_syncs(queue: &Receiver<(Instant, SyncFuture)>, end: &End) -> Waited {
    let mut waited = Waited::default();
    for (asked_at, future) in queue {
        match end.wait(future) {
            Some(Ok(_)) => waited.sync.record(asked_at.elapsed()),
            Some(Err(error)) => waited.last_failure = Some(error.to_string()),
            None => {}
        }
    }
    waited
}

/// Takes each handle as complete, and drops what it stands for, so that neither disk fills up.
fn wait_for_persists(
    queue: &Receiver<(Instant, PersistFuture)>,
    control: &WriterControl,
    counters: &Counters,
    end: &End,
) -> Waited {
    let mut waited = Waited::default();
    for (asked_at, future) in queue {
        match end.wait(future) {
            Some(Ok(handle)) => {
                waited.persist.record(asked_at.elapsed());
                // The log may be closed by now; then nothing needs to be dropped.
                let _ = control.confirm(handle.to()).and_then(|()| control.truncate(handle.to()));
                counters.persisted.store(handle.to().0, Ordering::Relaxed);
            }
            Some(Err(error)) => {
                end.failed.store(true, Ordering::Relaxed);
                waited.failed += 1;
                waited.last_failure = Some(error.to_string());
            }
            None => waited.late += 1,
        }
        counters.persist_under_way.store(false, Ordering::Release);
    }
    waited
}

/// How much of the machine's time others used, over a short while: 0 to 1. `None` where the system does not tell.
pub fn busy_share(time: Duration) -> Option<f64> {
    let before = cpu_times()?;
    std::thread::sleep(time);
    let after = cpu_times()?;
    let (idle, total) = (after.0.checked_sub(before.0)?, after.1.checked_sub(before.1)?);
    (total > 0).then(|| 1.0 - idle as f64 / total as f64)
}

/// Idle and all ticks of all processors.
fn cpu_times() -> Option<(u64, u64)> {
    let stat = std::fs::read_to_string(Path::new("/proc/stat")).ok()?;
    let fields: Vec<u64> =
        stat.lines().next()?.split_whitespace().skip(1).map_while(|field| field.parse().ok()).collect();
    Some((fields.get(3)? + fields.get(4)?, fields.iter().take(8).sum()))
}

/// What two looks at the clock cost, which every timed append includes.
pub fn clock_cost() -> Duration {
    let mut histogram = Histogram::default();
    for _ in 0..10_000 {
        let before = Instant::now();
        histogram.record(before.elapsed());
    }
    histogram.quantile(0.5)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_waited_for_less_long_after_a_failure() {
        let end = End::default();
        let later = |seconds| Instant::now() + Duration::from_secs(seconds);
        assert!(!end.is_long_ago(later(3600)), "the load goes on");
        end.came();
        assert!(!end.is_long_ago(later(15)) && end.is_long_ago(later(61)));
        end.failed.store(true, Ordering::Relaxed);
        assert!(!end.is_long_ago(later(5)) && end.is_long_ago(later(15)));
    }
}
