//! Variable-length integers of parts and footers: 1 to 9 bytes, the length readable from the first.
//!
//! A value of at most 7·n bits takes n ≤ 8 bytes: the value shifted left by n, the bit below it set, little-endian, so
//! that the zeros at the low end of the first byte count n - 1. A zero byte announces eight bytes with all 64 bits.
//! Neither direction loops or guesses, which is what the assembler's inner loop needs. Only the shortest form is valid.

/// The longest encoding, in bytes.
pub const VARINT_BYTES_MAX: usize = 9;

/// How many bytes `value` takes: 1 to 9.
#[must_use]
#[inline]
pub const fn len(value: u64) -> usize {
    let bits = 64 - (value | 1).leading_zeros();
    if bits > 56 { VARINT_BYTES_MAX } else { bits.div_ceil(7) as usize }
}

/// Appends `value`.
pub fn put(out: &mut Vec<u8>, value: u64) {
    let mut bytes = [0; VARINT_BYTES_MAX];
    let len = write(&mut bytes, 0, value);
    out.extend_from_slice(&bytes[..len]);
}

/// Writes `value` at `at` and returns how many bytes it took. At least eight bytes are written, so whatever stands in
/// the up to seven bytes behind the value is overwritten.
///
/// # Panics
/// If `out` ends less than [`VARINT_BYTES_MAX`] bytes after `at`.
#[inline]
pub fn write(out: &mut [u8], at: usize, value: u64) -> usize {
    let len = len(value);
    let window = &mut out[at..at + VARINT_BYTES_MAX];
    if len < VARINT_BYTES_MAX {
        let word = ((value << 1) | 1) << (len - 1);
        window[..8].copy_from_slice(&word.to_le_bytes());
    } else {
        window[0] = 0;
        window[1..].copy_from_slice(&value.to_le_bytes());
    }
    len
}

/// Takes one value off the front of `bytes`; `None`, with nothing taken, if they are too few or not the shortest form.
#[inline]
pub fn take(bytes: &mut &[u8]) -> Option<u64> {
    let len = bytes.first()?.trailing_zeros() as usize + 1;
    let value = if let Some(word) = bytes.first_chunk::<8>()
        && len <= 8
    {
        let word = u64::from_le_bytes(*word);
        (word << (64 - 8 * len)) >> (64 - 7 * len)
    } else if len <= 8 {
        let mut word = [0; 8];
        word[..len].copy_from_slice(bytes.get(..len)?);
        u64::from_le_bytes(word) >> len
    } else {
        u64::from_le_bytes(*bytes.get(1..)?.first_chunk::<8>()?)
    };
    if self::len(value) != len {
        return None;
    }
    *bytes = &bytes[len..];
    Some(value)
}

/// Takes two values, as two calls of [`take`] would. Two that have eight bytes together, as almost all have, are had from
/// one load: whoever walks records waits for nothing else.
#[inline]
pub fn take_pair(bytes: &mut &[u8]) -> Option<(u64, u64)> {
    if let Some(word) = bytes.first_chunk::<8>() {
        let word = u64::from_le_bytes(*word);
        let first_len = word.trailing_zeros() + 1;
        // Of a first one of eight bytes or more nothing is left here, and no second one is found.
        let second_word = word.checked_shr(8 * first_len).unwrap_or(0);
        let second_len = second_word.trailing_zeros() + 1;
        if first_len + second_len <= 8 {
            let value = |word: u64, len: u32| (word << (64 - 8 * len)) >> (64 - 7 * len);
            let (first, second) = (value(word, first_len), value(second_word, second_len));
            if len(first) != first_len as usize || len(second) != second_len as usize {
                return None;
            }
            *bytes = &bytes[(first_len + second_len) as usize..];
            return Some((first, second));
        }
    }
    let mut rest = *bytes;
    let pair = (take(&mut rest)?, take(&mut rest)?);
    *bytes = rest;
    Some(pair)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Whatever the bytes are: values of all lengths, cut short, longer forms.
        #[test]
        fn a_pair_is_two_values(
            bits in proptest::collection::vec(0..=64u32, 2),
            any: u64,
            other in proptest::collection::vec(any::<u8>(), 0..20),
            cut in 0..30usize,
            replaced: bool,
        ) {
            let mut bytes = Vec::new();
            for bits in bits {
                put(&mut bytes, if bits == 0 { 0 } else { any >> (64 - bits) });
            }
            bytes.extend(&other);
            bytes.truncate(cut);
            if replaced {
                bytes = other;
            }
            let (mut rest, mut expected_rest) = (&bytes[..], &bytes[..]);
            let first = take(&mut expected_rest);
            let expected = first.and_then(|first| Some((first, take(&mut expected_rest)?)));
            prop_assert_eq!(take_pair(&mut rest), expected);
            prop_assert_eq!(rest.len(), if expected.is_some() { expected_rest.len() } else { bytes.len() });
        }
    }

    #[test]
    fn every_length_round_trips_and_is_the_shortest() {
        for bits in 0..=64u32 {
            let top = if bits == 0 { 0 } else { u64::MAX >> (64 - bits) };
            for value in [top, top.saturating_sub(1), top.saturating_add(1), top / 2 + 1] {
                let mut out = Vec::new();
                put(&mut out, value);
                assert_eq!(out.len(), len(value), "{value}");
                for tail in 0..10 {
                    let mut padded = out.clone();
                    padded.resize(out.len() + tail, 0xff);
                    let mut rest = &padded[..];
                    assert_eq!(take(&mut rest), Some(value), "{value} before {tail} bytes");
                    assert_eq!(rest.len(), tail);
                }
                for cut in 0..out.len() {
                    let mut rest = &out[..cut];
                    assert_eq!(take(&mut rest), None, "{value} cut to {cut}");
                    assert_eq!(rest.len(), cut);
                }
            }
        }
    }

    #[test]
    fn longer_forms_of_a_value_are_refused() {
        for n in 2..=8u32 {
            let word = ((5u64 << 1) | 1) << (n - 1);
            assert_eq!(take(&mut &word.to_le_bytes()[..]), None, "5 in {n} bytes");
        }
        assert_eq!(take(&mut &[0, 5, 0, 0, 0, 0, 0, 0, 0][..]), None);
    }
}
