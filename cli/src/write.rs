//! `tidelog write`: records in, handles out.

use std::path::PathBuf;

use tidelog::KeyGroupRange;

use crate::input::Framing;
use crate::key::{KEY_GROUPS_MAX, KeySource};
use crate::{
    CheckpointEvery, Failure, Places, parse_bytes, parse_checkpoint_every, parse_key_groups, parse_separator,
};

/// Appends records from files or standard input, and prints the handle of each checkpoint as a line of JSON.
///
/// A record's key group is murmur(hash(key)) modulo --max-parallelism, as Flink assigns it to string keys: hash is
/// Java's String.hashCode of the key's text, or Arrays.hashCode of its bytes if they are not UTF-8; murmur is
/// MathUtils.murmurHash.
#[derive(clap::Args, Debug)]
pub struct WriteArgs {
    #[command(flatten)]
    pub(crate) places: Places,
    /// The log's name.
    #[arg(long, default_value = "records")]
    pub(crate) name: String,
    /// How records follow one another.
    #[arg(long, value_enum, default_value = "lines")]
    pub(crate) framing: Framing,
    /// The longest record that is taken, in bytes (K, M, G).
    #[arg(long, value_name = "BYTES", default_value = "16M", value_parser = parse_bytes)]
    pub(crate) record_bytes_max: u64,
    /// Where the key is: record (all of it), field:NUMBER (from 1) or json:/POINTER.
    #[arg(long, value_name = "KEY", default_value = "record")]
    pub(crate) key: KeySource,
    /// What stands between fields: one byte, or \t.
    #[arg(long, value_name = "BYTE", default_value = "\\t", value_parser = parse_separator)]
    pub(crate) separator: u8,
    /// How many key groups there are.
    #[arg(long, value_name = "NUMBER", default_value_t = 128,
        value_parser = clap::value_parser!(u32).range(1..=i64::from(KEY_GROUPS_MAX)))]
    pub(crate) max_parallelism: u32,
    /// The key groups of this writer; a record of another one is an error. All, if not given.
    #[arg(long, value_name = "FIRST-LAST", value_parser = parse_key_groups)]
    pub(crate) key_groups: Option<KeyGroupRange>,
    /// Takes a checkpoint after so many records (10000) or so much time (500ms, 2s); one more at the end.
    #[arg(long, value_name = "RECORDS|TIME", value_parser = parse_checkpoint_every)]
    pub(crate) checkpoint_every: Option<CheckpointEvery>,
    /// Appends the handles to this file too.
    #[arg(long, value_name = "FILE")]
    pub(crate) handles: Option<PathBuf>,
    /// The files to read; standard input if there is none, or for -.
    pub(crate) files: Vec<PathBuf>,
}

pub fn run(_args: WriteArgs) -> Result<(), Failure> {
    Err(Failure::new("this build cannot write yet"))
}
