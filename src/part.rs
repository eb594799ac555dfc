//! The part: runs of changesets, and the directories that find them.
//!
//! Owns the layout of one log's run, that is its key-group directory and its changesets, and their verified decoding.
//! How changes come into this order is in assemble.rs; which runs a part has is in footer.rs; where a part lives only
//! the handle knows. The byte layout is in docs/format.md.

use crate::types::{KeyGroup, LogId, SequenceNumber};
use bytes::Bytes;
use std::ops::Range;

/// How the changesets of a part are compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Compression {
    /// As they are.
    #[default]
    None,
    /// Each on its own by LZ4, where that makes it smaller.
    Lz4,
}

/// What surrounds and identifies the pieces of a part: their checksums cover it, so that a piece of another object or
/// part is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartId {
    /// The token of the object that the part was made for.
    pub token: u64,
    /// The part's index in that object.
    pub index: u32,
}

/// One log's changesets in a part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// The log.
    pub log: LogId,
    /// The lowest sequence number in the run.
    pub first: SequenceNumber,
    /// The end of the run's sequence numbers, exclusive. All from `first` on are there.
    pub end: SequenceNumber,
    /// Where the run starts in the part, in bytes.
    pub offset: u64,
    /// The length in bytes of the directory, which stands at the start of the run.
    pub directory_len: u32,
    /// The length of the whole run in bytes.
    pub len: u64,
}

/// Why bytes are not the piece of a part that was looked for.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PartError {
    /// The bytes are not those that were written, or belong to another part.
    #[error("the checksum of the {0} does not match: damaged, cut short, or of another part")]
    Checksum(&'static str),
    /// The checksum matches, the contents make no sense.
    #[error("the {0} contradicts itself: {1}")]
    Corrupt(&'static str, &'static str),
}

/// One changeset in a [`Directory`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DirectoryEntry {
    /// The key group; `None` for metadata.
    pub group: Option<KeyGroup>,
    /// Where the changeset stands in the run, in bytes.
    pub range: Range<u64>,
}

/// A run's verified key-group directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Directory {
    entries: Vec<DirectoryEntry>,
}

impl Directory {
    /// Verifies the directory of `run`; `bytes` are the first `run.directory_len` of the run.
    ///
    /// # Errors
    /// [`PartError`] unless these are exactly the bytes of this run's directory.
    pub fn decode(_bytes: &[u8], _part: PartId, _run: &Run) -> Result<Directory, PartError> {
        todo!()
    }

    /// The changesets in their order in the run: metadata first, then by key group.
    #[must_use]
    pub fn entries(&self) -> &[DirectoryEntry] {
        &self.entries
    }
}

/// The verified changes of one log and one key group inside one part.
#[derive(Clone, Debug)]
pub struct Changeset {
    payload: Bytes,
    count: u64,
}

impl Changeset {
    /// Verifies and unpacks the changeset of `log` and `group` (`None` for metadata); `bytes` are exactly its range.
    ///
    /// # Errors
    /// [`PartError`] unless these are exactly the bytes of that changeset.
    pub fn decode(
        _bytes: Bytes,
        _part: PartId,
        _log: LogId,
        _group: Option<KeyGroup>,
        _compression: Compression,
    ) -> Result<Changeset, PartError> {
        todo!()
    }

    /// How many changes there are.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.count
    }

    /// The changes in the order of their sequence numbers.
    #[must_use]
    pub fn records(&self) -> Records<'_> {
        Records { rest: &self.payload, due: 0 }
    }

    /// The changes in the order of their sequence numbers, each as a slice of the changeset's memory, not copied.
    #[must_use]
    pub fn into_records(self) -> IntoRecords {
        IntoRecords { payload: self.payload, at: 0, due: 0 }
    }
}

/// Iterator of [`Changeset::records`].
#[derive(Clone, Debug)]
pub struct Records<'a> {
    rest: &'a [u8],
    due: u64,
}

impl<'a> Iterator for Records<'a> {
    type Item = (SequenceNumber, &'a [u8]);

    fn next(&mut self) -> Option<Self::Item> {
        let _ = (self.rest, self.due);
        todo!()
    }
}

/// Iterator of [`Changeset::into_records`].
#[derive(Clone, Debug)]
pub struct IntoRecords {
    payload: Bytes,
    at: usize,
    due: u64,
}

impl Iterator for IntoRecords {
    type Item = (SequenceNumber, Bytes);

    fn next(&mut self) -> Option<Self::Item> {
        let _ = (&self.payload, self.at, self.due);
        todo!()
    }
}
