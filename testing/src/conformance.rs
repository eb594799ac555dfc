//! One suite that every store has to pass: the contract of [`Store`], and that its [`Capabilities`] are true.
//!
//! It panics at the first thing that is wrong, naming the store and what was expected. It makes a few dozen requests and
//! sends a handful of parts of the least size, and leaves nothing behind.

use std::fmt::Debug;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use futures_util::FutureExt as _;
use futures_util::future::join_all;
use tidelog_upload::store::{
    Body, Capabilities, EntityTag, Lane, ListedObject, Parts, UploadId, UploadRef, UploadedPart,
};
use tidelog_upload::{Operation, Store, StoreError, StoreErrorKind, Watch};

/// What is expected of a store beside its contract.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Row {
    /// Its own capabilities, in both directions: what they deny is refused.
    Exact,
    /// That these work. It may take more, and what is asked of an upload that is gone may fail in any way: moto breaks
    /// down over it.
    AtLeast(Capabilities),
}

/// Runs the suite on names that start with `prefix`, which nobody else uses and which does not end with `/`.
///
/// # Panics
/// The store breaks its contract.
pub async fn conformance(store: Arc<dyn Store>, prefix: &str, row: Row) {
    let (capabilities, exact) = match row {
        Row::Exact => (store.capabilities().clone(), true),
        Row::AtLeast(capabilities) => (capabilities, false),
    };
    let suite = Suite { store, capabilities, exact, prefix: prefix.to_owned() };
    suite.whole_objects().await;
    suite.names().await;
    suite.listings().await;
    suite.deletes().await;
    suite.names_taken().await;
    suite.requests_given_up().await;
    match suite.capabilities.parts {
        Parts::None => suite.no_parts().await,
        Parts::Sequential => {
            suite.parts_in_order().await;
            suite.aborts().await;
        }
        Parts::Parallel => {
            suite.parts_in_order().await;
            suite.aborts().await;
            suite.parts_at_once().await;
            suite.parts_that_are_not_there().await;
            suite.sizes_of_parts().await;
            suite.gaps().await;
            suite.parts_sent_again().await;
            suite.listed_parts().await;
            suite.copied_parts().await;
        }
    }
    suite.listed_uploads().await;
    let left = suite.list("").await;
    assert!(left.is_empty(), "{suite}: the suite has left {left:?}");
}

struct Suite {
    store: Arc<dyn Store>,
    capabilities: Capabilities,
    exact: bool,
    prefix: String,
}

impl std::fmt::Display for Suite {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.store.url())
    }
}

impl Suite {
    async fn whole_objects(&self) {
        let name = self.name("whole");
        // Slices of all lengths from none, so that their seams fall anywhere.
        let slices: Vec<Bytes> = (0..300).map(|len| pattern(len as u8, len)).collect();
        let all = slices.concat();
        let body = Body::new(slices);
        let tag = self.ok("put", self.store.put(&name, body.clone(), Lane::Primary).await);
        self.is_whole(&name, &all, &tag).await;

        let len = all.len() as u64;
        for range in [0..1, 0..len, 1..len - 1, len - 1..len, 700..701, 7..7, 0..0] {
            let got = self.ok("get of a range", self.store.get(&name, range.clone()).await);
            let expected = &all[range.start as usize..range.end as usize];
            assert!(got == expected, "{self}: get of {range:?} returned other bytes");
            let mut seen = Seen { expected, bytes: 0, is_right: true };
            let got = self.store.get_watched(&name, range.clone(), &mut seen).await;
            assert!(self.ok("watched get", got) == expected, "{self}: watched get of {range:?} differs");
            assert!(seen.is_right, "{self}: watched get of {range:?} showed other bytes");
        }
        for range in
            [0..len + 1, len - 1..len + 1, len..len + 1, len + 10..len + 20, 0..1 << 62, reversed(9, 3)]
        {
            let error = self.err("get of a range outside", self.store.get(&name, range.clone()).await);
            let out = matches!(error.kind(), StoreErrorKind::OutOfRange { .. });
            assert!(out, "{self}: get of {range:?} of {len} bytes should be OutOfRange: {error:?}");
        }

        // The same body again, on other connections: bodies can be replayed.
        let again = self.name("again");
        let tag = self.ok("put", self.store.put(&again, body, Lane::Hedge).await);
        self.is_whole(&again, &all, &tag).await;

        let empty = self.name("empty");
        let tag = self.ok("put of nothing", self.store.put(&empty, Body::default(), Lane::Primary).await);
        self.is_whole(&empty, b"", &tag).await;

        let missing = self.name("missing");
        self.is_missing(&missing).await;
        self.delete([name, again, empty]).await;
    }

    async fn names(&self) {
        // Garage keeps names in LMDB, whose keys end at 511 bytes.
        let segment = "s".repeat(if self.exact { 240 } else { 200 });
        let mut good = vec![
            self.name("with blank"),
            self.name("ä/日本/🌊"),
            self.name("a+b%20c%2Fd"),
            self.name("~!*'()&$@=;,?[]{}|^`\"<>"),
            self.name("dots/..a/.b/c."),
            self.name(&format!("{segment}/{segment}/x")),
        ];
        // The one character that a store may refuse of those that others take: HDFS does.
        let colon = self.name("with:colon");
        match self.store.head(&colon).await {
            Err(error) if matches!(error.kind(), StoreErrorKind::InvalidName(_)) => {
                self.is_refused(&colon).await
            }
            _ => good.push(colon),
        }
        for (at, name) in good.iter().enumerate() {
            let bytes = pattern(at as u8, 10 + at);
            let body = Body::new(vec![bytes.clone()]);
            let tag = self.ok(name, self.store.put(name, body, Lane::Primary).await);
            self.is_whole(name, &bytes, &tag).await;
        }
        let listed = self.list("").await;
        good.sort();
        assert_eq!(names(&listed), good, "{self}: names come back from a listing as they went in");
        self.delete(good).await;

        let long = self.name(&format!("{0}/{0}/{0}/{0}/{0}", "s".repeat(239)));
        let segment = self.name(&"s".repeat(241));
        let bad = [
            "", "/", "/a", "a/", "a//b", ".", "..", "a/../b", "a/.", "a\nb", "a\0b", "a\\b", "a#b", &long,
            &segment,
        ];
        for name in bad {
            self.is_refused(name).await;
        }
    }

    async fn is_refused(&self, name: &str) {
        let refused = [
            self.store.put(name, Body::default(), Lane::Primary).await.err(),
            self.store.create(name).await.err(),
            self.store.get(name, 0..1).await.err(),
            self.store.head(name).await.err(),
            self.store.delete(name).await.err(),
        ];
        for error in refused {
            let refused = error.as_ref().is_some_and(|error| {
                matches!(error.kind(), StoreErrorKind::InvalidName(_) | StoreErrorKind::Unsupported)
            });
            assert!(refused, "{self}: the name {name:?} should be refused: {error:?}");
        }
    }

    async fn listings(&self) {
        let all = ["l/a", "l/a.b", "l/ab", "l/b/c", "l2"].map(|name| self.name(name));
        let puts = all.iter().enumerate().map(async |(at, name)| {
            let lane = if at % 2 == 0 { Lane::Primary } else { Lane::Hedge };
            self.ok("put", self.store.put(name, Body::new(vec![pattern(0, at)]), lane).await)
        });
        join_all(puts).await;
        for (prefix, expected) in
            [("l", 0..5), ("l/", 0..4), ("l/a", 0..3), ("l/a.", 1..2), ("l/b", 3..4), ("m", 0..0)]
        {
            let listed = self.list(prefix).await;
            assert_eq!(names(&listed), all[expected.clone()], "{self}: the names that start with {prefix:?}");
            let lengths: Vec<u64> = listed.iter().map(|object| object.bytes).collect();
            let expected: Vec<u64> = expected.map(|at| at as u64).collect();
            assert_eq!(lengths, expected, "{self}: the sizes in a listing");
        }
        self.delete(all).await;
    }

    async fn deletes(&self) {
        let name = self.name("deleted");
        self.ok("put", self.store.put(&name, Body::new(vec![pattern(1, 9)]), Lane::Primary).await);
        self.ok("delete", self.store.delete(&name).await);
        self.is_missing(&name).await;
        self.ok("delete of what is gone", self.store.delete(&name).await);
        self.ok("delete of what never was", self.store.delete(&self.name("no/such")).await);
        let listed = self.list("").await;
        assert!(listed.is_empty(), "{self}: a deleted object is listed: {listed:?}");
    }

    async fn names_taken(&self) {
        if !self.capabilities.conditional_put {
            return;
        }
        let name = self.name("taken");
        let bytes = pattern(1, 10);
        let tag = self.ok("put", self.store.put(&name, Body::new(vec![bytes.clone()]), Lane::Primary).await);
        let again = self.store.put(&name, Body::new(vec![pattern(2, 20)]), Lane::Primary).await;
        let error = self.err("put where there is an object", again);
        assert_eq!(*error.kind(), StoreErrorKind::Exists, "{self}: {error}");
        self.is_whole(&name, &bytes, &tag).await;
        self.delete([name]).await;
    }

    async fn requests_given_up(&self) {
        let name = self.name("given-up");
        let bytes = pattern(3, 100_000);
        // Polled once and dropped.
        let _ = self.store.put(&name, Body::new(vec![bytes.clone()]), Lane::Primary).now_or_never();
        match self.store.head(&name).await {
            Ok(found) => assert_eq!(found.bytes, bytes.len() as u64, "{self}: half an object is visible"),
            Err(error) => assert!(error.is_not_found(), "{self}: {error}"),
        }
        let next = self.name("next");
        let body = Body::new(vec![bytes.clone()]);
        let tag = self.ok("put after one given up", self.store.put(&next, body, Lane::Primary).await);
        self.is_whole(&next, &bytes, &tag).await;
        self.delete([next, name.clone()]).await;
        // It may have been on its way: whatever arrived in the meantime goes, too.
        self.delete([name]).await;
    }

    async fn no_parts(&self) {
        let error = self.err("create where there are no parts", self.store.create(&self.name("x")).await);
        assert_eq!(*error.kind(), StoreErrorKind::Unsupported, "{self}");
    }

    async fn parts_in_order(&self) {
        let name = self.name("in/order");
        let id = self.create(&name).await;
        let upload = UploadRef { name: &name, id: &id };
        let (mut parts, mut all) = (Vec::new(), Vec::new());
        for number in 1..=3 {
            let bytes = self.full_part(number);
            parts.push(self.part(upload, number, bytes.clone()).await);
            all.extend_from_slice(&bytes);
            self.is_missing(&name).await;
            assert!(self.list("in").await.is_empty(), "{self}: an object is listed before it is complete");
        }
        let tag = self.ok("complete", self.store.complete(upload, &parts).await);
        self.is_whole(&name, &all, &tag).await;

        // The upload is gone; the object stays as it is, whatever else is asked of the upload.
        match self.store.complete(upload, &parts).await {
            Ok(again) => assert_eq!(again, tag, "{self}: complete twice"),
            // Where a write is bound to the absence of its object.
            Err(error) if *error.kind() == StoreErrorKind::Exists && self.capabilities.conditional_put => {}
            Err(error) => self.is_no_such_upload("complete twice", &error),
        }
        let late = self.store.put_part(upload, 1, Body::new(vec![pattern(9, 9)]), Lane::Primary).await;
        self.is_too_late("a part after complete", late);
        self.ok("abort after complete", self.store.abort(upload).await);
        self.is_whole(&name, &all, &tag).await;
        self.delete([name]).await;
    }

    async fn aborts(&self) {
        let name = self.name("aborted");
        let id = self.create(&name).await;
        let upload = UploadRef { name: &name, id: &id };
        let part = self.part(upload, 1, pattern(1, 1000)).await;
        self.ok("abort", self.store.abort(upload).await);
        self.ok("abort twice", self.store.abort(upload).await);
        let late = self.store.put_part(upload, 2, Body::new(vec![pattern(2, 9)]), Lane::Primary).await;
        self.is_too_late("a part after abort", late);
        self.is_too_late("complete after abort", self.store.complete(upload, &[part]).await);
        self.is_missing(&name).await;

        // Without any part, and two uploads of one name: each is its own.
        let (first, second) = (self.create(&name).await, self.create(&name).await);
        assert_ne!(first, second, "{self}: two uploads have one id");
        self.ok("abort", self.store.abort(UploadRef { name: &name, id: &first }).await);
        let upload = UploadRef { name: &name, id: &second };
        let bytes = pattern(7, 70);
        let part = self.part(upload, 1, bytes.clone()).await;
        let tag = self.ok("complete", self.store.complete(upload, &[part]).await);
        self.is_whole(&name, &bytes, &tag).await;
        self.delete([name]).await;
    }

    async fn parts_at_once(&self) {
        let name = self.name("at-once");
        let id = self.create(&name).await;
        let upload = UploadRef { name: &name, id: &id };
        let bodies: Vec<Bytes> = (1..=3).map(|number| self.full_part(number)).collect();
        let sent = [3_u32, 1, 2].map(async |number| {
            // Many slices, so that a part is as many writes.
            let bytes = &bodies[number as usize - 1];
            let slices = (0..bytes.len()).step_by(100_001);
            let body = Body::new(slices.map(|at| bytes.slice(at..bytes.len().min(at + 100_001))).collect());
            let lane = if number == 2 { Lane::Hedge } else { Lane::Primary };
            let tag = self.ok("a part", self.store.put_part(upload, number, body, lane).await);
            UploadedPart { number, tag }
        });
        let mut parts = join_all(sent).await;
        parts.sort_by_key(|part| part.number);
        let tag = self.ok("complete", self.store.complete(upload, &parts).await);
        self.is_whole(&name, &bodies.concat(), &tag).await;
        self.delete([name]).await;
    }

    async fn parts_that_are_not_there(&self) {
        let name = self.name("not-there");
        let id = self.create(&name).await;
        let upload = UploadRef { name: &name, id: &id };
        let bytes = pattern(5, 50);
        let part = self.part(upload, 1, bytes.clone()).await;
        let other = EntityTag("00112233445566778899aabbccddeeff".into());
        let mut wrong = vec![vec![part.clone(), UploadedPart { number: 2, tag: other.clone() }]];
        if !part.tag.0.is_empty() {
            wrong.push(vec![UploadedPart { number: 1, tag: other }]);
        }
        for parts in wrong {
            let error =
                self.err("complete with a part that is not there", self.store.complete(upload, &parts).await);
            assert_eq!(*error.kind(), StoreErrorKind::InvalidPart, "{self}: {error}");
            self.is_missing(&name).await;
        }
        // A refused Complete has changed nothing.
        let tag = self.ok("complete", self.store.complete(upload, &[part]).await);
        self.is_whole(&name, &bytes, &tag).await;
        self.delete([name]).await;
    }

    async fn sizes_of_parts(&self) {
        let min = self.part_bytes();
        if self.exact && self.capabilities.part_bytes_min > 1 {
            self.check_sizes("too small", [min - 1, min], false).await;
        }
        self.check_sizes("last small", [min, min, 1], true).await;
        let equal = self.capabilities.equal_parts;
        if !equal || self.exact {
            self.check_sizes("unequal", [min + 1, min, min], !equal).await;
        }
    }

    /// Sends parts of these sizes and says whether together they should become an object.
    async fn check_sizes<const N: usize>(&self, what: &str, sizes: [usize; N], accepted: bool) {
        let name = self.name("sizes");
        let id = self.create(&name).await;
        let upload = UploadRef { name: &name, id: &id };
        let (mut parts, mut all) = (Vec::new(), Vec::new());
        for (number, size) in (1..).zip(sizes) {
            let bytes = pattern(number as u8, size);
            let body = Body::new(vec![bytes.clone()]);
            match self.store.put_part(upload, number, body, Lane::Primary).await {
                Ok(tag) => parts.push(UploadedPart { number, tag }),
                Err(error) => {
                    assert!(!accepted, "{self}: {what}: {error}");
                    self.ok("abort", self.store.abort(upload).await);
                    return;
                }
            }
            all.extend_from_slice(&bytes);
        }
        let complete = self.store.complete(upload, &parts).await;
        if accepted {
            let tag = self.ok(what, complete);
            self.is_whole(&name, &all, &tag).await;
            self.delete([name]).await;
        } else {
            let error = self.err(what, complete);
            assert_eq!(*error.kind(), StoreErrorKind::InvalidPart, "{self}: {what}: {error}");
            self.is_missing(&name).await;
            self.ok("abort", self.store.abort(upload).await);
        }
    }

    async fn gaps(&self) {
        if !self.capabilities.sparse && !self.exact {
            return;
        }
        let name = self.name("gaps");
        let id = self.create(&name).await;
        let upload = UploadRef { name: &name, id: &id };
        let (first, last) = (self.full_part(2), pattern(1, 10));
        // One in between that is not asked for, and one before.
        self.part(upload, 1, pattern(9, 9)).await;
        let two = self.part(upload, 2, first.clone()).await;
        self.part(upload, 5, pattern(9, 9)).await;
        let nine = self.part(upload, 9, last.clone()).await;
        let complete = self.store.complete(upload, &[two, nine]).await;
        if self.capabilities.sparse {
            let tag = self.ok("complete with gaps", complete);
            self.is_whole(&name, &[first, last].concat(), &tag).await;
            self.delete([name]).await;
        } else {
            let error = self.err("complete with gaps", complete);
            assert_eq!(*error.kind(), StoreErrorKind::InvalidPart, "{self}: {error}");
            self.ok("abort", self.store.abort(upload).await);
        }
    }

    async fn parts_sent_again(&self) {
        if !self.capabilities.resend_part {
            return;
        }
        let name = self.name("sent-again");
        let id = self.create(&name).await;
        let upload = UploadRef { name: &name, id: &id };
        let bytes = pattern(2, 20);
        self.part(upload, 1, pattern(1, 10)).await;
        let part = self.part(upload, 1, bytes.clone()).await;
        let tag = self.ok("complete", self.store.complete(upload, &[part]).await);
        self.is_whole(&name, &bytes, &tag).await;
        self.delete([name]).await;
    }

    async fn listed_parts(&self) {
        let name = self.name("listed-parts");
        let id = self.create(&name).await;
        let upload = UploadRef { name: &name, id: &id };
        if !self.capabilities.list_parts {
            if self.exact {
                let error = self.err("list_parts", self.store.list_parts(upload).await);
                assert_eq!(*error.kind(), StoreErrorKind::Unsupported, "{self}");
            }
            return self.ok("abort", self.store.abort(upload).await);
        }
        assert_eq!(self.ok("list_parts", self.store.list_parts(upload).await), [], "{self}");
        let numbers = [7, 1, 4, 2, 3];
        let mut sent = Vec::new();
        for number in numbers {
            sent.push(self.part(upload, number, pattern(0, number as usize * 11)).await);
        }
        sent.sort_by_key(|part| part.number);
        let listed = self.ok("list_parts", self.store.list_parts(upload).await);
        let tags: Vec<UploadedPart> =
            listed.iter().map(|part| UploadedPart { number: part.number, tag: part.tag.clone() }).collect();
        assert_eq!(tags, sent, "{self}: the parts, by number");
        for part in listed {
            assert_eq!(part.bytes, u64::from(part.number) * 11, "{self}: the size of part {}", part.number);
        }
        self.ok("abort", self.store.abort(upload).await);
        self.is_too_late("list_parts after abort", self.store.list_parts(upload).await);
    }

    async fn copied_parts(&self) {
        let (from, name) = (self.name("copied/from ä+%2F"), self.name("copied/to"));
        let source = self.full_part(7);
        let body = Body::new(vec![source.clone(), pattern(8, 100)]);
        let whole = [&source[..], &pattern(8, 100)].concat();
        self.ok("put", self.store.put(&from, body, Lane::Primary).await);
        let id = self.create(&name).await;
        let upload = UploadRef { name: &name, id: &id };
        let full = source.len() as u64;
        if !self.capabilities.copy_part {
            if self.exact {
                let error = self.err("copy_part", self.store.copy_part(upload, 1, &from, 0..full).await);
                assert_eq!(*error.kind(), StoreErrorKind::Unsupported, "{self}");
            }
            self.ok("abort", self.store.abort(upload).await);
            return self.delete([from]).await;
        }
        let missing = self.name("copied/missing");
        self.err("copy_part of nothing", self.store.copy_part(upload, 1, &missing, 0..full).await);
        self.err("copy_part past the end", self.store.copy_part(upload, 1, &from, 101..full + 101).await);
        let mut parts = Vec::new();
        for (number, range) in [(1, 0..full), (2, 100..full + 100)] {
            let tag = self.ok("copy_part", self.store.copy_part(upload, number, &from, range).await);
            parts.push(UploadedPart { number, tag });
        }
        parts.push(self.part(upload, 3, pattern(9, 50)).await);
        // The copies stay when what they were made of goes.
        self.delete([from]).await;
        let tag = self.ok("complete", self.store.complete(upload, &parts).await);
        let all = [&source[..], &whole[100..], &pattern(9, 50)].concat();
        self.is_whole(&name, &all, &tag).await;
        self.delete([name]).await;
    }

    async fn listed_uploads(&self) {
        if !self.capabilities.list_uploads {
            if self.exact {
                let error = self.err("list_uploads", self.store.list_uploads(&self.name("")).await);
                assert_eq!(*error.kind(), StoreErrorKind::Unsupported, "{self}");
            }
            return;
        }
        let mut open = Vec::new();
        for name in ["u/a", "u/ab", "u/ab", "u/b"] {
            let name = self.name(name);
            let id = self.create(&name).await;
            open.push((name, id));
        }
        open.sort();
        for (prefix, expected) in [("u", 0..4), ("u/a", 0..3), ("u/ab", 1..3), ("v", 0..0)] {
            let prefix = self.name(prefix);
            let listed = self.ok("list_uploads", self.store.list_uploads(&prefix).await);
            let mut listed: Vec<(String, UploadId)> =
                listed.into_iter().map(|upload| (upload.name, upload.id)).collect();
            listed.sort();
            assert_eq!(listed, open[expected], "{self}: the uploads whose names start with {prefix:?}");
        }
        for (name, id) in &open {
            self.ok("abort", self.store.abort(UploadRef { name, id }).await);
        }
        let left = self.ok("list_uploads", self.store.list_uploads(&self.name("")).await);
        assert!(left.is_empty(), "{self}: uploads are listed that were aborted or completed: {left:?}");
    }

    /// An object is there as these bytes, by every way of asking.
    async fn is_whole(&self, name: &str, expected: &[u8], tag: &EntityTag) {
        let head = self.ok("head", self.store.head(name).await);
        let listed = self.ok("list", self.store.list(name).await);
        let listed = listed.iter().find(|object| object.name == name);
        let listed = listed.unwrap_or_else(|| panic!("{self}: {name:?} is not listed"));
        for (how, found) in [("head", &head), ("list", listed)] {
            assert_eq!(found.name, name, "{self}: name by {how}");
            assert_eq!(found.bytes, expected.len() as u64, "{self}: size of {name:?} by {how}");
            let tags = found.tag.0.is_empty() || tag.0.is_empty() || found.tag == *tag;
            assert!(tags, "{self}: tag of {name:?} by {how}: {:?}, when written {tag:?}", found.tag);
        }
        let got = self.ok("get", self.store.get(name, 0..expected.len() as u64).await);
        assert!(got == expected, "{self}: other bytes came back of {name:?}");
    }

    async fn is_missing(&self, name: &str) {
        let head = self.err("head of what is not there", self.store.head(name).await);
        let get = self.err("get of what is not there", self.store.get(name, 0..1).await);
        for error in [head, get] {
            assert!(error.is_not_found(), "{self}: should be NotFound: {error:?}");
            assert!([Operation::Head, Operation::Get].contains(&error.operation()), "{self}: {error:?}");
            assert_eq!((error.bucket(), error.object()), (self.store.url(), name), "{self}: {error:?}");
        }
    }

    fn is_no_such_upload(&self, what: &str, error: &StoreError) {
        assert_eq!(*error.kind(), StoreErrorKind::NoSuchUpload, "{self}: {what}: {error}");
    }

    fn is_too_late<T: Debug>(&self, what: &str, result: Result<T, StoreError>) {
        let error = self.err(what, result);
        if self.exact {
            self.is_no_such_upload(what, &error);
        }
    }

    async fn create(&self, name: &str) -> UploadId {
        self.ok("create", self.store.create(name).await)
    }

    async fn part(&self, upload: UploadRef<'_>, number: u32, bytes: Bytes) -> UploadedPart {
        let body = Body::new(vec![bytes]);
        let tag = self.ok("a part", self.store.put_part(upload, number, body, Lane::Primary).await);
        UploadedPart { number, tag }
    }

    async fn delete(&self, names: impl IntoIterator<Item = String>) {
        for name in names {
            self.ok("delete", self.store.delete(&name).await);
        }
    }

    async fn list(&self, prefix: &str) -> Vec<ListedObject> {
        self.ok("list", self.store.list(&self.name(prefix)).await)
    }

    fn name(&self, name: &str) -> String {
        format!("{}/{name}", self.prefix)
    }

    /// The least bytes that every part can have.
    fn part_bytes(&self) -> usize {
        usize::try_from(self.capabilities.part_bytes_min).expect("a part fits into memory").max(1000)
    }

    fn full_part(&self, number: u32) -> Bytes {
        pattern(number as u8, self.part_bytes())
    }

    fn ok<T>(&self, what: &str, result: Result<T, StoreError>) -> T {
        result.unwrap_or_else(|error| panic!("{self}: {what}: {error}"))
    }

    fn err<T: Debug>(&self, what: &str, result: Result<T, StoreError>) -> StoreError {
        match result {
            Ok(_) => panic!("{self}: {what} should fail"),
            Err(error) => error,
        }
    }
}

/// What a store has shown of a range.
struct Seen<'a> {
    expected: &'a [u8],
    bytes: usize,
    is_right: bool,
}

impl Watch for Seen<'_> {
    fn see(&mut self, bytes: &[u8]) {
        self.is_right &= bytes.len() >= self.bytes && self.expected.get(..bytes.len()) == Some(bytes);
        self.bytes = bytes.len();
    }
}

fn names(objects: &[ListedObject]) -> Vec<&str> {
    objects.iter().map(|object| &*object.name).collect()
}

/// Bytes that tell where they stand and of which part they are.
fn pattern(seed: u8, len: usize) -> Bytes {
    (0..len).map(|at| (at as u8) ^ ((at >> 8) as u8).wrapping_mul(31) ^ seed).collect::<Vec<u8>>().into()
}

/// A range that ends before it starts.
fn reversed(start: u64, end: u64) -> Range<u64> {
    Range { start, end }
}
