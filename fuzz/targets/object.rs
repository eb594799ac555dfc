//! An object whose parts, directories and footer fit together, but for some numbers, read by handles that name it.
#![no_main]

use tidelog_fuzz::input::Input;
use tidelog_fuzz::{memory, object};

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    memory::within(64 << 20, || {
        object::read(&object::object(&mut Input::new(data)));
    });
});
