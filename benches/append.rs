//! What an append costs, against the floor of a header and a memcpy into a ring of the same size, in the same run.
//!
//! Three things are compared, chunk by chunk in turns, each chunk filling an empty ring nearly once: the floor, a lane
//! alone, and `ChangelogWriter::append`. Between chunks, outside the timing, a sink resets the head: it stands for the
//! spiller, and reads nothing, so that all three meet the same caches. Two threads append at the same time, each with its
//! own writer, against one; the same is done with the floor, which shows what the machine allows.
//!
//! Then the time of single appends while a real spiller writes at about a share of what the device can do.
//!
//! Run by `cargo bench --bench append`; without `--bench` or with `--smoke` it only shows that it works.
#![forbid(unsafe_code)]

#[path = "common/bare.rs"]
mod bare;
mod common;

use std::hint::{black_box, spin_loop};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use bare::{BareWriter, Spent};
use common::{Bench, Limit, ScratchDir, Table, interleave, median, ratio};
use tidelog::record::{FrameKind, Header, frame_len};
use tidelog::{
    Changelog, ChangelogWriter, Durability, EngineChoice, KeyGroup, KeyGroupRange, Options, Seams,
};
use tidelog_io::aligned::{AlignedBuf, Arena};
use tidelog_io::ring::{Bell, Consumer, Lane};
use tidelog_io::sim::SimWorld;
use tidelog_upload::sim::SimStore;

const LANE_BYTES: usize = 4 << 20;
const VALUE_LENS: [usize; 6] = [16, 64, 256, 1 << 10, 4 << 10, 64 << 10];
/// For key groups that vary from append to append.
const KEY_GROUPS: u16 = 128;

fn main() {
    let mut bench = Bench::start(
        "append",
        "What an append costs, against a header and a memcpy into a ring of the same size.",
        &[
            ("--rounds NUMBER", "chunks of each kind and length (400)"),
            ("--seconds NUMBER", "how long to append against a real spiller (10)"),
            ("--load PERCENT", "share of the device that the spiller then uses (30)"),
            ("--dir PATH", "a directory on the device to use"),
        ],
    );
    let rounds = bench.number("--rounds", bench.size(400, 2)) as usize;
    one_thread(&mut bench, rounds);
    two_threads(&mut bench, rounds);
    let dir = bench.directory();
    latency(&mut bench, &dir);
    bench.finish();
}

/// Appends that fit an empty lane, whatever is skipped at the end of a lap.
fn appends_per_chunk(value_len: usize) -> usize {
    LANE_BYTES / frame_len(value_len) - 2
}

fn one_thread(bench: &mut Bench, rounds: usize) {
    let mut table = Table::new(
        "One append, one thread, room in the lane; medians over chunks",
        &[
            "value_bytes",
            "floor_ns",
            "lane_ns",
            "append_ns",
            "lane_/_floor",
            "append_/_floor",
            "append_-_floor_ns",
        ],
    );
    for value_len in VALUE_LENS {
        bench.progress(&format!("appends of {value_len} B, one thread"));
        let value = vec![0x5a; value_len];
        let mut floor = FloorRing::new();
        let mut lane = SunkLane::new();
        let changelog = simulated();
        let mut writer = changelog.create_writer("bench", KeyGroupRange::ALL).expect("a writer");
        let appends = appends_per_chunk(value_len);
        let figures = interleave(rounds, 3, |leg| {
            let spent = match leg {
                0 => floor.fill(&value, appends),
                1 => lane.fill(&value, appends),
                _ => append(&mut writer, &value, appends),
            };
            lane.sink();
            changelog.discard_appended();
            spent.as_secs_f64() * 1e9 / appends as f64
        });
        let [floor, lane, append] = [0, 1, 2].map(|leg| median(&figures[leg]));
        let append_ratio = ratio(&figures[2], &figures[0]);
        let difference: Vec<f64> = figures[2].iter().zip(&figures[0]).map(|(a, b)| a - b).collect();
        let difference = median(&difference);
        table.row([
            value_len.into(),
            floor.into(),
            lane.into(),
            append.into(),
            ratio(&figures[1], &figures[0]).into(),
            append_ratio.into(),
            difference.into(),
        ]);
        if value_len >= 256 {
            bench.target(
                format!("append / floor, one thread, {value_len} B"),
                append_ratio,
                Limit::AtMost(1.3),
            );
        } else {
            bench.target(
                format!("append - floor in ns, one thread, {value_len} B"),
                difference,
                Limit::AtMost(3.0),
            );
        }
    }
    bench.table(table);
}

fn two_threads(bench: &mut Bench, rounds: usize) {
    let mut table = Table::new(
        "Two threads, each with its own writer, against one; medians over chunks",
        &["value_bytes", "one_thread_M/s", "two_threads_M/s", "append_two_/_one", "floor_two_/_one"],
    );
    for value_len in VALUE_LENS {
        bench.progress(&format!("appends of {value_len} B, two threads"));
        let changelog = simulated();
        let rates = in_pairs(&changelog, &vec![0x5a; value_len], rounds / 2 + 1);
        let scaling = ratio(&rates.append_two, &rates.append_one);
        table.row([
            value_len.into(),
            (median(&rates.append_one) / 1e6).into(),
            (median(&rates.append_two) / 1e6).into(),
            scaling.into(),
            ratio(&rates.floor_two, &rates.floor_one).into(),
        ]);
        bench.target(format!("two threads / one, {value_len} B"), scaling, Limit::AtLeast(1.8));
    }
    bench.table(table);
}

/// Appends a second, by chunk.
#[derive(Default)]
struct Rates {
    floor_one: Vec<f64>,
    floor_two: Vec<f64>,
    append_one: Vec<f64>,
    append_two: Vec<f64>,
}

/// One thread alone and two at once, in turns, for appends and for the floor.
fn in_pairs(changelog: &Changelog, value: &[u8], rounds: usize) -> Rates {
    let appends = appends_per_chunk(value.len());
    let turn = Barrier::new(2);
    let started = AtomicU64::new(0);
    // A barrier's wake-up takes longer than some chunks: both threads spin for the last step.
    let start_together = |goal: u64| {
        started.fetch_add(1, Ordering::AcqRel);
        while started.load(Ordering::Acquire) < goal {
            spin_loop();
        }
    };
    let thread = |first: bool| {
        let mut writer = changelog.create_writer("bench", KeyGroupRange::ALL).expect("a writer");
        let mut floor = FloorRing::new();
        let mut rates = Rates::default();
        for round in 0..rounds as u64 {
            for (kind, is_append) in [(0, true), (1, false)] {
                let mut chunk = || {
                    let spent = match is_append {
                        true => append(&mut writer, value, appends),
                        false => floor.fill(value, appends),
                    };
                    appends as f64 / spent.as_secs_f64()
                };
                turn.wait();
                let one = if first { chunk() } else { 0.0 };
                turn.wait();
                if first {
                    changelog.discard_appended();
                }
                turn.wait();
                start_together(4 * round + 2 * kind + 2);
                let two = chunk();
                turn.wait();
                if first {
                    changelog.discard_appended();
                }
                let (ones, twos) = match is_append {
                    true => (&mut rates.append_one, &mut rates.append_two),
                    false => (&mut rates.floor_one, &mut rates.floor_two),
                };
                ones.push(one);
                twos.push(two);
            }
        }
        rates
    };
    std::thread::scope(|scope| {
        let second = scope.spawn(|| thread(false));
        let mut rates = thread(true);
        let others = second.join().expect("the second thread appends");
        for (both, other) in
            [(&mut rates.append_two, others.append_two), (&mut rates.floor_two, others.floor_two)]
        {
            both.iter_mut().zip(other).for_each(|(both, other)| *both += other);
        }
        rates
    })
}

/// A changelog of which only the writers and their lanes are used.
fn simulated() -> Changelog {
    let world = SimWorld::new(1);
    let seams = Seams {
        directories: vec![(world.files(), Box::new(world.disk(16, Durability::Process)))],
        stores: vec![Arc::new(SimStore::new(1))],
        clock: Arc::new(Instant::now),
        random: {
            let mut next = 0;
            Box::new(move || {
                next += 1;
                next
            })
        },
    };
    let options = Options::new("sim://1", "/simulated")
        .lane_bytes(LANE_BYTES)
        .append_wait_max(Duration::ZERO)
        .segment_bytes(1 << 20)
        .local_bytes(4 << 20);
    Changelog::open_simulated(options, seams).expect("a simulated machine opens")
}

fn append(writer: &mut ChangelogWriter, value: &[u8], appends: usize) -> Duration {
    let value = black_box(value);
    let started_at = Instant::now();
    for index in 0..appends {
        writer.append(KeyGroup(index as u16 % KEY_GROUPS), value).expect("there is room");
    }
    started_at.elapsed()
}

/// A lane without a writer, and the sink that empties it.
struct SunkLane {
    lane: Arc<Lane>,
    consumer: Consumer,
}

impl SunkLane {
    fn new() -> SunkLane {
        let lane = Lane::new(LANE_BYTES, Bell::new(Arc::new(|| {}))).expect("memory for a lane");
        assert!(lane.try_claim(), "a new lane belongs to nobody");
        let consumer = lane.consumer().expect("a new lane has no consumer");
        SunkLane { lane, consumer }
    }

    fn fill(&mut self, value: &[u8], appends: usize) -> Duration {
        let value = black_box(value);
        let lane = &*self.lane;
        let started_at = Instant::now();
        for index in 0..appends {
            let header = Header::new(FrameKind::Data, index as u16 % KEY_GROUPS, 0, value.len());
            lane.push(header.0, value).expect("there is room");
        }
        started_at.elapsed()
    }

    fn sink(&mut self) {
        while let bytes @ 1.. = self.consumer.peek().len() {
            self.consumer.release(bytes);
        }
    }
}

/// The floor: a header, a memcpy and padding, round and round in huge pages. Nobody is told, nobody is waited for.
struct FloorRing {
    ring: AlignedBuf,
    at: usize,
}

impl FloorRing {
    fn new() -> FloorRing {
        let ring = Arena::new(LANE_BYTES, 1).and_then(|arena| {
            arena.try_take().ok_or_else(|| std::io::Error::other("a new arena has a free block"))
        });
        FloorRing { ring: ring.expect("memory for a ring"), at: 0 }
    }

    fn fill(&mut self, value: &[u8], appends: usize) -> Duration {
        let value = black_box(value);
        let started_at = Instant::now();
        // The slice is taken once: what is left is what a producer must do for each frame.
        let ring: &mut [u8] = &mut self.ring;
        let mut at = self.at;
        for index in 0..appends {
            let header = Header::new(FrameKind::Data, index as u16 % KEY_GROUPS, 0, value.len());
            let frame_len = frame_len(value.len());
            if at + frame_len > ring.len() {
                at = 0;
            }
            let frame = &mut ring[at..at + frame_len];
            let (head, body) = frame.split_at_mut(8);
            let (body, padding) = body.split_at_mut(value.len());
            head.copy_from_slice(&header.0.to_le_bytes());
            body.copy_from_slice(value);
            if !padding.is_empty() {
                padding.fill(0);
            }
            at += frame_len;
        }
        self.at = at;
        black_box(ring);
        started_at.elapsed()
    }
}

/// Times single appends of 256 B while the spiller writes at a share of what the device can do.
fn latency(bench: &mut Bench, dir: &ScratchDir) {
    const VALUE_LEN: usize = 256;
    let load = bench.number("--load", 30) as f64 / 100.0;
    let seconds = bench.number("--seconds", bench.size(10, 0)) as f64;
    let file_bytes = bench.size(1 << 30, 4 << 20);
    bench.progress("what the device can do");
    let durability = Durability::Power;
    let mut bare = BareWriter::open(&dir.make("bare"), durability, EngineChoice::Auto, file_bytes)
        .expect("the bare writer opens");
    let speeds: Vec<f64> = (0..3).map(|_| file_bytes as f64 / bare.write(file_bytes).seconds).collect();
    drop(bare);
    let device = median(&speeds);

    let options = Options::new(format!("file://{}", dir.join("bucket").display()), dir.join("local"))
        .preemptive_upload(false)
        .segment_bytes(bench.size(256 << 20, 1 << 20))
        .local_bytes(bench.size(2 << 30, 16 << 20));
    let changelog = Changelog::open(options).expect("the changelog opens");
    let mut writer = changelog.create_writer("bench", KeyGroupRange::ALL).expect("a writer");
    let value = [0x5a; VALUE_LEN];
    bench.progress("filling segments once");
    let warm_up = bench.size(1 << 30, 2 << 20) / VALUE_LEN as u64;
    let truncate_every = bench.size(1 << 18, 1 << 13);
    let mut appended = 0;
    let mut append_next = |writer: &mut ChangelogWriter| {
        writer.append(KeyGroup(appended as u16 % KEY_GROUPS), &value).expect("there is room");
        appended += 1;
        appended
    };
    for _ in 0..warm_up {
        let appended = append_next(&mut writer);
        truncate_now_and_then(&writer, appended, truncate_every);
    }
    writer.sync().wait().expect("the disk works");

    bench.progress(&format!("single appends for {seconds} s"));
    let interval = Duration::from_secs_f64(frame_len(VALUE_LEN) as f64 / (device * load));
    let mut times = Times::new();
    let spent = Spent::on(|| {
        let end_at = Instant::now() + Duration::from_secs_f64(seconds.max(0.05));
        let mut due_at = Instant::now();
        loop {
            let mut now = Instant::now();
            while now < due_at {
                spin_loop();
                now = Instant::now();
            }
            if now >= end_at {
                break;
            }
            let appended = append_next(&mut writer);
            times.add(now.elapsed());
            truncate_now_and_then(&writer, appended, truncate_every);
            due_at += interval;
        }
    });
    let clock: Vec<f64> = (0..10_001).map(|_| Instant::now().elapsed().as_nanos() as f64).collect();
    let written = (times.count * frame_len(VALUE_LEN) as u64) as f64;
    let mut table = Table::new(
        "Single appends of 256 B while a real spiller writes, the clock's own time included",
        &[
            "device_MB/s",
            "appended_MB/s",
            "share",
            "appends",
            "p50_ns",
            "p99_ns",
            "p99.9_ns",
            "max_ns",
            "clock_ns",
        ],
    );
    let p999 = times.quantile(0.999);
    table.row([
        (device / 1e6).into(),
        (written / spent.seconds / 1e6).into(),
        (written / spent.seconds / device).into(),
        times.count.into(),
        times.quantile(0.5).into(),
        times.quantile(0.99).into(),
        p999.into(),
        times.max.into(),
        median(&clock).into(),
    ]);
    bench.table(table);
    bench.target(
        format!("p99.9 of an append in µs with the spiller at {:.0} % of the device", load * 100.0),
        p999 as f64 / 1e3,
        Limit::AtMost(5.0),
    );
    for engine in changelog.engines() {
        bench.note(format!("engine: {engine:?}"));
    }
}

/// Nobody needs what is on the disk: segments are recycled without an upload.
fn truncate_now_and_then(writer: &ChangelogWriter, appended: u64, every: u64) {
    if appended.is_multiple_of(every) {
        writer.truncate(writer.durable_sequence_number()).expect("what is durable was appended");
    }
}

/// How often an append took how long, by the nanosecond up to a bound.
struct Times {
    counts: Vec<u64>,
    longer: Vec<u64>,
    count: u64,
    max: u64,
}

impl Times {
    fn new() -> Times {
        Times { counts: vec![0; 1 << 16], longer: Vec::with_capacity(1 << 16), count: 0, max: 0 }
    }

    fn add(&mut self, time: Duration) {
        let nanos = time.as_nanos() as u64;
        match self.counts.get_mut(nanos as usize) {
            Some(count) => *count += 1,
            None => self.longer.push(nanos),
        }
        self.count += 1;
        self.max = self.max.max(nanos);
    }

    fn quantile(&mut self, at: f64) -> u64 {
        let mut left = (self.count as f64 * at) as u64;
        for (nanos, count) in self.counts.iter().enumerate() {
            if left < *count {
                return nanos as u64;
            }
            left -= count;
        }
        self.longer.sort_unstable();
        self.longer.get(left as usize).copied().unwrap_or(self.max)
    }
}
