//! The temporary file that holds an import until it is complete. The file has no name, so it disappears with the process.

use crate::domain::export_format::{ImportedMessage, parse_revision};
use crate::domain::message::Message;
use crate::domain::revision::Revision;
use crate::storage::{RowBatch, RowBatches};
use std::fs::File;
use std::io::{self, BufRead as _, BufReader, BufWriter, Seek as _, Write as _};
use time::OffsetDateTime;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

const BUFFER_BYTES: usize = 256 * 1024;
const MAX_BATCH_ROWS: usize = 500;
/// A batch of one row may be larger.
const MAX_BATCH_BYTES: usize = 1024 * 1024;
/// Number of batches that are read ahead of the store.
const CHANNEL_DEPTH: usize = 2;

/// A temporary file with one line for each row: `m` with seq, tokens, time and JSON, or `r` with JSON. JSON of messages
/// and revisions contains no line feed.
#[derive(Debug)]
pub(super) struct StagingFile {
    file: BufWriter<File>,
}

impl StagingFile {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self { file: BufWriter::with_capacity(BUFFER_BYTES, tempfile::tempfile()?) })
    }

    pub(super) fn write_message(&mut self, row: &ImportedMessage) -> io::Result<()> {
        let micros = row.created_at.map_or(-1, |time| time.unix_timestamp_nanos() / 1000);
        writeln!(self.file, "m {} {} {micros} {}", row.seq, row.tokens, row.message.json())
    }

    pub(super) fn write_revision(&mut self, row: &Revision) -> io::Result<()> {
        writeln!(self.file, "r {}", serde_json::to_string(row)?)
    }

    /// Reads the rows in batches, as fast as the receiver takes them. `progress` receives the number of messages sent.
    pub(super) fn into_batches(
        self,
        progress: impl Fn(i64) + Send + 'static,
    ) -> (RowBatches, JoinHandle<io::Result<()>>) {
        let (sender, batches) = mpsc::channel(CHANNEL_DEPTH);
        let reading = tokio::task::spawn_blocking(move || {
            let mut file = self.file.into_inner().map_err(io::IntoInnerError::into_error)?;
            file.rewind()?;
            send_batches(BufReader::with_capacity(BUFFER_BYTES, file), &sender, progress)
        });
        (batches, reading)
    }
}

/// Sends all rows. Returns early if the receiver is dropped.
fn send_batches(
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
        let message = row.strip_prefix("m ");
        let is_full = messages.len() + revisions.len() >= MAX_BATCH_ROWS || bytes + read > MAX_BATCH_BYTES;
        if read == 0 || is_full || (message.is_none() && !messages.is_empty()) {
            let last_seq = messages.last().map(|row: &ImportedMessage| row.seq);
            let batch = match (messages.is_empty(), revisions.is_empty()) {
                (false, _) => Some(RowBatch::Messages(std::mem::take(&mut messages))),
                (true, false) => Some(RowBatch::Revisions(std::mem::take(&mut revisions))),
                (true, true) => None,
            };
            bytes = 0;
            if batch.is_some_and(|batch| sender.blocking_send(batch).is_err()) {
                return Ok(());
            }
            last_seq.into_iter().for_each(&progress);
        }
        if read == 0 {
            return Ok(());
        }
        bytes += read;
        if let Some(message) = message {
            messages.push(parse_message(message).ok_or_else(corrupt_file)?);
        } else {
            let json = row.strip_prefix("r ").ok_or_else(corrupt_file)?;
            revisions.push(parse_revision(json).map_err(|_| corrupt_file())?);
        }
    }
}

fn parse_message(row: &str) -> Option<ImportedMessage> {
    let mut fields = row.splitn(4, ' ');
    let seq = fields.next()?.parse().ok()?;
    let tokens = fields.next()?.parse().ok()?;
    let micros: i128 = fields.next()?.parse().ok()?;
    let created_at = match micros {
        -1 => None,
        micros => Some(OffsetDateTime::from_unix_timestamp_nanos(micros * 1000).ok()?),
    };
    let message = Message::from_stored(fields.next()?.to_owned()).ok()?;
    Some(ImportedMessage { seq, created_at, message, tokens })
}

fn corrupt_file() -> io::Error {
    io::Error::other("the staging file of an import is corrupt")
}
