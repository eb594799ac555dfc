//! Changes of a log read from local blocks, in memory or on the disk, sorted like those of a part.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use bytes::Bytes;
use tidelog_io::disk::Files;
use tidelog_io::segment::{BlockPlace, segment_name};

use super::Change;
use crate::block::{Block, BlockError, Expected};
use crate::error::ReadError;
use crate::types::{ChangeKind, KeyGroupRange, LogId, SequenceNumber};
use crate::walk::{self, Walk};

/// Local blocks are sorted in groups of about this many bytes.
const LOCAL_GROUP_BYTES: usize = 8 << 20;

/// Blocks of a recovered log.
#[derive(Clone, Debug)]
pub(crate) struct LocalSource {
    pub log: LogId,
    pub from: SequenceNumber,
    pub to: SequenceNumber,
    pub directory: PathBuf,
    pub files: LocalFiles,
    pub blocks: Vec<BlockRef>,
    /// Keeps segments from being reused.
    pub _pin: Arc<Pin>,
}

/// Runs a function when the last reader of local blocks is gone.
pub(crate) struct Pin(pub Box<dyn Fn() + Send + Sync>);

impl Drop for Pin {
    fn drop(&mut self) {
        (self.0)();
    }
}

impl std::fmt::Debug for Pin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pin").finish_non_exhaustive()
    }
}

/// The files of a local directory.
#[derive(Clone)]
pub(crate) struct LocalFiles(pub Arc<dyn Files>);

impl std::fmt::Debug for LocalFiles {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LocalFiles").finish_non_exhaustive()
    }
}

/// Where a block is: on the disk, or in memory.
#[derive(Clone, Debug)]
pub(crate) struct BlockRef {
    pub number: u64,
    /// The first change of the log that is here from its beginning on.
    pub first: SequenceNumber,
    pub place: Option<BlockPlace>,
    pub bytes: Option<Bytes>,
    pub len: usize,
    pub continues: bool,
}

/// Groups of blocks to be sorted together.
pub(super) fn local_groups(blocks: &[BlockRef]) -> Vec<Range<usize>> {
    let mut groups = Vec::new();
    let (mut start, mut bytes) = (0, 0);
    for (index, block) in blocks.iter().enumerate() {
        bytes += block.len;
        if bytes >= LOCAL_GROUP_BYTES && !block.continues {
            groups.push(start..index + 1);
            (start, bytes) = (index + 1, 0);
        }
    }
    if start < blocks.len() {
        groups.push(start..blocks.len());
    }
    groups
}

/// Reads local blocks, and sorts their changes by key group: metadata, or the data in `key_groups`.
pub(super) fn read_local(
    local: &LocalSource,
    blocks: &[BlockRef],
    metadata: bool,
    key_groups: KeyGroupRange,
) -> Result<Vec<Change>, ReadError> {
    let mut changes = Vec::new();
    let mut walk = Walk::new(Some(local.log));
    let mut due = None;
    for block in blocks {
        let bytes = load_local(local, block)?;
        let expected = block.place.as_ref().map(Expected::from);
        let damaged = |source: BlockError| local.error(block, source.to_string());
        let decoded = Block::decode(&bytes, expected.as_ref()).map_err(damaged)?;
        if due != Some(block.number) {
            // Blocks without this log are not among them: what another log left open there does not go on here.
            walk = Walk::new(Some(local.log));
        }
        due = Some(block.number + 1);
        let mut take = |change: walk::Change<'_>| {
            let key_group = (change.kind == ChangeKind::Data).then_some(change.key_group);
            let wanted = key_group.map_or(metadata, |key_group| !metadata && key_groups.contains(key_group));
            if wanted && (local.from..local.to).contains(&change.sequence) {
                let value = Bytes::copy_from_slice(change.value);
                changes.push(Change { log: change.log, number: change.sequence, key_group, value });
            }
        };
        walk.block(&decoded, &mut take).map_err(damaged)?;
    }
    changes.sort_by_key(|change| change.key_group);
    Ok(changes)
}

fn load_local(local: &LocalSource, block: &BlockRef) -> Result<Bytes, ReadError> {
    let (None, Some(place)) = (&block.bytes, &block.place) else {
        return Ok(block.bytes.clone().expect("a block is in memory or on the disk"));
    };
    let mut bytes = vec![0; block.len];
    match local.files.0.read_at(&segment_name(place.segment), place.offset, &mut bytes) {
        Ok(read) if read == block.len => Ok(Bytes::from(bytes)),
        Ok(read) => Err(local.error(block, format!("{read} of {} bytes", block.len))),
        Err(source) => Err(local.error(block, source.to_string())),
    }
}

impl LocalSource {
    fn error(&self, block: &BlockRef, what: String) -> ReadError {
        let (segment, offset) = block.place.map_or((0, 0), |place| (place.segment, place.offset));
        ReadError::Local { directory: self.directory.clone(), segment: segment_name(segment), offset, what }
    }
}
