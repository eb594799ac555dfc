//! The bytes of the simulated device: files by inode, and which sectors of them a power cut may take back.
//!
//! Owns no fault, no time and no operation in flight; it does what it is told.

use std::collections::BTreeMap;

use super::SimRng;

/// Invariant: `undurable` holds, for each sector whose present content may not survive a power cut, the content that
/// surely does; sectors beyond the end of the file are zeros.
#[derive(Default)]
pub(super) struct Inode {
    bytes: Vec<u8>,
    undurable: BTreeMap<usize, Vec<u8>>,
    linked: bool,
    opens: u32,
}

impl Inode {
    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    pub(super) fn flip_bit(&mut self, offset: u64, bit: u8) {
        let offset = usize::try_from(offset).expect("the offset is inside the file");
        self.bytes[offset] ^= 1 << bit;
    }

    fn store(&mut self, offset: usize, bytes: &[u8], durable: bool, sector_bytes: usize) {
        let end = offset + bytes.len();
        for sector in offset / sector_bytes..end.div_ceil(sector_bytes) {
            if durable {
                self.undurable.remove(&sector);
            } else if !self.undurable.contains_key(&sector) {
                let old = sector_of(&self.bytes, sector, sector_bytes);
                self.undurable.insert(sector, old);
            }
        }
        if self.bytes.len() < end {
            self.bytes.resize(end, 0);
        }
        self.bytes[offset..end].copy_from_slice(bytes);
    }
}

fn sector_of(bytes: &[u8], sector: usize, sector_bytes: usize) -> Vec<u8> {
    let from = (sector * sector_bytes).min(bytes.len());
    let to = (from + sector_bytes).min(bytes.len());
    let mut content = bytes[from..to].to_vec();
    content.resize(sector_bytes, 0);
    content
}

pub(super) struct Medium {
    pub(super) capacity_bytes: Option<u64>,
    sector_bytes: usize,
    names: BTreeMap<String, u64>,
    inodes: BTreeMap<u64, Inode>,
    next_inode: u64,
}

impl Default for Medium {
    fn default() -> Self {
        Self {
            capacity_bytes: None,
            sector_bytes: 4096,
            names: BTreeMap::new(),
            inodes: BTreeMap::new(),
            next_inode: 0,
        }
    }
}

impl Medium {
    pub(super) fn set_sector_bytes(&mut self, bytes: usize) {
        assert!([512, 1024, 2048, 4096].contains(&bytes), "a sector of {bytes} bytes");
        let durable = self.inodes.values().all(|inode| inode.undurable.is_empty());
        assert!(durable, "set the size of a sector before the first undurable write");
        self.sector_bytes = bytes;
    }

    pub(super) fn list(&self) -> Vec<(String, u64)> {
        self.names.iter().map(|(name, inode)| (name.clone(), self.inodes[inode].bytes.len() as u64)).collect()
    }

    pub(super) fn named(&self, name: &str) -> Option<&Inode> {
        self.names.get(name).map(|inode| &self.inodes[inode])
    }

    pub(super) fn named_mut(&mut self, name: &str) -> Option<&mut Inode> {
        self.names.get(name).and_then(|inode| self.inodes.get_mut(inode))
    }

    /// Puts a durable file in the place of `name`; who has the old one open keeps it.
    pub(super) fn put(&mut self, name: &str, bytes: Vec<u8>) {
        self.remove(name);
        self.next_inode += 1;
        self.inodes.insert(self.next_inode, Inode { bytes, linked: true, ..Inode::default() });
        self.names.insert(name.to_owned(), self.next_inode);
    }

    pub(super) fn remove(&mut self, name: &str) {
        if let Some(inode) = self.names.remove(name) {
            self.inodes.get_mut(&inode).expect("a name has an inode").linked = false;
            self.forget_if_unused(inode);
        }
    }

    pub(super) fn open(&mut self, name: &str) -> Option<u64> {
        let inode = *self.names.get(name)?;
        self.inodes.get_mut(&inode).expect("a name has an inode").opens += 1;
        Some(inode)
    }

    pub(super) fn close(&mut self, inode: u64) {
        self.inodes.get_mut(&inode).expect("an open file has an inode").opens -= 1;
        self.forget_if_unused(inode);
    }

    fn forget_if_unused(&mut self, inode: u64) {
        if self.inodes.get(&inode).is_some_and(|inode| !inode.linked && inode.opens == 0) {
            self.inodes.remove(&inode);
        }
    }

    pub(super) fn has_room(&self, more_bytes: u64) -> bool {
        more_bytes <= self.free_bytes()
    }

    pub(super) fn free_bytes(&self) -> u64 {
        let used: u64 = self.inodes.values().map(|inode| inode.bytes.len() as u64).sum();
        self.capacity_bytes.map_or(u64::MAX, |capacity| capacity.saturating_sub(used))
    }

    /// Stores bytes at a place of a file; false, with nothing changed, if there is no room for them.
    pub(super) fn store(&mut self, inode: u64, offset: u64, bytes: &[u8], durable: bool) -> bool {
        let end = offset + bytes.len() as u64;
        let len = self.inodes[&inode].bytes.len() as u64;
        if end > len && !self.has_room(end - len) {
            return false;
        }
        let offset = usize::try_from(offset).expect("the file fits into memory");
        let sector_bytes = self.sector_bytes;
        self.inodes.get_mut(&inode).expect("checked above").store(offset, bytes, durable, sector_bytes);
        true
    }

    /// Adds bytes at the end `len` of a file, and makes the whole file durable if so wanted.
    pub(super) fn append(&mut self, name: &str, len: u64, bytes: &[u8], durable: bool) -> bool {
        let inode = self.names[name];
        if !self.store(inode, len, bytes, durable) {
            return false;
        }
        if !durable {
            return true;
        }
        self.inodes.get_mut(&inode).expect("a name has an inode").undurable.clear();
        true
    }

    /// Stores each sector of the bytes with a chance of `keep_per_mille`.
    pub(super) fn store_in_part(
        &mut self,
        inode: u64,
        (offset, bytes): (u64, &[u8]),
        durable: bool,
        rng: &mut SimRng,
        keep_per_mille: u16,
    ) {
        for (index, sector) in bytes.chunks(self.sector_bytes).enumerate() {
            if rng.chance(keep_per_mille) {
                self.store(inode, offset + (index * self.sector_bytes) as u64, sector, durable);
            }
        }
    }

    /// Another place where `len` bytes that belong to `offset` of `inode` may end: in the same file or another, inside
    /// it if there is room.
    pub(super) fn another_place(&self, inode: u64, offset: u64, len: usize, rng: &mut SimRng) -> (u64, u64) {
        let others: Vec<u64> = self.inodes.keys().copied().filter(|&other| other != inode).collect();
        let other_inode = match others.as_slice() {
            [] => inode,
            _ if rng.chance(500) => inode,
            others => others[rng.below(others.len() as u64) as usize],
        };
        let room = (self.inodes[&other_inode].bytes.len() as u64).saturating_sub(len as u64) / 4096;
        let place = rng.below(room + 1) * 4096;
        if (other_inode, place) != (inode, offset) {
            return (other_inode, place);
        }
        // The right place was drawn: a neighbour instead.
        (inode, if offset >= 4096 { offset - 4096 } else { offset + 4096 })
    }

    /// The power fails: each sector without a durable promise keeps its content with a chance of `keep_per_mille`.
    pub(super) fn lose_undurable(&mut self, rng: &mut SimRng, keep_per_mille: u16) {
        let sector_bytes = self.sector_bytes;
        for inode in self.inodes.values_mut() {
            for (sector, old) in std::mem::take(&mut inode.undurable) {
                if !rng.chance(keep_per_mille) {
                    let from = (sector * sector_bytes).min(inode.bytes.len());
                    let to = (from + sector_bytes).min(inode.bytes.len());
                    inode.bytes[from..to].copy_from_slice(&old[..to - from]);
                }
            }
        }
    }
}
