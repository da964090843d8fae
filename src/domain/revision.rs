//! How a summary came to be: one record per change of it, never changed afterwards.

use super::session::Summary;
use serde::{Deserialize, Serialize};
use time::OffsetDateTime;

/// What made a revision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RevisionKind {
    /// A range of messages was summarised.
    Consolidation,
    /// Summary and cursor were set back to an earlier revision.
    Restore,
}

impl RevisionKind {
    /// The word of the interface and of the store.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Consolidation => "consolidation",
            Self::Restore => "restore",
        }
    }

    /// The kind of that name.
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        [Self::Consolidation, Self::Restore].into_iter().find(|kind| kind.as_str() == name)
    }
}

/// The summary and the cursor as they stood after one change, with where they came from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Revision {
    /// 1, 2, 3 … per session.
    pub revision: i64,
    /// What made it.
    pub kind: RevisionKind,
    /// The messages that it added to the summary, first and last; `None` for a restore.
    pub range: Option<(i64, i64)>,
    /// The cursor after it.
    pub cursor: i64,
    /// The whole summary after it.
    pub summary: Summary,
    /// What the model wrote for the range; empty where the range held no text, and for a restore.
    pub added: String,
    /// The compression that followed, where the summary had grown too long.
    pub meta: Option<MetaConsolidation>,
    /// The model's part; `None` where no model was asked.
    pub source: Option<Provenance>,
    /// When it was committed.
    pub created_at: OffsetDateTime,
}

/// Which model wrote a text, and what that took.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Provenance {
    /// The model's name in the settings.
    pub model: String,
    /// The pool that was asked.
    pub pool: String,
    /// Which prompts were used.
    pub prompt_version: String,
    /// Tokens of the prompts of all calls, as far as providers counted them.
    pub input_tokens: Option<i64>,
    /// Tokens of the answers of all calls, as far as providers counted them.
    pub output_tokens: Option<i64>,
    /// From the first attempt to the answer.
    pub duration_ms: i64,
    /// Calls of models, those that failed included; `None` where it was not counted yet.
    pub calls: Option<i64>,
    /// Calls that failed; `None` where it was not counted yet.
    pub failures: Option<i64>,
    /// Time spent waiting for a turn; `None` where it was not counted yet.
    pub queued_ms: Option<i64>,
}

/// A meta-consolidation: what it started from and who did it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MetaConsolidation {
    /// The summary before it was compressed.
    pub text_before: String,
    /// The model's part.
    pub source: Provenance,
}
