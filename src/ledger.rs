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
use crate::handle::{ChangelogHandle, EXTENTS_MAX, Extent, HANDLE_BYTES_MAX, HANDLE_PIECES_MAX};
use crate::manifest::{LogExtent, LogState, ManifestRecord, ManifestState};
use crate::types::{LogId, SequenceNumber};

/// A manifest that has grown to this many bytes beyond its last rewriting is rewritten when it has also doubled.
const GROWTH_BYTES: u64 = 1 << 20;

/// The most bytes that an extent, or a piece, takes in a handle beside names.
const FIELDS_BYTES_MAX: usize = 64;

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
    /// Logs of which it was said that their handles become too long.
    long: BTreeSet<LogId>,
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
            long: BTreeSet::new(),
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
        let mut inner = lock(&self.inner);
        if let (Some(detached), Some(known)) = (&inner.detached, inner.state.logs().get(&log))
            && let Some(doomed) =
                overlapping(known, from, to).find(|extent| detached.uploads.contains(&extent.object))
        {
            let source = Arc::new(io::Error::other("the directory went out of service before"));
            return Err(PersistError::Manifest { object: doomed.object.clone(), source });
        }
        let handle = handle_in(&inner.state, log, from, to)?;
        if let Some(to) = half_from(handle.extents())
            && inner.long.insert(log)
        {
            tracing::warn!(
                log = %log,
                name = handle.name(),
                objects = handle.extents().len(),
                %to,
                "the handles of a log name half as many objects as they can: take a snapshot and truncate it to this number or \
                 further; at the limit its persists from below fail"
            );
        }
        Ok(handle)
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
        lock(&self.inner).record(records, |_| None)
    }

    /// Records an object that is complete, with what `follows` from the state that this leads to. `detached` says that it is
    /// one of directories out of service. Of one that is not, nothing is recorded once this directory went out of service:
    /// the file would not know it, and whoever does may delete it. Whether it was recorded.
    ///
    /// # Errors
    /// As [`record`](Self::record).
    ///
    /// # Panics
    /// As [`record`](Self::record).
    pub fn complete(
        &self,
        records: Vec<ManifestRecord>,
        detached: bool,
        follows: impl FnOnce(&ManifestState) -> Option<ManifestRecord>,
    ) -> io::Result<bool> {
        let mut inner = lock(&self.inner);
        if inner.detached.is_some() && !detached {
            return Ok(false);
        }
        inner.record(records, follows).map(|()| true)
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

    /// Makes sure that the release of a holder is not only in memory, if it is recorded.
    ///
    /// # Errors
    /// What the file system says.
    pub fn settle_release(&self, holder: &str) -> io::Result<()> {
        let is_durable = !lock(&self.inner).unforgotten.contains(holder);
        if is_durable { Ok(()) } else { self.settle() }
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
    let extents = || extents_in(state, log, from, to);
    ChangelogHandle::new(log, &known.name, known.key_groups, from, to, extents()).map_err(|_| {
        let extents = extents();
        match half_from(&extents) {
            Some(to) => PersistError::TooManyObjects { log, from, to, objects: extents.len() },
            None => PersistError::OutOfRange { log, from, start: known.truncated, end: to },
        }
    })
}

/// The first change from which on the extents fill a handle by half at most, if all of them are more than that.
fn half_from(extents: &[Extent]) -> Option<SequenceNumber> {
    let (mut count, mut pieces, mut bytes) = (0, 0, 0);
    let over = extents.iter().rposition(|extent| {
        count += 1;
        pieces += extent.pieces.len();
        let names = extent.pieces.iter().map(|piece| FIELDS_BYTES_MAX + piece.object.len());
        bytes += FIELDS_BYTES_MAX + names.sum::<usize>();
        count > EXTENTS_MAX / 2 || pieces > HANDLE_PIECES_MAX / 2 || bytes > HANDLE_BYTES_MAX / 2
    })?;
    Some(extents[over].end)
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
    let first = known.extents.partition_point(|extent| extent.end <= from);
    known.extents[first..].iter().take_while(move |extent| from < to && extent.first < to)
}

impl Inner {
    fn apply(&mut self, record: ManifestRecord) {
        if let Err(error) = self.state.apply(record) {
            panic!("the manifest was to record an impossible thing: {error}");
        }
    }

    fn record(
        &mut self,
        records: Vec<ManifestRecord>,
        follows: impl FnOnce(&ManifestState) -> Option<ManifestRecord>,
    ) -> io::Result<()> {
        let mut encoded = std::mem::take(&mut self.noted);
        for record in records {
            encoded.push(record.encode());
            match (&record, &self.detached) {
                (ManifestRecord::ObjectCompleted(object), None) => {
                    self.unwritten.insert(object.object.clone());
                }
                (ManifestRecord::HolderReleased { holder }, None) => {
                    self.unforgotten.insert(holder.clone());
                }
                _ => {}
            }
            self.apply(record);
        }
        if let Some(record) = follows(&self.state) {
            encoded.push(record.encode());
            self.apply(record);
        }
        if self.detached.is_some() {
            return Ok(());
        }
        let doubled = self.manifest.len_bytes() > 2 * self.rewritten_bytes + GROWTH_BYTES;
        if self.broken || doubled || self.manifest.is_poisoned() {
            return self.rewrite();
        }
        let slices: Vec<&[u8]> = encoded.iter().map(Vec::as_slice).collect();
        if let Err(error) = self.manifest.append(&slices) {
            tracing::warn!(%error, "the manifest could not be appended to; writing it anew");
            metrics::counter!("tidelog_manifest_failures_total").increment(1);
            self.broken = true;
            return self.rewrite();
        }
        self.written();
        Ok(())
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

#[cfg(test)]
mod tests {
    use tidelog_io::sim::SimWorld;

    use super::*;
    use crate::manifest::{CompletedObject, LogRange};
    use crate::piece::Piece;
    use crate::types::KeyGroupRange;

    const LOG: LogId = LogId(1);

    /// A log with one change in each of so many objects.
    fn ledger(objects: u64) -> Ledger {
        let created =
            ManifestRecord::LogCreated { log: LOG, name: "log".into(), key_groups: KeyGroupRange::ALL };
        let completed = |number: u64| {
            let object = format!("tidelog/{number:08}-0000000000000007");
            let piece = Piece { bucket: "memory://".into(), object: object.clone(), offset: 0, bytes: 100 };
            let range = LogRange { log: LOG, first: SequenceNumber(number), end: SequenceNumber(number + 1) };
            let (pieces, footer, ranges) = (vec![piece], 90..100, vec![range]);
            let (blocks_end, others) = (number + 1, Vec::new());
            CompletedObject { object, token: number, pieces, footer, blocks_end, ranges, others }
        };
        let mut state = ManifestState::default();
        state.apply(created).unwrap();
        for number in 0..objects {
            state.apply(ManifestRecord::ObjectCompleted(completed(number))).unwrap();
        }
        let manifest = Manifest::create(SimWorld::new(1).files(), 5).unwrap();
        Ledger::new(state, manifest)
    }

    fn handle(ledger: &Ledger, from: u64, to: u64) -> Result<ChangelogHandle, PersistError> {
        let (from, to) = (SequenceNumber(from), SequenceNumber(to));
        let asked_at = std::time::Instant::now();
        ledger.handle(&Request { log: LOG, device: 0, from, to, asked_at, end: None })
    }

    #[test]
    fn changes_in_more_objects_than_a_handle_can_name_are_refused_with_a_number_to_go_on_from() {
        let max = EXTENTS_MAX as u64;
        let ledger = ledger(max + 1);
        assert_eq!(handle(&ledger, 0, max).unwrap().extents().len(), EXTENTS_MAX);
        let error = handle(&ledger, 0, max + 1).unwrap_err();
        let PersistError::TooManyObjects { log: LOG, from: SequenceNumber(0), to, objects } = error else {
            panic!("{error}");
        };
        assert_eq!((to, objects), (SequenceNumber(max / 2 + 1), EXTENTS_MAX + 1));
        let text = error.to_string();
        assert!(text.contains("truncate the log to 32769") && !error.is_retryable(), "{text}");
        let rest = handle(&ledger, to.0, max + 1).unwrap();
        assert_eq!((rest.extents().len(), half_from(rest.extents())), (EXTENTS_MAX / 2, None));
    }

    #[test]
    fn a_log_whose_handles_become_too_long_is_warned_of_once_at_half() {
        let half = EXTENTS_MAX as u64 / 2;
        let ledger = ledger(half + 2);
        let told = |ledger: &Ledger| lock(&ledger.inner).long.contains(&LOG);
        handle(&ledger, 0, half).unwrap();
        handle(&ledger, 2, half + 2).unwrap();
        assert!(!told(&ledger));
        handle(&ledger, 1, half + 2).unwrap();
        assert!(told(&ledger));
    }

    #[test]
    fn names_count_as_objects_do() {
        let extent = |number: u64| Extent {
            pieces: vec![Piece { bucket: "b".into(), object: "x".repeat(1000), offset: 0, bytes: 9 }; 4],
            footer: 1..2,
            token: number,
            first: SequenceNumber(number),
            end: SequenceNumber(number + 1),
        };
        let extents: Vec<Extent> = (0..4_000).map(extent).collect();
        let fit = (HANDLE_BYTES_MAX / 2 / (4 * 1_064 + 64)) as u64;
        assert_eq!(half_from(&extents), Some(SequenceNumber(4_000 - fit)));
        assert_eq!(half_from(&extents[(4_000 - fit) as usize..]), None);
    }
}
