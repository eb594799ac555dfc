//! The assembler: sorts the changes of a part's worth of blocks by log, key group and sequence number.
//!
//! A counting sort: a first walk over the frames counts, a second writes each change to its place. It knows nothing of
//! uploads; the layout of what it writes is part.rs's.

use crate::block::{Block, BlockError};
use crate::part::{Compression, PartId, Run};
use crate::types::{LogId, SequenceNumber};

/// An assembled part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// The part's bytes: its runs back to back. Empty if no change was to be kept.
    pub bytes: Vec<u8>,
    /// What stands where in `bytes`, sorted by log.
    pub runs: Vec<Run>,
}

/// Assembles one part after another and keeps its scratch memory between them.
#[derive(Debug, Default)]
pub struct Assembler {}

impl Assembler {
    /// An assembler without scratch memory yet.
    #[must_use]
    pub fn new() -> Assembler {
        Assembler::default()
    }

    /// Sorts the changes of `blocks`, which follow each other on one device, into a part.
    ///
    /// `keep_from` is asked once per log; that log's changes with lower numbers are left out. No change that is kept
    /// may be split across the ends of `blocks`.
    ///
    /// # Errors
    /// [`BlockError::Corrupt`] if a block's frames contradict its table, [`BlockError::Gap`] if changes are missing
    /// between blocks, [`BlockError::Unfinished`] if a change goes on behind the last block.
    pub fn assemble(
        &mut self,
        blocks: &[Block<'_>],
        keep_from: &mut dyn FnMut(LogId) -> SequenceNumber,
        part: PartId,
        compression: Compression,
    ) -> Result<Part, BlockError> {
        let _ = (blocks, keep_from, part, compression);
        todo!()
    }
}
