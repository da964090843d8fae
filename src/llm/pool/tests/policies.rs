//! One test for each policy of pools and models.

use super::{
    SECOND, Scripted, answer, built_in, consolidate, entry, failure, labels, model, models, pool, pool_of,
    pools, settings, silence, status,
};
use crate::config;
use crate::domain::consolidation::SummaryLimit;
use crate::domain::transcript::TranscriptLine;
use crate::llm::error::TimeoutPhase;
use crate::llm::model::ModelSpec;
use crate::llm::pool::{ModelPools, Strategy};
use crate::llm::provider::FinishReason;
use crate::llm::{Llm as _, ModelError, PoolResponse, Task};
use futures_util::future::{join, join_all};
use std::time::Duration;
use tokio::time::{Instant, sleep, timeout};

const HOUR: Duration = Duration::from_hours(1);

/// Settings without retries, with a circuit breaker that stays open for an hour after `min_calls` failures.
fn without_retries(min_calls: usize) -> config::Model {
    config::Model {
        retries: 0,
        retry_max: 10 * SECOND,
        breaker_min_calls: min_calls,
        breaker_window: HOUR,
        breaker_open_for: HOUR,
        ..settings()
    }
}

/// The pools "alone", with the model "m0", and "both", with "m0" and a second model that works.
fn alone_and_both(first: ModelSpec) -> ModelPools {
    let pools = [("alone", pool(&["m0"])), ("both", pool(&["m0", "works"]))];
    super::pools(vec![first, built_in("works", 100_000)], pools)
}

fn model_and_calls(response: &PoolResponse) -> (&str, u32) {
    (response.model.as_str(), response.cost.calls)
}

// Deadline and order

#[tokio::test(start_paused = true)]
async fn deadline_covers_all_models_together() {
    let providers = [Scripted::new(silence()), Scripted::new(silence()), Scripted::new(silence())];
    let pools = pool_of(models(&providers, &config::Model { timeout: 15 * SECOND, ..settings() }));
    let started_at = Instant::now();
    let error = consolidate(&pools, "p").await.expect_err("all models are silent");
    assert_eq!(started_at.elapsed(), 20 * SECOND);
    let errors: Vec<ModelError> = error.attempts.iter().map(|attempt| attempt.error.clone()).collect();
    assert_eq!(
        errors,
        [
            ModelError::Timeout(TimeoutPhase::Total, 15 * SECOND),
            ModelError::Timeout(TimeoutPhase::Deadline, 5 * SECOND)
        ]
    );
    assert!(providers[2].calls().is_empty(), "no time is left for the third model");
}

#[tokio::test(start_paused = true)]
async fn round_robin_starts_each_request_with_the_next_model() {
    let providers = [answer("good"), status(401, None), answer("good")].map(Scripted::new);
    let pool = config::Pool { strategy: Strategy::RoundRobin, ..pool(&["m0", "m1", "m2"]) };
    let pools = pools(models(&providers, &settings()), [("p", pool)]);
    let mut used = Vec::new();
    for _ in 0..6 {
        used.push(consolidate(&pools, "p").await.expect("a response").model);
    }
    assert_eq!(used, ["m0", "m2", "m2", "m0", "m2", "m2"]);
    assert_eq!(providers.each_ref().map(|provider| provider.calls().len()), [2, 2, 4]);
}

#[tokio::test(start_paused = true)]
async fn error_lists_every_attempt() {
    let connection = failure(ModelError::Connection("refused".to_owned()));
    let providers = [status(503, None), connection, answer("n/a")].map(Scripted::new);
    let models = models(&providers, &config::Model { retries: 1, ..settings() });
    let error = consolidate(&pool_of(models), "p").await.expect_err("all models fail");
    let (server_error, connection) = ("server_error", "connection");
    assert_eq!(
        labels(&error),
        [
            ("m0", server_error),
            ("m0", server_error),
            ("m1", connection),
            ("m1", connection),
            ("m2", "rejected")
        ]
    );
    assert_eq!(
        error.to_string(),
        "all models of pool \"p\" failed: m0: status 503: BAD (after 0.0ns); m0: status 503: BAD (after 0.0ns); \
         m1: connection failed: refused (after 0.0ns); m1: connection failed: refused (after 0.0ns); \
         m2: response rejected: a bare \"none\" (after 0.0ns)"
    );
    assert_eq!((error.cost.calls, error.cost.failures), (5, 5));
}

// Retries

#[tokio::test(start_paused = true)]
async fn retry_delays_double_up_to_the_maximum_with_jitter() {
    let provider = Scripted::new(status(500, None));
    let (retry_initial, retry_max) = (SECOND / 20, SECOND / 5);
    let settings = config::Model { retries: 4, retry_initial, retry_max, ..settings() };
    consolidate(&pool_of(vec![model("m0", provider.clone(), settings)]), "p").await.expect_err("it fails");
    let delays: Vec<Duration> = provider.calls().windows(2).map(|pair| pair[1] - pair[0]).collect();
    for (delay, min) in delays.iter().zip([SECOND / 20, SECOND / 10, retry_max, retry_max]) {
        // The clock has a resolution of one millisecond.
        let max = (2 * min).min(retry_max) + SECOND / 500;
        assert!((min..=max).contains(delay), "{delays:?}");
    }
    assert_eq!(delays.len(), 4);
}

#[tokio::test(start_paused = true)]
async fn retry_after_of_one_request_applies_to_all_requests() {
    let provider = Scripted::new(answer("good"));
    provider.push(status(429, Some(7 * SECOND)));
    let pools = pool_of(vec![model("m0", provider.clone(), without_retries(9))]);
    consolidate(&pools, "p").await.expect_err("no retries");
    let (one, two) = join(consolidate(&pools, "p"), consolidate(&pools, "p")).await;
    assert_eq!((one.expect("a response").cost.calls, two.expect("a response").cost.calls), (1, 1));
    let calls = provider.calls();
    assert_eq!(calls.len(), 3);
    assert!(calls[1..].iter().all(|call| *call - calls[0] >= 7 * SECOND), "{calls:?}");
}

#[tokio::test(start_paused = true)]
async fn retry_after_is_not_waited_for_if_there_is_another_model() {
    let (first, second) = (Scripted::new(answer("good")), Scripted::new(answer("good")));
    first.push(status(429, Some(19 * SECOND)));
    let settings = config::Model { retry_max: 60 * SECOND, ..without_retries(9) };
    let models = vec![model("m0", first.clone(), settings.clone()), model("m1", second.clone(), settings)];
    let pools = pool_of(models);
    let started_at = Instant::now();
    for _ in 0..3 {
        assert_eq!(consolidate(&pools, "p").await.expect("a response").model, "m1");
    }
    assert_eq!((first.calls().len(), second.calls().len()), (1, 3));
    assert_eq!(started_at.elapsed(), Duration::ZERO);
}

#[tokio::test(start_paused = true)]
async fn retry_delay_beyond_the_deadline_is_not_started() {
    let provider = Scripted::new(status(503, Some(20 * SECOND)));
    let settings = config::Model { retry_max: 60 * SECOND, ..settings() };
    let pools = alone_and_both(model("m0", provider, settings));
    let started_at = Instant::now();
    assert_eq!(model_and_calls(&consolidate(&pools, "both").await.expect("a response")), ("works", 2));
    let error = consolidate(&pools, "alone").await.expect_err("rate limited");
    assert_eq!(labels(&error), [("m0", "retry_later")]);
    assert_eq!(started_at.elapsed(), Duration::ZERO);
}

#[tokio::test(start_paused = true)]
async fn attempt_without_secret_is_not_counted_as_a_call() {
    let error = ModelError::SecretUnavailable("missing".to_owned());
    let pools = alone_and_both(model("m0", Scripted::new(failure(error)), without_retries(9)));
    let cost = consolidate(&pools, "alone").await.expect_err("no secret").cost;
    assert_eq!((cost.calls, cost.failures), (0, 0));
    let cost = consolidate(&pools, "both").await.expect("the second model").cost;
    assert_eq!((cost.calls, cost.failures), (1, 0));
}

// Concurrency limit

#[tokio::test(start_paused = true)]
async fn calls_beyond_the_concurrency_limit_are_queued() {
    let provider = Scripted::new(answer("good").after(SECOND));
    let settings = config::Model {
        max_concurrent_calls: 4,
        max_queued_calls: 100,
        queue_timeout: 20 * SECOND,
        ..settings()
    };
    let pools = pool_of(vec![model("m0", provider.clone(), settings)]);
    let started_at = Instant::now();
    let responses = join_all((0..60).map(|_| consolidate(&pools, "p"))).await;
    assert!(responses.iter().all(Result::is_ok));
    assert_eq!(started_at.elapsed(), 15 * SECOND);
    let script = provider.script();
    assert_eq!((script.max_running, script.calls.len()), (4, 60));
    let queued = responses.iter().flatten().map(|response| response.cost.queued).max();
    assert_eq!(queued, Some(14 * SECOND));
}

#[tokio::test(start_paused = true)]
async fn full_queue_leads_to_the_next_model() {
    let settings = config::Model {
        max_concurrent_calls: 1,
        max_queued_calls: 1,
        queue_timeout: 20 * SECOND,
        ..settings()
    };
    let pools = alone_and_both(model("m0", Scripted::new(answer("good").after(SECOND)), settings));
    let responses = join_all((0..3).map(|_| consolidate(&pools, "both"))).await;
    let models: Vec<(&str, u32)> =
        responses.iter().map(|response| model_and_calls(response.as_ref().expect("a response"))).collect();
    assert_eq!(models, [("m0", 1), ("m0", 1), ("works", 1)]);
}

#[tokio::test(start_paused = true)]
async fn queue_timeout_fails_the_attempt_without_a_call() {
    let provider = Scripted::new(answer("good").after(5 * SECOND));
    let settings = config::Model { max_concurrent_calls: 1, queue_timeout: 2 * SECOND, ..settings() };
    let pools = pool_of(vec![model("m0", provider.clone(), settings)]);
    let (first, second) = join(consolidate(&pools, "p"), consolidate(&pools, "p")).await;
    first.expect("a response");
    let error = second.expect_err("no free call slot");
    assert_eq!(labels(&error), [("m0", "queue_timeout")]);
    assert_eq!((error.cost.queued, error.cost.duration), (2 * SECOND, 2 * SECOND));
    assert_eq!(provider.calls().len(), 1);
}

// Circuit breaker

fn settings_with_short_breaker() -> config::Model {
    config::Model {
        retries: 1,
        retry_initial: SECOND / 100,
        breaker_min_calls: 4,
        breaker_open_for: 6 * SECOND,
        ..settings()
    }
}

#[tokio::test(start_paused = true)]
async fn failing_model_is_skipped_then_probed_and_used_again_after_a_success() {
    let provider = Scripted::new(status(500, None));
    let pools = alone_and_both(model("m0", provider.clone(), settings_with_short_breaker()));
    let complete = async || consolidate(&pools, "both").await.expect("a response");
    let mut calls = Vec::new();
    for _ in 0..4 {
        calls.push(complete().await.cost.calls);
    }
    assert_eq!(calls, [3, 3, 1, 1], "two calls of the first model each, until there were four");

    // A failed probe keeps the circuit breaker open.
    sleep(6 * SECOND).await;
    assert_eq!(complete().await.cost.calls, 2);
    assert_eq!(complete().await.cost.calls, 1);
    assert_eq!(provider.calls().len(), 5);

    provider.default(answer("good"));
    assert_eq!(complete().await.model, "works", "the circuit breaker is still open");
    sleep(6 * SECOND).await;
    for _ in 0..3 {
        assert_eq!(model_and_calls(&complete().await), ("m0", 1));
    }
}

#[tokio::test(start_paused = true)]
async fn half_open_breaker_admits_one_of_many_concurrent_requests() {
    let provider = Scripted::new(status(500, None));
    let pools = alone_and_both(model("m0", provider.clone(), settings_with_short_breaker()));
    for _ in 0..2 {
        consolidate(&pools, "both").await.expect("the second model");
    }
    provider.default(answer("good").after(SECOND));
    sleep(6 * SECOND).await;
    let responses = join_all((0..20).map(|_| consolidate(&pools, "both"))).await;
    let probes = responses.iter().filter(|response| response.as_ref().expect("a response").model == "m0");
    assert_eq!((probes.count(), provider.calls().len()), (1, 5));
}

#[tokio::test(start_paused = true)]
async fn failures_that_depend_on_the_conversation_do_not_open_the_breaker() {
    let provider = Scripted::new(answer("good"));
    let pools = alone_and_both(model("m0", provider.clone(), settings_with_short_breaker()));
    for _ in 0..3 {
        let mut truncated = answer("HALF");
        truncated.result = Ok(("HALF", FinishReason::Length));
        let too_long = failure(ModelError::PromptTooLong);
        for reply in [answer("none"), truncated, status(400, None), too_long] {
            provider.push(reply);
            match consolidate(&pools, "both").await {
                Ok(response) => assert_eq!(response.model, "works"),
                // The caller divides the material.
                Err(error) => assert!(error.is_prompt_too_long(), "{error}"),
            }
        }
    }
    assert_eq!(consolidate(&pools, "both").await.expect("the first model").model, "m0");
}

#[tokio::test(start_paused = true)]
async fn open_breaker_of_the_only_model_fails_without_a_call() {
    let provider = Scripted::new(status(401, None));
    let pools = pool_of(vec![model("m0", provider.clone(), without_retries(1))]);
    consolidate(&pools, "p").await.expect_err("unauthorized");
    let error = consolidate(&pools, "p").await.expect_err("open");
    assert_eq!(labels(&error), [("m0", "breaker_open")]);
    assert_eq!((error.cost.calls, provider.calls().len()), (0, 1));
    let text = error.to_string();
    assert!(
        text.contains("m0: skipped: the circuit breaker is open after repeated failures; next probe in 3600")
    );
}

#[tokio::test(start_paused = true)]
async fn model_that_uses_up_the_deadline_opens_its_breaker() {
    let settings = config::Model { timeout: 600 * SECOND, ..without_retries(3) };
    let pools = alone_and_both(model("m0", Scripted::new(silence()), settings));
    for _ in 0..3 {
        let error = consolidate(&pools, "both").await.expect_err("the first model used up the deadline");
        assert_eq!(error.attempts.len(), 1, "{error}");
    }
    assert_eq!(model_and_calls(&consolidate(&pools, "both").await.expect("a response")), ("works", 1));
}

#[tokio::test(start_paused = true)]
async fn timeout_after_a_short_rest_of_the_deadline_does_not_count_against_the_model() {
    // The first model takes 15 of the 20 seconds.
    let slow = Scripted::new(failure(ModelError::StreamTruncated).after(15 * SECOND));
    let slow = model("m1", slow, config::Model { timeout: 16 * SECOND, retries: 0, ..settings() });
    let settings = config::Model { timeout: 15 * SECOND, ..without_retries(1) };
    let pools = pool_of(vec![slow, model("m0", Scripted::new(silence()), settings)]);
    for _ in 0..2 {
        let error = consolidate(&pools, "p").await.expect_err("both fail");
        assert_eq!(labels(&error), [("m1", "truncated_stream"), ("m0", "timeout")]);
    }
}

#[tokio::test(start_paused = true)]
async fn queued_call_fails_at_once_when_the_breaker_opens() {
    let busy = status(429, Some(8 * SECOND)).after(SECOND);
    let settings =
        config::Model { max_concurrent_calls: 1, queue_timeout: 30 * SECOND, ..without_retries(1) };
    let pools = pool_of(vec![model("m0", Scripted::new(busy), settings)]);
    let started_at = Instant::now();
    let (one, two) = join(consolidate(&pools, "p"), consolidate(&pools, "p")).await;
    assert_eq!(labels(&one.expect_err("busy")), [("m0", "rate_limited")]);
    assert_eq!(labels(&two.expect_err("busy")), [("m0", "breaker_open")]);
    assert!(started_at.elapsed() < 2 * SECOND, "{:?}", started_at.elapsed());
}

#[tokio::test(start_paused = true)]
async fn only_models_that_cost_nothing_are_called_if_no_tokens_are_left() {
    let (paid, local) = (Scripted::new(answer("paid")), Scripted::new(answer("local")));
    let free = config::Model { input_price: Some(0.0), output_price: Some(0.0), ..settings() };
    let specs = || vec![model("paid", paid.clone(), settings()), model("local", local.clone(), free.clone())];
    let with_built_in = specs().into_iter().chain([built_in("extractive", 50_000)]).collect();
    let entries = [entry(&"Ada lives in Berlin. She has two cats. ".repeat(20))];
    let limit = SummaryLimit::Words(600);
    let task = Task::Consolidate { lines: &entries, previous: "", sentences: 5, limit };
    let response = pool_of(with_built_in).complete_free("p", task).await.expect("free models");
    assert_eq!(response.expect("a response").model, "local");
    let only_built_in =
        pool_of(vec![model("paid", paid.clone(), settings()), built_in("extractive", 50_000)]);
    let response = only_built_in.complete_free("p", task).await.expect("a free model");
    assert_eq!(response.expect("a response").model, "extractive");
    let only_paid = pool_of(vec![model("paid", paid.clone(), settings())]);
    assert!(only_paid.complete_free("p", task).await.is_none() && paid.calls().is_empty());
}

// Input limits

fn long_conversation() -> Vec<TranscriptLine> {
    (0..200).map(|seq| entry(&format!("Message {seq}: Ada moves the meeting to {seq} o'clock."))).collect()
}

#[tokio::test(start_paused = true)]
async fn prompt_that_is_too_long_is_divided_for_the_same_model() {
    let small = Scripted::new(answer("good"));
    small.push(failure(ModelError::PromptTooLong));
    let (smaller, large) = (Scripted::new(answer("good")), Scripted::new(answer("good")));
    let limited = |name: &str, provider: &Scripted, input_limit| {
        model(name, provider.clone(), config::Model { input_limit, ..settings() })
    };
    let pools = pool_of(vec![
        limited("small", &small, 50_000),
        limited("smaller", &smaller, 40_000),
        limited("large", &large, 60_000),
    ]);
    let capacity = pools.capacity("p");
    let entries = long_conversation();
    let task =
        Task::Consolidate { lines: &entries, previous: "", sentences: 5, limit: SummaryLimit::Words(600) };
    let error = pools.complete("p", task).await.expect_err("the caller divides the batch");
    assert_eq!(labels(&error), [("small", "too_long")]);
    assert!(smaller.calls().is_empty() && large.calls().is_empty());
    assert!(pools.capacity("p") < capacity / 4, "{} of {capacity}", pools.capacity("p"));
    assert_eq!(consolidate(&pools, "p").await.expect("a response").model, "small");
}

#[tokio::test(start_paused = true)]
async fn prompt_that_is_too_long_for_all_models_lowers_the_capacity_to_a_minimum() {
    let provider = Scripted::new(failure(ModelError::PromptTooLong));
    let smaller = config::Model { input_limit: 90_000, ..settings() };
    let pools = pool_of(vec![model("m0", provider.clone(), settings()), model("m1", provider, smaller)]);
    let entries = long_conversation();
    let task =
        Task::Consolidate { lines: &entries, previous: "", sentences: 5, limit: SummaryLimit::Words(600) };
    let error = pools.complete("p", task).await.expect_err("too long");
    assert_eq!(labels(&error), [("m0", "too_long")]);
    assert!(error.is_prompt_too_long());
    let mut capacities = vec![pools.capacity("p")];
    for _ in 0..20 {
        pools.complete("p", task).await.expect_err("too long");
        capacities.push(pools.capacity("p"));
    }
    assert!(
        capacities.is_sorted_by(|a, b| a >= b) && capacities.ends_with(&[capacities[20]; 15]),
        "{capacities:?}"
    );
    assert!(capacities[20] > 200, "{capacities:?}");
    // Smaller material does not help any more, so the other model gets it.
    let error = pools.complete("p", task).await.expect_err("too long");
    assert_eq!(labels(&error), [("m0", "too_long"), ("m1", "too_small")]);
}

#[tokio::test(start_paused = true)]
async fn observed_input_limit_doubles_every_hour_up_to_the_configured_limit() {
    let too_long = Scripted::new(failure(ModelError::PromptTooLong));
    let pools = pool_of(vec![model("m0", too_long, without_retries(9))]);
    let configured = pools.capacity("p");
    for _ in 0..9 {
        consolidate(&pools, "p").await.expect_err("too long");
    }
    let observed = pools.capacity("p");
    assert!(observed * 50 < configured, "{observed} of {configured}");
    sleep(Duration::from_secs(3599)).await;
    assert_eq!(pools.capacity("p"), observed);
    sleep(SECOND).await;
    assert!((2 * observed..configured / 10).contains(&pools.capacity("p")));
    sleep(24 * HOUR).await;
    assert_eq!(pools.capacity("p"), configured);
}

#[test]
fn counting_a_rejected_prompt_does_not_exceed_the_deadline() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().max_blocking_threads(1).build();
    runtime.expect("a runtime").block_on(async {
        let (release, held) = std::sync::mpsc::channel::<()>();
        let busy = tokio::task::spawn_blocking(move || held.recv_timeout(5 * SECOND));
        let too_long = Scripted::new(failure(ModelError::PromptTooLong));
        let pool = config::Pool { deadline: SECOND / 5, ..pool(&["m0"]) };
        let pools = pools(vec![model("m0", too_long, without_retries(9))], [("p", pool)]);
        let started_at = Instant::now();
        assert!(consolidate(&pools, "p").await.expect_err("too long").is_prompt_too_long());
        assert!(started_at.elapsed() < 3 * SECOND, "{:?}", started_at.elapsed());
        drop(release);
        busy.await.expect("it ends").expect_err("nothing was sent");
    });
}

// Cancellation

#[tokio::test(start_paused = true)]
async fn cancelled_request_leaves_no_state_behind() {
    let broken = Scripted::new(failure(ModelError::StreamTruncated));
    let settings = config::Model {
        max_concurrent_calls: 1,
        max_queued_calls: 1,
        queue_timeout: 30 * SECOND,
        retries: 3,
        retry_max: 3 * SECOND,
        breaker_open_for: SECOND / 2,
        ..without_retries(2)
    };
    let recorder = metrics_exporter_prometheus::PrometheusBuilder::new().build_recorder();
    let pools =
        metrics::with_local_recorder(&recorder, || pool_of(vec![model("m0", broken.clone(), settings)]));
    for millis in 0..100_u64 {
        let cancel_after = Duration::from_millis(millis * 37);
        let first = timeout(cancel_after, consolidate(&pools, "p"));
        let second = timeout(cancel_after / 2, consolidate(&pools, "p"));
        let _ = tokio::join!(first, second);
    }
    sleep(20 * SECOND).await;
    let error = consolidate(&pools, "p").await.expect_err("broken");
    assert_eq!(error.attempts[0].error, ModelError::StreamTruncated, "the probe is made: {error}");
    let metrics = recorder.handle().render();
    for gauge in ["calls_in_flight", "calls_waiting"] {
        let line = format!("precis_llm_{gauge}{{model=\"m0\"}} 0\n");
        assert!(metrics.contains(&line), "{line} in {metrics}");
    }
}
