//! `ChangelogReader`: the changes of handles, by key group, from objects or from local blocks.
//!
//! Order is promised per log and key group; metadata comes first, over all handles. Every byte handed out was verified.
//! What is in a part, directory or changeset is known to part.rs; which blocks a recovered log still has, to its caller.
//!
//! A reader first reads the footers, then the directories of the runs that it needs, then one range of each run: the
//! changesets of neighbouring key groups are neighbours. Some ranges ahead of the one being read are on their way; what
//! is in memory is bounded by them, and by the directories, which take under one percent of an object.

mod local;

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use tidelog_upload::bucket::BucketIndex;
use tidelog_upload::{Driver, Pending, Runtime, Store, StoreError, UploadOptions};

use crate::error::ReadError;
use crate::footer::Footer;
use crate::handle::{ChangelogHandle, Extent};
use crate::part::{Changeset, Compression, Directory, DirectoryEntry, PartError, PartId, Run};
use crate::piece;
use crate::types::{KeyGroup, KeyGroupRange, LogId, SequenceNumber};
pub(crate) use local::{BlockRef, LocalFiles, LocalSource, Pin};
use local::{local_groups, read_local};

/// Requests under way at once.
const READ_AHEAD: usize = 8;
/// Threads of a reader that is opened without a changelog.
const DOWNLOAD_THREADS: usize = 2;

/// One change, as it was appended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// The log that it belongs to.
    pub log: LogId,
    /// Its number in that log.
    pub number: SequenceNumber,
    /// Its key group; `None` for metadata.
    pub key_group: Option<KeyGroup>,
    /// Its value.
    pub value: Bytes,
}

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
    key_groups: KeyGroupRange,
    buckets: Buckets,
    sources: Vec<Source>,
    fetches: VecDeque<Fetch>,
    under_way: VecDeque<UnderWay>,
    prepared: bool,
    /// What the blocking iterator has not handed out.
    batch: std::vec::IntoIter<Change>,
    failed: bool,
}

/// What a reader has read so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReadStats {
    /// Requests to buckets.
    pub requests: u64,
    /// Bytes from buckets.
    pub bytes: u64,
}

/// Changes of one log, from one place.
#[derive(Debug)]
enum Source {
    Object(ObjectSource),
    Local(LocalSource),
}

/// An extent of a handle.
#[derive(Debug)]
struct ObjectSource {
    log: LogId,
    extent: Extent,
    runs: Vec<PartRun>,
}

/// A log's run in one part of an object.
#[derive(Clone, Debug)]
struct PartRun {
    part: PartId,
    /// Where the run starts in the object, in bytes.
    offset: u64,
    compression: Compression,
    run: Run,
}

/// Neighbouring changesets of one run, or of a group of local blocks.
#[derive(Debug)]
enum Fetch {
    Object { source: usize, run: PartRun, entries: Vec<DirectoryEntry> },
    Local { source: usize, blocks: Range<usize>, metadata: bool },
}

#[derive(Debug)]
struct UnderWay {
    fetch: Fetch,
    /// `None` for local blocks, which are read when it is their turn.
    bytes: Option<Download>,
}

/// Bytes on their way from buckets: the concatenation of these.
type Download = Vec<Pending<Result<Bytes, StoreError>>>;

/// Buckets by URL: those of a changelog, and others once a handle names them.
#[derive(Debug, Default)]
struct Buckets {
    open: HashMap<Arc<str>, (Arc<Driver>, BucketIndex)>,
    stats: ReadStats,
}

impl Buckets {
    /// Those of a driver.
    fn of(driver: &Arc<Driver>) -> Buckets {
        let bucket = |(index, store): (usize, &Arc<dyn Store>)| {
            (Arc::from(store.url()), (Arc::clone(driver), BucketIndex(index)))
        };
        Buckets {
            open: driver.stores().iter().enumerate().map(bucket).collect(),
            stats: ReadStats::default(),
        }
    }

    fn find(&mut self, bucket: &Arc<str>) -> Result<(Arc<Driver>, BucketIndex), ReadError> {
        if let Some((driver, index)) = self.open.get(bucket) {
            return Ok((Arc::clone(driver), *index));
        }
        let store = tidelog_upload::open_store(bucket)?;
        let runtime = Runtime::Own { threads: DOWNLOAD_THREADS };
        let driver = Arc::new(Driver::start(vec![store], runtime, UploadOptions::default())?);
        self.open.insert(Arc::clone(bucket), (Arc::clone(&driver), BucketIndex(0)));
        Ok((driver, BucketIndex(0)))
    }

    /// A range of the object's bytes, wherever they are.
    fn get(&mut self, extent: &Extent, range: Range<u64>) -> Result<Download, ReadError> {
        let mut download = Vec::new();
        for (piece, range) in piece::locate(&extent.pieces, range) {
            let (driver, bucket) = self.find(&piece.bucket)?;
            self.stats.requests += 1;
            self.stats.bytes += range.end - range.start;
            let (resolver, pending) = tidelog_upload::channel();
            driver.get(bucket, &piece.object, range, move |outcome| resolver.resolve(outcome));
            download.push(pending);
        }
        Ok(download)
    }
}

impl ChangelogReader {
    /// A reader of `handles` on any machine that reaches their buckets.
    ///
    /// # Errors
    /// A bucket that cannot be opened. Objects are first read by [`next_batch`](Self::next_batch).
    pub fn open(
        handles: &[ChangelogHandle],
        key_groups: KeyGroupRange,
    ) -> Result<ChangelogReader, ReadError> {
        ChangelogReader::new(handles, key_groups, None)
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
        let driver = Driver::inline(stores, UploadOptions::default(), Arc::new(Instant::now))?;
        ChangelogReader::new(handles, key_groups, Some(&Arc::new(driver)))
    }

    /// As [`open`](Self::open), with a driver for some of the buckets.
    pub(crate) fn new(
        handles: &[ChangelogHandle],
        key_groups: KeyGroupRange,
        driver: Option<&Arc<Driver>>,
    ) -> Result<ChangelogReader, ReadError> {
        let buckets = driver.map_or_else(Buckets::default, Buckets::of);
        let mut reader = ChangelogReader {
            key_groups,
            buckets,
            sources: Vec::new(),
            fetches: VecDeque::new(),
            under_way: VecDeque::new(),
            prepared: false,
            batch: Vec::new().into_iter(),
            failed: false,
        };
        reader.add_handles(handles)?;
        Ok(reader)
    }

    /// Adds handles, read after what is there already.
    pub(crate) fn add_handles(&mut self, handles: &[ChangelogHandle]) -> Result<(), ReadError> {
        let key_groups = self.key_groups;
        for handle in handles.iter().filter(|handle| handle.key_groups().intersection(key_groups).is_some()) {
            for extent in handle.extents() {
                for piece in &extent.pieces {
                    self.buckets.find(&piece.bucket)?;
                }
                let (log, extent) = (handle.log(), extent.clone());
                self.sources.push(Source::Object(ObjectSource { log, extent, runs: Vec::new() }));
            }
        }
        Ok(())
    }

    /// Adds local blocks, read after what is there already.
    pub(crate) fn add_local(&mut self, local: LocalSource) {
        self.sources.push(Source::Local(local));
    }

    /// The next changes, some thousands at a time; `None` at the end. After an error the reader is over.
    ///
    /// # Errors
    /// See [`ReadError`].
    pub async fn next_batch(&mut self) -> Result<Option<Vec<Change>>, ReadError> {
        if self.failed {
            return Ok(None);
        }
        self.failed = true;
        let batch = self.read_batch().await?;
        self.failed = false;
        Ok(batch)
    }

    /// What was asked of buckets so far.
    #[must_use]
    pub fn stats(&self) -> ReadStats {
        self.buckets.stats
    }

    async fn read_batch(&mut self) -> Result<Option<Vec<Change>>, ReadError> {
        if !self.prepared {
            self.read_footers().await?;
            self.read_directories().await?;
            self.prepared = true;
        }
        loop {
            while self.under_way.len() < READ_AHEAD
                && let Some(fetch) = self.fetches.pop_front()
            {
                let bytes = self.start(&fetch)?;
                self.under_way.push_back(UnderWay { fetch, bytes });
            }
            let Some(UnderWay { fetch, bytes }) = self.under_way.pop_front() else { return Ok(None) };
            let changes = match (&fetch, bytes) {
                (Fetch::Object { .. }, Some(bytes)) => {
                    let bytes = settled(bytes).await?;
                    match self.unpack(&fetch, bytes) {
                        // Damage on the way is told from damage in the store by asking again, once.
                        Err(ReadError::Damaged { .. }) => {
                            let again = self.start(&fetch)?.expect("an object is read by request");
                            self.unpack(&fetch, settled(again).await?)?
                        }
                        unpacked => unpacked?,
                    }
                }
                (Fetch::Local { source, blocks, metadata }, _) => {
                    let Source::Local(local) = &self.sources[*source] else { unreachable!("it is local") };
                    read_local(local, &local.blocks[blocks.clone()], *metadata, self.key_groups)?
                }
                (Fetch::Object { .. }, None) => unreachable!("an object is read by request"),
            };
            if !changes.is_empty() {
                return Ok(Some(changes));
            }
        }
    }

    /// Reads the footers of all objects, each once, and notes the runs that are needed.
    async fn read_footers(&mut self) -> Result<(), ReadError> {
        let mut footers: HashMap<(Arc<str>, String), Arc<Footer>> = HashMap::new();
        for source in &mut self.sources {
            let Source::Object(source) = source else { continue };
            let Extent { pieces, footer, token, .. } = &source.extent;
            // A file belongs to one object.
            let key = (Arc::clone(&pieces[0].bucket), pieces[0].object.clone());
            if !footers.contains_key(&key) {
                let bytes = settled(self.buckets.get(&source.extent, footer.clone())?).await?;
                let footer = Footer::decode(&bytes, Some(*token)).map_err(|error| ReadError::Footer {
                    object: source.extent.object().to_owned(),
                    source: error,
                })?;
                footers.insert(key.clone(), Arc::new(footer));
            }
            source.runs = needed_runs(&footers[&key], source.log, &source.extent)?;
        }
        Ok(())
    }

    /// Reads the directories of all runs, and plans what to fetch: metadata first.
    async fn read_directories(&mut self) -> Result<(), ReadError> {
        let mut data = VecDeque::new();
        let mut waiting: VecDeque<(usize, PartRun, Download)> = VecDeque::new();
        for index in 0..self.sources.len() {
            let groups = match &self.sources[index] {
                Source::Object(_) => Vec::new(),
                Source::Local(local) => local_groups(&local.blocks),
            };
            if !groups.is_empty() {
                // The order of the sources must hold over those that are on their way.
                while let Some((source, run, bytes)) = waiting.pop_front() {
                    self.plan(source, run, settled(bytes).await?, &mut data)?;
                }
            }
            for blocks in groups {
                let fetch = |metadata| Fetch::Local { source: index, blocks: blocks.clone(), metadata };
                self.fetches.push_back(fetch(true));
                data.push_back(fetch(false));
            }
            let (extent, runs) = match &self.sources[index] {
                Source::Object(source) => (source.extent.clone(), source.runs.clone()),
                Source::Local(_) => continue,
            };
            for run in runs {
                let range = run.offset..run.offset + u64::from(run.run.directory_len);
                let bytes = self.buckets.get(&extent, range)?;
                waiting.push_back((index, run, bytes));
                if waiting.len() > READ_AHEAD
                    && let Some((source, run, bytes)) = waiting.pop_front()
                {
                    self.plan(source, run, settled(bytes).await?, &mut data)?;
                }
            }
        }
        while let Some((source, run, bytes)) = waiting.pop_front() {
            self.plan(source, run, settled(bytes).await?, &mut data)?;
        }
        self.fetches.append(&mut data);
        Ok(())
    }

    fn plan(
        &mut self,
        source: usize,
        run: PartRun,
        directory: Bytes,
        data: &mut VecDeque<Fetch>,
    ) -> Result<(), ReadError> {
        let end = run.offset + u64::from(run.run.directory_len);
        let directory = Directory::decode(&directory, run.part, &run.run)
            .map_err(|error| self.damaged(source, &run, run.offset..end, error))?;
        let (metadata, wanted): (Vec<_>, Vec<_>) = directory
            .entries()
            .iter()
            .filter(|entry| entry.group.is_none_or(|group| self.key_groups.contains(group)))
            .cloned()
            .partition(|entry| entry.group.is_none());
        if !metadata.is_empty() {
            self.fetches.push_back(Fetch::Object { source, run: run.clone(), entries: metadata });
        }
        if !wanted.is_empty() {
            data.push_back(Fetch::Object { source, run, entries: wanted });
        }
        Ok(())
    }

    fn start(&mut self, fetch: &Fetch) -> Result<Option<Download>, ReadError> {
        let Fetch::Object { source, run, entries } = fetch else { return Ok(None) };
        let Source::Object(source) = &self.sources[*source] else { unreachable!("it is an object") };
        let range = byte_range(entries);
        self.buckets.get(&source.extent, run.offset + range.start..run.offset + range.end).map(Some)
    }

    /// Verifies the changesets of a fetch and takes their changes apart.
    fn unpack(&self, fetch: &Fetch, bytes: Bytes) -> Result<Vec<Change>, ReadError> {
        let Fetch::Object { source, run, entries } = fetch else { unreachable!("it is an object") };
        let Source::Object(object) = &self.sources[*source] else { unreachable!("it is an object") };
        let start = byte_range(entries).start;
        let mut changes = Vec::new();
        for entry in entries {
            let piece = bytes.slice((entry.range.start - start) as usize..(entry.range.end - start) as usize);
            let changeset = Changeset::decode(piece, run.part, object.log, entry.group, run.compression)
                .map_err(|error| {
                    let range = run.offset + entry.range.start..run.offset + entry.range.end;
                    self.damaged(*source, run, range, error)
                })?;
            let wanted = object.extent.first..object.extent.end;
            take_changes(changeset, object.log, entry.group, &wanted, &mut changes);
        }
        Ok(changes)
    }

    fn damaged(&self, source: usize, run: &PartRun, range: Range<u64>, error: PartError) -> ReadError {
        let object = match &self.sources[source] {
            Source::Object(source) => source.extent.object().to_owned(),
            Source::Local(local) => local.directory.display().to_string(),
        };
        ReadError::Damaged {
            object,
            part: run.part.index as usize,
            start: range.start,
            end: range.end,
            source: error,
        }
    }
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

async fn settled(download: Download) -> Result<Bytes, ReadError> {
    let mut read = Vec::with_capacity(download.len());
    for pending in download {
        read.push(pending.await.map_err(|_| ReadError::Closed)??);
    }
    if read.len() == 1
        && let Some(bytes) = read.pop()
    {
        return Ok(bytes);
    }
    Ok(read.concat().into())
}

/// The runs of `log` that hold changes of the extent, checked to hold all of them.
fn needed_runs(footer: &Footer, log: LogId, extent: &Extent) -> Result<Vec<PartRun>, ReadError> {
    let mut needed = Vec::new();
    let mut due = extent.first;
    for (index, part) in footer.parts().iter().enumerate() {
        let Ok(at) = part.runs.binary_search_by_key(&log, |run| run.log) else { continue };
        let run = part.runs[at];
        if run.end <= extent.first || run.first >= extent.end {
            continue;
        }
        if run.first > due {
            break;
        }
        due = due.max(run.end);
        needed.push(PartRun {
            part: footer.part_id(index as u32),
            offset: part.offset + run.offset,
            compression: part.compression,
            run,
        });
    }
    if due < extent.end {
        let what = format!("changes {due} to {} of log {log} are not in it", extent.end);
        return Err(ReadError::Mismatch { object: extent.object().to_owned(), what });
    }
    Ok(needed)
}

/// The bytes from the first entry's start to the last one's end.
fn byte_range(entries: &[DirectoryEntry]) -> Range<u64> {
    let start = entries.first().map_or(0, |entry| entry.range.start);
    start..entries.last().map_or(start, |entry| entry.range.end)
}

fn take_changes(
    changeset: Changeset,
    log: LogId,
    group: Option<KeyGroup>,
    wanted: &Range<SequenceNumber>,
    changes: &mut Vec<Change>,
) {
    for (number, value) in changeset.into_records() {
        if wanted.contains(&number) {
            changes.push(Change { log, number, key_group: group, value });
        }
    }
}
