//! Google Cloud Storage and Azure over `object_store`, request by request.
//!
//! Its retries and time limits are off; each lane has a client, and so connections, of its own. What is read goes through
//! the same code as the other stores over `object_store` ([`Bucket`]). `object_store` cannot list the parts or the
//! unfinished uploads of these stores: leftovers go by the stores' own rules (Azure drops them after a week, Google only by
//! a lifecycle rule, `AbortIncompleteMultipartUpload`).
#![forbid(unsafe_code)]

use std::collections::HashSet;
use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use object_store::multipart::{MultipartStore, PartId};
use object_store::prefix::PrefixStore;
use object_store::{ClientConfigKey, ObjectStore, ObjectStoreExt, RetryConfig};

use crate::object::{Bucket, Staging, failure, payload, tag};
use crate::open::Address;
use crate::store::{
    Body, BoxFuture, Capabilities, EntityTag, Lane, ListedObject, ListedPart, ListedUpload, Operation, Parts,
    Store, StoreError, StoreErrorKind, UploadId, UploadRef, UploadedPart,
};

pub(crate) mod answers;

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

/// What is ours to say of a client; all else, such as proxies and certificates, stays as the environment has it. A day is no
/// time limit to the callers, who have their own.
const CLIENT: [(ClientConfigKey, &str); 4] = [
    (ClientConfigKey::Timeout, "1 day"),
    (ClientConfigKey::ConnectTimeout, "1 day"),
    // Below the 60 s and more after which servers and balancers drop idle connections without a word.
    (ClientConfigKey::PoolIdleTimeout, "20 s"),
    (ClientConfigKey::Http1Only, "true"),
];

/// Opens `gs://bucket/prefix`, with the credentials that Google's tools would find.
#[cfg(feature = "gcs")]
pub(crate) fn open_google(url: &str) -> Result<Arc<dyn Store>, StoreError> {
    use object_store::gcp::{GoogleCloudStorageBuilder, GoogleConfigKey};
    open(url, &GOOGLE, false, |bucket| {
        let mut builder =
            GoogleCloudStorageBuilder::from_env().with_bucket_name(bucket).with_retry(no_retries());
        for (key, value) in CLIENT {
            builder = builder.with_config(GoogleConfigKey::Client(key), value);
        }
        builder.build()
    })
}

/// Opens `az://container/prefix`, with account and credentials from the environment (`AZURE_STORAGE_ACCOUNT_NAME`, ...).
#[cfg(feature = "azure")]
pub(crate) fn open_azure(url: &str) -> Result<Arc<dyn Store>, StoreError> {
    use object_store::azure::{AzureConfigKey, MicrosoftAzureBuilder};
    open(url, &AZURE, true, |container| {
        let mut builder =
            MicrosoftAzureBuilder::from_env().with_container_name(container).with_retry(no_retries());
        for (key, value) in CLIENT {
            builder = builder.with_config(AzureConfigKey::Client(key), value);
        }
        builder.build()
    })
}

fn open<T: ObjectStore + MultipartStore>(
    url: &str,
    capabilities: &'static Capabilities,
    own_uploads: bool,
    build: impl Fn(&str) -> Result<T, object_store::Error>,
) -> Result<Arc<dyn Store>, StoreError> {
    let Address { url, host, prefix } = Address::of(url)?;
    let lane = || match build(&host) {
        Ok(store) => Ok(Arc::new(PrefixStore::new(store, prefix.clone()))),
        Err(error) => Err(failure(Operation::Open, &url, "", error)),
    };
    let (primary, hedge) = (lane()?, lane()?);
    let bucket = Bucket::new(&url, Arc::clone(&primary) as _, Staging::Nowhere);
    let uploads = own_uploads.then(Uploads::default);
    Ok(Arc::new(Cloud { bucket, capabilities, uploads, lanes: [primary, hedge] }))
}

fn no_retries() -> RetryConfig {
    RetryConfig { max_retries: 0, ..RetryConfig::default() }
}

/// The uploads of this process in a store that does not tell uploads apart: Azure keeps blocks by name alone. Here they begin
/// and end as elsewhere, so that nothing is added to an object that is complete, or made of an upload that was given up.
#[derive(Debug, Default)]
struct Uploads {
    begun: AtomicU64,
    /// With their names: an id alone may be one of an earlier process.
    open: Mutex<HashSet<(String, UploadId)>>,
}

impl Uploads {
    fn begin(&self, name: &str) -> UploadId {
        let id = UploadId(self.begun.fetch_add(1, Ordering::Relaxed).to_string().into());
        self.lock().insert((name.to_owned(), id.clone()));
        id
    }

    fn is_open(&self, upload: UploadRef<'_>) -> bool {
        self.lock().contains(&(upload.name.to_owned(), upload.id.clone()))
    }

    fn end(&self, upload: UploadRef<'_>) {
        self.lock().remove(&(upload.name.to_owned(), upload.id.clone()));
    }

    fn lock(&self) -> MutexGuard<'_, HashSet<(String, UploadId)>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct Cloud<T> {
    /// The first lane, for what has no lane.
    bucket: Bucket,
    capabilities: &'static Capabilities,
    /// Where the store has no uploads itself.
    uploads: Option<Uploads>,
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

    fn check_open(&self, operation: Operation, upload: UploadRef<'_>) -> Result<(), StoreError> {
        if self.uploads.as_ref().is_some_and(|uploads| !uploads.is_open(upload)) {
            return Err(self.bucket.error(operation, upload.name, StoreErrorKind::NoSuchUpload));
        }
        Ok(())
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
            let done = done.map_err(|error| self.bucket.failure(Operation::Put, name, error))?;
            Ok(tag(done.e_tag))
        })
    }

    fn create<'a>(&'a self, name: &'a str) -> BoxFuture<'a, Result<UploadId, StoreError>> {
        Box::pin(async move {
            let path = self.bucket.path(Operation::Create, name)?;
            if let Some(uploads) = &self.uploads {
                return Ok(uploads.begin(name));
            }
            let id = self.lane(Lane::Primary).create_multipart(&path).await;
            Ok(UploadId(id.map_err(|error| self.bucket.failure(Operation::Create, name, error))?.into()))
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
            self.check_open(Operation::PutPart, upload)?;
            let id = upload.id.0.to_string();
            let part = self.lane(lane).put_part(&path, &id, index as usize, payload(&body)).await;
            let part = part.map_err(|error| self.bucket.failure(Operation::PutPart, upload.name, error))?;
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
            self.check_open(operation, upload)?;
            let ids = parts.iter().map(|part| PartId { content_id: part.tag.0.to_string() }).collect();
            let id = upload.id.0.to_string();
            let done = self.lane(Lane::Primary).complete_multipart(&path, &id, ids).await;
            let done = done.map_err(|error| self.bucket.failure(operation, name, error))?;
            if let Some(uploads) = &self.uploads {
                uploads.end(upload);
            }
            Ok(tag(done.e_tag))
        })
    }

    fn abort<'a>(&'a self, upload: UploadRef<'a>) -> BoxFuture<'a, Result<(), StoreError>> {
        Box::pin(async move {
            let path = self.bucket.path(Operation::Abort, upload.name)?;
            if let Some(uploads) = &self.uploads {
                uploads.end(upload);
                return Ok(());
            }
            let id = upload.id.0.to_string();
            match self.lane(Lane::Primary).abort_multipart(&path, &id).await {
                Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(()),
                Err(error) => Err(self.bucket.failure(Operation::Abort, upload.name, error)),
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
