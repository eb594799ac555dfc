//! A local directory: its lock, its files by name, and its manifest.
//!
//! Owns what makes a name durable and what keeps two openers apart. The data path of blocks is in [`crate::disk`]; what
//! the manifest's records mean is the caller's.
#![forbid(unsafe_code)]

mod manifest;

use std::fs::{self, File, OpenOptions};
use std::hash::{BuildHasher, RandomState};
use std::io::{self, Read, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use rustix::fs::{FallocateFlags, FlockOperation, OFlags, fallocate, flock, fstatvfs};
use rustix::io::Errno;
use rustix::process::geteuid;

use crate::aligned::{AlignedBuf, BLOCK_ALIGNMENT_BYTES};
use crate::disk::{Files, check_file_name};
pub use manifest::{MANIFEST_NAME, Manifest, ManifestContent, ManifestError, RESERVE_NAME};

/// The file that is locked. It is not among the files that [`Files::list`] names.
const LOCK_NAME: &str = "LOCK";

/// End of the names of files that are not complete. What a crash leaves of them is removed at open.
const UNFINISHED_SUFFIX: &str = ".tidelog-unfinished";

/// How much one write of zeros takes, in bytes.
const ZEROS_BYTES: usize = 2 << 20;

/// Why a directory cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DirectoryError {
    /// Another opener, perhaps in this process, has it.
    #[error(
        "{path} is in use by process {}: stop that process or choose another directory",
        pid.map_or("(unknown)".to_string(), |pid| pid.to_string())
    )]
    Locked {
        /// The directory.
        path: PathBuf,
        /// Who wrote the lock file last.
        pid: Option<u32>,
    },
    /// The path leads to something else.
    #[error("{path} is not a directory: choose another path or remove what is there")]
    NotADirectory {
        /// The path.
        path: PathBuf,
    },
    /// This process lacks a permission.
    #[error("{path} may not be read and written by this process: grant it read, write and search permission")]
    Unreadable {
        /// The directory.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// This process is a child, by fork, of the one that opened it.
    #[error(
        "{path} was opened by process {opener}, of which this one is a fork: open a directory of its own after the fork"
    )]
    Forked {
        /// The directory.
        path: PathBuf,
        /// Who opened it.
        opener: u32,
    },
    /// Anything else that the file system says.
    #[error("{path}: cannot {action}: {source}")]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// What was to be done.
        action: &'static str,
        /// What the system said.
        source: io::Error,
    },
}

/// A directory that this process, and no other, has open.
///
/// ```
/// use tidelog_io::directory::{Directory, DirectoryError};
/// # let home = tempfile::tempdir().unwrap();
/// let path = home.path().join("changes");
/// let directory = Directory::open(&path)?;
/// assert!(matches!(Directory::open(&path), Err(DirectoryError::Locked { .. })));
/// drop(directory);
/// Directory::open(&path)?;
/// # Ok::<(), DirectoryError>(())
/// ```
#[derive(Debug)]
pub struct Directory {
    path: PathBuf,
    lock: File,
    pid: u32,
    token: u64,
    files: Arc<RealFiles>,
}

impl Directory {
    /// Opens a directory, made if it is missing, and locks it until it is dropped or the process ends.
    ///
    /// # Errors
    /// See [`DirectoryError`]; nothing is changed then, except that a missing directory may have been made.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, DirectoryError> {
        let path = path.as_ref().to_path_buf();
        make_directory(&path)?;
        fs::read_dir(&path).map_err(|error| DirectoryError::of(&path, "list it", error))?;
        let lock_path = path.join(LOCK_NAME);
        let mut lock = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&lock_path)
            .map_err(|error| DirectoryError::of(&lock_path, "open it", error))?;
        match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) => return Err(DirectoryError::Locked { pid: read_pid(&mut lock), path }),
            Err(error) => return Err(DirectoryError::of(&lock_path, "lock it", error.into())),
        }
        let pid = std::process::id();
        let token = RandomState::new().hash_one((pid, std::time::SystemTime::now()));
        // Shorter than what may be there, never longer than it for a moment: a second opener reads it at any time.
        let owner = format!("{pid} {token:016x}\n");
        lock.write_all_at(owner.as_bytes(), 0)
            .and_then(|()| lock.set_len(owner.len() as u64))
            .map_err(|error| DirectoryError::of(&lock_path, "write to it", error))?;
        let files = RealFiles::open(&path).map_err(|error| DirectoryError::of(&path, "open it", error))?;
        files
            .remove_unfinished()
            .map_err(|error| DirectoryError::of(&path, "remove unfinished files", error))?;
        Ok(Self { path, lock, pid, token, files: Arc::new(files) })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A random number that tells this use of the directory from others; it is in the lock file.
    pub fn token(&self) -> u64 {
        self.token
    }

    /// Its files.
    pub fn files(&self) -> Arc<RealFiles> {
        self.files.clone()
    }

    /// Whether this process is the one that opened it. A child by fork inherits the lock, but must not use it.
    ///
    /// # Errors
    /// [`DirectoryError::Forked`].
    pub fn check_owner(&self) -> Result<(), DirectoryError> {
        if std::process::id() == self.pid {
            return Ok(());
        }
        Err(DirectoryError::Forked { path: self.path.clone(), opener: self.pid })
    }
}

impl Drop for Directory {
    /// Unlocks, also when a child has inherited the descriptor; a child itself leaves the lock alone.
    fn drop(&mut self) {
        if self.check_owner().is_ok() {
            let _ = flock(&self.lock, FlockOperation::Unlock);
        }
    }
}

impl DirectoryError {
    fn of(path: &Path, action: &'static str, source: io::Error) -> Self {
        let path = path.to_path_buf();
        match source.kind() {
            io::ErrorKind::PermissionDenied => Self::Unreadable { path, source },
            io::ErrorKind::NotADirectory => Self::NotADirectory { path },
            _ => Self::Io { path, action, source },
        }
    }
}

/// The files of a real directory. Does not lock it: [`Directory`] does.
#[derive(Debug)]
pub struct RealFiles {
    path: PathBuf,
    directory: File,
    /// What new segments are filled with, made for the first one.
    zeros: OnceLock<AlignedBuf>,
}

/// What the file system said about which file.
#[derive(Debug, thiserror::Error)]
#[error("{path}: cannot {action}: {source}")]
struct FileError {
    path: PathBuf,
    action: &'static str,
    source: io::Error,
}

impl RealFiles {
    /// Opens an existing directory.
    ///
    /// # Errors
    /// Whatever the file system says.
    pub fn open(path: impl AsRef<Path>) -> io::Result<Self> {
        let path = path.as_ref().to_path_buf();
        let directory = File::open(&path)?;
        Ok(Self { path, directory, zeros: OnceLock::new() })
    }

    fn remove_unfinished(&self) -> io::Result<()> {
        for entry in fs::read_dir(&self.path)? {
            let entry = entry?;
            if entry.file_name().to_str().is_some_and(|name| name.ends_with(UNFINISHED_SUFFIX)) {
                fs::remove_file(entry.path())?;
            }
        }
        Ok(())
    }

    fn file(&self, name: &str) -> io::Result<PathBuf> {
        check_file_name(name)?;
        if name == LOCK_NAME || name.ends_with(UNFINISHED_SUFFIX) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("{name:?} is a name that the directory keeps for itself; give another"),
            ));
        }
        Ok(self.path.join(name))
    }

    /// Lets `write` fill a file under another name and then gives it its own, all durably. Leaves nothing after an
    /// error before the renaming.
    fn put(&self, path: &Path, write: impl FnOnce(&Path) -> io::Result<()>) -> io::Result<()> {
        let mut unfinished = path.as_os_str().to_owned();
        unfinished.push(UNFINISHED_SUFFIX);
        let unfinished = PathBuf::from(unfinished);
        let put = write(&unfinished).and_then(|()| {
            fs::rename(&unfinished, path).map_err(|error| in_file(path, "rename to it", error))
        });
        if let Err(error) = put {
            let _ = fs::remove_file(&unfinished);
            return Err(error);
        }
        self.sync_names()
    }

    fn zeros(&self) -> io::Result<&[u8]> {
        if let Some(zeros) = self.zeros.get() {
            return Ok(zeros);
        }
        let zeros = AlignedBuf::alone(ZEROS_BYTES)?;
        Ok(self.zeros.get_or_init(|| zeros))
    }

    fn sync_names(&self) -> io::Result<()> {
        self.directory.sync_all().map_err(|error| in_file(&self.path, "sync it", error))
    }
}

fn append_to(path: &Path, bytes: &[u8]) -> io::Result<File> {
    let mut file = OpenOptions::new().append(true).open(path)?;
    file.write_all(bytes)?;
    Ok(file)
}

impl Files for RealFiles {
    fn list(&self) -> io::Result<Vec<(String, u64)>> {
        let listing = || -> io::Result<Vec<(String, u64)>> {
            let mut files = Vec::new();
            for entry in fs::read_dir(&self.path)? {
                let entry = entry?;
                // A name that is not UTF-8 is none of ours.
                let Ok(name) = entry.file_name().into_string() else { continue };
                let metadata = entry.metadata()?;
                if metadata.is_file() && name != LOCK_NAME && !name.ends_with(UNFINISHED_SUFFIX) {
                    files.push((name, metadata.len()));
                }
            }
            files.sort_unstable();
            Ok(files)
        };
        listing().map_err(|error| in_file(&self.path, "list it", error))
    }

    fn create(&self, name: &str, len: u64) -> io::Result<()> {
        let path = self.file(name)?;
        // The lock keeps others from making it meanwhile.
        if fs::symlink_metadata(&path).is_ok() {
            return Err(in_file(&path, "create it", io::ErrorKind::AlreadyExists.into()));
        }
        self.put(&path, |unfinished| {
            let filled = self.zeros().and_then(|zeros| write_zeros(unfinished, len, zeros));
            filled.map_err(|error| in_file(&path, "fill it with zeros", error))
        })
    }

    fn read_at(&self, name: &str, offset: u64, buffer: &mut [u8]) -> io::Result<usize> {
        let path = self.file(name)?;
        let mut read = read_direct(&path, offset, buffer);
        if read > 0 && read == buffer.len() {
            return Ok(read);
        }
        let file = File::open(&path).map_err(|error| in_file(&path, "open it", error))?;
        while read < buffer.len() {
            match file.read_at(&mut buffer[read..], offset.saturating_add(read as u64)) {
                Ok(0) => break,
                Ok(more) => read += more,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(in_file(&path, "read it", error)),
            }
        }
        Ok(read)
    }

    fn append(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        let path = self.file(name)?;
        let append = || append_to(&path, bytes)?.sync_data();
        append().map_err(|error| in_file(&path, "append to it", error))
    }

    fn append_unsynced(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        let path = self.file(name)?;
        append_to(&path, bytes).map_err(|error| in_file(&path, "append to it", error))?;
        Ok(())
    }

    fn replace(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        let path = self.file(name)?;
        self.put(&path, |unfinished| {
            let write = || -> io::Result<()> {
                let mut file = File::create(unfinished)?;
                file.write_all(bytes)?;
                file.sync_all()
            };
            write().map_err(|error| in_file(&path, "write its successor", error))
        })
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        let path = self.file(name)?;
        fs::remove_file(&path).map_err(|error| in_file(&path, "remove it", error))?;
        self.sync_names()
    }

    fn free_bytes(&self) -> io::Result<u64> {
        let stat = fstatvfs(&self.directory)
            .map_err(|error| in_file(&self.path, "look for free space in it", error.into()))?;
        // Some of what is free may be kept for the superuser. File systems without a size of their own say 0.
        let free = if geteuid().is_root() { stat.f_bfree } else { stat.f_bavail };
        Ok(if stat.f_blocks == 0 { u64::MAX } else { free.saturating_mul(stat.f_frsize) })
    }
}

/// Keeps the kind, which callers decide by, and names the file.
fn in_file(path: &Path, action: &'static str, source: io::Error) -> io::Error {
    io::Error::new(source.kind(), FileError { path: path.to_path_buf(), action, source })
}

/// Reads past the page cache as far as alignment, file system and file allow; how many bytes it read. What is read once
/// costs a copy less that way.
fn read_direct(path: &Path, offset: u64, buffer: &mut [u8]) -> usize {
    let aligned = |number: usize| number.is_multiple_of(BLOCK_ALIGNMENT_BYTES);
    let start = buffer.as_ptr().addr();
    if !(aligned(start) && aligned(buffer.len()) && offset.is_multiple_of(BLOCK_ALIGNMENT_BYTES as u64)) {
        return 0;
    }
    let direct = OFlags::DIRECT.bits() as i32;
    let Ok(file) = OpenOptions::new().read(true).custom_flags(direct).open(path) else { return 0 };
    let mut read = 0;
    // Any trouble is met, or told, by a read through the page cache.
    while aligned(read)
        && read < buffer.len()
        && let Ok(more @ 1..) = file.read_at(&mut buffer[read..], offset.saturating_add(read as u64))
    {
        read += more;
    }
    read
}

/// Makes a new file whose blocks are all allocated and written, so that later writes change no metadata.
fn write_zeros(path: &Path, len: u64, zeros: &[u8]) -> io::Result<()> {
    let open = |flags: OFlags| {
        let flags = flags.bits() as i32;
        OpenOptions::new().write(true).create(true).truncate(true).custom_flags(flags).open(path)
    };
    // Direct writes keep a segment's worth of zeros out of the page cache. Not every file system takes them, and some
    // say so only at the first write.
    let direct = if len.is_multiple_of(4096) { open(OFlags::DIRECT).ok() } else { None };
    if let Some(file) = direct {
        match fill(&file, len, zeros) {
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => {}
            result => return result,
        }
    }
    fill(&open(OFlags::empty())?, len, zeros)
}

fn fill(file: &File, len: u64, zeros: &[u8]) -> io::Result<()> {
    // Says early, before anything is written, that there is no space.
    match fallocate(file, FallocateFlags::empty(), 0, len) {
        Ok(()) | Err(Errno::OPNOTSUPP | Errno::NOSYS) => {}
        Err(_) if len == 0 => {}
        Err(error) => return Err(error.into()),
    }
    let mut offset = 0;
    while offset < len {
        let step = zeros.len().min(usize::try_from(len - offset).unwrap_or(usize::MAX));
        file.write_all_at(&zeros[..step], offset)?;
        offset += step as u64;
    }
    file.sync_all()
}

/// Makes a directory and those above it, as far as they are missing, and makes their names durable.
fn make_directory(path: &Path) -> Result<(), DirectoryError> {
    match fs::metadata(path) {
        Ok(metadata) if metadata.is_dir() => return Ok(()),
        Ok(_) => return Err(DirectoryError::NotADirectory { path: path.to_path_buf() }),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(DirectoryError::of(path, "look at it", error)),
    }
    let parent = match path.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    };
    make_directory(parent)?;
    match fs::create_dir(path) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            return Err(DirectoryError::of(path, "create it", error));
        }
        _ => {}
    }
    File::open(parent)
        .and_then(|parent| parent.sync_all())
        .map_err(|error| DirectoryError::of(parent, "sync it", error))
}

/// Whether somebody has a directory open. Changes nothing; who opens it at this very moment may be refused.
///
/// # Errors
/// Whatever the file system says.
pub fn is_locked(path: impl AsRef<Path>) -> io::Result<bool> {
    let lock = match File::open(path.as_ref().join(LOCK_NAME)) {
        Ok(lock) => lock,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        Err(error) => return Err(error),
    };
    match flock(&lock, FlockOperation::NonBlockingLockShared) {
        Ok(()) => Ok(false),
        Err(Errno::WOULDBLOCK) => Ok(true),
        Err(error) => Err(error.into()),
    }
}

fn read_pid(lock: &mut File) -> Option<u32> {
    let mut owner = String::new();
    lock.take(64).read_to_string(&mut owner).ok()?;
    owner.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn home() -> (tempfile::TempDir, Directory) {
        let home = tempfile::tempdir().unwrap();
        let directory = Directory::open(home.path().join("a/b")).unwrap();
        (home, directory)
    }

    #[test]
    fn second_opener_is_told_who_has_it() {
        let (_home, directory) = home();
        match Directory::open(directory.path()) {
            Err(DirectoryError::Locked { path, pid }) => {
                assert_eq!(path, directory.path());
                assert_eq!(pid, Some(std::process::id()));
            }
            other => panic!("{other:?}"),
        }
        let path = directory.path().to_path_buf();
        assert!(is_locked(&path).unwrap());
        drop(directory);
        assert!(!is_locked(&path).unwrap() && !is_locked(path.join("none")).unwrap());
        Directory::open(path).unwrap();
    }

    #[test]
    fn lock_outlives_no_clone_of_its_descriptor() {
        let (_home, directory) = home();
        let inherited = directory.lock.try_clone().unwrap();
        let path = directory.path().to_path_buf();
        drop(directory);
        Directory::open(path).unwrap();
        drop(inherited);
    }

    #[test]
    fn forked_child_is_refused_and_leaves_the_lock() {
        let (_home, mut directory) = home();
        let path = directory.path().to_path_buf();
        let held = directory.lock.try_clone().unwrap();
        directory.pid += 1;
        assert!(matches!(directory.check_owner(), Err(DirectoryError::Forked { .. })));
        drop(directory);
        assert!(matches!(Directory::open(&path), Err(DirectoryError::Locked { .. })));
        drop(held);
        Directory::open(&path).unwrap().check_owner().unwrap();
    }

    #[test]
    fn file_in_the_way_is_named() {
        let home = tempfile::tempdir().unwrap();
        let file = home.path().join("file");
        fs::write(&file, b"x").unwrap();
        for path in [file.clone(), file.join("below")] {
            let error = Directory::open(&path).unwrap_err();
            assert!(matches!(&error, DirectoryError::NotADirectory { .. }), "{error:?}");
            assert!(error.to_string().contains("file"));
        }
        assert_eq!(fs::read(&file).unwrap(), b"x");
    }

    #[test]
    fn created_file_is_all_zeros_and_allocated() {
        use std::os::unix::fs::MetadataExt;
        let (_home, directory) = home();
        let files = directory.files();
        for len in [0, 5, 4096, (ZEROS_BYTES + 8192) as u64] {
            let name = format!("zeros-{len}");
            files.create(&name, len).unwrap();
            let content = fs::read(directory.path().join(&name)).unwrap();
            assert_eq!(content.len() as u64, len);
            assert!(content.iter().all(|byte| *byte == 0));
            let metadata = fs::metadata(directory.path().join(&name)).unwrap();
            assert!(metadata.blocks() * 512 >= len);
            assert_eq!(files.create(&name, 1).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
            assert_eq!(fs::metadata(directory.path().join(&name)).unwrap().len(), len);
        }
    }

    #[test]
    fn failed_create_leaves_nothing() {
        let (_home, directory) = home();
        // Longer than any file may be.
        let error = directory.files().create("huge", i64::MAX as u64 & !4095).unwrap_err();
        assert!(error.to_string().contains("huge"), "{error}");
        let left: Vec<_> =
            fs::read_dir(directory.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(left, [LOCK_NAME]);
    }

    #[test]
    fn files_do_what_the_seam_says() {
        let (_home, directory) = home();
        let files = directory.files();
        assert_eq!(files.append("log", b"x").unwrap_err().kind(), io::ErrorKind::NotFound);
        files.replace("log", b"one").unwrap();
        files.append("log", b" t").unwrap();
        files.append_unsynced("log", b"wo").unwrap();
        assert_eq!(files.append_unsynced("none", b"x").unwrap_err().kind(), io::ErrorKind::NotFound);
        let mut buffer = [0; 16];
        assert_eq!(files.read_at("log", 2, &mut buffer).unwrap(), 5);
        assert_eq!(&buffer[..5], b"e two");
        assert_eq!(files.read_at("log", 100, &mut buffer).unwrap(), 0);
        files.replace("log", b"three").unwrap();
        files.create("another", 10).unwrap();
        assert_eq!(files.list().unwrap(), [("another".to_string(), 10), ("log".to_string(), 5)]);
        files.remove("log").unwrap();
        assert_eq!(files.remove("log").unwrap_err().kind(), io::ErrorKind::NotFound);
        for name in ["", ".", "..", "a/b", "/etc/passwd", LOCK_NAME, "x.tidelog-unfinished"] {
            assert_eq!(files.replace(name, b"").unwrap_err().kind(), io::ErrorKind::InvalidInput, "{name}");
        }
    }

    #[test]
    fn aligned_reads_past_the_page_cache_give_the_same_bytes() {
        let dir = tempfile::tempdir().unwrap();
        let directory = Directory::open(dir.path()).unwrap();
        let files = directory.files();
        let content: Vec<u8> = (0..10_000_u32).map(|at| (at / 3) as u8).collect();
        // Not on the disk yet, as far as the kernel is concerned.
        fs::write(dir.path().join("log"), &content).unwrap();
        let mut buffer = AlignedBuf::alone(8192).unwrap();
        for (offset, len) in
            [(0, 4096), (0, 8192), (4096, 4096), (4096, 8192), (8192, 4096), (4000, 4096), (12288, 4096)]
        {
            buffer.fill(0xee);
            let wanted = &content[content.len().min(offset)..content.len().min(offset + len)];
            let read = files.read_at("log", offset as u64, &mut buffer[..len]).unwrap();
            assert_eq!(&buffer[..read], wanted, "{len} bytes at {offset}");
        }
        assert_eq!(files.read_at("none", 0, &mut buffer).unwrap_err().kind(), io::ErrorKind::NotFound);
        assert_eq!(files.read_at("none", 0, &mut buffer[..0]).unwrap_err().kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn unfinished_files_are_removed_at_open() {
        let (_home, directory) = home();
        let path = directory.path().to_path_buf();
        drop(directory);
        fs::write(path.join("segment-00000001.tidelog-unfinished"), b"half").unwrap();
        fs::write(path.join("foreign.tmp"), b"stays").unwrap();
        let directory = Directory::open(&path).unwrap();
        assert_eq!(directory.files().list().unwrap(), [("foreign.tmp".to_string(), 5)]);
        assert!(!path.join("segment-00000001.tidelog-unfinished").exists());
    }
}
