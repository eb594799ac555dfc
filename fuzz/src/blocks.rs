//! Blocks of a device, by docs/format.md: one after another, with changes whole and in fragments.

use std::collections::BTreeMap;

use tidelog::block::BlockPlace;

use crate::input::Input;
use crate::seal;

/// The logs of a device: log `n + 1` has slot `n`, unless the input says otherwise.
pub const LOGS: u64 = 3;
const BLOCKS_MAX: usize = 5;
const FRAMES_MAX: usize = 12;

/// What is known between blocks.
#[derive(Default)]
pub struct Device {
    /// The next number of each log, by slot.
    next: BTreeMap<u64, u64>,
    /// The change that goes on: slot, key group, bytes that are missing.
    open: Option<(u64, u64, u64)>,
}

/// Some blocks, none with a place.
pub fn blocks(input: &mut Input<'_>) -> Vec<Vec<u8>> {
    let mut device = Device::default();
    let count = 1 + usize::from(input.byte()) % BLOCKS_MAX;
    let place = |number| BlockPlace {
        directory: 7,
        segment: 0,
        epoch: 1,
        index: number as u32,
        offset: 4096 * number,
        number,
        watermark: 0,
    };
    (0..count as u64).map(|number| block(input, &mut device, &place(number))).collect()
}

/// One block, sealed for a place.
pub fn block(input: &mut Input<'_>, device: &mut Device, place: &BlockPlace) -> Vec<u8> {
    let mut frames = Vec::new();
    // By slot: the number of the first change, and how many end here.
    let mut table: BTreeMap<u64, (u64, u64)> = BTreeMap::new();
    // A change that goes on does so in the next block.
    let frames_min = usize::from(device.open.is_some());
    for _ in 0..(usize::from(input.byte()) % (FRAMES_MAX + 1)).max(frames_min) {
        let choice = input.byte();
        let (slot, key_group) = match device.open {
            Some((slot, key_group, _)) => (slot, key_group),
            None => (u64::from(choice >> 4) % LOGS, u64::from(input.byte()) * 257),
        };
        let value = input.bytes();
        let (kind, value, ends) = match (device.open, choice & 3) {
            (None, 0 | 1) => (1, value.to_vec(), true),
            (None, 2) => (2, value.to_vec(), true),
            (None, _) => {
                let more = u64::from(input.byte());
                device.open = Some((slot, key_group, more));
                let total = input.number(value.len() as u64 + more);
                let lead = (total & ((1 << 56) - 1)) | (1 + u64::from(choice >> 2 & 1)) << 56;
                (5, [&lead.to_le_bytes()[..], value].concat(), false)
            }
            (Some((.., more)), 0..3) => {
                let piece = &value[..value.len().min(more as usize)];
                device.open = Some((slot, key_group, more - piece.len() as u64));
                (6, piece.to_vec(), false)
            }
            (Some((.., more)), _) => {
                device.open = None;
                (7, vec![choice; more as usize], true)
            }
        };
        let next = device.next.entry(slot).or_default();
        let entry = table.entry(slot).or_insert((*next, 0));
        if ends {
            *next += 1;
            entry.1 += 1;
        }
        let kind = input.number(kind) & 0xf;
        let len = input.number(value.len() as u64) & 0xff_ffff;
        let slot = input.number(slot) & 0xf_ffff;
        frames.extend((len | kind << 24 | key_group << 28 | slot << 44).to_le_bytes());
        frames.extend(&value);
        frames.resize(frames.len().next_multiple_of(8), 0);
    }
    let mut out = vec![0; 128];
    out[..8].copy_from_slice(b"tlogBLK\n");
    out[8] = 1;
    out[10] = input.number(device.open.is_some().into()) as u8;
    out[16..24].copy_from_slice(&input.number(place.directory).to_le_bytes());
    out[24..32].copy_from_slice(&input.number(place.epoch).to_le_bytes());
    out[32..36].copy_from_slice(&(input.number(place.segment.into()) as u32).to_le_bytes());
    out[36..40].copy_from_slice(&(input.number(place.index.into()) as u32).to_le_bytes());
    out[40..48].copy_from_slice(&input.number(place.offset).to_le_bytes());
    out[48..56].copy_from_slice(&input.number(place.number).to_le_bytes());
    out[56..64].copy_from_slice(&input.number(place.watermark).to_le_bytes());
    out[64..68].copy_from_slice(&(input.number(frames.len() as u64) as u32).to_le_bytes());
    out[68..72].copy_from_slice(&(input.number(table.len() as u64) as u32).to_le_bytes());
    out.extend(&frames);
    for (slot, (first, count)) in table {
        out.extend((input.number(slot) as u32).to_le_bytes());
        out.extend((input.number(count) as u32).to_le_bytes());
        out.extend(u128::from(input.number(slot + 1)).to_le_bytes());
        out.extend(input.number(first).to_le_bytes());
    }
    out.resize(out.len().next_multiple_of(4096), 0);
    let len = out.len() as u64;
    out[72..76].copy_from_slice(&(input.number(len) as u32).to_le_bytes());
    seal::block(&mut out);
    out
}
