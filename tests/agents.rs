//! Agents of four frameworks run 60 turns with tools against a scripted model, once with the memory of the framework and
//! once with precis through the adapters in `examples/`.
//!
//! `scripts/agents` installs the frameworks:
//!
//! ```sh
//! scripts/postgres scripts/agents cargo test --locked --test agents -- --include-ignored
//! ```
#![cfg(test)]

use serde_json::{Value, json};
use std::env;
use std::path::Path;
use std::process::{Command, Stdio};
use support::app::TestApp;
use support::backend::Backend;
use support::client::{TestClient, column};
use support::factor::test_factor;
use support::lists::assert_openai_accepts;
use support::model_server::{Behaviour, Call, ModelServer};
use test_case::test_case;

#[path = "support"]
mod support {
    #[expect(dead_code, reason = "other tests use the rest of it")]
    pub(crate) mod app;
    pub(crate) mod backend;
    #[expect(dead_code, reason = "other tests use the rest of it")]
    pub(crate) mod client;
    pub(crate) mod factor;
    #[expect(dead_code, reason = "other tests use the rest of it")]
    pub(crate) mod lists;
    #[expect(dead_code, reason = "other tests use the rest of it")]
    pub(crate) mod model_server;
    #[expect(dead_code, reason = "other tests use the rest of it")]
    pub(crate) mod postgres;
}

const TURNS: usize = 60;
const MAX_ADAPTER_LINES: usize = 40;

/// Decides by the turn that the last user message names, and by the number of results after it: parallel calls, calls one
/// after another, one call with a text, or no call; then the reply.
fn scripted(call: &Call) -> Behaviour {
    let messages = call.body["messages"].as_array().expect("messages");
    let asked = messages.iter().rposition(|message| message["role"] == "user").expect("a user message");
    let text = match &messages[asked]["content"] {
        Value::String(text) => text.clone(),
        parts => parts[0]["text"].as_str().expect("a text").to_owned(),
    };
    let turn: usize = text.split([' ', ':']).nth(1).and_then(|turn| turn.parse().ok()).expect("a turn");
    let results = messages[asked..].iter().filter(|message| message["role"] == "tool").count();
    let arguments = json!({ "box": turn }).to_string();
    let tool = |index: usize, name: &'static str| (format!("call_{turn}_{index}"), name);
    let (text, calls) = match (turn % 4, results) {
        (0, 0) => (None, vec![tool(0, "look"), tool(1, "weigh")]),
        (1, 0) => (None, vec![tool(0, "look")]),
        (1, 1) => (None, vec![tool(1, "weigh")]),
        (2, 0) => (Some("Let me look."), vec![tool(0, "look")]),
        _ => {
            return Behaviour::Whole(format!(
                "Box {turn} belongs to Ada. It holds lemons, which she bought on 3 May; shelf {turn} is hers, too."
            ));
        }
    };
    let calls: Vec<Value> = calls
        .into_iter()
        .map(|(id, name)| json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}))
        .collect();
    let message = json!({"role": "assistant", "content": text, "tool_calls": calls});
    let body = json!({
        "id": "chatcmpl-test",
        "object": "chat.completion",
        "created": 0,
        "model": "scripted",
        "choices": [{"index": 0, "message": message, "finish_reason": "tool_calls", "logprobs": null}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    });
    Behaviour::Raw(200, vec![("content-type", "application/json".to_owned())], body.to_string())
}

/// Runs the script of a framework and returns the message list of each call of the model.
async fn run(script: &str, store: &str, precis_url: &str) -> Vec<Vec<Value>> {
    let model = ModelServer::start().await;
    model.default(Behaviour::choose(scripted));
    let is_python = Path::new(script).extension().is_some_and(|extension| extension == "py");
    let program = if is_python { "PRECIS_AGENTS_PYTHON" } else { "PRECIS_AGENTS_NODE" };
    let installed = env::var(program).expect("run this with scripts/agents");
    let root = env!("CARGO_MANIFEST_DIR");
    let home = tempfile::tempdir().expect("a folder");
    let mut command = Command::new(if is_python { &installed } else { "node" });
    command
        .arg(format!("{root}/tests/agents/{script}"))
        .args([store, &TURNS.to_string()])
        .current_dir(home.path())
        .env_clear()
        .env("PATH", env::var_os("PATH").unwrap_or_default())
        .env("HOME", home.path())
        .env(program, &installed)
        .env("PRECIS_URL", precis_url)
        .env("MODEL_URL", model.base_url());
    command.env("PYTHONPATH", format!("{root}/examples")).env("PYTHONDONTWRITEBYTECODE", "1");
    command.env("PYTHONUTF8", "1").env("NO_PROXY", "*").env("AI_SDK_LOG_WARNINGS", "false");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let ended =
        tokio::task::spawn_blocking(move || command.output().expect("it runs")).await.expect("it ran");
    let (output, errors) = (String::from_utf8_lossy(&ended.stdout), String::from_utf8_lossy(&ended.stderr));
    assert!(ended.status.success(), "{output}\n{errors}");
    let calls = model.calls().into_iter();
    calls.map(|mut call| serde_json::from_value(call.body["messages"].take()).expect("a list")).collect()
}

/// Returns the position of the first message that is not a system message.
fn end_of_system(messages: &[Value]) -> usize {
    messages.iter().position(|message| message["role"] != "system").expect("a message")
}

#[test_case("with_openai_agents.py"; "openai agents")]
#[test_case("with_langchain.py"; "langchain")]
#[test_case("with_pydantic_ai.py"; "pydantic ai")]
#[test_case("with_ai_sdk.mjs"; "ai sdk")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs scripts/agents"]
async fn agent_with_precis_receives_what_its_own_memory_would_contain(script: &str) {
    let complete = run(script, "memory", "").await;
    let mut backends = vec![Backend::sqlite().await];
    if test_factor() > 1 {
        backends.push(Backend::postgres().await);
    }
    for backend in backends {
        let app = TestApp::start(&backend, &[]).await;
        // The script itself compares the messages that precis returns with those of the framework's memory.
        let requests = run(script, "precis", &app.url).await;
        check(&app, &requests, &complete).await;
    }
}

/// Compares what the model received with precis with what it received with the framework's memory.
async fn check(app: &TestClient, requests: &[Vec<Value>], complete: &[Vec<Value>]) {
    assert_eq!(requests.len(), complete.len());
    let mut starts = vec![0];
    let mut previous: &[Value] = &[];
    for (messages, complete) in requests.iter().zip(complete) {
        assert_openai_accepts(&messages[end_of_system(messages)..]);
        let complete = &complete[end_of_system(complete)..];
        let (system, verbatim) = messages.split_at(end_of_system(messages));
        // The verbatim part is the end of the complete list; its beginning is in the summary.
        let start = complete.len().checked_sub(verbatim.len()).expect("not more than was said");
        assert_eq!(verbatim, &complete[start..]);
        assert!(system.iter().any(|message| message["content"] == "You know the boxes."), "{system:#?}");
        let has_summary = system.iter().any(|message| text_of(message).contains("## Session Summary"));
        assert_eq!(has_summary, start > 0, "{system:#?}");
        if starts.last() == Some(&start) {
            assert!(messages.starts_with(previous), "the prefix changed without a consolidation");
        } else {
            starts.push(start);
        }
        previous = messages;
    }
    // The prefix changes with each consolidation and at no other time.
    let revisions = app.get("/sessions/agents/revisions").await;
    let mut cursors: Vec<usize> =
        serde_json::from_value(column(&revisions["items"], "cursor")).expect("cursors");
    cursors.sort_unstable();
    assert!(cursors.len() >= 2, "{cursors:?}");
    assert_eq!(starts.split_off(1), cursors);
    // Nothing is lost: the history is the complete list with the last reply.
    let history = app.history("agents").await;
    let last = complete.last().expect("a call");
    assert_eq!(history.len(), last.len() - end_of_system(last) + 1);
}

fn text_of(message: &Value) -> String {
    message["content"].to_string()
}

#[test]
fn adapters_are_short() {
    let examples = std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/examples")).expect("a folder");
    let adapters = examples
        .map(|entry| entry.expect("a file").path())
        .filter(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("memory_")));
    let lines = |path| std::fs::read_to_string(path).expect("a text").lines().count();
    let lengths: Vec<usize> = adapters.map(lines).collect();
    assert_eq!(lengths.len(), 4);
    assert!(lengths.iter().all(|lines| *lines <= MAX_ADAPTER_LINES), "{lengths:?}");
}
