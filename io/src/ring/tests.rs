//! What a lane does, seen by one thread and by several. Interleavings are in `loom_models.rs`.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool as Flag, AtomicUsize};
use std::sync::mpsc;
use std::time::Duration;

use proptest::prelude::*;

use super::*;

const CAPACITY: usize = 4096;
const FRAME_MAX: usize = CAPACITY / 8;

fn silent_lane() -> Arc<Lane> {
    Lane::new(CAPACITY, Bell::new(Arc::new(|| {}))).unwrap()
}

fn my_lane() -> Arc<Lane> {
    let lane = silent_lane();
    assert!(lane.try_claim());
    lane
}

/// A lane whose wake-ups are counted.
fn counted_lane(capacity: usize) -> (Arc<Lane>, Arc<Bell>, Arc<AtomicUsize>) {
    let wakes = Arc::new(AtomicUsize::new(0));
    let counter = wakes.clone();
    let bell = Bell::new(Arc::new(move || {
        counter.fetch_add(1, Relaxed);
    }));
    let lane = Lane::new(capacity, bell.clone()).unwrap();
    assert!(lane.try_claim());
    (lane, bell, wakes)
}

/// These tests put the length of the value in the low half of the header, a tag in the high half.
fn header(tag: u32, len: usize) -> u64 {
    u64::from(tag) << 32 | len as u64
}

fn value(tag: u32, len: usize) -> Vec<u8> {
    (0..len).map(|i| (tag as usize * 31 + i + 1) as u8 | 1).collect()
}

fn push(lane: &Lane, tag: u32, len: usize) -> Result<(), PushError> {
    lane.push(header(tag, len), &value(tag, len))
}

/// The first frame of the bytes and its length in the lane; checks the padding.
fn split(bytes: &[u8]) -> (u32, &[u8], usize) {
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap());
    let len = header as u32 as usize;
    let frame_len = 8 + len.next_multiple_of(8);
    assert!(bytes[8 + len..frame_len].iter().all(|&byte| byte == 0), "padding of a value of {len} bytes");
    ((header >> 32) as u32, &bytes[8..8 + len], frame_len)
}

/// Releases all frames, one release for each peek, and gives them to `see`.
fn drain(consumer: &mut Consumer, mut see: impl FnMut(u32, &[u8])) {
    loop {
        let bytes = consumer.peek();
        let mut rest = bytes;
        while !rest.is_empty() {
            let (tag, value, frame_len) = split(rest);
            see(tag, value);
            rest = &rest[frame_len..];
        }
        match bytes.len() {
            0 => return,
            len => consumer.release(len),
        }
    }
}

fn tags(consumer: &mut Consumer) -> Vec<u32> {
    let mut tags = Vec::new();
    drain(consumer, |tag, seen| {
        assert_eq!(seen, value(tag, seen.len()));
        tags.push(tag);
    });
    tags
}

/// Lets the threads of a test end when its checks fail, instead of waiting for room for ever.
struct Failed<'a>(&'a Flag);

impl Drop for Failed<'_> {
    fn drop(&mut self) {
        self.0.store(std::thread::panicking(), Relaxed);
    }
}

struct CountWakes(AtomicUsize);

impl Wake for CountWakes {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Relaxed);
    }
}

#[derive(Clone, Debug)]
enum Step {
    Push(usize),
    PushWith(usize),
    PanicInside(usize),
    Drain(usize),
    NewOwner,
    NewConsumer,
}

fn any_step() -> impl Strategy<Value = Step> {
    let len = prop_oneof![0..72usize, Just(56), 0..=FRAME_MAX - 8, Just(FRAME_MAX - 8)];
    prop_oneof![
        8 => len.clone().prop_map(Step::Push),
        3 => len.clone().prop_map(Step::PushWith),
        1 => len.prop_map(Step::PanicInside),
        5 => (1..12usize).prop_map(Step::Drain),
        1 => Just(Step::NewOwner),
        1 => Just(Step::NewConsumer),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    /// The lane against a queue.
    #[test]
    fn is_a_queue_of_frames(steps in prop::collection::vec(any_step(), 1..300)) {
        let lane = my_lane();
        let mut consumer = lane.consumer();
        let mut model = VecDeque::new();
        let mut cx = Context::from_waker(Waker::noop());
        for (tag, step) in (0..).zip(steps) {
            match step {
                Step::Push(len) | Step::PushWith(len) | Step::PanicInside(len) => {
                    let ready = lane.poll_room(len, &mut cx).is_ready();
                    let before = lane.committed();
                    let pushed = match step {
                        Step::Push(_) => push(&lane, tag, len),
                        Step::PushWith(_) => lane.push_with(header(tag, len), len, |to| {
                            assert!(to.len() == len && to.iter().all(|&byte| byte == 0));
                            to.copy_from_slice(&value(tag, len));
                        }),
                        _ => {
                            let fill = |to: &mut [u8]| { to.fill(255); std::panic::resume_unwind(Box::new(())) };
                            let attempt = || lane.push_with::<()>(header(tag, len), len, fill);
                            // A panic shows that the closure was called, so there was room.
                            prop_assert_eq!(catch_unwind(AssertUnwindSafe(attempt)).is_err(), ready);
                            prop_assert_eq!(lane.committed(), before);
                            continue;
                        }
                    };
                    prop_assert_eq!(pushed.is_ok(), ready);
                    if pushed.is_ok() {
                        model.push_back((tag, len));
                    } else {
                        // Full only if it is, the largest gap at the end of a lap aside.
                        let used: usize = model.iter().map(|&(_, len)| 8 + len.next_multiple_of(8)).sum();
                        let wanted = 8 + len.next_multiple_of(8);
                        prop_assert_eq!(pushed, Err(PushError::Full));
                        prop_assert!(used + wanted + 2 * FRAME_MAX > CAPACITY, "full with {} used", used);
                        prop_assert_eq!(lane.committed(), before);
                    }
                }
                Step::Drain(frames) => {
                    let consumer = consumer.as_mut().unwrap();
                    let bytes = consumer.peek();
                    let mut taken = 0;
                    for _ in 0..frames {
                        if taken == bytes.len() {
                            break;
                        }
                        let (seen_tag, seen, frame_len) = split(&bytes[taken..]);
                        let (tag, len) = model.pop_front().unwrap();
                        prop_assert_eq!((seen_tag, seen), (tag, &value(tag, len)[..]));
                        taken += frame_len;
                    }
                    let position = consumer.position();
                    consumer.release(taken);
                    prop_assert_eq!(consumer.position(), position + taken as u64);
                }
                Step::NewOwner => {
                    prop_assert!(lane.disown());
                    prop_assert!(lane.try_claim());
                }
                Step::NewConsumer => {
                    prop_assert!(lane.consumer().is_none());
                    consumer = None;
                    prop_assert!(consumer.is_none());
                    consumer = lane.consumer();
                }
            }
            prop_assert!(lane.drained() <= lane.committed());
            prop_assert!(lane.committed() - lane.drained() <= CAPACITY as u64);
        }
        drain(consumer.as_mut().unwrap(), |seen_tag, seen| {
            let (tag, len) = model.pop_front().unwrap();
            assert_eq!((seen_tag, seen), (tag, &value(tag, len)[..]));
        });
        prop_assert!(model.is_empty());
        prop_assert_eq!(lane.drained(), lane.committed());
    }
}

#[test]
fn every_length_is_copied_exactly_over_old_bytes() {
    let lane = my_lane();
    let mut consumer = lane.consumer().unwrap();
    for round in 0..2 {
        // From an address at every distance from 8-byte alignment, with neighbours that must not be copied.
        let source: Vec<u8> = (0..FRAME_MAX + 16).map(|i| i as u8 | 0x80).collect();
        for len in 0..=lane.value_len_max() {
            let from = len % 8 + round;
            lane.push(header(7, len), &source[from..from + len]).unwrap();
            drain(&mut consumer, |tag, seen| {
                assert_eq!((tag, seen.len(), seen), (7, len, &source[from..from + len]));
            });
        }
    }
    assert!(lane.committed() > 20 * CAPACITY as u64, "old bytes were under all of them");
}

#[test]
fn laps_that_end_exactly_after_one_that_did_not() {
    let lane = my_lane();
    let mut consumer = lane.consumer().unwrap();
    let mut expected = 0;
    let mut next = 0;
    let mut put = |lens: &[usize]| {
        for &len in lens {
            push(&lane, next, len).unwrap();
            next += 1;
        }
        next
    };
    // Lap 0 stops 8 bytes short of its end; the largest frame goes to lap 1, at the end of which everything fits.
    let mut pushed = put(&[504, 504, 504, 504, 504, 504, 504, 488]);
    for seen in tags(&mut consumer) {
        assert_eq!(seen, expected);
        expected += 1;
    }
    for _ in 0..3 {
        assert_eq!(expected, pushed);
        pushed = put(&[504; 4]);
        expected += tags(&mut consumer).len() as u32;
        pushed = pushed.max(put(&[504; 4]));
        assert_eq!(lane.committed() % CAPACITY as u64, 0);
        pushed = pushed.max(put(&[0]));
        // Two laps are visible; the first goes to the very end.
        let seen = tags(&mut consumer);
        assert_eq!(seen, (expected..pushed).collect::<Vec<_>>());
        expected = pushed;
        // Shorten this lap, so that the next turn again starts after a watermark.
        pushed = put(&[504, 504, 504, 504]);
        expected += tags(&mut consumer).len() as u32;
        pushed = pushed.max(put(&[504, 504, 504]));
        expected += tags(&mut consumer).len() as u32;
    }
}

#[test]
fn abandoned_push_at_the_end_of_a_lap_leaves_no_watermark() {
    let lane = my_lane();
    let mut consumer = lane.consumer().unwrap();
    for tag in 0..7 {
        push(&lane, tag, 504).unwrap();
        assert_eq!(tags(&mut consumer), [tag]);
    }
    push(&lane, 7, 0).unwrap();
    // This one would have skipped to the next lap …
    let attempt = || lane.push_with(header(8, 504), 504, |_| std::panic::resume_unwind(Box::new(())));
    assert!(catch_unwind(AssertUnwindSafe(attempt)).is_err());
    // … but this one fills the lap to its end, and is followed by another lap.
    push(&lane, 9, 496).unwrap();
    push(&lane, 10, 504).unwrap();
    assert_eq!(tags(&mut consumer), [7, 9, 10]);
}

#[test]
fn full_lane_takes_exactly_what_was_released() {
    let lane = my_lane();
    let mut consumer = lane.consumer().unwrap();
    for tag in 0..64 {
        push(&lane, tag, 56).unwrap();
    }
    assert_eq!(push(&lane, 64, 0), Err(PushError::Full));
    assert_eq!(lane.push_with(0, 0, |_| unreachable!()), Err::<(), _>(PushError::Full));
    assert_eq!(consumer.peek().len(), CAPACITY);
    consumer.release(64);
    assert_eq!((push(&lane, 64, 56), push(&lane, 65, 0)), (Ok(()), Err(PushError::Full)));
    assert_eq!(tags(&mut consumer), (1..65).collect::<Vec<_>>());
}

#[test]
fn nested_push_fails_and_the_outer_one_goes_on() {
    let (lane, other) = (my_lane(), my_lane());
    let inner = lane.push_with(header(1, 3), 3, |to| {
        to.copy_from_slice(&value(1, 3));
        other.push(0, b"another lane").unwrap();
        assert!(!lane.disown());
        (lane.push(0, b"x"), lane.push_with(0, 1, |_| ()), lane.push(0, &[0; FRAME_MAX]))
    });
    assert_eq!(inner, Ok((Err(PushError::Nested), Err(PushError::Nested), Err(PushError::TooLarge))));
    push(&lane, 2, 5).unwrap();
    assert_eq!(tags(&mut lane.consumer().unwrap()), [1, 2]);
}

#[test]
fn too_large_by_one_byte() {
    let lane = my_lane();
    assert_eq!(lane.value_len_max(), FRAME_MAX - 8);
    assert_eq!(push(&lane, 0, FRAME_MAX - 7), Err(PushError::TooLarge));
    assert_eq!(lane.push_with(0, FRAME_MAX - 7, |_| ()), Err(PushError::TooLarge));
    assert_eq!(lane.push_with(0, usize::MAX, |_| ()), Err(PushError::TooLarge));
    assert_eq!((lane.committed(), push(&lane, 0, FRAME_MAX - 8)), (0, Ok(())));
    let mut cx = Context::from_waker(Waker::noop());
    assert!(lane.poll_room(usize::MAX, &mut cx).is_ready(), "waiting would not help");
}

#[test]
fn only_the_owner_pushes() {
    let lane = silent_lane();
    assert_eq!(
        (push(&lane, 0, 8), lane.is_mine(), lane.disown()),
        (Err(PushError::OtherThread), false, false)
    );
    assert!(lane.try_claim());
    assert!(!lane.try_claim());
    push(&lane, 0, 8).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            assert_eq!((lane.try_claim(), lane.disown(), lane.is_mine()), (false, false, false));
            assert_eq!(push(&lane, 1, 8), Err(PushError::OtherThread));
            assert_eq!(lane.push_with(0, 8, |_| ()), Err(PushError::OtherThread));
        });
    });
    assert!(lane.disown());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            assert!(lane.try_claim());
            push(&lane, 2, 8).unwrap();
        });
    });
    assert_eq!(push(&lane, 3, 8), Err(PushError::OtherThread), "its owner ended without giving it up");
    assert_eq!(tags(&mut lane.consumer().unwrap()), [0, 2]);
}

#[test]
fn thread_that_is_torn_down_can_still_push() {
    struct Last(Arc<Lane>);
    impl Drop for Last {
        fn drop(&mut self) {
            push(&self.0, 1, 8).unwrap();
            assert!(self.0.disown());
        }
    }
    thread_local!(static LAST: RefCell<Option<Last>> = const { RefCell::new(None) });

    let lane = silent_lane();
    let theirs = lane.clone();
    std::thread::spawn(move || {
        assert!(theirs.try_claim());
        push(&theirs, 0, 8).unwrap();
        LAST.set(Some(Last(theirs)));
    })
    .join()
    .unwrap();
    assert!(lane.try_claim());
    assert_eq!(tags(&mut lane.consumer().unwrap()), [0, 1]);
}

#[test]
fn bell_rings_once_in_64_kib_and_only_for_a_sleeper() {
    let (lane, bell, wakes) = counted_lane(1 << 20);
    let mut consumer = lane.consumer().unwrap();
    for _ in 0..(128 << 10) / 64 {
        push(&lane, 0, 56).unwrap();
    }
    assert_eq!(wakes.load(Relaxed), 0, "nobody sleeps");
    assert!(!bell.doze(|| consumer.peek().is_empty()), "there is work");
    drain(&mut consumer, |_, _| ());
    assert!(bell.doze(|| consumer.peek().is_empty()));
    for _ in 0..(64 << 10) / 64 - 1 {
        push(&lane, 0, 56).unwrap();
    }
    assert_eq!(wakes.load(Relaxed), 0, "one frame short of 64 KiB");
    push(&lane, 0, 56).unwrap();
    assert_eq!(wakes.load(Relaxed), 1);
    lane.ring_bell();
    assert_eq!(wakes.load(Relaxed), 1, "woken already");
    bell.awake();
    assert!(bell.doze(|| true));
    bell.awake();
    lane.ring_bell();
    assert_eq!(wakes.load(Relaxed), 1, "awake by itself");
}

#[test]
fn full_lane_and_waiter_for_room_ring() {
    let (lane, bell, wakes) = counted_lane(CAPACITY);
    while push(&lane, 0, 56).is_ok() {}
    assert!(bell.doze(|| true));
    assert_eq!((push(&lane, 0, 56), wakes.load(Relaxed)), (Err(PushError::Full), 1));
    assert!(bell.doze(|| true));
    let mut cx = Context::from_waker(Waker::noop());
    assert!(lane.poll_room(56, &mut cx).is_pending());
    assert_eq!(wakes.load(Relaxed), 2);
}

#[test]
fn bell_may_push_into_the_lane_that_rings_it() {
    let slot = Arc::new(std::sync::OnceLock::<Arc<Lane>>::new());
    let theirs = slot.clone();
    let bell = Bell::new(Arc::new(move || push(theirs.get().unwrap(), 99, 8).unwrap()));
    let lane = Lane::new(CAPACITY, bell.clone()).unwrap();
    assert!(slot.set(lane.clone()).is_ok() && lane.try_claim() && bell.doze(|| true));
    for tag in 0..3 {
        push(&lane, tag, 504).unwrap();
    }
    assert_eq!(tags(&mut lane.consumer().unwrap()), [0, 1, 99, 2]);
}

#[test]
fn waker_is_called_once_after_a_release() {
    let lane = my_lane();
    let mut consumer = lane.consumer().unwrap();
    let counter = Arc::new(CountWakes(AtomicUsize::new(0)));
    let waker = Waker::from(counter.clone());
    let mut cx = Context::from_waker(&waker);
    assert!(lane.poll_room(504, &mut cx).is_ready());
    while push(&lane, 0, 56).is_ok() {}
    assert!(lane.poll_room(504, &mut cx).is_pending());
    assert!(lane.poll_room(504, &mut cx).is_pending());
    let _ = consumer.peek();
    assert_eq!(counter.0.load(Relaxed), 0);
    consumer.release(64);
    assert_eq!(counter.0.load(Relaxed), 0, "64 bytes are not enough to be woken for");
    assert!(lane.poll_room(504, &mut cx).is_pending());
    consumer.release(15 * 64);
    assert_eq!(counter.0.load(Relaxed), 1, "a quarter of the lane is free");
    assert!(lane.poll_room(504, &mut cx).is_ready());
    consumer.release(64);
    assert_eq!(counter.0.load(Relaxed), 1, "nobody waits any more");
}

#[test]
fn blocking_wait_ends_by_room_or_deadline() {
    let lane = my_lane();
    let mut consumer = lane.consumer().unwrap();
    while push(&lane, 0, 56).is_ok() {}
    assert!(!lane.wait_for_room(56, Instant::now()));
    assert!(!lane.wait_for_room(56, Instant::now() + Duration::from_millis(3)));
    let (tell, told) = mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            told.recv().unwrap();
            drain(&mut consumer, |_, _| ());
        });
        tell.send(()).unwrap();
        assert!(lane.wait_for_room(56, Instant::now() + Duration::from_secs(600)));
    });
    assert_eq!(push(&lane, 0, 56), Ok(()));
}

#[test]
fn release_of_more_than_was_seen_panics() {
    let lane = my_lane();
    let mut consumer = lane.consumer().unwrap();
    push(&lane, 0, 8).unwrap();
    let too_early = catch_unwind(AssertUnwindSafe(|| consumer.release(8)));
    assert_eq!((too_early.is_err(), consumer.peek().len()), (true, 16));
    push(&lane, 0, 8).unwrap();
    for bytes in [24, 4, usize::MAX] {
        assert!(catch_unwind(AssertUnwindSafe(|| consumer.release(bytes))).is_err());
    }
    consumer.release(16);
    assert_eq!((lane.drained(), lane.committed()), (16, 32));
}

#[test]
fn capacities_that_cannot_be() {
    for capacity in [0, 64, 2048, 4097, 6144, usize::MAX] {
        let error = Lane::new(capacity, Bell::new(Arc::new(|| {}))).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "{capacity}");
    }
}

/// A fast producer, a consumer that sleeps when it can, and the content of every frame.
#[test]
fn two_threads_at_full_speed() {
    const FRAMES: u32 = 100_000;
    let consumer_thread = std::thread::current();
    let bell = Bell::new(Arc::new(move || consumer_thread.unpark()));
    let lane = Lane::new(CAPACITY, bell.clone()).unwrap();
    let failed = Flag::new(false);
    let len_of = |tag: u32| {
        (tag.wrapping_mul(2_654_435_761) >> 16) as usize % if tag.is_multiple_of(16) { 505 } else { 40 }
    };
    std::thread::scope(|scope| {
        scope.spawn(|| {
            assert!(lane.try_claim());
            for tag in 0..FRAMES {
                while let Err(error) = push(&lane, tag, len_of(tag)) {
                    assert_eq!(error, PushError::Full);
                    // The deadline only serves a failing test: a release wakes the wait.
                    let _ = lane.wait_for_room(len_of(tag), Instant::now() + Duration::from_secs(5));
                    if failed.load(Relaxed) {
                        return;
                    }
                }
            }
            lane.ring_bell();
        });
        let _failed = Failed(&failed);
        let mut consumer = lane.consumer().unwrap();
        let mut next = 0;
        while next < FRAMES {
            drain(&mut consumer, |tag, seen| {
                assert_eq!((tag, seen), (next, &value(next, len_of(next))[..]));
                next += 1;
            });
            if next < FRAMES && bell.doze(|| consumer.peek().is_empty()) {
                std::thread::park();
                bell.awake();
            }
        }
    });
    assert_eq!(lane.drained(), lane.committed());
}

/// Four threads that take turns as the owner of one lane.
#[test]
fn owners_in_turn_lose_nothing() {
    const EACH: u32 = 4_000;
    let failed = Flag::new(false);
    let lane = silent_lane();
    let mut consumer = lane.consumer().unwrap();
    std::thread::scope(|scope| {
        for thread in 0..4u32 {
            let (lane, failed) = (&lane, &failed);
            scope.spawn(move || {
                let mut next = 0;
                while next < EACH && !failed.load(Relaxed) {
                    if !lane.try_claim() {
                        std::thread::yield_now();
                        continue;
                    }
                    for _ in 0..=next % 5 {
                        if next < EACH && push(lane, thread << 24 | next, next as usize % 60).is_ok() {
                            next += 1;
                        }
                    }
                    assert!(lane.disown());
                }
            });
        }
        let _failed = Failed(&failed);
        let mut next = [0; 4];
        while next != [EACH; 4] {
            drain(&mut consumer, |tag, seen| {
                let of_thread = &mut next[(tag >> 24) as usize];
                assert_eq!((tag & 0xff_ffff, seen.len()), (*of_thread, *of_thread as usize % 60));
                *of_thread += 1;
            });
            std::thread::yield_now();
        }
    });
}
