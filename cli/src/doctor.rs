//! `tidelog doctor`: what this machine offers, how that is for tidelog, and what to change.
//!
//! Each check is a [`Finding`]; how they are judged is pure and tested. The directories' checks are in
//! `doctor/disk.rs`, the buckets' in `doctor/bucket.rs`.

mod bucket;
mod disk;

use std::fs;
use std::io::{self, Write};
use std::path::PathBuf;

use rustix::process::{Resource, getrlimit};
use serde_json::json;

use crate::{Failure, show};

/// Looks at this machine and says what to change for tidelog to run well.
///
/// Writes up to 64 MiB into each directory for a moment, and a few tiny objects into each bucket. Exit code 0 unless something
/// is bad, then 1.
#[derive(clap::Args, Debug)]
pub struct DoctorArgs {
    /// A directory meant for segments; give one for each disk.
    #[arg(long = "dir", value_name = "DIR", default_value = ".")]
    dirs: Vec<PathBuf>,
    /// A bucket meant for checkpoints; may be given more than once.
    #[arg(long = "bucket", value_name = "URL")]
    buckets: Vec<String>,
    /// The group under which tiny objects are written into the buckets.
    #[arg(long, default_value = "tidelog")]
    group: String,
    /// How long to measure each disk, in seconds; 0 measures nothing.
    #[arg(long, value_name = "SECONDS", default_value_t = 2, value_parser = clap::value_parser!(u64).range(0..=60))]
    seconds: u64,
    /// Prints JSON instead of a table.
    #[arg(long)]
    json: bool,
}

/// How something is for tidelog.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Grade {
    /// As it should be.
    Ok,
    /// tidelog works, slower or with less safety.
    Warn,
    /// tidelog does not work.
    Bad,
}

/// One thing looked at.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Finding {
    check: &'static str,
    /// The directory that it is about, if it is about one.
    dir: Option<String>,
    /// The bucket that it is about, if it is about one.
    bucket: Option<String>,
    grade: Grade,
    found: String,
    /// What to change; empty if nothing.
    advice: String,
}

impl Finding {
    fn new(
        grade: Grade,
        check: &'static str,
        found: impl Into<String>,
        advice: impl Into<String>,
    ) -> Finding {
        Finding { check, dir: None, bucket: None, grade, found: found.into(), advice: advice.into() }
    }

    fn ok(check: &'static str, found: impl Into<String>) -> Finding {
        Finding::new(Grade::Ok, check, found, "")
    }

    fn warn(check: &'static str, found: impl Into<String>, advice: impl Into<String>) -> Finding {
        Finding::new(Grade::Warn, check, found, advice)
    }

    fn bad(check: &'static str, found: impl Into<String>, advice: impl Into<String>) -> Finding {
        Finding::new(Grade::Bad, check, found, advice)
    }
}

pub fn run(args: DoctorArgs) -> Result<(), Failure> {
    let mut findings = vec![
        judge_kernel(&rustix::system::uname().release().to_string_lossy()),
        check_io_uring(),
        judge_memlock(getrlimit(Resource::Memlock).current),
        judge_huge_pages(fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled")),
    ];
    for dir in &args.dirs {
        let shown = dir.display().to_string();
        findings.extend(
            disk::check(dir, args.seconds)
                .into_iter()
                .map(|finding| Finding { dir: Some(shown.clone()), ..finding }),
        );
    }
    for url in &args.buckets {
        let findings_of = bucket::check(url, &args.group).into_iter();
        findings.extend(findings_of.map(|finding| Finding { bucket: Some(url.clone()), ..finding }));
    }
    let output = if args.json { render_json(&findings) } else { render_table(&findings) };
    io::stdout().lock().write_all(output.as_bytes())?;
    match findings.iter().filter(|finding| finding.grade == Grade::Bad).count() {
        0 => Ok(()),
        count => Err(Failure::new(format!("{count} of {} findings must be changed first", findings.len()))),
    }
}

fn judge_kernel(release: &str) -> Finding {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|digits| digits.parse::<u32>().ok());
    let version = numbers.next().flatten().zip(numbers.next().flatten());
    let found = format!("Linux {release}");
    match version {
        Some(version) if version >= (6, 1) => Finding::ok("kernel", found),
        Some(version) if version >= (4, 7) => Finding::warn(
            "kernel",
            found,
            "Linux 6.1 or newer lets io_uring run its completions on the spiller's thread, which costs less CPU",
        ),
        Some(_) => {
            Finding::bad("kernel", found, "durable writes (RWF_DSYNC) need Linux 4.7, and 6.1 is advised")
        }
        None => {
            Finding::warn("kernel", found, "the version was not understood: Linux 6.1 or newer is advised")
        }
    }
}

fn check_io_uring() -> Finding {
    let allowed = match fs::read_to_string("/proc/sys/kernel/io_uring_disabled").as_deref().map(str::trim) {
        Ok("1") => "kernel.io_uring_disabled is 1 (privileged processes only)",
        Ok("2") => "kernel.io_uring_disabled is 2 (nobody)",
        _ => "",
    };
    let best = <io_uring::IoUring>::builder()
        .setup_single_issuer()
        .setup_defer_taskrun()
        .setup_taskrun_flag()
        .build(8)
        .map(|ring| suffices(&ring));
    let plain = || io_uring::IoUring::new(8).map(|ring| suffices(&ring));
    judge_io_uring(allowed, best, plain)
}

/// Whether a ring has what the spiller cannot do without: waits with a time limit, and completions that are never dropped.
fn suffices(ring: &io_uring::IoUring) -> bool {
    ring.params().is_feature_ext_arg() && ring.params().is_feature_nodrop()
}

/// `best` is a ring with all that tidelog asks for, `plain` one without; each says whether it suffices.
fn judge_io_uring(sysctl: &str, best: io::Result<bool>, plain: impl FnOnce() -> io::Result<bool>) -> Finding {
    const CHECK: &str = "io_uring";
    let too_old = || {
        Finding::warn(
            CHECK,
            "too old",
            "tidelog writes with pwritev2 threads instead. Linux 5.11 has what io_uring takes, 6.1 is advised",
        )
    };
    match best {
        Ok(true) => Finding::ok(CHECK, "available, with SINGLE_ISSUER, DEFER_TASKRUN and timed waits"),
        Ok(false) => too_old(),
        Err(error) => match plain() {
            Ok(false) => too_old(),
            Ok(true) => Finding::warn(
                CHECK,
                format!("available, but not SINGLE_ISSUER with DEFER_TASKRUN: {error}"),
                "Linux 6.1 or newer has them: less CPU per write",
            ),
            Err(error) if sysctl.is_empty() => Finding::warn(
                CHECK,
                format!("refused: {error}"),
                "tidelog writes with pwritev2 threads instead. A container's seccomp profile may forbid io_uring_setup, \
                 io_uring_enter and io_uring_register: allow them",
            ),
            Err(error) => Finding::warn(
                CHECK,
                format!("refused: {error}; {sysctl}"),
                "tidelog writes with pwritev2 threads instead. sysctl kernel.io_uring_disabled=0 allows io_uring",
            ),
        },
    }
}

/// Enough to register the spiller's buffers with the kernel.
const MEMLOCK_BYTES_ADVISED: u64 = 64 << 20;

fn judge_memlock(limit_bytes: Option<u64>) -> Finding {
    match limit_bytes {
        None => Finding::ok("memlock", "unlimited"),
        Some(bytes) if bytes >= MEMLOCK_BYTES_ADVISED => Finding::ok("memlock", show::bytes(bytes)),
        Some(bytes) => Finding::warn(
            "memlock",
            format!("{} may be locked", show::bytes(bytes)),
            "buffers may stay unregistered, which costs a few percent of CPU: ulimit -l 65536, LimitMEMLOCK=64M in a \
             systemd unit, or --ulimit memlock=67108864 for a container",
        ),
    }
}

fn judge_huge_pages(setting: io::Result<String>) -> Finding {
    const CHECK: &str = "huge pages";
    const ADVICE: &str = "write buffers on small pages cost about a third of the disk's speed: \
                          echo madvise > /sys/kernel/mm/transparent_hugepage/enabled";
    let setting = match setting {
        Ok(setting) => setting,
        Err(error) => return Finding::warn(CHECK, format!("no transparent huge pages: {error}"), ADVICE),
    };
    let chosen = setting.split_once('[').and_then(|(_, rest)| rest.split_once(']')).map(|(chosen, _)| chosen);
    match chosen {
        Some(chosen @ ("always" | "madvise")) => Finding::ok(CHECK, format!("transparent, {chosen}")),
        Some(chosen) => Finding::warn(CHECK, format!("transparent, {chosen}"), ADVICE),
        None => Finding::warn(CHECK, format!("not understood: {}", setting.trim()), ADVICE),
    }
}

fn render_table(findings: &[Finding]) -> String {
    let width = findings.iter().map(|finding| finding.check.len()).max().unwrap_or(0);
    let mut table = String::new();
    for Finding { check, grade, found, advice, .. } in findings {
        table += &format!("{:<5} {check:<width$}  {found}\n", show_grade(*grade));
        if !advice.is_empty() {
            table += &format!("{:<5} {:<width$}  -> {advice}\n", "", "");
        }
    }
    table
}

fn render_json(findings: &[Finding]) -> String {
    let worst = findings.iter().map(|finding| finding.grade).max().unwrap_or(Grade::Ok);
    let findings: Vec<_> = findings
        .iter()
        .map(|Finding { check, dir, bucket, grade, found, advice }| {
            json!({ "check": check, "dir": dir, "bucket": bucket, "grade": show_grade(*grade), "found": found, "advice": advice })
        })
        .collect();
    format!("{}\n", json!({ "worst": show_grade(worst), "findings": findings }))
}

fn show_grade(grade: Grade) -> &'static str {
    match grade {
        Grade::Ok => "ok",
        Grade::Warn => "warn",
        Grade::Bad => "bad",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels() {
        for (release, grade) in [
            ("6.18.44-fc-v857", Grade::Ok),
            ("6.1.0-13-amd64", Grade::Ok),
            ("6.0.9", Grade::Warn),
            ("5.15.0-91-generic", Grade::Warn),
            ("10.0", Grade::Ok),
            ("3.10.0-1160.el7", Grade::Bad),
            ("4.6.1", Grade::Bad),
            ("unknown", Grade::Warn),
        ] {
            assert_eq!(judge_kernel(release).grade, grade, "{release}");
        }
    }

    #[test]
    fn what_io_uring_lacks_is_told() {
        let refused = || Err(io::Error::from_raw_os_error(1));
        assert_eq!(judge_io_uring("", Ok(true), || unreachable!()).grade, Grade::Ok);
        let older = judge_io_uring("", refused(), || Ok(true));
        assert!(older.grade == Grade::Warn && older.advice.contains("6.1"), "{older:?}");
        // As 5.10: a ring can be made, and the spiller refuses it.
        for too_old in [judge_io_uring("", refused(), || Ok(false)), judge_io_uring("", Ok(false), refused)] {
            assert_eq!((too_old.grade, &*too_old.found), (Grade::Warn, "too old"));
            assert!(too_old.advice.contains("pwritev2 threads instead"), "{too_old:?}");
        }
        let seccomp = judge_io_uring("", refused(), refused);
        assert!(seccomp.advice.contains("seccomp"), "{seccomp:?}");
        let sysctl = judge_io_uring("kernel.io_uring_disabled is 2", refused(), refused);
        assert!(sysctl.found.contains("is 2") && sysctl.advice.contains("io_uring_disabled=0"), "{sysctl:?}");
    }

    #[test]
    fn limits_and_pages() {
        assert_eq!(judge_memlock(None).grade, Grade::Ok);
        assert_eq!(judge_memlock(Some(64 << 20)).grade, Grade::Ok);
        let small = judge_memlock(Some(8 << 20));
        assert_eq!((small.grade, &*small.found), (Grade::Warn, "8.0 MiB may be locked"));
        for (setting, grade) in [
            ("[always] madvise never\n", Grade::Ok),
            ("always [madvise] never\n", Grade::Ok),
            ("always madvise [never]\n", Grade::Warn),
            ("?", Grade::Warn),
        ] {
            assert_eq!(judge_huge_pages(Ok(setting.to_owned())).grade, grade, "{setting}");
        }
        assert_eq!(judge_huge_pages(Err(io::ErrorKind::NotFound.into())).grade, Grade::Warn);
    }

    #[test]
    fn both_outputs_say_everything() {
        let findings =
            [Finding::ok("kernel", "Linux"), Finding::bad("directory", "/x is missing", "create it")];
        assert_eq!(
            render_table(&findings),
            "ok    kernel     Linux\nbad   directory  /x is missing\n                 -> create it\n"
        );
        let json: serde_json::Value = serde_json::from_str(&render_json(&findings)).unwrap();
        assert_eq!(json["worst"], "bad");
        assert_eq!(json["findings"][1]["advice"], "create it");
    }
}
