//! Memory documents, on SQLite.

use super::{Sqlite, micros, now, time};
use crate::domain::id::{TenantId, UserId};
use crate::domain::memory::MemoryDocument;
use crate::storage::NewMemoryDocument;
use crate::storage::StoreError;
use crate::storage::row::read_memory;
use sqlx::Row as _;

const GET: &str = "\
    SELECT version, content, words, tokens, created_at FROM memories WHERE tenant_id = $1 AND user_id = $2";

const INSERT: &str = "\
    INSERT INTO memories (tenant_id, user_id, version, content, words, tokens, created_at)
    VALUES ($1, $2, $3, $4, $5, $6, $7)
    ON CONFLICT (tenant_id, user_id) DO UPDATE SET version = excluded.version, content = excluded.content,
        words = excluded.words, tokens = excluded.tokens, created_at = max(created_at, excluded.created_at)
    RETURNING version, content, words, tokens, created_at";

const KEEP: &str = "\
    INSERT INTO memory_revisions (tenant_id, user_id, version, content, words, tokens, created_at)
    SELECT tenant_id, user_id, version, content, words, tokens, created_at FROM memories
    WHERE tenant_id = $1 AND user_id = $2";

const LIST: &str = "\
    SELECT version, content, words, tokens, created_at FROM memory_revisions
    WHERE tenant_id = $1 AND user_id = $2 AND version < $3 ORDER BY version DESC LIMIT $4";

impl Sqlite {
    pub(in crate::storage) async fn memory_document(
        &self,
        tenant: &TenantId,
        user: &UserId,
    ) -> Result<Option<MemoryDocument>, StoreError> {
        let query = sqlx::query(GET).bind(tenant.as_str()).bind(user.as_str());
        let row = query.fetch_optional(&self.readers).await?;
        row.as_ref().map(|row| Ok(read_memory!(row, "", time))).transpose()
    }

    pub(in crate::storage) async fn write_memory_document(
        &self,
        tenant: &TenantId,
        user: &UserId,
        new: NewMemoryDocument<'_>,
        expected: Option<i64>,
    ) -> Result<Option<MemoryDocument>, StoreError> {
        let mut transaction = self.write().await?;
        let query = sqlx::query(GET).bind(tenant.as_str()).bind(user.as_str());
        let row = query.fetch_optional(&mut *transaction).await?;
        let version: i64 = row.map(|row| row.try_get("version")).transpose()?.unwrap_or(0);
        if expected.is_some_and(|expected| expected != version) {
            return Ok(None);
        }
        let row = sqlx::query(INSERT)
            .bind(tenant.as_str())
            .bind(user.as_str())
            .bind(version + 1)
            .bind(new.content)
            .bind(new.words)
            .bind(new.tokens)
            .bind(micros(now()))
            .fetch_one(&mut *transaction)
            .await?;
        sqlx::query(KEEP).bind(tenant.as_str()).bind(user.as_str()).execute(&mut *transaction).await?;
        transaction.commit().await?;
        Ok(Some(read_memory!(&row, "", time)))
    }

    pub(in crate::storage) async fn memory_revisions(
        &self,
        tenant: &TenantId,
        user: &UserId,
        before: i64,
        limit: i64,
    ) -> Result<Vec<MemoryDocument>, StoreError> {
        let query = sqlx::query(LIST).bind(tenant.as_str()).bind(user.as_str()).bind(before).bind(limit);
        let rows = query.fetch_all(&self.readers).await?;
        rows.iter().map(|row| Ok(read_memory!(row, "", time))).collect()
    }
}
