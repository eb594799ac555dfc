//! The example `nexmark`, a streaming job with checkpoints, in three S3 buckets: killed again and again, restarted with
//! another number of threads, and exact all the same.
//!
//! The job is a process of its own, this program again, killed by SIGKILL. On the way checkpoints are declined, a bucket
//! is dead for a while, and the local disk is full for a while. What the state has to be is known from a plain fold over
//! the same events: it is compared after each restart, and at the end with a run without failures, too. In the end every
//! object in the buckets must be one that the last checkpoint needs; and none is left when that is discarded.
//!
//! The local directory is on a file system of its own with a few megabytes, if this user may have one; else only
//! `local_bytes` is small. `TIDELOG_KILLS` is the number of kills (6), `TIDELOG_SEED` repeats the random choices,
//! `TIDELOG_SMALL_DISK=never` goes without the file system.
#![forbid(unsafe_code)]

#[path = "../../examples/nexmark/job/mod.rs"]
mod job;
#[path = "nexmark/life.rs"]
mod life;

use std::collections::BTreeSet;
use std::env;
use std::fs::{self, File};
use std::io::{ErrorKind, Write as _};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use job::checkpoint::{Checkpoint, Folder};
use job::source::bids;
use job::state::{Bid, State};
use life::{Life, Plan, field};
use tidelog_testing::{Fault, Rule, S3Server, ServerOptions};
use tidelog_upload::Operation;

const NAME: &str = "killed_again_and_again_the_job_is_exact";
const BUCKETS: [&str; 3] = ["bucket-0", "bucket-1", "bucket-2"];
/// Set where the local directory is on a small file system, to its root.
const SMALL_DISK: &str = "TIDELOG_NEXMARK_DISK";
/// How long something may take that has to happen.
const PATIENCE: Duration = Duration::from_secs(60);

#[test]
fn killed_again_and_again_the_job_is_exact() {
    if let Ok(plan) = env::var(life::PLAN) {
        life::run(&plan);
    }
    if env::var_os(SMALL_DISK).is_some() || !on_a_small_disk() {
        Trial::new().run();
    }
}

/// Runs this test again with a small file system, which only that process and its children see. `false` if it may not be.
fn on_a_small_disk() -> bool {
    if env::var("TIDELOG_SMALL_DISK").is_ok_and(|wanted| wanted == "never") {
        return false;
    }
    let dir = tempfile::tempdir().unwrap();
    let inside = |script: &str| {
        let mut command = Command::new("unshare");
        let mount = format!("mount -t tmpfs -o size=12m none \"$0\" && {script}");
        command.args(["--user", "--map-root-user", "--mount", "sh", "-c", &mount]).arg(dir.path());
        command
    };
    if !inside("true").output().is_ok_and(|output| output.status.success()) {
        println!("a file system cannot be mounted here: only local_bytes is small");
        return false;
    }
    let program = env::current_exe().unwrap();
    let output = inside("exec \"$@\"")
        .arg(program)
        .args(["--exact", NAME, "--nocapture"])
        .env(SMALL_DISK, dir.path())
        .output()
        .unwrap();
    println!("{}", String::from_utf8_lossy(&output.stdout));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    true
}

/// SplitMix64.
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % end
    }

    fn pause(&mut self, milliseconds: u64) {
        std::thread::sleep(Duration::from_micros(self.below(milliseconds * 1000)));
    }
}

/// What the state has to be: a fold over the events.
struct Fold {
    state: State,
    offset: u64,
    bids: Box<dyn Iterator<Item = Option<Bid>>>,
}

impl Fold {
    fn digest_at(&mut self, offset: u64) -> String {
        assert!(offset >= self.offset, "the job went back, from {} to {offset}", self.offset);
        for bid in self.bids.by_ref().take((offset - self.offset) as usize).flatten() {
            self.state.put(bid.key, self.state.after(bid));
        }
        self.offset = offset;
        format!("{:016x}", self.state.digest())
    }
}

/// What is done to the job in one life.
#[derive(Clone, Copy, Debug)]
enum Trouble {
    None,
    DeadBucket,
    FullDisk,
}

/// What was met, over all lives.
#[derive(Debug, Default)]
struct Tally {
    restored: u64,
    complete: u64,
    declined: u64,
    failed: u64,
    dead_buckets: u64,
    full_disks: u64,
    /// The file system itself was full.
    out_of_space: u64,
    /// Starts that failed for lack of space.
    refused: u64,
    /// Over these the job went on, without a restart.
    overcome: u64,
}

struct Trial {
    server: S3Server,
    home: PathBuf,
    small_disk: Option<PathBuf>,
    random: Random,
    fold: Fold,
    tally: Tally,
    /// The newest checkpoint that the job said to be complete.
    complete: u64,
    _dir: tempfile::TempDir,
}

fn server(seed: u64) -> S3Server {
    let buckets = BUCKETS.map(str::to_owned).to_vec();
    S3Server::start(ServerOptions { buckets, seed, ..ServerOptions::default() }).unwrap()
}

fn number_of(name: &str) -> Option<u64> {
    env::var(name).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{name} is a number")))
}

impl Trial {
    fn new() -> Trial {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos() as u64;
        let seed = number_of("TIDELOG_SEED").unwrap_or(now);
        println!("TIDELOG_SEED={seed}");
        let dir = tempfile::tempdir().unwrap();
        Trial {
            server: server(seed),
            home: dir.path().to_owned(),
            small_disk: env::var_os(SMALL_DISK).map(PathBuf::from),
            random: Random(seed),
            fold: Fold { state: State::default(), offset: 0, bids: Box::new(bids(0)) },
            tally: Tally::default(),
            complete: 0,
            _dir: dir,
        }
    }

    fn run(mut self) {
        let kills = number_of("TIDELOG_KILLS").unwrap_or(6);
        for cycle in 0..kills {
            let trouble = [Trouble::FullDisk, Trouble::DeadBucket, Trouble::None][cycle as usize % 3];
            self.live_and_die(cycle, trouble);
        }
        let (end, digest) = self.run_to_the_end();
        let alone = self.run_without_failures(end);
        assert_eq!(digest, alone, "a run without failures has another state");
        self.check_buckets();
        println!("{kills} kills, {end} events: {:?}", self.tally);
        let Tally { declined, dead_buckets, full_disks, out_of_space, overcome, .. } = self.tally;
        assert!(dead_buckets >= kills / 3 && full_disks >= kills / 3, "a trouble was not met");
        assert!(declined >= kills / 6 && overcome >= kills / 6);
        assert!(out_of_space >= kills / 6 || self.small_disk.is_none(), "the file system was never full");
    }

    fn plan(&mut self, cycle: u64) -> Plan {
        // On the small file system that one is the limit in every other life.
        let local_bytes =
            if self.small_disk.is_some() && cycle.is_multiple_of(2) { 64 << 20 } else { 4 << 20 };
        Plan {
            what: "run".to_owned(),
            endpoint: self.server.endpoint(),
            local: self.small_disk.as_deref().unwrap_or(&self.home).join("local"),
            checkpoints: self.home.join("checkpoints"),
            local_bytes,
            threads: 1 + self.random.below(4) as u16,
            events: u64::MAX,
            events_per_second: 150_000,
            materialize_every: 5,
            declined_percent: 25,
            seed: self.random.below(u64::MAX),
        }
    }

    /// One life of the job, from the newest checkpoint to SIGKILL.
    fn live_and_die(&mut self, cycle: u64, trouble: Trouble) {
        let started_at = Instant::now();
        let plan = self.plan(cycle);
        if self.small_disk.as_ref().is_some_and(|disk| disk.join("filler").exists()) {
            self.start_on_a_full_disk(&plan);
        }
        let mut life = Life::start(&plan);
        // What the last life left is over some time in this one.
        self.random.pause(200);
        self.end_trouble();
        let met = match trouble {
            Trouble::None if (cycle / 3).is_multiple_of(2) => {
                // Mostly killed while it opens, restores, or begins.
                self.random.pause(400);
                String::new()
            }
            Trouble::None => {
                life.until("a checkpoint is declined", PATIENCE, |line| line.starts_with("declined"));
                self.random.pause(500);
                String::new()
            }
            Trouble::DeadBucket => self.dead_bucket(&mut life, (cycle / 3).is_multiple_of(2)),
            Trouble::FullDisk => {
                let overcome = self.random.below(2) == 0;
                self.full_disk(&mut life, overcome)
            }
        };
        let said = life.kill();
        let exact = self.check(&said);
        let count = |word: &str| said.iter().filter(|line| line.starts_with(word)).count() as u64;
        let (complete, declined, failed) = (count("complete"), count("declined"), count("failed"));
        self.tally.complete += complete;
        self.tally.declined += declined;
        self.tally.failed += failed;
        println!(
            "cycle {cycle}: {} threads, {exact}; {complete} complete, {declined} declined, {failed} failed{met}; killed after {:.1} s",
            plan.threads,
            started_at.elapsed().as_secs_f64(),
        );
        for line in said.iter().filter(|line| line.starts_with("failed")) {
            println!("    {line}");
        }
    }

    /// There is no room for so much as a manifest: the job says so, or it goes on for a while.
    fn start_on_a_full_disk(&mut self, plan: &Plan) {
        match Life::start(plan).end_or_kill(Duration::from_millis(500)) {
            Ok(said) => drop(self.check(&said)),
            Err(story) => {
                assert!(story.contains("No space left on device"), "{story}");
                self.tally.refused += 1;
            }
        }
        self.remove_filler();
    }

    /// What a life said is true.
    fn check(&mut self, said: &[String]) -> String {
        let restored = said.iter().find(|line| line.starts_with("restored"));
        let exact = match restored {
            None => "killed before it restored".to_owned(),
            Some(line) => {
                let (checkpoint, offset): (u64, u64) =
                    (field(line, "checkpoint").parse().unwrap(), field(line, "offset").parse().unwrap());
                assert!(checkpoint >= self.complete, "checkpoint {} was complete: {line}", self.complete);
                assert_eq!(field(line, "digest"), self.fold.digest_at(offset), "{line}");
                self.tally.restored += 1;
                format!(
                    "restored checkpoint {checkpoint} of {} parts at {offset}, exact",
                    field(line, "parts")
                )
            }
        };
        for line in said.iter().filter(|line| line.starts_with("complete")) {
            self.complete = self.complete.max(field(line, "checkpoint").parse().unwrap());
        }
        exact
    }

    /// One bucket gives no answer. Checkpoints go on.
    fn dead_bucket(&mut self, life: &mut Life, overcome: bool) -> String {
        life.until("it has restored", PATIENCE, |line| line.starts_with("restored"));
        self.random.pause(300);
        life.until("a checkpoint is complete", PATIENCE, |line| line.starts_with("complete"));
        // The one that is in use.
        let requests = self.server.requests();
        let last = requests.iter().rfind(|request| request.operation == Operation::Put);
        let (before, bucket) = (requests.len(), last.expect("a checkpoint is an object").bucket.clone());
        self.server.add_rule(Rule::new(Fault::Hang).bucket(&bucket));
        let met = |server: &S3Server| {
            server.requests()[before..].iter().filter(|request| request.bucket == bucket).count()
        };
        let started_at = Instant::now();
        while met(&self.server) == 0 && started_at.elapsed() < PATIENCE {
            life.until("a checkpoint is complete", PATIENCE, |line| line.starts_with("complete"));
        }
        // Those that were begun before do not count.
        for _ in 0..2 {
            life.until("a checkpoint is complete", PATIENCE, |line| line.starts_with("complete"));
        }
        let requests = met(&self.server);
        self.tally.dead_buckets += u64::from(requests > 0);
        if overcome {
            self.end_trouble();
            life.until("a checkpoint is complete", PATIENCE, |line| line.starts_with("complete"));
            self.tally.overcome += 1;
        }
        self.random.pause(500);
        let how = if overcome { "overcome" } else { "dead to the end" };
        format!(", {bucket} dead for {requests} requests, {how}")
    }

    /// Nothing leaves the disk, because all buckets refuse it, and there is no room left.
    fn full_disk(&mut self, life: &mut Life, overcome: bool) -> String {
        life.until("it has restored", PATIENCE, |line| line.starts_with("restored"));
        self.random.pause(300);
        for operation in [Operation::Put, Operation::Create, Operation::PutPart] {
            self.server.add_rule(Rule::new(Fault::SlowDown).operation(operation));
        }
        if let Some(disk) = &self.small_disk {
            fill(disk);
        }
        let full = life.until("an append finds no room", PATIENCE, |line| {
            line.starts_with("full") && (field(line, "high_water") != "0" || field(line, "no_space") != "0")
        });
        self.tally.full_disks += 1;
        self.random.pause(500);
        if overcome {
            self.end_trouble();
            life.until("a checkpoint is complete", PATIENCE, |line| line.starts_with("complete"));
            life.until("a checkpoint is complete", PATIENCE, |line| line.starts_with("complete"));
            self.tally.overcome += 1;
            self.random.pause(300);
        }
        let how = if overcome { "overcome" } else { "full to the end" };
        let (high_water, no_space) = (field(&full, "high_water"), field(&full, "no_space"));
        self.tally.out_of_space += u64::from(no_space != "0");
        format!(", disk full ({high_water} times at the limit, {no_space} times without space), {how}")
    }

    fn end_trouble(&self) {
        self.server.clear_rules();
        self.remove_filler();
    }

    fn remove_filler(&self) {
        if let Some(disk) = &self.small_disk {
            // It may be gone already.
            let _ = fs::remove_file(disk.join("filler"));
        }
    }

    fn newest(&self) -> Checkpoint {
        Folder::open(&self.home.join("checkpoints")).unwrap().newest().unwrap().unwrap_or_default()
    }

    /// A last life, with no trouble. Gives the number of events and the digest.
    fn run_to_the_end(&mut self) -> (u64, String) {
        self.end_trouble();
        let events = self.newest().offset + 100_000;
        // Two workers that take turns: soon nothing restored is needed, but always some changes of one of them. Of a
        // restored log, objects would stay that hold changes after what the checkpoint needs.
        let plan = Plan { events, threads: 2, materialize_every: 2, declined_percent: 0, ..self.plan(1) };
        let said = Life::start(&plan).end();
        println!("last: {} threads, {}", plan.threads, self.check(&said));
        let done = said.iter().find(|line| line.starts_with("done")).expect("it was not killed");
        let digest = field(done, "digest").to_owned();
        assert_eq!(digest, self.fold.digest_at(events), "{done}");
        (events, digest)
    }

    /// In buckets of its own.
    fn run_without_failures(&mut self, events: u64) -> String {
        let server = server(1);
        let dir = tempfile::tempdir().unwrap();
        let (local, checkpoints) = (dir.path().join("local"), dir.path().join("checkpoints"));
        let (endpoint, local_bytes, declined_percent) = (server.endpoint(), 64 << 20, 0);
        let plan =
            Plan { endpoint, local, checkpoints, local_bytes, declined_percent, events, ..self.plan(1) };
        let said = Life::start(&plan).end();
        let done = said.iter().find(|line| line.starts_with("done")).expect("it was not killed");
        field(done, "digest").to_owned()
    }

    /// The buckets hold what the newest checkpoint needs, and nothing once that is discarded.
    fn check_buckets(&mut self) {
        let newest = self.newest();
        let mut needed = BTreeSet::new();
        for part in &newest.parts {
            for (bucket, object) in part.handle.objects() {
                let bucket = bucket.strip_prefix("s3://").and_then(|url| url.split('/').next()).unwrap();
                needed.insert(format!("{bucket}/state/{object}"));
            }
        }
        assert!(!needed.is_empty());
        let plan = Plan { what: "open".to_owned(), ..self.plan(1) };
        let life = Life::start(&plan);
        self.wait_for_objects(&needed);
        life.end();
        let life = Life::start(&Plan { what: "discard".to_owned(), ..plan });
        self.wait_for_objects(&BTreeSet::new());
        life.end();
        self.wait_for_objects(&BTreeSet::new());
        println!("{} objects were needed by the last checkpoint, and none but them was there", needed.len());
    }

    fn wait_for_objects(&self, needed: &BTreeSet<String>) {
        let started_at = Instant::now();
        loop {
            let mut there = BTreeSet::new();
            for bucket in BUCKETS {
                there.extend(
                    self.server.objects(bucket).iter().map(|object| format!("{bucket}/{}", object.name)),
                );
                there.extend(
                    self.server
                        .uploads(bucket)
                        .iter()
                        .map(|upload| format!("{bucket}/{} (upload)", upload.name)),
                );
            }
            assert!(there.is_superset(needed), "missing: {:?}", needed.difference(&there));
            if there == *needed {
                return;
            }
            let strays: Vec<&String> = there.difference(needed).collect();
            assert!(started_at.elapsed() < PATIENCE, "nobody needs {strays:?}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

/// Takes all room on a file system.
fn fill(disk: &Path) {
    let mut filler = File::create(disk.join("filler")).unwrap();
    loop {
        match filler.write_all(&[0; 4096]) {
            Ok(()) => {}
            Err(error) if error.kind() == ErrorKind::StorageFull => return,
            Err(error) => panic!("the disk cannot be filled: {error}"),
        }
    }
}
