//! What the simulated bucket promises to the tests that rest on it.

use std::pin::pin;
use std::task::{Context, Poll, Waker};

use super::network::{Call, Ending, Happening, Model, Network, Work};
use super::*;

/// The outcome of a future that never waits.
fn now<T>(future: impl Future<Output = T>) -> T {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(outcome) => outcome,
        Poll::Pending => panic!("the simulated bucket waits"),
    }
}

fn body(text: &'static str) -> Body {
    Body::new(vec![text.into()])
}

fn put(store: &SimStore, name: &str, text: &'static str) -> Result<EntityTag, StoreError> {
    now(store.put(name, body(text), Lane::Primary))
}

fn part(
    store: &SimStore,
    id: &UploadId,
    number: u32,
    text: &'static str,
) -> Result<UploadedPart, StoreErrorKind> {
    let upload = UploadRef { name: "a", id };
    let tag = now(store.put_part(upload, number, body(text), Lane::Primary)).map_err(kind)?;
    Ok(UploadedPart { number, tag })
}

fn complete(store: &SimStore, id: &UploadId, parts: &[UploadedPart]) -> Result<EntityTag, StoreErrorKind> {
    now(store.complete(UploadRef { name: "a", id }, parts)).map_err(kind)
}

fn kind(error: StoreError) -> StoreErrorKind {
    error.kind().clone()
}

/// A bucket with this change of the usual row, and an upload of "a" begun in it where there can be one.
fn changed(change: impl FnOnce(&mut Capabilities)) -> (SimStore, UploadId) {
    let mut row = SimStore::new(1).capabilities().clone();
    change(&mut row);
    let store = SimStore::with_capabilities(1, row);
    let id = now(store.create("a")).unwrap_or(UploadId("none".into()));
    (store, id)
}

#[test]
fn a_lost_request_did_nothing_and_a_lost_answer_hides_what_was_done() {
    let store = SimStore::new(1);
    store.fail_next(Operation::Put, Fault::Before);
    store.fail_next(Operation::Put, Fault::After);
    store.fail_next(Operation::Put, Fault::Throttled);
    assert_eq!(kind(put(&store, "a", "x").unwrap_err()), StoreErrorKind::Interrupted);
    assert!(store.objects().is_empty());
    assert_eq!(kind(put(&store, "a", "x").unwrap_err()), StoreErrorKind::Interrupted);
    assert_eq!(store.objects()["a"], "x");
    assert_eq!(kind(put(&store, "b", "x").unwrap_err()), StoreErrorKind::Throttled);
    // A name is written once.
    assert_eq!(kind(put(&store, "a", "y").unwrap_err()), StoreErrorKind::Exists);
    assert_eq!(store.objects().len(), 1);
    let stats = store.stats();
    assert_eq!((stats.calls(Operation::Put), stats.faults[&Operation::Put], stats.bytes_put), (4, 3, 1));
}

#[test]
fn a_late_request_has_its_effect_a_few_calls_after_its_caller_gave_up() {
    let store = SimStore::new(1);
    store.fail_next(Operation::Put, Fault::Late);
    let error = put(&store, "a", "x").unwrap_err();
    assert!(matches!(kind(error), StoreErrorKind::TimedOut(_)));
    let calls = (1..100).find(|_| now(store.head("a")).is_ok());
    assert!(calls.is_some_and(|calls| calls <= LATE_CALLS_MAX + 1), "{calls:?}");

    store.fail_next(Operation::Delete, Fault::Late);
    now(store.delete("a")).unwrap_err();
    assert_eq!(store.objects().len(), 1);
    store.settle();
    assert!(store.objects().is_empty());
}

#[test]
fn a_late_part_takes_the_place_of_the_one_sent_after_it() {
    let (store, id) = changed(|_| {});
    store.fail_next(Operation::PutPart, Fault::Late);
    part(&store, &id, 1, "old").unwrap_err();
    let new = part(&store, &id, 1, "new").unwrap();
    store.settle();
    assert_eq!(complete(&store, &id, &[new]), Err(StoreErrorKind::InvalidPart));
    let [listed] = &now(store.list_parts(UploadRef { name: "a", id: &id })).unwrap()[..] else { panic!() };
    let listed = UploadedPart { number: listed.number, tag: listed.tag.clone() };
    complete(&store, &id, &[listed]).unwrap();
    assert_eq!(store.objects()["a"], "old");
}

#[test]
fn a_part_sent_twice_has_a_new_tag_or_is_spoiled() {
    let (store, id) = changed(|_| {});
    let first = part(&store, &id, 1, "x").unwrap();
    let second = part(&store, &id, 1, "x").unwrap();
    assert_eq!(complete(&store, &id, &[first]), Err(StoreErrorKind::InvalidPart));
    complete(&store, &id, &[second]).unwrap();

    let (store, id) = changed(|row| row.resend_part = false);
    part(&store, &id, 1, "x").unwrap();
    let second = part(&store, &id, 1, "x").unwrap();
    assert_eq!(complete(&store, &id, &[second]), Err(StoreErrorKind::InvalidPart));
}

#[test]
fn an_upload_is_known_until_it_is_complete_or_aborted() {
    for completed in [true, false] {
        let (store, id) = changed(|_| {});
        let upload = UploadRef { name: "a", id: &id };
        let first = part(&store, &id, 1, "x").unwrap();
        assert_eq!(store.open_uploads(), ["a"]);
        assert_eq!(now(store.list_uploads("a")).unwrap().len(), 1);
        assert_eq!(now(store.list_uploads("b")).unwrap().len(), 0);
        // The bucket, unlike the process, goes on.
        store.crash();
        part(&store, &id, 2, "y").unwrap_err();
        store.restart();
        if completed {
            complete(&store, &id, std::slice::from_ref(&first)).unwrap();
        } else {
            now(store.abort(upload)).unwrap();
        }
        assert_eq!(store.open_uploads(), [] as [&str; 0]);
        assert_eq!(part(&store, &id, 2, "y"), Err(StoreErrorKind::NoSuchUpload));
        assert_eq!(complete(&store, &id, &[first]), Err(StoreErrorKind::NoSuchUpload));
        assert_eq!(kind(now(store.list_parts(upload)).unwrap_err()), StoreErrorKind::NoSuchUpload);
        now(store.abort(upload)).unwrap();
        assert_eq!(store.objects().len(), usize::from(completed));
    }
}

#[test]
fn a_complete_takes_the_parts_that_it_names() {
    let (store, id) = changed(|_| {});
    let parts = [1, 2, 4].map(|number| part(&store, &id, number, "xy").unwrap());
    let [one, two, four] = parts;
    let swapped = [two.clone(), one.clone()];
    let unknown = [UploadedPart { number: 3, tag: one.tag.clone() }];
    for refused in [&swapped[..], &unknown, &[one.clone(), one.clone()], &[]] {
        assert_eq!(complete(&store, &id, refused), Err(StoreErrorKind::InvalidPart));
    }
    complete(&store, &id, &[one, four]).unwrap();
    assert_eq!(store.objects()["a"], "xyxy");
}

#[test]
fn a_row_is_kept_to() {
    let invalid = Err(StoreErrorKind::InvalidPart);
    let (store, id) = changed(|row| row.sparse = false);
    let parts = [1, 3].map(|number| part(&store, &id, number, "x").unwrap());
    assert_eq!(complete(&store, &id, &parts), invalid);
    complete(&store, &id, &parts[..1]).unwrap();

    let (store, id) = changed(|row| row.part_bytes_min = 2);
    let parts = [1, 2].map(|number| part(&store, &id, number, "x").unwrap());
    assert_eq!(complete(&store, &id, &parts), invalid);
    // The last one may be small.
    complete(&store, &id, &parts[..1]).unwrap();

    let (store, id) = changed(|row| row.equal_parts = true);
    let parts = [(1, "xx"), (2, "xxx"), (3, "xx"), (4, "x")]
        .map(|(number, text)| part(&store, &id, number, text).unwrap());
    assert_eq!(complete(&store, &id, &parts), invalid);
    assert_eq!(complete(&store, &id, &parts[..2]), invalid);
    complete(&store, &id, &[parts[0].clone(), parts[2].clone(), parts[3].clone()]).unwrap();

    let (store, id) = changed(|row| row.parts = Parts::Sequential);
    assert_eq!(part(&store, &id, 2, "x"), Err(StoreErrorKind::InvalidPart));
    part(&store, &id, 1, "x").unwrap();
    assert_eq!(part(&store, &id, 1, "x"), Err(StoreErrorKind::InvalidPart));
    part(&store, &id, 2, "x").unwrap();

    let (store, id) = changed(|row| (row.parts_max, row.part_bytes_max) = (2, 2));
    part(&store, &id, 2, "xx").unwrap();
    for (number, text) in [(3, "x"), (0, "x"), (1, "xxx")] {
        assert_eq!(part(&store, &id, number, text), Err(StoreErrorKind::InvalidPart));
    }

    let (store, _) = changed(|row| row.parts = Parts::None);
    assert_eq!(kind(now(store.create("a")).unwrap_err()), StoreErrorKind::Unsupported);
    put(&store, "a", "x").unwrap();

    let (store, id) = changed(|row| (row.list_parts, row.list_uploads) = (false, false));
    let refused = now(store.list_parts(UploadRef { name: "a", id: &id })).unwrap_err();
    assert_eq!(kind(refused), StoreErrorKind::Unsupported);
    assert_eq!(kind(now(store.list_uploads("")).unwrap_err()), StoreErrorKind::Unsupported);

    let (store, _) = changed(|row| row.conditional_put = false);
    put(&store, "a", "x").unwrap();
    put(&store, "a", "y").unwrap();
    assert_eq!(store.objects()["a"], "y");
}

#[test]
fn a_crash_ends_requests_until_the_restart_and_death_until_healed() {
    let store = SimStore::new(1);
    store.fail_next(Operation::Put, Fault::CrashAfter);
    put(&store, "a", "x").unwrap_err();
    assert!(store.is_crashed());
    now(store.head("a")).unwrap_err();
    store.restart();
    assert_eq!(now(store.head("a")).unwrap().bytes, 1);
    store.set_dead(true);
    assert!(now(store.head("a")).unwrap_err().is_retryable());
    store.heal();
    now(store.head("a")).unwrap();
}

#[test]
fn chances_follow_the_seed() {
    let outcomes = |seed| -> Vec<bool> {
        let store = SimStore::new(seed);
        let chances = Chances { before: 0.2, after: 0.1, late: 0.1, throttled: 0.1 };
        store.set_chances(Operation::Delete, chances);
        (0..1000).map(|_| now(store.delete("x")).is_ok()).collect()
    };
    assert_eq!(outcomes(5), outcomes(5));
    assert_ne!(outcomes(5), outcomes(6));
    let ok = outcomes(5).into_iter().filter(|ok| *ok).count();
    assert!((400..600).contains(&ok), "{ok} of 1000 at one half");
}

#[test]
fn a_connection_keeps_its_rate_until_it_is_closed() {
    let even = |median| (median, 0.0);
    let model = Model {
        service_s: even(0.1),
        connect_s: even(0.0),
        slow_share: 0.0,
        hiccup_share: 0.0,
        stall_share: 0.0,
        ..Model::default()
    };
    let mut network = Network::new(model, 1, 1, f64::MAX, 1);
    let send = |network: &mut Network| {
        let started = network.now();
        network.start(Call {
            node: 0,
            bucket: 0,
            lane: Lane::Primary,
            work: Work::Body,
            bytes: 5_000_000,
            timeout: Duration::from_secs(10),
            owner: 0,
        });
        let ended = network.advance();
        assert!(matches!(ended, Some(Happening::Ended { ending: Ending::Done, .. })), "{ended:?}");
        network.now() - started
    };
    let first = send(&mut network);
    assert_eq!(send(&mut network), first);
    network.retire();
    assert_ne!(send(&mut network), first);
}
