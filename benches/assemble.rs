//! How fast blocks are assembled into parts, on one core: GB of values and millions of changes a second.
//!
//! Each line is the median of several rounds over the same 8 MiB of blocks with key groups at random, each round with a
//! new part. Run by `cargo bench --bench assemble`; without `--bench`, as under `cargo test`, or with `--smoke` it only
//! shows that it works.

#![forbid(unsafe_code)]

mod common;

use std::time::Instant;

use common::{Bench, Limit, Table, median};
use tidelog::assemble::Assembler;
use tidelog::block::{Block, BlockBuilder, BlockError, BlockPlace, seal};
use tidelog::part::{Compression, PartId};
use tidelog::record::{FrameKind, Header, frame_len};
use tidelog::tail::Tail;
use tidelog::{LogId, SequenceNumber};

const BLOCK_BYTES: usize = 256 << 10;
const PART: PartId = PartId { token: 1, index: 0 };

fn main() {
    let mut bench = Bench::start(
        "assemble",
        "How fast blocks are assembled into parts, on one core.",
        &[("--rounds NUMBER", "parts of each kind (31)")],
    );
    let part_bytes = bench.size(8 << 20, BLOCK_BYTES * 2);
    let rounds = bench.number("--rounds", bench.size(31, 1));
    let mut table = Table::new(
        format!("{} KiB of blocks into a part, 128 key groups; medians of {rounds} parts", part_bytes >> 10),
        &[
            "value_bytes",
            "logs",
            "in_runs_of",
            "compression",
            "GB/s",
            "M_changes/s",
            "directories_and_footer_percent",
        ],
    );
    for (value_len, logs, run_len, compression) in [
        (16, 4, 256, Compression::None),
        (16, 64, 1, Compression::None),
        (64, 4, 256, Compression::None),
        (256, 4, 64, Compression::None),
        (256, 64, 1, Compression::None),
        (1024, 4, 16, Compression::None),
        (4096, 4, 16, Compression::None),
        (256, 4, 64, Compression::Lz4),
    ] {
        bench.progress(&format!("{value_len} B, {logs} logs, {compression:?}"));
        let blocks = blocks(part_bytes, value_len, logs, run_len);
        let blocks: Vec<Block<'_>> =
            blocks.iter().map(|block| Block::decode(block, None).expect("just sealed")).collect();
        let changes: u64 = blocks.iter().flat_map(Block::logs).map(|log| u64::from(log.count)).sum();
        let mut assembler = Assembler::new();
        let mut times: Vec<f64> = Vec::new();
        let mut overhead = 0.0;
        for _ in 0..rounds {
            let start = Instant::now();
            let part = assembler
                .assemble::<BlockError>(
                    blocks.iter().copied().map(Ok),
                    &mut |_| SequenceNumber::ZERO..SequenceNumber(u64::MAX),
                    PART,
                    compression,
                )
                .expect("blocks are in order");
            times.push(start.elapsed().as_secs_f64());
            let mut tail = Tail::new(PART.token);
            tail.push(compression, part.runs, &part.directories);
            let tail_len = tail.encode().0.len();
            overhead = tail_len as f64 / (part.bytes.len() + tail_len) as f64;
            // As the uploader does with what it gets back.
            assembler.reuse(part.bytes);
        }
        let seconds = median(&times);
        let (gigabytes, millions) =
            ((changes * value_len as u64) as f64 / seconds / 1e9, changes as f64 / seconds / 1e6);
        table.row([
            value_len.into(),
            logs.into(),
            run_len.into(),
            format!("{compression:?}").into(),
            gigabytes.into(),
            millions.into(),
            (overhead * 100.0).into(),
        ]);
        let what = format!("{value_len} B, {logs} logs in runs of {run_len}");
        match (value_len, compression) {
            (256, Compression::None) => {
                bench.target(format!("assembly in GB/s, {what}"), gigabytes, Limit::AtLeast(1.5))
            }
            (16, Compression::None) => {
                bench.target(format!("assembly in million changes/s, {what}"), millions, Limit::AtLeast(40.0))
            }
            _ => {}
        }
    }
    bench.table(table);
    bench.finish();
}

/// Blocks of changes with random key groups; the logs take turns, `run_len` changes each.
fn blocks(bytes: usize, value_len: usize, logs: u32, run_len: u64) -> Vec<Vec<u8>> {
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    let mut next = vec![SequenceNumber::ZERO; logs as usize];
    let mut builder = BlockBuilder::new(BLOCK_BYTES);
    let mut buffer = vec![0; BLOCK_BYTES];
    let mut blocks = Vec::new();
    let mut frame = vec![0; frame_len(value_len)];
    for turn in 0.. {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        let slot = (turn / run_len % u64::from(logs)) as u32;
        let known = builder.entries().iter().position(|entry| entry.slot == slot);
        if !builder.fits(frame.len(), known.is_none()) {
            let len = builder.finish(&mut buffer, false);
            let number = blocks.len() as u64;
            let place = BlockPlace {
                directory: 1,
                segment: 1,
                epoch: 1,
                index: number as u32,
                offset: number * BLOCK_BYTES as u64,
                number,
                watermark: 0,
            };
            seal(&mut buffer[..len], &place);
            blocks.push(buffer[..len].to_vec());
            if blocks.len() * BLOCK_BYTES >= bytes {
                break;
            }
        }
        let known = builder.entries().iter().position(|entry| entry.slot == slot);
        let entry = known.unwrap_or_else(|| {
            builder.add_entry(slot, LogId(u128::from(slot) << 64 | 7), next[slot as usize])
        });
        let header = Header::new(FrameKind::Data, (random >> 20) as u16 % 128, slot, value_len);
        frame[..8].copy_from_slice(&header.0.to_le_bytes());
        for word in frame[8..8 + value_len].chunks_mut(8) {
            word.copy_from_slice(&(random & 0x0f0f_0f0f_0f0f_0f0f).to_le_bytes()[..word.len()]);
        }
        builder.push_frames(&mut buffer, &frame);
        builder.add_count(entry, 1);
        next[slot as usize] = next[slot as usize].next();
    }
    blocks
}
