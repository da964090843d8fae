//! Reading all that a context is made of.

use super::StoreError;
use crate::domain::id::{SessionId, TenantId, UserId};
use crate::domain::memory::MemoryDocument;
use crate::domain::message_metadata::ContextMessage;
use crate::domain::session::Session;
use async_trait::async_trait;
use time::OffsetDateTime;

/// What a context is made of, as of one moment.
#[derive(Clone, Debug)]
pub struct ContextSnapshot {
    /// That moment, by the store's clock.
    pub now: OffsetDateTime,
    /// `None`: no exchange came yet.
    pub session: Option<Session>,
    /// The memory document of the session's user; of the asking user where there is no session yet.
    pub memory: Option<MemoryDocument>,
    /// The newest messages of the tail, oldest first, as many as were asked for.
    pub tail: Vec<ContextMessage>,
}

/// Reading all that a context is made of.
#[async_trait]
pub trait Recall {
    /// Reads session, memory document and the newest `most` messages of the tail, in one round trip and as of one
    /// moment.
    async fn load_context(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        user: &UserId,
        most: usize,
    ) -> Result<ContextSnapshot, StoreError>;
}
