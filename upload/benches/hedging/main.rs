//! What hedging over several buckets does to checkpoints, in a model of an object store in virtual time.
//!
//! The code of the policy and of the upload's state machine is the real one; the network is `tidelog_upload::sim::network`.
//! A checkpoint takes as long as its slowest node. Every figure follows from the seed, so a busy machine does not matter.
//! Extra requests are objects and parts sent beyond the ones needed, in percent of those; extra bytes are what they put on
//! the wire, also when they were given up. Each run begins with calm checkpoints that are not counted, in which connections
//! are opened and the policy learns; with troubles, the first sick checkpoint stands apart.
//!
//! Run by `cargo bench -p tidelog-upload --bench hedging`, with `-- --svg FILE` for the plot. Without `--bench` everything
//! is small.
#![forbid(unsafe_code)]

#[path = "../../../benches/common/mod.rs"]
mod common;
mod fixed;
mod plot;

use std::time::Duration;

use common::{Bench, Limit, Table, median, quantile};
use fixed::{Attempts, FixedWorld};
use plot::Curve;
use serde_json::json;
use tidelog_upload::sim::network::{Model, Sickness};
use tidelog_upload::sim::world::{Checkpoint, Scenario, Sent, World};
use tidelog_upload::{HedgeOptions, UploadOptions};

const BUCKETS: usize = 4;

/// Who writes how much over which interface.
#[derive(Clone, Copy)]
struct Size {
    what: &'static str,
    nodes: usize,
    object_bytes: u64,
    nic_bytes_per_second: u64,
    /// How many checkpoints count, as a share of the most.
    share: f64,
}

const SMALL: Size = Size {
    what: "500 × 5 MB",
    nodes: 500,
    object_bytes: 5_000_000,
    nic_bytes_per_second: 1_250_000_000,
    share: 1.0,
};
const MEDIUM: Size = Size {
    what: "50 × 256 MB",
    nodes: 50,
    object_bytes: 256_000_000,
    nic_bytes_per_second: 1_250_000_000,
    share: 0.25,
};
const LARGE: Size = Size {
    what: "1 × 2.5 GB",
    nodes: 1,
    object_bytes: 2_500_000_000,
    nic_bytes_per_second: 3_125_000_000,
    share: 0.25,
};

#[derive(Clone, Copy, PartialEq)]
enum Way {
    /// Without the real code: one attempt.
    Plain,
    Flink,
    Off,
    Local,
    Shared,
}

impl Way {
    fn name(self) -> &'static str {
        match self {
            Way::Plain => "one attempt (no code of ours)",
            Way::Flink => "1 s, three attempts, same bucket (Flink)",
            Way::Off => "no hedging, slow connections closed",
            Way::Local => "hedging, each node alone",
            Way::Shared => "hedging, shared health, progress check",
        }
    }
}

#[derive(Clone, Copy)]
enum Trouble {
    None,
    /// Of one bucket.
    Bucket(Sickness),
    /// Of all buckets.
    Buckets(Sickness),
    /// Every node's interface, in bytes a second.
    Link(f64),
    /// From the beginning, requests without a body hiccup as often as the ones with one.
    ControlHiccups,
}

/// What one way did.
struct Run {
    /// Without the first one of a trouble.
    times_ms: Vec<f64>,
    first_ms: f64,
    failed_objects: usize,
    failed_checkpoints: usize,
    objects: usize,
    sent: Sent,
}

impl Run {
    fn p50(&self) -> f64 {
        median(&self.times_ms)
    }

    fn p99(&self) -> f64 {
        quantile(&self.times_ms, 0.99)
    }

    fn extra_requests_percent(&self) -> f64 {
        100.0 * (self.sent.bodies as f64 / self.sent.bodies_needed as f64 - 1.0)
    }

    fn extra_bytes_percent(&self) -> f64 {
        100.0 * (self.sent.bytes as f64 / self.sent.bytes_needed as f64 - 1.0)
    }

    fn failed_percent(&self) -> f64 {
        100.0 * self.failed_objects as f64 / self.objects as f64
    }
}

enum Nodes {
    Real(Box<World>),
    Fixed(Box<FixedWorld>),
}

impl Nodes {
    fn new(way: Way, size: Size, nodes: usize, trouble: Trouble, seed: u64) -> Nodes {
        let mut options = UploadOptions::default();
        if way == Way::Off {
            options.hedging = HedgeOptions::off();
        }
        options.hedging.progress_check = way == Way::Shared;
        let scenario = Scenario {
            nodes,
            buckets: BUCKETS,
            object_bytes: size.object_bytes,
            nic_bytes_per_second: size.nic_bytes_per_second,
            interval: Duration::from_secs(10),
            deadline: Duration::from_secs(600),
            share_health: way == Way::Shared,
            options,
            seed,
        };
        let mut model = Model::default();
        if let Trouble::ControlHiccups = trouble {
            model.control_hiccup_share = model.hiccup_share;
        }
        match way {
            Way::Plain => Nodes::Fixed(Box::new(FixedWorld::new(scenario, model, Attempts::unlimited()))),
            Way::Flink => Nodes::Fixed(Box::new(FixedWorld::new(scenario, model, Attempts::flink()))),
            Way::Off | Way::Local | Way::Shared => Nodes::Real(Box::new(World::new(scenario, model))),
        }
    }

    fn checkpoint(&mut self) -> Checkpoint {
        match self {
            Nodes::Real(world) => world.checkpoint(),
            Nodes::Fixed(world) => world.checkpoint(),
        }
    }

    fn sent(&self) -> Sent {
        match self {
            Nodes::Real(world) => world.sent(),
            Nodes::Fixed(world) => world.sent(),
        }
    }

    fn begin(&mut self, trouble: Trouble) {
        let mut set = |bucket, sickness| match self {
            Nodes::Real(world) => world.set_sickness(bucket, sickness),
            Nodes::Fixed(world) => world.set_sickness(bucket, sickness),
        };
        match trouble {
            Trouble::None | Trouble::ControlHiccups => {}
            Trouble::Bucket(sickness) => set(0, sickness),
            Trouble::Buckets(sickness) => (0..BUCKETS).for_each(|bucket| set(bucket, sickness)),
            Trouble::Link(bytes_per_second) => match self {
                Nodes::Real(world) => world.set_nic(bytes_per_second),
                Nodes::Fixed(world) => world.set_nic(bytes_per_second),
            },
        }
    }
}

/// How large the runs are.
#[derive(Clone, Copy)]
struct Scale {
    checkpoints: usize,
    calm: usize,
    /// Divides the numbers of nodes.
    smaller: usize,
    seed: u64,
}

fn run(scale: Scale, way: Way, size: Size, trouble: Trouble) -> Run {
    let count = ((scale.checkpoints as f64 * size.share) as usize).max(2);
    let nodes = (size.nodes / scale.smaller).max(1);
    let mut world = Nodes::new(way, size, nodes, trouble, scale.seed);
    for _ in 0..scale.calm {
        world.checkpoint();
    }
    world.begin(trouble);
    let first = world.checkpoint();
    let before = world.sent();
    let mut run = Run {
        times_ms: Vec::with_capacity(count),
        first_ms: milliseconds(first.took),
        failed_objects: 0,
        failed_checkpoints: 0,
        objects: count * nodes,
        sent: Sent::default(),
    };
    for _ in 0..count {
        let Checkpoint { took, failed } = world.checkpoint();
        run.times_ms.push(milliseconds(took));
        run.failed_objects += failed;
        run.failed_checkpoints += usize::from(failed > 0);
    }
    run.sent = world.sent().since(&before);
    run
}

fn milliseconds(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

fn main() {
    let mut bench = Bench::start(
        "hedging",
        "What hedging over several buckets does to checkpoints, in virtual time.",
        &[
            ("--checkpoints NUMBER", "counted for each line, a quarter for large objects (4000)"),
            ("--troubled NUMBER", "the same with a trouble (400)"),
            ("--seed NUMBER", "decides everything (1)"),
            ("--svg FILE", "where to draw the distributions"),
            ("--only calm|troubles|validation", "a part of it"),
        ],
    )
    .counts_only();
    let scale = Scale {
        checkpoints: bench.number("--checkpoints", bench.size(4000, 4)) as usize,
        calm: bench.size(60, 2),
        smaller: bench.size(1, 25),
        seed: bench.number("--seed", 1),
    };
    let troubled = Scale { checkpoints: bench.number("--troubled", bench.size(400, 4)) as usize, ..scale };
    bench.note(format!(
        "Seed {}; {} checkpoints a line, a quarter for larger objects, {} with a trouble, after {} calm ones that do not count; one \
         every 10 s.",
        scale.seed, scale.checkpoints, troubled.checkpoints, scale.calm
    ));
    let only = bench.text("--only");
    let wanted = |part: &str| only.as_deref().is_none_or(|only| only == part);
    if wanted("validation") {
        validate(&mut bench, scale);
    }
    let calm_p50 = if wanted("calm") || wanted("troubles") { calm(&mut bench, scale) } else { f64::NAN };
    if wanted("troubles") {
        troubles(&mut bench, troubled, calm_p50);
    }
    bench.finish();
}

/// The model alone, against what Flink's FLIP-158 published.
fn validate(bench: &mut Bench, scale: Scale) {
    let mut table = Table::new(
        "The model without hedging, against published figures",
        &["objects", "quantile", "ms", "published_ms"],
    );
    let other = Size { what: "250 × 2 MB", nodes: 250, object_bytes: 2_000_000, ..SMALL };
    for (size, quantiles) in
        [(SMALL, [(0.5, 1000.0), (0.99, 1700.0)]), (other, [(0.75, 500.0), (0.99, 1125.0)])]
    {
        bench.progress(size.what);
        let run = run(scale, Way::Plain, size, Trouble::None);
        for (at, published_ms) in quantiles {
            let ms = quantile(&run.times_ms, at);
            table.row([
                json!(size.what),
                json!(format!("p{:.0}", at * 100.0)),
                json!(ms),
                json!(published_ms),
            ]);
            bench.target(
                format!("model / published, p{:.0} of {}, off by", at * 100.0, size.what),
                (ms / published_ms - 1.0).abs(),
                Limit::AtMost(0.1),
            );
        }
    }
    bench.table(table);
}

/// Everything is well. Returns the p50 of small objects, each node alone.
fn calm(bench: &mut Bench, scale: Scale) -> f64 {
    let mut table = Table::new(
        "All buckets well",
        &[
            "objects",
            "policy",
            "p50_ms",
            "p99_ms",
            "extra_requests_percent",
            "extra_bytes_percent",
            "controls_per_object",
        ],
    );
    let mut calm_p50 = f64::NAN;
    for size in [SMALL, MEDIUM, LARGE] {
        let ways = [Way::Plain, Way::Off, Way::Flink, Way::Local, Way::Shared];
        let runs = ways.map(|way| {
            bench.progress(&format!("{}, {}", size.what, way.name()));
            let run = run(scale, way, size, Trouble::None);
            table.row([
                json!(size.what),
                json!(way.name()),
                json!(run.p50()),
                json!(run.p99()),
                json!(run.extra_requests_percent()),
                json!(run.extra_bytes_percent()),
                json!(run.sent.controls as f64 / run.objects as f64),
            ]);
            run
        });
        let [plain, off, flink, local, shared] = &runs;
        let below = |a: f64, b: f64| 100.0 * (1.0 - a / b);
        let what = size.what;
        let svg = bench.text("--svg");
        let mut target = |text: &str, value, limit| bench.target(format!("{what}: {text}"), value, limit);
        if size.nodes == SMALL.nodes {
            calm_p50 = local.p50();
            // One attempt is what the study, and what Flink published, call no hedging.
            target("p50 below one attempt, %", below(local.p50(), plain.p50()), Limit::AtLeast(50.0));
            target("p99 below one attempt, %", below(local.p99(), plain.p99()), Limit::AtLeast(60.0));
            target("p99 below Flink's, %", below(local.p99(), flink.p99()), Limit::AtLeast(45.0));
            target("extra requests, %", local.extra_requests_percent(), Limit::AtMost(6.0));
            target("extra bytes, %", local.extra_bytes_percent(), Limit::AtMost(2.5));
            target(
                "p99 below one attempt when shared, %",
                below(shared.p99(), plain.p99()),
                Limit::AtLeast(70.0),
            );
            if let Some(path) = svg {
                let curves = [
                    (plain, "no hedging"),
                    (off, "slow connections closed only"),
                    (flink, "Flink: 1 s, 3 attempts"),
                    (local, "tidelog, each node alone"),
                    (shared, "shared health, progress check"),
                ];
                let curves = curves.map(|(run, name)| Curve { name, values: &run.times_ms });
                std::fs::write(&path, plot::svg(what, &curves)).expect("the plot can be written");
            }
        } else if size.nodes == MEDIUM.nodes {
            target("p99 below one attempt, %", below(local.p99(), plain.p99()), Limit::AtLeast(55.0));
        }
        target("failed objects", (local.failed_objects + shared.failed_objects) as f64, Limit::AtMost(0.0));
    }
    bench.table(table);
    calm_p50
}

fn troubles(bench: &mut Bench, scale: Scale, calm_p50: f64) {
    let well = Sickness::default();
    let dead = Trouble::Bucket(Sickness { dead: true, ..well });
    let refusing = Sickness { refused_share: 0.9, ..well };
    let kinds = [
        ("one bucket refuses half", SMALL, Trouble::Bucket(Sickness { refused_share: 0.5, ..well })),
        (
            "one bucket browns out",
            SMALL,
            Trouble::Bucket(Sickness { refused_share: 0.2, slower: 10.0, ..well }),
        ),
        ("one bucket dead", SMALL, dead),
        ("one bucket stalls 1 %", SMALL, Trouble::Bucket(Sickness { stalled_share: 0.01, ..well })),
        ("2 of 16 front ends slow", SMALL, Trouble::Bucket(Sickness { slow_front_ends: 2, ..well })),
        ("all buckets 3 × slower", SMALL, Trouble::Buckets(Sickness { slower: 3.0, ..well })),
        ("all buckets refuse 90 %", SMALL, Trouble::Buckets(refusing)),
        ("one bucket dead", MEDIUM, dead),
        ("link at 150 MB/s", MEDIUM, Trouble::Link(150e6)),
        ("Completes hiccup too", MEDIUM, Trouble::ControlHiccups),
    ];
    let mut table = Table::new(
        "Troubles",
        &[
            "objects",
            "trouble",
            "policy",
            "first_ms",
            "p50_ms",
            "p99_ms",
            "extra_requests_percent",
            "extra_bytes_percent",
            "failed_percent",
        ],
    );
    for (name, size, trouble) in kinds {
        let [off, _, local, shared] = [Way::Off, Way::Flink, Way::Local, Way::Shared].map(|way| {
            // Without hedging, the dead bucket's objects wait for their deadlines: a few show it.
            let dead = matches!(trouble, Trouble::Bucket(sickness) if sickness.dead);
            let checkpoints = if dead && way == Way::Off { 3 } else { scale.checkpoints };
            bench.progress(&format!("{}, {name}, {}", size.what, way.name()));
            let run = run(Scale { checkpoints, ..scale }, way, size, trouble);
            table.row([
                json!(size.what),
                json!(name),
                json!(way.name()),
                json!(run.first_ms),
                json!(run.p50()),
                json!(run.p99()),
                json!(run.extra_requests_percent()),
                json!(run.extra_bytes_percent()),
                json!(run.failed_percent()),
            ]);
            run
        });
        let what = format!("{}, {name}", size.what);
        let mut target = |text: &str, value, limit| bench.target(format!("{what}: {text}"), value, limit);
        target(
            "failed checkpoints",
            (local.failed_checkpoints + shared.failed_checkpoints) as f64,
            Limit::AtMost(0.0),
        );
        let above = |a: f64, b: f64| 100.0 * (a / b - 1.0);
        match trouble {
            Trouble::Bucket(Sickness { dead: true, .. }) if size.nodes == SMALL.nodes => {
                target("p50 above calm, alone, %", above(local.p50(), calm_p50), Limit::AtMost(60.0));
                target("p50 above calm, shared, %", above(shared.p50(), calm_p50), Limit::AtMost(10.0));
                target("extra bytes, alone, %", local.extra_bytes_percent(), Limit::AtMost(3.0));
                target("extra bytes, shared, %", shared.extra_bytes_percent(), Limit::AtMost(3.0));
            }
            Trouble::Link(_) => {
                target("extra bytes, alone, %", local.extra_bytes_percent(), Limit::AtMost(1.0));
                target("p50 above no hedging, %", above(local.p50(), off.p50()), Limit::AtMost(0.0));
            }
            Trouble::Buckets(Sickness { refused_share, .. }) if refused_share > 0.0 => {
                let more = above(local.sent.bodies as f64, off.sent.bodies as f64);
                target("attempts above no hedging, %", more, Limit::AtMost(40.0));
            }
            _ => {}
        }
    }
    bench.table(table);
}
