//! Which record may follow which, and that a snapshot says the same.

use proptest::prelude::*;

use super::*;

const LOG: LogId = LogId(1);

fn created(log: LogId) -> ManifestRecord {
    ManifestRecord::LogCreated { log, name: format!("log {log}"), key_groups: KeyGroupRange::ALL }
}

fn truncated(to: u64) -> ManifestRecord {
    ManifestRecord::LogTruncated { log: LOG, to: SequenceNumber(to) }
}

fn piece(object: &str, offset: u64, bytes: u64) -> Piece {
    Piece { bucket: "memory://".into(), object: object.to_owned(), offset, bytes }
}

fn completed(object: &str, ranges: &[(u64, u64)]) -> CompletedObject {
    let range = |&(first, end)| LogRange { log: LOG, first: SequenceNumber(first), end: SequenceNumber(end) };
    CompletedObject {
        object: object.to_owned(),
        token: 7,
        pieces: vec![piece(object, 0, 40), piece(&format!("{object}.00001.1"), 0, 60)],
        footer: 90..100,
        blocks_end: 3,
        ranges: ranges.iter().map(range).collect(),
        others: Vec::new(),
    }
}

fn state(records: impl IntoIterator<Item = ManifestRecord>) -> ManifestState {
    let mut state = ManifestState::default();
    for record in records {
        state.apply(record).unwrap();
    }
    state
}

#[track_caller]
fn assert_refused(state: &mut ManifestState, record: ManifestRecord, expected: &str) {
    let before = state.clone();
    match state.apply(record) {
        Err(ManifestError::Inconsistent { reason, .. }) => assert_eq!(reason, expected),
        Err(ManifestError::Invalid(what)) => assert_eq!(what, expected),
        other => panic!("expected {expected}, got {other:?}"),
    }
    assert_eq!(*state, before);
}

#[test]
fn segments_and_epochs() {
    let acquired = |segment, epoch| ManifestRecord::SegmentAcquired { segment, epoch };
    let mut state = state([
        ManifestRecord::Opened { session: 9, next_epoch: 5, next_number: 100 },
        acquired(1, 5),
        acquired(2, 6),
    ]);
    assert_refused(&mut state, acquired(1, 7), "the segment is in use");
    assert_refused(&mut state, acquired(3, 6), "epochs only grow");
    let released = |segment, epoch| ManifestRecord::SegmentReleased { segment, epoch };
    assert_refused(&mut state, released(1, 6), "the segment is not in use with that epoch");
    state.apply(released(1, 5)).unwrap();
    state.apply(acquired(1, 7)).unwrap();
    assert_eq!(state.segments(), &BTreeMap::from([(1, 7), (2, 6)]));
    let opened = |next_epoch, next_number| ManifestRecord::Opened { session: 10, next_epoch, next_number };
    assert_refused(&mut state, opened(7, 100), "epochs only grow");
    assert_refused(&mut state, opened(8, 99), "block numbers only grow");
    state.apply(opened(8, 100)).unwrap();
    assert_eq!((state.session(), state.next_epoch(), state.next_number()), (10, 8, 100));
}

#[test]
fn cuts_limit_the_blocks_of_earlier_epochs_until_those_are_gone() {
    let acquired = |segment, epoch| ManifestRecord::SegmentAcquired { segment, epoch };
    let cut = |epoch_below, number| ManifestRecord::Cut { epoch_below, number };
    let mut state = state([acquired(1, 1), cut(2, 40), acquired(2, 2), cut(3, 50), acquired(3, 3)]);
    assert_eq!([1, 2, 3].map(|epoch| state.number_limit(epoch)), [Some(40), Some(50), None]);
    assert_refused(&mut state, cut(2, 60), "cuts only go up");
    assert_refused(&mut state, cut(4, 49), "cuts only go up");
    state.apply(cut(3, 55)).unwrap();
    assert_eq!(state.number_limit(2), Some(50), "the stricter cut stays");
    state.apply(ManifestRecord::SegmentReleased { segment: 1, epoch: 1 }).unwrap();
    assert_eq!(state.cuts(), [Cut { epoch_below: 3, number: 50 }]);
    state.apply(ManifestRecord::SegmentReleased { segment: 2, epoch: 2 }).unwrap();
    assert_eq!(state.cuts(), []);
    assert_eq!(state.next_number(), 55);
}

#[test]
fn settled_blocks_stay_so() {
    let settled = |number| ManifestRecord::BlocksSettled { number };
    let mut state = state([created(LOG), settled(3)]);
    assert_refused(&mut state, settled(2), "settled blocks stay so");
    let records: Vec<_> = state.snapshot().iter().map(ManifestRecord::encode).collect();
    assert_eq!(ManifestState::replay(records.iter().map(Vec::as_slice)).unwrap().settled(), 3);
}

#[test]
fn an_object_goes_when_no_log_needs_it() {
    let mut state = state([created(LOG)]);
    let complete = |object, ranges: &[_]| ManifestRecord::ObjectCompleted(completed(object, ranges));
    state.apply(complete("a", &[(0, 10), (20, 30)])).unwrap();
    state.apply(complete("b", &[(10, 20)])).unwrap();
    let held: Vec<_> =
        state.logs()[&LOG].extents.iter().map(|extent| (extent.first.0, &*extent.object)).collect();
    assert_eq!(held, [(0, "a"), (10, "b"), (20, "a")]);

    let delete = |object: &str| ManifestRecord::ObjectDeleted { object: object.to_owned() };
    assert_refused(&mut state, delete("a"), "a log still needs the object");
    assert_refused(&mut state, delete("c"), "there is no such object");
    let shared = |object, others: &[u64]| {
        ManifestRecord::ObjectCompleted(CompletedObject { others: others.to_vec(), ..completed(object, &[]) })
    };
    assert_refused(&mut state, shared("a", &[1]), "the object was completed otherwise");
    assert_refused(&mut state, shared("c", &[2, 1]), "directory");
    assert_refused(&mut state, shared("c", &[1, 1]), "directory");
    let many: Vec<u64> = (0..=OTHERS_MAX as u64).collect();
    assert_refused(&mut state, shared("c", &many), "number of directories");
    state.apply(truncated(20)).unwrap();
    assert_eq!(state.unreferenced_objects().map(|object| &*object.object).collect::<Vec<_>>(), ["b"]);
    assert_refused(&mut state, delete("a"), "a log still needs the object");
    state.apply(delete("b")).unwrap();
    assert_refused(&mut state, delete("b"), "there is no such object");
    assert_refused(&mut state, truncated(19), "more was truncated before");
    let forget = ManifestRecord::LogForgotten { log: LOG };
    assert_refused(&mut state, forget.clone(), "objects still hold changes of the log");
    state.apply(truncated(30)).unwrap();
    state.apply(delete("a")).unwrap();
    state.apply(forget.clone()).unwrap();
    assert_refused(&mut state, forget, "there is no such log");
}

#[test]
fn an_object_that_completes_after_a_truncation_holds_only_the_rest() {
    let mut state = state([created(LOG), truncated(15)]);
    state.apply(ManifestRecord::ObjectCompleted(completed("a", &[(0, 10), (10, 20)]))).unwrap();
    assert_eq!(state.objects()["a"].ranges.len(), 1);
    assert_eq!(state.logs()[&LOG].extents.len(), 1);
    assert_eq!(state.logs()[&LOG].extents[0].first, SequenceNumber(10));
}

#[test]
fn completions_that_contradict_are_refused() {
    let mut state = state([created(LOG)]);
    let complete = |object, ranges: &[_]| ManifestRecord::ObjectCompleted(completed(object, ranges));
    let opened = |object: &str, token| ManifestRecord::UploadOpened {
        buckets: vec!["file:///a".into(), "memory://".into()],
        object: object.to_owned(),
        token,
        others: Vec::new(),
    };
    state.apply(opened("a", 7)).unwrap();
    state.apply(opened("z", 8)).unwrap();
    assert_refused(&mut state, opened("a", 7), "the upload is open");
    assert_refused(&mut state, complete("z", &[(0, 10)]), "the upload was opened otherwise");
    assert_refused(&mut state, complete("a", &[(5, 5)]), "range");
    assert_refused(&mut state, complete("a", &[(5, 9), (8, 10)]), "its ranges overlap");
    state.apply(complete("a", &[(10, 20)])).unwrap();
    assert_refused(&mut state, opened("a", 7), "the upload is open");
    let settled = |object: &str| ManifestRecord::UploadSettled { object: object.to_owned() };
    state.apply(settled("a")).unwrap();
    assert_eq!(state.uploads().keys().collect::<Vec<_>>(), ["z"]);
    assert_refused(&mut state, opened("a", 7), "the object is complete");
    assert_refused(&mut state, settled("a"), "the upload is not open");
    let elsewhere = Piece { bucket: "s3://other".into(), ..piece("z", 0, 100) };
    let elsewhere = CompletedObject { token: 8, pieces: vec![elsewhere], ..completed("z", &[]) };
    assert_refused(&mut state, ManifestRecord::ObjectCompleted(elsewhere), "the upload was opened otherwise");
    for overlap in [(9, 11), (10, 20), (12, 13), (19, 30), (0, 99)] {
        assert_refused(&mut state, complete("b", &[overlap]), "another object holds these changes");
    }
    state.apply(complete("b", &[(0, 10), (20, 30)])).unwrap();
    // The same object may say more of itself, but nothing else.
    state.apply(complete("a", &[(30, 40)])).unwrap();
    assert_eq!(state.objects()["a"].ranges.len(), 2);
    let other = CompletedObject { pieces: vec![piece("a", 0, 100)], ..completed("a", &[(40, 50)]) };
    assert_refused(&mut state, ManifestRecord::ObjectCompleted(other), "the object was completed otherwise");
    let outside = CompletedObject { footer: 90..101, ..completed("c", &[]) };
    assert_refused(&mut state, ManifestRecord::ObjectCompleted(outside), "footer");
    for pieces in [vec![], vec![piece("d", 0, 100)], vec![piece("c.and-a-long-suffix", 0, 100)]] {
        let misnamed = CompletedObject { pieces, ..completed("c", &[]) };
        assert!(state.clone().apply(ManifestRecord::ObjectCompleted(misnamed)).is_err());
    }
}

fn held(holder: &str, object: &str, logs: &[LogId]) -> ManifestRecord {
    ManifestRecord::ObjectHeld { holder: holder.to_owned(), object: object.to_owned(), logs: logs.to_vec() }
}

fn released(holder: &str) -> ManifestRecord {
    ManifestRecord::HolderReleased { holder: holder.to_owned() }
}

fn deleted(object: &str) -> ManifestRecord {
    ManifestRecord::ObjectDeleted { object: object.to_owned() }
}

fn handed_over(object: &str) -> ManifestRecord {
    ManifestRecord::ObjectHandedOver { object: object.to_owned() }
}

#[track_caller]
fn assert_survives_compaction(state: &ManifestState) {
    let snapshot: Vec<_> = state.snapshot().iter().map(ManifestRecord::encode).collect();
    assert_eq!(ManifestState::replay(snapshot.iter().map(Vec::as_slice)).as_ref(), Ok(state));
}

#[test]
fn an_object_stays_while_a_holder_needs_it() {
    let complete = ManifestRecord::ObjectCompleted(completed("a", &[(0, 10)]));
    let mut state = state([created(LOG), complete]);
    assert_refused(&mut state, held("first", "b", &[]), "there is no such object");
    assert_refused(&mut state, held("", "a", &[]), "holder");
    assert_refused(&mut state, held(&"x".repeat(HOLDER_BYTES_MAX + 1), "a", &[]), "holder");
    assert_refused(&mut state, held("first", "a", &vec![LOG; LOGS_PER_RECORD_MAX + 1]), "number of logs");
    assert_refused(&mut state, released("first"), "there is no such holder");
    for holder in ["first", "second", "first"] {
        state.apply(held(holder, "a", &[])).unwrap();
    }
    assert_eq!((state.holders().len(), state.holds()), (2, 2));
    state.apply(held("second", "a", &[LOG, LOG, LogId(2)])).unwrap();
    assert_eq!(state.holds(), 3, "two logs count as two");
    let mut full = ManifestState { holds: HOLDS_MAX, ..state.clone() };
    assert_refused(&mut full, held("third", "a", &[]), "there are too many holds");
    assert_refused(&mut full, held("second", "a", &[LogId(3)]), "there are too many holds");
    full.apply(held("second", "a", &[LOG])).unwrap();
    state.apply(truncated(10)).unwrap();
    assert_survives_compaction(&state);
    for holder in ["first", "second"] {
        assert_eq!(state.unreferenced_objects().count(), 0);
        assert_refused(&mut state, deleted("a"), "a holder still needs the object");
        state.apply(released(holder)).unwrap();
    }
    assert_eq!(state.holds(), 0);
    assert_eq!(state.unreferenced_objects().count(), 1);
    state.apply(deleted("a")).unwrap();
}

#[test]
fn what_was_handed_over_is_referred_to_only_while_a_holder_has_it_for_the_log() {
    const OTHER: LogId = LogId(2);
    let mut both = completed("a", &[(0, 10)]);
    both.ranges.push(LogRange { log: OTHER, first: SequenceNumber(0), end: SequenceNumber(5) });
    let upload = ManifestRecord::UploadOpened {
        buckets: vec!["memory://".into()],
        object: "a".to_owned(),
        token: 7,
        others: vec![3],
    };
    let complete = ManifestRecord::ObjectCompleted(both);
    let mut state = state([created(LOG), created(OTHER), upload, complete]);
    assert_refused(&mut state, handed_over("b"), "there is no such object");
    let refers = |state: &ManifestState| [LOG, OTHER].map(|log| state.may_refer(log, "a"));
    state.apply(held("both", "a", &[LOG, OTHER])).unwrap();
    state.apply(held("one", "a", &[LOG])).unwrap();
    assert_eq!((state.is_handed_over("a"), refers(&state)), (false, [true, true]));
    state.apply(handed_over("a")).unwrap();
    assert_refused(&mut state, handed_over("a"), "the object was handed over");
    assert_eq!((state.is_handed_over("a"), refers(&state)), (true, [true, true]));
    assert_survives_compaction(&state);
    state.apply(released("both")).unwrap();
    assert_eq!(refers(&state), [true, false]);
    // What it held of a log counts as being in an object all the same: it is not sent again.
    assert_eq!(state.logs()[&OTHER].covered(), SequenceNumber(5));
    state.apply(released("one")).unwrap();
    assert_eq!(refers(&state), [false, false]);
    assert_survives_compaction(&state);
    assert_refused(&mut state, deleted("a"), "a log still needs the object");
    state.apply(truncated(10)).unwrap();
    state.apply(ManifestRecord::LogTruncated { log: OTHER, to: SequenceNumber(5) }).unwrap();
    assert_eq!((state.unreferenced_objects().count(), state.spent_objects().count()), (0, 0));
    assert_refused(&mut state, deleted("a"), "what its upload left is still swept");
    state.apply(ManifestRecord::UploadSettled { object: "a".to_owned() }).unwrap();
    assert_eq!(
        (state.unreferenced_objects().count(), state.spent_objects().collect::<Vec<_>>()),
        (0, vec!["a"])
    );
    state.apply(deleted("a")).unwrap();
    assert!(state.objects().is_empty() && !state.is_handed_over("a"));
}

#[test]
fn what_could_not_be_decoded_is_refused() {
    let mut state = ManifestState::default();
    let name = "x".repeat(LOG_NAME_BYTES_MAX + 1);
    let long = ManifestRecord::LogCreated { log: LOG, name, key_groups: KeyGroupRange::ALL };
    assert!(ManifestRecord::decode(&long.encode()).is_err());
    assert_refused(&mut state, long, "name");
    let object = "x".repeat(OBJECT_NAME_BYTES_MAX + 1);
    let long = ManifestRecord::ObjectCompleted(completed(&object, &[]));
    assert!(ManifestRecord::decode(&long.encode()).is_err());
    assert_refused(&mut state, long, "object name");
}

/// Records over few names, so that many of them fit what came before.
fn any_record() -> impl Strategy<Value = ManifestRecord> {
    let log = || (1u128..4).prop_map(LogId);
    let to = || (0u64..60).prop_map(SequenceNumber);
    let object = || (0u8..5).prop_map(|name| format!("o{name}"));
    let others = || prop_oneof![3 => 0u64..1, 1 => 0u64..3].prop_map(|count| (0..count).collect());
    let range = (1u128..4, 0u64..50, 1u64..12).prop_map(|(log, first, len)| LogRange {
        log: LogId(log),
        first: SequenceNumber(first),
        end: SequenceNumber(first + len),
    });
    prop_oneof![
        (0u64..3, 0u64..20, 0u64..20).prop_map(|(session, next_epoch, next_number)| {
            ManifestRecord::Opened { session, next_epoch, next_number }
        }),
        (0u32..4, 0u64..30).prop_map(|(segment, epoch)| ManifestRecord::SegmentAcquired { segment, epoch }),
        (0u32..4, 0u64..30).prop_map(|(segment, epoch)| ManifestRecord::SegmentReleased { segment, epoch }),
        (0u32..4, 0u64..12, 0u64..50, 0u64..5).prop_map(|(segment, epoch, start, count)| {
            ManifestRecord::SegmentSealed { segment, epoch, blocks: start..start + count }
        }),
        (0u64..30, 0u64..30).prop_map(|(epoch_below, number)| ManifestRecord::Cut { epoch_below, number }),
        log().prop_map(created),
        (log(), to()).prop_map(|(log, to)| ManifestRecord::LogTruncated { log, to }),
        (log(), to()).prop_map(|(log, to)| ManifestRecord::LogConfirmed { log, to }),
        log().prop_map(|log| ManifestRecord::LogClosed { log }),
        log().prop_map(|log| ManifestRecord::LogForgotten { log }),
        (object(), others()).prop_map(|(object, others)| ManifestRecord::UploadOpened {
            buckets: vec!["memory://".into()],
            object,
            token: 7,
            others,
        }),
        (object(), proptest::collection::vec(range, 0..3), others()).prop_map(|(object, ranges, others)| {
            ManifestRecord::ObjectCompleted(CompletedObject { ranges, others, ..completed(&object, &[]) })
        }),
        object().prop_map(|object| ManifestRecord::UploadSettled { object }),
        object().prop_map(|object| ManifestRecord::ObjectDeleted { object }),
        (0u8..3, object(), proptest::collection::vec(log(), 0..3)).prop_map(|(holder, object, logs)| {
            ManifestRecord::ObjectHeld { holder: format!("h{holder}"), object, logs }
        }),
        object().prop_map(|object| ManifestRecord::ObjectHandedOver { object }),
        (0u8..3).prop_map(|holder| ManifestRecord::HolderReleased { holder: format!("h{holder}") }),
    ]
}

fn check_invariants(state: &ManifestState) {
    assert!(state.segments.values().all(|&epoch| epoch < state.next_epoch));
    assert!(
        state
            .cuts
            .windows(2)
            .all(|pair| { pair[0].epoch_below < pair[1].epoch_below && pair[0].number <= pair[1].number })
    );
    let mut held = Vec::new();
    for (&log, log_state) in &state.logs {
        assert!(log_state.extents.windows(2).all(|pair| pair[0].end <= pair[1].first));
        for extent in &log_state.extents {
            assert!(extent.end > log_state.truncated);
            held.push((LogRange { log, first: extent.first, end: extent.end }, extent.object.clone()));
        }
    }
    let mut listed: Vec<_> = state
        .objects
        .values()
        .flat_map(|object| object.ranges.iter().map(|&range| (range, object.object.clone())))
        .collect();
    held.sort();
    listed.sort();
    assert_eq!(held, listed);
    let mut held_by: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for (holder, held) in &state.holders {
        assert!(!held.is_empty());
        for object in held.keys() {
            assert!(state.objects.contains_key(object));
            held_by.entry(object.clone()).or_default().insert(holder.clone());
        }
    }
    assert_eq!(held_by, state.held_by);
    let counts = state.holders.values().flat_map(BTreeMap::values).map(|logs| logs.len().max(1));
    assert_eq!(counts.sum::<usize>(), state.holds);
    assert!(state.handed_over.iter().all(|object| state.objects.contains_key(object)));
    for (object, upload) in &state.uploads {
        let pieces = state.objects.get(object).into_iter().flat_map(|object| &object.pieces);
        assert!(pieces.into_iter().all(|piece| upload.buckets.contains(&piece.bucket)));
    }
}

proptest! {
    #[test]
    fn any_history_keeps_the_invariants_and_survives_compaction(
        records in proptest::collection::vec(any_record(), 0..150),
    ) {
        let mut state = ManifestState::default();
        let mut taken = Vec::new();
        for record in records {
            let before = state.clone();
            let bytes = record.encode();
            match state.apply(record) {
                Ok(()) => taken.push(bytes),
                Err(_) => prop_assert_eq!(&state, &before),
            }
            check_invariants(&state);
        }
        let replayed = ManifestState::replay(taken.iter().map(Vec::as_slice));
        prop_assert_eq!(replayed.as_ref(), Ok(&state));
        let snapshot: Vec<_> = state.snapshot().iter().map(ManifestRecord::encode).collect();
        prop_assert_eq!(ManifestState::replay(snapshot.iter().map(Vec::as_slice)), Ok(state));
    }
}
