//! What goes wrong between the first part and a proven object.

use std::time::Duration;

use tidelog_upload::UploadOptions;
use tidelog_upload::multipart::{Answer, Event, Request};
use tidelog_upload::store::{ListedPart, StoreErrorKind};

use crate::harness::*;

const CHUNK: u64 = 8 << 20;
const SECOND: Duration = Duration::from_secs(1);

fn parts_named(flight: &Flight) -> Vec<u32> {
    match &flight.request {
        Request::Complete { parts, .. } => parts.iter().map(|part| part.number).collect(),
        _ => Vec::new(),
    }
}

/// An object of three chunks in one bucket whose parts are all there: its Complete is in flight.
fn completing() -> Harness {
    let mut h = Harness::new(&[s3()], UploadOptions::default(), 1);
    h.object(&[CHUNK, CHUNK, 1000]);
    h.created();
    h.all_ok(is_part);
    h.only(is_complete);
    h
}

fn listed(h: &Harness, without: &[u32]) -> Answer {
    let parts = h.started.iter().filter_map(|(id, flight)| match flight.request {
        Request::Part { number, chunk, .. } if !without.contains(&number) => Some(ListedPart {
            number,
            tag: tag(&format!("t{}", id.0)),
            bytes: if chunk == 2 { 1000 } else { CHUNK },
        }),
        _ => None,
    });
    Answer::Parts(parts.collect())
}

#[test]
fn a_small_object_is_one_put() {
    let mut h = Harness::new(&[s3(), s3()], UploadOptions::default(), 1);
    h.object(&[1000]);
    let put = h.only(is_put);
    h.ok(put);
    assert_eq!((h.placement().bytes, h.placement().pieces.len(), h.started.len()), (1000, 1, 1));
    assert_eq!(h.placement().pieces[0].name, "o");
    assert_eq!(h.settled, Some(false));
}

#[test]
fn parts_go_out_before_the_object_is_wanted_and_only_the_tail_and_the_complete_are_left() {
    let mut h = Harness::new(&[s3(), s3()], UploadOptions::default(), 1);
    h.event(Event::Chunk { bytes: CHUNK, last: false });
    h.created();
    h.all_ok(is_part);
    h.event(Event::Chunk { bytes: CHUNK, last: false });
    h.all_ok(is_part);
    assert_eq!(h.stored.len(), 2);
    let before = h.started.len();
    h.event(Event::Chunk { bytes: 77, last: true });
    h.event(Event::Wanted { deadline: None });
    h.all_ok(is_part);
    h.all_ok(is_complete);
    assert_eq!(h.started.len() - before, 2);
    assert_eq!(h.placement().pieces.len(), 1);
    assert_eq!(h.placement().bytes, 2 * CHUNK + 77);
    assert_eq!((h.settled, h.released.len()), (Some(false), 3));
}

#[test]
fn a_part_number_is_not_sent_again_while_an_earlier_attempt_may_live() {
    let mut h = Harness::new(&[s3()], hedging_off(), 1);
    h.object(&[CHUNK, CHUNK, 1000]);
    h.created();
    let first = h.only(|f| matches!(f.request, Request::Part { chunk: 0, .. }));
    h.err(first, StoreErrorKind::Interrupted);
    h.pass(2 * SECOND);
    let again = h.only(|f| matches!(f.request, Request::Part { chunk: 0, .. }));
    let Request::Part { number, .. } = h.in_flight[&again].request else { panic!() };
    assert_eq!(number, 3, "a number that was never used");
    h.all_ok(is_part);
    let complete = h.only(is_complete);
    // The small last part stays the last one, whatever was sent again.
    assert_eq!(parts_named(&h.in_flight[&complete]), [2, 3, 10_000]);
    h.ok(complete);
    // The object holds the chunks out of order; the pieces put them right.
    let offsets: Vec<_> = h.placement().pieces.iter().map(|piece| (piece.offset, piece.bytes)).collect();
    assert_eq!(offsets, [(CHUNK, CHUNK), (0, CHUNK), (2 * CHUNK, 1000)]);
}

#[test]
fn a_refused_part_did_nothing_and_is_sent_again_in_place_where_numbers_have_no_gaps() {
    let mut h = Harness::new(&[dense()], UploadOptions::default(), 1);
    h.object(&[CHUNK, 1000]);
    h.created();
    let first = h.only(|f| matches!(f.request, Request::Part { number: 1, .. }));
    h.err(first, StoreErrorKind::Throttled);
    h.pass(SECOND);
    h.all_ok(is_part);
    let complete = h.only(is_complete);
    assert_eq!(parts_named(&h.in_flight[&complete]), [1, 2]);
}

#[test]
fn without_gaps_a_part_of_unknown_outcome_makes_a_new_upload_and_the_old_one_is_aborted_after_the_outcome() {
    let mut h = Harness::new(&[dense()], UploadOptions::default(), 1);
    h.object(&[CHUNK, 1000]);
    h.created();
    let first = h.only(|f| matches!(f.request, Request::Part { number: 1, .. }));
    h.err(first, StoreErrorKind::Interrupted);
    h.created();
    h.all_ok(is_part);
    h.all_ok(is_complete);
    assert_eq!(h.placement().pieces.len(), 1);
    assert_eq!(h.placement().pieces[0].name, "o.w1");
    h.all_ok(is_clearing);
    assert_eq!(h.count(|request| matches!(request, Request::Abort { .. })), 1);
    assert!(h.settled.is_some());
}

#[test]
fn a_number_sent_twice_where_that_is_allowed_is_settled_by_a_listing() {
    let row = tidelog_upload::store::Capabilities { resend_part: true, ..dense() };
    let mut h = Harness::new(&[row], UploadOptions::default(), 1);
    h.object(&[CHUNK, 1000]);
    h.created();
    let first = h.only(|f| matches!(f.request, Request::Part { number: 1, .. }));
    h.err(first, StoreErrorKind::Interrupted);
    h.pass(SECOND);
    h.all_ok(is_part);
    assert!(h.find(is_complete).is_empty(), "nobody knows which tag counts");
    let list = h.only(|f| matches!(f.request, Request::ListParts { .. }));
    let parts = [(1, "late", CHUNK), (2, "t2", 1000)];
    let parts = parts.map(|(number, name, bytes)| ListedPart { number, tag: tag(name), bytes });
    h.ended(list, Ok(Answer::Parts(parts.to_vec())));
    let complete = h.only(is_complete);
    let Request::Complete { parts, .. } = &h.in_flight[&complete].request else { panic!() };
    assert_eq!(parts[0].tag, tag("late"));
}

#[test]
fn a_lost_answer_to_complete_is_settled_by_name_and_size() {
    let mut h = completing();
    let complete = h.only(is_complete);
    h.err(complete, StoreErrorKind::Interrupted);
    assert!(h.finished.is_none());
    let head = h.only(|f| f.request == Request::Head);
    h.found(head, 2 * CHUNK + 1000);
    assert_eq!(h.placement().pieces.len(), 1);
    assert_eq!(h.count(|request| matches!(request, Request::Complete { .. })), 1);
    assert_eq!(h.settled, Some(false));
}

#[test]
fn an_object_of_another_size_is_no_proof() {
    let mut h = completing();
    let complete = h.only(is_complete);
    h.err(complete, StoreErrorKind::TimedOut(SECOND));
    let head = h.only(|f| f.request == Request::Head);
    h.found(head, 2 * CHUNK);
    assert!(h.finished.is_none());
    h.created();
    h.all_ok(is_part);
    h.all_ok(is_complete);
    assert_eq!(h.placement().pieces[0].name, "o.w1");
}

#[test]
fn a_tag_of_fewer_parts_is_no_proof() {
    let mut h = completing();
    let complete = h.only(is_complete);
    let truncated = "0123456789abcdef0123456789abcdef-2";
    h.ended(complete, Ok(Answer::Tag(tag(truncated))));
    assert!(h.finished.is_none());
    let head = h.only(|f| f.request == Request::Head);
    h.found(head, 2 * CHUNK + 1000);
    assert_eq!(h.placement().bytes, 2 * CHUNK + 1000);
}

#[test]
fn completion_already_in_progress_is_polled() {
    let mut h = completing();
    let complete = h.only(is_complete);
    h.err(complete, StoreErrorKind::InProgress);
    for _ in 0..2 {
        let head = h.only(|f| f.request == Request::Head);
        h.err(head, StoreErrorKind::NotFound);
        h.pass(Duration::from_millis(160));
    }
    let head = h.only(|f| f.request == Request::Head);
    h.found(head, 2 * CHUNK + 1000);
    assert!(h.placement().bytes > 0);
    assert_eq!(h.count(|request| matches!(request, Request::Complete { .. })), 1);
}

#[test]
fn a_complete_that_never_arrived_is_sent_again_only_when_the_store_still_has_the_upload() {
    let mut h = completing();
    let complete = h.only(is_complete);
    h.err(complete, StoreErrorKind::Interrupted);
    let started = h.now;
    while h.find(|f| matches!(f.request, Request::ListParts { .. })).is_empty() {
        assert!(h.find(is_complete).is_empty(), "a second Complete while the first may be under way");
        for head in h.find(|f| f.request == Request::Head) {
            h.err(head, StoreErrorKind::NotFound);
        }
        h.pass(Duration::from_millis(100));
    }
    assert!(h.now - started >= 2 * SECOND);
    let list = h.only(|f| matches!(f.request, Request::ListParts { .. }));
    let parts = listed(&h, &[]);
    h.ended(list, Ok(parts));
    h.all_ok(is_complete);
    assert!(h.placement().bytes > 0);
}

#[test]
fn a_complete_that_timed_out_may_take_effect_as_late_as_one_whose_answer_was_lost_at_once() {
    for row in [s3(), tidelog_upload::store::Capabilities { list_parts: false, ..s3() }] {
        let mut h = Harness::new(&[row], UploadOptions::default(), 1);
        h.object(&[CHUNK, CHUNK, 1000]);
        h.created();
        h.all_ok(is_part);
        let complete = h.only(is_complete);
        h.pass(60 * SECOND);
        h.err(complete, StoreErrorKind::TimedOut(60 * SECOND));
        let unknown = h.now;
        while h.find(|f| f.request != Request::Head).is_empty() {
            for head in h.find(|f| f.request == Request::Head) {
                h.err(head, StoreErrorKind::NotFound);
            }
            h.pass(Duration::from_millis(100));
        }
        assert!(h.now - unknown >= 2 * SECOND, "{:?}", h.now - unknown);
    }
}

#[test]
fn a_name_that_is_taken_at_a_complete_is_looked_at() {
    for there in [true, false] {
        let mut h = completing();
        let complete = h.only(is_complete);
        h.err(complete, StoreErrorKind::Exists);
        let head = h.only(|f| f.request == Request::Head);
        if there {
            h.found(head, 2 * CHUNK + 1000);
        } else {
            // Not by this object.
            h.found(head, 77);
            h.created();
            h.all_ok(is_part);
            h.all_ok(is_complete);
        }
        assert_eq!(h.placement().pieces[0].name, if there { "o" } else { "o.w1" });
        assert_eq!(h.count(|request| matches!(request, Request::Abort { .. })), 0, "its outcome is unknown");
    }
}

#[test]
fn no_such_upload_at_a_second_complete_is_settled_by_the_object() {
    let mut h = completing();
    let complete = h.only(is_complete);
    h.err(complete, StoreErrorKind::NoSuchUpload);
    let head = h.only(|f| f.request == Request::Head);
    h.found(head, 2 * CHUNK + 1000);
    assert!(h.placement().bytes > 0);
}

#[test]
fn no_such_upload_at_a_listing_is_settled_by_the_object() {
    for there in [true, false] {
        let mut h = completing();
        let complete = h.only(is_complete);
        h.err(complete, StoreErrorKind::InvalidPart);
        let list = h.only(|f| matches!(f.request, Request::ListParts { .. }));
        h.err(list, StoreErrorKind::NoSuchUpload);
        let head = h.only(|f| f.request == Request::Head);
        if there {
            h.found(head, 2 * CHUNK + 1000);
        } else {
            h.err(head, StoreErrorKind::NotFound);
            h.created();
            h.all_ok(is_part);
            h.all_ok(is_complete);
        }
        assert_eq!(h.placement().pieces[0].name, if there { "o" } else { "o.w1" });
    }
}

#[test]
fn a_put_of_unknown_outcome_is_followed_by_one_of_another_name_and_deleted() {
    let mut h = Harness::new(&[s3()], hedging_off(), 1);
    h.object(&[1000]);
    let first = h.only(is_put);
    h.err(first, StoreErrorKind::Interrupted);
    h.pass(SECOND);
    let second = h.only(is_put);
    assert_eq!((&*h.in_flight[&second].name, h.in_flight.len()), ("o.w1", 1));
    h.ok(second);
    assert_eq!(h.placement().pieces[0].name, "o.w1");
    let delete = h.only(is_clearing);
    assert_eq!(h.in_flight[&delete].name, "o");
    h.ok(delete);
    assert_eq!(h.settled, Some(true), "it may yet appear");
}

#[test]
fn invalid_part_is_repaired_from_the_listing_under_a_new_number() {
    let mut h = completing();
    let complete = h.only(is_complete);
    h.err(complete, StoreErrorKind::InvalidPart);
    let list = h.only(|f| matches!(f.request, Request::ListParts { .. }));
    let parts = listed(&h, &[1]);
    h.ended(list, Ok(parts));
    let again = h.only(is_part);
    assert!(matches!(h.in_flight[&again].request, Request::Part { number: 3, chunk: 0, .. }));
    h.ok(again);
    let complete = h.only(is_complete);
    assert_eq!(parts_named(&h.in_flight[&complete]), [2, 3, 10_000]);
    h.ok(complete);
    assert!(h.placement().bytes > 0);
}

#[test]
fn a_listing_may_be_long_and_in_any_order() {
    let mut h = Harness::new(&[s3()], UploadOptions::default(), 1);
    let mut chunks = vec![1000; 2000];
    chunks[1999] = 77;
    h.object(&chunks);
    h.created();
    while h.find(is_complete).is_empty() {
        h.all_ok(is_part);
    }
    let complete = h.only(is_complete);
    h.err(complete, StoreErrorKind::InvalidPart);
    let list = h.only(|f| matches!(f.request, Request::ListParts { .. }));
    let part = |(id, flight): &(_, Flight)| match flight.request {
        Request::Part { number, chunk, .. } if number != 1000 => {
            let id: &tidelog_upload::multipart::AttemptId = id;
            Some(ListedPart { number, tag: tag(&format!("t{}", id.0)), bytes: chunks[chunk as usize] })
        }
        _ => None,
    };
    let mut parts: Vec<_> = h.started.iter().filter_map(part).collect();
    parts.reverse();
    h.ended(list, Ok(Answer::Parts(parts)));
    let again = h.only(is_part);
    assert!(matches!(h.in_flight[&again].request, Request::Part { number: 2000, chunk: 999, .. }));
    h.ok(again);
    h.all_ok(is_complete);
    assert_eq!(h.placement().bytes, 1_999_077);
}

#[test]
fn an_upload_that_the_store_does_not_know_is_never_used_again() {
    let mut h = Harness::new(&[s3()], UploadOptions::default(), 1);
    h.object(&[CHUNK, CHUNK, 1000]);
    h.created();
    let old = h.find(is_part);
    h.ok(old[0]);
    h.err(old[1], StoreErrorKind::NoSuchUpload);
    let Request::Part { upload: gone, .. } = h.started[1].1.request.clone() else { panic!() };
    let before = h.started.len();
    h.created();
    h.all_ok(is_part);
    h.all_ok(is_complete);
    for (_, flight) in &h.started[before..] {
        let used = matches!(&flight.request, Request::Part { upload, .. } | Request::Complete { upload, .. } if *upload == gone);
        assert!(!used, "{flight:?}");
    }
    assert_eq!(h.placement().pieces[0].name, "o.w1");
}

#[test]
fn an_upload_lost_after_its_bytes_were_let_go_fails_the_object_at_once() {
    let mut options = UploadOptions::default();
    options.retain_bytes_max = CHUNK;
    let mut h = Harness::new(&[s3()], options, 1);
    h.object(&[CHUNK, CHUNK, 1000]);
    h.created();
    let parts = h.find(is_part);
    h.ok(parts[0]);
    assert!(h.released.contains(&0));
    h.err(parts[1], StoreErrorKind::NoSuchUpload);
    let error = h.finished.as_ref().expect("an outcome").as_ref().expect_err("a failure");
    assert_eq!(*error.kind(), StoreErrorKind::NoSuchUpload);
}

#[test]
fn an_unwanted_object_is_not_aborted_until_the_outcome_of_its_complete_is_known() {
    // Known to be done: what must go is an object.
    let mut h = completing();
    h.event(Event::Abort);
    assert!(h.finished.as_ref().is_some_and(Result::is_err));
    assert!(h.find(is_clearing).is_empty() && h.cancelled.is_empty());
    h.all_ok(is_complete);
    let delete = h.only(is_clearing);
    assert_eq!(h.in_flight[&delete].request, Request::Delete);
    h.ok(delete);
    assert_eq!(h.settled, Some(false));
    // Unknown: the object tells, and if it does not, neither it nor the upload is touched, and that is said.
    let mut h = completing();
    h.event(Event::Abort);
    let complete = h.only(is_complete);
    h.err(complete, StoreErrorKind::TimedOut(SECOND));
    while h.settled.is_none() {
        for head in h.find(|f| f.request == Request::Head) {
            h.err(head, StoreErrorKind::NotFound);
        }
        h.pass(SECOND);
    }
    assert_eq!(h.count(|request| matches!(request, Request::Abort { .. } | Request::Delete)), 0);
    assert_eq!(h.settled, Some(true));
}

#[test]
fn an_object_past_its_deadline_fails_with_the_cause_and_is_cleared() {
    let mut h = Harness::new(&[s3()], UploadOptions::default(), 1);
    h.event(Event::Chunk { bytes: CHUNK, last: false });
    h.created();
    h.event(Event::Wanted { deadline: Some(h.now + 5 * SECOND) });
    let part = h.only(is_part);
    h.err(part, StoreErrorKind::Throttled);
    h.pass(4 * SECOND);
    assert!(h.finished.is_none());
    h.pass(SECOND);
    let error = h.finished.clone().expect("an outcome").expect_err("a failure");
    assert!(matches!(error.kind(), StoreErrorKind::Deadline(_)) && error.is_retryable());
    assert!(error.to_string().contains("slow down"), "{error}");
    h.all_ok(is_clearing);
    assert!(h.settled.is_some());
}

#[test]
fn what_cannot_be_cleared_in_an_outage_is_said_to_be_left() {
    let mut h = completing();
    let complete = h.only(is_complete);
    h.err(complete, StoreErrorKind::Denied);
    assert_eq!(*h.finished.as_ref().unwrap().as_ref().unwrap_err().kind(), StoreErrorKind::Denied);
    let mut tries = 0;
    while h.settled.is_none() {
        for abort in h.find(is_clearing) {
            h.err(abort, StoreErrorKind::Throttled);
            tries += 1;
        }
        h.pass(SECOND);
    }
    assert_eq!((tries, h.settled), (5, Some(true)));
}

#[test]
fn a_bucket_that_denies_is_left_and_the_object_fails_only_when_all_deny() {
    let mut h = Harness::new(&[s3(), s3()], UploadOptions::default(), 1);
    h.object(&[1000]);
    let put = h.only(is_put);
    let home = h.in_flight[&put].bucket;
    h.err(put, StoreErrorKind::Denied);
    let put = h.only(is_put);
    assert_ne!(h.in_flight[&put].bucket, home);
    h.err(put, StoreErrorKind::Denied);
    assert_eq!(*h.finished.as_ref().unwrap().as_ref().unwrap_err().kind(), StoreErrorKind::Denied);
    assert_eq!(h.settled, Some(false));
}

#[test]
fn expired_credentials_are_tried_once_more_and_then_an_error() {
    let mut h = Harness::new(&[s3()], hedging_off(), 1);
    h.object(&[1000]);
    let put = h.only(is_put);
    h.err(put, StoreErrorKind::Credentials);
    assert!(h.finished.is_none());
    h.pass(SECOND);
    let put = h.only(is_put);
    h.err(put, StoreErrorKind::Credentials);
    assert_eq!(*h.finished.as_ref().unwrap().as_ref().unwrap_err().kind(), StoreErrorKind::Credentials);
}

#[test]
fn a_sequential_store_gets_one_part_at_a_time_in_order() {
    let mut h = Harness::new(&[sequential(), sequential()], UploadOptions::default(), 1);
    h.object(&[CHUNK, CHUNK, 1000]);
    h.created();
    for number in 1..=3 {
        h.pass(5 * SECOND);
        let part = h.only(|_| true);
        assert!(matches!(h.in_flight[&part].request, Request::Part { number: n, .. } if n == number));
        h.ok(part);
    }
    h.all_ok(is_complete);
    assert_eq!(h.placement().pieces.len(), 1);
}

#[test]
fn a_store_without_parts_gets_the_object_in_one_request() {
    let mut h = Harness::new(&[whole()], UploadOptions::default(), 1);
    h.event(Event::Chunk { bytes: CHUNK, last: false });
    h.event(Event::Chunk { bytes: CHUNK, last: false });
    assert!(h.in_flight.is_empty());
    h.event(Event::Chunk { bytes: 5, last: true });
    let put = h.only(is_put);
    assert_eq!(h.in_flight[&put].request, Request::Put { chunks: 0..3 });
    h.ok(put);
    assert_eq!(h.placement().bytes, 2 * CHUNK + 5);
}

#[test]
fn pieces_beyond_4_gib_are_where_they_are() {
    const GIB: u64 = 1 << 30;
    let mut h = Harness::new(&[s3()], hedging_off(), 1);
    h.object(&[5 * GIB, 5 * GIB, 5 * GIB, 77]);
    h.created();
    // Sent again under a higher number, so that it comes after two others in the object.
    let first = h.only(|f| matches!(f.request, Request::Part { chunk: 0, .. }));
    h.err(first, StoreErrorKind::Interrupted);
    h.pass(2 * SECOND);
    h.all_ok(is_part);
    h.all_ok(is_complete);
    let pieces: Vec<_> = h.placement().pieces.iter().map(|piece| (piece.offset, piece.bytes)).collect();
    assert_eq!(pieces, [(10 * GIB, 5 * GIB), (0, 10 * GIB), (15 * GIB, 77)]);
    assert_eq!(h.placement().bytes, 15 * GIB + 77);
}

#[test]
fn time_limits_follow_size_and_patience_grows_where_they_are_hit() {
    let limit = |bytes| {
        let mut h = Harness::new(&[s3()], hedging_off(), 1);
        h.object(&[bytes]);
        let put = h.only(is_put);
        (h.in_flight[&put].timeout, h, put)
    };
    let (small, ..) = limit(1000);
    let (large, mut h, mut put) = limit(2 << 30);
    assert!(large > small + 60 * SECOND, "{small:?} {large:?}");
    // A store slower than anything expected is given ever more time.
    let mut last = large;
    for _ in 0..3 {
        h.err(put, StoreErrorKind::TimedOut(last));
        h.pass(SECOND);
        put = h.only(is_put);
        let limit = h.in_flight[&put].timeout;
        assert!(limit >= last.mul_f64(1.9), "{last:?} {limit:?}");
        last = limit;
    }
}

#[test]
fn parts_that_hit_their_limit_together_double_it_once_and_the_next_ones_again() {
    let mut options = hedging_off();
    options.connections = Some(8);
    let mut h = Harness::new(&[s3()], options, 1);
    h.object(&[CHUNK; 8]);
    h.created();
    let limit = |h: &Harness| h.find(is_part).iter().map(|part| h.in_flight[part].timeout).max();
    let first = limit(&h).expect("parts");
    // One began a second later than the others.
    h.pass(SECOND);
    let late = h.find(is_part)[0];
    h.err(late, StoreErrorKind::Throttled);
    h.pass(first);
    let stalled = h.find(is_part);
    assert_eq!(stalled.len(), 8);
    for part in &stalled {
        h.err(*part, StoreErrorKind::TimedOut(first));
    }
    h.pass(SECOND);
    assert_eq!(limit(&h), Some(first * 2));
    h.pass(first * 2);
    for part in h.find(is_part) {
        h.err(part, StoreErrorKind::TimedOut(first * 2));
    }
    h.pass(SECOND);
    assert_eq!(limit(&h), Some(first * 4));
}
