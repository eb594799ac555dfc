//! What an answer of Google's or Azure's storage that is no success means. Pure.
//!
//! `object_store` has types for a few statuses of a few requests, and its errors can be asked for no more: what the server
//! said is in their text. The server's code decides where there is one; answers to HEAD have none.
#![forbid(unsafe_code)]

use std::error::Error as StdError;

use object_store::client::{HttpError, HttpErrorKind};

use crate::object::Class;
use crate::store::{Operation, StoreErrorKind as Kind};

/// What an error of `object_store` means for an operation, if it is one of talking HTTP.
pub(crate) fn meaning(operation: Operation, error: &(dyn StdError + 'static)) -> Option<Class> {
    let text = error.downcast_ref::<object_store::Error>()?.to_string();
    // Of the servers that give out tokens; whatever they answered, the store was not asked.
    if ["token request", "token response"].iter().any(|said| text.contains(said)) {
        return Some(Class::Kind(Kind::Credentials));
    }
    if let Some(status) = status_of(&text) {
        return Some(answered(operation, code_of(&text), status));
    }
    let mut cause = Some(error);
    while let Some(error) = cause {
        if let Some(http) = error.downcast_ref::<HttpError>() {
            return Some(Class::Kind(match http.kind() {
                HttpErrorKind::Connect => Kind::Unreachable,
                _ => Kind::Interrupted,
            }));
        }
        cause = error.source();
    }
    None
}

fn answered(operation: Operation, code: &str, status: u16) -> Class {
    let is_upload = matches!(operation, Operation::PutPart | Operation::Complete | Operation::Abort);
    let is_object = matches!(operation, Operation::Get | Operation::Head | Operation::Delete);
    Class::Kind(match (code, status) {
        ("NoSuchBucket" | "ContainerNotFound" | "ContainerBeingDeleted" | "ContainerDisabled", _) => {
            Kind::NoSuchBucket
        }
        ("NoSuchUpload", _) => Kind::NoSuchUpload,
        (
            "InvalidPart" | "InvalidPartOrder" | "EntityTooSmall" | "InvalidBlockList" | "InvalidBlockId"
            | "InvalidBlobOrBlock",
            _,
        ) if is_upload => Kind::InvalidPart,
        (_, 401) => Kind::Credentials,
        (_, 403) => Kind::Denied,
        (_, 404) if is_upload => Kind::NoSuchUpload,
        (_, 404) if is_object => Kind::NotFound,
        (_, 404) => Kind::NoSuchBucket,
        ("BlobAlreadyExists", _) | (_, 412) => Kind::Exists,
        (_, 429 | 503) => Kind::Throttled,
        (_, 405 | 501) => Kind::Unsupported,
        (_, 408 | 500..) => Kind::Interrupted,
        _ => return Class::Lasting,
    })
}

fn status_of(text: &str) -> Option<u16> {
    let (_, rest) = text.split_once("status code: ")?;
    rest.get(..3)?.parse().ok()
}

/// The code of an answer in XML, which follows the status; empty if there is none.
fn code_of(text: &str) -> &str {
    let code = || text.split_once("<Code>")?.1.split_once("</Code>").map(|(code, _)| code);
    code().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::object::failure;
    use crate::store::StoreError;

    fn failed(operation: Operation, text: &str) -> StoreError {
        let error = object_store::Error::Generic { store: "GCS", source: text.into() };
        failure(operation, "gs://bucket", "x", error)
    }

    #[test]
    fn answers_mean_what_the_table_says() {
        use Operation::*;
        for (operation, status, code, kind, retryable) in [
            (PutPart, "503 Service Unavailable", "ServerBusy", Kind::Throttled, true),
            (Put, "429 Too Many Requests", "", Kind::Throttled, true),
            (Put, "500 Internal Server Error", "OperationTimedOut", Kind::Interrupted, true),
            (PutPart, "502 Bad Gateway", "", Kind::Interrupted, true),
            (Complete, "404 Not Found", "NoSuchUpload", Kind::NoSuchUpload, false),
            (Complete, "404 Not Found", "", Kind::NoSuchUpload, false),
            (Complete, "400 Bad Request", "InvalidPart", Kind::InvalidPart, false),
            (Complete, "400 Bad Request", "EntityTooSmall", Kind::InvalidPart, false),
            (Complete, "400 Bad Request", "InvalidBlockList", Kind::InvalidPart, false),
            (Put, "400 Bad Request", "InvalidPart", Kind::Failed, false),
            (Put, "404 Not Found", "ContainerNotFound", Kind::NoSuchBucket, false),
            (Get, "404 Not Found", "NoSuchBucket", Kind::NoSuchBucket, false),
            (List, "404 Not Found", "", Kind::NoSuchBucket, false),
            (Get, "404 Not Found", "BlobNotFound", Kind::NotFound, false),
            (Head, "404 Not Found", "", Kind::NotFound, false),
            (List, "403 Forbidden", "AuthenticationFailed", Kind::Denied, false),
            (List, "401 Unauthorized", "", Kind::Credentials, true),
            (Put, "412 Precondition Failed", "", Kind::Exists, false),
            (Put, "409 Conflict", "BlobAlreadyExists", Kind::Exists, false),
            (Delete, "409 Conflict", "BlobImmutableDueToPolicy", Kind::Failed, false),
            (Put, "301 Moved Permanently", "", Kind::Failed, false),
            (Put, "400 Bad Request", "", Kind::Failed, false),
        ] {
            let text = format!(
                "Error performing PUT http://host/x in 2ms - Server returned non-2xx status code: {status}: \
                 <?xml version=\"1.0\"?><Error><Code>{code}</Code><Message>A message.</Message></Error>"
            );
            let error = failed(operation, &text);
            assert_eq!((error.kind(), error.is_retryable()), (&kind, retryable), "{operation} {text}");
        }
        let text = "Error performing token request: Server returned non-2xx status code: 404 Not Found: ";
        assert_eq!(*failed(Head, text).kind(), Kind::Credentials);
        let other = failed(PutPart, "connection reset");
        assert_eq!((other.kind(), other.is_retryable()), (&Kind::Failed, true));
    }

    #[test]
    fn connections_that_were_not_made_have_sent_nothing() {
        for (kind, expected) in [
            (HttpErrorKind::Connect, Kind::Unreachable),
            (HttpErrorKind::Timeout, Kind::Interrupted),
            (HttpErrorKind::Request, Kind::Interrupted),
        ] {
            let source = Box::new(HttpError::new(kind, std::io::Error::other("refused")));
            let error = object_store::Error::Generic { store: "GCS", source };
            assert_eq!(*failure(Operation::PutPart, "gs://bucket", "x", error).kind(), expected);
        }
    }
}
