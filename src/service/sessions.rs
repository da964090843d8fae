//! Sessions, their history and their revisions.

use super::{Error, MAX_PAGE_BYTES, MemoryService, PAGE_MEMORY, complete_internally};
use crate::blocking;
use crate::capacity;
use crate::domain::consolidation_record::ConsolidationRecord;
use crate::domain::id::{SessionId, TenantId, UserId};
use crate::domain::revision::Revision;
use crate::domain::session::{Session, Summary};
use crate::storage::{MessagePage, MessageQuery, Page, SessionFilter, SessionOwner, SessionPosition};

impl MemoryService {
    /// Returns the state of a session.
    pub async fn session(&self, tenant: &TenantId, session: &SessionId) -> Result<Session, Error> {
        self.store.session(tenant, session).await?.ok_or(Error::SessionNotFound)
    }

    /// Returns a session with the user on whose behalf a request acts, except the default user: the user of the session, or
    /// else `named`, which becomes the user of the session if the request `may_bind`.
    pub(super) async fn session_owner(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        named: Option<&UserId>,
        may_bind: bool,
    ) -> Result<SessionOwner, Error> {
        let SessionOwner { user, exists } = self.store.session_owner(tenant, session).await?;
        let user = match (user, named) {
            (Some(owner), Some(named)) if owner != *named => return Err(Error::SessionUserMismatch),
            (None, Some(named)) if may_bind => Some(self.bind(tenant, session, named).await?),
            (owner, named) => owner.or_else(|| named.cloned()),
        };
        Ok(SessionOwner { user, exists })
    }

    /// Binds a session without a user to a user. Fails if a concurrent request has bound it to another one.
    pub(super) async fn bind(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        user: &UserId,
    ) -> Result<UserId, Error> {
        let owner = self.store.bind_session(tenant, session, user).await?;
        if owner == *user { Ok(owner) } else { Err(Error::SessionUserMismatch) }
    }

    /// Lists at most `limit` sessions, most recent activity first; fewer if they are large.
    pub async fn sessions(
        &self,
        tenant: &TenantId,
        filter: SessionFilter<'_>,
        after: Option<&SessionPosition>,
        limit: i64,
    ) -> Result<Page<Session>, Error> {
        capacity::claim(PAGE_MEMORY).await?;
        Ok(self.store.sessions(tenant, filter, after, limit, MAX_PAGE_BYTES).await?)
    }

    /// Returns the size of all messages of a tenant as JSON, in bytes.
    pub async fn stored_bytes(&self, tenant: &TenantId) -> Result<i64, Error> {
        Ok(self.store.stored_bytes(tenant).await?)
    }

    /// Replaces the metadata of a session.
    pub async fn set_metadata(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        metadata: &str,
    ) -> Result<Session, Error> {
        self.store.set_metadata(tenant, session, metadata).await?.ok_or(Error::SessionNotFound)
    }

    /// Erases a session with all its data, and the branches that rewinds removed from it, even if the client disconnects.
    pub async fn erase_session(&self, tenant: &TenantId, session: &SessionId) -> Result<(), Error> {
        let (this, tenant, session) = (self.clone(), tenant.clone(), session.clone());
        let erase = async move {
            let erased = this.store.erase_session(&tenant, &session).await;
            this.context_cache.forget_session(&tenant, &session);
            this.context_cache.forget_branches(&tenant, &session);
            if erased? { Ok(()) } else { Err(Error::SessionNotFound) }
        };
        complete_internally(erase).await
    }

    /// Returns a page of the history.
    pub async fn messages(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        page: MessageQuery,
    ) -> Result<MessagePage, Error> {
        capacity::claim(PAGE_MEMORY).await?;
        self.store.messages(tenant, session, page).await?.ok_or(Error::SessionNotFound)
    }

    /// Lists at most `limit` revisions before `before`, newest first; fewer if they are large.
    pub async fn revisions(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        before: i64,
        limit: i64,
    ) -> Result<Page<Revision>, Error> {
        capacity::claim(PAGE_MEMORY).await?;
        let page = self.store.revisions(tenant, session, before, limit, MAX_PAGE_BYTES).await?;
        page.ok_or(Error::SessionNotFound)
    }

    /// Lists at most `limit` records of consolidation before `before`, newest first; fewer if they are large.
    pub async fn consolidation_records(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        before: i64,
        limit: i64,
    ) -> Result<Page<ConsolidationRecord>, Error> {
        capacity::claim(PAGE_MEMORY).await?;
        let page = self.store.consolidation_records(tenant, session, before, limit, MAX_PAGE_BYTES).await?;
        page.ok_or(Error::SessionNotFound)
    }

    /// Returns one revision.
    pub async fn revision(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        revision: i64,
    ) -> Result<Revision, Error> {
        let found = self.revisions(tenant, session, revision.saturating_add(1), 1).await?.items.pop();
        found.filter(|found| found.revision == revision).ok_or(Error::RevisionNotFound)
    }

    /// Replaces the summary by `text`, which covers the same messages, as a new revision. `based_on` must be the present revision.
    pub async fn edit_summary(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        based_on: i64,
        text: String,
    ) -> Result<Revision, Error> {
        let summary = blocking::spawn_cpu_to_count(text.len(), move || Summary::new(text)).await;
        loop {
            if let Some(edited) = self.store.edit_summary(tenant, session, based_on, &summary).await? {
                return Ok(edited);
            }
            let Session { revision, cursor, .. } = self.session(tenant, session).await?;
            if revision != based_on {
                return Err(Error::RevisionMismatch { based_on, revision });
            }
            if cursor == 0 {
                return Err(Error::SummaryMissing);
            }
            // Another request has changed the session in the meantime.
        }
    }

    /// Sets summary and cursor back to a revision, as a new revision. Revision 0 removes the summary.
    pub async fn restore(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        revision: i64,
    ) -> Result<Revision, Error> {
        loop {
            if let Some(restored) = self.store.restore_revision(tenant, session, revision).await? {
                return Ok(restored);
            }
            if revision == 0 {
                self.session(tenant, session).await?;
            } else if let Some(redacted_seq) = self.revision(tenant, session, revision).await?.redacted_seq {
                return Err(Error::RevisionRedacted { redacted_seq });
            }
            // The session was rewound or redacted at the same time.
        }
    }
}
