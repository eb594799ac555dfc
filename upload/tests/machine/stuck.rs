//! Uploads that hang or are in doubt, what else may be done then, and what is left when it is over.

use std::time::Duration;

use tidelog_upload::UploadOptions;
use tidelog_upload::bucket::{Breaker, BucketHealth, BucketIndex, Health};
use tidelog_upload::multipart::Request;
use tidelog_upload::store::StoreErrorKind;

use crate::harness::*;

const CHUNK: u64 = 8 << 20;
const SECOND: Duration = Duration::from_secs(1);

/// Bytes are let go as soon as a store has taken them.
fn let_go() -> UploadOptions {
    let mut options = UploadOptions::default();
    options.retain_bytes_max = 0;
    options
}

/// For so long everything sent to this bucket is refused at once, and what is sent elsewhere succeeds.
fn refused_for(h: &mut Harness, time: Duration, bucket: BucketIndex, kind: &StoreErrorKind) {
    let until = h.now + time;
    while h.now < until && h.finished.is_none() {
        for attempt in h.find(|_| true) {
            if h.in_flight.get(&attempt).is_some_and(|flight| flight.bucket == bucket) {
                h.err(attempt, kind.clone());
            } else if h.in_flight.contains_key(&attempt) {
                h.ok(attempt);
            }
        }
        h.pass(Duration::from_millis(50));
    }
}

#[test]
fn an_object_whose_bytes_are_gone_is_given_up_when_its_bucket_dies_and_another_takes_data() {
    for row in [s3(), dense()] {
        let mut h = Harness::new(&[row.clone(), row], let_go(), 1);
        h.object(&[CHUNK, CHUNK, 1000]);
        let home = h.created();
        h.all_ok(is_part);
        h.only(is_complete);
        refused_for(&mut h, 8 * SECOND, home, &StoreErrorKind::Unreachable);
        assert_eq!(h.policy.breaker(home, h.now), Breaker::Open);
        assert!(h.finished.is_none(), "an outage this short is cheaper to wait for than to send all again");
        refused_for(&mut h, 7 * SECOND, home, &StoreErrorKind::Unreachable);
        let error = h.finished.clone().expect("an outcome").expect_err("a failure");
        assert!(matches!(error.kind(), StoreErrorKind::Deadline(_)) && error.is_retryable());
        assert!(error.to_string().contains("no connection to the store"), "{error}");
    }
}

#[test]
fn so_it_is_when_parts_are_left_that_can_go_nowhere_else() {
    let mut h = Harness::new(&[dense(), dense()], let_go(), 1);
    h.object(&[CHUNK, CHUNK, 1000]);
    let home = h.created();
    let parts = h.find(is_part);
    h.ok(parts[0]);
    assert!(h.released.contains(&0));
    refused_for(&mut h, 15 * SECOND, home, &StoreErrorKind::Unreachable);
    assert!(h.finished.as_ref().is_some_and(Result::is_err));
}

#[test]
fn so_it_is_while_its_complete_is_silent_and_nothing_is_aborted_before_that_ends() {
    let mut h = Harness::new(&[s3(), s3()], let_go(), 1);
    h.object(&[CHUNK, CHUNK, CHUNK, CHUNK, 1000]);
    let home = h.created();
    let parts = h.find(is_part);
    h.ok(parts[0]);
    for part in &parts[1..4] {
        h.err(*part, StoreErrorKind::Interrupted);
    }
    assert_eq!(h.policy.breaker(home, h.now), Breaker::Open);
    // The parts go elsewhere, the first one's Complete hangs.
    for _ in 0..20 {
        h.all_ok(|f| f.bucket != home || is_part(f));
        h.pass(SECOND / 10);
    }
    let complete = h.only(|_| true);
    assert!(is_complete(&h.in_flight[&complete]));
    h.pass(10 * SECOND);
    assert!(h.finished.as_ref().is_some_and(Result::is_err));
    h.all_ok(|f| f.bucket != home);
    assert_eq!((h.only(|_| true), h.settled), (complete, None));
    h.ok(complete);
    let delete = h.only(is_clearing);
    assert_eq!((h.in_flight[&delete].bucket, &h.in_flight[&delete].request), (home, &Request::Delete));
}

#[test]
fn an_object_whose_bytes_are_gone_is_waited_for_where_no_other_bucket_takes_data() {
    for buckets in 1..3 {
        let mut h = Harness::new(&vec![s3(); buckets], let_go(), 1);
        h.object(&[CHUNK, CHUNK, 1000]);
        let home = h.created();
        h.all_ok(is_part);
        opened(&mut h, |bucket| bucket != home);
        refused_for(&mut h, 60 * SECOND, home, &StoreErrorKind::Unreachable);
        assert!(h.finished.is_none());
        h.pass(2 * SECOND);
        h.all_ok(is_complete);
        assert_eq!(h.placement().pieces.len(), 1);
    }
}

/// Other nodes tell that these buckets are bad.
fn opened(h: &mut Harness, which: impl Fn(BucketIndex) -> bool) {
    let bad = |index| BucketHealth { good: 0.0, bad: if which(BucketIndex(index)) { 9.0 } else { 0.0 } };
    let buckets = (0..h.policy.buckets().len()).map(bad).collect();
    h.policy.merge(&[Health { buckets }], h.now);
}

#[test]
fn a_late_complete_is_raced_as_soon_as_there_is_where_to() {
    let mut h = Harness::new(&[s3(), s3()], UploadOptions::default(), 3);
    h.object(&[CHUNK, 1000]);
    let home = h.created();
    h.all_ok(is_part);
    h.only(is_complete);
    opened(&mut h, |bucket| bucket != home);
    h.pass(5 * SECOND);
    assert!(h.find(|f| f.bucket != home).is_empty());
    h.policy.canary_ended(BucketIndex(1 - home.0), true, Duration::from_millis(20), h.now);
    // Nobody tells the object.
    let wake = h.machine.deadline().expect("another look");
    assert!(wake <= h.now + Duration::from_millis(210));
    h.pass(wake - h.now);
    h.created();
    h.all_ok(is_part);
    h.all_ok(|f| f.bucket != home);
    assert_ne!(h.placement().pieces[0].bucket, home);
}

#[test]
fn nothing_is_waited_for_that_cannot_come() {
    // A single bucket; and bytes that are gone.
    for (buckets, options) in [(1, UploadOptions::default()), (2, let_go())] {
        let mut h = Harness::new(&vec![s3(); buckets], options, 3);
        h.object(&[CHUNK, 1000]);
        h.created();
        h.all_ok(is_part);
        h.only(is_complete);
        let late = h.now + SECOND;
        h.pass(SECOND);
        assert!(h.machine.deadline().is_some_and(|wake| wake >= late + 8 * SECOND));
    }
}

#[test]
fn an_upload_whose_create_was_raced_in_vain_may_be_raced_again() {
    let mut options = UploadOptions::default();
    (options.hedging.tokens_max, options.hedging.tokens_per_part) = (0.0, 0.0);
    options.hedging.second_chance_max = 1;
    for row in [s3(), dense()] {
        let mut h = Harness::new(&vec![row; 3], options.clone(), 3);
        h.object(&[CHUNK, 1000]);
        let first = h.only(|f| f.request == Request::Create);
        h.pass(Duration::from_millis(110));
        assert_eq!(h.find(|f| f.request == Request::Create).len(), 2);
        h.ok(first);
        h.all_ok(is_part);
        h.only(is_complete);
        h.pass(Duration::from_millis(610));
        assert_eq!(h.count(|request| *request == Request::Create), 3);
    }
}

#[test]
fn when_the_race_itself_is_refused_for_good_another_may_begin() {
    let mut h = Harness::new(&vec![s3(); 3], UploadOptions::default(), 3);
    h.object(&[CHUNK, 1000]);
    let home = h.created();
    h.all_ok(is_part);
    h.pass(Duration::from_millis(410));
    let race = h.only(|f| f.request == Request::Create);
    let tried = h.in_flight[&race].bucket;
    h.err(race, StoreErrorKind::Denied);
    h.pass(SECOND);
    let other = h.created();
    assert!(other != tried && other != home);
    h.all_ok(is_part);
    h.all_ok(|f| f.bucket == other);
    assert_eq!(h.placement().pieces[0].bucket, other);
}

#[test]
fn races_of_an_upload_that_are_refused_are_begun_elsewhere_at_once_and_three_are_all() {
    for row in [s3(), dense()] {
        let mut h = Harness::new(&vec![row; 6], UploadOptions::default(), 3);
        h.object(&[CHUNK, 1000]);
        h.created();
        h.all_ok(is_part);
        h.pass(Duration::from_millis(410));
        let start = h.now;
        for _ in 0..3 {
            let race = h.only(|f| f.request == Request::Create);
            h.err(race, StoreErrorKind::Throttled);
        }
        assert_eq!(h.now, start);
        h.pass(30 * SECOND);
        assert_eq!(h.count(|request| *request == Request::Create), 4);
        h.all_ok(is_complete);
        assert_eq!(h.placement().pieces.len(), 1);
    }
}

/// An object of one PUT that was sent so many times in vain, and is there: all these names are to be looked after.
fn suspects(count: usize) -> Harness {
    let mut h = Harness::new(&[s3()], hedging_off(), 1);
    h.object(&[1000]);
    for _ in 0..count {
        let put = h.only(is_put);
        h.err(put, StoreErrorKind::Interrupted);
        h.pass(2 * SECOND);
    }
    h.all_ok(is_put);
    assert!(h.finished.is_some());
    h
}

#[test]
fn what_is_left_is_deleted_a_few_at_a_time() {
    let mut h = suspects(100);
    let mut deleted = 0;
    while h.settled.is_none() {
        let some = h.find(is_clearing);
        assert!((1..=8).contains(&some.len()), "{}", some.len());
        deleted += 1;
        h.ok(some[some.len() - 1]);
    }
    assert_eq!((deleted, h.settled), (100, Some(true)));
}

#[test]
fn what_a_bucket_does_not_clear_is_not_asked_of_it_for_each_name() {
    for kind in [StoreErrorKind::Unreachable, StoreErrorKind::Denied] {
        let mut h = suspects(100);
        let mut tries = 0;
        while h.settled.is_none() {
            for delete in h.find(is_clearing) {
                h.err(delete, kind.clone());
                tries += 1;
            }
            h.pass(SECOND);
        }
        assert!(tries <= 8 * 5, "{tries}");
        assert_eq!(h.settled, Some(true));
    }
}
