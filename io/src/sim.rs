//! A simulated local device: seeded, in memory, with the faults that real ones have.
//!
//! Owns the fault plan, the crash, and how the traits of `disk.rs` behave above the bytes, which `medium.rs` keeps. What
//! the caller may lose in a crash is not decided here: the simulation only loses what a real machine could.
//!
//! Everything follows from the seed as long as one thread uses the world.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::disk::{Durability, Files};

mod disk;
mod files;
mod medium;

use disk::DiskState;
pub use disk::SimDisk;
use files::SimFiles;
use medium::Medium;

/// A small deterministic source of numbers (splitmix64).
#[derive(Clone, Debug)]
pub struct SimRng(u64);

impl SimRng {
    /// Equal seeds give equal numbers.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next number.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below `bound`; 0 if `bound` is 0. The bias is far below what a simulation could notice.
    pub fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.next_u64()) * u128::from(bound)) >> 64) as u64
    }

    /// True in `per_mille` of 1000 cases.
    pub fn chance(&mut self, per_mille: u16) -> bool {
        self.below(1000) < u64::from(per_mille)
    }
}

/// What can go wrong with one operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Fault {
    /// A write fails with EIO; any of its sectors may have been stored.
    WriteError,
    /// A write takes a part of its bytes at first; the disk continues it.
    ShortWrite,
    /// A write that cannot go on after a part of its bytes: it fails with `WriteZero`.
    StuckWrite,
    /// A write is reported as done and stored nowhere.
    LostWrite,
    /// A write is reported as done and stored at another place.
    MisdirectedWrite,
    /// A write is stored with one bit changed.
    BitFlip,
    /// [`Files::create`] fails with ENOSPC.
    CreateNoSpace,
    /// A [`Files`] operation that changes something fails with EIO; what it left is unknown.
    FilesError,
    /// [`Files::list`] or [`Files::read_at`] fails with EIO.
    ReadError,
    /// A disk with writes in flight breaks: it never completes anything any more, and keeps their buffers.
    EngineBreaks,
}

/// Every [`Fault`], in the order of their declaration.
pub const FAULTS: [Fault; 10] = [
    Fault::WriteError,
    Fault::ShortWrite,
    Fault::StuckWrite,
    Fault::LostWrite,
    Fault::MisdirectedWrite,
    Fault::BitFlip,
    Fault::CreateNoSpace,
    Fault::FilesError,
    Fault::ReadError,
    Fault::EngineBreaks,
];

/// How the world ends before it is restarted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Crash {
    /// The process dies (`kill -9`): what had completed stays, of what was in flight any sector may have been stored.
    Process,
    /// The power fails: as [`Crash::Process`], and what had completed without a durable promise may be lost by sector.
    Power,
}

/// What happened so far.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SimStats {
    /// Writes that completed, well or not.
    pub writes: u64,
    /// Bytes of the writes that completed well.
    pub write_bytes: u64,
    /// Operations of [`Files`] that change something.
    pub files_operations: u64,
    /// Crashes.
    pub crashes: u64,
    /// Faults that struck, by kind.
    pub faults: BTreeMap<Fault, u64>,
}

/// A simulated machine with one directory. A clone is another handle to the same machine.
///
/// A crash (scheduled by [`crash_at`](Self::crash_at), or [`kill`](Self::kill) and [`power_cut`](Self::power_cut)) ends
/// every [`SimDisk`] and every `Files` made before it for good: their writes in flight complete with an error, and each
/// later operation fails. New ones see what survived.
///
/// Time is virtual unless [`set_real_time`](Self::set_real_time) says otherwise: a [`Disk::wait`](crate::disk::Disk::wait) that has nothing to
/// wait for returns at once, and [`now`](Self::now) has moved on by its timeout.
///
/// ```
/// use tidelog_io::aligned::AlignedBuf;
/// use tidelog_io::disk::{Disk, Durability, Files, Write};
/// use tidelog_io::sim::SimWorld;
///
/// let world = SimWorld::new(7);
/// world.files().create("a", 8192)?;
/// let mut disk = world.disk(4, Durability::Power);
/// let file = disk.open("a")?;
/// let mut buffer = AlignedBuf::alone(4096)?;
/// buffer.fill(1);
/// disk.submit(Write { token: 9, file, offset: 4096, buffer, len: 4096 }).unwrap();
/// let mut done = Vec::new();
/// while disk.in_flight() > 0 {
///     disk.wait(std::time::Duration::from_millis(1), &mut done)?;
/// }
/// world.power_cut(1);
/// assert_eq!(world.contents("a").unwrap()[4096..], [1; 4096]);
/// # std::io::Result::Ok(())
/// ```
#[derive(Clone)]
pub struct SimWorld {
    shared: Arc<Shared>,
}

struct Shared {
    world: Mutex<World>,
    /// Signalled on a wake-up, a crash and the end of a hold.
    changed: Condvar,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, World> {
        // A panic under the lock can only come from a broken assertion of a test, which is then what should be seen.
        self.world.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct World {
    rng: SimRng,
    medium: Medium,
    disks: BTreeMap<u64, DiskState>,
    next_disk: u64,
    per_mille: BTreeMap<Fault, u16>,
    planned: Vec<(Fault, u64)>,
    crash_at: Option<(u64, Crash)>,
    down: bool,
    /// Grows with every restart; what was made under an older one is dead.
    generation: u64,
    operations: u64,
    held: bool,
    real_time: bool,
    now: Duration,
    stats: SimStats,
}

/// The operation met the scheduled crash.
struct Crashed;

impl SimWorld {
    /// A machine with an empty directory, no faults and no limit on space.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        let world = World {
            rng: SimRng::new(seed),
            medium: Medium::default(),
            disks: BTreeMap::new(),
            next_disk: 0,
            per_mille: BTreeMap::new(),
            planned: Vec::new(),
            crash_at: None,
            down: false,
            generation: 0,
            operations: 0,
            held: false,
            real_time: false,
            now: Duration::ZERO,
            stats: SimStats::default(),
        };
        Self { shared: Arc::new(Shared { world: Mutex::new(world), changed: Condvar::new() }) }
    }

    /// A data path to the directory, for `depth` writes in flight.
    #[must_use]
    pub fn disk(&self, depth: usize, durability: Durability) -> SimDisk {
        let mut world = self.shared.lock();
        let id = world.next_disk;
        world.next_disk += 1;
        let generation = world.generation;
        world.disks.insert(id, DiskState::new(generation, durability));
        SimDisk::new(self.shared.clone(), id, depth)
    }

    /// The names of the directory.
    #[must_use]
    pub fn files(&self) -> Arc<dyn Files> {
        let generation = self.shared.lock().generation;
        Arc::new(SimFiles { shared: self.shared.clone(), generation })
    }

    /// From now on `fault` strikes `per_mille` of 1000 operations that it can strike.
    pub fn set_fault(&self, fault: Fault, per_mille: u16) {
        self.shared.lock().per_mille.insert(fault, per_mille);
    }

    /// No fault strikes by chance or plan any more.
    pub fn clear_faults(&self) {
        let mut world = self.shared.lock();
        world.per_mille.clear();
        world.planned.clear();
    }

    /// `fault` strikes once: the first operation that it can strike after `skip` of them went by.
    pub fn inject(&self, fault: Fault, skip: u64) {
        self.shared.lock().planned.push((fault, skip));
    }

    /// The machine crashes in the operation that comes after `skip` others which change something (a write, or `create`,
    /// `append`, `replace` or `remove`); counted from now. That operation is done in part, wholly or not at all. The
    /// machine is then down until [`restart`](Self::restart).
    pub fn crash_at(&self, skip: u64, crash: Crash) {
        let mut world = self.shared.lock();
        world.crash_at = Some((world.operations + skip, crash));
    }

    /// Whether a scheduled crash has happened and no [`restart`](Self::restart) yet.
    #[must_use]
    pub fn is_down(&self) -> bool {
        self.shared.lock().down
    }

    /// Brings the machine up again, and cancels a scheduled crash. What was made before it stays dead; if the machine
    /// was not down this is a [`kill`](Self::kill).
    pub fn restart(&self) {
        let mut world = self.shared.lock();
        if !world.down {
            let mut rng = SimRng::new(world.rng.next_u64());
            world.crash(Crash::Process, &mut rng);
        }
        world.down = false;
        world.crash_at = None;
        world.generation += 1;
        self.shared.changed.notify_all();
    }

    /// Cuts the power and brings the machine up again. Of every write that was in flight or completed without a durable
    /// promise, each sector survives or not by itself, as `seed` says.
    pub fn power_cut(&self, seed: u64) {
        self.crash_and_restart(Crash::Power, seed);
    }

    /// Kills the process: of every write that was in flight, each sector was stored or not by itself, as `seed` says.
    pub fn kill(&self, seed: u64) {
        self.crash_and_restart(Crash::Process, seed);
    }

    fn crash_and_restart(&self, crash: Crash, seed: u64) {
        self.shared.lock().crash(crash, &mut SimRng::new(seed));
        self.restart();
    }

    /// How many operations that change something there were, as [`crash_at`](Self::crash_at) counts them.
    #[must_use]
    pub fn operations(&self) -> u64 {
        self.shared.lock().operations
    }

    /// What happened so far.
    #[must_use]
    pub fn stats(&self) -> SimStats {
        self.shared.lock().stats.clone()
    }

    /// Virtual time since the beginning.
    #[must_use]
    pub fn now(&self) -> Duration {
        self.shared.lock().now
    }

    /// Files may together have at most `bytes` bytes; more is ENOSPC. `None` is no limit.
    pub fn set_capacity_bytes(&self, bytes: Option<u64>) {
        self.shared.lock().medium.capacity_bytes = bytes;
    }

    /// What is written or not as one: 4096 bytes at first.
    ///
    /// # Panics
    /// If it is not 512, 1024, 2048 or 4096, or if undurable writes were made before.
    pub fn set_sector_bytes(&self, bytes: usize) {
        self.shared.lock().medium.set_sector_bytes(bytes);
    }

    /// While held, no write completes.
    pub fn hold(&self, held: bool) {
        self.shared.lock().held = held;
        self.shared.changed.notify_all();
    }

    /// With `true`, [`Disk::wait`](crate::disk::Disk::wait) blocks for its timeout as a real disk does, for tests with threads.
    pub fn set_real_time(&self, real_time: bool) {
        self.shared.lock().real_time = real_time;
    }

    /// What a reader of the file sees now; `None` if there is none.
    #[must_use]
    pub fn contents(&self, name: &str) -> Option<Vec<u8>> {
        self.shared.lock().medium.named(name).map(|file| file.bytes().to_vec())
    }

    /// Replaces the content of a file or makes one, durably, outside any count and fault.
    pub fn set_contents(&self, name: &str, bytes: Vec<u8>) {
        self.shared.lock().medium.put(name, bytes);
    }

    /// Changes one bit of a file: rot.
    ///
    /// # Panics
    /// If there is no such file or bit.
    pub fn flip_bit(&self, name: &str, offset: u64, bit: u8) {
        let mut world = self.shared.lock();
        let file = world.medium.named_mut(name).unwrap_or_else(|| panic!("there is no file {name}"));
        file.flip_bit(offset, bit);
    }
}

impl World {
    fn alive(&self, generation: u64) -> io::Result<()> {
        if self.down || self.generation != generation { Err(dead()) } else { Ok(()) }
    }

    /// Whether `fault` strikes now; to be asked once for each operation that it could strike.
    fn strikes(&mut self, fault: Fault) -> bool {
        let mut struck = false;
        self.planned.retain_mut(|(planned, skip)| {
            if *planned != fault || (*skip == 0 && struck) {
                return true;
            }
            if *skip > 0 {
                *skip -= 1;
                return true;
            }
            struck = true;
            false
        });
        let per_mille = self.per_mille.get(&fault).copied().unwrap_or(0);
        struck |= per_mille > 0 && self.rng.chance(per_mille);
        if struck {
            *self.stats.faults.entry(fault).or_default() += 1;
        }
        struck
    }

    /// Counts an operation that changes something.
    fn count(&mut self) -> Result<(), Crashed> {
        let operation = self.operations;
        self.operations += 1;
        match self.crash_at {
            Some((at, _)) if at == operation => Err(Crashed),
            _ => Ok(()),
        }
    }

    /// The scheduled crash, which [`count`](Self::count) has announced.
    fn crash_as_planned(&mut self) {
        let crash = self.crash_at.take().map_or(Crash::Process, |(_, crash)| crash);
        let mut rng = SimRng::new(self.rng.next_u64());
        self.crash(crash, &mut rng);
    }

    fn crash(&mut self, crash: Crash, rng: &mut SimRng) {
        let Self { disks, medium, generation, down, .. } = self;
        if *down {
            return;
        }
        *down = true;
        self.stats.crashes += 1;
        // All or nothing is as likely as a mixture: each finds other mistakes.
        let keep_per_mille = [0, 100, 500, 900, 1000][rng.below(5) as usize];
        if crash == Crash::Power {
            medium.lose_undurable(rng, keep_per_mille);
        }
        for state in disks.values().filter(|state| state.generation == *generation) {
            for flight in state.in_flight.iter().filter(|flight| flight.refused.is_none()) {
                let durable = crash == Crash::Power;
                medium.store_in_part(flight.inode, flight.rest(), durable, rng, keep_per_mille);
            }
        }
    }
}

fn dead() -> io::Error {
    io::Error::other("simulated crash: what was open before it is gone; restart the world and open again")
}

#[cfg(all(test, not(loom)))]
mod tests;
