//! A request id on every request, every answer and every line of the log in between.

use crate::http::error::ExceededLimit;
use crate::http::extract::redact_path;
use crate::http::middleware::metrics;
use axum::extract::Request;
use axum::http::{HeaderName, HeaderValue};
use axum::middleware::Next;
use axum::response::Response;
use std::time::Instant;
use tracing::{Instrument as _, field};
use uuid::Uuid;

/// The header that brings it, and returns it.
const HEADER: HeaderName = HeaderName::from_static("x-request-id");
/// A longer one is not taken: it would be repeated in every line of the log.
const MAX_BYTES: usize = 128;

/// Takes the client's id if it is sound, makes one otherwise, and logs the request under it.
pub(crate) async fn set_request_id(request: Request, next: Next) -> Response {
    let id = request.headers().get(HEADER).filter(|id| is_valid(id)).cloned().unwrap_or_else(new_id);
    let span = tracing::info_span!(
        "request",
        request_id = id.to_str().unwrap_or_default(),
        // Known once the key is looked at; never the key itself.
        tenant = field::Empty,
        key = field::Empty,
    );
    // Both may hold whatever a client made up.
    let (method, path) =
        (metrics::method_label(request.method()), redact_path(request.uri().path()).into_owned());
    let began = Instant::now();
    let mut response = next.run(request).instrument(span.clone()).await;
    let (status, elapsed) = (response.status().as_u16(), began.elapsed());
    span.in_scope(|| match path.as_str() {
        // Asked every few seconds by whatever watches over the service.
        "/livez" | "/readyz" => tracing::debug!(method, path, status, ?elapsed, "answered"),
        // `meters` tells how many.
        _ if response.extensions().get().is_some_and(|exceeded: &ExceededLimit| exceeded.is_overload) => {
            tracing::debug!(method, path, status, ?elapsed, "answered");
        }
        _ => tracing::info!(method, path, status, ?elapsed, "answered"),
    });
    response.headers_mut().insert(HEADER, id);
    response
}

fn is_valid(id: &HeaderValue) -> bool {
    let graphic = id.as_bytes().iter().all(u8::is_ascii_graphic);
    let text = id.to_str().ok().filter(|id| graphic && (1..=MAX_BYTES).contains(&id.len()));
    text.is_some_and(|id| redact_path(id) == id)
}

fn new_id() -> HeaderValue {
    HeaderValue::from_str(&Uuid::now_v7().to_string()).unwrap_or(HeaderValue::from_static("none"))
}
