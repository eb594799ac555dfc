//! What is wrong is named, with what to do; what was good before it is kept.

mod common;

use std::process::Stdio;

use common::{Home, fails, sorted, stdout, succeeds, tidelog_with};

#[test]
fn a_bad_record_is_named_and_those_before_it_are_kept() {
    let home = Home::new();
    for (args, input, says) in [
        (
            &["--record-bytes-max", "5"][..],
            "a\nb\n123456\nc\n",
            &["record 3", "5 bytes", "--record-bytes-max"][..],
        ),
        (&["--key", "json:/k"], "{\"k\":1}\n{\"k\":2}\n{\"k\n", &["record 3", "not JSON", "--key"]),
        (&["--key", "json:/k"], "{\"k\":1}\n{\"k\":2}\n{\"l\":1}\n", &["record 3", "\"/k\"", "--key"]),
        (&["--key", "field:2", "--separator", ","], "a,b\nc,d\ne\n", &["record 3", "1 fields", "field 2"]),
        (&["--key-groups", "81"], "a\na\nuser-1\n", &["record 3", "key group 121", "--key-groups 81-81"]),
        (
            &["--framing", "length-prefixed"],
            "\x01\0\0\0a\x01\0\0\0b\x09\0\0\0c",
            &["record 3", "8 bytes are missing"],
        ),
    ] {
        let output = home.write(args, input);
        fails(&output, 1, says);
        fails(&output, 1, &["standard input", "2 records"]);
        let handles = home.keep("handles", &output);
        let read = succeeds(tidelog_with(&["read", &handles]));
        assert_eq!(stdout(&read).lines().count(), 2, "{args:?}");
    }
}

#[test]
fn an_input_without_a_good_record_gives_no_handle() {
    let home = Home::new();
    let output = home.write(&["--record-bytes-max", "5"], "123456\n");
    fails(&output, 1, &["record 1", "0 records"]);
    assert_eq!(stdout(&output), "");
}

#[test]
fn a_missing_input_is_named() {
    let home = Home::new();
    let good = home.put("good", "a\n");
    for missing in ["/no/such/file", "/proc"] {
        let output = home.write(&["--handles", &home.text("handles"), &good, missing], "");
        fails(&output, 1, &[&format!("cannot open {missing}")]);
        assert_eq!(stdout(&output), "");
        assert!(!home.path("local").exists() && !home.path("handles").exists(), "nothing is made");
    }
    fails(&tidelog_with(&["read", "/no/such/handles"]), 1, &["/no/such/handles"]);
    fails(&tidelog_with(&["inspect", "/no/such/thing"]), 1, &["/no/such/thing"]);
    fails(&tidelog_with(&["verify", "/no/such/thing"]), 1, &["/no/such/thing"]);
}

#[test]
fn a_directory_has_one_opener() {
    let home = Home::new();
    let mut command = home.write_command();
    let mut first = command
        .args(["--checkpoint-every", "1"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut pipe = first.stdin.take().unwrap();
    std::io::Write::write_all(&mut pipe, b"held\n").unwrap();
    // Its first handle proves that the first one is open.
    let mut line = String::new();
    std::io::BufRead::read_line(&mut std::io::BufReader::new(first.stdout.take().unwrap()), &mut line)
        .unwrap();
    let pid = first.id().to_string();
    let local = home.text("local");
    fails(&home.write(&[], "other\n"), 1, &[&local, "in use by process", &pid]);
    fails(&tidelog_with(&["read", "--dir", &local]), 1, &[&local, "in use by process", &pid]);
    fails(&tidelog_with(&["verify", &local]), 1, &[&local, "in use by process", &pid]);
    drop(pipe);
    assert!(first.wait().unwrap().success());
    assert_eq!(stdout(&succeeds(tidelog_with(&["read", "--dir", &local]))), "held\n");
}

#[test]
fn places_that_cannot_work_are_named() {
    let home = Home::new();
    let file = home.put("file", "");
    let bucket = home.bucket();
    let write = |args: &[&str]| common::run(common::tidelog().arg("write").args(args), "a\n");
    fails(&write(&["--bucket", &bucket, "--dir", &file]), 1, &[&file, "not a directory"]);
    for bucket in ["ftp://host/", "file://relative", "memory://", "/plain/path"] {
        fails(
            &write(&["--bucket", bucket, "--dir", &home.text("l")]),
            2,
            &[bucket, "file:///an/absolute/directory"],
        );
    }
    let small = ["--bucket", &bucket, "--dir", &home.text("l"), "--local-bytes", "1M"];
    fails(&write(&small), 2, &["local_bytes", "two segments"]);
    let twice = ["--bucket", &bucket, "--dir", &home.text("l"), "--dir", &home.text("l")];
    fails(&write(&twice), 2, &["each directory once"]);
    let bench = ["bench", "--bucket", &bucket, "--dir", &home.text("l"), "--segment-bytes", "1000"];
    fails(&tidelog_with(&bench), 2, &["segment_bytes", "multiple of 4096"]);
    assert!(!home.path("l").exists());
    fails(&tidelog_with(&["read", "--dir", &home.text("nothing")]), 1, &["nothing"]);
    fails(&tidelog_with(&["read", "--dir", &home.path("").display().to_string()]), 1, &["MANIFEST"]);
    assert!(!home.path("nothing").exists());
}

/// Root may read everything, so this one shows something only to other users.
#[test]
fn an_unreadable_directory_is_named() {
    use std::os::unix::fs::PermissionsExt;
    let home = Home::new();
    let local = home.text("local");
    std::fs::create_dir(&local).unwrap();
    std::fs::set_permissions(&local, std::fs::Permissions::from_mode(0o0)).unwrap();
    if std::fs::read_dir(&local).is_ok() {
        eprintln!("this user may read everything: not checked");
        return;
    }
    fails(&home.write(&[], "a\n"), 1, &[&local, "permission"]);
}

#[test]
fn files_of_others_and_of_later_versions_are_told_apart() {
    let home = Home::new();
    let good = stdout(&succeeds(home.write(&[], "a\n")));
    for (text, says) in [
        ("PK\x03\x04", "not a tidelog handle"),
        (&good[..good.len() / 2], "cut off"),
        (&good.replace("records", "recorbs"), "checksum"),
        (&good.replace("\"version\":1", "\"version\":9"), "version 9"),
        (&(good.clone() + "{}\n"), "line 2: this is not a tidelog handle"),
    ] {
        let handles = home.put("handles", text);
        fails(&tidelog_with(&["read", &handles]), 1, &[&handles, says]);
        // A file that may be somebody's is not appended to.
        if says.contains("not a tidelog") {
            fails(&home.write(&["--handles", &handles], "b\n"), 1, &[&handles]);
            assert_eq!(std::fs::read_to_string(&handles).unwrap(), text);
        }
    }
    let manifest = home.path("local").join("MANIFEST");
    let bytes = std::fs::read(&manifest).unwrap();
    for (at, byte, says) in
        [(0, b'S', "is damaged at byte 0"), (8, 9, "version 9"), (30, bytes[30] ^ 1, "damaged")]
    {
        let mut bad = bytes.clone();
        bad[at] = byte;
        std::fs::write(&manifest, &bad).unwrap();
        fails(&home.write(&[], "b\n"), 1, &[&home.text("local"), says]);
        assert_eq!(std::fs::read(&manifest).unwrap(), bad, "a refused opening changes nothing");
    }
    std::fs::write(&manifest, [b"SQLite format 3", &bytes[15..]].concat()).unwrap();
    let says = ["another program's, or damaged", "move the directory aside"];
    fails(&home.write(&[], "b\n"), 1, &says);
    fails(&tidelog_with(&["verify", &home.text("local")]), 3, &says);
    std::fs::write(&manifest, &bytes).unwrap();
    succeeds(home.write(&[], "b\n"));
}

#[test]
fn an_unfinished_line_of_handles_is_cut_off() {
    let home = Home::new();
    let first = stdout(&succeeds(home.write(&[], "a\n")));
    let handles = home.put("handles", first.clone() + &first[..100]);
    let output = succeeds(home.write(&["--handles", &handles], "b\n"));
    assert_eq!(std::fs::read_to_string(&handles).unwrap(), first + &stdout(&output));
    assert_eq!(sorted(&stdout(&succeeds(tidelog_with(&["read", &handles])))), ["a", "b"]);
}

#[test]
fn objects_that_are_gone_or_damaged_are_named() {
    let home = Home::new();
    let handles = home.keep("handles", &succeeds(home.write(&[], "a\n")));
    let object = home.only_file("bucket");
    let name = object.file_name().unwrap().to_str().unwrap().to_owned();
    let bytes = std::fs::read(&object).unwrap();
    for at in [0, bytes.len() / 2, bytes.len() - 1] {
        let mut bad = bytes.clone();
        bad[at] ^= 0x10;
        std::fs::write(&object, bad).unwrap();
        let output = tidelog_with(&["read", &handles]);
        fails(&output, 1, &[&name]);
        assert_eq!(stdout(&output), "");
    }
    std::fs::write(&object, &bytes[..bytes.len() - 1]).unwrap();
    fails(&tidelog_with(&["read", &handles]), 1, &[&name]);
    std::fs::remove_file(&object).unwrap();
    fails(&tidelog_with(&["read", &handles]), 1, &[&name, "no such object"]);
    std::fs::remove_dir_all(home.path("bucket")).unwrap();
    fails(&tidelog_with(&["read", &handles]), 1, &["no such directory"]);
    assert!(!home.path("bucket").exists());
}
