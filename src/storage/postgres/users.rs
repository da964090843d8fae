//! Users as a whole, on Postgres.

use super::Postgres;
use crate::domain::id::{TenantId, UserId};
use crate::storage::StoreError;
use sqlx::Row as _;

const ERASE: &str = "\
    WITH memory AS (
        DELETE FROM memories WHERE tenant_id = $1 AND user_id = $2 RETURNING 1
    ), theirs AS (
        DELETE FROM sessions WHERE tenant_id = $1 AND user_id = $2 RETURNING 1
    )
    SELECT (SELECT count(*) FROM memory) + (SELECT count(*) FROM theirs) AS erased";

impl Postgres {
    pub(in crate::storage) async fn erase_user(
        &self,
        tenant: &TenantId,
        user: &UserId,
    ) -> Result<bool, StoreError> {
        let row = self
            .write(tenant, sqlx::query(ERASE).bind(tenant.as_str()).bind(user.as_str()))
            .await?
            .ok_or(sqlx::Error::RowNotFound)?;
        let erased: i64 = row.try_get("erased")?;
        Ok(erased > 0)
    }
}
