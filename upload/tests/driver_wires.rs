//! What stores tell of their connections is heard: how far a body has come, and which connection is not to be used again.

mod common;

use std::sync::Arc;
use std::time::Duration;

use tidelog_upload::sim::SimStore;
use tidelog_upload::{HedgeOptions, Lane, Operation, Store, UploadOptions};

use common::{Trap, Trapped, finish, inline, outcome, put, run_until, small_parts};

/// Under these, a part is 0.4 s on its way and 0.475 s altogether.
fn slow_parts() -> UploadOptions {
    let mut options = small_parts();
    options.hedging = HedgeOptions::default();
    options.hedging.rate_start_bytes_per_second = 10.0;
    options
}

/// When parts that hang are raced, where connections have taken so much of them.
fn raced_after(options: UploadOptions, taken_bytes: Option<u64>) -> Duration {
    let stores: Vec<_> = (0..2)
        .map(|seed| {
            let store = Trapped::new(SimStore::new(seed), |operation, _, lane| {
                (operation == Operation::PutPart && lane == Lane::Primary).then_some(Trap::Never)
            });
            if let Some(bytes) = taken_bytes {
                store.take(bytes);
            }
            Arc::new(store) as Arc<dyn Store>
        })
        .collect();
    let (driver, time) = inline(stores, options);
    let mut upload = driver.upload("a", None);
    drop(put(&mut upload, "12345678"));
    upload.wanted(None);
    let (placement, _) = finish(upload, "");
    run_until(&driver, &time, || driver.stats().hedges > 0);
    let raced_after = time.passed();
    outcome(&driver, &time, placement).unwrap();
    raced_after
}

#[test]
fn a_body_that_is_stuck_on_its_way_is_raced_before_its_whole_time_is_over() {
    let mut checking = slow_parts();
    checking.hedging.progress_check = true;
    let ms = Duration::from_millis;
    // 0.4 s + 10 ms: at this pace the rest would take three times as long again.
    assert_eq!(raced_after(checking.clone(), Some(1)), ms(410));
    // 1.6 × 0.4 s + 10 ms: with nothing taken there is no pace.
    assert_eq!(raced_after(checking.clone(), Some(0)), ms(650));
    // D: enough was taken, or the store does not tell, or nobody asks.
    assert_eq!(raced_after(checking.clone(), Some(2)), ms(950));
    assert_eq!(raced_after(checking, None), ms(950));
    assert_eq!(raced_after(slow_parts(), Some(0)), ms(950));
}

#[test]
fn the_connection_of_a_slow_request_is_closed_and_no_other() {
    let store = Trapped::new(SimStore::new(1), |operation, name, _| {
        (operation == Operation::PutPart && name == "slow").then_some(Trap::Gate)
    });
    let (driver, time) = inline(vec![Arc::new(store.clone())], small_parts());
    let object = |name| {
        let mut upload = driver.upload(name, None);
        drop(put(&mut upload, "12345678"));
        finish(upload, "9").0
    };
    outcome(&driver, &time, object("fast")).unwrap();
    assert_eq!(store.retired(), 0);
    let slow = object("slow");
    time.reach(time.now() + Duration::from_secs(5));
    store.open_gate();
    outcome(&driver, &time, slow).unwrap();
    assert_eq!(store.retired(), 3);
    outcome(&driver, &time, object("fast/again")).unwrap();
    assert_eq!(store.retired(), 3);
}
