//! An embedded changelog: streaming state changes made durable, first on local NVMe, then as one object per checkpoint.
#![forbid(unsafe_code)]

// The byte formats are public for tools that look inside files and objects, for benches and for fuzzing; hidden, since
// no promise of stability is made for them.
#[doc(hidden)]
pub mod assemble;
#[doc(hidden)]
pub mod block;
mod fields;
#[doc(hidden)]
pub mod footer;
mod handle;
#[doc(hidden)]
pub mod manifest;
#[doc(hidden)]
pub mod part;
#[doc(hidden)]
pub mod record;
mod types;
#[doc(hidden)]
pub mod varint;
#[doc(hidden)]
pub mod walk;

pub use handle::{ChangelogHandle, Extent, HandleError};
pub use types::{ChangeKind, KeyGroup, KeyGroupRange, LogId, SequenceNumber};
