//! Memory documents, and the erasure of users.

use super::{Error, MAX_PAGE_BYTES, MemoryService, PAGE_MEMORY, complete_internally};
use crate::capacity;
use crate::domain::id::{TenantId, UserId};
use crate::domain::memory::{MemoryAuthor, MemoryDocument, MemoryOwner, MemoryRevision};
use crate::domain::{summary, tokens};
use crate::storage::{NewMemoryDocument, Page};

impl MemoryService {
    /// Lists at most `limit` users with a memory document, in the order of their ids, after `after`.
    pub async fn memory_owners(
        &self,
        tenant: &TenantId,
        after: &str,
        limit: i64,
    ) -> Result<Page<MemoryOwner>, Error> {
        Ok(self.store.memory_owners(tenant, after, limit).await?)
    }

    /// Returns the memory document of a user, or `None` if it was never written.
    pub async fn memory(&self, tenant: &TenantId, user: &UserId) -> Result<Option<MemoryDocument>, Error> {
        Ok(self.store.memory_document(tenant, user).await?)
    }

    /// Replaces the document. If `expected` is given, the document must be at that version; 0 stands for a document that was
    /// never written.
    pub async fn write_memory(
        &self,
        tenant: &TenantId,
        user: &UserId,
        content: &str,
        expected: Option<i64>,
        author: MemoryAuthor,
    ) -> Result<MemoryDocument, Error> {
        let (bytes, max_bytes) = (content.len(), self.config.memory_max_bytes);
        if bytes > max_bytes {
            return Err(Error::MemoryTooLarge { bytes, max_bytes });
        }
        let words = i64::try_from(summary::words(content)).unwrap_or(i64::MAX);
        let new = NewMemoryDocument { content, words, tokens: tokens::count_text(content), author };
        self.store.write_memory_document(tenant, user, new, expected).await?.ok_or(Error::VersionMismatch)
    }

    /// Lists at most `limit` versions before `before`, newest first; fewer if they are large.
    pub async fn memory_revisions(
        &self,
        tenant: &TenantId,
        user: &UserId,
        before: i64,
        limit: i64,
    ) -> Result<Page<MemoryRevision>, Error> {
        capacity::claim(PAGE_MEMORY).await?;
        Ok(self.store.memory_revisions(tenant, user, before, limit, MAX_PAGE_BYTES).await?)
    }

    /// Erases a user: the memory document and all sessions, even if the client disconnects.
    pub async fn erase_user(&self, tenant: &TenantId, user: &UserId) -> Result<(), Error> {
        let (this, tenant, user) = (self.clone(), tenant.clone(), user.clone());
        let erase = async move {
            let erased = this.store.erase_user(&tenant, &user).await;
            this.context_cache.forget_user(&tenant, &user);
            if erased? { Ok(()) } else { Err(Error::UserNotFound) }
        };
        complete_internally(erase).await
    }
}
