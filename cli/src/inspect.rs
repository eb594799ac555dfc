//! `tidelog inspect`: what a file holds, for people and as JSON.

use std::io::{self, Write};
use std::path::PathBuf;

use serde_json::{Value, json};

use crate::Failure;
use crate::look::{Depth, Show, look};

/// Shows what a segment, a manifest, an object or a handle holds. The kind is recognized by the file.
#[derive(clap::Args, Debug)]
pub struct InspectArgs {
    /// Prints JSON instead of tables.
    #[arg(long)]
    pub(crate) json: bool,
    /// The paths are names of objects in this bucket.
    #[arg(long, value_name = "URL")]
    pub(crate) bucket: Option<String>,
    /// The files, or local directories of a changelog; - for handles from standard input.
    #[arg(required = true, value_name = "PATH")]
    pub(crate) paths: Vec<PathBuf>,
}

pub fn run(args: InspectArgs) -> Result<(), Failure> {
    let mut reports = Vec::new();
    for path in &args.paths {
        reports.extend(look(path, args.bucket.as_deref(), Depth::Summary)?);
    }
    let output = if args.json {
        let all: Vec<Value> = reports.iter().map(|report| report.to_json(Show::Contents)).collect();
        format!("{:#}\n", json!(all))
    } else {
        let all: Vec<String> = reports.iter().map(|report| report.to_text(Show::Contents)).collect();
        all.join("\n")
    };
    io::stdout().lock().write_all(output.as_bytes())?;
    if reports.iter().any(|report| report.is_damaged()) { Err(Failure::Damaged) } else { Ok(()) }
}
