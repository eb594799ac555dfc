//! What a person is told, and when a command ends, while a bucket answers nothing, refuses, or a disk is full.

mod common;

use std::time::{Duration, Instant};

use common::{Home, S3, fails, stdout, succeeds, tidelog, write_into};
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
    fails(&output, 1, &["\ntidelog: 2 checkpoints failed", "bucket-7", "does not exist; create it"]);
    let figures: serde_json::Value = serde_json::from_str(&stdout(&output)).unwrap();
    assert_eq!((&figures["failed_checkpoints"], &figures["persisted_bytes"]), (&2.into(), &0.into()));
    // Two seconds, ten more for what may still be answered, and what a busy machine adds.
    assert!(took < Duration::from_secs(40), "{took:?}");
}
