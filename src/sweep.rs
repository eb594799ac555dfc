//! `Sweeper`: finds in a bucket what owners that are gone have left, and removes it.
//!
//! A changelog removes what it left itself, by its manifest. This is for what no manifest remembers: of directories that
//! were lost, or of machines that never came back. It looks only at names as changelogs give them, and never at anything
//! that a given manifest or a given handle names. What is said to be stray is a list first; nothing goes by itself.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tidelog_io::directory::{MANIFEST_NAME, ManifestContent, ManifestError};
use tidelog_upload::bucket::BucketIndex;
use tidelog_upload::{Driver, DriverError, Pending, Runtime, StoreError, UploadId, UploadOptions};

use crate::handle::ChangelogHandle;
use crate::manifest::{ManifestError as RecordError, ManifestState};

const ONLY: BucketIndex = BucketIndex(0);

/// Finds what is stray in one bucket.
///
/// An unfinished upload is stray if it is older than the [least age](Self::min_age) and in no
/// [directory](Self::directory) that was given. A complete object is so too, but only when the
/// [live handles](Self::live_handles) were given and none of them names it.
///
/// A changelog may keep an upload open for as long as nobody asks for a checkpoint. So either give the directories of all
/// changelogs that are alive and use the bucket, or choose an age that none of their uploads reaches.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let dir = tempfile::tempdir()?;
/// # let bucket = format!("file://{}", dir.path().join("bucket").display());
/// use std::time::{Duration, SystemTime};
/// use tidelog::Sweeper;
///
/// let sweeper = Sweeper::open(&bucket)?.min_age(Duration::from_secs(24 * 3600)).live_handles(&[]);
/// for stray in sweeper.plan(SystemTime::now())? {
///     println!("{stray:?}");
///     sweeper.remove(&stray)?;
/// }
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct Sweeper {
    driver: Driver,
    bucket: Arc<str>,
    prefix: String,
    group: Option<String>,
    min_age: Duration,
    known: BTreeSet<String>,
    live: Option<BTreeSet<String>>,
}

/// Something in the bucket that no owner known to the sweeper needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stray {
    /// Its name in the bucket.
    pub name: String,
    /// What it is.
    pub kind: StrayKind,
    /// How long it has been there, by the clocks of the bucket and this machine.
    pub age: Duration,
}

/// What is stray.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StrayKind {
    /// An upload that nobody completed.
    Upload(UploadId),
    /// An object, with its length in bytes.
    Object(u64),
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
        let url = store.url().into();
        let driver = Driver::start(vec![store], Runtime::Own { threads: 1 }, UploadOptions::default())?;
        Ok(Sweeper {
            driver,
            bucket: url,
            prefix: String::new(),
            group: None,
            min_age: Duration::from_secs(24 * 3600),
            known: BTreeSet::new(),
            live: None,
        })
    }

    /// Looks only at names that begin with this: the [name prefix](crate::Options::name_prefix) of the changelogs.
    #[must_use]
    pub fn prefix(mut self, prefix: impl Into<String>) -> Sweeper {
        self.prefix = prefix.into();
        self
    }

    /// Looks only at objects of this [group](crate::Options::group).
    #[must_use]
    pub fn group(mut self, group: impl Into<String>) -> Sweeper {
        self.group = Some(group.into());
        self
    }

    /// Nothing younger is stray: a day, unless said otherwise.
    #[must_use]
    pub fn min_age(mut self, age: Duration) -> Sweeper {
        self.min_age = age;
        self
    }

    /// Spares what the manifest of a local directory names, whether a changelog has it open or not.
    ///
    /// # Errors
    /// A manifest that cannot be read.
    pub fn directory(mut self, directory: impl AsRef<Path>) -> Result<Sweeper, SweepError> {
        let directory = directory.as_ref().to_owned();
        let bytes = std::fs::read(directory.join(MANIFEST_NAME))
            .map_err(|source| SweepError::Directory { directory: directory.clone(), source })?;
        let content = ManifestContent::decode(&bytes)
            .map_err(|source| SweepError::Manifest { directory: directory.clone(), source })?;
        let state = ManifestState::replay(content.records.iter().map(Vec::as_slice))
            .map_err(|source| SweepError::Record { directory, source })?;
        self.known.extend(state.uploads().keys().chain(state.objects().keys()).cloned());
        Ok(self)
    }

    /// These are all handles that anybody may still read: complete objects that none of them names may be stray. Without
    /// this only uploads are.
    #[must_use]
    pub fn live_handles(mut self, handles: &[ChangelogHandle]) -> Sweeper {
        let here =
            handles.iter().flat_map(ChangelogHandle::objects).filter(|(bucket, _)| **bucket == *self.bucket);
        let names: Vec<String> = here.map(|(_, object)| object.to_owned()).collect();
        self.live.get_or_insert_default().extend(names);
        self
    }

    /// What is stray at `now`. Nothing is changed.
    ///
    /// # Errors
    /// What the bucket says.
    pub fn plan(&self, now: SystemTime) -> Result<Vec<Stray>, SweepError> {
        let old = |since: Option<SystemTime>| {
            // Without a time, or with one in the future, nobody knows.
            let age = now.duration_since(since?).ok()?;
            (age >= self.min_age).then_some(age)
        };
        let mut strays = Vec::new();
        for upload in answer(|done| self.driver.list_uploads(ONLY, &self.prefix, done))? {
            if let (true, Some(age)) = (self.is_unknown(&upload.name), old(upload.created)) {
                strays.push(Stray { name: upload.name, kind: StrayKind::Upload(upload.id), age });
            }
        }
        let Some(live) = &self.live else { return Ok(strays) };
        for object in answer(|done| self.driver.list(ONLY, &self.prefix, done))? {
            let unknown = self.is_unknown(&object.name) && !live.contains(&object.name);
            if let (true, Some(age)) = (unknown, old(object.modified)) {
                strays.push(Stray { name: object.name, kind: StrayKind::Object(object.bytes), age });
            }
        }
        Ok(strays)
    }

    /// Removes one of the things that a [plan](Self::plan) named. What is gone already is removed.
    ///
    /// # Errors
    /// What the bucket says.
    pub fn remove(&self, stray: &Stray) -> Result<(), SweepError> {
        match &stray.kind {
            StrayKind::Upload(id) => answer(|done| self.driver.abort(ONLY, &stray.name, id.clone(), done)),
            StrayKind::Object(_) => answer(|done| self.driver.delete(ONLY, &stray.name, done)),
        }
    }

    /// Whether this is a file of a changelog of the group, and no manifest given knows its object.
    fn is_unknown(&self, name: &str) -> bool {
        let Some((object, group)) = object_of(name) else { return false };
        self.group.as_ref().is_none_or(|wanted| wanted == group) && !self.known.contains(object)
    }
}

fn answer<T: Send + 'static>(
    ask: impl FnOnce(Box<dyn FnOnce(Result<T, StoreError>) + Send>),
) -> Result<T, SweepError> {
    let (resolver, pending): (_, Pending<Result<T, StoreError>>) = tidelog_upload::channel();
    ask(Box::new(move |outcome| resolver.resolve(outcome)));
    Ok(pending.wait().map_err(|_| SweepError::Closed)??)
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
        let plan = |sweeper: &Sweeper, now| -> Vec<String> {
            sweeper.plan(now).unwrap().into_iter().map(|stray| stray.name).collect()
        };
        let file = |handle: &ChangelogHandle| handle.objects().next().unwrap().1.to_owned();
        assert_eq!(plan(&sweeper(), later), [""; 0], "without handles no object is stray");
        let all = sweeper().live_handles(&[]);
        assert_eq!(plan(&all, SystemTime::now()), [""; 0], "nothing is old enough");
        assert_eq!(plan(&all, later).len(), 3);
        assert_eq!(plan(&sweeper().group("others").live_handles(&[]), later), [""; 0]);
        assert_eq!(plan(&sweeper().prefix("other/").live_handles(&[]), later), [""; 0]);
        let careful = sweeper().live_handles(std::slice::from_ref(&kept));
        let careful = careful.directory(dir.path().join("known")).unwrap();
        assert_eq!(plan(&careful, later), [file(&lost)]);
        for stray in careful.plan(later).unwrap() {
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
    }

    #[test]
    fn old_uploads_that_nobody_knows_are_given_up() {
        let store = tidelog_upload::open_store("memory://sweep").unwrap();
        let name = "tidelog/00000007-00000000000000ff";
        tidelog_upload::block_on(store.create(name)).unwrap();
        tidelog_upload::block_on(store.create("tidelog/other")).unwrap();
        let sweeper = Sweeper::open("memory://sweep").unwrap().min_age(Duration::from_secs(60));
        assert_eq!(sweeper.plan(SystemTime::now()).unwrap(), []);
        let later = SystemTime::now() + Duration::from_secs(120);
        let strays = sweeper.plan(later).unwrap();
        assert_eq!(strays.iter().map(|stray| stray.name.as_str()).collect::<Vec<_>>(), [name]);
        sweeper.remove(&strays[0]).unwrap();
        assert_eq!(sweeper.plan(later).unwrap(), []);
    }
}
