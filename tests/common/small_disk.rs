//! A small file system of a test's own.

use std::path::Path;
use std::process::Command;

/// Says so and gives nothing to who is not root.
pub struct SmallDisk(tempfile::TempDir);

impl SmallDisk {
    pub fn mount(mib: usize) -> Option<SmallDisk> {
        let dir = tempfile::tempdir().unwrap();
        let size = format!("size={mib}m");
        let mounted =
            Command::new("mount").args(["-t", "tmpfs", "-o", &size, "tmpfs"]).arg(dir.path()).output();
        match mounted {
            Ok(output) if output.status.success() => Some(SmallDisk(dir)),
            other => {
                eprintln!("skipped: a small file system cannot be mounted here ({other:?})");
                None
            }
        }
    }

    pub fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.path()).status();
    }
}
