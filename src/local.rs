//! `LocalLogs`: what a local directory holds, read without opening it for writing.
//!
//! For restoring from a directory, and for looking into one. The directory is locked meanwhile, else nothing is changed:
//! no segment is made, no cut recorded, no upload swept. What is durable there is found by recovery.rs, as at any open.

pub(crate) mod index;

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use tidelog_io::directory::{Directory, Manifest, RealFiles};
use tidelog_io::disk::Files;

use self::index::LocalIndex;
use crate::error::{OpenError, ReadError};
use crate::manifest::ManifestState;
use crate::reader::{ChangelogReader, LocalSite};
use crate::recovered::{FoundLog, found_accessors};
use crate::recovery::{has_manifest, recover};
use crate::types::{KeyGroupRange, LogId, SequenceNumber};

/// The logs in a local directory that nobody has open, to be read.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let dir = tempfile::tempdir()?;
/// # let bucket = format!("file://{}", dir.path().join("bucket").display());
/// use tidelog::{Changelog, KeyGroup, KeyGroupRange, LocalLogs, Options};
/// # let local = dir.path().join("local");
/// # let options = Options::new(bucket, &local).segment_bytes(1 << 20).local_bytes(4 << 20);
/// let changelog = Changelog::open(options)?;
/// let mut writer = changelog.create_writer("counts", KeyGroupRange::ALL)?;
/// writer.append(KeyGroup(1), b"one")?;
/// writer.sync().wait()?;
/// drop((writer, changelog));
///
/// let logs = LocalLogs::open(&local)?;
/// let log = &logs.logs()[0];
/// assert_eq!((log.name(), log.end().0), ("counts", 1));
/// assert_eq!(log.read(KeyGroupRange::ALL)?.count(), 1);
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct LocalLogs {
    logs: Vec<LocalLog>,
    damage: Option<OpenError>,
}

/// A log in a local directory: every change that is durable there or in objects, without a hole.
#[derive(Clone, Debug)]
pub struct LocalLog {
    site: Arc<Site>,
    found: Arc<FoundLog>,
}

struct Site {
    site: Arc<LocalSite>,
    index: LocalIndex,
    state: ManifestState,
}

impl std::fmt::Debug for Site {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Site").field("site", &self.site).finish_non_exhaustive()
    }
}

impl LocalLogs {
    /// Finds the logs in a directory, and locks it for as long as a log or a reader of it lives.
    ///
    /// # Errors
    /// See [`OpenError`]: no changelog is there, another process has it open, or what was durable there is damaged.
    pub fn open(path: impl AsRef<Path>) -> Result<LocalLogs, OpenError> {
        let path = path.as_ref().to_owned();
        let damaged = |source| OpenError::Manifest { directory: path.clone(), source };
        // Looked at before the lock: locking would make a directory of what is none.
        let files = RealFiles::open(&path)
            .map_err(|source| OpenError::Io { action: format!("opening {}", path.display()), source })?;
        has_manifest(&path, &files)?;
        Manifest::inspect(&files).map_err(damaged)?;
        let directory = Directory::open(&path)?;
        let files: Arc<dyn Files> = directory.files();
        let content = Manifest::inspect(&*files).map_err(damaged)?;
        let state = ManifestState::replay(content.records.iter().map(Vec::as_slice))
            .map_err(|source| OpenError::Record { directory: path.clone(), source })?;
        let mut recovered = recover(0, &path, &*files, content.directory_id, &state)?;
        recovered.warn_of_damage(&path);
        let damage = recovered.damage.take();
        let found = recovered.logs(&state);
        let index = LocalIndex::of(&recovered);
        let site = Arc::new(LocalSite { path, files, index: None, _lock: Some(directory) });
        let site = Arc::new(Site { site, index, state });
        let logs =
            found.into_iter().map(|found| LocalLog { site: Arc::clone(&site), found: Arc::new(found) });
        Ok(LocalLogs { logs: logs.collect(), damage })
    }

    /// The logs.
    #[must_use]
    pub fn logs(&self) -> &[LocalLog] {
        &self.logs
    }

    /// What is damaged of the blocks that are only kept for restores, the last of it: objects hold all that was in them, or
    /// it was truncated.
    #[must_use]
    pub fn damage(&self) -> Option<&OpenError> {
        self.damage.as_ref()
    }
}

found_accessors!(LocalLog);

impl LocalLog {
    /// Reads the changes in `key_groups`, from the local disk where it still holds them, else from the bucket.
    ///
    /// # Errors
    /// See [`ReadError`].
    pub fn read(&self, key_groups: KeyGroupRange) -> Result<ChangelogReader, ReadError> {
        let Site { site, index, state, .. } = &*self.site;
        let blocks = index.blocks_of(&BTreeSet::from([self.found.log])).remove(&self.found.log);
        let local = blocks.map(|blocks| (Arc::clone(site), blocks));
        self.found.reader(key_groups, self.found.known(state), local.as_ref(), None, None)
    }
}
