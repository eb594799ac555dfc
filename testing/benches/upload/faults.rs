//! Checkpoints over a network that is calm, that stalls some connections, or that has lost one of three buckets; with
//! hedging and without.
//!
//! Each bucket is reached through a proxy of its own. Between checkpoints it closes all connections, so that those of each
//! checkpoint are new ones and meet the proxy's dice. The first byte of a checkpoint is sent long before it is asked for as
//! a rule; here all of them are appended in one go.

use std::time::{Duration, Instant};

use tidelog::{Changelog, HedgeOptions, KeyGroupRange, SequenceNumber, UploadOptions};
use tidelog_testing::{Direction, Fate, Fault, Proxy, Rule, S3Server, ServerOptions};

use crate::MIB;
use crate::common::{Bench, Limit, ScratchDir, Table, quantile};
use crate::process::{self, bucket_url, fill};

const BUCKETS: [&str; 3] = ["bucket-0", "bucket-1", "bucket-2"];
/// What a store takes to answer, at least.
const SERVICE: Duration = Duration::from_millis(40);
/// Checkpoints of one changelog: what it has learned in the first is used in the others.
const CHECKPOINTS: usize = 4;
const INCREMENT_BYTES: u64 = 24 * MIB;
/// Until a client has seen that connections are closed.
const PAUSE: Duration = Duration::from_millis(20);

#[derive(Clone, Copy, PartialEq)]
enum Trouble {
    Calm,
    Stalls,
    Dead,
}

pub fn compare(bench: &mut Bench, dir: &ScratchDir) {
    let changelogs = bench.size(50, 1);
    let mut table = Table::new(
        format!(
            "A persist of {} MiB into one of three buckets behind a proxy, {} checkpoints by {changelogs} changelogs",
            INCREMENT_BYTES / MIB,
            CHECKPOINTS * changelogs
        ),
        &[
            "network",
            "hedging",
            "p50_ms",
            "p90_ms",
            "p99_ms",
            "failed",
            "connections",
            "requests",
            "sent_MiB",
        ],
    );
    let mut figures = Vec::new();
    for (trouble, name) in [
        (Trouble::Calm, "calm"),
        (Trouble::Stalls, "1 % of connections stall"),
        (Trouble::Dead, "one bucket of three dead"),
    ] {
        for hedging in [false, true] {
            // Each object in the dead bucket takes its whole time.
            let changelogs = if trouble == Trouble::Dead && !hedging { bench.size(6, 1) } else { changelogs };
            let leg = run(dir, trouble, hedging, changelogs);
            bench.progress(&format!(
                "{name}, hedging {hedging}: p50 {:.0}, p99 {:.0} ms, {} failed",
                quantile(&leg.ms, 0.5),
                quantile(&leg.ms, 0.99),
                leg.failed
            ));
            table.row([
                name.into(),
                (if hedging { "on" } else { "off" }).into(),
                quantile(&leg.ms, 0.5).into(),
                quantile(&leg.ms, 0.9).into(),
                quantile(&leg.ms, 0.99).into(),
                leg.failed.into(),
                (leg.connections as f64 / leg.ms.len() as f64).into(),
                (leg.requests as f64 / leg.ms.len() as f64).into(),
                (leg.sent_bytes as f64 / MIB as f64 / leg.ms.len() as f64).into(),
            ]);
            figures.push((trouble, hedging, leg));
        }
    }
    bench.table(table);
    bench.note("Failed: not complete within 30 s. Connections, requests and MiB are per checkpoint.");
    let of = |trouble, hedging| {
        let leg = figures.iter().find(|leg| leg.0 == trouble && leg.1 == hedging);
        &leg.expect("each was run").2
    };
    let p99 = |trouble, hedging| quantile(&of(trouble, hedging).ms, 0.99);
    let p50 = |trouble, hedging| quantile(&of(trouble, hedging).ms, 0.5);
    bench.target(
        "p99 with stalls, of that without hedging",
        p99(Trouble::Stalls, true) / p99(Trouble::Stalls, false),
        Limit::AtMost(1.0),
    );
    bench.target(
        "failed checkpoints with a dead bucket",
        of(Trouble::Dead, true).failed as f64,
        Limit::AtMost(0.0),
    );
    bench.target(
        "p50 with a dead bucket, of the calm one",
        p50(Trouble::Dead, true) / p50(Trouble::Calm, true),
        Limit::AtMost(1.6),
    );
}

struct Leg {
    ms: Vec<f64>,
    failed: usize,
    requests: usize,
    connections: u64,
    sent_bytes: u64,
}

fn run(dir: &ScratchDir, trouble: Trouble, hedging: bool, changelogs: usize) -> Leg {
    let buckets = BUCKETS.map(str::to_owned).to_vec();
    let server = S3Server::start(ServerOptions { buckets, ..ServerOptions::default() }).expect("a server");
    server.add_rule(Rule::new(Fault::DelayAnswer(SERVICE)));
    let proxies = [1, 2, 3].map(|seed| {
        let proxy = Proxy::start(server.address()).expect("a proxy");
        match trouble {
            Trouble::Calm => {}
            Trouble::Stalls => {
                let after_bytes = 2 * MIB;
                proxy.set_with_probability(
                    0.01,
                    Fate::Stalled { direction: Direction::Up, after_bytes },
                    seed,
                );
            }
            Trouble::Dead if seed == 1 => proxy.set(|_| Fate::Dead),
            Trouble::Dead => {}
        }
        proxy
    });
    let mut leg = Leg { ms: Vec::new(), failed: 0, requests: 0, connections: 0, sent_bytes: 0 };
    for _ in 0..changelogs {
        let local = dir.make("faults-local");
        let mut uploads = UploadOptions::default();
        if !hedging {
            uploads.hedging = HedgeOptions::off();
        }
        let urls = BUCKETS.iter().zip(&proxies).map(|(bucket, proxy)| bucket_url(bucket, &proxy.endpoint()));
        let urls: Vec<String> = urls.collect();
        let mut options = process::options(&urls[0], &local, INCREMENT_BYTES)
            .segment_bytes(32 * MIB)
            .uploads(uploads)
            .persist_timeout(Duration::from_secs(30));
        for url in &urls[1..] {
            options = options.add_bucket(url);
        }
        let changelog = Changelog::open(options).expect("a changelog");
        let mut writer = changelog.create_writer("state", KeyGroupRange::ALL).expect("a writer");
        for _ in 0..CHECKPOINTS {
            fill(&mut writer, INCREMENT_BYTES);
            let asked_at = Instant::now();
            let outcome = writer.persist_durably(SequenceNumber::ZERO).wait();
            leg.ms.push(asked_at.elapsed().as_secs_f64() * 1e3);
            leg.failed += usize::from(outcome.is_err());
            proxies.iter().for_each(Proxy::reset);
            std::thread::sleep(PAUSE);
        }
        drop(writer);
        drop(changelog);
        let _ = std::fs::remove_dir_all(local);
    }
    leg.requests = server.requests().len();
    leg.connections = proxies.iter().map(Proxy::connections).sum();
    leg.sent_bytes = server.requests().iter().map(|request| request.body_bytes).sum();
    leg
}
