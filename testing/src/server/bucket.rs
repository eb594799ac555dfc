//! One bucket of the test server: its objects, its uploads, and the rules by which parts become an object.
//!
//! No protocol, no faults and no waiting here. What the rules default to is what AWS does.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::SystemTime;

use md5::{Digest as _, Md5};
use s3s::{S3Error, S3Result, s3_error};
use tidelog_upload::store::{Capabilities, Parts};

use super::blob::Blob;

/// How a bucket differs from one of AWS's. The default does not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BucketRules {
    /// The least bytes of a part that is not the last one.
    pub part_bytes_min: u64,
    /// The most bytes of a part or of an object put whole.
    pub part_bytes_max: u64,
    /// The highest part number.
    pub parts_max: u32,
    /// Whether the numbers at Complete may have gaps.
    pub sparse: bool,
    /// Whether all parts but the last one must have the same size, as on R2.
    pub equal_parts: bool,
    /// Whether a second Complete of an upload succeeds, as on AWS; elsewhere the upload is forgotten.
    pub complete_twice: bool,
    /// Whether tags are random rather than MD5, as with encryption by KMS: the same bytes sent again get another tag.
    /// Also spares the server the hashing.
    pub random_tags: bool,
    /// Whether a part number sent twice can no longer be completed, as on Garage where the first one was cut off.
    pub duplicate_invalidates: bool,
    /// Whether the parts of an upload can be listed.
    pub list_parts: bool,
    /// Whether unfinished uploads can be listed.
    pub list_uploads: bool,
    /// Whether `If-None-Match: *` is heeded; Garage ignores it.
    pub conditional_put: bool,
    /// The most items in one answer to a listing.
    pub page_items_max: u32,
}

impl Default for BucketRules {
    fn default() -> BucketRules {
        BucketRules {
            part_bytes_min: 5 << 20,
            part_bytes_max: 5 << 30,
            parts_max: 10_000,
            sparse: true,
            equal_parts: false,
            complete_twice: true,
            random_tags: false,
            duplicate_invalidates: false,
            list_parts: true,
            list_uploads: true,
            conditional_put: true,
            page_items_max: 1000,
        }
    }
}

impl BucketRules {
    /// The row that describes a bucket with these rules.
    #[must_use]
    pub fn capabilities(&self) -> Capabilities {
        Capabilities {
            parts: Parts::Parallel,
            part_bytes_min: self.part_bytes_min,
            part_bytes_max: self.part_bytes_max,
            parts_max: self.parts_max,
            equal_parts: self.equal_parts,
            sparse: self.sparse,
            copy_part: true,
            resend_part: !self.random_tags && !self.duplicate_invalidates,
            list_parts: self.list_parts,
            list_uploads: self.list_uploads,
            conditional_put: self.conditional_put,
        }
    }
}

#[derive(Debug, Default)]
pub(crate) struct Bucket {
    pub(crate) rules: BucketRules,
    pub(crate) objects: BTreeMap<String, Object>,
    /// By name, then by id, as they are listed.
    pub(crate) uploads: BTreeMap<(String, String), Upload>,
    /// The uploads that became objects, for those who ask twice.
    pub(crate) completed: HashMap<(String, String), Completed>,
}

#[derive(Clone, Debug)]
pub(crate) struct Object {
    pub(crate) blobs: Vec<Arc<Blob>>,
    pub(crate) bytes: u64,
    pub(crate) tag: String,
    pub(crate) modified: SystemTime,
}

#[derive(Debug)]
pub(crate) struct Upload {
    pub(crate) created: SystemTime,
    pub(crate) parts: BTreeMap<u32, Part>,
}

#[derive(Clone, Debug)]
pub(crate) struct Part {
    pub(crate) blob: Arc<Blob>,
    pub(crate) tag: String,
    pub(crate) modified: SystemTime,
    /// Sent twice where that is once too often.
    spoilt: bool,
}

#[derive(Debug)]
pub(crate) struct Completed {
    parts: Vec<(u32, String)>,
    tag: String,
}

impl Bucket {
    pub(crate) fn put(
        &mut self,
        name: &str,
        blob: Blob,
        if_none_match: bool,
        random: u128,
    ) -> S3Result<String> {
        if blob.bytes > self.rules.part_bytes_max {
            return Err(s3_error!(EntityTooLarge));
        }
        self.check_free(name, if_none_match)?;
        let tag = tag_of(&blob, random);
        let object = Object {
            bytes: blob.bytes,
            blobs: vec![Arc::new(blob)],
            tag: tag.clone(),
            modified: SystemTime::now(),
        };
        self.objects.insert(name.to_owned(), object);
        Ok(tag)
    }

    pub(crate) fn create(&mut self, name: &str, random: u128) -> String {
        let id = format!("{random:032x}");
        let upload = Upload { created: SystemTime::now(), parts: BTreeMap::new() };
        self.uploads.insert((name.to_owned(), id.clone()), upload);
        id
    }

    pub(crate) fn put_part(
        &mut self,
        name: &str,
        id: &str,
        number: u32,
        blob: Blob,
        random: u128,
    ) -> S3Result<String> {
        if number == 0 || number > self.rules.parts_max {
            return Err(s3_error!(
                InvalidArgument,
                "Part number must be an integer between 1 and {}, inclusive",
                self.rules.parts_max
            ));
        }
        if blob.bytes > self.rules.part_bytes_max {
            return Err(s3_error!(EntityTooLarge));
        }
        let invalidates = self.rules.duplicate_invalidates;
        let upload = self.upload_mut(name, id)?;
        let tag = tag_of(&blob, random);
        let spoilt = invalidates && upload.parts.contains_key(&number);
        let part = Part { blob: Arc::new(blob), tag: tag.clone(), modified: SystemTime::now(), spoilt };
        upload.parts.insert(number, part);
        Ok(tag)
    }

    /// Checks first and changes afterwards: a refused Complete leaves the upload as it was.
    pub(crate) fn complete(
        &mut self,
        name: &str,
        id: &str,
        parts: &[(u32, String)],
        if_none_match: bool,
        random: u128,
    ) -> S3Result<String> {
        self.check_free(name, if_none_match)?;
        let key = (name.to_owned(), id.to_owned());
        if let Some(completed) = self.completed.get(&key)
            && self.rules.complete_twice
            && completed.parts == parts
            && self.objects.get(name).is_some_and(|object| object.tag == completed.tag)
        {
            return Ok(completed.tag.clone());
        }
        let upload = self.uploads.get(&key).ok_or_else(no_such_upload)?;
        if parts.is_empty() {
            return Err(s3_error!(MalformedXML, "You must specify at least one part"));
        }
        if !parts.is_sorted_by(|a, b| a.0 < b.0) {
            return Err(s3_error!(InvalidPartOrder));
        }
        let mut chosen = Vec::with_capacity(parts.len());
        for (number, tag) in parts {
            match upload.parts.get(number) {
                Some(part) if part.tag == *tag && !part.spoilt => chosen.push(part.clone()),
                _ => return Err(s3_error!(InvalidPart, "part {number} is not there as named")),
            }
        }
        if !self.rules.sparse && parts.iter().zip(1..).any(|((number, _), expected)| *number != expected) {
            return Err(s3_error!(InvalidPart, "the part numbers have gaps"));
        }
        if let [full @ .., last] = &*chosen {
            if full.iter().any(|part| part.blob.bytes < self.rules.part_bytes_min) {
                return Err(s3_error!(EntityTooSmall));
            }
            let equal = full.iter().all(|part| part.blob.bytes == full[0].blob.bytes);
            if self.rules.equal_parts && !(full.is_empty() || equal && last.blob.bytes <= full[0].blob.bytes)
            {
                return Err(s3_error!(InvalidPart, "All non-trailing parts must have the same length"));
            }
        }
        let tag = tag_of_parts(&chosen, random);
        let object = Object {
            bytes: chosen.iter().map(|part| part.blob.bytes).sum(),
            blobs: chosen.into_iter().map(|part| part.blob).collect(),
            tag: tag.clone(),
            modified: SystemTime::now(),
        };
        self.objects.insert(name.to_owned(), object);
        self.uploads.remove(&key);
        self.completed.insert(key, Completed { parts: parts.to_vec(), tag: tag.clone() });
        Ok(tag)
    }

    /// An upload that is not there is an error, as on AWS.
    pub(crate) fn abort(&mut self, name: &str, id: &str) -> S3Result<()> {
        self.uploads.remove(&(name.to_owned(), id.to_owned())).map(drop).ok_or_else(no_such_upload)
    }

    pub(crate) fn upload(&self, name: &str, id: &str) -> S3Result<&Upload> {
        self.uploads.get(&(name.to_owned(), id.to_owned())).ok_or_else(no_such_upload)
    }

    pub(crate) fn upload_mut(&mut self, name: &str, id: &str) -> S3Result<&mut Upload> {
        self.uploads.get_mut(&(name.to_owned(), id.to_owned())).ok_or_else(no_such_upload)
    }

    pub(crate) fn object(&self, name: &str) -> S3Result<&Object> {
        self.objects.get(name).ok_or_else(|| s3_error!(NoSuchKey))
    }

    fn check_free(&self, name: &str, if_none_match: bool) -> S3Result<()> {
        if if_none_match && self.rules.conditional_put && self.objects.contains_key(name) {
            return Err(s3_error!(PreconditionFailed));
        }
        Ok(())
    }
}

fn no_such_upload() -> S3Error {
    s3_error!(NoSuchUpload)
}

/// The MD5 of the bytes, or a random tag where it was not computed.
fn tag_of(blob: &Blob, random: u128) -> String {
    match blob.md5 {
        Some(md5) => hex(&md5),
        None => format!("{random:032x}"),
    }
}

/// The MD5 of the parts' MD5s and their count, as AWS tags an object made of parts.
fn tag_of_parts(parts: &[Part], random: u128) -> String {
    let mut all = Md5::new();
    for part in parts {
        match part.blob.md5 {
            Some(md5) => all.update(md5),
            None => return format!("{random:032x}-{}", parts.len()),
        }
    }
    format!("{}-{}", hex(&<[u8; 16]>::from(all.finalize())), parts.len())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
