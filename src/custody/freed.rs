//! Objects of which a reference went: what of them is deleted, or forgotten.
//!
//! To look at all objects for those that nobody needs would cost each checkpoint more the more of them live. So whoever lets
//! go of an object adds its name to the freed ones, and only those are looked at.
//!
//! Invariant: an object that nobody needs is among the freed ones or was offered for deletion, once in this use of the
//! directories, unless its upload is not settled, which adds it when it is, or the next open may rely on it.

use std::collections::BTreeSet;

use super::Custody;
use crate::manifest::{CompletedObject, ManifestRecord, ManifestState};

/// So many objects of a directory are all looked at in debug builds, and no more.
const CHECKED_MAX: usize = 1000;

impl Custody {
    /// Objects that nobody needs, from before this use of the directories.
    pub(super) fn free_all(&mut self) {
        for holding in &self.holdings {
            holding.ledger.read(|state| {
                let unneeded = state.unreferenced_objects().map(|object| object.object.as_str());
                self.freed.extend(unneeded.chain(state.spent_objects()).map(str::to_owned));
            });
        }
    }

    /// Nothing is left of an upload but the pieces of its object, if that is complete.
    pub fn settled(&mut self, object: &str) {
        if self.forget_upload(object) {
            self.freed.insert(object.to_owned());
        }
    }

    /// Whether there was such an upload.
    pub(super) fn forget_upload(&self, object: &str) -> bool {
        let mut was_known = false;
        for holding in &self.holdings {
            if holding.ledger.read(|state| state.uploads().contains_key(object)) {
                holding.ledger.note(ManifestRecord::UploadSettled { object: object.to_owned() });
                was_known = true;
            }
        }
        was_known
    }

    /// Forgets freed objects that were handed over and are of no concern any more, lets go of those that have changes of other
    /// directories, and gives those that are to be deleted.
    pub(super) fn take_unneeded(&mut self) -> Vec<CompletedObject> {
        // What is not durably recorded must not have an effect.
        let settled: Vec<bool> =
            self.holdings.iter().map(|holding| holding.ledger.settle().is_ok()).collect();
        let mut unneeded = Vec::new();
        for name in std::mem::take(&mut self.freed) {
            self.forget_spent(&name);
            let Some(object) = self.unreferenced(&name) else { continue };
            let knows = |state: &ManifestState| state.objects().contains_key(&name);
            let mut holdings = self.holdings.iter().zip(&settled);
            if self.pinned.contains(&name)
                || holdings.any(|(holding, settled)| !settled && holding.ledger.read(knows))
            {
                self.freed.insert(name);
            } else if self.is_shared_away(&name) {
                // While its upload is not settled, its pieces must be known: all else of that name is swept.
                if self.any(|state| state.uploads().contains_key(&name)) {
                    self.freed.insert(name);
                } else {
                    self.let_go(&name);
                }
            } else if self.deleting.insert(name) {
                unneeded.push(object);
            }
        }
        debug_assert!(!self.are_few() || self.missed().is_empty(), "{:?}", self.missed());
        unneeded
    }

    /// Forgets an object where it was handed over and is of no concern any more.
    fn forget_spent(&self, object: &str) {
        for holding in &self.holdings {
            if holding.ledger.read(|state| state.is_spent(object)) {
                holding.ledger.note(ManifestRecord::ObjectDeleted { object: object.to_owned() });
            }
        }
    }

    /// The object, if it is ours, and nobody needs it.
    fn unreferenced(&self, name: &str) -> Option<CompletedObject> {
        let ledgers = || self.holdings.iter().map(|holding| &holding.ledger);
        if ledgers().any(|ledger| ledger.read(|state| state.needs(name)) || ledger.relies_on(name)) {
            return None;
        }
        let ours = |state: &ManifestState| {
            state.objects().get(name).filter(|_| !state.is_handed_over(name)).cloned()
        };
        ledgers().find_map(|ledger| ledger.read(ours))
    }

    /// Whether all objects may be looked at to see that what is kept up to date about them is right.
    pub(super) fn are_few(&self) -> bool {
        self.holdings.iter().all(|holding| holding.ledger.read(|state| state.objects().len() <= CHECKED_MAX))
    }

    /// What should be among the freed objects and is not.
    fn missed(&self) -> BTreeSet<String> {
        let mut missed = BTreeSet::new();
        for holding in &self.holdings {
            holding.ledger.read(|state| {
                missed.extend(state.unreferenced_objects().map(|object| object.object.clone()));
            });
        }
        missed.retain(|name| {
            !self.freed.contains(name) && !self.deleting.contains(name) && self.unreferenced(name).is_some()
        });
        for holding in &self.holdings {
            holding.ledger.read(|state| missed.extend(state.spent_objects().map(str::to_owned)));
        }
        missed
    }
}
