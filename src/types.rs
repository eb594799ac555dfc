//! The words that every other file uses: logs, sequence numbers, key groups.
//!
//! Plain values, no behaviour beyond arithmetic that cannot go wrong silently.

use std::fmt;
use std::str::FromStr;

/// Names one log, that is all changes of one writer instance. Unique per instance, made at creation from 128 random
/// bits, never used again.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LogId(pub u128);

impl fmt::Display for LogId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl fmt::Debug for LogId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LogId({self})")
    }
}

impl FromStr for LogId {
    type Err = std::num::ParseIntError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        u128::from_str_radix(text, 16).map(LogId)
    }
}

/// The position of a change in its log: dense, from 0, one per append. As the start of a range it is inclusive, as the
/// end exclusive.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct SequenceNumber(pub u64);

impl SequenceNumber {
    /// The number of a log's first change.
    pub const ZERO: SequenceNumber = SequenceNumber(0);

    /// The number that follows.
    ///
    /// # Panics
    /// After 2^64 - 1 changes.
    #[must_use]
    pub fn next(self) -> SequenceNumber {
        SequenceNumber(self.0.checked_add(1).expect("a log holds fewer than 2^64 changes"))
    }
}

impl fmt::Display for SequenceNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Debug for SequenceNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "#{}", self.0)
    }
}

/// The unit of rescaling: every key belongs to one key group, and readers ask for ranges of them.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct KeyGroup(pub u16);

impl fmt::Display for KeyGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Debug for KeyGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "kg{}", self.0)
    }
}

/// A range of key groups, both ends inclusive, as in Flink. Never empty.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct KeyGroupRange {
    first: KeyGroup,
    last: KeyGroup,
}

impl KeyGroupRange {
    /// All key groups that exist.
    pub const ALL: KeyGroupRange = KeyGroupRange { first: KeyGroup(0), last: KeyGroup(u16::MAX) };

    /// The range from `first` to `last`, both included; `None` if `first > last`.
    ///
    /// ```
    /// use tidelog::{KeyGroup, KeyGroupRange};
    /// let range = KeyGroupRange::new(0, 63).unwrap();
    /// assert!(range.contains(KeyGroup(63)));
    /// assert!(KeyGroupRange::new(1, 0).is_none());
    /// ```
    #[must_use]
    pub const fn new(first: u16, last: u16) -> Option<KeyGroupRange> {
        if first > last {
            return None;
        }
        Some(KeyGroupRange { first: KeyGroup(first), last: KeyGroup(last) })
    }

    /// The lowest key group in the range.
    #[must_use]
    pub const fn first(self) -> KeyGroup {
        self.first
    }

    /// The highest key group in the range.
    #[must_use]
    pub const fn last(self) -> KeyGroup {
        self.last
    }

    /// How many key groups the range holds: 1 to 65,536.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "a range is never empty")]
    pub const fn len(self) -> usize {
        (self.last.0 - self.first.0) as usize + 1
    }

    /// Whether `key_group` lies in the range.
    #[must_use]
    #[inline]
    pub const fn contains(self, key_group: KeyGroup) -> bool {
        self.first.0 <= key_group.0 && key_group.0 <= self.last.0
    }

    /// The key groups in both ranges, if there are any.
    #[must_use]
    pub fn intersection(self, other: KeyGroupRange) -> Option<KeyGroupRange> {
        KeyGroupRange::new(self.first.0.max(other.first.0), self.last.0.min(other.last.0))
    }
}

impl fmt::Display for KeyGroupRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.first, self.last)
    }
}

impl fmt::Debug for KeyGroupRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "kg{self}")
    }
}

/// What a change is to a reader.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ChangeKind {
    /// A change of keyed state, read with its key group.
    Data,
    /// A registration that a reader must see before any data: no key group, read first, over all handles.
    Metadata,
}
