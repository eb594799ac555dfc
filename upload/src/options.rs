//! What of uploads can be chosen, with units, defaults and where the defaults come from.
//!
//! The defaults of [`HedgeOptions`] come from a discrete-event model of one object store (about 400 million part
//! requests), not from measurements on a real cloud; `docs/design/0005-hedged-uploads.md` says more, and
//! `upload/benches/hedging/main.rs` runs the model.
//! What can be learned while uploading is learned: these are starting points and bounds.
#![forbid(unsafe_code)]

mod check;

use std::time::Duration;

pub use self::check::UploadOptionError;

/// How uploads use the network, memory and time.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct UploadOptions {
    /// When late requests are raced, and which buckets are avoided.
    pub hedging: HedgeOptions,
    /// What the network interface carries, in bytes a second; `None` if unknown: then nothing is held back because the
    /// interface is busy.
    pub nic_bytes_per_second: Option<u64>,
    /// First attempts in flight at once over all objects; `None`: `nic_bytes_per_second` / 65 MB/s, at most 64, or 32
    /// when the interface is unknown. An object always has one, however many others wait or hang.
    pub connections: Option<usize>,
    /// Hedges in flight at once over all objects, on connections of their own.
    pub hedge_connections: usize,
    /// Up to here an object goes as one PUT, in bytes.
    pub put_bytes_max: u64,
    /// The size of a part of a larger object in bytes, unless a store demands another. It grows with the object where
    /// the number of parts would not suffice.
    pub part_bytes: u64,
    /// The bytes of an object up to this size are kept until it is committed, so that all of it can be raced or sent
    /// afresh. Of larger objects each part is let go when the store has taken it: such an object fails when its bucket
    /// takes no data for [`stall_timeout`](HedgeOptions::stall_timeout) while another one does.
    pub retain_bytes_max: u64,
    /// Bytes held in memory by all objects together, hedges included: bytes that are sent twice are held once.
    pub budget_bytes: u64,
    /// How long an object may take from its last byte being handed over to its commit, when nobody says otherwise.
    pub object_timeout: Duration,
    /// Attempts of a read, a listing or a deletion before its error is handed out.
    pub request_attempts: u32,
}

impl Default for UploadOptions {
    fn default() -> UploadOptions {
        UploadOptions {
            hedging: HedgeOptions::default(),
            nic_bytes_per_second: None,
            connections: None,
            hedge_connections: 16,
            put_bytes_max: 12_000_000,
            part_bytes: 8 << 20,
            retain_bytes_max: 64 << 20,
            budget_bytes: 256 << 20,
            object_timeout: Duration::from_secs(600),
            request_attempts: 5,
        }
    }
}

impl UploadOptions {
    /// First attempts in flight at once over all objects, at least one.
    #[must_use]
    pub fn connections(&self) -> usize {
        const BYTES_PER_SECOND: u64 = 65_000_000;
        let connections = match (self.connections, self.nic_bytes_per_second) {
            (Some(connections), _) => connections,
            (None, Some(nic)) => usize::try_from(nic / BYTES_PER_SECOND).unwrap_or(usize::MAX).min(64),
            (None, None) => 32,
        };
        connections.max(1)
    }

    /// Whether anything is decided by how far requests have come.
    pub(crate) fn heeds_progress(&self) -> bool {
        self.hedging.progress_check || self.nic_bytes_per_second.is_some()
    }
}

/// When a request is late, what may be done about it, and which buckets are avoided.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct HedgeOptions {
    /// Whether late requests are raced at all. If not, they are only tried again after they failed.
    pub enabled: bool,
    /// Races of one request at most, after D, 2 D and 3 D from its start.
    pub hedges_max: u32,
    /// D is never below this.
    pub delay_min: Duration,
    /// The share of requests that shall end before D.
    pub quantile: f64,
    /// How far one request moves D, in its logarithm; the first ones move it further, up to four times.
    pub gain: f64,
    /// ln(D / expected time) at the start.
    pub late_start: f64,
    /// The time that a store takes after the last byte, at the start.
    pub service_start: Duration,
    /// The rate of one connection at the start, in bytes a second.
    pub rate_start_bytes_per_second: f64,
    /// The time of a request without a body, at the start.
    pub control_start: Duration,
    /// Races earned by each part sent.
    pub tokens_per_part: f64,
    /// Races saved up at most.
    pub tokens_max: f64,
    /// Without a token, a request is raced only when it is this many D old …
    pub second_chance_delays: f64,
    /// … and while fewer races without a token than this are under way.
    pub second_chance_max: u32,
    /// No race while the interface is busier than this share and the part keeps up with the others.
    pub nic_share: f64,
    /// Race at once where a connection is so slow that the rest of a part would take longer than 1.6 times what all of it
    /// should have, as soon as all of it should be sent; where it has taken nothing by then, a little later. Only in buckets
    /// whose store can tell, see [`Wire::took`](crate::Wire::took).
    pub progress_check: bool,
    /// The first pause after a refusal; doubled each time, ± 50 %.
    pub backoff_start: Duration,
    /// The longest pause.
    pub backoff_max: Duration,
    /// A request is given up when it took this long beyond what its size explains.
    pub stall_timeout: Duration,
    /// A connection is closed that took longer than D and than this many expected times.
    pub slow_connection: f64,
    /// Weight of the newest outcome in a bucket's share of bad ones.
    pub health_gain: f64,
    /// A bucket with a larger share of bad outcomes is closed for data until canaries come through.
    pub open_above: f64,
    /// How long it is left alone before the first canary; doubled each time it opens again.
    pub open_start: Duration,
    /// The longest such time.
    pub open_max: Duration,
    /// How long no object is placed in a bucket after a bad outcome; doubled each time it happens again.
    pub avoid_start: Duration,
    /// The longest such time.
    pub avoid_max: Duration,
    /// When a bucket opens, its requests older than this many expected times move elsewhere.
    pub move_after: f64,
    /// How long a Complete may take before its parts are sent to another bucket too, at the start.
    pub complete_delay_start: Duration,
    /// With a larger share of refusals among the latest outcomes of all buckets, nothing is raced or sent elsewhere at
    /// once: everything backs off.
    pub refused_max: f64,
}

impl Default for HedgeOptions {
    fn default() -> HedgeOptions {
        HedgeOptions {
            enabled: true,
            hedges_max: 3,
            delay_min: Duration::from_millis(30),
            quantile: 0.95,
            gain: 0.05,
            late_start: std::f64::consts::LN_2,
            service_start: Duration::from_millis(75),
            rate_start_bytes_per_second: 65e6,
            control_start: Duration::from_millis(35),
            tokens_per_part: 0.10,
            tokens_max: 10.0,
            second_chance_delays: 1.5,
            second_chance_max: 2,
            nic_share: 0.95,
            progress_check: false,
            backoff_start: Duration::from_millis(50),
            backoff_max: Duration::from_millis(800),
            stall_timeout: Duration::from_secs(10),
            slow_connection: 1.5,
            health_gain: 0.3,
            open_above: 0.6,
            open_start: Duration::from_secs(15),
            open_max: Duration::from_secs(240),
            avoid_start: Duration::from_secs(30),
            avoid_max: Duration::from_secs(480),
            move_after: 0.7,
            complete_delay_start: Duration::from_millis(400),
            refused_max: 0.5,
        }
    }
}

impl HedgeOptions {
    /// No races: a request is tried again only after it has failed.
    #[must_use]
    pub fn off() -> HedgeOptions {
        HedgeOptions { enabled: false, ..HedgeOptions::default() }
    }
}
