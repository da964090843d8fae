//! Sessions, their history and their revisions.

use super::{Error, MemoryService};
use crate::domain::id::{SessionId, TenantId, UserId};
use crate::domain::revision::Revision;
use crate::domain::session::Session;
use crate::storage::SessionPosition;
use crate::storage::{MessagePage, MessageQuery};

impl MemoryService {
    /// Returns the state of a session.
    pub async fn session(&self, tenant: &TenantId, session: &SessionId) -> Result<Session, Error> {
        self.store.session(tenant, session).await?.ok_or(Error::SessionNotFound)
    }

    /// Lists at most `limit` sessions, most recent activity first.
    pub async fn sessions(
        &self,
        tenant: &TenantId,
        user: Option<&UserId>,
        after: Option<&SessionPosition>,
        limit: i64,
    ) -> Result<Vec<Session>, Error> {
        Ok(self.store.sessions(tenant, user, after, limit).await?)
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

    /// Erases a session with all its data.
    pub async fn erase_session(&self, tenant: &TenantId, session: &SessionId) -> Result<(), Error> {
        let erased = self.store.erase_session(tenant, session).await?;
        self.context_cache.forget_session(tenant, session);
        if erased { Ok(()) } else { Err(Error::SessionNotFound) }
    }

    /// Returns a page of the history.
    pub async fn messages(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        page: MessageQuery,
    ) -> Result<MessagePage, Error> {
        self.store.messages(tenant, session, page).await?.ok_or(Error::SessionNotFound)
    }

    /// Lists at most `limit` revisions before `before`, newest first.
    pub async fn revisions(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        before: i64,
        limit: i64,
    ) -> Result<Vec<Revision>, Error> {
        self.store.revisions(tenant, session, before, limit).await?.ok_or(Error::SessionNotFound)
    }

    /// Returns one revision.
    pub async fn revision(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        revision: i64,
    ) -> Result<Revision, Error> {
        let found = self.revisions(tenant, session, revision.saturating_add(1), 1).await?.pop();
        found.filter(|found| found.revision == revision).ok_or(Error::RevisionNotFound)
    }

    /// Sets summary and cursor back to a revision, as a new revision. Revision 0 removes the summary.
    pub async fn restore(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        revision: i64,
    ) -> Result<Revision, Error> {
        match self.store.restore_revision(tenant, session, revision).await? {
            Some(revision) => Ok(revision),
            None => self.session(tenant, session).await.and(Err(Error::RevisionNotFound)),
        }
    }
}
