//! When a request is late, whether it may be raced, and where to: one policy for all objects of a driver. Pure: time and
//! randomness are arguments.
//!
//! Health and placement are in [`bucket`](crate::bucket), what becomes of an object in [`multipart`](crate::multipart);
//! here are expectations, budgets and connections.
//!
//! Invariants:
//! 1. Races are bounded by tokens that only first attempts earn, plus `second_chance_max` at a time; they use connections
//!    of their own, so that they never keep a first attempt from starting, nor the other way round.
//! 2. Expectations follow what is seen: a store that is slower than another, or has become so, is not late for ever.
#![forbid(unsafe_code)]

use std::time::{Duration, Instant};

pub use crate::bucket::{Breaker, Bucket, BucketHealth, Canary, Health};
use crate::bucket::{BucketIndex, Buckets, Verdict};
use crate::options::{HedgeOptions, UploadOptions};
use crate::store::Lane;

/// How far one request moves the expected time, in its logarithm: a tracked median.
const EXPECTED_GAIN: f64 = 0.02;

/// The first request moves what is expected so many times as far as one of later on.
const FIRST_GAIN: f64 = 4.0;

/// The window over which the rate of the interface is averaged.
const METER: Duration = Duration::from_millis(250);

/// A canary is waited for that long at least, whether or not it comes in time: its answer says how far the bucket is.
const CANARY_LIMIT_MIN: Duration = Duration::from_secs(2);

/// Complete is tracked apart for objects of less than 16, 256, 4,096 and more parts.
const COMPLETE_CLASSES: usize = 4;

/// What all objects of a driver share: what was learned about the buckets, budgets and connections.
#[derive(Debug)]
pub struct Policy {
    options: UploadOptions,
    buckets: Vec<Bucket>,
    health: Buckets,
    /// Buckets that take the same things are expected to take the same time: the first of each kind stands for it.
    class_of: Vec<usize>,
    classes: Vec<Class>,
    tokens: f64,
    second_chances: usize,
    primaries: usize,
    hedges: usize,
    refused_connection: bool,
    freed: bool,
    meter: Meter,
    /// By bucket, whether its requests tell how far they have come.
    progress_seen: Vec<bool>,
    /// By bucket, how many times as long as expected a canary may take. It doubles with each that came through too late, so
    /// that a bucket far away, over a connection that must be made first, is not open for ever.
    canary_patience: Vec<f64>,
    stats: PolicyStats,
}

/// Counts since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PolicyStats {
    /// Races begun.
    pub hedges: u64,
    /// Races that were first.
    pub hedges_won: u64,
    /// How often a race was due and not begun for want of a token or of a connection: at each look, so one request may count
    /// often.
    pub hedges_denied: u64,
    /// Canaries sent.
    pub canaries: u64,
}

/// What a request does, as far as its time depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Work {
    /// Sends this many bytes.
    Data(u64),
    /// Sends and makes nothing of size.
    Control,
    /// Makes an object of this many parts.
    Complete(usize),
}

/// Leave to race a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Grant {
    /// Paid for, or free.
    Token,
    /// One of the few without a token: given back when the race is over.
    SecondChance,
}

#[derive(Clone, Debug)]
struct Class {
    data: Expected,
    control: Expected,
    ln_complete: [f64; COMPLETE_CLASSES],
    /// Time limits are multiplied by this: it doubles when one is hit, so that a store that is slower than anything expected
    /// is not given up for ever.
    patience: f64,
    /// When it doubled last. Requests that had begun by then had less time than the next ones will have.
    doubled_at: Option<Instant>,
}

/// The median time of a request, and how much longer the slowest may take.
#[derive(Clone, Debug)]
struct Expected {
    ln_service: f64,
    /// Of one connection, in bytes a second.
    ln_rate: f64,
    /// ln(D / expected).
    late: f64,
    /// How many requests were learned from.
    requests: f64,
}

/// Bytes a second over the last [`METER`], as far as they were told of.
#[derive(Clone, Debug)]
struct Meter {
    /// Those sent long ago count less.
    bytes: f64,
    at: Option<Instant>,
    /// Since when bytes have been going out.
    since: Option<Instant>,
}

impl Policy {
    /// A policy that knows nothing yet. `seed` decides ties and jitter.
    #[must_use]
    pub fn new(options: UploadOptions, buckets: Vec<Bucket>, seed: u64) -> Policy {
        let hedging = &options.hedging;
        let expected = |service: Duration| Expected {
            ln_service: service.as_secs_f64().max(1e-6).ln(),
            ln_rate: hedging.rate_start_bytes_per_second.max(1.0).ln(),
            late: hedging.late_start,
            requests: 0.0,
        };
        let class = Class {
            data: expected(hedging.service_start),
            control: expected(hedging.control_start),
            ln_complete: [hedging.complete_delay_start.as_secs_f64().max(1e-6).ln(); COMPLETE_CLASSES],
            patience: 1.0,
            doubled_at: None,
        };
        let same_as = |bucket: &Bucket| buckets.iter().position(|b| b.capabilities == bucket.capabilities);
        let class_of: Vec<_> = buckets.iter().map(|bucket| same_as(bucket).unwrap_or(0)).collect();
        Policy {
            health: Buckets::new(buckets.len(), hedging.clone(), seed),
            class_of,
            classes: vec![class; buckets.len()],
            tokens: hedging.tokens_max,
            second_chances: 0,
            primaries: 0,
            hedges: 0,
            refused_connection: false,
            freed: false,
            meter: Meter { bytes: 0.0, at: None, since: None },
            progress_seen: vec![false; buckets.len()],
            canary_patience: vec![1.0; buckets.len()],
            stats: PolicyStats::default(),
            options,
            buckets,
        }
    }

    /// The options it was made with.
    #[must_use]
    pub fn options(&self) -> &UploadOptions {
        &self.options
    }

    /// The buckets it was made with.
    #[must_use]
    pub fn buckets(&self) -> &[Bucket] {
        &self.buckets
    }

    /// A canary that is due: the caller puts a tiny object under a name of its own, deletes it, and tells how the PUT
    /// went by [`canary_ended`](Policy::canary_ended), in any case.
    pub fn canary(&mut self, now: Instant) -> Option<Canary> {
        let bucket = self.health.canary(now)?;
        self.stats.canaries += 1;
        Some(Canary { bucket, timeout: self.canary_limit(bucket).max(CANARY_LIMIT_MIN) })
    }

    /// How a canary went: whether the PUT succeeded, and how long it took.
    pub fn canary_ended(&mut self, bucket: BucketIndex, succeeded: bool, took: Duration, now: Instant) {
        let limit = self.canary_limit(bucket);
        let healthy = succeeded && took <= limit;
        let patience = &mut self.canary_patience[bucket.0];
        if succeeded && !healthy {
            *patience *= 2.0;
        } else if succeeded && took <= limit.div_f64(*patience) {
            *patience = 1.0;
        }
        self.health.canary_ended(bucket, healthy, now);
    }

    /// When to ask for a [`canary`](Policy::canary) again.
    #[must_use]
    pub fn deadline(&self) -> Option<Instant> {
        self.health.canary_at()
    }

    /// Whether connections have become free that some object was refused before: then all of them want a
    /// [`Tick`](crate::multipart::Event::Tick). Says so once.
    pub fn connections_freed(&mut self) -> bool {
        std::mem::take(&mut self.freed)
    }

    /// What this node knows, for others.
    #[must_use]
    pub fn health(&self, now: Instant) -> Health {
        self.health.health(now)
    }

    /// Takes over what others know. What has another number of buckets is read as far as it goes.
    pub fn merge(&mut self, others: &[Health], now: Instant) {
        self.health.merge(others, now);
    }

    /// Whether a bucket takes data.
    #[must_use]
    pub fn breaker(&self, bucket: BucketIndex, now: Instant) -> Breaker {
        self.health.breaker(bucket, now)
    }

    /// Counts since the start.
    #[must_use]
    pub fn stats(&self) -> PolicyStats {
        self.stats
    }

    /// How long a request may take that sends `bytes` and is not part of an object being written.
    #[must_use]
    pub fn request_timeout(&self, bucket: BucketIndex, bytes: u64) -> Duration {
        self.timeout(bucket, Work::Data(bytes))
    }

    /// The pause before another attempt after `failures` of them: doubled each time, with jitter.
    pub fn backoff(&mut self, failures: u32) -> Duration {
        let HedgeOptions { backoff_start, backoff_max, .. } = self.options.hedging;
        // With every bucket refusing, whoever has failed once has in effect failed often.
        let doublings = if self.health.all_refuse() { 16 } else { failures.saturating_sub(1).min(16) };
        let pause = backoff_start.saturating_mul(1 << doublings).min(backoff_max);
        pause.mul_f64(0.5 + self.health.random().unit())
    }

    pub(crate) fn home(&self, excluded: &[BucketIndex], now: Instant) -> BucketIndex {
        self.health.home(excluded, now)
    }

    pub(crate) fn alternate(&mut self, excluded: &[BucketIndex], now: Instant) -> Option<BucketIndex> {
        self.health.alternate(excluded, now)
    }

    /// Whether every bucket refuses: nothing is raced or sent elsewhere at once.
    pub(crate) fn all_refuse(&self) -> bool {
        self.health.all_refuse()
    }

    pub(crate) fn judge(&mut self, bucket: BucketIndex, verdict: Verdict, now: Instant) {
        self.health.judge(bucket, verdict, now);
    }

    pub(crate) fn expected(&self, bucket: BucketIndex, work: Work) -> Duration {
        let class = self.class(bucket);
        let seconds = match work {
            Work::Data(bytes) => class.data.ln_service.exp() + bytes as f64 / class.data.ln_rate.exp(),
            Work::Control | Work::Complete(_) => class.control.ln_service.exp(),
        };
        Duration::from_secs_f64(seconds.min(1e6))
    }

    /// How much of the expected time the bytes are on their way.
    pub(crate) fn sending(&self, bucket: BucketIndex, bytes: u64) -> Duration {
        self.expected(bucket, Work::Data(bytes)).saturating_sub(self.expected(bucket, Work::Data(0)))
    }

    /// D: when a request is late.
    pub(crate) fn delay(&self, bucket: BucketIndex, work: Work) -> Duration {
        let class = self.class(bucket);
        let delay = match work {
            Work::Data(_) => self.expected(bucket, work).mul_f64(class.data.late.exp()),
            Work::Control => self.expected(bucket, work).mul_f64(class.control.late.exp()),
            Work::Complete(parts) => Duration::from_secs_f64(class.ln_complete[complete_class(parts)].exp()),
        };
        delay.max(self.options.hedging.delay_min)
    }

    /// When a request is given up: it stalls, or its size is not what makes it slow.
    pub(crate) fn timeout(&self, bucket: BucketIndex, work: Work) -> Duration {
        let stall = self.options.hedging.stall_timeout;
        let least = match work {
            Work::Data(_) => stall + self.expected(bucket, work) * 3,
            Work::Control => stall,
            // A large object takes a store long, and racing it does not wait for this.
            Work::Complete(_) => stall * 6,
        };
        least.mul_f64(self.class(bucket).patience)
    }

    /// A request of an object in `bucket` succeeded after `took`.
    pub(crate) fn learn(&mut self, bucket: BucketIndex, work: Work, took: Duration) {
        let (expected, delay) = (self.expected(bucket, work), self.delay(bucket, work));
        self.move_expectation(bucket, work, took > expected, took > delay);
        let class = self.class_mut(bucket);
        class.patience = (class.patience / 2.0).max(1.0);
    }

    /// A request was given up because another bucket was faster. To be told before the loss is judged: a second loss in
    /// a row says more of the bucket than of how long requests take, and would let D chase itself.
    pub(crate) fn learn_loss(&mut self, bucket: BucketIndex, work: Work, age: Duration) {
        if !self.health.last_was_loss(bucket) {
            let (expected, delay) = (self.expected(bucket, work), self.delay(bucket, work));
            self.move_expectation(bucket, work, age > expected, age > delay);
        }
    }

    /// A request that began at `started` hit its time limit. Those that stall together are one stall.
    pub(crate) fn learn_timeout(&mut self, bucket: BucketIndex, started: Instant, now: Instant) {
        let class = self.class_mut(bucket);
        if class.doubled_at.is_none_or(|doubled_at| started >= doubled_at) {
            class.patience = (class.patience * 2.0).min(64.0);
            class.doubled_at = Some(now);
        }
    }

    /// A first attempt to send a part begins.
    pub(crate) fn earn(&mut self) {
        let HedgeOptions { tokens_per_part, tokens_max, .. } = self.options.hedging;
        self.tokens = (self.tokens + tokens_per_part).min(tokens_max);
    }

    /// Leave to race a request of this age, or `None`. A race that sends many parts costs as many tokens, at most all.
    pub(crate) fn grant(&mut self, age: Duration, delay: Duration, parts: usize) -> Option<Grant> {
        let HedgeOptions { tokens_max, second_chance_delays, second_chance_max, .. } = self.options.hedging;
        // With a purse that never holds one, no race is paid for.
        let cost = (parts as f64).min(tokens_max.max(1.0));
        let grant = if cost <= self.tokens {
            self.tokens -= cost;
            Grant::Token
        } else if age >= delay.mul_f64(second_chance_delays)
            && self.second_chances < second_chance_max as usize
        {
            self.second_chances += 1;
            Grant::SecondChance
        } else {
            self.stats.hedges_denied += 1;
            return None;
        };
        self.stats.hedges += 1;
        Some(grant)
    }

    /// A race is over.
    pub(crate) fn give_back(&mut self, grant: Grant) {
        if grant == Grant::SecondChance {
            self.second_chances = self.second_chances.saturating_sub(1);
        }
    }

    pub(crate) fn count_won(&mut self) {
        self.stats.hedges_won += 1;
    }

    /// Takes a connection for a request with a body, if one is free. An object that has none gets one in any case: objects
    /// that hang must not keep another from starting.
    pub(crate) fn connect(&mut self, lane: Lane, has_none: bool) -> bool {
        let (used, max) = match lane {
            Lane::Primary => (&mut self.primaries, self.options.connections()),
            Lane::Hedge => (&mut self.hedges, self.options.hedge_connections.max(1)),
        };
        if *used < max || has_none {
            *used += 1;
            return true;
        }
        match lane {
            Lane::Primary => self.refused_connection = true,
            Lane::Hedge => self.stats.hedges_denied += 1,
        }
        false
    }

    pub(crate) fn disconnect(&mut self, lane: Lane) {
        let used = match lane {
            Lane::Primary => {
                self.freed |= std::mem::take(&mut self.refused_connection);
                &mut self.primaries
            }
            Lane::Hedge => &mut self.hedges,
        };
        *used = used.saturating_sub(1);
    }

    /// Bytes went out.
    pub(crate) fn sent(&mut self, bytes: u64, now: Instant) {
        self.meter.add(bytes, now);
    }

    /// A request in this bucket has come so much further.
    pub(crate) fn progressed(&mut self, bucket: BucketIndex, bytes: u64, now: Instant) {
        self.progress_seen[bucket.0] = true;
        self.meter.add(bytes, now);
    }

    /// Whether it is known how far requests in this bucket have come.
    pub(crate) fn progress_seen(&self, bucket: BucketIndex) -> bool {
        self.progress_seen[bucket.0]
    }

    /// Whether the interface is what holds a request up that has sent `acknowledged` bytes in `age`: it is busy, and the
    /// request keeps up with the others. How far it has come may be unknown.
    pub(crate) fn interface_busy(&self, acknowledged: Option<u64>, age: Duration, now: Instant) -> bool {
        let Some(nic) = self.options.nic_bytes_per_second else { return false };
        let rate = self.meter.rate(now);
        if rate < self.options.hedging.nic_share * nic as f64 {
            return false;
        }
        let mean = rate / (self.primaries + self.hedges).max(1) as f64;
        acknowledged.is_none_or(|bytes| bytes as f64 >= 0.5 * mean * age.as_secs_f64())
    }

    fn move_expectation(&mut self, bucket: BucketIndex, work: Work, long: bool, late: bool) {
        let HedgeOptions { quantile, gain, .. } = self.options.hedging;
        let step = gain * if late { quantile } else { quantile - 1.0 };
        let median = EXPECTED_GAIN * if long { 0.5 } else { -0.5 };
        let class = self.class_mut(bucket);
        match work {
            Work::Data(bytes) => {
                let expected = &mut class.data;
                let factor = expected.factor(quantile);
                let (service, rate) = (expected.ln_service.exp(), expected.ln_rate.exp());
                // Each of the two moves as far as the time is made of it.
                let share = service / (service + bytes as f64 / rate);
                let median = median * factor;
                expected.ln_service = (expected.ln_service + median * share).clamp(-9.0, 5.0);
                expected.ln_rate = (expected.ln_rate - median * (1.0 - share)).clamp(7.0, 25.0);
                expected.late = (expected.late + step * factor).clamp(0.0, 5.0);
            }
            Work::Control => {
                let expected = &mut class.control;
                let factor = expected.factor(quantile);
                expected.ln_service = (expected.ln_service + median * factor).clamp(-9.0, 5.0);
                expected.late = (expected.late + step * factor).clamp(0.0, 5.0);
            }
            Work::Complete(parts) => {
                let ln = &mut class.ln_complete[complete_class(parts)];
                *ln = (*ln + step).clamp(-4.0, 5.0);
            }
        }
    }

    fn canary_limit(&self, bucket: BucketIndex) -> Duration {
        let expected = self.delay(bucket, Work::Data(0)).max(self.expected(bucket, Work::Data(0)) * 3);
        expected.mul_f64(self.canary_patience[bucket.0])
    }

    fn class(&self, bucket: BucketIndex) -> &Class {
        &self.classes[self.class_of[bucket.0]]
    }

    fn class_mut(&mut self, bucket: BucketIndex) -> &mut Class {
        &mut self.classes[self.class_of[bucket.0]]
    }
}

impl Expected {
    /// How many times as far as later on this request moves it. The start is a guess, and D comes down by a twentieth of what
    /// it goes up: where a node sends one request at a checkpoint, it would take half an hour to get to where it belongs.
    fn factor(&mut self, quantile: f64) -> f64 {
        let late_by_now = self.requests * (1.0 - quantile);
        self.requests += 1.0;
        (FIRST_GAIN / (1.0 + late_by_now)).max(1.0)
    }
}

impl Meter {
    fn add(&mut self, bytes: u64, now: Instant) {
        let idle = self.at.map_or(Duration::MAX, |at| now.saturating_duration_since(at));
        if idle > METER * 4 {
            (self.bytes, self.since) = (0.0, Some(now));
        }
        self.bytes = self.bytes * fading(idle) + bytes as f64;
        self.at = Some(now);
    }

    /// In bytes a second. Reports come in steps: what came last is as good as now for a while.
    fn rate(&self, now: Instant) -> f64 {
        let (Some(at), Some(since)) = (self.at, self.since) else { return 0.0 };
        let quiet = now.saturating_duration_since(at).saturating_sub(METER / 4);
        let seen = 1.0 - fading(at.saturating_duration_since(since).max(METER / 4));
        self.bytes * fading(quiet) / (seen * METER.as_secs_f64())
    }
}

/// What is left of a count after this time.
fn fading(time: Duration) -> f64 {
    (-time.as_secs_f64() / METER.as_secs_f64()).exp()
}

fn complete_class(parts: usize) -> usize {
    match parts {
        0..16 => 0,
        16..256 => 1,
        256..4096 => 2,
        _ => 3,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sim::SimStore;
    use crate::store::Store;

    fn two_buckets() -> Policy {
        let capabilities = SimStore::new(1).capabilities().clone();
        let bucket = Bucket { url: "sim://1".into(), capabilities };
        Policy::new(UploadOptions::default(), vec![bucket.clone(), bucket], 1)
    }

    #[test]
    fn a_bucket_far_away_does_not_stay_open() {
        let mut policy = two_buckets();
        let (far, mut now) = (BucketIndex(0), Instant::now());
        let mut canaries_until_closed = |policy: &mut Policy, took: Duration| {
            (0..3).for_each(|_| policy.judge(far, Verdict::Failed, now));
            for canaries in 1..10 {
                now = policy.deadline().expect("a canary is due");
                let canary = policy.canary(now).expect("it is due");
                assert!(canary.timeout >= CANARY_LIMIT_MIN);
                policy.canary_ended(far, took <= canary.timeout, took, now);
                if policy.breaker(far, now) != Breaker::Open {
                    return canaries;
                }
            }
            9
        };
        // A connection is made, in three round trips of 200 ms.
        assert_eq!(canaries_until_closed(&mut policy, Duration::from_millis(700)), 3);
        assert_eq!(canaries_until_closed(&mut policy, Duration::from_millis(700)), 1);
        // One as fast as a near bucket's: then 700 ms are a slow bucket again.
        assert_eq!(canaries_until_closed(&mut policy, Duration::from_millis(100)), 1);
        assert_eq!(canaries_until_closed(&mut policy, Duration::from_millis(700)), 3);
        assert_eq!(canaries_until_closed(&mut policy, Duration::from_secs(10)), 9);
    }

    #[test]
    fn d_is_where_it_belongs_after_some_dozen_requests_and_one_late_one_does_not_spoil_it() {
        let capabilities = SimStore::new(1).capabilities().clone();
        let bucket = Bucket { url: "sim://1".into(), capabilities };
        let mut policy = Policy::new(UploadOptions::default(), vec![bucket], 1);
        let (home, work) = (BucketIndex(0), Work::Data(5_000_000));
        let spread = |policy: &Policy| policy.delay(home, work).div_duration_f64(policy.expected(home, work));
        policy.learn(home, work, Duration::from_secs(5));
        assert!((2.0..2.5).contains(&spread(&policy)), "{}", spread(&policy));
        let mut policy = Policy::new(policy.options().clone(), policy.buckets().to_vec(), 1);
        for request in 0..60 {
            let took = policy.expected(home, work).mul_f64(if request % 2 == 0 { 0.9 } else { 1.1 });
            policy.learn(home, work, took);
        }
        assert!((1.3..1.6).contains(&spread(&policy)), "{}", spread(&policy));
    }
}
