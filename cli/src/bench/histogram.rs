//! Counts times in buckets that grow with them, in a fixed 15 KiB: recording one is an addition.

use std::time::Duration;

/// Each power of two is cut into this many buckets, so a time is known to about 3 %.
const SUB_BITS: u32 = 5;
const SUBS: usize = 1 << SUB_BITS;
const BUCKETS: usize = (64 - SUB_BITS as usize + 1) * SUBS;

/// How often times of each magnitude occurred.
#[derive(Clone, Debug)]
pub struct Histogram {
    buckets: Box<[u64; BUCKETS]>,
    count: u64,
    max: u64,
}

impl Default for Histogram {
    fn default() -> Histogram {
        Histogram { buckets: Box::new([0; BUCKETS]), count: 0, max: 0 }
    }
}

impl Histogram {
    pub fn record(&mut self, time: Duration) {
        let nanos = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.buckets[bucket_of(nanos)] += 1;
        self.count += 1;
        self.max = self.max.max(nanos);
    }

    pub fn merge(&mut self, other: &Histogram) {
        for (bucket, more) in self.buckets.iter_mut().zip(other.buckets.iter()) {
            *bucket += more;
        }
        self.count += other.count;
        self.max = self.max.max(other.max);
    }

    /// How many times were recorded.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// The longest time, exactly.
    pub fn max(&self) -> Duration {
        Duration::from_nanos(self.max)
    }

    /// The time that this share of all (0 to 1) did not exceed, at most 3 % too long; zero if there are none.
    pub fn quantile(&self, share: f64) -> Duration {
        let wanted = ((self.count as f64 * share).ceil() as u64).clamp(1, self.count.max(1));
        let mut seen = 0;
        for (index, count) in self.buckets.iter().enumerate() {
            seen += count;
            if seen >= wanted {
                return Duration::from_nanos(upper_end(index).min(self.max));
            }
        }
        Duration::ZERO
    }
}

fn bucket_of(nanos: u64) -> usize {
    if nanos < SUBS as u64 {
        return nanos as usize;
    }
    let shift = nanos.ilog2() - SUB_BITS;
    (shift as usize + 1) * SUBS + (nanos >> shift) as usize - SUBS
}

/// The longest time of a bucket.
fn upper_end(bucket: usize) -> u64 {
    if bucket < SUBS {
        return bucket as u64;
    }
    let shift = bucket / SUBS - 1;
    let next = (bucket % SUBS + SUBS + 1) as u128;
    u64::try_from((next << shift) - 1).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_follow_one_another_and_hold_their_times() {
        assert_eq!(bucket_of(u64::MAX), BUCKETS - 1);
        assert_eq!(upper_end(BUCKETS - 1), u64::MAX);
        for bucket in 1..BUCKETS {
            let lowest = upper_end(bucket - 1) + 1;
            assert_eq!((bucket_of(lowest), bucket_of(upper_end(bucket))), (bucket, bucket));
            assert!((upper_end(bucket) - lowest) as f64 <= lowest as f64 / SUBS as f64);
        }
    }

    #[test]
    fn quantiles() {
        let mut histogram = Histogram::default();
        assert_eq!((histogram.quantile(0.5), histogram.max()), (Duration::ZERO, Duration::ZERO));
        let mut odd = Histogram::default();
        for micros in 1..=1000 {
            let half = if micros % 2 == 0 { &mut histogram } else { &mut odd };
            half.record(Duration::from_micros(micros));
        }
        histogram.merge(&odd);
        assert_eq!((histogram.count(), histogram.max()), (1000, Duration::from_micros(1000)));
        for (share, micros) in [(0.5, 500.0), (0.99, 990.0), (0.001, 1.0), (1.0, 1000.0)] {
            let ratio = histogram.quantile(share).as_nanos() as f64 / (micros * 1000.0);
            assert!((1.0..1.032).contains(&ratio), "{share}: {ratio}");
        }
    }
}
