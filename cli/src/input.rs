//! Splits an input into records: by lines, or by a length before each.
//!
//! What a record is keyed by is decided in `key.rs`.

use std::io::{self, BufRead, BufReader, Read};

/// How records follow one another in an input.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Framing {
    /// Each record ends at a newline (LF), which is not part of it; a carriage return is. The last one may lack it.
    Lines,
    /// Before each record stands its length in bytes, as 32 bits, little-endian.
    LengthPrefixed,
}

/// Why a record could not be read. Records are counted from 1.
#[derive(Debug, thiserror::Error)]
pub enum InputError {
    /// The record is longer than allowed.
    #[error(
        "record {record} is longer than {record_bytes_max} bytes: raise --record-bytes-max or check --framing"
    )]
    TooLong {
        /// The record.
        record: u64,
        /// The limit.
        record_bytes_max: usize,
    },
    /// The input ends inside the record.
    #[error(
        "the input ends inside record {record}, {missing_bytes} bytes are missing: it was cut off, or check --framing"
    )]
    CutOff {
        /// The record.
        record: u64,
        /// How many bytes of it, or of its length, are missing.
        missing_bytes: u64,
    },
    /// The input could not be read.
    #[error("cannot read record {record}: {source}")]
    Io {
        /// The record.
        record: u64,
        /// What the system said.
        source: io::Error,
    },
}

/// The records of an input, one at a time, in memory bounded by the longest allowed.
pub struct Records<R> {
    reader: R,
    framing: Framing,
    record_bytes_max: usize,
    taken: u64,
    buffer: Vec<u8>,
}

impl<R: BufRead> Records<R> {
    /// Splits what `reader` gives.
    pub fn new(reader: R, framing: Framing, record_bytes_max: usize) -> Records<R> {
        Records { reader, framing, record_bytes_max, taken: 0, buffer: Vec::new() }
    }

    /// The number of the record that was returned last, from 1; 0 before the first.
    pub fn number(&self) -> u64 {
        self.taken
    }

    /// The next record, or `None` at the end of the input.
    ///
    /// # Errors
    /// See [`InputError`]. Nothing can be read after an error.
    pub fn next_record(&mut self) -> Result<Option<&[u8]>, InputError> {
        self.buffer.clear();
        let found = match self.framing {
            Framing::Lines => self.read_line()?,
            Framing::LengthPrefixed => self.read_prefixed()?,
        };
        self.taken += u64::from(found);
        Ok(found.then_some(&self.buffer))
    }

    fn read_line(&mut self) -> Result<bool, InputError> {
        let record = self.taken + 1;
        // One byte more than allowed: the newline, or the proof that the line is too long.
        let limit_bytes = self.record_bytes_max as u64 + 1;
        let read = (&mut self.reader).take(limit_bytes).read_until(b'\n', &mut self.buffer);
        if read.map_err(|source| InputError::Io { record, source })? == 0 {
            return Ok(false);
        }
        if self.buffer.last() == Some(&b'\n') {
            self.buffer.pop();
        } else if self.buffer.len() > self.record_bytes_max {
            return Err(InputError::TooLong { record, record_bytes_max: self.record_bytes_max });
        }
        Ok(true)
    }

    fn read_prefixed(&mut self) -> Result<bool, InputError> {
        const PREFIX_BYTES: u64 = 4;
        let missing_bytes = self.read_up_to(PREFIX_BYTES)?;
        if missing_bytes == PREFIX_BYTES {
            return Ok(false);
        }
        let record = self.taken + 1;
        let Some(&prefix) = self.buffer.first_chunk() else {
            return Err(InputError::CutOff { record, missing_bytes });
        };
        let len_bytes = u32::from_le_bytes(prefix);
        if len_bytes as usize > self.record_bytes_max {
            return Err(InputError::TooLong { record, record_bytes_max: self.record_bytes_max });
        }
        self.buffer.clear();
        match self.read_up_to(u64::from(len_bytes))? {
            0 => Ok(true),
            missing_bytes => Err(InputError::CutOff { record, missing_bytes }),
        }
    }

    /// Reads `len_bytes` into the buffer, which grows only with what really comes; returns how many are missing.
    fn read_up_to(&mut self, len_bytes: u64) -> Result<u64, InputError> {
        let read = (&mut self.reader).take(len_bytes).read_to_end(&mut self.buffer);
        let read_bytes = read.map_err(|source| InputError::Io { record: self.taken + 1, source })?;
        Ok(len_bytes - read_bytes as u64)
    }
}

impl<R: Read> Records<BufReader<R>> {
    /// Whether the next record takes a read from the input, which may have to be waited for.
    pub fn would_read(&self) -> bool {
        self.reader.buffer().is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All records, read through a buffer of one byte and one of many.
    fn split(input: &[u8], framing: Framing, record_bytes_max: usize) -> Result<Vec<Vec<u8>>, InputError> {
        let read = |buffer_bytes| {
            let mut records =
                Records::new(BufReader::with_capacity(buffer_bytes, input), framing, record_bytes_max);
            let mut all = Vec::new();
            while let Some(record) = records.next_record()? {
                all.push(record.to_vec());
            }
            assert_eq!(records.number(), all.len() as u64);
            Ok(all)
        };
        let by_bytes = read(1);
        let at_once = read(4096);
        assert_eq!(format!("{by_bytes:?}"), format!("{at_once:?}"));
        at_once
    }

    fn prefixed(records: &[&[u8]]) -> Vec<u8> {
        records.iter().flat_map(|record| [&(record.len() as u32).to_le_bytes(), *record].concat()).collect()
    }

    #[test]
    fn lines() {
        let lines = |input: &str| split(input.as_bytes(), Framing::Lines, 5).unwrap();
        assert!(lines("").is_empty());
        assert_eq!(lines("a\n\nbc\r\n"), [&b"a"[..], b"", b"bc\r"]);
        assert_eq!(lines("a\nlast"), [&b"a"[..], b"last"]);
        assert_eq!(lines("12345\n12345"), [b"12345", b"12345"]);
    }

    #[test]
    fn too_long_a_line_is_named_by_its_number() {
        for input in ["a\nb\n123456\n", "a\nb\n123456", "a\nb\n1234567"] {
            match split(input.as_bytes(), Framing::Lines, 5) {
                Err(InputError::TooLong { record: 3, record_bytes_max: 5 }) => {}
                other => panic!("{input}: {other:?}"),
            }
        }
    }

    #[test]
    fn prefixed_records() {
        let records = [&b"a\nb"[..], b"", b"12345"];
        assert_eq!(split(&prefixed(&records), Framing::LengthPrefixed, 5).unwrap(), records);
        assert!(split(b"", Framing::LengthPrefixed, 5).unwrap().is_empty());
        match split(&prefixed(&[b"a", b"123456"]), Framing::LengthPrefixed, 5) {
            Err(InputError::TooLong { record: 2, .. }) => {}
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn every_truncation_inside_a_record_is_told() {
        let whole = prefixed(&[b"abc", b"", b"12345"]);
        for len in 0..=whole.len() {
            let result = split(&whole[..len], Framing::LengthPrefixed, 5);
            match (len, result) {
                (0 | 7 | 11 | 20, Ok(_)) => {}
                (_, Err(InputError::CutOff { record, missing_bytes })) => {
                    let (first, end) = [(1, 7), (2, 11), (3, 20)][record as usize - 1];
                    // Of a record whose length is not known yet, only the rest of the length is known to be missing.
                    let known = if len < 4 || (7..11).contains(&len) || (11..15).contains(&len) {
                        [4, 11, 15][record as usize - 1]
                    } else {
                        end
                    };
                    assert_eq!(missing_bytes as usize, known - len, "record {first}, cut at {len}");
                }
                (len, other) => panic!("cut at {len}: {other:?}"),
            }
        }
    }
}
