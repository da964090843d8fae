//! `GET /users`, `DELETE /users/{user_id}`

use crate::domain::memory::MemoryOwner;
use crate::http::error::Problem;
use crate::http::extract::{EmptyBody, PathParams, QueryParams, TenantFromKey, UserPath};
use crate::http::openapi::responses::{UnsupportedMediaType, UserNotFound};
use crate::http::pagination::{Page, PageParams};
use crate::http::response_body::Json;
use crate::service::MemoryService;
use axum::extract::State;
use axum::http::StatusCode;
use serde::Serialize;
use time::OffsetDateTime;
use utoipa::ToSchema;

/// A user with a memory document.
#[derive(Serialize, ToSchema)]
#[schema(as = User)]
pub(crate) struct MemoryOwnerBody {
    user_id: String,
    /// Version of the document: 1, 2, 3 …
    version: i64,
    /// Number of words of the document.
    words: i64,
    /// Number of tokens of the document, counted by `o200k_base`.
    tokens: i64,
    /// Time at which this version was written.
    #[serde(with = "time::serde::rfc3339")]
    updated_at: OffsetDateTime,
}

/// Lists the users that have a memory document.
///
/// They are in the order of their ids. A user whose sessions have no document is not listed.
#[utoipa::path(
    get, path = "/users", operation_id = "list_users", tag = "users",
    params(PageParams),
    responses(
        (status = 200, description = "Users", body = Page<MemoryOwnerBody>),
    )
)]
pub(crate) async fn list(
    State(service): State<MemoryService>,
    TenantFromKey(tenant): TenantFromKey,
    QueryParams(params): QueryParams<PageParams>,
) -> Result<Json<Page<MemoryOwnerBody>>, Problem> {
    let (limit, after) = params.read_named()?;
    let owners = service.memory_owners(&tenant, &after, limit).await?;
    let body = |MemoryOwner { user, version, words, tokens, updated_at }| {
        let user_id = String::from(user.as_str());
        MemoryOwnerBody { user_id, version, words, tokens, updated_at }
    };
    Ok(Json(Page::new(owners, |owner: &MemoryOwner| owner.user.as_str().to_owned(), body)))
}

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
