//! What the job computes: for each auction and window of event time, how many bids there were, their sum and the highest.
//!
//! Owns the state, what a change of it looks like in the log and in a snapshot, and which key group an auction is in.
//!
//! A change holds the new aggregate of one key. Every bid counts, so the count in a change is one more than before: who
//! applies changes notices one that is missing, comes twice or in the wrong order, at that very change.

use std::collections::BTreeMap;

use tidelog::{KeyGroup, KeyGroupRange};

use super::Failure;

/// The number of key groups, fixed for the life of the job: the most threads that it can have.
pub const KEY_GROUPS: u16 = 128;
/// The length of a window of event time, in milliseconds.
pub const WINDOW_MS: u64 = 1000;
/// What a reader has to know before it can read a change: the first thing in every log, and in every snapshot.
pub const REGISTRATION: &[u8] = b"bids by auction and window: count, sum, max; version 1";

const CHANGE_BYTES: usize = 40;

/// What an aggregate is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Key {
    pub auction: u64,
    /// When the window begins, in milliseconds of event time.
    pub window: u64,
}

/// The bids of one key.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Aggregate {
    pub count: u64,
    /// In cents.
    pub sum: u64,
    /// In cents.
    pub max: u64,
}

/// What the job takes from a bid.
#[derive(Clone, Copy, Debug)]
pub struct Bid {
    pub key: Key,
    pub price: u64,
}

/// The state of some key groups.
#[derive(Clone, Debug, Default)]
pub struct State(BTreeMap<Key, Aggregate>);

impl Key {
    /// The same for each run and machine: the finalizer of murmur3 over the auction.
    pub fn key_group(self) -> KeyGroup {
        let mut hash = self.auction;
        hash = (hash ^ (hash >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
        hash = (hash ^ (hash >> 33)).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
        KeyGroup(((hash ^ (hash >> 33)) % u64::from(KEY_GROUPS)) as u16)
    }
}

/// The key groups of each of so many threads.
pub fn ranges(threads: u16) -> Vec<KeyGroupRange> {
    let start = |index: u16| (u32::from(index) * u32::from(KEY_GROUPS) / u32::from(threads)) as u16;
    (0..threads)
        .map(|index| {
            KeyGroupRange::new(start(index), start(index + 1) - 1).expect("at most one thread a group")
        })
        .collect()
}

impl State {
    /// The aggregate that this bid leads to.
    pub fn after(&self, bid: Bid) -> Aggregate {
        let before = self.0.get(&bid.key).copied().unwrap_or_default();
        Aggregate { count: before.count + 1, sum: before.sum + bid.price, max: before.max.max(bid.price) }
    }

    /// Sets an aggregate.
    pub fn put(&mut self, key: Key, aggregate: Aggregate) {
        self.0.insert(key, aggregate);
    }

    /// Applies a change that was read from a log.
    pub fn apply(&mut self, key_group: KeyGroup, change: &[u8]) -> Result<(), Failure> {
        let (key, aggregate) = decode(change)?;
        if key.key_group() != key_group {
            return Err(format!("a change of {key:?} came with key group {key_group}").into());
        }
        let before = self.0.get(&key).map_or(0, |aggregate| aggregate.count);
        if aggregate.count != before + 1 {
            return Err(format!("{key:?} had {before} bids, and a change says {}", aggregate.count).into());
        }
        self.put(key, aggregate);
        Ok(())
    }

    /// Adds the state of other key groups.
    pub fn merge(&mut self, other: State) {
        self.0.extend(other.0);
    }

    /// How many aggregates there are.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Over all aggregates in the order of their keys.
    pub fn digest(&self) -> u64 {
        let mut bytes = Vec::with_capacity(self.0.len() * CHANGE_BYTES);
        self.0.iter().for_each(|(key, aggregate)| bytes.extend_from_slice(&encode(*key, *aggregate)));
        hash(&bytes)
    }

    /// All of it, with what a reader has to know, and a checksum.
    pub fn snapshot(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(REGISTRATION.len() + self.0.len() * CHANGE_BYTES + 8);
        bytes.extend_from_slice(REGISTRATION);
        self.0.iter().for_each(|(key, aggregate)| bytes.extend_from_slice(&encode(*key, *aggregate)));
        let checksum = hash(&bytes);
        bytes.extend_from_slice(&checksum.to_le_bytes());
        bytes
    }

    /// Takes from a snapshot what is in `key_groups`.
    pub fn load(&mut self, snapshot: &[u8], key_groups: KeyGroupRange) -> Result<(), Failure> {
        let (bytes, checksum) = snapshot.split_last_chunk::<8>().ok_or("a snapshot is cut off")?;
        if hash(bytes).to_le_bytes() != *checksum {
            return Err("a snapshot does not match its checksum".into());
        }
        let entries = bytes.strip_prefix(REGISTRATION).ok_or("a snapshot is of another state")?;
        for entry in entries.chunks(CHANGE_BYTES) {
            let (key, aggregate) = decode(entry)?;
            if key_groups.contains(key.key_group()) {
                self.put(key, aggregate);
            }
        }
        Ok(())
    }
}

/// The change that sets an aggregate.
pub fn encode(key: Key, aggregate: Aggregate) -> [u8; CHANGE_BYTES] {
    let mut bytes = [0; CHANGE_BYTES];
    let fields = [key.auction, key.window, aggregate.count, aggregate.sum, aggregate.max];
    for (slot, field) in bytes.chunks_exact_mut(8).zip(fields) {
        slot.copy_from_slice(&field.to_le_bytes());
    }
    bytes
}

fn decode(change: &[u8]) -> Result<(Key, Aggregate), Failure> {
    if change.len() != CHANGE_BYTES {
        return Err(format!("a change has {} bytes, expected {CHANGE_BYTES}", change.len()).into());
    }
    let mut fields =
        change.chunks_exact(8).map(|field| u64::from_le_bytes(field.try_into().expect("eight bytes")));
    let mut next = || fields.next().expect("five fields");
    let key = Key { auction: next(), window: next() };
    Ok((key, Aggregate { count: next(), sum: next(), max: next() }))
}

/// FNV-1a.
fn hash(bytes: &[u8]) -> u64 {
    let step = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, step)
}
