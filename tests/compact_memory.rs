//! What a compaction has in memory does not grow with what it compacts. A file of its own: the allocator is the process's.

#[path = "common/allocator.rs"]
mod allocator;

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use allocator::Telling;
use tidelog::{ChangeKey, Changelog, Compactor, KeyGroup, KeyGroupRange, Options, SequenceNumber};

/// The bytes that are in use, and the most that were.
static USED: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

fn count(taken: usize, given: usize) {
    // What is moved is in two places for a moment.
    let used = USED.fetch_add(taken, Relaxed) + taken;
    PEAK.fetch_max(used, Relaxed);
    USED.fetch_sub(given, Relaxed);
}

#[global_allocator]
static ALLOCATOR: Telling = Telling(count);

const MIB: usize = 1 << 20;
const KEY_GROUPS: KeyGroupRange = KeyGroupRange::new(0, 63).unwrap();

#[test]
fn memory_is_bounded_by_the_option() {
    const LOG_BYTES: usize = 160 * MIB;
    const MEMORY_BYTES: usize = 32 * MIB;
    let dir = tempfile::tempdir().unwrap();
    let bucket = format!("file://{}", dir.path().join("bucket").display());
    let handle = {
        let options = Options::new(&bucket, dir.path().join("local"))
            .segment_bytes(16 * MIB as u64)
            .local_bytes(64 * MIB as u64)
            .part_bytes(MIB);
        let changelog = Changelog::open(options).unwrap();
        let mut writer = changelog.create_writer("long", KEY_GROUPS).unwrap();
        let mut handle = None;
        for checkpoint in 0..20u64 {
            for number in 0..(LOG_BYTES / 20 / 1000) as u64 {
                let mut value = [number as u8; 1000];
                // Every key is written in every checkpoint.
                value[..8].copy_from_slice(&number.to_le_bytes());
                value[8] = checkpoint as u8;
                writer.append(KeyGroup((number % 64) as u16), &value).unwrap();
            }
            handle = Some(writer.persist_durably(SequenceNumber::ZERO).wait().unwrap());
        }
        handle.unwrap()
    };
    assert!(handle.objects().count() >= 20);
    for last_values in [false, true] {
        let mut compactor = Compactor::open(&bucket).unwrap().part_bytes(MIB).memory_bytes(MEMORY_BYTES);
        if last_values {
            compactor = compactor.last_value_by(|_| ChangeKey::Upsert(0..8));
        }
        let before = USED.load(Relaxed);
        PEAK.store(before, Relaxed);
        let made = compactor.compact(std::slice::from_ref(&handle), KEY_GROUPS).unwrap();
        let peak = PEAK.load(Relaxed) - before;
        let share = if last_values { 20 } else { 1 };
        assert!(made.stats.bytes_written as usize * share > LOG_BYTES);
        assert!(peak < MEMORY_BYTES, "{peak} bytes at the peak, last values only: {last_values}");
    }
}
