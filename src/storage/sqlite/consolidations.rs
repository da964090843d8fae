//! Consolidating a session, on SQLite.

use super::{Sqlite, maybe_time, micros, now, time};
use crate::domain::id::{SessionId, TenantId};
use crate::domain::revision::{Revision, RevisionKind};
use crate::domain::session::Session;
use crate::storage::StoreError;
use crate::storage::row::{
    meta_column, read_revision, read_session, revision_columns, session_columns, source_column,
};
use crate::storage::{LeaseCondition, NewRevision};
use sqlx::Row as _;
use std::time::Duration;
use time::OffsetDateTime;
use uuid::Uuid;

const TAKE: &str = concat!(
    "UPDATE sessions SET lease_token = $3, lease_until = $4
    WHERE tenant_id = $1 AND session_id = $2
        AND (lease_until IS NULL OR lease_until <= $6 OR lease_until > $4 + ($4 - $6))
        AND ($5 IS NULL OR (revision = $5 AND (retry_at IS NULL OR retry_at <= $6)))
    RETURNING ",
    session_columns!()
);

const RENEW: &str = "\
    UPDATE sessions SET lease_until = $4
    WHERE tenant_id = $1 AND session_id = $2 AND lease_token = $3";

const RELEASE: &str = "\
    UPDATE sessions SET lease_token = NULL, lease_until = NULL
    WHERE tenant_id = $1 AND session_id = $2 AND lease_token = $3";

const ADVANCE: &str = "\
    UPDATE sessions SET summary = $7, summary_words = $8, summary_tokens = $9, cursor_seq = $6,
        cursor_tokens = cursor_tokens + $10, revision = revision + 1, failures = 0, retry_at = NULL, last_failure = NULL
    WHERE tenant_id = $1 AND session_id = $2 AND lease_token = $3 AND revision = $4 AND cursor_seq = $5";

const KEEP: &str = concat!(
    "INSERT INTO revisions (tenant_id, session_id, revision, kind, from_seq, to_seq, cursor_seq, summary, summary_words,
        summary_tokens, added, meta, source, created_at)
    SELECT $1, $2, revision, $3, $4 + 1, cursor_seq, cursor_seq, summary, summary_words, summary_tokens, $5, $6, $7, $8
    FROM sessions WHERE tenant_id = $1 AND session_id = $2
    RETURNING ",
    revision_columns!()
);

const FAIL: &str = "\
    UPDATE sessions SET failures = failures + 1, retry_at = $4, last_failure = $5,
        lease_token = NULL, lease_until = NULL
    WHERE tenant_id = $1 AND session_id = $2 AND lease_token = $3 RETURNING retry_at";

impl Sqlite {
    pub(in crate::storage) async fn take_lease(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        token: Uuid,
        condition: LeaseCondition,
        ttl: Duration,
    ) -> Result<Option<Session>, StoreError> {
        let now = now();
        let query = sqlx::query(TAKE)
            .bind(tenant.as_str())
            .bind(session.as_str())
            .bind(token)
            .bind(micros(now + ttl))
            .bind(condition.revision())
            .bind(micros(now));
        let row = self.written(query).await?;
        row.as_ref().map(|row| Ok(read_session!(row, time, maybe_time))).transpose()
    }

    pub(in crate::storage) async fn renew_lease(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        token: Uuid,
        ttl: Duration,
    ) -> Result<bool, StoreError> {
        let query = sqlx::query(RENEW)
            .bind(tenant.as_str())
            .bind(session.as_str())
            .bind(token)
            .bind(micros(now() + ttl));
        Ok(query.execute(&self.writer).await?.rows_affected() > 0)
    }

    pub(in crate::storage) async fn release_lease(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        token: Uuid,
    ) -> Result<(), StoreError> {
        let query = sqlx::query(RELEASE).bind(tenant.as_str()).bind(session.as_str()).bind(token);
        query.execute(&self.writer).await?;
        Ok(())
    }

    pub(in crate::storage) async fn commit_revision(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        token: Uuid,
        step: &NewRevision,
    ) -> Result<Option<Revision>, StoreError> {
        let mut transaction = self.write().await?;
        let advanced = sqlx::query(ADVANCE)
            .bind(tenant.as_str())
            .bind(session.as_str())
            .bind(token)
            .bind(step.base_revision)
            .bind(step.base_cursor)
            .bind(step.cursor)
            .bind(&step.summary.text)
            .bind(step.summary.words)
            .bind(step.summary.tokens)
            .bind(step.range_tokens)
            .execute(&mut *transaction)
            .await?;
        if advanced.rows_affected() == 0 {
            return Ok(None);
        }
        let row = sqlx::query(KEEP)
            .bind(tenant.as_str())
            .bind(session.as_str())
            .bind(RevisionKind::Consolidation.as_str())
            .bind(step.base_cursor)
            .bind(&step.added)
            .bind(meta_column(step.meta.as_ref()))
            .bind(source_column(step.source.as_ref()))
            .bind(micros(now()))
            .fetch_one(&mut *transaction)
            .await?;
        transaction.commit().await?;
        Ok(Some(read_revision!(&row, time)))
    }

    pub(in crate::storage) async fn record_failure(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        token: Uuid,
        retry_in: Duration,
        why: &str,
    ) -> Result<Option<OffsetDateTime>, StoreError> {
        let query = sqlx::query(FAIL)
            .bind(tenant.as_str())
            .bind(session.as_str())
            .bind(token)
            .bind(micros(now() + retry_in))
            .bind(why);
        let row = self.written(query).await?;
        Ok(row.as_ref().map(|row| time(row, "retry_at")).transpose()?)
    }
}
