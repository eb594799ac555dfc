//! The bytes of an object, read by handles that name it.
#![no_main]

use tidelog_fuzz::{memory, object, seal};

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    memory::within(64 << 20, || {
        object::read(data);
        let mut sealed = data.to_vec();
        seal::object(&mut sealed);
        object::read(&sealed);
    });
});
