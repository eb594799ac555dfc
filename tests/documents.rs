//! What the documents say of tests, examples, options and each other is so.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use tidelog::{HedgeOptions, Options, UploadOptions};

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
    for folder in ["src", "tests", "upload/src", "upload/tests", "io/src", "io/tests"] {
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

fn read(path: &str) -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(path)).unwrap()
}

/// The texts between ```` ```language ```` and ```` ``` ````.
fn fenced<'a>(text: &'a str, language: &str) -> Vec<&'a str> {
    let open = format!("```{language}\n");
    text.split(&open).skip(1).map(|rest| rest.split_once("\n```").expect("it ends").0).collect()
}

/// Whether the lines stand in `text` one after another, all of them indented by so much more.
fn has_lines(text: &str, wanted: &str) -> bool {
    let (text, wanted): (Vec<&str>, Vec<&str>) = (text.lines().collect(), wanted.lines().collect());
    text.windows(wanted.len()).any(|found| {
        let indent = found[0].len() - found[0].trim_start().len();
        found.iter().zip(&wanted).all(|(found, wanted)| {
            found.strip_prefix(&*" ".repeat(indent)).unwrap_or(found.trim_start()) == *wanted
        })
    })
}

#[test]
fn what_the_guide_quotes_stands_in_an_example_that_is_run() {
    let tests = read("tests/examples.rs");
    let examples = ["embed_threads", "embed_tokio", "embed_thread_per_core"];
    let texts = examples.map(|name| {
        let path = format!("examples/{name}.rs");
        assert!(tests.contains(&path), "{path} is not run by a test");
        read(&path)
    });
    let guide = read("docs/guide.md");
    let excerpts = fenced(&guide, "rust");
    assert!(excerpts.len() >= 10, "{} excerpts: the guide is not where it was", excerpts.len());
    for excerpt in excerpts {
        assert!(texts.iter().any(|text| has_lines(text, excerpt)), "no example has these lines:\n{excerpt}");
    }
}

#[test]
fn links_between_the_documents_lead_somewhere() {
    let anchors = |text: &str| -> BTreeSet<String> {
        let headings = text.lines().filter(|line| line.starts_with('#'));
        let anchor = |heading: &str| -> String {
            let kept = |c: &char| c.is_alphanumeric() || matches!(c, ' ' | '-');
            let heading = heading.trim_start_matches('#').trim().to_lowercase();
            heading.chars().filter(kept).map(|c| if c == ' ' { '-' } else { c }).collect()
        };
        headings.map(anchor).collect()
    };
    for page in ["docs/guide.md", "docs/operations.md", "docs/verbs.md", "docs/format.md", "docs/metrics.md"]
    {
        let text = read(page);
        for link in text.split("](").skip(1).filter_map(|rest| rest.split_once(')')).map(|(link, _)| link) {
            if link.starts_with("https://") {
                continue;
            }
            let (path, anchor) = link.split_once('#').unwrap_or((link, ""));
            let path = if path.is_empty() { page.to_owned() } else { format!("docs/{path}") };
            let target = Path::new(env!("CARGO_MANIFEST_DIR")).join(&path);
            assert!(target.exists(), "{page}: {link}");
            assert!(anchor.is_empty() || anchors(&read(&path)).contains(anchor), "{page}: {link}");
        }
    }
}

/// The rows of the table behind a heading, by their first cell without backticks: the second cell.
fn rows<'a>(text: &'a str, heading: &str) -> BTreeMap<&'a str, &'a str> {
    let (_, rest) = text.split_once(heading).expect("the heading is there");
    let section = rest.split("\n#").next().unwrap();
    let cells = section.lines().filter_map(|line| line.strip_prefix("| `")?.split_once("` | "));
    let rows: Vec<_> = cells.map(|(name, rest)| (name, rest.split_once(" | ").unwrap().0)).collect();
    let unique: BTreeMap<_, _> = rows.iter().copied().collect();
    assert_eq!(unique.len(), rows.len(), "a row is there twice below {heading}");
    unique
}

/// A number with its unit, in bytes or seconds.
fn quantity(text: &str) -> Option<f64> {
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let scale = match unit.trim() {
        "" | "s" => 1.0,
        "ms" => 1e-3,
        "MB" => 1e6,
        "KiB" => 1024.0,
        "MiB" => 1_048_576.0,
        "GiB" => 1_073_741_824.0,
        _ => return None,
    };
    Some(number.parse::<f64>().ok()? * scale)
}

/// Holds the defaults in rows against a value as `{:#?}` shows it. Fields of fields have rows of their own.
fn compare_defaults(rows: &BTreeMap<&str, &str>, shown: &str) {
    let mut compared = 0;
    for line in shown.lines().filter_map(|line| line.strip_prefix("    ")) {
        let Some((name, value)) = line.split_once(": ") else { continue };
        let (Some(row), Some(value)) = (rows.get(name), value.strip_suffix(',')) else { continue };
        match (quantity(row), quantity(value)) {
            (Some(row), Some(value)) => {
                assert!(
                    (row - value).abs() <= 1e-3 * value,
                    "{name}: {row} in the table, {value} in the code"
                );
            }
            _ => assert_eq!(row.trim_matches('`'), value, "{name}"),
        }
        compared += 1;
    }
    assert!(compared >= 9, "only {compared} defaults were found");
}

#[test]
fn the_table_of_options_has_every_option_and_its_default() {
    let operations = read("docs/operations.md");
    let changelog = rows(&operations, "### The changelog");
    let source = read("src/options.rs");
    let builders = source.split("    pub fn ").skip(1).filter_map(|item| item.split_once("(mut self"));
    let builders = builders.map(|(name, _)| name).filter(|name| !name.contains('('));
    assert_eq!(changelog.keys().copied().collect::<BTreeSet<_>>(), builders.collect());
    compare_defaults(&changelog, &format!("{:#?}", Options::new("memory://", "/d")));

    let uploads = rows(&operations, "### Uploads");
    let source = read("upload/src/options.rs");
    let fields = source.lines().filter_map(|line| line.strip_prefix("    pub ")?.split_once(": "));
    let fields: BTreeSet<_> = fields.map(|(name, _)| name).collect();
    assert_eq!(uploads.keys().copied().collect::<BTreeSet<_>>(), fields);
    compare_defaults(&uploads, &format!("{:#?}", UploadOptions::default()));
    compare_defaults(&uploads, &format!("{:#?}", HedgeOptions::default()));
}

#[test]
fn the_table_of_keys_of_a_url_has_every_key_that_is_read() {
    let operations = read("docs/operations.md");
    let heading = "### Its URL, and the environment";
    let table = rows(&operations, heading);
    let source = read("upload/src/s3/address.rs");
    let (_, arms) = source.split_once("        match key {\n").expect("keys are read by one match");
    let (arms, _) = arms.split_once("_ if looks_secret").unwrap();
    let keys = arms.lines().filter_map(|line| line.strip_prefix("            \"")?.split_once("\" =>"));
    let keys: BTreeSet<&str> = keys.map(|(key, _)| key).collect();
    let documented = table.keys().copied().filter(|key| !key.contains("://"));
    assert_eq!(documented.collect::<BTreeSet<_>>(), keys);
    // Whoever opens a bucket by itself has the same keys.
    let open = read("upload/src/open.rs");
    for key in keys {
        assert!(open.contains(&format!("`{key}`")), "open_store does not tell of {key}");
    }
    let kinds: BTreeSet<&str> = table.keys().filter_map(|url| Some(url.split_once("://")?.0)).collect();
    let known = tidelog_upload::SUPPORTED_SCHEMES.split(", ").filter_map(|url| url.split_once("://"));
    let known = known.map(|(kind, _)| kind).filter(|kind| *kind != "memory");
    assert_eq!(kinds, known.collect());
    let section = operations.split_once(heading).unwrap().1.split("\n#").next().unwrap();
    for variable in read("upload/src/s3.rs").split("variable(\"").skip(1) {
        let variable = variable.split_once('"').unwrap().0;
        assert!(section.contains(&format!("`{variable}`")), "{variable} is read, and not told of");
    }
}

#[test]
#[cfg(feature = "s3")]
fn the_buckets_of_the_commands_that_are_shown_can_be_opened() {
    let mut opened = 0;
    for page in ["README.md", "docs/operations.md", "docs/guide.md"] {
        for command in fenced(&read(page), "sh") {
            let words = command.split_whitespace().map(|word| word.trim_matches('\''));
            for url in words.filter(|word| word.starts_with("s3://")) {
                tidelog_upload::open_store(url).unwrap_or_else(|error| panic!("{page}: {error}"));
                opened += 1;
            }
        }
    }
    assert!(opened >= 5, "only {opened} buckets were found");
}

#[test]
fn what_is_true_after_an_error_is_told_of_each_that_a_persist_or_a_holder_may_get() {
    let verbs = read("docs/verbs.md");
    let (_, section) = verbs.split_once("## After an error").unwrap();
    let mut told = BTreeSet::new();
    for row in section.lines().take_while(|line| !line.starts_with('#')) {
        let Some((cell, _)) = row.strip_prefix("| `").and_then(|row| row.split_once(" | ")) else { continue };
        // `Type::One`, `Another`: of the same type.
        let mut of = "";
        for name in cell.trim_end_matches('`').split("`, `") {
            let name = match name.split_once("::") {
                Some((named, name)) => {
                    of = named;
                    name
                }
                None => name,
            };
            told.insert(format!("{of}::{name}"));
        }
    }
    let source = read("src/error.rs");
    for of in ["PersistError", "RegisterError"] {
        let (_, variants) = source.split_once(&format!("pub enum {of} {{\n")).unwrap();
        let (variants, _) = variants.split_once("\n}").unwrap();
        let names = variants.lines().filter_map(|line| line.strip_prefix("    "));
        let names = names.filter(|line| line.starts_with(|first: char| first.is_ascii_uppercase()));
        let names: Vec<_> = names.map(|line| line.split([' ', '(', ',']).next().unwrap()).collect();
        assert!(names.len() >= 8, "{names:?}");
        // These two say all there is.
        for name in names.into_iter().filter(|name| !["Forked", "Closed"].contains(name)) {
            assert!(told.contains(&format!("{of}::{name}")), "docs/verbs.md does not tell of {of}::{name}");
        }
    }
}

#[test]
fn the_policy_allows_every_request_that_is_sent_and_no_more() {
    let operations = read("docs/operations.md");
    let json: Vec<serde_json::Value> =
        fenced(&operations, "json").into_iter().map(|text| serde_json::from_str(text).unwrap()).collect();
    let statements = json[0]["Statement"].as_array().unwrap();
    let allowed = statements.iter().flat_map(|statement| statement["Action"].as_array().unwrap());
    let allowed: BTreeSet<&str> = allowed.map(|action| action.as_str().unwrap()).collect();
    let source = read("upload/src/s3.rs");
    let code = source.lines().filter(|line| !line.trim_start().starts_with("//"));
    let source: String = code.flat_map(str::split_whitespace).collect();
    let requests = source.split("client.").skip(1).filter_map(|rest| rest.split_once("()"));
    let needed = requests.map(|(request, _)| match request {
        // What is copied is read by s3:GetObject, too, as all objects are.
        "put_object"
        | "create_multipart_upload"
        | "upload_part"
        | "upload_part_copy"
        | "complete_multipart_upload" => "s3:PutObject",
        "get_object" | "head_object" => "s3:GetObject",
        "delete_object" => "s3:DeleteObject",
        "abort_multipart_upload" => "s3:AbortMultipartUpload",
        "list_parts" => "s3:ListMultipartUploadParts",
        "list_objects_v2" => "s3:ListBucket",
        "list_multipart_uploads" => "s3:ListBucketMultipartUploads",
        other => {
            panic!("which action {other} needs is not known here, and perhaps not in docs/operations.md")
        }
    });
    assert_eq!(allowed, needed.collect());
    assert_eq!(json.len(), 2);
    assert!(json[1]["Rules"][0]["AbortIncompleteMultipartUpload"]["DaysAfterInitiation"].as_u64() > Some(1));
}

/// A bare `cargo run` has several programs to choose from: the package of the tool says which.
#[test]
fn the_first_command_of_the_readme_runs_the_tool() {
    assert!(read("README.md").contains("```sh\ncargo run --release\n```"));
    let metadata = std::process::Command::new(env!("CARGO"))
        .args(["metadata", "--no-deps", "--offline", "--format-version", "1"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .unwrap();
    let metadata: serde_json::Value = serde_json::from_slice(&metadata.stdout).unwrap();
    let packages = metadata["packages"].as_array().unwrap();
    let default_runs: Vec<&str> =
        packages.iter().filter_map(|package| package["default_run"].as_str()).collect();
    assert_eq!(default_runs, ["tidelog"]);
}
