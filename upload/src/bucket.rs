//! Buckets: their health, and where an object is placed. Pure: time and randomness are arguments.
#![forbid(unsafe_code)]

/// The index of a bucket in the list that a driver was started with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BucketIndex(pub usize);
