//! `/retention`, `/users/{user_id}/retention` and `/sessions/{session_id}/retention`

use crate::domain::retention::{RetentionPeriod, RetentionSource};
use crate::http::error::Problem;
use crate::http::extract::{JsonBody, NoQuery, PathParams, SessionPath, TenantFromKey, UserPath};
use crate::http::openapi::responses::SessionNotFound;
use crate::http::response_body::Json;
use crate::service::MemoryService;
use crate::service::retention::Retention;
use axum::extract::State;
use serde::{Deserialize, Serialize};
use time::OffsetDateTime;
use utoipa::ToSchema;

/// A new period.
#[derive(Deserialize, ToSchema)]
pub(crate) struct RetentionRequest {
    /// Time from the last exchange of a session to its erasure, such as `90d`, `12h` or `never`. Null removes the value, so that
    /// the next one applies: that of the user, of the tenant, or the setting `retention.after_last_exchange`.
    #[schema(required, value_type = Option<String>, example = "90d", pattern = "^(never|[1-9][0-9]{0,3}(s|m|h|d))$")]
    #[serde(deserialize_with = "Option::deserialize")]
    after_last_exchange: Option<RetentionPeriod>,
}

/// The time after which sessions are erased.
#[derive(Serialize, ToSchema)]
#[schema(as = Retention)]
pub(crate) struct RetentionBody {
    /// The value that was set here; null if there is none.
    #[schema(required, value_type = Option<String>, example = "90d")]
    after_last_exchange: Option<RetentionPeriod>,
    effective: EffectiveRetention,
}

/// The period that applies.
#[derive(Serialize, ToSchema)]
struct EffectiveRetention {
    /// `never` keeps sessions.
    #[schema(value_type = String, example = "90d")]
    after_last_exchange: RetentionPeriod,
    /// The place that the period comes from.
    source: RetentionSource,
}

/// The time after which a session is erased.
#[derive(Serialize, ToSchema)]
#[schema(as = SessionRetention)]
pub(crate) struct SessionRetentionBody {
    /// The value that was set here; null if there is none.
    #[schema(required, value_type = Option<String>, example = "90d")]
    after_last_exchange: Option<RetentionPeriod>,
    effective: EffectiveRetention,
    /// The time from which on the session is erased if there is no exchange before; null if it is kept. A branch of a rewind may
    /// be erased before its period ends (`retention.branches_after`).
    #[schema(required)]
    #[serde(with = "time::serde::rfc3339::option")]
    expires_at: Option<OffsetDateTime>,
}

impl From<Retention> for EffectiveRetention {
    fn from(retention: Retention) -> Self {
        Self { after_last_exchange: retention.effective, source: retention.source }
    }
}

impl From<Retention> for RetentionBody {
    fn from(retention: Retention) -> Self {
        Self { after_last_exchange: retention.own, effective: retention.into() }
    }
}

impl From<Retention> for SessionRetentionBody {
    fn from(retention: Retention) -> Self {
        Self {
            after_last_exchange: retention.own,
            expires_at: retention.expires_at,
            effective: retention.into(),
        }
    }
}

/// Returns the retention of the tenant.
///
/// It applies to sessions that have no value of their own and whose user has none.
#[utoipa::path(
    get, path = "/retention", operation_id = "get_retention", tag = "retention",
    responses(
        (status = 200, description = "The retention", body = RetentionBody),
    )
)]
pub(crate) async fn get_tenant(
    State(service): State<MemoryService>,
    TenantFromKey(tenant): TenantFromKey,
    _: NoQuery,
) -> Result<Json<RetentionBody>, Problem> {
    Ok(Json(service.retention(&tenant, None).await?.into()))
}

/// Sets the retention of the tenant.
///
/// Expired sessions are erased in the background, within `retention.interval`.
#[utoipa::path(
    put, path = "/retention", operation_id = "set_retention", tag = "retention",
    request_body(content = RetentionRequest, examples(
        ("period" = (summary = "Erase sessions after 90 days", value = json!({"after_last_exchange": "90d"}))),
        ("never" = (summary = "Keep sessions", value = json!({"after_last_exchange": "never"}))),
        ("none" = (summary = "Remove the value", value = json!({"after_last_exchange": null}))),
    )),
    responses(
        (status = 200, description = "The new retention", body = RetentionBody),
    )
)]
pub(crate) async fn put_tenant(
    State(service): State<MemoryService>,
    TenantFromKey(tenant): TenantFromKey,
    JsonBody(request): JsonBody<RetentionRequest>,
) -> Result<Json<RetentionBody>, Problem> {
    Ok(Json(service.set_retention(&tenant, None, request.after_last_exchange).await?.into()))
}

/// Returns the retention of a user.
///
/// It applies to sessions of the user that have no value of their own. A user without any data has that of the tenant.
#[utoipa::path(
    get, path = "/users/{user_id}/retention", operation_id = "get_user_retention", tag = "retention",
    params(UserPath),
    responses(
        (status = 200, description = "The retention", body = RetentionBody),
    )
)]
pub(crate) async fn get_user(
    State(service): State<MemoryService>,
    TenantFromKey(tenant): TenantFromKey,
    PathParams(UserPath { user_id: user }): PathParams<UserPath>,
    _: NoQuery,
) -> Result<Json<RetentionBody>, Problem> {
    Ok(Json(service.retention(&tenant, Some(&user)).await?.into()))
}

/// Sets the retention of a user.
///
/// The user need not have data yet. Erasing the user removes the value. The memory document has no retention.
#[utoipa::path(
    put, path = "/users/{user_id}/retention", operation_id = "set_user_retention", tag = "retention",
    params(UserPath),
    request_body(content = RetentionRequest, examples(
        ("period" = (summary = "Erase sessions after 90 days", value = json!({"after_last_exchange": "90d"}))),
        ("never" = (summary = "Keep sessions", value = json!({"after_last_exchange": "never"}))),
        ("none" = (summary = "Remove the value", value = json!({"after_last_exchange": null}))),
    )),
    responses(
        (status = 200, description = "The new retention", body = RetentionBody),
    )
)]
pub(crate) async fn put_user(
    State(service): State<MemoryService>,
    TenantFromKey(tenant): TenantFromKey,
    PathParams(UserPath { user_id: user }): PathParams<UserPath>,
    JsonBody(request): JsonBody<RetentionRequest>,
) -> Result<Json<RetentionBody>, Problem> {
    Ok(Json(service.set_retention(&tenant, Some(&user), request.after_last_exchange).await?.into()))
}

/// Returns the retention of a session.
///
/// `effective` is the most specific period: its own, that of its user, that of the tenant, or the setting.
#[utoipa::path(
    get, path = "/sessions/{session_id}/retention", operation_id = "get_session_retention", tag = "retention",
    params(SessionPath),
    responses(
        (status = 200, description = "The retention", body = SessionRetentionBody),
        SessionNotFound,
    )
)]
pub(crate) async fn get_session(
    State(service): State<MemoryService>,
    TenantFromKey(tenant): TenantFromKey,
    PathParams(SessionPath { session_id: session }): PathParams<SessionPath>,
    _: NoQuery,
) -> Result<Json<SessionRetentionBody>, Problem> {
    Ok(Json(service.session_retention(&tenant, &session).await?.into()))
}

/// Sets the retention of a session.
///
/// A fork of the session has the same value. Erasing the session removes it.
#[utoipa::path(
    put, path = "/sessions/{session_id}/retention", operation_id = "set_session_retention", tag = "retention",
    params(SessionPath),
    request_body(content = RetentionRequest, examples(
        ("period" = (summary = "Erase sessions after 90 days", value = json!({"after_last_exchange": "90d"}))),
        ("never" = (summary = "Keep sessions", value = json!({"after_last_exchange": "never"}))),
        ("none" = (summary = "Remove the value", value = json!({"after_last_exchange": null}))),
    )),
    responses(
        (status = 200, description = "The new retention", body = SessionRetentionBody),
        SessionNotFound,
    )
)]
pub(crate) async fn put_session(
    State(service): State<MemoryService>,
    TenantFromKey(tenant): TenantFromKey,
    PathParams(SessionPath { session_id: session }): PathParams<SessionPath>,
    JsonBody(request): JsonBody<RetentionRequest>,
) -> Result<Json<SessionRetentionBody>, Problem> {
    Ok(Json(service.set_session_retention(&tenant, &session, request.after_last_exchange).await?.into()))
}
