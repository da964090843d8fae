//! `/users/{user_id}/memory`

use crate::support::app::TestApp;
use crate::support::backend::Backend;
use crate::support::client::{Response, TestClient};
use serde_json::json;
use test_case::test_case;

const PATH: &str = "/users/u/memory";

async fn put_if(app: &TestClient, tag: &str, content: &str) -> Response {
    let body = json!({ "content": content }).to_string();
    app.put(PATH, body).header("if-match", tag).await
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn put_replaces_the_memory_document(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    let never = app.get(PATH).await;
    let empty =
        json!({"user_id": "u", "version": 0, "content": "", "words": 0, "tokens": 0, "updated_at": null});
    assert_eq!((never.ok(200), never.header("etag")), (empty, Some("\"0\"")));
    let content = "# Über uns\n\n- 東京 \\ \"x\" \t ends with blank ";
    let written = app.put(PATH, json!({ "content": content }).to_string()).await;
    assert_eq!((written.ok(200)["version"].as_i64(), written.header("etag")), (Some(1), Some("\"1\"")));
    let read = app.get(PATH).await;
    assert_eq!((read.json(), read.header("etag")), (written.json(), Some("\"1\"")));
    assert_eq!(read.json()["content"], content);
    assert!(read.json()["words"].as_i64() > Some(5) && read.json()["tokens"].as_i64() > Some(5));
    let versions = app.get("/users/u/memory/revisions").await.ok(200);
    let mut version = read.json();
    version["author"] = "http".into();
    assert_eq!(versions, json!({"items": [version], "next": null}));
    // An empty document is a version, too, and so is the same document again.
    for version in [2, 3] {
        assert_eq!(app.put(PATH, r#"{"content":""}"#).await.ok(200)["version"], version);
    }
    assert_eq!(app.get(PATH).await["content"], "");
    assert_eq!(app.get("/users/v/memory").await["version"], 0);
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn if_match_rejects_a_change_of_an_older_version(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    put_if(&app, "\"1\"", "a").await.problem(412, "version-mismatch");
    assert_eq!(put_if(&app, "\"0\"", "a").await.ok(200)["version"], 1);
    put_if(&app, "\"0\"", "b").await.problem(412, "version-mismatch");
    assert_eq!(put_if(&app, "\"1\"", "c").await.ok(200)["version"], 2);
    put_if(&app, "\"1\"", "d").await.problem(412, "version-mismatch");
    assert_eq!(put_if(&app, "*", "e").await.ok(200)["version"], 3);
    for garbage in ["3", "\"3", "\"three\"", "", "W/\"3\"", "\"3\", \"4\"", "é"] {
        assert_eq!(put_if(&app, garbage, "f").await.fields(), ["If-Match"], "{garbage}");
    }
    assert_eq!(app.get(PATH).await["content"], "e");
}

#[tokio::test]
async fn invalid_memory_documents_are_rejected() {
    let app = TestApp::on_sqlite(&[("memory.max_bytes", "100")]).await;
    let cases: &[(&str, &[&str])] = &[
        ("{}", &["content"]),
        (r#"{"content":null}"#, &["content"]),
        (r#"{"content":["a"]}"#, &["content"]),
        (r#"{"content":"a","content":"b"}"#, &["content"]),
        (r#"{"content":"a","text":"b","append":true}"#, &["text", "append"]),
    ];
    for (body, expected) in cases {
        assert_eq!(app.put(PATH, *body).await.fields(), *expected, "{body}");
    }
    let sized = |bytes: usize| json!({"content": "é".repeat(bytes / 2)}).to_string();
    let response = app.put(PATH, sized(102)).await;
    assert_eq!(response.fields(), ["content"]);
    assert!(response.text.contains("has 102 bytes, at most 100"), "{response:?}");
    assert_eq!(app.get(PATH).await["version"], 0);
    app.put(PATH, sized(100)).await.ok(200);
}
