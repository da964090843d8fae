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
    pub cause: Cause,
    /// How long it took, without the wait for its turn.
    pub duration: Duration,
}

impl fmt::Display for Attempt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.model, self.cause)?;
        if self.cause.was_called() { write!(f, " (after {:.1?})", self.duration) } else { Ok(()) }
    }
}

/// Why an attempt failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Cause {
    /// No connection: refused, reset, unknown host, TLS.
    #[error("no connection: {0}")]
    Connection(String),
    /// Took longer than a timeout, or than what the deadline left of it.
    #[error("{0} within {1:.1?}")]
    Timeout(Missing, Duration),
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
    TooLong(String),
    /// Not the protocol, or an error object in the stream.
    #[error("unusable answer: {0}")]
    Protocol(String),
    /// The stream ended before the answer did.
    #[error("the answer broke off")]
    BrokenOff,
    /// The gate refused the answer.
    #[error("answer refused: {0}")]
    Refused(Refusal),
    /// The key, or another secret of its provider, can't be had.
    #[error("no key: {0}")]
    Key(String),
    /// Not called: it has failed too often of late, and is tried again after this time; zero: just now, by another call.
    #[error("not called: it keeps failing, and is tried again {}", soon(.0))]
    BreakerOpen(Duration),
    /// Not called: its server wants to be left alone for this time, and there is another model to ask.
    #[error("not called: its server wants to be left alone for {0:.1?}")]
    Paused(Duration),
    /// Not called: the prompt was too long for a model that takes no less.
    #[error("not called: it takes at most {0} tokens, too few for this prompt")]
    TooSmall(usize),
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
pub enum Missing {
    /// The first piece of the answer.
    #[error("no first token")]
    FirstToken,
    /// The next piece of the answer.
    #[error("nothing more")]
    NextToken,
    /// The end of the answer, within the model's own timeout.
    #[error("no complete answer")]
    End,
    /// The end of the answer, within what the pool's deadline left.
    #[error("no complete answer, until the pool's deadline,")]
    EndByDeadline,
}

impl Cause {
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
            Self::TooLong(_) => "too_long",
            Self::Protocol(_) => "protocol",
            Self::BrokenOff => "broken_off",
            Self::Refused(_) => "refused",
            Self::Key(_) => "key",
            Self::BreakerOpen(_) => "breaker_open",
            Self::Paused(_) => "paused",
            Self::TooSmall(_) => "too_small",
            Self::QueueFull(_) => "queue_full",
            Self::QueueTimeout(_) => "queue_timeout",
        }
    }

    /// All that [`Cause::name`] can say.
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
    pub fn was_called(&self) -> bool {
        !matches!(
            self,
            Self::Key(_)
                | Self::BreakerOpen(_)
                | Self::Paused(_)
                | Self::TooSmall(_)
                | Self::QueueFull(_)
                | Self::QueueTimeout(_)
        )
    }

    /// Whether the same call may well succeed a moment later. Not after a timeout: it has cost its time already, and
    /// the next model is there now.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Connection(_) | Self::BrokenOff => true,
            Self::Status { status, .. } => matches!(status, 408 | 409 | 425 | 429 | 500..),
            _ => false,
        }
    }

    /// Whether it speaks against the model, so that its breaker should know. A prompt that it doesn't take and an
    /// answer that the gate refuses don't: they come with a conversation, and would close the model to all others.
    /// Nor does the end of the time that the pool had left for it, unless that was time enough.
    #[must_use]
    pub fn speaks_against_model(&self) -> bool {
        match self {
            Self::Connection(_) | Self::Protocol(_) | Self::BrokenOff => true,
            Self::Timeout(missing, _) => *missing != Missing::EndByDeadline,
            Self::Status { status, .. } => !matches!(status, 400 | 413 | 422),
            _ => false,
        }
    }
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
    /// What they took.
    pub cost: Cost,
}

impl LlmError {
    /// Whether a model found the prompt too long: a part of it may pass.
    #[must_use]
    pub fn is_too_long(&self) -> bool {
        self.attempts.iter().any(|attempt| matches!(attempt.cause, Cause::TooLong(_)))
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
