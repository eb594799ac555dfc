//! A local directory whose manifest and segments fit together, but for some numbers, as it is found after a crash.
#![no_main]

use std::collections::BTreeMap;
use std::error::Error;
use std::fs;
use std::path::PathBuf;
use std::sync::LazyLock;

use tidelog::block::{Block, BlockPlace};
use tidelog::manifest::ManifestRecord;
use tidelog::walk::Walk;
use tidelog::{ChangeKind, KeyGroupRange, LocalLogs, LogId, SequenceNumber};
use tidelog_fuzz::blocks::{self, Device};
use tidelog_fuzz::input::Input;
use tidelog_fuzz::object::Changes;
use tidelog_fuzz::{memory, seal};
use tidelog_io::directory::MANIFEST_NAME;
use tidelog_io::segment::segment_name;

const DIRECTORY_ID: u64 = 7;
const SEGMENTS: u64 = 3;

static HOME: LazyLock<PathBuf> = LazyLock::new(|| {
    let home = std::env::temp_dir().join(format!("tidelog-fuzz-{}", std::process::id()));
    fs::create_dir_all(&home).expect("there is a place for files");
    home
});

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    // A segment is read through a window of 1 MiB.
    memory::within(32 << 20, || check(&mut Input::new(data)));
});

fn check(input: &mut Input<'_>) {
    let mut records = vec![ManifestRecord::Opened { session: 1, next_epoch: 1, next_number: 0 }];
    for log in 1..=blocks::LOGS {
        let (log, name) = (LogId(log.into()), format!("log {log}"));
        records.push(ManifestRecord::LogCreated { log, name, key_groups: KeyGroupRange::ALL });
    }
    let (mut device, mut number, mut all) = (Device::default(), 0, Vec::new());
    for segment in 0..SEGMENTS {
        let acquired = (input.number(segment) as u32, input.number(segment + 1));
        records.push(ManifestRecord::SegmentAcquired { segment: acquired.0, epoch: acquired.1 });
        let (mut bytes, first) = (Vec::new(), number);
        let count = 1 + u32::from(input.byte()) % 3;
        for index in 0..count {
            let place = BlockPlace {
                directory: DIRECTORY_ID,
                segment: segment as u32,
                epoch: segment + 1,
                index,
                offset: bytes.len() as u64,
                number,
                watermark: number,
            };
            let block = blocks::block(input, &mut device, &place);
            bytes.extend(&block);
            all.push(block);
            number += 1;
        }
        if input.byte() & 1 != 0 {
            let blocks = input.number(first)..input.number(number);
            records.push(ManifestRecord::SegmentSealed {
                segment: segment as u32,
                epoch: segment + 1,
                blocks,
            });
        }
        bytes.resize(bytes.len() + 4096 * usize::from(input.byte() % 3), 0);
        let cut = input.number(bytes.len() as u64).min(bytes.len() as u64);
        write(&segment_name(segment as u32), &bytes[..cut as usize]);
    }
    let mut truncated = SequenceNumber(0);
    match input.byte() {
        0..200 => {}
        200..220 => {
            truncated = SequenceNumber(u64::from(input.byte()));
            records.push(ManifestRecord::LogTruncated { log: LogId(1), to: truncated });
        }
        220..240 => records.push(ManifestRecord::LogClosed { log: LogId(1) }),
        240.. => {
            let number = input.number(number);
            records.push(ManifestRecord::Cut { epoch_below: input.number(SEGMENTS + 1), number });
        }
    }
    write(MANIFEST_NAME, &manifest(&records));
    let honest = input.is_honest();
    let found = read();
    if !honest {
        return;
    }
    let mut found = found.expect("it is as a changelog leaves it");
    let mut walk = Walk::new(None);
    let mut expected: BTreeMap<LogId, Changes> = BTreeMap::new();
    for block in &all {
        let block = Block::decode(block, None).expect("honest");
        let visit = &mut |change: tidelog::walk::Change<'_>| {
            if change.log != LogId(1) || change.sequence >= truncated {
                let group = (change.kind == ChangeKind::Data).then_some(change.key_group.0);
                let of_group = expected.entry(change.log).or_default().entry(group).or_default();
                of_group.push((change.sequence.0, change.value.to_vec()));
            }
        };
        walk.block(&block, visit).expect("honest");
    }
    found.retain(|_, changes| !changes.is_empty());
    assert_eq!(found, expected);
}

/// What is read of each log.
fn read() -> Result<BTreeMap<LogId, Changes>, Box<dyn Error>> {
    let mut found = BTreeMap::new();
    for log in LocalLogs::open(&*HOME)?.logs() {
        let changes: &mut Changes = found.entry(log.log()).or_default();
        for change in log.read(KeyGroupRange::ALL)? {
            let change = change?;
            let of_group = changes.entry(change.key_group.map(|group| group.0)).or_default();
            assert!(of_group.last().is_none_or(|(last, _)| *last < change.number.0), "numbers go up");
            of_group.push((change.number.0, change.value.to_vec()));
        }
    }
    Ok(found)
}

fn manifest(records: &[ManifestRecord]) -> Vec<u8> {
    let mut payload = Vec::new();
    for record in records {
        let record = record.encode();
        payload.extend((record.len() as u32).to_le_bytes());
        payload.extend(record);
    }
    let mut bytes = vec![0; 40 + 20];
    bytes[8] = 1;
    bytes[16..24].copy_from_slice(&DIRECTORY_ID.to_le_bytes());
    bytes[24..32].copy_from_slice(&((60 + payload.len()) as u64).to_le_bytes());
    bytes[40..44].copy_from_slice(&(payload.len() as u32).to_le_bytes());
    bytes.extend(payload);
    seal::manifest_file(&mut bytes);
    bytes
}

fn write(name: &str, bytes: &[u8]) {
    fs::write(HOME.join(name), bytes).expect("there is room");
}
