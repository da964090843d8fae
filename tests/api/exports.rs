//! `GET /sessions/{session_id}/export` and `POST /sessions/{session_id}/import`

use crate::support::app::TestApp;
use crate::support::backend::Backend;
use crate::support::client::{Response, TestClient, assert_includes};
use futures_util::{StreamExt as _, stream};
use precis::domain::exchange::Exchange;
use precis::domain::id::{SessionId, TenantId};
use precis::domain::message::{Message, Role};
use precis::service::Error;
use precis::service::export::Export;
use precis::storage::AppendRequest;
use reqwest::{Body, Method};
use serde_json::{Value, json};
use std::fmt::Write as _;
use test_case::test_case;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

/// Small limits, so that a few turns cause consolidations and meta-consolidations.
const SET: &[(&str, &str)] = &[
    ("consolidation.threshold", "10"),
    ("consolidation.keep_recent", "4"),
    ("consolidation.summary_word_limit", "30"),
];

async fn export(app: &TestClient, session: &str) -> String {
    let response = app.get(&format!("/sessions/{session}/export")).await;
    assert_eq!(
        (response.status, response.header("content-type")),
        (200, Some("application/x-ndjson")),
        "{response}"
    );
    assert!(response.text.ends_with("}}\n"), "{response}");
    response.text
}

async fn import(app: &TestClient, session: &str, lines: impl Into<Body>) -> Response {
    let request = app.request(Method::POST, &format!("/sessions/{session}/import"));
    request.header("content-type", "application/x-ndjson").body(lines.into()).await
}

/// A session with messages of all kinds, consolidations, meta-consolidations, a restore and an edit.
async fn fill(app: &TestClient, session: &str) {
    let odd = r#"{"messages":[
        {"x-n":1.0,"role":"user","content":"a \u0022question\u0022 \u0000 <é>\u2028","big":12345678901234567890123},
        {"role":"assistant","content":null,"tool_calls":[{"id":"a\u0000","type":"function","function":{"name":"f","arguments":"{}"}}]},
        {"role":"tool","tool_call_id":"a\u0000","content":[{"type":"text","text":"done"},{"type":"image_url","image_url":{"url":"u"}}]},
        {"role":"assistant","content":""}],"user_id":"ada lovelace","metadata":{"z":1.0,"a":[null]}}"#;
    app.post(&format!("/sessions/{session}/exchanges"), odd).await.ok(201);
    for turns in [0..8, 8..16, 16..24] {
        app.record_turns(session, turns).await;
        let context = app.context(session, &json!({})).await;
        assert_eq!(context["consolidation"]["outcome"], "consolidated");
    }
    app.post(&format!("/sessions/{session}/revisions/1/restore"), "").await.ok(201);
    let summary = app.get(&format!("/sessions/{session}")).await["summary"].clone();
    let edit = json!({"summary": " An edited summary.\n", "based_on": summary["revision"]});
    app.post(&format!("/sessions/{session}/revisions"), edit).await.ok(201);
    app.post(&format!("/sessions/{session}/consolidations"), "").await.ok(201);
    app.record_turns(session, 24..26).await;
    let revisions = app.get(&format!("/sessions/{session}/revisions")).await;
    let revisions = revisions["items"].as_array().expect("a list");
    assert!(revisions.len() >= 5 && revisions.iter().any(|revision| !revision["meta"].is_null()));
}

/// Returns the header of an export as JSON, and its lines without the header and the end.
fn parts(export: &str) -> (Value, Vec<&str>) {
    let mut lines: Vec<_> = export.lines().collect();
    lines.pop();
    (serde_json::from_str(lines.remove(0)).expect("JSON"), lines)
}

/// Returns all state of a session that the API shows, without the session id.
async fn state(app: &TestClient, session: &str) -> Vec<String> {
    let mut responses = Vec::new();
    for path in ["", "/messages?limit=1000", "/revisions?limit=1000"] {
        responses.push(app.get(&format!("/sessions/{session}{path}")).await.text);
    }
    for body in
        [r#"{"mode":"off"}"#, r#"{"mode":"off","system_prompt":"Be kind.","user_message":"And now?"}"#]
    {
        responses.push(app.post(&format!("/sessions/{session}/context"), body).await.text);
    }
    let id = format!("\"session_id\":\"{session}\"");
    responses.iter().map(|text| text.replace(&id, "")).collect()
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn export_and_import_preserve_the_session(backend: Backend) {
    let app = TestApp::start(&backend, SET).await;
    fill(&app, "s").await;
    let first = export(&app, "s").await;
    let (header, lines) = parts(&first);
    assert_eq!(header["session"]["user_id"], "ada lovelace");
    // Import under another id in the same database.
    let response = import(&app, "copy", first.clone()).await.ok(201);
    assert_includes(&response, &json!({"session_id": "copy", "user_id": "ada lovelace"}));
    assert_includes(&response, &json!({"messages": header["messages"], "last_seq": header["messages"]}));
    let second = export(&app, "copy").await;
    let (mut copied, copied_lines) = parts(&second);
    assert_eq!(copied["session"]["session_id"].take(), "copy");
    copied["session"]["session_id"] = json!("s");
    assert_eq!((copied, copied_lines), (header, lines));
    assert_eq!(state(&app, "copy").await, state(&app, "s").await);
    // Import under the same id into the other kind of store.
    let other = match backend {
        Backend::Sqlite(_) => Backend::postgres().await,
        Backend::Postgres(_) => Backend::sqlite().await,
    };
    let elsewhere = TestApp::start(&other, SET).await;
    import(&elsewhere, "s", first.clone()).await.ok(201);
    assert_eq!(export(&elsewhere, "s").await, first);
    assert_eq!(state(&elsewhere, "s").await, state(&app, "s").await);
    // Both sessions continue in the same way.
    for app in [&app, &elsewhere] {
        app.record_turns("s", 26..34).await;
        assert_eq!(app.context("s", &json!({})).await["consolidation"]["outcome"], "consolidated");
    }
    let summary = async |app: &TestClient| app.get("/sessions/s").await["summary"].clone();
    assert_eq!(summary(&elsewhere).await, summary(&app).await);
    // The repeated import of an earlier export succeeds. A session of another user is not changed.
    assert_eq!(import(&app, "s", first.clone()).await.ok(200)["messages"], 56);
    let request = app.request(Method::POST, "/sessions/theirs/import?user_id=bo");
    let response = request.header("content-type", "application/jsonl").body(first.clone()).await.ok(201);
    assert_eq!(response["user_id"], "bo");
    import(&app, "theirs", first).await.problem(409, "session-exists");
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn repeated_import_succeeds_and_changes_no_other_session(backend: Backend) {
    let app = TestApp::start(&backend, SET).await;
    let lines =
        "{\"role\":\"user\",\"content\":\"a\",\"at\":1.0}\n\n{\"role\":\"assistant\",\"content\":\"b\"}\n";
    let response = import(&app, "s", lines).await.ok(201);
    assert_eq!(
        response,
        json!({"session_id": "s", "user_id": "default", "messages": 2, "revisions": 0, "last_seq": 2, "cursor": 0})
    );
    let first = app.get("/sessions/s/messages").await;
    assert_eq!(first["items"][0]["message"], json!({"role": "user", "content": "a", "at": 1.0}));
    assert_eq!(import(&app, "s", lines).await.ok(200), response);
    // The import is also recognised after further exchanges, and without the last line feed.
    app.record_turns("s", 0..1).await;
    assert_eq!(import(&app, "s", lines.trim_end()).await.ok(200)["last_seq"], 4);
    for other in [lines.replace("\"a\"", "\"A\""), format!("{lines}{lines}{lines}")] {
        import(&app, "s", other).await.problem(409, "session-exists");
    }
    assert_eq!(app.get("/sessions/s").await["last_seq"], 4);
    app.delete("/sessions/s").await.ok(204);
    import(&app, "s", lines).await.ok(201);
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn import_of_messages_preserves_their_times(backend: Backend) {
    let app = TestApp::start(&backend, SET).await;
    let lines = [
        r#"{"role":"user","content":"a","created_at":"2020-02-03T05:06:07.5+01:00"}"#,
        r#"{"role":"assistant","content":"b","created_at":1580702400}"#,
        r#"{"role":"user","content":"c","created_at":null}"#,
        r#"{"role":"assistant","content":"d"}"#,
    ];
    let started_at = OffsetDateTime::now_utc().format(&Rfc3339).expect("a time");
    import(&app, "s", lines.join("\n")).await.ok(201);
    let messages = app.get("/sessions/s/messages").await;
    let time = |index: usize| messages["items"][index]["created_at"].as_str().expect("a time");
    assert_eq!((time(0), time(1)), ("2020-02-03T04:06:07.5Z", "2020-02-03T04:00:00Z"));
    let now = &started_at[..19];
    assert!(&time(2)[..19] >= now && &time(3)[..19] >= now, "{messages:?}");
    assert!(lines.iter().all(|line| messages.text.contains(line)), "{messages:?}");
    assert!(app.get("/sessions/s").await["created_at"].as_str() >= Some(now));
    import(&app, "s", lines.join("\n")).await.ok(200);
    import(&app, "copy", export(&app, "s").await).await.ok(201);
    assert_eq!(app.get("/sessions/copy/messages").await.text, messages.text);
    for (index, time) in [r#""2999-01-01T00:00:00Z""#, r#""yesterday""#, "true"].iter().enumerate() {
        let line = format!(r#"{{"role":"user","content":"a","created_at":{time}}}"#);
        import(&app, &format!("t{index}"), line).await.ok(201);
        let page = app.get(&format!("/sessions/t{index}/messages")).await;
        let stored = page["items"][0]["created_at"].as_str().expect("a time");
        let end = OffsetDateTime::now_utc().format(&Rfc3339).expect("a time");
        assert!((&*started_at..=&*end).contains(&stored), "{time}: {stored}");
    }
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn interrupted_import_writes_nothing_and_can_be_repeated(backend: Backend) {
    let app = TestApp::start(&backend, SET).await;
    fill(&app, "s").await;
    let lines = export(&app, "s").await;
    for kept in [0, 1, lines.len() / 2, lines.len() - 1] {
        let sent = lines.as_bytes()[..kept].to_vec();
        let broken = stream::iter([Ok(sent), Err(std::io::Error::other("disconnected"))]);
        let request = app.request(Method::POST, "/sessions/copy/import");
        let request = request.header("content-type", "application/x-ndjson");
        request.body(Body::wrap_stream(broken)).unchecked().await.expect_err("broken off");
        // A complete request with an incomplete export.
        let response = import(&app, "copy", lines.as_bytes()[..kept].to_vec()).await;
        if kept < lines.len() - 1 {
            assert!(response.fields()[0].starts_with("line "), "{response:?}");
            app.get("/sessions/copy").await.problem(404, "session-not-found");
            assert_eq!(app.get("/sessions").await["items"].as_array().map(Vec::len), Some(1));
        } else {
            // Only the last line feed is missing.
            response.ok(201);
        }
    }
    import(&app, "copy", lines).await.ok(200);
}

/// Returns short messages that are generated while they are sent.
fn generated(messages: usize) -> Body {
    let chunk = move |first: usize| {
        let mut lines = String::new();
        for seq in first..(first + 1000).min(messages) {
            let role = if seq % 2 == 0 { "user" } else { "assistant" };
            writeln!(lines, r#"{{"role":"{role}","content":"Message {seq}."}}"#).expect("a String");
        }
        Ok::<_, std::io::Error>(lines)
    };
    Body::wrap_stream(stream::iter((0..messages).step_by(1000).map(chunk)))
}

/// The import is larger than the limit of other request bodies.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn session_of_many_messages_is_imported_and_exported(backend: Backend) {
    const MESSAGES: usize = 10_000;
    let app = TestApp::start(&backend, &[("limits.max_body_bytes", "1000")]).await;
    assert_eq!(import(&app, "s", generated(MESSAGES)).await.ok(201)["last_seq"], MESSAGES);
    let response = app.get("/sessions/s/export").unchecked().await.expect("a response");
    let mut body = response.bytes_stream();
    let (mut lines, mut last) = (0, Vec::new());
    while let Some(chunk) = body.next().await {
        let chunk = chunk.expect("a complete export");
        lines += chunk.split(|byte| *byte == b'\n').count() - 1;
        last.extend_from_slice(&chunk);
        last.drain(..last.len().saturating_sub(200));
    }
    assert_eq!(lines, MESSAGES + 2);
    let last = String::from_utf8(last).expect("UTF-8");
    assert!(last.contains("{\"end\":{\"messages\":10000,\"revisions\":0,\"sha256\":"), "{last}");
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn export_of_a_session_erased_meanwhile_has_no_last_line(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    app.get("/sessions/s/export").await.problem(404, "session-not-found");
    let (store, tenant) = (backend.store().await, TenantId::default());
    let session = SessionId::new("s").expect("valid");
    for anew in [false, true] {
        for pieces in 0..=2 {
            app.record_turns("s", 0..2).await;
            let mut export = Export::begin(store.clone(), &tenant, &session).await.expect("begun");
            for _ in 0..pieces {
                export.next().await.expect("it is there").expect("lines");
            }
            app.delete("/sessions/s").await.ok(204);
            if anew {
                app.record_turns("s", 0..3).await;
            }
            let ended = loop {
                match export.next().await {
                    Ok(Some(lines)) => assert!(!lines.contains("\"end\"")),
                    other => break other,
                }
            };
            assert!(matches!(ended, Err(Error::SessionNotFound)), "{ended:?}");
            let _ = app.delete("/sessions/s").await;
        }
    }
}

/// Returns a message whose JSON has this size.
fn message_of(bytes: usize) -> String {
    let around = r#"{"role":"user","content":""}"#.len();
    format!(r#"{{"role":"user","content":"{}"}}"#, "x".repeat(bytes - around))
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn import_enforces_the_limits_of_an_exchange(backend: Backend) {
    let set = [
        ("limits.max_message_bytes", "300"),
        ("limits.max_metadata_bytes", "70"),
        ("limits.max_body_bytes", "500"),
    ];
    let app = TestApp::start(&backend, &set).await;
    let metadata = format!(r#"{{"a":"{}"}}"#, "x".repeat(62));
    let (largest, larger) = (message_of(300), message_of(301));
    let body = format!(r#"{{"messages":[{largest}],"metadata":{metadata}}}"#);
    app.post("/sessions/s/exchanges", body).await.ok(201);
    // An export can be imported under the same settings.
    let lines = export(&app, "s").await;
    import(&app, "copy", lines.clone()).await.ok(201);
    // White space between tokens is not stored and does not count.
    let spaced = largest.replace("\":\"", "\" :\t\"");
    assert_ne!(spaced, largest);
    import(&app, "spaced", spaced).await.ok(201);
    for (lines, field, setting, bytes, most) in [
        (format!("{largest}\n{larger}"), "line 2", "limits.max_message_bytes", 301, 300),
        (lines.replace(&largest, &larger), "line 2, message", "limits.max_message_bytes", 301, 300),
        (
            lines.replace(&metadata, &metadata.replace('a', "aa")),
            "line 1, session.metadata",
            "limits.max_metadata_bytes",
            71,
            70,
        ),
    ] {
        let rejected = import(&app, "new", lines).await;
        assert_eq!(rejected.fields(), [field], "{rejected:?}");
        let detail = rejected.json()["errors"][0]["detail"].as_str().unwrap_or_default().to_owned();
        assert_eq!(detail, format!("has {bytes} bytes, at most {most} are allowed ({setting}): shorten it"));
        app.get("/sessions/new").await.problem(404, "session-not-found");
    }
}

/// The memory of a client never has room for such a line, so "try again" would be wrong.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn line_that_is_larger_than_the_memory_of_a_client_is_rejected_for_good() {
    let backend = Backend::sqlite().await;
    let limits = [
        ("limits.max_message_bytes", "1048576"),
        ("limits.max_body_bytes", "1048576"),
        ("limits.max_bytes_in_flight", "4194304"),
    ];
    let app = TestApp::start(&backend, &limits).await;
    for bytes in [1_000_000, 2_000_000] {
        let errors = import(&app, "s", message_of(bytes)).await;
        errors.problem(422, "invalid-input");
        let detail = "has more than 917504 bytes, the most of a line: shorten it";
        assert_eq!(errors.json()["errors"], json!([{"field": "line 1", "detail": detail}]));
    }
    assert_eq!(import(&app, "s", message_of(900_000)).await.status, 201);
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn too_large_import_is_rejected(backend: Backend) {
    let app = TestApp::start(&backend, &[("limits.max_import_bytes", "1000")]).await;
    // The line feed counts, too.
    let lines = |bytes: usize| format!("{}\n{}", message_of(499), message_of(bytes - 500)).into_bytes();
    let streamed = |lines: Vec<u8>| {
        let chunks: Vec<_> = lines.chunks(100).map(|chunk| Ok::<_, std::io::Error>(chunk.to_vec())).collect();
        Body::wrap_stream(stream::iter(chunks))
    };
    for rejected in [import(&app, "s", lines(1001)).await, import(&app, "s", streamed(lines(1001))).await] {
        let detail = rejected.problem(413, "body-too-large");
        assert!(detail.contains("1000 bytes (limits.max_import_bytes)"), "{detail}");
    }
    // Rejected by its Content-Length before any of it is sent.
    let head =
        "POST /sessions/s/import HTTP/1.1\r\ncontent-type: application/x-ndjson\r\ncontent-length: 1001";
    app.raw(head, b"").await.problem(413, "body-too-large");
    app.get("/sessions/s").await.problem(404, "session-not-found");
    import(&app, "s", lines(1000)).await.ok(201);
    import(&app, "streamed", streamed(lines(1000))).await.ok(201);
}

/// After the beginning of the body, only a closed connection tells the client that the export is incomplete.
#[tokio::test]
async fn failing_export_closes_the_connection() {
    let backend = Backend::sqlite().await;
    let app = TestApp::start(&backend, &[]).await;
    let (store, session) = (backend.store().await, SessionId::new("s").expect("valid"));
    // More than the buffers between service and client can hold.
    let long = "x".repeat(4 << 20);
    for _ in 0..5 {
        let messages = vec![(Message::text(Role::User, &long), 1)];
        let exchange = Exchange { messages, ..Exchange::default() };
        let request = AppendRequest::new(&TenantId::default(), &session, exchange, None);
        store.append_exchange(request).await.expect("stored");
    }
    let response = app.get("/sessions/s/export").unchecked().await.expect("a response");
    let mut body = response.bytes_stream();
    body.next().await.expect("a beginning").expect("sound");
    app.delete("/sessions/s").await.ok(204);
    let mut broken = false;
    while let Some(chunk) = body.next().await {
        broken |= chunk.is_err();
    }
    assert!(broken);
}

#[tokio::test]
async fn invalid_lines_are_reported_and_write_nothing() {
    let app = TestApp::on_sqlite(&[]).await;
    let good = r#"{"role":"user","content":"a"}"#;
    let deep = format!(r#"{{"role":"user","content":"x","d":{}{}}}"#, "[".repeat(120), "]".repeat(120));
    for (lines, field) in [
        (String::new(), "line 1"),
        ("\n\n".to_owned(), "line 1"),
        ("[]".to_owned(), "line 1"),
        (format!("{good}\n{good}\nnothing"), "line 3"),
        (format!("{good}\n{{\"role\":\"robot\",\"content\":\"x\"}}"), "line 2, role"),
        (format!("{good}\n{deep}"), "line 2"),
        (format!("{good}\n\n{{\"role\":\"user\",\"content\":\"\\ud80\"}}"), "line 3"),
        (format!("{good}\n{{\"precis_export\":1}}"), "line 2"),
        (r#"{"precis_export":2}"#.to_owned(), "line 1, session"),
        (format!(r#"{{"role":"user","content":"{}"#, "x".repeat(10_000)), "line 1"),
    ] {
        assert_eq!(import(&app, "s", lines.clone()).await.fields(), [field], "{lines}");
        app.get("/sessions/s").await.problem(404, "session-not-found");
    }
    assert_eq!(import(&app, "s", vec![0xff]).await.fields(), ["line 1"]);
    let plain = app.request(Method::POST, "/sessions/s/import").body(good);
    assert!(plain.await.problem(415, "unsupported-media-type").contains("application/x-ndjson"));
    let request = app.request(Method::POST, "/sessions/s/import?user_id=&x=1");
    let response = request.header("content-type", "application/x-ndjson").body(good).await;
    assert_eq!(response.fields(), ["user_id", "x"]);
}
