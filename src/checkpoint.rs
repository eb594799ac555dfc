//! Who asked for what, and when an object is cut. Pure: time is an argument, and nothing here touches a byte.
//!
//! A request is *marked* once the spiller knows the block at which it ends. Marked requests share one object: it is cut
//! when every open writer has asked, or [`batch_delay`](Checkpoints::new) after the first was made, whichever is earlier;
//! who is not marked by then joins the next one, so that no writer waits for another longer than that delay. A request
//! whose object failed comes back: it joins the next object, which is cut for it alone only after a pause. What the object
//! holds, whether its upload succeeds, and for how long somebody waits, is the uploader's business.
//!
//! Invariants:
//! 1. A request leaves with a cut, or is forgotten. It comes back only if it has left.
//! 2. A cut's end on a device is the largest end of its requests there, so it covers each of them.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use crate::types::{LogId, SequenceNumber};

/// Names a request for as long as it waits. Grows with each request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct RequestId(pub u64);

/// One call of `persist_durably`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Request {
    pub log: LogId,
    /// Index of the device that the log lives on.
    pub device: usize,
    pub from: SequenceNumber,
    pub to: SequenceNumber,
    pub asked_at: Instant,
    /// The device-wide number of the first block that the request does not need, once the spiller has said so.
    pub end: Option<u64>,
}

/// Requests to be served by one object.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Cut {
    /// For each device, the first block that is not needed; `None` where nobody asked.
    pub ends: Vec<Option<u64>>,
    pub requests: Vec<(RequestId, Request)>,
}

impl Cut {
    /// What of the cut concerns devices for which `wanted` holds, and what the others.
    pub fn split(self, wanted: impl Fn(usize) -> bool) -> (Cut, Cut) {
        let keep = |ends: &[Option<u64>], wanted: &dyn Fn(usize) -> bool| -> Vec<Option<u64>> {
            ends.iter().enumerate().map(|(device, end)| end.filter(|_| wanted(device))).collect()
        };
        let ends = keep(&self.ends, &wanted);
        let other_ends = keep(&self.ends, &|device| !wanted(device));
        let (requests, others) = self.requests.into_iter().partition(|(_, request)| wanted(request.device));
        (Cut { ends, requests }, Cut { ends: other_ends, requests: others })
    }
}

/// What to do now.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Decision {
    /// Nobody is marked.
    Idle,
    /// Ask again at this time, or when something changes.
    Wait(Instant),
    /// Cut an object for these.
    Cut(Cut),
}

/// The requests that wait for an object.
#[derive(Debug)]
pub(crate) struct Checkpoints {
    batch_delay: Duration,
    devices: usize,
    waiting: BTreeMap<RequestId, Waiting>,
}

#[derive(Debug)]
struct Waiting {
    request: Request,
    /// Its object failed, and for its sake alone none is cut before this time.
    again_at: Option<Instant>,
}

impl Checkpoints {
    pub fn new(batch_delay: Duration, devices: usize) -> Checkpoints {
        Checkpoints { batch_delay, devices, waiting: BTreeMap::new() }
    }

    /// A new request.
    pub fn ask(&mut self, id: RequestId, request: Request) {
        debug_assert!(self.waiting.values().all(|waiting| waiting.request.device < self.devices));
        self.waiting.insert(id, Waiting { request, again_at: None });
    }

    /// A request that left with a cut whose object failed.
    pub fn ask_again(&mut self, id: RequestId, request: Request, at: Instant) {
        debug_assert!(request.end.is_some(), "it has left with a cut");
        self.waiting.insert(id, Waiting { request, again_at: Some(at) });
    }

    /// Nobody waits for the request any more.
    pub fn forget(&mut self, id: RequestId) {
        self.waiting.remove(&id);
    }

    /// The spiller has put all that the request needs into blocks below `end`. `false` if nobody waits for it.
    pub fn mark(&mut self, id: RequestId, end: u64) -> bool {
        match self.waiting.get_mut(&id) {
            Some(waiting) => {
                waiting.request.end = Some(end);
                true
            }
            None => false,
        }
    }

    /// Takes out the requests of devices for which `stuck` holds of which some is not in blocks yet.
    pub fn take_unmarked(&mut self, stuck: impl Fn(usize) -> bool) -> Vec<(RequestId, Request)> {
        let is_stuck = |request: &Request| request.end.is_none() && stuck(request.device);
        let waiting = self.waiting.iter().filter(|(_, waiting)| is_stuck(&waiting.request));
        let taken: Vec<RequestId> = waiting.map(|(id, _)| *id).collect();
        taken.into_iter().filter_map(|id| Some((id, self.waiting.remove(&id)?.request))).collect()
    }

    /// The lowest number that a waiting request of `log` needs: what truncation must leave alone until then.
    pub fn needed_from(&self, log: LogId) -> Option<SequenceNumber> {
        let requests = self.waiting.values().map(|waiting| &waiting.request);
        requests.filter(|request| request.log == log).map(|request| request.from).min()
    }

    /// Decides at time `now`, with writers of these logs open. The requests of a cut are gone from the waiting ones.
    pub fn decide(&mut self, now: Instant, open: &BTreeSet<LogId>) -> Decision {
        let marked = || self.waiting.iter().filter(|(_, waiting)| waiting.request.end.is_some());
        let due_at =
            |waiting: &Waiting| waiting.again_at.unwrap_or(waiting.request.asked_at + self.batch_delay);
        let Some(due) = marked().map(|(_, waiting)| due_at(waiting)).min() else {
            return Decision::Idle;
        };
        // Who asked and closed its writer since, or has none, is not waited for, and stands for nobody else.
        let asked: BTreeSet<LogId> =
            marked().map(|(_, waiting)| waiting.request.log).filter(|log| open.contains(log)).collect();
        let any_new = marked().any(|(_, waiting)| waiting.again_at.is_none());
        if now < due && !(any_new && asked.len() == open.len()) {
            return Decision::Wait(due);
        }
        let mut cut = Cut { ends: vec![None; self.devices], requests: Vec::new() };
        let taken: Vec<RequestId> = marked().map(|(id, _)| *id).collect();
        for id in taken {
            let Waiting { request, .. } = self.waiting.remove(&id).expect("it was just seen");
            let end = &mut cut.ends[request.device];
            *end = (*end).max(request.end);
            cut.requests.push((id, request));
        }
        Decision::Cut(cut)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DELAY: Duration = Duration::from_millis(5);

    fn request(log: u128, device: usize, asked_at: Instant) -> Request {
        Request {
            log: LogId(log),
            device,
            from: SequenceNumber(2),
            to: SequenceNumber(9),
            asked_at,
            end: None,
        }
    }

    /// The logs of so many open writers.
    fn open(writers: u128) -> BTreeSet<LogId> {
        (1..=writers).map(LogId).collect()
    }

    #[test]
    fn cuts_when_all_writers_have_asked() {
        let now = Instant::now();
        let mut checkpoints = Checkpoints::new(DELAY, 2);
        assert_eq!(checkpoints.decide(now, &open(2)), Decision::Idle);
        checkpoints.ask(RequestId(0), request(1, 0, now));
        assert_eq!(checkpoints.decide(now, &open(2)), Decision::Idle, "an unmarked request cannot be cut");
        assert!(checkpoints.mark(RequestId(0), 7));
        assert_eq!(checkpoints.decide(now, &open(2)), Decision::Wait(now + DELAY));
        checkpoints.ask(RequestId(1), request(2, 1, now));
        checkpoints.mark(RequestId(1), 3);
        let Decision::Cut(cut) = checkpoints.decide(now, &open(2)) else { panic!("both have asked") };
        assert_eq!(cut.ends, [Some(7), Some(3)]);
        assert_eq!(cut.requests.len(), 2);
        assert_eq!(checkpoints.decide(now, &open(2)), Decision::Idle);
        assert!(!checkpoints.mark(RequestId(0), 9), "it left with the cut");
    }

    #[test]
    fn a_hung_writer_delays_the_others_by_the_batch_delay_only() {
        let now = Instant::now();
        let mut checkpoints = Checkpoints::new(DELAY, 1);
        checkpoints.ask(RequestId(0), request(1, 0, now));
        checkpoints.ask(RequestId(1), request(2, 0, now));
        checkpoints.mark(RequestId(0), 4);
        assert_eq!(checkpoints.decide(now, &open(64)), Decision::Wait(now + DELAY));
        let Decision::Cut(cut) = checkpoints.decide(now + DELAY, &open(64)) else {
            panic!("the delay is over")
        };
        assert_eq!(cut.ends, [Some(4)]);
        assert_eq!(cut.requests[0].0, RequestId(0));
        checkpoints.mark(RequestId(1), 6);
        let Decision::Cut(cut) = checkpoints.decide(now + DELAY, &open(64)) else { panic!("late, but due") };
        assert_eq!(cut.requests[0].0, RequestId(1));
    }

    #[test]
    fn who_asked_and_closed_stands_for_nobody_who_is_open() {
        let now = Instant::now();
        let mut checkpoints = Checkpoints::new(DELAY, 1);
        for (id, log) in [(0, 3), (1, 1)] {
            checkpoints.ask(RequestId(id), request(log, 0, now));
            checkpoints.mark(RequestId(id), 4);
        }
        assert_eq!(checkpoints.decide(now, &open(2)), Decision::Wait(now + DELAY), "writer 2 has not asked");
        assert!(
            matches!(checkpoints.decide(now, &open(1)), Decision::Cut(_)),
            "it has closed, and waits for nobody"
        );
    }

    #[test]
    fn a_cut_splits_by_device() {
        let now = Instant::now();
        let requests = vec![(RequestId(0), request(1, 0, now)), (RequestId(1), request(2, 1, now))];
        let cut = Cut { ends: vec![Some(4), Some(9)], requests: requests.clone() };
        let (first, second) = cut.split(|device| device == 1);
        assert_eq!(first, Cut { ends: vec![None, Some(9)], requests: requests[1..].to_vec() });
        assert_eq!(second, Cut { ends: vec![Some(4), None], requests: requests[..1].to_vec() });
    }

    #[test]
    fn two_requests_of_one_writer_count_once_and_the_larger_end_wins() {
        let now = Instant::now();
        let mut checkpoints = Checkpoints::new(DELAY, 1);
        for (id, end) in [(0, 9), (1, 8)] {
            checkpoints.ask(RequestId(id), request(1, 0, now));
            checkpoints.mark(RequestId(id), end);
        }
        assert_eq!(checkpoints.decide(now, &open(2)), Decision::Wait(now + DELAY));
        let Decision::Cut(cut) = checkpoints.decide(now, &open(1)) else {
            panic!("the only writer has asked")
        };
        assert_eq!(cut.ends, [Some(9)]);
    }

    #[test]
    fn a_request_whose_object_failed_joins_the_next_or_has_its_own_after_a_pause() {
        let now = Instant::now();
        let (later, pause) = (now + DELAY / 2, DELAY * 10);
        let mut checkpoints = Checkpoints::new(DELAY, 1);
        let failed = || Request { end: Some(4), ..request(1, 0, now) };
        checkpoints.ask_again(RequestId(0), failed(), now + pause);
        assert_eq!(checkpoints.needed_from(LogId(1)), Some(SequenceNumber(2)));
        assert_eq!(
            checkpoints.decide(later, &open(1)),
            Decision::Wait(now + pause),
            "all have asked, but in vain"
        );
        let Decision::Cut(cut) = checkpoints.decide(now + pause, &open(9)) else {
            panic!("the pause is over")
        };
        assert_eq!(cut.ends, [Some(4)]);
        checkpoints.ask_again(RequestId(0), failed(), now + pause);
        checkpoints.ask(RequestId(1), request(2, 0, later));
        checkpoints.mark(RequestId(1), 6);
        assert_eq!(
            checkpoints.decide(later, &open(3)),
            Decision::Wait(later + DELAY),
            "the new one does not wait"
        );
        let Decision::Cut(cut) = checkpoints.decide(later, &open(2)) else { panic!("all have asked") };
        assert_eq!((cut.requests.len(), &cut.ends[..]), (2, &[Some(6)][..]));
    }

    #[test]
    fn waiting_requests_hold_truncation_back() {
        let now = Instant::now();
        let mut checkpoints = Checkpoints::new(DELAY, 1);
        checkpoints.ask(RequestId(0), request(1, 0, now));
        assert_eq!(checkpoints.needed_from(LogId(1)), Some(SequenceNumber(2)));
        assert_eq!(checkpoints.needed_from(LogId(2)), None);
        checkpoints.mark(RequestId(0), 1);
        assert!(matches!(checkpoints.decide(now, &open(1)), Decision::Cut(_)));
        assert_eq!(checkpoints.needed_from(LogId(1)), None, "the cut's owner looks after it now");
    }
}
