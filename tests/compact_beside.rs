//! Compaction beside a changelog that goes on: what the writer names afterwards, what is deleted when, and that a compacted
//! handle takes the place of a snapshot.

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::{Duration, SystemTime};

use common::{eventually, objects, open};
use tidelog::{
    ChangeKey, ChangelogHandle, ChangelogWriter, Compactor, KeyGroup, KeyGroupRange, PersistError,
    RegisterError, Restore, SequenceNumber, Sweeper,
};

const ALL: KeyGroupRange = KeyGroupRange::new(0, 15).unwrap();
const ZERO: SequenceNumber = SequenceNumber::ZERO;

fn bucket(home: &Path) -> String {
    format!("file://{}", home.join("bucket").display())
}

fn compactor(home: &Path) -> Compactor {
    Compactor::open(&bucket(home)).unwrap().group("compacted")
}

/// The files that handles name, without their folders.
fn files<'a>(handles: impl IntoIterator<Item = &'a ChangelogHandle>) -> BTreeSet<String> {
    let objects = handles.into_iter().flat_map(ChangelogHandle::objects);
    objects.map(|(_, name)| name.rsplit('/').next().unwrap().to_owned()).collect()
}

fn in_bucket(home: &Path) -> BTreeSet<String> {
    objects(home).into_iter().collect()
}

/// Some changes; the key is the first byte.
fn append(writer: &mut ChangelogWriter, model: &mut BTreeMap<u8, Vec<u8>>, round: u8) {
    for key in (0..100).filter(|key| (key + round).is_multiple_of(3)) {
        let value = vec![key, round, key ^ round];
        writer.append(KeyGroup(u16::from(key) % 16), &value).unwrap();
        model.insert(key, value);
    }
}

/// The last value of each key that a restore gives, and how many changes there are.
fn state(handles: &[ChangelogHandle]) -> (BTreeMap<u8, Vec<u8>>, usize) {
    let changes = Restore::open(handles).unwrap().reader(ALL).unwrap().map(Result::unwrap);
    let mut count = 0;
    let state = changes.inspect(|_| count += 1).map(|change| (change.value[0], change.value.to_vec()));
    (state.collect(), count)
}

/// What nobody needs, the objects of this group that no handle names and no directory knows.
fn strays(home: &Path, group: &str, live: &[ChangelogHandle]) -> BTreeSet<String> {
    let sweeper = Sweeper::open(&bucket(home)).unwrap().group(group).min_age(Duration::ZERO);
    let sweeper = sweeper.live_handles(live).directory(home.join("local")).unwrap();
    let strays = sweeper.plan(SystemTime::now() + Duration::from_secs(3 * 24 * 3600)).unwrap().strays;
    strays
        .iter()
        .map(|stray| {
            sweeper.remove(stray).unwrap();
            stray.name.rsplit('/').next().unwrap().to_owned()
        })
        .collect()
}

#[test]
fn old_objects_live_until_log_and_holders_let_go_and_new_ones_until_a_sweep() {
    let home = tempfile::tempdir().unwrap();
    let changelog = open(home.path());
    let mut writer = changelog.create_writer("state", ALL).unwrap();
    let mut model = BTreeMap::new();
    let mut old = None;
    for round in 0..10 {
        append(&mut writer, &mut model, round);
        old = Some(writer.persist_durably(ZERO).wait().unwrap());
    }
    let old = old.unwrap();
    changelog.register("chk-10", std::slice::from_ref(&old)).unwrap();
    let new = compactor(home.path()).compact(std::slice::from_ref(&old), None).unwrap().handles;
    assert_eq!((files([&old]).len(), files(&new).len()), (10, 1));

    // No changelog knows the new object: the engine's own handles keep it.
    for refused in [changelog.register("savepoint", &new), changelog.hand_over("savepoint", &new)] {
        assert!(matches!(refused, Err(RegisterError::NotOwned { .. })), "{refused:?}");
    }
    // The log goes on from its own objects.
    append(&mut writer, &mut model, 10);
    let next = writer.persist_durably(ZERO).wait().unwrap();
    assert!(files([&next]).is_superset(&files([&old])) && files([&next]).is_disjoint(&files(&new)));

    // What the log does not need any more its holder still does.
    writer.truncate(next.to()).unwrap();
    eventually("only the last one was the log's alone", || {
        in_bucket(home.path()) == &files([&old]) | &files(&new)
    });
    assert_eq!(state(std::slice::from_ref(&old)), state(&new));
    changelog.release("chk-10").unwrap();
    eventually("nobody needs the old ones", || in_bucket(home.path()) == files(&new));
    assert_eq!(state(&new).1, 334);

    // The sweep spares what a live handle names, and takes it when none does.
    assert!(strays(home.path(), "compacted", &new).is_empty());
    assert!(strays(home.path(), "tidelog", &new).is_empty());
    assert_eq!(strays(home.path(), "compacted", &[]), files(&new));
    assert!(in_bucket(home.path()).is_empty());
}

/// A log that is never truncated for a snapshot, but for a compaction: it stays as short as its last values.
#[test]
fn a_compacted_handle_takes_the_place_of_a_snapshot() {
    let home = tempfile::tempdir().unwrap();
    let changelog = open(home.path());
    let mut writer = changelog.create_writer("state", ALL).unwrap();
    let mut model = BTreeMap::new();
    // What is compacted, and what follows it.
    let mut base: Vec<ChangelogHandle> = Vec::new();
    let mut from = ZERO;
    for round in 0..8u8 {
        let mut tail = None;
        for step in 0..3 {
            append(&mut writer, &mut model, round * 3 + step);
            tail = Some(writer.persist_durably(from).wait().unwrap());
        }
        let tail = tail.unwrap();
        let holder = format!("chk-{round}");
        changelog.register(&holder, std::slice::from_ref(&tail)).unwrap();
        let checkpoint = [&base[..], std::slice::from_ref(&tail)].concat();
        assert_eq!(state(&checkpoint).0, model);

        let mut compactor = compactor(home.path()).last_value_by(|_| ChangeKey::Upsert(0..1));
        let new = compactor.compact(&checkpoint, None).unwrap().handles;
        assert_eq!((new.len(), new[0].from(), new[0].to()), (1, ZERO, tail.to()));
        // The new handle is stored; then the log lets go of what it holds.
        let replaced = std::mem::replace(&mut base, new);
        from = tail.to();
        writer.truncate(from).unwrap();
        changelog.release(&holder).unwrap();
        eventually("the objects of the log are gone", || {
            in_bucket(home.path()) == &files(&replaced) | &files(&base)
        });
        assert_eq!(strays(home.path(), "compacted", &base), files(&replaced));
        assert_eq!(in_bucket(home.path()), files(&base));
        assert_eq!(state(&base), (model.clone(), model.len()));
    }
    // What is before it is not the log's any more.
    let refused = writer.persist_durably(ZERO).wait();
    assert!(matches!(refused, Err(PersistError::OutOfRange { .. })), "{refused:?}");

    // After a restart the log goes on behind what was compacted, too.
    append(&mut writer, &mut model, 100);
    writer.sync().wait().unwrap();
    drop(writer);
    changelog.close(Duration::from_secs(30)).unwrap();
    let changelog = open(home.path());
    let recovered = changelog.recovered();
    assert_eq!((recovered.len(), recovered[0].start()), (1, from));
    base.push(recovered[0].persist_durably(from).wait().unwrap());
    assert_eq!(state(&base).0, model);
}
