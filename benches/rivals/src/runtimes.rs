//! The two runtimes over io_uring: a task for each block in flight, all on one thread.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use glommio::{LocalExecutorBuilder, Placement};
use tidelog_io::aligned::AlignedBuf;
use tokio_uring::buf::IoBuf;

use crate::common::bare::{BLOCK_BYTES, DEPTH, Spent};
use crate::common::cpu_time;
use crate::{Load, Outcome, arena, buffers, whole};

/// What the tasks of one run share.
struct Shared {
    load: Arc<Load>,
    next: Cell<u64>,
    latencies: RefCell<Vec<f64>>,
}

impl Shared {
    fn new(load: &Arc<Load>) -> Rc<Shared> {
        let latencies = RefCell::new(Vec::with_capacity(load.blocks as usize));
        Rc::new(Shared { load: Arc::clone(load), next: Cell::new(0), latencies })
    }

    fn next_block(&self) -> Option<u64> {
        let next = self.next.get();
        self.next.set(next + 1);
        (next < self.load.blocks).then_some(next)
    }

    fn completed(&self, submitted_at: Instant) {
        self.latencies.borrow_mut().push(submitted_at.elapsed().as_secs_f64());
    }
}

async fn measured(shared: &Shared, work: impl Future<Output = io::Result<()>>) -> io::Result<Outcome> {
    let (started_at, cpu_before) = (Instant::now(), cpu_time());
    work.await?;
    let spent = Spent {
        seconds: started_at.elapsed().as_secs_f64(),
        cpu_seconds: (cpu_time() - cpu_before).as_secs_f64(),
    };
    Ok(Outcome { spent, latencies: shared.latencies.take() })
}

struct Block(AlignedBuf);

// SAFETY: the memory is the arena's and does not move with the value; all of it is initialised; and the value owns it, so
// nobody else writes there or unmaps it while the runtime has it.
unsafe impl IoBuf for Block {
    fn stable_ptr(&self) -> *const u8 {
        self.0.as_ptr()
    }

    fn bytes_init(&self) -> usize {
        self.0.len()
    }

    fn bytes_total(&self) -> usize {
        self.0.len()
    }
}

pub fn run_tokio_uring(load: &Arc<Load>) -> io::Result<Outcome> {
    let file = load.open(load.durable)?;
    let arena = arena()?;
    tokio_uring::builder().entries(DEPTH as u32).start(async {
        let file = Rc::new(tokio_uring::fs::File::from_std(file));
        let shared = Shared::new(load);
        let write = |buffer: AlignedBuf| {
            let (file, shared) = (Rc::clone(&file), Rc::clone(&shared));
            tokio_uring::spawn(async move {
                let mut buffer = Block(buffer);
                while let Some(block) = shared.next_block() {
                    shared.load.fill(block, &mut buffer.0);
                    let submitted_at = Instant::now();
                    let (result, back) = file.write_at(buffer, shared.load.offset(block)).submit().await;
                    shared.completed(submitted_at);
                    whole(result)?;
                    buffer = back;
                }
                io::Result::Ok(())
            })
        };
        measured(&shared, async {
            let tasks: Vec<_> = buffers(&arena).into_iter().map(write).collect();
            for task in tasks {
                task.await.map_err(io::Error::other)??;
            }
            Ok(())
        })
        .await
    })
}

pub fn run_glommio(load: &Arc<Load>) -> io::Result<Outcome> {
    let executor = LocalExecutorBuilder::new(Placement::Unbound).make().map_err(io::Error::from)?;
    executor.run(async {
        let flags = if load.durable { libc::O_DSYNC } else { 0 };
        let mut options = glommio::io::OpenOptions::new();
        options.write(true).custom_flags(flags);
        let file = Rc::new(options.dma_open(load.path()).await.map_err(io::Error::from)?);
        let shared = Shared::new(load);
        let write = |_| {
            let (file, shared) = (Rc::clone(&file), Rc::clone(&shared));
            glommio::spawn_local(async move {
                while let Some(block) = shared.next_block() {
                    // Its own memory: it registers no other.
                    let mut buffer = file.alloc_dma_buffer(BLOCK_BYTES);
                    shared.load.fill(block, buffer.as_bytes_mut());
                    let submitted_at = Instant::now();
                    let result = file.write_at(buffer, shared.load.offset(block)).await;
                    shared.completed(submitted_at);
                    whole(result.map_err(io::Error::from))?;
                }
                io::Result::Ok(())
            })
        };
        let outcome = measured(&shared, async {
            let tasks: Vec<_> = (0..DEPTH).map(write).collect();
            for task in tasks {
                task.await?;
            }
            Ok(())
        })
        .await;
        if let Ok(file) = Rc::try_unwrap(file) {
            file.close().await.map_err(io::Error::from)?;
        }
        outcome
    })
}
