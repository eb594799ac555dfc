//! All interleavings, within a bound of preemptions, of the lane's protocols.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p tidelog-io --release --lib loom`. A lane here holds four of the largest frames,
//! 16 bytes each, and loom watches every word of it, so that a byte that is read and written at once fails a model by
//! itself. A lost wake-up shows as a deadlock.

use loom::sync::Notify;
use loom::thread;

use super::*;

const CAPACITY: usize = 64;

fn model(preemptions: usize, f: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(f);
}

fn lane() -> Arc<Lane> {
    Lane::new(CAPACITY, Bell::new(Arc::new(|| {}))).unwrap()
}

/// Frames are their number: odd ones have a value, even ones are only a header.
fn try_push(lane: &Lane, number: u64) -> Result<(), PushError> {
    if number.is_multiple_of(2) {
        lane.push(number + 2, &[])
    } else {
        lane.push(number + 2, &(!number).to_le_bytes())
    }
}

fn push(lane: &Lane, number: u64) {
    while let Err(error) = try_push(lane, number) {
        assert_eq!(error, PushError::Full);
        thread::yield_now();
    }
}

fn split(bytes: &[u8]) -> (u64, usize) {
    let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
    assert_ne!(word(0), 0, "zeros are not a frame");
    let number = word(0) - 2;
    if number.is_multiple_of(2) {
        return (number, 8);
    }
    assert_eq!(word(8), !number);
    (number, 16)
}

/// Takes at most `frames` frames, which are the ones from `next` on, and releases them together.
fn take(consumer: &mut Consumer, next: u64, frames: u64) -> u64 {
    let bytes = consumer.peek();
    let (mut used, mut taken) = (0, 0);
    while taken < frames && used < bytes.len() {
        let (number, frame_bytes) = split(&bytes[used..]);
        assert_eq!(number, next + taken);
        used += frame_bytes;
        taken += 1;
    }
    consumer.release(used);
    taken
}

fn take_until(consumer: &mut Consumer, mut next: u64, end: u64) {
    while next < end {
        next += take(consumer, next, u64::MAX);
        thread::yield_now();
    }
    assert_eq!(next, end);
}

#[test]
fn publish() {
    model(4, || {
        let lane = lane();
        let mut consumer = lane.consumer().unwrap();
        let producer = thread::spawn({
            let lane = lane.clone();
            move || {
                assert!(lane.try_claim());
                push(&lane, 0);
                let value = (!1u64).to_le_bytes();
                lane.push_with(3, 8, |to| to.copy_from_slice(&value)).unwrap();
                assert_eq!(lane.committed(), 24);
            }
        });
        let (drained, committed) = (lane.drained(), lane.committed());
        assert!(drained <= committed && committed <= 24);
        take_until(&mut consumer, 0, 2);
        producer.join().unwrap();
        assert_eq!((lane.drained(), lane.committed()), (24, 24));
    });
}

/// Two shortened laps in a row while the consumer is still in the one before, so that the watermark is used twice, and the
/// lane is full on the way.
#[test]
fn wrap_and_full() {
    model(4, || {
        let lane = lane();
        let mut consumer = lane.consumer().unwrap();
        assert!(lane.try_claim());
        for number in [1, 3, 5, 6] {
            try_push(&lane, number).unwrap();
        }
        assert_eq!(consumer.peek().len(), 56);
        consumer.release(48);
        assert!(lane.disown());
        let producer = thread::spawn({
            let lane = lane.clone();
            move || {
                assert!(lane.try_claim());
                // 7 skips to lap 1. 8 and 9 and 10 and 11 leave 8 bytes of it, so that 13 skips to lap 2.
                for number in 7..=11 {
                    push(&lane, number);
                }
                while lane.push_with(13 + 2, 8, |to| to.copy_from_slice(&(!13u64).to_le_bytes())).is_err() {
                    thread::yield_now();
                }
            }
        });
        take_until(&mut consumer, 6, 12);
        take_until(&mut consumer, 13, 14);
        producer.join().unwrap();
        assert_eq!(lane.drained(), lane.committed());
    });
}

/// A producer that is done waits for nobody, a consumer that sleeps is woken for what came before the ring.
#[test]
fn sleep_and_wake() {
    model(4, || {
        let woken = Arc::new(Notify::new());
        let bell = Bell::new(Arc::new({
            let woken = woken.clone();
            move || woken.notify()
        }));
        let lane = Lane::new(CAPACITY, bell.clone()).unwrap();
        let mut consumer = lane.consumer().unwrap();
        let producer = thread::spawn({
            let lane = lane.clone();
            move || {
                assert!(lane.try_claim());
                for number in 0..2 {
                    try_push(&lane, number).unwrap();
                    lane.ring_bell();
                }
            }
        });
        let mut next = 0;
        while next < 2 {
            let taken = take(&mut consumer, next, 1);
            next += taken;
            if taken == 0 && bell.doze(|| consumer.peek().is_empty()) {
                woken.wait();
                bell.awake();
            }
        }
        producer.join().unwrap();
    });
}

/// Two lanes ring one bell: no announcement of a sleep is answered twice.
#[test]
fn two_lanes_one_bell() {
    model(4, || {
        let woken = Arc::new(Notify::new());
        let wakes = Arc::new(loom::sync::atomic::AtomicUsize::new(0));
        let bell = Bell::new(Arc::new({
            let (woken, wakes) = (woken.clone(), wakes.clone());
            move || {
                wakes.fetch_add(1, Relaxed);
                woken.notify();
            }
        }));
        let lanes = [(); 2].map(|()| Lane::new(CAPACITY, bell.clone()).unwrap());
        let mut consumers = lanes.each_ref().map(|lane| lane.consumer().unwrap());
        let producers = lanes.map(|lane| {
            thread::spawn(move || {
                assert!(lane.try_claim());
                try_push(&lane, 0).unwrap();
                lane.ring_bell();
            })
        });
        let (mut taken, mut dozes) = (0, 0);
        while taken < 2 {
            taken += consumers.iter_mut().map(|consumer| take(consumer, 0, 1)).sum::<u64>();
            if taken < 2 {
                dozes += 1;
                if bell.doze(|| consumers.iter_mut().all(|consumer| consumer.peek().is_empty())) {
                    woken.wait();
                    bell.awake();
                }
            }
        }
        producers.into_iter().for_each(|producer| producer.join().unwrap());
        assert!(wakes.load(Relaxed) <= dozes);
    });
}

/// An owner, two who compete to be the next, and a consumer that looks on.
#[test]
fn hand_over_between_owners() {
    model(4, || {
        let lane = lane();
        let mut consumer = lane.consumer().unwrap();
        assert!(lane.try_claim());
        push(&lane, 0);
        let others = [(); 2].map(|()| {
            let lane = lane.clone();
            thread::spawn(move || {
                if !lane.try_claim() {
                    assert_eq!(try_push(&lane, 9), Err(PushError::OtherThread));
                    return 0;
                }
                // Whoever comes first goes on with the next number.
                let number = if lane.committed() == 24 { 2 } else { 3 };
                try_push(&lane, number).unwrap();
                assert!(lane.disown());
                1
            })
        });
        push(&lane, 1);
        assert!(lane.disown());
        let mut next = take(&mut consumer, 0, 4);
        let claims: u64 = others.into_iter().map(|other| other.join().unwrap()).sum();
        next += take(&mut consumer, next, 4);
        assert_eq!((next, lane.drained()), (2 + claims, lane.committed()));
    });
}

/// What the first owner learned of the consumer is as good for the second, who overwrites what was drained.
#[test]
fn hand_over_of_a_full_lane() {
    model(4, || {
        let lane = lane();
        let mut consumer = lane.consumer().unwrap();
        assert!(lane.try_claim());
        for number in [1, 3, 5, 7] {
            try_push(&lane, number).unwrap();
        }
        assert_eq!(try_push(&lane, 8), Err(PushError::Full));
        assert!(lane.disown());
        let owner = thread::spawn({
            let lane = lane.clone();
            move || {
                assert!(lane.try_claim());
                while try_push(&lane, 9).is_err() {
                    thread::yield_now();
                }
            }
        });
        for number in [1, 3, 5, 7, 9] {
            while take(&mut consumer, number, 1) == 0 {
                thread::yield_now();
            }
        }
        owner.join().unwrap();
        assert_eq!((lane.drained(), lane.committed()), (80, 80));
    });
}

struct WakeNotify(Notify);

impl Wake for WakeNotify {
    fn wake(self: Arc<Self>) {
        self.0.notify();
    }
}

/// A release wakes who waits for room: the owner, and another thread that watches.
fn wait_for_room(watchers: usize, preemptions: usize) {
    model(preemptions, move || {
        let lane = lane();
        let mut consumer = lane.consumer().unwrap();
        assert!(lane.try_claim());
        for number in [1, 3, 5, 7] {
            try_push(&lane, number).unwrap();
        }
        let until_room = |lane: &Lane| {
            let notify = Arc::new(WakeNotify(Notify::new()));
            let waker = Waker::from(notify.clone());
            while lane.poll_room(8, &mut Context::from_waker(&waker)).is_pending() {
                notify.0.wait();
            }
        };
        let consumer = thread::spawn(move || {
            assert_eq!(take(&mut consumer, 1, 1), 1);
        });
        let watchers: Vec<_> = (0..watchers)
            .map(|_| {
                let lane = lane.clone();
                thread::spawn(move || until_room(&lane))
            })
            .collect();
        until_room(&lane);
        // Watchers want to see the room, so it is used only after they did.
        for watcher in watchers {
            watcher.join().unwrap();
        }
        try_push(&lane, 9).unwrap();
        consumer.join().unwrap();
    });
}

#[test]
fn room_for_the_owner() {
    wait_for_room(0, 4);
}

#[test]
fn room_for_two() {
    wait_for_room(1, 3);
}

/// Closing: the last frames are pushed and the lane given up while its drain passes to another thread. What the first
/// consumer only looked at is not written to before the second has released it.
#[test]
fn close_with_a_new_consumer() {
    model(4, || {
        let lane = lane();
        let mut first = lane.consumer().unwrap();
        assert!(lane.try_claim());
        push(&lane, 0);
        let drain = thread::spawn(move || {
            let _ = first.peek();
        });
        push(&lane, 1);
        push(&lane, 2);
        let mut second = loop {
            match lane.consumer() {
                Some(consumer) => break consumer,
                None => thread::yield_now(),
            }
        };
        assert_eq!(take(&mut second, 0, 9), 3);
        for number in [3, 5] {
            push(&lane, number);
        }
        // The second lap: over what the first consumer has seen.
        push(&lane, 7);
        assert!(lane.disown());
        drain.join().unwrap();
        assert_eq!(take(&mut second, 3, 1) + take(&mut second, 5, 1) + take(&mut second, 7, 1), 3);
        assert_eq!(lane.drained(), lane.committed());
    });
}
