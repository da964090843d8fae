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

use super::exchange::{MessageFacts, StoredMessage};
use super::json;
use super::limits::SizeLimits;
use super::revision::{Provenance, Revision};
use super::session::{Session, Summary};
use super::validation::FieldError;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use sha2::{Digest as _, Sha256};
use std::fmt;
use time::OffsetDateTime;

mod reader;

pub use reader::{ExportReader, ImportRow, ImportedMessage, ImportedSession};

/// The version of the format; the first line contains it.
pub const VERSION: u32 = 1;

/// Longest name of a model, a pool or a version of prompts in an import, in bytes.
const MAX_NAME_BYTES: usize = 1024;

/// Returns the length in bytes of the longest line that is read: far above the size of any revision, and above any
/// message within its limit.
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
    /// Missing if the session has no user.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    user_id: Option<String>,
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
    /// Missing unless the message was redacted.
    #[serde(default, skip_serializing_if = "Option::is_none", with = "time::serde::rfc3339::option")]
    redacted_at: Option<OffsetDateTime>,
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
    pub fn header(&mut self, session: &Session) -> Result<String, serde_json::Error> {
        self.line(&HeaderLine {
            precis_export: VERSION,
            session: HeaderSession {
                session_id: session.session_id.as_str().to_owned(),
                user_id: session.user_id.as_ref().map(|user| user.as_str().to_owned()),
                metadata: RawValue::from_string(session.metadata.clone())?,
                created_at: session.created_at,
                updated_at: session.updated_at,
            },
            messages: session.last_seq,
            revisions: session.revision,
        })
    }

    pub fn message(&mut self, message: &StoredMessage) -> Result<String, serde_json::Error> {
        self.messages += 1;
        let StoredMessage { seq, created_at, redacted_at, ref json } = *message;
        self.line(&MessageLine { seq, created_at, redacted_at, message: serde_json::from_str(json)? })
    }

    pub fn revision(&mut self, revision: &Revision) -> Result<String, serde_json::Error> {
        self.revisions += 1;
        self.line(revision)
    }

    /// Returns the last line.
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
/// whether a session begins with the content of an import. The times of plain messages are part of the messages.
#[derive(Clone, Debug)]
pub struct Fingerprint {
    hash: Sha256,
    /// Ignores times, because messages without one get the time of their import.
    messages_only: bool,
}

impl Fingerprint {
    pub fn new(messages_only: bool) -> Self {
        Self { hash: Sha256::new(), messages_only }
    }

    pub fn message(&mut self, seq: i64, facts: &MessageFacts, json: &str) {
        let created_at = facts.created_at.filter(|_| !self.messages_only);
        let nanos = created_at.map_or(0, OffsetDateTime::unix_timestamp_nanos);
        self.hash.update(format!("{seq} {nanos} {json}\n"));
    }

    pub fn revision(&mut self, revision: &Revision) {
        self.hash.update(format!("{revision:?}\n"));
    }

    pub fn finish(self) -> String {
        hex::encode(self.hash.finalize())
    }
}

/// Parses and validates the line of a revision, and computes the size of its summary. The reader checks its place among
/// other revisions.
pub fn parse_revision(line: &str) -> Result<Revision, Vec<FieldError>> {
    let mut revision: Revision = parse_line(line)?;
    let mut errors = Vec::new();
    for (field, text) in [("summary.text", &revision.summary.text), ("added", &revision.added)] {
        // Postgres cannot store this character.
        if text.contains('\0') {
            errors.push(FieldError::new(field, "must not contain U+0000"));
        }
    }
    let provenance = revision.provenance.as_ref().map(|provenance| ("provenance", provenance));
    let meta = revision.meta.as_ref().map(|meta| ("meta.provenance", &meta.provenance));
    for (path, Provenance { model, pool, prompt_version, usage, duration_ms }) in
        provenance.into_iter().chain(meta)
    {
        for (name, text) in [("model", model), ("pool", pool), ("prompt_version", prompt_version)] {
            if text.len() > MAX_NAME_BYTES {
                let detail = format!("has {} bytes, at most {MAX_NAME_BYTES} are allowed", text.len());
                errors.push(FieldError::new(format!("{path}.{name}"), detail));
            }
        }
        let counts = [
            ("usage.input_tokens", usage.input_tokens),
            ("usage.output_tokens", usage.output_tokens),
            ("usage.calls", usage.calls),
            ("usage.failures", usage.failures),
            ("usage.queued_ms", usage.queued_ms),
            ("duration_ms", Some(*duration_ms)),
        ];
        let negative = counts.into_iter().filter(|(_, count)| count.is_some_and(|count| count < 0));
        errors.extend(
            negative.map(|(name, _)| FieldError::new(format!("{path}.{name}"), "must not be negative")),
        );
    }
    if !errors.is_empty() {
        return Err(errors);
    }
    revision.summary = Summary::new(revision.summary.text);
    Ok(revision)
}

fn parse_line<'de, T: Deserialize<'de>>(line: &'de str) -> Result<T, Vec<FieldError>> {
    json::read(line).map_err(|error| vec![error])
}

#[cfg(test)]
mod tests;
