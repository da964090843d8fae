//! What browsers are told about every answer, and which pages may call.

use axum::Router;
use axum::extract::Request;
use axum::http::{HeaderName, HeaderValue, Method, header};
use axum::middleware::Next;
use axum::response::Response;
use std::time::Duration;
use tower_http::cors::{AllowOrigin, CorsLayer};

/// An answer is data: a browser that is led to it shows it, and neither guesses a type, nor runs anything, nor keeps it.
/// A page says what else it may do in a policy of its own.
const HEADERS: [(HeaderName, &str); 4] = [
    (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (header::REFERRER_POLICY, "no-referrer"),
    (header::CACHE_CONTROL, "no-store"),
    (header::CONTENT_SECURITY_POLICY, "default-src 'none'; frame-ancestors 'none'"),
];

/// Puts the headers on an answer that does not have them.
pub(super) async fn headers(request: Request, next: Next) -> Response {
    let mut response = next.run(request).await;
    for (name, value) in HEADERS {
        response.headers_mut().entry(name).or_insert(HeaderValue::from_static(value));
    }
    response
}

/// Lets pages of these origins call (CORS), with a key, but without cookies. Without origins there is no such layer.
pub(super) fn allow(router: Router, origins: &[String]) -> Router {
    let origins: Vec<HeaderValue> = origins.iter().filter_map(|origin| origin.parse().ok()).collect();
    if origins.is_empty() {
        return router;
    }
    let [key, replayed, id] =
        ["idempotency-key", "idempotent-replayed", "x-request-id"].map(HeaderName::from_static);
    let cors = CorsLayer::new()
        .allow_origin(AllowOrigin::list(origins))
        .allow_methods([Method::GET, Method::POST, Method::PUT, Method::PATCH, Method::DELETE])
        .allow_headers([header::AUTHORIZATION, header::CONTENT_TYPE, header::IF_MATCH, key, id.clone()])
        .expose_headers([header::ETAG, header::RETRY_AFTER, replayed, id])
        .max_age(Duration::from_hours(1));
    router.layer(cors)
}
