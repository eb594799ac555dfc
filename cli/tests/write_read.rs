//! Records that go in come out, whatever their form, and in the order that is promised.

mod common;

use common::{FLIGHTS, Home, fails, flights, run, sorted, stderr, stdout, succeeds, tidelog, tidelog_with};

#[test]
fn real_records_come_back_by_key_group() {
    let home = Home::new();
    let source = home.put("flights.csv", FLIGHTS);
    let args = ["--key", "field:12", "--separator", ",", "--checkpoint-every", "10000", &source];
    let output = succeeds(home.write(&args, ""));
    assert_eq!(stdout(&output).lines().count(), 3);
    assert!(stderr(&output).contains("27,004 records"), "{}", stderr(&output));
    let handles = home.keep("handles", &output);

    let all = stdout(&succeeds(tidelog_with(&["read", &handles])));
    assert_eq!(sorted(&all), sorted(FLIGHTS));
    let halves = ["0-63", "64-127"].map(|half| {
        stdout(&succeeds(tidelog_with(&["read", "--key-groups", half, "--with-meta", &handles])))
    });
    let mut seen = vec![false; flights().len()];
    for (half, range) in halves.iter().zip([0..64, 64..128]) {
        let mut last = vec![None; 128];
        for line in half.lines() {
            let fields: Vec<&str> = line.splitn(4, '\t').collect();
            let (number, group): (usize, usize) = (fields[1].parse().unwrap(), fields[2].parse().unwrap());
            assert!(range.contains(&group));
            assert_eq!(fields[3], flights()[number]);
            assert!(last[group] < Some(number), "key group {group} is out of order");
            last[group] = Some(number);
            assert!(!std::mem::replace(&mut seen[number], true), "record {number} came twice");
        }
    }
    assert!(seen.iter().all(|seen| *seen));
    let rest = stdout(&succeeds(tidelog_with(&["read", "--from", "27000", &handles])));
    assert_eq!(sorted(&rest), sorted(&flights()[27_000..].join("\n")));

    let local = stdout(&succeeds(tidelog_with(&["read", "--dir", &home.text("local")])));
    assert_eq!(sorted(&local), sorted(FLIGHTS));
}

fn prefixed(records: &[&[u8]]) -> Vec<u8> {
    records.iter().flat_map(|record| [&(record.len() as u32).to_le_bytes(), *record].concat()).collect()
}

#[test]
fn length_prefixed_records_hold_any_bytes() {
    let home = Home::new();
    let large: Vec<u8> = (0..3_000_000u32).map(|at| ((at * 31) >> 7) as u8).collect();
    let records = [&b"line\nbreak"[..], b"", b"\xff\x00", &large];
    for compression in ["none", "lz4"] {
        let args = ["--framing", "length-prefixed", "--compression", compression, "--max-parallelism", "1"];
        let handles = home.keep("handles", &succeeds(home.write(&args, prefixed(&records))));
        let read = succeeds(tidelog_with(&["read", "--framing", "length-prefixed", &handles]));
        // All are of one key group, so their order is kept.
        assert!(read.stdout == prefixed(&records), "{compression}");
        fails(&tidelog_with(&["read", &handles]), 1, &["newline", "--framing length-prefixed"]);
    }
}

#[test]
fn json_records_are_keyed_by_a_pointer() {
    let home = Home::new();
    let records = "{\"user\":{\"id\":\"user-1\"}}\n{\"user\":{\"id\":\"user-2\"}}\n";
    let handles = home.keep("handles", &succeeds(home.write(&["--key", "json:/user/id"], records)));
    // The key groups of Flink, see src/key.rs.
    let only = |group: &str| stdout(&succeeds(tidelog_with(&["read", "--key-groups", group, &handles])));
    assert_eq!(only("121"), "{\"user\":{\"id\":\"user-1\"}}\n");
    assert_eq!(only("22"), "{\"user\":{\"id\":\"user-2\"}}\n");
    let none = succeeds(tidelog_with(&["read", "--key-groups", "0-21", &handles]));
    assert_eq!((stdout(&none).as_str(), stderr(&none).lines().count()), ("", 1));
    assert!(
        stderr(&none).contains("0 records") && stderr(&none).contains("--key-groups"),
        "{}",
        stderr(&none)
    );
    assert_eq!(stderr(&succeeds(tidelog_with(&["read", &handles]))), "");
}

#[test]
fn handles_come_from_files_of_both_forms_and_from_standard_input() {
    let home = Home::new();
    let file = home.text("handles.jsonl");
    let first = succeeds(home.write(&["--handles", &file], "a\n"));
    let second = succeeds(home.write(&["--handles", &file], "b\n"));
    let both = stdout(&first) + &stdout(&second);
    assert_eq!(std::fs::read_to_string(&file).unwrap(), both);
    assert_eq!(sorted(&stdout(&succeeds(tidelog_with(&["read", &file])))), ["a", "b"]);
    assert_eq!(sorted(&stdout(&succeeds(run(tidelog().args(["read", "-"]), &both)))), ["a", "b"]);
    let handle = tidelog::ChangelogHandle::from_json(&stdout(&second)).unwrap();
    let bytes = home.put("handle.bin", handle.to_bytes());
    assert_eq!(stdout(&succeeds(tidelog_with(&["read", &bytes]))), "b\n");
    let log = handle.log().to_string();
    assert_eq!(stdout(&succeeds(tidelog_with(&["read", "--log", &log, &file]))), "b\n");
}

#[test]
fn no_records_give_a_handle_of_nothing() {
    let home = Home::new();
    let handles = home.keep("handles", &succeeds(home.write(&[], "")));
    let none = succeeds(tidelog_with(&["read", &handles]));
    assert_eq!(stdout(&none), "");
    assert!(stderr(&none).contains("0 records"), "{}", stderr(&none));
    assert!(common::files_below(&home.path("bucket")).is_empty(), "nothing new, no object");
}

#[test]
fn a_checkpoint_by_time_does_not_wait_for_more_input() {
    use std::io::{BufRead, BufReader, Write};
    use std::process::Stdio;
    let home = Home::new();
    let mut command = home.write_command();
    command.args(["--checkpoint-every", "20ms"]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut input = child.stdin.take().unwrap();
    input.write_all(b"a record\n").unwrap();
    // The input stays open: only the clock can have caused this.
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(tidelog::ChangelogHandle::from_json(&line).unwrap().to().0, 1);
    drop(input);
    assert!(child.wait().unwrap().success());
}

#[test]
fn what_a_killed_run_left_is_kept_persisted_or_discarded() {
    let home = Home::new();
    kill_after_sync(&home, "one\n");
    let kept = succeeds(home.write(&[], "two\n"));
    assert!(stderr(&kept).contains("1 record without a handle; kept"), "{}", stderr(&kept));
    let persisted = succeeds(home.write(&["--recover", "persist"], "three\n"));
    let handles = home.keep("handles", &persisted);
    assert_eq!(stdout(&succeeds(tidelog_with(&["read", &handles]))), "one\nthree\n");
    // It has its handle now.
    let again = succeeds(home.write(&["--recover", "persist"], ""));
    assert!(!stderr(&again).contains("persisted now"), "{}", stderr(&again));
    let discarded = succeeds(home.write(&["--recover", "discard"], "four\n"));
    assert!(stderr(&discarded).contains("discarded"), "{}", stderr(&discarded));
    assert_eq!(stdout(&succeeds(tidelog_with(&["read", "--dir", &home.text("local")]))), "four\n");
}

#[test]
fn a_handle_given_out_just_before_the_kill_is_not_given_again() {
    let home = Home::new();
    kill_after_sync(&home, "one\n");
    // As if the process had been killed between giving the handle out and confirming it.
    let logs = tidelog::LocalLogs::open(home.path("local")).unwrap();
    let [log] = logs.logs() else { panic!("{logs:?}") };
    let extent = tidelog::Extent {
        pieces: vec![tidelog::Piece {
            bucket: home.bucket().into(),
            object: "tidelog/00000000-0".to_owned(),
            offset: 0,
            bytes: 100,
        }],
        footer: 50..100,
        token: 0,
        first: log.start(),
        end: log.end(),
    };
    let (id, name, range) = (log.log(), log.name(), log.key_groups());
    let handle =
        tidelog::ChangelogHandle::new(id, name, range, log.start(), log.end(), vec![extent]).unwrap();
    let file = home.put("handles.jsonl", handle.to_json() + "\n");
    drop(logs);
    let output = succeeds(home.write(&["--recover", "persist", "--handles", &file], "two\n"));
    assert_eq!(stdout(&output).lines().count(), 1, "{}", stdout(&output));
    assert!(!stderr(&output).contains("persisted now"), "{}", stderr(&output));
}

/// Runs `tidelog write`, and kills it once it has acknowledged the input.
fn kill_after_sync(home: &Home, input: &str) {
    use std::io::Write;
    use std::process::Stdio;
    let acks = home.text("acks");
    let mut command = home.write_command();
    command.args(["--sync-every", "1", "--acks", &acks]).stdin(Stdio::piped()).stdout(Stdio::null());
    let mut child = command.spawn().unwrap();
    let mut pipe = child.stdin.take().unwrap();
    pipe.write_all(input.as_bytes()).unwrap();
    while std::fs::read_to_string(&acks).unwrap_or_default().is_empty() {
        assert_eq!(child.try_wait().unwrap(), None, "it ended early");
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn a_reader_that_stops_early_is_no_error() {
    let home = Home::new();
    let records = "x".repeat(100) + "\n";
    let handles = home.keep("handles", &succeeds(home.write(&[], records.repeat(20_000))));
    let shell =
        format!("{} read {handles} | head -n 1; echo ${{PIPESTATUS[0]}}", env!("CARGO_BIN_EXE_tidelog"));
    let output = run(std::process::Command::new("bash").args(["-c", &shell]), "");
    assert_eq!(stdout(&output), records + "0\n");
    assert_eq!(stderr(&output), "");
}

#[test]
fn objects_stand_in_the_folders_that_were_asked_for() {
    let home = Home::new();
    let written = home.write(&["--group", "orders", "--name-prefix", "team/jobs"], "a record\n");
    let handles = home.keep("handles", &succeeds(written));
    assert!(home.only_file("bucket").starts_with(home.path("bucket/team/jobs/orders")));
    assert_eq!(stdout(&succeeds(tidelog_with(&["read", &handles]))), "a record\n");
    fails(&home.write(&["--group", "a/b"], ""), 2, &["option group"]);
}
