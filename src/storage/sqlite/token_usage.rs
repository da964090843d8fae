//! What a tenant's consolidations spend in tokens, by the day, on SQLite.

use super::{Sqlite, micros, now};
use crate::domain::id::TenantId;
use crate::storage::StoreError;
use sqlx::Row as _;

const SPEND: &str = "\
    INSERT INTO token_usage (tenant_id, day, tokens) VALUES ($1, $2 / 86400000000, $3)
    ON CONFLICT (tenant_id, day) DO UPDATE
        SET tokens = min(tokens, 9223372036854775807 - excluded.tokens) + excluded.tokens";

const SPENT: &str = "SELECT tokens FROM token_usage WHERE tenant_id = $1 AND day = $2 / 86400000000";

impl Sqlite {
    pub(in crate::storage) async fn add_token_usage(
        &self,
        tenant: &TenantId,
        tokens: u64,
    ) -> Result<(), StoreError> {
        let tokens = i64::try_from(tokens).unwrap_or(i64::MAX);
        let query = sqlx::query(SPEND).bind(tenant.as_str()).bind(micros(now())).bind(tokens);
        query.execute(&self.writer).await?;
        Ok(())
    }

    pub(in crate::storage) async fn tokens_used_today(&self, tenant: &TenantId) -> Result<i64, StoreError> {
        let query = sqlx::query(SPENT).bind(tenant.as_str()).bind(micros(now()));
        let row = query.fetch_optional(&self.readers).await?;
        row.map_or(Ok(0), |row| Ok(row.try_get("tokens")?))
    }
}
