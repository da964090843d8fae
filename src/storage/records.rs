//! The values that the methods of the [`Store`](super::Store) take and return.

use crate::domain::exchange::{Exchange, IdempotencyKey, PersistedExchange, StoredMessage};
use crate::domain::id::{SessionId, TenantId, UserId};
use crate::domain::message::Role;
use crate::domain::search::MessageRef;
use crate::domain::search::analyzer::{Analyzer, Language};
use crate::domain::session::ConsolidationState;
use std::sync::Arc;
use std::time::Duration;
use time::OffsetDateTime;
use uuid::Uuid;

/// The connections of a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectionCounts {
    pub open: usize,
    /// Open connections that no statement uses.
    pub idle: usize,
    pub max: usize,
}

impl ConnectionCounts {
    pub(super) fn of<D: sqlx::Database>(pool: &sqlx::Pool<D>) -> Self {
        let max = usize::try_from(pool.options().get_max_connections()).unwrap_or(usize::MAX);
        Self { open: usize::try_from(pool.size()).unwrap_or(usize::MAX), idle: pool.num_idle(), max }
    }
}

#[derive(Clone, Debug)]
pub struct StoreOptions {
    /// Largest number of connections.
    pub max_connections: u32,
    /// Longest wait for a free connection.
    pub acquire_timeout: Duration,
    /// Longest duration of a statement on Postgres. The connection is closed then.
    pub statement_timeout: Duration,
    /// The analyzer that messages are indexed with. `None` disables search.
    pub search: Option<Analyzer>,
    /// The part of the connections that one key can hold.
    pub key_share: f64,
}

/// Facts about a database that an operator may have to change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DatabaseFacts {
    /// The clock of the database.
    pub time: OffsetDateTime,
    /// On Postgres, row-level security does not apply to the role.
    pub bypasses_row_security: bool,
    /// On Postgres, the name of a table whose row-level security does not apply to the role.
    pub unprotected_table: Option<String>,
    /// Other users of the machine can read the SQLite file.
    pub is_public_file: bool,
    /// The role can create the tables of a new database, or owns those of an existing one.
    pub can_migrate: bool,
    /// The name of a table that is in the way of the first migration.
    pub foreign_table: Option<String>,
    /// The name of a table that the role can't read or write.
    pub inaccessible_table: Option<String>,
    /// Kind and name of an object of the newest schema that the database lacks, such as `table messages`. One without which
    /// statements fail comes before an `index`, which only makes them faster.
    pub missing_object: Option<String>,
}

/// An exchange to append to a session.
#[derive(Clone, Debug)]
pub struct AppendRequest {
    pub tenant: TenantId,
    pub session: SessionId,
    pub exchange: Arc<Exchange>,
    pub key: Option<IdempotencyKey>,
    /// The incarnation that the session must have, in addition to [`Exchange::expected_last_seq`]. An exchange that names the
    /// user of a session without a user changes the incarnation: bind the session first.
    pub expected_incarnation: Option<Uuid>,
    /// The user of the session if it has none and the exchange names none.
    pub default_user: Option<UserId>,
    /// The store sets it if search is enabled.
    pub terms: Option<ExchangeTerms>,
}

impl AppendRequest {
    #[must_use]
    pub fn new(
        tenant: &TenantId,
        session: &SessionId,
        exchange: Exchange,
        key: Option<IdempotencyKey>,
    ) -> Self {
        let (tenant, session, exchange) = (tenant.clone(), session.clone(), Arc::new(exchange));
        Self { tenant, session, exchange, key, expected_incarnation: None, default_user: None, terms: None }
    }
}

/// The owner of a session.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SessionOwner {
    /// `None` until a request names a user.
    pub user: Option<UserId>,
    /// `true` from the first exchange on.
    pub exists: bool,
}

/// The result of [`Store::append_exchange`](super::Store::append_exchange).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AppendOutcome {
    /// The exchange is durable. It may have been stored earlier by a request with the same key.
    Appended(PersistedExchange),
    /// The session belongs to another user. Nothing was written.
    UserMismatch,
    /// The idempotency key was used for another exchange. Nothing was written.
    KeyReused,
    /// The last message of the session is not the expected one. Nothing was written.
    LastSeqMismatch {
        /// The `seq` of the last message; 0 if there is none.
        last_seq: i64,
    },
}

/// The selection and order of a page of messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MessageQuery {
    /// Exclusive lower bound; 0 = none.
    pub after_seq: i64,
    /// Exclusive upper bound; `i64::MAX` = none.
    pub before_seq: i64,
    /// Newest first.
    pub descending: bool,
    /// Largest number of messages.
    pub limit: i64,
    /// The page ends with the message that exceeds this sum of sizes, so that it has at least one message.
    pub max_bytes: i64,
}

/// A page of messages.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MessagePage {
    pub messages: Vec<StoredMessage>,
    /// `true` if further messages follow in the order of the page.
    pub has_more: bool,
}

/// A page of a list. It may end early because its items are large.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Page<T> {
    pub items: Vec<T>,
    /// `true` if further items follow in the order of the page.
    pub has_more: bool,
}

/// A range of the history, bounded in number and size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MessageRange {
    /// Exclusive lower bound.
    pub after_seq: i64,
    /// Inclusive upper bound.
    pub last_seq: i64,
    /// Largest number of messages.
    pub limit: i64,
    /// Largest sum of message sizes. The first message is returned even if it is larger.
    pub max_bytes: i64,
}

/// The sessions of a list.
#[derive(Clone, Copy, Debug, Default)]
pub struct SessionFilter<'a> {
    pub user: Option<&'a UserId>,
    /// The session that the listed ones were forked from, or whose branches they are.
    pub forked_from: Option<&'a SessionId>,
}

/// A position in the list of sessions: the sort key of the last session of a page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionPosition {
    pub updated_at: OffsetDateTime,
    pub session_id: SessionId,
}

/// The version of a memory document. Documents with the same version have the same content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryVersion {
    /// Changes if the document is erased and written again.
    pub incarnation: Uuid,
    pub version: i64,
}

/// The part of a session that changes. Texts and messages do not change as long as incarnation, revision and memory
/// version are the same, except that messages are appended: a redaction, too, appends a revision.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionHead {
    /// The moment of the read, by the clock of the store.
    pub now: OffsetDateTime,
    /// Changes if the session is erased and created again, rewound or redacted.
    pub incarnation: Uuid,
    pub last_seq: i64,
    pub tokens: i64,
    pub cursor: i64,
    pub cursor_tokens: i64,
    pub revision: i64,
    pub consolidation: ConsolidationState,
    pub updated_at: OffsetDateTime,
    /// The memory document of the owner; `None` if there is none.
    pub memory: Option<MemoryVersion>,
}

/// The terms of the messages of an exchange.
#[derive(Clone, Debug)]
pub struct ExchangeTerms {
    /// That of the index.
    pub(super) analyzer: Analyzer,
    /// The language that the texts were recognised to be in, and analyzed by.
    pub(super) language: Option<Language>,
    /// `None` if the analysis of a message has failed.
    pub(super) of_messages: Vec<Option<String>>,
}

/// The messages to search. The default is all messages.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SearchFilter {
    pub session: Option<SessionId>,
    pub user: Option<UserId>,
    pub role: Option<Role>,
    /// Inclusive.
    pub since: Option<OffsetDateTime>,
    /// Exclusive.
    pub until: Option<OffsetDateTime>,
    /// This message and the following ones of its session are excluded: the client has them.
    pub unseen: Option<MessageRef>,
    /// Messages with any of these terms are excluded.
    pub excluded_terms: Vec<String>,
}
