//! The tail: what an object ends with, collected part by part.
//!
//! Directories of a log's runs stand together, whichever parts the runs are in, so that a reader has all it needs to know
//! of a log by one request. They are in memory until the object ends, which it does before they are too much.

use crate::footer::Footer;
use crate::part::{Compression, PartId, Run};
use crate::types::LogId;
use std::collections::BTreeMap;
use std::ops::Range;

/// An object ends when its directories have this many bytes. They take 0.3 to 0.4 % of it where key groups are many and
/// parts have 8 MiB.
pub const DIRECTORIES_BYTES_MAX: u64 = 32 << 20;

/// Directories and footer of an object that is being written.
#[derive(Debug)]
pub struct Tail {
    footer: Footer,
    directories: BTreeMap<LogId, Vec<u8>>,
}

impl Tail {
    /// The tail of an object with no parts yet.
    #[must_use]
    pub fn new(token: u64) -> Tail {
        Tail { footer: Footer::new(token), directories: BTreeMap::new() }
    }

    /// The footer so far.
    #[must_use]
    pub fn footer(&self) -> &Footer {
        &self.footer
    }

    /// Whether one more part, with this many runs, leaves the tail readable. If not, the object must end before it.
    #[must_use]
    pub fn fits(&self, runs: usize) -> bool {
        self.footer.fits(runs) && self.footer.directories_len() < DIRECTORIES_BYTES_MAX
    }

    /// Adds the next part, with its runs and their directories, back to back, as the assembler gave them.
    ///
    /// # Panics
    /// If the footer has no room for it, or if its runs are not sorted by log and back to back, or its directories not those
    /// of the runs.
    pub fn push(&mut self, compression: Compression, runs: Vec<Run>, directories: &[u8]) {
        self.push_part(compression, runs, directories, None);
    }

    /// Adds the next part, which is a copy of the part `origin` of another object: of all its bytes. The directories are
    /// those of its runs there.
    ///
    /// # Panics
    /// As [`push`](Tail::push).
    pub fn push_copy(
        &mut self,
        compression: Compression,
        runs: Vec<Run>,
        directories: &[u8],
        origin: PartId,
    ) {
        self.push_part(compression, runs, directories, Some(origin));
    }

    fn push_part(
        &mut self,
        compression: Compression,
        runs: Vec<Run>,
        mut directories: &[u8],
        origin: Option<PartId>,
    ) {
        for run in &runs {
            let (directory, behind) = directories.split_at(run.directory_len as usize);
            self.directories.entry(run.log).or_default().extend_from_slice(directory);
            directories = behind;
        }
        assert!(directories.is_empty(), "one directory for each run");
        self.footer.push_part(compression, runs, origin);
    }

    /// The bytes that follow the last part, and where in the object the footer is.
    #[must_use]
    pub fn encode(self) -> (Vec<u8>, Range<u64>) {
        let mut bytes = Vec::with_capacity(self.footer.directories_len() as usize);
        self.directories.into_values().for_each(|directories| bytes.extend_from_slice(&directories));
        bytes.extend_from_slice(&self.footer.encode());
        let range = self.footer.start()..self.footer.parts_len() + bytes.len() as u64;
        (bytes, range)
    }
}
