//! Records of consolidation: the cost and the result of each commit of a run, and of runs that failed or were abandoned.
//!
//! They contain names, numbers and sentences of precis, and no text of a conversation or of a provider.

use super::revision::ModelUsage;
use serde::{Deserialize, Serialize};
use time::OffsetDateTime;
use utoipa::ToSchema;

/// The most records of a session without a revision. A further one replaces the oldest.
pub const MAX_RECORDS_WITHOUT_REVISION: i64 = 200;

/// The cause of a consolidation run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = ConsolidationCause)]
#[serde(rename_all = "snake_case")]
pub enum RunCause {
    /// A context found that the tail exceeds the threshold.
    Threshold,
    /// A client asked for it.
    Request,
}

/// The result that a record states.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum RecordOutcome {
    /// A revision was committed.
    Consolidated,
    /// The run failed; `reason` has the error.
    Failed,
    /// The run ended without an error of its own: a restore, an edit or another change made its result obsolete, or the service
    /// stopped.
    Abandoned,
}

/// The result and the cost since the beginning of the run or its last commit. Stored as JSON: a field that is added later must be
/// optional, and an older release ignores it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RecordDetails {
    pub cause: RunCause,
    pub outcome: RecordOutcome,
    /// `None` if a revision was committed.
    pub reason: Option<String>,
    /// The names of the models that were called, in the order of their first calls.
    pub models: Vec<String>,
    /// All calls, including failed ones, and those for a summary that was discarded.
    pub usage: ModelUsage,
    /// The price of all calls whose tokens are known. `None` if one of them was to a model without prices.
    pub cost: Option<f64>,
    /// Milliseconds, with the time to load messages and to commit.
    pub duration_ms: i64,
}

/// A stored record.
#[derive(Clone, Debug, PartialEq)]
pub struct ConsolidationRecord {
    /// 1, 2, 3 … per session, ascending with time. Removed records leave gaps. Only the numbers that a rewind removes from the end
    /// are used again.
    pub number: i64,
    /// The revision that was committed.
    pub revision: Option<i64>,
    pub details: RecordDetails,
    pub created_at: OffsetDateTime,
}
