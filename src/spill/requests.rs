//! What the spiller is asked: when a request is met, and when it is answered.

use tidelog_upload::Resolver;

use super::Spiller;
use crate::device::SpillRequest;
use crate::error::SyncError;
use crate::types::SequenceNumber;
use crate::uploader::Event;

pub(super) struct Flush {
    /// For each lane that existed, the position to drain to.
    pub(super) targets: Vec<u64>,
    pub(super) resolver: Resolver<Result<(), SyncError>>,
}

/// What is owed to who asked.
pub(super) enum Answer {
    Sync(SequenceNumber, Resolver<Result<SequenceNumber, SyncError>>),
    Flush(Resolver<Result<(), SyncError>>),
}

impl Spiller {
    pub(super) fn take_requests(&mut self) {
        for request in self.parts.device.take_requests() {
            match request {
                SpillRequest::Release { segment, epoch } => {
                    self.parts.segments.release(segment, epoch);
                    self.relax();
                }
                SpillRequest::Flush { resolver } => {
                    let lanes = self.parts.device.lanes_from(0);
                    let targets = lanes.iter().map(|lane| lane.committed()).collect();
                    self.flushes.push(Flush { targets, resolver });
                }
                SpillRequest::Exit => self.exit = true,
                request => self.requests.push(request),
            }
        }
    }

    /// Serves the requests whose lanes are drained far enough.
    pub(super) fn serve_requests(&mut self) {
        if self.large.is_some() {
            return;
        }
        let lanes = &self.lanes;
        let drained = |lane: u32, position: u64| {
            lanes.get(lane as usize).is_some_and(|lane| lane.position() >= position)
        };
        let (met, open): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.requests).into_iter().partition(|request| match request {
                SpillRequest::Sync { lane, position, .. }
                | SpillRequest::Mark { lane, position, .. }
                | SpillRequest::CloseLog { lane, position, .. } => drained(*lane, *position),
                SpillRequest::Release { .. } | SpillRequest::Flush { .. } | SpillRequest::Exit => true,
            });
        self.requests = open;
        let flushed = |flush: &Flush| {
            flush.targets.iter().enumerate().all(|(lane, target)| drained(lane as u32, *target))
        };
        let (flushes, open): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.flushes).into_iter().partition(flushed);
        self.flushes = open;
        if met.is_empty() && flushes.is_empty() {
            return;
        }
        self.finish_block();
        let end = self.next_number();
        for request in met {
            match request {
                SpillRequest::Sync { to, resolver, .. } => self.owe(end, Answer::Sync(to, resolver)),
                SpillRequest::Mark { request, .. } => {
                    let device = self.parts.device.index;
                    self.tell(Event::Marked { request, device, end });
                }
                SpillRequest::CloseLog { slot, .. } => {
                    if let Some(state) = self.logs.get_mut(slot as usize) {
                        *state = None;
                    }
                    self.parts.device.free_slot(slot);
                }
                SpillRequest::Release { .. } | SpillRequest::Flush { .. } | SpillRequest::Exit => {}
            }
        }
        for flush in flushes {
            self.owe(end, Answer::Flush(flush.resolver));
        }
    }

    /// Answers when all blocks below `end` are durable.
    pub(super) fn owe(&mut self, end: u64, answer: Answer) {
        if let Some(failure) = self.failure() {
            answer.give(Err(failure));
        } else if end <= self.parts.segments.watermark() {
            answer.give(Ok(()));
        } else {
            self.syncs.push((end, answer));
        }
    }
}

impl Answer {
    pub(super) fn give(self, outcome: Result<(), SyncError>) {
        match self {
            Answer::Sync(to, resolver) => resolver.resolve(outcome.map(|()| to)),
            Answer::Flush(resolver) => resolver.resolve(outcome),
        }
    }
}
