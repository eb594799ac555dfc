//! `tidelog read`: handles in, records out.

use std::path::PathBuf;

use tidelog::KeyGroupRange;

use crate::input::Framing;
use crate::{Failure, parse_key_groups};

/// Prints the records that handles stand for, to standard output.
///
/// Records of one key group keep the order in which they were written; different key groups are not ordered among each
/// other.
#[derive(clap::Args, Debug)]
pub struct ReadArgs {
    /// Only these key groups.
    #[arg(long, value_name = "FIRST-LAST", value_parser = parse_key_groups)]
    pub(crate) key_groups: Option<KeyGroupRange>,
    /// Only changes from this sequence number on.
    #[arg(long, value_name = "NUMBER", default_value_t = 0)]
    pub(crate) from: u64,
    /// How records follow one another in the output.
    #[arg(long, value_enum, default_value = "lines")]
    pub(crate) framing: Framing,
    /// A local directory that may still hold the changes; give one for each disk.
    #[arg(long = "dir", value_name = "DIR")]
    pub(crate) dirs: Vec<PathBuf>,
    /// Files of handles, one a line as JSON, or one as bytes; - for standard input.
    #[arg(required = true, value_name = "HANDLES")]
    pub(crate) handles: Vec<PathBuf>,
}

pub fn run(_args: ReadArgs) -> Result<(), Failure> {
    Err(Failure::new("this build cannot read yet"))
}
