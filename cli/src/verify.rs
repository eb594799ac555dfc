//! `tidelog verify`: every byte checked.

use std::io::{self, Write};

use serde_json::{Value, json};

use crate::Failure;
use crate::look::{Depth, LookArgs, Show};

/// Checks every byte of segments, manifests, objects or handles, and of the objects that handles and manifests name.
///
/// Exit code 0 if all is intact, 3 if anything is damaged or missing; each damage is named. A single segment file cannot
/// tell whether its end is missing: its directory can. A directory must not be open elsewhere; nothing in it is changed.
#[derive(clap::Args, Debug)]
pub struct VerifyArgs {
    #[command(flatten)]
    look: LookArgs,
}

pub fn run(args: VerifyArgs) -> Result<(), Failure> {
    let reports = args.look.reports(Depth::Everything)?;
    let damaged = reports.iter().any(|report| report.is_damaged());
    let output = if args.look.json {
        let all: Vec<Value> = reports.iter().map(|report| report.to_json(Show::Verdict)).collect();
        format!("{:#}\n", json!({ "intact": !damaged, "verified": all }))
    } else {
        reports.iter().map(|report| report.to_text(Show::Verdict)).collect()
    };
    io::stdout().lock().write_all(output.as_bytes())?;
    if damaged { Err(Failure::Damaged) } else { Ok(()) }
}
