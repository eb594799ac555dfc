//! Structured input: what is made of it is well-formed, but for a number here and there.

use tidelog::varint;

/// Reads a fuzzer's bytes; behind their end are zeros.
pub struct Input<'a> {
    rest: &'a [u8],
    honest: bool,
}

impl<'a> Input<'a> {
    pub fn new(data: &'a [u8]) -> Input<'a> {
        Input { rest: data, honest: true }
    }

    /// Whether every number was the one that was due.
    pub fn is_honest(&self) -> bool {
        self.honest
    }

    pub fn is_empty(&self) -> bool {
        self.rest.is_empty()
    }

    pub fn byte(&mut self) -> u8 {
        let Some((&byte, rest)) = self.rest.split_first() else { return 0 };
        self.rest = rest;
        byte
    }

    /// As many bytes as one byte says, or all that are left.
    pub fn bytes(&mut self) -> &'a [u8] {
        let len = usize::from(self.byte());
        let (bytes, rest) = self.rest.split_at(len.min(self.rest.len()));
        self.rest = rest;
        bytes
    }

    pub fn u64(&mut self) -> u64 {
        u64::from_le_bytes([(); 8].map(|()| self.byte()))
    }

    /// `due`, or at times another number.
    pub fn number(&mut self, due: u64) -> u64 {
        let number = match self.byte() {
            0..250 => due,
            250 => due.wrapping_add(1),
            251 => due.wrapping_sub(1),
            252 => 0,
            253 => self.u64(),
            254 => u64::from(u32::MAX),
            255 => u64::MAX,
        };
        self.honest &= number == due;
        number
    }

    /// Appends [`number`](Self::number) as a varint.
    pub fn put(&mut self, out: &mut Vec<u8>, due: u64) {
        varint::put(out, self.number(due));
    }
}
