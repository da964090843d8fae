//! Why no model brought a summary: every attempt with its cause, and what each cause means for the next attempt.
//!
//! The texts are for logs and for the state of a session: they hold no key and no text of a conversation.

use super::Cost;
use std::fmt;
use std::time::Duration;

/// One attempt with one model that brought no summary.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attempt {
    /// The name of the model in the settings.
    pub model: String,
    /// Why there is no summary of it.
    pub cause: ModelError,
    /// How long it took, without the wait for its turn.
    pub duration: Duration,
}

impl fmt::Display for Attempt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.model, self.cause)?;
        if self.cause.was_sent() { write!(f, " (after {:.1?})", self.duration) } else { Ok(()) }
    }
}

/// Why an attempt failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ModelError {
    /// No connection: refused, reset, unknown host, TLS.
    #[error("no connection: {0}")]
    Connection(String),
    /// Took longer than a timeout, or than what the deadline left of it.
    #[error("{0} within {1:.1?}")]
    Timeout(TimeoutPhase, Duration),
    /// An error status, or an error in the answer that says as much.
    #[error("status {status}: {message}")]
    Status {
        /// The HTTP status.
        status: u16,
        /// What the server said, shortened.
        message: String,
        /// How long the server wants to be left alone.
        retry_after: Option<Duration>,
    },
    /// The prompt is longer than the model takes.
    #[error("the prompt is too long for it: {0}")]
    PromptTooLong(String),
    /// Not the protocol, or an error object in the stream.
    #[error("unusable answer: {0}")]
    Protocol(String),
    /// The stream ended before the answer did.
    #[error("the answer broke off")]
    StreamTruncated,
    /// The gate refused the answer.
    #[error("answer refused: {0}")]
    Rejected(Rejection),
    /// The key, or another secret of its provider, can't be had.
    #[error("no key: {0}")]
    SecretUnavailable(String),
    /// Not called: it has failed too often of late, and is tried again after this time; zero: just now, by another call.
    #[error("not called: it keeps failing, and is tried again {}", soon(.0))]
    CircuitOpen(Duration),
    /// Not called: its server wants to be left alone for this time, and there is another model to ask.
    #[error("not called: its server wants to be left alone for {0:.1?}")]
    RetryLater(Duration),
    /// Not called: the prompt was too long for a model that takes no less.
    #[error("not called: it takes at most {0} tokens, too few for this prompt")]
    InputLimitTooSmall(usize),
    /// Not called: enough calls wait for their turn.
    #[error("not called: {0} calls wait for their turn already")]
    QueueFull(usize),
    /// Not called: its turn did not come.
    #[error("not called: no turn within {0:.1?}")]
    QueueTimeout(Duration),
}

fn soon(wait: &Duration) -> String {
    if wait.is_zero() { "just now, by another call".to_owned() } else { format!("in {wait:.1?}") }
}

/// What did not come in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TimeoutPhase {
    /// The first piece of the answer.
    #[error("no first token")]
    FirstToken,
    /// The next piece of the answer.
    #[error("nothing more")]
    NextToken,
    /// The end of the answer, within the model's own timeout.
    #[error("no complete answer")]
    Total,
    /// The end of the answer, within what the pool's deadline left.
    #[error("no complete answer, until the pool's deadline,")]
    Deadline,
}

impl ModelError {
    /// The word for it in metrics.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Connection(_) => "connection",
            Self::Timeout(..) => "timeout",
            Self::Status { status: 429, .. } => "rate_limited",
            Self::Status { status: 401 | 403, .. } => "unauthorized",
            Self::Status { status: 500.., .. } => "server_error",
            Self::Status { .. } => "rejected",
            Self::PromptTooLong(_) => "too_long",
            Self::Protocol(_) => "protocol",
            Self::StreamTruncated => "broken_off",
            Self::Rejected(_) => "refused",
            Self::SecretUnavailable(_) => "key",
            Self::CircuitOpen(_) => "breaker_open",
            Self::RetryLater(_) => "paused",
            Self::InputLimitTooSmall(_) => "too_small",
            Self::QueueFull(_) => "queue_full",
            Self::QueueTimeout(_) => "queue_timeout",
        }
    }

    /// All that [`ModelError::name`] can say.
    pub const NAMES: [&str; 16] = [
        "connection",
        "timeout",
        "rate_limited",
        "unauthorized",
        "server_error",
        "rejected",
        "too_long",
        "protocol",
        "broken_off",
        "refused",
        "key",
        "breaker_open",
        "paused",
        "too_small",
        "queue_full",
        "queue_timeout",
    ];

    /// Whether the model was called at all.
    #[must_use]
    pub fn was_sent(&self) -> bool {
        !matches!(
            self,
            Self::SecretUnavailable(_)
                | Self::CircuitOpen(_)
                | Self::RetryLater(_)
                | Self::InputLimitTooSmall(_)
                | Self::QueueFull(_)
                | Self::QueueTimeout(_)
        )
    }

    /// Whether the same call may well succeed a moment later. Not after a timeout: it has cost its time already, and
    /// the next model is there now.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Connection(_) | Self::StreamTruncated => true,
            Self::Status { status, .. } => matches!(status, 408 | 409 | 425 | 429 | 500..),
            _ => false,
        }
    }

    /// Whether it speaks against the model, so that its breaker should know. A prompt that it doesn't take and an
    /// answer that the gate refuses don't: they come with a conversation, and would close the model to all others.
    /// Nor does the end of the time that the pool had left for it, unless that was time enough.
    #[must_use]
    pub fn is_model_fault(&self) -> bool {
        match self {
            Self::Connection(_) | Self::Protocol(_) | Self::StreamTruncated => true,
            Self::Timeout(missing, _) => *missing != TimeoutPhase::Deadline,
            Self::Status { status, .. } => !matches!(status, 400 | 413 | 422),
            _ => false,
        }
    }
}

/// Why the gate refused an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Rejection {
    /// No text in it.
    #[error("empty")]
    Empty,
    /// Ended by the output limit.
    #[error("cut off at its output limit")]
    Truncated,
    /// Ended by the provider's filter, or by the model's own refusal.
    #[error("filtered")]
    Filtered,
    /// Just "none", "n/a" and the like.
    #[error("a bare \"none\"")]
    NonAnswer,
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
    /// What they took.
    pub cost: Cost,
}

impl LlmError {
    /// Whether a model found the prompt too long: a part of it may pass.
    #[must_use]
    pub fn is_too_long(&self) -> bool {
        self.attempts.iter().any(|attempt| matches!(attempt.cause, ModelError::PromptTooLong(_)))
    }
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
