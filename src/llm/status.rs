//! The state of pools and models, for the people who operate the service. It contains no URL, no key and no text of a provider.

use super::circuit_breaker::CircuitState;
use super::usage::CallTokens;
use std::time::Duration;
use time::OffsetDateTime;

pub use crate::config::Strategy;

/// All pools, and the models that they use, ordered by name.
#[derive(Clone, Debug, Default)]
pub struct LlmStatus {
    pub pools: Vec<PoolStatus>,
    pub models: Vec<ModelStatus>,
}

/// A pool.
#[derive(Clone, Debug)]
pub struct PoolStatus {
    pub name: String,
    /// The names of its models, in the order of the settings.
    pub models: Vec<String>,
    pub strategy: Strategy,
    /// Limits all attempts together.
    pub deadline: Duration,
}

/// The present state of a model.
#[derive(Clone, Debug)]
pub struct ModelStatus {
    /// Name of the model in the settings.
    pub name: String,
    /// Name of its provider in the settings.
    pub provider: String,
    /// The provider's name for it.
    pub model: String,
    /// `false` for the built-in summariser, which reads no prompt and costs nothing.
    pub is_prompted: bool,
    /// The prompt version that its summaries get.
    pub prompt_version: String,
    pub circuit: CircuitState,
    /// The time of the probe, while the circuit breaker is open.
    pub probe_at: Option<OffsetDateTime>,
    /// The end of the last `Retry-After`, if it is in the future.
    pub retry_not_before: Option<OffsetDateTime>,
    /// Number of call slots in use.
    pub calls: usize,
    pub max_calls: usize,
    pub queued: usize,
    pub max_queued: usize,
    /// Tokens of a prompt: the configured limit, or an observed one that is smaller.
    pub input_limit: usize,
    /// Tokens of a response.
    pub output_limit: usize,
    /// Prices of a million tokens.
    pub input_price: Option<f64>,
    pub output_price: Option<f64>,
    /// Time of the last response that the response check has accepted.
    pub last_success_at: Option<OffsetDateTime>,
    pub last_failure: Option<FailureStatus>,
    /// A warning, if the provider has rejected the API key or the name of the model since the last success.
    pub refusal: Option<String>,
}

/// The last failed attempt with a model. Attempts that were skipped because of an earlier failure do not count.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FailureStatus {
    pub at: OffsetDateTime,
    /// The text of the [`ModelError`](super::ModelError).
    pub reason: String,
}

impl ModelStatus {
    /// Returns the price of calls with these tokens, if both prices are known.
    #[must_use]
    pub fn cost(&self, input_tokens: usize, output_tokens: usize) -> Option<f64> {
        let tokens = CallTokens { input: input_tokens as u64, output: output_tokens as u64 };
        self.input_price.zip(self.output_price)?;
        tokens.price(self.input_price, self.output_price)
    }
}
