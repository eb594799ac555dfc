//! Checkpoints in real S3 buckets: the protocol, the signatures and the failures of a server in this process, several
//! buckets, and what is restored from them.
#![forbid(unsafe_code)]

use std::time::Duration;

use tidelog::{
    Changelog, ChangelogHandle, ChangelogReader, ChangelogWriter, HedgeOptions, KeyGroup, KeyGroupRange,
    Options, SequenceNumber, UploadOptions,
};
use tidelog_testing::{Fate, Fault, Proxy, Rule, S3Server, ServerOptions, with_credentials};
use tidelog_upload::Operation;

const BUCKETS: [&str; 3] = ["bucket-0", "bucket-1", "bucket-2"];
const MIB: usize = 1 << 20;

fn server() -> S3Server {
    let buckets = BUCKETS.map(str::to_owned).to_vec();
    S3Server::start(ServerOptions { buckets, ..ServerOptions::default() }).unwrap()
}

fn url(bucket: &str, endpoint: &str) -> String {
    format!("s3://{bucket}/state?endpoint={endpoint}&region=us-east-1&sparse=true")
}

/// A changelog over all three buckets.
fn open(server: &S3Server, dir: &tempfile::TempDir) -> Changelog {
    open_with(server, dir, HedgeOptions::default())
}

fn open_with(server: &S3Server, dir: &tempfile::TempDir, hedging: HedgeOptions) -> Changelog {
    let endpoint = server.endpoint();
    let mut uploads = UploadOptions::default();
    uploads.hedging = hedging;
    let mut options = options(&url(BUCKETS[0], &endpoint), dir).uploads(uploads);
    for bucket in &BUCKETS[1..] {
        options = options.add_bucket(url(bucket, &endpoint));
    }
    Changelog::open(options).unwrap()
}

fn options(bucket: &str, dir: &tempfile::TempDir) -> Options {
    Options::new(bucket, dir.path().join("local"))
        .segment_bytes(8 << 20)
        .local_bytes(128 << 20)
        .lane_bytes(MIB)
        .persist_timeout(Duration::from_secs(60))
}

fn value(number: u64) -> Vec<u8> {
    let mut random = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut value = number.to_le_bytes().to_vec();
    value.extend((0..1016).map(|_| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random as u8
    }));
    value
}

fn append(writer: &mut ChangelogWriter, numbers: std::ops::Range<u64>) {
    for number in numbers {
        writer.append(KeyGroup((number % 128) as u16), &value(number)).unwrap();
    }
}

/// Reads all that the handle names, from the buckets, and compares.
fn check(handle: &ChangelogHandle) {
    let mut seen = 0;
    for half in [KeyGroupRange::new(0, 63).unwrap(), KeyGroupRange::new(64, 127).unwrap()] {
        for change in ChangelogReader::open(std::slice::from_ref(handle), half).unwrap() {
            let change = change.unwrap();
            assert_eq!(change.value, value(change.number.0));
            assert_eq!(change.key_group, Some(KeyGroup((change.number.0 % 128) as u16)));
            seen += 1;
        }
    }
    assert_eq!(seen, handle.to().0 - handle.from().0);
}

/// Truncates everything, and waits until nothing is left in the buckets.
fn check_nothing_stays(server: &S3Server, changelog: Changelog, writer: ChangelogWriter) {
    writer.truncate(writer.next_sequence_number()).unwrap();
    drop(writer);
    let left = || -> Vec<_> {
        let of = |bucket: &&str| (server.objects(bucket), server.uploads(bucket));
        BUCKETS
            .iter()
            .map(of)
            .filter(|(objects, uploads)| !(objects.is_empty() && uploads.is_empty()))
            .collect()
    };
    for _ in 0..1200 {
        if left().is_empty() {
            return changelog.close(Duration::from_secs(30)).unwrap();
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    panic!("left over: {:?}\n{:#?}", left(), server.requests());
}

#[test]
fn small_and_large_checkpoints_are_single_objects_and_come_back() {
    with_credentials("small_and_large_checkpoints_are_single_objects_and_come_back", || {
        let server = server();
        let dir = tempfile::tempdir().unwrap();
        // On a slow machine there would be races, and files of losers.
        let changelog = open_with(&server, &dir, HedgeOptions::off());
        let mut writer = changelog.create_writer("state", KeyGroupRange::ALL).unwrap();
        append(&mut writer, 0..100);
        let small = writer.persist_durably(SequenceNumber::ZERO).wait().unwrap();
        check(&small);
        assert_eq!(server.count(Operation::Create), 0, "a small object is one PUT");
        assert_eq!(server.count(Operation::Put), 1);

        append(&mut writer, 100..40_000);
        let large = writer.persist_durably(SequenceNumber::ZERO).wait().unwrap();
        check(&large);
        assert_eq!(server.count(Operation::Complete), 1);
        let objects: usize = BUCKETS.iter().map(|bucket| server.objects(bucket).len()).sum();
        assert_eq!((objects, large.extents().len()), (2, 2), "one object per checkpoint");

        // Nothing new: no request, and the handle refers to what is there.
        let before = server.requests().len();
        let again = writer.persist_durably(SequenceNumber(50)).wait().unwrap();
        assert_eq!(server.requests().len(), before);
        check(&again);
        check_nothing_stays(&server, changelog, writer);
    });
}

#[test]
fn a_dead_bucket_costs_no_checkpoint() {
    with_credentials("a_dead_bucket_costs_no_checkpoint", || {
        let server = server();
        let dead = Proxy::start(server.address()).unwrap();
        dead.set(|_| Fate::Dead);
        for first in 0..3 {
            let dir = tempfile::tempdir().unwrap();
            let endpoints: Vec<String> = (0..3)
                .map(|index| if index == first { dead.endpoint() } else { server.endpoint() })
                .collect();
            let mut options = options(&url(BUCKETS[0], &endpoints[0]), &dir);
            for index in 1..3 {
                options = options.add_bucket(url(BUCKETS[index], &endpoints[index]));
            }
            let changelog = Changelog::open(options).unwrap();
            let mut writer = changelog.create_writer("state", KeyGroupRange::ALL).unwrap();
            for round in 0..4 {
                append(&mut writer, round * 12_000..round * 12_000 + 12_000);
                let handle = writer.persist_durably(SequenceNumber::ZERO).wait().unwrap();
                check(&handle);
            }
            drop(writer);
            drop(changelog);
        }
    });
}

#[test]
fn lost_answers_and_errors_in_a_success_are_settled_by_evidence() {
    with_credentials("lost_answers_and_errors_in_a_success_are_settled_by_evidence", || {
        for fault in
            [Fault::DropAnswer, Fault::ErrorInBody { applied: true }, Fault::ErrorInBody { applied: false }]
        {
            let server = server();
            let dir = tempfile::tempdir().unwrap();
            let changelog = open(&server, &dir);
            let mut writer = changelog.create_writer("state", KeyGroupRange::ALL).unwrap();
            server.add_rule(Rule::new(fault).operation(Operation::Complete).nth(1));
            append(&mut writer, 0..20_000);
            let handle = writer.persist_durably(SequenceNumber::ZERO).wait().unwrap();
            check(&handle);
            check_nothing_stays(&server, changelog, writer);
        }
    });
}

#[test]
fn refusals_and_broken_connections_are_overcome() {
    with_credentials("refusals_and_broken_connections_are_overcome", || {
        let server = server();
        let dir = tempfile::tempdir().unwrap();
        let changelog = open(&server, &dir);
        let mut writer = changelog.create_writer("state", KeyGroupRange::ALL).unwrap();
        for fault in [Fault::SlowDown, Fault::InternalError, Fault::Drop, Fault::DropAnswer] {
            server.add_rule(Rule::new(fault).probability(0.05));
        }
        for round in 0..6 {
            append(&mut writer, round * 10_000..round * 10_000 + 10_000);
            let handle = writer.persist_durably(SequenceNumber::ZERO).wait().unwrap();
            assert_eq!(handle.to().0, round * 10_000 + 10_000);
        }
        server.clear_rules();
        let handle = writer.persist_durably(SequenceNumber::ZERO).wait().unwrap();
        check(&handle);
        check_nothing_stays(&server, changelog, writer);
    });
}

#[test]
fn denied_access_fails_at_once_and_is_over_when_it_is_granted() {
    with_credentials("denied_access_fails_at_once_and_is_over_when_it_is_granted", || {
        let server = server();
        let dir = tempfile::tempdir().unwrap();
        let changelog = open(&server, &dir);
        let mut writer = changelog.create_writer("state", KeyGroupRange::ALL).unwrap();
        append(&mut writer, 0..100);
        server.add_rule(Rule::new(Fault::Denied));
        let error = writer.persist_durably(SequenceNumber::ZERO).wait().unwrap_err();
        assert!(error.to_string().contains("denied"), "{error}");
        server.clear_rules();
        let handle = writer.persist_durably(SequenceNumber::ZERO).wait().unwrap();
        check(&handle);
    });
}

/// The same bucket by two endpoints, as two gateways or two names of one host are.
#[test]
fn a_bucket_with_two_urls_loses_nothing_to_its_own_races() {
    with_credentials("a_bucket_with_two_urls_loses_nothing_to_its_own_races", || {
        let server = server();
        let proxy = Proxy::start(server.address()).unwrap();
        // Late enough to be raced, and then all of them succeed.
        server.add_rule(Rule::new(Fault::DelayAnswer(Duration::from_millis(700))).operation(Operation::Put));
        for small in [true, false] {
            let dir = tempfile::tempdir().unwrap();
            let mut uploads = UploadOptions::default();
            uploads.hedging.tokens_per_part = 10.0;
            if !small {
                // Each part that is raced is an object of its own.
                server.add_rule(
                    Rule::new(Fault::DelayAnswer(Duration::from_millis(900))).operation(Operation::PutPart),
                );
            }
            let options = options(&url(BUCKETS[0], &server.endpoint()), &dir)
                .add_bucket(url(BUCKETS[0], &proxy.endpoint()))
                .uploads(uploads);
            let changelog = Changelog::open(options).unwrap();
            let mut writer = changelog.create_writer("state", KeyGroupRange::ALL).unwrap();
            let changes = if small { 100 } else { 14_000 };
            append(&mut writer, 0..changes);
            let handle = writer.persist_durably(SequenceNumber::ZERO).wait().unwrap();
            check(&handle);
            assert!(server.count(Operation::Put) > 1, "there was a race");
            // What losers left is removed after a while, and nothing else.
            let kept: Vec<String> = handle.objects().map(|(_, object)| format!("state/{object}")).collect();
            let stored = || -> Vec<String> {
                server.objects(BUCKETS[0]).into_iter().map(|object| object.name).collect()
            };
            for _ in 0..600 {
                if stored().iter().all(|name| kept.contains(name)) {
                    break;
                }
                std::thread::sleep(Duration::from_millis(50));
            }
            assert_eq!(stored().len(), kept.len(), "{:?} instead of {kept:?}", stored());
            check(&handle);
            check_nothing_stays(&server, changelog, writer);
        }
    });
}

#[test]
fn an_open_by_another_url_of_the_bucket_removes_no_object() {
    with_credentials("an_open_by_another_url_of_the_bucket_removes_no_object", || {
        let server = server();
        let dir = tempfile::tempdir().unwrap();
        server.add_rule(Rule::new(Fault::DelayAnswer(Duration::from_millis(700))).operation(Operation::Put));
        let url = url(BUCKETS[0], &server.endpoint());
        let handle = {
            let changelog = Changelog::open(options(&url, &dir)).unwrap();
            let mut writer = changelog.create_writer("state", KeyGroupRange::ALL).unwrap();
            append(&mut writer, 0..100);
            writer.persist_durably(SequenceNumber::ZERO).wait().unwrap()
        };
        assert!(server.count(Operation::Put) > 1, "there was a race, so something may be left");
        server.clear_rules();
        let lists = server.count(Operation::List);
        let changelog = Changelog::open(options(&format!("{url}&checksum=md5"), &dir)).unwrap();
        for _ in 0..600 {
            if server.count(Operation::List) > lists && server.objects(BUCKETS[0]).len() == 1 {
                break;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        assert!(server.count(Operation::List) > lists, "it was swept");
        check(&handle);
        drop(changelog);
    });
}

/// What a process had sent when it died may take effect when the next one runs already.
#[test]
fn a_request_that_arrives_after_a_restart_leaves_nothing() {
    with_credentials("a_request_that_arrives_after_a_restart_leaves_nothing", || {
        let server = server();
        let dir = tempfile::tempdir().unwrap();
        let reopen = || open_with(&server, &dir, HedgeOptions::off());
        let wait_for = |what: &str, holds: &dyn Fn() -> bool| {
            for _ in 0..600 {
                if holds() {
                    return;
                }
                std::thread::sleep(Duration::from_millis(50));
            }
            panic!("{what}: {:?}", BUCKETS.map(|bucket| server.objects(bucket)));
        };
        let nothing_is_there = || BUCKETS.iter().all(|bucket| server.objects(bucket).is_empty());
        server.add_rule(Rule::new(Fault::ApplyLate(Duration::from_secs(2))).operation(Operation::Put));
        let changelog = reopen();
        let mut writer = changelog.create_writer("state", KeyGroupRange::ALL).unwrap();
        append(&mut writer, 0..100);
        drop(writer.persist_durably(SequenceNumber::ZERO));
        wait_for("it is sent", &|| server.count(Operation::Put) > 0);
        // Its body, too.
        std::thread::sleep(Duration::from_millis(300));
        drop(writer);
        drop(changelog);
        server.clear_rules();

        let changelog = reopen();
        changelog.recovered()[0].discard();
        wait_for("it takes effect", &|| !nothing_is_there());
        wait_for("it is removed", &nothing_is_there);
        changelog.close(Duration::from_secs(30)).unwrap();
    });
}
