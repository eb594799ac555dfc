//! A long life: very many checkpoints in one thread and virtual time, that overlap, are declined, confirmed late, truncated
//! past; on buckets that fail, lose answers and are slow; with restarts and crashes. All the time the complete checkpoints
//! that are kept can be read. At the end nothing is in the buckets, and memory is where it was.

use std::cell::Cell;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use tidelog::{
    Changelog, ChangelogHandle, ChangelogReader, ChangelogWriter, KeyGroup, KeyGroupRange, LogId,
    PersistFuture, RecoveredLog, SequenceNumber,
};
use tidelog_io::sim::{Crash, SimRng};
use tidelog_upload::sim::Chances;
use tidelog_upload::{Operation, Store};

use crate::allocator::Telling;
use crate::machine::{Machine, Shape};

const WRITERS: u64 = 4;
/// Complete checkpoints that are kept.
const RETAINED: usize = 3;
/// One in so many is followed by a restart.
const CHECKPOINTS_PER_LIFE: u64 = 500;
/// Steps of a machine until something must have happened.
const STEPS_MAX: usize = 10_000;
const STEP: Duration = Duration::from_millis(5);
/// How much more the simulated disk may take in later lives: the room that is kept there for the manifest's successor
/// follows the longest manifest, which is written anew when it has grown by 1 MiB.
const RESERVE_GROWTH_BYTES: i64 = 2 << 20;

thread_local! {
    /// How many bytes the thread has and has not given back.
    static LIVE_BYTES: Cell<i64> = const { Cell::new(0) };
}

fn count(taken: usize, given: usize) {
    // A thread that ends may still free memory when its storage is gone.
    let _ = LIVE_BYTES.try_with(|live| live.set(live.get() + taken as i64 - given as i64));
}

#[global_allocator]
static ALLOCATOR: Telling = Telling(count);

/// What a job's workers have to do with each other.
struct Job {
    machine: Machine,
    rng: SimRng,
    changelog: Option<Changelog>,
    writers: Vec<Worker>,
    /// Left by an earlier life, and needed until a checkpoint of this one is complete.
    before: Vec<RecoveredLog>,
    asked: VecDeque<Asked>,
    complete: VecDeque<Complete>,
    /// Confirmed when that checkpoint is reached.
    late: VecDeque<(u64, Vec<SequenceNumber>)>,
    checkpoint: u64,
    declined: u64,
    /// How many bytes were in use, each time that everything had just been opened.
    memory: Vec<i64>,
}

struct Worker {
    writer: ChangelogWriter,
    truncated: SequenceNumber,
}

struct Asked {
    number: u64,
    futures: Vec<Option<PersistFuture>>,
    handles: Vec<ChangelogHandle>,
}

struct Complete {
    life: usize,
    holder: String,
    handles: Vec<ChangelogHandle>,
}

/// The value of a change follows from where it is.
fn value(log: LogId, number: SequenceNumber) -> Vec<u8> {
    let mut rng = SimRng::new(log.0 as u64 ^ number.0.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let words = 1 + rng.below(6) as usize;
    (0..words).flat_map(|_| rng.next_u64().to_le_bytes()).collect()
}

impl Job {
    fn new(seed: u64) -> Job {
        let shape = Shape { buckets: vec![Shape::smallest().buckets[0].clone(); 2], ..Shape::smallest() };
        Job {
            machine: Machine::new(seed, shape, None),
            rng: SimRng::new(seed),
            changelog: None,
            writers: Vec::new(),
            before: Vec::new(),
            asked: VecDeque::new(),
            complete: VecDeque::new(),
            late: VecDeque::new(),
            checkpoint: 0,
            declined: 0,
            memory: Vec::new(),
        }
    }

    fn changelog(&self) -> &Changelog {
        self.changelog.as_ref().expect("it is open")
    }

    fn open(&mut self) {
        let changelog = self.machine.open().expect("the disk is sound");
        self.before = changelog.recovered().to_vec();
        self.changelog = Some(changelog);
        for store in &self.machine.stores {
            drop(store.take_stats());
        }
        self.memory.push(LIVE_BYTES.get());
        let create = |index| {
            let range = KeyGroupRange::new((index * 4) as u16, (index * 4 + 3) as u16).expect("a range");
            let writer = self.changelog().create_writer(format!("worker-{index}"), range);
            Worker { writer: writer.expect("the manifest is sound"), truncated: SequenceNumber::ZERO }
        };
        self.writers = (0..WRITERS).map(create).collect();
    }

    fn step(&mut self) {
        self.machine.pass(STEP);
        self.changelog().step();
    }

    fn append(&mut self) {
        for index in 0..self.writers.len() {
            for _ in 0..self.rng.below(4) {
                let worker = &mut self.writers[index].writer;
                let key_group = KeyGroup(worker.key_groups().first().0 + self.rng.below(4) as u16);
                let value = value(worker.log(), worker.next_sequence_number());
                let appended = (0..STEPS_MAX).any(|_| {
                    let appended = self.writers[index].writer.try_append(key_group, &value).is_ok();
                    if !appended {
                        self.step();
                    }
                    appended
                });
                assert!(appended, "no room");
            }
        }
    }

    /// Asks for a checkpoint, and waits for earlier ones as long as too many are asked for.
    fn checkpoint(&mut self) {
        self.append();
        self.checkpoint += 1;
        let persist = |worker: &mut Worker| Some(worker.writer.persist_durably(worker.truncated));
        let futures = self.writers.iter_mut().map(persist).collect();
        self.asked.push_back(Asked { number: self.checkpoint, futures, handles: Vec::new() });
        let overlapping = self.rng.below(4) as usize;
        self.wait(overlapping);
        if self.rng.chance(120) {
            self.materialize();
        }
        if self.checkpoint.is_multiple_of(50) {
            self.check();
        }
    }

    /// Until at most so many checkpoints are asked for.
    fn wait(&mut self, at_most: usize) {
        for _ in 0..STEPS_MAX {
            while self.asked.front_mut().is_some_and(Asked::is_answered) {
                let asked = self.asked.pop_front().expect("it was just seen");
                self.end(asked);
            }
            if self.asked.len() <= at_most {
                return;
            }
            self.step();
        }
        panic!("a checkpoint is not answered");
    }

    /// The coordinator has decided about a checkpoint.
    fn end(&mut self, Asked { number, handles, .. }: Asked) {
        while self.late.front().is_some_and(|(due, _)| *due <= number) {
            let (_, ends) = self.late.pop_front().expect("it was just seen");
            self.confirm(&ends);
        }
        if self.rng.chance(150) {
            for (worker, handle) in self.writers.iter().zip(&handles) {
                worker.writer.reset(handle.from(), handle.to()).expect("it was appended");
            }
            self.declined += 1;
            return;
        }
        let ends: Vec<SequenceNumber> = handles.iter().map(ChangelogHandle::to).collect();
        match self.rng.below(3) {
            0 => self.late.push_back((number + self.rng.below(8), ends)),
            _ => self.confirm(&ends),
        }
        // The first one of a life does without what earlier ones left.
        let life = self.memory.len();
        if self.complete.back().is_some_and(|last| last.life < life) {
            while let Some(subsumed) = self.complete.pop_front() {
                self.release(&subsumed);
            }
            self.before.drain(..).for_each(|log| log.discard());
        }
        let holder = format!("checkpoint-{number}");
        self.changelog().register(&holder, &handles).expect("its objects are needed");
        self.complete.push_back(Complete { life, holder, handles });
        if self.complete.len() > RETAINED
            && let Some(subsumed) = self.complete.pop_front()
        {
            self.release(&subsumed);
        }
    }

    fn release(&self, subsumed: &Complete) {
        self.changelog().release(&subsumed.holder).expect("the manifest is sound");
    }

    fn confirm(&self, ends: &[SequenceNumber]) {
        for (worker, end) in self.writers.iter().zip(ends) {
            worker.writer.confirm(*end).expect("it was appended");
        }
    }

    /// One of the workers has a snapshot of all that the newest complete checkpoint holds, or of a little less.
    fn materialize(&mut self) {
        // What is on its way is registered before.
        self.wait(0);
        let life = self.memory.len();
        let Some(newest) = self.complete.back().filter(|newest| newest.life == life) else { return };
        let index = self.rng.below(WRITERS) as usize;
        let to = SequenceNumber(newest.handles[index].to().0.saturating_sub(self.rng.below(3)));
        let worker = &mut self.writers[index];
        worker.truncated = worker.truncated.max(to);
        worker.writer.truncate(to).expect("it was appended");
    }

    /// The checkpoints that are kept are known, and can be read.
    fn check(&self) {
        // Who has no object is not known.
        let holds = |complete: &&Complete| complete.handles.iter().any(|handle| !handle.is_empty());
        let mut holders: Vec<&String> =
            self.complete.iter().filter(holds).map(|complete| &complete.holder).collect();
        holders.sort_unstable();
        assert_eq!(self.changelog().holders().iter().collect::<Vec<_>>(), holders);
        for handle in self.complete.iter().flat_map(|complete| &complete.handles) {
            let stores = self.machine.stores.iter().map(|store| Arc::new(store.clone()) as Arc<dyn Store>);
            let reader = ChangelogReader::open_simulated(
                std::slice::from_ref(handle),
                handle.key_groups(),
                stores.collect(),
            );
            let mut numbers: Vec<u64> = reader
                .expect("its buckets are known")
                .map(|change| {
                    let change = change.expect("it can be read");
                    assert_eq!(change.value, value(change.log, change.number));
                    change.number.0
                })
                .collect();
            numbers.sort_unstable();
            assert!(numbers.into_iter().eq(handle.from().0..handle.to().0), "{handle:?}");
        }
    }

    /// The process ends, well or not, and another one goes on.
    fn restart(&mut self) {
        self.asked.clear();
        self.late.clear();
        let changelog = self.changelog.take().expect("it is open");
        match self.rng.below(3) {
            0 => {
                self.writers.clear();
                // Persists may be on their way.
                let _ = changelog.close(Duration::ZERO);
                self.machine.crash(Crash::Process, ());
            }
            kind => {
                let crash = if kind == 1 { Crash::Process } else { Crash::Power };
                let writers = std::mem::take(&mut self.writers);
                self.machine.crash(crash, (changelog, writers));
            }
        }
        self.before.clear();
        self.open();
        self.check();
    }
}

impl Asked {
    fn is_answered(&mut self) -> bool {
        for future in &mut self.futures[self.handles.len()..] {
            match future.take().expect("it is not answered").wait_timeout(Duration::ZERO) {
                Ok(outcome) => self.handles.push(outcome.expect("the machine is sound, the buckets recover")),
                Err(again) => {
                    *future = Some(again);
                    return false;
                }
            }
        }
        true
    }
}

/// Lives through so many checkpoints.
pub fn run(seed: u64, checkpoints: u64) {
    let mut job = Job::new(seed);
    for store in &job.machine.stores {
        for operation in [Operation::Put, Operation::Create, Operation::PutPart, Operation::Complete] {
            let chances = Chances { before: 0.01, after: 0.01, late: 0.01, throttled: 0.01 };
            store.set_chances(operation, chances);
        }
        let chances = Chances { before: 0.05, ..Chances::default() };
        store.set_chances(Operation::Delete, chances);
    }
    job.machine.slow.set(50, seed);
    job.open();
    for _ in 0..checkpoints {
        job.checkpoint();
        if job.rng.below(CHECKPOINTS_PER_LIFE) == 0 {
            job.restart();
        }
    }
    job.wait(0);
    job.check();
    assert!(job.declined * 10 > checkpoints, "only {} of {checkpoints} were declined", job.declined);
    job.machine.heal();
    job.complete.iter().for_each(|complete| job.release(complete));
    job.writers.drain(..).for_each(|worker| worker.writer.truncate_and_close());
    job.before.drain(..).for_each(|log| log.discard());
    let objects = |job: &Job| -> Vec<(String, String)> { job.machine.objects().into_keys().collect() };
    for _ in 0..STEPS_MAX {
        job.step();
        if objects(&job).is_empty() && job.machine.open_uploads().is_empty() {
            break;
        }
    }
    let (canaries, others): (Vec<_>, Vec<_>) =
        objects(&job).into_iter().partition(|(_, name)| name.starts_with("tidelog/canary-"));
    // One that arrived after its removal stays until the next one.
    assert!(canaries.len() <= job.machine.stores.len(), "{canaries:?}");
    assert_eq!(others, [], "nobody needs them");
    assert_eq!(job.machine.open_uploads(), [""; 0], "nobody needs them");
    // In the first lives there is little to keep yet.
    let (first, last) = job.memory.split_at(job.memory.len() / 2);
    let mean = |bytes: &[i64]| bytes.iter().sum::<i64>() / bytes.len().max(1) as i64;
    let (before, after) = (mean(first.get(2..).unwrap_or_default()), mean(last));
    println!("{checkpoints} checkpoints, {} declined, in {} lives", job.declined, job.memory.len());
    println!("bytes in use when a life begins: {before} in the first half, {after} in the second");
    // What is there varies by what the checkpoints of the moment keep.
    let most = before + before / 2 + RESERVE_GROWTH_BYTES;
    assert!(first.len() < 6 || after < most, "memory grows from {before} to {after} bytes");
}
