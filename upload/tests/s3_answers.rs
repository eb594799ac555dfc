//! The S3 store against a server that answers by script: what is sent, how often, and what each answer comes to.
//!
//! What a real server makes of it is for the conformance suite.
#![cfg(feature = "s3")]

use std::collections::VecDeque;
use std::env;
use std::future::Future;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use bytes::Bytes;
use tidelog_upload::{
    Body, EntityTag, Lane, Outcome, Store, StoreError, StoreErrorKind, UploadId, UploadRef, UploadedPart,
    open_store,
};

/// One request as it came.
#[derive(Clone, Debug)]
struct Request {
    /// Method and target.
    line: String,
    /// With names in lower case.
    headers: Vec<(String, String)>,
    body: Vec<u8>,
}

impl Request {
    fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(found, _)| found == name).map(|(_, value)| &**value)
    }
}

/// Answers one request per connection with the next text of its script, and closes.
struct Server {
    address: SocketAddr,
    requests: Arc<Mutex<Vec<Request>>>,
    script: Arc<Mutex<VecDeque<String>>>,
}

impl Server {
    fn start(script: &[String]) -> Server {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let server = Server {
            address: listener.local_addr().unwrap(),
            requests: Arc::default(),
            script: Arc::new(Mutex::new(script.iter().cloned().collect())),
        };
        let (requests, script) = (Arc::clone(&server.requests), Arc::clone(&server.script));
        thread::spawn(move || {
            for stream in listener.incoming() {
                let Ok(mut stream) = stream else { return };
                let Some(request) = read_request(&mut stream) else { continue };
                requests.lock().unwrap().push(request);
                let answer = script.lock().unwrap().pop_front();
                let answer = answer.unwrap_or_else(|| status(418, "Unscripted"));
                let _ = stream.write_all(answer.as_bytes());
            }
        });
        server
    }

    fn store(&self, options: &str) -> Arc<dyn Store> {
        open_store(&format!("s3://bucket/pre/fix?endpoint=http://{}&{options}", self.address)).unwrap()
    }

    /// The requests so far. Also checks that the script has been used up.
    fn requests(&self) -> Vec<Request> {
        assert_eq!(self.script.lock().unwrap().len(), 0, "answers are left");
        self.requests.lock().unwrap().clone()
    }
}

fn read_request(stream: &mut TcpStream) -> Option<Request> {
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    reader.read_line(&mut line).ok()?;
    let line = line.trim_end().trim_end_matches(" HTTP/1.1").to_owned();
    let mut headers = Vec::new();
    loop {
        let mut header = String::new();
        reader.read_line(&mut header).ok()?;
        let header = header.trim_end();
        if header.is_empty() {
            break;
        }
        let (name, value) = header.split_once(':')?;
        headers.push((name.to_ascii_lowercase(), value.trim().to_owned()));
    }
    let mut request = Request { line, headers, body: Vec::new() };
    let length = request.header("content-length").map_or(0, |length| length.parse().unwrap());
    request.body.resize(length, 0);
    reader.read_exact(&mut request.body).ok()?;
    Some(request)
}

fn answer(status: &str, headers: &[&str], body: &str) -> String {
    let headers: String = headers.iter().map(|header| format!("{header}\r\n")).collect();
    format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\nConnection: close\r\n{headers}\r\n{body}", body.len())
}

fn ok(headers: &[&str], body: &str) -> String {
    answer("200 OK", headers, body)
}

/// An error as S3 tells it, `200` included.
fn status(status: u16, code: &str) -> String {
    answer(&format!("{status} X"), &[], &format!("<Error><Code>{code}</Code><Message>m</Message></Error>"))
}

fn run<T>(future: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    runtime.block_on(future)
}

fn body() -> Body {
    Body::new(vec![Bytes::from_static(b"some "), Bytes::new(), Bytes::from_static(b"bytes")])
}

fn put(store: &dyn Store) -> Result<EntityTag, StoreError> {
    run(store.put("a/b", body(), Lane::Primary))
}

fn upload() -> (UploadId, Vec<UploadedPart>) {
    let tag = |text: &str| EntityTag(text.into());
    let parts =
        vec![UploadedPart { number: 1, tag: tag("one") }, UploadedPart { number: 3, tag: tag("three") }];
    (UploadId("id".into()), parts)
}

fn complete(store: &dyn Store) -> Result<EntityTag, StoreError> {
    let (id, parts) = upload();
    run(store.complete(UploadRef { name: "a/b", id: &id }, &parts))
}

#[test]
fn a_put_is_one_plain_request() {
    let server = Server::start(&[ok(&["ETag: \"tag\""], "")]);
    let store = server.store(
        "anonymous=true&checksum=md5&sse=aws:kms&kms_key=k&storage_class=ONEZONE_IA&conditional_put=true",
    );
    assert_eq!(&*put(&*store).unwrap().0, "tag");
    let [request] = &server.requests()[..] else { panic!("one request") };
    assert!(request.line.starts_with("PUT /bucket/pre/fix/a/b"), "{}", request.line);
    assert_eq!(request.body, b"some bytes");
    for (name, value) in [
        ("content-length", "10"),
        ("content-md5", "nQVoRp0gbBrt8bcfEvR0vA=="),
        ("if-none-match", "*"),
        ("x-amz-server-side-encryption", "aws:kms"),
        ("x-amz-server-side-encryption-aws-kms-key-id", "k"),
        ("x-amz-storage-class", "ONEZONE_IA"),
    ] {
        assert_eq!(request.header(name), Some(value), "{name}");
    }
    assert_eq!(request.header("authorization"), None);
    // No checksum in a trailer, which some servers refuse, and none of a part, which would forbid gaps.
    for name in ["x-amz-trailer", "content-encoding", "transfer-encoding", "x-amz-checksum-crc32"] {
        assert_eq!(request.header(name), None, "{name}");
    }
}

#[test]
fn only_a_success_with_a_tag_counts() {
    let see_other = ["Location: http://127.0.0.1:1/elsewhere", "ETag: \"tag\""];
    for (answer, kind) in [
        (ok(&[], ""), StoreErrorKind::Interrupted),
        (ok(&["ETag: \"\""], ""), StoreErrorKind::Interrupted),
        (answer("301 Moved", &see_other, ""), StoreErrorKind::Failed),
        (answer("307 Temporary", &see_other, ""), StoreErrorKind::Failed),
        (status(301, "PermanentRedirect"), StoreErrorKind::Failed),
    ] {
        let server = Server::start(&[answer.clone(), answer.clone()]);
        let store = server.store("anonymous=true");
        let error = put(&*store).unwrap_err();
        assert_eq!(*error.kind(), kind, "{answer}: {error}");
        let (id, part) = (UploadId("id".into()), body());
        let error =
            run(store.put_part(UploadRef { name: "a/b", id: &id }, 1, part, Lane::Hedge)).unwrap_err();
        assert_eq!(*error.kind(), kind, "{answer}: {error}");
        assert_eq!(server.requests().len(), 2);
    }
}

#[test]
fn nothing_is_retried_inside() {
    for (answer, kind, outcome) in [
        (status(503, "SlowDown"), StoreErrorKind::Throttled, Outcome::NotApplied),
        (status(500, "InternalError"), StoreErrorKind::Interrupted, Outcome::Unknown),
        (status(400, "RequestTimeout"), StoreErrorKind::Interrupted, Outcome::Unknown),
        (status(403, "AccessDenied"), StoreErrorKind::Denied, Outcome::NotApplied),
        (status(412, "PreconditionFailed"), StoreErrorKind::Exists, Outcome::NotApplied),
        // The connection closes without an answer, or in the middle of one.
        (String::new(), StoreErrorKind::Interrupted, Outcome::Unknown),
        ("HTTP/1.1 200 O".to_owned(), StoreErrorKind::Interrupted, Outcome::Unknown),
    ] {
        let server = Server::start(std::slice::from_ref(&answer));
        let error = put(&*server.store("anonymous=true")).unwrap_err();
        assert_eq!((error.kind().clone(), error.outcome()), (kind, outcome), "{answer}: {error}");
        assert_eq!(server.requests().len(), 1);
    }
}

#[test]
fn without_a_connection_nothing_was_done_and_the_advice_fits() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let free = listener.local_addr().unwrap();
    drop(listener);
    // Answers in plain text, whatever it is sent.
    let plain = TcpListener::bind("127.0.0.1:0").unwrap();
    let plain_address = plain.local_addr().unwrap();
    thread::spawn(move || {
        for mut stream in plain.incoming().flatten() {
            let _ = stream.write_all(status(400, "BadRequest").as_bytes());
        }
    });
    for (endpoint, says) in [
        (format!("http://{free}"), &["Connection refused", "nothing listens there"][..]),
        ("http://no-such-host.invalid:80".to_owned(), &["check the endpoint"]),
        (format!("https://{plain_address}"), &["does not speak TLS", "http://"]),
    ] {
        let store = open_store(&format!("s3://bucket?endpoint={endpoint}&anonymous=true")).unwrap();
        let error = put(&*store).unwrap_err();
        assert_eq!(*error.kind(), StoreErrorKind::Unreachable, "{error:?}");
        assert_eq!(error.outcome(), Outcome::NotApplied);
        assert!(error.is_retryable());
        let text = error.to_string();
        for part in says {
            assert!(text.contains(part), "{part} is not in: {text}");
        }
        assert!(text.len() < 400 && !text.contains('\n') && !text.contains('{'), "{text}");
        assert_eq!(text.matches(&endpoint).count(), 1, "{text}");
    }
}

#[test]
fn an_answer_is_told_by_code_status_and_message_on_one_line() {
    let text = "<Error><Code>NoSuchBucket</Code><Message>The specified\nbucket is gone</Message></Error>";
    let server = Server::start(&[answer("404 Not Found", &[], text), status(500, "InternalError")]);
    let store = server.store("anonymous=true");
    let error = put(&*store).unwrap_err();
    assert_eq!(*error.kind(), StoreErrorKind::NoSuchBucket);
    let said = error.to_string();
    assert!(
        said.ends_with(": NoSuchBucket, HTTP 404: The specified bucket is gone")
            && said.contains("create it"),
        "{said}"
    );
    let said = put(&*store).unwrap_err().to_string();
    assert!(said.contains("InternalError, HTTP 500") && !said.contains('{') && said.len() < 400, "{said}");
}

#[test]
fn a_success_with_an_error_in_its_body_is_no_success() {
    let done = "<CompleteMultipartUploadResult><ETag>\"whole\"</ETag></CompleteMultipartUploadResult>";
    for (answer, outcome) in [
        (ok(&[], done), Ok("whole")),
        (status(200, "InternalError"), Err(StoreErrorKind::Interrupted)),
        (status(200, "SlowDown"), Err(StoreErrorKind::Throttled)),
        (ok(&[], ""), Err(StoreErrorKind::Interrupted)),
        (ok(&[], "<CompleteMultipartUploadResult>"), Err(StoreErrorKind::Interrupted)),
        (status(404, "NoSuchUpload"), Err(StoreErrorKind::NoSuchUpload)),
        (status(400, "InvalidPart"), Err(StoreErrorKind::InvalidPart)),
        (status(409, "OperationAborted"), Err(StoreErrorKind::InProgress)),
    ] {
        let server = Server::start(std::slice::from_ref(&answer));
        let found = complete(&*server.store("anonymous=true"));
        match outcome {
            Ok(tag) => assert_eq!(&*found.unwrap().0, tag),
            Err(kind) => assert_eq!(*found.unwrap_err().kind(), kind, "{answer}"),
        }
        let [request] = &server.requests()[..] else { panic!("one request") };
        assert!(request.line.contains("uploadId=id"));
        let text = String::from_utf8_lossy(&request.body).replace("&quot;", "\"");
        for part in ["<ETag>\"one\"</ETag>", "<PartNumber>3</PartNumber>"] {
            assert!(text.contains(part), "{text}");
        }
    }
}

#[test]
fn a_range_is_exactly_that() {
    let full = answer("206 Partial", &["Content-Range: bytes 2-5/10"], "2345");
    let chunked = |pieces: &[&str]| {
        let pieces: String = pieces.iter().map(|piece| format!("{:x}\r\n{piece}\r\n", piece.len())).collect();
        format!(
            "HTTP/1.1 206 X\r\nTransfer-Encoding: chunked\r\nContent-Range: bytes 2-5/10\r\nConnection: close\r\n\r\n\
             {pieces}0\r\n\r\n"
        )
    };
    let cases = [
        (vec![full], Ok("2345")),
        // The server took no notice of the range.
        (vec![ok(&[], "0123456789")], Err(StoreErrorKind::Interrupted)),
        (
            vec![answer("206 Partial", &["Content-Range: bytes 2-3/4"], "23")],
            Err(StoreErrorKind::OutOfRange { start: 2, end: 6, size: 4 }),
        ),
        (
            vec![answer("206 Partial", &["Content-Range: bytes 1-4/10"], "1234")],
            Err(StoreErrorKind::Interrupted),
        ),
        // Fewer bytes than said: the connection closes.
        (
            vec![
                "HTTP/1.1 206 X\r\nContent-Length: 4\r\nContent-Range: bytes 2-5/10\r\n\
                 Connection: close\r\n\r\n23"
                    .to_owned(),
            ],
            Err(StoreErrorKind::Interrupted),
        ),
        // Pieces, and no length but that of the range.
        (vec![chunked(&["23", "45"])], Ok("2345")),
        (vec![chunked(&["2345"])], Ok("2345")),
        (vec![chunked(&["x", "2345"])], Err(StoreErrorKind::Interrupted)),
        (vec![chunked(&["2345", "x"])], Err(StoreErrorKind::Interrupted)),
        (vec![chunked(&["2345", "2345"])], Err(StoreErrorKind::Interrupted)),
        (vec![chunked(&["2", "3"])], Err(StoreErrorKind::Interrupted)),
        (vec![chunked(&[])], Err(StoreErrorKind::Interrupted)),
        (
            vec![status(416, "InvalidRange"), answer("200 OK", &[], "12").replace("12", "")],
            Err(StoreErrorKind::OutOfRange { start: 2, end: 6, size: 2 }),
        ),
        (vec![status(404, "NoSuchKey")], Err(StoreErrorKind::NotFound)),
    ];
    for (script, outcome) in cases {
        let server = Server::start(&script);
        let found = run(server.store("anonymous=true").get("a/b", 2..6));
        match outcome {
            Ok(bytes) => assert_eq!(found.unwrap(), bytes),
            Err(kind) => assert_eq!(*found.unwrap_err().kind(), kind, "{script:?}"),
        }
        assert_eq!(server.requests()[0].header("range"), Some("bytes=2-5"));
    }
}

#[test]
fn a_range_beyond_4_gib_is_exactly_that() {
    let found = |range: &str| {
        let header = format!("Content-Range: bytes {range}/9000000000");
        let server = Server::start(&[answer("206 Partial", &[&header], "2345")]);
        let found = run(server.store("anonymous=true").get("a/b", 5_000_000_000..5_000_000_004));
        assert_eq!(server.requests()[0].header("range"), Some("bytes=5000000000-5000000003"));
        found
    };
    assert_eq!(found("5000000000-5000000003").unwrap(), "2345");
    // The same in 32 bits.
    assert_eq!(*found("705032704-705032707").unwrap_err().kind(), StoreErrorKind::Interrupted);
}

#[test]
fn listings_go_on_to_their_end_and_not_beyond() {
    let page = |rest: &str, keys: &[&str]| {
        let objects: String =
            keys.iter().map(|key| format!("<Contents><Key>{key}</Key><Size>5</Size></Contents>")).collect();
        ok(&[], &format!("<ListBucketResult>{rest}{objects}</ListBucketResult>"))
    };
    let more = "<IsTruncated>true</IsTruncated><NextContinuationToken>t</NextContinuationToken>";
    let server = Server::start(&[
        page(more, &["pre/fix/b", "pre/other"]),
        page("<IsTruncated>false</IsTruncated>", &["pre/fix/a"]),
    ]);
    let found = run(server.store("anonymous=true").list("")).unwrap();
    assert_eq!(
        found.iter().map(|object| (&*object.name, object.bytes)).collect::<Vec<_>>(),
        [("a", 5), ("b", 5)]
    );
    let requests = server.requests();
    assert!(requests[0].line.contains("prefix=pre%2Ffix%2F") && !requests[0].line.contains("token"));
    assert!(requests[1].line.contains("continuation-token=t"));

    let endless = Server::start(&[page(more, &[]), page(more, &[])]);
    let error = run(endless.store("anonymous=true").list("")).unwrap_err();
    assert_eq!(*error.kind(), StoreErrorKind::Interrupted);
    assert_eq!(endless.requests().len(), 2);

    let other = more.replace("<NextContinuationToken>t", "<NextContinuationToken>u");
    let circle = Server::start(&[page(more, &[]), page(&other, &[]), page(more, &[])]);
    let error = run(circle.store("anonymous=true").list("")).unwrap_err();
    assert_eq!(*error.kind(), StoreErrorKind::Interrupted);
    assert_eq!(circle.requests().len(), 3);
}

#[test]
fn what_is_gone_is_deleted_and_aborted() {
    let server =
        Server::start(&[status(404, "NoSuchUpload"), status(404, "NoSuchKey"), status(404, "NoSuchBucket")]);
    let store = server.store("anonymous=true");
    let (id, _) = upload();
    run(store.abort(UploadRef { name: "a/b", id: &id })).unwrap();
    run(store.delete("a/b")).unwrap();
    assert_eq!(*run(store.delete("a/b")).unwrap_err().kind(), StoreErrorKind::NoSuchBucket);
    server.requests();
}

#[test]
fn credentials_in_a_url_are_refused_and_not_repeated() {
    for url in ["s3://key:hidden@bucket", "s3://bucket?secret_access_key=hidden"] {
        let error = open_store(url).unwrap_err();
        assert!(matches!(error.kind(), StoreErrorKind::InvalidUrl(_)), "{error}");
        assert!(!format!("{error} {error:?}").contains("hidden"));
    }
}

/// Runs `test` in another process that has these credentials in its environment, or none.
fn with_environment(test: &str, credentials: bool, inner: impl FnOnce()) {
    const ROLE: &str = "TIDELOG_TEST_WITH_CREDENTIALS";
    if env::var(ROLE).is_ok_and(|role| role == test) {
        return inner();
    }
    let mut command = Command::new(env::current_exe().unwrap());
    command.args(["--exact", test, "--test-threads=1", "--nocapture"]);
    for (name, _) in env::vars_os() {
        if name.to_string_lossy().starts_with("AWS_") {
            command.env_remove(name);
        }
    }
    command.env(ROLE, test).env("AWS_EC2_METADATA_DISABLED", "true").env("HOME", "/nowhere");
    if credentials {
        command.env("AWS_ACCESS_KEY_ID", "AKIATEST").env("AWS_SECRET_ACCESS_KEY", "secret");
    }
    assert!(command.status().unwrap().success());
}

#[test]
fn a_signature_covers_the_bytes() {
    with_environment("a_signature_covers_the_bytes", true, || {
        let server = Server::start(&[ok(&["ETag: \"t\""], ""), ok(&["ETag: \"t\""], "")]);
        put(&*server.store("region=eu-west-9")).unwrap();
        put(&*server.store("checksum=none")).unwrap();
        let requests = server.requests();
        // Of "some bytes", by sha256sum.
        let hash = "0d22cdcc10e6d049dbe1af5123d50873fdfc1a4f58306e58cb6241be9472014d";
        assert_eq!(requests[0].header("x-amz-content-sha256"), Some(hash));
        let authorization = requests[0].header("authorization").unwrap();
        assert!(authorization.contains("AKIATEST/") && authorization.contains("/eu-west-9/s3/"));
        assert_eq!(requests[1].header("x-amz-content-sha256"), Some("UNSIGNED-PAYLOAD"));
        assert!(requests[1].header("authorization").unwrap().contains("/us-east-1/s3/"));
    });
}

#[test]
fn expired_credentials_are_renewed_once() {
    with_environment("expired_credentials_are_renewed_once", true, || {
        let expired = status(400, "ExpiredToken");
        let server = Server::start(&[expired.clone(), ok(&["ETag: \"t\""], "")]);
        put(&*server.store("")).unwrap();
        assert_eq!(server.requests().len(), 2);
        assert_eq!(server.requests()[1].body, b"some bytes");

        let server = Server::start(&[expired.clone(), expired]);
        let error = put(&*server.store("")).unwrap_err();
        assert_eq!(*error.kind(), StoreErrorKind::Credentials);
        assert_eq!(server.requests().len(), 2);
    });
}

#[test]
fn a_wrong_clock_is_corrected_once() {
    with_environment("a_wrong_clock_is_corrected_once", true, || {
        let refused = status(403, "RequestTimeTooSkewed")
            .replace("Connection", "Date: Mon, 01 Jan 2035 10:30:00 GMT\r\nConnection");
        let tag = ok(&["ETag: \"t\""], "");
        let server = Server::start(&[refused.clone(), tag.clone(), tag]);
        let store = server.store("");
        put(&*store).unwrap();
        put(&*store).unwrap();
        let requests = server.requests();
        for (request, corrected) in requests.iter().zip([false, true, true]) {
            let date = request.header("x-amz-date").unwrap();
            assert_eq!(date.starts_with("20350101T10"), corrected, "{date}");
        }

        let server = Server::start(&[refused.clone(), refused]);
        let error = put(&*server.store("")).unwrap_err();
        assert_eq!(*error.kind(), StoreErrorKind::ClockSkew);
        assert_eq!(server.requests().len(), 2);
    });
}

#[test]
fn no_credentials_at_all_is_an_error_of_its_own() {
    with_environment("no_credentials_at_all_is_an_error_of_its_own", false, || {
        let server = Server::start(&[]);
        let error = put(&*server.store("")).unwrap_err();
        assert_eq!(*error.kind(), StoreErrorKind::Credentials, "{error}");
        assert_eq!(server.requests().len(), 0);
        // AWS itself needs a region.
        let store = open_store("s3://bucket").unwrap();
        let error = put(&*store).unwrap_err();
        assert_eq!(*error.kind(), StoreErrorKind::Misconfigured, "{error}");
        // Nobody has to renew anything, and it does not pass by itself.
        let text = error.to_string();
        assert!(text.contains("AWS_REGION") && !text.contains("renew"), "{text}");
        assert!(!error.is_retryable());
    });
}

#[test]
fn an_endpoint_of_a_profile_is_an_error_of_its_own() {
    const TEST: &str = "an_endpoint_of_a_profile_is_an_error_of_its_own";
    with_environment(TEST, true, || {
        if env::var_os("AWS_PROFILE").is_none() {
            let mut profile = tempfile::NamedTempFile::new().unwrap();
            profile
                .write_all(b"[profile p]\nregion = eu-west-9\nendpoint_url = http://127.0.0.1:9\n")
                .unwrap();
            let mut command = Command::new(env::current_exe().unwrap());
            command.args(["--exact", TEST, "--test-threads=1", "--nocapture"]);
            command.env("AWS_CONFIG_FILE", profile.path()).env("AWS_PROFILE", "p");
            return assert!(command.status().unwrap().success());
        }
        let error = put(&*open_store("s3://bucket").unwrap()).unwrap_err();
        assert_eq!(*error.kind(), StoreErrorKind::Misconfigured, "{error}");
        assert!(error.to_string().contains("AWS_ENDPOINT_URL_S3") && !error.is_retryable(), "{error}");
    });
}

/// A store whose server takes every PUT and keeps its connections open, and the number of these.
fn lasting_connections() -> (Arc<dyn Store>, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("s3://bucket?endpoint=http://{}&anonymous=true", listener.local_addr().unwrap());
    let connections = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&connections);
    thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else { return };
            counted.fetch_add(1, Ordering::Relaxed);
            thread::spawn(move || {
                let answer = ok(&["ETag: \"t\""], "").replace("Connection: close\r\n", "");
                while read_request(&mut stream).is_some_and(|request| !request.line.is_empty())
                    && stream.write_all(answer.as_bytes()).is_ok()
                {}
            });
        }
    });
    (open_store(&url).unwrap(), connections)
}

#[test]
fn a_retired_connection_is_not_used_again_and_another_is() {
    const PUTS: usize = 10;
    for retired in [false, true] {
        let (store, connections) = lasting_connections();
        run(async {
            for _ in 0..PUTS {
                let body = body();
                store.put("a", body.clone(), Lane::Primary).await.unwrap();
                assert_eq!(body.wire().taken_bytes(), Some(body.len()));
                if retired {
                    body.wire().retire();
                }
            }
        });
        let connections = connections.load(Ordering::Relaxed);
        // A connection comes back a little after its answer: some requests may open one more.
        assert!(if retired { connections == PUTS } else { connections < PUTS }, "{retired}: {connections}");
    }
}

#[test]
fn a_body_that_the_server_does_not_read_stays_and_its_connection_closes_when_it_is_given_up() {
    const BYTES: u64 = 64 << 20;
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("s3://bucket?endpoint=http://{}&anonymous=true", listener.local_addr().unwrap());
    let store = open_store(&format!("{url}&checksum=none")).unwrap();
    let body = Body::new(vec![Bytes::from(vec![7; BYTES as usize])]);
    let wire = body.wire().clone();
    run(async {
        let request = tokio::spawn(async move { store.put("a", body, Lane::Primary).await });
        let accepted = tokio::task::spawn_blocking(move || {
            let (mut stream, _) = listener.accept().unwrap();
            stream.read_exact(&mut [0; 16]).unwrap();
            stream
        });
        let mut stream = accepted.await.unwrap();
        while wire.taken_bytes().is_none_or(|bytes| bytes == 0) {
            tokio::task::yield_now().await;
        }
        request.abort();
        assert!(request.await.unwrap_err().is_cancelled());
        let read = tokio::task::spawn_blocking(move || std::io::copy(&mut stream, &mut std::io::sink()));
        // A reset is an end too.
        let read = read.await.unwrap().unwrap_or(0);
        let taken = wire.taken_bytes().unwrap();
        assert!(read < BYTES && taken < BYTES, "{read} read, {taken} taken");
    });
}

#[test]
fn a_request_given_up_closes_its_connection() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let store =
        open_store(&format!("s3://bucket?endpoint=http://{}&anonymous=true", listener.local_addr().unwrap()))
            .unwrap();
    let (sender, receiver) = std::sync::mpsc::channel();
    let server = thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        assert!(read_request(&mut stream).is_some());
        sender.send(()).unwrap();
        // Never answers; ends when the other side closes.
        let _ = stream.set_read_timeout(Some(Duration::from_secs(30)));
        stream.read(&mut [0; 16])
    });
    run(async {
        let request = tokio::spawn(async move { store.put("a", body(), Lane::Primary).await });
        tokio::task::spawn_blocking(move || receiver.recv().unwrap()).await.unwrap();
        request.abort();
        let _ = request.await;
        let end = tokio::task::spawn_blocking(move || server.join().unwrap()).await.unwrap();
        assert!(matches!(end, Ok(0) | Err(_)), "{end:?}");
        assert!(!matches!(&end, Err(error) if error.kind() == std::io::ErrorKind::WouldBlock));
    });
}
