//! Keeping leases: of the session of a consolidation, and of background workers.

use crate::capacity::{self, Work};
use crate::domain::error_chain::ErrorChain;
use crate::storage::StoreError;
use std::time::Duration;

/// The interval of renewals. A holder loses its lease only if three consecutive renewals fail or are late.
const RENEWAL: Duration = Duration::from_secs(1);

/// Renews a lease with `renew` until that returns `false`: another holder has the lease, or the session was erased. A failed
/// renewal is repeated: without another holder, a lease that has expired can still be renewed. `purpose` is for the log.
pub(super) async fn keep_lease<F>(purpose: &str, renew: impl Fn() -> F)
where
    F: Future<Output = Result<bool, StoreError>>,
{
    loop {
        tokio::time::sleep(RENEWAL).await;
        // Beside the work of the holder, and before all shares: no load may end the lease.
        match capacity::scope(Work::default(), renew()).await {
            Ok(true) => {}
            Ok(false) => return,
            Err(error) => {
                tracing::warn!(error = %ErrorChain(&error), "failed to renew the lease of {purpose}");
            }
        }
    }
}
