//! The report of a consolidation run.

use crate::domain::revision::Revision;
use serde::Serialize;
use time::OffsetDateTime;
use utoipa::ToSchema;

/// The result of consolidation in a context request: the object `consolidation` of a context.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[schema(as = ContextConsolidation)]
pub struct ConsolidationReport {
    pub outcome: Outcome,
    /// Number of messages that were summarised.
    pub messages: i64,
    /// `true` if the summary was compressed.
    pub meta: bool,
    /// The model that wrote the summary.
    #[schema(required)]
    pub model: Option<String>,
    /// After a failure: earliest time of the next automatic run.
    #[schema(required)]
    #[serde(with = "time::serde::rfc3339::option")]
    pub retry_at: Option<OffsetDateTime>,
    /// Cause of a failure, otherwise null.
    #[schema(required)]
    pub reason: Option<String>,
    /// The last committed revision.
    #[serde(skip)]
    pub revision: Option<Revision>,
    /// `true` if the run took the lease, and another change or a shutdown ended it.
    #[serde(skip)]
    pub is_abandoned: bool,
}

/// The result of a consolidation as a context reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[schema(as = ConsolidationOutcome)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// The tail does not exceed the threshold, or it has no safe split point yet.
    NotDue,
    /// The older part of the tail was summarised.
    Consolidated,
    /// The older part of the tail will be summarised after the response.
    Scheduled,
    /// Another run holds the lease; or this run takes longer than the request waits, or a restore, an erasure or a
    /// shutdown ended it before its first commit.
    InProgress,
    /// The last run failed.
    Failed,
    /// No pool is configured, or the mode is `off`.
    Disabled,
}

impl Outcome {
    pub(in crate::service) const ALL: [Self; 6] =
        [Self::NotDue, Self::Consolidated, Self::Scheduled, Self::InProgress, Self::Failed, Self::Disabled];

    /// Returns the name in responses and metrics.
    pub(in crate::service) fn name(self) -> &'static str {
        match self {
            Self::NotDue => "not_due",
            Self::Consolidated => "consolidated",
            Self::Scheduled => "scheduled",
            Self::InProgress => "in_progress",
            Self::Failed => "failed",
            Self::Disabled => "disabled",
        }
    }
}

impl From<Outcome> for ConsolidationReport {
    fn from(outcome: Outcome) -> Self {
        Self {
            outcome,
            messages: 0,
            meta: false,
            model: None,
            retry_at: None,
            reason: None,
            revision: None,
            is_abandoned: false,
        }
    }
}
