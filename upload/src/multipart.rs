//! The state machine of one object: how chunks of bytes become one committed object, or one with side objects.
//!
//! Pure: [`ObjectMachine::step`] takes an event and the time, and appends what is to be done. Who runs the requests, and
//! where the bytes are, is known to the driver; which bucket is healthy, when a request is late and whether it may be
//! raced to [`Policy`](crate::hedge::Policy). What the bytes mean is nobody's business here.
//!
//! Invariants:
//! 1. One winner per chunk; every other attempt is cancelled and settled before a Complete is sent.
//! 2. One Complete at a time; complete xor abort: no abort after a Complete was sent until its outcome is known.
//! 3. A part number is not sent again while an earlier attempt may live, unless the capability row allows it and a listing
//!    settles it.
//! 4. [`Action::Finished`] with `Ok` only for objects whose commit is proven.
//! 5. After [`Action::Settled`] nothing of the object is under way.
#![forbid(unsafe_code)]

use std::ops::Range;
use std::time::{Duration, Instant};

use crate::bucket::BucketIndex;
use crate::hedge::Policy;
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
    /// So many bytes of a request's body were acknowledged by the other side.
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
    /// Give a request up: drop it and its connection.
    Cancel {
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

/// One object being written. See the head of this file.
#[derive(Debug)]
pub struct ObjectMachine {
    name: String,
    bucket: BucketIndex,
    upload: Option<UploadId>,
    chunks: Vec<(u64, Option<EntityTag>, bool)>,
    last: bool,
    in_flight: Vec<(AttemptId, Request)>,
    attempts: u64,
    ended: bool,
}

impl ObjectMachine {
    /// An object of this name, that fails when it is not committed before `deadline`. Time counts from `now`.
    #[must_use]
    pub fn new(name: String, deadline: Option<Instant>, now: Instant, policy: &mut Policy) -> ObjectMachine {
        let _ = (deadline, now, policy);
        ObjectMachine {
            name,
            bucket: BucketIndex(0),
            upload: None,
            chunks: Vec::new(),
            last: false,
            in_flight: Vec::new(),
            attempts: 0,
            ended: false,
        }
    }

    /// Takes an event and appends what is to be done.
    pub fn step(&mut self, event: Event, now: Instant, policy: &mut Policy, actions: &mut Vec<Action>) {
        let _ = (now, policy);
        if self.ended {
            return;
        }
        match event {
            Event::Chunk { bytes, last } => {
                self.chunks.push((bytes, None, false));
                self.last = last;
                if last && self.chunks.len() == 1 {
                    self.start(Request::Put { chunks: 0..1 }, actions);
                } else if self.chunks.len() == 1 {
                    self.start(Request::Create, actions);
                }
            }
            Event::Ended { attempt, outcome } => {
                let Some(at) = self.in_flight.iter().position(|(id, _)| *id == attempt) else { return };
                let (_, request) = self.in_flight.remove(at);
                match (outcome, request) {
                    (Err(error), _) => return self.end(Err(error), actions),
                    (Ok(Answer::Created(id)), _) => self.upload = Some(id),
                    (Ok(Answer::Tag(tag)), Request::Part { chunk, .. }) => {
                        self.chunks[chunk as usize].1 = Some(tag);
                        actions.push(Action::Stored { chunk });
                        actions.push(Action::Release { chunk });
                    }
                    (Ok(_), _) => {
                        let bytes = self.chunks.iter().map(|chunk| chunk.0).sum();
                        let piece = Piece { bucket: self.bucket, name: self.name.clone(), offset: 0, bytes };
                        return self.end(Ok(Placement { bytes, pieces: vec![piece] }), actions);
                    }
                }
            }
            Event::Wanted { .. } | Event::Progress { .. } | Event::Tick | Event::Abort => {}
        }
        let Some(upload) = self.upload.clone() else { return };
        for chunk in 0..self.chunks.len() {
            if !self.chunks[chunk].2 {
                self.chunks[chunk].2 = true;
                let number = chunk as u32 + 1;
                let request = Request::Part { upload: upload.clone(), number, chunk: chunk as u32 };
                self.start(request, actions);
            }
        }
        if self.last && self.in_flight.is_empty() {
            let tags = self.chunks.iter().zip(1..);
            let parts = tags
                .filter_map(|(chunk, number)| Some(UploadedPart { number, tag: chunk.1.clone()? }))
                .collect();
            self.start(Request::Complete { upload, parts }, actions);
        }
    }

    /// When the next [`Event::Tick`] is due.
    #[must_use]
    pub fn deadline(&self) -> Option<Instant> {
        None
    }

    fn start(&mut self, request: Request, actions: &mut Vec<Action>) {
        let attempt = AttemptId(self.attempts);
        self.attempts += 1;
        self.in_flight.push((attempt, request.clone()));
        actions.push(Action::Start {
            attempt,
            bucket: self.bucket,
            name: self.name.clone(),
            request,
            lane: Lane::Primary,
            timeout: Duration::from_secs(10),
        });
    }

    fn end(&mut self, result: Result<Placement, StoreError>, actions: &mut Vec<Action>) {
        self.ended = true;
        actions.push(Action::Finished(result));
        actions.push(Action::Settled { leftovers: !self.in_flight.is_empty() });
    }
}
