//! What is compacted: the runs of handles in objects, found by their footers, read and verified one by one.
//!
//! Which of them go together into a part is decided elsewhere.

use std::cell::Cell;
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::ops::{Range, RangeInclusive};
use std::sync::Arc;

use bytes::Bytes;
use tidelog_upload::bucket::BucketIndex;
use tidelog_upload::{Driver, Runtime, UploadOptions};

use super::ahead::Ahead;
use crate::error::ReadError;
use crate::footer::{Footer, PartEntry};
use crate::handle::{ChangelogHandle, Extent};
use crate::part::{Changeset, Compression, Directory, DirectoryEntry, PartError, PartId, Run};
use crate::piece::{self, Place};
use crate::types::{KeyGroup, LogId, SequenceNumber};

/// Requests under way at once.
pub(super) const READ_AHEAD: usize = 16;
/// Threads for a bucket that is only read.
const DOWNLOAD_THREADS: usize = 1;
/// Changesets that are no further apart are read by one request.
const GAP_BYTES_MAX: u64 = 64 << 10;

/// Buckets by URL.
pub(super) struct Buckets {
    open: HashMap<Arc<str>, (Arc<Driver>, BucketIndex)>,
    requests: Cell<u64>,
    bytes: Cell<u64>,
}

impl Buckets {
    /// The bucket of a driver, and those that handles name.
    pub(super) fn open(driver: &Arc<Driver>, sources: &[Source]) -> Result<Buckets, ReadError> {
        let own = Arc::from(driver.stores()[0].url());
        let mut open = HashMap::from([(own, (Arc::clone(driver), BucketIndex(0)))]);
        let extents = sources.iter().flat_map(|source| source.handle.extents());
        for bucket in extents.flat_map(|extent| &extent.pieces).map(|piece| &piece.bucket) {
            if !open.contains_key(bucket) {
                let store = tidelog_upload::open_store(bucket)?;
                let runtime = Runtime::Own { threads: DOWNLOAD_THREADS };
                let driver = Driver::start(vec![store], runtime, UploadOptions::default())?;
                open.insert(Arc::clone(bucket), (Arc::new(driver), BucketIndex(0)));
            }
        }
        Ok(Buckets { open, requests: Cell::new(0), bytes: Cell::new(0) })
    }

    /// Requests so far, and the bytes that they brought.
    pub(super) fn read(&self) -> (u64, u64) {
        (self.requests.get(), self.bytes.get())
    }

    /// A range of the object's bytes, wherever they are. It is inside of the object.
    async fn get(&self, extent: &Extent, range: Range<u64>) -> Result<Bytes, ReadError> {
        let mut download = Vec::new();
        for (piece, range) in piece::locate(&extent.pieces, range) {
            let (driver, bucket) = &self.open[&piece.bucket];
            self.requests.update(|requests| requests + 1);
            self.bytes.update(|bytes| bytes + (range.end - range.start));
            let (resolver, pending) = tidelog_upload::channel();
            driver.get(*bucket, &piece.object, range, move |outcome| resolver.resolve(outcome));
            download.push(pending);
        }
        let mut read = Vec::with_capacity(download.len());
        for pending in download {
            read.push(pending.await.map_err(|_| ReadError::Closed)??);
        }
        match &mut read[..] {
            [bytes] => Ok(std::mem::take(bytes)),
            _ => Ok(read.concat().into()),
        }
    }
}

/// What becomes one handle: those of a log that hold changes of the same key groups, put together, as far as these are wanted.
pub(super) struct Source {
    pub(super) handle: ChangelogHandle,
    /// In which round it is rewritten: in each, a log has one.
    pub(super) round: usize,
    /// Where the log stands among those that were given.
    pub(super) place: usize,
    /// The handles that were given are for these key groups alone. There may be others in their objects, all the same.
    pub(super) whole: bool,
    /// In the order of their numbers: together they hold all that the handle does.
    pub(super) runs: Vec<SourceRun>,
}

impl Source {
    /// Group keys of changesets that hold data.
    pub(super) fn data(&self) -> RangeInclusive<u32> {
        let key_groups = self.handle.key_groups();
        data_key(key_groups.first())..=data_key(key_groups.last())
    }

    /// The bytes of its runs.
    pub(super) fn bytes(&self) -> u64 {
        self.runs.iter().fold(0, |bytes, run| bytes.saturating_add(run.len()))
    }
}

fn data_key(group: KeyGroup) -> u32 {
    u32::from(group.0) + 1
}

fn key_of(entry: &DirectoryEntry) -> u32 {
    entry.group.map_or(0, data_key)
}

/// A part of an object of which everything survives, so that the bucket can copy it.
#[derive(Clone, Debug)]
pub(super) struct WholePart {
    /// Where its bytes are.
    pub(super) file: String,
    pub(super) range: Range<u64>,
    /// The part that its checksums are bound to.
    pub(super) origin: PartId,
    pub(super) compression: Compression,
    pub(super) runs: Vec<Run>,
    /// Those of the runs, back to back.
    pub(super) directories: Vec<u8>,
}

/// Which parts are worth a copy.
pub(super) struct Copying<'a> {
    /// The bucket in which they have to be.
    pub(super) bucket: &'a str,
    /// The least length of one, in bytes.
    pub(super) part_bytes_min: u64,
    /// The least length of its runs, on average, in bytes: smaller ones are better put together.
    pub(super) run_bytes_min: u64,
}

impl Copying<'_> {
    /// The file and the range of a part's bytes, if it is worth it.
    fn place(&self, extent: &Extent, part: &PartEntry) -> Option<(String, Range<u64>)> {
        let runs = part.runs.len() as u64;
        if part.len < self.part_bytes_min || runs == 0 || part.len / runs < self.run_bytes_min {
            return None;
        }
        let mut places = piece::locate(&extent.pieces, part.offset..part.offset + part.len);
        let (piece, range) = places.next()?;
        let alone = places.next().is_none() && *piece.bucket == *self.bucket;
        alone.then(|| (piece.object.clone(), range))
    }
}

/// A log's run in one part of an object.
#[derive(Clone, Debug)]
pub(super) struct SourceRun {
    /// Which of the handle's extents.
    extent: usize,
    /// The part's place in its object.
    part_index: usize,
    /// Which of the whole parts it is in, if it is.
    pub(super) whole_part: Option<usize>,
    part: PartId,
    /// Where the run starts in the object, in bytes.
    offset: u64,
    /// Where its directory is in the object.
    directory: Range<u64>,
    /// What came of that with the footer.
    directory_bytes: Option<Bytes>,
    pub(super) compression: Compression,
    run: Run,
    /// What the handle takes of it.
    pub(super) first: SequenceNumber,
    pub(super) end: SequenceNumber,
}

impl SourceRun {
    /// Whether the handle takes all of it.
    fn is_whole(&self) -> bool {
        (self.first, self.end) == (self.run.first, self.run.end)
    }

    /// `range` is in the object.
    fn damaged(&self, handle: &ChangelogHandle, range: Range<u64>, source: PartError) -> ReadError {
        damaged(&handle.extents()[self.extent], self.part_index, range, source)
    }

    /// The length of the run in bytes.
    pub(super) fn len(&self) -> u64 {
        self.run.len
    }
}

/// Changesets to be read.
#[derive(Clone, Debug)]
pub(super) struct Wanted {
    pub(super) metadata: bool,
    /// By group keys.
    pub(super) data: RangeInclusive<u32>,
}

impl Wanted {
    fn contains(&self, key: u32) -> bool {
        if key == 0 { self.metadata } else { self.data.contains(&key) }
    }
}

/// Changesets of a run by group key, verified.
pub(super) struct Loaded {
    pub(super) changesets: Vec<(u32, Changeset)>,
    /// Their length in the part.
    pub(super) bytes: u64,
}

/// Reads the footers of all objects, each once, and fills in the sources' runs. Returns the parts that are to be copied.
pub(super) async fn find_runs(
    buckets: &Buckets,
    sources: &mut [Source],
    copying: Option<&Copying<'_>>,
) -> Result<Vec<WholePart>, ReadError> {
    let (found, whole) = found_runs(buckets, sources, copying).await?;
    for (source, found) in sources.iter_mut().zip(found) {
        source.runs = found.into_iter().flatten().collect();
    }
    Ok(whole)
}

/// The runs of each source and extent, and the parts that are to be copied.
async fn found_runs(
    buckets: &Buckets,
    sources: &[Source],
    copying: Option<&Copying<'_>>,
) -> Result<(Vec<Vec<Vec<SourceRun>>>, Vec<WholePart>), ReadError> {
    let mut whole = Vec::new();
    // By object, the extents that name it, as indexes of the source and of the extent.
    let mut objects: Vec<(&Extent, Vec<(usize, usize)>)> = Vec::new();
    let mut by_name: HashMap<(&str, &str), usize> = HashMap::new();
    let mut found: Vec<Vec<Vec<SourceRun>>> = Vec::new();
    for (source, handle) in sources.iter().map(|source| &source.handle).enumerate() {
        found.push(vec![Vec::new(); handle.extents().len()]);
        for (index, extent) in handle.extents().iter().enumerate() {
            // A file belongs to one object.
            let name = (&*extent.pieces[0].bucket, extent.object());
            let object = *by_name.entry(name).or_insert_with(|| {
                objects.push((extent, Vec::new()));
                objects.len() - 1
            });
            objects[object].1.push((source, index));
        }
    }
    let mut footers = Ahead::new();
    let (mut asked, mut known) = (objects.iter(), objects.iter());
    loop {
        while footers.len() < READ_AHEAD
            && let Some((extent, _)) = asked.next()
        {
            footers.push(read_footer(buckets, extent));
        }
        let Some(footer) = footers.next().await else { break };
        let end = footer?;
        let (extent, users) = known.next().expect("a footer for each object");
        for &(source, index) in users {
            let handle = &sources[source].handle;
            found[source][index] = runs_of(&end, handle, index)?;
        }
        let footer = &end.footer;
        let Some(copying) = copying else { continue };
        // By part and log, who alone takes all of the run.
        let mut takers = vec![BTreeMap::new(); footer.parts().len()];
        for &(source, index) in users.iter().filter(|(source, _)| sources[*source].whole) {
            for run in found[source][index].iter().filter(|run| run.is_whole()) {
                match takers[run.part_index].entry(run.run.log) {
                    Entry::Vacant(entry) => drop(entry.insert(Some(source))),
                    Entry::Occupied(mut entry) => drop(entry.insert(None)),
                }
            }
        }
        let mut candidates: BTreeMap<usize, WholePart> = BTreeMap::new();
        for (index, (part, takers)) in footer.parts().iter().zip(&takers).enumerate() {
            if takers.len() == part.runs.len()
                && takers.values().all(Option::is_some)
                && let Some((file, range)) = copying.place(extent, part)
            {
                let (origin, runs) = (footer.part_id(index as u32), part.runs.clone());
                let (compression, directories) = (part.compression, Vec::new());
                let part = WholePart { file, range, origin, compression, runs, directories };
                candidates.insert(index, part);
            }
        }
        if !candidates.is_empty() {
            let all = buckets.get(extent, footer.parts_len()..footer.start()).await?;
            let takes_all = |part: usize, log: LogId, directory: &Directory| {
                let taker = takers[part].get(&log).copied().flatten();
                let data = taker.map(|source| sources[source].data());
                let is_wanted = |key| key == 0 || data.as_ref().is_some_and(|data| data.contains(&key));
                directory.entries().iter().all(|entry| is_wanted(key_of(entry)))
            };
            take_directories(extent, footer, &all, &mut candidates, takes_all)?;
        }
        let mut numbers = vec![None; footer.parts().len()];
        for (index, part) in candidates {
            numbers[index] = Some(whole.len());
            whole.push(part);
        }
        for &(source, index) in users {
            for run in &mut found[source][index] {
                let takes = takers[run.part_index].get(&run.run.log) == Some(&Some(source));
                run.whole_part = numbers[run.part_index].filter(|_| takes);
            }
        }
    }
    Ok((found, whole))
}

/// The last bytes of an object.
struct EndOfObject {
    footer: Footer,
    /// Some of what stands before the footer, from `start` on.
    before: Bytes,
    start: u64,
}

async fn read_footer(buckets: &Buckets, extent: &Extent) -> Result<EndOfObject, ReadError> {
    let range = extent.end_of_object();
    let mut before = buckets.get(extent, range.clone()).await?;
    let bytes = before.split_off((extent.footer.start - range.start) as usize);
    let Place { bucket, object, .. } = piece::place(&extent.pieces, extent.footer.clone());
    let footer = match Footer::decode(&bytes, Some(extent.token)) {
        Ok(footer) => footer,
        Err(source) => return Err(ReadError::Footer { bucket, object, source }),
    };
    if footer.start() != extent.footer.start {
        let what = format!("its footer should be at {}, not at {}", footer.start(), extent.footer.start);
        return Err(ReadError::Mismatch { bucket, object, what });
    }
    Ok(EndOfObject { footer, before, start: range.start })
}

/// Gives parts, by their indexes, the directories of their runs, verified; `all` are those of the object. Those of which not
/// everything is wanted are left out.
fn take_directories(
    extent: &Extent,
    footer: &Footer,
    all: &[u8],
    parts: &mut BTreeMap<usize, WholePart>,
    takes_all: impl Fn(usize, LogId, &Directory) -> bool,
) -> Result<(), ReadError> {
    for (index, run, range) in footer.runs() {
        let index = index as usize;
        let Some(whole) = parts.get_mut(&index) else { continue };
        let within = |at: u64| (at - footer.parts_len()) as usize;
        let bytes = &all[within(range.start)..within(range.end)];
        let directory = Directory::decode(bytes, whole.origin, run)
            .map_err(|source| damaged(extent, index, range, source))?;
        whole.directories.extend_from_slice(bytes);
        if !takes_all(index, run.log, &directory) {
            parts.remove(&index);
        }
    }
    Ok(())
}

/// The runs that hold the changes of an extent, checked to hold all of them.
fn runs_of(
    end_of_object: &EndOfObject,
    handle: &ChangelogHandle,
    extent_index: usize,
) -> Result<Vec<SourceRun>, ReadError> {
    let EndOfObject { footer, before, start } = end_of_object;
    let extent = &handle.extents()[extent_index];
    let mut runs = Vec::new();
    let mut due = extent.first;
    for (index, &run, directory) in footer.runs_of(handle.log()) {
        let part = &footer.parts()[index as usize];
        if run.end <= due {
            continue;
        }
        if run.first > due || due >= extent.end {
            break;
        }
        let end = run.end.min(extent.end);
        runs.push(SourceRun {
            extent: extent_index,
            part_index: index as usize,
            whole_part: None,
            part: footer.part_id(index),
            offset: part.offset + run.offset,
            directory_bytes: directory.start.checked_sub(*start).map(|first| {
                let first = first as usize;
                Bytes::copy_from_slice(&before[first..first + run.directory_len as usize])
            }),
            directory,
            compression: part.compression,
            run,
            first: due,
            end,
        });
        due = end;
    }
    if due < extent.end {
        let what = format!("changes {due} to {} of log {} are not in it", extent.end, handle.log());
        let Place { bucket, object, .. } = piece::place(&extent.pieces, extent.footer.clone());
        return Err(ReadError::Mismatch { bucket, object, what });
    }
    Ok(runs)
}

/// Reads a run's directory, and says which of its changesets are wanted.
pub(super) async fn load_directory(
    buckets: &Buckets,
    handle: &ChangelogHandle,
    run: &SourceRun,
    wanted: &Wanted,
) -> Result<Vec<(u32, Range<u64>)>, ReadError> {
    let entries = wanted_entries(buckets, handle, run, wanted).await?;
    Ok(entries.into_iter().map(|entry| (key_of(&entry), entry.range)).collect())
}

/// Reads the wanted changesets of a run, and verifies them.
pub(super) async fn load(
    buckets: &Buckets,
    handle: &ChangelogHandle,
    run: &SourceRun,
    wanted: Wanted,
) -> Result<Loaded, ReadError> {
    match load_once(buckets, handle, run, &wanted).await {
        // Damage on the way is told from damage in the store by asking again, once.
        Err(ReadError::Damaged { .. }) => {
            let again = SourceRun { directory_bytes: None, ..run.clone() };
            load_once(buckets, handle, &again, &wanted).await
        }
        loaded => loaded,
    }
}

async fn load_once(
    buckets: &Buckets,
    handle: &ChangelogHandle,
    run: &SourceRun,
    wanted: &Wanted,
) -> Result<Loaded, ReadError> {
    let extent = &handle.extents()[run.extent];
    let mut loaded = Loaded { changesets: Vec::new(), bytes: 0 };
    let entries = wanted_entries(buckets, handle, run, wanted).await?;
    for span in entries.chunk_by(|a, b| b.range.start - a.range.end <= GAP_BYTES_MAX) {
        let (start, end) = (span[0].range.start, span[span.len() - 1].range.end);
        let bytes = buckets.get(extent, run.offset + start..run.offset + end).await?;
        loaded.add(handle, run, span, &bytes, start)?;
    }
    Ok(loaded)
}

impl Loaded {
    /// Adds changesets; `bytes` are those of the run from `start` on.
    fn add(
        &mut self,
        handle: &ChangelogHandle,
        run: &SourceRun,
        entries: &[DirectoryEntry],
        bytes: &Bytes,
        start: u64,
    ) -> Result<(), ReadError> {
        for entry in entries {
            let Range { start: first, end } = entry.range;
            let piece = bytes.slice((first - start) as usize..(end - start) as usize);
            let changeset = Changeset::decode(piece, run.part, handle.log(), entry.group, run.compression)
                .and_then(|set| set.check_numbers(run.run.first..run.run.end).map(|()| set))
                .map_err(|source| run.damaged(handle, run.offset + first..run.offset + end, source))?;
            self.changesets.push((key_of(entry), changeset));
            self.bytes += end - first;
        }
        Ok(())
    }
}

async fn wanted_entries(
    buckets: &Buckets,
    handle: &ChangelogHandle,
    run: &SourceRun,
    wanted: &Wanted,
) -> Result<Vec<DirectoryEntry>, ReadError> {
    let bytes = match &run.directory_bytes {
        Some(bytes) => bytes.clone(),
        None => buckets.get(&handle.extents()[run.extent], run.directory.clone()).await?,
    };
    let directory = Directory::decode(&bytes, run.part, &run.run)
        .map_err(|source| run.damaged(handle, run.directory.clone(), source))?;
    Ok(directory.entries().iter().filter(|entry| wanted.contains(key_of(entry))).cloned().collect())
}

/// `range` is in the object.
fn damaged(extent: &Extent, part: usize, range: Range<u64>, source: PartError) -> ReadError {
    let Place { bucket, object, range: Range { start, end } } = piece::place(&extent.pieces, range);
    ReadError::Damaged { bucket, object, part, start, end, source }
}
