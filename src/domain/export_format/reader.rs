//! Reads an export line by line and checks each line against the lines before it.
//!
//! The reader does no I/O, so that it can be tested and fuzzed with any bytes.

use super::super::exchange::MessageFacts;
use super::super::format;
use super::super::given_time::{message_time, stored_time};
use super::super::id::{InvalidId, SessionId, UserId};
use super::super::json_validation::{
    InvalidJson, MAX_JSON_DEPTH, MAX_JSON_VALUES, check_json, replace_lone_surrogates,
};
use super::super::limits::SizeLimits;
use super::super::message::{Message, minify_json};
use super::super::revision::{Revision, RevisionKind};
use super::super::session::Summary;
use super::super::summary;
use super::super::validation::FieldError;
use super::{EndLine, Fingerprint, HeaderLine, LineError, MessageLine, VERSION, parse_line, parse_revision};
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::value::RawValue;
use sha2::{Digest as _, Sha256};
use std::collections::{BTreeSet, HashSet};
use time::OffsetDateTime;

/// Largest number of JSON values in a line: those of a message that a request can contain, and of the line around it.
const MAX_LINE_VALUES: usize = MAX_JSON_VALUES + 8;

/// A valid message of an import with its token count.
#[derive(Clone, Debug, PartialEq)]
pub struct ImportedMessage {
    pub seq: i64,
    pub facts: MessageFacts,
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
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ImportedSession {
    /// `None` if the file has no header.
    pub user_id: Option<UserId>,
    /// A JSON object; `None` if the file has no header.
    pub metadata: Option<String>,
    /// Creation and last activity; `None` if the file has no header.
    pub times: Option<(OffsetDateTime, OffsetDateTime)>,
    pub last_seq: i64,
    pub tokens: i64,
    pub revision: i64,
    pub cursor: i64,
    pub summary: Summary,
    /// The [`Fingerprint`] of the file.
    pub fingerprint: String,
    /// The file consists of plain messages, without header, times and revisions.
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
    /// A message as a client sends it, in the chat format or the Anthropic format.
    PlainMessage,
}

/// Reads and validates an export line by line.
#[derive(Clone, Debug)]
pub struct ExportReader {
    sizes: SizeLimits,
    position: Position,
    line: u64,
    /// The session after the lines that were read.
    session: ImportedSession,
    /// Numbers of messages and revisions according to the header.
    declared: (i64, i64),
    /// The time of our clock, for plain messages: their times must not be in the future.
    now: Option<OffsetDateTime>,
    /// Hashes of the states that a restore may return to: 32 bytes for each revision.
    states: HashSet<[u8; 32]>,
    /// The redacted messages.
    redacted: BTreeSet<i64>,
    /// The messages that the revisions of redactions name.
    redactions: BTreeSet<i64>,
    /// The last revision has lost its texts.
    is_summary_redacted: bool,
    hash: Sha256,
    fingerprint: Fingerprint,
}

fn invalid<T>(field: &str, detail: impl Into<String>) -> Result<T, Vec<FieldError>> {
    Err(vec![FieldError::new(field, detail)])
}

fn to_stored_time(time: OffsetDateTime, field: &str) -> Result<OffsetDateTime, Vec<FieldError>> {
    stored_time(time).map_err(|detail| vec![FieldError::new(field, detail)])
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
            (fields.role, Self::PlainMessage),
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
            Self::PlainMessage => MAX_JSON_DEPTH - 2,
            Self::Message => MAX_JSON_DEPTH - 1,
            // Metadata is one level deeper than in a request body.
            Self::Header => MAX_JSON_DEPTH + 1,
            Self::Revision | Self::End => MAX_JSON_DEPTH,
        }
    }
}

impl ExportReader {
    /// Creates a reader that checks messages and metadata against `sizes`.
    pub fn new(sizes: SizeLimits) -> Self {
        Self {
            sizes,
            position: Position::Start,
            line: 0,
            session: ImportedSession::default(),
            declared: (0, 0),
            now: None,
            states: HashSet::from([hash_state(0, "")]),
            redacted: BTreeSet::new(),
            redactions: BTreeSet::new(),
            is_summary_redacted: false,
            hash: Sha256::new(),
            fingerprint: Fingerprint::new(false),
        }
    }

    /// Rejects plain messages whose time is after `now`. The times of an export come from the clock of a store.
    #[must_use]
    pub fn with_clock(self, now: OffsetDateTime) -> Self {
        Self { now: Some(now), ..self }
    }

    /// Reads the next line, without its line feed. Returns no row for the first, the last and empty lines, and several for a
    /// message with several results of tools. After an error, the reader cannot be used.
    pub fn line(&mut self, line: &[u8]) -> Result<Vec<ImportRow>, LineError> {
        self.line += 1;
        self.read_line(line).map_err(|errors| self.error(errors))
    }

    /// Creates an error for the line that would be read next.
    #[must_use]
    pub fn error_in_next_line(&self, detail: String) -> LineError {
        LineError { line: self.line + 1, errors: vec![FieldError::new("", detail)] }
    }

    fn error(&self, errors: Vec<FieldError>) -> LineError {
        LineError { line: self.line, errors }
    }

    /// Returns the number of messages according to the header, or 0 without a header.
    pub fn declared_messages(&self) -> i64 {
        self.declared.0
    }

    /// Returns the number of messages read so far.
    pub fn messages(&self) -> i64 {
        self.session.last_seq
    }

    /// Ends the import.
    pub fn finish(mut self) -> Result<ImportedSession, LineError> {
        let detail = match self.position {
            Position::Start => {
                self.line = 1;
                "the file is empty: send an export, or one message per line"
            }
            Position::AfterHeader => {
                "the export ends here without its last line, {\"end\": …}: it is cut off. Make the export again"
            }
            Position::MessagesOnly | Position::End => {
                return Ok(ImportedSession { fingerprint: self.fingerprint.finish(), ..self.session });
            }
        };
        Err(self.error(vec![FieldError::new("", detail)]))
    }

    fn read_line(&mut self, line: &[u8]) -> Result<Vec<ImportRow>, Vec<FieldError>> {
        let Ok(text) = std::str::from_utf8(line) else {
            return invalid("", "is not UTF-8");
        };
        let text = replace_lone_surrogates(text.trim_ascii());
        let text = &*text;
        if text.is_empty() {
            return Ok(Vec::new());
        }
        let line_type = LineType::of(text)?;
        let max_depth = line_type.max_depth();
        match check_json(text, max_depth, MAX_LINE_VALUES) {
            Ok(_) => {}
            Err(InvalidJson::TooDeep) => {
                return invalid("", format!("is nested deeper than {max_depth} levels"));
            }
            Err(InvalidJson::TooManyValues) => {
                let detail = format!("has more than {MAX_LINE_VALUES} JSON values: send large data as text");
                return invalid("", detail);
            }
            Err(InvalidJson::Malformed(_)) => {
                return invalid("", "has a \\u escape that is incomplete");
            }
        }
        let rows = match (self.position, line_type) {
            (Position::Start, LineType::Header) => {
                self.read_header(parse_line(text)?).map(|()| Vec::new())?
            }
            (Position::Start | Position::MessagesOnly, LineType::PlainMessage) => {
                self.read_plain_message(text)?
            }
            (Position::AfterHeader, LineType::Message) => vec![self.read_message(&parse_line(text)?)?],
            (Position::AfterHeader, LineType::Revision) => vec![self.read_revision(parse_revision(text)?)?],
            (Position::AfterHeader, LineType::End) => {
                self.read_end(&parse_line(text)?).map(|()| Vec::new())?
            }
            (Position::End, _) => return invalid("", "follows the last line of the export"),
            (Position::Start, _) => {
                return invalid("", "the first line of an export is {\"precis_export\": 1, \"session\": …}");
            }
            (Position::MessagesOnly, _) => {
                return invalid("", "is no message: the lines before it have a role and content");
            }
            (Position::AfterHeader, _) => {
                return invalid("", "must be a message, a revision or the last line of the export");
            }
        };
        self.hash.update(line);
        self.hash.update(b"\n");
        Ok(rows)
    }

    fn read_header(&mut self, line: HeaderLine) -> Result<(), Vec<FieldError>> {
        if line.precis_export != VERSION {
            let detail = format!("must be {VERSION}: this version of precis reads no other format");
            return invalid("precis_export", detail);
        }
        let session = line.session;
        let id_error = |field: &str, error: InvalidId| vec![FieldError::new(field, error.to_string())];
        SessionId::new(session.session_id).map_err(|error| id_error("session.session_id", error))?;
        let user_id = session.user_id.map(UserId::new).transpose();
        let user_id = user_id.map_err(|error| id_error("session.user_id", error))?;
        let metadata = self.sizes.metadata("session.metadata", &session.metadata);
        let metadata = metadata.map_err(|error| vec![error])?;
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
        (self.session.user_id, self.session.metadata) = (user_id, Some(metadata));
        self.session.times = Some((created_at, updated_at));
        self.declared = (line.messages, line.revisions);
        self.position = Position::AfterHeader;
        Ok(())
    }

    /// Reads a message of either format. Each result of a tool becomes a message of its own, as in an exchange.
    fn read_plain_message(&mut self, text: &str) -> Result<Vec<ImportRow>, Vec<FieldError>> {
        if self.position == Position::Start {
            (self.position, self.fingerprint) = (Position::MessagesOnly, Fingerprint::new(true));
            self.session.messages_only = true;
        }
        let message: &RawValue = parse_line(text)?;
        let facts = MessageFacts { created_at: message_time(message, self.now), ..MessageFacts::default() };
        let messages = format::read_given(message).map_err(|error| vec![error])?.into_iter();
        messages.map(|message| self.add_message("", message, facts.clone())).collect()
    }

    fn read_message(&mut self, line: &MessageLine<'_>) -> Result<ImportRow, Vec<FieldError>> {
        let expected = self.session.last_seq + 1;
        if self.session.revision > 0 {
            return invalid("", "is a message after a revision: all messages come before the revisions");
        }
        if line.seq != expected {
            return invalid("seq", format!("must be {expected}: messages are numbered 1, 2, 3 …"));
        }
        let created_at = Some(to_stored_time(line.created_at, "created_at")?);
        let message = format::read(&minify_json(line.message.get()));
        let message = message.map_err(|error| vec![error.in_value("message")])?;
        let redacted_at = line.redacted_at.map(|time| to_stored_time(time, "redacted_at")).transpose()?;
        if redacted_at.is_some() {
            if message.redacted() != message {
                return invalid(
                    "message",
                    "has more than a redacted message keeps, although it has redacted_at",
                );
            }
            self.redacted.insert(line.seq);
        }
        self.add_message("message", message, MessageFacts { created_at, redacted_at })
    }

    fn add_message(
        &mut self,
        path: &str,
        message: Message,
        facts: MessageFacts,
    ) -> Result<ImportRow, Vec<FieldError>> {
        self.sizes.check_message(path, &message).map_err(|error| vec![error])?;
        let tokens = format::count_tokens(&message);
        let seq = self.session.last_seq + 1;
        self.session.last_seq = seq;
        self.session.tokens = self.session.tokens.saturating_add(tokens);
        self.fingerprint.message(seq, &facts, message.json());
        Ok(ImportRow::Message(Box::new(ImportedMessage { seq, facts, message, tokens })))
    }

    fn read_revision(&mut self, mut revision: Revision) -> Result<ImportRow, Vec<FieldError>> {
        let expected = self.session.revision + 1;
        if revision.revision != expected {
            return invalid("revision", format!("must be {expected}: revisions are numbered 1, 2, 3 …"));
        }
        let last_seq = self.session.last_seq;
        if revision.cursor > last_seq {
            return invalid("cursor", format!("must be at most {last_seq}, the last message"));
        }
        let before = revision.meta.as_ref().map_or("", |meta| &meta.text_before);
        for (field, text) in [
            ("summary.text", &*revision.summary.text),
            ("added", &*revision.added),
            ("meta.text_before", before),
        ] {
            summary::check_length(field, text).map_err(|error| vec![error])?;
        }
        let is_redacted = self.check_redacted(&revision)?;
        let state = hash_state(revision.cursor, &revision.summary.text);
        let has_no_text =
            revision.added.is_empty() && revision.meta.is_none() && revision.provenance.is_none();
        let is_earlier_state = is_redacted || self.states.contains(&state);
        match revision.kind {
            RevisionKind::Consolidation => {
                let (first, last) = (self.session.cursor + 1, revision.cursor);
                if revision.range() != Some((first, last)) || last < first {
                    let detail = format!(
                        "from_seq must be {first}, after the previous cursor, and to_seq must be cursor"
                    );
                    return invalid("from_seq", detail);
                }
            }
            RevisionKind::Restore => {
                let has_no_range = revision.from_seq.is_none() && revision.to_seq.is_none();
                if !has_no_range || !has_no_text {
                    return invalid("kind", "a restore has no range, provenance, meta or added text");
                }
                if !is_earlier_state {
                    return invalid(
                        "cursor",
                        "a restore has cursor and text of an earlier revision, or 0 and \"\"",
                    );
                }
            }
            RevisionKind::Redaction => {
                // The message itself may be missing: a rewind or a fork has left it out.
                let seq =
                    revision.from_seq.filter(|seq| *seq > revision.cursor && revision.to_seq == Some(*seq));
                let Some(seq) = seq else {
                    return invalid(
                        "from_seq",
                        "a redaction names its message as from_seq and to_seq, after cursor",
                    );
                };
                if !has_no_text {
                    return invalid("kind", "a redaction has no provenance, meta or added text");
                }
                if !is_earlier_state {
                    return invalid(
                        "cursor",
                        "a redaction has cursor and text of an earlier revision, or 0 and \"\"",
                    );
                }
                self.redactions.insert(seq);
            }
            RevisionKind::Edit => {
                let has_no_range = revision.from_seq.is_none() && revision.to_seq.is_none();
                if !has_no_range || !has_no_text {
                    return invalid("kind", "an edit has no range, provenance, meta or added text");
                }
                let cursor = self.session.cursor;
                if revision.cursor != cursor || cursor == 0 {
                    return invalid(
                        "cursor",
                        format!("an edit has the previous cursor, which is {cursor}, and not 0"),
                    );
                }
                if !is_redacted {
                    summary::check_written("summary.text", &revision.summary.text)
                        .map_err(|error| vec![error])?;
                }
            }
        }
        revision.created_at = to_stored_time(revision.created_at, "created_at")?;
        self.fingerprint.revision(&revision);
        if !is_redacted {
            self.states.insert(state);
        }
        self.is_summary_redacted = is_redacted;
        (self.session.revision, self.session.cursor) = (expected, revision.cursor);
        self.session.summary = revision.summary.clone();
        Ok(ImportRow::Revision(Box::new(revision)))
    }

    /// Returns `true` if the revision has lost its texts.
    fn check_redacted(&self, revision: &Revision) -> Result<bool, Vec<FieldError>> {
        let Some(seq) = revision.redacted_seq else { return Ok(false) };
        let before = revision.meta.as_ref().map_or("", |meta| &meta.text_before);
        if !(revision.summary.text.is_empty() && revision.added.is_empty() && before.is_empty()) {
            return invalid("summary.text", "a revision with redacted_seq has no texts");
        }
        if seq > revision.cursor || !self.redacted.contains(&seq) {
            return invalid("redacted_seq", "must be a redacted message that the summary covered");
        }
        Ok(true)
    }

    fn read_end(&mut self, EndLine { end }: &EndLine) -> Result<(), Vec<FieldError>> {
        for (field, at_end, declared, read) in [
            ("end.messages", end.messages, self.declared.0, self.session.last_seq),
            ("end.revisions", end.revisions, self.declared.1, self.session.revision),
        ] {
            if at_end != read || declared != read {
                let detail = format!(
                    "{read} lines were read, but the last line declares {at_end} and the first {declared}: lines are missing"
                );
                return invalid(field, detail);
            }
        }
        if let Some(seq) = self.redacted.difference(&self.redactions).next() {
            let detail = format!("message {seq} is redacted, but no revision of the kind redaction names it");
            return invalid("end.revisions", detail);
        }
        if self.is_summary_redacted {
            return invalid("end.revisions", "the last revision must have its summary: it has redacted_seq");
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
