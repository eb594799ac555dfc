//! The bytes of objects while they are in memory, and the answer to each put once they are not.
#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};

use bytes::Bytes;

use crate::driver::Core;
use crate::driver::answer::Answer;
use crate::metrics;
use crate::store::{Body, StoreError};

/// Bytes of the object that are sent together.
pub(super) struct Chunk {
    pub(super) body: Body,
    /// The puts that they came from, and how many bytes of each.
    pub(super) shares: Vec<(Arc<Charge>, u64)>,
    /// From the cut until nobody holds it.
    pub(super) span: tracing::Span,
}

impl Chunk {
    pub(super) fn release(&self) {
        for (charge, share) in &self.shares {
            charge.released.fetch_add(*share, Relaxed);
        }
    }
}

/// The bytes of one put, counted until this is dropped, which answers the put.
#[derive(Debug)]
pub(super) struct Charge {
    core: Arc<Core>,
    pub(super) bytes: u64,
    released: AtomicU64,
    failure: OnceLock<StoreError>,
    answer: Option<Answer<Result<(), StoreError>>>,
}

impl Charge {
    pub(super) fn new(
        core: &Arc<Core>,
        slices: &[Bytes],
        answer: Option<Answer<Result<(), StoreError>>>,
    ) -> Arc<Charge> {
        let bytes = slices.iter().map(|slice| slice.len() as u64).sum();
        core.counters.hold(bytes);
        metrics::memory(bytes as i64);
        Arc::new(Charge {
            core: Arc::clone(core),
            bytes,
            released: AtomicU64::new(0),
            failure: OnceLock::new(),
            answer,
        })
    }

    pub(super) fn fail(&self, error: &StoreError) {
        let _ = self.failure.set(error.clone());
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.core.counters.memory.fetch_sub(self.bytes, Relaxed);
        metrics::memory(-(self.bytes as i64));
        let Some(answer) = self.answer.take() else { return };
        match self.failure.take() {
            Some(error) => answer.give(Err(error)),
            None if *self.released.get_mut() == self.bytes => answer.give(Ok(())),
            // Cut off by the shutdown, which the answer says by its own drop.
            None => {}
        }
    }
}
