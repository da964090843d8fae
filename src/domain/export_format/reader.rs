//! Reading an export line by line: each line by itself, and whether it may stand where it stands.
//!
//! Pure and without I/O, so that it can be tested, and fuzzed, with any bytes.

use super::super::id::{SessionId, UserId};
use super::super::limits::SizeLimits;
use super::super::message::{Message, minify_json};
use super::super::revision::{Revision, RevisionKind};
use super::super::session::Summary;
use super::super::validation::FieldError;
use super::super::{json_validation, tokens};
use super::revision::validate;
use super::{EndLine, Fingerprint, HeaderLine, Kind, LineError, MessageLine, VERSION, hex, read};
use sha2::{Digest as _, Sha256};
use std::collections::HashSet;
use time::{OffsetDateTime, UtcOffset};

/// A message of an export, valid and counted.
#[derive(Clone, Debug, PartialEq)]
pub struct ImportedMessage {
    /// Its place.
    pub seq: i64,
    /// When it was stored first; `None`: the file doesn't say.
    pub created_at: Option<OffsetDateTime>,
    /// The message.
    pub message: Message,
    /// Its tokens.
    pub tokens: i64,
}

/// What a line holds that has to be kept.
#[derive(Clone, Debug, PartialEq)]
pub enum Entry {
    /// Nothing: the first, the last, or an empty line.
    Nothing,
    /// A message.
    Message(Box<ImportedMessage>),
    /// A revision.
    Revision(Box<Revision>),
}

/// What a whole, sound export says of its session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImportedSession {
    /// Whose session it was; `None`: the file doesn't say.
    pub user_id: Option<UserId>,
    /// A JSON object; `None`: the file doesn't say.
    pub metadata: Option<String>,
    /// When the session began, and its last activity; `None`: the file doesn't say.
    pub times: Option<(OffsetDateTime, OffsetDateTime)>,
    /// How many messages.
    pub last_seq: i64,
    /// Tokens of all messages.
    pub tokens: i64,
    /// How many revisions.
    pub revision: i64,
    /// The cursor after the last of them.
    pub cursor: i64,
    /// The summary after the last of them.
    pub summary: Summary,
    /// See [`Fingerprint`].
    pub fingerprint: String,
    /// It is a file of messages alone.
    pub bare: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Start,
    /// Among the messages, or the revisions behind them.
    Record,
    /// A file of messages alone.
    Chat,
    End,
}

/// Reads an export line by line.
#[derive(Clone, Debug)]
pub struct ExportReader {
    sizes: SizeLimits,
    place: Place,
    line: u64,
    header: Option<Header>,
    last_seq: i64,
    tokens: i64,
    last_time: OffsetDateTime,
    revision: i64,
    cursor: i64,
    summary: Summary,
    /// Hashes of the states that a restore may go back to: 32 bytes for each revision.
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

type Checked<T> = Result<T, Vec<FieldError>>;

fn wrong<T>(field: &str, detail: impl Into<String>) -> Checked<T> {
    Err(vec![FieldError { field: field.to_owned(), detail: detail.into() }])
}

/// A time as it can be kept: since 1970, in microseconds, in UTC.
fn kept(time: OffsetDateTime, field: &str) -> Checked<OffsetDateTime> {
    let Some(time) = time.checked_to_offset(UtcOffset::UTC) else {
        return wrong(field, "must not be after the year 9999 of UTC");
    };
    if time < OffsetDateTime::UNIX_EPOCH {
        return wrong(field, "must not be before 1970");
    }
    Ok(time.replace_nanosecond(time.microsecond() * 1000).unwrap_or(time))
}

fn state(cursor: i64, text: &str) -> [u8; 32] {
    let mut hash = Sha256::new();
    hash.update(cursor.to_le_bytes());
    hash.update(text);
    hash.finalize().into()
}

impl ExportReader {
    /// Of nothing yet; messages and metadata must be within these limits.
    #[must_use]
    pub fn new(sizes: SizeLimits) -> Self {
        Self {
            sizes,
            place: Place::Start,
            line: 0,
            header: None,
            last_seq: 0,
            tokens: 0,
            last_time: OffsetDateTime::UNIX_EPOCH,
            revision: 0,
            cursor: 0,
            summary: Summary::default(),
            states: HashSet::from([state(0, "")]),
            hash: Sha256::new(),
            fingerprint: Fingerprint::new(false),
        }
    }

    /// Reads the next line, without its line feed.
    ///
    /// # Errors
    /// It is wrong, or has no place here. Nothing can be read afterwards.
    pub fn line(&mut self, line: &[u8]) -> Result<Entry, LineError> {
        self.line += 1;
        self.read(line).map_err(|wrong| self.error(wrong))
    }

    /// What is wrong with the line that was read last, or is being read.
    #[must_use]
    pub fn error(&self, wrong: Vec<FieldError>) -> LineError {
        LineError { line: self.line, wrong }
    }

    /// How many messages the first line promises; 0 where it promises none.
    #[must_use]
    pub fn promised(&self) -> i64 {
        self.header.as_ref().map_or(0, |header| header.messages)
    }

    /// How many messages were read.
    #[must_use]
    pub fn messages(&self) -> i64 {
        self.last_seq
    }

    /// Ends the reading.
    ///
    /// # Errors
    /// The export is cut off, or empty.
    pub fn finish(mut self) -> Result<ImportedSession, LineError> {
        let cut_off =
            "the export is cut off here: its last line, {\"end\": …}, is missing. Make the export again";
        let outcome = match self.place {
            Place::Start => {
                self.line = 1;
                wrong("", "there is nothing in it: send an export, or one message per line")
            }
            Place::Record => wrong("", cut_off),
            Place::Chat | Place::End => Ok(()),
        };
        outcome.map_err(|wrong| self.error(wrong))?;
        let header = self.header;
        Ok(ImportedSession {
            user_id: header.as_ref().map(|header| header.user_id.clone()),
            metadata: header.as_ref().map(|header| header.metadata.clone()),
            times: header.as_ref().map(|header| (header.created_at, header.updated_at)),
            last_seq: self.last_seq,
            tokens: self.tokens,
            revision: self.revision,
            cursor: self.cursor,
            summary: self.summary,
            fingerprint: self.fingerprint.finish(),
            bare: header.is_none(),
        })
    }

    fn read(&mut self, line: &[u8]) -> Checked<Entry> {
        let Ok(text) = std::str::from_utf8(line) else {
            return wrong("", "is not UTF-8");
        };
        if text.trim_ascii().is_empty() {
            return Ok(Entry::Nothing);
        }
        let text = text.trim_ascii();
        let kind = Kind::of(text).map_err(|invalid| vec![invalid])?;
        if let Err(error) = json_validation::check_depth_and_encoding(text, kind.levels()) {
            return if error.is_data() {
                wrong("", format!("is nested deeper than {} levels", kind.levels()))
            } else {
                wrong("", "has a \\u escape that is incomplete, or half a surrogate pair")
            };
        }
        let entry = match (self.place, kind) {
            (Place::Start, Kind::Header) => self.header(read(text)?)?,
            (Place::Start | Place::Chat, Kind::Chat) => self.chat(text)?,
            (Place::Record, Kind::Message) => self.message(&read(text)?)?,
            (Place::Record, Kind::Revision) => self.revision(validate(read(text)?)?)?,
            (Place::Record, Kind::End) => self.end(&read(text)?)?,
            (Place::End, _) => return wrong("", "stands behind the last line of the export"),
            (Place::Start, _) => {
                return wrong("", "the first line of an export is {\"precis_export\": 1, \"session\": …}");
            }
            (Place::Chat, _) => {
                return wrong("", "is no message: the lines before it are messages of the chat format");
            }
            (Place::Record, _) => return wrong("", "is no line that an export has behind its first"),
        };
        self.hash.update(line);
        self.hash.update(b"\n");
        Ok(entry)
    }

    fn header(&mut self, line: HeaderLine) -> Checked<Entry> {
        if line.precis_export != VERSION {
            let detail = format!("must be {VERSION}: this version of precis reads no other format");
            return wrong("precis_export", detail);
        }
        let session = line.session;
        let id = |field: &str, error: super::super::id::InvalidId| {
            vec![FieldError { field: field.to_owned(), detail: error.to_string() }]
        };
        SessionId::new(session.session_id).map_err(|error| id("session.session_id", error))?;
        let user_id = UserId::new(session.user_id).map_err(|error| id("session.user_id", error))?;
        let metadata = minify_json(session.metadata.get());
        if !metadata.starts_with('{') {
            return wrong("session.metadata", "must be a JSON object");
        }
        self.sizes.metadata("session.metadata", &metadata).map_err(|invalid| vec![invalid])?;
        let created_at = kept(session.created_at, "session.created_at")?;
        let updated_at = kept(session.updated_at, "session.updated_at")?;
        if updated_at < created_at {
            return wrong("session.updated_at", "must not be before created_at");
        }
        if line.messages < 1 {
            return wrong("messages", "must be 1 or more: a session begins with its first message");
        }
        if line.revisions < 0 {
            return wrong("revisions", "must not be negative");
        }
        let (messages, revisions) = (line.messages, line.revisions);
        self.header = Some(Header { user_id, metadata, created_at, updated_at, messages, revisions });
        (self.place, self.last_time) = (Place::Record, created_at);
        Ok(Entry::Nothing)
    }

    fn chat(&mut self, text: &str) -> Checked<Entry> {
        if self.place == Place::Start {
            (self.place, self.fingerprint) = (Place::Chat, Fingerprint::new(true));
        }
        let message: &serde_json::value::RawValue = read(text)?;
        self.keep("", Message::parse(message)?, None)
    }

    fn message(&mut self, line: &MessageLine<'_>) -> Checked<Entry> {
        let next = self.last_seq + 1;
        if self.revision > 0 {
            return wrong("", "is a message behind a revision: all messages come first");
        }
        if line.seq != next {
            return wrong("seq", format!("must be {next}: messages are numbered 1, 2, 3 …"));
        }
        let created_at = kept(line.created_at, "created_at")?;
        let latest = self.header.as_ref().map_or(created_at, |header| header.updated_at);
        if created_at < self.last_time || created_at > latest {
            return wrong(
                "created_at",
                "must not be before the message before it, nor outside of the session's time",
            );
        }
        let message = Message::parse(line.message).map_err(|mut wrong| {
            for invalid in &mut wrong {
                let join = if invalid.field.is_empty() { "" } else { "." };
                invalid.field = format!("message{join}{}", invalid.field);
            }
            wrong
        })?;
        self.last_time = created_at;
        self.keep("message", message, Some(created_at))
    }

    fn keep(&mut self, field: &str, message: Message, created_at: Option<OffsetDateTime>) -> Checked<Entry> {
        self.sizes.message(field, &message).map_err(|invalid| vec![invalid])?;
        let tokens = tokens::count_message(&message);
        self.last_seq += 1;
        self.tokens = self.tokens.saturating_add(tokens);
        let at = created_at.unwrap_or(OffsetDateTime::UNIX_EPOCH);
        if self.fingerprint.message(self.last_seq, at, message.json()).is_err() {
            return wrong("", "is not JSON");
        }
        Ok(Entry::Message(Box::new(ImportedMessage { seq: self.last_seq, created_at, message, tokens })))
    }

    fn revision(&mut self, mut revision: Revision) -> Checked<Entry> {
        let next = self.revision + 1;
        if revision.revision != next {
            return wrong("revision", format!("must be {next}: revisions are numbered 1, 2, 3 …"));
        }
        if revision.cursor > self.last_seq {
            return wrong("cursor", format!("must be at most {}, the last message", self.last_seq));
        }
        let reached = state(revision.cursor, &revision.summary.text);
        match revision.kind {
            RevisionKind::Consolidation => {
                let (first, last) = (self.cursor + 1, revision.cursor);
                if revision.range() != Some((first, last)) || last < first {
                    let detail = format!(
                        "from_seq must be {first}, behind the cursor before it, and to_seq its cursor"
                    );
                    return wrong("from_seq", detail);
                }
            }
            RevisionKind::Restore => {
                let bare = revision.from_seq.is_none()
                    && revision.to_seq.is_none()
                    && revision.meta.is_none()
                    && revision.provenance.is_none();
                if !bare || !revision.added.is_empty() {
                    return wrong("kind", "a restore has no range, provenance, meta or added text");
                }
                if !self.states.contains(&reached) {
                    return wrong(
                        "cursor",
                        "a restore has cursor and text of a revision before it, or 0 and \"\"",
                    );
                }
            }
        }
        revision.created_at = kept(revision.created_at, "created_at")?;
        if self.fingerprint.revision(&revision).is_err() {
            return wrong("", "is not JSON");
        }
        self.states.insert(reached);
        (self.revision, self.cursor, self.summary) = (next, revision.cursor, revision.summary.clone());
        Ok(Entry::Revision(Box::new(revision)))
    }

    fn end(&mut self, EndLine { end }: &EndLine) -> Checked<Entry> {
        let promised = self.header.as_ref().map_or((0, 0), |header| (header.messages, header.revisions));
        for (field, said, promised, read) in [
            ("end.messages", end.messages, promised.0, self.last_seq),
            ("end.revisions", end.revisions, promised.1, self.revision),
        ] {
            if said != read || promised != read {
                let detail = format!(
                    "{read} were read, the last line says {said}, the first {promised}: lines are missing"
                );
                return wrong(field, detail);
            }
        }
        if end.sha256 != hex(&self.hash.clone().finalize()) {
            return wrong(
                "end.sha256",
                "is not the checksum of the lines before: the export was changed after it was made",
            );
        }
        self.place = Place::End;
        Ok(Entry::Nothing)
    }
}
