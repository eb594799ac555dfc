//! A model of an object store as its clients see it, in virtual time: connections, bandwidth, waiting, and sick buckets.
//!
//! The model answers when a request ends and how; what is stored is not its business, and neither is why a request was
//! made. Nothing here was measured on a real store by us: the shape is argued, and its parameters ([`Model`]) are chosen so
//! that uploads without hedging take as long as Flink's FLIP-158 published. A request
//!
//! 1. takes an idle connection of its node, bucket and lane, or opens one, to one of the bucket's front ends;
//! 2. sends its body at the connection's rate, all bodies of a node sharing its network interface max-min fairly;
//! 3. waits for the answer.
//!
//! Some are slow for no visible reason, and half of those because the one before on the same connection was. A request
//! that is cancelled or times out closes its connection.
//!
//! Invariants: time never runs backwards; the same seed and the same calls give the same happenings.
#![forbid(unsafe_code)]

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Duration;

use crate::store::Lane;

/// The parameters of a healthy world. Lognormal quantities are a median and a σ.
#[derive(Clone, Debug)]
pub struct Model {
    /// Of one connection as long as it lives, bytes per second.
    pub rate_bytes_per_second: (f64, f64),
    /// From the last byte of a body to the answer, in seconds.
    pub service_s: (f64, f64),
    /// Of a request that begins an upload, in seconds; of any other without a body too.
    pub control_s: (f64, f64),
    /// Of a request that completes an upload, in seconds.
    pub complete_s: (f64, f64),
    /// For a new connection, in seconds.
    pub connect_s: (f64, f64),
    /// The share of slow requests.
    pub slow_share: f64,
    /// The probability that the next request of a slow one's connection is as slow.
    pub slow_stays: f64,
    /// A slow request's rate is divided by something between these, log-uniform.
    pub slow_divisor: (f64, f64),
    /// The share of answers to bodies that hiccup.
    pub hiccup_share: f64,
    /// The share of all other answers that do.
    pub control_hiccup_share: f64,
    /// What a hiccup adds, in seconds.
    pub hiccup_s: (f64, f64),
    /// The share of requests that never end.
    pub stall_share: f64,
    /// The front ends of each bucket.
    pub front_ends: u32,
    /// How long an idle connection is kept.
    pub idle_max: Duration,
}

impl Default for Model {
    fn default() -> Model {
        Model {
            rate_bytes_per_second: (65e6, 0.25),
            service_s: (0.0735, 0.356),
            control_s: (0.035, 0.4),
            complete_s: (0.056, 0.4),
            connect_s: (0.015, 0.5),
            slow_share: 0.0097,
            slow_stays: 0.5,
            slow_divisor: (5.1, 12.3),
            hiccup_share: 0.00089,
            control_hiccup_share: 0.0,
            hiccup_s: (0.417, 0.52),
            stall_share: 2e-6,
            front_ends: 16,
            idle_max: Duration::from_secs(20),
        }
    }
}

/// What is wrong with a bucket.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sickness {
    /// The share of requests refused.
    pub refused_share: f64,
    /// All rates are divided and all waiting multiplied by this.
    pub slower: f64,
    /// No request ever ends.
    pub dead: bool,
    /// The share of requests whose connection stalls for good.
    pub stalled_share: f64,
    /// So many front ends are ten times slower.
    pub slow_front_ends: u32,
}

impl Default for Sickness {
    /// Nothing is.
    fn default() -> Sickness {
        Sickness { refused_share: 0.0, slower: 1.0, dead: false, stalled_share: 0.0, slow_front_ends: 0 }
    }
}

/// A request.
#[derive(Clone, Copy, Debug)]
pub struct Call {
    /// Who sends it, from 0.
    pub node: usize,
    /// Where to, from 0.
    pub bucket: usize,
    /// On which connections.
    pub lane: Lane,
    /// What it is.
    pub work: Work,
    /// The length of its body.
    pub bytes: u64,
    /// When it is given up.
    pub timeout: Duration,
    /// Returned with its end.
    pub owner: u64,
}

/// What a request is, as far as its duration goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// It has a body.
    Body,
    /// It completes an upload.
    Complete,
    /// Any other.
    Control,
}

/// Names a request under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CallId {
    slot: u32,
    generation: u32,
}

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// It was done.
    Done,
    /// It was refused for now.
    Refused,
    /// It was given up.
    TimedOut,
}

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Happening {
    /// A request ended.
    Ended {
        /// Which.
        call: CallId,
        /// Whose.
        owner: u64,
        /// How.
        ending: Ending,
        /// Bytes of its body that went over the wire.
        sent_bytes: u64,
    },
    /// An alarm rang.
    Alarm {
        /// Whose.
        owner: u64,
    },
}

/// The nodes, their connections and the buckets.
#[derive(Debug)]
pub struct Network {
    model: Model,
    random: Random,
    now_ns: u64,
    events: BinaryHeap<Reverse<(u64, u64, Event)>>,
    events_made: u64,
    nodes: Vec<Node>,
    buckets: Vec<Sickness>,
    calls: Vec<Slot>,
    free: Vec<u32>,
    /// The node and the pool that the last connection went back to.
    freed: Option<(usize, usize)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// The connection is there.
    Connected(u32, u32),
    /// The answer is there.
    Answered(u32, u32, bool),
    TimedOut(u32, u32),
    /// A body may have been sent, unless bodies were added or removed since.
    Sent {
        node: usize,
        version: u64,
    },
    Alarm(u64),
}

#[derive(Debug)]
struct Node {
    nic_bytes_per_second: f64,
    bodies: Vec<SentBody>,
    /// When the bodies' remains were right.
    updated_ns: u64,
    version: u64,
    /// By bucket and lane.
    idle: Vec<Vec<Connection>>,
}

/// A body on its way.
#[derive(Debug)]
struct SentBody {
    slot: u32,
    remaining_bytes: f64,
    /// What its connection would carry.
    capacity: f64,
    rate: f64,
}

#[derive(Clone, Copy, Debug)]
struct Connection {
    front_end: u32,
    rate_bytes_per_second: f64,
    /// What the rate of its last request was divided by: 1 unless that was slow; `None` without a last one.
    slow: Option<f64>,
    idle_since_ns: u64,
}

#[derive(Debug)]
struct Slot {
    generation: u32,
    call: Option<(Call, Connection)>,
    sent: bool,
}

impl Network {
    /// A healthy world.
    #[must_use]
    pub fn new(model: Model, nodes: usize, buckets: usize, nic_bytes_per_second: f64, seed: u64) -> Network {
        let node = || Node {
            nic_bytes_per_second,
            bodies: Vec::new(),
            updated_ns: 0,
            version: 0,
            idle: vec![Vec::new(); buckets * 2],
        };
        Network {
            model,
            random: Random(seed),
            now_ns: 0,
            events: BinaryHeap::new(),
            events_made: 0,
            nodes: (0..nodes).map(|_| node()).collect(),
            buckets: vec![Sickness::default(); buckets],
            calls: Vec::new(),
            free: Vec::new(),
            freed: None,
        }
    }

    /// The time since the beginning.
    #[must_use]
    pub fn now(&self) -> Duration {
        Duration::from_nanos(self.now_ns)
    }

    /// What is wrong with a bucket from here on. Requests that have begun to wait for their answer do not notice.
    pub fn set_sickness(&mut self, bucket: usize, sickness: Sickness) {
        self.buckets[bucket] = sickness;
    }

    /// The bandwidth of every node's interface from here on.
    pub fn set_nic(&mut self, bytes_per_second: f64) {
        for node in 0..self.nodes.len() {
            self.update(node);
            self.nodes[node].nic_bytes_per_second = bytes_per_second;
            self.share(node);
        }
    }

    /// Sends a request.
    pub fn start(&mut self, call: Call) -> CallId {
        let idle = &mut self.nodes[call.node].idle[pool(&call)];
        // The one used last; if that one is too old, so are the others.
        let last = idle.pop().filter(|connection| {
            connection.idle_since_ns + nanoseconds(self.model.idle_max.as_secs_f64()) >= self.now_ns
        });
        let (connection, wait_ns) = match last {
            Some(connection) => (connection, 0),
            None => {
                idle.clear();
                let front_end = (self.random.unit() * f64::from(self.model.front_ends)) as u32;
                let rate_bytes_per_second = self.random.lognormal(self.model.rate_bytes_per_second);
                let connection =
                    Connection { front_end, rate_bytes_per_second, slow: None, idle_since_ns: 0 };
                (connection, nanoseconds(self.random.lognormal(self.model.connect_s)))
            }
        };
        self.freed = None;
        let slot = self.free.pop().unwrap_or_else(|| {
            self.calls.push(Slot { generation: 0, call: None, sent: false });
            self.calls.len() as u32 - 1
        });
        let held = &mut self.calls[slot as usize];
        held.call = Some((call, connection));
        held.sent = false;
        let generation = held.generation;
        self.event_at(self.now_ns + wait_ns, Event::Connected(slot, generation));
        let timeout_ns = nanoseconds(call.timeout.as_secs_f64());
        self.event_at(self.now_ns.saturating_add(timeout_ns), Event::TimedOut(slot, generation));
        CallId { slot, generation }
    }

    /// Gives a request up and closes its connection. Nothing more happens to it. Returns the bytes of its body that were
    /// sent.
    ///
    /// # Panics
    /// If it has ended.
    pub fn cancel(&mut self, id: CallId) -> u64 {
        let sent_bytes = self.acknowledged(id).expect("a call under way");
        self.finish(id.slot, false);
        sent_bytes
    }

    /// Closes the connection of the request that ended last, so that none uses it again.
    pub fn retire(&mut self) {
        if let Some((node, pool)) = self.freed.take() {
            self.nodes[node].idle[pool].pop();
        }
    }

    /// The bytes of its body that the other side has; `None` if the request has ended.
    pub fn acknowledged(&mut self, id: CallId) -> Option<u64> {
        let slot = &self.calls[id.slot as usize];
        let (call, _) = slot.call.as_ref().filter(|_| slot.generation == id.generation)?;
        let (node, bytes, sent) = (call.node, call.bytes, slot.sent);
        self.update(node);
        let body = self.nodes[node].bodies.iter().find(|body| body.slot == id.slot);
        let remaining = body.map_or(if sent { 0 } else { bytes }, |body| body.remaining_bytes as u64);
        Some(bytes.saturating_sub(remaining))
    }

    /// Rings an alarm at a time, or now if that has passed.
    pub fn alarm(&mut self, at: Duration, owner: u64) {
        self.event_at(nanoseconds_of(at).max(self.now_ns), Event::Alarm(owner));
    }

    /// Lets time pass until something happens. `None` if nothing ever will.
    pub fn advance(&mut self) -> Option<Happening> {
        loop {
            let Reverse((at_ns, _, event)) = self.events.pop()?;
            debug_assert!(at_ns >= self.now_ns);
            self.now_ns = at_ns;
            match event {
                Event::Alarm(owner) => return Some(Happening::Alarm { owner }),
                Event::Sent { node, version } => {
                    if self.nodes[node].version == version {
                        self.bodies_sent(node);
                    }
                }
                Event::Connected(slot, generation) => {
                    if self.calls[slot as usize].generation == generation {
                        self.connected(slot);
                    }
                }
                Event::Answered(slot, generation, done) => {
                    if self.calls[slot as usize].generation == generation {
                        let ending = if done { Ending::Done } else { Ending::Refused };
                        return Some(self.ended(slot, ending));
                    }
                }
                Event::TimedOut(slot, generation) => {
                    if self.calls[slot as usize].generation == generation {
                        return Some(self.ended(slot, Ending::TimedOut));
                    }
                }
            }
        }
    }

    fn ended(&mut self, slot: u32, ending: Ending) -> Happening {
        let call = CallId { slot, generation: self.calls[slot as usize].generation };
        let sent_bytes = self.acknowledged(call).unwrap_or(0);
        let owner = self.finish(slot, ending != Ending::TimedOut);
        Happening::Ended { call, owner, ending, sent_bytes }
    }

    /// The request is over; its connection can be used again or not.
    fn finish(&mut self, slot: u32, usable: bool) -> u64 {
        let held = &mut self.calls[slot as usize];
        let (call, mut connection) = held.call.take().expect("a call under way");
        held.generation = held.generation.wrapping_add(1);
        self.free.push(slot);
        self.freed = None;
        if usable {
            connection.idle_since_ns = self.now_ns;
            self.nodes[call.node].idle[pool(&call)].push(connection);
            self.freed = Some((call.node, pool(&call)));
        }
        let bodies = &mut self.nodes[call.node].bodies;
        if let Some(at) = bodies.iter().position(|body| body.slot == slot) {
            self.update(call.node);
            self.nodes[call.node].bodies.swap_remove(at);
            self.share(call.node);
        }
        call.owner
    }

    /// The request reaches the bucket.
    fn connected(&mut self, slot: u32) {
        let Some((call, connection)) = self.calls[slot as usize].call else { return };
        let sick = self.buckets[call.bucket];
        let stalled = self.random.unit() < self.model.stall_share.max(sick.stalled_share);
        if sick.dead || stalled {
            return;
        }
        if self.random.unit() < sick.refused_share {
            let wait_s = self.random.lognormal(self.model.control_s) * slower(&sick, &connection);
            return self.answer(slot, wait_s, false);
        }
        match call.work {
            Work::Control => {
                let wait_s = self.random.lognormal(self.model.control_s) + self.hiccup_s(false);
                self.answer(slot, wait_s * slower(&sick, &connection), true);
            }
            Work::Complete => {
                let wait_s = self.random.lognormal(self.model.complete_s) + self.hiccup_s(false);
                self.answer(slot, wait_s * slower(&sick, &connection), true);
            }
            Work::Body => {
                let slow = self.slowness(connection.slow);
                let capacity = connection.rate_bytes_per_second / slow / slower(&sick, &connection);
                if let Some((_, connection)) = &mut self.calls[slot as usize].call {
                    connection.slow = Some(slow);
                }
                self.update(call.node);
                let remaining_bytes = call.bytes as f64;
                self.nodes[call.node].bodies.push(SentBody { slot, remaining_bytes, capacity, rate: 0.0 });
                self.share(call.node);
            }
        }
    }

    /// What the rate of the next request is divided by, given the last one's.
    fn slowness(&mut self, last: Option<f64>) -> f64 {
        let Model { slow_share, slow_stays, slow_divisor: (low, high), .. } = self.model;
        let begins = match last {
            None => slow_share,
            Some(last) if last > 1.0 && self.random.unit() < slow_stays => return last,
            // So that with those that stay, the share is as stated.
            Some(_) => slow_share * (1.0 - slow_stays) / (1.0 - slow_share * slow_stays),
        };
        if self.random.unit() < begins { low * (high / low).powf(self.random.unit()) } else { 1.0 }
    }

    fn hiccup_s(&mut self, body: bool) -> f64 {
        let share = if body { self.model.hiccup_share } else { self.model.control_hiccup_share };
        if self.random.unit() < share { self.random.lognormal(self.model.hiccup_s) } else { 0.0 }
    }

    fn answer(&mut self, slot: u32, wait_s: f64, done: bool) {
        let generation = self.calls[slot as usize].generation;
        self.event_at(self.now_ns + nanoseconds(wait_s), Event::Answered(slot, generation, done));
    }

    /// Brings the bodies of a node up to now.
    fn update(&mut self, node: usize) {
        let node = &mut self.nodes[node];
        let passed_s = (self.now_ns - node.updated_ns) as f64 * 1e-9;
        for body in &mut node.bodies {
            body.remaining_bytes = (body.remaining_bytes - body.rate * passed_s).max(0.0);
        }
        node.updated_ns = self.now_ns;
    }

    /// Divides a node's interface: everybody gets what they can use, or an equal share of what the others leave.
    fn share(&mut self, index: usize) {
        let node = &mut self.nodes[index];
        node.version += 1;
        if node.bodies.is_empty() {
            return;
        }
        let wanted: f64 = node.bodies.iter().map(|body| body.capacity).sum();
        if wanted <= node.nic_bytes_per_second {
            node.bodies.iter_mut().for_each(|body| body.rate = body.capacity);
        } else {
            node.bodies.sort_unstable_by(|a, b| a.capacity.total_cmp(&b.capacity).then(a.slot.cmp(&b.slot)));
            let mut left = node.nic_bytes_per_second;
            let mut sharers = node.bodies.len() as f64;
            for body in &mut node.bodies {
                body.rate = body.capacity.min(left / sharers);
                left -= body.rate;
                sharers -= 1.0;
            }
        }
        let first_s =
            node.bodies.iter().map(|body| body.remaining_bytes / body.rate).fold(f64::MAX, f64::min);
        let event = Event::Sent { node: index, version: node.version };
        self.event_at(self.now_ns + nanoseconds(first_s) + 1, event);
    }

    /// At least one body of a node is on the other side.
    fn bodies_sent(&mut self, node: usize) {
        self.update(node);
        let mut sent = Vec::new();
        self.nodes[node].bodies.retain(|body| {
            let done = body.remaining_bytes < 0.5;
            if done {
                sent.push(body.slot);
            }
            !done
        });
        for slot in sent {
            self.calls[slot as usize].sent = true;
            let Some((call, connection)) = self.calls[slot as usize].call else { continue };
            let wait_s = self.random.lognormal(self.model.service_s) + self.hiccup_s(true);
            let factor = slower(&self.buckets[call.bucket], &connection);
            self.answer(slot, wait_s * factor, true);
        }
        self.share(node);
    }

    fn event_at(&mut self, at_ns: u64, event: Event) {
        self.events_made += 1;
        self.events.push(Reverse((at_ns, self.events_made, event)));
    }
}

fn pool(call: &Call) -> usize {
    call.bucket * 2 + usize::from(call.lane == Lane::Hedge)
}

fn slower(sick: &Sickness, connection: &Connection) -> f64 {
    if connection.front_end < sick.slow_front_ends { sick.slower * 10.0 } else { sick.slower }
}

fn nanoseconds(seconds: f64) -> u64 {
    // Saturates.
    (seconds * 1e9) as u64
}

fn nanoseconds_of(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// Seeded random numbers, by splitmix64.
#[derive(Debug)]
pub struct Random(pub u64);

impl Random {
    /// The next one.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// The next one in [0, 1).
    pub fn unit(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// The next one of a lognormal distribution, by its median and σ.
    pub fn lognormal(&mut self, (median, sigma): (f64, f64)) -> f64 {
        // Box and Muller; 1 - u is never 0.
        let radius = (-2.0 * (1.0 - self.unit()).ln()).sqrt();
        let normal = radius * (std::f64::consts::TAU * self.unit()).cos();
        median * (sigma * normal).exp()
    }
}
