//! `RecoveredLog`: a log that an earlier use of a directory left behind. Read-only: the bucket may hold more of it than
//! the disk, so it is never continued.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use tidelog_io::disk::Files;
use tidelog_upload::Driver;

use crate::changelog::Core;
use crate::checkpoint::{Request, RequestId};
use crate::error::{PersistError, ReadError};
use crate::handle::ChangelogHandle;
use crate::ledger::handle_in;
use crate::manifest::ManifestState;
use crate::reader::{BlockRef, ChangelogReader, LocalFiles, LocalSource, Pin};
use crate::recovery::{Recovered, whole_from};
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
    /// The first change in local blocks.
    pub local_start: SequenceNumber,
    /// The end of the changes in local blocks.
    pub local_end: SequenceNumber,
    pub end: SequenceNumber,
    pub confirmed: SequenceNumber,
    pub blocks: Vec<BlockRef>,
    /// The number after the last local block.
    pub blocks_end: u64,
}

impl Recovered {
    /// All logs that the manifest knows, with what is left of them.
    pub fn logs(&self, state: &ManifestState) -> Vec<FoundLog> {
        let mut blocks: BTreeMap<LogId, Vec<BlockRef>> = BTreeMap::new();
        for (block, resumes) in self.blocks.iter().zip(&self.resumes) {
            for range in &block.ranges {
                blocks.entry(range.log).or_default().push(BlockRef {
                    number: block.number,
                    first: whole_from(range, *resumes),
                    place: block.place,
                    bytes: block.held.as_ref().map(|held| held.bytes.clone()),
                    len: block.len,
                    continues: block.continues,
                });
            }
        }
        let found = state.logs().iter().map(|(&log, known)| {
            let covered = known.covered();
            let (local_start, local_end) = self.ranges.get(&log).copied().unwrap_or((covered, covered));
            FoundLog {
                log,
                name: known.name.clone(),
                key_groups: known.key_groups,
                start: known.truncated,
                local_start,
                local_end,
                end: local_end.max(covered),
                confirmed: known.confirmed,
                blocks: blocks.remove(&log).unwrap_or_default(),
                blocks_end: self.next_number,
            }
        });
        found.collect()
    }
}

impl FoundLog {
    /// A reader of all that is left: from local blocks where they hold it, else from objects, by the handles that
    /// `remote` gives for a range.
    pub fn reader(
        &self,
        key_groups: KeyGroupRange,
        site: LocalSite<'_>,
        driver: Option<&Arc<Driver>>,
        remote: impl Fn(SequenceNumber, SequenceNumber) -> Result<ChangelogHandle, PersistError>,
    ) -> Result<ChangelogReader, ReadError> {
        let FoundLog { log, start, end, .. } = *self;
        let is_gone = |block: &BlockRef| {
            block.place.is_some_and(|place| site.segments.get(&place.segment) != Some(&place.epoch))
        };
        // Segments are released in their order, when objects hold what is in them.
        let blocks =
            self.blocks.iter().rposition(is_gone).map_or(&self.blocks[..], |gone| &self.blocks[gone + 1..]);
        let local_start = match blocks.first() {
            Some(block) if blocks.len() < self.blocks.len() => block.first,
            Some(_) => self.local_start,
            None => self.local_end,
        };
        let local = local_start.max(start)..self.local_end;
        let handles = |from: SequenceNumber, to: SequenceNumber| match from < to {
            true => remote(from, to).map(|handle| vec![handle]).map_err(|_| ReadError::Truncated {
                log,
                from,
                start: to,
            }),
            false => Ok(Vec::new()),
        };
        let mut reader = ChangelogReader::new(&handles(start, local.start.min(end))?, key_groups, driver)?;
        if !local.is_empty() && self.key_groups.intersection(key_groups).is_some() {
            reader.add_local(LocalSource {
                log,
                from: local.start,
                to: local.end,
                directory: site.path.to_owned(),
                files: LocalFiles(Arc::clone(site.files)),
                blocks: blocks.to_vec(),
                _pin: Arc::new(site.pin),
            });
        }
        // Objects made while the local disk was out of service hold more than the disk does.
        reader.add_handles(&handles(local.end.max(local.start), end)?)?;
        Ok(reader)
    }
}

/// Where local blocks are read, and what keeps them there.
pub(crate) struct LocalSite<'a> {
    pub path: &'a Path,
    pub files: &'a Arc<dyn Files>,
    /// The segments in use now, and their epochs: others hold something else by now.
    pub segments: BTreeMap<u32, u64>,
    pub pin: Pin,
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

    /// Reads the changes in `key_groups`, from the local disk where it still holds them, else from the bucket.
    ///
    /// # Errors
    /// See [`ReadError`].
    pub fn read(&self, key_groups: KeyGroupRange) -> Result<ChangelogReader, ReadError> {
        self.core.check_owner()?;
        let site = &self.core.sites[self.device];
        let (core, device) = (Arc::clone(&self.core), self.device);
        site.readers.pin();
        let pin = Pin(Box::new(move || {
            core.sites[device].readers.unpin();
            core.send(Event::ReaderGone { device });
        }));
        // Looked at after the pin: what is in use now stays.
        let segments = site.ledger.read(|state| state.segments().clone());
        let local = LocalSite { path: &site.path, files: &site.files, segments, pin };
        self.found.reader(key_groups, local, Some(&self.core.driver), |from, to| {
            site.ledger.read(|state| handle_in(state, self.found.log, from, to))
        })
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
