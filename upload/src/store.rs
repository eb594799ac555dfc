//! The seam to a bucket, at the level of requests: whole objects, objects in parts, ranges, listings.
//!
//! What an object holds, when one is begun and when one may be deleted is decided elsewhere. Time limits, retries and
//! the choice of a bucket do not live here either: an implementation makes one attempt and says how it ended.
#![forbid(unsafe_code)]

use std::collections::HashSet;
use std::error::Error as StdError;
use std::fmt;
use std::future::Future;
use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::Bytes;

use crate::wire::Wire;

/// A boxed future that may move between threads.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// The longest name of an object in bytes, the least of the common stores.
pub const NAME_BYTES_MAX: usize = 1024;

/// The longest part of a name between two `/`, in bytes: a local file name, with room for a temporary suffix.
pub const NAME_SEGMENT_BYTES_MAX: usize = 240;

/// One bucket. Shared between threads; every operation is one attempt of one request. Dropping its future gives the
/// request up: the connection is closed, and whether it took effect is unknown.
///
/// Contract, checked by one suite for every implementation:
/// 1. Nothing can be seen under a name before [`put`](Store::put) or [`complete`](Store::complete) took effect: an object
///    is there whole or not at all.
/// 2. `Ok` means that it is done, durable as far as the store can promise it. An error says by
///    [`outcome`](StoreError::outcome) whether nothing was done or whether that is unknown.
/// 3. [`get`](Store::get) returns every byte of the range or an error, never fewer bytes.
/// 4. [`delete`](Store::delete) and [`abort`](Store::abort) of what does not exist succeed.
/// 5. Names are checked before anything is done ([`check_name`]). A name is used for one object only: the caller makes it
///    unique. A name must not be a folder of another one.
/// 6. Nothing is retried inside, and no time limit is kept. But a request that was refused for its credentials or its clock
///    may be signed again, once: it was not looked at.
pub trait Store: fmt::Debug + Send + Sync + 'static {
    /// The URL of the bucket, as it stands in handles and errors. Opening it again gives the same bucket.
    fn url(&self) -> &str;

    /// What the bucket takes.
    fn capabilities(&self) -> &Capabilities;

    /// Writes a whole object in one request. Returns its entity tag, empty if the store has none. What is known of the
    /// connection goes to the body's [`wire`](Body::wire).
    ///
    /// # Errors
    /// A refused name, or whatever the store says.
    fn put<'a>(
        &'a self,
        name: &'a str,
        body: Body,
        lane: Lane,
    ) -> BoxFuture<'a, Result<EntityTag, StoreError>>;

    /// Begins an object in parts. Visible to nobody until it is complete.
    ///
    /// # Errors
    /// A refused name, or whatever the store says.
    fn create<'a>(&'a self, name: &'a str) -> BoxFuture<'a, Result<UploadId, StoreError>>;

    /// Sends one part, numbered from 1. What is known of the connection goes to the body's [`wire`](Body::wire).
    ///
    /// # Errors
    /// [`NoSuchUpload`](StoreErrorKind::NoSuchUpload), or whatever the store says.
    fn put_part<'a>(
        &'a self,
        upload: UploadRef<'a>,
        number: u32,
        body: Body,
        lane: Lane,
    ) -> BoxFuture<'a, Result<EntityTag, StoreError>>;

    /// Makes a part, numbered from 1, of the bytes `range` of the complete object `from` of this bucket, without sending them.
    /// Only where [`Capabilities::copy_part`] says so.
    ///
    /// # Errors
    /// [`NoSuchUpload`](StoreErrorKind::NoSuchUpload), or whatever the store says, where the object or the range is not there.
    fn copy_part<'a>(
        &'a self,
        upload: UploadRef<'a>,
        number: u32,
        from: &'a str,
        range: Range<u64>,
    ) -> BoxFuture<'a, Result<EntityTag, StoreError>> {
        let _ = (number, from, range);
        let kind = StoreErrorKind::Unsupported;
        let error = StoreError::new(Operation::CopyPart, self.url(), upload.name, kind);
        Box::pin(async move { Err(error) })
    }

    /// The parts that the store has of an upload, by number. Only where [`Capabilities::list_parts`] says so.
    ///
    /// # Errors
    /// [`NoSuchUpload`](StoreErrorKind::NoSuchUpload), or whatever the store says.
    fn list_parts<'a>(&'a self, upload: UploadRef<'a>) -> BoxFuture<'a, Result<Vec<ListedPart>, StoreError>>;

    /// Makes the object of these parts, whose numbers go up.
    ///
    /// # Errors
    /// [`NoSuchUpload`](StoreErrorKind::NoSuchUpload), [`InvalidPart`](StoreErrorKind::InvalidPart),
    /// [`InProgress`](StoreErrorKind::InProgress), or whatever the store says.
    fn complete<'a>(
        &'a self,
        upload: UploadRef<'a>,
        parts: &'a [UploadedPart],
    ) -> BoxFuture<'a, Result<EntityTag, StoreError>>;

    /// Gives an upload up and removes its parts.
    ///
    /// # Errors
    /// Whatever the store says.
    fn abort<'a>(&'a self, upload: UploadRef<'a>) -> BoxFuture<'a, Result<(), StoreError>>;

    /// The uploads neither complete nor aborted whose names start with `prefix`. Only where
    /// [`Capabilities::list_uploads`] says so.
    ///
    /// # Errors
    /// Whatever the store says.
    fn list_uploads<'a>(&'a self, prefix: &'a str) -> BoxFuture<'a, Result<Vec<ListedUpload>, StoreError>>;

    /// Reads a range of bytes: all of it, or an error.
    ///
    /// # Errors
    /// [`NotFound`](StoreErrorKind::NotFound), [`OutOfRange`](StoreErrorKind::OutOfRange) when the object ends before
    /// the range does, or whatever the store says. Nothing is allocated for a range that the object does not have.
    fn get<'a>(&'a self, name: &'a str, range: Range<u64>) -> BoxFuture<'a, Result<Bytes, StoreError>>;

    /// As [`get`](Store::get), and shows the bytes to `watch` while they come, where the store has them piece by piece.
    /// It may be shown none of them, or not all; what it is shown is the beginning of what is returned.
    ///
    /// # Errors
    /// As [`get`](Store::get).
    fn get_watched<'a>(
        &'a self,
        name: &'a str,
        range: Range<u64>,
        watch: &'a mut dyn Watch,
    ) -> BoxFuture<'a, Result<Bytes, StoreError>> {
        let _ = watch;
        self.get(name, range)
    }

    /// What the store knows of a complete object.
    ///
    /// # Errors
    /// [`NotFound`](StoreErrorKind::NotFound), or whatever the store says.
    fn head<'a>(&'a self, name: &'a str) -> BoxFuture<'a, Result<ListedObject, StoreError>>;

    /// Deletes an object. What does not exist is deleted already.
    ///
    /// # Errors
    /// Whatever the store says; the object may be gone or not.
    fn delete<'a>(&'a self, name: &'a str) -> BoxFuture<'a, Result<(), StoreError>>;

    /// All complete objects whose names start with `prefix` (a plain string, may be empty), sorted by name.
    ///
    /// # Errors
    /// Whatever the store says.
    fn list<'a>(&'a self, prefix: &'a str) -> BoxFuture<'a, Result<Vec<ListedObject>, StoreError>>;

    /// What one request brings of [`list`](Store::list), in any order, beginning where the page before said. Where a store
    /// does not tell pages apart, it is all in one.
    ///
    /// # Errors
    /// Whatever the store says.
    fn list_page<'a>(
        &'a self,
        prefix: &'a str,
        from: Option<&'a Marker>,
    ) -> BoxFuture<'a, Result<Page<ListedObject>, StoreError>> {
        let _ = from;
        Box::pin(async move { Ok(Page { found: self.list(prefix).await?, next: None }) })
    }

    /// What one request brings of [`list_uploads`](Store::list_uploads), as [`list_page`](Store::list_page) does.
    ///
    /// # Errors
    /// Whatever the store says.
    fn list_uploads_page<'a>(
        &'a self,
        prefix: &'a str,
        from: Option<&'a Marker>,
    ) -> BoxFuture<'a, Result<Page<ListedUpload>, StoreError>> {
        let _ = from;
        Box::pin(async move { Ok(Page { found: self.list_uploads(prefix).await?, next: None }) })
    }
}

/// Where a page of a listing begins, in the words of the store that told.
pub type Marker = (String, Option<String>);

/// A piece of a listing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Page<T> {
    /// What is in it.
    pub found: Vec<T>,
    /// Where the next page begins, if there is one.
    pub next: Option<Marker>,
}

/// All pages of a listing. One that leads back to a page that it has led to before is an error: it would never end.
pub(crate) async fn every_page<T, F: Future<Output = Result<Page<T>, StoreError>>>(
    endless: impl Fn() -> StoreError,
    mut page: impl FnMut(Option<Marker>) -> F,
) -> Result<Vec<T>, StoreError> {
    let (mut all, mut begun, mut from) = (Vec::new(), HashSet::new(), None);
    loop {
        let Page { found, next } = page(from).await?;
        all.extend(found);
        match &next {
            None => return Ok(all),
            Some(next) if !begun.insert(next.clone()) => return Err(endless()),
            Some(_) => from = next,
        }
    }
}

/// Looks at the bytes of a range while they come, on the thread that receives them: they are in its cache.
pub trait Watch: Send {
    /// `bytes` are all that have come so far, from the start of the range on: those of the call before, and more. Must not
    /// block.
    fn see(&mut self, bytes: &[u8]);
}

/// What a bucket takes: one row per kind of store, compared with the store itself by the conformance suite.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// How the parts of an upload may be sent.
    pub parts: Parts,
    /// The least bytes of a part that is not the last one.
    pub part_bytes_min: u64,
    /// The most bytes of a part.
    pub part_bytes_max: u64,
    /// The most parts of an object.
    pub parts_max: u32,
    /// Whether all parts but the last one must have the same size.
    pub equal_parts: bool,
    /// Whether the numbers at [`Store::complete`] may have gaps.
    pub sparse: bool,
    /// Whether a part can be made of bytes that the bucket has.
    pub copy_part: bool,
    /// Whether a part number may be sent again while an earlier attempt may still arrive.
    pub resend_part: bool,
    /// Whether the parts that have arrived can be listed.
    pub list_parts: bool,
    /// Whether unfinished uploads can be listed.
    pub list_uploads: bool,
    /// Whether a write can be made to fail where an object of that name exists.
    pub conditional_put: bool,
}

/// How the parts of an upload may be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Parts {
    /// In any order, several at a time.
    Parallel,
    /// One after the other, in order, each once: one writer and a rename.
    Sequential,
    /// Not at all: one request per object.
    None,
}

/// The connections that a request uses: attempts that race do not share any.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Lane {
    /// First attempts.
    Primary,
    /// Hedges.
    Hedge,
}

/// Bytes to be sent: slices that are never copied, and can be sent again.
#[derive(Clone, Debug, Default)]
pub struct Body {
    slices: Arc<[Bytes]>,
    wire: Wire,
}

impl Body {
    /// The concatenation of `slices`.
    #[must_use]
    pub fn new(slices: Vec<Bytes>) -> Body {
        Body { slices: slices.into(), wire: Wire::default() }
    }

    /// The same bytes for a request of its own, whose connection is told of by `wire`.
    #[must_use]
    pub fn with_wire(&self, wire: Wire) -> Body {
        Body { slices: Arc::clone(&self.slices), wire }
    }

    /// What the store tells of the connection that takes the bytes. Clones share it.
    #[must_use]
    pub fn wire(&self) -> &Wire {
        &self.wire
    }

    /// The length in bytes.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.slices.iter().map(|slice| slice.len() as u64).sum()
    }

    /// Whether there is nothing to send.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The slices in order.
    #[must_use]
    pub fn slices(&self) -> &[Bytes] {
        &self.slices
    }
}

/// A store's tag for the bytes of an object or a part, without quotes; empty where the store has none.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct EntityTag(pub Arc<str>);

/// A store's name for an upload in parts.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct UploadId(pub Arc<str>);

/// An upload in parts.
#[derive(Clone, Copy, Debug)]
pub struct UploadRef<'a> {
    /// The name of its object.
    pub name: &'a str,
    /// The store's name for it.
    pub id: &'a UploadId,
}

/// A part that was taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UploadedPart {
    /// Its number, from 1.
    pub number: u32,
    /// The tag that the store gave to it.
    pub tag: EntityTag,
}

/// A part in a listing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedPart {
    /// Its number, from 1.
    pub number: u32,
    /// Its tag.
    pub tag: EntityTag,
    /// Its length in bytes.
    pub bytes: u64,
}

/// An upload in a listing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedUpload {
    /// The name of its object.
    pub name: String,
    /// The store's name for it.
    pub id: UploadId,
    /// When it began, as the store says.
    pub created: Option<SystemTime>,
}

/// A complete object in a listing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedObject {
    /// Its name.
    pub name: String,
    /// Its length in bytes.
    pub bytes: u64,
    /// Its tag.
    pub tag: EntityTag,
    /// When it was completed, as the store says.
    pub modified: Option<SystemTime>,
}

/// What was asked of a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Operation {
    /// Opening the bucket.
    Open,
    /// [`Store::put`].
    Put,
    /// [`Store::create`].
    Create,
    /// [`Store::put_part`].
    PutPart,
    /// [`Store::copy_part`].
    CopyPart,
    /// [`Store::list_parts`].
    ListParts,
    /// [`Store::complete`].
    Complete,
    /// [`Store::abort`].
    Abort,
    /// [`Store::list_uploads`].
    ListUploads,
    /// [`Store::get`].
    Get,
    /// [`Store::head`].
    Head,
    /// [`Store::delete`].
    Delete,
    /// [`Store::list`].
    List,
}

impl Operation {
    /// The operation in lower case, as in metrics.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Operation::Open => "open",
            Operation::Put => "put",
            Operation::Create => "create",
            Operation::PutPart => "put_part",
            Operation::CopyPart => "copy_part",
            Operation::ListParts => "list_parts",
            Operation::Complete => "complete",
            Operation::Abort => "abort",
            Operation::ListUploads => "list_uploads",
            Operation::Get => "get",
            Operation::Head => "head",
            Operation::Delete => "delete",
            Operation::List => "list",
        }
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What kept a store from doing what was asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StoreErrorKind {
    /// The object does not exist.
    #[error("there is no such object; it was deleted, or the handle is older than that")]
    NotFound,
    /// The object ends before the range does, or the range ends before it starts.
    #[error(
        "the bytes {start}..{end} were asked for, and the object has {size}; it is not the one the handle names"
    )]
    OutOfRange {
        /// First byte asked for.
        start: u64,
        /// End of the range, exclusive.
        end: u64,
        /// Size of the object in bytes.
        size: u64,
    },
    /// The object is there, with another size than what was put or asked for.
    #[error("{expected} bytes were expected and {found} found; do not rely on the object, write it again")]
    WrongSize {
        /// What should be there, in bytes.
        expected: u64,
        /// What is there, in bytes.
        found: u64,
    },
    /// A name that no object can have.
    #[error("the name is refused: {0}")]
    InvalidName(&'static str),
    /// A URL that names no bucket.
    #[error("the URL is refused: {0}")]
    InvalidUrl(String),
    /// A URL of a kind that this build does not know.
    #[error("the scheme {scheme:?} is not supported; use one of {supported}")]
    UnsupportedScheme {
        /// The scheme found.
        scheme: String,
        /// The schemes known, for people.
        supported: &'static str,
    },
    /// A URL of a kind that this build leaves out.
    #[error("this build has no {scheme}:// buckets; build it with the feature {feature}")]
    SchemeNotBuilt {
        /// The scheme found.
        scheme: &'static str,
        /// The feature of the crates that brings it.
        feature: &'static str,
    },
    /// The store refuses for now: 503, 429 and their like. Nothing was done.
    #[error("the store asks to slow down")]
    Throttled,
    /// There was no answer in time.
    #[error("there was no answer within {0:?}")]
    TimedOut(Duration),
    /// The connection broke, the answer made no sense, or the store failed while at it.
    #[error("the request was interrupted, and its outcome is unknown")]
    Interrupted,
    /// No connection could be made. Nothing was sent.
    #[error("no connection to the store")]
    Unreachable,
    /// The bucket does not exist; of a local one, its directory.
    #[error("the bucket does not exist; create it, mount it, or check its URL")]
    NoSuchBucket,
    /// The store does not know the upload: completed, aborted or expired.
    #[error("the store does not know this upload (any more); begin a new one")]
    NoSuchUpload,
    /// A part named at Complete is not there as named, is too small or out of order.
    #[error("the store refuses a part of the upload")]
    InvalidPart,
    /// A Complete of this upload is under way.
    #[error("the upload is being completed already")]
    InProgress,
    /// An object of this name exists.
    #[error("an object of this name exists")]
    Exists,
    /// The credentials do not allow it.
    #[error("access is denied; check the credentials and the policy of the bucket")]
    Denied,
    /// The credentials have expired or cannot be had.
    #[error("the credentials have expired or cannot be had; renew them")]
    Credentials,
    /// This machine does not say what a request to the bucket takes, such as a region; the source of the error says what.
    #[error("this machine's configuration does not suffice for the bucket")]
    Misconfigured,
    /// The clock of this machine and that of the store differ by more than the store accepts.
    #[error("this machine's clock and the store's differ too much; set the clock")]
    ClockSkew,
    /// The store does not do such a thing.
    #[error("the store does not offer this")]
    Unsupported,
    /// The store refused it for good, or failed without having done anything; the source of the error says how.
    #[error("the store failed")]
    Failed,
    /// An earlier operation on this upload failed.
    #[error("an earlier operation of this upload failed")]
    Latched,
    /// Given up by its owner before it had ended.
    #[error("the request was given up")]
    Cancelled,
    /// The object could not be written within its deadline.
    #[error("the object was not complete within {0:?}")]
    Deadline(Duration),
    /// The upload was aborted by its owner.
    #[error("the upload was aborted")]
    Aborted,
    /// The driver was shut down before the outcome was known.
    #[error(
        "uploads were shut down before the outcome was known; look at the bucket before relying on either"
    )]
    ShutDown,
}

/// What a failed request has done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// Nothing.
    NotApplied,
    /// Nobody knows; it may even still be under way.
    Unknown,
}

impl StoreErrorKind {
    /// What the request has done.
    #[must_use]
    pub fn outcome(&self) -> Outcome {
        match self {
            StoreErrorKind::TimedOut(_)
            | StoreErrorKind::Interrupted
            | StoreErrorKind::Cancelled
            | StoreErrorKind::ShutDown
            | StoreErrorKind::InProgress => Outcome::Unknown,
            _ => Outcome::NotApplied,
        }
    }

    /// Whether the same request may succeed later although nobody changes anything.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        matches!(
            self,
            StoreErrorKind::Throttled
                | StoreErrorKind::TimedOut(_)
                | StoreErrorKind::Interrupted
                | StoreErrorKind::Unreachable
                | StoreErrorKind::InProgress
                | StoreErrorKind::Credentials
                | StoreErrorKind::ClockSkew
                | StoreErrorKind::Deadline(_)
        )
    }
}

/// One operation that did not succeed: which, on what, why, and whether another attempt makes sense. Cheap to clone.
#[derive(Clone)]
pub struct StoreError(Arc<Inner>);

struct Inner {
    operation: Operation,
    bucket: String,
    object: String,
    kind: StoreErrorKind,
    retryable: bool,
    source: Option<Box<dyn StdError + Send + Sync>>,
}

impl StoreError {
    /// An error without a cause below it. `object` is empty for the bucket itself.
    #[must_use]
    pub fn new(operation: Operation, bucket: &str, object: &str, kind: StoreErrorKind) -> StoreError {
        StoreError(Arc::new(Inner {
            operation,
            bucket: bucket.to_owned(),
            object: object.to_owned(),
            retryable: kind.is_retryable(),
            kind,
            source: None,
        }))
    }

    /// An error of a kind, with its cause.
    #[must_use]
    pub fn caused(
        operation: Operation,
        bucket: &str,
        object: &str,
        kind: StoreErrorKind,
        source: impl Into<Box<dyn StdError + Send + Sync>>,
    ) -> StoreError {
        let retryable = kind.is_retryable();
        StoreError(Arc::new(Inner {
            operation,
            bucket: bucket.to_owned(),
            object: object.to_owned(),
            kind,
            retryable,
            source: Some(source.into()),
        }))
    }

    /// A failure of the store itself, with its cause.
    #[must_use]
    pub fn failed(
        operation: Operation,
        bucket: &str,
        object: &str,
        retryable: bool,
        source: impl Into<Box<dyn StdError + Send + Sync>>,
    ) -> StoreError {
        StoreError(Arc::new(Inner {
            operation,
            bucket: bucket.to_owned(),
            object: object.to_owned(),
            kind: StoreErrorKind::Failed,
            retryable,
            source: Some(source.into()),
        }))
    }

    /// What was asked for.
    #[must_use]
    pub fn operation(&self) -> Operation {
        self.0.operation
    }

    /// The URL of the bucket.
    #[must_use]
    pub fn bucket(&self) -> &str {
        &self.0.bucket
    }

    /// The name of the object, or the prefix listed; empty if the error is about the bucket.
    #[must_use]
    pub fn object(&self) -> &str {
        &self.0.object
    }

    /// What went wrong.
    #[must_use]
    pub fn kind(&self) -> &StoreErrorKind {
        &self.0.kind
    }

    /// Whether the same may succeed later although nobody changes anything. For a part or a commit that means: in a new
    /// upload under a new name.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        self.0.retryable
    }

    /// What the request has done.
    #[must_use]
    pub fn outcome(&self) -> Outcome {
        self.0.kind.outcome()
    }

    /// Whether the object does not exist.
    #[must_use]
    pub fn is_not_found(&self) -> bool {
        self.0.kind == StoreErrorKind::NotFound
    }
}

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Inner { operation, bucket, object, .. } = &*self.0;
        operation.fmt(f)?;
        if !object.is_empty() {
            write!(f, " of object {object:?}")?;
        }
        match (object.is_empty(), bucket.is_empty()) {
            (_, true) => {}
            (true, false) => write!(f, " of bucket {bucket}")?,
            (false, false) => write!(f, " in bucket {bucket}")?,
        }
        f.write_str(": ")?;
        self.fmt_reason(f)
    }
}

impl StoreError {
    /// What went wrong, without to what.
    fn fmt_reason(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Inner { operation, bucket, kind, source, .. } = &*self.0;
        write!(f, "{kind}")?;
        // The text of the cause belongs to the line: most callers print only that.
        let Some(source) = source else { return Ok(()) };
        f.write_str(": ")?;
        match source.downcast_ref::<StoreError>() {
            // An earlier attempt of the same: its place is said already.
            Some(error) if error.operation() == *operation && error.bucket() == bucket => error.fmt_reason(f),
            _ => write!(f, "{source}"),
        }
    }
}

impl fmt::Debug for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StoreError")
            .field("operation", &self.0.operation)
            .field("bucket", &self.0.bucket)
            .field("object", &self.0.object)
            .field("kind", &self.0.kind)
            .field("retryable", &self.0.retryable)
            .field("source", &self.0.source)
            .finish()
    }
}

impl StdError for StoreError {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.0.source.as_deref().map(|source| source as _)
    }
}

/// Whether `name` can be the name of an object: parts divided by `/`, none of them empty, `.` or `..`, no control
/// characters, no `\` or `#`, at most [`NAME_BYTES_MAX`] bytes and [`NAME_SEGMENT_BYTES_MAX`] a part.
///
/// # Errors
/// What is wrong with it, in words.
pub fn check_name(name: &str) -> Result<(), &'static str> {
    if name.is_empty() {
        return Err("it is empty");
    }
    if name.len() > NAME_BYTES_MAX {
        return Err("it is longer than 1024 bytes");
    }
    if name.starts_with('/') {
        return Err("it starts with '/'; names are relative to the bucket");
    }
    if name.chars().any(char::is_control) {
        return Err("it has a control character");
    }
    // '#' divides names from temporary suffixes in local buckets, '\' divides folders on other systems.
    if name.contains(['\\', '#']) {
        return Err("it has a '\\' or '#'");
    }
    for segment in name.split('/') {
        match segment {
            "" => return Err("it has an empty part between two '/' or ends with '/'"),
            "." | ".." => return Err("it has '.' or '..' for a part"),
            _ if segment.len() > NAME_SEGMENT_BYTES_MAX => {
                return Err("a part of it is longer than 240 bytes");
            }
            _ => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names() {
        for name in
            ["a", "a/b.c", "ä/ö ü", "a..b", "...", &"x".repeat(240), &vec!["x".repeat(240); 4].join("/")]
        {
            assert_eq!(check_name(name), Ok(()), "{name}");
        }
        let long = vec!["x".repeat(240); 5].join("/");
        let segment = "x".repeat(241);
        for name in [
            "", "/", "/a", "a/", "a//b", ".", "..", "a/..", "../a", "a/./b", "a\nb", "a\0", "a\\b", "a#1",
            &long, &segment,
        ] {
            assert!(check_name(name).is_err(), "{name:?}");
        }
    }

    #[test]
    fn an_error_says_what_to_whom_and_why() {
        let error = StoreError::failed(
            Operation::Put,
            "file:///bucket",
            "a/b",
            true,
            std::io::Error::other("no space left on device"),
        );
        assert_eq!(
            error.to_string(),
            "put of object \"a/b\" in bucket file:///bucket: the store failed: no space left on device"
        );
        assert!(error.is_retryable());
        assert!(StdError::source(&error).is_some());
        let late = StoreErrorKind::Deadline(Duration::from_secs(30));
        let late = StoreError::caused(Operation::Put, "file:///bucket", "a/b", late, error);
        assert_eq!(
            late.to_string(),
            "put of object \"a/b\" in bucket file:///bucket: the object was not complete within 30s: the store \
             failed: no space left on device"
        );
        let error = StoreError::new(Operation::Get, "memory://", "x", StoreErrorKind::NotFound);
        assert!(error.is_not_found() && !error.is_retryable());
        let error = StoreError::new(Operation::Put, "", "x", StoreErrorKind::Aborted);
        assert_eq!(error.to_string(), "put of object \"x\": the upload was aborted");
    }
}
