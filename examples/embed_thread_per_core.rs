//! An engine with one pinned thread per core and an executor of its own on each: tasks never change their thread.
//!
//! The executor is written out below to show how little tidelog asks of one: its futures are woken from tidelog's threads,
//! and need no reactor. Each core has several operator instances, all of which append to the lane of their core. After the
//! crash the job is rescaled: more instances take up the handles of fewer.

#[path = "embed_job/mod.rs"]
mod embed_job;

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::future::{Future, poll_fn};
use std::path::Path;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::Duration;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use tidelog::{
    AppendError, Changelog, ChangelogHandle, ChangelogReader, ChangelogWriter, KeyGroup, KeyGroupRange,
    Options, SequenceNumber, WriterControl,
};

use embed_job::{BARRIER_EVERY, Result, State, apply, change, expected, key_group, key_groups, record};

const CORES: usize = 2;
/// What a reader has to know before any change: the layout of the changes.
const LAYOUT: &[u8] = b"key: u64, sum: i64";

/// Runs tasks on the thread that made it. They may hold what is not `Send`; only their wakers leave the thread.
struct Executor {
    tasks: RefCell<HashMap<u64, Task>>,
    next_id: Cell<u64>,
    ready: Arc<Ready>,
}

type Task = Pin<Box<dyn Future<Output = Result<()>>>>;

/// The tasks that can go on.
struct Ready {
    ids: Mutex<VecDeque<u64>>,
    thread: Thread,
}

struct TaskWaker {
    id: u64,
    ready: Arc<Ready>,
}

impl Wake for TaskWaker {
    fn wake(self: Arc<Self>) {
        self.ready.push(self.id);
        self.ready.thread.unpark();
    }
}

impl Ready {
    fn push(&self, id: u64) {
        self.ids.lock().unwrap_or_else(PoisonError::into_inner).push_back(id);
    }

    fn pop(&self) -> Option<u64> {
        self.ids.lock().unwrap_or_else(PoisonError::into_inner).pop_front()
    }
}

impl Executor {
    fn new() -> Executor {
        let ready = Arc::new(Ready { ids: Mutex::default(), thread: thread::current() });
        Executor { tasks: RefCell::default(), next_id: Cell::default(), ready }
    }

    fn spawn(&self, task: impl Future<Output = Result<()>> + 'static) {
        let id = self.next_id.replace(self.next_id.get() + 1);
        self.tasks.borrow_mut().insert(id, Box::pin(task));
        self.ready.push(id);
    }

    /// Runs until no task is left. Stops at the first one that fails.
    fn run(&self) -> Result<()> {
        while !self.tasks.borrow().is_empty() {
            let Some(id) = self.ready.pop() else {
                thread::park();
                continue;
            };
            // A waker may be called when its task is over.
            let Some(mut task) = self.tasks.borrow_mut().remove(&id) else { continue };
            let waker = Waker::from(Arc::new(TaskWaker { id, ready: Arc::clone(&self.ready) }));
            match task.as_mut().poll(&mut Context::from_waker(&waker)) {
                Poll::Ready(outcome) => outcome?,
                Poll::Pending => drop(self.tasks.borrow_mut().insert(id, task)),
            }
        }
        Ok(())
    }
}

/// Lets the other tasks of this thread run.
async fn yield_now() {
    let mut yielded = false;
    poll_fn(|context| {
        if std::mem::replace(&mut yielded, true) {
            return Poll::Ready(());
        }
        context.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

/// Keeps this thread on one of the cores that the process may use.
fn pin(core: usize) -> Result<()> {
    let allowed = sched_getaffinity(None)?;
    let cores: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|cpu| allowed.is_set(*cpu)).collect();
    let mut only = CpuSet::new();
    only.set(cores[core % cores.len()]);
    Ok(sched_setaffinity(None, &only)?)
}

/// What a checkpoint stores: handles as bytes, in the order of their logs.
#[derive(Clone, Default)]
struct Checkpoint {
    /// The records before this position are in the state.
    position: u64,
    handles: Vec<Vec<u8>>,
}

impl Checkpoint {
    fn handles(&self) -> Result<Vec<ChangelogHandle>> {
        Ok(self
            .handles
            .iter()
            .map(|bytes| ChangelogHandle::from_bytes(bytes))
            .collect::<std::result::Result<_, _>>()?)
    }
}

/// What an instance tells the coordinator.
enum Report {
    /// The state that it starts with.
    Restored(u16, State),
    /// Its changes of a checkpoint are in the bucket.
    Persisted(u64, ChangelogHandle, WriterControl),
    /// The state that it ends with.
    Ended(u16, State),
}

/// An operator instance.
struct Instance {
    number: u16,
    key_groups: KeyGroupRange,
    writer: ChangelogWriter,
    state: State,
}

impl Instance {
    /// Restores the state, then reads the source from the checkpoint to `until`.
    async fn run(
        mut self,
        executor: Rc<Executor>,
        checkpoint: Arc<Checkpoint>,
        until: u64,
        coordinator: Sender<Report>,
    ) -> Result<()> {
        self.restore(&checkpoint.handles()?).await?;
        coordinator.send(Report::Restored(self.number, self.state.clone()))?;
        self.writer.append_metadata(LAYOUT)?;
        for position in checkpoint.position..until {
            if position > checkpoint.position && position.is_multiple_of(BARRIER_EVERY) {
                self.barrier(position / BARRIER_EVERY, &executor, &coordinator);
            }
            if position.is_multiple_of(100) {
                // A real source is awaited here.
                yield_now().await;
            }
            let (key, amount) = record(position);
            let group = key_group(key);
            if self.key_groups.contains(group) {
                let sum = self.state.entry(key).or_default();
                *sum += amount;
                let value = change(key, *sum);
                self.append(group, &value).await?;
            }
        }
        coordinator.send(Report::Ended(self.number, self.state))?;
        Ok(())
    }

    async fn restore(&mut self, handles: &[ChangelogHandle]) -> Result<()> {
        let mut reader = ChangelogReader::open(handles, self.key_groups)?;
        while let Some(changes) = reader.next_batch().await? {
            for change in changes.iter() {
                match change.key_group {
                    // Metadata comes first, from each log that has a part of these key groups.
                    None => assert_eq!(change.value, LAYOUT),
                    Some(_) => apply(&mut self.state, change.value)?,
                }
            }
        }
        Ok(())
    }

    /// Asks for a checkpoint. A task of its own waits for it, so that this instance and its neighbours go on.
    fn barrier(&mut self, checkpoint: u64, executor: &Executor, coordinator: &Sender<Report>) {
        let persist = self.writer.persist_durably(SequenceNumber::ZERO);
        let (control, coordinator) = (self.writer.control(), coordinator.clone());
        executor.spawn(async move {
            let handle = persist.await?;
            Ok(coordinator.send(Report::Persisted(checkpoint, handle, control))?)
        });
    }

    /// Appends, and lets the neighbours run while the lane is full.
    async fn append(&mut self, group: KeyGroup, value: &[u8]) -> Result<()> {
        loop {
            match self.writer.try_append(group, value) {
                Ok(_) => return Ok(()),
                Err(AppendError::Full { .. }) => self.writer.room(value.len()).await?,
                Err(error) => return Err(error.into()),
            }
        }
    }
}

/// Collects what `instances` instances tell. Gives the states as they were restored and at the end, and the last checkpoint.
fn coordinate(
    reports: &Receiver<Report>,
    instances: u16,
    restored: &Checkpoint,
) -> Result<(Vec<State>, Vec<State>, Checkpoint)> {
    let mut last = restored.clone();
    let (mut before, mut after) = (BTreeMap::new(), BTreeMap::new());
    let mut persisted: BTreeMap<u64, Vec<(ChangelogHandle, WriterControl)>> = BTreeMap::new();
    for report in reports {
        let (checkpoint, handle, control) = match report {
            Report::Restored(number, state) => {
                before.insert(number, state);
                continue;
            }
            Report::Ended(number, state) => {
                after.insert(number, state);
                continue;
            }
            Report::Persisted(checkpoint, handle, control) => (checkpoint, handle, control),
        };
        let all = persisted.entry(checkpoint).or_default();
        all.push((handle, control));
        if all.len() < usize::from(instances) {
            continue;
        }
        // The handles of earlier logs stay: the state is what they hold, and then what the new ones hold.
        let own = all.iter().map(|(handle, _)| handle.to_bytes());
        let handles = restored.handles.iter().cloned().chain(own).collect();
        // A real engine stores this, and confirms only then.
        last = Checkpoint { position: checkpoint * BARRIER_EVERY, handles };
        for (handle, control) in all {
            control.confirm(handle.to())?;
        }
    }
    Ok((before.into_values().collect(), after.into_values().collect(), last))
}

/// Runs the job with `instances` instances in a directory, from a checkpoint to a position, and compares the states.
fn run_job(
    dir: &Path,
    machine: &str,
    instances: u16,
    checkpoint: Checkpoint,
    until: u64,
) -> Result<(Checkpoint, Changelog)> {
    let bucket = format!("file://{}", dir.join("bucket").display());
    // Small, for an example: so the instances have to wait for room.
    let options = Options::new(bucket, dir.join(machine))
        .lane_bytes(64 << 10)
        .segment_bytes(1 << 20)
        .local_bytes(16 << 20);
    let changelog = Changelog::open(options)?;
    let (sender, reports) = mpsc::channel();
    let checkpoint = Arc::new(checkpoint);
    let outcome: Result<_> = thread::scope(|scope| {
        let mut cores = Vec::new();
        for core in 0..CORES {
            let (changelog, checkpoint, sender) = (&changelog, Arc::clone(&checkpoint), sender.clone());
            cores.push(scope.spawn(move || -> Result<()> {
                pin(core)?;
                let executor = Rc::new(Executor::new());
                for number in (0..instances).filter(|number| usize::from(*number) % CORES == core) {
                    let key_groups = key_groups(number, instances);
                    let writer = changelog.create_writer(format!("sums-{number}"), key_groups)?;
                    let instance = Instance { number, key_groups, writer, state: State::new() };
                    let (checkpoint, sender) = (Arc::clone(&checkpoint), sender.clone());
                    executor.spawn(instance.run(Rc::clone(&executor), checkpoint, until, sender));
                }
                drop(sender);
                executor.run()
            }));
        }
        drop(sender);
        let outcome = coordinate(&reports, instances, &checkpoint)?;
        for core in cores {
            core.join().map_err(|_| "a core panicked")??;
        }
        Ok(outcome)
    });
    let (restored, states, last) = outcome?;
    for (number, (restored, state)) in (0..).zip(restored.iter().zip(&states)) {
        let key_groups = key_groups(number, instances);
        assert_eq!(*restored, expected(key_groups, checkpoint.position), "as at the last checkpoint");
        assert_eq!(*state, expected(key_groups, until), "as if nothing had happened");
    }
    assert_eq!(states.len(), usize::from(instances));
    println!("{instances} instances went on from {}, crash at {until}", checkpoint.position);
    Ok((last, changelog))
}

/// Crashes between two checkpoints, and goes on with another number of instances.
pub fn run(dir: &Path) -> Result<()> {
    let mut checkpoint = Checkpoint::default();
    for (run, instances) in (1..).zip([4, 6, 3]) {
        let until = run * 2 * BARRIER_EVERY + 5;
        let (last, changelog) = run_job(dir, &format!("run-{run}"), instances, checkpoint, until)?;
        checkpoint = last;
        if run < 3 {
            // The crash: nothing is closed.
            drop(changelog);
        } else {
            changelog.close(Duration::from_secs(30))?;
        }
    }
    Ok(())
}

fn main() -> Result<()> {
    let dir = tempfile::tempdir()?;
    run(dir.path())
}
