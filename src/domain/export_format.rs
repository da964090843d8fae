//! The export of a session: JSON lines, and what makes them sound. `docs/export.md` is the same for those who read one.
//!
//! | line | when |
//! | --- | --- |
//! | `{"precis_export": 1, "session": …}` | the first |
//! | `{"seq": 1, "created_at": …, "message": …}` | one for each message |
//! | `{"revision": 1, …}` | one for each revision |
//! | `{"end": {"messages": …, "revisions": …, "sha256": …}}` | the last; without it the export is cut off |
//!
//! Summary and cursor are those of the last revision, and so have no line. What is counted (words, tokens) is counted
//! anew when an export is read: it must be this version's count, and nobody else's. To add a field to a line, give it a
//! default, so that older exports can be read; to change what a field means, raise [`VERSION`].

use super::limits::SizeLimits;
use super::revision::Revision;
use super::session::Session;
use super::validation::FieldError;
use super::{json, json_validation};
use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use sha2::{Digest as _, Sha256};
use std::fmt::{self, Write as _};
use time::OffsetDateTime;

mod reader;
mod revision;

pub use reader::{Entry, ExportReader, ImportedMessage, ImportedSession};

/// The version of the format, as the first line says it.
pub const VERSION: u32 = 1;

/// The longest line that is read, in bytes: far above any revision, and above any message that is within its limit.
#[must_use]
pub fn max_line_bytes(sizes: SizeLimits) -> usize {
    let largest = sizes.max_message_bytes.max(sizes.max_metadata_bytes);
    largest.saturating_mul(2).max(64 * 1024 * 1024)
}

/// The first line.
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

/// A line that is wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LineError {
    /// Its number, from 1 on.
    pub line: u64,
    /// What is wrong in it; the path is empty where it is the line as a whole.
    pub wrong: Vec<FieldError>,
}

impl fmt::Display for LineError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}", self.line)?;
        for (index, FieldError { field, detail }) in self.wrong.iter().enumerate() {
            let before = if index == 0 { ": " } else { "; " };
            let field = if field.is_empty() { String::new() } else { format!("{field}: ") };
            write!(f, "{before}{field}{detail}")?;
        }
        Ok(())
    }
}

impl std::error::Error for LineError {}

/// What kind of line it is, by the field that no other kind has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Header,
    Message,
    Revision,
    End,
    /// A message of the chat format by itself.
    Chat,
}

impl Kind {
    fn of(text: &str) -> Result<Self, FieldError> {
        #[derive(Deserialize)]
        struct Fields {
            precis_export: Option<IgnoredAny>,
            message: Option<IgnoredAny>,
            revision: Option<IgnoredAny>,
            end: Option<IgnoredAny>,
            role: Option<IgnoredAny>,
        }
        let whole = |detail: &str| FieldError { field: String::new(), detail: detail.to_owned() };
        if !text.starts_with('{') {
            return Err(whole("is not a JSON object"));
        }
        // Told apart from a field of a wrong type, of which there is none here: a JSON error.
        let fields = serde_json::from_str::<Fields>(text).map_err(|error| {
            let error = error.to_string();
            // The line that serde counts is always the first.
            let error = error.replace(" at line 1 column ", " at byte ");
            whole(&format!("is not JSON: {error}"))
        })?;
        let kinds = [
            (fields.precis_export, Self::Header),
            (fields.role, Self::Chat),
            (fields.message, Self::Message),
            (fields.revision, Self::Revision),
            (fields.end, Self::End),
        ];
        let kind = kinds.into_iter().find_map(|(field, kind)| field.map(|_| kind));
        kind.ok_or_else(|| {
            whole("is neither a line of an export nor a message: it has no precis_export, role, message, revision or end")
        })
    }

    /// Levels of lists and objects in such a line, so that what it holds is within the bounds of an exchange.
    fn levels(self) -> usize {
        match self {
            // In a body, a message is in the list `messages`: two levels.
            Self::Chat => json_validation::MAX_JSON_DEPTH - 2,
            Self::Message => json_validation::MAX_JSON_DEPTH - 1,
            // Metadata is one level deeper than in a body.
            Self::Header => json_validation::MAX_JSON_DEPTH + 1,
            Self::Revision | Self::End => json_validation::MAX_JSON_DEPTH,
        }
    }
}

/// Reads a line of a known kind; the text has been found sound.
fn read<'de, T: Deserialize<'de>>(text: &'de str) -> Result<T, Vec<FieldError>> {
    json::read(text).map_err(|invalid| vec![invalid])
}

/// Writes the lines of an export, and keeps count of what has to stand in the last.
#[derive(Clone, Debug, Default)]
pub struct ExportWriter {
    hash: Sha256,
    messages: i64,
    revisions: i64,
}

impl ExportWriter {
    /// The first line.
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

    /// The line of a message.
    ///
    /// # Errors
    /// The stored message is not JSON.
    pub fn message(&mut self, seq: i64, at: OffsetDateTime, json: &str) -> Result<String, serde_json::Error> {
        self.messages += 1;
        self.line(&MessageLine { seq, created_at: at, message: serde_json::from_str(json)? })
    }

    /// The line of a revision.
    ///
    /// # Errors
    /// None that can happen: a revision is texts, numbers and a time.
    pub fn revision(&mut self, revision: &Revision) -> Result<String, serde_json::Error> {
        self.revisions += 1;
        self.line(revision)
    }

    /// The last line.
    ///
    /// # Errors
    /// None that can happen: it is numbers and a text.
    pub fn end(mut self) -> Result<String, serde_json::Error> {
        let sha256 = hex(&std::mem::take(&mut self.hash).finalize());
        self.line(&EndLine { end: End { messages: self.messages, revisions: self.revisions, sha256 } })
    }

    fn line<T: Serialize>(&mut self, value: &T) -> Result<String, serde_json::Error> {
        let mut line = serde_json::to_string(value)?;
        line.push('\n');
        self.hash.update(&line);
        Ok(line)
    }
}

/// Tells whether two records are the same: of messages and, where they have them, their times and revisions.
#[derive(Clone, Debug)]
pub struct Fingerprint {
    writer: ExportWriter,
    /// A file of messages alone has no times.
    bare: bool,
}

impl Fingerprint {
    /// Of nothing yet.
    #[must_use]
    pub fn new(bare: bool) -> Self {
        Self { writer: ExportWriter::default(), bare }
    }

    /// Adds the next message.
    ///
    /// # Errors
    /// It is not JSON.
    pub fn message(&mut self, seq: i64, at: OffsetDateTime, json: &str) -> Result<(), serde_json::Error> {
        let at = if self.bare { OffsetDateTime::UNIX_EPOCH } else { at };
        self.writer.message(seq, at, json).map(|_| ())
    }

    /// Adds the next revision.
    ///
    /// # Errors
    /// None that can happen.
    pub fn revision(&mut self, revision: &Revision) -> Result<(), serde_json::Error> {
        self.writer.revision(revision).map(|_| ())
    }

    /// The hash of all of it.
    #[must_use]
    pub fn finish(self) -> String {
        hex(&self.writer.hash.finalize())
    }
}

/// A revision as one line of JSON, for [`read_revision`].
///
/// # Errors
/// None that can happen.
pub fn write_revision(revision: &Revision) -> Result<String, serde_json::Error> {
    serde_json::to_string(revision)
}

/// What [`write_revision`] wrote.
///
/// # Errors
/// It is something else.
pub fn read_revision(line: &str) -> Result<Revision, Vec<FieldError>> {
    revision::validate(read(line)?)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

#[cfg(test)]
mod tests;
