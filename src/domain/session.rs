//! A session's state, as the store keeps it.

use super::id::{SessionId, UserId};
use time::OffsetDateTime;

/// Everything about a session but its messages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Session {
    /// Chosen by the client.
    pub session_id: SessionId,
    /// Never changes.
    pub user_id: UserId,
    /// A JSON object, as the client gave it.
    pub metadata: String,
    /// The `seq` of the newest message, which is also how many there are; 0 = none.
    pub last_seq: i64,
    /// Tokens of all messages.
    pub tokens: i64,
    /// The `seq` of the last message that the summary covers; 0 = none.
    pub cursor: i64,
    /// Tokens of the messages that the summary covers.
    pub cursor_tokens: i64,
    /// The rolling summary; empty where there is none.
    pub summary: Summary,
    /// The newest revision; 0 = none.
    pub revision: i64,
    /// Whether and when it may be consolidated.
    pub consolidation: ConsolidationState,
    /// When the first exchange came.
    pub created_at: OffsetDateTime,
    /// When the newest exchange came.
    pub updated_at: OffsetDateTime,
}

/// A summary with its measures, taken once, when it was written.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// The text.
    pub text: String,
    /// By Unicode word boundaries.
    pub words: i64,
    /// By the tokenizer of [`super::tokens`].
    pub tokens: i64,
}

/// What the attempts to consolidate a session left behind.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ConsolidationState {
    /// When the lease of the running consolidation ends by itself; `None` where none runs.
    pub lease_until: Option<OffsetDateTime>,
    /// Failures since the last success.
    pub failures: i32,
    /// Before this time it isn't tried again by itself.
    pub retry_at: Option<OffsetDateTime>,
    /// Why the last attempt failed; for the developer who asks.
    pub last_failure: Option<String>,
}

impl Session {
    /// Messages after the cursor.
    #[must_use]
    pub fn tail_len(&self) -> i64 {
        self.last_seq - self.cursor
    }

    /// Tokens of the messages after the cursor.
    #[must_use]
    pub fn tail_tokens(&self) -> i64 {
        self.tokens - self.cursor_tokens
    }
}
