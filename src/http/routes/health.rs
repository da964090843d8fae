//! `/livez`, `/readyz` and `/metrics`

use crate::capacity::{Capacity, Level, Overloaded};
use crate::http::error::Problem;
use crate::http::extract::QueryParams;
use crate::http::middleware::metrics::HttpMetrics;
use crate::http::openapi::responses::{Internal, Unavailable};
use crate::http::response_body::Json;
use crate::service::MemoryService;
use axum::Extension;
use axum::extract::State;
use axum::http::header::CONTENT_TYPE;
use axum::response::IntoResponse;
use metrics_exporter_prometheus::PrometheusHandle;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use utoipa::{IntoParams, ToSchema};

/// A positive health check.
#[derive(Serialize, ToSchema)]
pub(crate) struct Health {
    status: HealthStatus,
    /// With `verbose`: problems that do not keep the service from working, each with its fix.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    warnings: Option<Vec<String>>,
}

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct ReadyParams {
    /// Lists warnings, too; the value does not matter.
    verbose: Option<String>,
}

/// The only status of a positive health check.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
enum HealthStatus {
    Ok,
}

const OK: Json<Health> = Json(Health { status: HealthStatus::Ok, warnings: None });

/// Tells that the process runs.
///
/// It does not check the database, because restarting precis would not repair it.
#[utoipa::path(
    get, path = "/livez", tag = "operations",
    responses(
        (status = 200, description = "The process runs", body = Health),
    )
)]
pub(crate) async fn livez() -> Json<Health> {
    OK
}

/// Tells whether requests can be served.
///
/// Requests can be served if the database is available, its schema works with this release, and within the last ten seconds a request could
/// start. With `verbose`, the response lists models that the provider refuses, because of the API key or the name, although the
/// models after them in their pools write the summaries.
#[utoipa::path(
    get, path = "/readyz", tag = "operations", params(ReadyParams),
    responses(
        (status = 200, description = "Requests can be served", body = Health),
        Unavailable, Internal,
    )
)]
pub(crate) async fn readyz(
    State(service): State<MemoryService>,
    Extension(exporter): Extension<MetricsExporter>,
    QueryParams(params): QueryParams<ReadyParams>,
) -> Result<Json<Health>, Problem> {
    if exporter.capacity.is_stuck() {
        return Err(Problem::overloaded(Overloaded(Level::Running)));
    }
    service.ready().await?;
    let warnings = params.verbose.map(|_| service.warnings());
    Ok(Json(Health { status: HealthStatus::Ok, warnings }))
}

/// The media type of the Prometheus text format.
const PROMETHEUS: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Returns all metrics in the Prometheus text format.
///
/// The names of the metrics begin with `precis_`, those of the process with `process_`.
#[utoipa::path(
    get, path = "/metrics", tag = "operations",
    responses(
        (status = 200, description = "All metrics", body = String, content_type = "text/plain"),
    )
)]
pub(crate) async fn metrics(
    State(service): State<MemoryService>,
    Extension(exporter): Extension<MetricsExporter>,
) -> impl IntoResponse {
    service.update_metrics();
    exporter.http.set_load(&exporter.capacity);
    exporter.http.collect_process_metrics();
    ([(CONTENT_TYPE, PROMETHEUS)], exporter.prometheus.render())
}

/// The parts of the metrics that only the HTTP layer has.
#[derive(Clone, Debug)]
pub(crate) struct MetricsExporter {
    pub(crate) prometheus: PrometheusHandle,
    pub(crate) http: HttpMetrics,
    pub(crate) capacity: Arc<Capacity>,
}
