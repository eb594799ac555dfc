//! The figures as a table, as JSON and as a page.

use serde_json::{Value, json};
use tidelog::EngineInfo;

use super::histogram::Histogram;
use super::load::{Outcome, Plan};
use crate::places::engine_name;
use crate::show::{self, Table};

/// The shares that tables name.
pub const SHARES: [(&str, f64); 5] =
    [("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("p99.9", 0.999), ("p99.99", 0.9999)];

/// Where and how it was measured.
#[derive(Debug)]
pub struct Conditions {
    pub plan: Plan,
    pub engines: Vec<EngineInfo>,
    pub durability: &'static str,
    pub directories: Vec<String>,
    pub bucket: String,
    pub kernel: String,
    pub processors: usize,
    /// How much of the machine others used just before, 0 to 1.
    pub busy_share: Option<f64>,
    pub clock_nanos: u64,
}

/// Above this share of other load the figures say little.
const BUSY_MAX: f64 = 0.05;

impl Conditions {
    /// Name and value of each.
    pub fn rows(&self) -> Vec<(&'static str, String)> {
        let mut rows = vec![
            ("engine", engine_name(&self.engines)),
            ("a sync survives", self.durability.to_owned()),
            ("threads", self.plan.threads.to_string()),
            ("record", show::bytes(self.plan.record_bytes as u64)),
            ("segments in", self.directories.join(", ")),
            ("objects in", self.bucket.clone()),
            ("machine", format!("{} processors, {}", self.processors, self.kernel)),
        ];
        let fallbacks = self.engines.iter().flat_map(|engine| &engine.fallbacks);
        rows.extend(fallbacks.map(|fallback| ("fallback", fallback.clone())));
        match self.busy_share {
            Some(busy) if busy > BUSY_MAX => rows.push((
                "caution",
                format!(
                    "other work used {:.0} % of the machine just before: these figures do not count",
                    busy * 100.0
                ),
            )),
            Some(busy) => rows.push(("other load", format!("{:.1} % just before", busy * 100.0))),
            None => {}
        }
        rows
    }
}

/// Name and value of each figure that is no latency.
pub fn figures(conditions: &Conditions, outcome: &Outcome) -> Vec<(&'static str, String)> {
    let record_bytes = conditions.plan.record_bytes as u64;
    let seconds = outcome.elapsed.as_secs_f64().max(1e-9);
    let bytes = outcome.records * record_bytes;
    let part = |records: u64| {
        let share = records as f64 / (outcome.records.max(1) as f64) * 100.0;
        format!("{} ({share:.1} %)", show::bytes(records * record_bytes))
    };
    let mut rows = vec![
        ("appended", format!("{} records, {}", show::count(outcome.records), show::bytes(bytes))),
        (
            "throughput",
            format!(
                "{:.0} MB/s, {:.2} million records/s",
                bytes as f64 / seconds / 1e6,
                outcome.records as f64 / seconds / 1e6
            ),
        ),
        ("on local disk", part(outcome.durable)),
        ("in objects", part(outcome.persisted)),
        ("checkpoints", show::count(outcome.persist.count())),
    ];
    if outcome.failed_persists > 0 {
        rows.push(("failed", show::count(outcome.failed_persists)));
    }
    if outcome.late_persists > 0 {
        rows.push(("without answer", show::count(outcome.late_persists)));
    }
    if let Some(failure) = &outcome.last_failure {
        rows.push(("last failure", failure.clone()));
    }
    rows
}

/// The three kinds of latency.
pub fn latencies(outcome: &Outcome) -> [(&'static str, &Histogram); 3] {
    [("append", &outcome.append), ("sync", &outcome.sync), ("persist", &outcome.persist)]
}

/// Rows of quantiles, as text.
pub fn latency_rows(outcome: &Outcome) -> Vec<Vec<String>> {
    let row = |(name, histogram): (&str, &Histogram)| {
        let mut row = vec![name.to_owned(), show::count(histogram.count())];
        row.extend(SHARES.iter().map(|&(_, share)| show_time(histogram, histogram.quantile(share))));
        row.push(show_time(histogram, histogram.max()));
        row
    };
    latencies(outcome).into_iter().map(row).collect()
}

fn show_time(histogram: &Histogram, time: std::time::Duration) -> String {
    if histogram.count() == 0 { "-".to_owned() } else { show::duration(time) }
}

pub const LATENCY_COLUMNS: [&str; 8] = ["latency", "timed", "p50", "p90", "p99", "p99.9", "p99.99", "max"];

pub fn to_text(conditions: &Conditions, outcome: &Outcome) -> String {
    let rows: Vec<_> = conditions.rows().into_iter().chain(figures(conditions, outcome)).collect();
    let width = rows.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    let mut text: String = rows.iter().map(|(name, value)| format!("{name:<width$}  {value}\n")).collect();
    let mut table = Table::new(&LATENCY_COLUMNS);
    latency_rows(outcome).into_iter().for_each(|row| table.row(row));
    text.push('\n');
    text += &table.render("");
    text += &format!("An append's time includes about {} ns for the clock.\n", conditions.clock_nanos);
    text
}

pub fn to_json(conditions: &Conditions, outcome: &Outcome) -> Value {
    let record_bytes = conditions.plan.record_bytes as u64;
    let seconds = outcome.elapsed.as_secs_f64();
    let latency = |histogram: &Histogram| {
        let nanos = |share: f64| histogram.quantile(share).as_nanos() as u64;
        let mut map = serde_json::Map::new();
        map.insert("count".to_owned(), histogram.count().into());
        for (name, share) in SHARES {
            map.insert(format!("{name}_ns"), nanos(share).into());
        }
        map.insert("max_ns".to_owned(), (histogram.max().as_nanos() as u64).into());
        Value::Object(map)
    };
    let engines: Vec<Value> = conditions
        .engines
        .iter()
        .map(|info| {
            json!({ "engine": info.engine, "direct": info.direct, "registered": info.registered,
                    "fallbacks": info.fallbacks })
        })
        .collect();
    let samples: Vec<Value> = outcome
        .samples
        .iter()
        .map(|sample| {
            json!({ "seconds": sample.at.as_secs_f64(), "appended_bytes": sample.records * record_bytes,
                    "persisted_bytes": sample.persisted * record_bytes })
        })
        .collect();
    json!({
        "engines": engines,
        "durability": conditions.durability,
        "threads": conditions.plan.threads,
        "record_bytes": record_bytes,
        "directories": conditions.directories,
        "bucket": conditions.bucket,
        "kernel": conditions.kernel,
        "processors": conditions.processors,
        "busy_share_before": conditions.busy_share,
        "clock_ns": conditions.clock_nanos,
        "seconds": seconds,
        "records": outcome.records,
        "bytes": outcome.records * record_bytes,
        "bytes_per_second": (outcome.records * record_bytes) as f64 / seconds.max(1e-9),
        "durable_bytes": outcome.durable * record_bytes,
        "persisted_bytes": outcome.persisted * record_bytes,
        "failed_checkpoints": outcome.failed_persists,
        "unanswered_checkpoints": outcome.late_persists,
        "last_failure": outcome.last_failure,
        "append": latency(&outcome.append),
        "sync": latency(&outcome.sync),
        "persist": latency(&outcome.persist),
        "samples": samples,
    })
}
