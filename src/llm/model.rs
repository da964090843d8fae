//! One model of the pools: concurrency limit, circuit breaker, timeouts and retries around the calls of its provider.
//!
//! All pools and sessions share a model and its state: the recent failures in its circuit breaker, the last `Retry-After`
//! of its provider, and an observed input limit that is smaller than the configured one.

use super::call_memory::CallMemoryLimit;
use super::circuit_breaker::{CallPermit, CircuitBreaker, CircuitBreakerPolicy};
use super::concurrency_limit::ConcurrencyLimit;
use super::error::TimeoutPhase;
use super::metrics::{GaugeGuard, ModelMetrics};
use super::prompt::Prompts;
use super::provider::{Completion, Provider, Request};
use super::status::{FailureStatus, ModelStatus};
use super::{Attempt, CallMemory, Cost, ModelError, Rejection, Task};
use super::{reasoning, response_check};
use crate::config;
use crate::trace_context::step;
use backon::{BackoffBuilder as _, ExponentialBuilder};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use time::OffsetDateTime;
use tokio::sync::SemaphorePermit;
use tokio::time::{Instant, sleep, timeout};
use tracing::Instrument as _;

/// Smallest number of tokens that an observed input limit leaves for the conversation, beside the text of the prompt.
const MIN_CONVERSATION_TOKENS: usize = 256;

/// An observed input limit doubles after this time, up to the configured limit. A provider may reject long prompts only
/// temporarily or because of one session; without the doubling, all sessions would be summarised in tiny batches until
/// the next start.
const OBSERVED_LIMIT_DOUBLES_AFTER: Duration = Duration::from_hours(1);

/// A model with its provider.
#[derive(Clone, Debug)]
pub struct ModelSpec {
    /// Name of the model in the settings.
    pub name: String,
    /// The provider. Its HTTP client applies the model's connect timeout.
    pub provider: Arc<dyn Provider>,
    pub settings: config::Model,
}

/// The state of one [`Llm::complete`](super::Llm::complete) on its way through the models of a pool.
#[derive(Debug)]
pub(super) struct PoolRequest<'a> {
    pub(super) task: Task<'a>,
    pub(super) prompts: &'a Prompts,
    pub(super) memory: &'a CallMemoryLimit,
    /// The pool's deadline.
    pub(super) deadline: Duration,
    /// End of the deadline, or of the shorter timeout of the task. No call starts after it, and a running call is cancelled.
    pub(super) deadline_at: Instant,
    /// `true` for the last model of the pool. Only then it is worth waiting for the provider's `Retry-After`.
    pub(super) is_last_model: bool,
    pub(super) attempts: Vec<Attempt>,
    pub(super) cost: Cost,
}

impl PoolRequest<'_> {
    pub(super) fn remaining(&self) -> Duration {
        self.deadline_at.saturating_duration_since(Instant::now())
    }
}

/// A model with its state.
#[derive(Debug)]
pub(super) struct Model {
    pub(super) spec: ModelSpec,
    breaker: CircuitBreaker,
    concurrency: ConcurrencyLimit,
    metrics: ModelMetrics,
    /// End of the last `Retry-After`.
    retry_not_before: Mutex<Option<Instant>>,
    last_success_at: Mutex<Option<OffsetDateTime>>,
    last_failure: Mutex<Option<FailureStatus>>,
    /// Set after the provider rejected the API key or the name of the model, until a call succeeds.
    refusal: Mutex<Option<String>>,
    /// The input limit that the provider's errors imply, and the time of the last such error.
    observed_input_limit: Mutex<Option<(usize, Instant)>>,
}

impl Model {
    pub(super) fn new(spec: ModelSpec) -> Self {
        let settings = &spec.settings;
        let policy = CircuitBreakerPolicy {
            failure_percent: settings.breaker_failure_percent,
            min_calls: settings.breaker_min_calls,
            window: settings.breaker_window,
            open_for: settings.breaker_open_for,
        };
        Self {
            breaker: CircuitBreaker::new(policy),
            concurrency: ConcurrencyLimit::new(settings.max_concurrent_calls, settings.max_queued_calls),
            metrics: ModelMetrics::new(&spec.name),
            retry_not_before: Mutex::new(None),
            last_success_at: Mutex::new(None),
            last_failure: Mutex::new(None),
            refusal: Mutex::new(None),
            observed_input_limit: Mutex::new(None),
            spec,
        }
    }

    /// Returns `true` if calls cost nothing: for the built-in summariser, and with prices of 0 in the settings.
    pub(super) fn is_free(&self) -> bool {
        let config::Model { input_price, output_price, .. } = &self.spec.settings;
        let has_no_price =
            input_price.zip(*output_price).is_some_and(|(input, output)| input + output <= 0.0);
        !self.spec.provider.is_prompted() || has_no_price
    }

    /// Returns the maximum number of tokens of a prompt: the configured or the observed limit.
    pub(super) fn input_limit(&self) -> usize {
        self.input_limit_with(*self.observed_input_limit.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn input_limit_with(&self, observed: Option<(usize, Instant)>) -> usize {
        let configured = self.spec.settings.input_limit;
        let Some((limit, observed_at)) = observed else {
            return configured;
        };
        let doublings = observed_at.elapsed().as_secs() / OBSERVED_LIMIT_DOUBLES_AFTER.as_secs();
        let factor = 2_usize.saturating_pow(u32::try_from(doublings).unwrap_or(u32::MAX));
        limit.saturating_mul(factor).min(configured)
    }

    /// Returns the present state.
    pub(super) fn status(&self, prompts: &Prompts) -> ModelStatus {
        let now = OffsetDateTime::now_utc();
        let after = |wait: Duration| Some(wait).filter(|wait| !wait.is_zero()).map(|wait| now + wait);
        let ((circuit, probe_in), (calls, queued)) =
            (self.breaker.state_and_wait(), self.concurrency.in_use());
        let ModelSpec { name, provider, settings } = &self.spec;
        ModelStatus {
            name: name.clone(),
            provider: settings.provider.clone(),
            model: settings.model.clone(),
            is_prompted: provider.is_prompted(),
            prompt_version: provider.prompt_version(prompts).to_owned(),
            circuit,
            probe_at: after(probe_in),
            retry_not_before: after(self.retry_after_remaining()),
            calls,
            max_calls: settings.max_concurrent_calls,
            queued,
            max_queued: settings.max_queued_calls,
            input_limit: self.input_limit(),
            output_limit: settings.output_limit,
            input_price: settings.input_price,
            output_price: settings.output_price,
            last_success_at: *self.last_success_at.lock().unwrap_or_else(PoisonError::into_inner),
            last_failure: self.last_failure.lock().unwrap_or_else(PoisonError::into_inner).clone(),
            refusal: self.refusal.lock().unwrap_or_else(PoisonError::into_inner).clone(),
        }
    }

    /// Calls the model until the response check accepts a completion or a further call is pointless. Records failed
    /// attempts in the request.
    pub(super) async fn complete(&self, request: &mut PoolRequest<'_>) -> Option<Completion> {
        let settings = &self.spec.settings;
        let mut backoff = ExponentialBuilder::new()
            .with_jitter()
            .with_min_delay(settings.retry_initial)
            .with_max_delay(settings.retry_max)
            .with_max_times(settings.retries)
            .build();
        loop {
            let (error, duration) = match self.attempt(request).await {
                Ok(completion) => {
                    *self.last_success_at.lock().unwrap_or_else(PoisonError::into_inner) =
                        Some(OffsetDateTime::now_utc());
                    return Some(completion);
                }
                Err(failure) => failure,
            };
            let delay = if error.is_retryable() { backoff.next() } else { None };
            self.record_failed_attempt(request, error, duration);
            let delay = delay.map(|delay| delay.max(self.retry_after_remaining()).min(settings.retry_max));
            sleep(delay.filter(|delay| *delay < request.remaining())?).await;
        }
    }

    /// Records a failed or skipped attempt in the request and in the metrics.
    pub(super) fn record_failed_attempt(
        &self,
        request: &mut PoolRequest<'_>,
        error: ModelError,
        duration: Duration,
    ) {
        tracing::debug!(%error, "attempt failed");
        self.metrics.record_failure(&error);
        // The errors of skipped attempts would hide the one that led to them.
        if !matches!(
            error,
            ModelError::CircuitOpen(_) | ModelError::RetryLater(_) | ModelError::InputLimitTooSmall(_)
        ) {
            let failure = FailureStatus { at: OffsetDateTime::now_utc(), reason: error.to_string() };
            *self.last_failure.lock().unwrap_or_else(PoisonError::into_inner) = Some(failure);
        }
        request.cost.failures += u32::from(error.was_sent());
        request.attempts.push(Attempt { model: self.spec.name.clone(), error, duration });
    }

    /// Makes at most one call. An error comes with the duration of the call.
    async fn attempt(&self, request: &mut PoolRequest<'_>) -> Result<Completion, (ModelError, Duration)> {
        let skipped = |error| (error, Duration::ZERO);
        let queued_at = Instant::now();
        let permits = self.acquire(request).await;
        let queued = queued_at.elapsed();
        request.cost.queued += queued;
        let (_concurrency_permit, memory, call_permit) = permits.map_err(skipped)?;
        self.metrics.queued.record(queued);
        let remaining = request.remaining();
        if remaining.is_zero() {
            return Err(skipped(ModelError::QueueTimeout(queued_at.elapsed())));
        }
        let started_at = Instant::now();
        let result = self.call(request, &memory, remaining).await;
        let duration = started_at.elapsed();
        if result.as_ref().err().is_none_or(ModelError::was_sent) {
            request.cost.calls += 1;
            self.metrics.calls.increment(1);
            self.metrics.duration.record(duration);
        }
        let had_enough_time = remaining >= self.spec.settings.timeout.min(request.deadline) / 2;
        // A call whose response is rejected below counts as a success: the model responded.
        self.record_outcome(call_permit, result.as_ref().err(), had_enough_time);
        let mut completion = match result {
            Ok(completion) => completion,
            Err(error) => {
                self.adapt_limits(&error, request).await;
                return Err((error, duration));
            }
        };
        self.metrics.record_usage(&completion.usage);
        request.cost.usage += completion.usage;
        request.cost.tokens = request.cost.tokens.saturating_add(completion.tokens.total());
        let settings = &self.spec.settings;
        let price = completion.tokens.price(settings.input_price, settings.output_price);
        request.cost.price = request.cost.price.zip(price).map(|(sum, price)| sum + price);
        if let Some(first_token) = completion.first_token {
            self.metrics.first_token.record(first_token);
        }
        let (finish_reason, task) = (completion.finish_reason, &request.task);
        let text = if self.spec.provider.is_prompted() {
            let text = reasoning::strip_reasoning(&completion.text);
            match response_check::check_response(text, finish_reason, task) {
                Ok(text) if request.prompts.is_copied_by(&text) => Err(Rejection::Echo),
                checked => checked,
            }
        } else {
            response_check::check_extract(&completion.text, finish_reason, task)
        };
        completion.text = text.map_err(|rejection| (ModelError::Rejected(rejection), duration))?;
        Ok(completion)
    }

    /// Waits for a free call slot, for memory, and for the permission of the circuit breaker. Fails at once if the circuit
    /// breaker is open; it is checked again after the queue, so that queued calls leave it when the circuit breaker opens. Waits
    /// for the end of a `Retry-After` only if this is the last model of the pool and the deadline leaves the time for it.
    async fn acquire(
        &self,
        request: &PoolRequest<'_>,
    ) -> Result<(SemaphorePermit<'_>, CallMemory, CallPermit<'_>), ModelError> {
        let (remaining, queue_timeout) = (request.remaining(), self.spec.settings.queue_timeout);
        if let Some(wait) = self.breaker.rejects_for() {
            return Err(ModelError::CircuitOpen(wait));
        }
        let deadline_at = Instant::now() + remaining;
        let concurrency_permit = {
            let _waiting = GaugeGuard::increment(&self.metrics.waiting);
            self.concurrency.acquire(queue_timeout.min(remaining)).await?
        };
        if let Some(wait) = self.breaker.rejects_for() {
            return Err(ModelError::CircuitOpen(wait));
        }
        let retry_after = self.retry_after_remaining();
        let can_wait =
            request.is_last_model && retry_after < deadline_at.saturating_duration_since(Instant::now());
        if !retry_after.is_zero() && !can_wait {
            return Err(ModelError::RetryLater(retry_after));
        }
        sleep(retry_after).await;
        let memory = request.memory.acquire(&request.task, queue_timeout.min(request.remaining())).await?;
        let call_permit = self.breaker.admit().map_err(ModelError::CircuitOpen)?;
        self.metrics.set_circuit_state(self.breaker.state());
        Ok((concurrency_permit, memory, call_permit))
    }

    async fn call(
        &self,
        request: &PoolRequest<'_>,
        memory: &CallMemory,
        remaining: Duration,
    ) -> Result<Completion, ModelError> {
        let settings = &self.spec.settings;
        let provider_request =
            Request { model: settings, task: request.task, prompts: request.prompts, memory };
        let _in_flight = GaugeGuard::increment(&self.metrics.in_flight);
        let (limit, phase) = if remaining < settings.timeout {
            (remaining, TimeoutPhase::Deadline)
        } else {
            (settings.timeout, TimeoutPhase::Total)
        };
        timeout(limit, self.spec.provider.complete(&provider_request).instrument(step!("llm_call")))
            .await
            .unwrap_or(Err(ModelError::Timeout(phase, limit)))
    }

    /// Reports the result of a call to the circuit breaker. A call that the deadline ended counts as a failure if it
    /// had enough time. Otherwise a model whose timeout exceeds the deadline would delay every request forever.
    fn record_outcome(&self, permit: CallPermit<'_>, error: Option<&ModelError>, had_enough_time: bool) {
        let name = &self.spec.name;
        let is_too_slow = |error: &ModelError| {
            had_enough_time && matches!(error, ModelError::Timeout(TimeoutPhase::Deadline, _))
        };
        let failed = error.is_some_and(|error| error.is_model_fault() || is_too_slow(error));
        let changed = (failed || error.is_none()) && permit.record(failed);
        match error {
            None if changed => {
                tracing::info!(model = name, "circuit breaker closed: the model responds again");
            }
            Some(error) if changed => {
                let open_for = self.spec.settings.breaker_open_for;
                tracing::warn!(model = name, %error, ?open_for, "circuit breaker opened after repeated failures");
            }
            _ => {}
        }
        self.metrics.set_circuit_state(self.breaker.state());
        self.note_refusal(error);
    }

    /// Notes that the provider rejects the API key or the name of the model, and logs it once: the next model of the pool would hide it.
    fn note_refusal(&self, error: Option<&ModelError>) {
        let ModelSpec { name, settings, .. } = &self.spec;
        let setting = match error.map(ModelError::label) {
            None => String::new(),
            Some("unauthorized" | "secret") => format!("llm.providers.{}.api_key", settings.provider),
            Some("not_found") => format!("llm.models.{name}.model, and the base_url of its provider,"),
            Some(_) => return,
        };
        let mut refusal = self.refusal.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(error) = error else {
            *refusal = None;
            return;
        };
        if refusal.is_none() {
            tracing::warn!(
                model = name,
                %error,
                "the provider refuses the calls of a model: check {setting} with `precis llm check`"
            );
        }
        *refusal = Some(format!(
            "the provider refuses the calls of the model \"{name}\" ({error}), so the models after it in its pools write the \
             summaries: check {setting} with `precis llm check`"
        ));
    }

    /// Remembers a `Retry-After`, and lowers the input limit after a prompt that was too long.
    async fn adapt_limits(&self, error: &ModelError, request: &PoolRequest<'_>) {
        match error {
            ModelError::Status { retry_after: Some(wait), .. } => {
                let until = Instant::now() + (*wait).min(self.spec.settings.retry_max);
                let mut not_before = self.retry_not_before.lock().unwrap_or_else(PoisonError::into_inner);
                *not_before = (*not_before).max(Some(until));
            }
            ModelError::PromptTooLong => {
                let prompt = request.prompts.render(&request.task);
                // Counting a long prompt takes milliseconds of CPU time.
                let count = tokio::task::spawn_blocking(move || prompt.tokens());
                let Ok(Ok(prompt_tokens)) = timeout(request.remaining(), count).await else {
                    return;
                };
                let min_limit = request.prompts.overhead() + MIN_CONVERSATION_TOKENS;
                let input_limit = (prompt_tokens / 2).max(min_limit);
                let mut observed = self.observed_input_limit.lock().unwrap_or_else(PoisonError::into_inner);
                if input_limit < self.input_limit_with(*observed) {
                    *observed = Some((input_limit, Instant::now()));
                    let model = &self.spec.name;
                    tracing::warn!(
                        model,
                        prompt_tokens,
                        input_limit,
                        "the model rejected a prompt within its input limit; using a lower limit. Set input_limit to \
                         the model's real limit"
                    );
                }
            }
            _ => {}
        }
    }

    fn retry_after_remaining(&self) -> Duration {
        let not_before = *self.retry_not_before.lock().unwrap_or_else(PoisonError::into_inner);
        not_before.map_or(Duration::ZERO, |at| at.saturating_duration_since(Instant::now()))
    }
}
