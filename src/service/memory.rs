//! Memory documents, and the erasure of users.

use super::{Error, MemoryService};
use crate::domain::id::{TenantId, UserId};
use crate::domain::memory::MemoryDocument;
use crate::domain::{summary, tokens};
use crate::storage::NewMemoryDocument;

impl MemoryService {
    /// The user's memory document. `None`: never written.
    pub async fn memory(&self, tenant: &TenantId, user: &UserId) -> Result<Option<MemoryDocument>, Error> {
        Ok(self.store.memory_document(tenant, user).await?)
    }

    /// Replaces the document, if it still is at the version `expected` (0 = never written).
    pub async fn write_memory(
        &self,
        tenant: &TenantId,
        user: &UserId,
        content: &str,
        expected: Option<i64>,
    ) -> Result<MemoryDocument, Error> {
        let (bytes, max_bytes) = (content.len(), self.config.memory_max_bytes);
        if bytes > max_bytes {
            return Err(Error::MemoryTooLarge { bytes, max_bytes });
        }
        let words = i64::try_from(summary::words(content)).unwrap_or(i64::MAX);
        let new = NewMemoryDocument { content, words, tokens: tokens::count_text(content) };
        self.store.write_memory_document(tenant, user, new, expected).await?.ok_or(Error::VersionMismatch)
    }

    /// At most `limit` versions before the one given, newest first.
    pub async fn memory_revisions(
        &self,
        tenant: &TenantId,
        user: &UserId,
        before: i64,
        limit: i64,
    ) -> Result<Vec<MemoryDocument>, Error> {
        Ok(self.store.memory_revisions(tenant, user, before, limit).await?)
    }

    /// Erases the user: memory and all sessions.
    pub async fn erase_user(&self, tenant: &TenantId, user: &UserId) -> Result<(), Error> {
        if self.store.erase_user(tenant, user).await? { Ok(()) } else { Err(Error::UserNotFound) }
    }
}
