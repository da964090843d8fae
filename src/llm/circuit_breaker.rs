//! The breaker of a model: keeps a pool from waiting, question after question, for a model that is down.
//!
//! Closed, it lets every call through and looks at how the last ones ended. When too many failed it opens, and calls
//! are refused without being made. After a while it lets one through, the probe: if that is answered it closes, else
//! it stays open for as long again.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::time::Instant;

/// When to open, and for how long.
#[derive(Clone, Copy, Debug)]
pub struct CircuitBreakerPolicy {
    /// The share of failures, in percent, from which on it opens.
    pub failure_percent: u32,
    /// The fewest calls that are a sample. Twice as many are looked at, the latest ones.
    pub min_calls: usize,
    /// Older calls don't count.
    pub window: Duration,
    /// How long no call is made.
    pub open_for: Duration,
}

/// Where it stands, for metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CircuitState {
    /// Calls are made.
    Closed,
    /// A probe is under way or the next call will be one.
    HalfOpen,
    /// No calls are made.
    Open,
}

/// One model's breaker.
#[derive(Debug)]
pub(super) struct CircuitBreaker {
    policy: CircuitBreakerPolicy,
    state: Mutex<State>,
}

#[derive(Debug)]
enum State {
    /// When each of the last calls ended, and whether it failed.
    Closed(VecDeque<(Instant, bool)>),
    Open {
        until: Instant,
        probing: bool,
    },
}

impl State {
    fn opened(policy: &CircuitBreakerPolicy) -> Self {
        Self::Open { until: Instant::now() + policy.open_for, probing: false }
    }

    /// How long no call may be made.
    fn wait(&self) -> Option<Duration> {
        match self {
            Self::Closed(_) => None,
            Self::Open { until, probing } => {
                let wait = until.saturating_duration_since(Instant::now());
                (*probing || !wait.is_zero()).then_some(wait)
            }
        }
    }
}

/// Leave for one call. Dropped, it says nothing about the model.
#[derive(Debug)]
pub(super) struct Permit<'a> {
    breaker: &'a CircuitBreaker,
    probe: bool,
}

impl CircuitBreaker {
    pub(super) fn new(policy: CircuitBreakerPolicy) -> Self {
        Self { policy, state: Mutex::new(State::Closed(VecDeque::new())) }
    }

    /// Leave for a call, or how long there will be none.
    pub(super) fn admit(&self) -> Result<Permit<'_>, Duration> {
        let mut state = self.lock();
        if let Some(wait) = state.wait() {
            return Err(wait);
        }
        let probe = match &mut *state {
            State::Closed(_) => false,
            State::Open { probing, .. } => {
                *probing = true;
                true
            }
        };
        Ok(Permit { breaker: self, probe })
    }

    /// How long there will be no leave; `None` where the next call may be made.
    pub(super) fn wait(&self) -> Option<Duration> {
        self.lock().wait()
    }

    pub(super) fn state(&self) -> CircuitState {
        match &*self.lock() {
            State::Closed(_) => CircuitState::Closed,
            State::Open { until, .. } if *until <= Instant::now() => CircuitState::HalfOpen,
            State::Open { .. } => CircuitState::Open,
        }
    }

    /// Nothing that holds the lock can panic; and if it could, the state would still be one.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether this failure opened it.
    fn note(&self, failed: bool) -> bool {
        let now = Instant::now();
        let mut state = self.lock();
        // A call from before it opened has nothing new to say.
        let State::Closed(calls) = &mut *state else {
            return false;
        };
        calls.push_back((now, failed));
        let most = self.policy.min_calls.saturating_mul(2);
        let too_old = |at: Instant| now.saturating_duration_since(at) > self.policy.window;
        while calls.len() > most || calls.front().is_some_and(|(at, _)| too_old(*at)) {
            calls.pop_front();
        }
        let failures = calls.iter().filter(|(_, failed)| *failed).count();
        let share = usize::try_from(self.policy.failure_percent).unwrap_or(usize::MAX);
        let opens = failed
            && calls.len() >= self.policy.min_calls
            && failures.saturating_mul(100) >= share.saturating_mul(calls.len());
        if opens {
            *state = State::opened(&self.policy);
        }
        opens
    }

    /// The end of a probe; `None`: it was not made after all.
    fn probed(&self, failed: Option<bool>) {
        let mut state = self.lock();
        match failed {
            Some(false) => *state = State::Closed(VecDeque::new()),
            Some(true) => *state = State::opened(&self.policy),
            None => {
                if let State::Open { probing, .. } = &mut *state {
                    *probing = false;
                }
            }
        }
    }
}

impl Permit<'_> {
    /// The model did its part. `true`: the breaker closed.
    pub(super) fn answered(mut self) -> bool {
        if std::mem::take(&mut self.probe) {
            self.breaker.probed(Some(false));
            return true;
        }
        self.breaker.note(false);
        false
    }

    /// The model failed. `true`: the breaker opened.
    pub(super) fn failed(mut self) -> bool {
        if std::mem::take(&mut self.probe) {
            self.breaker.probed(Some(true));
            return false;
        }
        self.breaker.note(true)
    }
}

impl Drop for Permit<'_> {
    fn drop(&mut self) {
        if self.probe {
            self.breaker.probed(None);
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
        let permit = breaker.admit().expect("leave");
        if failed { permit.failed() } else { permit.answered() }
    }

    #[tokio::test(start_paused = true)]
    async fn it_opens_on_a_share_of_failures_over_a_minimum_of_calls() {
        let breaker = CircuitBreaker::new(POLICY);
        for _ in 0..3 {
            assert!(!call(&breaker, true), "too few calls");
        }
        assert!(call(&breaker, true));
        assert_eq!(breaker.admit().expect_err("open"), POLICY.open_for);
        assert_eq!((breaker.wait(), breaker.state()), (Some(POLICY.open_for), CircuitState::Open));

        // Of the last eight calls.
        let breaker = CircuitBreaker::new(POLICY);
        for _ in 0..20 {
            call(&breaker, false);
        }
        let opened: Vec<bool> = (0..4).map(|_| call(&breaker, true)).collect();
        assert_eq!(opened, [false, false, false, true]);
    }

    #[tokio::test(start_paused = true)]
    async fn old_failures_are_forgotten() {
        let breaker = CircuitBreaker::new(POLICY);
        for _ in 0..3 {
            call(&breaker, true);
        }
        tokio::time::advance(POLICY.window + Duration::from_millis(1)).await;
        assert!(!call(&breaker, true));
        assert_eq!(breaker.state(), CircuitState::Closed);
    }

    #[tokio::test(start_paused = true)]
    async fn one_call_probes() {
        let breaker = CircuitBreaker::new(POLICY);
        for _ in 0..4 {
            call(&breaker, true);
        }
        tokio::time::advance(POLICY.open_for).await;
        assert_eq!((breaker.wait(), breaker.state()), (None, CircuitState::HalfOpen));
        let probe = breaker.admit().expect("the probe");
        assert!(breaker.admit().is_err() && breaker.wait().is_some(), "one at a time");
        assert!(!probe.failed());
        assert_eq!(breaker.admit().expect_err("open again"), POLICY.open_for);

        tokio::time::advance(POLICY.open_for).await;
        drop(breaker.admit().expect("a probe that is not made"));
        let probe = breaker.admit().expect("the next is");
        assert!(probe.answered());
        assert_eq!(breaker.state(), CircuitState::Closed);
        for _ in 0..3 {
            assert!(!call(&breaker, true), "it begins anew");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_call_from_before_says_nothing() {
        let breaker = CircuitBreaker::new(POLICY);
        let (early, late) = (breaker.admit().expect("leave"), breaker.admit().expect("leave"));
        for _ in 0..4 {
            call(&breaker, true);
        }
        assert!(!early.answered() && !late.failed());
        assert_eq!(breaker.state(), CircuitState::Open);
    }
}
