//! `/sessions` and `/sessions/{session_id}`

use crate::support::app::{Set, TestApp};
use crate::support::backend::Backend;
use crate::support::client::assert_includes;
use serde_json::{Value, json};
use test_case::test_case;

const SMALL: Set<'static> = &[("consolidation.threshold", "6"), ("consolidation.keep_recent", "2")];

fn ids(page: &Value) -> Vec<String> {
    let items = page["items"].as_array().expect("items").iter();
    items.map(|item| item["session_id"].as_str().expect("an id").to_owned()).collect()
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn patch_replaces_metadata(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    let patch = |body: &'static str| app.patch("/sessions/s", body);
    patch(r#"{"metadata":{}}"#).await.problem(404, "session-not-found");
    app.record_turns("s", 0..1).await;
    let response = patch(r#"{"metadata": {"z": 1.0, "a": {"k": ["é", null]}}}"#).await;
    response.ok(200);
    for text in [response.text, app.get("/sessions/s").await.text] {
        assert!(text.contains(r#""metadata":{"z":1.0,"a":{"k":["é",null]}}"#), "{text}");
    }
    for (body, fields) in [
        ("{}", vec!["metadata"]),
        (r#"{"metadata":null}"#, vec!["metadata"]),
        (r#"{"metadata":[1]}"#, vec!["metadata"]),
        (r#"{"metadata":{},"user_id":"x","cursor":0}"#, vec!["user_id", "cursor"]),
    ] {
        assert_eq!(patch(body).await.fields(), fields, "{body}");
    }
    assert_eq!(app.get("/sessions/s").await["metadata"]["z"], 1.0);
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn erased_session_leaves_no_data(backend: Backend) {
    let app = TestApp::start(&backend, SMALL).await;
    let body = r#"{"user_message":"a","assistant_reply":"b","metadata":{"m":1}}"#;
    let keyed = || app.post("/sessions/s/exchanges", body).header("idempotency-key", "k");
    keyed().await.ok(201);
    app.record_turns("s", 0..5).await;
    app.record_turns("t", 0..1).await;
    app.context("s", &json!({})).await;
    assert_eq!(app.get("/sessions/s").await["summary"]["revision"], 1);
    app.delete("/sessions/s").await.ok(204);
    app.delete("/sessions/s").await.problem(404, "session-not-found");
    for path in ["", "/messages", "/revisions", "/revisions/1"] {
        app.get(&format!("/sessions/s{path}")).await.problem(404, "session-not-found");
    }
    for path in ["/consolidations", "/revisions/1/restore", "/revisions/0/restore"] {
        app.post(&format!("/sessions/s{path}"), "").await.problem(404, "session-not-found");
    }
    assert_eq!(app.context("s", &json!({})).await["messages"], json!([]));
    assert_eq!(ids(&app.get("/sessions").await.ok(200)), ["t"]);
    // The session can be created again, and its idempotency key can be used again.
    let again = keyed().await;
    assert_eq!((again.ok(201)["first_seq"].as_i64(), again.header("idempotent-replayed")), (Some(1), None));
    let session = app.get("/sessions/s").await;
    assert_includes(&session, &json!({"last_seq": 2, "cursor": 0}));
    assert_eq!(session["summary"], json!({"revision": 0, "words": 0, "text": ""}));
    assert_eq!(app.get("/sessions/s/revisions").await["items"], json!([]));
}
