//! `compact`: the same records from fewer objects.

mod common;

use std::fs::{self, OpenOptions};

use common::{Home, fails, files_below, flights, stderr, stdout, succeeds, tidelog, tidelog_with};

#[test]
fn new_handles_give_the_same_records_from_one_object() {
    let home = Home::new();
    let input = flights()[..3000].join("\n");
    let written = home.write(&["--key", "field:12", "--separator", ",", "--checkpoint-every", "100"], input);
    let old = home.keep("old", &succeeds(written));
    let before = files_below(&home.path("bucket"));
    assert!(before.len() > 20);

    let compact = |more: &[&str]| tidelog_with(&[&["compact", &home.bucket()], more].concat());
    let plan = stdout(&succeeds(compact(&[&old, "--plan"])));
    assert!(plan.contains("then: 1 object") && plan.ends_with("\nworthwhile\n"), "{plan}");
    assert_eq!(files_below(&home.path("bucket")), before, "a plan writes nothing");

    let made = succeeds(compact(&[&old, "--group", "compact"]));
    assert!(stderr(&made).contains("in 1 object"), "{}", stderr(&made));
    let new = home.keep("new", &made);
    assert_eq!(files_below(&home.path("bucket")).len(), before.len() + 1);
    assert_eq!(stdout(&made).lines().count(), 1, "a handle for the log");
    let read = |handles: &str| stdout(&succeeds(tidelog_with(&["read", "--with-meta", handles])));
    let (from_old, from_new) = (read(&old), read(&new));
    assert_eq!(from_new.lines().count(), 3000);
    let sorted = |text: &str| common::sorted(text).join("\n");
    assert_eq!(sorted(&from_new), sorted(&from_old));
    succeeds(tidelog_with(&["verify", &new]));
    // Of fewer key groups the new object has fewer changes than its logs have numbers.
    let half = home.keep("half", &succeeds(compact(&[&new, "--group", "half", "--key-groups", "0-63"])));
    let changes = read(&half).lines().count();
    assert!((1..3000).contains(&changes), "{changes}");
    succeeds(tidelog_with(&["verify", &half]));
    let again = stdout(&succeeds(compact(&[&new, "--plan"])));
    assert!(again.ends_with("\nnot worthwhile\n"), "{again}");
}

/// Each by a process of its own; together they are what the old ones were.
#[test]
fn ranges_of_key_groups_go_together() {
    let home = Home::new();
    let input = flights()[..3000].join("\n");
    let written = home.write(&["--key", "field:12", "--separator", ",", "--checkpoint-every", "300"], input);
    let old = home.keep("old", &succeeds(written));
    let bucket = home.bucket();
    let compact = |handles: &[&str], name: &str, range: &str| {
        let command = ["compact", &bucket, "--group", name, "--key-groups", range];
        home.keep(name, &succeeds(tidelog_with(&[&command, handles].concat())))
    };
    let read = |handles: &[&str], more: &[&str]| {
        let records = succeeds(tidelog_with(&[&["read", "--with-meta"], more, handles].concat()));
        common::sorted(&stdout(&records)).join("\n")
    };
    let [low, middle, high] = [("low", "0-39"), ("middle", "40-63"), ("high", "64-127")]
        .map(|(name, range)| compact(&[&old], name, range));
    let set = [&*middle, &low, &high];
    let all = read(&[&old], &[]);
    assert_eq!(all.lines().count(), 3000);
    assert_eq!(read(&set, &[]), all);
    assert_eq!(read(&set, &["--key-groups", "30-70"]), read(&[&old], &["--key-groups", "30-70"]));
    succeeds(tidelog_with(&[&["verify"], &set[..]].concat()));

    let again = succeeds(tidelog_with(&[&["compact", &*bucket, "--group", "again"], &set[..]].concat()));
    assert!(stderr(&again).contains("in 3 objects"), "{}", stderr(&again));
    let again = home.keep("again", &again);
    assert_eq!(fs::read_to_string(&again).unwrap().lines().count(), 3, "one for each range");
    assert_eq!(read(&[&again], &[]), all);
    let some = compact(&[&again], "some", "20-50");
    assert_eq!(read(&[&some], &[]), read(&[&old], &["--key-groups", "20-50"]));

    // Each by its name, before anything is printed.
    let refused = |command: &[&str], words: &str| {
        let refused = tidelog_with(command);
        fails(&refused, 1, &[words]);
        assert_eq!(stdout(&refused), "");
    };
    for command in [&["read"][..], &["compact", &bucket]] {
        refused(&[command, &["--key-groups", "0-127", &low, &high]].concat(), "for key groups 40-63");
    }
    for command in [&["read"][..], &["compact", &bucket]] {
        refused(&[command, &[&low, &some, &high]].concat(), "of key groups 20-39");
        refused(&[command, &[&old, &high]].concat(), "of key groups 64-127");
    }
}

#[test]
fn what_cannot_be_compacted_is_said() {
    let home = Home::new();
    let nothing = home.put("nothing", "");
    for plan in [&[][..], &["--plan"]] {
        let bucket = home.bucket();
        let command = [&["compact", &*bucket, &*nothing], plan].concat();
        fails(&tidelog_with(&command), 2, &["nothing", "no handle to compact"]);
    }
    let handles = home.keep("handles", &succeeds(home.write(&[], "a record\n")));
    let bucket = home.bucket();
    fails(&tidelog_with(&["compact", &bucket]), 2, &["HANDLES"]);
    fails(
        &tidelog_with(&["compact", &bucket, &handles, &handles]),
        1,
        &["both hold the changes from 0 to 1"],
    );
    fails(&tidelog_with(&["compact", &bucket, &handles, "--part-bytes", "1"]), 2, &["part_bytes"]);
    fails(&tidelog_with(&["compact", "file:///no/such/bucket", &handles]), 1, &["there is no directory"]);
    // As read refuses them.
    let elsewhere = ["--key-groups", "200-300"];
    for command in [&["compact", &bucket][..], &["compact", &bucket, "--plan"], &["read"]] {
        let refused = tidelog_with(&[command, &[&*handles], &elsewhere].concat());
        fails(&refused, 1, &["no handle is for key groups 200-300"]);
        assert_eq!(stdout(&refused), "");
    }
    fs::remove_dir_all(home.path("bucket").join("tidelog")).unwrap();
    fails(&tidelog_with(&["compact", &bucket, &handles]), 1, &["no such object"]);
}

/// What was made is named by handles that somebody has, or else by an error.
#[test]
fn new_objects_are_never_left_without_a_word() {
    let home = Home::new();
    let old = home.keep("old", &succeeds(home.write(&[], "one\ntwo\n")));
    let (bucket, folder) = (home.bucket(), home.path("bucket/compact"));
    let compact = |more: &[&str]| {
        let mut command = tidelog();
        command.args(["compact", &bucket, &old, "--group", "compact"]).args(more);
        command
    };
    let full = || OpenOptions::new().write(true).open("/dev/full").unwrap();
    let made = || files_below(&folder).pop().unwrap().file_name().unwrap().to_str().unwrap().to_owned();

    let failed = compact(&[]).stdout(full()).output().unwrap();
    let named = format!("compact/{} in {bucket}", made());
    fails(&failed, 1, &["cannot write the output", &named, "tidelog sweep"]);
    fs::remove_dir_all(&folder).unwrap();
    let failed = compact(&["--handles", "/dev/full"]).output().unwrap();
    let named = format!("compact/{} in {bucket}", made());
    fails(&failed, 1, &["cannot append to /dev/full", &named]);
    assert_eq!(stdout(&failed), "");
    fs::remove_dir_all(&folder).unwrap();
    // Nobody reads.
    let mut closed = compact(&[])
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    drop(closed.stdout.take());
    let failed = closed.wait_with_output().unwrap();
    fails(&failed, 1, &[&format!("compact/{} in {bucket}", made())]);

    // Whoever has the file has the handles.
    let new = home.text("new");
    let failed = compact(&["--handles", &new]).stdout(full()).output().unwrap();
    fails(&failed, 1, &["the file has the new handles"]);
    let records = |handles: &str| stdout(&succeeds(tidelog_with(&["read", handles])));
    assert_eq!(records(&new), records(&old));
    let before = files_below(&folder);
    fails(&compact(&["--handles", &new]).output().unwrap(), 2, &["new or empty"]);
    assert_eq!(files_below(&folder), before, "nothing was made");
    let other = home.text("other");
    let done = succeeds(compact(&["--handles", &other]).output().unwrap());
    assert_eq!(stdout(&done), fs::read_to_string(&other).unwrap());
}
