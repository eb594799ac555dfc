//! Durable group commit: each of two threads appends 1 MiB, then waits for one sync; against bare writers that do the same.
//!
//! The floor has a thread and a recycled file for each writer, and writes 1 MiB at a time by `pwritev2` with O_DIRECT and
//! RWF_DSYNC from huge pages: once with ready-made bytes, once after copying the values into its buffer one by one, as
//! everyone has to who has values to write. The second is the one that does the same as we do, and the one of the target;
//! the first is what the device takes from two threads, and shows what any copy costs. The legs take turns.
//!
//! MB/s are of values everywhere.
//!
//! Run by `cargo bench --bench group_commit`; without `--bench` or with `--smoke` it only shows that it works.
#![forbid(unsafe_code)]

mod common;

use std::fs::{File, OpenOptions};
use std::hint::black_box;
use std::io::IoSlice;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::{Barrier, Mutex};
use std::time::{Duration, Instant};

use common::{Bench, Limit, Table, interleave, median, quantile, ratio};
use rustix::fs::OFlags;
use rustix::io::ReadWriteFlags;
use tidelog::{Changelog, KeyGroup, KeyGroupRange, Options};
use tidelog_io::aligned::{AlignedBuf, Arena};
use tidelog_io::directory::RealFiles;
use tidelog_io::disk::Files;

const COMMIT_BYTES: usize = 1 << 20;
const THREADS: usize = 2;
const LEGS: [&str; 3] = ["bare, ready-made", "bare, copying values", "tidelog"];

fn main() {
    let mut bench = Bench::start(
        "group_commit",
        "1 MiB of values on each of two threads, then one wait, against bare O_DIRECT writers.",
        &[
            ("--commits NUMBER", "commits of each thread in a leg (300)"),
            ("--rounds NUMBER", "how often (7)"),
            ("--dir PATH", "a directory on the device to use"),
        ],
    );
    let commits = bench.number("--commits", bench.size(300, 2)) as usize;
    let rounds = bench.number("--rounds", bench.size(7, 1)) as usize;
    let dir = bench.directory();
    bench.progress("writing all files once");
    let bare_dir = dir.make("bare");
    let file_bytes = bench.size(256 << 20, 2 << 20);
    let arena = Arena::new(COMMIT_BYTES, THREADS).expect("memory for the bare writers");
    let bare: Vec<Mutex<BareFile>> = (0..THREADS)
        .map(|thread| Mutex::new(BareFile::create(&bare_dir, thread, file_bytes, &arena)))
        .collect();
    let options = Options::new(format!("file://{}", dir.join("bucket").display()), dir.join("local"))
        .preemptive_upload(false)
        .segment_bytes(bench.size(256 << 20, 2 << 20))
        .local_bytes(bench.size(2 << 30, 32 << 20));
    let changelog = Changelog::open(options).expect("the changelog opens");
    let ours = |value: &[u8], commits: usize| {
        on_threads(|_, start| {
            let mut writer = changelog.create_writer("bench", KeyGroupRange::ALL).expect("a writer");
            let times = start.commits(commits, |commit| {
                for index in 0..COMMIT_BYTES / value.len() {
                    writer.append(KeyGroup(index as u16 % 128), value).expect("there is room");
                }
                writer.sync().wait().expect("the disk works");
                if commit % 16 == 0 {
                    writer.truncate(writer.durable_sequence_number()).expect("what is durable was appended");
                }
            });
            writer.truncate_and_close();
            times
        })
    };
    ours(&[0x5a; 4096], bench.size(1024, 4));

    let mut table = Table::new(
        format!(
            "1 MiB a thread, then one wait; {THREADS} threads; medians of {rounds} rounds of {commits} commits"
        ),
        &["value_bytes", "what", "MB/s", "of_ready-made", "of_copying", "p50_ms", "p99_ms"],
    );
    for value_len in [256, 4096] {
        let value = vec![0x5a; value_len];
        let mut times = vec![Vec::new(); LEGS.len()];
        let figures = interleave(rounds, LEGS.len(), |leg| {
            let run = match leg {
                2 => ours(&value, commits),
                _ => on_threads(|thread, start| {
                    let mut file = bare[thread].lock().expect("no bare writer has panicked");
                    start.commits(commits, |_| {
                        if leg == 1 {
                            file.fill(&value);
                        }
                        file.commit();
                    })
                }),
            };
            times[leg].extend(&run.times);
            let speed = (THREADS * commits * COMMIT_BYTES) as f64 / run.seconds / 1e6;
            bench.progress(&format!("{value_len} B, {}: {speed:.0} MB/s", LEGS[leg]));
            speed
        });
        for (leg, name) in LEGS.iter().enumerate() {
            table.row([
                value_len.into(),
                (*name).into(),
                median(&figures[leg]).into(),
                ratio(&figures[leg], &figures[0]).into(),
                ratio(&figures[leg], &figures[1]).into(),
                (quantile(&times[leg], 0.5) * 1e3).into(),
                (quantile(&times[leg], 0.99) * 1e3).into(),
            ]);
        }
        bench.target(
            format!("share of bare writers that copy the same values, {value_len} B"),
            ratio(&figures[2], &figures[1]),
            Limit::AtLeast(0.80),
        );
    }
    bench.table(table);
    for engine in changelog.engines() {
        bench.note(format!("engine: {engine:?}"));
    }
    changelog.close(Duration::from_secs(60)).expect("the changelog closes");
    bench.finish();
}

/// What a leg took.
struct Run {
    seconds: f64,
    /// Of each commit, in seconds.
    times: Vec<f64>,
}

/// Lets the threads of a leg begin together.
struct Start<'a>(&'a Barrier);

/// When a thread's commits began and ended, and how long each took.
struct Commits {
    started_at: Instant,
    ended_at: Instant,
    times: Vec<f64>,
}

impl Start<'_> {
    fn commits(&self, commits: usize, mut commit: impl FnMut(usize)) -> Commits {
        let mut times = Vec::with_capacity(commits);
        self.0.wait();
        let started_at = Instant::now();
        for index in 0..commits {
            let asked_at = Instant::now();
            commit(index);
            times.push(asked_at.elapsed().as_secs_f64());
        }
        Commits { started_at, ended_at: Instant::now(), times }
    }
}

fn on_threads(body: impl Fn(usize, &Start<'_>) -> Commits + Sync) -> Run {
    let barrier = Barrier::new(THREADS);
    let runs: Vec<Commits> = std::thread::scope(|scope| {
        let spawn = |thread| {
            let (body, barrier) = (&body, &barrier);
            scope.spawn(move || body(thread, &Start(barrier)))
        };
        let threads: Vec<_> = (0..THREADS).map(spawn).collect();
        threads.into_iter().map(|thread| thread.join().expect("a thread commits")).collect()
    });
    let started_at = runs.iter().map(|run| run.started_at).min().expect("there are threads");
    let ended_at = runs.iter().map(|run| run.ended_at).max().expect("there are threads");
    Run {
        seconds: (ended_at - started_at).as_secs_f64(),
        times: runs.into_iter().flat_map(|run| run.times).collect(),
    }
}

/// A file that was written once, and is written again round and round.
struct BareFile {
    file: File,
    bytes: u64,
    at: u64,
    buffer: AlignedBuf,
}

impl BareFile {
    fn create(dir: &Path, thread: usize, bytes: u64, arena: &Arena) -> BareFile {
        let name = format!("bare-{thread}");
        RealFiles::open(dir).and_then(|files| files.create(&name, bytes)).expect("room for a file");
        let open = |flags: OFlags| {
            OpenOptions::new().write(true).custom_flags(flags.bits() as i32).open(dir.join(&name))
        };
        let file = open(OFlags::DIRECT).or_else(|_| open(OFlags::empty())).expect("it was just made");
        let mut buffer = arena.try_take().expect("a buffer for each thread");
        buffer.fill(0x5a);
        let mut bare = BareFile { file, bytes, at: 0, buffer };
        for _ in 0..bytes / COMMIT_BYTES as u64 {
            bare.commit();
        }
        bare
    }

    fn fill(&mut self, value: &[u8]) {
        let value = black_box(value);
        for slot in self.buffer.chunks_exact_mut(value.len()) {
            slot.copy_from_slice(value);
        }
    }

    fn commit(&mut self) {
        if self.at + COMMIT_BYTES as u64 > self.bytes {
            self.at = 0;
        }
        let slices = [IoSlice::new(&self.buffer)];
        let written = rustix::io::pwritev2(&self.file, &slices, self.at, ReadWriteFlags::DSYNC);
        assert_eq!(written.expect("the disk works"), COMMIT_BYTES, "a short write");
        self.at += COMMIT_BYTES as u64;
    }
}
