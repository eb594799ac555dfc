//! `tidelog write`: records in, handles out.
//!
//! Owns when something is synced and when a checkpoint is taken. Reading the inputs is in `write/source.rs`, what others
//! rely on afterwards in `write/outputs.rs`.

pub mod outputs;
mod source;

use std::path::PathBuf;
use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use tidelog::{
    AppendError, Changelog, ChangelogWriter, KeyGroup, KeyGroupRange, PersistFuture, SequenceNumber,
};

use self::outputs::{Acknowledgements, Handles};
use self::source::{Batch, Message};
use crate::input::Framing;
use crate::key::{KEY_GROUPS_MAX, KeySource};
use crate::metrics::MetricsArgs;
use crate::places::{Places, Tuning, engine_name};
use crate::{Every, Failure, parse_bytes, parse_every, parse_key_groups, parse_separator, parse_time, show};

const CLOSE_WAIT_MAX: Duration = Duration::from_secs(60);
/// How often a checkpoint under way is looked at while the input gives nothing.
const POLL: Duration = Duration::from_millis(2);
const IDLE: Duration = Duration::from_millis(500);

/// Appends records from files or standard input, and prints the handle of each checkpoint as a line of JSON.
///
/// Each handle stands for the records since the one before it: all lines together stand for all records. Records that
/// were synced when the process ended without a checkpoint are found again by the next run on the same directories.
///
/// A record's key group is murmur(hash(key)) modulo --max-parallelism, as Flink assigns it to string keys: hash is
/// Java's String.hashCode of the key's text, or Arrays.hashCode of its bytes if they are not UTF-8; murmur is
/// MathUtils.murmurHash.
#[derive(clap::Args, Debug)]
pub struct WriteArgs {
    #[command(flatten)]
    pub(crate) places: Places,
    /// The log's name.
    #[arg(long, default_value = "records")]
    pub(crate) name: String,
    /// The group: the last folder of the names of objects. One for each job, so that a sweep can tell them apart.
    #[arg(long, default_value = "tidelog")]
    pub(crate) group: String,
    /// What the names of objects begin with before the group.
    #[arg(long, value_name = "PREFIX", default_value = "")]
    pub(crate) name_prefix: String,
    /// How records follow one another.
    #[arg(long, value_enum, default_value = "lines")]
    pub(crate) framing: Framing,
    /// The longest record that is taken, in bytes (K, M, G).
    #[arg(long, value_name = "BYTES", default_value = "16M", value_parser = parse_record_bytes)]
    pub(crate) record_bytes_max: u64,
    /// Where the key is: record (all of it), field:NUMBER (from 1) or json:/POINTER.
    #[arg(long, value_name = "KEY", default_value = "record")]
    pub(crate) key: KeySource,
    /// What stands between fields: one byte, or \t.
    #[arg(long, value_name = "BYTE", default_value = "\\t", value_parser = parse_separator)]
    pub(crate) separator: u8,
    /// How many key groups there are.
    #[arg(long, value_name = "NUMBER", default_value_t = 128,
        value_parser = clap::value_parser!(u32).range(1..=i64::from(KEY_GROUPS_MAX)))]
    pub(crate) max_parallelism: u32,
    /// The key groups of this writer; a record of another one is an error. All, if not given.
    #[arg(long, value_name = "FIRST-LAST", value_parser = parse_key_groups)]
    pub(crate) key_groups: Option<KeyGroupRange>,
    /// Takes a checkpoint after so many records (10000) or so much time (500ms, 2s); one more at the end.
    #[arg(long, value_name = "RECORDS|TIME", value_parser = parse_every)]
    pub(crate) checkpoint_every: Option<Every>,
    /// Waits for the local disk after so many records or so much time; once more at the end.
    #[arg(long, value_name = "RECORDS|TIME", value_parser = parse_every)]
    pub(crate) sync_every: Option<Every>,
    /// Gives up when the local disk has taken nothing for so long (ms, s), as when it is full of what no bucket takes.
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = parse_time)]
    pub(crate) patience: Duration,
    /// Appends the handles to this file too, durably, before they are printed.
    #[arg(long, value_name = "FILE")]
    pub(crate) handles: Option<PathBuf>,
    /// Appends to this file, after each sync, how many records of this run are on the local disk.
    #[arg(long, value_name = "FILE", requires = "sync_every")]
    pub(crate) acks: Option<PathBuf>,
    /// What to do with records that an earlier run left in the directories.
    #[arg(long, value_enum, default_value = "keep")]
    pub(crate) recover: Recover,
    #[command(flatten)]
    pub(crate) metrics: MetricsArgs,
    #[command(flatten)]
    pub(crate) tuning: Tuning,
    /// The files to read; standard input if there is none, or for -.
    pub(crate) files: Vec<PathBuf>,
}

/// What to do with what was recovered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Recover {
    /// Leaves it where it is.
    Keep,
    /// Takes a checkpoint of what has no handle yet, and prints that handle first.
    Persist,
    /// Drops all logs of earlier runs, and deletes the objects that only their handles need.
    Discard,
}

fn parse_record_bytes(text: &str) -> Result<u64, String> {
    const MAX: u64 = (1 << 30) - 1;
    match parse_bytes(text)? {
        0 => Err("records of no bytes only? give 1 at least".to_owned()),
        bytes if bytes > MAX => Err(format!("a record has less than 1 GiB: at most {MAX}")),
        bytes => Ok(bytes),
    }
}

pub fn run(args: WriteArgs) -> Result<(), Failure> {
    let last_group = u16::try_from(args.max_parallelism - 1).expect("clap bounds it");
    let all = KeyGroupRange::new(0, last_group).expect("it starts at 0");
    let key_groups = args.key_groups.unwrap_or(all);
    let value_bytes_max = args.record_bytes_max as usize;
    let options = args
        .tuning
        .options(&args.places.buckets, &args.places.dirs)
        .group(&args.group)
        .name_prefix(&args.name_prefix)
        .append_wait_max(args.patience)
        .memory_bytes((4 * value_bytes_max).max(256 << 20))
        .value_bytes_max(value_bytes_max);
    source::check(&args.files).map_err(Failure::new)?;
    args.metrics.serve()?;
    let mut handles = Handles::open(args.handles.as_deref())?;
    let acks = Acknowledgements::open(args.acks.as_deref())?;
    let changelog = Changelog::open(options)?;
    settle_recovered(&changelog, args.recover, &mut handles)?;
    let writer = changelog.create_writer(&args.name, key_groups).map_err(Failure::new)?;
    let messages = source::start(&args, key_groups)
        .map_err(|error| Failure::new(format!("cannot start a thread: {error}")))?;
    let mut session = Session {
        writer,
        handles,
        acks,
        persisted: SequenceNumber::ZERO,
        under_way: None,
        last_failure: None,
        buckets: changelog.buckets().collect::<Vec<_>>().join(", "),
        patience: args.patience,
        checkpoints: Pace::new(args.checkpoint_every),
        syncs: Pace::new(args.sync_every),
        bytes: 0,
        progress: progress_bar(),
    };
    let input_error = loop {
        match messages.recv_timeout(session.wait_max()) {
            Ok(Message::Batch(batch)) => session.append(&batch)?,
            Ok(Message::End) => break None,
            Ok(Message::Failed(error)) => break Some(error),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => break Some("reading the input ended early".to_owned()),
        }
        session.tick()?;
    };
    session.finish(input_error.is_none())?;
    let engine = engine_name(&changelog.engines());
    let summary = session.summary();
    session.progress.finish_and_clear();
    drop(session);
    changelog.close(CLOSE_WAIT_MAX).map_err(Failure::new)?;
    match input_error {
        None => {
            eprintln!("tidelog: {summary} (local disk: {engine})");
            Ok(())
        }
        Some(error) => Err(Failure::new(format!("{error}\ntidelog: before that, {summary}"))),
    }
}

/// Reports what earlier runs left, and does with it what was asked for.
fn settle_recovered(changelog: &Changelog, recover: Recover, handles: &mut Handles) -> Result<(), Failure> {
    let mut complete = 0;
    for log in changelog.recovered() {
        // A handle may have been given out just before the end, too late to be confirmed.
        let from = log.start().max(log.confirmed()).max(handles.end_before(log.log())).min(log.end());
        let left = log.end().0.saturating_sub(from.0);
        let what = format!(
            "log {} \"{}\" of an earlier run: {} without a handle",
            log.log(),
            log.name(),
            show::counted(left, "record")
        );
        match recover {
            Recover::Discard => {
                log.discard();
                eprintln!("tidelog: {what}; discarded, with all of the log");
            }
            _ if left == 0 => complete += 1,
            Recover::Keep => eprintln!("tidelog: {what}; kept, see --recover"),
            Recover::Persist => {
                let handle = log.persist_durably(from).wait().map_err(Failure::new)?;
                handles.give(&handle)?;
                log.confirm(handle.to());
                eprintln!("tidelog: {what}; persisted now");
            }
        }
    }
    if complete > 0 {
        eprintln!(
            "tidelog: {} of earlier runs with handles for all their records",
            show::counted(complete, "log")
        );
    }
    Ok(())
}

/// When something is due again.
#[derive(Debug)]
struct Pace {
    every: Option<Every>,
    /// The records at which, or the time when, it was done last.
    records: u64,
    at: Instant,
}

impl Pace {
    fn new(every: Option<Every>) -> Pace {
        Pace { every, records: 0, at: Instant::now() }
    }

    fn is_due(&self, records: u64) -> bool {
        match self.every {
            // The clock is not looked at for every record.
            Some(Every::Records(every)) => records - self.records >= every,
            Some(Every::Time(_)) | None => false,
        }
    }

    fn is_time(&self) -> bool {
        matches!(self.every, Some(Every::Time(every)) if self.at.elapsed() >= every)
    }

    fn done(&mut self, records: u64) {
        self.records = records;
        self.at = Instant::now();
    }

    fn wait_max(&self) -> Duration {
        match self.every {
            Some(Every::Time(every)) => every.saturating_sub(self.at.elapsed()).min(IDLE),
            _ => IDLE,
        }
    }
}

/// One run: a log, and what was promised of it.
///
/// 1. Handles are given out in order, each from where the last one ended; at most one checkpoint is under way.
/// 2. An acknowledgement follows the sync that proves it.
struct Session {
    writer: ChangelogWriter,
    handles: Handles,
    acks: Acknowledgements,
    /// The end of the last handle.
    persisted: SequenceNumber,
    under_way: Option<PersistFuture>,
    /// Why the last checkpoint failed, if it did.
    last_failure: Option<String>,
    buckets: String,
    /// How long the local disk may take nothing.
    patience: Duration,
    checkpoints: Pace,
    syncs: Pace,
    bytes: u64,
    progress: ProgressBar,
}

impl Drop for Session {
    /// However it ends: closing a log drops what is neither synced nor persisted.
    fn drop(&mut self) {
        // What is not on the disk by now need not come there.
        drop(self.writer.sync());
    }
}

impl Session {
    fn append(&mut self, batch: &Batch) -> Result<(), Failure> {
        for (key_group, record) in batch.records() {
            self.append_record(key_group, record)?;
        }
        self.progress.set_position(self.bytes);
        self.progress.set_message(self.counts());
        Ok(())
    }

    fn append_record(&mut self, key_group: KeyGroup, record: &[u8]) -> Result<(), Failure> {
        match self.writer.append(key_group, record) {
            Ok(_) => {}
            Err(AppendError::Full { .. }) => return Err(self.no_room()),
            Err(error) => return Err(Failure::new(error)),
        }
        self.bytes += record.len() as u64;
        let records = self.writer.next_sequence_number().0;
        if self.syncs.is_due(records) {
            self.sync()?;
        }
        if self.checkpoints.is_due(records) {
            // The one before it has to end first: this one begins where that ends.
            self.settle_checkpoint()?;
            self.begin_checkpoint();
        }
        Ok(())
    }

    /// What is due by time.
    fn tick(&mut self) -> Result<(), Failure> {
        if let Some(future) = self.under_way.take() {
            match future.wait_timeout(Duration::ZERO) {
                Ok(answer) => self.checkpoint_ended(answer)?,
                Err(future) => self.under_way = Some(future),
            }
        }
        if self.syncs.is_time() {
            self.sync()?;
        }
        if self.checkpoints.is_time() && self.under_way.is_none() {
            if self.persisted < self.writer.next_sequence_number() {
                self.begin_checkpoint();
            } else {
                self.checkpoints.done(self.persisted.0);
            }
        }
        Ok(())
    }

    fn wait_max(&self) -> Duration {
        if self.under_way.is_some() {
            return POLL;
        }
        self.syncs.wait_max().min(self.checkpoints.wait_max())
    }

    fn sync(&mut self) -> Result<(), Failure> {
        let records = self.writer.next_sequence_number();
        self.syncs.done(records.0);
        match self.writer.sync().wait_timeout(self.patience) {
            Ok(answer) => self.acks.acknowledge(answer.map_err(Failure::new)?),
            Err(_) => Err(self.no_room()),
        }
    }

    /// The local disk has taken nothing for as long as it may.
    fn no_room(&mut self) -> Failure {
        if let Some(future) = self.under_way.take()
            && let Ok(Err(error)) = future.wait_timeout(Duration::ZERO)
        {
            self.last_failure = Some(error.to_string());
        }
        let first = match &self.last_failure {
            Some(failure) => format!("the last checkpoint failed: {failure}\ntidelog: "),
            None => String::new(),
        };
        let (from, durable) = (self.persisted, self.writer.durable_sequence_number());
        Failure::new(format!(
            "{first}the local disk has taken nothing for {:?}: it hangs, or is as full as --local-bytes lets it be, and nothing \
             that went to {} made room (warnings say why); the records from {from} to {durable} are kept: start again with \
             --recover persist",
            self.patience, self.buckets
        ))
    }

    fn begin_checkpoint(&mut self) {
        self.checkpoints.done(self.writer.next_sequence_number().0);
        self.under_way = Some(self.writer.persist_durably(self.persisted));
    }

    /// Waits for the checkpoint that is under way. One that failed is only that: the next one covers its records.
    fn settle_checkpoint(&mut self) -> Result<(), Failure> {
        let Some(mut future) = self.under_way.take() else { return Ok(()) };
        loop {
            let before = self.writer.durable_sequence_number();
            match future.wait_timeout(self.patience) {
                Ok(answer) => return self.checkpoint_ended(answer),
                Err(waiting) => future = waiting,
            }
            // With its records on the local disk it waits for a bucket, which has an end; without, for room.
            let durable = self.writer.durable_sequence_number();
            if durable == before && durable < self.writer.next_sequence_number() {
                return Err(self.no_room());
            }
        }
    }

    fn checkpoint_ended(
        &mut self,
        answer: Result<tidelog::ChangelogHandle, tidelog::PersistError>,
    ) -> Result<(), Failure> {
        match answer {
            Ok(handle) => {
                self.handles.give(&handle)?;
                self.persisted = handle.to();
                self.last_failure = None;
                self.writer.confirm(handle.to()).map_err(Failure::new)
            }
            Err(error) => {
                tracing::warn!("a checkpoint failed, the next one includes its records: {error}");
                self.last_failure = Some(error.to_string());
                Ok(())
            }
        }
    }

    /// Brings everything to the local disk and into handles: at least one, if the input was read to its end.
    fn finish(&mut self, read_all: bool) -> Result<(), Failure> {
        self.sync()?;
        self.settle_checkpoint()?;
        let none = read_all && self.handles.count() == 0;
        if none || self.persisted < self.writer.next_sequence_number() {
            let handle = self.writer.persist_durably(self.persisted).wait().map_err(|error| {
                Failure::new(format!(
                    "{error}; the records from {} on are on the local disk: start again with --recover persist",
                    self.persisted
                ))
            })?;
            self.checkpoint_ended(Ok(handle))?;
        }
        Ok(())
    }

    fn counts(&self) -> String {
        let records = self.writer.next_sequence_number().0;
        format!("{}, {}", show::counted(records, "record"), show::counted(self.handles.count(), "handle"))
    }

    fn summary(&self) -> String {
        let records = show::counted(self.writer.next_sequence_number().0, "record");
        let handles = show::counted(self.handles.count(), "handle");
        // Of several some may have got nothing.
        let buckets: Vec<&str> = self.handles.buckets().collect();
        let buckets = if buckets.is_empty() { self.buckets.clone() } else { buckets.join(", ") };
        format!("{records}, {}, went to {buckets} in {handles}", show::bytes(self.bytes))
    }
}

/// Shows how it goes on, where standard error is a terminal.
fn progress_bar() -> ProgressBar {
    let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr_with_hz(10));
    let style = ProgressStyle::with_template(
        "{spinner} {elapsed_precise}  {binary_bytes}  {binary_bytes_per_sec}  {msg}",
    );
    bar.with_style(style.expect("the template is right"))
}
