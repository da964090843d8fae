//! The memory document: one Markdown document per user, written by the agent and always replaced as a whole.

use time::OffsetDateTime;

/// One version of a user's memory document.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryDocument {
    /// 1, 2, 3 … per user; 0 stands for a document that was never written.
    pub version: i64,
    /// Markdown, exactly as it was written.
    pub content: String,
    pub words: i64,
    pub tokens: i64,
    pub created_at: OffsetDateTime,
}
