//! What a tenant's consolidations spend in tokens, by the day.

use super::StoreError;
use crate::domain::id::TenantId;
use async_trait::async_trait;

/// Tokens that a tenant spends. A day is one of UTC, by the store's clock.
#[async_trait]
pub trait TokenUsage {
    /// Adds to what the tenant has spent today. The sum stops at `i64::MAX` instead of failing.
    async fn add_token_usage(&self, tenant: &TenantId, tokens: u64) -> Result<(), StoreError>;

    /// What the tenant has spent today; 0 = nothing yet.
    async fn tokens_used_today(&self, tenant: &TenantId) -> Result<i64, StoreError>;
}
