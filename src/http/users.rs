//! `DELETE /users/{user_id}`

use super::error::Problem;
use super::extract::{Nothing, Tenant, User};
use super::openapi::refusals::NoUser;
use crate::engine::MemoryService;
use axum::extract::State;
use axum::http::StatusCode;

/// Erases a user: the memory document with its versions, and all sessions.
#[utoipa::path(
    delete, path = "/users/{user_id}", operation_id = "erase_user", tag = "users",
    params(User),
    responses(
        (status = 204, description = "Nothing of the user is left"),
        NoUser,
    )
)]
pub(super) async fn erase(
    State(service): State<MemoryService>,
    Tenant(tenant): Tenant,
    User(user): User,
    _: Nothing,
) -> Result<StatusCode, Problem> {
    service.erase_user(&tenant, &user).await?;
    Ok(StatusCode::NO_CONTENT)
}
