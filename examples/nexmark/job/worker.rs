//! A worker: the state of a range of key groups, and the log of its changes.
//!
//! Each bid changes the state and is appended to the log. A barrier asks the log to persist and goes on with the next
//! bid at once: who waits for the answer is the coordinator. Now and then the worker writes a snapshot at a barrier, and
//! its part of the checkpoint begins there.

use std::sync::mpsc::{Receiver, Sender};

use tidelog::{
    ChangelogReader, ChangelogWriter, KeyGroupRange, PersistFuture, SequenceNumber, WriterControl,
};

use super::checkpoint::{Folder, Part};
use super::state::{Bid, REGISTRATION, State, encode};
use super::{Failure, Report};

/// What a worker is told. The end of its inbox is the end of its work.
pub enum Input {
    Bids(Vec<Bid>),
    /// The number of the checkpoint.
    Barrier(u64),
}

/// What the coordinator is told.
pub enum Reply {
    /// All events below this number are before the barrier.
    Offset(u64),
    /// There are no more events.
    Ended,
    Ack(Ack),
    /// A worker cannot go on.
    Failed(Failure),
}

/// A worker's share of a checkpoint.
pub struct Ack {
    /// What was restored and no snapshot of its own has replaced yet.
    pub restored: Vec<Part>,
    pub key_groups: KeyGroupRange,
    /// The state at `from`.
    pub snapshot: Option<String>,
    pub from: SequenceNumber,
    pub persist: PersistFuture,
    pub control: WriterControl,
}

/// A worker of one run.
pub struct Worker<'a> {
    pub state: State,
    pub restored: Vec<Part>,
    pub snapshot: Option<String>,
    /// Where the changes since the snapshot begin.
    pub from: SequenceNumber,
    pub writer: ChangelogWriter,
    /// A snapshot every so many checkpoints.
    pub materialize_every: u64,
    /// Which of them, so that workers take turns.
    pub turn: u64,
    pub folder: &'a Folder,
    pub report: &'a (dyn Fn(Report) + Sync),
    pub replies: Sender<Reply>,
}

/// The state of `key_groups` in a checkpoint that may be of other ranges, and the parts that it came from.
pub fn restore(
    parts: &[Part],
    key_groups: KeyGroupRange,
    folder: &Folder,
) -> Result<(State, Vec<Part>), Failure> {
    let (mut state, mut used) = (State::default(), Vec::new());
    for part in parts {
        let Some(key_groups) = part.key_groups.intersection(key_groups) else { continue };
        if let Some(snapshot) = &part.snapshot {
            state.load(&folder.read(snapshot)?, key_groups)?;
        }
        let mut registered = part.snapshot.is_some();
        for change in ChangelogReader::open(std::slice::from_ref(&part.handle), key_groups)? {
            let change = change?;
            match change.key_group {
                None if change.value == REGISTRATION => registered = true,
                None => return Err("the log is of another state".into()),
                Some(_) if !registered => return Err("a change came before the registration".into()),
                Some(key_group) => state.apply(key_group, &change.value)?,
            }
        }
        used.push(Part { key_groups, ..part.clone() });
    }
    Ok((state, used))
}

impl Worker<'_> {
    /// Until the inbox ends. Gives the state.
    pub fn run(mut self, inbox: Receiver<Input>) -> State {
        if let Err(failure) = self.work(inbox) {
            // Nobody listens: then somebody else failed before.
            let _ = self.replies.send(Reply::Failed(failure));
        }
        self.state
    }

    fn work(&mut self, inbox: Receiver<Input>) -> Result<(), Failure> {
        self.writer.append_metadata(REGISTRATION)?;
        for input in inbox {
            match input {
                Input::Bids(bids) => bids.into_iter().try_for_each(|bid| self.take(bid))?,
                Input::Barrier(checkpoint) => self.barrier(checkpoint)?,
            }
        }
        Ok(())
    }

    fn take(&mut self, bid: Bid) -> Result<(), Failure> {
        let aggregate = self.state.after(bid);
        let change = encode(bid.key, aggregate);
        while let Err(error) = self.writer.append(bid.key.key_group(), &change) {
            if !error.is_retryable() {
                return Err(error.into());
            }
            // The disk is full or the buckets do not keep up. The source waits with this worker.
            (self.report)(Report::Full { key_groups: self.writer.key_groups() });
        }
        self.state.put(bid.key, aggregate);
        Ok(())
    }

    fn barrier(&mut self, checkpoint: u64) -> Result<(), Failure> {
        let key_groups = self.writer.key_groups();
        if (checkpoint + self.turn).is_multiple_of(self.materialize_every) {
            let name = format!("snapshot-{checkpoint}-{}", key_groups.first());
            self.folder.write(&name, &self.state.snapshot())?;
            // The registration and all changes so far are in the snapshot.
            self.snapshot = Some(name);
            self.from = self.writer.next_sequence_number();
            self.restored.clear();
        }
        let ack = Ack {
            restored: self.restored.clone(),
            key_groups,
            snapshot: self.snapshot.clone(),
            from: self.from,
            persist: self.writer.persist_durably(self.from),
            control: self.writer.control(),
        };
        // Nobody listens: the inbox will end.
        let _ = self.replies.send(Reply::Ack(ack));
        Ok(())
    }
}
