//! The io-uring crate without anything around it: the floor.

use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::Instant;

use io_uring::types::Fixed;
use io_uring::{IoUring, opcode};

use crate::common::bare::{BLOCK_BYTES, DEPTH, Spent};
use crate::{Load, Outcome, arena, buffers, whole};

pub fn run(load: &Arc<Load>) -> io::Result<Outcome> {
    let file = load.open(false)?;
    let arena = arena()?;
    let mut buffers = buffers(&arena);
    let mut builder = IoUring::builder();
    builder.setup_single_issuer().setup_defer_taskrun().setup_taskrun_flag();
    let mut ring = builder.build(DEPTH as u32)?;
    let (base, len) = arena.region();
    let region = libc::iovec { iov_base: base.cast_mut().cast(), iov_len: len };
    // SAFETY: the region is the arena's, which lives longer than the ring: declared before it, dropped after it.
    unsafe { ring.submitter().register_buffers(&[region])? };
    ring.submitter().register_files(&[file.as_raw_fd()])?;

    let mut latencies = Vec::with_capacity(load.blocks as usize);
    let mut outcome: io::Result<()> = Ok(());
    let spent = Spent::on(|| outcome = write(load, &mut ring, &mut buffers, &mut latencies));
    outcome?;
    Ok(Outcome { spent, latencies })
}

fn write(
    load: &Load,
    ring: &mut IoUring,
    buffers: &mut [tidelog_io::aligned::AlignedBuf],
    latencies: &mut Vec<f64>,
) -> io::Result<()> {
    let mut free: Vec<usize> = (0..buffers.len()).collect();
    let mut submitted_at = vec![Instant::now(); buffers.len()];
    let flags = if load.durable { libc::RWF_DSYNC } else { 0 };
    let (mut next, mut failure) = (0, None);
    // Whatever fails, no buffer is given up before its write has ended.
    while free.len() < buffers.len() || (next < load.blocks && failure.is_none()) {
        while next < load.blocks && failure.is_none() {
            let Some(slot) = free.pop() else { break };
            load.fill(next, &mut buffers[slot]);
            let entry = opcode::WriteFixed::new(Fixed(0), buffers[slot].as_ptr(), BLOCK_BYTES as u32, 0)
                .offset(load.offset(next))
                .rw_flags(flags)
                .build()
                .user_data(slot as u64);
            submitted_at[slot] = Instant::now();
            // SAFETY: the buffer is neither touched nor dropped until its slot is free again, that is, completed.
            unsafe { ring.submission().push(&entry) }.expect("an entry for each buffer");
            // One system call a block, as the spiller, which has a block to submit at a time.
            ring.submit()?;
            next += 1;
        }
        match ring.submit_and_wait(1) {
            Ok(_) => {}
            Err(error) if error.raw_os_error() == Some(libc::EINTR) => continue,
            Err(error) => return Err(error),
        }
        for entry in ring.completion() {
            let slot = entry.user_data() as usize;
            latencies.push(submitted_at[slot].elapsed().as_secs_f64());
            free.push(slot);
            let result = match entry.result() {
                errno @ ..0 => Err(io::Error::from_raw_os_error(-errno)),
                bytes => Ok(bytes as usize),
            };
            failure = failure.or(whole(result).err());
        }
    }
    failure.map_or(Ok(()), Err)
}
