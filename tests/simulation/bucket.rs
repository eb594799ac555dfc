//! The simulated buckets: as a process sees them that may be dead since a moment ago, and as they were at some time.

use std::collections::BTreeMap;
use std::fmt;
use std::future::poll_fn;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::task::{Poll, Waker};

use bytes::Bytes;
use tidelog_io::sim::{SimRng, SimWorld};
use tidelog_upload::sim::SimStore;
use tidelog_upload::{
    Body, BoxFuture, Capabilities, EntityTag, Lane, ListedObject, ListedPart, ListedUpload, Operation, Store,
    StoreError, StoreErrorKind, UploadId, UploadRef, UploadedPart,
};

use crate::machine::Plant;

/// Lets commits wait, some of them, until time has passed.
#[derive(Default)]
pub struct Slow(Mutex<SlowState>);

#[derive(Default)]
struct SlowState {
    now: u64,
    /// Of a thousand commits, how many wait.
    per_mille: u16,
    random: Option<SimRng>,
    waiting: Vec<Waker>,
}

impl Slow {
    /// How long a commit may take.
    const MICROS_MAX: u64 = 3_000_000;

    pub fn set(&self, per_mille: u16, seed: u64) {
        let mut state = self.0.lock().unwrap();
        (state.per_mille, state.random) = (per_mille, Some(SimRng::new(seed)));
    }

    /// Whether a commit waits, or may.
    pub fn is_on(&self) -> bool {
        let state = self.0.lock().unwrap();
        state.per_mille > 0 || !state.waiting.is_empty()
    }

    /// Time has passed.
    pub fn pass(&self, now: u64) {
        let waiting = {
            let mut state = self.0.lock().unwrap();
            state.now = now;
            std::mem::take(&mut state.waiting)
        };
        waiting.into_iter().for_each(Waker::wake);
    }

    async fn wait(&self) {
        let until = {
            let SlowState { now, per_mille, random, .. } = &mut *self.0.lock().unwrap();
            let Some(random) = random else { return };
            if !random.chance(*per_mille) {
                return;
            }
            *now + random.below(Slow::MICROS_MAX)
        };
        poll_fn(|context| {
            let mut state = self.0.lock().unwrap();
            if state.per_mille == 0 || state.now >= until {
                return Poll::Ready(());
            }
            state.waiting.push(context.waker().clone());
            Poll::Pending
        })
        .await;
    }
}

/// A bucket. When a directory's scheduled crash has struck, the process does nothing more to it either.
#[derive(Clone)]
pub struct Bucket {
    pub store: SimStore,
    pub worlds: Vec<SimWorld>,
    pub plant: Option<Plant>,
    pub slow: Arc<Slow>,
    /// Tells what it is asked.
    pub verbose: bool,
}

impl Bucket {
    fn tell<T>(
        &self,
        operation: Operation,
        name: &str,
        outcome: Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        if self.verbose {
            let how = match &outcome {
                Ok(_) => "ok".to_owned(),
                Err(error) => format!("{:?}", error.kind()),
            };
            eprintln!("{:>9} {operation} {name} in {}: {how}", "", self.store.url());
        }
        outcome
    }

    fn look(&self) {
        if self.worlds.iter().any(SimWorld::is_down) {
            self.store.crash();
        }
    }

    /// What a bucket with a planted bug does to an object that it has just taken.
    fn spoil(&self, name: &str) {
        match self.plant {
            Some(Plant::LoseObject) => self.store.tamper(name, None),
            Some(Plant::RotObject) => {
                let mut bytes = self.store.objects()[name].to_vec();
                let at = bytes.len() / 3;
                bytes[at] ^= 4;
                self.store.tamper(name, Some(bytes.into()));
            }
            _ => {}
        }
    }
}

impl fmt::Debug for Bucket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.store.fmt(f)
    }
}

impl Store for Bucket {
    fn url(&self) -> &str {
        self.store.url()
    }

    fn capabilities(&self) -> &Capabilities {
        self.store.capabilities()
    }

    fn put<'a>(
        &'a self,
        name: &'a str,
        body: Body,
        lane: Lane,
    ) -> BoxFuture<'a, Result<EntityTag, StoreError>> {
        Box::pin(async move {
            self.slow.wait().await;
            self.look();
            let tag = self.tell(Operation::Put, name, self.store.put(name, body, lane).await)?;
            self.spoil(name);
            Ok(tag)
        })
    }

    fn create<'a>(&'a self, name: &'a str) -> BoxFuture<'a, Result<UploadId, StoreError>> {
        Box::pin(async move {
            self.look();
            self.tell(Operation::Create, name, self.store.create(name).await)
        })
    }

    fn put_part<'a>(
        &'a self,
        upload: UploadRef<'a>,
        number: u32,
        body: Body,
        lane: Lane,
    ) -> BoxFuture<'a, Result<EntityTag, StoreError>> {
        Box::pin(async move {
            self.look();
            let outcome = self.store.put_part(upload, number, body, lane).await;
            self.tell(Operation::PutPart, upload.name, outcome)
        })
    }

    fn list_parts<'a>(&'a self, upload: UploadRef<'a>) -> BoxFuture<'a, Result<Vec<ListedPart>, StoreError>> {
        self.look();
        self.store.list_parts(upload)
    }

    fn complete<'a>(
        &'a self,
        upload: UploadRef<'a>,
        parts: &'a [UploadedPart],
    ) -> BoxFuture<'a, Result<EntityTag, StoreError>> {
        Box::pin(async move {
            self.slow.wait().await;
            self.look();
            let outcome = self.store.complete(upload, parts).await;
            let tag = self.tell(Operation::Complete, upload.name, outcome)?;
            self.spoil(upload.name);
            Ok(tag)
        })
    }

    fn abort<'a>(&'a self, upload: UploadRef<'a>) -> BoxFuture<'a, Result<(), StoreError>> {
        Box::pin(async move {
            self.look();
            self.tell(Operation::Abort, upload.name, self.store.abort(upload).await)
        })
    }

    fn list_uploads<'a>(&'a self, prefix: &'a str) -> BoxFuture<'a, Result<Vec<ListedUpload>, StoreError>> {
        self.look();
        self.store.list_uploads(prefix)
    }

    fn get<'a>(&'a self, name: &'a str, range: Range<u64>) -> BoxFuture<'a, Result<Bytes, StoreError>> {
        self.look();
        self.store.get(name, range)
    }

    fn head<'a>(&'a self, name: &'a str) -> BoxFuture<'a, Result<ListedObject, StoreError>> {
        self.look();
        self.store.head(name)
    }

    fn delete<'a>(&'a self, name: &'a str) -> BoxFuture<'a, Result<(), StoreError>> {
        Box::pin(async move {
            self.look();
            let kept = self.store.objects().get(name).cloned();
            self.tell(Operation::Delete, name, self.store.delete(name).await)?;
            if self.plant == Some(Plant::KeepDeleted) && kept.is_some() {
                self.store.tamper(name, kept);
            }
            Ok(())
        })
    }

    fn list<'a>(&'a self, prefix: &'a str) -> BoxFuture<'a, Result<Vec<ListedObject>, StoreError>> {
        Box::pin(async move {
            self.look();
            self.tell(Operation::List, prefix, self.store.list(prefix).await)
        })
    }
}

/// What a bucket held at some time. Nothing can be changed in it.
#[derive(Clone, Debug)]
pub struct Contents {
    store: SimStore,
    objects: Arc<BTreeMap<String, Bytes>>,
}

impl Contents {
    pub fn of(store: &SimStore) -> Contents {
        Contents { store: store.clone(), objects: Arc::new(store.objects()) }
    }

    fn refused<'a, T: Send + 'a>(
        &'a self,
        operation: Operation,
        name: &'a str,
    ) -> BoxFuture<'a, Result<T, StoreError>> {
        let error = StoreError::new(operation, self.store.url(), name, StoreErrorKind::Unsupported);
        Box::pin(async move { Err(error) })
    }
}

impl Store for Contents {
    fn url(&self) -> &str {
        self.store.url()
    }

    fn capabilities(&self) -> &Capabilities {
        self.store.capabilities()
    }

    fn put<'a>(&'a self, name: &'a str, _: Body, _: Lane) -> BoxFuture<'a, Result<EntityTag, StoreError>> {
        self.refused(Operation::Put, name)
    }

    fn create<'a>(&'a self, name: &'a str) -> BoxFuture<'a, Result<UploadId, StoreError>> {
        self.refused(Operation::Create, name)
    }

    fn put_part<'a>(
        &'a self,
        upload: UploadRef<'a>,
        _: u32,
        _: Body,
        _: Lane,
    ) -> BoxFuture<'a, Result<EntityTag, StoreError>> {
        self.refused(Operation::PutPart, upload.name)
    }

    fn list_parts<'a>(&'a self, upload: UploadRef<'a>) -> BoxFuture<'a, Result<Vec<ListedPart>, StoreError>> {
        self.refused(Operation::ListParts, upload.name)
    }

    fn complete<'a>(
        &'a self,
        upload: UploadRef<'a>,
        _: &'a [UploadedPart],
    ) -> BoxFuture<'a, Result<EntityTag, StoreError>> {
        self.refused(Operation::Complete, upload.name)
    }

    fn abort<'a>(&'a self, upload: UploadRef<'a>) -> BoxFuture<'a, Result<(), StoreError>> {
        self.refused(Operation::Abort, upload.name)
    }

    fn list_uploads<'a>(&'a self, prefix: &'a str) -> BoxFuture<'a, Result<Vec<ListedUpload>, StoreError>> {
        self.refused(Operation::ListUploads, prefix)
    }

    fn get<'a>(&'a self, name: &'a str, range: Range<u64>) -> BoxFuture<'a, Result<Bytes, StoreError>> {
        let error = |kind| Err(StoreError::new(Operation::Get, self.store.url(), name, kind));
        let found = match self.objects.get(name) {
            None => error(StoreErrorKind::NotFound),
            Some(object) if range.start > range.end || range.end > object.len() as u64 => {
                let (Range { start, end }, size) = (range, object.len() as u64);
                error(StoreErrorKind::OutOfRange { start, end, size })
            }
            Some(object) => Ok(object.slice(range.start as usize..range.end as usize)),
        };
        Box::pin(async move { found })
    }

    fn head<'a>(&'a self, name: &'a str) -> BoxFuture<'a, Result<ListedObject, StoreError>> {
        self.refused(Operation::Head, name)
    }

    fn delete<'a>(&'a self, name: &'a str) -> BoxFuture<'a, Result<(), StoreError>> {
        self.refused(Operation::Delete, name)
    }

    fn list<'a>(&'a self, prefix: &'a str) -> BoxFuture<'a, Result<Vec<ListedObject>, StoreError>> {
        self.refused(Operation::List, prefix)
    }
}
