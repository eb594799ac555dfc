//! An embedded changelog: streaming state changes made durable, first on local NVMe, then as one object per checkpoint.
#![forbid(unsafe_code)]
#![doc = include_str!("../README.md")]

// The byte formats are public for tools that look inside files and objects, for benches and for fuzzing; hidden, since
// no promise of stability is made for them.
#[doc(hidden)]
pub mod assemble;
#[doc(hidden)]
pub mod block;
mod changelog;
mod checkpoint;
mod compact;
mod custody;
mod device;
mod error;
mod fields;
#[doc(hidden)]
pub mod footer;
mod handle;
mod health;
mod ledger;
mod local;
#[doc(hidden)]
pub mod manifest;
pub mod metrics;
mod options;
#[doc(hidden)]
pub mod part;
mod piece;
mod queue;
mod reader;
#[doc(hidden)]
pub mod record;
mod recovered;
mod recovery;
mod retention;
mod spill;
mod sweep;
#[doc(hidden)]
pub mod tail;
mod types;
mod uploader;
pub mod varint;
#[doc(hidden)]
pub mod walk;
mod writer;

pub use changelog::Changelog;
#[doc(hidden)]
pub use changelog::Seams;
pub use compact::{ChangeKey, CompactError, Compacted, CompactionPlan, CompactionStats, Compactor};
pub use error::{
    AppendError, CloseError, ControlError, CreateError, Forked, OpenError, PersistError, ReadError,
    RegisterError, ReleaseError, SyncError,
};
pub use handle::{ChangelogHandle, Extent, HandleError, HandlesError};
pub use health::{BucketHealth, BucketHealthError};
pub use local::{LocalLog, LocalLogs};
pub use options::{
    Compression, Durability, EngineChoice, HedgeOptions, OptionError, Options, UploadOptions, UploadRuntime,
};
pub use piece::Piece;
pub use reader::{Change, ChangeBatch, ChangeBatchIntoIter, ChangelogReader, ReadStats, Restore};
pub use recovered::RecoveredLog;
pub use sweep::{Kept, Stray, StrayKind, SweepError, SweepPlan, Sweeper};
pub use tidelog_io::disk::EngineInfo;
pub use types::{ChangeKind, KeyGroup, KeyGroupRange, LogId, SequenceNumber};
pub use writer::{ChangelogWriter, PersistFuture, Room, SyncFuture, WriterControl};
