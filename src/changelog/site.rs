//! One directory at open: looked at, recovered, and only then written to.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tidelog_io::aligned::Arena;
use tidelog_io::directory::Manifest;
use tidelog_io::disk::{Disk, Files};
use tidelog_io::segment::{KnownSegment, parse_segment_name, segment_name};

use super::{Random, failed};
use crate::error::OpenError;
use crate::ledger::Ledger;
use crate::manifest::{ManifestRecord, ManifestState};
use crate::options::Options;
use crate::recovery::{Recovered, has_manifest, recover};
use crate::retention::SegmentUse;

/// One directory, read and ready to be written.
pub(super) struct OpenSite {
    pub(super) path: PathBuf,
    pub(super) files: Arc<dyn Files>,
    pub(super) disk: Box<dyn Disk>,
    pub(super) arena: Arena,
    pub(super) directory_id: u64,
    pub(super) ledger: Arc<Ledger>,
    pub(super) recovered: Recovered,
    pub(super) known: Vec<KnownSegment>,
    pub(super) next_epoch: u64,
}

impl OpenSite {
    pub(super) fn open(
        device: usize,
        path: PathBuf,
        files: Arc<dyn Files>,
        disk: impl FnOnce(&Arena) -> Result<Box<dyn Disk>, OpenError>,
        options: &Options,
        random: &mut Random,
    ) -> Result<OpenSite, OpenError> {
        let at = |action: &str| format!("{action} in {}", path.display());
        let (manifest, records) = if has_manifest(&path, &*files)? {
            Manifest::open(Arc::clone(&files))
                .map_err(|source| OpenError::Manifest { directory: path.clone(), source })?
        } else {
            let manifest = Manifest::create(Arc::clone(&files), random())
                .map_err(|source| failed(at("creating a manifest"), source))?;
            (manifest, Vec::new())
        };
        let directory_id = manifest.directory_id();
        let state = ManifestState::replay(records.iter().map(Vec::as_slice))
            .map_err(|source| OpenError::Record { directory: path.clone(), source })?;
        let recovered = recover(device, &path, &*files, directory_id, &state)?;
        recovered.warn_of_damage(&path);
        for SegmentUse { segment, .. } in &recovered.uses {
            // Writes may have been in flight when the process died: what was found of them must stay.
            let name = segment_name(*segment);
            files.sync(&name).map_err(|source| failed(at(&format!("syncing {name}")), source))?;
        }
        let next_epoch = state.next_epoch().max(1);
        let next_number = recovered.next_number;
        let mut known = known_segments(&*files, &state, options.segment_bytes)
            .map_err(|source| failed(at("listing segments"), source))?;
        let is_let_go = |segment: u32| recovered.let_go.iter().any(|(let_go, _)| *let_go == segment);
        known.retain(|known| !is_let_go(known.segment));
        // All is read and found good: now the memory, the disk, and the first thing that is written.
        let blocks = options.spill_blocks() + options.upload_blocks();
        let arena = Arena::new(options.block_bytes, blocks)
            .map_err(|source| failed("allocating block buffers", source))?;
        let disk = disk(&arena)?;
        let ledger = Arc::new(Ledger::new(state, manifest));
        let released = |&(segment, epoch): &(u32, u64)| ManifestRecord::SegmentReleased { segment, epoch };
        let mut records: Vec<ManifestRecord> = recovered.let_go.iter().map(released).collect();
        if known.iter().any(|known| known.in_use) {
            // What stands behind the end was never acknowledged, and must not come back when later blocks do.
            records.push(ManifestRecord::Cut { epoch_below: next_epoch, number: next_number });
        }
        records.push(ManifestRecord::Opened { session: random(), next_epoch, next_number });
        ledger
            .record(records)
            .and_then(|()| ledger.seal())
            .map_err(|source| failed(at("writing the manifest"), source))?;
        if recovered.damage.is_some() {
            metrics::counter!("tidelog_local_retention_lost_total").increment(1);
        }
        for (segment, _) in &recovered.let_go {
            // Nothing is written again where the disk did not give back what it took.
            let name = segment_name(*segment);
            if let Err(error) = files.remove(&name)
                && error.kind() != io::ErrorKind::NotFound
            {
                tracing::warn!(%error, name, "a damaged segment file could not be removed");
            }
        }
        Ok(OpenSite { path, files, disk, arena, directory_id, ledger, recovered, known, next_epoch })
    }
}

/// Refuses a directory that could not take the first change: there is no segment, and no room for one. Where there are
/// some, uploads may make room.
pub(super) fn check_room(path: &Path, files: &dyn Files, options: &Options) -> Result<(), OpenError> {
    let at = |source| failed(format!("looking for room in {}", path.display()), source);
    if files.list().map_err(at)?.iter().any(|(name, _)| parse_segment_name(name).is_some()) {
        return Ok(());
    }
    let (needed_bytes, free_bytes) = (options.segment_bytes, files.free_bytes().map_err(at)?);
    if free_bytes < needed_bytes {
        return Err(OpenError::NoRoom { directory: path.to_owned(), needed_bytes, free_bytes });
    }
    Ok(())
}

/// The segment files of a directory. One that is not in use and has another length than segments have now is removed.
fn known_segments(
    files: &dyn Files,
    state: &ManifestState,
    segment_bytes: u64,
) -> io::Result<Vec<KnownSegment>> {
    let mut known = Vec::new();
    for (name, len) in files.list()? {
        let Some(segment) = parse_segment_name(&name) else { continue };
        let in_use = state.segments().contains_key(&segment);
        if in_use || len == segment_bytes {
            known.push(KnownSegment { segment, in_use });
        } else {
            files.remove(&name)?;
        }
    }
    Ok(known)
}
