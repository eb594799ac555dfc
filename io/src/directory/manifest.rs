//! The manifest file: opaque records, appended durably in batches, or written anew at once.
//!
//! ```text
//! header  magic 8 | version u32 | zero u32 | directory id u64 | intact bytes u64 | xxh3-64 of these
//! batch   payload bytes u32 | index u64 | xxh3-64 over directory id, payload bytes, index, payload | payload
//! payload records: length u32, bytes
//! ```
//! All numbers are little-endian. A batch is one append, so it is there whole or torn; the next is appended only after
//! it was durable. Hence a bad batch that another follows, or one among the `intact bytes` written at once, is damage,
//! and any other is the torn end of an append that nobody was told of.
//!
//! So that what was durable is always followed, each append leaves a batch without records behind its own, its *witness*.
//! That one is not synced: a power cut may take it, and a damaged last batch reads as a torn append then.
//!
//! Beside the manifest lies a file of zeros, the *reserve*. On a full file system a successor gets its room, and another one
//! is made of what the predecessor leaves: who has no room for anything else can still open, and record what makes some.

use std::io;
use std::sync::Arc;

use std::hash::Hasher as _;
use twox_hash::XxHash3_64;

use crate::disk::Files;

/// Name of the manifest's file.
pub const MANIFEST_NAME: &str = "MANIFEST";
/// Name of the file that keeps room for the manifest's successor. What is in it means nothing.
pub const RESERVE_NAME: &str = "RESERVE";

const MAGIC: [u8; 8] = *b"tidelogM";
const VERSION: u32 = 1;
const HEADER_BYTES: usize = 40;
const BATCH_HEADER_BYTES: usize = 20;
const RECORD_LEN_BYTES: usize = 4;
const RECORD_BYTES_MAX: usize = 1 << 20;
const PAYLOAD_BYTES_MAX: usize = 4 << 20;
const FILE_BYTES_MAX: usize = 1 << 30;
/// The reserve has room for so much beyond twice the manifest.
const RESERVE_BYTES_MIN: u64 = 64 << 10;
/// How many times a checksum is tried, at most, in the search for a batch behind a bad one.
const CANDIDATES_MAX: usize = 1024;

/// Why a manifest cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ManifestError {
    /// Not the file that was expected.
    #[error(
        "{MANIFEST_NAME} does not begin as a tidelog manifest does, but with {found:02x?}: it is another program's, or \
         damaged. Choose another directory; if this one held a changelog, restore its logs from their last checkpoint, and \
         move the directory aside"
    )]
    Foreign {
        /// Its first bytes.
        found: [u8; 8],
    },
    /// Written by a later release.
    #[error(
        "{MANIFEST_NAME} has format version {found}, this release knows up to {known}: use a newer release"
    )]
    NewerVersion {
        /// Its version.
        found: u32,
        /// The newest known version.
        known: u32,
    },
    /// Damaged where no crash can have damaged it.
    #[error(
        "{MANIFEST_NAME} is damaged at byte {offset}: {what}. Restore the logs from their last checkpoint, and move the \
         directory aside"
    )]
    Corrupt {
        /// Where.
        offset: u64,
        /// In which way.
        what: &'static str,
    },
    /// The file system failed.
    #[error("cannot {action} {MANIFEST_NAME}: {source}")]
    Io {
        /// What was to be done.
        action: &'static str,
        /// What it said.
        source: io::Error,
    },
}

/// What a manifest file holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ManifestContent {
    /// The directory it belongs to.
    pub directory_id: u64,
    /// The records, oldest first.
    pub records: Vec<Vec<u8>>,
    /// Length of the part written at once, in bytes.
    pub intact_bytes: u64,
    /// Length of the file in bytes, without a torn append at its end.
    pub len_bytes: u64,
    /// Length of a torn append at the end, in bytes; 0 if there is none.
    pub torn_bytes: u64,
    /// Batches, the torn one not among them.
    batches: u64,
}

/// An open manifest. There is one per directory; the directory's lock keeps others away.
///
/// Invariants:
/// 1. Every record whose `append` or `rewrite` returned `Ok` is in the file until a `rewrite` leaves it out.
/// 2. After a failed `append` or `rewrite` nothing is appended before a `rewrite` succeeds: where the file ends is not
///    known.
///
/// ```
/// # use std::sync::Arc;
/// # use tidelog_io::directory::{Directory, Manifest};
/// # let home = tempfile::tempdir().unwrap();
/// # let directory = Directory::open(home.path()).unwrap();
/// let mut manifest = Manifest::create(directory.files(), 7)?;
/// manifest.append(&[b"one", b"two"])?;
/// drop(manifest);
/// let (manifest, records) = Manifest::open(directory.files()).unwrap();
/// assert_eq!(manifest.directory_id(), 7);
/// assert_eq!(records, [b"one", b"two"]);
/// # Ok::<(), std::io::Error>(())
/// ```
pub struct Manifest {
    files: Arc<dyn Files>,
    directory_id: u64,
    batches: u64,
    len_bytes: u64,
    reserve_bytes: u64,
    poisoned: bool,
}

impl Manifest {
    /// Makes the manifest of a new directory.
    ///
    /// # Errors
    /// `AlreadyExists` if there is one; otherwise what the file system says.
    pub fn create(files: Arc<dyn Files>, directory_id: u64) -> io::Result<Self> {
        let names = files.list()?;
        if len_of(&names, MANIFEST_NAME).is_some() {
            return Err(io::Error::new(
                io::ErrorKind::AlreadyExists,
                format!("{MANIFEST_NAME} exists already"),
            ));
        }
        let reserve_bytes = len_of(&names, RESERVE_NAME).unwrap_or(0);
        let mut manifest =
            Self { files, directory_id, batches: 0, len_bytes: 0, reserve_bytes, poisoned: true };
        manifest.rewrite::<&[u8]>(&[])?;
        Ok(manifest)
    }

    /// Whether a directory has a manifest.
    ///
    /// # Errors
    /// Whatever the file system says.
    pub fn exists(files: &dyn Files) -> io::Result<bool> {
        Ok(len_of(&files.list()?, MANIFEST_NAME).is_some())
    }

    /// Opens a manifest and returns its records, oldest first. A torn end is dropped, from the file too.
    ///
    /// # Errors
    /// See [`ManifestError`]; the file is as it was then.
    pub fn open(files: Arc<dyn Files>) -> Result<(Self, Vec<Vec<u8>>), ManifestError> {
        let content = Self::inspect(&*files)?;
        let names = files.list().map_err(|source| ManifestError::Io { action: "look for", source })?;
        let ManifestContent { directory_id, records, batches, len_bytes, torn_bytes, .. } = content;
        let reserve_bytes = len_of(&names, RESERVE_NAME).unwrap_or(0);
        let mut manifest =
            Self { files, directory_id, batches, len_bytes, reserve_bytes, poisoned: torn_bytes > 0 };
        if torn_bytes > 0 {
            tracing::warn!(torn_bytes, "{MANIFEST_NAME} ends with a torn append: dropped");
            let rewritten = manifest.rewrite(&records);
            rewritten.map_err(|source| ManifestError::Io { action: "rewrite", source })?;
        }
        Ok((manifest, records))
    }

    /// Reads a manifest without changing it.
    ///
    /// # Errors
    /// See [`ManifestError`].
    pub fn inspect(files: &dyn Files) -> Result<ManifestContent, ManifestError> {
        let mut bytes = Vec::new();
        loop {
            let filled = bytes.len();
            if filled > FILE_BYTES_MAX {
                return Err(corrupt(filled, "it is longer than any manifest"));
            }
            bytes.resize(filled + (64 << 10).max(filled), 0);
            let read = files
                .read_at(MANIFEST_NAME, filled as u64, &mut bytes[filled..])
                .map_err(|source| ManifestError::Io { action: "read", source })?;
            bytes.truncate(filled + read);
            if read == 0 {
                return ManifestContent::decode(&bytes);
            }
        }
    }

    /// Adds records, all or none of them, and makes them durable.
    ///
    /// # Errors
    /// `InvalidInput` if one record is longer than 1 MiB or all together than 4 MiB; nothing is changed. After any other
    /// error the records may or may not be there, and every further append fails until [`rewrite`](Self::rewrite). It may
    /// have to come first after a success, too: see [`is_poisoned`](Self::is_poisoned).
    pub fn append(&mut self, records: &[impl AsRef<[u8]>]) -> io::Result<()> {
        if records.is_empty() {
            return Ok(());
        }
        if self.poisoned {
            return Err(io::Error::other(format!("{MANIFEST_NAME} must be rewritten after a failed write")));
        }
        let mut batch = Batches::new(self.directory_id, self.batches);
        for record in records {
            batch.push(record.as_ref())?;
        }
        let (bytes, batches) = batch.finish();
        if batches != self.batches + 1 {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "more records than one append may hold"));
        }
        self.poisoned = true;
        self.files.append(MANIFEST_NAME, &bytes)?;
        let mut witness = Batches::new(self.directory_id, batches);
        witness.end_batch();
        // The records are durable, whatever becomes of it. But where the file ends is not known if this fails.
        match self.files.append_unsynced(MANIFEST_NAME, &witness.bytes) {
            Ok(()) => self.poisoned = false,
            Err(error) => {
                tracing::warn!(%error, "{MANIFEST_NAME} must be written anew before the next append")
            }
        }
        self.batches = witness.index;
        self.len_bytes += (bytes.len() + witness.bytes.len()) as u64;
        Ok(())
    }

    /// Replaces all records by these, at once. What is written so must be intact whenever it is read: any damage to it
    /// is told from the torn end of an append.
    ///
    /// # Errors
    /// `InvalidInput` as in [`append`](Self::append), but for the length of all together. After any other error the old
    /// records or the new ones are there.
    pub fn rewrite<R: AsRef<[u8]>>(&mut self, records: &[R]) -> io::Result<()> {
        let mut content = Batches::new(self.directory_id, 0);
        for record in records {
            content.push(record.as_ref())?;
        }
        let (body, batches) = content.finish();
        let len_bytes = (HEADER_BYTES + body.len()) as u64;
        let mut bytes = Vec::with_capacity(HEADER_BYTES + body.len());
        bytes.extend_from_slice(&MAGIC);
        bytes.extend_from_slice(&VERSION.to_le_bytes());
        bytes.extend_from_slice(&0u32.to_le_bytes());
        bytes.extend_from_slice(&self.directory_id.to_le_bytes());
        bytes.extend_from_slice(&len_bytes.to_le_bytes());
        bytes.extend_from_slice(&XxHash3_64::oneshot(&bytes).to_le_bytes());
        bytes.extend_from_slice(&body);
        self.poisoned = true;
        self.replace(&bytes)?;
        self.poisoned = false;
        self.batches = batches;
        self.len_bytes = len_bytes;
        self.keep_reserve();
        Ok(())
    }

    /// Puts a successor in the place of the file; where there is no room for one, in that of the reserve.
    fn replace(&mut self, bytes: &[u8]) -> io::Result<()> {
        let replaced = self.files.replace(MANIFEST_NAME, bytes);
        if replaced.as_ref().is_err_and(is_full) && self.files.remove(RESERVE_NAME).is_ok() {
            self.reserve_bytes = 0;
            // If that was not enough, or somebody else was faster, as much as there is stays reserved.
            return self.files.replace(MANIFEST_NAME, bytes).inspect_err(|_| self.keep_reserve());
        }
        replaced
    }

    /// Sees to a reserve for the next successor, as large as there is room for. It is no error if there is none: then the
    /// next successor may find some.
    fn keep_reserve(&mut self) {
        let wanted_bytes = 2 * self.len_bytes + RESERVE_BYTES_MIN;
        if self.reserve_bytes >= wanted_bytes / 2 {
            return;
        }
        // It is too small, or an error left one.
        let _ = self.files.remove(RESERVE_NAME);
        self.reserve_bytes = 0;
        // All that there is, so that what the predecessor left is not lost to the next one that looks for room.
        let mut bytes = self.files.free_bytes().unwrap_or(wanted_bytes).min(wanted_bytes);
        while bytes > self.len_bytes {
            match self.files.create(RESERVE_NAME, bytes) {
                Ok(()) => {
                    self.reserve_bytes = bytes;
                    return;
                }
                Err(error) if is_full(&error) => bytes /= 2,
                Err(error) => {
                    tracing::warn!(%error, "no room could be reserved for {MANIFEST_NAME}");
                    return;
                }
            }
        }
        tracing::warn!(
            "there is no room for a successor of {MANIFEST_NAME}: make some before the next start"
        );
    }

    /// Length of the file in bytes.
    pub fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    /// The directory it belongs to.
    pub fn directory_id(&self) -> u64 {
        self.directory_id
    }

    /// Whether a failed write has to be followed by a [`rewrite`](Self::rewrite).
    pub fn is_poisoned(&self) -> bool {
        self.poisoned
    }
}

impl ManifestContent {
    /// Decodes a manifest file.
    ///
    /// # Errors
    /// See [`ManifestError`].
    pub fn decode(bytes: &[u8]) -> Result<Self, ManifestError> {
        let (directory_id, intact_bytes) = decode_header(bytes)?;
        let Some(intact_end) = usize::try_from(intact_bytes).ok().filter(|end| *end <= bytes.len()) else {
            return Err(corrupt(bytes.len(), "it ends too early"));
        };
        let mut records = Vec::new();
        let mut batches = 0;
        let mut offset = HEADER_BYTES;
        while offset < bytes.len() {
            let Some((index, payload)) = decode_batch(directory_id, &bytes[offset..]) else {
                if offset < intact_end {
                    return Err(corrupt(offset, "bad batch"));
                }
                if is_followed(directory_id, batches, &bytes[offset + 1..]) {
                    return Err(corrupt(offset, "bad batch before a good one"));
                }
                break;
            };
            if index != batches {
                return Err(corrupt(offset, "batch out of order"));
            }
            let end = offset + BATCH_HEADER_BYTES + payload.len();
            if offset < intact_end && end > intact_end {
                return Err(corrupt(offset, "batch across the end of the intact part"));
            }
            decode_records(payload, &mut records).map_err(|what| corrupt(offset, what))?;
            batches += 1;
            offset = end;
        }
        let torn_bytes = (bytes.len() - offset) as u64;
        Ok(Self { directory_id, records, intact_bytes, len_bytes: offset as u64, torn_bytes, batches })
    }
}

/// Encodes records into batches as long as they may be.
struct Batches {
    directory_id: u64,
    index: u64,
    bytes: Vec<u8>,
    payload: Vec<u8>,
}

impl Batches {
    fn new(directory_id: u64, index: u64) -> Self {
        Self { directory_id, index, bytes: Vec::new(), payload: Vec::new() }
    }

    fn push(&mut self, record: &[u8]) -> io::Result<()> {
        if record.len() > RECORD_BYTES_MAX {
            let message =
                format!("record of {} bytes for {MANIFEST_NAME}: at most {RECORD_BYTES_MAX}", record.len());
            return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
        }
        if self.payload.len() + RECORD_LEN_BYTES + record.len() > PAYLOAD_BYTES_MAX {
            self.end_batch();
        }
        self.payload.extend_from_slice(&(record.len() as u32).to_le_bytes());
        self.payload.extend_from_slice(record);
        Ok(())
    }

    fn end_batch(&mut self) {
        self.bytes.extend_from_slice(&(self.payload.len() as u32).to_le_bytes());
        self.bytes.extend_from_slice(&self.index.to_le_bytes());
        self.bytes.extend_from_slice(&checksum(self.directory_id, self.index, &self.payload).to_le_bytes());
        self.bytes.append(&mut self.payload);
        self.index += 1;
    }

    /// The bytes, and the index of the batch that would be next.
    fn finish(mut self) -> (Vec<u8>, u64) {
        if !self.payload.is_empty() {
            self.end_batch();
        }
        (self.bytes, self.index)
    }
}

fn len_of(files: &[(String, u64)], wanted: &str) -> Option<u64> {
    files.iter().find(|(name, _)| name == wanted).map(|(_, len_bytes)| *len_bytes)
}

fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

/// Directory id and intact bytes.
fn decode_header(bytes: &[u8]) -> Result<(u64, u64), ManifestError> {
    let Some((header, _)) = bytes.split_first_chunk::<HEADER_BYTES>() else {
        return Err(corrupt(bytes.len(), "it ends within its header"));
    };
    let magic: [u8; 8] = header[..8].try_into().expect("8 bytes");
    if magic != MAGIC {
        // What its checksum calls ours is not another program's.
        let ours = [&MAGIC, &header[MAGIC.len()..HEADER_BYTES - 8]].concat();
        return Err(match XxHash3_64::oneshot(&ours) == read_u64(&header[HEADER_BYTES - 8..]) {
            true => corrupt(0, "its first bytes are not those that were written"),
            false => ManifestError::Foreign { found: magic },
        });
    }
    let version = read_u32(&header[8..]);
    if version > VERSION {
        return Err(ManifestError::NewerVersion { found: version, known: VERSION });
    }
    if version != VERSION
        || XxHash3_64::oneshot(&header[..HEADER_BYTES - 8]) != read_u64(&header[HEADER_BYTES - 8..])
    {
        return Err(corrupt(0, "bad header"));
    }
    let intact_bytes = read_u64(&header[24..]);
    if intact_bytes < HEADER_BYTES as u64 {
        return Err(corrupt(0, "bad header"));
    }
    Ok((read_u64(&header[16..]), intact_bytes))
}

/// Index and payload of the batch that starts here, if a good one does.
fn decode_batch(directory_id: u64, bytes: &[u8]) -> Option<(u64, &[u8])> {
    let (index, payload, sum) = batch_at(bytes)?;
    (checksum(directory_id, index, payload) == sum).then_some((index, payload))
}

/// Index, payload and checksum of what may be a batch.
fn batch_at(bytes: &[u8]) -> Option<(u64, &[u8], u64)> {
    let (header, rest) = bytes.split_first_chunk::<BATCH_HEADER_BYTES>()?;
    let payload_len = read_u32(header) as usize;
    if payload_len > PAYLOAD_BYTES_MAX {
        return None;
    }
    Some((read_u64(&header[4..]), rest.get(..payload_len)?, read_u64(&header[12..])))
}

/// Whether a good batch with a greater index than `index` starts anywhere in `bytes`. A file made so that the search
/// would take for ever counts as if there were one.
fn is_followed(directory_id: u64, index: u64, bytes: &[u8]) -> bool {
    let mut candidates = 0;
    for start in 0..bytes.len() {
        let Some((found, payload, sum)) = batch_at(&bytes[start..]) else { continue };
        // No file holds more batches than this.
        if found <= index || found - index > FILE_BYTES_MAX as u64 {
            continue;
        }
        // What costs nothing to look at is no reason to give up.
        candidates += usize::from(!payload.is_empty());
        if candidates > CANDIDATES_MAX || checksum(directory_id, found, payload) == sum {
            return true;
        }
    }
    false
}

fn decode_records(mut payload: &[u8], records: &mut Vec<Vec<u8>>) -> Result<(), &'static str> {
    while !payload.is_empty() {
        let (len, rest) = payload.split_first_chunk::<RECORD_LEN_BYTES>().ok_or("record without a length")?;
        let len = u32::from_le_bytes(*len) as usize;
        if len > RECORD_BYTES_MAX {
            return Err("record longer than any may be");
        }
        let record = rest.get(..len).ok_or("record across the end of its batch")?;
        records.push(record.to_vec());
        payload = &rest[len..];
    }
    Ok(())
}

fn checksum(directory_id: u64, index: u64, payload: &[u8]) -> u64 {
    let mut hash = XxHash3_64::new();
    hash.write(&directory_id.to_le_bytes());
    hash.write(&(payload.len() as u32).to_le_bytes());
    hash.write(&index.to_le_bytes());
    hash.write(payload);
    hash.finish()
}

fn corrupt(offset: usize, what: &'static str) -> ManifestError {
    ManifestError::Corrupt { offset: offset as u64, what }
}

fn read_u32(bytes: &[u8]) -> u32 {
    u32::from_le_bytes(*bytes.first_chunk().expect("4 bytes"))
}

fn read_u64(bytes: &[u8]) -> u64 {
    u64::from_le_bytes(*bytes.first_chunk().expect("8 bytes"))
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;
    use crate::sim::SimWorld;

    /// One file in memory; an append fails when `fail` is set, with some of its bytes written.
    #[derive(Default)]
    struct OneFile {
        bytes: Mutex<Option<Vec<u8>>>,
        fail: Mutex<Option<usize>>,
        fail_unsynced: Mutex<bool>,
    }

    impl Files for OneFile {
        fn list(&self) -> io::Result<Vec<(String, u64)>> {
            let bytes = self.bytes.lock().unwrap();
            Ok(bytes.iter().map(|bytes| (MANIFEST_NAME.to_string(), bytes.len() as u64)).collect())
        }

        fn create(&self, _: &str, _: u64) -> io::Result<()> {
            Err(io::ErrorKind::Unsupported.into())
        }

        fn read_at(&self, _: &str, offset: u64, buffer: &mut [u8]) -> io::Result<usize> {
            let bytes = self.bytes.lock().unwrap();
            let bytes = bytes.as_ref().ok_or(io::ErrorKind::NotFound)?;
            let rest = &bytes[bytes.len().min(offset as usize)..];
            let read = rest.len().min(buffer.len());
            buffer[..read].copy_from_slice(&rest[..read]);
            Ok(read)
        }

        fn append(&self, _: &str, bytes: &[u8]) -> io::Result<()> {
            let mut all = self.bytes.lock().unwrap();
            let all = all.as_mut().ok_or(io::ErrorKind::NotFound)?;
            let written = self.fail.lock().unwrap().take();
            all.extend_from_slice(&bytes[..written.unwrap_or(bytes.len())]);
            written.map_or(Ok(()), |_| Err(io::Error::other("injected")))
        }

        fn append_unsynced(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
            if std::mem::take(&mut *self.fail_unsynced.lock().unwrap()) {
                *self.fail.lock().unwrap() = Some(7);
            }
            self.append(name, bytes)
        }

        fn replace(&self, _: &str, bytes: &[u8]) -> io::Result<()> {
            *self.bytes.lock().unwrap() = Some(bytes.to_vec());
            Ok(())
        }

        fn remove(&self, _: &str) -> io::Result<()> {
            Err(io::ErrorKind::Unsupported.into())
        }
    }

    const RECORDS: [&[u8]; 4] = [b"first", b"", b"third record", &[0; 40]];

    fn filled() -> (Arc<OneFile>, Manifest) {
        let files = Arc::new(OneFile::default());
        let manifest = Manifest::create(files.clone(), 0x1234).unwrap();
        (files, manifest)
    }

    fn bytes(files: &OneFile) -> Vec<u8> {
        files.bytes.lock().unwrap().clone().unwrap()
    }

    #[test]
    fn records_come_back_in_order() {
        let (files, mut manifest) = filled();
        manifest.append(&RECORDS[..1]).unwrap();
        manifest.append(&RECORDS[1..]).unwrap();
        assert_eq!(manifest.len_bytes(), bytes(&files).len() as u64);
        let (mut manifest, records) = Manifest::open(files.clone()).unwrap();
        assert_eq!(records, RECORDS);
        assert_eq!(manifest.directory_id(), 0x1234);
        manifest.append(&[b"fifth"]).unwrap();
        let (mut manifest, records) = Manifest::open(files.clone()).unwrap();
        assert_eq!(records.len(), 5);
        manifest.rewrite(&[b"only"]).unwrap();
        manifest.append(&[b"after"]).unwrap();
        assert_eq!(Manifest::open(files.clone()).unwrap().1, [&b"only"[..], b"after"]);
        assert_eq!(Manifest::create(files, 1).err().unwrap().kind(), io::ErrorKind::AlreadyExists);
    }

    #[test]
    fn closed_manifest_shows_every_bit_flip_and_truncation() {
        let (files, mut manifest) = filled();
        manifest.rewrite(&RECORDS).unwrap();
        let good = bytes(&files);
        for len in 0..good.len() {
            assert!(ManifestContent::decode(&good[..len]).is_err(), "cut to {len}");
        }
        for bit in 0..good.len() * 8 {
            let mut bad = good.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(ManifestContent::decode(&bad).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn torn_append_is_dropped_at_every_length() {
        let (files, mut manifest) = filled();
        manifest.append(&RECORDS[..2]).unwrap();
        let durable = bytes(&files);
        manifest.append(&RECORDS[2..]).unwrap();
        let all = bytes(&files);
        let end = all.len() - BATCH_HEADER_BYTES;
        for len in durable.len() + 1..end {
            *files.bytes.lock().unwrap() = Some(all[..len].to_vec());
            assert_eq!(Manifest::inspect(&*files).unwrap().torn_bytes, (len - durable.len()) as u64);
            let (mut manifest, records) = Manifest::open(files.clone()).unwrap();
            assert_eq!(records, RECORDS[..2]);
            manifest.append(&[b"next"]).unwrap();
            let content = Manifest::inspect(&*files).unwrap();
            assert_eq!((content.records.len(), content.torn_bytes), (3, 0));
        }
        for len in end..=all.len() {
            *files.bytes.lock().unwrap() = Some(all[..len].to_vec());
            assert_eq!(Manifest::open(files.clone()).unwrap().1, RECORDS);
        }
    }

    #[test]
    fn damage_to_what_was_durable_is_no_torn_end() {
        let (files, mut manifest) = filled();
        manifest.append(&RECORDS[..2]).unwrap();
        let mut starts = vec![bytes(&files).len()];
        manifest.append(&RECORDS[2..3]).unwrap();
        starts.push(bytes(&files).len());
        manifest.append(&RECORDS[3..]).unwrap();
        let good = bytes(&files);
        let witness = good.len() - BATCH_HEADER_BYTES;
        for bit in starts[0] * 8..witness * 8 {
            let mut bad = good.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            match ManifestContent::decode(&bad) {
                Err(ManifestError::Corrupt { offset, .. }) => assert!(offset as usize <= bit / 8),
                other => panic!("bit {bit}: {other:?}"),
            }
        }
        for bit in witness * 8..good.len() * 8 {
            let mut bad = good.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(ManifestContent::decode(&bad).unwrap().records, RECORDS, "bit {bit}");
        }
        // A power cut took the witness.
        for bit in starts[1] * 8..witness * 8 {
            let mut bad = good[..witness].to_vec();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(ManifestContent::decode(&bad).unwrap().records, RECORDS[..3], "bit {bit}");
        }
    }

    #[test]
    fn without_a_witness_a_rewrite_comes_before_the_next_append() {
        let (files, mut manifest) = filled();
        *files.fail_unsynced.lock().unwrap() = true;
        manifest.append(&[b"durable"]).unwrap();
        assert!(manifest.is_poisoned());
        assert_eq!(Manifest::inspect(&*files).unwrap().records, [b"durable"]);
        manifest.append(&[b"refused"]).unwrap_err();
        manifest.rewrite(&[b"durable"]).unwrap();
        manifest.append(&[b"next"]).unwrap();
        assert_eq!(Manifest::open(files).unwrap().1, [&b"durable"[..], b"next"]);
    }

    #[test]
    fn exchanged_batches_and_those_of_another_directory_are_damage() {
        let (files, mut manifest) = filled();
        let mut ends = vec![bytes(&files).len()];
        for record in [b"one", b"two"] {
            manifest.append(&[record]).unwrap();
            ends.push(bytes(&files).len());
        }
        let good = bytes(&files);
        let exchanged = [&good[..ends[0]], &good[ends[1]..], &good[ends[0]..ends[1]]].concat();
        assert!(matches!(ManifestContent::decode(&exchanged), Err(ManifestError::Corrupt { .. })));
        let twice = [&good[..], &good[ends[1]..]].concat();
        assert!(matches!(ManifestContent::decode(&twice), Err(ManifestError::Corrupt { .. })));

        let files = Arc::new(OneFile::default());
        Manifest::create(files.clone(), 0x4321).unwrap();
        let foreign = [&bytes(&files)[..], &good[ends[0]..]].concat();
        let content = ManifestContent::decode(&foreign).unwrap();
        assert_eq!((content.records.len(), content.torn_bytes), (0, (good.len() - ends[0]) as u64));
    }

    #[test]
    fn failed_append_is_followed_by_a_rewrite() {
        let (files, mut manifest) = filled();
        manifest.append(&[b"kept"]).unwrap();
        *files.fail.lock().unwrap() = Some(7);
        manifest.append(&[b"unknown"]).unwrap_err();
        assert!(manifest.is_poisoned());
        let before = bytes(&files);
        manifest.append(&[b"refused"]).unwrap_err();
        assert_eq!(bytes(&files), before);
        manifest.rewrite(&[b"kept"]).unwrap();
        manifest.append(&[b"next"]).unwrap();
        assert_eq!(Manifest::open(files).unwrap().1, [b"kept", b"next"]);
    }

    /// As long as the room that was kept lasts.
    #[test]
    fn on_a_full_file_system_successors_get_the_room_that_was_kept() {
        let world = SimWorld::new(1);
        let used = || world.files().list().unwrap().iter().map(|(_, bytes)| bytes).sum::<u64>();
        let mut manifest = Manifest::create(world.files(), 7).unwrap();
        assert_eq!(used(), manifest.len_bytes() + 2 * manifest.len_bytes() + RESERVE_BYTES_MIN);
        world.set_capacity_bytes(Some(used()));
        let mut records: Vec<[u8; 100]> = Vec::new();
        let capacity = used();
        let refused = loop {
            records.push([records.len() as u8; 100]);
            assert_eq!(
                manifest.append(&records[records.len() - 1..]).unwrap_err().kind(),
                io::ErrorKind::StorageFull
            );
            if let Err(error) = manifest.rewrite(&records) {
                break error;
            }
            assert!(used() <= capacity);
            let (again, found) = Manifest::open(world.files()).unwrap();
            assert!(found == records);
            manifest = again;
        };
        // Two of them are there for a moment.
        assert_eq!(refused.kind(), io::ErrorKind::StorageFull);
        assert!(records.len() as u64 * 104 > capacity / 2 - 1000, "{} records of {capacity}", records.len());
        // What was there stays, and what was reserved; and as soon as there is room, all is well.
        assert_eq!(used(), capacity);
        assert!(Manifest::open(world.files()).unwrap().1 == records[..records.len() - 1]);
        world.set_capacity_bytes(None);
        manifest.rewrite(&records).unwrap();
        assert_eq!(used(), 3 * manifest.len_bytes() + RESERVE_BYTES_MIN);
        manifest.append(&records[..1]).unwrap();
    }

    #[test]
    fn limits_are_checked_before_anything_changes() {
        let (files, mut manifest) = filled();
        let before = bytes(&files);
        let longest = vec![1; RECORD_BYTES_MAX];
        for records in [vec![vec![0; RECORD_BYTES_MAX + 1]], vec![longest.clone(); 4]] {
            assert_eq!(manifest.append(&records).unwrap_err().kind(), io::ErrorKind::InvalidInput);
            assert_eq!(bytes(&files), before);
        }
        manifest.append(&[&longest]).unwrap();
        manifest.rewrite(&vec![longest.clone(); 9]).unwrap();
        assert_eq!(Manifest::open(files).unwrap().1, vec![longest; 9]);
    }

    #[test]
    fn foreign_and_newer_files_are_named() {
        let (files, _) = filled();
        let good = bytes(&files);
        let mut newer = good.clone();
        newer[8] = 9;
        assert!(matches!(
            ManifestContent::decode(&newer),
            Err(ManifestError::NewerVersion { found: 9, known: VERSION })
        ));
        let mut damaged = good.clone();
        damaged[3] ^= 1;
        assert!(matches!(ManifestContent::decode(&damaged), Err(ManifestError::Corrupt { offset: 0, .. })));
        let mut foreign = good;
        foreign[..16].copy_from_slice(b"SQLite format 3\0");
        let error = ManifestContent::decode(&foreign).unwrap_err();
        assert!(matches!(error, ManifestError::Foreign { found } if &found == b"SQLite f"));
        *files.bytes.lock().unwrap() = None;
        assert!(matches!(Manifest::open(files), Err(ManifestError::Io { .. })));
    }

    #[test]
    fn hostile_lengths_allocate_nothing() {
        let (files, _) = filled();
        let mut bad = bytes(&files);
        bad.extend_from_slice(&u32::MAX.to_le_bytes());
        bad.extend_from_slice(&[0xff; 400]);
        let content = ManifestContent::decode(&bad).unwrap();
        assert_eq!((content.records.len(), content.torn_bytes), (0, 404));
    }

    proptest::proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(tail: Vec<u8>, at in 0usize..60) {
            let (files, mut manifest) = filled();
            manifest.append(&RECORDS).unwrap();
            let mut bad = bytes(&files);
            let at = at.min(bad.len());
            bad.splice(at.., tail.iter().copied());
            let _ = ManifestContent::decode(&bad);
            let _ = ManifestContent::decode(&tail);
        }
    }
}
