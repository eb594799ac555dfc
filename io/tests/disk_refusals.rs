//! What an engine does where the system refuses something: io_uring, locked memory, a longer file.
//!
//! The limits are those of a process, so each test runs the one named `child` of its module in a process of its own.
#![cfg(not(loom))]

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
};
use tidelog_io::aligned::{AlignedBuf, Arena};
use tidelog_io::disk::{Completion, Disk, Durability, Write};
use tidelog_io::engine::{EngineChoice, open_best};
use tidelog_io::psync::PsyncDisk;
use tidelog_io::uring::UringDisk;

const BLOCK: usize = 4096;

/// Runs an ignored test of this file with `setup` done by the shell before. `SKIPPED` in its output is passed on.
fn run_child(name: &str, setup: &str) {
    run_child_by(Command::new("sh"), name, setup);
}

fn run_child_by(mut shell: Command, name: &str, setup: &str) {
    let this = std::env::current_exe().unwrap();
    let script = format!("{setup} exec \"$0\" --exact {name} --ignored --nocapture");
    let output = shell.args(["-c", &script]).arg(this).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("1 passed"), "{name}: {}\n{text}", output.status);
    for line in text.lines().filter(|line| line.contains("SKIPPED")) {
        eprintln!("{line}");
    }
}

fn disk_dir() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

fn write_and_wait(disk: &mut dyn Disk, dir: &Path, block: usize, blocks: usize) -> Completion {
    let name = "a";
    if !dir.join(name).exists() {
        std::fs::write(dir.join(name), [0; BLOCK]).unwrap();
    }
    let file = disk.open(name).unwrap();
    let mut buffer = AlignedBuf::alone(blocks * BLOCK).unwrap();
    buffer.fill(7);
    let (offset, len) = ((block * BLOCK) as u64, buffer.len());
    disk.submit(Write { token: 5, file, offset, buffer, len }).unwrap();
    let mut completions = Vec::new();
    while disk.in_flight() > 0 {
        disk.wait(Duration::MAX, &mut completions).unwrap();
    }
    disk.close(file);
    completions.remove(0)
}

fn uring(dir: &Path, arena: Option<&Arena>) -> Option<UringDisk> {
    let disk = UringDisk::open(dir, Durability::Power, 4, arena);
    disk.map_err(|error| eprintln!("SKIPPED: io_uring does not work here ({error})")).ok()
}

/// Lets a system call fail from now on, for all threads: in any case, or where one of the rules applies.
fn refuse(call: i64, rules: Vec<SeccompRule>, errno: u32) {
    let filter = SeccompFilter::new(
        BTreeMap::from([(call, rules)]),
        SeccompAction::Allow,
        SeccompAction::Errno(errno),
        std::env::consts::ARCH.try_into().unwrap(),
    );
    let program: BpfProgram = filter.unwrap().try_into().unwrap();
    seccompiler::apply_filter_all_threads(&program).unwrap();
}

mod forbidden_io_uring {
    use std::collections::BTreeSet;
    use std::sync::Mutex;

    use metrics::{Counter, Gauge, Histogram, Key, KeyName, Metadata, Recorder, SharedString, Unit};

    use super::*;

    #[test]
    fn falls_back_to_threads() {
        run_child("forbidden_io_uring::child", "");
    }

    #[test]
    #[ignore = "run by another test in a process of its own"]
    fn child() {
        forbid_io_uring();
        let dir = disk_dir();
        let open = |choice| open_best(dir.path(), Durability::Power, 4, None, choice);
        assert!(open(EngineChoice::IoUring).is_err());
        let counted = Counted::default();
        let mut disk = metrics::with_local_recorder(&counted, || open(EngineChoice::Auto)).unwrap();
        let info = disk.info();
        assert_eq!(info.engine, "pwritev2");
        let told = counted.0.into_inner().unwrap();
        assert!(told.contains("Key(tidelog_engine_fallbacks_total, [engine = pwritev2])"), "{told:?}");
        assert!(info.fallbacks[0].contains("io_uring"), "{info:?}");
        write_and_wait(&mut *disk, dir.path(), 0, 2).result.unwrap();
        assert_eq!(std::fs::read(dir.path().join("a")).unwrap(), [7; 2 * BLOCK]);
        let info = open(EngineChoice::Pwritev2).unwrap().info();
        assert!(!info.fallbacks.iter().any(|text| text.contains("io_uring")), "{info:?}");
    }

    /// The counters that were told of.
    #[derive(Default)]
    struct Counted(Mutex<BTreeSet<String>>);

    impl Recorder for Counted {
        fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

        fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

        fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

        fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
            self.0.lock().unwrap().insert(key.to_string());
            Counter::noop()
        }

        fn register_gauge(&self, _: &Key, _: &Metadata<'_>) -> Gauge {
            Gauge::noop()
        }

        fn register_histogram(&self, _: &Key, _: &Metadata<'_>) -> Histogram {
            Histogram::noop()
        }
    }

    fn forbid_io_uring() {
        const IO_URING_SETUP: i64 = 425;
        refuse(IO_URING_SETUP, Vec::new(), 1);
    }
}

/// A system that makes nothing durable: what is written is not said to be.
mod broken_sync {
    use rustix::io::Errno;

    use super::*;

    #[test]
    fn is_an_error_of_every_way_to_write() {
        run_child("broken_sync::child", "");
    }

    #[test]
    #[ignore = "run by another test in a process of its own"]
    fn child() {
        let open = |dir: &Path, direct, durability| match direct {
            true => PsyncDisk::open(dir, durability, 4).unwrap(),
            false => PsyncDisk::open_buffered(dir, durability, 4).unwrap(),
        };
        let disks: Vec<_> = [true, false]
            .into_iter()
            .flat_map(|direct| [(direct, Durability::Power), (direct, Durability::Process)])
            .map(|(direct, durability)| {
                let dir = disk_dir();
                let disk = open(dir.path(), direct, durability);
                (disk, dir, direct, durability)
            })
            .collect();
        let dsync = libc::RWF_DSYNC as u64;
        let flags = SeccompCondition::new(5, SeccompCmpArgLen::Dword, SeccompCmpOp::MaskedEq(dsync), dsync);
        let with_dsync = SeccompRule::new(vec![flags.unwrap()]).unwrap();
        for (call, rules) in [(libc::SYS_pwritev2, vec![with_dsync]), (libc::SYS_fdatasync, Vec::new())] {
            refuse(call, rules, Errno::IO.raw_os_error() as u32);
        }
        for (mut disk, dir, direct, durability) in disks {
            let written = write_and_wait(&mut disk, dir.path(), 0, 1).result;
            assert_eq!(written.is_err(), durability == Durability::Power, "direct: {direct}, {durability:?}");
        }
    }
}

mod allowed_io_uring {
    use super::*;

    #[test]
    fn is_the_first_choice_and_leaves_no_file() {
        let dir = disk_dir();
        if uring(dir.path(), None).is_none() {
            return;
        }
        let arena = Arena::new(BLOCK, 4).unwrap();
        let mut disk = open_best(dir.path(), Durability::Power, 4, Some(&arena), EngineChoice::Auto).unwrap();
        assert_eq!(disk.info().engine, "io_uring");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
        write_and_wait(&mut *disk, dir.path(), 0, 1).result.unwrap();
    }

    #[test]
    fn missing_directory_is_an_error_of_every_engine() {
        let dir = disk_dir().path().join("missing");
        for choice in [EngineChoice::Auto, EngineChoice::IoUring, EngineChoice::Pwritev2] {
            let error = open_best(&dir, Durability::Power, 4, None, choice).err().unwrap();
            assert_eq!(error.kind(), std::io::ErrorKind::NotFound, "{choice:?}");
        }
    }

    #[test]
    fn impossible_depth_is_an_error() {
        let dir = disk_dir();
        for depth in [0, tidelog_io::uring::DEPTH_MAX + 1] {
            let error = UringDisk::open(dir.path(), Durability::Power, depth, None).err().unwrap();
            assert_eq!(error.kind(), std::io::ErrorKind::InvalidInput);
        }
    }
}

mod little_locked_memory {
    use rustix::process::{Resource, Rlimit, setrlimit};
    use rustix::thread::{CapabilitySet, capabilities, set_capabilities};

    use super::*;

    #[test]
    fn leaves_buffers_unregistered() {
        run_child("little_locked_memory::child", "");
    }

    #[test]
    #[ignore = "run by another test in a process of its own"]
    fn child() {
        let limit_bytes = Some(64 << 10);
        setrlimit(Resource::Memlock, Rlimit { current: limit_bytes, maximum: limit_bytes }).unwrap();
        // Who may lock any amount of memory has no limit.
        let mut sets = capabilities(None).unwrap();
        sets.effective.remove(CapabilitySet::IPC_LOCK);
        sets.permitted.remove(CapabilitySet::IPC_LOCK);
        sets.inheritable.remove(CapabilitySet::IPC_LOCK);
        set_capabilities(None, sets).unwrap();

        let dir = disk_dir();
        let arena = Arena::new(256 << 10, 16).unwrap();
        let Some(mut disk) = uring(dir.path(), Some(&arena)) else { return };
        let info = disk.info();
        assert!(!info.registered && info.fallbacks[0].contains("ulimit -l"), "{info:?}");
        write_and_wait(&mut disk, dir.path(), 0, 2).result.unwrap();
        assert_eq!(std::fs::read(dir.path().join("a")).unwrap(), [7; 2 * BLOCK]);
    }
}

mod limited_length {
    use rustix::process::{Resource, Rlimit, setrlimit};

    use super::*;

    /// True short writes: the kernel cuts a write at the limit and refuses what is behind it.
    #[test]
    fn is_an_error_after_what_fits() {
        run_child("limited_length::child", "trap '' XFSZ;");
    }

    #[test]
    #[ignore = "run by another test in a process of its own"]
    fn child() {
        let limit_bytes = Some(6 * BLOCK as u64);
        setrlimit(Resource::Fsize, Rlimit { current: limit_bytes, maximum: limit_bytes }).unwrap();
        for engine in ["io_uring", "direct", "buffered"] {
            let dir = disk_dir();
            let mut disk: Box<dyn Disk> = match engine {
                "io_uring" => match uring(dir.path(), None) {
                    Some(disk) => Box::new(disk),
                    None => continue,
                },
                "direct" => Box::new(PsyncDisk::open(dir.path(), Durability::Power, 4).unwrap()),
                _ => Box::new(PsyncDisk::open_buffered(dir.path(), Durability::Power, 4).unwrap()),
            };
            let cut = write_and_wait(&mut *disk, dir.path(), 4, 4);
            assert_eq!(cut.result.unwrap_err().kind(), std::io::ErrorKind::FileTooLarge, "{engine}");
            assert!(cut.buffer.iter().all(|&byte| byte == 7));
            let contents = std::fs::read(dir.path().join("a")).unwrap();
            assert!(contents.len() == 6 * BLOCK && contents[4 * BLOCK..] == [7; 2 * BLOCK], "{engine}");
            write_and_wait(&mut *disk, dir.path(), 1, 5).result.unwrap();
        }
    }
}

mod full_file_system {
    use super::*;

    const DIR: &str = "TIDELOG_TEST_FULL_DIR";

    /// In a name space of its own, so that it needs no right to mount and leaves nothing mounted.
    #[test]
    fn is_an_error_and_what_is_there_can_be_written() {
        let shell = || {
            let mut shell = Command::new("unshare");
            shell.args(["--map-root-user", "--mount", "sh"]);
            shell
        };
        let dir = disk_dir();
        let mount = "mount -t tmpfs -o size=64k tidelog \"$TIDELOG_TEST_FULL_DIR\"";
        let mounts = shell().args(["-c", mount]).env(DIR, dir.path()).output();
        if !mounts.is_ok_and(|output| output.status.success()) {
            eprintln!("SKIPPED: this system lets us mount nothing");
            return;
        }
        let mut shell = shell();
        shell.env(DIR, dir.path());
        run_child_by(shell, "full_file_system::child", &format!("{mount} &&"));
    }

    #[test]
    #[ignore = "run by another test in a process of its own"]
    fn child() {
        let dir = std::env::var_os(DIR).unwrap();
        let dir = Path::new(&dir);
        std::fs::write(dir.join("a"), [0; BLOCK]).unwrap();
        std::fs::write(dir.join("rest"), [0; 15 * BLOCK]).unwrap();
        assert!(std::fs::write(dir.join("b"), [0; BLOCK]).is_err(), "the file system is not full");
        for choice in [EngineChoice::Auto, EngineChoice::Pwritev2] {
            let mut disk = open_best(dir, Durability::Power, 4, None, choice).unwrap();
            let info = disk.info();
            let longer = write_and_wait(&mut *disk, dir, 1, 2);
            assert_eq!(longer.result.unwrap_err().kind(), std::io::ErrorKind::StorageFull, "{info:?}");
            write_and_wait(&mut *disk, dir, 0, 1).result.unwrap();
            assert_eq!(std::fs::read(dir.join("a")).unwrap(), [7; BLOCK], "{info:?}");
        }
    }
}
