//! What stands behind a path: a local directory, a segment, a manifest, an object or handles; and a report of it.
//!
//! `inspect` shows reports, `verify` looks at their damages. What is looked at in each kind is in the files below; how a
//! report is shown is in `look/report.rs`.

mod directory;
mod handle;
mod object;
mod report;
mod segment;

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use tidelog_io::directory::MANIFEST_NAME;
use tidelog_io::segment::parse_segment_name;

use self::object::{Buckets, Bytes};
pub use self::report::{Report, Show};
use crate::Failure;
use crate::patience::PatienceArgs;

/// How closely to look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Depth {
    /// At what describes the contents.
    Summary,
    /// At every byte, also of the objects that are named.
    Everything,
}

/// What to look at, and how to show it.
#[derive(clap::Args, Debug)]
pub struct LookArgs {
    /// Prints JSON instead of text.
    #[arg(long)]
    pub json: bool,
    /// The paths are names of objects in this bucket.
    #[arg(long, value_name = "URL")]
    bucket: Option<String>,
    #[command(flatten)]
    patience: PatienceArgs,
    /// The files, or local directories of a changelog; - for handles from standard input.
    #[arg(required = true, value_name = "PATH")]
    paths: Vec<PathBuf>,
}

impl LookArgs {
    /// Looks at everything that was named.
    ///
    /// # Errors
    /// Something cannot be read, or was written by a newer tidelog. Damage is no error: the reports name it.
    pub fn reports(&self, depth: Depth) -> Result<Vec<Report>, Failure> {
        let mut reports = Vec::new();
        let mut buckets = Buckets::new(self.patience);
        for path in &self.paths {
            reports.extend(look(path, self.bucket.as_deref(), depth, &mut buckets)?);
        }
        Ok(reports)
    }
}

/// Looks at `path`, or, with a bucket, at the object of that name in it.
fn look(
    path: &Path,
    bucket: Option<&str>,
    depth: Depth,
    buckets: &mut Buckets,
) -> Result<Vec<Report>, Failure> {
    let name = path.display().to_string();
    if let Some(bucket) = bucket {
        let shown = format!("{bucket} {name}");
        let bytes = match buckets.open(bucket, &name) {
            Ok(bytes) => bytes,
            Err(object::OpenError::Missing(what)) => {
                let mut report = Report::new(shown, "object");
                report.damage(None, what);
                return Ok(vec![report]);
            }
            Err(object::OpenError::Failed(failure)) => return Err(failure),
        };
        return object::look(&shown, &bytes, depth).map(|found| vec![found.report]);
    }
    if name == "-" {
        return handle::look(path, depth, buckets);
    }
    let failed = |error: io::Error| Failure::new(format!("cannot read {name}: {error}"));
    let metadata = std::fs::metadata(path).map_err(failed)?;
    if metadata.is_dir() {
        return directory::look(path, depth, buckets);
    }
    let file = File::open(path).map_err(failed)?;
    match recognize(path, &file, metadata.len()).map_err(failed)? {
        Some(Kind::Segment) => segment::look(path, None).map(|report| vec![report]),
        Some(Kind::Manifest) => directory::look_at_manifest(path).map(|report| vec![report]),
        Some(Kind::Object) => {
            let bytes = Bytes::File { file, len: metadata.len() };
            object::look(&name, &bytes, depth).map(|found| vec![found.report])
        }
        Some(Kind::Handles) => handle::look(path, depth, buckets),
        None => {
            let mut report = Report::new(name, "unknown");
            let what = "no segment, manifest or handle of tidelog begins here, no object ends here: it is another \
                        program's, or an object whose end is missing or damaged";
            report.damage(None, format!("{what}{}", object::OBJECT_OR_FOREIGN));
            Ok(vec![report])
        }
    }
}

enum Kind {
    Segment,
    Manifest,
    Object,
    Handles,
}

/// The kind of a file, by its name where tidelog gives it, else by its first or last bytes.
fn recognize(path: &Path, file: &File, len: u64) -> io::Result<Option<Kind>> {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or("");
    if name == MANIFEST_NAME {
        return Ok(Some(Kind::Manifest));
    }
    if parse_segment_name(name).is_some() {
        return Ok(Some(Kind::Segment));
    }
    let mut first = Vec::new();
    file.take(4096).read_to_end(&mut first)?;
    let mut last = [0; 8];
    if len >= 8 {
        file.read_exact_at(&mut last, len - 8)?;
    }
    Ok(if first.starts_with(b"tlogBLK\n") {
        Some(Kind::Segment)
    } else if first.starts_with(b"tidelogM") {
        Some(Kind::Manifest)
    } else if first.starts_with(&crate::handles::MAGIC) || first.trim_ascii_start().starts_with(b"{") {
        Some(Kind::Handles)
    } else if &last == b"tlogOBJ\n" || object::is_object_name(name) {
        Some(Kind::Object)
    } else {
        None
    })
}
