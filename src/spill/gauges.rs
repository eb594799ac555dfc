//! The levels of a device that metrics show: bytes in its lanes, in blocks in memory, and in segments.
//!
//! Told a few times a second by the spiller, so that no append pays for it.

use std::time::{Duration, Instant};

use metrics::Gauge;

/// A tenth of what is called fresh in a dashboard.
const INTERVAL: Duration = Duration::from_millis(100);

/// The gauges of one device.
pub(super) struct Gauges {
    pub lanes: Gauge,
    pub blocks: Gauge,
    pub segments: Gauge,
    due_at: Option<Instant>,
}

impl Gauges {
    pub fn new(directory: &std::path::Path) -> Gauges {
        let directory = directory.display().to_string();
        // So that one that was replaced and opened again shows as well.
        metrics::gauge!("tidelog_local_tier_failed", "directory" => directory.clone()).set(0.0);
        Gauges {
            lanes: metrics::gauge!("tidelog_lane_bytes", "directory" => directory.clone()),
            blocks: metrics::gauge!("tidelog_block_memory_bytes", "directory" => directory.clone()),
            segments: metrics::gauge!("tidelog_segment_bytes", "directory" => directory),
            due_at: None,
        }
    }

    /// Whether it is time to tell again; if so, that counts as done.
    pub fn are_due(&mut self, now: Instant) -> bool {
        if self.due_at.is_some_and(|due_at| now < due_at) {
            return false;
        }
        self.due_at = Some(now + INTERVAL);
        true
    }
}
