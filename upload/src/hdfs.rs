//! HDFS over its adapter for `object_store`: one writer and a rename.
//!
//! The adapter writes `.name.tmp.1` (or a higher number) beside the object and renames it; such files look like objects and
//! are told apart here. What HDFS promises of a closed file is what counts as durable: it is on the number of data nodes
//! that its configuration says, not necessarily on their disks.
#![forbid(unsafe_code)]

use std::sync::Arc;

use hdfs_native_object_store::HdfsObjectStoreBuilder;
use object_store::path::Path as ObjectPath;
use object_store::prefix::PrefixStore;
use object_store::{ObjectMeta, ObjectStore, ObjectStoreExt};
use url::Url;

use crate::object::{Bucket, Staging, failure, staged_id};
use crate::store::{ListedUpload, Operation, Store, StoreError, StoreErrorKind};

/// Opens `hdfs://host:port/prefix`, or `hdfs://nameservice/prefix` with the configuration in `HADOOP_CONF_DIR`.
pub(crate) fn open(url: &str) -> Result<Arc<dyn Store>, StoreError> {
    let refuse =
        |why: &str| StoreError::new(Operation::Open, url, "", StoreErrorKind::InvalidUrl(why.to_owned()));
    let parsed = Url::parse(url).map_err(|error| refuse(&error.to_string()))?;
    let plain = parsed.query().is_none() && parsed.fragment().is_none() && parsed.username().is_empty();
    let Some(host) = parsed.host_str().filter(|host| plain && !host.is_empty()) else {
        return Err(refuse("it is hdfs://host:port/prefix or hdfs://nameservice/prefix"));
    };
    let server = match parsed.port() {
        Some(port) => format!("hdfs://{host}:{port}"),
        None => format!("hdfs://{host}"),
    };
    let prefix = ObjectPath::from_url_path(parsed.path()).map_err(|error| refuse(&error.to_string()))?;
    let inner = HdfsObjectStoreBuilder::new().with_url(server).build();
    let inner = inner.map_err(|error| failure(Operation::Open, url, "", error))?;
    let inner = Arc::new(PrefixStore::new(inner, prefix));
    Ok(Arc::new(Bucket::new(url.trim_end_matches('/'), inner, Staging::Hdfs)))
}

/// The upload that an entry of a listing is the temporary file of, if it is one.
pub(crate) fn staged(entry: &ObjectMeta) -> Option<ListedUpload> {
    let (folder, file) = entry.location.as_ref().rsplit_once('/').unwrap_or(("", entry.location.as_ref()));
    let (file, number) = file.strip_prefix('.')?.rsplit_once(".tmp.")?;
    if file.is_empty() {
        return None;
    }
    Some(ListedUpload {
        name: if folder.is_empty() { file.to_owned() } else { format!("{folder}/{file}") },
        id: staged_id(number)?,
        created: Some(entry.last_modified.into()),
    })
}

/// Removes the temporary file of this number, or without one those of an object's uploads up to the first number that is
/// free. To delete what is not there is no error, so each is looked at first.
pub(crate) async fn remove_staged(
    store: &dyn ObjectStore,
    path: &ObjectPath,
    number: Option<u64>,
) -> Result<(), object_store::Error> {
    let numbers = number.map_or(1..=u64::MAX, |number| number..=number);
    for number in numbers {
        let staged = staged_path(path, number);
        match store.head(&staged).await {
            Ok(_) => store.delete(&staged).await?,
            Err(object_store::Error::NotFound { .. }) => break,
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn staged_path(path: &ObjectPath, number: u64) -> ObjectPath {
    let (folder, file) = path.as_ref().rsplit_once('/').unwrap_or(("", path.as_ref()));
    ObjectPath::from(format!("{folder}/.{file}.tmp.{number}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn temporary_files_are_told_from_objects() {
        let entry = |name: &str| ObjectMeta {
            location: ObjectPath::from(name),
            last_modified: std::time::SystemTime::UNIX_EPOCH.into(),
            size: 0,
            e_tag: None,
            version: None,
        };
        for name in ["a/b", "b", "a/b.c.tmp"] {
            let path = ObjectPath::from(name);
            let found = staged(&entry(staged_path(&path, 12).as_ref())).unwrap();
            assert_eq!((&*found.name, &*found.id.0), (name, "#12"));
        }
        for name in ["a/b", "a/b.tmp.1", "a/.b.tmp.", "a/.b.tmp.x", "a/..tmp.1", ".tmp.1/b"] {
            assert!(staged(&entry(name)).is_none(), "{name}");
        }
    }

    #[test]
    fn of_two_temporary_files_the_one_of_the_number_is_removed() {
        let store = object_store::memory::InMemory::new();
        let path = ObjectPath::from("a/b");
        let put = |number| crate::block_on(store.put(&staged_path(&path, number), "".into())).map(drop);
        let is_there = |number| crate::block_on(store.head(&staged_path(&path, number))).is_ok();
        put(2).unwrap();
        put(3).unwrap();
        crate::block_on(remove_staged(&store, &path, Some(3))).unwrap();
        assert!(is_there(2) && !is_there(3));
        put(1).unwrap();
        crate::block_on(remove_staged(&store, &path, None)).unwrap();
        assert!(!is_there(1) && !is_there(2));
    }

    #[test]
    fn urls_that_name_no_file_system_are_refused() {
        for url in ["hdfs://", "hdfs:///x", "hdfs://host?x=y", "hdfs://user@host/x"] {
            let error = open(url).unwrap_err();
            assert!(matches!(error.kind(), StoreErrorKind::InvalidUrl(_)), "{url}: {error}");
        }
    }
}
