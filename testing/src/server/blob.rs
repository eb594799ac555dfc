//! Bytes that the server keeps: in memory, or in a file that goes when the last one who needs it does.
//!
//! An object made of parts shares the blobs of its parts, so nothing is stored twice.

use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::sync::Arc;

use bytes::Bytes;
use md5::{Digest as _, Md5};

/// What is read from a file at a time.
const READ_BYTES: u64 = 256 * 1024;
/// The most that a body's announced length makes the server reserve before the bytes are there.
const RESERVE_BYTES_MAX: u64 = 64 * 1024 * 1024;

/// The body of a part or of an object put whole.
#[derive(Debug)]
pub(crate) struct Blob {
    pub(crate) bytes: u64,
    /// `None` where nobody asked for it.
    pub(crate) md5: Option<[u8; 16]>,
    place: Place,
}

#[derive(Debug)]
enum Place {
    Memory(Bytes),
    File(OwnFile),
}

#[derive(Debug)]
struct OwnFile {
    file: File,
    path: PathBuf,
}

impl Drop for OwnFile {
    fn drop(&mut self) {
        // Nobody looks at the folder of a test server after the server.
        let _ = std::fs::remove_file(&self.path);
    }
}

impl Blob {
    fn read(&self, range: Range<u64>) -> io::Result<Bytes> {
        match &self.place {
            Place::Memory(bytes) => Ok(bytes.slice(range.start as usize..range.end as usize)),
            Place::File(own) => {
                let mut buffer = vec![0; (range.end - range.start) as usize];
                own.file.read_exact_at(&mut buffer, range.start)?;
                Ok(buffer.into())
            }
        }
    }
}

/// A blob on its way in.
pub(crate) struct Writer {
    bytes: u64,
    md5: Option<Md5>,
    place: Growing,
}

enum Growing {
    Memory(Vec<u8>),
    File(OwnFile),
}

impl Writer {
    /// Into `path`, or into memory without one. `expected_bytes` is a hint.
    pub(crate) fn new(path: Option<PathBuf>, expected_bytes: u64, md5: bool) -> io::Result<Writer> {
        let place = match path {
            None => Growing::Memory(Vec::with_capacity(expected_bytes.min(RESERVE_BYTES_MAX) as usize)),
            Some(path) => {
                let file = OpenOptions::new().read(true).write(true).create_new(true).open(&path)?;
                Growing::File(OwnFile { file, path })
            }
        };
        Ok(Writer { bytes: 0, md5: md5.then(Md5::new), place })
    }

    pub(crate) fn push(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.bytes += bytes.len() as u64;
        if let Some(md5) = &mut self.md5 {
            md5.update(bytes);
        }
        match &mut self.place {
            Growing::Memory(all) => all.extend_from_slice(bytes),
            Growing::File(own) => own.file.write_all(bytes)?,
        }
        Ok(())
    }

    pub(crate) fn finish(self) -> Blob {
        Blob {
            bytes: self.bytes,
            md5: self.md5.map(|md5| md5.finalize().into()),
            place: match self.place {
                Growing::Memory(all) => Place::Memory(all.into()),
                Growing::File(own) => Place::File(own),
            },
        }
    }
}

/// The bytes of a range of the concatenation of `blobs`, a piece at a time. The range lies within it.
pub(crate) fn pieces(
    blobs: &[Arc<Blob>],
    range: Range<u64>,
) -> impl Iterator<Item = io::Result<Bytes>> + use<> {
    let mut wanted = Vec::new();
    let mut start = 0;
    for blob in blobs {
        let end = start + blob.bytes;
        let (from, to) = (range.start.max(start), range.end.min(end));
        if from < to {
            wanted.push((blob.clone(), from - start..to - start));
        }
        start = end;
    }
    wanted.into_iter().flat_map(|(blob, range)| {
        let whole = matches!(blob.place, Place::Memory(_));
        let step = if whole { range.end - range.start } else { READ_BYTES };
        let end = range.end;
        range.step_by(step as usize).map(move |at| blob.read(at..end.min(at + step)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn blob(path: Option<PathBuf>, bytes: &[u8]) -> Arc<Blob> {
        let mut writer = Writer::new(path, bytes.len() as u64, true).expect("a writer");
        for piece in bytes.chunks(100_000) {
            writer.push(piece).expect("room");
        }
        Arc::new(writer.finish())
    }

    #[test]
    fn ranges_cross_blobs_in_memory_and_on_disk() {
        let folder = tempfile::tempdir().expect("a folder");
        let all: Vec<u8> = (0..700_000_u32).map(|at| (at / 7) as u8).collect();
        let blobs = [blob(None, &all[..300_000]), blob(Some(folder.path().join("1")), &all[300_000..])];
        for range in [0..0, 0..1, 299_999..300_001, 10..699_999, 300_000..700_000, 0..700_000] {
            let mut read = Vec::new();
            for piece in pieces(&blobs, range.start as u64..range.end as u64) {
                read.extend_from_slice(&piece.expect("readable"));
            }
            assert!(read == all[range.clone()], "{range:?}");
        }
        drop(blobs);
        assert_eq!(std::fs::read_dir(folder.path()).expect("a folder").count(), 0);
    }
}
