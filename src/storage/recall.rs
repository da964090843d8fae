//! Reading all that a context is made of.

use super::StoreError;
use crate::domain::id::{SessionId, TenantId, UserId};
use crate::domain::memory::MemoryDocument;
use crate::domain::session::Session;
use crate::domain::window::WindowMessage;
use async_trait::async_trait;
use time::OffsetDateTime;

/// What a context is made of, as of one moment.
#[derive(Clone, Debug)]
pub struct Recalled {
    /// That moment, by the store's clock.
    pub now: OffsetDateTime,
    /// `None`: no exchange came yet.
    pub session: Option<Session>,
    /// The memory document of the session's user; of the asking user where there is no session yet.
    pub memory: Option<MemoryDocument>,
    /// The newest messages of the tail, oldest first, as many as were asked for.
    pub window: Vec<WindowMessage>,
}

/// Reading all that a context is made of.
#[async_trait]
pub trait Recall {
    /// Reads session, memory document and the newest `most` messages of the tail, in one round trip and as of one
    /// moment.
    async fn recall(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        user: &UserId,
        most: usize,
    ) -> Result<Recalled, StoreError>;
}
