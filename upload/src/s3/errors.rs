//! What an answer that is not a success means. Pure.
//!
//! The error's code decides where there is one, since servers agree on codes more than on statuses; answers to HEAD have
//! none. What is not known to have done nothing counts as unknown.
#![forbid(unsafe_code)]

use std::error::Error as StdError;
use std::time::{Duration, SystemTime};

use aws_credential_types::provider::error::CredentialsError;
use aws_sdk_s3::error::{ProvideErrorMetadata, SdkError};
use aws_sdk_s3::primitives::{DateTime, DateTimeFormat};
use aws_smithy_runtime_api::client::orchestrator::HttpResponse;

use crate::store::{Operation, StoreError, StoreErrorKind};

/// The difference between clocks from which AWS refuses requests is 15 minutes; servers' own limits are near.
const SKEW_MAX: Duration = Duration::from_secs(14 * 60);

/// How the HTTP client says that no connection was made, of which it has no type to be asked for.
const NOT_CONNECTED: &str = "client error (Connect)";

/// A server's message is cut off behind so many characters.
const MESSAGE_CHARS_MAX: usize = 300;

/// What may be put right before the same request is signed and sent once more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Repair {
    /// Other credentials.
    Credentials,
    /// The store's time, as it was when the answer came.
    Clock(SystemTime),
}

/// A failed request, before anything is known of its bucket and name.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) kind: StoreErrorKind,
    /// Whether `Failed` may pass by itself.
    pub(crate) passes: bool,
    pub(crate) repair: Option<Repair>,
    /// The HTTP status, if there was an answer.
    pub(crate) status: Option<u16>,
    text: String,
}

impl Failure {
    /// What the SDK's error means for an operation. `now` is this machine's time.
    pub(crate) fn of<E>(operation: Operation, error: &SdkError<E, HttpResponse>, now: SystemTime) -> Failure
    where
        E: ProvideErrorMetadata + StdError + 'static,
    {
        let status = error.raw_response().map(|answer| answer.status().as_u16());
        let text = match status {
            Some(status) => answer_text(status, error.code(), error.message()),
            None => causes(error),
        };
        let mut failure =
            Failure { kind: StoreErrorKind::Interrupted, passes: false, repair: None, status, text };
        match error {
            // Nothing was sent.
            SdkError::ConstructionFailure(_) => failure.kind = StoreErrorKind::Failed,
            SdkError::DispatchFailure(_) if has_cause::<CredentialsError>(error) => {
                failure.kind = StoreErrorKind::Credentials;
            }
            SdkError::DispatchFailure(_) if chain(error).any(|cause| cause.to_string() == NOT_CONNECTED) => {
                failure.kind = StoreErrorKind::Unreachable;
                failure.text.push_str(connecting_advice(&failure.text));
            }
            // Connections that broke, and what the SDK may add later.
            SdkError::ServiceError(_) | SdkError::ResponseError(_) => {
                let answer = error.raw_response();
                let date = answer.and_then(|answer| answer.headers().get("date")).and_then(parse_date);
                failure.answered(operation, error.code(), error.message(), date, now);
            }
            _ => {}
        }
        failure
    }

    /// No request could be made at all.
    pub(crate) fn unconfigured(why: String) -> Failure {
        let kind = StoreErrorKind::Misconfigured;
        Failure { kind, passes: false, repair: None, status: None, text: why }
    }

    fn answered(
        &mut self,
        operation: Operation,
        code: Option<&str>,
        message: Option<&str>,
        date: Option<SystemTime>,
        now: SystemTime,
    ) {
        let status = self.status.unwrap_or(0);
        let is_upload = matches!(
            operation,
            Operation::PutPart | Operation::ListParts | Operation::Complete | Operation::Abort
        );
        let is_object = matches!(operation, Operation::Get | Operation::Head | Operation::Delete);
        let mut passes = false;
        self.kind = match (code.unwrap_or_default(), status) {
            (
                "SlowDown"
                | "ServiceUnavailable"
                | "TooManyRequests"
                | "Throttling"
                | "ThrottlingException"
                | "RequestLimitExceeded"
                | "BandwidthLimitExceeded"
                | "Busy",
                _,
            ) => StoreErrorKind::Throttled,
            ("NoSuchUpload", _) => StoreErrorKind::NoSuchUpload,
            ("InvalidPart" | "InvalidPartOrder" | "EntityTooSmall", _) if is_upload => {
                StoreErrorKind::InvalidPart
            }
            ("RequestTimeTooSkewed" | "RequestInTheFuture" | "RequestExpired", _) => {
                self.repair = date.map(Repair::Clock);
                StoreErrorKind::ClockSkew
            }
            ("ExpiredToken" | "ExpiredTokenException" | "InvalidToken" | "TokenRefreshRequired", _) => {
                self.repair = Some(Repair::Credentials);
                StoreErrorKind::Credentials
            }
            ("PreconditionFailed", _) => StoreErrorKind::Exists,
            ("NoSuchKey", _) if is_object => StoreErrorKind::NotFound,
            ("NoSuchBucket", _) => StoreErrorKind::NoSuchBucket,
            ("NotImplemented" | "MethodNotAllowed", _) => StoreErrorKind::Unsupported,
            // The bytes arrived damaged and were thrown away.
            (
                "BadDigest" | "XAmzContentSHA256Mismatch" | "XAmzContentChecksumMismatch" | "IncompleteBody",
                _,
            ) => {
                passes = true;
                StoreErrorKind::Failed
            }
            ("RequestTimeout" | "InternalError", _) => StoreErrorKind::Interrupted,
            ("OperationAborted" | "ConditionalRequestConflict", _) if operation != Operation::Complete => {
                StoreErrorKind::Interrupted
            }
            (code, status)
                if operation == Operation::Complete
                    && (status == 409 || in_progress(code) || message.is_some_and(in_progress)) =>
            {
                StoreErrorKind::InProgress
            }
            ("", 400 | 403) if operation == Operation::Head && is_skewed(date, now) => {
                self.repair = date.map(Repair::Clock);
                StoreErrorKind::ClockSkew
            }
            // What AWS answers to a HEAD with expired credentials.
            ("", 400) if operation == Operation::Head => {
                self.repair = Some(Repair::Credentials);
                StoreErrorKind::Credentials
            }
            (_, 429 | 503) => StoreErrorKind::Throttled,
            (_, 501 | 405) => StoreErrorKind::Unsupported,
            (_, 408 | 500..) => StoreErrorKind::Interrupted,
            (_, 401 | 403) => StoreErrorKind::Denied,
            (_, 404) if is_upload => StoreErrorKind::NoSuchUpload,
            (_, 404) if is_object => StoreErrorKind::NotFound,
            (_, 412) => StoreErrorKind::Exists,
            // A success that could not be read, or an error in the body of one.
            (_, 0..300) => StoreErrorKind::Interrupted,
            // Redirects too: the bucket is elsewhere, and following would sign for the wrong place.
            _ => StoreErrorKind::Failed,
        };
        self.passes = passes;
        if (300..400).contains(&status) || code == Some("AuthorizationHeaderMalformed") {
            self.text.push_str("; the bucket is in another region or at another server, say so in its URL");
        }
    }

    /// The error, for its bucket and name.
    pub(crate) fn into_error(self, operation: Operation, url: &str, name: &str) -> StoreError {
        match self.kind {
            StoreErrorKind::Failed => StoreError::failed(operation, url, name, self.passes, self.text),
            kind => StoreError::caused(operation, url, name, kind, self.text),
        }
    }
}

/// As different servers say that a Complete is under way.
fn in_progress(text: &str) -> bool {
    let text = text.to_ascii_lowercase();
    text.contains("in progress") || text.contains("inprogress") || text.contains("already being completed")
}

fn is_skewed(date: Option<SystemTime>, now: SystemTime) -> bool {
    date.is_some_and(|date| {
        let apart = date.duration_since(now).unwrap_or_else(|error| error.duration());
        apart > SKEW_MAX
    })
}

fn parse_date(text: &str) -> Option<SystemTime> {
    DateTime::from_str(text, DateTimeFormat::HttpDate).ok()?.try_into().ok()
}

fn has_cause<E: StdError + 'static>(error: &(dyn StdError + 'static)) -> bool {
    chain(error).any(|cause| cause.is::<E>())
}

/// An error and what lies below it.
fn chain<'a>(error: &'a (dyn StdError + 'static)) -> impl Iterator<Item = &'a (dyn StdError + 'static)> {
    std::iter::successors(Some(error), |error: &&'a (dyn StdError + 'static)| (*error).source())
}

/// What the server said, in one line.
fn answer_text(status: u16, code: Option<&str>, message: Option<&str>) -> String {
    let mut text = match code {
        Some(code) => format!("{}, HTTP {status}", one_line(code)),
        None => format!("HTTP {status}"),
    };
    let message = one_line(message.unwrap_or_default());
    if !message.is_empty() && Some(&*message) != code {
        text = format!("{text}: {message}");
    }
    text
}

/// What kept a request from being answered, in one line: what lies deepest says it, what only wraps it is left out.
fn causes(error: &(dyn StdError + 'static)) -> String {
    let mut text = String::new();
    for cause in chain(error) {
        let cause = one_line(&cause.to_string());
        let wraps = ["dispatch failure", "io error", "other", "error", NOT_CONNECTED].contains(&&*cause);
        if cause.is_empty() || wraps || text.contains(&cause) {
            continue;
        }
        if !text.is_empty() {
            text.push_str(": ");
        }
        text.push_str(&cause);
    }
    if text.is_empty() { one_line(&error.to_string()) } else { text }
}

fn one_line(text: &str) -> String {
    let words: Vec<&str> = text.split_whitespace().collect();
    words.join(" ").chars().filter(|char| !char.is_control()).take(MESSAGE_CHARS_MAX).collect()
}

/// What to do when no connection could be made for this reason.
fn connecting_advice(why: &str) -> &'static str {
    if why.contains("Connection refused") {
        "; nothing listens there: check the host and the port of the endpoint, and that its server runs"
    } else if why.contains("dns error") || why.contains("failed to lookup address") {
        "; the host's name does not resolve: check the endpoint or the region, and the name server"
    } else if why.contains("InvalidContentType") || why.contains("tls handshake eof") {
        "; the server does not speak TLS at this port: say http:// in the endpoint, or give the port of its https"
    } else if why.contains("certificate") {
        "; the server's certificate is not trusted here: check the endpoint, and the certificates of this machine"
    } else {
        "; check the endpoint and the network"
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::StoreErrorKind as Kind;

    fn answer(operation: Operation, status: u16, code: &str, message: &str) -> Failure {
        answer_at(operation, status, code, message, None)
    }

    fn answer_at(
        operation: Operation,
        status: u16,
        code: &str,
        message: &str,
        date: Option<SystemTime>,
    ) -> Failure {
        let mut failure = Failure {
            kind: Kind::Interrupted,
            passes: false,
            repair: None,
            status: Some(status),
            text: String::new(),
        };
        let some = |text: &'static str| (!text.is_empty()).then_some(text);
        let (code, message) = (code.to_owned().leak(), message.to_owned().leak());
        failure.answered(operation, some(code), some(message), date, SystemTime::UNIX_EPOCH);
        failure
    }

    #[test]
    fn answers_mean_what_the_table_says() {
        use Operation::*;
        for (operation, status, code, kind) in [
            (Put, 503, "SlowDown", Kind::Throttled),
            (PutPart, 503, "", Kind::Throttled),
            (Get, 429, "", Kind::Throttled),
            (PutPart, 400, "RequestTimeout", Kind::Interrupted),
            (Put, 500, "InternalError", Kind::Interrupted),
            (Put, 502, "", Kind::Interrupted),
            (Put, 409, "ConditionalRequestConflict", Kind::Interrupted),
            // 200 with an error in its body.
            (Complete, 200, "InternalError", Kind::Interrupted),
            (Complete, 200, "SlowDown", Kind::Throttled),
            (Complete, 200, "", Kind::Interrupted),
            (Complete, 404, "NoSuchUpload", Kind::NoSuchUpload),
            (Complete, 200, "NoSuchUpload", Kind::NoSuchUpload),
            (PutPart, 404, "", Kind::NoSuchUpload),
            (Complete, 400, "InvalidPart", Kind::InvalidPart),
            (Complete, 400, "InvalidPartOrder", Kind::InvalidPart),
            (Complete, 400, "EntityTooSmall", Kind::InvalidPart),
            (Complete, 409, "OperationAborted", Kind::InProgress),
            (Complete, 400, "CompleteMultipartUploadInProgress", Kind::InProgress),
            (Put, 412, "PreconditionFailed", Kind::Exists),
            (Get, 404, "NoSuchKey", Kind::NotFound),
            (Head, 404, "", Kind::NotFound),
            (Delete, 404, "NoSuchKey", Kind::NotFound),
            (Get, 404, "NoSuchBucket", Kind::NoSuchBucket),
            (Delete, 404, "NoSuchBucket", Kind::NoSuchBucket),
            (Put, 403, "AccessDenied", Kind::Denied),
            (Put, 403, "SignatureDoesNotMatch", Kind::Denied),
            (Head, 403, "", Kind::Denied),
            (Put, 301, "PermanentRedirect", Kind::Failed),
            (Put, 307, "TemporaryRedirect", Kind::Failed),
            (Put, 301, "", Kind::Failed),
            (ListUploads, 501, "NotImplemented", Kind::Unsupported),
            (Put, 400, "InvalidArgument", Kind::Failed),
            (Put, 400, "BadDigest", Kind::Failed),
        ] {
            assert_eq!(answer(operation, status, code, "").kind, kind, "{operation} {status} {code}");
        }
        let message = "A completion of this upload is already in progress";
        assert_eq!(answer(Complete, 400, "InvalidRequest", message).kind, Kind::InProgress);
        assert_eq!(answer(Put, 400, "InvalidRequest", message).kind, Kind::Failed);
    }

    #[test]
    fn an_answer_is_told_in_one_line_with_code_status_and_message() {
        let text = answer_text(404, Some("NoSuchBucket"), Some("The specified bucket\n does not exist"));
        assert_eq!(text, "NoSuchBucket, HTTP 404: The specified bucket does not exist");
        assert_eq!(answer_text(404, None, None), "HTTP 404");
        assert_eq!(answer_text(404, Some("NotFound"), Some("NotFound")), "NotFound, HTTP 404");
        assert!(answer_text(500, None, Some(&"long ".repeat(1000))).len() < 400);
    }

    #[test]
    fn damaged_bytes_may_be_sent_again_and_refused_ones_not() {
        let retryable = |code| {
            let failure = answer(Operation::PutPart, 400, code, "");
            failure.into_error(Operation::PutPart, "s3://b", "x").is_retryable()
        };
        assert!(retryable("BadDigest") && retryable("XAmzContentSHA256Mismatch"));
        assert!(!retryable("InvalidArgument"));
    }

    #[test]
    fn clocks_and_credentials_can_be_repaired() {
        use Operation::*;
        let date = SystemTime::UNIX_EPOCH + Duration::from_secs(3600);
        let skewed = answer_at(Put, 403, "RequestTimeTooSkewed", "", Some(date));
        assert_eq!((skewed.kind, skewed.repair), (Kind::ClockSkew, Some(Repair::Clock(date))));
        // HEAD has no body: only the date tells.
        let skewed = answer_at(Head, 403, "", "", Some(date));
        assert_eq!((skewed.kind, skewed.repair), (Kind::ClockSkew, Some(Repair::Clock(date))));
        let near = SystemTime::UNIX_EPOCH + Duration::from_secs(60);
        assert_eq!(answer_at(Head, 403, "", "", Some(near)).kind, Kind::Denied);
        for (operation, code) in [(Put, "ExpiredToken"), (Get, "InvalidToken"), (Head, "")] {
            let expired = answer_at(operation, 400, code, "", Some(near));
            assert_eq!((expired.kind, expired.repair), (Kind::Credentials, Some(Repair::Credentials)));
        }
    }

    #[test]
    fn http_dates_are_read() {
        let date = parse_date("Thu, 01 Jan 1970 01:00:00 GMT").unwrap();
        assert_eq!(date, SystemTime::UNIX_EPOCH + Duration::from_secs(3600));
        assert_eq!(parse_date("yesterday"), None);
    }
}
