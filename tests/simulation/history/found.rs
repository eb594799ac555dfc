//! What a history does with recovered logs: persists, truncates, discards and reads them.

use tidelog::{Change, ChangelogReader, KeyGroupRange, ReadError, RecoveredLog, SequenceNumber};

use super::{History, Wait, random_from};
use crate::model::{clip, random_range};

pub struct Found {
    pub recovered: RecoveredLog,
    pub log: usize,
    pub discarded: bool,
}

/// A reader that was begun and not finished.
pub struct Reading {
    reader: ChangelogReader,
    begun: Vec<Change>,
    log: usize,
    from: u64,
    to: u64,
    key_groups: KeyGroupRange,
    disk_faults: u64,
    store_faults: u64,
}

impl History {
    pub fn persist_found(&mut self, found: usize) {
        let Found { recovered, log, discarded } = &self.found[found];
        if *discarded {
            return;
        }
        let index = *log;
        let end = recovered.end().0;
        let from = random_from(&mut self.rng, &self.model.logs[index], end).max(recovered.start().0);
        let future = recovered.persist_durably(SequenceNumber(from));
        say!(self, "log {index}: persist what was recovered, {from}..{end}");
        self.waits.push(Wait::Persist { future, log: index, from, to: end });
    }

    pub fn truncate_found(&mut self, found: usize) {
        let Found { recovered, log, discarded } = &self.found[found];
        if *discarded {
            return;
        }
        let to = self.rng.below(recovered.end().0 + 1);
        say!(self, "log {log}: truncate what was recovered to {to}");
        recovered.truncate(SequenceNumber(to));
        let log = &mut self.model.logs[*log];
        log.truncated = log.truncated.max(to);
    }

    pub fn discard_found(&mut self, found: usize) {
        let Found { recovered, log, discarded } = &mut self.found[found];
        *discarded = true;
        let index = *log;
        recovered.discard();
        let log = &mut self.model.logs[index];
        log.truncated = log.truncated.max(recovered.end().0);
        // Handles beyond the end are of a changelog that had no disk to remember them.
        log.handles.retain(|handle| handle.to().0 > log.truncated);
        say!(self, "log {index}: discarded");
    }

    /// Reads a recovered log, or begins to.
    pub fn read_found(&mut self, found: usize, keep: bool) {
        let Found { recovered, log, discarded } = &self.found[found];
        let log = *log;
        let (start, end) = (recovered.start().0, recovered.end().0);
        // Below a truncation that was asked for since it was opened there may be nothing left.
        if *discarded || self.model.logs[log].truncated > start {
            return;
        }
        let key_groups = random_range(&mut self.rng, recovered.key_groups());
        let key_groups = if self.rng.chance(500) { KeyGroupRange::ALL } else { key_groups };
        let (disk_faults, store_faults) = (self.machine.disk_faults(), self.machine.store_faults());
        say!(self, "log {log}: read {start}..{end}, {key_groups:?}");
        let reader = recovered.read(key_groups);
        self.begin_reading(reader, keep, log, start, end, key_groups, disk_faults, store_faults);
    }

    /// Restores a handle, from the local disk as far as that holds it, or begins to.
    pub fn restore(&mut self, index: usize, keep: bool) {
        let Some(changelog) = &self.changelog else { return };
        let log = &self.model.logs[index];
        let Some(last) = (log.handles.len() as u64).checked_sub(1) else { return };
        let handle = &log.handles[(last - self.rng.below(last + 1).min(self.rng.below(last + 1))) as usize];
        let (from, to) = (handle.from().0.max(log.truncated), handle.to().0);
        if from >= to {
            return;
        }
        let handle = clip(handle, from);
        let range = random_range(&mut self.rng, log.key_groups).intersection(log.key_groups);
        let key_groups = range.filter(|_| self.rng.chance(500)).unwrap_or(log.key_groups);
        let (disk_faults, store_faults) = (self.machine.disk_faults(), self.machine.store_faults());
        say!(self, "log {index}: restore {from}..{to}, {key_groups:?}");
        let reader = changelog.restore(&[handle]).and_then(|restore| restore.reader(key_groups));
        self.begin_reading(reader, keep, index, from, to, key_groups, disk_faults, store_faults);
    }

    #[allow(clippy::too_many_arguments)]
    fn begin_reading(
        &mut self,
        reader: Result<ChangelogReader, ReadError>,
        keep: bool,
        log: usize,
        from: u64,
        to: u64,
        key_groups: KeyGroupRange,
        disk_faults: u64,
        store_faults: u64,
    ) {
        match reader {
            Ok(mut reader) => {
                let begun = if keep { self.rng.below(3) as usize } else { 0 };
                let mut changes = Vec::new();
                for _ in 0..begun {
                    match reader.next() {
                        Some(Ok(change)) => changes.push(change),
                        Some(Err(error)) => return self.read_failed(log, disk_faults, store_faults, &error),
                        None => break,
                    }
                }
                self.readings.push(Reading {
                    reader,
                    begun: changes,
                    log,
                    from,
                    to,
                    key_groups,
                    disk_faults,
                    store_faults,
                });
                if !keep {
                    self.finish_reading(self.readings.len() - 1);
                }
            }
            Err(error) => self.read_failed(log, disk_faults, store_faults, &error),
        }
    }

    pub fn finish_readings(&mut self) {
        while !self.readings.is_empty() {
            self.finish_reading(0);
        }
    }

    fn finish_reading(&mut self, reading: usize) {
        let Reading { reader, begun, log, from, to, key_groups, disk_faults, store_faults } =
            self.readings.remove(reading);
        // What was truncated meanwhile may be gone from the bucket.
        if self.model.logs[log].truncated > from {
            return;
        }
        let mut reader = reader;
        let changes = begun.into_iter().map(Ok).chain(&mut reader);
        if let Err(error) = self.model.check_read(log, from, to, key_groups, changes) {
            self.read_failed(log, disk_faults, store_faults, &error);
        }
        let stats = reader.stats();
        self.machine.readings.read_locally(stats.local_bytes, stats.bytes);
    }

    fn read_failed(&self, log: usize, disk_faults: u64, store_faults: u64, error: &tidelog::ReadError) {
        say!(self, "log {log}: read failed: {error}");
        let struck = self.machine.disk_faults() > disk_faults || self.machine.store_faults() > store_faults;
        assert!(
            struck
                || self.silent_faults
                || self.machine.is_bucket_dead()
                || self.machine.is_down()
                || self.holds.any_let_go(self.model.logs[log].id),
            "log {log}: read failed for no reason: {error}"
        );
    }
}
