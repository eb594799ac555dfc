//! What rots on a disk between two uses of its directory: blocks that nobody needs any more.

use tidelog::block::Block;
use tidelog::manifest::ManifestState;
use tidelog_io::directory::{MANIFEST_NAME, ManifestContent};
use tidelog_io::segment::segment_name;
use tidelog_io::sim::{SimRng, SimWorld};

/// Flips a bit of a block that is only kept for local restores, and says where, if there is one.
pub fn flip(world: &SimWorld, rng: &mut SimRng) -> Option<String> {
    let content = ManifestContent::decode(&world.contents(MANIFEST_NAME)?).ok()?;
    let state = ManifestState::replay(content.records.iter().map(Vec::as_slice)).ok()?;
    let mut settled = Vec::new();
    for (&segment, &epoch) in state.segments() {
        let bytes = world.contents(&segment_name(segment))?;
        let mut at = 0;
        while let Some(len) = bytes.get(at..).and_then(|rest| Block::peek_len(rest).ok()) {
            let Some(Ok(block)) = bytes.get(at..at + len).map(|bytes| Block::decode(bytes, None)) else {
                break;
            };
            let place = block.header().place;
            if place.epoch == epoch && place.number < state.settled() {
                settled.push((segment, at as u64, len as u64));
            }
            at += len;
        }
    }
    let (segment, at, len) = *settled.get(rng.below(settled.len() as u64) as usize)?;
    let (offset, bit) = (at + rng.below(len), rng.below(8) as u8);
    world.flip_bit(&segment_name(segment), offset, bit);
    Some(format!("bit {bit} of byte {offset} of segment {segment}"))
}
