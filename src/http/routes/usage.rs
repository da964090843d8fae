//! `GET /usage`

use crate::http::error::Problem;
use crate::http::extract::{NoQuery, TenantFromKey};
use crate::http::response_body::Json;
use crate::service::MemoryService;
use axum::extract::State;
use serde::Serialize;
use utoipa::ToSchema;

/// The stored bytes of a tenant.
#[derive(Serialize, ToSchema)]
#[schema(as = Usage)]
pub(crate) struct UsageBody {
    /// Size of the messages of all sessions as JSON, in bytes.
    stored_bytes: i64,
}

/// Returns the stored bytes of the tenant.
///
/// It is the sum of `stored_bytes` of all sessions, including branches of rewinds. Summaries, memory documents and the search index
/// are not counted.
#[utoipa::path(
    get, path = "/usage", operation_id = "get_usage", tag = "sessions",
    responses(
        (status = 200, description = "The usage", body = UsageBody),
    )
)]
pub(crate) async fn get(
    State(service): State<MemoryService>,
    TenantFromKey(tenant): TenantFromKey,
    _: NoQuery,
) -> Result<Json<UsageBody>, Problem> {
    Ok(Json(UsageBody { stored_bytes: service.stored_bytes(&tenant).await? }))
}
