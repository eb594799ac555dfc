//! The new objects: parts go out as they come, objects end when they are full.
//!
//! Requests, retries and the proof of the commit are the driver's matter; here its memory is kept to, footers are written,
//! and it is known what has to go if something fails.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use bytes::Bytes;
use tidelog_upload::bucket::BucketIndex;
use tidelog_upload::{Composition, Driver, ObjectUpload, Pending, Resolver, StoreError, block_on, channel};

use super::CompactError;
use super::builder::{Built, PartBuilder};
use super::source::{Source, WholePart};
use crate::device::lock;
use crate::handle::{ChangelogHandle, Extent};
use crate::options::Options;
use crate::part::{PartId, Run};
use crate::piece::{self, Piece};
use crate::tail::Tail;
use crate::types::{LogId, SequenceNumber};
use crate::uploader::{OBJECT_OPEN_MAX, object_bytes_max, object_name};

/// The driver gets parts in slices of this share of its budget.
const PUTS_PER_BUDGET: u64 = 32;

/// Writes objects one after the other.
pub(super) struct Target<'a> {
    driver: &'a Driver,
    bucket: Arc<str>,
    options: &'a Options,
    token: &'a mut dyn FnMut() -> u64,
    /// Whether parts are copied, so that objects are composed.
    composes: bool,
    out: Arc<Out>,
    open: Option<Open>,
    written: Vec<Written>,
    /// The names of all objects that were begun.
    begun: Vec<String>,
    /// Those beside whose pieces something may be left.
    untidy: Vec<String>,
}

/// An object that gets parts.
struct Open {
    name: String,
    upload: Upload,
    tail: Tail,
    opened_at: Instant,
    logs: BTreeMap<LogId, Range<SequenceNumber>>,
}

/// How the bytes get into the bucket.
enum Upload {
    /// All are sent.
    Sent(ObjectUpload),
    /// Some are copied.
    Composed(Composition),
}

/// A proven object.
pub(super) struct Written {
    pieces: Vec<Piece>,
    footer: Range<u64>,
    token: u64,
    pub(super) parts: usize,
    pub(super) runs: usize,
    /// What it holds: of a log, numbers that follow each other.
    logs: BTreeMap<LogId, Range<SequenceNumber>>,
}

impl Written {
    /// What it holds of a log.
    fn extent(&self, log: LogId) -> Option<Extent> {
        let range = self.logs.get(&log)?;
        Some(Extent {
            pieces: self.pieces.clone(),
            footer: self.footer.clone(),
            token: self.token,
            first: range.start,
            end: range.end,
        })
    }

    /// Its length in bytes.
    pub(super) fn bytes(&self) -> u64 {
        self.footer.end
    }
}

impl<'a> Target<'a> {
    pub(super) fn new(
        driver: &'a Driver,
        options: &'a Options,
        token: &'a mut dyn FnMut() -> u64,
        composes: bool,
    ) -> Target<'a> {
        Target {
            driver,
            bucket: driver.stores()[0].url().into(),
            options,
            token,
            composes,
            out: Arc::default(),
            open: None,
            written: Vec::new(),
            begun: Vec::new(),
            untidy: Vec::new(),
        }
    }

    /// Makes a part of what was collected and sends it. Waits while the driver has as much as it may.
    pub(super) fn put(&mut self, builder: &mut PartBuilder) -> Result<(), CompactError> {
        if self.open.as_ref().is_some_and(|open| self.is_full(open, builder.runs())) {
            self.finish()?;
        }
        if self.open.is_none() {
            self.open();
        }
        let open = self.open.as_mut().expect("just opened");
        let footer = open.tail.footer();
        let part = PartId { token: footer.token(), index: footer.parts().len() as u32 };
        let Built { bytes, directories, runs, compression } = builder.build(part);
        open.add(&runs);
        open.tail.push(compression, runs, &directories);
        self.send(bytes.into())
    }

    /// Copies a part.
    pub(super) fn copy(&mut self, part: &WholePart) -> Result<(), CompactError> {
        if self.open.as_ref().is_some_and(|open| self.is_full(open, part.runs.len())) {
            self.finish()?;
        }
        if self.open.is_none() {
            self.open();
        }
        let open = self.open.as_mut().expect("just opened");
        open.add(&part.runs);
        open.tail.push_copy(part.compression, part.runs.clone(), &part.directories, part.origin);
        let Upload::Composed(composition) = &mut open.upload else {
            unreachable!("objects are composed where parts are copied")
        };
        block_on(composition.copy(&part.file, part.range.clone()))
            .map_err(|source| CompactError::Upload { object: open.name.clone(), source })
    }

    fn is_full(&self, open: &Open, runs: usize) -> bool {
        open.opened_at.elapsed() >= OBJECT_OPEN_MAX
            || !open.tail.fits(runs)
            || open.tail.footer().parts_len() >= object_bytes_max(self.driver)
            || matches!(&open.upload, Upload::Composed(composition) if composition.is_full())
    }

    fn open(&mut self) {
        let token = (self.token)();
        let name = object_name(self.options, self.begun.len() as u64, token);
        self.begun.push(name.clone());
        let upload = if self.composes {
            Upload::Composed(self.driver.compose(BucketIndex(0), &name))
        } else {
            Upload::Sent(self.driver.upload(&name, None))
        };
        self.open = Some(Open {
            upload,
            name,
            tail: Tail::new(token),
            opened_at: Instant::now(),
            logs: BTreeMap::new(),
        });
    }

    fn send(&mut self, mut part: Bytes) -> Result<(), CompactError> {
        let budget = self.driver.options().budget_bytes;
        let slice_bytes = (budget / PUTS_PER_BUDGET).max(1) as usize;
        let patience = self.driver.options().object_timeout;
        let open = self.open.as_mut().expect("a part belongs to an object");
        let upload = match &mut open.upload {
            Upload::Sent(upload) => upload,
            Upload::Composed(composition) => {
                return block_on(composition.put(part))
                    .map_err(|source| CompactError::Upload { object: open.name.clone(), source });
            }
        };
        while !part.is_empty() {
            let slice = part.split_to(slice_bytes.min(part.len()));
            let bytes = slice.len() as u64;
            self.out.charge(bytes, budget - budget / 8, patience).map_err(|why| match why {
                Refused::Failed(source) => CompactError::Upload { object: open.name.clone(), source },
                Refused::Stalled => CompactError::Stalled { object: open.name.clone(), waited: patience },
            })?;
            let out = Arc::clone(&self.out);
            upload.put(vec![slice], move |outcome| out.let_go(bytes, outcome));
        }
        Ok(())
    }

    /// Ends the open object, if there is one, and waits until it is proven complete.
    pub(super) fn finish(&mut self) -> Result<(), CompactError> {
        let Some(Open { name, upload, tail, logs, .. }) = self.open.take() else { return Ok(()) };
        let footer = tail.footer();
        let (token, parts) = (footer.token(), footer.parts().len());
        let runs = footer.parts().iter().map(|part| part.runs.len()).sum();
        let (tail, range) = tail.encode();
        let tail = Bytes::from(tail);
        let (pieces, total, leftovers) = match upload {
            Upload::Sent(upload) => self.finish_sent(&name, upload, tail)?,
            Upload::Composed(composition) => self.finish_composed(&name, composition, tail)?,
        };
        if leftovers {
            self.untidy.push(name.clone());
        }
        let what = match piece::check(&pieces) {
            Ok(bytes) if bytes == range.end && total == bytes => None,
            Ok(bytes) => Some(format!("it has {bytes} bytes instead of {}", range.end)),
            Err(what) => Some(format!("its {what} is out of bounds")),
        };
        if let Some(what) = what {
            return Err(CompactError::Placed { object: name, what });
        }
        tracing::debug!(object = name, bytes = range.end, parts, "object complete");
        self.written.push(Written { pieces, footer: range, token, parts, runs, logs });
        Ok(())
    }

    fn finish_sent(
        &self,
        name: &str,
        upload: ObjectUpload,
        tail: Bytes,
    ) -> Result<(Vec<Piece>, u64, bool), CompactError> {
        let (done, placement) = channel();
        let (settled, leftovers) = channel();
        let resolve = |resolver: Resolver<_>| move |outcome| resolver.resolve(outcome);
        upload.finish(vec![tail], resolve(done), move |left| settled.resolve(left));
        let placement = wait(placement)?;
        let leftovers = wait(leftovers)?;
        let placement =
            placement.map_err(|source| CompactError::Upload { object: name.to_owned(), source })?;
        let piece = |piece: tidelog_upload::multipart::Piece| Piece {
            bucket: Arc::clone(&self.bucket),
            object: piece.name,
            offset: piece.offset,
            bytes: piece.bytes,
        };
        Ok((placement.pieces.into_iter().map(piece).collect(), placement.bytes, leftovers))
    }

    fn finish_composed(
        &self,
        name: &str,
        mut composition: Composition,
        tail: Bytes,
    ) -> Result<(Vec<Piece>, u64, bool), CompactError> {
        let composed = block_on(async {
            if let Err(error) = composition.put(tail).await {
                // The first error counts; a sweep of its name follows.
                let _ = composition.abort().await;
                return Err(error);
            }
            composition.finish().await
        });
        let composed = composed.map_err(|source| CompactError::Upload { object: name.to_owned(), source })?;
        let bucket = Arc::clone(&self.bucket);
        let piece = Piece { bucket, object: name.to_owned(), offset: 0, bytes: composed.bytes };
        Ok((vec![piece], composed.bytes, composed.leftovers))
    }

    /// How many objects were written.
    pub(super) fn written(&self) -> usize {
        self.written.len()
    }

    /// The new handles, of what was written after so many objects, each with the place of its log.
    pub(super) fn handles(
        &self,
        sources: &[Source],
        after: usize,
    ) -> Result<Vec<(usize, ChangelogHandle)>, CompactError> {
        let mut handles = Vec::with_capacity(sources.len());
        for Source { handle, place, .. } in sources {
            let (log, key_groups, from, to) = (handle.log(), handle.key_groups(), handle.from(), handle.to());
            let extents = self.written[after..].iter().filter_map(|written| written.extent(log)).collect();
            let new = ChangelogHandle::new(log, handle.name(), key_groups, from, to, extents)?;
            handles.push((*place, new));
        }
        Ok(handles)
    }

    /// The objects that were written, and the names of those of whose writing something may be left beside them.
    pub(super) fn end(self) -> (Vec<Written>, Vec<String>) {
        assert!(self.open.is_none(), "the last object was finished");
        let names = |written: &Written| written.pieces.iter().map(|piece| piece.object.clone()).collect();
        let keep: Vec<String> =
            self.written.iter().flat_map(|written: &Written| -> Vec<String> { names(written) }).collect();
        let untidy = self.untidy.iter().filter(|name| !sweep(self.driver, name, &keep)).cloned().collect();
        (self.written, untidy)
    }

    /// Removes all that was written, and names what may be left.
    pub(super) fn give_up(mut self) -> Vec<String> {
        if let Some(open) = self.open.take() {
            // Whatever that says: a look at the bucket follows.
            match open.upload {
                Upload::Sent(upload) => {
                    let (settled, leftovers) = channel();
                    upload.abort(move |left| settled.resolve(left));
                    let _ = wait(leftovers);
                }
                Upload::Composed(composition) => drop(block_on(composition.abort())),
            }
        }
        self.begun.retain(|name| !sweep(self.driver, name, &[]));
        self.begun
    }
}

impl Open {
    /// Notes what runs hold that are added.
    fn add(&mut self, runs: &[Run]) {
        for run in runs {
            let range = self.logs.entry(run.log).or_insert(run.first..run.first);
            assert!(range.end == run.first, "the numbers of a log follow each other");
            range.end = run.end;
        }
    }
}

/// Removes what the writing of an object may have left; whether that is certain.
fn sweep(driver: &Driver, name: &str, keep: &[String]) -> bool {
    let (resolver, swept) = channel();
    driver.sweep(name, keep, move |outcome| resolver.resolve(outcome));
    match swept.wait() {
        Ok(Ok(())) => true,
        Ok(Err(error)) => {
            tracing::warn!(%error, object = name, "what a compaction left could not be removed");
            false
        }
        Err(_) => false,
    }
}

fn wait<T>(pending: Pending<T>) -> Result<T, CompactError> {
    pending.wait().map_err(|_| CompactError::Closed)
}

/// The bytes that the driver has.
#[derive(Default)]
struct Out {
    state: Mutex<OutState>,
    changed: Condvar,
}

#[derive(Default)]
struct OutState {
    bytes: u64,
    failure: Option<StoreError>,
}

enum Refused {
    Failed(StoreError),
    /// Nothing was let go in time.
    Stalled,
}

impl Out {
    /// Counts bytes that are handed over, once they fit.
    fn charge(&self, bytes: u64, bytes_max: u64, patience: Duration) -> Result<(), Refused> {
        let mut state = lock(&self.state);
        loop {
            if let Some(failure) = state.failure.take() {
                return Err(Refused::Failed(failure));
            }
            if state.bytes == 0 || state.bytes + bytes <= bytes_max {
                state.bytes += bytes;
                return Ok(());
            }
            let before = state.bytes;
            let waited;
            (state, waited) =
                self.changed.wait_timeout(state, patience).unwrap_or_else(std::sync::PoisonError::into_inner);
            if waited.timed_out() && state.bytes == before && state.failure.is_none() {
                return Err(Refused::Stalled);
            }
        }
    }

    fn let_go(&self, bytes: u64, outcome: Result<(), StoreError>) {
        let mut state = lock(&self.state);
        state.bytes -= bytes;
        if let Err(error) = outcome {
            state.failure.get_or_insert(error);
        }
        drop(state);
        self.changed.notify_all();
    }
}
