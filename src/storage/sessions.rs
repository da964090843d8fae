//! Sessions as a whole: state, list, metadata, erasure.

use super::StoreError;
use crate::domain::id::{SessionId, TenantId, UserId};
use crate::domain::session::Session;
use async_trait::async_trait;
use time::OffsetDateTime;

/// A place in the list of sessions: behind this one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct After {
    /// Its last activity.
    pub updated_at: OffsetDateTime,
    /// Its id, for sessions of the same microsecond.
    pub session_id: SessionId,
}

/// Sessions as a whole.
#[async_trait]
pub trait Sessions {
    /// The state of one.
    async fn session(&self, tenant: &TenantId, session: &SessionId) -> Result<Option<Session>, StoreError>;

    /// At most `limit`, newest activity first; of one user, or of all.
    async fn sessions(
        &self,
        tenant: &TenantId,
        user: Option<&UserId>,
        after: Option<&After>,
        limit: i64,
    ) -> Result<Vec<Session>, StoreError>;

    /// Replaces the metadata, a JSON object.
    async fn set_metadata(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        metadata: &str,
    ) -> Result<Option<Session>, StoreError>;

    /// Erases all of it: history, summary, revisions, keys. `false`: there was none.
    async fn erase_session(&self, tenant: &TenantId, session: &SessionId) -> Result<bool, StoreError>;
}
