//! The test server as a process of its own, for benches that must not share its memory and threads.
//!
//! `--dir` keeps the bytes of objects out of memory, and nothing longer than that: which object has which bytes is known to
//! the process alone. Started again, its buckets are empty; the files of one that was killed stay until somebody removes them.

use std::io::{Read as _, Write as _};
use std::process::ExitCode;

use tidelog_testing::{Fault, Rule, S3Server, ServerOptions};

const USAGE: &str = "s3-server [--address 127.0.0.1:9000] [--dir FOLDER] [--random-tags] [--bytes-per-second NUMBER] BUCKET...

An S3 server for tests. Prints its endpoint on the first line, and ends when its standard input does.
Credentials: tidelog-access, tidelog-secret. --dir keeps the bytes of objects on a disk; they are gone
with the process all the same. The bytes per second are those of one body.";

fn main() -> ExitCode {
    if std::env::args().skip(1).any(|argument| argument == "--help" || argument == "-h") {
        println!("{USAGE}");
        return ExitCode::SUCCESS;
    }
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("s3-server: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), Box<dyn std::error::Error>> {
    let mut options = ServerOptions::default();
    let mut bandwidth = None;
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().ok_or_else(|| format!("{argument} needs a value"));
        match argument.as_str() {
            "--address" => options.address = Some(value()?.parse()?),
            "--dir" => options.folder = Some(value()?.into()),
            "--bytes-per-second" => bandwidth = Some(value()?.parse()?),
            "--random-tags" => options.rules.random_tags = true,
            option if option.starts_with('-') => {
                return Err(format!("unknown option {option}; it is {USAGE}").into());
            }
            bucket => options.buckets.push(bucket.to_owned()),
        }
    }
    if options.buckets.is_empty() {
        return Err(format!("name at least one bucket: {USAGE}").into());
    }
    let server = S3Server::start(options)?;
    if let Some(bytes_per_second) = bandwidth {
        server.add_rule(Rule::new(Fault::Bandwidth { bytes_per_second }));
    }
    let mut out = std::io::stdout();
    writeln!(out, "{}", server.endpoint())?;
    out.flush()?;
    // Whoever started it holds the other end: the server cannot outlive them.
    let mut input = std::io::stdin().lock();
    let mut buffer = [0; 256];
    while input.read(&mut buffer)? > 0 {}
    Ok(())
}
