//! Threads that call pwritev2: the engine for where io_uring is forbidden or O_DIRECT is refused.
//!
//! Owns the two threads of a disk, their queue, and what a failed or short system call means for each write. Where the
//! bytes belong, and what a failed write leads to, is decided by the caller.
#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::io::{Errno, ReadWriteFlags};
use slab::Slab;

use crate::aligned::{AlignedBuf, BLOCK_ALIGNMENT_BYTES};
use crate::disk::{
    Completion, Disk, Durability, EngineInfo, FileSlot, WakeFn, Write, check_file_name, check_write, forked,
    not_open,
};
use crate::engine::{PROBE_BYTES, is_about_space, open_directory, open_file, probe_file};

const THREADS: usize = 2;

/// Neighbours in the queue are written by one call up to this size: two threads with 1 MiB each reach the speed of the
/// device, with 256 KiB they do not.
const CALL_BYTES_MAX: usize = 1 << 20;

const AGAIN_MAX: u32 = 100;
const AGAIN_PAUSE: Duration = Duration::from_millis(1);

/// A [`Disk`] of two threads that call pwritev2.
///
/// Direct writes are made durable by RWF_DSYNC. Buffered ones by fdatasync, one at a time for each file: the kernel
/// reports a failed write-back once, so after a failed sync no write to that file is reported as durable any more.
pub struct PsyncDisk {
    directory: OwnedFd,
    depth: usize,
    in_flight: usize,
    files: Slab<Arc<PsyncFile>>,
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    direct: bool,
    fallbacks: Vec<String>,
    process: u32,
}

impl PsyncDisk {
    /// Opens the disk for a directory, with at most `depth` writes in flight. A write to a file without a name shows
    /// what the file system takes.
    ///
    /// # Errors
    /// What the file system says about the directory, or the system about two more threads.
    pub fn open(dir: &Path, durability: Durability, depth: usize) -> io::Result<Self> {
        let directory = open_directory(dir)?;
        let (mut direct, mut dsync, mut fallbacks) = (true, true, Vec::new());
        if let Err(error) = probe(&directory, true, ReadWriteFlags::empty()) {
            direct = false;
            probe(&directory, false, ReadWriteFlags::empty())?;
            fallbacks.push(format!("O_DIRECT is refused here ({error}); writes go through the page cache"));
        }
        if direct && durability == Durability::Power {
            match probe(&directory, true, ReadWriteFlags::DSYNC) {
                Ok(()) => {}
                Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL) => {
                    dsync = false;
                    fallbacks
                        .push("RWF_DSYNC is refused here; every write is followed by fdatasync".to_owned());
                }
                Err(error) => return Err(error.into()),
            }
        }
        Self::start(directory, durability, depth, Mode { direct, dsync }, fallbacks)
    }

    /// As [`open`](Self::open), but through the page cache, whatever the file system takes.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_buffered(dir: &Path, durability: Durability, depth: usize) -> io::Result<Self> {
        let directory = open_directory(dir)?;
        probe(&directory, false, ReadWriteFlags::empty())?;
        Self::start(directory, durability, depth, Mode { direct: false, dsync: false }, Vec::new())
    }

    fn start(
        directory: OwnedFd,
        durability: Durability,
        depth: usize,
        mode: Mode,
        fallbacks: Vec<String>,
    ) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            queue: Mutex::new(Queue::default()),
            work: Condvar::new(),
            done: Condvar::new(),
            durability,
            dsync: AtomicBool::new(mode.dsync && mode.direct),
        });
        let mut disk = Self {
            directory,
            depth,
            in_flight: 0,
            files: Slab::new(),
            shared,
            threads: Vec::new(),
            direct: mode.direct,
            fallbacks,
            process: std::process::id(),
        };
        for index in 0..THREADS {
            let shared = disk.shared.clone();
            let builder = std::thread::Builder::new().name(format!("tidelog-write-{index}"));
            disk.threads.push(builder.spawn(move || shared.work())?);
        }
        Ok(disk)
    }

    /// Adds to what [`Disk::info`] tells.
    pub(crate) fn note_fallback(&mut self, text: String) {
        self.fallbacks.insert(0, text);
    }

    fn is_forked(&self) -> bool {
        self.process != std::process::id()
    }
}

struct Mode {
    direct: bool,
    dsync: bool,
}

fn probe(directory: &OwnedFd, direct: bool, flags: ReadWriteFlags) -> Result<(), Errno> {
    let file = probe_file(directory.as_fd(), direct)?;
    let buffer = AlignedBuf::alone(PROBE_BYTES).map_err(|_| Errno::NOMEM)?;
    let slices = [IoSlice::new(&buffer)];
    let written = if flags.is_empty() {
        rustix::io::pwritev(&file, &slices, 0)
    } else {
        rustix::io::pwritev2(&file, &slices, 0, flags)
    };
    match written {
        Ok(_) => Ok(()),
        Err(error) if is_about_space(&error.into()) => Ok(()),
        Err(error) => Err(error),
    }
}

struct PsyncFile {
    file: OwnedFd,
    /// A sync has failed: what it covered, and all after it, may be lost without another word from the kernel.
    sync_failed: Mutex<bool>,
}

struct Job {
    write: Write,
    file: Arc<PsyncFile>,
}

/// Invariant: an accepted write is in `jobs`, in the hands of a thread, or in `done`.
#[derive(Default)]
struct Queue {
    jobs: VecDeque<Job>,
    done: Vec<Completion>,
    woken: bool,
    closing: bool,
}

impl Queue {
    /// The first write and those behind it that continue it.
    fn take_run(&mut self) -> Option<Vec<Job>> {
        let first = self.jobs.pop_front()?;
        let (mut end, mut bytes) = (first.write.offset + first.write.len as u64, first.write.len);
        let mut run = vec![first];
        while let Some(next) = self.jobs.front() {
            let continues = Arc::ptr_eq(&next.file, &run[0].file) && next.write.offset == end;
            if !continues || bytes + next.write.len > CALL_BYTES_MAX {
                break;
            }
            end += next.write.len as u64;
            bytes += next.write.len;
            run.extend(self.jobs.pop_front());
        }
        Some(run)
    }
}

struct Shared {
    queue: Mutex<Queue>,
    /// There is a job, or the disk is closing.
    work: Condvar,
    /// There is a completion or a wake-up.
    done: Condvar,
    durability: Durability,
    /// RWF_DSYNC makes a write durable; else fdatasync does.
    dsync: AtomicBool,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        // Nothing that runs under this lock leaves the queue half changed.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn work(&self) {
        loop {
            let mut queue = self.lock();
            let run = loop {
                if let Some(run) = queue.take_run() {
                    break run;
                }
                if queue.closing {
                    return;
                }
                queue = self.work.wait(queue).unwrap_or_else(PoisonError::into_inner);
            };
            drop(queue);
            let completions = self.write(run);
            self.lock().done.extend(completions);
            self.done.notify_one();
        }
    }

    fn write(&self, run: Vec<Job>) -> Vec<Completion> {
        let file = run[0].file.clone();
        let (written_bytes, failure) =
            write_all(&run, |slices, offset| self.write_once(&file, slices, offset));
        let synced = if self.durability == Durability::Power && !self.dsync.load(Ordering::Relaxed) {
            sync(&file)
        } else {
            Ok(())
        };
        let mut end_bytes = 0;
        let complete = |job: Job| {
            end_bytes += job.write.len;
            let result = match (&failure, synced) {
                (Some(failure), _) if end_bytes > written_bytes => Err(failure.to_error()),
                (_, Err(errno)) => Err(errno.into()),
                _ => Ok(()),
            };
            Completion { token: job.write.token, buffer: job.write.buffer, result }
        };
        run.into_iter().map(complete).collect()
    }

    fn write_once(&self, file: &PsyncFile, slices: &[IoSlice<'_>], offset: u64) -> Result<usize, Errno> {
        if self.durability == Durability::Power && self.dsync.load(Ordering::Relaxed) {
            match rustix::io::pwritev2(&file.file, slices, offset, ReadWriteFlags::DSYNC) {
                Err(Errno::OPNOTSUPP | Errno::NOSYS) => {
                    if self.dsync.swap(false, Ordering::Relaxed) {
                        tracing::warn!("RWF_DSYNC is refused; every write is followed by fdatasync");
                    }
                }
                other => return other,
            }
        }
        rustix::io::pwritev(&file.file, slices, offset)
    }
}

enum Failure {
    NoProgress,
    Error(Errno),
}

impl Failure {
    fn to_error(&self) -> io::Error {
        match self {
            Self::NoProgress => io::ErrorKind::WriteZero.into(),
            Self::Error(errno) => (*errno).into(),
        }
    }
}

/// Writes until all is written or no progress is possible; how far it came, in bytes, and why it ended there.
fn write_all(
    run: &[Job],
    mut write_once: impl FnMut(&[IoSlice<'_>], u64) -> Result<usize, Errno>,
) -> (usize, Option<Failure>) {
    let total_bytes: usize = run.iter().map(|job| job.write.len).sum();
    let (mut written_bytes, mut again) = (0, 0);
    while written_bytes < total_bytes {
        let slices = rest_of(run, written_bytes);
        match write_once(&slices, run[0].write.offset + written_bytes as u64) {
            Ok(bytes) => {
                // Direct writes start at multiples of 4096: after a short write a part is written again.
                let aligned_bytes = bytes.min(total_bytes) / BLOCK_ALIGNMENT_BYTES * BLOCK_ALIGNMENT_BYTES;
                if aligned_bytes == 0 {
                    return (written_bytes, Some(Failure::NoProgress));
                }
                written_bytes += aligned_bytes;
                again = 0;
            }
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) if again < AGAIN_MAX => {
                again += 1;
                std::thread::sleep(AGAIN_PAUSE);
            }
            Err(errno) => return (written_bytes, Some(Failure::Error(errno))),
        }
    }
    (written_bytes, None)
}

fn rest_of(run: &[Job], mut skip_bytes: usize) -> Vec<IoSlice<'_>> {
    let mut slices = Vec::with_capacity(run.len());
    for job in run {
        let skipped = skip_bytes.min(job.write.len);
        skip_bytes -= skipped;
        if skipped < job.write.len {
            slices.push(IoSlice::new(&job.write.buffer[skipped..job.write.len]));
        }
    }
    slices
}

fn sync(file: &PsyncFile) -> Result<(), Errno> {
    let mut failed = file.sync_failed.lock().unwrap_or_else(PoisonError::into_inner);
    if *failed {
        return Err(Errno::IO);
    }
    let synced = loop {
        match rustix::fs::fdatasync(&file.file) {
            Err(Errno::INTR) => {}
            other => break other,
        }
    };
    *failed = synced.is_err();
    synced
}

impl Disk for PsyncDisk {
    fn open(&mut self, name: &str) -> io::Result<FileSlot> {
        check_file_name(name)?;
        let file = open_file(self.directory.as_fd(), name, self.direct)?;
        let file = Arc::new(PsyncFile { file, sync_failed: Mutex::new(false) });
        Ok(FileSlot(self.files.insert(file) as u32))
    }

    fn close(&mut self, file: FileSlot) {
        self.files.try_remove(file.0 as usize);
    }

    fn submit(&mut self, write: Write) -> Result<(), Write> {
        if self.in_flight >= self.depth || self.is_forked() {
            return Err(write);
        }
        self.in_flight += 1;
        let file = self.files.get(write.file.0 as usize).cloned().ok_or_else(|| not_open(write.file));
        match check_write(&write).and(file) {
            Ok(file) => {
                self.shared.lock().jobs.push_back(Job { write, file });
                self.shared.work.notify_one();
            }
            Err(error) => {
                let completion = Completion { token: write.token, buffer: write.buffer, result: Err(error) };
                self.shared.lock().done.push(completion);
            }
        }
        Ok(())
    }

    fn wait(&mut self, timeout: Duration, completions: &mut Vec<Completion>) -> io::Result<()> {
        if self.is_forked() {
            return Err(forked());
        }
        let deadline = Instant::now().checked_add(timeout);
        let mut queue = self.shared.lock();
        loop {
            let woken = std::mem::take(&mut queue.woken);
            if woken || !queue.done.is_empty() {
                self.in_flight -= queue.done.len();
                completions.append(&mut queue.done);
                return Ok(());
            }
            if self.threads.iter().any(JoinHandle::is_finished) {
                return Err(io::Error::other(
                    "a thread that writes has ended; close the disk and open it again",
                ));
            }
            let left = deadline.map_or(Duration::MAX, |at| at.saturating_duration_since(Instant::now()));
            if left.is_zero() {
                return Ok(());
            }
            queue = self.shared.done.wait_timeout(queue, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn waker(&self) -> WakeFn {
        let shared = self.shared.clone();
        Arc::new(move || {
            shared.lock().woken = true;
            shared.done.notify_one();
        })
    }

    fn depth(&self) -> usize {
        self.depth
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }

    fn info(&self) -> EngineInfo {
        EngineInfo {
            engine: "pwritev2",
            direct: self.direct,
            registered: false,
            fallbacks: self.fallbacks.clone(),
        }
    }
}

impl Drop for PsyncDisk {
    fn drop(&mut self) {
        let threads = std::mem::take(&mut self.threads);
        if self.is_forked() {
            // The threads are the parent's. A join would wait for ever, and the lock may be held by one of them.
            std::mem::forget(threads);
            return;
        }
        self.shared.lock().closing = true;
        self.shared.work.notify_all();
        for thread in threads {
            // The queue is empty when a thread ends; a panic in one leaves its writes finished, only unreported.
            let _ = thread.join();
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn run_of(blocks: &[usize]) -> Vec<Job> {
        let file = eventual_file();
        let mut offset = 8192;
        let job = |&blocks: &usize| {
            let buffer = AlignedBuf::alone(blocks * 4096).unwrap();
            let write = Write { token: offset, file: FileSlot(0), offset, len: buffer.len(), buffer };
            offset += write.len as u64;
            Job { write, file: file.clone() }
        };
        blocks.iter().map(job).collect()
    }

    fn eventual_file() -> Arc<PsyncFile> {
        let file = OwnedFd::from(tempfile::tempfile().unwrap());
        Arc::new(PsyncFile { file, sync_failed: Mutex::new(false) })
    }

    fn write_with(
        results: Vec<Result<usize, Errno>>,
        blocks: &[usize],
    ) -> (usize, Option<Failure>, Vec<(u64, usize)>) {
        let (mut results, mut calls) = (results.into_iter(), Vec::new());
        let (written, failure) = write_all(&run_of(blocks), |slices, offset| {
            calls.push((offset, slices.iter().map(|slice| slice.len()).sum()));
            results.next().expect("no call after the last result")
        });
        assert!(results.next().is_none());
        (written, failure, calls)
    }

    #[test]
    fn short_write_goes_on_at_its_last_whole_block() {
        let results = vec![Ok(3 * 4096 + 17), Err(Errno::INTR), Err(Errno::AGAIN), Ok(2 * 4096)];
        let (written, failure, calls) = write_with(results, &[2, 2, 1]);
        assert!(failure.is_none());
        assert_eq!(written, 5 * 4096);
        let rest = (8192 + 3 * 4096, 2 * 4096);
        assert_eq!(calls, [(8192, 5 * 4096), rest, rest, rest]);
    }

    #[test]
    fn no_progress_and_errors_end_a_write() {
        let (written, failure, _) = write_with(vec![Ok(4096), Ok(4095)], &[1, 1]);
        assert!(written == 4096 && matches!(failure, Some(Failure::NoProgress)));
        let (written, failure, _) = write_with(vec![Ok(2 * 4096), Err(Errno::IO)], &[1, 1, 1]);
        assert!(written == 2 * 4096 && matches!(failure, Some(Failure::Error(Errno::IO))));
        let again = vec![Err(Errno::AGAIN); AGAIN_MAX as usize + 1];
        assert!(matches!(write_with(again, &[1]).1, Some(Failure::Error(Errno::AGAIN))));
    }

    #[test]
    fn runs_are_neighbours_of_one_file_up_to_a_limit() {
        let mut queue = Queue::default();
        queue.jobs.extend(run_of(&[64, 64, 64, 64, 64]));
        queue.jobs.extend(run_of(&[1]));
        let lens = |run: Option<Vec<Job>>| {
            run.map(|run| run.iter().map(|job| job.write.len / 4096).collect::<Vec<_>>())
        };
        assert_eq!(lens(queue.take_run()), Some(vec![64; 4]));
        assert_eq!(lens(queue.take_run()), Some(vec![64]));
        assert_eq!(lens(queue.take_run()), Some(vec![1]));
        assert_eq!(lens(queue.take_run()), None);
    }

    #[test]
    fn nothing_is_durable_after_a_failed_sync() {
        // A pipe cannot be synced.
        let (_reader, writer) = std::io::pipe().unwrap();
        let pipe = PsyncFile { file: writer.into(), sync_failed: Mutex::new(false) };
        assert_eq!(sync(&pipe), Err(Errno::INVAL));
        assert_eq!(sync(&pipe), Err(Errno::IO));
        assert_eq!(sync(&eventual_file()), Ok(()));
    }

    #[test]
    fn forked_child_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let mut disk = PsyncDisk::open(dir.path(), Durability::Process, 2).unwrap();
        let parent = disk.process;
        disk.process ^= 1;
        assert!(disk.submit(run_of(&[1]).remove(0).write).is_err());
        assert!(disk.wait(Duration::ZERO, &mut Vec::new()).is_err());
        disk.process = parent;
    }
}
