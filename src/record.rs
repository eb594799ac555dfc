//! The frame: how one change, or a piece of one, stands in a lane and in a block.
//!
//! Lane and block share the layout, so that the spiller copies whole runs of frames. Which log a slot means is known
//! to the lane's owner and to the block's table, not here; sequence numbers are counted, not stored. The byte layout is
//! in docs/format.md.

use crate::block::BlockError;
use crate::types::{ChangeKind, KeyGroup};

/// Frames, and so their headers, start at multiples of this many bytes.
pub const FRAME_ALIGN_BYTES: usize = 8;
/// The size of a frame's header in bytes.
pub const FRAME_HEADER_BYTES: usize = 8;
/// The longest value one frame can hold, in bytes.
pub const VALUE_BYTES_MAX: usize = (1 << 24) - 1;
/// How many log slots a device has.
pub const SLOTS_MAX: u32 = 1 << 20;
/// What stands before the bytes in the value of a [`FrameKind::FragmentFirst`].
pub const FRAGMENT_LEAD_BYTES: usize = 8;
/// Length of a [`FrameKind::Moved`] frame's value in bytes: lane, four zeros, position there, next sequence number.
pub const MARKER_BYTES: usize = 24;
/// The longest change that fragments can carry, in bytes: 2^56 - 1.
pub const FRAGMENTED_BYTES_MAX: u64 = (1 << 56) - 1;

/// What a frame is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum FrameKind {
    /// A whole change of keyed state.
    Data = 1,
    /// A whole metadata change; its key group is 0.
    Metadata = 2,
    /// Only in a lane: the value is a u64 key of a side table that holds a value too large for the lane.
    Side = 3,
    /// Only in a lane: a writer came from another lane; the value is u32 lane index, u32 zero, u64 position in that
    /// lane, u64 next sequence number.
    Moved = 4,
    /// The first piece of a change; the value starts with [`fragment_lead`].
    FragmentFirst = 5,
    /// A piece in the middle.
    FragmentMiddle = 6,
    /// The last piece.
    FragmentLast = 7,
}

impl FrameKind {
    #[inline]
    const fn from_bits(bits: u64) -> Option<FrameKind> {
        Some(match bits {
            1 => FrameKind::Data,
            2 => FrameKind::Metadata,
            3 => FrameKind::Side,
            4 => FrameKind::Moved,
            5 => FrameKind::FragmentFirst,
            6 => FrameKind::FragmentMiddle,
            7 => FrameKind::FragmentLast,
            _ => return None,
        })
    }
}

/// The header of a frame: one little-endian u64. Zero is never the header of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header(pub u64);

impl Header {
    /// The header of a frame with a value of `len` bytes. The caller keeps `len` at most [`VALUE_BYTES_MAX`] and `slot`
    /// below [`SLOTS_MAX`]; debug builds assert it.
    #[must_use]
    #[inline]
    pub const fn new(kind: FrameKind, key_group: u16, slot: u32, len: usize) -> Header {
        debug_assert!(len <= VALUE_BYTES_MAX && slot < SLOTS_MAX);
        Header(len as u64 | (kind as u64) << 24 | (key_group as u64) << 28 | (slot as u64) << 44)
    }

    /// The header at the start of `bytes`; `None` if they are fewer than eight.
    #[must_use]
    #[inline]
    pub fn read(bytes: &[u8]) -> Option<Header> {
        bytes.first_chunk::<8>().map(|bytes| Header(u64::from_le_bytes(*bytes)))
    }

    /// The length of the value in bytes, without padding.
    #[must_use]
    #[inline]
    pub const fn value_len(self) -> usize {
        (self.0 & 0xff_ffff) as usize
    }

    /// What the frame is; `None` for bytes that are no frame.
    #[must_use]
    #[inline]
    pub const fn kind(self) -> Option<FrameKind> {
        FrameKind::from_bits(self.0 >> 24 & 0xf)
    }

    /// Whether the frame is a whole change: [`FrameKind::Data`] or [`FrameKind::Metadata`].
    #[must_use]
    #[inline]
    pub const fn is_change(self) -> bool {
        matches!(self.0 >> 24 & 0xf, 1 | 2)
    }

    /// Whether the two differ in nothing but their key groups.
    #[must_use]
    #[inline]
    pub const fn is_like(self, other: Header) -> bool {
        (self.0 ^ other.0) & !(0xffff << 28) == 0
    }

    /// The key group; 0 for metadata.
    #[must_use]
    #[inline]
    pub const fn key_group(self) -> u16 {
        (self.0 >> 28) as u16
    }

    /// The log's slot on the device.
    #[must_use]
    #[inline]
    pub const fn slot(self) -> u32 {
        (self.0 >> 44) as u32
    }

    /// The length of the whole frame in bytes: header, value, padding.
    #[must_use]
    #[inline]
    pub const fn frame_len(self) -> usize {
        frame_len(self.value_len())
    }
}

/// The length in bytes of a frame with a value of `value_len` bytes: header, value, padding.
#[must_use]
#[inline]
pub const fn frame_len(value_len: usize) -> usize {
    FRAME_HEADER_BYTES + value_len.next_multiple_of(FRAME_ALIGN_BYTES)
}

/// The first eight bytes of a [`FrameKind::FragmentFirst`]'s value: the kind and the length in bytes of the whole
/// change.
///
/// # Panics
/// If `total_len` exceeds [`FRAGMENTED_BYTES_MAX`].
#[must_use]
pub fn fragment_lead(kind: ChangeKind, total_len: u64) -> [u8; FRAGMENT_LEAD_BYTES] {
    assert!(total_len <= FRAGMENTED_BYTES_MAX, "a change holds fewer than 2^56 bytes");
    let kind = match kind {
        ChangeKind::Data => FrameKind::Data,
        ChangeKind::Metadata => FrameKind::Metadata,
    };
    (total_len | (kind as u64) << 56).to_le_bytes()
}

/// Splits the value of a [`FrameKind::FragmentFirst`] into the change's kind, its whole length in bytes, and the bytes
/// of this piece; `None` if it is malformed.
#[must_use]
pub fn split_fragment_lead(value: &[u8]) -> Option<(ChangeKind, u64, &[u8])> {
    let (lead, bytes) = value.split_first_chunk::<FRAGMENT_LEAD_BYTES>()?;
    let lead = u64::from_le_bytes(*lead);
    let kind = match FrameKind::from_bits(lead >> 56)? {
        FrameKind::Data => ChangeKind::Data,
        FrameKind::Metadata => ChangeKind::Metadata,
        _ => return None,
    };
    Some((kind, lead & FRAGMENTED_BYTES_MAX, bytes))
}

/// One frame of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frame<'a> {
    /// The log's slot on the device; the block's table says which log that was.
    pub slot: u32,
    /// What the frame is: never [`FrameKind::Side`] or [`FrameKind::Moved`].
    pub kind: FrameKind,
    /// The key group; 0 for metadata.
    pub key_group: KeyGroup,
    /// The value without padding.
    pub value: &'a [u8],
}

/// The frames of a block in append order. Ends after the first error.
#[derive(Clone, Debug)]
pub struct Frames<'a> {
    rest: &'a [u8],
}

impl<'a> Frames<'a> {
    /// Walks `bytes`, which hold whole frames back to back.
    #[must_use]
    pub fn new(bytes: &'a [u8]) -> Frames<'a> {
        Frames { rest: bytes }
    }

    fn take(&mut self) -> Result<Frame<'a>, BlockError> {
        let header = Header::read(self.rest).ok_or(BlockError::Corrupt("a frame is cut short"))?;
        let kind = match header.kind() {
            None | Some(FrameKind::Side | FrameKind::Moved) => {
                return Err(BlockError::Corrupt("a frame of a kind that no block holds"));
            }
            Some(kind) => kind,
        };
        let (frame, rest) = self
            .rest
            .split_at_checked(header.frame_len())
            .ok_or(BlockError::Corrupt("a frame is cut short"))?;
        self.rest = rest;
        let value = &frame[FRAME_HEADER_BYTES..FRAME_HEADER_BYTES + header.value_len()];
        Ok(Frame { slot: header.slot(), kind, key_group: KeyGroup(header.key_group()), value })
    }
}

impl<'a> Iterator for Frames<'a> {
    type Item = Result<Frame<'a>, BlockError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.rest.is_empty() {
            return None;
        }
        let frame = self.take();
        if frame.is_err() {
            self.rest = &[];
        }
        Some(frame)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn header_round_trips(kind in 1u64..8, key_group: u16, slot in 0..SLOTS_MAX, len in 0..=VALUE_BYTES_MAX) {
            let kind = FrameKind::from_bits(kind).unwrap();
            let header = Header::new(kind, key_group, slot, len);
            prop_assert_eq!(header.kind(), Some(kind));
            prop_assert_eq!(header.is_change(), matches!(kind, FrameKind::Data | FrameKind::Metadata));
            prop_assert_eq!(header.key_group(), key_group);
            prop_assert_eq!(header.slot(), slot);
            prop_assert_eq!(header.value_len(), len);
            prop_assert!(header.frame_len() >= len + 8 && header.frame_len() < len + 16);
            prop_assert_eq!(header.frame_len() % FRAME_ALIGN_BYTES, 0);
            prop_assert!(header.is_like(Header::new(kind, !key_group, slot, len)));
            prop_assert!(!header.is_like(Header::new(kind, key_group, slot ^ 1, len)));
            prop_assert!(!header.is_like(Header::new(kind, key_group, slot, len ^ 1)));
            prop_assert!(!header.is_like(Header(header.0 ^ 1 << 27)));
        }

        #[test]
        fn frames_of_arbitrary_bytes_end(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let walked: usize = Frames::new(&bytes).flatten().map(|frame| frame_len(frame.value.len())).sum();
            prop_assert!(walked <= bytes.len());
        }
    }

    #[test]
    fn zeros_are_not_a_frame() {
        assert_eq!(Header(0).kind(), None);
        assert!(Frames::new(&[0; 64]).next().unwrap().is_err());
    }

    #[test]
    fn lane_only_kinds_are_refused() {
        for kind in [FrameKind::Side, FrameKind::Moved] {
            let bytes = Header::new(kind, 0, 0, 0).0.to_le_bytes();
            let mut frames = Frames::new(&bytes);
            assert!(frames.next().unwrap().is_err());
            assert!(frames.next().is_none(), "an error is the last item");
        }
    }

    #[test]
    fn fragment_lead_round_trips() {
        for kind in [ChangeKind::Data, ChangeKind::Metadata] {
            let mut value = fragment_lead(kind, 0x12_3456_789a).to_vec();
            value.extend(b"bytes");
            assert_eq!(split_fragment_lead(&value), Some((kind, 0x12_3456_789a, &b"bytes"[..])));
        }
        assert_eq!(split_fragment_lead(&[0; 8]), None);
        assert_eq!(split_fragment_lead(&[0; 7]), None);
    }
}
