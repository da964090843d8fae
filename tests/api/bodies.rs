//! Invalid bodies: each error names every invalid field and says how to correct it.

use crate::support::app::TestApp;
use futures_util::stream;
use reqwest::{Body, Method};

const PATH: &str = "/sessions/s/exchanges";
const GOOD: &str = r#"{"user_message":"a","assistant_reply":"b"}"#;

#[tokio::test]
async fn all_invalid_fields_of_an_exchange_are_reported() {
    let app = TestApp::on_sqlite(&[]).await;
    let cases: &[(&str, &[&str])] = &[
        ("{}", &["user_message", "assistant_reply"]),
        (r#"{"user_message":"a"}"#, &["assistant_reply"]),
        (r#"{"user_message":null,"assistant_reply":"b"}"#, &["user_message"]),
        (r#"{"messages":[]}"#, &["messages"]),
        (r#"{"messages":null}"#, &["user_message", "assistant_reply"]),
        (r#"{"messages":[{"role":"user","content":"a"}],"user_message":"b"}"#, &["messages"]),
        (
            r#"{"user_message":5,"user_id":"","metadata":[]}"#,
            &["user_message", "assistant_reply", "user_id", "metadata"],
        ),
        (r#"{"messages":"x","zz":1,"user_id":5,"y":{"z":2}}"#, &["messages", "user_id", "y", "zz"]),
        (r#"{"user_message":"a","assistant_reply":"b","x":1,"y":2}"#, &["x", "y"]),
        (r#"{"user_message":"a","user_message":"b","assistant_reply":"c"}"#, &["user_message"]),
        (r#"{"user_message":7,"assistant_reply":{}}"#, &["assistant_reply", "user_message"]),
        (
            r#"{"messages":[7,{"role":5},{"role":"robot","content":"x"},{"content":"x"},{"role":"user"},
                {"type":"function_call","name":"f"},[],{}]}"#,
            &[
                "messages[0]",
                "messages[1].role",
                "messages[2].role",
                "messages[3].role",
                "messages[5].role",
                "messages[6]",
                "messages[7]",
            ],
        ),
    ];
    for (body, expected) in cases {
        let (mut fields, mut expected) = (app.post(PATH, *body).await.fields(), expected.to_vec());
        fields.sort_unstable();
        expected.sort_unstable();
        assert_eq!(fields, expected, "{body}");
    }
    app.get("/sessions/s").await.problem(404, "session-not-found");
}

#[tokio::test]
async fn error_does_not_quote_the_request() {
    let app = TestApp::on_sqlite(&[]).await;
    let response = app.post(PATH, format!(r#"{{"messages":"{}"}}"#, "x".repeat(100_000))).await;
    assert_eq!(response.fields(), ["messages"]);
    assert!(response.text.len() < 1000);
    let name = "n".repeat(100_000);
    for body in [format!(r#"{{"{name}":1}}"#), format!(r#"{{"messages":[{{"role":"{name}"}}]}}"#)] {
        let response = app.post(PATH, body).await;
        assert_eq!(response.status, 422);
        assert!(response.text.len() < 2000, "{}", response.text.len());
    }
}

#[tokio::test]
async fn body_field_in_the_query_is_rejected() {
    let app = TestApp::on_sqlite(&[]).await;
    for path in [PATH, "/sessions/s/context"] {
        let response = app.post(&format!("{path}?user_id=ada&mode"), GOOD).await;
        assert_eq!(response.fields(), ["?user_id", "?mode"]);
    }
    app.post(&format!("{PATH}?"), GOOD).await.ok(201);
}

#[tokio::test]
async fn body_other_than_a_json_object_is_rejected() {
    let app = TestApp::on_sqlite(&[]).await;
    for body in ["[]", "5", "\"x\"", "null", "true", &format!("[{GOOD}]")] {
        assert_eq!(app.post(PATH, body).await.fields(), ["body"], "{body}");
        assert_eq!(app.put("/users/u/memory", body).await.fields(), ["body"], "{body}");
        assert_eq!(app.post("/sessions/s/context", body).await.fields(), ["body"], "{body}");
    }
    for (body, hint) in [
        ("", "is empty"),
        (" \n", "is empty"),
        (r#"{"user_message":"a"#, "is incomplete"),
        ("{", "is incomplete"),
        ("user_message=a", "not JSON"),
        ("{'user_message':'a'}", "not JSON"),
        (r#"{"user_message":"a",}"#, "not JSON"),
        (r#"{"user_message":"a","assistant_reply":"b"} x"#, "not JSON"),
        (r#"{"user_message":"a","assistant_reply":NaN}"#, "not JSON"),
        (r#"{"user_message":"\ud80","assistant_reply":"b"}"#, "escape"),
    ] {
        let detail = app.post(PATH, body).await.problem(400, "malformed-json");
        assert!(detail.contains(hint), "{body}: {detail}");
    }
    let detail = app.raw_json(&format!("POST {PATH}"), b"{\"user_message\":\"\xff\"}").await;
    assert!(detail.problem(400, "malformed-json").contains("UTF-8 from byte 17"));
    app.get("/sessions/s").await.problem(404, "session-not-found");
}

/// The parsers of clients limit the depth, and one deeper message would make the whole session unreadable.
#[tokio::test]
async fn too_deeply_nested_body_is_rejected() {
    let app = TestApp::on_sqlite(&[]).await;
    let nested = |levels: usize| "[".repeat(levels) + &"]".repeat(levels);
    let deep = nested(10_000);
    for body in [
        deep.clone(),
        format!(r#"{{"user_message":{deep},"assistant_reply":"b"}}"#),
        format!(r#"{{"user_message":"a","assistant_reply":"b","metadata":{{"a":{deep}}}}}"#),
        format!(r#"{{"user_message":"a","assistant_reply":"b","unknown":{deep}}}"#),
        format!(r#"{{"messages":[{{"role":"user","content":"a","x":{deep}}}]}}"#),
        format!(r#"{{"messages":[{{"role":"user","content":"a","x":{}}}]}}"#, nested(98)),
    ] {
        assert_eq!(app.post(PATH, body).await.fields(), ["body"]);
    }
    app.post(PATH, "{\"a\":".repeat(10_000)).await.fields();
    app.post(PATH, "[".repeat(10_000)).await.fields();
    let body = format!(r#"{{"messages":[{{"role":"user","content":"a","x":{}}}]}}"#, nested(97));
    app.post(PATH, body).await.ok(201);
    // The parser of this test stops at 128 levels.
    assert_eq!(app.get("/sessions/s/messages").await["items"][0]["message"]["content"], "a");
    assert_eq!(app.context("s", &serde_json::json!({})).await["messages"][0]["content"], "a");
}

/// Fields in the body of a route without body would have no effect, so they are rejected.
#[tokio::test]
async fn body_of_a_request_without_body_is_rejected() {
    let app = TestApp::on_sqlite(&[]).await;
    app.record("s", &[serde_json::json!({"role": "user", "content": "a"})]).await;
    let changes =
        ["POST /sessions/s/consolidations", "POST /sessions/s/revisions/0/restore", "DELETE /sessions/s"];
    for request in changes {
        assert_eq!(app.raw_json(request, br#"{"dry_run":true}"#).await.fields(), ["body"], "{request}");
    }
    assert_eq!(app.get("/sessions/s").await["message_count"], 1);
    for (request, status) in changes.into_iter().zip([200, 201, 204]) {
        let response = app.raw_json(request, b"{}").await;
        assert_eq!(response.status, status, "{request}: {}", response.text);
    }
}

/// An optional body is either absent or JSON. A line break is not JSON.
#[tokio::test]
async fn white_space_as_body_is_rejected() {
    let app = TestApp::on_sqlite(&[]).await;
    for path in ["/sessions/s/context", "/sessions/s/tools/memory_read"] {
        let detail = app.raw_json(&format!("POST {path}"), b"\n").await.problem(400, "malformed-json");
        assert!(detail.contains("is empty"), "{detail}");
        assert_eq!(app.raw_json(&format!("POST {path}"), b"").await.status, 200);
    }
}

#[tokio::test]
async fn body_without_json_content_type_is_rejected() {
    let app = TestApp::on_sqlite(&[]).await;
    let request = || app.request(Method::POST, PATH).body(GOOD);
    request().await.problem(415, "unsupported-media-type");
    for wrong in [
        "",
        "text/plain",
        "application/x-www-form-urlencoded",
        "application/jsonx",
        "json",
        "text/json; x=application/json",
    ] {
        request().header("content-type", wrong).await.problem(415, "unsupported-media-type");
    }
    let memory = app.request(Method::PUT, "/users/u/memory").body(r#"{"content":"a"}"#);
    memory.await.problem(415, "unsupported-media-type");
    let good = [
        "application/json",
        "application/json; charset=utf-8",
        "Application/JSON ;charset=UTF-8",
        "application/x+json",
    ];
    for good in good {
        request().header("content-type", good).await.ok(201);
    }
    assert_eq!(app.get("/sessions/s").await["last_seq"], 8);
}

#[tokio::test]
async fn too_large_body_is_rejected_with_the_limit() {
    let app = TestApp::on_sqlite(&[("limits.max_body_bytes", "1000")]).await;
    let body = |bytes: usize| {
        let around = r#"{"user_message":"","assistant_reply":"b"}"#.len();
        format!(r#"{{"user_message":"{}","assistant_reply":"b"}}"#, "x".repeat(bytes - around))
    };
    app.post(PATH, body(1000)).await.ok(201);
    let detail = app.post(PATH, body(1001)).await.problem(413, "body-too-large");
    assert!(detail.contains("1000 bytes") && detail.contains("limits.max_body_bytes"), "{detail}");
    // Rejected by its Content-Length before any of it is sent.
    let head =
        format!("POST {PATH} HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: 99999999999");
    app.raw(&head, b"").await.problem(413, "body-too-large");
    // A chunked body does not announce its length.
    let streamed = |bytes: usize| {
        let text = body(bytes).into_bytes();
        let chunks: Vec<_> = text.chunks(100).map(|chunk| Ok::<_, std::io::Error>(chunk.to_vec())).collect();
        let request = app.request(Method::POST, PATH).header("content-type", "application/json");
        request.body(Body::wrap_stream(stream::iter(chunks)))
    };
    streamed(1000).await.ok(201);
    let detail = streamed(1001).await.problem(413, "body-too-large");
    assert!(detail.contains("1000 bytes"), "{detail}");
    assert_eq!(app.get("/sessions/s").await["last_seq"], 4);
}
