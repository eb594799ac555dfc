//! Objects in pieces: read, whatever the pieces are, exactly as if they were one.

use std::path::Path;

use tidelog::{
    Change, Changelog, ChangelogHandle, ChangelogReader, KeyGroup, KeyGroupRange, Piece, ReadError,
    SequenceNumber,
};

/// A handle for some changes of two parts, and the changes.
fn written(dir: &Path) -> (ChangelogHandle, Vec<Change>) {
    let bucket = format!("file://{}", dir.join("bucket").display());
    let options = tidelog::Options::new(bucket, dir.join("local"))
        .segment_bytes(1 << 20)
        .local_bytes(4 << 20)
        .block_bytes(8 << 10)
        .part_bytes(16 << 10);
    let changelog = Changelog::open(options).unwrap();
    let mut writer = changelog.create_writer("pieces", KeyGroupRange::new(0, 7).unwrap()).unwrap();
    for number in 0u64..2_000 {
        writer.append(KeyGroup((number % 8) as u16), &number.to_le_bytes().repeat(3)).unwrap();
    }
    writer.append_metadata(b"columns").unwrap();
    let handle = writer.persist_durably(SequenceNumber::ZERO).wait().unwrap();
    let changes = read(&handle).unwrap();
    assert_eq!(changes.len(), 2_001);
    (handle, changes)
}

fn read(handle: &ChangelogHandle) -> Result<Vec<Change>, ReadError> {
    ChangelogReader::open(std::slice::from_ref(handle), handle.key_groups())?.collect()
}

/// The handle, its one object cut at these offsets: every other piece is in another bucket, in a file of its own, behind
/// bytes that do not belong to it.
fn cut(dir: &Path, handle: &ChangelogHandle, cuts: &[usize]) -> ChangelogHandle {
    let mut extents = handle.extents().to_vec();
    let [extent] = &mut extents[..] else { panic!("one checkpoint, one object: {extents:?}") };
    let [whole] = &extent.pieces[..] else { panic!("one piece: {extent:?}") };
    let bytes = std::fs::read(dir.join("bucket").join(&whole.object)).unwrap();
    let second = dir.join("second");
    let mut home = Vec::new();
    let mut pieces = Vec::new();
    let ends = cuts.iter().copied().chain([bytes.len()]);
    let starts = [0].into_iter().chain(cuts.iter().copied());
    for (index, (start, end)) in starts.zip(ends).enumerate() {
        let len = (end - start) as u64;
        if index % 2 == 0 {
            let object = format!("{}.x{}", whole.object, cuts.len());
            pieces.push(Piece { object, offset: home.len() as u64, bytes: len, ..whole.clone() });
            home.extend_from_slice(&bytes[start..end]);
        } else {
            let object = format!("{}.{index:05}.1", whole.object);
            let file = second.join(&object);
            std::fs::create_dir_all(file.parent().unwrap()).unwrap();
            std::fs::write(&file, [b"other", &bytes[start..end], b"bytes"].concat()).unwrap();
            let bucket = format!("file://{}", second.display()).into();
            pieces.push(Piece { bucket, object, offset: 5, bytes: len });
        }
    }
    std::fs::write(dir.join("bucket").join(&pieces[0].object), home).unwrap();
    extent.pieces = pieces;
    let (log, name, from, to) = (handle.log(), handle.name(), handle.from(), handle.to());
    ChangelogHandle::new(log, name, handle.key_groups(), from, to, extents).unwrap()
}

#[test]
fn an_object_reads_the_same_however_it_is_cut() {
    let dir = tempfile::tempdir().unwrap();
    let (handle, changes) = written(dir.path());
    let extent = &handle.extents()[0];
    let (len, footer) = (extent.object_bytes() as usize, extent.footer.start as usize);
    let everywhere: Vec<usize> = (1..60).map(|at| at * len / 60).collect();
    for cuts in [&[1][..], &[len - 1], &[footer], &[footer + 3], &[100, 101, 9_000], &everywhere] {
        let handle = cut(dir.path(), &handle, cuts);
        assert_eq!(read(&handle).unwrap(), changes, "cut at {cuts:?}");
    }
}

#[test]
fn damage_of_any_piece_is_found() {
    let dir = tempfile::tempdir().unwrap();
    let (handle, _) = written(dir.path());
    let len = handle.extents()[0].object_bytes() as usize;
    let cuts: Vec<usize> = (1..8).map(|at| at * len / 8).collect();
    let handle = cut(dir.path(), &handle, &cuts);
    for Piece { bucket, object, offset, bytes } in &handle.extents()[0].pieces {
        let file = Path::new(bucket.strip_prefix("file://").unwrap()).join(object);
        let good = std::fs::read(&file).unwrap();
        let mut bad = good.clone();
        bad[(offset + bytes / 2) as usize] ^= 1;
        std::fs::write(&file, &bad).unwrap();
        let error = read(&handle).unwrap_err();
        assert!(matches!(error, ReadError::Damaged { .. } | ReadError::Footer { .. }), "{error}");
        std::fs::write(&file, &good[..(offset + bytes - 1) as usize]).unwrap();
        assert!(matches!(read(&handle), Err(ReadError::Store(_))));
        std::fs::write(&file, &good).unwrap();
    }
    read(&handle).unwrap();
}
