//! Objects composed of bytes and of ranges of other objects, on simulated buckets that fail.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tidelog_upload::bucket::BucketIndex;
use tidelog_upload::sim::{Chances, Fault, SimStore};
use tidelog_upload::{
    Capabilities, Composed, Driver, Operation, Runtime, Store, StoreError, StoreErrorKind, UploadOptions,
    block_on, channel,
};

const BUCKET: BucketIndex = BucketIndex(0);
const PART_BYTES_MIN: u64 = 1000;

fn store(seed: u64, sparse: bool) -> SimStore {
    let row = SimStore::new(0).capabilities().clone();
    let row = Capabilities { part_bytes_min: PART_BYTES_MIN, sparse, resend_part: false, ..row };
    SimStore::with_capabilities(seed, row)
}

fn driver(store: &SimStore) -> Driver {
    let mut options = UploadOptions::default();
    options.part_bytes = 2000;
    options.hedging.backoff_start = Duration::from_millis(1);
    options.hedging.backoff_max = Duration::from_millis(2);
    Driver::start(vec![Arc::new(store.clone())], Runtime::Own { threads: 1 }, options).unwrap()
}

struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % end
    }
}

fn pattern(seed: u64, len: u64) -> Bytes {
    (0..len).map(|at| (at * 7 + seed * 31 + at / 251) as u8).collect()
}

/// Composes an object of pieces at random; what it should hold.
fn compose(driver: &Driver, source: &Bytes, random: &mut Random) -> (Bytes, Result<Composed, StoreError>) {
    let mut composition = driver.compose(BUCKET, "composed");
    let mut all = Vec::new();
    let outcome = block_on(async {
        for piece in 0..1 + random.below(12) {
            let len = [random.below(300), random.below(1500), random.below(6000)][random.below(3) as usize];
            let outcome = if random.below(2) == 0 {
                let bytes = pattern(piece, len);
                all.extend_from_slice(&bytes);
                composition.put(bytes).await
            } else {
                let start = random.below(source.len() as u64 - len);
                all.extend_from_slice(&source[start as usize..(start + len) as usize]);
                composition.copy("source", start..start + len).await
            };
            if let Err(error) = outcome {
                let _ = composition.abort().await;
                return Err(error);
            }
        }
        assert_eq!(composition.bytes(), all.len() as u64);
        composition.finish().await
    });
    (all.into(), outcome)
}

/// The bucket refuses parts that are too small, so that the object is there says that none was.
#[test]
fn what_is_composed_is_what_was_given() {
    let mut copied = 0;
    for seed in 0..200 {
        let store = store(seed, seed % 2 == 0);
        let source = pattern(99, 20_000);
        store.tamper("source", Some(source.clone()));
        let driver = driver(&store);
        assert!(driver.composes(BUCKET));
        let (expected, outcome) = compose(&driver, &source, &mut Random(seed));
        let composed = outcome.unwrap_or_else(|error| panic!("seed {seed}: {error}"));
        assert_eq!(composed, Composed { bytes: expected.len() as u64, leftovers: false });
        assert!(store.objects()["composed"] == expected, "seed {seed}");
        assert!(store.open_uploads().is_empty());
        let stats = store.stats();
        copied += stats.calls(Operation::CopyPart);
        assert!(stats.bytes_put + stats.calls(Operation::CopyPart) * 20_000 >= expected.len() as u64);
    }
    assert!(copied > 200, "{copied}");
}

#[test]
fn requests_are_made_again_and_what_fails_leaves_nothing() {
    let (mut done, mut failed) = (0, 0);
    for seed in 0..200 {
        let sparse = seed % 4 != 0;
        let store = store(seed, sparse);
        let source = pattern(99, 20_000);
        store.tamper("source", Some(source.clone()));
        let chances = Chances { before: 0.1, after: 0.1, late: 0.05, throttled: 0.1 };
        for operation in [Operation::PutPart, Operation::CopyPart, Operation::Create] {
            store.set_chances(operation, chances);
        }
        store.set_chances(Operation::Get, Chances { before: 0.2, ..Chances::default() });
        store.set_chances(Operation::Complete, Chances { before: 0.2, after: 0.4, ..Chances::default() });
        let driver = driver(&store);
        let (expected, outcome) = compose(&driver, &source, &mut Random(seed));
        store.heal();
        store.settle();
        match outcome {
            Ok(composed) => {
                done += 1;
                assert!(store.objects()["composed"] == expected, "seed {seed}");
                assert!(composed.leftovers || store.open_uploads().is_empty(), "seed {seed}");
            }
            Err(_) => failed += 1,
        }
        let keep =
            if store.objects().contains_key("composed") { vec!["composed".to_owned()] } else { vec![] };
        let (resolver, swept) = channel();
        driver.sweep("composed", &keep, move |outcome| resolver.resolve(outcome));
        swept.wait().unwrap().unwrap();
        assert!(store.open_uploads().is_empty(), "seed {seed}");
        let names: BTreeSet<String> = store.objects().into_keys().collect();
        assert!(names.iter().all(|name| name == "source" || name == "composed"));
    }
    // Without gaps between numbers, whatever was not answered ends the object.
    assert!(done > 100 && failed > 20, "{done} done, {failed} failed");
}

#[test]
fn what_a_complete_did_is_looked_up() {
    for (faults, attempts) in [(vec![Fault::After], 1), (vec![Fault::Before, Fault::After], 2)] {
        let store = store(1, true);
        faults.iter().for_each(|fault| store.fail_next(Operation::Complete, *fault));
        let driver = driver(&store);
        let mut composition = driver.compose(BUCKET, "composed");
        let composed = block_on(async {
            composition.put(pattern(1, 5000)).await?;
            composition.finish().await
        });
        assert_eq!(composed.unwrap().bytes, 5000);
        assert_eq!(store.stats().calls(Operation::Complete), attempts);
    }
}

#[test]
fn a_source_that_is_not_there_is_an_error_and_leaves_no_upload() {
    let store = store(1, true);
    let driver = driver(&store);
    let mut composition = driver.compose(BUCKET, "composed");
    let error = block_on(async {
        composition.put(pattern(1, 1500)).await?;
        composition.copy("missing", 0..3000).await?;
        composition.finish().await
    });
    assert_eq!(*error.unwrap_err().kind(), StoreErrorKind::NotFound);
    assert!(store.open_uploads().is_empty() && store.objects().is_empty());
}
