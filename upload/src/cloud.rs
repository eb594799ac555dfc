//! Google Cloud Storage and Azure over `object_store`, request by request.
//!
//! Its retries and time limits are off; each lane has a client, and so connections, of its own. What is read goes through
//! the same code as the other stores over `object_store` ([`Bucket`]). `object_store` cannot list the parts or the
//! unfinished uploads of these stores: leftovers go by the stores' own rules (Azure drops them after a week, Google only by
//! a lifecycle rule, `AbortIncompleteMultipartUpload`).
#![forbid(unsafe_code)]

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use object_store::multipart::{MultipartStore, PartId};
use object_store::path::Path as ObjectPath;
use object_store::prefix::PrefixStore;
use object_store::{ClientOptions, ObjectStore, ObjectStoreExt, RetryConfig};
use url::Url;

use crate::object::{Bucket, Staging, failure, payload, tag};
use crate::store::{
    Body, BoxFuture, Capabilities, EntityTag, Lane, ListedObject, ListedPart, ListedUpload, Operation, Parts,
    Store, StoreError, StoreErrorKind, UploadId, UploadRef, UploadedPart,
};

/// How long a connection may idle: below the 60 s and more after which servers and balancers drop them without a word.
const IDLE_MAX: Duration = Duration::from_secs(20);

/// Multipart uploads in the manner of S3. Which numbers they have is `object_store`'s matter: no gaps.
#[cfg(feature = "gcs")]
const GOOGLE: Capabilities = Capabilities {
    parts: Parts::Parallel,
    part_bytes_min: 5 << 20,
    part_bytes_max: 5 << 30,
    parts_max: 10_000,
    equal_parts: false,
    sparse: false,
    copy_part: false,
    resend_part: false,
    list_parts: false,
    list_uploads: false,
    conditional_put: false,
};

/// Blocks with an id each, committed by a list of ids: numbers are only an order. There is no upload to abort.
#[cfg(feature = "azure")]
const AZURE: Capabilities = Capabilities {
    parts: Parts::Parallel,
    part_bytes_min: 1,
    part_bytes_max: 4_000 << 20,
    parts_max: 50_000,
    equal_parts: false,
    sparse: true,
    copy_part: false,
    resend_part: true,
    list_parts: false,
    list_uploads: false,
    conditional_put: false,
};

/// Opens `gs://bucket/prefix`, with the credentials that Google's tools would find.
#[cfg(feature = "gcs")]
pub(crate) fn open_google(url: &str) -> Result<Arc<dyn Store>, StoreError> {
    use object_store::gcp::GoogleCloudStorageBuilder;
    open(url, &GOOGLE, || {
        GoogleCloudStorageBuilder::from_env()
            .with_url(url)
            .with_retry(no_retries())
            .with_client_options(client_options())
            .build()
    })
}

/// Opens `az://container/prefix`, with account and credentials from the environment (`AZURE_STORAGE_ACCOUNT_NAME`, ...).
#[cfg(feature = "azure")]
pub(crate) fn open_azure(url: &str) -> Result<Arc<dyn Store>, StoreError> {
    use object_store::azure::MicrosoftAzureBuilder;
    open(url, &AZURE, || {
        MicrosoftAzureBuilder::from_env()
            .with_url(url)
            .with_retry(no_retries())
            .with_client_options(client_options())
            .build()
    })
}

fn open<T: ObjectStore + MultipartStore>(
    url: &str,
    capabilities: &'static Capabilities,
    build: impl Fn() -> Result<T, object_store::Error>,
) -> Result<Arc<dyn Store>, StoreError> {
    let refuse =
        |why: &str| StoreError::new(Operation::Open, url, "", StoreErrorKind::InvalidUrl(why.to_owned()));
    let parsed = Url::parse(url).map_err(|error| refuse(&error.to_string()))?;
    let plain = parsed.query().is_none() && parsed.fragment().is_none() && parsed.username().is_empty();
    if !plain || parsed.host_str().is_none_or(str::is_empty) {
        return Err(refuse("it is a bucket and a prefix; credentials and options come from the environment"));
    }
    let prefix = ObjectPath::from_url_path(parsed.path()).map_err(|error| refuse(&error.to_string()))?;
    let lane = || match build() {
        Ok(store) => Ok(Arc::new(PrefixStore::new(store, prefix.clone()))),
        Err(error) => Err(failure(Operation::Open, url, "", error)),
    };
    let (primary, hedge) = (lane()?, lane()?);
    let bucket = Bucket::new(url.trim_end_matches('/'), Arc::clone(&primary) as _, Staging::Nowhere);
    Ok(Arc::new(Cloud { bucket, capabilities, lanes: [primary, hedge] }))
}

fn no_retries() -> RetryConfig {
    RetryConfig { max_retries: 0, ..RetryConfig::default() }
}

fn client_options() -> ClientOptions {
    ClientOptions::new()
        .with_timeout_disabled()
        .with_connect_timeout_disabled()
        .with_pool_idle_timeout(IDLE_MAX)
        .with_http1_only()
}

struct Cloud<T> {
    /// The first lane, for what has no lane.
    bucket: Bucket,
    capabilities: &'static Capabilities,
    lanes: [Arc<PrefixStore<T>>; 2],
}

impl<T> fmt::Debug for Cloud<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Cloud").field(&self.bucket).finish()
    }
}

impl<T> Cloud<T> {
    fn lane(&self, lane: Lane) -> &PrefixStore<T> {
        match lane {
            Lane::Primary => &self.lanes[0],
            Lane::Hedge => &self.lanes[1],
        }
    }

    /// The error of a write. That something is not there means the upload, or the bucket; what is not known to have done
    /// nothing may have done it.
    fn failure(&self, operation: Operation, name: &str, error: object_store::Error) -> StoreError {
        use object_store::Error as E;
        let is_upload = matches!(operation, Operation::PutPart | Operation::Complete | Operation::Abort);
        let caused = |kind, error: Box<dyn std::error::Error + Send + Sync>| {
            StoreError::caused(operation, self.bucket.url(), name, kind, error)
        };
        match error {
            E::NotFound { .. } if is_upload => caused(StoreErrorKind::NoSuchUpload, error.into()),
            E::NotFound { .. } => StoreError::failed(operation, self.bucket.url(), name, false, error),
            E::PermissionDenied { .. } => caused(StoreErrorKind::Denied, error.into()),
            E::AlreadyExists { .. } | E::Precondition { .. } => caused(StoreErrorKind::Exists, error.into()),
            error => {
                let failure = self.bucket.failure(operation, name, error);
                if *failure.kind() == StoreErrorKind::Failed && failure.is_retryable() {
                    return caused(StoreErrorKind::Interrupted, failure.into());
                }
                failure
            }
        }
    }
}

impl<T: ObjectStore + MultipartStore> Store for Cloud<T> {
    fn url(&self) -> &str {
        self.bucket.url()
    }

    fn capabilities(&self) -> &Capabilities {
        self.capabilities
    }

    fn put<'a>(
        &'a self,
        name: &'a str,
        body: Body,
        lane: Lane,
    ) -> BoxFuture<'a, Result<EntityTag, StoreError>> {
        Box::pin(async move {
            let path = self.bucket.path(Operation::Put, name)?;
            let done = self.lane(lane).put(&path, payload(&body)).await;
            let done = done.map_err(|error| self.failure(Operation::Put, name, error))?;
            Ok(tag(done.e_tag))
        })
    }

    fn create<'a>(&'a self, name: &'a str) -> BoxFuture<'a, Result<UploadId, StoreError>> {
        Box::pin(async move {
            let path = self.bucket.path(Operation::Create, name)?;
            let id = self.lane(Lane::Primary).create_multipart(&path).await;
            Ok(UploadId(id.map_err(|error| self.failure(Operation::Create, name, error))?.into()))
        })
    }

    fn put_part<'a>(
        &'a self,
        upload: UploadRef<'a>,
        number: u32,
        body: Body,
        lane: Lane,
    ) -> BoxFuture<'a, Result<EntityTag, StoreError>> {
        Box::pin(async move {
            let path = self.bucket.path(Operation::PutPart, upload.name)?;
            let index = number.checked_sub(1).filter(|_| number <= self.capabilities.parts_max);
            let Some(index) = index else {
                return Err(self.bucket.error(Operation::PutPart, upload.name, StoreErrorKind::InvalidPart));
            };
            let id = upload.id.0.to_string();
            let part = self.lane(lane).put_part(&path, &id, index as usize, payload(&body)).await;
            let part = part.map_err(|error| self.failure(Operation::PutPart, upload.name, error))?;
            // As it is, quotes too: for these stores it is an id to be given back.
            Ok(EntityTag(part.content_id.into()))
        })
    }

    fn list_parts<'a>(&'a self, upload: UploadRef<'a>) -> BoxFuture<'a, Result<Vec<ListedPart>, StoreError>> {
        self.bucket.list_parts(upload)
    }

    fn complete<'a>(
        &'a self,
        upload: UploadRef<'a>,
        parts: &'a [UploadedPart],
    ) -> BoxFuture<'a, Result<EntityTag, StoreError>> {
        Box::pin(async move {
            let (operation, name) = (Operation::Complete, upload.name);
            let path = self.bucket.path(operation, name)?;
            let dense = parts.iter().map(|part| part.number).eq(1..=parts.len() as u32);
            let rising = parts.is_sorted_by(|a, b| a.number < b.number);
            if parts.is_empty() || !rising || !(dense || self.capabilities.sparse) {
                return Err(self.bucket.error(operation, name, StoreErrorKind::InvalidPart));
            }
            let ids = parts.iter().map(|part| PartId { content_id: part.tag.0.to_string() }).collect();
            let id = upload.id.0.to_string();
            let done = self.lane(Lane::Primary).complete_multipart(&path, &id, ids).await;
            let done = done.map_err(|error| self.failure(operation, name, error))?;
            Ok(tag(done.e_tag))
        })
    }

    fn abort<'a>(&'a self, upload: UploadRef<'a>) -> BoxFuture<'a, Result<(), StoreError>> {
        Box::pin(async move {
            let path = self.bucket.path(Operation::Abort, upload.name)?;
            let id = upload.id.0.to_string();
            match self.lane(Lane::Primary).abort_multipart(&path, &id).await {
                Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(()),
                Err(error) => Err(self.failure(Operation::Abort, upload.name, error)),
            }
        })
    }

    fn list_uploads<'a>(&'a self, prefix: &'a str) -> BoxFuture<'a, Result<Vec<ListedUpload>, StoreError>> {
        let error = self.bucket.error(Operation::ListUploads, prefix, StoreErrorKind::Unsupported);
        Box::pin(async move { Err(error) })
    }

    fn get<'a>(&'a self, name: &'a str, range: Range<u64>) -> BoxFuture<'a, Result<Bytes, StoreError>> {
        self.bucket.get(name, range)
    }

    fn head<'a>(&'a self, name: &'a str) -> BoxFuture<'a, Result<ListedObject, StoreError>> {
        self.bucket.head(name)
    }

    fn delete<'a>(&'a self, name: &'a str) -> BoxFuture<'a, Result<(), StoreError>> {
        self.bucket.delete(name)
    }

    fn list<'a>(&'a self, prefix: &'a str) -> BoxFuture<'a, Result<Vec<ListedObject>, StoreError>> {
        self.bucket.list(prefix)
    }
}

#[cfg(all(test, feature = "azure", feature = "gcs"))]
mod tests {
    use super::*;

    #[test]
    fn urls_with_credentials_or_without_a_bucket_are_refused() {
        type Open = fn(&str) -> Result<Arc<dyn Store>, StoreError>;
        for (scheme, open) in [("gs", open_google as Open), ("az", open_azure as Open)] {
            for rest in ["", "/x", "bucket?key=secret", "user@bucket"] {
                let error = open(&format!("{scheme}://{rest}")).unwrap_err();
                assert!(matches!(error.kind(), StoreErrorKind::InvalidUrl(_)), "{scheme}://{rest}: {error}");
            }
        }
    }
}
