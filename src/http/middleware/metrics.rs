//! What is measured of requests, and what the log says of those that are refused for there being too many: one line a
//! second, since a line for each would cost more than the refusal.

use crate::http::error::ExceededLimit;
use axum::extract::{MatchedPath, Request, State};
use axum::http::Method;
use axum::middleware::Next;
use axum::response::Response;
use metrics::{Recorder, Unit, counter, describe_counter, describe_histogram, histogram};
use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

const REQUESTS: &str = "precis_http_requests_total";
const DURATION: &str = "precis_http_request_duration_seconds";
const REJECTED: &str = "precis_requests_rejected_total";

/// The route of what has none.
const NO_ROUTE: &str = "none";

/// For how long responses are put together.
const LOG_INTERVAL: Duration = Duration::from_secs(1);

/// The meters of the interface. They belong to the recorder, so that each service of a process has its own.
#[derive(Clone)]
pub struct HttpMetrics {
    recorder: Arc<dyn Recorder + Send + Sync>,
    /// Refusals by limit that the log has not told of yet.
    unreported: Arc<Mutex<BTreeMap<&'static str, u64>>>,
}

/// A recorder has none.
impl fmt::Debug for HttpMetrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HttpMetrics").field("unreported", &self.unreported).finish_non_exhaustive()
    }
}

impl HttpMetrics {
    /// Of this recorder.
    pub fn new(recorder: Arc<dyn Recorder + Send + Sync>) -> Self {
        metrics::with_local_recorder(&*recorder, || {
            describe_counter!(REQUESTS, "Requests that were answered, by route, method and status");
            describe_histogram!(
                DURATION,
                Unit::Seconds,
                "From the head of a request to the head of its answer"
            );
            describe_counter!(REJECTED, "Requests that were refused, by the limit that they went beyond");
        });
        Self { recorder, unreported: Arc::default() }
    }

    fn record(&self, route: &str, method: &'static str, response: &Response, took: Duration) {
        let status = response.status().as_str().to_owned();
        let exceeded = response.extensions().get::<ExceededLimit>().copied();
        metrics::with_local_recorder(&*self.recorder, || {
            histogram!(DURATION, "route" => route.to_owned(), "method" => method).record(took);
            counter!(REQUESTS, "route" => route.to_owned(), "method" => method, "status" => status)
                .increment(1);
            if let Some(exceeded) = exceeded {
                counter!(REJECTED, "limit" => exceeded.limit).increment(1);
            }
        });
        if let Some(ExceededLimit { limit, is_overload: true }) = exceeded {
            self.log_throttled(limit);
        }
    }

    /// The first refusal after a while sees to it that they are told.
    fn log_throttled(&self, limit: &'static str) {
        let mut unreported = self.unreported.lock().unwrap_or_else(PoisonError::into_inner);
        let first = unreported.is_empty();
        *unreported.entry(limit).or_default() += 1;
        drop(unreported);
        if first {
            let unreported = Arc::clone(&self.unreported);
            tokio::spawn(async move {
                tokio::time::sleep(LOG_INTERVAL).await;
                let unreported =
                    std::mem::take(&mut *unreported.lock().unwrap_or_else(PoisonError::into_inner));
                for (limit, requests) in unreported {
                    tracing::warn!(limit, requests, "overloaded: requests were refused");
                }
            });
        }
    }
}

/// Measures a request. One whose client goes away before its answer is not counted.
pub(crate) async fn record_request(
    State(metrics): State<HttpMetrics>,
    request: Request,
    next: Next,
) -> Response {
    // The template: an id would make a series of each session, and is nobody's business.
    let route = request.extensions().get::<MatchedPath>().cloned();
    let method = method_label(request.method());
    let began = Instant::now();
    let response = next.run(request).await;
    let route = route.as_ref().map_or(NO_ROUTE, MatchedPath::as_str);
    metrics.record(route, method, &response, began.elapsed());
    response
}

/// A method to be shown: a client may make up methods of its own.
pub(crate) fn method_label(method: &Method) -> &'static str {
    match *method {
        Method::GET => "GET",
        Method::HEAD => "HEAD",
        Method::POST => "POST",
        Method::PUT => "PUT",
        Method::PATCH => "PATCH",
        Method::DELETE => "DELETE",
        Method::OPTIONS => "OPTIONS",
        _ => "other",
    }
}
