//! One thread that fills blocks, and others that write them: by hand, and by the project's own engines.

use std::io::{self, IoSlice};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::io::{ReadWriteFlags, pwritev2};
use tidelog_io::aligned::AlignedBuf;
use tidelog_io::disk::{Disk, Durability, Write};
use tidelog_io::engine::{EngineChoice, open_best};

use crate::common::bare::{BLOCK_BYTES, DEPTH, Spent};
use crate::{FILE_NAME, Load, Outcome, arena, buffers, whole};

/// A block to write, and when it was handed over.
struct Job {
    block: u64,
    buffer: AlignedBuf,
    submitted_at: Instant,
}

/// As many threads as blocks in flight, each with one `pwritev2` at a time.
pub fn run(load: &Arc<Load>) -> io::Result<Outcome> {
    let file = load.open(false)?;
    let flags = if load.durable { ReadWriteFlags::DSYNC } else { ReadWriteFlags::empty() };
    let arena = arena()?;
    let (jobs, todo) = sync_channel::<Job>(DEPTH);
    let todo = Mutex::new(todo);
    let (done, free) = sync_channel::<(AlignedBuf, io::Result<f64>)>(DEPTH);
    let write = |todo: &Mutex<Receiver<Job>>, done: SyncSender<(AlignedBuf, io::Result<f64>)>| {
        loop {
            let job = todo.lock().expect("no writer panics with the lock").recv();
            let Ok(Job { block, buffer, submitted_at }) = job else { return };
            let written = pwritev2(&file, &[IoSlice::new(&buffer)], load.offset(block), flags);
            let result = whole(written.map_err(io::Error::from));
            let latency = submitted_at.elapsed().as_secs_f64();
            if done.send((buffer, result.map(|()| latency))).is_err() {
                return;
            }
        }
    };
    let mut latencies = Vec::with_capacity(load.blocks as usize);
    let mut outcome: io::Result<()> = Ok(());
    let spent = std::thread::scope(|scope| {
        for _ in 0..DEPTH {
            let (todo, done, write) = (&todo, done.clone(), &write);
            scope.spawn(move || write(todo, done));
        }
        let spent = Spent::on(|| outcome = produce(load, buffers(&arena), &jobs, &free, &mut latencies));
        // The writers end when there is nobody left to hand them a block.
        drop(jobs);
        spent
    });
    outcome?;
    Ok(Outcome { spent, latencies })
}

fn produce(
    load: &Load,
    mut buffers: Vec<AlignedBuf>,
    jobs: &SyncSender<Job>,
    free: &Receiver<(AlignedBuf, io::Result<f64>)>,
    latencies: &mut Vec<f64>,
) -> io::Result<()> {
    let gone = |_| io::Error::other("the writers are gone");
    for block in 0..load.blocks {
        let mut buffer = match buffers.pop() {
            Some(buffer) => buffer,
            None => {
                let (buffer, latency) = free.recv().map_err(gone)?;
                latencies.push(latency?);
                buffer
            }
        };
        load.fill(block, &mut buffer);
        let job = Job { block, buffer, submitted_at: Instant::now() };
        jobs.send(job).map_err(|_| io::Error::other("the writers are gone"))?;
    }
    while (latencies.len() as u64) < load.blocks {
        let (_, latency) = free.recv().map_err(gone)?;
        latencies.push(latency?);
    }
    Ok(())
}

/// The project's engine.
pub fn run_ours(load: &Arc<Load>, engine: EngineChoice) -> io::Result<Outcome> {
    let durability = if load.durable { Durability::Power } else { Durability::Process };
    let arena = arena()?;
    let mut disk = open_best(&load.dir, durability, DEPTH, Some(&arena), engine)?;
    let file = disk.open(FILE_NAME)?;
    let mut buffers = buffers(&arena);
    let mut latencies = Vec::with_capacity(load.blocks as usize);
    let mut submitted_at = vec![Instant::now(); DEPTH];
    let mut completions = Vec::new();
    let mut outcome: io::Result<()> = Ok(());
    let spent = Spent::on(|| {
        let mut collect = |disk: &mut Box<dyn Disk>, buffers: &mut Vec<AlignedBuf>, at: &[Instant]| {
            disk.wait(Duration::from_secs(10), &mut completions)?;
            for completion in completions.drain(..) {
                completion.result?;
                // The token is the buffer's place in the arena.
                latencies.push(at[completion.token as usize].elapsed().as_secs_f64());
                buffers.push(completion.buffer);
            }
            io::Result::Ok(())
        };
        outcome = (|| {
            for block in 0..load.blocks {
                while buffers.is_empty() {
                    collect(&mut disk, &mut buffers, &submitted_at)?;
                }
                let mut buffer = buffers.pop().expect("one has come back");
                load.fill(block, &mut buffer);
                let token = buffer.index() as u64;
                submitted_at[buffer.index()] = Instant::now();
                let write = Write { token, file, offset: load.offset(block), buffer, len: BLOCK_BYTES };
                disk.submit(write).map_err(|_| io::Error::other("the engine refused a write"))?;
            }
            while disk.in_flight() > 0 {
                collect(&mut disk, &mut buffers, &submitted_at)?;
            }
            Ok(())
        })();
    });
    outcome?;
    Ok(Outcome { spent, latencies })
}
