//! The request id, on every request, every response and every log line in between; and the access log.
//!
//! `tower_http::request_id` does not replace this: it accepts any id of the client, also one that contains an API key or
//! fills the log.

use crate::http::error::ExceededLimit;
use crate::http::headers::X_REQUEST_ID;
use crate::http::middleware::metrics;
use crate::trace_context;
use axum::extract::{MatchedPath, Request};
use axum::http::HeaderValue;
use axum::response::Response;
use std::time::Instant;
use tracing::{Span, field};
use uuid::Uuid;

/// Longer ids of clients are replaced: every log line would repeat them.
const MAX_BYTES: usize = 128;

/// Longest run of letters and digits in an id: a trace id in hexadecimal digits.
const MAX_RUN_BYTES: usize = 32;
const PUNCTUATION: &[u8] = b"-_.:;=";

/// The id of a request and the values of its line in the access log.
pub(crate) struct AccessLog {
    id: HeaderValue,
    span: Span,
    method: &'static str,
    route: Option<MatchedPath>,
    started_at: Instant,
}

impl AccessLog {
    /// Uses the id of the client if it is valid, and creates one otherwise.
    pub(crate) fn start(request: &Request) -> Self {
        let id =
            request.headers().get(X_REQUEST_ID).filter(|id| is_valid(id)).cloned().unwrap_or_else(new_id);
        let (method, route) = (metrics::method_label(request.method()), request.extensions().get().cloned());
        let request_id = id.to_str().unwrap_or_default();
        // The authentication records tenant and key; `key` is the public id of the key.
        let span = if trace_context::is_enabled() {
            tracing::info_span!(
                "request",
                request_id,
                tenant = field::Empty,
                key = field::Empty,
                otel.name = format!("{method} {}", route_template(route.as_ref())),
                otel.kind = "server",
            )
        } else {
            tracing::info_span!("request", request_id, tenant = field::Empty, key = field::Empty)
        };
        trace_context::continue_trace(&span, request.headers());
        Self { id, span, method, route, started_at: Instant::now() }
    }

    /// Returns the span for all log lines of the request.
    pub(crate) fn span(&self) -> Span {
        self.span.clone()
    }

    /// Logs the request and adds the id to its response.
    pub(crate) fn finish(self, response: &mut Response) {
        let Self { id, span, method, route, started_at } = self;
        let (status, elapsed) = (response.status(), started_at.elapsed());
        // Overload has a line of its own: `metrics` logs the number of rejections. Successful requests are logged on
        // request only, because formatting and writing a line takes as long as a third of a context request.
        let is_overload =
            response.extensions().get().is_some_and(|exceeded: &ExceededLimit| exceeded.is_overload);
        let is_logged = (status.is_client_error() || status.is_server_error()) && !is_overload;
        let route = route_template(route.as_ref());
        trace_context::describe_response(&span, method, route, status.as_u16());
        span.in_scope(|| {
            // Clients control method and path, and people paste keys in place of ids. So only known methods and the templates
            // of routes are logged.
            let status = status.as_u16();
            if is_logged {
                tracing::info!(method, route, status, ?elapsed, "answered");
            } else {
                tracing::debug!(method, route, status, ?elapsed, "answered");
            }
        });
        response.headers_mut().insert(X_REQUEST_ID, id);
    }
}

/// Returns the template of the route, without the ids of clients.
fn route_template(route: Option<&MatchedPath>) -> &str {
    route.map_or("(no route)", MatchedPath::as_str)
}

/// Accepts ids such as UUIDs and trace ids. A key, or its secret part in any encoding, is a longer run of letters and digits.
fn is_valid(id: &HeaderValue) -> bool {
    let id = id.as_bytes();
    (1..=MAX_BYTES).contains(&id.len())
        && id.iter().all(|byte| byte.is_ascii_alphanumeric() || PUNCTUATION.contains(byte))
        && id.split(|byte| PUNCTUATION.contains(byte)).all(|run| run.len() <= MAX_RUN_BYTES)
}

fn new_id() -> HeaderValue {
    HeaderValue::from_str(&Uuid::now_v7().to_string()).unwrap_or(HeaderValue::from_static("none"))
}
