//! Appending exchanges on Postgres.

use super::Postgres;
use crate::domain::exchange::{Exchange, IdempotencyKey, PersistedExchange};
use crate::domain::id::{SessionId, TenantId, UserId};
use crate::storage::pool::retry_on_disconnect;
use crate::storage::rows::tool_columns;
use crate::storage::search_index::pending_spans;
use crate::storage::values::to_i64;
use crate::storage::{AppendOutcome, StoreError};
use sqlx::Row as _;

/// A single statement appends everything in one round trip, or nothing. `known` finds an earlier request with the key.
/// `session` locks the row of the session, which keeps `seq` free of gaps and duplicates. The clock is read once: if it
/// were read twice around a full hour, the time and the hour of a session could differ, and the list would omit it. Messages
/// become pending for the search index; if search is disabled, there are no spans. Expired keys of the session are deleted
/// about every 64th message, so that they need no background job.
const APPEND_EXCHANGE: &str = "\
    WITH known AS (
        SELECT fingerprint, first_seq, last_seq, created_at FROM idempotency_keys
        WHERE tenant_id = $1 AND session_id = $2 AND key = $6
    ), session AS (
        INSERT INTO sessions AS s (tenant_id, session_id, user_id, metadata, last_seq, tokens, created_at, updated_at,
            activity_hour)
        SELECT $1, $2, coalesce($3, $13), coalesce($4, '{}'), $5, $8, t.now, t.now,
            floor(extract(epoch FROM t.now) / 3600)
        FROM (SELECT clock_timestamp() AS now) AS t
        WHERE NOT EXISTS (SELECT FROM known)
        ON CONFLICT (tenant_id, session_id) DO UPDATE SET
            last_seq = s.last_seq + excluded.last_seq,
            tokens = s.tokens + excluded.tokens,
            metadata = coalesce($4, s.metadata),
            updated_at = greatest(excluded.updated_at, s.updated_at),
            activity_hour = greatest(excluded.activity_hour, s.activity_hour)
        WHERE $3 IS NULL OR s.user_id = $3
        RETURNING s.last_seq, s.updated_at
    ), inserted_messages AS (
        INSERT INTO messages (tenant_id, session_id, seq, role, tool_call_ids, tool_result_of, tokens, message, created_at)
        SELECT $1, $2, session.last_seq - $5 + m.position, m.role, m.tool_call_ids, m.tool_result_of, m.tokens, m.message,
            session.updated_at
        FROM session, unnest($9::text[], $10::text[], $11::text[], $12::bigint[], $14::text[]) WITH ORDINALITY
            AS m (role, tool_call_ids, tool_result_of, tokens, message, position)
    ), pending AS (
        INSERT INTO search_pending (tenant_id, session_id, first_seq, last_seq, bytes, created_at)
        SELECT $1, $2, session.last_seq - $5 + 1 + run.first, session.last_seq - $5 + 1 + run.last, run.bytes,
            session.updated_at
        FROM session, unnest($15::bigint[], $16::bigint[], $17::bigint[]) AS run (first, last, bytes)
    ), inserted_key AS (
        INSERT INTO idempotency_keys (tenant_id, session_id, key, fingerprint, first_seq, last_seq, created_at)
        SELECT $1, $2, $6, $7, last_seq - $5 + 1, last_seq, updated_at FROM session WHERE $6 IS NOT NULL
    ), deleted_keys AS (
        DELETE FROM idempotency_keys
        WHERE tenant_id = $1 AND session_id = $2 AND created_at < now() - interval '24 hours' AND key <> $6
            AND (SELECT last_seq % 64 < $5 FROM session)
    )
    SELECT NULL::bytea AS fingerprint, last_seq - $5 + 1 AS first_seq, last_seq, updated_at AS created_at FROM session
    UNION ALL
    SELECT fingerprint, first_seq, last_seq, created_at FROM known";

impl Postgres {
    pub(in crate::storage) async fn append_exchange(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        exchange: &Exchange,
        key: Option<&IdempotencyKey>,
    ) -> Result<AppendOutcome, StoreError> {
        let once = async || match self.append_once(tenant, session, exchange, key).await {
            // A concurrent request with the same key was faster: the second attempt finds its result.
            Err(StoreError::Statement(sqlx::Error::Database(error)))
                if error.is_unique_violation() && error.table() == Some("idempotency_keys") =>
            {
                self.append_once(tenant, session, exchange, key).await
            }
            other => other,
        };
        // With a key a retry is safe, even if the lost connection had committed.
        if key.is_some() { retry_on_disconnect(once).await } else { once().await }
    }
}

impl Postgres {
    async fn append_once(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        exchange: &Exchange,
        key: Option<&IdempotencyKey>,
    ) -> Result<AppendOutcome, StoreError> {
        let messages = &exchange.messages;
        let runs = pending_spans(self.search, exchange);
        let (tool_call_ids, tool_result_of): (Vec<_>, Vec<_>) =
            messages.iter().map(|(message, _)| tool_columns(message)).unzip();
        let row = self
            .write_returning(
                tenant,
                sqlx::query(APPEND_EXCHANGE)
                    .bind(tenant.as_str())
                    .bind(session.as_str())
                    .bind(exchange.user_id.as_ref().map(UserId::as_str))
                    .bind(exchange.metadata.as_deref())
                    .bind(to_i64(messages.len()))
                    .bind(key.map(|key| key.key.as_str()))
                    .bind(key.map(|key| key.fingerprint.as_slice()))
                    .bind(exchange.tokens())
                    .bind(messages.iter().map(|(message, _)| message.role().as_str()).collect::<Vec<_>>())
                    .bind(tool_call_ids)
                    .bind(tool_result_of)
                    .bind(messages.iter().map(|(_, tokens)| *tokens).collect::<Vec<_>>())
                    .bind(UserId::default().as_str())
                    .bind(messages.iter().map(|(message, _)| message.json()).collect::<Vec<_>>())
                    .bind(runs.iter().map(|run| run.first).collect::<Vec<_>>())
                    .bind(runs.iter().map(|run| run.last).collect::<Vec<_>>())
                    .bind(runs.iter().map(|run| run.bytes).collect::<Vec<_>>()),
            )
            .await?;
        let Some(row) = row else {
            return Ok(AppendOutcome::UserMismatch);
        };
        let fingerprint: Option<Vec<u8>> = row.try_get("fingerprint")?;
        let replayed = fingerprint.is_some();
        if replayed && fingerprint.as_ref() != key.map(|key| &key.fingerprint) {
            return Ok(AppendOutcome::KeyReused);
        }
        Ok(AppendOutcome::Appended(PersistedExchange {
            first_seq: row.try_get("first_seq")?,
            last_seq: row.try_get("last_seq")?,
            created_at: row.try_get("created_at")?,
            replayed,
        }))
    }
}
