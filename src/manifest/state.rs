//! The state that a manifest's records add up to.
//!
//! Owns the rules of which record may follow which. What a record looks like in the file belongs to `manifest.rs`.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

use super::{
    BUCKETS_MAX, CompletedObject, HOLDER_BYTES_MAX, HOLDS_MAX, LOGS_PER_RECORD_MAX, LogRange, ManifestError,
    ManifestRecord, OTHERS_MAX, RANGES_PER_RECORD_MAX, SUFFIX_BYTES_MAX,
};
use crate::handle::LOG_NAME_BYTES_MAX;
use crate::piece::{self, BUCKET_BYTES_MAX, OBJECT_NAME_BYTES_MAX, Piece};
use crate::{KeyGroupRange, LogId, SequenceNumber};

/// What is known of one log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogState {
    /// Its name.
    pub name: String,
    /// Its key groups.
    pub key_groups: KeyGroupRange,
    /// The first change that is needed.
    pub truncated: SequenceNumber,
    /// The end of what a complete checkpoint holds.
    pub confirmed: SequenceNumber,
    /// Whether it gets no more changes.
    pub closed: bool,
    /// Where its changes are in objects that are still needed for them: sorted, not overlapping. There are gaps where
    /// an object is not complete yet.
    pub extents: Vec<LogExtent>,
}

impl LogState {
    /// The end of what is truncated or in completed objects without a gap: changes below it are not needed from the local
    /// disk.
    #[must_use]
    pub fn covered(&self) -> SequenceNumber {
        self.extents.iter().fold(self.truncated, |covered, extent| {
            if extent.first <= covered { covered.max(extent.end) } else { covered }
        })
    }

    /// The first changes from `from` on that are neither truncated nor in a completed object: up to the next one that is, or
    /// without an end.
    #[must_use]
    pub fn missing_from(&self, from: SequenceNumber) -> Range<SequenceNumber> {
        let mut start = from.max(self.truncated);
        for extent in &self.extents[self.extents.partition_point(|extent| extent.end <= start)..] {
            if extent.first > start {
                return start..extent.first;
            }
            start = extent.end;
        }
        start..SequenceNumber(u64::MAX)
    }

    /// Whether an object holds some of the changes `[first, end)`, and earlier ones are in none.
    #[must_use]
    pub fn is_ahead(&self, first: SequenceNumber, end: SequenceNumber) -> bool {
        let covered = self.covered();
        self.extents.iter().any(|extent| extent.first > covered && extent.first < end && extent.end > first)
    }
}

/// The changes `[first, end)` of a log in one object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogExtent {
    /// The first change, inclusive.
    pub first: SequenceNumber,
    /// The end, exclusive.
    pub end: SequenceNumber,
    /// The name of the object.
    pub object: String,
}

/// An upload of which something may be left beside the pieces of its object, which may be complete or not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpenUpload {
    /// The URLs of the buckets where that may be.
    pub buckets: Vec<Arc<str>>,
    /// Its token.
    pub token: u64,
    /// The ids of the other directories that were open: one of them may know that the object is complete.
    pub others: Vec<u64>,
}

/// What a holder has: objects by name, each with the logs that it has it for.
pub type Held = BTreeMap<String, BTreeSet<LogId>>;

/// What a directory's records add up to.
///
/// Invariants:
/// 1. a segment is in use at most once; every epoch in use is below `next_epoch` and unique;
/// 2. cuts are sorted by both their fields, and each concerns a segment in use;
/// 3. the extents of a log and the ranges of the objects are the same set, without those that were truncated;
/// 4. an object's pieces are in buckets that its upload, while open, names;
/// 5. what a holder has is a completed object that is known; so is what was handed over;
/// 6. replaying [`snapshot`](Self::snapshot) gives an equal state.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ManifestState {
    session: u64,
    next_epoch: u64,
    next_number: u64,
    segments: BTreeMap<u32, u64>,
    /// What is known of the blocks in segments in use.
    sealed: BTreeMap<u32, Range<u64>>,
    cuts: Vec<Cut>,
    settled: u64,
    logs: BTreeMap<LogId, LogState>,
    uploads: BTreeMap<String, OpenUpload>,
    objects: BTreeMap<String, CompletedObject>,
    holders: BTreeMap<String, Held>,
    /// The same by object: who has it.
    held_by: BTreeMap<String, BTreeSet<String>>,
    /// The sum of what each counts.
    holds: usize,
    /// Objects that are an engine's registry's to delete.
    handed_over: BTreeSet<String>,
}

/// Blocks of epochs below `epoch_below` count only if their number is below `number`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    /// The first epoch that the cut does not concern.
    pub epoch_below: u64,
    /// The first block number that does not count.
    pub number: u64,
}

impl ManifestState {
    /// The state that `records` add up to.
    ///
    /// # Errors
    /// The first record that does not decode or contradicts the ones before it.
    pub fn replay<'a>(records: impl IntoIterator<Item = &'a [u8]>) -> Result<ManifestState, ManifestError> {
        let mut state = ManifestState::default();
        for record in records {
            state.apply(ManifestRecord::decode(record)?)?;
        }
        Ok(state)
    }

    /// Adds a record.
    ///
    /// # Errors
    /// [`ManifestError::Inconsistent`] or [`ManifestError::Invalid`]; the state is unchanged then.
    pub fn apply(&mut self, record: ManifestRecord) -> Result<(), ManifestError> {
        match self.check(&record) {
            Ok(()) => {
                self.take(record);
                Ok(())
            }
            Err(Refusal::Invalid(what)) => Err(ManifestError::Invalid(what)),
            Err(Refusal::Inconsistent(reason)) => {
                let mut record = format!("{record:?}");
                if let Some((end, _)) = record.char_indices().nth(400) {
                    record.truncate(end);
                    record.push('…');
                }
                Err(ManifestError::Inconsistent { record, reason })
            }
        }
    }

    /// The fewest records that add up to this state, for a manifest that is written anew.
    #[must_use]
    pub fn snapshot(&self) -> Vec<ManifestRecord> {
        let mut records = Vec::new();
        let mut segments: Vec<_> = self.segments.iter().map(|(&segment, &epoch)| (epoch, segment)).collect();
        segments.sort_unstable();
        records.extend(
            segments.into_iter().map(|(epoch, segment)| ManifestRecord::SegmentAcquired { segment, epoch }),
        );
        records.extend(self.sealed.iter().map(|(&segment, blocks)| {
            let (epoch, blocks) = (self.segments[&segment], blocks.clone());
            ManifestRecord::SegmentSealed { segment, epoch, blocks }
        }));
        records.extend(
            self.cuts.iter().map(|&Cut { epoch_below, number }| ManifestRecord::Cut { epoch_below, number }),
        );
        // After the segments: it raises the epoch above theirs.
        records.push(ManifestRecord::Opened {
            session: self.session,
            next_epoch: self.next_epoch,
            next_number: self.next_number,
        });
        for (&log, state) in &self.logs {
            let LogState { name, key_groups, truncated, confirmed, closed, extents: _ } = state;
            records.push(ManifestRecord::LogCreated { log, name: name.clone(), key_groups: *key_groups });
            if *truncated > SequenceNumber::ZERO {
                records.push(ManifestRecord::LogTruncated { log, to: *truncated });
            }
            if *confirmed > SequenceNumber::ZERO {
                records.push(ManifestRecord::LogConfirmed { log, to: *confirmed });
            }
            if *closed {
                records.push(ManifestRecord::LogClosed { log });
            }
        }
        for (object, OpenUpload { buckets, token, others }) in &self.uploads {
            let (buckets, object, others) = (buckets.clone(), object.clone(), others.clone());
            records.push(ManifestRecord::UploadOpened { buckets, object, token: *token, others });
        }
        for object in self.objects.values() {
            records.extend(ManifestRecord::completed(object.clone()));
        }
        if self.settled > 0 {
            records.push(ManifestRecord::BlocksSettled { number: self.settled });
        }
        for (holder, held) in &self.holders {
            for (object, logs) in held {
                let logs: Vec<LogId> = logs.iter().copied().collect();
                records.extend(ManifestRecord::held(holder, object, &logs));
            }
        }
        let handed_over = self.handed_over.iter().cloned();
        records.extend(handed_over.map(|object| ManifestRecord::ObjectHandedOver { object }));
        records
    }

    /// The latest use of the directory; 0 if it was never opened.
    #[must_use]
    pub fn session(&self) -> u64 {
        self.session
    }

    /// The lowest epoch that a segment may be given.
    #[must_use]
    pub fn next_epoch(&self) -> u64 {
        self.next_epoch
    }

    /// A lower bound of the next block's number; the blocks themselves may say more.
    #[must_use]
    pub fn next_number(&self) -> u64 {
        self.next_number
    }

    /// The segments in use, and the epoch of that use.
    #[must_use]
    pub fn segments(&self) -> &BTreeMap<u32, u64> {
        &self.segments
    }

    /// The numbers of the blocks that a segment in use holds, if that use was ended cleanly.
    #[must_use]
    pub fn sealed(&self, segment: u32) -> Option<Range<u64>> {
        self.sealed.get(&segment).cloned()
    }

    /// The cuts that concern segments in use.
    #[must_use]
    pub fn cuts(&self) -> &[Cut] {
        &self.cuts
    }

    /// Every change in blocks below this number is in a complete object, or truncated.
    #[must_use]
    pub fn settled(&self) -> u64 {
        self.settled
    }

    /// The first block number that does not count in a segment of `epoch`, if there is one.
    #[must_use]
    pub fn number_limit(&self, epoch: u64) -> Option<u64> {
        // Cuts are sorted by both fields, so the first that concerns the epoch is the strictest.
        self.cuts.iter().find(|cut| epoch < cut.epoch_below).map(|cut| cut.number)
    }

    /// All logs that are not forgotten.
    #[must_use]
    pub fn logs(&self) -> &BTreeMap<LogId, LogState> {
        &self.logs
    }

    /// The uploads that are not settled, by the name of their object: something may be left of them beside the object's
    /// pieces.
    #[must_use]
    pub fn uploads(&self) -> &BTreeMap<String, OpenUpload> {
        &self.uploads
    }

    /// The completed objects that are not deleted, by name. Their ranges are only those that a log still needs.
    #[must_use]
    pub fn objects(&self) -> &BTreeMap<String, CompletedObject> {
        &self.objects
    }

    /// The completed objects that no log and no holder needs, and that are this directory's: to be deleted.
    pub fn unreferenced_objects(&self) -> impl Iterator<Item = &CompletedObject> {
        let unneeded = |object: &&CompletedObject| !self.needs(&object.object);
        self.objects.values().filter(unneeded).filter(|object| !self.is_handed_over(&object.object))
    }

    /// The objects that were handed over and of which nothing has to be remembered any more, by name.
    pub fn spent_objects(&self) -> impl Iterator<Item = &str> {
        self.handed_over.iter().filter(|object| self.is_spent(object)).map(String::as_str)
    }

    /// Whether the object was handed over and nothing of it has to be remembered any more.
    #[must_use]
    pub fn is_spent(&self, object: &str) -> bool {
        // While its upload is not settled, its pieces must be known: all else of that name is swept.
        self.is_handed_over(object) && !self.needs(object) && !self.uploads.contains_key(object)
    }

    /// Whether a log or a holder needs the object, as far as is known here.
    #[must_use]
    pub fn needs(&self, object: &str) -> bool {
        self.objects.get(object).is_some_and(|known| !known.ranges.is_empty())
            || self.held_by.contains_key(object)
    }

    /// Whether the object is an engine's registry's to delete.
    #[must_use]
    pub fn is_handed_over(&self, object: &str) -> bool {
        self.handed_over.contains(object)
    }

    /// Whether a handle of `log` may name the object: it is this directory's, or a holder has it for that log.
    #[must_use]
    pub fn may_refer(&self, log: LogId, object: &str) -> bool {
        let holders = || self.held_by.get(object).into_iter().flatten();
        !self.is_handed_over(object)
            || holders()
                .any(|holder| self.holders[holder].get(object).is_some_and(|logs| logs.contains(&log)))
    }

    /// All holders that have something, and what.
    #[must_use]
    pub fn holders(&self) -> &BTreeMap<String, Held> {
        &self.holders
    }

    /// How many objects holders have, as [`HOLDS_MAX`] counts.
    #[must_use]
    pub fn holds(&self) -> usize {
        self.holds
    }

    /// What that would be more by if a holder had an object for these logs, too.
    pub fn holds_added<'a>(
        &self,
        holder: &str,
        object: &str,
        logs: impl IntoIterator<Item = &'a LogId>,
    ) -> usize {
        let logs: BTreeSet<&LogId> = logs.into_iter().collect();
        match self.holders.get(holder).and_then(|held| held.get(object)) {
            None => logs.len().max(1),
            Some(has) => {
                let both = logs.iter().filter(|log| !has.contains(log)).count() + has.len();
                both.max(1) - has.len().max(1)
            }
        }
    }

    fn check(&self, record: &ManifestRecord) -> Result<(), Refusal> {
        match record {
            ManifestRecord::Opened { next_epoch, next_number, .. } => {
                ensure(*next_epoch >= self.next_epoch, "epochs only grow")?;
                ensure(*next_number >= self.next_number, "block numbers only grow")
            }
            ManifestRecord::SegmentAcquired { segment, epoch } => {
                ensure(!self.segments.contains_key(segment), "the segment is in use")?;
                ensure(*epoch >= self.next_epoch && *epoch < u64::MAX, "epochs only grow")
            }
            ManifestRecord::SegmentReleased { segment, epoch } => {
                ensure(self.segments.get(segment) == Some(epoch), "the segment is not in use with that epoch")
            }
            ManifestRecord::SegmentSealed { segment, epoch, blocks } => {
                ensure(
                    self.segments.get(segment) == Some(epoch),
                    "the segment is not in use with that epoch",
                )?;
                let known = self.sealed.get(segment);
                ensure(known.is_none_or(|known| known == blocks), "the segment was sealed otherwise")?;
                valid(blocks.start <= blocks.end, "number of blocks")
            }
            ManifestRecord::Cut { epoch_below, number } => {
                let last = self.cuts.last();
                ensure(last.is_none_or(|last| *epoch_below >= last.epoch_below), "cuts only go up")?;
                ensure(last.is_none_or(|last| *number >= last.number), "cuts only go up")
            }
            ManifestRecord::BlocksSettled { number } => {
                ensure(*number >= self.settled, "settled blocks stay so")
            }
            ManifestRecord::LogCreated { log, name, .. } => {
                valid(name.len() <= LOG_NAME_BYTES_MAX, "name")?;
                ensure(!self.logs.contains_key(log), "the log exists")
            }
            ManifestRecord::LogTruncated { log, to } => {
                ensure(*to >= self.log(log)?.truncated, "more was truncated before")
            }
            ManifestRecord::LogConfirmed { log, to } => {
                ensure(*to >= self.log(log)?.confirmed, "more was confirmed before")
            }
            ManifestRecord::LogClosed { log } => ensure(!self.log(log)?.closed, "the log is closed"),
            ManifestRecord::LogForgotten { log } => {
                ensure(self.log(log)?.extents.is_empty(), "objects still hold changes of the log")
            }
            ManifestRecord::UploadOpened { buckets, object, others, .. } => {
                let sound = |bucket: &Arc<str>| !bucket.is_empty() && bucket.len() <= BUCKET_BYTES_MAX;
                valid(!object.is_empty() && object.len() <= OBJECT_NAME_BYTES_MAX, "object name")?;
                valid((1..=BUCKETS_MAX).contains(&buckets.len()), "number of buckets")?;
                valid(buckets.iter().all(sound), "bucket")?;
                check_others(others)?;
                ensure(!self.uploads.contains_key(object), "the upload is open")?;
                ensure(!self.objects.contains_key(object), "the object is complete")
            }
            ManifestRecord::ObjectCompleted(completed) => self.check_completed(completed),
            ManifestRecord::UploadSettled { object } => {
                ensure(self.uploads.contains_key(object), "the upload is not open")
            }
            ManifestRecord::ObjectDeleted { object } => {
                ensure(self.known(object)?.ranges.is_empty(), "a log still needs the object")?;
                ensure(!self.held_by.contains_key(object), "a holder still needs the object")?;
                let swept = self.is_handed_over(object) && self.uploads.contains_key(object);
                ensure(!swept, "what its upload left is still swept")
            }
            ManifestRecord::ObjectHeld { holder, object, logs } => {
                valid((1..=HOLDER_BYTES_MAX).contains(&holder.len()), "holder")?;
                valid(logs.len() <= LOGS_PER_RECORD_MAX, "number of logs")?;
                self.known(object)?;
                let added = self.holds_added(holder, object, logs);
                ensure(added == 0 || self.holds + added <= HOLDS_MAX, "there are too many holds")
            }
            ManifestRecord::ObjectHandedOver { object } => {
                self.known(object)?;
                ensure(!self.is_handed_over(object), "the object was handed over")
            }
            ManifestRecord::HolderReleased { holder } => {
                ensure(self.holders.contains_key(holder), "there is no such holder")
            }
        }
    }

    fn check_completed(&self, completed: &CompletedObject) -> Result<(), Refusal> {
        let CompletedObject { object, token, pieces, footer, blocks_end, ranges, others } = completed;
        let object_bytes = piece::check(pieces).map_err(Refusal::Invalid)?;
        let suffix = |piece: &Piece| piece.object.strip_prefix(object.as_str()).map(str::len);
        let named_after = |piece: &Piece| suffix(piece).is_some_and(|len| len <= SUFFIX_BYTES_MAX);
        valid(!object.is_empty() && pieces.iter().all(named_after), "object name")?;
        let buckets: BTreeSet<&str> = pieces.iter().map(|piece| &*piece.bucket).collect();
        valid(buckets.len() <= BUCKETS_MAX, "number of buckets")?;
        valid(!footer.is_empty() && footer.end <= object_bytes, "footer")?;
        valid(ranges.len() <= RANGES_PER_RECORD_MAX, "number of ranges")?;
        check_others(others)?;
        if let Some(upload) = self.uploads.get(object) {
            let named = |bucket: &&str| upload.buckets.iter().any(|known| **known == **bucket);
            let same = upload.token == *token && buckets.iter().all(named);
            ensure(same, "the upload was opened otherwise")?;
        }
        if let Some(known) = self.objects.get(object) {
            let same = (&known.token, &known.pieces, &known.footer, &known.blocks_end, &known.others)
                == (token, pieces, footer, blocks_end, others);
            ensure(same, "the object was completed otherwise")?;
        }
        let mut sorted = ranges.clone();
        sorted.sort_unstable();
        for range in &sorted {
            valid(range.first < range.end, "range")?;
            let log = self.log(&range.log)?;
            let next = log.extents.partition_point(|extent| extent.end <= range.first);
            let free = log.extents.get(next).is_none_or(|extent| extent.first >= range.end);
            ensure(free, "another object holds these changes")?;
        }
        let apart = |pair: &[LogRange]| pair[0].log != pair[1].log || pair[0].end <= pair[1].first;
        ensure(sorted.windows(2).all(apart), "its ranges overlap")
    }

    fn log(&self, log: &LogId) -> Result<&LogState, Refusal> {
        self.logs.get(log).ok_or(Refusal::Inconsistent("there is no such log"))
    }

    fn known(&self, object: &str) -> Result<&CompletedObject, Refusal> {
        self.objects.get(object).ok_or(Refusal::Inconsistent("there is no such object"))
    }

    /// Adds a record that was checked.
    fn take(&mut self, record: ManifestRecord) {
        match record {
            ManifestRecord::Opened { session, next_epoch, next_number } => {
                (self.session, self.next_epoch, self.next_number) = (session, next_epoch, next_number);
            }
            ManifestRecord::SegmentAcquired { segment, epoch } => {
                self.segments.insert(segment, epoch);
                self.next_epoch = epoch + 1;
            }
            ManifestRecord::SegmentReleased { segment, .. } => {
                self.segments.remove(&segment);
                self.sealed.remove(&segment);
                self.drop_spent_cuts();
            }
            ManifestRecord::SegmentSealed { segment, blocks, .. } => {
                self.next_number = self.next_number.max(blocks.end);
                self.sealed.insert(segment, blocks);
            }
            ManifestRecord::Cut { epoch_below, number } => {
                let cut = Cut { epoch_below, number };
                // Of two cuts for the same epochs the earlier is the stricter.
                if self.cuts.last().is_none_or(|last| last.epoch_below < epoch_below) {
                    self.cuts.push(cut);
                }
                self.next_epoch = self.next_epoch.max(epoch_below);
                self.next_number = self.next_number.max(number);
                self.drop_spent_cuts();
            }
            ManifestRecord::BlocksSettled { number } => self.settled = number,
            ManifestRecord::LogCreated { log, name, key_groups } => {
                let (truncated, confirmed) = (SequenceNumber::ZERO, SequenceNumber::ZERO);
                let state =
                    LogState { name, key_groups, truncated, confirmed, closed: false, extents: Vec::new() };
                self.logs.insert(log, state);
            }
            ManifestRecord::LogTruncated { log, to } => self.truncate(log, to),
            ManifestRecord::LogConfirmed { log, to } => self.log_mut(log).confirmed = to,
            ManifestRecord::LogClosed { log } => self.log_mut(log).closed = true,
            ManifestRecord::LogForgotten { log } => {
                self.logs.remove(&log);
            }
            ManifestRecord::UploadOpened { buckets, object, token, others } => {
                self.uploads.insert(object, OpenUpload { buckets, token, others });
            }
            ManifestRecord::ObjectCompleted(completed) => self.complete(completed),
            ManifestRecord::UploadSettled { object } => {
                self.uploads.remove(&object);
            }
            ManifestRecord::ObjectDeleted { object } => {
                self.objects.remove(&object);
                self.handed_over.remove(&object);
            }
            ManifestRecord::ObjectHeld { holder, object, logs } => {
                self.holds += self.holds_added(&holder, &object, &logs);
                self.held_by.entry(object.clone()).or_default().insert(holder.clone());
                self.holders.entry(holder).or_default().entry(object).or_default().extend(logs);
            }
            ManifestRecord::ObjectHandedOver { object } => {
                self.handed_over.insert(object);
            }
            ManifestRecord::HolderReleased { holder } => {
                for (object, logs) in self.holders.remove(&holder).unwrap_or_default() {
                    self.holds -= logs.len().max(1);
                    let holders = self.held_by.get_mut(&object).expect("the same by object");
                    holders.remove(&holder);
                    if holders.is_empty() {
                        self.held_by.remove(&object);
                    }
                }
            }
        }
    }

    fn drop_spent_cuts(&mut self) {
        let oldest = self.segments.values().min().copied();
        self.cuts.retain(|cut| oldest.is_some_and(|oldest| oldest < cut.epoch_below));
    }

    fn truncate(&mut self, log: LogId, to: SequenceNumber) {
        let state = self.log_mut(log);
        state.truncated = to;
        let spent = state.extents.partition_point(|extent| extent.end <= to);
        let spent: Vec<LogExtent> = state.extents.drain(..spent).collect();
        for extent in spent {
            let object = self.objects.get_mut(&extent.object).expect("invariant 3");
            object.ranges.retain(|range| (range.log, range.first) != (log, extent.first));
        }
    }

    fn complete(&mut self, mut completed: CompletedObject) {
        completed.ranges.retain(|range| range.end > self.logs[&range.log].truncated);
        for range in &completed.ranges {
            let extents = &mut self.log_mut(range.log).extents;
            let index = extents.partition_point(|extent| extent.end <= range.first);
            let object = completed.object.clone();
            extents.insert(index, LogExtent { first: range.first, end: range.end, object });
        }
        match self.objects.get_mut(&completed.object) {
            Some(known) => {
                known.ranges.append(&mut completed.ranges);
                known.ranges.sort_unstable();
            }
            None => {
                completed.ranges.sort_unstable();
                self.objects.insert(completed.object.clone(), completed);
            }
        }
    }

    fn log_mut(&mut self, log: LogId) -> &mut LogState {
        self.logs.get_mut(&log).expect("checked before")
    }
}

enum Refusal {
    Invalid(&'static str),
    Inconsistent(&'static str),
}

fn check_others(others: &[u64]) -> Result<(), Refusal> {
    valid(others.len() <= OTHERS_MAX, "number of directories")?;
    valid(others.is_sorted_by(|a, b| a < b), "directory")
}

fn valid(holds: bool, what: &'static str) -> Result<(), Refusal> {
    if holds { Ok(()) } else { Err(Refusal::Invalid(what)) }
}

fn ensure(holds: bool, reason: &'static str) -> Result<(), Refusal> {
    if holds { Ok(()) } else { Err(Refusal::Inconsistent(reason)) }
}

#[cfg(test)]
mod tests;
