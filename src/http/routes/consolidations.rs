//! `POST /sessions/{session_id}/consolidations` and its dry run

use crate::capacity::WorkPermit;
use crate::http::error::Problem;
use crate::http::extract::{EmptyBody, NoQuery, PathParams, SessionPath, TenantFromKey};
use crate::http::openapi::responses::{
    ConsolidationDisabled, ConsolidationFailed, ConsolidationUnavailable, SessionNotFound,
    UnsupportedMediaType,
};
use crate::http::response_body::Json;
use crate::http::routes::revisions::RevisionBody;
use crate::service::MemoryService;
use crate::service::consolidation::ConsolidationPreview;
use axum::extract::State;
use axum::http::StatusCode;

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
    permit: WorkPermit,
    _: EmptyBody,
) -> Result<(StatusCode, Json<Option<RevisionBody>>), Problem> {
    let revision = permit.release_while(service.consolidate_session(&tenant, &session)).await?;
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
    permit: WorkPermit,
    _: NoQuery,
) -> Result<Json<ConsolidationPreview>, Problem> {
    let preview = permit.release_while(service.preview_consolidation(&tenant, &session)).await?;
    Ok(Json(preview))
}
