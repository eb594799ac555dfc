//! What callers are told: plans, results, errors.

use std::ops::Range;
use std::time::Duration;

use tidelog_upload::{DriverError, StoreError};

use crate::error::ReadError;
use crate::handle::{ChangelogHandle, HandleError, HandlesError};
use crate::options::OptionError;
use crate::types::{LogId, SequenceNumber};

/// What a change says of a key, for [`Compactor::last_value_by`](crate::Compactor::last_value_by).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ChangeKey {
    /// It has no key: it stays.
    None,
    /// It gives the key, which stands in these bytes of its value, a new value.
    Upsert(Range<usize>),
    /// It deletes the key, which stands in these bytes of its value.
    Tombstone(Range<usize>),
}

/// What a compaction made.
#[derive(Clone, Debug)]
pub struct Compacted {
    /// The new handles, one for each log, in the order in which the logs were given; of a log whose old ones were for several
    /// ranges of key groups, one for each of these. Logs without a wanted key group are left out.
    pub handles: Vec<ChangelogHandle>,
    /// What was done.
    pub stats: CompactionStats,
    /// Names of new objects beside which something may be left, of attempts to write a part that was late, because it
    /// could not be removed: a [`Sweeper`](crate::Sweeper) does.
    pub leftovers: Vec<String>,
}

/// What a compaction did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CompactionStats {
    /// Requests that read.
    pub requests: u64,
    /// Bytes read.
    pub bytes_read: u64,
    /// New objects.
    pub objects: u64,
    /// Their parts.
    pub parts: u64,
    /// The logs' runs in these parts: a restore reads each by a request, besides their directories.
    pub runs: u64,
    /// Bytes of the new objects.
    pub bytes_written: u64,
    /// Those among them that the bucket copied, in whole parts.
    pub bytes_copied: u64,
    /// Changes that were rewritten; those in parts that were copied are not counted.
    pub changes: u64,
    /// Changes of the wanted key groups that were left out: later ones of the same key were there.
    pub superseded: u64,
}

/// What a compaction would do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CompactionPlan {
    /// Objects that the handles name.
    pub objects: u64,
    /// Their bytes, with what is in them for others.
    pub object_bytes: u64,
    /// The logs' runs in their parts: a restore reads each by a request, besides their directories.
    pub runs: u64,
    /// Bytes of the changes that would be rewritten, before any is left out for a later one of its key.
    pub surviving_bytes: u64,
    /// Runs in the new objects, about: more where parts compress by more than eight times, fewer where changes are left out
    /// for later ones.
    pub runs_after: u64,
    /// New objects, about.
    pub objects_after: u64,
}

impl CompactionPlan {
    /// Whether half of the objects, of the requests of a restore or of the bytes would do. If not, a compaction costs more than
    /// it gives, unless it leaves out [superseded changes](crate::Compactor::last_value_by).
    #[must_use]
    pub fn is_worthwhile(&self) -> bool {
        self.objects > 0
            && (self.objects_after <= self.objects / 2
                || self.runs_after <= self.runs / 2
                || self.surviving_bytes <= self.object_bytes / 2)
    }
}

/// Why handles were not compacted. They are what they were.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CompactError {
    /// An option cannot work.
    #[error(transparent)]
    Option(#[from] OptionError),
    /// The bucket cannot be used.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The threads for requests could not be started.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// The handles do not go together, or are not for the wanted key groups.
    #[error(transparent)]
    Handles(#[from] HandlesError),
    /// What a handle names could not be read.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// A new object could not be written.
    #[error("object {object} could not be written: {source}")]
    Upload {
        /// Its name.
        object: String,
        /// What the bucket said.
        source: StoreError,
    },
    /// The bucket took nothing for a long time.
    #[error(
        "the bucket took nothing of object {object} within {waited:?}; look at the bucket, and compact again"
    )]
    Stalled {
        /// The object's name.
        object: String,
        /// How long that was waited for.
        waited: Duration,
    },
    /// A new object is not what was written.
    #[error("object {object} is not what was written: {what}; compact again")]
    Placed {
        /// Its name.
        object: String,
        /// What is wrong.
        what: String,
    },
    /// What was said of a change's key is not in its value.
    #[error(
        "the key of change {number} of log {log} was said to be in bytes {range:?} of a value of {value_bytes}: mend the \
         function given to last_value_by"
    )]
    Key {
        /// The log.
        log: LogId,
        /// The change's number.
        number: SequenceNumber,
        /// The range that the function gave.
        range: Range<usize>,
        /// The length of the value.
        value_bytes: usize,
    },
    /// A handle of all of a log's changes would break a handle's limits.
    #[error(transparent)]
    Handle(#[from] HandleError),
    /// The requests were cut off.
    #[error("the compaction was cut off")]
    Closed,
    /// It failed, and could not remove what it had written.
    #[error(
        "{source}; moreover these new objects, or parts of them, may be left in {bucket}, needed by nobody: {}; \
         `tidelog sweep` finds them", objects.join(", ")
    )]
    Leftovers {
        /// Why it failed.
        source: Box<CompactError>,
        /// The bucket.
        bucket: String,
        /// The objects' names.
        objects: Vec<String>,
    },
}
