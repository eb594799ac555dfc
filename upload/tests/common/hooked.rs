//! A bucket whose requests pass through a hook: what the tests' failing, waiting and telling buckets have in common.

use std::fmt;
use std::ops::{Deref, Range};

use bytes::Bytes;
use tidelog_upload::store::{ListedObject, ListedPart, ListedUpload, Marker, Page, UploadedPart};
use tidelog_upload::{
    Body, BoxFuture, Capabilities, EntityTag, Lane, Operation, Store, StoreError, UploadId, UploadRef, Watch,
    Wire,
};

/// What becomes of the requests to a bucket.
pub trait Hook: fmt::Debug + Send + Sync + 'static {
    /// The bucket behind it.
    fn inner(&self) -> &dyn Store;

    /// Every request passes here. It has not begun until `request` is polled.
    fn pass<'a, T: Send + 'a>(
        &'a self,
        operation: Operation,
        name: &'a str,
        lane: Lane,
        request: BoxFuture<'a, Result<T, StoreError>>,
    ) -> BoxFuture<'a, Result<T, StoreError>>;

    /// A read, which may bring something else than what is there.
    fn get<'a>(&'a self, name: &'a str, range: Range<u64>) -> BoxFuture<'a, Result<Bytes, StoreError>> {
        self.pass(Operation::Get, name, Lane::Primary, self.inner().get(name, range))
    }

    /// A page of a listing.
    fn list_page<'a>(
        &'a self,
        prefix: &'a str,
        from: Option<&'a Marker>,
    ) -> BoxFuture<'a, Result<Page<ListedObject>, StoreError>> {
        let _ = from;
        Box::pin(async move {
            let all = self.pass(Operation::List, prefix, Lane::Primary, self.inner().list(prefix));
            Ok(Page { found: all.await?, next: None })
        })
    }

    /// Bytes are to be sent over this connection.
    fn connect(&self, wire: &Wire) {
        let _ = wire;
    }
}

/// The bucket that a hook makes of another one.
#[derive(Clone)]
pub struct Hooked<H>(pub H);

impl<H> Deref for Hooked<H> {
    type Target = H;

    fn deref(&self) -> &H {
        &self.0
    }
}

impl<H: fmt::Debug> fmt::Debug for Hooked<H> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl<H: Hook> Store for Hooked<H> {
    fn url(&self) -> &str {
        self.inner().url()
    }

    fn capabilities(&self) -> &Capabilities {
        self.inner().capabilities()
    }

    fn put<'a>(
        &'a self,
        name: &'a str,
        body: Body,
        lane: Lane,
    ) -> BoxFuture<'a, Result<EntityTag, StoreError>> {
        self.connect(body.wire());
        self.pass(Operation::Put, name, lane, self.inner().put(name, body, lane))
    }

    fn create<'a>(&'a self, name: &'a str) -> BoxFuture<'a, Result<UploadId, StoreError>> {
        self.pass(Operation::Create, name, Lane::Primary, self.inner().create(name))
    }

    fn put_part<'a>(
        &'a self,
        upload: UploadRef<'a>,
        number: u32,
        body: Body,
        lane: Lane,
    ) -> BoxFuture<'a, Result<EntityTag, StoreError>> {
        self.connect(body.wire());
        let request = self.inner().put_part(upload, number, body, lane);
        self.pass(Operation::PutPart, upload.name, lane, request)
    }

    fn copy_part<'a>(
        &'a self,
        upload: UploadRef<'a>,
        number: u32,
        from: &'a str,
        range: Range<u64>,
    ) -> BoxFuture<'a, Result<EntityTag, StoreError>> {
        let request = self.inner().copy_part(upload, number, from, range);
        self.pass(Operation::CopyPart, upload.name, Lane::Primary, request)
    }

    fn list_parts<'a>(&'a self, upload: UploadRef<'a>) -> BoxFuture<'a, Result<Vec<ListedPart>, StoreError>> {
        self.pass(Operation::ListParts, upload.name, Lane::Primary, self.inner().list_parts(upload))
    }

    fn complete<'a>(
        &'a self,
        upload: UploadRef<'a>,
        parts: &'a [UploadedPart],
    ) -> BoxFuture<'a, Result<EntityTag, StoreError>> {
        self.pass(Operation::Complete, upload.name, Lane::Primary, self.inner().complete(upload, parts))
    }

    fn abort<'a>(&'a self, upload: UploadRef<'a>) -> BoxFuture<'a, Result<(), StoreError>> {
        self.pass(Operation::Abort, upload.name, Lane::Primary, self.inner().abort(upload))
    }

    fn list_uploads<'a>(&'a self, prefix: &'a str) -> BoxFuture<'a, Result<Vec<ListedUpload>, StoreError>> {
        self.pass(Operation::ListUploads, prefix, Lane::Primary, self.inner().list_uploads(prefix))
    }

    fn get<'a>(&'a self, name: &'a str, range: Range<u64>) -> BoxFuture<'a, Result<Bytes, StoreError>> {
        self.0.get(name, range)
    }

    /// Half of the bytes come before the rest.
    fn get_watched<'a>(
        &'a self,
        name: &'a str,
        range: Range<u64>,
        watch: &'a mut dyn Watch,
    ) -> BoxFuture<'a, Result<Bytes, StoreError>> {
        Box::pin(async move {
            let bytes = self.0.get(name, range).await?;
            watch.see(&bytes[..bytes.len() / 2]);
            Ok(bytes)
        })
    }

    fn head<'a>(&'a self, name: &'a str) -> BoxFuture<'a, Result<ListedObject, StoreError>> {
        self.pass(Operation::Head, name, Lane::Primary, self.inner().head(name))
    }

    fn delete<'a>(&'a self, name: &'a str) -> BoxFuture<'a, Result<(), StoreError>> {
        self.pass(Operation::Delete, name, Lane::Primary, self.inner().delete(name))
    }

    fn list<'a>(&'a self, prefix: &'a str) -> BoxFuture<'a, Result<Vec<ListedObject>, StoreError>> {
        self.pass(Operation::List, prefix, Lane::Primary, self.inner().list(prefix))
    }

    fn list_page<'a>(
        &'a self,
        prefix: &'a str,
        from: Option<&'a Marker>,
    ) -> BoxFuture<'a, Result<Page<ListedObject>, StoreError>> {
        self.0.list_page(prefix, from)
    }
}
