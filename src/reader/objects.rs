//! What readers share of objects: the drivers of their buckets, and the footers and directories that were read.
//!
//! Invariants:
//! 1. A footer or directory that is being asked for is not asked for a second time: who comes later waits for the same
//!    request. It goes on whether or not the first one is polled, and is over before anybody hears of it.
//! 2. What is kept was verified; a failure is told to who waits, and not kept.
//! 3. What is kept takes at most [`KEPT_BYTES_MAX`] and what was asked for last; the oldest goes first, and is read again
//!    should somebody need it.

use std::collections::{HashMap, VecDeque};
use std::hash::Hash;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use tidelog_upload::bucket::BucketIndex;
use tidelog_upload::{Driver, Pending, Resolver, Runtime, Store, StoreError, StoreErrorKind, UploadOptions};

use super::ReadStats;
use super::batch::ChangeBatch;
use super::unpack::{EntryRange, Unpack};
use crate::device::lock;
use crate::error::ReadError;
use crate::footer::{Footer, FooterError, PartEntry};
use crate::handle::Extent;
use crate::part::{Compression, Directory, PartError, PartId, Run};
use crate::piece::{self, Place};
use crate::types::{KeyGroupRange, LogId, SequenceNumber};

/// Threads of readers that are opened without a changelog, for each bucket.
const DOWNLOAD_THREADS: usize = 2;
/// How many bytes of footers, and of directories, are kept in memory.
const KEPT_BYTES_MAX: usize = 64 << 20;

/// An extent of a handle, or a part of one.
#[derive(Debug)]
pub(super) struct ObjectSource {
    pub log: LogId,
    /// What is read of it.
    pub key_groups: KeyGroupRange,
    pub extent: Extent,
}

/// A log's run in one part of an object.
#[derive(Clone, Debug)]
pub(super) struct PartRun {
    /// The part's number in the object.
    pub index: u32,
    /// What its checksums are bound to: the part it was first written as.
    pub part: PartId,
    /// Where the run starts in the object, in bytes.
    pub offset: u64,
    /// Where its directory is in the object.
    pub directory: Range<u64>,
    pub compression: Compression,
    pub run: Run,
}

impl ObjectSource {
    /// The runs that hold changes of the extent, checked to hold all of them. Their directories follow each other.
    pub fn runs(&self, footer: &Footer) -> Result<Vec<PartRun>, ReadError> {
        let ObjectSource { log, extent, .. } = self;
        let mut needed = Vec::new();
        let mut due = extent.first;
        for (index, &run, directory) in footer.runs_of(*log) {
            if run.end <= extent.first || run.first >= extent.end {
                continue;
            }
            if run.first > due {
                break;
            }
            due = due.max(run.end);
            let PartEntry { offset, compression, .. } = footer.parts()[index as usize];
            let (part, offset) = (footer.part_id(index), offset + run.offset);
            needed.push(PartRun { index, part, offset, directory, compression, run });
        }
        if due < extent.end {
            let what = format!("changes {due} to {} of log {log} are not in it", extent.end);
            let Place { bucket, object, .. } = piece::place(&extent.pieces, extent.footer.clone());
            return Err(ReadError::Mismatch { bucket, object, what });
        }
        Ok(needed)
    }

    /// `range` is in the object.
    fn damaged(&self, run: &PartRun, range: Range<u64>, source: PartError) -> ReadError {
        let Place { bucket, object, range: Range { start, end } } = piece::place(&self.extent.pieces, range);
        ReadError::Damaged { bucket, object, part: run.index as usize, start, end, source }
    }

    /// The whole changes that the extent stands for.
    pub fn wanted(&self) -> Range<SequenceNumber> {
        self.extent.first..self.extent.end
    }
}

/// Why something was not had. Told to all who asked for it.
#[derive(Clone, Debug)]
pub(super) enum Unread {
    Store(StoreError),
    Footer(FooterError),
    Directory(PartError),
    /// The changeset at this place in its run.
    Changeset(Range<u64>, PartError),
    Closed,
}

impl Unread {
    /// What they are told who wait for a request that could not be sent.
    fn unsent(error: &ReadError) -> Unread {
        match error {
            ReadError::Store(error) => Unread::Store(error.clone()),
            _ => Unread::Closed,
        }
    }

    /// The error of who looked for this run of this object, or for its footer.
    pub fn of(self, source: &ObjectSource, run: Option<&PartRun>) -> ReadError {
        match (self, run) {
            (Unread::Store(error), _) => error.into(),
            (Unread::Footer(error), _) => {
                let Extent { pieces, footer, .. } = &source.extent;
                let Place { bucket, object, .. } = piece::place(pieces, footer.clone());
                ReadError::Footer { bucket, object, source: error }
            }
            (Unread::Directory(error), Some(run)) => source.damaged(run, run.directory.clone(), error),
            (Unread::Changeset(range, error), Some(run)) => {
                source.damaged(run, run.offset + range.start..run.offset + range.end, error)
            }
            (Unread::Directory(_) | Unread::Changeset(..) | Unread::Closed, _) => ReadError::Closed,
        }
    }
}

/// Something that comes from a bucket, or has come.
#[derive(Debug)]
pub(super) enum Asked<T> {
    Waiting(Pending<Result<T, Unread>>),
    Here(Result<T, Unread>),
}

impl<T> Asked<T> {
    /// Whether it has come.
    pub fn is_here(&mut self) -> bool {
        if let Asked::Waiting(pending) = self
            && let Some(outcome) = pending.wait_timeout(std::time::Duration::ZERO)
        {
            *self = Asked::Here(outcome.unwrap_or(Err(Unread::Closed)));
        }
        matches!(self, Asked::Here(_))
    }

    /// Waits until it has come. May be given up and called again.
    pub async fn come(&mut self) {
        if let Asked::Waiting(pending) = self {
            let outcome = pending.await;
            *self = Asked::Here(outcome.unwrap_or(Err(Unread::Closed)));
        }
    }

    /// What has come.
    pub fn take(self) -> Result<T, Unread> {
        match self {
            Asked::Here(outcome) => outcome,
            Asked::Waiting(_) => Err(Unread::Closed),
        }
    }
}

/// The file that an object's first piece is in: a file belongs to one object.
type ObjectKey = (Arc<str>, String);
/// A run, by its object and where its directory starts there.
type RunKey = (ObjectKey, u64);
/// A bucket of a driver.
type Bucket = (Arc<Driver>, BucketIndex);

/// Buckets by URL: those of a changelog, and others once a handle names them. And what was read of their objects.
#[derive(Debug)]
pub(super) struct Objects {
    buckets: Mutex<HashMap<Arc<str>, Bucket>>,
    footers: Shelf<ObjectKey, Footer>,
    directories: Shelf<RunKey, Directory>,
}

impl Objects {
    /// Objects in the buckets of a driver, and in others.
    pub fn new(driver: Option<&Arc<Driver>>) -> Objects {
        let mut buckets = HashMap::new();
        if let Some(driver) = driver {
            let bucket = |(index, store): (usize, &Arc<dyn Store>)| {
                (Arc::from(store.url()), (Arc::clone(driver), BucketIndex(index)))
            };
            buckets.extend(driver.stores().iter().enumerate().map(bucket));
        }
        let (footers, directories) = (Shelf::default(), Shelf::default());
        Objects { buckets: Mutex::new(buckets), footers, directories }
    }

    /// Opens the buckets of an extent that are not open. One that is not there fails the requests to it, no others.
    pub fn open(&self, extent: &Extent) -> Result<(), ReadError> {
        let open = |bucket| match self.find(bucket) {
            Err(ReadError::Store(error)) if *error.kind() == StoreErrorKind::NoSuchBucket => Ok(()),
            found => found.map(drop),
        };
        extent.pieces.iter().try_for_each(|piece| open(&piece.bucket))
    }

    fn find(&self, bucket: &Arc<str>) -> Result<Bucket, ReadError> {
        let mut buckets = lock(&self.buckets);
        if let Some((driver, index)) = buckets.get(bucket) {
            return Ok((Arc::clone(driver), *index));
        }
        let store = tidelog_upload::open_store(bucket)?;
        let runtime = Runtime::Own { threads: DOWNLOAD_THREADS };
        let driver = Arc::new(Driver::start(vec![store], runtime, UploadOptions::default())?);
        buckets.insert(Arc::clone(bucket), (Arc::clone(&driver), BucketIndex(0)));
        Ok((driver, BucketIndex(0)))
    }

    /// The places of a range of the object's bytes, which are about to be asked for.
    fn places(
        &self,
        extent: &Extent,
        range: Range<u64>,
        stats: &mut ReadStats,
    ) -> Result<Vec<(Bucket, String, Range<u64>)>, ReadError> {
        let mut places = Vec::new();
        for (piece, range) in piece::locate(&extent.pieces, range) {
            places.push((self.find(&piece.bucket)?, piece.object.clone(), range));
        }
        stats.requests += places.len() as u64;
        stats.bytes += places.iter().map(|(.., range)| range.end - range.start).sum::<u64>();
        Ok(places)
    }

    /// Asks for a range of the object's bytes, wherever they are; `done` must not block.
    fn get(
        &self,
        extent: &Extent,
        range: Range<u64>,
        stats: &mut ReadStats,
        done: impl FnOnce(Result<Bytes, StoreError>) + Send + 'static,
    ) -> Result<(), ReadError> {
        Gather::get(self.places(extent, range, stats)?, done);
        Ok(())
    }

    /// The changes of a range, verified on the thread that receives them: there they are in its cache, and several ranges
    /// are looked at side by side.
    pub fn changes(
        &self,
        source: &Arc<ObjectSource>,
        range: &EntryRange,
        stats: &mut ReadStats,
    ) -> Result<Asked<ChangeBatch>, ReadError> {
        let (resolver, pending) = tidelog_upload::channel();
        let places = self.places(&source.extent, range.bytes(), stats)?;
        let (source, range) = (Arc::clone(source), range.clone());
        let unpack = move || Unpack::new(Arc::clone(&source), range.clone());
        let done = move |outcome: Result<(Bytes, Unpack), StoreError>| {
            let unpacked = outcome.map_err(Unread::Store).and_then(|(bytes, unpack)| unpack.finish(&bytes));
            resolver.resolve(unpacked);
        };
        match &places[..] {
            [((driver, bucket), object, range)] => {
                driver.get_watched(*bucket, object, range.clone(), unpack, done);
            }
            _ => Gather::get(places, move |outcome| done(outcome.map(|bytes| (bytes, unpack())))),
        }
        Ok(Asked::Waiting(pending))
    }

    /// The footer of an object. What came with it of directories is kept too.
    pub fn footer(
        &self,
        source: &ObjectSource,
        stats: &mut ReadStats,
    ) -> Result<Asked<Arc<Footer>>, ReadError> {
        let extent = &source.extent;
        let (asked, key) = self.footers.ask(object_key(extent));
        let Some(key) = key else { return Ok(asked) };
        let range = extent.end_of_object();
        let (token, footer_len) = (extent.token, (extent.footer.end - extent.footer.start) as usize);
        // The answer keeps the shelves, not the driver: that must not be dropped by a thread of its own.
        let (footers, directories, at) = (self.footers.clone(), self.directories.clone(), key.clone());
        let start = range.start;
        let sent = self.get(extent, range, stats, move |outcome| {
            let footer = outcome.map_err(Unread::Store).and_then(|mut before| {
                let bytes = before.split_off(before.len().saturating_sub(footer_len));
                let footer = Footer::decode(&bytes, Some(token)).map_err(Unread::Footer)?;
                directories.offer(&at, &footer, &before, start);
                let runs = footer.parts().iter().map(|part| size_of_val(&part.runs[..])).sum::<usize>();
                let bytes = size_of_val(footer.parts()) + runs;
                Ok((footer, bytes))
            });
            footers.put(&at, footer);
        });
        if let Err(error) = sent {
            self.footers.put(&key, Err(Unread::unsent(&error)));
            return Err(error);
        }
        Ok(asked)
    }

    /// The directories of runs that follow each other in their object.
    pub fn directories(
        &self,
        source: &ObjectSource,
        runs: &[PartRun],
        stats: &mut ReadStats,
    ) -> Result<Vec<Asked<Arc<Directory>>>, ReadError> {
        let mut asked = Vec::with_capacity(runs.len());
        let mut missing = Vec::new();
        for run in runs {
            let (directory, key) = self.directories.ask((object_key(&source.extent), run.directory.start));
            asked.push(directory);
            missing.extend(key.map(|key| (key, run.clone())));
        }
        let mut failed = None;
        for together in missing.chunk_by(|(_, run), (_, next)| run.directory.end == next.directory.start) {
            let (shelf, wanted) = (self.directories.clone(), together.to_vec());
            let range = together[0].1.directory.start..together[together.len() - 1].1.directory.end;
            let start = range.start;
            let sent = failed.is_none().then(|| {
                self.get(&source.extent, range, stats, move |outcome| {
                    let bytes = outcome.map_err(Unread::Store);
                    for (key, run) in wanted {
                        let directory = bytes.clone().and_then(|bytes| {
                            let within = |at: u64| (at - start) as usize;
                            let range = within(run.directory.start)..within(run.directory.end);
                            decode_directory(bytes.get(range).unwrap_or_default(), run.part, &run.run)
                        });
                        shelf.put(&key, directory);
                    }
                })
            });
            if let Some(Err(error)) = sent {
                failed = Some(error);
            }
            if let Some(error) = &failed {
                together.iter().for_each(|(key, _)| self.directories.put(key, Err(Unread::unsent(error))));
            }
        }
        failed.map_or(Ok(asked), Err)
    }
}

/// A directory, and the memory that it takes.
fn decode_directory(bytes: &[u8], part: PartId, run: &Run) -> Result<(Directory, usize), Unread> {
    let directory = Directory::decode(bytes, part, run).map_err(Unread::Directory)?;
    let bytes = size_of_val(directory.entries());
    Ok((directory, bytes))
}

impl Shelf<RunKey, Directory> {
    /// Keeps what is in the bytes before a footer, from `start` on, and is whole. Nobody has asked for it yet.
    fn offer(&self, object: &ObjectKey, footer: &Footer, before: &[u8], start: u64) {
        for (part, run, range) in footer.runs() {
            let Some(first) = range.start.checked_sub(start) else { continue };
            let bytes = before.get(first as usize..(range.end - start) as usize).unwrap_or_default();
            if let Ok((directory, bytes)) = decode_directory(bytes, footer.part_id(part), run) {
                let key = (object.clone(), range.start);
                let mut kept = lock(&self.0);
                if !kept.slots.contains_key(&key) {
                    kept.keep(key, Arc::new(directory), bytes);
                }
            }
        }
    }
}

fn object_key(extent: &Extent) -> ObjectKey {
    let piece = &extent.pieces[0];
    (Arc::clone(&piece.bucket), piece.object.clone())
}

/// Told what came.
type Done = Box<dyn FnOnce(Result<Bytes, StoreError>) + Send>;

/// The answers of several requests, put together when the last one has come.
struct Gather {
    left: usize,
    outcome: Result<Vec<Bytes>, StoreError>,
    done: Option<Done>,
}

impl Gather {
    /// Asks for all of them.
    fn get(
        places: Vec<(Bucket, String, Range<u64>)>,
        done: impl FnOnce(Result<Bytes, StoreError>) + Send + 'static,
    ) {
        if places.is_empty() {
            return done(Ok(Bytes::new()));
        }
        let (left, outcome) = (places.len(), Ok(vec![Bytes::new(); places.len()]));
        let gather = Arc::new(Mutex::new(Gather { left, outcome, done: Some(Box::new(done)) }));
        for (index, ((driver, bucket), object, range)) in places.into_iter().enumerate() {
            let gather = Arc::clone(&gather);
            driver.get(bucket, &object, range, move |outcome| Gather::came(&gather, index, outcome));
        }
    }

    fn came(gather: &Mutex<Gather>, index: usize, outcome: Result<Bytes, StoreError>) {
        let mut all = lock(gather);
        all.left -= 1;
        match (outcome, &mut all.outcome) {
            (Ok(bytes), Ok(pieces)) => pieces[index] = bytes,
            (Err(error), Ok(_)) => all.outcome = Err(error),
            (_, Err(_)) => {}
        }
        if all.left == 0
            && let Some(done) = all.done.take()
        {
            let outcome = std::mem::replace(&mut all.outcome, Ok(Vec::new()));
            drop(all);
            done(outcome.map(|mut pieces| match &mut pieces[..] {
                [piece] => std::mem::take(piece),
                _ => pieces.concat().into(),
            }));
        }
    }
}

/// What was read, by what it is, until it is too much. Clones are the same shelf.
#[derive(Debug)]
struct Shelf<K, V>(Arc<Mutex<Kept<K, V>>>);

#[derive(Debug)]
struct Kept<K, V> {
    slots: HashMap<K, Slot<V>>,
    /// What is here, the oldest first, with the bytes that it takes.
    order: VecDeque<(K, usize)>,
    bytes: usize,
}

#[derive(Debug)]
enum Slot<V> {
    Asked(Vec<Resolver<Result<Arc<V>, Unread>>>),
    Here(Arc<V>),
}

impl<K, V> Default for Shelf<K, V> {
    fn default() -> Self {
        let kept = Kept { slots: HashMap::new(), order: VecDeque::new(), bytes: 0 };
        Shelf(Arc::new(Mutex::new(kept)))
    }
}

impl<K, V> Clone for Shelf<K, V> {
    fn clone(&self) -> Self {
        Shelf(Arc::clone(&self.0))
    }
}

impl<K: Clone + Eq + Hash, V> Shelf<K, V> {
    /// What has this key; if nobody has asked for it, the caller must fetch it, and [put](Shelf::put) it here.
    fn ask(&self, key: K) -> (Asked<Arc<V>>, Option<K>) {
        let mut kept = lock(&self.0);
        if let Some(Slot::Here(value)) = kept.slots.get(&key) {
            return (Asked::Here(Ok(Arc::clone(value))), None);
        }
        let (resolver, pending) = tidelog_upload::channel();
        let first = match kept.slots.get_mut(&key) {
            Some(Slot::Asked(waiting)) => {
                waiting.push(resolver);
                None
            }
            _ => {
                kept.slots.insert(key.clone(), Slot::Asked(vec![resolver]));
                Some(key)
            }
        };
        (Asked::Waiting(pending), first)
    }

    /// Answers who asked, and keeps what came with the bytes that it takes.
    fn put(&self, key: &K, outcome: Result<(V, usize), Unread>) {
        let mut kept = lock(&self.0);
        let Some(Slot::Asked(waiting)) = kept.slots.remove(key) else { return };
        let outcome = outcome.map(|(value, bytes)| {
            let value = Arc::new(value);
            kept.keep(key.clone(), Arc::clone(&value), bytes);
            value
        });
        drop(kept);
        for resolver in waiting {
            resolver.resolve(outcome.clone());
        }
    }
}

impl<K: Clone + Eq + Hash, V> Kept<K, V> {
    fn keep(&mut self, key: K, value: Arc<V>, bytes: usize) {
        self.slots.insert(key.clone(), Slot::Here(value));
        self.order.push_back((key, bytes));
        self.bytes += bytes;
        while self.bytes > KEPT_BYTES_MAX
            && self.order.len() > 1
            && let Some((oldest, bytes)) = self.order.pop_front()
        {
            self.bytes -= bytes;
            self.slots.remove(&oldest);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_many_ask_for_is_fetched_once() {
        let shelf = Shelf::default();
        let (mut first, fetch) = shelf.ask(7);
        let (mut second, nobody) = shelf.ask(7);
        assert_eq!((fetch, nobody), (Some(7), None));
        assert!(!first.is_here() && !second.is_here());
        shelf.put(&7, Ok(("seven", 10)));
        let (third, nobody) = shelf.ask(7);
        assert_eq!(nobody, None);
        assert!(first.is_here() && second.is_here());
        for asked in [first, second, third] {
            assert_eq!(*asked.take().unwrap(), "seven");
        }
    }

    #[test]
    fn a_failure_is_told_to_all_who_wait_and_not_kept() {
        let shelf: Shelf<u32, &str> = Shelf::default();
        let (mut first, _) = shelf.ask(7);
        let (mut second, _) = shelf.ask(7);
        shelf.put(&7, Err(Unread::Closed));
        assert!(first.is_here() && second.is_here());
        assert!(first.take().is_err() && second.take().is_err());
        assert_eq!(shelf.ask(7).1, Some(7), "the next one tries again");
    }

    #[test]
    fn the_oldest_goes_when_it_is_too_much() {
        let shelf = Shelf::default();
        for key in 0..4 {
            let _ = shelf.ask(key);
            shelf.put(&key, Ok((key, KEPT_BYTES_MAX / 3)));
        }
        let here = |key| shelf.ask(key).1.is_none();
        assert_eq!([3, 2, 1, 0].map(here), [true, true, true, false]);
        let _ = shelf.ask(9);
        shelf.put(&9, Ok((9, 2 * KEPT_BYTES_MAX)));
        assert_eq!([9, 1].map(here), [true, false], "what was asked for last stays, whatever it takes");
    }
}
