//! What is kept and what may go: truncations, closed logs, objects without readers, segments without needed blocks.
//!
//! Every decision is recorded in the ledgers before it is carried out. Whether a segment's use may end is computed in
//! retention.rs; what an object holds is told by the uploader; who needs objects besides logs is in custody/holds.rs, which
//! of them go in custody/freed.rs, which must stay for the sake of other directories in custody/away.rs, how many bytes they
//! may have in custody/quota.rs.
//!
//! Invariants:
//! 1. A truncation never passes the start of a persist request that is not answered.
//! 2. An object is deleted when no log and no holder of any ledger needs it, unless it was handed over or has changes of a
//!    directory that is not open here, and named in one deletion at a time.

mod away;
mod freed;
mod holds;
mod quota;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use crate::device::{Device, SpillRequest, lock};
use crate::ledger::Ledger;
use crate::local::index::LocalIndex;
use crate::manifest::{CompletedObject, LogRange, ManifestRecord, ManifestState};
use crate::queue::LocalBlock;
use crate::retention::{Keep, Retention, SegmentUse};
use crate::types::{LogId, SequenceNumber};
use quota::Quota;

/// One device, as far as keeping goes.
#[derive(Debug)]
pub(crate) struct Holding {
    pub directory: PathBuf,
    /// The directory's own id, by which other directories know it.
    pub id: u64,
    pub device: Arc<Device>,
    pub ledger: Arc<Ledger>,
    pub retention: Retention,
    pub readers: Arc<Readers>,
    /// Uses that have ended, of which that is recorded, but not durably yet.
    pub unreleased: Vec<(u32, u64)>,
    /// What the uses hold.
    pub index: Arc<Mutex<LocalIndex>>,
    /// What is kept for local restores, unless the spiller waits for room.
    pub keep: Keep,
}

impl Holding {
    /// A block is durable, or will never be more than in memory.
    pub fn take_block(&mut self, block: &LocalBlock) {
        if let Some(place) = &block.place {
            self.retention.block(place.segment, place.epoch, block.number);
            lock(&self.index).push(block);
        }
    }

    /// What may be kept now.
    fn keep(&mut self) -> Keep {
        if self.keep.settled_max == 0 || self.device.pressed.load(Ordering::Acquire) {
            return Keep::NONE;
        }
        if let Some(start) = self.retention.blocks_start() {
            let settled = self.retention.settled();
            let start = start.max(self.keep.needed_from);
            // What is truncated stays so: each block is looked at until it is not needed, and never again.
            self.keep.needed_from =
                self.ledger.read(|state| lock(&self.index).needed_from(start..settled, state));
        }
        self.keep
    }

    fn release_segments(&mut self) {
        if self.ledger.is_detached() {
            // Nothing is written to them any more, and the next open looks for all that the manifest names.
            return;
        }
        let keep = self.keep();
        let released = self.retention.take_released(&keep);
        if !released.is_empty() {
            let mut index = lock(&self.index);
            released.iter().for_each(|used| index.remove(used.blocks.clone()));
        }
        let records: Vec<ManifestRecord> = released
            .iter()
            .map(|&SegmentUse { segment, epoch, .. }| ManifestRecord::SegmentReleased { segment, epoch })
            .collect();
        self.unreleased.extend(released.iter().map(|used| (used.segment, used.epoch)));
        if self.unreleased.is_empty() {
            return;
        }
        let recorded = if records.is_empty() { self.ledger.settle() } else { self.ledger.record(records) };
        if let Err(error) = recorded {
            // Reused before its release is durable, a segment could cost acknowledged data.
            tracing::warn!(%error, "segments could not be released; it is tried again later");
            return;
        }
        for (segment, epoch) in self.unreleased.drain(..) {
            self.device.request(SpillRequest::Release { segment, epoch });
        }
    }
}

/// Counts who reads what only the local blocks of a device hold: meanwhile none of its segments is released.
#[derive(Debug, Default)]
pub(crate) struct Readers(Mutex<usize>);

impl Readers {
    /// Keeps what is in segments now from being released.
    pub fn pin(&self) {
        *lock(&self.0) += 1;
    }

    /// Ends a [`pin`](Self::pin).
    pub fn unpin(&self) {
        *lock(&self.0) -= 1;
    }

    fn are_none(&self) -> bool {
        *lock(&self.0) == 0
    }

    /// Runs `release` if nobody reads; nobody begins to meanwhile.
    fn if_none(&self, release: impl FnOnce()) {
        let count = lock(&self.0);
        if *count == 0 {
            release();
        }
    }
}

/// A log that gets no more changes.
#[derive(Clone, Copy, Debug)]
struct ClosedLog {
    device: usize,
    /// Changes from here on were neither persisted nor synced when it was closed: they are dropped.
    keep_to: SequenceNumber,
}

/// How far blocks below `end` are settled for good, as far as the manifest does not know it yet. Unlike retention's number
/// it counts nothing that a closed log drops: that is back after the next open, if it is still there.
fn newly_settled(index: &Mutex<LocalIndex>, end: u64, state: &ManifestState) -> Option<ManifestRecord> {
    let known = state.settled();
    let number = lock(index).missing_from(known..end, state);
    (number > known).then_some(ManifestRecord::BlocksSettled { number })
}

/// What is kept of all devices.
#[derive(Debug)]
pub(crate) struct Custody {
    pub holdings: Vec<Holding>,
    /// Of the directories that are open here.
    ids: BTreeSet<u64>,
    /// Truncations that were asked for and are not carried out in full.
    wanted: BTreeMap<LogId, (usize, SequenceNumber)>,
    /// The end of what persists ever asked for.
    asked: HashMap<LogId, SequenceNumber>,
    closed: BTreeMap<LogId, ClosedLog>,
    /// Objects that were offered for deletion and are not known to be gone.
    deleting: BTreeSet<String>,
    /// Objects of which a reference went since they were last looked at.
    freed: BTreeSet<String>,
    /// Objects that are about to be handed over: meanwhile they are not deleted.
    pinned: BTreeSet<String>,
    quota: Quota,
}

impl Custody {
    /// With at most `object_bytes_max` bytes of objects of its own, if that is limited.
    pub fn new(holdings: Vec<Holding>, object_bytes_max: Option<u64>) -> Custody {
        let mut custody = Custody {
            ids: holdings.iter().map(|holding| holding.id).collect(),
            holdings,
            wanted: BTreeMap::new(),
            asked: HashMap::new(),
            closed: BTreeMap::new(),
            deleting: BTreeSet::new(),
            freed: BTreeSet::new(),
            pinned: BTreeSet::new(),
            quota: Quota::new(object_bytes_max),
        };
        custody.leave_alone();
        custody.free_all();
        custody.count_all();
        custody.measure();
        custody
    }

    /// A persist asked for the changes of `log` below `to`.
    pub fn asked(&mut self, log: LogId, to: SequenceNumber) {
        let asked = self.asked.entry(log).or_default();
        *asked = (*asked).max(to);
    }

    /// Nobody needs the changes of `log` below `to`.
    pub fn truncate(&mut self, device: usize, log: LogId, to: SequenceNumber) {
        let (_, wanted) = self.wanted.entry(log).or_insert((device, to));
        *wanted = (*wanted).max(to);
    }

    /// A checkpoint with the changes of `log` below `to` is complete.
    pub fn confirm(&mut self, device: usize, log: LogId, to: SequenceNumber) {
        let confirmed =
            self.holdings[device].ledger.read(|state| state.logs().get(&log).map(|log| log.confirmed));
        if confirmed.is_some_and(|confirmed| confirmed < to) {
            self.record(device, vec![ManifestRecord::LogConfirmed { log, to }]);
        }
    }

    /// `log` gets no more changes; those from `synced` on are dropped where no persist asked for them.
    pub fn close(&mut self, device: usize, log: LogId, synced: SequenceNumber) {
        let keep_to = synced.max(self.asked.remove(&log).unwrap_or_default());
        let closed = self.closed.entry(log).or_insert(ClosedLog { device, keep_to });
        closed.keep_to = closed.keep_to.max(keep_to);
        let open =
            self.holdings[device].ledger.read(|state| state.logs().get(&log).is_some_and(|log| !log.closed));
        if open {
            self.record(device, vec![ManifestRecord::LogClosed { log }]);
        }
    }

    /// A log that an earlier use of the directory left behind.
    pub fn recovered(&mut self, device: usize, log: LogId, end: SequenceNumber) {
        self.closed.insert(log, ClosedLog { device, keep_to: end });
    }

    /// What to keep of a log's changes from `first` on: the next ones that are not truncated, in no complete object, and not
    /// dropped by the closing of the log.
    pub fn kept(&self, device: usize, log: LogId, first: SequenceNumber) -> Range<SequenceNumber> {
        let nothing = SequenceNumber(u64::MAX)..SequenceNumber(u64::MAX);
        self.holdings[device].ledger.read(|state| match (state.logs().get(&log), self.closed.get(&log)) {
            (None, _) => nothing,
            // What objects have of a closed log never has a hole: once a block was dropped, none behind it goes into one.
            (Some(known), Some(closed)) if known.covered() >= closed.keep_to => nothing,
            (Some(known), _) => known.missing_from(first),
        })
    }

    /// Whether anything of a block is needed.
    pub fn needs(&self, block: &LocalBlock) -> bool {
        // A change that goes on in the next block is counted there, but begins here.
        let open = u64::from(block.continues);
        block.ranges.iter().any(|range| {
            let kept = self.kept(block.device, range.log, range.first);
            kept.start.0 < kept.end.0.min(range.end.0 + open)
        })
    }

    /// Carries out the truncations as far as `needed_from`, the start of the unanswered persists, allows, and forgets the
    /// logs of which nothing is left. Gives the objects that may be deleted now; each is in the caller's hands until
    /// [`deleted`](Self::deleted).
    pub fn tidy(&mut self, needed_from: impl Fn(LogId) -> Option<SequenceNumber>) -> Vec<CompletedObject> {
        let mut records: Vec<Vec<ManifestRecord>> = vec![Vec::new(); self.holdings.len()];
        let (holdings, freed) = (&self.holdings, &mut self.freed);
        self.wanted.retain(|log, (device, wanted)| {
            let to = needed_from(*log).map_or(*wanted, |needed| needed.min(*wanted));
            holdings[*device].ledger.read(|state| {
                let Some(known) = state.logs().get(log) else { return false };
                if to > known.truncated {
                    records[*device].push(ManifestRecord::LogTruncated { log: *log, to });
                    let spent = known.extents.iter().take_while(|extent| extent.end <= to);
                    freed.extend(spent.map(|extent| extent.object.clone()));
                }
                to < *wanted
            })
        });
        for (device, records) in records.into_iter().enumerate() {
            self.record(device, records);
        }
        self.forget(needed_from);
        let unneeded = self.take_unneeded();
        self.measure();
        unneeded
    }

    /// The ids of all directories but one, of those that are `among` them, ascending.
    pub fn others(&self, device: usize, among: impl Fn(usize) -> bool) -> Vec<u64> {
        let others = (0..self.holdings.len()).filter(|&other| other != device && among(other));
        let ids: BTreeSet<u64> = others.map(|other| self.holdings[other].id).collect();
        ids.into_iter().collect()
    }

    /// Forgets closed logs of which nothing is left but what was dropped when they were closed: objects may have some of it.
    fn forget(&mut self, needed_from: impl Fn(LogId) -> Option<SequenceNumber>) {
        let mut records: Vec<Vec<ManifestRecord>> = vec![Vec::new(); self.holdings.len()];
        let (holdings, freed) = (&self.holdings, &mut self.freed);
        self.closed.retain(|log, closed| {
            holdings[closed.device].ledger.read(|state| {
                let Some(known) = state.logs().get(log) else { return false };
                if known.truncated < closed.keep_to || needed_from(*log).is_some() {
                    return true;
                }
                if let Some(dropped) = known.extents.last() {
                    let to = dropped.end;
                    records[closed.device].push(ManifestRecord::LogTruncated { log: *log, to });
                    freed.extend(known.extents.iter().map(|extent| extent.object.clone()));
                }
                records[closed.device].push(ManifestRecord::LogForgotten { log: *log });
                false
            })
        });
        for (device, records) in records.into_iter().enumerate() {
            self.record(device, records);
        }
    }

    /// An object is gone.
    pub fn deleted(&mut self, object: &str) {
        self.deleting.remove(object);
        let before = self.owned([object]);
        for device in 0..self.holdings.len() {
            if self.holdings[device].ledger.read(|state| state.objects().contains_key(object)) {
                self.record(device, vec![ManifestRecord::ObjectDeleted { object: object.to_owned() }]);
            }
        }
        self.count_again(before, [object]);
    }

    /// Records that `object` is complete, with those of the `ranges` whose logs still exist. `detached` says that it is one of
    /// directories out of service. Whether `device` has it as it should: not if it went out of service meanwhile, and the
    /// object is of others; then its changes are not in it.
    ///
    /// # Errors
    /// What the file system says; the object must not be relied on then.
    pub fn complete(
        &mut self,
        device: usize,
        object: &CompletedObject,
        ranges: &[LogRange],
        detached: bool,
    ) -> std::io::Result<bool> {
        let ledger = &self.holdings[device].ledger;
        let ranges: Vec<LogRange> = ledger.read(|state| {
            ranges.iter().filter(|range| state.logs().contains_key(&range.log)).copied().collect()
        });
        if ranges.is_empty() && !self.has_upload(device, &object.object) {
            return Ok(true);
        }
        let name = object.object.as_str();
        let before = self.owned([name]);
        let records = ManifestRecord::completed(CompletedObject { ranges, ..object.clone() });
        let index = &self.holdings[device].index;
        let recorded =
            ledger.complete(records, detached, |state| newly_settled(index, object.blocks_end, state));
        self.count_again(before, [name]);
        // Meanwhile all of it may have been truncated.
        self.freed.insert(name.to_owned());
        recorded
    }

    /// Whether the upload of an object was recorded by `device`.
    pub fn has_upload(&self, device: usize, object: &str) -> bool {
        self.holdings[device].ledger.read(|state| state.uploads().contains_key(object))
    }

    /// Records that the upload of an object begins, whose first blocks are of `device`: in the first directory that can, of
    /// those that are in service, or of those that are not, as `device` is.
    ///
    /// # Errors
    /// What the file system says of the last one. None of them knows of an upload then.
    pub fn open_upload(
        &self,
        device: usize,
        object: &str,
        token: u64,
        buckets: &[Arc<str>],
    ) -> std::io::Result<()> {
        let detached = self.is_detached(device);
        let mut keepers: Vec<usize> = (0..self.holdings.len()).collect();
        keepers.retain(|keeper| *keeper == device || self.is_detached(*keeper) == detached);
        let mut outcome = Ok(());
        for keeper in keepers {
            let others = self.others(keeper, |_| true);
            let (buckets, name) = (buckets.to_vec(), object.to_owned());
            let opened = ManifestRecord::UploadOpened { buckets, object: name, token, others };
            let ledger = &self.holdings[keeper].ledger;
            outcome = ledger.record(vec![opened]);
            if outcome.is_ok() {
                break;
            }
            // Nothing is sent on the word of this directory.
            ledger.note(ManifestRecord::UploadSettled { object: object.to_owned() });
        }
        outcome
    }

    /// Whether a device is out of service: what is recorded of it is in memory alone.
    pub fn is_detached(&self, device: usize) -> bool {
        self.holdings[device].ledger.is_detached()
    }

    /// Whether a spiller waits for room that only uploads make.
    pub fn is_pressed(&self) -> bool {
        self.pressed().next().is_some()
    }

    /// The devices whose spillers wait for room that only uploads make.
    pub fn pressed(&self) -> impl Iterator<Item = usize> {
        let pressed = |device: &usize| self.holdings[*device].device.pressed.load(Ordering::Acquire);
        (0..self.holdings.len()).filter(pressed)
    }

    /// No block of `device` is on its way, and the next one will begin another use of a segment.
    pub fn stalled(&mut self, device: usize) {
        self.holdings[device].retention.end_all();
        self.release_segments(device);
    }

    /// Blocks of `device` below `number` are settled.
    pub fn settle(&mut self, device: usize, number: u64) {
        let Holding { ledger, retention, index, .. } = &mut self.holdings[device];
        retention.settle(number);
        if let Some(record) = ledger.read(|state| newly_settled(index, retention.settled(), state)) {
            ledger.note(record);
        }
        self.release_segments(device);
    }

    /// Ends the uses of segments that are not needed, nor kept for local restores, unless somebody reads what nothing else
    /// holds.
    pub fn release_segments(&mut self, device: usize) {
        let readers = Arc::clone(&self.holdings[device].readers);
        readers.if_none(|| self.holdings[device].release_segments());
    }

    /// Whether segments could not be released that may be.
    pub fn owes_segments(&self) -> bool {
        let owes = |holding: &Holding| {
            !holding.unreleased.is_empty() && !holding.ledger.is_detached() && holding.readers.are_none()
        };
        self.holdings.iter().any(owes)
    }

    /// No block is to come: notes what each segment holds, so that its loss is noticed.
    pub fn seal_segments(&self) {
        for (device, holding) in self.holdings.iter().enumerate() {
            let seal = |used: &SegmentUse| {
                let SegmentUse { segment, epoch, blocks } = used.clone();
                ManifestRecord::SegmentSealed { segment, epoch, blocks }
            };
            self.record(device, holding.retention.uses().map(seal).collect());
        }
    }

    /// Records what has no effect that must wait for it.
    pub fn record(&self, device: usize, records: Vec<ManifestRecord>) {
        if records.is_empty() {
            return;
        }
        if let Err(error) = self.holdings[device].ledger.record(records) {
            tracing::warn!(%error, "the manifest could not be written; it is tried again with the next record");
        }
    }
}
