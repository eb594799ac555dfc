//! `inspect` shows what is there; `verify` finds every damage and says where.

mod common;

use common::{Home, fails, flights, stderr, stdout, succeeds, tidelog_with};

/// A directory, handles and objects of some flights, closed in good order.
fn home() -> (Home, String) {
    let home = Home::new();
    let input = flights()[..2000].join("\n");
    let output =
        succeeds(home.write(&["--key", "field:12", "--separator", ",", "--sync-every", "500"], input));
    let handles = home.keep("handles", &output);
    (home, handles)
}

fn json(args: &[&str]) -> serde_json::Value {
    serde_json::from_slice(&succeeds(tidelog_with(args)).stdout).unwrap()
}

#[test]
fn every_kind_is_shown() {
    let (home, handles) = home();
    let local = home.text("local");
    let object = home.only_file("bucket").display().to_string();
    let report = json(&["inspect", "--json", &local, &handles, &object]);
    let of_kind = |kind: &str| report.as_array().unwrap().iter().find(|one| one["kind"] == kind).unwrap();
    assert_eq!(of_kind("local directory")["logs"][0]["to"], 2000);
    assert_eq!(of_kind("manifest")["logs"][0]["confirmed"], 2000);
    assert_eq!(of_kind("segment")["logs"][0]["changes"], 2000);
    let value_bytes: usize = flights()[..2000].iter().map(|record| record.len()).sum();
    assert_eq!(of_kind("segment")["logs"][0]["value_bytes"], value_bytes);
    assert_eq!(of_kind("handle")["numbers"], 2000);
    assert_eq!(of_kind("object")["logs"][0]["to"], 2000);
    let text = stdout(&succeeds(tidelog_with(&["inspect", &local, &handles, &object])));
    for part in ["local directory", "LogCreated", "epoch", "extents", "2,000"] {
        assert!(text.contains(part), "{part} is not in: {text}");
    }
    let name = format!("tidelog/{}", home.only_file("bucket").file_name().unwrap().to_str().unwrap());
    let in_bucket = json(&["inspect", "--json", "--bucket", &home.bucket(), &name]);
    assert_eq!(in_bucket[0]["token"], of_kind("object")["token"]);
    let verdict = json(&["verify", "--json", &local, &handles, &object]);
    assert_eq!(verdict["intact"], true);
    assert!(verdict["verified"].as_array().unwrap().iter().any(|one| one["kind"] == "object"));
}

#[test]
fn a_bucket_is_not_taken_for_a_local_directory() {
    let (home, _) = home();
    for command in ["inspect", "verify"] {
        fails(
            &tidelog_with(&[command, &home.text("bucket")]),
            2,
            &["no local directory", "give the handles"],
        );
    }
}

/// Bits and lengths over a whole file, some hundred of each kind.
fn damages(len: usize) -> impl Iterator<Item = (usize, u8)> {
    (0..len).step_by((len / 150).max(1)).map(|at| (at, 1 << (at % 8)))
}

#[test]
fn every_damage_of_an_object_is_found() {
    let (home, handles) = home();
    let object = home.only_file("bucket");
    let path = object.display().to_string();
    let good = std::fs::read(&object).unwrap();
    for (at, bit) in damages(good.len()) {
        let mut bad = good.clone();
        bad[at] ^= bit;
        std::fs::write(&object, &bad).unwrap();
        let output = tidelog_with(&["verify", &path]);
        fails(&output, 3, &[&path, "damaged at byte"]);
        std::fs::write(&object, &good[..at]).unwrap();
        fails(&tidelog_with(&["verify", &path]), 3, &[&path, "cut short", "copy it again"]);
        // Where the path says nothing, what the handles say is looked at.
        fails(&tidelog_with(&["verify", &handles]), 3, &["DAMAGED", "it was cut short"]);
    }
    let nameless = home.put("nameless", &good[..good.len() - 1]);
    fails(
        &tidelog_with(&["verify", &nameless]),
        3,
        &["another program's, or an object", "verify the handles"],
    );
    std::fs::write(&object, &good).unwrap();
    succeeds(tidelog_with(&["verify", &handles, &path]));
    std::fs::remove_file(&object).unwrap();
    fails(&tidelog_with(&["verify", &handles]), 3, &["no such object"]);
    fails(&tidelog_with(&["verify", &home.text("local")]), 3, &["no such object"]);
}

#[test]
fn every_damage_of_a_sealed_segment_is_found() {
    let (home, _) = home();
    let local = home.text("local");
    let segment = home.path("local").join("segment-00000001");
    let path = segment.display().to_string();
    let good = std::fs::read(&segment).unwrap();
    let report = json(&["inspect", "--json", &path]);
    let used = report[0]["used_bytes"].as_u64().unwrap() as usize;
    let blocks = report[0]["blocks"].as_u64().unwrap();
    assert!(blocks > 1, "one block cannot show what stands before another");
    let listed = report[0]["blocks_listed"].as_array().unwrap();
    let last = listed[listed.len() - 1]["offset"].as_u64().unwrap() as usize;
    for (at, bit) in damages(used) {
        let mut bad = good.clone();
        bad[at] ^= bit;
        std::fs::write(&segment, &bad).unwrap();
        let output = tidelog_with(&["verify", &path]);
        // Without its magic the last block looks like what an earlier use of the file left.
        if !(last..last + 8).contains(&at) {
            let code = output.status.code();
            // A flipped bit in a version makes it a newer one.
            assert!(code == Some(3) || stderr(&output).contains("version"), "bit {bit} of byte {at}");
        }
        if at < last {
            let output = tidelog_with(&["verify", &local]);
            assert!(
                output.status.code() == Some(3) || stderr(&output).contains("version"),
                "bit {bit} of byte {at}"
            );
        }
    }
    std::fs::write(&segment, &good[..last + 1000]).unwrap();
    fails(&tidelog_with(&["verify", &path]), 3, &[&path, "damaged at byte"]);
    std::fs::write(&segment, &good).unwrap();
    succeeds(tidelog_with(&["verify", &path, &local]));
}

#[test]
fn missing_files_are_damage_and_the_rest_is_looked_at() {
    let (home, handles) = home();
    let local = home.text("local");
    let segment = home.path("local").join("segment-00000001");
    let bytes = std::fs::read(&segment).unwrap();
    std::fs::remove_file(&segment).unwrap();
    for command in ["verify", "inspect"] {
        let output = tidelog_with(&[command, &local, &handles]);
        fails(&output, 3, &["segment-00000001", "missing", "there is no such file", "put it back", &handles]);
    }
    let object = home.only_file("bucket").file_name().unwrap().to_str().unwrap().to_owned();
    fails(&tidelog_with(&["verify", &local]), 3, &[&object, "intact"]);
    std::fs::write(&segment, bytes).unwrap();
    std::fs::remove_file(home.path("local").join("MANIFEST")).unwrap();
    fails(&tidelog_with(&["verify", &local, &handles]), 3, &["no manifest", "segment-00000001", &handles]);
}

#[test]
fn every_damage_of_manifests_and_handles_is_found() {
    let (home, handles) = home();
    let manifest = home.path("local").join("MANIFEST").display().to_string();
    for path in [manifest, handles] {
        let good = std::fs::read(&path).unwrap();
        for (at, bit) in damages(good.len()) {
            let mut bad = good.clone();
            bad[at] ^= bit;
            std::fs::write(&path, &bad).unwrap();
            let output = tidelog_with(&["verify", &path]);
            let newer = output.status.code() == Some(1) && stderr(&output).contains("version");
            // The newline behind a handle is not part of it.
            let newline = good[at] == b'\n';
            assert!(newer || newline || output.status.code() == Some(3), "{path}, bit {bit} of byte {at}");
            if at > 0 && at + 1 < good.len() {
                std::fs::write(&path, &good[..at]).unwrap();
                fails(&tidelog_with(&["verify", &path]), 3, &[&path]);
            }
        }
        std::fs::write(&path, &good).unwrap();
        succeeds(tidelog_with(&["verify", &path]));
    }
}

#[test]
fn a_newer_version_is_no_damage() {
    let (home, handles) = home();
    let object = home.only_file("bucket");
    let mut bytes = std::fs::read(&object).unwrap();
    let version = bytes.len() - 24;
    bytes[version] = 3;
    std::fs::write(&object, &bytes).unwrap();
    for command in ["inspect", "verify"] {
        fails(&tidelog_with(&[command, &object.display().to_string()]), 1, &["version 3", "up to 2"]);
    }
    fails(&tidelog_with(&["verify", &handles]), 1, &["version 3"]);
    let segment = home.path("local").join("segment-00000001");
    let mut bytes = std::fs::read(&segment).unwrap();
    bytes[8] = 2;
    std::fs::write(&segment, &bytes).unwrap();
    fails(&tidelog_with(&["verify", &segment.display().to_string()]), 1, &["version 2"]);
    fails(&tidelog_with(&["verify", &home.text("local")]), 1, &["version 2"]);
}

#[test]
fn a_foreign_file_is_told() {
    let home = Home::new();
    let file = home.put("photo.png", b"\x89PNG\r\n\x1a\n");
    for command in ["inspect", "verify"] {
        fails(&tidelog_with(&[command, &file]), 3, &[&file, "another program's"]);
    }
}
