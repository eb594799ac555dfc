//! That nobody waits for a spiller that has ended, however that was.

use std::future::Future;
use std::pin::pin;
use std::sync::atomic::AtomicUsize;
use std::task::{Context, Poll, Wake, Waker};

use tidelog_io::disk::Durability;
use tidelog_io::sim::SimWorld;
use tidelog_upload::sim::SimStore;

use super::*;
use crate::error::AppendError;
use crate::types::KeyGroup;

fn changelog() -> Changelog {
    let options = Options::new("sim://0", "/sim")
        .block_bytes(8 << 10)
        .segment_bytes(64 << 10)
        .local_bytes(1 << 20)
        .part_bytes(32 << 10)
        .value_bytes_max(64 << 10)
        .memory_bytes(1 << 20)
        .lane_bytes(64 << 10)
        .append_wait_max(Duration::ZERO);
    let world = SimWorld::new(1);
    let seams = Seams {
        directories: vec![(world.files(), Box::new(world.disk(4, Durability::Power)))],
        stores: vec![Arc::new(SimStore::new(0))],
        clock: Arc::new(Instant::now),
        random: Box::new(splitmix(1)),
    };
    Changelog::open_simulated(options, seams).unwrap()
}

/// As where its thread panics, and nobody has said before that intake is shut.
fn end_spillers(changelog: &Changelog) {
    let Engine::Manual { spillers, .. } = &mut *lock(&changelog.engine) else { unreachable!() };
    spillers.clear();
}

#[test]
fn what_the_spiller_was_asked_and_has_not_seen_is_given_up_with_it() {
    let changelog = changelog();
    let writer = changelog.create_writer("log", KeyGroupRange::ALL).unwrap();
    let sync = writer.sync();
    let durable = writer.when_durable(SequenceNumber(1));
    end_spillers(&changelog);
    for future in [sync, durable] {
        let outcome = future.wait_timeout(Duration::ZERO).expect("nobody would ever answer");
        assert!(matches!(outcome, Err(SyncError::Closed)), "{outcome:?}");
    }
}

/// The writer looked whether the device is closed before it was.
#[test]
fn what_is_asked_after_the_spiller_has_ended_is_given_up() {
    let changelog = changelog();
    let writer = changelog.create_writer("log", KeyGroupRange::ALL).unwrap();
    end_spillers(&changelog);
    let (resolver, mut pending) = tidelog_upload::channel();
    changelog.core.devices[0].request(SpillRequest::Flush { resolver });
    assert_eq!(pending.wait_timeout(Duration::ZERO).map(|outcome| outcome.is_err()), Some(true));
    let outcome = writer.sync().wait_timeout(Duration::ZERO).expect("at once");
    assert!(matches!(outcome, Err(SyncError::Closed)), "{outcome:?}");
}

#[derive(Default)]
struct Wakes(AtomicUsize);

impl Wake for Wakes {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// Values that lie in the lane, and such that are too large for it.
#[test]
fn who_waits_for_room_learns_that_there_will_be_none() {
    for len in [2 << 10, 32 << 10] {
        let changelog = changelog();
        let mut writer = changelog.create_writer("log", KeyGroupRange::ALL).unwrap();
        while writer.try_append(KeyGroup(1), &vec![7; len]).is_ok() {}
        let wakes = Arc::new(Wakes::default());
        let waker = Waker::from(Arc::clone(&wakes));
        let mut context = Context::from_waker(&waker);
        let mut room = pin!(writer.room(len));
        assert!(room.as_mut().poll(&mut context).is_pending());
        end_spillers(&changelog);
        assert_eq!(wakes.0.load(Ordering::Relaxed), 1, "{len} bytes");
        assert_eq!(room.as_mut().poll(&mut context), Poll::Ready(Err(AppendError::Closed)));
    }
}
