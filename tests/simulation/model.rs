//! What a changelog must do, as a model: every log's changes, what was promised of them, and the checks of what is read.
//! Knows nothing of how a history is made up.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use tidelog::{
    Change, ChangelogHandle, ChangelogReader, KeyGroup, KeyGroupRange, LogId, ReadError, RecoveredLog,
    SequenceNumber, WriterControl,
};
use tidelog_io::sim::SimRng;
use tidelog_upload::Store;

use crate::bucket::Contents;

/// One change as it was appended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Appended {
    /// `None` for metadata.
    pub key_group: Option<u16>,
    pub value: Bytes,
}

/// One log, from its creation on, over all crashes.
#[derive(Debug)]
pub struct Log {
    pub id: LogId,
    pub name: String,
    pub key_groups: KeyGroupRange,
    /// Its directory.
    pub world: usize,
    /// Every change ever appended, also what a crash took.
    pub changes: Vec<Appended>,
    /// A sync, or a recovery, promised all below.
    pub synced: u64,
    /// A persist recorded in the manifest promised all below.
    pub persisted: u64,
    /// On the disk below, for as long as the log is open: closing drops what was not synced.
    pub durable: u64,
    /// Truncated below, as far as anybody asked.
    pub truncated: u64,
    pub confirmed: u64,
    /// Handles that must be readable from `truncated` on.
    pub handles: Vec<ChangelogHandle>,
    /// While the changelog that made its writer is open.
    pub control: Option<WriterControl>,
}

impl Log {
    pub fn next(&self) -> u64 {
        self.changes.len() as u64
    }

    /// What a crash must leave.
    pub fn promised(&self) -> u64 {
        self.synced.max(self.persisted).max(self.durable)
    }
}

/// All logs of a history.
#[derive(Debug, Default)]
pub struct Model {
    pub logs: Vec<Log>,
    /// The disk lies: what it was promised may be gone, but nothing may be wrong.
    pub lenient: bool,
    by_id: BTreeMap<LogId, usize>,
}

impl Model {
    pub fn add(&mut self, log: Log) -> usize {
        self.by_id.insert(log.id, self.logs.len());
        self.logs.push(log);
        self.logs.len() - 1
    }

    pub fn find(&self, id: LogId) -> Option<usize> {
        self.by_id.get(&id).copied()
    }

    /// Takes in what an open of some directories found. `empty_strays` are logs that their creator was told do not exist.
    pub fn recover(&mut self, recovered: &[RecoveredLog], present: &[usize], empty_strays: bool) {
        let mut found: BTreeMap<usize, &RecoveredLog> = BTreeMap::new();
        for log in recovered {
            match self.find(log.log()) {
                Some(index) => {
                    assert!(found.insert(index, log).is_none(), "log {} recovered twice", log.log())
                }
                None => {
                    let empty = log.start() == log.end() && log.end() == SequenceNumber::ZERO;
                    assert!(empty_strays && empty, "log {} ({}) was never created", log.log(), log.name());
                }
            }
        }
        for (index, log) in self.logs.iter_mut().enumerate() {
            log.control = None;
            let is_present = present.contains(&log.world);
            assert!(is_present || !found.contains_key(&index), "log {} is where it was not", log.id);
            if !is_present {
                continue;
            }
            let Some(recovered) = found.get(&index) else {
                let (promised, truncated) = (log.promised(), log.truncated);
                assert!(
                    self.lenient || promised <= truncated,
                    "log {} ({}) is gone: {promised} promised, {truncated} truncated",
                    log.id,
                    log.name
                );
                continue;
            };
            let (start, end) = (recovered.start().0, recovered.end().0);
            assert_eq!((recovered.name(), recovered.key_groups()), (log.name.as_str(), log.key_groups));
            assert!(
                end <= log.next(),
                "log {} was recovered up to {end}, but only {} were ever appended",
                log.id,
                log.next()
            );
            assert!(
                self.lenient || end >= log.promised() || log.truncated >= log.promised(),
                "log {} ({}) was recovered up to {end} only: {} were synced, {} persisted, {} appended, {} truncated",
                log.id,
                log.name,
                log.synced,
                log.persisted,
                log.next(),
                log.truncated
            );
            assert!(start <= log.truncated, "log {} starts at {start}, truncated {}", log.id, log.truncated);
            assert!(
                recovered.confirmed().0 <= log.confirmed,
                "log {}: {} confirmed, {} asked",
                log.id,
                recovered.confirmed(),
                log.confirmed
            );
            // What was found is durable: the next crash may not take it.
            log.synced = log.synced.max(end);
            log.durable = 0;
            log.truncated = log.truncated.max(start);
        }
    }

    /// Checks what a reader gives of log `index`: exactly `from..to` in `key_groups`, metadata first, each key group in
    /// order.
    ///
    /// # Errors
    /// What the reader says; panics if what it gives is wrong.
    pub fn check_read(
        &self,
        index: usize,
        from: u64,
        to: u64,
        key_groups: KeyGroupRange,
        reader: impl Iterator<Item = Result<Change, ReadError>>,
    ) -> Result<(), ReadError> {
        let log = &self.logs[index];
        let mut check = Check::default();
        for change in reader {
            check.change(log, from, to, key_groups, &change?);
        }
        let touches = log.key_groups.intersection(key_groups).is_some();
        let wanted = |change: &&Appended| {
            touches && change.key_group.is_none_or(|group| key_groups.contains(KeyGroup(group)))
        };
        let expected = log.changes[from as usize..to as usize].iter().filter(wanted).count();
        assert_eq!(check.count, expected, "changes of log {} in {from}..{to}, {key_groups:?}", log.id);
        Ok(())
    }

    /// Reads every handle of log `index` from the bucket, as far as it is not truncated.
    pub fn check_handles(&self, index: usize, contents: &[Contents], rng: &mut SimRng) {
        for handle in &self.logs[index].handles {
            self.check_handle(index, handle, contents, rng);
        }
    }

    /// Reads a handle from the bucket, as far as it is not truncated.
    pub fn check_handle(
        &self,
        index: usize,
        handle: &ChangelogHandle,
        contents: &[Contents],
        rng: &mut SimRng,
    ) {
        let from = self.logs[index].truncated;
        self.check_handle_from(index, handle, from, contents, rng);
    }

    /// Reads a handle from the bucket, from a number on.
    pub fn check_handle_from(
        &self,
        index: usize,
        handle: &ChangelogHandle,
        from: u64,
        contents: &[Contents],
        rng: &mut SimRng,
    ) {
        let log = &self.logs[index];
        let (from, to) = (handle.from().0.max(from), handle.to().0);
        if from >= to {
            return;
        }
        let handle = clip(handle, from);
        let key_groups = random_range(rng, log.key_groups).intersection(log.key_groups);
        for key_groups in [log.key_groups, key_groups.expect("it begins inside")] {
            let handles = std::slice::from_ref(&handle);
            let stores = contents.iter().map(|contents| Arc::new(contents.clone()) as Arc<dyn Store>);
            let reader = ChangelogReader::open_simulated(handles, key_groups, stores.collect());
            let read = reader.and_then(|reader| self.check_read(index, from, to, key_groups, reader));
            if let Err(error) = read
                && !self.lenient
            {
                panic!("a handle of log {} ({}) for {from}..{to} cannot be read: {error}", log.id, log.name);
            }
        }
    }
}

/// The handle without its changes below `from`.
pub fn clip(handle: &ChangelogHandle, from: u64) -> ChangelogHandle {
    let from = SequenceNumber(from);
    let mut extents = handle.extents().to_vec();
    extents.retain(|extent| extent.end > from);
    if let Some(first) = extents.first_mut() {
        first.first = first.first.max(from);
    }
    ChangelogHandle::new(handle.log(), handle.name(), handle.key_groups(), from, handle.to(), extents)
        .expect("a clipped handle is a handle")
}

/// A range that touches `range`, mostly inside of it.
pub fn random_range(rng: &mut SimRng, range: KeyGroupRange) -> KeyGroupRange {
    let first = range.first().0 + rng.below(range.len() as u64) as u16;
    let last = first + rng.below(u64::from(range.last().0 - first) + 3) as u16;
    KeyGroupRange::new(first, last).expect("first <= last")
}

/// What was read so far.
#[derive(Default)]
struct Check {
    count: usize,
    data_began: bool,
    /// The last number seen in each key group.
    last: BTreeMap<Option<u16>, u64>,
}

impl Check {
    fn change(&mut self, log: &Log, from: u64, to: u64, key_groups: KeyGroupRange, change: &Change) {
        let number = change.number.0;
        assert_eq!(change.log, log.id, "a change of another log");
        assert!((from..to).contains(&number), "change {number} of log {} outside of {from}..{to}", log.id);
        let appended = &log.changes[number as usize];
        let group = change.key_group.map(|group| group.0);
        assert_eq!(group, appended.key_group, "key group of change {number} of log {}", log.id);
        assert!(change.value == appended.value, "value of change {number} of log {}", log.id);
        match change.key_group {
            None => assert!(!self.data_began, "metadata {number} of log {} after data", log.id),
            Some(group) => {
                self.data_began = true;
                assert!(key_groups.contains(group), "{group:?} outside of {key_groups:?}");
            }
        }
        if let Some(last) = self.last.insert(group, number) {
            assert!(last < number, "change {number} of log {} after {last} in key group {group:?}", log.id);
        }
        self.count += 1;
    }
}
