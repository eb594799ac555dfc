//! `tidelog sweep`: what nobody needs any more in a bucket, and why it can go.
//!
//! What is stray is the library's judgement ([`tidelog::Sweeper`]); here it is asked for, shown, and carried out.

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use serde_json::json;
use tidelog::{ChangelogHandle, Kept, Stray, StrayKind, SweepError, SweepPlan, Sweeper};

use crate::patience::Patience;
use crate::places::check_bucket;
use crate::{Failure, handles, show};

/// Finds what nobody needs any more in a bucket, and removes it with --yes.
///
/// Without --yes nothing is changed: a table shows what would go, and why.
///
/// Only the objects of this URL, prefix and group are looked at: BUCKET_URL/[PREFIX/][2 characters of a hash/]GROUP/OBJECT. What
/// is in deeper folders belongs to other changelogs, and is swept with their URL or prefix.
///
/// Unfinished uploads go if a directory given with --local, which no process has open, began them; or, if no such directory
/// knows them, when they are older than --min-age and than a day, which no living changelog's upload becomes. Objects go only
/// with --live-handles: if no handle in that file and no --local directory names them, and they are older than --min-age and
/// than the file. Unless --local gives the directories of all changelogs alive, let --min-age be longer than any time between
/// two checkpoints of a log and half a day together: an object may be complete long before the first handle names it, and
/// some buckets count its age from the beginning of its upload. If none of the handles names anything in that place, but
/// objects would go, they are taken for another changelog's, and nothing goes.
///
/// Ages are what the bucket says: its clock has to be right to the hour. What it dates before 2020 stays, unless a --local
/// directory that no process has open began it.
#[derive(clap::Args, Debug)]
pub struct SweepArgs {
    /// The bucket.
    #[arg(value_name = "BUCKET_URL")]
    bucket: String,
    /// The group: the last folder of the names of a changelog's objects.
    #[arg(long, default_value = "tidelog")]
    group: String,
    /// What the names begin with before the group, as in the changelog's options.
    #[arg(long, value_name = "PREFIX", default_value = "")]
    name_prefix: String,
    /// All handles that anybody may still restore from, in any bucket: JSON, one a line; - for standard input.
    #[arg(long, value_name = "FILE")]
    live_handles: Option<PathBuf>,
    /// A local directory of a changelog that writes, or wrote, to the bucket. May be given more than once.
    #[arg(long = "local", value_name = "DIR")]
    locals: Vec<PathBuf>,
    /// What is younger stays (s, m, h, d).
    #[arg(long, value_name = "TIME", default_value = "24h", value_parser = parse_age)]
    min_age: Duration,
    /// Removes what the table shows.
    #[arg(long)]
    yes: bool,
    /// Prints JSON instead of a table.
    #[arg(long)]
    json: bool,
}

fn parse_age(text: &str) -> Result<Duration, String> {
    let units = [('s', 1), ('m', 60), ('h', 3600), ('d', 86_400)];
    let age = units.iter().find_map(|(unit, seconds)| {
        text.strip_suffix(*unit)?.parse::<u64>().ok()?.checked_mul(*seconds).map(Duration::from_secs)
    });
    age.ok_or_else(|| "give a time as in 90m, 24h or 7d".to_owned())
}

pub fn run(args: SweepArgs) -> Result<(), Failure> {
    check_bucket(&args.bucket).map_err(Failure::new)?;
    let now = SystemTime::now();
    let (live, min_age) = match &args.live_handles {
        None => (None, args.min_age),
        Some(path) => {
            let (handles, written_at) = read_live(path, now)?;
            // What is younger than the file may be named by handles that are not in it.
            (Some(handles), args.min_age.max(now.duration_since(written_at).unwrap_or_default()))
        }
    };
    let mut sweeper = Sweeper::open(&args.bucket).map_err(Failure::new)?;
    sweeper = sweeper.prefix(&args.name_prefix).group(&args.group).min_age(min_age);
    for local in &args.locals {
        sweeper = sweeper.directory(local).map_err(Failure::new)?;
    }
    if let Some(handles) = &live {
        sweeper = sweeper.live_handles(handles);
    }
    let patience = Patience::new(format!("{} has not listed all that it holds yet", args.bucket));
    let plan = sweeper.plan(now).map_err(|error| match error {
        SweepError::ForeignHandles { .. } | SweepError::Option(_) => Failure::Usage(error.to_string()),
        error => Failure::new(error),
    })?;
    drop(patience);
    let mut failures = Vec::new();
    if args.yes {
        let all = show::counted(plan.strays.len() as u64, "thing");
        let patience = Patience::new(String::new());
        for (number, stray) in plan.strays.iter().enumerate() {
            patience.say(format!("{} of {all} dealt with so far", show::count(number as u64)));
            failures.extend(sweeper.remove(stray).err());
        }
    }
    let output = if args.json {
        to_json(&plan, &args, failures.len())
    } else {
        to_text(&plan, &args, failures.len() as u64)
    };
    io::stdout().lock().write_all(output.as_bytes())?;
    if !args.json && !plan.strays.is_empty() && !args.yes {
        eprintln!("tidelog: nothing was changed; --yes removes what is listed");
    }
    match failures.first() {
        None => Ok(()),
        Some(first) => Err(Failure::new(format!(
            "{} could not be removed; the first: {first}; sweep again",
            show::counted(failures.len() as u64, "thing")
        ))),
    }
}

/// The handles, and when the list of them was made.
fn read_live(path: &Path, now: SystemTime) -> Result<(Vec<ChangelogHandle>, SystemTime), Failure> {
    let shown = path.display();
    let written_at = if path.as_os_str() == "-" {
        now
    } else {
        let modified = std::fs::metadata(path).and_then(|metadata| metadata.modified());
        modified.map_err(|error| Failure::new(format!("cannot read {shown}: {error}")))?
    };
    let handles = handles::read(path).map_err(Failure::new)?;
    if handles.is_empty() {
        return Err(Failure::Usage(format!(
            "{shown} holds no handle: every object would seem to be needed by nobody; delete the bucket's objects by other \
             means if that is so"
        )));
    }
    Ok((handles, written_at))
}

fn why(stray: &Stray) -> String {
    match &stray.kind {
        StrayKind::Upload { owner: Some(directory), .. } => {
            format!("begun from {}, which nobody has open", directory.display())
        }
        StrayKind::Upload { owner: None, .. } => "too old to be of a living changelog".to_owned(),
        StrayKind::Object { .. } => "no live handle names it".to_owned(),
    }
}

fn why_kept(why: Kept) -> &'static str {
    match why {
        Kept::InUse => "uploads of a --local directory that is in use",
        Kept::Known => "a --local directory knows them",
        Kept::Live => "a live handle names them",
        Kept::Young => "younger than --min-age or the file of live handles, uploads than a day",
        Kept::Undated => "the bucket gives them no date, or one before 2020, which cannot be",
        _ => "other reasons",
    }
}

fn to_text(plan: &SweepPlan, args: &SweepArgs, failures: u64) -> String {
    let mut table = show::Table::new(&["action", "name", "bytes", "age", "why"]);
    let mut total_bytes = 0;
    for stray in &plan.strays {
        let (action, bytes) = match &stray.kind {
            StrayKind::Object { bytes } => ("delete", Some(*bytes)),
            StrayKind::Upload { .. } => ("abort", None),
        };
        total_bytes += bytes.unwrap_or(0);
        let bytes = bytes.map_or("-".to_owned(), |bytes| bytes.to_string());
        let age = stray.age.map_or("-".to_owned(), show_age);
        table.row([action.to_owned(), stray.name.clone(), bytes, age, why(stray)]);
    }
    let mut text = if plan.strays.is_empty() { String::new() } else { table.render("") };
    let removed = plan.strays.len() as u64;
    let all = removed + plan.kept.values().sum::<u64>();
    let done = match (args.yes, failures) {
        (false, _) => "to remove".to_owned(),
        (true, 0) => "removed".to_owned(),
        (true, failures) => format!("to remove, {failures} of which could not be,"),
    };
    let bytes = show::bytes(total_bytes);
    text += &format!("{} of {all} {done} in {}, {bytes}\n", show::counted(removed, "thing"), args.bucket);
    for (why, count) in &plan.kept {
        text += &format!("{} kept: {}\n", show::count(*count), why_kept(*why));
    }
    if args.live_handles.is_none() {
        text += "objects were not looked at: only --live-handles can tell which of them nobody needs\n";
    }
    text
}

fn to_json(plan: &SweepPlan, args: &SweepArgs, failures: usize) -> String {
    let strays: Vec<_> = plan
        .strays
        .iter()
        .map(|stray| {
            let (kind, bytes) = match &stray.kind {
                StrayKind::Object { bytes } => ("object", Some(*bytes)),
                StrayKind::Upload { .. } => ("upload", None),
            };
            let age = stray.age.map(|age| age.as_secs());
            json!({ "kind": kind, "name": stray.name, "bytes": bytes, "age_seconds": age, "why": why(stray) })
        })
        .collect();
    let kept: Vec<_> =
        plan.kept.iter().map(|(why, count)| json!({ "count": count, "why": why_kept(*why) })).collect();
    let all = json!({
        "removed": if args.yes { plan.strays.len() - failures } else { 0 },
        "objects_looked_at": args.live_handles.is_some(),
        "strays": strays,
        "kept": kept,
    });
    format!("{all:#}\n")
}

fn show_age(age: Duration) -> String {
    let seconds = age.as_secs();
    match seconds {
        0..120 => format!("{seconds} s"),
        120..7200 => format!("{} min", seconds / 60),
        7200..172_800 => format!("{} h", seconds / 3600),
        _ => format!("{} days", seconds / 86_400),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ages() {
        assert_eq!(parse_age("90m"), Ok(Duration::from_secs(5400)));
        assert_eq!(parse_age("7d"), Ok(Duration::from_secs(7 * 86_400)));
        for bad in ["", "h", "1", "-1h", "1w", "999999999999999999d"] {
            assert!(parse_age(bad).is_err(), "{bad}");
        }
    }
}
