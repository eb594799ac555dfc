//! An object composed of bytes that are sent and of ranges of objects that its bucket has, which the server copies.
//!
//! A plain path beside [`ObjectUpload`](super::ObjectUpload), for who has time: one upload in one bucket, some requests at
//! once, each tried again after it failed, and none raced. Hedges are for who waits, and send bytes that are in memory; here
//! most are not.
//!
//! Invariants:
//! 1. All parts but the last have at least `part_bytes_min`: a range that follows fewer bytes gives its beginning to them.
//! 2. A part number is not sent again while an earlier attempt may live: the next attempt has the next number, where numbers
//!    may have gaps; elsewhere there is none.
//! 3. One Complete at a time. What is there afterwards decides, not what was answered: an object of the right size.
//! 4. No abort after a Complete was sent, unless it is known that it did nothing.
#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::mem;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::Duration;

use bytes::Bytes;

use super::attempt::Cancel;
use super::requests::ask;
use super::{Core, Driver, What};
use crate::bucket::BucketIndex;
use crate::pending::{Pending, channel};
use crate::store::{
    Body, Lane, Operation, Outcome, Parts, StoreError, StoreErrorKind, UploadId, UploadRef, UploadedPart,
};

/// Requests under way at once.
const REQUESTS_MAX: usize = 8;
/// A Complete may take longer than its size tells: the server puts the object together.
const COMPLETE_LIMIT_MIN: Duration = Duration::from_secs(60);

/// An object being composed, see [`Driver::compose`]. Dropped, it leaves its upload behind.
#[derive(Debug)]
pub struct Composition {
    core: Arc<Core>,
    bucket: BucketIndex,
    name: Arc<str>,
    id: Option<UploadId>,
    /// Whether it was asked for more often than once: the others may be there too.
    created_again: bool,
    /// Bytes that are in no part yet, fewer than a part has.
    held: Vec<Bytes>,
    held_bytes: u64,
    /// The least number of the next part.
    number: u32,
    under_way: VecDeque<(u64, Pending<Result<UploadedPart, StoreError>>)>,
    /// Bytes in memory that are being sent.
    sending_bytes: u64,
    parts: Vec<UploadedPart>,
    bytes: u64,
}

/// A composed object that is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Composed {
    /// Its length in bytes.
    pub bytes: u64,
    /// Whether an upload of its name may be left.
    pub leftovers: bool,
}

/// What a part is made of.
enum Content {
    Bytes(Body),
    Range(Arc<str>, Range<u64>),
}

impl Driver {
    /// An object to be composed in a bucket whose [capabilities](crate::Capabilities) say that parts can be copied. `name` must
    /// be unique for ever. Not for [inline](Driver::inline) drivers.
    ///
    /// # Panics
    /// If the driver has no such bucket.
    #[must_use = "an object is there once it is finished"]
    pub fn compose(&self, bucket: BucketIndex, name: &str) -> Composition {
        assert!(bucket.0 < self.core.stores.len(), "the driver has this bucket");
        Composition {
            core: Arc::clone(&self.core),
            bucket,
            name: name.into(),
            id: None,
            created_again: false,
            held: Vec::new(),
            held_bytes: 0,
            number: 1,
            under_way: VecDeque::new(),
            sending_bytes: 0,
            parts: Vec::new(),
            bytes: 0,
        }
    }

    /// Whether objects can be [composed](Driver::compose) in a bucket.
    #[must_use]
    pub fn composes(&self, bucket: BucketIndex) -> bool {
        let row = self.core.store(bucket).capabilities();
        row.copy_part && row.parts == Parts::Parallel && !row.equal_parts
    }
}

impl Composition {
    /// How many bytes are in it so far.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether it should be finished, as there are few part numbers left.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.number > self.core.store(self.bucket).capabilities().parts_max / 2
    }

    /// Appends bytes. Waits while as much is being sent as the driver's budget allows.
    ///
    /// # Errors
    /// A part that could not be sent. The object cannot be finished then.
    pub async fn put(&mut self, bytes: Bytes) -> Result<(), StoreError> {
        self.bytes += bytes.len() as u64;
        self.hold(bytes).await
    }

    /// Appends a range of the bytes of a complete object of the bucket.
    ///
    /// # Errors
    /// A part that could not be sent or copied, or bytes that could not be read. The object cannot be finished then.
    pub async fn copy(&mut self, from: &str, range: Range<u64>) -> Result<(), StoreError> {
        let row = self.core.store(self.bucket).capabilities();
        let (min, max) = (row.part_bytes_min, row.part_bytes_max);
        let Range { mut start, end } = range;
        self.bytes += end.saturating_sub(start);
        if self.held_bytes > 0 && self.held_bytes < min {
            let head = start..end.min(start + (min - self.held_bytes));
            start = head.end;
            let bytes = self.read(from, head).await?;
            self.hold(bytes).await?;
        }
        let from: Arc<str> = from.into();
        while end.saturating_sub(start) >= min.max(1) {
            self.flush().await?;
            let part = start..end.min(start.saturating_add(max));
            start = part.end;
            self.begin(0, Content::Range(Arc::clone(&from), part)).await?;
        }
        if start < end {
            let bytes = self.read(&from, start..end).await?;
            self.hold(bytes).await?;
        }
        Ok(())
    }

    /// Makes the object visible, and says how long it is.
    ///
    /// # Errors
    /// The object is not there, or that is not known: then its name has to be [swept](Driver::sweep).
    pub async fn finish(mut self) -> Result<Composed, StoreError> {
        if let Err(error) = self.send_rest().await {
            // The first error counts; what could not be aborted is found by its name.
            let _ = self.abort().await;
            return Err(error);
        }
        let id = self.id.clone().expect("a part was sent");
        let (resolver, completed) = channel();
        let (core, bucket, name) = (Arc::clone(&self.core), self.bucket, Arc::clone(&self.name));
        let answer = core.answer(bucket, Operation::Complete, &name, |outcome| resolver.resolve(outcome));
        let (parts, bytes) = (mem::take(&mut self.parts), self.bytes);
        self.core.executor.spawn(async move {
            answer.give(complete(&core, bucket, &name, id, parts, bytes).await);
        });
        match self.heard(Operation::Complete, completed).await? {
            Ok(()) => Ok(Composed { bytes, leftovers: self.created_again }),
            Err(refused) => {
                let _ = self.abort().await;
                Err(refused)
            }
        }
    }

    /// Gives it up: waits until no part is under way, and removes its upload.
    ///
    /// # Errors
    /// What the bucket says. Its name has to be [swept](Driver::sweep).
    pub async fn abort(mut self) -> Result<(), StoreError> {
        while let Some((_, pending)) = self.under_way.pop_front() {
            let _ = pending.await;
        }
        let Some(id) = self.id.take() else { return Ok(()) };
        let (resolver, aborted) = channel();
        let (core, bucket, name) = (Arc::clone(&self.core), self.bucket, Arc::clone(&self.name));
        let answer = core.answer(bucket, Operation::Abort, &name, |outcome| resolver.resolve(outcome));
        self.core.executor.spawn(async move {
            let what = What::control(bucket, Operation::Abort, &name);
            let outcome = ask(&core, what, |store, name| {
                let id = id.clone();
                Box::pin(async move { store.abort(UploadRef { name: &name, id: &id }).await })
            });
            answer.give(outcome.await);
        });
        self.heard(Operation::Abort, aborted).await
    }

    async fn send_rest(&mut self) -> Result<(), StoreError> {
        self.flush().await?;
        while !self.under_way.is_empty() {
            self.settle_first().await?;
        }
        if self.parts.is_empty() {
            // An object has one part at least, if an empty one.
            self.begin(0, Content::Bytes(Body::default())).await?;
            self.settle_first().await?;
        }
        Ok(())
    }

    /// Keeps bytes until there is a part of them.
    async fn hold(&mut self, bytes: Bytes) -> Result<(), StoreError> {
        let row = self.core.store(self.bucket).capabilities();
        let part_bytes = self.core.options.part_bytes.clamp(row.part_bytes_min, row.part_bytes_max).max(1);
        let mut bytes = bytes;
        while self.held_bytes + bytes.len() as u64 >= part_bytes {
            // At most what is there, so it fits.
            let rest = (part_bytes - self.held_bytes) as usize;
            let head = bytes.split_to(rest);
            self.held_bytes += head.len() as u64;
            self.held.push(head);
            self.flush().await?;
        }
        if !bytes.is_empty() {
            self.held_bytes += bytes.len() as u64;
            self.held.push(bytes);
        }
        Ok(())
    }

    /// Sends what is held as a part.
    async fn flush(&mut self) -> Result<(), StoreError> {
        if self.held_bytes == 0 {
            return Ok(());
        }
        let bytes = mem::take(&mut self.held_bytes);
        let body = Body::new(mem::take(&mut self.held));
        self.begin(bytes, Content::Bytes(body)).await
    }

    async fn begin(&mut self, sending_bytes: u64, content: Content) -> Result<(), StoreError> {
        let room = self.core.options.budget_bytes / 2;
        while self.under_way.len() >= REQUESTS_MAX
            || !self.under_way.is_empty() && self.sending_bytes + sending_bytes > room
        {
            self.settle_first().await?;
        }
        let id = self.create().await?;
        let row = self.core.store(self.bucket).capabilities();
        let (number, sparse) = (self.number, row.sparse);
        self.number += if sparse { self.core.options.request_attempts.max(1) } else { 1 };
        let (resolver, pending) = channel();
        let (core, bucket, name) = (Arc::clone(&self.core), self.bucket, Arc::clone(&self.name));
        let answer = core.answer(bucket, operation_of(&content), &name, |outcome| resolver.resolve(outcome));
        self.sending_bytes += sending_bytes;
        self.under_way.push_back((sending_bytes, pending));
        self.core.executor.spawn(async move {
            answer.give(send(&core, bucket, UploadRef { name: &name, id: &id }, number, &content).await);
        });
        Ok(())
    }

    /// Waits for the oldest part.
    async fn settle_first(&mut self) -> Result<(), StoreError> {
        let Some((bytes, pending)) = self.under_way.pop_front() else { return Ok(()) };
        self.sending_bytes -= bytes;
        let part = self.heard(Operation::PutPart, pending).await?;
        self.parts.push(part);
        Ok(())
    }

    async fn create(&mut self) -> Result<UploadId, StoreError> {
        if let Some(id) = &self.id {
            return Ok(id.clone());
        }
        let attempts = Arc::new(AtomicU32::new(0));
        let (resolver, created) = channel();
        let (core, bucket, name) = (Arc::clone(&self.core), self.bucket, Arc::clone(&self.name));
        let answer = core.answer(bucket, Operation::Create, &name, |outcome| resolver.resolve(outcome));
        let counter = Arc::clone(&attempts);
        self.core.executor.spawn(async move {
            let what = What::control(bucket, Operation::Create, &name);
            let outcome = ask(&core, what, |store, name| {
                counter.fetch_add(1, Relaxed);
                Box::pin(async move { store.create(&name).await })
            });
            answer.give(outcome.await);
        });
        let id = self.heard(Operation::Create, created).await?;
        self.created_again = attempts.load(Relaxed) > 1;
        self.id = Some(id.clone());
        Ok(id)
    }

    async fn read(&self, from: &str, range: Range<u64>) -> Result<Bytes, StoreError> {
        let bytes = range.end - range.start;
        let (resolver, read) = channel();
        let (core, bucket, from) = (Arc::clone(&self.core), self.bucket, from.to_owned());
        let answer = core.answer(bucket, Operation::Get, &from, |outcome| resolver.resolve(outcome));
        self.core.executor.spawn(async move {
            let what = What { bucket, operation: Operation::Get, name: &from, bytes };
            let outcome = ask(&core, what, |store, name| {
                let range = range.clone();
                Box::pin(async move { store.get(&name, range).await })
            });
            answer.give(outcome.await);
        });
        self.heard(Operation::Get, read).await
    }

    async fn heard<T>(
        &self,
        operation: Operation,
        pending: Pending<Result<T, StoreError>>,
    ) -> Result<T, StoreError> {
        pending.await.unwrap_or_else(|_| {
            let what = What::control(self.bucket, operation, &self.name);
            Err(self.core.error(what, StoreErrorKind::ShutDown))
        })
    }
}

fn operation_of(content: &Content) -> Operation {
    match content {
        Content::Bytes(_) => Operation::PutPart,
        Content::Range(..) => Operation::CopyPart,
    }
}

/// Makes a part, numbered `number` or a little higher.
async fn send(
    core: &Arc<Core>,
    bucket: BucketIndex,
    upload: UploadRef<'_>,
    number: u32,
    content: &Content,
) -> Result<UploadedPart, StoreError> {
    let sparse = core.store(bucket).capabilities().sparse;
    let operation = operation_of(content);
    let bytes = match content {
        Content::Bytes(body) => body.len(),
        Content::Range(_, range) => range.end - range.start,
    };
    let (mut number, mut attempts) = (number, 0);
    let mut pause = core.options.hedging.backoff_start;
    let mut limit = core.observed.limit(bucket, bytes);
    loop {
        let store = Arc::clone(core.store(bucket));
        let (name, id) = (upload.name.to_owned(), upload.id.clone());
        let what = What { bucket, operation, name: upload.name, bytes };
        let outcome = match content {
            Content::Bytes(body) => {
                let body = body.with_wire(Default::default());
                let future = async move {
                    store.put_part(UploadRef { name: &name, id: &id }, number, body, Lane::Primary).await
                };
                core.attempt(what, Lane::Primary, limit, Cancel::default(), Box::pin(future)).await
            }
            Content::Range(from, range) => {
                let (from, range) = (Arc::clone(from), range.clone());
                let future = async move {
                    store.copy_part(UploadRef { name: &name, id: &id }, number, &from, range).await
                };
                core.attempt(what, Lane::Primary, limit, Cancel::default(), Box::pin(future)).await
            }
        };
        attempts += 1;
        let error = match outcome {
            Ok(tag) => return Ok(UploadedPart { number, tag }),
            Err(error) => error,
        };
        let lives = error.outcome() == Outcome::Unknown;
        if !error.is_retryable() || attempts >= core.options.request_attempts || lives && !sparse {
            return Err(error);
        }
        if lives {
            number += 1;
            limit = limit.saturating_mul(2);
        }
        core.timers.sleep_until(core.timers.after(pause.mul_f64(0.5 + core.random()))).await;
        pause = core.options.hedging.backoff_max.min(pause * 2);
        core.retries(bucket, operation);
    }
}

/// Completes an upload, so that an object of so many bytes is there. The inner error says that nothing came of it, the outer
/// one that this is not known.
async fn complete(
    core: &Arc<Core>,
    bucket: BucketIndex,
    name: &str,
    id: UploadId,
    parts: Vec<UploadedPart>,
    bytes: u64,
) -> Result<Result<(), StoreError>, StoreError> {
    let parts = Arc::new(parts);
    let mut lives = false;
    let limit = core.observed.limit(bucket, 0).max(COMPLETE_LIMIT_MIN);
    let mut pause = core.options.hedging.backoff_start;
    let mut attempts = 0;
    loop {
        let store = Arc::clone(core.store(bucket));
        let (named, id, parts) = (name.to_owned(), id.clone(), Arc::clone(&parts));
        let future =
            async move { store.complete(UploadRef { name: &named, id: &id }, &parts).await.map(drop) };
        let what = What::control(bucket, Operation::Complete, name);
        let answer = core.attempt(what, Lane::Primary, limit, Cancel::default(), Box::pin(future)).await;
        attempts += 1;
        let what = What::control(bucket, Operation::Head, name);
        let found = ask(core, what, |store, name| Box::pin(async move { store.head(&name).await })).await;
        let error = match (found, answer) {
            (Ok(found), _) if found.bytes == bytes => return Ok(Ok(())),
            (Ok(found), _) => {
                let kind = StoreErrorKind::WrongSize { expected: bytes, found: found.bytes };
                return Err(core.error(what, kind));
            }
            (Err(missing), Ok(())) => return Err(missing),
            // Whether it took effect is not known.
            (Err(error), Err(_)) if !error.is_not_found() => return Err(error),
            (Err(_), Err(error)) => error,
        };
        lives |= error.outcome() == Outcome::Unknown;
        if !error.is_retryable() || attempts >= core.options.request_attempts {
            return if lives { Err(error) } else { Ok(Err(error)) };
        }
        core.timers.sleep_until(core.timers.after(pause.mul_f64(0.5 + core.random()))).await;
        pause = core.options.hedging.backoff_max.min(pause * 2);
        core.retries(bucket, Operation::Complete);
    }
}
