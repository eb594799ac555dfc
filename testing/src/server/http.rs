//! Connections and requests of the test server: says what a request is about, lets the faults strike, hands the rest to
//! `s3s`.

use std::convert::Infallible;
use std::error::Error as StdError;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll, ready};
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use http::header::{CONTENT_LENGTH, DATE, HeaderValue, TRAILER, TRANSFER_ENCODING};
use http::{HeaderMap, Method, Uri};
use http_body::{Frame, SizeHint};
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use s3s::dto::{Timestamp, TimestampFormat};
use s3s::service::{S3ServiceBuilder, SharedS3Service};
use s3s::{Body, S3Error, S3ErrorCode, s3_error};
use tidelog_upload::Operation;
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{Instant, Sleep, sleep};

use super::fault::{Fault, Target};
use super::s3::{Keyring, Operations};
use super::{Request, State, lock};

type AnyError = Box<dyn StdError + Send + Sync>;
type Response = http::Response<Body>;

/// By how much the clocks of client and server may differ, as on AWS.
const SKEW_MAX: Duration = Duration::from_secs(15 * 60);
/// The most that a slow body moves at a time.
const SLOW_STEP_BYTES: usize = 16 * 1024;

/// Accepts connections for as long as the runtime lives.
pub(super) async fn serve(listener: TcpListener, state: Arc<State>) {
    let mut builder = S3ServiceBuilder::new(Operations(state.clone()));
    builder.set_auth(Keyring(state.clone()));
    let service = builder.build().into_shared();
    loop {
        match listener.accept().await {
            Ok((stream, _)) => drop(tokio::spawn(serve_connection(stream, service.clone(), state.clone()))),
            // Out of descriptors, most likely: give the tests' connections time to end.
            Err(_) => sleep(Duration::from_millis(10)).await,
        }
    }
}

async fn serve_connection(stream: TcpStream, service: SharedS3Service, state: Arc<State>) {
    let connection = state.connections.fetch_add(1, Ordering::Relaxed);
    let _ = stream.set_nodelay(true);
    let service = service_fn(move |request| handle(request, connection, service.clone(), state.clone()));
    // A connection ends with an error whenever a fault or a client cuts it off.
    let _ = hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), service).await;
}

async fn handle(
    request: http::Request<Incoming>,
    connection: u64,
    service: SharedS3Service,
    state: Arc<State>,
) -> Result<Response, AnyError> {
    let copies = request.headers().contains_key("x-amz-copy-source");
    let target = target(request.method(), request.uri(), copies);
    lock(&state.requests).push(Request {
        operation: target.operation,
        bucket: target.bucket.clone(),
        name: target.name.clone(),
        part: query(request.uri(), "partNumber").and_then(|number| number.parse().ok()),
        body_bytes: number(request.headers(), &CONTENT_LENGTH),
        connection,
    });
    let effects = lock(&state.faults).strike(&target);
    sleep(effects.delay).await;

    let mut request = request.map(Body::from);
    if let Some(bytes_per_second) = effects.bytes_per_second {
        request = request.map(|body| slow(body, bytes_per_second));
    }
    let skewed = is_skewed(request.headers(), state.now());
    let refusal = match effects.outcome {
        Some(Fault::SlowDown) => Some(s3_error!(SlowDown, "Please reduce your request rate.")),
        Some(Fault::InternalError) => Some(internal_error()),
        Some(Fault::ExpiredToken) => Some(s3_error!(ExpiredToken, "The provided token has expired.")),
        Some(Fault::Denied) => Some(s3_error!(AccessDenied)),
        Some(Fault::Redirect) => Some(s3_error!(PermanentRedirect, "The bucket is in another region.")),
        Some(Fault::Conflict) => Some(s3_error!(OperationAborted, "A conflicting operation is in progress.")),
        Some(Fault::ClockSkew) => Some(s3_error!(RequestTimeTooSkewed)),
        _ if skewed => Some(s3_error!(RequestTimeTooSkewed)),
        _ => None,
    };

    let mut answer = if let Some(refusal) = refusal {
        // Taken first, so that the client sees the answer and not a broken connection while it still sends.
        drain(request.into_body()).await;
        let redirect = effects.outcome == Some(Fault::Redirect);
        let mut answer = refusal.to_hyper_response()?;
        if redirect {
            answer.headers_mut().insert("x-amz-bucket-region", HeaderValue::from_static("eu-west-1"));
        }
        answer
    } else {
        match effects.outcome {
            Some(Fault::Drop) => return Err("closed before anything was done".into()),
            Some(Fault::Hang) => std::future::pending().await,
            Some(Fault::ApplyLate(after)) => {
                let (parts, body) = request.into_parts();
                let body = Body::from(body.collect().await?.to_bytes());
                let (_here, gone) = tokio::sync::oneshot::channel::<Infallible>();
                tokio::spawn(async move {
                    // Ends when the connection's task drops the other half, together with this request.
                    let _ = gone.await;
                    sleep(after).await;
                    if let Ok(answer) = service.as_ref().call(http::Request::from_parts(parts, body)).await {
                        let _ = settle(answer).await;
                    }
                });
                std::future::pending().await
            }
            Some(Fault::ErrorInBody { applied: false }) => {
                drain(request.into_body()).await;
                error_in_body()?
            }
            outcome => {
                let mut answer = service.as_ref().call(request).await?;
                if target.operation == Operation::Complete {
                    answer = settle(answer).await?;
                }
                match outcome {
                    Some(Fault::DropAnswer) => return Err("closed without an answer".into()),
                    Some(Fault::ErrorInBody { .. }) if answer.status().is_success() => error_in_body()?,
                    _ => answer,
                }
            }
        }
    };
    if let Ok(now) = http_date(state.now()) {
        answer.headers_mut().insert(DATE, now);
    }
    sleep(effects.delay_answer).await;
    if let Some(bytes_per_second) = effects.bytes_per_second {
        answer = answer.map(|body| slow(body, bytes_per_second));
    }
    Ok(answer)
}

/// What a request in path style is about.
fn target(method: &Method, uri: &Uri, copies: bool) -> Target {
    let path = uri.path().trim_start_matches('/');
    let (bucket, name) = path.split_once('/').unwrap_or((path, ""));
    let upload = query(uri, "uploadId").is_some();
    let operation = match (method.as_str(), name.is_empty()) {
        ("GET", true) if query(uri, "uploads").is_some() => Operation::ListUploads,
        ("GET", true) => Operation::List,
        ("GET", false) if upload => Operation::ListParts,
        ("GET", false) => Operation::Get,
        ("HEAD", false) => Operation::Head,
        ("PUT", false) if upload && copies => Operation::CopyPart,
        ("PUT", false) if upload => Operation::PutPart,
        ("PUT", false) => Operation::Put,
        ("POST", false) if upload => Operation::Complete,
        ("POST", false) => Operation::Create,
        ("DELETE", false) if upload => Operation::Abort,
        ("DELETE", false) => Operation::Delete,
        _ => Operation::Open,
    };
    let name = urlencoding::decode(name).map_or_else(|_| name.to_owned(), |name| name.into_owned());
    Target { operation, bucket: bucket.to_owned(), name }
}

/// The value of a query parameter as it stands, empty where it has none.
fn query<'a>(uri: &'a Uri, wanted: &str) -> Option<&'a str> {
    uri.query()?.split('&').find_map(|pair| {
        let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
        (key == wanted).then_some(value)
    })
}

fn number(headers: &HeaderMap, name: &http::HeaderName) -> u64 {
    headers.get(name).and_then(|value| value.to_str().ok()?.parse().ok()).unwrap_or(0)
}

/// Whether a request was signed for a time too far from the server's. One that says no time is left to the check of its
/// signature.
fn is_skewed(headers: &HeaderMap, now: SystemTime) -> bool {
    let signed = || {
        let text = headers.get("x-amz-date")?.to_str().ok()?;
        let (date, time) = (text.get(..8)?, text.get(9..15)?);
        let text = format!(
            "{}-{}-{}T{}:{}:{}Z",
            &date[..4],
            &date[4..6],
            &date[6..],
            &time[..2],
            &time[2..4],
            &time[4..]
        );
        let time = Timestamp::parse(TimestampFormat::DateTime, &text).ok()?;
        Some(SystemTime::from(time::OffsetDateTime::from(time)))
    };
    signed().is_some_and(|signed| {
        let distance = now.duration_since(signed).unwrap_or_else(|error| error.duration());
        distance > SKEW_MAX
    })
}

fn http_date(now: SystemTime) -> Result<HeaderValue, AnyError> {
    let mut text = Vec::new();
    Timestamp::from(now).format(TimestampFormat::HttpDate, &mut text)?;
    Ok(HeaderValue::from_bytes(&text)?)
}

fn internal_error() -> S3Error {
    s3_error!(InternalError, "We encountered an internal error. Please try again.")
}

fn error_in_body() -> Result<Response, AnyError> {
    let mut answer = internal_error().to_hyper_response()?;
    *answer.status_mut() = http::StatusCode::OK;
    Ok(answer)
}

/// `s3s` completes an upload only while its answer is read, and says of every answer that it is a success. Here it is
/// done before the answer starts, and what is refused has the status of its error, as on AWS unless it takes long.
async fn settle(answer: Response) -> Result<Response, AnyError> {
    let (mut parts, body) = answer.into_parts();
    let body = body.collect().await?.to_bytes();
    parts.headers.remove(TRANSFER_ENCODING);
    parts.headers.remove(TRAILER);
    let text = String::from_utf8_lossy(&body);
    if let Some((_, error)) = text.split_once("<Error>") {
        let code = error.split_once("<Code>").and_then(|(_, rest)| rest.split_once("</Code>"));
        let status = code.and_then(|(code, _)| S3ErrorCode::from_bytes(code.as_bytes())?.status_code());
        parts.status = status.unwrap_or(http::StatusCode::INTERNAL_SERVER_ERROR);
    }
    Ok(Response::from_parts(parts, Body::from(body)))
}

async fn drain(mut body: Body) {
    while let Some(Ok(_)) = body.frame().await {}
}

/// A body that moves at most so many bytes a second.
struct Slow {
    inner: Body,
    bytes_per_second: u64,
    held: Bytes,
    /// When what is held may go on.
    timer: Pin<Box<Sleep>>,
}

fn slow(inner: Body, bytes_per_second: u64) -> Body {
    let bytes_per_second = bytes_per_second.max(1);
    let timer = Box::pin(sleep(Duration::ZERO));
    Body::http_body_unsync(Slow { inner, bytes_per_second, held: Bytes::new(), timer })
}

impl http_body::Body for Slow {
    type Data = Bytes;
    type Error = AnyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, AnyError>>> {
        let this = &mut *self;
        if this.held.is_empty() {
            let Some(frame) = ready!(Pin::new(&mut this.inner).poll_frame(context)?) else {
                return Poll::Ready(None);
            };
            match frame.into_data() {
                Ok(data) => this.held = data,
                Err(other) => return Poll::Ready(Some(Ok(other))),
            }
            let next = this.timer.deadline().max(Instant::now()) + this.step_time();
            this.timer.as_mut().reset(next);
        }
        ready!(this.timer.as_mut().poll(context));
        let step = this.held.split_to(this.held.len().min(SLOW_STEP_BYTES));
        if !this.held.is_empty() {
            let next = this.timer.deadline() + this.step_time();
            this.timer.as_mut().reset(next);
        }
        Poll::Ready(Some(Ok(Frame::data(step))))
    }

    fn is_end_stream(&self) -> bool {
        self.held.is_empty() && self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        match self.inner.size_hint().exact() {
            Some(rest) => SizeHint::with_exact(rest + self.held.len() as u64),
            None => SizeHint::default(),
        }
    }
}

impl Slow {
    fn step_time(&self) -> Duration {
        let bytes = self.held.len().min(SLOW_STEP_BYTES) as f64;
        Duration::from_secs_f64(bytes / self.bytes_per_second as f64)
    }
}
