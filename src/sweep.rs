//! `Sweeper`: finds in a bucket what owners that are gone have left, and removes it.
//!
//! A changelog removes what it left itself, by its manifest. This is for what no changelog will remove any more: of
//! directories that were lost or are not opened again, of machines that never came back. It looks only at names as
//! changelogs give them. What is said to be stray is a list first; nothing goes by itself.
//!
//! Names are compared by their last part, which has a unique token: however a bucket's URL is written, and wherever the
//! folders of a name begin, the same object is the same.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use tidelog_io::directory::{self, MANIFEST_NAME, ManifestContent, ManifestError};
use tidelog_upload::bucket::BucketIndex;
use tidelog_upload::{Driver, DriverError, Pending, Runtime, StoreError, UploadId, UploadOptions};

use crate::handle::ChangelogHandle;
use crate::manifest::{ManifestError as RecordError, ManifestState};
use crate::uploader::OBJECT_OPEN_MAX;

const ONLY: BucketIndex = BucketIndex(0);
/// A changelog has completed or given up what it began long before that, as nothing is open longer than half of it.
const ALIVE_MAX: Duration = Duration::from_secs(24 * 3600);

const _: () = assert!(OBJECT_OPEN_MAX.as_secs() * 2 <= ALIVE_MAX.as_secs());

/// Finds what is stray in one bucket.
///
/// An unfinished upload is stray if its changelog is dead for certain: if a [directory](Self::directory) that was given, and
/// that no process has open, says that the upload was its own; or if no directory that was given knows it, and it is older
/// than a day and the [least age](Self::min_age): a changelog completes what it has open within half a day, whether somebody
/// asks for a checkpoint or not.
///
/// A complete object is stray only if the [live handles](Self::live_handles) were given and none of them names it, no
/// directory that was given knows it, and it is older than the least age. Where not the directories of all changelogs alive
/// are given, that age has to be longer than any time between two checkpoints of a log and half a day together: an object may
/// be complete long before the first handle names it, and a bucket may count its age from the beginning of its upload.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let dir = tempfile::tempdir()?;
/// # let bucket = format!("file://{}", dir.path().join("bucket").display());
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
    prefix: String,
    group: Option<String>,
    min_age: Duration,
    /// Last parts of objects' names, of directories that were given.
    known: BTreeSet<String>,
    /// Those of uploads that are not settled, and the directories that nobody has open and that began them.
    dead: BTreeMap<String, PathBuf>,
    /// Last parts of the names of files that live handles refer to.
    live: Option<BTreeSet<String>>,
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
    /// It is not old enough, or the bucket does not say how old it is.
    Young,
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
        let driver = Driver::start(vec![store], Runtime::Own { threads: 1 }, UploadOptions::default())?;
        Ok(Sweeper {
            driver,
            prefix: String::new(),
            group: None,
            min_age: ALIVE_MAX,
            known: BTreeSet::new(),
            dead: BTreeMap::new(),
            live: None,
        })
    }

    /// Looks only into this folder: the [name prefix](crate::Options::name_prefix) of the changelogs.
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
    /// be stray. Without this only uploads are.
    #[must_use]
    pub fn live_handles(mut self, handles: &[ChangelogHandle]) -> Sweeper {
        let names =
            handles.iter().flat_map(ChangelogHandle::objects).map(|(_, object)| last(object).to_owned());
        self.live.get_or_insert_default().extend(names);
        self
    }

    /// What is stray at `now`. Nothing is changed.
    ///
    /// # Errors
    /// What the bucket says.
    pub fn plan(&self, now: SystemTime) -> Result<SweepPlan, SweepError> {
        // With a time in the future nobody knows.
        let age = |since: Option<SystemTime>| now.duration_since(since?).ok();
        let mut plan = SweepPlan::default();
        for upload in answer(|done| self.driver.list_uploads(ONLY, &self.prefix, done))? {
            let Some(object) = self.object_of(&upload.name) else { continue };
            let (age, owner) = (age(upload.created), self.dead.get(object).cloned());
            match self.why_keep_upload(object, age) {
                Some(why) => *plan.kept.entry(why).or_default() += 1,
                None => {
                    let kind = StrayKind::Upload { id: upload.id, owner };
                    plan.strays.push(Stray { name: upload.name, kind, age });
                }
            }
        }
        let Some(live) = &self.live else { return Ok(plan) };
        for object in answer(|done| self.driver.list(ONLY, &self.prefix, done))? {
            let Some(of) = self.object_of(&object.name) else { continue };
            let age = age(object.modified);
            let why = match () {
                () if live.contains(last(&object.name)) => Kept::Live,
                () if self.known.contains(of) => Kept::Known,
                () if age.is_none_or(|age| age < self.min_age) => Kept::Young,
                () => {
                    let kind = StrayKind::Object { bytes: object.bytes };
                    plan.strays.push(Stray { name: object.name, kind, age });
                    continue;
                }
            };
            *plan.kept.entry(why).or_default() += 1;
        }
        Ok(plan)
    }

    fn why_keep_upload(&self, object: &str, age: Option<Duration>) -> Option<Kept> {
        if self.dead.contains_key(object) {
            return None;
        }
        if self.known.contains(object) {
            return Some(Kept::InUse);
        }
        age.is_none_or(|age| age < self.min_age.max(ALIVE_MAX)).then_some(Kept::Young)
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

    /// The last part of the name of the object that a file belongs to, if a changelog of the group named it.
    fn object_of<'a>(&self, name: &'a str) -> Option<&'a str> {
        let (object, group) = object_of(name)?;
        self.group.as_ref().is_none_or(|wanted| wanted == group).then(|| last(object))
    }
}

fn answer<T: Send + 'static>(
    ask: impl FnOnce(Box<dyn FnOnce(Result<T, StoreError>) + Send>),
) -> Result<T, SweepError> {
    let (resolver, pending): (_, Pending<Result<T, StoreError>>) = tidelog_upload::channel();
    ask(Box::new(move |outcome| resolver.resolve(outcome)));
    Ok(pending.wait().map_err(|_| SweepError::Closed)??)
}

/// A name without its folders.
fn last(name: &str) -> &str {
    name.rsplit('/').next().unwrap_or(name)
}

/// The name of the object that a file belongs to, and its group; `None` if it is not named as changelogs name files.
fn object_of(name: &str) -> Option<(&str, &str)> {
    let (folder, last) = name.rsplit_once('/')?;
    let group = folder.rsplit_once('/').map_or(folder, |(_, group)| group);
    let stem = last.split_once('.').map_or(last, |(stem, _)| stem);
    let (number, token) = stem.split_once('-')?;
    let hexadecimal = |c: u8| matches!(c, b'0'..=b'9' | b'a'..=b'f');
    let sound = number.len() >= 8
        && number.bytes().all(|c| c.is_ascii_digit())
        && token.len() == 16
        && token.bytes().all(hexadecimal);
    let suffix = last[stem.len()..].bytes().all(|c| c.is_ascii_digit() || matches!(c, b'.' | b'w'));
    (sound && suffix).then(|| (&name[..folder.len() + 1 + stem.len()], group))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::{KeyGroup, KeyGroupRange, SequenceNumber};
    use crate::{Changelog, Options};

    #[test]
    fn only_names_that_changelogs_give_are_looked_at() {
        let name = "jobs/4f/orders/00000007-00000000000000ff";
        assert_eq!(object_of(name), Some((name, "orders")));
        assert_eq!(object_of(&format!("{name}.00012.1")), Some((name, "orders")));
        assert_eq!(object_of(&format!("{name}.w2")), Some((name, "orders")));
        for other in [
            "00000007-00000000000000ff",
            "orders/notes.txt",
            "orders/00000007",
            "orders/7-00000000000000ff",
            "orders/00000007-00000000000000fg",
            "orders/00000007-00000000000000ff.bak",
            "orders/00000007-00000000000000ff/x",
        ] {
            assert_eq!(object_of(other), None, "{other}");
        }
    }

    #[test]
    fn what_a_handle_or_a_directory_names_is_spared() {
        let dir = tempfile::tempdir().unwrap();
        let bucket = format!("file://{}", dir.path().join("bucket").display());
        let handle = |name: &str| {
            let local = dir.path().join(name);
            let options = Options::new(&bucket, &local).segment_bytes(1 << 20).local_bytes(4 << 20);
            let changelog = Changelog::open(options).unwrap();
            let mut writer = changelog.create_writer(name, KeyGroupRange::ALL).unwrap();
            writer.append(KeyGroup(1), name.as_bytes()).unwrap();
            writer.persist_durably(SequenceNumber::ZERO).wait().unwrap()
        };
        let [lost, kept, known] = ["lost", "kept", "known"].map(handle);
        std::fs::write(dir.path().join("bucket/tidelog/notes.txt"), "mine").unwrap();
        let later = SystemTime::now() + Duration::from_secs(7200);
        let sweeper = || Sweeper::open(&bucket).unwrap().min_age(Duration::from_secs(3600));
        let plan = |sweeper: &Sweeper, now| names(&sweeper.plan(now).unwrap());
        let file = |handle: &ChangelogHandle| handle.objects().next().unwrap().1.to_owned();
        assert_eq!(plan(&sweeper(), later), [""; 0], "without handles no object is stray");
        let all = sweeper().live_handles(&[]);
        assert_eq!(plan(&all, SystemTime::now()), [""; 0], "nothing is old enough");
        assert_eq!(plan(&all, later).len(), 3);
        assert_eq!(plan(&sweeper().group("others").live_handles(&[]), later), [""; 0]);
        assert_eq!(plan(&sweeper().prefix("other").live_handles(&[]), later), [""; 0]);
        let careful = sweeper().live_handles(std::slice::from_ref(&kept));
        let careful = careful.directory(dir.path().join("known")).unwrap();
        let found = careful.plan(later).unwrap();
        assert_eq!(names(&found), [file(&lost)]);
        assert_eq!(found.kept, BTreeMap::from([(Kept::Known, 1), (Kept::Live, 1)]));
        for stray in found.strays {
            careful.remove(&stray).unwrap();
            careful.remove(&stray).unwrap();
        }
        assert_eq!(plan(&careful, later), [""; 0]);
        assert_eq!(plan(&all, later), {
            let mut left = [file(&kept), file(&known)];
            left.sort();
            left
        });
        assert!(dir.path().join("bucket/tidelog/notes.txt").exists());
        assert!(matches!(sweeper().directory(dir.path()), Err(SweepError::Directory { .. })));
        // The same bucket by another URL.
        let outer = Sweeper::open(&format!("file://{}", dir.path().display())).unwrap().prefix("bucket");
        let outer = outer.min_age(Duration::ZERO).live_handles(&[kept]);
        assert_eq!(plan(&outer, later), [format!("bucket/{}", file(&known))]);
        assert_eq!(plan(&outer.directory(dir.path().join("known")).unwrap(), later), [""; 0]);
    }

    fn names(plan: &SweepPlan) -> Vec<String> {
        plan.strays.iter().map(|stray| stray.name.clone()).collect()
    }

    #[test]
    fn old_uploads_that_nobody_knows_are_given_up() {
        let store = tidelog_upload::open_store("memory://sweep").unwrap();
        let name = "tidelog/00000007-00000000000000ff";
        tidelog_upload::block_on(store.create(name)).unwrap();
        tidelog_upload::block_on(store.create("tidelog/other")).unwrap();
        let sweeper = Sweeper::open("memory://sweep").unwrap().min_age(Duration::from_secs(60));
        let after = |hours: u64| sweeper.plan(SystemTime::now() + Duration::from_secs(3600 * hours)).unwrap();
        assert_eq!(names(&after(23)), [""; 0], "its changelog may be alive");
        assert_eq!(after(23).kept, BTreeMap::from([(Kept::Young, 1)]));
        let strays = after(25).strays;
        assert_eq!(strays.iter().map(|stray| stray.name.as_str()).collect::<Vec<_>>(), [name]);
        sweeper.remove(&strays[0]).unwrap();
        assert_eq!(after(25), SweepPlan::default());
    }

    #[test]
    fn uploads_of_a_directory_that_nobody_has_open_are_given_up() {
        let dir = tempfile::tempdir().unwrap();
        let bucket = "memory://owned";
        let sweeper = || Sweeper::open(bucket).unwrap().directory(dir.path()).unwrap();
        let store = tidelog_upload::open_store(bucket).unwrap();
        let name = "tidelog/00000007-00000000000000ff";
        let opened = crate::manifest::ManifestRecord::UploadOpened {
            buckets: vec![bucket.into()],
            object: name.to_owned(),
            token: 255,
        };
        let lock = directory::Directory::open(dir.path()).unwrap();
        let mut manifest = directory::Manifest::create(lock.files(), 1).unwrap();
        manifest.append(&[opened.encode()]).unwrap();
        tidelog_upload::block_on(store.create(name)).unwrap();
        let now = SystemTime::now();
        assert_eq!(sweeper().plan(now).unwrap().kept, BTreeMap::from([(Kept::InUse, 1)]));
        assert_eq!(sweeper().plan(now + 2 * ALIVE_MAX).unwrap().strays, []);
        drop(lock);
        let plan = sweeper().plan(now).unwrap();
        assert_eq!(names(&plan), [name]);
        let owner = Some(dir.path().to_owned());
        assert!(matches!(&plan.strays[0].kind, StrayKind::Upload { owner: of, .. } if *of == owner));
        sweeper().remove(&plan.strays[0]).unwrap();
        assert_eq!(sweeper().plan(now).unwrap(), SweepPlan::default());
    }
}
