//! What the benches share: arguments, the conditions of a run, medians and ratios, the report as text and as JSON.
//!
//! What is measured, and against which floor, is the business of each bench. No figure fails a run: a machine that is not
//! quiet says nothing about the program, so the report says whether its figures are valid instead.
#![allow(dead_code, reason = "each bench compiles this module and uses a part of it")]

use std::fmt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};
use serde_json::{Map, Value, json};

/// Below this share of idle time, before or after, the figures of a run are not valid.
const IDLE_PERCENT_MIN: f64 = 95.0;
/// The bench's own files are removed and trimmed on the disk meanwhile; what is asked for is what else runs.
const SETTLE: Duration = Duration::from_secs(3);

/// One run of one bench.
pub struct Bench {
    name: &'static str,
    smoke: bool,
    json: bool,
    arguments: Vec<String>,
    started_at: Instant,
    needs_quiet: bool,
    before: Load,
    at_start: Jiffies,
    tables: Vec<Table>,
    targets: Vec<Target>,
    notes: Vec<String>,
}

/// An option of a bench, `--name VALUE`.
pub type Help = (&'static str, &'static str);

impl Bench {
    /// Reads the arguments and looks how busy the machine is.
    ///
    /// Without cargo's `--bench`, as under `cargo test`, or with `--smoke`, everything is small and nothing is measured.
    pub fn start(name: &'static str, about: &str, options: &[Help]) -> Bench {
        let arguments: Vec<String> = std::env::args().skip(1).collect();
        let given = |flag: &str| arguments.iter().any(|argument| argument == flag);
        if given("--help") || given("-h") {
            println!("{about}\n\n  --json            print JSON, and progress elsewhere");
            println!("  --smoke           show that it works, measure nothing");
            for (option, help) in options {
                println!("  {option:<16}  {help}");
            }
            std::process::exit(0);
        }
        let known = |argument: &str| {
            ["--json", "--smoke", "--bench"].contains(&argument)
                || options.iter().any(|(option, _)| option.split(' ').next() == Some(argument))
        };
        if let Some(unknown) = arguments.iter().find(|argument| argument.starts_with('-') && !known(argument))
        {
            eprintln!("{name}: there is no option {unknown}; --help lists them");
            std::process::exit(2);
        }
        let smoke = !given("--bench") || given("--smoke");
        let json = given("--json");
        let before = Load::measure(smoke);
        let bench = Bench {
            name,
            smoke,
            json,
            arguments,
            started_at: Instant::now(),
            needs_quiet: true,
            before,
            at_start: Jiffies::read(),
            tables: Vec::new(),
            targets: Vec::new(),
            notes: Vec::new(),
        };
        if !smoke && before.idle_percent < IDLE_PERCENT_MIN {
            bench.progress(&format!(
                "WARNING: the machine is only {before} before the run; figures will not be valid"
            ));
        }
        bench
    }

    /// For counts and sizes, which are the same on a busy machine.
    pub fn counts_only(mut self) -> Bench {
        self.needs_quiet = false;
        self
    }

    /// Whether this run only shows that the bench works.
    pub fn smoke(&self) -> bool {
        self.smoke
    }

    /// `small` in a smoke run, else `full`.
    pub fn size<T>(&self, full: T, small: T) -> T {
        if self.smoke { small } else { full }
    }

    /// The number after an option, or `default`. Ends the process if there is none.
    pub fn number(&self, option: &str, default: u64) -> u64 {
        let Some(value) = self.value(option) else { return default };
        value.parse().unwrap_or_else(|_| {
            eprintln!("{}: {option} takes a number, not {value:?}", self.name);
            std::process::exit(2);
        })
    }

    /// The text after an option.
    pub fn text(&self, option: &str) -> Option<String> {
        self.value(option).map(str::to_owned)
    }

    fn value(&self, option: &str) -> Option<&str> {
        let at = self.arguments.iter().position(|argument| argument == option)?;
        Some(self.arguments.get(at + 1).map_or("", String::as_str))
    }

    /// An empty directory for the run, below `--dir` or the build directory, which is on a disk as a rule.
    pub fn directory(&self) -> ScratchDir {
        let base = self
            .value("--dir")
            .map(PathBuf::from)
            .or_else(|| option_env!("CARGO_TARGET_TMPDIR").map(PathBuf::from))
            .unwrap_or_else(|| PathBuf::from("target"));
        let path = base.join(format!("bench-{}-{}", self.name, std::process::id()));
        std::fs::create_dir_all(&path)
            .unwrap_or_else(|error| panic!("cannot make the directory {}: {error}", path.display()));
        let path = path.canonicalize().expect("it was just made");
        ScratchDir { path }
    }

    /// Tells the person who waits.
    pub fn progress(&self, text: &str) {
        eprintln!("[{:>5.1} s] {text}", self.started_at.elapsed().as_secs_f64());
    }

    /// A line below the tables.
    pub fn note(&mut self, text: impl Into<String>) {
        self.notes.push(text.into());
    }

    /// Adds a table to the report.
    pub fn table(&mut self, table: Table) {
        self.tables.push(table);
    }

    /// Adds a figure that has a limit. A smoke run judges none.
    pub fn target(&mut self, what: impl Into<String>, value: f64, limit: Limit) {
        self.targets.push(Target { what: what.into(), value, limit });
    }

    /// Looks at the machine again, and prints the report.
    pub fn finish(self) {
        let busy = Jiffies::read().since(self.at_start);
        if !self.smoke {
            std::thread::sleep(SETTLE);
        }
        let after = Load::measure(self.smoke);
        let quiet = self.before.idle_percent.min(after.idle_percent) >= IDLE_PERCENT_MIN;
        let valid = !self.smoke && (quiet || !self.needs_quiet);
        let report = Report { bench: &self, after, steal_percent: busy.percent(busy.steal), valid, quiet };
        if self.json {
            println!("{:#}", report.to_json());
        } else {
            println!("{report}");
        }
    }
}

struct Report<'a> {
    bench: &'a Bench,
    after: Load,
    steal_percent: f64,
    valid: bool,
    quiet: bool,
}

impl Report<'_> {
    fn to_json(&self) -> Value {
        let judged = self.bench.targets.iter().filter(|_| !self.bench.smoke);
        let targets: Vec<Value> = judged.map(Target::to_json).collect();
        json!({
            "bench": self.bench.name,
            "smoke": self.bench.smoke,
            "valid": self.valid,
            "quiet": self.quiet,
            "conditions": {
                "kernel": kernel(),
                "processor": processor(),
                "cores": cores(),
                "idle_percent_before": self.bench.before.idle_percent,
                "idle_percent_after": self.after.idle_percent,
                "steal_percent_during": self.steal_percent,
                "seconds": self.bench.started_at.elapsed().as_secs_f64(),
            },
            "tables": self.bench.tables.iter().map(Table::to_json).collect::<Vec<_>>(),
            "targets": targets,
            "notes": self.bench.notes,
        })
    }
}

impl fmt::Display for Report<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Report { bench, after, steal_percent, valid, quiet } = self;
        for table in &bench.tables {
            writeln!(f, "\n{table}")?;
        }
        for note in &bench.notes {
            writeln!(f, "{note}")?;
        }
        writeln!(f)?;
        for target in bench.targets.iter().filter(|_| !bench.smoke) {
            writeln!(f, "{target}")?;
        }
        writeln!(
            f,
            "\nLinux {}, {} × {}, {} before and {after} after, {steal_percent:.1} % stolen, {:.0} s",
            kernel(),
            cores(),
            processor(),
            bench.before,
            bench.started_at.elapsed().as_secs_f64(),
        )?;
        if bench.smoke {
            write!(f, "SMOKE RUN: the figures mean nothing; run it by `cargo bench --bench {}`", bench.name)?;
        } else if !valid {
            write!(
                f,
                "NOT VALID: below {IDLE_PERCENT_MIN} % idle before or after; stop what else runs and measure again"
            )?;
        } else if !quiet {
            write!(
                f,
                "Below {IDLE_PERCENT_MIN} % idle before or after: counts and sizes hold, times do not"
            )?;
        }
        Ok(())
    }
}

/// A bound that a figure should keep.
#[derive(Clone, Copy)]
pub enum Limit {
    AtMost(f64),
    AtLeast(f64),
}

struct Target {
    what: String,
    value: f64,
    limit: Limit,
}

impl Target {
    fn is_met(&self) -> bool {
        match self.limit {
            Limit::AtMost(limit) => self.value <= limit,
            Limit::AtLeast(limit) => self.value >= limit,
        }
    }

    fn to_json(&self) -> Value {
        let (kind, limit) = match self.limit {
            Limit::AtMost(limit) => ("at_most", limit),
            Limit::AtLeast(limit) => ("at_least", limit),
        };
        json!({ "what": self.what, "value": self.value, kind: limit, "met": self.is_met() })
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (sign, limit) = match self.limit {
            Limit::AtMost(limit) => ('≤', limit),
            Limit::AtLeast(limit) => ('≥', limit),
        };
        let met = if self.is_met() { "met   " } else { "MISSED" };
        write!(f, "{met}  {:>8}  {sign} {limit:<6}  {}", figure(self.value), self.what)
    }
}

/// A table of the report: names of columns with their units last, and rows.
pub struct Table {
    title: String,
    columns: &'static [&'static str],
    rows: Vec<Vec<Value>>,
}

impl Table {
    pub fn new(title: impl Into<String>, columns: &'static [&'static str]) -> Table {
        Table { title: title.into(), columns, rows: Vec::new() }
    }

    /// Adds a row, one value for each column.
    pub fn row<const N: usize>(&mut self, row: [Value; N]) {
        assert_eq!(N, self.columns.len(), "a value for each column of {:?}", self.title);
        self.rows.push(row.into());
    }

    fn to_json(&self) -> Value {
        let row = |row: &Vec<Value>| {
            let cells = self.columns.iter().map(|column| (*column).to_owned()).zip(row.iter().cloned());
            Value::Object(Map::from_iter(cells))
        };
        json!({ "title": self.title, "rows": self.rows.iter().map(row).collect::<Vec<_>>() })
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = |value: &Value| match value {
            Value::String(text) => text.clone(),
            Value::Number(number) if number.is_f64() => figure(number.as_f64().unwrap_or(f64::NAN)),
            Value::Null => "–".to_owned(),
            other => other.to_string(),
        };
        let head = self.columns.iter().map(|column| column.replace('_', " ")).collect();
        let rows: Vec<Vec<String>> =
            std::iter::once(head).chain(self.rows.iter().map(|row| row.iter().map(text).collect())).collect();
        let width = |column: usize| {
            rows.iter().map(|row: &Vec<String>| row[column].chars().count()).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..self.columns.len()).map(width).collect();
        write!(f, "{}", self.title)?;
        for row in rows {
            writeln!(f)?;
            for (cell, width) in row.iter().zip(&widths) {
                write!(f, "  {cell:>width$}")?;
            }
        }
        Ok(())
    }
}

/// Three significant digits.
pub fn figure(value: f64) -> String {
    match value.abs() {
        100.0.. => format!("{value:.0}"),
        10.0.. => format!("{value:.1}"),
        1.0.. => format!("{value:.2}"),
        _ => format!("{value:.3}"),
    }
}

/// A directory that goes with the run.
pub struct ScratchDir {
    path: PathBuf,
}

impl ScratchDir {
    /// A path below it.
    pub fn join(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// A new directory below it.
    pub fn make(&self, name: &str) -> PathBuf {
        let path = self.path.join(name);
        std::fs::create_dir(&path).unwrap_or_else(|error| panic!("cannot make {}: {error}", path.display()));
        path
    }
}

impl Drop for ScratchDir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.path);
    }
}

/// Runs `legs` in turns, `rounds` times each, every other round backwards, so that what drifts meets all of them alike.
/// `leg(index)` gives its figure; the result holds the figures of each leg, by round.
pub fn interleave(rounds: usize, legs: usize, mut leg: impl FnMut(usize) -> f64) -> Vec<Vec<f64>> {
    let mut figures = vec![Vec::with_capacity(rounds); legs];
    for round in 0..rounds {
        for turn in 0..legs {
            let index = if round % 2 == 0 { turn } else { legs - 1 - turn };
            figures[index].push(leg(index));
        }
    }
    figures
}

/// The middle one.
pub fn median(figures: &[f64]) -> f64 {
    quantile(figures, 0.5)
}

/// The figure that a share of `at` of all figures does not exceed.
pub fn quantile(figures: &[f64], at: f64) -> f64 {
    let mut sorted = figures.to_vec();
    sorted.sort_by(f64::total_cmp);
    match sorted.len() {
        0 => f64::NAN,
        len => sorted[((len as f64 * at) as usize).min(len - 1)],
    }
}

/// The median of `a / b`, round by round: what drifts over the run changes both alike.
pub fn ratio(a: &[f64], b: &[f64]) -> f64 {
    let ratios: Vec<f64> = a.iter().zip(b).map(|(a, b)| a / b).collect();
    median(&ratios)
}

/// CPU time of all threads of this process, user and system, also those that have ended.
pub fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec.unsigned_abs() as u32)
}

/// How idle the machine is.
#[derive(Clone, Copy)]
struct Load {
    idle_percent: f64,
}

impl Load {
    /// Looks for a second. A smoke run does not have it.
    fn measure(smoke: bool) -> Load {
        let before = Jiffies::read();
        std::thread::sleep(Duration::from_millis(if smoke { 50 } else { 1000 }));
        let passed = Jiffies::read().since(before);
        Load { idle_percent: passed.percent(passed.idle) }
    }
}

impl fmt::Display for Load {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.1} % idle", self.idle_percent)
    }
}

/// Clock ticks of all cores. Waiting for a disk does not count as idle here.
#[derive(Clone, Copy, Default)]
struct Jiffies {
    idle: u64,
    steal: u64,
    total: u64,
}

impl Jiffies {
    fn read() -> Jiffies {
        let stat = std::fs::read_to_string("/proc/stat").unwrap_or_default();
        let line = stat.lines().next().unwrap_or_default();
        let ticks: Vec<u64> = line.split_whitespace().skip(1).filter_map(|tick| tick.parse().ok()).collect();
        // user nice system idle iowait irq softirq steal; what follows is counted in user and nice.
        let at = |index: usize| ticks.get(index).copied().unwrap_or(0);
        Jiffies { idle: at(3), steal: at(7), total: (0..8).map(at).sum() }
    }

    fn since(self, earlier: Jiffies) -> Jiffies {
        Jiffies {
            idle: self.idle.saturating_sub(earlier.idle),
            steal: self.steal.saturating_sub(earlier.steal),
            total: self.total.saturating_sub(earlier.total),
        }
    }

    fn percent(self, part: u64) -> f64 {
        if self.total == 0 { 0.0 } else { 100.0 * part as f64 / self.total as f64 }
    }
}

fn kernel() -> String {
    std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default().trim().to_owned()
}

fn processor() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = info.lines().find_map(|line| line.strip_prefix("model name"));
    let model = model.map_or("core", |model| model.trim_start_matches([' ', '\t', ':']).trim());
    model.to_owned()
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(0, usize::from)
}
