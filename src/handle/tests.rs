//! What a handle must be, and that every change of its bytes is found.

use proptest::prelude::*;

use super::*;

fn piece(object: &str, offset: u64, bytes: u64) -> Piece {
    Piece { bucket: "file:///var/lib/checkpoints".into(), object: object.into(), offset, bytes }
}

pub(super) fn extent(object: &str, first: u64, end: u64) -> Extent {
    Extent {
        pieces: vec![piece(object, 0, 1 << 20)],
        footer: (1 << 20) - 900..1 << 20,
        token: 0xfeed_0123_4567_89ab,
        first: SequenceNumber(first),
        end: SequenceNumber(end),
    }
}

fn make(from: u64, to: u64, extents: Vec<Extent>) -> Result<ChangelogHandle, HandleError> {
    let key_groups = KeyGroupRange::new(0, 127).unwrap();
    ChangelogHandle::new(
        LogId(0xabc << 64),
        "orders",
        key_groups,
        SequenceNumber(from),
        SequenceNumber(to),
        extents,
    )
}

/// The handle in tests/fixtures/handle-v1.bin and handle-v1.json. Never change it.
pub(super) fn fixture() -> ChangelogHandle {
    let mut hedge = extent("orders/000002-b", 400, 1_000);
    hedge.pieces = vec![
        piece("orders/000002-b", 0, 500),
        Piece { bucket: "file:///mnt/second".into(), ..piece("orders/000002-b.00001.1", 7, 1 << 20) },
        piece("orders/000002-b", 500, u64::MAX - 500 - (1 << 20)),
    ];
    let extents = vec![
        extent("orders/000001-a", 100, 400),
        hedge,
        extent("orders/000001-a", 1_000, 1_001),
        extent("orders/000003-ü\"", 1_001, 1 << 60),
    ];
    make(100, 1 << 60, extents).unwrap()
}

#[track_caller]
pub(super) fn assert_invalid(result: Result<ChangelogHandle, HandleError>, reason: &str) {
    match result {
        Err(HandleError::Invalid(what)) => assert!(what.contains(reason), "{what}"),
        other => panic!("expected an invalid handle ({reason}), got {other:?}"),
    }
}

#[test]
fn fixtures_decode_for_ever() {
    let bytes = include_bytes!("../../tests/fixtures/handle-v1.bin");
    assert_eq!(ChangelogHandle::from_bytes(bytes), Ok(fixture()));
    let json = include_str!("../../tests/fixtures/handle-v1.json");
    assert_eq!(ChangelogHandle::from_json(json), Ok(fixture()));
    if HANDLE_VERSION == 1 {
        assert_eq!(fixture().to_bytes(), bytes);
        assert_eq!(fixture().to_json(), json.trim_end());
    }
}

#[test]
fn what_contradicts_itself_is_refused() {
    assert!(make(5, 5, vec![]).unwrap().is_empty());
    assert_invalid(make(6, 5, vec![]), "ends before");
    assert_invalid(make(5, 6, vec![]), "extents end at 5, expected 6");
    assert_invalid(make(0, 5, vec![extent("a", 1, 5)]), "begins at 1, expected 0");
    assert_invalid(make(0, 5, vec![extent("a", 0, 4)]), "end at 4, expected 5");
    assert_invalid(make(0, 5, vec![extent("a", 0, 6)]), "end at 6, expected 5");
    assert_invalid(make(0, 5, vec![extent("a", 0, 3), extent("b", 4, 5)]), "begins at 4, expected 3");
    assert_invalid(make(0, 5, vec![extent("a", 0, 0), extent("b", 0, 5)]), "holds no change");
    assert_invalid(make(0, 5, vec![extent("", 0, 5)]), "object name");
    let none = Extent { pieces: Vec::new(), ..extent("a", 0, 5) };
    assert_invalid(make(0, 5, vec![none]), "number of pieces");
    let many = |at: u64| Extent {
        pieces: vec![piece(&at.to_string(), 0, 1 << 20); PIECES_MAX],
        ..extent("a", at, at + 1)
    };
    assert_invalid(make(0, 17, (0..17).map(many).collect()), "more than 262144 pieces");
    let bad_footer = |footer| vec![Extent { footer, ..extent("a", 0, 5) }];
    assert_invalid(make(0, 5, bad_footer(7..7)), "footer");
    assert_invalid(make(0, 5, bad_footer(7..(1 << 20) + 1)), "footer");
    let other = Extent { token: 1, ..extent("a", 3, 5) };
    assert_invalid(make(0, 5, vec![extent("a", 0, 3), other]), "described in two ways");
    let mut shares = extent("b", 3, 5);
    shares.pieces.push(piece("a", 0, 1));
    assert_invalid(make(0, 5, vec![extent("a", 0, 3), shares]), "described in two ways");
    let many = (0..=EXTENTS_MAX as u64).map(|at| extent("a", at, at + 1)).collect();
    assert_invalid(make(0, EXTENTS_MAX as u64 + 1, many), "more than 65536 extents");
    let long = (0..20_000).map(|at| extent(&format!("{at:01000}"), at, at + 1)).collect();
    assert_invalid(make(0, 20_000, long), "more than 16777216");
}

#[test]
fn every_object_is_listed_once() {
    let handle = fixture();
    let objects: Vec<_> = handle.objects().map(|(_, object)| object).collect();
    let names = ["orders/000001-a", "orders/000002-b", "orders/000002-b.00001.1", "orders/000003-ü\""];
    assert_eq!(objects, names);
}

#[test]
fn every_bit_flip_and_truncation_of_the_bytes_is_detected() {
    let bytes = fixture().to_bytes();
    for len in 0..bytes.len() {
        let expected = if len == 0 { HandleError::NotAHandle } else { HandleError::Truncated };
        assert_eq!(ChangelogHandle::from_bytes(&bytes[..len]), Err(expected), "cut at {len}");
    }
    for bit in 0..bytes.len() * 8 {
        let mut flipped = bytes.clone();
        flipped[bit / 8] ^= 1 << (bit % 8);
        assert!(ChangelogHandle::from_bytes(&flipped).is_err(), "bit {bit}");
    }
    assert_invalid(ChangelogHandle::from_bytes(&[&bytes[..], &[0]].concat()), "after its end");
}

#[test]
fn foreign_and_newer_input_is_named() {
    for foreign in [&b""[..], b"not a handle at all", &[0; 100]] {
        assert_eq!(ChangelogHandle::from_bytes(foreign), Err(HandleError::NotAHandle));
    }
    for foreign in ["", "hello", "[1]", "{}", "null", r#"{"format":"x"}"#] {
        assert_eq!(ChangelogHandle::from_json(foreign), Err(HandleError::NotAHandle), "{foreign}");
    }
    let newer = HandleError::NewerVersion { found: 7, known: HANDLE_VERSION };
    let mut bytes = fixture().to_bytes();
    bytes[8] = 7;
    assert_eq!(ChangelogHandle::from_bytes(&bytes), Err(newer.clone()));
    let json = fixture().to_json().replace(r#""version":1"#, r#""version":7"#);
    assert_eq!(ChangelogHandle::from_json(&json), Err(newer));
}

/// Each bucket once, in the order in which pieces name them: anything else would be a second encoding of the same handle.
#[test]
fn buckets_are_listed_as_they_are_named() {
    let in_bucket = |object: &str, at, bucket: &str| {
        let mut extent = extent(object, at, at + 1);
        extent.pieces[0].bucket = bucket.into();
        extent
    };
    let bytes = make(0, 2, vec![in_bucket("x", 0, "b:1"), in_bucket("y", 1, "b:2")]).unwrap().to_bytes();
    let sealed = |body: &[u8]| {
        let mut bytes =
            [&HANDLE_MAGIC[..], &HANDLE_VERSION.to_le_bytes(), &(body.len() as u32).to_le_bytes(), body]
                .concat();
        bytes.extend(XxHash3_64::oneshot(&bytes).to_le_bytes());
        bytes
    };
    let body = &bytes[HEAD_BYTES..bytes.len() - CHECKSUM_BYTES];
    assert_eq!(sealed(body), bytes);
    let replaced = |old: &[u8], new: &[u8]| {
        let at = body.windows(old.len()).position(|window| window == old).expect("it is there");
        ChangelogHandle::from_bytes(&sealed(&[&body[..at], new, &body[at + old.len()..]].concat()))
    };
    // Numbers below 128 are one byte: the number, and a bit below it.
    let [one, two, three, len] = [1, 2, 3, 3].map(|number| number << 1 | 1);
    let listed = [&[two, len], &b"b:1"[..], &[len], b"b:2"].concat();
    assert_eq!(replaced(&listed, &listed), ChangelogHandle::from_bytes(&bytes));
    let exchanged = [&[two, len], &b"b:2"[..], &[len], b"b:1"].concat();
    assert_eq!(replaced(&listed, &exchanged).unwrap().extents()[0].pieces[0].bucket, "b:2".into());
    let twice = [&[two, len], &b"b:1"[..], &[len], b"b:1"].concat();
    assert_invalid(replaced(&listed, &twice), "a bucket twice");
    let unnamed = [&[three, len], &b"b:1"[..], &[len], b"b:2", &[len], b"b:3"].concat();
    assert_invalid(replaced(&listed, &unnamed), "no piece names");
    assert_invalid(replaced(&[1, one, b'x'], &[3, one, b'x']), "before its turn");
    assert_invalid(replaced(&[3, one, b'y'], &[5, one, b'y']), "not listed");
}

proptest! {
    #[test]
    fn handles_come_back_from_both_forms(
        name in "\\PC{0,40}",
        from in prop_oneof![Just(0), any::<u32>().prop_map(u64::from), 1u64 << 53..1 << 62],
        lens in proptest::collection::vec((1u64..1 << 40, 0u8..4, any::<u64>(), 0u64..4), 0..20),
    ) {
        let mut next = from;
        let mut extents = Vec::new();
        for (index, (len, bucket, token, more)) in lens.into_iter().enumerate() {
            let mut extent = extent(&format!("o-{index}"), next, next + len);
            extent.pieces[0].bucket = format!("s3://b{bucket}").into();
            extent.pieces.extend((0..more).map(|at| piece(&format!("o-{index}.{at}"), at, len)));
            extent.token = token;
            next += len;
            extents.push(extent);
        }
        let handle = ChangelogHandle::new(
            LogId(u128::from(from) << 60), name, KeyGroupRange::ALL, SequenceNumber(from), SequenceNumber(next),
            extents,
        ).unwrap();
        prop_assert_eq!(ChangelogHandle::from_bytes(&handle.to_bytes()), Ok(handle.clone()));
        prop_assert_eq!(ChangelogHandle::from_json(&handle.to_json()), Ok(handle));
    }

    /// A right checksum over wrong contents: what a decoder meets after a fault in another program.
    #[test]
    fn arbitrary_bodies_are_refused_or_consistent(body in proptest::collection::vec(any::<u8>(), 0..200)) {
        let mut bytes = HANDLE_MAGIC.to_vec();
        bytes.extend_from_slice(&HANDLE_VERSION.to_le_bytes());
        bytes.extend_from_slice(&(body.len() as u32).to_le_bytes());
        bytes.extend_from_slice(&body);
        let checksum = XxHash3_64::oneshot(&bytes);
        bytes.extend_from_slice(&checksum.to_le_bytes());
        if let Ok(handle) = ChangelogHandle::from_bytes(&bytes) {
            prop_assert_eq!(handle.check(), Ok(()));
            prop_assert_eq!(handle.to_bytes(), bytes);
        }
    }
}
