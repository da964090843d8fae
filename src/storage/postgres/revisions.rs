//! How a summary came to be, and the way back, on Postgres.

use super::{Postgres, time};
use crate::domain::id::{SessionId, TenantId};
use crate::domain::revision::{Revision, RevisionKind};
use crate::storage::StoreError;
use crate::storage::row::{read_revision, revision_columns};
use sqlx::Row as _;

const EXISTS: &str = "SELECT 1 FROM sessions WHERE tenant_id = $1 AND session_id = $2";

const LIST: &str = concat!(
    "SELECT ",
    revision_columns!(),
    " FROM revisions WHERE tenant_id = $1 AND session_id = $2 AND revision < $3 ORDER BY revision DESC LIMIT $4"
);

const GET: &str = concat!(
    "SELECT ",
    revision_columns!(),
    " FROM revisions WHERE tenant_id = $1 AND session_id = $2 AND revision = $3"
);

const RESTORE: &str = concat!(
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
    pub(in crate::storage) async fn revisions(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        before: i64,
        limit: i64,
    ) -> Result<Option<Vec<Revision>>, StoreError> {
        let query = sqlx::query(LIST).bind(tenant.as_str()).bind(session.as_str()).bind(before).bind(limit);
        let rows = self.read_all(tenant, query).await?;
        if rows.is_empty() {
            let query = sqlx::query(EXISTS).bind(tenant.as_str()).bind(session.as_str());
            return Ok(self.read(tenant, query).await?.map(|_| Vec::new()));
        }
        rows.iter().map(|row| Ok(read_revision!(row, time))).collect::<Result<_, _>>().map(Some)
    }

    pub(in crate::storage) async fn revision(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        revision: i64,
    ) -> Result<Option<Revision>, StoreError> {
        let query = sqlx::query(GET).bind(tenant.as_str()).bind(session.as_str()).bind(revision);
        let row = self.read(tenant, query).await?;
        row.as_ref().map(|row| Ok(read_revision!(row, time))).transpose()
    }

    pub(in crate::storage) async fn restore_revision(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        revision: i64,
    ) -> Result<Option<Revision>, StoreError> {
        let row = self
            .write(
                tenant,
                sqlx::query(RESTORE)
                    .bind(tenant.as_str())
                    .bind(session.as_str())
                    .bind(revision)
                    .bind(RevisionKind::Restore.as_str()),
            )
            .await?;
        row.as_ref().map(|row| Ok(read_revision!(row, time))).transpose()
    }
}
