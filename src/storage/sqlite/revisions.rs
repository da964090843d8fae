//! Committing and restoring revisions on SQLite.

use super::{Sqlite, micros, now};
use crate::domain::id::{SessionId, TenantId};
use crate::domain::revision::{Revision, RevisionKind};
use crate::storage::rows::{self, meta_column, revision_columns, source_column};
use crate::storage::{NewRevision, StoreError};
use uuid::Uuid;

const UPDATE_SUMMARY: &str = "\
    UPDATE sessions SET summary = $7, summary_words = $8, summary_tokens = $9, cursor_seq = $6,
        cursor_tokens = cursor_tokens + $10, revision = revision + 1, failures = 0, retry_at = NULL, last_failure = NULL
    WHERE tenant_id = $1 AND session_id = $2 AND lease_token = $3 AND revision = $4 AND cursor_seq = $5";

const INSERT_REVISION: &str = concat!(
    "INSERT INTO revisions (tenant_id, session_id, revision, kind, from_seq, to_seq, cursor_seq, summary, summary_words,
        summary_tokens, added, meta, source, created_at)
    SELECT $1, $2, revision, $3, $4 + 1, cursor_seq, cursor_seq, summary, summary_words, summary_tokens, $5, $6, $7, $8
    FROM sessions WHERE tenant_id = $1 AND session_id = $2
    RETURNING ",
    revision_columns!()
);

const RESTORE_SUMMARY: &str = "\
    UPDATE sessions AS s SET summary = t.summary, summary_words = t.summary_words, summary_tokens = t.summary_tokens,
        cursor_seq = t.cursor_seq,
        cursor_tokens = (SELECT coalesce(sum(tokens), 0) FROM messages
            WHERE tenant_id = $1 AND session_id = $2 AND seq <= t.cursor_seq),
        revision = s.revision + 1, failures = 0, retry_at = NULL, last_failure = NULL
    FROM (
        SELECT cursor_seq, summary, summary_words, summary_tokens FROM revisions
        WHERE tenant_id = $1 AND session_id = $2 AND revision = $3
        UNION ALL SELECT 0, '', 0, 0 WHERE $3 = 0
    ) AS t
    WHERE s.tenant_id = $1 AND s.session_id = $2";

const INSERT_RESTORED_REVISION: &str = concat!(
    "INSERT INTO revisions (tenant_id, session_id, revision, kind, cursor_seq, summary, summary_words, summary_tokens,
        added, created_at)
    SELECT $1, $2, revision, $3, cursor_seq, summary, summary_words, summary_tokens, '', $4 FROM sessions
    WHERE tenant_id = $1 AND session_id = $2
    RETURNING ",
    revision_columns!()
);

impl Sqlite {
    pub(in crate::storage) async fn commit_revision(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        token: Uuid,
        revision: &NewRevision,
    ) -> Result<Option<Revision>, StoreError> {
        let mut transaction = self.begin_write().await?;
        let updated = sqlx::query(UPDATE_SUMMARY)
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
            .execute(&mut *transaction)
            .await?;
        if updated.rows_affected() == 0 {
            return Ok(None);
        }
        let row = sqlx::query(INSERT_REVISION)
            .bind(tenant.as_str())
            .bind(session.as_str())
            .bind(RevisionKind::Consolidation.as_str())
            .bind(revision.base_cursor)
            .bind(&revision.added)
            .bind(meta_column(revision.meta.as_ref()))
            .bind(source_column(revision.provenance.as_ref()))
            .bind(micros(now()))
            .fetch_one(&mut *transaction)
            .await?;
        transaction.commit().await?;
        Ok(Some(rows::revision(&row)?))
    }

    pub(in crate::storage) async fn restore_revision(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        revision: i64,
    ) -> Result<Option<Revision>, StoreError> {
        let mut transaction = self.begin_write().await?;
        let query = sqlx::query(RESTORE_SUMMARY).bind(tenant.as_str()).bind(session.as_str()).bind(revision);
        if query.execute(&mut *transaction).await?.rows_affected() == 0 {
            return Ok(None);
        }
        let row = sqlx::query(INSERT_RESTORED_REVISION)
            .bind(tenant.as_str())
            .bind(session.as_str())
            .bind(RevisionKind::Restore.as_str())
            .bind(micros(now()))
            .fetch_one(&mut *transaction)
            .await?;
        transaction.commit().await?;
        Ok(Some(rows::revision(&row)?))
    }
}
