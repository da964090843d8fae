//! From the settings to the models: providers, models, pools, prompts.

use crate::config::{self, OutputLimitField, ProviderKind, Secret, Settings};
use crate::llm::circuit_breaker::CircuitBreakerPolicy;
use crate::llm::http::anthropic::Anthropic;
use crate::llm::http::openai::OpenAi;
use crate::llm::http::{HttpProvider, HttpProviderSpec, SecretSource, WireFormat, build_http_client};
use crate::llm::model::{ModelSpec, QueuePolicy, RetryPolicy};
use crate::llm::pool::{ModelPools, PoolSpec, PoolStrategy};
use crate::llm::prompt::{PromptTemplates, Prompts};
use crate::llm::provider::{Extractive, Provider};
use std::sync::Arc;
use std::time::Duration;

/// The pools that the settings name. The error lists everything that is wrong, by its path in the settings.
pub(super) fn pools(settings: &Settings) -> Result<ModelPools, String> {
    let prompts = prompts(&settings.consolidation.prompts)?;
    let pools = settings.llm.pools.iter().map(|(name, pool)| PoolSpec {
        name: name.clone(),
        models: pool.models.clone(),
        strategy: match pool.strategy {
            config::Strategy::Fallback => PoolStrategy::Fallback,
            config::Strategy::RoundRobin => PoolStrategy::RoundRobin,
        },
        deadline: pool.deadline,
    });
    ModelPools::new(models(settings)?, pools.collect(), prompts).map_err(|error| error.to_string())
}

/// All models that the settings name, in pools or not.
pub(super) fn models(settings: &Settings) -> Result<Vec<ModelSpec>, String> {
    let (mut models, mut wrong) = (Vec::new(), Vec::new());
    for (name, model) in &settings.llm.models {
        let Some(provider) = settings.llm.providers.get(&model.provider) else {
            continue;
        };
        match self::provider(provider, model.connect_timeout) {
            Ok(provider) => models.push(spec(name, model, provider)),
            Err(error) => wrong.push(format!("llm.providers.{}.{error}", model.provider)),
        }
    }
    if wrong.is_empty() { Ok(models) } else { Err(wrong.join("; ")) }
}

fn spec(name: &str, model: &config::Model, provider: Arc<dyn Provider>) -> ModelSpec {
    ModelSpec {
        name: name.to_owned(),
        provider,
        model: model.model.clone(),
        output_limit: u32::try_from(model.output_limit).unwrap_or(u32::MAX),
        input_limit: model.input_limit,
        timeout: model.timeout,
        first_token_timeout: model.first_token_timeout,
        idle_timeout: model.idle_timeout,
        retry: RetryPolicy { retries: model.retries, initial: model.retry_initial, max: model.retry_max },
        queue: QueuePolicy {
            max_calls: model.max_concurrent_calls,
            max_waiting: model.max_queued_calls,
            timeout: model.queue_timeout,
        },
        breaker: CircuitBreakerPolicy {
            failure_percent: model.breaker_failure_percent,
            min_calls: model.breaker_min_calls,
            window: model.breaker_window,
            open_for: model.breaker_open_for,
        },
    }
}

/// A new kind of provider is a line here.
fn provider(provider: &config::Provider, connect_timeout: Duration) -> Result<Arc<dyn Provider>, String> {
    match provider.kind {
        ProviderKind::Extractive => Ok(Arc::new(Extractive)),
        ProviderKind::Anthropic => remote(provider, connect_timeout, Anthropic),
        ProviderKind::OpenAi => {
            let standard = OpenAi::default();
            let dialect = OpenAi {
                output_limit_field: match provider.output_limit_field {
                    Some(OutputLimitField::MaxCompletionTokens) => "max_completion_tokens",
                    Some(OutputLimitField::MaxTokens) => "max_tokens",
                    None => standard.output_limit_field,
                },
                stream_options: provider.stream_options.unwrap_or(standard.stream_options),
            };
            remote(provider, connect_timeout, dialect)
        }
    }
}

fn remote(
    provider: &config::Provider,
    connect_timeout: Duration,
    dialect: impl WireFormat,
) -> Result<Arc<dyn Provider>, String> {
    let http = build_http_client(connect_timeout).map_err(|error| error.to_string())?;
    let headers = provider.headers.iter().map(|(name, value)| (name.clone(), key(value)));
    let spec = HttpProviderSpec {
        base_url: provider.base_url.clone().unwrap_or_default(),
        key: provider.api_key.as_ref().map(key),
        key_header: provider.api_key_header.clone(),
        headers: headers.collect(),
        body: provider.body.clone().into_iter().collect(),
    };
    Ok(Arc::new(HttpProvider::new(http, dialect, spec).map_err(|error| error.to_string())?))
}

/// A secret that could not be had at start is none that a pool in use needs. Should its model be called all the same,
/// that fails with the reason; it is not called without a key.
fn key(secret: &Secret) -> SecretSource {
    match secret.source() {
        Ok(source) => {
            let source = source.clone();
            SecretSource::new(move || source.read())
        }
        Err(why) => {
            let why = why.to_owned();
            SecretSource::new(move || Err(why.clone()))
        }
    }
}

/// The built-in prompts, with those in their place that the settings have.
fn prompts(set: &config::Prompts) -> Result<Prompts, String> {
    let built_in = PromptTemplates::default();
    let templates = PromptTemplates {
        consolidate_system: set.consolidate_system.clone().unwrap_or(built_in.consolidate_system),
        consolidate_user: set.consolidate_user.clone().unwrap_or(built_in.consolidate_user),
        meta_system: set.meta_system.clone().unwrap_or(built_in.meta_system),
        meta_user: set.meta_user.clone().unwrap_or(built_in.meta_user),
    };
    Prompts::new(&templates).map_err(|wrong| {
        let wrong: Vec<String> =
            wrong.iter().map(|error| format!("consolidation.prompts: {error}")).collect();
        wrong.join("; ")
    })
}
