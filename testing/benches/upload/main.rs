//! Checkpoints into S3 buckets over the real protocol: what a persist waits for, throughput and memory against a bare
//! client, requests, and what a bad network or a dead bucket changes.
//!
//! The server is this package's own, with signatures that it verifies. For throughput and latency it is another process
//! and keeps its objects on the disk; it shares the cores with the client, on the loopback interface. Behind the proxy
//! each request takes a store's time ([`faults`]). No figure is one of a cloud store.
//!
//! Run by `cargo bench -p tidelog-testing --bench upload`; without `--bench` or with `--smoke` it only shows that it works.
#![forbid(unsafe_code)]

#[path = "../../../benches/common/mod.rs"]
mod common;

mod faults;
mod process;

use std::time::{Duration, Instant};

use common::{Bench, Limit, ScratchDir, Table, interleave, median, quantile, ratio};
use process::{Report, Role, Server, bucket_url, fill};
use tidelog::{Changelog, KeyGroupRange, Options, SequenceNumber};
use tidelog_testing::{S3Server, ServerOptions};
use tidelog_upload::Operation;

const MIB: u64 = 1 << 20;

fn main() {
    if process::is_child() {
        return process::run_child();
    }
    process::ensure_credentials();
    let mut bench = Bench::start(
        "upload",
        "Checkpoints into S3 buckets: latency, throughput, memory, requests, and a bad network.",
        &[
            ("--gib NUMBER", "the size of the large checkpoint (4)"),
            ("--rounds NUMBER", "how often each is measured (3)"),
            ("--only WHAT", "throughput, latency, requests or faults"),
            ("--dir PATH", "a directory on a disk; three times the large checkpoint is needed there"),
        ],
    );
    let dir = bench.directory();
    let only = bench.text("--only");
    let asked = |what: &str| only.as_deref().is_none_or(|only| only == what);
    if asked("throughput") {
        throughput(&mut bench, &dir);
    }
    if asked("latency") {
        latency(&mut bench, &dir);
    }
    if asked("requests") {
        requests(&mut bench, &dir);
    }
    if asked("faults") {
        faults::compare(&mut bench, &dir);
    }
    bench.finish();
}

/// How clients reach the server.
struct Network {
    name: &'static str,
    connections: usize,
    /// Of each connection; `None`: as fast as the processors are.
    bytes_per_second: Option<u64>,
    /// What the changelog may have.
    memory_bytes: usize,
}

/// One large checkpoint as fast as possible, and as many bytes in such parts over as many connections by the client alone;
/// each in a process of its own. Where the processors are the limit, appending and the local disk's writes take theirs, so
/// the checkpoint is also measured when these are done.
///
/// Each process makes two such objects. What it needs of memory, segments and connections is new for the first one, and
/// there for the next one, as for all others of a process that lives.
fn throughput(bench: &mut Bench, dir: &ScratchDir) {
    let gib = bench.number("--gib", bench.size(4, 0));
    let rounds = bench.number("--rounds", bench.size(3, 1)) as usize;
    let memory_bytes = process::MEMORY_BYTES;
    let networks = [
        Network { name: "loopback", connections: 32, bytes_per_second: None, memory_bytes },
        // Of it the two cores carry this much, the server's half included, and have time left.
        Network { name: "4 × 40 MB/s", connections: 4, bytes_per_second: Some(40_000_000), memory_bytes },
        // Slow connections want many parts under way, and these are in a quarter of the memory.
        Network {
            name: "32 × 8 MB/s, 1.25 GiB",
            connections: 32,
            bytes_per_second: Some(8_000_000),
            memory_bytes: 5 << 28,
        },
    ];
    let roles = [Role::Bare, Role::Changelog, Role::Persist];
    let mut table = Table::new(
        format!(
            "One checkpoint of {gib} GiB by a process of its own, and the next one; medians of {rounds} rounds"
        ),
        &["network", "what", "checkpoint", "MB/s", "of_bare", "client_cpu_s/GiB", "peak_memory_MiB"],
    );
    for (index, network) in networks.iter().enumerate() {
        // Over the slow network, which takes its time, a quarter tells as much.
        let bytes = ((gib << 30) >> (2 * index.min(1))).max(24 * MIB);
        let gib = bytes as f64 / (1u64 << 30) as f64;
        let server =
            Server::start(&dir.make(&format!("throughput-server-{index}")), network.bytes_per_second);
        let mut reports = roles.map(|_| Vec::<Report>::new());
        let measure = |role: Role, bytes: u64| {
            let local = dir.make("throughput-local");
            let report = process::measure(
                role,
                &server.url(),
                &local,
                bytes,
                network.connections,
                network.memory_bytes,
            );
            let _ = std::fs::remove_dir_all(local);
            report
        };
        let rate =
            |report: &Report, which: usize| report.object_bytes as f64 / report.spent[which].seconds / 1e6;
        // The object is a little larger than its values: tables, checksums, the footer.
        let object_bytes = measure(Role::Changelog, bytes).object_bytes;
        interleave(rounds, roles.len(), |role| {
            let report = match roles[role] {
                Role::Bare => measure(Role::Bare, object_bytes),
                role => measure(role, bytes),
            };
            let [first, next] = [0, 1].map(|which| rate(&report, which));
            bench.progress(&format!(
                "{}, {}: {gib:.2} GiB at {first:.0} MB/s, the next at {next:.0}",
                network.name, roles[role]
            ));
            reports[role].push(report);
            next
        });
        let peak =
            |role: usize| reports[role].iter().map(|report| report.peak_bytes).max().unwrap_or(0) / MIB;
        for (which, name) in ["first", "next"].into_iter().enumerate() {
            let rates: Vec<Vec<f64>> = reports
                .iter()
                .map(|reports| reports.iter().map(|report| rate(report, which)).collect())
                .collect();
            for (index, role) in roles.iter().enumerate() {
                let cpu = |report: &Report| report.spent[which].cpu_seconds / gib;
                table.row([
                    network.name.into(),
                    role.to_string().into(),
                    name.into(),
                    median(&rates[index]).into(),
                    ratio(&rates[index], &rates[0]).into(),
                    median(&reports[index].iter().map(cpu).collect::<Vec<f64>>()).into(),
                    peak(index).into(),
                ]);
            }
            for (role, other) in roles.iter().zip(&rates).skip(1) {
                bench.target(
                    format!("share of the bare client's throughput, {}, {role}, {name}", network.name),
                    ratio(other, &rates[0]),
                    Limit::AtLeast(0.9),
                );
            }
        }
        if network.bytes_per_second.is_none() {
            let over = peak(1) as f64 - process::MEMORY_BYTES as f64 / MIB as f64;
            bench.target(
                format!("MiB of peak memory above the budget, {gib} GiB"),
                over,
                Limit::AtMost(64.0),
            );
        }
    }
    bench.table(table);
}

/// What a persist waits for, after increments of different sizes whose appends left time to upload.
fn latency(bench: &mut Bench, dir: &ScratchDir) {
    let sizes = bench.size([16 * MIB, 1024 * MIB], [16 * MIB, 32 * MIB]);
    let rounds = bench.number("--rounds", bench.size(5, 1)).max(bench.size(5, 1)) as usize;
    let rate = bench.size(100 * MIB, 400 * MIB);
    let server = Server::start(&dir.make("latency-server"), None);
    let local = dir.make("latency-local");
    let changelog = Changelog::open(process::options(&server.url(), &local, sizes[1])).expect("a changelog");
    let mut writer = changelog.create_writer("state", KeyGroupRange::ALL).expect("a writer");
    let figures = interleave(rounds, sizes.len(), |index| {
        let from = writer.next_sequence_number();
        let started_at = Instant::now();
        let mut appended = 0;
        while appended < sizes[index] {
            appended += fill(&mut writer, MIB);
            let due = Duration::from_secs_f64(appended as f64 / rate as f64);
            std::thread::sleep(due.saturating_sub(started_at.elapsed()));
        }
        let asked_at = Instant::now();
        writer.persist_durably(from).wait().expect("a checkpoint");
        let ms = asked_at.elapsed().as_secs_f64() * 1e3;
        writer.truncate(writer.next_sequence_number()).expect("what is persisted can be truncated");
        bench.progress(&format!("a persist after {} MiB: {ms:.1} ms", sizes[index] / MIB));
        ms
    });
    let mut table = Table::new(
        format!("A persist, after appends at {} MiB/s; {rounds} rounds", rate / MIB),
        &["increment_MiB", "median_ms", "longest_ms"],
    );
    for (size, figures) in sizes.iter().zip(&figures) {
        table.row([(size / MIB).into(), median(figures).into(), quantile(figures, 1.0).into()]);
    }
    bench.table(table);
    bench.target(
        format!("persist after {} MiB, times that after {} MiB", sizes[1] / MIB, sizes[0] / MIB),
        median(&figures[1]) / median(&figures[0]),
        Limit::AtMost(1.5),
    );
}

/// Many writers on several threads, one checkpoint of all of them: what it costs in requests.
fn requests(bench: &mut Bench, dir: &ScratchDir) {
    const THREADS: u64 = 8;
    const WRITERS: u64 = 8;
    let bytes = bench.size(4 * MIB, MIB / 2);
    bench.progress("requests of a checkpoint of 64 writers");
    let buckets = vec!["bucket".to_owned()];
    let server = S3Server::start(ServerOptions { buckets, ..ServerOptions::default() }).expect("a server");
    let url = bucket_url("bucket", &server.endpoint());
    let mut uploads = tidelog::UploadOptions::default();
    uploads.hedging = tidelog::HedgeOptions::off();
    let options = process::options(&url, &dir.make("requests-local"), THREADS * WRITERS * bytes)
        .uploads(uploads)
        .batch_delay(Duration::from_millis(200));
    let changelog = Changelog::open(options).expect("a changelog");
    let barrier = std::sync::Barrier::new(THREADS as usize);
    std::thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                let make = |_| changelog.create_writer("state", KeyGroupRange::ALL).expect("a writer");
                let mut writers: Vec<_> = (0..WRITERS).map(make).collect();
                for writer in &mut writers {
                    fill(writer, bytes);
                }
                barrier.wait();
                let persists: Vec<_> =
                    writers.iter_mut().map(|writer| writer.persist_durably(SequenceNumber::ZERO)).collect();
                for persist in persists {
                    persist.wait().expect("a checkpoint");
                }
            });
        }
    });
    let of = |operation| server.count(operation);
    let parts = of(Operation::PutPart);
    let all = server.requests().len();
    let objects = server.objects("bucket");
    let mut table = Table::new(
        format!("One checkpoint of 64 writers on 8 threads, {} MiB", THREADS * WRITERS * bytes / MIB),
        &["objects", "object_MiB", "parts", "requests"],
    );
    let object_bytes: u64 = objects.iter().map(|object| object.bytes).sum();
    table.row([objects.len().into(), (object_bytes as f64 / MIB as f64).into(), parts.into(), all.into()]);
    bench.table(table);
    bench.target("requests beside the parts", all as f64 - parts as f64, Limit::AtMost(2.0));
    bench.target("objects of the checkpoint", objects.len() as f64, Limit::AtMost(1.0));
}

/// The options that every leg has.
fn base(url: &str, local: &std::path::Path) -> Options {
    Options::new(url, local).segment_bytes(64 * MIB)
}
