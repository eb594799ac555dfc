//! `Sweeper`: finds in a bucket what owners that are gone have left, and removes it.
//!
//! A changelog removes what it left itself, by its manifest. This is for what no changelog will remove any more: of
//! directories that were lost or are not opened again, of machines that never came back. It looks only at names as
//! changelogs give them, in the one folder where they would be: deeper folders are other changelogs' prefixes. What is said
//! to be stray is a list first; nothing goes by itself.
//!
//! Names are compared by their last part, which has a unique token: however a bucket's URL is written, and wherever the
//! folders of a name begin, the same object is the same.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tidelog_io::directory::{self, MANIFEST_NAME, ManifestContent, ManifestError};
use tidelog_upload::bucket::BucketIndex;
use tidelog_upload::{Driver, DriverError, Pending, Runtime, StoreError, UploadId, UploadOptions};

use crate::handle::ChangelogHandle;
use crate::manifest::{ManifestError as RecordError, ManifestState};
use crate::options::{OptionError, PERSIST_TIMEOUT_MAX, check_group, check_prefix};
use crate::uploader::{CANARY, OBJECT_OPEN_MAX, name_hash};

const ONLY: BucketIndex = BucketIndex(0);
/// A changelog has completed or given up by then what it began: an object is open for half of it at most, then it waits for
/// those before it, and for its own commit.
const ALIVE_MAX: Duration = Duration::from_secs(24 * 3600);
/// The beginning of 2020, by Unix time. No changelog is older, so a bucket that dates something earlier does not know when it
/// was made: some test servers say the same day of 2010 of everything.
const BELIEVED_FROM: Duration = Duration::from_secs(1_577_836_800);

const _: () = assert!(OBJECT_OPEN_MAX.as_secs() + 2 * PERSIST_TIMEOUT_MAX.as_secs() <= ALIVE_MAX.as_secs());

/// Finds what is stray in one bucket.
///
/// An unfinished upload is stray if its changelog is dead for certain: if a [directory](Self::directory) that was given, and
/// that no process has open, says that the upload was its own; or if no directory that was given knows it, and it is older
/// than a day and the [least age](Self::min_age): a changelog ends what it has open within half a day, whether somebody asks
/// for a checkpoint or not, and has its commit, or has given it up, within a day.
///
/// A complete object is stray only if the [live handles](Self::live_handles) were given and none of them names it, no
/// directory that was given knows it, and it is older than the least age. Where not the directories of all changelogs alive
/// are given, that age has to be longer than any time between two checkpoints of a log and half a day together: an object may
/// be complete long before the first handle names it, and a bucket may count its age from the beginning of its upload.
///
/// Only names `[prefix/][two characters of a hash/]group/object` below the bucket's URL are looked at. What is in deeper
/// folders belongs to changelogs with another URL or prefix, which are swept with that.
///
/// Ages are those that the bucket tells: its clock and this machine's have to agree to the hour. What is dated before 2020
/// is of unknown age. AWS refuses whoever's clock differs by a quarter of an hour; a server that does not has to be trusted.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let dir = tempfile::tempdir()?;
/// # let bucket = format!("file://{}", dir.path().display());
/// use std::time::{Duration, SystemTime};
/// use tidelog::Sweeper;
///
/// let sweeper = Sweeper::open(&bucket)?.min_age(Duration::from_secs(24 * 3600)).live_handles(&[]);
/// for stray in sweeper.plan(SystemTime::now())?.strays {
///     println!("{stray:?}");
///     sweeper.remove(&stray)?;
/// }
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct Sweeper {
    driver: Driver,
    /// The bucket's URL, for errors.
    url: String,
    /// Empty, or ends with `/`.
    prefix: String,
    group: Option<String>,
    min_age: Duration,
    /// Last parts of objects' names, of directories that were given.
    known: BTreeSet<String>,
    /// Those of uploads that are not settled, and the directories that nobody has open and that began them.
    dead: BTreeMap<String, PathBuf>,
    live: Option<Live>,
}

/// What live handles say.
#[derive(Debug, Default)]
struct Live {
    handles: usize,
    /// Last parts of the names of files that they refer to.
    files: BTreeSet<String>,
}

/// What a bucket holds of what a sweeper looks at.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SweepPlan {
    /// What may be removed.
    pub strays: Vec<Stray>,
    /// How many things stay, and why.
    pub kept: BTreeMap<Kept, u64>,
}

/// Why something is not stray.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Kept {
    /// An upload of a changelog that is open, as its directory says.
    InUse,
    /// An object that a directory knows.
    Known,
    /// An object that a live handle names.
    Live,
    /// It is not old enough.
    Young,
    /// The bucket does not say how old it is, or says what cannot be: that it is older than tidelog.
    Undated,
}

/// Something in the bucket that no owner known to the sweeper needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stray {
    /// Its name in the bucket.
    pub name: String,
    /// What it is.
    pub kind: StrayKind,
    /// How long it has been there, by the clocks of the bucket and this machine, if the bucket says so.
    pub age: Option<Duration>,
}

/// What is stray.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StrayKind {
    /// An upload that nobody completed.
    Upload {
        /// How the bucket calls it.
        id: UploadId,
        /// The directory of the changelog that began it, if that was given.
        owner: Option<PathBuf>,
    },
    /// An object that no live handle names.
    Object {
        /// Its length in bytes.
        bytes: u64,
    },
}

/// Why a sweep failed. What was not removed is found by the next one.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SweepError {
    /// The bucket cannot be used, or a request to it failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The threads for requests could not be started.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// A manifest cannot be read, so what its directory needs is unknown.
    #[error("the manifest in {directory} cannot be read: {source}; leave the directory out if it is dead")]
    Directory {
        /// The local directory.
        directory: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A manifest is damaged, foreign or newer.
    #[error("the manifest in {directory} cannot be read: {source}; leave the directory out if it is dead")]
    Manifest {
        /// The local directory.
        directory: PathBuf,
        /// What is wrong with it.
        source: ManifestError,
    },
    /// A record of a manifest makes no sense, or is newer.
    #[error(
        "the manifest in {directory} cannot be replayed: {source}; leave the directory out if it is dead"
    )]
    Record {
        /// The local directory.
        directory: PathBuf,
        /// What is wrong with it.
        source: RecordError,
    },
    /// Live handles were given, and none of them names anything here.
    #[error(
        "objects in {bucket} would go ({objects}), and none of the live handles ({handles}) names a file there: they seem to be \
         other changelogs' handles; give those of the changelogs that write to this place, or none, to remove unfinished \
         uploads alone; if nobody needs these objects, delete their folder by the bucket's own means"
    )]
    ForeignHandles {
        /// The bucket.
        bucket: String,
        /// How many handles were given.
        handles: usize,
        /// How many objects would be stray.
        objects: usize,
    },
    /// No changelog has such a prefix, or such a group.
    #[error(transparent)]
    Option(#[from] OptionError),
    /// The requests were cut off.
    #[error("the sweep was cut off")]
    Closed,
}

impl Sweeper {
    /// A sweeper of the bucket of this URL, for what is older than a day.
    ///
    /// # Errors
    /// A bucket that cannot be opened.
    pub fn open(bucket: &str) -> Result<Sweeper, SweepError> {
        let store = tidelog_upload::open_store(bucket)?;
        let url = store.url().to_owned();
        let driver = Driver::start(vec![store], Runtime::Own { threads: 1 }, UploadOptions::default())?;
        Ok(Sweeper {
            driver,
            url,
            prefix: String::new(),
            group: None,
            min_age: ALIVE_MAX,
            known: BTreeSet::new(),
            dead: BTreeMap::new(),
            live: None,
        })
    }

    /// Looks into this folder: the [name prefix](crate::Options::name_prefix) of the changelogs.
    #[must_use]
    pub fn prefix(mut self, prefix: impl Into<String>) -> Sweeper {
        self.prefix = prefix.into();
        if !self.prefix.is_empty() && !self.prefix.ends_with('/') {
            self.prefix.push('/');
        }
        self
    }

    /// Looks only at objects of this [group](crate::Options::group).
    #[must_use]
    pub fn group(mut self, group: impl Into<String>) -> Sweeper {
        self.group = Some(group.into());
        self
    }

    /// What is younger is not stray, except uploads of a [directory](Self::directory) that nobody has open: a day, unless
    /// said otherwise.
    #[must_use]
    pub fn min_age(mut self, age: Duration) -> Sweeper {
        self.min_age = age;
        self
    }

    /// Spares the objects that the manifest of a local directory names, whether a changelog has it open or not, and its
    /// uploads if one has.
    ///
    /// # Errors
    /// A manifest that cannot be read.
    pub fn directory(mut self, directory: impl AsRef<Path>) -> Result<Sweeper, SweepError> {
        let directory = directory.as_ref().to_owned();
        let unreadable = |source| SweepError::Directory { directory: directory.clone(), source };
        let bytes = std::fs::read(directory.join(MANIFEST_NAME)).map_err(unreadable)?;
        // After the manifest: what was begun by then is of the process that is gone, as an upload is never continued by
        // the next one.
        let is_open = directory::is_locked(&directory).map_err(unreadable)?;
        let content = ManifestContent::decode(&bytes)
            .map_err(|source| SweepError::Manifest { directory: directory.clone(), source })?;
        let state = ManifestState::replay(content.records.iter().map(Vec::as_slice))
            .map_err(|source| SweepError::Record { directory: directory.clone(), source })?;
        self.known
            .extend(state.uploads().keys().chain(state.objects().keys()).map(|name| last(name).to_owned()));
        if !is_open {
            self.dead.extend(state.uploads().keys().map(|name| (last(name).to_owned(), directory.clone())));
        }
        Ok(self)
    }

    /// These are all handles that anybody may still read, in whatever bucket: complete objects that none of them names may
    /// be stray. Without this only uploads are. No handles at all say that nobody needs any object; handles of which none
    /// names anything in the bucket are refused by [`plan`](Self::plan), if objects would be stray.
    #[must_use]
    pub fn live_handles(mut self, handles: &[ChangelogHandle]) -> Sweeper {
        let live = self.live.get_or_insert_default();
        live.handles += handles.len();
        live.files.extend(
            handles.iter().flat_map(ChangelogHandle::objects).map(|(_, object)| last(object).to_owned()),
        );
        self
    }

    /// What is stray at `now`. Nothing is changed.
    ///
    /// # Errors
    /// A prefix or a group that no changelog can have, what the bucket says, and [`SweepError::ForeignHandles`].
    pub fn plan(&self, now: SystemTime) -> Result<SweepPlan, SweepError> {
        check_prefix("prefix", self.prefix.strip_suffix('/').unwrap_or(&self.prefix))?;
        self.group.as_deref().map_or(Ok(()), check_group)?;
        let mut plan = SweepPlan::default();
        let uploads = answer(|done| self.driver.list_uploads(ONLY, &self.prefix, done))?;
        let foreign = self.foreign(uploads.iter().map(|upload| &*upload.name));
        for upload in &uploads {
            let Some(object) = self.object_of(&upload.name, &foreign) else { continue };
            let age = age(upload.created, now);
            match self.why_keep_upload(object, age) {
                Some(why) => *plan.kept.entry(why).or_default() += 1,
                None => {
                    let owner = self.dead.get(object).cloned();
                    let kind = StrayKind::Upload { id: upload.id.clone(), owner };
                    plan.strays.push(Stray { name: upload.name.clone(), kind, age: age.ok() });
                }
            }
        }
        let Some(live) = &self.live else { return Ok(plan) };
        let objects = answer(|done| self.driver.list(ONLY, &self.prefix, done))?;
        let foreign = self.foreign(objects.iter().map(|object| &*object.name));
        for canary in objects.iter().filter(|object| self.is_canary(&object.name)) {
            // It is there for moments, and its owner does not miss it.
            let age = age(canary.modified, now);
            if age.is_ok_and(|age| age >= self.min_age) {
                let kind = StrayKind::Object { bytes: canary.bytes };
                plan.strays.push(Stray { name: canary.name.clone(), kind, age: age.ok() });
            }
        }
        let others = plan.strays.len();
        for object in &objects {
            let Some(of) = self.object_of(&object.name, &foreign) else { continue };
            let age = age(object.modified, now);
            let why = match age {
                _ if live.files.contains(last(&object.name)) => Kept::Live,
                _ if self.known.contains(of) => Kept::Known,
                Err(why) => why,
                Ok(age) if age < self.min_age => Kept::Young,
                Ok(_) => {
                    let kind = StrayKind::Object { bytes: object.bytes };
                    plan.strays.push(Stray { name: object.name.clone(), kind, age: age.ok() });
                    continue;
                }
            };
            *plan.kept.entry(why).or_default() += 1;
        }
        let objects = plan.strays.len() - others;
        if live.handles > 0 && objects > 0 && !plan.kept.contains_key(&Kept::Live) {
            let (bucket, handles) = (self.url.clone(), live.handles);
            return Err(SweepError::ForeignHandles { bucket, handles, objects });
        }
        Ok(plan)
    }

    fn why_keep_upload(&self, object: &str, age: Result<Duration, Kept>) -> Option<Kept> {
        if self.dead.contains_key(object) {
            return None;
        }
        if self.known.contains(object) {
            return Some(Kept::InUse);
        }
        match age {
            Err(why) => Some(why),
            Ok(age) => (age < self.min_age.max(ALIVE_MAX)).then_some(Kept::Young),
        }
    }

    /// Removes one of the things that a [plan](Self::plan) named. What is gone already is removed.
    ///
    /// # Errors
    /// What the bucket says.
    pub fn remove(&self, stray: &Stray) -> Result<(), SweepError> {
        match &stray.kind {
            StrayKind::Upload { id, .. } => {
                answer(|done| self.driver.abort(ONLY, &stray.name, id.clone(), done))
            }
            StrayKind::Object { .. } => answer(|done| self.driver.delete(ONLY, &stray.name, done)),
        }
    }

    /// The last part of the name of the object that a file belongs to, if a changelog of the prefix and the group named it.
    fn object_of<'a>(&self, name: &'a str, foreign: &BTreeSet<&str>) -> Option<&'a str> {
        let place = Place::of(name.strip_prefix(&self.prefix)?)?;
        let is_own = self.group.as_ref().is_none_or(|wanted| wanted == place.group)
            && place.hash.is_none_or(|folder| !foreign.contains(folder));
        is_own.then_some(place.object)
    }

    /// Whether a changelog of the prefix and the group wrote it to see whether the bucket works.
    fn is_canary(&self, name: &str) -> bool {
        let Some((group, last)) = name.strip_prefix(&self.prefix).and_then(|name| name.split_once('/'))
        else {
            return false;
        };
        let is_own = self.group.as_ref().is_none_or(|wanted| wanted == group);
        is_own && last.strip_prefix(CANARY).is_some_and(|owner| owner.len() == 16 && is_hexadecimal(owner))
    }

    /// The folders that could be named by a hash and are not: a name in them has another one. They are prefixes of other
    /// changelogs.
    fn foreign<'a>(&self, names: impl Iterator<Item = &'a str>) -> BTreeSet<&'a str> {
        names
            .filter_map(|name| Place::of(name.strip_prefix(&self.prefix)?))
            .filter(|place| !place.has_its_hash)
            .filter_map(|place| place.hash)
            .collect()
    }
}

/// How old something is, or why that keeps it.
fn age(since: Option<SystemTime>, now: SystemTime) -> Result<Duration, Kept> {
    match since {
        Some(since) if since >= UNIX_EPOCH + BELIEVED_FROM => {
            now.duration_since(since).map_err(|_| Kept::Young)
        }
        _ => Err(Kept::Undated),
    }
}

fn answer<T: Send + 'static>(
    ask: impl FnOnce(Box<dyn FnOnce(Result<T, StoreError>) + Send>),
) -> Result<T, SweepError> {
    let (resolver, pending): (_, Pending<Result<T, StoreError>>) = tidelog_upload::channel();
    ask(Box::new(move |outcome| resolver.resolve(outcome)));
    Ok(pending.wait().map_err(|_| SweepError::Closed)??)
}

fn is_hexadecimal(text: &str) -> bool {
    text.bytes().all(|c| matches!(c, b'0'..=b'9' | b'a'..=b'f'))
}

/// A name without its folders.
fn last(name: &str) -> &str {
    name.rsplit('/').next().unwrap_or(name)
}

/// Where a changelog put a file, by its name without the prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Place<'a> {
    /// The last part of the name of the object that it belongs to.
    object: &'a str,
    group: &'a str,
    /// The folder of two hexadecimal characters before the group.
    hash: Option<&'a str>,
    /// Whether that folder, if there is one, is the hash of the object's name.
    has_its_hash: bool,
}

impl<'a> Place<'a> {
    /// `None` if it is not named as changelogs name files, or is in a deeper folder.
    fn of(name: &'a str) -> Option<Place<'a>> {
        let (folder, last) = name.rsplit_once('/')?;
        let (hash, group) =
            folder.split_once('/').map_or((None, folder), |(hash, group)| (Some(hash), group));
        let object = last.split_once('.').map_or(last, |(stem, _)| stem);
        let (number, token) = object.split_once('-')?;
        let sound = !group.is_empty()
            && !group.contains('/')
            && hash.is_none_or(|hash| hash.len() == 2 && is_hexadecimal(hash))
            && number.len() >= 8
            && number.bytes().all(|c| c.is_ascii_digit())
            && token.len() == 16
            && is_hexadecimal(token)
            && last[object.len()..].bytes().all(|c| c.is_ascii_digit() || matches!(c, b'.' | b'w'));
        let has_its_hash = || hash.is_none_or(|hash| hash == name_hash(&format!("{group}/{object}")));
        sound.then(|| Place { object, group, hash, has_its_hash: has_its_hash() })
    }
}

#[cfg(test)]
mod tests;
