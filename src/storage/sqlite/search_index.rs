//! Maintenance of the search index on SQLite.

use super::{Query, Sqlite, micros};
use crate::domain::id::{SessionId, TenantId};
use crate::domain::message::Message;
use crate::domain::search::analyzer::Analyzer;
use crate::storage::StoreError;
use crate::storage::rows;
use crate::storage::search::MessageRef;
use crate::storage::search_index::{
    INSERT_ANALYZER_VERSION, IndexEntry, IndexState, PendingMessage, PendingRange, PendingStatements,
    ReindexRange, SELECT_ANALYZER_VERSION, SELECT_NEWEST_PENDING, UPDATE_ANALYZER_OF_EMPTY_INDEX,
    analyzer_for, check_deadline, claim_pending, entries_of_pending, index_entries, lexemes_of_messages,
    next_batch,
};
use crate::storage::values::user_from_column;
use serde_json::{Value, json};
use sqlx::{Row as _, SqliteConnection};
use std::time::Instant;

/// Rows are bound as one JSON text. They are inserted in the given order, because a higher id means a later message. An
/// existing entry was written by a reindex in the meantime.
const INSERT_ENTRIES: &str = "\
    INSERT INTO search (tenant_id, session_id, seq, created_at, lexemes)
    SELECT value ->> 0, value ->> 1, value ->> 2, value ->> 3, value ->> 4 FROM json_each($1) WHERE true ORDER BY key
    ON CONFLICT DO NOTHING";

const SELECT_INDEX_STATE: &str = "\
    SELECT coalesce((SELECT version FROM search_analyzer), '') AS analyzer_version, (SELECT count(*) FROM search_reindex) AS sessions_to_reindex";

const CLAIM_PENDING: PendingStatements = claim_pending!("");

/// Ranges are bound as one JSON text: lists of tenant, session, first and last `seq`, and time.
const SELECT_PENDING_MESSAGES: &str = "\
    SELECT w.key AS place, m.seq, m.created_at, s.user_id, m.message
    FROM json_each($1) AS w
        CROSS JOIN sessions AS s ON s.tenant_id = w.value ->> 0 AND s.session_id = w.value ->> 1
        CROSS JOIN messages AS m ON m.tenant_id = s.tenant_id AND m.session_id = s.session_id
            AND m.seq BETWEEN w.value ->> 2 AND w.value ->> 3 AND m.redaction IS NULL
    ORDER BY w.key, m.seq";

/// Compares end and time, too, because a session may have been rewound, or erased and created again.
const DELETE_PENDING: &str = "\
    DELETE FROM search_pending WHERE (tenant_id, session_id, first_seq, last_seq, created_at) IN
        (SELECT value ->> 0, value ->> 1, value ->> 2, value ->> 3, value ->> 4 FROM json_each($1))";

const DISABLE_INDEX: &str = "\
    INSERT INTO search_analyzer (id, version) VALUES (1, 'off') ON CONFLICT (id) DO UPDATE SET version = 'off'";

const UPDATE_ANALYZER_VERSION: &str = "UPDATE search_analyzer SET version = $1 WHERE version <> $1";

const INSERT_REINDEX_OF_ALL_SESSIONS: &str = "\
    INSERT INTO search_reindex (tenant_id, session_id, through_seq)
    SELECT tenant_id, session_id, last_seq FROM sessions WHERE last_seq > 0 AND coalesce(fork_kind, '') <> 'rewind'
    ON CONFLICT (tenant_id, session_id) DO UPDATE SET done_seq = 0, through_seq = excluded.through_seq";

const SELECT_SESSION_USER: &str = "SELECT user_id FROM sessions WHERE tenant_id = $1 AND session_id = $2";

const ADVANCE_REINDEX: &str = "\
    UPDATE search_reindex SET done_seq = $5
    WHERE tenant_id = $1 AND session_id = $2 AND done_seq = $3 AND through_seq = $4";

const DELETE_FINISHED_REINDEX: &str =
    "DELETE FROM search_reindex WHERE tenant_id = $1 AND session_id = $2 AND done_seq >= through_seq";

/// The messages may have been read before they were redacted.
const DELETE_REDACTED_ENTRIES: &str = "\
    DELETE FROM search WHERE tenant_id = $1 AND session_id = $2 AND seq IN (
        SELECT m.seq FROM json_each($3) AS w CROSS JOIN messages AS m
            ON m.tenant_id = $1 AND m.session_id = $2 AND m.seq = w.value AND m.redaction IS NOT NULL
    )";

const DELETE_ENTRIES: &str = "\
    DELETE FROM search WHERE tenant_id = $1 AND session_id = $2 AND seq IN (SELECT value FROM json_each($3))";

impl Sqlite {
    pub(in crate::storage) async fn index_state(&self, version: &str) -> Result<IndexState, StoreError> {
        let mut row = sqlx::query(SELECT_INDEX_STATE).fetch_one(&self.readers).await?;
        if row.try_get::<&str, _>("analyzer_version")? != version {
            let mut transaction = self.begin_write().await?;
            for statement in [INSERT_ANALYZER_VERSION, UPDATE_ANALYZER_OF_EMPTY_INDEX] {
                sqlx::query(statement).bind(version).execute(&mut *transaction).await?;
            }
            row = sqlx::query(SELECT_INDEX_STATE).fetch_one(&mut *transaction).await?;
            transaction.commit().await?;
        }
        Ok(IndexState {
            analyzer_version: row.try_get("analyzer_version")?,
            sessions_to_reindex: row.try_get("sessions_to_reindex")?,
        })
    }

    pub(in crate::storage) async fn index_batch(&self) -> Result<bool, StoreError> {
        let Some(analyzer) = self.search else { return Ok(false) };
        self.index_claimed(analyzer, sqlx::query(CLAIM_PENDING.all)).await
    }

    pub(in crate::storage) async fn index_pending_for(
        &self,
        tenant: &TenantId,
        session: Option<&SessionId>,
    ) -> Result<String, StoreError> {
        let began = Instant::now();
        let newest =
            bind_pending(&SELECT_NEWEST_PENDING, tenant, session, i64::MAX).fetch_one(&self.readers).await?;
        let version: String = newest.try_get("analyzer_version")?;
        let (Some(analyzer), Some(until)) = (self.search, newest.try_get("until")?) else {
            return Ok(version);
        };
        while self.index_claimed(analyzer, bind_pending(&CLAIM_PENDING, tenant, session, until)).await? {
            check_deadline(began)?;
        }
        let row = sqlx::query(SELECT_ANALYZER_VERSION).fetch_one(&self.readers).await?;
        Ok(row.try_get("analyzer_version")?)
    }

    pub(in crate::storage) async fn disable_index(&self) -> Result<(), StoreError> {
        sqlx::query(DISABLE_INDEX).execute(&self.writer).await?;
        Ok(())
    }

    pub(in crate::storage) async fn start_reindex(&self, version: &str) -> Result<(), StoreError> {
        let mut transaction = self.begin_write().await?;
        sqlx::query(INSERT_ANALYZER_VERSION).bind(version).execute(&mut *transaction).await?;
        if sqlx::query(UPDATE_ANALYZER_VERSION)
            .bind(version)
            .execute(&mut *transaction)
            .await?
            .rows_affected()
            > 0
        {
            sqlx::query(INSERT_REINDEX_OF_ALL_SESSIONS).execute(&mut *transaction).await?;
        }
        Ok(transaction.commit().await?)
    }

    pub(in crate::storage) async fn reindex_messages(
        &self,
        range: &ReindexRange,
        messages: &[(MessageRef, Message)],
        done_seq: i64,
    ) -> Result<(), StoreError> {
        let ReindexRange { tenant, session, .. } = range;
        let all = messages.iter().map(|(_, message)| message);
        let lexemes = lexemes_of_messages(self.search, tenant, session, all).await;
        let mut transaction = self.begin_write().await?;
        let query = sqlx::query(SELECT_SESSION_USER).bind(tenant.as_str()).bind(session.as_str());
        let Some(row) = query.fetch_optional(&mut *transaction).await? else {
            return Ok(());
        };
        let user = user_from_column(row.try_get("user_id")?)?;
        let query =
            sqlx::query(ADVANCE_REINDEX).bind(tenant.as_str()).bind(session.as_str()).bind(range.done_seq);
        if query.bind(range.through_seq).bind(done_seq).execute(&mut *transaction).await?.rows_affected() == 0
        {
            return Ok(());
        }
        let seqs = messages.iter().map(|(message_ref, _)| message_ref.seq).collect::<Value>().to_string();
        let query = sqlx::query(DELETE_ENTRIES).bind(tenant.as_str()).bind(session.as_str()).bind(&*seqs);
        query.execute(&mut *transaction).await?;
        let positions = messages.iter().map(|(message_ref, _)| (message_ref.seq, message_ref.created_at));
        insert_entries(&mut transaction, index_entries(tenant, session, user.as_ref(), positions, &lexemes))
            .await?;
        let query = sqlx::query(DELETE_REDACTED_ENTRIES).bind(tenant.as_str()).bind(session.as_str());
        query.bind(&*seqs).execute(&mut *transaction).await?;
        let query = sqlx::query(DELETE_FINISHED_REINDEX).bind(tenant.as_str()).bind(session.as_str());
        query.execute(&mut *transaction).await?;
        Ok(transaction.commit().await?)
    }
}

impl Sqlite {
    /// Indexes the ranges that a statement selects. Returns `true` if more may be pending.
    async fn index_claimed(&self, analyzer: Analyzer, claim: Query<'_>) -> Result<bool, StoreError> {
        // Only one task indexes at a time. The lock has a timeout, because its holder may wait for the writer.
        let timeout = self.writer.options().get_acquire_timeout();
        let lock = tokio::time::timeout(timeout, self.indexing.lock()).await;
        let _lock = lock.map_err(|_| sqlx::Error::PoolTimedOut)?;
        let rows = claim.fetch_all(&self.readers).await?;
        let pending = rows.iter().map(rows::pending_range);
        let (batch, more) = next_batch(pending.collect::<Result<_, sqlx::Error>>()?);
        let Some(first) = rows.first() else { return Ok(false) };
        let version: &str = first.try_get("analyzer_version")?;
        let Some(analyzer) = analyzer_for(version, analyzer) else {
            return Ok(false);
        };
        let ranges = batch.iter().map(|range| {
            let PendingRange { tenant, session, first_seq, last_seq, created_at, .. } = range;
            json!([tenant, session, first_seq, last_seq, micros(*created_at)])
        });
        let ranges_json = ranges.collect::<Value>().to_string();
        let entries = entries_of_pending(analyzer, self.pending_messages(&batch, &ranges_json).await?).await;
        let mut transaction = self.begin_write().await?;
        if version.is_empty() {
            let query = sqlx::query(INSERT_ANALYZER_VERSION).bind(analyzer.version());
            query.execute(&mut *transaction).await?;
        }
        let recorded = sqlx::query(SELECT_ANALYZER_VERSION).fetch_one(&mut *transaction).await?;
        if analyzer_for(recorded.try_get("analyzer_version")?, analyzer) != Some(analyzer) {
            // Another process has changed the analyzer in the meantime.
            return Ok(true);
        }
        let indexed = sqlx::query(DELETE_PENDING).bind(ranges_json).execute(&mut *transaction).await?;
        if indexed.rows_affected() < u64::try_from(batch.len()).unwrap_or_default() {
            // Some messages were erased in the meantime and must not be indexed.
            return Ok(true);
        }
        insert_entries(&mut transaction, entries).await?;
        transaction.commit().await?;
        Ok(more)
    }

    /// Returns the messages of pending ranges, in order.
    async fn pending_messages(
        &self,
        batch: &[PendingRange],
        ranges_json: &str,
    ) -> Result<Vec<PendingMessage>, sqlx::Error> {
        let rows = sqlx::query(SELECT_PENDING_MESSAGES).bind(ranges_json).fetch_all(&self.readers).await?;
        rows.iter().map(|row| rows::pending_message(row, batch)).collect()
    }
}

/// Inserts entries in the given order.
async fn insert_entries(
    connection: &mut SqliteConnection,
    entries: Vec<IndexEntry>,
) -> Result<(), sqlx::Error> {
    if entries.is_empty() {
        return Ok(());
    }
    let rows = entries.into_iter().map(|IndexEntry { tenant, session, seq, created_at, lexemes }| {
        json!([tenant, session, seq, micros(created_at), lexemes])
    });
    sqlx::query(INSERT_ENTRIES).bind(rows.collect::<Value>().to_string()).execute(connection).await?;
    Ok(())
}

/// Binds the variant of a statement for a tenant or one of its sessions.
fn bind_pending<'q>(
    statement: &PendingStatements,
    tenant: &'q TenantId,
    session: Option<&'q SessionId>,
    until: i64,
) -> Query<'q> {
    match session {
        None => sqlx::query(statement.tenant).bind(tenant.as_str()).bind(until),
        Some(session) => {
            sqlx::query(statement.session).bind(tenant.as_str()).bind(until).bind(session.as_str())
        }
    }
}
