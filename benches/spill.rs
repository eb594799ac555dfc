//! Sustained spill of 256 B values, end to end: append, checksum, block, segment; against an engine driven bare.
//!
//! Two producers append as fast as they can and sync at the end; what is on the disk is truncated now and then, so that
//! segments are recycled and nothing is uploaded. The floor writes ready-made blocks of the same size, as deep, from a
//! huge-page arena into a file that was written before, with the same promise of durability. Each leg of a round writes
//! the same number of bytes, the legs take turns, and all files were written once before the first one.
//!
//! MB/s are of values for the changelog, and of blocks for the floor: headers, tables and padding count against us. CPU
//! time is of the whole process, with the producers.
//!
//! The memory budget is 64 MiB instead of 256: as nothing is uploaded here, blocks that wait for their upload in memory
//! would only make the spiller write from buffers that are in no near cache, where the floor writes the same ones again
//! and again.
//!
//! Run by `cargo bench --bench spill`; without `--bench` or with `--smoke` it only shows that it works.
#![forbid(unsafe_code)]

#[path = "common/bare.rs"]
mod bare;
mod common;

use std::path::Path;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use bare::{BareWriter, Spent};
use common::{Bench, Limit, ScratchDir, Table, cpu_time, interleave, median, ratio};
use tidelog::{Changelog, Durability, EngineChoice, KeyGroup, KeyGroupRange, Options};

const VALUE_LEN: usize = 256;
const PRODUCERS: usize = 2;
const GIB: f64 = (1u64 << 30) as f64;

fn main() {
    let mut bench = Bench::start(
        "spill",
        "Sustained spill of 256 B values, end to end, against an engine driven bare.",
        &[
            ("--gib NUMBER", "how much each leg writes (8)"),
            ("--rounds NUMBER", "how often (3)"),
            ("--dir PATH", "a directory on the device to use; 10 GiB are needed there"),
        ],
    );
    let bytes = bench.number("--gib", bench.size(8, 0)) << 30;
    let bytes = bytes.max(4 << 20);
    let rounds = bench.number("--rounds", bench.size(3, 1)) as usize;
    let dir = bench.directory();
    for (durability, promise) in
        [(Durability::Process, "without durability"), (Durability::Power, "RWF_DSYNC")]
    {
        compare(&mut bench, &dir, durability, promise, bytes, rounds);
    }
    bench.finish();
}

fn compare(
    bench: &mut Bench,
    dir: &ScratchDir,
    durability: Durability,
    promise: &str,
    bytes: u64,
    rounds: usize,
) {
    bench.progress(&format!("{promise}: writing all files once"));
    let place = |name: &str| dir.make(&format!("{name}-{durability:?}"));
    let mut bare =
        BareWriter::open(&place("bare"), durability, EngineChoice::Auto, bench.size(1 << 30, 4 << 20))
            .expect("the bare writer opens");
    let ours: Vec<Ours> = [EngineChoice::Auto, EngineChoice::Pwritev2]
        .into_iter()
        .map(|engine| Ours::open(bench, &place(&format!("{engine:?}")), durability, engine))
        .collect();

    let mut cpu = vec![Vec::new(); 1 + ours.len()];
    let figures = interleave(rounds, 1 + ours.len(), |leg| {
        let spent = match leg {
            0 => bare.write(bytes),
            _ => ours[leg - 1].spill(bytes),
        };
        let gib = bytes as f64 / GIB;
        cpu[leg].push(spent.cpu_seconds / gib);
        let speed = bytes as f64 / spent.seconds / 1e6;
        let name = if leg == 0 { "bare" } else { ours[leg - 1].engine };
        bench.progress(&format!("{promise}: {name} {speed:.0} MB/s, {:.2} s/GiB", spent.cpu_seconds / gib));
        speed
    });

    let mut table = Table::new(
        format!(
            "256 B end to end, {:.2} GiB a leg, {promise}; medians of {rounds} rounds",
            bytes as f64 / GIB
        ),
        &["what", "MB/s", "of_bare", "cpu_s/GiB"],
    );
    let bare_name = format!("bare {}", bare.engine());
    for leg in 0..figures.len() {
        let name = if leg == 0 { &bare_name } else { &format!("tidelog {}", ours[leg - 1].engine) };
        table.row([
            name.clone().into(),
            median(&figures[leg]).into(),
            ratio(&figures[leg], &figures[0]).into(),
            median(&cpu[leg]).into(),
        ]);
    }
    bench.table(table);
    let least = if durability == Durability::Process { 0.90 } else { 0.80 };
    let share = |leg: usize| ratio(&figures[leg], &figures[0]);
    bench.target(format!("share of bare writes, {promise}"), share(1), Limit::AtLeast(least));
    bench.target(format!("share of bare writes by pwritev2, {promise}"), share(2), Limit::AtLeast(0.75));
    bench.target(format!("CPU s/GiB, {promise}"), median(&cpu[1]), Limit::AtMost(0.35));
    for ours in ours {
        if ours.uploaded() {
            bench.note(format!(
                "{}: the local directory ran full and something was uploaded; the figures are too low",
                ours.engine
            ));
        }
        ours.changelog.close(Duration::from_secs(60)).expect("the changelog closes");
    }
}

/// A changelog whose segments have all been written once.
struct Ours {
    changelog: Changelog,
    engine: &'static str,
    bucket: std::path::PathBuf,
    truncate_every: u64,
}

impl Ours {
    fn open(bench: &Bench, dir: &Path, durability: Durability, engine: EngineChoice) -> Ours {
        let bucket = dir.join("bucket");
        let options = Options::new(format!("file://{}", bucket.display()), dir.join("local"))
            .engine(engine)
            .durability(durability)
            .preemptive_upload(false)
            .memory_bytes(64 << 20)
            .segment_bytes(bench.size(256 << 20, 1 << 20))
            .local_bytes(bench.size(2 << 30, 32 << 20));
        let changelog = Changelog::open(options).expect("the changelog opens");
        let engine = changelog.engines()[0].engine;
        let truncate_every = bench.size(64 << 20, 1 << 20) / VALUE_LEN as u64;
        let ours = Ours { changelog, engine, bucket, truncate_every };
        ours.spill(bench.size(3 << 30, 4 << 20));
        ours
    }

    /// Appends `bytes` of values and waits until they are on the disk.
    fn spill(&self, bytes: u64) -> Spent {
        let appends = bytes / (VALUE_LEN * PRODUCERS) as u64;
        let start = Barrier::new(PRODUCERS + 1);
        let done = Barrier::new(PRODUCERS + 1);
        let produce = |producer: usize| {
            let mut writer = self
                .changelog
                .create_writer(format!("bench-{producer}"), KeyGroupRange::ALL)
                .expect("a writer");
            let value = [0x5a; VALUE_LEN];
            start.wait();
            for index in 0..appends {
                writer.append(KeyGroup(index as u16 % 128), &value).expect("there is room in time");
                if index.is_multiple_of(self.truncate_every) {
                    writer.truncate(writer.durable_sequence_number()).expect("what is durable was appended");
                }
            }
            writer.sync().wait().expect("the disk works");
            done.wait();
            writer.truncate_and_close();
        };
        std::thread::scope(|scope| {
            for producer in 0..PRODUCERS {
                scope.spawn(move || produce(producer));
            }
            start.wait();
            let (started_at, cpu_before) = (Instant::now(), cpu_time());
            done.wait();
            Spent {
                seconds: started_at.elapsed().as_secs_f64(),
                cpu_seconds: (cpu_time() - cpu_before).as_secs_f64(),
            }
        })
    }

    /// Whether anything came into the bucket.
    fn uploaded(&self) -> bool {
        std::fs::read_dir(&self.bucket).is_ok_and(|mut entries| entries.next().is_some())
    }
}
