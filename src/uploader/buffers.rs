//! The memory of parts, which comes back when the driver has let a part go.
//!
//! Fresh memory is dear: the system zeroes it, and below a hypervisor it may have to be found first. (On a virtual machine
//! 256 MiB took half a second; sorting them takes a tenth.) So what a checkpoint needed stays for the next one, and goes
//! when nobody took it for [`KEPT_FOR`].
//!
//! What is spare and what is out are together never more than was out at a time in that while.

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

/// All counts are bytes of memory, whatever of it a part fills.
#[derive(Debug, Default)]
struct State {
    /// The last that came back is taken first: more of it is in the caches.
    spare: Vec<Memory>,
    spare_bytes: usize,
    out_bytes: usize,
    /// The most that was out at a time since the last look, and in the time before.
    most_out: [usize; 2],
    look_at: Option<Instant>,
}

impl PartBuffers {
    /// One for about so many bytes: the last that came back of those that are long enough, else the longest.
    pub fn take(&self, len: usize) -> Option<Memory> {
        let mut state = lock(&self.0);
        let fits = state.spare.iter().rposition(|memory| memory.capacity() >= len);
        let longest = || (0..state.spare.len()).max_by_key(|index| state.spare[*index].capacity());
        let memory = fits.or_else(longest).map(|index| state.spare.remove(index))?;
        state.spare_bytes -= memory.capacity();
        Some(memory)
    }

    /// `part` as bytes to be shared; its memory comes back with the last of them, unless the heap keeps its kind.
    pub fn lend(&self, part: Memory) -> Bytes {
        if !part.is_mapped() {
            return Bytes::from_owner(part);
        }
        let mut state = lock(&self.0);
        state.out_bytes += part.capacity();
        state.most_out[0] = state.most_out[0].max(state.out_bytes);
        let dropped = state.excess();
        // It takes its time, and others want the lock.
        drop(state);
        drop(dropped);
        Bytes::from_owner(Lent { part, home: self.clone() })
    }

    /// Gives to the system what nobody took for a while. Says when to call again, should nothing happen.
    pub fn trim(&self, now: Instant) -> Option<Instant> {
        let mut state = lock(&self.0);
        if state.look_at.is_some_and(|at| at <= now) {
            state.look_at = None;
            state.most_out = [state.out_bytes, state.most_out[0]];
        }
        let dropped = state.excess();
        if !state.spare.is_empty() {
            state.look_at.get_or_insert(now + KEPT_FOR);
        }
        let look_at = state.look_at;
        drop(state);
        drop(dropped);
        look_at
    }
}

impl State {
    /// The oldest of those that are more than what was out at a time.
    fn excess(&mut self) -> Vec<Memory> {
        let most = self.most_out[0].max(self.most_out[1]);
        let mut count = 0;
        while self.spare_bytes + self.out_bytes > most && count < self.spare.len() {
            self.spare_bytes -= self.spare[count].capacity();
            count += 1;
        }
        self.spare.drain(..count).collect()
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
        let part = std::mem::take(&mut self.part);
        state.out_bytes -= part.capacity();
        state.spare_bytes += part.capacity();
        state.spare.push(part);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    fn lend(buffers: &PartBuffers, mib: usize) -> Bytes {
        buffers.lend(buffers.take(mib * MIB).unwrap_or_else(|| Memory::new(mib * MIB)))
    }

    fn spare(buffers: &PartBuffers) -> Vec<usize> {
        let state = lock(&buffers.0);
        let mib: Vec<usize> = state.spare.iter().map(|memory| memory.capacity() / MIB).collect();
        assert_eq!(state.spare_bytes, mib.iter().sum::<usize>() * MIB);
        mib
    }

    #[test]
    fn memory_comes_back_with_the_last_of_its_bytes() {
        let buffers = PartBuffers::default();
        let part = lend(&buffers, 2);
        let (slice, address) = (part.slice(10..20), part.as_ptr());
        drop(part);
        assert!(buffers.take(1).is_none());
        drop(slice);
        assert_eq!(lend(&buffers, 2).as_ptr(), address);
        // What the heap gives, it keeps.
        drop(buffers.lend(vec![7; 100].into()));
        assert_eq!(spare(&buffers), [2]);
    }

    #[test]
    fn what_fits_is_taken_and_never_more_is_kept_than_was_out() {
        let buffers = PartBuffers::default();
        drop([2, 4, 3].map(|mib| lend(&buffers, mib)));
        assert_eq!(spare(&buffers), [2, 4, 3]);
        assert_eq!(buffers.take(3 * MIB - 1).map(|memory| memory.capacity()), Some(3 * MIB));
        assert_eq!(buffers.take(5 * MIB).map(|memory| memory.capacity()), Some(4 * MIB), "the longest");
        let buffers = PartBuffers::default();
        drop([2, 2, 2, 2].map(|mib| lend(&buffers, mib)));
        // Longer ones take the room of those that were there; the oldest of these go.
        let long = buffers.lend(Memory::new(5 * MIB));
        assert_eq!(spare(&buffers), [2]);
        drop(long);
        assert_eq!(spare(&buffers), [2, 5]);
    }

    #[test]
    fn what_nobody_takes_goes_and_what_checkpoints_use_stays() {
        let buffers = PartBuffers::default();
        let mut now = Instant::now();
        assert_eq!(buffers.trim(now), None);
        drop([2; 8].map(|mib| lend(&buffers, mib)));
        assert_eq!(buffers.trim(now), Some(now + KEPT_FOR));
        // Three of them are used again and again. The others stay for a whole time in which nobody takes them.
        for kept in [8, 8, 3, 3] {
            assert_eq!(spare(&buffers).len(), kept);
            drop([2; 3].map(|mib| lend(&buffers, mib)));
            assert_eq!(buffers.trim(now + KEPT_FOR / 2), Some(now + KEPT_FOR));
            now += KEPT_FOR;
            buffers.trim(now);
        }
        assert_eq!(buffers.trim(now + KEPT_FOR), None);
        assert_eq!(spare(&buffers), [0; 0]);
    }
}
