//! The policies of pools and models, with scripted providers and a paused clock: order, retries, deadline, queue,
//! circuit breaker and limits. `tests/providers.rs` shows how the behaviour of a server becomes a [`ModelError`].

mod policies;
mod random;

use super::*;
use crate::domain::consolidation::SummaryLimit;
use crate::domain::message::Role;
use crate::domain::transcript::{TranscriptEntry, TranscriptLine};
use crate::llm::provider::{Completion, Extractive, FinishReason, Provider, Request};
use crate::llm::usage::{CallTokens, Usage};
use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard};
use tokio::time::sleep;

const SECOND: Duration = Duration::from_secs(1);

fn prompts() -> Prompts {
    Prompts::new(&config::Prompts::default()).expect("the built-in prompts are valid")
}

/// Settings with two retries after 1 s and up to 4 s, and with a circuit breaker that opens after five calls.
fn settings() -> config::Model {
    config::Model {
        timeout: 10 * SECOND,
        idle_timeout: SECOND,
        retries: 2,
        retry_initial: SECOND,
        retry_max: 4 * SECOND,
        max_concurrent_calls: 8,
        max_queued_calls: 8,
        queue_timeout: SECOND,
        breaker_min_calls: 5,
        breaker_window: 60 * SECOND,
        breaker_open_for: 30 * SECOND,
        ..config::Model::default()
    }
}

fn model(name: &str, provider: impl Provider + 'static, settings: config::Model) -> ModelSpec {
    ModelSpec { name: name.to_owned(), provider: Arc::new(provider), settings }
}

/// The models "m0", "m1", … of these providers.
fn models(providers: &[Scripted], settings: &config::Model) -> Vec<ModelSpec> {
    let models = providers.iter().enumerate();
    models.map(|(index, provider)| model(&format!("m{index}"), provider.clone(), settings.clone())).collect()
}

fn built_in(name: &str, input_limit: usize) -> ModelSpec {
    model(name, Extractive, config::Model { input_limit, max_queued_calls: 100, ..settings() })
}

/// A pool with a deadline of 20 s.
fn pool(models: &[&str]) -> config::Pool {
    let models = models.iter().map(|&name| name.to_owned()).collect();
    config::Pool { models, strategy: Strategy::Fallback, deadline: 20 * SECOND }
}

fn pools<const N: usize>(models: Vec<ModelSpec>, pools: [(&str, config::Pool); N]) -> ModelPools {
    let pools = pools.into_iter().map(|(name, pool)| (name.to_owned(), pool)).collect();
    ModelPools::new(models, &pools, prompts(), CallMemoryLimit::new(usize::MAX, 1.0))
}

/// One pool, "p", with all of the models.
fn pool_of(models: Vec<ModelSpec>) -> ModelPools {
    let names: Vec<String> = models.iter().map(|model| model.name.clone()).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let pool = pool(&names);
    pools(models, [("p", pool)])
}

fn entry(text: &str) -> TranscriptLine {
    TranscriptEntry { role: Role::User, name: None, text: text.to_owned(), calls: Vec::new() }.into()
}

async fn consolidate(pools: &ModelPools, pool: &str) -> Result<PoolResponse, LlmError> {
    let entries = [entry(&"Ada lives in Berlin. She has two cats. ".repeat(20))];
    pools
        .complete(
            pool,
            Task::Consolidate {
                lines: &entries,
                previous: "",
                sentences: 5,
                limit: SummaryLimit::Words(600),
            },
        )
        .await
}

/// The models of the attempts, and the labels of their errors.
fn labels(error: &LlmError) -> Vec<(&str, &'static str)> {
    error.attempts.iter().map(|attempt| (attempt.model.as_str(), attempt.error.label())).collect()
}

/// The reaction of a scripted provider to one call.
#[derive(Clone, Debug)]
struct Reply {
    after: Duration,
    result: Result<(&'static str, FinishReason), ModelError>,
}

fn answer(text: &'static str) -> Reply {
    Reply { after: Duration::ZERO, result: Ok((text, FinishReason::Complete)) }
}

fn failure(error: ModelError) -> Reply {
    Reply { after: Duration::ZERO, result: Err(error) }
}

fn status(status: u16, retry_after: Option<Duration>) -> Reply {
    failure(ModelError::Status { status, code: None, problem: "BAD", retry_after })
}

fn silence() -> Reply {
    answer("late").after(86_400 * SECOND)
}

impl Reply {
    fn after(self, after: Duration) -> Self {
        Self { after, ..self }
    }
}

/// A provider that plays a script and then repeats its default replies. Each call costs 7 tokens.
#[derive(Clone, Debug)]
struct Scripted(Arc<Mutex<Script>>);

#[derive(Debug)]
struct Script {
    next: VecDeque<Reply>,
    default: Vec<Reply>,
    /// Start of each call.
    calls: Vec<Instant>,
    running: usize,
    max_running: usize,
}

impl Scripted {
    fn new(default: Reply) -> Self {
        Self::repeating(vec![default])
    }

    fn repeating(default: Vec<Reply>) -> Self {
        let next = VecDeque::new();
        Self(Arc::new(Mutex::new(Script { next, default, calls: Vec::new(), running: 0, max_running: 0 })))
    }

    fn script(&self) -> MutexGuard<'_, Script> {
        self.0.lock().expect("not poisoned")
    }

    fn push(&self, reply: Reply) {
        self.script().next.push_back(reply);
    }

    fn default(&self, reply: Reply) {
        self.script().default = vec![reply];
    }

    fn calls(&self) -> Vec<Instant> {
        self.script().calls.clone()
    }
}

/// Counts a running call until it ends or is cancelled.
struct RunningCall<'a>(&'a Scripted);

impl Drop for RunningCall<'_> {
    fn drop(&mut self) {
        self.0.script().running -= 1;
    }
}

#[async_trait]
impl Provider for Scripted {
    async fn complete(&self, _: &Request<'_>) -> Result<Completion, ModelError> {
        let Reply { after, result } = {
            let mut script = self.script();
            script.calls.push(Instant::now());
            script.running += 1;
            script.max_running = script.max_running.max(script.running);
            let number = (script.calls.len() - 1) % script.default.len();
            script.next.pop_front().unwrap_or_else(|| script.default[number].clone())
        };
        let _running = RunningCall(self);
        sleep(after).await;
        let (text, finish_reason) = result?;
        let usage = Usage::default();
        Ok(Completion {
            text: text.to_owned(),
            finish_reason,
            usage,
            tokens: CallTokens { input: 5, output: 2 },
            first_token: None,
        })
    }
}

#[test]
fn capacity_of_a_pool_is_that_of_its_smallest_model() {
    let models = vec![built_in("large", 100_000), built_in("small", 4000), built_in("tiny", 10)];
    let pools = pools(
        models,
        [("two", pool(&["large", "small"])), ("one", pool(&["small"])), ("tiny", pool(&["large", "tiny"]))],
    );
    assert_eq!((pools.capacity("two"), pools.capacity("tiny")), (pools.capacity("one"), 1));
    let rest = 4000 - prompts().overhead();
    assert!((rest - 200..rest).contains(&pools.capacity("one")), "{}", pools.capacity("one"));
}

#[tokio::test(start_paused = true)]
async fn failures_before_a_response_are_logged_as_info_without_the_conversation() {
    let broken = model("broken", Scripted::new(failure(ModelError::StreamTruncated)), settings());
    let pools = pool_of(vec![broken, built_in("works", 1000)]);
    let (log, writer) = std::io::pipe().expect("a pipe");
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(tracing::Level::TRACE)
        .with_ansi(false)
        .with_writer(std::sync::Mutex::new(writer))
        .finish();
    // With a single subscriber, a callsite that another test reaches first in a thread without a subscriber is disabled
    // for all threads (tokio-rs/tracing#3611).
    let _second = tracing::Dispatch::new(tracing_subscriber::registry());
    let guard = tracing::subscriber::set_default(subscriber);
    consolidate(&pools, "p").await.expect("a response");
    drop(guard);
    let log = std::io::read_to_string(log).expect("UTF-8");
    assert!(log.contains("DEBUG") && log.contains("model=\"broken\""), "{log}");
    assert!(
        log.contains(" INFO ") && log.contains("failed=\"broken: the response stream was truncated"),
        "{log}"
    );
    assert!(!["WARN", "ERROR", "Berlin"].iter().any(|word| log.contains(word)), "{log}");
}

#[tokio::test]
async fn unknown_pool_fails_without_an_attempt() {
    let error = consolidate(&pools(Vec::new(), []), "x").await.expect_err("unknown pool");
    assert!(error.attempts.is_empty() && error.pool == "x");
}
