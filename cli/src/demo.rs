//! `tidelog demo`, and `tidelog` without a command: the main job, end to end.

use crate::Failure;

/// Writes records, takes checkpoints, restores them by key group and compares, in a temporary directory.
#[derive(clap::Args, Debug, Default)]
pub struct DemoArgs {
    /// Keeps the temporary directory and prints its name.
    #[arg(long)]
    pub(crate) keep: bool,
}

pub fn run(_args: DemoArgs) -> Result<(), Failure> {
    Err(Failure::new("this build has no demonstration yet"))
}
