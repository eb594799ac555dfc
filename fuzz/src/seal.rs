//! Checksums made right. They would stop a fuzzer at the door, so each target decodes its input twice: as it is, and with
//! every checksum that has a place in it.

use std::ops::Range;

use tidelog::LogId;
use tidelog::footer::Footer;
use tidelog::part::{Directory, PartId};
use twox_hash::XxHash3_64;

fn put(bytes: &mut [u8], checksum: u64) {
    bytes[..8].copy_from_slice(&checksum.to_le_bytes());
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..)?.first_chunk().map(|bytes| u32::from_le_bytes(*bytes))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    bytes.get(at..)?.first_chunk().map(|bytes| u64::from_le_bytes(*bytes))
}

/// A handle: its last 8 bytes, and before them its length.
pub fn handle(bytes: &mut [u8]) {
    const HEAD_BYTES: usize = 16;
    if let Some(body_bytes) = bytes.len().checked_sub(HEAD_BYTES + 8) {
        bytes[..8].copy_from_slice(b"tlogHDL\n");
        bytes[12..16].copy_from_slice(&(body_bytes as u32).to_le_bytes());
        let (covered, checksum) = bytes.split_at_mut(HEAD_BYTES + body_bytes);
        put(checksum, XxHash3_64::oneshot(covered));
    }
}

/// The block at the start.
pub fn block(bytes: &mut [u8]) {
    const HEADER_BYTES: usize = 128;
    if bytes.len() < HEADER_BYTES {
        return;
    }
    bytes[..8].copy_from_slice(b"tlogBLK\n");
    let len = u32_at(bytes, 72).map_or(0, |len| len as usize);
    if let Some(body) = bytes.get(HEADER_BYTES..len) {
        let checksum = XxHash3_64::oneshot(body);
        put(&mut bytes[112..], checksum);
    }
    let checksum = XxHash3_64::oneshot(&bytes[..120]);
    put(&mut bytes[120..], checksum);
}

/// A footer: its trailer.
pub fn footer(bytes: &mut [u8]) {
    const TRAILER_BYTES: usize = 32;
    if let Some(start) = bytes.len().checked_sub(TRAILER_BYTES) {
        let len = bytes.len() as u64;
        bytes[start..start + 8].copy_from_slice(&len.to_le_bytes());
        end_of_footer(bytes);
    }
}

fn end_of_footer(footer: &mut [u8]) {
    let end = footer.len();
    let checksum = XxHash3_64::oneshot(&footer[..end - 16]);
    put(&mut footer[end - 16..], checksum);
    footer[end - 8..].copy_from_slice(b"tlogOBJ\n");
}

/// A directory: its last 8 bytes.
pub fn directory(bytes: &mut [u8], part: PartId, log: LogId) {
    if let Some((body, checksum)) = bytes.split_last_chunk_mut::<8>() {
        put(checksum, XxHash3_64::oneshot_with_seed(identity(part, log, u32::MAX), body));
    }
}

/// A changeset: its first 8 bytes. The key group is `None` for metadata.
pub fn changeset(bytes: &mut [u8], part: PartId, log: LogId, group: Option<u16>) {
    if let Some((checksum, stored)) = bytes.split_first_chunk_mut::<8>() {
        let key = group.map_or(0, |group| 1 + u32::from(group));
        put(checksum, XxHash3_64::oneshot_with_seed(identity(part, log, key), stored));
    }
}

fn identity(part: PartId, log: LogId, key: u32) -> u64 {
    let mut bytes = Vec::with_capacity(32);
    bytes.extend(part.token.to_le_bytes());
    bytes.extend(part.index.to_le_bytes());
    bytes.extend(key.to_le_bytes());
    bytes.extend(log.0.to_le_bytes());
    XxHash3_64::oneshot(&bytes)
}

/// An object: its footer, and all directories and changesets that are found by it.
pub fn object(bytes: &mut [u8]) {
    let Some(trailer) = bytes.len().checked_sub(32) else { return };
    let footer_len = u64_at(bytes, trailer).unwrap_or(0);
    let Some(start) = (bytes.len() as u64).checked_sub(footer_len).filter(|_| footer_len >= 32) else {
        return;
    };
    let start = start as usize;
    end_of_footer(&mut bytes[start..]);
    let Ok(footer) = Footer::decode(&bytes[start..], None) else { return };
    if footer.start() != start as u64 {
        return;
    }
    for (index, run, at) in footer.runs() {
        let part = footer.part_id(index);
        let at = usize_range(at);
        directory(&mut bytes[at.clone()], part, run.log);
        let Ok(directory) = Directory::decode(&bytes[at], part, run) else { continue };
        let run_start = footer.parts()[index as usize].offset + run.offset;
        for entry in directory.entries() {
            let range = run_start + entry.range.start..run_start + entry.range.end;
            changeset(&mut bytes[usize_range(range)], part, run.log, entry.group.map(|group| group.0));
        }
    }
}

fn usize_range(range: Range<u64>) -> Range<usize> {
    range.start as usize..range.end as usize
}

/// The file of a local directory's manifest: its header and its batches.
pub fn manifest_file(bytes: &mut [u8]) {
    const HEADER_BYTES: usize = 40;
    const BATCH_HEADER_BYTES: usize = 20;
    if bytes.len() < HEADER_BYTES {
        return;
    }
    bytes[..8].copy_from_slice(b"tidelogM");
    let checksum = XxHash3_64::oneshot(&bytes[..32]);
    put(&mut bytes[32..], checksum);
    let directory: [u8; 8] = bytes[16..24].try_into().expect("8 bytes");
    let mut rest = &mut bytes[HEADER_BYTES..];
    while let Some(payload_bytes) = u32_at(rest, 0) {
        let end = BATCH_HEADER_BYTES + payload_bytes as usize;
        if end > rest.len() {
            return;
        }
        let (batch, behind) = rest.split_at_mut(end);
        let covered = [&directory, &batch[..12], &batch[BATCH_HEADER_BYTES..]].concat();
        put(&mut batch[12..], XxHash3_64::oneshot(&covered));
        rest = behind;
    }
}
