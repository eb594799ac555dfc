//! Restores while some of the buckets are dead, deny, or never answer.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use tidelog::{Changelog, ChangelogHandle, KeyGroupRange, ReadError, Restore};
use tidelog_io::sim::SimWorld;
use tidelog_upload::{Store, StoreErrorKind, UploadOptions};

use crate::machine::{Machine, SECOND, ZERO, writer};

const CHANGES: usize = 400;

/// A handle of one object whose pieces are in several buckets, but not in all: its home held back what it was sent last.
fn in_several_buckets(machine: &Machine, changelog: &Changelog) -> ChangelogHandle {
    let mut writer = writer(changelog, "log");
    let mut append = |changes: std::ops::Range<usize>| {
        for change in changes {
            machine.append(changelog, &mut writer, change as u64 % 32, &change.to_le_bytes().repeat(50));
        }
    };
    append(0..CHANGES / 2);
    machine.pass(changelog, SECOND / 10);
    let is_home = |index: &usize| !machine.stores[*index].inner.open_uploads().is_empty();
    let home = (0..machine.stores.len()).find(is_home).expect("parts go out ahead");
    machine.stores[home].hold();
    append(CHANGES / 2..CHANGES);
    machine.pass(changelog, SECOND / 10);
    machine.stores[home].hold_no_more();
    let persist = writer.persist_durably(ZERO);
    let handle = machine.within(changelog, 60 * SECOND, persist).expect("in time").unwrap();
    machine.stores[home].release();
    let mut buckets: Vec<&str> = handle.objects().map(|(bucket, _)| bucket).collect();
    buckets.sort_unstable();
    buckets.dedup();
    assert!(handle.extents().len() == 1 && (2..machine.stores.len()).contains(&buckets.len()), "{handle:?}");
    handle
}

fn options(machine: &Machine) -> tidelog::Options {
    let mut uploads = UploadOptions::default();
    uploads.put_bytes_max = 16 << 10;
    uploads.part_bytes = 16 << 10;
    machine.options().uploads(uploads)
}

fn read(machine: &Machine, handles: &[ChangelogHandle]) -> Result<usize, ReadError> {
    let stores = machine.stores.iter().map(|store| Arc::clone(store) as Arc<dyn Store>).collect();
    let mut changes = 0;
    for change in Restore::open_simulated(handles, stores)?.reader_of_all() {
        change?;
        changes += 1;
    }
    Ok(changes)
}

/// That the error says of which file in which bucket it is, whether it passes, and what to do.
fn check(error: &ReadError, handle: &ChangelogHandle, bucket: &str, retryable: bool) {
    let ReadError::Store(refused) = error else { panic!("{error:?}") };
    let of_handle = handle.objects().any(|(of, object)| (of, object) == (bucket, refused.object()));
    assert!(refused.bucket() == bucket && of_handle, "{error}");
    assert_eq!(error.is_retryable(), retryable, "{error}");
    let text = error.to_string();
    let remedy = if retryable { "read again once the bucket answers" } else { "check the credentials" };
    for part in [bucket, refused.object(), remedy] {
        assert!(text.contains(part), "{text}");
    }
}

#[test]
fn a_restore_needs_the_buckets_that_its_handles_name_and_says_which_one_fails() {
    let machine = Machine::new(4);
    let changelog = machine.open(options(&machine));
    let handle = in_several_buckets(&machine, &changelog);
    let names = |url: &str| handle.objects().any(|(bucket, _)| bucket == url);
    for store in &machine.stores {
        store.inner.set_dead(true);
        match read(&machine, std::slice::from_ref(&handle)) {
            Ok(changes) => assert!(changes == CHANGES && !names(store.url())),
            Err(error) => check(&error, &handle, store.url(), true),
        }
        store.inner.set_dead(false);
        store.deny.store(true, Ordering::Relaxed);
        match read(&machine, std::slice::from_ref(&handle)) {
            Ok(changes) => assert!(changes == CHANGES && !names(store.url())),
            Err(error) => check(&error, &handle, store.url(), false),
        }
        store.deny.store(false, Ordering::Relaxed);
        assert_eq!(read(&machine, std::slice::from_ref(&handle)).unwrap(), CHANGES, "it is back");
    }
    // What is local is read although no bucket can be.
    machine.stores.iter().for_each(|store| store.inner.set_dead(true));
    let mut small = writer(&changelog, "small");
    small.append(tidelog::KeyGroup(1), b"one").unwrap();
    machine.stores.iter().for_each(|store| store.inner.set_dead(false));
    let local = machine.within(&changelog, SECOND, small.persist_durably(ZERO)).expect("in time").unwrap();
    machine.stores.iter().for_each(|store| store.inner.set_dead(true));
    let restore = changelog.restore(&[local]).unwrap();
    assert_eq!(restore.reader_of_all().map(Result::unwrap).count(), 1);
}

#[test]
fn a_restore_from_a_bucket_that_never_answers_ends() {
    let mut machine = Machine::new(4);
    let changelog = machine.open(options(&machine));
    let handle = in_several_buckets(&machine, &changelog);
    drop(changelog);
    // On another machine, with nothing local.
    machine.worlds = vec![SimWorld::new(8)];
    let changelog = machine.open(options(&machine));
    let names = |url: &str| handle.objects().any(|(bucket, _)| bucket == url);
    for store in machine.stores.iter().filter(|store| names(store.url())) {
        store.hold();
        let restore = changelog.restore(std::slice::from_ref(&handle)).unwrap();
        let mut reader =
            restore.reader(KeyGroupRange::ALL.intersection(handle.key_groups()).unwrap()).unwrap();
        let mut read = pin!(async {
            while reader.next_batch().await?.is_some() {}
            Ok::<(), ReadError>(())
        });
        let mut context = Context::from_waker(Waker::noop());
        let ended = (0..1000).find_map(|_| {
            machine.pass(&changelog, SECOND);
            match read.as_mut().poll(&mut context) {
                Poll::Ready(outcome) => Some(outcome),
                Poll::Pending => None,
            }
        });
        let error = ended.expect("it ends by itself").expect_err("what it needs does not come");
        check(&error, &handle, store.url(), true);
        let ReadError::Store(late) = &error else { unreachable!() };
        assert!(matches!(late.kind(), StoreErrorKind::TimedOut(_)), "{error}");
        store.release();
        machine.pass(&changelog, Duration::from_millis(100));
        let reader = changelog.restore(std::slice::from_ref(&handle)).unwrap().reader_of_all();
        assert_eq!(reader.map(Result::unwrap).count(), CHANGES);
    }
}
