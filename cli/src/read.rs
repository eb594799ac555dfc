//! `tidelog read`: handles in, records out.

use std::io::{self, BufWriter, Write};
use std::path::PathBuf;

use tidelog::{Change, ChangelogHandle, ChangelogReader, KeyGroupRange, LocalLogs, LogId, Restore};
use tidelog_upload::block_on_timeout;

use crate::input::Framing;
use crate::patience::PatienceArgs;
use crate::places::check_bucket;
use crate::{Failure, handles, parse_key_groups};

/// Prints the records that handles stand for, to standard output; or those that local directories still hold.
///
/// Records of one key group keep the order in which they were written; different key groups are not ordered among each
/// other. Metadata comes first. Every byte printed was verified.
#[derive(clap::Args, Debug)]
pub struct ReadArgs {
    /// Only these key groups, which the handles must be for. Without it: all that they are for.
    #[arg(long, value_name = "FIRST-LAST", value_parser = parse_key_groups)]
    pub(crate) key_groups: Option<KeyGroupRange>,
    /// Only changes from this sequence number on.
    #[arg(long, value_name = "NUMBER", default_value_t = 0)]
    pub(crate) from: u64,
    /// Only this log, by its id.
    #[arg(long, value_name = "ID")]
    pub(crate) log: Option<LogId>,
    /// How records follow one another in the output.
    #[arg(long, value_enum, default_value = "lines")]
    pub(crate) framing: Framing,
    /// Puts log, sequence number and key group (- for metadata) before each record, each with a tab behind it.
    #[arg(long)]
    pub(crate) with_meta: bool,
    /// Reads what this local directory still holds of its logs, and the rest from their objects, instead of handles.
    /// Nothing in the directory is changed. May be given more than once.
    #[arg(long = "dir", visible_alias = "directory", value_name = "DIR", conflicts_with = "handles")]
    pub(crate) dirs: Vec<PathBuf>,
    #[command(flatten)]
    pub(crate) patience: PatienceArgs,
    /// Files of handles, one a line as JSON, or one as bytes; - for standard input.
    #[arg(required_unless_present = "dirs", value_name = "HANDLES")]
    pub(crate) handles: Vec<PathBuf>,
}

pub fn run(args: ReadArgs) -> Result<(), Failure> {
    let mut out = Output {
        writer: BufWriter::with_capacity(256 << 10, io::stdout().lock()),
        framing: args.framing,
        with_meta: args.with_meta,
        patience: args.patience,
        scratch: Vec::new(),
        records: 0,
    };
    let wanted = |log: LogId| args.log.is_none_or(|only| only == log);
    if args.dirs.is_empty() {
        let mut all = Vec::new();
        for path in &args.handles {
            all.extend(handles::read(path).map_err(Failure::new)?);
        }
        all.retain(|handle| wanted(handle.log()));
        for (bucket, _) in all.iter().flat_map(|handle| handle.objects()) {
            check_bucket(bucket).map_err(Failure::new)?;
        }
        let restore = Restore::open(&all).map_err(Failure::new)?;
        let reader = match args.key_groups {
            Some(key_groups) => restore.reader(key_groups).map_err(Failure::new)?,
            None => restore.reader_of_all(),
        };
        out.print_all(reader, args.from, &buckets_of(&all))?;
    }
    let key_groups = args.key_groups.unwrap_or(KeyGroupRange::ALL);
    for dir in &args.dirs {
        let local = LocalLogs::open(dir).map_err(Failure::new)?;
        for log in local.logs().iter().filter(|log| wanted(log.log())) {
            let reader = log.read(key_groups).map_err(Failure::new)?;
            let place = format!("the buckets of log {} in {}", log.log(), dir.display());
            out.print_all(reader, args.from, &place)?;
        }
    }
    out.writer.flush()?;
    if out.records == 0 {
        eprintln!("tidelog: 0 records: {}", why_none(&args));
    }
    Ok(())
}

/// The buckets that handles name, each once.
fn buckets_of(handles: &[ChangelogHandle]) -> String {
    let mut buckets: Vec<&str> =
        handles.iter().flat_map(|handle| handle.objects()).map(|(bucket, _)| bucket).collect();
    buckets.sort_unstable();
    buckets.dedup();
    buckets.join(", ")
}

/// What may be the reason that nothing was found.
fn why_none(args: &ReadArgs) -> &'static str {
    if args.key_groups.is_some() || args.log.is_some() || args.from > 0 {
        "no change matches --key-groups, --log and --from"
    } else if args.dirs.is_empty() {
        "the handles stand for no change"
    } else {
        "all changes in the directories are truncated, or none was ever made durable"
    }
}

struct Output<W: Write> {
    writer: W,
    framing: Framing,
    with_meta: bool,
    patience: PatienceArgs,
    scratch: Vec<u8>,
    /// How many were printed.
    records: u64,
}

impl<W: Write> Output<W> {
    /// `place` is where changes come from.
    fn print_all(&mut self, mut changes: ChangelogReader, from: u64, place: &str) -> Result<(), Failure> {
        loop {
            let come = self.patience.wait_for(place, |time| {
                // Each request is made when what it needs to know has come.
                block_on_timeout(changes.next_batch(), time).ok_or_else(|| changes.stats().requests)
            });
            let batch = match come.and_then(|batch| batch.map_err(Failure::new)) {
                Ok(Some(batch)) => batch,
                Ok(None) => return Ok(()),
                Err(failure) => {
                    // What was printed before is right; whoever reads it may have it.
                    self.writer.flush()?;
                    return Err(failure);
                }
            };
            for change in batch.iter().filter(|change| change.number.0 >= from) {
                self.print(change)?;
            }
        }
    }

    fn print(&mut self, change: Change<&[u8]>) -> Result<(), Failure> {
        let Change { log, number, key_group, value } = change;
        self.records += 1;
        self.scratch.clear();
        if self.with_meta {
            let group = key_group.map_or("-".to_owned(), |group| group.to_string());
            write!(self.scratch, "{log}\t{number}\t{group}\t")?;
        }
        match self.framing {
            Framing::Lines => {
                if value.contains(&b'\n') {
                    self.writer.flush()?;
                    return Err(Failure::new(format!(
                        "change {number} of log {log} holds a newline and would look like two records: \
                         use --framing length-prefixed"
                    )));
                }
                self.writer.write_all(&self.scratch)?;
                self.writer.write_all(value)?;
                self.writer.write_all(b"\n")?;
            }
            Framing::LengthPrefixed => {
                let len = u32::try_from(self.scratch.len() + value.len())
                    .map_err(|_| Failure::new(format!("change {number} of log {log} has 4 GiB or more")))?;
                self.writer.write_all(&len.to_le_bytes())?;
                self.writer.write_all(&self.scratch)?;
                self.writer.write_all(value)?;
            }
        }
        Ok(())
    }
}
