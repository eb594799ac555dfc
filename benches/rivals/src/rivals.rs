//! The engines that could write segments, on the load of the spiller: which of them is fastest, what it costs, and how long
//! a durable write takes.
//!
//! Every engine does the same: it fills a block of 256 KiB with frames out of a ring, puts a checksum over it, and writes
//! it to the next place of a recycled file, with 16 blocks in flight; one thread fills, whoever writes. Durable means
//! RWF_DSYNC, or O_DSYNC where an engine has no flags for a write. The engines take turns in each round.
//!
//! A second table writes ready-made blocks, so that the project's own engine can be told from the crate below it.
//!
//! Run by `cargo bench --manifest-path benches/rivals/Cargo.toml`.

#[path = "../../common/mod.rs"]
mod common;
mod plain;
mod runtimes;
mod threads;

use std::fs::{File, OpenOptions};
use std::hint::black_box;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::sync::Arc;

use common::bare::{BLOCK_BYTES, DEPTH, Spent};
use common::{Bench, Table, interleave, median, quantile, ratio};
use tidelog_io::aligned::{AlignedBuf, Arena};
use tidelog_io::directory::RealFiles;
use tidelog_io::disk::Files;
use tidelog_io::engine::EngineChoice;
use xxhash_rust::xxh3::xxh3_64;

const GIB: f64 = (1u64 << 30) as f64;
const FILE_NAME: &str = "recycled";
/// As large as a lane: frames come from a ring that is in no core's own cache.
const SOURCE_BYTES: usize = 4 << 20;

/// What is to be written.
struct Load {
    dir: PathBuf,
    file_bytes: u64,
    blocks: u64,
    durable: bool,
    /// Whether blocks are filled and sealed first.
    fills: bool,
    source: Vec<u8>,
}

/// What that took.
struct Outcome {
    spent: Spent,
    /// From the submission of a block to its completion, in seconds.
    latencies: Vec<f64>,
}

struct Rival {
    name: &'static str,
    run: fn(&Arc<Load>) -> io::Result<Outcome>,
}

const PLAIN: Rival = Rival { name: "io-uring 0.7", run: plain::run };
const OURS: Rival =
    Rival { name: "tidelog-io, io_uring", run: |load| threads::run_ours(load, EngineChoice::IoUring) };

const RIVALS: [Rival; 6] = [
    PLAIN,
    OURS,
    Rival { name: "tidelog-io, pwritev2", run: |load| threads::run_ours(load, EngineChoice::Pwritev2) },
    Rival { name: "pwritev2, 16 threads", run: threads::run },
    Rival { name: "tokio-uring 0.5", run: runtimes::run_tokio_uring },
    Rival { name: "glommio 0.9", run: runtimes::run_glommio },
];

fn main() {
    let mut bench = Bench::start(
        "rivals",
        "Engines that could write segments, on the load of the spiller.",
        &[
            ("--mib NUMBER", "how much each leg writes (2048)"),
            ("--rounds NUMBER", "how often (5)"),
            ("--dir PATH", "a directory on the device to use"),
        ],
    );
    let bytes = bench.number("--mib", bench.size(2048, 8)).max(8) << 20;
    let rounds = bench.number("--rounds", bench.size(5, 1)) as usize;
    let scratch = bench.directory();
    let file_bytes = bench.size(1 << 30, 8 << 20);
    let dir = scratch.make("file");
    bench.progress("writing the file once");
    RealFiles::open(&dir).and_then(|files| files.create(FILE_NAME, file_bytes)).expect("room for the file");
    let source: Vec<u8> = (0..SOURCE_BYTES).map(|index| ((index * 31) >> 3) as u8).collect();
    let load = |durable, fills| {
        let (dir, source) = (dir.clone(), source.clone());
        Arc::new(Load { dir, file_bytes, blocks: bytes / BLOCK_BYTES as u64, durable, fills, source })
    };
    for (durable, promise) in [(false, "without durability"), (true, "durable")] {
        let title = format!("Blocks filled and sealed, {promise}");
        compare(&mut bench, title, &RIVALS, &load(durable, true), rounds);
    }
    for (durable, promise) in [(false, "without durability"), (true, "durable")] {
        let title = format!("Ready-made blocks, {promise}");
        compare(&mut bench, title, &[PLAIN, OURS], &load(durable, false), rounds);
    }
    bench.finish();
}

fn compare(bench: &mut Bench, title: String, rivals: &[Rival], load: &Arc<Load>, rounds: usize) {
    let mut cpu = vec![Vec::new(); rivals.len()];
    let mut latencies = vec![Vec::new(); rivals.len()];
    let mut failures = vec![None; rivals.len()];
    let bytes = (load.blocks * BLOCK_BYTES as u64) as f64;
    let figures = interleave(rounds, rivals.len(), |leg| {
        let name = rivals[leg].name;
        match (rivals[leg].run)(load) {
            Ok(Outcome { spent, latencies: seen }) => {
                assert_eq!(seen.len() as u64, load.blocks, "{name} writes every block once");
                let speed = bytes / spent.seconds / 1e6;
                bench.progress(&format!("{title}: {name} {speed:.0} MB/s"));
                cpu[leg].push(spent.cpu_seconds / (bytes / GIB));
                latencies[leg].extend(seen);
                speed
            }
            Err(error) => {
                bench.progress(&format!("{title}: {name} does not work here: {error}"));
                failures[leg] = Some(error.to_string());
                f64::NAN
            }
        }
    });
    let mut table = Table::new(
        format!("{title}; {:.2} GiB a leg, medians of {rounds} rounds", bytes / GIB),
        &["engine", "MB/s", "of_io-uring", "cpu_s/GiB", "p50_ms", "p99_ms"],
    );
    for (leg, rival) in rivals.iter().enumerate() {
        if let Some(failure) = &failures[leg] {
            bench.note(format!("{} failed: {failure}", rival.name));
        }
        table.row([
            rival.name.into(),
            median(&figures[leg]).into(),
            ratio(&figures[leg], &figures[0]).into(),
            median(&cpu[leg]).into(),
            (quantile(&latencies[leg], 0.5) * 1e3).into(),
            (quantile(&latencies[leg], 0.99) * 1e3).into(),
        ]);
    }
    bench.table(table);
}

impl Load {
    /// Where a block goes, in bytes.
    fn offset(&self, block: u64) -> u64 {
        block % (self.file_bytes / BLOCK_BYTES as u64) * BLOCK_BYTES as u64
    }

    /// Fills a block and seals it, as the spiller does.
    fn fill(&self, block: u64, buffer: &mut [u8]) {
        if !self.fills {
            return;
        }
        let start = block as usize * BLOCK_BYTES % SOURCE_BYTES;
        buffer.copy_from_slice(black_box(&self.source[start..start + BLOCK_BYTES]));
        buffer[..8].copy_from_slice(&block.to_le_bytes());
        let checksum = xxh3_64(buffer);
        buffer[8..16].copy_from_slice(&checksum.to_le_bytes());
    }

    fn path(&self) -> PathBuf {
        self.dir.join(FILE_NAME)
    }

    /// The file for direct writes, each durable by itself with `dsync`.
    fn open(&self, dsync: bool) -> io::Result<File> {
        let flags = if dsync { libc::O_DIRECT | libc::O_DSYNC } else { libc::O_DIRECT };
        OpenOptions::new().write(true).custom_flags(flags).open(self.path())
    }
}

/// A buffer for each block in flight, in huge pages and already written to.
fn buffers(arena: &Arena) -> Vec<AlignedBuf> {
    let mut buffers: Vec<AlignedBuf> = std::iter::from_fn(|| arena.try_take()).collect();
    buffers.iter_mut().for_each(|buffer| buffer.fill(0x5a));
    buffers
}

fn arena() -> io::Result<Arena> {
    Arena::new(BLOCK_BYTES, DEPTH)
}

fn whole(result: io::Result<usize>) -> io::Result<()> {
    match result? {
        BLOCK_BYTES => Ok(()),
        short => Err(io::Error::other(format!("{short} bytes of a block were written"))),
    }
}
