//! Sequential writers under the ids of their uploads, for stores that know one writer and a rename.
//!
//! A writer dies with the process; what it leaves behind is found by the store.
//!
//! Invariant: a writer is in at most one call at a time, and one whose call failed or was dropped never comes back.
#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use object_store::MultipartUpload;

use crate::store::{ListedUpload, StoreError, StoreErrorKind, UploadId, UploadRef, UploadedPart};

/// All writers of a bucket.
#[derive(Debug, Default)]
pub(crate) struct Writers {
    next: AtomicU64,
    open: Mutex<HashMap<UploadId, Writer>>,
}

#[derive(Debug)]
struct Writer {
    name: String,
    /// Away while a part is written, and for good once one has failed.
    sink: Option<Box<dyn MultipartUpload>>,
    parts: u32,
    bytes: u64,
    created: SystemTime,
    /// Why it never comes back.
    failure: Option<StoreError>,
}

impl Writers {
    pub(crate) fn add(&self, name: &str, sink: Box<dyn MultipartUpload>) -> UploadId {
        let id = UploadId(self.next.fetch_add(1, Ordering::Relaxed).to_string().into());
        let (name, created) = (name.to_owned(), SystemTime::now());
        let writer = Writer { name, sink: Some(sink), parts: 0, bytes: 0, created, failure: None };
        self.lock().insert(id.clone(), writer);
        id
    }

    /// The writer, for its next part.
    pub(crate) fn take(
        &self,
        upload: UploadRef<'_>,
        number: u32,
    ) -> Result<Box<dyn MultipartUpload>, StoreErrorKind> {
        let mut open = self.lock();
        let writer = find(&mut open, upload)?;
        if writer.sink.is_some() && number != writer.parts + 1 {
            return Err(StoreErrorKind::InvalidPart);
        }
        writer.sink.take().ok_or(StoreErrorKind::Latched)
    }

    /// The writer comes back after its part. If its upload was aborted meanwhile it is dropped, which removes its file.
    pub(crate) fn give_back(
        &self,
        upload: UploadRef<'_>,
        sink: Box<dyn MultipartUpload>,
        bytes: u64,
    ) -> Result<(), StoreErrorKind> {
        let mut open = self.lock();
        let writer = find(&mut open, upload)?;
        writer.sink = Some(sink);
        writer.parts += 1;
        writer.bytes += bytes;
        Ok(())
    }

    /// The writer does not come back, for this reason.
    pub(crate) fn failed(&self, upload: UploadRef<'_>, error: &StoreError) {
        if let Ok(writer) = find(&mut self.lock(), upload) {
            writer.failure.get_or_insert_with(|| error.clone());
        }
    }

    /// Why the writer is gone, if its call failed.
    pub(crate) fn failure(&self, upload: UploadRef<'_>) -> Option<StoreError> {
        find(&mut self.lock(), upload).ok()?.failure.clone()
    }

    /// The writer and the bytes it has, for its commit.
    pub(crate) fn end(
        &self,
        upload: UploadRef<'_>,
        parts: &[UploadedPart],
    ) -> Result<(Box<dyn MultipartUpload>, u64), StoreErrorKind> {
        let mut open = self.lock();
        let writer = find(&mut open, upload)?;
        if writer.sink.is_some() && !parts.iter().map(|part| part.number).eq(1..=writer.parts) {
            return Err(StoreErrorKind::InvalidPart);
        }
        let sink = writer.sink.take().ok_or(StoreErrorKind::Latched)?;
        let bytes = writer.bytes;
        open.remove(upload.id);
        Ok((sink, bytes))
    }

    pub(crate) fn remove(&self, upload: UploadRef<'_>) -> Option<Box<dyn MultipartUpload>> {
        let mut open = self.lock();
        find(&mut open, upload).ok()?;
        open.remove(upload.id)?.sink
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        self.lock().values().any(|writer| writer.name == name)
    }

    pub(crate) fn list(&self, prefix: &str) -> Vec<ListedUpload> {
        let open = self.lock();
        let fits = open.iter().filter(|(_, writer)| writer.name.starts_with(prefix));
        fits.map(|(id, writer)| ListedUpload {
            name: writer.name.clone(),
            id: id.clone(),
            created: Some(writer.created),
        })
        .collect()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<UploadId, Writer>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn find<'a>(
    open: &'a mut HashMap<UploadId, Writer>,
    upload: UploadRef<'_>,
) -> Result<&'a mut Writer, StoreErrorKind> {
    let writer = open.get_mut(upload.id).filter(|writer| writer.name == upload.name);
    writer.ok_or(StoreErrorKind::NoSuchUpload)
}
