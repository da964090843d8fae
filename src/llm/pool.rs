//! Pools: models tried one after another, under one deadline, until an answer passes the gate.
//!
//! A timeout or a refused answer is a failed attempt like any other, so there is one way from each failure to the
//! next model. Nothing is logged as an error here: whoever asked decides what the failure of all of them means.

use super::model::{Model, ModelSpec, Question};
use super::prompt::Prompts;
use super::{Answer, Attempt, Cause, Cost, Llm, LlmError, Task};
use async_trait::async_trait;
use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::time::Instant;
use tracing::Instrument as _;

/// The share of an input limit that stays free, in percent: models count with tokenizers of their own, and put
/// marks of theirs around each message.
const MARGIN_PERCENT: usize = 3;

/// A pool, as the settings describe it.
#[derive(Clone, Debug)]
pub struct PoolSpec {
    /// Its name in the settings.
    pub name: String,
    /// Names of models.
    pub models: Vec<String>,
    /// In which order they are tried.
    pub strategy: Strategy,
    /// Of all attempts together.
    pub deadline: Duration,
}

/// In which order the models of a pool are tried.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Strategy {
    /// As they are listed: the first one is the best.
    #[default]
    Fallback,
    /// Each question begins with the next one: they share the work.
    RoundRobin,
}

/// What is wrong with pools: everything, each line with its path in the settings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolError(pub Vec<String>);

impl fmt::Display for PoolError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.join("; "))
    }
}

impl std::error::Error for PoolError {}

/// All pools of the service.
#[derive(Debug)]
pub struct Pools {
    pools: HashMap<String, Pool>,
    prompts: Prompts,
}

#[derive(Debug)]
struct Pool {
    models: Vec<Arc<Model>>,
    strategy: Strategy,
    deadline: Duration,
    questions: AtomicUsize,
}

impl Pools {
    /// Puts the pools together. Wrong references are found here, all of them, so that no later call meets one.
    pub fn new(models: Vec<ModelSpec>, pools: Vec<PoolSpec>, prompts: Prompts) -> Result<Self, PoolError> {
        let mut wrong = Vec::new();
        let mut known = HashMap::new();
        for spec in models {
            let name = spec.name.clone();
            if known.insert(name.clone(), Arc::new(Model::new(spec))).is_some() {
                wrong.push(format!("llm.models.{name}: there are two of this name"));
            }
        }
        let mut built = HashMap::new();
        for spec in pools {
            let path = format!("llm.pools.{}", spec.name);
            if spec.models.is_empty() {
                wrong.push(format!("{path}.models: must name a model at least"));
            }
            let mut models = Vec::new();
            for (index, name) in spec.models.iter().enumerate() {
                match known.get(name) {
                    Some(model) => models.push(Arc::clone(model)),
                    None => wrong.push(format!("{path}.models[{index}]: no model \"{name}\" in llm.models")),
                }
            }
            let (strategy, deadline) = (spec.strategy, spec.deadline);
            let pool = Pool { models, strategy, deadline, questions: AtomicUsize::new(0) };
            if built.insert(spec.name, pool).is_some() {
                wrong.push(format!("{path}: there are two of this name"));
            }
        }
        if wrong.is_empty() { Ok(Self { pools: built, prompts }) } else { Err(PoolError(wrong)) }
    }
}

impl Pool {
    /// The models in the order in which this question tries them.
    fn order(&self) -> impl Iterator<Item = &Arc<Model>> {
        let start = match self.strategy {
            Strategy::Fallback => 0,
            Strategy::RoundRobin => self.questions.fetch_add(1, Ordering::Relaxed) % self.models.len().max(1),
        };
        self.models.iter().cycle().skip(start).take(self.models.len())
    }
}

#[async_trait]
impl Llm for Pools {
    async fn ask(&self, pool: &str, task: Task<'_>) -> Result<Answer, LlmError> {
        let started = Instant::now();
        // A pool that doesn't exist has no models: what the settings name was checked when they were read.
        let known = self.pools.get(pool);
        let deadline = known.map_or(Duration::ZERO, |pool| pool.deadline);
        let mut question = Question {
            task,
            prompts: &self.prompts,
            until: started + deadline,
            attempts: Vec::new(),
            cost: Cost::default(),
        };
        // The largest limit that this prompt turned out to be too long for.
        let mut too_small = 0;
        for model in known.into_iter().flat_map(Pool::order) {
            if question.left().is_zero() {
                break;
            }
            let name = &model.spec.name;
            let limit = model.spec.input_limit;
            // One with the same limit is asked: limits that nobody has set are all the same.
            if limit < too_small {
                let cause = Cause::TooSmall(limit);
                question.attempts.push(Attempt { model: name.clone(), cause, duration: Duration::ZERO });
                continue;
            }
            let before = question.attempts.len();
            let span = tracing::info_span!("llm_model", pool, model = name);
            if let Some(completion) = model.answer(&mut question).instrument(span.clone()).await {
                if !question.attempts.is_empty() {
                    // A wrong key, say, would else be found by nobody: summaries are made all the same.
                    let failed: Vec<String> = question.attempts.iter().map(Attempt::to_string).collect();
                    let failed = failed.join("; ");
                    tracing::info!(parent: &span, failed, "answered after failures");
                }
                return Ok(Answer {
                    text: completion.text,
                    model: name.clone(),
                    prompt_version: model.spec.provider.prompt_version(&self.prompts).to_owned(),
                    cost: Cost { duration: started.elapsed(), ..question.cost },
                });
            }
            let mut tried = question.attempts.iter().skip(before);
            if tried.any(|attempt| matches!(attempt.cause, Cause::TooLong(_))) {
                too_small = too_small.max(limit);
            }
        }
        let cost = Cost { duration: started.elapsed(), ..question.cost };
        Err(LlmError { pool: pool.to_owned(), attempts: question.attempts, cost })
    }

    fn capacity(&self, pool: &str) -> usize {
        let models = self.pools.get(pool).map_or(&[][..], |pool| &pool.models);
        capacity(models, self.prompts.overhead())
    }

    fn deadline(&self, pool: &str) -> Duration {
        self.pools.get(pool).map_or(Duration::ZERO, |pool| pool.deadline)
    }
}

/// What the smallest model of a pool has room for beside the prompt. Never nothing: work that is handed over in
/// pieces of a token is slow, but it ends.
fn capacity(models: &[Arc<Model>], overhead: usize) -> usize {
    let smallest = models.iter().map(|model| model.input_limit()).min().unwrap_or_default();
    let margin = smallest.div_ceil(100).saturating_mul(MARGIN_PERCENT);
    smallest.saturating_sub(margin).saturating_sub(overhead).max(1)
}

#[cfg(test)]
mod tests {
    use super::super::breaker::BreakerPolicy;
    use super::super::extractive;
    use super::super::model::{QueuePolicy, RetryPolicy};
    use super::super::prompt::Templates;
    use super::super::provider::{Completion, Extractive, Provider, Request};
    use super::*;
    use crate::domain::message::Role;
    use crate::domain::tokens;
    use crate::domain::transcript::Entry;

    fn prompts() -> Prompts {
        Prompts::new(&Templates::default()).expect("valid")
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
            breaker: BreakerPolicy {
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
            strategy: Strategy::Fallback,
            deadline: Duration::from_secs(20),
        }
    }

    fn entry(text: &str) -> Entry {
        Entry { role: Role::User, name: None, text: text.to_owned(), calls: Vec::new() }
    }

    #[test]
    fn wrong_references_are_reported_together() {
        let error = Pools::new(
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
        let pools = Pools::new(models, pools, prompts()).expect("valid");
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
            Pools::new(vec![model("extractive", 1000)], vec![pool("default", &["extractive"])], prompts())
                .expect("valid");
        let entries = [entry("Ada lives in Berlin. She has two cats.")];
        let task = Task::Consolidate { entries: &entries, sentences: 5 };
        let answer = pools.ask("default", task).await.expect("an answer");
        assert_eq!(
            (answer.model.as_str(), answer.prompt_version.as_str()),
            ("extractive", extractive::VERSION)
        );
        assert!(answer.text.contains("Berlin"));
        assert_eq!(pools.deadline("default"), Duration::from_secs(20));
    }

    /// Fails, with a cause that stands for any.
    #[derive(Debug)]
    struct Broken;

    #[async_trait]
    impl Provider for Broken {
        async fn complete(&self, _: &Request<'_>) -> Result<Completion, Cause> {
            Err(Cause::BrokenOff)
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_recovered_failure_is_no_alarm_and_no_log_holds_the_conversation() {
        let broken = ModelSpec { provider: Arc::new(Broken), ..model("broken", 1000) };
        let models = vec![broken, model("works", 1000)];
        let pools = Pools::new(models, vec![pool("p", &["broken", "works"])], prompts()).expect("valid");
        let (log, writer) = std::io::pipe().expect("a pipe");
        let subscriber = tracing_subscriber::fmt()
            .with_max_level(tracing::Level::TRACE)
            .with_ansi(false)
            .with_writer(std::sync::Mutex::new(writer))
            .finish();
        let entries = [entry("Ada lives in Berlin. She has two cats.")];
        let task = Task::Consolidate { entries: &entries, sentences: 5 };
        let guard = tracing::subscriber::set_default(subscriber);
        pools.ask("p", task).await.expect("an answer");
        drop(guard);
        let log = std::io::read_to_string(log).expect("UTF-8");
        assert!(log.contains("DEBUG") && log.contains("model=\"broken\""), "{log}");
        assert!(log.contains(" INFO ") && log.contains("failed=\"broken: the answer broke off"), "{log}");
        assert!(!["WARN", "ERROR", "Berlin"].iter().any(|word| log.contains(word)), "{log}");
    }

    #[tokio::test]
    async fn a_pool_that_is_not_there_fails_without_an_attempt() {
        let pools = Pools::new(Vec::new(), Vec::new(), prompts()).expect("valid");
        let task = Task::Meta { summary: "A b c.", sentences: 1 };
        let error = pools.ask("x", task).await.expect_err("no such pool");
        assert!(error.attempts.is_empty() && error.pool == "x");
    }
}
