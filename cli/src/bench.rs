//! `tidelog bench`: what this machine reaches.

use std::path::PathBuf;

use crate::{Every, Failure, parse_bytes, parse_every};

/// Measures appends, durable writes and checkpoints on this machine.
///
/// Shows progress, then a table of throughput and latency percentiles. Figures hold only for a machine that is
/// otherwise idle.
#[derive(clap::Args, Debug)]
pub struct BenchArgs {
    /// How many threads append.
    #[arg(long, value_name = "NUMBER", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(crate) threads: u32,
    /// The length of a record's value in bytes (K, M, G).
    #[arg(long, value_name = "BYTES", default_value = "256", value_parser = parse_bytes)]
    pub(crate) record_bytes: u64,
    /// How long to measure, in seconds.
    #[arg(long, value_name = "SECONDS", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub(crate) seconds: u64,
    /// Takes a checkpoint after so many records or so much time.
    #[arg(long, value_name = "RECORDS|TIME", default_value = "1s", value_parser = parse_every)]
    pub(crate) checkpoint_every: Every,
    /// A local directory for segments; give one for each disk. A temporary one if there is none.
    #[arg(long = "dir", value_name = "DIR")]
    pub(crate) dirs: Vec<PathBuf>,
    /// Where checkpoints go. A temporary local directory if not given.
    #[arg(long, value_name = "URL")]
    pub(crate) bucket: Option<String>,
    /// Prints JSON instead of a table.
    #[arg(long)]
    pub(crate) json: bool,
    /// Writes a page with plots to this file.
    #[arg(long, value_name = "FILE")]
    pub(crate) html: Option<PathBuf>,
}

pub fn run(_args: BenchArgs) -> Result<(), Failure> {
    Err(Failure::new("this build has no benchmark yet"))
}
