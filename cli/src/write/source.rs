//! Reads and keys the records of all inputs on a thread of its own, so that a slow input holds up no checkpoint.

use std::fs::{self, File};
use std::io::{self, BufReader, Read};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use tidelog::{KeyGroup, KeyGroupRange};

use super::WriteArgs;
use crate::input::{Framing, Records};
use crate::key::{KeySource, key_group};

/// A batch goes out when it holds this many bytes, or when more would have to be waited for.
const BATCH_BYTES: usize = 64 << 10;
/// Batches that may wait for the writer.
const BATCHES_MAX: usize = 8;
const READ_BYTES: usize = 256 << 10;

/// Records with their key groups.
#[derive(Debug, Default)]
pub struct Batch {
    bytes: Vec<u8>,
    /// Where each record ends in the bytes.
    records: Vec<(usize, KeyGroup)>,
}

impl Batch {
    /// The records in order.
    pub fn records(&self) -> impl Iterator<Item = (KeyGroup, &[u8])> {
        let starts = std::iter::once(0).chain(self.records.iter().map(|(end, _)| *end));
        starts.zip(&self.records).map(|(start, (end, key_group))| (*key_group, &self.bytes[start..*end]))
    }
}

/// What comes from the inputs.
#[derive(Debug)]
pub enum Message {
    /// More records.
    Batch(Batch),
    /// All inputs were read to their ends.
    End,
    /// An input could not be read on: why, where, what to do. What came before it is good.
    Failed(String),
}

/// What every record is held against.
#[derive(Clone, Debug)]
struct Rules {
    framing: Framing,
    record_bytes_max: usize,
    key: KeySource,
    separator: u8,
    max_parallelism: u32,
    key_groups: KeyGroupRange,
}

/// Looks whether every input can be read, before anything is made.
///
/// # Errors
/// An input that is missing, a directory, or may not be read, by its name.
pub fn check(files: &[PathBuf]) -> Result<(), String> {
    for file in files.iter().filter(|file| file.as_os_str() != "-") {
        let checked = fs::metadata(file).and_then(|metadata| match metadata.file_type() {
            kind if kind.is_dir() => Err(io::ErrorKind::IsADirectory.into()),
            kind if kind.is_file() => File::open(file).map(drop),
            // Opening a pipe waits for its writer, who may be busy with the input before it.
            _ => Ok(()),
        });
        checked.map_err(|error| cannot_open(file, &error))?;
    }
    Ok(())
}

fn cannot_open(file: &Path, error: &io::Error) -> String {
    format!("cannot open {}: {error}", file.display())
}

/// Starts reading. The thread ends when nobody receives any more, or with the process: an input may never end.
pub fn start(args: &WriteArgs, key_groups: KeyGroupRange) -> io::Result<Receiver<Message>> {
    let rules = Rules {
        framing: args.framing,
        record_bytes_max: args.record_bytes_max as usize,
        key: args.key.clone(),
        separator: args.separator,
        max_parallelism: args.max_parallelism,
        key_groups,
    };
    let mut files = args.files.clone();
    if files.is_empty() {
        files.push(PathBuf::from("-"));
    }
    let (sender, receiver) = sync_channel(BATCHES_MAX);
    std::thread::Builder::new().name("read-input".to_owned()).spawn(move || {
        let last = match files.iter().try_for_each(|file| read_file(file, &rules, &sender)) {
            Ok(()) => Message::End,
            Err(error) => Message::Failed(error),
        };
        // The writer is gone only when it failed, and said so.
        let _ = sender.send(last);
    })?;
    Ok(receiver)
}

fn read_file(file: &Path, rules: &Rules, sender: &SyncSender<Message>) -> Result<(), String> {
    if file.as_os_str() == "-" {
        return read_records("standard input", io::stdin(), rules, sender);
    }
    let opened = File::open(file).map_err(|error| cannot_open(file, &error))?;
    read_records(&file.display().to_string(), opened, rules, sender)
}

fn read_records(
    name: &str,
    input: impl Read,
    rules: &Rules,
    sender: &SyncSender<Message>,
) -> Result<(), String> {
    let reader = BufReader::with_capacity(READ_BYTES, input);
    let mut records = Records::new(reader, rules.framing, rules.record_bytes_max);
    let mut batch = Batch::default();
    let outcome = loop {
        let number = records.number() + 1;
        let record = match records.next_record() {
            Ok(Some(record)) => record,
            Ok(None) => break Ok(()),
            Err(error) => break Err(format!("{name}: {error}")),
        };
        let key = match rules.key.key(record, rules.separator) {
            Ok(key) => key,
            Err(error) => break Err(format!("{name}: record {number} has no key: {error}")),
        };
        let group = key_group(&key, rules.max_parallelism);
        if !rules.key_groups.contains(group) {
            break Err(format!(
                "{name}: record {number} belongs to key group {group}, outside of --key-groups {}",
                rules.key_groups
            ));
        }
        batch.bytes.extend_from_slice(record);
        batch.records.push((batch.bytes.len(), group));
        if batch.bytes.len() >= BATCH_BYTES || records.would_read() {
            let full = std::mem::take(&mut batch);
            if sender.send(Message::Batch(full)).is_err() {
                return Ok(());
            }
        }
    };
    if !batch.records.is_empty() {
        let _ = sender.send(Message::Batch(batch));
    }
    outcome
}
