//! HDFS over its adapter for `object_store`: one writer and a rename.
//!
//! The adapter writes `.name.tmp.1` (or a higher number) beside the object and renames it; such files look like objects and
//! are told apart here. What HDFS promises of a closed file is what counts as durable: it is on the number of data nodes
//! that its configuration says, not necessarily on their disks.
#![forbid(unsafe_code)]

use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use hdfs_native_object_store::HdfsObjectStoreBuilder;
use object_store::path::Path as ObjectPath;
use object_store::prefix::PrefixStore;
use object_store::{ObjectMeta, ObjectStore, ObjectStoreExt};
use tokio::runtime::{Builder, Handle, Runtime};

use crate::object::{Bucket, Staging, failure, staged_id};
use crate::open::Address;
use crate::store::{ListedUpload, Operation, Store, StoreError, StoreErrorKind, UploadId};

/// Opens `hdfs://host:port/prefix`, or `hdfs://nameservice/prefix` with the configuration in `HADOOP_CONF_DIR`.
pub(crate) fn open(url: &str) -> Result<Arc<dyn Store>, StoreError> {
    let Address { url, host, prefix } = Address::of(url)?;
    if let Err(why) = check_name(prefix.as_ref()) {
        return Err(StoreError::new(Operation::Open, &url, "", StoreErrorKind::InvalidUrl(why.to_owned())));
    }
    let threads = runtime().map_err(|error| failure(Operation::Open, &url, "", error))?;
    let inner =
        HdfsObjectStoreBuilder::new().with_url(format!("hdfs://{host}")).with_io_runtime(threads).build();
    let inner = inner.map_err(|error| failure(Operation::Open, &url, "", error))?;
    let inner = Arc::new(PrefixStore::new(inner, prefix));
    Ok(Arc::new(Bucket::new(&url, inner, Staging::Hdfs)))
}

/// The threads of all clients' connections, for as long as the process lives. A client that is left alone makes a runtime of its
/// own, and panics where its last user is a task of another.
fn runtime() -> Result<Handle, io::Error> {
    static RUNTIME: Mutex<Option<Runtime>> = Mutex::new(None);
    let mut kept = RUNTIME.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(runtime) = &*kept {
        return Ok(runtime.handle().clone());
    }
    let new =
        Builder::new_multi_thread().worker_threads(2).thread_name("tidelog-hdfs").enable_all().build()?;
    Ok(kept.insert(new).handle().clone())
}

/// What HDFS refuses beyond what all stores do.
///
/// # Errors
/// What is wrong with the name, in words.
pub(crate) fn check_name(name: &str) -> Result<(), &'static str> {
    if name.contains(':') {
        return Err("HDFS takes no ':' in a name");
    }
    match staged_name(name) {
        Some(_) => Err("files of such names, '.name.tmp.1', are unfinished uploads in HDFS"),
        None => Ok(()),
    }
}

/// What the text of an error of the adapter means, which has no type to be asked for: the NameNode's exception is in it.
pub(crate) fn meaning(text: &str) -> Option<StoreErrorKind> {
    let says = |words: &[&str]| words.iter().any(|word| text.contains(word));
    if says(&["AccessControlException"]) {
        return Some(StoreErrorKind::Denied);
    }
    says(&["SASL error", "GSSAPI error", "No valid SASL mechanism"]).then_some(StoreErrorKind::Credentials)
}

/// The text of an error with the NameNode's Java stack in it, without that.
pub(crate) fn without_stack(text: &str) -> Option<String> {
    text.split_once("\n\tat ").map(|(said, _)| said.to_owned())
}

/// The upload that an entry of a listing is the temporary file of, if it is one.
pub(crate) fn staged(entry: &ObjectMeta) -> Option<ListedUpload> {
    let (name, id) = staged_name(entry.location.as_ref())?;
    Some(ListedUpload { name, id, created: Some(entry.last_modified.into()) })
}

/// The object whose temporary file has this name, and the id of its upload.
fn staged_name(name: &str) -> Option<(String, UploadId)> {
    let (folder, file) = name.rsplit_once('/').unwrap_or(("", name));
    let (file, number) = file.strip_prefix('.')?.rsplit_once(".tmp.")?;
    if file.is_empty() {
        return None;
    }
    let name = if folder.is_empty() { file.to_owned() } else { format!("{folder}/{file}") };
    Some((name, staged_id(number)?))
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
        let staged = staged_path(path, number)?;
        match store.head(&staged).await {
            Ok(_) => store.delete(&staged).await?,
            Err(object_store::Error::NotFound { .. }) => break,
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn staged_path(path: &ObjectPath, number: u64) -> Result<ObjectPath, object_store::path::Error> {
    // As it is: made by `from`, it would be percent-encoded.
    ObjectPath::parse(match path.as_ref().rsplit_once('/') {
        Some((folder, file)) => format!("{folder}/.{file}.tmp.{number}"),
        None => format!(".{path}.tmp.{number}"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn temporary_files_are_told_from_objects() {
        let entry = |name: &str| ObjectMeta {
            location: ObjectPath::parse(name).unwrap(),
            last_modified: std::time::SystemTime::UNIX_EPOCH.into(),
            size: 0,
            e_tag: None,
            version: None,
        };
        for name in ["a/b", "b", "a/b.c.tmp", "a/b%20 ~c"] {
            let path = staged_path(&ObjectPath::parse(name).unwrap(), 12).unwrap();
            let found = staged(&entry(path.as_ref())).unwrap();
            assert_eq!((&*found.name, &*found.id.0), (name, "#12"));
            assert!(check_name(name).is_ok() && check_name(path.as_ref()).is_err(), "{name}");
        }
        for name in ["a/b", "a/b.tmp.1", "a/.b.tmp.", "a/.b.tmp.x", "a/..tmp.1", ".tmp.1/b"] {
            assert!(staged(&entry(name)).is_none(), "{name}");
        }
    }

    #[test]
    fn of_two_temporary_files_the_one_of_the_number_is_removed() {
        let store = object_store::memory::InMemory::new();
        let path = ObjectPath::from("a/b");
        let put =
            |number| crate::block_on(store.put(&staged_path(&path, number).unwrap(), "".into())).map(drop);
        let is_there = |number| crate::block_on(store.head(&staged_path(&path, number).unwrap())).is_ok();
        put(2).unwrap();
        put(3).unwrap();
        crate::block_on(remove_staged(&store, &path, Some(3))).unwrap();
        assert!(is_there(2) && !is_there(3));
        put(1).unwrap();
        crate::block_on(remove_staged(&store, &path, None)).unwrap();
        assert!(!is_there(1) && !is_there(2));
    }

    #[test]
    fn the_last_user_of_a_store_may_be_a_task() {
        let store = open("hdfs://127.0.0.1:1/x").unwrap();
        let other = Builder::new_current_thread().build().unwrap();
        other.block_on(async { drop(store) });
    }

    #[test]
    fn an_error_of_the_name_node_is_known_by_its_exception() {
        let kind = |text: &str| {
            let source = format!("{text}\n\tat org.apache.hadoop.ipc.Server.run(Server.java:1)").into();
            let error = object_store::Error::Generic { store: "HdfsObjectStore", source };
            let error = failure(Operation::Put, "hdfs://host", "x", error);
            assert!(error.to_string().ends_with(text), "{error}");
            error.kind().clone()
        };
        let denied = "RPC error: org.apache.hadoop.security.AccessControlException Permission denied: user=x";
        assert_eq!(kind(denied), StoreErrorKind::Denied);
        assert_eq!(kind("No valid SASL mechanism found"), StoreErrorKind::Credentials);
        assert_eq!(kind("RPC error: SafeModeException"), StoreErrorKind::Interrupted);
    }

    #[test]
    fn urls_that_name_no_file_system_are_refused() {
        for url in ["hdfs://", "hdfs:///x", "hdfs://host?x=y", "hdfs://user@host/x", "hdfs://host/a:b"] {
            let error = open(url).unwrap_err();
            assert!(matches!(error.kind(), StoreErrorKind::InvalidUrl(_)), "{url}: {error}");
        }
    }
}
