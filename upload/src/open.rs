//! Buckets by URL. What each kind of store does is known to [`s3`](crate::s3) and [`object`](crate::object).
#![forbid(unsafe_code)]

use std::sync::Arc;

use crate::object;
#[cfg(feature = "s3")]
use crate::s3;
use crate::store::{Operation, Store, StoreError, StoreErrorKind};

/// The schemes that [`open_store`] knows, for people. All but `memory` are features of this crate.
pub const SUPPORTED_SCHEMES: &str = "s3://bucket/prefix, file:///absolute/directory, memory://, memory://name, \
                                     gs://bucket/prefix, az://container/prefix, hdfs://host:port/prefix";

/// Opens the bucket that a URL names.
///
/// - `file:///absolute/directory`: a local directory, made if it is not there. An object that is complete survives a power
///   cut, and so does its absence once it is deleted.
/// - `memory://`: a new, empty bucket in this process's memory. `memory://name`: the same for every caller in the process
///   for as long as one of them keeps it.
///
/// # Errors
/// A URL that names no bucket or is of an unknown scheme, or a directory that cannot be made.
///
/// ```
/// let store = tidelog_upload::open_store("memory://")?;
/// assert_eq!(store.url(), "memory://");
/// let error = tidelog_upload::open_store("ftp://host/").unwrap_err();
/// assert!(error.to_string().contains("memory://"));
/// # Ok::<_, tidelog_upload::StoreError>(())
/// ```
pub fn open_store(url: &str) -> Result<Arc<dyn Store>, StoreError> {
    match url.split_once("://") {
        #[cfg(feature = "local")]
        Some(("file", _)) => object::open_directory(url),
        #[cfg(feature = "s3")]
        Some(("s3", _)) => s3::open(url),
        Some(("memory", name)) => object::open_memory(url, name),
        other => {
            let scheme = other.map_or(url, |(scheme, _)| scheme).to_owned();
            let kind = StoreErrorKind::UnsupportedScheme { scheme, supported: SUPPORTED_SCHEMES };
            Err(StoreError::new(Operation::Open, url, "", kind))
        }
    }
}
