//! The footer of an object: what decodes has one encoding, and its places are inside the object.
#![no_main]

use std::collections::BTreeMap;

use tidelog::footer::Footer;
use tidelog_fuzz::{memory, seal};

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    memory::within((1 << 20) + 100 * data.len(), || {
        check(data);
        let mut sealed = data.to_vec();
        seal::footer(&mut sealed);
        check(&sealed);
    });
});

fn check(bytes: &[u8]) {
    let Ok(footer) = Footer::decode(bytes, None) else { return };
    assert_eq!(footer.encode(), bytes);
    let again = Footer::decode(bytes, Some(footer.token()));
    assert_eq!(again.as_ref(), Ok(&footer));
    Footer::decode(bytes, Some(!footer.token())).expect_err("the token is another");
    let start = footer.parts_len();
    let (mut end, mut directories, mut count) = (0, BTreeMap::new(), 0);
    for (index, run, directory) in footer.runs() {
        let part = &footer.parts()[index as usize];
        assert!(part.offset + run.offset >= end && run.offset + run.len <= part.len);
        end = part.offset + run.offset + run.len;
        assert!(start <= directory.start && directory.end <= footer.start());
        assert_eq!(directory.end - directory.start, u64::from(run.directory_len));
        directories.insert((run.log, index), (*run, directory));
        count += 1;
    }
    assert!(end <= start);
    assert_eq!(directories.len(), count, "a log has one run in a part");
    // In the order of logs they follow each other without a gap.
    let mut due = start;
    for ((log, index), (run, directory)) in &directories {
        assert_eq!(directory.start, due);
        due = directory.end;
        let all = footer.directories(*log);
        assert!(all.start <= directory.start && directory.end <= all.end);
        let found = footer.runs_of(*log).find(|(found, ..)| found == index);
        assert_eq!(found, Some((*index, run, directory.clone())));
    }
    assert_eq!(due, footer.start());
}
