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
use tidelog_upload::{BoxFuture, Lane, Operation, Store, StoreError, StoreErrorKind};

use crate::hooked::{Hook, Hooked};
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

impl Hook for Bucket {
    fn inner(&self) -> &dyn Store {
        &self.store
    }

    fn pass<'a, T: Send + 'a>(
        &'a self,
        operation: Operation,
        name: &'a str,
        _: Lane,
        request: BoxFuture<'a, Result<T, StoreError>>,
    ) -> BoxFuture<'a, Result<T, StoreError>> {
        Box::pin(async move {
            let commits = matches!(operation, Operation::Put | Operation::Complete);
            if commits {
                self.slow.wait().await;
            }
            self.look();
            let keeps = operation == Operation::Delete && self.plant == Some(Plant::KeepDeleted);
            let kept = if keeps { self.store.objects().remove(name) } else { None };
            let outcome = self.tell(operation, name, request.await)?;
            if commits {
                self.spoil(name);
            }
            if kept.is_some() {
                self.store.tamper(name, kept);
            }
            Ok(outcome)
        })
    }
}

/// What a bucket held at some time. Nothing can be changed in it.
pub type Contents = Hooked<Frozen>;

#[derive(Clone, Debug)]
pub struct Frozen {
    store: SimStore,
    objects: Arc<BTreeMap<String, Bytes>>,
}

impl Contents {
    pub fn of(store: &SimStore) -> Contents {
        Hooked(Frozen { store: store.clone(), objects: Arc::new(store.objects()) })
    }
}

impl Hook for Frozen {
    fn inner(&self) -> &dyn Store {
        &self.store
    }

    fn pass<'a, T: Send + 'a>(
        &'a self,
        operation: Operation,
        name: &'a str,
        _: Lane,
        _: BoxFuture<'a, Result<T, StoreError>>,
    ) -> BoxFuture<'a, Result<T, StoreError>> {
        let error = StoreError::new(operation, self.store.url(), name, StoreErrorKind::Unsupported);
        Box::pin(async move { Err(error) })
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
}
