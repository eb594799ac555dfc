//! Buckets by URL. What each kind of store does is known to [`s3`](crate::s3) and [`object`](crate::object).
#![forbid(unsafe_code)]

use std::path::PathBuf;
use std::sync::Arc;

#[cfg(any(feature = "azure", feature = "gcs"))]
use crate::cloud;
#[cfg(feature = "hdfs")]
use crate::hdfs;
use crate::object;
#[cfg(feature = "s3")]
use crate::s3;
use crate::store::{Operation, Store, StoreError, StoreErrorKind};

/// The schemes that [`open_store`] knows, for people. All but `memory` are features of this crate.
pub const SUPPORTED_SCHEMES: &str = "s3://bucket/prefix, file:///absolute/directory, memory://, memory://name, \
                                     gs://bucket/prefix, az://container/prefix, hdfs://host:port/prefix";

/// The features that schemes need.
const FEATURES: [(&str, &str); 5] =
    [("file", "local"), ("s3", "s3"), ("gs", "gcs"), ("az", "azure"), ("hdfs", "hdfs")];

/// Opens the bucket that a URL names. URLs stand in handles, so none has credentials: they come from the environment, from
/// profiles, or from the machine's role.
///
/// - `file:///absolute/directory` (feature `local`, on by default): a local directory, which [`open_or_create_store`] makes if
///   it is not there. While it is not, requests are refused, and nothing is made in its place: it may not be mounted. An
///   object that is complete survives a power cut, and so does its absence once it is deleted.
/// - `memory://`: a new, empty bucket in this process's memory. `memory://name`: the same for every caller in the process
///   for as long as one of them keeps it.
/// - `s3://bucket/prefix?key=value&...` (feature `s3`, on by default): AWS, and what speaks its protocol. The keys:
///
///   | key | meaning; default |
///   |---|---|
///   | `endpoint` | the server, `http://host:port`; `AWS_ENDPOINT_URL_S3`, `AWS_ENDPOINT_URL`, else AWS |
///   | `region` | `AWS_REGION`, the profile's, the machine's; `us-east-1` where there is an endpoint and no region |
///   | `path_style` | the bucket stands in the path, not in the host's name; true for servers other than AWS |
///   | `anonymous` | true: nothing is signed |
///   | `sse`, `kms_key`, `storage_class` | headers of new objects: `AES256`, `aws:kms` or `aws:kms:dsse`; a key's id; a class |
///   | `checksum` | how damage on the way is found: `sha256` (in the signature), `md5` (`Content-MD5`), `none`; `sha256` |
///   | `sparse`, `equal_parts`, `conditional_put`, `copy_part`, `list_uploads`, `part_bytes_min` | what the server takes, where it is not what its kind is known for |
///
///   What the kinds are known for: parts of 5 MiB and more, 10,000 of them. AWS also takes gaps between part numbers,
///   conditional writes and copies of ranges; its directory buckets (`...--x-s3`) no gaps; R2 no gaps and only parts of equal size; any other server
///   no gaps and no conditions, unless the URL says that it does.
/// - `gs://bucket/prefix` (feature `gcs`), `az://container/prefix` (feature `azure`), `hdfs://host:port/prefix` (feature
///   `hdfs`; one sequential writer and a rename).
///
/// No server is asked for anything here: what is wrong with a bucket or with credentials is said by the first request. Nothing
/// is changed.
///
/// # Errors
/// A URL that names no bucket or is of an unknown scheme; [`NoSuchBucket`](StoreErrorKind::NoSuchBucket) if there is no
/// directory where a local one should be.
///
/// ```
/// let store = tidelog_upload::open_store("memory://")?;
/// assert_eq!(store.url(), "memory://");
/// let error = tidelog_upload::open_store("ftp://host/").unwrap_err();
/// assert!(error.to_string().contains("memory://"));
/// # Ok::<_, tidelog_upload::StoreError>(())
/// ```
pub fn open_store(url: &str) -> Result<Arc<dyn Store>, StoreError> {
    open(url, false)
}

/// As [`open_store`], for whoever writes to the bucket first: a local directory is made if it is not there, durably, with
/// those above it. Buckets of servers are not made.
///
/// # Errors
/// As [`open_store`], or a directory that cannot be made.
pub fn open_or_create_store(url: &str) -> Result<Arc<dyn Store>, StoreError> {
    open(url, true)
}

/// The URL in its normal form, as [`Store::url`] says it and as it stands in handles: two URLs of the same normal form name
/// one bucket. Slashes at the end go, and `file://` paths lose what names nothing (`//`, `/./`, `/x/../`); links are not
/// followed. Nothing is opened.
///
/// # Errors
/// A URL that names no bucket or is of an unknown scheme. Some of them are found by [`open_store`] alone.
///
/// ```
/// # #[cfg(feature = "local")] {
/// assert_eq!(tidelog_upload::bucket_url("file:///mnt/./a//b/")?, "file:///mnt/a/b");
/// # }
/// # Ok::<_, tidelog_upload::StoreError>(())
/// ```
pub fn bucket_url(url: &str) -> Result<String, StoreError> {
    match url.split_once("://") {
        #[cfg(feature = "local")]
        Some(("file", _)) => object::directory(url).map(|(_, url)| url),
        #[cfg(feature = "s3")]
        Some(("s3", _)) => s3::normal(url),
        #[cfg(feature = "gcs")]
        Some(("gs", _)) => Address::of(url).map(|address| address.url),
        #[cfg(feature = "azure")]
        Some(("az", _)) => Address::of(url).map(|address| address.url),
        #[cfg(feature = "hdfs")]
        Some(("hdfs", _)) => Address::of(url).map(|address| address.url),
        Some(("memory", _)) => Ok(url.to_owned()),
        _ => Err(unsupported(url)),
    }
}

/// The local directory that a URL names; `None` for other buckets, and for URLs that name none.
#[must_use]
pub fn bucket_directory(url: &str) -> Option<PathBuf> {
    #[cfg(feature = "local")]
    if url.starts_with("file://") {
        return object::directory(url).ok().map(|(path, _)| path);
    }
    let _ = url;
    None
}

/// What `gs://`, `az://` and `hdfs://` URLs name.
#[cfg(any(feature = "azure", feature = "gcs", feature = "hdfs"))]
pub(crate) struct Address {
    /// In its normal form.
    pub(crate) url: String,
    /// The bucket, the container, or the server with its port.
    pub(crate) host: String,
    pub(crate) prefix: object_store::path::Path,
}

#[cfg(any(feature = "azure", feature = "gcs", feature = "hdfs"))]
impl Address {
    /// # Errors
    /// A URL that names no bucket, or has credentials or options in it. They are not repeated.
    pub(crate) fn of(url: &str) -> Result<Address, StoreError> {
        let refuse = |why: &str| {
            let plain = url.split(['?', '#']).next().unwrap_or_default();
            let (scheme, rest) = plain.split_once("://").unwrap_or_default();
            let (host, _) = rest.split_once('/').unwrap_or((rest, ""));
            let plain = match host.rsplit_once('@') {
                Some((_, host)) => format!("{scheme}://{host}"),
                None => plain.to_owned(),
            };
            StoreError::new(Operation::Open, &plain, "", StoreErrorKind::InvalidUrl(why.to_owned()))
        };
        let parsed = url::Url::parse(url).map_err(|error| refuse(&error.to_string()))?;
        let bare = parsed.username().is_empty() && parsed.password().is_none();
        if !bare || parsed.query().is_some() || parsed.fragment().is_some() {
            return Err(refuse(
                "it is a bucket and a prefix; credentials and options come from the environment",
            ));
        }
        let Some(host) = parsed.host_str().filter(|host| !host.is_empty()) else {
            return Err(refuse("it names no bucket; two slashes and its name are expected"));
        };
        let host = match parsed.port() {
            Some(port) => format!("{host}:{port}"),
            None => host.to_owned(),
        };
        let path = parsed.path().trim_end_matches('/');
        let prefix = object_store::path::Path::from_url_path(path);
        let prefix = prefix.map_err(|error| refuse(&error.to_string()))?;
        let mut normal = parsed.clone();
        normal.set_path(&prefix.as_ref().replace('%', "%25"));
        let url = normal.as_str().trim_end_matches('/').to_owned();
        Ok(Address { url, host, prefix })
    }
}

fn open(url: &str, create: bool) -> Result<Arc<dyn Store>, StoreError> {
    // Nothing else is made.
    let _ = create;
    match url.split_once("://") {
        #[cfg(feature = "local")]
        Some(("file", _)) => object::open_directory(url, create),
        #[cfg(feature = "s3")]
        Some(("s3", _)) => s3::open(url),
        #[cfg(feature = "gcs")]
        Some(("gs", _)) => cloud::open_google(url),
        #[cfg(feature = "azure")]
        Some(("az", _)) => cloud::open_azure(url),
        #[cfg(feature = "hdfs")]
        Some(("hdfs", _)) => hdfs::open(url),
        Some(("memory", name)) => object::open_memory(url, name),
        _ => Err(unsupported(url)),
    }
}

/// The error of a scheme that is unknown, or left out of this build.
fn unsupported(url: &str) -> StoreError {
    let scheme = url.split_once("://").map_or(url, |(scheme, _)| scheme);
    let kind = match FEATURES.iter().find(|(known, _)| *known == scheme && url != scheme) {
        Some((scheme, feature)) => StoreErrorKind::SchemeNotBuilt { scheme, feature },
        None => StoreErrorKind::UnsupportedScheme { scheme: scheme.to_owned(), supported: SUPPORTED_SCHEMES },
    };
    StoreError::new(Operation::Open, url, "", kind)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg(feature = "local")]
    fn a_local_bucket_has_one_url() {
        let normal = |url: &str| bucket_url(url).unwrap();
        for spelled in ["/a/b", "/a/b/", "//a/b", "/a//b", "/./a/b/.", "/a/x/../b", "/a/%62"] {
            assert_eq!(normal(&format!("file://{spelled}")), "file:///a/b", "{spelled}");
        }
        assert_eq!(normal("file:///"), "file:///");
        assert_eq!(normal("file:///a b%20c"), "file:///a%20b%20c");
        assert_eq!(bucket_directory("file:///a b/./c/"), Some("/a b/c".into()));
        assert_eq!(bucket_directory("memory://a"), None);
        assert!(bucket_url("file://a/b").is_err());
    }

    #[test]
    #[cfg(feature = "s3")]
    fn a_bucket_of_a_server_has_one_url() {
        for spelled in ["s3://bucket/x?region=r", "s3://bucket/x//?region=r"] {
            assert_eq!(bucket_url(spelled).unwrap(), "s3://bucket/x?region=r");
            assert_eq!(open_store(spelled).unwrap().url(), "s3://bucket/x?region=r");
        }
        assert_eq!(bucket_url("s3://bucket/").unwrap(), "s3://bucket");
        let error = bucket_url("s3://key:secret@bucket").unwrap_err().to_string();
        assert!(!error.contains("secret"), "{error}");
    }

    #[test]
    #[cfg(any(feature = "azure", feature = "gcs", feature = "hdfs"))]
    fn an_address_has_one_url_and_no_secrets() {
        for spelled in ["gs://b/a/b", "gs://b/a/b//", "gs://b/./a/x/../b", "gs://b/a/%62"] {
            let address = Address::of(spelled).unwrap();
            assert_eq!((&*address.url, &*address.host, address.prefix.as_ref()), ("gs://b/a/b", "b", "a/b"));
        }
        let odd = Address::of("az://b/a%2562/ä c%3F%23").unwrap();
        assert_eq!(odd.prefix.as_ref(), "a%62/ä c?#");
        let again = Address::of(&odd.url).unwrap();
        assert_eq!((odd.prefix, odd.url), (again.prefix, again.url));
        assert_eq!(Address::of("hdfs://host:9000/").unwrap().url, "hdfs://host:9000");
        for url in [
            "gs://",
            "gs:///x",
            "gs://b//x",
            "az://b?sig=secret",
            "az://b#secret",
            "gs://user:secret@b/x",
            "gs://secret@b",
            "hdfs://host:secret/x",
        ] {
            let error = Address::of(url).err().unwrap_or_else(|| panic!("{url}"));
            assert!(matches!(error.kind(), StoreErrorKind::InvalidUrl(_)), "{url}: {error}");
            assert!(url.contains("host") || !error.to_string().contains("secret"), "{error}");
        }
    }

    #[test]
    #[cfg(not(feature = "gcs"))]
    fn a_scheme_that_is_left_out_names_its_feature() {
        let error = open_store("gs://bucket/prefix").unwrap_err().to_string();
        assert!(error.contains("feature gcs"), "{error}");
    }
}
