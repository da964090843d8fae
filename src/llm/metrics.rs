//! Metrics of each model. They belong to the recorder that is installed when they are created, so that several services
//! in one process (in tests) have separate metrics.

use super::circuit_breaker::CircuitState;
use super::{ModelError, Usage};
use metrics::{Counter, Gauge, Histogram, Unit, counter, gauge, histogram};
use metrics::{describe_counter, describe_gauge, describe_histogram};

const CALLS: &str = "precis_llm_calls_total";
const FAILURES: &str = "precis_llm_failures_total";
const TOKENS: &str = "precis_llm_tokens_total";
const DURATION: &str = "precis_llm_call_duration_seconds";
const FIRST_TOKEN: &str = "precis_llm_time_to_first_token_seconds";
const QUEUED: &str = "precis_llm_queue_duration_seconds";
const IN_FLIGHT: &str = "precis_llm_calls_in_flight";
const WAITING: &str = "precis_llm_calls_waiting";
const BREAKER: &str = "precis_llm_breaker_state";

/// The metrics of one model.
#[derive(Debug)]
pub(super) struct ModelMetrics {
    /// Number of ended calls.
    pub(super) calls: Counter,
    failures: Vec<(&'static str, Counter)>,
    input_tokens: Counter,
    output_tokens: Counter,
    /// Duration of all calls, successful or not.
    pub(super) duration: Histogram,
    pub(super) first_token: Histogram,
    /// Time that a call waited in the queue.
    pub(super) queued: Histogram,
    pub(super) in_flight: Gauge,
    /// Number of queued calls.
    pub(super) waiting: Gauge,
    breaker: Gauge,
}

impl ModelMetrics {
    pub(super) fn new(model: &str) -> Self {
        describe();
        let model = model.to_owned();
        let tokens = |direction| counter!(TOKENS, "model" => model.clone(), "direction" => direction);
        let failures = ModelError::LABELS
            .map(|cause| (cause, counter!(FAILURES, "model" => model.clone(), "cause" => cause)))
            .to_vec();
        Self {
            calls: counter!(CALLS, "model" => model.clone()),
            failures,
            input_tokens: tokens("input"),
            output_tokens: tokens("output"),
            duration: histogram!(DURATION, "model" => model.clone()),
            first_token: histogram!(FIRST_TOKEN, "model" => model.clone()),
            queued: histogram!(QUEUED, "model" => model.clone()),
            in_flight: gauge!(IN_FLIGHT, "model" => model.clone()),
            waiting: gauge!(WAITING, "model" => model.clone()),
            breaker: gauge!(BREAKER, "model" => model),
        }
    }

    pub(super) fn record_failure(&self, error: &ModelError) {
        let label = error.label();
        if let Some((_, counter)) = self.failures.iter().find(|(known, _)| *known == label) {
            counter.increment(1);
        }
    }

    pub(super) fn record_usage(&self, usage: &Usage) {
        self.input_tokens.increment(usage.input_tokens.unwrap_or_default());
        self.output_tokens.increment(usage.output_tokens.unwrap_or_default());
    }

    pub(super) fn set_circuit_state(&self, state: CircuitState) {
        self.breaker.set(match state {
            CircuitState::Closed => 0.0,
            CircuitState::HalfOpen => 1.0,
            CircuitState::Open => 2.0,
        });
    }
}

/// Increments a gauge and decrements it again when dropped.
pub(super) struct GaugeGuard<'a>(&'a Gauge);

impl<'a> GaugeGuard<'a> {
    pub(super) fn increment(gauge: &'a Gauge) -> Self {
        gauge.increment(1);
        Self(gauge)
    }
}

impl Drop for GaugeGuard<'_> {
    fn drop(&mut self) {
        self.0.decrement(1);
    }
}

fn describe() {
    describe_counter!(CALLS, "Ended calls of a model, successful or not");
    describe_counter!(
        FAILURES,
        "Failed or skipped attempts with a model, by cause; skipped attempts are not calls"
    );
    describe_counter!(
        TOKENS,
        "Tokens of prompts (input) and completions (output), as reported by the provider"
    );
    describe_histogram!(DURATION, Unit::Seconds, "Duration of a call, successful or not");
    describe_histogram!(FIRST_TOKEN, Unit::Seconds, "Time from a call to its first token");
    describe_histogram!(QUEUED, Unit::Seconds, "Time that a call waited in the queue of its model");
    describe_gauge!(IN_FLIGHT, "Running calls");
    describe_gauge!(WAITING, "Queued calls");
    describe_gauge!(
        BREAKER,
        "State of the circuit breaker: 0 closed, 1 half-open (one call probes the model), 2 open (skipped)"
    );
}
