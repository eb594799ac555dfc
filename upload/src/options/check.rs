//! What options of uploads cannot be. With any others, no time overflows that the policy reckons with.
#![forbid(unsafe_code)]

use std::time::Duration;

use super::{HedgeOptions, UploadOptions};

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

impl UploadOptions {
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
}

impl HedgeOptions {
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
