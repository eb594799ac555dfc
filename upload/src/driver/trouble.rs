//! When a person is told that the requests to a bucket keep failing: a few seconds after they began to, and then seldom.
//!
//! What is tried again may go on for as long as a persist may take, and ends in an error only then. Refusals that do not
//! pass by themselves are told by their error at once; only where another bucket takes what one refuses are they told here. Pure.
#![forbid(unsafe_code)]

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::bucket::BucketIndex;

/// For so long nothing is said: what ends sooner is nobody's business.
const TELL_AFTER: Duration = Duration::from_secs(3);
/// The time between two tellings.
const TELL_AGAIN: Duration = Duration::from_secs(60);
/// A failure so long after the last one has nothing to do with it.
const QUIET_MAX: Duration = Duration::from_secs(60);

/// What is known of all buckets.
#[derive(Debug)]
pub(super) struct Troubles(Mutex<Vec<Bucket>>);

#[derive(Clone, Debug, Default)]
struct Bucket {
    /// When a request succeeded last.
    good: Option<Instant>,
    trouble: Option<Trouble>,
    /// When it was told last that the bucket refuses objects.
    refusal_told: Option<Instant>,
}

#[derive(Clone, Debug)]
struct Trouble {
    /// When the first request that failed was begun, or the last success before its end came.
    since: Instant,
    last: Instant,
    told: Option<Instant>,
    /// Whether requests with a body fail: an answer to one without says nothing of those.
    sends: bool,
}

impl Troubles {
    pub(super) fn new(buckets: usize) -> Troubles {
        Troubles(Mutex::new(vec![Bucket::default(); buckets]))
    }

    /// A request succeeded. For how long they had failed, if that was told.
    pub(super) fn succeeded(&self, bucket: BucketIndex, sends: bool, now: Instant) -> Option<Duration> {
        let bucket = &mut self.lock()[bucket.0];
        let over = bucket.trouble.take_if(|trouble| sends || !trouble.sends);
        if bucket.trouble.is_none() {
            bucket.good = Some(now);
        }
        over.filter(|trouble| trouble.told.is_some()).map(|trouble| now - trouble.since)
    }

    /// A request begun at `started` failed in a way that may pass. For how long they have failed, if that is to be told.
    pub(super) fn failed(
        &self,
        bucket: BucketIndex,
        sends: bool,
        started: Instant,
        now: Instant,
    ) -> Option<Duration> {
        let bucket = &mut self.lock()[bucket.0];
        let since = bucket.good.map_or(started, |good| good.max(started));
        let stale = |trouble: &mut Trouble| now.saturating_duration_since(trouble.last) > QUIET_MAX;
        bucket.trouble.take_if(|trouble| stale(trouble) && since > trouble.last);
        let trouble = bucket.trouble.get_or_insert(Trouble { since, last: now, told: None, sends });
        trouble.last = now;
        trouble.sends |= sends;
        let long = now.saturating_duration_since(trouble.since);
        let due = trouble.told.is_none_or(|told| now.saturating_duration_since(told) >= TELL_AGAIN);
        (due && long >= TELL_AFTER).then(|| {
            trouble.told = Some(now);
            long
        })
    }

    /// A bucket refused an object for a reason that does not pass by itself. Whether that is to be told.
    pub(super) fn refused(&self, bucket: BucketIndex, now: Instant) -> bool {
        let told = &mut self.lock()[bucket.0].refusal_told;
        let due = told.is_none_or(|told| now.saturating_duration_since(told) >= TELL_AGAIN);
        if due {
            *told = Some(now);
        }
        due
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Bucket>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONLY: BucketIndex = BucketIndex(0);

    #[test]
    fn what_keeps_failing_is_told_after_seconds_and_then_seldom() {
        let troubles = Troubles::new(1);
        let start = Instant::now();
        let mut told = Vec::new();
        for second in 0..=130 {
            let now = start + Duration::from_secs(second);
            told.extend(troubles.failed(ONLY, true, now, now).map(|long| long.as_secs()));
        }
        assert_eq!(told, [3, 63, 123]);
        let now = start + Duration::from_secs(131);
        assert_eq!(troubles.succeeded(ONLY, false, now), None, "it sent nothing");
        assert_eq!(troubles.succeeded(ONLY, true, now), Some(Duration::from_secs(131)));
        assert_eq!(troubles.succeeded(ONLY, true, now), None);
    }

    #[test]
    fn a_request_that_hung_for_long_is_told_when_it_ends() {
        let troubles = Troubles::new(1);
        let start = Instant::now();
        let later = start + Duration::from_secs(10);
        assert_eq!(troubles.failed(ONLY, true, start, later), Some(Duration::from_secs(10)));
    }

    #[test]
    fn refusals_are_told_at_once_and_then_seldom() {
        let troubles = Troubles::new(2);
        let start = Instant::now();
        let seconds = |second| start + Duration::from_secs(second);
        let told: Vec<u64> = (0..=130).filter(|second| troubles.refused(ONLY, seconds(*second))).collect();
        assert_eq!(told, [0, 60, 120]);
        assert!(troubles.refused(BucketIndex(1), seconds(130)), "each bucket for itself");
    }

    #[test]
    fn single_failures_are_not_told() {
        let troubles = Troubles::new(1);
        let start = Instant::now();
        for second in 0..20 {
            let now = start + Duration::from_secs(second);
            assert_eq!(troubles.failed(ONLY, true, start, now), None);
            assert_eq!(troubles.succeeded(ONLY, true, now), None);
        }
        let mut now = start + Duration::from_secs(20);
        for _ in 0..20 {
            now += Duration::from_secs(100);
            assert_eq!(troubles.failed(ONLY, true, now, now), None);
        }
    }
}
