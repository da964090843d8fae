//! Tests with real clients: the agents of `examples/` with a scripted model, and the official MCP client with `/mcp`.
//!
//! The official clients are written in Python. `scripts/sdks` installs them:
//!
//! ```sh
//! scripts/postgres scripts/sdks cargo test --locked --test clients -- --include-ignored
//! ```
#![cfg(test)]

use precis::domain::api_key::{ApiKey, Scope};
use serde_json::{Value, json};
use std::env;
use std::io::Write as _;
use std::process::{Command, Stdio};
use support::app::TestApp;
use support::backend::Backend;
use support::client::{TestClient, assert_includes};
use support::model_server::{Behaviour, ModelServer};
use test_case::test_case;

#[path = "../examples/agent.rs"]
#[expect(dead_code, reason = "its main reads the environment")]
mod agent;

#[path = "support"]
mod support {
    #[expect(dead_code, reason = "other tests use the rest of it")]
    pub(crate) mod app;
    pub(crate) mod backend;
    #[expect(dead_code, reason = "other tests use the rest of it")]
    pub(crate) mod client;
    #[expect(dead_code, reason = "other tests use the rest of it")]
    pub(crate) mod keys;
    #[expect(dead_code, reason = "other tests use the rest of it")]
    pub(crate) mod model_server;
    #[expect(dead_code, reason = "other tests use the rest of it")]
    pub(crate) mod postgres;
}

const SAID: &str = "I like tea. What did we say about rhubarb?";
const REPLY: &str = "Noted. On rhubarb, we said nothing.";

/// Starts a model that reads and writes its memory, searches, calls an unknown tool, and replies.
async fn scripted() -> ModelServer {
    let model = ModelServer::start().await;
    model.push(Behaviour::tool_calls(&[
        ("call_1", "memory_read", "{}"),
        ("call_2", "memory_write", r#"{"content": "Likes tea."}"#),
    ]));
    model.push(Behaviour::tool_calls(&[
        ("call_3", "search_history", r#"{"query": "rhubarb"}"#),
        ("call_4", "../memory/read?all#1", "{}"),
    ]));
    model.push(Behaviour::Whole(REPLY.to_owned()));
    model
}

/// Checks the effects of a turn with [`SAID`]: the calls of the model, the history and the memory document.
async fn check(app: &TestClient, model: &ModelServer, session: &str) {
    let calls = model.calls();
    assert_eq!(calls.len(), 3);
    let first = &calls[0].body;
    assert_eq!(first["tools"], app.get("/tools").await["tools"]);
    let system = first["messages"][0]["content"].as_str().expect("a system message");
    assert!(system.contains("## Memory Guide"), "{system}");
    // The model received the result of each call.
    let last = calls[2].body["messages"].as_array().expect("messages").clone();
    let results: Vec<_> = last.iter().filter(|message| message["role"] == "tool").collect();
    let ids: Vec<_> = results.iter().map(|result| result["tool_call_id"].as_str().expect("an id")).collect();
    assert_eq!(ids, ["call_1", "call_2", "call_3", "call_4"]);
    assert_eq!(results[0]["content"], "Your memory document is empty.");
    assert!(results[1]["content"].as_str().expect("a text").contains("version 1"), "{results:?}");
    assert!(results[3]["content"].as_str().expect("a text").contains("The tools are"), "{results:?}");
    // The history contains all messages, and the next context contains the memory document.
    let messages = app.get(&format!("/sessions/{session}/messages")).await["items"].clone();
    let roles: Vec<_> =
        messages.as_array().expect("messages").iter().map(|item| item["message"]["role"].clone()).collect();
    assert_eq!(roles, ["user", "assistant", "tool", "tool", "assistant", "tool", "tool", "assistant"]);
    assert_eq!(
        (&messages[0]["message"]["content"], &messages[7]["message"]["content"]),
        (&json!(SAID), &json!(REPLY))
    );
    let context = app.context(session, &json!({})).await;
    assert_eq!(context["messages"][0]["content"], "## Your Memory\n\nLikes tea.");
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rust_agent_uses_memory_tools_and_history(backend: Backend) {
    let (app, model) = (TestApp::start(&backend, &[]).await, scripted().await);
    let agent = agent::Agent {
        http: app.http.clone(),
        session: format!("{}/sessions/demo", app.url).parse().expect("a URL"),
        model: (model.base_url(), "none".to_owned(), "scripted".to_owned()),
        tools: app.get("/tools").await.ok(200),
    };
    assert_eq!(agent.turn(SAID).await.expect("a reply"), REPLY);
    check(&app, &model, "demo").await;
}

/// Runs Python with this input and only these environment variables.
async fn python(arguments: &[&str], environment: &[(&str, &str)], input: &str) -> String {
    let program = env::var("PRECIS_SDKS_PYTHON").expect("run this with scripts/sdks");
    run_python(&program, arguments, environment, input).await
}

async fn run_python(program: &str, arguments: &[&str], environment: &[(&str, &str)], input: &str) -> String {
    let mut command = Command::new(program);
    command
        .args(arguments)
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .env_clear()
        .envs(environment.iter().copied());
    command.env("NO_PROXY", "*").env("PYTHONDONTWRITEBYTECODE", "1").env("PYTHONUTF8", "1");
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let input = input.to_owned();
    let run = move || {
        let mut child = command.spawn().expect("Python runs");
        child.stdin.take().expect("its input").write_all(input.as_bytes()).expect("written");
        child.wait_with_output().expect("it ends")
    };
    let ended = tokio::task::spawn_blocking(run).await.expect("it ran");
    let (output, errors) = (String::from_utf8_lossy(&ended.stdout), String::from_utf8_lossy(&ended.stderr));
    assert!(ended.status.success(), "{output}\n{errors}");
    output.into_owned()
}

#[tokio::test]
#[ignore = "needs scripts/sdks"]
async fn python_agent_uses_memory_tools_and_history() {
    let backend = Backend::sqlite().await;
    let (app, model) = (TestApp::start(&backend, &[]).await, scripted().await);
    let key = backend.key("acme", Scope::Write).await;
    let app = app.with_key(key.expose());
    let environment = [
        ("PRECIS_URL", app.url.as_str()),
        ("PRECIS_API_KEY", key.expose()),
        ("OPENAI_BASE_URL", &model.base_url()),
        ("OPENAI_API_KEY", "none"),
    ];
    let said = python(&["examples/agent.py", "café/1"], &environment, &format!("{SAID}\n")).await;
    assert_eq!(said, format!("{REPLY}\n"));
    check(&app, &model, "caf%C3%A9%2F1").await;
}

/// Starts precis with a session of the user `ada`, and with an API key if `with_key`.
async fn garden(backend: &Backend, with_key: bool) -> (TestApp, TestClient, Option<ApiKey>) {
    let app = TestApp::start(backend, &[]).await;
    let key = if with_key { Some(backend.key("acme", Scope::Write).await) } else { None };
    let client = app.with_key(key.as_ref().map_or("none", ApiKey::expose));
    let turn = json!({"user_message": "The rhubarb is ripe.", "assistant_reply": "Good.", "user_id": "ada"});
    client.post("/sessions/garden/exchanges", &turn).await.ok(201);
    (app, client, key)
}

#[tokio::test]
#[ignore = "needs scripts/sdks"]
async fn official_mcp_client_uses_tools_resources_and_prompts() {
    for with_key in [false, true] {
        let backend = Backend::sqlite().await;
        let (_app, client, key) = garden(&backend, with_key).await;
        let url = format!("{}/mcp", client.url);
        let mut arguments = vec!["tests/clients/mcp_tools.py", url.as_str(), "garden"];
        arguments.extend(key.as_ref().map(ApiKey::expose));
        let versions = python(&arguments, &[], "").await;
        assert_eq!(versions, "legacy 2025-11-25\nauto 2026-07-28\n");
        let memory: Value = client.get("/users/ada/memory").await.ok(200);
        assert_includes(&memory, &json!({"version": 2, "content": "Likes tea (auto)."}));
    }
}

/// The newest version that each client knows is the one that it asks for.
#[test_case("2024-11-05"; "version of 2024-11-05")]
#[test_case("2025-03-26"; "version of 2025-03-26")]
#[test_case("2025-06-18"; "version of 2025-06-18")]
#[tokio::test]
#[ignore = "needs scripts/sdks"]
async fn earlier_official_mcp_client_uses_tools_resources_and_prompts(version: &str) {
    let environments = env::var("PRECIS_SDKS_MCP").expect("run this with scripts/sdks");
    let program = format!("{environments}/{version}/bin/python");
    for with_key in [false, true] {
        let backend = Backend::sqlite().await;
        let (_app, client, key) = garden(&backend, with_key).await;
        let url = format!("{}/mcp", client.url);
        let mut arguments = vec!["tests/clients/mcp_generations.py", url.as_str(), "garden"];
        arguments.extend(key.as_ref().map(ApiKey::expose));
        assert_eq!(run_python(&program, &arguments, &[], "").await, format!("{version}\n"));
        let memory: Value = client.get("/users/ada/memory").await.ok(200);
        assert_includes(&memory, &json!({"version": 1, "content": format!("Likes tea ({version}).")}));
    }
}
