//! Pools: models that are tried one after another under one deadline until the response check accepts a completion.
//!
//! A timeout or a rejected response is a failed attempt like any other, so there is one path from each failure to the
//! next model. Failures are not logged as errors here, because only the caller knows the consequences.

use super::call_memory::CallMemoryLimit;
use super::model::{Model, ModelSpec, PoolRequest};
use super::prompt::{Prompt, Prompts};
use super::status::PoolStatus;
use super::{Attempt, Cost, Llm, LlmError, LlmStatus, ModelError, PoolResponse, Task};
use crate::config::{self, Strategy};
use async_trait::async_trait;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::time::Instant;
use tracing::Instrument as _;

#[cfg(test)]
mod tests;

/// Percentage of an input limit that stays unused. Models count with their own tokenizers and add tokens around each
/// message.
const INPUT_MARGIN_PERCENT: usize = 3;

/// All pools of the service.
#[derive(Debug)]
pub struct ModelPools {
    pools: HashMap<String, Pool>,
    prompts: Prompts,
    memory: CallMemoryLimit,
}

#[derive(Debug)]
struct Pool {
    models: Vec<Arc<Model>>,
    strategy: Strategy,
    deadline: Duration,
    /// Number of requests so far, for the rotation.
    requests: AtomicUsize,
}

impl ModelPools {
    /// Creates the pools from validated settings: each pool has models, and all of them exist. `memory` is the limit of all
    /// running calls together.
    #[must_use]
    pub fn new(
        models: Vec<ModelSpec>,
        pools: &BTreeMap<String, config::Pool>,
        prompts: Prompts,
        memory: CallMemoryLimit,
    ) -> Self {
        let models: HashMap<String, Arc<Model>> =
            models.into_iter().map(|spec| (spec.name.clone(), Arc::new(Model::new(spec)))).collect();
        let pools = pools.iter().map(|(name, pool)| {
            let members = pool.models.iter().filter_map(|model| models.get(model)).cloned().collect();
            let (strategy, deadline) = (pool.strategy, pool.deadline);
            (name.clone(), Pool { models: members, strategy, deadline, requests: AtomicUsize::new(0) })
        });
        Self { pools: pools.collect(), prompts, memory }
    }
}

impl Pool {
    /// Returns the models in the order in which the next request tries them.
    fn next_order(&self) -> Vec<&Arc<Model>> {
        let start = match self.strategy {
            Strategy::Fallback => 0,
            Strategy::RoundRobin => self.requests.fetch_add(1, Ordering::Relaxed) % self.models.len().max(1),
        };
        self.models.iter().cycle().skip(start).take(self.models.len()).collect()
    }
}

impl ModelPools {
    /// Tries the models, in this order. References to pools are validated with the settings; an unknown pool has no models.
    async fn complete_with(
        &self,
        pool_name: &str,
        models: Vec<&Arc<Model>>,
        task: Task<'_>,
    ) -> Result<PoolResponse, LlmError> {
        let started_at = Instant::now();
        let pool = self.pools.get(pool_name);
        let deadline = pool.map_or(Duration::ZERO, |pool| pool.deadline);
        let limit = if let Task::Rerank { timeout, .. } = task { deadline.min(timeout) } else { deadline };
        let mut request = PoolRequest {
            task,
            prompts: &self.prompts,
            memory: &self.memory,
            deadline,
            deadline_at: started_at + limit,
            is_last_model: false,
            attempts: Vec::new(),
            cost: Cost::default(),
        };
        // The largest input limit of the models that rejected the prompt as too long.
        let mut too_small_limit = 0;
        for (index, model) in models.iter().enumerate() {
            request.is_last_model = index + 1 == models.len();
            if request.remaining().is_zero() {
                break;
            }
            let name = &model.spec.name;
            let input_limit = model.spec.settings.input_limit;
            // A model with the same limit is tried, because both may have the default limit, which is no property of a model.
            if input_limit < too_small_limit {
                let error = ModelError::InputLimitTooSmall(input_limit);
                model.record_failed_attempt(&mut request, error, Duration::ZERO);
                continue;
            }
            let (attempts_before, limit_before) = (request.attempts.len(), model.input_limit());
            let span = tracing::info_span!("llm_model", pool = pool_name, model = name);
            if let Some(completion) = model.complete(&mut request).instrument(span.clone()).await {
                if !request.attempts.is_empty() {
                    // Makes a permanent problem such as a wrong key visible although summaries are still written.
                    let failed: Vec<String> = request.attempts.iter().map(Attempt::to_string).collect();
                    let failed = failed.join("; ");
                    tracing::info!(parent: &span, failed, "model responded after failed attempts");
                }
                return Ok(PoolResponse {
                    text: completion.text,
                    model: name.clone(),
                    prompt_version: model.spec.provider.prompt_version(&self.prompts).to_owned(),
                    attempts: request.attempts,
                    cost: Cost { duration: started_at.elapsed(), ..request.cost },
                });
            }
            let mut attempts = request.attempts.iter().skip(attempts_before);
            if attempts.any(|attempt| matches!(attempt.error, ModelError::PromptTooLong)) {
                // A consolidation divides its messages for this model, which is better than those after it.
                let is_divided = matches!(task, Task::Consolidate { .. });
                if is_divided && model.input_limit() < limit_before {
                    break;
                }
                too_small_limit = too_small_limit.max(input_limit);
            }
        }
        let cost = Cost { duration: started_at.elapsed(), ..request.cost };
        Err(LlmError { pool: pool_name.to_owned(), attempts: request.attempts, cost })
    }
}

#[async_trait]
impl Llm for ModelPools {
    async fn complete(&self, pool: &str, task: Task<'_>) -> Result<PoolResponse, LlmError> {
        let models = self.pools.get(pool).map(Pool::next_order).unwrap_or_default();
        self.complete_with(pool, models, task).await
    }

    async fn complete_free(&self, pool: &str, task: Task<'_>) -> Option<Result<PoolResponse, LlmError>> {
        let models = self.pools.get(pool)?.models.iter().filter(|model| model.is_free());
        let models: Vec<_> = models.collect();
        if models.is_empty() { None } else { Some(self.complete_with(pool, models, task).await) }
    }

    fn capacity(&self, pool: &str) -> usize {
        let models = self.pools.get(pool).map_or(&[][..], |pool| &pool.models);
        let input_limit = models.iter().map(|model| model.input_limit()).min().unwrap_or_default();
        let margin = input_limit.div_ceil(100).saturating_mul(INPUT_MARGIN_PERCENT);
        // At least one token: batches of one token are slow, but the work ends.
        input_limit.saturating_sub(margin).saturating_sub(self.prompts.overhead()).max(1)
    }

    fn prompt(&self, pool: &str, task: Task<'_>) -> Option<Prompt> {
        let models = self.pools.get(pool).map_or(&[][..], |pool| &pool.models);
        let is_prompted = models.iter().any(|model| model.spec.provider.is_prompted());
        is_prompted.then(|| self.prompts.render(&task))
    }

    fn status(&self) -> LlmStatus {
        let mut models = BTreeMap::new();
        let mut pools: Vec<PoolStatus> = Vec::new();
        for (name, pool) in &self.pools {
            models.extend(pool.models.iter().map(|model| (&model.spec.name, model)));
            pools.push(PoolStatus {
                name: name.clone(),
                models: pool.models.iter().map(|model| model.spec.name.clone()).collect(),
                strategy: pool.strategy,
                deadline: pool.deadline,
            });
        }
        pools.sort_unstable_by(|one, other| one.name.cmp(&other.name));
        LlmStatus { pools, models: models.values().map(|model| model.status(&self.prompts)).collect() }
    }
}
