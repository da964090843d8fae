//! Property test with random behaviour of models and a paused clock: a rejected or failed text is never used, no call
//! exceeds the deadline or the concurrency limit, and the cost is complete.

use super::{SECOND, entry, model, prompts, settings};
use crate::config;
use crate::llm::error::TimeoutPhase;
use crate::llm::pool::{ModelPools, Strategy as Order};
use crate::llm::provider::{Completion, FinishReason, Provider, Request};
use crate::llm::{Llm as _, ModelError, Task, Usage};
use async_trait::async_trait;
use futures_util::future::join_all;
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::time::{Instant, sleep};

/// The reaction of a model to one call.
#[derive(Clone, Debug)]
struct Reply {
    after_ms: u64,
    result: ReplyResult,
}

#[derive(Clone, Copy, Debug)]
enum ReplyResult {
    Good,
    Truncated,
    StreamTruncated,
    NonAnswer,
    RateLimited(Option<u64>),
    Unauthorized,
    PromptTooLong,
}

/// A provider that repeats its replies forever and records the time of each call.
#[derive(Debug)]
struct RandomProvider {
    replies: Vec<Reply>,
    next_reply: AtomicUsize,
    /// Start and end of each call of any provider.
    calls: Arc<Mutex<Vec<(Instant, Instant)>>>,
    running: AtomicUsize,
    max_running: Arc<AtomicUsize>,
}

/// Records a call when it ends or is cancelled.
struct RunningCall<'a>(&'a RandomProvider, Instant);

impl Drop for RunningCall<'_> {
    fn drop(&mut self) {
        self.0.running.fetch_sub(1, Ordering::Relaxed);
        self.0.calls.lock().expect("not poisoned").push((self.1, Instant::now()));
    }
}

#[async_trait]
impl Provider for RandomProvider {
    async fn complete(&self, _: &Request<'_>) -> Result<Completion, ModelError> {
        let running = self.running.fetch_add(1, Ordering::Relaxed) + 1;
        self.max_running.fetch_max(running, Ordering::Relaxed);
        let _running = RunningCall(self, Instant::now());
        let number = self.next_reply.fetch_add(1, Ordering::Relaxed);
        let Reply { after_ms, result } = self.replies[number % self.replies.len()].clone();
        sleep(Duration::from_millis(after_ms)).await;
        let status = |status, retry_after_ms: Option<u64>| ModelError::Status {
            status,
            message: "BAD".to_owned(),
            retry_after: retry_after_ms.map(Duration::from_millis),
        };
        let (text, finish_reason) = match result {
            ReplyResult::Good => (format!("good reply {number}"), FinishReason::Complete),
            ReplyResult::Truncated => (format!("BAD reply {number}"), FinishReason::Length),
            ReplyResult::StreamTruncated => return Err(ModelError::StreamTruncated),
            ReplyResult::NonAnswer => ("none".to_owned(), FinishReason::Complete),
            ReplyResult::RateLimited(retry_after) => return Err(status(429, retry_after)),
            ReplyResult::Unauthorized => return Err(status(401, None)),
            ReplyResult::PromptTooLong => return Err(ModelError::PromptTooLong("BAD".to_owned())),
        };
        Ok(Completion { text, finish_reason, usage: Usage::default(), tokens: 7, first_token: None })
    }
}

#[derive(Clone, Debug)]
struct Scenario {
    models: Vec<Vec<Reply>>,
    order: Order,
    deadline_ms: u64,
    requests: usize,
    max_concurrent_calls: usize,
}

fn scenarios() -> impl Strategy<Value = Scenario> {
    let result = prop_oneof![
        3 => Just(ReplyResult::Good),
        1 => Just(ReplyResult::Truncated),
        2 => Just(ReplyResult::StreamTruncated),
        1 => Just(ReplyResult::NonAnswer),
        2 => prop::option::of(0_u64..20_000).prop_map(ReplyResult::RateLimited),
        1 => Just(ReplyResult::Unauthorized),
        1 => Just(ReplyResult::PromptTooLong),
    ];
    let replies =
        vec((0_u64..15_000, result).prop_map(|(after_ms, result)| Reply { after_ms, result }), 1..6);
    let order = prop_oneof![Just(Order::Fallback), Just(Order::RoundRobin)];
    (vec(replies, 1..4), order, 1_u64..40_000, 1_usize..12, 1_usize..4).prop_map(
        |(models, order, deadline_ms, requests, max_concurrent_calls)| Scenario {
            models,
            order,
            deadline_ms,
            requests,
            max_concurrent_calls,
        },
    )
}

async fn run(scenario: Scenario) -> Result<(), TestCaseError> {
    let deadline = Duration::from_millis(scenario.deadline_ms);
    let (calls, max_running) = (Arc::default(), Arc::<AtomicUsize>::default());
    let mut specs = Vec::new();
    for (index, replies) in scenario.models.iter().enumerate() {
        let provider = RandomProvider {
            replies: replies.clone(),
            next_reply: AtomicUsize::new(0),
            calls: Arc::clone(&calls),
            running: AtomicUsize::new(0),
            max_running: Arc::clone(&max_running),
        };
        let settings = config::Model {
            retry_initial: SECOND / 2,
            retry_max: 10 * SECOND,
            max_concurrent_calls: scenario.max_concurrent_calls,
            max_queued_calls: 4,
            queue_timeout: 8 * SECOND,
            breaker_min_calls: 3,
            breaker_open_for: 5 * SECOND,
            ..settings()
        };
        specs.push(model(&format!("m{index}"), provider, settings));
    }
    let models = specs.iter().map(|spec| spec.name.clone()).collect();
    let pool = config::Pool { models, strategy: scenario.order, deadline };
    let pools = ModelPools::new(specs, &[("p".to_owned(), pool)].into(), prompts()).expect("valid");
    let entries = [entry("I fly on 3 May.")];
    let task = Task::Consolidate { lines: &entries, sentences: 5 };
    let started_at = Instant::now();
    let results = join_all((0..scenario.requests).map(|_| pools.complete("p", task))).await;
    prop_assert!(started_at.elapsed() <= deadline, "{:?}", started_at.elapsed());
    let mut counted_calls = 0;
    for result in &results {
        let cost = result.as_ref().map_or_else(|error| error.cost, |response| response.cost);
        counted_calls += usize::try_from(cost.calls).expect("few");
        match result {
            Ok(response) => {
                prop_assert!(response.text.starts_with("good reply "), "{}", response.text);
                prop_assert_eq!(cost.calls, cost.failures + 1);
            }
            Err(error) => {
                prop_assert_eq!(cost.calls, cost.failures);
                let sent = error.attempts.iter().filter(|attempt| attempt.error.was_sent()).count();
                prop_assert_eq!(sent, usize::try_from(cost.calls).expect("few"));
                let ended_by_deadline = error.attempts.iter().filter(|attempt| {
                    matches!(attempt.error, ModelError::Timeout(TimeoutPhase::Deadline, _))
                });
                prop_assert!(ended_by_deadline.count() <= 1, "an attempt after the deadline: {}", error);
            }
        }
    }
    let calls: Vec<(Instant, Instant)> = calls.lock().expect("not poisoned").clone();
    prop_assert_eq!(calls.len(), counted_calls);
    for (start, end) in calls {
        prop_assert!(start < started_at + deadline, "a call starts after the deadline");
        prop_assert!(end <= started_at + deadline, "a call exceeds the deadline");
    }
    prop_assert!(max_running.load(Ordering::Relaxed) <= scenario.max_concurrent_calls);
    Ok(())
}

#[test]
fn failed_texts_are_never_used_and_calls_stay_within_deadline_and_limit() {
    let config = Config { cases: 1000, failure_persistence: None, ..Config::default() };
    let result = TestRunner::new(config).run(&scenarios(), |scenario| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
        runtime.expect("a runtime").block_on(run(scenario))
    });
    result.unwrap_or_else(|error| panic!("{error}"));
}
