//! Committing and restoring revisions on Postgres.

use super::Postgres;
use crate::domain::id::{SessionId, TenantId};
use crate::domain::revision::{Revision, RevisionKind};
use crate::storage::rows::{self, meta_column, revision_columns, source_column};
use crate::storage::{NewRevision, StoreError};
use uuid::Uuid;

const COMMIT_REVISION: &str = concat!(
    "WITH session AS (
        UPDATE sessions SET summary = $7, summary_words = $8, summary_tokens = $9, cursor_seq = $6,
            cursor_tokens = cursor_tokens + $10, revision = revision + 1, failures = 0, retry_at = NULL,
            last_failure = NULL
        WHERE tenant_id = $1 AND session_id = $2 AND lease_token = $3 AND revision = $4 AND cursor_seq = $5
        RETURNING revision AS new_revision
    )
    INSERT INTO revisions (tenant_id, session_id, revision, kind, from_seq, to_seq, cursor_seq, summary, summary_words,
        summary_tokens, added, meta, source, created_at)
    SELECT $1, $2, new_revision, $11, $5 + 1, $6, $6, $7, $8, $9, $12, $13, $14, now() FROM session
    RETURNING ",
    revision_columns!()
);

const RESTORE_REVISION: &str = concat!(
    "WITH target AS (
        SELECT cursor_seq, summary, summary_words, summary_tokens FROM revisions
        WHERE tenant_id = $1 AND session_id = $2 AND revision = $3
        UNION ALL SELECT 0, '', 0, 0 WHERE $3 = 0
    ), session AS (
        UPDATE sessions AS s SET summary = t.summary, summary_words = t.summary_words,
            summary_tokens = t.summary_tokens, cursor_seq = t.cursor_seq,
            cursor_tokens = (SELECT coalesce(sum(tokens), 0) FROM messages
                WHERE tenant_id = $1 AND session_id = $2 AND seq <= t.cursor_seq),
            revision = s.revision + 1, failures = 0, retry_at = NULL, last_failure = NULL
        FROM target AS t WHERE s.tenant_id = $1 AND s.session_id = $2
        RETURNING s.revision AS new_revision, s.cursor_seq, s.summary, s.summary_words, s.summary_tokens
    )
    INSERT INTO revisions (tenant_id, session_id, revision, kind, cursor_seq, summary, summary_words, summary_tokens,
        added, created_at)
    SELECT $1, $2, new_revision, $4, cursor_seq, summary, summary_words, summary_tokens, '', now() FROM session
    RETURNING ",
    revision_columns!()
);

impl Postgres {
    pub(in crate::storage) async fn commit_revision(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        token: Uuid,
        revision: &NewRevision,
    ) -> Result<Option<Revision>, StoreError> {
        let query = sqlx::query(COMMIT_REVISION)
            .bind(tenant.as_str())
            .bind(session.as_str())
            .bind(token)
            .bind(revision.base_revision)
            .bind(revision.base_cursor)
            .bind(revision.cursor)
            .bind(&revision.summary.text)
            .bind(revision.summary.words)
            .bind(revision.summary.tokens)
            .bind(revision.range_tokens)
            .bind(RevisionKind::Consolidation.as_str())
            .bind(&revision.added)
            .bind(meta_column(revision.meta.as_ref()))
            .bind(source_column(revision.provenance.as_ref()));
        let row = self.write_returning(tenant, query).await?;
        row.as_ref().map(rows::revision).transpose()
    }

    pub(in crate::storage) async fn restore_revision(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        revision: i64,
    ) -> Result<Option<Revision>, StoreError> {
        let query = sqlx::query(RESTORE_REVISION)
            .bind(tenant.as_str())
            .bind(session.as_str())
            .bind(revision)
            .bind(RevisionKind::Restore.as_str());
        let row = self.write_returning(tenant, query).await?;
        row.as_ref().map(rows::revision).transpose()
    }
}
