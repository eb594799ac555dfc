//! `ChangelogReader`: the changes of handles, by key group, from objects or from local blocks.
//!
//! Order is promised per log and key group; metadata comes first, over all handles. Every byte handed out was verified.
//! Which changes are read from where is planned in restore.rs; what is in a part, directory or changeset is known to
//! part.rs.
//!
//! A reader passes over the items of its plan twice, first for metadata, then for data. On the way from an object to its
//! changes are queues, in the order of the plan: footers, directories of the runs that it needs, and ranges of those runs:
//! the changesets of neighbouring key groups are neighbours. In each some are asked for ahead of the one being read, so what
//! is in memory is bounded by that, and by what objects.rs keeps of footers and directories.

mod batch;
mod local;
mod objects;
mod restore;
mod unpack;

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use tidelog_upload::Store;

use crate::error::ReadError;
use crate::footer::{Footer, FooterError};
use crate::handle::ChangelogHandle;
use crate::part::Directory;
use crate::types::{KeyGroup, KeyGroupRange, LogId};
pub use batch::{Change, ChangeBatch, ChangeBatchIntoIter};
use local::{LocalGroup, Unreadable};
pub(crate) use local::{LocalSite, Pin};
use objects::{Asked, ObjectSource, PartRun, Unread};
pub use restore::Restore;
use restore::{Item, Shared, cover};
pub(crate) use restore::{LocalBlocks, Plan};
use unpack::EntryRange;

/// Ranges of objects under way at once, or here and not handed out.
const READ_AHEAD: usize = 16;
/// Their bytes, unless one alone has more.
const READ_AHEAD_BYTES: u64 = 64 << 20;
/// Changesets side by side are asked for together, up to this many bytes.
const RANGE_BYTES: u64 = 4 << 20;
/// Footers asked for ahead.
const FOOTERS_AHEAD: usize = 16;
/// With fewer directories ahead, more are asked for: they are small, so what they take is the time of a request.
const DIRECTORIES_AHEAD: usize = 64;
/// Those of a log's runs stand together and are asked for together, up to this many bytes.
const DIRECTORIES_BYTES: u64 = 256 << 10;

/// Reads the changes of handles that lie in a range of key groups: metadata of all handles first, then per log and key
/// group in the order in which they were appended.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let dir = tempfile::tempdir()?;
/// # let bucket = format!("file://{}", dir.path().join("bucket").display());
/// use tidelog::{Changelog, ChangelogReader, KeyGroup, KeyGroupRange, Options, SequenceNumber};
/// # let options = Options::new(bucket, dir.path().join("local")).segment_bytes(1 << 20).local_bytes(4 << 20);
/// let changelog = Changelog::open(options)?;
/// let mut writer = changelog.create_writer("counts", KeyGroupRange::ALL)?;
/// for key_group in 0..4 {
///     writer.append(KeyGroup(key_group), b"a change")?;
/// }
/// let handle = writer.persist_durably(SequenceNumber::ZERO).wait()?;
///
/// let half = KeyGroupRange::new(0, 1).unwrap();
/// let changes = ChangelogReader::open(&[handle], half)?.collect::<Result<Vec<_>, _>>()?;
/// assert_eq!(changes.len(), 2);
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct ChangelogReader {
    shared: Arc<Shared>,
    key_groups: KeyGroupRange,
    stats: ReadStats,
    /// Metadata is read in the first pass, data in the second one.
    metadata: bool,
    /// Of each log the first wanted key group. Several handles of a log, for different key groups, all have its metadata: it
    /// is read from those that have this one, of which each number is in one.
    first_of_log: HashMap<LogId, KeyGroup>,
    /// The next item of the pass.
    next_item: usize,
    footers: VecDeque<Ahead<Asked<Arc<Footer>>>>,
    runs: VecDeque<Ahead<PartRun>>,
    directories: VecDeque<Ahead<(PartRun, Asked<Arc<Directory>>)>>,
    ranges: VecDeque<Ahead<EntryRange>>,
    under_way: VecDeque<Ahead<(EntryRange, Asked<ChangeBatch>)>>,
    bytes_under_way: u64,
    /// What the blocking iterator has not handed out.
    batch: ChangeBatchIntoIter,
    failed: bool,
}

/// What a reader has read so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReadStats {
    /// Requests to buckets. One whose answer several readers use counts for the one that asked.
    pub requests: u64,
    /// Bytes from buckets.
    pub bytes: u64,
    /// Bytes of blocks of local directories.
    pub local_bytes: u64,
}

/// Something in a queue. Local blocks pass through all of them, to keep their place.
#[derive(Debug)]
enum Ahead<T> {
    Object(Arc<ObjectSource>, T),
    Local(Arc<LocalGroup>),
}

impl ChangelogReader {
    /// A reader of `handles` on any machine that reaches their buckets: [`Restore`] for one reader.
    ///
    /// # Errors
    /// As [`Restore::open`] and [`Restore::reader`].
    pub fn open(
        handles: &[ChangelogHandle],
        key_groups: KeyGroupRange,
    ) -> Result<ChangelogReader, ReadError> {
        Restore::open(handles)?.reader(key_groups)
    }

    /// A reader of `handles` whose buckets are `stores`, on the calling thread. For simulations.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    #[doc(hidden)]
    pub fn open_simulated(
        handles: &[ChangelogHandle],
        key_groups: KeyGroupRange,
        stores: Vec<Arc<dyn Store>>,
    ) -> Result<ChangelogReader, ReadError> {
        Restore::open_simulated(handles, stores)?.reader(key_groups)
    }

    fn new(shared: Arc<Shared>, key_groups: KeyGroupRange) -> ChangelogReader {
        let mut first_of_log: HashMap<LogId, KeyGroup> = HashMap::new();
        for item in &shared.items {
            if let Some(wanted) = item.key_groups().intersection(key_groups) {
                let first = first_of_log.entry(item.log()).or_insert(wanted.first());
                *first = wanted.first().min(*first);
            }
        }
        ChangelogReader {
            shared,
            first_of_log,
            key_groups,
            stats: ReadStats::default(),
            metadata: true,
            next_item: 0,
            footers: VecDeque::new(),
            runs: VecDeque::new(),
            directories: VecDeque::new(),
            ranges: VecDeque::new(),
            under_way: VecDeque::new(),
            bytes_under_way: 0,
            batch: ChangeBatch::of_changes(LogId(0), Vec::new()).into_iter(),
            failed: false,
        }
    }

    /// The next changes, some thousands at a time; `None` at the end. After an error the reader is over. A future that is
    /// dropped takes nothing with it.
    ///
    /// The fastest way to read: what comes from a bucket is verified on the threads that receive it, while the caller
    /// looks at the batch before.
    ///
    /// # Errors
    /// See [`ReadError`].
    pub async fn next_batch(&mut self) -> Result<Option<ChangeBatch>, ReadError> {
        if self.failed {
            return Ok(None);
        }
        let batch = self.read_batch().await;
        self.failed = batch.is_err();
        batch
    }

    /// What was read so far.
    #[must_use]
    pub fn stats(&self) -> ReadStats {
        self.stats
    }

    async fn read_batch(&mut self) -> Result<Option<ChangeBatch>, ReadError> {
        loop {
            self.look_ahead()?;
            // What is awaited stays where it is until it has come, so that nothing is lost with a dropped future.
            let batch = match self.under_way.front_mut() {
                Some(Ahead::Object(_, (_, asked))) => {
                    asked.come().await;
                    self.take_range()?
                }
                Some(Ahead::Local(group)) => {
                    let group = Arc::clone(group);
                    let wanted = group.key_groups.intersection(self.key_groups);
                    let wanted = wanted.expect("others are left out");
                    match group.read(self.metadata, wanted, &mut self.stats) {
                        Ok(changes) => {
                            self.under_way.pop_front();
                            Some(ChangeBatch::of_changes(group.log, changes))
                        }
                        Err(unreadable) => {
                            self.fall_back(&group, unreadable).await?;
                            None
                        }
                    }
                }
                None => {
                    if !self.await_ahead().await {
                        debug_assert!(
                            self.runs.is_empty() && self.ranges.is_empty() && self.bytes_under_way == 0
                        );
                        if !self.metadata {
                            return Ok(None);
                        }
                        (self.metadata, self.next_item) = (false, 0);
                    }
                    None
                }
            };
            if let Some(batch) = batch.filter(|batch| !batch.is_empty()) {
                return Ok(Some(batch));
            }
        }
    }

    /// Moves everything on that can be, and asks for what is next.
    fn look_ahead(&mut self) -> Result<(), ReadError> {
        let shared = Arc::clone(&self.shared);
        while self.footers.len() < FOOTERS_AHEAD
            && let Some(item) = shared.items.get(self.next_item)
        {
            self.next_item += 1;
            let Some(wanted) = item.key_groups().intersection(self.key_groups) else { continue };
            if self.metadata && wanted.first() != self.first_of_log[&item.log()] {
                continue;
            }
            match item {
                Item::Object(source) => self.ask_footer(source)?,
                Item::Local(group) if group.failed.load(Ordering::Relaxed) => {
                    group.objects.iter().try_for_each(|source| self.ask_footer(source))?;
                }
                Item::Local(group) => self.footers.push_back(Ahead::Local(Arc::clone(group))),
            }
        }
        while self.runs.len() < DIRECTORIES_AHEAD
            && let Some(footer) = pop_here(&mut self.footers, Asked::is_here)
        {
            match footer {
                Ahead::Local(group) => self.runs.push_back(Ahead::Local(group)),
                Ahead::Object(source, footer) => {
                    let runs = runs_of(&source, footer)?;
                    self.runs.extend(runs.into_iter().map(|run| Ahead::Object(Arc::clone(&source), run)));
                }
            }
        }
        while self.directories.len() < DIRECTORIES_AHEAD
            && let Some(run) = self.runs.pop_front()
        {
            match run {
                Ahead::Local(group) => self.directories.push_back(Ahead::Local(group)),
                Ahead::Object(source, run) => self.ask_directories(source, run)?,
            }
        }
        while self.under_way.len() < READ_AHEAD && self.bytes_under_way < READ_AHEAD_BYTES {
            match self.ranges.pop_front() {
                Some(Ahead::Local(group)) => self.under_way.push_back(Ahead::Local(group)),
                Some(Ahead::Object(source, range)) => {
                    let asked = self.ask_range(&source, &range)?;
                    self.under_way.push_back(Ahead::Object(source, (range, asked)));
                }
                None => match pop_here(&mut self.directories, |(_, directory)| directory.is_here()) {
                    Some(Ahead::Local(group)) => self.ranges.push_back(Ahead::Local(group)),
                    Some(Ahead::Object(source, (run, directory))) => {
                        let ranges = self.ranges_of(&source, run, directory)?;
                        let ranges =
                            ranges.into_iter().map(|range| Ahead::Object(Arc::clone(&source), range));
                        self.ranges.extend(ranges);
                    }
                    None => break,
                },
            }
        }
        Ok(())
    }

    /// With nothing under way: waits for what everything behind it waits for. `false` at the end of the pass.
    async fn await_ahead(&mut self) -> bool {
        if let Some(Ahead::Object(_, (_, directory))) = self.directories.front_mut() {
            directory.come().await;
        } else if !self.runs.is_empty() || !self.directories.is_empty() || !self.ranges.is_empty() {
            // Looking ahead once more moves them on.
        } else if let Some(Ahead::Object(_, footer)) = self.footers.front_mut() {
            footer.come().await;
        } else {
            return !self.footers.is_empty() || self.next_item < self.shared.items.len();
        }
        true
    }

    fn ask_footer(&mut self, source: &Arc<ObjectSource>) -> Result<(), ReadError> {
        let footer = self.shared.objects.footer(source, &mut self.stats)?;
        self.footers.push_back(Ahead::Object(Arc::clone(source), footer));
        Ok(())
    }

    /// Asks for the directory of a run, and with it for those of the next ones that stand right behind it.
    fn ask_directories(&mut self, source: Arc<ObjectSource>, first: PartRun) -> Result<(), ReadError> {
        let (start, mut end) = (first.directory.start, first.directory.end);
        let mut runs = vec![first];
        while let Some(Ahead::Object(of, run)) = self.runs.front()
            && Arc::ptr_eq(of, &source)
            && run.directory.start == end
            && run.directory.end - start <= DIRECTORIES_BYTES
        {
            end = run.directory.end;
            runs.push(run.clone());
            self.runs.pop_front();
        }
        let asked = self.shared.objects.directories(&source, &runs, &mut self.stats)?;
        let asked = runs.into_iter().zip(asked).map(|asked| Ahead::Object(Arc::clone(&source), asked));
        self.directories.extend(asked);
        Ok(())
    }

    fn ask_range(
        &mut self,
        source: &Arc<ObjectSource>,
        range: &EntryRange,
    ) -> Result<Asked<ChangeBatch>, ReadError> {
        let asked = self.shared.objects.changes(source, range, &mut self.stats)?;
        let bytes = range.bytes();
        self.bytes_under_way += bytes.end - bytes.start;
        Ok(asked)
    }

    /// The changesets of a run that this pass reads, cut into ranges.
    fn ranges_of(
        &self,
        source: &ObjectSource,
        run: PartRun,
        directory: Asked<Arc<Directory>>,
    ) -> Result<Vec<EntryRange>, ReadError> {
        let directory = directory.take().map_err(|unread| unread.of(source, Some(&run)))?;
        let entries = directory.entries();
        // Metadata stands first, key groups are sorted.
        let place = |group: Option<KeyGroup>| entries.partition_point(|entry| entry.group < group);
        let wanted = source.key_groups.intersection(self.key_groups).expect("others are left out");
        let (first, last) = (Some(wanted.first()), Some(wanted.last()));
        let wanted = match self.metadata {
            true => 0..entries.partition_point(|entry| entry.group.is_none()),
            false => place(first)..entries.partition_point(|entry| entry.group <= last),
        };
        let mut ranges = Vec::new();
        let mut start = wanted.start;
        while start < wanted.end {
            let limit = entries[start].range.start.saturating_add(RANGE_BYTES);
            let fitting = entries[start..wanted.end].partition_point(|entry| entry.range.end <= limit);
            let end = start + fitting.max(1);
            let (run, directory) = (run.clone(), Arc::clone(&directory));
            ranges.push(EntryRange { run, directory, entries: start..end, again: false });
            start = end;
        }
        Ok(ranges)
    }

    /// The changes of the first range under way, which is here; none if it was damaged and is asked for again.
    fn take_range(&mut self) -> Result<Option<ChangeBatch>, ReadError> {
        let Some(Ahead::Object(source, (mut range, asked))) = self.under_way.pop_front() else {
            unreachable!("an object's range has come")
        };
        let bytes = range.bytes();
        self.bytes_under_way -= bytes.end - bytes.start;
        match asked.take() {
            Ok(batch) => Ok(Some(batch)),
            // Damage on the way is told from damage in the store by asking again, once.
            Err(Unread::Changeset(..)) if !range.again => {
                range.again = true;
                let asked = self.ask_range(&source, &range)?;
                self.under_way.push_front(Ahead::Object(source, (range, asked)));
                Ok(None)
            }
            Err(unread) => Err(unread.of(&source, Some(&range.run))),
        }
    }

    /// Puts what objects hold of local blocks that could not be read in their place, at the front.
    async fn fall_back(
        &mut self,
        group: &Arc<LocalGroup>,
        Unreadable { error, released }: Unreadable,
    ) -> Result<(), ReadError> {
        if !cover(&group.objects, &group.numbers) {
            return Err(*error);
        }
        let first = !group.failed.swap(true, Ordering::Relaxed);
        if first && released {
            tracing::debug!(%error, "a segment was used again before it was read: objects are read instead");
        } else if first {
            metrics::counter!("tidelog_local_read_failures_total").increment(1);
        }
        if !released && !self.shared.warned.swap(true, Ordering::Relaxed) {
            tracing::warn!(%error, "local blocks cannot be read: what they hold is read from objects, here and wherever else \
                that is so in this restore");
        }
        let mut ranges = Vec::new();
        for source in &group.objects {
            let mut footer = self.shared.objects.footer(source, &mut self.stats)?;
            footer.come().await;
            let runs = runs_of(source, footer)?;
            let directories = self.shared.objects.directories(source, &runs, &mut self.stats)?;
            for (run, mut directory) in runs.into_iter().zip(directories) {
                directory.come().await;
                let found = self.ranges_of(source, run, directory)?;
                ranges.extend(found.into_iter().map(|range| (Arc::clone(source), range)));
            }
        }
        // From here on nothing is awaited.
        self.under_way.pop_front();
        for (index, (source, range)) in ranges.into_iter().enumerate() {
            let asked = self.ask_range(&source, &range)?;
            self.under_way.insert(index, Ahead::Object(source, (range, asked)));
        }
        Ok(())
    }
}

/// Takes the front of a queue if it has come; local blocks always have.
fn pop_here<T>(queue: &mut VecDeque<Ahead<T>>, is_here: impl FnOnce(&mut T) -> bool) -> Option<Ahead<T>> {
    let here = match queue.front_mut()? {
        Ahead::Object(_, asked) => is_here(asked),
        Ahead::Local(_) => true,
    };
    if here { queue.pop_front() } else { None }
}

/// The runs that hold a source's changes, by a footer that has come.
fn runs_of(source: &ObjectSource, footer: Asked<Arc<Footer>>) -> Result<Vec<PartRun>, ReadError> {
    let footer = footer.take().map_err(|unread| unread.of(source, None))?;
    let (expected, found) = (source.extent.token, footer.token());
    if expected != found {
        // Another handle described the object otherwise.
        return Err(Unread::Footer(FooterError::Misplaced { expected, found }).of(source, None));
    }
    source.runs(&footer)
}

/// Blocks the thread for each batch, and hands out its changes one by one.
impl Iterator for ChangelogReader {
    type Item = Result<Change, ReadError>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            if let Some(change) = self.batch.next() {
                return Some(Ok(change));
            }
            match tidelog_upload::block_on(self.next_batch()) {
                Ok(Some(batch)) => self.batch = batch.into_iter(),
                Ok(None) => return None,
                Err(error) => return Some(Err(error)),
            }
        }
    }
}
