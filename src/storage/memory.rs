//! Memory documents.

use super::StoreError;
use crate::domain::id::{TenantId, UserId};
use crate::domain::memory::MemoryDocument;
use async_trait::async_trait;

/// A document to write, with its measures.
#[derive(Clone, Copy, Debug)]
pub struct NewMemory<'a> {
    /// Markdown.
    pub content: &'a str,
    /// By Unicode word boundaries.
    pub words: i64,
    /// By the tokenizer.
    pub tokens: i64,
}

/// Memory documents.
#[async_trait]
pub trait Memory {
    /// The current version. `None`: never written.
    async fn memory(&self, tenant: &TenantId, user: &UserId) -> Result<Option<MemoryDocument>, StoreError>;

    /// Replaces the document, if `expected` is `None` or the current version (0 = never written). `None`: it isn't.
    async fn write_memory(
        &self,
        tenant: &TenantId,
        user: &UserId,
        new: NewMemory<'_>,
        expected: Option<i64>,
    ) -> Result<Option<MemoryDocument>, StoreError>;

    /// At most `limit` versions before the one given, newest first, the current one included.
    async fn memory_revisions(
        &self,
        tenant: &TenantId,
        user: &UserId,
        before: i64,
        limit: i64,
    ) -> Result<Vec<MemoryDocument>, StoreError>;
}
