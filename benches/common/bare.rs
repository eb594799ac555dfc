//! The floor of the spill benches: an engine driven bare, with nothing to write but the same buffers again.

#![allow(dead_code, reason = "each bench that compares with it uses a part of it")]

use std::collections::VecDeque;
use std::path::Path;
use std::time::{Duration, Instant};

use tidelog_io::aligned::{AlignedBuf, Arena};
use tidelog_io::directory::RealFiles;
use tidelog_io::disk::{Completion, Disk, Durability, FileSlot, Files, Write};
use tidelog_io::engine::{EngineChoice, open_best};

use crate::common::cpu_time;

/// Bytes of a write, as of the project's blocks.
pub const BLOCK_BYTES: usize = 256 << 10;
/// Writes in flight, as the project's default.
pub const DEPTH: usize = 16;

/// How long something took, on the clock and on the processors.
#[derive(Clone, Copy)]
pub struct Spent {
    pub seconds: f64,
    pub cpu_seconds: f64,
}

impl Spent {
    /// Measures `work`.
    pub fn on(work: impl FnOnce()) -> Spent {
        let (started_at, cpu_before) = (Instant::now(), cpu_time());
        work();
        Spent {
            seconds: started_at.elapsed().as_secs_f64(),
            cpu_seconds: (cpu_time() - cpu_before).as_secs_f64(),
        }
    }
}

/// Writes blocks round and round into one file that was written before, at full depth, from a huge-page arena.
pub struct BareWriter {
    disk: Box<dyn Disk>,
    file: FileSlot,
    file_bytes: u64,
    at: u64,
    /// Buffers that are at home.
    buffers: Vec<AlignedBuf>,
    completions: Vec<Completion>,
    /// When the writes in flight were submitted, by token.
    submitted_at: VecDeque<Option<Instant>>,
    first_token: u64,
    latencies: Vec<f64>,
}

impl BareWriter {
    /// Makes the file, `file_bytes` long, in an existing directory, and writes it once over.
    pub fn open(
        dir: &Path,
        durability: Durability,
        engine: EngineChoice,
        file_bytes: u64,
    ) -> std::io::Result<BareWriter> {
        let arena = Arena::new(BLOCK_BYTES, DEPTH)?;
        let mut buffers: Vec<AlignedBuf> = std::iter::from_fn(|| arena.try_take()).collect();
        for (index, buffer) in buffers.iter_mut().enumerate() {
            buffer.fill(index as u8 + 1);
        }
        let name = "bare";
        RealFiles::open(dir)?.create(name, file_bytes)?;
        let mut disk = open_best(dir, durability, DEPTH, Some(&arena), engine)?;
        let file = disk.open(name)?;
        let mut bare = BareWriter {
            disk,
            file,
            file_bytes,
            at: 0,
            buffers,
            completions: Vec::new(),
            submitted_at: VecDeque::new(),
            first_token: 0,
            latencies: Vec::new(),
        };
        bare.write(file_bytes);
        Ok(bare)
    }

    /// The engine's name.
    pub fn engine(&self) -> &'static str {
        self.disk.info().engine
    }

    /// Writes `bytes`, rounded up to whole blocks, and waits for all of it.
    pub fn write(&mut self, bytes: u64) -> Spent {
        Spent::on(|| {
            self.latencies.clear();
            for _ in 0..bytes.div_ceil(BLOCK_BYTES as u64) {
                while self.buffers.is_empty() {
                    self.collect();
                }
                self.submit();
            }
            while self.disk.in_flight() > 0 {
                self.collect();
            }
        })
    }

    /// Seconds from submission to completion of each block of the last [`write`](Self::write).
    pub fn latencies(&self) -> &[f64] {
        &self.latencies
    }

    fn submit(&mut self) {
        let Some(buffer) = self.buffers.pop() else { return };
        if self.at + BLOCK_BYTES as u64 > self.file_bytes {
            self.at = 0;
        }
        let token = self.first_token + self.submitted_at.len() as u64;
        self.submitted_at.push_back(Some(Instant::now()));
        let write = Write { token, file: self.file, offset: self.at, buffer, len: BLOCK_BYTES };
        self.disk.submit(write).expect("as many buffers as writes may be in flight");
        self.at += BLOCK_BYTES as u64;
    }

    fn collect(&mut self) {
        self.disk.wait(Duration::from_secs(10), &mut self.completions).expect("the engine works");
        for Completion { token, buffer, result } in self.completions.drain(..) {
            result.expect("the disk takes a write");
            let submitted_at = self.submitted_at[(token - self.first_token) as usize].take();
            self.latencies.extend(submitted_at.map(|at| at.elapsed().as_secs_f64()));
            self.buffers.push(buffer);
        }
        while let Some(None) = self.submitted_at.front() {
            self.submitted_at.pop_front();
            self.first_token += 1;
        }
    }
}
