//! What consolidation spends: the tenant's account of the day, and the limit that it is held against.
//!
//! The account is kept without a limit as well: it is a record. It has what calls took that were answered, whatever
//! became of the answer; what a call had taken that broke off, or that the end of the service cut off, nobody knows.

use super::{ConsolidationRun, Failure};
use crate::domain::error_chain::ErrorChain;
use crate::llm::Cost;

impl ConsolidationRun<'_> {
    /// Fails where the tenant has spent what it may today. Runs don't wait for each other, so the day ends over the
    /// limit by what those took that were under way; to reserve it beforehand, one would have to know it.
    pub(super) async fn ensure_within_budget(&self) -> Result<(), Failure> {
        let Some(limit) = self.service.config.daily_token_limit else {
            return Ok(());
        };
        let used = self.service.store.tokens_used_today(self.tenant).await?;
        let used = u64::try_from(used).unwrap_or(0);
        if used < limit { Ok(()) } else { Err(Failure::Limit { used, limit }) }
    }

    /// Puts what a question took on the account. Without that, the answer is no worse.
    pub(super) async fn record_usage(&self, cost: &Cost) {
        if cost.tokens == 0 {
            return;
        }
        if let Err(error) = self.service.store.add_token_usage(self.tenant, cost.tokens).await {
            let tokens = cost.tokens;
            tracing::warn!(error = %ErrorChain(&error), tokens, "what models took could not be put on the tenant's account");
        }
    }
}
