//! Headers of every response for browsers, and CORS.

use crate::http::headers::{IDEMPOTENCY_KEY, IDEMPOTENT_REPLAYED, MCP_HEADERS, X_REQUEST_ID};
use axum::Router;
use axum::http::{HeaderName, HeaderValue, Method, header};
use axum::response::Response;
use std::time::Duration;
use tower_http::cors::{AllowOrigin, CorsLayer};

/// Responses are data: a browser must not guess a type, run anything, or store the response. The documentation page
/// sets a policy of its own.
const SECURITY_HEADERS: [(HeaderName, &str); 4] = [
    (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (header::REFERRER_POLICY, "no-referrer"),
    (header::CACHE_CONTROL, "no-store"),
    (header::CONTENT_SECURITY_POLICY, "default-src 'none'; frame-ancestors 'none'"),
];

/// Sets the headers that the response does not have yet.
pub(crate) fn set_security_headers(response: &mut Response) {
    for (name, value) in SECURITY_HEADERS {
        response.headers_mut().entry(name).or_insert(HeaderValue::from_static(value));
    }
}

/// Adds a CORS layer that lets pages of these origins call with a key but without cookies. Without origins, no layer is
/// added.
pub(crate) fn with_cors(router: Router, origins: &[String]) -> Router {
    let origins: Vec<HeaderValue> = origins.iter().filter_map(|origin| origin.parse().ok()).collect();
    if origins.is_empty() {
        return router;
    }
    let mut headers =
        vec![header::AUTHORIZATION, header::CONTENT_TYPE, header::IF_MATCH, IDEMPOTENCY_KEY, X_REQUEST_ID];
    headers.extend(MCP_HEADERS);
    let cors = CorsLayer::new()
        .allow_origin(AllowOrigin::list(origins))
        .allow_methods([Method::GET, Method::POST, Method::PUT, Method::PATCH, Method::DELETE])
        .allow_headers(headers)
        .expose_headers([header::ETAG, header::RETRY_AFTER, IDEMPOTENT_REPLAYED, X_REQUEST_ID])
        .max_age(Duration::from_hours(1));
    router.layer(cors)
}
