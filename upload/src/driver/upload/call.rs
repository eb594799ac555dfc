//! What a request of the machine is to a store.
#![forbid(unsafe_code)]

use std::ops::Range;
use std::sync::Arc;

use super::held::Chunk;
use crate::multipart::{Answer, Request};
use crate::store::{Body, BoxFuture, Lane, Operation, Store, StoreError, UploadRef};

pub(super) fn chunks_of(request: &Request) -> Range<u32> {
    match request {
        Request::Put { chunks } => chunks.clone(),
        Request::Part { chunk, .. } => *chunk..chunk.saturating_add(1),
        _ => 0..0,
    }
}

pub(super) fn operation_of(request: &Request) -> Operation {
    match request {
        Request::Put { .. } => Operation::Put,
        Request::Create => Operation::Create,
        Request::Part { .. } => Operation::PutPart,
        Request::Complete { .. } => Operation::Complete,
        Request::ListParts { .. } => Operation::ListParts,
        Request::Abort { .. } => Operation::Abort,
        Request::Head => Operation::Head,
        Request::Delete => Operation::Delete,
    }
}

pub(super) fn body_of(chunks: &[Arc<Chunk>]) -> Body {
    match chunks {
        [chunk] => chunk.body.clone(),
        _ => Body::new(chunks.iter().flat_map(|chunk| chunk.body.slices()).cloned().collect()),
    }
}

/// The request as a call of the store.
pub(super) fn call(
    store: Arc<dyn Store>,
    name: String,
    request: Request,
    body: Body,
    lane: Lane,
) -> BoxFuture<'static, Result<Answer, StoreError>> {
    Box::pin(async move {
        let reference = |id| UploadRef { name: &name, id };
        match &request {
            Request::Put { .. } => store.put(&name, body, lane).await.map(Answer::Tag),
            Request::Create => store.create(&name).await.map(Answer::Created),
            Request::Part { upload, number, .. } => {
                store.put_part(reference(upload), *number, body, lane).await.map(Answer::Tag)
            }
            Request::Complete { upload, parts } => {
                store.complete(reference(upload), parts).await.map(Answer::Tag)
            }
            Request::ListParts { upload } => store.list_parts(reference(upload)).await.map(Answer::Parts),
            Request::Abort { upload } => store.abort(reference(upload)).await.map(|()| Answer::Done),
            Request::Head => store.head(&name).await.map(Answer::Object),
            Request::Delete => store.delete(&name).await.map(|()| Answer::Done),
        }
    })
}
