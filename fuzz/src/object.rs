//! Objects by docs/format.md, and what a reader must make of one.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use tidelog::footer::Footer;
use tidelog::part::{Changeset, Compression, Directory};
use tidelog::{
    ChangelogHandle, Extent, KeyGroup, KeyGroupRange, LogId, Piece, Restore, SequenceNumber, varint,
};
use tidelog_upload::{Body, Lane, Store, block_on, open_store};

use crate::input::Input;
use crate::seal;

/// An object with a few parts. Its lengths and checksums are right, but for numbers of the input.
pub fn object(input: &mut Input<'_>) -> Vec<u8> {
    const LOGS: u64 = 3;
    let mut object = Vec::new();
    let mut directories: BTreeMap<u64, Vec<u8>> = BTreeMap::new();
    let mut next: BTreeMap<u64, u64> = BTreeMap::new();
    let mut parts = Vec::new();
    let choices: Vec<u8> = (0..input.byte() % 4).map(|_| input.byte()).collect();
    let has = |choice: u8, log: &u64| choice >> (4 + log) & 1 != 0;
    let named: Vec<u64> = (0..LOGS).filter(|log| choices.iter().any(|choice| has(*choice, log))).collect();
    for &choice in &choices {
        let packed = choice & 1;
        input.put(&mut parts, u64::from(choice & 3));
        if choice & 2 != 0 {
            parts.extend(9u64.to_le_bytes());
            input.put(&mut parts, 5);
        }
        input.put(&mut parts, named.iter().filter(|log| has(choice, log)).count() as u64);
        let mut due_index = 0;
        for (index, &log) in (0u64..).zip(&named).filter(|(_, log)| has(choice, log)) {
            let (start, first) = (object.len(), *next.entry(log).or_default());
            let mut directory = Vec::new();
            let entries = u64::from(input.byte()) % 4;
            input.put(&mut directory, entries);
            let (mut due_key, mut end) = (0, first + 1);
            for _ in 0..entries {
                let key = due_key + u64::from(input.byte());
                input.put(&mut directory, key - due_key);
                due_key = key + 1;
                let changeset = changeset(input, packed == 1, first, &mut end);
                input.put(&mut directory, changeset.len() as u64);
                object.extend(changeset);
            }
            input.put(&mut parts, index - due_index);
            due_index = index + 1;
            let from = input.number(first);
            varint::put(&mut parts, from);
            input.put(&mut parts, end - first);
            directory.extend([0; 8]);
            input.put(&mut parts, directory.len() as u64);
            input.put(&mut parts, (object.len() - start) as u64);
            directories.entry(log).or_default().extend(directory);
            next.insert(log, end);
        }
    }
    object.extend(directories.into_values().flatten());
    let mut footer = input.number(8).to_le_bytes().to_vec();
    varint::put(&mut footer, named.len() as u64);
    named.iter().for_each(|log| footer.extend((1 + u128::from(*log)).to_le_bytes()));
    input.put(&mut footer, choices.len() as u64);
    footer.extend(parts);
    footer.extend((footer.len() as u64 + 32).to_le_bytes());
    footer.extend(2u32.to_le_bytes());
    footer.extend([0; 20]);
    object.extend(footer);
    seal::object(&mut object);
    object
}

/// A changeset of numbers from `first` on, below `end`, which is raised if need be.
fn changeset(input: &mut Input<'_>, packed: bool, first: u64, end: &mut u64) -> Vec<u8> {
    let mut payload = Vec::new();
    let count = u64::from(input.byte()) % 5;
    input.put(&mut payload, count);
    let mut due = 0;
    for index in 0..count {
        let skip = u64::from(input.byte()) + if index == 0 { first } else { 0 };
        input.put(&mut payload, skip);
        due += skip + 1;
        let value = input.bytes();
        input.put(&mut payload, value.len() as u64);
        payload.extend(value);
    }
    *end = (*end).max(due);
    let mut out = vec![0; 8];
    if !packed {
        out.extend(payload);
    } else if input.byte() & 1 == 0 {
        input.put(&mut out, 0);
        out.extend(payload);
    } else {
        input.put(&mut out, payload.len() as u64);
        out.extend(lz4_flex::block::compress(&payload));
    }
    out
}

/// Changes of one log, by key group, as they come.
pub type Changes = BTreeMap<Option<u16>, Vec<(u64, Vec<u8>)>>;

/// Reads an object by handles that name all of each log, and holds what comes against the parts of it. Returns what was
/// read of each log.
pub fn read(object: &[u8]) -> BTreeMap<LogId, Changes> {
    let mut found = BTreeMap::new();
    let Some(store) = put(BUCKET, object) else { return found };
    for handle in handles(BUCKET, object) {
        let changes = read_handle(&handle, &store, KeyGroupRange::ALL);
        let expected = expected(object, &handle);
        assert_eq!(changes.as_ref().ok(), expected.as_ref(), "{handle:?}: {changes:?}");
        let Ok(changes) = changes else { continue };
        let half = KeyGroupRange::new(0, 127).expect("not empty");
        let mut of_half = changes.clone();
        of_half.retain(|group, _| group.is_none_or(|group| half.contains(KeyGroup(group))));
        assert_eq!(read_handle(&handle, &store, half).ok(), Some(of_half));
        found.insert(handle.log(), changes);
    }
    found
}

const BUCKET: &str = "memory://";
const NAME: &str = "object";

/// A bucket in memory with the object in it; none for an object without a byte.
pub fn put(bucket: &str, object: &[u8]) -> Option<Arc<dyn Store>> {
    let store = open_store(bucket).expect("memory is there");
    let body = Body::new(vec![Bytes::copy_from_slice(object)]);
    block_on(store.put(NAME, body, Lane::Primary)).expect("memory takes it");
    (!object.is_empty()).then_some(store)
}

/// A handle for all of each log of an object; some handle if it has no footer.
pub fn handles(bucket: &str, object: &[u8]) -> Vec<ChangelogHandle> {
    let len = object.len() as u64;
    let at = Footer::locate(object, len).unwrap_or(len - 1..len);
    let Ok(footer) = Footer::decode(&object[at.start as usize..], None) else {
        return vec![handle(bucket, LogId(1), 0..1, at, len, 0)];
    };
    let logs: BTreeSet<LogId> = footer.runs().map(|(_, run, _)| run.log).collect();
    let handle = |log: LogId| {
        let first = footer.runs_of(log).next().map_or(0, |(_, run, _)| run.first.0);
        let end = footer.runs_of(log).last().map_or(0, |(_, run, _)| run.end.0);
        handle(bucket, log, first..end, at.clone(), len, footer.token())
    };
    logs.into_iter().map(handle).collect()
}

fn handle(
    bucket: &str,
    log: LogId,
    numbers: Range<u64>,
    footer: Range<u64>,
    len: u64,
    token: u64,
) -> ChangelogHandle {
    let piece = |offset, bytes| Piece { bucket: bucket.into(), object: NAME.to_owned(), offset, bytes };
    let pieces = match len / 2 {
        0 => vec![piece(0, len)],
        half => vec![piece(0, half), piece(half, len - half)],
    };
    let (first, end) = (SequenceNumber(numbers.start), SequenceNumber(numbers.end));
    let extents = vec![Extent { pieces, footer, token, first, end }];
    ChangelogHandle::new(log, "", KeyGroupRange::ALL, first, end, extents).expect("such a handle is valid")
}

/// What a reader makes of a handle whose bucket is `store`.
///
/// # Errors
/// The reader's.
pub fn read_handle(
    handle: &ChangelogHandle,
    store: &Arc<dyn Store>,
    key_groups: KeyGroupRange,
) -> Result<Changes, tidelog::ReadError> {
    let restore = Restore::open_simulated(std::slice::from_ref(handle), vec![Arc::clone(store)])?;
    let mut changes = Changes::new();
    let mut metadata = true;
    for change in restore.reader(key_groups)? {
        let change = change?;
        assert_eq!(change.log, handle.log());
        assert!((handle.from()..handle.to()).contains(&change.number));
        assert!(metadata || change.key_group.is_some(), "metadata comes first");
        metadata = change.key_group.is_none();
        let of_group = changes.entry(change.key_group.map(|group| group.0)).or_default();
        assert!(of_group.last().is_none_or(|(last, _)| *last < change.number.0), "numbers go up");
        of_group.push((change.number.0, change.value.to_vec()));
    }
    Ok(changes)
}

/// What the parts of the object hold of a handle's log; `None` if it cannot be read.
fn expected(object: &[u8], handle: &ChangelogHandle) -> Option<Changes> {
    let log = handle.log();
    let at = handle.extents()[0].footer.start as usize;
    let footer = Footer::decode(&object[at..], None).ok()?;
    let bytes =
        |range: Range<u64>| object.get(usize::try_from(range.start).ok()?..usize::try_from(range.end).ok()?);
    let mut changes = Changes::new();
    let mut due = None;
    for (index, run, at) in footer.runs_of(log) {
        if due.is_some_and(|due| due != run.first) {
            return None;
        }
        due = Some(run.end);
        let (id, part) = (footer.part_id(index), &footer.parts()[index as usize]);
        let directory = Directory::decode(bytes(at)?, id, run).ok()?;
        for entry in directory.entries() {
            let start = part.offset + run.offset;
            let stored = bytes(start + entry.range.start..start + entry.range.end)?;
            let changeset =
                Changeset::decode(Bytes::copy_from_slice(stored), id, log, entry.group, part.compression)
                    .ok()?;
            let numbers = run.first..run.end;
            for (number, value) in changeset.records() {
                if !numbers.contains(&number) {
                    return None;
                }
                let group = changes.entry(entry.group.map(|group| group.0)).or_default();
                group.push((number.0, value.to_vec()));
            }
        }
    }
    Some(changes)
}

/// Whether compression is asked for, by a byte of the input.
pub fn compression(byte: u8) -> Compression {
    if byte & 1 == 0 { Compression::None } else { Compression::Lz4 }
}
