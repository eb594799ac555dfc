//! `tidelog inspect`: what a file holds, for people and as JSON.

use std::path::PathBuf;

use crate::Failure;

/// Shows what a segment, a manifest, an object or a handle holds. The kind is recognized by the file's first bytes.
#[derive(clap::Args, Debug)]
pub struct InspectArgs {
    /// Prints JSON instead of a table.
    #[arg(long)]
    pub(crate) json: bool,
    /// The files, or local directories of a changelog; - for a handle from standard input.
    #[arg(required = true, value_name = "PATH")]
    pub(crate) paths: Vec<PathBuf>,
}

pub fn run(_args: InspectArgs) -> Result<(), Failure> {
    Err(Failure::new("this build cannot inspect yet"))
}
