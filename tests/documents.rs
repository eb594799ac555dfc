//! What the documents say of the tests is so.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// The names of all test functions below a folder.
fn collect_tests(folder: &Path, found: &mut BTreeSet<String>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            collect_tests(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = fs::read_to_string(&path).unwrap();
            for item in text.split("#[test]").skip(1) {
                let name = item.split_once("fn ").and_then(|(_, rest)| rest.split_once('('));
                found.insert(name.expect("a test is a function").0.to_owned());
            }
        }
    }
}

#[test]
fn each_failure_of_the_table_names_tests_that_exist() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut tests = BTreeSet::new();
    for folder in ["src", "tests", "upload/src", "upload/tests"] {
        collect_tests(&root.join(folder), &mut tests);
    }
    let table = fs::read_to_string(root.join("docs/failures.md")).unwrap();
    let mut rows = 0;
    for row in table.lines().filter(|line| line.starts_with("| ") && !line.starts_with("| what happened")) {
        let cell = row.trim_end_matches(['|', ' ']).rsplit('|').next().unwrap();
        // Every other piece is between two backticks.
        let named: Vec<_> = cell.split('`').skip(1).step_by(2).collect();
        assert!(!named.is_empty(), "no test is named: {row}");
        for name in named {
            assert!(tests.contains(name), "there is no test {name}: {row}");
        }
        rows += 1;
    }
    assert!(rows > 40, "{rows} rows: the table is not where it was");
}
