//! The data path of the simulated device: writes in flight, how they complete, and which faults strike them.
#![forbid(unsafe_code)]

use std::io;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use rustix::io::Errno;

use super::{Crashed, Fault, Shared, World, dead};
use crate::disk::{
    Completion, Disk, Durability, EngineInfo, FileSlot, WakeFn, Write, check_file_name, check_write, not_open,
};

/// The simulated [`Disk`]. Made by [`SimWorld::disk`](super::SimWorld::disk).
///
/// It holds its user to the contract: overlapping writes in flight, and closing a file with writes in flight, panic.
pub struct SimDisk {
    shared: Arc<Shared>,
    id: u64,
    depth: usize,
    /// The inode of each slot.
    files: Vec<Option<u64>>,
    /// It serves nobody any more.
    broken: bool,
}

impl SimDisk {
    pub(super) fn new(shared: Arc<Shared>, id: u64, depth: usize) -> Self {
        Self { shared, id, depth, files: Vec::new(), broken: false }
    }
}

impl Disk for SimDisk {
    fn open(&mut self, name: &str) -> io::Result<FileSlot> {
        check_file_name(name)?;
        let mut world = self.shared.lock();
        let generation = world.disks[&self.id].generation;
        world.alive(generation)?;
        let inode = world.medium.open(name).ok_or(Errno::NOENT)?;
        let slot = self.files.iter().position(Option::is_none).unwrap_or(self.files.len());
        if slot == self.files.len() {
            self.files.push(None);
        }
        self.files[slot] = Some(inode);
        Ok(FileSlot(slot as u32))
    }

    fn close(&mut self, file: FileSlot) {
        let Some(inode) = self.files.get_mut(file.0 as usize).and_then(Option::take) else { return };
        let mut world = self.shared.lock();
        let flying = world.disks[&self.id].in_flight.iter().any(|flight| flight.write.file == file);
        assert!(!flying, "closed {file:?} with writes to it in flight");
        world.medium.close(inode);
    }

    fn submit(&mut self, write: Write) -> Result<(), Write> {
        let mut world = self.shared.lock();
        let state = world.disks.get_mut(&self.id).expect("a disk exists until it is dropped");
        if state.in_flight.len() >= self.depth {
            return Err(write);
        }
        let inode = self.files.get(write.file.0 as usize).copied().flatten();
        let refused = check_write(&write).and(inode.ok_or_else(|| not_open(write.file)).map(drop)).err();
        if refused.is_none() {
            for other in state.in_flight.iter().filter(|other| other.refused.is_none()) {
                let apart = Some(other.inode) != inode
                    || write.offset + write.len as u64 <= other.write.offset
                    || other.write.offset + other.write.len as u64 <= write.offset;
                assert!(apart, "writes in flight overlap: {write:?} and {:?}", other.write);
            }
        }
        state.in_flight.push(InFlight { write, inode: inode.unwrap_or(0), done_bytes: 0, refused });
        Ok(())
    }

    fn wait(&mut self, timeout: Duration, completions: &mut Vec<Completion>) -> io::Result<()> {
        let before = completions.len();
        let deadline = Instant::now().checked_add(timeout);
        let mut world = self.shared.lock();
        loop {
            if world.alive(world.disks[&self.id].generation).is_ok() {
                if !world.disks[&self.id].in_flight.is_empty() && world.strikes(Fault::EngineBreaks) {
                    self.broken = true;
                }
                if self.broken {
                    return Err(Errno::IO.into());
                }
                world.complete_some(self.id, timeout.is_zero(), completions);
            }
            if world.alive(world.disks[&self.id].generation).is_err() {
                world.fail_all(self.id, completions);
                self.shared.changed.notify_all();
            }
            let state = world.disks.get_mut(&self.id).expect("a disk exists until it is dropped");
            let woken = std::mem::take(&mut state.woken);
            if woken || completions.len() > before {
                return Ok(());
            }
            if !world.real_time {
                world.now = world.now.saturating_add(timeout);
                return Ok(());
            }
            let left = deadline.map_or(Duration::MAX, |at| at.saturating_duration_since(Instant::now()));
            if left.is_zero() {
                return Ok(());
            }
            let changed = &self.shared.changed;
            world = changed.wait_timeout(world, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn waker(&self) -> WakeFn {
        let (shared, id) = (Arc::downgrade(&self.shared), self.id);
        Arc::new(move || {
            let Some(shared) = shared.upgrade() else { return };
            if let Some(state) = shared.lock().disks.get_mut(&id) {
                state.woken = true;
            }
            shared.changed.notify_all();
        })
    }

    fn depth(&self) -> usize {
        self.depth
    }

    fn in_flight(&self) -> usize {
        self.shared.lock().disks[&self.id].in_flight.len()
    }

    fn info(&self) -> EngineInfo {
        EngineInfo { engine: "simulated", direct: true, registered: false, fallbacks: Vec::new() }
    }
}

impl Drop for SimDisk {
    fn drop(&mut self) {
        let mut world = self.shared.lock();
        while !world.disks[&self.id].in_flight.is_empty() {
            let generation = world.disks[&self.id].generation;
            let advanced = match world.alive(generation) {
                Ok(()) => world.advance(self.id, 0),
                Err(_) => break,
            };
            if let Err(Crashed) = advanced {
                world.crash_as_planned();
                self.shared.changed.notify_all();
            }
        }
        world.disks.remove(&self.id);
        for inode in self.files.drain(..).flatten() {
            world.medium.close(inode);
        }
    }
}

pub(super) struct DiskState {
    pub(super) generation: u64,
    durability: Durability,
    pub(super) in_flight: Vec<InFlight>,
    woken: bool,
}

impl DiskState {
    pub(super) fn new(generation: u64, durability: Durability) -> Self {
        Self { generation, durability, in_flight: Vec::new(), woken: false }
    }
}

pub(super) struct InFlight {
    write: Write,
    pub(super) inode: u64,
    done_bytes: usize,
    /// Why it will complete without having been tried.
    pub(super) refused: Option<io::Error>,
}

impl InFlight {
    fn offset(&self) -> u64 {
        self.write.offset + self.done_bytes as u64
    }

    pub(super) fn rest(&self) -> (u64, &[u8]) {
        (self.offset(), &self.write.buffer[self.done_bytes..self.write.len])
    }
}

impl World {
    /// Moves one write on. `None` if it is not finished.
    fn advance(&mut self, id: u64, index: usize) -> Result<Option<Completion>, Crashed> {
        self.count()?;
        let durable = self.disks[&id].durability == Durability::Power;
        let mut flight =
            self.disks.get_mut(&id).expect("a disk exists until it is dropped").in_flight.swap_remove(index);
        if let Some(error) = flight.refused.take() {
            return Ok(Some(self.finish(flight, Err(error))));
        }
        if self.strikes(Fault::StuckWrite) {
            let part = self.part_of(&flight);
            self.store(&flight, flight.offset(), part, durable);
            return Ok(Some(self.finish(flight, Err(io::ErrorKind::WriteZero.into()))));
        }
        if flight.rest().1.len() > 4096 && self.strikes(Fault::ShortWrite) {
            let part = self.part_of(&flight);
            if self.store(&flight, flight.offset(), part, durable) {
                flight.done_bytes += part;
                self.disks.get_mut(&id).expect("as above").in_flight.push(flight);
                return Ok(None);
            }
            return Ok(Some(self.finish(flight, Err(Errno::NOSPC.into()))));
        }
        let (offset, len) = (flight.offset(), flight.rest().1.len());
        let result = if self.strikes(Fault::WriteError) {
            self.medium.store_in_part(flight.inode, flight.rest(), false, &mut self.rng, 500);
            Err(Errno::IO.into())
        } else if self.strikes(Fault::LostWrite) {
            Ok(())
        } else if self.strikes(Fault::MisdirectedWrite) {
            let (inode, offset) = self.medium.another_place(flight.inode, offset, len, &mut self.rng);
            self.medium.store(inode, offset, flight.rest().1, durable);
            Ok(())
        } else if self.strikes(Fault::BitFlip) {
            let mut bytes = flight.rest().1.to_vec();
            let at = self.rng.below(bytes.len() as u64) as usize;
            bytes[at] ^= 1 << self.rng.below(8);
            self.medium.store(flight.inode, offset, &bytes, durable);
            Ok(())
        } else if self.store(&flight, offset, len, durable) {
            Ok(())
        } else {
            Err(Errno::NOSPC.into())
        };
        Ok(Some(self.finish(flight, result)))
    }

    /// Some 4096-byte steps of what is left, but not all.
    fn part_of(&mut self, flight: &InFlight) -> usize {
        let steps = (flight.rest().1.len() / 4096).saturating_sub(1) as u64;
        let least = steps.min(1);
        (least + self.rng.below(steps + 1 - least)) as usize * 4096
    }

    fn store(&mut self, flight: &InFlight, offset: u64, len: usize, durable: bool) -> bool {
        self.medium.store(flight.inode, offset, &flight.rest().1[..len], durable)
    }

    fn finish(&mut self, flight: InFlight, result: io::Result<()>) -> Completion {
        self.stats.writes += 1;
        if result.is_ok() {
            self.stats.write_bytes += flight.write.len as u64;
        }
        Completion { token: flight.write.token, buffer: flight.write.buffer, result }
    }

    /// What completes in one wait: with a zero timeout perhaps nothing, else at least one write, in any order.
    fn complete_some(&mut self, id: u64, may_be_none: bool, completions: &mut Vec<Completion>) {
        let flying = self.disks[&id].in_flight.len() as u64;
        if flying == 0 || self.held || (may_be_none && self.rng.chance(250)) {
            return;
        }
        let enough = completions.len() + 1 + self.rng.below(flying) as usize;
        while completions.len() < enough && !self.disks[&id].in_flight.is_empty() {
            let flying = self.disks[&id].in_flight.len() as u64;
            let index = self.rng.below(flying) as usize;
            match self.advance(id, index) {
                Ok(completion) => completions.extend(completion),
                Err(Crashed) => {
                    self.crash_as_planned();
                    return;
                }
            }
        }
    }

    fn fail_all(&mut self, id: u64, completions: &mut Vec<Completion>) {
        let state = self.disks.get_mut(&id).expect("a disk exists until it is dropped");
        for flight in std::mem::take(&mut state.in_flight) {
            let completion = self.finish(flight, Err(dead()));
            completions.push(completion);
        }
    }
}
