//! Buckets: their health, and where an object is placed. Pure: time and randomness are arguments.
#![forbid(unsafe_code)]

use std::sync::Arc;

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
