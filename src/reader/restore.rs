//! `Restore`: what the readers of one restore share, and what is checked before anything is fetched.
//!
//! A plan is a list of *items* in the order in which they are read: stretches of logs that local blocks hold, and extents
//! of objects for the rest. It is made once, and every reader takes its key groups of all items. How an item is read is
//! known to reader.rs, what objects have in common to objects.rs, how blocks are read to local.rs.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use tidelog_upload::{Driver, Store, UploadOptions};

use super::ChangelogReader;
use super::local::{LocalGroup, LocalSite, Pin, groups};
use super::objects::{ObjectSource, Objects};
use crate::error::ReadError;
use crate::handle::{ChangelogHandle, Extent, joined};
use crate::local::index::BlockRef;
use crate::types::{KeyGroupRange, LogId, SequenceNumber};

/// Handles that do not go together, or not with the key groups that are to be read of them. Nothing was fetched.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HandlesError {
    /// Two handles stand for the same changes of a log.
    #[error(
        "two handles of log {log} ({name}) both hold the changes from {from} to {to}: give the handles of one checkpoint, \
         each once"
    )]
    Overlap {
        /// The log.
        log: LogId,
        /// Its name.
        name: String,
        /// The first change that is in both.
        from: SequenceNumber,
        /// The end of those that are in both.
        to: SequenceNumber,
    },
    /// A handle between two others of its log is missing.
    #[error(
        "no handle of log {log} ({name}) holds the changes from {from} to {to}, which are between those of others: give all \
         handles of the checkpoint"
    )]
    Gap {
        /// The log.
        log: LogId,
        /// Its name.
        name: String,
        /// The first change that is missing.
        from: SequenceNumber,
        /// The end of those that are missing.
        to: SequenceNumber,
    },
    /// Two handles of a log give it different key groups.
    #[error(
        "one handle of log {log} ({name}) is for key groups {first}, another one for {second}, as compactions of some key \
         groups make them: read each by a restore of its own, or compact all key groups at once"
    )]
    KeyGroupsDiffer {
        /// The log.
        log: LogId,
        /// Its name.
        name: String,
        /// The key groups in one.
        first: KeyGroupRange,
        /// The key groups in the other.
        second: KeyGroupRange,
    },
    /// Key groups that are to be read are in no handle. A handle of an empty log counts.
    #[error(
        "no handle is for key groups {}: give the handles of all writers, or ask for fewer key groups",
        .missing.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
    )]
    NotCovered {
        /// The key groups that are missing, in order.
        missing: Vec<KeyGroupRange>,
    },
}

/// Handles of any number of writers, to be read by any number of readers: each takes its own key groups.
///
/// Made once in a process and shared (clones are the same restore): buckets are opened once, and the footers and
/// directories of objects are fetched once, whichever readers ask for them, at most 64 MiB of each kept. A reader fetches
/// the changes of its key groups only.
///
/// The order of the logs is that of the handles; the handles of one log are read in the order of their numbers.
///
/// **Key groups of different logs may overlap, and are read without a word**: first the changes of the log whose handle is
/// given first, then those of the next one. That is how state goes on: the log of the writer that failed, then that of the
/// one that was restored from it; after a rescaling several for one key group. Nothing in handles of unrelated writers, two
/// jobs' for instance, tells them from these, so whoever keeps handles has to keep them apart. Two handles of *one* log
/// that overlap are an [error](HandlesError::Overlap).
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let dir = tempfile::tempdir()?;
/// # let bucket = format!("file://{}", dir.path().join("bucket").display());
/// use tidelog::{Changelog, KeyGroup, KeyGroupRange, Options, Restore, SequenceNumber};
/// # let options = Options::new(bucket, dir.path().join("local")).segment_bytes(1 << 20).local_bytes(4 << 20);
/// let changelog = Changelog::open(options)?;
/// let mut handles = Vec::new();
/// for (first, last) in [(0, 63), (64, 127)] {
///     let mut writer = changelog.create_writer("counts", KeyGroupRange::new(first, last).unwrap())?;
///     writer.append(KeyGroup(first), b"a change")?;
///     handles.push(writer.persist_durably(SequenceNumber::ZERO).wait()?);
/// }
///
/// // Two writers become three readers.
/// let restore = Restore::open(&handles)?;
/// let mut changes = 0;
/// for (first, last) in [(0, 41), (42, 84), (85, 127)] {
///     changes += restore.reader(KeyGroupRange::new(first, last).unwrap())?.count();
/// }
/// assert_eq!(changes, 2);
/// assert!(restore.reader(KeyGroupRange::new(100, 200).unwrap()).is_err(), "a handle is missing");
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct Restore {
    shared: Arc<Shared>,
    /// What the handles are for, sorted and apart; `None` without a handle.
    covered: Option<Arc<[KeyGroupRange]>>,
}

/// What the readers of one plan have in common.
#[derive(Debug)]
pub(super) struct Shared {
    pub items: Vec<Item>,
    pub objects: Objects,
    /// Somebody was told that local blocks could not be read.
    pub warned: AtomicBool,
    _pin: Option<Pin>,
}

/// Changes of one log, from one place.
#[derive(Clone, Debug)]
pub(super) enum Item {
    Object(KeyGroupRange, Arc<ObjectSource>),
    Local(Arc<LocalGroup>),
}

impl Item {
    pub fn key_groups(&self) -> KeyGroupRange {
        match self {
            Item::Object(key_groups, _) => *key_groups,
            Item::Local(group) => group.key_groups,
        }
    }
}

/// What local directories hold of logs.
pub(crate) type LocalBlocks = HashMap<LogId, (Arc<LocalSite>, Vec<BlockRef>)>;

impl Restore {
    /// Checks handles, and opens their buckets. From the buckets alone; [`Changelog::restore`](crate::Changelog::restore)
    /// reads what is on the local disk from there.
    ///
    /// # Errors
    /// Handles that do not go together ([`HandlesError`]), or a bucket that cannot be opened. Objects are first read by
    /// [`ChangelogReader::next_batch`].
    pub fn open(handles: &[ChangelogHandle]) -> Result<Restore, ReadError> {
        Restore::plan(handles, None, LocalBlocks::new())
    }

    /// A restore from `stores`, on the calling thread. For simulations.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    #[doc(hidden)]
    pub fn open_simulated(
        handles: &[ChangelogHandle],
        stores: Vec<Arc<dyn Store>>,
    ) -> Result<Restore, ReadError> {
        let driver = Driver::inline(stores, UploadOptions::default(), Arc::new(Instant::now))?;
        Restore::plan(handles, Some(&Arc::new(driver)), LocalBlocks::new())
    }

    /// As [`open`](Self::open), with a driver for some of the buckets, and with local blocks.
    pub(crate) fn plan(
        handles: &[ChangelogHandle],
        driver: Option<&Arc<Driver>>,
        local: LocalBlocks,
    ) -> Result<Restore, ReadError> {
        let mut plan = Plan::new(driver);
        for of_log in in_order(handles)?.chunk_by(|a, b| a.log() == b.log()) {
            // Together they have no hole. Several may have changes in one object, side by side: each is fetched once.
            let (log, key_groups, from) = (of_log[0].log(), of_log[0].key_groups(), of_log[0].from());
            let to = of_log.iter().map(|handle| handle.to()).max().unwrap_or(from);
            let extents = joined(of_log.iter().flat_map(|handle| handle.extents()));
            plan.add(log, key_groups, from..to, &extents, local.get(&log))?;
        }
        let covered = (!handles.is_empty()).then(|| union(handles).into());
        Ok(Restore { shared: Arc::new(plan.finish(None)), covered })
    }

    /// A reader of some key groups. Without any handle there is nothing to read.
    ///
    /// # Errors
    /// [`HandlesError::NotCovered`] names the key groups that no handle is for: a lost handle does not go unnoticed.
    pub fn reader(&self, key_groups: KeyGroupRange) -> Result<ChangelogReader, ReadError> {
        if let Some(covered) = &self.covered {
            check_covered(key_groups, covered)?;
        }
        Ok(ChangelogReader::new(Arc::clone(&self.shared), key_groups))
    }

    /// A reader of all key groups that the handles are for.
    #[must_use]
    pub fn reader_of_all(&self) -> ChangelogReader {
        ChangelogReader::new(Arc::clone(&self.shared), KeyGroupRange::ALL)
    }
}

/// Items, as they are added.
pub(crate) struct Plan {
    items: Vec<Item>,
    objects: Objects,
    /// Local blocks hold something that no object holds.
    needs_local: bool,
}

impl Plan {
    pub fn new(driver: Option<&Arc<Driver>>) -> Plan {
        Plan { items: Vec::new(), objects: Objects::new(driver), needs_local: false }
    }

    /// Adds the changes `range` of a log: from local blocks where they hold them, else from `extents`, which are sorted
    /// and do not overlap.
    ///
    /// # Errors
    /// What neither of them holds, and a bucket that cannot be opened.
    pub fn add(
        &mut self,
        log: LogId,
        key_groups: KeyGroupRange,
        range: Range<SequenceNumber>,
        extents: &[Extent],
        local: Option<&(Arc<LocalSite>, Vec<BlockRef>)>,
    ) -> Result<(), ReadError> {
        let clip = |range: &Range<SequenceNumber>| -> Vec<Arc<ObjectSource>> {
            let overlaps =
                |extent: &&Extent| !range.is_empty() && extent.first < range.end && extent.end > range.start;
            let overlapping = extents.iter().filter(overlaps);
            let clipped = overlapping.map(|extent| {
                let (first, end) = (extent.first.max(range.start), extent.end.min(range.end));
                Arc::new(ObjectSource { log, extent: Extent { first, end, ..extent.clone() } })
            });
            clipped.collect()
        };
        let mut due = range.start;
        let stretches = local.map_or_else(Vec::new, |(_, blocks)| groups(blocks, &range));
        for stretch in stretches {
            self.add_objects(
                log,
                key_groups,
                due..stretch.numbers.start,
                clip(&(due..stretch.numbers.start)),
            )?;
            due = stretch.numbers.end;
            let Some((site, blocks)) = local else { continue };
            let objects = clip(&stretch.numbers);
            self.needs_local |= !cover(&objects, &stretch.numbers);
            self.items.push(Item::Local(Arc::new(LocalGroup {
                log,
                key_groups,
                numbers: stretch.numbers,
                site: Arc::clone(site),
                blocks: blocks[stretch.blocks].to_vec(),
                objects,
                failed: AtomicBool::new(false),
            })));
        }
        self.add_objects(log, key_groups, due..range.end, clip(&(due..range.end)))
    }

    fn add_objects(
        &mut self,
        log: LogId,
        key_groups: KeyGroupRange,
        range: Range<SequenceNumber>,
        objects: Vec<Arc<ObjectSource>>,
    ) -> Result<(), ReadError> {
        if !cover(&objects, &range) {
            return Err(ReadError::Truncated { log, from: range.start, start: range.end });
        }
        for object in objects {
            self.objects.open(&object.extent)?;
            self.items.push(Item::Object(key_groups, object));
        }
        Ok(())
    }

    fn finish(self, pin: Option<Pin>) -> Shared {
        let (items, objects) = (self.items, self.objects);
        Shared { items, objects, warned: AtomicBool::new(false), _pin: pin }
    }

    /// A reader of what was added. The pin is kept only if something is on the local disk alone: what objects hold too
    /// may be released while it is read.
    pub fn reader(self, key_groups: KeyGroupRange, pin: Option<Pin>) -> ChangelogReader {
        let pin = pin.filter(|_| self.needs_local);
        ChangelogReader::new(Arc::new(self.finish(pin)), key_groups)
    }
}

/// Whether sources, in order, hold all changes of a range.
pub(super) fn cover(objects: &[Arc<ObjectSource>], range: &Range<SequenceNumber>) -> bool {
    let mut due = range.start;
    for object in objects {
        if object.extent.first > due {
            return false;
        }
        due = due.max(object.extent.end);
    }
    due >= range.end
}

/// The handles log by log, as the logs first come, and by their numbers; checked to go together.
fn in_order(handles: &[ChangelogHandle]) -> Result<Vec<&ChangelogHandle>, HandlesError> {
    let mut logs: BTreeMap<LogId, Vec<&ChangelogHandle>> = BTreeMap::new();
    for handle in handles {
        logs.entry(handle.log()).or_default().push(handle);
    }
    for of_log in logs.values_mut() {
        of_log.sort_by_key(|handle| (handle.from(), handle.to()));
        let (first, rest) = of_log.split_first().expect("each log has a handle");
        let (log, name) = (first.log(), first.name().to_owned());
        let mut end = first.to();
        for handle in rest {
            if handle.key_groups() != first.key_groups() {
                let (first, second) = (first.key_groups(), handle.key_groups());
                return Err(HandlesError::KeyGroupsDiffer { log, name, first, second });
            }
            if handle.from() > end {
                return Err(HandlesError::Gap { log, name, from: end, to: handle.from() });
            }
            if handle.from() < end && !handle.is_empty() {
                return Err(HandlesError::Overlap {
                    log,
                    name,
                    from: handle.from(),
                    to: end.min(handle.to()),
                });
            }
            end = end.max(handle.to());
        }
    }
    let mut seen = BTreeSet::new();
    let first_of_log = handles.iter().map(ChangelogHandle::log).filter(|log| seen.insert(*log));
    Ok(first_of_log.flat_map(|log| logs[&log].clone()).collect())
}

/// Refuses key groups that are not in `covered`, which is in order and apart.
pub(crate) fn check_covered(wanted: KeyGroupRange, covered: &[KeyGroupRange]) -> Result<(), HandlesError> {
    let missing = outside(wanted, covered);
    if missing.is_empty() { Ok(()) } else { Err(HandlesError::NotCovered { missing }) }
}

/// The key groups that handles are for, as few ranges, in order.
pub(crate) fn union(handles: &[ChangelogHandle]) -> Vec<KeyGroupRange> {
    let mut ranges: Vec<KeyGroupRange> = handles.iter().map(ChangelogHandle::key_groups).collect();
    ranges.sort_unstable_by_key(|range| (range.first(), range.last()));
    let mut union: Vec<KeyGroupRange> = Vec::new();
    for range in ranges {
        match union.last_mut() {
            Some(last) if u32::from(range.first().0) <= u32::from(last.last().0) + 1 => {
                let end = last.last().max(range.last());
                *last = KeyGroupRange::new(last.first().0, end.0).expect("first <= last");
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
    use crate::piece::Piece;

    fn handle(log: u128, groups: (u16, u16), from: u64, to: u64) -> ChangelogHandle {
        let (from, to) = (SequenceNumber(from), SequenceNumber(to));
        let object = format!("t/{log}-{from}");
        let piece = Piece { bucket: "memory://".into(), object, offset: 0, bytes: 100 };
        let extent = Extent { pieces: vec![piece], footer: 50..100, token: 7, first: from, end: to };
        let extents = if from < to { vec![extent] } else { Vec::new() };
        let groups = KeyGroupRange::new(groups.0, groups.1).unwrap();
        ChangelogHandle::new(LogId(log), "log", groups, from, to, extents).unwrap()
    }

    fn checked(handles: &[ChangelogHandle]) -> Result<Vec<(u128, u64, u64)>, HandlesError> {
        let ordered = in_order(handles)?;
        Ok(ordered.iter().map(|handle| (handle.log().0, handle.from().0, handle.to().0)).collect())
    }

    #[test]
    fn handles_are_ordered_by_first_log_and_number() {
        let all = (0, 9);
        let given = [handle(9, all, 5, 8), handle(2, all, 0, 3), handle(9, all, 2, 5), handle(2, all, 3, 3)];
        assert_eq!(checked(&given), Ok(vec![(9, 2, 5), (9, 5, 8), (2, 0, 3), (2, 3, 3)]));
        assert_eq!(checked(&[]), Ok(vec![]));
    }

    #[test]
    fn handles_that_overlap_leave_a_gap_or_contradict_each_other_are_named() {
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
        let differ = checked(&[handle(1, (0, 9), 0, 5), handle(1, (0, 8), 5, 6)]);
        assert!(matches!(differ, Err(HandlesError::KeyGroupsDiffer { .. })));
        // Empty handles hold nothing twice, and different logs may overlap.
        assert!(checked(&[handle(1, all, 5, 5), handle(1, all, 5, 5), handle(1, all, 5, 7)]).is_ok());
        assert!(checked(&[handle(1, (0, 9), 0, 5), handle(2, (5, 20), 0, 5)]).is_ok());
    }

    #[test]
    fn key_groups_without_a_handle_are_named() {
        let range = |first, last| KeyGroupRange::new(first, last).unwrap();
        let handles = [handle(1, (10, 19), 0, 5), handle(2, (20, 29), 0, 0), handle(3, (40, 49), 0, 5)];
        let restore = Restore::open(&handles).unwrap();
        for covered in [range(10, 29), range(12, 12), range(20, 25), range(40, 49)] {
            restore.reader(covered).unwrap();
        }
        let missing = |wanted| match restore.reader(wanted) {
            Err(ReadError::Handles(HandlesError::NotCovered { missing })) => missing,
            other => panic!("{other:?}"),
        };
        assert_eq!(missing(range(9, 10)), [range(9, 9)]);
        assert_eq!(missing(range(25, 45)), [range(30, 39)]);
        assert_eq!(missing(KeyGroupRange::ALL), [range(0, 9), range(30, 39), range(50, u16::MAX)]);
        assert_eq!(missing(range(60, 70)), [range(60, 70)]);
        let error = restore.reader(KeyGroupRange::ALL).unwrap_err().to_string();
        assert!(error.contains("0-9, 30-39, 50-65535"), "{error}");
        let everything = Restore::open(&[handle(1, (0, u16::MAX), 0, 0)]).unwrap();
        assert_eq!(everything.reader(KeyGroupRange::ALL).unwrap().count(), 0);
        let nothing = Restore::open(&[]).unwrap();
        assert_eq!(nothing.reader(KeyGroupRange::ALL).unwrap().count(), 0);
    }
}
