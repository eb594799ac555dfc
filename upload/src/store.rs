//! The seam to a bucket: named objects, written once in parts, read by range.
//!
//! What an object holds, when one is begun and when one may be deleted is decided elsewhere. Time limits, retries and
//! the choice of a bucket do not live here either: an implementation makes one attempt and says how it ended.
#![forbid(unsafe_code)]

use std::error::Error as StdError;
use std::fmt;
use std::future::Future;
use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;

use bytes::Bytes;

/// A boxed future that may move between threads.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// The longest name of an object in bytes, the least of the common stores.
pub const NAME_BYTES_MAX: usize = 1024;

/// The longest part of a name between two `/`, in bytes: a local file name, with room for a temporary suffix.
pub const NAME_SEGMENT_BYTES_MAX: usize = 240;

/// One bucket. Shared between threads; every operation is one attempt.
///
/// Contract, checked by one suite for every implementation:
/// 1. Nothing can be seen under a name before [`ObjectSink::complete`] is called for it: an object is there whole or
///    not at all.
/// 2. `Ok` from `complete` means that the object is committed with exactly the bytes put, durable as far as the store can
///    promise it, and that its size was asked for after the commit and found right. After any other outcome the object
///    may or may not exist, and nothing may be claimed of it: delete it, or look at it again.
/// 3. [`get`](Store::get) returns every byte of the range or an error, never fewer bytes.
/// 4. [`delete`](Store::delete) of what does not exist succeeds; `Ok` means that it is gone for good.
/// 5. Names are checked before anything is done ([`check_name`]). A name is used for one upload only: the caller makes it
///    unique. A name must not be a folder of another one.
pub trait Store: fmt::Debug + Send + Sync + 'static {
    /// Begins an object. Visible to nobody until it is complete.
    ///
    /// # Errors
    /// A refused name, or whatever the store says.
    fn begin<'a>(&'a self, name: &'a str) -> BoxFuture<'a, Result<Box<dyn ObjectSink>, StoreError>>;

    /// Reads a range of bytes: all of it, or an error.
    ///
    /// # Errors
    /// [`NotFound`](StoreErrorKind::NotFound), [`OutOfRange`](StoreErrorKind::OutOfRange) when the object ends before
    /// the range does, or whatever the store says. Nothing is allocated for a range that the object does not have.
    fn get<'a>(&'a self, name: &'a str, range: Range<u64>) -> BoxFuture<'a, Result<Bytes, StoreError>>;

    /// The size of a complete object in bytes.
    ///
    /// # Errors
    /// [`NotFound`](StoreErrorKind::NotFound), or whatever the store says.
    fn size<'a>(&'a self, name: &'a str) -> BoxFuture<'a, Result<u64, StoreError>>;

    /// Deletes an object, and what an upload of this name that never ended has left behind, as far as the store
    /// allows to find it. What does not exist is deleted already.
    ///
    /// # Errors
    /// Whatever the store says; the object may be gone or not.
    fn delete<'a>(&'a self, name: &'a str) -> BoxFuture<'a, Result<(), StoreError>>;

    /// All complete objects whose names start with `prefix` (a plain string, may be empty), with their sizes in bytes,
    /// sorted by name.
    ///
    /// # Errors
    /// Whatever the store says.
    fn list<'a>(&'a self, prefix: &'a str) -> BoxFuture<'a, Result<Vec<(String, u64)>, StoreError>>;

    /// The URL of the bucket, as it stands in handles and errors. Opening it again gives the same bucket.
    fn url(&self) -> &str;
}

/// An object being written. Dropping it without [`complete`](ObjectSink::complete) or [`abort`](ObjectSink::abort) leaves
/// the object invisible, and its leftovers to [`Store::delete`].
pub trait ObjectSink: Send {
    /// Adds a part: the concatenation of `part`, without copying where the store allows. One at a time, in order.
    ///
    /// # Errors
    /// Whatever the store says. The upload has then failed for good: all that is left is to abort it. The same holds
    /// if the future is dropped before it is ready.
    fn put(&mut self, part: Vec<Bytes>) -> BoxFuture<'_, Result<(), StoreError>>;

    /// Commits the object, then asks for its size and compares; returns the size in bytes.
    ///
    /// # Errors
    /// [`Failed`](StoreErrorKind::Failed), [`WrongSize`](StoreErrorKind::WrongSize), or
    /// [`Latched`](StoreErrorKind::Latched) when a part had failed. The object may exist; it must not be relied on.
    fn complete(self: Box<Self>) -> BoxFuture<'static, Result<u64, StoreError>>;

    /// Gives the object up and removes what was written.
    ///
    /// # Errors
    /// Whatever the store says; [`Store::delete`] may be used to try again.
    fn abort(self: Box<Self>) -> BoxFuture<'static, Result<(), StoreError>>;
}

/// What was asked of a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Operation {
    /// Opening the bucket.
    Open,
    /// [`Store::begin`].
    Begin,
    /// [`ObjectSink::put`].
    Put,
    /// [`ObjectSink::complete`].
    Complete,
    /// [`ObjectSink::abort`].
    Abort,
    /// [`Store::get`].
    Get,
    /// [`Store::size`].
    Size,
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
            Operation::Begin => "begin",
            Operation::Put => "put",
            Operation::Complete => "complete",
            Operation::Abort => "abort",
            Operation::Get => "get",
            Operation::Size => "size",
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
    /// The store failed; the source of the error says how.
    #[error("the store failed")]
    Failed,
    /// An earlier operation on this upload failed.
    #[error("an earlier operation of this upload failed; begin a new one")]
    Latched,
    /// The upload was aborted by its owner.
    #[error("the upload was aborted")]
    Aborted,
    /// The driver was shut down before the outcome was known.
    #[error(
        "uploads were shut down before the outcome was known; look at the bucket before relying on either"
    )]
    ShutDown,
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
    /// An error without a cause below it, that no further attempt will change. `object` is empty for the bucket itself.
    #[must_use]
    pub fn new(operation: Operation, bucket: &str, object: &str, kind: StoreErrorKind) -> StoreError {
        StoreError(Arc::new(Inner {
            operation,
            bucket: bucket.to_owned(),
            object: object.to_owned(),
            kind,
            retryable: false,
            source: None,
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

    /// Whether the object does not exist.
    #[must_use]
    pub fn is_not_found(&self) -> bool {
        self.0.kind == StoreErrorKind::NotFound
    }
}

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Inner { operation, bucket, object, kind, source, .. } = &*self.0;
        if object.is_empty() {
            write!(f, "{operation} of bucket {bucket}: ")?;
        } else {
            write!(f, "{operation} of object {object:?} in bucket {bucket}: ")?;
        }
        match source {
            // The text of the cause belongs to the line: most callers print only that.
            Some(source) => write!(f, "{kind}: {source}"),
            None => kind.fmt(f),
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
        let error = StoreError::new(Operation::Get, "memory://", "x", StoreErrorKind::NotFound);
        assert!(error.is_not_found() && !error.is_retryable());
    }
}
