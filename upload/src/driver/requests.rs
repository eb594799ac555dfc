//! Requests that stand alone: reads, listings, deletions, and the sweep of what an upload may have left. They are tried
//! again after a failure that may pass, within a number of attempts and a deadline.
//!
//! The time limit of an attempt follows its size and what was seen of the bucket, and doubles with each attempt that it
//! ended, so that a slow link is not mistaken for a dead one for ever. On a driver without threads the pauses between
//! attempts are left out: whoever waits for the answer may be the one that moves the time.
#![forbid(unsafe_code)]

use std::future::Future;
use std::mem;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;

use super::answer::Answer;
use super::attempt::Cancel;
use super::{Core, Driver, What};
use crate::bucket::BucketIndex;
use crate::store::{
    BoxFuture, Lane, ListedObject, ListedUpload, Marker, Operation, Store, StoreError, StoreErrorKind,
    UploadId, UploadRef, Watch, every_page,
};

/// The least time limit of an attempt: a request in a busy server's queue is not a dead one.
const LIMIT_MIN: Duration = Duration::from_secs(10);

/// A limit is so many times what is expected.
const LIMIT_FACTOR: f64 = 8.0;

/// Transfers of at least so many bytes tell a rate, others the time of service.
const RATE_BYTES_MIN: u64 = 1 << 20;

/// The weight of the newest observation.
const WEIGHT: f64 = 0.3;

impl Driver {
    /// Reads a range of an object, see [`Store::get`], with retries.
    ///
    /// # Panics
    /// If the driver has no such bucket; so do the others here.
    pub fn get(
        &self,
        bucket: BucketIndex,
        name: &str,
        range: Range<u64>,
        done: impl FnOnce(Result<Bytes, StoreError>) + Send + 'static,
    ) {
        let bytes = range.end.saturating_sub(range.start);
        self.ask(bucket, Operation::Get, name, bytes, done, move |store, name| {
            let range = range.clone();
            Box::pin(async move { whole(store.get(&name, range).await?, bytes, &*store, &name) })
        });
    }

    /// As [`get`](Self::get), with a new watch for each attempt, see [`Store::get_watched`]; gives back that of the last.
    pub fn get_watched<W: Watch + 'static>(
        &self,
        bucket: BucketIndex,
        name: &str,
        range: Range<u64>,
        watch: impl Fn() -> W + Send + 'static,
        done: impl FnOnce(Result<(Bytes, W), StoreError>) + Send + 'static,
    ) {
        let bytes = range.end.saturating_sub(range.start);
        self.ask(bucket, Operation::Get, name, bytes, done, move |store, name| {
            let (range, mut watch) = (range.clone(), watch());
            Box::pin(async move {
                let found = store.get_watched(&name, range, &mut watch).await?;
                Ok((whole(found, bytes, &*store, &name)?, watch))
            })
        });
    }

    /// What the bucket knows of an object, see [`Store::head`], with retries.
    pub fn head(
        &self,
        bucket: BucketIndex,
        name: &str,
        done: impl FnOnce(Result<ListedObject, StoreError>) + Send + 'static,
    ) {
        self.ask(bucket, Operation::Head, name, 0, done, |store, name| {
            Box::pin(async move { store.head(&name).await })
        });
    }

    /// Deletes an object, see [`Store::delete`], with retries.
    pub fn delete(
        &self,
        bucket: BucketIndex,
        name: &str,
        done: impl FnOnce(Result<(), StoreError>) + Send + 'static,
    ) {
        self.ask(bucket, Operation::Delete, name, 0, done, delete);
    }

    /// The objects whose names start with `prefix`, see [`Store::list`], with retries.
    pub fn list(
        &self,
        bucket: BucketIndex,
        prefix: &str,
        done: impl FnOnce(Result<Vec<ListedObject>, StoreError>) + Send + 'static,
    ) {
        self.run(bucket, Operation::List, prefix, done, move |core, prefix| async move {
            list(&core, bucket, &prefix).await
        });
    }

    /// The uploads neither complete nor aborted whose names start with `prefix`, see [`Store::list_uploads`], with
    /// retries; none where the bucket cannot tell.
    pub fn list_uploads(
        &self,
        bucket: BucketIndex,
        prefix: &str,
        done: impl FnOnce(Result<Vec<ListedUpload>, StoreError>) + Send + 'static,
    ) {
        if !self.core.store(bucket).capabilities().list_uploads {
            return done(Ok(Vec::new()));
        }
        self.run(bucket, Operation::ListUploads, prefix, done, move |core, prefix| async move {
            list_uploads(&core, bucket, &prefix).await
        });
    }

    /// Gives an upload up, see [`Store::abort`], with retries.
    pub fn abort(
        &self,
        bucket: BucketIndex,
        name: &str,
        upload: UploadId,
        done: impl FnOnce(Result<(), StoreError>) + Send + 'static,
    ) {
        self.ask(bucket, Operation::Abort, name, 0, done, abort(upload));
    }

    /// Removes what the writing of the object `name` may have left, in every bucket: uploads of it and of its side
    /// objects, and these objects themselves but those whose names are in `keep`, whatever the bucket: no two attempts
    /// share a name, and a bucket may be known by several URLs. Its side objects' names are its own, a dot, and more. What
    /// cannot be removed does not keep the rest; the first failure is the outcome.
    ///
    /// Nobody may be writing the object.
    pub fn sweep(
        &self,
        name: &str,
        keep: &[String],
        done: impl FnOnce(Result<(), StoreError>) + Send + 'static,
    ) {
        let gather = Arc::new(Gather {
            outcome: Mutex::new(Ok(())),
            swept: AtomicUsize::new(0),
            buckets: self.core.stores.len(),
            answer: Some(self.core.answer(BucketIndex(0), Operation::List, name, done)),
        });
        for index in 0..self.core.stores.len() {
            let bucket = BucketIndex(index);
            let kept = keep.to_vec();
            let core = Arc::clone(&self.core);
            let gather = Arc::clone(&gather);
            let name = name.to_owned();
            self.core.executor.spawn(async move {
                let outcome = sweep_bucket(&core, bucket, &name, &kept).await;
                gather.swept(outcome);
            });
        }
        drop(gather);
        self.core.executor.run();
    }

    /// Runs one request that stands alone.
    fn ask<T: Send + 'static>(
        &self,
        bucket: BucketIndex,
        operation: Operation,
        name: &str,
        bytes: u64,
        done: impl FnOnce(Result<T, StoreError>) + Send + 'static,
        request: impl Fn(Arc<dyn Store>, String) -> BoxFuture<'static, Result<T, StoreError>> + Send + 'static,
    ) {
        self.run(bucket, operation, name, done, move |core, name| async move {
            ask(&core, What { bucket, operation, name: &name, bytes }, request).await
        });
    }

    /// Runs a task that ends with an answer.
    fn run<T: Send + 'static, F: Future<Output = Result<T, StoreError>> + Send>(
        &self,
        bucket: BucketIndex,
        operation: Operation,
        name: &str,
        done: impl FnOnce(Result<T, StoreError>) + Send + 'static,
        task: impl FnOnce(Arc<Core>, String) -> F + Send + 'static,
    ) {
        let answer = self.core.answer(bucket, operation, name, done);
        let core = Arc::clone(&self.core);
        let name = name.to_owned();
        self.core.executor.spawn(async move { answer.give(task(core, name).await) });
        self.core.executor.run();
    }
}

pub(super) async fn ask<T>(
    core: &Core,
    what: What<'_>,
    request: impl Fn(Arc<dyn Store>, String) -> BoxFuture<'static, Result<T, StoreError>>,
) -> Result<T, StoreError> {
    let hedging = &core.options.hedging;
    let deadline = core.timers.after(core.options.object_timeout);
    let mut pause = hedging.backoff_start;
    let mut limit = core.observed.limit(what.bucket, what.bytes);
    let mut attempts = 0;
    loop {
        let left = deadline.saturating_duration_since(core.timers.now());
        let store = Arc::clone(core.store(what.bucket));
        let started = core.timers.now();
        let future = request(store, what.name.to_owned());
        let outcome = core.attempt(what, Lane::Primary, limit.min(left), Cancel::default(), future).await;
        attempts += 1;
        let took = core.timers.now().saturating_duration_since(started);
        let error = match outcome {
            Ok(value) => {
                // What a listing takes says nothing of other requests.
                if !matches!(what.operation, Operation::List | Operation::ListUploads) {
                    core.observed.ended(what.bucket, what.bytes, took);
                }
                return Ok(value);
            }
            Err(error) => error,
        };
        let attempts_max = match error.kind() {
            // The store has fetched new credentials or corrected its clock by now, or it cannot.
            StoreErrorKind::Credentials | StoreErrorKind::ClockSkew => 2,
            _ => core.options.request_attempts,
        };
        if !error.is_retryable() || attempts >= attempts_max {
            return Err(error);
        }
        if let StoreErrorKind::TimedOut(_) = error.kind() {
            core.observed.was_slower(what.bucket, what.bytes, took);
            limit = limit.saturating_mul(2);
        }
        if !core.executor.is_inline() {
            core.timers.sleep_until(core.timers.after(pause.mul_f64(0.5 + core.random()))).await;
        }
        pause = hedging.backoff_max.min(pause * 2);
        if core.timers.now() >= deadline {
            return Err(error);
        }
        tracing::debug!(%error, attempts, "asking again");
        core.retries(what.bucket, what.operation);
    }
}

/// What a store says is a range of so many bytes.
fn whole(found: Bytes, bytes: u64, store: &dyn Store, name: &str) -> Result<Bytes, StoreError> {
    if found.len() as u64 == bytes {
        return Ok(found);
    }
    let cause = format!("{} of {bytes} bytes came", found.len());
    Err(StoreError::caused(Operation::Get, store.url(), name, StoreErrorKind::Interrupted, cause))
}

fn delete(store: Arc<dyn Store>, name: String) -> BoxFuture<'static, Result<(), StoreError>> {
    Box::pin(async move { store.delete(&name).await })
}

/// A listing. Each page has attempts and time limits of its own: how many there are is not known.
async fn list(core: &Core, bucket: BucketIndex, prefix: &str) -> Result<Vec<ListedObject>, StoreError> {
    let what = What::control(bucket, Operation::List, prefix);
    let page = |from: Option<Marker>| {
        ask(core, what, move |store, prefix| {
            let from = from.clone();
            Box::pin(async move { store.list_page(&prefix, from.as_ref()).await })
        })
    };
    let mut found = every_page(|| core.error(what, StoreErrorKind::Interrupted), page).await?;
    found.sort_unstable_by(|a, b| a.name.cmp(&b.name));
    Ok(found)
}

/// As [`list`], of uploads.
async fn list_uploads(
    core: &Core,
    bucket: BucketIndex,
    prefix: &str,
) -> Result<Vec<ListedUpload>, StoreError> {
    let what = What::control(bucket, Operation::ListUploads, prefix);
    let page = |from: Option<Marker>| {
        ask(core, what, move |store, prefix| {
            let from = from.clone();
            Box::pin(async move { store.list_uploads_page(&prefix, from.as_ref()).await })
        })
    };
    let mut found = every_page(|| core.error(what, StoreErrorKind::Interrupted), page).await?;
    found.sort_unstable_by(|a, b| (&a.name, &a.id).cmp(&(&b.name, &b.id)));
    Ok(found)
}

fn abort(upload: UploadId) -> impl Fn(Arc<dyn Store>, String) -> BoxFuture<'static, Result<(), StoreError>> {
    move |store, name| {
        let id = upload.clone();
        Box::pin(async move { store.abort(UploadRef { name: &name, id: &id }).await })
    }
}

/// Deletes an object in the background.
pub(super) async fn remove(core: &Core, bucket: BucketIndex, name: &str) -> Result<(), StoreError> {
    ask(core, What::control(bucket, Operation::Delete, name), delete).await
}

/// What [`Driver::sweep`] does in one bucket. Uploads go first: one that was committed late is then in the listing.
async fn sweep_bucket(
    core: &Core,
    bucket: BucketIndex,
    object: &str,
    kept: &[String],
) -> Result<(), StoreError> {
    let mut failure = None;
    let of_object =
        |name: &str| name.strip_prefix(object).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'));
    if core.store(bucket).capabilities().list_uploads {
        match list_uploads(core, bucket, object).await {
            Ok(uploads) => {
                for upload in uploads.iter().filter(|upload| of_object(&upload.name)) {
                    let outcome = ask(
                        core,
                        What::control(bucket, Operation::Abort, &upload.name),
                        abort(upload.id.clone()),
                    )
                    .await;
                    failure = failure.or(outcome.err());
                }
            }
            Err(error) => failure = Some(error),
        }
    }
    match list(core, bucket, object).await {
        Ok(objects) => {
            for found in objects.iter().filter(|found| of_object(&found.name) && !kept.contains(&found.name))
            {
                failure = failure.or(remove(core, bucket, &found.name).await.err());
            }
        }
        Err(error) => failure = failure.or(Some(error)),
    }
    failure.map_or(Ok(()), Err)
}

/// The one answer to the tasks of a sweep, given when the last of them is gone.
struct Gather {
    outcome: Mutex<Result<(), StoreError>>,
    swept: AtomicUsize,
    buckets: usize,
    answer: Option<Answer<Result<(), StoreError>>>,
}

impl Gather {
    fn swept(&self, outcome: Result<(), StoreError>) {
        let mut all = self.outcome.lock().unwrap_or_else(PoisonError::into_inner);
        if all.is_ok() {
            *all = outcome;
        }
        self.swept.fetch_add(1, Relaxed);
    }
}

impl Drop for Gather {
    fn drop(&mut self) {
        let outcome = self.outcome.get_mut().unwrap_or_else(PoisonError::into_inner);
        let outcome = mem::replace(outcome, Ok(()));
        // With a task that was cut off the answer says so by its own drop.
        if (outcome.is_err() || *self.swept.get_mut() == self.buckets)
            && let Some(answer) = self.answer.take()
        {
            answer.give(outcome);
        }
    }
}

/// What was seen of the buckets by requests that stand alone.
#[derive(Debug)]
pub(super) struct Observed(Mutex<Vec<Speed>>);

#[derive(Clone, Copy, Debug)]
struct Speed {
    service_seconds: f64,
    bytes_per_second: f64,
}

impl Observed {
    pub(super) fn new(buckets: usize) -> Observed {
        // Slow guesses: they only make the first limits longer.
        Observed(Mutex::new(vec![Speed { service_seconds: 0.1, bytes_per_second: 8e6 }; buckets]))
    }

    /// How long a request may take.
    pub(super) fn limit(&self, bucket: BucketIndex, bytes: u64) -> Duration {
        let speed = self.lock()[bucket.0];
        let expected = speed.service_seconds + bytes as f64 / speed.bytes_per_second;
        Duration::try_from_secs_f64(LIMIT_FACTOR * expected)
            .map_or(Duration::MAX, |limit| limit.max(LIMIT_MIN))
    }

    /// A request succeeded.
    fn ended(&self, bucket: BucketIndex, bytes: u64, took: Duration) {
        let speed = &mut self.lock()[bucket.0];
        // Virtual time may stand still.
        let seconds = took.as_secs_f64().max(1e-6);
        if bytes >= RATE_BYTES_MIN {
            speed.bytes_per_second += WEIGHT * (bytes as f64 / seconds - speed.bytes_per_second);
        } else {
            speed.service_seconds += WEIGHT * (seconds - speed.service_seconds);
        }
    }

    /// A request was given up.
    fn was_slower(&self, bucket: BucketIndex, bytes: u64, took: Duration) {
        let speed = &mut self.lock()[bucket.0];
        if bytes >= RATE_BYTES_MIN {
            speed.bytes_per_second = speed.bytes_per_second.min(bytes as f64 / took.as_secs_f64().max(1e-6));
        }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Speed>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
