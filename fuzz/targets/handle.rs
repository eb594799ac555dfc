//! The bytes of a handle: what decodes has one encoding, and the JSON form says the same.
#![no_main]

use tidelog::ChangelogHandle;
use tidelog_fuzz::{memory, seal};

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    memory::within((1 << 20) + 100 * data.len(), || {
        check(data);
        let mut sealed = data.to_vec();
        seal::handle(&mut sealed);
        check(&sealed);
    });
});

fn check(bytes: &[u8]) {
    let Ok(handle) = ChangelogHandle::from_bytes(bytes) else { return };
    assert_eq!(handle.to_bytes(), bytes);
    assert_eq!(ChangelogHandle::from_json(&handle.to_json()), Ok(handle));
}
