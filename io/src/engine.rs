//! Which engine serves a directory: tried with a real write, so that what the kernel refuses is known at open.
//!
//! Owns the order in which engines are tried, and the files of the trial. What an engine does with a write is its own.
#![forbid(unsafe_code)]

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use rustix::fs::{AtFlags, Mode, OFlags};
use rustix::io::Errno;

use crate::aligned::{AlignedBuf, Arena};
use crate::disk::{Disk, Durability, Write};
use crate::psync::PsyncDisk;
use crate::uring::UringDisk;

/// Which engine to use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EngineChoice {
    /// io_uring where it works, else [`Pwritev2`](Self::Pwritev2).
    #[default]
    Auto,
    /// io_uring, or an error.
    IoUring,
    /// Threads that call pwritev2, or an error.
    Pwritev2,
}

/// Opens the best disk for a directory.
///
/// io_uring is tried with a real write of a file without a name. What it took less than the best for is in
/// [`EngineInfo::fallbacks`](crate::disk::EngineInfo), in one warning each, and counted by the metric
/// `tidelog_engine_fallbacks_total`. Buffers of `arena` are registered with the kernel if it allows that; buffers from
/// elsewhere work as well.
///
/// # Errors
/// What the file system says about the directory, or, for a choice other than `Auto`, why that engine does not work.
pub fn open_best(
    dir: &Path,
    durability: Durability,
    depth: usize,
    arena: Option<&Arena>,
    choice: EngineChoice,
) -> io::Result<Box<dyn Disk>> {
    let disk: Box<dyn Disk> = match choice {
        EngineChoice::IoUring => Box::new(open_uring(dir, durability, depth, arena)?),
        EngineChoice::Pwritev2 => Box::new(PsyncDisk::open(dir, durability, depth)?),
        EngineChoice::Auto => match open_uring(dir, durability, depth, arena) {
            Ok(disk) => Box::new(disk),
            Err(error) => {
                let mut disk = PsyncDisk::open(dir, durability, depth)?;
                disk.note_fallback(format!(
                    "io_uring does not work here ({error}); threads with pwritev2 do the writes"
                ));
                Box::new(disk)
            }
        },
    };
    let info = disk.info();
    for fallback in &info.fallbacks {
        tracing::warn!(directory = %dir.display(), engine = info.engine, "{fallback}");
        metrics::counter!("tidelog_engine_fallbacks_total", "engine" => info.engine).increment(1);
    }
    Ok(disk)
}

fn open_uring(
    dir: &Path,
    durability: Durability,
    depth: usize,
    arena: Option<&Arena>,
) -> io::Result<UringDisk> {
    // A ring belongs to the first thread that uses it, so the trial has one of its own.
    let mut trial = UringDisk::open(dir, durability, 1, None)?;
    let directory = open_directory(dir)?;
    let file = trial.adopt(probe_file(directory.as_fd(), true)?);
    let mut buffer = AlignedBuf::alone(PROBE_BYTES)?;
    buffer.fill(0xa5);
    let write = Write { token: 0, file, offset: 0, buffer, len: PROBE_BYTES };
    if trial.submit(write).is_err() {
        return Err(io::Error::other("io_uring refused a first write"));
    }
    let mut completions = Vec::new();
    while trial.in_flight() > 0 {
        trial.wait(Duration::from_secs(1), &mut completions)?;
    }
    for completion in completions {
        match completion.result {
            Err(error) if !is_about_space(&error) => return Err(error),
            _ => {}
        }
    }
    drop(trial);
    UringDisk::open(dir, durability, depth, arena)
}

pub(crate) const PROBE_BYTES: usize = 4096;

/// A full disk says nothing about the engine: recycled files can still be written.
pub(crate) fn is_about_space(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

pub(crate) fn open_directory(dir: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Ok(rustix::fs::open(dir, flags, Mode::empty())?)
}

fn write_flags(direct: bool) -> OFlags {
    let flags = OFlags::WRONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    if direct { flags | OFlags::DIRECT } else { flags }
}

/// Opens an existing file of the directory for writing.
pub(crate) fn open_file(directory: BorrowedFd<'_>, name: &str, direct: bool) -> Result<OwnedFd, Errno> {
    rustix::fs::openat(directory, name, write_flags(direct), Mode::empty())
}

/// Makes a file that is gone when it is closed, also after a crash where the file system can do that.
pub(crate) fn probe_file(directory: BorrowedFd<'_>, direct: bool) -> Result<OwnedFd, Errno> {
    let mode = Mode::RUSR | Mode::WUSR;
    let unnamed = OFlags::TMPFILE | write_flags(direct).difference(OFlags::NOFOLLOW);
    match rustix::fs::openat(directory, ".", unnamed, mode) {
        Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::NOENT | Errno::INVAL) => {}
        other => return other,
    }
    static COUNTER: AtomicU32 = AtomicU32::new(0);
    let name = format!(".tidelog-probe-{}-{}", std::process::id(), COUNTER.fetch_add(1, Ordering::Relaxed));
    let flags = write_flags(direct) | OFlags::CREATE | OFlags::EXCL;
    let file = rustix::fs::openat(directory, &name, flags, mode);
    // Some file systems refuse O_DIRECT only after they have made the name.
    match rustix::fs::unlinkat(directory, &name, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => file,
        Err(error) => file.and(Err(error)),
    }
}
