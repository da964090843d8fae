//! Errors of models and pools, and the consequence of each error: retry, next model, circuit breaker.
//!
//! The error texts are written to logs and to the state of a session. They contain no text of a provider, because a
//! provider may quote keys and messages.

use super::Cost;
use std::fmt;
use std::time::Duration;

/// A failed or skipped attempt with one model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attempt {
    /// Name of the model in the settings.
    pub model: String,
    pub error: ModelError,
    /// Duration of the call, without the time in the queue.
    pub duration: Duration,
}

impl fmt::Display for Attempt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.model, self.error)?;
        if self.error.was_sent() { write!(f, " (after {:.1?})", self.duration) } else { Ok(()) }
    }
}

/// The reason for a failed or skipped attempt.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ModelError {
    /// Connection refused or reset, unknown host, TLS error.
    #[error("connection failed: {0}")]
    Connection(String),
    /// The duration is the timeout that expired, or the part of it that the pool's deadline allowed.
    #[error("timeout: {0} within {1:.1?}")]
    Timeout(TimeoutPhase, Duration),
    /// An HTTP error status, or an error object in a response that corresponds to one.
    #[error("status {status}{}: {problem}", code.map(|code| format!(" ({code})")).unwrap_or_default())]
    Status {
        status: u16,
        /// The provider's code or type of the error, if it is a well-known one.
        code: Option<&'static str>,
        problem: &'static str,
        retry_after: Option<Duration>,
    },
    #[error("the prompt is too long for the model")]
    PromptTooLong,
    /// The response violates the protocol, or its stream contains an unknown error object.
    #[error("invalid response: {0}")]
    Protocol(&'static str),
    /// The stream ended before the completion did.
    #[error("the response stream was truncated")]
    StreamTruncated,
    /// The response check rejected the completion.
    #[error("response rejected: {0}")]
    Rejected(Rejection),
    /// The API key or another secret of the provider is unavailable.
    #[error("secret unavailable: {0}")]
    SecretUnavailable(String),
    /// Skipped: the circuit breaker is open for this time. Zero means that another call is the probe.
    #[error("skipped: the circuit breaker is open after repeated failures; {}", next_probe(.0))]
    CircuitOpen(Duration),
    /// Skipped: the provider sent `Retry-After`, and the pool has further models, or its deadline ends earlier.
    #[error("skipped: rate limited by the provider; retry after {0:.1?}")]
    RetryLater(Duration),
    /// Skipped: another model with at least this input limit rejected the prompt as too long.
    #[error("skipped: its input limit of {0} tokens is too small for the prompt")]
    InputLimitTooSmall(usize),
    /// Skipped: the queue is full.
    #[error("skipped: its queue is full with {0} calls")]
    QueueFull(usize),
    /// Skipped: the queue timeout expired.
    #[error("skipped: no free call slot within {0:.1?}")]
    QueueTimeout(Duration),
    /// Skipped: the memory for its transcript did not become free.
    #[error(
        "skipped: no memory for the call within {0:.1?}; limits.max_model_bytes_in_flight limits all calls together"
    )]
    MemoryTimeout(Duration),
    /// The response is large, and all calls together have no memory left.
    #[error("no memory for a large response; limits.max_model_bytes_in_flight limits all calls together")]
    MemoryLimit,
}

fn next_probe(wait: &Duration) -> String {
    if wait.is_zero() { "a probe is running".to_owned() } else { format!("next probe in {wait:.1?}") }
}

/// The phase of a call in which a timeout expired.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TimeoutPhase {
    #[error("no first token")]
    FirstToken,
    #[error("no further token")]
    NextToken,
    /// The model's total timeout.
    #[error("no complete response")]
    Total,
    /// The remaining time of the pool's deadline, which was shorter than the model's total timeout.
    #[error("no complete response before the pool's deadline")]
    Deadline,
}

impl ModelError {
    /// Returns the value of the label `cause` in metrics.
    #[must_use]
    pub fn label(&self) -> &'static str {
        match self {
            Self::Connection(_) => "connection",
            Self::Timeout(..) => "timeout",
            Self::Status { status: 429, .. } => "rate_limited",
            Self::Status { status: 401 | 403, .. } => "unauthorized",
            Self::Status { status: 404, .. } | Self::Status { code: Some("model_not_found"), .. } => {
                "not_found"
            }
            Self::Status { status: 500.., .. } => "server_error",
            Self::Status { .. } => "status",
            Self::PromptTooLong => "too_long",
            Self::Protocol(_) => "protocol",
            Self::StreamTruncated => "truncated_stream",
            Self::Rejected(_) => "rejected",
            Self::SecretUnavailable(_) => "secret",
            Self::CircuitOpen(_) => "breaker_open",
            Self::RetryLater(_) => "retry_later",
            Self::InputLimitTooSmall(_) => "too_small",
            Self::QueueFull(_) => "queue_full",
            Self::QueueTimeout(_) => "queue_timeout",
            Self::MemoryTimeout(_) => "memory_timeout",
            Self::MemoryLimit => "memory_limit",
        }
    }

    /// All values of [`ModelError::label`].
    pub const LABELS: [&str; 19] = [
        "connection",
        "timeout",
        "rate_limited",
        "unauthorized",
        "not_found",
        "server_error",
        "status",
        "too_long",
        "protocol",
        "truncated_stream",
        "rejected",
        "secret",
        "breaker_open",
        "retry_later",
        "too_small",
        "queue_full",
        "queue_timeout",
        "memory_timeout",
        "memory_limit",
    ];

    /// Returns `true` if a request was sent to the model, or at least a connection attempted.
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
                | Self::MemoryTimeout(_)
        )
    }

    /// Returns `true` if the same call may succeed a moment later. A timeout is not retryable: it has already used a
    /// large part of the deadline, which is better spent on the next model.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Connection(_) | Self::StreamTruncated => true,
            Self::Status { status, .. } => matches!(status, 408 | 409 | 425 | 429 | 500..),
            _ => false,
        }
    }

    /// Returns `true` if the circuit breaker counts this error as a failure. An oversized prompt depends on the
    /// conversation: counting it would block the model for all other sessions. The end of the pool's deadline is not
    /// counted here, because the model may have had too little time. The circuit breaker never sees a rejected response:
    /// it records the call before the response check, as a success.
    #[must_use]
    pub fn is_model_fault(&self) -> bool {
        match self {
            Self::Connection(_) | Self::Protocol(_) | Self::StreamTruncated => true,
            Self::Timeout(phase, _) => *phase != TimeoutPhase::Deadline,
            Self::Status { status, .. } => !matches!(status, 400 | 413 | 422),
            _ => false,
        }
    }
}

/// The reason for which the response check rejected a completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Rejection {
    #[error("empty")]
    Empty,
    #[error("truncated at the output limit")]
    Truncated,
    /// Stopped by the provider's content filter or by a refusal of the model.
    #[error("filtered")]
    Filtered,
    /// Ended in a tool call or a paused turn. precis offers no tools and continues no turn.
    #[error("ended in a tool call or a paused turn; precis offers no tools")]
    Unfinished,
    /// Only "none", "n/a" or the like.
    #[error("a bare \"none\"")]
    NonAnswer,
    /// A compressed summary that is not clearly shorter than its source.
    #[error("not clearly shorter than its input")]
    NotShorter,
    /// A summary that is longer than the conversation.
    #[error("longer than its input")]
    TooLong,
    /// A single word for a long conversation, or for a long summary.
    #[error("one word for a long input")]
    TooShort,
    /// A refusal, an answer to the user, or another text about something else.
    #[error("its words are not those of its input")]
    Unsupported,
    /// A copy of the prompt or of the transcript.
    #[error("a copy of the prompt")]
    Echo,
    /// The response to [`Task::Rerank`](super::Task::Rerank) does not contain the number of each result exactly once.
    #[error("not an order of the search results")]
    NotAnOrder,
}

/// All models of a pool failed.
#[derive(Clone, Debug, PartialEq)]
pub struct LlmError {
    /// Name of the pool.
    pub pool: String,
    /// All attempts in order; empty if the deadline left no time for any.
    pub attempts: Vec<Attempt>,
    pub cost: Cost,
}

impl LlmError {
    /// Returns `true` if a model reported that the prompt is too long, so a smaller batch may succeed.
    #[must_use]
    pub fn is_prompt_too_long(&self) -> bool {
        self.attempts.iter().any(|attempt| matches!(attempt.error, ModelError::PromptTooLong))
    }

    /// Returns `true` if a filter rejected the prompt or the response, so that other messages may pass.
    #[must_use]
    pub fn is_filtered(&self) -> bool {
        self.attempts.iter().any(|attempt| attempt.error == ModelError::Rejected(Rejection::Filtered))
    }

    /// Returns `true` if all calls failed in a way that can depend on the size of the prompt, whatever the servers say.
    #[must_use]
    pub fn may_depend_on_size(&self) -> bool {
        let mut sent = self.attempts.iter().filter(|attempt| attempt.error.was_sent()).peekable();
        let depends = |error: &ModelError| {
            matches!(
                error,
                ModelError::PromptTooLong | ModelError::Status { status: 400 | 413 | 422 | 500, .. }
            )
        };
        sent.peek().is_some() && sent.all(|attempt| depends(&attempt.error))
    }
}

impl fmt::Display for LlmError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "all models of pool \"{}\" failed", self.pool)?;
        for (index, attempt) in self.attempts.iter().enumerate() {
            let separator = if index == 0 { ": " } else { "; " };
            write!(f, "{separator}{attempt}")?;
        }
        Ok(())
    }
}

impl std::error::Error for LlmError {}
