//! `Restore`: what the readers of one restore share, and what is checked before anything is fetched.
//!
//! A plan is a list of *items* in the order in which they are read: stretches of logs that local blocks hold, and extents
//! of objects for the rest. It is made once, and every reader takes its key groups of all items. How an item is read is
//! known to reader.rs, what objects have in common to objects.rs, how blocks are read to local.rs.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use tidelog_upload::{Driver, Store, UploadOptions};

use super::ChangelogReader;
use super::local::{LocalGroup, LocalSite, Pin, groups};
use super::objects::{ObjectSource, Objects};
use crate::error::ReadError;
use crate::handle::{Chain, ChangelogHandle, Coverage, Extent, by_log, joined};
use crate::local::index::BlockRef;
use crate::types::{KeyGroupRange, LogId, SequenceNumber};

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
/// jobs' for instance, tells them from these, so whoever keeps handles has to keep them apart. The handles of *one* log may be
/// for different key groups, as [`Compactor`](crate::Compactor) makes them of ranges; but each change of each of these key groups has to be in
/// exactly one of them: all else is an [overlap](crate::HandlesError::Overlap) or a [gap](crate::HandlesError::Gap).
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
    coverage: Arc<Coverage>,
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
    Object(Arc<ObjectSource>),
    Local(Arc<LocalGroup>),
}

impl Item {
    pub fn key_groups(&self) -> KeyGroupRange {
        match self {
            Item::Object(source) => source.key_groups,
            Item::Local(group) => group.key_groups,
        }
    }

    pub fn log(&self) -> LogId {
        match self {
            Item::Object(source) => source.log,
            Item::Local(group) => group.log,
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
    /// Handles that do not go together ([`HandlesError`](crate::HandlesError)), or a bucket that cannot be opened. Objects are
    /// first read by [`ChangelogReader::next_batch`].
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
        let logs = by_log(handles)?;
        for of_log in &logs {
            let log = of_log.log();
            for Chain { key_groups, numbers, handles } in of_log.chains() {
                // Several may have changes in one object, side by side: each is fetched once.
                let extents = joined(handles.iter().flat_map(|handle| handle.extents()));
                plan.add(log, key_groups, numbers, &extents, local.get(&log))?;
            }
        }
        Ok(Restore { shared: Arc::new(plan.finish(None)), coverage: Arc::new(Coverage::of(&logs)) })
    }

    /// A reader of some key groups. Without any handle there is nothing to read.
    ///
    /// # Errors
    /// [`HandlesError::NotCovered`] and [`HandlesError::Between`] name the key groups that no handle is for: a lost handle
    /// does not go unnoticed.
    ///
    /// [`HandlesError::NotCovered`]: crate::HandlesError::NotCovered
    /// [`HandlesError::Between`]: crate::HandlesError::Between
    pub fn reader(&self, key_groups: KeyGroupRange) -> Result<ChangelogReader, ReadError> {
        self.coverage.check(key_groups)?;
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
                Arc::new(ObjectSource { log, key_groups, extent: Extent { first, end, ..extent.clone() } })
            });
            clipped.collect()
        };
        let mut due = range.start;
        let stretches = local.map_or_else(Vec::new, |(_, blocks)| groups(blocks, &range));
        for stretch in stretches {
            let before = due..stretch.numbers.start;
            self.add_objects(log, before.clone(), clip(&before))?;
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
                without_metadata: AtomicBool::new(false),
            })));
        }
        self.add_objects(log, due..range.end, clip(&(due..range.end)))
    }

    fn add_objects(
        &mut self,
        log: LogId,
        range: Range<SequenceNumber>,
        objects: Vec<Arc<ObjectSource>>,
    ) -> Result<(), ReadError> {
        if !cover(&objects, &range) {
            return Err(ReadError::Truncated { log, from: range.start, start: range.end });
        }
        for object in objects {
            self.objects.open(&object.extent)?;
            self.items.push(Item::Object(object));
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

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::os::unix::fs::FileExt as _;

    use super::*;
    use crate::part::{self, Compression, PartId, Run};
    use crate::piece::Piece;
    use crate::tail::Tail;
    use crate::types::KeyGroup;
    use crate::varint;

    /// The object is a file of holes but for what a reader of one key group needs.
    #[test]
    fn changes_beyond_4_gib_of_an_object_are_read_from_where_they_are() {
        const LOG: LogId = LogId(7);
        const TOKEN: u64 = 0x5f;
        const OTHER_GROUP_BYTES: u64 = (1 << 30) + 5;
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("orders")).unwrap();
        let name = "orders/00000000-000000000000005f";
        let file = File::create_new(dir.path().join(name)).unwrap();
        let mut tail = Tail::new(TOKEN);
        let value = |part: u64| format!("of part {part}").into_bytes();
        for index in 0..6 {
            // Key group 0 has nine of ten changes, key group 1 the last one.
            let id = PartId { token: TOKEN, index: index as u32 };
            let mut changeset = vec![0; part::CHECKSUM_BYTES];
            for number in [1, 10 * index + 9, value(index).len() as u64] {
                varint::put(&mut changeset, number);
            }
            changeset.extend(value(index));
            part::seal_changeset(&mut changeset, id, LOG, 2);
            let lens = [(1, OTHER_GROUP_BYTES), (2, changeset.len() as u64)];
            let mut directory = Vec::new();
            part::put_directory(&mut directory, id, LOG, lens.into_iter());
            file.write_all_at(&changeset, tail.footer().parts_len() + OTHER_GROUP_BYTES).unwrap();
            let run = Run {
                log: LOG,
                first: SequenceNumber(10 * index),
                end: SequenceNumber(10 * index + 10),
                offset: 0,
                directory_len: directory.len() as u32,
                len: OTHER_GROUP_BYTES + changeset.len() as u64,
            };
            tail.push(Compression::None, vec![run], &directory);
        }
        let parts_len = tail.footer().parts_len();
        assert!(parts_len > 6 << 30);
        let (bytes, footer) = tail.encode();
        file.write_all_at(&bytes, parts_len).unwrap();
        let bucket = format!("file://{}", dir.path().display()).into();
        let pieces = vec![Piece { bucket, object: name.into(), offset: 0, bytes: footer.end }];
        let (first, end) = (SequenceNumber(0), SequenceNumber(60));
        let extent = Extent { pieces, footer, token: TOKEN, first, end };
        let groups = KeyGroupRange::new(0, 1).unwrap();
        let handle = ChangelogHandle::new(LOG, "orders", groups, first, end, vec![extent]).unwrap();

        let reader = Restore::open(&[handle]).unwrap().reader(KeyGroupRange::new(1, 1).unwrap()).unwrap();
        let read: Vec<_> = reader.map(|change| change.unwrap()).collect();
        assert_eq!(read.len(), 6);
        for (index, change) in (0..).zip(read) {
            assert_eq!(change.number, SequenceNumber(10 * index + 9));
            assert_eq!(change.key_group, Some(KeyGroup(1)));
            assert_eq!(change.value, value(index));
        }
    }
}
