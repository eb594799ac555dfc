//! The doctor's look at one directory: its file system, direct I/O, free space and speed.
//!
//! The speed test goes through pwritev2, not through tidelog's engines: it judges the disk, `tidelog bench` the rest.

use std::fs::File;
use std::io::{self, IoSlice};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{AtFlags, CWD, Mode, OFlags, StatxFlags};
use rustix::io::ReadWriteFlags;

use super::Finding;
use crate::show;

/// What tidelog aligns its writes to.
const ALIGNMENT_BYTES: usize = 4096;
const BLOCK_BYTES: usize = 256 << 10;
const FILE_BYTES: u64 = 64 << 20;
const THREADS: u64 = 8;
const FREE_BYTES_ADVISED: u64 = 4 << 30;
/// One segment and its spare.
const FREE_BYTES_MIN: u64 = 512 << 20;

/// Everything about `dir`, or, if it does not exist yet, about the directory in which it would be made. Leaves nothing
/// behind in it.
pub fn check(dir: &Path, seconds: u64) -> Vec<Finding> {
    let nearest = nearest_existing(dir);
    let shown = match dir == nearest {
        true => dir.display().to_string(),
        false => format!("{} does not exist yet and would be made; {}", dir.display(), nearest.display()),
    };
    let dir = nearest;
    let mut findings = Vec::new();
    match rustix::fs::statfs(dir) {
        Ok(stat) => findings.push(judge_file_system(&shown, stat.f_type as u64)),
        Err(error) => {
            let advice = "create it, or give another with --dir";
            return vec![Finding::bad("directory", format!("{shown}: {}", io::Error::from(error)), advice)];
        }
    }
    let free_bytes = match rustix::fs::statvfs(dir) {
        Ok(stat) => stat.f_bavail.saturating_mul(stat.f_frsize),
        Err(_) => 0,
    };
    findings.push(judge_free_space(free_bytes));
    let (file, direct) = match open_test_file(dir) {
        Ok(opened) => opened,
        Err(error) => {
            let advice = "give the user of tidelog the right to create files there";
            findings.push(Finding::bad(
                "directory",
                format!("{shown}: no file can be created: {error}"),
                advice,
            ));
            return findings;
        }
    };
    findings.push(match direct {
        Ok(()) => {
            let statx = rustix::fs::statx(&file, "", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN);
            let alignment = statx
                .ok()
                .filter(|statx| statx.stx_mask & StatxFlags::DIOALIGN.bits() != 0)
                .map(|statx| (statx.stx_dio_mem_align, statx.stx_dio_offset_align));
            judge_alignment(alignment)
        }
        Err(error) => judge_no_direct(&error),
    });
    if seconds > 0 {
        if free_bytes < 2 * FILE_BYTES {
            findings.push(Finding::warn("disk speed", "not measured, too little space", ""));
        } else {
            match measure(&file, Duration::from_secs(seconds)) {
                Ok(speed) => findings.push(judge_speed(&speed)),
                Err(error) => findings.push(Finding::bad(
                    "disk speed",
                    format!("a test write to {shown} failed: {error}"),
                    "check the disk and the system's log",
                )),
            }
        }
    }
    findings
}

/// The directory itself, or the nearest one above it that exists.
fn nearest_existing(dir: &Path) -> &Path {
    let here = |dir| if dir == Path::new("") { Path::new(".") } else { dir };
    let missing =
        |dir: &Path| dir.symlink_metadata().is_err_and(|error| error.kind() == io::ErrorKind::NotFound);
    dir.ancestors().map(here).find(|dir| !missing(dir)).unwrap_or(dir)
}

fn judge_file_system(dir: &str, magic: u64) -> Finding {
    const CHECK: &str = "directory";
    let (name, advice) = match magic {
        0xef53 => ("ext4", ""),
        0x5846_5342 => ("xfs", ""),
        0xf2f5_2010 => ("f2fs", ""),
        0x9123_683e => (
            "btrfs",
            "copy-on-write slows segments that are written again: chattr +C on the directory, or ext4 or xfs",
        ),
        0x2fc1_2fc1 => ("zfs", "copy-on-write slows segments that are written again: ext4 or xfs is advised"),
        0x0102_1994 => ("tmpfs", "it is memory: nothing survives a power loss, use a directory on a disk"),
        0x794c_7630 => ("overlay", "a container's own layer is slow and goes with it: mount a volume"),
        0x6969 => ("nfs", "each durable write is a round trip: use a local disk"),
        0x6573_5546 => ("fuse", "speed and durability depend on the FUSE server: use a local disk"),
        _ => {
            let found = format!("{dir} on a file system that is not known here (0x{magic:x})");
            return Finding::warn(CHECK, found, "tidelog is tested on ext4 and xfs");
        }
    };
    let found = format!("{dir} on {name}");
    if advice.is_empty() { Finding::ok(CHECK, found) } else { Finding::warn(CHECK, found, advice) }
}

fn judge_free_space(free_bytes: u64) -> Finding {
    const CHECK: &str = "free space";
    let found = format!("{} free", show::bytes(free_bytes));
    if free_bytes >= FREE_BYTES_ADVISED {
        Finding::ok(CHECK, found)
    } else if free_bytes >= FREE_BYTES_MIN {
        Finding::warn(CHECK, found, "appends wait when local segments are full: 4 GiB or more is advised")
    } else {
        Finding::bad(
            CHECK,
            found,
            "two segments of 256 MiB do not fit: free 512 MiB at least, or give another --dir",
        )
    }
}

fn judge_alignment(alignment: Option<(u32, u32)>) -> Finding {
    const CHECK: &str = "O_DIRECT";
    match alignment {
        None => {
            Finding::ok(CHECK, "taken; the kernel does not tell which alignment it needs (Linux 6.1 does)")
        }
        Some((memory, offset)) if (1..=4096).contains(&memory) && (1..=4096).contains(&offset) => {
            Finding::ok(CHECK, format!("taken, aligned to {memory} B in memory and {offset} B in files"))
        }
        Some((memory, offset)) => Finding::warn(
            CHECK,
            format!(
                "needs an alignment of {memory} B in memory and {offset} B in files, tidelog's is 4096 B"
            ),
            "writes go through the page cache instead: use a disk with blocks of at most 4096 B",
        ),
    }
}

fn judge_no_direct(error: &io::Error) -> Finding {
    Finding::warn(
        "O_DIRECT",
        format!("refused: {error}"),
        "writes go through the page cache instead, which costs CPU and memory: use ext4 or xfs on a local disk",
    )
}

/// What the disk did.
struct Speed {
    /// Durable 256 KiB writes, several at once.
    bytes_per_second: f64,
    /// A durable 4 KiB write alone.
    median: Duration,
    p99: Duration,
}

fn judge_speed(speed: &Speed) -> Finding {
    const CHECK: &str = "disk speed";
    let found = format!(
        "{:.0} MB/s in durable writes of 256 KiB, {THREADS} at once; {:.2} ms for one of 4 KiB (p99 {:.2} ms)",
        speed.bytes_per_second / 1e6,
        speed.median.as_secs_f64() * 1e3,
        speed.p99.as_secs_f64() * 1e3,
    );
    if speed.bytes_per_second < 100e6 {
        Finding::warn(
            CHECK,
            found,
            "appends above that rate will wait: use an NVMe disk, or several with one --dir each",
        )
    } else if speed.p99 > Duration::from_millis(20) {
        Finding::warn(CHECK, found, "sync waits for the slowest write: look for other load on the disk")
    } else {
        Finding::ok(CHECK, found)
    }
}

/// A file that is nowhere any more once it is closed, and whether it takes direct writes.
fn open_test_file(dir: &Path) -> io::Result<(File, io::Result<()>)> {
    let path = dir.join(format!(".tidelog-doctor-{}", std::process::id()));
    let open = |more| {
        rustix::fs::openat(CWD, &path, OFlags::WRONLY | OFlags::CLOEXEC | more, Mode::RUSR | Mode::WUSR)
    };
    let buffered = open(OFlags::CREATE | OFlags::EXCL)?;
    let direct = open(OFlags::DIRECT);
    std::fs::remove_file(&path)?;
    Ok(match direct {
        Ok(direct) => (File::from(direct), Ok(())),
        Err(error) => (File::from(buffered), Err(error.into())),
    })
}

fn measure(file: &File, time: Duration) -> io::Result<Speed> {
    // Room for an aligned block in it, wherever the allocation begins.
    let memory: Vec<u8> = (0..BLOCK_BYTES + ALIGNMENT_BYTES).map(|at| ((at * 31) >> 3) as u8).collect();
    let start = memory.as_ptr().align_offset(ALIGNMENT_BYTES);
    let block = &memory[start..start + BLOCK_BYTES];
    // Written once first: a first write to a block of a file costs more than later ones.
    for offset in (0..FILE_BYTES).step_by(BLOCK_BYTES) {
        file.write_all_at(block, offset)?;
    }
    file.sync_all()?;
    let bytes_per_second = measure_throughput(file, block, time / 2)?;
    let (median, p99) = measure_latency(file, &block[..ALIGNMENT_BYTES], time / 2)?;
    Ok(Speed { bytes_per_second, median, p99 })
}

fn measure_throughput(file: &File, block: &[u8], time: Duration) -> io::Result<f64> {
    let next = AtomicU64::new(0);
    let begin = Instant::now();
    let work = || -> io::Result<u64> {
        let mut written_bytes = 0;
        while begin.elapsed() < time {
            let offset = next.fetch_add(BLOCK_BYTES as u64, Ordering::Relaxed) % FILE_BYTES;
            write_durably(file, block, offset)?;
            written_bytes += block.len() as u64;
        }
        Ok(written_bytes)
    };
    let written_bytes = thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS).map(|_| scope.spawn(work)).collect();
        threads
            .into_iter()
            .map(|thread| thread.join().expect("the thread does not panic"))
            .sum::<io::Result<u64>>()
    })?;
    Ok(written_bytes as f64 / begin.elapsed().as_secs_f64())
}

fn measure_latency(file: &File, page: &[u8], time: Duration) -> io::Result<(Duration, Duration)> {
    let begin = Instant::now();
    let mut latencies = Vec::new();
    while begin.elapsed() < time || latencies.is_empty() {
        let write_begin = Instant::now();
        write_durably(file, page, latencies.len() as u64 * page.len() as u64 % FILE_BYTES)?;
        latencies.push(write_begin.elapsed());
    }
    latencies.sort_unstable();
    Ok((latencies[latencies.len() / 2], latencies[latencies.len() * 99 / 100]))
}

fn write_durably(file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
    let written = rustix::io::retry_on_intr(|| {
        rustix::io::pwritev2(file, &[IoSlice::new(bytes)], offset, ReadWriteFlags::DSYNC)
    })?;
    if written == bytes.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
}

#[cfg(test)]
mod tests {
    use super::super::Grade;
    use super::*;

    #[test]
    fn a_real_directory_is_looked_at_and_left_clean() {
        let dir = tempfile::tempdir().unwrap();
        let checks: Vec<_> = check(dir.path(), 0).iter().map(|finding| finding.check).collect();
        assert_eq!(checks, ["directory", "free space", "O_DIRECT"]);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_directory_that_would_be_made_is_judged_by_the_one_above_it() {
        let dir = tempfile::tempdir().unwrap();
        let missing = dir.path().join("not/yet");
        let (findings, above) = (check(&missing, 0), check(dir.path(), 0));
        let grades =
            |findings: &[Finding]| -> Vec<Grade> { findings.iter().map(|finding| finding.grade).collect() };
        assert_eq!(grades(&findings), grades(&above));
        let says = format!(
            "{} does not exist yet and would be made; {} on ",
            missing.display(),
            dir.path().display()
        );
        assert!(findings[0].found.starts_with(&says), "{findings:?}");
        assert!(!dir.path().join("not").exists());
        assert_eq!(nearest_existing(Path::new("no/such/directory")), Path::new("."));
    }

    #[test]
    fn a_directory_that_cannot_be_made_is_bad_and_named() {
        let findings = check(Path::new("/dev/null/segments"), 0);
        assert_eq!(findings.len(), 1);
        assert_eq!(findings[0].grade, Grade::Bad);
        assert!(findings[0].found.contains("/dev/null/segments"), "{findings:?}");
    }

    #[test]
    fn judgements() {
        assert_eq!(judge_file_system("/d", 0xef53), Finding::ok("directory", "/d on ext4"));
        assert!(judge_file_system("/d", 0x0102_1994).advice.contains("memory"));
        assert_eq!(judge_file_system("/d", 1).grade, Grade::Warn);
        let grades = [4 << 30, 1 << 30, 100 << 20].map(|free_bytes| judge_free_space(free_bytes).grade);
        assert_eq!(grades, [Grade::Ok, Grade::Warn, Grade::Bad]);
        let grades =
            [None, Some((512, 4096)), Some((512, 65_536)), Some((0, 0))].map(|a| judge_alignment(a).grade);
        assert_eq!(grades, [Grade::Ok, Grade::Ok, Grade::Warn, Grade::Warn]);
        let speed = |bytes_per_second, p99_ms| {
            let (median, p99) = (Duration::from_millis(1), Duration::from_millis(p99_ms));
            judge_speed(&Speed { bytes_per_second, median, p99 }).grade
        };
        assert_eq!([speed(2e9, 2), speed(5e7, 2), speed(2e9, 50)], [Grade::Ok, Grade::Warn, Grade::Warn]);
    }
}
