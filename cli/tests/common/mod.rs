//! A directory for one test, and the tool run on it.
#![allow(dead_code, reason = "each test uses some of it")]

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::{OnceLock, mpsc};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use tidelog_testing::{S3Server, ServerOptions};

/// Real records: see data/flights/README.md.
pub static FLIGHTS: &str = include_str!("../../../data/flights/flights.csv");

/// The records, cut apart once.
pub fn flights() -> &'static [&'static str] {
    static CUT: OnceLock<Vec<&str>> = OnceLock::new();
    CUT.get_or_init(|| FLIGHTS.lines().collect())
}

/// A temporary directory with room for a changelog.
pub struct Home {
    dir: tempfile::TempDir,
}

impl Home {
    pub fn new() -> Home {
        Home { dir: tempfile::tempdir().unwrap() }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn text(&self, name: &str) -> String {
        self.path(name).display().to_string()
    }

    pub fn bucket(&self) -> String {
        format!("file://{}", self.text("bucket"))
    }

    /// Makes a file.
    pub fn put(&self, name: &str, bytes: impl AsRef<[u8]>) -> String {
        std::fs::write(self.path(name), bytes).unwrap();
        self.text(name)
    }

    /// `tidelog write` with small segments in this directory.
    pub fn write_command(&self) -> Command {
        let mut command = tidelog();
        command.args(["write", "--segment-bytes", "1M", "--local-bytes", "16M", "--bucket", &self.bucket()]);
        command.arg("--dir").arg(self.path("local"));
        command
    }

    /// Writes `input` and gives the handles.
    pub fn write(&self, args: &[&str], input: impl AsRef<[u8]>) -> Output {
        run(self.write_command().args(args), input)
    }

    /// Keeps what was printed in a file.
    pub fn keep(&self, name: &str, output: &Output) -> String {
        self.put(name, &output.stdout)
    }

    /// The only file below a directory.
    pub fn only_file(&self, name: &str) -> PathBuf {
        let mut files = files_below(&self.path(name));
        assert_eq!(files.len(), 1, "{files:?}");
        files.remove(0)
    }
}

pub fn files_below(dir: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() { files.extend(files_below(&path)) } else { files.push(path) }
    }
    files.sort();
    files
}

pub fn tidelog() -> Command {
    Command::new(env!("CARGO_BIN_EXE_tidelog"))
}

/// `tidelog write` into these buckets, with small segments in the directory `local`.
pub fn write_into(buckets: &[String], local: &str) -> Command {
    write_within("64M", buckets, local)
}

/// The same, with so many bytes of segments.
pub fn write_within(local_bytes: &str, buckets: &[String], local: &str) -> Command {
    let mut write = tidelog();
    write.args(["write", "--segment-bytes", "1M", "--local-bytes", local_bytes, "--dir", local]);
    for bucket in buckets {
        write.args(["--bucket", bucket]);
    }
    write
}

/// A server with buckets, and commands that may use it.
pub struct S3 {
    pub server: S3Server,
}

impl S3 {
    pub fn start(buckets: usize) -> S3 {
        let buckets = (0..buckets).map(|number| format!("bucket-{number}")).collect();
        S3 { server: S3Server::start(ServerOptions { buckets, ..Default::default() }).unwrap() }
    }

    pub fn url(&self, number: usize) -> String {
        format!("s3://bucket-{number}/ops?endpoint={}", self.server.endpoint())
    }

    pub fn allowed(command: &mut Command) -> &mut Command {
        command.env("AWS_REGION", tidelog_testing::REGION).env("AWS_EC2_METADATA_DISABLED", "true");
        command.env("AWS_ACCESS_KEY_ID", tidelog_testing::ACCESS_KEY);
        command.env("AWS_SECRET_ACCESS_KEY", tidelog_testing::SECRET_KEY)
    }

    pub fn run(command: &mut Command, input: impl AsRef<[u8]>) -> Output {
        run(S3::allowed(command), input)
    }
}

/// A command that takes longer hangs, and is killed.
const HANGS: Duration = Duration::from_secs(240);

/// Runs a command with an input; an input that it does not read to the end is no error.
pub fn run(command: &mut Command, input: impl AsRef<[u8]>) -> Output {
    let mut child =
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let input = input.as_ref().to_vec();
    let feeder = std::thread::spawn(move || drop(stdin.write_all(&input)));
    let pid = Pid::from_child(&child);
    let (ended, end) = mpsc::channel::<()>();
    let guard = std::thread::spawn(move || {
        if let Err(mpsc::RecvTimeoutError::Timeout) = end.recv_timeout(HANGS) {
            let _ = kill_process(pid, Signal::KILL);
        }
    });
    let output = child.wait_with_output().unwrap();
    drop(ended);
    guard.join().unwrap();
    feeder.join().unwrap();
    output
}

pub fn tidelog_with(args: &[&str]) -> Output {
    run(tidelog().args(args), "")
}

pub fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

pub fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

#[track_caller]
pub fn succeeds(output: Output) -> Output {
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    output
}

/// The command failed with this code, and what it says contains each of these.
#[track_caller]
pub fn fails(output: &Output, code: i32, says: &[&str]) {
    let said = format!("{}{}", stdout(output), stderr(output));
    assert_eq!(output.status.code(), Some(code), "{said}");
    for part in says {
        assert!(said.contains(part), "\"{part}\" is not in: {said}");
    }
    assert!(!said.contains("panicked"), "{said}");
}

pub fn sorted(text: &str) -> Vec<&str> {
    let mut lines: Vec<&str> = text.lines().collect();
    lines.sort_unstable();
    lines
}
