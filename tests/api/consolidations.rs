//! `POST /sessions/{session_id}/consolidations`

use crate::support::app::TestApp;
use crate::support::backend::Backend;
use crate::support::client::assert_includes;
use serde_json::{Value, json};
use test_case::test_case;

const PATH: &str = "/sessions/s/consolidations";

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn explicit_consolidation_ignores_threshold_and_mode(backend: Backend) {
    let app =
        TestApp::start(&backend, &[("consolidation.keep_recent", "2"), ("consolidation.mode", "off")]).await;
    app.post(PATH, "").await.problem(404, "session-not-found");
    app.record_turns("s", 0..3).await;
    let revision = app.post(PATH, "").await.ok(201);
    assert_includes(&revision, &json!({"revision": 1, "from_seq": 1, "to_seq": 4}));
    assert_eq!(revision, app.get("/sessions/s/revisions/1").await);
    assert_eq!(app.post(PATH, "").await.ok(200), Value::Null);
    assert_eq!(app.get("/sessions/s/revisions").await["items"].as_array().map(Vec::len), Some(1));
    let context = app.context("s", &json!({})).await;
    assert_includes(&context, &json!({"coverage": {"summary_through": 4}, "summary": {"revision": 1}}));
    app.record_turns("s", 3..4).await;
    assert_eq!(app.post(PATH, "").await.ok(201)["to_seq"], 6);
}

#[tokio::test]
async fn explicit_consolidation_without_pool_is_rejected() {
    let app = TestApp::on_sqlite(&[("llm.default_pool", "")]).await;
    app.record_turns("s", 0..30).await;
    let detail = app.post(PATH, "").await.problem(409, "consolidation-disabled");
    assert!(detail.contains("llm.default_pool"), "{detail}");
    assert_eq!(app.context("s", &json!({})).await["consolidation"]["outcome"], "disabled");
}
