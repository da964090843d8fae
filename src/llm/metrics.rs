//! What is measured of each model. A meter belongs to the recorder that is in force where it is made, so that each
//! service of a process has its own.

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

/// One model's meters.
pub(super) struct ModelMetrics {
    /// Calls that have ended.
    pub(super) calls: Counter,
    failures: Vec<(&'static str, Counter)>,
    input_tokens: Counter,
    output_tokens: Counter,
    /// Seconds of a call, however it ended.
    pub(super) duration: Histogram,
    /// Seconds to the first piece of an answer.
    pub(super) first_token: Histogram,
    /// Seconds that a call waited for its turn.
    pub(super) queued: Histogram,
    /// Calls under way.
    pub(super) in_flight: Gauge,
    /// Calls that wait for their turn.
    pub(super) waiting: Gauge,
    breaker: Gauge,
}

impl ModelMetrics {
    pub(super) fn new(model: &str) -> Self {
        describe();
        let model = model.to_owned();
        let tokens = |direction| counter!(TOKENS, "model" => model.clone(), "direction" => direction);
        let failures = ModelError::NAMES
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

    pub(super) fn failed(&self, cause: &ModelError) {
        let name = cause.name();
        if let Some((_, counter)) = self.failures.iter().find(|(known, _)| *known == name) {
            counter.increment(1);
        }
    }

    pub(super) fn used(&self, usage: &Usage) {
        self.input_tokens.increment(usage.input_tokens.unwrap_or_default());
        self.output_tokens.increment(usage.output_tokens.unwrap_or_default());
    }

    pub(super) fn breaker(&self, state: CircuitState) {
        self.breaker.set(match state {
            CircuitState::Closed => 0.0,
            CircuitState::HalfOpen => 1.0,
            CircuitState::Open => 2.0,
        });
    }
}

/// `Debug` of a model must not fail for want of one of these.
impl std::fmt::Debug for ModelMetrics {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ModelMetrics").finish_non_exhaustive()
    }
}

fn describe() {
    describe_counter!(CALLS, "Calls of a model that have ended, however they did");
    describe_counter!(
        FAILURES,
        "Attempts with a model that brought no summary, by cause; some causes come without a call"
    );
    describe_counter!(TOKENS, "Tokens of prompts (input) and answers (output), as the provider counts them");
    describe_histogram!(DURATION, Unit::Seconds, "From a call to the end of its answer, or to its failure");
    describe_histogram!(FIRST_TOKEN, Unit::Seconds, "From a call to the first piece of its answer");
    describe_histogram!(QUEUED, Unit::Seconds, "How long a call waited for its turn");
    describe_gauge!(IN_FLIGHT, "Calls under way");
    describe_gauge!(WAITING, "Calls that wait for their turn");
    describe_gauge!(BREAKER, "0: calls are made, 1: one call probes, 2: the model is skipped");
}
