//! The error of the service.

use crate::capacity::Overloaded;
use crate::domain::export_format::LineError;
use crate::domain::search::query::InvalidQuery;
use crate::domain::sync::Divergence;
use crate::domain::tokens::Tokenizer;
use crate::storage::StoreError;

/// The error of an operation of the service.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The session does not exist, or it belongs to another tenant.
    #[error("no such session")]
    SessionNotFound,
    #[error("no such revision")]
    RevisionNotFound,
    #[error("the session has no message {seq}; its last one is {last_seq}")]
    MessageNotFound { seq: i64, last_seq: i64 },
    /// A restore leads to a revision without its summary.
    #[error("the texts of the revision were removed, because message {redacted_seq} was redacted")]
    RevisionRedacted { redacted_seq: i64 },
    /// An edit is based on another revision than the present one.
    #[error("the session is at revision {revision}, and the edit is based on {based_on}")]
    RevisionMismatch { based_on: i64, revision: i64 },
    /// There is no summary to edit.
    #[error("the session has no summary")]
    SummaryMissing,
    #[error("no such user")]
    UserNotFound,
    /// The session is bound to another user.
    #[error("the session belongs to another user")]
    SessionUserMismatch,
    #[error("the idempotency key was used for another exchange")]
    IdempotencyKeyReused,
    #[error("the last message of the session is {last_seq}, expected was {expected:?}")]
    LastSeqMismatch { expected: Option<i64>, last_seq: i64 },
    /// A message of a client's list is not the stored one.
    #[error("{0}")]
    HistoryDiverged(Divergence),
    #[error("{new} messages are new; at most {max_new} are allowed")]
    TooManyMessages {
        new: usize,
        /// The setting `limits.max_messages_per_exchange`.
        max_new: usize,
    },
    #[error("the memory document is at another version")]
    VersionMismatch,
    #[error("the memory document has {bytes} bytes; at most {max_bytes} are allowed")]
    MemoryTooLarge {
        bytes: usize,
        /// The setting `memory.max_bytes`.
        max_bytes: usize,
    },
    /// System message, newest turn and user message exceed the window.
    #[error("{needed} tokens are needed; at most {max_tokens} are allowed, without {reserved} reserved ones")]
    BudgetTooSmall { max_tokens: i64, reserved: i64, needed: i64, tokenizer: Tokenizer },
    #[error("the query {0}")]
    InvalidQuery(#[from] InvalidQuery),
    #[error("search is disabled")]
    SearchDisabled,
    #[error("consolidation is disabled")]
    ConsolidationDisabled,
    #[error("another consolidation of the session is running")]
    ConsolidationInProgress,
    #[error("consolidation failed: {0}")]
    ConsolidationFailed(String),
    /// A line of an import is invalid.
    #[error(transparent)]
    Import(#[from] LineError),
    #[error("an import may have at most {max_bytes} bytes")]
    ImportTooLarge {
        /// The setting `limits.max_import_bytes`.
        max_bytes: u64,
    },
    /// An import targets an existing session with other contents.
    #[error("another session has this id")]
    SessionExists,
    /// A fork or a rewind names a message after the last one.
    #[error("the session has no message {seq}; its last one is {last_seq}")]
    AfterEnd { field: &'static str, seq: i64, last_seq: i64 },
    #[error("{messages} messages would be copied; at most {max_messages} are allowed")]
    CopyTooLarge {
        messages: i64,
        /// The setting `limits.max_fork_messages`.
        max_messages: usize,
    },
    /// The setting `sessions.allow_rewind` is false.
    #[error("rewinding sessions is not allowed")]
    RewindForbidden,
    #[error("the directory for temporary files can't be used")]
    StagingFile(#[source] std::io::Error),
    /// The memory for the work did not become free in time.
    #[error(transparent)]
    Overloaded(#[from] Overloaded),
    #[error(transparent)]
    Store(#[from] StoreError),
}
