//! The memory of parts, which comes back when the driver has let a part go: fresh memory is zeroed, and that costs a tenth
//! of what assembling costs.

use std::sync::{Arc, Mutex};

use bytes::Bytes;

use crate::device::lock;

/// How many are kept; as a rule one comes back for each that is taken.
const SPARE_MAX: usize = 2;

#[derive(Clone, Debug, Default)]
pub(super) struct PartBuffers(Arc<Mutex<Vec<Vec<u8>>>>);

impl PartBuffers {
    /// One that came back.
    pub fn take(&self) -> Option<Vec<u8>> {
        lock(&self.0).pop()
    }

    /// `part` as bytes to be shared; its memory comes back with the last of them.
    pub fn lend(&self, part: Vec<u8>) -> Bytes {
        Bytes::from_owner(Lent { part, home: self.clone() })
    }
}

struct Lent {
    part: Vec<u8>,
    home: PartBuffers,
}

impl AsRef<[u8]> for Lent {
    fn as_ref(&self) -> &[u8] {
        &self.part
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        let mut spare = lock(&self.home.0);
        if spare.len() < SPARE_MAX {
            spare.push(std::mem::take(&mut self.part));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_comes_back_with_the_last_of_its_bytes_and_not_without_bound() {
        let buffers = PartBuffers::default();
        assert_eq!(buffers.take(), None);
        let part = buffers.lend(vec![7; 100]);
        let slice = part.slice(10..20);
        drop(part);
        assert_eq!(buffers.take(), None);
        assert_eq!(slice, [7; 10][..]);
        drop(slice);
        assert_eq!(buffers.take(), Some(vec![7; 100]));
        drop([1, 2, 3].map(|byte| buffers.lend(vec![byte])));
        assert_eq!([(); 3].map(|()| buffers.take().is_some()), [true, true, false]);
    }
}
