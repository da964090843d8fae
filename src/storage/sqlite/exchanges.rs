//! Appending exchanges on SQLite.

use super::{micros, now};
use crate::domain::exchange::PersistedExchange;
use crate::domain::id::UserId;
use crate::domain::search::analyzer::Analyzer;
use crate::storage::append::{self, AppendBatcher};
use crate::storage::batch::Batcher;
use crate::storage::rows::tool_columns;
use crate::storage::search_index::{ExchangeSpan, pending_spans};
use crate::storage::statement::DbRow as _;
use crate::storage::values::to_i64;
use crate::storage::{AppendOutcome, AppendRequest, StoreError};
use serde_json::{Value, json};
use sqlx::{SqliteConnection, SqlitePool};
use uuid::Uuid;

const SELECT_IDEMPOTENCY_KEY: &str = "\
    SELECT fingerprint, first_seq, last_seq, created_at FROM idempotency_keys
    WHERE tenant_id = $1 AND session_id = $2 AND key = $3";

const UPSERT_SESSION: &str = "\
    INSERT INTO sessions AS s (tenant_id, session_id, user_id, metadata, last_seq, tokens, created_at, updated_at,
        activity_hour, incarnation)
    VALUES ($1, $2, coalesce($3, $8), coalesce($4, '{}'), $5, $6, $7, $7, $7 / 3600000000, randomblob(16))
    ON CONFLICT (tenant_id, session_id) DO UPDATE SET
        last_seq = s.last_seq + excluded.last_seq,
        tokens = s.tokens + excluded.tokens,
        metadata = coalesce($4, s.metadata),
        updated_at = max(excluded.updated_at, s.updated_at),
        activity_hour = max(excluded.updated_at, s.updated_at) / 3600000000
    WHERE $3 IS NULL OR s.user_id = $3
    RETURNING last_seq, updated_at, incarnation";

/// Messages are one JSON parameter: each additional parameter or statement takes SQLite longer than storing a message does.
/// Messages become pending for the search index; if search is disabled, there are no spans.
const INSERT_MESSAGES: &str = "\
    INSERT INTO messages (tenant_id, session_id, seq, role, tool_call_ids, tool_result_of, tokens, message, created_at)
    SELECT $1, $2, $4 + key, value ->> 0, value ->> 1, value ->> 2, value ->> 3, value ->> 4, $5 FROM json_each($3);
    INSERT INTO search_pending (tenant_id, session_id, first_seq, last_seq, bytes, created_at)
    SELECT $1, $2, $4 + (value ->> 0), $4 + (value ->> 1), value ->> 2, $5 FROM json_each($6)";

const INSERT_IDEMPOTENCY_KEY: &str = "\
    INSERT INTO idempotency_keys (tenant_id, session_id, key, fingerprint, first_seq, last_seq, created_at)
    VALUES ($1, $2, $3, $4, $5, $6, $7)";

const DELETE_EXPIRED_KEYS: &str =
    "DELETE FROM idempotency_keys WHERE tenant_id = $1 AND session_id = $2 AND created_at < $3";

/// Shortest time that a key is kept.
const KEY_RETENTION: time::Duration = time::Duration::hours(24);

/// Returns the batcher of the connection that writes.
pub(super) fn batcher(writer: &SqlitePool, search: Option<Analyzer>) -> AppendBatcher {
    let (batch_writer, single_writer) = (writer.clone(), writer.clone());
    let append_batch = move |requests: Vec<AppendRequest>| {
        let writer = batch_writer.clone();
        async move {
            let results: Vec<_> = match append_all(&writer, search, &requests).await {
                Ok(outcomes) => outcomes.into_iter().map(|outcome| Some(Ok(outcome))).collect(),
                // The writer is busy or the file is not writable: another attempt would only wait once more.
                Err(error @ StoreError::Unavailable(_)) => {
                    requests.iter().map(|_| Some(Err(append::batch_unavailable(&error)))).collect()
                }
                // The transaction was rolled back, and each exchange is appended by itself.
                Err(_) => requests.iter().map(|_| None).collect(),
            };
            requests.into_iter().zip(results).collect()
        }
    };
    let append_alone = move |request: AppendRequest| {
        let writer = single_writer.clone();
        async move { append_one(&writer, search, &request).await }
    };
    Batcher::new(append::MAX_BATCH, append_batch, append_alone)
}

async fn append_one(
    writer: &SqlitePool,
    search: Option<Analyzer>,
    request: &AppendRequest,
) -> Result<AppendOutcome, StoreError> {
    let outcomes = append_all(writer, search, std::slice::from_ref(request)).await?;
    outcomes.into_iter().next().ok_or(StoreError::BatchFailed)
}

/// Appends the exchanges in one transaction, which is one write to the disk.
async fn append_all(
    writer: &SqlitePool,
    search: Option<Analyzer>,
    requests: &[AppendRequest],
) -> Result<Vec<AppendOutcome>, StoreError> {
    let mut transaction = writer.begin_with("BEGIN IMMEDIATE").await?;
    let mut outcomes = Vec::with_capacity(requests.len());
    for request in requests {
        outcomes.push(append_exchange(&mut transaction, search, request).await?);
    }
    transaction.commit().await?;
    Ok(outcomes)
}

async fn append_exchange(
    transaction: &mut SqliteConnection,
    search: Option<Analyzer>,
    AppendRequest { tenant, session, exchange, key }: &AppendRequest,
) -> Result<AppendOutcome, StoreError> {
    if let Some(key) = key {
        let query =
            sqlx::query(SELECT_IDEMPOTENCY_KEY).bind(tenant.as_str()).bind(session.as_str()).bind(&key.key);
        if let Some(row) = query.fetch_optional(&mut *transaction).await? {
            if row.field::<Vec<u8>>("fingerprint")? != key.fingerprint {
                return Ok(AppendOutcome::KeyReused);
            }
            return Ok(AppendOutcome::Appended(PersistedExchange {
                first_seq: row.field("first_seq")?,
                last_seq: row.field("last_seq")?,
                created_at: row.time("created_at")?,
                incarnation: None,
                replayed: true,
            }));
        }
    }
    let count = to_i64(exchange.messages.len());
    let advanced = sqlx::query(UPSERT_SESSION)
        .bind(tenant.as_str())
        .bind(session.as_str())
        .bind(exchange.user_id.as_ref().map(UserId::as_str))
        .bind(exchange.metadata.as_deref())
        .bind(count)
        .bind(exchange.tokens())
        .bind(micros(now()))
        .bind(UserId::default().as_str())
        .fetch_optional(&mut *transaction)
        .await?;
    let Some(row) = advanced else {
        return Ok(AppendOutcome::UserMismatch);
    };
    let last_seq: i64 = row.field("last_seq")?;
    let created_at = row.time("updated_at")?;
    let incarnation: Uuid = row.field("incarnation")?;
    let first_seq = last_seq - count + 1;
    let messages = exchange.messages.iter().map(|(message, tokens)| {
        let (tool_call_ids, tool_result_of) = tool_columns(message);
        json!([message.role().as_str(), tool_call_ids, tool_result_of, tokens, message.json()])
    });
    let runs = pending_spans(search, exchange).into_iter();
    let runs = runs.map(|ExchangeSpan { first, last, bytes }| json!([first, last, bytes]));
    sqlx::query(INSERT_MESSAGES)
        .bind(tenant.as_str())
        .bind(session.as_str())
        .bind(messages.collect::<Value>().to_string())
        .bind(first_seq)
        .bind(micros(created_at))
        .bind(runs.collect::<Value>().to_string())
        .execute(&mut *transaction)
        .await?;
    if let Some(key) = key {
        let query = sqlx::query(DELETE_EXPIRED_KEYS).bind(tenant.as_str()).bind(session.as_str());
        query.bind(micros(created_at - KEY_RETENTION)).execute(&mut *transaction).await?;
        sqlx::query(INSERT_IDEMPOTENCY_KEY)
            .bind(tenant.as_str())
            .bind(session.as_str())
            .bind(&key.key)
            .bind(&key.fingerprint)
            .bind(first_seq)
            .bind(last_seq)
            .bind(micros(created_at))
            .execute(&mut *transaction)
            .await?;
    }
    Ok(AppendOutcome::Appended(PersistedExchange {
        first_seq,
        last_seq,
        created_at,
        incarnation: Some(incarnation),
        replayed: false,
    }))
}
