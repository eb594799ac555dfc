//! Which changes of a log survive where only the last change of a key counts.
//!
//! A key belongs to one key group, so that a batch of key groups can be looked at without the others: the changesets of
//! these groups are read over all runs, and what is remembered is, for each key, the number of its last change. Batches are
//! as large as the memory for them. What they find is kept as one bit for each surviving change, by which the runs are
//! then rewritten in the order of their numbers: the layout of parts stays what it is.

use std::collections::{BTreeMap, HashMap};
use std::ops::{Range, RangeInclusive};

use super::ahead::Ahead;
use super::source::{Buckets, READ_AHEAD, Source, Wanted, load, load_directory};
use super::{ChangeKey, CompactError, KeyOf};
use crate::reader::Change;
use crate::types::{KeyGroup, SequenceNumber};

/// Set of sequence numbers.
#[derive(Default)]
pub(super) struct Survivors(HashMap<u64, Box<[u64; PAGE_WORDS]>>);

const PAGE_WORDS: usize = 64;
const PAGE_NUMBERS: u64 = 64 * PAGE_WORDS as u64;

impl Survivors {
    fn insert(&mut self, number: u64) {
        let page = self.0.entry(number / PAGE_NUMBERS).or_insert_with(|| Box::new([0; PAGE_WORDS]));
        page[(number % PAGE_NUMBERS / 64) as usize] |= 1 << (number % 64);
    }

    pub(super) fn contains(&self, number: SequenceNumber) -> bool {
        let number = number.0;
        let page = self.0.get(&(number / PAGE_NUMBERS));
        page.is_some_and(|page| page[(number % PAGE_NUMBERS / 64) as usize] >> (number % 64) & 1 == 1)
    }
}

/// The last change of a key.
struct Last {
    number: u64,
    tombstone: bool,
}

/// The data changes of a handle that survive. `batch_bytes` are the bytes of changesets whose keys are remembered at a time,
/// if more than one key group is looked at.
pub(super) async fn survivors(
    buckets: &Buckets,
    source: &Source,
    key_of: &KeyOf,
    batch_bytes: u64,
) -> Result<Survivors, CompactError> {
    // Below the log's first change there is nothing that its tombstones would have to delete.
    let drops_tombstones = source.handle.from() == SequenceNumber::ZERO;
    let mut survivors = Survivors::default();
    for data in batches(buckets, source, batch_bytes).await? {
        let mut keys: BTreeMap<u32, HashMap<Box<[u8]>, Last>> = BTreeMap::new();
        let wanted = Wanted { metadata: false, data };
        let mut loads = Ahead::new();
        let (mut asked, mut known) = (source.runs.iter(), source.runs.iter());
        loop {
            while loads.len() < READ_AHEAD
                && let Some(run) = asked.next()
            {
                loads.push(load(buckets, &source.handle, run, wanted.clone()));
            }
            let Some(loaded) = loads.next().await else { break };
            let loaded = loaded?;
            let run = known.next().expect("one result for each run");
            for (group_key, changeset) in loaded.changesets {
                let keys = keys.entry(group_key).or_default();
                let key_group = Some(KeyGroup((group_key - 1) as u16));
                for (number, value) in changeset.into_records() {
                    if !(run.first..run.end).contains(&number) {
                        continue;
                    }
                    let change = Change { log: source.handle.log(), number, key_group, value };
                    let (range, tombstone) = match key_of(&change) {
                        ChangeKey::None => {
                            survivors.insert(number.0);
                            continue;
                        }
                        ChangeKey::Upsert(range) => (range, false),
                        ChangeKey::Tombstone(range) => (range, true),
                    };
                    let key = key_bytes(&change, range)?;
                    let last = Last { number: number.0, tombstone };
                    match keys.get_mut(key) {
                        Some(known) => *known = last,
                        None => drop(keys.insert(key.into(), last)),
                    }
                }
            }
        }
        for last in keys.into_values().flat_map(HashMap::into_values) {
            if !(last.tombstone && drops_tombstones) {
                survivors.insert(last.number);
            }
        }
    }
    Ok(survivors)
}

fn key_bytes(change: &Change, range: Range<usize>) -> Result<&[u8], CompactError> {
    change.value.get(range.clone()).ok_or_else(|| CompactError::Key {
        log: change.log,
        number: change.number,
        range,
        value_bytes: change.value.len(),
    })
}

/// Ranges of group keys, together those of the source, each with no more bytes than that unless it is one group.
async fn batches(
    buckets: &Buckets,
    source: &Source,
    batch_bytes: u64,
) -> Result<Vec<RangeInclusive<u32>>, CompactError> {
    let data = source.data();
    if source.bytes() <= batch_bytes {
        return Ok(vec![data]);
    }
    let wanted = Wanted { metadata: false, data: data.clone() };
    let mut bytes_of: BTreeMap<u32, u64> = BTreeMap::new();
    let mut directories = Ahead::new();
    let mut runs = source.runs.iter();
    loop {
        while directories.len() < READ_AHEAD
            && let Some(run) = runs.next()
        {
            directories.push(load_directory(buckets, &source.handle, run, &wanted));
        }
        let Some(directory) = directories.next().await else { break };
        for (group_key, range) in directory? {
            let bytes = bytes_of.entry(group_key).or_default();
            *bytes = bytes.saturating_add(range.end - range.start);
        }
    }
    Ok(cut(data, &bytes_of, batch_bytes))
}

fn cut(
    data: RangeInclusive<u32>,
    bytes_of: &BTreeMap<u32, u64>,
    batch_bytes: u64,
) -> Vec<RangeInclusive<u32>> {
    let mut batches = Vec::new();
    let (mut first, mut sum) = (*data.start(), 0u64);
    for (&key, &bytes) in bytes_of {
        if sum > 0 && sum.saturating_add(bytes) > batch_bytes {
            batches.push(first..=key - 1);
            (first, sum) = (key, 0);
        }
        sum = sum.saturating_add(bytes);
    }
    batches.push(first..=*data.end());
    batches
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_cover_all_groups_once_and_keep_to_the_memory() {
        let bytes = |sizes: &[(u32, u64)]| sizes.iter().copied().collect::<BTreeMap<_, _>>();
        assert_eq!(cut(1..=128, &bytes(&[]), 10), [1..=128]);
        assert_eq!(cut(1..=128, &bytes(&[(3, 6), (4, 4), (9, 1)]), 10), [1..=8, 9..=128]);
        // A group that is larger than that stands alone.
        assert_eq!(cut(5..=9, &bytes(&[(5, 50), (6, 1), (9, 50)]), 10), [5..=5, 6..=8, 9..=9]);
        assert_eq!(cut(7..=7, &bytes(&[(7, u64::MAX)]), 1), [7..=7]);
    }

    #[test]
    fn survivors_are_what_was_inserted() {
        let mut survivors = Survivors::default();
        let numbers = [0, 1, 63, 64, PAGE_NUMBERS - 1, PAGE_NUMBERS, 1 << 40, u64::MAX];
        numbers.iter().for_each(|number| survivors.insert(*number));
        for number in numbers {
            assert!(survivors.contains(SequenceNumber(number)), "{number}");
            let next = number.wrapping_add(2);
            assert_eq!(survivors.contains(SequenceNumber(next)), numbers.contains(&next), "{next}");
        }
    }
}
