//! Named objects made of opaque parts: the remote half of tidelog.
//!
//! This crate knows nothing of changes, logs or segments.
#![forbid(unsafe_code)]

pub mod driver;
pub mod object;
mod pending;
pub mod sim;
pub mod store;

pub use driver::{Driver, DriverError, DriverStats, ObjectUpload, Runtime, block_on, block_on_timeout};
pub use object::open_store;
pub use pending::{Abandoned, Pending, Resolver, channel};
pub use store::{BoxFuture, ObjectSink, Operation, Store, StoreError, StoreErrorKind};
pub use tokio::runtime::Handle as RuntimeHandle;
