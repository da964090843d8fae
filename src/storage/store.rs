//! The interface of a store. [`Postgres`](super::postgres) and [`SQLite`](super::sqlite) implement it, and the
//! conformance suite tests every method on both.
//!
//! A method is one intention and one transaction. Absence is `Ok(None)`. Times come from the clock of the store (the
//! database server's, if there is one), so the clocks of replicas need not agree.

use super::StoreError;
use super::search::{MessageRef, SearchFilter, StoredHit, TermStatistics};
use super::search_index::{IndexState, ReindexRange};
use crate::domain::api_key::{self, KeyHash, KeyId, KeyRecord};
use crate::domain::exchange::{Exchange, IdempotencyKey, PersistedExchange};
use crate::domain::export_format::{ImportedMessage, ImportedSession};
use crate::domain::id::{KeyName, SessionId, TenantId, UserId};
use crate::domain::memory::MemoryDocument;
use crate::domain::message::Message;
use crate::domain::message_metadata::{ContextMessage, MessageMetadata};
use crate::domain::revision::{MetaConsolidation, Provenance, Revision};
use crate::domain::search::lexemes::TermQuery;
use crate::domain::session::{Session, Summary};
use async_trait::async_trait;
use std::fmt;
use std::time::Duration;
use time::OffsetDateTime;
use tokio::sync::mpsc;
use uuid::Uuid;

/// The database behind the service.
#[async_trait]
pub trait Store: Send + Sync + fmt::Debug {
    /// Applies all pending migrations.
    async fn migrate(&self) -> Result<(), StoreError>;

    /// Returns an error if the database is unavailable or its schema is not the one of this version.
    async fn check_ready(&self) -> Result<(), StoreError>;

    /// Closes all connections. Later calls fail.
    async fn close(&self);

    // API keys. Only here is the tenant not an argument but a result.

    /// Stores a key. Returns `None`, and stores nothing, if the id exists already.
    async fn create_api_key(&self, key: &NewApiKey) -> Result<Option<KeyRecord>, StoreError>;

    /// Returns a key, revoked or not.
    async fn api_key(&self, id: &KeyId) -> Result<Option<StoredApiKey>, StoreError>;

    /// Returns the keys of one tenant or of all, oldest first, including revoked keys.
    async fn api_keys(&self, tenant: Option<&TenantId>) -> Result<Vec<KeyRecord>, StoreError>;

    /// Revokes a key permanently; a second call keeps the time of the first. Returns `false` if there is no such key.
    async fn revoke_api_key(&self, id: &KeyId) -> Result<bool, StoreError>;

    /// Returns `true` if a key was ever created, even if all keys are revoked.
    async fn any_api_key(&self) -> Result<bool, StoreError>;

    // Exchanges and messages.

    /// Appends the messages of an exchange, and creates the session if it does not exist. `seq` is allocated in the
    /// same transaction, without gaps or duplicates under concurrent writes. Idempotency keys are kept for at least 24
    /// hours.
    async fn append_exchange(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        exchange: &Exchange,
        key: Option<&IdempotencyKey>,
    ) -> Result<AppendOutcome, StoreError>;

    /// Returns a page of the history, or `None` if the session does not exist.
    async fn messages(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        query: MessageQuery,
    ) -> Result<Option<Vec<StoredMessage>>, StoreError>;

    /// Returns the metadata of at most `limit` messages after `after_seq`, in order.
    async fn message_metadata(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        after_seq: i64,
        limit: i64,
    ) -> Result<Vec<MessageMetadata>, StoreError>;

    /// Returns a range of the history, oldest first. The result is empty if the range or the session is.
    async fn message_range(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        range: MessageRange,
    ) -> Result<Vec<StoredMessage>, StoreError>;

    // Sessions and users.

    async fn session(&self, tenant: &TenantId, session: &SessionId) -> Result<Option<Session>, StoreError>;

    /// Returns at most `limit` sessions of one user or of all, most recent activity first.
    async fn sessions(
        &self,
        tenant: &TenantId,
        user: Option<&UserId>,
        after: Option<&SessionPosition>,
        limit: i64,
    ) -> Result<Vec<Session>, StoreError>;

    /// Replaces the metadata of a session, a JSON object.
    async fn set_metadata(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        metadata: &str,
    ) -> Result<Option<Session>, StoreError>;

    /// Erases a session with its history, summary, revisions and idempotency keys. Returns `false` if there was none.
    async fn erase_session(&self, tenant: &TenantId, session: &SessionId) -> Result<bool, StoreError>;

    /// Erases the memory document of a user, its versions and all sessions. Returns `false` if there was nothing.
    async fn erase_user(&self, tenant: &TenantId, user: &UserId) -> Result<bool, StoreError>;

    /// Creates a session with all of its rows in one transaction, or nothing. The caller must have all batches at hand
    /// and never wait for a client in between, because other writers wait for the transaction: on Postgres those of
    /// the same session, on SQLite all. Rows without a time get the time of the store.
    async fn import_session(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        user: &UserId,
        archive: &ImportedSession,
        batches: RowBatches,
    ) -> Result<ImportOutcome, StoreError>;

    // Contexts and memory documents.

    /// Reads the session, the memory document and the newest `limit` messages of the tail in one round trip and as of
    /// one moment. `user` applies only if the session does not exist.
    async fn load_context(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        user: &UserId,
        limit: usize,
    ) -> Result<ContextSnapshot, StoreError>;

    async fn memory_document(
        &self,
        tenant: &TenantId,
        user: &UserId,
    ) -> Result<Option<MemoryDocument>, StoreError>;

    /// Replaces the memory document if `expected` is `None` or its current version (0 if it was never written).
    /// Returns `None` if the version differs.
    async fn write_memory_document(
        &self,
        tenant: &TenantId,
        user: &UserId,
        document: NewMemoryDocument<'_>,
        expected: Option<i64>,
    ) -> Result<Option<MemoryDocument>, StoreError>;

    /// Returns at most `limit` versions before `before`, newest first, including the current one.
    async fn memory_revisions(
        &self,
        tenant: &TenantId,
        user: &UserId,
        before: i64,
        limit: i64,
    ) -> Result<Vec<MemoryDocument>, StoreError>;

    // Consolidation.

    /// Takes the lease of a session for `ttl` and returns the state of the session. Returns `None` if the session does
    /// not exist, the condition does not hold, or another holder has the lease. A lease that has more than twice `ttl`
    /// left counts as expired: the clock was set back after it was taken.
    async fn take_lease(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        token: Uuid,
        condition: LeaseCondition,
        ttl: Duration,
    ) -> Result<Option<Session>, StoreError>;

    /// Extends the lease to `ttl` from now. Returns `false` if `token` does not hold it.
    async fn renew_lease(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        token: Uuid,
        ttl: Duration,
    ) -> Result<bool, StoreError>;

    /// Ends the lease if `token` holds it.
    async fn release_lease(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        token: Uuid,
    ) -> Result<(), StoreError>;

    /// Commits summary, cursor and revision together and clears the failure state. The lease stays. Returns `None`,
    /// and writes nothing, if summary or cursor have changed, `token` does not hold the lease, or the session was
    /// erased.
    async fn commit_revision(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        token: Uuid,
        revision: &NewRevision,
    ) -> Result<Option<Revision>, StoreError>;

    /// Records a failed consolidation, ends the lease, and returns the time of the next permitted attempt. Returns
    /// `None` if `token` does not hold the lease.
    async fn record_failure(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        token: Uuid,
        retry_in: Duration,
        reason: &str,
    ) -> Result<Option<OffsetDateTime>, StoreError>;

    /// Adds to the tokens that the tenant used today (UTC, by the clock of the store). The sum stops at `i64::MAX`.
    async fn add_token_usage(&self, tenant: &TenantId, tokens: u64) -> Result<(), StoreError>;

    async fn tokens_used_today(&self, tenant: &TenantId) -> Result<i64, StoreError>;

    /// Returns at most `limit` revisions before `before`, newest first, or `None` if the session does not exist.
    async fn revisions(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        before: i64,
        limit: i64,
    ) -> Result<Option<Vec<Revision>>, StoreError>;

    async fn revision(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        revision: i64,
    ) -> Result<Option<Revision>, StoreError>;

    /// Appends a revision that sets summary and cursor back to those of `revision` (0 = no summary). Returns `None` if
    /// the session or the revision does not exist. A running consolidation then loses its result.
    async fn restore_revision(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        revision: i64,
    ) -> Result<Option<Revision>, StoreError>;

    // Search.

    // The number of rows that a method reads is bounded by its limit, by the number of matches, or by both.

    /// Counts the matches of each query among the `sample_size` newest messages of the session of the filter, or of the
    /// tenant.
    async fn term_statistics(
        &self,
        tenant: &TenantId,
        filter: &SearchFilter,
        queries: &[TermQuery],
        sample_size: i64,
    ) -> Result<TermStatistics, StoreError>;

    /// Returns for each query the `limit` matching messages that were indexed last. Uses the full-text index; the cost
    /// grows with the number of matches.
    async fn lookup_terms(
        &self,
        tenant: &TenantId,
        filter: &SearchFilter,
        queries: &[TermQuery],
        limit: i64,
    ) -> Result<Vec<Vec<MessageRef>>, StoreError>;

    /// Returns the `limit` newest matches among the `max_scanned` newest messages of the session, or of the tenant, in the
    /// time range of the filter. For terms of which the full-text index has too many matches.
    async fn scan_recent(
        &self,
        tenant: &TenantId,
        filter: &SearchFilter,
        query: &TermQuery,
        max_scanned: i64,
        limit: i64,
    ) -> Result<Vec<MessageRef>, StoreError>;

    /// Returns the messages in the order of `refs`, until their JSON exceeds `max_bytes`. Messages larger than
    /// [`LARGE_MESSAGE_BYTES`](super::search::LARGE_MESSAGE_BYTES) are considered last. With a user, only messages in
    /// sessions of the user.
    async fn fetch_hits(
        &self,
        tenant: &TenantId,
        user: Option<&UserId>,
        refs: &[MessageRef],
        max_bytes: i64,
    ) -> Result<Vec<StoredHit>, StoreError>;

    /// Returns the messages up to `distance` before and after each of `refs`, without duplicates and unordered, until their
    /// JSON exceeds `max_bytes`. Neighbours of the first references come first, and the nearest before others.
    async fn fetch_neighbours(
        &self,
        tenant: &TenantId,
        refs: &[MessageRef],
        distance: i64,
        max_bytes: i64,
    ) -> Result<Vec<StoredHit>, StoreError>;

    // The search index.

    /// Returns the state of the index. A new index records `version` as its analyzer version.
    async fn index_state(&self, version: &str) -> Result<IndexState, StoreError>;

    /// Indexes a batch of pending messages, oldest first, except those that another replica is indexing. Returns `true` if
    /// there may be more. After the last batch, Postgres also flushes the pending list of its full-text index.
    async fn index_batch(&self) -> Result<bool, StoreError>;

    /// Indexes all pending messages of a tenant, or of one of its sessions, so that a search finds everything that was
    /// stored before this call. Waits a limited time for messages that another replica is indexing.
    async fn index_pending_for(
        &self,
        tenant: &TenantId,
        session: Option<&SessionId>,
    ) -> Result<(), StoreError>;

    /// Records that new messages are not indexed any more. A later `start_reindex` then rebuilds the index.
    async fn disable_index(&self) -> Result<(), StoreError>;

    /// Records the analyzer version. If it differs from the recorded one, all messages must be reindexed.
    async fn start_reindex(&self, version: &str) -> Result<(), StoreError>;

    /// Returns a range of messages of any tenant that must be reindexed, or `None` if there is none.
    async fn next_reindex_range(&self) -> Result<Option<ReindexRange>, StoreError>;

    /// Replaces the index entries of these messages, and records `done_seq` as the progress of the range. Does nothing if
    /// the session was erased or another process has advanced the range.
    async fn reindex_messages(
        &self,
        range: &ReindexRange,
        messages: &[(MessageRef, Message)],
        done_seq: i64,
    ) -> Result<(), StoreError>;
}

#[derive(Clone, Debug)]
pub struct NewApiKey {
    pub id: KeyId,
    pub hash: KeyHash,
    pub tenant: TenantId,
    pub name: Option<KeyName>,
    pub scope: api_key::Scope,
}

#[derive(Clone, Debug)]
pub struct StoredApiKey {
    pub record: KeyRecord,
    pub hash: KeyHash,
}

/// The result of [`Store::append_exchange`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AppendOutcome {
    /// The exchange is durable. It may have been stored earlier by a request with the same key.
    Appended(PersistedExchange),
    /// The session belongs to another user. Nothing was written.
    UserMismatch,
    /// The idempotency key was used for another exchange. Nothing was written.
    KeyReused,
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

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredMessage {
    pub seq: i64,
    pub created_at: OffsetDateTime,
    /// The JSON of the client without the white space between its tokens.
    pub json: String,
}

/// A position in the list of sessions: the sort key of the last session of a page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionPosition {
    pub updated_at: OffsetDateTime,
    pub session_id: SessionId,
}

/// A part of the rows of an import.
#[derive(Clone, Debug)]
pub enum RowBatch {
    /// Messages in order.
    Messages(Vec<ImportedMessage>),
    /// Revisions in order, after all messages.
    Revisions(Vec<Revision>),
}

pub type RowBatches = mpsc::Receiver<RowBatch>;

/// The result of [`Store::import_session`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImportOutcome {
    /// The session is complete and durable.
    Imported,
    /// A session with this id exists. Nothing was written.
    Exists,
    /// The number of rows differs from that in the header of the archive. Nothing was written.
    Incomplete,
}

/// The inputs of a context, as of one moment.
#[derive(Clone, Debug)]
pub struct ContextSnapshot {
    /// The moment, by the clock of the store.
    pub now: OffsetDateTime,
    /// `None` before the first exchange.
    pub session: Option<Session>,
    /// The memory document of the owner of the session, or of the requesting user if there is no session.
    pub memory: Option<MemoryDocument>,
    /// The newest messages of the tail, oldest first.
    pub tail: Vec<ContextMessage>,
}

/// A memory document to write.
#[derive(Clone, Copy, Debug)]
pub struct NewMemoryDocument<'a> {
    /// Markdown.
    pub content: &'a str,
    /// Number of words by Unicode word boundaries.
    pub words: i64,
    pub tokens: i64,
}

/// A condition on the session that must hold for taking the lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeaseCondition {
    /// The session is still at this revision and not in backoff after a failure.
    IfDue {
        /// The revision that the decision to consolidate was based on.
        revision: i64,
    },
    /// No condition: a client requested the consolidation.
    Force,
}

impl LeaseCondition {
    /// Returns the revision that the session must be at.
    pub(super) fn revision(self) -> Option<i64> {
        match self {
            Self::IfDue { revision } => Some(revision),
            Self::Force => None,
        }
    }
}

/// A revision to commit: a range of messages and the summary that covers it.
#[derive(Clone, Debug)]
pub struct NewRevision {
    /// The revision that the session must be at.
    pub base_revision: i64,
    /// The cursor that the session must have.
    pub base_cursor: i64,
    /// The new cursor.
    pub cursor: i64,
    /// Sum of the tokens of the messages between both cursors.
    pub range_tokens: i64,
    /// The complete new summary.
    pub summary: Summary,
    /// The text written for the range.
    pub added: String,
    /// `None` if the range contained no text, so that no model was called.
    pub provenance: Option<Provenance>,
    /// The meta-consolidation that followed.
    pub meta: Option<MetaConsolidation>,
}
