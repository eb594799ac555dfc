//! What the upload stage tells the `metrics` facade: every name, once, with its kind, unit and labels. When something is
//! told is decided where it happens.
//!
//! Buckets are named by their URL without its query, and by the host of the endpoint that the query names: the same name at
//! two servers is two buckets.
#![forbid(unsafe_code)]

use std::time::Duration;

use metrics::{SharedString, Unit};
use url::{Url, form_urlencoded};

use crate::store::{Lane, Operation, StoreError, StoreErrorKind};

/// One metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Metric {
    /// Its name.
    pub name: &'static str,
    /// How it is counted.
    pub kind: MetricKind,
    /// In what.
    pub unit: Unit,
    /// The labels that it always has.
    pub labels: &'static [&'static str],
    /// What it says.
    pub help: &'static str,
}

/// How a metric is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetricKind {
    /// Only grows.
    Counter,
    /// A level.
    Gauge,
    /// A distribution.
    Histogram,
}

const BY_OUTCOME: &[&str] = &["bucket", "operation", "outcome"];

const REQUESTS: Metric = Metric {
    name: "tidelog_store_requests_total",
    kind: MetricKind::Counter,
    unit: Unit::Count,
    labels: BY_OUTCOME,
    help: "requests to buckets that ended, by how: ok, cancelled, or the kind of error",
};
const REQUEST_BYTES: Metric = Metric {
    name: "tidelog_store_bytes_total",
    kind: MetricKind::Counter,
    unit: Unit::Bytes,
    labels: BY_OUTCOME,
    help: "size of the bodies of requests that ended, to be sent by put and put_part, asked for by get; all of it went over only where the outcome is ok",
};
const REQUEST_SECONDS: Metric = Metric {
    name: "tidelog_store_request_seconds",
    kind: MetricKind::Histogram,
    unit: Unit::Seconds,
    labels: BY_OUTCOME,
    help: "duration of one request, from its start to its end",
};
const RETRIES: Metric = Metric {
    name: "tidelog_store_retries_total",
    kind: MetricKind::Counter,
    unit: Unit::Count,
    labels: &["bucket", "operation"],
    help: "reads, listings and deletions asked again after a failure",
};
const HEDGES: Metric = Metric {
    name: "tidelog_hedges_total",
    kind: MetricKind::Counter,
    unit: Unit::Count,
    labels: &["event"],
    help: "second attempts raced against late first ones: issued, won; and denied for want of a token or of a connection, counted at each look, so a request that stays late counts often",
};
const BREAKER: Metric = Metric {
    name: "tidelog_bucket_breaker_open",
    kind: MetricKind::Gauge,
    unit: Unit::Count,
    labels: &["bucket"],
    help: "1 while a bucket is left alone because most of its recent outcomes were bad, else 0",
};
const CANARIES: Metric = Metric {
    name: "tidelog_canaries_total",
    kind: MetricKind::Counter,
    unit: Unit::Count,
    labels: &["bucket", "outcome"],
    help: "tiny objects written to see whether a bucket works again",
};
const MEMORY: Metric = Metric {
    name: "tidelog_upload_memory_bytes",
    kind: MetricKind::Gauge,
    unit: Unit::Bytes,
    labels: &[],
    help: "bytes of objects that are held in memory until they are in a bucket, however often they are sent",
};
const IN_FLIGHT: Metric = Metric {
    name: "tidelog_upload_in_flight_bytes",
    kind: MetricKind::Gauge,
    unit: Unit::Bytes,
    labels: &["lane"],
    help: "bytes of the bodies of requests under way, by lane: primary, or hedge",
};

/// Every metric of this crate.
pub const METRICS: &[Metric] =
    &[REQUESTS, REQUEST_BYTES, REQUEST_SECONDS, RETRIES, HEDGES, BREAKER, CANARIES, MEMORY, IN_FLIGHT];

impl Metric {
    /// Tells the recorder what it means.
    pub fn describe(&self) {
        match self.kind {
            MetricKind::Counter => metrics::describe_counter!(self.name, self.unit, self.help),
            MetricKind::Gauge => metrics::describe_gauge!(self.name, self.unit, self.help),
            MetricKind::Histogram => metrics::describe_histogram!(self.name, self.unit, self.help),
        }
    }
}

/// Tells the recorder what each metric means. What alarms compare is there from the start: a rate does not see the step from
/// nothing to one.
pub(crate) fn describe() {
    METRICS.iter().for_each(Metric::describe);
    for event in ["issued", "won", "denied"] {
        metrics::counter!(HEDGES.name, "event" => event).increment(0);
    }
}

/// The URL of a bucket as a label: without its query, with the host and the port of its endpoint.
pub(crate) fn bucket_label(url: &str) -> SharedString {
    let (place, query) = url.split_once('?').unwrap_or((url, ""));
    let endpoint = form_urlencoded::parse(query.as_bytes()).find(|(key, _)| key == "endpoint");
    let endpoint = endpoint.and_then(|(_, endpoint)| Url::parse(&endpoint).ok());
    match endpoint.as_ref().map(|endpoint| (endpoint.host_str(), endpoint.port())) {
        Some((Some(host), Some(port))) => format!("{place} at {host}:{port}").into(),
        Some((Some(host), None)) => format!("{place} at {host}").into(),
        _ => place.to_owned().into(),
    }
}

/// How a request ended, in one word.
pub(crate) fn outcome_label<T>(outcome: &Result<T, StoreError>) -> &'static str {
    match outcome {
        Ok(_) => "ok",
        Err(error) => match error.kind() {
            StoreErrorKind::NotFound => "not_found",
            StoreErrorKind::Throttled => "throttled",
            StoreErrorKind::TimedOut(_) => "timed_out",
            StoreErrorKind::Interrupted => "interrupted",
            StoreErrorKind::Unreachable => "unreachable",
            StoreErrorKind::NoSuchBucket => "no_such_bucket",
            StoreErrorKind::NoSuchUpload => "no_such_upload",
            StoreErrorKind::InvalidPart => "invalid_part",
            StoreErrorKind::InProgress => "in_progress",
            StoreErrorKind::Denied => "denied",
            StoreErrorKind::Credentials => "credentials",
            StoreErrorKind::Misconfigured => "misconfigured",
            StoreErrorKind::ClockSkew => "clock_skew",
            StoreErrorKind::Cancelled => "cancelled",
            _ => "failed",
        },
    }
}

/// A request ended.
pub(crate) fn request(
    bucket: &SharedString,
    operation: Operation,
    outcome: &'static str,
    bytes: u64,
    took: Duration,
) {
    let labels = [
        ("bucket", bucket.clone()),
        ("operation", SharedString::const_str(operation.name())),
        ("outcome", SharedString::const_str(outcome)),
    ];
    metrics::counter!(REQUESTS.name, &labels).increment(1);
    if bytes > 0 {
        metrics::counter!(REQUEST_BYTES.name, &labels).increment(bytes);
    }
    metrics::histogram!(REQUEST_SECONDS.name, &labels).record(took.as_secs_f64());
}

/// A request is sent again.
pub(crate) fn retry(bucket: &SharedString, operation: Operation) {
    metrics::counter!(RETRIES.name, "bucket" => bucket.clone(), "operation" => operation.name()).increment(1);
}

/// Hedges were issued, won or denied.
pub(crate) fn hedges(event: &'static str, count: u64) {
    if count > 0 {
        metrics::counter!(HEDGES.name, "event" => event).increment(count);
    }
}

/// A breaker is open, or not.
pub(crate) fn breaker(bucket: &SharedString, open: bool) {
    metrics::gauge!(BREAKER.name, "bucket" => bucket.clone()).set(if open { 1.0 } else { 0.0 });
}

/// A canary came back.
pub(crate) fn canary(bucket: &SharedString, outcome: &'static str) {
    metrics::counter!(CANARIES.name, "bucket" => bucket.clone(), "outcome" => outcome).increment(1);
}

/// More or fewer bytes of objects are in memory.
pub(crate) fn memory(change_bytes: i64) {
    metrics::gauge!(MEMORY.name).increment(change_bytes as f64);
}

/// More or fewer bytes of bodies are under way.
pub(crate) fn in_flight(lane: Lane, change_bytes: i64) {
    let lane = match lane {
        Lane::Primary => "primary",
        Lane::Hedge => "hedge",
    };
    metrics::gauge!(IN_FLIGHT.name, "lane" => lane).increment(change_bytes as f64);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_say_their_kind_and_unit() {
        for (index, metric) in METRICS.iter().enumerate() {
            assert!(METRICS[..index].iter().all(|other| other.name != metric.name), "{}", metric.name);
            assert!(metric.name.starts_with("tidelog_"), "{}", metric.name);
            assert_eq!(
                metric.name.ends_with("_total"),
                metric.kind == MetricKind::Counter,
                "{}",
                metric.name
            );
            let words: Vec<_> = metric.name.split('_').collect();
            assert_eq!(words.contains(&"bytes"), metric.unit == Unit::Bytes, "{}", metric.name);
            assert_eq!(words.contains(&"seconds"), metric.unit == Unit::Seconds, "{}", metric.name);
        }
    }

    #[test]
    fn a_bucket_is_named_without_its_query_and_with_its_server() {
        assert_eq!(bucket_label("memory://").as_ref(), "memory://");
        assert_eq!(bucket_label("file:///mnt/a").as_ref(), "file:///mnt/a");
        assert_eq!(bucket_label("s3://b/p?region=eu-west-1").as_ref(), "s3://b/p");
        assert_eq!(
            bucket_label("s3://b/p?endpoint=https://minio.local/x").as_ref(),
            "s3://b/p at minio.local"
        );
        let at =
            |port: u16| bucket_label(&format!("s3://b/p?sse=AES256&endpoint=http%3A%2F%2F127.0.0.1:{port}"));
        assert_eq!(at(9000).as_ref(), "s3://b/p at 127.0.0.1:9000");
        assert_ne!(at(9000), at(9001), "two servers, two buckets");
    }
}
