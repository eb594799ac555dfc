//! What an operator does: watches a writer, looks at a bucket, sweeps one, and keeps checkpoints in several S3 buckets.

mod common;

use std::fs::File;
use std::io::{BufRead, BufReader, Lines, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, SystemTime};

use common::{
    Home, S3, fails, files_below, run, sorted, stderr, stdout, succeeds, tidelog, tidelog_with, write_into,
};
use tidelog_testing::{Fault, Rule};
use tidelog_upload::Operation;

const HOUR: Duration = Duration::from_secs(3600);

/// A writer that serves metrics, with what it is told and what it says.
struct Watched {
    child: Child,
    stdin: ChildStdin,
    handles: Lines<BufReader<ChildStdout>>,
    address: String,
}

impl Watched {
    fn start(command: &mut Command) -> Watched {
        let mut child = command
            .args(["--metrics-addr", "127.0.0.1:0", "--checkpoint-every", "1"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut said = BufReader::new(child.stderr.take().unwrap()).lines();
        let address = said.find_map(|line| Some(line.unwrap().split_once("http://")?.1.to_owned())).unwrap();
        let address = address.trim_end_matches("/metrics").to_owned();
        // Nobody waits for the rest, and it never fills the pipe.
        std::thread::spawn(move || said.for_each(drop));
        let stdin = child.stdin.take().unwrap();
        let handles = BufReader::new(child.stdout.take().unwrap()).lines();
        Watched { child, stdin, handles, address }
    }

    /// Writes a record; gives the handle with which its checkpoint ends.
    fn write(&mut self, record: &str) -> String {
        writeln!(self.stdin, "{record}").unwrap();
        self.handles.next().unwrap().unwrap()
    }

    fn metrics(&self) -> String {
        get(&self.address)
    }

    fn end(self) {
        let Watched { mut child, stdin, .. } = self;
        drop(stdin);
        assert!(child.wait().unwrap().success());
    }
}

fn get(address: &str) -> String {
    let mut client = TcpStream::connect(address).unwrap();
    client.write_all(b"GET /metrics HTTP/1.1\r\nHost: test\r\n\r\n").unwrap();
    let mut answer = String::new();
    client.read_to_string(&mut answer).unwrap();
    answer
}

#[test]
fn a_writer_serves_metrics_that_the_list_knows() {
    let home = Home::new();
    let mut writer = Watched::start(&mut home.write_command());
    // A handle was printed: a persist has ended, and was counted before.
    writer.write("one");
    let first = writer.metrics();
    writer.write("two");
    let answer = writer.metrics();
    writer.end();
    let persists = |answer: &str| value(answer, "tidelog_persist_seconds_count", &[]);
    assert!(persists(&first) >= 1.0 && persists(&answer) > persists(&first), "{answer}");
    assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
    for needed in [
        "tidelog_persist_seconds_bucket{le=\"0.25\"}",
        "tidelog_segment_bytes{directory=",
        "tidelog_store_requests_total{",
    ] {
        assert!(answer.contains(needed), "{needed} is not in {answer}");
    }
    for line in answer.lines().filter_map(|line| line.strip_prefix("# TYPE ")) {
        let (name, kind) = line.split_once(' ').unwrap();
        let metric = tidelog::metrics::all().find(|metric| metric.name == name);
        let metric = metric.unwrap_or_else(|| panic!("{name} is not listed"));
        assert_eq!(format!("{:?}", metric.kind).to_lowercase(), kind, "{name}");
    }
}

#[test]
fn it_says_more_when_asked_to() {
    let home = Home::new();
    let said = |args: &[&str]| stderr(&succeeds(home.write(args, "one\n")));
    let (quiet, spans, ends) = (said(&[]), said(&["-v"]), said(&["-vv"]));
    assert!(!quiet.contains("DEBUG"), "{quiet}");
    assert!(spans.contains("checkpoint{requests=1 object=") && spans.contains("object complete"), "{spans}");
    assert!(!spans.contains("time.busy"), "{spans}");
    assert!(ends.contains("time.busy") && ends.contains("request{bucket="), "{ends}");
}

#[test]
fn an_address_that_cannot_be_had_is_a_failure() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    fails(&Home::new().write(&["--metrics-addr", &address], "one\n"), 1, &[&address, "--metrics-addr"]);
}

/// The sum of the samples of a name whose labels have all of these.
fn value(answer: &str, name: &str, labels: &[&str]) -> f64 {
    let samples = answer.lines().filter_map(|line| {
        let rest = line.strip_prefix(name)?;
        let (given, number) = rest.rsplit_once(' ')?;
        let fits = matches!(given.as_bytes().first(), None | Some(b'{'));
        (fits && labels.iter().all(|label| given.contains(label))).then(|| number.parse::<f64>().unwrap())
    });
    samples.sum()
}

/// What is left of a bucket that is gone: where it was, nothing can be made.
fn destroy(bucket: &Path) {
    std::fs::remove_dir_all(bucket).unwrap();
    std::fs::write(bucket, "").unwrap();
}

#[test]
fn a_bucket_that_vanishes_holds_nobody_up() {
    let home = Home::new();
    let folders = ["bucket-0", "bucket-1"].map(|name| home.path(name));
    let urls: Vec<String> = folders.iter().map(|folder| format!("file://{}", folder.display())).collect();
    let mut writer = Watched::start(&mut write_into(&urls, &home.text("local")));
    let mut handles = vec![writer.write("first")];
    // The one that is used goes.
    let gone =
        folders.iter().position(|folder| handles[0].contains(&format!("{}", folder.display()))).unwrap();
    destroy(&folders[gone]);
    let failed = |answer: &str| {
        let bucket = format!("bucket=\"{}\"", urls[gone]);
        let all = value(answer, "tidelog_store_requests_total", &[&bucket]);
        all - value(answer, "tidelog_store_requests_total", &[&bucket, "outcome=\"ok\""])
    };
    let before = failed(&writer.metrics());
    for number in 0..5 {
        handles.push(writer.write(&number.to_string()));
    }
    let after = failed(&writer.metrics());
    assert!(after > before, "it was tried: {before} {after}");
    writer.end();
    let new: Vec<&String> = handles.iter().filter(|handle| handle.contains(&urls[1 - gone])).collect();
    assert_eq!(new.len(), 5, "{handles:?}");
    assert_eq!(files_below(&folders[1 - gone]).len(), 5);
}

#[test]
fn with_one_bucket_dead_from_the_start_checkpoints_go_to_the_other() {
    let s3 = S3::start(1);
    let home = Home::new();
    let dead = "s3://bucket-9?endpoint=http://127.0.0.1:9".to_owned();
    for (number, buckets) in [[dead.clone(), s3.url(0)], [s3.url(0), dead]].iter().enumerate() {
        let mut write = write_into(buckets, &home.text(&format!("local-{number}")));
        let handles = home.keep("handles", &succeeds(S3::run(&mut write, "one\ntwo\n")));
        let read = succeeds(S3::run(tidelog().args(["read", &handles]), ""));
        assert_eq!(sorted(&stdout(&read)), ["one", "two"]);
    }
    assert_eq!(s3.server.objects("bucket-0").len(), 2);
}

#[test]
fn a_missing_bucket_is_told_from_a_missing_object_and_what_to_do() {
    let s3 = S3::start(1);
    let verify = |bucket: &str, name: &str| {
        S3::run(tidelog().args(["verify", "--bucket", &s3.url(0).replace("bucket-0", bucket), name]), "")
    };
    fails(&verify("bucket-0", "gone"), 3, &["no such object"]);
    fails(&verify("bucket-9", "gone"), 1, &["bucket does not exist", "create it"]);
}

#[test]
fn a_server_that_is_not_there_is_warned_of_long_before_the_end() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("s3://bucket-0?endpoint=http://{}&anonymous=true", listener.local_addr().unwrap());
    drop(listener);
    let home = Home::new();
    let mut child = write_into(&[url], &home.text("local"))
        .env("AWS_REGION", "us-east-1")
        .env("AWS_EC2_METADATA_DISABLED", "true")
        .stdin(Stdio::null())
        .arg(home.put("input", "one\n"))
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut said = BufReader::new(child.stderr.take().unwrap()).lines().map_while(Result::ok);
    let warning = said.find(|line| line.contains("WARN"));
    child.kill().unwrap();
    child.wait().unwrap();
    let warning = warning.expect("a warning before the end");
    assert!(warning.contains("Connection refused") && warning.contains("persist_timeout"), "{warning}");
}

fn age(path: &Path, age: Duration) {
    File::options().write(true).open(path).unwrap().set_modified(SystemTime::now() - age).unwrap();
}

#[test]
fn a_sweep_shows_first_and_then_removes_what_nobody_needs() {
    let (home, other) = (Home::new(), Home::new());
    let bucket = home.bucket();
    let live = home.keep("live", &succeeds(home.write(&[], "live\n")));
    let live_object = home.only_file("bucket");
    // Another directory's objects in the same bucket, whose handles nobody keeps.
    succeeds(run(&mut write_into(std::slice::from_ref(&bucket), &other.text("local")), "orphan\n"));
    let objects = files_below(&home.path("bucket"));
    assert_eq!(objects.len(), 2);
    objects.iter().for_each(|object| age(object, 25 * HOUR));

    let sweep = |more: &[&str]| tidelog_with(&[&["sweep", &bucket], more].concat());
    let says = |more: &[&str], what: &str| {
        let output = succeeds(sweep(more));
        assert!(stdout(&output).contains(what), "{what} is not in {}", stdout(&output));
        output
    };
    says(&["--yes"], "0 things of 0 removed");
    says(&["--yes"], "only --live-handles can tell");
    says(&["--live-handles", &live, "--min-age", "26h", "--yes"], "younger than --min-age");
    says(&["--live-handles", &live, "--local", &other.text("local"), "--yes"], "1 kept: a --local directory");
    // The list of live handles is older than the objects.
    age(Path::new(&live), 30 * HOUR);
    says(&["--live-handles", &live, "--yes"], "0 things of 2 removed");
    age(Path::new(&live), HOUR);
    let shown = says(&["--live-handles", &live], "1 thing of 2 to remove");
    assert!(stderr(&shown).contains("--yes"), "{}", stderr(&shown));
    let json = succeeds(sweep(&["--live-handles", &live, "--json"]));
    let json: serde_json::Value = serde_json::from_str(&stdout(&json)).unwrap();
    assert_eq!((&json["removed"], json["strays"].as_array().unwrap().len()), (&0.into(), 1));
    assert_eq!(files_below(&home.path("bucket")).len(), 2, "nothing was changed so far");
    says(&["--live-handles", &live, "--yes"], "1 thing of 2 removed");
    assert_eq!(home.only_file("bucket"), live_object);
    assert_eq!(stdout(&succeeds(tidelog_with(&["read", &live]))), "live\n");
}

#[test]
fn a_sweep_refuses_what_would_make_everything_look_unneeded() {
    let home = Home::new();
    succeeds(home.write(&[], "one\n"));
    let empty = home.put("empty", "");
    fails(&tidelog_with(&["sweep", &home.bucket(), "--live-handles", &empty]), 2, &["no handle"]);
    fails(&tidelog_with(&["sweep", &home.bucket(), "--local", &home.text("none")]), 1, &["none"]);
    fails(&tidelog_with(&["sweep", "file:///no/such/bucket"]), 1, &["no such directory"]);
    for group in ["../x", "a/b", ""] {
        fails(&tidelog_with(&["sweep", &home.bucket(), "--group", group]), 2, &["group", "1 to 64 letters"]);
    }
    fails(&tidelog_with(&["sweep", &home.bucket(), "--name-prefix", "a//b"]), 2, &["prefix", "a//b"]);
    fails(&tidelog_with(&["sweep", &format!("{}%202", home.bucket())]), 1, &["no such directory"]);
    assert!(!home.path("bucket 2").exists());
    // Sound handles, of something else.
    let other = Home::new();
    let foreign = other.keep("foreign", &succeeds(other.write(&[], "two\n")));
    age(Path::new(&home.only_file("bucket")), 25 * HOUR);
    let bucket = home.bucket();
    for more in [&[][..], &["--yes"]] {
        let sweep = [&["sweep", &bucket, "--live-handles", &foreign], more].concat();
        fails(&tidelog_with(&sweep), 2, &["would go (1)", "none of the live handles (1)"]);
    }
    home.only_file("bucket");
}

#[test]
fn a_sweep_that_waits_for_its_bucket_says_so() {
    // Takes connections and never answers.
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = silent.local_addr().unwrap();
    let url = format!("s3://bucket-0?endpoint=http://{address}&region=us-east-1");
    let mut sweep = S3::allowed(tidelog().args(["sweep", &url])).stderr(Stdio::piped()).spawn().unwrap();
    let mut said = BufReader::new(sweep.stderr.take().unwrap()).lines().map(Result::unwrap);
    let waits = said.find(|line| line.contains("has not listed"));
    sweep.kill().unwrap();
    sweep.wait().unwrap();
    assert!(waits.as_ref().is_some_and(|line| line.contains(&url)), "{waits:?}");
}

#[test]
fn uploads_of_dead_owners_are_aborted_and_those_of_living_ones_are_not() {
    let s3 = S3::start(1);
    let home = Home::new();
    let local = home.text("local");
    let mut write = write_into(&[s3.url(0)], &local);
    // Far more than a part, and no end: the upload is open before a checkpoint is asked for.
    write.args(["--checkpoint-every", "1000000"]);
    let mut writer = S3::allowed(&mut write)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut stdin = writer.stdin.take().unwrap();
    stdin.write_all(&format!("{}\n", "x".repeat(999)).repeat(20_000).into_bytes()).unwrap();
    eventually("an upload is open", || s3.server.uploads("bucket-0").len() == 1);
    let sweep =
        |more: &[&str]| stdout(&succeeds(S3::run(tidelog().args(["sweep", &s3.url(0)]).args(more), "")));
    let unknown = sweep(&["--yes", "--min-age", "0s"]);
    assert!(unknown.contains("0 things of 1 removed") && unknown.contains("uploads than a day"), "{unknown}");
    let alive = sweep(&["--local", &local, "--yes", "--min-age", "0s"]);
    assert!(alive.contains("0 things of 1 removed") && alive.contains("in use"), "{alive}");
    writer.kill().unwrap();
    writer.wait().unwrap();
    let shown = sweep(&["--local", &local]);
    assert!(shown.contains("1 thing of 1 to remove") && shown.contains("which nobody has open"), "{shown}");
    assert_eq!(s3.server.uploads("bucket-0").len(), 1, "nothing was changed so far");
    let done = sweep(&["--local", &local, "--yes"]);
    assert!(done.contains("1 thing of 1 removed"), "{done}");
    assert!(s3.server.uploads("bucket-0").is_empty());
}

fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    for _ in 0..2000 {
        if holds() {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("never happened: {what}");
}

#[test]
fn checkpoints_in_s3_are_written_read_verified_and_looked_at() {
    let s3 = S3::start(2);
    let home = Home::new();
    let mut write = write_into(&[s3.url(0), s3.url(1)], &home.text("local"));
    let handles = home.keep("handles", &succeeds(S3::run(write.arg("--no-hedging"), "one\ntwo\n")));
    assert_eq!(s3.server.objects("bucket-0").len() + s3.server.objects("bucket-1").len(), 1);
    let read = succeeds(S3::run(tidelog().args(["read", &handles]), ""));
    assert_eq!(sorted(&stdout(&read)), ["one", "two"]);
    for command in ["verify", "inspect"] {
        succeeds(S3::run(tidelog().args([command, &handles]), ""));
    }
    let swept = succeeds(S3::run(tidelog().args(["sweep", &s3.url(0)]), ""));
    assert!(stdout(&swept).contains("0 things"), "{}", stdout(&swept));
}

fn doctor(home: &Home, bucket: &str) -> Command {
    let mut doctor = tidelog();
    doctor.args(["doctor", "--seconds", "0", "--dir", &home.text("."), "--bucket", bucket]);
    doctor
}

#[test]
fn the_doctor_finds_a_bucket_well_and_leaves_nothing_in_it() {
    let s3 = S3::start(1);
    let home = Home::new();
    let found = stdout(&S3::run(&mut doctor(&home, &s3.url(0)), ""));
    for check in
        ["bucket takes", "bucket put", "bucket multipart", "bucket get", "bucket list", "bucket delete"]
    {
        assert!(found.contains(&format!("ok    {check}")), "{check}: {found}");
    }
    assert!(s3.server.objects("bucket-0").is_empty() && s3.server.uploads("bucket-0").is_empty());
    let json = stdout(&S3::run(doctor(&home, &s3.url(0)).arg("--json"), ""));
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    let about = |finding: &&serde_json::Value| finding["bucket"] == s3.url(0);
    assert_eq!(json["findings"].as_array().unwrap().iter().filter(about).count(), 6, "{json}");
}

#[test]
fn the_doctor_says_what_is_wrong_with_a_bucket() {
    let s3 = S3::start(1);
    let home = Home::new();
    // There is none of that name.
    fails(&S3::run(&mut doctor(&home, &s3.url(7)), ""), 1, &["bad   bucket put", "bucket-7"]);
    // Another's key.
    let mut stranger = doctor(&home, &s3.url(0));
    S3::allowed(&mut stranger).env("AWS_SECRET_ACCESS_KEY", "another");
    fails(&run(&mut stranger, ""), 1, &["bad   bucket put", "bucket-0"]);
    s3.server.add_rule(Rule::new(Fault::Denied).operation(Operation::Put));
    fails(&S3::run(&mut doctor(&home, &s3.url(0)), ""), 1, &["bad   bucket put", "denied"]);
    s3.server.clear_rules();
    s3.server.add_rule(Rule::new(Fault::Denied).operation(Operation::Delete));
    fails(&S3::run(&mut doctor(&home, &s3.url(0)), ""), 1, &["bad   bucket delete", "denied"]);
    // Nobody listens there.
    let url = "s3://bucket-0?endpoint=http://127.0.0.1:9".to_owned();
    fails(&S3::run(&mut doctor(&home, &url), ""), 1, &["bad   bucket put"]);
    // A file where a directory should be.
    let file = home.put("file", "");
    fails(&run(&mut doctor(&home, &format!("file://{file}/bucket")), ""), 1, &["bad   bucket", "file"]);
}
