//! The job that all three engines run: it sums amounts by key. The engines differ, the job does not.
//!
//! Its source can be read again from any position, as a Kafka topic can, and has a checkpoint barrier in it now and then.

use std::collections::BTreeMap;

use tidelog::{KeyGroup, KeyGroupRange};

/// What an engine's steps may fail with.
pub type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// The state of one operator instance: the sum of each key.
pub type State = BTreeMap<u64, i64>;

/// A checkpoint barrier stands before each position that is a multiple of this.
pub const BARRIER_EVERY: u64 = 10_000;

/// How many key groups the keys are spread over. It stays the same for as long as the job lives.
const KEY_GROUPS: u16 = 128;

/// How many keys there are: so many that most of them do not change between two checkpoints.
const KEYS: u64 = 50_000;

/// The key groups of one of `instances` operator instances.
pub fn key_groups(instance: u16, instances: u16) -> KeyGroupRange {
    let start = |instance: u16| instance * KEY_GROUPS / instances;
    KeyGroupRange::new(start(instance), start(instance + 1) - 1)
        .expect("there are more key groups than instances")
}

/// The record of the source at a position: a key and an amount.
pub fn record(position: u64) -> (u64, i64) {
    let mixed = position.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 16;
    (mixed % KEYS, (mixed % 199) as i64 - 99)
}

/// The key group of a key.
pub fn key_group(key: u64) -> KeyGroup {
    KeyGroup((key.wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 32) as u16 % KEY_GROUPS)
}

/// A change of the state as the log holds it: the key, and its new sum.
pub fn change(key: u64, sum: i64) -> [u8; 16] {
    let mut value = [0; 16];
    value[..8].copy_from_slice(&key.to_le_bytes());
    value[8..].copy_from_slice(&sum.to_le_bytes());
    value
}

/// Makes a change of the log in the state.
pub fn apply(state: &mut State, change: &[u8]) -> Result<()> {
    let (key, sum) = change.split_first_chunk().ok_or("a change is shorter than its key")?;
    state.insert(u64::from_le_bytes(*key), i64::from_le_bytes(sum.try_into()?));
    Ok(())
}

/// What the state of an instance has to be when all records before `position` are in it.
pub fn expected(key_groups: KeyGroupRange, position: u64) -> State {
    let mut state = State::new();
    for (key, amount) in (0..position).map(record).filter(|(key, _)| key_groups.contains(key_group(*key))) {
        *state.entry(key).or_default() += amount;
    }
    state
}
