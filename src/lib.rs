//! An embedded changelog: streaming state changes made durable, first on local NVMe, then as one object per checkpoint.
#![forbid(unsafe_code)]

mod types;

pub use types::{ChangeKind, KeyGroup, KeyGroupRange, LogId, SequenceNumber};
