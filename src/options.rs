//! What a changelog can be told, each option with its unit, default and reason. Checked once, at open; whether buckets and
//! directories go together is in options/places.rs.

mod places;

use std::path::PathBuf;
use std::time::Duration;

pub use tidelog_io::disk::Durability;
pub use tidelog_io::engine::EngineChoice;

pub use tidelog_upload::{HedgeOptions, UploadOptions};

pub use crate::part::Compression;
use crate::retention::Keep;
pub(crate) use places::{check_bucket, check_names, check_places, resolved};

const MIB: usize = 1 << 20;
/// Fewer would leave more blocks short, more would let parts and objects grow far beyond their size.
const CHAIN_BLOCKS_MAX: usize = 8;
/// Segments that are not kept for local restores: one that is open, the next one, and one more.
const SEGMENTS_FREE: usize = 3;
/// More than a block that holds a piece of one value has beside it.
const BLOCK_OVERHEAD_BYTES: usize = 512;
/// Longer waits are mistakes, and the ends of some could not be told by any clock.
const WAIT_MAX: Duration = Duration::from_secs(365 * 24 * 3600);
/// An object that was open for as long as one may be, waits for those before it, and then for its own commit: a sweep must
/// not take it for a dead owner's (src/sweep.rs).
pub(crate) const PERSIST_TIMEOUT_MAX: Duration = Duration::from_secs(6 * 3600);

/// The options of a [`Changelog`](crate::Changelog): two that matter, the rest with defaults.
///
/// ```
/// use std::time::Duration;
/// let options = tidelog::Options::new("file:///var/lib/tidelog/bucket", "/mnt/nvme0/tidelog")
///     .linger(Duration::from_millis(5))
///     .local_bytes(8 << 30);
/// # let _ = options;
/// ```
#[derive(Clone, Debug)]
pub struct Options {
    pub(crate) buckets: Vec<String>,
    pub(crate) directories: Vec<PathBuf>,
    pub(crate) group: String,
    pub(crate) name_prefix: String,
    pub(crate) hash_prefix: bool,
    pub(crate) uploads: UploadOptions,
    pub(crate) persist_timeout: Duration,
    pub(crate) engine: EngineChoice,
    pub(crate) durability: Durability,
    pub(crate) lane_bytes: usize,
    pub(crate) append_wait_max: Duration,
    pub(crate) linger: Duration,
    pub(crate) block_bytes: usize,
    pub(crate) writes_in_flight: usize,
    pub(crate) segment_bytes: u64,
    pub(crate) local_bytes: u64,
    pub(crate) object_bytes_max: Option<u64>,
    pub(crate) local_retention_bytes: Option<u64>,
    pub(crate) memory_bytes: usize,
    pub(crate) value_bytes_max: usize,
    pub(crate) part_bytes: usize,
    pub(crate) compression: Compression,
    pub(crate) batch_delay: Duration,
    pub(crate) preemptive_upload: bool,
    pub(crate) runtime: UploadRuntime,
}

/// Where uploads run.
#[derive(Clone, Debug, Default)]
pub enum UploadRuntime {
    /// On two threads of tidelog's own.
    #[default]
    Own,
    /// On the caller's tokio runtime, which must be multi-threaded: a current-thread one would deadlock, and is refused
    /// at open. It has to run until the changelog is closed: when it is shut down before, persists fail with
    /// [`RuntimeEnded`](crate::PersistError::RuntimeEnded).
    Handle(tidelog_upload::RuntimeHandle),
}

/// An option whose value cannot work, and what would.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("option {option}: {value} does not work: {remedy}")]
pub struct OptionError {
    /// The name of the option.
    pub option: &'static str,
    /// The value it was given.
    pub value: String,
    /// What it may be.
    pub remedy: String,
}

impl Options {
    /// A changelog whose objects go to `bucket` (a URL: `s3://bucket/prefix`, `file:///absolute/directory`), and whose
    /// segments stand in `directory`, on a local disk. A bucket that is a directory, too, is apart from that one: neither in
    /// it nor around it. The URL has at most 2048 bytes.
    pub fn new(bucket: impl Into<String>, directory: impl Into<PathBuf>) -> Options {
        Options {
            buckets: vec![bucket.into()],
            directories: vec![directory.into()],
            group: "tidelog".to_owned(),
            name_prefix: String::new(),
            hash_prefix: false,
            uploads: UploadOptions::default(),
            persist_timeout: Duration::from_secs(600),
            engine: EngineChoice::Auto,
            durability: Durability::Power,
            lane_bytes: 4 * MIB,
            append_wait_max: Duration::from_secs(10),
            linger: Duration::from_millis(10),
            block_bytes: 256 << 10,
            writes_in_flight: 32,
            segment_bytes: 256 << 20,
            local_bytes: 4 << 30,
            object_bytes_max: None,
            local_retention_bytes: None,
            memory_bytes: 256 * MIB,
            value_bytes_max: 16 * MIB,
            part_bytes: 8 * MIB,
            compression: Compression::None,
            batch_delay: Duration::from_millis(5),
            preemptive_upload: true,
            runtime: UploadRuntime::Own,
        }
    }

    /// One more local directory, best on a device of its own: each gets its own spiller, and writers spread over them.
    #[must_use]
    pub fn add_directory(mut self, directory: impl Into<PathBuf>) -> Options {
        self.directories.push(directory.into());
        self
    }

    /// One more bucket, by its URL. Objects are placed in one of them, drawn at the open, for as long as its requests go well,
    /// be it slower than others or not; parts that are late there, and objects for some time after a failure or a late part,
    /// go to another. So the buckets should fail independently of each other: in other zones or regions, or of other
    /// providers.
    #[must_use]
    pub fn add_bucket(mut self, bucket: impl Into<String>) -> Options {
        self.buckets.push(bucket.into());
        self
    }

    /// How uploads use the network and when they race, see [`UploadOptions`]. Its `budget_bytes`, `part_bytes` and
    /// `object_timeout` are not taken: the [memory budget](Self::memory_bytes), [`part_bytes`](Self::part_bytes) and
    /// [`persist_timeout`](Self::persist_timeout) say them. What [`UploadOptions::check`] refuses is refused at open.
    #[must_use]
    pub fn uploads(mut self, uploads: UploadOptions) -> Options {
        self.uploads = uploads;
        self
    }

    /// How long a persist may take from the call to its handle, whatever is tried meanwhile: 10 minutes, after which Flink
    /// too declares a checkpoint failed (`execution.checkpointing.timeout`). More than zero, at most 6 hours: a
    /// [`Sweeper`](crate::Sweeper) takes unfinished uploads that are older than a day for a dead owner's.
    #[must_use]
    pub fn persist_timeout(mut self, timeout: Duration) -> Options {
        self.persist_timeout = timeout;
        self
    }

    /// What every object's name begins with, before the group: nothing. Parts between `/` of letters, digits, `-`, `_`,
    /// `=` and `.`, each of at most 240 bytes and not beginning with `.`; at most 512 bytes.
    #[must_use]
    pub fn name_prefix(mut self, prefix: impl Into<String>) -> Options {
        self.name_prefix = prefix.into();
        self
    }

    /// Whether two hexadecimal characters of a hash stand before the group in every object's name: no. S3 limits requests
    /// by prefix (3,500 writes a second each, as its documentation says in 2025), so many nodes that share one do better
    /// when their objects are spread.
    #[must_use]
    pub fn hash_prefix(mut self, hash: bool) -> Options {
        self.hash_prefix = hash;
        self
    }

    /// The last folder of every object's name: `tidelog`. Letters, digits, `-`, `_` and `.`; 1 to 64 of them, the
    /// first not `.`.
    #[must_use]
    pub fn group(mut self, group: impl Into<String>) -> Options {
        self.group = group.into();
        self
    }

    /// Which engine writes segments: `Auto` takes io_uring where it works, else threads with `pwritev2`.
    #[must_use]
    pub fn engine(mut self, engine: EngineChoice) -> Options {
        self.engine = engine;
        self
    }

    /// What [`sync`](crate::ChangelogWriter::sync) promises: with `Power` (the default) that changes survive power loss,
    /// with `Process` that they survive the process.
    #[must_use]
    pub fn durability(mut self, durability: Durability) -> Options {
        self.durability = durability;
        self
    }

    /// The ring of one appending thread, in bytes: 4 MiB, a power of two from 64 KiB to 64 MiB. Larger rings absorb longer
    /// stalls of the disk, smaller ones stay in the cache.
    #[must_use]
    pub fn lane_bytes(mut self, bytes: usize) -> Options {
        self.lane_bytes = bytes;
        self
    }

    /// How long [`append`](crate::ChangelogWriter::append) waits for room before it says `Full`: 10 s; from zero to a year.
    #[must_use]
    pub fn append_wait_max(mut self, wait: Duration) -> Options {
        self.append_wait_max = wait;
        self
    }

    /// How long a partly filled block waits for more changes before it is written all the same: 10 ms.
    #[must_use]
    pub fn linger(mut self, linger: Duration) -> Options {
        self.linger = linger;
        self
    }

    /// The unit of local writes, in bytes: 256 KiB, a multiple of 4096 from 8 KiB to 1 MiB. Below 128 KiB throughput
    /// falls, above 512 KiB requests are split by the kernel.
    #[must_use]
    pub fn block_bytes(mut self, bytes: usize) -> Options {
        self.block_bytes = bytes;
        self
    }

    /// Local writes in flight: 32, from 1 to 256. The spiller fills blocks between looking for completions; sixteen keep a
    /// fast device busy only if they are reaped at once. A depth below 8 loses badly on a busy machine.
    #[must_use]
    pub fn writes_in_flight(mut self, depth: usize) -> Options {
        self.writes_in_flight = depth;
        self
    }

    /// The size of a segment file in bytes: 256 MiB, a multiple of 4096, at least two blocks, at most 64 GiB.
    #[must_use]
    pub fn segment_bytes(mut self, bytes: u64) -> Options {
        self.segment_bytes = bytes;
        self
    }

    /// How much of each local directory segments may take, in bytes: 4 GiB, at least two segments. At that limit the
    /// changes held are uploaded without being asked for; until that makes room, appends wait.
    #[must_use]
    pub fn local_bytes(mut self, bytes: u64) -> Options {
        self.local_bytes = bytes;
        self
    }

    /// How many bytes the objects may have that this changelog owns, over all buckets: unlimited, by default; else more than
    /// zero. At that limit appends are refused with [`ObjectQuota`](crate::AppendError::ObjectQuota) until truncations, or
    /// holders that are released, have let objects be deleted; persists of what was appended go on, so the limit may be
    /// passed by what is on the local disk then. A warning and the metric `tidelog_quota_alarm` come at 80 % of it. Without
    /// a limit `tidelog_owned_object_bytes` alone shows a log that nobody truncates.
    #[must_use]
    pub fn object_bytes_max(mut self, bytes: u64) -> Options {
        self.object_bytes_max = Some(bytes);
        self
    }

    /// How much of each local directory may hold changes that are in objects already, in bytes, so that a
    /// [`restore`](crate::Changelog::restore) reads them from there: a quarter of [`local_bytes`](Self::local_bytes). Whole
    /// segments are kept, the newest ones, and three always stay free; when appends need the room, they get it at once, so
    /// it costs no room, but time at the next open, which reads all that is kept. 0 keeps nothing longer than it is needed.
    #[must_use]
    pub fn local_retention_bytes(mut self, bytes: u64) -> Options {
        self.local_retention_bytes = Some(bytes);
        self
    }

    /// The memory budget in bytes: 256 MiB. A quarter each for lanes, for blocks that wait for upload, for uploads and
    /// for values too large for a lane; the spiller's own blocks (twice the writes in flight and four more) come on top.
    /// At least four [parts](Self::part_bytes), four [lanes](Self::lane_bytes) for each directory, and sixteen of the
    /// smallest parts that the buckets take: 80 MiB for S3.
    #[must_use]
    pub fn memory_bytes(mut self, bytes: usize) -> Options {
        self.memory_bytes = bytes;
        self
    }

    /// The largest value that can be appended, in bytes: 16 MiB, at most a quarter of the memory budget, below 1 GiB. Where
    /// [`local_bytes`](Self::local_bytes) is so small that such a value might not fit beside what is there already, it is
    /// less.
    #[must_use]
    pub fn value_bytes_max(mut self, bytes: usize) -> Options {
        self.value_bytes_max = bytes;
        self
    }

    /// The size of a part of an object, in bytes: 8 MiB, at least two blocks, at most 1 GiB.
    #[must_use]
    pub fn part_bytes(mut self, bytes: usize) -> Options {
        self.part_bytes = bytes;
        self
    }

    /// Whether parts are compressed: not, by default.
    #[must_use]
    pub fn compression(mut self, compression: Compression) -> Options {
        self.compression = compression;
        self
    }

    /// How long the first writer that asks for a checkpoint waits for the others to share its object: 5 ms at most; it is
    /// cut earlier when all open writers have asked.
    #[must_use]
    pub fn batch_delay(mut self, delay: Duration) -> Options {
        self.batch_delay = delay;
        self
    }

    /// Whether full parts go out before a checkpoint asks for them: yes. Without it a checkpoint uploads all that is new,
    /// but changes that are truncated before any checkpoint are never sent.
    #[must_use]
    pub fn preemptive_upload(mut self, preemptive: bool) -> Options {
        self.preemptive_upload = preemptive;
        self
    }

    /// Where uploads run: on threads of tidelog's own.
    #[must_use]
    pub fn runtime(mut self, runtime: UploadRuntime) -> Options {
        self.runtime = runtime;
        self
    }

    /// The share of the memory budget that each of its four users has.
    pub(crate) fn memory_share(&self) -> usize {
        self.memory_bytes / 4
    }

    /// How many lanes each device may have; threads beyond them share one.
    pub(crate) fn lanes_max(&self) -> usize {
        (self.memory_share() / self.directories.len() / self.lane_bytes).max(1)
    }

    /// Buffers that the spiller of a device has for itself, whatever uploads hold.
    pub(crate) fn spill_blocks(&self) -> usize {
        2 * self.writes_in_flight + 4
    }

    /// Buffers of a device that may wait for their upload in memory.
    pub(crate) fn upload_blocks(&self) -> usize {
        (self.memory_share() / self.directories.len() / self.block_bytes).max(2)
    }

    /// What the driver is told of uploads.
    pub(crate) fn upload_options(&self) -> UploadOptions {
        let mut uploads = self.uploads.clone();
        uploads.budget_bytes = self.memory_share() as u64;
        uploads.part_bytes = self.part_bytes as u64;
        uploads.object_timeout = self.persist_timeout;
        uploads
    }

    /// How many blocks in a row may end within a change before one is made to end with it.
    pub(crate) fn chain_blocks_max(&self) -> usize {
        let local_blocks = u64::from(self.segments_max()) * self.segment_blocks();
        let share = usize::try_from(local_blocks / 8).unwrap_or(usize::MAX);
        CHAIN_BLOCKS_MAX.min(self.writes_in_flight).min(share).max(1)
    }

    fn segment_blocks(&self) -> u64 {
        self.segment_bytes / self.block_bytes as u64
    }

    /// The largest value that can be appended. Its blocks must find room when only the blocks that it hangs together with
    /// cannot be released.
    pub(crate) fn value_len_max(&self) -> usize {
        let free_blocks = u64::from(self.segments_max() - 1) * self.segment_blocks();
        let value_blocks = free_blocks.saturating_sub(self.chain_blocks_max() as u64).max(1);
        let room = value_blocks.saturating_mul((self.block_bytes - BLOCK_OVERHEAD_BYTES) as u64);
        self.value_bytes_max.min(usize::try_from(room).unwrap_or(usize::MAX))
    }

    /// What is kept of segments for local restores.
    pub(crate) fn keep(&self) -> Keep {
        let bytes = self.local_retention_bytes.unwrap_or(self.local_bytes / 4);
        let segments = |bytes: u64| usize::try_from(bytes / self.segment_bytes).unwrap_or(usize::MAX);
        let uses_max = (self.segments_max() as usize).saturating_sub(SEGMENTS_FREE);
        Keep { settled_max: segments(bytes).min(uses_max), uses_max, needed_from: 0 }
    }

    pub(crate) fn segments_max(&self) -> u32 {
        u32::try_from(self.local_bytes / self.segment_bytes).unwrap_or(u32::MAX)
    }

    /// Says what cannot work of names of objects and of the time that they may take, by the names that these options have.
    pub(crate) fn check_objects(
        &self,
        timeout: &'static str,
        prefix: &'static str,
    ) -> Result<(), OptionError> {
        must(
            !self.persist_timeout.is_zero() && self.persist_timeout <= PERSIST_TIMEOUT_MAX,
            timeout,
            format!("{:?}", self.persist_timeout),
            "more than zero, at most 6 hours: `tidelog sweep` takes unfinished uploads older than a day for a dead owner's",
        )?;
        check_prefix(prefix, &self.name_prefix)?;
        check_group(&self.group)
    }

    /// Says what cannot work whatever the places are, before anything is touched.
    pub(crate) fn check(&self) -> Result<(), OptionError> {
        self.check_objects("persist_timeout", "name_prefix")?;
        let waits = [
            ("append_wait_max", self.append_wait_max),
            ("linger", self.linger),
            ("batch_delay", self.batch_delay),
        ];
        for (option, wait) in waits {
            must(wait <= WAIT_MAX, option, format!("{wait:?}"), "at most a year")?;
        }
        must(
            self.lane_bytes.is_power_of_two() && (64 << 10..=64 * MIB).contains(&self.lane_bytes),
            "lane_bytes",
            self.lane_bytes,
            "a power of two from 64 KiB to 64 MiB",
        )?;
        must(
            self.block_bytes.is_multiple_of(4096) && (8 << 10..=MIB).contains(&self.block_bytes),
            "block_bytes",
            self.block_bytes,
            "a multiple of 4096 from 8 KiB to 1 MiB",
        )?;
        must(
            (1..=256).contains(&self.writes_in_flight),
            "writes_in_flight",
            self.writes_in_flight,
            "1 to 256",
        )?;
        must(
            self.segment_bytes.is_multiple_of(4096)
                && self.segment_bytes >= 2 * self.block_bytes as u64
                && self.segment_bytes <= 64 << 30,
            "segment_bytes",
            self.segment_bytes,
            "a multiple of 4096, at least two blocks, at most 64 GiB",
        )?;
        must(self.segments_max() >= 2, "local_bytes", self.local_bytes, "at least two segments")?;
        must(self.object_bytes_max != Some(0), "object_bytes_max", 0, "at least one byte")?;
        must(
            self.part_bytes >= 2 * self.block_bytes && self.part_bytes <= 1 << 30,
            "part_bytes",
            self.part_bytes,
            "at least two blocks, at most 1 GiB",
        )?;
        must(
            self.memory_share() >= self.part_bytes.max(self.lane_bytes * self.directories.len()),
            "memory_bytes",
            self.memory_bytes,
            "at least four times a part, and four times a lane for each directory",
        )?;
        must(
            (1..=self.memory_share()).contains(&self.value_bytes_max) && self.value_bytes_max < 1 << 30,
            "value_bytes_max",
            self.value_bytes_max,
            "1 byte to a quarter of the memory budget, below 1 GiB",
        )?;
        self.upload_options().check().map_err(|error| OptionError {
            option: error.option,
            value: error.value,
            remedy: error.remedy.to_owned(),
        })
    }
}

/// Says what cannot work of what names of objects begin with.
pub(crate) fn check_prefix(option: &'static str, prefix: &str) -> Result<(), OptionError> {
    let sound = |part: &str| {
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '=' | '.');
        !part.is_empty() && part.len() <= 240 && part.chars().all(plain) && !part.starts_with('.')
    };
    must(
        prefix.is_empty() || prefix.len() <= 512 && prefix.split('/').all(sound),
        option,
        prefix,
        "parts of letters, digits, '-', '_', '=' and '.' between '/', none beginning with '.' or longer than 240 bytes, at \
         most 512 bytes",
    )
}

/// Says what cannot work of the last folder of names.
pub(crate) fn check_group(group: &str) -> Result<(), OptionError> {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    must(
        (1..=64).contains(&group.len()) && group.chars().all(plain) && !group.starts_with('.'),
        "group",
        group,
        "1 to 64 letters, digits, '-', '_' and '.', not beginning with '.'",
    )
}

/// Refuses a value that cannot work.
pub(crate) fn must(
    holds: bool,
    option: &'static str,
    value: impl ToString,
    remedy: &str,
) -> Result<(), OptionError> {
    if holds {
        Ok(())
    } else {
        Err(OptionError { option, value: value.to_string(), remedy: remedy.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_work() {
        let options = Options::new("file:///b", "/d");
        assert_eq!(options.check(), Ok(()));
        assert_eq!(options.persist_timeout(PERSIST_TIMEOUT_MAX).check(), Ok(()));
    }

    #[test]
    fn what_cannot_work_is_named() {
        let options = || Options::new("file:///b", "/d");
        let stalled = || {
            let mut uploads = UploadOptions::default();
            uploads.hedging.stall_timeout = Duration::MAX;
            uploads
        };
        for (bad, name) in [
            (options().group("a/b"), "group"),
            (options().persist_timeout(Duration::ZERO), "persist_timeout"),
            (options().persist_timeout(Duration::MAX), "persist_timeout"),
            (options().persist_timeout(PERSIST_TIMEOUT_MAX + Duration::from_nanos(1)), "persist_timeout"),
            (options().append_wait_max(Duration::MAX), "append_wait_max"),
            (options().linger(Duration::MAX), "linger"),
            (options().batch_delay(Duration::MAX), "batch_delay"),
            (options().name_prefix("a//b"), "name_prefix"),
            (options().name_prefix("../b"), "name_prefix"),
            (options().lane_bytes(100_000), "lane_bytes"),
            (options().block_bytes(5000), "block_bytes"),
            (options().writes_in_flight(0), "writes_in_flight"),
            (options().segment_bytes(1 << 18), "segment_bytes"),
            (options().local_bytes(1 << 28), "local_bytes"),
            (options().object_bytes_max(0), "object_bytes_max"),
            (options().part_bytes(1), "part_bytes"),
            (options().memory_bytes(1 << 20), "memory_bytes"),
            (options().value_bytes_max(1 << 29), "value_bytes_max"),
            (options().uploads(stalled()), "stall_timeout"),
        ] {
            let error = bad.check().unwrap_err();
            assert_eq!(error.option, name);
            assert!(!error.remedy.is_empty());
        }
    }
}
