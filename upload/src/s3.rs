//! S3 and everything that speaks its protocol, over `aws-sdk-s3`: one request per operation, nothing retried.
//!
//! How a URL is read and what each kind of server takes is in `s3/address.rs`, what an answer means in `s3/errors.rs`,
//! clients and credentials in `s3/client.rs`, bodies and their checksums in `s3/body.rs`. Time limits, retries and the
//! choice of a bucket are the caller's business.
//!
//! Invariants:
//! 1. A part, an object or a commit counts only when the answer is a success with a tag. Redirects are not followed.
//! 2. Every attempt is signed on its own. One that was refused for its time or its credentials, and so did nothing, is
//!    sent once more with better ones.
//! 3. Secrets are never part of a URL: URLs stand in handles.
#![forbid(unsafe_code)]

mod address;
mod body;
mod client;
mod errors;

use std::env;
use std::error::Error as StdError;
use std::future::Future;
use std::ops::Range;
use std::sync::Arc;
use std::time::SystemTime;

use aws_sdk_s3::Client;
use aws_sdk_s3::error::{ProvideErrorMetadata, SdkError};
use aws_sdk_s3::operation::get_object::GetObjectOutput;
use aws_sdk_s3::primitives::DateTime;
use aws_sdk_s3::types::{CompletedMultipartUpload, CompletedPart};
use aws_smithy_runtime_api::client::orchestrator::HttpResponse;
use bytes::{Bytes, BytesMut};

use self::address::{Address, Refusal};
use self::body::{Proof, Retirement};
use self::client::ClientMaker;
use self::errors::{Failure, Repair};
use crate::store::{
    Body, BoxFuture, Capabilities, EntityTag, Lane, ListedObject, ListedPart, ListedUpload, Marker,
    Operation, Page, Store, StoreError, StoreErrorKind, UploadId, UploadRef, UploadedPart, Watch, check_name,
    every_page,
};

/// Opens a bucket. Nothing is asked of it, nor of who gives out credentials, before the first request.
pub(crate) fn open(url: &str) -> Result<Arc<dyn Store>, StoreError> {
    let address = read(url)?;
    Ok(Arc::new(S3 { url: trimmed(url).into(), address, clients: ClientMaker::new(client::IDLE_MAX) }))
}

/// The URL without slashes at the end of the prefix.
pub(crate) fn normal(url: &str) -> Result<String, StoreError> {
    read(url)?;
    Ok(trimmed(url))
}

fn read(url: &str) -> Result<Address, StoreError> {
    let variable = |name| env::var(name).ok().filter(|value| !value.is_empty());
    let endpoint = variable("AWS_ENDPOINT_URL_S3").or_else(|| variable("AWS_ENDPOINT_URL"));
    Address::parse(url, endpoint).map_err(|refusal| {
        let (url, why) = match refusal {
            Refusal::Invalid(why) => (url.to_owned(), why),
            Refusal::Credentials => (
                address::redacted(url),
                "it has credentials, and URLs stand in handles; give them by the environment, a profile or a role"
                    .to_owned(),
            ),
        };
        StoreError::new(Operation::Open, &url, "", StoreErrorKind::InvalidUrl(why))
    })
}

fn trimmed(url: &str) -> String {
    let url = url.trim_end_matches('/');
    match url.split_once('?') {
        Some((place, query)) => format!("{}?{query}", place.trim_end_matches('/')),
        None => url.to_owned(),
    }
}

#[derive(Debug)]
struct S3 {
    url: Arc<str>,
    address: Address,
    clients: ClientMaker,
}

impl S3 {
    fn error(&self, operation: Operation, name: &str, kind: StoreErrorKind) -> StoreError {
        StoreError::new(operation, &self.url, name, kind)
    }

    /// An answer that is a success and makes no sense.
    fn nonsense(&self, operation: Operation, name: &str, what: &str) -> StoreError {
        StoreError::caused(operation, &self.url, name, StoreErrorKind::Interrupted, what)
    }

    fn key(&self, operation: Operation, name: &str) -> Result<String, StoreError> {
        let invalid = |why| self.error(operation, name, StoreErrorKind::InvalidName(why));
        check_name(name).map_err(invalid)?;
        let key = format!("{}{name}", self.address.prefix);
        if key.len() > crate::store::NAME_BYTES_MAX {
            return Err(invalid("with the prefix of the bucket it is longer than 1024 bytes"));
        }
        Ok(key)
    }

    /// The key prefix to list by, and the one that found keys must have.
    fn key_prefix(&self, operation: Operation, prefix: &str) -> Result<(String, String), StoreError> {
        if let Some((folder, _)) = prefix.rsplit_once('/') {
            self.key(operation, folder)?;
        }
        let wanted = format!("{}{prefix}", self.address.prefix);
        let asked = match wanted.rfind('/') {
            Some(at) if self.address.lists_folders => wanted[..=at].to_owned(),
            None if self.address.lists_folders => String::new(),
            _ => wanted.clone(),
        };
        Ok((asked, wanted))
    }

    /// Sends a request, and once more if it was refused for what can be put right here.
    async fn send<T, E, F>(
        &self,
        operation: Operation,
        name: &str,
        lane: Lane,
        request: impl Fn(Client) -> F + Send + Sync,
    ) -> Result<T, StoreError>
    where
        E: ProvideErrorMetadata + StdError + 'static,
        F: Future<Output = Result<T, SdkError<E, HttpResponse>>> + Send,
    {
        self.try_send(operation, lane, request)
            .await
            .map_err(|failure| failure.into_error(operation, &self.url, name))
    }

    async fn try_send<T, E, F>(
        &self,
        operation: Operation,
        lane: Lane,
        request: impl Fn(Client) -> F + Send + Sync,
    ) -> Result<T, Failure>
    where
        E: ProvideErrorMetadata + StdError + 'static,
        F: Future<Output = Result<T, SdkError<E, HttpResponse>>> + Send,
    {
        let mut clients = self.clients.clients(&self.address, None).await.map_err(Failure::unconfigured)?;
        let failure = match request(clients.of(lane)).await {
            Ok(answer) => return Ok(answer),
            Err(error) => Failure::of(operation, &error, SystemTime::now()),
        };
        match failure.repair {
            None => return Err(failure),
            Some(Repair::Clock(time)) => self.clients.set_time(time),
            Some(Repair::Credentials) => {
                let renewed = self.clients.clients(&self.address, Some(&clients)).await;
                clients = renewed.map_err(Failure::unconfigured)?;
            }
        }
        tracing::debug!(bucket = &*self.url, %operation, repair = ?failure.repair, "signing a request again");
        request(clients.of(lane)).await.map_err(|error| Failure::of(operation, &error, SystemTime::now()))
    }

    /// The tag without which nothing counts.
    fn tag(&self, operation: Operation, name: &str, tag: Option<&str>) -> Result<EntityTag, StoreError> {
        match tag.map(plain_tag) {
            Some(tag) if !tag.0.is_empty() => Ok(tag),
            _ => Err(self.nonsense(operation, name, "the answer has no ETag")),
        }
    }

    async fn read(
        &self,
        name: &str,
        range: Range<u64>,
        mut watch: Option<&mut dyn Watch>,
    ) -> Result<Bytes, StoreError> {
        let key = self.key(Operation::Get, name)?;
        let Range { start, end } = range;
        let out_of_range =
            |size| self.error(Operation::Get, name, StoreErrorKind::OutOfRange { start, end, size });
        if start >= end {
            // Not a range that HTTP knows; the answer is known but for the object's existence and size.
            let size = self.meta(Operation::Get, name).await?.bytes;
            return if start == end && end <= size { Ok(Bytes::new()) } else { Err(out_of_range(size)) };
        }
        let bucket = &self.address.bucket;
        let answer = self
            .try_send(Operation::Get, Lane::Primary, |client| {
                let range = format!("bytes={start}-{}", end - 1);
                client.get_object().bucket(bucket).key(&key).range(range).send()
            })
            .await;
        let answer = match answer {
            Ok(answer) => answer,
            // The range starts behind the end.
            Err(failure) if failure.status == Some(416) => {
                return Err(out_of_range(self.meta(Operation::Get, name).await?.bytes));
            }
            Err(failure) => return Err(failure.into_error(Operation::Get, &self.url, name)),
        };
        let (found, size) = found_range(&answer).ok_or_else(|| {
            self.nonsense(Operation::Get, name, "the answer does not say which bytes it has")
        })?;
        if size < end {
            return Err(out_of_range(size));
        }
        if found != (start..end) {
            return Err(self.nonsense(
                Operation::Get,
                name,
                "the answer has other bytes than those asked for",
            ));
        }
        // Nothing is allocated for the range before this.
        let length = usize::try_from(end - start).map_err(|_| out_of_range(size))?;
        let mut body = answer.body;
        let mut whole = BytesMut::new();
        let mut first = None;
        loop {
            let frame = body.try_next().await.map_err(|error| {
                StoreError::caused(Operation::Get, &self.url, name, StoreErrorKind::Interrupted, error)
            })?;
            let Some(frame) = frame else { break };
            let so_far = first.as_ref().map_or(whole.len(), Bytes::len);
            if so_far + frame.len() > length {
                return Err(self.nonsense(Operation::Get, name, "the answer has more bytes than it says"));
            }
            if frame.len() == length {
                first = Some(frame);
                continue;
            }
            if whole.is_empty() {
                whole.reserve(length);
            }
            whole.extend_from_slice(&frame);
            if let Some(watch) = &mut watch {
                watch.see(&whole);
            }
        }
        let bytes = first.unwrap_or_else(|| whole.freeze());
        if bytes.len() != length {
            return Err(self.nonsense(Operation::Get, name, "the answer has fewer bytes than it says"));
        }
        Ok(bytes)
    }

    async fn meta(&self, operation: Operation, name: &str) -> Result<ListedObject, StoreError> {
        let key = self.key(operation, name)?;
        let bucket = &self.address.bucket;
        // Classified as what it is: HEAD has answers without bodies.
        let answer = self
            .try_send(Operation::Head, Lane::Primary, |client| {
                client.head_object().bucket(bucket).key(&key).send()
            })
            .await
            .map_err(|failure| failure.into_error(operation, &self.url, name))?;
        let bytes = answer.content_length().and_then(|bytes| u64::try_from(bytes).ok());
        Ok(ListedObject {
            name: name.to_owned(),
            bytes: bytes.ok_or_else(|| {
                self.nonsense(operation, name, "the answer does not say the object's length")
            })?,
            tag: plain_tag(answer.e_tag().unwrap_or_default()),
            modified: answer.last_modified().and_then(time),
        })
    }
}

impl Store for S3 {
    fn url(&self) -> &str {
        &self.url
    }

    fn capabilities(&self) -> &Capabilities {
        &self.address.capabilities
    }

    fn put<'a>(
        &'a self,
        name: &'a str,
        body: Body,
        lane: Lane,
    ) -> BoxFuture<'a, Result<EntityTag, StoreError>> {
        Box::pin(async move {
            let key = self.key(Operation::Put, name)?;
            let address = &self.address;
            let proof = Proof::of(&body, address.checksum).await;
            let answer = self
                .send(Operation::Put, name, lane, |client| {
                    client
                        .put_object()
                        .bucket(&address.bucket)
                        .key(&key)
                        .body(body::stream(&body))
                        .content_length(length(&body))
                        .set_content_md5(proof.md5.clone())
                        .set_if_none_match(address.capabilities.conditional_put.then(|| "*".to_owned()))
                        .set_server_side_encryption(address.sse.as_deref().map(Into::into))
                        .set_ssekms_key_id(address.kms_key.clone())
                        .set_storage_class(address.storage_class.as_deref().map(Into::into))
                        .customize()
                        .interceptor(proof.payload.clone())
                        .interceptor(Retirement::of(&body))
                        .send()
                })
                .await?;
            self.tag(Operation::Put, name, answer.e_tag())
        })
    }

    fn create<'a>(&'a self, name: &'a str) -> BoxFuture<'a, Result<UploadId, StoreError>> {
        Box::pin(async move {
            let key = self.key(Operation::Create, name)?;
            let address = &self.address;
            let answer = self
                .send(Operation::Create, name, Lane::Primary, |client| {
                    client
                        .create_multipart_upload()
                        .bucket(&address.bucket)
                        .key(&key)
                        .set_server_side_encryption(address.sse.as_deref().map(Into::into))
                        .set_ssekms_key_id(address.kms_key.clone())
                        .set_storage_class(address.storage_class.as_deref().map(Into::into))
                        .send()
                })
                .await?;
            match answer.upload_id() {
                Some(id) if !id.is_empty() => Ok(UploadId(id.into())),
                _ => Err(self.nonsense(Operation::Create, name, "the answer has no upload id")),
            }
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
            let key = self.key(Operation::PutPart, upload.name)?;
            let number = self.part_number(Operation::PutPart, upload.name, number)?;
            let proof = Proof::of(&body, self.address.checksum).await;
            let answer = self
                .send(Operation::PutPart, upload.name, lane, |client| {
                    client
                        .upload_part()
                        .bucket(&self.address.bucket)
                        .key(&key)
                        .upload_id(&*upload.id.0)
                        .part_number(number)
                        .body(body::stream(&body))
                        .content_length(length(&body))
                        .set_content_md5(proof.md5.clone())
                        .customize()
                        .interceptor(proof.payload.clone())
                        .interceptor(Retirement::of(&body))
                        .send()
                })
                .await?;
            self.tag(Operation::PutPart, upload.name, answer.e_tag())
        })
    }

    fn copy_part<'a>(
        &'a self,
        upload: UploadRef<'a>,
        number: u32,
        from: &'a str,
        range: Range<u64>,
    ) -> BoxFuture<'a, Result<EntityTag, StoreError>> {
        Box::pin(async move {
            let (operation, name) = (Operation::CopyPart, upload.name);
            let key = self.key(operation, name)?;
            let number = self.part_number(operation, name, number)?;
            let bucket = &self.address.bucket;
            let source = copy_source(bucket, &self.key(operation, from)?);
            let Range { start, end } = range;
            let last = end.checked_sub(1).filter(|last| start <= *last);
            let last = last.ok_or_else(|| self.error(operation, name, StoreErrorKind::InvalidPart))?;
            let answer = self
                .send(operation, name, Lane::Primary, |client| {
                    client
                        .upload_part_copy()
                        .bucket(bucket)
                        .key(&key)
                        .upload_id(&*upload.id.0)
                        .part_number(number)
                        .copy_source(&source)
                        .copy_source_range(format!("bytes={start}-{last}"))
                        .send()
                })
                .await?;
            self.tag(operation, name, answer.copy_part_result().and_then(|part| part.e_tag()))
        })
    }

    fn list_parts<'a>(&'a self, upload: UploadRef<'a>) -> BoxFuture<'a, Result<Vec<ListedPart>, StoreError>> {
        Box::pin(async move {
            let (operation, name) = (Operation::ListParts, upload.name);
            let key = self.key(operation, name)?;
            let page = |from: Option<Marker>| {
                let key = &key;
                async move {
                    let marker = from.map(|(marker, _)| marker);
                    let page = self
                        .send(operation, name, Lane::Primary, |client| {
                            client
                                .list_parts()
                                .bucket(&self.address.bucket)
                                .key(key)
                                .upload_id(&*upload.id.0)
                                .set_part_number_marker(marker.clone())
                                .send()
                        })
                        .await?;
                    let mut found = Vec::new();
                    for part in page.parts() {
                        let number = part.part_number().and_then(|number| u32::try_from(number).ok());
                        let bytes = part.size().and_then(|bytes| u64::try_from(bytes).ok());
                        let (Some(number), Some(bytes)) = (number, bytes) else {
                            return Err(self.nonsense(
                                operation,
                                name,
                                "the answer has a part without number or size",
                            ));
                        };
                        let tag = self.tag(operation, name, part.e_tag())?;
                        found.push(ListedPart { number, tag, bytes });
                    }
                    let next = page.next_part_number_marker().map(|marker| (marker.to_owned(), None));
                    Ok(Page { found, next: self.next(operation, name, page.is_truncated(), next)? })
                }
            };
            let mut found = every_page(|| self.lost(operation, name), page).await?;
            found.sort_unstable_by_key(|part| part.number);
            Ok(found)
        })
    }

    fn complete<'a>(
        &'a self,
        upload: UploadRef<'a>,
        parts: &'a [UploadedPart],
    ) -> BoxFuture<'a, Result<EntityTag, StoreError>> {
        Box::pin(async move {
            let (operation, name) = (Operation::Complete, upload.name);
            let key = self.key(operation, name)?;
            let mut list = Vec::with_capacity(parts.len());
            for part in parts {
                let number = self.part_number(operation, name, part.number)?;
                let tag = format!("\"{}\"", part.tag.0);
                list.push(CompletedPart::builder().part_number(number).e_tag(tag).build());
            }
            let list = CompletedMultipartUpload::builder().set_parts(Some(list)).build();
            let condition = self.address.capabilities.conditional_put.then(|| "*".to_owned());
            let answer = self
                .send(operation, name, Lane::Primary, |client| {
                    client
                        .complete_multipart_upload()
                        .bucket(&self.address.bucket)
                        .key(&key)
                        .upload_id(&*upload.id.0)
                        .multipart_upload(list.clone())
                        .set_if_none_match(condition.clone())
                        .send()
                })
                .await?;
            self.tag(operation, name, answer.e_tag())
        })
    }

    fn abort<'a>(&'a self, upload: UploadRef<'a>) -> BoxFuture<'a, Result<(), StoreError>> {
        Box::pin(async move {
            let key = self.key(Operation::Abort, upload.name)?;
            let outcome = self
                .send(Operation::Abort, upload.name, Lane::Primary, |client| {
                    client
                        .abort_multipart_upload()
                        .bucket(&self.address.bucket)
                        .key(&key)
                        .upload_id(&*upload.id.0)
                        .send()
                })
                .await;
            match outcome {
                Err(error) if *error.kind() != StoreErrorKind::NoSuchUpload => Err(error),
                _ => Ok(()),
            }
        })
    }

    fn list_uploads<'a>(&'a self, prefix: &'a str) -> BoxFuture<'a, Result<Vec<ListedUpload>, StoreError>> {
        Box::pin(async move {
            let page = |from| async move { self.list_uploads_page(prefix, Option::as_ref(&from)).await };
            let mut found = every_page(|| self.lost(Operation::ListUploads, prefix), page).await?;
            found.sort_unstable_by(|a, b| (&a.name, &a.id).cmp(&(&b.name, &b.id)));
            Ok(found)
        })
    }

    fn list_uploads_page<'a>(
        &'a self,
        prefix: &'a str,
        from: Option<&'a Marker>,
    ) -> BoxFuture<'a, Result<Page<ListedUpload>, StoreError>> {
        Box::pin(async move {
            let operation = Operation::ListUploads;
            let (asked, wanted) = self.key_prefix(operation, prefix)?;
            let page = self
                .send(operation, prefix, Lane::Primary, |client| {
                    let (key, id) = from.cloned().unzip();
                    client
                        .list_multipart_uploads()
                        .bucket(&self.address.bucket)
                        .prefix(&asked)
                        .set_key_marker(key)
                        .set_upload_id_marker(id.flatten())
                        .send()
                })
                .await?;
            let mut found = Vec::new();
            for upload in page.uploads() {
                let (Some(key), Some(id)) = (upload.key(), upload.upload_id()) else { continue };
                if let Some(name) = self.name(key, &wanted) {
                    let created = upload.initiated().and_then(time);
                    found.push(ListedUpload { name, id: UploadId(id.into()), created });
                }
            }
            let next = page
                .next_key_marker()
                .map(|key| (key.to_owned(), page.next_upload_id_marker().map(str::to_owned)));
            Ok(Page { found, next: self.next(operation, prefix, page.is_truncated(), next)? })
        })
    }

    fn get<'a>(&'a self, name: &'a str, range: Range<u64>) -> BoxFuture<'a, Result<Bytes, StoreError>> {
        Box::pin(self.read(name, range, None))
    }

    fn get_watched<'a>(
        &'a self,
        name: &'a str,
        range: Range<u64>,
        watch: &'a mut dyn Watch,
    ) -> BoxFuture<'a, Result<Bytes, StoreError>> {
        Box::pin(self.read(name, range, Some(watch)))
    }

    fn head<'a>(&'a self, name: &'a str) -> BoxFuture<'a, Result<ListedObject, StoreError>> {
        Box::pin(self.meta(Operation::Head, name))
    }

    fn delete<'a>(&'a self, name: &'a str) -> BoxFuture<'a, Result<(), StoreError>> {
        Box::pin(async move {
            let key = self.key(Operation::Delete, name)?;
            let bucket = &self.address.bucket;
            let outcome = self
                .send(Operation::Delete, name, Lane::Primary, |client| {
                    client.delete_object().bucket(bucket).key(&key).send()
                })
                .await;
            match outcome {
                Err(error) if !error.is_not_found() => Err(error),
                _ => Ok(()),
            }
        })
    }

    fn list<'a>(&'a self, prefix: &'a str) -> BoxFuture<'a, Result<Vec<ListedObject>, StoreError>> {
        Box::pin(async move {
            let page = |from| async move { self.list_page(prefix, Option::as_ref(&from)).await };
            let mut found = every_page(|| self.lost(Operation::List, prefix), page).await?;
            found.sort_unstable_by(|a, b| a.name.cmp(&b.name));
            Ok(found)
        })
    }

    fn list_page<'a>(
        &'a self,
        prefix: &'a str,
        from: Option<&'a Marker>,
    ) -> BoxFuture<'a, Result<Page<ListedObject>, StoreError>> {
        Box::pin(async move {
            let operation = Operation::List;
            let (asked, wanted) = self.key_prefix(operation, prefix)?;
            let page = self
                .send(operation, prefix, Lane::Primary, |client| {
                    client
                        .list_objects_v2()
                        .bucket(&self.address.bucket)
                        .prefix(&asked)
                        .set_continuation_token(from.map(|(token, _)| token.clone()))
                        .send()
                })
                .await?;
            let mut found = Vec::new();
            for object in page.contents() {
                let bytes = object.size().and_then(|bytes| u64::try_from(bytes).ok());
                let (Some(key), Some(bytes)) = (object.key(), bytes) else {
                    return Err(self.nonsense(operation, prefix, "the answer has an object without size"));
                };
                if let Some(name) = self.name(key, &wanted) {
                    let tag = plain_tag(object.e_tag().unwrap_or_default());
                    let modified = object.last_modified().and_then(time);
                    found.push(ListedObject { name, bytes, tag, modified });
                }
            }
            let next = page.next_continuation_token().map(|token| (token.to_owned(), None));
            Ok(Page { found, next: self.next(operation, prefix, page.is_truncated(), next)? })
        })
    }
}

impl S3 {
    fn part_number(&self, operation: Operation, name: &str, number: u32) -> Result<i32, StoreError> {
        let number = Some(number).filter(|number| (1..=self.address.capabilities.parts_max).contains(number));
        let number = number.and_then(|number| i32::try_from(number).ok());
        number.ok_or_else(|| self.error(operation, name, StoreErrorKind::InvalidPart))
    }

    /// The name under a key, if it is one of ours and wanted.
    fn name(&self, key: &str, wanted: &str) -> Option<String> {
        if !key.starts_with(wanted) {
            return None;
        }
        key.strip_prefix(&self.address.prefix).map(str::to_owned)
    }

    /// Where the next page begins, if the answer says that there is one.
    fn next(
        &self,
        operation: Operation,
        name: &str,
        truncated: Option<bool>,
        next: Option<Marker>,
    ) -> Result<Option<Marker>, StoreError> {
        match next {
            _ if truncated != Some(true) => Ok(None),
            None => Err(self.lost(operation, name)),
            next => Ok(next),
        }
    }

    fn lost(&self, operation: Operation, name: &str) -> StoreError {
        self.nonsense(operation, name, "the listing goes on without saying where")
    }
}

/// A bucket and a key as a header names them: all but letters, digits, `-._~` and `/` by their code.
fn copy_source(bucket: &str, key: &str) -> String {
    let mut source = format!("{bucket}/");
    for byte in key.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' | b'/' => {
                source.push(char::from(byte));
            }
            _ => source.push_str(&format!("%{byte:02X}")),
        }
    }
    source
}

fn plain_tag(tag: &str) -> EntityTag {
    EntityTag(tag.trim_matches('"').into())
}

fn length(body: &Body) -> i64 {
    i64::try_from(body.len()).unwrap_or(i64::MAX)
}

fn time(time: &DateTime) -> Option<SystemTime> {
    SystemTime::try_from(*time).ok()
}

/// Which bytes an answer has, and the size of the whole object: of `bytes 0-4/10`, or of the length where the server took
/// no notice of the range.
fn found_range(answer: &GetObjectOutput) -> Option<(Range<u64>, u64)> {
    let Some(text) = answer.content_range() else {
        let size = u64::try_from(answer.content_length()?).ok()?;
        return Some((0..size, size));
    };
    let (range, size) = text.strip_prefix("bytes ")?.split_once('/')?;
    let (first, last) = range.split_once('-')?;
    let (first, last): (u64, u64) = (first.parse().ok()?, last.parse().ok()?);
    Some((first..last.checked_add(1)?, size.parse().ok()?))
}
