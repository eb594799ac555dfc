//! io_uring: the engine for direct writes.
//!
//! Owns the ring, what is in flight in it, and how its completions and wake-ups are awaited in one place. The memory is
//! the arena's, in `aligned.rs`; what is written where is the caller's.
//!
//! Dropping a ring does not stop its writes, and the kernel reads their buffers until it has completed them. So each
//! buffer and file lives in a slab until its completion was seen, and a disk that cannot see it any more leaks them.

use std::io;
use std::mem;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

use io_uring::types::{Fd, Fixed, SubmitArgs, Timespec};
use io_uring::{IoUring, cqueue, opcode, squeue};
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;
use slab::Slab;

use crate::aligned::{Arena, BLOCK_ALIGNMENT_BYTES};
use crate::disk::{
    Completion, Disk, Durability, EngineInfo, FileSlot, WakeFn, Write, check_file_name, check_write, forked,
    not_open,
};
use crate::engine::{open_directory, open_file, probe_file};

/// How many writes may be in flight at most.
pub const DEPTH_MAX: usize = 4096;

/// So many writes are handed to the kernel with one system call.
const KICK_WRITES: usize = 4;

/// The user data of the poll for wake-ups; writes have their key in the slab.
const WAKE: u64 = u64::MAX;

/// The kernel takes no registered buffer above 1 GiB.
const REGISTERED_BYTES_MAX: usize = 1 << 30;

/// Files in higher slots are used unregistered.
const REGISTERED_FILES: u32 = 64;

/// One system call writes no more than 2 GiB; less is continued as a short write is.
const CALL_BYTES_MAX: usize = 1 << 30;

const RETRIES_MAX: u32 = 100;
const BUSY_PAUSE: Duration = Duration::from_millis(1);

/// A [`Disk`] over io_uring, for direct writes only: buffered ones would run on threads of the kernel, and
/// [`PsyncDisk`](crate::psync::PsyncDisk) says more surely what a failed write-back means.
///
/// Opened on any thread, it belongs to the first that submits or waits. It can go to another thread while nothing is in
/// flight; the ring is then made anew. If it is dropped on another thread with writes in flight it cannot see them
/// complete: their buffers and files are leaked, with an error in the log.
///
/// Each submission enters the kernel at once: the device works while the caller fills the next block, for one system call
/// in 256 KiB.
///
/// Invariants:
/// 1. A write is in `ops` from its acceptance until its completion was seen; the kernel uses only memory and files that
///    are in `ops`, or in the registered `arena`.
/// 2. A write has at most one entry in the submission queue, and the poll for wake-ups one: the queue is never full.
pub struct UringDisk {
    ring: Ring,
    ops: Slab<Op>,
    /// Completions that were read from the ring and not handled yet.
    seen: Vec<Seen>,
    /// Writes that completed without having been tried.
    refused: Vec<Completion>,
    files: Slab<OpenFile>,
    directory: OwnedFd,
    durability: Durability,
    depth: usize,
    arena: Option<Arena>,
    wake: Arc<Wake>,
    process: u32,
}

struct Op {
    write: Write,
    file: Arc<OwnedFd>,
    done_bytes: usize,
    retries: u32,
}

struct OpenFile {
    file: Arc<OwnedFd>,
    registered: bool,
}

#[derive(Clone, Copy)]
struct Seen {
    user_data: u64,
    result: i32,
    flags: u32,
}

struct Wake {
    eventfd: OwnedFd,
    /// A wake-up that no `wait` has returned for yet. The eventfd only ends the sleep; this says whether it counts.
    pending: AtomicBool,
}

struct Ring {
    uring: IoUring,
    /// The thread that enabled the ring: no other may enter it.
    owner: Option<ThreadId>,
    /// A poll for wake-ups is queued or armed.
    polling: bool,
    multishot: bool,
    /// How many registered buffers, of [`REGISTERED_BYTES_MAX`] rounded down to whole blocks each but the last.
    buffers: usize,
    files: bool,
    fallbacks: Vec<String>,
}

impl UringDisk {
    /// Opens the disk for a directory, with at most `depth` writes in flight, and registers the buffers of `arena` with
    /// the kernel if it allows that.
    ///
    /// # Errors
    /// `Unsupported` if the file system refuses O_DIRECT or the kernel is older than 5.11; `InvalidInput` if `depth` is 0
    /// or above [`DEPTH_MAX`]; else what the kernel says about the ring or the directory.
    pub fn open(dir: &Path, durability: Durability, depth: usize, arena: Option<&Arena>) -> io::Result<Self> {
        if depth == 0 || depth > DEPTH_MAX {
            let text = format!("a depth of {depth} writes; use 1 to {DEPTH_MAX}");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        let directory = open_directory(dir)?;
        match probe_file(directory.as_fd(), true) {
            Ok(_) | Err(Errno::NOSPC | Errno::DQUOT) => {}
            Err(Errno::INVAL | Errno::OPNOTSUPP) => {
                let text = "the file system refuses O_DIRECT, and only direct writes gain by io_uring";
                return Err(io::Error::new(io::ErrorKind::Unsupported, text));
            }
            Err(error) => return Err(error.into()),
        }
        let wake = Wake {
            eventfd: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            pending: AtomicBool::new(false),
        };
        Ok(Self {
            ring: Ring::new(depth, arena)?,
            ops: Slab::with_capacity(depth),
            seen: Vec::with_capacity(depth + 1),
            refused: Vec::new(),
            files: Slab::new(),
            directory,
            durability,
            depth,
            arena: arena.cloned(),
            wake: Arc::new(wake),
            process: std::process::id(),
        })
    }

    /// Takes an open file in, as [`Disk::open`] does by name.
    pub(crate) fn adopt(&mut self, file: OwnedFd) -> FileSlot {
        let entry = self.files.vacant_entry();
        let slot = entry.key() as u32;
        let registered = self.ring.set_file(slot, file.as_raw_fd());
        entry.insert(OpenFile { file: Arc::new(file), registered });
        FileSlot(slot)
    }

    fn is_forked(&self) -> bool {
        self.process != std::process::id()
    }

    /// Makes the ring usable on this thread.
    fn prepare(&mut self) -> io::Result<()> {
        if self.is_forked() {
            return Err(forked());
        }
        let this = thread::current().id();
        if self.ring.owner == Some(this) {
            return Ok(());
        }
        if self.ring.owner.is_some() {
            if !self.ops.is_empty() {
                let text =
                    "an io_uring disk was used on another thread with writes in flight; wait for them first";
                return Err(io::Error::other(text));
            }
            self.ring = Ring::new(self.depth, self.arena.as_ref())?;
            for (slot, open) in &mut self.files {
                open.registered = self.ring.set_file(slot as u32, open.file.as_raw_fd());
            }
        }
        self.ring.uring.submitter().register_enable_rings()?;
        self.ring.owner = Some(this);
        Ok(())
    }

    /// Queues what is left of a write.
    fn queue(&mut self, key: usize, registered_file: bool, wait_in_kernel: bool) {
        let op = &self.ops[key];
        let rest = &op.write.buffer[op.done_bytes..op.write.len];
        let (address, len) = (rest.as_ptr(), rest.len().min(CALL_BYTES_MAX) as u32);
        let offset = op.write.offset + op.done_bytes as u64;
        let flags = match self.durability {
            Durability::Power => libc::RWF_DSYNC,
            Durability::Process => 0,
        };
        let buffer = self.ring.buffer_of(self.arena.as_ref(), address);
        let (fd, fixed) = (Fd(op.file.as_raw_fd()), Fixed(op.write.file.0));
        let entry = match (buffer, registered_file) {
            (Some(buffer), true) => {
                opcode::WriteFixed::new(fixed, address, len, buffer).offset(offset).rw_flags(flags).build()
            }
            (Some(buffer), false) => {
                opcode::WriteFixed::new(fd, address, len, buffer).offset(offset).rw_flags(flags).build()
            }
            (None, true) => opcode::Write::new(fixed, address, len).offset(offset).rw_flags(flags).build(),
            (None, false) => opcode::Write::new(fd, address, len).offset(offset).rw_flags(flags).build(),
        };
        let flags = if wait_in_kernel { squeue::Flags::ASYNC } else { squeue::Flags::empty() };
        // SAFETY: `address..address + len` is inside the buffer of `ops[key]`, and its file is there too. Both stay, and
        // the buffer is neither moved in memory nor written, until the completion with this user data was seen or, when
        // it cannot be seen, for ever (`Drop`).
        unsafe { self.ring.push(&entry.user_data(key as u64).flags(flags)) };
    }

    /// Handles all completions that the ring shows, and queues again what has to go on.
    fn reap(&mut self, completions: &mut Vec<Completion>) -> io::Result<()> {
        self.ring.read(&mut self.seen);
        while let Some(seen) = self.seen.pop() {
            if seen.user_data == WAKE {
                self.reap_wake(seen)?;
                continue;
            }
            let key = seen.user_data as usize;
            let Some(op) = self.ops.get_mut(key) else {
                return Err(io::Error::other(format!(
                    "io_uring completed write {key}, which is not in flight"
                )));
            };
            let Some(result) = op.advance(seen.result) else {
                // By its descriptor: its slot among the registered files could be another file's by now.
                self.queue(key, false, seen.result < 0);
                continue;
            };
            let write = self.ops.remove(key).write;
            completions.push(Completion { token: write.token, buffer: write.buffer, result });
        }
        Ok(())
    }

    fn reap_wake(&mut self, seen: Seen) -> io::Result<()> {
        // Level and edge both work: whoever wakes sets `pending` before the eventfd, `wait` asks `pending` after this.
        let mut count = [0; 8];
        let _ = rustix::io::read(&self.wake.eventfd, &mut count);
        if !cqueue::more(seen.flags) {
            self.ring.polling = false;
        }
        if seen.result >= 0 {
            return Ok(());
        }
        if !mem::replace(&mut self.ring.multishot, false) {
            return Err(io::Error::from_raw_os_error(-seen.result));
        }
        Ok(())
    }

    fn poll_for_wakes(&mut self) {
        if !mem::replace(&mut self.ring.polling, true) {
            let fd = Fd(self.wake.eventfd.as_raw_fd());
            let poll = opcode::PollAdd::new(fd, libc::POLLIN as u32).multi(self.ring.multishot);
            // SAFETY: a poll touches no memory of ours. Should the eventfd be closed before it, the kernel has its own
            // reference.
            unsafe { self.ring.push(&poll.build().user_data(WAKE)) };
        }
    }

    fn take_wake(&self) -> bool {
        self.wake.pending.swap(false, Ordering::AcqRel)
    }

    /// Waits for all that is in flight.
    fn drain(&mut self) -> io::Result<()> {
        let mut completions = Vec::new();
        while !self.ops.is_empty() {
            self.prepare()?;
            self.ring.enter(Duration::from_secs(60))?;
            self.reap(&mut completions)?;
            completions.clear();
        }
        Ok(())
    }
}

impl Op {
    /// Takes the result of a call in; `None` if the write has to go on.
    fn advance(&mut self, result: i32) -> Option<io::Result<()>> {
        let left_bytes = self.write.len - self.done_bytes;
        if result >= 0 {
            let bytes = (result as usize).min(left_bytes);
            // Direct writes start at multiples of 4096: after a short write a part is written again.
            let aligned_bytes = bytes / BLOCK_ALIGNMENT_BYTES * BLOCK_ALIGNMENT_BYTES;
            self.done_bytes += aligned_bytes;
            self.retries = 0;
            return match aligned_bytes {
                0 => Some(Err(io::ErrorKind::WriteZero.into())),
                _ if self.done_bytes == self.write.len => Some(Ok(())),
                _ => None,
            };
        }
        let errno = result.saturating_neg();
        self.retries += 1;
        if (errno == libc::EINTR || errno == libc::EAGAIN) && self.retries <= RETRIES_MAX {
            return None;
        }
        Some(Err(io::Error::from_raw_os_error(errno)))
    }
}

impl Ring {
    /// Makes a ring that no thread owns yet.
    fn new(depth: usize, arena: Option<&Arena>) -> io::Result<Self> {
        let uring = build(depth as u32 + 1)?;
        if !uring.params().is_feature_ext_arg() || !uring.params().is_feature_nodrop() {
            let text = "io_uring of this kernel is too old: 5.11 or later is needed";
            return Err(io::Error::new(io::ErrorKind::Unsupported, text));
        }
        let files = uring.submitter().register_files_sparse(REGISTERED_FILES);
        let mut ring = Self {
            uring,
            owner: None,
            polling: false,
            multishot: true,
            buffers: 0,
            files: files.is_ok(),
            fallbacks: Vec::new(),
        };
        if let Err(error) = files {
            ring.fallbacks
                .push(format!("io_uring registers no files here ({error}); they are used unregistered"));
        }
        if let Some(arena) = arena {
            ring.register_buffers(arena);
        }
        Ok(ring)
    }

    fn register_buffers(&mut self, arena: &Arena) {
        let (base, len_bytes) = arena.region();
        let piece_bytes = piece_bytes(arena);
        let pieces: Vec<libc::iovec> = (0..len_bytes)
            .step_by(piece_bytes)
            .map(|start| libc::iovec {
                iov_base: base.wrapping_add(start).cast_mut().cast(),
                iov_len: piece_bytes.min(len_bytes - start),
            })
            .collect();
        // SAFETY: the pieces are the arena's mapping, which `UringDisk::arena` keeps until after the ring is gone. The
        // kernel pins the pages, and reads them for writes only.
        match unsafe { self.uring.submitter().register_buffers(&pieces) } {
            Ok(()) => self.buffers = pieces.len(),
            Err(error) => self.fallbacks.push(format!(
                "io_uring registers no {} MiB of buffers here ({error}); raise the limit on locked memory (ulimit -l) to \
                 save some CPU time",
                len_bytes.div_ceil(1 << 20),
            )),
        }
    }

    /// Which registered buffer an address of `arena` is in.
    fn buffer_of(&self, arena: Option<&Arena>, address: *const u8) -> Option<u16> {
        let arena = arena.filter(|_| self.buffers > 0)?;
        let (base, len_bytes) = arena.region();
        let offset = (address as usize).checked_sub(base as usize).filter(|&offset| offset < len_bytes)?;
        u16::try_from(offset / piece_bytes(arena)).ok()
    }

    fn set_file(&self, slot: u32, fd: RawFd) -> bool {
        let registers = self.files && slot < REGISTERED_FILES;
        registers && self.uring.submitter().register_files_update(slot, &[fd]).is_ok()
    }

    /// # Safety
    /// As for [`squeue::SubmissionQueue::push`]: what the entry names stays valid until its completion.
    unsafe fn push(&mut self, entry: &squeue::Entry) {
        // SAFETY: the caller's promise.
        let pushed = unsafe { self.uring.submission().push(entry) };
        assert!(pushed.is_ok(), "the queue has room for every write in flight and the poll");
    }

    /// How many entries the kernel has not been given yet.
    fn queued(&mut self) -> usize {
        self.uring.submission().len()
    }

    /// Gives the queue to the kernel. What it does not take now, the next entry into the kernel gives it.
    fn kick(&self) {
        if let Err(error) = self.uring.submit() {
            tracing::debug!(%error, "io_uring took no submission now");
        }
    }

    /// Gives the queue to the kernel and waits until something completes or the time is over.
    fn enter(&self, timeout: Duration) -> io::Result<()> {
        let timespec = Timespec::from(timeout.min(Duration::from_secs(3600)));
        let entered = self.uring.submitter().submit_with_args(1, &SubmitArgs::new().timespec(&timespec));
        match entered.map_err(|error| error.raw_os_error()) {
            Ok(_) | Err(Some(libc::ETIME | libc::EINTR)) => Ok(()),
            // Short of memory, or too many completions unread: both pass.
            Err(Some(libc::EAGAIN | libc::EBUSY)) => {
                thread::sleep(BUSY_PAUSE.min(timeout));
                Ok(())
            }
            Err(errno) => {
                Err(errno.map_or_else(|| io::Error::other("io_uring_enter"), io::Error::from_raw_os_error))
            }
        }
    }

    fn read(&mut self, seen: &mut Vec<Seen>) {
        seen.extend(self.uring.completion().map(|entry| Seen {
            user_data: entry.user_data(),
            result: entry.result(),
            flags: entry.flags(),
        }));
    }
}

/// The size of a registered buffer in bytes: whole blocks, so that no block lies in two.
fn piece_bytes(arena: &Arena) -> usize {
    (REGISTERED_BYTES_MAX / arena.block_bytes()).max(1) * arena.block_bytes()
}

/// The best ring that the kernel knows, not enabled yet. A forked child inherits its memory, unused: it could not tell
/// later that the address range had become another mapping, and would unmap that.
fn build(entries: u32) -> io::Result<IoUring> {
    let refused = |error: &io::Error| error.raw_os_error() == Some(libc::EINVAL);
    let mut builder = IoUring::builder();
    builder.setup_r_disabled().setup_single_issuer().setup_defer_taskrun().setup_taskrun_flag();
    let built = builder.build(entries).or_else(|error| {
        let mut builder = IoUring::builder();
        builder.setup_r_disabled().setup_coop_taskrun().setup_taskrun_flag();
        if refused(&error) { builder.build(entries) } else { Err(error) }
    });
    built.or_else(|error| {
        let mut builder = IoUring::builder();
        builder.setup_r_disabled();
        if refused(&error) { builder.build(entries) } else { Err(error) }
    })
}

impl Disk for UringDisk {
    fn open(&mut self, name: &str) -> io::Result<FileSlot> {
        check_file_name(name)?;
        let file = open_file(self.directory.as_fd(), name, true)?;
        Ok(self.adopt(file))
    }

    fn close(&mut self, file: FileSlot) {
        if self.files.try_remove(file.0 as usize).is_some_and(|open| open.registered) {
            self.ring.set_file(file.0, -1);
        }
    }

    fn submit(&mut self, write: Write) -> Result<(), Write> {
        // An error of the ring itself is told by the `wait` that follows a refusal.
        if self.in_flight() >= self.depth || self.prepare().is_err() {
            return Err(write);
        }
        let open = self.files.get(write.file.0 as usize).ok_or_else(|| not_open(write.file));
        match check_write(&write).and(open) {
            Ok(open) => {
                let (file, registered) = (open.file.clone(), open.registered);
                let key = self.ops.insert(Op { write, file, done_bytes: 0, retries: 0 });
                self.queue(key, registered, false);
                // Handed to the kernel a few at a time, which rings the device's doorbell once for them, but at once while
                // the device has little to do. `wait` hands over what is left.
                let queued = self.ring.queued();
                if queued >= KICK_WRITES || self.ops.len() - queued < KICK_WRITES {
                    self.ring.kick();
                }
            }
            Err(error) => {
                self.refused.push(Completion {
                    token: write.token,
                    buffer: write.buffer,
                    result: Err(error),
                });
            }
        }
        Ok(())
    }

    fn wait(&mut self, timeout: Duration, completions: &mut Vec<Completion>) -> io::Result<()> {
        self.prepare()?;
        let deadline = Instant::now().checked_add(timeout);
        let before = completions.len();
        completions.append(&mut self.refused);
        self.reap(completions)?;
        let mut woken = self.take_wake();
        while !woken && completions.len() == before {
            let left = deadline.map_or(Duration::MAX, |at| at.saturating_duration_since(Instant::now()));
            self.poll_for_wakes();
            self.ring.enter(left)?;
            self.reap(completions)?;
            woken = self.take_wake();
            if left.is_zero() {
                break;
            }
        }
        if !self.ring.uring.submission().is_empty() {
            self.ring.kick();
        }
        Ok(())
    }

    fn waker(&self) -> WakeFn {
        let wake = self.wake.clone();
        Arc::new(move || {
            if !wake.pending.swap(true, Ordering::AcqRel) {
                // It fails only when its counter is full, and then it is readable.
                let _ = rustix::io::write(&wake.eventfd, &1u64.to_ne_bytes());
            }
        })
    }

    fn depth(&self) -> usize {
        self.depth
    }

    fn in_flight(&self) -> usize {
        self.ops.len() + self.refused.len()
    }

    fn info(&self) -> EngineInfo {
        EngineInfo {
            engine: "io_uring",
            direct: true,
            registered: self.ring.buffers > 0 && self.ring.files,
            fallbacks: self.ring.fallbacks.clone(),
        }
    }
}

impl Drop for UringDisk {
    fn drop(&mut self) {
        // In a forked child the writes are the parent's.
        let drained = if self.is_forked() { Err(forked()) } else { self.drain() };
        if let Err(error) = drained {
            if !self.is_forked() && !self.ops.is_empty() {
                tracing::error!(%error, writes = self.ops.len(), "an io_uring disk was dropped before its writes ended; \
                    their buffers and files are leaked");
            }
            // The kernel may still read them.
            mem::forget(mem::take(&mut self.ops));
            mem::forget(self.arena.take());
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::fs;

    use super::*;
    use crate::aligned::AlignedBuf;

    fn op(blocks: usize) -> Op {
        let buffer = AlignedBuf::alone(blocks * 4096).unwrap();
        let write = Write { token: 0, file: FileSlot(0), offset: 0, len: buffer.len(), buffer };
        let file = Arc::new(eventfd(0, EventfdFlags::CLOEXEC).unwrap());
        Op { write, file, done_bytes: 0, retries: 0 }
    }

    #[test]
    fn short_write_goes_on_at_its_last_whole_block() {
        let mut op = op(4);
        assert!(op.advance(2 * 4096 + 512).is_none());
        assert_eq!(op.done_bytes, 2 * 4096);
        assert!(op.advance(4096).is_none());
        assert!(op.advance(4096).unwrap().is_ok());
    }

    #[test]
    fn no_whole_block_is_no_progress() {
        for result in [0, 1, 4095] {
            let error = op(2).advance(result).unwrap().unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::WriteZero);
        }
    }

    #[test]
    fn interrupted_and_busy_calls_are_repeated_but_not_for_ever() {
        let mut op = op(1);
        for round in 0..RETRIES_MAX {
            let errno = if round % 2 == 0 { libc::EINTR } else { libc::EAGAIN };
            assert!(op.advance(-errno).is_none());
        }
        assert_eq!(op.advance(-libc::EAGAIN).unwrap().unwrap_err().kind(), io::ErrorKind::WouldBlock);
        assert_eq!(op.advance(-libc::EIO).unwrap().unwrap_err().raw_os_error(), Some(libc::EIO));
    }

    /// The flags of the writes that are queued and not started, as the kernel reads them; empty if it does not tell.
    fn queued_flags(disk: &UringDisk) -> Vec<i32> {
        let ring = disk.ring.uring.as_raw_fd();
        let told = fs::read_to_string(format!("/proc/self/fdinfo/{ring}")).unwrap();
        let flags = told.lines().filter_map(|line| line.split_once("rw_flags:0x"));
        flags.map(|(_, rest)| i32::from_str_radix(rest.split(',').next().unwrap(), 16).unwrap()).collect()
    }

    /// No error and no missing byte would show it but after a power cut: the kernel is asked what it was told.
    #[test]
    fn each_write_asks_to_be_durable_exactly_where_that_is_promised() {
        const WRITES: usize = 2 * KICK_WRITES - 1;
        let arena = Arena::new(4096, WRITES).unwrap();
        for (durability, flags) in [(Durability::Power, libc::RWF_DSYNC), (Durability::Process, 0)] {
            for (arena, registered_file) in
                [(None, false), (None, true), (Some(&arena), false), (Some(&arena), true)]
            {
                let dir = tempfile::tempdir_in(".").unwrap();
                let Ok(mut disk) = UringDisk::open(dir.path(), durability, WRITES, arena) else {
                    eprintln!("SKIPPED: io_uring or O_DIRECT is refused here");
                    return;
                };
                fs::write(dir.path().join("a"), [0; 4096 * WRITES]).unwrap();
                let file = disk.open("a").unwrap();
                disk.files[file.0 as usize].registered &= registered_file;
                for index in 0..WRITES {
                    let buffer = match arena {
                        Some(arena) => arena.try_take().unwrap(),
                        None => AlignedBuf::alone(4096).unwrap(),
                    };
                    let offset = (index * 4096) as u64;
                    disk.submit(Write { token: 0, file, offset, buffer, len: 4096 }).unwrap();
                }
                // The first ones are started one by one; these are not, until something is waited for.
                assert_eq!(disk.ring.queued(), KICK_WRITES - 1);
                let queued = queued_flags(&disk);
                if queued.is_empty() {
                    eprintln!("SKIPPED: this kernel does not tell what is queued");
                    return;
                }
                assert_eq!(queued, [flags; KICK_WRITES - 1], "{durability:?}, {:?}", disk.info());
            }
        }
    }

    #[test]
    fn forked_child_is_refused() {
        let dir = tempfile::tempdir_in(".").unwrap();
        let Ok(mut disk) = UringDisk::open(dir.path(), Durability::Process, 2, None) else {
            eprintln!("SKIPPED: io_uring or O_DIRECT is refused here");
            return;
        };
        disk.process ^= 1;
        assert!(disk.submit(op(1).write).is_err());
        assert!(disk.wait(Duration::ZERO, &mut Vec::new()).is_err());
    }
}
