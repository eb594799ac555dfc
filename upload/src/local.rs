//! What a local directory needs beside `object_store`: folders and deletions that survive a power cut, and the temporary
//! files that uploads leave when their process dies.
//!
//! The directory itself is made by [`Local::make`] and never again: one that is not there is most likely not mounted, and
//! then neither is it empty nor is there room for it. Each request that could take it for one looks first ([`absence`]).
//!
//! `object_store` writes `name#1` (or a higher number) beside the object, syncs it, renames it and syncs the folder. What is
//! left open there is closed here: folders that somebody else has just made, deletions, leftovers.
#![forbid(unsafe_code)]

use std::collections::{HashMap, HashSet};
use std::fs::{self, File};
use std::future::Future;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use object_store::local::LocalFileSystem;
use object_store::path::Path as ObjectPath;
use object_store::{MultipartUpload, PutResult};

use crate::object::staged_id;
use crate::store::{ListedUpload, StoreErrorKind};

/// How many folders a bucket remembers as durable before it starts anew.
const SYNCED_FOLDERS_MAX: usize = 65_536;

/// Divides the name of an object from the number of a temporary file. No name has it.
const STAGED: char = '#';

/// A local directory's own knowledge.
#[derive(Debug)]
pub(crate) struct Local {
    files: LocalFileSystem,
    /// Resolved.
    root: PathBuf,
    /// Folders below the root whose entries in their parents are known to be durable.
    synced: Mutex<HashSet<PathBuf>>,
    /// Objects whose commit has not ended, or has and failed and could not be undone: what can be seen of them may not last.
    unproven: Mutex<HashMap<PathBuf, Commit>>,
}

/// What became of the commit of an object that is not proven.
#[derive(Debug, PartialEq, Eq)]
enum Commit {
    UnderWay,
    Failed,
}

impl Local {
    /// Makes the directory if it is not there, and makes it durable.
    pub(crate) fn make(root: &Path) -> io::Result<()> {
        make_directory(root)
    }

    /// The directory, which is there.
    pub(crate) fn open(root: &Path) -> Result<Local, object_store::Error> {
        let files = LocalFileSystem::new_with_prefix(root)?.with_fsync(true);
        // The files are found under the resolved path; the URL stays as it was given, a link may be moved on purpose.
        let root = fs::canonicalize(root).map_err(failed)?;
        Ok(Local { files, root, synced: Mutex::default(), unproven: Mutex::default() })
    }

    /// Why it is no bucket any more.
    pub(crate) fn absence(&self) -> io::Result<Option<Absence>> {
        absence(&self.root)
    }

    /// Why an object that is not there may be somewhere else, in words, with the kind of error that it is for.
    pub(crate) fn suspicion(&self) -> Option<(StoreErrorKind, String)> {
        if let Ok(Some(why)) = self.absence() {
            return Some((StoreErrorKind::NoSuchBucket, why.to_string()));
        }
        let empty = fs::read_dir(&self.root).ok()?.next().is_none();
        let why = || format!("nothing at all is in {}: is what belongs there mounted?", self.root.display());
        empty.then(|| (StoreErrorKind::NotFound, why()))
    }

    /// The store that writes and reads the files.
    pub(crate) fn files(&self) -> LocalFileSystem {
        self.files.clone()
    }

    /// Where an object is, or would be.
    pub(crate) fn file(&self, path: &ObjectPath) -> Result<PathBuf, object_store::Error> {
        self.files.path_to_filesystem(path)
    }

    /// Commits an upload, to the end also if nobody waits for that any more. Of one that fails nothing is left to be taken for
    /// an object: a sync that succeeds after one that failed proves nothing.
    pub(crate) async fn commit(
        self: &Arc<Self>,
        mut sink: Box<dyn MultipartUpload>,
        path: &ObjectPath,
    ) -> Result<PutResult, object_store::Error> {
        let (local, file) = (Arc::clone(self), self.file(path)?);
        self.unproven().insert(file.clone(), Commit::UnderWay);
        let commit = async move {
            let (to_sync, target) = (Arc::clone(&local), file.clone());
            let done = match sink.complete().await {
                Ok(done) => {
                    blocking(move || to_sync.sync_folders_of(&target)).await.map(|()| done).map_err(failed)
                }
                Err(error) => Err(error),
            };
            let target = file.clone();
            if done.is_ok() || blocking(move || remove_durably(&target)).await.is_ok() {
                local.unproven().remove(&file);
            } else {
                local.unproven().insert(file, Commit::Failed);
            }
            done
        };
        to_its_end(commit).await
    }

    /// Whether what can be seen of an object may not last.
    pub(crate) fn is_unproven(&self, file: &Path) -> bool {
        self.unproven().contains_key(file)
    }

    /// An object was removed durably; if its commit is under way, it may be there again at once.
    pub(crate) fn removed(&self, file: &Path) {
        self.unproven().retain(|known, commit| known != file || *commit == Commit::UnderWay);
    }

    /// Makes the folders on the way to a file durable. `object_store` syncs those that it made itself, but not those that
    /// another upload has made and not yet synced.
    pub(crate) fn sync_folders_of(&self, file: &Path) -> io::Result<()> {
        let mut fresh = Vec::new();
        for folder in file.ancestors().skip(1).take_while(|folder| *folder != self.root) {
            if self.lock().contains(folder) {
                break;
            }
            fresh.push(folder.to_owned());
        }
        for folder in &fresh {
            sync_folder(folder.parent().unwrap_or(&self.root))?;
        }
        if !fresh.is_empty() {
            let mut synced = self.lock();
            if synced.len() + fresh.len() > SYNCED_FOLDERS_MAX {
                synced.clear();
            }
            synced.extend(fresh);
        }
        Ok(())
    }

    /// All temporary files of objects whose names start with `prefix`. The upload of each may have died.
    pub(crate) fn leftovers(&self, prefix: &str) -> io::Result<Vec<ListedUpload>> {
        let mut found = Vec::new();
        let folder = prefix.rsplit_once('/').map_or("", |(folder, _)| folder);
        let mut folders = vec![(self.root.join(folder), folder.to_owned())];
        while let Some((path, name)) = folders.pop() {
            let entries = match fs::read_dir(&path) {
                Ok(entries) => entries,
                Err(error) if is_missing(&error) => continue,
                Err(error) => return Err(error),
            };
            for entry in entries {
                let entry = entry?;
                let Some(text) = entry.file_name().to_str().map(ToOwned::to_owned) else { continue };
                let full = if name.is_empty() { text } else { format!("{name}/{text}") };
                if entry.file_type()?.is_dir() {
                    folders.push((entry.path(), full));
                } else if let Some((name, number)) = full.rsplit_once(STAGED)
                    && name.starts_with(prefix)
                    && let Some(id) = staged_id(number)
                {
                    let created = entry.metadata().and_then(|data| data.modified()).ok();
                    found.push(ListedUpload { name: name.to_owned(), id, created });
                }
            }
        }
        Ok(found)
    }

    fn lock(&self) -> MutexGuard<'_, HashSet<PathBuf>> {
        self.synced.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn unproven(&self) -> MutexGuard<'_, HashMap<PathBuf, Commit>> {
        self.unproven.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Why there is no bucket at a place.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Absence {
    #[error("there is no directory {}", .0.display())]
    Missing(PathBuf),
    #[error("{} is not a directory", .0.display())]
    NotADirectory(PathBuf),
}

/// Why there is no bucket at a place, if there is none.
pub(crate) fn absence(root: &Path) -> io::Result<Option<Absence>> {
    match fs::metadata(root) {
        Ok(found) if found.is_dir() => Ok(None),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(Some(Absence::Missing(root.to_owned()))),
        Err(error) if error.kind() != ErrorKind::NotADirectory => Err(error),
        _ => {
            // It, or what stands where a directory above it should.
            let in_the_way = root.ancestors().find(|path| path.exists()).unwrap_or(root);
            Ok(Some(Absence::NotADirectory(in_the_way.to_owned())))
        }
    }
}

/// Removes a file and the temporary files of its uploads, and makes that durable. Also syncs when there is nothing to
/// remove: an earlier attempt may have removed it and failed to sync.
pub(crate) fn remove_durably(file: &Path) -> io::Result<()> {
    match fs::remove_file(file) {
        // A folder of that name is no object either.
        Err(error) if !is_missing(&error) => return Err(error),
        _ => {}
    }
    remove_staged(file, None)?;
    match file.parent().map(sync_folder) {
        Some(Err(error)) if !is_missing(&error) => Err(error),
        _ => Ok(()),
    }
}

/// Removes the temporary file of this number, or without one those of an object's uploads up to the first number that is
/// free.
pub(crate) fn remove_staged(file: &Path, number: Option<u64>) -> io::Result<()> {
    let numbers = number.map_or(1..=u64::MAX, |number| number..=number);
    for number in numbers {
        let mut staged = file.as_os_str().to_owned();
        staged.push(format!("{STAGED}{number}"));
        match fs::remove_file(&staged) {
            Ok(()) => {}
            Err(error) if is_missing(&error) => break,
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Runs a function that blocks: on tokio's threads for that if there are any.
pub(crate) async fn blocking<T: Send + 'static>(
    function: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    match tokio::runtime::Handle::try_current() {
        Ok(handle) => handle.spawn_blocking(function).await.map_err(io::Error::other)?,
        Err(_) => function(),
    }
}

/// Runs a future that goes on when it is not waited for any more, if there is a runtime.
async fn to_its_end<T: Send + 'static>(
    future: impl Future<Output = Result<T, object_store::Error>> + Send + 'static,
) -> Result<T, object_store::Error> {
    match tokio::runtime::Handle::try_current() {
        Ok(handle) => handle.spawn(future).await?,
        Err(_) => future.await,
    }
}

fn failed(error: io::Error) -> object_store::Error {
    object_store::Error::Generic { store: "local directory", source: error.into() }
}

fn is_missing(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory | ErrorKind::IsADirectory)
}

/// Makes a directory and those above it, and their names durable.
fn make_directory(path: &Path) -> io::Result<()> {
    let existing = path.ancestors().find(|ancestor| ancestor.exists()).unwrap_or(Path::new("/")).to_owned();
    fs::create_dir_all(path)?;
    for folder in path.ancestors().skip(1) {
        let made_here = folder.starts_with(&existing) && path != existing;
        match sync_folder(folder) {
            // Folders that were there are synced in case another process has just made them; not all can be opened.
            Err(error) if made_here => return Err(error),
            _ => {}
        }
    }
    Ok(())
}

fn sync_folder(folder: &Path) -> io::Result<()> {
    File::open(folder)?.sync_all()
}
