//! Reading the heads of sessions on Postgres: one call of a function for all tenants, under the policy of each.

use super::{Connections, Postgres};
use crate::domain::id::{SessionId, TenantId};
use crate::storage::batch::Batcher;
use crate::storage::pool::retry_on_disconnect;
use crate::storage::rows;
use crate::storage::statement::DbRow as _;
use crate::storage::{SessionHead, StoreError};
use std::slice;

/// Largest number of heads that one statement reads.
const MAX_BATCH: usize = 256;

const READ_SESSION_HEADS: &str = "SELECT * FROM read_session_heads($1, $2)";

#[derive(Clone, Debug)]
pub(super) struct HeadRequest {
    tenant: TenantId,
    session: SessionId,
}

pub(super) type HeadBatcher = Batcher<HeadRequest, Option<SessionHead>>;

/// Returns the batcher of a pool.
pub(super) fn batcher(pool: &Connections) -> HeadBatcher {
    let pool = pool.keeping();
    let pool_of_one = pool.clone();
    let read_batch = move |requests: Vec<HeadRequest>| {
        let pool = pool.clone();
        async move {
            // After an error, each request reads its head by itself and gets its own error.
            let heads = read_heads(&pool, &requests).await.map_or_else(
                |_| requests.iter().map(|_| None).collect(),
                |heads| heads.into_iter().map(|head| Some(Ok(head))).collect::<Vec<_>>(),
            );
            requests.into_iter().zip(heads).collect()
        }
    };
    let read_alone = move |request: HeadRequest| {
        let pool = pool_of_one.clone();
        async move {
            let heads = retry_on_disconnect(async || read_heads(&pool, slice::from_ref(&request)).await);
            Ok(heads.await?.pop().flatten())
        }
    };
    Batcher::new(MAX_BATCH, read_batch, read_alone)
}

impl Postgres {
    /// Returns the head of a session, or `None` if it does not exist. Sessions that are read at the same time share a statement.
    pub(in crate::storage) async fn session_head(
        &self,
        tenant: &TenantId,
        session: &SessionId,
    ) -> Result<Option<SessionHead>, StoreError> {
        self.heads.run(HeadRequest { tenant: tenant.clone(), session: session.clone() }).await
    }
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
