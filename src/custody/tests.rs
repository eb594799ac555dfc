//! That what nobody needs goes, also where its upload is slow to end.

use std::time::Instant;

use tidelog_io::directory::Manifest;
use tidelog_io::ring::Bell;
use tidelog_io::sim::SimWorld;

use super::*;
use crate::checkpoint::Request;
use crate::device::Budget;
use crate::manifest::ManifestState;
use crate::piece::Piece;
use crate::types::KeyGroupRange;

const LOG: LogId = LogId(1);
const OBJECT: &str = "tidelog/00000001-0000000000000007";
const NOBODY: fn(LogId) -> Option<SequenceNumber> = |_| None;

/// Of one directory, with a log, and an object on its way.
fn custody() -> Custody {
    custody_beside(&[])
}

/// As well, of a directory that was open beside others when the object was opened.
fn custody_beside(others: &[u64]) -> Custody {
    let holding = holding(5, &SimWorld::new(1));
    let log = ManifestRecord::LogCreated { log: LOG, name: "log".to_owned(), key_groups: KeyGroupRange::ALL };
    let (buckets, object) = (vec!["memory://".into()], OBJECT.to_owned());
    let opened = ManifestRecord::UploadOpened { buckets, object, token: 7, others: others.to_vec() };
    holding.ledger.record(vec![log, opened]).unwrap();
    Custody::new(vec![holding], None)
}

/// An empty directory.
fn holding(id: u64, world: &SimWorld) -> Holding {
    let manifest = Manifest::create(world.files(), id).unwrap();
    let ledger = Arc::new(Ledger::new(ManifestState::default(), manifest));
    let device = Device::new(0, Bell::new(Arc::new(|| {})), 64 << 10, 1, Budget::new(0)).unwrap();
    Holding {
        directory: PathBuf::from("/simulated"),
        id,
        device: Arc::new(device),
        ledger,
        retention: Retention::new(0),
        readers: Arc::default(),
        unreleased: Vec::new(),
        index: Arc::default(),
        keep: Keep::NONE,
    }
}

/// The object with the first ten changes of the log is complete.
fn complete(custody: &mut Custody) {
    assert!(complete_beside(custody, &[]));
}

/// As well, with changes of other directories. Whether it was recorded.
fn complete_beside(custody: &mut Custody, others: &[u64]) -> bool {
    let piece = Piece { bucket: "memory://".into(), object: OBJECT.to_owned(), offset: 0, bytes: 100 };
    let object = CompletedObject {
        object: OBJECT.to_owned(),
        token: 7,
        pieces: vec![piece],
        footer: 90..100,
        blocks_end: 1,
        ranges: Vec::new(),
        others: others.to_vec(),
    };
    let range = LogRange { log: LOG, first: SequenceNumber(0), end: SequenceNumber(10) };
    custody.complete(0, &object, &[range], false).unwrap()
}

fn offered(custody: &mut Custody) -> Vec<String> {
    custody.tidy(NOBODY).into_iter().map(|object| object.object).collect()
}

/// A race that was lost may hang in a bucket that is dead, and what it left is swept for long.
#[test]
fn what_was_truncated_before_it_was_complete_goes_before_its_upload_is_settled() {
    let mut custody = custody();
    custody.truncate(0, LOG, SequenceNumber(10));
    assert_eq!(offered(&mut custody), [""; 0]);
    complete(&mut custody);
    assert_eq!(offered(&mut custody), [OBJECT]);
    custody.deleted(OBJECT);
    custody.settled(OBJECT);
    assert_eq!(offered(&mut custody), [""; 0], "once");
    assert!(
        custody.holdings[0].ledger.read(|state| state.objects().is_empty() && state.uploads().is_empty())
    );
}

/// While an upload is not settled, the pieces of its object must be known: all else of its name is swept.
#[test]
fn what_was_handed_over_and_let_go_of_is_forgotten_once_its_upload_is_settled() {
    let mut custody = custody();
    complete(&mut custody);
    let (from, to) = (SequenceNumber(0), SequenceNumber(10));
    let request = Request { log: LOG, device: 0, from, to, asked_at: Instant::now(), end: None };
    let handle = custody.holdings[0].ledger.handle(&request).unwrap();
    custody.hand_over("chk", &[handle]).unwrap();
    custody.truncate(0, LOG, SequenceNumber(10));
    custody.release("chk").unwrap();
    let is_known =
        |custody: &Custody| custody.holdings[0].ledger.read(|state| state.objects().contains_key(OBJECT));
    assert_eq!(offered(&mut custody), [""; 0], "it is the registry's");
    assert!(is_known(&custody));
    custody.settled(OBJECT);
    assert_eq!(offered(&mut custody), [""; 0]);
    assert!(!is_known(&custody));
}

fn uploads(custody: &Custody) -> usize {
    custody.holdings[0].ledger.read(|state| state.uploads().len())
}

/// The directory that is not open may know that its object is complete.
#[test]
fn an_upload_beside_a_directory_that_is_not_open_is_left_alone() {
    assert_eq!(uploads(&custody()), 1);
    assert_eq!(uploads(&custody_beside(&[5])), 1, "it is open");
    assert_eq!(uploads(&custody_beside(&[5, 6])), 0);
}

/// Else its own files would be swept with what the upload left.
#[test]
fn an_object_is_let_go_of_once_its_upload_is_settled() {
    let mut custody = custody();
    assert!(complete_beside(&mut custody, &[6]));
    custody.truncate(0, LOG, SequenceNumber(10));
    let is_known =
        |custody: &Custody| custody.holdings[0].ledger.read(|state| state.objects().contains_key(OBJECT));
    assert_eq!((offered(&mut custody), is_known(&custody)), (Vec::new(), true));
    custody.settled(OBJECT);
    assert_eq!((offered(&mut custody), is_known(&custody)), (Vec::new(), false));
}

/// The file of the one that goes out of service would not know it, and others, which do, may delete it.
#[test]
fn an_object_of_directories_in_service_is_not_recorded_by_one_that_went_out_of_it() {
    let mut custody = custody();
    custody.holdings[0].ledger.detach();
    assert!(!complete_beside(&mut custody, &[6]));
    let request = Request {
        log: LOG,
        device: 0,
        from: SequenceNumber(0),
        to: SequenceNumber(10),
        asked_at: Instant::now(),
        end: None,
    };
    let ledger = &custody.holdings[0].ledger;
    assert!(!ledger.covers(&request) && ledger.handle(&request).is_err(), "its changes are in no object");
}

#[test]
fn an_upload_is_kept_by_the_first_directory_that_can_record_it_and_by_no_other() {
    let worlds = [1, 2, 3].map(SimWorld::new);
    let holdings = [5, 6, 7].into_iter().zip(&worlds).map(|(id, world)| holding(id, world)).collect();
    let custody = Custody::new(holdings, None);
    let knowing = || {
        let knows = |holding: &&Holding| holding.ledger.read(|state| !state.uploads().is_empty());
        custody.holdings.iter().filter(knows).map(|holding| holding.id).collect::<Vec<u64>>()
    };
    let full = |full: &[bool]| {
        for (world, full) in worlds.iter().zip(full) {
            let _ = world.files().remove(tidelog_io::directory::RESERVE_NAME);
            world.set_capacity_bytes(full.then_some(0));
        }
    };
    let open = || custody.open_upload(2, OBJECT, 7, &["memory://".into()]);
    full(&[true, true, true]);
    open().unwrap_err();
    assert_eq!(knowing(), [0; 0]);
    full(&[true, false, true]);
    open().unwrap();
    assert_eq!(knowing(), [6]);
    custody.forget_upload(OBJECT);
    // Of those in service, and of the others apart from them.
    custody.holdings[1].ledger.detach();
    full(&[false, false, false]);
    open().unwrap();
    assert_eq!(knowing(), [5]);
}
