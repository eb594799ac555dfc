//! Named objects made of opaque parts: the remote half of tidelog.
//!
//! This crate knows nothing of changes, logs or segments.
#![forbid(unsafe_code)]

pub mod bucket;
pub mod multipart;
mod pending;
pub mod store;

pub use pending::{Abandoned, Pending, Resolver, channel};
pub use store::{BoxFuture, Operation, Store, StoreError, StoreErrorKind};
pub use tokio::runtime::Handle as RuntimeHandle;
