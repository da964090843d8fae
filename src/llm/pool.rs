//! ModelPools: models tried one after another, under one deadline, until an answer passes the gate.
//!
//! A timeout or a refused answer is a failed attempt like any other, so there is one way from each failure to the
//! next model. Nothing is logged as an error here: whoever asked decides what the failure of all of them means.

use super::model::{Model, ModelSpec, Question};
use super::prompt::Prompts;
use super::{Attempt, Cost, Llm, LlmError, ModelError, PoolResponse, Task};
use async_trait::async_trait;
use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::time::Instant;
use tracing::Instrument as _;

#[cfg(test)]
mod tests;

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
    pub strategy: PoolStrategy,
    /// Of all attempts together.
    pub deadline: Duration,
}

/// In which order the models of a pool are tried.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PoolStrategy {
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
pub struct ModelPools {
    pools: HashMap<String, Pool>,
    prompts: Prompts,
}

#[derive(Debug)]
struct Pool {
    models: Vec<Arc<Model>>,
    strategy: PoolStrategy,
    deadline: Duration,
    questions: AtomicUsize,
}

impl ModelPools {
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
    fn order(&self) -> Vec<&Arc<Model>> {
        let start = match self.strategy {
            PoolStrategy::Fallback => 0,
            PoolStrategy::RoundRobin => {
                self.questions.fetch_add(1, Ordering::Relaxed) % self.models.len().max(1)
            }
        };
        self.models.iter().cycle().skip(start).take(self.models.len()).collect()
    }
}

#[async_trait]
impl Llm for ModelPools {
    async fn complete(&self, pool: &str, task: Task<'_>) -> Result<PoolResponse, LlmError> {
        let started = Instant::now();
        // A pool that doesn't exist has no models: what the settings name was checked when they were read.
        let known = self.pools.get(pool);
        let deadline = known.map_or(Duration::ZERO, |pool| pool.deadline);
        let mut question = Question {
            task,
            prompts: &self.prompts,
            deadline,
            until: started + deadline,
            last: false,
            attempts: Vec::new(),
            cost: Cost::default(),
        };
        // The largest limit that this prompt turned out to be too long for.
        let mut too_small = 0;
        let models = known.map(Pool::order).unwrap_or_default();
        for (index, model) in models.iter().enumerate() {
            question.last = index + 1 == models.len();
            if question.left().is_zero() {
                break;
            }
            let name = &model.spec.name;
            let limit = model.spec.input_limit;
            // One with the same limit is asked: limits that nobody has set are all the same.
            if limit < too_small {
                model.failed(&mut question, ModelError::InputLimitTooSmall(limit), Duration::ZERO);
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
                return Ok(PoolResponse {
                    text: completion.text,
                    model: name.clone(),
                    prompt_version: model.spec.provider.prompt_version(&self.prompts).to_owned(),
                    cost: Cost { duration: started.elapsed(), ..question.cost },
                });
            }
            let mut tried = question.attempts.iter().skip(before);
            if tried.any(|attempt| matches!(attempt.cause, ModelError::PromptTooLong(_))) {
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
