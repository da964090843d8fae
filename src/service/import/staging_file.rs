//! What an import has sent so far, in a temporary file that has no name: it is gone with the process, whatever ends it.

use crate::domain::export_format::{ImportedMessage, read_revision, write_revision};
use crate::domain::message::Message;
use crate::domain::revision::Revision;
use crate::storage::{RowBatch, RowBatches};
use std::fs::File;
use std::io::{self, BufRead as _, BufReader, BufWriter, Seek as _, Write as _};
use time::OffsetDateTime;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

/// Rows of a batch, at most.
const ROWS: usize = 500;
/// Bytes of a batch, at most; but one row may have more.
const BYTES: usize = 1024 * 1024;
/// RowBatches that wait for the store.
const AHEAD: usize = 2;

/// One line for each row: its kind, what is not in the JSON, and the JSON, which has no line feed in it.
#[derive(Debug)]
pub(super) struct StagingFile {
    file: BufWriter<File>,
}

impl StagingFile {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self { file: BufWriter::with_capacity(256 * 1024, tempfile::tempfile()?) })
    }

    pub(super) fn message(&mut self, row: &ImportedMessage) -> io::Result<()> {
        let at = row.created_at.map_or(-1, |at| at.unix_timestamp_nanos() / 1000);
        writeln!(self.file, "m {} {} {at} {}", row.seq, row.tokens, row.message.json())
    }

    pub(super) fn revision(&mut self, row: &Revision) -> io::Result<()> {
        writeln!(self.file, "r {}", write_revision(row)?)
    }

    /// Its rows, read as they are taken. `progress` gets the messages read so far.
    pub(super) fn read(
        self,
        progress: impl Fn(i64) + Send + 'static,
    ) -> (RowBatches, JoinHandle<io::Result<()>>) {
        let (sender, batches) = mpsc::channel(AHEAD);
        let reading = tokio::task::spawn_blocking(move || {
            let mut file = self.file.into_inner().map_err(io::IntoInnerError::into_error)?;
            file.rewind()?;
            send(BufReader::with_capacity(256 * 1024, file), &sender, progress)
        });
        (batches, reading)
    }
}

/// Returns early where nobody takes the batches any more.
fn send(
    mut file: BufReader<File>,
    sender: &mpsc::Sender<RowBatch>,
    progress: impl Fn(i64),
) -> io::Result<()> {
    let (mut messages, mut revisions, mut bytes) = (Vec::new(), Vec::new(), 0);
    let mut line = String::new();
    loop {
        line.clear();
        let read = file.read_line(&mut line)?;
        let row = line.trim_end_matches('\n');
        let of_messages = row.starts_with("m ");
        let full = messages.len() + revisions.len() >= ROWS || bytes + read > BYTES;
        if read == 0 || full || (!of_messages && !messages.is_empty()) {
            let (messages, revisions) = (std::mem::take(&mut messages), std::mem::take(&mut revisions));
            bytes = 0;
            let last = messages.last().map(|row: &ImportedMessage| row.seq);
            let batches = [RowBatch::Messages(messages), RowBatch::Revisions(revisions)];
            for batch in batches.into_iter().filter(|batch| !is_empty(batch)) {
                if sender.blocking_send(batch).is_err() {
                    return Ok(());
                }
            }
            last.into_iter().for_each(&progress);
        }
        if read == 0 {
            return Ok(());
        }
        bytes += read;
        if of_messages {
            messages.push(message(row).ok_or_else(spoiled)?);
        } else {
            let json = row.strip_prefix("r ").ok_or_else(spoiled)?;
            revisions.push(read_revision(json).map_err(|_| spoiled())?);
        }
    }
}

fn is_empty(batch: &RowBatch) -> bool {
    match batch {
        RowBatch::Messages(rows) => rows.is_empty(),
        RowBatch::Revisions(rows) => rows.is_empty(),
    }
}

fn message(row: &str) -> Option<ImportedMessage> {
    let mut parts = row.splitn(5, ' ').skip(1);
    let seq = parts.next()?.parse().ok()?;
    let tokens = parts.next()?.parse().ok()?;
    let micros: i128 = parts.next()?.parse().ok()?;
    let created_at = match micros {
        -1 => None,
        micros => Some(OffsetDateTime::from_unix_timestamp_nanos(micros * 1000).ok()?),
    };
    let message = Message::from_stored(parts.next()?.to_owned()).ok()?;
    Some(ImportedMessage { seq, created_at, message, tokens })
}

fn spoiled() -> io::Error {
    io::Error::other("a temporary file is not what was written")
}
