//! The file of a local directory's manifest: only its end may be torn, and what is before that stays the same without it.
#![no_main]

use tidelog_fuzz::{memory, seal};
use tidelog_io::directory::ManifestContent;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    memory::within((1 << 20) + 100 * data.len(), || {
        check(data);
        let mut sealed = data.to_vec();
        seal::manifest_file(&mut sealed);
        check(&sealed);
    });
});

fn check(bytes: &[u8]) {
    let Ok(content) = ManifestContent::decode(bytes) else { return };
    assert_eq!(content.len_bytes + content.torn_bytes, bytes.len() as u64);
    assert!(content.intact_bytes <= content.len_bytes);
    let whole = &bytes[..content.len_bytes as usize];
    let mut without_end = content.clone();
    without_end.torn_bytes = 0;
    assert_eq!(ManifestContent::decode(whole).expect("it is whole"), without_end);
    // However much of what was appended a crash leaves, it is the beginning of it.
    for cut in [
        content.intact_bytes,
        content.intact_bytes.midpoint(content.len_bytes),
        content.len_bytes.saturating_sub(1),
    ] {
        match ManifestContent::decode(&whole[..cut as usize]) {
            Ok(left) => assert!(content.records.starts_with(&left.records)),
            Err(error) => assert!(cut < content.intact_bytes, "cut at {cut}: {error}"),
        }
    }
}
