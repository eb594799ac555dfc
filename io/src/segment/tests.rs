//! Segments on the simulated device: order, recycling, and each failure at each place.

use std::sync::Mutex;

use twox_hash::XxHash3_64;

use super::*;
use crate::disk::{Durability, EngineInfo};
use crate::sim::{Crash, Fault, SimDisk, SimRng, SimWorld};

const BLOCK_BYTES: usize = 8192;
const SEGMENT_BYTES: u64 = 5 * BLOCK_BYTES as u64;
const DIRECTORY: u64 = 77;
const TICK: Duration = Duration::from_millis(1);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Event {
    Acquired(u32, u64),
    Cut(u64, u64),
}

/// What the journal was told, and how many of its next calls fail.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<(Vec<Event>, usize)>>);

impl Log {
    fn push(&self, event: Event) -> io::Result<()> {
        let mut log = self.0.lock().unwrap();
        if log.1 > 0 {
            log.1 -= 1;
            return Err(io::Error::other("injected"));
        }
        log.0.push(event);
        Ok(())
    }

    fn events(&self) -> Vec<Event> {
        self.0.lock().unwrap().0.clone()
    }

    fn fail(&self, calls: usize) {
        self.0.lock().unwrap().1 = calls;
    }

    /// Whether a block written under `epoch` counts.
    fn counts(&self, epoch: u64, number: u64) -> bool {
        self.events().iter().all(|event| match event {
            Event::Cut(epoch_below, end) => epoch >= *epoch_below || number < *end,
            Event::Acquired(..) => true,
        })
    }
}

impl Journal for Log {
    fn acquired(&mut self, segment: u32, epoch: u64) -> io::Result<()> {
        self.push(Event::Acquired(segment, epoch))
    }

    fn cut(&mut self, epoch_below: u64, number: u64) -> io::Result<()> {
        self.push(Event::Cut(epoch_below, number))
    }
}

fn encode(place: &BlockPlace) -> [u8; 48] {
    let words =
        [place.segment.into(), place.epoch, place.index.into(), place.offset, place.number, place.watermark];
    let mut bytes = [0; 48];
    for (to, word) in bytes.chunks_mut(8).zip(words) {
        to.copy_from_slice(&u64::to_le_bytes(word));
    }
    bytes
}

/// The place sealed into a block, if the block is intact.
fn decode(block: &[u8]) -> Option<BlockPlace> {
    let word = |index: usize| u64::from_le_bytes(*block[index * 8..].first_chunk().unwrap());
    let intact = block[0] != 0 && word(6) == XxHash3_64::oneshot(&[&block[..48], &block[56..]].concat());
    intact.then(|| BlockPlace {
        directory: DIRECTORY,
        segment: word(0) as u32,
        epoch: word(1),
        index: word(2) as u32,
        offset: word(3),
        number: word(4),
        watermark: word(5),
    })
}

fn payload(number: u64, len: usize) -> AlignedBuf {
    let mut buffer = AlignedBuf::alone(len).unwrap();
    buffer.fill(number as u8);
    buffer
}

/// A device, and the block numbers that it has reported.
struct Rig {
    world: SimWorld,
    log: Log,
    segments: Segments,
    durable: Vec<DurableBlock>,
    checked: usize,
    released: Vec<(u32, u64)>,
}

impl Rig {
    fn new(world: &SimWorld, segments_max: u32, background: bool) -> Self {
        Self::over(world, Box::new(world.disk(4, Durability::Power)), segments_max, background, Vec::new())
    }

    fn over(
        world: &SimWorld,
        disk: Box<dyn Disk>,
        segments_max: u32,
        background: bool,
        known: Vec<KnownSegment>,
    ) -> Self {
        let log = Log::default();
        let config =
            SegmentConfig { directory: DIRECTORY, segment_bytes: SEGMENT_BYTES, segments_max, background };
        let seen = log.clone();
        let seal: SealFn = Box::new(move |block, place| {
            assert_eq!(place.directory, DIRECTORY);
            let acquired = Event::Acquired(place.segment, place.epoch);
            assert!(seen.events().contains(&acquired), "{place:?} is written before {acquired:?}");
            assert!(seen.counts(place.epoch, place.number), "{place:?} was cut off");
            block[..48].copy_from_slice(&encode(place));
            let sum = XxHash3_64::oneshot(&[&block[..48], &block[56..]].concat());
            block[48..56].copy_from_slice(&sum.to_le_bytes());
        });
        let segments = Segments::new(disk, world.files(), Box::new(log.clone()), seal, config, known, 1, 100);
        Self { world: world.clone(), log, segments, durable: Vec::new(), checked: 0, released: Vec::new() }
    }

    fn submit(&mut self) -> Result<u64, RefusedReason> {
        let number = self.segments.next_number();
        let buffer = payload(number, BLOCK_BYTES);
        let submitted = self.segments.submit(buffer, BLOCK_BYTES).map_err(|refused| refused.reason);
        assert!(!submitted.as_ref().is_ok_and(|submitted| *submitted != number));
        submitted
    }

    fn poll(&mut self) {
        self.segments.poll(TICK, &mut self.durable);
        self.check();
    }

    fn drain(&mut self) {
        self.segments.drain(&mut self.durable);
        self.check();
    }

    /// Every block reported is the next one, and is on the device where it was reported to be.
    fn check(&mut self) {
        for (index, block) in self.durable.iter().enumerate().skip(self.checked) {
            assert_eq!(block.place.number, 100 + index as u64);
            assert!(block.place.watermark <= block.place.number);
            assert_eq!(decode(&block.buffer[..block.len]), Some(block.place));
            assert_eq!(block.buffer[56..block.len], vec![block.place.number as u8; block.len - 56]);
            let contents = self.world.contents(&segment_name(block.place.segment)).unwrap();
            let from = block.place.offset as usize;
            assert_eq!(contents[from..from + block.len], block.buffer[..block.len]);
        }
        self.checked = self.durable.len();
        assert_eq!(self.segments.watermark(), 100 + self.checked as u64);
    }

    /// Submits until `blocks` were taken, polling whenever one is refused for the moment. Says what ended it early.
    fn write(&mut self, blocks: usize) -> Result<(), RefusedReason> {
        for _ in 0..blocks {
            loop {
                match self.submit() {
                    Ok(_) => break,
                    Err(RefusedReason::Depth | RefusedReason::Preparing) => self.poll(),
                    Err(reason) => return Err(reason),
                }
            }
        }
        Ok(())
    }

    fn release(&mut self, segment: u32, epoch: u64) {
        self.segments.release(segment, epoch);
        self.released.push((segment, epoch));
    }

    /// Segments acquired and not released, but for the open one.
    fn releasable(&self) -> Vec<(u32, u64)> {
        let acquired = self.log.events().into_iter().filter_map(|event| match event {
            Event::Acquired(segment, epoch) => Some((segment, epoch)),
            Event::Cut(..) => None,
        });
        acquired
            .filter(|used| Some(*used) != self.segments.open_segment() && !self.released.contains(used))
            .collect()
    }

    fn places(&self) -> Vec<(u32, u64, u32)> {
        self.durable.iter().map(|block| (block.place.segment, block.place.epoch, block.place.index)).collect()
    }

    /// The numbers that a recovery finds, with how often each counts.
    fn recovered(&self) -> std::collections::BTreeMap<u64, usize> {
        let mut found = std::collections::BTreeMap::new();
        for event in self.log.events() {
            let Event::Acquired(segment, epoch) = event else { continue };
            let Some(contents) = self.world.contents(&segment_name(segment)) else { continue };
            for (index, block) in contents.chunks(BLOCK_BYTES).enumerate() {
                let place = decode(block);
                let here = |place: &BlockPlace| {
                    (place.segment, place.epoch, place.offset)
                        == (segment, epoch, (index * BLOCK_BYTES) as u64)
                };
                if let Some(place) = place.filter(here)
                    && self.log.counts(epoch, place.number)
                {
                    *found.entry(place.number).or_insert(0) += 1;
                }
            }
        }
        found
    }

    fn assert_recoverable(&self) {
        let found = self.recovered();
        for number in 100..self.segments.watermark() {
            assert_eq!(found.get(&number), Some(&1), "block {number}; {:?}", self.log.events());
        }
        assert!(found.values().all(|times| *times == 1), "{found:?}");
    }
}

fn is_no_segment(result: Result<impl Sized, RefusedReason>) -> bool {
    matches!(result, Err(RefusedReason::NoSegment))
}

#[test]
fn blocks_roll_over_segments() {
    let mut rig = Rig::new(&SimWorld::new(1), 3, false);
    rig.write(12).unwrap();
    rig.drain();
    let expected: Vec<_> =
        (0..12).map(|block| (1 + block / 5, 1 + u64::from(block / 5), block % 5)).collect();
    assert_eq!(rig.places(), expected);
    assert_eq!(rig.segments.open_segment(), Some((3, 3)));
    assert_eq!(rig.segments.next_number(), 112);
    rig.assert_recoverable();
}

#[test]
fn block_that_does_not_fit_goes_to_the_next_segment() {
    let mut rig = Rig::new(&SimWorld::new(1), 3, false);
    for (blocks, place) in [(2, (1, 0)), (2, (1, 16384)), (2, (2, 0)), (3, (2, 16384)), (1, (3, 0))] {
        let len = blocks * BLOCK_BYTES;
        rig.segments.submit(payload(rig.segments.next_number(), len), len).unwrap();
        rig.drain();
        let last = rig.durable.last().unwrap();
        assert_eq!((last.place.segment, last.place.offset), place);
    }
}

#[test]
fn released_segment_is_recycled_under_a_new_epoch() {
    let mut rig = Rig::new(&SimWorld::new(2), 2, false);
    for round in 0..6 {
        rig.write(5).unwrap();
        rig.drain();
        if let Some(previous) = rig.durable.len().checked_sub(10) {
            let place = rig.durable[previous].place;
            rig.release(place.segment, place.epoch);
        }
        assert_eq!(rig.durable.last().unwrap().place.epoch, round + 1);
    }
    let used: Vec<u32> = rig.places().iter().map(|place| place.0).step_by(5).collect();
    assert_eq!(used, [1, 2, 1, 2, 1, 2]);
    assert_eq!(rig.world.files().list().unwrap().len(), 2);
}

#[test]
fn budget_refuses_until_a_release() {
    let mut rig = Rig::new(&SimWorld::new(3), 2, false);
    assert!(is_no_segment(rig.write(11)));
    rig.drain();
    assert_eq!(rig.durable.len(), 10);
    assert!(is_no_segment(rig.submit()));
    rig.release(1, 1);
    rig.write(5).unwrap();
    rig.drain();
    assert_eq!(rig.places()[10], (1, 3, 0));
    assert!(is_no_segment(rig.write(1)));
}

#[test]
fn segments_found_in_use_wait_for_their_release() {
    let world = SimWorld::new(3);
    for segment in 1..=3 {
        world.files().create(&segment_name(segment), SEGMENT_BYTES).unwrap();
    }
    let known = [(1, true), (2, false), (3, true)].map(|(segment, in_use)| KnownSegment { segment, in_use });
    let disk = Box::new(world.disk(4, Durability::Power));
    let mut rig = Rig::over(&world, disk, 3, false, known.to_vec());
    assert!(is_no_segment(rig.write(6)));
    rig.release(3, 40);
    rig.write(5).unwrap();
    rig.drain();
    assert_eq!(rig.places().iter().map(|place| place.0).step_by(5).collect::<Vec<_>>(), [2, 3]);
}

#[test]
fn watermark_waits_for_the_slowest() {
    for seed in 0..50 {
        let mut rig = Rig::new(&SimWorld::new(seed), 4, false);
        rig.world.hold(true);
        for _ in 0..4 {
            rig.submit().unwrap();
        }
        assert!(matches!(rig.submit(), Err(RefusedReason::Depth)));
        rig.poll();
        assert_eq!((rig.segments.watermark(), rig.segments.in_flight()), (100, 4));
        rig.world.hold(false);
        rig.write(10).unwrap();
        rig.drain();
        assert_eq!((rig.durable.len(), rig.segments.in_flight()), (14, 0));
    }
}

#[test]
fn failure_of_any_write_is_rewritten_before_it_is_acknowledged() {
    for fault in [Fault::WriteError, Fault::StuckWrite] {
        for nth in 0..18 {
            for seed in 0..12 {
                let world = SimWorld::new(seed);
                let mut rig = Rig::new(&world, 8, false);
                world.inject(fault, nth);
                rig.write(18).unwrap();
                rig.drain();
                assert_eq!(rig.durable.len(), 18);
                assert_eq!(world.stats().faults.get(&fault), Some(&1));
                assert!(matches!(rig.segments.health(), Health::Healthy));
                let cuts =
                    rig.log.events().into_iter().filter(|event| matches!(event, Event::Cut(..))).count();
                assert_eq!(cuts, 1);
                rig.assert_recoverable();
            }
        }
    }
}

#[test]
fn quarantined_segment_is_never_written_again_and_removed_on_release() {
    let world = SimWorld::new(9);
    let mut rig = Rig::new(&world, 3, false);
    rig.write(3).unwrap();
    rig.drain();
    world.inject(Fault::WriteError, 0);
    rig.write(1).unwrap();
    rig.drain();
    assert_eq!(rig.log.events()[1..], [Event::Acquired(2, 2), Event::Cut(2, 103)]);
    assert_eq!(rig.places()[3], (2, 2, 0));
    assert!(rig.segments.take_empty().is_empty());
    assert!(is_no_segment(rig.write(10)));
    rig.drain();
    assert!(world.contents(&segment_name(1)).is_some());
    rig.release(1, 1);
    assert!(world.contents(&segment_name(1)).is_none());
    rig.write(1).unwrap();
    rig.drain();
    assert_eq!(rig.places().last(), Some(&(1, 4, 0)));
}

#[test]
fn quarantined_segment_that_could_not_be_removed_is_tried_again_when_there_is_no_other() {
    for seed in 0..8 {
        let world = SimWorld::new(seed);
        let mut rig = Rig::new(&world, 2, false);
        world.inject(Fault::WriteError, 0);
        rig.write(1).unwrap();
        rig.drain();
        assert_eq!(rig.segments.take_empty(), [(1, 1)]);
        rig.write(4).unwrap();
        rig.drain();
        // What a failed removal leaves is unknown.
        world.inject(Fault::FilesError, 0);
        rig.release(1, 1);
        assert_eq!(world.stats().faults[&Fault::FilesError], 1);
        let refusals = (0..1000).take_while(|_| is_no_segment(rig.submit())).count();
        assert!(refusals < 1000, "seed {seed}");
        rig.drain();
        assert_eq!(rig.places()[5], (1, 3, 0));
    }
}

#[test]
fn segment_that_failed_at_once_is_reported_empty() {
    let world = SimWorld::new(9);
    let mut rig = Rig::new(&world, 3, false);
    world.inject(Fault::WriteError, 0);
    rig.write(1).unwrap();
    rig.drain();
    assert_eq!(rig.places(), [(2, 2, 0)]);
    assert_eq!(rig.segments.take_empty(), [(1, 1)]);
    rig.release(1, 1);
    assert!(rig.segments.take_empty().is_empty());
    assert!(world.contents(&segment_name(1)).is_none());
}

#[test]
fn second_failure_without_progress_gives_everything_back() {
    for healthy in 0..7 {
        let world = SimWorld::new(healthy);
        let mut rig = Rig::new(&world, 8, false);
        rig.write(healthy as usize).unwrap();
        rig.drain();
        world.set_fault(Fault::WriteError, 1000);
        let mut taken = healthy;
        let reason = loop {
            match rig.submit() {
                Ok(_) => taken += 1,
                Err(RefusedReason::Sick(error)) => break error,
                Err(_) => rig.poll(),
            }
        };
        assert_eq!(reason.kind(), io::Error::from_raw_os_error(5).kind());
        assert!(matches!(rig.segments.health(), Health::Sick(_)));
        assert_eq!((rig.durable.len() as u64, rig.segments.in_flight()), (healthy, 0));
        let lost = rig.segments.take_lost();
        let numbers: Vec<u64> = lost.iter().map(|lost| lost.0).collect();
        assert_eq!(numbers, (100 + healthy..100 + taken).collect::<Vec<_>>());
        for (number, buffer, len) in lost {
            assert_eq!((buffer[len - 1], len), (number as u8, BLOCK_BYTES));
        }
        assert!(rig.segments.take_lost().is_empty());
        rig.drain();
        rig.assert_recoverable();
    }
}

#[test]
fn failures_with_progress_between_them_are_survived() {
    let world = SimWorld::new(4);
    let mut rig = Rig::new(&world, 30, false);
    for nth in [2, 7, 12, 17] {
        world.inject(Fault::WriteError, nth);
    }
    rig.write(25).unwrap();
    rig.drain();
    assert_eq!(rig.durable.len(), 25);
    rig.assert_recoverable();
}

#[test]
fn rewriting_waits_for_the_budget() {
    let world = SimWorld::new(5);
    let mut rig = Rig::new(&world, 2, false);
    rig.write(5).unwrap();
    rig.drain();
    rig.write(1).unwrap();
    rig.drain();
    world.inject(Fault::WriteError, 0);
    rig.write(1).unwrap();
    rig.drain();
    assert_eq!(rig.segments.watermark(), 106);
    assert!(is_no_segment(rig.submit()));
    assert_eq!(rig.segments.in_flight(), 0);
    rig.release(1, 1);
    rig.drain();
    assert_eq!(rig.segments.watermark(), 107);
    assert_eq!(rig.places()[6], (1, 3, 0));
}

#[test]
fn full_file_system_refuses_and_is_asked_again() {
    let world = SimWorld::new(6);
    world.set_capacity_bytes(Some(2 * SEGMENT_BYTES));
    let mut rig = Rig::new(&world, 10, false);
    assert!(is_no_segment(rig.write(11)));
    rig.drain();
    assert_eq!(rig.durable.len(), 10);
    assert!(matches!(rig.segments.health(), Health::Healthy));
    world.set_capacity_bytes(None);
    let refusals = (0..1000).take_while(|_| is_no_segment(rig.submit())).count();
    assert!((1..1000).contains(&refusals), "{refusals}");
    rig.drain();

    world.set_capacity_bytes(Some(3 * SEGMENT_BYTES));
    assert!(is_no_segment(rig.write(10)));
    rig.release(1, 1);
    rig.write(1).unwrap();
}

#[test]
fn broken_creation_is_tried_again_once() {
    for (failures, sick) in [(1, false), (2, true)] {
        let world = SimWorld::new(6);
        let mut rig = Rig::new(&world, 10, false);
        rig.log.fail(failures);
        let written = rig.write(3);
        assert_eq!(matches!(written, Err(RefusedReason::Sick(_))), sick);
        rig.drain();
        assert_eq!(rig.durable.len(), if sick { 0 } else { 3 });
        if !sick {
            assert_eq!(rig.places()[0], (1, 2, 0), "the epoch of the failed record is not used");
        }
    }
}

#[test]
fn unknown_file_is_left_alone() {
    let world = SimWorld::new(6);
    world.set_contents(&segment_name(1), b"somebody's".to_vec());
    let mut rig = Rig::new(&world, 2, false);
    rig.write(5).unwrap();
    rig.drain();
    assert_eq!(rig.places()[0].0, 2);
    assert!(is_no_segment(rig.submit()));
    assert_eq!(world.contents(&segment_name(1)).unwrap(), b"somebody's");
}

#[test]
fn blocks_in_flight_survive_the_loss_of_the_next_segment() {
    let world = SimWorld::new(8);
    let mut rig = Rig::new(&world, 10, false);
    rig.write(2).unwrap();
    rig.drain();
    rig.log.fail(100);
    rig.write(3).unwrap();
    assert!(matches!(rig.write(1), Err(RefusedReason::Sick(_))));
    assert_eq!(rig.durable.len(), 5);
    assert!(rig.segments.take_lost().is_empty());
}

#[test]
fn cut_that_cannot_be_recorded_is_a_loss() {
    let world = SimWorld::new(8);
    let mut rig = Rig::new(&world, 10, false);
    rig.write(4).unwrap();
    rig.drain();
    rig.log.fail(1);
    world.inject(Fault::WriteError, 0);
    rig.submit().unwrap();
    rig.drain();
    assert!(matches!(rig.submit(), Err(RefusedReason::Sick(_))));
    assert_eq!(rig.segments.take_lost().into_iter().map(|lost| lost.0).collect::<Vec<_>>(), [104]);
}

#[test]
fn releasing_the_open_segment_waits_for_its_writes() {
    let mut rig = Rig::new(&SimWorld::new(8), 1, false);
    rig.world.hold(true);
    rig.write(2).unwrap();
    rig.release(1, 1);
    assert_eq!(rig.segments.open_segment(), None);
    assert!(is_no_segment(rig.submit()));
    rig.world.hold(false);
    rig.drain();
    rig.write(1).unwrap();
    rig.drain();
    assert_eq!(rig.places(), [(1, 1, 0), (1, 1, 1), (1, 2, 0)]);
}

#[test]
fn sealed_segment_takes_no_more_and_can_be_released() {
    let mut rig = Rig::new(&SimWorld::new(8), 2, false);
    rig.write(1).unwrap();
    rig.segments.seal_open_segment();
    rig.write(1).unwrap();
    rig.drain();
    assert_eq!(rig.places(), [(1, 1, 0), (2, 2, 0)]);
    rig.release(1, 1);
    rig.segments.seal_open_segment();
    rig.write(1).unwrap();
    rig.drain();
    assert_eq!(rig.places()[2], (1, 3, 0));
}

#[test]
fn spare_is_acquired_ahead_and_may_be_released() {
    let mut rig = Rig::new(&SimWorld::new(8), 2, false);
    rig.write(2).unwrap();
    assert_eq!(rig.segments.spare_segment(), None);
    rig.write(1).unwrap();
    assert_eq!(rig.segments.spare_segment(), Some((2, 2)));
    rig.release(2, 2);
    assert_eq!(rig.segments.spare_segment(), None);
    rig.write(3).unwrap();
    rig.drain();
    assert_eq!(rig.places()[5], (2, 3, 0));
}

#[test]
fn helper_thread_makes_segments_ready() {
    for seed in 0..20 {
        let world = SimWorld::new(seed);
        world.set_real_time(true);
        let mut rig = Rig::new(&world, 3, true);
        rig.segments.prepare();
        if seed % 2 == 1 {
            world.inject(Fault::WriteError, seed);
        }
        for _ in 0..8 {
            while let Err(reason) = rig.write(5) {
                assert!(matches!(reason, RefusedReason::NoSegment), "{reason:?}");
                rig.drain();
                for (segment, epoch) in rig.releasable() {
                    rig.release(segment, epoch);
                }
            }
        }
        rig.drain();
        assert_eq!(rig.durable.len() as u64, rig.segments.next_number() - 100);
        assert!(rig.durable.len() >= 40);
    }
}

#[test]
fn segment_released_while_it_is_made_ready_is_not_used_under_that_epoch() {
    let world = SimWorld::new(1);
    world.set_real_time(true);
    let mut rig = Rig::new(&world, 1, true);
    // The record waits for this lock, so the segment is not ready before the release.
    let log = rig.log.clone();
    let held = log.0.lock().unwrap();
    rig.segments.prepare();
    rig.segments.release(1, 1);
    drop(held);
    rig.write(1).unwrap();
    rig.drain();
    assert_eq!(rig.places(), [(1, 2, 0)]);
}

#[test]
fn panic_of_the_helper_makes_the_device_sick() {
    struct Panics;
    impl Journal for Panics {
        fn acquired(&mut self, _: u32, _: u64) -> io::Result<()> {
            panic!("injected")
        }
        fn cut(&mut self, _: u64, _: u64) -> io::Result<()> {
            Ok(())
        }
    }
    let world = SimWorld::new(1);
    world.set_real_time(true);
    let config = SegmentConfig {
        directory: DIRECTORY,
        segment_bytes: SEGMENT_BYTES,
        segments_max: 3,
        background: true,
    };
    let disk = Box::new(world.disk(4, Durability::Power));
    let seal: SealFn = Box::new(|_, _| ());
    let mut segments = Segments::new(disk, world.files(), Box::new(Panics), seal, config, Vec::new(), 1, 0);
    loop {
        match segments.submit(payload(0, BLOCK_BYTES), BLOCK_BYTES).unwrap_err().reason {
            RefusedReason::Sick(_) => break,
            RefusedReason::Preparing => segments.poll(Duration::from_secs(3600), &mut Vec::new()),
            reason => panic!("{reason:?}"),
        }
    }
}

/// A disk whose engine breaks with writes in flight.
struct Breaks(SimDisk, Arc<Mutex<bool>>);

impl Disk for Breaks {
    fn open(&mut self, name: &str) -> io::Result<FileSlot> {
        self.0.open(name)
    }
    fn close(&mut self, file: FileSlot) {
        self.0.close(file);
    }
    fn submit(&mut self, write: Write) -> Result<(), Write> {
        self.0.submit(write)
    }
    fn wait(&mut self, timeout: Duration, completions: &mut Vec<Completion>) -> io::Result<()> {
        if *self.1.lock().unwrap() {
            return Err(io::Error::other("the engine broke"));
        }
        self.0.wait(timeout, completions)
    }
    fn waker(&self) -> WakeFn {
        self.0.waker()
    }
    fn depth(&self) -> usize {
        self.0.depth()
    }
    fn in_flight(&self) -> usize {
        self.0.in_flight()
    }
    fn info(&self) -> EngineInfo {
        self.0.info()
    }
}

#[test]
fn broken_engine_gives_back_what_it_does_not_hold() {
    let world = SimWorld::new(1);
    let broken = Arc::new(Mutex::new(false));
    let disk = Box::new(Breaks(world.disk(4, Durability::Power), broken.clone()));
    let mut rig = Rig::over(&world, disk, 3, false, Vec::new());
    rig.write(4).unwrap();
    *broken.lock().unwrap() = true;
    let before = rig.segments.watermark();
    let flying = rig.segments.in_flight();
    rig.drain();
    assert!(matches!(rig.submit(), Err(RefusedReason::Sick(_))));
    let lost = rig.segments.take_lost();
    assert_eq!(lost.len() + flying, (104 - before) as usize);
}

#[test]
fn crash_at_any_operation_loses_nothing_reported() {
    for crash in [Crash::Process, Crash::Power] {
        for skip in 0..40 {
            for seed in 0..4 {
                let world = SimWorld::new(seed);
                let mut rig = Rig::new(&world, 12, false);
                world.inject(Fault::WriteError, seed * 5);
                world.crash_at(skip, crash);
                // The crash may make the device sick before all are taken.
                let _ = rig.write(20);
                rig.drain();
                rig.assert_recoverable();
            }
        }
    }
}

#[test]
fn random_histories_keep_the_invariants() {
    let (mut sick, mut complete) = (0, 0);
    for seed in 0..400 {
        let world = SimWorld::new(seed);
        let mut rng = SimRng::new(seed);
        let mut rig = Rig::new(&world, 6, false);
        world.set_fault(Fault::ShortWrite, 100);
        world.set_fault(Fault::WriteError, [0, 10, 50][rng.below(3) as usize]);
        world.set_fault(Fault::CreateNoSpace, [0, 100][rng.below(2) as usize]);
        world.set_fault(Fault::FilesError, [0, 20][rng.below(2) as usize]);
        for _ in 0..200 {
            match rng.below(8) {
                0..=4 => drop(rig.submit()),
                5 | 6 => rig.poll(),
                _ => {
                    let spare = rig.segments.spare_segment();
                    let mut live = rig.releasable();
                    live.retain(|used| Some(*used) != spare);
                    if live.len() >= 3 {
                        rig.release(live[0].0, live[0].1);
                    }
                }
            }
        }
        for _ in 0..100 {
            rig.poll();
        }
        let lost = rig.segments.take_lost();
        match rig.segments.health() {
            Health::Sick(_) => {
                sick += 1;
                let end = rig.segments.watermark() + lost.len() as u64;
                assert_eq!(end, rig.segments.next_number());
            }
            Health::Healthy => {
                assert!(lost.is_empty());
                complete += u32::from(rig.segments.watermark() == rig.segments.next_number());
            }
        }
    }
    assert!(sick > 10 && complete > 200, "{sick} sick, {complete} complete");
}

#[test]
fn names_are_parsed_strictly() {
    for segment in [0, 1, 99_999_999, 100_000_000, u32::MAX] {
        assert_eq!(parse_segment_name(&segment_name(segment)), Some(segment));
    }
    assert_eq!(segment_name(1), "segment-00000001");
    for name in ["segment-1", "segment-+0000001", "segment-000000001", "segment-00000001.x", "segment-", "x"]
    {
        assert_eq!(parse_segment_name(name), None, "{name}");
    }
}

#[test]
fn reader_reads_any_range() {
    let world = SimWorld::new(1);
    let bytes: Vec<u8> = (0..3 << 20).map(|index: u32| (index / 4096) as u8).collect();
    world.set_contents(&segment_name(1), bytes.clone());
    let mut reader = SegmentReader::new(world.files(), 1);
    for (offset, len) in [(0, 4096), (4096, 8192), ((1 << 20) - 4096, 8192), (0, 2 << 20), (3 << 20, 1)] {
        assert_eq!(reader.read(offset as u64, len).unwrap(), bytes[offset..bytes.len().min(offset + len)]);
    }
    assert_eq!(reader.read((3 << 20) - 10, 4096).unwrap().len(), 10);
    assert!(reader.read(u64::MAX, 10).unwrap().is_empty());
    assert!(SegmentReader::new(world.files(), 2).read(0, 1).is_err());
}
