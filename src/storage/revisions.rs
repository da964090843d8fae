//! How a summary came to be, and the way back.

use super::StoreError;
use crate::domain::id::{SessionId, TenantId};
use crate::domain::revision::Revision;
use async_trait::async_trait;

/// How a summary came to be.
#[async_trait]
pub trait Revisions {
    /// At most `limit` revisions before the one given, newest first. `None`: no such session.
    async fn revisions(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        before: i64,
        limit: i64,
    ) -> Result<Option<Vec<Revision>>, StoreError>;

    /// One revision.
    async fn revision(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        revision: i64,
    ) -> Result<Option<Revision>, StoreError>;

    /// Sets summary and cursor back to a revision (0 = no summary), as a new revision. `None`: no such session or
    /// revision. A consolidation that runs meanwhile loses its result.
    async fn restore(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        revision: i64,
    ) -> Result<Option<Revision>, StoreError>;
}
