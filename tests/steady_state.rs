//! What an append with room in the lane does not do: allocate, and enter the kernel more than once in 64 KiB.

#[path = "common/allocator.rs"]
mod allocator;
mod common;

use std::cell::Cell;
use std::path::Path;
use std::process::Command;
use std::time::Duration;
use std::{env, fs};

use allocator::Telling;
use tidelog::{ChangelogWriter, KeyGroup, KeyGroupRange};

thread_local! {
    /// How often the thread asked for memory.
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

fn allocations() -> u64 {
    ALLOCATIONS.get()
}

fn count(taken: usize, _given: usize) {
    if taken > 0 {
        // A thread that ends may still allocate when its storage is gone.
        let _ = ALLOCATIONS.try_with(|count| count.set(count.get() + 1));
    }
}

#[global_allocator]
static ALLOCATOR: Telling = Telling(count);

/// A quarter of the lane, so that there is room after each sync; all of them go several times round the lane.
const CHUNK_BYTES: usize = 1 << 20;
const CHUNKS: usize = 12;
/// Of the chunks that are traced, in changes of 256 B.
const TRACED_CHANGES: usize = 1024;
const WAKE_STEP_BYTES: usize = 64 << 10;

fn sync(writer: &ChangelogWriter) {
    let durable = writer.sync().wait().expect("the disk works");
    writer.truncate(durable).expect("what is durable was appended");
}

#[test]
fn the_counter_counts() {
    let before = allocations();
    drop(std::hint::black_box(Box::new(1)));
    assert_eq!(allocations(), before + 1);
}

#[test]
fn appends_allocate_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let changelog = common::open(dir.path());
    let mut writer = changelog.create_writer("steady", KeyGroupRange::ALL).unwrap();
    let value = [7; 1000];
    for chunk in 0..CHUNKS {
        let before = allocations();
        let mut bytes = 0;
        for index in 0.. {
            // From nothing to a few hundred bytes, so that frames end everywhere in the lane.
            let len = index * 37 % value.len();
            if bytes + len > CHUNK_BYTES {
                break;
            }
            bytes += len + 16;
            let (key_group, value) = (KeyGroup(index as u16 % 128), &value[..len]);
            match index % 4 {
                0 => writer.append(key_group, value),
                1 => writer.try_append(key_group, value),
                2 => writer.append_with(key_group, len, |slice| slice.copy_from_slice(value)),
                _ => writer.append_metadata(value),
            }
            .expect("there is room");
        }
        assert_eq!(allocations(), before, "in chunk {chunk}");
        sync(&writer);
    }
}

/// Whatever they are for: the calls that the appending thread makes while it appends are counted by strace. It pauses now
/// and then, so that a spiller with nothing to do falls asleep. The test runs itself under strace; where that cannot be,
/// it says so and checks nothing, unless `TIDELOG_STRACE=required`.
#[test]
fn appends_call_the_kernel_once_in_64_kib_at_most() {
    const NAME: &str = "appends_call_the_kernel_once_in_64_kib_at_most";
    const ROLE: &str = "TIDELOG_TRACED_DIRECTORY";
    if let Some(directory) = env::var_os(ROLE) {
        return append_between_marks(Path::new(&directory));
    }
    let works = Command::new("strace").args(["-o", "/dev/null", "true"]).status();
    if !works.is_ok_and(|status| status.success()) {
        let required = env::var_os("TIDELOG_STRACE").is_some_and(|value| value == "required");
        assert!(!required, "strace does not work here");
        eprintln!("skipped: strace is missing or may not trace");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let log = dir.path().join("log");
    let status = Command::new("strace")
        .args(["-f", "-qq", "-s", "256", "-o"])
        .arg(&log)
        .arg(env::current_exe().unwrap())
        .args(["--exact", NAME, "--test-threads=1"])
        .env(ROLE, dir.path())
        .status()
        .unwrap();
    assert!(status.success());

    let trace = fs::read_to_string(&log).unwrap();
    let mark = |what: &str, chunk: usize| {
        let text = format!("mkdir(\"{}/{what}-{chunk}\"", dir.path().display());
        trace
            .lines()
            .position(|line| line.contains(&text))
            .unwrap_or_else(|| panic!("no {text} in the trace"))
    };
    for chunk in 0..CHUNKS {
        let (begin, end) = (mark("begin", chunk), mark("end", chunk));
        let lines: Vec<&str> = trace.lines().skip(begin + 1).take(end - begin - 1).collect();
        let thread = trace.lines().nth(begin).and_then(|line| line.split_whitespace().next()).unwrap();
        // A call that another thread's interrupts is printed in two lines.
        let is_call = |line: &str| !line.contains("resumed>") && !line.contains("clock_nanosleep(");
        let calls: Vec<&&str> = lines
            .iter()
            .filter(|line| line.split_whitespace().next() == Some(thread) && is_call(line))
            .collect();
        let frames = TRACED_CHANGES * 264;
        assert!(calls.len() <= frames.div_ceil(WAKE_STEP_BYTES), "{} calls: {calls:#?}", calls.len());
    }
}

fn append_between_marks(directory: &Path) {
    let changelog = common::open(directory);
    let mut writer = changelog.create_writer("steady", KeyGroupRange::ALL).unwrap();
    let names: Vec<_> = (0..CHUNKS)
        .map(|chunk| ["begin", "end"].map(|mark| directory.join(format!("{mark}-{chunk}"))))
        .collect();
    for [begin, end] in names {
        fs::create_dir(begin).unwrap();
        for index in 0..TRACED_CHANGES {
            writer.append(KeyGroup(index as u16 % 128), &[7; 256]).expect("there is room");
            if index % 8 == 0 {
                std::thread::sleep(Duration::from_micros(100));
            }
        }
        fs::create_dir(end).unwrap();
        sync(&writer);
    }
}
