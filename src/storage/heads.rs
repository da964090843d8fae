//! Reading the heads of sessions. Those that are read at the same time share a statement.

use super::batch::{Batcher, places_by_tenant};
use super::pool::retry_on_disconnect;
use super::statement::{Database, DbRow as _, Sql};
use super::{SessionHead, StoreError, rows};
use crate::domain::id::{SessionId, TenantId};
use serde_json::Value;
use std::collections::HashMap;
use std::sync::Arc;

/// Largest number of heads that are read together.
const MAX_BATCH: usize = 256;

/// The tenant and the session of a head.
pub(super) type HeadRequest = (TenantId, SessionId);

pub(super) type HeadBatcher = Batcher<HeadRequest, Option<SessionHead>>;

/// Returns the batcher of a database.
pub(super) fn batcher(database: &Arc<Database>) -> HeadBatcher {
    let (of_batches, of_singles) = (Arc::clone(database), Arc::clone(database));
    let read_batch = move |requests: Vec<HeadRequest>| {
        let database = Arc::clone(&of_batches);
        async move {
            // After an error, each request reads its head by itself and gets its own error.
            let heads = read_heads(&database, &requests).await.map_or_else(
                |_| requests.iter().map(|_| None).collect(),
                |heads| heads.into_iter().map(|head| Some(Ok(head))).collect::<Vec<_>>(),
            );
            requests.into_iter().zip(heads).collect()
        }
    };
    let read_alone = move |request: HeadRequest| {
        let database = Arc::clone(&of_singles);
        async move {
            let heads =
                retry_on_disconnect(async || read_heads(&database, std::slice::from_ref(&request)).await);
            Ok(heads.await?.pop().flatten())
        }
    };
    Batcher::new(MAX_BATCH, read_batch, read_alone)
}

/// Returns the head of each session, or `None` if it does not exist.
async fn read_heads(
    database: &Database,
    requests: &[HeadRequest],
) -> Result<Vec<Option<SessionHead>>, StoreError> {
    /// On Postgres, `OFFSET 0` forces a lookup of each row, whatever number of rows the planner expects.
    macro_rules! select_heads {
        ($now:literal, $sessions:literal) => {
            concat!(
                "SELECT ",
                $now,
                " AS now, s.session_id, s.incarnation, s.last_seq, s.tokens, s.cursor_seq, s.cursor_tokens,
                    s.revision, s.lease_until, s.failures, s.retry_at, s.last_failure, s.updated_at,
                    d.incarnation AS memory_incarnation, d.version AS memory_version
                FROM ",
                $sessions
            )
        };
    }
    const SELECT_HEADS: Sql = Sql {
        postgres: select_heads!(
            "clock_timestamp()",
            "json_array_elements_text(CAST($2 AS json)) AS w (id)
                CROSS JOIN LATERAL (SELECT * FROM sessions WHERE tenant_id = $1 AND session_id = w.id OFFSET 0) AS s
                LEFT JOIN LATERAL (SELECT * FROM memories WHERE tenant_id = $1 AND user_id = s.user_id OFFSET 0) AS d ON true"
        ),
        sqlite: select_heads!(
            "$3",
            "sessions AS s LEFT JOIN memories AS d ON d.tenant_id = $1 AND d.user_id = s.user_id
                WHERE s.tenant_id = $1 AND s.session_id IN (SELECT value FROM json_each($2))"
        ),
    };
    let mut heads: HashMap<(&TenantId, SessionId), SessionHead> = HashMap::new();
    for (tenant, places) in places_by_tenant(requests.iter().map(|(tenant, _)| tenant)) {
        let sessions = places.iter().filter_map(|place| Some(requests.get(*place)?.1.as_str()));
        let sessions = sessions.collect::<Value>().to_string();
        let statement = database.statement(tenant, SELECT_HEADS).bind(sessions).bind_now();
        for row in &statement.read_all().await? {
            heads.insert((tenant, rows::session_id(row)?), rows::session_head(row, row.time("now")?)?);
        }
    }
    Ok(requests.iter().map(|(tenant, session)| heads.get(&(tenant, session.clone())).cloned()).collect())
}
