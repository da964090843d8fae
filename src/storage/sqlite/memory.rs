//! Writing memory documents on SQLite.

use super::{Sqlite, micros, now};
use crate::domain::id::{TenantId, UserId};
use crate::domain::memory::MemoryDocument;
use crate::storage::store::SELECT_MEMORY_DOCUMENT;
use crate::storage::{NewMemoryDocument, StoreError, rows};
use sqlx::Row as _;

const UPSERT_MEMORY_DOCUMENT: &str = "\
    INSERT INTO memories (tenant_id, user_id, version, content, words, tokens, created_at)
    VALUES ($1, $2, $3, $4, $5, $6, $7)
    ON CONFLICT (tenant_id, user_id) DO UPDATE SET version = excluded.version, content = excluded.content,
        words = excluded.words, tokens = excluded.tokens, created_at = max(created_at, excluded.created_at)
    RETURNING version, content, words, tokens, created_at";

const INSERT_MEMORY_REVISION: &str = "\
    INSERT INTO memory_revisions (tenant_id, user_id, version, content, words, tokens, created_at)
    SELECT tenant_id, user_id, version, content, words, tokens, created_at FROM memories
    WHERE tenant_id = $1 AND user_id = $2";

impl Sqlite {
    pub(in crate::storage) async fn write_memory_document(
        &self,
        tenant: &TenantId,
        user: &UserId,
        document: NewMemoryDocument<'_>,
        expected: Option<i64>,
    ) -> Result<Option<MemoryDocument>, StoreError> {
        let mut transaction = self.begin_write().await?;
        let query = sqlx::query(SELECT_MEMORY_DOCUMENT).bind(tenant.as_str()).bind(user.as_str());
        let row = query.fetch_optional(&mut *transaction).await?;
        let version: i64 = row.map(|row| row.try_get("version")).transpose()?.unwrap_or(0);
        if expected.is_some_and(|expected| expected != version) {
            return Ok(None);
        }
        let row = sqlx::query(UPSERT_MEMORY_DOCUMENT)
            .bind(tenant.as_str())
            .bind(user.as_str())
            .bind(version + 1)
            .bind(document.content)
            .bind(document.words)
            .bind(document.tokens)
            .bind(micros(now()))
            .fetch_one(&mut *transaction)
            .await?;
        let query = sqlx::query(INSERT_MEMORY_REVISION).bind(tenant.as_str()).bind(user.as_str());
        query.execute(&mut *transaction).await?;
        transaction.commit().await?;
        Ok(Some(rows::memory_document(&row, "")?))
    }
}
