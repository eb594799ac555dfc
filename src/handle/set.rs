//! Handles that are read or compacted together: what is checked of them before anything is fetched.
//!
//! Owns which handles go together, and which key groups they are for. Where their changes are read from is known to
//! reader/restore.rs and compact.rs.
//!
//! The handles of a log are rectangles of key groups and numbers. Whatever their shapes, [`by_log`] lets them pass only if
//! each change of a log, in each key group that one of its handles is for, from the first number of any of them to the last,
//! is in exactly one of them.

use std::collections::{BTreeSet, HashMap};
use std::ops::Range;

use super::ChangelogHandle;
use crate::types::{KeyGroupRange, LogId, SequenceNumber};

/// Handles that do not go together, or not with the key groups that are to be read of them. Nothing was fetched.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HandlesError {
    /// Two handles stand for the same changes of a log.
    #[error(
        "two handles of log {log} ({name}) both hold the changes from {from} to {to} of key groups {key_groups}: give the \
         handles of one checkpoint, each once, and not those that were compacted with what became of them"
    )]
    Overlap {
        /// The log.
        log: LogId,
        /// Its name.
        name: String,
        /// The key groups that are in both.
        key_groups: KeyGroupRange,
        /// The first change that is in both.
        from: SequenceNumber,
        /// The end of those that are in both.
        to: SequenceNumber,
    },
    /// A handle of a log is missing: others hold what is before and behind it, or the same changes of other key groups.
    #[error(
        "no handle of log {log} ({name}) holds the changes from {from} to {to} of key groups {key_groups}, which belong to \
         those of others: give all handles of the checkpoint, and those of all ranges of key groups if it was compacted by \
         ranges"
    )]
    Gap {
        /// The log.
        log: LogId,
        /// Its name.
        name: String,
        /// The key groups whose changes are missing.
        key_groups: KeyGroupRange,
        /// The first change that is missing.
        from: SequenceNumber,
        /// The end of those that are missing.
        to: SequenceNumber,
    },
    /// Key groups that are to be read lie between those that handles of a log are for, and none of its handles is for them.
    #[error(
        "no handle of log {log} ({name}) is for key groups {}, and there are some for those on both sides: give the handles of \
         all ranges that were compacted, or ask for fewer key groups", list(.missing)
    )]
    Between {
        /// The log.
        log: LogId,
        /// Its name.
        name: String,
        /// The key groups that are missing, in order.
        missing: Vec<KeyGroupRange>,
    },
    /// Key groups that are to be read are in no handle. A handle of an empty log counts.
    #[error(
        "no handle is for key groups {}: give the handles of all writers, or ask for fewer key groups", list(.missing)
    )]
    NotCovered {
        /// The key groups that are missing, in order.
        missing: Vec<KeyGroupRange>,
    },
}

fn list(ranges: &[KeyGroupRange]) -> String {
    ranges.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

/// The handles of a log, checked to go together.
#[derive(Debug)]
pub(crate) struct OfLog<'a> {
    /// From the first number to the end of the last, in all key groups.
    pub numbers: Range<SequenceNumber>,
    /// In the order of their numbers. At least one.
    handles: Vec<&'a ChangelogHandle>,
    /// What they are for, in order and apart.
    key_groups: Vec<KeyGroupRange>,
}

/// Key groups of which the same handles hold changes.
#[derive(Debug)]
pub(crate) struct Column<'a> {
    pub key_groups: KeyGroupRange,
    /// In the order of their numbers, without a hole; none of them is empty.
    pub handles: Vec<&'a ChangelogHandle>,
}

/// Handles for the same key groups whose numbers follow each other.
#[derive(Debug)]
pub(crate) struct Chain<'a> {
    pub key_groups: KeyGroupRange,
    pub numbers: Range<SequenceNumber>,
    pub handles: Vec<&'a ChangelogHandle>,
}

/// The handles of each log, in the order in which the logs first come.
pub(crate) fn by_log(handles: &[ChangelogHandle]) -> Result<Vec<OfLog<'_>>, HandlesError> {
    let mut places: HashMap<LogId, usize> = HashMap::new();
    let mut logs: Vec<Vec<&ChangelogHandle>> = Vec::new();
    for handle in handles {
        let place = *places.entry(handle.log()).or_insert(logs.len());
        logs.resize_with(logs.len().max(place + 1), Vec::new);
        logs[place].push(handle);
    }
    logs.into_iter().map(OfLog::new).collect()
}

impl<'a> OfLog<'a> {
    fn new(mut handles: Vec<&'a ChangelogHandle>) -> Result<OfLog<'a>, HandlesError> {
        handles.sort_by_key(|handle| (handle.from(), handle.to()));
        let start = handles[0].from();
        let end = handles.iter().map(|handle| handle.to()).fold(start, SequenceNumber::max);
        let key_groups = union(handles.iter().map(|handle| handle.key_groups()));
        let of_log = OfLog { numbers: start..end, handles, key_groups };
        for Column { key_groups, handles } in of_log.columns(KeyGroupRange::ALL) {
            let (log, name) = (of_log.log(), of_log.name());
            let mut due = start;
            for handle in handles {
                let (from, to) = (handle.from(), handle.to());
                if from > due {
                    return Err(HandlesError::Gap { log, name, key_groups, from: due, to: from });
                }
                if from < due {
                    return Err(HandlesError::Overlap { log, name, key_groups, from, to: due.min(to) });
                }
                due = to;
            }
            if due < end {
                return Err(HandlesError::Gap { log, name, key_groups, from: due, to: end });
            }
        }
        Ok(of_log)
    }

    pub fn log(&self) -> LogId {
        self.handles[0].log()
    }

    pub fn name(&self) -> String {
        self.handles[0].name().to_owned()
    }

    /// The wanted ones of its key groups, in as few columns as there are, in order.
    pub fn columns(&self, wanted: KeyGroupRange) -> Vec<Column<'a>> {
        // One more than a key group has bits for, at the end.
        let ends = |range: KeyGroupRange| [u32::from(range.first().0), u32::from(range.last().0) + 1];
        let cuts: BTreeSet<u32> =
            self.handles.iter().flat_map(|handle| ends(handle.key_groups())).chain(ends(wanted)).collect();
        let mut columns: Vec<Column<'a>> = Vec::new();
        for (first, end) in cuts.iter().zip(cuts.iter().skip(1)) {
            let key_groups = KeyGroupRange::new(*first as u16, (*end - 1) as u16).expect("cuts are in order");
            let has = |range: KeyGroupRange| range.contains(key_groups.first());
            if !has(wanted) || !self.key_groups.iter().any(|range| has(*range)) {
                continue;
            }
            let holds = |handle: &&&ChangelogHandle| !handle.is_empty() && has(handle.key_groups());
            let handles: Vec<_> = self.handles.iter().filter(holds).copied().collect();
            match columns.last_mut() {
                Some(last)
                    if ends(last.key_groups)[1] == *first
                        && last
                            .handles
                            .iter()
                            .map(|handle| std::ptr::from_ref(*handle))
                            .eq(handles.iter().map(|handle| std::ptr::from_ref(*handle))) =>
                {
                    last.key_groups = joined(last.key_groups, key_groups);
                }
                _ => columns.push(Column { key_groups, handles }),
            }
        }
        columns
    }

    /// All handles with changes, in chains as long as can be. Of a key group, one chain after the other holds the changes in
    /// the order of their numbers.
    pub fn chains(&self) -> Vec<Chain<'a>> {
        let mut chains: Vec<Chain<'a>> = Vec::new();
        let mut last: HashMap<KeyGroupRange, usize> = HashMap::new();
        for handle in self.handles.iter().filter(|handle| !handle.is_empty()) {
            let key_groups = handle.key_groups();
            // What comes between the two is of other key groups, or holds later numbers.
            match last.get(&key_groups).map(|chain| &mut chains[*chain]) {
                Some(chain) if chain.numbers.end == handle.from() => {
                    chain.numbers.end = handle.to();
                    chain.handles.push(handle);
                }
                _ => {
                    last.insert(key_groups, chains.len());
                    let numbers = handle.from()..handle.to();
                    chains.push(Chain { key_groups, numbers, handles: vec![handle] });
                }
            }
        }
        chains
    }
}

/// The key groups that handles are for.
#[derive(Debug)]
pub(crate) struct Coverage {
    /// In order and apart; none without a handle.
    all: Vec<KeyGroupRange>,
    /// Of logs, what is between those that its handles are for, and none is for.
    between: Vec<(LogId, String, Vec<KeyGroupRange>)>,
}

impl Coverage {
    pub fn of(logs: &[OfLog<'_>]) -> Coverage {
        let between = logs.iter().filter(|of_log| of_log.key_groups.len() > 1).map(|of_log| {
            let key_groups = &of_log.key_groups;
            let hull = joined(key_groups[0], key_groups[key_groups.len() - 1]);
            (of_log.log(), of_log.name(), outside(hull, key_groups))
        });
        let all = union(logs.iter().flat_map(|of_log| of_log.key_groups.iter().copied()));
        Coverage { all, between: between.collect() }
    }

    /// Refuses key groups that some handle is missing for. Without any handle there is nothing to miss.
    pub fn check(&self, wanted: KeyGroupRange) -> Result<(), HandlesError> {
        if self.all.is_empty() {
            return Ok(());
        }
        let missing = outside(wanted, &self.all);
        if !missing.is_empty() {
            return Err(HandlesError::NotCovered { missing });
        }
        for (log, name, between) in &self.between {
            let missing: Vec<_> = between.iter().filter_map(|range| range.intersection(wanted)).collect();
            if !missing.is_empty() {
                return Err(HandlesError::Between { log: *log, name: name.clone(), missing });
            }
        }
        Ok(())
    }
}

/// From the first of one to the last of the other, which is not before it.
fn joined(range: KeyGroupRange, next: KeyGroupRange) -> KeyGroupRange {
    KeyGroupRange::new(range.first().0, range.last().max(next.last()).0).expect("first <= last")
}

/// What is in any of them, as few ranges, in order.
fn union(ranges: impl Iterator<Item = KeyGroupRange>) -> Vec<KeyGroupRange> {
    let mut ranges: Vec<KeyGroupRange> = ranges.collect();
    ranges.sort_unstable_by_key(|range| (range.first(), range.last()));
    let mut union: Vec<KeyGroupRange> = Vec::new();
    for range in ranges {
        match union.last_mut() {
            Some(last) if u32::from(range.first().0) <= u32::from(last.last().0) + 1 => {
                *last = joined(*last, range);
            }
            _ => union.push(range),
        }
    }
    union
}

/// What of `wanted` is outside of `covered`, which is in order and apart.
fn outside(wanted: KeyGroupRange, covered: &[KeyGroupRange]) -> Vec<KeyGroupRange> {
    let mut missing = Vec::new();
    // One more than a key group has bits for, at the end.
    let mut due = u32::from(wanted.first().0);
    let end = u32::from(wanted.last().0) + 1;
    let range = |from: u32, to: u32| KeyGroupRange::new(from as u16, (to - 1) as u16);
    for part in covered.iter().filter_map(|range| range.intersection(wanted)) {
        let first = u32::from(part.first().0);
        missing.extend((due < first).then(|| range(due, first)).flatten());
        due = u32::from(part.last().0) + 1;
    }
    missing.extend((due < end).then(|| range(due, end)).flatten());
    missing
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::handle::Extent;
    use crate::piece::Piece;
    use proptest::prelude::*;

    fn handle(log: u128, groups: (u16, u16), from: u64, to: u64) -> ChangelogHandle {
        let (from, to) = (SequenceNumber(from), SequenceNumber(to));
        let object = format!("t/{log}-{from}");
        let piece = Piece { bucket: "memory://".into(), object, offset: 0, bytes: 100 };
        let extent = Extent { pieces: vec![piece], footer: 50..100, token: 7, first: from, end: to };
        let extents = if from < to { vec![extent] } else { Vec::new() };
        ChangelogHandle::new(LogId(log), "log", range(groups.0, groups.1), from, to, extents).unwrap()
    }

    fn range(first: u16, last: u16) -> KeyGroupRange {
        KeyGroupRange::new(first, last).unwrap()
    }

    fn checked(handles: &[ChangelogHandle]) -> Result<Vec<(u128, u64, u64)>, HandlesError> {
        let logs = by_log(handles)?;
        let ordered = logs.iter().flat_map(|of_log| &of_log.handles);
        Ok(ordered.map(|handle| (handle.log().0, handle.from().0, handle.to().0)).collect())
    }

    #[test]
    fn handles_are_ordered_by_first_log_and_number() {
        let all = (0, 9);
        let given = [handle(9, all, 5, 8), handle(2, all, 0, 3), handle(9, all, 2, 5), handle(2, all, 3, 3)];
        assert_eq!(checked(&given), Ok(vec![(9, 2, 5), (9, 5, 8), (2, 0, 3), (2, 3, 3)]));
        assert_eq!(checked(&[]), Ok(vec![]));
    }

    #[test]
    fn handles_that_overlap_or_leave_a_gap_are_named() {
        let all = (0, 9);
        let overlap = checked(&[handle(1, all, 0, 5), handle(1, all, 3, 9)]);
        assert!(matches!(overlap, Err(HandlesError::Overlap { from, to, .. }) if (from.0, to.0) == (3, 5)));
        let twice = checked(&[handle(1, all, 0, 5), handle(2, all, 0, 5), handle(1, all, 0, 5)]);
        assert!(
            matches!(twice, Err(HandlesError::Overlap { log: LogId(1), from, to, .. }) if (from.0, to.0) == (0, 5))
        );
        let inside = checked(&[handle(1, all, 0, 9), handle(1, all, 2, 3), handle(1, all, 4, 4)]);
        assert!(matches!(inside, Err(HandlesError::Overlap { from, to, .. }) if (from.0, to.0) == (2, 3)));
        let gap = checked(&[handle(1, all, 6, 8), handle(1, all, 0, 5)]);
        assert!(matches!(gap, Err(HandlesError::Gap { from, to, .. }) if (from.0, to.0) == (5, 6)));
        let gap = checked(&[handle(1, all, 9, 9), handle(1, all, 0, 5)]);
        assert!(matches!(gap, Err(HandlesError::Gap { from, to, .. }) if (from.0, to.0) == (5, 9)));
        // Empty handles hold nothing twice, and different logs may overlap.
        assert!(checked(&[handle(1, all, 5, 5), handle(1, all, 5, 5), handle(1, all, 5, 7)]).is_ok());
        assert!(checked(&[handle(1, (0, 9), 0, 5), handle(2, (5, 20), 0, 5)]).is_ok());
    }

    #[test]
    fn ranges_of_key_groups_go_together_if_each_has_all_numbers_once() {
        let halves = [handle(1, (0, 4), 0, 5), handle(1, (5, 9), 0, 3), handle(1, (5, 9), 3, 5)];
        let both = handle(1, (0, 9), 5, 8);
        let logs = [&halves[..], std::slice::from_ref(&both)].concat();
        assert!(checked(&logs).is_ok());
        let of_log = &by_log(&logs).unwrap()[0];
        let chains = of_log.chains();
        let chains: Vec<_> = chains
            .iter()
            .map(|chain| (chain.key_groups, chain.numbers.clone(), chain.handles.len()))
            .collect();
        let numbers = |from, to| SequenceNumber(from)..SequenceNumber(to);
        assert_eq!(
            chains,
            [
                (range(5, 9), numbers(0, 5), 2),
                (range(0, 4), numbers(0, 5), 1),
                (range(0, 9), numbers(5, 8), 1)
            ]
        );
        let columns = |wanted| {
            let columns = of_log.columns(wanted);
            Vec::from_iter(columns.iter().map(|column| (column.key_groups, column.handles.len())))
        };
        assert_eq!(columns(KeyGroupRange::ALL), [(range(0, 4), 2), (range(5, 9), 3)]);
        assert_eq!(columns(range(6, 7)), [(range(6, 7), 3)]);
        assert_eq!(columns(range(4, 5)), [(range(4, 4), 2), (range(5, 5), 3)]);

        // Each of these is missing in its key groups alone.
        let short = checked(&[halves[0].clone(), halves[1].clone()]);
        let gap = |key_groups, from, to| {
            let (log, name) = (LogId(1), "log".to_owned());
            let (from, to) = (SequenceNumber(from), SequenceNumber(to));
            Err(HandlesError::Gap { log, name, key_groups, from, to })
        };
        assert_eq!(short, gap(range(5, 9), 3, 5));
        assert_eq!(checked(&[halves[0].clone(), both.clone()]), gap(range(5, 9), 0, 5));
        assert_eq!(checked(&[halves[0].clone(), handle(1, (5, 9), 5, 5)]), gap(range(5, 9), 0, 5));
        let wide = checked(&[handle(1, (0, 5), 0, 5), handle(1, (5, 9), 0, 5)]);
        let overlap = matches!(&wide, Err(HandlesError::Overlap { key_groups, from, to, .. })
            if (*key_groups, from.0, to.0) == (range(5, 5), 0, 5));
        assert!(overlap, "{wide:?}");
    }

    #[test]
    fn key_groups_without_a_handle_are_named() {
        let handles = [
            handle(1, (10, 19), 0, 5),
            handle(2, (20, 29), 0, 0),
            handle(3, (40, 49), 0, 5),
            handle(3, (60, 69), 0, 5),
            handle(4, (45, 65), 0, 5),
        ];
        let coverage = Coverage::of(&by_log(&handles).unwrap());
        for covered in [range(10, 29), range(12, 12), range(20, 25), range(40, 49), range(60, 69)] {
            assert_eq!(coverage.check(covered), Ok(()));
        }
        let missing = |wanted| match coverage.check(wanted) {
            Err(HandlesError::NotCovered { missing }) => missing,
            other => panic!("{other:?}"),
        };
        assert_eq!(missing(range(9, 10)), [range(9, 9)]);
        assert_eq!(missing(range(25, 45)), [range(30, 39)]);
        assert_eq!(missing(KeyGroupRange::ALL), [range(0, 9), range(30, 39), range(70, u16::MAX)]);
        let error = coverage.check(KeyGroupRange::ALL).unwrap_err().to_string();
        assert!(error.contains("0-9, 30-39, 70-65535"), "{error}");
        // Another log has them, this one has lost them.
        let name = "log".to_owned();
        let between = HandlesError::Between { log: LogId(3), name, missing: vec![range(50, 52)] };
        assert_eq!(coverage.check(range(45, 52)), Err(between));
        let everything = Coverage::of(&by_log(&[handle(1, (0, u16::MAX), 0, 0)]).unwrap());
        assert_eq!(everything.check(KeyGroupRange::ALL), Ok(()));
        assert_eq!(Coverage::of(&[]).check(KeyGroupRange::ALL), Ok(()));
    }

    proptest! {
        /// Handles pass exactly if each number of each key group is in one of them.
        #[test]
        fn what_passes_covers_everything_once(
            rectangles in proptest::collection::vec((0..4u16, 0..4u16, 0..4u64, 0..4u64), 1..6),
        ) {
            let handles: Vec<_> = rectangles
                .iter()
                .map(|&(a, b, from, to)| handle(1, (a.min(b), a.max(b)), from.min(to), from.max(to)))
                .collect();
            let from = handles.iter().map(|handle| handle.from().0).min().unwrap();
            let to = handles.iter().map(|handle| handle.to().0).max().unwrap();
            let times = |group: u16, number: u64| {
                let has = |handle: &&ChangelogHandle| {
                    handle.key_groups().contains(crate::KeyGroup(group))
                        && (handle.from().0..handle.to().0).contains(&number)
                };
                handles.iter().filter(has).count()
            };
            let is_covered = |group: &u16| {
                handles.iter().any(|handle| handle.key_groups().contains(crate::KeyGroup(*group)))
            };
            let mut groups = (0..4u16).filter(is_covered);
            let once = groups.all(|group| (from..to).all(|number| times(group, number) == 1));
            let passed = by_log(&handles);
            prop_assert_eq!(passed.is_ok(), once, "{:?}", passed);
            let Ok(logs) = passed else { return Ok(()) };
            for group in (0..4u16).filter(is_covered) {
                let mut due = from;
                for chain in logs[0].chains() {
                    if chain.key_groups.contains(crate::KeyGroup(group)) {
                        prop_assert_eq!(chain.numbers.start.0, due);
                        due = chain.numbers.end.0;
                    }
                }
                prop_assert_eq!(due, to);
            }
        }
    }
}
