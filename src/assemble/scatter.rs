//! The assembler's second walk: every change to its place, and the hashes of long changesets on the way.
//!
//! Where changesets stand is decided before, by the first walk's counts.

use std::hash::Hasher as _;

use twox_hash::XxHash3_64;

use super::{Cell, LARGE_DELTA, SKIP, Step};
use crate::block::Block;
use crate::record::{FRAGMENT_LEAD_BYTES, FRAME_HEADER_BYTES, FrameKind, Header, split_fragment_lead};
use crate::varint;

/// How much is written before changesets are hashed as far as they are: little enough to be in a core's own cache.
pub(super) const HASH_EVERY_BYTES: usize = 768 << 10;
/// The least bytes of a changeset for that: below, the state of the hash costs more than a second look at the bytes.
pub(super) const GROWING_BYTES_MIN: u64 = 32 << 10;

/// What the first walk found out about the frames that the second has not come to.
#[derive(Clone, Copy)]
pub(super) struct Plan<'a> {
    /// One for each frame.
    pub(super) steps: &'a [Step],
    /// One for each step that has none in itself.
    pub(super) large_deltas: &'a [u64],
}

/// A changeset that is hashed while it grows.
pub(super) struct Growing {
    pub(super) cell: u32,
    pub(super) hash: XxHash3_64,
    /// Up to where it is hashed.
    pub(super) at: usize,
}

impl Growing {
    /// Hashes what was written of it since.
    fn hash_up_to(&mut self, cells: &[Cell], out: &[u8]) {
        let end = cells[self.cell as usize].at as usize;
        self.hash.write(&out[self.at..end]);
        self.at = end;
    }
}

/// Writes every change at its cell's cursor.
///
/// Writes may go up to seven bytes past a change. Within a changeset the next change overwrites them; past its end stands a
/// checksum, which is written last, or the slack.
pub(super) fn scatter(
    blocks: &[Block<'_>],
    plan: Plan<'_>,
    cells: &mut [Cell],
    out: &mut [u8],
    growing: &mut [Growing],
) {
    let mut left = plan;
    let mut unhashed_bytes = 0;
    for block in blocks {
        left = scatter_block(block.frame_bytes(), left, cells, out);
        unhashed_bytes += block.frame_bytes().len();
        if unhashed_bytes >= HASH_EVERY_BYTES {
            growing.iter_mut().for_each(|changeset| changeset.hash_up_to(cells, out));
            unhashed_bytes = 0;
        }
    }
    growing.iter_mut().for_each(|changeset| changeset.hash_up_to(cells, out));
}

/// Writes the changes of one block. Returns the plan of those behind it. Not inlined: its loop needs all registers.
#[inline(never)]
fn scatter_block<'a>(frames: &[u8], plan: Plan<'a>, cells: &mut [Cell], out: &mut [u8]) -> Plan<'a> {
    let mut rest = frames;
    let mut steps = plan.steps.iter();
    let mut large_deltas = plan.large_deltas.iter();
    while let Some(header) = Header::read(rest) {
        let step = steps.next().expect("one for each frame");
        let (frame, behind) = rest.split_at(header.frame_len());
        rest = behind;
        if step.cell == SKIP {
            continue;
        }
        let cell = &mut cells[step.cell as usize];
        let mut at = cell.at as usize;
        let kind = header.kind();
        let mut value = &frame[FRAME_HEADER_BYTES..];
        let mut value_len = header.value_len();
        if !matches!(kind, Some(FrameKind::FragmentMiddle | FrameKind::FragmentLast)) {
            let mut delta = u64::from(step.delta);
            if step.delta == LARGE_DELTA {
                delta = *large_deltas.next().expect("one for each such step");
            }
            at += varint::write(out, at, delta);
            let mut len = value_len as u64;
            if kind == Some(FrameKind::FragmentFirst) {
                let (_, total_len, bytes) =
                    split_fragment_lead(&value[..value_len]).expect("checked in the first walk");
                (len, value_len) = (total_len, bytes.len());
                value = &value[FRAGMENT_LEAD_BYTES..];
            }
            at += varint::write(out, at, len);
        }
        copy_padded(&mut out[at..], value, value_len);
        cell.at = (at + value_len) as u64;
    }
    Plan { steps: steps.as_slice(), large_deltas: large_deltas.as_slice() }
}

/// Copies the first `len` bytes of `value`. Of a short one, whose padding is there, whole words are copied, up to seven bytes
/// more, by a few moves of constant size that overlap: that is faster than a call of memcpy, which a loop would become.
#[inline]
fn copy_padded(out: &mut [u8], value: &[u8], len: usize) {
    let padded_len = len.next_multiple_of(8);
    match padded_len {
        0 => {}
        8 => copy_ends::<8>(&mut out[..8], &value[..8]),
        16..=32 => copy_ends::<16>(&mut out[..padded_len], &value[..padded_len]),
        33..=64 => copy_ends::<32>(&mut out[..padded_len], &value[..padded_len]),
        _ => out[..len].copy_from_slice(&value[..len]),
    }
}

/// Copies the first and the last `N` bytes of slices that have at least as many, and at most twice as many.
#[inline]
fn copy_ends<const N: usize>(out: &mut [u8], value: &[u8]) {
    const TOO_SHORT: &str = "at least as many";
    *out.first_chunk_mut::<N>().expect(TOO_SHORT) = *value.first_chunk().expect(TOO_SHORT);
    *out.last_chunk_mut::<N>().expect(TOO_SHORT) = *value.last_chunk().expect(TOO_SHORT);
}
