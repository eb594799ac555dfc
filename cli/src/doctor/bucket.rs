//! What `doctor` finds of a bucket, by using it: small objects, one in parts, reads, listings, deletions.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tidelog_upload::bucket::BucketIndex;
use tidelog_upload::multipart::Placement;
use tidelog_upload::{
    Capabilities, Driver, HedgeOptions, Parts, Pending, Runtime, Store, StoreError, UploadOptions, channel,
    open_or_create_store,
};

use super::Finding;
use crate::show;

const ONLY: BucketIndex = BucketIndex(0);
/// Small objects written to see how long that takes.
const PUTS: usize = 5;
/// How long each thing may take, retries included.
const WAIT_MAX: Duration = Duration::from_secs(10);
/// What a small PUT takes in the model that the defaults of hedging come from, and a little more.
const PUT_EXPECTED: Duration = Duration::from_millis(250);
const BODY: &[u8] = b"written by tidelog doctor, which deletes it again\n";

/// Uses the bucket at `url`, with names under `group`, and deletes what it wrote, folders included.
pub fn check(url: &str, group: &str) -> Vec<Finding> {
    let fresh = tidelog_upload::bucket_directory(url)
        .map_or(Vec::new(), |bucket| missing_folders(&bucket.join(group)));
    let findings = use_bucket(url, group);
    for folder in fresh {
        // Only if it is empty: somebody may have begun to use it.
        if std::fs::remove_dir(folder).is_err() {
            break;
        }
    }
    findings
}

/// The folders that are not there, of one and those above it; the deepest first.
fn missing_folders(folder: &Path) -> Vec<PathBuf> {
    folder.ancestors().take_while(|folder| !folder.exists()).map(Path::to_owned).collect()
}

fn use_bucket(url: &str, group: &str) -> Vec<Finding> {
    let store = match open_or_create_store(url) {
        Ok(store) => store,
        Err(error) => return vec![failed("bucket", &error)],
    };
    let mut findings = vec![judge_capabilities(store.url(), store.capabilities())];
    // Unique, so that nobody else's object is touched.
    let nanos = std::time::UNIX_EPOCH.elapsed().map_or(0, |time| time.as_nanos());
    let prefix = format!("{group}/doctor-{}-{nanos:x}", std::process::id());
    let outcome = Trial::start(&store, &prefix).and_then(|trial| trial.run(&mut findings));
    if let Err(finding) = outcome {
        findings.push(*finding);
    }
    findings
}

/// Which row of capabilities applies, in words.
fn judge_capabilities(url: &str, row: &Capabilities) -> Finding {
    const CHECK: &str = "bucket takes";
    let yes = |holds: bool, what: &str| if holds { what.to_owned() } else { format!("no {what}") };
    match row.parts {
        Parts::Parallel => {
            let sizes = match row.equal_parts {
                true => "of equal size",
                false => "of any size",
            };
            let found = format!(
                "{url}: parts {sizes} from {} on, {} at most; {}; {}; {}",
                show::bytes(row.part_bytes_min),
                show::count(u64::from(row.parts_max)),
                yes(row.sparse, "gaps between part numbers"),
                yes(row.list_uploads, "listing of uploads"),
                yes(row.conditional_put, "conditional writes"),
            );
            if row.list_uploads {
                return Finding::ok(CHECK, found);
            }
            Finding::warn(
                CHECK,
                found,
                "unfinished uploads cannot be found here: let the bucket remove incomplete uploads by a rule of its own",
            )
        }
        Parts::Sequential => {
            Finding::ok(CHECK, format!("{url}: one writer and a rename: objects race as a whole"))
        }
        Parts::None => {
            Finding::ok(CHECK, format!("{url}: one request for each object: objects race as a whole"))
        }
    }
}

fn failed(check: &'static str, error: &StoreError) -> Finding {
    Finding::bad(check, error.to_string(), "mend that, and ask again")
}

/// The objects of one look at a bucket. What is there at its end is deleted.
struct Trial {
    /// Sends small objects in one request.
    small: Driver,
    /// Sends everything in parts.
    parts: Driver,
    prefix: String,
    has_parts: bool,
}

type Step<T> = Result<T, Box<Finding>>;

impl Trial {
    fn start(store: &Arc<dyn Store>, prefix: &str) -> Step<Trial> {
        let driver = |put_bytes_max: Option<u64>| {
            let mut options = UploadOptions::default();
            options.hedging = HedgeOptions::off();
            options.object_timeout = WAIT_MAX;
            options.put_bytes_max = put_bytes_max.unwrap_or(options.put_bytes_max);
            Driver::start(vec![Arc::clone(store)], Runtime::Own { threads: 1 }, options).map_err(|error| {
                Box::new(Finding::bad("bucket", error.to_string(), "mend that, and ask again"))
            })
        };
        let has_parts = store.capabilities().parts == Parts::Parallel;
        Ok(Trial { small: driver(None)?, parts: driver(Some(0))?, prefix: prefix.to_owned(), has_parts })
    }

    fn run(&self, findings: &mut Vec<Finding>) -> Step<()> {
        let outcome = self.write_and_read(findings);
        // Also after a failure: a request that was answered too late may have written all the same.
        let (resolver, swept) = channel();
        self.small.sweep(&self.prefix, &[], move |outcome| resolver.resolve(outcome));
        let left = wait("bucket delete", swept).and_then(|()| {
            let names = self.names()?;
            if names.is_empty() {
                return Ok(());
            }
            let advice = "delete them by hand; tidelog would leave objects behind as well";
            Err(Box::new(Finding::bad(
                "bucket delete",
                format!("{} are still listed", names.join(", ")),
                advice,
            )))
        });
        outcome?;
        left?;
        findings.push(Finding::ok("bucket delete", "nothing is left of it"));
        Ok(())
    }

    fn write_and_read(&self, findings: &mut Vec<Finding>) -> Step<()> {
        let mut took = Vec::new();
        let mut names = Vec::new();
        for number in 0..PUTS {
            names.push(format!("{}.{number}", self.prefix));
            let started = Instant::now();
            self.write(&self.small, "bucket put", &names[number])?;
            took.push(started.elapsed());
        }
        findings.push(judge_puts(took));
        if self.has_parts {
            names.push(format!("{}.parts", self.prefix));
            let started = Instant::now();
            self.write(&self.parts, "bucket multipart", &names[PUTS])?;
            let took = show::duration(started.elapsed());
            findings.push(Finding::ok("bucket multipart", format!("create, part and complete took {took}")));
        }
        let started = Instant::now();
        for name in &names {
            let (resolver, read) = channel();
            self.small.get(ONLY, name, 0..BODY.len() as u64, move |outcome| resolver.resolve(outcome));
            if wait("bucket get", read)? != BODY {
                let found = format!("{name} is not what was written");
                return Err(Box::new(Finding::bad(
                    "bucket get",
                    found,
                    "something on the way changes objects",
                )));
            }
        }
        let each = show::duration(started.elapsed() / names.len() as u32);
        findings.push(Finding::ok("bucket get", format!("what was written came back, each in {each}")));
        let listed = self.names()?;
        if listed != names {
            let found = format!("{} of {} objects are listed", listed.len(), names.len());
            return Err(Box::new(Finding::bad(
                "bucket list",
                found,
                "leftovers could not be found in such a bucket",
            )));
        }
        findings.push(Finding::ok("bucket list", "all that was written is listed at once"));
        Ok(())
    }

    fn write(&self, driver: &Driver, check: &'static str, name: &str) -> Step<Placement> {
        let (resolver, placed) = channel();
        let upload = driver.upload(name, None);
        upload.finish(vec![BODY.into()], move |outcome| resolver.resolve(outcome), |_| {});
        wait(check, placed)
    }

    fn names(&self) -> Step<Vec<String>> {
        let (resolver, listed) = channel();
        self.small.list(ONLY, &self.prefix, move |outcome| resolver.resolve(outcome));
        Ok(wait("bucket list", listed)?.into_iter().map(|object| object.name).collect())
    }
}

fn wait<T>(check: &'static str, pending: Pending<Result<T, StoreError>>) -> Step<T> {
    match pending.wait() {
        Ok(outcome) => outcome.map_err(|error| Box::new(failed(check, &error))),
        Err(error) => Err(Box::new(Finding::bad(check, error.to_string(), "ask again"))),
    }
}

fn judge_puts(mut took: Vec<Duration>) -> Finding {
    took.sort_unstable();
    let (median, most) = (took[took.len() / 2], took[took.len() - 1]);
    let found = format!(
        "a small PUT took {}, {} at most of {}",
        show::duration(median),
        show::duration(most),
        took.len()
    );
    if median <= PUT_EXPECTED {
        return Finding::ok("bucket put", found);
    }
    Finding::warn(
        "bucket put",
        found,
        "the smallest checkpoint takes as long: use a bucket in this region, and see what is between here and there",
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::Grade;

    #[test]
    fn a_bucket_is_used_and_left_as_it_was() {
        let dir = tempfile::tempdir().unwrap();
        for url in ["memory://".to_owned(), format!("file://{}", dir.path().display())] {
            let findings = check(&url, "orders");
            assert!(findings.iter().all(|finding| finding.grade != Grade::Bad), "{findings:?}");
            let has = |check| findings.iter().any(|finding| finding.check == check);
            assert!(has("bucket put") && has("bucket get") && has("bucket list") && has("bucket delete"));
        }
        let left = || std::fs::read_dir(dir.path()).unwrap().count();
        assert_eq!(left(), 0);
        check(&format!("file://{}/not/yet%20there", dir.path().display()), "orders");
        assert_eq!(left(), 0);
        // What was there stays.
        std::fs::create_dir(dir.path().join("orders")).unwrap();
        check(&format!("file://{}", dir.path().display()), "orders");
        assert_eq!(left(), 1);
    }

    #[test]
    fn what_is_wrong_with_a_bucket_is_said() {
        let findings = check("ftp://host/", "orders");
        assert_eq!(findings.len(), 1);
        assert!(findings[0].grade == Grade::Bad && findings[0].found.contains("ftp"), "{findings:?}");
    }

    #[test]
    fn slow_puts_are_a_warning() {
        let puts = |millis: [u64; 3]| judge_puts(millis.map(Duration::from_millis).to_vec()).grade;
        assert_eq!(puts([10, 20, 900]), Grade::Ok);
        assert_eq!(puts([10, 300, 900]), Grade::Warn);
    }
}
