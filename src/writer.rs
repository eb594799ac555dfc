//! `ChangelogWriter`: appends to one log, and the verbs of its life.
//!
//! The hot path is [`append`](ChangelogWriter::append): a range check, one flag, and one push into the lane that this
//! thread had last time. All else is cold, and in a file of its own. What becomes of a frame after the lane is the
//! spiller's business, what becomes of a request the uploader's.

mod cold;

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use tidelog_io::ring::PushError;
use tidelog_upload::Pending;

use self::cold::with_marker;
use crate::changelog::Core;
use crate::checkpoint::{Request, RequestId};
use crate::device::{Device, LaneRef, Log, SpillRequest, lock};
use crate::error::{AppendError, ControlError, PersistError, SyncError};
use crate::handle::ChangelogHandle;
use crate::record::{FrameKind, Header, VALUE_BYTES_MAX};
use crate::types::{ChangeKind, KeyGroup, KeyGroupRange, LogId, SequenceNumber};
use crate::uploader::Event;

/// Appends changes to one log. One thread at a time; it may move between threads.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let dir = tempfile::tempdir()?;
/// # let bucket = format!("file://{}", dir.path().join("bucket").display());
/// use tidelog::{Changelog, KeyGroup, KeyGroupRange, Options, SequenceNumber};
/// # let options = Options::new(bucket, dir.path().join("local")).segment_bytes(1 << 20).local_bytes(4 << 20);
/// let changelog = Changelog::open(options)?;
/// let mut writer = changelog.create_writer("window-state", KeyGroupRange::new(0, 127).unwrap())?;
/// let number = writer.append(KeyGroup(42), b"user 7: +3")?;
/// assert_eq!(number, SequenceNumber(0));
///
/// writer.sync().wait()?; // on the local disk: survives a crash of this machine
/// let handle = writer.persist_durably(SequenceNumber::ZERO).wait()?; // in the bucket: survives its loss
/// assert_eq!(handle.to(), SequenceNumber(1));
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct ChangelogWriter {
    core: Arc<Core>,
    device: Arc<Device>,
    log: Arc<Log>,
    /// The lane of the last append.
    lane: LaneRef,
    /// The next sequence number.
    next: u64,
    poisoned: bool,
}

impl ChangelogWriter {
    pub(crate) fn new(core: Arc<Core>, device: Arc<Device>, log: Arc<Log>, lane: LaneRef) -> ChangelogWriter {
        ChangelogWriter { core, device, log, lane, next: 0, poisoned: false }
    }

    /// The id of the log.
    #[must_use]
    pub fn log(&self) -> LogId {
        self.log.id
    }

    /// The name that the log was created with.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.log.name
    }

    /// The key groups that changes may have.
    #[must_use]
    pub fn key_groups(&self) -> KeyGroupRange {
        self.log.key_groups
    }

    /// The number that the next change will have. Flink's `nextSequenceNumber`.
    #[must_use]
    #[inline]
    pub fn next_sequence_number(&self) -> SequenceNumber {
        SequenceNumber(self.next)
    }

    /// Appends a change and gives its number. It is in memory then; [`sync`](Self::sync) and
    /// [`persist_durably`](Self::persist_durably) make it durable.
    ///
    /// Waits at most [`append_wait_max`](crate::Options::append_wait_max) for room.
    ///
    /// # Errors
    /// See [`AppendError`]; nothing was appended then.
    #[inline]
    pub fn append(&mut self, key_group: KeyGroup, value: &[u8]) -> Result<SequenceNumber, AppendError> {
        self.check(key_group)?;
        self.push(ChangeKind::Data, key_group, value, Wait::Configured)
    }

    /// Appends a change if there is room now.
    ///
    /// # Errors
    /// `Full` if there is none, and as [`append`](Self::append).
    #[inline]
    pub fn try_append(&mut self, key_group: KeyGroup, value: &[u8]) -> Result<SequenceNumber, AppendError> {
        self.check(key_group)?;
        self.push(ChangeKind::Data, key_group, value, Wait::Never)
    }

    /// Appends a change that readers must see before any data of this log, as the registration of a state. It takes a
    /// sequence number and is truncated like any other.
    ///
    /// # Errors
    /// As [`append`](Self::append).
    pub fn append_metadata(&mut self, value: &[u8]) -> Result<SequenceNumber, AppendError> {
        self.push(ChangeKind::Metadata, KeyGroup(0), value, Wait::Configured)
    }

    /// Appends a change of `len` bytes that `fill` writes in place, into a slice of zeros.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let dir = tempfile::tempdir()?;
    /// # let bucket = format!("file://{}", dir.path().join("bucket").display());
    /// # use tidelog::{Changelog, KeyGroup, KeyGroupRange, Options};
    /// # let options = Options::new(bucket, dir.path().join("local")).segment_bytes(1 << 20).local_bytes(4 << 20);
    /// # let changelog = Changelog::open(options)?;
    /// # let mut writer = changelog.create_writer("state", KeyGroupRange::ALL)?;
    /// writer.append_with(KeyGroup(1), 8, |slice| slice.copy_from_slice(&7u64.to_le_bytes()))?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`append`](Self::append). An append to any log of this changelog from within `fill` is `Nested` where it meets
    /// the lane that `fill` writes to.
    ///
    /// # Panics
    /// If `fill` does. Nothing is appended then, and the writer is poisoned.
    pub fn append_with(
        &mut self,
        key_group: KeyGroup,
        len: usize,
        fill: impl FnOnce(&mut [u8]),
    ) -> Result<SequenceNumber, AppendError> {
        self.check(key_group)?;
        self.check_open()?;
        let max = self.core.options.value_len_max();
        if len > max {
            return Err(AppendError::TooLarge { len, max });
        }
        self.poisoned = true;
        let result = self.fill(key_group, len, fill);
        self.poisoned = false;
        result
    }

    /// Resolves when an append of `len` bytes from the polling thread would find room. Another writer may take the room in
    /// between: `try_append` tells.
    pub fn room(&self, len: usize) -> Room<'_> {
        Room { writer: self, len }
    }

    /// Makes all that was appended so far durable on the local disk. Writers that ask at the same time share the writes.
    /// Dropping the future changes nothing but the notification.
    ///
    /// # Errors
    /// [`SyncError`]: the local disk is out of service, or the changelog closed.
    pub fn sync(&self) -> SyncFuture {
        let (resolver, pending) = tidelog_upload::channel();
        if let Err(forked) = self.core.check_owner() {
            resolver.resolve(Err(forked.into()));
        } else if self.device.is_closed() {
            resolver.resolve(Err(SyncError::Closed));
        } else {
            self.log.synced.store(self.next, Ordering::Release);
            self.device.request(SpillRequest::Sync {
                lane: self.lane.index,
                position: self.lane.lane.committed(),
                to: self.next_sequence_number(),
                resolver,
            });
        }
        SyncFuture(pending)
    }

    /// All changes below this number are on the local disk.
    #[must_use]
    pub fn durable_sequence_number(&self) -> SequenceNumber {
        self.log.durable()
    }

    /// Resolves when all changes below `to` are on the local disk, without hurrying them there.
    pub fn when_durable(&self, to: SequenceNumber) -> SyncFuture {
        let (resolver, pending) = tidelog_upload::channel();
        match self.core.check_owner() {
            Ok(()) => self.log.when_durable(to, resolver),
            Err(forked) => resolver.resolve(Err(forked.into())),
        }
        SyncFuture(pending)
    }

    /// Makes the changes `[from, next)` durable in the bucket; the future resolves to the handle that a checkpoint stores.
    /// What objects already hold is referred to, never sent again; writers that ask at about the same time share an object.
    /// The future needs no particular executor; dropping it changes nothing but the notification. Flink's `persist`.
    ///
    /// # Errors
    /// See [`PersistError`]. Where [`is_retryable`](PersistError::is_retryable) says so, the changes are still held, and the
    /// next persist sends what is missing.
    pub fn persist_durably(&mut self, from: SequenceNumber) -> PersistFuture {
        let (resolver, pending) = tidelog_upload::channel();
        if let Err(forked) = self.core.check_owner() {
            resolver.resolve(Err(forked.into()));
            return PersistFuture(pending);
        }
        let to = self.next_sequence_number();
        let control = lock(&self.log.control);
        if from < control.truncated || from > to {
            let error =
                PersistError::OutOfRange { log: self.log.id, from, start: control.truncated, end: to };
            resolver.resolve(Err(error));
            return PersistFuture(pending);
        }
        let id = RequestId(self.core.requests.fetch_add(1, Ordering::Relaxed));
        let request = Request {
            log: self.log.id,
            device: self.device.index,
            from,
            to,
            asked_at: self.core.now(),
            end: None,
        };
        // Sent under the lock, so that the uploader sees truncations and requests of a log in their order.
        self.core.send(Event::Persist { id, request, resolver });
        drop(control);
        self.device.request(SpillRequest::Mark {
            lane: self.lane.index,
            position: self.lane.lane.committed(),
            request: id,
        });
        PersistFuture(pending)
    }

    /// A handle to the verbs of this log that other threads may hold.
    #[must_use]
    pub fn control(&self) -> WriterControl {
        WriterControl { core: Arc::clone(&self.core), log: Arc::clone(&self.log) }
    }

    /// The checkpoint that holds the changes below `to` is complete. See [`WriterControl::confirm`].
    ///
    /// # Errors
    /// See [`ControlError`].
    pub fn confirm(&self, to: SequenceNumber) -> Result<(), ControlError> {
        self.core.confirm(&self.log, to)
    }

    /// The checkpoint that asked for `[from, to)` was declined. See [`WriterControl::reset`].
    ///
    /// # Errors
    /// See [`ControlError`].
    pub fn reset(&self, from: SequenceNumber, to: SequenceNumber) -> Result<(), ControlError> {
        self.core.reset(&self.log, from, to)
    }

    /// Nobody needs the changes below `to` any more. See [`WriterControl::truncate`].
    ///
    /// # Errors
    /// See [`ControlError`].
    pub fn truncate(&self, to: SequenceNumber) -> Result<(), ControlError> {
        self.core.truncate(&self.log, to)
    }

    /// Drops all changes of the log, and closes it. Flink's `truncateAndClose`.
    pub fn truncate_and_close(self) {
        // A number that was appended is never beyond: this cannot be refused.
        let _ = self.core.truncate(&self.log, self.next_sequence_number());
    }

    /// Closes the log. Persists that were asked for go on; changes that no persist asked for are dropped, as in Flink
    /// (`sync` first, and they are recovered at the next open). What was persisted stays until it is truncated or discarded;
    /// an object that has nothing else of the log than what was dropped goes as if that were truncated.
    /// Dropping the writer does the same.
    pub fn close(self) {}

    #[inline]
    fn check(&self, key_group: KeyGroup) -> Result<(), AppendError> {
        if self.log.key_groups.contains(key_group) {
            Ok(())
        } else {
            Err(AppendError::KeyGroupOutOfRange { key_group, range: self.log.key_groups })
        }
    }

    #[inline]
    fn check_open(&self) -> Result<(), AppendError> {
        if self.poisoned { Err(AppendError::Poisoned) } else { self.check_intake() }
    }

    fn check_intake(&self) -> Result<(), AppendError> {
        if self.device.takes_in() { Ok(()) } else { Err(self.refusal()) }
    }

    #[cold]
    fn refusal(&self) -> AppendError {
        match self.core.options.object_bytes_max {
            Some(max) if !self.device.is_closed() => AppendError::ObjectQuota { max },
            _ => AppendError::Closed,
        }
    }

    #[inline]
    fn push(
        &mut self,
        kind: ChangeKind,
        key_group: KeyGroup,
        value: &[u8],
        wait: Wait,
    ) -> Result<SequenceNumber, AppendError> {
        self.check_open()?;
        let header = frame_header(kind, key_group, self.log.slot, value.len());
        match self.lane.lane.push(header, value) {
            Ok(()) => Ok(self.appended()),
            Err(error) => self.push_slow(error, kind, key_group, value, wait),
        }
    }

    #[inline]
    fn appended(&mut self) -> SequenceNumber {
        let number = SequenceNumber(self.next);
        self.next += 1;
        self.log.next.store(self.next, Ordering::Release);
        number
    }

    fn fill(
        &mut self,
        key_group: KeyGroup,
        len: usize,
        fill: impl FnOnce(&mut [u8]),
    ) -> Result<SequenceNumber, AppendError> {
        let wait_max = self.core.options.append_wait_max;
        if len > self.lane.lane.value_len_max() {
            let mut bytes = vec![0; len];
            fill(&mut bytes);
            return self.push_side(ChangeKind::Data, key_group, Bytes::from(bytes), wait_max);
        }
        let header = frame_header(ChangeKind::Data, key_group, self.log.slot, len);
        let mut fill = Some(fill);
        let mut push = |lane: &LaneRef| {
            let fill = &mut fill;
            lane.lane.push_with(header, len, |slice| fill.take().expect("a lane fills once")(slice))
        };
        match push(&self.lane) {
            Ok(()) => return Ok(self.appended()),
            Err(PushError::Nested) => return Err(AppendError::Nested),
            Err(PushError::Full | PushError::OtherThread | PushError::TooLarge) => {}
        }
        // Off the fast path a copy does not matter, and no lock is held while `fill` runs.
        let mut bytes = vec![0; len];
        fill.take().expect("nothing was pushed")(&mut bytes);
        self.push_waiting(header, &bytes, wait_max)?;
        Ok(self.appended())
    }
}

impl Drop for ChangelogWriter {
    fn drop(&mut self) {
        self.core.close_log(&self.log, &self.device, &self.lane);
    }
}

/// How long an append waits for room.
#[derive(Clone, Copy)]
enum Wait {
    /// As the options say.
    Configured,
    Never,
}

#[inline]
fn frame_header(kind: ChangeKind, key_group: KeyGroup, slot: u32, len: usize) -> u64 {
    let kind = match kind {
        ChangeKind::Data => FrameKind::Data,
        ChangeKind::Metadata => FrameKind::Metadata,
    };
    // A longer one is refused by every lane.
    Header::new(kind, key_group.0, slot, len.min(VALUE_BYTES_MAX)).0
}

/// See [`ChangelogWriter::room`].
#[must_use = "futures do nothing unless polled"]
#[derive(Debug)]
pub struct Room<'a> {
    writer: &'a ChangelogWriter,
    len: usize,
}

impl Future for Room<'_> {
    type Output = Result<(), AppendError>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let writer = self.writer;
        writer.core.check_owner()?;
        writer.check_open()?;
        let max = writer.core.options.value_len_max();
        if self.len > max {
            return Poll::Ready(Err(AppendError::TooLarge { len: self.len, max }));
        }
        let here = writer.device.current_lane().map_err(|_| AppendError::NoMemory)?;
        let is_large = self.len > here.lane.value_len_max();
        let in_lane = if is_large { 8 } else { self.len };
        if is_large && writer.device.side_budget.poll_room(self.len, context).is_pending()
            || here.lane.poll_room(with_marker(in_lane, &here), context).is_pending()
        {
            // It may have been closed before the waker was known, and then nobody calls it.
            writer.check_intake()?;
            return Poll::Pending;
        }
        Poll::Ready(Ok(()))
    }
}

/// The verbs of a log's life, for other threads than the writer's. All are idempotent.
#[derive(Clone, Debug)]
pub struct WriterControl {
    core: Arc<Core>,
    log: Arc<Log>,
}

impl WriterControl {
    /// The id of the log.
    #[must_use]
    pub fn log(&self) -> LogId {
        self.log.id
    }

    /// The checkpoint that holds the changes below `to` is complete: the engine stored its handle. Late and repeated
    /// confirmations are fine. Flink's `confirm`.
    ///
    /// # Errors
    /// `Beyond` if `to` was never appended.
    pub fn confirm(&self, to: SequenceNumber) -> Result<(), ControlError> {
        self.core.confirm(&self.log, to)
    }

    /// The checkpoint that asked for `[from, to)` was declined: its handle will never be used. Nothing is dropped: the next
    /// persist includes these changes again, by reference to the objects that hold them. Flink's `reset`.
    ///
    /// # Errors
    /// `Beyond` if `to` was never appended, `UpsideDown` if `from > to`.
    pub fn reset(&self, from: SequenceNumber, to: SequenceNumber) -> Result<(), ControlError> {
        self.core.reset(&self.log, from, to)
    }

    /// Nobody needs the changes below `to` any more, as after a materialization. Changes not yet uploaded are not sent;
    /// objects that no log refers to any more are deleted; persists already asked for finish first. Flink's `truncate`.
    ///
    /// # Errors
    /// `Beyond` if `to` was never appended.
    pub fn truncate(&self, to: SequenceNumber) -> Result<(), ControlError> {
        self.core.truncate(&self.log, to)
    }
}

macro_rules! future_of {
    ($(#[$doc:meta])* $name:ident, $output:ty, $closed:expr) => {
        $(#[$doc])*
        #[must_use = "dropping it loses the answer, not the request"]
        #[derive(Debug)]
        pub struct $name(pub(crate) Pending<$output>);

        impl $name {
            /// Blocks the thread until the answer is there.
            ///
            /// # Errors
            /// As the future.
            pub fn wait(self) -> $output {
                self.0.wait().unwrap_or(Err($closed))
            }

            /// Blocks the thread until the answer is there, or gives the future back after `timeout`.
            ///
            /// # Errors
            /// The future itself.
            pub fn wait_timeout(mut self, timeout: Duration) -> Result<$output, Self> {
                match self.0.wait_timeout(timeout) {
                    Some(answer) => Ok(answer.unwrap_or(Err($closed))),
                    None => Err(self),
                }
            }
        }

        impl Future for $name {
            type Output = $output;

            fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
                Pin::new(&mut self.0).poll(context).map(|answer| answer.unwrap_or(Err($closed)))
            }
        }
    };
}

future_of!(
    /// The answer to [`persist_durably`](ChangelogWriter::persist_durably). Any executor, or [`wait`](Self::wait).
    PersistFuture,
    Result<ChangelogHandle, PersistError>,
    PersistError::Closed
);

future_of!(
    /// The answer to [`sync`](ChangelogWriter::sync): the number below which all is durable. Any executor, or
    /// [`wait`](Self::wait).
    SyncFuture,
    Result<SequenceNumber, SyncError>,
    SyncError::Closed
);
