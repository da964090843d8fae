//! Persists exchanges.

use super::{Error, MemoryService};
use crate::domain::exchange::{Exchange, IdempotencyKey, PersistedExchange};
use crate::domain::id::{SessionId, TenantId};
use crate::storage::AppendOutcome;
use tracing::Instrument as _;

impl MemoryService {
    /// Persists an exchange durably. The write runs in its own task, so it completes even if the client disconnects. The
    /// client can then repeat the request with the same key to get the result.
    pub async fn append_exchange(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        exchange: Exchange,
        key: Option<String>,
    ) -> Result<PersistedExchange, Error> {
        let key = key.map(|key| IdempotencyKey { key, fingerprint: exchange.fingerprint() });
        let (this, tenant, session) = (self.clone(), tenant.clone(), session.clone());
        let write = async move {
            let outcome = this.store.append_exchange(&tenant, &session, &exchange, key.as_ref()).await;
            this.index_wakeup.notify_one();
            outcome
        };
        let write = tokio::spawn(write.in_current_span());
        match write.await.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic()))? {
            AppendOutcome::Appended(appended) => Ok(appended),
            AppendOutcome::UserMismatch => Err(Error::SessionUserMismatch),
            AppendOutcome::KeyReused => Err(Error::IdempotencyKeyReused),
        }
    }
}
