//! The talk with models: what the service asks of them, and the errors it gets to see.
//!
//! [`Llm`] is all that the service knows. [`pool`] implements it: an ordered list of models, tried one after another
//! under one deadline. A [`model`] is called, and called again, through its queue ([`slots`]) and its [`breaker`]; an
//! answer loses its [`thoughts`] and must pass the [`gate`] before it counts. Behind a model stands a [`provider`]: the
//! built-in [`extractive`] summariser, or a [`remote`] server that speaks a dialect, such as [`openai`] or
//! [`anthropic`]. [`prompt`] has the words, [`error`] what each failure means.

use crate::domain::transcript::TranscriptEntry;
use async_trait::async_trait;
use std::fmt;
use std::ops::AddAssign;
use std::time::Duration;

pub mod check;
pub mod circuit_breaker;
mod concurrency_limit;
pub mod error;
pub mod extractive;
pub mod http;
mod metrics;
pub mod model;
pub mod pool;
pub mod prompt;
pub mod provider;
mod reasoning;
pub mod response_check;

pub use error::{Attempt, LlmError, ModelError, Rejection};

/// What a model is to do.
#[derive(Clone, Copy, Debug)]
pub enum Task<'a> {
    /// Summarise a part of the conversation in about `sentences` sentences.
    Consolidate {
        /// The messages, oldest first.
        entries: &'a [TranscriptEntry],
        /// How many sentences are asked for.
        sentences: usize,
    },
    /// Compress a summary that has grown too long to about `sentences` sentences.
    MetaConsolidate {
        /// The summary.
        summary: &'a str,
        /// How many sentences are asked for.
        sentences: usize,
    },
}

/// Tokens as the provider counted them; `None` where it did not say.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Tokens of prompts.
    pub input_tokens: Option<u64>,
    /// Tokens of answers.
    pub output_tokens: Option<u64>,
}

impl Usage {
    /// Prompt and answer together; `None` where nothing was said of either.
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

/// What one [`Llm::complete`] took: all of its calls, those that failed included.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    /// As far as providers said.
    pub usage: Usage,
    /// Tokens of prompts and answers together: of calls that were answered, counted by ourselves where the provider
    /// did not say. What a call cost that broke off nobody knows. The built-in model costs nothing.
    pub tokens: u64,
    /// Calls of models.
    pub calls: u32,
    /// How many of them failed.
    pub failures: u32,
    /// Time spent waiting for a turn.
    pub queued: Duration,
    /// From the question to its end.
    pub duration: Duration,
}

/// A summary that passed the gate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolResponse {
    /// The summary, trimmed, never empty.
    pub text: String,
    /// The name of the model in the settings, not the provider's name for it.
    pub model: String,
    /// Which prompts were used; changes whenever their wording does.
    pub prompt_version: String,
    /// What it took.
    pub cost: Cost,
}

/// The models, as the service sees them: named pools that do [`Task`]s.
#[async_trait]
pub trait Llm: Send + Sync + fmt::Debug {
    /// Has the pool do the task: within its deadline, by the first of its models whose answer passes the gate.
    /// Dropping the future ends the call.
    async fn complete(&self, pool: &str, task: Task<'_>) -> Result<PoolResponse, LlmError>;

    /// How many tokens of encoded entries ([`TranscriptEntry::encode`] and a line feed each) one [`Task::Consolidate`] may
    /// hold so that the whole prompt is within the input limit of *every* model of the pool: whichever of them is
    /// asked can answer. It shrinks when a model turns out to
    /// take less than its settings say: after [`LlmError::is_too_long`], smaller parts may pass.
    fn capacity(&self, pool: &str) -> usize;

    /// The longest that one [`Llm::complete`] of this pool can take.
    fn deadline(&self, pool: &str) -> Duration;
}
