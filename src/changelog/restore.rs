//! Restores that read what the local directories still hold from there.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::{Changelog, Core};
use crate::device::lock;
use crate::error::ReadError;
use crate::handle::ChangelogHandle;
use crate::reader::{LocalBlocks, Restore};
use crate::types::LogId;

impl Changelog {
    /// A [`Restore`] of handles that reads from the local directories what they still hold, of logs that were recovered and
    /// of such as are open, and the rest from the buckets. [`local_retention_bytes`](crate::Options::local_retention_bytes)
    /// says how much they hold.
    ///
    /// It gives the same changes in the same order as [`Restore::open`]. What cannot be read locally, because a file is
    /// gone or damaged, is read from the buckets; a warning and `tidelog_local_read_failures_total` tell of it. Nothing local
    /// is held back for it: a restore that takes its time keeps no append waiting, and reads what was written over meanwhile
    /// from the buckets, too.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let dir = tempfile::tempdir()?;
    /// # let bucket = format!("file://{}", dir.path().join("bucket").display());
    /// use tidelog::{Changelog, KeyGroup, KeyGroupRange, Options, SequenceNumber};
    /// # let options = Options::new(bucket, dir.path().join("local")).segment_bytes(1 << 20).local_bytes(4 << 20);
    /// let changelog = Changelog::open(options)?;
    /// let mut writer = changelog.create_writer("counts", KeyGroupRange::ALL)?;
    /// writer.append(KeyGroup(7), b"a change")?;
    /// let handle = writer.persist_durably(SequenceNumber::ZERO).wait()?;
    ///
    /// let mut reader = changelog.restore(&[handle])?.reader(KeyGroupRange::ALL)?;
    /// assert_eq!(reader.by_ref().count(), 1);
    /// assert_eq!(reader.stats().bytes, 0, "nothing came from the bucket");
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`Restore::open`].
    pub fn restore(&self, handles: &[ChangelogHandle]) -> Result<Restore, ReadError> {
        self.core.check_owner()?;
        let logs = handles.iter().filter(|handle| !handle.is_empty()).map(ChangelogHandle::log).collect();
        Restore::plan(handles, Some(&self.core.driver), self.core.local_blocks(&logs))
    }
}

impl Core {
    /// What the local directories hold of these logs.
    pub(crate) fn local_blocks(&self, logs: &BTreeSet<LogId>) -> LocalBlocks {
        let mut found = LocalBlocks::new();
        for site in &self.sites {
            let blocks = lock(&site.index).blocks_of(logs);
            found.extend(blocks.into_iter().map(|(log, blocks)| (log, (Arc::clone(&site.local), blocks))));
        }
        found
    }
}
