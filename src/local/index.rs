//! What the segments in use of one local directory hold: for each durable block its place and the numbers of its changes.
//!
//! Shared, behind a lock, by whoever tells of blocks (recovery, the uploader), by custody, which takes out what is to be
//! released, and by readers. It takes some hundred bytes for each block, so the disk's budget bounds it. It is not kept on
//! the disk: recovery reads all segments in use, and makes it anew.
//!
//! What it says is a hint. A segment may be used again right after it was looked up, so a reader verifies what it reads
//! against the block's place, number and epoch.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;

use bytes::Bytes;
use tidelog_io::segment::BlockPlace;

use crate::manifest::{LogState, ManifestState};
use crate::queue::{BlockRange, LocalBlock};
use crate::recovery::Recovered;
use crate::types::{LogId, SequenceNumber};

/// The blocks of one local directory.
#[derive(Debug, Default)]
pub(crate) struct LocalIndex {
    /// By number.
    blocks: BTreeMap<u64, IndexedBlock>,
    /// The number that follows the block told of last, if that block's last change goes on in it.
    goes_on_at: Option<u64>,
}

#[derive(Debug)]
struct IndexedBlock {
    place: Option<BlockPlace>,
    bytes: Option<Bytes>,
    len: usize,
    continues: bool,
    /// The log whose change of the block before goes on in this one.
    resumes: Option<LogId>,
    ranges: Box<[BlockRange]>,
}

/// A block that holds changes of a log.
#[derive(Clone, Debug)]
pub(crate) struct BlockRef {
    pub number: u64,
    /// Where it is on the disk. In the memory of recovery, which has taken an unfinished change out of it, if `bytes` are
    /// given.
    pub place: Option<BlockPlace>,
    pub bytes: Option<Bytes>,
    pub len: usize,
    /// The last change in it, of whichever log, goes on in the next block.
    pub continues: bool,
    /// The change of the log that its first frame there belongs to.
    pub first: SequenceNumber,
    /// The first one that begins there.
    pub whole_from: SequenceNumber,
    /// The end of those that end there.
    pub end: SequenceNumber,
}

impl LocalIndex {
    /// What was found in a directory.
    pub fn of(recovered: &Recovered) -> LocalIndex {
        let mut index = LocalIndex::default();
        for (block, resumes) in recovered.blocks.iter().zip(&recovered.resumes) {
            index.add(block, *resumes);
        }
        // Nothing goes on in what is written from now on.
        index.goes_on_at = None;
        index
    }

    /// A block became durable. Blocks come in the order of their numbers.
    pub fn push(&mut self, block: &LocalBlock) {
        let resumes = (self.goes_on_at == Some(block.number)).then(|| block.ranges.first()).flatten();
        self.add(block, resumes.map(|range| range.log));
    }

    fn add(&mut self, block: &LocalBlock, resumes: Option<LogId>) {
        self.goes_on_at = block.continues.then_some(block.number + 1);
        if block.place.is_none() && block.held.is_none() {
            return;
        }
        let bytes = match block.place {
            Some(_) => None,
            None => block.held.as_ref().map(|held| held.bytes.clone()),
        };
        let LocalBlock { number, place, len, continues, ref ranges, .. } = *block;
        let ranges = ranges.clone().into_boxed_slice();
        self.blocks.insert(number, IndexedBlock { place, bytes, len, continues, resumes, ranges });
    }

    /// These blocks are about to be released.
    pub fn remove(&mut self, numbers: Range<u64>) {
        if !numbers.is_empty() {
            let mut rest = self.blocks.split_off(&numbers.start);
            let mut behind = rest.split_off(&numbers.end);
            self.blocks.append(&mut behind);
        }
    }

    /// Whether a block is still there.
    pub fn has(&self, number: u64) -> bool {
        self.blocks.contains_key(&number)
    }

    /// The blocks that hold changes of these logs, in the order of their numbers.
    pub fn blocks_of(&self, logs: &BTreeSet<LogId>) -> HashMap<LogId, Vec<BlockRef>> {
        let mut found: HashMap<LogId, Vec<BlockRef>> = HashMap::new();
        for (&number, block) in &self.blocks {
            let IndexedBlock { place, ref bytes, len, continues, resumes, ref ranges } = *block;
            for range in ranges.iter().filter(|range| logs.contains(&range.log)) {
                found.entry(range.log).or_default().push(BlockRef {
                    number,
                    place,
                    bytes: bytes.clone(),
                    len,
                    continues,
                    first: range.first,
                    whole_from: whole_from(range, resumes),
                    end: range.end,
                });
            }
        }
        found
    }

    /// The number of the first of these blocks in which anything is not truncated; their end if there is none.
    pub fn needed_from(&self, numbers: Range<u64>, state: &ManifestState) -> u64 {
        self.first_with(numbers, state, |log, changes| log.truncated < changes.end)
    }

    /// The number of the first of these blocks in which anything is neither truncated nor in a complete object; their end if
    /// there is none. What a closed log drops is neither: the next open finds it, if it is still there.
    pub fn missing_from(&self, numbers: Range<u64>, state: &ManifestState) -> u64 {
        self.first_with(numbers, state, |log, changes| {
            let missing = log.missing_from(changes.start);
            missing.start < missing.end.min(changes.end)
        })
    }

    fn first_with(
        &self,
        numbers: Range<u64>,
        state: &ManifestState,
        has: impl Fn(&LogState, Range<SequenceNumber>) -> bool,
    ) -> u64 {
        if numbers.is_empty() {
            return numbers.start;
        }
        let holds = |block: &IndexedBlock| {
            // A change that goes on in the next block is counted there, but begins here.
            let open = u64::from(block.continues);
            block.ranges.iter().any(|range| {
                let changes = range.first..SequenceNumber(range.end.0 + open);
                state.logs().get(&range.log).is_some_and(|log| has(log, changes))
            })
        };
        let end = numbers.end;
        self.blocks.range(numbers).find(|(_, block)| holds(block)).map_or(end, |(number, _)| *number)
    }
}

/// The first change of a range that is in its block from the beginning on.
pub(crate) fn whole_from(range: &BlockRange, resumes: Option<LogId>) -> SequenceNumber {
    SequenceNumber(range.first.0 + u64::from(resumes == Some(range.log)))
}
