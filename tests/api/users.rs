//! `DELETE /users/{user_id}`

use crate::answer::{delete, get, put};
use crate::support::app::TestApp;
use crate::support::backend::Backend;
use serde_json::{Value, json};
use test_case::test_case;

async fn turn(app: &TestApp, session: &str, user: &str) -> Value {
    let body = json!({"user_message": "a", "assistant_reply": "b", "user_id": user});
    app.post(&format!("/sessions/{session}/exchanges"), &body).await
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn erased_user_leaves_no_data(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    delete(&app, "/users/ada").await.problem(404, "user-not-found");
    for (session, user) in [("a1", "ada"), ("a2", "ada"), ("b", "bo")] {
        turn(&app, session, user).await;
    }
    for user in ["ada", "bo"] {
        put(&app, &format!("/users/{user}/memory"), r#"{"content":"x"}"#).await.ok(200);
        put(&app, &format!("/users/{user}/memory"), r#"{"content":"y"}"#).await.ok(200);
    }
    delete(&app, "/users/ada").await.ok(204);
    delete(&app, "/users/ada").await.problem(404, "user-not-found");
    for session in ["a1", "a2"] {
        get(&app, &format!("/sessions/{session}")).await.problem(404, "session-not-found");
        get(&app, &format!("/sessions/{session}/messages")).await.problem(404, "session-not-found");
        get(&app, &format!("/sessions/{session}/revisions")).await.problem(404, "session-not-found");
    }
    let memory = app.get("/users/ada/memory").await;
    assert_eq!((&memory["version"], &memory["content"]), (&json!(0), &json!("")));
    assert_eq!(app.get("/users/ada/memory/revisions").await["items"], json!([]));
    assert_eq!(app.get("/sessions?user_id=ada").await["items"], json!([]));
    // As new; and another user may take the session's id.
    assert_eq!(turn(&app, "a1", "cy").await["first_seq"], 1);
    assert_eq!(put(&app, "/users/ada/memory", r#"{"content":"z"}"#).await.ok(200)["version"], 1);
    // Others have what they had.
    assert_eq!(app.get("/sessions/b").await["last_seq"], 2);
    assert_eq!(app.get("/users/bo/memory").await["content"], "y");
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn user_with_only_sessions_or_only_memory_can_be_erased(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    turn(&app, "s", "ada").await;
    delete(&app, "/users/ada").await.ok(204);
    put(&app, "/users/bo/memory", r#"{"content":"x"}"#).await.ok(200);
    delete(&app, "/users/bo").await.ok(204);
    assert_eq!(app.get("/sessions").await["items"], json!([]));
}
