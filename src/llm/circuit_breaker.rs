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

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CircuitState {
    Closed,
    /// A probe is running, or the next call will be one.
    HalfOpen,
    Open,
}

/// The circuit breaker of one model.
#[derive(Debug)]
pub(super) struct CircuitBreaker {
    policy: CircuitBreakerPolicy,
    state: Mutex<State>,
}

#[derive(Debug)]
enum State {
    /// The last calls: time of the end, and `true` for a failure.
    Closed(VecDeque<(Instant, bool)>),
    Open {
        until: Instant,
        is_probing: bool,
    },
}

impl State {
    fn open(policy: &CircuitBreakerPolicy) -> Self {
        Self::Open { until: Instant::now() + policy.open_for, is_probing: false }
    }

    fn rejects_for(&self) -> Option<Duration> {
        match self {
            Self::Closed(_) => None,
            Self::Open { until, is_probing } => {
                let wait = until.saturating_duration_since(Instant::now());
                (*is_probing || !wait.is_zero()).then_some(wait)
            }
        }
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
        Self { policy, state: Mutex::new(State::Closed(VecDeque::new())) }
    }

    /// Returns the permission for a call, or the time until the next probe.
    pub(super) fn admit(&self) -> Result<CallPermit<'_>, Duration> {
        let mut state = self.lock();
        if let Some(wait) = state.rejects_for() {
            return Err(wait);
        }
        let is_probe = match &mut *state {
            State::Closed(_) => false,
            State::Open { is_probing, .. } => {
                *is_probing = true;
                true
            }
        };
        Ok(CallPermit { breaker: self, is_probe })
    }

    /// Returns the time until the next probe, or `None` if a call would be admitted now.
    pub(super) fn rejects_for(&self) -> Option<Duration> {
        self.lock().rejects_for()
    }

    pub(super) fn state(&self) -> CircuitState {
        match &*self.lock() {
            State::Closed(_) => CircuitState::Closed,
            State::Open { until, .. } if *until <= Instant::now() => CircuitState::HalfOpen,
            State::Open { .. } => CircuitState::Open,
        }
    }

    /// Ignores poisoning: no code that holds the lock can panic, and the state would be consistent if it did.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records the result of a call that was not a probe. Returns `true` if this failure opens the circuit breaker.
    fn record(&self, failed: bool) -> bool {
        let now = Instant::now();
        let mut state = self.lock();
        // The call started before the circuit breaker opened, so its result is outdated.
        let State::Closed(calls) = &mut *state else {
            return false;
        };
        calls.push_back((now, failed));
        let max_calls = self.policy.min_calls.saturating_mul(2);
        let is_outdated = |ended_at: Instant| now.saturating_duration_since(ended_at) > self.policy.window;
        while calls.len() > max_calls || calls.front().is_some_and(|(ended_at, _)| is_outdated(*ended_at)) {
            calls.pop_front();
        }
        let failures = calls.iter().filter(|(_, failed)| *failed).count();
        let failure_percent = usize::try_from(self.policy.failure_percent).unwrap_or(usize::MAX);
        let opens = failed
            && calls.len() >= self.policy.min_calls
            && failures.saturating_mul(100) >= failure_percent.saturating_mul(calls.len());
        if opens {
            *state = State::open(&self.policy);
        }
        opens
    }

    /// Ends the probe. `failed` is `None` if the call was not made or was cancelled.
    fn finish_probe(&self, failed: Option<bool>) {
        let mut state = self.lock();
        match failed {
            Some(false) => *state = State::Closed(VecDeque::new()),
            Some(true) => *state = State::open(&self.policy),
            None => {
                if let State::Open { is_probing, .. } = &mut *state {
                    *is_probing = false;
                }
            }
        }
    }
}

impl CallPermit<'_> {
    /// Records a successful call. Returns `true` if this closes the circuit breaker.
    pub(super) fn record_success(mut self) -> bool {
        if std::mem::take(&mut self.is_probe) {
            self.breaker.finish_probe(Some(false));
            return true;
        }
        self.breaker.record(false);
        false
    }

    /// Records a failed call. Returns `true` if this opens the circuit breaker; a failed probe keeps it open.
    pub(super) fn record_failure(mut self) -> bool {
        if std::mem::take(&mut self.is_probe) {
            self.breaker.finish_probe(Some(true));
            return false;
        }
        self.breaker.record(true)
    }
}

impl Drop for CallPermit<'_> {
    fn drop(&mut self) {
        if self.is_probe {
            self.breaker.finish_probe(None);
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
        let permit = breaker.admit().expect("closed");
        if failed { permit.record_failure() } else { permit.record_success() }
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
        assert!(!early.record_success() && !late.record_failure());
        assert_eq!(breaker.state(), CircuitState::Open);
    }
}
