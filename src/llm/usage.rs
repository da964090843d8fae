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
        self.call_tokens().map(CallTokens::total)
    }

    /// Returns input and output tokens, or `None` if the provider reported neither.
    #[must_use]
    pub fn call_tokens(&self) -> Option<CallTokens> {
        match (self.input_tokens, self.output_tokens) {
            (None, None) => None,
            (input, output) => {
                Some(CallTokens { input: input.unwrap_or_default(), output: output.unwrap_or_default() })
            }
        }
    }
}

/// Tokens of one completed call. They are as reported by the provider, or our own count if it reports none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CallTokens {
    pub input: u64,
    pub output: u64,
}

impl CallTokens {
    #[must_use]
    pub fn total(self) -> u64 {
        self.input.saturating_add(self.output)
    }

    /// Returns the price of the tokens, given the prices of a million tokens. Without both prices, it is known only if there are
    /// no tokens, as for the built-in model.
    #[must_use]
    pub fn price(self, input_price: Option<f64>, output_price: Option<f64>) -> Option<f64> {
        let of = |tokens: u64, price: f64| f64::from(u32::try_from(tokens).unwrap_or(u32::MAX)) * price / 1e6;
        match input_price.zip(output_price) {
            Some((input, output)) => Some(of(self.input, input) + of(self.output, output)),
            None => (self == Self::default()).then_some(0.0),
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
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cost {
    /// Tokens as reported by the providers.
    pub usage: Usage,
    /// Prompt and completion tokens of all completed calls. Our own count is used if the provider reports none. The
    /// cost of an aborted call is unknown and not included. The built-in model costs nothing.
    pub tokens: u64,
    /// The price of these tokens, by the prices in the settings; `None` if a model without prices used some of them.
    pub price: Option<f64>,
    pub calls: u32,
    /// Number of failed calls; they are included in `calls`.
    pub failures: u32,
    /// Time spent in the queues of the models.
    pub queued: Duration,
    /// Total time of the request.
    pub duration: Duration,
}

impl Default for Cost {
    fn default() -> Self {
        Self {
            usage: Usage::default(),
            tokens: 0,
            price: Some(0.0),
            calls: 0,
            failures: 0,
            queued: Duration::ZERO,
            duration: Duration::ZERO,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn price_is_unknown_without_both_prices() {
        let tokens = CallTokens { input: 2_000_000, output: 500_000 };
        assert_eq!(tokens.price(Some(0.25), Some(2.0)), Some(1.5));
        assert_eq!(tokens.price(Some(0.0), Some(0.0)), Some(0.0));
        assert_eq!(tokens.price(Some(0.25), None), None);
        assert_eq!(tokens.price(None, Some(2.0)), None);
        assert_eq!(CallTokens::default().price(None, None), Some(0.0));
    }
}
