//! Property test with random behaviour of models and a paused clock: a rejected or failed text is never used, no call
//! starts after the deadline or exceeds the concurrency limit, and the cost is complete.

use super::{Reply, SECOND, Scripted, answer, entry, failure, models, prompts, settings, status};
use crate::config;
use crate::domain::consolidation::SummaryLimit;
use crate::llm::error::TimeoutPhase;
use crate::llm::pool::{ModelPools, Strategy as Order};
use crate::llm::provider::FinishReason;
use crate::llm::{Llm as _, ModelError, Task};
use futures_util::future::join_all;
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use std::time::Duration;
use tokio::time::Instant;

#[derive(Clone, Debug)]
struct Scenario {
    /// The replies of each model, which it repeats forever.
    models: Vec<Vec<Reply>>,
    order: Order,
    deadline_ms: u64,
    requests: usize,
    max_concurrent_calls: usize,
}

fn scenarios() -> impl Strategy<Value = Scenario> {
    let rate_limited = prop::option::of(0_u64..20_000)
        .prop_map(|retry_after| status(429, retry_after.map(Duration::from_millis)));
    let reply = prop_oneof![
        3 => Just(answer("good reply")),
        1 => Just(Reply { result: Ok(("BAD reply", FinishReason::Length)), ..answer("") }),
        2 => Just(failure(ModelError::StreamTruncated)),
        1 => Just(answer("none")),
        2 => rate_limited,
        1 => Just(status(401, None)),
        1 => Just(failure(ModelError::PromptTooLong)),
    ];
    let reply =
        (0_u64..15_000, reply).prop_map(|(after_ms, reply)| reply.after(Duration::from_millis(after_ms)));
    let order = prop_oneof![Just(Order::Fallback), Just(Order::RoundRobin)];
    (vec(vec(reply, 1..6), 1..4), order, 1_u64..40_000, 1_usize..12, 1_usize..4).prop_map(
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
    let providers: Vec<Scripted> = scenario.models.into_iter().map(Scripted::repeating).collect();
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
    let specs = models(&providers, &settings);
    let models = specs.iter().map(|spec| spec.name.clone()).collect();
    let pool = config::Pool { models, strategy: scenario.order, deadline };
    let pools = ModelPools::new(
        specs,
        &[("p".to_owned(), pool)].into(),
        prompts(),
        super::CallMemoryLimit::new(usize::MAX, 1.0),
    );
    let entries = [entry("I fly on 3 May.")];
    let task =
        Task::Consolidate { lines: &entries, previous: "", sentences: 5, limit: SummaryLimit::Words(600) };
    let started_at = Instant::now();
    let results = join_all((0..scenario.requests).map(|_| pools.complete("p", task))).await;
    prop_assert!(started_at.elapsed() <= deadline, "{:?}", started_at.elapsed());
    let mut counted_calls = 0;
    for result in &results {
        let cost = result.as_ref().map_or_else(|error| error.cost, |response| response.cost);
        counted_calls += usize::try_from(cost.calls).expect("few");
        match result {
            Ok(response) => {
                prop_assert_eq!(&response.text, "good reply");
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
    let calls: Vec<Instant> = providers.iter().flat_map(Scripted::calls).collect();
    prop_assert_eq!(calls.len(), counted_calls);
    prop_assert!(
        calls.iter().all(|start| *start < started_at + deadline),
        "a call starts after the deadline"
    );
    for provider in &providers {
        let script = provider.script();
        prop_assert!(script.max_running <= scenario.max_concurrent_calls);
        prop_assert_eq!(script.running, 0, "a call exceeds the deadline");
    }
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
