//! Users as a whole, on SQLite.

use super::Sqlite;
use crate::domain::id::{TenantId, UserId};
use crate::storage::StoreError;

const ERASE_MEMORY: &str = "DELETE FROM memories WHERE tenant_id = $1 AND user_id = $2";

const ERASE_SESSIONS: &str = "DELETE FROM sessions WHERE tenant_id = $1 AND user_id = $2";

impl Sqlite {
    pub(in crate::storage) async fn erase_user(
        &self,
        tenant: &TenantId,
        user: &UserId,
    ) -> Result<bool, StoreError> {
        let mut transaction = self.write().await?;
        let mut erased = 0;
        for statement in [ERASE_MEMORY, ERASE_SESSIONS] {
            let query = sqlx::query(statement).bind(tenant.as_str()).bind(user.as_str());
            erased += query.execute(&mut *transaction).await?.rows_affected();
        }
        transaction.commit().await?;
        if erased > 0 {
            self.forget().await;
        }
        Ok(erased > 0)
    }
}
