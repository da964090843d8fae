//! Memory documents.

use super::rows;
use super::statement::Sql;
use super::store::{bounded_page_on_postgres, bounded_page_on_sqlite, decode, decode_page};
use super::{Page, Store, StoreError};
use crate::domain::id::{TenantId, UserId};
use crate::domain::memory::{MemoryAuthor, MemoryDocument, MemoryOwner, MemoryRevision};

/// A memory document to write.
#[derive(Clone, Copy, Debug)]
pub struct NewMemoryDocument<'a> {
    /// Markdown.
    pub content: &'a str,
    /// Number of words by Unicode word boundaries.
    pub words: i64,
    pub tokens: i64,
    pub author: MemoryAuthor,
}

impl Store {
    pub async fn memory_document(
        &self,
        tenant: &TenantId,
        user: &UserId,
    ) -> Result<Option<MemoryDocument>, StoreError> {
        const SELECT_MEMORY_DOCUMENT: &str = "\
            SELECT version, content, words, tokens, created_at FROM memories WHERE tenant_id = $1 AND user_id = $2";
        let statement = self.statement(tenant, SELECT_MEMORY_DOCUMENT).bind(user.as_str());
        decode(statement.read().await?, |row| rows::memory_document(row, ""))
    }

    /// Returns at most `limit` users with a memory document, in the order of their ids, after the user `after`.
    pub async fn memory_owners(
        &self,
        tenant: &TenantId,
        after: &str,
        limit: i64,
    ) -> Result<Page<MemoryOwner>, StoreError> {
        const SELECT_MEMORY_OWNERS: &str = "\
            SELECT user_id, version, words, tokens, created_at FROM memories
            WHERE tenant_id = $1 AND user_id > $2 ORDER BY user_id LIMIT $3";
        // One more user shows if there is another page.
        let statement = self.statement(tenant, SELECT_MEMORY_OWNERS).bind(after);
        let rows = statement.bind(limit.saturating_add(1)).read_all().await?;
        let mut items = rows.iter().map(rows::memory_owner).collect::<Result<Vec<_>, _>>()?;
        let size = usize::try_from(limit).unwrap_or(usize::MAX);
        let has_more = items.len() > size;
        items.truncate(size);
        Ok(Page { items, has_more })
    }

    /// Replaces the memory document if `expected` is `None` or its current version (0 if it was never written).
    /// Returns `None` if the version differs.
    pub async fn write_memory_document(
        &self,
        tenant: &TenantId,
        user: &UserId,
        document: NewMemoryDocument<'_>,
        expected: Option<i64>,
    ) -> Result<Option<MemoryDocument>, StoreError> {
        const WRITE_MEMORY_DOCUMENT: Sql = Sql {
            // Has two branches, of which at most one applies. With an expected version above 0, the document is updated but
            // never inserted, because it may have been erased meanwhile. Otherwise it is inserted, and updated only if no
            // version is expected.
            postgres: "WITH updated AS (
                    UPDATE memories SET version = version + 1, content = $3, words = $4, tokens = $5,
                        created_at = greatest(clock_timestamp(), created_at)
                    WHERE tenant_id = $1 AND user_id = $2 AND version = $6::bigint
                    RETURNING version, content, words, tokens, created_at
                ), upserted AS (
                    INSERT INTO memories AS m (tenant_id, user_id, version, content, words, tokens, created_at)
                    SELECT $1, $2, 1, $3, $4, $5, clock_timestamp() WHERE coalesce($6, 0) = 0
                    ON CONFLICT (tenant_id, user_id) DO UPDATE SET version = m.version + 1, content = $3, words = $4,
                        tokens = $5, created_at = greatest(clock_timestamp(), m.created_at)
                    WHERE $6 IS NULL
                    RETURNING version, content, words, tokens, created_at
                )
                INSERT INTO memory_revisions (tenant_id, user_id, version, content, words, tokens, created_at, author)
                SELECT $1, $2, version, content, words, tokens, created_at, $7
                FROM (TABLE updated UNION ALL TABLE upserted) AS current
                RETURNING version, content, words, tokens, created_at",
            sqlite: "INSERT INTO memories AS m (tenant_id, user_id, version, content, words, tokens, created_at,
                    incarnation)
                SELECT $1, $2, 1, $3, $4, $5, $8, randomblob(16) WHERE coalesce($6, 0) = 0
                    OR EXISTS (SELECT 1 FROM memories WHERE tenant_id = $1 AND user_id = $2)
                ON CONFLICT (tenant_id, user_id) DO UPDATE SET version = m.version + 1, content = $3, words = $4,
                    tokens = $5, created_at = max($8, m.created_at)
                WHERE $6 IS NULL OR $6 = m.version;
                INSERT INTO memory_revisions (tenant_id, user_id, version, content, words, tokens, created_at, author)
                SELECT tenant_id, user_id, version, content, words, tokens, created_at, $7 FROM memories
                WHERE tenant_id = $1 AND user_id = $2 AND changes() > 0
                RETURNING version, content, words, tokens, created_at",
        };
        let statement = self
            .statement(tenant, WRITE_MEMORY_DOCUMENT)
            .bind(user.as_str())
            .bind(document.content)
            .bind(document.words)
            .bind(document.tokens)
            .bind(expected)
            .bind(document.author.as_str())
            .bind_now();
        decode(statement.write_returning().await?, |row| rows::memory_document(row, ""))
    }

    /// Returns at most `limit` versions before `before`, newest first, including the current one. There are fewer if their
    /// texts exceed `max_bytes`.
    pub async fn memory_revisions(
        &self,
        tenant: &TenantId,
        user: &UserId,
        before: i64,
        limit: i64,
        max_bytes: i64,
    ) -> Result<Page<MemoryRevision>, StoreError> {
        const SELECT_MEMORY_REVISIONS: Sql = Sql {
            postgres: bounded_page_on_postgres!(
                "SELECT version, content, words, tokens, created_at, author FROM memory_revisions
                WHERE tenant_id = $1 AND user_id = $2 AND version < $3 ORDER BY version DESC LIMIT $4",
                "octet_length(content)",
                "version DESC",
                "$5"
            ),
            sqlite: bounded_page_on_sqlite!(
                "SELECT version AS number, octet_length(content) AS bytes FROM memory_revisions
                WHERE tenant_id = $1 AND user_id = $2 AND version < $3 ORDER BY version DESC LIMIT $4",
                "version, content, words, tokens, created_at, author",
                "memory_revisions ON tenant_id = $1 AND user_id = $2 AND version = number",
                "number DESC",
                "$5"
            ),
        };
        let statement = self.statement(tenant, SELECT_MEMORY_REVISIONS).bind(user.as_str()).bind(before);
        // One more version shows if there is another page.
        let rows = statement.bind(limit.saturating_add(1)).bind(max_bytes).read_all().await?;
        decode_page(&rows, limit, rows::memory_revision)
    }
}
