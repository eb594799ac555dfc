//! What is on the disk or in the bucket is damaged on purpose: every flipped bit and every missing byte is noticed.

mod common;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::slice;
use std::time::Duration;

use common::{collect, objects, read};
use tidelog::assemble::Assembler;
use tidelog::block::{self, Block, BlockBuilder, BlockPlace};
use tidelog::record::{FrameKind, Header};
use tidelog::tail::Tail;
use tidelog::{
    Changelog, ChangelogHandle, ChangelogReader, CompactError, Compactor, Compression, Extent, KeyGroup,
    KeyGroupRange, LocalLogs, LogId, OpenError, Options, Piece, ReadError, SequenceNumber,
};
use tidelog_upload::{Body, Lane, block_on, open_store};

const ZERO: SequenceNumber = SequenceNumber::ZERO;

/// The smallest segments and blocks there are.
fn tiny(dir: &Path) -> Options {
    let options = common::options(dir).block_bytes(8 << 10).segment_bytes(16 << 10).local_bytes(1 << 20);
    options.lane_bytes(64 << 10).part_bytes(1 << 20).value_bytes_max(1 << 20).memory_bytes(4 << 20)
}

/// Three segments, the last of them partly filled, cleanly closed.
fn close_cleanly(dir: &Path) {
    let changelog = Changelog::open(tiny(dir)).unwrap();
    let mut writer = changelog.create_writer("log", KeyGroupRange::ALL).unwrap();
    for number in 0..9u16 {
        writer.append(KeyGroup(number), &[number as u8; 3000]).unwrap();
        writer.sync().wait().unwrap();
    }
    changelog.close(Duration::from_secs(20)).unwrap();
}

fn local_files(dir: &Path, prefix: &str) -> BTreeMap<PathBuf, Vec<u8>> {
    let files = fs::read_dir(dir.join("local")).unwrap().map(|entry| entry.unwrap().path());
    let wanted = files.filter(|path| path.file_name().unwrap().to_string_lossy().starts_with(prefix));
    wanted.map(|path| (path.clone(), fs::read(&path).unwrap())).collect()
}

/// The bytes up to the last one that is not zero: what was written in the only use of a segment.
fn written(bytes: &[u8]) -> usize {
    bytes.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1)
}

fn must_be_refused(dir: &Path, what: &str) {
    match Changelog::open(tiny(dir)) {
        Err(OpenError::Damaged { segment, .. }) => assert!(segment.starts_with("segment-"), "{segment}"),
        Err(OpenError::Manifest { .. } | OpenError::Record { .. }) => {}
        Err(error) => panic!("{what}: refused for another reason: {error}"),
        Ok(_) => panic!("{what}: not noticed"),
    }
}

#[test]
fn a_sealed_segment_shows_every_flipped_bit_and_missing_byte() {
    let dir = tempfile::tempdir().unwrap();
    close_cleanly(dir.path());
    let manifest = local_files(dir.path(), "MANIFEST");
    let segments = local_files(dir.path(), "segment-");
    assert!(segments.values().filter(|bytes| written(bytes) > 0).count() >= 3);
    let restore = |files: &BTreeMap<PathBuf, Vec<u8>>| {
        for (path, bytes) in files {
            fs::write(path, bytes).unwrap();
        }
    };
    for (path, bytes) in &segments {
        let len = written(bytes);
        // Each bit of the headers, and one bit of each byte of the rest: opening takes a millisecond.
        let flips = (0..len).flat_map(|at| {
            let bits = if at % 4096 < 160 && at % 4 == 0 { 0..8 } else { at % 8..at % 8 + 1 };
            bits.map(move |bit| (at, bit)).filter(move |(at, _)| at % 4096 < 160 || at % 61 == 0)
        });
        for (at, bit) in flips {
            let mut damaged = bytes.clone();
            damaged[at] ^= 1 << bit;
            fs::write(path, &damaged).unwrap();
            must_be_refused(dir.path(), &format!("bit {bit} of byte {at} of {}", path.display()));
        }
        for cut in (0..len).step_by(509).chain((len > 0).then(|| len - 1)) {
            fs::write(path, &bytes[..cut]).unwrap();
            must_be_refused(dir.path(), &format!("{} cut to {cut} bytes", path.display()));
        }
        if len > 0 {
            fs::write(path, vec![0; bytes.len()]).unwrap();
            must_be_refused(dir.path(), &format!("{} zeroed", path.display()));
        }
        restore(&segments);
        restore(&manifest);
    }
    let changelog = Changelog::open(tiny(dir.path())).unwrap();
    assert_eq!(changelog.recovered()[0].end(), SequenceNumber(9), "undamaged, it opens");
}

/// Runs `check` with each bit of a file flipped in turn: the number of its byte, and of the bit in that.
fn with_each_bit_flipped(path: &Path, bytes: &[u8], check: impl Fn(usize, usize)) {
    for at in 0..bytes.len() {
        for bit in 0..8 {
            let mut damaged = bytes.to_vec();
            damaged[at] ^= 1 << bit;
            fs::write(path, &damaged).unwrap();
            check(at, bit);
        }
    }
}

#[test]
fn a_sealed_manifest_shows_every_flipped_bit_and_missing_byte() {
    let dir = tempfile::tempdir().unwrap();
    close_cleanly(dir.path());
    let (path, bytes) = local_files(dir.path(), "MANIFEST").pop_first().unwrap();
    with_each_bit_flipped(&path, &bytes, |at, bit| {
        must_be_refused(dir.path(), &format!("bit {bit} of byte {at} of the manifest"));
    });
    for at in 0..bytes.len() {
        fs::write(&path, &bytes[..at]).unwrap();
        must_be_refused(dir.path(), &format!("the manifest cut to {at} bytes"));
    }
    fs::write(&path, &bytes).unwrap();
    assert_eq!(Changelog::open(tiny(dir.path())).unwrap().recovered().len(), 1, "undamaged, it opens");
}

fn persisted(dir: &Path) -> (ChangelogHandle, PathBuf, Vec<u8>) {
    let changelog = Changelog::open(tiny(dir)).unwrap();
    let mut writer = changelog.create_writer("log", KeyGroupRange::ALL).unwrap();
    for number in 0..40u16 {
        writer.append(KeyGroup(number % 3), &[number as u8; 20]).unwrap();
    }
    let handle = writer.persist_durably(ZERO).wait().unwrap();
    let path = dir.join("bucket/tidelog").join(&objects(dir)[0]);
    let bytes = fs::read(&path).unwrap();
    (handle, path, bytes)
}

#[test]
fn an_object_shows_every_flipped_bit_and_missing_byte() {
    let dir = tempfile::tempdir().unwrap();
    let (handle, path, bytes) = persisted(dir.path());
    let whole = read(std::slice::from_ref(&handle), KeyGroupRange::ALL);
    let attempt = || -> Result<Vec<_>, ReadError> {
        ChangelogReader::open(std::slice::from_ref(&handle), KeyGroupRange::ALL)?.collect()
    };
    for at in 0..bytes.len() {
        let mut damaged = bytes.clone();
        damaged[at] ^= 1 << (at % 8);
        fs::write(&path, &damaged).unwrap();
        match attempt() {
            Err(error @ (ReadError::Footer { .. } | ReadError::Damaged { .. })) => {
                let (ReadError::Footer { bucket, object, .. } | ReadError::Damaged { bucket, object, .. }) =
                    &error
                else {
                    unreachable!()
                };
                assert_eq!(format!("{bucket}/{object}"), format!("file://{}", path.display()));
                let said = error.to_string();
                assert!(
                    said.contains(bucket) && said.contains("put back the one that was written"),
                    "{said}"
                );
                if let ReadError::Damaged { start, end, .. } = error {
                    assert!((start..end).contains(&(at as u64)), "byte {at}: {said}");
                }
            }
            other => panic!("bit {} of byte {at}: {other:?}", at % 8),
        }
    }
    for cut in 0..bytes.len() {
        fs::write(&path, &bytes[..cut]).unwrap();
        assert!(matches!(attempt(), Err(ReadError::Store(_))), "cut to {cut} bytes");
    }
    fs::remove_file(&path).unwrap();
    assert!(matches!(attempt(), Err(ReadError::Store(error)) if error.is_not_found()));
    fs::write(&path, &bytes).unwrap();
    assert_eq!(read(&[handle], KeyGroupRange::ALL), whole);
}

#[test]
fn a_torn_tail_after_a_kill_is_an_end_not_damage() {
    let dir = tempfile::tempdir().unwrap();
    {
        let changelog = Changelog::open(tiny(dir.path())).unwrap();
        let mut writer = changelog.create_writer("log", KeyGroupRange::ALL).unwrap();
        for number in 0..3u16 {
            writer.append(KeyGroup(number), &[1; 3000]).unwrap();
            writer.sync().wait().unwrap();
        }
        // As a kill leaves it: the manifest is not sealed.
        fs::copy(dir.path().join("local/MANIFEST"), dir.path().join("kept")).unwrap();
    }
    fs::copy(dir.path().join("kept"), dir.path().join("local/MANIFEST")).unwrap();
    let segments = local_files(dir.path(), "segment-");
    let (path, bytes) = segments.iter().rfind(|(_, bytes)| written(bytes) > 0).unwrap();
    let last_block = (written(bytes) - 1) / 4096 * 4096;
    let mut torn = bytes.clone();
    torn[last_block + 2000..].fill(0);
    fs::write(path, torn).unwrap();
    let changelog = Changelog::open(tiny(dir.path())).unwrap();
    let recovered = &changelog.recovered()[0];
    assert_eq!(recovered.end(), SequenceNumber(2));
    let content = collect(recovered.read(KeyGroupRange::ALL).unwrap());
    assert_eq!(content.values().map(Vec::len).sum::<usize>(), 2);
}

/// The batch without records at the end of a manifest.
const WITNESS_BYTES: usize = 20;

/// A changelog that is killed, as far as its files show: the manifest ends with the acquisition of the segment in use.
fn killed(dir: &Path) {
    let changelog = Changelog::open(tiny(dir)).unwrap();
    let mut writer = changelog.create_writer("log", KeyGroupRange::ALL).unwrap();
    writer.append(KeyGroup(0), &[1; 3000]).unwrap();
    writer.sync().wait().unwrap();
    let manifest = dir.join("local/MANIFEST");
    let as_killed = fs::read(&manifest).unwrap();
    drop((writer, changelog));
    fs::write(&manifest, as_killed).unwrap();
}

#[test]
fn a_manifest_that_lost_the_use_of_a_segment_is_not_taken_for_torn() {
    let dir = tempfile::tempdir().unwrap();
    killed(dir.path());
    let (path, bytes) = local_files(dir.path(), "MANIFEST").pop_first().unwrap();
    // A power cut took the witness.
    let mut damaged = bytes[..bytes.len() - WITNESS_BYTES].to_vec();
    *damaged.last_mut().unwrap() ^= 4;
    fs::write(&path, &damaged).unwrap();
    match Changelog::open(tiny(dir.path())) {
        Err(OpenError::ManifestBehind { segment, .. }) => assert_eq!(segment, "segment-00000001"),
        other => panic!("acknowledged changes would be lost: {other:?}"),
    }
    fs::write(&path, &bytes).unwrap();
    assert_eq!(Changelog::open(tiny(dir.path())).unwrap().recovered()[0].end(), SequenceNumber(1));
}

#[test]
fn a_manifest_after_a_kill_shows_every_flipped_bit() {
    let dir = tempfile::tempdir().unwrap();
    killed(dir.path());
    let (path, bytes) = local_files(dir.path(), "MANIFEST").pop_first().unwrap();
    with_each_bit_flipped(&path, &bytes, |at, bit| {
        if at < bytes.len() - WITNESS_BYTES {
            must_be_refused(dir.path(), &format!("bit {bit} of byte {at} of the manifest"));
        } else if bit == at % 8 {
            // Nothing is missing.
            let logs = LocalLogs::open(dir.path().join("local")).unwrap();
            assert_eq!(logs.logs()[0].end(), SequenceNumber(1), "bit {bit} of byte {at}");
        }
    });
}

#[test]
fn segments_without_a_manifest_are_not_written_over() {
    let dir = tempfile::tempdir().unwrap();
    killed(dir.path());
    fs::remove_file(dir.path().join("local/MANIFEST")).unwrap();
    assert!(matches!(Changelog::open(tiny(dir.path())), Err(OpenError::ManifestMissing { .. })));
    assert!(!dir.path().join("local/MANIFEST").exists(), "nothing was made");
}

/// No checksum covers the numbers of a run, which stand in the footer, together with its changes: what another program wrote
/// wrong is found by both being held against each other, before it is read twice or made into another object.
#[test]
fn a_change_outside_of_its_run_is_damage_to_readers_and_compactions() {
    let block = |first: u64, values: &[&[u8]]| {
        let mut builder = BlockBuilder::new(4096);
        let mut bytes = vec![0; 4096];
        let entry = builder.add_entry(0, LogId(7), SequenceNumber(first));
        for value in values {
            builder.push_value(&mut bytes, Header::new(FrameKind::Data, 1, 0, value.len()), &[], value);
        }
        builder.add_count(entry, values.len() as u32);
        builder.finish(&mut bytes, false);
        let place =
            BlockPlace { directory: 0, segment: 0, epoch: 0, index: 0, offset: 0, number: 0, watermark: 0 };
        block::seal(&mut bytes, &place);
        bytes
    };
    // Of the first part the footer says that it ends before change 11, which the second one has.
    let object = |first_end: u64| {
        let (mut tail, mut object) = (Tail::new(5), Vec::new());
        for (index, block) in [block(10, &[b"ten", b"eleven"]), block(11, &[b"eleven"])].iter().enumerate() {
            let id = tail.footer().part_id(index as u32);
            let kept = &mut |_| SequenceNumber(0)..SequenceNumber(u64::MAX);
            let blocks = [Block::decode(block, None)];
            let mut part = Assembler::new().assemble(blocks, kept, id, Compression::None).unwrap();
            if index == 0 {
                part.runs[0].end = SequenceNumber(first_end);
            } else if first_end == 12 {
                break;
            }
            object.extend_from_slice(&part.bytes);
            tail.push(Compression::None, part.runs, &part.directories);
        }
        let (end, footer) = tail.encode();
        object.extend(end);
        (object, footer)
    };
    for (first_end, sound) in [(12, true), (11, false)] {
        let (bytes, footer) = object(first_end);
        let bucket = format!("memory://outside-{first_end}");
        let store = open_store(&bucket).unwrap();
        let piece = |bytes: &[u8]| Piece {
            bucket: bucket.as_str().into(),
            object: "object".to_owned(),
            offset: 0,
            bytes: bytes.len() as u64,
        };
        let (first, end) = (SequenceNumber(10), SequenceNumber(12));
        let extent = Extent { pieces: vec![piece(&bytes)], footer, token: 5, first, end };
        let handle =
            ChangelogHandle::new(LogId(7), "", KeyGroupRange::ALL, first, end, vec![extent]).unwrap();
        block_on(store.put("object", Body::new(vec![bytes.into()]), Lane::Primary)).unwrap();
        let read = ChangelogReader::open(slice::from_ref(&handle), KeyGroupRange::ALL)
            .unwrap()
            .map(|change| change.map(|change| change.number.0))
            .collect::<Result<Vec<_>, _>>();
        let compacted = Compactor::open(&bucket).unwrap().compact(slice::from_ref(&handle), None);
        if sound {
            assert_eq!(read.unwrap(), [10, 11]);
            compacted.unwrap();
        } else {
            assert!(matches!(read, Err(ReadError::Damaged { part: 0, .. })), "{read:?}");
            assert!(matches!(compacted, Err(CompactError::Read(ReadError::Damaged { part: 0, .. }))));
        }
    }
}

/// Blocks that the log of [`written_in_part`] is in, one change each.
const CHANGES: u64 = 9;

/// A log of which objects hold the first changes and the disk has the rest, too. Closed cleanly, or as a kill leaves it.
fn written_in_part(dir: &Path, persisted: u64, killed: bool) -> Option<ChangelogHandle> {
    let changelog = Changelog::open(tiny(dir)).unwrap();
    let mut writer = changelog.create_writer("log", KeyGroupRange::ALL).unwrap();
    let mut handle = None;
    for number in 0..CHANGES {
        writer.append(KeyGroup(0), &[number as u8; 3000]).unwrap();
        writer.sync().wait().unwrap();
        if number + 1 == persisted {
            handle = Some(writer.persist_durably(ZERO).wait().unwrap());
        }
    }
    let manifest = dir.join("local/MANIFEST");
    let as_killed = fs::read(&manifest).unwrap();
    changelog.close(Duration::from_secs(20)).unwrap();
    if killed {
        fs::write(&manifest, as_killed).unwrap();
    }
    handle
}

/// The blocks of all segments that were used once: file, place in it, number.
fn blocks(dir: &Path) -> Vec<(PathBuf, std::ops::Range<usize>, u64)> {
    let mut found = Vec::new();
    for (path, bytes) in local_files(dir, "segment-") {
        let mut at = 0;
        while let Ok(len) = Block::peek_len(&bytes[at..]) {
            let block = Block::decode(&bytes[at..at + len], None).unwrap();
            found.push((path.clone(), at..at + len, block.header().place.number));
            at += len;
            if at == bytes.len() {
                break;
            }
        }
    }
    found
}

fn put_back(dir: &Path, files: &BTreeMap<PathBuf, Vec<u8>>) {
    for path in local_files(dir, "").into_keys() {
        fs::remove_file(path).unwrap();
    }
    for (path, bytes) in files {
        fs::write(path, bytes).unwrap();
    }
}

/// All of the log is there, it can be gone on from there, and the next open finds that, too.
fn must_open(dir: &Path, handle: Option<&ChangelogHandle>, end: u64, what: &str) {
    let numbers = |content: common::Content| -> Vec<u64> {
        content
            .into_values()
            .flatten()
            .map(|(number, value)| {
                assert_eq!(value, [number as u8; 3000], "{what}");
                number
            })
            .collect()
    };
    {
        let logs = LocalLogs::open(dir.join("local")).unwrap_or_else(|error| panic!("{what}: {error}"));
        let log = logs.logs().iter().find(|log| log.name() == "log").unwrap();
        assert_eq!(log.end(), SequenceNumber(end), "{what}");
    }
    for times in 0..2 {
        let changelog = Changelog::open(tiny(dir)).unwrap_or_else(|error| panic!("{what}, {times}: {error}"));
        let log = changelog.recovered().iter().find(|log| log.name() == "log").unwrap();
        assert_eq!(log.end(), SequenceNumber(end), "{what}");
        assert!(numbers(collect(log.read(KeyGroupRange::ALL).unwrap())).into_iter().eq(0..end), "{what}");
        if let Some(handle) = handle {
            let restore = changelog.restore(std::slice::from_ref(handle)).unwrap();
            assert!(numbers(collect(restore.reader_of_all())).into_iter().eq(0..handle.to().0), "{what}");
        }
        let later = changelog.recovered().iter().filter(|log| log.name() == "later");
        assert!(later.map(|log| log.end().0).eq(vec![1; times]), "{what}");
        let mut writer = changelog.create_writer("later", KeyGroupRange::ALL).unwrap();
        writer.append(KeyGroup(0), b"later").unwrap();
        writer.sync().wait().unwrap();
        changelog.close(Duration::from_secs(20)).unwrap();
    }
}

#[test]
fn damage_of_what_is_only_kept_for_restores_does_not_keep_a_directory_from_being_opened() {
    for (persisted, killed) in [(5, false), (5, true), (CHANGES, false), (CHANGES, true), (0, false)] {
        let dir = tempfile::tempdir().unwrap();
        let handle = written_in_part(dir.path(), persisted, killed);
        let files = local_files(dir.path(), "");
        let blocks = blocks(dir.path());
        assert!(blocks.iter().map(|(.., number)| *number).eq(0..CHANGES), "{blocks:?}");
        for (path, place, number) in &blocks {
            let what = format!("block {number}, {persisted} persisted, killed: {killed}");
            let bytes = &files[path];
            let mut flipped = bytes.clone();
            flipped[place.start + 1000] ^= 1;
            let mut zeroed = bytes.clone();
            zeroed[place.clone()].fill(0);
            // As if a newer program had written it.
            let mut newer = bytes.clone();
            newer[place.start + 9] ^= 16;
            // What may have been in flight when the process was killed.
            let is_end = killed && number + 1 == CHANGES;
            for (damaged, is_newer) in [(flipped, false), (zeroed, false), (newer, true)] {
                put_back(dir.path(), &files);
                fs::write(path, damaged).unwrap();
                let next_is_here = blocks.iter().any(|(of, _, next)| of == path && *next == number + 1);
                if is_newer && *number < persisted && !next_is_here {
                    // Nothing here tells that it is not the first of those that only a newer program can read.
                    continue;
                }
                if *number < persisted {
                    must_open(dir.path(), handle.as_ref(), CHANGES, &what);
                } else if is_end && !is_newer {
                    must_open(dir.path(), handle.as_ref(), CHANGES - 1, &what);
                } else {
                    must_be_refused(dir.path(), &what);
                }
            }
            let last_of_file = blocks.iter().filter(|(of, ..)| of == path).map(|(.., number)| *number).max();
            let is_kept_only = last_of_file.unwrap() < persisted;
            if killed && last_of_file == Some(CHANGES - 1) {
                // Nothing tells what the last segment held when the process was killed.
                continue;
            }
            for cut in [Some(place.start), Some(place.start + 1), None] {
                put_back(dir.path(), &files);
                match cut {
                    Some(len) => fs::write(path, &bytes[..len]).unwrap(),
                    None => fs::remove_file(path).unwrap(),
                }
                let what = format!("{what}, {} cut to {cut:?}", path.display());
                if is_kept_only {
                    must_open(dir.path(), handle.as_ref(), CHANGES, &what);
                } else {
                    let refused = Changelog::open(tiny(dir.path())).expect_err(&what);
                    let named =
                        matches!(refused, OpenError::Damaged { .. } | OpenError::SegmentMissing { .. });
                    assert!(named, "{what}: {refused}");
                }
            }
        }
    }
}

#[test]
fn damage_of_what_was_truncated_behind_what_is_kept_is_no_damage() {
    let dir = tempfile::tempdir().unwrap();
    let changelog = Changelog::open(tiny(dir.path())).unwrap();
    let mut kept = changelog.create_writer("log", KeyGroupRange::ALL).unwrap();
    kept.append(KeyGroup(0), &[0; 3000]).unwrap();
    let handle = kept.persist_durably(ZERO).wait().unwrap();
    let mut gone = changelog.create_writer("gone", KeyGroupRange::ALL).unwrap();
    for _ in 1..CHANGES {
        gone.append(KeyGroup(0), &[7; 3000]).unwrap();
        gone.sync().wait().unwrap();
    }
    gone.truncate(SequenceNumber(CHANGES - 1)).unwrap();
    changelog.close(Duration::from_secs(20)).unwrap();
    let files = local_files(dir.path(), "");
    let blocks = blocks(dir.path());
    assert!(blocks.iter().map(|(.., number)| *number).eq(0..CHANGES), "{blocks:?}");
    for (path, place, number) in &blocks {
        put_back(dir.path(), &files);
        let mut damaged = files[path].clone();
        damaged[place.start + 1000] ^= 1;
        fs::write(path, damaged).unwrap();
        must_open(dir.path(), Some(&handle), 1, &format!("block {number}"));
    }
}

/// New blocks do not get the numbers of those that were let go of.
#[test]
fn what_is_written_after_such_damage_is_needed_like_all_else() {
    let dir = tempfile::tempdir().unwrap();
    written_in_part(dir.path(), CHANGES, true);
    let old = blocks(dir.path());
    let (path, place, _) = old.last().unwrap();
    let mut damaged = fs::read(path).unwrap();
    damaged[place.start + 1000] ^= 1;
    fs::write(path, damaged).unwrap();
    let manifest = dir.path().join("local/MANIFEST");
    let as_killed = {
        let changelog = Changelog::open(tiny(dir.path())).unwrap();
        let mut writer = changelog.create_writer("later", KeyGroupRange::ALL).unwrap();
        for _ in 0..3 {
            writer.append(KeyGroup(0), &[1; 3000]).unwrap();
            writer.sync().wait().unwrap();
        }
        fs::read(&manifest).unwrap()
    };
    fs::write(&manifest, as_killed).unwrap();
    let new = blocks(dir.path());
    assert!(new.iter().map(|(.., number)| *number).eq(CHANGES..CHANGES + 3), "{new:?}");
    let (path, place, _) = &new[0];
    let mut damaged = fs::read(path).unwrap();
    damaged[place.start + 1000] ^= 1;
    fs::write(path, damaged).unwrap();
    must_be_refused(dir.path(), "the first of the new blocks");
}
