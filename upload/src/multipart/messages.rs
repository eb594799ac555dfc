//! What a machine is told, what it wants done, and what comes of it. What becomes of it is decided in the other files.
#![forbid(unsafe_code)]

use std::ops::Range;
use std::time::{Duration, Instant};

use crate::bucket::BucketIndex;
use crate::store::{EntityTag, Lane, ListedObject, ListedPart, StoreError, UploadId, UploadedPart};

/// Names one request of one object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AttemptId(pub u64);

/// What the machine is told.
#[derive(Clone, Debug)]
pub enum Event {
    /// The next chunk of the object is there, with this many bytes. Chunks are numbered from 0; their sizes keep to the
    /// capability rows (see [`Chunker`](crate::chunk::Chunker)).
    Chunk {
        /// Its length in bytes.
        bytes: u64,
        /// Whether no other follows. An object of one chunk goes as one PUT.
        last: bool,
    },
    /// A persist waits for the object: what is late is raced from here on.
    Wanted {
        /// When the object fails if it is not committed: the earliest one told of counts.
        deadline: Option<Instant>,
    },
    /// A request ended.
    Ended {
        /// Which.
        attempt: AttemptId,
        /// How. After a [`Action::Cancel`]: [`Cancelled`](crate::store::StoreErrorKind::Cancelled), or what came first.
        outcome: Result<Answer, StoreError>,
    },
    /// So many bytes of a request's body are on their way for all that is known: acknowledged by the other side, or taken
    /// by the connection ([`Wire::took`](crate::Wire::took)). Acted upon at the next other event.
    Progress {
        /// Which.
        attempt: AttemptId,
        /// In bytes.
        acknowledged: u64,
    },
    /// Time has passed, or connections have become free.
    Tick,
    /// The object is not wanted any more.
    Abort,
}

/// What a request brought.
#[derive(Clone, Debug)]
pub enum Answer {
    /// To [`Request::Put`], [`Request::Part`] and [`Request::Complete`].
    Tag(EntityTag),
    /// To [`Request::Create`].
    Created(UploadId),
    /// To [`Request::ListParts`].
    Parts(Vec<ListedPart>),
    /// To [`Request::Head`].
    Object(ListedObject),
    /// To [`Request::Abort`] and [`Request::Delete`].
    Done,
}

/// A request to one bucket about one object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Request {
    /// The concatenation of these chunks as a whole object.
    Put {
        /// Their numbers.
        chunks: Range<u32>,
    },
    /// An upload in parts.
    Create,
    /// One chunk as a part.
    Part {
        /// The upload.
        upload: UploadId,
        /// The part's number, from 1.
        number: u32,
        /// The chunk.
        chunk: u32,
    },
    /// The commit.
    Complete {
        /// The upload.
        upload: UploadId,
        /// Its parts.
        parts: Vec<UploadedPart>,
    },
    /// What the store has of the upload.
    ListParts {
        /// The upload.
        upload: UploadId,
    },
    /// The upload's end without an object.
    Abort {
        /// The upload.
        upload: UploadId,
    },
    /// Whether the object is there, and its size.
    Head,
    /// The object's end.
    Delete,
}

/// What is to be done.
#[derive(Clone, Debug)]
pub enum Action {
    /// Send a request. Its end is told by [`Event::Ended`], after `timeout` at the latest
    /// ([`TimedOut`](crate::store::StoreErrorKind::TimedOut)).
    Start {
        /// Its name from here on.
        attempt: AttemptId,
        /// Where to.
        bucket: BucketIndex,
        /// The name of the object or side object.
        name: String,
        /// What.
        request: Request,
        /// On which connections.
        lane: Lane,
        /// How long it may take.
        timeout: Duration,
    },
    /// Give a request up: drop it and its connection. It still ends, by [`Event::Ended`].
    Cancel {
        /// Which.
        attempt: AttemptId,
    },
    /// The connection that this request used, which has ended, is slow: use it no more, if that can be told.
    Retire {
        /// Which.
        attempt: AttemptId,
    },
    /// The chunk is at its place, as far as is known before the commit.
    Stored {
        /// Which.
        chunk: u32,
    },
    /// The bytes of the chunk will not be sent again.
    Release {
        /// Which.
        chunk: u32,
    },
    /// The object's outcome. Said once.
    Finished(Result<Placement, StoreError>),
    /// Nothing of the object is under way any more. Said once, after `Finished`.
    Settled {
        /// Whether something beside the placement might be left in the buckets, under names that start with the object's.
        leftovers: bool,
    },
}

/// Where the bytes of a finished object are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// The length of the object in bytes: the sum over its pieces.
    pub bytes: u64,
    /// Its pieces in order: one, the object itself, unless chunks were won by side objects.
    pub pieces: Vec<Piece>,
}

/// A run of an object's bytes in one object of a bucket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The bucket.
    pub bucket: BucketIndex,
    /// The name of the object that holds it.
    pub name: String,
    /// Where it starts there, in bytes.
    pub offset: u64,
    /// Its length in bytes.
    pub bytes: u64,
}
