//! Disk space for erasures and redactions. A deletion must be written to the log before it frees any space, so that a full disk
//! could not be emptied by deleting sessions.

use rustix::fs::{FallocateFlags, fallocate, statvfs};
use std::fs::{self, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

/// The log of an erasure is about as large as the erased text, because deleted pages are overwritten.
const RESERVE_BYTES: u64 = 16 * 1024 * 1024;

/// The reserve is created only if this much remains available, so that the reserve itself never fills the disk.
const MIN_AVAILABLE_BYTES: u64 = 4 * RESERVE_BYTES;

/// A file next to the database that an erasure or a redaction removes if the disk is full.
#[derive(Debug)]
pub(super) struct DiskReserve {
    file: PathBuf,
}

impl DiskReserve {
    /// Creates the reserve of a database file.
    pub(super) fn of(database: &Path) -> Self {
        let mut file = database.as_os_str().to_owned();
        file.push("-reserve");
        let reserve = Self { file: file.into() };
        reserve.fill();
        reserve
    }

    /// Creates the file if there is none, and enough space. A failure only means that erasures need free space.
    pub(super) fn fill(&self) {
        match self.try_fill() {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => tracing::debug!(%error, "failed to reserve disk space for erasures"),
        }
    }

    /// Removes the file. Returns `false` if there was none.
    pub(super) fn release(&self) -> bool {
        fs::remove_file(&self.file).is_ok()
    }

    fn try_fill(&self) -> io::Result<()> {
        let folder = self.file.parent().filter(|folder| !folder.as_os_str().is_empty());
        let disk = statvfs(folder.unwrap_or(Path::new(".")))?;
        if disk.f_bavail.saturating_mul(disk.f_frsize) < MIN_AVAILABLE_BYTES + RESERVE_BYTES {
            return Ok(());
        }
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&self.file)?;
        let reserved = fallocate(&file, FallocateFlags::empty(), 0, RESERVE_BYTES);
        if reserved.is_err() {
            self.release();
        }
        Ok(reserved?)
    }
}
