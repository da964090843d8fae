//! Memory documents, on Postgres.

use super::{Postgres, time};
use crate::domain::id::{TenantId, UserId};
use crate::domain::memory::MemoryDocument;
use crate::storage::NewMemoryDocument;
use crate::storage::StoreError;
use crate::storage::row::read_memory;
use sqlx::Row as _;

const GET: &str = "\
    SELECT version, content, words, tokens, created_at FROM memories WHERE tenant_id = $1 AND user_id = $2";

/// Two ways, of which one applies: an expected version is replaced and never made, for its document may be erased
/// meanwhile; without one, or with 0, the document is made, and replaced only if no version was named.
const WRITE: &str = "\
    WITH replaced AS (
        UPDATE memories SET version = version + 1, content = $3, words = $4, tokens = $5,
            created_at = greatest(clock_timestamp(), created_at)
        WHERE tenant_id = $1 AND user_id = $2 AND version = $6::bigint
        RETURNING version, content, words, tokens, created_at
    ), written AS (
        INSERT INTO memories AS m (tenant_id, user_id, version, content, words, tokens, created_at)
        SELECT $1, $2, 1, $3, $4, $5, clock_timestamp() WHERE coalesce($6, 0) = 0
        ON CONFLICT (tenant_id, user_id) DO UPDATE SET version = m.version + 1, content = $3, words = $4, tokens = $5,
            created_at = greatest(clock_timestamp(), m.created_at)
        WHERE $6 IS NULL
        RETURNING version, content, words, tokens, created_at
    )
    INSERT INTO memory_revisions (tenant_id, user_id, version, content, words, tokens, created_at)
    SELECT $1, $2, version, content, words, tokens, created_at
    FROM (TABLE replaced UNION ALL TABLE written) AS current
    RETURNING version, content, words, tokens, created_at";

const LIST: &str = "\
    SELECT version, content, words, tokens, created_at FROM memory_revisions
    WHERE tenant_id = $1 AND user_id = $2 AND version < $3 ORDER BY version DESC LIMIT $4";

impl Postgres {
    pub(in crate::storage) async fn memory_document(
        &self,
        tenant: &TenantId,
        user: &UserId,
    ) -> Result<Option<MemoryDocument>, StoreError> {
        let query = sqlx::query(GET).bind(tenant.as_str()).bind(user.as_str());
        let row = self.read(tenant, query).await?;
        row.as_ref().map(|row| Ok(read_memory!(row, "", time))).transpose()
    }

    pub(in crate::storage) async fn write_memory_document(
        &self,
        tenant: &TenantId,
        user: &UserId,
        new: NewMemoryDocument<'_>,
        expected: Option<i64>,
    ) -> Result<Option<MemoryDocument>, StoreError> {
        let row = self
            .write(
                tenant,
                sqlx::query(WRITE)
                    .bind(tenant.as_str())
                    .bind(user.as_str())
                    .bind(new.content)
                    .bind(new.words)
                    .bind(new.tokens)
                    .bind(expected),
            )
            .await?;
        row.as_ref().map(|row| Ok(read_memory!(row, "", time))).transpose()
    }

    pub(in crate::storage) async fn memory_revisions(
        &self,
        tenant: &TenantId,
        user: &UserId,
        before: i64,
        limit: i64,
    ) -> Result<Vec<MemoryDocument>, StoreError> {
        let query = sqlx::query(LIST).bind(tenant.as_str()).bind(user.as_str()).bind(before).bind(limit);
        let rows = self.read_all(tenant, query).await?;
        rows.iter().map(|row| Ok(read_memory!(row, "", time))).collect()
    }
}
