//! Limits of the number and the duration of requests. Requests above a limit are rejected early with `Retry-After`.

use crate::support::app::TestApp;
use crate::support::backend::Backend;
use crate::support::client::{Response, TestClient};
use crate::support::model_server::{Behaviour, ModelServer};
use reqwest::Method;
use serde_json::{Value, json};
use sqlx::{Connection as _, PgConnection};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout};

/// The timeout for events that must happen. It is much longer than they take, so that no test fails on a busy machine.
const PATIENCE: Duration = Duration::from_secs(30);

/// Routes that are served even under overload.
const OPERATION: [&str; 3] = ["/livez", "/readyz", "/metrics"];

fn retry_after(response: &Response) -> u32 {
    response.header("retry-after").and_then(|seconds| seconds.parse().ok()).expect("a number of seconds")
}

/// Starts a service whose consolidations each wait for a permit of the semaphore. Sessions of six messages are due.
async fn held(set: &[(&str, &str)]) -> (TestApp, Backend, ModelServer, Arc<Semaphore>) {
    let (backend, model) = (Backend::sqlite().await, ModelServer::start().await);
    let released = Arc::new(Semaphore::new(0));
    model.default(Behaviour::Held(Arc::clone(&released), "Ada flies.".to_owned()));
    let limits = [("consolidation.threshold", "5"), ("consolidation.keep_recent", "2")];
    let app = TestApp::start_with_model(&backend, &model.base_url(), &[&limits, set].concat()).await;
    for session in ["a", "b", "c"] {
        app.record_turns(session, 0..3).await;
    }
    (app, backend, model, released)
}

fn ask(app: &TestClient, path: &str) -> tokio::task::JoinHandle<Response> {
    tokio::spawn(app.request(Method::POST, path).send())
}

#[tokio::test]
async fn rate_limit_rejects_with_retry_after() {
    let app = TestApp::on_sqlite(&[("limits.requests_per_second", "1"), ("limits.request_burst", "3")]).await;
    let mut passed = 0;
    let rejected = loop {
        let response = app.get("/sessions").await;
        if response.status != 200 {
            break response;
        }
        passed += 1;
    };
    assert!(passed >= 3, "the burst passes: {passed}");
    let detail = rejected.problem(429, "rate-limited");
    for part in ["1 requests per second (limits.requests_per_second)", "bursts of 3 (limits.request_burst)"] {
        assert!(detail.contains(part), "{detail}");
    }
    assert_eq!(retry_after(&rejected), 1);
    for path in OPERATION {
        assert_eq!(app.get(path).await.status, 200, "{path}");
    }
    let again = async { while app.get("/sessions").await.status != 200 {} };
    timeout(PATIENCE, again).await.expect("let in again");
    let app = TestApp::on_sqlite(&[("limits.requests_per_second", "0"), ("limits.request_burst", "1")]).await;
    for _ in 0..10 {
        app.get("/sessions").await.ok(200);
    }
}

#[tokio::test]
async fn requests_above_max_in_flight_are_rejected_immediately() {
    let (app, _backend, model, released) = held(&[("limits.max_requests_in_flight", "4")]).await;
    let under_way = ["a", "b"].map(|session| ask(&app, &format!("/sessions/{session}/context")));
    model.until_calls(2).await;
    let rejected = app.get("/sessions").await;
    let detail = rejected.problem(503, "overloaded");
    assert!(detail.contains("limits.max_requests_in_flight, limits.max_key_share"), "{detail}");
    assert_eq!(retry_after(&rejected), 1);
    // Rejected before any of the body arrives.
    for length in [100, 1_000_000] {
        let head = format!("POST /sessions/s/exchanges HTTP/1.1\r\ncontent-length: {length}");
        app.raw(&head, b"").await.problem(503, "overloaded");
    }
    for path in OPERATION {
        assert_eq!(app.get(path).await.status, 200, "{path}");
    }
    released.add_permits(2);
    for response in under_way {
        assert_eq!(response.await.expect("no panic").ok(200)["consolidation"]["outcome"], "consolidated");
    }
    app.get("/sessions/s").await.problem(404, "session-not-found");
}

/// There is one permit, and two requests wait for a model without holding it.
#[tokio::test]
async fn permit_is_released_while_waiting_for_a_model() {
    let (app, _backend, model, released) = held(&[("limits.max_concurrent_requests", "1")]).await;
    let waiting = ["/sessions/a/context", "/sessions/b/consolidations"].map(|path| ask(&app, path));
    model.until_calls(2).await;
    app.get("/sessions").await.ok(200);
    app.record_turns("c", 3..4).await;
    released.add_permits(2);
    for response in waiting {
        let response = response.await.expect("no panic");
        assert!(response.status < 300, "{response:?}");
    }
}

/// Sends `head`, then one byte every few milliseconds until the server closes the connection. Returns all that the server
/// sent.
async fn trickle(app: &TestClient, head: &str) -> String {
    let address = app.url.strip_prefix("http://").expect("an address");
    let (mut reader, mut writer) = TcpStream::connect(address).await.expect("connected").into_split();
    writer.write_all(head.as_bytes()).await.expect("sent");
    let trickling = tokio::spawn(async move {
        while writer.write_all(b"x").await.is_ok() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    });
    let mut received = Vec::new();
    // A reset is a normal end, because the server never reads the last bytes.
    let _ = timeout(PATIENCE, reader.read_to_end(&mut received)).await.expect("closed in time");
    trickling.abort();
    String::from_utf8(received).expect("UTF-8")
}

#[tokio::test]
async fn slow_request_body_is_rejected_after_read_timeout() {
    let app = TestApp::on_sqlite(&[("server.read_timeout", "300ms")]).await;
    let began = Instant::now();
    let received = trickle(&app, "GET /livez HTTP/1.1\r\nhost: x\r\nx-slow: ").await;
    assert!(!received.contains("200"), "{received}");
    let head = "POST /sessions/s/exchanges HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n";
    for length in ["content-length: 100000\r\n\r\n", "transfer-encoding: chunked\r\n\r\n186a0\r\n"] {
        let received = trickle(&app, &format!("{head}{length}")).await;
        for part in
            ["HTTP/1.1 408", "connection: close", "problem:body-timeout", "300ms (server.read_timeout)"]
        {
            assert!(received.contains(part), "{part} is not in {received}");
        }
    }
    assert!(began.elapsed() >= Duration::from_millis(900));
    // An idle client, before the first request and after it.
    for sent in ["", "GET /livez HTTP/1.1\r\nhost: x\r\n\r\n"] {
        let address = app.url.strip_prefix("http://").expect("an address");
        let mut connection = TcpStream::connect(address).await.expect("connected");
        connection.write_all(sent.as_bytes()).await.expect("sent");
        let mut received = Vec::new();
        timeout(PATIENCE, connection.read_to_end(&mut received))
            .await
            .expect("closed in time")
            .expect("read");
        assert_eq!(received.starts_with(b"HTTP/1.1 200"), !sent.is_empty());
    }
    app.get("/sessions/s").await.problem(404, "session-not-found");
}

/// Sends a request and returns the response, even if the server does not read the whole request.
async fn received(app: &TestClient, head: &str, body: &str) -> String {
    let address = app.url.strip_prefix("http://").expect("an address");
    let (mut reader, mut writer) = TcpStream::connect(address).await.expect("connected").into_split();
    let sent = format!("{head}\r\nhost: localhost\r\n\r\n{body}");
    let sending = tokio::spawn(async move {
        let _ = writer.write_all(sent.as_bytes()).await;
        writer
    });
    let mut received = Vec::new();
    let _ = timeout(PATIENCE, reader.read_to_end(&mut received)).await.expect("closed in time");
    drop(sending.await);
    String::from_utf8(received).expect("UTF-8")
}

/// The body arrives after the head, as on a network.
#[tokio::test]
async fn connection_serves_the_next_request_after_a_rejected_one() {
    let app = TestApp::on_sqlite(&[("limits.requests_per_second", "1")]).await;
    while app.get("/sessions").await.status == 200 {}
    let address = app.url.strip_prefix("http://").expect("an address");
    let mut connection = TcpStream::connect(address).await.expect("connected");
    let post = "POST /sessions/s/exchanges HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n";
    connection.write_all(format!("{post}content-length: 10000\r\n\r\n").as_bytes()).await.expect("sent");
    tokio::time::sleep(Duration::from_millis(10)).await;
    let next = "GET /livez HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n";
    connection.write_all(format!("{}{next}", "x".repeat(10_000)).as_bytes()).await.expect("sent");
    let mut received = String::new();
    timeout(PATIENCE, connection.read_to_string(&mut received)).await.expect("closed in time").expect("read");
    let statuses = received.split("HTTP/1.1 ").skip(1).filter_map(|response| response.get(..3));
    assert_eq!(statuses.collect::<Vec<_>>(), ["429", "200"], "{received}");
}

#[tokio::test]
async fn large_bodies_above_the_memory_budget_are_rejected() {
    // A client without a key gets half of the memory for bodies, which is half of the memory.
    let set = [
        ("limits.max_body_bytes", "300000"),
        ("limits.max_bytes_in_flight", "2000000"),
        ("limits.queue_timeout", "300ms"),
    ];
    let app = TestApp::on_sqlite(&set).await;
    let exchange = |bytes: usize| {
        let text = r#"{"user_message":"a","assistant_reply":"b"}"#;
        text.to_owned() + &" ".repeat(bytes - text.len())
    };
    let exchanges = "POST /sessions/s/exchanges HTTP/1.1\r\ncontent-type: application/json";
    let address = app.url.strip_prefix("http://").expect("an address");
    let mut held = TcpStream::connect(address).await.expect("connected");
    let expect = "host: localhost\r\nconnection: close\r\nexpect: 100-continue\r\n";
    let request = format!("{exchanges}\r\n{expect}content-length: 300000\r\n\r\n");
    held.write_all(request.as_bytes()).await.expect("sent");
    // The service is ready to read the body, so the body has reserved its memory.
    let mut goes_on = [0; 25];
    held.read_exact(&mut goes_on).await.expect("an answer");
    assert_eq!(&goes_on, b"HTTP/1.1 100 Continue\r\n\r\n");

    let rejected = app.raw(&format!("{exchanges}\r\ncontent-length: 200001"), b"").await;
    let detail = rejected.problem(503, "overloaded");
    assert!(detail.contains("limits.max_bytes_in_flight"), "{detail}");
    assert_eq!((retry_after(&rejected), rejected.header("connection")), (1, Some("close")));
    let chunk = format!("3a980\r\n{}", exchange(240_000));
    let lines = "POST /sessions/i/import HTTP/1.1\r\ncontent-type: application/x-ndjson";
    for head in [exchanges, lines] {
        let received = received(&app, &format!("{head}\r\ntransfer-encoding: chunked"), &chunk).await;
        assert!(received.contains(" 503 ") && received.contains("limits.max_bytes_in_flight"), "{received}");
    }
    // Bodies that fit into the remaining budget are accepted.
    for bytes in [100, 64 * 1024, 199_000] {
        app.post("/sessions/s/exchanges", exchange(bytes)).await.ok(201);
    }
    held.write_all(exchange(300_000).as_bytes()).await.expect("sent");
    let mut response = String::new();
    held.read_to_string(&mut response).await.expect("an answer");
    assert!(response.starts_with("HTTP/1.1 201"), "{response}");
    for _ in 0..3 {
        app.post("/sessions/s/exchanges", exchange(300_000)).await.ok(201);
    }
    app.get("/sessions/i").await.problem(404, "session-not-found");
}

#[tokio::test]
async fn stalled_import_is_rejected_after_read_timeout() {
    let app = TestApp::on_sqlite(&[("server.read_timeout", "300ms")]).await;
    let head =
        "POST /sessions/i/import HTTP/1.1\r\ncontent-type: application/x-ndjson\r\ncontent-length: 1000";
    let received = received(&app, head, r#"{"role":"user","content":"a"}"#).await;
    for part in ["HTTP/1.1 408", "connection: close", "300ms (server.read_timeout)"] {
        assert!(received.contains(part), "{part} is not in {received}");
    }
    app.get("/sessions/i").await.problem(404, "session-not-found");
}

const SHORT: [(&str, &str); 3] = [
    ("server.read_timeout", "500ms"),
    ("consolidation.inline_wait", "500ms"),
    ("server.request_timeout", "1s"),
];

#[tokio::test]
async fn request_timeout_returns_504_and_consolidation_continues() {
    let (app, _backend, model, released) = held(&SHORT).await;
    let detail = app.post("/sessions/a/consolidations", "").await.problem(504, "timeout");
    assert!(detail.contains("1s (server.request_timeout)"), "{detail}");
    assert_eq!(model.calls().len(), 1);
    released.add_permits(1);
    let done = async { while app.get("/sessions/a").await["cursor"] == 0 {} };
    timeout(PATIENCE, done).await.expect("the consolidation went on");
    assert_eq!(model.calls().len(), 1);
}

/// The client does not know if the exchange was stored. Repeating the request with the same key returns the response.
#[tokio::test]
async fn write_on_postgres_completes_after_its_request_timed_out() {
    let backend = Backend::postgres().await;
    let app = TestApp::start(&backend, &SHORT).await;
    app.record_turns("s", 0..1).await;
    let Backend::Postgres(database) = &backend else { unreachable!() };
    let mut other = PgConnection::connect(&database.admin_url()).await.expect("connected");
    let mut lock = other.begin().await.expect("begun");
    sqlx::query("SELECT FROM sessions FOR UPDATE").execute(&mut *lock).await.expect("locked");
    let body: Value = json!({ "user_message": "a", "assistant_reply": "b" });
    let write =
        || app.request(Method::POST, "/sessions/s/exchanges").header("idempotency-key", "k").json(&body);
    write().await.problem(504, "timeout");
    lock.rollback().await.expect("rolled back");
    let there = async { while app.get("/sessions/s").await["last_seq"] != 4 {} };
    timeout(PATIENCE, there).await.expect("the exchange is there, whole");
    let again = write().await;
    assert_eq!(again.ok(201)["last_seq"], 4);
    assert!(again.is_replay());
}
