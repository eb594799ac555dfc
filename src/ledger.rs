//! The manifest of one directory at work: the state that its records add up to, and the file that keeps them.
//!
//! Shared by whoever has something to record: the spiller (segments), the changelog (logs), the uploader (objects,
//! truncations, releases). What the records say is in manifest.rs, how the file survives a crash in the io crate.
//!
//! A record is durable when [`record`](Ledger::record) returns `Ok`, and only then may its effect be carried out. After a
//! failed append the end of the file is unknown, so the next one writes the whole state anew. What only spares work later
//! is [noted](Ledger::note), and becomes durable with the next record. When the device is out of
//! service the ledger is *detached*: it goes on in memory, since persists do.

use std::collections::BTreeSet;
use std::fmt;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::Mutex;

use tidelog_io::directory::Manifest;
use tidelog_io::segment::Journal;

use crate::checkpoint::Request;
use crate::device::lock;
use crate::error::PersistError;
use crate::handle::{ChangelogHandle, Extent};
use crate::manifest::{LogExtent, LogState, ManifestRecord, ManifestState};
use crate::types::{LogId, SequenceNumber};

/// A manifest that has grown to this many bytes beyond its last rewriting is rewritten when it has also doubled.
const GROWTH_BYTES: u64 = 1 << 20;

/// The manifest of one directory.
pub(crate) struct Ledger {
    inner: Mutex<Inner>,
}

struct Inner {
    state: ManifestState,
    manifest: Manifest,
    /// The length of the file after its last rewriting.
    rewritten_bytes: u64,
    /// Records for the next append.
    noted: Vec<Vec<u8>>,
    /// The end of the file is unknown.
    broken: bool,
    /// Completed objects of which the file may not know that.
    unwritten: BTreeSet<String>,
    /// Released holders of which the file may not know that.
    unforgotten: BTreeSet<String>,
    detached: Option<Detached>,
}

/// What the file says for ever, since nothing newer is written to it any more.
#[derive(Debug, Default)]
struct Detached {
    /// Uploads that count as unfinished, or may: the next open removes their objects.
    uploads: BTreeSet<String>,
    /// What the file should say, as long as it may not know of a completed object.
    late: Option<Vec<Vec<u8>>>,
    /// Objects that hold changes of its logs.
    objects: BTreeSet<String>,
    /// Holders that will be back.
    holders: BTreeSet<String>,
}

impl fmt::Debug for Ledger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ledger").finish_non_exhaustive()
    }
}

impl Ledger {
    pub fn new(state: ManifestState, manifest: Manifest) -> Ledger {
        let rewritten_bytes = manifest.len_bytes();
        let inner = Inner {
            state,
            manifest,
            rewritten_bytes,
            noted: Vec::new(),
            broken: false,
            unwritten: BTreeSet::new(),
            unforgotten: BTreeSet::new(),
            detached: None,
        };
        Ledger { inner: Mutex::new(inner) }
    }

    /// Looks at the state.
    pub fn read<T>(&self, look: impl FnOnce(&ManifestState) -> T) -> T {
        look(&lock(&self.inner).state)
    }

    /// The handle for a request, from what is known of completed objects.
    pub fn handle(&self, request: &Request) -> Result<ChangelogHandle, PersistError> {
        let Request { log, from, to, .. } = *request;
        let inner = lock(&self.inner);
        if let (Some(detached), Some(known)) = (&inner.detached, inner.state.logs().get(&log))
            && let Some(doomed) =
                overlapping(known, from, to).find(|extent| detached.uploads.contains(&extent.object))
        {
            let source = Arc::new(io::Error::other("the directory went out of service before"));
            return Err(PersistError::Manifest { object: doomed.object.clone(), source });
        }
        handle_in(&inner.state, log, from, to)
    }

    /// Whether objects hold all that a request asks for, or nobody can say any more.
    pub fn covers(&self, request: &Request) -> bool {
        let inner = lock(&self.inner);
        let known = inner.state.logs().get(&request.log);
        known.is_none_or(|log| {
            request.from == request.to || log.missing_from(request.from).start >= request.to
        })
    }

    /// Adds records and makes them durable, all or none as far as readers of the file can tell.
    ///
    /// # Errors
    /// What the file system says. The state has taken the records all the same; they become durable with the next success.
    ///
    /// # Panics
    /// If a record contradicts the state: a bug, and better loud than on disk.
    pub fn record(&self, records: Vec<ManifestRecord>) -> io::Result<()> {
        let mut inner = lock(&self.inner);
        let mut encoded = std::mem::take(&mut inner.noted);
        for record in records {
            encoded.push(record.encode());
            match (&record, &inner.detached) {
                (ManifestRecord::ObjectCompleted(object), None) => {
                    inner.unwritten.insert(object.object.clone());
                }
                (ManifestRecord::HolderReleased { holder }, None) => {
                    inner.unforgotten.insert(holder.clone());
                }
                _ => {}
            }
            inner.apply(record);
        }
        if inner.detached.is_some() {
            return Ok(());
        }
        let doubled = inner.manifest.len_bytes() > 2 * inner.rewritten_bytes + GROWTH_BYTES;
        if inner.broken || doubled || inner.manifest.is_poisoned() {
            return inner.rewrite();
        }
        let slices: Vec<&[u8]> = encoded.iter().map(Vec::as_slice).collect();
        if let Err(error) = inner.manifest.append(&slices) {
            tracing::warn!(%error, "the manifest could not be appended to; writing it anew");
            metrics::counter!("tidelog_manifest_failures_total").increment(1);
            inner.broken = true;
            return inner.rewrite();
        }
        inner.written();
        Ok(())
    }

    /// Adds a record that may be lost in a crash: it becomes durable with the next one that must not.
    ///
    /// # Panics
    /// As [`record`](Self::record).
    pub fn note(&self, record: ManifestRecord) {
        let mut inner = lock(&self.inner);
        if inner.detached.is_none() {
            inner.noted.push(record.encode());
        }
        inner.apply(record);
    }

    /// Makes all that was ever recorded durable, in the fewest bytes, so that any later damage to it is noticed.
    ///
    /// # Errors
    /// What the file system says.
    pub fn seal(&self) -> io::Result<()> {
        let mut inner = lock(&self.inner);
        if inner.detached.is_none() {
            return inner.rewrite();
        }
        inner.write_late();
        Ok(())
    }

    /// Makes sure that nothing recorded is only in memory, but for what was since the device went out of service.
    ///
    /// # Errors
    /// What the file system says.
    pub fn settle(&self) -> io::Result<()> {
        let mut inner = lock(&self.inner);
        if inner.detached.is_some() {
            inner.write_late();
        } else if inner.broken {
            inner.rewrite()?;
        }
        Ok(())
    }

    /// The device is out of service: go on in memory.
    pub fn detach(&self) {
        let mut inner = lock(&self.inner);
        if inner.detached.is_some() {
            return;
        }
        let unfinished = |object: &&String| !inner.state.objects().contains_key(*object);
        let unfinished = inner.state.uploads().keys().filter(unfinished);
        let uploads = unfinished.chain(&inner.unwritten).cloned().collect();
        let objects = inner.state.objects().keys().cloned().collect();
        let late = (!inner.unwritten.is_empty()).then(|| inner.snapshot());
        let holders = inner.state.holders().keys().chain(&inner.unforgotten).cloned().collect();
        inner.detached = Some(Detached { uploads, late, objects, holders });
        inner.write_late();
    }

    /// Whether the ledger goes on in memory alone.
    pub fn is_detached(&self) -> bool {
        lock(&self.inner).detached.is_some()
    }

    /// Whether the next open will remove the object, whatever becomes of it now.
    pub fn dooms(&self, object: &str) -> bool {
        lock(&self.inner).detached.as_ref().is_some_and(|detached| detached.uploads.contains(object))
    }

    /// Whether the next open may find the holder, though it is released now.
    pub fn recalls(&self, holder: &str) -> bool {
        lock(&self.inner).detached.as_ref().is_some_and(|detached| detached.holders.contains(holder))
    }

    /// Whether the next open may rely on the object, whatever becomes of it now.
    pub fn relies_on(&self, object: &str) -> bool {
        lock(&self.inner).detached.as_ref().is_some_and(|detached| detached.objects.contains(object))
    }
}

/// The handle for the changes `[from, to)` of `log`, from what `state` knows of completed objects.
pub(crate) fn handle_in(
    state: &ManifestState,
    log: LogId,
    from: SequenceNumber,
    to: SequenceNumber,
) -> Result<ChangelogHandle, PersistError> {
    let Some(known) = state.logs().get(&log) else {
        return Err(PersistError::OutOfRange { log, from, start: to, end: to });
    };
    if let Some((range, object)) = released_in(state, log, from, to) {
        return Err(PersistError::Released { log, from: range.start, to: range.end, object });
    }
    ChangelogHandle::new(log, &known.name, known.key_groups, from, to, extents_in(state, log, from, to))
        .map_err(|_| PersistError::OutOfRange { log, from, start: known.truncated, end: to })
}

/// What completed objects hold of the changes `[from, to)` of `log`: sorted, with holes where they hold nothing.
pub(crate) fn extents_in(
    state: &ManifestState,
    log: LogId,
    from: SequenceNumber,
    to: SequenceNumber,
) -> Vec<Extent> {
    let known = state.logs().get(&log).into_iter();
    let extents = known.flat_map(|known| overlapping(known, from, to));
    let extents = extents.filter(|extent| state.may_refer(log, &extent.object)).map(|extent| {
        let object = &state.objects()[&extent.object];
        Extent {
            pieces: object.pieces.clone(),
            footer: object.footer.clone(),
            token: object.token,
            first: extent.first.max(from),
            end: extent.end.min(to),
        }
    });
    extents.collect()
}

/// What of the changes `[from, to)` of `log` is in objects that a registry has let go of, from the first to the last, and
/// the first such object.
pub(crate) fn released_in(
    state: &ManifestState,
    log: LogId,
    from: SequenceNumber,
    to: SequenceNumber,
) -> Option<(Range<SequenceNumber>, String)> {
    let known = state.logs().get(&log)?;
    let gone = || overlapping(known, from, to).filter(|extent| !state.may_refer(log, &extent.object));
    let (first, last) = (gone().next()?, gone().last()?);
    Some((first.first.max(from)..last.end.min(to), first.object.clone()))
}

/// What objects hold of the changes `[from, to)` of a log.
fn overlapping(
    known: &LogState,
    from: SequenceNumber,
    to: SequenceNumber,
) -> impl Iterator<Item = &LogExtent> {
    known.extents.iter().filter(move |extent| from < to && extent.first < to && extent.end > from)
}

impl Inner {
    fn apply(&mut self, record: ManifestRecord) {
        if let Err(error) = self.state.apply(record) {
            panic!("the manifest was to record an impossible thing: {error}");
        }
    }

    fn rewrite(&mut self) -> io::Result<()> {
        self.broken = true;
        self.noted.clear();
        self.manifest.rewrite(&self.snapshot())?;
        self.broken = false;
        self.written();
        self.rewritten_bytes = self.manifest.len_bytes();
        Ok(())
    }

    /// The file knows all.
    fn written(&mut self) {
        self.unwritten.clear();
        self.unforgotten.clear();
    }

    fn snapshot(&self) -> Vec<Vec<u8>> {
        self.state.snapshot().iter().map(ManifestRecord::encode).collect()
    }

    /// Writes what could not be written before the device went out of service. It may be at any later time: nothing on
    /// the disk changes any more, and no object that the file may know is deleted.
    fn write_late(&mut self) {
        let Some(Detached { uploads, late, .. }) = &mut self.detached else { return };
        let Some(records) = late else { return };
        if self.manifest.rewrite(records).is_ok() {
            *late = None;
            uploads.retain(|object| !self.unwritten.contains(object));
        }
    }
}

/// The segments' part of the manifest.
#[derive(Debug)]
pub(crate) struct LedgerJournal {
    ledger: Arc<Ledger>,
    /// A use that is in the state, but did not begin. Recovery relies on a use with a later one behind it having blocks.
    unused: Option<(u32, u64)>,
}

impl LedgerJournal {
    pub fn new(ledger: Arc<Ledger>) -> LedgerJournal {
        LedgerJournal { ledger, unused: None }
    }
}

impl Journal for LedgerJournal {
    fn acquired(&mut self, segment: u32, epoch: u64) -> io::Result<()> {
        let mut records = Vec::new();
        if let Some((segment, epoch)) = self.unused.take() {
            records.push(ManifestRecord::SegmentReleased { segment, epoch });
        }
        records.push(ManifestRecord::SegmentAcquired { segment, epoch });
        self.ledger.record(records).inspect_err(|_| self.unused(segment, epoch))
    }

    fn unused(&mut self, segment: u32, epoch: u64) {
        self.unused = Some((segment, epoch));
    }

    fn cut(&mut self, epoch_below: u64, number: u64) -> io::Result<()> {
        self.ledger.record(vec![ManifestRecord::Cut { epoch_below, number }])
    }
}
