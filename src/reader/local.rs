//! Changes of a log read from local blocks, in memory or on the disk, sorted like those of a part.
//!
//! All of a group is verified before anything of it is handed out: each block by its checksum, place, epoch and number,
//! and the changes by their numbers, which must be exactly the group's, without a hole. What cannot be read so is read
//! from objects instead, if they hold it too. That is nothing to worry about where the use of a block's segment has ended
//! since it was looked up, which the index knows before anything else is written there; all else is damage.

use std::fmt;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use tidelog_io::directory::Directory;
use tidelog_io::disk::Files;
use tidelog_io::segment::segment_name;

use super::objects::ObjectSource;
use super::{Change, ReadStats};
use crate::block::{Block, BlockError, Expected};
use crate::device::lock;
use crate::error::ReadError;
use crate::local::index::{BlockRef, LocalIndex};
use crate::types::{ChangeKind, KeyGroupRange, LogId, SequenceNumber};
use crate::walk::{self, Walk};

/// Local blocks are sorted in groups of about this many bytes.
const GROUP_BYTES: usize = 8 << 20;
/// Blocks side by side are read at once, up to about this many bytes.
const READ_BYTES: usize = 1 << 20;

/// Runs a function when the last reader of local blocks is gone.
pub(crate) struct Pin(pub Box<dyn Fn() + Send + Sync>);

impl Drop for Pin {
    fn drop(&mut self) {
        (self.0)();
    }
}

impl fmt::Debug for Pin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pin").finish_non_exhaustive()
    }
}

/// The directory that local blocks are in.
pub(crate) struct LocalSite {
    pub path: PathBuf,
    pub files: Arc<dyn Files>,
    /// What its segments hold by now, where a changelog goes on to use them.
    pub index: Option<Arc<Mutex<LocalIndex>>>,
    /// Its lock, where no changelog has it.
    pub _lock: Option<Directory>,
}

impl fmt::Debug for LocalSite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LocalSite").field("path", &self.path).finish_non_exhaustive()
    }
}

/// Changes of a log in local blocks that are sorted together.
#[derive(Debug)]
pub(super) struct LocalGroup {
    pub log: LogId,
    pub key_groups: KeyGroupRange,
    pub numbers: Range<SequenceNumber>,
    pub site: Arc<LocalSite>,
    pub blocks: Vec<BlockRef>,
    /// What holds the same changes, or some of them.
    pub objects: Vec<Arc<ObjectSource>>,
    /// It could not be read; who comes later need not try.
    pub failed: AtomicBool,
    /// It was read, and no metadata is there: nobody need look for it again.
    pub without_metadata: AtomicBool,
}

/// Why a group was not read.
#[derive(Debug)]
pub(super) struct Unreadable {
    pub error: Box<ReadError>,
    /// The block was released after it had been looked up: whatever stands there now, nothing is damaged.
    pub released: bool,
}

/// A stretch of a log that local blocks hold without a hole.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Stretch {
    pub numbers: Range<SequenceNumber>,
    /// Which of the blocks.
    pub blocks: Range<usize>,
}

/// What `blocks`, all that hold changes of one log, have of the changes `wanted`: in order, cut into groups of about
/// `group_bytes` that split no change.
pub(super) fn stretches(
    blocks: &[BlockRef],
    wanted: &Range<SequenceNumber>,
    group_bytes: usize,
) -> Vec<Stretch> {
    let mut found: Vec<Stretch> = Vec::new();
    let mut from = wanted.start;
    for chain in blocks.chunk_by(goes_on) {
        let offset = blocks.partition_point(|block| block.number < chain[0].number);
        let mut start = 0;
        let mut bytes = 0;
        for (index, block) in chain.iter().enumerate() {
            bytes += block.len;
            let last = index + 1 == chain.len();
            if !last && (bytes < group_bytes || block.continues) {
                continue;
            }
            let numbers = chain[start].whole_from.max(from)..block.end.min(wanted.end);
            if numbers.start < numbers.end {
                // Of the blocks before the first wanted change none is needed, unless that begins there.
                let begins = |block: &BlockRef| block.end.0 + u64::from(block.continues) > numbers.start.0;
                let first = (start..=index).find(|at| begins(&chain[*at])).unwrap_or(index);
                let behind = |block: &BlockRef| block.first >= numbers.end;
                let end = (first..=index).find(|at| behind(&chain[*at])).unwrap_or(index + 1);
                from = numbers.end;
                found.push(Stretch { numbers, blocks: offset + first..offset + end });
            }
            (start, bytes) = (index + 1, 0);
        }
    }
    found
}

/// Whether the log goes on from one block to the other without a hole.
fn goes_on(block: &BlockRef, next: &BlockRef) -> bool {
    let resumes = next.whole_from > next.first;
    block.end == next.first && (!resumes || (block.continues && block.number + 1 == next.number))
}

/// The groups that stretches are cut into by default.
pub(super) fn groups(blocks: &[BlockRef], wanted: &Range<SequenceNumber>) -> Vec<Stretch> {
    stretches(blocks, wanted, GROUP_BYTES)
}

impl LocalGroup {
    /// Reads the blocks, and sorts their changes by key group: metadata, or the data in `key_groups`.
    pub fn read(
        &self,
        metadata: bool,
        key_groups: KeyGroupRange,
        stats: &mut ReadStats,
    ) -> Result<Vec<Change>, Unreadable> {
        if metadata && self.without_metadata.load(Ordering::Relaxed) {
            return Ok(Vec::new());
        }
        let mut changes = Vec::new();
        let mut has_metadata = false;
        let mut walk = Walk::new(Some(self.log));
        let (mut due, mut due_block) = (self.numbers.start, None);
        for run in self.blocks.chunk_by(side_by_side) {
            let loaded = self.load(run, stats)?;
            for (block, bytes) in run.iter().zip(loaded) {
                let expected = block.place.as_ref().map(Expected::from);
                let damaged = |source: BlockError| self.error(block, source.to_string());
                let decoded = Block::decode(&bytes, expected.as_ref()).map_err(damaged)?;
                if due_block != Some(block.number) {
                    // Blocks without this log are not among them: what another log left open there does not go on here.
                    walk = Walk::new(Some(self.log));
                }
                due_block = Some(block.number + 1);
                let mut hole = None;
                let mut take = |change: walk::Change<'_>| {
                    if !self.numbers.contains(&change.sequence) {
                        return;
                    }
                    if change.sequence != due {
                        hole.get_or_insert(change.sequence);
                        return;
                    }
                    due = due.next();
                    let key_group = (change.kind == ChangeKind::Data).then_some(change.key_group);
                    has_metadata |= key_group.is_none();
                    let wanted =
                        key_group.map_or(metadata, |key_group| !metadata && key_groups.contains(key_group));
                    if wanted {
                        let value = shared(&bytes, change.value);
                        changes.push(Change { log: change.log, number: change.sequence, key_group, value });
                    }
                };
                walk.block(&decoded, &mut take).map_err(damaged)?;
                if let Some(found) = hole {
                    return Err(self.error(block, format!("change {found} stands where {due} was due")));
                }
            }
        }
        if due != self.numbers.end {
            let what = format!("changes {due} to {} are not there", self.numbers.end);
            let Some(last) = self.blocks.last() else {
                return Err(Unreadable { error: Box::new(ReadError::Closed), released: false });
            };
            return Err(self.error(last, what));
        }
        self.without_metadata.store(!has_metadata, Ordering::Relaxed);
        changes.sort_by_key(|change| change.key_group);
        Ok(changes)
    }

    /// The bytes of blocks that are side by side.
    fn load(&self, run: &[BlockRef], stats: &mut ReadStats) -> Result<Vec<Bytes>, Unreadable> {
        let first = &run[0];
        let len: usize = run.iter().map(|block| block.len).sum();
        let read = match (&first.bytes, &first.place) {
            (Some(bytes), _) => bytes.clone(),
            (None, Some(place)) => {
                let mut bytes = vec![0; len];
                match self.site.files.read_at(&segment_name(place.segment), place.offset, &mut bytes) {
                    Ok(read) if read == len => Bytes::from(bytes),
                    Ok(read) => return Err(self.error(first, format!("{read} of {len} bytes"))),
                    Err(source) => return Err(self.error(first, source.to_string())),
                }
            }
            (None, None) => return Err(self.error(first, "it is nowhere".to_owned())),
        };
        stats.local_bytes += len as u64;
        let mut rest = read;
        Ok(run.iter().map(|block| rest.split_to(block.len.min(rest.len()))).collect())
    }

    fn error(&self, block: &BlockRef, what: String) -> Unreadable {
        let (segment, offset) = block.place.map_or((0, 0), |place| (place.segment, place.offset));
        let directory = self.site.path.clone();
        let error = ReadError::Local { directory, segment: segment_name(segment), offset, what };
        let released = self.site.index.as_ref().is_some_and(|index| !lock(index).has(block.number));
        Unreadable { error: Box::new(error), released }
    }
}

/// Whether both are on the disk, and `next` stands right behind `block`, within one step of reading.
fn side_by_side(block: &BlockRef, next: &BlockRef) -> bool {
    let (None, None, Some(place), Some(behind)) = (&block.bytes, &next.bytes, &block.place, &next.place)
    else {
        return false;
    };
    (place.segment, place.epoch) == (behind.segment, behind.epoch)
        && place.offset + block.len as u64 == behind.offset
        && place.offset / READ_BYTES as u64 == behind.offset / READ_BYTES as u64
}

/// A value of a block, without a copy where all of it stands in the block's bytes.
fn shared(bytes: &Bytes, value: &[u8]) -> Bytes {
    let start = (value.as_ptr() as usize).wrapping_sub(bytes.as_ptr() as usize);
    match start.checked_add(value.len()) {
        Some(end) if end <= bytes.len() => bytes.slice(start..end),
        _ => Bytes::copy_from_slice(value),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::assemble::tests::{Change as Appended, log_id, spill};
    use tidelog_io::segment::BlockPlace;

    fn block(number: u64, first: u64, end: u64, resumes: bool, continues: bool) -> BlockRef {
        let whole_from = SequenceNumber(first + u64::from(resumes));
        let (first, end) = (SequenceNumber(first), SequenceNumber(end));
        BlockRef { number, place: None, bytes: None, len: 10, continues, first, whole_from, end }
    }

    fn found(blocks: &[BlockRef], from: u64, to: u64, group_bytes: usize) -> Vec<(u64, u64, Range<usize>)> {
        stretches(blocks, &(SequenceNumber(from)..SequenceNumber(to)), group_bytes)
            .into_iter()
            .map(|stretch| (stretch.numbers.start.0, stretch.numbers.end.0, stretch.blocks))
            .collect()
    }

    #[test]
    fn blocks_without_a_hole_are_one_stretch() {
        let blocks =
            [block(3, 10, 20, false, false), block(5, 20, 30, false, false), block(9, 32, 40, false, false)];
        assert_eq!(found(&blocks, 0, 100, 1000), [(10, 30, 0..2), (32, 40, 2..3)]);
        assert_eq!(found(&blocks, 0, 100, 10), [(10, 20, 0..1), (20, 30, 1..2), (32, 40, 2..3)]);
        assert_eq!(found(&blocks, 25, 35, 1000), [(25, 30, 1..2), (32, 35, 2..3)]);
        assert_eq!(found(&blocks, 12, 20, 1000), [(12, 20, 0..1)]);
        assert_eq!(found(&blocks, 30, 32, 1000), []);
        assert_eq!(found(&[], 0, 100, 1000), []);
    }

    #[test]
    fn a_change_over_several_blocks_is_whole_or_not_there() {
        // Change 12 begins in block 4 and ends in block 6.
        let blocks =
            [block(4, 10, 12, false, true), block(5, 12, 12, true, true), block(6, 12, 15, true, false)];
        assert_eq!(found(&blocks, 0, 100, 1), [(10, 15, 0..3)]);
        assert_eq!(found(&blocks, 12, 13, 1), [(12, 13, 0..3)]);
        assert_eq!(found(&blocks, 13, 100, 1), [(13, 15, 2..3)]);
        assert_eq!(found(&blocks[..2], 0, 100, 1), [(10, 12, 0..1)]);
        // Its beginning is gone.
        assert_eq!(found(&blocks[1..], 0, 100, 1), [(13, 15, 1..2)]);
        assert_eq!(
            found(&[blocks[0].clone(), blocks[2].clone()], 0, 100, 1),
            [(10, 12, 0..1), (13, 15, 1..2)]
        );
    }

    /// A group of the changes of one log in these blocks.
    fn group(blocks: Vec<BlockRef>, end: u64, path: PathBuf) -> LocalGroup {
        let files = Arc::new(tidelog_io::directory::RealFiles::open(&path).unwrap());
        LocalGroup {
            log: log_id(0),
            key_groups: KeyGroupRange::ALL,
            numbers: SequenceNumber(0)..SequenceNumber(end),
            site: Arc::new(LocalSite { path, files, index: None, _lock: None }),
            blocks,
            objects: Vec::new(),
            failed: AtomicBool::new(false),
            without_metadata: AtomicBool::new(false),
        }
    }

    #[test]
    fn a_group_is_read_whole_or_not_at_all() {
        /// Four of them fit in a block, and none is cut.
        const VALUE_BYTES: usize = 900;
        let dir = tempfile::tempdir().unwrap();
        let changes: Vec<_> = (0..40)
            .map(|number| Appended { log: 0, group: Some(1), value: vec![number; VALUE_BYTES] })
            .collect();
        let blocks: Vec<BlockRef> = spill(&changes)
            .into_iter()
            .map(|bytes| {
                let header = *Block::decode(&bytes, None).unwrap().header();
                let (len, bytes) = (bytes.len(), Some(bytes.into()));
                BlockRef { bytes, len, ..block(header.place.number, 0, 0, false, false) }
            })
            .collect();
        assert_eq!(blocks.len(), 10);
        let read = |blocks: &[BlockRef], end| {
            let group = group(blocks.to_vec(), end, dir.path().to_owned());
            group.read(false, KeyGroupRange::ALL, &mut ReadStats::default())
        };
        assert_eq!(read(&blocks, 40).unwrap().len(), 40);
        // Whatever the index says.
        let mut without = blocks.clone();
        without.remove(1);
        let mut again = blocks.clone();
        again[1] = again[0].clone();
        for (blocks, end) in [
            (&without[..], 40),
            (&again, 40),
            (&blocks[1..], 40),
            (&blocks[..blocks.len() - 1], 40),
            (&blocks, 41),
        ] {
            let unreadable = read(blocks, end).unwrap_err();
            assert!(matches!(*unreadable.error, ReadError::Local { .. }) && !unreadable.released);
        }
    }

    #[test]
    fn a_block_of_another_use_of_its_segment_is_not_read() {
        let dir = tempfile::tempdir().unwrap();
        let mut bytes = spill(&[Appended { log: 0, group: Some(1), value: vec![7; 100] }]).remove(0);
        let place =
            BlockPlace { directory: 1, segment: 3, epoch: 8, index: 0, offset: 0, number: 5, watermark: 0 };
        crate::block::seal(&mut bytes, &place);
        std::fs::write(dir.path().join(segment_name(3)), &bytes).unwrap();
        let read = |place: BlockPlace| {
            let found = BlockRef { place: Some(place), len: bytes.len(), ..block(5, 0, 1, false, false) };
            let group = group(vec![found], 1, dir.path().to_owned());
            group.read(false, KeyGroupRange::ALL, &mut ReadStats::default())
        };
        assert_eq!(read(place).unwrap().len(), 1);
        let others = [
            BlockPlace { epoch: 7, ..place },
            BlockPlace { number: 4, ..place },
            BlockPlace { directory: 2, ..place },
        ];
        for other in others {
            assert!(matches!(*read(other).unwrap_err().error, ReadError::Local { .. }), "{other:?}");
        }
    }
}
