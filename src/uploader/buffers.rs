//! The memory of parts, which comes back when the driver has let a part go: fresh memory is zeroed, and that costs a tenth
//! of what assembling costs.
//!
//! Many parts may come back before the next one is made. They are kept, up to [`SPARE_MIN`] more than are out: in the midst
//! of a large upload most of them, after it two. New memory is taken only when none is spare, so together with what is out
//! they are never more than [`SPARE_MIN`] above what was out at a time.

use std::sync::{Arc, Mutex};

use bytes::Bytes;

use crate::assemble::Memory;
use crate::device::lock;

/// How many are kept when none is out.
const SPARE_MIN: usize = 2;

#[derive(Clone, Debug, Default)]
pub(super) struct PartBuffers(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    /// The last that came back is taken first: more of it is in the caches.
    spare: Vec<Memory>,
    /// How many are out.
    lent: usize,
}

impl PartBuffers {
    /// One that came back.
    pub fn take(&self) -> Option<Memory> {
        lock(&self.0).spare.pop()
    }

    /// `part` as bytes to be shared; its memory comes back with the last of them.
    pub fn lend(&self, part: Memory) -> Bytes {
        lock(&self.0).lent += 1;
        Bytes::from_owner(Lent { part, home: self.clone() })
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
        let mut state = lock(&self.home.0);
        state.lent -= 1;
        state.spare.push(std::mem::take(&mut self.part));
        let kept = state.lent + SPARE_MIN;
        let excess = state.spare.len().saturating_sub(kept);
        // The oldest; given back to the system when the lock is free.
        let dropped: Vec<Memory> = state.spare.drain(..excess).collect();
        drop(state);
        drop(dropped);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_comes_back_with_the_last_of_its_bytes_and_not_without_bound() {
        let buffers = PartBuffers::default();
        assert_eq!(buffers.take(), None);
        let part = buffers.lend(vec![7; 100].into());
        let slice = part.slice(10..20);
        drop(part);
        assert_eq!(buffers.take(), None);
        assert_eq!(slice, [7; 10][..]);
        drop(slice);
        assert_eq!(buffers.take(), Some(vec![7; 100].into()));
        let mut lent: Vec<Bytes> = (0..8).map(|byte| buffers.lend(vec![byte].into())).collect();
        let spare = || lock(&buffers.0).spare.len();
        let kept: Vec<usize> = (0..8)
            .map(|_| {
                lent.pop();
                spare()
            })
            .collect();
        assert_eq!(kept, [1, 2, 3, 4, 5, 4, 3, 2]);
        // Those that came back last, the last one first.
        assert_eq!([(); 3].map(|()| buffers.take()), [Some(vec![0].into()), Some(vec![1].into()), None]);
    }
}
