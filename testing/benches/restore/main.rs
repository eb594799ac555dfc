//! Restores from an S3 bucket over the real protocol: a reader of a quarter of the key groups beside the store's client
//! alone, which reads the same ranges through the same driver, as many at once, and looks at nothing. The reader's
//! changes are visited one by one, and their lengths added up.
//!
//! The server is this package's own, another process that keeps its objects on the disk; it shares the cores with the
//! client, on the loopback interface. No figure is one of a cloud store; the ratio of the two is what counts.
//!
//! Run by `cargo bench -p tidelog-testing --bench restore`; without `--bench` or with `--smoke` it only shows that it works.
#![forbid(unsafe_code)]

#[path = "../../../benches/common/client.rs"]
mod client;
#[path = "../../../benches/common/mod.rs"]
mod common;
#[path = "../upload/process.rs"]
#[allow(dead_code, reason = "the server is what is used of it here")]
mod process;

use std::path::Path;
use std::time::{Duration, Instant};

use client::Client;
use common::{Bench, Limit, Table, cpu_time, interleave, median, ratio};
use process::{Server, fill};
use tidelog::{
    Changelog, ChangelogReader, Durability, HedgeOptions, KeyGroupRange, Options, SequenceNumber,
    UploadOptions,
};
use tidelog_upload::block_on;

const LOGS: usize = 4;

fn main() {
    process::ensure_credentials();
    let mut bench = Bench::start(
        "restore",
        "Restores from an S3 bucket: a reader beside the store's client alone.",
        &[
            ("--mib NUMBER", "how much the logs hold together (1024)"),
            ("--rounds NUMBER", "how often each is measured (5)"),
            ("--dir PATH", "a directory on a disk; three times the size is needed there"),
        ],
    );
    let dir = bench.directory();
    let mib = bench.number("--mib", bench.size(1024, 8)).max(1);
    let rounds = bench.number("--rounds", bench.size(5, 1)) as usize;
    let server = Server::start(&dir.make("server"), None);
    let url = server.url();
    bench.progress(&format!("a checkpoint of {mib} MiB in {LOGS} logs"));
    let handles = {
        let options = process::options(&url, &dir.make("local"), mib << 20).durability(Durability::Process);
        // One object in one piece, as the client takes it.
        let mut uploads = UploadOptions::default();
        uploads.hedging = HedgeOptions::off();
        let options = options.batch_delay(Duration::from_secs(10)).uploads(uploads);
        let changelog = Changelog::open(options).expect("a changelog");
        let key_groups = KeyGroupRange::new(0, 127).expect("first <= last");
        let mut writers = Vec::from_iter(
            (0..LOGS).map(|log| changelog.create_writer(format!("{log}"), key_groups).expect("a writer")),
        );
        for writer in &mut writers {
            fill(writer, (mib << 20) / LOGS as u64);
        }
        let persists =
            Vec::from_iter(writers.iter_mut().map(|writer| writer.persist_durably(SequenceNumber::ZERO)));
        Vec::from_iter(persists.into_iter().map(|persist| persist.wait().expect("a checkpoint")))
    };
    let quarter = KeyGroupRange::new(0, 31).expect("first <= last");
    let client = Client::new(&url, &handles, quarter);
    let (needed, ranges) = (client.bytes(), client.ranges.len() as u64);
    bench.progress(&format!("{} MiB in {ranges} ranges", needed >> 20));
    let mut stats = None;
    let mut cpu = [Vec::new(), Vec::new()];
    let times = interleave(rounds, 2, |leg| {
        let (started_at, cpu_before) = (Instant::now(), cpu_time());
        if leg == 0 {
            client.download();
        } else {
            let mut reader = ChangelogReader::open(&handles, quarter).expect("the bucket opens");
            let mut value_bytes = 0;
            while let Some(batch) = block_on(reader.next_batch()).expect("the object is whole") {
                value_bytes += batch.iter().map(|change| change.value.len() as u64).sum::<u64>();
            }
            assert!(value_bytes > needed / 2, "every value was looked at");
            stats = Some(reader.stats());
        }
        cpu[leg].push((cpu_time() - cpu_before).as_secs_f64());
        started_at.elapsed().as_secs_f64()
    });
    let stats = stats.expect("there is a round");
    let mut table = Table::new(
        format!("32 of 128 key groups, {LOGS} logs, S3 on the loopback interface"),
        &["what", "MiB", "requests", "ms", "MB/s", "CPU_ms"],
    );
    for (leg, what, bytes, requests) in
        [(0, "client alone", needed, ranges), (1, "reader", stats.bytes, stats.requests)]
    {
        table.row([
            what.into(),
            (bytes >> 20).into(),
            requests.into(),
            (median(&times[leg]) * 1e3).into(),
            (bytes as f64 / median(&times[leg]) / 1e6).into(),
            (median(&cpu[leg]) * 1e3).into(),
        ]);
    }
    bench.table(table);
    let share = stats.bytes as f64 / needed as f64;
    bench.target("bytes read / bytes of the key groups, a quarter of them", share, Limit::AtMost(1.1));
    let speed = ratio(&times[0], &times[1]) * share;
    bench.target("speed of the reader / of the client alone", speed, Limit::AtLeast(0.8));
    bench.finish();
}

/// What all changelogs here have in common.
fn base(url: &str, local: &Path) -> Options {
    Options::new(url, local).segment_bytes(64 << 20)
}
