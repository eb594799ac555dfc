//! Where a changelog keeps its data, and how: the arguments that `write` and `bench` share, and the options they make.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use tidelog::{Compression, Durability, EngineChoice, EngineInfo, HedgeOptions, Options, UploadOptions};

use crate::parse_bytes;

/// Where a changelog keeps its data.
#[derive(Args, Clone, Debug)]
pub struct Places {
    /// A local directory for segments; give one for each disk.
    #[arg(long = "dir", value_name = "DIR", default_value = "tidelog-data")]
    pub dirs: Vec<PathBuf>,
    /// Where checkpoints go, as s3://bucket/prefix or file:///an/absolute/directory. May be given more than once: what is
    /// late in one bucket is sent to another.
    #[arg(long = "bucket", value_name = "URL", required = true, value_parser = parse_bucket)]
    pub buckets: Vec<String>,
}

/// How a changelog keeps its data.
#[derive(Args, Clone, Debug)]
pub struct Tuning {
    /// What writes the local disk.
    #[arg(long, value_enum, default_value = "auto")]
    pub engine: Engine,
    /// What a sync survives.
    #[arg(long, value_enum, default_value = "power")]
    pub durability: Survives,
    /// Whether parts of objects are compressed.
    #[arg(long, value_enum, default_value = "none")]
    pub compression: Packing,
    /// Never sends late parts a second time; they are only tried again after a failure. A bucket that answers nothing is
    /// then left for another one only when a request to it has timed out, which takes a minute and more instead of a second.
    #[arg(long)]
    pub no_hedging: bool,
    /// The length of a local segment file in bytes (K, M, G).
    #[arg(long, value_name = "BYTES", default_value = "256M", value_parser = parse_bytes)]
    pub segment_bytes: u64,
    /// How much of each local directory segments may take, in bytes (K, M, G); at least two segments.
    #[arg(long, value_name = "BYTES", default_value = "4G", value_parser = parse_bytes)]
    pub local_bytes: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Engine {
    /// io_uring where it works, else pwritev2.
    Auto,
    /// io_uring or an error.
    IoUring,
    /// Threads that call pwritev2.
    Pwritev2,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Survives {
    /// The loss of power.
    Power,
    /// The end of the process only.
    Process,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Packing {
    /// No.
    None,
    /// Each changeset by LZ4, where that makes it smaller.
    Lz4,
}

/// A bucket that outlives the process.
fn parse_bucket(text: &str) -> Result<String, String> {
    let why = match text.split_once("://") {
        Some(("s3" | "gs" | "az" | "hdfs", _)) => return Ok(text.to_owned()),
        Some(("file", path)) if path.starts_with('/') => return Ok(text.to_owned()),
        Some(("memory", _)) => "nothing in memory outlives the process; ",
        _ => "",
    };
    Err(format!("{why}give s3://bucket/prefix, another store's URL, or file:///an/absolute/directory"))
}

impl Tuning {
    /// The options of a changelog in these places.
    pub fn options(&self, buckets: &[String], dirs: &[PathBuf]) -> Options {
        let engine = match self.engine {
            Engine::Auto => EngineChoice::Auto,
            Engine::IoUring => EngineChoice::IoUring,
            Engine::Pwritev2 => EngineChoice::Pwritev2,
        };
        let durability = match self.durability {
            Survives::Power => Durability::Power,
            Survives::Process => Durability::Process,
        };
        let compression = match self.compression {
            Packing::None => Compression::None,
            Packing::Lz4 => Compression::Lz4,
        };
        let (first, rest) = dirs.split_first().expect("clap gives at least the default directory");
        let (home, others) = buckets.split_first().expect("clap demands a bucket");
        let mut uploads = UploadOptions::default();
        if self.no_hedging {
            uploads.hedging = HedgeOptions::off();
        }
        let options = rest.iter().fold(Options::new(home, first), |options, dir| options.add_directory(dir));
        others
            .iter()
            .fold(options, |options, bucket| options.add_bucket(bucket))
            .uploads(uploads)
            .engine(engine)
            .durability(durability)
            .compression(compression)
            .segment_bytes(self.segment_bytes)
            .local_bytes(self.local_bytes)
    }
}

/// What writes the local directories, in a few words.
pub fn engine_name(engines: &[EngineInfo]) -> String {
    let mut names: Vec<String> = engines
        .iter()
        .map(|info| {
            let mut name = info.engine.to_owned();
            name += if info.direct { ", O_DIRECT" } else { ", through the page cache" };
            if info.registered {
                name += ", registered buffers";
            }
            name
        })
        .collect();
    names.dedup();
    names.join("; ")
}

/// Refuses a local bucket that does not exist: opening it to read would make it.
pub fn check_bucket(url: &str) -> Result<(), String> {
    match tidelog_upload::bucket_directory(url) {
        Some(path) if !path.is_dir() => Err(format!(
            "bucket {url}: there is no such directory; it was moved, or belongs to another machine"
        )),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_local_bucket_that_is_not_there_is_not_made() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("a b")).unwrap();
        let url = |name: &str| format!("file://{}/{name}", dir.path().display());
        assert_eq!(check_bucket(&url("a%20b")), Ok(()));
        assert!(check_bucket(&url("b%20a")).is_err());
        assert_eq!(check_bucket("s3://bucket"), Ok(()));
    }
}
