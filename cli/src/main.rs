//! The tool `tidelog`: its commands, their exit codes, and how an error reaches a person.
//!
//! Each command is a file of its own: its arguments and a `run`.
#![forbid(unsafe_code)]

mod bench;
mod compact;
mod demo;
mod doctor;
mod handles;
mod input;
mod inspect;
mod key;
mod look;
mod metrics;
mod patience;
mod places;
mod read;
mod show;
mod sweep;
mod verify;
mod write;

use std::io::ErrorKind;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use tidelog::{KeyGroupRange, OpenError};
use tidelog_upload::{StoreError, StoreErrorKind};
use tracing::Level;
use tracing_subscriber::filter::filter_fn;
use tracing_subscriber::fmt::format::FmtSpan;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

/// Records state changes: first to local disks, then as one object per checkpoint to a bucket.
#[derive(Parser)]
#[command(name = "tidelog", version, after_help = EXIT_CODES)]
struct Cli {
    /// Says more on standard error: of objects, races and failures; twice, of every request too.
    #[arg(short, long, action = clap::ArgAction::Count, global = true)]
    verbose: u8,
    #[command(subcommand)]
    command: Option<Command>,
}

const EXIT_CODES: &str = "Without a command: a short demonstration in a temporary directory.

Exit codes: 0 done; 1 it failed, standard error says why and what to do; 2 the arguments are wrong; \
3 a verification found damage.";

// Their descriptions are those of their arguments.
#[derive(Subcommand)]
enum Command {
    Write(write::WriteArgs),
    Read(read::ReadArgs),
    Inspect(inspect::InspectArgs),
    Verify(verify::VerifyArgs),
    Compact(compact::CompactArgs),
    Sweep(sweep::SweepArgs),
    Bench(bench::BenchArgs),
    Doctor(doctor::DoctorArgs),
    Demo(demo::DemoArgs),
}

/// How a command ends when it does not succeed.
#[derive(Debug)]
enum Failure {
    /// Exit code 1: what happened, to what, and what to do.
    Failed(String),
    /// Exit code 2: the values of arguments do not work together.
    Usage(String),
    /// Exit code 3: verification found damage, which the command has already reported.
    Damaged,
    /// Exit code 0 and no word: nobody reads the output any more.
    OutputClosed,
}

impl Failure {
    fn new(message: impl ToString) -> Failure {
        Failure::Failed(message.to_string())
    }
}

impl From<OpenError> for Failure {
    fn from(error: OpenError) -> Failure {
        match error {
            OpenError::Option(error) => Failure::Usage(error.to_string()),
            OpenError::Store(error) => error.into(),
            error => Failure::new(error),
        }
    }
}

impl From<StoreError> for Failure {
    /// For buckets given as arguments.
    fn from(error: StoreError) -> Failure {
        match error.kind() {
            StoreErrorKind::InvalidUrl(_)
            | StoreErrorKind::UnsupportedScheme { .. }
            | StoreErrorKind::SchemeNotBuilt { .. } => Failure::Usage(error.to_string()),
            _ => Failure::new(error),
        }
    }
}

impl From<std::io::Error> for Failure {
    /// For the command's own output; other I/O errors are worth a message that names the file.
    fn from(error: std::io::Error) -> Failure {
        match error.kind() {
            ErrorKind::BrokenPipe => Failure::OutputClosed,
            _ => Failure::Failed(format!("cannot write the output: {error}")),
        }
    }
}

fn main() -> ExitCode {
    // Clap ends the process with code 2 when the arguments are wrong.
    let cli = Cli::parse();
    log_to_stderr(cli.verbose);
    let result = match cli.command.unwrap_or_else(|| Command::Demo(demo::DemoArgs::default())) {
        Command::Write(args) => write::run(args),
        Command::Read(args) => read::run(args),
        Command::Inspect(args) => inspect::run(args),
        Command::Verify(args) => verify::run(args),
        Command::Compact(args) => compact::run(args),
        Command::Sweep(args) => sweep::run(args),
        Command::Bench(args) => bench::run(args),
        Command::Doctor(args) => doctor::run(args),
        Command::Demo(args) => demo::run(args),
    };
    match result {
        Ok(()) | Err(Failure::OutputClosed) => ExitCode::SUCCESS,
        Err(Failure::Failed(message)) => {
            eprintln!("tidelog: {message}");
            ExitCode::from(1)
        }
        Err(Failure::Usage(message)) => {
            eprintln!("tidelog: {message}");
            ExitCode::from(2)
        }
        Err(Failure::Damaged) => ExitCode::from(3),
    }
}

/// The library's warnings; with -v also its events and spans, with -vv every span's end and the time that it took.
fn log_to_stderr(verbose: u8) {
    let builder = tracing_subscriber::fmt().with_writer(std::io::stderr).with_target(false);
    match verbose {
        0 => builder.with_max_level(Level::WARN).without_time().init(),
        _ => {
            let ends = if verbose > 1 { FmtSpan::CLOSE } else { FmtSpan::NONE };
            // Not what the HTTP client and the runtime say: only errors of those.
            let ours = filter_fn(|metadata| {
                metadata.target().starts_with("tidelog") || *metadata.level() <= Level::WARN
            });
            builder.with_max_level(Level::DEBUG).with_span_events(ends).finish().with(ours).init();
        }
    }
}

/// Reads `a-b` or `a` as a range of key groups, both ends included.
fn parse_key_groups(text: &str) -> Result<KeyGroupRange, String> {
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    match (first.parse(), last.parse()) {
        (Ok(first), Ok(last)) => KeyGroupRange::new(first, last)
            .ok_or_else(|| format!("{first} is above {last}: give the lower end first")),
        _ => Err("give FIRST-LAST, as in 0-63; key groups go from 0 to 65535".to_owned()),
    }
}

/// Reads a separator of fields: one byte, or `\t`.
fn parse_separator(text: &str) -> Result<u8, String> {
    match text.as_bytes() {
        [byte] => Ok(*byte),
        b"\\t" => Ok(b'\t'),
        _ => Err("give a single byte, or \\t".to_owned()),
    }
}

/// Reads a number of bytes, with an optional K, M or G (powers of 1024).
fn parse_bytes(text: &str) -> Result<u64, String> {
    let (digits, shift) = match text.as_bytes().last() {
        Some(b'k' | b'K') => (&text[..text.len() - 1], 10),
        Some(b'm' | b'M') => (&text[..text.len() - 1], 20),
        Some(b'g' | b'G') => (&text[..text.len() - 1], 30),
        _ => (text, 0),
    };
    match digits.parse::<u64>().ok().and_then(|number| number.checked_mul(1 << shift)) {
        Some(bytes) => Ok(bytes),
        None => Err("give a number of bytes, as in 4096, 64K, 16M or 1G".to_owned()),
    }
}

/// When to do something that is done again and again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Every {
    /// After so many records.
    Records(u64),
    /// After so much time.
    Time(std::time::Duration),
}

/// Reads a number of records, or a time as in 500ms or 2s.
fn parse_every(text: &str) -> Result<Every, String> {
    use std::time::Duration;
    let positive = |digits: &str| digits.parse::<u64>().ok().filter(|&number| number > 0);
    let every = if let Some(digits) = text.strip_suffix("ms") {
        positive(digits).map(|number| Every::Time(Duration::from_millis(number)))
    } else if let Some(digits) = text.strip_suffix('s') {
        positive(digits).map(|number| Every::Time(Duration::from_secs(number)))
    } else {
        positive(text).map(Every::Records)
    };
    every.ok_or_else(|| "give a number of records, as in 10000, or a time, as in 500ms or 2s".to_owned())
}

/// Reads a time as in 500ms or 2s.
fn parse_time(text: &str) -> Result<std::time::Duration, String> {
    match parse_every(text)? {
        Every::Time(time) => Ok(time),
        Every::Records(_) => Err("give a time, as in 500ms or 2s".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_arguments_are_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn values_of_arguments() {
        assert_eq!(parse_key_groups("0-63"), Ok(KeyGroupRange::new(0, 63).unwrap()));
        assert_eq!(parse_key_groups("7"), Ok(KeyGroupRange::new(7, 7).unwrap()));
        for bad in ["", "-", "5-4", "1-2-3", "a-b", "0-65536"] {
            assert!(parse_key_groups(bad).is_err(), "{bad}");
        }
        assert_eq!(parse_separator(","), Ok(b','));
        assert_eq!(parse_separator("\\t"), Ok(b'\t'));
        assert!(
            parse_separator("ab").is_err() && parse_separator("").is_err() && parse_separator("é").is_err()
        );
        assert_eq!(parse_bytes("4096"), Ok(4096));
        assert_eq!(parse_bytes("64K"), Ok(65_536));
        assert_eq!(parse_bytes("1G"), Ok(1 << 30));
        for bad in ["", "K", "1.5M", "-1", "18446744073709551615G", "1é"] {
            assert!(parse_bytes(bad).is_err(), "{bad}");
        }
        assert_eq!(parse_every("10"), Ok(Every::Records(10)));
        assert_eq!(parse_every("500ms"), Ok(Every::Time(Duration::from_millis(500))));
        assert_eq!(parse_every("2s"), Ok(Every::Time(Duration::from_secs(2))));
        for bad in ["", "0", "0s", "s", "1m", "-1"] {
            assert!(parse_every(bad).is_err(), "{bad}");
        }
        assert_eq!(parse_time("500ms"), Ok(Duration::from_millis(500)));
        assert!(parse_time("10").is_err());
    }
}
