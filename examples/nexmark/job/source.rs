//! Where bids come from: the events of the Nexmark benchmark, numbered from 0, the same for each run.
//!
//! One thread makes them and hands each bid to the worker that has its key group. A barrier goes to all workers between
//! two events: what is before it is in the checkpoint, what is behind it is not, and its offset says where that is.

use std::sync::mpsc::{Receiver, Sender, SyncSender, TryRecvError};
use std::time::{Duration, Instant};

use nexmark::EventGenerator;
use nexmark::config::NexmarkConfig;
use nexmark::event::Event;

use super::state::{Bid, Key, WINDOW_MS};
use super::worker::{Input, Reply};

/// Events between two looks for a barrier.
const BATCH_EVENTS: u64 = 512;

/// The events from a number on, as bids; `None` for one that is no bid.
pub fn bids(offset: u64) -> impl Iterator<Item = Option<Bid>> {
    // By default the first event happens now: it would be another one with each run.
    let config = NexmarkConfig { base_time: 0, ..NexmarkConfig::default() };
    EventGenerator::new(config).with_offset(offset).map(|event| match event {
        Event::Bid(bid) => {
            let window = bid.date_time / WINDOW_MS * WINDOW_MS;
            Some(Bid { key: Key { auction: bid.auction as u64, window }, price: bid.price as u64 })
        }
        Event::Person(_) | Event::Auction(_) => None,
    })
}

/// The source of one run.
pub struct Source {
    /// The number of the next event.
    pub offset: u64,
    /// The number after the last event.
    pub end: u64,
    /// Events a second at most.
    pub rate: Option<u64>,
    /// The workers, with the end of their key groups, exclusive.
    pub workers: Vec<(u16, SyncSender<Input>)>,
    /// Numbers of checkpoints that are wanted.
    pub barriers: Receiver<u64>,
    pub replies: Sender<Reply>,
}

impl Source {
    /// Until nobody wants a checkpoint any more, or a worker is gone.
    pub fn run(mut self) {
        let mut bids = bids(self.offset);
        let (started_at, start) = (Instant::now(), self.offset);
        loop {
            let barrier = if self.offset < self.end {
                self.barriers.try_recv()
            } else {
                self.barriers.recv().map_err(|_| TryRecvError::Disconnected)
            };
            let sent = match barrier {
                Ok(checkpoint) => self.send_barrier(checkpoint),
                Err(TryRecvError::Empty) => self.send_bids(&mut bids),
                Err(TryRecvError::Disconnected) => return,
            };
            if sent.is_none() {
                return;
            }
            if let Some(rate) = self.rate {
                let due = Duration::from_secs_f64((self.offset - start) as f64 / rate as f64);
                std::thread::sleep(due.saturating_sub(started_at.elapsed()));
            }
        }
    }

    fn send_barrier(&self, checkpoint: u64) -> Option<()> {
        for (_, worker) in &self.workers {
            worker.send(Input::Barrier(checkpoint)).ok()?;
        }
        self.replies.send(Reply::Offset(self.offset)).ok()
    }

    fn send_bids(&mut self, bids: &mut impl Iterator<Item = Option<Bid>>) -> Option<()> {
        let mut batches: Vec<Vec<Bid>> = vec![Vec::new(); self.workers.len()];
        let count = BATCH_EVENTS.min(self.end - self.offset);
        for bid in bids.take(count as usize).flatten() {
            let key_group = bid.key.key_group().0;
            batches[self.workers.partition_point(|(end, _)| *end <= key_group)].push(bid);
        }
        for ((_, worker), batch) in self.workers.iter().zip(batches) {
            worker.send(Input::Bids(batch)).ok()?;
        }
        self.offset += count;
        if self.offset == self.end {
            self.replies.send(Reply::Ended).ok()?;
        }
        Some(())
    }
}
