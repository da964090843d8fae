//! The users of sessions, and `DELETE /users/{user_id}`

use crate::support::app::TestApp;
use crate::support::backend::Backend;
use crate::support::client::assert_includes;
use precis::domain::api_key::Scope;
use serde_json::json;
use test_case::test_case;

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn erased_user_leaves_no_data(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    app.delete("/users/ada").await.problem(404, "user-not-found");
    for (session, user) in [("a1", "ada"), ("a2", "ada"), ("b", "bo")] {
        app.record_for(session, user).await;
    }
    for user in ["ada", "bo"] {
        app.put(&format!("/users/{user}/memory"), r#"{"content":"x"}"#).await.ok(200);
        app.put(&format!("/users/{user}/memory"), r#"{"content":"y"}"#).await.ok(200);
    }
    app.delete("/users/ada").await.ok(204);
    app.delete("/users/ada").await.problem(404, "user-not-found");
    for session in ["a1", "a2"] {
        app.get(&format!("/sessions/{session}")).await.problem(404, "session-not-found");
        app.get(&format!("/sessions/{session}/messages")).await.problem(404, "session-not-found");
        app.get(&format!("/sessions/{session}/revisions")).await.problem(404, "session-not-found");
    }
    let memory = app.get("/users/ada/memory").await;
    assert_includes(&memory, &json!({"version": 0, "content": ""}));
    assert_eq!(app.get("/users/ada/memory/revisions").await["items"], json!([]));
    assert_eq!(app.get("/sessions?user_id=ada").await["items"], json!([]));
    // Session ids and the memory document can be used again, by another user, too.
    assert_eq!(app.record_for("a1", "cy").await["first_seq"], 1);
    assert_eq!(app.put("/users/ada/memory", r#"{"content":"z"}"#).await.ok(200)["version"], 1);
    // Data of other users is unchanged.
    assert_eq!(app.get("/sessions/b").await["last_seq"], 2);
    assert_eq!(app.get("/users/bo/memory").await["content"], "y");
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn user_with_only_sessions_or_only_memory_can_be_erased(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    app.record_for("s", "ada").await;
    app.delete("/users/ada").await.ok(204);
    app.put("/users/bo/memory", r#"{"content":"x"}"#).await.ok(200);
    app.delete("/users/bo").await.ok(204);
    assert_eq!(app.get("/sessions").await["items"], json!([]));
}

/// Each kind of request binds a session that does not exist yet. Two replicas agree about the user.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn first_request_that_names_a_user_binds_the_session(backend: Backend) {
    let (app, other) = (TestApp::start(&backend, &[]).await, TestApp::start(&backend, &[]).await);
    app.put("/users/ada/memory", r#"{"content":"Likes tea."}"#).await.ok(200);
    let exchange = json!({"user_message": "a", "assistant_reply": "b"});
    let mut of_bo = exchange.clone();
    of_bo["user_id"] = "bo".into();
    for (session, path, body, exists) in [
        ("s1", "context", json!({"user_id": "ada"}), false),
        ("s2", "tools/memory_read?user_id=ada", json!({}), false),
        ("s3", "exchanges", json!({"user_message": "a", "assistant_reply": "b", "user_id": "ada"}), true),
    ] {
        let at = |rest: &str| format!("/sessions/{session}/{rest}");
        let response = app.post(&at(path), body).await;
        assert_eq!(response["user_id"], "ada", "{path}");
        // The binding is durable, and the session exists only after its first exchange.
        let context = other.context(session, &json!({})).await;
        assert_includes(&context, &json!({"user_id": "ada", "exists": exists, "memory": {"version": 1}}));
        if !exists {
            app.get(&format!("/sessions/{session}")).await.problem(404, "session-not-found");
            app.get(&at("messages")).await.problem(404, "session-not-found");
            app.get(&at("export")).await.problem(404, "session-not-found");
            app.post(&at("consolidations"), "").await.problem(404, "session-not-found");
            app.post(&at("revisions/0/restore"), "").await.problem(404, "session-not-found");
            let edit = json!({"summary": "a", "based_on": 0});
            app.post(&at("revisions"), edit).await.problem(404, "session-not-found");
        }
        assert_eq!(app.get("/sessions").await["items"].as_array().map(Vec::len), Some(usize::from(exists)));
        for (path, body) in [
            ("context", json!({"user_id": "bo"})),
            ("exchanges", of_bo.clone()),
            ("tools/memory_read?user_id=bo", json!({})),
        ] {
            other.post(&at(path), body).await.problem(409, "session-user-mismatch");
        }
        let stored = other.post(&at("exchanges"), &exchange).await.ok(201);
        assert_includes(&stored, &json!({"user_id": "ada", "first_seq": if exists { 3 } else { 1 }}));
        assert_includes(&app.context(session, &json!({})).await, &json!({"user_id": "ada", "exists": true}));
        app.delete(&format!("/sessions/{session}")).await.ok(204);
    }
    // A request that reads changes nothing.
    assert_includes(&app.context("t", &json!({})).await, &json!({"user_id": "default", "exists": false}));
    app.post("/sessions/t/tools/memory_read", "{}").await.ok(200);
    assert_eq!(app.record_for("t", "bo").await["user_id"], "bo");
}

/// The copy of a session without a user becomes invalid when another replica binds the session.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn session_without_user_gets_the_first_named_user_on_all_replicas(backend: Backend) {
    let set = [("memory.default_user", "")];
    let (app, other) = (TestApp::start(&backend, &set).await, TestApp::start(&backend, &set).await);
    app.put("/users/ada/memory", r#"{"content":"Likes tea."}"#).await.ok(200);
    for (session, named) in [
        ("by-context", "context"),
        ("by-exchange", "exchanges"),
        ("by-tool", "tools/memory_read?user_id=ada"),
    ] {
        let turn = json!({"user_message": "plums", "assistant_reply": "b"});
        let stored = app.post(&format!("/sessions/{session}/exchanges"), &turn).await.ok(201);
        assert_eq!(stored["user_id"], json!(null));
        for app in [&app, &other] {
            let context = app.context(session, &json!({})).await;
            assert_includes(&context, &json!({"user_id": null, "exists": true, "memory": {"version": 0}}));
        }
        let body = match named {
            "context" => json!({"user_id": "ada"}),
            "exchanges" => json!({"user_message": "c", "assistant_reply": "d", "user_id": "ada"}),
            _ => json!({}),
        };
        assert_eq!(other.post(&format!("/sessions/{session}/{named}"), body).await["user_id"], "ada");
        for app in [&app, &other] {
            let context = app.context(session, &json!({})).await;
            assert_includes(&context, &json!({"user_id": "ada", "memory": {"version": 1}}));
            assert_eq!(context, app.context(session, &json!({"user_id": "ada"})).await);
        }
        let found = app.get(&format!("/search?q=plums&user_id=ada&session_id={session}")).await;
        assert_eq!(found["items"].as_array().map(Vec::len), Some(1), "{found}");
    }
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn key_with_read_scope_does_not_bind_a_session(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    let reader = app.with_key(backend.key("acme", Scope::Read).await.expose());
    let writer = app.with_key(backend.key("acme", Scope::Write).await.expose());
    assert_eq!(reader.post("/sessions/s/tools/memory_read?user_id=ada", "{}").await["user_id"], "ada");
    assert_eq!(writer.context("s", &json!({"user_id": "bo"})).await["user_id"], "bo");
    reader
        .post("/sessions/s/tools/memory_read?user_id=ada", "{}")
        .await
        .problem(409, "session-user-mismatch");
}

/// An import gets the user of its session if neither request nor export names one.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn import_into_a_bound_session_keeps_its_user(backend: Backend) {
    let app = TestApp::start(&backend, &[("memory.default_user", "")]).await;
    let import = |path: &str, lines: &str| {
        app.request(reqwest::Method::POST, path)
            .header("content-type", "application/x-ndjson")
            .body(lines.to_owned())
    };
    let lines = r#"{"role":"user","content":"a"}"#;
    assert_eq!(import("/sessions/none/import", lines).await.ok(201)["user_id"], json!(null));
    let export = app.get("/sessions/none/export").await.text.clone();
    assert!(!export.contains("user_id"), "{export}");
    app.context("s", &json!({"user_id": "ada"})).await;
    import("/sessions/s/import?user_id=bo", lines).await.problem(409, "session-exists");
    assert_eq!(import("/sessions/s/import", &export).await.ok(201)["user_id"], "ada");
    assert_includes(&app.get("/sessions/s").await.ok(200), &json!({"user_id": "ada", "last_seq": 1}));
    assert_eq!(import("/sessions/s/import", &export).await.ok(200)["user_id"], "ada");
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn users_with_a_document_are_listed_page_by_page(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    app.record_for("s", "without a document").await;
    assert_eq!(*app.get("/users").await, json!({"items": [], "next": null}));
    for user in ["ada", "Zo%C3%AB", "bo%2Fx", "ada"] {
        app.put(&format!("/users/{user}/memory"), r#"{"content":"Likes tea."}"#).await.ok(200);
    }
    let (mut users, mut cursor) = (Vec::new(), String::new());
    loop {
        let page = app.get(&format!("/users?limit=2{cursor}")).await;
        users.extend(page["items"].as_array().expect("a list").iter().map(|user| user["user_id"].clone()));
        let Some(next) = page["next"].as_str() else { break };
        cursor = format!("&cursor={next}");
    }
    assert_eq!(users, ["Zoë", "ada", "bo/x"]);
    let first = app.get("/users").await["items"][1].clone();
    assert_includes(&first, &json!({"user_id": "ada", "version": 2, "words": 2}));
    app.get("/users?cursor=x").await.problem(422, "invalid-input");
    app.delete("/users/ada").await.ok(204);
    assert_eq!(app.get("/users").await["items"].as_array().map(Vec::len), Some(2));
}
