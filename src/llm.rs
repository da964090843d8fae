//! The talk with models: what the engine asks of them, and the errors it gets to see.
//!
//! [`Llm`] is all that the engine knows. [`pool`] implements it: an ordered list of models, each of a [`provider`],
//! tried one after another under one deadline, each answer examined by the [`gate`] before it counts. [`prompt`] has
//! the words. A new provider is a file with a [`provider::Provider`] in it, like [`openai`], and a line in `app`.

use crate::domain::transcript::Entry;
use async_trait::async_trait;
use std::fmt;
use std::time::Duration;

pub mod extractive;
pub mod gate;
pub mod openai;
pub mod pool;
pub mod prompt;
pub mod provider;

/// What a model is to do.
#[derive(Clone, Copy, Debug)]
pub enum Task<'a> {
    /// Summarise a part of the conversation in about `sentences` sentences.
    Consolidate {
        /// The messages, oldest first.
        entries: &'a [Entry],
        /// How many sentences are asked for.
        sentences: usize,
    },
    /// Compress a summary that has grown too long to about `sentences` sentences.
    Meta {
        /// The summary.
        summary: &'a str,
        /// How many sentences are asked for.
        sentences: usize,
    },
}

/// Tokens as the provider counted them; `None` where it did not say.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Tokens of the prompt.
    pub input_tokens: Option<u64>,
    /// Tokens of the answer.
    pub output_tokens: Option<u64>,
}

/// A summary that passed the gate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// The summary, trimmed, never empty.
    pub text: String,
    /// The name of the model in the settings, not the provider's name for it.
    pub model: String,
    /// Which prompts were used; changes whenever their wording does.
    pub prompt_version: String,
    /// Of the attempt that succeeded.
    pub usage: Usage,
    /// From the first attempt to the answer.
    pub duration: Duration,
}

/// One call of one model that brought no summary.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attempt {
    /// The name of the model in the settings.
    pub model: String,
    /// Why there is no summary of it.
    pub cause: Cause,
    /// How long it took.
    pub duration: Duration,
}

impl fmt::Display for Attempt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {} (after {:?})", self.model, self.cause, self.duration)
    }
}

/// Why an attempt failed. The texts are for logs: they hold no key and no text of a conversation.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Cause {
    /// No connection: refused, reset, unknown host, TLS.
    #[error("no connection: {0}")]
    Connection(String),
    /// Took longer than its timeout, or than what the deadline left of it.
    #[error("no complete answer within {0:?}")]
    Timeout(Duration),
    /// An error status; the text is the beginning of the server's own message.
    #[error("status {status}: {message}")]
    Status {
        /// The HTTP status.
        status: u16,
        /// What the server said, shortened.
        message: String,
    },
    /// Not the protocol, or an error object in the stream.
    #[error("unusable answer: {0}")]
    Protocol(String),
    /// The stream ended before the answer did.
    #[error("the answer broke off")]
    BrokenOff,
    /// The gate refused the answer.
    #[error("answer refused: {0}")]
    Refused(Refusal),
}

/// Why the gate refused an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// No text in it.
    #[error("empty")]
    Empty,
    /// Ended by the output limit.
    #[error("cut off at its output limit")]
    CutOff,
    /// Ended by the provider's filter, or by the model's own refusal.
    #[error("filtered")]
    Filtered,
    /// Just "none", "n/a" and the like.
    #[error("a bare \"none\"")]
    BareNone,
    /// A compression that is not shorter than what it compresses.
    #[error("not shorter than its input")]
    NotShorter,
}

/// No model of the pool brought a summary.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LlmError {
    /// The pool that was asked.
    pub pool: String,
    /// Every attempt, in order; empty where the deadline left no time for one.
    pub attempts: Vec<Attempt>,
}

impl fmt::Display for LlmError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "no model of pool \"{}\" brought a summary", self.pool)?;
        for (index, attempt) in self.attempts.iter().enumerate() {
            let separator = if index == 0 { ": " } else { "; " };
            write!(f, "{separator}{attempt}")?;
        }
        Ok(())
    }
}

impl std::error::Error for LlmError {}

/// The models, as the engine sees them: named pools that do [`Task`]s.
#[async_trait]
pub trait Llm: Send + Sync + fmt::Debug {
    /// Has the pool do the task: within its deadline, by the first of its models whose answer passes the gate.
    /// Dropping the future ends the call.
    async fn ask(&self, pool: &str, task: Task<'_>) -> Result<Answer, LlmError>;

    /// How many tokens of encoded entries ([`Entry::encode`] and a line feed each) one [`Task::Consolidate`] may
    /// hold so that the whole prompt is within the input limit of *every* model of the pool: whichever of them is
    /// asked can answer.
    fn capacity(&self, pool: &str) -> usize;

    /// The longest that one [`Llm::ask`] of this pool can take.
    fn deadline(&self, pool: &str) -> Duration;
}
