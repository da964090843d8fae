//! How a summary came to be, and the way back, on SQLite.

use super::{Sqlite, micros, now, time};
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

const SET_BACK: &str = "\
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

const KEEP: &str = concat!(
    "INSERT INTO revisions (tenant_id, session_id, revision, kind, cursor_seq, summary, summary_words, summary_tokens,
        added, created_at)
    SELECT $1, $2, revision, $3, cursor_seq, summary, summary_words, summary_tokens, '', $4 FROM sessions
    WHERE tenant_id = $1 AND session_id = $2
    RETURNING ",
    revision_columns!()
);

impl Sqlite {
    pub(in crate::storage) async fn revisions(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        before: i64,
        limit: i64,
    ) -> Result<Option<Vec<Revision>>, StoreError> {
        let query = sqlx::query(LIST).bind(tenant.as_str()).bind(session.as_str()).bind(before).bind(limit);
        let rows = query.fetch_all(&self.readers).await?;
        if rows.is_empty() {
            let query = sqlx::query(EXISTS).bind(tenant.as_str()).bind(session.as_str());
            return Ok(query.fetch_optional(&self.readers).await?.map(|_| Vec::new()));
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
        let row = query.fetch_optional(&self.readers).await?;
        row.as_ref().map(|row| Ok(read_revision!(row, time))).transpose()
    }

    pub(in crate::storage) async fn restore_revision(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        revision: i64,
    ) -> Result<Option<Revision>, StoreError> {
        let mut transaction = self.write().await?;
        let query = sqlx::query(SET_BACK).bind(tenant.as_str()).bind(session.as_str()).bind(revision);
        if query.execute(&mut *transaction).await?.rows_affected() == 0 {
            return Ok(None);
        }
        let row = sqlx::query(KEEP)
            .bind(tenant.as_str())
            .bind(session.as_str())
            .bind(RevisionKind::Restore.as_str())
            .bind(micros(now()))
            .fetch_one(&mut *transaction)
            .await?;
        transaction.commit().await?;
        Ok(Some(read_revision!(&row, time)))
    }
}
