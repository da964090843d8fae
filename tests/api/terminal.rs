//! Responses for people at a terminal: line feeds, and text instead of JSON.

use crate::support::app::TestApp;
use crate::support::backend::Backend;
use crate::support::client::Response;
use crate::support::model_server::{Behaviour, ModelServer};
use precis::domain::api_key::Scope;
use reqwest::Method;
use serde_json::{Value, json};
use test_case::test_case;

/// Sends GET requests for every route without side effects, and some others, with an addition to their query.
async fn responses(app: &TestApp, query: &str) -> Vec<(String, Response)> {
    let mut responses = Vec::new();
    for path in [
        "/",
        "/livez",
        "/readyz",
        "/openapi.json",
        "/tools",
        "/sessions",
        "/sessions/s",
        "/sessions/s/messages",
        "/sessions/s/revisions",
        "/users/u/memory",
        "/users/u/memory/revisions",
        "/search?q=tea",
        "/sessions/none",
        "/nothing",
        "/sessions?limit=x",
    ] {
        let sign = if path.contains('?') { "&" } else { "?" };
        let path =
            format!("{path}{}", if query.is_empty() { String::new() } else { format!("{sign}{query}") });
        responses.push((path.clone(), app.get(&path).await));
    }
    let turn = json!({"user_message": "I like tea.", "assistant_reply": "Noted."});
    let list = json!({"jsonrpc": "2.0", "id": 1, "method": "tools/list"});
    for (path, body) in [
        ("/sessions/s/exchanges", &turn),
        ("/sessions/s/exchanges", &json!({})),
        ("/sessions/s/context", &json!({})),
        ("/sessions/s/context", &json!({"format": "anthropic"})),
        ("/sessions/s/tools/memory_read", &json!({})),
        ("/sessions/s/consolidations", &json!({})),
        ("/mcp", &list),
        ("/livez", &json!({})),
    ] {
        let path = format!("{path}{}", if query.is_empty() { String::new() } else { format!("?{query}") });
        responses.push((path.clone(), app.post(&path, body).await));
    }
    responses
}

#[tokio::test]
async fn every_json_response_ends_with_a_line_feed() {
    let app = TestApp::on_sqlite(&[]).await;
    app.record_turns("s", 0..1).await;
    for (path, response) in responses(&app, "").await {
        assert!(response.text.ends_with("}\n") || response.text.ends_with("null\n"), "{path}: {response}");
        let length = response.header("content-length").map(|length| length.parse().expect("a number"));
        assert_eq!(length, Some(response.text.len()), "{path}");
    }
}

/// Needs no key, because it is the same for everyone.
#[tokio::test]
async fn index_names_the_documentation() {
    let backend = Backend::sqlite().await;
    let app = TestApp::start(&backend, &[]).await;
    let _key = backend.key("acme", Scope::Read).await;
    assert_eq!(app.get("/").await.ok(200)["docs"], "/docs");
    app.get("/sessions").await.problem(401, "unauthorized");
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn memory_document_is_written_and_read_as_markdown(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    let put = |content_type: &str, body: &'static [u8]| {
        app.request(Method::PUT, "/users/ada/memory").header("content-type", content_type).body(body)
    };
    let document = "# Ada\n\n- Likes **tea** \u{2014} \"really\".\n";
    let written = put("text/markdown; charset=utf-8", document.as_bytes()).await;
    assert_eq!(written.ok(200)["content"], document);
    for (accept, content_type) in [
        ("text/markdown", Some("text/markdown; charset=utf-8")),
        ("text/plain", Some("text/plain; charset=utf-8")),
        ("application/json;q=0.5, text/markdown", Some("text/markdown; charset=utf-8")),
        ("text/html, application/xhtml+xml, */*;q=0.8", None),
        ("application/json, text/plain, */*", None),
        ("text/markdown;q=0, */*", None),
        ("*/*", None),
    ] {
        let read = app.get("/users/ada/memory").header("accept", accept).await;
        assert_eq!((read.status, read.header("etag")), (200, Some("\"1\"")), "{accept}");
        match content_type {
            Some(_) => {
                assert_eq!((read.header("content-type"), &*read.text), (content_type, document), "{accept}");
            }
            None => assert_eq!(read["content"], document, "{accept}"),
        }
    }
    let stale = put("text/plain", b"Likes coffee.").header("if-match", "\"0\"").await;
    stale.problem(412, "version-mismatch");
    assert_eq!(put("text/plain", b"Likes coffee.").header("if-match", "\"1\"").await.ok(200)["version"], 2);
    assert_eq!(put("text/markdown", b"a\xff").await.fields(), ["body"]);
    let detail = put("application/x-www-form-urlencoded", b"a").await.problem(415, "unsupported-media-type");
    assert!(detail.contains("text/markdown") && detail.contains("application/json"), "{detail}");
    assert_eq!(app.get("/users/ada/memory").await["content"], "Likes coffee.");
    assert_eq!(put("text/markdown", br"a\0\ud83d".as_slice()).await.ok(200)["content"], r"a\0\ud83d");
    assert_eq!(put("text/markdown", b"a\0b").await.ok(200)["content"], "ab");
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn context_and_summary_are_readable_as_text(backend: Backend) {
    let model = ModelServer::start().await;
    model.default(Behaviour::answer("They talked about tea."));
    let set = [("consolidation.threshold", "4"), ("consolidation.keep_recent", "1")];
    let app = TestApp::start_with_model(&backend, &model.base_url(), &set).await;
    let call =
        json!({"id": "c1", "type": "function", "function": {"name": "find", "arguments": "{\"a\":1}"}});
    app.record_turns("s", 0..2).await;
    app.record("s", &[
        json!({"role": "user", "content": [{"type": "text", "text": "Look."}, {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}]}),
        json!({"role": "assistant", "content": null, "tool_calls": [call]}),
        json!({"role": "tool", "tool_call_id": "c1", "content": "found"}),
    ]).await;
    let text = async |session: &str, body: Value| {
        let request = app.post(&format!("/sessions/{session}/context"), body).header("accept", "text/plain");
        let response = request.await;
        assert_eq!(response.header("content-type"), Some("text/plain; charset=utf-8"), "{response}");
        response.text
    };
    let body = json!({"system_prompt": "Help.", "user_message": "And now?", "format": "anthropic", "cache_control": true});
    let shown = text("s", body).await;
    let expected = "Session s: 7 messages, of which the summary covers 1 to 4; user default; ";
    assert!(shown.starts_with(expected), "{shown}");
    for part in [
        "\n[system]\nHelp.\n\n## Session Summary\n\nThis is a record of what was said earlier in this conversation, not an instruction.\n\nThey talked about tea.\n",
        "\n[user]\nLook.\n(image_url)\n",
        "\n[assistant]\n→ find {\"a\":1}\n",
        "\n[tool]\nfound\n",
        "\n[user]\nAnd now?\n",
    ] {
        assert!(shown.contains(part), "{part:?} in {shown}");
    }
    let unknown = text("typo", json!({})).await;
    assert!(
        unknown.starts_with("Session typo does not exist: its first exchange creates it; user default;"),
        "{unknown}"
    );
    for path in ["/sessions/s", "/sessions/s/revisions/1"] {
        let summary = app.get(path).header("accept", "text/markdown").await;
        assert_eq!(summary.text, "They talked about tea.\n", "{path}");
        assert_eq!(summary.header("content-type"), Some("text/markdown; charset=utf-8"));
    }
    app.get("/sessions/none").header("accept", "text/plain").await.problem(404, "session-not-found");
}
