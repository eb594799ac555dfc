//! What is compared against: a fixed number of attempts at the home bucket, each given a fixed time, none cancelled.
//!
//! With one second and three attempts it is what Flink's changelog storage does by default: a late attempt is joined by the
//! next one, a refused one is followed by the next after half a second, the first success counts, and with the third one
//! late as well the object has failed. Flink sends a file whole; larger objects are sent in parts here, each with attempts
//! of its own, which is kinder to it. With one attempt of unlimited time it is uploading without hedging, and checks the
//! model against published figures independently of the real state machine.

use std::collections::VecDeque;
use std::time::Duration;

use tidelog_upload::sim::network::{Call, Ending, Happening, Model, Network, Random, Sickness, Work};
use tidelog_upload::sim::world::{Checkpoint, Scenario, Sent};
use tidelog_upload::store::Lane;

/// After how long another attempt is made, and how many there are.
#[derive(Clone, Copy)]
pub struct Attempts {
    pub timeout: Duration,
    /// When a request is given up.
    pub stall_timeout: Duration,
    pub max: u32,
    pub pause_after_refusal: Duration,
}

impl Attempts {
    pub fn unlimited() -> Attempts {
        Attempts {
            timeout: Duration::MAX,
            stall_timeout: Duration::from_secs(10),
            max: u32::MAX,
            pause_after_refusal: Duration::from_millis(100),
        }
    }

    pub fn flink() -> Attempts {
        Attempts {
            timeout: Duration::from_secs(1), // An attempt is not cancelled when the next one begins.
            stall_timeout: Duration::from_secs(600),
            max: 3,
            pause_after_refusal: Duration::from_millis(500),
        }
    }
}

pub struct FixedWorld {
    scenario: Scenario,
    attempts: Attempts,
    network: Network,
    random: Random,
    objects: Vec<Object>,
    started: Duration,
    checkpoint: u64,
    unfinished: usize,
    failed: usize,
    sent: Sent,
}

struct Object {
    node: usize,
    bucket: usize,
    phase: Phase,
    connections: usize,
    /// Steps not begun: the sizes of bodies by index.
    waiting: VecDeque<usize>,
    steps: Vec<Step>,
    in_flight: usize,
}

#[derive(Clone, Copy, PartialEq)]
enum Phase {
    Creating,
    Sending,
    Completing,
    Over,
}

struct Step {
    bytes: u64,
    work: Work,
    attempts: u32,
    done: bool,
}

/// The owner of a request or alarm: its object's checkpoint, object and step, and for alarms which attempt was meant.
fn owner(checkpoint: u64, object: usize, step: usize, attempt: u32) -> u64 {
    (checkpoint & 0xffff) << 40 | (object as u64) << 24 | (step as u64) << 8 | u64::from(attempt & 0x7f)
}

/// Marks the alarm after a refusal: it does not count attempts that went on meanwhile.
const START: u64 = u64::MAX;

impl FixedWorld {
    pub fn new(scenario: Scenario, model: Model, attempts: Attempts) -> FixedWorld {
        let mut random = Random(scenario.seed);
        let nic = scenario.nic_bytes_per_second as f64;
        let network = Network::new(model, scenario.nodes, scenario.buckets, nic, random.next_u64());
        FixedWorld {
            scenario,
            attempts,
            network,
            random,
            objects: Vec::new(),
            started: Duration::ZERO,
            checkpoint: 0,
            unfinished: 0,
            failed: 0,
            sent: Sent::default(),
        }
    }

    pub fn set_sickness(&mut self, bucket: usize, sickness: Sickness) {
        self.network.set_sickness(bucket, sickness);
    }

    pub fn set_nic(&mut self, bytes_per_second: f64) {
        self.network.set_nic(bytes_per_second);
    }

    pub fn sent(&self) -> Sent {
        self.sent
    }

    pub fn checkpoint(&mut self) -> Checkpoint {
        if self.checkpoint > 0 {
            self.network.alarm(self.started + self.scenario.interval, START);
            while !self.handle_next() {}
        }
        self.started = self.network.now();
        self.checkpoint += 1;
        self.failed = 0;
        self.unfinished = self.scenario.nodes;
        self.objects.clear();
        for node in 0..self.scenario.nodes {
            let object = self.object(node);
            self.objects.push(object);
            self.go_on(node);
        }
        while self.unfinished > 0 {
            self.handle_next();
        }
        Checkpoint { took: self.network.now() - self.started, failed: self.failed }
    }

    fn object(&mut self, node: usize) -> Object {
        let options = &self.scenario.options;
        let bytes = self.scenario.object_bytes;
        let mut steps = Vec::new();
        let body = |bytes| Step { bytes, work: Work::Body, attempts: 0, done: false };
        let control = |work| Step { bytes: 0, work, attempts: 0, done: false };
        if bytes <= options.put_bytes_max {
            steps.push(body(bytes));
        } else {
            steps.push(control(Work::Control));
            steps.extend((0..bytes / options.part_bytes).map(|_| body(options.part_bytes)));
            steps.extend(
                (!bytes.is_multiple_of(options.part_bytes)).then(|| body(bytes % options.part_bytes)),
            );
            steps.push(control(Work::Complete));
        }
        self.sent.bodies_needed += steps.iter().filter(|step| step.work == Work::Body).count() as u64;
        self.sent.bytes_needed += bytes;
        let mut options = options.clone();
        options.nic_bytes_per_second = Some(self.scenario.nic_bytes_per_second);
        Object {
            node,
            bucket: (self.random.unit() * self.scenario.buckets as f64) as usize,
            phase: if steps.len() == 1 { Phase::Sending } else { Phase::Creating },
            connections: options.connections(),
            waiting: (0..steps.len()).collect(),
            steps,
            in_flight: 0,
        }
    }

    /// Begins what can be begun.
    fn go_on(&mut self, index: usize) {
        loop {
            let object = &mut self.objects[index];
            let body = |step: &usize| object.steps[*step].work == Work::Body;
            let free = match (object.phase, object.waiting.front()) {
                (Phase::Over, _) | (_, None) => return,
                (Phase::Sending, Some(step)) if body(step) => object.in_flight < object.connections,
                (Phase::Sending, Some(_)) if object.in_flight == 0 => {
                    object.phase = Phase::Completing;
                    true
                }
                (Phase::Creating, Some(0)) => object.in_flight == 0,
                _ => false,
            };
            if !free {
                return;
            }
            if let Some(step) = object.waiting.pop_front() {
                object.in_flight += 1;
                self.attempt(index, step);
            }
        }
    }

    fn attempt(&mut self, index: usize, step: usize) {
        let object = &mut self.objects[index];
        let Step { bytes, work, ref mut attempts, .. } = object.steps[step];
        *attempts += 1;
        let owner = owner(self.checkpoint, index, step, *attempts);
        *(if work == Work::Body { &mut self.sent.bodies } else { &mut self.sent.controls }) += 1;
        self.network.start(Call {
            node: object.node,
            bucket: object.bucket,
            lane: Lane::Primary,
            work,
            bytes,
            timeout: self.attempts.stall_timeout,
            owner,
        });
        if self.attempts.timeout < self.attempts.stall_timeout {
            self.network.alarm(self.network.now() + self.attempts.timeout, owner);
        }
    }

    /// Whether the time of the next checkpoint has come.
    fn handle_next(&mut self) -> bool {
        let (owned, ending) = match self.network.advance().expect("something under way") {
            Happening::Alarm { owner: START } => return true,
            Happening::Alarm { owner } => (owner, None),
            Happening::Ended { owner, ending, sent_bytes, .. } => {
                self.sent.bytes += sent_bytes;
                (owner, Some(ending))
            }
        };
        let (index, step, attempt) =
            ((owned >> 24 & 0xffff) as usize, (owned >> 8 & 0xffff) as usize, owned as u32 & 0x7f);
        if owned >> 40 != self.checkpoint & 0xffff {
            return false;
        }
        let object = &mut self.objects[index];
        let held = &mut object.steps[step];
        if object.phase == Phase::Over || held.done {
            return false;
        }
        match ending {
            Some(Ending::Done) => {
                held.done = true;
                object.in_flight -= 1;
                if object.phase == Phase::Creating {
                    object.phase = Phase::Sending;
                }
                if object.steps.iter().all(|step| step.done) {
                    object.phase = Phase::Over;
                    self.unfinished -= 1;
                }
                self.go_on(index);
            }
            // The pause is part of the next attempt's time.
            Some(Ending::Refused) => {
                self.sent.refused += 1;
                let at = self.network.now() + self.attempts.pause_after_refusal;
                self.network.alarm(at, owned);
            }
            Some(Ending::TimedOut) if attempt == held.attempts & 0x7f => self.attempt(index, step),
            Some(Ending::TimedOut) => {}
            // Only the newest attempt is waited for.
            None if attempt == held.attempts & 0x7f => {
                if held.attempts >= self.attempts.max {
                    object.phase = Phase::Over;
                    self.failed += 1;
                    self.unfinished -= 1;
                } else {
                    self.attempt(index, step);
                }
            }
            None => {}
        }
        false
    }
}
