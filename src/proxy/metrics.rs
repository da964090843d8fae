//! Metrics of the proxy. They belong to the recorder that is installed when they are created.

use metrics::{Counter, Histogram, Unit, counter, describe_counter, describe_histogram, histogram};

const REQUESTS: &str = "precis_proxy_requests_total";
const ERRORS: &str = "precis_proxy_upstream_errors_total";
const DELAY: &str = "precis_proxy_delay_seconds";

/// The metrics of an upstream.
#[derive(Debug)]
pub(super) struct UpstreamMetrics {
    pub(super) requests_with_memory: Counter,
    pub(super) requests_without_memory: Counter,
    /// Responses with an error, and requests without a response.
    pub(super) errors: Counter,
    /// Seconds from a request to its forwarding, of all upstreams.
    pub(super) delay: Histogram,
}

impl UpstreamMetrics {
    pub(super) fn new(upstream: &'static str) -> Self {
        describe_counter!(REQUESTS, "Requests sent to an upstream, by the use of the memory");
        describe_counter!(ERRORS, "Upstream responses with an error, and upstreams that do not answer");
        describe_histogram!(
            DELAY,
            Unit::Seconds,
            "Time from a request to its forwarding: the delay by precis"
        );
        let requests = |memory| counter!(REQUESTS, "upstream" => upstream, "memory" => memory);
        Self {
            requests_with_memory: requests("on"),
            requests_without_memory: requests("off"),
            errors: counter!(ERRORS, "upstream" => upstream),
            delay: histogram!(DELAY),
        }
    }
}
