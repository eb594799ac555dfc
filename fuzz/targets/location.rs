//! The URL of a bucket: what is opened can be opened again by what it calls itself, and no secret is repeated.
#![no_main]

use tidelog_fuzz::memory;
use tidelog_upload::store;

/// What the address takes from its crate.
mod body {
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Checksum {
        Sha256,
        Md5,
        None,
    }
}

// By itself, so that no target compiles the client of S3.
#[allow(dead_code)]
#[path = "../../upload/src/s3/address.rs"]
mod address;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let Ok(url) = std::str::from_utf8(data) else { return };
    memory::within((1 << 20) + 100 * url.len(), || {
        if let Ok(store) = tidelog_upload::open_store(url) {
            let again = tidelog_upload::open_store(store.url()).expect("a bucket opens by its own URL");
            assert_eq!(again.url(), store.url());
        }
        s3(url);
    });
});

fn s3(url: &str) {
    let redacted = address::redacted(url);
    assert_eq!(address::redacted(&redacted), redacted);
    assert!(!redacted.contains(['?', '#']));
    let Ok(address) = address::Address::parse(url, None) else { return };
    assert!(redacted.starts_with(&format!("s3://{}", address.bucket)));
    if let Some(prefix) = address.prefix.strip_suffix('/') {
        store::check_name(prefix).expect("a prefix is a name");
    } else {
        assert!(address.prefix.is_empty());
    }
    let capabilities = &address.capabilities;
    assert!((1..=capabilities.part_bytes_max).contains(&capabilities.part_bytes_min));
    for word in [&address.region, &address.kms_key, &address.storage_class].into_iter().flatten() {
        assert!(
            !word.is_empty() && word.bytes().all(|byte| byte.is_ascii_graphic()),
            "a header takes {word}"
        );
    }
    assert!(address.kms_key.is_none() || address.sse.is_some());
    if let Some(endpoint) = address.endpoint {
        let endpoint = url::Url::parse(&endpoint).expect("an endpoint is a URL");
        assert!(endpoint.has_host() && endpoint.username().is_empty() && endpoint.password().is_none());
    }
}
