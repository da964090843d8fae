//! What a tenant's consolidations spend in tokens, by the day, on Postgres.

use super::Postgres;
use crate::domain::id::TenantId;
use crate::storage::StoreError;
use sqlx::Row as _;

const SPEND: &str = "\
    INSERT INTO token_usage AS u (tenant_id, day, tokens)
    VALUES ($1, floor(extract(epoch FROM now()) / 86400)::bigint, $2)
    ON CONFLICT (tenant_id, day) DO UPDATE
        SET tokens = least(u.tokens, 9223372036854775807 - excluded.tokens) + excluded.tokens";

const SPENT: &str = "\
    SELECT tokens FROM token_usage
    WHERE tenant_id = $1 AND day = floor(extract(epoch FROM now()) / 86400)::bigint";

impl Postgres {
    pub(in crate::storage) async fn add_token_usage(
        &self,
        tenant: &TenantId,
        tokens: u64,
    ) -> Result<(), StoreError> {
        let tokens = i64::try_from(tokens).unwrap_or(i64::MAX);
        self.execute(tenant, sqlx::query(SPEND).bind(tenant.as_str()).bind(tokens)).await?;
        Ok(())
    }

    pub(in crate::storage) async fn tokens_used_today(&self, tenant: &TenantId) -> Result<i64, StoreError> {
        let row = self.read(tenant, sqlx::query(SPENT).bind(tenant.as_str())).await?;
        row.map_or(Ok(0), |row| Ok(row.try_get("tokens")?))
    }
}
