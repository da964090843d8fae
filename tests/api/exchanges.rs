//! `POST /sessions/{session_id}/exchanges`: exchanges are stored byte for byte and once per idempotency key.

use crate::support::app::TestApp;
use crate::support::backend::Backend;
use crate::support::client::{Response, TestClient, assert_includes};
use reqwest::Method;
use serde_json::json;
use test_case::test_case;

const PATH: &str = "/sessions/s/exchanges";
const TURN: &str = r#"{"user_message":"a","assistant_reply":"b"}"#;

async fn with_key(app: &TestClient, key: &str, body: &str) -> Response {
    app.post(PATH, body).header("idempotency-key", key).await
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn question_and_answer_form_equals_messages_form(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    let parts =
        json!([{"type": "text", "text": "look"}, {"type": "image_url", "image_url": {"url": "data:,"}}]);
    let short = json!({"user_message": parts, "assistant_reply": "I see."});
    let response = app.post(PATH, short.to_string()).await.ok(201);
    assert_includes(&response, &json!({"session_id": "s", "first_seq": 1}));
    assert_includes(&response, &json!({"last_seq": 2, "message_count": 2}));
    assert!(response["created_at"].as_str().expect("a time").ends_with('Z'));

    let call = json!({"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{\"a\":1}"}});
    let messages = [
        json!({"role": "user", "content": "Weather?"}),
        json!({"role": "assistant", "content": null, "tool_calls": [call]}),
        json!({"role": "tool", "tool_call_id": "c1", "content": "rain"}),
        json!({"role": "assistant", "content": "Rain."}),
    ];
    let response = app.post(PATH, json!({"messages": messages}).to_string()).await.ok(201);
    assert_includes(&response, &json!({"first_seq": 3, "last_seq": 6}));

    let short =
        [json!({"role": "user", "content": parts}), json!({"role": "assistant", "content": "I see."})];
    assert_eq!(app.history("s").await, [&short[..], &messages].concat());
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn message_is_returned_byte_for_byte(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    let given = [
        r#"{"z":1.0,"role":"user","n":1E+2,"content":"é\u00e9\/\u0000 😀 \ud83d\ude00","big":123456789012345678901,"a":null}"#,
        r#"{"content":[{"x":[],"type":"text","text":"a"}],"role":"user","name":"Bo","x":{"k":1,"k":2}}"#,
        r#"{"role":"assistant","content":"","reasoning_content":"hm\n","annotations":[],"audio":{"id":"a"}}"#,
        r#"{"role":"user","content":"\u001f\\\"\/ ' ; DROP TABLE messages; -- $1 ? :a {}","x":[1e3,-0.0,0.1000,{}]}"#,
        r#"{"role":"assistant","content":null,"tool_calls":[{"id":"a\u0000b","type":"function","function":{"name":"f","arguments":"{\"x\": 1.0}"}}]}"#,
        r#"{"role":"tool","tool_call_id":"a\u0000b","content":"a NUL in an id"}"#,
    ];
    app.post(PATH, format!(r#"{{"messages": [ {} ]}}"#, given.join(" ,\n "))).await.ok(201);
    let messages = app.get("/sessions/s/messages").await;
    for message in given {
        assert!(messages.text.contains(message), "{messages:?}");
    }
    let sent = [
        r#"{"role":"user","content":"éé/\u0000 😀 😀"}"#,
        r#"{"role":"user","name":"Bo","content":[{"type":"text","text":"a"}]}"#,
        r#"{"role":"assistant","content":""}"#,
        r#"{"role":"user","content":"\u001f\\\"/ ' ; DROP TABLE messages; -- $1 ? :a {}"}"#,
        r#"{"role":"assistant","content":null,"tool_calls":[{"id":"call_59b271ae1bbcb1d31d419298","type":"function","function":{"name":"f","arguments":"{\"x\": 1.0}"}}]}"#,
        r#"{"role":"tool","tool_call_id":"call_59b271ae1bbcb1d31d419298","content":"a NUL in an id"}"#,
    ];
    let all = given.join(",").replace(r#","a":null"#, "");
    for (options, sent) in [("", sent.join(",")), (r#"{"fields":"all"}"#, all)] {
        let context = app.post("/sessions/s/context", options).await;
        assert!(context.text.contains(&format!(r#""messages":[{sent}]"#)), "{context:?}");
    }
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn append_with_reused_key_is_replayed_or_rejected(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    let first = with_key(&app, "k-1", TURN).await;
    first.ok(201);
    assert!(!first.is_replay());
    let spaced = r#" { "user_message" : "a",  "assistant_reply" : "b" } "#;
    for body in [TURN, spaced] {
        let again = with_key(&app, "k-1", body).await;
        assert_eq!(again.ok(201), first.json());
        assert!(again.is_replay());
    }
    for other in [
        r#"{"user_message":"a","assistant_reply":"c"}"#,
        r#"{"user_message":"a","assistant_reply":"b","metadata":{}}"#,
        r#"{"user_message":"a","assistant_reply":"b","user_id":"default"}"#,
    ] {
        with_key(&app, "k-1", other).await.problem(422, "idempotency-key-reused");
    }
    assert_eq!(app.get("/sessions/s").await["last_seq"], 2);
    // Another session or another key stores another exchange.
    let elsewhere = app.post("/sessions/t/exchanges", TURN);
    assert_eq!(elsewhere.header("idempotency-key", "k-1").await.ok(201)["first_seq"], 1);
    for (key, first_seq) in [("k-2", 3), ("K-1", 5)] {
        assert_eq!(with_key(&app, key, TURN).await.ok(201)["first_seq"], first_seq);
    }
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn append_for_another_user_is_rejected(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    app.record_for("s", "ada").await;
    for user in ["bo", "default", "Ada"] {
        let body = json!({"user_message": "a", "assistant_reply": "b", "user_id": user});
        app.post(PATH, body).await.problem(409, "session-user-mismatch");
    }
    app.post("/sessions/s/context", r#"{"user_id":"bo"}"#).await.problem(409, "session-user-mismatch");
    app.post(PATH, TURN).await.ok(201);
    app.record_for("s", "ada").await;
    assert_includes(&app.get("/sessions/s").await.ok(200), &json!({"user_id": "ada", "message_count": 6}));
    app.post("/sessions/t/exchanges", TURN).await.ok(201);
    assert_eq!(app.get("/sessions/t").await["user_id"], "default");
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn exchange_is_stored_only_after_the_expected_message(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    let expecting =
        |seq: i64| json!({"user_message": "a", "assistant_reply": "b", "expected_last_seq": seq}).to_string();
    for wrong in [1, 2] {
        let rejected = app.post(PATH, expecting(wrong)).await;
        let detail = rejected.problem(409, "last-seq-mismatch");
        assert!(detail.contains(&format!("expected_last_seq is {wrong}")), "{detail}");
        assert_eq!(rejected.json()["last_seq"], 0);
    }
    app.get("/sessions/s").await.problem(404, "session-not-found");
    assert_eq!(with_key(&app, "k", &expecting(0)).await.ok(201)["last_seq"], 2);
    let rejected = app.post(PATH, expecting(0)).await;
    rejected.problem(409, "last-seq-mismatch");
    assert_eq!(rejected.json()["last_seq"], 2);
    // A retry is the same request although the session has grown, and a rejected key can be used again.
    assert!(with_key(&app, "k", &expecting(0)).await.is_replay());
    with_key(&app, "k", &expecting(2)).await.problem(422, "idempotency-key-reused");
    with_key(&app, "l", &expecting(1)).await.problem(409, "last-seq-mismatch");
    assert_eq!(with_key(&app, "l", &expecting(2)).await.ok(201)["last_seq"], 4);
    app.record_for("t", "ada").await;
    let body =
        json!({"messages": [{"role": "user", "content": "a"}], "user_id": "bo", "expected_last_seq": 2});
    app.post("/sessions/t/exchanges", body).await.problem(409, "session-user-mismatch");
    for seq in ["-1", "1.5", "\"2\""] {
        let body = format!(r#"{{"user_message":"a","assistant_reply":"b","expected_last_seq":{seq}}}"#);
        assert_eq!(app.post(PATH, body).await.fields(), ["expected_last_seq"]);
    }
    assert_eq!(app.get("/sessions/s").await["last_seq"], 4);
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn time_of_an_exchange_is_returned_searched_and_exported(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    let at =
        |time: &str| json!({"user_message": "plums", "assistant_reply": "b", "created_at": time}).to_string();
    app.post(PATH, TURN).await.ok(201);
    let first = with_key(&app, "k", &at("2020-02-03T05:06:07.1234567+01:00")).await;
    assert_eq!(first.ok(201)["created_at"], "2020-02-03T04:06:07.123456Z");
    let again = with_key(&app, "k", &at("2020-02-03T05:06:07.1234567+01:00")).await;
    assert_eq!((again.ok(201), again.is_replay()), (first.json(), true));
    with_key(&app, "k", &at("2020-02-03T05:06:08+01:00")).await.problem(422, "idempotency-key-reused");
    // Times need not increase.
    app.post(PATH, at("2019-01-01T00:00:00Z")).await.ok(201);
    let messages = app.get("/sessions/s/messages").await;
    let times: Vec<_> = (2..6).map(|index| messages["items"][index]["created_at"].clone()).collect();
    let (feb, jan) = (json!("2020-02-03T04:06:07.123456Z"), json!("2019-01-01T00:00:00Z"));
    assert_eq!(times, [feb.clone(), feb, jan.clone(), jan]);
    // The order of sessions is that of the requests.
    app.post("/sessions/t/exchanges", at("1970-01-01T00:00:00Z")).await.ok(201);
    let sessions = app.get("/sessions").await;
    assert_eq!(
        (&sessions["items"][0]["session_id"], &sessions["items"][1]["session_id"]),
        (&json!("t"), &json!("s"))
    );
    assert!(sessions["items"][0]["created_at"].as_str() > Some("2026"), "{sessions:?}");
    let hits = app.get("/search?q=plums&since=2020-01-01T00:00:00Z&until=2021-01-01T00:00:00Z").await;
    assert_eq!(hits["items"].as_array().map(Vec::len), Some(1), "{hits:?}");
    assert_eq!(hits["items"][0]["seq"], 3);
    let export = app.get("/sessions/s/export").await.text;
    let import =
        app.request(Method::POST, "/sessions/u/import").header("content-type", "application/x-ndjson");
    import.body(export).await.ok(201);
    assert_eq!(app.get("/sessions/u/messages").await.text, messages.text);
}

#[tokio::test]
async fn invalid_time_of_an_exchange_is_rejected() {
    let app = TestApp::on_sqlite(&[]).await;
    for time in ["9999-12-31T23:59:59-01:00", "1969-12-31T23:59:59Z", "yesterday", "2026-05-01"] {
        let body = json!({"user_message": "a", "assistant_reply": "b", "created_at": time});
        assert_eq!(app.post(PATH, body).await.fields(), ["created_at"], "{time}");
    }
    for time in [json!(-1), json!(["2020-01-01T00:00:00Z"])] {
        let body = json!({"user_message": "a", "assistant_reply": "b", "created_at": time});
        assert_eq!(app.post(PATH, body).await.fields(), ["created_at"], "{time}");
    }
    app.get("/sessions/s").await.problem(404, "session-not-found");
}

#[tokio::test]
async fn invalid_idempotency_key_is_rejected() {
    let app = TestApp::on_sqlite(&[]).await;
    for key in ["", "a b", "é", &"k".repeat(256)] {
        assert_eq!(with_key(&app, key, TURN).await.fields(), ["Idempotency-Key"], "{key}");
    }
    let twice = app.post(PATH, TURN).header("idempotency-key", "a");
    assert_eq!(twice.header("idempotency-key", "b").await.fields(), ["Idempotency-Key"]);
    with_key(&app, &"k".repeat(255), TURN).await.ok(201);
    assert_eq!(app.get("/sessions/s").await["last_seq"], 2);
}
