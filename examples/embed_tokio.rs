//! An engine of tasks on a multi-thread tokio runtime, on which tidelog uploads as well.
//!
//! No task blocks: appends wait for room by a future, and a checkpoint is awaited while the next records are appended. After
//! the crash another machine goes on: it has another directory, and only the handles. Two buckets hold the objects. In the
//! end the handles are compacted, and what they named before is deleted.

#[path = "embed_job/mod.rs"]
mod embed_job;

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use tidelog::{
    AppendError, ChangeKey, Changelog, ChangelogHandle, ChangelogReader, ChangelogWriter, CompactError,
    Compactor, KeyGroup, KeyGroupRange, Options, PersistFuture, SequenceNumber, UploadRuntime, WriterControl,
};
use tokio::runtime::{Builder, Handle};
use tokio::sync::mpsc;
use tokio::task::{spawn_blocking, yield_now};

use embed_job::{BARRIER_EVERY, Result, State, apply, change, expected, key_group, key_groups, record};

const INSTANCES: u16 = 4;

/// What a checkpoint stores: for each instance the handles that its state is made of, in their order.
#[derive(Clone, Default)]
struct Checkpoint {
    /// The records before this position are in the state.
    position: u64,
    handles: Vec<Vec<ChangelogHandle>>,
}

/// What an instance tells the coordinator at a barrier.
struct Report {
    checkpoint: u64,
    instance: u16,
    persist: PersistFuture,
}

/// An operator instance.
struct Instance {
    number: u16,
    key_groups: KeyGroupRange,
    writer: ChangelogWriter,
    state: State,
}

impl Instance {
    /// Reads the source from `start` to `until`.
    async fn run(mut self, start: u64, until: u64, coordinator: mpsc::Sender<Report>) -> Result<State> {
        for position in start..until {
            if position > start && position.is_multiple_of(BARRIER_EVERY) {
                // The changes so far are asked for; nothing is waited for.
                let persist = self.writer.persist_durably(SequenceNumber::ZERO);
                let checkpoint = position / BARRIER_EVERY;
                coordinator.send(Report { checkpoint, instance: self.number, persist }).await?;
            }
            if position.is_multiple_of(1_000) {
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
        Ok(self.state)
    }

    /// Appends, and lets other tasks run while there is no room.
    async fn append(&mut self, group: KeyGroup, value: &[u8]) -> Result<()> {
        loop {
            match self.writer.try_append(group, value) {
                Ok(_) => return Ok(()),
                // Whoever is faster may take the room again, and this task may move to another thread: so in a loop.
                Err(AppendError::Full { .. }) => self.writer.room(value.len()).await?,
                Err(error) => return Err(error.into()),
            }
        }
    }
}

/// Collects the reports of all instances. Gives the last checkpoint once no instance is left.
async fn coordinate(
    mut reports: mpsc::Receiver<Report>,
    controls: Vec<WriterControl>,
    mut last: Checkpoint,
) -> Result<Checkpoint> {
    let restored = last.handles.clone();
    let mut waiting: BTreeMap<u64, Vec<Report>> = BTreeMap::new();
    while let Some(report) = reports.recv().await {
        let checkpoint = report.checkpoint;
        let all = waiting.entry(checkpoint).or_default();
        all.push(report);
        if all.len() < usize::from(INSTANCES) {
            continue;
        }
        let mut handles = restored.clone();
        handles.resize(INSTANCES.into(), Vec::new());
        for Report { instance, persist, .. } in waiting.remove(&checkpoint).unwrap_or_default() {
            let handle = persist.await?;
            controls[usize::from(instance)].confirm(handle.to())?;
            handles[usize::from(instance)].push(handle);
        }
        // A real engine stores this, and confirms only then.
        last = Checkpoint { position: checkpoint * BARRIER_EVERY, handles };
    }
    Ok(last)
}

/// Opens a changelog whose uploads run on the calling runtime.
async fn open(dir: &Path, machine: &str) -> Result<Changelog> {
    let bucket = |name: &str| format!("file://{}", dir.join(name).display());
    let options = Options::new(bucket("bucket-a"), dir.join(machine))
        .add_bucket(bucket("bucket-b"))
        .runtime(UploadRuntime::Handle(Handle::current()))
        // Small, for an example: so the instances have to wait for room.
        .lane_bytes(64 << 10)
        .segment_bytes(1 << 20)
        .local_bytes(16 << 20);
    // It reads the directory and may write a segment.
    Ok(spawn_blocking(move || Changelog::open(options)).await??)
}

/// Runs the job on a machine, from a checkpoint to a position. Gives the states as they were restored and at the end, the
/// last checkpoint, and the changelog.
async fn run_job(
    dir: &Path,
    machine: &str,
    checkpoint: Checkpoint,
    until: u64,
) -> Result<(Vec<State>, Vec<State>, Checkpoint, Changelog)> {
    let mut changelog = open(dir, machine).await?;
    let (sender, reports) = mpsc::channel(64);
    let mut restored = Vec::new();
    let mut controls = Vec::new();
    let mut tasks = Vec::new();
    for number in 0..INSTANCES {
        let key_groups = key_groups(number, INSTANCES);
        let handles = checkpoint.handles.get(usize::from(number)).map_or(&[][..], Vec::as_slice);
        let state = restore(handles, key_groups).await?;
        restored.push(state.clone());
        // Its creation is made durable, which blocks.
        let (writer, opened) = spawn_blocking(move || {
            let writer = changelog.create_writer(format!("sums-{number}"), key_groups);
            (writer, changelog)
        })
        .await?;
        changelog = opened;
        let instance = Instance { number, key_groups, writer: writer?, state };
        controls.push(instance.writer.control());
        tasks.push(tokio::spawn(instance.run(checkpoint.position, until, sender.clone())));
    }
    drop(sender);
    let last = coordinate(reports, controls, checkpoint).await?;
    let mut states = Vec::new();
    for task in tasks {
        states.push(task.await??);
    }
    Ok((restored, states, last, changelog))
}

/// Reads the state that handles hold, without blocking the thread.
async fn restore(handles: &[ChangelogHandle], key_groups: KeyGroupRange) -> Result<State> {
    let mut state = State::new();
    let mut reader = ChangelogReader::open(handles, key_groups)?;
    while let Some(changes) = reader.next_batch().await? {
        for change in changes.iter() {
            apply(&mut state, change.value)?;
        }
    }
    Ok(state)
}

/// A checkpoint with the same states in few objects, of the changes of each key only the last. The one that was given stays
/// as good as it was.
async fn compact(dir: &Path, checkpoint: &Checkpoint) -> Result<Checkpoint> {
    let bucket = format!("file://{}", dir.join("bucket-a").display());
    let old = checkpoint.handles.concat();
    // It blocks until the new objects are complete.
    let new = spawn_blocking(move || {
        // The key is the first 8 bytes of a value; the rest is its sum, not what is added to it.
        let compactor = Compactor::open(&bucket)?.group("savepoints");
        let mut compactor = compactor.last_value_by(|_| ChangeKey::Upsert(0..8));
        Ok::<_, CompactError>(compactor.compact(&old, None)?.handles)
    })
    .await??;
    // One for each log: it goes where those of its log were.
    let of_log = |old: &ChangelogHandle| new.iter().find(|new| new.log() == old.log()).cloned();
    let handles = checkpoint.handles.iter().map(|old| old.iter().filter_map(of_log).collect());
    Ok(Checkpoint { position: checkpoint.position, handles: handles.collect() })
}

/// Opens what a machine left, if only to delete what it has in the buckets.
async fn discard(dir: &Path, machine: &str) -> Result<()> {
    let changelog = open(dir, machine).await?;
    for log in changelog.recovered() {
        log.discard();
    }
    // It waits for the deletions, too.
    Ok(spawn_blocking(move || changelog.close(Duration::from_secs(30))).await??)
}

async fn crash_and_go_on(dir: &Path) -> Result<()> {
    let mut checkpoint = Checkpoint::default();
    for (machine, until) in [("machine-1", BARRIER_EVERY * 3 + 5), ("machine-2", BARRIER_EVERY * 5 + 5)] {
        let from = checkpoint.position;
        let (restored, states, last, changelog) = run_job(dir, machine, checkpoint, until).await?;
        for (number, (restored, state)) in (0..).zip(restored.iter().zip(&states)) {
            let key_groups = key_groups(number, INSTANCES);
            assert_eq!(*restored, expected(key_groups, from), "as at the last checkpoint");
            assert_eq!(*state, expected(key_groups, until), "as if nothing had happened");
        }
        println!("{machine} went on from {from}, crashes at {until}");
        // The crash: nothing is closed. Dropping waits for writes to the local disk, so it is not done on this thread.
        spawn_blocking(move || drop(changelog)).await?;
        checkpoint = last;
    }
    let compacted = compact(dir, &checkpoint).await?;
    for machine in ["machine-1", "machine-2"] {
        discard(dir, machine).await?;
    }
    let of_old = checkpoint.handles.iter().flatten().next().ok_or("there is a handle")?;
    assert!(restore(std::slice::from_ref(of_old), of_old.key_groups()).await.is_err(), "it is gone");
    let changelog = open(dir, "machine-3").await?;
    for (number, handles) in (0..).zip(&compacted.handles) {
        let key_groups = key_groups(number, INSTANCES);
        assert_eq!(restore(handles, key_groups).await?, expected(key_groups, checkpoint.position));
    }
    spawn_blocking(move || changelog.close(Duration::from_secs(30))).await??;
    Ok(())
}

/// Crashes between two checkpoints, goes on elsewhere, and compares the state with what it has to be.
pub fn run(dir: &Path) -> Result<()> {
    let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    runtime.block_on(crash_and_go_on(dir))
}

fn main() -> Result<()> {
    let dir = tempfile::tempdir()?;
    run(dir.path())
}
