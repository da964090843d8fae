//! A [circuit breaker](https://en.wikipedia.org/wiki/Circuit_breaker_design_pattern) for one model: it stops calls to a
//! failing model, so that requests do not spend their deadline on it.
//!
//! Closed, it admits all calls and observes their results. It opens when too many of the last calls have failed. After
//! `open_for` it is half-open and admits a single call, the probe. A successful probe closes it, a failed one opens it
//! again for the same time.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::time::Instant;

/// The settings of a circuit breaker.
#[derive(Clone, Copy, Debug)]
pub(super) struct CircuitBreakerPolicy {
    /// The circuit breaker opens at this percentage of failed calls.
    pub(super) failure_percent: u32,
    /// Minimum number of calls for which the percentage is computed. The last `2 * min_calls` calls are considered.
    pub(super) min_calls: usize,
    /// Calls that ended earlier are ignored.
    pub(super) window: Duration,
    /// Time between opening and the probe.
    pub(super) open_for: Duration,
}

/// The state of a circuit breaker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CircuitState {
    /// All calls are admitted.
    Closed,
    /// A probe is running, or the next call will be one.
    HalfOpen,
    /// No call is admitted until the probe.
    Open,
}

/// The circuit breaker of one model.
#[derive(Debug)]
pub(super) struct CircuitBreaker {
    policy: CircuitBreakerPolicy,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// The last calls while closed: time of the end, and `true` for a failure.
    calls: VecDeque<(Instant, bool)>,
    /// Time of the next probe; `None` while closed.
    probe_at: Option<Instant>,
    is_probing: bool,
}

impl State {
    fn open(policy: &CircuitBreakerPolicy) -> Self {
        Self { probe_at: Some(Instant::now() + policy.open_for), ..Self::default() }
    }

    fn rejects_for(&self) -> Option<Duration> {
        let wait = self.probe_at?.saturating_duration_since(Instant::now());
        (self.is_probing || !wait.is_zero()).then_some(wait)
    }
}

/// The permission for one call. Dropping it without a result counts neither as a success nor as a failure; if it was the
/// probe, the next call becomes the probe.
#[derive(Debug)]
pub(super) struct CallPermit<'a> {
    breaker: &'a CircuitBreaker,
    is_probe: bool,
}

impl CircuitBreaker {
    pub(super) fn new(policy: CircuitBreakerPolicy) -> Self {
        Self { policy, state: Mutex::default() }
    }

    /// Returns the permission for a call, or the time until the next probe.
    pub(super) fn admit(&self) -> Result<CallPermit<'_>, Duration> {
        let mut state = self.lock();
        if let Some(wait) = state.rejects_for() {
            return Err(wait);
        }
        state.is_probing = state.probe_at.is_some();
        Ok(CallPermit { breaker: self, is_probe: state.is_probing })
    }

    /// Returns the time until the next probe, or `None` if a call would be admitted now.
    pub(super) fn rejects_for(&self) -> Option<Duration> {
        self.lock().rejects_for()
    }

    pub(super) fn state(&self) -> CircuitState {
        self.state_and_wait().0
    }

    /// Returns the state, and the time until the probe.
    pub(super) fn state_and_wait(&self) -> (CircuitState, Duration) {
        let Some(probe_at) = self.lock().probe_at else {
            return (CircuitState::Closed, Duration::ZERO);
        };
        let wait = probe_at.saturating_duration_since(Instant::now());
        (if wait.is_zero() { CircuitState::HalfOpen } else { CircuitState::Open }, wait)
    }

    /// Ignores poisoning: no code that holds the lock can panic, and the state would be consistent if it did.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl CallPermit<'_> {
    /// Records the result of the call. Returns `true` if it opens the circuit breaker, or closes it again. A failed probe
    /// keeps it open.
    pub(super) fn record(mut self, failed: bool) -> bool {
        let policy = &self.breaker.policy;
        let mut state = self.breaker.lock();
        if std::mem::take(&mut self.is_probe) {
            *state = if failed { State::open(policy) } else { State::default() };
            return !failed;
        }
        // The call started before the circuit breaker opened, so its result is outdated.
        if state.probe_at.is_some() {
            return false;
        }
        let now = Instant::now();
        state.calls.push_back((now, failed));
        let is_outdated = |(ended_at, _): &(Instant, bool)| now.duration_since(*ended_at) > policy.window;
        while state.calls.len() > policy.min_calls.saturating_mul(2)
            || state.calls.front().is_some_and(is_outdated)
        {
            state.calls.pop_front();
        }
        let failures = state.calls.iter().filter(|(_, failed)| *failed).count();
        let failure_percent = usize::try_from(policy.failure_percent).unwrap_or(usize::MAX);
        let opens = failed
            && state.calls.len() >= policy.min_calls
            && failures.saturating_mul(100) >= failure_percent.saturating_mul(state.calls.len());
        if opens {
            *state = State::open(policy);
        }
        opens
    }
}

impl Drop for CallPermit<'_> {
    fn drop(&mut self) {
        if self.is_probe {
            self.breaker.lock().is_probing = false;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const POLICY: CircuitBreakerPolicy = CircuitBreakerPolicy {
        failure_percent: 50,
        min_calls: 4,
        window: Duration::from_mins(1),
        open_for: Duration::from_secs(30),
    };

    fn call(breaker: &CircuitBreaker, failed: bool) -> bool {
        breaker.admit().expect("closed").record(failed)
    }

    #[tokio::test(start_paused = true)]
    async fn breaker_opens_at_failure_percentage_after_min_calls() {
        let breaker = CircuitBreaker::new(POLICY);
        for _ in 0..3 {
            assert!(!call(&breaker, true), "too few calls");
        }
        assert!(call(&breaker, true));
        assert_eq!(breaker.admit().expect_err("open"), POLICY.open_for);
        assert_eq!((breaker.rejects_for(), breaker.state()), (Some(POLICY.open_for), CircuitState::Open));

        // Only the last eight calls count.
        let breaker = CircuitBreaker::new(POLICY);
        for _ in 0..20 {
            call(&breaker, false);
        }
        let opened: Vec<bool> = (0..4).map(|_| call(&breaker, true)).collect();
        assert_eq!(opened, [false, false, false, true]);
    }

    #[tokio::test(start_paused = true)]
    async fn failures_outside_the_window_are_ignored() {
        let breaker = CircuitBreaker::new(POLICY);
        for _ in 0..3 {
            call(&breaker, true);
        }
        tokio::time::advance(POLICY.window + Duration::from_millis(1)).await;
        assert!(!call(&breaker, true));
        assert_eq!(breaker.state(), CircuitState::Closed);
    }

    #[tokio::test(start_paused = true)]
    async fn result_of_a_call_from_before_the_opening_is_ignored() {
        let breaker = CircuitBreaker::new(POLICY);
        let (early, late) = (breaker.admit().expect("closed"), breaker.admit().expect("closed"));
        for _ in 0..4 {
            call(&breaker, true);
        }
        assert!(!early.record(false) && !late.record(true));
        assert_eq!(breaker.state(), CircuitState::Open);
    }
}
