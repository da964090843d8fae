//! Consolidating a session, on Postgres.

use super::{Postgres, maybe_time, micros, time};
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
    "UPDATE sessions SET lease_token = $3, lease_until = now() + $4 * interval '1 microsecond'
    WHERE tenant_id = $1 AND session_id = $2 AND (lease_until IS NULL OR lease_until <= now()
            OR lease_until > now() + 2 * $4 * interval '1 microsecond')
        AND ($5::bigint IS NULL OR (revision = $5 AND (retry_at IS NULL OR retry_at <= now())))
    RETURNING ",
    session_columns!()
);

const RENEW: &str = "\
    UPDATE sessions SET lease_until = now() + $4 * interval '1 microsecond'
    WHERE tenant_id = $1 AND session_id = $2 AND lease_token = $3";

const RELEASE: &str = "\
    UPDATE sessions SET lease_token = NULL, lease_until = NULL
    WHERE tenant_id = $1 AND session_id = $2 AND lease_token = $3";

const COMMIT: &str = concat!(
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

const FAIL: &str = "\
    UPDATE sessions SET failures = failures + 1, retry_at = now() + $4 * interval '1 microsecond', last_failure = $5,
        lease_token = NULL, lease_until = NULL
    WHERE tenant_id = $1 AND session_id = $2 AND lease_token = $3 RETURNING retry_at";

impl Postgres {
    pub(in crate::storage) async fn take_lease(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        token: Uuid,
        condition: LeaseCondition,
        ttl: Duration,
    ) -> Result<Option<Session>, StoreError> {
        let row = self
            .write(
                tenant,
                sqlx::query(TAKE)
                    .bind(tenant.as_str())
                    .bind(session.as_str())
                    .bind(token)
                    .bind(micros(ttl))
                    .bind(condition.revision()),
            )
            .await?;
        row.as_ref().map(|row| Ok(read_session!(row, time, maybe_time))).transpose()
    }

    pub(in crate::storage) async fn renew_lease(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        token: Uuid,
        ttl: Duration,
    ) -> Result<bool, StoreError> {
        let query =
            sqlx::query(RENEW).bind(tenant.as_str()).bind(session.as_str()).bind(token).bind(micros(ttl));
        Ok(self.execute(tenant, query).await? > 0)
    }

    pub(in crate::storage) async fn release_lease(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        token: Uuid,
    ) -> Result<(), StoreError> {
        let query = sqlx::query(RELEASE).bind(tenant.as_str()).bind(session.as_str()).bind(token);
        self.execute(tenant, query).await?;
        Ok(())
    }

    pub(in crate::storage) async fn commit_revision(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        token: Uuid,
        step: &NewRevision,
    ) -> Result<Option<Revision>, StoreError> {
        let row = self
            .write(
                tenant,
                sqlx::query(COMMIT)
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
                    .bind(RevisionKind::Consolidation.as_str())
                    .bind(&step.added)
                    .bind(meta_column(step.meta.as_ref()))
                    .bind(source_column(step.source.as_ref())),
            )
            .await?;
        row.as_ref().map(|row| Ok(read_revision!(row, time))).transpose()
    }

    pub(in crate::storage) async fn record_failure(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        token: Uuid,
        retry_in: Duration,
        why: &str,
    ) -> Result<Option<OffsetDateTime>, StoreError> {
        let row = self
            .write(
                tenant,
                sqlx::query(FAIL)
                    .bind(tenant.as_str())
                    .bind(session.as_str())
                    .bind(token)
                    .bind(micros(retry_in))
                    .bind(why),
            )
            .await?;
        Ok(row.as_ref().map(|row| time(row, "retry_at")).transpose()?)
    }
}
