//! The directory of a run: what decodes has one encoding, and fills the run.
#![no_main]

use tidelog::part::{Directory, PartId, Run};
use tidelog::{LogId, SequenceNumber, varint};
use tidelog_fuzz::{memory, seal};

const PART: PartId = PartId { token: 1, index: 2 };
const LOG: LogId = LogId(3);

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    memory::within((1 << 16) + 100 * data.len(), || {
        check(data);
        let mut sealed = [data, &[0; 8]].concat();
        seal::directory(&mut sealed, PART, LOG);
        check(&sealed);
    });
});

fn check(bytes: &[u8]) {
    let directory_len = bytes.len() as u32;
    let run = Run {
        log: LOG,
        first: SequenceNumber(0),
        end: SequenceNumber(1),
        offset: 0,
        directory_len,
        len: sum(bytes),
    };
    let Ok(directory) = Directory::decode(bytes, PART, &run) else { return };
    let mut again = Vec::new();
    let (mut due_key, mut due) = (0, 0);
    varint::put(&mut again, directory.entries().len() as u64);
    for entry in directory.entries() {
        let key = entry.group.map_or(0, |group| 1 + u64::from(group.0));
        varint::put(&mut again, key - due_key);
        due_key = key + 1;
        assert_eq!(entry.range.start, due);
        varint::put(&mut again, entry.range.end - entry.range.start);
        due = entry.range.end;
    }
    assert_eq!(due, run.len);
    again.extend([0; 8]);
    seal::directory(&mut again, PART, LOG);
    assert_eq!(again, bytes);
    for other in [Run { len: run.len ^ 1, ..run }, Run { directory_len: directory_len ^ 1, ..run }] {
        Directory::decode(bytes, PART, &other).expect_err("it is another run's");
    }
    Directory::decode(bytes, PartId { index: 3, ..PART }, &run).expect_err("it is another part's");
}

/// The sum of the lengths in it, as far as they can be read.
fn sum(mut bytes: &[u8]) -> u64 {
    let mut sum = 0u64;
    let count = varint::take(&mut bytes).unwrap_or(0);
    for _ in 0..count {
        let Some((_, len)) = varint::take_pair(&mut bytes) else { break };
        sum = sum.saturating_add(len);
    }
    sum
}
