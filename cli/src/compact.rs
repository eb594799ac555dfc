//! `tidelog compact`: what handles name, in few large objects, and new handles for it.
//!
//! The work is the library's ([`tidelog::Compactor`]); here handles go in, and new ones come out.

use std::collections::BTreeSet;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use tidelog::{CompactError, Compacted, CompactionPlan, CompactionStats, Compactor, KeyGroupRange};

use crate::patience::Patience;
use crate::write::outputs::Appended;
use crate::{Failure, handles, parse_bytes, parse_key_groups, show};

/// Rewrites what handles name into few large objects, and prints new handles, one for each log, a line as JSON; of a log whose
/// handles were for several ranges of key groups, one for each range.
///
/// The new handles stand for the same records, of the wanted key groups. `read` gives those of each log and key group in the
/// order in which they were written, and the logs in the order of the handles; how key groups follow each other changes. Put
/// the new handles in the place of the old ones, and keep them wherever live handles are kept: a sweep with --live-handles
/// takes objects that none of these names for stray. The old handles and their objects stay as they were.
///
/// All records stay, also those of a key that has newer ones. Neither handles nor objects say what --key was when they were
/// written, or whether a record replaces an older one of its key, and with another key than then records would be lost without
/// a sign. An engine that knows its changes says so with the library: Compactor::last_value_by.
#[derive(clap::Args, Debug)]
pub struct CompactArgs {
    /// Where the new objects go.
    #[arg(value_name = "BUCKET_URL")]
    bucket: String,
    /// Files of handles, one a line as JSON, or one as bytes; - for standard input. Those of one log have to go together: each
    /// change in exactly one of them.
    #[arg(required = true, value_name = "HANDLES")]
    handles: Vec<PathBuf>,
    /// The group: the last folder of the names of the new objects.
    #[arg(long, default_value = "tidelog")]
    group: String,
    /// What the names begin with before the group.
    #[arg(long, value_name = "PREFIX", default_value = "")]
    name_prefix: String,
    /// Writes the new handles to this file first, durably, and prints them then. It must be new or empty.
    #[arg(long = "handles", value_name = "FILE", conflicts_with = "plan")]
    new_handles: Option<PathBuf>,
    /// Only these key groups, which the handles must be for. New handles of other ranges, made from the same old ones, go
    /// together with these.
    #[arg(long, value_name = "FIRST-LAST", value_parser = parse_key_groups)]
    key_groups: Option<KeyGroupRange>,
    /// About how large a part of the new objects is, in bytes (K, M, G).
    #[arg(long, value_name = "BYTES", default_value = "8M", value_parser = parse_bytes)]
    part_bytes: u64,
    /// How much memory may be used, in bytes (K, M, G).
    #[arg(long, value_name = "BYTES", default_value = "256M", value_parser = parse_bytes)]
    memory_bytes: u64,
    /// Says what would be gained, and writes nothing.
    #[arg(long)]
    plan: bool,
}

pub fn run(args: CompactArgs) -> Result<(), Failure> {
    let mut old = Vec::new();
    for path in &args.handles {
        old.extend(handles::read(path).map_err(Failure::new)?);
    }
    if old.is_empty() {
        let names: Vec<String> = args.handles.iter().map(|path| path.display().to_string()).collect();
        return Err(Failure::Usage(format!("{}: there is no handle to compact", names.join(", "))));
    }
    let bytes = |bytes: u64| usize::try_from(bytes).unwrap_or(usize::MAX);
    let mut compactor = Compactor::open(&args.bucket)?
        .group(&args.group)
        .prefix(&args.name_prefix)
        .part_bytes(bytes(args.part_bytes))
        .memory_bytes(bytes(args.memory_bytes));
    if args.plan {
        let plan = compactor.plan(&old, args.key_groups)?;
        io::stdout().lock().write_all(plan_text(&plan).as_bytes())?;
        return Ok(());
    }
    let file = args.new_handles.as_deref().map(new_file).transpose()?;
    let patience = Patience::new(format!("still writing to {}", args.bucket));
    let made = compactor.compact(&old, args.key_groups)?;
    drop(patience);
    give_out(&made, file)?;
    eprintln!("tidelog: {}", stats_text(&made.stats));
    if !made.leftovers.is_empty() {
        eprintln!(
            "tidelog: beside {} something may be left that could not be removed: sweep {}",
            made.leftovers.join(", "),
            args.bucket
        );
    }
    Ok(())
}

/// A file for the new handles. What is in it already stays alone: new handles and old ones do not go together.
fn new_file(path: &Path) -> Result<Appended, Failure> {
    let file = Appended::open(path)?;
    if file.is_empty()? {
        return Ok(file);
    }
    let path = path.display();
    Err(Failure::Usage(format!("{path} holds something: --handles takes a file that is new or empty")))
}

/// Gives the new handles out: to the file durably, then to standard output.
fn give_out(made: &Compacted, file: Option<Appended>) -> Result<(), Failure> {
    let lines: String = made.handles.iter().map(|handle| handle.to_json() + "\n").collect();
    let is_kept = file.is_some();
    if let Some(mut file) = file {
        file.append_durably(lines.as_bytes()).map_err(|failure| match failure {
            Failure::Failed(why) => unnamed(&why, made),
            other => other,
        })?;
    }
    let mut out = io::stdout().lock();
    match out.write_all(lines.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if !is_kept => Err(unnamed(&format!("cannot write the output: {error}"), made)),
        // Whoever has the file can do without.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        Err(error) => {
            Err(Failure::new(format!("cannot write the output: {error}; the file has the new handles")))
        }
        Ok(()) => Ok(()),
    }
}

/// The new objects are there, and not all their handles could be given out.
fn unnamed(why: &str, made: &Compacted) -> Failure {
    let objects = made.handles.iter().flat_map(|handle| handle.objects());
    let names: BTreeSet<String> = objects.map(|(bucket, name)| format!("{name} in {bucket}")).collect();
    if names.is_empty() {
        return Failure::new(why);
    }
    Failure::new(format!(
        "{why}; these new objects are complete, but not all their handles were given out: {}; compact again, and remove these \
         with `tidelog sweep`, their --group, and the --live-handles",
        Vec::from_iter(names).join(", ")
    ))
}

impl From<CompactError> for Failure {
    fn from(error: CompactError) -> Failure {
        match error {
            CompactError::Option(_) => Failure::Usage(error.to_string()),
            CompactError::Store(error) => error.into(),
            error => Failure::new(error),
        }
    }
}

fn plan_text(plan: &CompactionPlan) -> String {
    let advice = if plan.is_worthwhile() { "worthwhile" } else { "not worthwhile" };
    format!(
        "now: {} of {}; a restore of all makes {}\nthen: {} of about {}; a restore of all makes {}\n{advice}\n",
        show::counted(plan.objects, "object"),
        show::bytes(plan.object_bytes),
        requests(plan.objects, plan.runs),
        show::counted(plan.objects_after, "object"),
        show::bytes(plan.surviving_bytes),
        requests(plan.objects_after, plan.runs_after),
    )
}

/// A footer for each object, a directory and a range for each run.
fn requests(objects: u64, runs: u64) -> String {
    format!("about {}", show::counted(objects + 2 * runs, "request"))
}

fn stats_text(stats: &CompactionStats) -> String {
    let copied = match stats.bytes_copied {
        0 => String::new(),
        bytes => format!(", {} of them copied by the bucket", show::bytes(bytes)),
    };
    format!(
        "{} in {}, {}{copied}; {} read by {}",
        show::counted(stats.runs, "run"),
        show::counted(stats.objects, "object"),
        show::bytes(stats.bytes_written),
        show::bytes(stats.bytes_read),
        show::counted(stats.requests, "request"),
    )
}
