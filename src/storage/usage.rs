//! Stored bytes of tenants.
//!
//! Each session knows the size of its messages. The sum of a tenant is that of the settled sizes, which changes only if a session is
//! settled, copied, imported, redacted or erased, and of what recently active sessions have in addition, which are read from the
//! index of activity. So exchanges of different sessions never wait for a counter.

use super::rows;
use super::statement::{AnyRow, DbRow as _, Sql};
use super::{Store, StoreError};
use crate::domain::consolidation::Policy;
use crate::domain::id::TenantId;

impl Store {
    /// Returns the size of all messages of a tenant as JSON, in bytes.
    pub async fn stored_bytes(&self, tenant: &TenantId) -> Result<i64, StoreError> {
        /// The hour is a parameter, and the sessions come sorted from the index: see [`Store::sessions`]. It may be lower than
        /// the current one, because settled sessions add nothing.
        macro_rules! select_stored_bytes {
            ($changes:literal) => {
                concat!(
                    "SELECT CAST(
                        coalesce((SELECT settled_bytes FROM tenants WHERE tenant_id = $1), 0) ",
                    $changes,
                    " + (SELECT coalesce(sum(recent.bytes), 0) FROM (
                            SELECT stored_bytes - settled_bytes AS bytes FROM sessions
                            WHERE tenant_id = $1 AND activity_hour >= $2 ORDER BY activity_hour DESC
                        ) AS recent)
                    AS bigint) AS bytes"
                )
            };
        }
        const SELECT_STORED_BYTES: Sql = Sql {
            postgres: select_stored_bytes!(
                "+ (SELECT coalesce(sum(bytes), 0) FROM usage_changes WHERE tenant_id = $1)"
            ),
            sqlite: select_stored_bytes!(""),
        };
        let Some(settled_hour) = self.settled_hour(tenant).await? else { return Ok(0) };
        let statement = self.statement(tenant, SELECT_STORED_BYTES).bind(settled_hour);
        let rows = statement.read_all_in_index_order().await?;
        Ok(rows.first().ok_or(sqlx::Error::RowNotFound)?.field("bytes")?)
    }

    /// Settles at most `limit` sessions of the tenant whose last activity was before the hour `before`, from the hour `from` or
    /// the last settled one on. Returns the hour to continue with, or `None` if all of them are settled.
    ///
    /// `before` must be so long ago that no transaction can still add an activity to the hour before it.
    pub async fn settle_sessions(
        &self,
        tenant: &TenantId,
        from: Option<i64>,
        before: i64,
        limit: i64,
    ) -> Result<Option<i64>, StoreError> {
        const SELECT_UNSETTLED: &str = "\
            SELECT session_id, activity_hour FROM sessions
            WHERE tenant_id = $1 AND activity_hour >= $2 AND activity_hour < $3 AND stored_bytes <> settled_bytes
            ORDER BY activity_hour LIMIT $4";
        const SETTLE_SESSION: &str =
            "UPDATE sessions SET settled_bytes = stored_bytes WHERE tenant_id = $1 AND session_id = $2";
        /// The hour may become lower, if the clock was set back.
        const UPDATE_SETTLED_HOUR: Sql = Sql {
            postgres: "WITH changes AS (DELETE FROM usage_changes WHERE tenant_id = $1 RETURNING bytes)
                UPDATE tenants SET settled_hour = $2,
                    settled_bytes = settled_bytes + (SELECT coalesce(sum(bytes), 0) FROM changes)
                WHERE tenant_id = $1",
            sqlite: "UPDATE tenants SET settled_hour = $2 WHERE tenant_id = $1",
        };
        let from = match from {
            Some(hour) => Some(hour),
            None => self.settled_hour(tenant).await?,
        };
        let Some(from) = from else { return Ok(None) };
        let statement = self.statement(tenant, SELECT_UNSETTLED).bind(from).bind(before).bind(limit);
        let unsettled = statement.read_all_in_index_order().await?;
        let position = |row: &AnyRow| -> Result<_, StoreError> {
            Ok((rows::session_id(row)?, row.field::<i64>("activity_hour")?))
        };
        let mut unsettled = unsettled.iter().map(position).collect::<Result<Vec<_>, _>>()?;
        let last = unsettled.last().map(|(_, hour)| *hour);
        // All transactions lock sessions in this order, so that they cannot deadlock.
        unsettled.sort_unstable();
        let mut transaction = self.begin(tenant).await?;
        for (session, _) in &unsettled {
            let statement = transaction.statement(SETTLE_SESSION).bind(tenant.as_str());
            statement.bind(session.as_str()).execute().await?;
        }
        if last.is_none() {
            let statement = transaction.statement(UPDATE_SETTLED_HOUR).bind(tenant.as_str());
            statement.bind(before).execute().await?;
        }
        transaction.commit().await?;
        Ok(last)
    }

    /// Returns the number of sessions of the tenant that were active in the hour `since` or later and are due for consolidation.
    /// `Policy::due_by` is the same rule.
    pub async fn due_sessions(
        &self,
        tenant: &TenantId,
        since: i64,
        policy: &Policy,
    ) -> Result<i64, StoreError> {
        /// The sessions come sorted from the index: see [`Store::sessions`].
        const COUNT_DUE_SESSIONS: &str = "\
            SELECT count(*) AS sessions FROM (
                SELECT last_seq - cursor_seq AS tail_messages, tokens - cursor_tokens AS tail_tokens, summary_tokens,
                    window_tokens, window_fixed
                FROM sessions WHERE tenant_id = $1 AND activity_hour >= $2 ORDER BY activity_hour DESC
            ) AS recent
            WHERE (tail_messages > $3 AND (window_tokens IS NULL OR $5 > 0)) OR tail_tokens > $4
                OR (window_fixed + summary_tokens + tail_tokens) * 1000000 > window_tokens * $6";
        #[expect(clippy::cast_possible_truncation, reason = "at most a million")]
        let trigger = (policy.trigger_share * 1e6) as i64;
        let statement = self.statement(tenant, COUNT_DUE_SESSIONS).bind(since).bind(policy.threshold);
        let statement = statement.bind(policy.max_tail_tokens.unwrap_or(i64::MAX));
        let statement = statement.bind(i64::from(policy.is_threshold_set)).bind(trigger);
        let rows = statement.read_all_in_index_order().await?;
        Ok(rows.first().ok_or(sqlx::Error::RowNotFound)?.field("sessions")?)
    }

    /// Returns the hour before which all sessions of a tenant are settled, or `None` if the tenant never had a session.
    async fn settled_hour(&self, tenant: &TenantId) -> Result<Option<i64>, StoreError> {
        const SELECT_SETTLED_HOUR: &str = "SELECT settled_hour FROM tenants WHERE tenant_id = $1";
        let row = self.statement(tenant, SELECT_SETTLED_HOUR).read().await?;
        row.map(|row| Ok(row.field("settled_hour")?)).transpose()
    }
}
