//! Reading the history.

use super::StoreError;
use crate::domain::id::{SessionId, TenantId};
use crate::domain::message_metadata::MessageMetadata;
use async_trait::async_trait;
use time::OffsetDateTime;

/// Which messages, and in which order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Page {
    /// Only those behind this `seq`; 0 = from the first.
    pub after_seq: i64,
    /// Only those before this `seq`; `i64::MAX` = to the last.
    pub before_seq: i64,
    /// Newest first.
    pub descending: bool,
    /// How many, at most.
    pub limit: i64,
}

/// A message as it is stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredMessage {
    /// 1, 2, 3 … per session.
    pub seq: i64,
    /// When it was stored.
    pub created_at: OffsetDateTime,
    /// JSON, as the client gave it.
    pub json: String,
}

/// Reading the history.
#[async_trait]
pub trait Messages {
    /// A page of the history. `None`: no such session.
    async fn messages(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        page: Page,
    ) -> Result<Option<Vec<StoredMessage>>, StoreError>;

    /// The metadata of at most `limit` messages behind `after_seq`, in order.
    async fn message_metadata(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        after_seq: i64,
        limit: i64,
    ) -> Result<Vec<MessageMetadata>, StoreError>;
}
