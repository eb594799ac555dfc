//! A compaction in a real S3 bucket, which copies large parts by itself: the protocol and the sizes that it asks for.
#![forbid(unsafe_code)]

use std::time::Duration;

use tidelog::{
    Changelog, ChangelogHandle, ChangelogReader, Compactor, KeyGroup, KeyGroupRange, Options, SequenceNumber,
};
use tidelog_testing::{Fault, Rule, S3Server, ServerOptions, with_credentials};
use tidelog_upload::Operation;

const MIB: usize = 1 << 20;
const KEY_GROUPS: KeyGroupRange = KeyGroupRange::new(0, 15).unwrap();

fn read(handle: &ChangelogHandle) -> Vec<(u64, Vec<u8>)> {
    let reader = ChangelogReader::open(std::slice::from_ref(handle), KEY_GROUPS).unwrap();
    let mut changes: Vec<_> =
        reader.map(|change| change.unwrap()).map(|change| (change.number.0, change.value.to_vec())).collect();
    changes.sort_unstable();
    changes
}

#[test]
fn whole_parts_stay_in_the_bucket() {
    with_credentials("whole_parts_stay_in_the_bucket", || {
        let buckets = vec!["bucket".to_owned()];
        let server = S3Server::start(ServerOptions { buckets, ..ServerOptions::default() }).unwrap();
        let endpoint = server.endpoint();
        let url =
            format!("s3://bucket/state?endpoint={endpoint}&region=us-east-1&sparse=true&copy_part=true");
        let dir = tempfile::tempdir().unwrap();
        let options = Options::new(&url, dir.path().join("local"))
            .segment_bytes(8 << 20)
            .local_bytes(128 << 20)
            .lane_bytes(MIB)
            .persist_timeout(Duration::from_secs(60));
        let changelog = Changelog::open(options).unwrap();
        let mut writer = changelog.create_writer("log", KEY_GROUPS).unwrap();
        let mut handle = None;
        let mut numbers = 0u64..;
        // Full parts of 8 MiB between ends that are too small to be copied.
        for changes in [300, 700, 10, 400, 400] {
            for number in numbers.by_ref().take(changes) {
                let mut value = vec![number as u8; 32 << 10];
                value[..8].copy_from_slice(&number.to_le_bytes());
                writer.append(KeyGroup((number % 16) as u16), &value).unwrap();
            }
            handle = Some(writer.persist_durably(SequenceNumber::ZERO).wait().unwrap());
        }
        let old = handle.unwrap();
        let changes = read(&old);
        assert_eq!(changes.len(), 1810);

        // Some of the requests fail, as they do.
        server.add_rule(Rule::new(Fault::SlowDown).operation(Operation::CopyPart).nth(1));
        server.add_rule(Rule::new(Fault::DropAnswer).operation(Operation::CopyPart).nth(3));
        server.add_rule(Rule::new(Fault::DropAnswer).operation(Operation::Complete).nth(1));
        let mut compactor = Compactor::open(&url).unwrap().timeout(Duration::from_secs(60));
        let made = compactor.compact(std::slice::from_ref(&old), KEY_GROUPS).unwrap();
        let [new] = &made.handles[..] else { panic!("one log, one handle") };
        assert_eq!(new.objects().count(), 1);
        assert!(made.stats.bytes_copied > 20 << 20, "{:?}", made.stats);
        assert!(server.uploads("bucket").is_empty());
        assert!(read(new) == changes, "the same changes");
    });
}
