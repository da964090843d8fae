//! ModelPools of models at scripted servers, and what a test asks them.

use crate::model_server::{ModelServer, Protocol};
use precis::domain::message::Role;
use precis::domain::transcript::TranscriptEntry;
use precis::llm::circuit_breaker::CircuitBreakerPolicy;
use precis::llm::http::anthropic::Anthropic;
use precis::llm::http::openai::OpenAi;
use precis::llm::http::{HttpProvider, HttpProviderSpec, SecretSource, build_http_client};
use precis::llm::model::{ModelSpec, QueuePolicy, RetryPolicy};
use precis::llm::pool::{ModelPools, PoolSpec, PoolStrategy};
use precis::llm::prompt::{PromptTemplates, Prompts};
use precis::llm::provider::Provider;
use precis::llm::{Llm, LlmError, ModelError, PoolResponse, Task};
use reqwest::Client;
use std::sync::Arc;
use std::time::Duration;

pub(crate) const KEY: &str = "sk-very-secret-0123456789";
pub(crate) const PROTOCOLS: [Protocol; 2] = [Protocol::OpenAi, Protocol::Anthropic];
/// Until the first token, and between two: long enough for an answer on the loopback, short enough to wait for.
pub(crate) const TOKEN: Duration = Duration::from_millis(500);
/// Of a call.
pub(crate) const CALL: Duration = Duration::from_millis(1500);
/// The longest wait before a call is repeated.
pub(crate) const WAIT: Duration = Duration::from_millis(200);
pub(crate) const DEADLINE: Duration = Duration::from_secs(30);
/// For whatever is said to take a certain time: machines that run tests are busy.
pub(crate) const SLACK: Duration = Duration::from_secs(8);
pub(crate) const GOOD: &str = "Ada flies to Zürich on 3 May; Bo wants the 東京 numbers by Friday.";
pub(crate) const LONG: &str = "one two three four five six seven eight nine ten";

/// What calls the servers. It reads the system's certificates, which takes a moment in which the thread does nothing
/// else: so it is made before a time limit runs.
pub(crate) fn client() -> Client {
    build_http_client(SLACK).expect("a client")
}

/// A server at this address, called with [`KEY`].
pub(crate) fn remote(http: Client, protocol: Protocol, spec: HttpProviderSpec) -> Arc<dyn Provider> {
    let spec = HttpProviderSpec { key: Some(SecretSource::fixed(KEY)), ..spec };
    match protocol {
        Protocol::OpenAi => Arc::new(HttpProvider::new(http, OpenAi::default(), spec).expect("valid")),
        Protocol::Anthropic => Arc::new(HttpProvider::new(http, Anthropic, spec).expect("valid")),
    }
}

/// A model that is called again once, and whose breaker stays closed.
pub(crate) fn model(name: &str, protocol: Protocol, base_url: &str) -> ModelSpec {
    model_by(client(), name, protocol, base_url)
}

/// The same by way of this client.
pub(crate) fn model_by(http: Client, name: &str, protocol: Protocol, base_url: &str) -> ModelSpec {
    let spec = HttpProviderSpec { base_url: base_url.to_owned(), ..HttpProviderSpec::default() };
    ModelSpec {
        name: name.to_owned(),
        provider: remote(http, protocol, spec),
        model: format!("vendor/{name}"),
        output_limit: 777,
        input_limit: 100_000,
        timeout: CALL,
        first_token_timeout: Some(TOKEN),
        idle_timeout: TOKEN,
        retry: RetryPolicy { retries: 1, initial: Duration::from_millis(20), max: WAIT },
        queue: QueuePolicy { max_calls: 100, max_waiting: 100, timeout: DEADLINE },
        breaker: CircuitBreakerPolicy {
            failure_percent: 100,
            min_calls: 1000,
            window: DEADLINE,
            open_for: DEADLINE,
        },
    }
}

/// One pool, "p", of these models.
pub(crate) fn pool_of(models: Vec<ModelSpec>, strategy: PoolStrategy, deadline: Duration) -> ModelPools {
    let names = models.iter().map(|model| model.name.clone()).collect();
    let pool = PoolSpec { name: "p".to_owned(), models: names, strategy, deadline };
    let prompts = Prompts::new(&PromptTemplates::default()).expect("valid");
    ModelPools::new(models, vec![pool], prompts).expect("valid")
}

/// Models "m0", "m1" … at these servers, tried in this order.
pub(crate) fn pool(protocol: Protocol, servers: &[&ModelServer]) -> ModelPools {
    let models = servers.iter().enumerate();
    let http = client();
    let models = models
        .map(|(index, server)| model_by(http.clone(), &format!("m{index}"), protocol, &server.base_url()));
    pool_of(models.collect(), PoolStrategy::Fallback, DEADLINE)
}

pub(crate) fn entry(text: &str) -> TranscriptEntry {
    TranscriptEntry { role: Role::User, name: None, text: text.to_owned(), calls: Vec::new() }
}

pub(crate) async fn consolidate(pools: &ModelPools) -> Result<PoolResponse, LlmError> {
    let entries = [entry("Ada: I fly on 3 May.")];
    let task = Task::Consolidate { entries: &entries, sentences: 5 };
    pools.complete("p", task).await
}

pub(crate) async fn compress(pools: &ModelPools) -> Result<PoolResponse, LlmError> {
    let task = Task::MetaConsolidate { summary: LONG, sentences: 8 };
    pools.complete("p", task).await
}

pub(crate) fn causes(error: &LlmError) -> Vec<ModelError> {
    error.attempts.iter().map(|attempt| attempt.cause.clone()).collect()
}

/// The models of the attempts, and the words for what went wrong.
pub(crate) fn names(error: &LlmError) -> Vec<(&str, &'static str)> {
    error.attempts.iter().map(|attempt| (attempt.model.as_str(), attempt.cause.name())).collect()
}
