//! Persisting exchanges.

use super::StoreError;
use crate::domain::exchange::{Exchange, IdempotencyKey, Recorded};
use crate::domain::id::{SessionId, TenantId};
use async_trait::async_trait;

/// What became of an exchange.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Append {
    /// It is stored, durably; or it was already, by an earlier request with the same key.
    Recorded(Recorded),
    /// The session belongs to another user. Nothing was written.
    OtherUser,
    /// The key was used for another exchange. Nothing was written.
    KeyReused,
}

/// Persisting exchanges.
#[async_trait]
pub trait Exchanges {
    /// Appends the messages and creates the session if there is none. `seq` is allocated in the same transaction:
    /// no hole and no double, however many write at once. A key is kept for 24 hours at least.
    async fn append(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        exchange: &Exchange,
        key: Option<&IdempotencyKey>,
    ) -> Result<Append, StoreError>;
}
