//! Named objects made of opaque parts: the remote half of tidelog.
//!
//! This crate knows nothing of changes, logs or segments.
#![forbid(unsafe_code)]

pub mod bucket;
pub mod chunk;
pub mod hedge;
pub mod multipart;
pub mod options;
mod pending;
pub mod sim;
pub mod store;

pub use options::{HedgeOptions, UploadOptions};
pub use pending::{Abandoned, Pending, Resolver, channel};
pub use store::{BoxFuture, Operation, Store, StoreError, StoreErrorKind};
pub use tokio::runtime::Handle as RuntimeHandle;
