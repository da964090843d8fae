//! Sessions as a whole, on Postgres.

use super::{Postgres, maybe_time, time};
use crate::domain::id::{SessionId, TenantId, UserId};
use crate::domain::session::Session;
use crate::storage::SessionPosition;
use crate::storage::StoreError;
use crate::storage::row::{read_session, session_columns};
use sqlx::Row as _;

const GET: &str =
    concat!("SELECT ", session_columns!(), " FROM sessions WHERE tenant_id = $1 AND session_id = $2");

/// The hour leads, because it is what the index has; see the migration. It is compared whether or not there is a
/// place to begin behind, so that any plan of the statement begins there; and it is a subquery, because behind
/// row-level security an index is asked for plain values only.
const LIST: &str = concat!(
    "SELECT ",
    session_columns!(),
    " FROM sessions WHERE tenant_id = $1
        AND activity_hour <= (
            SELECT coalesce(floor(extract(epoch FROM $2::timestamptz) / 3600)::bigint, 9223372036854775807)
        )
        AND ($2 IS NULL OR (updated_at, session_id) < ($2, $3))
    ORDER BY activity_hour DESC, updated_at DESC, session_id DESC LIMIT $4"
);

const LIST_OF_USER: &str = concat!(
    "SELECT ",
    session_columns!(),
    " FROM sessions WHERE tenant_id = $1
        AND activity_hour <= (
            SELECT coalesce(floor(extract(epoch FROM $2::timestamptz) / 3600)::bigint, 9223372036854775807)
        )
        AND ($2 IS NULL OR (updated_at, session_id) < ($2, $3))
        AND user_id = $5
    ORDER BY activity_hour DESC, updated_at DESC, session_id DESC LIMIT $4"
);

const SET_METADATA: &str = concat!(
    "UPDATE sessions SET metadata = $3 WHERE tenant_id = $1 AND session_id = $2 RETURNING ",
    session_columns!()
);

const ERASE: &str = "DELETE FROM sessions WHERE tenant_id = $1 AND session_id = $2";

impl Postgres {
    pub(in crate::storage) async fn session(
        &self,
        tenant: &TenantId,
        session: &SessionId,
    ) -> Result<Option<Session>, StoreError> {
        let query = sqlx::query(GET).bind(tenant.as_str()).bind(session.as_str());
        let row = self.read(tenant, query).await?;
        row.as_ref().map(|row| Ok(read_session!(row, time, maybe_time))).transpose()
    }

    pub(in crate::storage) async fn sessions(
        &self,
        tenant: &TenantId,
        user: Option<&UserId>,
        after: Option<&SessionPosition>,
        limit: i64,
    ) -> Result<Vec<Session>, StoreError> {
        let query = sqlx::query(if user.is_some() { LIST_OF_USER } else { LIST })
            .bind(tenant.as_str())
            .bind(after.map(|after| after.updated_at))
            .bind(after.map(|after| after.session_id.as_str()))
            .bind(limit);
        let query = if let Some(user) = user { query.bind(user.as_str()) } else { query };
        let rows = self.read_all(tenant, query).await?;
        rows.iter().map(|row| Ok(read_session!(row, time, maybe_time))).collect()
    }

    pub(in crate::storage) async fn set_metadata(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        metadata: &str,
    ) -> Result<Option<Session>, StoreError> {
        let query = sqlx::query(SET_METADATA).bind(tenant.as_str()).bind(session.as_str()).bind(metadata);
        let row = self.write(tenant, query).await?;
        row.as_ref().map(|row| Ok(read_session!(row, time, maybe_time))).transpose()
    }

    pub(in crate::storage) async fn erase_session(
        &self,
        tenant: &TenantId,
        session: &SessionId,
    ) -> Result<bool, StoreError> {
        let query = sqlx::query(ERASE).bind(tenant.as_str()).bind(session.as_str());
        Ok(self.execute(tenant, query).await? > 0)
    }
}
