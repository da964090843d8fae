//! `POST /sessions/{session_id}/fork` and `DELETE /sessions/{session_id}/messages`

use crate::support::app::{Set, TestApp};
use crate::support::backend::Backend;
use crate::support::client::{TestClient, assert_includes};
use precis::domain::api_key::Scope;
use reqwest::Method;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use test_case::test_case;

const SMALL: Set<'static> = &[("consolidation.threshold", "6"), ("consolidation.keep_recent", "2")];

/// Creates the session `s` of 26 messages, with consolidations up to the messages 8, 16 and 24.
async fn consolidated(app: &TestClient) {
    for turns in [0..5, 5..9, 9..13] {
        app.record_turns("s", turns).await;
        assert_eq!(app.context("s", &json!({})).await["consolidation"]["outcome"], "consolidated");
    }
}

async fn fork(app: &TestClient, through_seq: usize, new_id: &str) -> Value {
    let body = json!({"through_seq": through_seq, "new_id": new_id});
    app.post("/sessions/s/fork", body).await.ok(201)
}

async fn rewind(app: &TestClient, session: &str, after: usize) -> Value {
    app.delete(&format!("/sessions/{session}/messages?after={after}")).await.ok(200)
}

/// Returns the context of a session with the ids of the session replaced.
async fn context(app: &TestClient, session: &str) -> Value {
    let mut context = app.context(session, &json!({"mode": "off", "user_message": "And now?"})).await;
    context["session_id"] = Value::Null;
    context
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fork_continues_from_its_message(backend: Backend) {
    let app = TestApp::start(&backend, SMALL).await;
    app.record_turns("s", 0..1).await;
    app.patch("/sessions/s", json!({"metadata": {"a": 1.0}})).await.ok(200);
    consolidated(&app).await;
    let history = app.history("s").await;
    let (before, export) = (app.get("/sessions/s").await.json(), app.get("/sessions/s/export").await.text);
    let revisions = app.get("/sessions/s/revisions").await.json();
    let cursors: Vec<_> =
        revisions["items"].as_array().expect("items").iter().map(|item| item["cursor"].clone()).collect();
    assert_eq!(cursors, [26, 18, 10]);
    for (through_seq, cursor, revision) in
        [(28, 26, 3), (26, 26, 3), (25, 18, 2), (11, 10, 1), (9, 0, 0), (1, 0, 0)]
    {
        let id = format!("fork {through_seq}");
        let expected = json!({
            "session_id": id, "last_seq": through_seq, "cursor": cursor, "revision": revision,
            "forked_from": {"session_id": "s", "through_seq": through_seq, "kind": "fork"},
        });
        assert_eq!(fork(&app, through_seq, &id).await, expected);
        let path = format!("/sessions/fork%20{through_seq}");
        let state = app.get(&path).await;
        assert_includes(&state, &json!({"metadata": {"a": 1.0}, "forked_from": expected["forked_from"]}));
        assert_eq!(state["created_at"], before["created_at"]);
        assert_eq!(app.history(&format!("fork%20{through_seq}")).await, history[..through_seq]);
        let context = app.context(&format!("fork%20{through_seq}"), &json!({"mode": "off"})).await;
        let coverage = json!({
            "last_seq": through_seq, "summary_through": cursor, "verbatim_from": cursor + 1, "omitted": [],
            "shortened": [],
        });
        assert_eq!(context["coverage"], coverage);
        // Export and import of a fork are those of any session.
        let lines = app.get(&format!("{path}/export")).await.text;
        let import = app.request(Method::POST, &format!("/sessions/import-{through_seq}/import"));
        let imported =
            import.header("content-type", "application/x-ndjson").body(lines.clone()).await.ok(201);
        assert_includes(&imported, &json!({"last_seq": through_seq, "cursor": cursor}));
        let again = app.get(&format!("/sessions/import-{through_seq}/export")).await.text;
        let renamed = lines.replacen(&format!("\"{id}\""), &format!("\"import-{through_seq}\""), 1);
        assert_eq!(again.lines().rev().skip(1).last(), renamed.lines().next());
    }
    assert_eq!(context(&app, "fork%2028").await, context(&app, "s").await);
    assert_eq!(app.get("/sessions/s").await, before);
    assert_eq!(app.get("/sessions/s/export").await.text, export);
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rewound_session_retries_a_turn_and_keeps_its_branch(backend: Backend) {
    let app = TestApp::start(&backend, SMALL).await;
    consolidated(&app).await;
    let (history, before) = (app.history("s").await, context(&app, "s").await);
    let state = app.get("/sessions/s").await.json();
    let forked = fork(&app, 19, "fork").await;
    let rewound = rewind(&app, "s", 19).await;
    let branch = rewound["branch"].as_str().expect("a branch").to_owned();
    assert_includes(&rewound, &json!({"session_id": "s", "last_seq": 19, "cursor": 16, "revision": 2}));
    assert_eq!((&rewound["cursor"], &rewound["revision"]), (&forked["cursor"], &forked["revision"]));
    assert_eq!(app.history("s").await, history[..19]);
    assert_eq!(context(&app, "s").await, context(&app, "fork").await);
    // The branch is the old session.
    assert_eq!((app.history(&branch).await, context(&app, &branch).await), (history.clone(), before));
    let origin = json!({"session_id": "s", "through_seq": 19, "kind": "rewind"});
    let of_branch = app.get(&format!("/sessions/{branch}")).await.json();
    assert_eq!(of_branch["forked_from"], origin);
    for field in ["user_id", "metadata", "last_seq", "summary", "tokens", "created_at", "updated_at"] {
        assert_eq!(of_branch[field], state[field], "{field}");
    }
    // Both are in the list of the session's forks, the most recently active first, and so is a page of it.
    let forks = async |query: &str| {
        let page = app.get(&format!("/sessions?forked_from={query}")).await.ok(200);
        let ids = page["items"].as_array().expect("items").iter().map(|item| item["session_id"].clone());
        (ids.collect::<Vec<_>>(), page["next"].as_str().map(str::to_owned))
    };
    let copy = app.post("/sessions/fork/fork", json!({"through_seq": 1, "new_id": "fork of the fork"})).await;
    copy.ok(201);
    let (both, next) = forks("s").await;
    let ids: BTreeSet<&str> = both.iter().filter_map(Value::as_str).collect();
    assert_eq!((ids, next), (BTreeSet::from(["fork", &branch]), None));
    let (first, next) = forks("s&limit=1").await;
    let second = forks(&format!("s&limit=1&cursor={}", next.expect("a page"))).await;
    assert_eq!(([first, second.0].concat(), second.1), (both, None));
    assert_eq!(forks("fork").await.0, ["fork of the fork"]);
    for none in [branch.as_str(), "unknown", "s&user_id=someone"] {
        assert_eq!(forks(none).await, (vec![], None));
    }
    assert_eq!(app.get("/sessions?forked_from=").await.fields(), ["forked_from"]);
    app.delete("/sessions/fork%20of%20the%20fork").await.ok(204);
    // The second attempt changes nothing.
    let again = rewind(&app, "s", 19).await;
    assert_eq!(
        again,
        json!({"session_id": "s", "last_seq": 19, "cursor": 16, "revision": 2, "branch": null})
    );
    let turn = json!({"user_message": "Again?", "assistant_reply": "Of course."});
    assert_eq!(app.post("/sessions/s/exchanges", turn).await.ok(201)["first_seq"], 20);
    // Search finds the messages of the session only.
    let hits = async |q: &str, session: &str| {
        let list = app.get(&format!("/search?q={q}&session_id={session}&neighbours=0")).await;
        list["items"].as_array().expect("items").len()
    };
    assert_eq!((hits("course", "s").await, hits("course", &branch).await), (1, 0));
    assert_eq!((hits("plan", "s").await, hits("plan", &branch).await), (9, 0));
    // All messages can be removed, too.
    let cleared = rewind(&app, "s", 0).await;
    assert_includes(&cleared, &json!({"last_seq": 0, "cursor": 0, "revision": 0}));
    assert_eq!(app.context("s", &json!({})).await["coverage"]["last_seq"], 0);
    app.get("/sessions/s").await.problem(404, "session-not-found");
    assert_eq!(rewind(&app, "s", 0).await["branch"], Value::Null);
    app.record_turns("s", 0..1).await;
    let sessions = app.get("/sessions").await;
    assert_eq!(sessions["items"].as_array().expect("items").len(), 4);
    app.delete("/sessions/s").await.ok(204);
    let sessions = app.get("/sessions").await;
    assert_eq!(sessions["items"][0]["session_id"], "fork");
    assert_eq!(sessions["items"].as_array().expect("items").len(), 1, "{sessions}");
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn impossible_forks_and_rewinds_are_rejected(backend: Backend) {
    let app = TestApp::start(&backend, &[("limits.max_fork_messages", "4")]).await;
    app.post("/sessions/s/fork", json!({"through_seq": 1})).await.problem(404, "session-not-found");
    app.post("/sessions/s/fork", json!({"through_seq": 5})).await.problem(404, "session-not-found");
    app.delete("/sessions/s/messages?after=0").await.problem(404, "session-not-found");
    app.record_turns("s", 0..2).await;
    app.record_turns("other", 0..1).await;
    let fork = async |body: Value| app.post("/sessions/s/fork", body).await;
    for (body, fields) in [
        (json!({}), &["through_seq"][..]),
        (json!({"through_seq": -1}), &["through_seq"]),
        (json!({"through_seq": 0}), &["through_seq"]),
        (json!({"through_seq": 5}), &["through_seq"]),
        (json!({"through_seq": "1"}), &["through_seq"]),
        (json!({"through_seq": 1.5}), &["through_seq"]),
        (json!({"through_seq": 1, "new_id": ""}), &["new_id"]),
        (json!({"through_seq": 1, "new_id": "a\n"}), &["new_id"]),
        (json!({"through_seq": 1, "id": "x"}), &["id"]),
    ] {
        assert_eq!(fork(body.clone()).await.fields(), fields, "{body}");
    }
    // JSON has one type of number, and no type of Rust appears in an error.
    fork(json!({"through_seq": 1.0, "new_id": "one"})).await.ok(201);
    app.delete("/sessions/one").await.ok(204);
    let text = fork(json!({"through_seq": "1"})).await.text;
    assert!(text.contains("must be a JSON number"), "{text}");
    let exists = fork(json!({"through_seq": 1, "new_id": "other"})).await;
    assert!(exists.problem(409, "session-exists").contains("another id"));
    for query in ["", "?after=", "?after=-1", "?after=x", "?after=5"] {
        assert_eq!(app.delete(&format!("/sessions/s/messages{query}")).await.fields(), ["after"], "{query}");
    }
    assert_eq!(app.delete("/sessions/s/messages?after=1&dry_run=1").await.fields(), ["dry_run"]);
    // A session above the limit cannot be copied as a whole.
    app.record_turns("s", 2..3).await;
    let detail = fork(json!({"through_seq": 5})).await.problem(422, "copy-too-large");
    assert!(detail.contains("limits.max_fork_messages"), "{detail}");
    app.delete("/sessions/s/messages?after=5").await.problem(422, "copy-too-large");
    assert_eq!(app.get("/sessions").await["items"].as_array().expect("items").len(), 2);
    assert_eq!(app.history("s").await.len(), 6);
    let random = fork(json!({"through_seq": 4})).await.ok(201);
    assert_eq!(app.history(random["session_id"].as_str().expect("an id")).await.len(), 4);
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rewind_can_be_forbidden_and_needs_the_scope_write(backend: Backend) {
    let app = TestApp::start(&backend, &[("sessions.allow_rewind", "false")]).await;
    let (read, write) = (
        app.with_key(backend.key("acme", Scope::Read).await.expose()),
        backend.key("acme", Scope::Write).await,
    );
    let write = app.with_key(write.expose());
    write.record_turns("s", 0..2).await;
    let detail = write.delete("/sessions/s/messages?after=2").await.problem(403, "rewind-forbidden");
    assert!(detail.contains("sessions.allow_rewind"), "{detail}");
    assert_eq!(write.history("s").await.len(), 4);
    read.delete("/sessions/s/messages?after=2").await.problem(403, "forbidden");
    read.post("/sessions/s/fork", json!({"through_seq": 2})).await.problem(403, "forbidden");
    write.post("/sessions/s/fork", json!({"through_seq": 2})).await.ok(201);
}

/// The summary of the removed messages must not reach the session after them.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rewind_during_a_consolidation_discards_its_result(backend: Backend) {
    use crate::support::model_server::{Behaviour, ModelServer};
    let model = ModelServer::start().await;
    let app = TestApp::start_with_model(&backend, &model.base_url(), SMALL).await;
    app.record_turns("s", 0..5).await;
    model.push(Behaviour::Hang);
    app.context("s", &json!({"mode": "background"})).await;
    while model.calls().is_empty() {
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
    assert_eq!(app.get("/sessions/s").await["consolidation"]["state"], "running");
    rewind(&app, "s", 8).await;
    // The lease is free, although the run goes on.
    let state = app.get("/sessions/s").await.json();
    assert_includes(&state, &json!({"last_seq": 8, "cursor": 0, "consolidation": {"state": "idle"}}));
    app.record_turns("s", 5..7).await;
    model.default(Behaviour::answer("Everything was decided."));
    let revision = app.post("/sessions/s/consolidations", "").await.ok(201);
    assert_includes(&revision, &json!({"revision": 1, "from_seq": 1, "text": "Everything was decided."}));
}
