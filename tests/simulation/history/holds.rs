//! What a history does with holders: it registers checkpoints, hands some over to a registry of its own, and releases them.
//!
//! The registry deletes what was handed over as soon as no checkpoint of its own names it. A call that did not say Ok may
//! have done all, some or nothing of what it was to do.

use std::collections::{BTreeMap, BTreeSet};

use tidelog::{ChangelogHandle, LogId, RegisterError, ReleaseError};

use super::History;

/// So many names of holders, so that some are used again.
const NAMES: u64 = 6;

/// Bucket and name of a file.
type File = (String, String);

#[derive(Default)]
pub(super) struct Holder {
    /// What it has for certain, by the index of the log.
    own: Vec<(usize, ChangelogHandle)>,
    /// What the registry has under this name.
    handed_over: Vec<(usize, ChangelogHandle)>,
    /// What the registry has still to delete, since a release was not answered by Ok.
    leaving: BTreeSet<File>,
    /// It may have something that the call did not say it has, or have been let go.
    unsure: bool,
}

/// Who holds what.
#[derive(Default)]
pub(super) struct Holds {
    holders: BTreeMap<String, Holder>,
    /// Every file that was ever to be handed over.
    handed_over: BTreeSet<File>,
    /// Files whose hand-over was not answered by Ok: they may be nobody's when they are let go of.
    undecided: BTreeSet<File>,
    /// Logs and files for which a holder was to let go of what was handed over.
    let_go: BTreeSet<(LogId, File)>,
    /// Deleted by the registry.
    gone: BTreeSet<File>,
    pub(super) ever_sick: bool,
    outcomes: BTreeSet<String>,
}

fn files(handle: &ChangelogHandle) -> impl Iterator<Item = File> {
    handle.objects().map(|(bucket, file)| (bucket.to_owned(), file.to_owned()))
}

impl Holds {
    /// Whether the registry has deleted something that the handle names.
    pub(super) fn is_gone(&self, handle: &ChangelogHandle) -> bool {
        files(handle).any(|file| self.gone.contains(&file))
    }

    /// Whether nobody may be there to delete the file.
    pub(super) fn is_undecided(&self, file: &File) -> bool {
        self.undecided.contains(file)
    }

    /// Whether a holder let go of an object that was handed over, and no other one has it for the log.
    pub(super) fn is_let_go(&self, log: LogId, object: &str) -> bool {
        let of_object = |file: &File| file.1.starts_with(object);
        let let_go = self.let_go.iter().any(|(of, file)| *of == log && of_object(file));
        let handles = self.holders.values().flat_map(|holder| &holder.handed_over);
        let has = |(_, handle): &(usize, ChangelogHandle)| {
            handle.log() == log && files(handle).any(|file| of_object(&file))
        };
        let_go && !handles.into_iter().any(has)
    }

    pub(super) fn any_let_go(&self, log: LogId) -> bool {
        self.let_go.iter().any(|(of, _)| *of == log)
    }

    /// Whether a holder has a file for certain.
    fn has(&self, file: &File) -> bool {
        let handles = self.holders.values().flat_map(|holder| &holder.own);
        !self.handed_over.contains(file)
            && handles.into_iter().any(|(_, handle)| files(handle).any(|of| of == *file))
    }
}

impl History {
    pub fn outcomes(&self) -> &BTreeSet<String> {
        &self.holds.outcomes
    }

    /// Registers some handles, whatever has become of what they name.
    pub fn register(&mut self, count: usize) {
        let all: Vec<(usize, ChangelogHandle)> = self.handles().collect();
        if all.is_empty() {
            return;
        }
        let chosen = (0..count).map(|_| all[self.rng.below(all.len() as u64) as usize].clone()).collect();
        let name = self.any_name();
        self.register_as(name, chosen);
    }

    /// Registers the last handle of a log, whatever has become of what it names.
    pub fn register_of(&mut self, log: usize) {
        let Some(handle) = self.model.logs[log].handles.last().cloned() else { return };
        let name = self.any_name();
        self.register_as(name, vec![(log, handle)]);
    }

    /// Registers all handles that are still needed.
    pub fn register_all(&mut self, name: u64) {
        let needed = self.needed_handles();
        self.register_as(format!("h{name}"), needed);
    }

    /// Hands over, for each log, a handle of which nothing is truncated, as an engine does with a checkpoint.
    pub fn hand_over(&mut self) {
        let mut last: BTreeMap<usize, ChangelogHandle> = BTreeMap::new();
        for (log, handle) in self.needed_handles() {
            if handle.from().0 >= self.model.logs[log].truncated || !last.contains_key(&log) {
                last.insert(log, handle);
            }
        }
        let chosen: Vec<(usize, ChangelogHandle)> = last.into_iter().collect();
        let Some(changelog) = &self.changelog else { return };
        let name = format!("h{}", self.rng.below(NAMES));
        let handles: Vec<ChangelogHandle> = chosen.iter().map(|(_, handle)| handle.clone()).collect();
        say!(self, "hand over to {name}: {} handles", handles.len());
        let outcome = changelog.hand_over(&name, &handles);
        if !matches!(&outcome, Err(error) if is_before_any_change(error)) {
            self.holds.handed_over.extend(handles.iter().flat_map(files));
            if outcome.is_err() || self.machine.is_down() {
                self.holds.undecided.extend(handles.iter().flat_map(files));
            }
        }
        self.registered(name, chosen, true, outcome);
    }

    fn register_as(&mut self, name: String, chosen: Vec<(usize, ChangelogHandle)>) {
        let Some(changelog) = &self.changelog else { return };
        let handles: Vec<ChangelogHandle> = chosen.iter().map(|(_, handle)| handle.clone()).collect();
        say!(self, "register {name}: {} handles", handles.len());
        let outcome = changelog.register(&name, &handles);
        self.registered(name, chosen, false, outcome);
    }

    fn registered(
        &mut self,
        name: String,
        chosen: Vec<(usize, ChangelogHandle)>,
        hand_over: bool,
        outcome: Result<(), RegisterError>,
    ) {
        say!(self, "{name}: {outcome:?}");
        // Waiting for the answer was stepping.
        self.look();
        self.note(u64::from(outcome.is_ok()));
        // A dead process tells nobody anything.
        if self.machine.is_down() {
            self.holds.holders.entry(name).or_default().unsure = true;
            return;
        }
        let verb = if hand_over { "hand over" } else { "register" };
        let error = match outcome {
            Ok(()) => {
                self.holds.outcomes.insert(format!("{verb}: ok"));
                let holder = self.holds.holders.entry(name).or_default();
                if hand_over { &mut holder.handed_over } else { &mut holder.own }.extend(chosen);
                return self.check_holders();
            }
            Err(error) => error,
        };
        let variant = format!("{error:?}");
        let variant = variant.split(|c: char| !c.is_ascii_alphanumeric()).next().unwrap_or_default();
        self.holds.outcomes.insert(format!("{verb}: {variant}"));
        let full = self.may_be_full();
        let explained = match &error {
            RegisterError::NotOwned { bucket, object } => {
                let file = (bucket.clone(), object.clone());
                if self.machine.objects().contains_key(&file) {
                    self.holds.outcomes.insert(format!("{verb}: NotOwned, being deleted"));
                }
                let may_be_away = self.machine.ever_away;
                assert!(
                    self.silent_faults || may_be_away || !self.holds.has(&file),
                    "{file:?} is held, and was refused"
                );
                let truncated = chosen.iter().any(|(log, handle)| {
                    let names = |extent: &&tidelog::Extent| extent.object() == object;
                    let truncated = self.model.logs[*log].truncated;
                    handle.extents().iter().filter(names).any(|extent| extent.end.0 <= truncated)
                });
                truncated
                    || may_be_away
                    || self.silent_faults
                    || self.holds.ever_sick
                    || self.holds.handed_over.contains(&file)
            }
            RegisterError::HandedOver { bucket, object } => {
                !hand_over && self.holds.handed_over.contains(&(bucket.clone(), object.clone()))
            }
            RegisterError::StillNeeded { bucket, object, logs } => {
                let given = |log: &LogId| {
                    chosen.iter().any(|(_, handle)| {
                        handle.log() == *log && handle.objects().any(|file| file == (bucket, object))
                    })
                };
                hand_over && !logs.is_empty() && !logs.iter().any(given)
            }
            RegisterError::OutOfService { .. } => self.machine.is_sick(),
            RegisterError::Manifest(_) => self.machine.disk_faults() > 0 || full,
            _ => false,
        };
        assert!(explained, "{name} was refused for no reason: {error}");
        if !is_before_any_change(&error) {
            self.holds.holders.entry(name).or_default().unsure = true;
        }
    }

    pub fn release_some(&mut self) {
        let name = self.any_name();
        self.release_as(&name);
    }

    pub fn release(&mut self, name: u64) {
        self.release_as(&format!("h{name}"));
    }

    fn release_as(&mut self, name: &str) {
        // What was answered before may name what is let go of now.
        self.poll();
        let mut holder = self.holds.holders.remove(name).unwrap_or_default();
        for (_, handle) in &holder.handed_over {
            self.holds.let_go.extend(files(handle).map(|file| (handle.log(), file)));
        }
        if holder.unsure {
            // It may have more than was said.
            let logs: Vec<LogId> = self.model.logs.iter().map(|log| log.id).collect();
            let all =
                self.holds.handed_over.iter().flat_map(|file| logs.iter().map(|log| (*log, file.clone())));
            self.holds.let_go.extend(all);
        }
        let Some(changelog) = &self.changelog else { return };
        say!(self, "release {name}");
        let outcome = changelog.release(name);
        say!(self, "{name}: {outcome:?}");
        self.look();
        self.poll();
        if self.machine.is_down() || outcome.is_err() {
            if !self.machine.is_down() {
                let error = outcome.expect_err("it failed");
                let explained = match &error {
                    ReleaseError::Manifest(_) => self.machine.disk_faults() > 0 || self.may_be_full(),
                    ReleaseError::OutOfService { .. } => self.machine.is_sick(),
                    _ => false,
                };
                assert!(explained, "{name} was not released for no reason: {error}");
            }
            holder.own.clear();
            holder.leaving.extend(
                holder.handed_over.drain(..).flat_map(|(_, handle)| files(&handle).collect::<Vec<_>>()),
            );
            holder.unsure = true;
            self.holds.holders.insert(name.to_owned(), holder);
            return;
        }
        self.holds.outcomes.insert("release: ok".to_owned());
        let kept: BTreeSet<File> = self
            .holds
            .holders
            .values()
            .flat_map(|holder| &holder.handed_over)
            .flat_map(|(_, handle)| files(handle))
            .collect();
        let leaving = holder.handed_over.iter().flat_map(|(_, handle)| files(handle)).chain(holder.leaving);
        if let Some(unsure) = self.holds.holders.values_mut().find(|holder| holder.unsure) {
            // It may have them too, and is released first.
            unsure.leaving.extend(leaving);
            return;
        }
        if self.machine.is_away() {
            // The one that is not there still has it.
            self.holds.undecided.extend(leaving);
            return;
        }
        for file in leaving {
            if !kept.contains(&file) && self.holds.gone.insert(file.clone()) {
                say!(self, "the registry deletes {file:?}");
                self.machine.delete_object(&file.0, &file.1);
            }
        }
        for log in &mut self.model.logs {
            log.handles.retain(|handle| !self.holds.is_gone(handle));
        }
    }

    /// What an open says of the holders there are.
    pub(super) fn recover_holders(&mut self) {
        let Some(changelog) = &self.changelog else { return };
        let found: BTreeSet<String> = changelog.holders().into_iter().collect();
        say!(self, "holders: {found:?}");
        for name in &found {
            let known = self.holds.holders.contains_key(name);
            // It may have been released without a directory that is back.
            assert!(known || self.silent_faults || self.machine.ever_away, "holder {name} was released");
            if !known && self.machine.ever_away {
                let unsure = Holder { unsure: true, ..Holder::default() };
                self.holds.holders.insert(name.clone(), unsure);
            }
        }
        if self.machine.ever_away && self.holds.ever_sick {
            // Who knew of it may have been the one that is not there.
            self.holds.holders.values_mut().for_each(|holder| holder.own.clear());
        }
        self.holds.holders.retain(|name, holder| {
            // Who registered nothing but empty handles has nothing.
            let mut handles = holder.own.iter().chain(&holder.handed_over);
            let has = handles.any(|(_, handle)| !handle.is_empty());
            assert!(
                !has || found.contains(name) || self.silent_faults || self.machine.ever_away,
                "holder {name} is not known any more"
            );
            has || found.contains(name) || !holder.leaving.is_empty()
        });
    }

    /// Everything that a holder has for certain is there, and can be read.
    pub(super) fn check_holders(&mut self) {
        if self.silent_faults {
            return;
        }
        let (objects, contents) = (self.machine.objects(), self.machine.contents());
        for (name, holder) in &self.holds.holders {
            for (log, handle) in holder.own.iter().chain(&holder.handed_over) {
                if self.holds.is_gone(handle) {
                    // It was handed over by another name, and let go of.
                    continue;
                }
                for file in files(handle) {
                    assert!(
                        objects.contains_key(&file),
                        "{file:?} is held by {name} for log {log}, and not there"
                    );
                }
                self.model.check_handle_from(*log, handle, 0, &contents, &mut self.rng);
            }
        }
    }

    pub(super) fn holders_known(&self) -> usize {
        self.changelog.as_ref().map_or(0, |changelog| changelog.holders().len())
    }

    /// Releases every holder that there is.
    pub(super) fn release_all(&mut self) {
        let Some(changelog) = &self.changelog else { return };
        let known = self.holds.holders.keys().cloned();
        for name in changelog.holders().into_iter().chain(known).collect::<BTreeSet<String>>() {
            self.release_as(&name);
        }
    }

    fn any_name(&mut self) -> String {
        format!("h{}", self.rng.below(NAMES))
    }

    fn handles(&self) -> impl Iterator<Item = (usize, ChangelogHandle)> {
        let logs = self.model.logs.iter().enumerate();
        logs.flat_map(|(index, log)| log.handles.iter().map(move |handle| (index, handle.clone())))
    }

    /// Handles that name nothing of which all was truncated.
    fn needed_handles(&self) -> Vec<(usize, ChangelogHandle)> {
        let needed = |(log, handle): &(usize, ChangelogHandle)| {
            let truncated = self.model.logs[*log].truncated;
            !handle.is_empty() && handle.extents().iter().all(|extent| extent.end.0 > truncated)
        };
        self.handles().filter(needed).collect()
    }
}

/// Whether the call is refused before anything is done.
fn is_before_any_change(error: &RegisterError) -> bool {
    !matches!(error, RegisterError::Manifest(_) | RegisterError::OutOfService { .. })
}
