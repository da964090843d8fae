//! The state of the models, and the tokens that the tenant has used today.

use super::consolidation::PoolStrategy;
use super::{Error, MemoryService};
use crate::domain::id::TenantId;
use crate::llm::status::{FailureStatus, ModelStatus, PoolStatus};
use crate::llm::{CircuitState, LlmStatus};
use serde::Serialize;
use time::OffsetDateTime;
use utoipa::ToSchema;

/// Pools and models of this replica, and the tokens of the tenant.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct ModelReport {
    /// All pools of the settings.
    pools: Vec<PoolReport>,
    /// The models of the pools, each once.
    models: Vec<ModelState>,
    tokens: TokenBudget,
}

/// A pool of models.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[schema(as = Pool)]
struct PoolReport {
    name: String,
    /// The names of its models, in the order of the settings.
    models: Vec<String>,
    strategy: PoolStrategy,
    /// Milliseconds for all attempts together.
    deadline_ms: u64,
    /// The tasks for which the pool is configured.
    tasks: Vec<PoolTask>,
}

/// The task of a pool: summaries, their compression, or the order of search results.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
enum PoolTask {
    Consolidation,
    MetaConsolidation,
    Rerank,
}

/// A model as this replica sees it since its start.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[schema(as = Model)]
struct ModelState {
    /// Name of the model in the settings.
    name: String,
    /// Name of its provider in the settings.
    provider: String,
    /// The provider's name for the model.
    model: String,
    circuit_breaker: CircuitBreakerReport,
    /// Number of call slots in use.
    calls_in_progress: usize,
    max_concurrent_calls: usize,
    /// Number of calls that wait for a slot.
    queued_calls: usize,
    max_queued_calls: usize,
    /// No call is made before this time, because the provider asked for it (`Retry-After`); null otherwise.
    #[schema(required)]
    #[serde(with = "time::serde::rfc3339::option")]
    retry_not_before: Option<OffsetDateTime>,
    /// Largest prompt, in tokens: the setting, or less after the provider has rejected a prompt as too long.
    input_limit: usize,
    /// Largest response, in tokens.
    output_limit: usize,
    /// Time of the last accepted response; null if there was none.
    #[schema(required)]
    #[serde(with = "time::serde::rfc3339::option")]
    last_success_at: Option<OffsetDateTime>,
    /// The last failed attempt; null if there was none.
    #[schema(required)]
    last_failure: Option<ModelFailure>,
}

/// The circuit breaker of a model, which skips a failing model for a while.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[schema(as = CircuitBreaker)]
struct CircuitBreakerReport {
    state: CircuitBreakerState,
    /// The time from which one call probes the model, while it is `open`; null otherwise.
    #[schema(required)]
    #[serde(with = "time::serde::rfc3339::option")]
    until: Option<OffsetDateTime>,
}

/// All calls are made; a single call probes the model; or the model is skipped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
enum CircuitBreakerState {
    Closed,
    HalfOpen,
    Open,
}

/// A failed attempt.
#[derive(Clone, Debug, Serialize, ToSchema)]
struct ModelFailure {
    #[serde(with = "time::serde::rfc3339")]
    at: OffsetDateTime,
    /// The status of the provider and an explanation, as in the log; without texts of the provider, URLs and keys.
    reason: String,
}

/// The tokens that consolidations and rerankings of the tenant have used since midnight UTC, on all replicas.
#[derive(Clone, Debug, Serialize, ToSchema)]
struct TokenBudget {
    used_today: i64,
    /// `consolidation.daily_token_limit`; null without a limit.
    #[schema(required)]
    daily_limit: Option<u64>,
}

impl MemoryService {
    /// Returns the state of all pools and models of this process, and the tokens of the tenant.
    pub async fn models(&self, tenant: &TenantId) -> Result<ModelReport, Error> {
        let used_today = self.store.tokens_used_today(tenant).await?;
        let LlmStatus { pools, models } = self.llm.status();
        Ok(ModelReport {
            pools: pools.into_iter().map(|pool| self.pool_report(pool)).collect(),
            models: models.into_iter().map(ModelState::from).collect(),
            tokens: TokenBudget { used_today, daily_limit: self.config.daily_token_limit },
        })
    }

    /// Returns the problems that do not keep the service from working, each with its fix.
    #[must_use]
    pub fn warnings(&self) -> Vec<String> {
        self.llm.status().models.into_iter().filter_map(|model| model.refusal).collect()
    }

    fn pool_report(&self, pool: PoolStatus) -> PoolReport {
        let (names, rerank) = (self.config.pools.as_ref(), self.config.rerank.as_ref());
        let tasks = [
            (names.map(|pools| &pools.consolidation), PoolTask::Consolidation),
            (names.map(|pools| &pools.meta), PoolTask::MetaConsolidation),
            (rerank.map(|rerank| &rerank.pool), PoolTask::Rerank),
        ];
        let tasks = tasks.into_iter().filter(|(name, _)| *name == Some(&pool.name)).map(|(_, task)| task);
        PoolReport {
            tasks: tasks.collect(),
            deadline_ms: u64::try_from(pool.deadline.as_millis()).unwrap_or(u64::MAX),
            strategy: pool.strategy.into(),
            models: pool.models,
            name: pool.name,
        }
    }
}

impl From<ModelStatus> for ModelState {
    fn from(model: ModelStatus) -> Self {
        let state = match model.circuit {
            CircuitState::Closed => CircuitBreakerState::Closed,
            CircuitState::HalfOpen => CircuitBreakerState::HalfOpen,
            CircuitState::Open => CircuitBreakerState::Open,
        };
        Self {
            name: model.name,
            provider: model.provider,
            model: model.model,
            circuit_breaker: CircuitBreakerReport { state, until: model.probe_at },
            calls_in_progress: model.calls,
            max_concurrent_calls: model.max_calls,
            queued_calls: model.queued,
            max_queued_calls: model.max_queued,
            retry_not_before: model.retry_not_before,
            input_limit: model.input_limit,
            output_limit: model.output_limit,
            last_success_at: model.last_success_at,
            last_failure: model.last_failure.map(|FailureStatus { at, reason }| ModelFailure { at, reason }),
        }
    }
}
