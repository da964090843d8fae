//! Reading the heads of sessions on Postgres: one call of a function for all tenants, under the policy of each.

use super::{Connections, Postgres};
use crate::domain::id::{SessionId, TenantId};
use crate::storage::batch::Batcher;
use crate::storage::heads::{HeadBatcher, HeadRequest, MAX_BATCH};
use crate::storage::pool::retry_on_disconnect;
use crate::storage::statement::DbRow as _;
use crate::storage::{SessionHead, StoreError, rows};

const READ_SESSION_HEADS: &str = "SELECT * FROM read_session_heads($1, $2)";

/// Returns the batcher of a pool.
pub(super) fn batcher(pool: &Connections) -> HeadBatcher {
    let (batch_pool, single_pool) = (pool.clone(), pool.clone());
    let read_batch = move |requests: Vec<HeadRequest>| {
        let pool = batch_pool.clone();
        async move {
            let heads = read_heads(&pool, &requests).await;
            // After an error, each request reads its head by itself and gets its own error.
            let heads = heads.map_or_else(
                |_| requests.iter().map(|_| None).collect(),
                |heads| heads.into_iter().map(|head| Some(Ok(head))).collect::<Vec<_>>(),
            );
            requests.into_iter().zip(heads).collect()
        }
    };
    let read_alone = move |request: HeadRequest| {
        let pool = single_pool.clone();
        async move {
            let read = async || read_heads(&pool, std::slice::from_ref(&request)).await;
            Ok(retry_on_disconnect(read).await?.pop().flatten())
        }
    };
    Batcher::new(MAX_BATCH, read_batch, read_alone)
}

/// Returns the head of each session, or `None` if it does not exist.
async fn read_heads(
    pool: &Connections,
    requests: &[HeadRequest],
) -> Result<Vec<Option<SessionHead>>, StoreError> {
    let tenants: Vec<&str> = requests.iter().map(|request| request.tenant.as_str()).collect();
    let sessions: Vec<&str> = requests.iter().map(|request| request.session.as_str()).collect();
    let rows = sqlx::query(READ_SESSION_HEADS).bind(tenants).bind(sessions).fetch_all(pool).await?;
    let mut heads = vec![None; requests.len()];
    for row in &rows {
        let place = usize::try_from(row.field::<i64>("place")?).unwrap_or(0).wrapping_sub(1);
        if let Some(head) = heads.get_mut(place) {
            *head = Some(rows::session_head(row, row.time("now")?)?);
        }
    }
    Ok(heads)
}

impl Postgres {
    pub(in crate::storage) async fn session_head(
        &self,
        tenant: &TenantId,
        session: &SessionId,
    ) -> Result<Option<SessionHead>, StoreError> {
        self.heads.run(HeadRequest { tenant: tenant.clone(), session: session.clone() }).await
    }
}
