//! Sessions whose entries are being removed from the search index before their messages are. Only one process writes to the file,
//! so the list is in memory.

use crate::domain::id::{SessionId, TenantId};
use std::sync::{Mutex, PoisonError};

/// A list of sessions that the index worker leaves out.
#[derive(Debug, Default)]
pub(in crate::storage) struct UnindexedSessions(Mutex<Vec<(TenantId, SessionId)>>);

/// A session on the list. Dropping it removes it.
pub(in crate::storage) struct Unindexing<'s> {
    sessions: &'s UnindexedSessions,
    session: (TenantId, SessionId),
}

impl UnindexedSessions {
    pub(in crate::storage) fn add(&self, tenant: &TenantId, session: &SessionId) -> Unindexing<'_> {
        let session = (tenant.clone(), session.clone());
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(session.clone());
        Unindexing { sessions: self, session }
    }

    pub(in crate::storage) fn contains(&self, tenant: &TenantId, session: &SessionId) -> bool {
        let sessions = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        sessions.iter().any(|(of_tenant, id)| of_tenant == tenant && id == session)
    }
}

impl Drop for Unindexing<'_> {
    fn drop(&mut self) {
        let mut sessions = self.sessions.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(place) = sessions.iter().position(|session| *session == self.session) {
            sessions.swap_remove(place);
        }
    }
}
