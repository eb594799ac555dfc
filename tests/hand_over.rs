//! A log whose writer moves between threads, drained by way of the lane that it left.
#![forbid(unsafe_code)]

use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use tidelog::{Changelog, Durability, KeyGroup, KeyGroupRange, Options, Seams, SequenceNumber};
use tidelog_io::sim::SimWorld;
use tidelog_upload::sim::SimStore;

const LANE_BYTES: usize = 64 << 10;
/// With its header, eight of these fill a lane but for 1472 bytes.
const VALUE: [u8; 8000] = [7; 8000];

fn simulated(world: &SimWorld) -> Changelog {
    let mut next = 0;
    let seams = Seams {
        directories: vec![(world.files(), Box::new(world.disk(16, Durability::Power)))],
        stores: vec![Arc::new(SimStore::new(1))],
        clock: Arc::new(Instant::now),
        random: Box::new(move || {
            next += 1;
            next
        }),
    };
    let options = Options::new("sim://1", "/simulated")
        .lane_bytes(LANE_BYTES)
        .append_wait_max(Duration::ZERO)
        .segment_bytes(1 << 20)
        .local_bytes(4 << 20);
    Changelog::open_simulated(options, seams).expect("a simulated machine opens")
}

/// The spiller drains the old lane up to where the writer left it and not a byte further, also where the way there leads
/// over the end of a lap.
#[test]
fn the_way_to_a_hand_over_may_lead_over_the_end_of_a_lap() {
    let world = SimWorld::new(1);
    let changelog = simulated(&world);
    // This thread's lane comes first, so that the spiller meets the marker before it drains the other lane.
    let mut first = changelog.create_writer("first", KeyGroupRange::ALL).unwrap();
    let moved = Barrier::new(2);
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        let (changelog, moved) = (&changelog, &moved);
        let stays = scope.spawn(move || {
            let mut moves = changelog.create_writer("moves", KeyGroupRange::ALL).unwrap();
            let mut stays = changelog.create_writer("stays", KeyGroupRange::ALL).unwrap();
            for _ in 0..7 {
                moves.append(KeyGroup(1), &VALUE).unwrap();
            }
            changelog.step();
            for _ in 0..2 {
                moves.append(KeyGroup(1), &VALUE).unwrap();
            }
            sender.send(moves).unwrap();
            moved.wait();
            stays.append(KeyGroup(1), &VALUE).unwrap();
            stays
        });
        let mut moves = receiver.recv().unwrap();
        moves.append(KeyGroup(1), &VALUE).unwrap();
        moved.wait();
        let stays = stays.join().unwrap();
        first.append(KeyGroup(1), &VALUE).unwrap();
        for writer in [&moves, &stays, &first] {
            let sync = writer.sync();
            changelog.step();
            changelog.step();
            sync.wait_timeout(Duration::from_secs(10)).expect("two steps write what there is").unwrap();
        }
        assert_eq!(moves.durable_sequence_number(), SequenceNumber(10));
        assert_eq!(stays.durable_sequence_number(), SequenceNumber(1));
        assert_eq!(first.durable_sequence_number(), SequenceNumber(1));
    });
}
