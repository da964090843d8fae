//! The HTTP interface, on one screen: every route, then every layer around them.
//!
//! A handler extracts, calls the engine, wraps. Each resource has a file of its name; [`error`] is the one place where
//! errors become answers, [`extract`] the one where requests become values.

use crate::domain::api_key::Scope;
use crate::engine::MemoryService;
use crate::engine::keys::authenticator::Authenticator;
use auth::Access;
use axum::extract::DefaultBodyLimit;
use axum::routing::{get, post};
use axum::{Router, middleware};
use metrics_exporter_prometheus::PrometheusHandle;
use tower_http::catch_panic::CatchPanicLayer;

mod auth;
mod consolidations;
mod contexts;
mod error;
mod exchanges;
mod extract;
mod json;
mod memory;
mod messages;
pub mod openapi;
mod operation;
mod page;
mod request_id;
mod revisions;
mod sessions;
mod users;

/// Which key a request needs: one of scope `read` for GET, `admin` for DELETE, `write` otherwise; but for these routes.
const ACCESS: &[(&str, Access)] = &[
    ("/sessions/{session_id}/revisions/{revision}/restore", Access::Key(Scope::Admin)),
    ("/livez", Access::Open),
    ("/readyz", Access::Open),
    ("/metrics", Access::KeyWhileAway(Scope::Admin)),
];

/// All routes over the service. `max_body_bytes` bounds the body of a request.
pub fn router(
    service: MemoryService,
    authenticator: Authenticator,
    metrics: PrometheusHandle,
    max_body_bytes: usize,
) -> Router {
    Router::new()
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
        .route("/livez", get(operation::livez))
        .route("/readyz", get(operation::readyz))
        .route("/metrics", get(operation::metrics).with_state(metrics))
        .with_state(service)
        .fallback(error::no_route)
        .layer(middleware::from_fn_with_state(authenticator, auth::layer))
        // Open: static, and nobody's data.
        .merge(openapi::page())
        .method_not_allowed_fallback(error::no_method)
        .layer(CatchPanicLayer::custom(error::panicked))
        .layer(middleware::from_fn_with_state(error::MaxBody(max_body_bytes), error::with_limits))
        .layer(DefaultBodyLimit::max(max_body_bytes))
        .layer(middleware::from_fn(request_id::layer))
}
