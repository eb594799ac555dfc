//! The seam to a local device: owned operations in, completions out; and the names under one directory.
//!
//! [`Disk`] is the data path of one spiller, [`Files`] everything else, which is rare and may block. What the bytes
//! mean, and when a write counts as durable for a log, is not decided here.
#![forbid(unsafe_code)]

use std::io;
use std::sync::Arc;
use std::time::Duration;

use crate::aligned::{AlignedBuf, BLOCK_ALIGNMENT_BYTES};

/// An open file of one [`Disk`]. Valid from [`Disk::open`] to [`Disk::close`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FileSlot(pub u32);

/// A write handed to a disk. The disk owns the buffer until it hands it back with the completion.
#[derive(Debug)]
pub struct Write {
    /// Comes back with the completion; its meaning is the caller's.
    pub token: u64,
    /// Where to.
    pub file: FileSlot,
    /// Offset in the file in bytes, a multiple of 4096.
    pub offset: u64,
    /// What to write: its first `len` bytes.
    pub buffer: AlignedBuf,
    /// How much of the buffer to write, in bytes, a multiple of 4096.
    pub len: usize,
}

/// The end of a [`Write`]: the buffer comes home.
#[derive(Debug)]
pub struct Completion {
    /// The token of the write.
    pub token: u64,
    /// The buffer of the write, its content untouched.
    pub buffer: AlignedBuf,
    /// `Ok` when all bytes are written and as durable as the disk was opened for. A short write was continued by the
    /// disk; one that cannot make progress is an error (`WriteZero`).
    pub result: io::Result<()>,
}

/// Wakes the thread that waits in [`Disk::wait`]. Callable from any thread, also after the disk is gone.
pub type WakeFn = Arc<dyn Fn() + Send + Sync>;

/// How much a successful write promises.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Durability {
    /// Every write is on stable storage when it completes (`RWF_DSYNC`): survives power loss.
    Power,
    /// Every write is with the kernel when it completes: survives the death of the process, not of the machine.
    Process,
}

/// Which engine serves a disk, for people and metrics.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineInfo {
    /// `io_uring`, `pwritev2` or `simulated`.
    pub engine: &'static str,
    /// Whether writes bypass the page cache.
    pub direct: bool,
    /// Whether buffers and files are registered with the kernel.
    pub registered: bool,
    /// What was tried first and refused, in words for a log line; empty if nothing was.
    pub fallbacks: Vec<String>,
}

/// The data path to one local directory, used by one thread.
///
/// Contract, checked by one suite for every engine:
/// - A write's buffer stays with the disk until its [`Completion`], whatever else happens; dropping the disk first
///   waits for all that is in flight.
/// - Completions arrive in any order, one for each accepted write.
/// - `result` is `Ok` only if every byte was written, and durably if the disk was opened so.
/// - `submit` never blocks; it refuses, giving the write back, when [`depth`](Disk::depth) writes are in flight.
/// - Writes in flight never overlap; the caller sees to that.
/// - A write that is not aligned, longer than its buffer, or to a file that is not open is accepted, touches nothing and
///   completes with `InvalidInput`.
pub trait Disk: Send {
    /// Opens an existing file of the directory for writing.
    ///
    /// # Errors
    /// `InvalidInput` if `name` is not a plain file name, else whatever the file system says.
    fn open(&mut self, name: &str) -> io::Result<FileSlot>;

    /// Closes a file. No write to it may be in flight.
    fn close(&mut self, file: FileSlot);

    /// Starts a write, or gives it back when `depth` are in flight. It may be held back, to be started with the next ones,
    /// until the next `wait`.
    ///
    /// # Errors
    /// The write itself, untouched.
    fn submit(&mut self, write: Write) -> Result<(), Write>;

    /// Collects what has completed. Returns at once if anything has, else waits until something completes, the waker is
    /// called or `timeout` is over. A wake-up that came before the call counts.
    ///
    /// # Errors
    /// Only if the engine itself broke; the writes in flight are then lost with it.
    fn wait(&mut self, timeout: Duration, completions: &mut Vec<Completion>) -> io::Result<()>;

    /// Ends a `wait` early, or the next one if none is under way.
    fn waker(&self) -> WakeFn;

    /// How many writes may be in flight.
    fn depth(&self) -> usize;

    /// How many writes are in flight.
    fn in_flight(&self) -> usize;

    /// What serves this disk.
    fn info(&self) -> EngineInfo;
}

/// The names under one local directory: blocking, rare, shared between threads. Names are plain file names.
pub trait Files: Send + Sync {
    /// All files, with their lengths in bytes, in the order of their names.
    ///
    /// # Errors
    /// Whatever the file system says; the same holds for the rest of the trait.
    fn list(&self) -> io::Result<Vec<(String, u64)>>;

    /// Makes a new file of `len` zero bytes, all of them written, and the file and its name durable. An existing file is
    /// an error; what a failure left behind is removed.
    fn create(&self, name: &str, len: u64) -> io::Result<()>;

    /// Reads at `offset` until `buffer` is full or the file ends; returns how many bytes it read.
    fn read_at(&self, name: &str, offset: u64, buffer: &mut [u8]) -> io::Result<usize>;

    /// Adds bytes to the end of a file and makes them durable.
    fn append(&self, name: &str, bytes: &[u8]) -> io::Result<()>;

    /// Adds bytes to the end of a file. They outlive the process, but not a power cut before the next operation that makes
    /// the file durable.
    fn append_unsynced(&self, name: &str, bytes: &[u8]) -> io::Result<()>;

    /// Makes all bytes that a file has durable, by whomever they were written.
    fn sync(&self, name: &str) -> io::Result<()> {
        self.append(name, &[])
    }

    /// Puts a file with this content in the place of `name`, atomically and durably.
    fn replace(&self, name: &str, bytes: &[u8]) -> io::Result<()>;

    /// Removes a file, durably. One that does not exist is an error.
    fn remove(&self, name: &str) -> io::Result<()>;

    /// How many bytes more this process may store, for the file system's word; without limit where it does not say.
    fn free_bytes(&self) -> io::Result<u64> {
        Ok(u64::MAX)
    }
}

/// Refuses what is not a plain file name: names never leave their directory.
pub(crate) fn check_file_name(name: &str) -> io::Result<()> {
    if name.is_empty() || name == "." || name == ".." || name.contains(['/', '\0']) {
        let text = format!("{name:?} is not a plain file name; give one without directories");
        return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
    }
    Ok(())
}

/// Refuses what no engine can write: see the contract of [`Disk`].
pub(crate) fn check_write(write: &Write) -> io::Result<()> {
    let unit_bytes = BLOCK_ALIGNMENT_BYTES as u64;
    let len_bytes = write.len as u64;
    let aligned = len_bytes.is_multiple_of(unit_bytes) && write.offset.is_multiple_of(unit_bytes);
    let ends = write.offset.checked_add(len_bytes).is_some_and(|end| i64::try_from(end).is_ok());
    if !aligned || !ends || write.len == 0 || write.len > write.buffer.len() {
        let text = format!(
            "a write of {len_bytes} bytes at {} from a buffer of {}: use positive multiples of 4096 that fit",
            write.offset,
            write.buffer.len(),
        );
        return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
    }
    Ok(())
}

/// What a write to a closed or unknown slot completes with.
pub(crate) fn not_open(file: FileSlot) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, format!("{file:?} is not open; open it before writing"))
}

/// What a forked child is told: the disk, its threads and its memory stay with the parent.
pub(crate) fn forked() -> io::Error {
    io::Error::other(
        "this disk was opened by the parent of this process; open the directory again after the fork",
    )
}
