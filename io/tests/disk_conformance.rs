//! One suite for every engine: the contract of `Disk`, and what the system can refuse.
//!
//! A test that needs io_uring says so and passes where io_uring is forbidden; one that would wait for ever if an engine
//! lost a completion or a wake-up has no limit of its own.
#![cfg(not(loom))]

use std::io;
use std::panic::AssertUnwindSafe;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use tempfile::TempDir;
use tidelog_io::aligned::{AlignedBuf, Arena};
use tidelog_io::disk::{Completion, Disk, Durability, FileSlot, Write};
use tidelog_io::psync::PsyncDisk;
use tidelog_io::sim::SimWorld;
use tidelog_io::uring::UringDisk;

const BLOCK: usize = 4096;

/// An engine on a directory of its own.
enum Subject {
    Uring(TempDir),
    Direct(TempDir),
    Buffered(TempDir),
    Simulated(SimWorld),
}

impl Subject {
    /// `None`, with a line that says so, where the kernel does not let us.
    fn uring() -> Option<Self> {
        let dir = disk_dir();
        match UringDisk::open(dir.path(), Durability::Power, 1, None) {
            Ok(_) => Some(Self::Uring(dir)),
            Err(error) if is_refused(&error) => {
                eprintln!("SKIPPED: io_uring is refused here ({error})");
                None
            }
            Err(error) => panic!("io_uring on {}: {error}", dir.path().display()),
        }
    }

    fn direct() -> Option<Self> {
        Some(Self::Direct(disk_dir()))
    }

    fn buffered() -> Option<Self> {
        let memory = PathBuf::from("/dev/shm");
        let dir = tempfile::tempdir_in(&memory).or_else(|error| {
            eprintln!("{} cannot be used ({error}); on a disk instead", memory.display());
            tempfile::tempdir()
        });
        Some(Self::Buffered(dir.unwrap()))
    }

    fn simulated() -> Option<Self> {
        let world = SimWorld::new(42);
        world.set_real_time(true);
        Some(Self::Simulated(world))
    }

    fn disk_as(&self, depth: usize, durability: Durability, arena: Option<&Arena>) -> Box<dyn Disk> {
        match self {
            Self::Uring(dir) => Box::new(UringDisk::open(dir.path(), durability, depth, arena).unwrap()),
            Self::Direct(dir) => Box::new(PsyncDisk::open(dir.path(), durability, depth).unwrap()),
            Self::Buffered(dir) => Box::new(PsyncDisk::open_buffered(dir.path(), durability, depth).unwrap()),
            Self::Simulated(world) => Box::new(world.disk(depth, durability)),
        }
    }

    fn disk(&self, depth: usize) -> Box<dyn Disk> {
        self.disk_as(depth, Durability::Power, None)
    }

    fn create(&self, name: &str, blocks: usize) {
        match self {
            Self::Uring(dir) | Self::Direct(dir) | Self::Buffered(dir) => {
                std::fs::write(dir.path().join(name), vec![0; blocks * BLOCK]).unwrap();
            }
            Self::Simulated(world) => world.set_contents(name, vec![0; blocks * BLOCK]),
        }
    }

    fn contents(&self, name: &str) -> Vec<u8> {
        match self {
            Self::Uring(dir) | Self::Direct(dir) | Self::Buffered(dir) => {
                std::fs::read(dir.path().join(name)).unwrap()
            }
            Self::Simulated(world) => world.contents(name).unwrap(),
        }
    }
}

/// A directory on the disk that the build runs on: the system's own for temporary files may be in memory.
fn disk_dir() -> TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

fn is_refused(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::PermissionDenied | io::ErrorKind::Unsupported)
}

/// The content of write `token`: no two blocks are alike.
fn fill(buffer: &mut [u8], token: u64) {
    for (index, word) in buffer.chunks_exact_mut(8).enumerate() {
        let value = (token << 32 | index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        word.copy_from_slice(&value.to_le_bytes());
    }
}

fn expected(token: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    fill(&mut bytes, token);
    bytes
}

fn write_of(token: u64, file: FileSlot, block: usize, blocks: usize) -> Write {
    let mut buffer = AlignedBuf::alone(blocks * BLOCK).unwrap();
    fill(&mut buffer, token);
    Write { token, file, offset: (block * BLOCK) as u64, len: buffer.len(), buffer }
}

/// Waits for all that is in flight.
fn drain(disk: &mut dyn Disk) -> Vec<Completion> {
    let mut completions = Vec::new();
    while disk.in_flight() > 0 {
        disk.wait(Duration::MAX, &mut completions).unwrap();
    }
    completions
}

fn every_write_completes_once_and_is_there(subject: &Subject) {
    for durability in [Durability::Power, Durability::Process] {
        let lens = [1, 3, 64, 2, 16, 1, 1, 65];
        let total: usize = lens.iter().sum::<usize>() * 8;
        subject.create("a", total);
        let mut disk = subject.disk_as(5, durability, None);
        let file = disk.open("a").unwrap();
        let (mut block, mut places, mut completions) = (0, Vec::new(), Vec::new());
        for token in 0..64u64 {
            let blocks = lens[token as usize % lens.len()];
            let mut write = write_of(token, file, block, blocks);
            places.push((block, blocks));
            block += blocks;
            while let Err(back) = disk.submit(write) {
                assert_eq!((back.token, disk.in_flight()), (token, 5));
                write = back;
                disk.wait(Duration::MAX, &mut completions).unwrap();
            }
        }
        completions.extend(drain(&mut *disk));
        let mut tokens: Vec<u64> = completions.iter().map(|done| done.token).collect();
        tokens.sort_unstable();
        assert_eq!(tokens, (0..64).collect::<Vec<_>>());
        let contents = subject.contents("a");
        assert_eq!(contents.len(), total * BLOCK);
        for done in completions {
            done.result.unwrap();
            let (block, blocks) = places[done.token as usize];
            let wanted = expected(done.token, blocks * BLOCK);
            assert!(done.buffer[..] == wanted, "the buffer of write {} was touched", done.token);
            assert!(contents[block * BLOCK..][..wanted.len()] == wanted, "write {} is not there", done.token);
        }
    }
}

fn only_the_first_len_bytes_are_written(subject: &Subject) {
    subject.create("a", 4);
    let mut disk = subject.disk(1);
    let file = disk.open("a").unwrap();
    let mut write = write_of(1, file, 1, 2);
    write.len = BLOCK;
    disk.submit(write).unwrap();
    drain(&mut *disk).remove(0).result.unwrap();
    let contents = subject.contents("a");
    assert_eq!(contents[BLOCK..2 * BLOCK], expected(1, 2 * BLOCK)[..BLOCK]);
    assert!(contents[..BLOCK].iter().chain(&contents[2 * BLOCK..]).all(|&byte| byte == 0));
}

fn more_than_depth_is_given_back(subject: &Subject) {
    subject.create("a", 8);
    let mut disk = subject.disk(3);
    assert_eq!((disk.depth(), disk.in_flight()), (3, 0));
    let file = disk.open("a").unwrap();
    for block in 0..3 {
        disk.submit(write_of(block, file, block as usize, 1)).unwrap();
        assert_eq!(disk.in_flight(), block as usize + 1);
    }
    let refused = disk.submit(write_of(9, file, 5, 1)).unwrap_err();
    assert_eq!((refused.token, refused.offset), (9, 5 * BLOCK as u64));
    assert!(refused.buffer[..] == expected(9, BLOCK));
    assert_eq!(drain(&mut *disk).len(), 3);
    disk.submit(refused).unwrap();
    assert_eq!(drain(&mut *disk).remove(0).token, 9);
}

fn wake_ends_a_wait(subject: &Subject) {
    let mut disk = subject.disk(2);
    let mut completions = Vec::new();
    for _ in 0..100 {
        let wake = disk.waker();
        let waking = std::thread::spawn(move || wake());
        disk.wait(Duration::MAX, &mut completions).unwrap();
        waking.join().unwrap();
    }
    assert!(completions.is_empty());
}

fn wake_before_a_wait_counts_once(subject: &Subject) {
    let mut disk = subject.disk(2);
    let wake = disk.waker();
    let mut completions = Vec::new();
    for _ in 0..3 {
        wake();
        wake();
        disk.wait(Duration::MAX, &mut completions).unwrap();
        let (started, timeout) = (Instant::now(), Duration::from_millis(20));
        disk.wait(timeout, &mut completions).unwrap();
        assert!(started.elapsed() >= timeout, "a wait ended without a reason");
    }
}

fn wakes_while_writes_are_in_flight(subject: &Subject) {
    subject.create("a", 256);
    let mut disk = subject.disk(4);
    let file = disk.open("a").unwrap();
    let wake = disk.waker();
    let stop = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let waking = std::thread::spawn({
        let stop = stop.clone();
        move || {
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                wake();
                std::thread::yield_now();
            }
        }
    });
    let mut completions = Vec::new();
    for block in 0..256 {
        let mut write = write_of(block, file, block as usize, 1);
        while let Err(back) = disk.submit(write) {
            write = back;
            disk.wait(Duration::MAX, &mut completions).unwrap();
        }
    }
    completions.extend(drain(&mut *disk));
    stop.store(true, std::sync::atomic::Ordering::Relaxed);
    waking.join().unwrap();
    assert_eq!(completions.len(), 256);
    assert!(completions.iter().all(|done| done.result.is_ok()));
}

fn waker_outlives_the_disk(subject: &Subject) {
    let wake = subject.disk(1).waker();
    wake();
}

fn wait_for_nothing_ends(subject: &Subject) {
    let mut disk = subject.disk(1);
    let mut completions = Vec::new();
    disk.wait(Duration::ZERO, &mut completions).unwrap();
    disk.wait(Duration::from_millis(1), &mut completions).unwrap();
    assert!(completions.is_empty());
}

fn drop_waits_for_what_is_in_flight(subject: &Subject) {
    subject.create("a", 16 * 64);
    for panics in [false, true] {
        let arena = Arena::new(64 * BLOCK, 16).unwrap();
        let mut disk = subject.disk_as(16, Durability::Power, Some(&arena));
        let file = disk.open("a").unwrap();
        let unwound = std::panic::catch_unwind(AssertUnwindSafe(move || {
            for index in 0..16 {
                let mut buffer = arena.try_take().unwrap();
                fill(&mut buffer, index + 1);
                let (offset, len) = (index * buffer.len() as u64, buffer.len());
                disk.submit(Write { token: index, file, offset, buffer, len }).unwrap();
            }
            if panics {
                std::panic::resume_unwind(Box::new("planned"));
            }
            drop(disk);
            assert_eq!(arena.available(), 16);
        }));
        assert_eq!(unwound.is_err(), panics);
        let contents = subject.contents("a");
        for index in 0..16 {
            let wanted = expected(index as u64 + 1, 64 * BLOCK);
            assert!(contents[index * wanted.len()..][..wanted.len()] == wanted, "write {index} is not there");
        }
        subject.create("a", 16 * 64);
    }
}

fn what_cannot_be_written_completes_with_an_error(subject: &Subject) {
    subject.create("a", 4);
    let mut disk = subject.disk(8);
    let file = disk.open("a").unwrap();
    let change: [fn(&mut Write); 7] = [
        |write| write.offset = 512,
        |write| write.len = 0,
        |write| write.len = BLOCK - 1,
        |write| write.len = 2 * BLOCK,
        |write| write.offset = u64::MAX - 4095,
        |write| write.offset = (i64::MAX as u64) / 4096 * 4096,
        |write| write.file = FileSlot(77),
    ];
    for (token, change) in change.iter().enumerate() {
        let mut write = write_of(token as u64, file, 0, 1);
        change(&mut write);
        disk.submit(write).unwrap();
        assert_eq!(disk.in_flight(), 1);
        let done = drain(&mut *disk).remove(0);
        assert_eq!(done.result.unwrap_err().kind(), io::ErrorKind::InvalidInput, "write {token}");
        assert!(done.token == token as u64 && done.buffer[..] == expected(token as u64, BLOCK));
    }
    disk.submit(write_of(1, file, 0, 1)).unwrap();
    disk.submit(Write { file: FileSlot(77), ..write_of(2, file, 1, 1) }).unwrap();
    assert_eq!(drain(&mut *disk).iter().filter(|done| done.result.is_ok()).count(), 1);
    assert!(subject.contents("a")[BLOCK..].iter().all(|&byte| byte == 0));
}

fn names_are_names_of_files_in_the_directory(subject: &Subject) {
    let mut disk = subject.disk(1);
    for name in ["", ".", "..", "a/b", "/etc/passwd", "a\0"] {
        assert_eq!(disk.open(name).unwrap_err().kind(), io::ErrorKind::InvalidInput, "{name:?}");
    }
    assert_eq!(disk.open("missing").unwrap_err().kind(), io::ErrorKind::NotFound);
}

fn files_are_kept_apart(subject: &Subject) {
    let mut disk = subject.disk(8);
    // More than are registered with the kernel at once.
    let names: Vec<String> = (0..70).map(|index| format!("f{index}")).collect();
    let slots: Vec<FileSlot> = names
        .iter()
        .map(|name| {
            subject.create(name, 1);
            disk.open(name).unwrap()
        })
        .collect();
    assert_eq!(slots.iter().collect::<std::collections::HashSet<_>>().len(), 70);
    for (token, &file) in slots.iter().enumerate() {
        disk.submit(write_of(token as u64, file, 0, 1)).unwrap();
        drain(&mut *disk).remove(0).result.unwrap();
    }
    disk.close(slots[3]);
    subject.create("again", 1);
    let again = disk.open("again").unwrap();
    disk.submit(write_of(99, again, 0, 1)).unwrap();
    drain(&mut *disk).remove(0).result.unwrap();
    for (token, name) in names.iter().enumerate() {
        assert!(subject.contents(name) == expected(token as u64, BLOCK), "{name}");
    }
    assert!(subject.contents("again") == expected(99, BLOCK));
}

fn buffers_of_any_arena_are_taken(subject: &Subject) {
    subject.create("a", 16);
    let arena = Arena::new(2 * BLOCK, 4).unwrap();
    let mut disk = subject.disk_as(8, Durability::Process, Some(&arena));
    let file = disk.open("a").unwrap();
    for index in 0..4 {
        let mut buffer = arena.try_take().unwrap();
        fill(&mut buffer, index);
        let len = buffer.len();
        disk.submit(Write { token: index, file, offset: index * len as u64, buffer, len }).unwrap();
        disk.submit(write_of(index + 4, file, 8 + 2 * index as usize, 2)).unwrap();
    }
    assert!(drain(&mut *disk).iter().all(|done| done.result.is_ok()));
    let contents = subject.contents("a");
    for index in 0..8 {
        assert!(
            contents[index * 2 * BLOCK..][..2 * BLOCK] == expected(index as u64, 2 * BLOCK),
            "write {index}"
        );
    }
    drop(disk);
    assert_eq!(arena.available(), 4);
}

fn an_idle_disk_may_change_its_thread(subject: &Subject) {
    subject.create("a", 8);
    let mut disk = subject.disk(2);
    let file = disk.open("a").unwrap();
    for block in 0..8 {
        disk = std::thread::spawn(move || {
            disk.submit(write_of(block, file, block as usize, 1)).unwrap();
            drain(&mut *disk).remove(0).result.unwrap();
            let wake = disk.waker();
            wake();
            disk.wait(Duration::MAX, &mut Vec::new()).unwrap();
            disk
        })
        .join()
        .unwrap();
    }
    let contents = subject.contents("a");
    assert!((0..8).all(|block| contents[block * BLOCK..][..BLOCK] == expected(block as u64, BLOCK)));
}

fn tells_what_it_is(subject: &Subject) {
    let arena = Arena::new(BLOCK, 1).unwrap();
    let info = subject.disk_as(1, Durability::Power, Some(&arena)).info();
    let (engine, direct) = match subject {
        Subject::Uring(_) => ("io_uring", true),
        Subject::Direct(_) => ("pwritev2", true),
        Subject::Buffered(_) => ("pwritev2", false),
        Subject::Simulated(_) => ("simulated", true),
    };
    let refused_direct = info.fallbacks.iter().any(|text| text.contains("O_DIRECT"));
    assert_eq!((info.engine, info.direct), (engine, direct && !refused_direct));
    if let Subject::Uring(_) = subject {
        assert_eq!(info.registered, info.fallbacks.is_empty());
    }
}

macro_rules! suite {
    ($($contract:ident)+) => {
        suite!(@ uring $($contract)+);
        suite!(@ direct $($contract)+);
        suite!(@ buffered $($contract)+);
        suite!(@ simulated $($contract)+);
    };
    (@ $engine:ident $($contract:ident)+) => {
        mod $engine {
            use super::Subject;
            $(
                #[test]
                fn $contract() {
                    if let Some(subject) = Subject::$engine() {
                        super::$contract(&subject);
                    }
                }
            )+
        }
    };
}

suite! {
    every_write_completes_once_and_is_there
    only_the_first_len_bytes_are_written
    more_than_depth_is_given_back
    wake_ends_a_wait
    wake_before_a_wait_counts_once
    wakes_while_writes_are_in_flight
    waker_outlives_the_disk
    wait_for_nothing_ends
    drop_waits_for_what_is_in_flight
    what_cannot_be_written_completes_with_an_error
    names_are_names_of_files_in_the_directory
    files_are_kept_apart
    buffers_of_any_arena_are_taken
    an_idle_disk_may_change_its_thread
    tells_what_it_is
}
