//! When a segment may be used again. Pure.
//!
//! A block is *settled* when all its changes are in objects proven complete, or truncated. Blocks settle in the order of
//! their numbers, device by device, so one number per device says it all; a use of a segment may end when its last block
//! is settled and a later use has begun. It does end, the oldest first, when more settled uses are kept than local restores
//! are given room for. Which objects still have readers is the ledger's knowledge.

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

/// Which settled uses are kept for local restores.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Keep {
    /// How many of them.
    pub settled_max: usize,
    /// How many uses there may be in all.
    pub uses_max: usize,
    /// Of blocks below this number nothing is needed.
    pub needed_from: u64,
}

impl Keep {
    /// None is kept.
    pub const NONE: Keep = Keep { settled_max: 0, uses_max: 0, needed_from: 0 };
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

    /// All blocks below this number are settled.
    pub fn settled(&self) -> u64 {
        self.settled
    }

    /// None of the uses known now gets a block any more.
    pub fn end_all(&mut self) {
        if let Some((&newest, _)) = self.uses.last_key_value() {
            self.ended_below = newest.saturating_add(1);
        }
    }

    /// The lowest number of a block in a use.
    pub fn blocks_start(&self) -> Option<u64> {
        self.uses().next().map(|used| used.blocks.start)
    }

    /// Takes out the uses that may end: settled to the last block, and not the newest while it may still grow. Of those
    /// that hold blocks the newest are kept, as far as `keep` allows.
    pub fn take_released(&mut self, keep: &Keep) -> Vec<SegmentUse> {
        let Some((&newest, _)) = self.uses.last_key_value() else { return Vec::new() };
        let settled = self.settled;
        let ended = self.uses.range(..newest.max(self.ended_below));
        let (empty, whole): (Vec<_>, Vec<_>) = ended
            .filter(|(_, used)| used.blocks.is_empty() || used.blocks.end <= settled)
            .map(|(_, used)| used)
            .partition(|used| used.blocks.is_empty());
        let others = self.uses.len() - empty.len() - whole.len();
        let kept_max = keep.settled_max.min(keep.uses_max.saturating_sub(others));
        // The oldest first, and none before an older one: recovery relies on numbers without a hole.
        let unneeded = whole.iter().take_while(|used| used.blocks.end <= keep.needed_from).count();
        let count = whole.len().saturating_sub(kept_max).max(unneeded);
        let released: Vec<u64> = empty.iter().chain(&whole[..count]).map(|used| used.epoch).collect();
        released.into_iter().filter_map(|epoch| self.uses.remove(&epoch)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn taken(retention: &mut Retention, keep: &Keep) -> Vec<(u32, u64)> {
        retention.take_released(keep).iter().map(|used| (used.segment, used.epoch)).collect()
    }

    #[test]
    fn settled_uses_are_kept_as_far_as_there_is_room_and_need() {
        let uses = |settled| {
            let mut retention = Retention::new(0);
            for number in 0..6 {
                retention.block(number, 10 + 2 * u64::from(number), u64::from(number));
            }
            retention.found(SegmentUse { segment: 9, epoch: 15, blocks: 0..0 });
            retention.settle(settled);
            retention
        };
        let keep = |settled_max, uses_max, needed_from| Keep { settled_max, uses_max, needed_from };
        let released = |settled, keep: Keep| {
            let mut retention = uses(settled);
            let taken = taken(&mut retention, &keep);
            assert_eq!(taken.first(), Some(&(9, 15)), "an empty use is of no use");
            taken[1..].iter().map(|(segment, _)| *segment).collect::<Vec<_>>()
        };
        assert_eq!(released(4, Keep::NONE), [0, 1, 2, 3]);
        assert_eq!(released(4, keep(2, 100, 0)), [0, 1], "the oldest go first");
        assert_eq!(released(4, keep(100, 100, 0)), [0; 0]);
        assert_eq!(released(4, keep(100, 5, 0)), [0], "two are not settled");
        assert_eq!(released(4, keep(100, 1, 0)), [0, 1, 2, 3], "what is not settled stays");
        assert_eq!(released(4, keep(100, 100, 3)), [0, 1, 2], "nobody needs them");
        assert_eq!(released(4, keep(100, 100, 6)), [0, 1, 2, 3]);
        assert_eq!(released(0, Keep::NONE), [0; 0]);
    }

    #[test]
    fn a_use_ends_when_its_last_block_is_settled_and_a_later_one_has_begun() {
        let mut retention = Retention::new(0);
        for number in 0..4 {
            retention.block(1, 10, number);
        }
        retention.settle(4);
        assert_eq!(taken(&mut retention, &Keep::NONE), [], "the newest use may still grow");
        retention.block(2, 11, 4);
        assert_eq!(taken(&mut retention, &Keep::NONE), [(1, 10)]);
        assert_eq!(taken(&mut retention, &Keep::NONE), [], "each use ends once");
        retention.block(1, 12, 5);
        retention.settle(4);
        assert_eq!(taken(&mut retention, &Keep::NONE), [], "block 4 is not settled");
        retention.settle(5);
        assert_eq!(taken(&mut retention, &Keep::NONE), [(2, 11)]);
    }

    #[test]
    fn a_full_disk_lets_the_newest_use_end() {
        let mut retention = Retention::new(0);
        retention.block(1, 10, 0);
        retention.settle(1);
        assert_eq!(taken(&mut retention, &Keep::NONE), []);
        retention.end_all();
        assert_eq!(taken(&mut retention, &Keep::NONE), [(1, 10)]);
        retention.block(2, 11, 1);
        retention.settle(2);
        assert_eq!(taken(&mut retention, &Keep::NONE), [], "a new use may grow");
    }

    #[test]
    fn empty_uses_found_at_recovery_are_released() {
        let mut retention = Retention::new(7);
        retention.found(SegmentUse { segment: 3, epoch: 1, blocks: 0..0 });
        retention.found(SegmentUse { segment: 4, epoch: 2, blocks: 7..9 });
        retention.block(5, 3, 9);
        assert_eq!(taken(&mut retention, &Keep::NONE), [(3, 1)]);
        retention.settle(9);
        assert_eq!(taken(&mut retention, &Keep::NONE), [(4, 2)]);
    }
}
