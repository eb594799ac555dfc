//! Records round trip, and what is not a record is refused.

use proptest::prelude::*;

use super::*;

/// The records in tests/fixtures/manifest-v1.bin, each after its length as u32. Never change them, only add.
fn fixture() -> Vec<ManifestRecord> {
    let (log, object) = (LogId(0x0123_4567_89ab_cdef << 64 | 5), "orders/000001-a".to_owned());
    let [first, second]: [Arc<str>; 2] = ["file:///var/lib/checkpoints", "s3://second"].map(Arc::from);
    let piece = |bucket: &Arc<str>, suffix: &str, offset, bytes| {
        let object = [&object, suffix].concat();
        Piece { bucket: Arc::clone(bucket), object, offset, bytes }
    };
    let range = |first, end| LogRange { log, first: SequenceNumber(first), end: SequenceNumber(end) };
    vec![
        ManifestRecord::Opened { session: 0xfeed_0000_0000_0001, next_epoch: 1, next_number: 300 },
        ManifestRecord::SegmentAcquired { segment: 1, epoch: 1 },
        ManifestRecord::SegmentAcquired { segment: u32::MAX, epoch: 1 << 40 },
        ManifestRecord::SegmentReleased { segment: 1, epoch: 1 },
        ManifestRecord::Cut { epoch_below: 1 << 41, number: 17_000 },
        ManifestRecord::LogCreated {
            log,
            name: "örders".to_owned(),
            key_groups: KeyGroupRange::new(64, 300).unwrap(),
        },
        ManifestRecord::LogTruncated { log, to: SequenceNumber(9) },
        ManifestRecord::LogConfirmed { log, to: SequenceNumber(1_000_000) },
        ManifestRecord::LogClosed { log },
        ManifestRecord::UploadOpened {
            buckets: vec![first.clone(), second.clone()],
            object: object.clone(),
            token: 0xbeef,
            others: Vec::new(),
        },
        ManifestRecord::ObjectCompleted(CompletedObject {
            object: object.clone(),
            token: 0xbeef,
            pieces: vec![
                piece(&first, "", 0, 8_000_000),
                piece(&second, ".00001.1", 17, 8_000_000),
                piece(&first, "", 8_000_000, 4_984_000_000),
            ],
            footer: 4_999_999_000..5_000_000_000,
            blocks_end: 700,
            ranges: vec![range(0, 10), range(20, 1 << 50)],
            others: Vec::new(),
        }),
        ManifestRecord::UploadSettled { object: object.clone() },
        ManifestRecord::ObjectDeleted { object: object.clone() },
        ManifestRecord::LogForgotten { log },
        ManifestRecord::ObjectHeld {
            holder: "chk-42".to_owned(),
            object: object.clone(),
            logs: vec![LogId(7), log],
        },
        ManifestRecord::ObjectHandedOver { object: object.clone() },
        ManifestRecord::HolderReleased { holder: "chk-42".to_owned() },
        ManifestRecord::BlocksSettled { number: 17_000 },
        ManifestRecord::UploadOpened {
            buckets: vec![second.clone()],
            object: object.clone(),
            token: 0xbeef,
            others: vec![3, 0xd1c0_0000_0000_0001],
        },
        ManifestRecord::ObjectCompleted(CompletedObject {
            object: object.clone(),
            token: 0xbeef,
            pieces: vec![piece(&second, "", 0, 900)],
            footer: 800..900,
            blocks_end: 700,
            ranges: vec![range(0, 10)],
            others: vec![0xd1c0_0000_0000_0001],
        }),
    ]
}

#[test]
fn the_fixture_decodes_for_ever() {
    let mut bytes = &include_bytes!("../../tests/fixtures/manifest-v1.bin")[..];
    for expected in fixture() {
        let (len_bytes, rest) = bytes.split_first_chunk().unwrap();
        let (record, rest) = rest.split_at(u32::from_le_bytes(*len_bytes) as usize);
        assert_eq!(ManifestRecord::decode(record), Ok(expected.clone()));
        assert_eq!(expected.encode(), record);
        bytes = rest;
    }
    assert!(bytes.is_empty());
}

#[test]
fn records_have_one_encoding_and_no_prefix_or_extension_of_it() {
    for record in fixture() {
        let bytes = record.encode();
        for len in 0..bytes.len() {
            let cut = ManifestRecord::decode(&bytes[..len]);
            assert!(matches!(cut, Err(ManifestError::Truncated(_))), "{record:?} cut at {len}: {cut:?}");
        }
        let extended = [&bytes[..], &[0]].concat();
        assert_eq!(ManifestRecord::decode(&extended), Err(ManifestError::Invalid("length")), "{record:?}");
    }
}

#[test]
fn unknown_kinds_are_newer() {
    for tag in TAG_SHARED_OBJECT_COMPLETED + 1..=u8::MAX {
        assert_eq!(ManifestRecord::decode(&[tag, 1, 2, 3]), Err(ManifestError::NewerRecord { tag }));
    }
    assert_eq!(ManifestRecord::decode(&[0, 1, 2, 3]), Err(ManifestError::Invalid("kind")));
}

#[test]
fn counts_are_bounded_before_allocation() {
    let mut object = CompletedObject {
        object: "o".to_owned(),
        token: 0,
        pieces: vec![Piece { bucket: "b".into(), object: "o".to_owned(), offset: 0, bytes: 9 }],
        footer: 1..9,
        blocks_end: 0,
        ranges: Vec::new(),
        others: Vec::new(),
    };
    let mut bytes = ManifestRecord::ObjectCompleted(object.clone()).encode();
    assert_eq!(bytes.pop(), Some(1), "the number of ranges, 0, comes last");
    let mut many = bytes.clone();
    varint::put(&mut many, RANGES_PER_RECORD_MAX as u64 + 1);
    assert_eq!(ManifestRecord::decode(&many), Err(ManifestError::Invalid("number of ranges")));
    varint::put(&mut bytes, RANGES_PER_RECORD_MAX as u64);
    assert_eq!(ManifestRecord::decode(&bytes), Err(ManifestError::Truncated("number of ranges")));

    object.others = vec![7];
    let bytes = ManifestRecord::ObjectCompleted(object.clone()).encode();
    let (bytes, _) = bytes.split_last_chunk::<9>().expect("the number of directories, 1, and the directory");
    for (count, error) in [
        (0, ManifestError::Invalid("number of directories")),
        (OTHERS_MAX as u64, ManifestError::Truncated("number of directories")),
        (OTHERS_MAX as u64 + 1, ManifestError::Invalid("number of directories")),
    ] {
        let mut bytes = bytes.to_vec();
        varint::put(&mut bytes, count);
        assert_eq!(ManifestRecord::decode(&bytes), Err(error));
    }

    let held =
        ManifestRecord::ObjectHeld { holder: "h".to_owned(), object: "o".to_owned(), logs: Vec::new() };
    let mut bytes = held.encode();
    assert_eq!(bytes.pop(), Some(1), "the number of logs, 0, comes last");
    let mut many = bytes.clone();
    varint::put(&mut many, LOGS_PER_RECORD_MAX as u64 + 1);
    assert_eq!(ManifestRecord::decode(&many), Err(ManifestError::Invalid("number of logs")));
    varint::put(&mut bytes, LOGS_PER_RECORD_MAX as u64);
    assert_eq!(ManifestRecord::decode(&bytes), Err(ManifestError::Truncated("number of logs")));
    let holder = "h".repeat(HOLDER_BYTES_MAX);
    let logs: Vec<LogId> = (0..2 * LOGS_PER_RECORD_MAX as u128 + 1).map(LogId).collect();
    let records = ManifestRecord::held(&holder, &"o".repeat(OBJECT_NAME_BYTES_MAX), &logs);
    assert_eq!(records.len(), 3);
    for record in records {
        let bytes = record.encode();
        assert!(bytes.len() < 1 << 20, "{}", bytes.len());
        assert_eq!(ManifestRecord::decode(&bytes), Ok(record));
    }

    let range = |at: u64| LogRange {
        log: LogId(1),
        first: SequenceNumber(u64::MAX / 2 + at),
        end: SequenceNumber(u64::MAX),
    };
    let widest = |at: usize| Piece {
        bucket: format!("{:02}{}", at % BUCKETS_MAX, "b".repeat(BUCKET_BYTES_MAX - 2)).into(),
        object: format!("o{at:016}"),
        offset: u64::MAX - 1,
        bytes: 1,
    };
    object.pieces = (0..PIECES_MAX).map(widest).collect();
    object.others = (0..OTHERS_MAX as u64).collect();
    object.ranges = (0..2 * RANGES_PER_RECORD_MAX as u64 + 1).map(range).collect();
    let records = ManifestRecord::completed(object);
    assert_eq!(records.len(), 3);
    for record in records {
        let bytes = record.encode();
        assert!(bytes.len() < 1 << 20, "{}", bytes.len());
        assert_eq!(ManifestRecord::decode(&bytes), Ok(record));
    }
}

proptest! {
    #[test]
    fn arbitrary_bytes_decode_to_what_encodes_to_them(
        tag in 0u8..=TAG_SHARED_OBJECT_COMPLETED + 1,
        rest in proptest::collection::vec(prop_oneof![0u8..4, any::<u8>()], 0..120),
    ) {
        let bytes = [&[tag][..], &rest].concat();
        if let Ok(record) = ManifestRecord::decode(&bytes) {
            prop_assert_eq!(record.encode(), bytes);
        }
    }
}
