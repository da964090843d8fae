//! The state of a session, without its messages.

use super::id::{SessionId, UserId};
use super::search::language::Language;
use super::{summary, tokens};
use serde::{Deserialize, Serialize};
use time::OffsetDateTime;
use utoipa::ToSchema;
use uuid::Uuid;

/// The window of a list, in tokens of the stored encoding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// Largest size of the list.
    pub tokens: i64,
    /// Size of the list without summary and history: system prompt, memory document, skills, and the new message.
    pub fixed: i64,
}

/// The state of a session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Session {
    /// Chosen by the client.
    pub session_id: SessionId,
    /// The owner. `None` until a request names a user; then it never changes.
    pub user_id: Option<UserId>,
    /// A JSON object as sent, without white space between tokens.
    pub metadata: String,
    /// `seq` of the newest message, which is also the number of messages. 0 if the session is only bound to its user: it
    /// exists from its first exchange on.
    pub last_seq: i64,
    /// Tokens of all messages.
    pub tokens: i64,
    /// Size of all messages as JSON, as of the time at which the row was read: contexts from copies in memory do not need it.
    pub stored_bytes: i64,
    /// `seq` of the last message that the summary covers; 0 if there is none.
    pub cursor: i64,
    /// Tokens of the messages that the summary covers.
    pub cursor_tokens: i64,
    pub summary: Summary,
    /// The newest revision; 0 if there is none.
    pub revision: i64,
    pub consolidation: ConsolidationState,
    /// The window of its latest context request, if that had one. Work in the background depends on it.
    pub window: Option<Window>,
    /// The language that its first messages were recognised to be in. Search analyses the session by it.
    pub language: Option<Language>,
    /// The session that it was copied from.
    pub forked_from: Option<ForkOrigin>,
    /// Identifies the session beyond its id: it changes if the session is erased and created again, if it
    /// is rewound, and if a message of it is redacted.
    pub incarnation: Uuid,
    /// Time of the first exchange.
    pub created_at: OffsetDateTime,
    /// Time of the newest exchange, fork or rewind.
    pub updated_at: OffsetDateTime,
}

/// The session and the message that a session was forked from, as of the fork.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ForkOrigin {
    pub session_id: SessionId,
    /// The last message that both sessions had in common.
    pub through_seq: i64,
    pub kind: ForkKind,
}

/// The operation that made a copy of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ForkKind {
    /// A client continues from an earlier message in a session of its own.
    Fork,
    /// A rewind removed messages from the session. The copy keeps all messages that the session had before.
    Rewind,
}

named_variants!(ForkKind { Fork = "fork", Rewind = "rewind" });

/// A summary and its size, which is computed once, when the summary is written.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Summary {
    /// Empty if there is no summary.
    pub text: String,
    pub words: i64,
    pub tokens: i64,
}

impl Summary {
    /// Measures a summary.
    pub fn new(text: String) -> Self {
        let words = i64::try_from(summary::words(&text)).unwrap_or(i64::MAX);
        Self { words, tokens: tokens::count_text(&text), text }
    }
}

/// The lease and the failures of a session's consolidation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ConsolidationState {
    /// Time at which the lease expires; `None` if no run holds it. It stays set, and expires, if the process of the run
    /// crashes.
    pub lease_until: Option<OffsetDateTime>,
    /// Number of failures since the last success.
    pub failures: i32,
    /// Earliest time of the next automatic run after a failure.
    pub retry_at: Option<OffsetDateTime>,
    /// Reason of the last failure. Clients see it, so it contains no conversation and no key.
    pub last_failure: Option<String>,
}

impl Session {
    /// Returns the number of messages after the cursor.
    pub fn tail_len(&self) -> i64 {
        self.last_seq - self.cursor
    }

    /// Returns the number of tokens of the messages after the cursor.
    pub fn tail_tokens(&self) -> i64 {
        self.tokens - self.cursor_tokens
    }
}
