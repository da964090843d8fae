//! Reading the heads of sessions on SQLite.

use super::{Sqlite, now};
use crate::domain::id::{SessionId, TenantId};
use crate::storage::batch::Batcher;
use crate::storage::heads::{HeadBatcher, HeadRequest, MAX_BATCH};
use crate::storage::statement::DbRow as _;
use crate::storage::{SessionHead, StoreError, rows};
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
    let (batch_readers, single_readers) = (readers.clone(), readers.clone());
    let read_batch = move |requests: Vec<HeadRequest>| {
        let readers = batch_readers.clone();
        async move {
            let heads = read_heads(&readers, &requests).await;
            // After an error, each request reads its head by itself and gets its own error.
            let heads = heads.map_or_else(
                |_| requests.iter().map(|_| None).collect(),
                |heads| heads.into_iter().map(|head| Some(Ok(head))).collect::<Vec<_>>(),
            );
            requests.into_iter().zip(heads).collect()
        }
    };
    let read_alone = move |request: HeadRequest| {
        let readers = single_readers.clone();
        async move { Ok(read_heads(&readers, std::slice::from_ref(&request)).await?.pop().flatten()) }
    };
    Batcher::new(MAX_BATCH, read_batch, read_alone)
}

/// Returns the head of each session, or `None` if it does not exist.
async fn read_heads(
    readers: &SqlitePool,
    requests: &[HeadRequest],
) -> Result<Vec<Option<SessionHead>>, StoreError> {
    let sessions = requests.iter().map(|request| json!([request.tenant.as_str(), request.session.as_str()]));
    let sessions = sessions.collect::<Value>().to_string();
    let now = now();
    let rows = sqlx::query(READ_SESSION_HEADS).bind(sessions).fetch_all(readers).await?;
    let mut heads = vec![None; requests.len()];
    for row in &rows {
        let place = usize::try_from(row.field::<i64>("place")?).unwrap_or(usize::MAX);
        if let Some(head) = heads.get_mut(place) {
            *head = Some(rows::session_head(row, now)?);
        }
    }
    Ok(heads)
}

impl Sqlite {
    pub(in crate::storage) async fn session_head(
        &self,
        tenant: &TenantId,
        session: &SessionId,
    ) -> Result<Option<SessionHead>, StoreError> {
        self.heads.run(HeadRequest { tenant: tenant.clone(), session: session.clone() }).await
    }
}
