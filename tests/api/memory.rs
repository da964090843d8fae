//! `/users/{user_id}/memory`

use crate::answer::{Answer, get, on_sqlite, put, send, with_json};
use crate::support::app::TestApp;
use crate::support::backend::Backend;
use futures_util::future::join_all;
use reqwest::Method;
use serde_json::{Value, json};
use test_case::test_case;

const PATH: &str = "/users/u/memory";

async fn put_if(app: &TestApp, tag: &str, content: &str) -> Answer {
    let body = json!({ "content": content }).to_string();
    send(with_json(app, Method::PUT, PATH, body).header("if-match", tag)).await
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn put_replaces_the_memory_document(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    let never = get(&app, PATH).await;
    let empty =
        json!({"user_id": "u", "version": 0, "content": "", "words": 0, "tokens": 0, "updated_at": null});
    assert_eq!((never.ok(200), never.header("etag")), (empty, Some("\"0\"")));
    let content = "# Über uns\n\n- 東京 \\ \"x\" \t ends with blank ";
    let written = put(&app, PATH, json!({ "content": content }).to_string()).await;
    assert_eq!((written.ok(200)["version"].as_i64(), written.header("etag")), (Some(1), Some("\"1\"")));
    let read = get(&app, PATH).await;
    assert_eq!((read.json(), read.header("etag")), (written.json(), Some("\"1\"")));
    assert_eq!(read.json()["content"], content);
    assert!(read.json()["words"].as_i64() > Some(5) && read.json()["tokens"].as_i64() > Some(5));
    // Empty is a document like any other.
    assert_eq!(put(&app, PATH, r#"{"content":""}"#).await.ok(200)["version"], 2);
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

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_conditional_puts_succeed_once(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    put_if(&app, "\"0\"", "first").await.ok(200);
    let texts: Vec<String> = (0..20).map(|n| format!("text {n}")).collect();
    let answers = join_all(texts.iter().map(|text| put_if(&app, "\"1\"", text))).await;
    let won: Vec<_> = answers.iter().filter(|answer| answer.status == 200).collect();
    assert_eq!(won.len(), 1);
    assert_eq!(answers.iter().filter(|answer| answer.status == 412).count(), 19);
    assert_eq!(app.get(PATH).await, won[0].json());
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn memory_versions_are_paginated(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    let path = "/users/u/memory/revisions";
    assert_eq!(app.get(path).await, json!({"items": [], "next": null}));
    for n in 1..=5 {
        put(&app, PATH, json!({"content": format!("text {n}")}).to_string()).await.ok(200);
    }
    let (mut seen, mut cursor) = (Vec::new(), String::new());
    loop {
        let page = app.get(&format!("{path}?limit=2{cursor}")).await;
        seen.extend(page["items"].as_array().expect("items").clone());
        match page["next"].as_str() {
            Some(next) => cursor = format!("&cursor={next}"),
            None => break,
        }
    }
    let contents: Vec<_> =
        seen.iter().map(|item| (item["version"].as_i64(), item["content"].clone())).collect();
    let expected: Vec<(_, Value)> = (1..=5).rev().map(|n| (Some(n), format!("text {n}").into())).collect();
    assert_eq!(contents, expected);
    assert_eq!(seen[0], app.get(PATH).await);
    for query in ["limit=0", "cursor=zzz", "user_id=x"] {
        let field = query.split('=').next().expect("a name");
        assert_eq!(get(&app, &format!("{path}?{query}")).await.fields(), [field]);
    }
}

#[tokio::test]
async fn invalid_memory_documents_are_rejected() {
    let app = on_sqlite(&[("memory.max_bytes", "100")]).await;
    let cases: &[(&str, &[&str])] = &[
        ("{}", &["content"]),
        (r#"{"content":null}"#, &["content"]),
        (r#"{"content":["a"]}"#, &["content"]),
        (r#"{"content":"a\u0000b"}"#, &["content"]),
        (r#"{"content":"a","content":"b"}"#, &["content"]),
        (r#"{"content":"a","text":"b","append":true}"#, &["text", "append"]),
    ];
    for (body, expected) in cases {
        assert_eq!(put(&app, PATH, *body).await.fields(), *expected, "{body}");
    }
    let sized = |bytes: usize| json!({"content": "é".repeat(bytes / 2)}).to_string();
    let answer = put(&app, PATH, sized(102)).await;
    assert_eq!(answer.fields(), ["content"]);
    assert!(answer.text.contains("has 102 bytes, at most 100"), "{answer:?}");
    assert_eq!(app.get(PATH).await["version"], 0);
    put(&app, PATH, sized(100)).await.ok(200);
}
