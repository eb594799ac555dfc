//! Pieces: where the bytes of an object are. Pure.
//!
//! An object is the concatenation of its pieces: one, the whole object in its bucket, unless parts of it came late there
//! and were stored elsewhere. Offsets inside of the object (of its parts, of its footer) are offsets in the concatenation.
//! How pieces are written down belongs to handle.rs and manifest.rs.

use std::ops::Range;
use std::sync::Arc;

/// The longest URL of a bucket, in bytes.
pub const BUCKET_BYTES_MAX: usize = 2048;
/// The longest name of an object, in bytes: the limit of S3.
pub const OBJECT_NAME_BYTES_MAX: usize = 1024;
/// The most pieces of an object: those of an object of 10,000 parts, the most that S3 takes, of which every other one came
/// late, do not reach it.
pub const PIECES_MAX: usize = 1 << 14;

/// A run of an object's bytes, in one file of a bucket.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Piece {
    /// The URL of the bucket, as [`Changelog::buckets`](crate::Changelog::buckets) says it.
    pub bucket: Arc<str>,
    /// The name in the bucket.
    pub object: String,
    /// Where the piece begins there, in bytes.
    pub offset: u64,
    /// Its length in bytes.
    pub bytes: u64,
}

/// The length of the object in bytes.
///
/// # Errors
/// What is wrong with its pieces, in words.
pub(crate) fn check(pieces: &[Piece]) -> Result<u64, &'static str> {
    if pieces.is_empty() || pieces.len() > PIECES_MAX {
        return Err("number of pieces");
    }
    let mut total: u64 = 0;
    for Piece { bucket, object, offset, bytes } in pieces {
        if bucket.is_empty() || bucket.len() > BUCKET_BYTES_MAX {
            return Err("bucket");
        }
        if object.is_empty() || object.len() > OBJECT_NAME_BYTES_MAX {
            return Err("object name");
        }
        if *bytes == 0 || offset.checked_add(*bytes).is_none() {
            return Err("range of a piece");
        }
        total = total.checked_add(*bytes).ok_or("object length")?;
    }
    Ok(total)
}

/// The length of the object in bytes, of pieces that were checked.
pub(crate) fn total_bytes(pieces: &[Piece]) -> u64 {
    pieces.iter().fold(0, |total, piece| total.saturating_add(piece.bytes))
}

/// Where the bytes `range` of the object are: pieces, and ranges in their files, in order.
pub(crate) fn locate(pieces: &[Piece], range: Range<u64>) -> impl Iterator<Item = (&Piece, Range<u64>)> {
    let mut start: u64 = 0;
    pieces.iter().filter_map(move |piece| {
        let end = start.saturating_add(piece.bytes);
        let (first, last) = (range.start.max(start), range.end.min(end));
        let from = piece.offset + first.saturating_sub(start);
        start = end;
        (first < last).then(|| (piece, from..from + (last - first)))
    })
}

/// Bytes of an object, as somebody finds them who looks for them in a bucket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub bucket: String,
    /// The name in the bucket.
    pub object: String,
    /// Where in that file, in bytes.
    pub range: Range<u64>,
}

/// Where the bytes `range` of the object are, or the first of them where they are in several files.
pub(crate) fn place(pieces: &[Piece], range: Range<u64>) -> Place {
    let (piece, range) = locate(pieces, range.clone()).next().unwrap_or((&pieces[0], range));
    Place { bucket: (*piece.bucket).to_owned(), object: piece.object.clone(), range }
}

/// Where in the object the piece begins that has the byte `at`.
pub(crate) fn start_of(pieces: &[Piece], at: u64) -> u64 {
    let mut start: u64 = 0;
    for piece in pieces {
        let end = start.saturating_add(piece.bytes);
        if at < end {
            break;
        }
        start = end;
    }
    start
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(crate) fn piece(object: &str, offset: u64, bytes: u64) -> Piece {
        Piece { bucket: "memory://".into(), object: object.to_owned(), offset, bytes }
    }

    #[test]
    fn a_range_is_found_in_the_pieces_that_hold_it() {
        let pieces = [piece("a", 0, 10), piece("a.00001.1", 3, 5), piece("a", 10, 100)];
        assert_eq!(check(&pieces), Ok(115));
        let found = |range: Range<u64>| -> Vec<(String, Range<u64>)> {
            locate(&pieces, range).map(|(piece, range)| (piece.object.clone(), range)).collect()
        };
        assert_eq!(found(0..10), [("a".to_owned(), 0..10)]);
        assert_eq!(found(10..11), [("a.00001.1".to_owned(), 3..4)]);
        assert_eq!(
            found(9..16),
            [("a".to_owned(), 9..10), ("a.00001.1".to_owned(), 3..8), ("a".to_owned(), 10..11)]
        );
        assert_eq!(found(20..115), [("a".to_owned(), 15..110)]);
        assert_eq!(found(7..7), []);
        let named = |range: Range<u64>| {
            let Place { bucket, object, range } = place(&pieces, range);
            (bucket, object, range)
        };
        assert_eq!(named(12..14), ("memory://".to_owned(), "a.00001.1".to_owned(), 5..7));
        assert_eq!(named(9..16), ("memory://".to_owned(), "a".to_owned(), 9..10));
        assert_eq!(named(7..7), ("memory://".to_owned(), "a".to_owned(), 7..7));
    }

    #[test]
    fn every_split_of_an_object_gives_its_bytes() {
        let bytes: Vec<u8> = (0..24).collect();
        for (first, second) in (1..23).flat_map(|first| (first + 1..24).map(move |second| (first, second))) {
            let cuts = [0..first, first..second, second..24];
            let pieces: Vec<Piece> =
                cuts.iter().map(|cut| piece("x", cut.start, cut.end - cut.start)).collect();
            for (start, end) in (0..24).flat_map(|start| (start..25).map(move |end| (start, end))) {
                let read: Vec<u8> = locate(&pieces, start..end)
                    .flat_map(|(_, range)| &bytes[range.start as usize..range.end as usize])
                    .copied()
                    .collect();
                assert_eq!(read, bytes[start as usize..end as usize]);
            }
        }
    }

    #[test]
    fn pieces_that_make_no_sense_are_refused() {
        assert_eq!(check(&[]), Err("number of pieces"));
        assert_eq!(check(&vec![piece("a", 0, 1); PIECES_MAX + 1]), Err("number of pieces"));
        assert_eq!(check(&[piece("", 0, 1)]), Err("object name"));
        assert_eq!(check(&[piece(&"x".repeat(1025), 0, 1)]), Err("object name"));
        assert_eq!(check(&[Piece { bucket: "".into(), ..piece("a", 0, 1) }]), Err("bucket"));
        assert_eq!(check(&[piece("a", 0, 0)]), Err("range of a piece"));
        assert_eq!(check(&[piece("a", u64::MAX, 1)]), Err("range of a piece"));
        assert_eq!(check(&[piece("a", 0, u64::MAX), piece("b", 0, 1)]), Err("object length"));
    }
}
