//! Reading the heads of sessions on Postgres: one call of a function for all tenants, under the policy of each.

use super::Connections;
use crate::storage::heads::{self, HeadBatcher, HeadRequest, Heads};
use crate::storage::rows;
use crate::storage::statement::DbRow as _;

const READ_SESSION_HEADS: &str = "SELECT * FROM read_session_heads($1, $2)";

/// Returns the batcher of a pool.
pub(super) fn batcher(pool: &Connections) -> HeadBatcher {
    let pool = pool.keeping();
    heads::batcher(move |requests| Box::pin(read_heads(pool.clone(), requests)))
}

/// Returns the head of each session, or `None` if it does not exist.
async fn read_heads(pool: Connections, requests: &[HeadRequest]) -> Heads {
    let tenants: Vec<&str> = requests.iter().map(|request| request.tenant.as_str()).collect();
    let sessions: Vec<&str> = requests.iter().map(|request| request.session.as_str()).collect();
    let rows = sqlx::query(READ_SESSION_HEADS).bind(tenants).bind(sessions).fetch_all(&pool).await?;
    let mut heads = vec![None; requests.len()];
    for row in &rows {
        let place = usize::try_from(row.field::<i64>("place")?).unwrap_or(0).wrapping_sub(1);
        if let Some(head) = heads.get_mut(place) {
            *head = Some(rows::session_head(row, row.time("now")?)?);
        }
    }
    Ok(heads)
}
