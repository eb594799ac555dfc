//! A changeset, as it is and compressed: without compression what decodes has one encoding, and its changes are the same
//! whichever way they are taken.
#![no_main]

use bytes::Bytes;
use tidelog::part::{Changeset, Compression, PartId};
use tidelog::{KeyGroup, LogId, varint};
use tidelog_fuzz::{memory, seal};

const PART: PartId = PartId { token: 1, index: 2 };
const LOG: LogId = LogId(3);

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    // LZ4 makes at most 255 bytes of one, which are there twice here.
    memory::within((1 << 16) + 1024 * data.len(), || {
        for group in [None, Some(9)] {
            decode(data, group, Compression::None);
            let mut sealed = [&[0; 8], data].concat();
            seal::changeset(&mut sealed, PART, LOG, group);
            if let Some(payload) = decode(&sealed, group, Compression::None) {
                assert_eq!(payload, data);
            }
            if let Some(payload) = decode(&sealed, group, Compression::Lz4) {
                let mut plain = [&[0; 8], &payload[..]].concat();
                seal::changeset(&mut plain, PART, LOG, group);
                assert_eq!(decode(&plain, group, Compression::None), Some(payload));
            }
        }
    });
});

/// The payload made of the changes.
fn decode(bytes: &[u8], group: Option<u16>, compression: Compression) -> Option<Vec<u8>> {
    let group = group.map(KeyGroup);
    let changeset = Changeset::decode(Bytes::copy_from_slice(bytes), PART, LOG, group, compression).ok()?;
    let mut payload = Vec::new();
    varint::put(&mut payload, changeset.count());
    let (mut due, mut count) = (0, 0);
    for (number, value) in changeset.records() {
        varint::put(&mut payload, number.0 - due);
        due = number.0 + 1;
        varint::put(&mut payload, value.len() as u64);
        payload.extend(value);
        count += 1;
    }
    assert_eq!(count, changeset.count());
    assert!(
        changeset
            .clone()
            .into_records()
            .eq(changeset.records().map(|(number, value)| (number, Bytes::copy_from_slice(value))))
    );
    Some(payload)
}
