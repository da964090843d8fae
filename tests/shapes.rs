//! Sends each message shape of the corpus in `tests/shapes`: precis stores it, returns it unchanged, counts it, finds it,
//! summarises it, and renders it in both formats, or rejects it with an error that names the field.
//!
//! `tests/sdks.rs` validates the rendered contexts with the types of the official clients.
#![cfg(test)]

use reqwest::Method;
use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::sync::Arc;
use support::app::TestApp;
use support::backend::Backend;
use support::client::TestClient;
use support::lists::{
    assert_anthropic_accepts, assert_openai_accepts, tokens_of_anthropic, tokens_of_openai,
};
use support::model_server::ModelServer;
use support::shapes::{self, Shape};
use test_case::test_case;

#[path = "support"]
mod support {
    #[expect(dead_code, reason = "other tests use the rest of it")]
    pub(crate) mod app;
    pub(crate) mod backend;
    #[expect(dead_code, reason = "other tests use the rest of it")]
    pub(crate) mod client;
    #[expect(dead_code, reason = "other tests use the rest of it")]
    pub(crate) mod lists;
    #[expect(dead_code, reason = "other tests use the rest of it")]
    pub(crate) mod model_server;
    #[expect(dead_code, reason = "other tests use the rest of it")]
    pub(crate) mod postgres;
    pub(crate) mod shapes;
}

/// Shorter texts are words of the format, such as roles and types.
const MIN_CONTENT_CHARS: usize = 20;
/// Two images and their markers.
const MAX_ATTACHMENT_TOKENS: usize = 2 * 765 + 20;
/// Tokens of the list itself.
const PER_LIST: usize = 3;

/// Builds a session in which the messages of the shape are followed by a turn, and checks every use of them.
async fn check(app: Arc<TestClient>, model: Arc<ModelServer>, shape: Arc<Shape>) {
    let path = format!("/sessions/{}", shape.name);
    let response = app.post(&format!("{path}/exchanges"), shape.exchange()).await;
    if let Some(rejection) = &shape.rejects {
        let fields = response.fields();
        assert!(fields.contains(&rejection.field), "{fields:?}");
        let errors = response.json()["errors"].as_array().cloned().unwrap_or_default();
        let error = errors.iter().find(|error| error["field"] == *rejection.field).expect("the field");
        for word in &rejection.words {
            assert!(error["detail"].to_string().contains(word.as_str()), "no {word:?}: {error}");
        }
        app.get(&path).await.problem(404, "session-not-found");
        return;
    }
    response.ok(201);
    let stored = read_history(&app, &path).await;
    assert_unchanged(&stored, &shape);
    for format in ["openai", "anthropic"] {
        for fields in ["standard", "all"] {
            let context = check_context(&app, &path, &shape, format, fields).await;
            assert_eq!(context["coverage"]["last_seq"], stored.len(), "{context}");
        }
    }
    for text in &shape.finds {
        let query: String = text.bytes().fold("%22".to_owned(), |mut query, byte| {
            let _ = write!(query, "%{byte:02X}");
            query
        });
        let hits = app.get(&format!("/search?q={query}%22&session_id={}", shape.name)).await["items"].clone();
        let is_hit = |hit: &Value| hit["message"].to_string().contains(&encoded(text));
        assert!(hits.as_array().is_some_and(|hits| hits.iter().any(is_hit)), "{text:?} is not found: {hits}");
    }
    check_import(&app, &path, &shape, &stored).await;
    check_summary(&app, &model, &path, &shape, &stored).await;
}

/// Imports the shape as plain lines, exports the session, and imports that export: the messages are always the same.
async fn check_import(app: &TestClient, path: &str, shape: &Shape, stored: &[String]) {
    let lines: Vec<&str> = shape.messages.iter().map(|message| message.get()).collect();
    let (plain, again) = (format!("{path}-plain"), format!("{path}-again"));
    for (path, source) in [(&plain, None), (&again, Some(format!("{plain}/export")))] {
        let lines = match source {
            Some(export) => app.get(&export).await.text,
            None => lines.join("\n"),
        };
        let request = app.request(Method::POST, &format!("{path}/import"));
        request.header("content-type", "application/x-ndjson").body(lines).await.ok(201);
        assert_eq!(read_history(app, path).await, stored, "{path}");
    }
}

/// Returns the text as it appears within a JSON string.
fn encoded(text: &str) -> String {
    Value::from(text).to_string().trim_matches('"').to_owned()
}

/// Returns the messages as JSON texts.
async fn read_history(app: &TestClient, path: &str) -> Vec<String> {
    #[derive(Deserialize)]
    struct Page {
        items: Vec<Item>,
    }
    #[derive(Deserialize)]
    struct Item {
        message: Box<RawValue>,
    }
    let response = app.get(&format!("{path}/messages")).await;
    response.ok(200);
    let page: Page = serde_json::from_str(&response.text).expect("a page");
    page.items.into_iter().map(|item| item.message.get().to_owned()).collect()
}

/// Asserts that the stored messages are those of the shape, byte for byte. In the Anthropic format, the results and the
/// text of a user message are stored as messages of their own.
fn assert_unchanged(stored: &[String], shape: &Shape) {
    let sent: Vec<&str> = shape.messages.iter().map(|message| message.get()).collect();
    if stored.len() == sent.len() {
        assert_eq!(stored, sent);
        return;
    }
    assert_eq!(shape.format, "anthropic");
    let parse = |json: &str| serde_json::from_str(json).expect("JSON");
    let stored: Vec<Value> = stored.iter().map(|json| parse(json)).collect();
    let sent: Vec<Value> = sent.into_iter().map(parse).collect();
    assert_eq!(blocks(&stored), blocks(&sent));
}

async fn check_context(app: &TestClient, path: &str, shape: &Shape, format: &str, fields: &str) -> Value {
    let body =
        json!({"format": format, "fields": fields, "system_prompt": "Be kind.", "user_message": "And now?"});
    let response = app.post(&format!("{path}/context"), &body).await;
    let context = response.ok(200);
    let place = format!("{format}, {fields}: {context:#}");
    let messages = context["messages"].as_array().expect("messages");
    // The result does not include the tokens of the list itself.
    let total =
        context["tokens"]["total"].as_u64().and_then(|total| usize::try_from(total).ok()).expect("a count");
    if fields == "standard" {
        let counted = if format == "openai" {
            assert_openai_accepts(messages);
            tokens_of_openai(messages)
        } else {
            assert_anthropic_accepts(&context);
            tokens_of_anthropic(&response.text)
        };
        assert_eq!(total, counted - PER_LIST, "{place}");
    }
    // Everything that is sent is counted, whatever field it is in.
    assert!((least_tokens(&context["messages"])..most_tokens(messages)).contains(&total), "{place}");
    assert_eq!(context["coverage"]["omitted"], json!([]), "{place}");
    let text = context["messages"].to_string();
    for found in &shape.finds {
        assert!(text.contains(&encoded(found)), "no {found:?}: {place}");
    }
    // Anthropic's API requires the signed thinking of a turn with tools.
    let is_signed = format == "anthropic" && text.contains(r#""signature":"#);
    if fields == "standard" && !is_signed {
        for hidden in &shape.hides {
            assert!(!text.contains(&encoded(hidden)), "{hidden:?}: {place}");
        }
    } else if fields == "all" && format == shape.format {
        assert_complete(shape, messages);
    }
    context
}

/// Returns the tokens of all longer texts in a list, except the data of media. Whatever their field is, they are sent.
fn least_tokens(value: &Value) -> usize {
    match value {
        Value::Object(fields) => {
            let is_media = |key: &str| ["data", "file_data", "url", "image_url"].contains(&key);
            fields.iter().filter(|(key, _)| !is_media(key)).map(|(_, value)| least_tokens(value)).sum()
        }
        Value::Array(values) => values.iter().map(least_tokens).sum(),
        Value::String(text) if text.chars().count() >= MIN_CONTENT_CHARS => {
            tiktoken_rs::o200k_base_singleton().count_ordinary(text)
        }
        _ => 0,
    }
}

/// Returns the tokens of all bytes that are sent, and of their markers and attachments.
fn most_tokens(messages: &[Value]) -> usize {
    let bytes = |message: &Value| tiktoken_rs::o200k_base_singleton().count_ordinary(&message.to_string());
    messages.iter().map(|message| bytes(message) + MAX_ATTACHMENT_TOKENS).sum()
}

/// Asserts that a list in the format of the shape, with all fields, contains everything that was stored except nulls.
fn assert_complete(shape: &Shape, messages: &[Value]) {
    let parse = |message: &RawValue| serde_json::from_str(message.get()).expect("JSON");
    let stored: Vec<Value> = shape.messages.iter().map(|message| parse(message)).collect();
    let comparable = |messages: &[Value]| {
        let values = if shape.format == "openai" { messages.to_vec() } else { blocks(messages) };
        values.into_iter().map(without_empty_values).collect::<Vec<_>>()
    };
    let contained = comparable(messages);
    for expected in comparable(&stored) {
        // A call of the legacy form, which has no id, becomes a tool call, and its result a result with this id. Signed
        // thinking is sent in the format of its provider.
        let is_legacy = expected["role"] == "function" || !expected["function_call"].is_null();
        let is_signed = expected["role"] == "assistant" && !expected["content"][0]["signature"].is_null();
        // Chat completions have no blocks of the other format.
        let is_block = shape.format == "openai" && expected["content"][1]["type"] == "image";
        assert!(
            is_legacy || is_signed || is_block || contained.contains(&expected),
            "no {expected:#} in {contained:#?}"
        );
    }
}

/// Removes nulls, cache marks, and texts and lists that are empty: a message without content may get an empty one.
fn without_empty_values(value: Value) -> Value {
    match value {
        Value::Object(fields) => {
            let fields = fields.into_iter().map(|(key, value)| (key, without_empty_values(value)));
            let empty = [Value::Null, Value::from(""), json!([])];
            fields.filter(|(key, value)| key != "cache_control" && !empty.contains(value)).collect()
        }
        Value::Array(values) => values.into_iter().map(without_empty_values).collect(),
        value => value,
    }
}

/// Returns the content blocks of messages in the Anthropic format.
fn blocks(messages: &[Value]) -> Vec<Value> {
    let blocks = messages.iter().flat_map(|message| match &message["content"] {
        Value::String(text) => vec![json!({"type": "text", "text": text})],
        content => content.as_array().cloned().unwrap_or_default(),
    });
    blocks.collect()
}

/// Summarises the shape and checks what the model received. A call without a result is not summarised yet.
async fn check_summary(app: &TestClient, model: &ModelServer, path: &str, shape: &Shape, stored: &[String]) {
    let turn = json!({"user_message": "And now?", "assistant_reply": "Later."});
    app.post(&format!("{path}/exchanges"), &turn).await.ok(201);
    let revision = app.post(&format!("{path}/consolidations"), "{}").await.ok(201);
    let covered = revision["to_seq"].as_u64().and_then(|seq| usize::try_from(seq).ok()).expect("a seq");
    let (summarised, kept) = stored.split_at(covered);
    assert!(kept.first().is_none_or(|message| message.contains("_call")), "{revision}");
    let calls = model.calls();
    let prompt = calls.last().map(|call| call.user().to_owned()).unwrap_or_default();
    for found in shape.finds.iter().filter(|found| summarised.concat().contains(&encoded(found))) {
        assert!(prompt.contains(&encoded(found)), "{found:?} is not summarised: {prompt}");
    }
    for hidden in &shape.hides {
        assert!(!prompt.contains(&encoded(hidden)), "{hidden:?} is summarised: {prompt}");
    }
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn message_shapes_of_real_clients_are_kept_found_and_rendered(backend: Backend) {
    let model = Arc::new(ModelServer::start().await);
    let settings = [("consolidation.keep_recent", "2"), ("consolidation.mode", "off")];
    let app = TestApp::start_with_model(&backend, &model.base_url(), &settings).await;
    let client = Arc::new((*app).clone());
    let mut failed = Vec::new();
    for shape in shapes::load() {
        let name = shape.name.clone();
        // A task of its own, so that all failures are reported.
        let check = check(Arc::clone(&client), Arc::clone(&model), Arc::new(shape));
        if let Err(error) = tokio::spawn(check).await {
            let reason = error.into_panic().downcast::<String>().map(|reason| *reason).unwrap_or_default();
            failed.push(format!("{name}: {reason}"));
        }
    }
    assert!(failed.is_empty(), "{} shapes fail:\n\n{}", failed.len(), failed.join("\n\n"));
}

#[test]
fn corpus_contains_shapes_of_all_sources() {
    let shapes = shapes::load();
    assert!(shapes.len() >= 79, "{}", shapes.len());
    let packages: BTreeSet<&str> = shapes.iter().map(|shape| shape.package.as_str()).collect();
    for source in [
        "ai",
        "anthropic",
        "google-adk",
        "langchain-core",
        "litellm",
        "llama-index-core",
        "openai",
        "openai-agents",
        "pydantic-ai-slim",
        "strands-agents",
    ] {
        assert!(packages.contains(source), "no shape of {source}: {packages:?}");
    }
    let is_described = |shape: &&Shape| !shape.version.is_empty() && !shape.produced.is_empty();
    assert_eq!(shapes.iter().filter(is_described).count(), shapes.len());
}
