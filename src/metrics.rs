//! Every metric of the library, by its name, with its kind, unit and labels. When something is told to the `metrics`
//! facade is decided where it happens; `docs/metrics.md` has this list as a table.
//!
//! The ones of local files come from the I/O crate, which knows no more of them than their names.

use metrics::Unit;
pub use tidelog_upload::metrics::{Metric, MetricKind};

/// Every metric that the library may tell, those of uploads included.
///
/// ```
/// let names: Vec<&str> = tidelog::metrics::all().map(|metric| metric.name).collect();
/// assert!(names.contains(&"tidelog_persist_seconds"));
/// ```
pub fn all() -> impl Iterator<Item = &'static Metric> {
    METRICS.iter().chain(tidelog_upload::metrics::METRICS)
}

const fn metric(
    name: &'static str,
    kind: MetricKind,
    unit: Unit,
    labels: &'static [&'static str],
    help: &'static str,
) -> Metric {
    Metric { name, kind, unit, labels, help }
}

const fn count(name: &'static str, labels: &'static [&'static str], help: &'static str) -> Metric {
    metric(name, MetricKind::Counter, Unit::Count, labels, help)
}

const DIRECTORY: &[&str] = &["directory"];

const METRICS: &[Metric] = &[
    metric(
        "tidelog_persist_seconds",
        MetricKind::Histogram,
        Unit::Seconds,
        &[],
        "time from `persist_durably` to its handle, for those that got one",
    ),
    metric(
        "tidelog_object_finish_seconds",
        MetricKind::Histogram,
        Unit::Seconds,
        &[],
        "time from the last part of an object being handed over to the object being proven and recorded",
    ),
    metric(
        "tidelog_objects_committing",
        MetricKind::Gauge,
        Unit::Count,
        &[],
        "objects that have all their bytes and wait for their commit; for long at its most, 4, the buckets are too slow",
    ),
    count("tidelog_objects_completed_total", &[], "objects proven complete"),
    count(
        "tidelog_objects_failed_total",
        &[],
        "objects given up; their changes go into the next one, persists that wait for them go on",
    ),
    count("tidelog_checkpoints_declined_total", &[], "calls of `reset`"),
    count(
        "tidelog_delete_failures_total",
        &[],
        "deletions and sweeps that failed and are tried again; growing without end, objects pile up in a bucket",
    ),
    count(
        "tidelog_objects_let_go_total",
        &[],
        "objects and uploads that nothing here needs and that stay all the same: they may have changes of a local directory that is not open here",
    ),
    metric(
        "tidelog_owned_object_bytes",
        MetricKind::Gauge,
        Unit::Bytes,
        DIRECTORY,
        "bytes of the objects that a changelog owns, by its first directory; growing without end, some log is not truncated",
    ),
    metric(
        "tidelog_owned_objects",
        MetricKind::Gauge,
        Unit::Count,
        DIRECTORY,
        "the objects that a changelog owns, by its first directory",
    ),
    metric(
        "tidelog_quota_alarm",
        MetricKind::Gauge,
        Unit::Count,
        DIRECTORY,
        "1 while the objects have 80 % of `object_bytes_max` or more, else 0; at all of it appends are refused",
    ),
    metric(
        "tidelog_lane_bytes",
        MetricKind::Gauge,
        Unit::Bytes,
        DIRECTORY,
        "bytes appended that no block holds yet, over all lanes",
    ),
    metric(
        "tidelog_appends_waiting",
        MetricKind::Gauge,
        Unit::Count,
        &[],
        "threads that wait in an append for room; above 0 for long, the disk or the buckets are too slow",
    ),
    count("tidelog_append_waits_total", &[], "appends that found no room, and waited or were refused"),
    metric(
        "tidelog_block_memory_bytes",
        MetricKind::Gauge,
        Unit::Bytes,
        DIRECTORY,
        "bytes of blocks in memory: being filled, being written, or kept for their upload",
    ),
    metric(
        "tidelog_segment_bytes",
        MetricKind::Gauge,
        Unit::Bytes,
        DIRECTORY,
        "bytes of segment files that hold what is not in objects yet, or what is kept for local restores; at `local_bytes` appends \
         wait for uploads",
    ),
    metric(
        "tidelog_spill_bytes_total",
        MetricKind::Counter,
        Unit::Bytes,
        &[],
        "bytes of blocks that became durable on local disks",
    ),
    count(
        "tidelog_local_high_water_total",
        &[],
        "times that a local directory was full and only uploads could make room",
    ),
    metric(
        "tidelog_local_tier_failed",
        MetricKind::Gauge,
        Unit::Count,
        DIRECTORY,
        "1 once a local directory is out of service: persists go on from memory, nothing is durable locally",
    ),
    count(
        "tidelog_logs_lost_total",
        &[],
        "logs that lost changes which were in flight when a local engine broke",
    ),
    count(
        "tidelog_local_read_failures_total",
        &[],
        "times that a restore read from objects what local blocks should have held: a file is gone or damaged",
    ),
    count(
        "tidelog_local_retention_lost_total",
        &[],
        "opens that let go of blocks which were only kept for local restores, because some of them are damaged",
    ),
    count("tidelog_manifest_failures_total", &[], "records that a manifest did not take; it is written anew"),
    count(
        "tidelog_write_failures_total",
        &[],
        "writes of blocks that failed; their segment is left, they are written elsewhere",
    ),
    count("tidelog_segments_acquired_total", &["kind"], "segments put to use: created, or recycled"),
    count("tidelog_segments_quarantined_total", &[], "segments never written again because a write failed"),
    count(
        "tidelog_segment_prepare_failures_total",
        &[],
        "segments that could not be made ready, mostly for lack of space",
    ),
    count("tidelog_sick_directories_total", &[], "local directories given up by the I/O layer"),
    count(
        "tidelog_engine_fallbacks_total",
        &["engine"],
        "local engines opened with less than was wanted: no io_uring, no O_DIRECT, buffers not registered",
    ),
];

/// Tells the recorder what each metric means, and that counters without labels are 0: the first failure would not show as
/// an increase otherwise.
pub(crate) fn describe() {
    for metric in METRICS {
        metric.describe();
        if metric.kind == MetricKind::Counter && metric.labels.is_empty() {
            metrics::counter!(metric.name).increment(0);
        }
    }
}
