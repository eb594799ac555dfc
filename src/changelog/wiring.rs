//! How the parts of an open changelog are put together. Nothing runs yet, and nothing is read or written.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, AtomicUsize};
use std::sync::{Arc, Mutex};

use tidelog_io::ring::Bell;
use tidelog_io::segment::{SegmentConfig, Segments};
use tidelog_upload::Driver;

use super::site::OpenSite;
use super::{Clock, Core, Random, Site, failed, splitmix};
use crate::block;
use crate::custody::{Custody, Holding, Readers};
use crate::device::{Budget, Device};
use crate::error::OpenError;
use crate::ledger::LedgerJournal;
use crate::local::index::LocalIndex;
use crate::options::Options;
use crate::queue::{BlockRange, Queue, Source};
use crate::reader::LocalSite;
use crate::recovered::RecoveredLog;
use crate::retention::Retention;
use crate::spill::{Spiller, SpillerParts};
use crate::uploader::{Uploader, UploaderParts, canary_name};

pub(super) type Built = (Arc<Core>, Vec<RecoveredLog>, Vec<Spiller>, Uploader);

/// Wires everything.
pub(super) fn build(
    options: Options,
    driver: Arc<Driver>,
    sites: Vec<OpenSite>,
    clock: Clock,
    mut random: Random,
    background: bool,
) -> Result<Built, OpenError> {
    crate::metrics::describe();
    let options = Arc::new(options);
    let buckets: Vec<Arc<str>> = driver.stores().iter().map(|store| store.url().into()).collect();
    let (sender, events) = crossbeam_channel::unbounded();
    let side_budget = Budget::new(options.memory_share());
    let mut devices = Vec::new();
    let mut spillers = Vec::new();
    let mut holdings = Vec::new();
    let mut sources = Vec::new();
    let mut fixed = Vec::new();
    let mut found = Vec::new();
    if let Some(site) = sites.first() {
        driver.name_canaries(canary_name(&options, site.directory_id));
    }
    for (index, site) in sites.into_iter().enumerate() {
        let OpenSite { path, files, disk, arena, directory_id, ledger, recovered, known, next_epoch } = site;
        let engine = disk.info();
        let bell = Bell::new(disk.waker());
        let side_budget = Arc::clone(&side_budget);
        let device = Device::new(index, bell, options.lane_bytes, options.lanes_max(), side_budget)
            .map_err(|source| failed("allocating a lane", source))?;
        let device = Arc::new(device);
        let config = SegmentConfig {
            directory: directory_id,
            segment_bytes: options.segment_bytes,
            segments_max: options.segments_max(),
            background,
        };
        let journal = Box::new(LedgerJournal::new(Arc::clone(&ledger)));
        let next_number = recovered.next_number;
        let segments = Segments::new(
            disk,
            Arc::clone(&files),
            journal,
            Box::new(block::seal),
            config,
            known,
            next_epoch,
            next_number,
        );
        spillers.push(Spiller::new(SpillerParts {
            device: Arc::clone(&device),
            directory: path.clone(),
            upload_budget: Budget::new(options.upload_blocks() * options.block_bytes),
            arena,
            segments,
            ledger: Arc::clone(&ledger),
            events: sender.clone(),
            linger: options.linger,
            chain_blocks_max: options.chain_blocks_max(),
        }));
        let mut retention = Retention::new(0);
        for found in &recovered.uses {
            retention.found(found.clone());
        }
        let readers = Arc::new(Readers::default());
        let index = Arc::new(Mutex::new(LocalIndex::of(&recovered)));
        holdings.push(Holding {
            directory: path.clone(),
            id: directory_id,
            device: Arc::clone(&device),
            ledger: Arc::clone(&ledger),
            retention,
            readers: Arc::clone(&readers),
            unreleased: Vec::new(),
            index: Arc::clone(&index),
            keep: options.keep(),
        });
        found.push(ledger.read(|state| recovered.logs(state)));
        let apart = ledger.read(|state| {
            let is_ahead = |range: &BlockRange| {
                state.logs().get(&range.log).is_some_and(|log| log.is_ahead(range.first, range.end))
            };
            let apart = recovered.blocks.iter().filter(|block| block.ranges.iter().any(is_ahead));
            apart.map(|block| block.number).collect()
        });
        let blocks = VecDeque::from(recovered.blocks);
        sources.push(Source {
            files: Arc::clone(&files),
            directory: path.clone(),
            blocks,
            apart,
            next_number,
        });
        let local = Arc::new(LocalSite { path, files, index: Some(Arc::clone(&index)), _lock: None });
        fixed.push(Site { local, index, ledger, engine, readers });
        devices.push(device);
    }
    let seed = random();
    let core = Arc::new(Core {
        options: Arc::clone(&options),
        buckets: buckets.clone(),
        driver: Arc::clone(&driver),
        devices,
        sites: fixed,
        requests: AtomicU64::new(0),
        events: sender.clone(),
        clock,
        random: Mutex::new(random),
        next_device: AtomicUsize::new(0),
        owner: std::process::id(),
    });
    let mut custody = Custody::new(holdings, options.object_bytes_max);
    let mut recovered = Vec::new();
    for (device, logs) in found.into_iter().enumerate() {
        for log in logs {
            custody.recovered(device, log.log, log.end);
            if log.start == log.end {
                // Nothing is left of it: it is forgotten.
                continue;
            }
            recovered.push(RecoveredLog::new(Arc::clone(&core), device, log));
        }
    }
    let tokens = Box::new(splitmix(seed));
    let parts = UploaderParts {
        options,
        buckets,
        driver,
        queue: Queue::new(sources),
        custody,
        events,
        sender,
        random: tokens,
    };
    let uploader = Uploader::new(parts, core.now());
    Ok((core, recovered, spillers, uploader))
}
