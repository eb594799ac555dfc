//! Fields of small encoded records: fixed and variable length integers and short texts.
//!
//! Used by the handle and the manifest. The formats that are read and written in bulk (frames, blocks, parts) have
//! their own code. Every read is bounded by what is left, so that nothing is allocated on an attacker's word.

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

    /// A number in the shortest LEB128 encoding; longer ones are refused, so that a value has one encoding.
    pub(crate) fn varint(&mut self, what: &'static str) -> Result<u64, FieldError> {
        let mut value = 0u64;
        for shift in (0..).step_by(7) {
            let byte = self.u8(what)?;
            let bits = u64::from(byte & 0x7f);
            if shift > 63 || (bits << shift) >> shift != bits || (byte == 0 && shift > 0) {
                return Err(FieldError::Bad(what));
            }
            value |= bits << shift;
            if byte & 0x80 == 0 {
                break;
            }
        }
        Ok(value)
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

/// Appends `value` in the shortest LEB128 encoding: 1 to 10 bytes.
pub(crate) fn put_varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

/// Appends the length of `text` in bytes and its UTF-8.
pub(crate) fn put_text(out: &mut Vec<u8>, text: &str) {
    put_varint(out, text.len() as u64);
    out.extend_from_slice(text.as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn varints_come_back_and_have_one_encoding() {
        for value in [0, 1, 127, 128, 16_383, 16_384, u64::from(u32::MAX), u64::MAX - 1, u64::MAX] {
            let mut bytes = Vec::new();
            put_varint(&mut bytes, value);
            let mut reader = FieldReader::new(&bytes);
            assert_eq!(reader.varint("v"), Ok(value));
            assert_eq!(reader.left_bytes(), 0);
            for end in 0..bytes.len() {
                assert_eq!(FieldReader::new(&bytes[..end]).varint("v"), Err(FieldError::Short("v")));
            }
        }
        for bad in [&[0x80, 0][..], &[0xff, 0x80, 0x00], &[0xff; 11]] {
            assert_eq!(FieldReader::new(bad).varint("v"), Err(FieldError::Bad("v")), "{bad:x?}");
        }
        // 2^64: one bit too many in the tenth byte.
        let over = [0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x02];
        assert_eq!(FieldReader::new(&over).varint("v"), Err(FieldError::Bad("v")));
    }

    #[test]
    fn counts_and_texts_are_bounded_before_they_are_believed() {
        let mut bytes = Vec::new();
        put_varint(&mut bytes, 1 << 40);
        bytes.extend_from_slice(&[0; 8]);
        assert_eq!(FieldReader::new(&bytes).count(100, 1, "n"), Err(FieldError::Bad("n")));
        assert_eq!(FieldReader::new(&bytes).count(usize::MAX, 1, "n"), Err(FieldError::Short("n")));
        assert_eq!(FieldReader::new(&bytes).text(100, "t"), Err(FieldError::Bad("t")));
        assert_eq!(FieldReader::new(&[2, 0xc3, 0x28]).text(9, "t"), Err(FieldError::Bad("t")));
        assert_eq!(FieldReader::new(&[2, 0xc3, 0xa9]).text(9, "t"), Ok("é"));
    }
}
