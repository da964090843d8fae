//! `POST /sessions/{session_id}/consolidations`

use crate::capacity::WorkPermit;
use crate::http::error::Problem;
use crate::http::extract::{EmptyBody, PathParams, SessionPath, TenantFromKey};
use crate::http::openapi::responses::{
    ConsolidationFailed, ConsolidationUnavailable, SessionNotFound, UnsupportedMediaType,
};
use crate::http::response_body::Json;
use crate::http::routes::revisions::RevisionBody;
use crate::service::MemoryService;
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
