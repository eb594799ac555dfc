//! `tidelog inspect`: what a file holds, for people and as JSON.

use std::io::{self, Write};

use serde_json::{Value, json};

use crate::Failure;
use crate::look::{Depth, LookArgs, Show};

/// Shows what a segment, a manifest, an object or a handle holds. The kind is recognized by the file.
#[derive(clap::Args, Debug)]
pub struct InspectArgs {
    #[command(flatten)]
    look: LookArgs,
}

pub fn run(args: InspectArgs) -> Result<(), Failure> {
    let reports = args.look.reports(Depth::Summary)?;
    let output = if args.look.json {
        let all: Vec<Value> = reports.iter().map(|report| report.to_json(Show::Contents)).collect();
        format!("{:#}\n", json!(all))
    } else {
        let all: Vec<String> = reports.iter().map(|report| report.to_text(Show::Contents)).collect();
        all.join("\n")
    };
    io::stdout().lock().write_all(output.as_bytes())?;
    if reports.iter().any(|report| report.is_damaged()) { Err(Failure::Damaged) } else { Ok(()) }
}
