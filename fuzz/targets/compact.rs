//! An object whose parts, directories and footer fit together, but for some numbers, compacted: what can be read stays the
//! same, and what cannot is not made into another object.
#![no_main]

use std::slice;

use tidelog::{Compactor, KeyGroupRange};
use tidelog_fuzz::input::Input;
use tidelog_fuzz::memory;
use tidelog_fuzz::object::{handles, object, put, read_handle};

const BUCKET: &str = "memory://compact";

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    memory::within(64 << 20, || {
        let object = object(&mut Input::new(data));
        let Some(store) = put(BUCKET, &object) else { return };
        for handle in handles(BUCKET, &object) {
            let read = read_handle(&handle, &store, KeyGroupRange::ALL);
            let mut compactor = Compactor::open(BUCKET).expect("the bucket is there");
            match (read, compactor.compact(slice::from_ref(&handle), None)) {
                (Ok(changes), Ok(compacted)) => {
                    let again = read_handle(&compacted.handles[0], &store, KeyGroupRange::ALL);
                    assert_eq!(again.expect("it was just written"), changes);
                }
                (Err(_), Err(_)) => {}
                (read, compacted) => panic!("read {read:?}, compacted {compacted:?}"),
            }
        }
    });
});
