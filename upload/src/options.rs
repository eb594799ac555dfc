//! What of uploads can be chosen, with units, defaults and where the defaults come from.
//!
//! The defaults of [`HedgeOptions`] come from a discrete-event model of one object store (about 400 million part
//! requests), not from measurements on a real cloud; `docs/design/0005-hedged-uploads.md` says more, and
//! `upload/benches/hedging/main.rs` runs the model.
//! What can be learned while uploading is learned: these are starting points and bounds.
#![forbid(unsafe_code)]

use std::time::Duration;

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

/// An option whose value cannot work, and what would.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("option {option}: {value} does not work: {remedy}")]
pub struct UploadOptionError {
    /// The name of the field.
    pub option: &'static str,
    /// The value it was given.
    pub value: String,
    /// What it may be.
    pub remedy: &'static str,
}

/// Longer times are mistakes, and the ends of some could not be told by any clock.
const TIME_MAX: Duration = Duration::from_secs(365 * 24 * 3600);

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

    /// Says what cannot work whatever the buckets are: the limits are in what each field is refused with.
    ///
    /// # Errors
    /// The first field whose value cannot work.
    ///
    /// ```
    /// let mut options = tidelog_upload::UploadOptions::default();
    /// options.hedging.quantile = f64::NAN;
    /// assert_eq!(options.check().unwrap_err().option, "quantile");
    /// ```
    pub fn check(&self) -> Result<(), UploadOptionError> {
        let counts = [
            ("nic_bytes_per_second", self.nic_bytes_per_second),
            ("connections", self.connections.map(|connections| connections as u64)),
            ("hedge_connections", Some(self.hedge_connections as u64)),
            ("part_bytes", Some(self.part_bytes)),
            ("budget_bytes", Some(self.budget_bytes)),
            ("request_attempts", Some(u64::from(self.request_attempts))),
        ];
        for (option, count) in counts {
            must(count != Some(0), option, 0, "at least 1")?;
        }
        must_end("object_timeout", self.object_timeout)?;
        self.hedging.check()
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

    fn check(&self) -> Result<(), UploadOptionError> {
        must_end("stall_timeout", self.stall_timeout)?;
        let times = [
            ("delay_min", self.delay_min),
            ("service_start", self.service_start),
            ("control_start", self.control_start),
            ("backoff_start", self.backoff_start),
            ("backoff_max", self.backoff_max),
            ("open_start", self.open_start),
            ("open_max", self.open_max),
            ("avoid_start", self.avoid_start),
            ("avoid_max", self.avoid_max),
            ("complete_delay_start", self.complete_delay_start),
        ];
        for (option, time) in times {
            must(time <= TIME_MAX, option, format!("{time:?}"), "at most a year")?;
        }
        let in_between = self.quantile > 0.0 && self.quantile < 1.0;
        must(in_between, "quantile", self.quantile, "more than 0, less than 1")?;
        let shares = [("gain", self.gain), ("health_gain", self.health_gain)];
        for (option, share) in shares {
            must((0.0..=1.0).contains(&share), option, share, "0 to 1")?;
        }
        must((0.0..=5.0).contains(&self.late_start), "late_start", self.late_start, "0 to 5")?;
        let factors = [
            ("tokens_per_part", self.tokens_per_part),
            ("tokens_max", self.tokens_max),
            ("second_chance_delays", self.second_chance_delays),
            ("nic_share", self.nic_share),
            ("slow_connection", self.slow_connection),
            ("open_above", self.open_above),
            ("move_after", self.move_after),
            ("refused_max", self.refused_max),
        ];
        for (option, factor) in factors {
            must((0.0..=1e6).contains(&factor), option, factor, "0 to 1,000,000")?;
        }
        let rate = self.rate_start_bytes_per_second;
        must((1.0..=1e12).contains(&rate), "rate_start_bytes_per_second", rate, "1 to 1,000,000,000,000")
    }
}

fn must(
    holds: bool,
    option: &'static str,
    value: impl ToString,
    remedy: &'static str,
) -> Result<(), UploadOptionError> {
    if holds { Ok(()) } else { Err(UploadOptionError { option, value: value.to_string(), remedy }) }
}

/// Refuses a time limit that ends at once or never.
fn must_end(option: &'static str, limit: Duration) -> Result<(), UploadOptionError> {
    let ends = !limit.is_zero() && limit <= TIME_MAX;
    must(ends, option, format!("{limit:?}"), "more than zero, at most a year")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bucket::BucketIndex;
    use crate::hedge::{Bucket, Grant, Policy, Work};
    use crate::sim::SimStore;
    use crate::store::Store;

    type Change = fn(&mut UploadOptions);
    type Time = fn(&mut UploadOptions) -> &mut Duration;
    type Factor = fn(&mut UploadOptions) -> &mut f64;

    const TIMES: [(&str, Time); 12] = [
        ("object_timeout", |o| &mut o.object_timeout),
        ("stall_timeout", |o| &mut o.hedging.stall_timeout),
        ("delay_min", |o| &mut o.hedging.delay_min),
        ("service_start", |o| &mut o.hedging.service_start),
        ("control_start", |o| &mut o.hedging.control_start),
        ("backoff_start", |o| &mut o.hedging.backoff_start),
        ("backoff_max", |o| &mut o.hedging.backoff_max),
        ("open_start", |o| &mut o.hedging.open_start),
        ("open_max", |o| &mut o.hedging.open_max),
        ("avoid_start", |o| &mut o.hedging.avoid_start),
        ("avoid_max", |o| &mut o.hedging.avoid_max),
        ("complete_delay_start", |o| &mut o.hedging.complete_delay_start),
    ];

    const FACTORS: [(&str, Factor); 13] = [
        ("quantile", |o| &mut o.hedging.quantile),
        ("gain", |o| &mut o.hedging.gain),
        ("late_start", |o| &mut o.hedging.late_start),
        ("rate_start_bytes_per_second", |o| &mut o.hedging.rate_start_bytes_per_second),
        ("tokens_per_part", |o| &mut o.hedging.tokens_per_part),
        ("tokens_max", |o| &mut o.hedging.tokens_max),
        ("second_chance_delays", |o| &mut o.hedging.second_chance_delays),
        ("nic_share", |o| &mut o.hedging.nic_share),
        ("slow_connection", |o| &mut o.hedging.slow_connection),
        ("health_gain", |o| &mut o.hedging.health_gain),
        ("open_above", |o| &mut o.hedging.open_above),
        ("move_after", |o| &mut o.hedging.move_after),
        ("refused_max", |o| &mut o.hedging.refused_max),
    ];

    #[test]
    fn what_cannot_work_is_named() {
        assert_eq!(UploadOptions::default().check(), Ok(()));
        assert_eq!(
            UploadOptions { hedging: HedgeOptions::off(), ..UploadOptions::default() }.check(),
            Ok(())
        );
        let refused = |name: &str, options: UploadOptions| {
            let error = options.check().expect_err(name);
            assert_eq!(error.option, name, "{error}");
            assert!(!error.remedy.is_empty());
        };
        for (name, time) in TIMES {
            let mut options = UploadOptions::default();
            *time(&mut options) = Duration::MAX;
            refused(name, options);
        }
        for (name, factor) in FACTORS {
            for bad in [f64::NAN, -0.1, f64::INFINITY, f64::NEG_INFINITY] {
                let mut options = UploadOptions::default();
                *factor(&mut options) = bad;
                refused(name, options);
            }
        }
        let zeros: [(&str, Change); 8] = [
            ("nic_bytes_per_second", |o| o.nic_bytes_per_second = Some(0)),
            ("connections", |o| o.connections = Some(0)),
            ("hedge_connections", |o| o.hedge_connections = 0),
            ("part_bytes", |o| o.part_bytes = 0),
            ("budget_bytes", |o| o.budget_bytes = 0),
            ("request_attempts", |o| o.request_attempts = 0),
            ("object_timeout", |o| o.object_timeout = Duration::ZERO),
            ("stall_timeout", |o| o.hedging.stall_timeout = Duration::ZERO),
        ];
        for (name, zero) in zeros {
            let mut options = UploadOptions::default();
            zero(&mut options);
            refused(name, options);
        }
    }

    /// Each value at either end of what is taken, and all of them together.
    #[test]
    fn what_is_taken_is_reckoned_with() {
        let end = |options: &mut UploadOptions, largest: bool| {
            for (_, time) in TIMES {
                *time(options) = if largest { TIME_MAX } else { Duration::from_nanos(1) };
            }
            for (_, factor) in FACTORS {
                let try_all =
                    if largest { [1e12, 1e6, 5.0, 1.0, 0.999] } else { [0.0, 0.0, 0.001, 0.5, 1.0] };
                for value in try_all {
                    let before = std::mem::replace(factor(options), value);
                    if options.check().is_ok() {
                        break;
                    }
                    *factor(options) = before;
                }
            }
        };
        for largest in [false, true] {
            let mut options = UploadOptions::default();
            end(&mut options, largest);
            assert_eq!(options.check(), Ok(()));
            let capabilities = SimStore::new(1).capabilities().clone();
            let bucket = Bucket { url: "sim://1".into(), capabilities };
            let (home, now) = (BucketIndex(0), std::time::Instant::now());
            let mut policy = Policy::new(options.clone(), vec![bucket.clone(), bucket], 1);
            for round in 0..200 {
                for work in [Work::Data(u64::MAX), Work::Data(0), Work::Control, Work::Complete(9)] {
                    let took = if round % 3 == 0 { Duration::ZERO } else { options.hedging.stall_timeout };
                    policy.learn_timeout(home, now, now);
                    let late = policy.delay(home, work).mul_f64(options.hedging.second_chance_delays);
                    assert!(now.checked_add(policy.timeout(home, work)).is_some());
                    assert!(now.checked_add(late).is_some());
                    let _ = policy.expected(home, work).mul_f64(options.hedging.slow_connection);
                    let _ = policy.expected(home, work).mul_f64(options.hedging.move_after);
                    if round % 2 == 0 {
                        policy.learn(home, work, took);
                    } else {
                        policy.learn_loss(home, work, took);
                    }
                    if let Some(grant) = policy.grant(took, late, 3) {
                        assert!(matches!(grant, Grant::Token | Grant::SecondChance));
                        policy.give_back(grant);
                    }
                }
                assert!(now.checked_add(policy.backoff(round)).is_some());
                policy.judge(home, crate::bucket::Verdict::Failed, now);
                if let Some(due) = policy.deadline()
                    && let Some(canary) = policy.canary(due)
                {
                    policy.canary_ended(canary.bucket, false, Duration::ZERO, due);
                }
            }
        }
    }
}
