//! Who else needs objects: holders, and an engine's own registry.

use std::collections::BTreeSet;
use std::time::Duration;

use tidelog_upload::Resolver;

use super::Changelog;
use crate::error::{RegisterError, ReleaseError};
use crate::handle::ChangelogHandle;
use crate::manifest::HOLDER_BYTES_MAX;
use crate::uploader::Event;

impl Changelog {
    /// Keeps all objects that the handles name until `holder` is [released](Self::release), whatever is truncated, closed or
    /// discarded meanwhile. A holder is the engine's name for what needs them: a checkpoint, a savepoint, a reader that is
    /// being rescaled; 1 to 256 bytes. One that registers again keeps what it has and adds what is new.
    ///
    /// All handles are taken, or none. It is durable when this returns: the call blocks until the uploader has recorded it
    /// in the manifests, which is a write and an fsync for each directory, behind what the uploader is doing. So it must not
    /// be called by a waker of one of the changelog's futures, which runs on the uploader's thread. A truncation
    /// that was asked for and not carried out yet leaves the objects alone; after one that was carried out the call is
    /// refused.
    ///
    /// What is looked at of a handle is which objects it names, and that each is one of this changelog's. Its log and its
    /// numbers are not: the log may be truncated or forgotten here, while another holder keeps its objects. Whether all that
    /// a handle claims is in its objects is found by whoever reads it, and fails with
    /// [`Mismatch`](crate::ReadError::Mismatch) where it is not.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let dir = tempfile::tempdir()?;
    /// # let bucket = format!("file://{}", dir.path().join("bucket").display());
    /// # use tidelog::{Changelog, ChangelogReader, KeyGroup, KeyGroupRange, Options, SequenceNumber};
    /// # let options = Options::new(bucket, dir.path().join("local")).segment_bytes(1 << 20).local_bytes(4 << 20);
    /// let changelog = Changelog::open(options)?;
    /// let mut writer = changelog.create_writer("counts", KeyGroupRange::ALL)?;
    /// writer.append(KeyGroup(1), b"one")?;
    /// let handle = writer.persist_durably(SequenceNumber::ZERO).wait()?;
    /// changelog.register("chk-42", &[handle.clone()])?;
    ///
    /// // A snapshot holds all that was appended; the checkpoint before it can still be restored.
    /// writer.truncate(writer.next_sequence_number())?;
    /// assert_eq!(ChangelogReader::open(&[handle], KeyGroupRange::ALL)?.count(), 1);
    ///
    /// // After a restart: whom the engine's own metadata does not know any more goes.
    /// for holder in changelog.holders() {
    ///     changelog.release(&holder)?;
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// See [`RegisterError`].
    pub fn register(&self, holder: &str, handles: &[ChangelogHandle]) -> Result<(), RegisterError> {
        self.take(holder, handles, false)
    }

    /// Hands all objects that the handles name over to the engine's own registry of shared files: this changelog deletes
    /// them never, and does not count them as its own. [`ChangelogHandle::objects`] says what the registry has to keep. Hand
    /// over all handles of a checkpoint together: a log that needs changes in one of the objects and has no handle among
    /// them makes the call refused. Truncations that were asked for before are carried out first, as far as persists that
    /// are not answered allow. An object that has changes of a directory which is not open here is refused
    /// ([`NotOwned`](RegisterError::NotOwned)): it is not deleted anyhow.
    ///
    /// The handles are remembered under `holder`. When the registry drops them, [release](Self::release) that *before* the
    /// objects are deleted: from then on no handle of a log names an object that no other holder has for this log. A persist
    /// of changes that are only there fails with [`Released`](crate::PersistError::Released); what such a checkpoint held
    /// should have been truncated by then. A handle that was given before is only as good as its objects: hand it over
    /// while another holder has them, or do not use it.
    ///
    /// Durable when it returns, all handles or none, and blocking, as [`register`](Self::register).
    ///
    /// # Errors
    /// See [`RegisterError`].
    pub fn hand_over(&self, holder: &str, handles: &[ChangelogHandle]) -> Result<(), RegisterError> {
        self.take(holder, handles, true)
    }

    /// Lets go of all that `holder` has; a holder that is not known is let go of already. Objects that no log and no other
    /// holder needs are deleted in the background, those that were handed over are only not referred to any more. Durable
    /// when it returns, and blocking, as [`register`](Self::register).
    ///
    /// # Errors
    /// See [`ReleaseError`]. Whatever it is, the holder is not known to this changelog any more, but may be again at the next
    /// open.
    pub fn release(&self, holder: &str) -> Result<(), ReleaseError> {
        self.core.check_owner()?;
        let holder = holder.to_owned();
        self.ask(|resolver| Event::Release { holder, resolver }).unwrap_or(Err(ReleaseError::Closed))
    }

    /// The names of all holders that have an object, those of earlier uses of the directories included. Empty in a child by
    /// fork.
    #[must_use]
    pub fn holders(&self) -> Vec<String> {
        if self.core.check_owner().is_err() {
            return Vec::new();
        }
        let mut holders = BTreeSet::new();
        for site in &self.core.sites {
            site.ledger.read(|state| holders.extend(state.holders().keys().cloned()));
        }
        holders.into_iter().collect()
    }

    fn take(&self, holder: &str, handles: &[ChangelogHandle], hand_over: bool) -> Result<(), RegisterError> {
        self.core.check_owner()?;
        if !(1..=HOLDER_BYTES_MAX).contains(&holder.len()) {
            return Err(RegisterError::HolderName { len: holder.len() });
        }
        let (holder, handles) = (holder.to_owned(), handles.to_vec());
        self.ask(|resolver| Event::Register { holder, handles, hand_over, resolver })
            .unwrap_or(Err(RegisterError::Closed))
    }

    /// What the uploader answers; `None` if it is gone.
    fn ask<T>(&self, event: impl FnOnce(Resolver<T>) -> Event) -> Option<T> {
        let (resolver, mut pending) = tidelog_upload::channel();
        self.core.send(event(resolver));
        self.wait(&mut pending, Duration::MAX)?.ok()
    }
}
