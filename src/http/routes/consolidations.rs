//! `/sessions/{session_id}/consolidations`: consolidate now, the dry run, and the records of earlier consolidations.

use crate::capacity;
use crate::domain::consolidation_record::{ConsolidationRecord, RecordDetails, RecordOutcome, RunCause};
use crate::domain::revision::ModelUsage;
use crate::http::error::Problem;
use crate::http::extract::{EmptyBody, NoQuery, PathParams, QueryParams, SessionPath, TenantFromKey};
use crate::http::openapi::responses::{
    ConsolidationDisabled, ConsolidationFailed, ConsolidationUnavailable, SessionNotFound,
    UnsupportedMediaType,
};
use crate::http::pagination::{Page, PageParams};
use crate::http::response_body::Json;
use crate::http::routes::revisions::RevisionBody;
use crate::service::MemoryService;
use crate::service::consolidation::ConsolidationPreview;
use axum::extract::State;
use axum::http::StatusCode;
use serde::Serialize;
use time::OffsetDateTime;
use utoipa::ToSchema;

/// The result and the cost of a consolidation: of one that committed a revision, or of one that failed or was abandoned. It contains
/// no text of the conversation.
#[derive(Serialize, ToSchema)]
#[schema(as = ConsolidationRecord)]
pub(crate) struct RecordBody {
    /// Ascending with time. Removed records leave gaps. Only the numbers that a rewind removes from the end are used again.
    number: i64,
    cause: RunCause,
    outcome: RecordOutcome,
    /// The revision that was committed, otherwise null.
    #[schema(required)]
    revision: Option<i64>,
    /// The cause of a failure or of the end of an abandoned run, otherwise null.
    #[schema(required)]
    reason: Option<String>,
    /// The names of the models that were called, in the order of their first calls; empty if none was, for example because the
    /// messages have no text.
    models: Vec<String>,
    /// All calls: also failed ones, and those whose responses were discarded.
    usage: ModelUsage,
    /// The cost of all calls with known tokens, by the prices at that time; null if a model without prices used tokens. The tokens of
    /// calls that were interrupted, or failed without a response, are unknown.
    #[schema(required)]
    cost: Option<f64>,
    /// Milliseconds from the beginning, or from the commit of the batch before, to the end.
    duration_ms: i64,
    /// Time of the end.
    #[serde(with = "time::serde::rfc3339")]
    created_at: OffsetDateTime,
}

impl From<ConsolidationRecord> for RecordBody {
    fn from(record: ConsolidationRecord) -> Self {
        let ConsolidationRecord { number, revision, details, created_at } = record;
        let RecordDetails { cause, outcome, reason, models, usage, cost, duration_ms } = details;
        Self { number, cause, outcome, revision, reason, models, usage, cost, duration_ms, created_at }
    }
}

/// Lists the records of consolidations, newest first.
///
/// There is a record for each revision of the kind `consolidation`, unless the revision is older than the records, was imported, or is
/// the copy of a fork; and one for each of the newest 200 runs that failed or were abandoned.
#[utoipa::path(
    get, path = "/sessions/{session_id}/consolidations", operation_id = "list_consolidations", tag = "summaries",
    params(SessionPath, PageParams),
    responses(
        (status = 200, description = "Records of consolidations", body = Page<RecordBody>),
        SessionNotFound,
    )
)]
pub(crate) async fn list(
    State(service): State<MemoryService>,
    TenantFromKey(tenant): TenantFromKey,
    PathParams(SessionPath { session_id: session }): PathParams<SessionPath>,
    QueryParams(params): QueryParams<PageParams>,
) -> Result<Json<Page<RecordBody>>, Problem> {
    let (limit, before) = params.read_descending()?;
    let records = service.consolidation_records(&tenant, &session, before, limit).await?;
    Ok(Json(Page::new(records, |record| record.number, RecordBody::from)))
}

/// Consolidates the session now, regardless of threshold and mode.
///
/// Summarises all messages except the last `consolidation.keep_recent`.
#[utoipa::path(
    post, path = "/sessions/{session_id}/consolidations", tag = "summaries",
    params(SessionPath),
    responses(
        (status = 201, description = "The new revision; the last one if several batches were needed", body = RevisionBody),
        (status = 200, description = "null: there was nothing to summarise", body = Option<RevisionBody>),
        SessionNotFound, ConsolidationUnavailable, ConsolidationFailed, UnsupportedMediaType,
    )
)]
pub(crate) async fn consolidate(
    State(service): State<MemoryService>,
    TenantFromKey(tenant): TenantFromKey,
    PathParams(SessionPath { session_id: session }): PathParams<SessionPath>,
    _: EmptyBody,
) -> Result<(StatusCode, Json<Option<RevisionBody>>), Problem> {
    // A model may take minutes, and the response is small.
    capacity::current().release();
    let revision = service.consolidate_session(&tenant, &session).await?;
    let status = if revision.is_some() { StatusCode::CREATED } else { StatusCode::OK };
    Ok((status, Json(revision.map(RevisionBody::from))))
}

/// Returns what a consolidation would summarise now.
///
/// It contains the messages, the prompt of the first model call, the models in their order, and the estimated tokens and cost. No
/// model is called, and nothing is written. The result is valid as long as the session does not change.
#[utoipa::path(
    get, path = "/sessions/{session_id}/consolidations/next", operation_id = "preview_consolidation", tag = "summaries",
    params(SessionPath),
    responses(
        (status = 200, description = "The next consolidation", body = ConsolidationPreview),
        SessionNotFound, ConsolidationDisabled,
    )
)]
pub(crate) async fn preview(
    State(service): State<MemoryService>,
    TenantFromKey(tenant): TenantFromKey,
    PathParams(SessionPath { session_id: session }): PathParams<SessionPath>,
    _: NoQuery,
) -> Result<Json<ConsolidationPreview>, Problem> {
    capacity::current().release();
    let preview = service.preview_consolidation(&tenant, &session).await?;
    Ok(Json(preview))
}
