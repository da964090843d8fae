//! The size limits of requests. A value at the limit is accepted. One above it is rejected with a response that names the
//! setting and its value, and nothing is stored.

use crate::support::app::TestApp;
use crate::support::client::{Response, TestClient};
use reqwest::Method;

/// A limit: its setting, its value in the test, and a function that makes a request of a given size.
struct Limit {
    setting: &'static str,
    most: usize,
    /// The field that the error names. If empty, the whole body is rejected with 413.
    field: &'static str,
    request: fn(session: &str, size: usize) -> (Method, String, String),
}

const SET: &[(&str, &str)] = &[
    ("limits.max_body_bytes", "2000"),
    ("limits.max_json_depth", "10"),
    ("limits.max_message_bytes", "300"),
    ("limits.max_messages_per_exchange", "3"),
    ("limits.max_metadata_bytes", "70"),
    ("limits.max_system_prompt_bytes", "80"),
    ("memory.max_bytes", "90"),
];

/// Returns JSON of `size` bytes: `before`, filling text, `after`.
fn filled(size: usize, before: &str, after: &str) -> String {
    format!("{before}{}{after}", "x".repeat(size - before.len() - after.len()))
}

fn exchange(session: &str, body: String) -> (Method, String, String) {
    (Method::POST, format!("/sessions/{session}/exchanges"), body)
}

fn context(session: &str, body: String) -> (Method, String, String) {
    (Method::POST, format!("/sessions/{session}/context"), body)
}

fn message(size: usize) -> String {
    filled(size, r#"{"role":"user","content":""#, r#""}"#)
}

/// Returns the text of a message whose JSON has this size.
fn content(role: &str, size: usize) -> String {
    let around = format!(r#"{{"role":"{role}","content":""}}"#);
    "é".repeat((size - around.len()) / 2) + &"x".repeat((size - around.len()) % 2)
}

const LIMITS: &[Limit] = &[
    Limit {
        setting: "limits.max_body_bytes",
        most: 2000,
        field: "",
        request: |session, size| {
            exchange(session, format!("{:size$}", r#"{"user_message":"a","assistant_reply":"b"}"#))
        },
    },
    Limit {
        setting: "limits.max_json_depth",
        most: 10,
        field: "body",
        request: |session, size| {
            let (open, close) = ("[".repeat(size - 3), "]".repeat(size - 3));
            exchange(
                session,
                format!(r#"{{"messages":[{{"role":"user","content":"a","x":{open}{close}}}]}}"#),
            )
        },
    },
    Limit {
        setting: "limits.max_message_bytes",
        most: 300,
        field: "messages[1]",
        request: |session, size| {
            // White space between tokens is not stored and does not count.
            let spaced = message(size).replace(':', " :\n  ");
            exchange(session, format!(r#"{{"messages":[{},{spaced}]}}"#, message(50)))
        },
    },
    Limit {
        setting: "limits.max_message_bytes",
        most: 300,
        field: "user_message",
        request: |session, size| {
            let text = content("user", size);
            exchange(session, format!(r#"{{"user_message":"{text}","assistant_reply":"b"}}"#))
        },
    },
    Limit {
        setting: "limits.max_message_bytes",
        most: 300,
        field: "assistant_reply",
        request: |session, size| {
            let text = content("assistant", size);
            exchange(session, format!(r#"{{"user_message":"a","assistant_reply":"{text}"}}"#))
        },
    },
    Limit {
        setting: "limits.max_message_bytes",
        most: 300,
        field: "user_message",
        request: |session, size| {
            context(session, format!(r#"{{"user_message":"{}"}}"#, content("user", size)))
        },
    },
    Limit {
        setting: "limits.max_messages_per_exchange",
        most: 3,
        field: "messages",
        request: |session, size| {
            exchange(session, format!(r#"{{"messages":[{}]}}"#, vec![message(50); size].join(",")))
        },
    },
    Limit {
        setting: "limits.max_metadata_bytes",
        most: 70,
        field: "metadata",
        request: |session, size| {
            let metadata = filled(size, r#"{"a":""#, r#""}"#).replace(':', " : ");
            exchange(
                session,
                format!(r#"{{"user_message":"a","assistant_reply":"b","metadata":{metadata}}}"#),
            )
        },
    },
    Limit {
        setting: "limits.max_metadata_bytes",
        most: 70,
        field: "metadata",
        request: |_, size| {
            let metadata = filled(size, r#"{"a":""#, r#""}"#);
            (Method::PATCH, "/sessions/there".to_owned(), format!(r#"{{"metadata":{metadata}}}"#))
        },
    },
    Limit {
        setting: "limits.max_system_prompt_bytes",
        most: 80,
        field: "system_prompt",
        request: |session, size| context(session, filled(size + 20, r#"{"system_prompt":""#, r#""}"#)),
    },
    Limit {
        setting: "memory.max_bytes",
        most: 90,
        field: "content",
        request: |session, size| {
            let body = format!(r#"{{"content":"{}"}}"#, "x".repeat(size));
            (Method::PUT, format!("/users/{session}/memory"), body)
        },
    },
    // A limit of the contract; it is not a setting.
    Limit {
        setting: "",
        most: 256,
        field: "user_id",
        request: |session, size| {
            let id = "u".repeat(size);
            exchange(session, format!(r#"{{"user_message":"a","assistant_reply":"b","user_id":"{id}"}}"#))
        },
    },
    Limit {
        setting: "",
        most: 256,
        field: "session_id",
        request: |_, size| {
            exchange(&"s".repeat(size), r#"{"user_message":"a","assistant_reply":"b"}"#.to_owned())
        },
    },
];

/// Returns all state that a request could change.
async fn state(app: &TestClient) -> Vec<(u16, String)> {
    let mut state = Vec::new();
    for path in ["/sessions?limit=1000", "/sessions/there/messages", "/users/there/memory"] {
        let response = app.get(path).await;
        state.push((response.status, response.text));
    }
    for index in 0..LIMITS.len() {
        state.push((0, app.get(&format!("/users/s{index}/memory")).await.text));
    }
    state
}

#[tokio::test]
async fn each_limit_accepts_its_value_and_rejects_one_more() {
    let app = TestApp::on_sqlite(SET).await;
    app.post("/sessions/there/exchanges", r#"{"user_message":"a","assistant_reply":"b"}"#).await.ok(201);
    for (index, Limit { setting, most, field, request }) in LIMITS.iter().enumerate() {
        let ask = async |size: usize| -> Response {
            let (method, path, body) = request(&format!("s{index}"), size);
            app.request(method, &path).json(body).await
        };
        let before = state(&app).await;
        let rejected = ask(most + 1).await;
        let text = if field.is_empty() {
            rejected.problem(413, "body-too-large")
        } else {
            assert_eq!(rejected.fields(), [*field], "{rejected:?}");
            rejected.json()["errors"][0]["detail"].as_str().expect("a text").to_owned()
        };
        assert!(text.contains(setting), "{text}");
        assert!(text.split(|c: char| !c.is_ascii_digit()).any(|number| number == most.to_string()), "{text}");
        assert_eq!(state(&app).await, before, "{field}: nothing is stored");
        let passed = ask(*most).await;
        assert!((200..300).contains(&passed.status), "{field} of {setting}: {passed:?}");
    }
}

#[tokio::test]
async fn all_oversized_fields_are_reported_together() {
    let app = TestApp::on_sqlite(SET).await;
    let (long, metadata) = ("x".repeat(300), "x".repeat(70));
    let body = format!(
        r#"{{"user_message":"{long}","assistant_reply":"{long}","metadata":{{"a":"{metadata}"}},"user_id":"{long}"}}"#
    );
    let mut fields = app.post("/sessions/s/exchanges", body).await.fields();
    fields.sort_unstable();
    assert_eq!(fields, ["assistant_reply", "metadata", "user_id", "user_message"]);
    let body = format!(r#"{{"user_message":"{long}","system_prompt":"{long}"}}"#);
    let mut fields = app.post("/sessions/s/context", body).await.fields();
    fields.sort_unstable();
    assert_eq!(fields, ["system_prompt", "user_message"]);
}

/// A request of more than 64 KiB is parsed and counted on other threads; the response must be the same.
#[tokio::test]
async fn large_requests_get_the_same_responses_as_small_ones() {
    let app = TestApp::on_sqlite(&[]).await;
    let large = "word ".repeat(40_000);
    let body = format!(r#"{{"user_message":"{large}","assistant_reply":"b"}}"#);
    app.post("/sessions/s/exchanges", body).await.ok(201);
    let body = format!(r#"{{"user_message":"{large}","system_prompt":"{large}"}}"#);
    let context = app.post("/sessions/s/context", body).await.ok(200);
    assert_eq!(context["messages"].as_array().map(Vec::len), Some(4));
    assert_eq!(context["messages"][0]["content"], large.as_str());
    assert!(context["tokens"]["user_message"].as_i64() > Some(40_000));
    let body = format!(r#"{{"content":"{large}"}}"#);
    assert_eq!(app.put("/users/u/memory", body).await.fields(), ["content"]);
    let body = format!(r#"{{"user_message":"{large}","surprise":1}}"#);
    assert_eq!(app.post("/sessions/s/context", body).await.fields(), ["surprise"]);
}
