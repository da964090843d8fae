//! Erasing a user, and the traces of erased data, on SQLite.

use super::Sqlite;
use crate::domain::id::{TenantId, UserId};
use crate::storage::StoreError;

const DELETE_MEMORY_DOCUMENT: &str = "DELETE FROM memories WHERE tenant_id = $1 AND user_id = $2";
const DELETE_SESSIONS_OF_USER: &str = "DELETE FROM sessions WHERE tenant_id = $1 AND user_id = $2";

impl Sqlite {
    pub(in crate::storage) async fn erase_user(
        &self,
        tenant: &TenantId,
        user: &UserId,
    ) -> Result<bool, StoreError> {
        let mut transaction = self.begin_write().await?;
        let mut deleted = 0;
        for statement in [DELETE_MEMORY_DOCUMENT, DELETE_SESSIONS_OF_USER] {
            let query = sqlx::query(statement).bind(tenant.as_str()).bind(user.as_str());
            deleted += query.execute(&mut *transaction).await?.rows_affected();
        }
        transaction.commit().await?;
        if deleted > 0 {
            self.truncate_wal().await;
        }
        Ok(deleted > 0)
    }

    /// Removes erased data from the write-ahead log, too: old frames would stay in that file until they are overwritten.
    /// This is best effort; if a reader prevents it, the next checkpoint does it.
    pub(in crate::storage) async fn truncate_wal(&self) {
        const TRUNCATE_WAL: &str = "PRAGMA wal_checkpoint(TRUNCATE)";
        if let Err(error) = sqlx::query(TRUNCATE_WAL).fetch_all(&self.writer).await {
            tracing::warn!(%error, "failed to truncate the write-ahead log; it may still contain erased data");
        }
    }
}
