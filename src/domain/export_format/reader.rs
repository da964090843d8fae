//! Reads an export line by line and checks each line against the lines before it.
//!
//! The reader does no I/O, so that it can be tested and fuzzed with any bytes.

use super::super::id::{InvalidId, SessionId, UserId};
use super::super::json_validation::{MAX_JSON_DEPTH, check_depth_and_encoding};
use super::super::limits::SizeLimits;
use super::super::message::{Message, minify_json};
use super::super::revision::{Revision, RevisionKind};
use super::super::session::Summary;
use super::super::tokens;
use super::super::validation::FieldError;
use super::{EndLine, Fingerprint, HeaderLine, LineError, MessageLine, VERSION, parse_line, parse_revision};
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::value::RawValue;
use sha2::{Digest as _, Sha256};
use std::collections::HashSet;
use time::{OffsetDateTime, UtcOffset};

/// A valid message of an import with its token count.
#[derive(Clone, Debug, PartialEq)]
pub struct ImportedMessage {
    pub seq: i64,
    /// Time of the first storage; `None` if the file has no times.
    pub created_at: Option<OffsetDateTime>,
    pub message: Message,
    pub tokens: i64,
}

/// A line that becomes a database row.
#[derive(Clone, Debug, PartialEq)]
pub enum ImportRow {
    Message(Box<ImportedMessage>),
    Revision(Box<Revision>),
}

/// The state of the session of a complete, valid import.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImportedSession {
    /// `None` if the file has no header.
    pub user_id: Option<UserId>,
    /// A JSON object; `None` if the file has no header.
    pub metadata: Option<String>,
    /// Creation and last activity; `None` if the file has no header.
    pub times: Option<(OffsetDateTime, OffsetDateTime)>,
    /// Number of messages.
    pub last_seq: i64,
    /// Tokens of all messages.
    pub tokens: i64,
    /// Number of revisions.
    pub revision: i64,
    /// Cursor after the last revision.
    pub cursor: i64,
    /// Summary after the last revision.
    pub summary: Summary,
    /// The [`Fingerprint`] of the file.
    pub fingerprint: String,
    /// The file consists of messages in the chat format, without header, times and revisions.
    pub messages_only: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Position {
    Start,
    /// After the header: messages, then revisions.
    AfterHeader,
    /// In a file that consists of messages only.
    MessagesOnly,
    End,
}

/// The type of a line, recognised by the field that no other type has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LineType {
    Header,
    Message,
    Revision,
    End,
    /// A message of the chat format.
    ChatMessage,
}

/// Reads and validates an export line by line.
#[derive(Clone, Debug)]
pub struct ExportReader {
    sizes: SizeLimits,
    position: Position,
    line: u64,
    header: Option<Header>,
    last_seq: i64,
    tokens: i64,
    last_time: OffsetDateTime,
    revision: i64,
    cursor: i64,
    summary: Summary,
    /// Hashes of the states that a restore may return to: 32 bytes for each revision.
    states: HashSet<[u8; 32]>,
    hash: Sha256,
    fingerprint: Fingerprint,
}

#[derive(Clone, Debug)]
struct Header {
    user_id: UserId,
    metadata: String,
    created_at: OffsetDateTime,
    updated_at: OffsetDateTime,
    messages: i64,
    revisions: i64,
}

fn invalid<T>(field: &str, detail: impl Into<String>) -> Result<T, Vec<FieldError>> {
    Err(vec![FieldError::new(field, detail)])
}

/// Converts a time to the form in which it is stored: UTC, whole microseconds, not before 1970.
fn to_stored_time(time: OffsetDateTime, field: &str) -> Result<OffsetDateTime, Vec<FieldError>> {
    let Some(time) = time.checked_to_offset(UtcOffset::UTC) else {
        return invalid(field, "must not be after the year 9999 in UTC");
    };
    if time < OffsetDateTime::UNIX_EPOCH {
        return invalid(field, "must not be before 1970");
    }
    Ok(time.replace_nanosecond(time.microsecond() * 1000).unwrap_or(time))
}

fn hash_state(cursor: i64, summary: &str) -> [u8; 32] {
    let mut hash = Sha256::new();
    hash.update(cursor.to_le_bytes());
    hash.update(summary);
    hash.finalize().into()
}

impl LineType {
    fn of(text: &str) -> Result<Self, Vec<FieldError>> {
        #[derive(Deserialize)]
        struct Fields {
            precis_export: Option<IgnoredAny>,
            message: Option<IgnoredAny>,
            revision: Option<IgnoredAny>,
            end: Option<IgnoredAny>,
            role: Option<IgnoredAny>,
        }
        if !text.starts_with('{') {
            return invalid("", "is not a JSON object");
        }
        // No field can be of a wrong type here, so every error is a syntax error.
        let fields = serde_json::from_str::<Fields>(text).map_err(|error| {
            // Serde counts the lines of its input, which is one line.
            let error = error.to_string().replace(" at line 1 column ", " at byte ");
            vec![FieldError::new("", format!("is not JSON: {error}"))]
        })?;
        let types = [
            (fields.precis_export, Self::Header),
            (fields.role, Self::ChatMessage),
            (fields.message, Self::Message),
            (fields.revision, Self::Revision),
            (fields.end, Self::End),
        ];
        match types.into_iter().find_map(|(field, line_type)| field.map(|_| line_type)) {
            Some(line_type) => Ok(line_type),
            None => invalid(
                "",
                "is neither a line of an export nor a message: it has no precis_export, role, message, revision or end",
            ),
        }
    }

    /// Returns how deeply the line may be nested, so that its content has the same limit as in a request body.
    fn max_depth(self) -> usize {
        match self {
            // In a request body, a message is inside the list `messages`: two levels.
            Self::ChatMessage => MAX_JSON_DEPTH - 2,
            Self::Message => MAX_JSON_DEPTH - 1,
            // Metadata is one level deeper than in a request body.
            Self::Header => MAX_JSON_DEPTH + 1,
            Self::Revision | Self::End => MAX_JSON_DEPTH,
        }
    }
}

impl ExportReader {
    /// Creates a reader that checks messages and metadata against `sizes`.
    #[must_use]
    pub fn new(sizes: SizeLimits) -> Self {
        Self {
            sizes,
            position: Position::Start,
            line: 0,
            header: None,
            last_seq: 0,
            tokens: 0,
            last_time: OffsetDateTime::UNIX_EPOCH,
            revision: 0,
            cursor: 0,
            summary: Summary::default(),
            states: HashSet::from([hash_state(0, "")]),
            hash: Sha256::new(),
            fingerprint: Fingerprint::new(false),
        }
    }

    /// Reads the next line, without its line feed. Returns `None` for the first, the last and empty lines.
    ///
    /// # Errors
    /// The line is invalid by itself or at its position. The reader cannot be used afterwards.
    pub fn line(&mut self, line: &[u8]) -> Result<Option<ImportRow>, LineError> {
        self.line += 1;
        self.read_line(line).map_err(|errors| self.error(errors))
    }

    /// Creates an error for the current line.
    #[must_use]
    pub fn error(&self, errors: Vec<FieldError>) -> LineError {
        LineError { line: self.line, errors }
    }

    /// Returns the number of messages according to the header, or 0 without a header.
    #[must_use]
    pub fn declared_messages(&self) -> i64 {
        self.header.as_ref().map_or(0, |header| header.messages)
    }

    /// Returns the number of messages read so far.
    #[must_use]
    pub fn messages(&self) -> i64 {
        self.last_seq
    }

    /// Ends the import.
    ///
    /// # Errors
    /// The file is empty, or an export whose last line is missing.
    pub fn finish(mut self) -> Result<ImportedSession, LineError> {
        let result = match self.position {
            Position::Start => {
                self.line = 1;
                invalid("", "the file is empty: send an export, or one message per line")
            }
            Position::AfterHeader => invalid(
                "",
                "the export ends here without its last line, {\"end\": …}: it is cut off. Make the export again",
            ),
            Position::MessagesOnly | Position::End => Ok(()),
        };
        result.map_err(|errors| self.error(errors))?;
        let messages_only = self.header.is_none();
        let (user_id, metadata, times) = match self.header {
            Some(header) => {
                let times = (header.created_at, header.updated_at);
                (Some(header.user_id), Some(header.metadata), Some(times))
            }
            None => (None, None, None),
        };
        Ok(ImportedSession {
            user_id,
            metadata,
            times,
            last_seq: self.last_seq,
            tokens: self.tokens,
            revision: self.revision,
            cursor: self.cursor,
            summary: self.summary,
            fingerprint: self.fingerprint.finish(),
            messages_only,
        })
    }

    fn read_line(&mut self, line: &[u8]) -> Result<Option<ImportRow>, Vec<FieldError>> {
        let Ok(text) = std::str::from_utf8(line) else {
            return invalid("", "is not UTF-8");
        };
        let text = text.trim_ascii();
        if text.is_empty() {
            return Ok(None);
        }
        let line_type = LineType::of(text)?;
        let max_depth = line_type.max_depth();
        if let Err(error) = check_depth_and_encoding(text, max_depth) {
            return if error.is_data() {
                invalid("", format!("is nested deeper than {max_depth} levels"))
            } else {
                invalid("", "has a \\u escape that is incomplete, or half a surrogate pair")
            };
        }
        let row = match (self.position, line_type) {
            (Position::Start, LineType::Header) => self.read_header(parse_line(text)?).map(|()| None)?,
            (Position::Start | Position::MessagesOnly, LineType::ChatMessage) => {
                Some(self.read_chat_message(text)?)
            }
            (Position::AfterHeader, LineType::Message) => Some(self.read_message(&parse_line(text)?)?),
            (Position::AfterHeader, LineType::Revision) => Some(self.read_revision(parse_revision(text)?)?),
            (Position::AfterHeader, LineType::End) => self.read_end(&parse_line(text)?).map(|()| None)?,
            (Position::End, _) => return invalid("", "follows the last line of the export"),
            (Position::Start, _) => {
                return invalid("", "the first line of an export is {\"precis_export\": 1, \"session\": …}");
            }
            (Position::MessagesOnly, _) => {
                return invalid("", "is no message: the lines before it are messages of the chat format");
            }
            (Position::AfterHeader, _) => {
                return invalid("", "must be a message, a revision or the last line of the export");
            }
        };
        self.hash.update(line);
        self.hash.update(b"\n");
        Ok(row)
    }

    fn read_header(&mut self, line: HeaderLine) -> Result<(), Vec<FieldError>> {
        if line.precis_export != VERSION {
            let detail = format!("must be {VERSION}: this version of precis reads no other format");
            return invalid("precis_export", detail);
        }
        let session = line.session;
        let id_error = |field: &str, error: InvalidId| vec![FieldError::new(field, error.to_string())];
        SessionId::new(session.session_id).map_err(|error| id_error("session.session_id", error))?;
        let user_id = UserId::new(session.user_id).map_err(|error| id_error("session.user_id", error))?;
        let metadata = minify_json(session.metadata.get());
        if !metadata.starts_with('{') {
            return invalid("session.metadata", "must be a JSON object");
        }
        self.sizes.check_metadata("session.metadata", &metadata).map_err(|error| vec![error])?;
        let created_at = to_stored_time(session.created_at, "session.created_at")?;
        let updated_at = to_stored_time(session.updated_at, "session.updated_at")?;
        if updated_at < created_at {
            return invalid("session.updated_at", "must not be before created_at");
        }
        if line.messages < 1 {
            return invalid("messages", "must be at least 1: a session has at least one message");
        }
        if line.revisions < 0 {
            return invalid("revisions", "must not be negative");
        }
        let (messages, revisions) = (line.messages, line.revisions);
        self.header = Some(Header { user_id, metadata, created_at, updated_at, messages, revisions });
        (self.position, self.last_time) = (Position::AfterHeader, created_at);
        Ok(())
    }

    fn read_chat_message(&mut self, text: &str) -> Result<ImportRow, Vec<FieldError>> {
        if self.position == Position::Start {
            (self.position, self.fingerprint) = (Position::MessagesOnly, Fingerprint::new(true));
        }
        let message: &RawValue = parse_line(text)?;
        self.add_message("", Message::parse(message)?, None)
    }

    fn read_message(&mut self, line: &MessageLine<'_>) -> Result<ImportRow, Vec<FieldError>> {
        let expected = self.last_seq + 1;
        if self.revision > 0 {
            return invalid("", "is a message after a revision: all messages come before the revisions");
        }
        if line.seq != expected {
            return invalid("seq", format!("must be {expected}: messages are numbered 1, 2, 3 …"));
        }
        let created_at = to_stored_time(line.created_at, "created_at")?;
        let latest = self.header.as_ref().map_or(created_at, |header| header.updated_at);
        if created_at < self.last_time || created_at > latest {
            return invalid(
                "created_at",
                "must not be before the previous message or outside the lifetime of the session",
            );
        }
        let message = Message::parse(line.message).map_err(|errors| -> Vec<FieldError> {
            errors.into_iter().map(|error| error.in_value("message")).collect()
        })?;
        self.last_time = created_at;
        self.add_message("message", message, Some(created_at))
    }

    fn add_message(
        &mut self,
        path: &str,
        message: Message,
        created_at: Option<OffsetDateTime>,
    ) -> Result<ImportRow, Vec<FieldError>> {
        self.sizes.check_message(path, &message).map_err(|error| vec![error])?;
        let tokens = tokens::count_message(&message);
        self.last_seq += 1;
        self.tokens = self.tokens.saturating_add(tokens);
        let hashed_time = created_at.unwrap_or(OffsetDateTime::UNIX_EPOCH);
        if self.fingerprint.message(self.last_seq, hashed_time, message.json()).is_err() {
            return invalid("", "is not JSON");
        }
        Ok(ImportRow::Message(Box::new(ImportedMessage { seq: self.last_seq, created_at, message, tokens })))
    }

    fn read_revision(&mut self, mut revision: Revision) -> Result<ImportRow, Vec<FieldError>> {
        let expected = self.revision + 1;
        if revision.revision != expected {
            return invalid("revision", format!("must be {expected}: revisions are numbered 1, 2, 3 …"));
        }
        if revision.cursor > self.last_seq {
            return invalid("cursor", format!("must be at most {}, the last message", self.last_seq));
        }
        let state = hash_state(revision.cursor, &revision.summary.text);
        match revision.kind {
            RevisionKind::Consolidation => {
                let (first, last) = (self.cursor + 1, revision.cursor);
                if revision.range() != Some((first, last)) || last < first {
                    let detail = format!(
                        "from_seq must be {first}, after the previous cursor, and to_seq must be cursor"
                    );
                    return invalid("from_seq", detail);
                }
            }
            RevisionKind::Restore => {
                let has_no_range = revision.from_seq.is_none() && revision.to_seq.is_none();
                let has_no_text = revision.added.is_empty() && revision.meta.is_none();
                if !has_no_range || !has_no_text || revision.provenance.is_some() {
                    return invalid("kind", "a restore has no range, provenance, meta or added text");
                }
                if !self.states.contains(&state) {
                    return invalid(
                        "cursor",
                        "a restore has cursor and text of an earlier revision, or 0 and \"\"",
                    );
                }
            }
        }
        revision.created_at = to_stored_time(revision.created_at, "created_at")?;
        if self.fingerprint.revision(&revision).is_err() {
            return invalid("", "is not JSON");
        }
        self.states.insert(state);
        (self.revision, self.cursor, self.summary) = (expected, revision.cursor, revision.summary.clone());
        Ok(ImportRow::Revision(Box::new(revision)))
    }

    fn read_end(&mut self, EndLine { end }: &EndLine) -> Result<(), Vec<FieldError>> {
        let declared = self.header.as_ref().map_or((0, 0), |header| (header.messages, header.revisions));
        for (field, at_end, declared, read) in [
            ("end.messages", end.messages, declared.0, self.last_seq),
            ("end.revisions", end.revisions, declared.1, self.revision),
        ] {
            if at_end != read || declared != read {
                let detail = format!(
                    "{read} lines were read, but the last line declares {at_end} and the first {declared}: lines are missing"
                );
                return invalid(field, detail);
            }
        }
        if end.sha256 != hex::encode(self.hash.clone().finalize()) {
            return invalid(
                "end.sha256",
                "is not the checksum of the lines before: the export was modified after it was made",
            );
        }
        self.position = Position::End;
        Ok(())
    }
}
