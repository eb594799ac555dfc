//! Values too large for what is left of a block: cut into fragments over as many blocks as it takes.

use std::time::Instant;

use super::{Spiller, slot_state};
use crate::block::TABLE_ENTRY_BYTES;
use crate::device::SideValue;
use crate::record::{FRAGMENT_LEAD_BYTES, FRAME_HEADER_BYTES, FrameKind, Header, fragment_lead};
use crate::types::SequenceNumber;

/// A fragment of a large value is not started for less room than this.
const FRAGMENT_BYTES_MIN: usize = 64;

/// A value that is being cut into fragments.
pub(super) struct LargeValue {
    pub(super) slot: u32,
    pub(super) key_group: u16,
    pub(super) value: SideValue,
    pub(super) written: usize,
    pub(super) started: bool,
}

impl LargeValue {
    pub(super) fn new(header: Header, value: SideValue) -> LargeValue {
        LargeValue { slot: header.slot(), key_group: header.key_group(), value, written: 0, started: false }
    }
}

impl Spiller {
    /// Writes as much of the large value as there is room for. Whether all of it is written.
    pub(super) fn write_large(&mut self, now: Instant) -> bool {
        loop {
            if !self.open_block(now) {
                return false;
            }
            let Spiller { parts, logs, builder, open, opened, large, .. } = self;
            let Some(value) = large else { return true };
            let state = slot_state(logs, &parts.device, value.slot);
            let new_entry = state.opened != *opened;
            let lead = if value.started { 0 } else { FRAGMENT_LEAD_BYTES };
            let overhead = FRAME_HEADER_BYTES + lead + if new_entry { TABLE_ENTRY_BYTES } else { 0 };
            let room = builder.room();
            if room < overhead + FRAGMENT_BYTES_MIN {
                self.finish_block();
                continue;
            }
            if new_entry {
                state.opened = *opened;
                state.entry = builder.add_entry(value.slot, state.log.id, SequenceNumber(state.next));
            }
            let rest = &value.value.bytes[value.written..];
            // Room is a multiple of eight, as is the overhead: a piece that fills it needs no padding.
            let piece = &rest[..rest.len().min(room - overhead)];
            let last = value.started && piece.len() == rest.len();
            let kind = match (value.started, last) {
                (false, _) => FrameKind::FragmentFirst,
                (true, false) => FrameKind::FragmentMiddle,
                (true, true) => FrameKind::FragmentLast,
            };
            let header = Header::new(kind, value.key_group, value.slot, lead + piece.len());
            let lead = fragment_lead(value.value.kind, value.value.bytes.len() as u64);
            let lead = if value.started { &[][..] } else { &lead };
            let buffer = &mut open.as_mut().expect("a block is open").buffer;
            builder.push_value(buffer, header, lead, piece);
            value.started = true;
            value.written += piece.len();
            if last {
                builder.add_count(state.entry, 1);
                state.next += 1;
                self.large = None;
                if self.chained >= self.parts.chain_blocks_max {
                    // Only at such an end can blocks be put into an object.
                    self.finish_block();
                }
                return true;
            }
        }
    }
}
