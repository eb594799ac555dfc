//! The tool's input: records are what stands between their frames, however it is read, and each has a key or an error.
#![no_main]

use std::io::BufReader;

use tidelog_fuzz::memory;

// The tool is no library.
#[allow(dead_code)]
#[path = "../../cli/src/input.rs"]
mod input;
#[allow(dead_code)]
#[path = "../../cli/src/key.rs"]
mod key;

use input::{Framing, InputError, Records};
use key::KeySource;

const RECORD_BYTES_MAX: usize = 300;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    memory::within((1 << 20) + 200 * data.len(), || {
        for framing in [Framing::Lines, Framing::LengthPrefixed] {
            let (records, error) = split(data, framing, 4096);
            let (slowly, same) = split(data, framing, 1);
            assert_eq!((&records, format!("{error:?}")), (&slowly, format!("{same:?}")));
            let mut again = Vec::new();
            for record in &records {
                assert!(record.len() <= RECORD_BYTES_MAX);
                match framing {
                    Framing::Lines => again.extend([record, &b"\n"[..]].concat()),
                    Framing::LengthPrefixed => {
                        again.extend([&(record.len() as u32).to_le_bytes(), &record[..]].concat())
                    }
                }
            }
            // The last line may lack its end.
            if framing == Framing::Lines && error.is_none() && !data.ends_with(b"\n") {
                again.pop();
            }
            assert!(data.starts_with(&again) && (error.is_some() || again.len() == data.len()));
        }
        keys(data);
    });
});

fn split(data: &[u8], framing: Framing, buffer_bytes: usize) -> (Vec<Vec<u8>>, Option<InputError>) {
    let mut records = Records::new(BufReader::with_capacity(buffer_bytes, data), framing, RECORD_BYTES_MAX);
    let mut all = Vec::new();
    loop {
        match records.next_record() {
            Ok(Some(record)) => all.push(record.to_vec()),
            Ok(None) => return (all, None),
            Err(error) => return (all, Some(error)),
        }
    }
}

/// The first line says where the key is in the rest.
fn keys(data: &[u8]) {
    let mut parts = data.splitn(2, |byte| *byte == b'\n');
    let (Some(source), Some(record)) = (parts.next(), parts.next()) else { return };
    let Ok(Ok(source)) = std::str::from_utf8(source).map(str::parse::<KeySource>) else { return };
    for separator in [b',', b'\t'] {
        let Ok(key) = source.key(record, separator) else { continue };
        match source {
            KeySource::Record => assert_eq!(*key, *record),
            KeySource::Field(_) => assert!(!key.contains(&separator)),
            KeySource::Json(_) => drop(std::str::from_utf8(&key).expect("JSON is UTF-8")),
        }
        for key_groups in [1, 128, key::KEY_GROUPS_MAX] {
            assert!(u32::from(key::key_group(&key, key_groups).0) < key_groups);
        }
    }
}
