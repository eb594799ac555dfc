//! Named objects made of opaque parts: the remote half of tidelog.
//!
//! This crate knows nothing of changes, logs or segments.
#![forbid(unsafe_code)]

pub mod bucket;
pub mod chunk;
#[cfg(any(feature = "azure", feature = "gcs"))]
mod cloud;
pub mod driver;
#[cfg(feature = "hdfs")]
mod hdfs;
pub mod hedge;
#[cfg(feature = "local")]
mod local;
pub mod metrics;
pub mod multipart;
mod object;
mod open;
pub mod options;
mod pending;
#[cfg(feature = "s3")]
mod s3;
pub mod sim;
pub mod store;
mod wire;
mod writers;

pub use driver::{
    Clock, Composed, Composition, Driver, DriverError, DriverStats, ObjectUpload, Runtime, block_on,
    block_on_timeout,
};
pub use open::{SUPPORTED_SCHEMES, bucket_directory, bucket_url, open_or_create_store, open_store};
pub use options::{HedgeOptions, UploadOptionError, UploadOptions};
pub use pending::{Abandoned, Pending, Resolver, channel};
pub use store::{
    Body, BoxFuture, Capabilities, EntityTag, Lane, ListedObject, ListedPart, ListedUpload, Operation,
    Outcome, Parts, Store, StoreError, StoreErrorKind, UploadId, UploadRef, UploadedPart, Watch,
};
pub use tokio::runtime::Handle as RuntimeHandle;
pub use wire::Wire;
