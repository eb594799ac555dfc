//! The store's client alone: reads the ranges that a reader would, through a driver like its, and looks at nothing. Like a
//! reader it begins with a bucket that nobody has opened.

use std::collections::VecDeque;
use std::ops::Range;

use bytes::Bytes;
use tidelog::footer::Footer;
use tidelog::part::Directory;
use tidelog::{ChangelogHandle, KeyGroupRange};
use tidelog_upload::bucket::BucketIndex;
use tidelog_upload::{Driver, Runtime, UploadOptions};

/// As a reader asks for them, and as many at once.
const RANGE_BYTES: u64 = 4 << 20;
const READ_AHEAD: usize = 16;

pub struct Client {
    url: String,
    object: String,
    /// Where the changesets of the key groups are.
    pub ranges: Vec<Range<u64>>,
}

impl Client {
    /// A client of the one object of some handles, in one piece.
    pub fn new(url: &str, handles: &[ChangelogHandle], key_groups: KeyGroupRange) -> Client {
        let extent = &handles[0].extents()[0];
        let mut client =
            Client { url: url.to_owned(), object: extent.object().to_owned(), ranges: Vec::new() };
        let driver = client.open();
        let footer = client.get(&driver, extent.footer.clone());
        let footer = Footer::decode(&footer, Some(extent.token)).expect("the object is whole");
        for (index, run, directory) in footer.runs() {
            let start = footer.parts()[index as usize].offset + run.offset;
            let directory = Directory::decode(&client.get(&driver, directory), footer.part_id(index), run);
            let directory = directory.expect("the object is whole");
            let entries = directory.entries().iter();
            let wanted = entries.filter(|entry| entry.group.is_some_and(|group| key_groups.contains(group)));
            let mut open: Option<Range<u64>> = None;
            for entry in wanted {
                let (first, end) = (start + entry.range.start, start + entry.range.end);
                match &mut open {
                    Some(range) if end - range.start <= RANGE_BYTES => range.end = end,
                    _ => client.ranges.extend(open.replace(first..end)),
                }
            }
            client.ranges.extend(open);
        }
        client
    }

    fn open(&self) -> Driver {
        let store = tidelog_upload::open_store(&self.url).expect("the bucket opens");
        let runtime = Runtime::Own { threads: 2 };
        Driver::start(vec![store], runtime, UploadOptions::default()).expect("it starts")
    }

    fn get(&self, driver: &Driver, range: Range<u64>) -> Bytes {
        let (resolver, pending) = tidelog_upload::channel();
        driver.get(BucketIndex(0), &self.object, range, move |bytes| resolver.resolve(bytes));
        pending.wait().expect("it is answered").expect("the bucket has it")
    }

    /// How many bytes the ranges have.
    pub fn bytes(&self) -> u64 {
        self.ranges.iter().map(|range| range.end - range.start).sum()
    }

    /// Opens the bucket and reads all ranges.
    pub fn download(&self) {
        let driver = self.open();
        let mut under_way = VecDeque::new();
        let mut left = self.ranges.iter();
        loop {
            while under_way.len() < READ_AHEAD
                && let Some(range) = left.next()
            {
                let (resolver, pending) = tidelog_upload::channel();
                let done = move |bytes| resolver.resolve(bytes);
                driver.get(BucketIndex(0), &self.object, range.clone(), done);
                under_way.push_back(pending);
            }
            let Some(pending) = under_way.pop_front() else { return };
            drop(pending.wait().expect("it is answered").expect("the bucket has it"));
        }
    }
}
