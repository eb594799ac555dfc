//! Late requests, refusals, sick buckets, and how much is done about them.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use tidelog_upload::UploadOptions;
use tidelog_upload::bucket::{Breaker, BucketIndex};
use tidelog_upload::multipart::{AttemptId, Event, Request};
use tidelog_upload::store::{Lane, StoreErrorKind};

use crate::harness::*;

const CHUNK: u64 = 8 << 20;
const SECOND: Duration = Duration::from_secs(1);
/// Later than D of a chunk at the start: 2 × (75 ms + 8 MiB / 65 MB/s) = 408 ms.
const LATE: Duration = Duration::from_millis(410);

fn four() -> Vec<tidelog_upload::store::Capabilities> {
    vec![s3(); 4]
}

/// Three chunks, opened in the home bucket, two of them there and the first one late.
fn with_a_late_part() -> (Harness, AttemptId, BucketIndex) {
    let mut h = Harness::new(&four(), UploadOptions::default(), 3);
    h.object(&[CHUNK, CHUNK, 1000]);
    let home = h.created();
    let parts = h.find(is_part);
    h.pass(Duration::from_millis(150));
    h.ok(parts[1]);
    h.ok(parts[2]);
    (h, parts[0], home)
}

#[test]
fn a_late_part_is_raced_in_another_bucket_and_the_home_upload_completes_without_it() {
    let (mut h, _, home) = with_a_late_part();
    h.pass(Duration::from_millis(255));
    assert!(h.find(is_put).is_empty(), "not before D");
    h.pass(Duration::from_millis(10));
    let hedge = h.only(is_put);
    let flight = h.in_flight[&hedge].clone();
    assert_eq!((flight.request, flight.lane), (Request::Put { chunks: 0..1 }, Lane::Hedge));
    assert_ne!(flight.bucket, home);
    assert!(flight.name.starts_with("o.00000."), "{}", flight.name);
    h.ok(hedge);
    h.all_ok(is_complete);
    let pieces = &h.placement().pieces;
    assert_eq!((pieces[0].bucket, pieces[0].bytes), (flight.bucket, CHUNK));
    assert_eq!((pieces[1].bucket, pieces[1].offset, pieces[1].bytes), (home, 0, CHUNK + 1000));
    assert_eq!(pieces.len(), 2);
    assert_eq!(h.policy.breaker(home, h.now), Breaker::Avoided);
}

#[test]
fn the_losers_attempts_are_settled_before_the_complete() {
    let (mut h, primary, _) = with_a_late_part();
    h.obey = false;
    h.pass(LATE);
    let hedge = h.only(is_put);
    h.ok(hedge);
    assert_eq!(h.cancelled, [primary]);
    h.pass(SECOND);
    assert!(h.find(is_complete).is_empty(), "the cancelled part may still arrive");
    h.err(primary, StoreErrorKind::Cancelled);
    h.only(is_complete);
}

#[test]
fn a_hedge_that_fails_leaves_the_first_attempt_alone() {
    let (mut h, primary, _) = with_a_late_part();
    h.pass(LATE);
    let hedge = h.only(is_put);
    h.err(hedge, StoreErrorKind::Denied);
    assert!(h.cancelled.is_empty() && h.in_flight.contains_key(&primary));
    h.ok(primary);
    h.all_ok(is_complete);
    assert_eq!(h.placement().pieces.len(), 1);
    assert!(h.retired.contains(&primary), "a connection that was so slow is not used again");
}

#[test]
fn a_hedge_that_fails_does_not_count_as_a_failure_of_the_first_attempt() {
    let (mut h, primary, home) = with_a_late_part();
    h.pass(LATE);
    let hedge = h.only(is_put);
    h.err(hedge, StoreErrorKind::Interrupted);
    // The first failure goes elsewhere at once.
    h.err(primary, StoreErrorKind::Throttled);
    let again = h.only(is_put);
    assert_ne!(h.in_flight[&again].bucket, home);
}

#[test]
fn a_race_without_a_token_makes_room_for_another_when_it_is_over() {
    let mut options = UploadOptions::default();
    (options.hedging.tokens_max, options.hedging.tokens_per_part) = (0.0, 0.0);
    options.hedging.second_chance_max = 1;
    let mut h = Harness::new(&four(), options, 3);
    h.object(&[CHUNK; 4]);
    h.created();
    h.pass(SECOND);
    // After a third loss the bucket would be left altogether.
    for _ in 0..2 {
        let hedge = h.only(is_put);
        h.ok(hedge);
        h.pass(SECOND);
    }
    h.only(is_put);
}

#[test]
fn a_hedge_that_lost_is_cancelled_and_what_it_may_have_left_is_deleted_and_told() {
    let (mut h, primary, home) = with_a_late_part();
    h.pass(LATE);
    let hedge = h.only(is_put);
    let (bucket, name) = (h.in_flight[&hedge].bucket, h.in_flight[&hedge].name.clone());
    h.ok(primary);
    assert_eq!(h.cancelled, [hedge]);
    assert!(h.find(is_clearing).is_empty(), "not before the outcome");
    h.all_ok(is_complete);
    let delete = h.only(|f| f.request == Request::Delete);
    assert_eq!((h.in_flight[&delete].bucket, &h.in_flight[&delete].name), (bucket, &name));
    h.ok(delete);
    assert_eq!(h.settled, Some(true), "the cancelled PUT may yet appear");
    assert_eq!(h.policy.breaker(home, h.now), Breaker::Closed);
    assert_eq!(h.policy.breaker(bucket, h.now), Breaker::Closed, "losing a race that began late is no shame");
}

#[test]
fn three_races_at_most_after_d_2d_and_3d() {
    let (mut h, _, home) = with_a_late_part();
    let start = h.started.iter().find(|(_, f)| is_part(f)).map(|(_, f)| f.started).expect("a part");
    h.pass(9 * SECOND);
    let puts: Vec<_> = h.started.iter().filter(|(_, f)| is_put(f)).map(|(_, f)| f).collect();
    let at: Vec<_> = puts.iter().map(|f| (f.started - start).as_millis() / 408).collect();
    assert_eq!(at, [1, 2, 3]);
    let buckets: BTreeSet<_> = puts.iter().map(|f| f.bucket).collect();
    assert_eq!(buckets.len(), 3, "each in another bucket");
    assert!(!buckets.contains(&home));
}

#[test]
fn parts_are_not_raced_before_the_object_is_wanted() {
    let mut h = Harness::new(&four(), UploadOptions::default(), 3);
    h.event(Event::Chunk { bytes: CHUNK, last: false });
    h.created();
    h.pass(9 * SECOND);
    assert!(h.find(is_put).is_empty());
    h.event(Event::Wanted { deadline: None });
    h.only(is_put);
}

#[test]
fn with_hedging_off_nothing_is_raced_and_failures_are_tried_again() {
    let mut h = Harness::new(&four(), hedging_off(), 3);
    h.object(&[CHUNK, 1000]);
    h.created();
    h.pass(9 * SECOND);
    assert_eq!(h.in_flight.len(), 2);
    let part = h.find(is_part)[0];
    h.err(part, StoreErrorKind::Throttled);
    assert_eq!(h.in_flight.len(), 1, "it backs off");
    h.pass(SECOND);
    h.all_ok(is_part);
    h.all_ok(is_complete);
    assert_eq!(h.placement().pieces.len(), 1);
}

#[test]
fn a_small_object_is_raced_whole() {
    let mut h = Harness::new(&four(), UploadOptions::default(), 3);
    h.object(&[1000]);
    let first = h.only(is_put);
    h.pass(Duration::from_millis(160));
    let hedge = *h.find(is_put).iter().find(|id| **id != first).expect("a race");
    let winner = h.in_flight[&hedge].clone();
    h.ok(hedge);
    let piece = &h.placement().pieces[0];
    assert_eq!((piece.bucket, &piece.name), (winner.bucket, &winner.name));
    assert_eq!(h.cancelled, [first]);
}

#[test]
fn a_single_bucket_is_raced_under_another_name_on_other_connections() {
    let mut h = Harness::new(&[s3()], UploadOptions::default(), 3);
    h.object(&[1000]);
    let first = h.only(is_put);
    h.pass(Duration::from_millis(160));
    let hedge = *h.find(is_put).iter().find(|id| **id != first).expect("a race");
    assert_eq!(h.in_flight[&hedge].lane, Lane::Hedge);
    assert_ne!(h.in_flight[&hedge].name, "o");
    h.ok(hedge);
    assert!(h.placement().bytes == 1000);
}

#[test]
fn without_sparse_numbers_the_whole_upload_is_raced_and_the_first_object_wins() {
    let mut h = Harness::new(&[dense(), dense()], UploadOptions::default(), 3);
    h.object(&[CHUNK, 1000]);
    let home = h.created();
    h.pass(LATE);
    let create = h.only(|f| f.request == Request::Create);
    let other = h.in_flight[&create].bucket;
    assert_ne!(other, home);
    h.ok(create);
    h.all_ok(|f| f.bucket == other);
    h.all_ok(|f| f.bucket == other);
    assert_eq!(h.placement().pieces.len(), 1);
    assert_eq!(h.placement().pieces[0].bucket, other);
    let abort = h.only(|_| true);
    assert!(matches!(h.in_flight[&abort].request, Request::Abort { .. }));
}

#[test]
fn bytes_that_a_race_still_has_to_send_are_not_let_go() {
    let mut options = UploadOptions::default();
    options.retain_bytes_max = CHUNK;
    let mut h = Harness::new(&[dense(), dense()], options, 3);
    h.object(&[CHUNK, 1000]);
    let home = h.created();
    h.pass(LATE);
    let parts = h.find(is_part);
    h.ok(parts[0]);
    assert_eq!((h.stored.len(), h.released.len()), (1, 0));
    h.created();
    for _ in 0..2 {
        h.all_ok(|f| f.bucket != home);
    }
    assert_ne!(h.placement().pieces[0].bucket, home);
    assert_eq!(h.released.len(), 2);
}

#[test]
fn a_late_create_is_raced_and_the_first_upload_is_the_home() {
    let mut h = Harness::new(&four(), UploadOptions::default(), 3);
    h.object(&[CHUNK, 1000]);
    let first = h.only(|f| f.request == Request::Create);
    h.pass(Duration::from_millis(80));
    let second = *h.find(|f| f.request == Request::Create).last().expect("a race");
    assert_ne!(first, second);
    let home = h.in_flight[&second].bucket;
    h.ok(second);
    assert!(h.find(is_part).iter().all(|part| h.in_flight[part].bucket == home));
    h.all_ok(is_part);
    h.all_ok(is_complete);
    assert!(h.placement().bytes > 0 && h.settled.is_none(), "the first Create is still under way");
    h.ok(first);
    h.all_ok(|f| matches!(f.request, Request::Abort { .. }));
    assert_eq!(h.settled, Some(false));
}

#[test]
fn a_late_complete_is_raced_by_the_same_parts_in_another_bucket_and_not_aborted() {
    let mut h = Harness::new(&four(), UploadOptions::default(), 3);
    h.object(&[CHUNK, 1000]);
    let home = h.created();
    h.all_ok(is_part);
    let first = h.only(is_complete);
    h.pass(Duration::from_millis(401));
    h.created();
    h.all_ok(is_part);
    let second = *h.find(is_complete).last().expect("another Complete");
    assert_ne!(h.in_flight[&second].bucket, home);
    h.ok(second);
    assert_ne!(h.placement().pieces[0].bucket, home);
    assert!(!h.cancelled.contains(&first) && h.find(is_clearing).is_empty());
    h.ok(first);
    let delete = h.only(is_clearing);
    assert_eq!((h.in_flight[&delete].bucket, &h.in_flight[&delete].request), (home, &Request::Delete));
    h.ok(delete);
    assert_eq!(h.settled, Some(false));
}

#[test]
fn the_first_refusal_goes_elsewhere_at_once_and_the_next_ones_back_off() {
    let mut h = Harness::new(&four(), UploadOptions::default(), 3);
    h.object(&[1000]);
    let first = h.only(is_put);
    let home = h.in_flight[&first].bucket;
    h.err(first, StoreErrorKind::Throttled);
    let second = h.only(is_put);
    assert_ne!(h.in_flight[&second].bucket, home);
    h.err(second, StoreErrorKind::Throttled);
    assert!(h.in_flight.is_empty());
    h.pass(Duration::from_millis(49));
    assert!(h.in_flight.is_empty(), "50 ms × 2 ± 50 %");
    h.pass(Duration::from_millis(102));
    h.all_ok(is_put);
    assert!(h.placement().bytes > 0);
}

#[test]
fn a_race_that_is_refused_is_begun_again_elsewhere_at_once_and_three_are_all() {
    let (mut h, primary, home) = with_a_late_part();
    h.pass(LATE);
    let mut tried = vec![home];
    for _ in 0..3 {
        let race = h.only(is_put);
        tried.push(h.in_flight[&race].bucket);
        h.err(race, StoreErrorKind::Throttled);
    }
    assert_ne!(tried[1], tried[2], "not where it was just refused");
    assert!(!tried[1..].contains(&home), "{tried:?}");
    h.pass(2 * SECOND);
    assert!(h.find(is_put).is_empty());
    h.ok(primary);
    h.all_ok(is_complete);
    assert_eq!(h.placement().pieces.len(), 1);
}

#[test]
fn when_every_bucket_refuses_nothing_goes_elsewhere_and_nothing_is_raced() {
    let mut h = Harness::new(&four(), UploadOptions::default(), 3);
    h.object(&[1000]);
    let refuse_all = |h: &mut Harness, time: Duration| {
        let until = h.now + time;
        while h.now < until {
            for put in h.find(is_put) {
                h.err(put, StoreErrorKind::Throttled);
            }
            h.pass(Duration::from_millis(5));
        }
    };
    refuse_all(&mut h, 20 * SECOND);
    h.pass(SECOND);
    h.event(Event::Abort);
    h.all_ok(is_clearing);
    let mut h = h.again();
    h.object(&[1000]);
    let put = h.only(is_put);
    h.err(put, StoreErrorKind::Throttled);
    assert!(h.in_flight.is_empty(), "it would only meet another refusal");
    refuse_all(&mut h, 20 * SECOND);
    // One attempt in 800 ms ± 50 %, as without hedging.
    let attempts = h.count(|request| matches!(request, Request::Put { .. }));
    assert!((15..40).contains(&attempts), "{attempts}");
    // And it goes on when they take objects again.
    h.pass(2 * SECOND);
    h.all_ok(is_put);
    assert_eq!(h.placement().bytes, 1000);
}

#[test]
fn races_of_parts_that_are_late_together_are_bounded_by_the_tokens() {
    let mut options = UploadOptions::default();
    (options.connections, options.hedge_connections) = (Some(64), 64);
    options.retain_bytes_max = 0;
    let mut h = Harness::new(&four(), options, 3);
    h.object(&[CHUNK; 40]);
    h.created();
    // The tokens saved up; those of the forty parts came while the purse was full.
    h.pass(LATE);
    assert_eq!(h.find(is_put).len(), 10);
    // Two more at a time without a token.
    h.pass(9 * SECOND);
    assert_eq!(h.find(is_put).len(), 12);
    assert!(h.policy.stats().hedges_denied > 0);
}

#[test]
fn when_everything_is_slow_races_stay_within_the_tokens() {
    let mut options = UploadOptions::default();
    options.connections = Some(8);
    options.retain_bytes_max = 0;
    let mut h = Harness::new(&four(), options, 3);
    let chunks = vec![CHUNK; 300];
    h.object(&chunks);
    h.created();
    // Each request takes five times what was expected, wherever it goes.
    while h.finished.is_none() {
        let now = h.now;
        for attempt in h.find(|f| now - f.started >= SECOND) {
            if h.in_flight.contains_key(&attempt) {
                h.ok(attempt);
            }
        }
        h.pass(Duration::from_millis(20));
    }
    let races = h.started.iter().filter(|(_, f)| f.lane == Lane::Hedge).count();
    // 10 saved up, a tenth of the parts, and two at a time of those without a token until D has learned.
    assert!(races <= 10 + 30 + 20, "{races} races of 300 parts");
    assert_eq!(h.policy.stats().hedges as usize, races);
}

#[test]
fn races_have_few_connections_of_their_own_and_give_them_back_when_cancelled() {
    let mut options = UploadOptions::default();
    options.hedge_connections = 1;
    options.connections = Some(3);
    let mut h = Harness::new(&four(), options, 3);
    h.object(&[CHUNK, CHUNK, CHUNK, CHUNK]);
    h.created();
    assert_eq!(h.find(is_part).len(), 3);
    let first = h.find(is_part)[0];
    h.pass(LATE);
    assert_eq!(h.find(is_put).len(), 1, "one connection for races");
    let hedge = h.only(is_put);
    let Request::Put { chunks } = h.in_flight[&hedge].request.clone() else { panic!() };
    assert_eq!(chunks.start, 0);
    h.ok(first);
    assert!(!h.in_flight.contains_key(&hedge));
    h.pass(Duration::from_millis(300));
    assert_eq!(h.find(is_put).len(), 1, "the connection was given back and serves the next one");
    assert_eq!(h.find(is_part).len(), 3, "and so was that of the first attempt");
}

#[test]
fn no_race_while_the_interface_is_what_is_busy() {
    let mut options = UploadOptions::default();
    options.nic_bytes_per_second = Some(10_000_000);
    let mut h = Harness::new(&four(), options, 3);
    h.object(&[CHUNK, CHUNK, CHUNK, CHUNK]);
    h.created();
    let parts = h.find(is_part);
    assert_eq!(parts.len(), 1, "as many connections as the interface feeds");
    // The first one goes at the full rate of the interface, the other bucket would only take from it.
    for step in 1..=16 {
        h.pass(Duration::from_millis(50));
        h.event(Event::Progress { attempt: parts[0], acknowledged: step * 500_000 });
        assert!(h.find(is_put).is_empty());
    }
    // It stalls: the interface is idle now.
    h.pass(3 * SECOND);
    assert!(!h.find(is_put).is_empty());
}

/// An object of which only the large part is on its way; that part, and since when.
fn one_part_left(progress_check: bool) -> (Harness, AttemptId, Instant) {
    let mut options = UploadOptions::default();
    options.hedging.progress_check = progress_check;
    let mut h = Harness::new(&four(), options, 3);
    h.object(&[CHUNK, 1000]);
    h.created();
    let start = h.now;
    let part = h.find(is_part)[0];
    h.all_ok(|f| matches!(f.request, Request::Part { chunk: 1, .. }));
    (h, part, start)
}

/// When the first race of a part begins that goes at 10 MB/s, and when the second, while the first goes at another rate.
fn races_begin(progress_check: bool, race_bytes_per_ms: u64) -> [Duration; 2] {
    let (mut h, part, start) = one_part_left(progress_check);
    let mut begun: Vec<(AttemptId, Duration)> = Vec::new();
    while begun.len() < 2 {
        h.pass(Duration::from_millis(1));
        let now = h.now - start;
        h.event(Event::Progress { attempt: part, acknowledged: now.as_millis() as u64 * 10_000 });
        if let Some((race, since)) = begun.first() {
            let acknowledged = (now - *since).as_millis() as u64 * race_bytes_per_ms;
            h.event(Event::Progress { attempt: *race, acknowledged });
        }
        for race in h.find(is_put) {
            if begun.iter().all(|(known, _)| *known != race) {
                begun.push((race, now));
            }
        }
    }
    [begun[0].1, begun[1].1]
}

#[test]
fn the_progress_check_finds_a_slow_part_before_d_and_a_slow_race_too() {
    let near = |found: Duration, ms: u128| (ms..ms + 12).contains(&found.as_millis());
    // 129 ms + 10 ms, and as long again after the race began.
    let [first, second] = races_begin(true, 10_000);
    assert!(near(first, 139) && near(second, 278), "{first:?} {second:?}");
    // Nothing is known of the pace of one that has sent nothing: 1.6 × 129 ms + 10 ms.
    let [first, second] = races_begin(true, 0);
    assert!(near(first, 139) && near(second, 356), "{first:?} {second:?}");
    // A race that keeps its pace is left to it, until it is D old itself.
    let [first, second] = races_begin(true, 65_000);
    assert!(near(first, 139) && near(second, 547), "{first:?} {second:?}");
    // D and 2 D.
    let [first, second] = races_begin(false, 10_000);
    assert!(near(first, 400) && near(second, 808), "{first:?} {second:?}");
}

#[test]
fn a_part_that_stops_after_the_first_look_is_found_by_the_second() {
    let (mut h, part, start) = one_part_left(true);
    while h.find(is_put).is_empty() {
        h.pass(Duration::from_millis(1));
        // It keeps its pace for 60 ms.
        let sent = (h.now - start).as_millis().min(60) as u64 * 65_000;
        h.event(Event::Progress { attempt: part, acknowledged: sent });
    }
    let found = (h.now - start).as_millis();
    assert!((140..230).contains(&found), "{found} ms");
}

#[test]
fn where_a_bucket_does_not_tell_of_progress_nothing_is_found_lagging() {
    let mut options = UploadOptions::default();
    options.hedging.progress_check = true;
    let mut h = Harness::new(&four(), options, 3);
    h.object(&[CHUNK, 1000]);
    let telling = h.created();
    let part = h.find(is_part)[0];
    h.event(Event::Progress { attempt: part, acknowledged: CHUNK });
    // That bucket is left alone for a while.
    h.err(part, StoreErrorKind::Interrupted);
    while h.settled.is_none() {
        h.all_ok(|_| true);
        h.pass(Duration::from_millis(1));
    }
    let mut h = h.again();
    h.object(&[CHUNK, 1000]);
    let start = h.now;
    assert_ne!(h.created(), telling);
    h.all_ok(|f| matches!(f.request, Request::Part { chunk: 1, .. }));
    while h.find(is_put).is_empty() {
        h.pass(Duration::from_millis(1));
    }
    assert!((h.now - start).as_millis() > 300, "{:?}", h.now - start);
}

#[test]
fn a_small_body_is_not_late_before_d_however_little_of_it_has_gone_out() {
    let mut options = UploadOptions::default();
    options.hedging.progress_check = true;
    let mut h = Harness::new(&four(), options, 3);
    h.object(&[1000]);
    let put = h.only(is_put);
    h.event(Event::Progress { attempt: put, acknowledged: 0 });
    h.pass(Duration::from_millis(140));
    assert_eq!(h.find(is_put), [put]);
    h.pass(Duration::from_millis(20));
    assert_eq!(h.find(is_put).len(), 2);
}

#[test]
fn a_bucket_that_opens_loses_its_units_into_one_upload_elsewhere() {
    let mut h = Harness::new(&four(), UploadOptions::default(), 3);
    h.event(Event::Chunk { bytes: CHUNK, last: false });
    let home = h.created();
    for _ in 0..7 {
        h.event(Event::Chunk { bytes: CHUNK, last: false });
    }
    let parts = h.find(is_part);
    h.ok(parts[0]);
    // Nothing is raced, for nobody waits; but what breaks off says enough of the bucket.
    for part in &parts[1..4] {
        h.err(*part, StoreErrorKind::Interrupted);
    }
    assert_eq!(h.policy.breaker(home, h.now), Breaker::Open);
    h.pass(SECOND);
    let elsewhere = |f: &Flight| f.bucket != home && !is_put(f);
    let other = h.in_flight[&h.only(elsewhere)].bucket;
    h.created();
    h.event(Event::Chunk { bytes: 5, last: true });
    h.event(Event::Wanted { deadline: None });
    for _ in 0..4 {
        h.all_ok(|f| f.bucket != home);
    }
    h.all_ok(is_complete);
    let whole: Vec<_> = h.placement().pieces.iter().map(|piece| piece.bucket).collect();
    assert!(whole.contains(&home) && whole.contains(&other), "{whole:?}");
    assert_eq!(h.count(|request| *request == Request::Create), 2);
    // The next object does not go there, and a canary decides when it may.
    while h.settled.is_none() {
        h.all_ok(is_clearing);
        h.pass(SECOND);
    }
    let mut h = h.again();
    h.object(&[1000]);
    let put = h.only(is_put);
    assert_ne!(h.in_flight[&put].bucket, home);
    let due = h.policy.deadline().expect("a canary");
    assert_eq!(h.policy.canary(due).map(|canary| canary.bucket), Some(home));
    h.policy.canary_ended(home, true, Duration::from_millis(20), due);
    assert_eq!(h.policy.breaker(home, due), Breaker::Closed);
}

#[test]
fn a_dead_home_bucket_costs_one_race_and_not_the_object() {
    let mut options = UploadOptions::default();
    options.hedging.progress_check = false;
    let mut h = Harness::new(&four(), options, 3);
    h.object(&[CHUNK, CHUNK, CHUNK, 1000]);
    let dead = h.in_flight[&h.only(|_| true)].bucket;
    let start: Instant = h.now;
    while h.finished.is_none() {
        h.pass(Duration::from_millis(50));
        h.all_ok(|f| f.bucket != dead);
    }
    assert!(h.now - start < SECOND, "{:?}", h.now - start);
    assert!(h.placement().pieces.iter().all(|piece| piece.bucket != dead));
}
