//! How many bytes the objects of this changelog have, and what follows from that: metrics, an alarm, and refused appends.
//!
//! An object counts from its proof until its deletion is recorded, once, in however many directories it is known; one that
//! was handed over does not count.

use std::collections::{BTreeMap, BTreeSet};

use super::Custody;
use crate::types::LogId;

/// The share of the quota at which there is an alarm, in percent.
const ALARM_PERCENT: u64 = 80;
/// How many logs an alarm names.
const LOGS_NAMED: usize = 3;

/// The quota, and what was last told of it.
#[derive(Debug)]
pub(super) struct Quota {
    max: Option<u64>,
    alarmed: bool,
    /// Objects came or went since it was measured.
    stale: bool,
}

impl Quota {
    pub(super) fn new(max: Option<u64>) -> Quota {
        Quota { max, alarmed: false, stale: true }
    }

    /// Objects came or went.
    pub(super) fn stale(&mut self) {
        self.stale = true;
    }

    /// Whether so many bytes are worth an alarm.
    fn alarms(&self, bytes: u64) -> bool {
        self.max.is_some_and(|max| u128::from(bytes) * 100 >= u128::from(max) * u128::from(ALARM_PERCENT))
    }
}

/// What objects take.
#[derive(Debug, Default)]
struct Owned {
    objects: u64,
    bytes: u64,
    /// Bytes that no log needs: holders have them, or their deletion is under way.
    unneeded_bytes: u64,
    /// Bytes of the objects with changes of each log.
    logs: BTreeMap<LogId, (String, u64)>,
}

impl Custody {
    /// Looks at how much the objects take, if that may have changed: tells it, and refuses or accepts appends.
    pub(super) fn measure(&mut self) {
        if !std::mem::take(&mut self.quota.stale) {
            return;
        }
        let owned = self.owned();
        let directory = || self.holdings[0].directory.display().to_string();
        let alarm = self.quota.alarms(owned.bytes);
        metrics::gauge!("tidelog_owned_object_bytes", "directory" => directory()).set(owned.bytes as f64);
        metrics::gauge!("tidelog_owned_objects", "directory" => directory()).set(owned.objects as f64);
        metrics::gauge!("tidelog_quota_alarm", "directory" => directory()).set(f64::from(u8::from(alarm)));
        let Some(max) = self.quota.max else { return };
        if !std::mem::replace(&mut self.quota.alarmed, alarm) && alarm {
            tracing::warn!(
                bytes = owned.bytes,
                max,
                unneeded_bytes = owned.unneeded_bytes,
                logs = most(&owned),
                "the objects of this changelog have {ALARM_PERCENT} % of object_bytes_max or more: take a snapshot and \
                 truncate the logs that have most, release holders that are not needed; at the limit appends are refused"
            );
        }
        for holding in &self.holdings {
            holding.device.set_over_quota(owned.bytes >= max);
        }
    }

    fn owned(&self) -> Owned {
        let mut owned = Owned::default();
        let mut seen: BTreeSet<String> = BTreeSet::new();
        let mut needed: BTreeSet<String> = BTreeSet::new();
        for holding in &self.holdings {
            holding.ledger.read(|state| {
                for object in state.objects().values().filter(|object| !state.is_handed_over(&object.object))
                {
                    let bytes = object.object_bytes();
                    // Each log is in one directory, but an object may be known in several.
                    let mut logs: Vec<LogId> = object.ranges.iter().map(|range| range.log).collect();
                    logs.dedup();
                    for log in logs {
                        let name = || (state.logs()[&log].name.clone(), 0);
                        owned.logs.entry(log).or_insert_with(name).1 += bytes;
                    }
                    if !object.ranges.is_empty() && needed.insert(object.object.clone()) {
                        owned.unneeded_bytes = owned.unneeded_bytes.wrapping_sub(bytes);
                    }
                    if seen.insert(object.object.clone()) {
                        owned.objects += 1;
                        owned.bytes += bytes;
                        owned.unneeded_bytes = owned.unneeded_bytes.wrapping_add(bytes);
                    }
                }
            });
        }
        owned
    }
}

/// The logs that have most, readable.
fn most(owned: &Owned) -> String {
    let mut logs: Vec<(&LogId, &(String, u64))> = owned.logs.iter().collect();
    logs.sort_by_key(|(_, (_, bytes))| std::cmp::Reverse(*bytes));
    let named =
        logs.iter().take(LOGS_NAMED).map(|(id, (name, bytes))| format!("{name} ({id}): {bytes} bytes"));
    named.collect::<Vec<_>>().join(", ")
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
