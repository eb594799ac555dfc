//! The footer: what ends an object and tells which runs its parts hold.
//!
//! Owns the layout of the footer and of the trailer that makes an object readable without its handle. The runs
//! themselves are in part.rs. The byte layout is in docs/format.md.

use crate::part::{Compression, PartId, Run};
use std::ops::Range;

/// The version of the object format that this code writes, and the newest it reads.
pub const FOOTER_VERSION: u32 = 1;
/// The size in bytes of the trailer: the last bytes of an object, from which the footer is found.
pub const TRAILER_BYTES: usize = 32;
/// The largest footer that is ever decoded, in bytes.
pub const FOOTER_BYTES_MAX: u64 = 64 << 20;

/// Why bytes are not the footer that was looked for.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FooterError {
    /// The last bytes are not those of an object of tidelog, or the object was cut short.
    #[error("no object of tidelog ends here: a foreign object, or one that was cut short")]
    NotAnObject,
    /// Written by a newer tidelog.
    #[error(
        "the object has format version {found}, this tidelog knows up to {known}: read it with a newer one"
    )]
    NewerVersion {
        /// The object's version.
        found: u32,
        /// The newest version that this code reads.
        known: u32,
    },
    /// The bytes are not those that were written.
    #[error("the footer's checksum does not match its bytes: the object is damaged")]
    Checksum,
    /// The footer of another object.
    #[error("the footer belongs to the object with token {found:016x}, expected {expected:016x}")]
    Misplaced {
        /// The token of the object that was looked for.
        expected: u64,
        /// The token in the footer.
        found: u64,
    },
    /// The checksum matches, the contents make no sense.
    #[error("the footer contradicts itself: {0}")]
    Corrupt(&'static str),
}

/// One part in the footer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PartEntry {
    /// The sum of the lengths of the parts before it, in bytes: where it starts in an object that holds all parts.
    pub offset: u64,
    /// The length of the part in bytes; for the last part without the footer.
    pub len: u64,
    /// How its changesets are compressed.
    pub compression: Compression,
    /// Its runs, sorted by log, back to back from the part's start.
    pub runs: Vec<Run>,
}

/// What an object holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Footer {
    token: u64,
    parts: Vec<PartEntry>,
}

impl Footer {
    /// The footer of an object with no parts yet.
    #[must_use]
    pub fn new(token: u64) -> Footer {
        Footer { token, parts: Vec::new() }
    }

    /// Adds the next part, with its runs as the assembler gave them.
    pub fn push(&mut self, compression: Compression, runs: Vec<Run>) {
        let _ = (compression, runs);
        todo!()
    }

    /// The object's token.
    #[must_use]
    pub fn token(&self) -> u64 {
        self.token
    }

    /// The parts in order.
    #[must_use]
    pub fn parts(&self) -> &[PartEntry] {
        &self.parts
    }

    /// What the checksums of the pieces of part `index` cover.
    #[must_use]
    pub fn part_id(&self, index: u32) -> PartId {
        PartId { token: self.token, index }
    }

    /// The length of all parts in bytes: where the footer starts in an object that holds all of them.
    #[must_use]
    pub fn parts_len(&self) -> u64 {
        self.parts.last().map_or(0, |part| part.offset + part.len)
    }

    /// The footer's bytes, trailer included: the end of the last part.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        todo!()
    }

    /// Where the footer of an object of `object_len` bytes stands, from the object's last bytes, at least
    /// [`TRAILER_BYTES`] of them. Plausible, not verified: within the object and at most [`FOOTER_BYTES_MAX`].
    ///
    /// # Errors
    /// [`FooterError::NotAnObject`], [`FooterError::NewerVersion`], [`FooterError::Corrupt`].
    pub fn locate(_last_bytes: &[u8], _object_len: u64) -> Result<Range<u64>, FooterError> {
        todo!()
    }

    /// Verifies a footer; `bytes` are exactly those that [`locate`](Footer::locate) or a handle named. `token`, where
    /// it is known, must be the object's.
    ///
    /// # Errors
    /// [`FooterError`] unless these are exactly the bytes of a footer, and of that object.
    pub fn decode(_bytes: &[u8], _token: Option<u64>) -> Result<Footer, FooterError> {
        todo!()
    }
}
