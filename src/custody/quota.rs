//! How many bytes the objects of this changelog have, and what follows from that: metrics, an alarm, and refused appends.
//!
//! An object counts from its proof until its deletion is recorded, once, in however many directories it is known; one that
//! was handed over does not count.

use std::collections::{BTreeMap, HashSet};

use super::Custody;
use crate::manifest::{CompletedObject, ManifestState};
use crate::types::LogId;

/// The share of the quota at which there is an alarm, in percent.
const ALARM_PERCENT: u64 = 80;
/// How many logs an alarm names.
const LOGS_NAMED: usize = 3;

/// How many objects, and how many bytes they have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Owned {
    objects: u64,
    bytes: u64,
}

impl Owned {
    fn add(&mut self, bytes: u64) {
        self.objects += 1;
        self.bytes += bytes;
    }
}

/// The quota, and what was last told of it.
#[derive(Debug)]
pub(super) struct Quota {
    max: Option<u64>,
    alarmed: bool,
    owned: Owned,
    /// Objects came or went since it was told.
    stale: bool,
}

impl Quota {
    pub(super) fn new(max: Option<u64>) -> Quota {
        Quota { max, alarmed: false, owned: Owned::default(), stale: true }
    }

    /// Whether so many bytes are worth an alarm.
    fn alarms(&self, bytes: u64) -> bool {
        self.max.is_some_and(|max| u128::from(bytes) * 100 >= u128::from(max) * u128::from(ALARM_PERCENT))
    }
}

impl Custody {
    /// Counts what was there before this use of the directories.
    pub(super) fn count_all(&mut self) {
        self.quota.owned = self.owned_by_all();
    }

    fn owned_by_all(&self) -> Owned {
        let mut owned = Owned::default();
        self.each_owned(|object| owned.add(object.object_bytes()));
        owned
    }

    /// What of these objects counts now.
    pub(super) fn owned<'a>(&self, names: impl IntoIterator<Item = &'a str>) -> Owned {
        let mut owned = Owned::default();
        for name in names {
            let bytes = |state: &ManifestState| {
                let ours = state.objects().get(name).filter(|_| !state.is_handed_over(name));
                ours.map(CompletedObject::object_bytes)
            };
            if let Some(bytes) = self.holdings.iter().find_map(|holding| holding.ledger.read(bytes)) {
                owned.add(bytes);
            }
        }
        owned
    }

    /// Something happened to these objects, of which `before` counted.
    pub(super) fn count_again<'a>(&mut self, before: Owned, names: impl IntoIterator<Item = &'a str>) {
        let now = self.owned(names);
        let Quota { owned, stale, .. } = &mut self.quota;
        owned.objects = owned.objects - before.objects + now.objects;
        owned.bytes = owned.bytes - before.bytes + now.bytes;
        *stale |= before != now;
    }

    /// Tells how much the objects take, if that has changed, and refuses or accepts appends.
    pub(super) fn measure(&mut self) {
        debug_assert!(!self.are_few() || self.quota.owned == self.owned_by_all());
        if !std::mem::take(&mut self.quota.stale) {
            return;
        }
        let Owned { objects, bytes } = self.quota.owned;
        let directory = || self.holdings[0].directory.display().to_string();
        let alarm = self.quota.alarms(bytes);
        metrics::gauge!("tidelog_owned_object_bytes", "directory" => directory()).set(bytes as f64);
        metrics::gauge!("tidelog_owned_objects", "directory" => directory()).set(objects as f64);
        metrics::gauge!("tidelog_quota_alarm", "directory" => directory()).set(f64::from(u8::from(alarm)));
        let Some(max) = self.quota.max else { return };
        if !std::mem::replace(&mut self.quota.alarmed, alarm) && alarm {
            tracing::warn!(
                bytes,
                max,
                logs = self.largest_logs(),
                "the objects of this changelog have {ALARM_PERCENT} % of object_bytes_max or more: take a snapshot and \
                 truncate the logs that have most, release holders that are not needed; at the limit appends are refused"
            );
        }
        for holding in &self.holdings {
            holding.device.set_over_quota(bytes >= max);
        }
    }

    /// Shows each object once, as the first directory that knows it does.
    fn each_owned(&self, mut show: impl FnMut(&CompletedObject)) {
        let mut seen: HashSet<u64> = HashSet::new();
        for holding in &self.holdings {
            holding.ledger.read(|state| {
                let owned = state.objects().values().filter(|object| !state.is_handed_over(&object.object));
                for object in owned {
                    if self.holdings.len() == 1 || seen.insert(object.token) {
                        show(object);
                    }
                }
            });
        }
    }

    /// The logs that have most bytes in objects, readable: an object counts for each log with changes in it.
    fn largest_logs(&self) -> String {
        let mut logs: BTreeMap<LogId, (String, u64)> = BTreeMap::new();
        for holding in &self.holdings {
            holding.ledger.read(|state| {
                for object in state.objects().values().filter(|object| !state.is_handed_over(&object.object))
                {
                    // Sorted by log.
                    for ranges in object.ranges.chunk_by(|range, next| range.log == next.log) {
                        let log = ranges[0].log;
                        let (_, bytes) =
                            logs.entry(log).or_insert_with(|| (state.logs()[&log].name.clone(), 0));
                        *bytes += object.object_bytes();
                    }
                }
            });
        }
        let mut logs: Vec<(LogId, (String, u64))> = logs.into_iter().collect();
        logs.sort_by_key(|(_, (_, bytes))| std::cmp::Reverse(*bytes));
        logs.truncate(LOGS_NAMED);
        let named = logs.iter().map(|(id, (name, bytes))| format!("{name} ({id}): {bytes} bytes"));
        named.collect::<Vec<_>>().join(", ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_alarm_comes_at_eighty_percent_of_a_limit() {
        let quota = |max| Quota::new(max);
        assert!(!quota(Some(1000)).alarms(799));
        assert!(quota(Some(1000)).alarms(800));
        assert!(quota(Some(u64::MAX)).alarms(u64::MAX));
        assert!(!quota(Some(u64::MAX)).alarms(u64::MAX / 2));
        assert!(!quota(None).alarms(u64::MAX));
    }
}
