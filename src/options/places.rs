//! Whether the places that options name go together: each bucket and each directory once, none within another, and no URL or
//! name longer than handles, manifests and stores take. Pure: what a path is in truth is told by the caller.

use std::path::{Path, PathBuf};

use super::{OptionError, Options, must};
use crate::manifest::{BUCKETS_MAX, OTHERS_MAX, SUFFIX_BYTES_MAX};
use crate::piece::{BUCKET_BYTES_MAX, OBJECT_NAME_BYTES_MAX};
use crate::uploader::object_name;

/// Says what cannot work of buckets and directories, before any of them is touched. `buckets` are the URLs of the options in
/// their normal form; `resolve` gives the one path of what several may name.
pub(crate) fn check_places(
    options: &Options,
    buckets: &[String],
    resolve: impl Fn(&Path) -> PathBuf,
) -> Result<(), OptionError> {
    // A manifest names the others.
    let (named, remedy) = (options.directories.len(), format!("at most {OTHERS_MAX} directories"));
    must(named <= OTHERS_MAX, "add_directory", named, &remedy)?;
    let directories: Vec<PathBuf> = options.directories.iter().map(|path| resolve(path)).collect();
    for (at, path) in directories.iter().enumerate() {
        let is_new = !directories[..at].contains(path);
        must(is_new, "add_directory", options.directories[at].display(), "each directory once")?;
    }
    must(buckets.len() <= BUCKETS_MAX, "add_bucket", buckets.len(), "at most 64 buckets")?;
    let folders: Vec<Option<PathBuf>> =
        buckets.iter().map(|url| tidelog_upload::bucket_directory(url).map(|path| resolve(&path))).collect();
    for (at, (url, folder)) in buckets.iter().zip(&folders).enumerate() {
        check_bucket(url)?;
        check_names(options, url, "name_prefix")?;
        let is_known = buckets[..at].contains(url) || folder.is_some() && folders[..at].contains(folder);
        must(!is_known, "add_bucket", url, "each bucket once, however it is spelled")?;
        let Some(folder) = folder else { continue };
        for (directory, path) in options.directories.iter().zip(&directories) {
            let is_apart = !folder.starts_with(path) && !path.starts_with(folder);
            let (directory, option) = (directory.display(), if at == 0 { "bucket" } else { "add_bucket" });
            let remedy = format!(
                "a directory apart from the local directory {directory}, neither in it nor around it"
            );
            must(is_apart, option, url, &remedy)?;
        }
    }
    Ok(())
}

/// Says whether a bucket's URL is longer than handles take.
pub(crate) fn check_bucket(url: &str) -> Result<(), OptionError> {
    // It is not repeated: nobody would read so much.
    let value = format!("a URL of {} bytes", url.len());
    must(url.len() <= BUCKET_BYTES_MAX, "bucket", value, "at most 2048 bytes, which is what handles take")
}

/// Says whether objects might get longer names in a bucket than stores take. `option` is what the prefix is called.
pub(crate) fn check_names(options: &Options, url: &str, option: &'static str) -> Result<(), OptionError> {
    let longest = object_name(options, u64::MAX, 0).len() + SUFFIX_BYTES_MAX;
    // What the URL has of it; a path of directories may be longer.
    let folders = match url.split_once("://") {
        Some(("s3" | "gs" | "az", rest)) => {
            let place = rest.split('?').next().unwrap_or(rest);
            place.split_once('/').map_or(0, |(_, prefix)| prefix.len() + 1)
        }
        _ => 0,
    };
    let remedy = format!(
        "with the prefix of the bucket and what follows, names get at most {} bytes here, and stores take {OBJECT_NAME_BYTES_MAX}: \
         shorten one of them",
        folders + longest
    );
    must(folders + longest <= OBJECT_NAME_BYTES_MAX, option, &options.name_prefix, &remedy)
}

/// The path without links, as far as it is there.
pub(crate) fn resolved(path: &Path) -> PathBuf {
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let known = path.ancestors().find_map(|known| Some((known, known.canonicalize().ok()?)));
    match known {
        Some((known, real)) => {
            // Joined part by part: an empty rest would add a slash.
            let rest = path.strip_prefix(known).unwrap_or(Path::new(""));
            rest.components().fold(real, |real, part| real.join(part))
        }
        None => path,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A machine on which `/link` is a link to `/disk`.
    fn resolve(path: &Path) -> PathBuf {
        path.strip_prefix("/link").map_or(path.to_owned(), |rest| Path::new("/disk").join(rest))
    }

    fn check(options: &Options) -> Result<(), OptionError> {
        check_places(options, &options.buckets, resolve)
    }

    #[test]
    fn places_apart_work() {
        let options =
            Options::new("file:///bucket", "/local").add_bucket("file:///bucket2").add_directory("/bucket3");
        assert_eq!(check(&options), Ok(()));
        assert_eq!(check(&Options::new("s3://bucket/x", "/bucket/x")), Ok(()));
    }

    #[test]
    fn places_that_do_not_go_together_are_named() {
        let options = || Options::new("file:///disk/b", "/disk/d");
        let long = format!("s3://bucket/{}", "x/".repeat(1020));
        for (bad, name) in [
            (options().add_directory("/disk/d"), "add_directory"),
            (options().add_directory("/link/d"), "add_directory"),
            (options().add_bucket("file:///disk/b"), "add_bucket"),
            (options().add_bucket("file:///link/b"), "add_bucket"),
            (options().add_bucket("file:///disk/d"), "add_bucket"),
            (Options::new("file:///disk/d", "/disk/d"), "bucket"),
            (Options::new("file:///disk/d/b", "/disk/d"), "bucket"),
            (Options::new("file:///disk", "/link/d"), "bucket"),
            (Options::new(long, "/disk/d"), "bucket"),
            (Options::new(format!("s3://bucket/{}", "x".repeat(980)), "/d"), "name_prefix"),
            ((0..64).fold(options(), |all, at| all.add_bucket(format!("memory://{at}"))), "add_bucket"),
        ] {
            let error = check(&bad).unwrap_err();
            assert_eq!(error.option, name, "{error}");
        }
    }

    /// The longest prefix and group that options take leave room for what the manifest adds.
    #[test]
    fn the_longest_names_of_options_fit() {
        let prefix = [240, 240, 30].map(|len| "p".repeat(len)).join("/");
        let options =
            Options::new("file:///b", "/d").name_prefix(prefix).group("g".repeat(64)).hash_prefix(true);
        assert_eq!(options.name_prefix.len(), 512);
        assert_eq!((options.check(), check(&options)), (Ok(()), Ok(())));
    }

    #[test]
    fn links_are_followed_as_far_as_there_is_something() {
        let dir = tempfile::tempdir().unwrap();
        let real = dir.path().canonicalize().unwrap();
        std::fs::create_dir(real.join("a")).unwrap();
        std::os::unix::fs::symlink(real.join("a"), real.join("link")).unwrap();
        assert_eq!(resolved(&real.join("link")), real.join("a"));
        assert_eq!(resolved(&real.join("link/b/c")), real.join("a/b/c"));
        assert_eq!(resolved(Path::new("not there")), std::env::current_dir().unwrap().join("not there"));
    }
}
