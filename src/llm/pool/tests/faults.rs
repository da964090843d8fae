//! What one question leaves behind for the next ones, over a clock that only moves when everybody waits.

use super::{Broken, entry, model, pool, prompts};
use crate::llm::circuit_breaker::CircuitBreakerPolicy;
use crate::llm::model::{ModelSpec, QueuePolicy, RetryPolicy};
use crate::llm::pool::ModelPools;
use crate::llm::provider::{Completion, Provider, Request};
use crate::llm::{Llm as _, LlmError, ModelError, PoolResponse, Task};
use async_trait::async_trait;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, sleep};

const SECOND: Duration = Duration::from_secs(1);

/// Fails with this cause after so long; without one it never answers.
#[derive(Debug)]
struct Failing(Duration, Option<ModelError>);

#[async_trait]
impl Provider for Failing {
    async fn complete(&self, _: &Request<'_>) -> Result<Completion, ModelError> {
        sleep(self.0).await;
        match self.1.clone() {
            Some(cause) => Err(cause),
            None => std::future::pending().await,
        }
    }
}

/// Closes its breaker to all after so many failures.
fn failing(after: Duration, cause: Option<ModelError>, min_calls: usize) -> ModelSpec {
    let breaker = CircuitBreakerPolicy {
        failure_percent: 50,
        min_calls,
        window: 3600 * SECOND,
        open_for: 3600 * SECOND,
    };
    let retry = RetryPolicy { retries: 0, initial: SECOND, max: 10 * SECOND };
    ModelSpec { provider: Arc::new(Failing(after, cause)), breaker, retry, ..model("m0", 100_000) }
}

fn pools(first: ModelSpec) -> ModelPools {
    let models = vec![first, model("works", 100_000)];
    ModelPools::new(models, vec![pool("alone", &["m0"]), pool("both", &["m0", "works"])], prompts())
        .expect("valid")
}

async fn ask(pools: &ModelPools, pool: &str) -> Result<PoolResponse, LlmError> {
    let entries = [entry(&"Ada lives in Berlin. She has two cats. ".repeat(100))];
    pools.complete(pool, Task::Consolidate { entries: &entries, sentences: 5 }).await
}

#[tokio::test(start_paused = true)]
async fn a_model_that_takes_the_whole_deadline_is_left_out_in_the_end() {
    let silent = failing(SECOND, None, 3);
    let pools = pools(ModelSpec { timeout: 600 * SECOND, ..silent });
    for _ in 0..3 {
        let error = ask(&pools, "both").await.expect_err("the first took all the time there was");
        assert_eq!(error.attempts.len(), 1, "{error}");
    }
    let answer = ask(&pools, "both").await.expect("the first is not asked any more");
    assert_eq!((answer.model.as_str(), answer.cost.calls), ("works", 1));
}

#[tokio::test(start_paused = true)]
async fn what_the_deadline_left_of_its_time_does_not_speak_against_a_model() {
    // The other one takes 15 of the 20 seconds.
    let slow = ModelSpec {
        provider: Arc::new(Failing(15 * SECOND, Some(ModelError::StreamTruncated))),
        ..model("m1", 100_000)
    };
    let slow = ModelSpec {
        timeout: 16 * SECOND,
        retry: RetryPolicy { retries: 0, initial: SECOND, max: SECOND },
        ..slow
    };
    let silent = ModelSpec { timeout: 15 * SECOND, ..failing(SECOND, None, 1) };
    let pools =
        ModelPools::new(vec![slow, silent], vec![pool("p", &["m1", "m0"])], prompts()).expect("valid");
    for _ in 0..2 {
        let error = ask(&pools, "p").await.expect_err("no answer");
        let names: Vec<&str> = error.attempts.iter().map(|attempt| attempt.cause.name()).collect();
        assert_eq!(names, ["broken_off", "timeout"]);
    }
}

#[tokio::test(start_paused = true)]
async fn nobody_waits_for_leave_of_a_server_whose_breaker_is_open() {
    let busy = ModelError::Status { status: 429, message: String::new(), retry_after: Some(8 * SECOND) };
    let queue = QueuePolicy { max_calls: 1, max_waiting: 9, timeout: 30 * SECOND };
    let pools = pools(ModelSpec { queue, ..failing(SECOND, Some(busy), 1) });
    let began = Instant::now();
    let (one, two) = tokio::join!(ask(&pools, "alone"), ask(&pools, "alone"));
    let causes = [one, two].map(|asked| asked.expect_err("busy").attempts[0].cause.name());
    assert_eq!(causes, ["rate_limited", "breaker_open"]);
    assert!(began.elapsed() < 2 * SECOND, "{:?}", began.elapsed());
}

#[tokio::test(start_paused = true)]
async fn what_is_not_sent_is_no_call() {
    let pools = pools(failing(Duration::ZERO, Some(ModelError::SecretUnavailable("gone".to_owned())), 9));
    let cost = ask(&pools, "alone").await.expect_err("no key").cost;
    assert_eq!((cost.calls, cost.failures), (0, 0));
    let cost = ask(&pools, "both").await.expect("the second").cost;
    assert_eq!((cost.calls, cost.failures), (1, 0));
}

#[tokio::test(start_paused = true)]
async fn a_learned_limit_is_tried_again_in_time() {
    let pools = pools(failing(Duration::ZERO, Some(ModelError::PromptTooLong("odd".to_owned())), 9));
    let full = pools.capacity("alone");
    for _ in 0..9 {
        ask(&pools, "alone").await.expect_err("too long");
    }
    let learned = pools.capacity("alone");
    assert!(learned * 50 < full, "{learned} of {full}");
    sleep(3599 * SECOND).await;
    assert_eq!(pools.capacity("alone"), learned);
    sleep(SECOND).await;
    assert!((2 * learned..full / 10).contains(&pools.capacity("alone")));
    sleep(24 * 3600 * SECOND).await;
    assert_eq!(pools.capacity("alone"), full);
}

#[test]
fn what_is_learned_is_not_waited_for_past_the_deadline() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().max_blocking_threads(1).build();
    runtime.expect("a runtime").block_on(async {
        let (release, held) = std::sync::mpsc::channel::<()>();
        let busy = tokio::task::spawn_blocking(move || held.recv_timeout(5 * SECOND));
        let models = vec![failing(Duration::ZERO, Some(ModelError::PromptTooLong("odd".to_owned())), 9)];
        let short = crate::llm::pool::PoolSpec { deadline: SECOND / 5, ..pool("p", &["m0"]) };
        let pools = ModelPools::new(models, vec![short], prompts()).expect("valid");
        let began = Instant::now();
        assert!(ask(&pools, "p").await.expect_err("too long").is_too_long());
        assert!(began.elapsed() < 3 * SECOND, "{:?}", began.elapsed());
        drop(release);
        busy.await.expect("it ends").expect_err("nothing was sent");
    });
}

#[tokio::test(start_paused = true)]
async fn a_question_that_goes_away_in_any_place_leaves_nothing() {
    let queue = QueuePolicy { max_calls: 1, max_waiting: 1, timeout: 30 * SECOND };
    let retry = RetryPolicy { retries: 3, initial: SECOND, max: 3 * SECOND };
    let broken = ModelSpec { provider: Arc::new(Broken), queue, retry, ..failing(SECOND, None, 2) };
    let broken =
        ModelSpec { breaker: CircuitBreakerPolicy { open_for: SECOND / 2, ..broken.breaker }, ..broken };
    let recorder = metrics_exporter_prometheus::PrometheusBuilder::new().build_recorder();
    let pools = metrics::with_local_recorder(&recorder, || pools(broken));
    for millis in 0..100_u64 {
        let patience = Duration::from_millis(millis * 37);
        let first = tokio::time::timeout(patience, ask(&pools, "alone"));
        let second = tokio::time::timeout(patience / 2, ask(&pools, "alone"));
        let _ = tokio::join!(first, second);
    }
    sleep(20 * SECOND).await;
    let error = ask(&pools, "alone").await.expect_err("broken");
    assert_eq!(error.attempts[0].cause, ModelError::StreamTruncated, "the probe is made: {error}");
    let metrics = recorder.handle().render();
    for gauge in ["calls_in_flight", "calls_waiting"] {
        let line = format!("precis_llm_{gauge}{{model=\"m0\"}} 0\n");
        assert!(metrics.contains(&line), "{line} in {metrics}");
    }
}
