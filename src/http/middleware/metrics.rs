//! HTTP metrics, and a throttled log of requests that were rejected under overload: one line per second and limit,
//! because a line for each rejection would cost more than the rejection.

use crate::capacity::Capacity;
use crate::http::error::ExceededLimit;
use axum::extract::{MatchedPath, Request};
use axum::http::Method;
use axum::response::Response;
use metrics::{Recorder, Unit, counter, gauge, histogram};
use metrics::{describe_counter, describe_gauge, describe_histogram};
use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

const REQUESTS: &str = "precis_http_requests_total";
pub const REQUEST_DURATION: &str = "precis_http_request_duration_seconds";
const REJECTED: &str = "precis_requests_rejected_total";
const IN_FLIGHT: &str = "precis_http_requests_in_flight";
const RUNNING: &str = "precis_http_requests_running";
const BYTES: &str = "precis_http_bytes_in_flight";

/// The label `route` of requests that match no route.
const NO_ROUTE: &str = "none";

/// Rejections are collected for this long before they are logged.
const LOG_INTERVAL: Duration = Duration::from_secs(1);

/// The metrics of the HTTP layer. They belong to a recorder, so that each service of a process has its own.
#[derive(Clone)]
pub struct HttpMetrics {
    recorder: Arc<dyn Recorder + Send + Sync>,
    process: Arc<metrics_process::Collector>,
    /// Numbers of rejections by limit that are not logged yet.
    unreported: Arc<Mutex<BTreeMap<&'static str, u64>>>,
}

/// Recorders do not implement `Debug`.
impl fmt::Debug for HttpMetrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HttpMetrics").field("unreported", &self.unreported).finish_non_exhaustive()
    }
}

impl HttpMetrics {
    /// Creates the metrics of this recorder and describes them there.
    pub fn new(recorder: Arc<dyn Recorder + Send + Sync>) -> Self {
        let process = Arc::new(metrics_process::Collector::default());
        metrics::with_local_recorder(&*recorder, || {
            process.describe();
            describe_counter!(REQUESTS, "Answered requests by route, method and status");
            describe_histogram!(
                REQUEST_DURATION,
                Unit::Seconds,
                "Time from the head of a request to the head of its response"
            );
            describe_counter!(REJECTED, "Rejected requests by the limit that they exceeded");
            describe_gauge!(IN_FLIGHT, "Requests in the service, running and queued");
            describe_gauge!(RUNNING, "Requests that hold a work permit");
            describe_gauge!(
                BYTES,
                Unit::Bytes,
                "Memory of requests in flight, of limits.max_bytes_in_flight"
            );
        });
        Self { recorder, process, unreported: Arc::default() }
    }

    /// Sets the metrics of the process: memory, CPU time, open files, threads.
    pub(crate) fn collect_process_metrics(&self) {
        metrics::with_local_recorder(&*self.recorder, || self.process.collect());
    }

    /// Sets the gauges of the load.
    #[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
    pub(crate) fn set_load(&self, capacity: &Capacity) {
        metrics::with_local_recorder(&*self.recorder, || {
            gauge!(IN_FLIGHT).set(capacity.in_flight.in_use() as f64);
            gauge!(RUNNING).set(capacity.running.in_use() as f64);
            gauge!(BYTES, "part" => "bodies").set((capacity.bodies.in_use() * 1024) as f64);
            gauge!(BYTES, "part" => "work").set((capacity.memory.in_use() * 1024) as f64);
        });
    }

    /// Starts the measurement of a request.
    pub(crate) fn start(request: &Request) -> Measurement {
        // The template of the path: ids would make a time series per session, and are private.
        let route = request.extensions().get::<MatchedPath>().cloned();
        Measurement { route, method: method_label(request.method()), started_at: Instant::now() }
    }

    /// Records a request. A request whose client disconnects before the response is not recorded.
    pub(crate) fn record(&self, measurement: &Measurement, response: &Response) {
        let status = response.status();
        let route = measurement.route.as_ref().map_or(NO_ROUTE, MatchedPath::as_str);
        let (method, exceeded) = (measurement.method, response.extensions().get::<ExceededLimit>());
        metrics::with_local_recorder(&*self.recorder, || {
            let (route, status) = (route.to_owned(), status.as_str().to_owned());
            histogram!(REQUEST_DURATION, "route" => route.clone(), "method" => method)
                .record(measurement.started_at.elapsed());
            counter!(REQUESTS, "route" => route, "method" => method, "status" => status).increment(1);
            if let Some(exceeded) = exceeded {
                counter!(REJECTED, "limit" => exceeded.limit).increment(1);
            }
        });
        if let Some(ExceededLimit { limit, is_overload: true }) = exceeded {
            self.log_throttled(limit);
        }
    }

    /// Counts a rejection. The first one after a pause starts a task that logs all of them after the interval.
    fn log_throttled(&self, limit: &'static str) {
        let mut unreported = self.unreported.lock().unwrap_or_else(PoisonError::into_inner);
        let is_first = unreported.is_empty();
        *unreported.entry(limit).or_default() += 1;
        drop(unreported);
        if is_first {
            let unreported = Arc::clone(&self.unreported);
            tokio::spawn(async move {
                tokio::time::sleep(LOG_INTERVAL).await;
                let rejected =
                    std::mem::take(&mut *unreported.lock().unwrap_or_else(PoisonError::into_inner));
                for (limit, requests) in rejected {
                    tracing::warn!(limit, requests, "overloaded: requests were rejected");
                }
            });
        }
    }
}

/// A request that is being measured.
pub(crate) struct Measurement {
    route: Option<MatchedPath>,
    method: &'static str,
    started_at: Instant,
}

/// Returns the method as a label. Clients may invent methods; all of those have the label `other`.
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
