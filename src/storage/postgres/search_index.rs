//! Maintenance of the search index on Postgres.

use super::{Postgres, Query, begin};
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
    next_batch, pending_statements,
};
use crate::storage::values::user_from_column;
use sqlx::{Connection as _, PgConnection, Row as _};
use std::collections::HashSet;
use std::time::{Duration, Instant};
use time::OffsetDateTime;
use time::macros::datetime;

/// Inserts in the given order, because a higher id means a later message.
macro_rules! insert_entries {
    ($conflict:literal) => {
        concat!(
            "INSERT INTO search (tenant_id, session_id, seq, created_at, lexemes)
            SELECT tenant_id, session_id, seq, created_at, array_to_tsvector(string_to_array(lexemes, ' '))
            FROM unnest($1::text[], $2::text[], $3::bigint[], $4::timestamptz[], $5::text[])
                WITH ORDINALITY AS i (tenant_id, session_id, seq, created_at, lexemes, place)
            ORDER BY place ON CONFLICT ",
            $conflict
        )
    };
}
/// An existing entry was written by a reindex in the meantime.
const INSERT_ENTRIES: &str = insert_entries!("DO NOTHING");
const UPSERT_ENTRIES: &str =
    insert_entries!("(tenant_id, session_id, seq) DO UPDATE SET lexemes = excluded.lexemes");

/// Keeps the analyzer from changing while messages are being indexed.
const LOCK_ANALYZER_VERSION: &str = "SELECT version AS analyzer_version FROM search_analyzer FOR SHARE";
/// Waits for those who are indexing messages.
const LOCK_ANALYZER_CHANGE: &str = "SELECT version FROM search_analyzer FOR UPDATE";

const SELECT_INDEX_STATE: &str = "\
    SELECT coalesce((SELECT version FROM search_analyzer), '') AS analyzer_version, (SELECT count(*) FROM search_reindex) AS sessions_to_reindex";

/// Locks the ranges until they are indexed. Other replicas skip locked ranges, so that they cannot deadlock.
const CLAIM_PENDING: PendingStatements = claim_pending!(" FOR UPDATE SKIP LOCKED");
/// Returns ranges that are still pending, because others have locked them.
const SELECT_REMAINING: PendingStatements = pending_statements!("SELECT session_id, first_seq", "");
const END_OF_TIME: OffsetDateTime = datetime!(9999-12-31 0:00 UTC);
/// Delay between two checks for remaining ranges. No connection is held in between.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Asynchronous commit is safe: after a crash, the messages are pending again. The timeout releases the ranges of a client
/// that disappeared.
const BEGIN_LAZILY: &str = "BEGIN; SET LOCAL synchronous_commit = off; SET LOCAL idle_in_transaction_session_timeout = '4s'; SET LOCAL jit = off";

const SELECT_PENDING_MESSAGES: &str = "\
    SELECT place - 1 AS place, seq, created_at, user_id, message
    FROM read_pending_messages($1::text[], $2::text[], $3::bigint[], $4::bigint[]) ORDER BY place, seq";

const DELETE_PENDING: &str = "\
    DELETE FROM search_pending AS w USING unnest($1::text[], $2::text[], $3::bigint[]) AS i (tenant_id, session_id, first_seq)
    WHERE w.tenant_id = i.tenant_id AND w.session_id = i.session_id AND w.first_seq = i.first_seq";

/// Moves the pending list of the GIN index into its main structure.
const FLUSH_GIN_PENDING_LIST: &str = "SELECT flush_search_index()";
/// SQLSTATE of a lock timeout.
const LOCK_NOT_AVAILABLE: &str = "55P03";

const DISABLE_INDEX: &str = "\
    INSERT INTO search_analyzer (id, version) VALUES (1, 'off') ON CONFLICT (id) DO UPDATE SET version = 'off'";

const UPDATE_ANALYZER_VERSION: &str = "UPDATE search_analyzer SET version = $1 WHERE version <> $1";

/// Reads one tenant at a time, under its policy.
const INSERT_REINDEX_OF_ALL_SESSIONS: &str = "\
    DO $$
    DECLARE
        of_tenant text;
    BEGIN
        FOR of_tenant IN SELECT t.tenant_id FROM tenants AS t LOOP
            PERFORM set_config('precis.tenant', of_tenant, true);
            INSERT INTO search_reindex (tenant_id, session_id, through_seq)
            SELECT tenant_id, session_id, last_seq FROM sessions
            WHERE tenant_id = of_tenant AND last_seq > 0 AND coalesce(fork_kind, '') <> 'rewind'
            ON CONFLICT (tenant_id, session_id) DO UPDATE SET done_seq = 0, through_seq = excluded.through_seq;
        END LOOP;
    END
    $$";

/// Locks the session against a concurrent erasure.
const SELECT_SESSION_USER: &str =
    "SELECT user_id FROM sessions WHERE tenant_id = $1 AND session_id = $2 FOR NO KEY UPDATE";

const ADVANCE_REINDEX: &str = "\
    UPDATE search_reindex SET done_seq = $5
    WHERE tenant_id = $1 AND session_id = $2 AND done_seq = $3 AND through_seq = $4";

const DELETE_FINISHED_REINDEX: &str =
    "DELETE FROM search_reindex WHERE tenant_id = $1 AND session_id = $2 AND done_seq >= through_seq";

/// The messages may have been read before they were redacted. The lock of the session keeps a redaction from happening now.
const DELETE_REDACTED_ENTRIES: &str = "\
    DELETE FROM search AS e WHERE tenant_id = $1 AND session_id = $2 AND seq = ANY ($3) AND EXISTS (
        SELECT FROM messages AS m
        WHERE m.tenant_id = $1 AND m.session_id = $2 AND m.seq = e.seq AND m.redaction IS NOT NULL
    )";

const DELETE_ENTRIES: &str = "DELETE FROM search WHERE tenant_id = $1 AND session_id = $2 AND seq = ANY ($3)";

impl Postgres {
    pub(in crate::storage) async fn index_state(&self, version: &str) -> Result<IndexState, StoreError> {
        let mut row = sqlx::query(SELECT_INDEX_STATE).fetch_one(&self.pool).await?;
        if row.try_get::<&str, _>("analyzer_version")? != version {
            let mut transaction = self.pool.begin_with("BEGIN").await?;
            sqlx::query(INSERT_ANALYZER_VERSION).bind(version).execute(&mut *transaction).await?;
            sqlx::query(LOCK_ANALYZER_CHANGE).execute(&mut *transaction).await?;
            sqlx::query(UPDATE_ANALYZER_OF_EMPTY_INDEX).bind(version).execute(&mut *transaction).await?;
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
        if self.index_claimed(analyzer, sqlx::query(CLAIM_PENDING.all)).await? {
            return Ok(true);
        }
        match sqlx::query(FLUSH_GIN_PENDING_LIST).fetch_one(&self.pool).await {
            Ok(_) => Ok(false),
            Err(sqlx::Error::Database(error)) if error.code().as_deref() == Some(LOCK_NOT_AVAILABLE) => {
                Ok(false)
            }
            Err(error) => Err(error.into()),
        }
    }

    pub(in crate::storage) async fn index_pending_for(
        &self,
        tenant: &TenantId,
        session: Option<&SessionId>,
    ) -> Result<String, StoreError> {
        let newest =
            bind_pending(&SELECT_NEWEST_PENDING, tenant, session, END_OF_TIME).fetch_one(&self.pool).await?;
        let version = newest.try_get("analyzer_version")?;
        let (Some(analyzer), Some(until)) = (self.search, newest.try_get("until")?) else {
            return Ok(version);
        };
        let (began, mut held) = (Instant::now(), None);
        loop {
            if !self.index_claimed(analyzer, bind_pending(&CLAIM_PENDING, tenant, session, until)).await? {
                // Wait only for ranges that others held after the first pass, and not for newer ones.
                let left =
                    bind_pending(&SELECT_REMAINING, tenant, session, until).fetch_all(&self.pool).await?;
                let left = left.iter().map(|row| Ok((row.try_get("session_id")?, row.try_get("first_seq")?)));
                let left: HashSet<(String, i64)> = left.collect::<Result<_, sqlx::Error>>()?;
                let still = held.map_or(left.clone(), |held: HashSet<_>| &held & &left);
                let row = sqlx::query(SELECT_ANALYZER_VERSION).fetch_one(&self.pool).await?;
                let version: String = row.try_get("analyzer_version")?;
                if still.is_empty() || analyzer_for(&version, analyzer).is_none() {
                    return Ok(version);
                }
                held = Some(still);
                tokio::time::sleep(POLL_INTERVAL).await;
            }
            check_deadline(began)?;
        }
    }

    pub(in crate::storage) async fn disable_index(&self) -> Result<(), StoreError> {
        sqlx::query(DISABLE_INDEX).execute(&self.pool).await?;
        Ok(())
    }

    pub(in crate::storage) async fn start_reindex(&self, version: &str) -> Result<(), StoreError> {
        let mut transaction = self.pool.begin_with("BEGIN").await?;
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
        let mut transaction = self.pool.begin_with(begin(tenant)).await?;
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
        let seqs: Vec<i64> = messages.iter().map(|(message_ref, _)| message_ref.seq).collect();
        let query = sqlx::query(DELETE_ENTRIES).bind(tenant.as_str()).bind(session.as_str()).bind(&seqs);
        query.execute(&mut *transaction).await?;
        let positions = messages.iter().map(|(message_ref, _)| (message_ref.seq, message_ref.created_at));
        insert_entries(
            &mut transaction,
            UPSERT_ENTRIES,
            index_entries(tenant, session, user.as_ref(), positions, &lexemes),
        )
        .await?;
        let query = sqlx::query(DELETE_REDACTED_ENTRIES).bind(tenant.as_str()).bind(session.as_str());
        query.bind(&seqs).execute(&mut *transaction).await?;
        let query = sqlx::query(DELETE_FINISHED_REINDEX).bind(tenant.as_str()).bind(session.as_str());
        query.execute(&mut *transaction).await?;
        Ok(transaction.commit().await?)
    }
}

impl Postgres {
    /// Indexes the ranges that a statement claims. Returns `true` if more may be pending.
    async fn index_claimed(&self, analyzer: Analyzer, claim: Query<'_>) -> Result<bool, StoreError> {
        let result = self.pool.with_connection(async |connection| {
            let mut transaction = connection.begin_with(BEGIN_LAZILY).await?;
            let mut recorded = sqlx::query(LOCK_ANALYZER_VERSION).fetch_optional(&mut *transaction).await?;
            if recorded.is_none() {
                let query = sqlx::query(INSERT_ANALYZER_VERSION).bind(analyzer.version());
                query.execute(&mut *transaction).await?;
                recorded = sqlx::query(LOCK_ANALYZER_VERSION).fetch_optional(&mut *transaction).await?;
            }
            let recorded = recorded.ok_or(sqlx::Error::RowNotFound)?;
            let Some(analyzer) = analyzer_for(recorded.try_get("analyzer_version")?, analyzer) else {
                return Ok(false);
            };
            let rows = claim.fetch_all(&mut *transaction).await?;
            let pending = rows.iter().map(rows::pending_range);
            let (batch, more) = next_batch(pending.collect::<Result<_, sqlx::Error>>()?);
            if batch.is_empty() {
                transaction.commit().await?;
                return Ok(false);
            }
            let messages = pending_messages(&mut transaction, &batch).await?;
            insert_entries(&mut transaction, INSERT_ENTRIES, entries_of_pending(analyzer, messages).await)
                .await?;
            sqlx::query(DELETE_PENDING)
                .bind(column(&batch, |range| range.tenant.as_str()))
                .bind(column(&batch, |range| range.session.as_str()))
                .bind(column(&batch, |range| range.first_seq))
                .execute(&mut *transaction)
                .await?;
            transaction.commit().await?;
            Ok(more)
        });
        Ok(result.await?)
    }
}

/// Returns the messages of pending ranges, in order.
async fn pending_messages(
    connection: &mut PgConnection,
    batch: &[PendingRange],
) -> Result<Vec<PendingMessage>, sqlx::Error> {
    let query = sqlx::query(SELECT_PENDING_MESSAGES)
        .bind(column(batch, |range| range.tenant.as_str()))
        .bind(column(batch, |range| range.session.as_str()))
        .bind(column(batch, |range| range.first_seq))
        .bind(column(batch, |range| range.last_seq));
    let rows = query.fetch_all(connection).await?;
    rows.iter().map(|row| rows::pending_message(row, batch)).collect()
}

/// Inserts entries in the given order.
async fn insert_entries(
    connection: &mut PgConnection,
    statement: &'static str,
    entries: Vec<IndexEntry>,
) -> Result<(), sqlx::Error> {
    if entries.is_empty() {
        return Ok(());
    }
    sqlx::query(statement)
        .bind(column(&entries, |entry| entry.tenant.as_str()))
        .bind(column(&entries, |entry| entry.session.as_str()))
        .bind(column(&entries, |entry| entry.seq))
        .bind(column(&entries, |entry| entry.created_at))
        .bind(column(&entries, |entry| entry.lexemes.as_str()))
        .execute(connection)
        .await?;
    Ok(())
}

/// Binds the variant of a statement for a tenant or one of its sessions.
fn bind_pending<'q>(
    statement: &PendingStatements,
    tenant: &'q TenantId,
    session: Option<&'q SessionId>,
    until: OffsetDateTime,
) -> Query<'q> {
    match session {
        None => sqlx::query(statement.tenant).bind(tenant.as_str()).bind(until),
        Some(session) => {
            sqlx::query(statement.session).bind(tenant.as_str()).bind(until).bind(session.as_str())
        }
    }
}

fn column<'a, R, C>(rows: &'a [R], column: impl Fn(&'a R) -> C) -> Vec<C> {
    rows.iter().map(column).collect()
}
