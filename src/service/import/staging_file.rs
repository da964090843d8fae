//! The temporary file that holds an import until it is complete. The file has no name, so it disappears with the process.

use crate::domain::exchange::MessageFacts;
use crate::domain::export_format::{ImportRow, ImportedMessage, parse_revision};
use crate::domain::format;
use crate::storage::{RowBatch, RowBatches};
use serde_json::value::RawValue;
use std::fs::File;
use std::io::{self, BufRead as _, BufReader, BufWriter, Seek as _, Write as _};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

const BUFFER_BYTES: usize = 256 * 1024;
const MAX_BATCH_ROWS: usize = 500;
/// A batch of one row may be larger.
const MAX_BATCH_BYTES: usize = 1024 * 1024;
/// Number of batches that are read ahead of the store.
const CHANNEL_DEPTH: usize = 2;

/// A temporary file with one line for each row: `m` with a list of seq, tokens, facts and message, or `r` with a revision. Their
/// JSON contains no line feed.
#[derive(Debug)]
pub(super) struct StagingFile {
    file: BufWriter<File>,
}

impl StagingFile {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self { file: BufWriter::with_capacity(BUFFER_BYTES, tempfile::tempfile()?) })
    }

    pub(super) fn write(&mut self, row: &ImportRow) -> io::Result<()> {
        match row {
            ImportRow::Message(row) => {
                let ImportedMessage { seq, facts, message, tokens } = &**row;
                let facts = serde_json::to_string(facts)?;
                writeln!(self.file, "m [{seq},{tokens},{facts},{}]", message.json())
            }
            ImportRow::Revision(revision) => writeln!(self.file, "r {}", serde_json::to_string(revision)?),
        }
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
    let (mut batch, mut bytes, mut line) = (RowBatch::default(), 0, String::new());
    loop {
        line.clear();
        let read = file.read_line(&mut line)?;
        let rows = batch.messages.len() + batch.revisions.len();
        if read == 0 || rows >= MAX_BATCH_ROWS || bytes + read > MAX_BATCH_BYTES {
            let last_seq = batch.messages.last().map(|row| row.seq);
            if rows > 0 && sender.blocking_send(std::mem::take(&mut batch)).is_err() {
                return Ok(());
            }
            last_seq.into_iter().for_each(&progress);
            bytes = 0;
        }
        if read == 0 {
            return Ok(());
        }
        bytes += read;
        let row = line.trim_end_matches('\n');
        if let Some(message) = row.strip_prefix("m ") {
            batch.messages.push(parse_message(message).ok_or_else(corrupt_file)?);
        } else {
            let json = row.strip_prefix("r ").ok_or_else(corrupt_file)?;
            batch.revisions.push(parse_revision(json).map_err(|_| corrupt_file())?);
        }
    }
}

fn parse_message(row: &str) -> Option<ImportedMessage> {
    let (seq, tokens, facts, json): (_, _, MessageFacts, &RawValue) = serde_json::from_str(row).ok()?;
    Some(ImportedMessage { seq, facts, message: format::read(json.get()).ok()?, tokens })
}

fn corrupt_file() -> io::Error {
    io::Error::other("the staging file of an import is corrupt")
}
