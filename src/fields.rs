//! Fields of small encoded records: fixed and variable length integers and short texts.
//!
//! Used by the handle and the manifest. The formats that are read and written in bulk (frames, blocks, parts) have
//! their own code. Every read is bounded by what is left, so that nothing is allocated on an attacker's word.

use crate::varint;

/// Why a field could not be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FieldError {
    /// The bytes end inside the named field.
    Short(&'static str),
    /// The named field has a value that its encoding does not allow.
    Bad(&'static str),
}

/// Reads fields one after the other.
pub(crate) struct FieldReader<'a> {
    rest: &'a [u8],
}

impl<'a> FieldReader<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> FieldReader<'a> {
        FieldReader { rest: bytes }
    }

    /// How many bytes have not been read.
    pub(crate) fn left_bytes(&self) -> usize {
        self.rest.len()
    }

    pub(crate) fn bytes(&mut self, len_bytes: usize, what: &'static str) -> Result<&'a [u8], FieldError> {
        let (bytes, rest) = self.rest.split_at_checked(len_bytes).ok_or(FieldError::Short(what))?;
        self.rest = rest;
        Ok(bytes)
    }

    pub(crate) fn array<const N: usize>(&mut self, what: &'static str) -> Result<[u8; N], FieldError> {
        let (array, rest) = self.rest.split_first_chunk::<N>().ok_or(FieldError::Short(what))?;
        self.rest = rest;
        Ok(*array)
    }

    pub(crate) fn u8(&mut self, what: &'static str) -> Result<u8, FieldError> {
        self.array::<1>(what).map(|[byte]| byte)
    }

    pub(crate) fn u32(&mut self, what: &'static str) -> Result<u32, FieldError> {
        self.array(what).map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self, what: &'static str) -> Result<u64, FieldError> {
        self.array(what).map(u64::from_le_bytes)
    }

    pub(crate) fn u128(&mut self, what: &'static str) -> Result<u128, FieldError> {
        self.array(what).map(u128::from_le_bytes)
    }

    /// A number as `varint.rs` writes it; other forms of it are refused, so that a value has one encoding.
    pub(crate) fn varint(&mut self, what: &'static str) -> Result<u64, FieldError> {
        varint::take(&mut self.rest).ok_or_else(|| {
            let announced_bytes = self.rest.first().map_or(1, |byte| byte.trailing_zeros() as usize + 1);
            if self.rest.len() < announced_bytes { FieldError::Short(what) } else { FieldError::Bad(what) }
        })
    }

    /// A number that is at most `max`.
    pub(crate) fn varint_up_to(&mut self, max: u64, what: &'static str) -> Result<u64, FieldError> {
        let value = self.varint(what)?;
        if value > max { Err(FieldError::Bad(what)) } else { Ok(value) }
    }

    /// A count of items that take at least `item_bytes_min` each: bounded by `max` and by what is left to read.
    pub(crate) fn count(
        &mut self,
        max: usize,
        item_bytes_min: usize,
        what: &'static str,
    ) -> Result<usize, FieldError> {
        let count = self.varint_up_to(max as u64, what)? as usize;
        if count > self.left_bytes() / item_bytes_min { Err(FieldError::Short(what)) } else { Ok(count) }
    }

    /// UTF-8 of at most `max_bytes` bytes.
    pub(crate) fn text(&mut self, max_bytes: usize, what: &'static str) -> Result<&'a str, FieldError> {
        let len_bytes = self.varint_up_to(max_bytes as u64, what)? as usize;
        std::str::from_utf8(self.bytes(len_bytes, what)?).map_err(|_| FieldError::Bad(what))
    }
}

/// Appends the length of `text` in bytes and its UTF-8.
pub(crate) fn put_text(out: &mut Vec<u8>, text: &str) {
    varint::put(out, text.len() as u64);
    out.extend_from_slice(text.as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_cut_off_is_told_apart_from_a_bad_one() {
        for value in [0, 127, 128, 16_383, 16_384, u64::from(u32::MAX), 1 << 56, u64::MAX] {
            let mut bytes = Vec::new();
            varint::put(&mut bytes, value);
            let mut reader = FieldReader::new(&bytes);
            assert_eq!(reader.varint("v"), Ok(value));
            assert_eq!(reader.left_bytes(), 0);
            for end in 0..bytes.len() {
                assert_eq!(FieldReader::new(&bytes[..end]).varint("v"), Err(FieldError::Short("v")));
            }
        }
        // One, in two bytes and in nine.
        for bad in [&[0b110, 0][..], &[0, 1, 0, 0, 0, 0, 0, 0, 0]] {
            assert_eq!(FieldReader::new(bad).varint("v"), Err(FieldError::Bad("v")), "{bad:x?}");
        }
    }

    #[test]
    fn counts_and_texts_are_bounded_before_they_are_believed() {
        let mut bytes = Vec::new();
        varint::put(&mut bytes, 1 << 40);
        bytes.extend_from_slice(&[0; 8]);
        assert_eq!(FieldReader::new(&bytes).count(100, 1, "n"), Err(FieldError::Bad("n")));
        assert_eq!(FieldReader::new(&bytes).count(usize::MAX, 1, "n"), Err(FieldError::Short("n")));
        assert_eq!(FieldReader::new(&bytes).text(100, "t"), Err(FieldError::Bad("t")));
        assert_eq!(FieldReader::new(&[2 << 1 | 1, 0xc3, 0x28]).text(9, "t"), Err(FieldError::Bad("t")));
        assert_eq!(FieldReader::new(&[2 << 1 | 1, 0xc3, 0xa9]).text(9, "t"), Ok("é"));
    }
}
