//! The order in which runs are read, and what goes together into a part.

use std::collections::HashSet;

use super::ahead::Ahead;
use super::builder::PartBuilder;
use super::latest::{Survivors, survivors};
use super::source::{Buckets, READ_AHEAD, Source, SourceRun, Wanted, load, load_directory};
use super::target::Target;
use super::{CompactError, CompactionPlan, CompactionStats, KeyOf};
use crate::error::ReadError;
use crate::options::Options;

/// A part with more logs ends, whatever its size: so does a footer that could not be read any more.
const RUNS_PER_PART_MAX: usize = 1 << 16;
/// So does one that has this many times its size before compression, or as much as the memory for it.
const PACKED_RATIO_MAX: usize = 8;

/// What would become of the runs: all of the plan but the number of new objects.
pub(super) async fn plan(
    part_bytes: usize,
    buckets: &Buckets,
    sources: &[Source<'_>],
) -> Result<CompactionPlan, ReadError> {
    let mut plan = CompactionPlan::default();
    let mut objects = HashSet::new();
    for extent in sources.iter().flat_map(|source| source.handle.extents()) {
        if objects.insert((&*extent.pieces[0].bucket, extent.object())) {
            plan.objects += 1;
            plan.object_bytes = plan.object_bytes.saturating_add(extent.object_bytes());
        }
    }
    let mut packing = Packing::new(part_bytes);
    let jobs: Vec<_> = jobs(sources).collect();
    let (mut asked, mut lens) = (jobs.iter(), Ahead::new());
    for &(index, _) in &jobs {
        while lens.len() < READ_AHEAD
            && let Some(&(source, run)) = asked.next()
        {
            lens.push(surviving_len(buckets, &sources[source], run));
        }
        let bytes = lens.next().await.expect("one for each run")?;
        plan.runs += 1;
        plan.surviving_bytes = plan.surviving_bytes.saturating_add(bytes);
        let goes_on = packing.is_in_part(index);
        let ends = packing.ends_before(index, &sources[index], bytes);
        plan.runs_after += u64::from(ends || !goes_on);
        packing.add(index, bytes);
    }
    Ok(plan)
}

/// All runs in the order in which they are rewritten, with the index of their source.
fn jobs<'a>(sources: &'a [Source<'_>]) -> impl Iterator<Item = (usize, &'a SourceRun)> {
    sources.iter().enumerate().flat_map(|(index, source)| source.runs.iter().map(move |run| (index, run)))
}

/// Bytes of a run that would be rewritten.
async fn surviving_len(buckets: &Buckets, source: &Source<'_>, run: &SourceRun) -> Result<u64, ReadError> {
    if source.is_whole() {
        return Ok(run.len());
    }
    let wanted = Wanted { metadata: true, data: source.data(), whole: false };
    let entries = load_directory(buckets, source.handle, run, &wanted).await?;
    Ok(entries.iter().map(|(_, range)| range.end - range.start).sum())
}

/// Decides which runs go together into a part. A log that does not fit into what is left of a part begins the next one: it is
/// then in as few parts as its size allows.
struct Packing {
    part_bytes: u64,
    /// Of the part at hand.
    bytes: u64,
    /// The last source with a run in it.
    last: Option<usize>,
}

impl Packing {
    fn new(part_bytes: usize) -> Packing {
        Packing { part_bytes: part_bytes as u64, bytes: 0, last: None }
    }

    /// Whether the part at hand has a run of the source.
    fn is_in_part(&self, source: usize) -> bool {
        self.last == Some(source)
    }

    /// Whether the part at hand ends before a run of so many bytes of the source.
    fn ends_before(&mut self, index: usize, source: &Source<'_>, run_bytes: u64) -> bool {
        let bytes = if self.is_in_part(index) { run_bytes } else { source.bytes() };
        let ends = self.last.is_some() && self.bytes.saturating_add(bytes) > self.part_bytes;
        if ends {
            self.end();
        }
        ends
    }

    fn add(&mut self, source: usize, bytes: u64) {
        self.bytes = self.bytes.saturating_add(bytes);
        self.last = Some(source);
    }

    fn end(&mut self) {
        (self.bytes, self.last) = (0, None);
    }
}

/// A compaction under way.
pub(super) struct Rewrite<'a> {
    pub(super) buckets: &'a Buckets,
    pub(super) options: &'a Options,
    pub(super) key_of: Option<&'a KeyOf>,
    pub(super) target: Target<'a>,
    pub(super) stats: CompactionStats,
}

impl Rewrite<'_> {
    /// Reads the sources' runs and writes what survives of them.
    pub(super) async fn run(&mut self, sources: &[Source<'_>]) -> Result<(), CompactError> {
        let memory_share = self.options.memory_share() as u64;
        let part_bytes = self.options.part_bytes;
        let raw_bytes_max = part_bytes.saturating_mul(PACKED_RATIO_MAX).min(self.options.memory_share());
        let mut packing = Packing::new(part_bytes);
        let mut builder = PartBuilder::default();
        let mut asked = jobs(sources).peekable();
        let (mut loads, mut loading_bytes) = (Ahead::new(), 0u64);
        // Of the log at hand.
        let mut kept: (Option<usize>, Option<Survivors>) = (None, None);
        for (index, run) in jobs(sources) {
            let source = &sources[index];
            while let Some((source, run)) = asked.next_if(|(_, run)| {
                loads.len() == 0 || loads.len() < READ_AHEAD && loading_bytes + run.len() <= memory_share
            }) {
                let source = &sources[source];
                loading_bytes += run.len();
                let wanted = Wanted { metadata: true, data: source.data(), whole: source.is_whole() };
                loads.push(load(self.buckets, source.handle, run, wanted));
            }
            if let Some(key_of) = self.key_of
                && kept.0 != Some(index)
            {
                kept = (Some(index), Some(survivors(self.buckets, source, key_of, memory_share).await?));
            }
            let loaded = loads.next().await.expect("one result for each run")?;
            loading_bytes -= run.len();
            if packing.ends_before(index, source, if kept.1.is_none() { loaded.bytes } else { 0 })
                || builder.runs() >= RUNS_PER_PART_MAX
                || builder.bytes() >= raw_bytes_max
            {
                self.target.put(&mut builder)?;
                packing.end();
            }
            let bytes_before = builder.bytes();
            builder.begin(source.handle.log(), run.first, run.end, run.compression);
            for (group_key, changeset) in &loaded.changesets {
                let mut superseded = 0;
                self.stats.changes += builder.push(*group_key, changeset, |number| {
                    if !(run.first..run.end).contains(&number) {
                        return false;
                    }
                    let survives =
                        *group_key == 0 || kept.1.as_ref().is_none_or(|kept| kept.contains(number));
                    superseded += u64::from(!survives);
                    survives
                });
                self.stats.superseded += superseded;
            }
            let survived = (builder.bytes() - bytes_before) as u64;
            packing.add(index, if kept.1.is_none() { loaded.bytes } else { survived });
        }
        if !builder.is_empty() {
            self.target.put(&mut builder)?;
        }
        self.target.finish()
    }
}
