//! The walk: whole changes, with their logs and numbers, out of blocks in the order in which they were written.
//!
//! For whoever reads blocks change by change: local restore, recovery, inspection. It joins fragments and holds each
//! block against its own log table. Whether a log goes on from block to block is the caller's to check, by the tables.

use crate::block::{Block, BlockError, LogEntry};
use crate::record::{Frame, FrameKind, split_fragment_lead};
use crate::types::{ChangeKind, KeyGroup, LogId, SequenceNumber};
use std::collections::HashMap;

/// A change in a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Change<'a> {
    /// The log.
    pub log: LogId,
    /// Its number.
    pub sequence: SequenceNumber,
    /// What it is.
    pub kind: ChangeKind,
    /// The key group; 0 for metadata.
    pub key_group: KeyGroup,
    /// The whole value.
    pub value: &'a [u8],
}

/// Walks one block after another. Between them it holds the beginning of a change that goes on in the next.
#[derive(Debug, Default)]
pub struct Walk {
    only: Option<LogId>,
    open: Option<Open>,
    entries: HashMap<u32, Cursor>,
}

impl Walk {
    /// A walk over the changes of `only`, or of all logs. Fragments of other logs take no memory.
    #[must_use]
    pub fn new(only: Option<LogId>) -> Walk {
        Walk { only, ..Walk::default() }
    }

    /// Whether the blocks so far end in the middle of a change, which is not visited until its last fragment is seen.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.open.is_some()
    }

    /// Visits each change that ends in `block`, in append order. A change whose beginning stands in a block before the
    /// walk's first is counted, not visited.
    ///
    /// # Errors
    /// [`BlockError::Corrupt`] if the frames contradict the table or each other, [`BlockError::Gap`] if the block is
    /// not the one in which the open change goes on. Changes before the error were visited; the walk starts anew.
    pub fn block(&mut self, block: &Block<'_>, visit: &mut dyn FnMut(Change<'_>)) -> Result<(), BlockError> {
        let open = self.open.take();
        self.enter(block, open.as_ref())?;
        let mut open = open;
        for frame in block.frames() {
            let frame = frame?;
            self.frame(frame, &mut open, visit)?;
        }
        if self.entries.values().any(|cursor| cursor.left != 0) {
            return Err(BlockError::Corrupt("the log table miscounts"));
        }
        if block.header().continues != open.is_some() {
            return Err(BlockError::Corrupt("its flag does not say whether the last change goes on"));
        }
        self.open = open;
        Ok(())
    }

    fn enter(&mut self, block: &Block<'_>, open: Option<&Open>) -> Result<(), BlockError> {
        self.entries.clear();
        for entry in block.logs() {
            let LogEntry { slot, log, first, count } = entry;
            if self.entries.insert(slot, Cursor { log, next: first.0, left: count }).is_some() {
                return Err(BlockError::Corrupt("two logs in one slot"));
            }
            if let Some(open) = open
                && open.log == log
                && open.sequence != first.0
            {
                return Err(BlockError::Gap { log, expected: SequenceNumber(open.sequence), found: first });
            }
        }
        Ok(())
    }

    fn frame(
        &mut self,
        frame: Frame<'_>,
        open: &mut Option<Open>,
        visit: &mut dyn FnMut(Change<'_>),
    ) -> Result<(), BlockError> {
        let cursor = self
            .entries
            .get_mut(&frame.slot)
            .ok_or(BlockError::Corrupt("a frame of a log that is not in the table"))?;
        let (log, sequence, key_group) = (cursor.log, cursor.next, frame.key_group);
        let wanted = self.only.is_none_or(|only| only == log);
        let whole = |kind, value| Change { log, sequence: SequenceNumber(sequence), kind, key_group, value };
        let between = BlockError::Corrupt("a frame between the fragments of a change");
        let (mut state, bytes) = match (frame.kind, open.take()) {
            (FrameKind::Data | FrameKind::Metadata, None) => {
                let kind =
                    if frame.kind == FrameKind::Data { ChangeKind::Data } else { ChangeKind::Metadata };
                cursor.advance()?;
                if wanted {
                    visit(whole(kind, frame.value));
                }
                return Ok(());
            }
            (FrameKind::FragmentFirst, None) => {
                let (kind, total_len, bytes) = split_fragment_lead(frame.value)
                    .ok_or(BlockError::Corrupt("a malformed first fragment"))?;
                (
                    Open {
                        log,
                        sequence,
                        key_group,
                        head: Some((kind, total_len)),
                        len: 0,
                        value: Vec::new(),
                    },
                    bytes,
                )
            }
            (FrameKind::FragmentMiddle | FrameKind::FragmentLast, None) => {
                (Open { log, sequence, key_group, head: None, len: 0, value: Vec::new() }, frame.value)
            }
            (FrameKind::FragmentMiddle | FrameKind::FragmentLast, Some(state))
                if state.log == log && state.key_group == key_group =>
            {
                (state, frame.value)
            }
            _ => return Err(between),
        };
        state.len += bytes.len() as u64;
        if wanted && state.head.is_some() {
            state.value.extend_from_slice(bytes);
        }
        if frame.kind != FrameKind::FragmentLast {
            *open = Some(state);
            return Ok(());
        }
        cursor.advance()?;
        if let Some((kind, total_len)) = state.head {
            if state.len != total_len {
                return Err(BlockError::Corrupt("fragments of another length than their change"));
            }
            if wanted {
                visit(whole(kind, &state.value));
            }
        }
        Ok(())
    }
}

/// Where a log stands in the block at hand.
#[derive(Debug)]
struct Cursor {
    log: LogId,
    next: u64,
    left: u32,
}

impl Cursor {
    fn advance(&mut self) -> Result<(), BlockError> {
        self.left = self.left.checked_sub(1).ok_or(BlockError::Corrupt("the log table miscounts"))?;
        self.next += 1;
        Ok(())
    }
}

/// A change in fragments whose last one was not yet seen. Without a head, its beginning was not seen either.
#[derive(Debug)]
struct Open {
    log: LogId,
    sequence: u64,
    key_group: KeyGroup,
    head: Option<(ChangeKind, u64)>,
    len: u64,
    value: Vec<u8>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::assemble::tests::Change as Appended;
    use crate::assemble::tests::{any_change, decoded, impossible_frames, log_id, spill};
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    type Visited = Vec<(LogId, u64, Option<u16>, Vec<u8>)>;

    fn walk(blocks: &[Vec<u8>], only: Option<LogId>) -> Result<(Visited, bool), BlockError> {
        let mut walk = Walk::new(only);
        let mut visited = Visited::new();
        for block in decoded(blocks) {
            walk.block(&block.unwrap(), &mut |change| {
                let group = (change.kind == ChangeKind::Data).then_some(change.key_group.0);
                visited.push((change.log, change.sequence.0, group, change.value.to_vec()));
            })?;
        }
        Ok((visited, walk.is_open()))
    }

    fn model(changes: &[Appended]) -> Visited {
        let mut next = BTreeMap::<usize, u64>::new();
        let visit = |change: &Appended| {
            let next = next.entry(change.log).or_default();
            *next += 1;
            (log_id(change.log), *next - 1, change.group, change.value.clone())
        };
        changes.iter().map(visit).collect()
    }

    proptest! {
        #[test]
        fn changes_come_in_append_order(changes in proptest::collection::vec(any_change(), 0..100), log in 0..5usize) {
            let blocks = spill(&changes);
            let wanted = model(&changes);
            prop_assert_eq!(walk(&blocks, None), Ok((wanted.clone(), false)));
            let of_log: Visited = wanted.into_iter().filter(|change| change.0 == log_id(log)).collect();
            prop_assert_eq!(walk(&blocks, Some(log_id(log))), Ok((of_log, false)));
        }

        #[test]
        fn a_walk_may_start_and_stop_anywhere(
            changes in proptest::collection::vec(any_change(), 1..60),
            from: prop::sample::Index,
            to: prop::sample::Index,
        ) {
            let blocks = spill(&changes);
            let (from, to) = (from.index(blocks.len()), to.index(blocks.len()));
            let some = &blocks[from..to.max(from) + 1];
            let (visited, open) = walk(some, None).unwrap();
            let wanted = model(&changes);
            let start = visited.first().map_or(0, |first| wanted.iter().position(|change| change == first).unwrap());
            prop_assert_eq!(&visited[..], &wanted[start..start + visited.len()]);
            let continues = Block::decode(some.last().unwrap(), None).unwrap().header().continues;
            prop_assert_eq!(open, continues);
        }
    }

    #[test]
    fn an_open_change_goes_on_or_the_walk_fails() {
        let big = Appended { log: 0, group: Some(1), value: vec![7; 20_000] };
        let small = Appended { log: 0, group: Some(1), value: vec![8; 10] };
        let blocks = spill(&[small.clone(), big.clone(), small.clone(), big]);
        assert!(walk(&blocks, None).is_ok());
        // Between the first and the last fragment of a change, any other block contradicts it.
        let mut skipped = blocks.clone();
        skipped.remove(2);
        assert!(matches!(walk(&skipped, None), Err(BlockError::Corrupt(_))), "{:?}", walk(&skipped, None));
        let other = spill(&[small]);
        let foreign = [blocks[0].clone(), other[0].clone()];
        assert!(matches!(walk(&foreign, None), Err(BlockError::Gap { .. })));
    }

    #[test]
    fn fragments_that_contradict_each_other_are_refused() {
        for (index, blocks) in impossible_frames().into_iter().enumerate() {
            let result = walk(&blocks, None);
            assert!(matches!(result, Err(BlockError::Corrupt(_))), "{index}: {result:?}");
        }
    }
}
