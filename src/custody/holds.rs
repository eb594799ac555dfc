//! Who needs objects besides logs: holders, which keep them whatever is truncated, and an engine's registry, to which they
//! are handed over.
//!
//! All of it runs on the uploader's thread, as everything that decides on deletions: between a look at the ledgers and the
//! record that follows from it, no object is offered for deletion. Why it is as it is: docs/design/0006.
//!
//! Invariants:
//! 1. A holder takes only what a log or another holder needs: what nobody needs may have been offered for deletion already,
//!    in this use of the directories or an earlier one, however that went.
//! 2. A holder is recorded in every directory in service that knows the object, so that none of them deletes it without the
//!    others.
//! 3. A log whose changes are in an object that is handed over has a holder with a handle that names it there; from the
//!    release of the last such holder on, no handle of the log names the object.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::ops::Bound;
use std::sync::Arc;

use super::{Custody, Holding};
use crate::error::{RegisterError, ReleaseError};
use crate::handle::{ChangelogHandle, Extent};
use crate::manifest::{HOLDS_MAX, ManifestRecord, ManifestState};
use crate::types::LogId;

/// An object that handles name.
struct Named {
    /// Its first file, for errors.
    bucket: String,
    file: String,
    /// Whose handles name it.
    logs: BTreeSet<LogId>,
}

/// Objects that handles name, by name.
type Objects = BTreeMap<String, Named>;

impl Custody {
    /// Keeps the objects that `handles` name until `holder` is released.
    ///
    /// # Errors
    /// See [`RegisterError`].
    pub fn register(&self, holder: &str, handles: &[ChangelogHandle]) -> Result<(), RegisterError> {
        let mut objects = self.named(handles)?;
        for (object, Named { bucket, file, logs }) in &mut objects {
            if self.any(|state| state.is_handed_over(object)) {
                let (bucket, object) = (bucket.clone(), file.clone());
                return Err(RegisterError::HandedOver { bucket, object });
            }
            // Which logs a holder has it for counts only for what is handed over.
            logs.clear();
        }
        self.hold(holder, &objects, false)
    }

    /// Keeps the objects that `handles` name from being deleted until [`unpin`](Self::unpin).
    ///
    /// # Errors
    /// As [`hand_over`](Self::hand_over), if there is one that no holder may take.
    pub fn pin(&mut self, handles: &[ChangelogHandle]) -> Result<(), RegisterError> {
        self.pinned = self.named(handles)?.into_keys().collect();
        Ok(())
    }

    /// Lets go of what was [pinned](Self::pin).
    pub fn unpin(&mut self) {
        self.pinned.clear();
    }

    /// Makes the objects that `handles` name, all of them [pinned](Self::pin), the engine's registry's, where `holder` has
    /// them until it is released.
    ///
    /// # Errors
    /// See [`RegisterError`].
    pub fn hand_over(&mut self, holder: &str, handles: &[ChangelogHandle]) -> Result<(), RegisterError> {
        let objects = self.named(handles)?;
        for (object, named) in &objects {
            if self.is_shared_away(object) && !self.any(|state| state.is_handed_over(object)) {
                // The logs of a directory that is not open may need it, and would not know whose it is.
                let (bucket, object) = (named.bucket.clone(), named.file.clone());
                return Err(RegisterError::NotOwned { bucket, object });
            }
            self.check_left_to(object, named)?;
        }
        let names = || objects.keys().map(String::as_str);
        let before = self.owned(names());
        let outcome = self.hold(holder, &objects, true);
        self.count_again(before, names());
        outcome
    }

    /// Lets go of all that `holder` has. What nobody needs then is offered for deletion by the next
    /// [`tidy`](Self::tidy).
    ///
    /// # Errors
    /// See [`ReleaseError`].
    pub fn release(&mut self, holder: &str) -> Result<(), ReleaseError> {
        let mut outcome = Ok(());
        for holding in &self.holdings {
            let held = holding.ledger.read(|state| {
                let held = state.holders().get(holder)?;
                Some(held.keys().cloned().collect::<Vec<String>>())
            });
            let released = if let Some(held) = held {
                self.freed.extend(held);
                let holder = holder.to_owned();
                holding.ledger.record(vec![ManifestRecord::HolderReleased { holder }])
            } else {
                // An earlier call may not have been recorded.
                holding.ledger.settle_release(holder)
            };
            outcome = outcome.and(released);
        }
        outcome.map_err(|error| ReleaseError::Manifest(Arc::new(error)))?;
        match self.holdings.iter().find(|holding| holding.ledger.recalls(holder)) {
            Some(holding) => Err(ReleaseError::OutOfService { directory: holding.directory.clone() }),
            None => Ok(()),
        }
    }

    /// The objects that handles name, each of which a holder may take.
    fn named(&self, handles: &[ChangelogHandle]) -> Result<Objects, RegisterError> {
        let mut objects = Objects::new();
        for handle in handles {
            for extent in handle.extents() {
                let known =
                    self.holdings.iter().find_map(|holding| holding.ledger.read(|state| find(state, extent)));
                let (bucket, file) = first_file(extent);
                let Some(object) = known.filter(|object| self.may_take(object, handle.log())) else {
                    return Err(RegisterError::NotOwned { bucket, object: file });
                };
                let named = || Named { bucket, file, logs: BTreeSet::new() };
                objects.entry(object).or_insert_with(named).logs.insert(handle.log());
            }
        }
        Ok(objects)
    }

    /// Whether a holder with a handle of `log` that names the object may take it.
    fn may_take(&self, object: &str, log: LogId) -> bool {
        let needed = self.pinned.contains(object) || self.any(|state| state.needs(object));
        let owner = |state: &ManifestState| state.is_handed_over(object);
        needed && (!self.any(owner) || self.any(|state| owner(state) && state.may_refer(log, object)))
    }

    /// Whether every log that needs the object has a handle among the given ones.
    fn check_left_to(&self, object: &str, named: &Named) -> Result<(), RegisterError> {
        let Named { bucket, file, logs } = named;
        let (bucket, file) = (bucket.clone(), file.clone());
        let mut left_out: BTreeSet<LogId> = BTreeSet::new();
        for holding in &self.holdings {
            holding.ledger.read(|state| {
                let known = state.objects().get(object).filter(|_| !state.is_handed_over(object));
                let needing = known.into_iter().flat_map(|known| &known.ranges).map(|range| range.log);
                left_out.extend(needing.filter(|log| !logs.contains(log)));
            });
        }
        if left_out.is_empty() {
            return Ok(());
        }
        Err(RegisterError::StillNeeded { bucket, object: file, logs: left_out.into_iter().collect() })
    }

    /// Records, durably, that `holder` has `objects`.
    fn hold(&self, holder: &str, objects: &Objects, hand_over: bool) -> Result<(), RegisterError> {
        let mut records = Vec::new();
        for holding in &self.holdings {
            records.push(missing(holding, holder, objects, hand_over)?);
        }
        self.check_recorders(objects, hand_over)?;
        let mut outcome: io::Result<()> = Ok(());
        for (holding, records) in self.holdings.iter().zip(records) {
            let knows = |state: &ManifestState| objects.keys().any(|name| state.objects().contains_key(name));
            let recorded = if !records.is_empty() {
                holding.ledger.record(records)
            } else if holding.ledger.read(knows) {
                // What an earlier call recorded may not be durable.
                holding.ledger.settle()
            } else {
                Ok(())
            };
            outcome = outcome.and(recorded);
        }
        outcome.map_err(|error| RegisterError::Manifest(Arc::new(error)))?;
        // One may have gone out of service meanwhile, and then nobody knows whether it has recorded anything.
        self.check_recorders(objects, hand_over)
    }

    /// Whether directories in service know the objects: one for each, and with `all` no other does. At its next open a
    /// directory out of service knows nothing of what is recorded now.
    fn check_recorders(&self, objects: &Objects, all: bool) -> Result<(), RegisterError> {
        for (object, Named { bucket, file, .. }) in objects {
            let knows =
                |holding: &&Holding| holding.ledger.read(|state| state.objects().contains_key(object));
            let (detached, in_service): (Vec<&Holding>, Vec<&Holding>) =
                self.holdings.iter().filter(knows).partition(|holding| holding.ledger.is_detached());
            if let Some(holding) = detached.first().filter(|_| all || in_service.is_empty()) {
                let directory = holding.directory.clone();
                let (bucket, object) = (bucket.clone(), file.clone());
                return Err(RegisterError::OutOfService { directory, bucket, object });
            }
        }
        Ok(())
    }

    pub(super) fn any(&self, holds: impl Fn(&ManifestState) -> bool) -> bool {
        self.holdings.iter().any(|holding| holding.ledger.read(&holds))
    }
}

/// What a directory in service has to record for `holder` to have `objects`, as far as it knows them.
fn missing(
    holding: &Holding,
    holder: &str,
    objects: &Objects,
    hand_over: bool,
) -> Result<Vec<ManifestRecord>, RegisterError> {
    if holding.ledger.is_detached() {
        return Ok(Vec::new());
    }
    holding.ledger.read(|state| {
        let mut records = Vec::new();
        let mut more = 0;
        let held = state.holders().get(holder);
        for (object, Named { logs, .. }) in objects {
            if !state.objects().contains_key(object) {
                continue;
            }
            let has = held.and_then(|held| held.get(object));
            more += state.holds_added(holder, object, logs);
            if has.is_none_or(|has| !logs.is_subset(has)) {
                let logs: Vec<LogId> = logs.iter().copied().collect();
                records.extend(ManifestRecord::held(holder, object, &logs));
            }
            if hand_over && !state.is_handed_over(object) {
                // Behind the holds, so that no log is without one.
                records.push(ManifestRecord::ObjectHandedOver { object: object.clone() });
            }
        }
        if state.holds() + more > HOLDS_MAX {
            let (directory, held) = (holding.directory.clone(), state.holds());
            return Err(RegisterError::TooMany { directory, held, more });
        }
        Ok(records)
    })
}

/// The name of the object that the extent is in, if it is known with just these pieces.
fn find(state: &ManifestState, extent: &Extent) -> Option<String> {
    // The files of an object have names that begin with its own, and no object's name begins with another's.
    let upwards = (Bound::Unbounded, Bound::Included(extent.object()));
    let (name, known) = state.objects().range::<str, _>(upwards).next_back()?;
    let same = (&known.pieces, &known.footer, known.token) == (&extent.pieces, &extent.footer, extent.token);
    same.then(|| name.clone())
}

fn first_file(extent: &Extent) -> (String, String) {
    let bucket = extent.pieces.first().map_or_else(String::new, |piece| piece.bucket.to_string());
    (bucket, extent.object().to_owned())
}
