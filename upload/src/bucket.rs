//! Buckets: their health, and where an object is placed. Pure: time and randomness are arguments.
//!
//! When a request counts as late is decided in [`hedge`](crate::hedge); here only what it says about its bucket.
//!
//! Invariants:
//! 1. A bucket that is open takes no data that another one can take; only a canary that came through closes it.
//! 2. There is always a home: with every bucket avoided or open, the least bad one.
//! 3. What is heard of other nodes leaves one bucket to take data at least, and closes another one until the first canary.
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::options::HedgeOptions;
use crate::store::Capabilities;

/// The index of a bucket in the list that a driver was started with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BucketIndex(pub usize);

/// What is known of a bucket from the start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bucket {
    /// Its URL, for errors.
    pub url: Arc<str>,
    /// What it takes.
    pub capabilities: Capabilities,
}

/// What one node has learned about the buckets, for others: small enough to travel with a checkpoint.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Health {
    /// Per bucket, in the order of the configuration.
    pub buckets: Vec<BucketHealth>,
}

/// What one node has lately seen of a bucket: numbers of outcomes, halved every [`MEMORY`].
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct BucketHealth {
    /// Requests that went well.
    pub good: f64,
    /// Requests that were refused, stalled, failed, or lost to another bucket.
    pub bad: f64,
}

/// The half-life of outcomes in [`BucketHealth`].
pub const MEMORY: Duration = Duration::from_secs(20);

/// A tiny PUT into a bucket that takes no data, to see whether it has recovered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Canary {
    /// Which bucket.
    pub bucket: BucketIndex,
    /// How long it may take.
    pub timeout: Duration,
}

/// Whether a bucket takes data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Breaker {
    /// It does.
    Closed,
    /// Nothing is placed there for a while; it may serve as an alternate.
    Avoided,
    /// It takes no data until a canary comes through.
    Open,
}

/// How a request speaks for or against its bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    Good,
    /// Lost to another bucket.
    Lost,
    /// Refused for now.
    Refused,
    /// Stalled, broken off or failed.
    Failed,
}

/// A seeded source of randomness (SplitMix64): it decides ties and jitter, nothing that must be hard to guess.
#[derive(Clone, Debug)]
pub(crate) struct Random(pub(crate) u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Below `bound`, which is not 0.
    pub(crate) fn below(&mut self, bound: usize) -> usize {
        usize::try_from(self.next() % bound as u64).unwrap_or(0)
    }

    /// From 0 to 1.
    pub(crate) fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1_u64 << 53) as f64
    }
}

#[derive(Clone, Debug)]
struct State {
    /// Share of bad outcomes, the newest weighing `health_gain`.
    bad: f64,
    /// Share of refusals, likewise.
    refused: f64,
    lately: BucketHealth,
    lately_at: Instant,
    avoided_until: Option<Instant>,
    avoid_next: Duration,
    open: Option<Open>,
    open_next: Duration,
    last_was_loss: bool,
}

#[derive(Clone, Copy, Debug)]
struct Open {
    canary_at: Instant,
    canary_in_flight: bool,
}

/// The health of all buckets.
#[derive(Clone, Debug)]
pub(crate) struct Buckets {
    states: Vec<Option<State>>,
    options: HedgeOptions,
    /// Where the search for a home starts: another one on every node, the same one for long on this one, so that its
    /// connections stay warm.
    first: usize,
    random: Random,
}

impl Buckets {
    pub(crate) fn new(count: usize, options: HedgeOptions, seed: u64) -> Buckets {
        let mut random = Random(seed);
        Buckets { states: vec![None; count], options, first: random.below(count.max(1)), random }
    }

    pub(crate) fn random(&mut self) -> &mut Random {
        &mut self.random
    }

    /// Where an object is placed first: not in `excluded`, unless all are.
    pub(crate) fn home(&self, excluded: &[BucketIndex], now: Instant) -> BucketIndex {
        let count = self.states.len().max(1);
        let order = (0..count).map(|step| BucketIndex((self.first + step) % count));
        // The first of the best: `min_by` keeps the earlier one of equals.
        order
            .min_by(|a, b| {
                let rank = |bucket: &BucketIndex| {
                    let breaker = self.breaker(*bucket, now);
                    let bad = if breaker == Breaker::Closed { 0.0 } else { self.bad(*bucket) };
                    (u8::from(excluded.contains(bucket)), breaker as u8, bad)
                };
                let (a, b) = (rank(a), rank(b));
                (a.0, a.1).cmp(&(b.0, b.1)).then(a.2.total_cmp(&b.2))
            })
            .unwrap_or(BucketIndex(0))
    }

    /// The better of two buckets that take data and are not in `excluded`.
    pub(crate) fn alternate(&mut self, excluded: &[BucketIndex], now: Instant) -> Option<BucketIndex> {
        let mut others: Vec<_> = (0..self.states.len())
            .map(BucketIndex)
            .filter(|bucket| !excluded.contains(bucket) && self.breaker(*bucket, now) != Breaker::Open)
            .collect();
        if others.is_empty() {
            return None;
        }
        let a = others.swap_remove(self.random.below(others.len()));
        if others.is_empty() {
            return Some(a);
        }
        let b = others.swap_remove(self.random.below(others.len()));
        let rank = |bucket: BucketIndex| (self.breaker(bucket, now) as u8, self.bad(bucket));
        let (rank_a, rank_b) = (rank(a), rank(b));
        let better = rank_a.0.cmp(&rank_b.0).then(rank_a.1.total_cmp(&rank_b.1));
        Some(if better.is_gt() { b } else { a })
    }

    pub(crate) fn breaker(&self, bucket: BucketIndex, now: Instant) -> Breaker {
        match self.states.get(bucket.0).and_then(Option::as_ref) {
            Some(State { open: Some(_), .. }) => Breaker::Open,
            Some(State { avoided_until: Some(until), .. }) if *until > now => Breaker::Avoided,
            _ => Breaker::Closed,
        }
    }

    /// Whether the latest outcomes of every bucket are mostly refusals: then going elsewhere only adds to the load.
    pub(crate) fn all_refuse(&self) -> bool {
        self.states.iter().all(|state| state.as_ref().is_some_and(|s| s.refused > self.options.refused_max))
    }

    /// Whether the bucket's previous outcome was a loss to another one.
    pub(crate) fn last_was_loss(&self, bucket: BucketIndex) -> bool {
        self.states.get(bucket.0).and_then(Option::as_ref).is_some_and(|state| state.last_was_loss)
    }

    pub(crate) fn judge(&mut self, bucket: BucketIndex, verdict: Verdict, now: Instant) {
        let HedgeOptions { health_gain, open_above, .. } = self.options;
        let alone = self.states.len() == 1;
        let options = self.options.clone();
        let Some(state) = self.state(bucket, now) else { return };
        let bad = verdict != Verdict::Good;
        let weigh = |share: f64, is: bool| share + health_gain * (f64::from(u8::from(is)) - share);
        state.bad = weigh(state.bad, bad);
        state.refused = weigh(state.refused, verdict == Verdict::Refused);
        state.last_was_loss = verdict == Verdict::Lost;
        state.fade(now);
        if !bad {
            state.lately.good += 1.0;
            // It has been good for long enough that the next trouble counts as a first one.
            if state.bad < 0.05 {
                state.avoid_next = options.avoid_start;
                state.open_next = options.open_start;
            }
            return;
        }
        state.lately.bad += 1.0;
        state.avoid(&options, now);
        // A single bucket is never left alone: there is nowhere else to go, and back-off protects it.
        if state.bad > open_above && !alone {
            state.open(&options, now);
        }
    }

    /// The canary that is due first.
    pub(crate) fn canary(&mut self, now: Instant) -> Option<BucketIndex> {
        let index = self.states.iter().position(|state| {
            matches!(state, Some(State { open: Some(open), .. }) if !open.canary_in_flight && open.canary_at <= now)
        })?;
        if let Some(State { open: Some(open), .. }) = &mut self.states[index] {
            open.canary_in_flight = true;
        }
        Some(BucketIndex(index))
    }

    pub(crate) fn canary_ended(&mut self, bucket: BucketIndex, healthy: bool, now: Instant) {
        let options = self.options.clone();
        let Some(state) = self.state(bucket, now) else { return };
        if state.open.take().is_none() {
            return;
        }
        if healthy {
            state.bad = 0.0;
            state.refused = 0.0;
            state.last_was_loss = false;
            state.lately = BucketHealth::default();
            state.avoided_until = None;
        } else {
            state.open(&options, now);
        }
    }

    pub(crate) fn canary_at(&self) -> Option<Instant> {
        let open = self.states.iter().flatten().filter_map(|state| state.open);
        open.filter(|open| !open.canary_in_flight).map(|open| open.canary_at).min()
    }

    pub(crate) fn health(&self, now: Instant) -> Health {
        let lately = |state: &Option<State>| {
            state.clone().map_or(BucketHealth::default(), |mut state| {
                state.fade(now);
                state.lately
            })
        };
        Health { buckets: self.states.iter().map(lately).collect() }
    }

    /// Avoids or opens the buckets of which most of what others lately saw was bad, the worst first. A few bad outcomes among
    /// many are what a healthy bucket gives. What comes from elsewhere may be anything, and old.
    pub(crate) fn merge(&mut self, others: &[Health], now: Instant) {
        const OUTCOMES_MIN: f64 = 3.0;
        let options = self.options.clone();
        if self.states.len() == 1 {
            return;
        }
        let mut shares = Vec::new();
        for index in 0..self.states.len() {
            let (mut good, mut bad) = (0.0, 0.0);
            for health in others.iter().filter_map(|other| other.buckets.get(index)) {
                if health.good.is_finite() && health.bad.is_finite() {
                    good += health.good.max(0.0);
                    bad += health.bad.max(0.0);
                }
            }
            if good + bad >= OUTCOMES_MIN {
                shares.push((bad / (good + bad), BucketIndex(index)));
            }
        }
        shares.sort_by(|a, b| b.0.total_cmp(&a.0));
        for (share, bucket) in shares {
            let is_closed = |index| self.breaker(BucketIndex(index), now) != Breaker::Open;
            let takes_data = (0..self.states.len()).filter(|index| is_closed(*index)).count();
            let Some(state) = self.state(bucket, now) else { continue };
            if share > options.health_gain {
                state.avoid(&options, now);
            }
            if state.open.is_none() && share > options.open_above && takes_data > 1 {
                state.open_for(options.open_start, now);
            } else if state.open.is_none() && share <= options.health_gain {
                // Everybody else gets on well with it: this node had bad luck.
                state.avoided_until = None;
            }
        }
    }

    fn bad(&self, bucket: BucketIndex) -> f64 {
        self.states.get(bucket.0).and_then(Option::as_ref).map_or(0.0, |state| state.bad)
    }

    fn state(&mut self, bucket: BucketIndex, now: Instant) -> Option<&mut State> {
        let HedgeOptions { avoid_start, open_start, .. } = self.options;
        let state = self.states.get_mut(bucket.0)?;
        Some(state.get_or_insert(State {
            bad: 0.0,
            refused: 0.0,
            lately: BucketHealth::default(),
            lately_at: now,
            avoided_until: None,
            avoid_next: avoid_start,
            open: None,
            open_next: open_start,
            last_was_loss: false,
        }))
    }
}

impl State {
    fn fade(&mut self, now: Instant) {
        let age = now.saturating_duration_since(self.lately_at).as_secs_f64() / MEMORY.as_secs_f64();
        self.lately_at = self.lately_at.max(now);
        let factor = (-age).exp2();
        self.lately.good *= factor;
        self.lately.bad *= factor;
    }

    /// Outcomes of requests that were under way when it began belong to the same trouble.
    fn avoid(&mut self, options: &HedgeOptions, now: Instant) {
        if self.avoided_until.is_none_or(|until| until <= now) {
            self.avoided_until = Some(now + self.avoid_next);
            self.avoid_next = (self.avoid_next * 2).min(options.avoid_max);
        }
    }

    fn open(&mut self, options: &HedgeOptions, now: Instant) {
        if self.open.is_none() {
            self.open_for(self.open_next, now);
            self.open_next = (self.open_next * 2).min(options.open_max);
        }
    }

    fn open_for(&mut self, time: Duration, now: Instant) {
        self.open = Some(Open { canary_at: now + time, canary_in_flight: false });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn buckets(count: usize) -> (Buckets, Instant) {
        (Buckets::new(count, HedgeOptions::default(), 7), Instant::now())
    }

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_bad_outcome_moves_the_home_away_for_a_while_and_longer_each_time() {
        let (mut buckets, now) = buckets(3);
        let home = buckets.home(&[], now);
        buckets.judge(home, Verdict::Lost, now);
        assert_ne!(buckets.home(&[], now), home);
        assert_ne!(buckets.home(&[], now + 29 * SECOND), home);
        assert_eq!(buckets.home(&[], now + 30 * SECOND), home);
        buckets.judge(home, Verdict::Lost, now + 30 * SECOND);
        assert_ne!(buckets.home(&[], now + 89 * SECOND), home);
        assert_eq!(buckets.home(&[], now + 90 * SECOND), home);
    }

    #[test]
    fn a_bucket_opens_after_three_bad_outcomes_and_only_a_canary_closes_it() {
        let (mut buckets, mut now) = buckets(2);
        let (bad, other) = (BucketIndex(0), BucketIndex(1));
        for _ in 0..2 {
            buckets.judge(bad, Verdict::Failed, now);
            assert_eq!(buckets.alternate(&[other], now), Some(bad));
        }
        buckets.judge(bad, Verdict::Failed, now);
        assert_eq!(buckets.breaker(bad, now + 3600 * SECOND), Breaker::Open);
        assert_eq!(buckets.alternate(&[other], now), None);
        assert_eq!(buckets.home(&[], now), other);
        // The hold doubles with every canary that fails.
        for hold in [15, 30, 60, 120, 240, 240] {
            assert_eq!(buckets.canary_at(), Some(now + hold * SECOND));
            assert_eq!(buckets.canary(now + (hold - 1) * SECOND), None);
            now += hold * SECOND;
            assert_eq!(buckets.canary(now), Some(bad));
            assert_eq!(buckets.canary(now), None, "one at a time");
            buckets.canary_ended(bad, false, now);
        }
        now += 240 * SECOND;
        assert_eq!(buckets.canary(now), Some(bad));
        buckets.canary_ended(bad, true, now);
        assert_eq!(buckets.breaker(bad, now), Breaker::Closed);
    }

    #[test]
    fn with_every_bucket_bad_there_is_still_a_home_and_one_bucket_never_opens() {
        let (mut two, now) = buckets(2);
        for _ in 0..9 {
            two.judge(BucketIndex(0), Verdict::Failed, now);
            two.judge(BucketIndex(1), Verdict::Failed, now);
        }
        assert!(two.home(&[], now).0 < 2);
        assert_eq!(two.home(&[BucketIndex(0)], now), BucketIndex(1));
        let (mut one, now) = buckets(1);
        for _ in 0..9 {
            one.judge(BucketIndex(0), Verdict::Refused, now);
        }
        assert_ne!(one.breaker(BucketIndex(0), now), Breaker::Open);
        assert!(one.all_refuse());
    }

    #[test]
    fn shared_health_opens_what_most_nodes_see_fail_and_forgives_bad_luck() {
        let (mut node, mut now) = buckets(3);
        let mut others = vec![node.clone(); 8];
        for (index, other) in others.iter_mut().enumerate() {
            other.judge(BucketIndex(0), Verdict::Failed, now);
            let verdict = if index == 0 { Verdict::Lost } else { Verdict::Good };
            other.judge(BucketIndex(1), verdict, now);
        }
        node.judge(BucketIndex(1), Verdict::Lost, now);
        let mut healths: Vec<_> = others.iter().map(|other| other.health(now)).collect();
        healths.push(Health { buckets: vec![BucketHealth { good: f64::NAN, bad: -1.0 }; 9] });
        node.merge(&healths, now);
        assert_eq!(node.breaker(BucketIndex(0), now), Breaker::Open);
        assert_eq!(node.breaker(BucketIndex(1), now), Breaker::Closed);
        // It says so often: one canary suffices all the same.
        for _ in 0..9 {
            node.merge(&healths, now);
            assert_eq!(node.canary_at(), Some(now + 15 * SECOND));
            now += 15 * SECOND;
            assert_eq!(node.canary(now), Some(BucketIndex(0)));
            node.canary_ended(BucketIndex(0), true, now);
            assert_eq!(node.breaker(BucketIndex(0), now), Breaker::Closed);
        }
        // What was seen long ago does not count.
        let (mut late, _) = buckets(3);
        let old: Vec<_> = others.iter().map(|other| other.health(now + 100 * SECOND)).collect();
        late.merge(&old, now + 100 * SECOND);
        assert_eq!(late.breaker(BucketIndex(0), now + 100 * SECOND), Breaker::Closed);
    }

    #[test]
    fn what_others_say_leaves_one_bucket_to_take_data() {
        let (mut node, now) = buckets(3);
        node.judge(BucketIndex(1), Verdict::Good, now);
        let bad = |good, bad| BucketHealth { good, bad };
        let hostile = Health { buckets: vec![bad(0.0, 1e300), bad(1.0, 9.0), bad(0.0, 1e300)] };
        node.merge(&[hostile.clone(), hostile], now);
        assert_eq!(node.breaker(BucketIndex(0), now), Breaker::Open);
        assert_eq!(node.breaker(BucketIndex(2), now), Breaker::Open);
        assert_eq!(node.breaker(BucketIndex(1), now), Breaker::Avoided, "the least bad");
        assert_eq!(node.home(&[], now), BucketIndex(1));
        // A bucket that failed this node itself counts as well.
        let (mut node, now) = buckets(2);
        for _ in 0..9 {
            node.judge(BucketIndex(0), Verdict::Failed, now);
        }
        node.merge(&[Health { buckets: vec![bad(9.0, 0.0), bad(0.0, 9.0)] }], now);
        assert_eq!(node.breaker(BucketIndex(0), now), Breaker::Open);
        assert_eq!(node.breaker(BucketIndex(1), now), Breaker::Avoided);
    }
}
