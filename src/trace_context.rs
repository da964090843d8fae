//! Spans of requests and their steps, and the context of a trace in the header `traceparent`, of requests and of model calls.
//!
//! Spans are those of `tracing`; `app::traces` exports them if a collector is configured. A [`step`] is for the export only: its level
//! is below that of the log lines, so without a collector it is disabled at its callsite, and costs one comparison.

use opentelemetry::propagation::TextMapPropagator as _;
use opentelemetry::trace::{Status, TraceContextExt as _};
use opentelemetry_http::{HeaderExtractor, HeaderInjector};
use opentelemetry_sdk::propagation::TraceContextPropagator;
use reqwest::header::HeaderMap;
use std::sync::atomic::{AtomicBool, Ordering};
use tracing::Span;
use tracing_opentelemetry::OpenTelemetrySpanExt as _;

/// The target of the spans that are only exported.
pub const STEPS: &str = "precis::steps";

static IS_EXPORTED: AtomicBool = AtomicBool::new(false);

/// Returns the span of a step of a request or a consolidation. It has no attributes.
macro_rules! step {
    ($name:literal) => {
        tracing::trace_span!(target: $crate::trace_context::STEPS, $name)
    };
}

pub(crate) use step;

/// Declares that the spans of this process are exported.
pub fn enable() {
    IS_EXPORTED.store(true, Ordering::Relaxed);
}

/// Returns `true` if spans are exported.
pub fn is_enabled() -> bool {
    IS_EXPORTED.load(Ordering::Relaxed)
}

/// Makes a new span a part of the trace that the headers of a request name, if they name a valid one.
pub fn continue_trace(span: &Span, headers: &HeaderMap) {
    if !is_enabled() {
        return;
    }
    let parent = TraceContextPropagator::new().extract(&HeaderExtractor(headers));
    if parent.span().span_context().is_valid() {
        // Fails only without the export.
        let _ = span.set_parent(parent);
    }
}

/// Adds the present span to the headers of a request to another service.
pub fn inject(headers: &mut HeaderMap) {
    if is_enabled() {
        TraceContextPropagator::new()
            .inject_context(&Span::current().context(), &mut HeaderInjector(headers));
    }
}

/// Describes a request that has been answered. `route` is its template, because paths contain the ids of clients.
pub fn describe_response(span: &Span, method: &'static str, route: &str, status: u16) {
    if !is_enabled() {
        return;
    }
    span.set_attribute("http.request.method", method);
    span.set_attribute("http.route", route.to_owned());
    span.set_attribute("http.response.status_code", i64::from(status));
    if status >= 500 {
        span.set_status(Status::error(""));
    }
}
