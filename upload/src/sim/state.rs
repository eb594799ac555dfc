//! What a simulated bucket holds, and what requests do to it: objects, uploads, parts and their tags. Which request
//! arrives, when, and who hears of it is decided in [`sim`](super).
//!
//! A tag is given once: the same bytes sent again have another one, as where a store encrypts under a fresh key.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::SystemTime;

use bytes::{Bytes, BytesMut};

use crate::store::{
    Body, Capabilities, EntityTag, ListedObject, ListedPart, ListedUpload, Parts, StoreErrorKind, UploadId,
    UploadedPart,
};

/// The objects and uploads of a bucket.
pub(super) struct Contents {
    objects: BTreeMap<String, Object>,
    /// Keys are never used again, so that an old id finds nothing.
    uploads: BTreeMap<UploadId, Upload>,
    next_upload: u64,
    next_tag: u64,
    /// The time of what is written from here on.
    pub(super) now: SystemTime,
}

struct Object {
    bytes: Bytes,
    tag: EntityTag,
    modified: SystemTime,
}

struct Upload {
    name: String,
    parts: BTreeMap<u32, Part>,
    created: SystemTime,
}

struct Part {
    bytes: Bytes,
    tag: EntityTag,
    /// Sent more than once to a bucket that does not take that.
    spoiled: bool,
}

impl Default for Contents {
    fn default() -> Contents {
        Contents {
            objects: BTreeMap::new(),
            uploads: BTreeMap::new(),
            next_upload: 0,
            next_tag: 0,
            now: SystemTime::UNIX_EPOCH,
        }
    }
}

impl Contents {
    pub(super) fn put(
        &mut self,
        row: &Capabilities,
        name: &str,
        body: &Body,
    ) -> Result<EntityTag, StoreErrorKind> {
        self.write(row, name, joined(body.slices()))
    }

    pub(super) fn create(&mut self, row: &Capabilities, name: &str) -> Result<UploadId, StoreErrorKind> {
        if row.parts == Parts::None {
            return Err(StoreErrorKind::Unsupported);
        }
        let id = UploadId(format!("upload-{:08}", self.next_upload).into());
        self.next_upload += 1;
        let upload = Upload { name: name.to_owned(), parts: BTreeMap::new(), created: self.now };
        self.uploads.insert(id.clone(), upload);
        Ok(id)
    }

    pub(super) fn put_part(
        &mut self,
        row: &Capabilities,
        name: &str,
        id: &UploadId,
        number: u32,
        body: &Body,
    ) -> Result<EntityTag, StoreErrorKind> {
        let tag = self.tag();
        let upload = self.upload(name, id)?;
        let expected = u32::try_from(upload.parts.len()).unwrap_or(u32::MAX).saturating_add(1);
        if number == 0
            || number > row.parts_max
            || body.len() > row.part_bytes_max
            || (row.parts == Parts::Sequential && number != expected)
        {
            return Err(StoreErrorKind::InvalidPart);
        }
        let spoiled = !row.resend_part && upload.parts.contains_key(&number);
        upload.parts.insert(number, Part { bytes: joined(body.slices()), tag: tag.clone(), spoiled });
        Ok(tag)
    }

    pub(super) fn copy_part(
        &mut self,
        row: &Capabilities,
        (name, id): (&str, &UploadId),
        number: u32,
        from: &str,
        range: Range<u64>,
    ) -> Result<EntityTag, StoreErrorKind> {
        if !row.copy_part {
            return Err(StoreErrorKind::Unsupported);
        }
        let bytes = self.get(from, range)?;
        self.put_part(row, name, id, number, &Body::new(vec![bytes]))
    }

    pub(super) fn list_parts(
        &mut self,
        row: &Capabilities,
        name: &str,
        id: &UploadId,
    ) -> Result<Vec<ListedPart>, StoreErrorKind> {
        if !row.list_parts {
            return Err(StoreErrorKind::Unsupported);
        }
        let parts = self.upload(name, id)?.parts.iter();
        Ok(parts
            .map(|(number, part)| ListedPart {
                number: *number,
                tag: part.tag.clone(),
                bytes: part.bytes.len() as u64,
            })
            .collect())
    }

    /// The upload stays as it was if it is refused.
    pub(super) fn complete(
        &mut self,
        row: &Capabilities,
        name: &str,
        id: &UploadId,
        named: &[UploadedPart],
    ) -> Result<EntityTag, StoreErrorKind> {
        let upload = self.upload(name, id)?;
        let mut slices = Vec::with_capacity(named.len());
        for (index, UploadedPart { number, tag }) in named.iter().enumerate() {
            let found = upload.parts.get(number).filter(|part| part.tag == *tag && !part.spoiled);
            let ordered = if row.sparse {
                index == 0 || named[index - 1].number < *number
            } else {
                *number as usize == index + 1
            };
            let Some(part) = found.filter(|_| ordered) else {
                return Err(StoreErrorKind::InvalidPart);
            };
            slices.push(part.bytes.clone());
        }
        let Some((last, others)) = slices.split_last() else {
            return Err(StoreErrorKind::InvalidPart);
        };
        let first_bytes = slices[0].len();
        let well_sized = others.iter().all(|part| {
            part.len() as u64 >= row.part_bytes_min && (!row.equal_parts || part.len() == first_bytes)
        });
        if !well_sized || (row.equal_parts && last.len() > first_bytes) {
            return Err(StoreErrorKind::InvalidPart);
        }
        let tag = self.write(row, name, joined(&slices))?;
        self.uploads.remove(id);
        Ok(tag)
    }

    pub(super) fn abort(&mut self, name: &str, id: &UploadId) {
        if self.upload(name, id).is_ok() {
            self.uploads.remove(id);
        }
    }

    pub(super) fn list_uploads(
        &self,
        row: &Capabilities,
        prefix: &str,
    ) -> Result<Vec<ListedUpload>, StoreErrorKind> {
        if !row.list_uploads {
            return Err(StoreErrorKind::Unsupported);
        }
        let found = self.uploads.iter().filter(|(_, upload)| upload.name.starts_with(prefix));
        let mut listed: Vec<_> = found
            .map(|(id, upload)| ListedUpload {
                name: upload.name.clone(),
                id: id.clone(),
                created: Some(upload.created),
            })
            .collect();
        listed.sort_by(|a, b| (&a.name, &a.id).cmp(&(&b.name, &b.id)));
        Ok(listed)
    }

    pub(super) fn get(&self, name: &str, range: Range<u64>) -> Result<Bytes, StoreErrorKind> {
        let bytes = &self.objects.get(name).ok_or(StoreErrorKind::NotFound)?.bytes;
        let Range { start, end } = range;
        let size = bytes.len() as u64;
        if start > end || end > size {
            return Err(StoreErrorKind::OutOfRange { start, end, size });
        }
        // Both fit: they are at most the length of a slice.
        Ok(bytes.slice(start as usize..end as usize))
    }

    pub(super) fn head(&self, name: &str) -> Result<ListedObject, StoreErrorKind> {
        self.objects.get(name).map(|object| object.listed(name)).ok_or(StoreErrorKind::NotFound)
    }

    pub(super) fn delete(&mut self, name: &str) {
        self.objects.remove(name);
    }

    pub(super) fn list(&self, prefix: &str) -> Vec<ListedObject> {
        self.objects
            .range(prefix.to_owned()..)
            .take_while(|(name, _)| name.starts_with(prefix))
            .map(|(name, object)| object.listed(name))
            .collect()
    }

    pub(super) fn objects(&self) -> BTreeMap<String, Bytes> {
        self.objects.iter().map(|(name, object)| (name.clone(), object.bytes.clone())).collect()
    }

    pub(super) fn open_uploads(&self) -> Vec<String> {
        let mut names: Vec<_> = self.uploads.values().map(|upload| upload.name.clone()).collect();
        names.sort_unstable();
        names
    }

    pub(super) fn tamper(&mut self, name: &str, bytes: Option<Bytes>) {
        match bytes {
            Some(bytes) => {
                let object = Object { bytes, tag: self.tag(), modified: self.now };
                self.objects.insert(name.to_owned(), object);
            }
            None => self.delete(name),
        }
    }

    fn write(&mut self, row: &Capabilities, name: &str, bytes: Bytes) -> Result<EntityTag, StoreErrorKind> {
        if row.conditional_put && self.objects.contains_key(name) {
            return Err(StoreErrorKind::Exists);
        }
        let tag = self.tag();
        let object = Object { bytes, tag: tag.clone(), modified: self.now };
        self.objects.insert(name.to_owned(), object);
        Ok(tag)
    }

    fn upload(&mut self, name: &str, id: &UploadId) -> Result<&mut Upload, StoreErrorKind> {
        self.uploads.get_mut(id).filter(|upload| upload.name == name).ok_or(StoreErrorKind::NoSuchUpload)
    }

    fn tag(&mut self) -> EntityTag {
        self.next_tag += 1;
        EntityTag(format!("{:08x}", self.next_tag).into())
    }
}

impl Object {
    fn listed(&self, name: &str) -> ListedObject {
        ListedObject {
            name: name.to_owned(),
            bytes: self.bytes.len() as u64,
            tag: self.tag.clone(),
            modified: Some(self.modified),
        }
    }
}

fn joined(slices: &[Bytes]) -> Bytes {
    if let [slice] = slices {
        return slice.clone();
    }
    let mut bytes = BytesMut::with_capacity(slices.iter().map(Bytes::len).sum());
    slices.iter().for_each(|slice| bytes.extend_from_slice(slice));
    bytes.freeze()
}
