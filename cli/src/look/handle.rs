//! Handles: what they stand for, and whether the objects that they name are there and hold it.

use std::collections::HashMap;
use std::path::Path;

use serde_json::Value;
use tidelog::{ChangelogHandle, Extent, HandleError, LogId, Piece};

use super::object::{self, Buckets, Found, OpenError};
use super::{Depth, Report};
use crate::Failure;
use crate::handles::{self, HandlesError};

/// Looks at all handles of a file; and at their objects, each once, when everything is to be looked at.
pub fn look(path: &Path, depth: Depth, buckets: &mut Buckets) -> Result<Vec<Report>, Failure> {
    let name = if path.as_os_str() == "-" { "standard input".to_owned() } else { path.display().to_string() };
    let handles = match handles::read(path) {
        Ok(handles) => handles,
        Err(HandlesError::Handle { source, place, .. })
            if !matches!(source, HandleError::NewerVersion { .. }) =>
        {
            let mut report = Report::new(name, "handles");
            let place = place.trim_start_matches(", ");
            let place = if place.is_empty() { String::new() } else { format!("{place}: ") };
            report.damage(None, format!("{place}{source}"));
            return Ok(vec![report]);
        }
        Err(error) => return Err(Failure::new(error)),
    };
    let mut reports = Vec::new();
    for (index, handle) in handles.iter().enumerate() {
        let name = if handles.len() == 1 { name.clone() } else { format!("{name}, handle {}", index + 1) };
        let mut report = Report::new(name, "handle");
        describe(handle, &mut report);
        report.verified(handle.to_bytes().len() as u64);
        reports.push(report);
    }
    if depth == Depth::Everything {
        reports.extend(verify_objects(&handles, buckets)?);
    }
    Ok(reports)
}

fn describe(handle: &ChangelogHandle, report: &mut Report) {
    report.fact("log", handle.log().to_string());
    report.fact("name", handle.name());
    report.fact("key groups", handle.key_groups().to_string());
    report.fact("from", handle.from().0);
    report.fact("to", handle.to().0);
    report.fact("numbers", handle.to().0 - handle.from().0);
    let rows = handle.extents().iter().flat_map(|extent| {
        extent.pieces.iter().map(|Piece { bucket, object, offset, bytes }| -> Vec<Value> {
            let (bucket, object) = ((**bucket).into(), object.clone().into());
            vec![
                extent.first.0.into(),
                extent.end.0.into(),
                bucket,
                object,
                (*offset).into(),
                (*bytes).into(),
            ]
        })
    });
    report.list("extents", &["from", "to", "bucket", "object", "offset", "bytes"], rows.collect());
}

/// Looks at every object that `handles` name, and whether it is the one that they mean.
fn verify_objects(handles: &[ChangelogHandle], buckets: &mut Buckets) -> Result<Vec<Report>, Failure> {
    let mut objects = Objects::new(buckets);
    for handle in handles {
        for extent in handle.extents() {
            objects.verify(handle.log(), extent)?;
        }
    }
    Ok(objects.into_reports())
}

/// Objects in buckets, each looked at once.
pub struct Objects<'a> {
    buckets: &'a mut Buckets,
    found: Vec<Found>,
    known: HashMap<Vec<Piece>, usize>,
}

impl<'a> Objects<'a> {
    pub fn new(buckets: &'a mut Buckets) -> Objects<'a> {
        Objects { buckets, found: Vec::new(), known: HashMap::new() }
    }

    /// Looks at every byte of the object that `extent` names, and whether it holds those changes of `log`.
    pub fn verify(&mut self, log: LogId, extent: &Extent) -> Result<(), Failure> {
        let index = match self.known.get(&extent.pieces) {
            Some(index) => *index,
            None => {
                self.found.push(look_at_object(self.buckets, &extent.pieces)?);
                self.known.insert(extent.pieces.clone(), self.found.len() - 1);
                self.found.len() - 1
            }
        };
        let found = &mut self.found[index];
        if let Some(what) = found.mismatch(log, extent) {
            found.report.damage(None, what);
        }
        Ok(())
    }

    pub fn into_reports(self) -> Vec<Report> {
        self.found.into_iter().map(|found| found.report).collect()
    }
}

/// Every byte of an object in its buckets. A piece that is missing is damage.
fn look_at_object(buckets: &mut Buckets, pieces: &[Piece]) -> Result<Found, Failure> {
    let name = match pieces {
        [] => String::new(),
        [only] => format!("{} {}", only.bucket, only.object),
        [first, ..] => format!("{} {} and {} more pieces", first.bucket, first.object, pieces.len() - 1),
    };
    match buckets.open_pieces(pieces) {
        Ok(bytes) => object::look(&name, &bytes, Depth::Everything),
        Err(OpenError::Missing(what)) => {
            let mut report = Report::new(name, "object");
            report.damage(None, what);
            Ok(Found { report, exists: false, len: 0, footer: None })
        }
        Err(OpenError::Failed(failure)) => Err(failure),
    }
}
