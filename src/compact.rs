//! `Compactor`: rewrites what handles name into few large objects, and gives new handles for it.
//!
//! It works beside changelogs: on handles and buckets alone, from any machine. Which handle is in use, and when the objects
//! of the old ones go, is decided by whoever keeps handles. What is read is in compact/source.rs, which changes survive in
//! compact/latest.rs, how parts are made in compact/builder.rs and objects in compact/target.rs.
//!
//! 1. Logs are rewritten in the order of their ids, each in the order of its numbers, so that an object has one range of
//!    numbers of a log, and as few runs as the sizes of parts allow. Parts that are copied stand between them. Handles of a log
//!    for several ranges of key groups stay apart: each range of them is rewritten in a round of its own, into other objects.
//! 2. Every byte is verified before it is rewritten. What the bucket copies keeps its checksums, by which readers verify it.
//! 3. What is in memory is bounded by the options, and by what is known of every run (about 150 bytes), not by the objects.
//! 4. The old handles and their objects are only read. After a failure nothing new is left, or it is named.

mod ahead;
mod builder;
mod latest;
mod outcome;
mod rewrite;
mod source;
mod target;

use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tidelog_upload::bucket::BucketIndex;
use tidelog_upload::{Driver, Runtime, Store, block_on};

use crate::handle::{ChangelogHandle, Column, Coverage, OfLog, by_log, joined};
use crate::options::{OptionError, Options, check_bucket, check_names, must};
use crate::reader::Change;
use crate::types::KeyGroupRange;
use crate::uploader::object_bytes_max;
pub use outcome::{ChangeKey, CompactError, Compacted, CompactionPlan, CompactionStats};
use rewrite::Rewrite;
use source::{Buckets, Copying, Source, find_runs};
use target::Target;

const ONLY: BucketIndex = BucketIndex(0);
/// What a part may have, in bytes.
const PART_BYTES: RangeInclusive<usize> = 16 << 10..=1 << 30;
/// Threads that read and write.
const THREADS: usize = 2;

type KeyOf = dyn Fn(&Change) -> ChangeKey + Send + Sync;

/// Rewrites the changes of handles into few large objects.
///
/// A log that was checkpointed often is in many small objects; reading them takes a request for each object, and one
/// for each log in it. A compaction reads the changes that the handles name, clipped to their numbers and to the wanted key
/// groups, and writes them into new objects, as few as sizes allow, which all the handles share. It gives new handles: of the
/// same logs, names and numbers, for the wanted ones of their key groups. A reader gets the same changes from them: metadata first, the logs in
/// the order of the handles, and those of each log and key group in the order in which they were appended. How the key groups
/// of a log follow each other is another one: a reader goes through a log part by part, by key group within a part, and the
/// new parts are larger.
///
/// Several compactors, in one process or on many machines, may each take a range of the key groups: their handles together are
/// those of the logs, for [`Restore`](crate::Restore) and for another compaction. Each range stays a handle of its own then,
/// in objects of its own, of which a reader of other key groups fetches nothing. While one of the ranges is missing, the old
/// handles, [limited](ChangelogHandle::limited_to) to it, go together with the new ones of the others.
///
/// Where the bucket can (AWS; elsewhere if the URL says `copy_part=true`), it copies large parts of which everything survives
/// by itself: their bytes are neither read nor sent, and not verified before a reader does.
///
/// **Whoever keeps handles owns the result.** They store the new handles in the place of the old ones, and then let go of
/// the old ones. The old handles stay as good as they were; their objects belong to the changelogs that wrote them, which
/// delete them when their logs are truncated. The new objects belong to no changelog. When no handle that is kept names
/// them any more, [`Sweeper`](crate::Sweeper) finds them, like those of a compaction that was killed: they are named as a
/// changelog of the [prefix](Self::prefix) and the [group](Self::group) names its own. So a sweep of complete objects has to
/// be given the new handles among the live ones, and a least age above the time that a compaction takes.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let dir = tempfile::tempdir()?;
/// # let bucket = format!("file://{}", dir.path().join("bucket").display());
/// use tidelog::{Changelog, Compactor, KeyGroup, KeyGroupRange, Options, SequenceNumber};
/// # let options = Options::new(&bucket, dir.path().join("local")).segment_bytes(1 << 20).local_bytes(4 << 20);
/// let changelog = Changelog::open(options)?;
/// let mut writer = changelog.create_writer("counts", KeyGroupRange::ALL)?;
/// let mut handle = None;
/// for checkpoint in 0..3 {
///     writer.append(KeyGroup(checkpoint), b"a change")?;
///     handle = Some(writer.persist_durably(SequenceNumber::ZERO).wait()?);
/// }
/// let old = [handle.unwrap()];
/// assert_eq!(old[0].objects().count(), 3);
///
/// let mut compactor = Compactor::open(&bucket)?;
/// if compactor.plan(&old, KeyGroupRange::ALL)?.is_worthwhile() {
///     let new = compactor.compact(&old, KeyGroupRange::ALL)?.handles;
///     assert_eq!(new[0].objects().count(), 1);
///     assert_eq!((new[0].from(), new[0].to()), (old[0].from(), old[0].to()));
/// }
/// # Ok(()) }
/// ```
pub struct Compactor {
    store: Arc<dyn Store>,
    /// Names of objects, sizes, memory and time, as a changelog's; nothing local is used.
    options: Options,
    key_of: Option<Box<KeyOf>>,
    random: RandomState,
    tokens: u64,
}

impl fmt::Debug for Compactor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let last_value = self.key_of.is_some();
        f.debug_struct("Compactor").field("store", &self.store).field("last_value", &last_value).finish()
    }
}

impl Compactor {
    /// A compactor whose new objects go into the bucket of this URL. Nothing is changed there yet.
    ///
    /// # Errors
    /// A bucket that cannot be opened, such as a local directory that is not there, or whose URL handles cannot take.
    pub fn open(bucket: &str) -> Result<Compactor, CompactError> {
        check_bucket(&tidelog_upload::bucket_url(bucket)?)?;
        Ok(Compactor::with_store(tidelog_upload::open_store(bucket)?))
    }

    /// A compactor with a bucket of its own kind. For tests.
    #[doc(hidden)]
    #[must_use]
    pub fn with_store(store: Arc<dyn Store>) -> Compactor {
        let options = Options::new(store.url(), "/");
        Compactor { store, options, key_of: None, random: RandomState::new(), tokens: 0 }
    }

    /// Puts the new objects into this folder: as a changelog's [name prefix](Options::name_prefix).
    #[must_use]
    pub fn prefix(mut self, prefix: impl Into<String>) -> Compactor {
        self.options = self.options.name_prefix(prefix);
        self
    }

    /// Gives the new objects names of this [group](Options::group).
    #[must_use]
    pub fn group(mut self, group: impl Into<String>) -> Compactor {
        self.options = self.options.group(group);
        self
    }

    /// Spreads the new objects by a [hash of their names](Options::hash_prefix).
    #[must_use]
    pub fn hash_prefix(mut self, hash: bool) -> Compactor {
        self.options = self.options.hash_prefix(hash);
        self
    }

    /// About how many bytes a part has, as a changelog's [parts](Options::part_bytes): 8 MiB unless said otherwise, from
    /// 16 KiB to 1 GiB. A run of a log in a part of an old object is not divided.
    #[must_use]
    pub fn part_bytes(mut self, bytes: usize) -> Compactor {
        self.options = self.options.part_bytes(bytes);
        self
    }

    /// How much memory may be used, in bytes: 256 MiB unless said otherwise, at least four times a
    /// [part](Self::part_bytes). A quarter each is for what is being sent, for what is being read and, where
    /// [only last values](Self::last_value_by) count, for the changes whose keys are remembered at a time; parts take the
    /// rest. A run of a log, or the changes of one key group, that are larger than that are held all the same.
    #[must_use]
    pub fn memory_bytes(mut self, bytes: usize) -> Compactor {
        self.options = self.options.memory_bytes(bytes);
        self
    }

    /// How long the bucket may take nothing, and a commit may take, before the compaction fails: 10 minutes unless said
    /// otherwise, at most 6 hours.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Compactor {
        self.options = self.options.persist_timeout(timeout);
        self
    }

    /// Of the changes of one log and key group that have the same key, keeps only the last: `key_of` says where in a change's
    /// value the key is. It is not asked about metadata, which stays, as do changes without a key. What stays keeps its
    /// number and its place. For changes that stand alone: an upsert, not an increment.
    ///
    /// A key whose last change is a [tombstone](ChangeKey::Tombstone) goes altogether, if the handle starts at the log's first
    /// change. Otherwise the tombstone stays: what it deletes may be in the snapshot that the handle continues. Call a change a
    /// tombstone only if nothing older than its log is restored before it: a log that goes on where another one ended
    /// deletes what is in the other's handle. Where that may be, say [`Upsert`](ChangeKey::Upsert) of it.
    ///
    /// Changes are read twice: first the keys of some key groups at a time, as the [memory](Self::memory_bytes) allows,
    /// then what stays. `key_of` is called once for each change and compaction, on the calling thread.
    #[must_use]
    pub fn last_value_by(
        mut self,
        key_of: impl Fn(&Change) -> ChangeKey + Send + Sync + 'static,
    ) -> Compactor {
        self.key_of = Some(Box::new(key_of));
        self
    }

    /// What it would do. Reads footers, and directories where not all key groups of a handle are wanted.
    ///
    /// # Errors
    /// As [`compact`](Self::compact), and nothing was written.
    pub fn plan(
        &mut self,
        handles: &[ChangelogHandle],
        key_groups: impl Into<Option<KeyGroupRange>>,
    ) -> Result<CompactionPlan, CompactError> {
        let mut sources = self.sources(handles, key_groups.into())?;
        let driver = self.driver()?;
        let buckets = Buckets::open(&driver, &sources)?;
        let whole = block_on(find_runs(&buckets, &mut sources, self.copying(&driver).as_ref()))?;
        let object_bytes_max = object_bytes_max(&driver).max(1);
        Ok(block_on(rewrite::plan(self.options.part_bytes, object_bytes_max, &buckets, &sources, &whole))?)
    }

    /// Rewrites the changes of `handles` that lie in `key_groups`, or all of them if that is `None`, and blocks until the new
    /// objects are proven complete. Several handles of a log, whose numbers follow each other, become one; where they are for
    /// several ranges of key groups, one for each range. Not for use on an executor's thread.
    ///
    /// # Errors
    /// Nothing was changed then, and all that was written is removed again; where that fails too, the error
    /// [names it](CompactError::Leftovers). [`HandlesError`](crate::HandlesError) names what is missing or there twice, as
    /// [`Restore::open`](crate::Restore::open) and [`Restore::reader`](crate::Restore::reader) do.
    pub fn compact(
        &mut self,
        handles: &[ChangelogHandle],
        key_groups: impl Into<Option<KeyGroupRange>>,
    ) -> Result<Compacted, CompactError> {
        let mut sources = self.sources(handles, key_groups.into())?;
        let driver = self.driver()?;
        let buckets = Buckets::open(&driver, &sources)?;
        let whole = block_on(find_runs(&buckets, &mut sources, self.copying(&driver).as_ref()))?;
        let (random, tokens) = (&self.random, &mut self.tokens);
        let mut token = || {
            *tokens += 1;
            // A forked child has the same keys.
            random.hash_one((*tokens, std::process::id(), SystemTime::now()))
        };
        let mut rewrite = Rewrite {
            buckets: &buckets,
            options: &self.options,
            key_of: self.key_of.as_deref(),
            target: Target::new(&driver, &self.options, &mut token, !whole.is_empty()),
            stats: CompactionStats::default(),
        };
        let written = block_on(rewrite.run(&sources, &whole));
        let Rewrite { target, mut stats, .. } = rewrite;
        let mut handles = match written {
            Ok(handles) => handles,
            Err(source) => {
                let objects = target.give_up();
                if objects.is_empty() {
                    return Err(source);
                }
                let bucket = self.store.url().to_owned();
                return Err(CompactError::Leftovers { source: Box::new(source), bucket, objects });
            }
        };
        handles.sort_by_key(|(place, handle)| (*place, handle.key_groups().first()));
        let (written, leftovers) = target.end();
        (stats.requests, stats.bytes_read) = buckets.read();
        for object in &written {
            stats.objects += 1;
            stats.parts += object.parts as u64;
            stats.runs += object.runs as u64;
            stats.bytes_written += object.bytes();
        }
        let handles = handles.into_iter().map(|(_, handle)| handle).collect();
        Ok(Compacted { handles, stats, leftovers })
    }

    /// Says which option cannot work.
    fn check(&self) -> Result<(), OptionError> {
        let Options { part_bytes, memory_bytes, .. } = self.options;
        self.options.check_objects("timeout", "prefix")?;
        check_names(&self.options, self.store.url(), "prefix")?;
        must(PART_BYTES.contains(&part_bytes), "part_bytes", part_bytes, "16 KiB to 1 GiB")?;
        let fits = self.options.memory_share() >= part_bytes;
        must(fits, "memory_bytes", memory_bytes, "at least four times part_bytes")
    }

    /// Checks the options and the handles, and gives what is wanted of them: round by round, in each by log.
    fn sources(
        &self,
        handles: &[ChangelogHandle],
        key_groups: Option<KeyGroupRange>,
    ) -> Result<Vec<Source>, CompactError> {
        self.check()?;
        let logs = by_log(handles)?;
        if let Some(wanted) = key_groups {
            Coverage::of(&logs).check(wanted)?;
        }
        let wanted = key_groups.unwrap_or(KeyGroupRange::ALL);
        let mut sources = Vec::new();
        for (place, of_log) in logs.iter().enumerate() {
            sources.extend(sources_of(place, of_log, wanted)?);
        }
        sources.sort_by_key(|source| (source.round, source.handle.log()));
        Ok(sources)
    }

    /// What is copied by the bucket, if it can: parts of which all survives. Where only last values do, that is not known.
    fn copying(&self, driver: &Driver) -> Option<Copying<'_>> {
        let row = self.store.capabilities();
        (self.key_of.is_none() && driver.composes(ONLY)).then(|| Copying {
            bucket: self.store.url(),
            part_bytes_min: row.part_bytes_min,
            run_bytes_min: self.options.part_bytes as u64 / 2,
        })
    }

    fn driver(&self) -> Result<Arc<Driver>, CompactError> {
        let runtime = Runtime::Own { threads: THREADS };
        Ok(Arc::new(Driver::start(vec![Arc::clone(&self.store)], runtime, self.options.upload_options())?))
    }
}

/// The wanted key groups of a log: as few handles as there are ranges that the old ones cut them into.
fn sources_of(place: usize, of_log: &OfLog<'_>, wanted: KeyGroupRange) -> Result<Vec<Source>, CompactError> {
    let mut sources = Vec::new();
    for (round, Column { key_groups, handles }) in of_log.columns(wanted).into_iter().enumerate() {
        let extents = joined(handles.iter().flat_map(|handle| handle.extents()));
        let (from, to) = (of_log.numbers.start, of_log.numbers.end);
        let handle = ChangelogHandle::new(of_log.log(), of_log.name(), key_groups, from, to, extents)?;
        let whole = handles.iter().all(|handle| handle.key_groups() == key_groups);
        sources.push(Source { handle, round, place, whole, runs: Vec::new() });
    }
    Ok(sources)
}
