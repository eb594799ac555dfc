//! One life of the job: a process that a test starts, listens to and kills, and what that process does.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::File;
use std::io::{BufRead as _, BufReader};
use std::os::unix::process::ExitStatusExt as _;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use metrics::{Counter, Gauge, Histogram, Key, KeyName, Metadata, Recorder, SharedString, Unit};
use tidelog::{Changelog, Options, RecoveredLog};
use tidelog_testing::{ACCESS_KEY, SECRET_KEY};

use crate::job::{self, Config, Failure};
use crate::{BUCKETS, NAME};

/// Where the process finds its plan.
pub const PLAN: &str = "TIDELOG_NEXMARK_PLAN";

/// What the process is to do.
#[derive(Clone, Debug)]
pub struct Plan {
    /// `run` the job; or only `open` what it left, or `discard` that, until the input ends.
    pub what: String,
    pub endpoint: String,
    pub local: PathBuf,
    pub checkpoints: PathBuf,
    pub local_bytes: u64,
    pub threads: u16,
    pub events: u64,
    pub events_per_second: u64,
    pub materialize_every: u64,
    pub declined_percent: u64,
    pub seed: u64,
}

impl Plan {
    fn to_text(&self) -> String {
        let (local, checkpoints) = (self.local.display(), self.checkpoints.display());
        let mut text = format!("{}\n{}\n{local}\n{checkpoints}", self.what, self.endpoint);
        for number in [
            self.local_bytes,
            self.threads.into(),
            self.events,
            self.events_per_second,
            self.materialize_every,
            self.declined_percent,
            self.seed,
        ] {
            write!(text, "\n{number}").expect("writing to a string succeeds");
        }
        text
    }

    fn from_text(text: &str) -> Plan {
        let mut lines = text.lines();
        let mut next = || lines.next().expect("a plan has all lines").to_owned();
        Plan {
            what: next(),
            endpoint: next(),
            local: next().into(),
            checkpoints: next().into(),
            local_bytes: next().parse().unwrap(),
            threads: next().parse().unwrap(),
            events: next().parse().unwrap(),
            events_per_second: next().parse().unwrap(),
            materialize_every: next().parse().unwrap(),
            declined_percent: next().parse().unwrap(),
            seed: next().parse().unwrap(),
        }
    }

    fn options(&self) -> Options {
        let url = |bucket: &str| {
            format!("s3://{bucket}/state?endpoint={}&region=us-east-1&sparse=true", self.endpoint)
        };
        let options = Options::new(url(BUCKETS[0]), &self.local)
            .segment_bytes(1 << 20)
            .local_bytes(self.local_bytes)
            .block_bytes(64 << 10)
            .lane_bytes(256 << 10)
            .append_wait_max(Duration::from_millis(100));
        BUCKETS[1..].iter().fold(options, |options, bucket| options.add_bucket(url(bucket)))
    }
}

/// The value of `name=value` in a line.
pub fn field<'a>(line: &'a str, name: &str) -> &'a str {
    let value = line.split(' ').find_map(|word| word.strip_prefix(name)?.strip_prefix('='));
    value.unwrap_or_else(|| panic!("no {name} in {line}"))
}

/// The process.
pub struct Life {
    child: Child,
    lines: Receiver<String>,
    said: Vec<String>,
    errors: tempfile::NamedTempFile,
}

impl Life {
    pub fn start(plan: &Plan) -> Life {
        let errors = tempfile::NamedTempFile::new().unwrap();
        let mut command = Command::new(std::env::current_exe().unwrap());
        for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("AWS_")) {
            command.env_remove(name);
        }
        let mut child = command
            .args(["--exact", NAME, "--nocapture"])
            .env(PLAN, plan.to_text())
            .env("AWS_ACCESS_KEY_ID", ACCESS_KEY)
            .env("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
            .env("AWS_EC2_METADATA_DISABLED", "true")
            .env("AWS_CONFIG_FILE", "/dev/null")
            .env("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(File::create(errors.path()).unwrap())
            .spawn()
            .unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        let (line, lines) = mpsc::channel();
        std::thread::spawn(move || {
            output.lines().map_while(Result::ok).all(|text| line.send(text).is_ok());
        });
        Life { child, lines, said: Vec::new(), errors }
    }

    /// Listens until the process says something wanted.
    ///
    /// # Panics
    /// It does not within `timeout`, or ends.
    pub fn until(&mut self, what: &str, timeout: Duration, wanted: impl Fn(&str) -> bool) -> String {
        let deadline = Instant::now() + timeout;
        loop {
            match self.lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(line) => {
                    self.said.push(line.clone());
                    if wanted(&line) {
                        return line;
                    }
                }
                Err(error) => {
                    let _ = self.child.kill();
                    let how =
                        if error == RecvTimeoutError::Timeout { "takes too long" } else { "will not be" };
                    panic!("{what}: {how}\n{}", self.story());
                }
            }
        }
    }

    /// Kills the process. Gives all that it said.
    ///
    /// # Panics
    /// It had ended by itself.
    pub fn kill(mut self) -> Vec<String> {
        self.child.kill().unwrap();
        let status = self.child.wait().unwrap();
        self.said.extend(self.lines.iter());
        assert_eq!(status.signal(), Some(9), "{status}\n{}", self.story());
        self.whole_lines()
    }

    /// Kills the process after `timeout`. Gives all that it said, or the story if it failed before.
    ///
    /// # Panics
    /// It ended well.
    pub fn end_or_kill(mut self, timeout: Duration) -> Result<Vec<String>, String> {
        let deadline = Instant::now() + timeout;
        while Instant::now() < deadline {
            if let Some(status) = self.child.try_wait().unwrap() {
                self.said.extend(self.lines.iter());
                assert!(!status.success(), "{}", self.story());
                return Err(self.story());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(self.kill())
    }

    /// Ends the input, and waits until the process has ended well. Gives all that it said.
    ///
    /// # Panics
    /// It ended otherwise.
    pub fn end(mut self) -> Vec<String> {
        drop(self.child.stdin.take());
        let status = self.child.wait().unwrap();
        self.said.extend(self.lines.iter());
        assert!(status.success(), "{status}\n{}", self.story());
        self.whole_lines()
    }

    /// A line that the kill cut off has no end.
    fn whole_lines(self) -> Vec<String> {
        self.said.into_iter().filter_map(|line| line.strip_suffix(" .").map(str::to_owned)).collect()
    }

    fn story(&self) -> String {
        let errors = std::fs::read_to_string(self.errors.path()).unwrap_or_default();
        format!("it said:\n{}\n{errors}", self.said.join("\n"))
    }
}

/// The process itself: does what the plan says, and ends.
pub fn run(plan: &str) -> ! {
    let plan = Plan::from_text(plan);
    // What the test harness says is on a line of its own.
    println!();
    let result = match plan.what.as_str() {
        "run" => run_job(&plan),
        what => open_only(&plan, what == "discard"),
    };
    if let Err(error) = &result {
        eprintln!("the process failed: {error}");
    }
    std::process::exit(i32::from(result.is_err()));
}

fn run_job(plan: &Plan) -> Result<(), Failure> {
    let counters = Counters::default();
    metrics::set_global_recorder(counters.clone())?;
    let config = Config {
        options: plan.options(),
        checkpoints: plan.checkpoints.clone(),
        threads: plan.threads,
        events: plan.events,
        rate: Some(plan.events_per_second),
        checkpoint_pause: Duration::from_millis(60),
        materialize_every: plan.materialize_every,
        declined_percent: plan.declined_percent,
        seed: plan.seed,
    };
    job::run(&config, &|report| {
        let mut line = report.to_string();
        for (name, metric) in [
            ("high_water", "tidelog_local_high_water_total"),
            ("no_space", "tidelog_segment_prepare_failures_total"),
        ] {
            write!(line, " {name}={}", counters.get(metric)).expect("writing to a string succeeds");
        }
        println!("{line} .");
    })
}

/// Opens what the job has left, discards all of it if so told, and waits until the input ends: meanwhile the library
/// removes from the buckets what nobody needs.
fn open_only(plan: &Plan, discard: bool) -> Result<(), Failure> {
    let changelog = Changelog::open(plan.options())?;
    if discard {
        changelog.recovered().iter().for_each(RecoveredLog::discard);
    }
    let mut input = String::new();
    std::io::stdin().read_line(&mut input)?;
    changelog.close(Duration::from_secs(60))?;
    if discard {
        let left = Changelog::open(plan.options())?.recovered().len();
        assert_eq!(left, 0, "logs are left that were discarded");
    }
    Ok(())
}

/// Counts what the library counts.
#[derive(Clone, Default)]
struct Counters(Arc<Mutex<BTreeMap<String, Arc<AtomicU64>>>>);

impl Counters {
    fn counter(&self, name: &str) -> Arc<AtomicU64> {
        Arc::clone(self.0.lock().unwrap().entry(name.to_owned()).or_default())
    }

    fn get(&self, name: &str) -> u64 {
        self.counter(name).load(Ordering::Relaxed)
    }
}

impl Recorder for Counters {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        Counter::from_arc(self.counter(key.name()))
    }

    fn register_gauge(&self, _: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::noop()
    }

    fn register_histogram(&self, _: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::noop()
    }
}
