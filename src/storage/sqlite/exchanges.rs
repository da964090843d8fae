//! Appending exchanges on SQLite.

use super::{Sqlite, micros, now};
use crate::domain::exchange::{Exchange, IdempotencyKey, PersistedExchange};
use crate::domain::id::{SessionId, TenantId, UserId};
use crate::storage::rows::tool_columns;
use crate::storage::search_index::{ExchangeSpan, pending_spans};
use crate::storage::statement::DbRow as _;
use crate::storage::values::to_i64;
use crate::storage::{AppendOutcome, StoreError};
use serde_json::{Value, json};

const SELECT_IDEMPOTENCY_KEY: &str = "\
    SELECT fingerprint, first_seq, last_seq, created_at FROM idempotency_keys
    WHERE tenant_id = $1 AND session_id = $2 AND key = $3";

const UPSERT_SESSION: &str = "\
    INSERT INTO sessions AS s (tenant_id, session_id, user_id, metadata, last_seq, tokens, created_at, updated_at,
        activity_hour)
    VALUES ($1, $2, coalesce($3, $8), coalesce($4, '{}'), $5, $6, $7, $7, $7 / 3600000000)
    ON CONFLICT (tenant_id, session_id) DO UPDATE SET
        last_seq = s.last_seq + excluded.last_seq,
        tokens = s.tokens + excluded.tokens,
        metadata = coalesce($4, s.metadata),
        updated_at = max(excluded.updated_at, s.updated_at),
        activity_hour = max(excluded.updated_at, s.updated_at) / 3600000000
    WHERE $3 IS NULL OR s.user_id = $3
    RETURNING last_seq, updated_at";

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

impl Sqlite {
    pub(in crate::storage) async fn append_exchange(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        exchange: &Exchange,
        key: Option<&IdempotencyKey>,
    ) -> Result<AppendOutcome, StoreError> {
        let mut transaction = self.begin_write().await?;
        if let Some(key) = key {
            let query = sqlx::query(SELECT_IDEMPOTENCY_KEY)
                .bind(tenant.as_str())
                .bind(session.as_str())
                .bind(&key.key);
            if let Some(row) = query.fetch_optional(&mut *transaction).await? {
                if row.field::<Vec<u8>>("fingerprint")? != key.fingerprint {
                    return Ok(AppendOutcome::KeyReused);
                }
                return Ok(AppendOutcome::Appended(PersistedExchange {
                    first_seq: row.field("first_seq")?,
                    last_seq: row.field("last_seq")?,
                    created_at: row.time("created_at")?,
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
        let first_seq = last_seq - count + 1;
        let messages = exchange.messages.iter().map(|(message, tokens)| {
            let (tool_call_ids, tool_result_of) = tool_columns(message);
            json!([message.role().as_str(), tool_call_ids, tool_result_of, tokens, message.json()])
        });
        let runs = pending_spans(self.search, exchange).into_iter();
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
        transaction.commit().await?;
        Ok(AppendOutcome::Appended(PersistedExchange { first_seq, last_seq, created_at, replayed: false }))
    }
}
