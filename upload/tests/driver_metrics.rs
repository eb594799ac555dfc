//! What the driver tells the metrics facade is what its list says, names and labels, and nothing of the list is missing.

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use metrics::{Counter, Gauge, Histogram, Key, KeyName, Metadata, Recorder, SharedString, Unit};
use tidelog_upload::metrics::{METRICS, MetricKind};
use tidelog_upload::sim::{Fault, SimStore};
use tidelog_upload::{HedgeOptions, Operation, Store};

use common::{HOME, Trap, Trapped, answer, finish, inline, outcome, put, run_until, small_parts};

/// Remembers what it hears of.
#[derive(Default)]
struct Listener {
    described: Mutex<BTreeMap<String, (MetricKind, Option<Unit>)>>,
    seen: Mutex<BTreeSet<(String, &'static str, Vec<String>)>>,
    values: Mutex<BTreeMap<String, Arc<AtomicFloat>>>,
}

#[derive(Default)]
struct AtomicFloat(Mutex<f64>);

impl metrics::GaugeFn for AtomicFloat {
    fn increment(&self, value: f64) {
        *self.0.lock().unwrap() += value;
    }

    fn decrement(&self, value: f64) {
        *self.0.lock().unwrap() -= value;
    }

    fn set(&self, value: f64) {
        *self.0.lock().unwrap() = value;
    }
}

impl Listener {
    fn describe(&self, kind: MetricKind, name: KeyName, unit: Option<Unit>) {
        self.described.lock().unwrap().insert(name.as_str().to_owned(), (kind, unit));
    }

    fn see(&self, kind: &'static str, key: &Key) {
        let labels = key.labels().map(|label| label.key().to_owned()).collect();
        self.seen.lock().unwrap().insert((key.name().to_owned(), kind, labels));
    }
}

impl Recorder for Listener {
    fn describe_counter(&self, name: KeyName, unit: Option<Unit>, _: SharedString) {
        self.describe(MetricKind::Counter, name, unit);
    }

    fn describe_gauge(&self, name: KeyName, unit: Option<Unit>, _: SharedString) {
        self.describe(MetricKind::Gauge, name, unit);
    }

    fn describe_histogram(&self, name: KeyName, unit: Option<Unit>, _: SharedString) {
        self.describe(MetricKind::Histogram, name, unit);
    }

    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        self.see("Counter", key);
        Counter::noop()
    }

    fn register_gauge(&self, key: &Key, _: &Metadata<'_>) -> Gauge {
        self.see("Gauge", key);
        let mut values = self.values.lock().unwrap();
        Gauge::from_arc(Arc::clone(values.entry(key.to_string()).or_default()))
    }

    fn register_histogram(&self, key: &Key, _: &Metadata<'_>) -> Histogram {
        self.see("Histogram", key);
        Histogram::noop()
    }
}

#[test]
fn what_is_told_is_what_the_list_says() {
    let listener = Listener::default();
    metrics::with_local_recorder(&listener, || {
        // What is sent to one bucket hangs, so that it is raced, opened and looked at; a listing is refused.
        let sick = Arc::new(AtomicUsize::new(usize::MAX));
        let stores: Vec<_> = (0..2)
            .map(|bucket| {
                let sick = Arc::clone(&sick);
                Trapped::new(SimStore::new(bucket as u64), move |operation, _, _| {
                    let writes = matches!(operation, Operation::Put | Operation::PutPart);
                    (writes && sick.load(Ordering::Relaxed) == bucket).then_some(Trap::Never)
                })
            })
            .collect();
        let mut options = small_parts();
        options.hedging = HedgeOptions::default();
        options.hedging.tokens_max = 1.0;
        options.hedging.second_chance_max = 0;
        let shared = stores.iter().map(|store| Arc::new(store.clone()) as Arc<dyn Store>).collect();
        let (driver, time) = inline(shared, options);
        stores[0].inner.fail_next(Operation::List, Fault::Throttled);
        let (done, listed) = answer();
        driver.list(HOME, "", done);
        assert!(outcome(&driver, &time, listed).unwrap().is_empty());
        let (placement, _) = finish(driver.upload("home", None), "x");
        let placement = outcome(&driver, &time, placement).unwrap();
        sick.store(placement.pieces[0].bucket.0, Ordering::Relaxed);
        for number in 0..50 {
            let mut upload = driver.upload(&number.to_string(), None);
            drop(put(&mut upload, "123456789"));
            upload.wanted(None);
            let (placement, leftovers) = finish(upload, "x");
            outcome(&driver, &time, placement).unwrap();
            outcome(&driver, &time, leftovers);
            let seen = listener.seen.lock().unwrap().len();
            if seen == METRICS.len() {
                break;
            }
            time.reach(time.now() + Duration::from_secs(600));
            driver.tick(time.now());
        }
        run_until(&driver, &time, || driver.stats().bytes_in_flight == 0);
    });
    for metric in METRICS {
        let described = listener.described.lock().unwrap().get(metric.name).copied();
        assert_eq!(described, Some((metric.kind, Some(metric.unit))), "{}", metric.name);
    }
    let listed: BTreeSet<_> = METRICS
        .iter()
        .map(|metric| {
            let kind = match metric.kind {
                MetricKind::Counter => "Counter",
                MetricKind::Gauge => "Gauge",
                MetricKind::Histogram => "Histogram",
            };
            let labels = metric.labels.iter().map(|label| (*label).to_owned()).collect();
            (metric.name.to_owned(), kind, labels)
        })
        .collect();
    assert_eq!(*listener.seen.lock().unwrap(), listed);
    for (key, value) in listener.values.lock().unwrap().iter() {
        if key.contains("bytes") {
            assert_eq!(*value.0.lock().unwrap(), 0.0, "{key}");
        }
    }
}
