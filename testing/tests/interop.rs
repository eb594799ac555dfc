//! The conformance suite against a server that .ci/interop has started, named by the environment.

use std::env;

use tidelog_testing::{Row, conformance};
use tidelog_upload::{Capabilities, open_store};

#[tokio::test]
#[ignore = "needs the servers that .ci/interop starts"]
async fn a_server_of_other_people_conforms() {
    let variable =
        |name: &str| env::var(name).unwrap_or_else(|_| panic!("{name} is not set: run .ci/interop"));
    let endpoint = variable("TIDELOG_INTEROP_ENDPOINT");
    for bucket in variable("TIDELOG_INTEROP_BUCKETS").split_whitespace() {
        let url = format!("s3://{bucket}/a/prefix?endpoint={endpoint}&sparse=true");
        let store = open_store(&url).expect("the bucket opens");
        // moto's listing of parts is none that the AWS client understands, and Garage takes parts of any size.
        let list_parts = variable("TIDELOG_INTEROP_SERVER") != "moto";
        let row = Capabilities { list_parts, ..store.capabilities().clone() };
        conformance(store, "conformance", Row::AtLeast(row)).await;
    }
}
