//! The memory of parts, which comes back when the driver has let a part go.
//!
//! Fresh memory is dear: the system zeroes it, and below a hypervisor it may have to be found first. (On a virtual machine
//! 256 MiB took half a second; sorting them takes a tenth.) So what a checkpoint needed stays for the next one, and goes
//! when nobody took it for [`KEPT_FOR`].
//!
//! New memory is taken only when none is spare, so together with what is out it is never more than was out at a time.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bytes::Bytes;

use crate::assemble::Memory;
use crate::device::lock;

/// How long memory that nobody takes stays, at least; at most twice as long. Several intervals between checkpoints, as a
/// rule.
const KEPT_FOR: Duration = Duration::from_secs(60);

#[derive(Clone, Debug, Default)]
pub(super) struct PartBuffers(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    /// The last that came back is taken first: more of it is in the caches. So the first ones are those that nobody needs.
    spare: Vec<Memory>,
    /// How many were always there since the last look.
    untouched: usize,
    look_at: Option<Instant>,
}

impl PartBuffers {
    /// One that came back.
    pub fn take(&self) -> Option<Memory> {
        let mut state = lock(&self.0);
        let memory = state.spare.pop();
        state.untouched = state.untouched.min(state.spare.len());
        memory
    }

    /// `part` as bytes to be shared; its memory comes back with the last of them.
    pub fn lend(&self, part: Memory) -> Bytes {
        Bytes::from_owner(Lent { part, home: self.clone() })
    }

    /// Gives to the system what nobody took for a while. Says when to call again, should nothing happen.
    pub fn trim(&self, now: Instant) -> Option<Instant> {
        let mut state = lock(&self.0);
        let due = state.look_at.is_some_and(|at| at <= now);
        let untouched = if due { state.untouched } else { 0 };
        let dropped: Vec<Memory> = state.spare.drain(..untouched).collect();
        if due || state.look_at.is_none() {
            state.untouched = state.spare.len();
            state.look_at = (!state.spare.is_empty()).then_some(now + KEPT_FOR);
        }
        let look_at = state.look_at;
        // It takes its time, and others want the lock.
        drop(state);
        drop(dropped);
        look_at
    }
}

struct Lent {
    part: Memory,
    home: PartBuffers,
}

impl AsRef<[u8]> for Lent {
    fn as_ref(&self) -> &[u8] {
        &self.part
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        lock(&self.home.0).spare.push(std::mem::take(&mut self.part));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_comes_back_with_the_last_of_its_bytes() {
        let buffers = PartBuffers::default();
        assert_eq!(buffers.take(), None);
        let part = buffers.lend(vec![7; 100].into());
        let slice = part.slice(10..20);
        drop(part);
        assert_eq!(buffers.take(), None);
        assert_eq!(slice, [7; 10][..]);
        drop(slice);
        assert_eq!(buffers.take(), Some(vec![7; 100].into()));
    }

    #[test]
    fn what_nobody_takes_goes_and_what_checkpoints_use_stays() {
        let buffers = PartBuffers::default();
        let spare = || lock(&buffers.0).spare.len();
        let start = Instant::now();
        assert_eq!(buffers.trim(start), None);
        drop((0..8).map(|byte| buffers.lend(vec![byte].into())).collect::<Vec<Bytes>>());
        assert_eq!(buffers.trim(start), Some(start + KEPT_FOR));
        // The last that came back is the first that is used. Three of them are, again and again.
        let mut now = start;
        for kept in [8, 3, 3] {
            assert_eq!(spare(), kept);
            let taken: Vec<Memory> = (0..3).map(|_| buffers.take().expect("one that came back")).collect();
            assert_eq!(taken[0], vec![7].into());
            drop(taken.into_iter().rev().map(|part| buffers.lend(part)).collect::<Vec<Bytes>>());
            assert_eq!(buffers.trim(now + KEPT_FOR / 2), Some(now + KEPT_FOR));
            now += KEPT_FOR;
            buffers.trim(now);
        }
        assert_eq!(spare(), 3);
        assert_eq!(buffers.trim(now + KEPT_FOR), None);
        assert_eq!(spare(), 0);
    }
}
