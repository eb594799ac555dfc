//! Tests of the block's codec: round trips, every damage to a small block, places, arbitrary bytes.

use super::*;
use crate::record::{FrameKind, Header};
use proptest::prelude::*;

const PLACE: BlockPlace = BlockPlace {
    directory: 0x1122_3344_5566_7788,
    segment: 9,
    epoch: 12,
    index: 3,
    offset: 0x5000,
    number: 77,
    watermark: 70,
};

fn frame(slot: u32, key_group: u16, value: &[u8]) -> Vec<u8> {
    let mut frame = Header::new(FrameKind::Data, key_group, slot, value.len()).0.to_le_bytes().to_vec();
    frame.extend_from_slice(value);
    frame.resize(frame.len().next_multiple_of(FRAME_ALIGN_BYTES), 0);
    frame
}

fn build(changes: &[(u32, u16, Vec<u8>)], continues: bool, capacity_bytes: usize) -> Vec<u8> {
    let mut builder = BlockBuilder::new(capacity_bytes);
    // Not zero, so that what the builder forgets to write shows.
    let mut buffer = vec![0xee; capacity_bytes];
    for (slot, key_group, value) in changes {
        let known = builder.entries().iter().position(|entry| entry.slot == *slot);
        let frame = frame(*slot, *key_group, value);
        if !builder.fits(frame.len(), known.is_none()) {
            break;
        }
        let entry = known.unwrap_or_else(|| {
            builder.add_entry(
                *slot,
                LogId(u128::from(*slot) << 100 | 5),
                SequenceNumber(u64::from(*slot) * 1000),
            )
        });
        builder.push_frames(&mut buffer, &frame);
        builder.add_count(entry, 1);
    }
    let len = builder.finish(&mut buffer, continues);
    assert!(builder.is_empty());
    buffer.truncate(len);
    seal(&mut buffer, &PLACE);
    buffer
}

fn small() -> Vec<u8> {
    build(
        &[(3, 7, b"hello".to_vec()), (900_000, 1, b"".to_vec()), (3, 9, b"a longer value".to_vec())],
        true,
        4096,
    )
}

proptest! {
    #[test]
    fn what_was_built_is_what_is_decoded(
        changes in proptest::collection::vec(
            (0..40u32, any::<u16>(), proptest::collection::vec(any::<u8>(), 0..400)), 0..200),
        continues: bool,
    ) {
        let bytes = build(&changes, continues, 3 * 4096);
        let block = Block::decode(&bytes, Some(&Expected::from(&PLACE))).unwrap();
        prop_assert_eq!(block.header().place, PLACE);
        prop_assert_eq!(block.header().continues, continues);
        prop_assert_eq!(block.header().len, bytes.len());
        let frames: Vec<_> = block.frames().map(Result::unwrap).collect();
        for (frame, (slot, key_group, value)) in frames.iter().zip(&changes) {
            prop_assert_eq!((frame.slot, frame.key_group.0, frame.value), (*slot, *key_group, &value[..]));
        }
        // Whatever was left out did not fit.
        if let Some((_, _, value)) = changes.get(frames.len()) {
            let used = BLOCK_HEADER_BYTES + block.header().frames_len + block.header().logs * TABLE_ENTRY_BYTES;
            prop_assert!(used + crate::record::frame_len(value.len()) + TABLE_ENTRY_BYTES > 3 * 4096);
        }
        for entry in block.logs() {
            let count = frames.iter().filter(|frame| frame.slot == entry.slot).count();
            prop_assert_eq!(entry.count as usize, count);
            prop_assert_eq!(entry.first.0, u64::from(entry.slot) * 1000);
            prop_assert_eq!(entry.log.0, u128::from(entry.slot) << 100 | 5);
        }
    }

    #[test]
    fn arbitrary_bytes_are_refused(mut bytes in proptest::collection::vec(any::<u8>(), 0..5000), magic: bool) {
        if magic && bytes.len() >= 128 {
            bytes[..8].copy_from_slice(&MAGIC);
            bytes[at::VERSION..at::VERSION + 2].copy_from_slice(&[1, 0]);
            bytes[at::TOTAL_LEN..at::TOTAL_LEN + 4].copy_from_slice(&[0, 0x10, 0, 0]);
        }
        prop_assert!(Block::decode(&bytes, None).is_err());
    }

    /// A right checksum proves no sense: whatever the header says, decoding ends with a block or an error.
    #[test]
    fn sealed_nonsense_does_not_panic(fields in proptest::collection::vec((12..1000usize, any::<u8>()), 0..6)) {
        let mut bytes = small();
        for (at, byte) in fields {
            if !(at::TOTAL_LEN..at::TOTAL_LEN + 4).contains(&at) {
                bytes[at] = byte;
            }
        }
        seal_damaged(&mut bytes);
        if let Ok(block) = Block::decode(&bytes, None) {
            let _ = block.frames().count() + block.logs().len();
        }
    }
}

#[test]
fn every_flipped_bit_and_every_truncation_is_detected() {
    let bytes = small();
    assert!(Block::decode(&bytes, None).is_ok());
    for bit in 0..bytes.len() * 8 {
        let mut damaged = bytes.clone();
        damaged[bit / 8] ^= 1 << (bit % 8);
        assert!(Block::decode(&damaged, None).is_err(), "bit {bit}");
    }
    for len in 0..bytes.len() {
        let error = Block::decode(&bytes[..len], None).unwrap_err();
        assert!(matches!(error, BlockError::NotABlock | BlockError::Truncated { .. }), "{len}: {error}");
    }
}

#[test]
fn bytes_behind_a_block_do_not_matter() {
    let mut bytes = small();
    let len = bytes.len();
    bytes.extend([0xaa; 5000]);
    assert_eq!(Block::peek_len(&bytes), Ok(len));
    assert_eq!(Block::decode(&bytes, None).unwrap().header().len, len);
}

#[test]
fn a_block_of_another_place_is_misplaced() {
    let bytes = small();
    let here = Expected::from(&PLACE);
    assert!(Block::decode(&bytes, Some(&here)).is_ok());
    assert!(Block::decode(&bytes, Some(&Expected { number: None, ..here })).is_ok());
    for (what, elsewhere) in [
        ("directory", Expected { directory: 1, ..here }),
        ("segment", Expected { segment: 1, ..here }),
        ("epoch", Expected { epoch: 1, ..here }),
        ("index", Expected { index: 1, ..here }),
        ("offset", Expected { offset: 1, ..here }),
        ("number", Expected { number: Some(1), ..here }),
    ] {
        match Block::decode(&bytes, Some(&elsewhere)) {
            Err(BlockError::Misplaced { what: found, expected: 1, .. }) => assert_eq!(found, what),
            other => panic!("{what}: {other:?}"),
        }
    }
}

#[test]
fn a_block_may_be_sealed_again_elsewhere() {
    let mut bytes = small();
    let place = BlockPlace { segment: 10, epoch: 13, index: 0, offset: 0, ..PLACE };
    seal(&mut bytes, &place);
    assert_eq!(Block::decode(&bytes, None).unwrap().header().place, place);
    seal(&mut bytes, &PLACE);
    assert_eq!(bytes, small());
}

#[test]
fn zeros_and_foreign_and_newer_blocks_are_told_apart() {
    assert_eq!(Block::decode(&[0; 4096], None).unwrap_err(), BlockError::NotABlock);
    assert_eq!(Block::decode(b"RIFF....WAVE", None).unwrap_err(), BlockError::NotABlock);
    let mut newer = small();
    newer[at::VERSION] = 2;
    seal_damaged(&mut newer);
    assert_eq!(Block::decode(&newer, None).unwrap_err(), BlockError::NewerVersion { found: 2, known: 1 });
}

#[test]
fn unknown_flags_and_used_gaps_are_refused() {
    for at in [at::FLAGS, at::FLAGS + 1, at::ZERO_A, at::ZERO_B, at::BODY_CHECKSUM - 1, 4095] {
        let mut bytes = small();
        bytes[at] |= 0x80;
        seal_damaged(&mut bytes);
        assert!(matches!(Block::decode(&bytes, None), Err(BlockError::Corrupt(_))), "byte {at}");
    }
}

/// Whoever has a block may count on from its numbers.
#[test]
fn the_last_of_all_numbers_is_refused() {
    let sealed = |number, first, count| {
        let mut builder = BlockBuilder::new(4096);
        let mut buffer = vec![0; 4096];
        let entry = builder.add_entry(0, LogId(1), SequenceNumber(first));
        builder.add_count(entry, count);
        builder.finish(&mut buffer, false);
        seal(&mut buffer, &BlockPlace { number, ..PLACE });
        Block::decode(&buffer, None).map(drop)
    };
    assert_eq!(sealed(u64::MAX - 1, u64::MAX - 9, 8), Ok(()));
    for (number, first, count) in [(u64::MAX, 0, 8), (0, u64::MAX - 9, 9), (0, u64::MAX, 0)] {
        assert!(
            matches!(sealed(number, first, count), Err(BlockError::Corrupt(_))),
            "{number} {first} {count}"
        );
    }
}

#[test]
fn the_table_has_room_to_the_last_byte() {
    let mut builder = BlockBuilder::new(4096);
    let mut buffer = vec![0; 4096];
    builder.add_entry(0, LogId(1), SequenceNumber(0));
    let room = builder.room();
    assert_eq!(room, 4096 - BLOCK_HEADER_BYTES - TABLE_ENTRY_BYTES);
    assert!(builder.fits(room, false) && !builder.fits(room, true));
    builder.push_frames(&mut buffer, &frame(0, 0, &vec![1; room - 8]));
    builder.add_count(0, 1);
    assert_eq!(builder.room(), 0);
    assert_eq!(builder.finish(&mut buffer, false), 4096);
    seal(&mut buffer, &PLACE);
    assert_eq!(Block::decode(&buffer, None).unwrap().frames().count(), 1);
}

#[test]
fn how_the_bytes_came_in_does_not_show() {
    let value: Vec<u8> = (0..1003).map(|byte| byte as u8).collect();
    let whole = build(&[(1, 2, b"first".to_vec()), (1, 3, value.clone())], false, 4096);

    let mut builder = BlockBuilder::new(4096);
    let mut buffer = vec![0xee; 4096];
    let entry = builder.add_entry(1, LogId(1 << 100 | 5), SequenceNumber(1000));
    let first = frame(1, 2, b"first");
    // What is copied and not taken leaves no trace.
    assert_eq!(builder.copy(&mut buffer, &[&first[..], &[0xaa; 5000]].concat()), builder.room());
    builder.take(&first);
    let header = Header::new(FrameKind::Data, 3, 1, value.len());
    builder.push_value(&mut buffer, header, &value[..8], &value[8..]);
    builder.add_count(entry, 2);
    let len = builder.finish(&mut buffer, false);
    seal(&mut buffer[..len], &PLACE);
    assert_eq!(buffer[..len], whole);
}

/// Never change the file: blocks of version 1 must be readable for ever.
#[test]
fn the_fixture_decodes_for_ever() {
    let bytes = include_bytes!("../../tests/fixtures/block-v1.bin");
    let block = Block::decode(bytes, Some(&Expected::from(&PLACE))).unwrap();
    assert_eq!(block.header().place, PLACE);
    assert!(block.header().continues);
    let frames: Vec<_> = block.frames().map(Result::unwrap).collect();
    let values: Vec<_> = frames.iter().map(|frame| (frame.slot, frame.key_group.0, frame.value)).collect();
    assert_eq!(values, [(3, 7, &b"hello"[..]), (900_000, 1, b""), (3, 9, b"a longer value")]);
    if BLOCK_VERSION == 1 {
        assert_eq!(small(), bytes);
    }
}

/// Makes the checksums right, whatever the bytes are.
pub(crate) fn seal_damaged(block: &mut [u8]) {
    let body = XxHash3_64::oneshot(&block[BLOCK_HEADER_BYTES..]);
    put_u64(block, at::BODY_CHECKSUM, body);
    let checksum = checksum(block);
    put_u64(block, at::CHECKSUM, checksum);
}
