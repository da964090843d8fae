//! Persisting exchanges, on SQLite.

use super::{Sqlite, micros, now, time};
use crate::domain::exchange::{Exchange, IdempotencyKey, PersistedExchange};
use crate::domain::id::{SessionId, TenantId, UserId};
use crate::storage::AppendOutcome;
use crate::storage::StoreError;
use crate::storage::row::{limit, tool_columns};
use crate::storage::search_index::{ExchangeSpan, pending_spans};
use serde_json::{Value, json};
use sqlx::Row as _;

const KNOWN: &str = "\
    SELECT fingerprint, first_seq, last_seq, created_at FROM idempotency_keys
    WHERE tenant_id = $1 AND session_id = $2 AND key = $3";

const ADVANCE: &str = "\
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

/// Messages come as one JSON text: each time that something is handed over to SQLite takes longer than storing a message
/// does. They wait to be indexed; without an index, in no runs.
const STORE: &str = "\
    INSERT INTO messages (tenant_id, session_id, seq, role, tool_call_ids, tool_result_of, tokens, message, created_at)
    SELECT $1, $2, $4 + key, value ->> 0, value ->> 1, value ->> 2, value ->> 3, value ->> 4, $5 FROM json_each($3);
    INSERT INTO search_pending (tenant_id, session_id, first_seq, last_seq, bytes, created_at)
    SELECT $1, $2, $4 + (value ->> 0), $4 + (value ->> 1), value ->> 2, $5 FROM json_each($6)";

const KEEP_KEY: &str = "\
    INSERT INTO idempotency_keys (tenant_id, session_id, key, fingerprint, first_seq, last_seq, created_at)
    VALUES ($1, $2, $3, $4, $5, $6, $7)";

const PRUNE: &str =
    "DELETE FROM idempotency_keys WHERE tenant_id = $1 AND session_id = $2 AND created_at < $3";

/// How long a key is kept, at least.
const KEY_LIFE: time::Duration = time::Duration::hours(24);

impl Sqlite {
    pub(in crate::storage) async fn append_exchange(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        exchange: &Exchange,
        key: Option<&IdempotencyKey>,
    ) -> Result<AppendOutcome, StoreError> {
        let mut transaction = self.write().await?;
        if let Some(key) = key {
            let query = sqlx::query(KNOWN).bind(tenant.as_str()).bind(session.as_str()).bind(&key.key);
            if let Some(row) = query.fetch_optional(&mut *transaction).await? {
                if row.try_get::<Vec<u8>, _>("fingerprint")? != key.fingerprint {
                    return Ok(AppendOutcome::KeyReused);
                }
                return Ok(AppendOutcome::Appended(PersistedExchange {
                    first_seq: row.try_get("first_seq")?,
                    last_seq: row.try_get("last_seq")?,
                    created_at: time(&row, "created_at")?,
                    replayed: true,
                }));
            }
        }
        let count = limit(exchange.messages.len());
        let advanced = sqlx::query(ADVANCE)
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
        let last_seq: i64 = row.try_get("last_seq")?;
        let created_at = time(&row, "updated_at")?;
        let first_seq = last_seq - count + 1;
        let messages = exchange.messages.iter().map(|(message, tokens)| {
            let (tool_call_ids, tool_result_of) = tool_columns(message);
            json!([message.role().as_str(), tool_call_ids, tool_result_of, tokens, message.json()])
        });
        let runs = pending_spans(self.search, exchange).into_iter();
        let runs = runs.map(|ExchangeSpan { first, last, bytes }| json!([first, last, bytes]));
        sqlx::query(STORE)
            .bind(tenant.as_str())
            .bind(session.as_str())
            .bind(messages.collect::<Value>().to_string())
            .bind(first_seq)
            .bind(micros(created_at))
            .bind(runs.collect::<Value>().to_string())
            .execute(&mut *transaction)
            .await?;
        if let Some(key) = key {
            let query = sqlx::query(PRUNE).bind(tenant.as_str()).bind(session.as_str());
            query.bind(micros(created_at - KEY_LIFE)).execute(&mut *transaction).await?;
            sqlx::query(KEEP_KEY)
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
