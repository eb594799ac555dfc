//! Canaries: tiny objects that show in the background whether a bucket that takes no data works again. When one is due is
//! decided by [`Policy`](crate::hedge::Policy).
#![forbid(unsafe_code)]

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Poll, Waker};
use std::time::Instant;

use bytes::Bytes;

use super::attempt::Cancel;
use super::timers::Sleep;
use super::{Core, What, requests};
use crate::hedge::Canary;
use crate::metrics;
use crate::store::{Body, Lane, Operation, StoreErrorKind};

/// How canaries are called if their owner did not say.
const NAME: &str = "canary";

/// What they carry.
const BYTES: &[u8] = b"written by tidelog to see whether this bucket works; delete it if you like\n";

/// When the policy wants to be asked.
#[derive(Debug, Default)]
pub(super) struct Alarm(Mutex<AlarmState>);

#[derive(Debug, Default)]
struct AlarmState {
    deadline: Option<Instant>,
    waker: Option<Waker>,
}

impl Alarm {
    pub(super) fn set(&self, deadline: Option<Instant>) {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if state.deadline == deadline {
            return;
        }
        state.deadline = deadline;
        let waker = state.waker.take();
        drop(state);
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// The deadline; the waker is called when it changes.
    fn watch(&self, waker: &Waker) -> Option<Instant> {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let replaced = state.waker.replace(waker.clone());
        let deadline = state.deadline;
        drop(state);
        drop(replaced);
        deadline
    }
}

/// Starts the task that sends canaries, until the shutdown.
pub(super) fn start(core: &Arc<Core>) {
    let runner = Arc::clone(core);
    core.executor.spawn(async move {
        loop {
            let now = runner.timers.now();
            let due = runner.policy().canary(now);
            match due {
                Some(canary) => fly(&runner, canary).await,
                None => wait(&runner).await,
            }
            runner.policy_changed();
        }
    });
    core.executor.run();
}

/// Until the policy's deadline.
async fn wait(core: &Core) {
    let mut sleep: Option<(Instant, Sleep)> = None;
    poll_fn(|context| {
        let Some(deadline) = core.canaries.watch(context.waker()) else { return Poll::Pending };
        if sleep.as_ref().is_none_or(|(known, _)| *known != deadline) {
            sleep = Some((deadline, core.timers.sleep_until(deadline)));
        }
        match &mut sleep {
            Some((_, sleep)) => Pin::new(sleep).poll(context),
            None => Poll::Pending,
        }
    })
    .await;
}

async fn fly(core: &Arc<Core>, canary: Canary) {
    let Canary { bucket, timeout } = canary;
    // Always the same: what one of them left behind, the next one takes along.
    let name = core.canary_name.get().map_or(NAME, String::as_str).to_owned();
    let store = Arc::clone(core.store(bucket));
    let what = What { bucket, operation: Operation::Put, name: &name, bytes: BYTES.len() as u64 };
    let started = core.timers.now();
    let put = {
        let name = name.clone();
        let body = Body::new(vec![Bytes::from_static(BYTES)]);
        Box::pin(async move { store.put(&name, body, Lane::Hedge).await })
    };
    let outcome = core.attempt(what, Lane::Hedge, timeout, Cancel::default(), put).await;
    // One that may not be removed stays, and where writes are conditional none can take its place: then that is said.
    let outcome = outcome.map(drop).or_else(|error| match error.kind() {
        StoreErrorKind::Exists => Ok(()),
        _ => Err(error),
    });
    let now = core.timers.now();
    let took = now.saturating_duration_since(started);
    metrics::canary(&core.labels[bucket.0], metrics::outcome_label(&outcome));
    core.policy().canary_ended(bucket, outcome.is_ok(), took, now);
    // Also after a failure: it may have arrived. A bucket that does not answer keeps no other from being looked at.
    let remover = Arc::clone(core);
    core.executor.spawn(async move {
        if let Err(error) = requests::remove(&remover, bucket, &name).await {
            tracing::warn!(%error, "a canary is left in a bucket");
        }
    });
}
