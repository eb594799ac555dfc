//! What a person is told, and when a command ends, while a bucket answers nothing, refuses, or a disk is full.

mod common;
#[path = "../../tests/common/small_disk.rs"]
mod small_disk;

use std::process::Output;
use std::time::{Duration, Instant};

use common::{
    Home, S3, fails, run, sorted, stderr, stdout, succeeds, tidelog, tidelog_with, write_into, write_within,
};
use small_disk::SmallDisk;
use tidelog_testing::{Fault, Rule};

#[test]
fn what_waits_for_a_server_that_hangs_says_so_and_ends() {
    let s3 = S3::start(1);
    let home = Home::new();
    let written = succeeds(S3::run(&mut write_into(&[s3.url(0)], &home.text("local")), "one\ntwo\n"));
    let handles = home.keep("handles", &written);
    let local = home.text("local");
    s3.server.add_rule(Rule::new(Fault::Hang));
    let url = &s3.url(0);
    let commands: [&[&str]; 4] = [
        &["read", &handles],
        &["verify", &handles],
        &["verify", &local],
        &["inspect", "--bucket", url, "ops/tidelog/a"],
    ];
    std::thread::scope(|scope| {
        for command in commands {
            scope.spawn(move || {
                let output = S3::run(tidelog().args(command).args(["--patience", "4s"]), "");
                let (waits, ends) =
                    (format!("nothing comes from {url}"), format!("nothing has come from {url} for 4s"));
                fails(&output, 1, &[&waits, "s so far", &ends, "--patience"]);
                assert_eq!(stdout(&output), "", "{command:?}");
            });
        }
    });
}

#[test]
fn patience_is_for_each_answer_and_not_for_all() {
    let s3 = S3::start(1);
    let home = Home::new();
    let mut write = write_into(&[s3.url(0)], &home.text("local"));
    let handles = home.keep("handles", &succeeds(S3::run(&mut write, "one\ntwo\n")));
    // A footer, a directory and a range one after the other, each of which is soon enough.
    s3.server.add_rule(Rule::new(Fault::Delay(Duration::from_millis(1500))));
    for command in ["read", "verify"] {
        succeeds(S3::run(tidelog().args([command, &handles, "--patience", "3500ms"]), ""));
    }
}

#[test]
fn a_bench_on_a_bucket_that_is_not_there_ends_soon_after_its_time_and_says_why() {
    let s3 = S3::start(1);
    let home = Home::new();
    let mut bench = tidelog();
    // Full long before.
    bench.args([
        "bench",
        "--seconds",
        "2",
        "--threads",
        "2",
        "--segment-bytes",
        "1M",
        "--local-bytes",
        "4M",
        "--json",
    ]);
    bench.args(["--checkpoint-every", "10s", "--dir", &home.text("local"), "--bucket", &s3.url(7)]);
    let begun = Instant::now();
    let output = S3::run(&mut bench, "");
    let took = begun.elapsed();
    let figures: serde_json::Value = serde_json::from_str(&stdout(&output)).unwrap();
    // As many as were asked for before the disk was full.
    let failed = match figures["failed_checkpoints"].as_u64() {
        Some(1) => "\ntidelog: 1 checkpoint failed",
        Some(2) => "\ntidelog: 2 checkpoints failed",
        other => panic!("{other:?} checkpoints failed"),
    };
    assert_eq!(figures["persisted_bytes"], 0);
    fails(&output, 1, &[failed, "bucket-7", "does not exist; create it"]);
    // Two seconds, ten more for what may still be answered, and what a busy machine adds.
    assert!(took < Duration::from_secs(40), "{took:?}");
}

/// How many records are said to be kept, of those without a handle.
fn kept(output: &Output) -> usize {
    let said = stderr(output);
    let kept = said.split("the records from 0 to ").nth(1).and_then(|rest| rest.split(' ').next());
    kept.unwrap_or_else(|| panic!("{said}")).parse().unwrap()
}

/// Writes to a bucket that is not there more than the local disk holds, then persists the rest where there is one.
fn write_more_than_fits(records: usize) {
    let s3 = S3::start(1);
    let home = Home::new();
    let local = home.text("local");
    let input = format!("{}\n", "x".repeat(999)).repeat(records);
    let mut write = write_within("4M", &[s3.url(7)], &local);
    let output = S3::run(write.args(["--patience", "2s"]), &input);
    fails(&output, 1, &["bucket-7", "does not exist; create it", "--local-bytes", "--recover persist"]);
    assert_eq!(stdout(&output), "");
    let durable = kept(&output);
    assert!(durable > 1000 && durable < records, "{durable}");
    let again = S3::run(write_into(&[s3.url(0)], &local).args(["--recover", "persist"]), "");
    let handles = home.keep("handles", &succeeds(again));
    let read = stdout(&succeeds(S3::run(tidelog().args(["read", &handles]), "")));
    assert!(read.lines().count() >= durable, "{} of {durable}", read.lines().count());
}

#[test]
fn a_writer_whose_records_find_no_room_says_why_and_what_is_kept() {
    // Without its last sync a log may lose them, if the uploader hears of its end soon enough: so more than once.
    std::thread::scope(|scope| (0..6).for_each(|_| drop(scope.spawn(|| write_more_than_fits(60_000)))));
}

#[test]
fn a_writer_whose_last_sync_finds_no_room_says_why_and_what_is_kept() {
    // They fit into memory: all are appended, and the end of the input is what waits for the disk.
    write_more_than_fits(8_000);
}

#[test]
fn a_writer_that_runs_out_of_room_names_the_checkpoint_that_failed_first() {
    let s3 = S3::start(1);
    let home = Home::new();
    let mut write = write_within("4M", &[s3.url(0)], &home.text("local"));
    write.args(["--patience", "2s", "--checkpoint-every", "100"]);
    s3.server.add_rule(Rule::new(Fault::Denied));
    let output = S3::run(&mut write, format!("{}\n", "x".repeat(999)).repeat(60_000));
    fails(
        &output,
        1,
        &["tidelog: the last checkpoint failed: object", "bucket-0", "denied", "--recover persist"],
    );
}

#[test]
fn of_several_buckets_one_that_is_not_there_is_warned_of_and_left_out() {
    let s3 = S3::start(1);
    let home = Home::new();
    // Which bucket a run begins with is left to chance. One that is only raced may answer when nobody waits for it any more.
    for number in 0..30 {
        let mut write = write_into(&[s3.url(7), s3.url(0)], &home.text(&format!("local-{number}")));
        let output = succeeds(S3::run(write.args(["--checkpoint-every", "1"]), "1\n2\n3\n4\n"));
        let handles = home.keep("handles", &output);
        let read = succeeds(S3::run(tidelog().args(["read", &handles]), ""));
        assert_eq!(sorted(&stdout(&read)), ["1", "2", "3", "4"]);
        let said = stderr(&output);
        let went = format!("4 records, 4 B, went to {} in 4 handles", s3.url(0));
        assert!(said.lines().last().unwrap().contains(&went), "{said}");
        let warnings: Vec<&str> = said.lines().filter(|line| line.contains("WARN")).collect();
        if let [warning, more @ ..] = &warnings[..] {
            assert!(more.is_empty(), "{said}");
            for part in ["refuses objects, they go to the others", "bucket-7", "does not exist; create it"] {
                assert!(warning.contains(part), "{part} is not in {said}");
            }
            return;
        }
    }
    panic!("nobody was warned");
}

#[test]
fn a_bucket_on_a_full_disk_is_named_and_nothing_is_lost() {
    let Some(disk) = SmallDisk::mount(4) else { return };
    let home = Home::new();
    let full = format!("file://{}", disk.path().join("bucket").display());
    let local = home.text("local");
    let input = format!("{}\n", "x".repeat(999)).repeat(10_000);
    let write = |bucket: String| write_within("4M", &[bucket], &local);
    let output = run(write(full.clone()).args(["--patience", "8s"]), &input);
    fails(&output, 1, &[&full, "No space left on device", "--recover persist"]);
    let again = run(write(home.bucket()).args(["--recover", "persist"]), "");
    let handles = home.keep("handles", &succeeds(again));
    let (read, kept) = (stdout(&succeeds(tidelog_with(&["read", &handles]))).lines().count(), kept(&output));
    assert!(kept > 1000 && read >= kept, "{read} of {kept}");
}
