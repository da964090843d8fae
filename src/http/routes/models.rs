//! `GET /models`

use crate::http::error::Problem;
use crate::http::extract::{NoQuery, TenantFromKey};
use crate::http::response_body::Json;
use crate::service::MemoryService;
use crate::service::models::ModelReport;
use axum::extract::State;

/// Returns the state of the model pools.
///
/// Circuit breakers, calls, queues and the last results are those of the replica that responds, for all tenants together; the
/// tokens are those of the tenant. The scope is `admin`, because the state covers the whole service.
#[utoipa::path(
    get, path = "/models", operation_id = "list_models", tag = "operations",
    responses(
        (status = 200, description = "Pools, models and tokens", body = ModelReport),
    )
)]
pub(crate) async fn list(
    State(service): State<MemoryService>,
    TenantFromKey(tenant): TenantFromKey,
    _: NoQuery,
) -> Result<Json<ModelReport>, Problem> {
    Ok(Json(service.models(&tenant).await?))
}
