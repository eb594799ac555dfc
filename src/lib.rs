//! An embedded changelog: streaming state changes made durable, first on local NVMe, then as one object per checkpoint.
#![forbid(unsafe_code)]

mod fields;
mod handle;
#[doc(hidden)]
pub mod manifest;
mod types;

pub use handle::{ChangelogHandle, Extent, HandleError};
pub use types::{ChangeKind, KeyGroup, KeyGroupRange, LogId, SequenceNumber};
