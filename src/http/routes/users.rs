//! `DELETE /users/{user_id}`

use crate::http::error::Problem;
use crate::http::extract::{Nothing, Tenant, User};
use crate::http::openapi::refusals::NoUser;
use crate::service::MemoryService;
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
pub(crate) async fn erase(
    State(service): State<MemoryService>,
    Tenant(tenant): Tenant,
    User(user): User,
    _: Nothing,
) -> Result<StatusCode, Problem> {
    service.erase_user(&tenant, &user).await?;
    Ok(StatusCode::NO_CONTENT)
}
