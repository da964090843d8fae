//! Erasing a user on Postgres.

use super::Postgres;
use crate::domain::id::{TenantId, UserId};
use crate::storage::StoreError;
use sqlx::Row as _;

const DELETE_USER: &str = "\
    WITH deleted_memory AS (
        DELETE FROM memories WHERE tenant_id = $1 AND user_id = $2 RETURNING 1
    ), deleted_sessions AS (
        DELETE FROM sessions WHERE tenant_id = $1 AND user_id = $2 RETURNING 1
    )
    SELECT (SELECT count(*) FROM deleted_memory) + (SELECT count(*) FROM deleted_sessions) AS deleted";

impl Postgres {
    pub(in crate::storage) async fn erase_user(
        &self,
        tenant: &TenantId,
        user: &UserId,
    ) -> Result<bool, StoreError> {
        let query = sqlx::query(DELETE_USER).bind(tenant.as_str()).bind(user.as_str());
        let row = self.write_returning(tenant, query).await?.ok_or(sqlx::Error::RowNotFound)?;
        Ok(row.try_get::<i64, _>("deleted")? > 0)
    }
}
