//! Nodes that write an object each at every checkpoint, with the real policy and the real state machine, over the model
//! of [`network`](super::network).
//!
//! A checkpoint takes as long as its slowest node. Bytes are only counted. A request that ends in
//! [`Done`](super::network::Ending::Done) had its effect, every other one had none: what becomes of lost answers is tested
//! elsewhere.
#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::bucket::{Bucket, BucketIndex};
use crate::hedge::{Canary, Health, Policy};
use crate::multipart::{Action, Answer, AttemptId, Event, ObjectMachine, Request};
use crate::options::UploadOptions;
use crate::sim::network::{Call, CallId, Ending, Happening, Model, Network, Random, Sickness, Work};
use crate::store::{
    Capabilities, EntityTag, Lane, ListedObject, Operation, Parts, StoreError, StoreErrorKind, UploadId,
};

/// Who writes what, and how.
#[derive(Clone, Debug)]
pub struct Scenario {
    /// The nodes; each has a policy of its own.
    pub nodes: usize,
    /// The buckets that every node may use.
    pub buckets: usize,
    /// What each node writes at a checkpoint, in bytes.
    pub object_bytes: u64,
    /// What a node's network interface carries, in bytes a second.
    pub nic_bytes_per_second: u64,
    /// The time between the starts of two checkpoints, or more if one takes longer.
    pub interval: Duration,
    /// How long an object may take.
    pub deadline: Duration,
    /// Whether the nodes tell each other of the buckets' health after each checkpoint.
    pub share_health: bool,
    /// The options of every node.
    pub options: UploadOptions,
    /// Decides everything that is left to chance.
    pub seed: u64,
}

/// What a checkpoint was like.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Checkpoint {
    /// From its start to the end of the last object.
    pub took: Duration,
    /// The objects that were not written in time.
    pub failed: usize,
}

/// What was sent since the beginning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sent {
    /// Objects and parts.
    pub bodies: u64,
    /// Objects and parts that would have sufficed.
    pub bodies_needed: u64,
    /// Bytes on the wire, of the ones that were given up too.
    pub bytes: u64,
    /// Bytes that would have sufficed.
    pub bytes_needed: u64,
    /// Requests that begin, complete, look up, abort or delete.
    pub controls: u64,
    /// Requests refused.
    pub refused: u64,
    /// Requests that see whether a bucket has recovered.
    pub canaries: u64,
}

impl Sent {
    /// What was sent after `earlier`.
    #[must_use]
    pub fn since(&self, earlier: &Sent) -> Sent {
        Sent {
            bodies: self.bodies - earlier.bodies,
            bodies_needed: self.bodies_needed - earlier.bodies_needed,
            bytes: self.bytes - earlier.bytes,
            bytes_needed: self.bytes_needed - earlier.bytes_needed,
            controls: self.controls - earlier.controls,
            refused: self.refused - earlier.refused,
            canaries: self.canaries - earlier.canaries,
        }
    }
}

/// The nodes and their network.
#[derive(Debug)]
pub struct World {
    scenario: Scenario,
    network: Network,
    epoch: Instant,
    nodes: Vec<Node>,
    objects: Vec<Option<Object>>,
    free: Vec<usize>,
    checkpoints: u64,
    /// When the newest checkpoint began.
    started: Duration,
    /// Objects of this checkpoint that have not ended.
    unfinished: usize,
    failed: usize,
    sent: Sent,
    tag: EntityTag,
    upload: UploadId,
}

#[derive(Debug)]
struct Node {
    policy: Policy,
    /// The objects that have not settled.
    objects: Vec<usize>,
    /// When the policy wants to be asked again.
    alarm: Option<Instant>,
    canaries: Vec<(CallId, BucketIndex, Instant)>,
}

#[derive(Debug)]
struct Object {
    node: usize,
    machine: ObjectMachine,
    chunks_bytes: Vec<u64>,
    calls: Vec<Underway>,
    /// Parts that were taken: where, of which object, which number, of what size.
    parts: Vec<(BucketIndex, String, u32, u64)>,
    /// Committed objects: where, under which name, of what size.
    stored: Vec<(BucketIndex, String, u64)>,
    alarm: Option<Instant>,
    settled: bool,
}

#[derive(Debug)]
struct Underway {
    attempt: AttemptId,
    call: CallId,
    bucket: BucketIndex,
    name: String,
    request: Request,
    timeout: Duration,
}

/// The owner of the alarm that begins a checkpoint.
const START: u64 = u64::MAX;

/// Added to the number of a node, it owns the node's alarm and canaries. Other owners are objects.
const NODE: u64 = 1 << 63;

impl World {
    /// A healthy world in which nobody has learned anything.
    #[must_use]
    pub fn new(scenario: Scenario, model: Model) -> World {
        let row = Capabilities {
            parts: Parts::Parallel,
            part_bytes_min: 5 << 20,
            part_bytes_max: 5 << 30,
            parts_max: 10_000,
            equal_parts: false,
            sparse: true,
            copy_part: false,
            resend_part: false,
            list_parts: false,
            list_uploads: true,
            conditional_put: true,
        };
        let buckets: Vec<Bucket> = (0..scenario.buckets)
            .map(|index| Bucket { url: format!("sim://{index}").into(), capabilities: row.clone() })
            .collect();
        let mut options = scenario.options.clone();
        options.nic_bytes_per_second = Some(scenario.nic_bytes_per_second);
        let mut random = Random(scenario.seed);
        let nic = scenario.nic_bytes_per_second as f64;
        let network = Network::new(model, scenario.nodes, scenario.buckets, nic, random.next_u64());
        let mut node = || Node {
            policy: Policy::new(options.clone(), buckets.clone(), random.next_u64()),
            objects: Vec::new(),
            alarm: None,
            canaries: Vec::new(),
        };
        World {
            network,
            epoch: Instant::now(),
            nodes: (0..scenario.nodes).map(|_| node()).collect(),
            objects: Vec::new(),
            free: Vec::new(),
            checkpoints: 0,
            started: Duration::ZERO,
            unfinished: 0,
            failed: 0,
            sent: Sent::default(),
            tag: EntityTag("tag".into()),
            upload: UploadId("upload".into()),
            scenario,
        }
    }

    /// What is wrong with a bucket from here on.
    pub fn set_sickness(&mut self, bucket: usize, sickness: Sickness) {
        self.network.set_sickness(bucket, sickness);
    }

    /// The bandwidth of every node's interface from here on. The nodes are not told.
    pub fn set_nic(&mut self, bytes_per_second: f64) {
        self.network.set_nic(bytes_per_second);
    }

    /// What was sent since the beginning.
    #[must_use]
    pub fn sent(&self) -> Sent {
        self.sent
    }

    /// The policy of a node, for a look at what it has learned.
    #[must_use]
    pub fn policy(&self, node: usize) -> &Policy {
        &self.nodes[node].policy
    }

    /// Lets every node write an object and waits for all of them.
    pub fn checkpoint(&mut self) -> Checkpoint {
        if self.checkpoints > 0 {
            self.network.alarm(self.started + self.scenario.interval, START);
            while self.handle_next() != Some(START) {}
        }
        if self.scenario.share_health {
            self.share_health();
        }
        self.started = self.network.now();
        self.checkpoints += 1;
        self.failed = 0;
        self.unfinished = self.scenario.nodes;
        for node in 0..self.scenario.nodes {
            self.write(node);
        }
        while self.unfinished > 0 {
            self.handle_next();
        }
        Checkpoint { took: self.network.now() - self.started, failed: self.failed }
    }

    fn share_health(&mut self) {
        let now = self.now();
        let all: Vec<Health> = self.nodes.iter().map(|node| node.policy.health(now)).collect();
        for node in 0..self.nodes.len() {
            self.nodes[node].policy.merge(&all, now);
            self.set_node_alarm(node);
        }
    }

    fn now(&self) -> Instant {
        self.epoch + self.network.now()
    }

    /// Begins the object of a node.
    fn write(&mut self, node: usize) {
        let now = self.now();
        let name = format!("{node:04}/{:08}", self.checkpoints);
        let machine = ObjectMachine::new(name, None, now);
        let bytes = self.scenario.object_bytes;
        let options = &self.scenario.options;
        let mut chunks_bytes = Vec::new();
        let mut left = bytes;
        if bytes > options.put_bytes_max {
            while left > options.part_bytes {
                chunks_bytes.push(options.part_bytes);
                left -= options.part_bytes;
            }
        }
        chunks_bytes.push(left);
        self.sent.bodies_needed += chunks_bytes.len() as u64;
        self.sent.bytes_needed += bytes;
        let mut events: VecDeque<Event> = (1..=chunks_bytes.len())
            .map(|nth| Event::Chunk { bytes: chunks_bytes[nth - 1], last: nth == chunks_bytes.len() })
            .collect();
        events.push_back(Event::Wanted { deadline: Some(now + self.scenario.deadline) });
        let object = Object {
            node,
            machine,
            chunks_bytes,
            calls: Vec::new(),
            parts: Vec::new(),
            stored: Vec::new(),
            alarm: None,
            settled: false,
        };
        let index = self.free.pop().unwrap_or_else(|| {
            self.objects.push(None);
            self.objects.len() - 1
        });
        self.objects[index] = Some(object);
        self.nodes[node].objects.push(index);
        self.step(index, events);
    }

    /// Handles what happens next, and says whose it was.
    ///
    /// # Panics
    /// If nothing will ever happen: an object waits for nothing.
    fn handle_next(&mut self) -> Option<u64> {
        let happening = self.network.advance().expect("something under way");
        match happening {
            Happening::Alarm { owner: START } => return Some(START),
            Happening::Alarm { owner } if owner & NODE != 0 => {
                let node = (owner & !NODE) as usize;
                self.nodes[node].alarm = None;
                self.run_canaries(node);
            }
            Happening::Alarm { owner } => self.tick(owner as usize),
            Happening::Ended { call, owner, ending, .. } if owner & NODE != 0 => {
                self.canary_ended((owner & !NODE) as usize, call, ending);
            }
            Happening::Ended { call, owner, ending, sent_bytes } => {
                self.ended(owner as usize, call, ending, sent_bytes);
            }
        }
        None
    }

    fn ended(&mut self, index: usize, call: CallId, ending: Ending, sent_bytes: u64) {
        self.sent.bytes += sent_bytes;
        self.sent.refused += u64::from(ending == Ending::Refused);
        let Some(object) = &mut self.objects[index] else { return };
        let Some(at) = object.calls.iter().position(|underway| underway.call == call) else { return };
        let underway = object.calls.swap_remove(at);
        let outcome = match ending {
            Ending::Done => object.answer(&underway, &self.tag, &self.upload),
            Ending::Refused => Err(StoreErrorKind::Throttled),
            Ending::TimedOut => Err(StoreErrorKind::TimedOut(underway.timeout)),
        };
        let node = object.node;
        self.step(index, VecDeque::from([underway.ended(outcome)]));
        // What the others waited for may be free now.
        for other in self.nodes[node].objects.clone() {
            if other != index {
                self.step(other, VecDeque::from([Event::Tick]));
            }
        }
    }

    /// Time has passed for an object.
    fn tick(&mut self, index: usize) {
        let now = self.now();
        let Some(object) = &mut self.objects[index] else { return };
        // Alarms are not taken back: one may be left from an earlier object, or be too early.
        if object.alarm.is_none_or(|at| at > now) {
            return;
        }
        object.alarm = None;
        self.step(index, VecDeque::from([Event::Tick]));
    }

    /// Lets a machine take events, and does what it asks for. As with the driver, it hears first how far its requests are.
    fn step(&mut self, index: usize, mut events: VecDeque<Event>) {
        let now = self.now();
        if let Some(object) = &self.objects[index]
            && self.nodes[object.node].policy.options().heeds_progress()
        {
            for underway in object.calls.iter().filter(|underway| underway.has_body()) {
                if let Some(acknowledged) = self.network.acknowledged(underway.call) {
                    events.push_front(Event::Progress { attempt: underway.attempt, acknowledged });
                }
            }
        }
        let mut actions = Vec::new();
        while let Some(event) = events.pop_front() {
            let Some(object) = &mut self.objects[index] else { return };
            object.machine.step(event, now, &mut self.nodes[object.node].policy, &mut actions);
            for action in actions.drain(..) {
                match action {
                    Action::Start { attempt, bucket, name, request, lane, timeout } => {
                        let (work, bytes) = object.work(&request);
                        let count =
                            if work == Work::Body { &mut self.sent.bodies } else { &mut self.sent.controls };
                        *count += 1;
                        let (node, owner) = (object.node, index as u64);
                        let call = Call { node, bucket: bucket.0, lane, work, bytes, timeout, owner };
                        let call = self.network.start(call);
                        object.calls.push(Underway { attempt, call, bucket, name, request, timeout });
                    }
                    Action::Cancel { attempt } => {
                        if let Some(at) = object.calls.iter().position(|underway| underway.attempt == attempt)
                        {
                            let underway = object.calls.swap_remove(at);
                            self.sent.bytes += self.network.cancel(underway.call);
                            events.push_back(underway.ended(Err(StoreErrorKind::Cancelled)));
                        }
                    }
                    Action::Finished(outcome) => {
                        self.unfinished -= 1;
                        self.failed += usize::from(outcome.is_err());
                    }
                    Action::Settled { .. } => object.settled = true,
                    Action::Retire { .. } => self.network.retire(),
                    Action::Stored { .. } | Action::Release { .. } => {}
                }
            }
        }
        let Some(object) = &mut self.objects[index] else { return };
        let node = object.node;
        if object.settled {
            assert!(object.calls.is_empty(), "settled with requests under way");
            self.objects[index] = None;
            self.free.push(index);
            self.nodes[node].objects.retain(|other| *other != index);
        } else if let Some(at) = object.machine.deadline()
            && object.alarm.is_none_or(|set| at < set)
        {
            object.alarm = Some(at);
            self.network.alarm(at - self.epoch, index as u64);
        }
        self.set_node_alarm(node);
    }

    fn set_node_alarm(&mut self, index: usize) {
        let node = &mut self.nodes[index];
        if let Some(at) = node.policy.deadline()
            && node.alarm.is_none_or(|set| at < set)
        {
            node.alarm = Some(at);
            self.network.alarm(at - self.epoch, NODE | index as u64);
        }
    }

    fn run_canaries(&mut self, index: usize) {
        let now = self.now();
        while let Some(Canary { bucket, timeout }) = self.nodes[index].policy.canary(now) {
            let call = self.network.start(Call {
                node: index,
                bucket: bucket.0,
                lane: Lane::Primary,
                work: Work::Control,
                bytes: 0,
                timeout,
                owner: NODE | index as u64,
            });
            self.nodes[index].canaries.push((call, bucket, now));
            self.sent.canaries += 1;
        }
        self.set_node_alarm(index);
    }

    fn canary_ended(&mut self, index: usize, call: CallId, ending: Ending) {
        let now = self.now();
        let node = &mut self.nodes[index];
        if let Some(at) = node.canaries.iter().position(|canary| canary.0 == call) {
            let (_, bucket, started) = node.canaries.swap_remove(at);
            node.policy.canary_ended(bucket, ending == Ending::Done, now - started, now);
        }
        self.set_node_alarm(index);
    }
}

impl Object {
    fn work(&self, request: &Request) -> (Work, u64) {
        let bytes = |chunk: u32| self.chunks_bytes[chunk as usize];
        match request {
            Request::Put { chunks } => (Work::Body, chunks.clone().map(bytes).sum()),
            Request::Part { chunk, .. } => (Work::Body, bytes(*chunk)),
            Request::Complete { .. } => (Work::Complete, 0),
            _ => (Work::Control, 0),
        }
    }

    /// What the bucket says to a request that was done.
    fn answer(
        &mut self,
        underway: &Underway,
        tag: &EntityTag,
        upload: &UploadId,
    ) -> Result<Answer, StoreErrorKind> {
        let Underway { bucket, name, request, .. } = underway;
        let bytes = match request {
            Request::Create => return Ok(Answer::Created(upload.clone())),
            Request::Part { number, chunk, .. } => {
                let bytes = self.chunks_bytes[*chunk as usize];
                self.parts.push((*bucket, name.clone(), *number, bytes));
                return Ok(Answer::Tag(tag.clone()));
            }
            Request::Abort { .. } => return Ok(Answer::Done),
            Request::ListParts { .. } => return Err(StoreErrorKind::Unsupported),
            Request::Delete => {
                self.stored.retain(|object| (object.0, &object.1) != (*bucket, name));
                return Ok(Answer::Done);
            }
            Request::Head => {
                let found = self.stored.iter().find(|object| (object.0, &object.1) == (*bucket, name));
                let (_, name, bytes) = found.ok_or(StoreErrorKind::NotFound)?.clone();
                return Ok(Answer::Object(ListedObject { name, bytes, tag: tag.clone(), modified: None }));
            }
            Request::Put { .. } => self.work(request).1,
            Request::Complete { parts, .. } => self
                .parts
                .iter()
                .filter(|part| (part.0, &part.1) == (*bucket, name))
                .filter(|part| parts.iter().any(|named| named.number == part.2))
                .map(|part| part.3)
                .sum(),
        };
        self.stored.push((*bucket, name.clone(), bytes));
        Ok(Answer::Tag(tag.clone()))
    }
}

impl Underway {
    fn has_body(&self) -> bool {
        matches!(self.request, Request::Put { .. } | Request::Part { .. })
    }

    fn ended(&self, outcome: Result<Answer, StoreErrorKind>) -> Event {
        let operation = match self.request {
            Request::Put { .. } => Operation::Put,
            Request::Create => Operation::Create,
            Request::Part { .. } => Operation::PutPart,
            Request::Complete { .. } => Operation::Complete,
            Request::ListParts { .. } => Operation::ListParts,
            Request::Abort { .. } => Operation::Abort,
            Request::Head => Operation::Head,
            Request::Delete => Operation::Delete,
        };
        let outcome = outcome.map_err(|kind| StoreError::new(operation, "sim://", &self.name, kind));
        Event::Ended { attempt: self.attempt, outcome }
    }
}
