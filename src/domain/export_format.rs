//! The export format of a session: JSON lines. `docs/export.md` describes the format for users.
//!
//! | line | position |
//! | --- | --- |
//! | `{"precis_export": 1, "session": …}` | first |
//! | `{"seq": 1, "created_at": …, "message": …}` | one for each message |
//! | `{"revision": 1, …}` | one for each revision, after all messages |
//! | `{"end": {"messages": …, "revisions": …, "sha256": …}}` | last; an export without it is incomplete |
//!
//! The summary and the cursor are those of the last revision, so they have no line of their own. Words and tokens are
//! counted again by the reader, because stored counts must come from this version's tokenizer. To add a field to a line,
//! give it a default, so that older exports can be read. To change the meaning of a field, raise [`VERSION`].

use super::json;
use super::limits::SizeLimits;
use super::revision::Revision;
use super::session::Session;
use super::validation::FieldError;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use sha2::{Digest as _, Sha256};
use std::fmt;
use time::OffsetDateTime;

mod reader;
mod revision;

pub use reader::{ExportReader, ImportRow, ImportedMessage, ImportedSession};

/// The version of the format; the first line contains it.
pub const VERSION: u32 = 1;

/// Returns the length in bytes of the longest line that is read: far above the size of any revision, and above any
/// message within its limit.
#[must_use]
pub fn max_line_bytes(sizes: SizeLimits) -> usize {
    let largest = sizes.max_message_bytes.max(sizes.max_metadata_bytes);
    largest.saturating_mul(2).max(64 * 1024 * 1024)
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct HeaderLine {
    precis_export: u32,
    session: HeaderSession,
    messages: i64,
    revisions: i64,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct HeaderSession {
    session_id: String,
    user_id: String,
    metadata: Box<RawValue>,
    #[serde(with = "time::serde::rfc3339")]
    created_at: OffsetDateTime,
    #[serde(with = "time::serde::rfc3339")]
    updated_at: OffsetDateTime,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct MessageLine<'a> {
    seq: i64,
    #[serde(with = "time::serde::rfc3339")]
    created_at: OffsetDateTime,
    #[serde(borrow)]
    message: &'a RawValue,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct EndLine {
    end: End,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct End {
    messages: i64,
    revisions: i64,
    sha256: String,
}

/// An invalid line of an import.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LineError {
    /// Line number, from 1 on.
    pub line: u64,
    /// Errors in the line; an empty path stands for the line as a whole.
    pub errors: Vec<FieldError>,
}

impl fmt::Display for LineError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}", self.line)?;
        for (index, FieldError { field, detail }) in self.errors.iter().enumerate() {
            f.write_str(if index == 0 { ": " } else { "; " })?;
            if !field.is_empty() {
                write!(f, "{field}: ")?;
            }
            f.write_str(detail)?;
        }
        Ok(())
    }
}

impl std::error::Error for LineError {}

/// Writes the lines of an export and accumulates the counts and the checksum for the last line.
#[derive(Clone, Debug, Default)]
pub struct ExportWriter {
    hash: Sha256,
    messages: i64,
    revisions: i64,
}

impl ExportWriter {
    /// Returns the first line.
    ///
    /// # Errors
    /// The stored metadata is not JSON.
    pub fn header(&mut self, session: &Session) -> Result<String, serde_json::Error> {
        self.line(&HeaderLine {
            precis_export: VERSION,
            session: HeaderSession {
                session_id: session.session_id.as_str().to_owned(),
                user_id: session.user_id.as_str().to_owned(),
                metadata: RawValue::from_string(session.metadata.clone())?,
                created_at: session.created_at,
                updated_at: session.updated_at,
            },
            messages: session.last_seq,
            revisions: session.revision,
        })
    }

    /// Returns the line of a message.
    ///
    /// # Errors
    /// The stored message is not JSON.
    pub fn message(
        &mut self,
        seq: i64,
        created_at: OffsetDateTime,
        json: &str,
    ) -> Result<String, serde_json::Error> {
        self.messages += 1;
        self.line(&MessageLine { seq, created_at, message: serde_json::from_str(json)? })
    }

    /// Returns the line of a revision.
    ///
    /// # Errors
    /// Never in practice: texts, numbers and times can always be encoded.
    pub fn revision(&mut self, revision: &Revision) -> Result<String, serde_json::Error> {
        self.revisions += 1;
        self.line(revision)
    }

    /// Returns the last line.
    ///
    /// # Errors
    /// Never in practice: numbers and a text can always be encoded.
    pub fn end(mut self) -> Result<String, serde_json::Error> {
        let sha256 = hex::encode(std::mem::take(&mut self.hash).finalize());
        self.line(&EndLine { end: End { messages: self.messages, revisions: self.revisions, sha256 } })
    }

    fn line<T: Serialize>(&mut self, value: &T) -> Result<String, serde_json::Error> {
        let mut line = serde_json::to_string(value)?;
        line.push('\n');
        self.hash.update(&line);
        Ok(line)
    }
}

/// A hash of messages and, unless the import consists of messages only, of their times and the revisions. It tells
/// whether a session begins with the content of an import.
#[derive(Clone, Debug)]
pub struct Fingerprint {
    writer: ExportWriter,
    /// Ignores times, because a file with messages only has none.
    messages_only: bool,
}

impl Fingerprint {
    #[must_use]
    pub fn new(messages_only: bool) -> Self {
        Self { writer: ExportWriter::default(), messages_only }
    }

    /// Adds the next message.
    ///
    /// # Errors
    /// The message is not JSON.
    pub fn message(
        &mut self,
        seq: i64,
        created_at: OffsetDateTime,
        json: &str,
    ) -> Result<(), serde_json::Error> {
        let created_at = if self.messages_only { OffsetDateTime::UNIX_EPOCH } else { created_at };
        self.writer.message(seq, created_at, json).map(|_| ())
    }

    /// Adds the next revision.
    ///
    /// # Errors
    /// Never in practice.
    pub fn revision(&mut self, revision: &Revision) -> Result<(), serde_json::Error> {
        self.writer.revision(revision).map(|_| ())
    }

    #[must_use]
    pub fn finish(self) -> String {
        hex::encode(self.writer.hash.finalize())
    }
}

/// Encodes a revision as one line of JSON without a line feed, for [`parse_revision`].
///
/// # Errors
/// Never in practice.
pub fn encode_revision(revision: &Revision) -> Result<String, serde_json::Error> {
    serde_json::to_string(revision)
}

/// Parses the line of a revision.
///
/// # Errors
/// The invalid fields of the line.
pub fn parse_revision(line: &str) -> Result<Revision, Vec<FieldError>> {
    revision::validate(parse_line(line)?)
}

fn parse_line<'de, T: Deserialize<'de>>(line: &'de str) -> Result<T, Vec<FieldError>> {
    json::read(line).map_err(|error| vec![error])
}

#[cfg(test)]
mod tests;
