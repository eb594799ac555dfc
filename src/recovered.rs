//! `RecoveredLog`: a log that an earlier use of a directory left behind. Read-only: the bucket may hold more of it than
//! the disk, so it is never continued.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use tidelog_upload::Driver;

use crate::changelog::Core;
use crate::checkpoint::{Request, RequestId};
use crate::error::{PersistError, ReadError};
use crate::handle::{ChangelogHandle, Extent};
use crate::ledger::{extents_in, released_in};
use crate::local::index::BlockRef;
use crate::manifest::ManifestState;
use crate::reader::{ChangelogReader, LocalSite, Pin, Plan};
use crate::recovery::Recovered;
use crate::types::{KeyGroupRange, LogId, SequenceNumber};
use crate::uploader::Event;
use crate::writer::PersistFuture;

/// What was found of one log.
#[derive(Clone, Debug)]
pub(crate) struct FoundLog {
    pub log: LogId,
    pub name: String,
    pub key_groups: KeyGroupRange,
    /// The first change that is not truncated.
    pub start: SequenceNumber,
    pub end: SequenceNumber,
    pub confirmed: SequenceNumber,
    /// The number after the last local block.
    pub blocks_end: u64,
}

impl Recovered {
    /// All logs that the manifest knows, with what is left of them.
    pub fn logs(&self, state: &ManifestState) -> Vec<FoundLog> {
        let found = state.logs().iter().map(|(&log, known)| {
            let covered = known.covered();
            let local_end = self.ranges.get(&log).map_or(covered, |(_, end)| *end);
            FoundLog {
                log,
                name: known.name.clone(),
                key_groups: known.key_groups,
                start: known.truncated,
                end: local_end.max(covered),
                confirmed: known.confirmed,
                blocks_end: self.next_number,
            }
        });
        found.collect()
    }
}

/// What the manifest says of where the changes of a log are.
pub(crate) struct Known {
    extents: Vec<Extent>,
    /// The changes below this are truncated by now.
    truncated: SequenceNumber,
    /// What a registry let go of, and the first such object.
    released: Option<(Range<SequenceNumber>, String)>,
}

impl FoundLog {
    /// What is known of it now.
    pub fn known(&self, state: &ManifestState) -> Known {
        let FoundLog { log, start, end, .. } = *self;
        Known {
            extents: extents_in(state, log, start, end),
            truncated: state.logs().get(&log).map_or(end, |known| known.truncated),
            released: released_in(state, log, start, end),
        }
    }

    /// A reader of all that is left: from local blocks where they hold it, else from objects.
    pub fn reader(
        &self,
        key_groups: KeyGroupRange,
        known: Known,
        local: Option<&(Arc<LocalSite>, Vec<BlockRef>)>,
        driver: Option<&Arc<Driver>>,
        pin: Option<Pin>,
    ) -> Result<ChangelogReader, ReadError> {
        let FoundLog { log, start, end, .. } = *self;
        if start < known.truncated {
            // Local blocks may have it still; that is no promise, and not to be found out by reading.
            return Err(ReadError::Truncated { log, from: start, start: known.truncated });
        }
        let mut plan = Plan::new(driver);
        match (plan.add(log, self.key_groups, start..end, &known.extents, local), known.released) {
            (Ok(()), _) => Ok(plan.reader(key_groups, pin)),
            (Err(ReadError::Truncated { .. }), Some((gone, object))) => {
                Err(ReadError::Released { log, from: gone.start, to: gone.end, object })
            }
            (Err(error), _) => Err(error),
        }
    }
}

/// A log that an earlier use of the directory left behind: every change that was durable there, without a hole.
///
/// New changes go to a new log, see [`Changelog::create_writer`](crate::Changelog::create_writer).
#[derive(Clone, Debug)]
pub struct RecoveredLog {
    core: Arc<Core>,
    device: usize,
    found: Arc<FoundLog>,
}

/// What a found log tells of itself, for the two types through which users see one.
macro_rules! found_accessors {
    ($name:ident) => {
        impl $name {
            /// The id of the log.
            #[must_use]
            pub fn log(&self) -> LogId {
                self.found.log
            }

            /// The name that it was created with.
            #[must_use]
            pub fn name(&self) -> &str {
                &self.found.name
            }

            /// The key groups that its changes may have.
            #[must_use]
            pub fn key_groups(&self) -> KeyGroupRange {
                self.found.key_groups
            }

            /// The first change that was not truncated.
            #[must_use]
            pub fn start(&self) -> SequenceNumber {
                self.found.start
            }

            /// The number after the last change.
            #[must_use]
            pub fn end(&self) -> SequenceNumber {
                self.found.end
            }

            /// The changes below this number were confirmed.
            #[must_use]
            pub fn confirmed(&self) -> SequenceNumber {
                self.found.confirmed
            }
        }
    };
}
pub(crate) use found_accessors;

found_accessors!(RecoveredLog);

impl RecoveredLog {
    pub(crate) fn new(core: Arc<Core>, device: usize, found: FoundLog) -> RecoveredLog {
        RecoveredLog { core, device, found: Arc::new(found) }
    }

    /// Makes the changes from `from` on durable in the bucket, as a writer's
    /// [`persist_durably`](crate::ChangelogWriter::persist_durably) does.
    ///
    /// # Errors
    /// See [`PersistError`].
    pub fn persist_durably(&self, from: SequenceNumber) -> PersistFuture {
        let (resolver, pending) = tidelog_upload::channel();
        if let Err(forked) = self.core.check_owner() {
            resolver.resolve(Err(forked.into()));
            return PersistFuture(pending);
        }
        let FoundLog { log, ref name, key_groups, start, end, blocks_end, .. } = *self.found;
        if from < start || from > end {
            resolver.resolve(Err(PersistError::OutOfRange { log, from, start, end }));
            return PersistFuture(pending);
        }
        if from == end
            && let Ok(empty) = ChangelogHandle::new(log, name, key_groups, from, end, Vec::new())
        {
            // The log may be forgotten already, if it was truncated to its end.
            resolver.resolve(Ok(empty));
            return PersistFuture(pending);
        }
        let id = RequestId(self.core.requests.fetch_add(1, Ordering::Relaxed));
        let (device, asked_at) = (self.device, self.core.now());
        let request = Request { log, device, from, to: end, asked_at, end: Some(blocks_end) };
        self.core.send(Event::Persist { id, request, resolver });
        PersistFuture(pending)
    }

    /// Reads the changes in `key_groups` from [`start`](Self::start) on: from the local disk where it still holds them, else
    /// from the bucket.
    ///
    /// # Errors
    /// See [`ReadError`]: [`Truncated`](ReadError::Truncated) once a truncation or [`discard`](Self::discard) of this log was
    /// carried out, which is soon after the call, and
    /// [`Released`](ReadError::Released) where only a registry's object had some of it. What is above can be had by
    /// [`persist_durably`](Self::persist_durably) and the handle that it gives.
    pub fn read(&self, key_groups: KeyGroupRange) -> Result<ChangelogReader, ReadError> {
        self.core.check_owner()?;
        let site = &self.core.sites[self.device];
        let (core, device) = (Arc::clone(&self.core), self.device);
        site.readers.pin();
        let pin = Pin(Box::new(move || {
            core.sites[device].readers.unpin();
            core.send(Event::ReaderGone { device });
        }));
        // Looked up after the pin: what is there now stays.
        let log = self.found.log;
        let local = self.core.local_blocks(&BTreeSet::from([log]));
        let known = site.ledger.read(|state| self.found.known(state));
        self.found.reader(key_groups, known, local.get(&log), Some(&self.core.driver), Some(pin))
    }

    /// A checkpoint with the changes below `to` is complete. Numbers beyond the end mean the end. A later open tells by
    /// [`confirmed`](Self::confirmed); this value still says what was known when it was made.
    pub fn confirm(&self, to: SequenceNumber) {
        let to = to.min(self.found.end);
        self.core.send(Event::Confirm { device: self.device, log: self.found.log, to });
    }

    /// Nobody needs the changes below `to` any more. Numbers beyond the end mean the end.
    pub fn truncate(&self, to: SequenceNumber) {
        let to = to.min(self.found.end);
        self.core.send(Event::Truncate { device: self.device, log: self.found.log, to });
    }

    /// Nobody needs anything of this log any more: its local changes are dropped, its objects deleted unless other logs
    /// need them.
    pub fn discard(&self) {
        self.core.send(Event::Discard { device: self.device, log: self.found.log, end: self.found.end });
    }
}
