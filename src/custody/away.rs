//! Objects with changes of directories that are not open here: lost, replaced, or left out.
//!
//! What their logs need, nobody here can know. So such an object is never deleted, nor handed over; when nothing here needs it
//! any more it is *let go of*: forgotten, and left to who has the handles that name it, and to a sweep. Should that directory
//! be open beside these once more, its own record says all that there is to know: here nothing needs the object.
//!
//! An upload that is not known to be complete may be so for a directory that is not open, and is left alone like that.

use std::collections::BTreeSet;

use super::Custody;
use crate::manifest::ManifestRecord;

/// How many directories a warning names.
const NAMED_MAX: usize = 4;

impl Custody {
    /// Whether the object has changes of a directory that is not open here.
    pub(super) fn is_shared_away(&self, object: &str) -> bool {
        let is_away = |directory: &u64| !self.ids.contains(directory);
        self.any(|state| state.objects().get(object).is_some_and(|known| known.others.iter().any(is_away)))
    }

    /// Says what there is of such objects and uploads, and lets go of the uploads.
    pub(super) fn leave_alone(&self) {
        let mut away: BTreeSet<u64> = BTreeSet::new();
        let mut is_shared = |others: &[u64]| {
            let not_here: Vec<u64> =
                others.iter().filter(|other| !self.ids.contains(other)).copied().collect();
            away.extend(&not_here);
            !not_here.is_empty()
        };
        let (mut objects, mut uploads): (BTreeSet<String>, BTreeSet<String>) = Default::default();
        for holding in &self.holdings {
            holding.ledger.read(|state| {
                let shared = state.objects().values().filter(|known| is_shared(&known.others));
                objects.extend(shared.map(|known| known.object.clone()));
                let shared = state.uploads().iter().filter(|(_, upload)| is_shared(&upload.others));
                uploads.extend(shared.map(|(name, _)| name.clone()));
            });
        }
        // Of what is known to be complete, what the upload left beside it can be told.
        uploads.retain(|name| !self.any(|state| state.objects().contains_key(name)));
        if objects.is_empty() && uploads.is_empty() {
            return;
        }
        let named: Vec<String> = away.iter().take(NAMED_MAX).map(|id| format!("{id:016x}")).collect();
        tracing::warn!(
            objects = objects.len(),
            uploads = uploads.len(),
            directories = away.len(),
            ids = named.join(", "),
            "objects have changes of local directories that are not open here, and are not deleted by this changelog. If a \
             directory was left out by mistake, open all of them together; if it was lost, keep the handles that name these \
             objects, and run `tidelog sweep` with all live handles now and then"
        );
        for upload in uploads {
            self.forget_upload(&upload);
            tell();
        }
    }

    /// Forgets an object that nothing here needs.
    pub(super) fn let_go(&mut self, object: &str) {
        let before = self.owned([object]);
        for holding in &self.holdings {
            if holding.ledger.read(|state| state.objects().contains_key(object)) {
                // If that is lost in a crash, it is let go of again.
                holding.ledger.note(ManifestRecord::ObjectDeleted { object: object.to_owned() });
            }
        }
        self.count_again(before, [object]);
        tell();
    }
}

fn tell() {
    metrics::counter!("tidelog_objects_let_go_total").increment(1);
}
