//! Reads a segment file from front to back in large steps; what it reads is for the caller to check.

use std::io;
use std::sync::Arc;

use bytes::Bytes;

use super::segment_name;
use crate::disk::Files;

/// How much one read takes, in bytes, unless more is asked for.
const STEP_BYTES: usize = 1 << 20;

/// Reads blocks of one segment file.
pub struct SegmentReader {
    files: Arc<dyn Files>,
    name: String,
    /// What was read last, and where it starts in the file.
    window: Bytes,
    window_offset: u64,
}

impl SegmentReader {
    /// Reads the file of `segment`. Whether it exists is seen by the first read.
    pub fn new(files: Arc<dyn Files>, segment: u32) -> Self {
        Self { files, name: segment_name(segment), window: Bytes::new(), window_offset: 0 }
    }

    /// The `len` bytes at `offset`; fewer only where the file ends. Memory is taken for them before they are read, so
    /// the caller bounds `len`.
    ///
    /// # Errors
    /// Whatever the file system says.
    pub fn read(&mut self, offset: u64, len: usize) -> io::Result<Bytes> {
        if let Some(start) =
            offset.checked_sub(self.window_offset).and_then(|start| usize::try_from(start).ok())
            && let Some(end) = start.checked_add(len)
            && end <= self.window.len()
        {
            return Ok(self.window.slice(start..end));
        }
        let mut window = vec![0; len.max(STEP_BYTES)];
        let read = self.files.read_at(&self.name, offset, &mut window)?;
        window.truncate(read);
        self.window = window.into();
        self.window_offset = offset;
        Ok(self.window.slice(..len.min(read)))
    }
}
