//! What is kept outside of the log: the newest complete checkpoint, and the snapshots that it names.
//!
//! A checkpoint is a small text file. It says how far the source was, and of what the state consists: parts, each with
//! the key groups that are to be taken from it, a snapshot to begin with, and the handle of the changes since. A rename
//! replaces the last checkpoint by the next one, so there is always exactly one, and it is whole.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use tidelog::{ChangelogHandle, KeyGroupRange, LogId, SequenceNumber};

use super::Failure;

const CHECKPOINT: &str = "checkpoint";
const MAGIC: &str = "nexmark checkpoint 1";

/// Some of the state at the time of a checkpoint.
#[derive(Clone, Debug)]
pub struct Part {
    /// What is to be read of it. Another thread may have had more.
    pub key_groups: KeyGroupRange,
    /// The file with the state at the beginning of the handle. Without it, what earlier parts say of these key groups.
    pub snapshot: Option<String>,
    /// The changes since.
    pub handle: ChangelogHandle,
}

/// A complete checkpoint.
#[derive(Clone, Debug, Default)]
pub struct Checkpoint {
    /// Counted from 1.
    pub id: u64,
    /// The number of the first event that is not in the state.
    pub offset: u64,
    /// In the order in which they are to be read.
    pub parts: Vec<Part>,
}

impl Checkpoint {
    /// The changes of `log` that this checkpoint needs, if any.
    pub fn needs(&self, log: LogId) -> Option<(SequenceNumber, SequenceNumber)> {
        let handles = || self.parts.iter().map(|part| &part.handle).filter(|handle| handle.log() == log);
        Some((handles().map(ChangelogHandle::from).min()?, handles().map(ChangelogHandle::to).max()?))
    }

    fn to_text(&self) -> String {
        let mut text = format!("{MAGIC}\nid {}\noffset {}\n", self.id, self.offset);
        for Part { key_groups, snapshot, handle } in &self.parts {
            let snapshot = snapshot.as_deref().unwrap_or("-");
            let (first, last) = (key_groups.first(), key_groups.last());
            text += &format!("part {first} {last} {snapshot} {}\n", handle.to_json());
        }
        text
    }

    fn from_text(text: &str) -> Result<Checkpoint, Failure> {
        let mut lines = text.lines();
        if lines.next() != Some(MAGIC) {
            return Err("the checkpoint is of another kind or version".into());
        }
        let mut number = |name: &str| -> Result<u64, Failure> {
            let line = lines.next().and_then(|line| line.strip_prefix(name)).ok_or("a line is missing")?;
            Ok(line.trim().parse()?)
        };
        let (id, offset) = (number("id")?, number("offset")?);
        let parts = lines.map(part_from_text).collect::<Result<Vec<Part>, Failure>>()?;
        Ok(Checkpoint { id, offset, parts })
    }
}

fn part_from_text(line: &str) -> Result<Part, Failure> {
    let fields: Vec<&str> = line.splitn(5, ' ').collect();
    let &["part", first, last, snapshot, handle] = &fields[..] else {
        return Err(format!("not a part: {line}").into());
    };
    let key_groups = KeyGroupRange::new(first.parse()?, last.parse()?).ok_or("a part has no key groups")?;
    let snapshot = (snapshot != "-").then(|| snapshot.to_owned());
    Ok(Part { key_groups, snapshot, handle: ChangelogHandle::from_json(handle)? })
}

/// The folder of the checkpoint and its snapshots. With several machines it would be on storage that all of them reach.
#[derive(Clone, Debug)]
pub struct Folder(PathBuf);

impl Folder {
    /// Makes it if it is missing.
    pub fn open(path: &Path) -> io::Result<Folder> {
        fs::create_dir_all(path)?;
        Ok(Folder(path.to_owned()))
    }

    /// The newest complete checkpoint, if there is one.
    pub fn newest(&self) -> Result<Option<Checkpoint>, Failure> {
        match fs::read_to_string(self.0.join(CHECKPOINT)) {
            Ok(text) => Checkpoint::from_text(&text).map(Some),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Makes `checkpoint` the newest one: when this returns, it is, whatever happens to the machine.
    pub fn complete(&self, checkpoint: &Checkpoint) -> io::Result<()> {
        self.write(CHECKPOINT, checkpoint.to_text().as_bytes())
    }

    /// Writes a snapshot, durably.
    pub fn write(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        let unfinished = self.0.join(format!("{name}.unfinished"));
        let mut file = File::create(&unfinished)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        fs::rename(unfinished, self.0.join(name))?;
        File::open(&self.0)?.sync_all()
    }

    /// The bytes of a snapshot.
    pub fn read(&self, name: &str) -> Result<Vec<u8>, Failure> {
        fs::read(self.0.join(name)).map_err(|error| format!("snapshot {name}: {error}").into())
    }

    /// Removes what `checkpoint` does not name: snapshots that were replaced, or never became part of a checkpoint.
    pub fn remove_all_but(&self, checkpoint: &Checkpoint) -> io::Result<()> {
        for entry in fs::read_dir(&self.0)? {
            let (path, name) = entry.map(|entry| (entry.path(), entry.file_name()))?;
            let named = checkpoint.parts.iter().filter_map(|part| part.snapshot.as_deref());
            if name != CHECKPOINT && !named.into_iter().any(|snapshot| name == snapshot) {
                fs::remove_file(path)?;
            }
        }
        Ok(())
    }
}
