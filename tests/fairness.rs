//! Every lane is drained in its turn, also while there is room for less than one of them has to say.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tidelog::{Changelog, KeyGroup, KeyGroupRange, Options, Seams};
use tidelog_io::disk::Durability;
use tidelog_io::sim::{SimRng, SimWorld};
use tidelog_upload::sim::SimStore;

#[test]
fn a_lane_that_never_falls_silent_does_not_starve_the_others() {
    // A device that takes one block at a time.
    let world = SimWorld::new(7);
    let options = Options::new("sim://bucket", "/sim")
        .lane_bytes(64 << 10)
        .block_bytes(8 << 10)
        .writes_in_flight(1)
        .segment_bytes(64 << 10)
        .local_bytes(8 << 20)
        .part_bytes(1 << 20)
        .value_bytes_max(1 << 20)
        .memory_bytes(4 << 20)
        .preemptive_upload(false)
        .linger(Duration::from_secs(3600));
    let disk = Box::new(world.disk(1, Durability::Power));
    let start = Instant::now();
    let mut random = SimRng::new(1);
    let seams = Seams {
        directories: vec![(world.files(), disk)],
        stores: vec![Arc::new(SimStore::new(3))],
        clock: Arc::new(move || start),
        random: Box::new(move || random.next_u64()),
    };
    let changelog = Changelog::open_simulated(options, seams).unwrap();
    // Two threads, so two lanes: the loud one's is full before each step.
    std::thread::scope(|scope| {
        let (to_quiet, quiet_in) = std::sync::mpsc::channel::<()>();
        let (done, quiet_done) = std::sync::mpsc::channel();
        let mut loud = changelog.create_writer("loud", KeyGroupRange::ALL).unwrap();
        while loud.try_append(KeyGroup(0), &[1; 1000]).is_ok() {}
        let changelog = &changelog;
        scope.spawn(move || {
            let mut quiet = changelog.create_writer("quiet", KeyGroupRange::ALL).unwrap();
            quiet.append(KeyGroup(0), &[2; 1000]).unwrap();
            let pending = quiet.sync();
            done.send((quiet, pending)).unwrap();
            quiet_in.recv().unwrap();
        });
        let (_quiet, mut pending) = quiet_done.recv().unwrap();
        let mut steps = 0;
        loop {
            while loud.try_append(KeyGroup(0), &[1; 1000]).is_ok() {}
            changelog.step();
            pending = match pending.wait_timeout(Duration::ZERO) {
                Ok(answer) => break answer.map(|_| ()).unwrap(),
                Err(pending) => pending,
            };
            steps += 1;
            assert!(steps < 200, "the quiet lane starves");
        }
        to_quiet.send(()).unwrap();
    });
}
