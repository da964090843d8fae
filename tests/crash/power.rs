//! Power that is lost under SQLite: what of its files is left, then.
//!
//! A killed process leaves its files as the kernel has them; a machine without power leaves what had reached the disk.
//! SQLite with `synchronous = FULL` promises that a commit has, when it returns: its frames are in the write-ahead log,
//! and the log is synced. Later frames may be there, in part, or as garbage. So this models a loss of power at some
//! moment between a look at the log, when everything acknowledged is in it, and the kill: what was appended after the
//! look is cut off at a random byte, or overwritten from there on. The index (`-shm`) is memory, and is gone.
//!
//! Not cut is what a checkpoint may have copied to the database already: SQLite syncs the log before it copies.

use crate::chance::Chance;
use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

const HEADER: u64 = 32;
const FRAME_HEADER: u64 = 24;

/// How far the log reached at some moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Reached {
    /// Names the log; it gets another name when it begins anew.
    salts: [u8; 8],
    /// Bytes from its beginning to the end of its last frame.
    end: u64,
    frame: u64,
}

fn beside(database: &Path, suffix: &str) -> PathBuf {
    PathBuf::from(format!("{}{suffix}", database.display()))
}

/// `None`: there is no log, or it is just beginning.
pub(crate) fn reached(database: &Path) -> Option<Reached> {
    let log = fs::File::open(beside(database, "-wal")).ok()?;
    let mut header = [0; 32];
    log.read_exact_at(&mut header, 0).ok()?;
    let page = u32::from_be_bytes(header[8..12].try_into().ok()?);
    let salts: [u8; 8] = header[16..24].try_into().ok()?;
    let frame = FRAME_HEADER + u64::from(page);
    let mut end = HEADER;
    loop {
        let mut head = [0; 24];
        // Behind the last frame there may be some of an earlier log: those have its salts.
        if log.read_exact_at(&mut head, end).is_err() || head[8..16] != salts {
            return Some(Reached { salts, end, frame });
        }
        end += frame;
    }
}

/// Loses power at some moment since the log had reached so far. False: the log has begun anew meanwhile, and all that
/// can be lost is the index.
pub(crate) fn lose(database: &Path, then: &Reached, chance: &mut Chance) -> bool {
    let index = fs::read(beside(database, "-shm")).unwrap_or_default();
    fs::remove_file(beside(database, "-shm")).expect("the index was there");
    let Some(now) = reached(database) else {
        return false;
    };
    let number = |at: usize| u32::from_ne_bytes(index[at..at + 4].try_into().expect("4 bytes"));
    // The index says how the log is called, and how many of its frames a checkpoint has begun to copy.
    if index.len() < 136 || now.salts != then.salts || index[32..40] != now.salts {
        return false;
    }
    let copied = HEADER + u64::from(number(96).max(number(128))) * now.frame;
    let safe = then.end.max(copied);
    let Some(over) = now.end.checked_sub(safe).filter(|over| *over > 0) else {
        return false;
    };
    let cut = safe + chance.next() % over;
    let log = OpenOptions::new().write(true).open(beside(database, "-wal")).expect("the log");
    match chance.below(3) {
        0 => log.set_len(cut).expect("cut off"),
        garbage => {
            let byte = |chance: &mut Chance| if garbage == 1 { 0 } else { chance.next().to_le_bytes()[0] };
            let bytes: Vec<u8> = (cut..now.end).map(|_| byte(chance)).collect();
            log.write_all_at(&bytes, cut).expect("overwritten");
        }
    }
    true
}
