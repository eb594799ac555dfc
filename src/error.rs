//! Errors, one type for each operation: what happened, to what, what the user can do.

use std::error::Error as StdError;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tidelog_io::directory::{DirectoryError, ManifestError};
use tidelog_upload::{DriverError, StoreError, StoreErrorKind};

use crate::block::BlockError;
use crate::footer::FooterError;
use crate::handle::HandlesError;
use crate::manifest::ManifestError as RecordError;
use crate::options::OptionError;
use crate::part::PartError;
use crate::types::{KeyGroup, KeyGroupRange, LogId, SequenceNumber};

/// Why a changelog could not be opened. Nothing that is needed is lost. Directories may have been made, with a manifest; and
/// in those that were found good before the error, the manifest may say that they were opened, and damaged segments that
/// nothing needs may be gone.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// An option cannot work.
    #[error(transparent)]
    Option(#[from] OptionError),
    /// A local directory cannot be used.
    #[error(transparent)]
    Directory(#[from] DirectoryError),
    /// The manifest of a local directory is damaged, foreign or newer.
    #[error("the manifest in {directory} cannot be read: {source}")]
    Manifest {
        /// The local directory.
        directory: PathBuf,
        /// What is wrong with it.
        source: ManifestError,
    },
    /// There are segments, but no manifest that says what they hold.
    #[error(
        "{directory} holds {segment} but no manifest: it was removed or lost, and without it the segments cannot be read. \
         Restore the logs from their last checkpoint, and move the directory aside"
    )]
    ManifestMissing {
        /// The local directory.
        directory: PathBuf,
        /// The name of a segment file in it.
        segment: String,
    },
    /// Blocks were written after something that the manifest does not know any more.
    #[error(
        "the manifest in {directory} has lost its last records: {segment} holds blocks of a use that it does not know. \
         Restore the logs from their last checkpoint, and move the directory aside"
    )]
    ManifestBehind {
        /// The local directory.
        directory: PathBuf,
        /// The name of the segment file.
        segment: String,
    },
    /// A segment that the manifest names is not there.
    #[error(
        "{segment} is missing in {directory}, whose manifest says that it holds changes: put it back, or restore the logs \
         from their last checkpoint and move the directory aside"
    )]
    SegmentMissing {
        /// The local directory.
        directory: PathBuf,
        /// The name of the segment file.
        segment: String,
    },
    /// A directory without segments is on a file system that is too full for a first one.
    #[error(
        "{directory} has room for {free_bytes} bytes, the first segment takes {needed_bytes}: free space there, give \
         segments fewer bytes (segment_bytes), or choose another directory"
    )]
    NoRoom {
        /// The local directory.
        directory: PathBuf,
        /// The length of a segment in bytes.
        needed_bytes: u64,
        /// How many bytes can be stored there now.
        free_bytes: u64,
    },
    /// A record of the manifest makes no sense, or is newer.
    #[error("the manifest in {directory} cannot be replayed: {source}")]
    Record {
        /// The local directory.
        directory: PathBuf,
        /// What is wrong with it.
        source: RecordError,
    },
    /// A block that was durable cannot be read any more, and not all that was in it is known to be in objects or truncated.
    #[error(
        "{segment} in {directory} is damaged at byte {offset}: {source}; blocks after it were durable, so this is not a torn tail. \
             Restore its logs from their last checkpoint, and move the directory aside"
    )]
    Damaged {
        /// The local directory.
        directory: PathBuf,
        /// The name of the segment file.
        segment: String,
        /// Where the block begins, in bytes.
        offset: u64,
        /// What is wrong with it.
        source: BlockError,
    },
    /// The log of a local directory has a hole.
    #[error(
        "log {log} in {directory} has a hole: changes {expected} to {found} are missing from its segments"
    )]
    Hole {
        /// The local directory.
        directory: PathBuf,
        /// The log.
        log: LogId,
        /// The number that should come next.
        expected: SequenceNumber,
        /// The number that comes next.
        found: SequenceNumber,
    },
    /// The bucket cannot be used.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The runtime for uploads cannot be used.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// The system refused something.
    #[error("{action}: {source}")]
    Io {
        /// What was tried, to what.
        action: String,
        /// What the system said.
        source: io::Error,
    },
}

/// This process is a child, by fork, of the one that opened the changelog: it has a copy of some memory, and neither the
/// threads nor the lanes. Nothing was done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the changelog was opened by process {opener}, of which this one is a fork: open another one, with directories of its \
     own, after the fork"
)]
pub struct Forked {
    /// The process that opened the changelog.
    pub opener: u32,
}

/// Why a writer could not be created.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CreateError {
    /// The name is too long.
    #[error("the name of a log has at most 1024 bytes, this one has {len}")]
    NameTooLong {
        /// Its length in bytes.
        len: usize,
    },
    /// Too many logs are open on one device.
    #[error("a device has at most {max} open logs; close some, or add a local directory")]
    TooManyLogs {
        /// How many it can have.
        max: usize,
    },
    /// The log's creation could not be recorded.
    #[error("the manifest could not be written: {0}; the local directory is full or broken")]
    Manifest(#[source] io::Error),
    /// The system refused memory for a lane.
    #[error("no memory for a lane: {0}")]
    Lane(#[source] io::Error),
    /// The changelog belongs to the process of which this one is a fork.
    #[error(transparent)]
    Forked(#[from] Forked),
    /// The changelog is closed.
    #[error("the changelog is closed")]
    Closed,
}

/// Why a change was not appended. Nothing was changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AppendError {
    /// The key group is not the writer's.
    #[error("key group {key_group} is outside of the writer's range {range}")]
    KeyGroupOutOfRange {
        /// The key group of the change.
        key_group: KeyGroup,
        /// The range that the writer was created for.
        range: KeyGroupRange,
    },
    /// The value is larger than any value may be.
    #[error(
        "the value has {len} bytes, the largest allowed has {max}; split it, or raise value_bytes_max and local_bytes"
    )]
    TooLarge {
        /// Its length in bytes.
        len: usize,
        /// The most it may have.
        max: usize,
    },
    /// There was no room for as long as the writer was told to wait.
    #[error("no room after {waited:?}: the local disk or the uploads do not keep up; append again later")]
    Full {
        /// How long the append waited.
        waited: Duration,
    },
    /// The objects of the changelog have as many bytes as [`object_bytes_max`](crate::Options::object_bytes_max) allows.
    #[error(
        "the objects of this changelog have reached object_bytes_max, {max} bytes: take a snapshot and truncate its logs, \
         release holders that are not needed, or raise the limit; appends go on when objects were deleted"
    )]
    ObjectQuota {
        /// The limit in bytes.
        max: u64,
    },
    /// Called from within `append_with`'s closure, for the lane which that closure fills.
    #[error("append within the closure of another append_with on this thread")]
    Nested,
    /// The closure of an earlier `append_with` panicked.
    #[error("the closure of an earlier append_with panicked; create a new writer")]
    Poisoned,
    /// The system refused memory for a lane.
    #[error("no memory for a lane on this thread")]
    NoMemory,
    /// The changelog belongs to the process of which this one is a fork.
    #[error(transparent)]
    Forked(#[from] Forked),
    /// The changelog is closed.
    #[error("the changelog is closed")]
    Closed,
}

impl AppendError {
    /// Whether the same append may succeed later.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        matches!(self, AppendError::Full { .. } | AppendError::ObjectQuota { .. } | AppendError::NoMemory)
    }
}

/// Why changes are not known to be on the local disk.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SyncError {
    /// The local disk failed twice in a row, or its engine broke. What is not durable is held in memory, unless it was with
    /// the engine: a persist tells.
    #[error(
        "the local directory {directory} is out of service: {source}; what is not durable is in memory only: persist it"
    )]
    LocalTierFailed {
        /// The local directory.
        directory: PathBuf,
        /// What the system said.
        source: Arc<io::Error>,
    },
    /// The changelog belongs to the process of which this one is a fork.
    #[error(transparent)]
    Forked(#[from] Forked),
    /// The changelog is closed.
    #[error("the changelog is closed")]
    Closed,
}

/// Why a persist did not give a handle. Where [`is_retryable`](PersistError::is_retryable), all changes since the last
/// confirmed number are still held; the next persist refers to what objects already hold, and sends the rest. Else the
/// variant says what is left and what to do.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PersistError {
    /// The range does not exist (any more).
    #[error("cannot persist log {log} from {from}: it holds {start} to {end}")]
    OutOfRange {
        /// The log.
        log: LogId,
        /// The first number asked for.
        from: SequenceNumber,
        /// The first number that is not truncated.
        start: SequenceNumber,
        /// The next number.
        end: SequenceNumber,
    },
    /// The object could not be written. Alone, it is for a reason that does not pass by itself.
    #[error("object {object} of the checkpoint could not be written: {source}; mend that, and persist again")]
    Upload {
        /// The name of the object.
        object: String,
        /// What the store said.
        source: Arc<StoreError>,
    },
    /// There was no complete object in time, although uploads were tried again and again.
    #[error(
        "the changes were not in a complete object within {waited:?}{}, and persist again",
        .last.as_ref().map(|last| format!(": {}; mend that", last.reason())).unwrap_or_else(|| {
            "; no upload failed: the buckets are slow, or their time is short; raise Options::persist_timeout".to_owned()
        })
    )]
    Timeout {
        /// The time that a persist may take.
        waited: Duration,
        /// Why the last object failed, if one did: the last one for it, or the last one of all since one became complete.
        last: Option<Arc<PersistError>>,
    },
    /// The object could not be recorded in the manifest.
    #[error(
        "object {object} could not be recorded in the manifest: {source}; persist again once the local directory works"
    )]
    Manifest {
        /// The name of the object.
        object: String,
        /// What the system said.
        source: Arc<io::Error>,
    },
    /// The engine of the local disk broke and took changes with it that were being written. Nothing from the first of them
    /// on can be persisted, whatever is appended.
    #[error(
        "the changes of log {log} from {from} on are lost: they were being written when the engine of the local disk broke. \
         Take a snapshot of what they led to, and go on with a new writer"
    )]
    Lost {
        /// The log.
        log: LogId,
        /// The first change that is lost.
        from: SequenceNumber,
    },
    /// Changes are only in an object that was handed over to the engine's registry and released there: it may be gone.
    #[error(
        "the changes {from} to {to} of log {log} cannot be referred to: object {object} was handed over to the engine's \
         registry, and the last holder that had it for this log was released. Take a snapshot of what they led to, truncate \
         the log to {to} or further, and persist from there"
    )]
    Released {
        /// The log.
        log: LogId,
        /// The first change that cannot be referred to.
        from: SequenceNumber,
        /// The end of what cannot be referred to, exclusive: a persist from here on succeeds.
        to: SequenceNumber,
        /// The name of the first such object.
        object: String,
    },
    /// The changes are in more objects than a handle can name: 65,536, fewer where their names or pieces are very many bytes.
    /// A log gets there that is not truncated for as many checkpoints; at half of that there is a warning.
    #[error(
        "the changes of log {log} from {from} on are in {objects} objects, more than a handle can name: take a snapshot of \
         what they led to, or compact the handles of the last checkpoint, truncate the log to {to} or further, and persist \
         from there"
    )]
    TooManyObjects {
        /// The log.
        log: LogId,
        /// The first number asked for.
        from: SequenceNumber,
        /// From this number on a handle is half full: a persist from there succeeds.
        to: SequenceNumber,
        /// How many objects hold the changes that were asked for.
        objects: usize,
    },
    /// The caller's [runtime](crate::UploadRuntime::Handle) was shut down while the changelog was open: nothing is uploaded
    /// any more. What was synced is on the local disk.
    #[error(
        "uploads have ended, because the tokio runtime that the changelog was given was shut down: keep a runtime until the \
         changelog on it is closed. Sync, close this changelog, and open it again on a runtime that runs, or on its own"
    )]
    RuntimeEnded,
    /// A block could not be read back, or was damaged on the local disk. What objects hold already stays there.
    #[error(
        "changes of the checkpoint cannot be read back from the local disk: {what}. Start again from the last complete \
         checkpoint, with an empty directory in the place of this one"
    )]
    ReadBack {
        /// Which block of which segment, and what is wrong with it.
        what: String,
    },
    /// The changelog belongs to the process of which this one is a fork.
    #[error(transparent)]
    Forked(#[from] Forked),
    /// The changelog is closed.
    #[error("the changelog is closed")]
    Closed,
}

impl PersistError {
    /// Whether a later persist of the same range may succeed: what it needs is still held. Decline the checkpoint, and go on
    /// with the next one. Where this is false, no persist of the range ever succeeds: take a snapshot, or start again from
    /// the last complete checkpoint, as the variant says.
    ///
    /// `Upload` is among those that may succeed, although somebody has to mend something first, such as a policy that denies
    /// the bucket: that, too, happens while the job goes on.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        match self {
            PersistError::Timeout { .. } | PersistError::Upload { .. } | PersistError::Manifest { .. } => {
                true
            }
            PersistError::OutOfRange { .. }
            | PersistError::Lost { .. }
            | PersistError::Released { .. }
            | PersistError::TooManyObjects { .. }
            | PersistError::RuntimeEnded
            | PersistError::ReadBack { .. }
            | PersistError::Forked(_)
            | PersistError::Closed => false,
        }
    }

    /// What went wrong, without what to do, and without the time within which it had to go well.
    fn reason(&self) -> String {
        match self {
            PersistError::Upload { source, .. } => match (source.kind(), StdError::source(&**source)) {
                (StoreErrorKind::Deadline(_), Some(cause)) if cause.is::<StoreError>() => cause.to_string(),
                _ => source.to_string(),
            },
            PersistError::Manifest { object, source } => {
                format!("object {object} could not be recorded in the manifest: {source}")
            }
            error => error.to_string(),
        }
    }
}

/// Why [`register`](crate::Changelog::register) or [`hand_over`](crate::Changelog::hand_over) failed. Nothing was changed,
/// but for `Manifest` and `OutOfService`, after which the holder may have some of the objects: call again, or release it.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RegisterError {
    /// The holder has no name, or a too long one.
    #[error("the name of a holder has 1 to {max} bytes, this one has {len}", max = crate::manifest::HOLDER_BYTES_MAX)]
    HolderName {
        /// Its length in bytes.
        len: usize,
    },
    /// Too many objects are held.
    #[error("holders of {directory} have {held} objects, {more} more would be over {max}: release some holders",
        max = crate::manifest::HOLDS_MAX)]
    TooMany {
        /// The local directory.
        directory: PathBuf,
        /// How many they have: an object counts once for each holder, one that was handed over once for each log.
        held: usize,
        /// How many the call would add.
        more: usize,
    },
    /// A handle names an object that no directory of this changelog owns, or one that nobody needs any more.
    #[error(
        "object {object} in {bucket} cannot be held: no directory of this changelog owns it, or nobody needed it any more and \
         it is being deleted. Keep another owner's objects in the engine's own registry; what dead owners left is removed \
         by `tidelog sweep --live-handles`. A handle whose objects nobody needed is not to be used any more"
    )]
    NotOwned {
        /// The URL of the bucket.
        bucket: String,
        /// The name of the file in it.
        object: String,
    },
    /// A handle names an object that is the engine's registry's.
    #[error(
        "object {object} in {bucket} was handed over to the engine's registry: hand it over for this holder, too"
    )]
    HandedOver {
        /// The URL of the bucket.
        bucket: String,
        /// The name of the file in it.
        object: String,
    },
    /// A log needs changes in the object, and no handle of it is among those handed over: it could not know when the object
    /// goes.
    #[error(
        "object {object} in {bucket} cannot be handed over: {} needs changes in it, and no handle that was given has the \
         object for that. Hand over all handles of a checkpoint together, or truncate first what is not in it",
        logs.iter().map(|log| format!("log {log}")).collect::<Vec<_>>().join(", ")
    )]
    StillNeeded {
        /// The URL of the bucket.
        bucket: String,
        /// The name of the file in it.
        object: String,
        /// The logs.
        logs: Vec<LogId>,
    },
    /// Only a directory out of service could record it.
    #[error(
        "object {object} in {bucket} cannot be held: {directory} is out of service, and nothing durable can be said of the \
         object there. Do not truncate what is in it while it is needed, and replace the disk"
    )]
    OutOfService {
        /// The local directory.
        directory: PathBuf,
        /// The URL of the bucket.
        bucket: String,
        /// The name of the file in it.
        object: String,
    },
    /// It could not be recorded.
    #[error("the manifest could not be written: {0}; the local directory is full or broken")]
    Manifest(#[source] Arc<io::Error>),
    /// The changelog belongs to the process of which this one is a fork.
    #[error(transparent)]
    Forked(#[from] Forked),
    /// The changelog is closed.
    #[error("the changelog is closed")]
    Closed,
}

/// Why [`release`](crate::Changelog::release) failed.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReleaseError {
    /// It could not be recorded: after a crash the holder may be there again. Nothing is deleted until it is.
    #[error("the manifest could not be written: {0}; the local directory is full or broken. Release again")]
    Manifest(#[source] Arc<io::Error>),
    /// A directory that knows the holder is out of service: it is released here, and will be there again at the next open
    /// of that directory.
    #[error(
        "{directory} is out of service and cannot forget the holder: at the next open it is there again. Release it then; \
         delete nothing of what was handed over to it before that, unless the directory is not opened again"
    )]
    OutOfService {
        /// The local directory.
        directory: PathBuf,
    },
    /// The changelog belongs to the process of which this one is a fork.
    #[error(transparent)]
    Forked(#[from] Forked),
    /// The changelog is closed.
    #[error("the changelog is closed")]
    Closed,
}

/// Why `confirm`, `reset` or `truncate` was refused. Nothing was changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ControlError {
    /// The numbers are beyond what was appended.
    #[error("number {to} is beyond the next number {next} of log {log}")]
    Beyond {
        /// The log.
        log: LogId,
        /// The number given.
        to: SequenceNumber,
        /// The next number of the log.
        next: SequenceNumber,
    },
    /// The range is upside down.
    #[error("the range {from} to {to} is upside down")]
    UpsideDown {
        /// Its start.
        from: SequenceNumber,
        /// Its end.
        to: SequenceNumber,
    },
    /// The changelog belongs to the process of which this one is a fork.
    #[error(transparent)]
    Forked(#[from] Forked),
}

/// What is not durable at the end of `close`.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CloseError {
    /// The time was over before everything was on the local disk.
    #[error("after {waited:?} there were still changes that are not durable locally: {logs:?}")]
    Timeout {
        /// How long `close` waited.
        waited: Duration,
        /// The logs, with the numbers that are durable (exclusive).
        logs: Vec<(LogId, SequenceNumber)>,
    },
    /// The time was over before every persist was answered.
    #[error(
        "after {waited:?} there were still persists without an answer; what is on the local disk is recovered at the next open"
    )]
    Persists {
        /// How long `close` waited.
        waited: Duration,
    },
    /// The local tier failed: what was not persisted is lost with the process.
    #[error(transparent)]
    Local(#[from] SyncError),
    /// The manifest could not be sealed.
    #[error("the manifest could not be sealed: {0}")]
    Manifest(#[source] Arc<io::Error>),
}

/// Why changes could not be read. Nothing partial of the failed piece was handed out.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReadError {
    /// The store refused, did not answer, or the object is not there. The error has the URL of the bucket and the name of the
    /// file in it.
    #[error("{0}{next}", next = reading_again(.0))]
    Store(#[from] StoreError),
    /// The runtime for downloads cannot be used.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// An object's footer is damaged, foreign or newer.
    #[error("the footer of object {object} in bucket {bucket} cannot be read: {source}; {OTHER_OBJECTS}")]
    Footer {
        /// The URL of the bucket.
        bucket: String,
        /// The name of the file in it.
        object: String,
        /// What is wrong with it.
        source: FooterError,
    },
    /// A directory or changeset of an object is damaged. It was read twice.
    #[error(
        "object {object} in bucket {bucket} is damaged at bytes {start} to {end}, part {part}: {source}; {OTHER_OBJECTS}"
    )]
    Damaged {
        /// The URL of the bucket.
        bucket: String,
        /// The name of the file in it.
        object: String,
        /// The part of the object, from 0.
        part: usize,
        /// Where the damaged bytes begin in the file.
        start: u64,
        /// Where it ends.
        end: u64,
        /// What is wrong with it.
        source: PartError,
    },
    /// The handles do not go together, or not with what was asked of them.
    #[error(transparent)]
    Handles(#[from] HandlesError),
    /// A local block is damaged or gone.
    #[error("{segment} in {directory} cannot be read at byte {offset}: {what}")]
    Local {
        /// The local directory.
        directory: PathBuf,
        /// The name of the segment file.
        segment: String,
        /// Where, in bytes.
        offset: u64,
        /// What is wrong.
        what: String,
    },
    /// An object does not hold what the handle says.
    #[error("object {object} in bucket {bucket} does not hold what its handle says: {what}; {OTHER_OBJECTS}")]
    Mismatch {
        /// The URL of the bucket.
        bucket: String,
        /// The name of the file in it.
        object: String,
        /// What is missing.
        what: String,
    },
    /// The changelog was closed, or the runtime that it was given was shut down.
    #[error(
        "reading was given up: the changelog is closed, or the tokio runtime that it was given was shut down"
    )]
    Closed,
    /// The changelog belongs to the process of which this one is a fork.
    #[error(transparent)]
    Forked(#[from] Forked),
    /// Part of what was asked for is truncated.
    #[error("log {log} is truncated below {start}, {from} was asked for")]
    Truncated {
        /// The log.
        log: LogId,
        /// The first number asked for.
        from: SequenceNumber,
        /// The first number that it still holds.
        start: SequenceNumber,
    },
    /// Changes are only in an object that was handed over to the engine's registry and released there: it may be gone.
    #[error(
        "the changes {from} to {to} of log {log} cannot be read: object {object} was handed over to the engine's registry, \
         and the last holder that had it for this log was released. What is behind them can: persist the log from {to}, and \
         restore that handle"
    )]
    Released {
        /// The log.
        log: LogId,
        /// The first change that cannot be read.
        from: SequenceNumber,
        /// The end of what cannot be read, exclusive.
        to: SequenceNumber,
        /// The name of the first such object.
        object: String,
    },
}

/// What to do about an object that is not what it was.
const OTHER_OBJECTS: &str = "no damaged byte was handed out. Restore the handles of a checkpoint that does not name this object, \
                             or, if the bucket keeps versions of it, put back the one that was written first; `tidelog verify` \
                             of the handles finds all that is damaged";

/// What to do about a bucket that does not answer; the other errors of stores say it themselves.
fn reading_again(error: &StoreError) -> &'static str {
    if error.is_retryable() {
        "; nothing else holds these bytes: read again once the bucket answers"
    } else {
        ""
    }
}

impl ReadError {
    /// Whether the same may be read later although nobody changes anything: a bucket did not answer. The reader has tried
    /// several times; open another one.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        matches!(self, ReadError::Store(error) if error.is_retryable())
    }
}

#[cfg(test)]
mod tests {
    use tidelog_upload::Operation;

    use super::*;

    /// What an engine declines a checkpoint for, and what ends a log for it.
    #[test]
    fn a_persist_may_succeed_later_exactly_where_what_it_needs_is_held() {
        let (log, number) = (LogId(7), SequenceNumber(3));
        let refused = StoreError::new(Operation::Put, "s3://b", "t/1", StoreErrorKind::Denied);
        let io = || Arc::new(io::Error::other("full"));
        let object = || "t/1".to_owned();
        let later = [
            PersistError::Upload { object: object(), source: Arc::new(refused) },
            PersistError::Timeout { waited: Duration::from_secs(1), last: None },
            PersistError::Manifest { object: object(), source: io() },
        ];
        let never = [
            PersistError::OutOfRange { log, from: number, start: number, end: number },
            PersistError::Lost { log, from: number },
            PersistError::Released { log, from: number, to: number, object: object() },
            PersistError::ReadBack { what: "block 1".to_owned() },
            PersistError::RuntimeEnded,
            PersistError::Forked(Forked { opener: 1 }),
            PersistError::Closed,
        ];
        assert!(later.iter().all(PersistError::is_retryable));
        assert!(!never.iter().any(PersistError::is_retryable));
    }

    #[test]
    fn a_timeout_says_each_thing_once() {
        let waited = Duration::from_secs(600);
        let refused = StoreError::caused(
            Operation::Put,
            "s3://b",
            "t/1.w7",
            StoreErrorKind::Unreachable,
            "connection refused",
        );
        let late = StoreErrorKind::Deadline(waited);
        let source = Arc::new(StoreError::caused(Operation::Put, "s3://b", "t/1", late, refused));
        let last = Some(Arc::new(PersistError::Upload { object: "t/1".to_owned(), source }));
        assert_eq!(
            PersistError::Timeout { waited, last }.to_string(),
            "the changes were not in a complete object within 600s: put of object \"t/1.w7\" in bucket s3://b: no \
             connection to the store: connection refused; mend that, and persist again"
        );
    }
}
