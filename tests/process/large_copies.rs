//! Forks of large sessions on SQLite, which have several transactions: a crash leaves nothing that is visible.

use crate::large_imports::count;
use crate::service::{Precis, SOON};
use crate::support::backend::Backend;
use crate::support::client::{Response, TestClient};
use serde_json::json;
use std::time::Duration;
use tokio::time::{Instant, sleep};

const COUNT_COPIED: &str = "SELECT count(*) FROM messages WHERE session_id = 'copy'";
const COUNT_SESSIONS: &str = "SELECT count(*) FROM sessions WHERE session_id = 'copy' AND last_seq > 0";
const MESSAGES: i64 = 20;

async fn fork(client: TestClient) -> Response {
    let body = json!({"through_seq": MESSAGES, "new_id": "copy"});
    client.post("/sessions/large/fork", body).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fork_that_was_killed_leaves_nothing_and_can_be_repeated() {
    let backend = Backend::sqlite().await;
    let mut service = Precis::on(&backend).start().await;
    let text = "x".repeat(1_100_000);
    for _ in 0..MESSAGES {
        let message = json!({"role": "user", "content": text});
        service.post("/sessions/large/exchanges", json!({"messages": [message]})).await.ok(201);
    }
    let client: &TestClient = &service;
    let forking = tokio::spawn(fork(client.clone()));
    while count(&backend, COUNT_COPIED).await == 0 {
        sleep(Duration::from_millis(1)).await;
    }
    service.signal("KILL");
    let _ = service.ended().await;
    forking.abort();
    assert_eq!(count(&backend, COUNT_SESSIONS).await, 0, "the fork has ended before the signal");
    let service = Precis::on(&backend).start().await;
    service.get("/sessions/copy").await.problem(404, "session-not-found");
    let since = Instant::now();
    while count(&backend, COUNT_COPIED).await > 0 {
        assert!(since.elapsed() < SOON, "the start leaves the rows of the copy");
        sleep(Duration::from_millis(20)).await;
    }
    fork((*service).clone()).await.ok(201);
    assert_eq!(count(&backend, COUNT_COPIED).await, MESSAGES);
}
