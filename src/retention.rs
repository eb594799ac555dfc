//! When a segment may be used again. Pure.
//!
//! A block is *settled* when all its changes are in objects proven complete, or truncated. Blocks settle in the order of
//! their numbers, device by device, so one number per device says it all; a use of a segment may end when its last block
//! is settled and a later use has begun. Which objects still have readers is the ledger's knowledge.

use std::collections::BTreeMap;
use std::ops::Range;

/// The uses of one device's segments, and how far its blocks are settled.
#[derive(Debug, Default)]
pub(crate) struct Retention {
    /// By epoch.
    uses: BTreeMap<u64, SegmentUse>,
    settled: u64,
    /// Uses below this epoch get no more blocks.
    ended_below: u64,
}

/// One use of a segment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SegmentUse {
    pub segment: u32,
    pub epoch: u64,
    /// The numbers of its known blocks; empty if there are none.
    pub blocks: Range<u64>,
}

impl Retention {
    /// A device whose blocks below `settled` are all settled.
    pub fn new(settled: u64) -> Retention {
        Retention { uses: BTreeMap::new(), settled, ended_below: 0 }
    }

    /// A block stands in this use of this segment.
    pub fn block(&mut self, segment: u32, epoch: u64, number: u64) {
        let fresh = SegmentUse { segment, epoch, blocks: number..number };
        let blocks = &mut self.uses.entry(epoch).or_insert(fresh).blocks;
        debug_assert_eq!(blocks.end, number, "blocks come in the order of their numbers");
        blocks.end = number + 1;
    }

    /// A use found at recovery, or one that ended without a block.
    pub fn found(&mut self, found: SegmentUse) {
        self.uses.insert(found.epoch, found);
    }

    /// All uses that hold blocks, in the order of their epochs.
    pub fn uses(&self) -> impl Iterator<Item = &SegmentUse> {
        self.uses.values().filter(|used| !used.blocks.is_empty())
    }

    /// All blocks below `number` are settled.
    pub fn settle(&mut self, number: u64) {
        self.settled = self.settled.max(number);
    }

    /// None of the uses known now gets a block any more.
    pub fn end_all(&mut self) {
        if let Some((&newest, _)) = self.uses.last_key_value() {
            self.ended_below = newest.saturating_add(1);
        }
    }

    /// Takes out the uses that may end: settled to the last block, and not the newest while it may still grow.
    pub fn take_released(&mut self) -> Vec<(u32, u64)> {
        let Some((&newest, _)) = self.uses.last_key_value() else { return Vec::new() };
        let settled = self.settled;
        let released: Vec<u64> = self
            .uses
            .range(..newest.max(self.ended_below))
            .filter(|(_, used)| used.blocks.is_empty() || used.blocks.end <= settled)
            .map(|(epoch, _)| *epoch)
            .collect();
        released
            .into_iter()
            .filter_map(|epoch| self.uses.remove(&epoch).map(|used| (used.segment, epoch)))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_use_ends_when_its_last_block_is_settled_and_a_later_one_has_begun() {
        let mut retention = Retention::new(0);
        for number in 0..4 {
            retention.block(1, 10, number);
        }
        retention.settle(4);
        assert_eq!(retention.take_released(), [], "the newest use may still grow");
        retention.block(2, 11, 4);
        assert_eq!(retention.take_released(), [(1, 10)]);
        assert_eq!(retention.take_released(), [], "each use ends once");
        retention.block(1, 12, 5);
        retention.settle(4);
        assert_eq!(retention.take_released(), [], "block 4 is not settled");
        retention.settle(5);
        assert_eq!(retention.take_released(), [(2, 11)]);
    }

    #[test]
    fn a_full_disk_lets_the_newest_use_end() {
        let mut retention = Retention::new(0);
        retention.block(1, 10, 0);
        retention.settle(1);
        assert_eq!(retention.take_released(), []);
        retention.end_all();
        assert_eq!(retention.take_released(), [(1, 10)]);
        retention.block(2, 11, 1);
        retention.settle(2);
        assert_eq!(retention.take_released(), [], "a new use may grow");
    }

    #[test]
    fn empty_uses_found_at_recovery_are_released() {
        let mut retention = Retention::new(7);
        retention.found(SegmentUse { segment: 3, epoch: 1, blocks: 0..0 });
        retention.found(SegmentUse { segment: 4, epoch: 2, blocks: 7..9 });
        retention.block(5, 3, 9);
        assert_eq!(retention.take_released(), [(3, 1)]);
        retention.settle(9);
        assert_eq!(retention.take_released(), [(4, 2)]);
    }
}
