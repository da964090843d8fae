//! Users as a whole: erasure.

use super::StoreError;
use crate::domain::id::{TenantId, UserId};
use async_trait::async_trait;

/// Users as a whole.
#[async_trait]
pub trait Users {
    /// Erases the user: the memory document with its versions, and all sessions. `false`: there was nothing.
    async fn erase_user(&self, tenant: &TenantId, user: &UserId) -> Result<bool, StoreError>;
}
