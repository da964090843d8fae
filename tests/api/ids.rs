//! Ids as one percent-encoded segment of the path. Two different ids never share anything.

use crate::support::app::TestApp;
use crate::support::backend::Backend;
use crate::support::client::{Response, TestClient, assert_includes};
use serde_json::json;
use std::fmt::Write as _;
use test_case::test_case;

fn encoded(id: &str) -> String {
    id.bytes().fold(String::new(), |mut text, byte| {
        write!(text, "%{byte:02X}").expect("a String takes all");
        text
    })
}

/// Sends the path without a client that would normalise it, because `..` is a valid id.
async fn get(app: &TestClient, path: &str) -> Response {
    app.raw(&format!("GET {path} HTTP/1.1"), b"").await
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sessions_with_similar_ids_are_separate(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    let long = "x".repeat(256);
    let ids = [
        "a",
        "A",
        "a ",
        " a",
        "a/b",
        "a%2Fb",
        "a%2fb",
        "a//b",
        "/",
        "%",
        "%41",
        "...",
        ".a",
        "a+b",
        "a b",
        "a?b=c",
        "a#b",
        "matrix:!room:host",
        "é",
        "e\u{301}",
        "ß",
        "ss",
        "İ",
        "i",
        "a_b",
        "a%b",
        "\u{feff}a",
        "\u{200b}a",
        "matrix:!Room:host",
        "01",
        "1.0",
        "日本語",
        "😀",
        "a\\b",
        "'; --",
        "\"",
        "null",
        "0",
        "00",
        &long,
        &long[1..],
    ];
    for id in ids {
        let encoded = encoded(id);
        let body = json!({"user_message": id, "assistant_reply": "b", "user_id": id}).to_string();
        let response = app.raw_json(&format!("POST /sessions/{encoded}/exchanges"), body.as_bytes()).await;
        assert_eq!(response.ok(201)["session_id"], id);
        let body = json!({"content": id}).to_string();
        app.raw_json(&format!("PUT /users/{encoded}/memory"), body.as_bytes()).await.ok(200);
    }
    for id in ids {
        let encoded = encoded(id);
        let session = get(&app, &format!("/sessions/{encoded}")).await.ok(200);
        assert_includes(&session, &json!({"session_id": id, "user_id": id}));
        let messages = get(&app, &format!("/sessions/{encoded}/messages")).await.ok(200);
        assert_eq!(messages["items"].as_array().map(Vec::len), Some(2));
        assert_eq!(messages["items"][0]["message"]["content"], id);
        assert_eq!(get(&app, &format!("/users/{encoded}/memory")).await.ok(200)["content"], id);
        let of_user = get(&app, &format!("/sessions?user_id={encoded}")).await.ok(200);
        assert_eq!(of_user["items"].as_array().map(Vec::len), Some(1), "{id}");
        assert_eq!(of_user["items"][0]["session_id"], id);
    }
    app.raw("DELETE /sessions/a HTTP/1.1", b"").await.ok(204);
    for id in ids.iter().filter(|id| **id != "a") {
        get(&app, &format!("/sessions/{}", encoded(id))).await.ok(200);
    }
}

#[tokio::test]
async fn invalid_id_is_rejected() {
    let app = TestApp::on_sqlite(&[]).await;
    for id in ["%00", "a%0Ab", "%7F", "%C2%85", &"x".repeat(257), &encoded(&"é".repeat(129))] {
        assert_eq!(get(&app, &format!("/sessions/{id}")).await.fields(), ["session_id"], "{id}");
        assert_eq!(get(&app, &format!("/users/{id}/memory")).await.fields(), ["user_id"], "{id}");
        let body = br#"{"user_message":"a","assistant_reply":"b"}"#;
        let response = app.raw_json(&format!("POST /sessions/{id}/exchanges"), body).await;
        assert_eq!(response.fields(), ["session_id"], "{id}");
    }
    assert_eq!(get(&app, "/sessions//messages").await.fields(), ["session_id"]);
    // Lenient decoders keep `%zz`, and replace bytes that are not UTF-8.
    for id in ["%zz", "%4", "%", "a%", "%+1", "%ff", "%C3", "%ED%A0%80", "%C0%AF"] {
        get(&app, &format!("/sessions/{id}")).await.problem(400, "bad-request");
        get(&app, &format!("/users/{id}/memory")).await.problem(400, "bad-request");
        get(&app, &format!("/sessions?user_id={id}")).await.problem(400, "bad-request");
    }
    let detail = get(&app, "/sessions/a/b").await.problem(404, "route-not-found");
    assert!(detail.contains("%2F"), "{detail}");
    assert_eq!(get(&app, "/sessions").await.ok(200)["items"], json!([]));
}
