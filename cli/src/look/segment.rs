//! A segment file on its own: its blocks, and whether they follow one another.
//!
//! A segment is written from the front, over what an earlier use of the file left. The first block says which use it is;
//! where no block of that use follows, the rest is old. What must be there the file alone cannot tell: the manifest and
//! the other segments can, see `look/directory.rs`.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use serde_json::Value;
use tidelog::LogId;
use tidelog::block::{BLOCK_ALIGN_BYTES, Block, BlockError, BlockHeader, Expected};
use tidelog::walk::Walk;

use super::Report;
use crate::Failure;

/// Blocks are shown one by one up to this many.
const SHOWN_MAX: usize = 64;
const READ_BYTES: usize = 1 << 20;

/// What one segment file holds.
#[derive(Debug, Default)]
pub struct Scan {
    pub len_bytes: u64,
    pub blocks: Vec<BlockHeader>,
    /// For each log: blocks, first number, end of the numbers, changes.
    pub logs: BTreeMap<LogId, LogSum>,
    /// What is wrong, and where.
    pub damages: Vec<(u64, String)>,
    pub notes: Vec<String>,
    /// How much was verified, in bytes.
    pub verified_bytes: u64,
    /// The format is newer than this tool.
    pub newer: Option<BlockError>,
}

#[derive(Debug, Default)]
pub struct LogSum {
    pub blocks: u64,
    pub first: u64,
    pub end: u64,
    pub changes: u64,
    pub value_bytes: u64,
}

/// Looks at one file, of which the manifest may know something.
pub fn look(path: &Path, known: Option<Known>) -> Result<Report, Failure> {
    let name = path.display().to_string();
    let scan = match scan(path, known) {
        Ok(scan) => scan,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound && known.is_some() => {
            let mut report = Report::new(name, "segment");
            report.damage(None, "there is no such file, but the manifest says that it holds changes");
            return Ok(report);
        }
        Err(error) => return Err(Failure::new(format!("cannot read {name}: {error}"))),
    };
    if let Some(newer) = scan.newer {
        return Err(Failure::new(format!("{name}: {newer}")));
    }
    let mut report = Report::new(name, "segment");
    report.fact("length bytes", scan.len_bytes);
    if let Some(first) = scan.blocks.first() {
        report.fact("directory", format!("{:016x}", first.place.directory));
        report.fact("segment", first.place.segment);
        report.fact("epoch", first.place.epoch);
    }
    report.fact("blocks", scan.blocks.len());
    report.fact("used bytes", scan.blocks.iter().map(|block| block.len as u64).sum::<u64>());
    list_logs(&mut report, &scan);
    let rows = scan.blocks.iter().take(SHOWN_MAX).map(|block| {
        vec![
            block.place.offset.into(),
            block.place.number.into(),
            block.len.into(),
            block.frames_len.into(),
            block.logs.into(),
            block.place.watermark.into(),
            block.continues.into(),
        ]
    });
    let columns = &["offset", "number", "length bytes", "frames bytes", "logs", "watermark", "continues"];
    report.list("blocks listed", columns, rows.collect());
    if scan.blocks.len() > SHOWN_MAX {
        report.note(format!("{} more blocks are not listed", scan.blocks.len() - SHOWN_MAX));
    }
    scan.notes.into_iter().for_each(|note| report.note(note));
    scan.damages.into_iter().for_each(|(offset, what)| report.damage(Some(offset), what));
    report.verified(scan.verified_bytes);
    Ok(report)
}

fn list_logs(report: &mut Report, scan: &Scan) {
    let rows = scan.logs.iter().map(|(log, sum)| -> Vec<Value> {
        vec![
            log.to_string().into(),
            sum.first.into(),
            sum.end.into(),
            sum.changes.into(),
            sum.value_bytes.into(),
            sum.blocks.into(),
        ]
    });
    report.list("logs", &["log", "from", "to", "changes", "value bytes", "blocks"], rows.collect());
}

/// What is known of a segment from the manifest.
#[derive(Clone, Copy, Debug)]
pub struct Known {
    pub directory: u64,
    pub segment: u32,
    pub epoch: u64,
    /// Blocks from this number on do not count.
    pub limit: Option<u64>,
}

/// Reads all blocks of the use of the file that `known` says, else of the use that its first block belongs to.
pub fn scan(path: &Path, known: Option<Known>) -> std::io::Result<Scan> {
    let file = File::open(path)?;
    let mut scan = Scan { len_bytes: file.metadata()?.len(), ..Scan::default() };
    let mut place = known.map(|known| (known.directory, known.segment, known.epoch));
    let mut walk = Walk::new(None);
    let mut window = Window { file: &file, start: 0, bytes: Vec::new() };
    let mut offset = 0;
    let mut bad: Option<(u64, BlockError)> = None;
    loop {
        let bytes = window.at(offset, BLOCK_ALIGN_BYTES)?;
        if bytes.is_empty() {
            break;
        }
        let needed = Block::peek_len(bytes).unwrap_or(BLOCK_ALIGN_BYTES);
        let bytes = window.at(offset, needed)?;
        let expected = place.map(|(directory, segment, epoch)| Expected {
            directory,
            segment,
            epoch,
            index: scan.blocks.len() as u32,
            offset,
            number: scan.blocks.last().map(|block| block.place.number + 1),
        });
        let decoded = match &bad {
            None => Block::decode(bytes, expected.as_ref()),
            // Behind a bad block only the use is known.
            Some(_) => Block::decode(bytes, None),
        };
        match decoded {
            Ok(block) if bad.is_none() => {
                let header = *block.header();
                if place.is_none() && header.place.offset != offset {
                    let what = format!(
                        "the block belongs to byte {}: the file's start is missing",
                        header.place.offset
                    );
                    scan.damages.push((offset, what));
                }
                place.get_or_insert((header.place.directory, header.place.segment, header.place.epoch));
                if known.and_then(|known| known.limit).is_some_and(|limit| header.place.number >= limit) {
                    scan.notes.push(format!(
                        "block {} at byte {offset} and what follows do not count: an opening cut them off",
                        header.place.number
                    ));
                    break;
                }
                scan.add(&mut walk, &block);
                offset += header.len as u64;
            }
            Ok(block) => {
                let at = block.header().place;
                // Where the first block is bad, the use is that of the next one, for all that the file says.
                let of_use = (at.directory, at.segment, at.epoch);
                let same = place.is_none_or(|place| place == of_use) && at.offset == offset;
                if let Some((bad_offset, error)) = bad.take_if(|_| same) {
                    let behind = format!("{error}; a block of the same use follows at byte {offset}");
                    scan.damages.push((bad_offset, behind));
                    return Ok(scan);
                }
                offset += block.header().len as u64;
            }
            Err(newer @ BlockError::NewerVersion { .. }) if bad.is_none() => {
                scan.newer = Some(newer);
                return Ok(scan);
            }
            Err(error) => {
                bad.get_or_insert((offset, error));
                offset += BLOCK_ALIGN_BYTES as u64;
            }
        }
    }
    if let Some((offset, error)) = bad {
        scan.judge_end(offset, error, known.is_some());
    }
    if !scan.len_bytes.is_multiple_of(BLOCK_ALIGN_BYTES as u64) {
        scan.damages.push((scan.len_bytes, "the file ends inside a page: it was cut short".to_owned()));
    }
    if scan.damages.is_empty() && walk.is_open() {
        scan.notes.push("the last change goes on in another segment, or was never finished".to_owned());
    }
    Ok(scan)
}

impl Scan {
    fn add(&mut self, walk: &mut Walk, block: &Block<'_>) {
        let header = *block.header();
        self.verified_bytes += header.len as u64;
        for entry in block.logs() {
            let sum =
                self.logs.entry(entry.log).or_insert(LogSum { first: entry.first.0, ..LogSum::default() });
            sum.blocks += 1;
            sum.end = entry.first.0 + u64::from(entry.count);
            sum.changes += u64::from(entry.count);
        }
        let logs = &mut self.logs;
        let walked = walk.block(block, &mut |change| {
            if let Some(sum) = logs.get_mut(&change.log) {
                sum.value_bytes += change.value.len() as u64;
            }
        });
        if let Err(error) = walked {
            self.damages.push((self.verified_bytes - header.len as u64, error.to_string()));
        }
        self.blocks.push(header);
    }

    /// No block of this use stands behind `offset`.
    fn judge_end(&mut self, offset: u64, error: BlockError, in_directory: bool) {
        match error {
            // Zeros, or what an earlier use left.
            BlockError::NotABlock | BlockError::Misplaced { .. } if !self.blocks.is_empty() || in_directory => {
                let rest = self.len_bytes.saturating_sub(offset);
                if rest > 0 {
                    self.notes.push(format!("not in use: {rest} bytes from byte {offset} on"));
                }
            }
            BlockError::NotABlock => {
                self.notes.push("no block: it was never used, or its first block is damaged".to_owned());
            }
            // The directory's recovery knows whether it was ever promised to anybody.
            error if in_directory => self.notes.push(format!("the last write, at byte {offset}, is torn: {error}")),
            error => self.damages.push((
                offset,
                format!("{error}; if the segment was in use, verify its directory: that tells a torn last write from damage"),
            )),
        }
    }
}

/// Reads a file forward in large pieces.
struct Window<'a> {
    file: &'a File,
    start: u64,
    bytes: Vec<u8>,
}

impl Window<'_> {
    /// The bytes from `offset` on: at least `len`, fewer only at the end of the file.
    fn at(&mut self, offset: u64, len: usize) -> std::io::Result<&[u8]> {
        let skip = usize::try_from(offset - self.start).unwrap_or(usize::MAX);
        if skip.saturating_add(len) > self.bytes.len() {
            self.bytes.resize(len.max(READ_BYTES), 0);
            let mut filled = 0;
            while filled < self.bytes.len() {
                match self.file.read_at(&mut self.bytes[filled..], offset + filled as u64) {
                    Ok(0) => break,
                    Ok(more) => filled += more,
                    Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                    Err(error) => return Err(error),
                }
            }
            self.bytes.truncate(filled);
            self.start = offset;
            return Ok(&self.bytes);
        }
        Ok(&self.bytes[skip..])
    }
}
