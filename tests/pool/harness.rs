//! Pools of models at scripted servers.

use crate::model_server::{ModelServer, Protocol};
use precis::config::{self, Secret, SecretSource};
use precis::domain::message::Role;
use precis::domain::transcript::{TranscriptEntry, TranscriptLine};
use precis::llm::http::anthropic::Anthropic;
use precis::llm::http::openai::OpenAi;
use precis::llm::http::{HttpProvider, build_http_client};
use precis::llm::model::ModelSpec;
use precis::llm::pool::ModelPools;
use precis::llm::prompt::Prompts;
use precis::llm::provider::Provider;
use precis::llm::{Llm, LlmError, PoolResponse, Task};
use reqwest::Client;
use std::sync::Arc;
use std::time::Duration;

pub(crate) const KEY: &str = "sk-very-secret-0123456789";
pub(crate) const PROTOCOLS: [Protocol; 2] = [Protocol::OpenAi, Protocol::Anthropic];
/// First-token timeout and idle timeout: long enough for the loopback interface, short enough for a test.
pub(crate) const TOKEN_TIMEOUT: Duration = Duration::from_millis(500);
pub(crate) const CALL_TIMEOUT: Duration = Duration::from_millis(1500);
/// Longest delay before a retry.
pub(crate) const RETRY_MAX: Duration = Duration::from_millis(200);
/// Tolerance for durations on a busy machine.
pub(crate) const SLACK: Duration = Duration::from_secs(8);
pub(crate) const GOOD: &str = "Ada flies to Zürich on 3 May; Bo wants the 東京 numbers by Friday.";

/// Builds an HTTP client. It reads the system's certificates and blocks the thread meanwhile, so it is built before a
/// timeout starts.
pub(crate) fn client() -> Client {
    build_http_client(SLACK).expect("a client")
}

pub(crate) fn secret(text: &str) -> Secret {
    SecretSource::Text(text.into()).into()
}

/// A provider at `base_url` with [`KEY`].
pub(crate) fn provider_settings(base_url: &str) -> config::Provider {
    config::Provider {
        base_url: Some(base_url.to_owned()),
        api_key: Some(secret(KEY)),
        ..config::Provider::default()
    }
}

pub(crate) fn provider(client: Client, protocol: Protocol, settings: &config::Provider) -> Arc<dyn Provider> {
    match protocol {
        Protocol::OpenAi => {
            Arc::new(HttpProvider::new(client, OpenAi::new(settings), settings).expect("valid"))
        }
        Protocol::Anthropic => Arc::new(HttpProvider::new(client, Anthropic, settings).expect("valid")),
    }
}

/// A model with one retry and a circuit breaker that never opens.
pub(crate) fn model(name: &str, provider: Arc<dyn Provider>) -> ModelSpec {
    let settings = config::Model {
        model: format!("vendor/{name}"),
        output_limit: 777,
        timeout: CALL_TIMEOUT,
        first_token_timeout: Some(TOKEN_TIMEOUT),
        idle_timeout: TOKEN_TIMEOUT,
        retries: 1,
        retry_initial: Duration::from_millis(20),
        retry_max: RETRY_MAX,
        breaker_failure_percent: 100,
        breaker_min_calls: 1000,
        ..config::Model::default()
    };
    ModelSpec { name: name.to_owned(), provider, settings }
}

pub(crate) fn model_at(client: Client, name: &str, protocol: Protocol, base_url: &str) -> ModelSpec {
    model(name, provider(client, protocol, &provider_settings(base_url)))
}

/// A pool "p" with these models.
pub(crate) fn pool_of(models: Vec<ModelSpec>) -> ModelPools {
    let names = models.iter().map(|model| model.name.clone()).collect();
    let pool = config::Pool { models: names, deadline: Duration::from_secs(30), ..config::Pool::default() };
    let prompts = Prompts::new(&config::Prompts::default()).expect("valid");
    ModelPools::new(models, &[("p".to_owned(), pool)].into(), prompts).expect("valid")
}

/// A pool "p" with the model "m0" at this server.
pub(crate) fn pool(protocol: Protocol, server: &ModelServer) -> ModelPools {
    pool_of(vec![model_at(client(), "m0", protocol, &server.base_url())])
}

pub(crate) fn entry(text: &str) -> TranscriptLine {
    TranscriptEntry { role: Role::User, name: None, text: text.to_owned(), calls: Vec::new() }.into()
}

pub(crate) async fn consolidate(pools: &ModelPools) -> Result<PoolResponse, LlmError> {
    let entries = [entry("Ada: I fly on 3 May.")];
    let task = Task::Consolidate { lines: &entries, sentences: 5 };
    pools.complete("p", task).await
}

/// The models of the attempts, and the labels of their errors.
pub(crate) fn labels(error: &LlmError) -> Vec<(&str, &'static str)> {
    error.attempts.iter().map(|attempt| (attempt.model.as_str(), attempt.error.label())).collect()
}
