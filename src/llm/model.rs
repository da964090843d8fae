//! One model: a turn in its queue, leave of its breaker, calls, and calls again after failures that may pass.
//!
//! What it has learned of its model holds for every pool and every session: that it keeps failing, how long it wants
//! to be left alone, how long a prompt it takes.

use super::circuit_breaker::{CircuitBreaker, CircuitBreakerPolicy, Permit};
use super::concurrency_limit::ConcurrencyLimit;
use super::error::TimeoutPhase;
use super::metrics::ModelMetrics;
use super::prompt::Prompts;
use super::provider::{Completion, Provider, Request};
use super::{Attempt, Cost, ModelError, Task, reasoning, response_check};
use backon::{BackoffBuilder as _, ExponentialBuilder};
use metrics::Gauge;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::SemaphorePermit;
use tokio::time::{Instant, sleep, timeout};

/// What a prompt that was too long teaches is never less than the prompt without a conversation and this much of one.
const LEAST_CONVERSATION: usize = 256;

/// How long that stands; then twice as much is tried, up to what the settings say. What a server refuses for a while,
/// or for one session's sake, must not make all others work in crumbs until the next start.
const LEARNED_FOR: Duration = Duration::from_hours(1);

/// A model, as the settings describe it.
#[derive(Clone, Debug)]
pub struct ModelSpec {
    /// Its name in the settings.
    pub name: String,
    /// How to reach it. Its HTTP client holds the model's connect timeout.
    pub provider: Arc<dyn Provider>,
    /// The provider's name for it.
    pub model: String,
    /// The most tokens that it is asked to answer with.
    pub output_limit: u32,
    /// The most tokens that it takes.
    pub input_limit: usize,
    /// Of one call, from the connection to the last chunk.
    pub timeout: Duration,
    /// How long the first piece of an answer may take; `None`: only `timeout` counts.
    pub first_token_timeout: Option<Duration>,
    /// How long each further piece may take.
    pub idle_timeout: Duration,
    /// When it is called again.
    pub retry: RetryPolicy,
    /// How many calls are made at once.
    pub queue: QueuePolicy,
    /// When it is not called at all.
    pub breaker: CircuitBreakerPolicy,
}

/// When a model is called again after a failure that may pass.
#[derive(Clone, Copy, Debug)]
pub struct RetryPolicy {
    /// Further calls after the first, in one question.
    pub retries: usize,
    /// The wait before the first of them; doubled for each further one, with up to as much again by chance.
    pub initial: Duration,
    /// The longest wait, of those too that a server asks for.
    pub max: Duration,
}

/// How many calls are made at once, and how many wait.
#[derive(Clone, Copy, Debug)]
pub struct QueuePolicy {
    /// Calls at a time.
    pub max_calls: usize,
    /// Calls that wait for their turn; one more goes to the pool's next model.
    pub max_waiting: usize,
    /// How long a call waits before it goes to the pool's next model.
    pub timeout: Duration,
}

/// A question on its way through a pool.
#[derive(Debug)]
pub(super) struct Question<'a> {
    pub(super) task: Task<'a>,
    pub(super) prompts: &'a Prompts,
    /// How long it may take.
    pub(super) deadline: Duration,
    /// When that is over: no call is made after it, and none goes on.
    pub(super) until: Instant,
    /// Whether there is no other model to ask: only then is it worth waiting for one that wants to be left alone.
    pub(super) last: bool,
    /// What was tried so far.
    pub(super) attempts: Vec<Attempt>,
    /// What that took.
    pub(super) cost: Cost,
}

impl Question<'_> {
    pub(super) fn left(&self) -> Duration {
        self.until.saturating_duration_since(Instant::now())
    }
}

/// A model at work.
#[derive(Debug)]
pub(super) struct Model {
    pub(super) spec: ModelSpec,
    breaker: CircuitBreaker,
    slots: ConcurrencyLimit,
    metrics: ModelMetrics,
    /// Before this, its server does not want to be asked.
    not_before: Mutex<Option<Instant>>,
    /// The most tokens that it takes, as it has shown, and when.
    learned: Mutex<Option<(usize, Instant)>>,
}

impl Model {
    pub(super) fn new(spec: ModelSpec) -> Self {
        Self {
            breaker: CircuitBreaker::new(spec.breaker),
            slots: ConcurrencyLimit::new(spec.queue.max_calls, spec.queue.max_waiting),
            metrics: ModelMetrics::new(&spec.name),
            not_before: Mutex::new(None),
            learned: Mutex::new(None),
            spec,
        }
    }

    /// The most tokens of a prompt.
    pub(super) fn input_limit(&self) -> usize {
        self.limit_of(*self.learned.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn limit_of(&self, learned: Option<(usize, Instant)>) -> usize {
        let Some((limit, at)) = learned else {
            return self.spec.input_limit;
        };
        let doublings = at.elapsed().as_secs() / LEARNED_FOR.as_secs();
        let factor = 2_usize.saturating_pow(u32::try_from(doublings).unwrap_or(u32::MAX));
        limit.saturating_mul(factor).min(self.spec.input_limit)
    }

    /// Calls it until an answer passes the gate, or until calling it again makes no sense. Failures are noted in the
    /// question.
    pub(super) async fn answer(&self, question: &mut Question<'_>) -> Option<Completion> {
        let RetryPolicy { retries, initial, max } = self.spec.retry;
        let mut waits = ExponentialBuilder::new()
            .with_jitter()
            .with_min_delay(initial)
            .with_max_delay(max)
            .with_max_times(retries)
            .build();
        loop {
            let (cause, duration) = match self.attempt(question).await {
                Ok(completion) => return Some(completion),
                Err(failed) => failed,
            };
            let wait = if cause.is_retryable() { waits.next() } else { None };
            self.failed(question, cause, duration);
            let wait = wait.map(|wait| wait.max(self.pause()).min(max));
            sleep(wait.filter(|wait| *wait < question.left())?).await;
        }
    }

    /// Notes a failed attempt, or one that is not made.
    pub(super) fn failed(&self, question: &mut Question<'_>, cause: ModelError, duration: Duration) {
        tracing::debug!(%cause, "attempt failed");
        self.metrics.failed(&cause);
        question.cost.failures += u32::from(cause.was_sent());
        question.attempts.push(Attempt { model: self.spec.name.clone(), cause, duration });
    }

    /// One call at most. With a failure comes how long the call took.
    async fn attempt(&self, question: &mut Question<'_>) -> Result<Completion, (ModelError, Duration)> {
        let not_called = |cause| (cause, Duration::ZERO);
        let began = Instant::now();
        let turn = self.turn(question.left(), question.last).await;
        question.cost.queued += began.elapsed();
        let (_slot, permit) = turn.map_err(not_called)?;
        self.metrics.queued.record(began.elapsed());
        let left = question.left();
        if left.is_zero() {
            return Err(not_called(ModelError::QueueTimeout(began.elapsed())));
        }
        let began = Instant::now();
        let called = self.call(question, left).await;
        let duration = began.elapsed();
        if called.as_ref().err().is_none_or(ModelError::was_sent) {
            question.cost.calls += 1;
            self.metrics.calls.increment(1);
            self.metrics.duration.record(duration);
        }
        let had_its_time = left >= self.spec.timeout.min(question.deadline) / 2;
        self.judge(permit, called.as_ref().err(), had_its_time);
        let mut completion = match called {
            Ok(completion) => completion,
            Err(cause) => {
                self.learn(&cause, question).await;
                return Err((cause, duration));
            }
        };
        self.metrics.used(&completion.usage);
        question.cost.usage += completion.usage;
        question.cost.tokens = question.cost.tokens.saturating_add(completion.tokens);
        completion.first_token.into_iter().for_each(|first| self.metrics.first_token.record(first));
        let text = reasoning::strip_reasoning(&completion.text);
        let text = response_check::check_response(text, completion.finish, &question.task);
        completion.text = text.map_err(|refusal| (ModelError::Rejected(refusal), duration))?;
        Ok(completion)
    }

    /// A place among the calls that are made at once, and leave to call. Neither is waited for where the breaker is
    /// open: what stands in the queue when it opens leaves as soon as it is called up. A server that wants to be left
    /// alone is waited for if there is no other model to ask.
    async fn turn(
        &self,
        left: Duration,
        last: bool,
    ) -> Result<(SemaphorePermit<'_>, Permit<'_>), ModelError> {
        if let Some(wait) = self.breaker.wait() {
            return Err(ModelError::CircuitOpen(wait));
        }
        let until = Instant::now() + left;
        let slot = {
            let _waiting = Counted::in_gauge(&self.metrics.waiting);
            self.slots.take(self.spec.queue.timeout.min(left)).await?
        };
        if let Some(wait) = self.breaker.wait() {
            return Err(ModelError::CircuitOpen(wait));
        }
        let pause = self.pause();
        if !pause.is_zero() && !last {
            return Err(ModelError::RetryLater(pause));
        }
        if pause >= until.saturating_duration_since(Instant::now()) && !pause.is_zero() {
            return Err(ModelError::QueueTimeout(left));
        }
        sleep(pause).await;
        let permit = self.breaker.admit().map_err(ModelError::CircuitOpen)?;
        self.metrics.breaker(self.breaker.state());
        Ok((slot, permit))
    }

    async fn call(&self, question: &Question<'_>, left: Duration) -> Result<Completion, ModelError> {
        let request = Request {
            model: &self.spec.model,
            task: question.task,
            prompts: question.prompts,
            output_limit: self.spec.output_limit,
            first_token_timeout: self.spec.first_token_timeout,
            idle_timeout: self.spec.idle_timeout,
        };
        let _in_flight = Counted::in_gauge(&self.metrics.in_flight);
        let (limit, missing) = if left < self.spec.timeout {
            (left, TimeoutPhase::Deadline)
        } else {
            (self.spec.timeout, TimeoutPhase::Total)
        };
        timeout(limit, self.spec.provider.complete(&request))
            .await
            .unwrap_or(Err(ModelError::Timeout(missing, limit)))
    }

    /// Tells the breaker how a call ended. That the deadline ended it speaks against the model as well if it had its
    /// time: one whose timeout is longer than the deadline would else hold up every question for ever.
    fn judge(&self, permit: Permit<'_>, failure: Option<&ModelError>, had_its_time: bool) {
        let name = &self.spec.name;
        let too_slow = |cause: &ModelError| {
            had_its_time && matches!(cause, ModelError::Timeout(TimeoutPhase::Deadline, _))
        };
        match failure {
            None => {
                if permit.answered() {
                    tracing::info!(model = name, "the model answers again");
                }
            }
            Some(cause) if cause.is_model_fault() || too_slow(cause) => {
                if permit.failed() {
                    let open_for = self.spec.breaker.open_for;
                    tracing::warn!(model = name, %cause, ?open_for, "the model keeps failing and is left out");
                }
            }
            Some(_) => drop(permit),
        }
        self.metrics.breaker(self.breaker.state());
    }

    async fn learn(&self, cause: &ModelError, question: &Question<'_>) {
        match cause {
            ModelError::Status { retry_after: Some(wait), .. } => {
                let until = Instant::now() + (*wait).min(self.spec.retry.max);
                let mut not_before = self.not_before.lock().unwrap_or_else(PoisonError::into_inner);
                *not_before = (*not_before).max(Some(until));
            }
            ModelError::PromptTooLong(_) => {
                let prompt = question.prompts.render(&question.task);
                // Counting takes its time: not on a thread that serves requests.
                let count = move || prompt.tokens();
                let Ok(Ok(size)) = timeout(question.left(), tokio::task::spawn_blocking(count)).await else {
                    return;
                };
                let least = question.prompts.overhead() + LEAST_CONVERSATION;
                let input_limit = (size / 2).max(least);
                let mut learned = self.learned.lock().unwrap_or_else(PoisonError::into_inner);
                if input_limit < self.limit_of(*learned) {
                    *learned = Some((input_limit, Instant::now()));
                    let model = &self.spec.name;
                    tracing::warn!(
                        model,
                        size,
                        input_limit,
                        "the model takes less than its input_limit says"
                    );
                }
            }
            _ => {}
        }
    }

    /// How long its server still wants to be left alone.
    fn pause(&self) -> Duration {
        let not_before = *self.not_before.lock().unwrap_or_else(PoisonError::into_inner);
        not_before.map_or(Duration::ZERO, |at| at.saturating_duration_since(Instant::now()))
    }
}

/// One more in a gauge, for as long as this lives.
struct Counted<'a>(&'a Gauge);

impl<'a> Counted<'a> {
    fn in_gauge(gauge: &'a Gauge) -> Self {
        gauge.increment(1);
        Self(gauge)
    }
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.decrement(1);
    }
}
