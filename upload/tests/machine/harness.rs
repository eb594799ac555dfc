//! Drives one machine by hand: time, and the outcome of every request, are up to the test. What the machine must never do
//! is checked at each of its actions.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tidelog_upload::bucket::{Bucket, BucketIndex};
use tidelog_upload::hedge::Policy;
use tidelog_upload::multipart::{Action, Answer, AttemptId, Event, ObjectMachine, Placement, Request};
use tidelog_upload::store::{
    Capabilities, EntityTag, Lane, ListedObject, Operation, Outcome, Parts, StoreError, StoreErrorKind,
    UploadId,
};
use tidelog_upload::{HedgeOptions, UploadOptions};

/// A bucket as S3's.
pub fn s3() -> Capabilities {
    Capabilities {
        parts: Parts::Parallel,
        part_bytes_min: 5 << 20,
        part_bytes_max: 5 << 30,
        parts_max: 10_000,
        equal_parts: false,
        sparse: true,
        copy_part: false,
        resend_part: false,
        list_parts: true,
        list_uploads: true,
        conditional_put: false,
    }
}

/// One that wants all part numbers.
pub fn dense() -> Capabilities {
    Capabilities { sparse: false, ..s3() }
}

/// One writer and a rename.
pub fn sequential() -> Capabilities {
    Capabilities { parts: Parts::Sequential, sparse: false, list_parts: false, list_uploads: false, ..s3() }
}

/// Whole objects only.
pub fn whole() -> Capabilities {
    Capabilities { parts: Parts::None, sparse: false, list_parts: false, list_uploads: false, ..s3() }
}

pub fn policy(buckets: &[Capabilities], options: UploadOptions, seed: u64) -> Policy {
    let buckets = buckets.iter().enumerate().map(|(index, capabilities)| Bucket {
        url: format!("sim://{index}").into(),
        capabilities: capabilities.clone(),
    });
    Policy::new(options, buckets.collect(), seed)
}

pub fn hedging_off() -> UploadOptions {
    let mut options = UploadOptions::default();
    options.hedging = HedgeOptions::off();
    options
}

/// A request in flight.
#[derive(Clone, Debug)]
pub struct Flight {
    pub bucket: BucketIndex,
    pub name: String,
    pub request: Request,
    pub lane: Lane,
    pub timeout: Duration,
    pub started: Instant,
}

impl Flight {
    pub fn error(&self, kind: StoreErrorKind) -> StoreError {
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
        StoreError::new(operation, "sim://", &self.name, kind)
    }
}

/// What is known of the Completes of one upload.
#[derive(Default)]
struct Completes {
    in_flight: bool,
    unknown: bool,
}

pub struct Harness {
    pub now: Instant,
    pub policy: Policy,
    pub machine: ObjectMachine,
    capabilities: Vec<Capabilities>,
    pub in_flight: BTreeMap<AttemptId, Flight>,
    /// All requests, in order.
    pub started: Vec<(AttemptId, Flight)>,
    pub cancelled: Vec<AttemptId>,
    pub retired: Vec<AttemptId>,
    pub finished: Option<Result<Placement, StoreError>>,
    /// Whether anything was left behind.
    pub settled: Option<bool>,
    pub stored: BTreeSet<u32>,
    pub released: BTreeSet<u32>,
    /// Cancelled requests end at once.
    pub obey: bool,
    /// Prints all events and actions, to find out what a seed does.
    trace: bool,
    completes: BTreeMap<(BucketIndex, UploadId), Completes>,
    /// Part numbers that were sent, and whether something of them may still arrive.
    numbers: BTreeMap<(BucketIndex, UploadId, u32), bool>,
    /// Names of objects that were PUT, and whether something may be there.
    names: BTreeMap<(BucketIndex, String), bool>,
}

impl Harness {
    pub fn new(buckets: &[Capabilities], options: UploadOptions, seed: u64) -> Harness {
        let now = Instant::now();
        Harness::with_policy(policy(buckets, options, seed), now)
    }

    pub fn with_policy(policy: Policy, now: Instant) -> Harness {
        let capabilities = policy.buckets().iter().map(|bucket| bucket.capabilities.clone()).collect();
        let machine = ObjectMachine::new("o".to_owned(), Some(now + Duration::from_secs(600)), now);
        Harness {
            now,
            policy,
            machine,
            capabilities,
            in_flight: BTreeMap::new(),
            started: Vec::new(),
            cancelled: Vec::new(),
            retired: Vec::new(),
            finished: None,
            settled: None,
            stored: BTreeSet::new(),
            released: BTreeSet::new(),
            obey: true,
            trace: std::env::var_os("TIDELOG_TRACE").is_some(),
            completes: BTreeMap::new(),
            numbers: BTreeMap::new(),
            names: BTreeMap::new(),
        }
    }

    /// The next object, under the same policy.
    pub fn again(self) -> Harness {
        assert!(self.settled.is_some() && self.in_flight.is_empty());
        Harness::with_policy(self.policy, self.now)
    }

    pub fn event(&mut self, event: Event) {
        let mut events = vec![event];
        while let Some(event) = events.pop() {
            let mut actions = Vec::new();
            if self.trace {
                println!("{event:?}");
            }
            self.machine.step(event, self.now, &mut self.policy, &mut actions);
            for action in actions {
                self.check(action, &mut events);
            }
        }
    }

    /// The object is these chunks, and a persist waits for it.
    pub fn object(&mut self, chunks: &[u64]) {
        for (index, bytes) in chunks.iter().enumerate() {
            self.event(Event::Chunk { bytes: *bytes, last: index + 1 == chunks.len() });
        }
        self.event(Event::Wanted { deadline: None });
    }

    pub fn ended(&mut self, attempt: AttemptId, outcome: Result<Answer, StoreError>) {
        let flight = self.in_flight.remove(&attempt).expect("a request in flight");
        let unknown = outcome.as_ref().is_err_and(|error| error.outcome() == Outcome::Unknown);
        match &flight.request {
            Request::Complete { upload, .. } => {
                let completes = self.completes.entry((flight.bucket, upload.clone())).or_default();
                completes.in_flight = false;
                completes.unknown |= unknown;
                if outcome.is_ok() {
                    completes.unknown = false;
                }
            }
            Request::Part { upload, number, .. } if !unknown && outcome.is_err() => {
                self.numbers.insert((flight.bucket, upload.clone(), *number), false);
            }
            Request::Put { .. } if !unknown && outcome.is_err() => {
                self.names.insert((flight.bucket, flight.name.clone()), false);
            }
            _ => {}
        }
        self.event(Event::Ended { attempt, outcome });
    }

    /// The store did what it was asked to.
    pub fn ok(&mut self, attempt: AttemptId) {
        let flight = &self.in_flight[&attempt];
        let answer = match &flight.request {
            Request::Create => Answer::Created(UploadId(format!("u{}", attempt.0).into())),
            Request::Put { .. } | Request::Part { .. } => Answer::Tag(tag(&format!("t{}", attempt.0))),
            Request::Complete { .. } => Answer::Tag(tag("done")),
            Request::Abort { .. } | Request::Delete => Answer::Done,
            Request::Head | Request::ListParts { .. } => panic!("say what is there"),
        };
        self.ended(attempt, Ok(answer));
    }

    pub fn err(&mut self, attempt: AttemptId, kind: StoreErrorKind) {
        let error = self.in_flight[&attempt].error(kind);
        self.ended(attempt, Err(error));
    }

    pub fn found(&mut self, attempt: AttemptId, bytes: u64) {
        let name = self.in_flight[&attempt].name.clone();
        let object = ListedObject { name, bytes, tag: tag("done"), modified: None };
        self.ended(attempt, Ok(Answer::Object(object)));
    }

    /// Lets time pass, with a tick whenever the machine asks for one.
    pub fn pass(&mut self, time: Duration) {
        let until = self.now + time;
        while let Some(at) = self.machine.deadline().filter(|at| *at <= until) {
            self.now = self.now.max(at);
            self.event(Event::Tick);
            assert!(self.machine.deadline() != Some(at) || at > self.now, "a tick that changes nothing");
        }
        self.now = until;
        self.event(Event::Tick);
    }

    pub fn find(&self, which: impl Fn(&Flight) -> bool) -> Vec<AttemptId> {
        self.in_flight.iter().filter(|(_, flight)| which(flight)).map(|(id, _)| *id).collect()
    }

    /// The only request in flight that is so.
    pub fn only(&self, which: impl Fn(&Flight) -> bool) -> AttemptId {
        let found = self.find(which);
        assert_eq!(found.len(), 1, "{:#?}", self.in_flight);
        found[0]
    }

    /// The home upload is opened.
    pub fn created(&mut self) -> BucketIndex {
        let create = self.only(|flight| flight.request == Request::Create);
        let bucket = self.in_flight[&create].bucket;
        self.ok(create);
        bucket
    }

    /// Everything in flight of this kind succeeds.
    pub fn all_ok(&mut self, which: impl Fn(&Flight) -> bool) {
        for attempt in self.find(which) {
            if self.in_flight.contains_key(&attempt) {
                self.ok(attempt);
            }
        }
    }

    pub fn placement(&self) -> &Placement {
        self.finished.as_ref().expect("an outcome").as_ref().expect("success")
    }

    pub fn count(&self, which: impl Fn(&Request) -> bool) -> usize {
        self.started.iter().filter(|(_, flight)| which(&flight.request)).count()
    }

    fn check(&mut self, action: Action, events: &mut Vec<Event>) {
        if self.trace {
            println!("  {action:?}");
        }
        assert!(self.settled.is_none(), "{action:?} after all was settled");
        match action {
            Action::Start { attempt, bucket, name, request, lane, timeout } => {
                self.check_start(bucket, &name, &request);
                assert!(timeout >= Duration::from_secs(1), "{request:?} would be given up after {timeout:?}");
                let flight = Flight { bucket, name, request, lane, timeout, started: self.now };
                self.started.push((attempt, flight.clone()));
                assert!(self.in_flight.insert(attempt, flight).is_none(), "{attempt:?} twice");
            }
            Action::Cancel { attempt } => {
                let flight = self.in_flight.get(&attempt).expect("only what is in flight is cancelled");
                let complete = matches!(flight.request, Request::Complete { .. } | Request::Create);
                assert!(!complete, "{flight:?} would have an unknown outcome");
                self.cancelled.push(attempt);
                if self.obey {
                    let error = flight.error(StoreErrorKind::Cancelled);
                    self.in_flight.remove(&attempt);
                    events.push(Event::Ended { attempt, outcome: Err(error) });
                }
            }
            Action::Retire { attempt } => {
                assert!(!self.in_flight.contains_key(&attempt));
                self.retired.push(attempt);
            }
            Action::Stored { chunk } => assert!(self.stored.insert(chunk), "{chunk} stored twice"),
            Action::Release { chunk } => assert!(self.released.insert(chunk), "{chunk} released twice"),
            Action::Finished(outcome) => {
                assert!(self.finished.is_none(), "two outcomes");
                self.finished = Some(outcome);
            }
            Action::Settled { leftovers } => {
                assert!(self.finished.is_some() && self.in_flight.is_empty(), "{:?}", self.in_flight);
                self.settled = Some(leftovers);
            }
        }
    }

    fn check_start(&mut self, bucket: BucketIndex, name: &str, request: &Request) {
        assert!(name == "o" || name.starts_with("o."), "{name} is not found by the object's name");
        let capabilities = &self.capabilities[bucket.0];
        let sent = match request {
            Request::Put { chunks } => chunks.clone(),
            Request::Part { chunk, .. } => *chunk..*chunk + 1,
            _ => 0..0,
        };
        for chunk in sent {
            assert!(!self.released.contains(&chunk), "the bytes of {chunk} are gone");
        }
        match request {
            Request::Put { .. } => {
                let used = self.names.insert((bucket, name.to_owned()), true);
                assert_ne!(used, Some(true), "{name} may be there already");
            }
            Request::Part { upload, number, .. } => {
                assert!(capabilities.parts != Parts::None);
                assert!((1..=capabilities.parts_max).contains(number), "{number}");
                let used = self.numbers.insert((bucket, upload.clone(), *number), true);
                assert!(used != Some(true) || capabilities.resend_part, "part {number} may still arrive");
                let completes = self.completes.entry((bucket, upload.clone())).or_default();
                assert!(!completes.in_flight, "a part during the Complete");
            }
            Request::Complete { upload, parts } => {
                let of_upload = |flight: &Flight| matches!(&flight.request, Request::Part { upload: u, .. } if u == upload && flight.bucket == bucket);
                assert!(!self.in_flight.values().any(of_upload), "parts in flight at the Complete");
                assert!(!parts.is_empty());
                assert!(parts.is_sorted_by(|a, b| a.number < b.number), "{parts:?}");
                let dense = parts.iter().zip(1..).all(|(part, number)| part.number == number);
                assert!(dense || capabilities.sparse, "{parts:?}");
                let completes = self.completes.entry((bucket, upload.clone())).or_default();
                assert!(!completes.in_flight, "two Completes at once");
                completes.in_flight = true;
            }
            Request::Abort { upload } => {
                assert!(self.finished.is_some(), "an abort before the outcome");
                let completes = self.completes.entry((bucket, upload.clone())).or_default();
                assert!(!completes.in_flight && !completes.unknown, "an abort that may race a Complete");
            }
            Request::Delete => {
                assert!(self.finished.is_some(), "a deletion before the outcome");
                if let Some(Ok(placement)) = &self.finished {
                    let kept = placement.pieces.iter().any(|p| p.bucket == bucket && p.name == name);
                    assert!(!kept, "{name} is part of the object");
                }
            }
            Request::ListParts { .. } => assert!(capabilities.list_parts),
            Request::Create => assert!(capabilities.parts != Parts::None),
            Request::Head => {}
        }
    }
}

pub fn tag(text: &str) -> EntityTag {
    EntityTag(Arc::from(text))
}

pub fn is_put(flight: &Flight) -> bool {
    matches!(flight.request, Request::Put { .. })
}

pub fn is_part(flight: &Flight) -> bool {
    matches!(flight.request, Request::Part { .. })
}

pub fn is_complete(flight: &Flight) -> bool {
    matches!(flight.request, Request::Complete { .. })
}

pub fn is_clearing(flight: &Flight) -> bool {
    matches!(flight.request, Request::Abort { .. } | Request::Delete)
}
