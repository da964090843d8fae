//! Pools: models tried one after another, under one deadline, until an answer passes the gate.
//!
//! A timeout or a refused answer is a failed attempt like any other, so there is one way from each failure to the
//! next model. Nothing is logged as an error here: whoever asked decides what the failure of all of them means.

use super::error::Missing;
use super::gate;
use super::prompt::Prompts;
use super::provider::{Completion, Provider, Request};
use super::{Answer, Attempt, Cause, Cost, Llm, LlmError, Task};
use async_trait::async_trait;
use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;
use tracing::Instrument;

/// The share of an input limit that stays free, in percent: models count with tokenizers of their own, and put
/// marks of theirs around each message.
const MARGIN_PERCENT: usize = 3;

/// A model, as the settings describe it.
#[derive(Clone, Debug)]
pub struct ModelSpec {
    /// Its name in the settings.
    pub name: String,
    /// How to reach it. Its HTTP client holds the model's connect timeout.
    pub provider: Arc<dyn Provider>,
    /// The provider's name for it.
    pub model: String,
    /// Of one attempt, from the connection to the last chunk.
    pub timeout: Duration,
    /// The most tokens that it is asked to answer with.
    pub output_limit: u32,
    /// The most tokens that it takes.
    pub input_limit: usize,
}

/// A pool, as the settings describe it.
#[derive(Clone, Debug)]
pub struct PoolSpec {
    /// Its name in the settings.
    pub name: String,
    /// Names of models, in the order in which they are tried.
    pub models: Vec<String>,
    /// Of all attempts together.
    pub deadline: Duration,
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
    models: Vec<Arc<ModelSpec>>,
    deadline: Duration,
    capacity: usize,
}

impl Pools {
    /// Puts the pools together. Wrong references are found here, all of them, so that no later call meets one.
    pub fn new(models: Vec<ModelSpec>, pools: Vec<PoolSpec>, prompts: Prompts) -> Result<Self, PoolError> {
        let mut wrong = Vec::new();
        let mut known = HashMap::new();
        for model in models {
            let name = model.name.clone();
            if known.insert(name.clone(), Arc::new(model)).is_some() {
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
            let pool =
                Pool { capacity: capacity(&models, prompts.overhead()), models, deadline: spec.deadline };
            if built.insert(spec.name, pool).is_some() {
                wrong.push(format!("{path}: there are two of this name"));
            }
        }
        if wrong.is_empty() { Ok(Self { pools: built, prompts }) } else { Err(PoolError(wrong)) }
    }

    /// One attempt: the answer and what it cost, or why there is none.
    async fn attempt(&self, model: &ModelSpec, task: Task<'_>, limit: Duration) -> Result<Completion, Cause> {
        let request =
            Request { model: &model.model, task, prompts: &self.prompts, output_limit: model.output_limit };
        let missing = if limit < model.timeout { Missing::EndByDeadline } else { Missing::End };
        let mut completion = tokio::time::timeout(limit, model.provider.complete(&request))
            .await
            .map_err(|_| Cause::Timeout(missing, limit))??;
        completion.text =
            gate::examine(&completion.text, completion.finish, &task).map_err(Cause::Refused)?;
        Ok(completion)
    }
}

#[async_trait]
impl Llm for Pools {
    async fn ask(&self, pool: &str, task: Task<'_>) -> Result<Answer, LlmError> {
        let started = Instant::now();
        let mut attempts = Vec::new();
        // A pool that doesn't exist has no models: what the settings name was checked when they were read.
        let (models, deadline) =
            self.pools.get(pool).map_or((&[][..], Duration::ZERO), |pool| (&pool.models[..], pool.deadline));
        for model in models {
            let left = deadline.saturating_sub(started.elapsed());
            if left.is_zero() {
                break;
            }
            let began = Instant::now();
            let span = tracing::info_span!("llm_attempt", pool, model = model.name);
            let outcome = self.attempt(model, task, model.timeout.min(left)).instrument(span.clone()).await;
            match outcome {
                Ok(completion) => {
                    if !attempts.is_empty() {
                        // A wrong key, say, would else be found by nobody: summaries are made all the same.
                        let failed: Vec<String> = attempts.iter().map(Attempt::to_string).collect();
                        let failed = failed.join("; ");
                        tracing::info!(parent: &span, failed, "a later model of the pool answered");
                    }
                    return Ok(Answer {
                        text: completion.text,
                        model: model.name.clone(),
                        prompt_version: model.provider.prompt_version(&self.prompts).to_owned(),
                        cost: Cost {
                            usage: completion.usage,
                            tokens: completion.usage.total().unwrap_or_default(),
                            ..cost(&attempts, started, 1)
                        },
                    });
                }
                Err(cause) => {
                    tracing::debug!(parent: &span, %cause, "attempt failed");
                    attempts.push(Attempt { model: model.name.clone(), cause, duration: began.elapsed() });
                }
            }
        }
        let cost = cost(&attempts, started, 0);
        Err(LlmError { pool: pool.to_owned(), attempts, cost })
    }

    fn capacity(&self, pool: &str) -> usize {
        self.pools.get(pool).map_or(1, |pool| pool.capacity)
    }

    fn deadline(&self, pool: &str) -> Duration {
        self.pools.get(pool).map_or(Duration::ZERO, |pool| pool.deadline)
    }
}

fn cost(failed: &[Attempt], started: Instant, answered: u32) -> Cost {
    let failures = u32::try_from(failed.len()).unwrap_or(u32::MAX);
    Cost { calls: failures + answered, failures, duration: started.elapsed(), ..Cost::default() }
}

/// What the smallest model of a pool has room for beside the prompt. Never nothing: work that is handed over in
/// pieces of a token is slow, but it ends.
fn capacity(models: &[Arc<ModelSpec>], overhead: usize) -> usize {
    let smallest = models.iter().map(|model| model.input_limit).min().unwrap_or_default();
    let margin = smallest.div_ceil(100).saturating_mul(MARGIN_PERCENT);
    smallest.saturating_sub(margin).saturating_sub(overhead).max(1)
}

#[cfg(test)]
mod tests {
    use super::super::extractive;
    use super::super::prompt::Templates;
    use super::super::provider::Extractive;
    use super::*;
    use crate::domain::message::Role;
    use crate::domain::tokens;
    use crate::domain::transcript::Entry;

    fn prompts() -> Prompts {
        Prompts::new(&Templates::default()).expect("valid")
    }

    fn model(name: &str, input_limit: usize) -> ModelSpec {
        ModelSpec {
            name: name.to_owned(),
            provider: Arc::new(Extractive),
            model: String::new(),
            timeout: Duration::from_secs(10),
            output_limit: 1000,
            input_limit,
        }
    }

    fn pool(name: &str, models: &[&str]) -> PoolSpec {
        PoolSpec {
            name: name.to_owned(),
            models: models.iter().map(|&name| name.to_owned()).collect(),
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

    #[tokio::test]
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
