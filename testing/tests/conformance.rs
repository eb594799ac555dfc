//! Every store against the one suite.

use std::sync::Arc;

use tidelog_testing::{BucketRules, Row, S3Server, ServerOptions, conformance, with_credentials};
use tidelog_upload::sim::SimStore;
use tidelog_upload::store::{Capabilities, Parts, Store};
use tidelog_upload::{open_or_create_store, open_store};

#[tokio::test]
async fn a_simulated_store_that_takes_everything() {
    conformance(Arc::new(SimStore::new(1)), "conformance", Row::Exact).await;
}

#[tokio::test]
async fn simulated_stores_that_take_less() {
    let all = SimStore::new(1).capabilities().clone();
    let rows = [
        Capabilities { sparse: false, part_bytes_min: 5000, ..all.clone() },
        Capabilities { equal_parts: true, resend_part: false, conditional_put: false, ..all.clone() },
        Capabilities { list_parts: false, list_uploads: false, copy_part: false, ..all.clone() },
        Capabilities { parts: Parts::Sequential, list_parts: false, ..all.clone() },
        Capabilities { parts: Parts::None, list_parts: false, list_uploads: false, ..all },
    ];
    for (seed, row) in (2..).zip(rows) {
        conformance(Arc::new(SimStore::with_capabilities(seed, row)), "conformance", Row::Exact).await;
    }
}

#[tokio::test]
async fn a_local_directory() {
    let folder = tempfile::tempdir().expect("a folder");
    let url = format!("file://{}/bucket", folder.path().display());
    conformance(open_or_create_store(&url).expect("the bucket opens"), "conformance", Row::Exact).await;
}

#[tokio::test]
async fn memory() {
    conformance(open_store("memory://").expect("the bucket opens"), "conformance", Row::Exact).await;
}

#[test]
fn s3_as_aws_has_it() {
    with_credentials("s3_as_aws_has_it", || {
        s3(ServerOptions::default(), "sparse=true&conditional_put=true&copy_part=true", true);
    });
}

#[test]
fn s3_on_disk_in_small_pages_with_tags_that_say_nothing() {
    with_credentials("s3_on_disk_in_small_pages_with_tags_that_say_nothing", || {
        let folder = tempfile::tempdir().expect("a folder");
        let rules = BucketRules { page_items_max: 2, random_tags: true, ..BucketRules::default() };
        let options = ServerOptions { folder: Some(folder.path().to_owned()), rules, ..Default::default() };
        s3(options, "sparse=true&checksum=md5&copy_part=true", true);
    });
}

#[test]
fn s3_with_equal_parts_and_without_gaps() {
    with_credentials("s3_with_equal_parts_and_without_gaps", || {
        let rules = BucketRules { equal_parts: true, sparse: false, ..BucketRules::default() };
        s3(
            ServerOptions { rules, ..Default::default() },
            "equal_parts=true&checksum=none&copy_part=true",
            true,
        );
    });
}

#[test]
fn s3_that_forgets_what_is_complete_and_ignores_conditions() {
    with_credentials("s3_that_forgets_what_is_complete_and_ignores_conditions", || {
        let rules = BucketRules {
            part_bytes_min: 1,
            complete_twice: false,
            duplicate_invalidates: true,
            list_uploads: false,
            conditional_put: false,
            ..BucketRules::default()
        };
        let options = ServerOptions { rules, ..Default::default() };
        s3(options, "sparse=true&part_bytes_min=1&list_uploads=false&copy_part=true", true);
    });
}

/// What a server is believed to take unless the URL says more.
#[test]
fn s3_with_the_cautious_row() {
    with_credentials("s3_with_the_cautious_row", || s3(ServerOptions::default(), "region=us-east-1", false));
}

fn s3(options: ServerOptions, query: &str, exact: bool) {
    let server =
        S3Server::start(ServerOptions { buckets: vec!["bucket".into()], ..options }).expect("a server");
    let url = format!("s3://bucket/a/prefix?endpoint={}&{query}", server.endpoint());
    let store = open_store(&url).expect("the bucket opens");
    let row = if exact { Row::Exact } else { Row::AtLeast(store.capabilities().clone()) };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(conformance(store, "conformance", row));
    assert!(server.objects("bucket").is_empty() && server.uploads("bucket").is_empty(), "something is left");
}
