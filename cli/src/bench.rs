//! `tidelog bench`: what this machine reaches.
//!
//! The load is in `bench/load.rs`, what is said of it in `bench/report.rs` and `bench/page.rs`.

mod histogram;
mod load;
mod page;
mod report;

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use tidelog::Changelog;

use self::load::{Outcome, Plan};
use self::report::Conditions;
use crate::metrics::MetricsArgs;
use crate::places::{Survives, Tuning};
use crate::{Every, Failure, parse_bytes, parse_every, parse_time, show};

/// How long an append waits for room before it looks whether the time is over.
const APPEND_WAIT_MAX: Duration = Duration::from_millis(200);
const CLOSE_WAIT_MAX: Duration = Duration::from_secs(60);
/// Other load is looked at for so long before.
const LOOK_AROUND: Duration = Duration::from_millis(300);

/// Measures appends, durable writes and checkpoints on this machine.
///
/// Shows progress, then a table of throughput and latency percentiles. Figures hold only for a machine that is
/// otherwise idle. What was persisted is dropped at once, so that no disk fills up. The first checkpoint is taken at once.
/// After the end those under way are waited for, for a minute at most, and 10 s if one has failed. Exit code 1 if a checkpoint
/// failed, or was not complete by then.
#[derive(clap::Args, Debug)]
pub struct BenchArgs {
    /// How many threads append.
    #[arg(long, value_name = "NUMBER", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(crate) threads: u32,
    /// The length of a record's value in bytes (K, M, G); at most 4M.
    #[arg(long, value_name = "BYTES", default_value = "256", value_parser = parse_record_bytes)]
    pub(crate) record_bytes: u64,
    /// How long to measure, in seconds.
    #[arg(long, value_name = "SECONDS", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub(crate) seconds: u64,
    /// Takes a checkpoint after so many records of a thread or so much time.
    #[arg(long, value_name = "RECORDS|TIME", default_value = "1s", value_parser = parse_every)]
    pub(crate) checkpoint_every: Every,
    /// Each thread syncs after so much time.
    #[arg(long, value_name = "TIME", default_value = "20ms", value_parser = parse_time)]
    pub(crate) sync_every: Duration,
    /// A local directory for segments; give one for each disk. A temporary one if there is none.
    #[arg(long = "dir", value_name = "DIR")]
    pub(crate) dirs: Vec<PathBuf>,
    /// Where checkpoints go; may be given more than once. A temporary local directory if not given.
    #[arg(long = "bucket", value_name = "URL")]
    pub(crate) buckets: Vec<String>,
    #[command(flatten)]
    pub(crate) metrics: MetricsArgs,
    #[command(flatten)]
    pub(crate) tuning: Tuning,
    /// Prints JSON instead of a table.
    #[arg(long)]
    pub(crate) json: bool,
    /// Writes a page with plots to this file.
    #[arg(long, value_name = "FILE")]
    pub(crate) html: Option<PathBuf>,
}

fn parse_record_bytes(text: &str) -> Result<u64, String> {
    match parse_bytes(text)? {
        bytes @ 0..=0x40_0000 => Ok(bytes),
        _ => Err("at most 4M".to_owned()),
    }
}

pub fn run(args: BenchArgs) -> Result<(), Failure> {
    let plan = Plan {
        threads: args.threads,
        record_bytes: args.record_bytes as usize,
        time: Duration::from_secs(args.seconds),
        checkpoint_every: args.checkpoint_every,
        sync_every: args.sync_every,
    };
    // Opened first: what cannot be written should be known before the measuring, not after.
    let html = args.html.as_deref().map(create).transpose()?;
    let temporary = Temporary::new(&args)?;
    let (dirs, buckets) = temporary.places(&args);
    args.metrics.serve()?;
    let options = args.tuning.options(&buckets, &dirs).append_wait_max(APPEND_WAIT_MAX);
    let changelog = Changelog::open(options)?;
    let busy_share = load::busy_share(LOOK_AROUND);
    let conditions = Conditions {
        plan,
        engines: changelog.engines(),
        durability: match args.tuning.durability {
            Survives::Power => "the loss of power",
            Survives::Process => "the end of the process",
        },
        directories: dirs.iter().map(|dir| dir.display().to_string()).collect(),
        bucket: buckets.join(", "),
        kernel: format!("Linux {}", rustix::system::uname().release().to_string_lossy()),
        processors: std::thread::available_parallelism().map_or(1, usize::from),
        busy_share,
        clock_nanos: load::clock_cost().as_nanos() as u64,
    };
    let bar = progress_bar(plan.time);
    let record_bytes = plan.record_bytes as u64;
    let outcome = load::run(&changelog, plan, |sample| {
        let seconds = sample.at.as_secs_f64().max(1e-9);
        let mb_per_second = (sample.records * record_bytes) as f64 / seconds / 1e6;
        bar.set_position(sample.at.as_millis() as u64);
        bar.set_message(format!("{mb_per_second:.0} MB/s, {}", show::counted(sample.records, "record")));
    });
    bar.finish_and_clear();
    let outcome = outcome?;
    let problem = problem(&outcome, &conditions.bucket);
    // What the buckets do not take may have no room on the disk: that is said below.
    let close_wait_max = if problem.is_some() { Duration::ZERO } else { CLOSE_WAIT_MAX };
    let closed = changelog.close(close_wait_max);
    if problem.is_none() {
        closed.map_err(Failure::new)?;
    }
    let output = if args.json {
        format!("{:#}\n", report::to_json(&conditions, &outcome))
    } else {
        report::to_text(&conditions, &outcome)
    };
    io::stdout().lock().write_all(output.as_bytes())?;
    if let (Some(mut file), Some(path)) = (html, &args.html) {
        let page = page::render(&conditions, &outcome)
            .map_err(|error| Failure::new(format!("cannot draw the page: {error}")))?;
        file.write_all(page.as_bytes())
            .map_err(|error| Failure::new(format!("cannot write {}: {error}", path.display())))?;
        eprintln!("tidelog: the page is {}", path.display());
    }
    temporary.remove()?;
    problem.map_or(Ok(()), |problem| Err(Failure::Failed(problem)))
}

/// What went wrong with the checkpoints, if anything did.
fn problem(outcome: &Outcome, buckets: &str) -> Option<String> {
    let checkpoints = |count| show::counted(count, "checkpoint");
    let late = match outcome.late_persists {
        0 => None,
        late => Some(format!("{} had no answer long after the end", checkpoints(late))),
    };
    match (outcome.failed_persists, late) {
        (0, None) => None,
        (0, Some(late)) => Some(format!(
            "{late}: {buckets} takes nothing, or far less than was appended; warnings above say what it answered, and \
             `tidelog doctor --bucket` what is wrong with it"
        )),
        (failed, late) => Some(format!(
            "{} failed, the last one because: {}{}",
            checkpoints(failed),
            outcome.last_failure.as_deref().unwrap_or("its thread ended"),
            late.map_or(String::new(), |late| format!("; moreover {late}"))
        )),
    }
}

fn create(path: &Path) -> Result<fs::File, Failure> {
    fs::File::create(path).map_err(|error| Failure::new(format!("cannot create {}: {error}", path.display())))
}

fn progress_bar(time: Duration) -> ProgressBar {
    let target = ProgressDrawTarget::stderr_with_hz(10);
    let bar = ProgressBar::with_draw_target(Some(time.as_millis() as u64), target);
    let style = ProgressStyle::with_template("{elapsed_precise} [{bar:40}] {msg}");
    bar.with_style(style.expect("the template is right").progress_chars("=> "))
}

/// The directory of what was not given. Removed at the end, however that comes.
struct Temporary {
    root: Option<PathBuf>,
}

impl Temporary {
    fn new(args: &BenchArgs) -> Result<Temporary, Failure> {
        if !args.dirs.is_empty() && !args.buckets.is_empty() {
            return Ok(Temporary { root: None });
        }
        let root = std::env::temp_dir().join(format!("tidelog-bench-{}", std::process::id()));
        fs::create_dir(&root)
            .map_err(|error| Failure::new(format!("cannot create {}: {error}", root.display())))?;
        Ok(Temporary { root: Some(root) })
    }

    fn places(&self, args: &BenchArgs) -> (Vec<PathBuf>, Vec<String>) {
        let root = self.root.clone().unwrap_or_default();
        let dirs = if args.dirs.is_empty() { vec![root.join("local")] } else { args.dirs.clone() };
        let buckets = match &args.buckets[..] {
            [] => vec![format!("file://{}", root.join("bucket").display())],
            given => given.to_vec(),
        };
        (dirs, buckets)
    }

    fn remove(mut self) -> Result<(), Failure> {
        match self.root.take() {
            Some(root) => fs::remove_dir_all(&root)
                .map_err(|error| Failure::new(format!("cannot remove {}: {error}", root.display()))),
            None => Ok(()),
        }
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        if let Some(root) = &self.root {
            let _ = fs::remove_dir_all(root);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn late_checkpoints_are_a_problem_but_failed_ones_come_first() {
        let mut outcome = Outcome::default();
        assert_eq!(problem(&outcome, "s3://b"), None);
        outcome.late_persists = 1;
        let late = problem(&outcome, "s3://b").unwrap();
        assert!(
            late.starts_with("1 checkpoint had no answer long after the end: s3://b takes nothing"),
            "{late}"
        );
        (outcome.failed_persists, outcome.last_failure) = (2, Some("denied".to_owned()));
        let failed = problem(&outcome, "s3://b").unwrap();
        assert_eq!(
            failed,
            "2 checkpoints failed, the last one because: denied; moreover 1 checkpoint had no answer long after the end"
        );
    }
}
