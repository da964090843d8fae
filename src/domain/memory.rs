//! The memory document: one Markdown document per user, written by the agent. Each change, also of a part, makes a new version.

use super::id::UserId;
use serde::Serialize;
use time::OffsetDateTime;
use utoipa::ToSchema;

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

/// A user with a memory document, and the size of the document.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryOwner {
    pub user: UserId,
    pub version: i64,
    pub words: i64,
    pub tokens: i64,
    /// Time at which the present version was written.
    pub updated_at: OffsetDateTime,
}

/// The way in which a version of a memory document was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum MemoryAuthor {
    /// A request replaced the document.
    Http,
    /// A model called a memory tool.
    Tool,
    /// A model called the tool over the Model Context Protocol.
    Mcp,
}

named_variants!(MemoryAuthor { Http = "http", Tool = "tool", Mcp = "mcp" });

/// A version of a memory document with its author.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryRevision {
    pub document: MemoryDocument,
    /// `None` if the version was written before authors were recorded.
    pub author: Option<MemoryAuthor>,
}
