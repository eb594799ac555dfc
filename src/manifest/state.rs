//! The state that a manifest's records add up to.
//!
//! Owns the rules of which record may follow which. What a record looks like in the file belongs to `manifest.rs`.

use std::collections::BTreeMap;
use std::ops::Range;

use super::{CompletedObject, LogRange, ManifestError, ManifestRecord, RANGES_PER_RECORD_MAX};
use crate::handle::{BUCKET_BYTES_MAX, LOG_NAME_BYTES_MAX, OBJECT_NAME_BYTES_MAX};
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

/// An upload that is neither complete nor known to be gone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpenUpload {
    /// The URL of its bucket.
    pub bucket: String,
    /// Its token.
    pub token: u64,
}

/// What a directory's records add up to.
///
/// Invariants:
/// 1. a segment is in use at most once; every epoch in use is below `next_epoch` and unique;
/// 2. cuts are sorted by both their fields, and each concerns a segment in use;
/// 3. the extents of a log and the ranges of the objects are the same set, without those that were truncated;
/// 4. an object is open or complete, never both;
/// 5. replaying [`snapshot`](Self::snapshot) gives an equal state.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ManifestState {
    session: u64,
    next_epoch: u64,
    next_number: u64,
    segments: BTreeMap<u32, u64>,
    /// What is known of the blocks in segments in use.
    sealed: BTreeMap<u32, Range<u64>>,
    cuts: Vec<Cut>,
    logs: BTreeMap<LogId, LogState>,
    uploads: BTreeMap<String, OpenUpload>,
    objects: BTreeMap<String, CompletedObject>,
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
        for object in self.objects.values() {
            records.extend(ManifestRecord::completed(object.clone()));
        }
        for (object, OpenUpload { bucket, token }) in &self.uploads {
            let (bucket, object, token) = (bucket.clone(), object.clone(), *token);
            records.push(ManifestRecord::UploadOpened { bucket, object, token });
        }
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

    /// The uploads that are neither complete nor abandoned, by the name of their object.
    #[must_use]
    pub fn uploads(&self) -> &BTreeMap<String, OpenUpload> {
        &self.uploads
    }

    /// The completed objects that are not deleted, by name. Their ranges are only those that a log still needs.
    #[must_use]
    pub fn objects(&self) -> &BTreeMap<String, CompletedObject> {
        &self.objects
    }

    /// The completed objects that no log needs: to be deleted.
    pub fn unreferenced_objects(&self) -> impl Iterator<Item = &CompletedObject> {
        self.objects.values().filter(|object| object.ranges.is_empty())
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
            ManifestRecord::UploadOpened { bucket, object, .. } => {
                check_object_name(bucket, object)?;
                ensure(!self.uploads.contains_key(object), "the upload is open")?;
                ensure(!self.objects.contains_key(object), "the object is complete")
            }
            ManifestRecord::ObjectCompleted(completed) => self.check_completed(completed),
            ManifestRecord::UploadAbandoned { object } => {
                ensure(self.uploads.contains_key(object), "the upload is not open")
            }
            ManifestRecord::ObjectDeleted { object } => {
                let known = self.objects.get(object);
                ensure(known.is_some(), "there is no such object")?;
                ensure(known.is_some_and(|known| known.ranges.is_empty()), "a log still needs the object")
            }
        }
    }

    fn check_completed(&self, completed: &CompletedObject) -> Result<(), Refusal> {
        let CompletedObject { bucket, object, token, object_bytes, footer, blocks_end, ranges } = completed;
        check_object_name(bucket, object)?;
        valid(!footer.is_empty() && footer.end <= *object_bytes, "footer")?;
        valid(ranges.len() <= RANGES_PER_RECORD_MAX, "number of ranges")?;
        if let Some(upload) = self.uploads.get(object) {
            ensure((&upload.bucket, &upload.token) == (bucket, token), "the upload was opened otherwise")?;
        }
        if let Some(known) = self.objects.get(object) {
            let same = (&known.bucket, &known.token, &known.object_bytes, &known.footer, &known.blocks_end)
                == (bucket, token, object_bytes, footer, blocks_end);
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
            ManifestRecord::UploadOpened { bucket, object, token } => {
                self.uploads.insert(object, OpenUpload { bucket, token });
            }
            ManifestRecord::ObjectCompleted(completed) => self.complete(completed),
            ManifestRecord::UploadAbandoned { object } => {
                self.uploads.remove(&object);
            }
            ManifestRecord::ObjectDeleted { object } => {
                self.objects.remove(&object);
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
        self.uploads.remove(&completed.object);
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

fn valid(holds: bool, what: &'static str) -> Result<(), Refusal> {
    if holds { Ok(()) } else { Err(Refusal::Invalid(what)) }
}

fn ensure(holds: bool, reason: &'static str) -> Result<(), Refusal> {
    if holds { Ok(()) } else { Err(Refusal::Inconsistent(reason)) }
}

fn check_object_name(bucket: &str, object: &str) -> Result<(), Refusal> {
    valid(!bucket.is_empty() && bucket.len() <= BUCKET_BYTES_MAX, "bucket")?;
    valid(!object.is_empty() && object.len() <= OBJECT_NAME_BYTES_MAX, "object name")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const LOG: LogId = LogId(1);

    fn created(log: LogId) -> ManifestRecord {
        ManifestRecord::LogCreated { log, name: format!("log {log}"), key_groups: KeyGroupRange::ALL }
    }

    fn truncated(to: u64) -> ManifestRecord {
        ManifestRecord::LogTruncated { log: LOG, to: SequenceNumber(to) }
    }

    fn completed(object: &str, ranges: &[(u64, u64)]) -> CompletedObject {
        let range =
            |&(first, end)| LogRange { log: LOG, first: SequenceNumber(first), end: SequenceNumber(end) };
        CompletedObject {
            bucket: "memory://".to_owned(),
            object: object.to_owned(),
            token: 7,
            object_bytes: 100,
            footer: 90..100,
            blocks_end: 3,
            ranges: ranges.iter().map(range).collect(),
        }
    }

    fn state(records: impl IntoIterator<Item = ManifestRecord>) -> ManifestState {
        let mut state = ManifestState::default();
        for record in records {
            state.apply(record).unwrap();
        }
        state
    }

    #[track_caller]
    fn assert_refused(state: &mut ManifestState, record: ManifestRecord, expected: &str) {
        let before = state.clone();
        match state.apply(record) {
            Err(ManifestError::Inconsistent { reason, .. }) => assert_eq!(reason, expected),
            Err(ManifestError::Invalid(what)) => assert_eq!(what, expected),
            other => panic!("expected {expected}, got {other:?}"),
        }
        assert_eq!(*state, before);
    }

    #[test]
    fn segments_and_epochs() {
        let acquired = |segment, epoch| ManifestRecord::SegmentAcquired { segment, epoch };
        let mut state = state([
            ManifestRecord::Opened { session: 9, next_epoch: 5, next_number: 100 },
            acquired(1, 5),
            acquired(2, 6),
        ]);
        assert_refused(&mut state, acquired(1, 7), "the segment is in use");
        assert_refused(&mut state, acquired(3, 6), "epochs only grow");
        let released = |segment, epoch| ManifestRecord::SegmentReleased { segment, epoch };
        assert_refused(&mut state, released(1, 6), "the segment is not in use with that epoch");
        state.apply(released(1, 5)).unwrap();
        state.apply(acquired(1, 7)).unwrap();
        assert_eq!(state.segments(), &BTreeMap::from([(1, 7), (2, 6)]));
        let opened =
            |next_epoch, next_number| ManifestRecord::Opened { session: 10, next_epoch, next_number };
        assert_refused(&mut state, opened(7, 100), "epochs only grow");
        assert_refused(&mut state, opened(8, 99), "block numbers only grow");
        state.apply(opened(8, 100)).unwrap();
        assert_eq!((state.session(), state.next_epoch(), state.next_number()), (10, 8, 100));
    }

    #[test]
    fn cuts_limit_the_blocks_of_earlier_epochs_until_those_are_gone() {
        let acquired = |segment, epoch| ManifestRecord::SegmentAcquired { segment, epoch };
        let cut = |epoch_below, number| ManifestRecord::Cut { epoch_below, number };
        let mut state = state([acquired(1, 1), cut(2, 40), acquired(2, 2), cut(3, 50), acquired(3, 3)]);
        assert_eq!([1, 2, 3].map(|epoch| state.number_limit(epoch)), [Some(40), Some(50), None]);
        assert_refused(&mut state, cut(2, 60), "cuts only go up");
        assert_refused(&mut state, cut(4, 49), "cuts only go up");
        state.apply(cut(3, 55)).unwrap();
        assert_eq!(state.number_limit(2), Some(50), "the stricter cut stays");
        state.apply(ManifestRecord::SegmentReleased { segment: 1, epoch: 1 }).unwrap();
        assert_eq!(state.cuts(), [Cut { epoch_below: 3, number: 50 }]);
        state.apply(ManifestRecord::SegmentReleased { segment: 2, epoch: 2 }).unwrap();
        assert_eq!(state.cuts(), []);
        assert_eq!(state.next_number(), 55);
    }

    #[test]
    fn an_object_goes_when_no_log_needs_it() {
        let mut state = state([created(LOG)]);
        let complete = |object, ranges: &[_]| ManifestRecord::ObjectCompleted(completed(object, ranges));
        state.apply(complete("a", &[(0, 10), (20, 30)])).unwrap();
        state.apply(complete("b", &[(10, 20)])).unwrap();
        let held: Vec<_> =
            state.logs()[&LOG].extents.iter().map(|extent| (extent.first.0, &*extent.object)).collect();
        assert_eq!(held, [(0, "a"), (10, "b"), (20, "a")]);

        let delete = |object: &str| ManifestRecord::ObjectDeleted { object: object.to_owned() };
        assert_refused(&mut state, delete("a"), "a log still needs the object");
        assert_refused(&mut state, delete("c"), "there is no such object");
        state.apply(truncated(20)).unwrap();
        assert_eq!(state.unreferenced_objects().map(|object| &*object.object).collect::<Vec<_>>(), ["b"]);
        assert_refused(&mut state, delete("a"), "a log still needs the object");
        state.apply(delete("b")).unwrap();
        assert_refused(&mut state, delete("b"), "there is no such object");
        assert_refused(&mut state, truncated(19), "more was truncated before");
        let forget = ManifestRecord::LogForgotten { log: LOG };
        assert_refused(&mut state, forget.clone(), "objects still hold changes of the log");
        state.apply(truncated(30)).unwrap();
        state.apply(delete("a")).unwrap();
        state.apply(forget.clone()).unwrap();
        assert_refused(&mut state, forget, "there is no such log");
    }

    #[test]
    fn an_object_that_completes_after_a_truncation_holds_only_the_rest() {
        let mut state = state([created(LOG), truncated(15)]);
        state.apply(ManifestRecord::ObjectCompleted(completed("a", &[(0, 10), (10, 20)]))).unwrap();
        assert_eq!(state.objects()["a"].ranges.len(), 1);
        assert_eq!(state.logs()[&LOG].extents.len(), 1);
        assert_eq!(state.logs()[&LOG].extents[0].first, SequenceNumber(10));
    }

    #[test]
    fn completions_that_contradict_are_refused() {
        let mut state = state([created(LOG)]);
        let complete = |object, ranges: &[_]| ManifestRecord::ObjectCompleted(completed(object, ranges));
        let opened = |object: &str, token| ManifestRecord::UploadOpened {
            bucket: "memory://".to_owned(),
            object: object.to_owned(),
            token,
        };
        state.apply(opened("a", 7)).unwrap();
        state.apply(opened("z", 8)).unwrap();
        assert_refused(&mut state, opened("a", 7), "the upload is open");
        assert_refused(&mut state, complete("z", &[(0, 10)]), "the upload was opened otherwise");
        assert_refused(&mut state, complete("a", &[(5, 5)]), "range");
        assert_refused(&mut state, complete("a", &[(5, 9), (8, 10)]), "its ranges overlap");
        state.apply(complete("a", &[(10, 20)])).unwrap();
        assert_eq!(state.uploads().keys().collect::<Vec<_>>(), ["z"]);
        assert_refused(&mut state, opened("a", 7), "the object is complete");
        for overlap in [(9, 11), (10, 20), (12, 13), (19, 30), (0, 99)] {
            assert_refused(&mut state, complete("b", &[overlap]), "another object holds these changes");
        }
        state.apply(complete("b", &[(0, 10), (20, 30)])).unwrap();
        // The same object may say more of itself, but nothing else.
        state.apply(complete("a", &[(30, 40)])).unwrap();
        assert_eq!(state.objects()["a"].ranges.len(), 2);
        let other = CompletedObject { object_bytes: 101, ..completed("a", &[(40, 50)]) };
        assert_refused(
            &mut state,
            ManifestRecord::ObjectCompleted(other),
            "the object was completed otherwise",
        );
        let outside = CompletedObject { footer: 90..101, ..completed("c", &[]) };
        assert_refused(&mut state, ManifestRecord::ObjectCompleted(outside), "footer");
        let abandoned = ManifestRecord::UploadAbandoned { object: "a".to_owned() };
        assert_refused(&mut state, abandoned, "the upload is not open");
    }

    #[test]
    fn what_could_not_be_decoded_is_refused() {
        let mut state = ManifestState::default();
        let name = "x".repeat(LOG_NAME_BYTES_MAX + 1);
        let long = ManifestRecord::LogCreated { log: LOG, name, key_groups: KeyGroupRange::ALL };
        assert!(ManifestRecord::decode(&long.encode()).is_err());
        assert_refused(&mut state, long, "name");
        let object = "x".repeat(OBJECT_NAME_BYTES_MAX + 1);
        let long = ManifestRecord::ObjectCompleted(completed(&object, &[]));
        assert!(ManifestRecord::decode(&long.encode()).is_err());
        assert_refused(&mut state, long, "object name");
    }

    /// Records over few names, so that many of them fit what came before.
    fn any_record() -> impl Strategy<Value = ManifestRecord> {
        let log = || (1u128..4).prop_map(LogId);
        let to = || (0u64..60).prop_map(SequenceNumber);
        let object = || (0u8..5).prop_map(|name| format!("o{name}"));
        let range = (1u128..4, 0u64..50, 1u64..12).prop_map(|(log, first, len)| LogRange {
            log: LogId(log),
            first: SequenceNumber(first),
            end: SequenceNumber(first + len),
        });
        prop_oneof![
            (0u64..3, 0u64..20, 0u64..20).prop_map(|(session, next_epoch, next_number)| {
                ManifestRecord::Opened { session, next_epoch, next_number }
            }),
            (0u32..4, 0u64..30)
                .prop_map(|(segment, epoch)| ManifestRecord::SegmentAcquired { segment, epoch }),
            (0u32..4, 0u64..30)
                .prop_map(|(segment, epoch)| ManifestRecord::SegmentReleased { segment, epoch }),
            (0u32..4, 0u64..12, 0u64..50, 0u64..5).prop_map(|(segment, epoch, start, count)| {
                ManifestRecord::SegmentSealed { segment, epoch, blocks: start..start + count }
            }),
            (0u64..30, 0u64..30)
                .prop_map(|(epoch_below, number)| ManifestRecord::Cut { epoch_below, number }),
            log().prop_map(created),
            (log(), to()).prop_map(|(log, to)| ManifestRecord::LogTruncated { log, to }),
            (log(), to()).prop_map(|(log, to)| ManifestRecord::LogConfirmed { log, to }),
            log().prop_map(|log| ManifestRecord::LogClosed { log }),
            log().prop_map(|log| ManifestRecord::LogForgotten { log }),
            object().prop_map(|object| ManifestRecord::UploadOpened {
                bucket: "memory://".to_owned(),
                object,
                token: 7
            }),
            (object(), proptest::collection::vec(range, 0..3)).prop_map(|(object, ranges)| {
                ManifestRecord::ObjectCompleted(CompletedObject { ranges, ..completed(&object, &[]) })
            }),
            object().prop_map(|object| ManifestRecord::UploadAbandoned { object }),
            object().prop_map(|object| ManifestRecord::ObjectDeleted { object }),
        ]
    }

    fn check_invariants(state: &ManifestState) {
        assert!(state.segments.values().all(|&epoch| epoch < state.next_epoch));
        assert!(
            state.cuts.windows(2).all(|pair| {
                pair[0].epoch_below < pair[1].epoch_below && pair[0].number <= pair[1].number
            })
        );
        let mut held = Vec::new();
        for (&log, log_state) in &state.logs {
            assert!(log_state.extents.windows(2).all(|pair| pair[0].end <= pair[1].first));
            for extent in &log_state.extents {
                assert!(extent.end > log_state.truncated);
                held.push((LogRange { log, first: extent.first, end: extent.end }, extent.object.clone()));
            }
        }
        let mut listed: Vec<_> = state
            .objects
            .values()
            .flat_map(|object| object.ranges.iter().map(|&range| (range, object.object.clone())))
            .collect();
        held.sort();
        listed.sort();
        assert_eq!(held, listed);
        assert!(state.uploads.keys().all(|object| !state.objects.contains_key(object)));
    }

    proptest! {
        #[test]
        fn any_history_keeps_the_invariants_and_survives_compaction(
            records in proptest::collection::vec(any_record(), 0..150),
        ) {
            let mut state = ManifestState::default();
            let mut taken = Vec::new();
            for record in records {
                let before = state.clone();
                let bytes = record.encode();
                match state.apply(record) {
                    Ok(()) => taken.push(bytes),
                    Err(_) => prop_assert_eq!(&state, &before),
                }
                check_invariants(&state);
            }
            let replayed = ManifestState::replay(taken.iter().map(Vec::as_slice));
            prop_assert_eq!(replayed.as_ref(), Ok(&state));
            let snapshot: Vec<_> = state.snapshot().iter().map(ManifestRecord::encode).collect();
            prop_assert_eq!(ManifestState::replay(snapshot.iter().map(Vec::as_slice)), Ok(state));
        }
    }
}
