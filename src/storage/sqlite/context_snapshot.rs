//! Reading all that a context is made of, on SQLite.

use super::{Sqlite, maybe_time, now, time};
use crate::domain::id::{SessionId, TenantId, UserId};
use crate::domain::message_metadata::ContextMessage;
use crate::storage::ContextSnapshot;
use crate::storage::StoreError;
use crate::storage::row::{limit, message_metadata, read_memory, read_session};
use sqlx::Row as _;

/// One statement is one snapshot. The tail's border is a scalar subquery, known before the index is asked; as a join,
/// it made the database read the whole history. The first row has the state, all others a message each.
const RECALL: &str = "\
    WITH session AS MATERIALIZED (
        SELECT session_id, user_id, metadata, last_seq, tokens, cursor_seq, cursor_tokens, summary, summary_words,
            summary_tokens, revision, lease_until, failures, retry_at, last_failure, created_at, updated_at
        FROM sessions WHERE tenant_id = $1 AND session_id = $2
    )
    SELECT session.*, d.version AS d_version, d.content AS d_content, d.words AS d_words,
        d.tokens AS d_tokens, d.created_at AS d_created_at, 0 AS m_seq, 0 AS m_tokens, '' AS m_message,
        '' AS m_role, NULL AS m_opens, NULL AS m_answers
    FROM (SELECT 1) AS always LEFT JOIN session ON true
        LEFT JOIN memories AS d ON d.tenant_id = $1 AND d.user_id = coalesce(session.user_id, $3)
    UNION ALL
    SELECT NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
        NULL, NULL, NULL, NULL, NULL, m.seq, m.tokens, m.message, m.role, m.tool_call_ids, m.tool_result_of
    FROM messages AS m WHERE m.tenant_id = $1 AND m.session_id = $2
        AND m.seq > (SELECT max(cursor_seq, last_seq - $4) FROM session)";

impl Sqlite {
    pub(in crate::storage) async fn load_context(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        user: &UserId,
        most: usize,
    ) -> Result<ContextSnapshot, StoreError> {
        let rows = sqlx::query(RECALL)
            .bind(tenant.as_str())
            .bind(session.as_str())
            .bind(user.as_str())
            .bind(limit(most))
            .fetch_all(&self.readers)
            .await?;
        let mut tail = Vec::with_capacity(rows.len());
        let mut state = None;
        for row in &rows {
            let seq: i64 = row.try_get("m_seq")?;
            if seq == 0 {
                state = Some(row);
            } else {
                tail.push(ContextMessage {
                    seq,
                    metadata: message_metadata(
                        row.try_get("m_role")?,
                        row.try_get("m_opens")?,
                        row.try_get("m_answers")?,
                        row.try_get("m_tokens")?,
                    )?,
                    json: row.try_get("m_message")?,
                });
            }
        }
        tail.sort_unstable_by_key(|message| message.seq);
        let row = state.ok_or(sqlx::Error::RowNotFound)?;
        let session = match row.try_get::<Option<&str>, _>("session_id")? {
            Some(_) => Some(read_session!(row, time, maybe_time)),
            None => None,
        };
        let memory = match row.try_get::<Option<i64>, _>("d_version")? {
            Some(_) => Some(read_memory!(row, "d_", time)),
            None => None,
        };
        Ok(ContextSnapshot { now: now(), session, memory, tail })
    }
}
