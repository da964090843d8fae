//! Persists exchanges.

use super::consolidation::RunScope;
use super::{Error, MemoryService, complete_write};
use crate::blocking;
use crate::capacity;
use crate::domain::consolidation::{Due, Mode};
use crate::domain::consolidation_record::RunCause;
use crate::domain::exchange::{Exchange, IdempotencyKey, PersistedExchange};
use crate::domain::id::{SessionId, TenantId, UserId};
use crate::storage::{AppendOutcome, AppendRequest, LeaseCondition};
use futures_util::FutureExt as _;
use std::sync::Arc;
use time::OffsetDateTime;
use tracing::Instrument as _;

impl MemoryService {
    /// Persists an exchange durably. The write completes even if the client disconnects. The client can then repeat the
    /// request with the same key to get the result.
    ///
    /// The first user that an exchange, a context or a tool call names is the user of the session. If the exchange names no
    /// user and the session has none, it gets `default_user`.
    pub async fn append_exchange(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        exchange: Exchange,
        key: Option<String>,
        default_user: Option<UserId>,
    ) -> Result<PersistedExchange, Error> {
        let bytes = exchange.bytes();
        let (exchange, key) = match key {
            Some(key) => {
                let hash = move || (IdempotencyKey { key, fingerprint: exchange.fingerprint() }, exchange);
                let (key, exchange) = blocking::spawn_cpu_if_large(bytes, hash).await;
                (exchange, Some(key))
            }
            None => (exchange, None),
        };
        let request = AppendRequest { default_user, ..AppendRequest::new(tenant, session, exchange, key) };
        if blocking::is_large(bytes) {
            // The store completes every append. The memory of a large one is held until then.
            let this = self.clone();
            complete_write(async move { this.append(request).await }).boxed().await
        } else {
            self.append(request).await
        }
    }

    /// Persists an exchange and updates the copy of its session.
    pub(super) async fn append(&self, request: AppendRequest) -> Result<PersistedExchange, Error> {
        let (tenant, session) = (request.tenant.clone(), request.session.clone());
        let exchange = Arc::clone(&request.exchange);
        match self.store.append_exchange(request).await? {
            AppendOutcome::Appended(appended) => {
                let limit = |window| self.config.policy.tail_limit(window);
                self.context_cache.append(&tenant, &session, &exchange, &appended, limit);
                if !appended.replayed {
                    self.consolidate_in_background(tenant, session);
                }
                Ok(appended)
            }
            AppendOutcome::UserMismatch => Err(Error::SessionUserMismatch),
            AppendOutcome::KeyReused => Err(Error::IdempotencyKeyReused),
            AppendOutcome::LastSeqMismatch { last_seq } => {
                Err(Error::LastSeqMismatch { expected: exchange.expected_last_seq, last_seq })
            }
        }
    }
}

impl MemoryService {
    /// In the mode `background`: consolidates a session after the exchange that makes it due, so that its next context finds it done.
    fn consolidate_in_background(&self, tenant: TenantId, session: SessionId) {
        let (Mode::Background, Some(pools)) = (self.config.mode, self.config.pools.clone()) else { return };
        let this = self.clone();
        let consolidate = async move {
            let state = match this.session(&tenant, &session).await {
                Ok(state) => state,
                Err(error) => {
                    tracing::debug!(%error, "failed to read a session after an exchange; its next context consolidates it");
                    return;
                }
            };
            if this.config.policy.due(&state, state.window, OffsetDateTime::now_utc()) == Due::Yes {
                let condition = LeaseCondition::IfUnchanged { revision: state.revision };
                let scope = RunScope::new(RunCause::Threshold);
                drop(this.spawn_run(&tenant, &session, scope, condition, None, &pools));
            }
        };
        tokio::spawn(capacity::scope(capacity::internal(), consolidate.in_current_span()));
    }
}
