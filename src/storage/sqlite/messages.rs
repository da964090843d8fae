//! Reading the history, on SQLite.

use super::{Sqlite, time};
use crate::domain::id::{SessionId, TenantId};
use crate::domain::message_metadata::MessageMetadata;
use crate::storage::StoreError;
use crate::storage::row::{message_metadata, read_message};
use crate::storage::{MessageQuery, StoredMessage};
use sqlx::Row as _;

/// The first row says whether there is such a session, so that an empty page and no session are told apart.
const ASCENDING: &str = "\
    SELECT 0 AS seq, NULL AS created_at, NULL AS message FROM sessions
    WHERE tenant_id = $1 AND session_id = $2
    UNION ALL SELECT * FROM (
        SELECT seq, created_at, message FROM messages
        WHERE tenant_id = $1 AND session_id = $2 AND seq > $3 AND seq < $4 ORDER BY seq LIMIT $5
    )";

const DESCENDING: &str = "\
    SELECT 0 AS seq, NULL AS created_at, NULL AS message FROM sessions
    WHERE tenant_id = $1 AND session_id = $2
    UNION ALL SELECT * FROM (
        SELECT seq, created_at, message FROM messages
        WHERE tenant_id = $1 AND session_id = $2 AND seq > $3 AND seq < $4 ORDER BY seq DESC LIMIT $5
    )";

const OUTLINES: &str = "\
    SELECT role, tool_call_ids, tool_result_of, tokens FROM messages
    WHERE tenant_id = $1 AND session_id = $2 AND seq > $3 ORDER BY seq LIMIT $4";

impl Sqlite {
    pub(in crate::storage) async fn messages(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        page: MessageQuery,
    ) -> Result<Option<Vec<StoredMessage>>, StoreError> {
        let rows = sqlx::query(if page.descending { DESCENDING } else { ASCENDING })
            .bind(tenant.as_str())
            .bind(session.as_str())
            .bind(page.after_seq)
            .bind(page.before_seq)
            .bind(page.limit)
            .fetch_all(&self.readers)
            .await?;
        let mut messages = Vec::with_capacity(rows.len());
        let mut known = false;
        for row in &rows {
            let seq: i64 = row.try_get("seq")?;
            if seq == 0 {
                known = true;
            } else {
                messages.push(read_message!(row, time));
            }
        }
        Ok(known.then_some(messages))
    }

    pub(in crate::storage) async fn message_metadata(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        after_seq: i64,
        limit: i64,
    ) -> Result<Vec<MessageMetadata>, StoreError> {
        let query =
            sqlx::query(OUTLINES).bind(tenant.as_str()).bind(session.as_str()).bind(after_seq).bind(limit);
        let rows = query.fetch_all(&self.readers).await?;
        rows.iter()
            .map(|row| {
                message_metadata(
                    row.try_get("role")?,
                    row.try_get("tool_call_ids")?,
                    row.try_get("tool_result_of")?,
                    row.try_get("tokens")?,
                )
            })
            .collect()
    }
}
