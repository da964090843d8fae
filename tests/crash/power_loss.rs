//! Simulates a loss of power for the files of SQLite.
//!
//! A killed process leaves its files as the kernel has them. A machine without power leaves only the bytes that had
//! reached the disk. With `synchronous = FULL`, SQLite syncs the frames of a commit in the write-ahead log before the
//! commit returns. Later frames may be missing, incomplete or garbage. The simulation therefore truncates or overwrites
//! the log at a random byte after the extent that contained all acknowledged commits. The index (`-shm`) is memory, and
//! is removed.
//!
//! Frames that a checkpoint may have copied to the database are kept, because SQLite syncs the log before it copies.

use fastrand::Rng;
use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

const HEADER_BYTES: u64 = 32;
const FRAME_HEADER_BYTES: u64 = 24;

/// The extent of a write-ahead log at some time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct WalExtent {
    /// Identifies the log. SQLite chooses new salts when it restarts the log.
    salts: [u8; 8],
    /// The position after the last frame.
    end: u64,
    frame_bytes: u64,
}

fn with_suffix(database: &Path, suffix: &str) -> PathBuf {
    PathBuf::from(format!("{}{suffix}", database.display()))
}

/// Returns `None` if there is no log, or no complete header.
pub(crate) fn wal_extent(database: &Path) -> Option<WalExtent> {
    let log = fs::File::open(with_suffix(database, "-wal")).ok()?;
    let mut header = [0; 32];
    log.read_exact_at(&mut header, 0).ok()?;
    let page_bytes = u32::from_be_bytes(header[8..12].try_into().ok()?);
    let salts: [u8; 8] = header[16..24].try_into().ok()?;
    let frame_bytes = FRAME_HEADER_BYTES + u64::from(page_bytes);
    let mut end = HEADER_BYTES;
    loop {
        let mut frame_header = [0; 24];
        // Frames of an earlier log may follow the last frame. They have other salts.
        if log.read_exact_at(&mut frame_header, end).is_err() || frame_header[8..16] != salts {
            return Some(WalExtent { salts, end, frame_bytes });
        }
        end += frame_bytes;
    }
}

/// Damages the log after `synced`. Returns `false` if the log was restarted since then or has not grown, so that only
/// the index is lost.
pub(crate) fn lose_power(database: &Path, synced: &WalExtent, rng: &mut Rng) -> bool {
    let index = fs::read(with_suffix(database, "-shm")).unwrap_or_default();
    fs::remove_file(with_suffix(database, "-shm")).expect("the index exists");
    let Some(now) = wal_extent(database) else {
        return false;
    };
    // The index contains the salts of its log, and the numbers of frames that a checkpoint has copied or may be copying.
    if index.len() < 136 || now.salts != synced.salts || index[32..40] != now.salts {
        return false;
    }
    let number = |at: usize| u32::from_ne_bytes(index[at..at + 4].try_into().expect("4 bytes"));
    let copied = HEADER_BYTES + u64::from(number(96).max(number(128))) * now.frame_bytes;
    let kept = synced.end.max(copied);
    if kept >= now.end {
        return false;
    }
    let cut = rng.u64(kept..now.end);
    let log = OpenOptions::new().write(true).open(with_suffix(database, "-wal")).expect("the log");
    match rng.usize(..3) {
        0 => log.set_len(cut).expect("truncated"),
        1 => log
            .write_all_at(&vec![0; usize::try_from(now.end - cut).expect("small")], cut)
            .expect("overwritten"),
        _ => {
            let garbage: Vec<u8> = (cut..now.end).map(|_| rng.u8(..)).collect();
            log.write_all_at(&garbage, cut).expect("overwritten");
        }
    }
    true
}
