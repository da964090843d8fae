//! The implementation of [`Store`] for both databases.

use super::StoreError;
use super::postgres::Postgres;
use super::search::{MessageRef, SearchFilter, StoredHit, TermStatistics};
use super::search_index::{IndexState, ReindexRange};
use super::sqlite::Sqlite;
use super::{
    AppendOutcome, ContextSnapshot, ImportOutcome, LeaseCondition, MessageQuery, MessageRange, NewApiKey,
    NewMemoryDocument, NewRevision, RowBatches, SessionPosition, Store, StoredApiKey, StoredMessage,
};
use crate::domain::api_key::{KeyId, KeyRecord};
use crate::domain::exchange::{Exchange, IdempotencyKey};
use crate::domain::export_format::ImportedSession;
use crate::domain::id::{SessionId, TenantId, UserId};
use crate::domain::memory::MemoryDocument;
use crate::domain::message::Message;
use crate::domain::message_metadata::MessageMetadata;
use crate::domain::revision::Revision;
use crate::domain::search::lexemes::TermQuery;
use crate::domain::session::Session;
use async_trait::async_trait;
use std::time::Duration;
use time::OffsetDateTime;
use uuid::Uuid;

/// A database of one of the two kinds.
#[derive(Debug)]
pub(super) enum Database {
    Postgres(Postgres),
    Sqlite(Sqlite),
}

/// Calls a method of the database.
macro_rules! dispatch {
    ($self:ident, $method:ident($($argument:ident),*)) => {
        match $self {
            Self::Postgres(database) => database.$method($($argument),*).await,
            Self::Sqlite(database) => database.$method($($argument),*).await,
        }
    };
}

#[async_trait]
impl Store for Database {
    async fn migrate(&self) -> Result<(), StoreError> {
        dispatch!(self, migrate())
    }

    async fn check_ready(&self) -> Result<(), StoreError> {
        dispatch!(self, check_ready())
    }

    async fn close(&self) {
        dispatch!(self, close())
    }

    async fn create_api_key(&self, key: &NewApiKey) -> Result<Option<KeyRecord>, StoreError> {
        dispatch!(self, create_api_key(key))
    }

    async fn api_key(&self, id: &KeyId) -> Result<Option<StoredApiKey>, StoreError> {
        dispatch!(self, api_key(id))
    }

    async fn api_keys(&self, tenant: Option<&TenantId>) -> Result<Vec<KeyRecord>, StoreError> {
        dispatch!(self, api_keys(tenant))
    }

    async fn revoke_api_key(&self, id: &KeyId) -> Result<bool, StoreError> {
        dispatch!(self, revoke_api_key(id))
    }

    async fn any_api_key(&self) -> Result<bool, StoreError> {
        dispatch!(self, any_api_key())
    }

    async fn append_exchange(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        exchange: &Exchange,
        key: Option<&IdempotencyKey>,
    ) -> Result<AppendOutcome, StoreError> {
        dispatch!(self, append_exchange(tenant, session, exchange, key))
    }

    async fn messages(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        query: MessageQuery,
    ) -> Result<Option<Vec<StoredMessage>>, StoreError> {
        dispatch!(self, messages(tenant, session, query))
    }

    async fn message_metadata(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        after_seq: i64,
        limit: i64,
    ) -> Result<Vec<MessageMetadata>, StoreError> {
        dispatch!(self, message_metadata(tenant, session, after_seq, limit))
    }

    async fn message_range(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        range: MessageRange,
    ) -> Result<Vec<StoredMessage>, StoreError> {
        dispatch!(self, message_range(tenant, session, range))
    }

    async fn session(&self, tenant: &TenantId, session: &SessionId) -> Result<Option<Session>, StoreError> {
        dispatch!(self, session(tenant, session))
    }

    async fn sessions(
        &self,
        tenant: &TenantId,
        user: Option<&UserId>,
        after: Option<&SessionPosition>,
        limit: i64,
    ) -> Result<Vec<Session>, StoreError> {
        dispatch!(self, sessions(tenant, user, after, limit))
    }

    async fn set_metadata(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        metadata: &str,
    ) -> Result<Option<Session>, StoreError> {
        dispatch!(self, set_metadata(tenant, session, metadata))
    }

    async fn erase_session(&self, tenant: &TenantId, session: &SessionId) -> Result<bool, StoreError> {
        dispatch!(self, erase_session(tenant, session))
    }

    async fn erase_user(&self, tenant: &TenantId, user: &UserId) -> Result<bool, StoreError> {
        dispatch!(self, erase_user(tenant, user))
    }

    async fn import_session(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        user: &UserId,
        archive: &ImportedSession,
        batches: RowBatches,
    ) -> Result<ImportOutcome, StoreError> {
        dispatch!(self, import_session(tenant, session, user, archive, batches))
    }

    async fn load_context(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        user: &UserId,
        limit: usize,
    ) -> Result<ContextSnapshot, StoreError> {
        dispatch!(self, load_context(tenant, session, user, limit))
    }

    async fn memory_document(
        &self,
        tenant: &TenantId,
        user: &UserId,
    ) -> Result<Option<MemoryDocument>, StoreError> {
        dispatch!(self, memory_document(tenant, user))
    }

    async fn write_memory_document(
        &self,
        tenant: &TenantId,
        user: &UserId,
        document: NewMemoryDocument<'_>,
        expected: Option<i64>,
    ) -> Result<Option<MemoryDocument>, StoreError> {
        dispatch!(self, write_memory_document(tenant, user, document, expected))
    }

    async fn memory_revisions(
        &self,
        tenant: &TenantId,
        user: &UserId,
        before: i64,
        limit: i64,
    ) -> Result<Vec<MemoryDocument>, StoreError> {
        dispatch!(self, memory_revisions(tenant, user, before, limit))
    }

    async fn take_lease(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        token: Uuid,
        condition: LeaseCondition,
        ttl: Duration,
    ) -> Result<Option<Session>, StoreError> {
        dispatch!(self, take_lease(tenant, session, token, condition, ttl))
    }

    async fn renew_lease(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        token: Uuid,
        ttl: Duration,
    ) -> Result<bool, StoreError> {
        dispatch!(self, renew_lease(tenant, session, token, ttl))
    }

    async fn release_lease(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        token: Uuid,
    ) -> Result<(), StoreError> {
        dispatch!(self, release_lease(tenant, session, token))
    }

    async fn commit_revision(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        token: Uuid,
        revision: &NewRevision,
    ) -> Result<Option<Revision>, StoreError> {
        dispatch!(self, commit_revision(tenant, session, token, revision))
    }

    async fn record_failure(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        token: Uuid,
        retry_in: Duration,
        reason: &str,
    ) -> Result<Option<OffsetDateTime>, StoreError> {
        dispatch!(self, record_failure(tenant, session, token, retry_in, reason))
    }

    async fn add_token_usage(&self, tenant: &TenantId, tokens: u64) -> Result<(), StoreError> {
        dispatch!(self, add_token_usage(tenant, tokens))
    }

    async fn tokens_used_today(&self, tenant: &TenantId) -> Result<i64, StoreError> {
        dispatch!(self, tokens_used_today(tenant))
    }

    async fn revisions(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        before: i64,
        limit: i64,
    ) -> Result<Option<Vec<Revision>>, StoreError> {
        dispatch!(self, revisions(tenant, session, before, limit))
    }

    async fn revision(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        revision: i64,
    ) -> Result<Option<Revision>, StoreError> {
        dispatch!(self, revision(tenant, session, revision))
    }

    async fn restore_revision(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        revision: i64,
    ) -> Result<Option<Revision>, StoreError> {
        dispatch!(self, restore_revision(tenant, session, revision))
    }

    async fn term_statistics(
        &self,
        tenant: &TenantId,
        scope: &SearchFilter,
        probes: &[TermQuery],
        most: i64,
    ) -> Result<TermStatistics, StoreError> {
        dispatch!(self, term_statistics(tenant, scope, probes, most))
    }

    async fn lookup_terms(
        &self,
        tenant: &TenantId,
        scope: &SearchFilter,
        probes: &[TermQuery],
        most: i64,
    ) -> Result<Vec<Vec<MessageRef>>, StoreError> {
        dispatch!(self, lookup_terms(tenant, scope, probes, most))
    }

    async fn scan_recent(
        &self,
        tenant: &TenantId,
        scope: &SearchFilter,
        probe: &TermQuery,
        rows: i64,
        most: i64,
    ) -> Result<Vec<MessageRef>, StoreError> {
        dispatch!(self, scan_recent(tenant, scope, probe, rows, most))
    }

    async fn fetch_hits(
        &self,
        tenant: &TenantId,
        user: Option<&UserId>,
        places: &[MessageRef],
        max_bytes: i64,
    ) -> Result<Vec<StoredHit>, StoreError> {
        dispatch!(self, fetch_hits(tenant, user, places, max_bytes))
    }

    async fn fetch_neighbours(
        &self,
        tenant: &TenantId,
        places: &[MessageRef],
        distance: i64,
        max_bytes: i64,
    ) -> Result<Vec<StoredHit>, StoreError> {
        dispatch!(self, fetch_neighbours(tenant, places, distance, max_bytes))
    }

    async fn index_state(&self, label: &str) -> Result<IndexState, StoreError> {
        dispatch!(self, index_state(label))
    }

    async fn index_batch(&self) -> Result<bool, StoreError> {
        dispatch!(self, index_batch())
    }

    async fn index_pending_for(
        &self,
        tenant: &TenantId,
        session: Option<&SessionId>,
    ) -> Result<(), StoreError> {
        dispatch!(self, index_pending_for(tenant, session))
    }

    async fn disable_index(&self) -> Result<(), StoreError> {
        dispatch!(self, disable_index())
    }

    async fn start_reindex(&self, label: &str) -> Result<(), StoreError> {
        dispatch!(self, start_reindex(label))
    }

    async fn next_reindex_range(&self) -> Result<Option<ReindexRange>, StoreError> {
        dispatch!(self, next_reindex_range())
    }

    async fn reindex_messages(
        &self,
        piece: &ReindexRange,
        messages: &[(MessageRef, Message)],
        done_seq: i64,
    ) -> Result<(), StoreError> {
        dispatch!(self, reindex_messages(piece, messages, done_seq))
    }
}
