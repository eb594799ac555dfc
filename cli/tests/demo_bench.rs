//! The demonstration and the bench, as a person runs them.

mod common;

use common::{Home, fails, run, stderr, stdout, succeeds, tidelog};

#[test]
fn without_a_command_the_main_job_is_shown_and_nothing_is_left() {
    let home = Home::new();
    let output = succeeds(run(tidelog().env("TMPDIR", home.path("")), ""));
    let said = stdout(&output);
    for part in [
        "27,004 flights",
        "SIGKILL",
        "every acknowledged one among them",
        "key groups 0-63 and 64-127",
        "27,004 of 27,004 records equal the source",
        "nothing acknowledged was lost",
        "local disk",
        &home.text("tidelog-demo-"),
    ] {
        assert!(said.contains(part), "{part} is not in: {said}");
    }
    assert_eq!(stderr(&output), "");
    assert_eq!(std::fs::read_dir(home.path("")).unwrap().count(), 0);
}

#[test]
fn the_demonstration_leaves_what_verifies_when_asked_to() {
    let home = Home::new();
    succeeds(run(tidelog().args(["demo", "--keep"]).env("TMPDIR", home.path("")), ""));
    let kept = std::fs::read_dir(home.path("")).unwrap().next().unwrap().unwrap().path();
    let (local, handles) = (kept.join("local"), kept.join("handles.jsonl"));
    succeeds(run(tidelog().arg("verify").args([local, handles]), ""));
}

fn bench(home: &Home) -> std::process::Command {
    let mut command = tidelog();
    command.args([
        "bench",
        "--seconds",
        "1",
        "--threads",
        "1",
        "--segment-bytes",
        "4M",
        "--local-bytes",
        "64M",
    ]);
    command.args(["--checkpoint-every", "100ms"]).env("TMPDIR", home.path(""));
    command
}

#[test]
fn a_bench_gives_a_table_json_and_a_page() {
    let home = Home::new();
    let page = home.path("page.html");
    let output = succeeds(run(bench(&home).arg("--json").arg("--html").arg(&page), ""));
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    for figure in ["records", "bytes_per_second", "durable_bytes", "clock_ns"] {
        assert!(json[figure].as_f64().unwrap() > 0.0, "{figure} in {json}");
    }
    for latency in ["append", "sync", "persist"] {
        let (median, max) = (json[latency]["p50_ns"].as_u64(), json[latency]["max_ns"].as_u64());
        assert!(Some(0) < median && median <= max, "{latency} in {json}");
    }
    assert!(["io_uring", "pwritev2"].contains(&json["engines"][0]["engine"].as_str().unwrap()));
    assert!(!json["samples"].as_array().unwrap().is_empty());
    assert_eq!(json["last_failure"], serde_json::Value::Null);
    let html = std::fs::read_to_string(&page).unwrap();
    assert_eq!(html.matches("<svg").count(), 2);
    // Nothing is loaded from elsewhere: the only address in it is the name of SVG's namespace.
    assert!(html.ends_with("</html>\n"));
    assert!(html.match_indices("http").all(|(at, _)| html[at..].starts_with("http://www.w3.org/2000/svg")));
    // Only the page is left.
    assert_eq!(std::fs::read_dir(home.path("")).unwrap().count(), 1);

    let text = stdout(&succeeds(run(bench(&home).args(["--engine", "pwritev2"]), "")));
    for part in ["engine", "pwritev2", "throughput", "p99.9", "persist", "processors"] {
        assert!(text.contains(part), "{part} is not in: {text}");
    }
}

#[test]
fn a_page_that_cannot_be_written_is_known_before_the_bench() {
    let home = Home::new();
    fails(&run(bench(&home).args(["--html", "/no/such/page.html"]), ""), 1, &["/no/such/page.html"]);
    assert_eq!(std::fs::read_dir(home.path("")).unwrap().count(), 0);
}
