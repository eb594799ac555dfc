//! `compact`: the same records from fewer objects.

mod common;

use common::{Home, fails, files_below, flights, stderr, stdout, succeeds, tidelog_with};

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

#[test]
fn what_cannot_be_compacted_is_said() {
    let home = Home::new();
    let handles = home.keep("handles", &succeeds(home.write(&[], "a record\n")));
    let bucket = home.bucket();
    fails(&tidelog_with(&["compact", &bucket]), 2, &["HANDLES"]);
    fails(&tidelog_with(&["compact", &bucket, &handles, &handles]), 2, &["do not follow each other"]);
    fails(&tidelog_with(&["compact", &bucket, &handles, "--part-bytes", "1"]), 2, &["part_bytes"]);
    fails(&tidelog_with(&["compact", "file:///no/such/bucket", &handles]), 1, &["no such directory"]);
    std::fs::remove_dir_all(home.path("bucket").join("tidelog")).unwrap();
    fails(&tidelog_with(&["compact", &bucket, &handles]), 1, &["no such object"]);
}
