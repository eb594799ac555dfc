//! What a script sees of the tool: exit codes, and errors on standard error only.

use std::process::{Command, Output};

fn tidelog(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_tidelog")).args(args).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

#[test]
fn help_is_no_error() {
    let output = tidelog(&["--help"]);
    assert_eq!(output.status.code(), Some(0));
    assert!(text(&output.stdout).contains("Exit codes"));
}

#[test]
fn wrong_arguments_are_told_apart_from_failures() {
    for args in [
        &["wirte"][..],
        &["write"],
        &["write", "--bucket", "file:///b", "--key", "fields:1"],
        &["write", "--bucket", "file:///b", "--max-parallelism", "40000"],
        &["write", "--bucket", "s3://", "--dir", "/dev/null/none", "--", "/dev/null"],
        &["write", "--bucket", "s3://bucket?endpoint=host:80", "--dir", "/dev/null/none", "--", "/dev/null"],
        &["write", "--bucket", "s3://bucket?wrong=key", "--dir", "/dev/null/none", "--", "/dev/null"],
        &["write", "--bucket", "gs://bucket", "--dir", "/dev/null/none", "--", "/dev/null"],
        &["verify", "--bucket", "s3://", "name"],
        &["read"],
        &["read", "--key-groups", "5-4", "handles"],
    ] {
        let output = tidelog(args);
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        assert!(output.stdout.is_empty() && !output.stderr.is_empty(), "{args:?}");
    }
}

#[test]
fn a_bad_finding_of_the_doctor_is_a_failure() {
    let output = tidelog(&["doctor", "--seconds", "0", "--json", "--dir", "/dev/null/segments"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("must be changed"), "{}", text(&output.stderr));
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["worst"], "bad");
    let bad =
        report["findings"].as_array().unwrap().iter().find(|finding| finding["grade"] == "bad").unwrap();
    assert_eq!(bad["dir"], "/dev/null/segments");
}
