//! What an `s3://` URL says, and what its kind of server takes. Pure.
#![forbid(unsafe_code)]

use std::fmt::Write as _;

use url::form_urlencoded;

use super::body::Checksum;
use crate::store::{Capabilities, Parts, check_name};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// The keys that a URL may have, for people.
const KEYS: &str = "endpoint, region, path_style, anonymous, sse, kms_key, storage_class, checksum, sparse, equal_parts, \
                    conditional_put, copy_part, list_uploads, part_bytes_min";

/// A bucket, a prefix in it and how to speak to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Address {
    pub(crate) bucket: String,
    /// Before every name: empty, or ends with `/`.
    pub(crate) prefix: String,
    /// The server, `None` for AWS.
    pub(crate) endpoint: Option<String>,
    pub(crate) region: Option<String>,
    /// The bucket is a part of the path, not of the host's name.
    pub(crate) path_style: bool,
    /// Nothing is signed.
    pub(crate) anonymous: bool,
    pub(crate) sse: Option<String>,
    pub(crate) kms_key: Option<String>,
    pub(crate) storage_class: Option<String>,
    pub(crate) checksum: Checksum,
    pub(crate) capabilities: Capabilities,
    /// Listings take only prefixes that end with `/`, and are in no order.
    pub(crate) lists_folders: bool,
}

/// Why a URL is refused.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// The URL may be repeated to people.
    Invalid(String),
    /// It has a secret, or may have.
    Credentials,
}

impl Address {
    /// Reads `s3://bucket/prefix?key=value&...`. `environment_endpoint` is the server to use if the URL names none.
    pub(crate) fn parse(url: &str, environment_endpoint: Option<String>) -> Result<Address, Refusal> {
        let refuse = |why: &str| Refusal::Invalid(why.to_owned());
        let rest = url.strip_prefix("s3://").ok_or_else(|| refuse("it does not start with s3://"))?;
        let (place, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (bucket, prefix) = place.split_once('/').unwrap_or((place, ""));
        if bucket.contains(['@', ':']) {
            return Err(Refusal::Credentials);
        }
        let is_letter = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_');
        if !(3..=255).contains(&bucket.len()) || !bucket.bytes().all(is_letter) {
            return Err(refuse("a bucket's name has 3 characters and more, letters, digits, '-', '.', '_'"));
        }
        if place.contains(['#', '%']) || query.contains('#') {
            return Err(refuse("bucket and prefix are written as they are, without '%' and '#'"));
        }
        let prefix = prefix.trim_end_matches('/');
        if !prefix.is_empty() {
            check_name(prefix).map_err(|why| refuse(&format!("its prefix: {why}")))?;
        }
        let mut address = Address {
            bucket: bucket.to_owned(),
            prefix: if prefix.is_empty() { String::new() } else { format!("{prefix}/") },
            endpoint: environment_endpoint,
            region: None,
            path_style: false,
            anonymous: false,
            sse: None,
            kms_key: None,
            storage_class: None,
            checksum: Checksum::Sha256,
            capabilities: generic(),
            lists_folders: bucket.ends_with("--x-s3"),
        };
        let pairs: Vec<(String, String)> = form_urlencoded::parse(query.as_bytes()).into_owned().collect();
        // The server first: the rest is said on top of what its kind takes.
        if let Some((_, endpoint)) = pairs.iter().find(|(key, _)| key == "endpoint") {
            address.endpoint = Some(endpoint.clone());
        }
        if let Some(endpoint) = &address.endpoint {
            check_endpoint(endpoint)?;
        }
        address.capabilities = capabilities(address.endpoint.as_deref(), address.lists_folders);
        address.path_style = address.endpoint.as_deref().is_some_and(|endpoint| !is_aws(endpoint));
        for (at, (key, value)) in pairs.iter().enumerate() {
            if pairs[..at].iter().any(|(earlier, _)| earlier == key) {
                return Err(refuse(&format!("{key} is there twice")));
            }
            address.set(key, value)?;
        }
        if address.kms_key.is_some() && !address.sse.as_deref().is_some_and(|sse| sse.starts_with("aws:kms"))
        {
            return Err(refuse("kms_key takes sse=aws:kms"));
        }
        Ok(address)
    }

    fn set(&mut self, key: &str, value: &str) -> Result<(), Refusal> {
        let refuse = |why: String| Err(Refusal::Invalid(why));
        let flag = || match value {
            "true" => Ok(true),
            "false" => Ok(false),
            _ => Err(Refusal::Invalid(format!("{key} is true or false"))),
        };
        match key {
            // Taken already.
            "endpoint" => {}
            "region" => self.region = Some(word(key, value)?),
            "path_style" => self.path_style = flag()?,
            "anonymous" => self.anonymous = flag()?,
            "sse" => match value {
                "AES256" | "aws:kms" | "aws:kms:dsse" => self.sse = Some(value.to_owned()),
                _ => return refuse("sse is AES256, aws:kms or aws:kms:dsse".to_owned()),
            },
            "kms_key" => self.kms_key = Some(word(key, value)?),
            "storage_class" => self.storage_class = Some(word(key, value)?),
            "checksum" => {
                self.checksum = match value {
                    "sha256" => Checksum::Sha256,
                    "md5" => Checksum::Md5,
                    "none" => Checksum::None,
                    _ => return refuse("checksum is sha256, md5 or none".to_owned()),
                }
            }
            "sparse" => self.capabilities.sparse = flag()?,
            "equal_parts" => self.capabilities.equal_parts = flag()?,
            "copy_part" => self.capabilities.copy_part = flag()?,
            "conditional_put" => self.capabilities.conditional_put = flag()?,
            "list_uploads" => self.capabilities.list_uploads = flag()?,
            "part_bytes_min" => match value.parse() {
                Ok(bytes) if (1..=self.capabilities.part_bytes_max).contains(&bytes) => {
                    self.capabilities.part_bytes_min = bytes;
                }
                _ => return refuse("part_bytes_min is a number of bytes, from 1".to_owned()),
            },
            _ if looks_secret(key) => return Err(Refusal::Credentials),
            _ => return refuse(format!("it has an unknown key; the keys are {KEYS}")),
        }
        Ok(())
    }
}

/// The URL without what may be secret: userinfo and query.
pub(crate) fn redacted(url: &str) -> String {
    let place = url.split(['?', '#']).next().unwrap_or_default();
    let Some(rest) = place.strip_prefix("s3://") else { return String::new() };
    let mut text = String::from("s3://");
    let _ = match rest.split_once('/') {
        Some((host, prefix)) => write!(text, "{}/{prefix}", host.rsplit('@').next().unwrap_or_default()),
        None => write!(text, "{}", rest.rsplit('@').next().unwrap_or_default()),
    };
    text
}

/// What this kind of server takes: the table in the documentation of [`open_store`](crate::open_store).
fn capabilities(endpoint: Option<&str>, directory_bucket: bool) -> Capabilities {
    let row = generic();
    match endpoint {
        Some(endpoint) if host(endpoint).ends_with(".r2.cloudflarestorage.com") => {
            Capabilities { equal_parts: true, ..row }
        }
        Some(endpoint) if !is_aws(endpoint) => row,
        _ if directory_bucket => Capabilities { conditional_put: true, ..row },
        // Sparse because parts are sent without checksums of their own: with them AWS wants consecutive numbers.
        _ => Capabilities { sparse: true, conditional_put: true, copy_part: true, ..row },
    }
}

/// What every server that speaks S3 is known to take.
fn generic() -> Capabilities {
    Capabilities {
        parts: Parts::Parallel,
        part_bytes_min: 5 * MIB,
        part_bytes_max: 5 * GIB,
        parts_max: 10_000,
        equal_parts: false,
        sparse: false,
        // Tags differ between attempts where bytes are encrypted by KMS, and Garage lets a cancelled duplicate spoil the
        // part: no kind of server is trusted with that.
        copy_part: false,
        resend_part: false,
        list_parts: true,
        list_uploads: true,
        conditional_put: false,
    }
}

fn is_aws(endpoint: &str) -> bool {
    let host = host(endpoint);
    host.ends_with(".amazonaws.com") || host.ends_with(".amazonaws.com.cn")
}

fn host(endpoint: &str) -> String {
    url::Url::parse(endpoint)
        .ok()
        .and_then(|url| url.host_str().map(str::to_ascii_lowercase))
        .unwrap_or_default()
}

fn check_endpoint(endpoint: &str) -> Result<(), Refusal> {
    let refuse = || {
        Refusal::Invalid("endpoint is http://host:port or https://host, with no more than a path".to_owned())
    };
    let url = url::Url::parse(endpoint).map_err(|_| refuse())?;
    if !url.username().is_empty() || url.password().is_some() {
        return Err(Refusal::Credentials);
    }
    let plain = matches!(url.scheme(), "http" | "https") && url.query().is_none() && url.fragment().is_none();
    if plain && url.has_host() { Ok(()) } else { Err(refuse()) }
}

/// A value that goes into a header.
fn word(key: &str, value: &str) -> Result<String, Refusal> {
    if value.is_empty() || !value.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Err(Refusal::Invalid(format!("{key} is a word without spaces")));
    }
    Ok(value.to_owned())
}

fn looks_secret(key: &str) -> bool {
    let key = key.to_ascii_lowercase();
    ["key", "secret", "token", "password", "credential", "signature"].iter().any(|word| key.contains(word))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(url: &str) -> Result<Address, Refusal> {
        Address::parse(url, None)
    }

    #[test]
    fn a_url_says_all_of_it() {
        let plain = parse("s3://bucket").unwrap();
        assert_eq!((&*plain.bucket, &*plain.prefix, plain.checksum), ("bucket", "", Checksum::Sha256));
        assert_eq!((plain.endpoint, plain.path_style, plain.anonymous), (None, false, false));

        let full = parse(
            "s3://my.bucket/some/pre fix/?endpoint=http://127.0.0.1:9000&region=eu-west-1&sse=aws:kms\
             &kms_key=arn:aws:kms:eu-west-1:1:key/2&storage_class=ONEZONE_IA&sparse=true&equal_parts=true\
             &checksum=md5&anonymous=true&conditional_put=true&copy_part=true&list_uploads=false&part_bytes_min=1",
        )
        .unwrap();
        let expected = Address {
            bucket: "my.bucket".into(),
            prefix: "some/pre fix/".into(),
            endpoint: Some("http://127.0.0.1:9000".into()),
            region: Some("eu-west-1".into()),
            path_style: true,
            anonymous: true,
            sse: Some("aws:kms".into()),
            kms_key: Some("arn:aws:kms:eu-west-1:1:key/2".into()),
            storage_class: Some("ONEZONE_IA".into()),
            checksum: Checksum::Md5,
            capabilities: Capabilities {
                sparse: true,
                equal_parts: true,
                conditional_put: true,
                copy_part: true,
                list_uploads: false,
                part_bytes_min: 1,
                ..generic()
            },
            lists_folders: false,
        };
        assert_eq!(full, expected);
        assert!(!parse("s3://bucket?endpoint=http://host&path_style=false").unwrap().path_style);
    }

    #[test]
    fn the_environment_names_a_server_unless_the_url_does() {
        let from_environment = |url| Address::parse(url, Some("https://env".to_owned())).unwrap().endpoint;
        assert_eq!(from_environment("s3://bucket").unwrap(), "https://env");
        assert_eq!(from_environment("s3://bucket?endpoint=https://url").unwrap(), "https://url");
    }

    #[test]
    fn rows_follow_the_server() {
        let row = |url: &str| parse(url).unwrap().capabilities;
        let aws = row("s3://bucket");
        assert!(aws.sparse && aws.conditional_put && aws.copy_part && !aws.equal_parts && !aws.resend_part);
        assert_eq!(row("s3://bucket?endpoint=https://s3.eu-west-1.amazonaws.com"), aws);
        let express = parse("s3://name--euw1-az1--x-s3").unwrap();
        assert!(!express.capabilities.sparse && !express.capabilities.copy_part && express.lists_folders);
        let r2 = row("s3://bucket?endpoint=https://1234.R2.cloudflarestorage.com");
        assert!(r2.equal_parts && !r2.sparse && !r2.conditional_put);
        let other = row("s3://bucket?endpoint=http://localhost:3900");
        assert!(!other.sparse && !other.equal_parts && !other.conditional_put && other.list_parts);
        // A look-alike is not AWS.
        assert_eq!(row("s3://bucket?endpoint=https://amazonaws.com.example.org"), other);
    }

    #[test]
    fn secrets_are_refused_and_not_repeated() {
        for url in [
            "s3://AKIA:secret@bucket/x",
            "s3://user@bucket",
            "s3://bucket?secret_access_key=secret",
            "s3://bucket?aws_access_key_id=secret",
            "s3://bucket?X-Amz-Security-Token=secret",
            "s3://bucket?endpoint=http://user:secret@host",
        ] {
            assert_eq!(parse(url), Err(Refusal::Credentials), "{url}");
            assert!(!redacted(url).contains("secret"), "{url}");
        }
        assert_eq!(redacted("s3://a:secret@bucket/x/y?z=1"), "s3://bucket/x/y");
    }

    #[test]
    fn other_nonsense_is_refused() {
        for url in [
            "s3://",
            "s3:///x",
            "s3://ab",
            "s3://buc ket",
            "s3://bucket//x",
            "s3://bucket/../x",
            "s3://bucket/a%20b",
            "s3://bucket/x#y",
            "s3://bucket?region=",
            "s3://bucket?region=a b",
            "s3://bucket?path_style=yes",
            "s3://bucket?checksum=crc32c",
            "s3://bucket?sse=none",
            "s3://bucket?kms_key=x",
            "s3://bucket?sparse=true&sparse=false",
            "s3://bucket?part_bytes_min=0",
            "s3://bucket?part_bytes_min=x",
            "s3://bucket?endpoint=ftp://host",
            "s3://bucket?endpoint=host:9000",
            "s3://bucket?endpoint=http://host/?x",
            "s3://bucket?colour=blue",
        ] {
            assert!(matches!(parse(url), Err(Refusal::Invalid(_))), "{url}: {:?}", parse(url));
        }
    }
}
