//! Figures of tenants.

use super::statement::DbRow as _;
use super::{Store, StoreError};
use crate::domain::consolidation::Policy;
use crate::domain::id::TenantId;

impl Store {
    /// Returns the size of all messages of a tenant as JSON, in bytes.
    pub async fn stored_bytes(&self, tenant: &TenantId) -> Result<i64, StoreError> {
        const SUM_STORED_BYTES: &str = "SELECT CAST(coalesce(sum(stored_bytes), 0) AS bigint) AS bytes FROM sessions WHERE tenant_id = $1";
        let row = self.statement(tenant, SUM_STORED_BYTES).read().await?;
        Ok(row.ok_or(sqlx::Error::RowNotFound)?.field("bytes")?)
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
}
