//! The order in which runs are read, and what goes together into a part.

use std::collections::{BTreeMap, HashSet};

use super::ahead::Ahead;
use super::builder::PartBuilder;
use super::latest::{Survivors, survivors};
use super::source::{Buckets, READ_AHEAD, Source, SourceRun, Wanted, WholePart, load, load_directory};
use super::target::Target;
use super::{CompactError, CompactionPlan, CompactionStats, KeyOf};
use crate::error::ReadError;
use crate::handle::ChangelogHandle;
use crate::options::Options;

/// A part with more logs ends, whatever its size: so does a footer that could not be read any more.
const RUNS_PER_PART_MAX: usize = 1 << 16;
/// So does one that has this many times its size before compression, or as much as the memory for it.
const PACKED_RATIO_MAX: usize = 8;

/// What would become of the runs.
pub(super) async fn plan(
    part_bytes: usize,
    object_bytes_max: u64,
    buckets: &Buckets,
    sources: &[Source],
    whole: &[WholePart],
) -> Result<CompactionPlan, ReadError> {
    let mut plan = CompactionPlan::default();
    let mut objects = HashSet::new();
    for extent in sources.iter().flat_map(|source| source.handle.extents()) {
        if objects.insert((&*extent.pieces[0].bucket, extent.object())) {
            plan.objects += 1;
            plan.object_bytes = plan.object_bytes.saturating_add(extent.object_bytes());
        }
    }
    for round in rounds(sources) {
        let bytes_before = plan.surviving_bytes;
        plan_round(part_bytes, buckets, round, whole, &mut plan).await?;
        plan.objects_after += (plan.surviving_bytes - bytes_before).div_ceil(object_bytes_max);
    }
    Ok(plan)
}

/// What is written one after the other, each with one source of a log.
fn rounds(sources: &[Source]) -> impl Iterator<Item = &[Source]> {
    sources.chunk_by(|source, next| source.round == next.round)
}

async fn plan_round(
    part_bytes: usize,
    buckets: &Buckets,
    sources: &[Source],
    whole: &[WholePart],
    plan: &mut CompactionPlan,
) -> Result<(), ReadError> {
    let mut packing = Packing::new(part_bytes);
    let steps = order(sources, whole);
    let (mut asked, mut lens) = (runs(sources, &steps), Ahead::new());
    for step in &steps {
        let index = match step {
            Step::Rewrite { source, .. } => *source,
            Step::Copy(part) => {
                let part = &whole[*part];
                plan.runs += part.runs.len() as u64;
                plan.runs_after += part.runs.len() as u64;
                plan.surviving_bytes = plan.surviving_bytes.saturating_add(part.range.end - part.range.start);
                packing.end();
                continue;
            }
        };
        while lens.len() < READ_AHEAD
            && let Some((source, run)) = asked.next()
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
    Ok(())
}

/// What is done next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// A run of a source is read and put into a part.
    Rewrite { source: usize, run: usize },
    /// A whole part is copied.
    Copy(usize),
}

/// The order of everything: each source's runs in their order; between copies, source by source.
///
/// A part is copied when all that comes before it has been done for all of its logs. Parts of which each comes before the
/// other, for another log, are no parts that a changelog wrote; of these one is rewritten.
fn order(sources: &[Source], whole: &[WholePart]) -> Vec<Step> {
    let logs: Vec<Vec<Option<usize>>> =
        sources.iter().map(|source| source.runs.iter().map(|run| run.whole_part).collect()).collect();
    let shares: Vec<usize> = whole.iter().map(|part| part.runs.len()).collect();
    order_of(&logs, &shares)
}

/// `logs` says for each run of each log in which whole part it is, `shares` how many runs each of these has.
fn order_of(logs: &[Vec<Option<usize>>], shares: &[usize]) -> Vec<Step> {
    let mut steps = Vec::with_capacity(logs.iter().map(Vec::len).sum());
    let mut next = vec![0; logs.len()];
    let mut rewritten = vec![false; shares.len()];
    loop {
        // By part, the logs that have come to it.
        let mut waiting: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for (source, runs) in logs.iter().enumerate() {
            let next = &mut next[source];
            while let Some(part) = runs.get(*next) {
                if let Some(part) = part.filter(|part| !rewritten[*part]) {
                    waiting.entry(part).or_default().push(source);
                    break;
                }
                steps.push(Step::Rewrite { source, run: *next });
                *next += 1;
            }
        }
        let Some(&first) = waiting.keys().next() else { return steps };
        waiting.retain(|part, logs| logs.len() == shares[*part]);
        if waiting.is_empty() {
            rewritten[first] = true;
        }
        for (part, logs) in waiting {
            steps.push(Step::Copy(part));
            logs.into_iter().for_each(|source| next[source] += 1);
        }
    }
}

/// The runs that are rewritten, in their order, with the index of their source.
fn runs<'a>(sources: &'a [Source], steps: &'a [Step]) -> impl Iterator<Item = (usize, &'a SourceRun)> {
    steps.iter().filter_map(|step| match step {
        Step::Rewrite { source, run } => Some((*source, &sources[*source].runs[*run])),
        Step::Copy(_) => None,
    })
}

/// Bytes of a run that would be rewritten.
async fn surviving_len(buckets: &Buckets, source: &Source, run: &SourceRun) -> Result<u64, ReadError> {
    if source.whole {
        return Ok(run.len());
    }
    let wanted = Wanted { metadata: true, data: source.data() };
    let entries = load_directory(buckets, &source.handle, run, &wanted).await?;
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
    fn ends_before(&mut self, index: usize, source: &Source, run_bytes: u64) -> bool {
        let bytes = if self.is_in_part(index) { run_bytes } else { source.bytes() };
        let fits = self.bytes.saturating_add(bytes) <= self.part_bytes;
        let ends = self.last.is_some_and(|last| last > index || !fits);
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
    /// Reads the sources' runs and writes what survives of them; copies whole parts. Gives the new handles, each with the
    /// place of its log.
    pub(super) async fn run(
        &mut self,
        sources: &[Source],
        whole: &[WholePart],
    ) -> Result<Vec<(usize, ChangelogHandle)>, CompactError> {
        let mut handles = Vec::with_capacity(sources.len());
        for round in rounds(sources) {
            let written = self.target.written();
            self.run_round(round, whole).await?;
            handles.extend(self.target.handles(round, written)?);
        }
        Ok(handles)
    }

    async fn run_round(&mut self, sources: &[Source], whole: &[WholePart]) -> Result<(), CompactError> {
        let memory_share = self.options.memory_share() as u64;
        let part_bytes = self.options.part_bytes;
        let raw_bytes_max = part_bytes.saturating_mul(PACKED_RATIO_MAX).min(self.options.memory_share());
        let mut packing = Packing::new(part_bytes);
        let mut builder = PartBuilder::default();
        let steps = order(sources, whole);
        let mut asked = runs(sources, &steps).peekable();
        let (mut loads, mut loading_bytes) = (Ahead::new(), 0u64);
        // Of the log at hand.
        let mut kept: (Option<usize>, Option<Survivors>) = (None, None);
        for step in &steps {
            let (index, run) = match *step {
                Step::Rewrite { source, run } => (source, &sources[source].runs[run]),
                Step::Copy(part) => {
                    if !builder.is_empty() {
                        self.target.put(&mut builder)?;
                    }
                    packing.end();
                    self.target.copy(&whole[part])?;
                    self.stats.bytes_copied += whole[part].range.end - whole[part].range.start;
                    continue;
                }
            };
            let source = &sources[index];
            while let Some((source, run)) = asked.next_if(|(_, run)| {
                loads.len() == 0 || loads.len() < READ_AHEAD && loading_bytes + run.len() <= memory_share
            }) {
                let source = &sources[source];
                loading_bytes += run.len();
                let wanted = Wanted { metadata: true, data: source.data() };
                loads.push(load(self.buckets, &source.handle, run, wanted));
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

#[cfg(test)]
mod tests {
    use super::*;

    fn rewrite(source: usize, run: usize) -> Step {
        Step::Rewrite { source, run }
    }

    #[test]
    fn without_copies_sources_come_one_after_the_other() {
        let steps = order_of(&[vec![None; 2], vec![], vec![None]], &[]);
        assert_eq!(steps, [rewrite(0, 0), rewrite(0, 1), rewrite(2, 0)]);
    }

    #[test]
    fn a_copy_comes_after_what_is_before_it_in_all_of_its_logs() {
        let logs = [vec![None, Some(0), None, Some(1)], vec![Some(0), None], vec![None, None], vec![Some(1)]];
        let expected = [
            rewrite(0, 0),
            rewrite(2, 0),
            rewrite(2, 1),
            Step::Copy(0),
            rewrite(0, 2),
            rewrite(1, 1),
            Step::Copy(1),
        ];
        assert_eq!(order_of(&logs, &[2, 2]), expected);
    }

    #[test]
    fn of_parts_before_each_other_one_is_rewritten() {
        let steps = order_of(&[vec![Some(0), Some(1)], vec![Some(1), Some(0)]], &[2, 2]);
        assert_eq!(steps, [rewrite(0, 0), Step::Copy(1), rewrite(1, 1)]);
    }
}
