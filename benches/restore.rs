//! What a restore reads and how fast: requests and bytes, against the bytes of the key groups that are read; what footers
//! and directories take of an object; and the speed of a reader beside that of the store's client.
//!
//! One object of several logs is made by a checkpoint, with key groups at random; the bucket is a local directory. Then
//! readers of one key group of 128 are counted: of all logs, and of one. Requests and bytes are the same on a busy machine;
//! the object comes from the page cache. For the speed a quarter of the key groups is read, by a reader, and by the client
//! alone: the same ranges by the same driver, as many at once, of which nothing is looked at; in turns. Their ratio says
//! more than their figures.
//!
//! Run by `cargo bench --bench restore`; without `--bench` or with `--smoke` it only shows that it works.
#![forbid(unsafe_code)]

#[path = "common/client.rs"]
mod client;
mod common;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use client::Client;
use common::{Bench, Limit, ScratchDir, Table, cpu_time, interleave, median, ratio};
use tidelog::footer::Footer;
use tidelog::{
    Changelog, ChangelogHandle, ChangelogReader, ChangelogWriter, Durability, KeyGroup, KeyGroupRange, LogId,
    Options, SequenceNumber,
};
use tidelog_upload::block_on;

const VALUE_LEN: usize = 256;
const KEY_GROUPS: u16 = 128;
/// The key group that is restored.
const KEY_GROUP: u16 = 17;

fn main() {
    let mut bench = Bench::start(
        "restore",
        "What a restore of one key group reads, and what footers and directories take of an object.",
        &[
            ("--mib NUMBER", "how much the 4 logs hold together (1024)"),
            ("--rounds NUMBER", "how often to read (5)"),
            ("--dir PATH", "a directory to use; three times the size is needed there"),
        ],
    )
    .counts_only();
    let dir = bench.directory();
    let mib = bench.number("--mib", bench.size(1024, 8)).max(1);
    let made = one_key_group(&mut bench, &dir, mib << 20);
    a_quarter(&mut bench, &made);
    overhead(&mut bench, &dir);
    bench.finish();
}

fn one_key_group(bench: &mut Bench, dir: &ScratchDir, bytes: u64) -> Made {
    let rounds = bench.number("--rounds", bench.size(5, 1));
    bench.progress(&format!("a checkpoint of {} MiB in 4 logs", bytes >> 20));
    let made = Made::new(bench, dir, "restore", 4, bytes);
    let mut table = Table::new(
        format!("Key group {KEY_GROUP} of {KEY_GROUPS}, {VALUE_LEN} B values, 4 logs in each part"),
        &[
            "what",
            "object_MiB",
            "parts",
            "its_bytes",
            "read_bytes",
            "footer_and_directories",
            "rest_/_its",
            "requests",
            "requests_/_part",
            "ms",
        ],
    );
    let all: Vec<&ChangelogHandle> = made.handles.iter().collect();
    for (what, handles) in [("all 4 logs", &all[..]), ("1 log", &all[..1])] {
        let handles: Vec<ChangelogHandle> = handles.iter().map(|handle| (*handle).clone()).collect();
        let mut times = Vec::new();
        let (mut its_bytes, mut stats) = (0, None);
        for _ in 0..rounds {
            let started_at = Instant::now();
            let range = KeyGroupRange::new(KEY_GROUP, KEY_GROUP).expect("one is a range");
            let mut reader = ChangelogReader::open(&handles, range).expect("the bucket opens");
            its_bytes = 0;
            for change in &mut reader {
                its_bytes += change.expect("the object is whole").value.len() as u64;
            }
            times.push(started_at.elapsed().as_secs_f64() * 1e3);
            stats = Some(reader.stats());
        }
        let stats = stats.expect("there is a round");
        let expected: u64 = handles.iter().map(|handle| made.values_of(handle.log(), KEY_GROUP)).sum();
        assert_eq!(its_bytes, expected * VALUE_LEN as u64, "every change of the key group, once");
        let logs: Vec<LogId> = handles.iter().map(ChangelogHandle::log).collect();
        let object = &made.object;
        let aside = object.footer_len + object.directories_len(&logs);
        let rest = stats.bytes.saturating_sub(aside) as f64 / its_bytes as f64;
        let parts = object.footer.parts().len();
        // One request is for the footer.
        let requests_per_part = (stats.requests - 1) as f64 / parts as f64;
        table.row([
            what.into(),
            (object.len >> 20).into(),
            parts.into(),
            its_bytes.into(),
            stats.bytes.into(),
            aside.into(),
            rest.into(),
            stats.requests.into(),
            requests_per_part.into(),
            median(&times).into(),
        ]);
        bench.target(
            format!("bytes read without footer and directories / bytes of the key group, {what}"),
            rest,
            Limit::AtMost(1.2),
        );
        bench.target(format!("requests per part, {what}"), requests_per_part, Limit::AtMost(2.0));
    }
    bench.table(table);
    made
}

/// A quarter of the key groups, by a reader and by the client alone.
fn a_quarter(bench: &mut Bench, made: &Made) {
    let rounds = bench.number("--rounds", bench.size(9, 1)) as usize;
    let range = KeyGroupRange::new(0, KEY_GROUPS / 4 - 1).expect("first <= last");
    let client = Client::new(&format!("file://{}", made.bucket.display()), &made.handles, range);
    let (needed, ranges) = (client.bytes(), client.ranges.len() as u64);
    bench.progress(&format!("{} MiB in {ranges} ranges", needed >> 20));
    let mut stats = None;
    let (mut client_cpu, mut reader_cpu) = (Vec::new(), Vec::new());
    let times = interleave(rounds, 2, |leg| {
        let (started_at, cpu_before) = (Instant::now(), cpu_time());
        match leg {
            0 => client.download(),
            _ => {
                let mut reader = ChangelogReader::open(&made.handles, range).expect("the bucket opens");
                let mut changes = 0;
                while let Some(batch) = block_on(reader.next_batch()).expect("the object is whole") {
                    changes += batch.len() as u64;
                }
                let groups = range.first().0..=range.last().0;
                let of_group =
                    |group| made.handles.iter().map(move |handle| made.values_of(handle.log(), group));
                assert_eq!(changes, groups.flat_map(of_group).sum::<u64>(), "every change, once");
                stats = Some(reader.stats());
            }
        }
        let seconds = started_at.elapsed().as_secs_f64();
        let cpu = (cpu_time() - cpu_before).as_secs_f64();
        if leg == 0 { &mut client_cpu } else { &mut reader_cpu }.push(cpu);
        seconds
    });
    let stats = stats.expect("there is a round");
    let mut table = Table::new(
        format!(
            "{} of {KEY_GROUPS} key groups, {VALUE_LEN} B values, {} logs",
            range.len(),
            made.handles.len()
        ),
        &["what", "MiB", "requests", "ms", "MB/s", "CPU_ms"],
    );
    let rows = [
        ("client alone", needed, ranges, &times[0], &client_cpu),
        ("reader", stats.bytes, stats.requests, &times[1], &reader_cpu),
    ];
    for (what, bytes, requests, times, cpu) in rows {
        table.row([
            what.into(),
            (bytes >> 20).into(),
            requests.into(),
            (median(times) * 1e3).into(),
            (bytes as f64 / median(times) / 1e6).into(),
            (median(cpu) * 1e3).into(),
        ]);
    }
    bench.table(table);
    let share = stats.bytes as f64 / needed as f64;
    bench.target("bytes read / bytes of the key groups, a quarter of them", share, Limit::AtMost(1.1));
    let speed = ratio(&times[0], &times[1]) * share;
    bench.target("speed of the reader / of the client alone", speed, Limit::AtLeast(0.8));
}

fn overhead(bench: &mut Bench, dir: &ScratchDir) {
    let bytes = bench.size(64 << 20, 2 << 20);
    bench.progress(&format!("a checkpoint of {} MiB in 64 logs", bytes >> 20));
    let made = Made::new(bench, dir, "overhead", 64, bytes);
    let object = &made.object;
    let directories =
        object.directories_len(&made.handles.iter().map(ChangelogHandle::log).collect::<Vec<_>>());
    let share = (directories + object.footer_len) as f64 / object.len as f64;
    let mut table = Table::new(
        format!("64 logs × {KEY_GROUPS} key groups, {VALUE_LEN} B values"),
        &["object_MiB", "parts", "footer_bytes", "directory_bytes", "percent_of_object"],
    );
    table.row([
        (object.len >> 20).into(),
        object.footer.parts().len().into(),
        object.footer_len.into(),
        directories.into(),
        (share * 100.0).into(),
    ]);
    bench.table(table);
    bench.target(
        "percent of the object in footer and directories, 64 logs × 128 key groups",
        share * 100.0,
        Limit::AtMost(1.0),
    );
}

/// A checkpoint of several logs, in one object.
struct Made {
    bucket: PathBuf,
    handles: Vec<ChangelogHandle>,
    object: Object,
    /// How many changes each log has in each key group.
    counts: BTreeMap<(LogId, u16), u64>,
}

struct Object {
    len: u64,
    footer: Footer,
    footer_len: u64,
}

impl Made {
    fn new(bench: &Bench, dir: &ScratchDir, name: &str, logs: usize, bytes: u64) -> Made {
        let dir = dir.make(name);
        let bucket = dir.join("bucket");
        let options = Options::new(format!("file://{}", bucket.display()), dir.join("local"))
            .durability(Durability::Process)
            // The object must not be cut because the local directory is full, nor before all have asked.
            .segment_bytes(64 << 20)
            .local_bytes(2 * bytes + (512 << 20))
            .batch_delay(Duration::from_secs(10));
        let changelog = Changelog::open(options).expect("the changelog opens");
        let mut writers: Vec<ChangelogWriter> = (0..logs)
            .map(|log| {
                let range = KeyGroupRange::new(0, KEY_GROUPS - 1).expect("it is a range");
                changelog.create_writer(format!("bench-{log}"), range).expect("a writer")
            })
            .collect();
        let mut counts = BTreeMap::new();
        let mut random = 0x9e37_79b9_7f4a_7c15_u64;
        for append in 0..bytes / VALUE_LEN as u64 {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            let writer = &mut writers[append as usize % logs];
            let key_group = (random >> 20) as u16 % KEY_GROUPS;
            let value = [(random >> 40) as u8; VALUE_LEN];
            writer.append(KeyGroup(key_group), &value).expect("there is room in time");
            *counts.entry((writer.log(), key_group)).or_default() += 1;
        }
        bench.progress("all appended");
        let persists: Vec<_> =
            writers.iter_mut().map(|writer| writer.persist_durably(SequenceNumber::ZERO)).collect();
        let handles: Vec<ChangelogHandle> =
            persists.into_iter().map(|persist| persist.wait().expect("the bucket takes it")).collect();
        bench.progress("all persisted");
        changelog.close(Duration::from_secs(60)).expect("the changelog closes");
        let object = Object::read(&bucket, &handles);
        Made { bucket, handles, object, counts }
    }

    fn values_of(&self, log: LogId, key_group: u16) -> u64 {
        self.counts.get(&(log, key_group)).copied().unwrap_or(0)
    }
}

impl Object {
    /// Reads the footer of the one object of all handles.
    fn read(bucket: &std::path::Path, handles: &[ChangelogHandle]) -> Object {
        let mut names: Vec<PathBuf> = handles
            .iter()
            .flat_map(|handle| handle.extents())
            .map(|extent| bucket.join(extent.object()))
            .collect();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), 1, "one checkpoint, one object: {names:?}");
        let bytes = std::fs::read(&names[0]).expect("the object is in the bucket");
        let extent = &handles[0].extents()[0];
        let range = extent.footer.start as usize..extent.footer.end as usize;
        let footer = Footer::decode(&bytes[range], Some(extent.token)).expect("the footer is whole");
        Object { len: bytes.len() as u64, footer, footer_len: extent.footer.end - extent.footer.start }
    }

    /// What the directories of some logs take in all parts.
    fn directories_len(&self, logs: &[LogId]) -> u64 {
        let runs = self.footer.parts().iter().flat_map(|part| &part.runs);
        runs.filter(|run| logs.contains(&run.log)).map(|run| u64::from(run.directory_len)).sum()
    }
}
