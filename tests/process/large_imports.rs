//! Imports of many messages on SQLite, which has a single writer: others write meanwhile, and a crash leaves nothing behind.

use crate::service::{Precis, Process, SOON};
use crate::support::backend::Backend;
use crate::support::client::{Response, TestClient};
use reqwest::Method;
use serde_json::{Value, json};
use sqlx::{Connection as _, SqliteConnection};
use std::fmt::Write as _;
use std::time::Duration;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};

const MESSAGES: u32 = 15_000;

pub(crate) async fn count(backend: &Backend, sql: &'static str) -> i64 {
    let mut connection = SqliteConnection::connect(&backend.url()).await.expect("connected");
    sqlx::query_scalar(sql).fetch_one(&mut connection).await.expect(sql)
}

/// Returns the number of messages that are stored and not published.
async fn hidden(backend: &Backend) -> i64 {
    const COUNT_HIDDEN: &str =
        "SELECT count(*) FROM messages AS m JOIN sessions AS s USING (tenant_id, session_id)
        WHERE s.last_seq = 0";
    count(backend, COUNT_HIDDEN).await
}

async fn import(client: TestClient) -> Response {
    let mut lines = String::new();
    for index in 0..MESSAGES {
        let role = if index % 2 == 0 { "user" } else { "assistant" };
        let _ =
            writeln!(lines, r#"{{"role":"{role}","content":"Message {index} about the ferry at nine."}}"#);
    }
    let request = client.request(Method::POST, "/sessions/large/import");
    request.header("content-type", "application/x-ndjson").body(lines).await
}

/// Starts an import, and waits until a part of its messages is stored.
async fn begin_import(service: &Process, backend: &Backend) -> JoinHandle<Response> {
    let client: &TestClient = service;
    let import = tokio::spawn(import(client.clone()));
    while hidden(backend).await == 0 {
        assert!(!import.is_finished(), "the import is one transaction");
        sleep(Duration::from_millis(5)).await;
    }
    import
}

pub(crate) async fn exchange(service: &Process, session: &str) -> Response {
    let body = json!({"user_message": "a", "assistant_reply": "b"});
    service.post(&format!("/sessions/{session}/exchanges"), body).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn others_write_during_a_large_import_and_see_no_part_of_it() {
    let backend = Backend::sqlite().await;
    let service = Precis::on(&backend).start().await;
    let import = begin_import(&service, &backend).await;
    let mut written = 0;
    loop {
        exchange(&service, "small").await.ok(201);
        let seen = service.get("/sessions/large").await;
        let listed = service.get("/sessions").await.ok(200);
        let context = service.post("/sessions/large/context", "").await.ok(200);
        let added = exchange(&service, "large").await;
        // Each of these was before the publication if the session is still hidden.
        if hidden(&backend).await == 0 {
            break;
        }
        written += 1;
        seen.problem(404, "session-not-found");
        assert_eq!(listed["items"].as_array().map(Vec::len), Some(1), "{listed}");
        assert_eq!(context["exists"], false);
        assert!(context["messages"].as_array().is_some_and(Vec::is_empty), "a part of the import is visible");
        added.problem(409, "session-importing");
    }
    // If exchanges had to wait for the whole import, the first one would end after it.
    assert!(written >= 2, "{written} exchanges during the import");
    let imported = import.await.expect("no panic").ok(201);
    assert_eq!(imported["messages"], MESSAGES);
    assert!(exchange(&service, "large").await.ok(201)["first_seq"].as_u64() > Some(u64::from(MESSAGES)));
    let found: Value = service.get("/search?q=ferry&limit=1&session_id=large").await.ok(200);
    assert_eq!(found["items"].as_array().map(Vec::len), Some(1), "{found}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn import_that_was_killed_leaves_nothing_and_can_be_repeated() {
    let backend = Backend::sqlite().await;
    let mut service = Precis::on(&backend).start().await;
    let import_task = begin_import(&service, &backend).await;
    service.signal("KILL");
    let _ = service.ended().await;
    drop(import_task);
    let service = Precis::on(&backend).start().await;
    service.get("/sessions/large").await.problem(404, "session-not-found");
    assert_eq!(import((*service).clone()).await.ok(201)["messages"], MESSAGES);
    assert_eq!(count(&backend, "SELECT count(*) FROM messages").await, i64::from(MESSAGES));
    assert_eq!(count(&backend, "SELECT count(*) FROM sessions WHERE import_until IS NOT NULL").await, 0);
    assert_eq!(import((*service).clone()).await.ok(200)["messages"], MESSAGES);

    // Without another import, the session can be used again a few seconds later.
    service.delete("/sessions/large").await.ok(204);
    let import_task = begin_import(&service, &backend).await;
    let mut service = service;
    service.signal("KILL");
    let _ = service.ended().await;
    drop(import_task);
    let service = Precis::on(&backend).start().await;
    let since = Instant::now();
    loop {
        let response = exchange(&service, "large").await;
        if response.status == 201 {
            assert_eq!(response.ok(201)["first_seq"], 1);
            break;
        }
        response.problem(409, "session-importing");
        assert!(since.elapsed() < SOON, "the session is locked");
        sleep(Duration::from_millis(100)).await;
    }
    assert_eq!(count(&backend, "SELECT count(*) FROM messages").await, 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn second_import_of_a_session_is_rejected_during_the_first() {
    let backend = Backend::sqlite().await;
    let service = Precis::on(&backend).start().await;
    let first = begin_import(&service, &backend).await;
    let line = r#"{"role":"user","content":"a"}"#;
    let second = service.request(Method::POST, "/sessions/large/import");
    let second = second.header("content-type", "application/x-ndjson").body(line).await;
    second.problem(409, "session-importing");
    exchange(&service, "small").await.ok(201);
    let fork = service.post("/sessions/small/fork", json!({"through_seq": 1, "new_id": "large"})).await;
    fork.problem(409, "session-importing");
    assert!(!first.is_finished(), "the requests have waited for the import");
    assert_eq!(first.await.expect("no panic").ok(201)["messages"], MESSAGES);
    assert_eq!(import((*service).clone()).await.ok(200)["messages"], MESSAGES);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn erasure_ends_an_import() {
    let backend = Backend::sqlite().await;
    let service = Precis::on(&backend).start().await;
    let import = begin_import(&service, &backend).await;
    service.delete("/sessions/large").await.ok(204);
    import.await.expect("no panic").problem(404, "session-not-found");
    assert_eq!(count(&backend, "SELECT count(*) FROM messages").await, 0);
    assert_eq!(count(&backend, "SELECT count(*) FROM sessions").await, 0);
}
