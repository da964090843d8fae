//! Redacts a message, and lists the redactions of a session.

use super::{Error, MemoryService, Page, complete_internally};
use crate::domain::api_key::KeyId;
use crate::domain::id::{SessionId, TenantId};
use crate::domain::redaction::Redaction;
use crate::storage::RedactionOutcome;

impl MemoryService {
    /// Removes the content of a message permanently, from its copies in forks and branches, too, and from all summaries that
    /// cover it. Redacting it again changes nothing, and returns the same record.
    pub async fn redact_message(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        seq: i64,
        key: Option<KeyId>,
    ) -> Result<Redaction, Error> {
        let (this, tenant, session) = (self.clone(), tenant.clone(), session.clone());
        let redact = async move {
            let redaction = this.store.redact_message(&tenant, &session, seq, key.as_ref());
            match redaction.await? {
                RedactionOutcome::Redacted(affected) => {
                    for session in &affected {
                        this.context_cache.forget_session(&tenant, session);
                    }
                    tracing::info!(seq, copies = affected.len() - 1, "redacted a message");
                }
                RedactionOutcome::Unchanged => {}
                RedactionOutcome::SessionNotFound => return Err(Error::SessionNotFound),
                RedactionOutcome::MessageNotFound { last_seq } => {
                    return Err(Error::MessageNotFound { seq, last_seq });
                }
            }
            // Also if the message was redacted before: the process may have ended after that.
            this.store.remove_redacted_traces().await;
            // Without a record, the session was erased or rewound since.
            let record = this.store.redactions(&tenant, &session, seq - 1, 1).await?.pop();
            record.filter(|record| record.seq == seq).ok_or(Error::SessionNotFound)
        };
        complete_internally(redact).await
    }

    /// Lists the records of at most `limit` redacted messages after `after_seq`, in order.
    pub async fn redactions(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        after_seq: i64,
        limit: i64,
    ) -> Result<Page<Redaction>, Error> {
        self.session(tenant, session).await?;
        // One more record shows if there is another page.
        let mut items = self.store.redactions(tenant, session, after_seq, limit.saturating_add(1)).await?;
        let limit = usize::try_from(limit).unwrap_or(usize::MAX);
        let has_more = items.len() > limit;
        items.truncate(limit);
        Ok(Page { items, has_more })
    }
}
