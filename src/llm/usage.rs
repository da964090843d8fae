//! Token usage and cost of model calls.

use std::ops::AddAssign;
use std::time::Duration;

/// Tokens as counted by the provider; `None` if the provider did not report them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    pub input_tokens: Option<u64>,
    pub output_tokens: Option<u64>,
}

impl Usage {
    /// Returns the sum of input and output tokens, or `None` if the provider reported neither.
    #[must_use]
    pub fn total(&self) -> Option<u64> {
        match (self.input_tokens, self.output_tokens) {
            (None, None) => None,
            (input, output) => Some(input.unwrap_or_default().saturating_add(output.unwrap_or_default())),
        }
    }
}

impl AddAssign for Usage {
    fn add_assign(&mut self, other: Self) {
        let add = |a: Option<u64>, b: Option<u64>| match (a, b) {
            (Some(a), Some(b)) => Some(a.saturating_add(b)),
            (a, b) => a.or(b),
        };
        self.input_tokens = add(self.input_tokens, other.input_tokens);
        self.output_tokens = add(self.output_tokens, other.output_tokens);
    }
}

/// The cost of one [`Llm::complete`](super::Llm::complete): the sum over all of its calls, including the failed ones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    /// Tokens as reported by the providers.
    pub usage: Usage,
    /// Prompt and completion tokens of all completed calls. Our own count is used if the provider reports none. The
    /// cost of an aborted call is unknown and not included. The built-in model costs nothing.
    pub tokens: u64,
    pub calls: u32,
    /// Number of failed calls; they are included in `calls`.
    pub failures: u32,
    /// Time spent in the queues of the models.
    pub queued: Duration,
    /// Total time of the request.
    pub duration: Duration,
}
