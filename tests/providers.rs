//! HTTP providers against a scripted model server: how each behaviour of a server in each wire format becomes a
//! completion or an error. The policies of pools have their tests in `src/llm/pool/tests`.
#![cfg(test)]

#[expect(dead_code, reason = "other tests use the rest of it")]
#[path = "support/model_server.rs"]
mod model_server;

use model_server::{Behaviour, ModelServer, Protocol, USAGE, refused_base_url};
use precis::config::{self, Secret, SecretSource};
use precis::domain::consolidation::SummaryLimit;
use precis::domain::message::Role;
use precis::domain::tokens;
use precis::domain::transcript::TranscriptEntry;
use precis::llm::error::TimeoutPhase;
use precis::llm::http::anthropic::Anthropic;
use precis::llm::http::openai::OpenAi;
use precis::llm::http::{HttpProvider, build_http_client};
use precis::llm::prompt::Prompts;
use precis::llm::provider::{Completion, FinishReason, Provider as _, Request};
use precis::llm::{CallMemory, ModelError, Task, Usage};
use serde_json::json;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;

const KEY: &str = "sk-very-secret-0123456789";
const PROTOCOLS: [Protocol; 2] = [Protocol::OpenAi, Protocol::Anthropic];
/// Timeout for events that must happen. Generous, so that a busy machine does not fail a test.
const PATIENCE: Duration = Duration::from_secs(30);
/// First-token timeout and idle timeout in tests of timeouts.
const TOKEN_TIMEOUT: Duration = Duration::from_millis(300);
const GOOD: &str = "Ada flies to Zürich on 3 May; Bo wants the 東京 numbers by Friday.";
/// A part of a response, which must never be used.
const HALF: &str = "HALF of an answer, which must not";

/// Streams of [`GOOD`] without usage.
const OPENAI_STREAM: &str = r#"data: {"choices":[{"index":0,"delta":{"role":"assistant","content":"Ada flies to Zürich"}}]}

data: {"choices":[{"index":0,"delta":{"content":" on 3 May; Bo wants the 東京 "}}]}

data: {"choices":[{"index":0,"delta":{"content":"numbers by Friday."},"finish_reason":"stop"}]}

data: [DONE]

"#;
const ANTHROPIC_STREAM: &str = r#"event: message_start
data: {"type":"message_start","message":{"content":[]}}

event: content_block_delta
data: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"Ada flies to Zürich on 3 May; Bo wants"}}

event: content_block_delta
data: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":" the 東京 numbers by Friday."}}

event: message_delta
data: {"type":"message_delta","delta":{"stop_reason":"end_turn"}}

event: message_stop
data: {"type":"message_stop"}

"#;

fn secret(text: &str) -> Secret {
    SecretSource::Text(text.into()).into()
}

/// A provider at `base_url` with [`KEY`].
fn settings(base_url: &str) -> config::Provider {
    config::Provider {
        base_url: Some(base_url.to_owned()),
        api_key: Some(secret(KEY)),
        ..config::Provider::default()
    }
}

fn provider(protocol: Protocol, settings: &config::Provider) -> HttpProvider {
    let client = build_http_client(PATIENCE).expect("a client");
    match protocol {
        Protocol::OpenAi => HttpProvider::new(client, OpenAi::new(settings), settings),
        Protocol::Anthropic => HttpProvider::new(client, Anthropic, settings),
    }
    .expect("valid")
}

/// Calls the provider with these timeouts between tokens.
async fn complete_within(provider: &HttpProvider, token_timeout: Duration) -> Result<Completion, ModelError> {
    let prompts = Prompts::new(&config::Prompts::default()).expect("valid");
    let text = "Ada: I fly on 3 May.".to_owned();
    let lines = [TranscriptEntry { role: Role::User, name: None, text, calls: Vec::new() }.into()];
    let model = config::Model {
        model: "vendor/small".to_owned(),
        output_limit: 777,
        first_token_timeout: Some(token_timeout),
        idle_timeout: token_timeout,
        ..config::Model::default()
    };
    let task =
        Task::Consolidate { lines: &lines, previous: "", sentences: 5, limit: SummaryLimit::Words(600) };
    let request = Request { model: &model, task, prompts: &prompts, memory: &CallMemory::default() };
    tokio::time::timeout(PATIENCE, provider.complete(&request)).await.expect("it ends")
}

async fn complete(provider: &HttpProvider) -> Result<Completion, ModelError> {
    complete_within(provider, PATIENCE).await
}

#[tokio::test]
async fn request_has_the_wire_format_and_response_is_joined_with_its_usage() {
    for protocol in PROTOCOLS {
        let server = ModelServer::start().await;
        for behaviour in [Behaviour::answer(GOOD), Behaviour::Whole(GOOD.to_owned())] {
            server.push(behaviour);
            let completion =
                complete(&provider(protocol, &settings(&server.base_url()))).await.expect("a completion");
            assert_eq!((completion.text.as_str(), completion.finish_reason), (GOOD, FinishReason::Complete));
            let usage = Usage { input_tokens: Some(USAGE.0), output_tokens: Some(USAGE.1) };
            assert_eq!((completion.usage, completion.tokens.total()), (usage, USAGE.0 + USAGE.1));
        }
        let call = &server.calls()[0];
        assert_eq!((&call.body["model"], &call.body["stream"]), (&json!("vendor/small"), &json!(true)));
        assert!(call.system().contains("memory of an AI agent") && call.user().contains("3 May"));
        match protocol {
            Protocol::OpenAi => {
                assert_eq!(call.header("authorization"), format!("Bearer {KEY}"));
                assert_eq!(call.body["stream_options"]["include_usage"], true);
                assert_eq!(call.body["max_completion_tokens"], 777);
            }
            Protocol::Anthropic => {
                assert_eq!((call.header("x-api-key"), call.header("authorization")), (KEY, ""));
                assert_eq!(call.header("anthropic-version"), "2023-06-01");
                assert_eq!(call.body["max_tokens"], 777);
                assert_eq!(call.body["messages"].as_array().map(Vec::len), Some(1));
            }
        }
    }
}

#[tokio::test]
async fn configured_headers_and_body_fields_are_sent() {
    for protocol in PROTOCOLS {
        let server = ModelServer::start().await;
        let body = [("reasoning".to_owned(), json!({"effort": "low"})), ("seed".to_owned(), json!(7))];
        let settings = config::Provider {
            api_key_header: Some("api-key".to_owned()),
            headers: [("x-title".to_owned(), secret("precis"))].into(),
            body: body.into(),
            ..settings(&format!("{}?api-version=1", server.base_url()))
        };
        complete(&provider(protocol, &settings)).await.expect("a completion");
        let call = &server.calls()[0];
        assert_eq!((call.header("api-key"), call.header("x-title")), (KEY, "precis"));
        assert_eq!((call.header("authorization"), call.header("x-api-key")), ("", ""));
        assert_eq!((&call.body["reasoning"]["effort"], &call.body["seed"]), (&json!("low"), &json!(7)));
        assert!(call.path.ends_with("?api-version=1"), "{}", call.path);
    }
}

#[tokio::test]
async fn unusual_but_valid_streams_are_accepted() {
    let filler = "x".repeat(500_000);
    for (protocol, stream) in [(Protocol::OpenAi, OPENAI_STREAM), (Protocol::Anthropic, ANTHROPIC_STREAM)] {
        let server = ModelServer::start().await;
        let comments = stream.replace("\n\n", "\n\n: a comment: data: {\n:\n\n");
        let unknown_events = stream.replace("\n\n", "\n\nevent: whatever\ndata: {\"type\":\"whatever\"}\n\n");
        for (name, content_type, body) in [
            ("LF", "text/event-stream", stream.to_owned()),
            ("labelled as text", "text/plain", stream.to_owned()),
            ("labelled as JSON", "application/json", stream.to_owned()),
            ("CR LF", "text/event-stream", stream.replace('\n', "\r\n")),
            ("CR", "text/event-stream", stream.replace('\n', "\r")),
            ("byte order mark", "text/event-stream", format!("\u{feff}{stream}")),
            ("comments", "text/event-stream", format!(": first\n\n{comments}")),
            ("unknown events", "text/event-stream", unknown_events),
            (
                "unknown fields",
                "text/event-stream",
                stream.replace("data: ", "id: 7\nretry: 60\nx\ny: 1\ndata: "),
            ),
            ("empty events", "text/event-stream", format!("data:\n\ndata: \n\n{stream}")),
            ("large comment", "text/event-stream", format!(": {filler}\n\n{stream}")),
            ("large event", "text/event-stream", format!("event: whatever\ndata: {filler}\n\n{stream}")),
        ] {
            server.push(Behaviour::Raw(200, vec![("content-type", content_type.to_owned())], body));
            let completion = complete(&provider(protocol, &settings(&server.base_url()))).await;
            let completion = completion.unwrap_or_else(|error| panic!("{protocol:?}, {name}: {error}"));
            assert_eq!(
                (completion.text.as_str(), completion.finish_reason),
                (GOOD, FinishReason::Complete),
                "{name}"
            );
            // Without usage, the tokens are counted here.
            let call = server.calls().pop().expect("a call");
            let tokens: usize = [call.system(), call.user(), GOOD].map(tokens::count).iter().sum();
            assert_eq!(
                (completion.usage, completion.tokens.total()),
                (Usage::default(), tokens as u64),
                "{name}"
            );
        }
    }
}

#[tokio::test]
async fn each_fault_becomes_an_error_that_does_not_quote_the_server() {
    let quote = format!("{HALF} contain {KEY}");
    let fail = |status| Behaviour::fail(status, &quote);
    let raw = |status, headers: &[(&'static str, &str)], body: &str| {
        let headers = headers.iter().map(|(name, value)| (*name, (*value).to_owned())).collect();
        Behaviour::Raw(status, headers, body.to_owned())
    };
    let web_page = format!("<html><head><title>{quote}</title></head></html>");
    // The label of the error, and `true` if the call is retried.
    let rows = [
        (Behaviour::BreakOff(quote.clone()), "truncated_stream", true),
        (Behaviour::EndEarly(quote.clone()), "truncated_stream", true),
        (raw(200, &[], ""), "truncated_stream", true),
        (Behaviour::garbage(), "protocol", false),
        (raw(200, &[("content-type", &format!("text/{KEY}"))], &web_page), "protocol", false),
        (raw(200, &[("content-encoding", &format!("x-{KEY}"))], &quote), "protocol", false),
        (raw(200, &[], &format!("{{\"error\":\"{quote}\"}}")), "protocol", false),
        (Behaviour::Whole("word ".repeat(300_000)), "protocol", false),
        (Behaviour::ErrorAfter(quote.clone(), HALF), "server_error", true),
        (raw(502, &[], &web_page), "server_error", true),
        (raw(307, &[("location", "http://127.0.0.1:9/")], ""), "status", false),
        (fail(400), "status", false),
        (fail(401), "unauthorized", false),
        (fail(403), "unauthorized", false),
        (fail(404), "not_found", false),
        (fail(408), "status", true),
        (fail(409), "status", true),
        (fail(413), "too_long", false),
        (Behaviour::fail(400, "prompt is too long: 9 > 8"), "too_long", false),
        (fail(425), "status", true),
        (fail(429), "rate_limited", true),
        (fail(500), "server_error", true),
        (raw(503, &[], ""), "server_error", true),
        (fail(529), "server_error", true),
    ];
    for protocol in PROTOCOLS {
        let server = ModelServer::start().await;
        let provider = provider(protocol, &settings(&server.base_url()));
        for (row, (behaviour, label, is_retryable)) in rows.iter().enumerate() {
            server.push(behaviour.clone());
            let error = complete(&provider).await.expect_err("a fault");
            assert_eq!((error.label(), error.is_retryable()), (*label, *is_retryable), "{row}: {error}");
            let text = format!("{error} {error:?} {provider:?}");
            assert!(!text.contains("HALF") && !text.contains("very-secret"), "{row}: {text}");
        }
        server.push(raw(429, &[("retry-after", "7")], "{\"error\":{\"code\":\"rate_limit_exceeded\"}}"));
        let error = complete(&provider).await.expect_err("a fault");
        assert!(
            matches!(error, ModelError::Status { retry_after: Some(delay), .. } if delay == Duration::from_secs(7)),
            "{error:?}"
        );
        let text = "status 429 (rate_limit_exceeded): the provider limits the number of requests or tokens";
        assert_eq!(error.to_string(), text);
    }
}

#[tokio::test]
async fn only_tokens_extend_the_timeouts() {
    let keep_alive = vec![": still here\n\n".to_owned(); 1000];
    let ping = "data: {\"type\":\"ping\",\"choices\":[{\"delta\":{\"content\":\"\"}}]}\n\n";
    let pings = vec![ping.to_owned(); 1000];
    for (protocol, stream) in [(Protocol::OpenAi, OPENAI_STREAM), (Protocol::Anthropic, ANTHROPIC_STREAM)] {
        let server = ModelServer::start().await;
        let provider = provider(protocol, &settings(&server.base_url()));
        for (behaviour, phase) in [
            (Behaviour::Hang, TimeoutPhase::FirstToken),
            (Behaviour::Slow(TOKEN_TIMEOUT / 10, keep_alive.clone()), TimeoutPhase::FirstToken),
            (Behaviour::Slow(TOKEN_TIMEOUT / 10, pings.clone()), TimeoutPhase::FirstToken),
            (Behaviour::HangAfter(HALF.to_owned()), TimeoutPhase::NextToken),
        ] {
            server.push(behaviour);
            let error = complete_within(&provider, TOKEN_TIMEOUT).await.expect_err("it is too slow");
            assert_eq!(error, ModelError::Timeout(phase, TOKEN_TIMEOUT), "{protocol:?}");
        }
        // Each event arrives within the timeout, all of them do not.
        let token = stream.split_inclusive("\n\n").find(|event| event.contains("Zürich")).expect("a token");
        let slow = [vec![token.to_owned(); 6], vec![stream.to_owned()]].concat();
        server.push(Behaviour::Slow(TOKEN_TIMEOUT / 4, slow));
        let completion = complete_within(&provider, TOKEN_TIMEOUT).await.expect("a completion");
        assert!(completion.text.ends_with(GOOD), "{}", completion.text);
    }
}

#[tokio::test]
async fn stream_without_the_end_of_an_event_is_read_up_to_a_limit() {
    let server = ModelServer::start().await;
    let part = "x".repeat(64 * 1024);
    for protocol in PROTOCOLS {
        let provider = provider(protocol, &settings(&server.base_url()));
        for begin in ["data: ", ": ", "data: y\ndata: "] {
            let parts = [vec![begin.to_owned()], vec![part.clone(); 32]].concat();
            server.push(Behaviour::Slow(Duration::ZERO, parts));
            let error = complete_within(&provider, PATIENCE).await.expect_err("the event does not end");
            let expected = ModelError::Protocol("the response is larger than any summary");
            assert_eq!(error, expected, "{protocol:?} {begin:?}");
        }
    }
}

#[tokio::test]
async fn connection_that_fails_is_an_error_that_is_retried() {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let closing = format!("http://{}/v1", listener.local_addr().expect("an address"));
    tokio::spawn(async move { while listener.accept().await.is_ok() {} });
    for protocol in PROTOCOLS {
        for (base_url, text) in [(refused_base_url(), "refused"), (closing.clone(), "without a response")] {
            let error = complete(&provider(protocol, &settings(&base_url))).await.expect_err("no connection");
            assert_eq!((error.label(), error.is_retryable()), ("connection", true), "{error}");
            assert!(error.to_string().contains(text), "{error}");
        }
    }
}

#[tokio::test]
async fn redirect_is_not_followed() {
    let (server, target) = (ModelServer::start().await, ModelServer::start().await);
    for protocol in PROTOCOLS {
        for status in [301, 302, 303, 307, 308] {
            let location = format!("{}/chat/completions", target.base_url());
            server.push(Behaviour::Raw(status, vec![("location", location)], String::new()));
            let error = complete(&provider(protocol, &settings(&server.base_url()))).await;
            assert_eq!(error.expect_err("a redirect").label(), "status");
        }
    }
    assert!(target.calls().is_empty());
}

#[tokio::test]
async fn cancelled_request_cancels_the_call() {
    let server = ModelServer::start().await;
    let release = Arc::new(Semaphore::new(0));
    server.push(Behaviour::Held(Arc::clone(&release), "LATE".to_owned()));
    let provider = provider(Protocol::OpenAi, &settings(&server.base_url()));
    tokio::select! {
        _ = complete(&provider) => panic!("the response is held"),
        () = server.until_calls(1) => {}
    }
    server.until_idle().await;
    assert!(!server.calls()[0].answered);
    assert_eq!((server.max_in_flight(), release.available_permits()), (1, 0));
}
