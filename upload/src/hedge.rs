//! When a request is late, whether it may be raced, and where to: one policy for all objects of a driver. Pure: time and
//! randomness are arguments.
#![forbid(unsafe_code)]

use std::time::{Duration, Instant};

use crate::bucket::{Bucket, BucketIndex};
use crate::options::UploadOptions;

/// What all objects of a driver share: what was learned about the buckets, budgets and connections.
#[derive(Debug)]
pub struct Policy {
    options: UploadOptions,
    buckets: Vec<Bucket>,
}

/// What one node has learned about the buckets, for others: small enough to travel with a checkpoint.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Health {
    /// Per bucket, in the order of the configuration.
    pub buckets: Vec<BucketHealth>,
}

/// What one node has learned about a bucket.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct BucketHealth {
    /// The share of its latest outcomes that were bad, 0 to 1.
    pub bad: f64,
    /// How long from now on nothing should be placed there.
    pub avoid: Duration,
    /// Whether it takes no data at all for that time.
    pub open: bool,
}

/// A tiny PUT into a bucket that takes no data, to see whether it has recovered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Canary {
    /// Which bucket.
    pub bucket: BucketIndex,
    /// How long it may take.
    pub timeout: Duration,
}

impl Policy {
    /// A policy that knows nothing yet. `seed` decides ties and jitter.
    #[must_use]
    pub fn new(options: UploadOptions, buckets: Vec<Bucket>, seed: u64) -> Policy {
        let _ = seed;
        Policy { options, buckets }
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

    /// A canary that is due: the caller puts a tiny object under a name of its own, deletes it, and tells how it went by
    /// [`canary_ended`](Policy::canary_ended).
    pub fn canary(&mut self, now: Instant) -> Option<Canary> {
        let _ = now;
        None
    }

    /// How a canary went.
    pub fn canary_ended(&mut self, bucket: BucketIndex, healthy: bool, took: Duration, now: Instant) {
        let _ = (bucket, healthy, took, now);
    }

    /// When to ask for a [`canary`](Policy::canary) again.
    #[must_use]
    pub fn deadline(&self) -> Option<Instant> {
        None
    }

    /// What this node knows, for others.
    #[must_use]
    pub fn health(&self, now: Instant) -> Health {
        let _ = now;
        Health::default()
    }

    /// Takes over what others know.
    pub fn merge(&mut self, others: &[Health], now: Instant) {
        let _ = (others, now);
    }
}
