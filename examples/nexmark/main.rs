//! A streaming job on tidelog: bids of the Nexmark benchmark, counted by auction and window, on several threads, with
//! checkpoints, killed and restarted with another number of threads.
//!
//! `cargo run --release --example nexmark` runs it on a local directory as its bucket, kills it a few times with SIGKILL,
//! and compares the state at the end with a plain fold over the same events. What it is made of is in `job/`; nothing
//! there is about being killed but to begin at the newest checkpoint.
//!
//! Options, each with a value: `--bucket URL` (several times for several buckets; credentials come from the environment),
//! `--dir FOLDER` for local files and checkpoints, `--events NUMBER`, `--rate EVENTS-A-SECOND`, `--threads NUMBER` of the
//! first run, `--kills NUMBER`, `--checkpoint-ms NUMBER`, `--seed NUMBER`. `nexmark run` with the same options is one run
//! from the newest checkpoint to the end, for who wants to kill it by hand.
#![forbid(unsafe_code)]

mod job;

use std::io::{BufRead as _, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::Duration;

use job::source::bids;
use job::state::{KEY_GROUPS, State};
use job::{Config, Failure};
use tidelog::Options;

struct Arguments {
    buckets: Vec<String>,
    directory: Option<PathBuf>,
    events: u64,
    rate: u64,
    threads: u16,
    kills: u16,
    checkpoint_ms: u64,
    seed: u64,
}

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1).peekable();
    let is_run = arguments.next_if(|argument| argument == "run").is_some();
    let result =
        parse(arguments).and_then(|arguments| if is_run { run(arguments) } else { demonstrate(arguments) });
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("nexmark: {error}");
            ExitCode::FAILURE
        }
    }
}

fn parse(mut arguments: impl Iterator<Item = String>) -> Result<Arguments, Failure> {
    let mut parsed = Arguments {
        buckets: Vec::new(),
        directory: None,
        events: 400_000,
        rate: 200_000,
        threads: 2,
        kills: 4,
        checkpoint_ms: 50,
        seed: 1,
    };
    while let Some(option) = arguments.next() {
        let value = arguments.next().ok_or_else(|| format!("{option} needs a value"))?;
        match option.as_str() {
            "--bucket" => parsed.buckets.push(value),
            "--dir" => parsed.directory = Some(value.into()),
            "--events" => parsed.events = value.parse()?,
            "--rate" => parsed.rate = value.parse()?,
            "--threads" => parsed.threads = value.parse()?,
            "--kills" => parsed.kills = value.parse()?,
            "--checkpoint-ms" => parsed.checkpoint_ms = value.parse()?,
            "--seed" => parsed.seed = value.parse()?,
            _ => return Err(format!("unknown option {option}").into()),
        }
    }
    if !(1..=KEY_GROUPS).contains(&parsed.threads) || parsed.rate == 0 {
        return Err(format!("--threads is 1 to {KEY_GROUPS}, --rate at least 1").into());
    }
    Ok(parsed)
}

/// One run, from the newest checkpoint to the end.
fn run(arguments: Arguments) -> Result<(), Failure> {
    let directory = arguments.directory.ok_or("a run needs --dir")?;
    let mut buckets = arguments.buckets.into_iter();
    let first = buckets.next().ok_or("a run needs --bucket")?;
    let options = Options::new(first, directory.join("local")).segment_bytes(16 << 20).local_bytes(256 << 20);
    job::run(
        &Config {
            options: buckets.fold(options, Options::add_bucket),
            checkpoints: directory.join("checkpoints"),
            threads: arguments.threads,
            events: arguments.events,
            rate: Some(arguments.rate),
            checkpoint_pause: Duration::from_millis(arguments.checkpoint_ms),
            materialize_every: 4,
            declined_percent: 20,
            seed: arguments.seed,
        },
        &|report| println!("{report}"),
    )
}

/// Runs, kills, runs on, and compares.
fn demonstrate(mut arguments: Arguments) -> Result<(), Failure> {
    let temporary = tempfile::tempdir()?;
    let directory = arguments.directory.take().unwrap_or_else(|| temporary.path().to_owned());
    if arguments.buckets.is_empty() {
        arguments
            .buckets
            .push(format!("file://{}", std::path::absolute(&directory)?.join("bucket").display()));
    }
    for life in 0..arguments.kills {
        let threads = (arguments.threads + life - 1) % 4 + 1;
        println!("-- {threads} threads");
        let mut child = start(&arguments, &directory, threads, life)?;
        // Later for each: some are killed early, some after a snapshot.
        let done = follow(&mut child, Some(usize::from(life) * 2 + 2))?;
        let status = child.wait()?;
        if done.is_some() || !matches!(status.code(), None | Some(0)) {
            println!("-- it ended by itself: {status}");
            break;
        }
        println!("-- killed");
    }
    println!("-- {} threads, to the end", arguments.threads);
    let mut child = start(&arguments, &directory, arguments.threads, arguments.kills)?;
    let done = follow(&mut child, None)?;
    let status = child.wait()?;
    let done = done.ok_or_else(|| format!("the last run did not reach the end: {status}"))?;
    let mut expected = State::default();
    for bid in bids(0).take(arguments.events as usize).flatten() {
        expected.put(bid.key, expected.after(bid));
    }
    let digest = format!("digest={:016x}", expected.digest());
    if !done.ends_with(&digest) {
        return Err(
            format!("the state is wrong: a plain fold has {} aggregates, {digest}", expected.len()).into()
        );
    }
    println!("-- a plain fold over the {} events has the same digest", arguments.events);
    Ok(())
}

fn start(
    arguments: &Arguments,
    directory: &std::path::Path,
    threads: u16,
    life: u16,
) -> Result<Child, Failure> {
    let mut command = Command::new(std::env::current_exe()?);
    command.arg("run").arg("--dir").arg(directory);
    for bucket in &arguments.buckets {
        command.args(["--bucket", bucket]);
    }
    for (option, value) in [
        ("--events", arguments.events),
        ("--rate", arguments.rate),
        ("--threads", threads.into()),
        ("--checkpoint-ms", arguments.checkpoint_ms),
        ("--seed", arguments.seed.wrapping_add(life.into())),
    ] {
        command.args([option, &value.to_string()]);
    }
    Ok(command.stdout(Stdio::piped()).spawn()?)
}

/// Prints what the run tells, and kills it after so many checkpoints. Gives the last line if the run came to the end.
fn follow(child: &mut Child, checkpoints: Option<usize>) -> Result<Option<String>, Failure> {
    let output = child.stdout.take().expect("it is piped");
    let (mut seen, mut done) = (0, None);
    for line in BufReader::new(output).lines() {
        let line = line?;
        println!("{line}");
        seen += usize::from(line.contains(" checkpoint=") && !line.starts_with("restored"));
        if line.starts_with("done") {
            done = Some(line);
        } else if checkpoints == Some(seen) {
            child.kill()?;
        }
    }
    Ok(done)
}
