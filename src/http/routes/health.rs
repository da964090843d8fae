//! `/livez`, `/readyz` and `/metrics`

use crate::http::error::Problem;
use crate::http::openapi::responses::{Internal, Unavailable};
use crate::service::MemoryService;
use axum::Json;
use axum::extract::State;
use axum::http::header::CONTENT_TYPE;
use axum::response::IntoResponse;
use metrics_exporter_prometheus::PrometheusHandle;
use serde::Serialize;
use utoipa::ToSchema;

/// The service is well.
#[derive(Serialize, ToSchema)]
pub(crate) struct Health {
    status: &'static str,
}

const OK: Json<Health> = Json(Health { status: "ok" });

/// Whether the process runs. Says nothing of the database: restarting precis would not help that.
#[utoipa::path(
    get, path = "/livez", tag = "operation",
    responses(
        (status = 200, description = "It runs", body = Health),
    )
)]
pub(crate) async fn livez() -> Json<Health> {
    OK
}

/// Whether requests can be served: the database answers, and its schema is this version's.
#[utoipa::path(
    get, path = "/readyz", tag = "operation",
    responses(
        (status = 200, description = "Requests can be served", body = Health),
        Unavailable, Internal,
    )
)]
pub(crate) async fn readyz(State(service): State<MemoryService>) -> Result<Json<Health>, Problem> {
    service.ready().await?;
    Ok(OK)
}

/// The text format of Prometheus.
const PROMETHEUS: &str = "text/plain; version=0.0.4; charset=utf-8";

/// What is measured, for Prometheus. Names begin with `precis_`.
#[utoipa::path(
    get, path = "/metrics", tag = "operation",
    responses(
        (status = 200, description = "All metrics", body = String, content_type = "text/plain"),
    )
)]
pub(crate) async fn metrics(State(metrics): State<PrometheusHandle>) -> impl IntoResponse {
    ([(CONTENT_TYPE, PROMETHEUS)], metrics.render())
}
