//! Timeouts within a call: until the first token, and between two tokens.

use crate::llm::ModelError;
use crate::llm::error::TimeoutPhase;
use std::time::Duration;
use tokio::time::{Instant, timeout_at};

/// The first-token timeout and the idle timeout of one call.
#[derive(Debug)]
pub struct StreamTimeouts {
    started_at: Instant,
    first_token_timeout: Option<Duration>,
    idle_timeout: Duration,
    first_token_at: Option<Instant>,
    last_token_at: Option<Instant>,
}

impl StreamTimeouts {
    #[must_use]
    pub fn new(first_token_timeout: Option<Duration>, idle_timeout: Duration) -> Self {
        let (first_token_at, last_token_at) = (None, None);
        Self { started_at: Instant::now(), first_token_timeout, idle_timeout, first_token_at, last_token_at }
    }

    /// Awaits the future for as long as the next token may take. Only tokens reset the timeout, because servers can
    /// send keep-alive data forever.
    pub(super) async fn apply<F: Future>(&self, future: F) -> Result<F::Output, ModelError> {
        let (since, limit, phase) = match (self.last_token_at, self.first_token_timeout) {
            (Some(last_token_at), _) => (last_token_at, self.idle_timeout, TimeoutPhase::NextToken),
            (None, Some(limit)) => (self.started_at, limit, TimeoutPhase::FirstToken),
            (None, None) => return Ok(future.await),
        };
        timeout_at(since + limit, future).await.map_err(|_| ModelError::Timeout(phase, limit))
    }

    pub(super) fn token_received(&mut self) {
        let now = Instant::now();
        self.first_token_at.get_or_insert(now);
        self.last_token_at = Some(now);
    }

    pub(super) fn time_to_first_token(&self) -> Option<Duration> {
        self.first_token_at.map(|first_token_at| first_token_at - self.started_at)
    }
}
