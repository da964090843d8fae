//! The HTTP layer on one screen: every route with the scope that it requires. [`layers`] are around the routes.
//!
//! A handler extracts values from the request, calls the service and wraps the result. `routes/` has a file per
//! resource, `middleware/` a file per step of a layer. [`error`] maps errors to responses, [`extract`] maps requests to values.
//!
//! To add a route, write a handler with `#[utoipa::path]` and add one line with its scope to a function below. The line
//! registers the handler, the check of the scope, and the entry in the OpenAPI document.

use crate::config;
use crate::domain::api_key::Scope;
use crate::proxy::Proxy;
use crate::service::MemoryService;
use crate::service::keys::authenticator::Authenticator;
use access::{Access, RouteKind};
use api_routes::ApiRoutes;
use axum::extract::{MatchedPath, Request};
use axum::http::Method;
use axum::middleware::from_fn_with_state;
use axum::routing::{any, post};
use axum::{Extension, Router};
use layers::Guard;
use metrics_exporter_prometheus::PrometheusHandle;
use middleware::admission::Admission;
use middleware::auth::Auth;
use middleware::origin_guard::OriginGuard;
use middleware::security_headers;
use routes::health::MetricsExporter;
use routes::{
    consolidations, contexts, exchanges, exports, forks, health, mcp, memory, messages, models, proxy,
    redactions, retention, revisions, search, sessions, skills, sources, sync, tools, usage, users,
};
use std::future::ready;
use std::sync::Arc;
use utoipa_axum::routes;

mod access;
mod api_routes;
mod chat;
mod connections;
mod context_schemas;
mod error;
mod extract;
mod headers;
mod json;
mod layers;
mod limits;
mod middleware;
mod openapi;
mod pagination;
mod path;
mod readable;
mod response_body;
mod routes;
pub mod server;
mod ui;

pub use middleware::metrics::{HttpMetrics, REQUEST_DURATION};

const OPEN: Access = Access::Open;
const READ: Access = Access::Key(Scope::Read);
const WRITE: Access = Access::Key(Scope::Write);
const ADMIN: Access = Access::Key(Scope::Admin);

/// Returns the routes whose requests and responses are small. Their bodies are buffered, their time is limited, and
/// each request needs a work permit.
fn buffered_routes() -> ApiRoutes {
    ApiRoutes::new(RouteKind::Buffered)
        .route(READ, routes!(sessions::list))
        .route(READ, routes!(sessions::get))
        .route(WRITE, routes!(sessions::patch))
        .route(ADMIN, routes!(sessions::erase))
        .route(WRITE, routes!(exchanges::append))
        .route(WRITE, routes!(sync::sync))
        .route(WRITE, routes!(contexts::build))
        .route(READ, routes!(messages::list))
        .route(READ, routes!(messages::placement))
        .route(WRITE, routes!(forks::fork))
        .route(WRITE, routes!(forks::rewind))
        .route(ADMIN, routes!(redactions::redact))
        .route(READ, routes!(redactions::list))
        .route(READ, routes!(consolidations::list))
        .route(WRITE, routes!(consolidations::consolidate))
        .route(READ, routes!(consolidations::preview))
        .route(READ, routes!(revisions::list))
        .route(ADMIN, routes!(revisions::edit))
        .route(READ, routes!(revisions::get))
        .route(READ, routes!(sources::list))
        .route(ADMIN, routes!(revisions::restore))
        .route(READ, routes!(users::list))
        .route(ADMIN, routes!(users::erase))
        .route(READ, routes!(usage::get))
        .route(ADMIN, routes!(models::list))
        .route(READ, routes!(retention::get_tenant))
        .route(ADMIN, routes!(retention::put_tenant))
        .route(READ, routes!(retention::get_user))
        .route(ADMIN, routes!(retention::put_user))
        .route(READ, routes!(retention::get_session))
        .route(ADMIN, routes!(retention::put_session))
        .route(READ, routes!(memory::read))
        .route(WRITE, routes!(memory::write))
        .route(READ, routes!(memory::revisions))
        .route(READ, routes!(search::search))
        .route(READ, routes!(tools::list))
        // Tools that write require the scope `write`. The handlers check it, because the scope depends on the tool.
        .route(READ, routes!(tools::call))
        .route(READ, routes!(skills::memory))
        .undocumented_route(READ, "/mcp", &[Method::POST], post(mcp::serve))
        .undocumented_route(READ, "/mcp/", &[Method::POST], post(mcp::serve))
}

/// Returns the routes whose bodies are streams of any length. They are neither buffered nor limited in time.
fn streaming_routes() -> ApiRoutes {
    ApiRoutes::new(RouteKind::Streaming)
        .route(READ, routes!(exports::export))
        .route(WRITE, routes!(exports::import))
}

/// Returns the routes for operators. They are served under overload, too.
fn operational_routes() -> ApiRoutes {
    ApiRoutes::new(RouteKind::Operational)
        .route(OPEN, routes!(health::livez))
        .route(OPEN, routes!(health::readyz))
        .route(Access::KeyOrStale(Scope::Admin), routes!(health::metrics))
}

/// Returns the routes of model providers. While the store is unavailable, keys that were valid before stay valid, so that requests can be
/// forwarded without memory.
fn proxied_routes() -> ApiRoutes {
    let access = Access::KeyOrStale(Scope::Write);
    let methods = [Method::GET, Method::POST, Method::PUT, Method::PATCH, Method::DELETE];
    ApiRoutes::new(RouteKind::Proxied)
        .undocumented_route(access, "/v1/{*path}", &methods, any(proxy::serve))
        .undocumented_route(access, "/proxy/{session_id}/v1/{*path}", &methods, any(proxy::serve))
}

/// Returns the OpenAPI document, as it is committed in `openapi/openapi.json`.
pub fn openapi() -> utoipa::openapi::OpenApi {
    openapi::document([buffered_routes(), streaming_routes(), operational_routes()])
}

/// Returns the router: all routes and, from the inside out, the layers around them.
pub fn router(
    service: MemoryService,
    authenticator: Authenticator,
    prometheus: PrometheusHandle,
    http_metrics: HttpMetrics,
    limits: &Arc<config::Limits>,
    server: &config::Server,
    proxy: Proxy,
) -> Router {
    let (buffered, streaming, operational) = (buffered_routes(), streaming_routes(), operational_routes());
    let proxied = proxied_routes();
    let access = Arc::new(ApiRoutes::access_table([&buffered, &streaming, &operational, &proxied]));
    let table = Arc::clone(&access);
    let route_not_found = move |request: Request| {
        ready(error::route_not_found(request.method(), request.uri(), |path| table.has(path)))
    };
    let table = Arc::clone(&access);
    let method_not_allowed = move |request: Request| {
        let path = request.extensions().get::<MatchedPath>().map(MatchedPath::as_str);
        ready(error::method_not_allowed(request.method(), request.uri(), &table.methods(path)))
    };
    let admission = Arc::new(Admission::new(limits, server.read_timeout));
    let exporter = MetricsExporter {
        prometheus,
        http: http_metrics.clone(),
        capacity: Arc::clone(admission.capacity()),
    };
    let guard = Arc::new(Guard {
        access,
        auth: Auth {
            authenticator,
            origin_guard: OriginGuard::new(&server.allowed_hosts, &server.cors_origins),
        },
        admission,
        limits: Arc::clone(limits),
        request_timeout: server.request_timeout,
    });
    // The documentation and the inspector need no key: their files are static and the same for all tenants.
    let pages = openapi::page(&openapi())
        .merge(ui::pages())
        .method_not_allowed_fallback(method_not_allowed.clone())
        .layer(from_fn_with_state(Arc::clone(&guard), layers::guard_page));
    let router = (buffered.into_router())
        .merge(streaming.into_router())
        .merge(proxied.into_router().route_layer(Extension(Arc::new(proxy))))
        .merge(operational.into_router().route_layer(Extension(exporter)))
        .with_state(service)
        .fallback(route_not_found)
        .method_not_allowed_fallback(method_not_allowed)
        .layer(from_fn_with_state(guard, layers::guard))
        .merge(pages)
        .merge(openapi::well_known());
    security_headers::with_cors(router, &server.cors_origins)
        .layer(from_fn_with_state(http_metrics, layers::observe))
}
