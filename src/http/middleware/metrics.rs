//! What is measured of requests, and what the log says of those that are refused for there being too many: one line a
//! second, since a line for each would cost more than the refusal.

use crate::http::error::Beyond;
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
const REFUSED: &str = "precis_requests_refused_total";

/// The route of what has none.
const NO_ROUTE: &str = "none";

/// For how long refusals are put together.
const SUMMED_UP: Duration = Duration::from_secs(1);

/// The meters of the interface. They belong to the recorder, so that each service of a process has its own.
#[derive(Clone)]
pub struct Meters {
    recorder: Arc<dyn Recorder + Send + Sync>,
    /// Refusals by limit that the log has not told of yet.
    untold: Arc<Mutex<BTreeMap<&'static str, u64>>>,
}

/// A recorder has none.
impl fmt::Debug for Meters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Meters").field("untold", &self.untold).finish_non_exhaustive()
    }
}

impl Meters {
    /// Of this recorder.
    pub fn new(recorder: Arc<dyn Recorder + Send + Sync>) -> Self {
        metrics::with_local_recorder(&*recorder, || {
            describe_counter!(REQUESTS, "Requests that were answered, by route, method and status");
            describe_histogram!(
                DURATION,
                Unit::Seconds,
                "From the head of a request to the head of its answer"
            );
            describe_counter!(REFUSED, "Requests that were refused, by the limit that they went beyond");
        });
        Self { recorder, untold: Arc::default() }
    }

    fn answered(&self, route: &str, method: &'static str, response: &Response, took: Duration) {
        let status = response.status().as_str().to_owned();
        let beyond = response.extensions().get::<Beyond>().copied();
        metrics::with_local_recorder(&*self.recorder, || {
            histogram!(DURATION, "route" => route.to_owned(), "method" => method).record(took);
            counter!(REQUESTS, "route" => route.to_owned(), "method" => method, "status" => status)
                .increment(1);
            if let Some(beyond) = beyond {
                counter!(REFUSED, "limit" => beyond.limit).increment(1);
            }
        });
        if let Some(Beyond { limit, overload: true }) = beyond {
            self.tell_soon(limit);
        }
    }

    /// The first refusal after a while sees to it that they are told.
    fn tell_soon(&self, limit: &'static str) {
        let mut untold = self.untold.lock().unwrap_or_else(PoisonError::into_inner);
        let first = untold.is_empty();
        *untold.entry(limit).or_default() += 1;
        drop(untold);
        if first {
            let untold = Arc::clone(&self.untold);
            tokio::spawn(async move {
                tokio::time::sleep(SUMMED_UP).await;
                let told = std::mem::take(&mut *untold.lock().unwrap_or_else(PoisonError::into_inner));
                for (limit, requests) in told {
                    tracing::warn!(limit, requests, "overloaded: requests were refused");
                }
            });
        }
    }
}

/// Measures a request. One whose client goes away before its answer is not counted.
pub(crate) async fn layer(State(meters): State<Meters>, request: Request, next: Next) -> Response {
    // The template: an id would make a series of each session, and is nobody's business.
    let route = request.extensions().get::<MatchedPath>().cloned();
    let method = method(request.method());
    let began = Instant::now();
    let response = next.run(request).await;
    let route = route.as_ref().map_or(NO_ROUTE, MatchedPath::as_str);
    meters.answered(route, method, &response, began.elapsed());
    response
}

/// A method to be shown: a client may make up methods of its own.
pub(crate) fn method(method: &Method) -> &'static str {
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
