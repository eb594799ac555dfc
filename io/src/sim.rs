//! A simulated local device: seeded, in memory, with the faults that real ones have.
//!
//! Owns the fault plan, the crash, and how [`Disk`] and [`Files`] behave above the bytes, which `medium.rs` keeps. What
//! the caller may lose in a crash is not decided here: the simulation only loses what a real machine could.
//!
//! Everything follows from the seed as long as one thread uses the world.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::io::Errno;

use crate::disk::{
    Completion, Disk, Durability, EngineInfo, FileSlot, Files, WakeFn, Write, check_file_name, check_write,
    not_open,
};

mod medium;

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
}

/// Every [`Fault`], in the order of their declaration.
pub const FAULTS: [Fault; 9] = [
    Fault::WriteError,
    Fault::ShortWrite,
    Fault::StuckWrite,
    Fault::LostWrite,
    Fault::MisdirectedWrite,
    Fault::BitFlip,
    Fault::CreateNoSpace,
    Fault::FilesError,
    Fault::ReadError,
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
/// Time is virtual unless [`set_real_time`](Self::set_real_time) says otherwise: a [`Disk::wait`] that has nothing to
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

struct DiskState {
    generation: u64,
    durability: Durability,
    in_flight: Vec<InFlight>,
    woken: bool,
}

struct InFlight {
    write: Write,
    inode: u64,
    done_bytes: usize,
    /// Why it will complete without having been tried.
    refused: Option<io::Error>,
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
        world.disks.insert(id, DiskState { generation, durability, in_flight: Vec::new(), woken: false });
        SimDisk { shared: self.shared.clone(), id, depth, files: Vec::new() }
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

    /// With `true`, [`Disk::wait`] blocks for its timeout as a real disk does, for tests with threads.
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

impl InFlight {
    fn offset(&self) -> u64 {
        self.write.offset + self.done_bytes as u64
    }

    fn rest(&self) -> (u64, &[u8]) {
        (self.offset(), &self.write.buffer[self.done_bytes..self.write.len])
    }
}

fn dead() -> io::Error {
    io::Error::other("simulated crash: what was open before it is gone; restart the world and open again")
}

/// The simulated [`Disk`]. Made by [`SimWorld::disk`].
///
/// It holds its user to the contract: overlapping writes in flight, and closing a file with writes in flight, panic.
pub struct SimDisk {
    shared: Arc<Shared>,
    id: u64,
    depth: usize,
    /// The inode of each slot.
    files: Vec<Option<u64>>,
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

struct SimFiles {
    shared: Arc<Shared>,
    generation: u64,
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
            if !world.medium.append(name, len, &stored) {
                return Err(Errno::NOSPC.into());
            }
            result
        })
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

#[cfg(all(test, not(loom)))]
mod tests;
