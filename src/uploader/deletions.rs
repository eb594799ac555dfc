//! The deletion of objects that nobody needs, file by file. Pure: what to delete is told by `next`, how it ended to `ended`.
//!
//! Invariants:
//! 1. Of each bucket at most [`IN_FLIGHT_MAX`] files are being deleted. After one that failed no other begins before a
//!    pause is over, which doubles as long as none is deleted in between.
//! 2. A file that could not be deleted waits behind the others of its bucket. No bucket waits for another one.
//! 3. An object is told to be gone once, when all of its files are.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tidelog_upload::bucket::BucketIndex;

/// How many files of a bucket are deleted at a time.
const IN_FLIGHT_MAX: usize = 16;
/// The pause of a bucket after a deletion that failed.
const PAUSE_MIN: Duration = Duration::from_secs(8);
/// The longest pause.
const PAUSE_MAX: Duration = Duration::from_secs(32);

/// A file of an object that nobody needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DoomedFile {
    pub object: Arc<str>,
    pub bucket: BucketIndex,
    pub name: String,
}

/// What is to be deleted.
#[derive(Debug)]
pub(super) struct Deletions {
    buckets: Vec<Bucket>,
    /// How many files are left of an object.
    left: HashMap<Arc<str>, usize>,
}

#[derive(Debug, Default)]
struct Bucket {
    waiting: VecDeque<DoomedFile>,
    in_flight: usize,
    /// Pauses since a file was deleted.
    pauses: u32,
    paused_until: Option<Instant>,
}

impl Bucket {
    fn is_paused(&self, now: Instant) -> bool {
        self.paused_until.is_some_and(|until| now < until)
    }
}

impl Deletions {
    pub fn new(buckets: usize) -> Deletions {
        Deletions {
            buckets: std::iter::repeat_with(Bucket::default).take(buckets).collect(),
            left: HashMap::new(),
        }
    }

    /// Takes an object, as the files that it consists of.
    pub fn add(&mut self, object: &str, files: Vec<(BucketIndex, String)>) {
        let object: Arc<str> = object.into();
        self.left.insert(Arc::clone(&object), files.len());
        for (bucket, name) in files {
            let file = DoomedFile { object: Arc::clone(&object), bucket, name };
            self.buckets[bucket.0].waiting.push_back(file);
        }
    }

    /// A file to delete now.
    pub fn next(&mut self, now: Instant) -> Option<DoomedFile> {
        let may_begin = |bucket: &&mut Bucket| {
            bucket.in_flight < IN_FLIGHT_MAX && !bucket.waiting.is_empty() && !bucket.is_paused(now)
        };
        let bucket = self.buckets.iter_mut().find(may_begin)?;
        bucket.in_flight += 1;
        bucket.waiting.pop_front()
    }

    /// The deletion of a file ended. Gives the name of its object if nothing is left of that.
    pub fn ended(&mut self, file: DoomedFile, gone: bool, now: Instant) -> Option<Arc<str>> {
        let bucket = &mut self.buckets[file.bucket.0];
        bucket.in_flight -= 1;
        if !gone {
            // Those that were under way with one that failed are of the same attempt.
            if !bucket.is_paused(now) {
                let pause = PAUSE_MAX.min(PAUSE_MIN * (1 << bucket.pauses.min(16)));
                bucket.pauses += 1;
                bucket.paused_until = Some(now + pause);
            }
            bucket.waiting.push_back(file);
            return None;
        }
        bucket.pauses = 0;
        let left = self.left.get_mut(&file.object)?;
        *left -= 1;
        if *left > 0 {
            return None;
        }
        self.left.remove(&file.object);
        Some(file.object)
    }

    /// Whether something is being deleted.
    pub fn are_under_way(&self) -> bool {
        self.buckets.iter().any(|bucket| bucket.in_flight > 0)
    }

    /// When a file may be deleted that must wait at `now`, however those under way end.
    pub fn again_at(&self, now: Instant) -> Option<Instant> {
        let paused = self.buckets.iter().filter(|bucket| !bucket.waiting.is_empty() && bucket.is_paused(now));
        paused.filter_map(|bucket| bucket.paused_until).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn begin(deletions: &mut Deletions, now: Instant) -> Vec<DoomedFile> {
        std::iter::from_fn(|| deletions.next(now)).collect()
    }

    /// Objects of one file each.
    fn of(bucket: usize, objects: usize) -> Deletions {
        let mut deletions = Deletions::new(2);
        for object in 0..objects {
            let name = format!("object-{object}");
            deletions.add(&name, vec![(BucketIndex(bucket), name.clone())]);
        }
        deletions
    }

    #[test]
    fn a_few_files_of_a_bucket_are_deleted_at_a_time() {
        let now = Instant::now();
        let mut deletions = of(0, 100);
        let mut gone = 0;
        while let files @ [_, ..] = &*begin(&mut deletions, now) {
            assert!(files.len() <= IN_FLIGHT_MAX && deletions.are_under_way());
            for file in files {
                let object = deletions.ended(file.clone(), true, now).expect("it had one file");
                assert_eq!(*object, *file.name);
                gone += 1;
            }
        }
        assert_eq!((gone, deletions.are_under_way(), deletions.left.len()), (100, false, 0));
    }

    #[test]
    fn an_object_is_gone_with_its_last_file() {
        let now = Instant::now();
        let mut deletions = Deletions::new(2);
        let files =
            [(0, "a"), (0, "b"), (1, "c")].map(|(bucket, name)| (BucketIndex(bucket), name.to_owned()));
        deletions.add("object", files.into());
        let mut files = begin(&mut deletions, now);
        assert_eq!(deletions.ended(files.remove(1), false, now), None);
        assert_eq!(deletions.ended(files.remove(0), true, now), None);
        assert_eq!(deletions.ended(files.remove(0), true, now), None);
        assert_eq!(begin(&mut deletions, now), []);
        let again = deletions.next(now + PAUSE_MIN).expect("the one that failed");
        assert_eq!(again.name, "b");
        assert_eq!(deletions.ended(again, true, now + PAUSE_MIN).as_deref(), Some("object"));
    }

    #[test]
    fn where_deletions_fail_a_few_are_tried_after_growing_pauses() {
        let mut now = Instant::now();
        let mut deletions = of(0, 1000);
        for pause in [8, 16, 32, 32, 32] {
            let files = begin(&mut deletions, now);
            assert_eq!(files.len(), IN_FLIGHT_MAX);
            for file in files {
                assert_eq!(deletions.ended(file, false, now), None);
                assert_eq!(deletions.next(now), None);
            }
            assert_eq!(deletions.again_at(now), Some(now + pause * SECOND));
            assert!(!deletions.are_under_way());
            assert_eq!(deletions.next(now + pause * SECOND - SECOND / 1000), None);
            now += pause * SECOND;
        }
        // Once they go again, they all do.
        let mut gone = 0;
        while let files @ [_, ..] = &*begin(&mut deletions, now) {
            gone += files.iter().filter_map(|file| deletions.ended(file.clone(), true, now)).count();
        }
        assert_eq!((gone, deletions.again_at(now)), (1000, None));
    }

    #[test]
    fn neither_a_file_nor_a_bucket_that_fails_holds_the_others_up() {
        let mut now = Instant::now();
        let mut deletions = of(1, 3);
        deletions.add("bad", vec![(BucketIndex(0), "bad".to_owned())]);
        let mut gone = 0;
        for file in begin(&mut deletions, now) {
            gone += usize::from(deletions.ended(file.clone(), file.name != "bad", now).is_some());
        }
        assert_eq!(gone, 3, "those of the other bucket");
        deletions.add("good", vec![(BucketIndex(0), "good".to_owned())]);
        now += PAUSE_MIN;
        let files = begin(&mut deletions, now);
        assert_eq!(files.iter().map(|file| &*file.name).collect::<Vec<_>>(), ["bad", "good"]);
        for file in files {
            gone += usize::from(deletions.ended(file.clone(), file.name != "bad", now).is_some());
        }
        assert_eq!(gone, 4);
        // One that went well in between makes the next pause short.
        assert_eq!(deletions.again_at(now), Some(now + 2 * PAUSE_MIN));
        now += 2 * PAUSE_MIN;
        let bad = deletions.next(now).expect("its time has come");
        deletions.ended(bad, false, now);
        assert_eq!(deletions.again_at(now), Some(now + PAUSE_MIN));
    }
}
