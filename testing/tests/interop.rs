//! The conformance suite and a checkpoint against buckets of a server that .ci/interop has started, named by the environment.
#![forbid(unsafe_code)]

use std::env;
use std::time::{Duration, SystemTime};

use tidelog::{Changelog, ChangelogReader, KeyGroup, KeyGroupRange, Options, SequenceNumber, Sweeper};
use tidelog_testing::{Row, conformance};
use tidelog_upload::store::{Body, Lane, UploadRef};
use tidelog_upload::{Capabilities, StoreErrorKind, open_store};

/// More than a part, and not a multiple of anything.
const CHANGES: u64 = 20_011;

#[tokio::test]
#[ignore = "needs the servers that .ci/interop starts"]
async fn a_server_of_other_people_conforms() {
    for url in urls() {
        let store = open_store(&url).expect("the bucket opens");
        let own = store.capabilities().clone();
        let row = match &*variable("TIDELOG_INTEROP_SERVER") {
            "azurite" | "hdfs" => Row::Exact,
            // moto's listing of parts is none that the AWS client understands.
            "moto" => Row::AtLeast(Capabilities { list_parts: false, ..own }),
            // Garage takes parts of any size; Google's storage is played by moto.
            _ => Row::AtLeast(own),
        };
        conformance(store, "conformance", row).await;
    }
}

#[tokio::test]
#[ignore = "needs the servers that .ci/interop starts"]
async fn a_bucket_that_is_not_there_is_said_to_be_missing() {
    // A bucket of HDFS is a folder, and made with its first object.
    if variable("TIDELOG_INTEROP_SERVER") == "hdfs" {
        return;
    }
    let store = open_store(&variable("TIDELOG_INTEROP_MISSING")).expect("nothing is asked for yet");
    let put = store.put("a", Body::default(), Lane::Primary).await.map(drop);
    let upload = async {
        let id = store.create("a").await?;
        let body = Body::new(vec![b"a part".as_slice().into()]);
        store.put_part(UploadRef { name: "a", id: &id }, 1, body, Lane::Primary).await.map(drop)
    };
    for result in [put, upload.await, store.list("").await.map(drop), store.get("a", 0..1).await.map(drop)] {
        let error = result.expect_err("there is no such bucket");
        assert_eq!(*error.kind(), StoreErrorKind::NoSuchBucket, "{error}");
    }
}

#[tokio::test]
#[ignore = "needs the servers that .ci/interop starts"]
async fn what_a_dead_process_has_begun_can_be_found_and_removed() {
    for url in urls() {
        let name = "dead/ä b%20~c";
        let dead = open_store(&url).expect("the bucket opens");
        if !dead.capabilities().list_uploads {
            continue;
        }
        let id = dead.create(name).await.expect("an upload");
        let body = Body::new(vec![b"a part".as_slice().into()]);
        dead.put_part(UploadRef { name, id: &id }, 1, body, Lane::Primary).await.expect("a part");
        drop(dead);

        let store = open_store(&url).expect("the bucket opens");
        assert_eq!(store.list("dead").await.expect("a listing"), [], "{url}: half an object is listed");
        let found = store.list_uploads("dead/").await.expect("a listing");
        let names: Vec<_> = found.iter().map(|upload| &*upload.name).collect();
        assert_eq!(names, [name], "{url}");
        store.abort(UploadRef { name, id: &found[0].id }).await.expect("an abort");
        assert_eq!(store.list_uploads("dead/").await.expect("a listing"), [], "{url}");
    }
}

#[test]
#[ignore = "needs the servers that .ci/interop starts"]
fn a_checkpoint_comes_back_and_goes() {
    for url in urls() {
        let dir = tempfile::tempdir().expect("a folder");
        let options = Options::new(&url, dir.path().join("local"))
            .name_prefix("checkpoint")
            .segment_bytes(8 << 20)
            .local_bytes(128 << 20)
            .persist_timeout(Duration::from_secs(60));
        let changelog = Changelog::open(options).expect("the changelog opens");
        let mut writer = changelog.create_writer("state", KeyGroupRange::ALL).expect("a writer");
        let mut handle = None;
        // A small one, which is one request, and one in parts.
        for numbers in [0..10, 10..CHANGES] {
            for number in numbers {
                writer.append(KeyGroup((number % 128) as u16), &value(number)).expect("an append");
            }
            let persist = writer.persist_durably(SequenceNumber::ZERO);
            handle = Some(persist.wait().unwrap_or_else(|error| panic!("{url}: {error}")));
        }
        let handle = handle.expect("two checkpoints");

        let mut seen = 0;
        for change in ChangelogReader::open(std::slice::from_ref(&handle), KeyGroupRange::ALL).unwrap() {
            let change = change.unwrap_or_else(|error| panic!("{url}: {error}"));
            assert_eq!(change.value, value(change.number.0), "{url}: change {}", change.number.0);
            seen += 1;
        }
        assert_eq!(seen, CHANGES, "{url}");
        // What lives is no stray, and sweeping can read what this bucket lists.
        let sweeper = Sweeper::open(&url).expect("a sweeper").prefix("checkpoint");
        let plan = sweeper.min_age(Duration::ZERO).live_handles(&[handle]).plan(SystemTime::now());
        let strays = plan.unwrap_or_else(|error| panic!("{url}: {error}")).strays;
        assert!(strays.is_empty(), "{url}: {strays:?}");

        writer.truncate(writer.next_sequence_number()).expect("a truncation");
        drop(writer);
        let store = open_store(&url).expect("the bucket opens");
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        let left = || runtime.block_on(store.list("checkpoint/")).expect("a listing");
        let deadline = SystemTime::now() + Duration::from_secs(60);
        while !left().is_empty() {
            assert!(SystemTime::now() < deadline, "{url}: truncation leaves {:?}", left());
            std::thread::sleep(Duration::from_millis(100));
        }
        changelog.close(Duration::from_secs(30)).expect("nothing is left to be done");
    }
}

fn value(number: u64) -> Vec<u8> {
    number.to_le_bytes().repeat(64 + (number % 64) as usize)
}

fn urls() -> Vec<String> {
    variable("TIDELOG_INTEROP_URLS").split_whitespace().map(str::to_owned).collect()
}

fn variable(name: &str) -> String {
    env::var(name).unwrap_or_else(|_| panic!("{name} is not set: run .ci/interop"))
}
