//! Tests of the HTTP providers with real software: a LiteLLM proxy, in both protocols.
//!
//! `scripts/litellm` installs the proxy (the versions are in `scripts/litellm.txt`), starts it on a loopback port
//! without a database and without telemetry, and stops it afterwards:
//!
//! ```sh
//! scripts/litellm cargo test --locked --test litellm -- --ignored
//! ```
//!
//! Its models are mocked by LiteLLM (`mock_response`, `mock_delay`), without access to the network:
//!
//! | model | does |
//! | --- | --- |
//! | `answers` | responds with [`ANSWER`] between white space |
//! | `relayed` | calls the model `answers` of the same proxy |
//! | `slow` | takes 5 seconds before it answers; in chat completions only |
//! | `busy`, `broken` | fail with LiteLLM's rate limit error and internal server error |
//! | `small` | rejects every prompt as too long |
//! | `breaks` | fails within a stream; LiteLLM detects this before the stream begins |
//! | `busy-relayed` and so on | call the model of that name of the same proxy |
//!
//! In the messages API, LiteLLM does not stream a mocked response, even if the request asks for a stream. It streams a
//! relayed response, because it translates it. So `answers` and `relayed` test both forms.
//!
//! LiteLLM accepts its key in the headers of both protocols and in its own header. Without a database it would respond
//! with 400 to a wrong key; a hook makes it respond as with a database.
#![cfg(test)]

use precis::config::{self, OutputLimitField, SecretSource};
use precis::domain::consolidation::SummaryLimit;
use precis::domain::message::Role;
use precis::domain::transcript::{TranscriptEntry, TranscriptLine};
use precis::llm::call_memory::CallMemoryLimit;
use precis::llm::check::check_models;
use precis::llm::error::TimeoutPhase;
use precis::llm::http::anthropic::Anthropic;
use precis::llm::http::openai::OpenAi;
use precis::llm::http::{HttpProvider, build_http_client};
use precis::llm::model::ModelSpec;
use precis::llm::pool::ModelPools;
use precis::llm::prompt::Prompts;
use precis::llm::provider::{Completion, FinishReason, Provider, Request};
use precis::llm::{CallMemory, Llm, LlmError, ModelError, PoolResponse, Task, Usage};
use std::env;
use std::sync::Arc;
use std::time::Duration;

/// The response of the models of `scripts/litellm`.
const ANSWER: &str = "Ada lives in Berlin, and flies to Zürich on 3 May; Bo wants the 東京 numbers.";
const WRONG_KEY: &str = "sk-nobody-knows-this-key-0123456789";
const SECOND: Duration = Duration::from_secs(1);

/// The protocol of a model, with the variants of chat completions.
#[derive(Clone, Copy, Debug)]
enum Protocol {
    OpenAi(OutputLimitField, bool),
    Anthropic,
}

fn protocols() -> [Protocol; 2] {
    [Protocol::OpenAi(OutputLimitField::MaxCompletionTokens, true), Protocol::Anthropic]
}

fn variable(name: &str) -> String {
    env::var(name).unwrap_or_else(|_| panic!("{name} is not set: run this by scripts/litellm"))
}

fn remote(protocol: Protocol, key: &str, key_header: Option<&str>) -> HttpProvider {
    let client = build_http_client(5 * SECOND).expect("a client");
    let mut settings = config::Provider {
        base_url: Some(format!("{}/v1", variable("PRECIS_LITELLM_URL"))),
        api_key: Some(SecretSource::Text(key.into()).into()),
        api_key_header: key_header.map(str::to_owned),
        ..config::Provider::default()
    };
    match protocol {
        Protocol::OpenAi(output_limit_field, stream_options) => {
            settings.output_limit_field = Some(output_limit_field);
            settings.stream_options = Some(stream_options);
            HttpProvider::new(client, OpenAi::new(&settings), &settings)
        }
        Protocol::Anthropic => HttpProvider::new(client, Anthropic, &settings),
    }
    .expect("valid")
}

/// Returns the model of the proxy with this name.
fn model(protocol: Protocol, name: &str) -> ModelSpec {
    let settings = config::Model {
        model: name.to_owned(),
        output_limit: 500,
        timeout: 60 * SECOND,
        first_token_timeout: Some(60 * SECOND),
        idle_timeout: 60 * SECOND,
        retries: 1,
        retry_initial: Duration::from_millis(1),
        retry_max: SECOND,
        breaker_failure_percent: 100,
        breaker_min_calls: 100,
        ..config::Model::default()
    };
    let provider = Arc::new(remote(protocol, &variable("PRECIS_LITELLM_KEY"), None));
    ModelSpec { name: name.to_owned(), provider, settings }
}

fn prompts() -> Prompts {
    Prompts::new(&config::Prompts::default()).expect("valid")
}

fn pools(models: Vec<ModelSpec>) -> ModelPools {
    let names = models.iter().map(|model| model.name.clone()).collect();
    let pool = config::Pool { models: names, deadline: 120 * SECOND, ..config::Pool::default() };
    ModelPools::new(
        models,
        &[("p".to_owned(), pool)].into(),
        prompts(),
        CallMemoryLimit::new(usize::MAX, 1.0),
    )
}

fn conversation() -> [TranscriptLine; 2] {
    let line = |role, text: &str| -> TranscriptLine {
        TranscriptEntry { role, name: None, text: text.to_owned(), calls: Vec::new() }.into()
    };
    [
        line(Role::User, "I am Ada. I live in Berlin, and I fly to Zürich on 3 May."),
        line(Role::Assistant, "Noted. Bo still wants the 東京 numbers."),
    ]
}

async fn ask(pools: &ModelPools) -> Result<PoolResponse, LlmError> {
    pools
        .complete(
            "p",
            Task::Consolidate {
                lines: &conversation(),
                previous: "",
                sentences: 5,
                limit: SummaryLimit::Words(600),
            },
        )
        .await
}

/// Returns the response of a pool of these models. The last model must produce it.
async fn answer(models: Vec<ModelSpec>) -> PoolResponse {
    let last = models.last().expect("a model").name.clone();
    let answer = ask(&pools(models)).await.expect("an answer");
    assert_eq!((answer.text.as_str(), &answer.model), (ANSWER, &last));
    answer
}

/// Calls a model once.
async fn complete(provider: &HttpProvider, model: &str) -> Result<Completion, ModelError> {
    let (entries, prompts) = (conversation(), prompts());
    let model = config::Model {
        model: model.to_owned(),
        output_limit: 500,
        first_token_timeout: Some(60 * SECOND),
        idle_timeout: 60 * SECOND,
        ..config::Model::default()
    };
    let task =
        Task::Consolidate { lines: &entries, previous: "", sentences: 5, limit: SummaryLimit::Words(600) };
    let request = Request { model: &model, task, prompts: &prompts, memory: &CallMemory::default() };
    provider.complete(&request).await
}

/// Returns the errors of all attempts of a pool with this model.
async fn failures(model: ModelSpec) -> Vec<ModelError> {
    let error = ask(&pools(vec![model])).await.expect_err("no answer");
    error.attempts.into_iter().map(|attempt| attempt.error).collect()
}

#[tokio::test]
#[ignore = "needs scripts/litellm"]
async fn response_is_complete_and_trimmed_and_has_usage() {
    for protocol in protocols() {
        for name in ["answers", "relayed"] {
            let answer = answer(vec![model(protocol, name)]).await;
            let Usage { input_tokens, output_tokens } = answer.cost.usage;
            assert!(input_tokens > Some(10) && output_tokens > Some(5), "{protocol:?} {name}: {answer:?}");
            assert_eq!(Some(answer.cost.tokens), answer.cost.usage.total());
            assert_eq!((answer.cost.calls, answer.cost.failures), (1, 0));
        }
    }
}

#[tokio::test]
#[ignore = "needs scripts/litellm"]
async fn streamed_and_unstreamed_responses_are_read() {
    for protocol in protocols() {
        for name in ["answers", "relayed"] {
            let remote = remote(protocol, &variable("PRECIS_LITELLM_KEY"), None);
            let completion = complete(&remote, name).await.expect("an answer");
            assert_eq!((completion.text.trim(), completion.finish_reason), (ANSWER, FinishReason::Complete));
            let streams = name == "relayed" || matches!(protocol, Protocol::OpenAi(..));
            assert_eq!(completion.first_token.is_some(), streams, "{protocol:?} {name}");
        }
    }
}

#[tokio::test]
#[ignore = "needs scripts/litellm"]
async fn every_variant_of_a_chat_completion_is_accepted() {
    for output_limit_field in [OutputLimitField::MaxCompletionTokens, OutputLimitField::MaxTokens] {
        for stream_options in [true, false] {
            let protocol = Protocol::OpenAi(output_limit_field, stream_options);
            for name in ["answers", "relayed"] {
                let answer = answer(vec![model(protocol, name)]).await;
                // If the request does not ask for the usage, the service counts the tokens.
                assert_eq!(answer.cost.usage.total().is_some(), stream_options, "{protocol:?}");
                assert!(answer.cost.tokens > 50, "{protocol:?}: {answer:?}");
            }
        }
    }
}

#[tokio::test]
#[ignore = "needs scripts/litellm"]
async fn key_in_another_header_is_accepted() {
    let key = variable("PRECIS_LITELLM_KEY");
    for protocol in protocols() {
        for header in ["x-litellm-api-key", "x-api-key", "api-key"] {
            let completion = complete(&remote(protocol, &key, Some(header)), "answers").await;
            assert!(completion.is_ok(), "{protocol:?} {header}: {completion:?}");
        }
    }
}

#[tokio::test]
#[ignore = "needs scripts/litellm"]
async fn wrong_key_is_reported_without_the_key() {
    for protocol in protocols() {
        let wrong = || ModelSpec {
            provider: Arc::new(remote(protocol, WRONG_KEY, None)),
            ..model(protocol, "relayed")
        };
        let error = ask(&pools(vec![wrong()])).await.expect_err("no answer");
        let causes: Vec<&ModelError> = error.attempts.iter().map(|attempt| &attempt.error).collect();
        assert!(matches!(causes[..], [ModelError::Status { status: 401, .. }]), "{causes:?}");
        let checked = check_models(&[wrong()], vec![]).await.to_string();
        assert!(checked.contains("refused"), "{checked}");
        for text in [error.to_string(), format!("{error:?}"), checked] {
            // LiteLLM quotes the last four characters of a key.
            assert!(!text.contains(WRONG_KEY) && !text.contains("nobody-knows"), "{text}");
        }
        let wrong = ModelSpec { name: "wrong".to_owned(), ..wrong() };
        answer(vec![wrong, model(protocol, "relayed")]).await;
    }
}

#[tokio::test]
#[ignore = "needs scripts/litellm"]
async fn unknown_model_is_not_retried() {
    for protocol in protocols() {
        let causes = failures(model(protocol, "nobody")).await;
        assert!(matches!(causes[..], [ModelError::Status { status: 400..500, .. }]), "{causes:?}");
        let answer = answer(vec![model(protocol, "nobody"), model(protocol, "answers")]).await;
        assert_eq!((answer.cost.calls, answer.cost.failures), (2, 1));
    }
}

#[tokio::test]
#[ignore = "needs scripts/litellm"]
async fn temporary_failures_are_retried_before_the_next_model() {
    for protocol in protocols() {
        for (name, expected) in [
            ("busy", 429),
            ("broken", 500),
            ("busy-relayed", 429),
            ("broken-relayed", 500),
            ("breaks-relayed", 529),
        ] {
            let causes = failures(model(protocol, name)).await;
            assert_eq!(causes.len(), 2, "{protocol:?} {name}: {causes:?}");
            for cause in causes {
                let ModelError::Status { status, .. } = &cause else { panic!("{name}: {cause:?}") };
                assert_eq!(*status, expected, "{protocol:?} {name}");
            }
            let answer = answer(vec![model(protocol, name), model(protocol, "relayed")]).await;
            assert_eq!((answer.cost.calls, answer.cost.failures), (3, 2));
        }
    }
}

#[tokio::test]
#[ignore = "needs scripts/litellm"]
async fn too_long_prompt_is_recognised() {
    for protocol in protocols() {
        for name in ["small", "small-relayed"] {
            let pools = pools(vec![model(protocol, name)]);
            let before = pools.capacity("p");
            let error = ask(&pools).await.expect_err("no answer");
            let causes: Vec<&ModelError> = error.attempts.iter().map(|attempt| &attempt.error).collect();
            assert!(matches!(causes[..], [ModelError::PromptTooLong]), "{protocol:?} {name}: {causes:?}");
            assert!(error.is_prompt_too_long() && pools.capacity("p") < before);
            let mut large = model(protocol, "answers");
            large.settings.input_limit = 200_000;
            // The first answer makes the caller divide its messages, which does not help; then the next model gets them.
            let both = self::pools(vec![model(protocol, name), large]);
            assert!(ask(&both).await.expect_err("divided").is_prompt_too_long());
            let answer = ask(&both).await.expect("an answer");
            assert_eq!((answer.text.as_str(), answer.model.as_str()), (ANSWER, "answers"));
        }
    }
}

#[tokio::test]
#[ignore = "needs scripts/litellm"]
async fn slow_model_is_followed_by_the_next_one() {
    let limit = Duration::from_millis(500);
    for protocol in protocols() {
        let slow = || {
            let mut slow = model(protocol, "slow-relayed");
            slow.settings.first_token_timeout = Some(limit);
            slow
        };
        assert_eq!(
            failures(slow()).await,
            [ModelError::Timeout(TimeoutPhase::FirstToken, limit)],
            "{protocol:?}"
        );
        answer(vec![slow(), model(protocol, "relayed")]).await;
    }
}

#[tokio::test]
#[ignore = "needs scripts/litellm"]
async fn llm_check_reports_a_working_model() {
    let candidates = [("chat", protocols()[0]), ("messages", protocols()[1])]
        .map(|(name, protocol)| ModelSpec { name: name.to_owned(), ..model(protocol, "relayed") });
    let pools = vec![("p".to_owned(), vec!["chat".to_owned(), "messages".to_owned()])];
    let report = check_models(&candidates, pools).await;
    let table = report.to_string();
    assert!(report.passed(), "{table}");
    let rows: Vec<Vec<&str>> =
        table.lines().skip(1).take(2).map(|line| line.split("  ").map(str::trim).collect()).collect();
    for row in rows {
        let cells: Vec<&str> = row.into_iter().filter(|cell| !cell.is_empty()).collect();
        // Reachable, key accepted, streaming, with usage; then the times.
        assert_eq!(cells[1..5], ["yes", "accepted", "yes", "yes"], "{table}");
        assert_eq!(cells.last(), Some(&"works"), "{table}");
    }
    assert!(table.contains("pool p: chat, messages can answer"), "{table}");
}
