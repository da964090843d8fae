//! Timeouts inside of a call: until the first token, and between two.

use super::super::ModelError;
use super::super::error::TimeoutPhase;
use std::time::Duration;
use tokio::time::{Instant, timeout_at};

/// How long the next piece of an answer may take.
#[derive(Debug)]
pub(super) struct StreamTimeouts {
    started: Instant,
    first: Option<Duration>,
    idle: Duration,
    tokens: Option<(Instant, Instant)>,
}

impl StreamTimeouts {
    pub(super) fn new(first: Option<Duration>, idle: Duration) -> Self {
        Self { started: Instant::now(), first, idle, tokens: None }
    }

    /// The future, as long as the next token may take. Only tokens count: a server can send signs of life for ever.
    pub(super) async fn wait<F: Future>(&self, future: F) -> Result<F::Output, ModelError> {
        let (since, limit, missing) = match self.tokens {
            Some((_, last)) => (last, self.idle, TimeoutPhase::NextToken),
            None => match self.first {
                Some(first) => (self.started, first, TimeoutPhase::FirstToken),
                None => return Ok(future.await),
            },
        };
        timeout_at(since + limit, future).await.map_err(|_| ModelError::Timeout(missing, limit))
    }

    pub(super) fn token(&mut self) {
        let now = Instant::now();
        let first = self.tokens.map_or(now, |(first, _)| first);
        self.tokens = Some((first, now));
    }

    pub(super) fn first_token(&self) -> Option<Duration> {
        self.tokens.map(|(first, _)| first - self.started)
    }
}
