//! Reading the heads of sessions on SQLite.

use super::now;
use crate::storage::heads::{self, HeadBatcher, HeadRequest, Heads};
use crate::storage::rows;
use crate::storage::statement::DbRow as _;
use serde_json::{Value, json};
use sqlx::SqlitePool;

const READ_SESSION_HEADS: &str = "\
    SELECT w.key AS place, s.incarnation, s.last_seq, s.tokens, s.cursor_seq, s.cursor_tokens, s.revision, s.lease_until,
        s.failures, s.retry_at, s.last_failure, s.updated_at, d.incarnation AS memory_incarnation,
        d.version AS memory_version
    FROM json_each($1) AS w
        CROSS JOIN sessions AS s ON s.tenant_id = w.value ->> 0 AND s.session_id = w.value ->> 1
        LEFT JOIN memories AS d ON d.tenant_id = s.tenant_id AND d.user_id = s.user_id";

/// Returns the batcher of a pool.
pub(super) fn batcher(readers: &SqlitePool) -> HeadBatcher {
    let readers = readers.clone();
    heads::batcher(move |requests| Box::pin(read_heads(readers.clone(), requests)))
}

/// Returns the head of each session, or `None` if it does not exist.
async fn read_heads(readers: SqlitePool, requests: &[HeadRequest]) -> Heads {
    let sessions = requests.iter().map(|request| json!([request.tenant.as_str(), request.session.as_str()]));
    let sessions = sessions.collect::<Value>().to_string();
    let now = now();
    let rows = sqlx::query(READ_SESSION_HEADS).bind(sessions).fetch_all(&readers).await?;
    let mut heads = vec![None; requests.len()];
    for row in &rows {
        let place = usize::try_from(row.field::<i64>("place")?).unwrap_or(usize::MAX);
        if let Some(head) = heads.get_mut(place) {
            *head = Some(rows::session_head(row, now)?);
        }
    }
    Ok(heads)
}
