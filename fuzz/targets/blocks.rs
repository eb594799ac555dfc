//! Blocks that fit together, but for some numbers: the walk and the assembler see the same changes in them, and a reader
//! sees them in the object that they become.
#![no_main]

use std::collections::BTreeMap;

use tidelog::assemble::Assembler;
use tidelog::block::{Block, BlockError};
use tidelog::tail::Tail;
use tidelog::walk::Walk;
use tidelog::{ChangeKind, LogId, SequenceNumber};
use tidelog_fuzz::input::Input;
use tidelog_fuzz::object::Changes;
use tidelog_fuzz::{blocks, memory, object};

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    memory::within(64 << 20, || {
        let mut input = Input::new(data);
        let compression = object::compression(input.byte());
        let blocks = blocks::blocks(&mut input);
        let honest = input.is_honest();
        let mut decoded = Vec::new();
        for block in &blocks {
            match Block::decode(block, None) {
                Ok(block) => decoded.push(block),
                Err(error) => return assert!(!honest, "{error}"),
            }
        }
        let walked = walk(&decoded, None);
        let mut tail = Tail::new(1);
        let id = tail.footer().part_id(0);
        let all = &mut |_| SequenceNumber(0)..SequenceNumber(u64::MAX);
        let blocks = decoded.iter().copied().map(Ok::<_, BlockError>);
        let part = match Assembler::new().assemble(blocks, all, id, compression) {
            Ok(part) => part,
            // Honest changes may still go on behind the last block.
            Err(error) => return assert!(!honest || error == BlockError::Unfinished, "{error}"),
        };
        let (walked, open) = walked.expect("what can be assembled can be walked");
        assert!(!open);
        for log in walked.keys() {
            let of_log = walked
                .iter()
                .filter(|(found, _)| *found == log)
                .map(|(log, changes)| (*log, changes.clone()));
            assert_eq!(
                walk(&decoded, Some(*log)).expect("the walk of one log sees no more").0,
                of_log.collect()
            );
        }
        tail.push(compression, part.runs, &part.directories);
        let object = [&part.bytes[..], &tail.encode().0].concat();
        assert_eq!(object::read(&object), walked);
    });
});

type Walked = BTreeMap<LogId, Changes>;

fn walk(blocks: &[Block<'_>], only: Option<LogId>) -> Result<(Walked, bool), BlockError> {
    let mut walk = Walk::new(only);
    let mut walked = Walked::new();
    for block in blocks {
        walk.block(block, &mut |change| {
            let group = (change.kind == ChangeKind::Data).then_some(change.key_group.0);
            let of_group = walked.entry(change.log).or_default().entry(group).or_default();
            of_group.push((change.sequence.0, change.value.to_vec()));
        })?;
    }
    Ok((walked, walk.is_open()))
}
