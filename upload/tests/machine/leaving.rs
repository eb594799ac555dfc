//! Buckets that an object leaves, when it may not, and what it can do where it has to stay.

use std::time::Duration;

use tidelog_upload::UploadOptions;
use tidelog_upload::bucket::{Breaker, BucketHealth, BucketIndex, Health};
use tidelog_upload::multipart::{AttemptId, Event, Request};
use tidelog_upload::store::{Capabilities, StoreErrorKind};

use crate::harness::*;

const CHUNK: u64 = 8 << 20;
const SECOND: Duration = Duration::from_secs(1);
/// Later than D of a chunk at the start: 2 × (75 ms + 8 MiB / 65 MB/s) = 408 ms.
const LATE: Duration = Duration::from_millis(410);

/// The bucket opens, as other nodes tell.
fn open(h: &mut Harness, bucket: BucketIndex) {
    let mut health = Health { buckets: vec![BucketHealth::default(); bucket.0 + 1] };
    health.buckets[bucket.0].bad = 9.0;
    h.policy.merge(&[health], h.now);
    assert_eq!(h.policy.breaker(bucket, h.now), Breaker::Open);
}

/// Whatever is in flight in this bucket fails.
fn fail_all(h: &mut Harness, bucket: BucketIndex, kind: &StoreErrorKind) {
    for attempt in h.find(|f| f.bucket == bucket) {
        if h.in_flight.contains_key(&attempt) {
            h.err(attempt, kind.clone());
        }
    }
}

fn part_of(h: &Harness, chunk: u32) -> AttemptId {
    h.only(|f| matches!(f.request, Request::Part { chunk: c, .. } if c == chunk))
}

#[test]
fn an_upload_without_gaps_leaves_a_bucket_that_refuses_at_once_for_one_that_takes_data() {
    for row in [dense(), sequential()] {
        for kind in [StoreErrorKind::Throttled, StoreErrorKind::Unreachable] {
            let mut h = Harness::new(&vec![row.clone(); 3], UploadOptions::default(), 3);
            h.object(&[CHUNK, CHUNK, 1000]);
            let home = h.created();
            let start = h.now;
            while h.finished.is_none() {
                assert!(h.now - start < 2 * SECOND, "{kind:?}: {:#?}", h.in_flight);
                fail_all(&mut h, home, &kind);
                h.all_ok(|f| f.bucket != home);
                h.pass(Duration::from_millis(5));
            }
            assert!(h.placement().pieces.iter().all(|piece| piece.bucket != home));
        }
    }
}

#[test]
fn parts_without_gaps_that_are_young_stay_in_a_bucket_that_opens_and_old_ones_leave_it() {
    let mut h = Harness::new(&[dense(), dense()], UploadOptions::default(), 3);
    h.event(Event::Chunk { bytes: CHUNK, last: false });
    let home = h.created();
    h.event(Event::Chunk { bytes: 1000, last: true });
    h.all_ok(|f| matches!(f.request, Request::Part { chunk: 1, .. }));
    open(&mut h, home);
    // 0.7 × 204 ms.
    h.pass(Duration::from_millis(140));
    h.only(is_part);
    assert_eq!(h.in_flight.len(), 1);
    h.pass(Duration::from_millis(5));
    assert_eq!(h.cancelled.len(), 1);
    assert_ne!(h.created(), home);
    h.all_ok(is_part);
    h.all_ok(is_complete);
    assert_eq!(h.placement().pieces.len(), 1);
}

#[test]
fn a_race_whose_bucket_opens_is_given_up_and_there_may_be_another() {
    let mut h = Harness::new(&vec![dense(); 3], UploadOptions::default(), 3);
    h.object(&[CHUNK, 1000]);
    let home = h.created();
    h.pass(LATE);
    let race = h.only(|f| f.request == Request::Create);
    let other = h.in_flight[&race].bucket;
    open(&mut h, other);
    h.pass(9 * SECOND);
    let third = h.only(|f| f.request == Request::Create && f.bucket != other);
    assert_ne!(h.in_flight[&third].bucket, home);
}

#[test]
fn an_upload_without_gaps_whose_bytes_are_gone_stays_and_is_over_when_its_bucket_is_well() {
    let mut options = UploadOptions::default();
    options.retain_bytes_max = CHUNK;
    let mut h = Harness::new(&[dense(), dense()], options, 3);
    h.object(&[CHUNK, CHUNK, 1000]);
    let home = h.created();
    let first = part_of(&h, 0);
    h.ok(first);
    assert_eq!(h.released.len(), 1);
    for _ in 0..4 {
        fail_all(&mut h, home, &StoreErrorKind::Throttled);
        h.pass(SECOND);
    }
    assert_eq!(h.policy.breaker(home, h.now), Breaker::Open);
    h.all_ok(is_part);
    h.all_ok(is_complete);
    assert_eq!(h.placement().pieces.len(), 1);
    assert_eq!(h.placement().pieces[0].bucket, home);
}

#[test]
fn credentials_that_fail_under_many_requests_at_once_are_tried_once_more() {
    for kind in [StoreErrorKind::Credentials, StoreErrorKind::ClockSkew] {
        let mut h = Harness::new(&[s3()], UploadOptions::default(), 3);
        h.object(&[CHUNK, CHUNK, CHUNK, 1000]);
        let home = h.created();
        h.pass(Duration::from_millis(1));
        fail_all(&mut h, home, &kind);
        assert!(h.finished.is_none(), "{kind:?}: {:?}", h.finished);
        // They are good again, and fail once more later on.
        h.pass(SECOND);
        h.all_ok(is_part);
        let complete = h.only(is_complete);
        h.err(complete, kind.clone());
        h.pass(SECOND);
        h.all_ok(is_complete);
        assert!(h.placement().pieces.iter().all(|piece| piece.name == "o"));
    }
}

#[test]
fn credentials_that_fail_in_one_bucket_say_nothing_of_another_one() {
    let mut h = Harness::new(&[s3(), s3()], UploadOptions::default(), 3);
    h.object(&[1000]);
    let first = h.only(is_put);
    h.err(first, StoreErrorKind::Credentials);
    let second = h.only(is_put);
    h.err(second, StoreErrorKind::Credentials);
    assert!(h.finished.is_none());
    h.pass(Duration::from_millis(150));
    let third = h.only(is_put);
    h.err(third, StoreErrorKind::Credentials);
    assert!(h.finished.is_none(), "one of them may be well yet");
    h.pass(Duration::from_millis(150));
    h.all_ok(is_put);
    assert_eq!(h.placement().bytes, 1000);
}

/// The number of the only part in flight of this chunk.
fn number_of(h: &Harness, chunk: u32) -> u32 {
    match h.in_flight[&part_of(h, chunk)].request {
        Request::Part { number, .. } => number,
        _ => 0,
    }
}

#[test]
fn an_attempt_that_did_nothing_uses_up_no_part_number() {
    let mut h = Harness::new(&[s3()], hedging_off(), 3);
    h.object(&[CHUNK, CHUNK, 1000]);
    h.created();
    for kind in [StoreErrorKind::Throttled, StoreErrorKind::Unreachable].iter().cycle().take(20) {
        assert_eq!([0, 1, 2].map(|chunk| number_of(&h, chunk)), [1, 2, 10_000]);
        fail_all(&mut h, BucketIndex(0), kind);
        h.pass(2 * SECOND);
    }
    // What may have arrived does.
    let first = part_of(&h, 0);
    h.err(first, StoreErrorKind::Interrupted);
    h.pass(2 * SECOND);
    assert_eq!(number_of(&h, 0), 3);
}

#[test]
fn what_is_left_when_all_part_numbers_are_used_up_becomes_objects_of_its_own() {
    for buckets in [1, 2] {
        let mut h = Harness::new(&vec![Capabilities { parts_max: 9, ..s3() }; buckets], hedging_off(), 3);
        for last in [false, false, true] {
            h.event(Event::Chunk { bytes: if last { 1000 } else { CHUNK }, last });
            h.all_ok(|f| f.request == Request::Create);
            for _ in 0..8 {
                for attempt in h.find(is_part) {
                    h.err(attempt, StoreErrorKind::Interrupted);
                }
                h.pass(SECOND);
            }
        }
        h.event(Event::Wanted { deadline: None });
        while h.finished.is_none() {
            h.all_ok(|_| true);
            h.pass(SECOND);
        }
        assert_eq!(h.placement().bytes, 2 * CHUNK + 1000);
    }
}

#[test]
fn a_part_that_another_upload_won_is_still_sent_where_there_may_be_no_gap() {
    // The first bucket opens, what is in flight moves to the third one, and the second one takes over the upload.
    let taken_over = |seed: &u64| {
        let mut h = Harness::new(&[s3(), dense(), s3()], UploadOptions::default(), *seed);
        h.event(Event::Chunk { bytes: CHUNK, last: false });
        let home = h.created();
        for _ in 0..2 {
            h.event(Event::Chunk { bytes: CHUNK, last: false });
        }
        let first = part_of(&h, 0);
        h.ok(first);
        open(&mut h, home);
        h.pass(SECOND);
        let third = h.in_flight[&h.find(|f| f.request == Request::Create).pop()?].bucket;
        h.created();
        h.event(Event::Chunk { bytes: 1000, last: true });
        let old = h.find(|f| is_part(f) && f.bucket == home).pop()?;
        h.err(old, StoreErrorKind::NoSuchUpload);
        let second = h.in_flight[&h.find(|f| f.request == Request::Create).pop()?].bucket;
        (home.0 == 0 && second.0 == 1 && third.0 == 2).then_some(h)
    };
    let mut h = (0..99).find_map(|seed| taken_over(&seed)).expect("a seed that does this");
    h.created();
    // The third bucket is faster.
    h.all_ok(|f| f.bucket.0 == 2);
    h.all_ok(|f| f.bucket.0 == 2);
    h.all_ok(|f| f.bucket.0 == 1);
    h.all_ok(|f| f.bucket.0 == 1);
    assert_eq!(h.placement().bytes, 3 * CHUNK + 1000);
}

#[test]
fn what_finds_no_connection_to_leave_by_leaves_as_soon_as_there_is_one() {
    let mut options = UploadOptions::default();
    options.hedge_connections = 1;
    let mut h = Harness::new(&[s3(), s3()], options, 3);
    h.event(Event::Chunk { bytes: CHUNK, last: false });
    let home = h.created();
    h.event(Event::Chunk { bytes: 1000, last: true });
    open(&mut h, home);
    h.pass(SECOND);
    for _ in 0..50 {
        h.event(Event::Tick);
    }
    let denied = h.policy.stats().hedges_denied;
    assert!((1..20).contains(&denied), "{denied}");
    let first = h.only(is_put);
    let look = h.machine.deadline().expect("another look");
    assert!(look < h.now + SECOND, "{:?}", look - h.now);
    h.ok(first);
    h.pass(SECOND);
    let second = h.only(is_put);
    h.ok(second);
    assert_eq!(h.placement().pieces.len(), 2);
}

/// When the only canary of this bucket is due, it comes through.
fn close(h: &mut Harness, bucket: BucketIndex) {
    let due = h.policy.deadline().expect("a canary");
    h.pass(due - h.now);
    assert_eq!(h.policy.canary(h.now).map(|canary| canary.bucket), Some(bucket));
    h.policy.canary_ended(bucket, true, Duration::from_millis(20), h.now);
}

#[test]
fn what_is_late_is_raced_soon_after_a_bucket_closes() {
    for row in [s3(), dense()] {
        let mut h = Harness::new(&[row.clone(), row], UploadOptions::default(), 3);
        h.object(&[CHUNK, 1000]);
        let home = h.created();
        let other = BucketIndex(1 - home.0);
        open(&mut h, other);
        h.pass(SECOND);
        assert!(h.find(|f| f.bucket == other).is_empty());
        close(&mut h, other);
        let closed = h.now;
        h.pass(9 * SECOND);
        let race = h.find(|f| f.bucket == other)[0];
        let after = h.in_flight[&race].started - closed;
        assert!(after < SECOND, "{after:?}");
    }
}

#[test]
fn what_nobody_waits_for_leaves_a_bucket_that_opened_soon_after_another_one_closes() {
    for row in [s3(), dense()] {
        let mut h = Harness::new(&[row.clone(), row], UploadOptions::default(), 3);
        h.event(Event::Chunk { bytes: CHUNK, last: false });
        let home = h.created();
        let other = BucketIndex(1 - home.0);
        open(&mut h, other);
        for _ in 0..3 {
            fail_all(&mut h, home, &StoreErrorKind::Throttled);
            h.pass(2 * SECOND);
        }
        assert_eq!(h.policy.breaker(home, h.now), Breaker::Open);
        h.only(is_part);
        close(&mut h, other);
        let closed = h.now;
        h.pass(9 * SECOND);
        let moved = h.find(|f| f.bucket == other)[0];
        let after = h.in_flight[&moved].started - closed;
        assert!(after < SECOND, "{after:?}");
    }
}

#[test]
fn what_is_late_is_raced_soon_after_buckets_stop_refusing_another_object() {
    let mut h = Harness::new(&[s3()], UploadOptions::default(), 3);
    h.object(&[CHUNK, CHUNK, CHUNK, 1000]);
    h.created();
    for chunk in [0, 1] {
        let part = part_of(&h, chunk);
        h.err(part, StoreErrorKind::Throttled);
    }
    h.pass(2 * SECOND);
    assert!(h.find(is_put).is_empty() && h.find(is_part).len() == 4);
    let mut other = Harness::new(&[s3()], UploadOptions::default(), 3);
    std::mem::swap(&mut h.policy, &mut other.policy);
    other.object(&[1000]);
    let put = other.only(is_put);
    other.ok(put);
    std::mem::swap(&mut h.policy, &mut other.policy);
    let taken = h.now;
    h.pass(9 * SECOND);
    let after = h.in_flight[&h.find(is_put)[0]].started - taken;
    assert!(after < SECOND, "{after:?}");
}
