//! `DELETE /users/{user_id}`

use crate::http::error::Problem;
use crate::http::extract::{EmptyBody, PathParams, TenantFromKey, UserPath};
use crate::http::openapi::responses::{UnsupportedMediaType, UserNotFound};
use crate::service::MemoryService;
use axum::extract::State;
use axum::http::StatusCode;

/// Erases a user: the memory document with all versions, and all sessions.
///
/// The sessions are erased with their histories and summaries.
#[utoipa::path(
    delete, path = "/users/{user_id}", operation_id = "erase_user", tag = "users",
    params(UserPath),
    responses(
        (status = 204, description = "Erased"),
        UserNotFound, UnsupportedMediaType,
    )
)]
pub(crate) async fn erase(
    State(service): State<MemoryService>,
    TenantFromKey(tenant): TenantFromKey,
    PathParams(UserPath { user_id: user }): PathParams<UserPath>,
    _: EmptyBody,
) -> Result<StatusCode, Problem> {
    service.erase_user(&tenant, &user).await?;
    Ok(StatusCode::NO_CONTENT)
}
