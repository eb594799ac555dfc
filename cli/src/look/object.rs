//! An object: its footer, its parts, and every changeset in them.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use serde_json::Value;
use tidelog::footer::{Footer, FooterError, TRAILER_BYTES};
use tidelog::part::{Changeset, Compression, Directory, PartId, Run};
use tidelog::{Extent, LogId, Piece};
use tidelog_upload::bucket::BucketIndex;
use tidelog_upload::{Driver, ListedObject, Pending, Runtime, StoreError, StoreErrorKind, UploadOptions};

use super::{Depth, Report};
use crate::Failure;
use crate::patience::PatienceArgs;
use crate::places::check_bucket;

/// Each bucket has a driver of its own.
const ONLY: BucketIndex = BucketIndex(0);
/// About how much of a run is read at once, in bytes.
const READ_BYTES: u64 = 8 << 20;

/// The bytes of an object, wherever they are.
pub enum Bytes {
    /// In a file.
    File { file: File, len: u64 },
    /// In buckets: the concatenation of these.
    Buckets(Vec<InBucket>),
}

/// A run of bytes of a file in a bucket.
pub struct InBucket {
    bucket: Arc<Bucket>,
    name: String,
    offset: u64,
    len: u64,
}

/// Buckets that are open, by URL.
pub struct Buckets {
    open: HashMap<String, Arc<Bucket>>,
    patience: PatienceArgs,
}

impl Buckets {
    /// Buckets that are given up when they send nothing.
    pub fn new(patience: PatienceArgs) -> Buckets {
        Buckets { open: HashMap::new(), patience }
    }

    /// A file in a bucket.
    pub fn open(&mut self, bucket: &str, name: &str) -> Result<Bytes, OpenError> {
        let (bucket, len) = self.find(bucket, name)?;
        Ok(Bytes::Buckets(vec![InBucket { bucket, name: name.to_owned(), offset: 0, len }]))
    }

    /// The object that consists of these pieces, each of which must be there and long enough.
    pub fn open_pieces(&mut self, pieces: &[Piece]) -> Result<Bytes, OpenError> {
        let mut found = Vec::new();
        for Piece { bucket: url, object, offset, bytes } in pieces {
            let (bucket, file_bytes) = self.find(url, object)?;
            let end = offset.saturating_add(*bytes);
            // A longer file is fine where the object is in pieces; one that is the whole object has its length.
            let len = if pieces.len() == 1 { file_bytes.saturating_sub(*offset) } else { *bytes };
            if end > file_bytes && pieces.len() > 1 {
                let what = format!("{object} in {url} has {file_bytes} bytes, a handle says at least {end}");
                return Err(OpenError::Missing(what));
            }
            found.push(InBucket { bucket, name: object.clone(), offset: *offset, len });
        }
        Ok(Bytes::Buckets(found))
    }

    fn find(&mut self, url: &str, name: &str) -> Result<(Arc<Bucket>, u64), OpenError> {
        let bucket = match self.open.get(url) {
            Some(bucket) => Arc::clone(bucket),
            None => {
                let bucket = Arc::new(Bucket::open(url, self.patience).map_err(OpenError::Failed)?);
                self.open.insert(url.to_owned(), Arc::clone(&bucket));
                bucket
            }
        };
        match bucket.head(name).map_err(OpenError::Failed)? {
            Ok(found) => Ok((bucket, found.bytes)),
            Err(error) if error.is_not_found() => match bucket.is_missing(name).map_err(OpenError::Failed)? {
                Some(error) => Err(OpenError::Failed(Failure::new(error))),
                None => Err(OpenError::Missing(error.to_string())),
            },
            Err(error) => Err(OpenError::Failed(Failure::new(error))),
        }
    }
}

/// What a bucket answered. A failure: it did not, for longer than is waited.
type Answer<T> = Result<Result<T, StoreError>, Failure>;

/// A bucket with a driver of its own.
struct Bucket {
    url: String,
    driver: Driver,
    patience: PatienceArgs,
}

impl Bucket {
    fn open(url: &str, patience: PatienceArgs) -> Result<Bucket, Failure> {
        check_bucket(url).map_err(Failure::new)?;
        let store = tidelog_upload::open_store(url)?;
        let runtime = Runtime::Own { threads: 1 };
        let driver = Driver::start(vec![store], runtime, UploadOptions::default()).map_err(Failure::new)?;
        Ok(Bucket { url: url.to_owned(), driver, patience })
    }

    fn head(&self, name: &str) -> Answer<ListedObject> {
        let (resolver, pending) = tidelog_upload::channel();
        self.driver.head(ONLY, name, move |outcome| resolver.resolve(outcome));
        self.wait(pending)
    }

    fn get(&self, name: &str, range: Range<u64>) -> Answer<bytes::Bytes> {
        let (resolver, pending) = tidelog_upload::channel();
        self.driver.get(ONLY, name, range, move |outcome| resolver.resolve(outcome));
        self.wait(pending)
    }

    /// Whether an object was not found because the bucket does not exist: the answer to HEAD, which has no body, is the same.
    fn is_missing(&self, name: &str) -> Result<Option<StoreError>, Failure> {
        let outcome = self.get(name, 0..1)?;
        Ok(outcome.err().filter(|error| *error.kind() == StoreErrorKind::NoSuchBucket))
    }

    fn wait<T>(&self, mut pending: Pending<Result<T, StoreError>>) -> Answer<T> {
        let answer = self.patience.wait_for(&self.url, |time| pending.wait_timeout(time).ok_or(0))?;
        answer.map_err(|error| Failure::new(format!("{error:?}")))
    }
}

/// Why an object cannot be read.
#[derive(Debug)]
pub enum OpenError {
    /// It is not there.
    Missing(String),
    /// The bucket failed, or does not exist.
    Failed(Failure),
}

impl Bytes {
    pub fn len(&self) -> u64 {
        match self {
            Bytes::File { len, .. } => *len,
            Bytes::Buckets(pieces) => pieces.iter().fold(0, |len, piece| len.saturating_add(piece.len)),
        }
    }

    /// All bytes of the range; the caller has held it against the length.
    fn read(&self, range: Range<u64>) -> Result<bytes::Bytes, Failure> {
        match self {
            Bytes::File { file, .. } => {
                let mut bytes = vec![0; (range.end - range.start) as usize];
                file.read_exact_at(&mut bytes, range.start).map_err(|error| {
                    Failure::new(format!("cannot read it at byte {}: {error}", range.start))
                })?;
                Ok(bytes.into())
            }
            Bytes::Buckets(pieces) => {
                let mut read = Vec::with_capacity((range.end - range.start) as usize);
                let mut start = 0u64;
                for InBucket { bucket, name, offset, len } in pieces {
                    let end = start.saturating_add(*len);
                    let (first, last) = (range.start.max(start), range.end.min(end));
                    let from = offset + first.saturating_sub(start);
                    start = end;
                    if first >= last {
                        continue;
                    }
                    let got = bucket.get(name, from..from + (last - first))?;
                    read.extend_from_slice(&got.map_err(Failure::new)?);
                }
                Ok(read.into())
            }
        }
    }
}

/// What was found of an object.
pub struct Found {
    pub report: Report,
    pub exists: bool,
    pub len: u64,
    /// `None` if it is damaged.
    pub footer: Option<Footer>,
}

impl Found {
    /// Why this is not the object that holds an extent of a handle.
    pub fn mismatch(&self, log: LogId, extent: &Extent) -> Option<String> {
        let expected = extent.object_bytes();
        if self.len != expected && self.exists {
            let how = if self.len < expected { "it was cut short" } else { "it is another object" };
            return Some(format!("it has {} bytes, a handle says {expected}: {how}", self.len));
        }
        let footer = self.footer.as_ref()?;
        if footer.start() != extent.footer.start || extent.footer.end != self.len {
            return Some("its footer is not where a handle says".to_owned());
        }
        if footer.token() != extent.token {
            let (found, expected) = (footer.token(), extent.token);
            return Some(format!("its token is {found:016x}, a handle says {expected:016x}: another object"));
        }
        let runs = footer.parts().iter().flat_map(|part| &part.runs).filter(|run| run.log == log);
        let held =
            runs.fold(extent.first, |held, run| if run.first <= held { held.max(run.end) } else { held });
        if held < extent.end {
            return Some(format!(
                "changes {held} to {} of log {log} are not in it, a handle says so",
                extent.end
            ));
        }
        None
    }
}

/// Looks at one object.
pub fn look(name: &str, bytes: &Bytes, depth: Depth) -> Result<Found, Failure> {
    let len = bytes.len();
    let mut report = Report::new(name, "object");
    report.fact("length bytes", len);
    let footer = match read_footer(bytes, &mut report) {
        Ok(footer) => footer,
        Err(Problem::Failure(failure)) => return Err(failure),
        Err(Problem::Footer(newer @ FooterError::NewerVersion { .. })) => {
            return Err(Failure::new(format!("{name}: {newer}")));
        }
        Err(Problem::Footer(error)) => {
            let mut what = error.to_string();
            if error == FooterError::NotAnObject {
                what += if is_object_name(name) { OBJECT_CUT_SHORT } else { OBJECT_OR_FOREIGN };
            }
            report.damage(Some(len.saturating_sub(TRAILER_BYTES as u64)), what);
            return Ok(Found { report, exists: true, len, footer: None });
        }
    };
    describe(&footer, &mut report);
    if depth == Depth::Everything {
        verify_parts(&footer, bytes, &mut report)?;
    }
    Ok(Found { report, exists: true, len, footer: Some(footer) })
}

/// What follows for a thing without an object's end, and what to do.
const OBJECT_CUT_SHORT: &str = ". Its name is that of an object of tidelog, so it was cut short or damaged at its end: copy it \
                                again from the bucket, or restore from another checkpoint";
pub const OBJECT_OR_FOREIGN: &str =
    ". Nothing in it tells which: verify the handles that may name it, they know its length";

/// Whether the last part of a path is a name that tidelog gives to objects: a counter, and a token in hexadecimal digits.
pub fn is_object_name(path: &str) -> bool {
    let name = path.rsplit('/').next().unwrap_or(path);
    let Some((counter, token)) = name.split_once('-') else { return false };
    let hex = |c: char| c.is_ascii_digit() || ('a'..='f').contains(&c);
    counter.len() >= 8
        && counter.bytes().all(|byte| byte.is_ascii_digit())
        && token.len() == 16
        && token.chars().all(hex)
}

enum Problem {
    Failure(Failure),
    Footer(FooterError),
}

fn read_footer(bytes: &Bytes, report: &mut Report) -> Result<Footer, Problem> {
    let read = |range| bytes.read(range).map_err(Problem::Failure);
    let len = bytes.len();
    let trailer = read(len.saturating_sub(TRAILER_BYTES as u64)..len)?;
    let range = Footer::locate(&trailer, len).map_err(Problem::Footer)?;
    let footer_bytes = range.end - range.start;
    let footer = Footer::decode(&read(range)?, None).map_err(Problem::Footer)?;
    report.verified(footer_bytes);
    report.fact("footer bytes", footer_bytes);
    if footer.start().checked_add(footer_bytes) != Some(len) {
        return Err(Problem::Footer(FooterError::Corrupt(
            "its parts, their directories and itself do not fill the object",
        )));
    }
    Ok(footer)
}

fn describe(footer: &Footer, report: &mut Report) {
    report.fact("token", format!("{:016x}", footer.token()));
    report.fact("parts", footer.parts().len());
    report.fact("directories bytes", footer.directories_len());
    let mut logs: BTreeMap<LogId, (u64, u64, u64)> = BTreeMap::new();
    for run in footer.parts().iter().flat_map(|part| &part.runs) {
        let sum = logs.entry(run.log).or_insert((run.first.0, run.end.0, 0));
        sum.1 = run.end.0;
        sum.2 += run.len;
    }
    let rows = logs.iter().map(|(log, (first, end, len))| -> Vec<Value> {
        vec![log.to_string().into(), (*first).into(), (*end).into(), (*len).into()]
    });
    report.list("logs", &["log", "from", "to", "bytes"], rows.collect());
    let rows = footer.parts().iter().enumerate().map(|(index, part)| -> Vec<Value> {
        let compression = match part.compression {
            Compression::None => "none",
            Compression::Lz4 => "lz4",
        };
        vec![index.into(), part.offset.into(), part.len.into(), compression.into(), part.runs.len().into()]
    });
    report.list("parts listed", &["part", "offset", "bytes", "compression", "logs"], rows.collect());
}

/// Holds every directory and changeset against its checksum and the footer.
fn verify_parts(footer: &Footer, bytes: &Bytes, report: &mut Report) -> Result<(), Failure> {
    for (index, run, directory) in footer.runs() {
        let part = &footer.parts()[index as usize];
        let place = Place { part: footer.part_id(index), start: part.offset + run.offset, directory };
        verify_run(place, run, part.compression, bytes, report)?;
    }
    Ok(())
}

/// Where a run and its directory are in the object.
struct Place {
    part: PartId,
    start: u64,
    directory: Range<u64>,
}

/// Its changes are those whose numbers are in the run, unless a compaction left some out. Whether they are all that were
/// written is for the checksums to say, which cover each changeset, and in the directory the list of them.
fn verify_run(
    Place { part, start, directory: at }: Place,
    run: &Run,
    compression: Compression,
    bytes: &Bytes,
    report: &mut Report,
) -> Result<(), Failure> {
    let named = |what: &dyn std::fmt::Display| format!("part {}, log {}: {what}", part.index, run.log);
    let directory = bytes.read(at.clone())?;
    let directory = match Directory::decode(&directory, part, run) {
        Ok(directory) => directory,
        Err(error) => {
            report.damage(Some(at.start), named(&error));
            return Ok(());
        }
    };
    report.verified(u64::from(run.directory_len));
    let mut changes = 0;
    let mut entries = directory.entries();
    while let Some(first) = entries.first() {
        // Neighbouring changesets, at least one.
        let end = first.range.start + READ_BYTES;
        let together = entries.iter().take_while(|entry| entry.range.end <= end).count().max(1);
        let (now, later) = entries.split_at(together);
        entries = later;
        let range = first.range.start..now[together - 1].range.end;
        let read = bytes.read(start + range.start..start + range.end)?;
        for entry in now {
            let piece = (entry.range.start - range.start) as usize..(entry.range.end - range.start) as usize;
            let what = match Changeset::decode(read.slice(piece), part, run.log, entry.group, compression) {
                Ok(set) if set.records().all(|(number, _)| (run.first..run.end).contains(&number)) => {
                    changes += set.count();
                    report.verified(entry.range.end - entry.range.start);
                    continue;
                }
                Ok(_) => "a change whose number is not in the run".to_owned(),
                Err(error) => error.to_string(),
            };
            let group = entry.group.map_or("metadata".to_owned(), |group| format!("key group {group}"));
            report.damage(Some(start + entry.range.start), named(&format_args!("{group}: {what}")));
        }
    }
    if changes > run.end.0 - run.first.0 {
        let what = format!("{changes} changes for the numbers {} to {}", run.first, run.end);
        report.damage(Some(start), named(&what));
    }
    Ok(())
}
