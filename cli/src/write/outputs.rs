//! What `write` leaves for others to rely on: handles, and acknowledgements. Other commands append to files in the same way.

use std::collections::{BTreeSet, HashMap};
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use tidelog::{ChangelogHandle, LogId, SequenceNumber};

use crate::{Failure, handles};

/// Where handles go: standard output, and a file.
#[derive(Debug)]
pub struct Handles {
    file: Option<Appended>,
    count: u64,
    buckets: BTreeSet<String>,
    before: HashMap<LogId, SequenceNumber>,
}

impl Handles {
    /// Opens the file, if there is one. A line that an earlier run did not finish is cut off: nobody was told of it.
    ///
    /// # Errors
    /// It cannot be read or appended to, or holds something else.
    pub fn open(path: Option<&Path>) -> Result<Handles, Failure> {
        let mut handles = Handles { file: None, count: 0, buckets: BTreeSet::new(), before: HashMap::new() };
        let Some(path) = path else { return Ok(handles) };
        let file = Appended::open(path)?;
        for handle in file.cut_to_whole_handles()? {
            let end = handles.before.entry(handle.log()).or_insert(handle.to());
            *end = handle.to().max(*end);
        }
        handles.file = Some(file);
        Ok(handles)
    }

    /// The end of what handles of earlier runs, in the file, stand for.
    pub fn end_before(&self, log: LogId) -> SequenceNumber {
        self.before.get(&log).copied().unwrap_or_default()
    }

    /// How many were given out.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// The buckets that they name.
    pub fn buckets(&self) -> impl Iterator<Item = &str> {
        self.buckets.iter().map(String::as_str)
    }

    /// Gives a handle out: to the file durably, then to standard output.
    ///
    /// # Errors
    /// The handle reached nobody who may rely on it.
    pub fn give(&mut self, handle: &ChangelogHandle) -> Result<(), Failure> {
        let mut line = handle.to_json();
        line.push('\n');
        if let Some(file) = &mut self.file {
            file.append_durably(line.as_bytes())?;
        }
        let mut out = io::stdout().lock();
        match out.write_all(line.as_bytes()).and_then(|()| out.flush()) {
            Ok(()) => {}
            // Whoever has the file can do without.
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe && self.file.is_some() => {}
            Err(error) => {
                return Err(Failure::new(format!(
                    "the handle of changes {} to {} could not be printed: {error}; the changes are kept, \
                     --recover persist gives their handle at the next start",
                    handle.from(),
                    handle.to()
                )));
            }
        }
        self.count += 1;
        self.buckets.extend(handle.objects().map(|(bucket, _)| bucket.to_owned()));
        Ok(())
    }
}

/// Tells how many records are durable, a line each time: who reads it after a crash knows what must be there.
#[derive(Debug)]
pub struct Acknowledgements {
    file: Option<Appended>,
    last: SequenceNumber,
}

impl Acknowledgements {
    /// Opens the file, if there is one.
    ///
    /// # Errors
    /// It cannot be appended to.
    pub fn open(path: Option<&Path>) -> Result<Acknowledgements, Failure> {
        Ok(Acknowledgements { file: path.map(Appended::open).transpose()?, last: SequenceNumber::ZERO })
    }

    /// All records below `durable` are on the local disk.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn acknowledge(&mut self, durable: SequenceNumber) -> Result<(), Failure> {
        if durable <= self.last {
            return Ok(());
        }
        self.last = durable;
        match &mut self.file {
            // One write, so that a line is there whole or not at all when this process is killed.
            Some(file) => file.append(format!("{durable}\n").as_bytes()),
            None => Ok(()),
        }
    }
}

/// A file that is appended to.
#[derive(Debug)]
pub struct Appended {
    path: PathBuf,
    file: File,
}

impl Appended {
    /// Opens the file, or makes it.
    ///
    /// # Errors
    /// It cannot be appended to.
    pub fn open(path: &Path) -> Result<Appended, Failure> {
        let failed = |error| Failure::new(format!("cannot append to {}: {error}", path.display()));
        let file = OpenOptions::new().read(true).append(true).create(true).open(path).map_err(failed)?;
        let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        // The file may be new: its name has to survive as well.
        File::open(parent).and_then(|parent| parent.sync_all()).map_err(failed)?;
        Ok(Appended { path: path.to_owned(), file })
    }

    /// Whether nothing is in it.
    ///
    /// # Errors
    /// It cannot be looked at.
    pub fn is_empty(&self) -> Result<bool, Failure> {
        let data = self.file.metadata();
        let data =
            data.map_err(|error| Failure::new(format!("cannot read {}: {error}", self.path.display())))?;
        Ok(data.len() == 0)
    }

    /// The handles in the file; what a crash left of one more is cut off.
    fn cut_to_whole_handles(&self) -> Result<Vec<ChangelogHandle>, Failure> {
        const BEGIN: &[u8] = br#"{"format":"tidelog-handle""#;
        let name = self.path.display().to_string();
        let io_failed = |error: io::Error| Failure::new(format!("cannot read {name}: {error}"));
        let mut bytes = Vec::new();
        (&self.file).read_to_end(&mut bytes).map_err(io_failed)?;
        let whole_len = bytes.iter().rposition(|&byte| byte == b'\n').map_or(0, |at| at + 1);
        let (whole, rest) = bytes.split_at(whole_len);
        let found = handles::read_from(&name, whole).map_err(Failure::new)?;
        // Whatever is no handle is not ours to cut.
        if !rest.starts_with(BEGIN) && !BEGIN.starts_with(rest) {
            return Err(Failure::new(format!("{name} holds something else than handles: give another file")));
        }
        if !rest.is_empty() {
            self.file.set_len(whole_len as u64).map_err(io_failed)?;
            tracing::warn!("{name}: {} bytes of an unfinished line were cut off", rest.len());
        }
        Ok(found)
    }

    fn append(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        self.file
            .write_all(bytes)
            .map_err(|error| Failure::new(format!("cannot append to {}: {error}", self.path.display())))
    }

    /// Appends bytes that survive a power cut after that.
    ///
    /// # Errors
    /// The file cannot be written; some of the bytes may be there.
    pub fn append_durably(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        self.append(bytes)?;
        self.file
            .sync_data()
            .map_err(|error| Failure::new(format!("cannot append to {}: {error}", self.path.display())))
    }
}
