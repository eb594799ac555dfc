//! The other processes of the bench: the server, and clients whose memory and CPU time are measured.

use std::fmt;
use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use tidelog::{Changelog, ChangelogWriter, KeyGroup, KeyGroupRange, Options, UploadOptions};
use tidelog_testing::{ACCESS_KEY, SECRET_KEY};
use tidelog_upload::{Body, Lane, Store, UploadRef, UploadedPart};

use crate::common::cpu_time;

/// The memory budget of the changelogs here, the default.
pub const MEMORY_BYTES: usize = 256 << 20;
const VALUE_LEN: usize = 256;
const CHILD: &str = "--child";

/// What a measured client does.
#[derive(Clone, Copy, PartialEq)]
pub enum Role {
    /// Sends ready-made parts, as many at a time as the changelog would.
    Bare,
    /// Appends changes and persists them.
    Changelog,
    /// Persists changes that are all on the local disk already.
    Persist,
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Role::Bare => "bare",
            Role::Changelog => "tidelog",
            Role::Persist => "tidelog, its upload alone",
        })
    }
}

/// What a measured client tells.
pub struct Report {
    /// Of the first object of its process, and of the next one.
    pub spent: [Spent; 2],
    /// Of the whole process.
    pub peak_bytes: u64,
    /// The length of an object.
    pub object_bytes: u64,
}

/// What an object took.
pub struct Spent {
    pub seconds: f64,
    /// Of these seconds.
    pub cpu_seconds: f64,
}

/// Runs this program again with the test server's credentials in its environment, unless they are there.
pub fn ensure_credentials() {
    if std::env::var_os("AWS_ACCESS_KEY_ID").is_some_and(|key| key == ACCESS_KEY) {
        return;
    }
    let status = this_program().args(std::env::args_os().skip(1)).status().expect("a process can be started");
    std::process::exit(status.code().unwrap_or(1));
}

fn this_program() -> Command {
    let mut command = Command::new(std::env::current_exe().expect("a program knows its file"));
    command
        .env("AWS_ACCESS_KEY_ID", ACCESS_KEY)
        .env("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
        .env("AWS_EC2_METADATA_DISABLED", "true")
        .env("AWS_CONFIG_FILE", "/dev/null")
        .env("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
        .env_remove("AWS_SESSION_TOKEN")
        .env_remove("AWS_PROFILE")
        .env_remove("AWS_ENDPOINT_URL");
    command
}

/// The server as a process of its own; it ends with this value.
pub struct Server {
    process: Child,
    endpoint: String,
}

impl Server {
    /// Keeps its objects in `folder`, and takes each body no faster than said.
    pub fn start(folder: &Path, bytes_per_second: Option<u64>) -> Server {
        let mut command = Command::new(env!("CARGO_BIN_EXE_s3-server"));
        // Tags by MD5 would take more of the cores than all else.
        command.args(["--random-tags", "--dir"]).arg(folder);
        if let Some(bytes_per_second) = bytes_per_second {
            command.arg("--bytes-per-second").arg(bytes_per_second.to_string());
        }
        let mut process = command
            .arg("bucket")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the server can be started");
        let mut endpoint = String::new();
        let out = process.stdout.take().expect("piped");
        BufReader::new(out).read_line(&mut endpoint).expect("the server says where it is");
        Server { process, endpoint: endpoint.trim().to_owned() }
    }

    pub fn url(&self) -> String {
        bucket_url("bucket", &self.endpoint)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.process.stdin.take());
        let _ = self.process.wait();
    }
}

pub fn bucket_url(bucket: &str, endpoint: &str) -> String {
    format!("s3://{bucket}/state?endpoint={endpoint}&region=us-east-1&sparse=true")
}

/// The options of a changelog that holds an increment of `bytes`.
pub fn options(url: &str, local: &Path, bytes: u64) -> Options {
    // Headers and tables come on top of the values, and what was sent goes only when all is complete.
    let room = bytes + bytes / 2 + (512 << 20);
    crate::base(url, local).memory_bytes(MEMORY_BYTES).local_bytes(room)
}

/// Appends at least `bytes` of values; how many it were.
pub fn fill(writer: &mut ChangelogWriter, bytes: u64) -> u64 {
    let mut value = [0x5a; VALUE_LEN];
    let count = bytes.div_ceil(VALUE_LEN as u64);
    for index in 0..count {
        value[..8].copy_from_slice(&index.to_le_bytes());
        writer.append(KeyGroup((index.wrapping_mul(0x9e37_79b9) >> 7 & 127) as u16), &value).expect("room");
    }
    count * VALUE_LEN as u64
}

/// Runs a client and waits for what it tells.
pub fn measure(
    role: Role,
    url: &str,
    local: &Path,
    bytes: u64,
    connections: usize,
    memory_bytes: usize,
) -> Report {
    let output = this_program()
        .args([CHILD, &role.to_string(), url])
        .arg(local)
        .args([bytes.to_string(), connections.to_string(), memory_bytes.to_string()])
        .stderr(Stdio::inherit())
        .output()
        .expect("a process can be started");
    assert!(output.status.success(), "the {role} client failed");
    let said = String::from_utf8(output.stdout).expect("numbers");
    let numbers: Vec<f64> = said.split_whitespace().map(|word| word.parse().expect("a number")).collect();
    let [first, first_cpu, next, next_cpu, peak_bytes, object_bytes] = numbers[..] else {
        panic!("six numbers")
    };
    let spent =
        [(first, first_cpu), (next, next_cpu)].map(|(seconds, cpu_seconds)| Spent { seconds, cpu_seconds });
    Report { spent, peak_bytes: peak_bytes as u64, object_bytes: object_bytes as u64 }
}

pub fn is_child() -> bool {
    std::env::args().nth(1).is_some_and(|argument| argument == CHILD)
}

pub fn run_child() {
    let arguments: Vec<String> = std::env::args().skip(2).collect();
    let [role, url, local, bytes, connections, memory_bytes] = &arguments[..] else {
        panic!("six arguments")
    };
    let bytes = bytes.parse().expect("a number");
    let mut uploads = UploadOptions::default();
    uploads.connections = Some(connections.parse().expect("a number"));
    let is = |known: Role| *role == known.to_string();
    let (spent, object_bytes) = if is(Role::Bare) {
        (bare(url, bytes, &uploads), bytes)
    } else {
        let options = options(url, local.as_ref(), bytes)
            .memory_bytes(memory_bytes.parse().expect("a number"))
            .uploads(uploads)
            .preemptive_upload(!is(Role::Persist));
        changelog(options, bytes, is(Role::Persist))
    };
    for Spent { seconds, cpu_seconds } in spent {
        print!("{seconds} {cpu_seconds} ");
    }
    println!("{} {object_bytes}", peak_bytes());
}

/// Takes the time since its creation, and the CPU time of this process meanwhile.
struct Stopwatch(Instant, Duration);

impl Stopwatch {
    fn start() -> Stopwatch {
        Stopwatch(Instant::now(), cpu_time())
    }

    fn stop(self) -> Spent {
        let cpu_seconds = (cpu_time() - self.1).as_secs_f64();
        Spent { seconds: self.0.elapsed().as_secs_f64(), cpu_seconds }
    }
}

fn changelog(options: Options, bytes: u64, synced: bool) -> ([Spent; 2], u64) {
    let changelog = Changelog::open(options).expect("a changelog");
    let mut writer = changelog.create_writer("state", KeyGroupRange::ALL).expect("a writer");
    let mut object_bytes = 0;
    let spent = [(); 2].map(|()| {
        let from = writer.next_sequence_number();
        let mut watch = Stopwatch::start();
        fill(&mut writer, bytes);
        if synced {
            writer.sync().wait().expect("a local disk that works");
            watch = Stopwatch::start();
        }
        let handle = writer.persist_durably(from).wait().expect("a checkpoint");
        let spent = watch.stop();
        let [extent] = handle.extents() else { panic!("one object holds the checkpoint") };
        object_bytes = extent.object_bytes();
        writer.truncate(writer.next_sequence_number()).expect("what is persisted can be truncated");
        spent
    });
    drop(writer);
    changelog.close(Duration::from_secs(60)).expect("a close");
    (spent, object_bytes)
}

/// Each connection sends bytes of its own: one part sent again and again would be read from the processor's caches.
fn bare(url: &str, bytes: u64, options: &UploadOptions) -> [Spent; 2] {
    let part_bytes = options.part_bytes as usize;
    let ready: Vec<Bytes> =
        (0..options.connections()).map(|index| Bytes::from(vec![index as u8 + 1; part_bytes])).collect();
    let store = tidelog_upload::open_store(url).expect("a bucket");
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .expect("threads can be had");
    ["bare-0", "bare-1"].map(|name| {
        let watch = Stopwatch::start();
        runtime.block_on(send(&store, name, bytes, &ready));
        let spent = watch.stop();
        runtime.block_on(store.delete(name)).expect("a deletion");
        spent
    })
}

/// Makes an object of so many bytes, by one request at a time for each of the parts.
async fn send(store: &Arc<dyn Store>, name: &'static str, bytes: u64, ready: &[Bytes]) {
    let part_bytes = ready[0].len() as u64;
    let parts = bytes.div_ceil(part_bytes) as u32;
    let id = store.create(name).await.expect("an upload");
    let next = Arc::new(AtomicU32::new(1));
    let tasks: Vec<_> = ready
        .iter()
        .map(|part| {
            let (store, next, id, part) = (store.clone(), next.clone(), id.clone(), part.clone());
            tokio::spawn(async move {
                let mut sent = Vec::new();
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    if number > parts {
                        return sent;
                    }
                    let upload = UploadRef { name, id: &id };
                    let start = u64::from(number - 1) * part_bytes;
                    let body = Body::new(vec![part.slice(..(bytes - start).min(part_bytes) as usize)]);
                    let tag = store.put_part(upload, number, body, Lane::Primary).await.expect("a part");
                    sent.push(UploadedPart { number, tag });
                }
            })
        })
        .collect();
    let mut sent = Vec::new();
    for task in tasks {
        sent.extend(task.await.expect("a task"));
    }
    sent.sort_by_key(|part| part.number);
    store.complete(UploadRef { name, id: &id }, &sent).await.expect("an object");
}

/// The most memory that this process has had so far.
fn peak_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("Linux");
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("a peak");
    line.trim().trim_end_matches(" kB").trim().parse::<u64>().expect("a number") * 1024
}
