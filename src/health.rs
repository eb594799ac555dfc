//! What nodes tell each other of their buckets: numbers of good and bad requests, by the bucket's URL.
//!
//! Owns the value, its sum and its bytes. What a node counts, and what it does with what others counted, is decided in
//! `upload/src/bucket.rs`.
//!
//! Bytes, version 1: magic (8), version u32, body length u32, body, xxh3-64 of all before it. All little-endian. Body:
//! number of buckets; per bucket, in ascending order of URLs: URL, good and bad requests in thousandths. Integers without
//! a width are those of `varint.rs`; a text is its length and its UTF-8. A value has one encoding.

use std::collections::BTreeMap;
use std::sync::Arc;

use tidelog_upload::bucket;
use twox_hash::XxHash3_64;

use crate::fields::{FieldError, FieldReader, put_text};
use crate::manifest::BUCKETS_MAX;
use crate::piece::BUCKET_BYTES_MAX;
use crate::varint;

const MAGIC: [u8; 8] = *b"tlogBHL\n";
const VERSION: u32 = 1;
const HEAD_BYTES: usize = 16;
const CHECKSUM_BYTES: usize = 8;
const BODY_BYTES_MAX: usize = 1 << 20;
/// What a bucket takes at least: a URL of one byte, and two numbers.
const BUCKET_BYTES_MIN: usize = 4;
/// More requests of a kind than this, in thousandths, count as this many.
const COUNT_MAX: u64 = 1 << 50;

/// What one node, or several together, have lately seen of buckets: how many requests went well in each, and how many were
/// refused, stalled, failed, or lost to another bucket. It is small enough to travel with a checkpoint.
///
/// [`Changelog::bucket_health`](crate::Changelog::bucket_health) makes it, whoever coordinates checkpoints
/// [adds](BucketHealth::add) the values of all nodes, and each node
/// [learns](crate::Changelog::learn_bucket_health) the sum. The numbers are halved every 20 seconds at the node that counts
/// them, and nowhere else: add up new values each time, and drop what is older than a checkpoint or two.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let dir = tempfile::tempdir()?;
/// # let bucket = format!("file://{}", dir.path().join("bucket").display());
/// # use tidelog::{BucketHealth, Changelog, Options};
/// # let options = Options::new(bucket, dir.path().join("local")).segment_bytes(1 << 20).local_bytes(4 << 20);
/// # let changelog = Changelog::open(options)?;
/// // At each node, with what it answers to the coordinator:
/// let bytes = changelog.bucket_health().to_bytes();
///
/// // At the coordinator, for each of them:
/// let mut all = BucketHealth::default();
/// all.add(&BucketHealth::from_bytes(&bytes)?);
///
/// // At each node, with the next checkpoint:
/// changelog.learn_bucket_health(&BucketHealth::from_bytes(&all.to_bytes())?);
/// # Ok(()) }
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BucketHealth {
    buckets: BTreeMap<Arc<str>, Counts>,
}

/// In thousandths of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Counts {
    good: u64,
    bad: u64,
}

/// Why bytes are no [`BucketHealth`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BucketHealthError {
    /// They are something else.
    #[error("this is not the health of buckets: give the bytes that `to_bytes` returned")]
    NotHealth,
    /// A newer tidelog wrote them.
    #[error(
        "the health of buckets has format version {found}, this program knows up to {known}: do without it"
    )]
    NewerVersion {
        /// The version in the bytes.
        found: u32,
        /// The newest version that this program reads.
        known: u32,
    },
    /// The end is missing.
    #[error("the health of buckets is cut off: give all of it")]
    Truncated,
    /// They are not what was written.
    #[error("the health of buckets does not match its checksum, it was damaged or edited: do without it")]
    Checksum,
    /// The contents are out of bounds.
    #[error("the health of buckets is invalid, its {0} is out of bounds: do without it")]
    Invalid(&'static str),
}

impl BucketHealth {
    /// Adds what others have seen. Of more than 64 buckets, the last ones by URL are left out.
    pub fn add(&mut self, other: &BucketHealth) {
        for (url, counts) in &other.buckets {
            let sum = self.buckets.entry(Arc::clone(url)).or_default();
            *sum = Counts {
                good: (sum.good + counts.good).min(COUNT_MAX),
                bad: (sum.bad + counts.bad).min(COUNT_MAX),
            };
        }
        while self.buckets.len() > BUCKETS_MAX {
            self.buckets.pop_last();
        }
    }

    /// The buckets by URL, with the numbers of good and of bad requests.
    pub fn buckets(&self) -> impl Iterator<Item = (&str, f64, f64)> {
        self.buckets.iter().map(|(url, counts)| (&**url, counts.good as f64 / 1e3, counts.bad as f64 / 1e3))
    }

    /// The value as bytes, in the current version.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut body = Vec::new();
        varint::put(&mut body, self.buckets.len() as u64);
        for (url, Counts { good, bad }) in &self.buckets {
            put_text(&mut body, url);
            varint::put(&mut body, *good);
            varint::put(&mut body, *bad);
        }
        let mut bytes = Vec::with_capacity(HEAD_BYTES + body.len() + CHECKSUM_BYTES);
        bytes.extend_from_slice(&MAGIC);
        bytes.extend_from_slice(&VERSION.to_le_bytes());
        bytes.extend_from_slice(&(body.len() as u32).to_le_bytes());
        bytes.extend_from_slice(&body);
        let checksum = XxHash3_64::oneshot(&bytes);
        bytes.extend_from_slice(&checksum.to_le_bytes());
        bytes
    }

    /// Reads what [`to_bytes`](Self::to_bytes) wrote, in this version or an earlier one. Takes any bytes.
    ///
    /// # Errors
    /// Every change of the bytes is found and named; see [`BucketHealthError`].
    pub fn from_bytes(bytes: &[u8]) -> Result<BucketHealth, BucketHealthError> {
        let Some(rest) = bytes.strip_prefix(&MAGIC) else {
            let cut_off = !bytes.is_empty() && MAGIC.starts_with(bytes);
            return Err(if cut_off { BucketHealthError::Truncated } else { BucketHealthError::NotHealth });
        };
        let mut reader = FieldReader::new(rest);
        match reader.u32("version")? {
            0 => return Err(BucketHealthError::Invalid("version")),
            1..=VERSION => {}
            found => return Err(BucketHealthError::NewerVersion { found, known: VERSION }),
        }
        let body_bytes = reader.u32("length")? as usize;
        if body_bytes > BODY_BYTES_MAX {
            return Err(BucketHealthError::Invalid("length"));
        }
        let body = reader.bytes(body_bytes, "body")?;
        let checksum = reader.u64("checksum")?;
        if reader.left_bytes() > 0 {
            return Err(BucketHealthError::Invalid("end"));
        }
        if XxHash3_64::oneshot(&bytes[..HEAD_BYTES + body_bytes]) != checksum {
            return Err(BucketHealthError::Checksum);
        }
        let mut reader = FieldReader::new(body);
        let mut buckets = BTreeMap::new();
        for _ in 0..reader.count(BUCKETS_MAX, BUCKET_BYTES_MIN, "number of buckets")? {
            let url = reader.text(BUCKET_BYTES_MAX, "bucket")?;
            let ascends = buckets.last_key_value().is_none_or(|(last, _): (&Arc<str>, _)| **last < *url);
            if url.is_empty() || !ascends {
                return Err(BucketHealthError::Invalid("bucket"));
            }
            let good = reader.varint_up_to(COUNT_MAX, "number of good requests")?;
            let bad = reader.varint_up_to(COUNT_MAX, "number of bad requests")?;
            buckets.insert(Arc::from(url), Counts { good, bad });
        }
        if reader.left_bytes() > 0 {
            return Err(BucketHealthError::Invalid("end"));
        }
        Ok(BucketHealth { buckets })
    }

    /// What a node has seen of the buckets with these URLs, in the same order.
    pub(crate) fn of(urls: &[Arc<str>], health: &bucket::Health) -> BucketHealth {
        // A cast from f64 saturates.
        let thousandths = |count: f64| ((count * 1e3) as u64).min(COUNT_MAX);
        let mut buckets = BTreeMap::new();
        for (url, seen) in urls.iter().zip(&health.buckets) {
            let counts = Counts { good: thousandths(seen.good), bad: thousandths(seen.bad) };
            if counts != Counts::default() {
                buckets.insert(Arc::clone(url), counts);
            }
        }
        BucketHealth { buckets }
    }

    /// What is said of the buckets with these URLs, in the same order; of others nothing.
    pub(crate) fn about(&self, urls: &[Arc<str>]) -> bucket::Health {
        let about = |url| {
            let Counts { good, bad } = self.buckets.get(url).copied().unwrap_or_default();
            bucket::BucketHealth { good: good as f64 / 1e3, bad: bad as f64 / 1e3 }
        };
        bucket::Health { buckets: urls.iter().map(about).collect() }
    }
}

impl From<FieldError> for BucketHealthError {
    fn from(error: FieldError) -> BucketHealthError {
        match error {
            FieldError::Short(_) => BucketHealthError::Truncated,
            FieldError::Bad(what) => BucketHealthError::Invalid(what),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The value in tests/fixtures/bucket-health-v1.bin. Never change it.
    fn fixture() -> BucketHealth {
        let urls: [Arc<str>; 3] = ["s3://one", "s3://two?region=x", "file:///three"].map(Arc::from);
        let health = [(12.0, 0.5), (0.0, 3.25), (1e30, 0.0)];
        let buckets = health.map(|(good, bad)| bucket::BucketHealth { good, bad }).to_vec();
        BucketHealth::of(&urls, &bucket::Health { buckets })
    }

    /// `bytes` with a checksum that is right.
    fn sealed(mut bytes: Vec<u8>) -> Vec<u8> {
        let end = bytes.len() - CHECKSUM_BYTES;
        let checksum = XxHash3_64::oneshot(&bytes[..end]);
        bytes[end..].copy_from_slice(&checksum.to_le_bytes());
        bytes
    }

    #[test]
    fn the_fixture_decodes_for_ever() {
        let bytes = include_bytes!("../tests/fixtures/bucket-health-v1.bin");
        assert_eq!(BucketHealth::from_bytes(bytes).unwrap(), fixture());
        assert_eq!(fixture().to_bytes(), bytes);
    }

    #[test]
    fn every_change_of_the_bytes_is_found() {
        let bytes = fixture().to_bytes();
        for end in 0..bytes.len() {
            let expected = if end == 0 { BucketHealthError::NotHealth } else { BucketHealthError::Truncated };
            assert_eq!(BucketHealth::from_bytes(&bytes[..end]), Err(expected));
        }
        for at in 0..bytes.len() * 8 {
            let mut flipped = bytes.clone();
            flipped[at / 8] ^= 1 << (at % 8);
            assert!(BucketHealth::from_bytes(&flipped).is_err(), "bit {at}");
        }
        assert_eq!(
            BucketHealth::from_bytes(&[&bytes[..], &[0]].concat()),
            Err(BucketHealthError::Invalid("end"))
        );
    }

    #[test]
    fn bytes_with_a_right_checksum_are_believed_within_bounds_only() {
        let bytes = fixture().to_bytes();
        // Whatever it becomes is an error, or a value whose one encoding this is.
        for at in HEAD_BYTES..bytes.len() - CHECKSUM_BYTES {
            for byte in 0..=u8::MAX {
                let mut changed = bytes.clone();
                changed[at] = byte;
                let changed = sealed(changed);
                if let Ok(health) = BucketHealth::from_bytes(&changed) {
                    assert_eq!(health.to_bytes(), changed);
                }
            }
        }
        let with_body = |body: &[u8]| {
            let head = [&MAGIC[..], &1u32.to_le_bytes(), &(body.len() as u32).to_le_bytes()].concat();
            BucketHealth::from_bytes(&sealed([&head[..], body, &[0; 8]].concat()))
        };
        let count = |count: u64| {
            let mut body = Vec::new();
            varint::put(&mut body, count);
            body
        };
        assert_eq!(with_body(&count(0)), Ok(BucketHealth::default()));
        assert_eq!(with_body(&count(65)), Err(BucketHealthError::Invalid("number of buckets")));
        assert_eq!(with_body(&count(64)), Err(BucketHealthError::Truncated));
        let twice = [count(2), b"\x03a\x01\x01\x03a\x01\x01".to_vec()].concat();
        assert_eq!(with_body(&twice), Err(BucketHealthError::Invalid("bucket")));
        let mut newer = bytes.clone();
        newer[8] = 2;
        assert_eq!(
            BucketHealth::from_bytes(&newer),
            Err(BucketHealthError::NewerVersion { found: 2, known: 1 })
        );
    }

    #[test]
    fn sums_stay_within_bounds_and_only_known_buckets_are_told_of() {
        let mut all = BucketHealth::default();
        for node in 0..3 {
            all.add(&fixture());
            let urls: Vec<Arc<str>> = (0..40).map(|bucket| format!("mem://{node}/{bucket}").into()).collect();
            let seen = bucket::BucketHealth { good: 1.0, bad: 0.0 };
            all.add(&BucketHealth::of(&urls, &bucket::Health { buckets: vec![seen; 40] }));
        }
        assert_eq!(all.buckets().count(), BUCKETS_MAX);
        assert_eq!(BucketHealth::from_bytes(&all.to_bytes()).as_ref(), Ok(&all));
        let about = all.about(&["file:///three".into(), "s3://other".into()]);
        assert_eq!(about.buckets[0].good, COUNT_MAX as f64 / 1e3);
        assert_eq!(about.buckets[1], bucket::BucketHealth::default());
    }
}
