//! The test server against the client that most people have: real requests, real signatures.

use std::time::{Duration, SystemTime};

use aws_sdk_s3::Client;
use aws_sdk_s3::config::retry::RetryConfig;
use aws_sdk_s3::config::{
    BehaviorVersion, Credentials, Region, RequestChecksumCalculation, ResponseChecksumValidation,
    StalledStreamProtectionConfig,
};
use aws_sdk_s3::error::{ProvideErrorMetadata, SdkError};
use aws_sdk_s3::primitives::ByteStream;
use aws_sdk_s3::types::{CompletedMultipartUpload, CompletedPart};
use tidelog_testing::{
    ACCESS_KEY, BucketRules, Direction, Fate, Fault, Proxy, REGION, Rule, S3Server, SECRET_KEY, ServerOptions,
};
use tidelog_upload::Operation;

const MIN: usize = 5 << 20;

fn server() -> S3Server {
    start(ServerOptions::default())
}

fn start(options: ServerOptions) -> S3Server {
    S3Server::start(ServerOptions { buckets: vec!["bucket-0".into(), "bucket-1".into()], ..options })
        .expect("a server")
}

fn client(endpoint: String) -> Client {
    client_with_key(endpoint, ACCESS_KEY, SECRET_KEY)
}

fn client_with_key(endpoint: String, access_key: &str, secret_key: &str) -> Client {
    let config = aws_sdk_s3::Config::builder()
        .behavior_version(BehaviorVersion::latest())
        .endpoint_url(endpoint)
        .force_path_style(true)
        .region(Region::new(REGION))
        .credentials_provider(Credentials::new(access_key, secret_key, None, None, "test"))
        .http_client(aws_smithy_http_client::Builder::new().build_http())
        .retry_config(RetryConfig::disabled())
        .stalled_stream_protection(StalledStreamProtectionConfig::disabled())
        .request_checksum_calculation(RequestChecksumCalculation::WhenRequired)
        .response_checksum_validation(ResponseChecksumValidation::WhenRequired)
        .build();
    Client::from_conf(config)
}

async fn put(client: &Client, name: &str, bytes: &[u8]) -> Result<String, String> {
    let request = client.put_object().bucket("bucket-0").key(name).body(ByteStream::from(bytes.to_vec()));
    Ok(request.send().await.map_err(code)?.e_tag.expect("a tag"))
}

async fn create(client: &Client, name: &str) -> String {
    let request = client.create_multipart_upload().bucket("bucket-0").key(name);
    request.send().await.expect("an upload").upload_id.expect("an id")
}

async fn part(client: &Client, name: &str, id: &str, number: i32, bytes: Vec<u8>) -> Result<String, String> {
    let request = client.upload_part().bucket("bucket-0").key(name).upload_id(id).part_number(number);
    Ok(request.body(ByteStream::from(bytes)).send().await.map_err(code)?.e_tag.expect("a tag"))
}

async fn complete(client: &Client, name: &str, id: &str, parts: &[(i32, &str)]) -> Result<String, String> {
    let parts =
        parts.iter().map(|(number, tag)| CompletedPart::builder().part_number(*number).e_tag(*tag).build());
    let upload = CompletedMultipartUpload::builder().set_parts(Some(parts.collect())).build();
    let request = client
        .complete_multipart_upload()
        .bucket("bucket-0")
        .key(name)
        .upload_id(id)
        .multipart_upload(upload);
    Ok(request.send().await.map_err(code)?.e_tag.expect("a tag"))
}

async fn get(client: &Client, name: &str, range: Option<&str>) -> Result<Vec<u8>, String> {
    let request = client.get_object().bucket("bucket-0").key(name).set_range(range.map(str::to_owned));
    let body = request.send().await.map_err(code)?.body;
    Ok(body.collect().await.map_err(|error| format!("body: {error}"))?.to_vec())
}

/// The code of an answered error, or how there was no answer.
fn code<E: ProvideErrorMetadata, R>(error: SdkError<E, R>) -> String {
    match error {
        SdkError::ServiceError(error) => error.err().code().unwrap_or("no code").to_owned(),
        SdkError::DispatchFailure(_) => "dispatch".to_owned(),
        SdkError::ResponseError(_) => "response".to_owned(),
        SdkError::TimeoutError(_) => "timeout".to_owned(),
        _ => "construction".to_owned(),
    }
}

fn bytes(seed: u8, len: usize) -> Vec<u8> {
    (0..len).map(|at| (at / 251) as u8 ^ (at as u8) ^ seed).collect()
}

#[tokio::test]
async fn objects_come_back_whole_and_in_ranges() {
    let server = server();
    let client = client(server.endpoint());
    let body = bytes(1, 300_000);
    let tag = put(&client, "a/b c+d%20/ä", &body).await.expect("put");
    assert_eq!(tag.len(), 34, "a quoted MD5: {tag}");
    assert_eq!(get(&client, "a/b c+d%20/ä", None).await.expect("get"), body);
    assert_eq!(get(&client, "a/b c+d%20/ä", Some("bytes=10-19")).await.expect("get"), body[10..20]);
    assert_eq!(get(&client, "a/b c+d%20/ä", Some("bytes=300000-")).await, Err("InvalidRange".into()));
    assert_eq!(get(&client, "none", None).await, Err("NoSuchKey".into()));

    put(&client, "empty", b"").await.expect("put");
    assert_eq!(get(&client, "empty", None).await.expect("get"), b"");

    let head = client.head_object().bucket("bucket-0").key("a/b c+d%20/ä").send().await.expect("head");
    assert_eq!(head.content_length(), Some(300_000));
    assert_eq!(head.e_tag(), Some(&*tag));
    let within = head.last_modified().expect("a time").secs() - unix_seconds();
    assert!(within.abs() < 60, "{within}");

    assert_eq!(server.object("bucket-0", "a/b c+d%20/ä").as_deref(), Some(&*body));
    assert_eq!(
        server.objects("bucket-0").iter().map(|object| object.bytes).collect::<Vec<_>>(),
        [300_000, 0]
    );
    for _ in 0..2 {
        client.delete_object().bucket("bucket-0").key("empty").send().await.expect("delete");
    }
    assert_eq!(server.objects("bucket-0").len(), 1);
    assert_eq!(server.count(Operation::Delete), 2);
    let nowhere = client.head_bucket().bucket("nowhere").send().await;
    assert!(nowhere.is_err());
}

#[tokio::test]
async fn signatures_are_verified() {
    let server = server();
    let wrong = client_with_key(server.endpoint(), ACCESS_KEY, "wrong");
    assert_eq!(put(&wrong, "a", b"x").await, Err("SignatureDoesNotMatch".into()));
    let unknown = client_with_key(server.endpoint(), "unknown", SECRET_KEY);
    assert_eq!(put(&unknown, "a", b"x").await, Err("InvalidAccessKeyId".into()));
    let old = client(server.endpoint());
    put(&old, "a", b"x").await.expect("put");
    let key = server.expire_credentials();
    assert_eq!(put(&old, "b", b"x").await, Err("ExpiredToken".into()));
    put(&client_with_key(server.endpoint(), &key, SECRET_KEY), "c", b"x").await.expect("put");
    assert_eq!(server.objects("bucket-0").len(), 2);
}

#[tokio::test]
async fn parts_become_an_object() {
    let server = server();
    let client = client(server.endpoint());
    let id = create(&client, "m").await;
    let (first, last) = (bytes(1, MIN), bytes(2, 1000));
    let stale = part(&client, "m", &id, 3, bytes(9, MIN)).await.expect("part");
    let one = part(&client, "m", &id, 3, first.clone()).await.expect("part");
    let two = part(&client, "m", &id, 7, last.clone()).await.expect("part");
    part(&client, "m", &id, 9, bytes(3, 10)).await.expect("part");
    assert_ne!(stale, one);

    let refused = [
        (vec![(3, &*stale), (7, &*two)], "InvalidPart"),
        (vec![(3, &*one), (8, &*two)], "InvalidPart"),
        (vec![(7, &*two), (3, &*one)], "InvalidPartOrder"),
        (vec![(7, &*two), (9, &*two)], "InvalidPart"),
    ];
    for (parts, error) in refused {
        assert_eq!(complete(&client, "m", &id, &parts).await, Err(error.into()), "{parts:?}");
    }
    assert_eq!(server.uploads("bucket-0")[0].parts, [(3, MIN as u64), (7, 1000), (9, 10)]);
    assert!(server.objects("bucket-0").is_empty());

    let tag = complete(&client, "m", &id, &[(3, &one), (7, &two)]).await.expect("complete");
    assert!(tag.ends_with("-2\""), "{tag}");
    let whole = [first, last].concat();
    assert!(server.object("bucket-0", "m").expect("there") == whole);
    let across = get(&client, "m", Some(&format!("bytes={}-{}", MIN - 2, MIN + 1))).await.expect("get");
    assert_eq!(across, whole[MIN - 2..MIN + 2]);
    assert!(server.uploads("bucket-0").is_empty());

    assert_eq!(complete(&client, "m", &id, &[(3, &one), (7, &two)]).await, Ok(tag));
    assert_eq!(complete(&client, "m", &id, &[(3, &one)]).await, Err("NoSuchUpload".into()));
    assert_eq!(part(&client, "m", &id, 1, vec![1]).await, Err("NoSuchUpload".into()));
}

#[tokio::test]
async fn rules_of_other_stores() {
    let server = server();
    let client = client(server.endpoint());

    // A part that is too small; which one is the last is known at Complete only.
    let id = create(&client, "small").await;
    let one = part(&client, "small", &id, 1, bytes(1, MIN - 1)).await.expect("part");
    let two = part(&client, "small", &id, 2, bytes(1, 1)).await.expect("part");
    assert_eq!(complete(&client, "small", &id, &[(1, &one), (2, &two)]).await, Err("EntityTooSmall".into()));
    complete(&client, "small", &id, &[(1, &one)]).await.expect("complete");

    let rules = BucketRules { part_bytes_min: 1, ..BucketRules::default() };
    let with = |rules: BucketRules| server.set_bucket_rules("bucket-0", rules);

    with(BucketRules { sparse: false, ..rules.clone() });
    let id = create(&client, "gaps").await;
    let one = part(&client, "gaps", &id, 1, vec![1]).await.expect("part");
    let three = part(&client, "gaps", &id, 3, vec![3]).await.expect("part");
    assert_eq!(complete(&client, "gaps", &id, &[(1, &one), (3, &three)]).await, Err("InvalidPart".into()));

    with(BucketRules { equal_parts: true, ..rules.clone() });
    let id = create(&client, "equal").await;
    let mut tags = Vec::new();
    for (number, len) in [(1, 2), (2, 2), (3, 1), (4, 3)] {
        tags.push(part(&client, "equal", &id, number, vec![1; len]).await.expect("part"));
    }
    let all = [(1, &*tags[0]), (2, &*tags[1]), (3, &*tags[2]), (4, &*tags[3])];
    assert_eq!(complete(&client, "equal", &id, &all).await, Err("InvalidPart".into()));
    assert_eq!(complete(&client, "equal", &id, &[all[0], all[3]]).await, Err("InvalidPart".into()));
    complete(&client, "equal", &id, &all[..3]).await.expect("complete");

    with(BucketRules { random_tags: true, ..rules.clone() });
    let id = create(&client, "random").await;
    let old = part(&client, "random", &id, 1, vec![1]).await.expect("part");
    let new = part(&client, "random", &id, 1, vec![1]).await.expect("part");
    assert_ne!(old, new);
    assert_eq!(complete(&client, "random", &id, &[(1, &old)]).await, Err("InvalidPart".into()));
    complete(&client, "random", &id, &[(1, &new)]).await.expect("complete");

    with(BucketRules { duplicate_invalidates: true, complete_twice: false, ..rules.clone() });
    let id = create(&client, "duplicate").await;
    part(&client, "duplicate", &id, 1, vec![1]).await.expect("part");
    let again = part(&client, "duplicate", &id, 1, vec![1]).await.expect("part");
    let two = part(&client, "duplicate", &id, 2, vec![2]).await.expect("part");
    assert_eq!(
        complete(&client, "duplicate", &id, &[(1, &again), (2, &two)]).await,
        Err("InvalidPart".into())
    );
    complete(&client, "duplicate", &id, &[(2, &two)]).await.expect("complete");
    assert_eq!(complete(&client, "duplicate", &id, &[(2, &two)]).await, Err("NoSuchUpload".into()));

    with(BucketRules { part_bytes_max: 10, parts_max: 4, ..rules.clone() });
    let id = create(&client, "large").await;
    assert_eq!(part(&client, "large", &id, 1, vec![1; 11]).await, Err("EntityTooLarge".into()));
    assert_eq!(part(&client, "large", &id, 5, vec![1]).await, Err("InvalidArgument".into()));
    assert_eq!(put(&client, "large", &[1; 11]).await, Err("EntityTooLarge".into()));
}

#[tokio::test]
async fn a_write_can_be_bound_to_the_absence_of_the_object() {
    let server = server();
    let client = client(server.endpoint());
    let put = |name: &'static str| {
        let request = client.put_object().bucket("bucket-0").key(name).if_none_match("*");
        async { request.body(ByteStream::from_static(b"x")).send().await.map(drop).map_err(code) }
    };
    assert_eq!(put("a").await, Ok(()));
    assert_eq!(put("a").await, Err("PreconditionFailed".into()));
    server.set_bucket_rules("bucket-0", BucketRules { conditional_put: false, ..BucketRules::default() });
    assert_eq!(put("a").await, Ok(()));
}

#[tokio::test]
async fn listings_come_in_pages() {
    let server = server();
    let client = client(server.endpoint());
    server.set_bucket_rules("bucket-0", BucketRules { page_items_max: 2, ..BucketRules::default() });
    for name in ["p/1", "p/2", "p/3", "q"] {
        put(&client, name, b"x").await.expect("put");
        create(&client, name).await;
    }
    let again = create(&client, "p/2").await;
    for number in [1, 4, 9] {
        part(&client, "p/2", &again, number, vec![0; number as usize]).await.expect("part");
    }

    let mut names = Vec::new();
    let mut pages = client.list_objects_v2().bucket("bucket-0").prefix("p/").into_paginator().send();
    while let Some(page) = pages.next().await {
        names.extend(
            page.expect("a page").contents().iter().map(|object| object.key().expect("a name").to_owned()),
        );
    }
    assert_eq!(names, ["p/1", "p/2", "p/3"]);
    assert_eq!(server.count(Operation::List), 2);

    let mut parts = Vec::new();
    let mut pages =
        client.list_parts().bucket("bucket-0").key("p/2").upload_id(&again).into_paginator().send();
    while let Some(page) = pages.next().await {
        parts.extend(page.expect("a page").parts().iter().map(|part| (part.part_number(), part.size())));
    }
    assert_eq!(parts, [(Some(1), Some(1)), (Some(4), Some(4)), (Some(9), Some(9))]);
    assert_eq!(server.count(Operation::ListParts), 2);

    let mut uploads = Vec::new();
    let mut request = client.list_multipart_uploads().bucket("bucket-0").prefix("p/");
    loop {
        let page = request.send().await.expect("a page");
        uploads.extend(page.uploads().iter().map(|upload| upload.key().expect("a name").to_owned()));
        if page.is_truncated() != Some(true) {
            break;
        }
        let (name, id) = (page.next_key_marker, page.next_upload_id_marker);
        request = client.list_multipart_uploads().bucket("bucket-0").prefix("p/");
        request = request.set_key_marker(name).set_upload_id_marker(id);
    }
    assert_eq!(uploads, ["p/1", "p/2", "p/2", "p/3"]);
    assert_eq!(server.count(Operation::ListUploads), 2);
}

#[tokio::test]
async fn bodies_on_disk_are_kept_once_and_go_with_their_objects() {
    let folder = tempfile::tempdir().expect("a folder");
    let files = || std::fs::read_dir(folder.path()).expect("a folder").count();
    let server = start(ServerOptions { folder: Some(folder.path().to_owned()), ..Default::default() });
    let client = client(server.endpoint());
    let id = create(&client, "m").await;
    let one = part(&client, "m", &id, 1, bytes(1, MIN)).await.expect("part");
    let two = part(&client, "m", &id, 2, bytes(2, 10)).await.expect("part");
    part(&client, "m", &id, 3, bytes(3, 10)).await.expect("part");
    assert_eq!(files(), 3);
    complete(&client, "m", &id, &[(1, &one), (2, &two)]).await.expect("complete");
    assert_eq!(files(), 2);
    let read = get(&client, "m", Some(&format!("bytes={}-", MIN - 3))).await.expect("get");
    assert_eq!(read, [&bytes(1, MIN)[MIN - 3..], &bytes(2, 10)].concat());
    client.delete_object().bucket("bucket-0").key("m").send().await.expect("delete");
    assert_eq!(files(), 0);
}

#[tokio::test]
async fn faults_that_do_nothing() {
    let server = server();
    let client = client(server.endpoint());
    let faults = [
        (Fault::SlowDown, "SlowDown"),
        (Fault::InternalError, "InternalError"),
        (Fault::ExpiredToken, "ExpiredToken"),
        (Fault::ClockSkew, "RequestTimeTooSkewed"),
        (Fault::Denied, "AccessDenied"),
        (Fault::Redirect, "PermanentRedirect"),
        (Fault::Conflict, "OperationAborted"),
        (Fault::Drop, "dispatch"),
    ];
    for (fault, expected) in faults {
        server.add_rule(Rule::new(fault).operation(Operation::Put).bucket("bucket-0").first(1));
        assert_eq!(put(&client, "x", &bytes(1, 1 << 20)).await, Err(expected.into()), "{fault:?}");
        assert!(server.objects("bucket-0").is_empty(), "{fault:?}");
        server.clear_rules();
    }
    put(&client, "x", b"x").await.expect("put");
}

#[tokio::test]
async fn faults_that_take_effect_all_the_same() {
    let server = server();
    let client = client(server.endpoint());
    server.add_rule(Rule::new(Fault::DropAnswer).operation(Operation::Put).first(1));
    assert_eq!(put(&client, "dropped", b"x").await, Err("dispatch".into()));
    assert_eq!(server.objects("bucket-0").len(), 1);

    for applied in [false, true] {
        server.clear_rules();
        server.add_rule(Rule::new(Fault::ErrorInBody { applied }).operation(Operation::Complete));
        let id = create(&client, "m").await;
        let one = part(&client, "m", &id, 1, vec![1]).await.expect("part");
        assert_eq!(complete(&client, "m", &id, &[(1, &one)]).await, Err("InternalError".into()));
        assert_eq!(server.object("bucket-0", "m").is_some(), applied);
    }

    server.clear_rules();
    server.add_rule(Rule::new(Fault::DropAnswer).operation(Operation::Complete));
    let id = create(&client, "unknown").await;
    let one = part(&client, "unknown", &id, 1, vec![1]).await.expect("part");
    assert_eq!(complete(&client, "unknown", &id, &[(1, &one)]).await, Err("dispatch".into()));
    assert!(server.object("bucket-0", "unknown").is_some());
}

#[tokio::test]
async fn a_request_takes_effect_after_its_client_has_left() {
    let server = server();
    let client = client(server.endpoint());
    server.add_rule(Rule::new(Fault::ApplyLate(Duration::ZERO)).operation(Operation::Put).first(1));
    let given_up = tokio::time::timeout(Duration::from_millis(300), put(&client, "late", b"x")).await;
    assert!(given_up.is_err(), "there was an answer: {given_up:?}");
    until(|| server.object("bucket-0", "late").is_some()).await;
}

#[tokio::test]
async fn a_request_that_hangs_does_nothing() {
    let server = server();
    let client = client(server.endpoint());
    server.add_rule(Rule::new(Fault::Hang).operation(Operation::Put).first(1));
    let given_up = tokio::time::timeout(Duration::from_millis(200), put(&client, "hangs", b"x")).await;
    assert!(given_up.is_err(), "there was an answer: {given_up:?}");
    put(&client, "next", b"x").await.expect("put");
    assert_eq!(server.objects("bucket-0").len(), 1);
}

/// Times have a lower bound only: a busy machine may take longer.
#[tokio::test]
async fn delays_and_bandwidth() {
    let server = server();
    let client = client(server.endpoint());
    let faults = [
        Fault::Delay(Duration::from_millis(100)),
        Fault::DelayAnswer(Duration::from_millis(100)),
        Fault::Bandwidth { bytes_per_second: 1 << 20 },
    ];
    for fault in faults {
        server.clear_rules();
        server.add_rule(Rule::new(fault));
        let start = std::time::Instant::now();
        put(&client, "x", &bytes(1, 128 << 10)).await.expect("put");
        assert!(start.elapsed() >= Duration::from_millis(100), "{fault:?}");
        let start = std::time::Instant::now();
        assert_eq!(get(&client, "x", None).await.expect("get"), bytes(1, 128 << 10));
        assert!(start.elapsed() >= Duration::from_millis(100), "{fault:?}");
    }
}

#[tokio::test]
async fn a_server_in_another_hour_refuses_until_the_client_knows() {
    let server = server();
    let client = client(server.endpoint());
    server.set_clock_offset(3600);
    assert_eq!(put(&client, "x", b"x").await, Err("RequestTimeTooSkewed".into()));
    server.set_clock_offset(600);
    put(&client, "x", b"x").await.expect("put");
}

#[tokio::test]
async fn a_dropped_server_closes_its_port() {
    let server = server();
    let address = server.address();
    drop(server);
    until(|| std::net::TcpStream::connect(address).is_err()).await;
}

#[tokio::test]
async fn the_proxy_stands_between() {
    let server = server();
    let proxy = Proxy::start(server.address()).expect("a proxy");
    let body = bytes(1, 1 << 20);
    let direct = client(server.endpoint());
    put(&direct, "x", &body).await.expect("put");

    let through = || client(proxy.endpoint());
    let client = through();
    put(&client, "x", &body).await.expect("put");
    assert_eq!(get(&client, "x", None).await.expect("get"), body);
    assert!(proxy.bytes(Direction::Up) > 1 << 20 && proxy.bytes(Direction::Down) > 1 << 20);

    // The answer breaks off within the body.
    let after_bytes = 100_000;
    for fate in [
        Fate::Truncated { direction: Direction::Down, after_bytes },
        Fate::Reset { direction: Direction::Down, after_bytes },
    ] {
        proxy.set(move |_| fate);
        let read = get(&through(), "x", None).await;
        assert!(read.as_ref().is_err_and(|error| error.starts_with("body: ")), "{fate:?} {read:?}");
    }
    // The request breaks off.
    for fate in [
        Fate::Truncated { direction: Direction::Up, after_bytes },
        Fate::Reset { direction: Direction::Up, after_bytes },
    ] {
        proxy.set(move |_| fate);
        assert_eq!(put(&through(), "broken", &body).await, Err("dispatch".into()), "{fate:?}");
        assert!(server.object("bucket-0", "broken").is_none());
    }
    // Nothing more ever comes.
    for fate in [
        Fate::Stalled { direction: Direction::Up, after_bytes },
        Fate::Stalled { direction: Direction::Down, after_bytes: 0 },
        Fate::Dead,
    ] {
        proxy.set(move |_| fate);
        let client = through();
        let answer = tokio::time::timeout(Duration::from_millis(200), put(&client, "stalled", &body)).await;
        assert!(answer.is_err(), "{fate:?} {answer:?}");
    }
    proxy.set(|_| Fate::Throttled { bytes_per_second: 10 << 20 });
    let start = std::time::Instant::now();
    put(&through(), "x", &body).await.expect("put");
    assert!(start.elapsed() >= Duration::from_millis(100));
}

#[tokio::test]
async fn connections_of_a_pool_die_behind_the_proxy() {
    let server = server();
    let proxy = Proxy::start(server.address()).expect("a proxy");
    let client = client(proxy.endpoint());
    put(&client, "x", b"x").await.expect("put");
    put(&client, "x", b"x").await.expect("put");
    assert_eq!(proxy.connections(), 1, "the client keeps its connection");
    proxy.freeze();
    let answer = tokio::time::timeout(Duration::from_millis(200), put(&client, "x", b"x")).await;
    assert!(answer.is_err(), "{answer:?}");
    put(&client, "x", b"x").await.expect("the given-up connection is not used again");
    assert_eq!(proxy.connections(), 2);

    let accepted = proxy.connections();
    proxy.set(|_| Fate::IdleClosed { after: Duration::from_millis(50) });
    proxy.reset();
    // A client may notice the reset only with its next request.
    let _ = put(&client, "x", b"x").await;
    put(&client, "x", b"x").await.expect("put");
    assert!(proxy.connections() > accepted);

    use std::io::Read as _;
    let mut idle = std::net::TcpStream::connect(proxy.address()).expect("a connection");
    idle.set_read_timeout(Some(Duration::from_secs(10))).expect("a limit");
    let read = tokio::task::spawn_blocking(move || idle.read(&mut [0; 1])).await.expect("no panic");
    assert_eq!(read.expect("closed in good order"), 0);
}

async fn until(condition: impl Fn() -> bool) {
    for _ in 0..1000 {
        if condition() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("it did not happen within ten seconds");
}

fn unix_seconds() -> i64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("after 1970").as_secs() as i64
}
