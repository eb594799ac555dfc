//! Buckets by URL: a local directory and memory, over `object_store`.
//!
//! `object_store` writes to a temporary file beside the object, syncs it, renames it and syncs the folder. What it leaves
//! open is closed here: folders that somebody else has just made, deletions, ranges beyond the end, the size after the
//! commit. Which names objects get is the caller's business.
#![forbid(unsafe_code)]

use std::collections::{HashMap, HashSet};
use std::error::Error as StdError;
use std::fs::{self, File};
use std::future::poll_fn;
use std::io::{self, ErrorKind};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

use bytes::Bytes;
use object_store::local::LocalFileSystem;
use object_store::memory::InMemory;
use object_store::path::Path as ObjectPath;
use object_store::{GetOptions, GetRange, MultipartUpload, ObjectStore, ObjectStoreExt, PutPayload};
use url::Url;

use crate::store::{BoxFuture, ObjectSink, Operation, Store, StoreError, StoreErrorKind, check_name};

/// The schemes that [`open_store`] knows, for people.
pub const SUPPORTED_SCHEMES: &str = "file:///absolute/directory, memory://, memory://name";

/// How many folders a bucket remembers as durable before it starts anew.
const SYNCED_FOLDERS_MAX: usize = 65_536;

/// Opens the bucket that a URL names.
///
/// - `file:///absolute/directory`: a local directory, made if it is not there. An object that is complete survives a power
///   cut, and so does its absence once it is deleted.
/// - `memory://`: a new, empty bucket in this process's memory. `memory://name`: the same for every caller in the process
///   for as long as one of them keeps it.
///
/// # Errors
/// A URL that names no bucket or is of an unknown scheme, or a directory that cannot be made.
///
/// ```
/// let store = tidelog_upload::open_store("memory://")?;
/// assert_eq!(store.url(), "memory://");
/// let error = tidelog_upload::open_store("ftp://host/").unwrap_err();
/// assert!(error.to_string().contains("file:///"));
/// # Ok::<_, tidelog_upload::StoreError>(())
/// ```
pub fn open_store(url: &str) -> Result<Arc<dyn Store>, StoreError> {
    match url.split_once("://") {
        Some(("file", _)) => open_directory(url),
        Some(("memory", name)) => open_memory(url, name),
        other => {
            let scheme = other.map_or(url, |(scheme, _)| scheme).to_owned();
            Err(open_error(url, StoreErrorKind::UnsupportedScheme { scheme, supported: SUPPORTED_SCHEMES }))
        }
    }
}

fn open_directory(url: &str) -> Result<Arc<dyn Store>, StoreError> {
    let refuse = |why: &str| open_error(url, StoreErrorKind::InvalidUrl(why.to_owned()));
    if !url.starts_with("file:///") {
        return Err(refuse(
            "a local directory takes three slashes and an absolute path, file:///absolute/directory",
        ));
    }
    let parsed = Url::parse(url).map_err(|error| refuse(&error.to_string()))?;
    if parsed.query().is_some() || parsed.fragment().is_some() {
        return Err(refuse(
            "a local directory takes no '?' and no '#'; write %3F and %23 if they belong to its name",
        ));
    }
    let root = parsed.to_file_path().map_err(|()| refuse("it is not a path of this system"))?;
    let failed = |error: io::Error| failure(Operation::Open, url, "", error);
    make_directory(&root).map_err(failed)?;
    let inner = LocalFileSystem::new_with_prefix(&root)
        .map_err(|error| failure(Operation::Open, url, "", error))?
        .with_fsync(true);
    // The files are found under the resolved path; the URL stays as it was given, a link may be moved on purpose.
    let root = fs::canonicalize(&root).map_err(failed)?;
    let local = Local { files: inner.clone(), root, synced: Mutex::default() };
    let text = parsed.as_str().trim_end_matches('/');
    let text = if text == "file:" { "file:///" } else { text };
    Ok(Arc::new(Bucket { url: text.into(), inner: Arc::new(inner), local: Some(Arc::new(local)) }))
}

fn open_memory(url: &str, name: &str) -> Result<Arc<dyn Store>, StoreError> {
    static NAMED: OnceLock<Mutex<HashMap<String, Weak<Bucket>>>> = OnceLock::new();

    let new = || Arc::new(Bucket { url: url.into(), inner: Arc::new(InMemory::new()), local: None });
    if name.is_empty() {
        return Ok(new());
    }
    let mut named = NAMED.get_or_init(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(bucket) = named.get(name).and_then(Weak::upgrade) {
        return Ok(bucket);
    }
    let bucket = new();
    named.retain(|_, bucket| bucket.strong_count() > 0);
    named.insert(name.to_owned(), Arc::downgrade(&bucket));
    Ok(bucket)
}

#[derive(Debug)]
struct Bucket {
    url: Arc<str>,
    inner: Arc<dyn ObjectStore>,
    /// What a local directory needs on top.
    local: Option<Arc<Local>>,
}

impl Bucket {
    fn path(&self, operation: Operation, name: &str) -> Result<ObjectPath, StoreError> {
        let invalid = |why| StoreError::new(operation, &self.url, name, StoreErrorKind::InvalidName(why));
        check_name(name).map_err(invalid)?;
        ObjectPath::parse(name).map_err(|_| invalid("the store cannot take it"))
    }

    async fn read(&self, name: &str, path: &ObjectPath, range: Range<u64>) -> Result<Bytes, StoreError> {
        let Range { start, end } = range;
        let error = |kind| StoreError::new(Operation::Get, &self.url, name, kind);
        if start >= end {
            // Not a request that a store answers; the answer is known but for the object's existence and size.
            let size = size_of(&*self.inner, path, Operation::Get, &self.url, name).await?;
            return if start == end && end <= size {
                Ok(Bytes::new())
            } else {
                Err(error(StoreErrorKind::OutOfRange { start, end, size }))
            };
        }
        let options = GetOptions { range: Some(GetRange::Bounded(start..end)), ..GetOptions::default() };
        let answer = match self.inner.get_opts(path, options).await {
            Ok(answer) => answer,
            Err(cause) => {
                // A range that starts behind the end is no error kind of its own there.
                let size = size_of(&*self.inner, path, Operation::Get, &self.url, name).await?;
                return Err(if end > size {
                    error(StoreErrorKind::OutOfRange { start, end, size })
                } else {
                    failure(Operation::Get, &self.url, name, cause)
                });
            }
        };
        // Nothing is allocated for the range before this.
        if answer.range != (start..end) {
            return Err(error(StoreErrorKind::OutOfRange { start, end, size: answer.meta.size }));
        }
        let bytes = answer.bytes().await.map_err(|cause| failure(Operation::Get, &self.url, name, cause))?;
        if bytes.len() as u64 != end - start {
            let kind = StoreErrorKind::WrongSize { expected: end - start, found: bytes.len() as u64 };
            return Err(error(kind));
        }
        Ok(bytes)
    }
}

impl Store for Bucket {
    fn begin<'a>(&'a self, name: &'a str) -> BoxFuture<'a, Result<Box<dyn ObjectSink>, StoreError>> {
        Box::pin(async move {
            let path = self.path(Operation::Begin, name)?;
            let upload = self
                .inner
                .put_multipart(&path)
                .await
                .map_err(|error| failure(Operation::Begin, &self.url, name, error))?;
            let sink = Sink {
                url: Arc::clone(&self.url),
                name: name.to_owned(),
                path,
                store: Arc::clone(&self.inner),
                local: self.local.clone(),
                upload,
                bytes: 0,
                broken: false,
            };
            Ok(Box::new(sink) as Box<dyn ObjectSink>)
        })
    }

    fn get<'a>(&'a self, name: &'a str, range: Range<u64>) -> BoxFuture<'a, Result<Bytes, StoreError>> {
        Box::pin(async move {
            let path = self.path(Operation::Get, name)?;
            self.read(name, &path, range).await
        })
    }

    fn size<'a>(&'a self, name: &'a str) -> BoxFuture<'a, Result<u64, StoreError>> {
        Box::pin(async move {
            let path = self.path(Operation::Size, name)?;
            size_of(&*self.inner, &path, Operation::Size, &self.url, name).await
        })
    }

    fn delete<'a>(&'a self, name: &'a str) -> BoxFuture<'a, Result<(), StoreError>> {
        Box::pin(async move {
            let path = self.path(Operation::Delete, name)?;
            let failed = |error| failure(Operation::Delete, &self.url, name, error);
            let Some(local) = &self.local else {
                return match self.inner.delete(&path).await {
                    Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(()),
                    Err(error) => Err(failed(error)),
                };
            };
            let file = local
                .files
                .path_to_filesystem(&path)
                .map_err(|error| failure(Operation::Delete, &self.url, name, error))?;
            let outcome = blocking(move || remove_durably(&file)).await;
            outcome.map_err(|error| failure(Operation::Delete, &self.url, name, error))
        })
    }

    fn list<'a>(&'a self, prefix: &'a str) -> BoxFuture<'a, Result<Vec<(String, u64)>, StoreError>> {
        Box::pin(async move {
            // The folder part is what the store can narrow by; it is a name like any other.
            let folder = match prefix.rsplit_once('/') {
                Some((folder, _)) => Some(self.path(Operation::List, folder)?),
                None => None,
            };
            let mut stream = self.inner.list(folder.as_ref());
            let mut found = Vec::new();
            while let Some(entry) =
                poll_fn(|context| futures_core::Stream::poll_next(stream.as_mut(), context)).await
            {
                let entry = entry.map_err(|error| failure(Operation::List, &self.url, prefix, error))?;
                let name: &str = entry.location.as_ref();
                if name.starts_with(prefix) {
                    found.push((name.to_owned(), entry.size));
                }
            }
            found.sort_unstable();
            Ok(found)
        })
    }

    fn url(&self) -> &str {
        &self.url
    }
}

struct Sink {
    url: Arc<str>,
    name: String,
    path: ObjectPath,
    store: Arc<dyn ObjectStore>,
    local: Option<Arc<Local>>,
    upload: Box<dyn MultipartUpload>,
    /// Put so far.
    bytes: u64,
    /// A part failed, or is under way.
    broken: bool,
}

impl ObjectSink for Sink {
    fn put(&mut self, part: Vec<Bytes>) -> BoxFuture<'_, Result<(), StoreError>> {
        Box::pin(async move {
            let latched = StoreErrorKind::Latched;
            if self.broken {
                return Err(StoreError::new(Operation::Put, &self.url, &self.name, latched));
            }
            let payload: PutPayload = part.into_iter().collect();
            let bytes = payload.content_length() as u64;
            if bytes == 0 {
                return Ok(());
            }
            // Stays so if this future is dropped half-way.
            self.broken = true;
            self.upload
                .put_part(payload)
                .await
                .map_err(|error| failure(Operation::Put, &self.url, &self.name, error))?;
            self.bytes += bytes;
            self.broken = false;
            Ok(())
        })
    }

    fn complete(mut self: Box<Self>) -> BoxFuture<'static, Result<u64, StoreError>> {
        Box::pin(async move {
            let Sink { url, name, path, store, local, upload, bytes, broken } = &mut *self;
            if *broken {
                return Err(StoreError::new(Operation::Complete, url, name, StoreErrorKind::Latched));
            }
            upload.complete().await.map_err(|error| failure(Operation::Complete, url, name, error))?;
            if let Some(local) = local {
                let local = Arc::clone(local);
                let folder = local
                    .files
                    .path_to_filesystem(path)
                    .map_err(|error| failure(Operation::Complete, url, name, error))?;
                blocking(move || local.sync_folders_of(&folder))
                    .await
                    .map_err(|error| failure(Operation::Complete, url, name, error))?;
            }
            let found = size_of(&**store, path, Operation::Complete, url, name).await?;
            if found != *bytes {
                let kind = StoreErrorKind::WrongSize { expected: *bytes, found };
                return Err(StoreError::new(Operation::Complete, url, name, kind));
            }
            Ok(found)
        })
    }

    fn abort(mut self: Box<Self>) -> BoxFuture<'static, Result<(), StoreError>> {
        Box::pin(async move {
            let outcome = self.upload.abort().await;
            outcome.map_err(|error| failure(Operation::Abort, &self.url, &self.name, error))
        })
    }
}

/// A local directory's own knowledge.
#[derive(Debug)]
struct Local {
    files: LocalFileSystem,
    /// Resolved.
    root: PathBuf,
    /// Folders below the root whose entries in their parents are known to be durable.
    synced: Mutex<HashSet<PathBuf>>,
}

impl Local {
    /// Makes the folders on the way to a file durable. `object_store` syncs those that it made itself, but not those that
    /// another upload has made and not yet synced.
    fn sync_folders_of(&self, file: &Path) -> io::Result<()> {
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

    fn lock(&self) -> std::sync::MutexGuard<'_, HashSet<PathBuf>> {
        self.synced.lock().unwrap_or_else(PoisonError::into_inner)
    }
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

/// Removes a file and the temporary files of its uploads, and makes that durable. Also syncs when there is nothing to
/// remove: an earlier attempt may have removed it and failed to sync.
fn remove_durably(file: &Path) -> io::Result<()> {
    // A folder of that name is no object either.
    let missing = |error: &io::Error| {
        matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory | ErrorKind::IsADirectory)
    };
    match fs::remove_file(file) {
        Err(error) if !missing(&error) => return Err(error),
        _ => {}
    }
    for number in 1.. {
        let mut staged = file.as_os_str().to_owned();
        staged.push(format!("#{number}"));
        match fs::remove_file(&staged) {
            Ok(()) => {}
            Err(error) if missing(&error) => break,
            Err(error) => return Err(error),
        }
    }
    match file.parent().map(sync_folder) {
        Some(Err(error)) if !missing(&error) => Err(error),
        _ => Ok(()),
    }
}

fn sync_folder(folder: &Path) -> io::Result<()> {
    File::open(folder)?.sync_all()
}

/// Runs a function that blocks: on tokio's threads for that if there are any.
async fn blocking<T: Send + 'static>(
    function: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    match tokio::runtime::Handle::try_current() {
        Ok(handle) => handle.spawn_blocking(function).await.map_err(io::Error::other)?,
        Err(_) => function(),
    }
}

async fn size_of(
    store: &dyn ObjectStore,
    path: &ObjectPath,
    operation: Operation,
    url: &str,
    name: &str,
) -> Result<u64, StoreError> {
    let meta = store.head(path).await.map_err(|error| match error {
        object_store::Error::NotFound { .. } => {
            StoreError::new(operation, url, name, StoreErrorKind::NotFound)
        }
        error => failure(operation, url, name, error),
    })?;
    Ok(meta.size)
}

fn open_error(url: &str, kind: StoreErrorKind) -> StoreError {
    StoreError::new(Operation::Open, url, "", kind)
}

fn failure(
    operation: Operation,
    url: &str,
    name: &str,
    error: impl StdError + Send + Sync + 'static,
) -> StoreError {
    let retryable = may_pass(&error);
    StoreError::failed(operation, url, name, retryable, error)
}

/// Whether a failure may go away by itself. What lies below says so where it is an error of the system.
fn may_pass(error: &(dyn StdError + 'static)) -> bool {
    let mut cause = Some(error);
    while let Some(error) = cause {
        use object_store::Error as E;
        if let Some(
            E::PermissionDenied { .. }
            | E::Unauthenticated { .. }
            | E::NotSupported { .. }
            | E::NotImplemented { .. }
            | E::InvalidPath { .. },
        ) = error.downcast_ref::<E>()
        {
            return false;
        }
        if let Some(error) = error.downcast_ref::<io::Error>() {
            return !matches!(
                error.kind(),
                ErrorKind::PermissionDenied
                    | ErrorKind::ReadOnlyFilesystem
                    | ErrorKind::NotADirectory
                    | ErrorKind::IsADirectory
                    | ErrorKind::AlreadyExists
                    | ErrorKind::InvalidFilename
                    | ErrorKind::Unsupported
            );
        }
        cause = error.source();
    }
    true
}
