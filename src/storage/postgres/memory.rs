//! Writing memory documents on Postgres.

use super::Postgres;
use crate::domain::id::{TenantId, UserId};
use crate::domain::memory::MemoryDocument;
use crate::storage::{NewMemoryDocument, StoreError, rows};

/// Has two branches, of which at most one applies. With an expected version above 0, the document is updated but never
/// inserted, because it may have been erased meanwhile. Otherwise it is inserted, and updated only if no version is
/// expected.
const WRITE_MEMORY_DOCUMENT: &str = "\
    WITH updated AS (
        UPDATE memories SET version = version + 1, content = $3, words = $4, tokens = $5,
            created_at = greatest(clock_timestamp(), created_at)
        WHERE tenant_id = $1 AND user_id = $2 AND version = $6::bigint
        RETURNING version, content, words, tokens, created_at
    ), upserted AS (
        INSERT INTO memories AS m (tenant_id, user_id, version, content, words, tokens, created_at)
        SELECT $1, $2, 1, $3, $4, $5, clock_timestamp() WHERE coalesce($6, 0) = 0
        ON CONFLICT (tenant_id, user_id) DO UPDATE SET version = m.version + 1, content = $3, words = $4, tokens = $5,
            created_at = greatest(clock_timestamp(), m.created_at)
        WHERE $6 IS NULL
        RETURNING version, content, words, tokens, created_at
    )
    INSERT INTO memory_revisions (tenant_id, user_id, version, content, words, tokens, created_at)
    SELECT $1, $2, version, content, words, tokens, created_at
    FROM (TABLE updated UNION ALL TABLE upserted) AS current
    RETURNING version, content, words, tokens, created_at";

impl Postgres {
    pub(in crate::storage) async fn write_memory_document(
        &self,
        tenant: &TenantId,
        user: &UserId,
        document: NewMemoryDocument<'_>,
        expected: Option<i64>,
    ) -> Result<Option<MemoryDocument>, StoreError> {
        let query = sqlx::query(WRITE_MEMORY_DOCUMENT)
            .bind(tenant.as_str())
            .bind(user.as_str())
            .bind(document.content)
            .bind(document.words)
            .bind(document.tokens)
            .bind(expected);
        let row = self.write_returning(tenant, query).await?;
        row.map(|row| rows::memory_document(&row, "")).transpose()
    }
}
