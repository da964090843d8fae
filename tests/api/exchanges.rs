//! `POST /sessions/{session_id}/exchanges`: exchanges are stored byte for byte and once per idempotency key.

use crate::answer::{Answer, get, on_sqlite, post, send, with_json};
use crate::support::app::TestApp;
use crate::support::backend::Backend;
use futures_util::future::join_all;
use reqwest::Method;
use serde_json::{Value, json};
use test_case::test_case;

const PATH: &str = "/sessions/s/exchanges";

async fn with_key(app: &TestApp, key: &str, body: &str) -> Answer {
    send(with_json(app, Method::POST, PATH, body).header("idempotency-key", key)).await
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn question_and_answer_form_equals_messages_form(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    let parts =
        json!([{"type": "text", "text": "look"}, {"type": "image_url", "image_url": {"url": "data:,"}}]);
    let short = json!({"user_message": parts, "assistant_reply": "I see."});
    let answer = post(&app, PATH, short.to_string()).await.ok(201);
    assert_eq!((&answer["session_id"], &answer["first_seq"]), (&json!("s"), &json!(1)));
    assert_eq!((&answer["last_seq"], &answer["message_count"]), (&json!(2), &json!(2)));
    assert!(answer["created_at"].as_str().expect("a time").ends_with('Z'));

    let call = json!({"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{\"a\":1}"}});
    let messages = [
        json!({"role": "user", "content": "Weather?"}),
        json!({"role": "assistant", "content": null, "tool_calls": [call]}),
        json!({"role": "tool", "tool_call_id": "c1", "content": "rain"}),
        json!({"role": "assistant", "content": "Rain."}),
    ];
    let answer = post(&app, PATH, json!({"messages": messages}).to_string()).await.ok(201);
    assert_eq!((&answer["first_seq"], &answer["last_seq"]), (&json!(3), &json!(6)));

    let stored = app.get("/sessions/s/messages").await;
    let stored = stored["items"].as_array().expect("items");
    let short =
        [json!({"role": "user", "content": parts}), json!({"role": "assistant", "content": "I see."})];
    let expected: Vec<&Value> = short.iter().chain(&messages).collect();
    assert_eq!(stored.iter().map(|item| &item["message"]).collect::<Vec<_>>(), expected);
    assert_eq!(
        stored.iter().map(|item| item["seq"].as_i64()).collect::<Vec<_>>(),
        (1..=6).map(Some).collect::<Vec<_>>()
    );
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
    ];
    post(&app, PATH, format!(r#"{{"messages": [ {} ]}}"#, given.join(" ,\n "))).await.ok(201);
    let (messages, context) =
        (get(&app, "/sessions/s/messages").await, post(&app, "/sessions/s/context", "").await);
    for message in given {
        assert!(messages.text.contains(message), "{messages:?}");
    }
    assert!(context.text.contains(&format!(r#""messages":[{}]"#, given.join(","))), "{context:?}");
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn append_with_reused_key_is_replayed_or_rejected(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    let body = r#"{"user_message":"a","assistant_reply":"b"}"#;
    let first = with_key(&app, "k-1", body).await;
    first.ok(201);
    assert_eq!(first.header("idempotent-replayed"), None);
    let spaced = r#" { "user_message" : "a",  "assistant_reply" : "b" } "#;
    for body in [body, spaced] {
        let again = with_key(&app, "k-1", body).await;
        assert_eq!(again.ok(201), first.json());
        assert_eq!(again.header("idempotent-replayed"), Some("true"));
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
    let elsewhere = with_json(&app, Method::POST, "/sessions/t/exchanges", body);
    assert_eq!(send(elsewhere.header("idempotency-key", "k-1")).await.ok(201)["first_seq"], 1);
    assert_eq!(with_key(&app, "k-2", body).await.ok(201)["first_seq"], 3);
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn twenty_concurrent_requests_with_one_key_write_once(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    let body = r#"{"user_message":"a","assistant_reply":"b"}"#;
    let answers = join_all((0..20).map(|_| with_key(&app, "k", body))).await;
    let new = answers.iter().filter(|answer| answer.header("idempotent-replayed").is_none()).count();
    assert_eq!(new, 1);
    let one = answers[0].ok(201);
    assert!(answers.iter().all(|answer| answer.ok(201) == one), "{answers:?}");
    assert_eq!(app.get("/sessions/s").await["message_count"], 2);
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_exchanges_get_consecutive_seqs(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    let body =
        |n: usize| json!({"user_message": format!("q{n}"), "assistant_reply": format!("a{n}")}).to_string();
    let answers = join_all((0..20).map(|n| post(&app, PATH, body(n)))).await;
    let mut firsts: Vec<_> =
        answers.iter().filter_map(|answer| answer.ok(201)["first_seq"].as_i64()).collect();
    firsts.sort_unstable();
    assert_eq!(firsts, (0..20).map(|n| 2 * n + 1).collect::<Vec<_>>());
    let stored = app.get("/sessions/s/messages?limit=1000").await;
    let text = |item: &Value| item["message"]["content"].as_str().expect("text").to_owned();
    for turn in stored["items"].as_array().expect("items").chunks(2) {
        assert_eq!(text(&turn[0]).replace('q', "a"), text(&turn[1]), "an exchange stays together");
    }
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn append_for_another_user_is_rejected(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    let turn = |user: Option<&str>| {
        let mut body = json!({"user_message": "a", "assistant_reply": "b"});
        if let Some(user) = user {
            body["user_id"] = user.into();
        }
        body.to_string()
    };
    post(&app, PATH, turn(Some("ada"))).await.ok(201);
    post(&app, PATH, turn(Some("bo"))).await.problem(409, "session-user-mismatch");
    post(&app, PATH, turn(Some("default"))).await.problem(409, "session-user-mismatch");
    post(&app, "/sessions/s/context", r#"{"user_id":"bo"}"#).await.problem(409, "session-user-mismatch");
    post(&app, PATH, turn(None)).await.ok(201);
    post(&app, PATH, turn(Some("ada"))).await.ok(201);
    let session = app.get("/sessions/s").await;
    assert_eq!((&session["user_id"], &session["message_count"]), (&json!("ada"), &json!(6)));
    post(&app, "/sessions/t/exchanges", turn(None)).await.ok(201);
    assert_eq!(app.get("/sessions/t").await["user_id"], "default");
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn metadata_of_an_exchange_replaces_all_metadata(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    let turn = |metadata: &str| format!(r#"{{"user_message":"a","assistant_reply":"b"{metadata}}}"#);
    post(&app, PATH, turn("")).await.ok(201);
    assert_eq!(app.get("/sessions/s").await["metadata"], json!({}));
    post(&app, PATH, turn(r#","metadata":{"b": 1.0, "a": [null]}"#)).await.ok(201);
    post(&app, PATH, turn("")).await.ok(201);
    assert!(get(&app, "/sessions/s").await.text.contains(r#""metadata":{"b":1.0,"a":[null]}"#));
    post(&app, PATH, turn(r#","metadata":{"c":true}"#)).await.ok(201);
    assert_eq!(app.get("/sessions/s").await["metadata"], json!({"c": true}));
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rejected_exchange_writes_nothing(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    let last_is_wrong = r#"{"messages":[{"role":"user","content":"a"},{"role":"user"}]}"#;
    assert_eq!(post(&app, PATH, last_is_wrong).await.fields(), ["messages[1].content"]);
    get(&app, "/sessions/s").await.problem(404, "session-not-found");
    // The key of a rejected exchange can be used again.
    assert_eq!(with_key(&app, "k", last_is_wrong).await.status, 422);
    assert_eq!(
        with_key(&app, "k", r#"{"user_message":"a","assistant_reply":"b"}"#).await.ok(201)["first_seq"],
        1
    );
}

#[tokio::test]
async fn invalid_idempotency_key_is_rejected() {
    let app = on_sqlite(&[]).await;
    let body = r#"{"user_message":"a","assistant_reply":"b"}"#;
    for key in ["", "a b", "é", &"k".repeat(256)] {
        assert_eq!(with_key(&app, key, body).await.fields(), ["Idempotency-Key"], "{key}");
    }
    let twice = with_json(&app, Method::POST, PATH, body).header("idempotency-key", "a");
    assert_eq!(send(twice.header("idempotency-key", "b")).await.fields(), ["Idempotency-Key"]);
    with_key(&app, &"k".repeat(255), body).await.ok(201);
    assert_eq!(app.get("/sessions/s").await["last_seq"], 2);
}
