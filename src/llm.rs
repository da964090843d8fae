//! Language models: the [`Llm`] trait that the service uses, and its implementation over pools of models.
//!
//! A [`pool`] is an ordered list of models that are tried one after another under one deadline. A [`model`] has a
//! [`concurrency_limit`], a [`circuit_breaker`], and retries; all calls share a [`call_memory`]. Before a completion becomes a
//! summary or an [`order`] of search results, its [`reasoning`] is removed and the [`response_check`] must accept it. A model is
//! called through a [`provider`]: the built-in
//! [`extractive`] summariser, or an [`http`] server in a wire format such as [`http::openai`] or [`http::anthropic`].
//! [`prompt`] contains the prompts, [`error`] defines the consequence of each kind of failure, and [`status`] is the state of the
//! models for operators.

use async_trait::async_trait;
use std::fmt;

pub mod call_memory;
pub mod check;
pub mod circuit_breaker;
mod concurrency_limit;
pub mod error;
pub mod extractive;
pub mod http;
mod metrics;
pub mod model;
pub mod order;
pub mod pool;
pub mod prompt;
pub mod provider;
mod reasoning;
pub mod response_check;
pub mod status;
pub mod task;
pub mod usage;

pub use call_memory::CallMemory;
pub use circuit_breaker::CircuitState;
pub use error::{Attempt, LlmError, ModelError, Rejection};
pub use prompt::Prompt;
pub use status::LlmStatus;
pub use task::Task;
pub use usage::{CallTokens, Cost, Usage};

/// A response that has passed the [`response_check`]: a summary, or an order.
#[derive(Clone, Debug, PartialEq)]
pub struct PoolResponse {
    /// Trimmed and never empty.
    pub text: String,
    /// Name of the model in the settings; the provider may call it differently.
    pub model: String,
    /// Identifies the prompts: a number for the built-in ones, a hash for configured ones, and the version of the selection
    /// for extractive summaries.
    pub prompt_version: String,
    /// The failed attempts before the response.
    pub attempts: Vec<Attempt>,
    pub cost: Cost,
}

/// Named pools of models that execute [`Task`]s.
#[async_trait]
pub trait Llm: Send + Sync + fmt::Debug {
    /// Executes the task with the first model of the pool whose response is accepted, within the pool's deadline.
    /// Dropping the future cancels the call.
    async fn complete(&self, pool: &str, task: Task<'_>) -> Result<PoolResponse, LlmError>;

    /// Executes the task in the same way, with the models of the pool that cost nothing. Returns `None` if it has none.
    async fn complete_free(&self, _pool: &str, _task: Task<'_>) -> Option<Result<PoolResponse, LlmError>> {
        None
    }

    /// Returns the number of tokens of transcript lines ([`TranscriptLine::tokens`](crate::domain::transcript::TranscriptLine::tokens)) that one
    /// [`Task::Consolidate`] may contain so that the complete prompt is within the input limit of every model of the
    /// pool. The value decreases when a model turns out to accept less than its settings say, so smaller batches may
    /// succeed after [`LlmError::is_prompt_too_long`].
    fn capacity(&self, pool: &str) -> usize;

    /// Returns the prompt with which the models of a pool execute a task; `None` if none of them needs a prompt. Takes
    /// milliseconds for a long conversation.
    fn prompt(&self, pool: &str, task: Task<'_>) -> Option<Prompt>;

    /// Returns the present state of all pools and models.
    fn status(&self) -> LlmStatus;
}
