//! The list of metrics, the places that tell them, what a changelog in trouble really tells, the table in the documentation
//! and the dashboard agree.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use metrics::{
    Counter, CounterFn, Gauge, GaugeFn, Histogram, HistogramFn, Key, KeyName, Recorder, SharedString, Unit,
};
use tidelog::metrics::{Metric, MetricKind, all};
use tidelog::{Changelog, Durability, KeyGroup, KeyGroupRange, Options, Seams, SequenceNumber};
use tidelog_io::sim::{Fault, SimRng, SimWorld};
use tidelog_upload::sim::SimStore;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn kind(metric: &Metric) -> &'static str {
    match metric.kind {
        MetricKind::Counter => "counter",
        MetricKind::Gauge => "gauge",
        MetricKind::Histogram => "histogram",
    }
}

#[test]
fn names_are_unique_and_say_their_kind_and_unit() {
    let mut seen = BTreeSet::new();
    for metric in all() {
        assert!(seen.insert(metric.name), "{} is listed twice", metric.name);
        let words: Vec<&str> = metric.name.split('_').collect();
        assert_eq!(words[0], "tidelog", "{}", metric.name);
        assert_eq!(words.last() == Some(&"total"), metric.kind == MetricKind::Counter, "{}", metric.name);
        for unit in ["bytes", "seconds"] {
            assert_eq!(words.contains(&unit), metric.unit.as_str() == unit, "{}", metric.name);
        }
    }
}

/// `metrics::counter!("name", "label" => …)` in the sources of the library and the I/O crate; the upload crate tells by its
/// list.
#[test]
fn what_the_sources_tell_is_what_the_list_says() {
    let mut told: BTreeMap<String, (String, BTreeSet<String>)> = BTreeMap::new();
    for folder in ["src", "io/src"] {
        visit(&root().join(folder), &mut |text| {
            for (start, _) in text.match_indices("metrics::") {
                let call = &text[start + "metrics::".len()..];
                let Some((kind, rest)) = call.split_once("!(\"") else { continue };
                if !["counter", "gauge", "histogram"].contains(&kind) {
                    continue;
                }
                let (name, rest) = rest.split_once('"').expect("the name ends");
                let line = rest.split([';', '\n']).next().unwrap_or_default();
                let before_arrows = line.match_indices(" =>").map(|(arrow, _)| &line[..arrow]);
                let labels = before_arrows
                    .filter_map(|before| before.strip_suffix('"')?.rsplit_once('"'))
                    .map(|(_, label)| label.to_owned());
                told.insert(name.to_owned(), (kind.to_owned(), labels.collect()));
            }
        });
    }
    let uploads: BTreeSet<&str> = tidelog_upload::metrics::METRICS.iter().map(|metric| metric.name).collect();
    let listed: BTreeMap<String, (String, BTreeSet<String>)> = all()
        .filter(|metric| !uploads.contains(metric.name))
        .map(|metric| {
            let labels = metric.labels.iter().map(|label| (*label).to_owned()).collect();
            (metric.name.to_owned(), (kind(metric).to_owned(), labels))
        })
        .collect();
    assert_eq!(told, listed);
}

fn visit(folder: &Path, look: &mut impl FnMut(&str)) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            visit(&path, look);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            look(&fs::read_to_string(path).unwrap());
        }
    }
}

#[test]
fn the_table_has_every_metric_and_no_other() {
    let text = fs::read_to_string(root().join("docs/metrics.md")).unwrap();
    let (table, rest) = text.split_once("\nLabels:").unwrap();
    let table: Vec<&str> = table.lines().filter(|line| line.starts_with("| `tidelog_")).collect();
    let rows: Vec<String> = all()
        .map(|metric| {
            let labels: Vec<String> = metric.labels.iter().map(|label| format!("`{label}`")).collect();
            let labels = if labels.is_empty() { "–".to_owned() } else { labels.join(", ") };
            let (name, unit) = (metric.name, metric.unit.as_str());
            format!("| `{name}` | {} | {unit} | {labels} | {} |", kind(metric), metric.help)
        })
        .collect();
    assert_eq!(table, rows, "docs/metrics.md should have these rows:\n{}\n", rows.join("\n"));
    for word in rest.split(|c: char| !c.is_ascii_alphanumeric() && c != '_') {
        let known = || all().any(|metric| metric.name == word);
        assert!(!word.starts_with("tidelog_") || known(), "docs/metrics.md speaks of {word}");
    }
}

/// Name, kind and labels.
type ToldOf = BTreeSet<(String, &'static str, Vec<String>)>;

/// Remembers what is described and told.
#[derive(Default)]
struct Listener {
    described: Mutex<BTreeMap<String, (&'static str, Option<Unit>)>>,
    told: Arc<Mutex<ToldOf>>,
}

impl Listener {
    fn describe(&self, kind: &'static str, name: KeyName, unit: Option<Unit>) {
        self.described.lock().unwrap().insert(name.as_str().to_owned(), (kind, unit));
    }
}

/// One metric, which counts as told once it has got a value; a counter, when it has grown.
struct Told {
    key: Key,
    told: Arc<Mutex<ToldOf>>,
}

impl Told {
    fn note(&self, kind: &'static str) {
        let labels = self.key.labels().map(|label| label.key().to_owned()).collect();
        self.told.lock().unwrap().insert((self.key.name().to_owned(), kind, labels));
    }
}

impl CounterFn for Told {
    fn increment(&self, value: u64) {
        if value > 0 {
            self.note("counter");
        }
    }

    fn absolute(&self, value: u64) {
        CounterFn::increment(self, value);
    }
}

impl GaugeFn for Told {
    fn increment(&self, _: f64) {
        self.note("gauge");
    }

    fn decrement(&self, _: f64) {
        self.note("gauge");
    }

    fn set(&self, _: f64) {
        self.note("gauge");
    }
}

impl HistogramFn for Told {
    fn record(&self, _: f64) {
        self.note("histogram");
    }
}

impl Listener {
    fn told(&self, key: &Key) -> Arc<Told> {
        Arc::new(Told { key: key.clone(), told: Arc::clone(&self.told) })
    }
}

impl Recorder for Listener {
    fn describe_counter(&self, name: KeyName, unit: Option<Unit>, _: SharedString) {
        self.describe("counter", name, unit);
    }

    fn describe_gauge(&self, name: KeyName, unit: Option<Unit>, _: SharedString) {
        self.describe("gauge", name, unit);
    }

    fn describe_histogram(&self, name: KeyName, unit: Option<Unit>, _: SharedString) {
        self.describe("histogram", name, unit);
    }

    fn register_counter(&self, key: &Key, _: &metrics::Metadata<'_>) -> Counter {
        Counter::from_arc(self.told(key))
    }

    fn register_gauge(&self, key: &Key, _: &metrics::Metadata<'_>) -> Gauge {
        Gauge::from_arc(self.told(key))
    }

    fn register_histogram(&self, key: &Key, _: &metrics::Metadata<'_>) -> Histogram {
        Histogram::from_arc(self.told(key))
    }
}

/// What no simulation brings about: engines are opened by what the machine allows. The I/O crate tests that in a process to
/// which io_uring is forbidden.
const NOT_SIMULATED: &str = "tidelog_engine_fallbacks_total";

#[test]
fn a_changelog_in_trouble_tells_every_metric_of_the_list_as_listed() {
    let listener = Listener::default();
    metrics::with_local_recorder(&listener, || {
        trouble();
        rot();
        leave_out();
    });
    let uploads: BTreeSet<&str> = tidelog_upload::metrics::METRICS.iter().map(|metric| metric.name).collect();
    let described = listener.described.into_inner().unwrap();
    for metric in all() {
        assert_eq!(described.get(metric.name), Some(&(kind(metric), Some(metric.unit))), "{}", metric.name);
    }
    assert_eq!(described.len(), all().count(), "{described:?}");
    let told = listener.told.lock().unwrap().clone();
    let listed: BTreeSet<(String, &str, Vec<String>)> = all()
        .map(|metric| {
            let labels = metric.labels.iter().map(|label| (*label).to_owned()).collect();
            (metric.name.to_owned(), kind(metric), labels)
        })
        .collect();
    let strange: Vec<&(String, &str, Vec<String>)> = told.difference(&listed).collect();
    assert!(strange.is_empty(), "not listed: {strange:?}");
    // The upload crate's own test shows that a driver tells all of its list.
    let silent: Vec<&String> = listed
        .difference(&told)
        .map(|(name, ..)| name)
        .filter(|name| *name != NOT_SIMULATED && !uploads.contains(name.as_str()))
        .collect();
    assert_eq!(silent, [""; 0], "never told");
}

fn open(world: &SimWorld, store: &Arc<SimStore>, micros: &Arc<AtomicU64>) -> Changelog {
    open_all(&[world], store, micros)
}

fn open_all(worlds: &[&SimWorld], store: &Arc<SimStore>, micros: &Arc<AtomicU64>) -> Changelog {
    let (start, time) = (Instant::now(), Arc::clone(micros));
    let mut random = SimRng::new(1);
    let mut options = Options::new("sim://0", "/sim")
        .persist_timeout(Duration::from_secs(10))
        .block_bytes(8 << 10)
        .writes_in_flight(1)
        .segment_bytes(64 << 10)
        .local_bytes(256 << 10)
        .part_bytes(32 << 10)
        .value_bytes_max(64 << 10)
        .memory_bytes(1 << 20)
        .lane_bytes(64 << 10)
        .append_wait_max(Duration::from_millis(1));
    for directory in 1..worlds.len() {
        options = options.add_directory(format!("/sim/{directory}"));
    }
    let open = |world: &&SimWorld| (world.files(), Box::new(world.disk(1, Durability::Power)) as Box<_>);
    let seams = Seams {
        directories: worlds.iter().map(open).collect(),
        stores: vec![store.clone()],
        clock: Arc::new(move || start + Duration::from_micros(time.fetch_add(10, Ordering::Relaxed))),
        random: Box::new(move || random.next_u64()),
    };
    Changelog::open_simulated(options, seams).unwrap()
}

/// A block that is only kept for restores is damaged between two uses of its directory.
fn rot() {
    let (world, store, micros) = (SimWorld::new(7), Arc::new(SimStore::new(3)), Arc::default());
    persist_and_close(open(&world, &store, &micros), 1, &micros);
    world.flip_bit("segment-00000001", 100, 1);
    assert_eq!(open(&world, &store, &micros).recovered()[0].end(), SequenceNumber(1));
}

/// So many logs have a change in an object.
fn persist_and_close(changelog: Changelog, logs: u64, micros: &AtomicU64) {
    let persist = |log: u64| {
        let mut writer = changelog.create_writer(format!("log {log}"), KeyGroupRange::ALL).unwrap();
        writer.append(KeyGroup(0), b"one").unwrap();
        writer.persist_durably(SequenceNumber::ZERO)
    };
    let persists: Vec<_> = (0..logs).map(persist).collect();
    for _ in 0..100 {
        micros.fetch_add(10_000, Ordering::Relaxed);
        changelog.step();
    }
    for persisted in persists {
        persisted.wait_timeout(Duration::ZERO).expect("in time").unwrap();
    }
    changelog.close(Duration::from_secs(1)).unwrap();
}

/// One of two directories is not open when what the other one has in an object is discarded.
fn leave_out() {
    let worlds = [7, 8].map(SimWorld::new);
    let (store, micros) = (Arc::new(SimStore::new(3)), Arc::default());
    persist_and_close(open_all(&worlds.each_ref(), &store, &micros), 2, &micros);
    let changelog = open(&worlds[0], &store, &micros);
    changelog.recovered()[0].discard();
    changelog.close(Duration::from_secs(1)).unwrap();
}

/// Appends, syncs and checkpoints while disks, manifests and buckets fail.
fn trouble() {
    const ZERO: SequenceNumber = SequenceNumber::ZERO;
    let world = SimWorld::new(7);
    let store = Arc::new(SimStore::new(3));
    let micros = Arc::new(AtomicU64::new(0));
    let changelog = open(&world, &store, &micros);
    let pass = |seconds: u64| {
        for _ in 0..seconds * 100 {
            micros.fetch_add(10_000, Ordering::Relaxed);
            changelog.step();
        }
    };
    let writer = |name: &str| changelog.create_writer(name, KeyGroupRange::ALL).unwrap();

    // A checkpoint, and one that the application declines.
    let mut first = writer("first");
    first.append(KeyGroup(0), b"one").unwrap();
    let persisted = first.persist_durably(ZERO);
    pass(1);
    let handle = persisted.wait_timeout(Duration::ZERO).expect("in time").unwrap();
    first.reset(ZERO, SequenceNumber(1)).unwrap();

    // A restore cannot read a local block.
    world.inject(Fault::ReadError, 0);
    let reader = changelog.restore(&[handle]).unwrap().reader(KeyGroupRange::ALL).unwrap();
    assert_eq!(reader.map(|change| change.unwrap().value).collect::<Vec<_>>(), ["one"]);

    // A write fails, and the manifest.
    world.inject(Fault::WriteError, 0);
    first.append(KeyGroup(0), b"two").unwrap();
    let synced = first.sync();
    pass(1);
    synced.wait_timeout(Duration::ZERO).expect("in time").unwrap();
    world.inject(Fault::FilesError, 0);
    drop(changelog.create_writer("unrecorded", KeyGroupRange::ALL));

    // The bucket is dead, and the disk takes no new file: lanes and disk fill up.
    store.set_dead(true);
    world.inject(Fault::CreateNoSpace, 0);
    first.truncate(SequenceNumber(1)).unwrap();
    let mut full = 0;
    while full < 20 {
        match first.append(KeyGroup(0), &[7; 1000]) {
            Ok(_) => {}
            Err(_) => {
                full += 1;
                pass(1);
            }
        }
    }
    drop(first.persist_durably(SequenceNumber(1)));
    pass(60);
    store.heal();
    pass(60);
    first.truncate_and_close();
    pass(60);

    // The engine of the disk breaks with changes in flight.
    let mut lost = writer("lost");
    world.hold(true);
    lost.append(KeyGroup(0), b"in flight").unwrap();
    let synced = lost.sync();
    changelog.step();
    world.inject(Fault::EngineBreaks, 0);
    pass(1);
    assert!(synced.wait_timeout(Duration::ZERO).expect("in time").is_err());
}

/// Every query of the dashboard asks for metrics that exist, by labels that they have, and every metric is asked for.
#[test]
fn the_dashboard_shows_every_metric_and_no_other() {
    let text = fs::read_to_string(root().join("docs/grafana/tidelog.json")).unwrap();
    let dashboard: serde_json::Value = serde_json::from_str(&text).unwrap();
    let mut asked = BTreeSet::new();
    for panel in dashboard["panels"].as_array().unwrap() {
        for target in panel["targets"].as_array().into_iter().flatten() {
            let (query, legend) =
                (target["expr"].as_str().unwrap(), target["legendFormat"].as_str().unwrap());
            asked.extend(check_query(query, legend));
        }
    }
    let missing: Vec<&str> =
        tidelog::metrics::all().map(|metric| metric.name).filter(|name| !asked.contains(name)).collect();
    assert!(missing.is_empty(), "the dashboard does not show {missing:?}");
}

/// The metrics that a query asks for.
fn check_query(query: &str, legend: &str) -> BTreeSet<&'static str> {
    let mut asked = BTreeSet::new();
    let mut labels = BTreeSet::from(["instance", "job"]);
    for (start, _) in query.match_indices("tidelog_") {
        let word = |c: char| c.is_ascii_alphanumeric() || c == '_';
        let end = query[start..].find(|c| !word(c)).map_or(query.len(), |length| start + length);
        let (name, is_bucket) = match query[start..end].strip_suffix("_bucket") {
            Some(name) => (name, true),
            None => (&query[start..end], false),
        };
        let metric = all().find(|metric| metric.name == name);
        let metric = metric.unwrap_or_else(|| panic!("no metric has the name {name}: {query}"));
        assert_eq!(metric.kind == MetricKind::Histogram, is_bucket, "{query}");
        // Those say it all by their value: one is told at open and does not grow, of the other one is too many.
        let is_level =
            metric.kind == MetricKind::Gauge || [NOT_SIMULATED, "tidelog_logs_lost_total"].contains(&name);
        let grows = query.contains("rate(") || query.contains("increase(");
        assert!(!(metric.kind == MetricKind::Gauge && grows) && (is_level || grows), "{query}");
        labels.extend(metric.labels);
        labels.extend(is_bucket.then_some("le"));
        asked.insert(metric.name);
    }
    assert!(!asked.is_empty(), "a query without a metric: {query}");
    let grouped = query.split("by (").skip(1).filter_map(|rest| rest.split_once(')'));
    let matched = query.split('{').skip(1).filter_map(|rest| rest.split_once('}'));
    let shown = legend.split("{{").skip(1).filter_map(|rest| rest.split_once("}}"));
    let wanted = grouped
        .flat_map(|(labels, _)| labels.split(','))
        .chain(matched.flat_map(|(matchers, _)| matchers.split(',')))
        .chain(shown.map(|(label, _)| label));
    for label in wanted.map(|label| label.split(['=', '!']).next().unwrap_or_default().trim()) {
        assert!(labels.contains(label), "{query} / {legend}: no label {label}");
    }
    asked
}

/// Every alarm of the page for operators asks for metrics that exist; so does what it says of them.
#[test]
fn the_alarms_ask_for_metrics_that_exist() {
    let text = fs::read_to_string(root().join("docs/operations.md")).unwrap();
    let (_, alarms) = text.split_once("\n## What to watch\n").unwrap();
    let alarms = alarms.split("\n## ").next().unwrap();
    let queries: Vec<&str> = alarms
        .split("```promql\n")
        .skip(1)
        .map(|rest| rest.split_once("```").expect("it ends").0.trim())
        .collect();
    assert!(queries.len() >= 10, "{} alarms: they are not where they were", queries.len());
    for query in queries {
        check_query(query, "");
    }
    for word in text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_') {
        let name = word.strip_suffix("_bucket").unwrap_or(word);
        let known = || all().any(|metric| metric.name == name);
        assert!(!word.starts_with("tidelog_") || known(), "docs/operations.md speaks of {word}");
    }
}
