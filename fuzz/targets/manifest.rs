//! The records of a local directory's manifest, each behind its length: what decodes has one encoding; a record that is
//! refused changes nothing; and the fewest records that say the same say the same.
#![no_main]

use tidelog::SequenceNumber;
use tidelog::manifest::{ManifestRecord, ManifestState};
use tidelog_fuzz::memory;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    memory::within((4 << 20) + 1000 * data.len(), || check(data));
});

fn check(mut rest: &[u8]) {
    let mut state = ManifestState::default();
    while let Some((len, behind)) = rest.split_first_chunk::<4>() {
        let len = (u32::from_le_bytes(*len) as usize).min(behind.len());
        let (bytes, behind) = behind.split_at(len);
        rest = behind;
        let Ok(record) = ManifestRecord::decode(bytes) else { continue };
        assert_eq!(record.encode(), bytes);
        let before = state.clone();
        if state.apply(record).is_err() {
            assert_eq!(state, before);
            continue;
        }
        let snapshot: Vec<_> = state.snapshot().iter().map(ManifestRecord::encode).collect();
        assert_eq!(ManifestState::replay(snapshot.iter().map(Vec::as_slice)), Ok(state.clone()));
    }
    for (log, known) in state.logs() {
        let (covered, missing) = (known.covered(), known.missing_from(SequenceNumber(0)));
        assert!(
            covered >= known.truncated && missing.start >= covered && missing.start < missing.end
                || missing.is_empty()
        );
        assert!(known.extents.is_sorted_by(|a, b| a.end <= b.first));
        for extent in &known.extents {
            let object = &state.objects()[&extent.object];
            assert!(
                object
                    .ranges
                    .iter()
                    .any(|range| (range.log, range.first, range.end) == (*log, extent.first, extent.end))
            );
            assert!(state.needs(&extent.object));
        }
    }
    let objects = state.objects().values().map(|object| &object.others);
    for others in objects.chain(state.uploads().values().map(|upload| &upload.others)) {
        assert!(others.is_sorted_by(|a, b| a < b));
    }
    let holds =
        state.holders().values().flat_map(|held| held.values()).map(|logs| logs.len().max(1)).sum::<usize>();
    assert_eq!(holds, state.holds());
    for object in state.unreferenced_objects().map(|object| object.object.clone()).collect::<Vec<_>>() {
        let mut state = state.clone();
        state.apply(ManifestRecord::ObjectDeleted { object }).expect("what nobody needs can be deleted");
    }
}
