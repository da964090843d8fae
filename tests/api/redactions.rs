//! `DELETE /sessions/{session_id}/messages/{seq}` and `GET /sessions/{session_id}/redactions`

use crate::support::app::{Set, TestApp};
use crate::support::backend::Backend;
use crate::support::client::{TestClient, assert_includes, column};
use crate::support::model_server::{Behaviour, ModelServer};
use precis::domain::api_key::Scope;
use reqwest::Method;
use serde_json::{Value, json};
use std::sync::Arc;
use test_case::test_case;
use tokio::sync::Semaphore;

const SMALL: Set<'static> = &[("consolidation.threshold", "6"), ("consolidation.keep_recent", "2")];
/// The word of the message that is redacted.
const SECRET: &str = "plugh";

/// Returns the responses that show a session, as text.
async fn everything(app: &TestClient, session: &str) -> String {
    let mut all = String::new();
    for path in ["", "/messages", "/revisions", "/export", "/redactions"] {
        all.push_str(&app.get(&format!("/sessions/{session}{path}")).await.text);
    }
    for format in ["openai", "anthropic"] {
        let body = json!({"mode": "off", "format": format, "fields": "all"});
        all.push_str(&app.context(session, &body).await.to_string());
    }
    all
}

/// Returns a field of each item of a list.
async fn listed(app: &TestClient, path: &str, field: &str) -> Value {
    column(&app.get(path).await.json()["items"], field)
}

async fn redact(app: &TestClient, session: &str, seq: usize) -> Value {
    app.delete(&format!("/sessions/{session}/messages/{seq}")).await.ok(200)
}

/// Creates the session `s` of ten messages, of which the third has the secret, with a summary of the first eight.
async fn fill(app: &TestClient) {
    app.record_turns("s", 0..1).await;
    let messages =
        [json!({"role": "user", "name": "plugh", "content": "The word is plugh. Remember the word plugh."})];
    app.record("s", &messages).await;
    app.record_turns("s", 1..4).await;
    app.record("s", &[json!({"role": "assistant", "content": "Noted."})]).await;
    assert_eq!(app.context("s", &json!({})).await["consolidation"]["outcome"], "consolidated");
    assert_eq!(app.get("/sessions/s").await.json()["cursor"], 7);
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn redacted_message_is_in_no_response(backend: Backend) {
    let app = TestApp::start(&backend, SMALL).await;
    fill(&app).await;
    app.post("/sessions/s/fork", json!({"through_seq": 8, "new_id": "fork"})).await.ok(201);
    let before = everything(&app, "s").await;
    assert!(before.matches(SECRET).count() > 4, "{before}");
    assert_eq!(listed(&app, "/search?q=plugh", "session_id").await, json!(["fork", "s"]));

    let record = redact(&app, "s", 3).await;
    let expected =
        json!({"seq": 3, "key_id": null, "revision": 2, "cursor": 0, "redacted_revisions": [1], "copies": 1});
    assert_includes(&record, &expected);
    for session in ["s", "fork"] {
        let after = everything(&app, session).await;
        assert!(!after.contains(SECRET), "{after}");
        let message = app.get(&format!("/sessions/{session}/messages?after_seq=2&limit=1")).await.json();
        let item = json!({"seq": 3, "redacted_at": record["redacted_at"], "message": {"role": "user", "content": "[redacted]"}});
        assert_includes(&message["items"][0], &item);
        let listed = app.get(&format!("/sessions/{session}/redactions")).await.json();
        assert_eq!(listed, json!({"items": [record], "next": null}));
        assert_eq!(app.get(&format!("/sessions/{session}")).await.json()["cursor"], 0);
    }
    assert_eq!(listed(&app, "/search?q=plugh", "session_id").await, json!([]));
    assert_eq!(listed(&app, "/search?q=redacted", "session_id").await, json!([]));
    let other = app.get("/sessions/s/messages?after_seq=3&limit=1").await.json();
    assert!(other["items"][0].get("redacted_at").is_none(), "{other}");
    // Repeating the request returns the same record, also after the session has changed.
    app.post("/sessions/s/consolidations", "").await.ok(201);
    assert_eq!(redact(&app, "s", 3).await, record);
    assert_eq!(redact(&app, "fork", 3).await["redacted_at"], record["redacted_at"]);
    // A later redaction has a record of its own.
    let second = redact(&app, "s", 5).await;
    assert_includes(
        &second,
        &json!({"seq": 5, "revision": 4, "cursor": 0, "redacted_revisions": [3], "copies": 1}),
    );
    let pages: Vec<Value> = app.all_pages("/sessions/s/redactions", 1).await;
    assert_eq!(pages, [record, second]);
    app.delete("/sessions/s").await.ok(204);
    app.get("/sessions/s/redactions").await.problem(404, "session-not-found");
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn context_reports_redacted_messages_and_the_summary_is_rebuilt(backend: Backend) {
    let app = TestApp::start(&backend, SMALL).await;
    fill(&app).await;
    for seq in [9, 3, 10] {
        redact(&app, "s", seq).await;
    }
    let off = json!({"mode": "off"});
    let context = app.context("s", &off).await;
    let omitted = json!([
        {"from_seq": 3, "to_seq": 3, "reason": "redacted"}, {"from_seq": 9, "to_seq": 10, "reason": "redacted"},
    ]);
    let coverage = json!({
        "last_seq": 10, "summary_through": 0, "verbatim_from": 1, "omitted": omitted, "shortened": [],
    });
    assert_eq!(context["coverage"], coverage);
    assert_eq!(context["messages"].as_array().expect("a list").len(), 10, "placeholders keep the list valid");
    assert_eq!(context["messages"][2], json!({"role": "user", "content": "[redacted]"}));
    let budget = app.context("s", &json!({"mode": "off", "max_tokens": 60})).await["coverage"].clone();
    assert_eq!(budget["omitted"][0]["reason"], "max_tokens");
    assert_eq!(budget["omitted"][1], omitted[1]);
    // The next context summarises the messages again, without the placeholders.
    let context = app.context("s", &json!({})).await;
    assert_eq!(context["consolidation"]["outcome"], "consolidated");
    let system = context["messages"][0]["content"].as_str().expect("a system message");
    assert!(system.contains("## Session Summary") && !system.contains("redacted"), "{system}");
    assert_eq!(context["coverage"]["omitted"], json!([omitted[1]]), "the summary covers the first one");
    let kinds = listed(&app, "/sessions/s/revisions", "kind").await;
    assert_eq!(kinds, json!(["consolidation", "redaction", "redaction", "redaction", "consolidation"]));
    let lost = listed(&app, "/sessions/s/revisions", "redacted_seq").await;
    assert_eq!(lost, json!([null, null, null, 3, 3]));
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn revision_without_text_cannot_be_restored(backend: Backend) {
    let app = TestApp::start(&backend, SMALL).await;
    fill(&app).await;
    redact(&app, "s", 3).await;
    let response = app.post("/sessions/s/revisions/1/restore", "").await;
    let detail = response.problem(409, "revision-redacted");
    assert!(detail.contains("message 3"), "{detail}");
    assert_includes(
        &app.get("/sessions/s/revisions/1").await.json(),
        &json!({"text": "", "added": "", "redacted_seq": 3}),
    );
    assert_eq!(app.post("/sessions/s/revisions/2/restore", "").await.ok(201)["cursor"], 0);
    assert_eq!(app.post("/sessions/s/revisions/0/restore", "").await.ok(201)["cursor"], 0);
    app.post("/sessions/s/revisions/9/restore", "").await.problem(404, "revision-not-found");
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn redacted_session_survives_export_and_import(backend: Backend) {
    let app = TestApp::start(&backend, SMALL).await;
    fill(&app).await;
    let old = app.get("/sessions/s/export").await.text;
    redact(&app, "s", 3).await;
    app.post("/sessions/s/consolidations", "").await.ok(201);
    let import = async |session: &str, lines: &str| {
        let request = app.request(Method::POST, &format!("/sessions/{session}/import"));
        request.header("content-type", "application/x-ndjson").body(lines.to_owned()).await
    };
    let export = app.get("/sessions/s/export").await.text;
    import("copy", &export).await.ok(201);
    import("copy", &export).await.ok(200);
    import("s", &old).await.problem(409, "session-exists");
    let shown = async |session: &str| {
        let all = everything(&app, session).await.replace("\"copy\"", "\"s\"");
        all.lines().filter(|line| !line.contains("sha256")).collect::<String>()
    };
    let copy = shown("copy").await;
    assert!(!copy.contains(SECRET) && copy.contains("redacted_at"), "{copy}");
    assert_eq!(copy, shown("s").await);
    assert_eq!(listed(&app, "/search?q=redacted", "session_id").await, json!([]));
}

/// A client that has the message sends it again with the next turn, or repeats an exchange.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_that_still_have_the_message_do_not_store_it_again(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    let mut list = vec![
        json!({"role": "user", "content": "plugh"}),
        json!({"role": "assistant", "content": null, "reasoning_content": "plugh", "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{\"a\": \"plugh\"}"}},
        ]}),
        json!({"role": "tool", "tool_call_id": "c", "content": "plugh"}),
        json!({"role": "assistant", "content": "Done."}),
    ];
    let keyed = json!({"messages": list}).to_string();
    let record =
        async |body: &str| app.post("/sessions/s/exchanges", body).header("idempotency-key", "k").await;
    let first = record(&keyed).await.ok(201);
    let sync = async |list: &[Value]| app.post("/sessions/s/sync", json!({"messages": list})).await;
    for seq in 1..=3 {
        redact(&app, "s", seq).await;
    }
    let again = record(&keyed).await;
    assert!(again.is_replay());
    assert_eq!(again.ok(201), first);
    list.push(json!({"role": "user", "content": "Next."}));
    assert_includes(&sync(&list).await.ok(201), &json!({"matched": 4, "appended": 1}));
    // Role and calls must be the same.
    list[0]["role"] = json!("assistant");
    let detail = sync(&list).await.problem(409, "history-diverged");
    assert!(detail.contains("message 1"), "{detail}");
    list[0]["role"] = json!("user");
    list[1]["tool_calls"][0]["id"] = json!("d");
    sync(&list).await.problem(409, "history-diverged");
    let all = everything(&app, "s").await;
    assert!(!all.contains(SECRET), "{all}");
    let context = app.context("s", &json!({"mode": "off"})).await;
    let call = json!([{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]);
    assert_eq!(context["messages"][1]["tool_calls"], call);
    let result = json!({"role": "tool", "tool_call_id": "c", "content": "[redacted]"});
    assert_eq!(context["messages"][2], result);
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn redaction_needs_the_scope_admin_and_records_the_key(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    let client = async |tenant: &str, scope| app.with_key(backend.key(tenant, scope).await.expose());
    let (admin, write, other) =
        (client("a", Scope::Admin).await, client("a", Scope::Write).await, client("b", Scope::Admin).await);
    for client in [&admin, &other] {
        client.record_turns("s", 0..2).await;
    }
    write.delete("/sessions/s/messages/1").await.problem(403, "forbidden");
    let record = redact(&admin, "s", 1).await;
    let id = record["key_id"].as_str().expect("an id");
    assert_eq!(write.get("/sessions/s/redactions").await.json()["items"], json!([record]));
    assert!(!id.is_empty() && !id.starts_with("precis_"), "{id}");
    assert_eq!(other.get("/sessions/s/redactions").await.json()["items"], json!([]));
    assert!(!other.history("s").await.iter().any(|item| item.to_string().contains("redacted")));
    other.delete("/sessions/t/messages/1").await.problem(404, "session-not-found");
    let detail = admin.delete("/sessions/s/messages/5").await.problem(404, "message-not-found");
    assert!(detail.contains("message 5") && detail.contains('4'), "{detail}");
    for seq in ["0", "-1", "01", "x", "9223372036854775808"] {
        assert_eq!(admin.delete(&format!("/sessions/s/messages/{seq}")).await.fields(), ["seq"]);
    }
    admin.delete("/sessions/s/messages/1?dry_run=true").await.problem(422, "invalid-input");
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn running_consolidation_discards_its_result(backend: Backend) {
    let (model, release) = (ModelServer::start().await, Arc::new(Semaphore::new(0)));
    model.push(Behaviour::Held(Arc::clone(&release), "The word is plugh.".to_owned()));
    let app = TestApp::start_with_model(&backend, &model.base_url(), SMALL).await;
    app.record_turns("s", 0..2).await;
    app.record("s", &[json!({"role": "user", "content": "The word is plugh."})]).await;
    app.record_turns("s", 2..4).await;
    assert_eq!(
        app.context("s", &json!({"mode": "background"})).await["consolidation"]["outcome"],
        "scheduled"
    );
    model.until_calls(1).await;
    assert_eq!(redact(&app, "s", 5).await["revision"], 1);
    release.add_permits(1);
    model.until_idle().await;
    let context = app.context("s", &json!({})).await;
    assert_eq!(context["consolidation"]["outcome"], "consolidated");
    let all = everything(&app, "s").await;
    assert!(!all.contains(SECRET), "{all}");
    assert_eq!(listed(&app, "/sessions/s/revisions", "kind").await, json!(["consolidation", "redaction"]));
    let calls = model.calls();
    assert!(calls[0].user().contains(SECRET) && !calls[1].user().contains("redacted"), "{}", calls[1].user());
}
