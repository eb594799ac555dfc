//! The names of the simulated directory, and what a failed or interrupted change of them leaves.
#![forbid(unsafe_code)]

use std::io;
use std::sync::{Arc, MutexGuard};

use rustix::io::Errno;

use super::medium::Medium;
use super::{Crashed, Fault, Shared, World, dead};
use crate::disk::{Files, check_file_name};

pub(super) struct SimFiles {
    pub(super) shared: Arc<Shared>,
    /// Dead once the world has another.
    pub(super) generation: u64,
}

/// How far an operation of [`Files`] gets.
enum Reach {
    Done,
    /// It fails with this error, and its effect is left to chance.
    Broken(io::Error),
}

impl SimFiles {
    fn read(&self) -> io::Result<MutexGuard<'_, World>> {
        let mut world = self.shared.lock();
        world.alive(self.generation)?;
        if world.strikes(Fault::ReadError) { Err(Errno::IO.into()) } else { Ok(world) }
    }

    fn change(&self, name: &str, apply: impl FnOnce(&mut World, Reach) -> io::Result<()>) -> io::Result<()> {
        check_file_name(name)?;
        let mut world = self.shared.lock();
        world.alive(self.generation)?;
        world.stats.files_operations += 1;
        if let Err(Crashed) = world.count() {
            let result = apply(&mut world, Reach::Broken(dead()));
            world.crash_as_planned();
            self.shared.changed.notify_all();
            return result;
        }
        let reach =
            if world.strikes(Fault::FilesError) { Reach::Broken(Errno::IO.into()) } else { Reach::Done };
        apply(&mut world, reach)
    }

    fn append_as(&self, name: &str, bytes: &[u8], durable: bool) -> io::Result<()> {
        self.change(name, |world, reach| {
            let len = world.medium.named(name).ok_or(Errno::NOENT)?.bytes().len() as u64;
            let (kept, result) = match reach {
                Reach::Done => (bytes.len(), Ok(())),
                Reach::Broken(error) => (world.rng.below(bytes.len() as u64 + 1) as usize, Err(error)),
            };
            let mut stored = bytes[..kept].to_vec();
            if result.is_err() && world.rng.chance(250) {
                // The length of the file can reach the disk before what is in it does.
                stored.resize(bytes.len(), 0);
            }
            if !world.medium.append(name, len, &stored, durable) {
                return Err(Errno::NOSPC.into());
            }
            result
        })
    }
}

impl Files for SimFiles {
    fn list(&self) -> io::Result<Vec<(String, u64)>> {
        Ok(self.read()?.medium.list())
    }

    fn create(&self, name: &str, len: u64) -> io::Result<()> {
        self.change(name, |world, reach| {
            if world.medium.named(name).is_some() {
                return Err(Errno::EXIST.into());
            }
            if world.strikes(Fault::CreateNoSpace) || !world.medium.has_room(len) {
                return Err(Errno::NOSPC.into());
            }
            let (len, result) = match reach {
                Reach::Done => (Some(len), Ok(())),
                // A live process removes what it could not finish; a dead one leaves it in any state.
                Reach::Broken(error) if world.crash_now() => (world.any_len(len), Err(error)),
                Reach::Broken(error) => (None, Err(error)),
            };
            if let Some(len) = len {
                world.medium.put(name, vec![0; usize::try_from(len).map_err(|_| Errno::NOSPC)?]);
            }
            result
        })
    }

    fn read_at(&self, name: &str, offset: u64, buffer: &mut [u8]) -> io::Result<usize> {
        check_file_name(name)?;
        let world = self.read()?;
        let file = world.medium.named(name).ok_or(Errno::NOENT)?;
        let from = usize::try_from(offset).unwrap_or(usize::MAX).min(file.bytes().len());
        let read = (file.bytes().len() - from).min(buffer.len());
        buffer[..read].copy_from_slice(&file.bytes()[from..from + read]);
        Ok(read)
    }

    fn append(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        self.append_as(name, bytes, true)
    }

    fn append_unsynced(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        self.append_as(name, bytes, false)
    }

    fn replace(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        self.change(name, |world, reach| {
            if !world.medium.has_room(bytes.len() as u64) {
                return Err(Errno::NOSPC.into());
            }
            world.either(reach, |medium| medium.put(name, bytes.to_vec()))
        })
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        self.change(name, |world, reach| {
            if world.medium.named(name).is_none() {
                return Err(Errno::NOENT.into());
            }
            world.either(reach, |medium| medium.remove(name))
        })
    }

    fn free_bytes(&self) -> io::Result<u64> {
        let world = self.shared.lock();
        world.alive(self.generation)?;
        Ok(world.medium.free_bytes())
    }
}

impl World {
    /// The current operation is the one that the scheduled crash ends.
    fn crash_now(&self) -> bool {
        self.crash_at.is_some_and(|(at, _)| at + 1 == self.operations)
    }

    /// A file of `len` bytes as its maker's death may leave it.
    fn any_len(&mut self, len: u64) -> Option<u64> {
        match self.rng.below(4) {
            0 => None,
            1 => Some(0),
            2 => Some(self.rng.below(len + 1)),
            _ => Some(len),
        }
    }

    fn either(&mut self, reach: Reach, effect: impl FnOnce(&mut Medium)) -> io::Result<()> {
        let (happens, result) = match reach {
            Reach::Done => (true, Ok(())),
            Reach::Broken(error) => (self.rng.chance(500), Err(error)),
        };
        if happens {
            effect(&mut self.medium);
        }
        result
    }
}
