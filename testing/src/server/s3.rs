//! The S3 operations of the test server, between the protocol as `s3s` speaks it and server/bucket.rs.

use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use futures_util::{StreamExt as _, stream};
use s3s::auth::{S3Auth, SecretKey};
use s3s::dto::*;
use s3s::{S3, S3Request, S3Response, S3Result, s3_error};

use super::blob::{Blob, Writer, pieces};
use super::bucket::{self, Bucket};
use super::{SECRET_KEY, State, lock};

pub(super) struct Operations(pub(super) Arc<State>);

pub(super) struct Keyring(pub(super) Arc<State>);

#[async_trait::async_trait]
impl S3Auth for Keyring {
    async fn get_secret_key(&self, access_key: &str) -> S3Result<SecretKey> {
        let keys = lock(&self.0.keys);
        if keys.valid == access_key {
            Ok(SecretKey::from(SECRET_KEY))
        } else if keys.expired.contains(access_key) {
            Err(s3_error!(ExpiredToken, "The provided token has expired."))
        } else {
            Err(s3_error!(InvalidAccessKeyId))
        }
    }
}

#[async_trait::async_trait]
impl S3 for Operations {
    async fn put_object(&self, req: S3Request<PutObjectInput>) -> S3Result<S3Response<PutObjectOutput>> {
        let input = req.input;
        let exclusive = is_any(input.if_none_match.as_ref())?;
        let blob = self.receive(&input.bucket, input.body, input.content_length, input.content_md5).await?;
        let random = self.0.random();
        let tag = self.with(&input.bucket, |bucket| bucket.put(&input.key, blob, exclusive, random))?;
        Ok(S3Response::new(PutObjectOutput { e_tag: Some(quoted(&tag)), ..Default::default() }))
    }

    async fn create_multipart_upload(
        &self,
        req: S3Request<CreateMultipartUploadInput>,
    ) -> S3Result<S3Response<CreateMultipartUploadOutput>> {
        let input = req.input;
        let random = self.0.random();
        let id = self.with(&input.bucket, |bucket| Ok(bucket.create(&input.key, random)))?;
        Ok(S3Response::new(CreateMultipartUploadOutput {
            bucket: Some(input.bucket),
            key: Some(input.key),
            upload_id: Some(id),
            ..Default::default()
        }))
    }

    async fn upload_part(&self, req: S3Request<UploadPartInput>) -> S3Result<S3Response<UploadPartOutput>> {
        let input = req.input;
        // Before the body is taken, as AWS does.
        self.with(&input.bucket, |bucket| bucket.upload(&input.key, &input.upload_id).map(drop))?;
        let blob = self.receive(&input.bucket, input.body, input.content_length, input.content_md5).await?;
        let random = self.0.random();
        let number = u32::try_from(input.part_number).unwrap_or(0);
        let tag = self.with(&input.bucket, |bucket| {
            bucket.put_part(&input.key, &input.upload_id, number, blob, random)
        })?;
        Ok(S3Response::new(UploadPartOutput { e_tag: Some(quoted(&tag)), ..Default::default() }))
    }

    async fn upload_part_copy(
        &self,
        req: S3Request<UploadPartCopyInput>,
    ) -> S3Result<S3Response<UploadPartCopyOutput>> {
        let input = req.input;
        let CopySource::Bucket { bucket: from, key, version_id: None } = &input.copy_source else {
            return Err(s3_error!(NotImplemented));
        };
        self.with(&input.bucket, |bucket| bucket.upload(&input.key, &input.upload_id).map(drop))?;
        let source = self.with(from, |bucket| bucket.object(key).cloned())?;
        let range = match &input.copy_source_range {
            Some(text) => copy_range(text, source.bytes)?,
            None => 0..source.bytes,
        };
        let (limit, random_tags) =
            self.with(&input.bucket, |bucket| Ok((bucket.rules.part_bytes_max, bucket.rules.random_tags)))?;
        let bytes = range.end - range.start;
        if bytes > limit {
            return Err(s3_error!(EntityTooLarge));
        }
        let mut writer = Writer::new(self.0.blob_path(), bytes, !random_tags).map_err(internal)?;
        for piece in pieces(&source.blobs, range) {
            writer.push(&piece.map_err(internal)?).map_err(internal)?;
        }
        let random = self.0.random();
        let number = u32::try_from(input.part_number).unwrap_or(0);
        let tag = self.with(&input.bucket, |bucket| {
            bucket.put_part(&input.key, &input.upload_id, number, writer.finish(), random)
        })?;
        let result = CopyPartResult { e_tag: Some(quoted(&tag)), ..Default::default() };
        Ok(S3Response::new(UploadPartCopyOutput { copy_part_result: Some(result), ..Default::default() }))
    }

    async fn complete_multipart_upload(
        &self,
        req: S3Request<CompleteMultipartUploadInput>,
    ) -> S3Result<S3Response<CompleteMultipartUploadOutput>> {
        let input = req.input;
        let exclusive = is_any(input.if_none_match.as_ref())?;
        let mut parts = Vec::new();
        for part in input.multipart_upload.and_then(|upload| upload.parts).unwrap_or_default() {
            match (part.part_number.map(u32::try_from), part.e_tag) {
                (Some(Ok(number)), Some(tag)) => parts.push((number, tag.trim_matches('"').to_owned())),
                _ => return Err(s3_error!(MalformedXML)),
            }
        }
        let random = self.0.random();
        let tag = self.with(&input.bucket, |bucket| {
            bucket.complete(&input.key, &input.upload_id, &parts, exclusive, random)
        })?;
        Ok(S3Response::new(CompleteMultipartUploadOutput {
            bucket: Some(input.bucket),
            key: Some(input.key),
            e_tag: Some(quoted(&tag)),
            ..Default::default()
        }))
    }

    async fn abort_multipart_upload(
        &self,
        req: S3Request<AbortMultipartUploadInput>,
    ) -> S3Result<S3Response<AbortMultipartUploadOutput>> {
        let input = req.input;
        self.with(&input.bucket, |bucket| bucket.abort(&input.key, &input.upload_id))?;
        Ok(S3Response::new(AbortMultipartUploadOutput::default()))
    }

    async fn list_parts(&self, req: S3Request<ListPartsInput>) -> S3Result<S3Response<ListPartsOutput>> {
        let input = req.input;
        let marker: u32 = input.part_number_marker.map_or(0, |marker| marker.parse().unwrap_or(0));
        let (parts, more) = self.with(&input.bucket, |bucket| {
            if !bucket.rules.list_parts {
                return Err(s3_error!(NotImplemented));
            }
            let page = page_items(bucket, input.max_parts);
            let upload = bucket.upload(&input.key, &input.upload_id)?;
            let mut after = upload.parts.range(marker.saturating_add(1)..);
            let parts: Vec<Part> = after
                .by_ref()
                .take(page)
                .map(|(number, part)| Part {
                    part_number: Some(*number as i32),
                    e_tag: Some(quoted(&part.tag)),
                    size: Some(part.blob.bytes as i64),
                    last_modified: Some(part.modified.into()),
                    ..Default::default()
                })
                .collect();
            Ok((parts, after.next().is_some()))
        })?;
        let last = parts.last().and_then(|part| part.part_number).filter(|_| more);
        Ok(S3Response::new(ListPartsOutput {
            bucket: Some(input.bucket),
            key: Some(input.key),
            upload_id: Some(input.upload_id),
            is_truncated: Some(more),
            next_part_number_marker: last.map(|number| number.to_string()),
            parts: Some(parts),
            ..Default::default()
        }))
    }

    async fn list_multipart_uploads(
        &self,
        req: S3Request<ListMultipartUploadsInput>,
    ) -> S3Result<S3Response<ListMultipartUploadsOutput>> {
        let input = req.input;
        let prefix = input.prefix.clone().unwrap_or_default();
        let key_marker = input.key_marker.unwrap_or_default();
        let id_marker = input.upload_id_marker.unwrap_or_default();
        let (uploads, more) = self.with(&input.bucket, |bucket| {
            if !bucket.rules.list_uploads {
                return Err(s3_error!(NotImplemented));
            }
            let page = page_items(bucket, input.max_uploads);
            // After the marker's upload; without an id, after all uploads of the marker's name.
            let after_marker = |name: &str, id: &str| match name.cmp(&key_marker) {
                std::cmp::Ordering::Equal => !id_marker.is_empty() && id > id_marker.as_str(),
                order => order.is_gt(),
            };
            let mut after = bucket.uploads.iter().filter(|((name, id), _)| {
                name.starts_with(&prefix) && (key_marker.is_empty() || after_marker(name, id))
            });
            let uploads: Vec<MultipartUpload> = after
                .by_ref()
                .take(page)
                .map(|((name, id), upload)| MultipartUpload {
                    key: Some(name.clone()),
                    upload_id: Some(id.clone()),
                    initiated: Some(upload.created.into()),
                    ..Default::default()
                })
                .collect();
            Ok((uploads, after.next().is_some()))
        })?;
        let last = uploads.last().filter(|_| more);
        Ok(S3Response::new(ListMultipartUploadsOutput {
            bucket: Some(input.bucket),
            prefix: input.prefix,
            is_truncated: Some(more),
            next_key_marker: last.and_then(|upload| upload.key.clone()),
            next_upload_id_marker: last.and_then(|upload| upload.upload_id.clone()),
            uploads: Some(uploads),
            ..Default::default()
        }))
    }

    async fn list_objects_v2(
        &self,
        req: S3Request<ListObjectsV2Input>,
    ) -> S3Result<S3Response<ListObjectsV2Output>> {
        let input = req.input;
        let prefix = input.prefix.clone().unwrap_or_default();
        // The last name told is token enough.
        let after = match &input.continuation_token {
            Some(token) => {
                BASE64.decode(token).ok().and_then(|name| String::from_utf8(name).ok()).ok_or_else(|| {
                    s3_error!(InvalidArgument, "The continuation token provided is incorrect")
                })?
            }
            None => input.start_after.clone().unwrap_or_default(),
        };
        let (objects, more) = self.with(&input.bucket, |bucket| {
            let page = page_items(bucket, input.max_keys);
            let mut matching = bucket
                .objects
                .range(prefix.clone()..)
                .take_while(|(name, _)| name.starts_with(&prefix))
                .filter(|(name, _)| **name > after);
            let objects: Vec<Object> = matching
                .by_ref()
                .take(page)
                .map(|(name, object)| Object {
                    key: Some(name.clone()),
                    size: Some(object.bytes as i64),
                    e_tag: Some(quoted(&object.tag)),
                    last_modified: Some(object.modified.into()),
                    ..Default::default()
                })
                .collect();
            Ok((objects, matching.next().is_some()))
        })?;
        let last = objects.last().and_then(|object| object.key.as_deref()).filter(|_| more);
        Ok(S3Response::new(ListObjectsV2Output {
            name: Some(input.bucket),
            prefix: input.prefix,
            key_count: Some(objects.len() as i32),
            is_truncated: Some(more),
            next_continuation_token: last.map(|name| BASE64.encode(name)),
            contents: Some(objects),
            ..Default::default()
        }))
    }

    async fn get_object(&self, req: S3Request<GetObjectInput>) -> S3Result<S3Response<GetObjectOutput>> {
        let input = req.input;
        let object = self.with(&input.bucket, |bucket| bucket.object(&input.key).cloned())?;
        let range = match &input.range {
            Some(range) => range.check(object.bytes)?,
            None => 0..object.bytes,
        };
        let content_range = input
            .range
            .is_some()
            .then(|| format!("bytes {}-{}/{}", range.start, range.end.saturating_sub(1), object.bytes));
        let body = StreamingBlob::wrap(stream::iter(pieces(&object.blobs, range.clone())));
        Ok(S3Response::new(GetObjectOutput {
            body: Some(body),
            content_length: Some((range.end - range.start) as i64),
            content_range,
            accept_ranges: Some("bytes".to_owned()),
            e_tag: Some(quoted(&object.tag)),
            last_modified: Some(object.modified.into()),
            ..Default::default()
        }))
    }

    async fn head_object(&self, req: S3Request<HeadObjectInput>) -> S3Result<S3Response<HeadObjectOutput>> {
        let input = req.input;
        let bucket::Object { bytes, tag, modified, .. } =
            self.with(&input.bucket, |bucket| bucket.object(&input.key).cloned())?;
        Ok(S3Response::new(HeadObjectOutput {
            content_length: Some(bytes as i64),
            accept_ranges: Some("bytes".to_owned()),
            e_tag: Some(quoted(&tag)),
            last_modified: Some(modified.into()),
            ..Default::default()
        }))
    }

    async fn delete_object(
        &self,
        req: S3Request<DeleteObjectInput>,
    ) -> S3Result<S3Response<DeleteObjectOutput>> {
        let input = req.input;
        self.with(&input.bucket, |bucket| {
            bucket.objects.remove(&input.key);
            Ok(())
        })?;
        Ok(S3Response::new(DeleteObjectOutput::default()))
    }

    async fn head_bucket(&self, req: S3Request<HeadBucketInput>) -> S3Result<S3Response<HeadBucketOutput>> {
        self.with(&req.input.bucket, |_| Ok(()))?;
        Ok(S3Response::new(HeadBucketOutput {
            bucket_region: Some(super::REGION.to_owned()),
            ..Default::default()
        }))
    }
}

impl Operations {
    fn with<R>(&self, bucket: &str, f: impl FnOnce(&mut Bucket) -> S3Result<R>) -> S3Result<R> {
        f(lock(&self.0.buckets).get_mut(bucket).ok_or_else(|| s3_error!(NoSuchBucket))?)
    }

    /// Takes a body whole. Nothing of it stays where it ends early or is not what its checksum says.
    async fn receive(
        &self,
        bucket: &str,
        body: Option<StreamingBlob>,
        length: Option<i64>,
        content_md5: Option<String>,
    ) -> S3Result<Blob> {
        let (limit, random_tags) =
            self.with(bucket, |bucket| Ok((bucket.rules.part_bytes_max, bucket.rules.random_tags)))?;
        let announced = length.map(|length| u64::try_from(length).unwrap_or(0));
        if announced.is_some_and(|bytes| bytes > limit) {
            return Err(s3_error!(EntityTooLarge));
        }
        let with_md5 = !random_tags || content_md5.is_some();
        let mut writer =
            Writer::new(self.0.blob_path(), announced.unwrap_or(0), with_md5).map_err(internal)?;
        if let Some(mut body) = body {
            while let Some(bytes) = body.next().await {
                writer
                    .push(&bytes.map_err(|error| s3_error!(IncompleteBody, "{error}"))?)
                    .map_err(internal)?;
            }
        }
        let mut blob = writer.finish();
        if announced.is_some_and(|bytes| bytes != blob.bytes) {
            return Err(s3_error!(IncompleteBody));
        }
        if let Some(expected) = content_md5 {
            let expected = BASE64.decode(expected).map_err(|_| s3_error!(InvalidDigest))?;
            if blob.md5.is_none_or(|md5| md5[..] != expected[..]) {
                return Err(s3_error!(BadDigest));
            }
        }
        if random_tags {
            blob.md5 = None;
        }
        Ok(blob)
    }
}

/// Of `bytes=first-last`, both inclusive, the only form that copies take.
fn copy_range(text: &str, size: u64) -> S3Result<std::ops::Range<u64>> {
    let parse = || {
        let (first, last) = text.strip_prefix("bytes=")?.split_once('-')?;
        let (first, last): (u64, u64) = (first.parse().ok()?, last.parse().ok()?);
        (first <= last && last < size).then_some(first..last + 1)
    };
    parse().ok_or_else(|| s3_error!(InvalidArgument, "Range specified is not valid for source object"))
}

fn quoted(tag: &str) -> ETag {
    format!("\"{tag}\"")
}

fn internal(error: std::io::Error) -> s3s::S3Error {
    s3s::S3Error::internal_error(error)
}

/// Whether the condition is `*`; AWS takes no other for writes.
fn is_any(condition: Option<&IfNoneMatch>) -> S3Result<bool> {
    match condition.map(String::as_str) {
        None => Ok(false),
        Some("*") => Ok(true),
        Some(_) => Err(s3_error!(NotImplemented, "If-None-Match takes * only")),
    }
}

fn page_items(bucket: &Bucket, asked: Option<i32>) -> usize {
    let most = bucket.rules.page_items_max;
    asked.map_or(most, |asked| u32::try_from(asked).unwrap_or(0).min(most)) as usize
}
