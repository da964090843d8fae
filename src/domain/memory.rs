//! The memory document: one per user, written by the agent itself, always in full.

use time::OffsetDateTime;

/// One version of a user's memory document.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryDocument {
    /// 1, 2, 3 … per user; 0 is the document that was never written.
    pub version: i64,
    /// Markdown, exactly as it was written.
    pub content: String,
    /// By Unicode word boundaries.
    pub words: i64,
    /// Counted when it was written.
    pub tokens: i64,
    /// When this version was written.
    pub created_at: OffsetDateTime,
}
