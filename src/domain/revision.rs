//! Revisions: one immutable record for each change of a session's summary.

use super::session::Summary;
use serde::{Deserialize, Serialize};
use std::ops::AddAssign;
use time::OffsetDateTime;
use utoipa::ToSchema;

/// The operation that made a revision.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum RevisionKind {
    /// Messages were summarised.
    Consolidation,
    /// Summary and cursor were set back to an earlier revision.
    Restore,
    /// A message was redacted. Summary and cursor are those of the last revision that does not cover it.
    Redaction,
    /// A client replaced the summary. The cursor is that of the revision before.
    Edit,
}

named_variants!(RevisionKind {
    Consolidation = "consolidation",
    Restore = "restore",
    Redaction = "redaction",
    Edit = "edit"
});

/// Summary and cursor after one change, and their provenance. This is also the line of a revision in an export.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Revision {
    /// 1, 2, 3 … per session.
    pub revision: i64,
    pub kind: RevisionKind,
    /// First message that was added to the summary; `None` for a restore and an edit. For a redaction, the redacted message.
    pub from_seq: Option<i64>,
    /// Last message that was added to the summary; `None` for a restore and an edit. For a redaction, the redacted message.
    pub to_seq: Option<i64>,
    pub cursor: i64,
    pub summary: Summary,
    /// Text that was written for the messages; empty if they contain no text, and for a restore and an edit.
    pub added: String,
    /// The meta-consolidation that followed because the summary had become too long.
    pub meta: Option<MetaConsolidation>,
    /// `None` if no model was called.
    pub provenance: Option<Provenance>,
    /// The message whose redaction removed the texts of the revision.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub redacted_seq: Option<i64>,
    #[serde(with = "time::serde::rfc3339")]
    pub created_at: OffsetDateTime,
}

/// The compression of a summary that had become too long.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MetaConsolidation {
    /// The summary before it was compressed.
    pub text_before: String,
    pub provenance: Provenance,
}

/// The model that wrote a text, and its cost. Stored as JSON and exported.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Provenance {
    /// Name of the model in the settings.
    pub model: String,
    pub pool: String,
    pub prompt_version: String,
    pub usage: ModelUsage,
    /// Milliseconds from the first attempt to the response.
    pub duration_ms: i64,
}

/// Cost of a text: all model calls for it, including failed ones. A value is null if it is unknown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ModelUsage {
    /// Prompt tokens, as reported by the providers.
    pub input_tokens: Option<i64>,
    /// Response tokens, as reported by the providers.
    pub output_tokens: Option<i64>,
    /// Number of model calls.
    pub calls: Option<i64>,
    /// Number of failed model calls.
    pub failures: Option<i64>,
    /// Milliseconds that calls spent in queues.
    pub queued_ms: Option<i64>,
}

impl AddAssign for ModelUsage {
    fn add_assign(&mut self, other: Self) {
        let add = |sum: &mut Option<i64>, other: Option<i64>| {
            *sum = sum.map_or(other, |value| Some(value.saturating_add(other.unwrap_or(0))));
        };
        add(&mut self.input_tokens, other.input_tokens);
        add(&mut self.output_tokens, other.output_tokens);
        add(&mut self.calls, other.calls);
        add(&mut self.failures, other.failures);
        add(&mut self.queued_ms, other.queued_ms);
    }
}

impl Revision {
    /// Returns the fields `from_seq` and `to_seq`; `None` for a restore and an edit.
    pub fn range(&self) -> Option<(i64, i64)> {
        self.from_seq.zip(self.to_seq)
    }
}

impl Provenance {
    /// Adds the cost of an earlier call whose text is part of the same summary.
    #[must_use]
    pub fn after(mut self, earlier: &Self) -> Self {
        self.usage += earlier.usage;
        self.duration_ms = self.duration_ms.saturating_add(earlier.duration_ms);
        self
    }
}
