//! The pool over providers that a test makes up; `tests/pool` has it over real sockets.

mod faults;
mod random;

use super::*;
use crate::domain::message::Role;
use crate::domain::tokens;
use crate::domain::transcript::TranscriptEntry;
use crate::llm::circuit_breaker::CircuitBreakerPolicy;
use crate::llm::extractive;
use crate::llm::model::{QueuePolicy, RetryPolicy};
use crate::llm::prompt::PromptTemplates;
use crate::llm::provider::{Completion, Extractive, Provider, Request};

fn prompts() -> Prompts {
    Prompts::new(&PromptTemplates::default()).expect("valid")
}

fn model(name: &str, input_limit: usize) -> ModelSpec {
    let second = Duration::from_secs(1);
    ModelSpec {
        name: name.to_owned(),
        provider: Arc::new(Extractive),
        model: String::new(),
        output_limit: 1000,
        input_limit,
        timeout: 10 * second,
        first_token_timeout: None,
        idle_timeout: second,
        retry: RetryPolicy { retries: 2, initial: second, max: 4 * second },
        queue: QueuePolicy { max_calls: 8, max_waiting: 8, timeout: second },
        breaker: CircuitBreakerPolicy {
            failure_percent: 50,
            min_calls: 5,
            window: 60 * second,
            open_for: 30 * second,
        },
    }
}

fn pool(name: &str, models: &[&str]) -> PoolSpec {
    PoolSpec {
        name: name.to_owned(),
        models: models.iter().map(|&name| name.to_owned()).collect(),
        strategy: PoolStrategy::Fallback,
        deadline: Duration::from_secs(20),
    }
}

fn entry(text: &str) -> TranscriptEntry {
    TranscriptEntry { role: Role::User, name: None, text: text.to_owned(), calls: Vec::new() }
}

#[test]
fn wrong_references_are_reported_together() {
    let error = ModelPools::new(
        vec![model("a", 1), model("a", 1)],
        vec![pool("p", &["a", "b"]), pool("q", &[]), pool("p", &["c"])],
        prompts(),
    )
    .expect_err("much is wrong");
    assert_eq!(
        error.0,
        [
            "llm.models.a: there are two of this name",
            "llm.pools.p.models[1]: no model \"b\" in llm.models",
            "llm.pools.q.models: must name a model at least",
            "llm.pools.p.models[0]: no model \"c\" in llm.models",
            "llm.pools.p: there are two of this name",
        ]
    );
    assert!(error.to_string().contains("no model \"b\" in llm.models; llm.pools.q"));
}

#[test]
fn what_fits_the_capacity_fits_every_model() {
    let models = vec![model("large", 100_000), model("small", 4000), model("tiny", 10)];
    let pools = vec![pool("two", &["large", "small"]), pool("tiny", &["large", "tiny"])];
    let pools = ModelPools::new(models, pools, prompts()).expect("valid");
    assert_eq!(pools.capacity("tiny"), 1);
    let capacity = pools.capacity("two");
    assert!(capacity < 4000 - 120, "{capacity}");
    let mut entries = Vec::new();
    let mut used = 0;
    loop {
        let next = entry(&format!("Ada moves meeting {} to 3 < 4 \"May\".", entries.len()));
        let tokens = tokens::count(&format!("{}\n", next.encode()));
        if used + tokens > capacity {
            break;
        }
        used += tokens;
        entries.push(next);
    }
    let prompt = prompts().render(&Task::Consolidate { entries: &entries, sentences: 50 });
    let whole = tokens::count(&prompt.system) + tokens::count(&prompt.user);
    assert!((3500..4000).contains(&whole), "{whole}");
}

#[tokio::test]
async fn the_built_in_model_needs_nothing() {
    let pools =
        ModelPools::new(vec![model("extractive", 1000)], vec![pool("default", &["extractive"])], prompts())
            .expect("valid");
    let entries = [entry("Ada lives in Berlin. She has two cats.")];
    let task = Task::Consolidate { entries: &entries, sentences: 5 };
    let answer = pools.complete("default", task).await.expect("an answer");
    assert_eq!((answer.model.as_str(), answer.prompt_version.as_str()), ("extractive", extractive::VERSION));
    assert!(answer.text.contains("Berlin"));
    assert_eq!(pools.deadline("default"), Duration::from_secs(20));
}

/// Fails, with a cause that stands for any.
#[derive(Debug)]
struct Broken;

#[async_trait]
impl Provider for Broken {
    async fn complete(&self, _: &Request<'_>) -> Result<Completion, ModelError> {
        Err(ModelError::StreamTruncated)
    }
}

#[tokio::test(start_paused = true)]
async fn a_recovered_failure_is_no_alarm_and_no_log_holds_the_conversation() {
    let broken = ModelSpec { provider: Arc::new(Broken), ..model("broken", 1000) };
    let models = vec![broken, model("works", 1000)];
    let pools = ModelPools::new(models, vec![pool("p", &["broken", "works"])], prompts()).expect("valid");
    let (log, writer) = std::io::pipe().expect("a pipe");
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(tracing::Level::TRACE)
        .with_ansi(false)
        .with_writer(std::sync::Mutex::new(writer))
        .finish();
    let entries = [entry("Ada lives in Berlin. She has two cats.")];
    let task = Task::Consolidate { entries: &entries, sentences: 5 };
    // While there is just one subscriber, a line that another test comes across first, in a thread without any, is
    // taken for one that nobody wants (tokio-rs/tracing#3611).
    let _second = tracing::Dispatch::new(tracing_subscriber::registry());
    let guard = tracing::subscriber::set_default(subscriber);
    pools.complete("p", task).await.expect("an answer");
    drop(guard);
    let log = std::io::read_to_string(log).expect("UTF-8");
    assert!(log.contains("DEBUG") && log.contains("model=\"broken\""), "{log}");
    assert!(log.contains(" INFO ") && log.contains("failed=\"broken: the answer broke off"), "{log}");
    assert!(!["WARN", "ERROR", "Berlin"].iter().any(|word| log.contains(word)), "{log}");
}

#[tokio::test]
async fn a_pool_that_is_not_there_fails_without_an_attempt() {
    let pools = ModelPools::new(Vec::new(), Vec::new(), prompts()).expect("valid");
    let task = Task::MetaConsolidate { summary: "A b c.", sentences: 1 };
    let error = pools.complete("x", task).await.expect_err("no such pool");
    assert!(error.attempts.is_empty() && error.pool == "x");
}
