//! The stores over `object_store` that have no parts, but one writer and a rename: memory, a local directory, HDFS.
//!
//! The writers are kept in `writers.rs`; what a local directory and HDFS need beside is in `local.rs` and `hdfs.rs`. The
//! stores with parts are in `cloud.rs`, and read through the same [`Bucket`]; S3 is in `s3.rs`. Which names objects get, time
//! limits and retries are the caller's business.
#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::error::Error as StdError;
use std::future::poll_fn;
use std::io::{self, ErrorKind};
use std::ops::Range;
#[cfg(feature = "local")]
use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

use bytes::Bytes;
use object_store::memory::InMemory;
use object_store::path::Path as ObjectPath;
use object_store::{
    GetOptions, GetRange, MultipartUpload, ObjectMeta, ObjectStore, ObjectStoreExt, PutPayload,
};

#[cfg(any(feature = "azure", feature = "gcs"))]
use crate::cloud;
#[cfg(feature = "hdfs")]
use crate::hdfs;
#[cfg(feature = "local")]
use crate::local::{self, Absence, Local};
use crate::store::{
    Body, BoxFuture, Capabilities, EntityTag, Lane, ListedObject, ListedPart, ListedUpload, Operation, Parts,
    Store, StoreError, StoreErrorKind, UploadId, UploadRef, UploadedPart, check_name,
};
use crate::writers::Writers;

/// One sequential writer: nothing but the order matters.
pub(crate) const SEQUENTIAL: Capabilities = Capabilities {
    parts: Parts::Sequential,
    part_bytes_min: 1,
    part_bytes_max: u64::MAX,
    parts_max: u32::MAX,
    equal_parts: false,
    sparse: false,
    copy_part: false,
    resend_part: false,
    list_parts: false,
    list_uploads: true,
    conditional_put: false,
};

/// The directory that a URL names, and that URL in its normal form: what other spellings of the path name is the same.
#[cfg(feature = "local")]
pub(crate) fn directory(url: &str) -> Result<(PathBuf, String), StoreError> {
    let refuse =
        |why: &str| StoreError::new(Operation::Open, url, "", StoreErrorKind::InvalidUrl(why.to_owned()));
    if !url.starts_with("file:///") {
        return Err(refuse(
            "a local directory takes three slashes and an absolute path, file:///absolute/directory",
        ));
    }
    let parsed = url::Url::parse(url).map_err(|error| refuse(&error.to_string()))?;
    if parsed.query().is_some() || parsed.fragment().is_some() {
        return Err(refuse(
            "a local directory takes no '?' and no '#'; write %3F and %23 if they belong to its name",
        ));
    }
    let no_path = |()| refuse("it is not a path of this system");
    let root: PathBuf = parsed.to_file_path().map_err(no_path)?.components().collect();
    let normal = url::Url::from_file_path(&root).map_err(no_path)?;
    Ok((root, normal.into()))
}

#[cfg(feature = "local")]
pub(crate) fn open_directory(url: &str, make: bool) -> Result<Arc<dyn Store>, StoreError> {
    let (root, url) = directory(url)?;
    let failed = |error: io::Error| failure(Operation::Open, &url, "", error);
    match local::absence(&root).map_err(failed)? {
        None | Some(Absence::Missing(_)) if make => Local::make(&root).map_err(failed)?,
        None => {}
        Some(why) => {
            return Err(StoreError::caused(Operation::Open, &url, "", StoreErrorKind::NoSuchBucket, why));
        }
    }
    let local = Local::open(&root).map_err(|error| failure(Operation::Open, &url, "", error))?;
    Ok(Arc::new(Bucket::new(&url, Arc::new(local.files()), Staging::Local(Arc::new(local)))))
}

pub(crate) fn open_memory(url: &str, name: &str) -> Result<Arc<dyn Store>, StoreError> {
    static NAMED: OnceLock<Mutex<HashMap<String, Weak<Bucket>>>> = OnceLock::new();

    let new = || Arc::new(Bucket::new(url, Arc::new(InMemory::new()), Staging::Nowhere));
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
pub(crate) struct Bucket {
    url: Arc<str>,
    inner: Arc<dyn ObjectStore>,
    writers: Writers,
    staging: Staging,
}

/// Where the bytes of an upload are before its commit, and what is left of it if the process dies.
#[derive(Debug)]
pub(crate) enum Staging {
    /// Nothing is left, or nothing that can be found.
    Nowhere,
    /// Files beside the object.
    #[cfg(feature = "local")]
    Local(Arc<Local>),
    /// Files beside the object, which look like objects.
    #[cfg(feature = "hdfs")]
    Hdfs,
}

impl Bucket {
    pub(crate) fn new(url: &str, inner: Arc<dyn ObjectStore>, staging: Staging) -> Bucket {
        Bucket { url: url.into(), inner, writers: Writers::default(), staging }
    }

    pub(crate) fn error(&self, operation: Operation, name: &str, kind: StoreErrorKind) -> StoreError {
        StoreError::new(operation, &self.url, name, kind)
    }

    /// What is wrong with an upload; with why, if it is that an earlier call failed.
    fn upload_error(&self, operation: Operation, upload: UploadRef<'_>, kind: StoreErrorKind) -> StoreError {
        match self.writers.failure(upload).filter(|_| kind == StoreErrorKind::Latched) {
            Some(first) => StoreError::caused(operation, &self.url, upload.name, kind, first),
            None => self.error(operation, upload.name, kind),
        }
    }

    pub(crate) fn failure(
        &self,
        operation: Operation,
        name: &str,
        error: impl StdError + Send + Sync + 'static,
    ) -> StoreError {
        failure(operation, &self.url, name, error)
    }

    pub(crate) fn path(&self, operation: Operation, name: &str) -> Result<ObjectPath, StoreError> {
        let invalid = |why| self.error(operation, name, StoreErrorKind::InvalidName(why));
        check_name(name).map_err(invalid)?;
        #[cfg(feature = "hdfs")]
        if matches!(self.staging, Staging::Hdfs) {
            hdfs::check_name(name).map_err(invalid)?;
        }
        ObjectPath::parse(name).map_err(|_| invalid("the store cannot take it"))
    }

    async fn meta(
        &self,
        operation: Operation,
        name: &str,
        path: &ObjectPath,
    ) -> Result<ObjectMeta, StoreError> {
        match self.inner.head(path).await {
            Ok(meta) => Ok(meta),
            Err(error) => Err(self.unless_absent(self.failure(operation, name, error)).await),
        }
    }

    /// Refuses a local directory that is not there: nothing may be made in its place, and nothing that is in it be taken
    /// for gone.
    async fn check_there(&self, operation: Operation, name: &str) -> Result<(), StoreError> {
        #[cfg(feature = "local")]
        if let Staging::Local(local) = &self.staging {
            let local = Arc::clone(local);
            let absence = local::blocking(move || local.absence()).await;
            if let Some(why) = absence.map_err(|error| self.failure(operation, name, error))? {
                return Err(StoreError::caused(
                    operation,
                    &self.url,
                    name,
                    StoreErrorKind::NoSuchBucket,
                    why,
                ));
            }
        }
        let _ = (operation, name);
        Ok(())
    }

    /// Refuses to tell of an object in a local directory that may be there and not last: being told of it is what proves a
    /// commit whose answer was lost.
    fn check_proven(&self, operation: Operation, name: &str, path: &ObjectPath) -> Result<(), StoreError> {
        #[cfg(feature = "local")]
        if let Staging::Local(local) = &self.staging {
            let file = local.file(path).map_err(|error| self.failure(operation, name, error))?;
            if local.is_unproven(&file) {
                const WHY: &str = "its commit has not ended, or has failed; a power cut might take it away";
                return Err(StoreError::caused(operation, &self.url, name, StoreErrorKind::Interrupted, WHY));
            }
        }
        let _ = (operation, name, path);
        Ok(())
    }

    /// What is missing in a local directory is so perhaps because that is.
    async fn unless_absent(&self, error: StoreError) -> StoreError {
        #[cfg(feature = "local")]
        if let Staging::Local(local) = &self.staging
            && error.is_not_found()
        {
            let local = Arc::clone(local);
            if let Ok(Some((kind, why))) = local::blocking(move || Ok(local.suspicion())).await {
                return StoreError::caused(error.operation(), &self.url, error.object(), kind, why);
            }
        }
        error
    }

    async fn read(&self, name: &str, path: &ObjectPath, range: Range<u64>) -> Result<Bytes, StoreError> {
        let Range { start, end } = range;
        let error = |kind| self.error(Operation::Get, name, kind);
        if start >= end {
            // Not a request that a store answers; the answer is known but for the object's existence and size.
            let size = self.meta(Operation::Get, name, path).await?.size;
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
                let failure = self.failure(Operation::Get, name, cause);
                if *failure.kind() != StoreErrorKind::Failed {
                    return Err(self.unless_absent(failure).await);
                }
                // A range that starts behind the end is no error kind of its own there.
                let size = self.meta(Operation::Get, name, path).await?.size;
                return Err(if end > size {
                    error(StoreErrorKind::OutOfRange { start, end, size })
                } else {
                    failure
                });
            }
        };
        // Nothing is allocated for the range before this.
        if answer.range != (start..end) {
            return Err(error(StoreErrorKind::OutOfRange { start, end, size: answer.meta.size }));
        }
        let bytes = answer.bytes().await.map_err(|cause| self.failure(Operation::Get, name, cause))?;
        if bytes.len() as u64 != end - start {
            const WHY: &str = "the answer has another number of bytes than it says";
            return Err(StoreError::caused(
                Operation::Get,
                &self.url,
                name,
                StoreErrorKind::Interrupted,
                WHY,
            ));
        }
        Ok(bytes)
    }

    /// What is left to do after a PUT: the folders of a local directory.
    async fn settle(&self, operation: Operation, name: &str, path: &ObjectPath) -> Result<(), StoreError> {
        match &self.staging {
            #[cfg(feature = "local")]
            Staging::Local(local) => {
                let local = Arc::clone(local);
                let file = local.file(path).map_err(|error| self.failure(operation, name, error))?;
                let outcome = local::blocking(move || local.sync_folders_of(&file)).await;
                outcome.map_err(|error| self.failure(operation, name, error))
            }
            _ => {
                let _ = (operation, name, path);
                Ok(())
            }
        }
    }

    /// Removes what dead uploads of an object have left, or the one of this number.
    async fn remove_staged(
        &self,
        operation: Operation,
        name: &str,
        path: &ObjectPath,
        number: Option<u64>,
    ) -> Result<(), StoreError> {
        match &self.staging {
            #[cfg(feature = "local")]
            Staging::Local(local) => {
                let file = local.file(path).map_err(|error| self.failure(operation, name, error))?;
                let outcome = local::blocking(move || local::remove_staged(&file, number)).await;
                outcome.map_err(|error| self.failure(operation, name, error))
            }
            #[cfg(feature = "hdfs")]
            Staging::Hdfs => {
                let outcome = hdfs::remove_staged(&*self.inner, path, number).await;
                outcome.map_err(|error| self.failure(operation, name, error))
            }
            Staging::Nowhere => {
                let _ = (operation, name, path, number);
                Ok(())
            }
        }
    }

    /// What dead uploads have left.
    async fn staged(&self, prefix: &str) -> Result<Vec<ListedUpload>, StoreError> {
        match &self.staging {
            #[cfg(feature = "local")]
            Staging::Local(local) => {
                let (local, text) = (Arc::clone(local), prefix.to_owned());
                let found = local::blocking(move || local.leftovers(&text)).await;
                found.map_err(|error| self.failure(Operation::ListUploads, prefix, error))
            }
            #[cfg(feature = "hdfs")]
            Staging::Hdfs => {
                let all = self.entries(Operation::ListUploads, prefix).await?;
                let staged = all.iter().filter_map(hdfs::staged);
                Ok(staged.filter(|upload| upload.name.starts_with(prefix)).collect())
            }
            Staging::Nowhere => {
                let _ = prefix;
                Ok(Vec::new())
            }
        }
    }

    /// All entries below the folder part of a prefix, which is what the store can narrow by.
    async fn entries(&self, operation: Operation, prefix: &str) -> Result<Vec<ObjectMeta>, StoreError> {
        // It is a name like any other.
        let folder = match prefix.rsplit_once('/') {
            Some((folder, _)) => Some(self.path(operation, folder)?),
            None => None,
        };
        let mut stream = self.inner.list(folder.as_ref());
        let mut found = Vec::new();
        while let Some(entry) =
            poll_fn(|context| futures_core::Stream::poll_next(stream.as_mut(), context)).await
        {
            found.push(entry.map_err(|error| self.failure(operation, prefix, error))?);
        }
        Ok(found)
    }
}

impl Store for Bucket {
    fn url(&self) -> &str {
        &self.url
    }

    fn capabilities(&self) -> &Capabilities {
        &SEQUENTIAL
    }

    fn put<'a>(
        &'a self,
        name: &'a str,
        body: Body,
        _lane: Lane,
    ) -> BoxFuture<'a, Result<EntityTag, StoreError>> {
        Box::pin(async move {
            let path = self.path(Operation::Put, name)?;
            self.check_there(Operation::Put, name).await?;
            let done = self.inner.put(&path, payload(&body)).await;
            let done = done.map_err(|error| self.failure(Operation::Put, name, error))?;
            self.settle(Operation::Put, name, &path).await?;
            Ok(tag(done.e_tag))
        })
    }

    fn create<'a>(&'a self, name: &'a str) -> BoxFuture<'a, Result<UploadId, StoreError>> {
        Box::pin(async move {
            let path = self.path(Operation::Create, name)?;
            self.check_there(Operation::Create, name).await?;
            let upload = self.inner.put_multipart(&path).await;
            let upload = upload.map_err(|error| self.failure(Operation::Create, name, error))?;
            Ok(self.writers.add(name, upload))
        })
    }

    fn put_part<'a>(
        &'a self,
        upload: UploadRef<'a>,
        number: u32,
        body: Body,
        _lane: Lane,
    ) -> BoxFuture<'a, Result<EntityTag, StoreError>> {
        Box::pin(async move {
            let error = |kind| self.upload_error(Operation::PutPart, upload, kind);
            let mut sink = self.writers.take(upload, number).map_err(error)?;
            if !body.is_empty() {
                // Dropped half-way, the writer is gone, and the upload is latched.
                let outcome = sink.put_part(payload(&body)).await;
                outcome.map_err(|cause| {
                    let failure = self.failure(Operation::PutPart, upload.name, cause);
                    self.writers.failed(upload, &failure);
                    failure
                })?;
            }
            self.writers.give_back(upload, sink, body.len()).map_err(error)?;
            Ok(EntityTag::default())
        })
    }

    fn list_parts<'a>(&'a self, upload: UploadRef<'a>) -> BoxFuture<'a, Result<Vec<ListedPart>, StoreError>> {
        let error = self.error(Operation::ListParts, upload.name, StoreErrorKind::Unsupported);
        Box::pin(async move { Err(error) })
    }

    fn complete<'a>(
        &'a self,
        upload: UploadRef<'a>,
        parts: &'a [UploadedPart],
    ) -> BoxFuture<'a, Result<EntityTag, StoreError>> {
        Box::pin(async move {
            let name = upload.name;
            let path = self.path(Operation::Complete, name)?;
            let ended = self.writers.end(upload, parts);
            let (mut sink, bytes) =
                ended.map_err(|kind| self.upload_error(Operation::Complete, upload, kind))?;
            let done = match &self.staging {
                #[cfg(feature = "local")]
                Staging::Local(local) => local.commit(sink, &path).await,
                _ => sink.complete().await,
            };
            let done = done.map_err(|error| self.failure(Operation::Complete, name, error))?;
            // A writer that lost bytes says so nowhere else.
            let found = self.meta(Operation::Complete, name, &path).await?.size;
            if found != bytes {
                let kind = StoreErrorKind::WrongSize { expected: bytes, found };
                return Err(self.error(Operation::Complete, name, kind));
            }
            Ok(tag(done.e_tag))
        })
    }

    fn abort<'a>(&'a self, upload: UploadRef<'a>) -> BoxFuture<'a, Result<(), StoreError>> {
        Box::pin(async move {
            let path = self.path(Operation::Abort, upload.name)?;
            if let Some(mut sink) = self.writers.remove(upload) {
                let outcome = sink.abort().await;
                outcome.map_err(|error| self.failure(Operation::Abort, upload.name, error))?;
            }
            if self.writers.has(upload.name) {
                return Ok(());
            }
            self.check_there(Operation::Abort, upload.name).await?;
            self.remove_staged(Operation::Abort, upload.name, &path, staged_number(upload.id)).await
        })
    }

    fn list_uploads<'a>(&'a self, prefix: &'a str) -> BoxFuture<'a, Result<Vec<ListedUpload>, StoreError>> {
        Box::pin(async move {
            if let Some((folder, _)) = prefix.rsplit_once('/') {
                self.path(Operation::ListUploads, folder)?;
            }
            self.check_there(Operation::ListUploads, prefix).await?;
            let mut found = self.writers.list(prefix);
            let left = self.staged(prefix).await?;
            found.extend(left.into_iter().filter(|left| !self.writers.has(&left.name)));
            found.sort_unstable_by(|a, b| (&a.name, &a.id).cmp(&(&b.name, &b.id)));
            Ok(found)
        })
    }

    fn get<'a>(&'a self, name: &'a str, range: Range<u64>) -> BoxFuture<'a, Result<Bytes, StoreError>> {
        Box::pin(async move {
            let path = self.path(Operation::Get, name)?;
            self.read(name, &path, range).await
        })
    }

    fn head<'a>(&'a self, name: &'a str) -> BoxFuture<'a, Result<ListedObject, StoreError>> {
        Box::pin(async move {
            let path = self.path(Operation::Head, name)?;
            self.check_proven(Operation::Head, name, &path)?;
            let meta = self.meta(Operation::Head, name, &path).await?;
            Ok(listed(name.to_owned(), meta))
        })
    }

    fn delete<'a>(&'a self, name: &'a str) -> BoxFuture<'a, Result<(), StoreError>> {
        Box::pin(async move {
            let path = self.path(Operation::Delete, name)?;
            self.check_there(Operation::Delete, name).await?;
            #[cfg(feature = "local")]
            if let Staging::Local(local) = &self.staging {
                let file = local.file(&path).map_err(|error| self.failure(Operation::Delete, name, error))?;
                let local = Arc::clone(local);
                let removal = move || local::remove_durably(&file).map(|()| local.removed(&file));
                let outcome = local::blocking(removal).await;
                return outcome.map_err(|error| self.failure(Operation::Delete, name, error));
            }
            match self.inner.delete(&path).await {
                Ok(()) | Err(object_store::Error::NotFound { .. }) => {}
                Err(error) => return Err(self.failure(Operation::Delete, name, error)),
            }
            self.remove_staged(Operation::Delete, name, &path, None).await
        })
    }

    fn list<'a>(&'a self, prefix: &'a str) -> BoxFuture<'a, Result<Vec<ListedObject>, StoreError>> {
        Box::pin(async move {
            self.check_there(Operation::List, prefix).await?;
            let mut found = Vec::new();
            for entry in self.entries(Operation::List, prefix).await? {
                #[cfg(feature = "hdfs")]
                if matches!(self.staging, Staging::Hdfs) && hdfs::staged(&entry).is_some() {
                    continue;
                }
                let name = entry.location.to_string();
                if name.starts_with(prefix) {
                    found.push(listed(name, entry));
                }
            }
            found.sort_unstable_by(|a, b| a.name.cmp(&b.name));
            Ok(found)
        })
    }
}

/// The id of an upload whose process died, by the number of its temporary file.
#[cfg(any(feature = "local", feature = "hdfs"))]
pub(crate) fn staged_id(number: &str) -> Option<UploadId> {
    // As it is written, or another file would be removed for it.
    let number = number.parse::<u64>().ok().filter(|parsed| parsed.to_string() == number)?;
    Some(UploadId(format!("#{number}").into()))
}

/// The number of the temporary file of an upload whose process died.
fn staged_number(id: &UploadId) -> Option<u64> {
    id.0.strip_prefix('#')?.parse().ok()
}

pub(crate) fn payload(body: &Body) -> PutPayload {
    body.slices().iter().cloned().collect()
}

pub(crate) fn tag(text: Option<String>) -> EntityTag {
    EntityTag(text.unwrap_or_default().trim_matches('"').into())
}

fn listed(name: String, meta: ObjectMeta) -> ListedObject {
    ListedObject { name, bytes: meta.size, tag: tag(meta.e_tag), modified: Some(meta.last_modified.into()) }
}

/// An error of the kind that the store's error is of.
pub(crate) fn failure(
    operation: Operation,
    url: &str,
    name: &str,
    error: impl StdError + Send + Sync + 'static,
) -> StoreError {
    let is_commit = matches!(operation, Operation::Put | Operation::Complete);
    let class = classify(operation, &error);
    #[cfg(feature = "hdfs")]
    let error: Box<dyn StdError + Send + Sync> = match hdfs::without_stack(&error.to_string()) {
        Some(text) => text.into(),
        None => Box::new(error),
    };
    match class {
        Class::Kind(kind) => StoreError::caused(operation, url, name, kind, error),
        Class::Passing if is_commit => {
            // The object may be in its place already, and a sync have failed after that.
            StoreError::caused(operation, url, name, StoreErrorKind::Interrupted, error)
        }
        Class::Passing => StoreError::failed(operation, url, name, true, error),
        Class::Lasting => StoreError::failed(operation, url, name, false, error),
    }
}

/// What an error says of another attempt, or of what went wrong.
pub(crate) enum Class {
    Kind(StoreErrorKind),
    /// It may go away by itself.
    Passing,
    Lasting,
}

/// What lies below says most where it is an error of the system.
fn classify(operation: Operation, error: &(dyn StdError + 'static)) -> Class {
    #[cfg(any(feature = "azure", feature = "gcs"))]
    if let Some(class) = cloud::answers::meaning(operation, error) {
        return class;
    }
    let _ = operation;
    let mut cause = Some(error);
    while let Some(error) = cause {
        use object_store::Error as E;
        match error.downcast_ref::<E>() {
            Some(E::NotFound { .. }) => return Class::Kind(StoreErrorKind::NotFound),
            Some(E::Unauthenticated { .. }) => return Class::Kind(StoreErrorKind::Credentials),
            Some(E::NotSupported { .. } | E::NotImplemented { .. }) => {
                return Class::Kind(StoreErrorKind::Unsupported);
            }
            Some(E::InvalidPath { .. }) => return Class::Lasting,
            #[cfg(feature = "hdfs")]
            Some(E::Generic { source, .. }) => {
                if let Some(kind) = hdfs::meaning(&source.to_string()) {
                    return Class::Kind(kind);
                }
            }
            _ => {}
        }
        if let Some(error) = error.downcast_ref::<io::Error>() {
            return match error.kind() {
                ErrorKind::PermissionDenied
                | ErrorKind::ReadOnlyFilesystem
                | ErrorKind::NotADirectory
                | ErrorKind::IsADirectory
                | ErrorKind::AlreadyExists
                | ErrorKind::InvalidFilename
                | ErrorKind::Unsupported => Class::Lasting,
                _ => Class::Passing,
            };
        }
        cause = error.source();
    }
    Class::Passing
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A writer whose disk is full.
    #[derive(Debug)]
    struct Full;

    impl object_store::MultipartUpload for Full {
        fn put_part(&mut self, _: PutPayload) -> object_store::UploadPart {
            let source = Box::new(io::Error::from(ErrorKind::StorageFull));
            Box::pin(async { Err(object_store::Error::Generic { store: "local", source }) })
        }

        fn complete<'a, 'b>(&'a mut self) -> BoxFuture<'b, object_store::Result<object_store::PutResult>>
        where
            'a: 'b,
        {
            unreachable!("it has no part")
        }

        fn abort<'a, 'b>(&'a mut self) -> BoxFuture<'b, object_store::Result<()>>
        where
            'a: 'b,
        {
            Box::pin(async { Ok(()) })
        }
    }

    #[test]
    fn an_upload_that_failed_says_why_it_did() {
        let inner = Arc::new(object_store::memory::InMemory::new());
        let bucket = Bucket::new("memory://full", inner, Staging::Nowhere);
        let id = bucket.writers.add("a", Box::new(Full));
        let upload = UploadRef { name: "a", id: &id };
        let put = |number| {
            let body = Body::new(vec!["bytes".into()]);
            crate::block_on(bucket.put_part(upload, number, body, Lane::Primary)).unwrap_err()
        };
        assert_eq!(*put(1).kind(), StoreErrorKind::Failed);
        let complete = crate::block_on(bucket.complete(upload, &[])).unwrap_err();
        for later in [put(1), put(2), complete] {
            assert_eq!(*later.kind(), StoreErrorKind::Latched);
            let full = io::Error::from(ErrorKind::StorageFull).to_string();
            assert!(later.to_string().contains(&full), "{later}");
        }
    }

    /// A writer that renames its file, and then waits for leave to end or fails to sync.
    #[cfg(feature = "local")]
    #[derive(Debug)]
    struct Renamed {
        file: PathBuf,
        end: Option<tokio::sync::oneshot::Receiver<()>>,
        syncs: bool,
    }

    #[cfg(feature = "local")]
    impl object_store::MultipartUpload for Renamed {
        fn put_part(&mut self, _: PutPayload) -> object_store::UploadPart {
            unreachable!("it is written already")
        }

        fn complete<'a, 'b>(&'a mut self) -> BoxFuture<'b, object_store::Result<object_store::PutResult>>
        where
            'a: 'b,
        {
            let (file, end, syncs) = (self.file.clone(), self.end.take(), self.syncs);
            Box::pin(async move {
                std::fs::write(file, "").unwrap();
                if let Some(end) = end {
                    end.await.unwrap();
                }
                let source = Box::new(io::Error::from_raw_os_error(5));
                let done =
                    object_store::PutResult { e_tag: None, version: None, extensions: Default::default() };
                syncs.then_some(done).ok_or(object_store::Error::Generic { store: "local", source })
            })
        }

        fn abort<'a, 'b>(&'a mut self) -> BoxFuture<'b, object_store::Result<()>>
        where
            'a: 'b,
        {
            unreachable!("it is committed")
        }
    }

    #[cfg(feature = "local")]
    fn directory_bucket(root: &std::path::Path) -> Bucket {
        let local = Arc::new(Local::open(root).unwrap());
        Bucket::new("file:///bucket", Arc::new(local.files()), Staging::Local(local))
    }

    #[test]
    #[cfg(feature = "local")]
    fn an_object_whose_folder_could_not_be_synced_is_not_there() {
        let root = tempfile::TempDir::new().unwrap();
        let bucket = directory_bucket(root.path());
        let writer = Renamed { file: root.path().join("a"), end: None, syncs: false };
        let id = bucket.writers.add("a", Box::new(writer));
        let complete = bucket.complete(UploadRef { name: "a", id: &id }, &[]);
        let error = crate::block_on(complete).unwrap_err();
        assert_eq!(*error.kind(), StoreErrorKind::Interrupted);
        assert!(crate::block_on(bucket.head("a")).unwrap_err().is_not_found());
    }

    #[test]
    #[cfg(feature = "local")]
    fn an_object_whose_commit_was_given_up_is_proven_by_its_end() {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).build().unwrap();
        for syncs in [true, false] {
            let root = tempfile::TempDir::new().unwrap();
            let (file, bucket) = (root.path().join("a"), directory_bucket(root.path()));
            let (leave, end) = tokio::sync::oneshot::channel();
            let id = bucket.writers.add("a", Box::new(Renamed { file: file.clone(), end: Some(end), syncs }));
            runtime.block_on(async {
                let mut complete = bucket.complete(UploadRef { name: "a", id: &id }, &[]);
                poll_fn(|context| {
                    assert!(complete.as_mut().poll(context).is_pending());
                    std::task::Poll::Ready(())
                })
                .await;
                while !file.exists() {
                    tokio::task::yield_now().await;
                }
                drop(complete);
                assert_eq!(*bucket.head("a").await.unwrap_err().kind(), StoreErrorKind::Interrupted);
                bucket.delete("a").await.unwrap();
                std::fs::write(&file, "").unwrap();
                assert_eq!(*bucket.head("a").await.unwrap_err().kind(), StoreErrorKind::Interrupted);
                leave.send(()).unwrap();
                let ended = loop {
                    match bucket.head("a").await {
                        Err(error) if *error.kind() == StoreErrorKind::Interrupted => {}
                        ended => break ended,
                    }
                    tokio::task::yield_now().await;
                };
                assert_eq!(ended.map_err(|error| error.is_not_found()).is_ok(), syncs);
                assert_eq!(file.exists(), syncs);
            });
        }
    }

    #[test]
    #[cfg(feature = "local")]
    fn an_object_that_failed_and_cannot_be_removed_is_never_told_of() {
        let root = tempfile::TempDir::new().unwrap();
        let bucket = directory_bucket(root.path());
        let writer = Renamed { file: root.path().join("b"), end: None, syncs: false };
        let id = bucket.writers.add("x/a", Box::new(writer));
        // A link to itself stands in the way.
        std::os::unix::fs::symlink("x", root.path().join("x")).unwrap();
        crate::block_on(bucket.complete(UploadRef { name: "x/a", id: &id }, &[])).unwrap_err();
        std::fs::remove_file(root.path().join("x")).unwrap();
        std::fs::create_dir(root.path().join("x")).unwrap();
        std::fs::write(root.path().join("x/a"), "").unwrap();
        let head = || crate::block_on(bucket.head("x/a")).map_err(|error| error.kind().clone());
        assert_eq!(head().unwrap_err(), StoreErrorKind::Interrupted);
        crate::block_on(bucket.delete("x/a")).unwrap();
        assert_eq!(head().unwrap_err(), StoreErrorKind::NotFound);
    }
}
