//! `DELETE /users/{user_id}`

use crate::support::app::TestApp;
use crate::support::backend::Backend;
use crate::support::client::assert_includes;
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
