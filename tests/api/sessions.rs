//! `/sessions` and `/sessions/{session_id}`

use crate::answer::{delete, get, post, send, with_json};
use crate::support::app::{Set, TestApp};
use crate::support::backend::Backend;
use reqwest::Method;
use serde_json::{Value, json};
use test_case::test_case;

const SMALL: Set<'static> = &[("consolidation.threshold", "6"), ("consolidation.keep_recent", "2")];

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn session_state_reports_history_tail_and_summary(backend: Backend) {
    let app = TestApp::start(&backend, SMALL).await;
    app.record_turns("s", 0..5).await;
    let before = app.get("/sessions/s").await;
    assert_eq!((&before["session_id"], &before["user_id"]), (&json!("s"), &json!("default")));
    assert_eq!([&before["message_count"], &before["last_seq"], &before["tail_messages"]], [&json!(10); 3]);
    assert_eq!((&before["cursor"], &before["summary"]["revision"]), (&json!(0), &json!(0)));
    assert_eq!(before["tokens"]["history"], before["tokens"]["tail"]);
    assert_eq!(
        before["consolidation"],
        json!({"state": "idle", "failures": 0, "last_failure": null, "retry_at": null})
    );
    app.context("s", &json!({})).await;
    let after = app.get("/sessions/s").await;
    assert_eq!(
        (&after["cursor"], &after["tail_messages"], &after["last_seq"]),
        (&json!(8), &json!(2), &json!(10))
    );
    assert_eq!(after["tokens"]["history"], before["tokens"]["history"]);
    assert!(after["tokens"]["tail"].as_i64() < before["tokens"]["tail"].as_i64());
    assert!(after["tokens"]["summary"].as_i64() > Some(0) && after["summary"]["words"].as_i64() > Some(0));
    assert_eq!(after["updated_at"], before["updated_at"], "reading is no activity");
}

fn ids(page: &Value) -> Vec<String> {
    let items = page["items"].as_array().expect("items").iter();
    items.map(|item| item["session_id"].as_str().expect("an id").to_owned()).collect()
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn session_list_is_paginated(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    assert_eq!(app.get("/sessions").await, json!({"items": [], "next": null}));
    for session in ["a", "b", "c", "d", "e"] {
        app.record_turns(session, 0..1).await;
    }
    app.record_turns("b", 1..2).await;
    let expected = ["b", "e", "d", "c", "a"];
    assert_eq!(ids(&app.get("/sessions").await), expected);
    for limit in 1..=6 {
        let (mut seen, mut cursor) = (Vec::new(), String::new());
        loop {
            let page = app.get(&format!("/sessions?limit={limit}{cursor}")).await;
            assert!(ids(&page).len() <= limit && !ids(&page).is_empty());
            seen.extend(ids(&page));
            match page["next"].as_str() {
                Some(next) => cursor = format!("&cursor={next}"),
                None => break,
            }
        }
        assert_eq!(seen, expected, "{limit}");
    }
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn session_list_filters_by_user(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    for (session, user) in [("1", "ada"), ("2", "bo"), ("3", "ada"), ("4", "ada")] {
        let body = json!({"user_message": "a", "assistant_reply": "b", "user_id": user});
        app.post(&format!("/sessions/{session}/exchanges"), &body).await;
    }
    assert_eq!(ids(&app.get("/sessions?user_id=ada").await), ["4", "3", "1"]);
    let page = app.get("/sessions?user_id=ada&limit=2").await;
    assert_eq!(ids(&page), ["4", "3"]);
    let next = page["next"].as_str().expect("a next page");
    let last = app.get(&format!("/sessions?user_id=ada&limit=2&cursor={next}")).await;
    assert_eq!((ids(&last), &last["next"]), (vec!["1".to_owned()], &Value::Null));
    assert_eq!(ids(&app.get("/sessions?user_id=Ada").await), [""; 0]);
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn invalid_search_parameters_are_all_reported(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    let cases: &[(&str, &[&str])] = &[
        ("limit=0", &["limit"]),
        ("limit=1001", &["limit"]),
        ("limit=-1", &["limit"]),
        ("limit=x", &["limit"]),
        ("limit=", &["limit"]),
        ("limit=99999999999999999999", &["limit"]),
        ("limit=1&limit=2", &["limit"]),
        ("user_id=", &["user_id"]),
        ("cursor=", &["cursor"]),
        ("cursor=zzz", &["cursor"]),
        ("cursor=MQ", &["cursor"]),                                 // 1
        ("cursor=WzEsIiJd", &["cursor"]),                           // [1,""]
        ("cursor=WzkyMjMzNzIwMzY4NTQ3NzU4MDcsImEiXQ", &["cursor"]), // [9223372036854775807,"a"]
        ("cursor=Wy0zMDAwMDAwMDAwMDAwMDAwMDAsImEiXQ", &["cursor"]), // [-300000000000000000,"a"], before Postgres' time
        ("foo=1&limit=x&bar=2", &["foo", "limit", "bar"]),
    ];
    for (query, expected) in cases {
        assert_eq!(get(&app, &format!("/sessions?{query}")).await.fields(), *expected, "{query}");
    }
    get(&app, "/sessions?limit=1000&").await.ok(200);
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn patch_replaces_metadata(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    let patch = |body: &'static str| send(with_json(&app, Method::PATCH, "/sessions/s", body));
    patch(r#"{"metadata":{}}"#).await.problem(404, "session-not-found");
    app.record_turns("s", 0..1).await;
    let answer = patch(r#"{"metadata": {"z": 1.0, "a": {"k": ["é", null]}}}"#).await;
    answer.ok(200);
    for text in [answer.text, get(&app, "/sessions/s").await.text] {
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
    let keyed =
        || send(with_json(&app, Method::POST, "/sessions/s/exchanges", body).header("idempotency-key", "k"));
    keyed().await.ok(201);
    app.record_turns("s", 0..5).await;
    app.record_turns("t", 0..1).await;
    app.context("s", &json!({})).await;
    assert_eq!(app.get("/sessions/s").await["summary"]["revision"], 1);
    delete(&app, "/sessions/s").await.ok(204);
    delete(&app, "/sessions/s").await.problem(404, "session-not-found");
    for path in ["", "/messages", "/revisions", "/revisions/1"] {
        get(&app, &format!("/sessions/s{path}")).await.problem(404, "session-not-found");
    }
    for path in ["/consolidations", "/revisions/1/restore", "/revisions/0/restore"] {
        post(&app, &format!("/sessions/s{path}"), "").await.problem(404, "session-not-found");
    }
    assert_eq!(app.context("s", &json!({})).await["messages"], json!([]));
    assert_eq!(ids(&app.get("/sessions").await), ["t"]);
    // As new: the first message is 1, the key is free, no summary, no metadata but its own.
    let again = keyed().await;
    assert_eq!((again.ok(201)["first_seq"].as_i64(), again.header("idempotent-replayed")), (Some(1), None));
    let session = app.get("/sessions/s").await;
    assert_eq!((&session["last_seq"], &session["cursor"]), (&json!(2), &json!(0)));
    assert_eq!(session["summary"], json!({"revision": 0, "words": 0, "text": ""}));
    assert_eq!(app.get("/sessions/s/revisions").await["items"], json!([]));
}
