//! An append that the lane of the last one does not take at once: on another thread, with the lane full, or of a value too
//! large for any.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use tidelog_io::ring::PushError;

use super::{ChangelogWriter, Wait, frame_header};
use crate::device::{Charge, Device, LaneRef, SHARED_LANE, SideValue, lock};
use crate::error::AppendError;
use crate::record::{FRAME_HEADER_BYTES, FrameKind, Header, MARKER_BYTES};
use crate::types::{ChangeKind, KeyGroup, SequenceNumber};

impl ChangelogWriter {
    #[cold]
    #[inline(never)]
    pub(super) fn push_slow(
        &mut self,
        error: PushError,
        kind: ChangeKind,
        key_group: KeyGroup,
        value: &[u8],
        wait: Wait,
    ) -> Result<SequenceNumber, AppendError> {
        if error == PushError::Nested {
            return Err(AppendError::Nested);
        }
        let wait_max = match wait {
            Wait::Configured => self.core.options.append_wait_max,
            Wait::Never => Duration::ZERO,
        };
        if value.len() > self.lane.lane.value_len_max() {
            return self.push_side(kind, key_group, Bytes::copy_from_slice(self.check_len(value)?), wait_max);
        }
        let header = frame_header(kind, key_group, self.log.slot, value.len());
        self.push_waiting(header, value, wait_max)?;
        Ok(self.appended())
    }

    fn check_len<'a>(&self, value: &'a [u8]) -> Result<&'a [u8], AppendError> {
        let max = self.core.options.value_len_max();
        if value.len() > max { Err(AppendError::TooLarge { len: value.len(), max }) } else { Ok(value) }
    }

    /// Pushes a frame that fits the lane, on whatever thread this is, waiting for room.
    pub(super) fn push_waiting(
        &mut self,
        header: u64,
        value: &[u8],
        wait_max: Duration,
    ) -> Result<(), AppendError> {
        self.core.check_owner()?;
        let asked_at = Instant::now();
        let mut waiting = None;
        loop {
            match self.push_here(header, value)? {
                Ok(()) => return Ok(()),
                Err(PushError::Full) => {
                    let deadline = asked_at + wait_max;
                    waiting.get_or_insert_with(Waiting::begin);
                    let lane = self.device.current_lane().map_err(|_| AppendError::NoMemory)?;
                    let fits = lane.lane.wait_for_room(with_marker(value.len(), &lane), deadline);
                    // `append_with` has the writer marked until it is through.
                    self.check_intake()?;
                    if !fits && Instant::now() >= deadline {
                        return Err(AppendError::Full { waited: wait_max });
                    }
                }
                Err(PushError::Nested) => return Err(AppendError::Nested),
                Err(PushError::TooLarge) => {
                    return Err(AppendError::TooLarge {
                        len: value.len(),
                        max: self.lane.lane.value_len_max(),
                    });
                }
                Err(PushError::OtherThread) => unreachable!("the lane was claimed by this thread"),
            }
        }
    }

    /// Pushes a frame into the lane of this thread, after a marker if the last append went elsewhere.
    fn push_here(&mut self, header: u64, value: &[u8]) -> Result<Result<(), PushError>, AppendError> {
        let here = self.device.current_lane().map_err(|_| AppendError::NoMemory)?;
        let device = Arc::clone(&self.device);
        let _shared = SharedLane::enter(&device, &here)?;
        if here.index != self.lane.index
            && let Err(error) = self.hand_over(&here)
        {
            return Ok(Err(error));
        }
        Ok(here.lane.push(header, value))
    }

    /// Leaves a marker in the new lane that makes the spiller drain the old one first, as far as this log is in it.
    fn hand_over(&mut self, here: &LaneRef) -> Result<(), PushError> {
        let mut marker = [0; MARKER_BYTES];
        marker[..4].copy_from_slice(&self.lane.index.to_le_bytes());
        marker[8..16].copy_from_slice(&self.lane.lane.committed().to_le_bytes());
        marker[16..].copy_from_slice(&self.next.to_le_bytes());
        here.lane.push(Header::new(FrameKind::Moved, 0, self.log.slot, MARKER_BYTES).0, &marker)?;
        self.lane = here.clone();
        Ok(())
    }

    /// A value too large for the lane: the lane gets a frame that keeps its place, the device the bytes.
    pub(super) fn push_side(
        &mut self,
        kind: ChangeKind,
        key_group: KeyGroup,
        bytes: Bytes,
        wait_max: Duration,
    ) -> Result<SequenceNumber, AppendError> {
        self.core.check_owner()?;
        let asked_at = Instant::now();
        let charge =
            self.charge(bytes.len(), asked_at + wait_max).ok_or(AppendError::Full { waited: wait_max })?;
        let key = self.device.put_side(SideValue { kind, bytes, _charge: Some(charge) });
        let header = Header::new(FrameKind::Side, key_group.0, self.log.slot, 8).0;
        match self.push_waiting(header, &key.to_le_bytes(), wait_max.saturating_sub(asked_at.elapsed())) {
            Ok(()) => Ok(self.appended()),
            Err(error) => {
                self.device.take_side(key);
                Err(error)
            }
        }
    }

    fn charge(&self, bytes: usize, deadline: Instant) -> Option<Charge> {
        let budget = &self.device.side_budget;
        let mut waiting = None;
        loop {
            if let Some(charge) = budget.charge(bytes) {
                return Some(charge);
            }
            waiting.get_or_insert_with(Waiting::begin);
            let left = deadline.checked_duration_since(Instant::now()).filter(|left| !left.is_zero())?;
            let room = std::future::poll_fn(|context| budget.poll_room(bytes, context));
            tidelog_upload::block_on_timeout(room, left)?;
        }
    }
}

/// An append that waits for room, as metrics show it.
struct Waiting;

impl Waiting {
    fn begin() -> Waiting {
        metrics::counter!("tidelog_append_waits_total").increment(1);
        metrics::gauge!("tidelog_appends_waiting").increment(1.0);
        Waiting
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        metrics::gauge!("tidelog_appends_waiting").decrement(1.0);
    }
}

/// The room to wait for: the marker of a hand-over may have to fit as well. A lane calls what is too large for any room
/// fitting, so as not to wait in vain.
pub(super) fn with_marker(len: usize, lane: &LaneRef) -> usize {
    (len + MARKER_BYTES + FRAME_HEADER_BYTES).min(lane.lane.value_len_max())
}

/// Makes the shared lane this thread's for a while; does nothing for a lane of its own.
struct SharedLane<'a> {
    claimed: Option<(std::sync::MutexGuard<'a, ()>, LaneRef)>,
}

impl<'a> SharedLane<'a> {
    fn enter(device: &'a Device, here: &LaneRef) -> Result<SharedLane<'a>, AppendError> {
        if here.index != SHARED_LANE {
            return Ok(SharedLane { claimed: None });
        }
        let guard = lock(&device.shared_lane);
        // Nobody claims the shared lane without the lock.
        if !here.lane.try_claim() {
            return Err(AppendError::Nested);
        }
        Ok(SharedLane { claimed: Some((guard, here.clone())) })
    }
}

impl Drop for SharedLane<'_> {
    fn drop(&mut self) {
        if let Some((_, here)) = &self.claimed {
            here.lane.disown();
        }
    }
}
