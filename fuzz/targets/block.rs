//! The bytes of a block: what can be walked has one encoding.
#![no_main]

use tidelog::block::{Block, BlockBuilder, BlockError, Expected, seal};
use tidelog::walk::Walk;
use tidelog_fuzz::memory;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    memory::within((1 << 20) + 100 * data.len(), || {
        check(data);
        let mut sealed = data.to_vec();
        tidelog_fuzz::seal::block(&mut sealed);
        check(&sealed);
    });
});

fn check(bytes: &[u8]) {
    let Ok(block) = Block::decode(bytes, None) else { return };
    let header = *block.header();
    assert_eq!(Block::peek_len(bytes), Ok(header.len));
    let expected = Expected::from(&header.place);
    Block::decode(bytes, Some(&expected)).expect("it belongs there");
    let elsewhere = Expected { epoch: !expected.epoch, ..expected };
    assert!(matches!(Block::decode(bytes, Some(&elsewhere)), Err(BlockError::Misplaced { .. })));
    assert!(block.frames().count() <= block.frame_bytes().len() / 8 + 1);
    let mut changes = 0u64;
    if Walk::new(None).block(&block, &mut |_| changes += 1).is_err() {
        return;
    }
    assert!(changes <= block.logs().map(|entry| u64::from(entry.count)).sum());
    let mut builder = BlockBuilder::new(header.len);
    let mut again = vec![0xff; header.len];
    builder.push_frames(&mut again, block.frame_bytes());
    for entry in block.logs() {
        let index = builder.add_entry(entry.slot, entry.log, entry.first);
        builder.add_count(index, entry.count);
    }
    assert_eq!(builder.finish(&mut again, header.continues), header.len);
    seal(&mut again, &header.place);
    assert_eq!(again, bytes[..header.len]);
}
