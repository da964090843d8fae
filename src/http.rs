//! The HTTP interface, on one screen: every route, then every layer around them.
//!
//! A handler extracts, calls the service, wraps. Each resource has a file of its name; [`error`] is the one place where
//! errors become answers, [`extract`] the one where requests become values.

use crate::domain::api_key::Scope;
use crate::service::MemoryService;
use crate::service::keys::authenticator::Authenticator;
use axum::middleware::{from_fn, from_fn_with_state};
use axum::routing::{get, post};
use axum::{Extension, Router};
use metrics_exporter_prometheus::PrometheusHandle;
use middleware::admission::{self, Admission};
use middleware::auth::{self, Access};
use middleware::body_limits::{self, BodyMemoryBudget};
use middleware::origin_guard::{self, OriginGuard};
use middleware::{metrics, request_id};
use routes::{
    archives, consolidations, contexts, exchanges, health, mcp, memory, messages, revisions, search,
    sessions, skills, tools, users,
};
use std::sync::Arc;
use tower_http::catch_panic::CatchPanicLayer;

mod chat;
mod error;
mod extract;
mod json;
mod limits;
mod middleware;
pub mod openapi;
mod pagination;
mod routes;
pub mod server;

pub use limits::Limits;
pub use middleware::metrics::HttpMetrics;

/// What the settings say about the interface.
#[derive(Clone, Debug)]
pub struct Options {
    /// What a request may bring, how many there may be, and how long they may take.
    pub limits: Limits,
    /// The origins of the web pages that may call.
    pub cors_origins: Vec<String>,
    /// The names under which it may be called without a key; `*`: any.
    pub allowed_hosts: Vec<String>,
}

/// Which key a request needs: one of scope `read` for GET, `admin` for DELETE, `write` otherwise; but for these routes.
const ACCESS: &[(&str, Access)] = &[
    ("/sessions/{session_id}/revisions/{revision}/restore", Access::Key(Scope::Admin)),
    // Tools that write ask for more themselves.
    ("/mcp", Access::Key(Scope::Read)),
    ("/sessions/{session_id}/tools/{name}", Access::Key(Scope::Read)),
    ("/livez", Access::Open),
    ("/readyz", Access::Open),
    ("/metrics", Access::KeyOrStale(Scope::Admin)),
];

/// All routes over the service.
pub fn router(
    service: MemoryService,
    authenticator: Authenticator,
    prometheus: PrometheusHandle,
    http_metrics: HttpMetrics,
    options: &Options,
) -> Router {
    let (limits, origin_guard) =
        (options.limits, OriginGuard::new(&options.allowed_hosts, &options.cors_origins));
    let origin_guard = Arc::new(origin_guard);
    let (admission, body_memory) =
        (Arc::new(Admission::new(limits)), Arc::new(BodyMemoryBudget::new(limits)));
    let router = Router::new()
        .route("/sessions", get(sessions::list))
        .route("/sessions/{session_id}", get(sessions::get).patch(sessions::patch).delete(sessions::erase))
        .route("/sessions/{session_id}/exchanges", post(exchanges::record))
        .route("/sessions/{session_id}/context", post(contexts::build))
        .route("/sessions/{session_id}/messages", get(messages::list))
        .route("/sessions/{session_id}/consolidations", post(consolidations::consolidate))
        .route("/sessions/{session_id}/revisions", get(revisions::list))
        .route("/sessions/{session_id}/revisions/{revision}", get(revisions::get))
        .route("/sessions/{session_id}/revisions/{revision}/restore", post(revisions::restore))
        .route("/users/{user_id}", axum::routing::delete(users::erase))
        .route("/users/{user_id}/memory", get(memory::read).put(memory::write))
        .route("/users/{user_id}/memory/revisions", get(memory::revisions))
        .route("/search", get(search::search))
        .route("/tools", get(tools::list))
        .route("/sessions/{session_id}/tools/{name}", post(tools::call))
        .route("/skills/memory", get(skills::memory))
        .route("/mcp", post(mcp::serve))
        // Around all routes above, from the inside out; none of those below needs a turn, or ever waits for one.
        .route_layer(from_fn_with_state(Arc::clone(&admission), admission::acquire_permit))
        .route_layer(from_fn_with_state(Arc::clone(&body_memory), body_limits::buffer_body))
        .route_layer(from_fn_with_state(Arc::clone(&admission), admission::limit_time))
        .route_layer(from_fn_with_state(Arc::clone(&admission), admission::shed_if_overloaded))
        // Streams: they take as long as they take, and are never in memory as a whole.
        .route("/sessions/{session_id}/export", get(archives::export))
        .route("/sessions/{session_id}/import", post(archives::import).layer(Extension(body_memory)))
        .route_layer(from_fn_with_state(Arc::clone(&admission), admission::limit_rate))
        .route_layer(from_fn_with_state(admission, admission::limit_in_flight))
        .route("/livez", get(health::livez))
        .route("/readyz", get(health::readyz))
        .route("/metrics", get(health::metrics).with_state(prometheus))
        .with_state(service)
        .fallback(error::route_not_found)
        .layer(from_fn_with_state((authenticator, origin_guard), auth::authenticate))
        // Open: static, and nobody's data.
        .merge(openapi::page())
        .method_not_allowed_fallback(error::method_not_allowed)
        .layer(CatchPanicLayer::custom(error::panicked))
        .layer(Extension(limits));
    origin_guard::with_cors(router, &options.cors_origins)
        .layer(from_fn(origin_guard::set_security_headers))
        .layer(from_fn_with_state(http_metrics, metrics::record_request))
        .layer(from_fn(request_id::set_request_id))
}
