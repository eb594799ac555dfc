//! A local directory of a changelog: its manifest, its segments, and the objects that the manifest names.
//!
//! What must be there, and where a torn last write ends it, is found as at any open; each segment is then looked at on
//! its own. The directory is locked meanwhile, and not changed.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::Value;
use tidelog::block::BlockError;
use tidelog::manifest::{ManifestError as RecordError, ManifestRecord, ManifestState};
use tidelog::{Extent, LocalLogs, OpenError};
use tidelog_io::directory::{MANIFEST_NAME, ManifestContent, ManifestError};
use tidelog_io::segment::{parse_segment_name, segment_name};

use super::handle::Objects;
use super::object::Buckets;
use super::segment::{self, Known};
use super::{Depth, Report};
use crate::Failure;

/// Looks at all of a directory.
pub fn look(path: &Path, depth: Depth, buckets: &mut Buckets) -> Result<Vec<Report>, Failure> {
    if looks_like_bucket(path) {
        let path = path.display();
        return Err(Failure::Usage(format!(
            "{path} is no local directory of a changelog, it has folders and neither a manifest nor segments, as a bucket does: \
             give the handles of what is to be looked at, or files of the bucket"
        )));
    }
    let mut report = Report::new(path.display().to_string(), "local directory");
    let local = match LocalLogs::open(path) {
        Ok(local) => {
            if let Some(error) = local.damage() {
                report.damage(None, format!("only kept for restores: {error}"));
            }
            Some(local)
        }
        Err(error) => {
            report.damage(None, damage(error)?);
            None
        }
    };
    let logs = local.as_ref().map_or(&[][..], LocalLogs::logs);
    let rows = logs.iter().map(|log| -> Vec<Value> {
        vec![
            log.log().to_string().into(),
            log.name().into(),
            log.key_groups().to_string().into(),
            log.start().0.into(),
            log.end().0.into(),
            log.confirmed().0.into(),
        ]
    });
    report.list("logs", &["log", "name", "key groups", "from", "to", "confirmed"], rows.collect());
    let manifest = path.join(MANIFEST_NAME);
    if report.is_damaged() && !manifest.exists() {
        return Ok(vec![report]);
    }
    let (manifest, content) = match read_manifest(&manifest)? {
        Ok(read) => read,
        Err(damaged) => return Ok(vec![report, damaged]),
    };
    let mut reports = vec![report, manifest];
    if let Some((directory, state)) = content {
        for (&segment, &epoch) in state.segments() {
            let known = Known { directory, segment, epoch, limit: state.number_limit(epoch) };
            reports.push(segment::look(&path.join(segment_name(segment)), Some(known))?);
        }
        if depth == Depth::Everything {
            reports.extend(verify_objects(&state, buckets)?);
        }
    }
    // Locked until here: nobody changed anything meanwhile.
    drop(local);
    Ok(reports)
}

/// Whether there are folders, and nothing that a local directory has.
fn looks_like_bucket(path: &Path) -> bool {
    let mut has_folder = false;
    for entry in std::fs::read_dir(path).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let name = name.to_str().unwrap_or_default();
        if name == MANIFEST_NAME || parse_segment_name(name).is_some() {
            return false;
        }
        has_folder |= entry.path().is_dir();
    }
    has_folder
}

/// In which way a directory that does not open is damaged, if it is.
fn damage(error: OpenError) -> Result<String, Failure> {
    let is_damage = match &error {
        OpenError::Manifest { source, .. } => {
            matches!(source, ManifestError::Foreign { .. } | ManifestError::Corrupt { .. })
        }
        OpenError::Record { source, .. } => !matches!(source, RecordError::NewerRecord { .. }),
        OpenError::Damaged { source, .. } => !matches!(source, BlockError::NewerVersion { .. }),
        OpenError::Hole { .. }
        | OpenError::ManifestMissing { .. }
        | OpenError::ManifestBehind { .. }
        | OpenError::SegmentMissing { .. } => true,
        _ => false,
    };
    match error {
        OpenError::Damaged { segment, offset, source, .. } if is_damage => {
            Ok(format!("{segment}, byte {offset}: {source}; later blocks were durable"))
        }
        error if is_damage => Ok(error.to_string()),
        error => Err(Failure::new(error)),
    }
}

/// Looks at a manifest file.
pub fn look_at_manifest(path: &Path) -> Result<Report, Failure> {
    match read_manifest(path)? {
        Ok((report, _)) | Err(report) => Ok(report),
    }
}

type Manifest = (Report, Option<(u64, ManifestState)>);

/// A manifest with the directory's id and the state that it adds up to, or the report of a damaged one.
fn read_manifest(path: &Path) -> Result<Result<Manifest, Report>, Failure> {
    let name = path.display().to_string();
    let mut report = Report::new(name.clone(), "manifest");
    let bytes = std::fs::read(path).map_err(|error| Failure::new(format!("cannot read {name}: {error}")))?;
    report.fact("length bytes", bytes.len());
    let content = match ManifestContent::decode(&bytes) {
        Ok(content) => content,
        Err(newer @ ManifestError::NewerVersion { .. }) => {
            return Err(Failure::new(format!("{name}: {newer}")));
        }
        Err(error) => {
            let offset = match error {
                ManifestError::Corrupt { offset, .. } => Some(offset),
                _ => None,
            };
            report.damage(offset, error);
            return Ok(Err(report));
        }
    };
    report.verified(content.len_bytes);
    report.fact("directory", format!("{:016x}", content.directory_id));
    report.fact("records", content.records.len());
    if content.torn_bytes > 0 {
        report.note(format!("the last {} bytes are a torn append, as a crash leaves it", content.torn_bytes));
    }
    let state = match ManifestState::replay(content.records.iter().map(Vec::as_slice)) {
        Ok(state) => state,
        Err(newer @ RecordError::NewerRecord { .. }) => return Err(Failure::new(format!("{name}: {newer}"))),
        Err(error) => {
            report.damage(None, error);
            return Ok(Err(report));
        }
    };
    describe(&content, &state, &mut report);
    Ok(Ok((report, Some((content.directory_id, state)))))
}

fn describe(content: &ManifestContent, state: &ManifestState, report: &mut Report) {
    report.fact("session", format!("{:016x}", state.session()));
    report.fact("next epoch", state.next_epoch());
    report.fact("next block", state.next_number());
    let rows = state.segments().iter().map(|(segment, epoch)| -> Vec<Value> {
        vec![segment_name(*segment).into(), (*epoch).into(), state.number_limit(*epoch).into()]
    });
    report.list("segments", &["segment", "epoch", "blocks below"], rows.collect());
    let rows = state.logs().iter().map(|(log, known)| -> Vec<Value> {
        vec![
            log.to_string().into(),
            known.name.clone().into(),
            known.key_groups.to_string().into(),
            known.truncated.0.into(),
            known.covered().0.into(),
            known.confirmed.0.into(),
            known.closed.into(),
        ]
    });
    let columns = &["log", "name", "key groups", "truncated", "in objects", "confirmed", "closed"];
    report.list("logs", columns, rows.collect());
    let rows = state.objects().values().map(|object| -> Vec<Value> {
        let buckets: Vec<&str> = object.pieces.iter().map(|piece| &*piece.bucket).collect();
        vec![
            joined(buckets).into(),
            object.object.clone().into(),
            object.pieces.len().into(),
            object.object_bytes().into(),
        ]
    });
    report.list("objects", &["bucket", "object", "pieces", "bytes"], rows.collect());
    let rows = state.holders().iter().flat_map(|(holder, held)| {
        held.keys().map(|object| -> Vec<Value> {
            vec![holder.clone().into(), object.clone().into(), state.is_handed_over(object).into()]
        })
    });
    report.list("holders", &["holder", "object", "handed over"], rows.collect());
    let rows = state.uploads().iter().map(|(object, upload)| -> Vec<Value> {
        let buckets: Vec<&str> = upload.buckets.iter().map(|bucket| &**bucket).collect();
        vec![joined(buckets).into(), object.clone().into(), state.objects().contains_key(object).into()]
    });
    report.list("unsettled uploads", &["bucket", "object", "complete"], rows.collect());
    let mut counts: BTreeMap<String, u64> = BTreeMap::new();
    for record in content.records.iter().filter_map(|record| ManifestRecord::decode(record).ok()) {
        *counts.entry(kind_of(&record)).or_default() += 1;
    }
    let rows = counts.into_iter().map(|(name, count)| -> Vec<Value> { vec![name.into(), count.into()] });
    report.list("records by kind", &["kind", "records"], rows.collect());
}

/// URLs, each once.
fn joined(mut buckets: Vec<&str>) -> String {
    buckets.sort_unstable();
    buckets.dedup();
    buckets.join(" ")
}

/// The kind of a record: its name in the code.
fn kind_of(record: &ManifestRecord) -> String {
    let text = format!("{record:?}");
    text.split(|c: char| !c.is_ascii_alphanumeric()).next().unwrap_or_default().to_owned()
}

/// Every byte of the objects that logs of the directory need and may refer to.
fn verify_objects(state: &ManifestState, buckets: &mut Buckets) -> Result<Vec<Report>, Failure> {
    let mut objects = Objects::new(buckets);
    for object in state.objects().values() {
        // What a registry let go of may be gone.
        for range in object.ranges.iter().filter(|range| state.may_refer(range.log, &object.object)) {
            let extent = Extent {
                pieces: object.pieces.clone(),
                footer: object.footer.clone(),
                token: object.token,
                first: range.first,
                end: range.end,
            };
            objects.verify(range.log, &extent)?;
        }
    }
    Ok(objects.into_reports())
}
